"""Write the tables of README.md and docs/results from the results that docs/results/data keeps.

    python -m tools.make_results

A file there is what ``fedmq compare FILE --json`` prints. Its table stands on a page between the lines ``<!-- table:
NAME; columns: mean_r1, chosen; rows: fedavg, rcsr -->`` and ``<!-- end -->``; the text around it is written by
hand. Columns and rows are optional, and a metric's column is followed by its differences. ``; short`` leaves out the
command and the notes. ``<!-- course: NAME; merges: 0, 5, 10 -->`` shows the first metric after these merges instead.
``make static`` fails if a page differs from what this command writes.
"""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated

from pydantic import BaseModel, BeforeValidator

from fedmq.experiments.tables import Grid, markdown_cell, markdown_text

ROOT = Path(__file__).parent.parent
DATA = ROOT / "docs" / "results" / "data"
#: Longest line of a note, in characters.
WIDTH = 116
_TABLE = re.compile(
    r"(?P<begin><!-- table: (?P<name>\w+)(?:; columns: (?P<columns>[^;]+?))?(?:; rows: (?P<rows>[^;]+?))?"
    r"(?P<short>; short)? -->\n).*?(?P<end><!-- end -->)",
    re.DOTALL,
)
_COURSE = re.compile(
    r"(?P<begin><!-- course: (?P<name>\w+); merges: (?P<merges>[\d, ]+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL
)
#: Options that say how the runs were executed, not what was run.
_EXECUTION = re.compile(r" --(json|quiet|jobs \d+)\b")


class Run(BaseModel):
    """One run of a kept result."""

    name: str
    seed: int
    course: tuple[tuple[int, float], ...]  # merges, and the first metric after them


class Kept(BaseModel):
    """What a page shows of a kept result."""

    command: Annotated[str, BeforeValidator(lambda text: _EXECUTION.sub("", text))]
    table: Grid
    runs: tuple[Run, ...]


def table(kept: Kept, columns: list[str], rows: list[str], *, short: bool) -> str:
    """A kept table in Markdown, with the command and the notes; a short one has neither.

    Args:
        kept: the result.
        columns: heads of the columns to show, all if empty.
        rows: names of the rows to show, all if empty.
        short: whether only the table is shown.

    Raises:
        ValueError: the result has no such column or row.
    """
    head, body = kept.table.head, kept.table.body
    if unknown := {*columns} - {*head} | {*rows} - {line[0].text for line in body}:
        raise ValueError(f"no {', '.join(sorted(unknown))} in the result of {kept.command}")
    # A column of differences belongs to the metric before it.
    metric = [head[place - (name == "difference")] for place, name in enumerate(head)]
    places = [0, *(place for place in range(1, len(head)) if not columns or metric[place] in columns)]
    lines = ["| " + " | ".join(markdown_cell(head[place]) for place in places) + " |", "|---" * len(places) + "|"]
    for line in body:
        if not rows or line[0].text in rows:
            cells = [(_brief(markdown_cell(line[place].text)), line[place].best) for place in places]
            lines.append("| " + " | ".join(f"**{text}**" if best else text for text, best in cells) + " |")
    if short:
        return "\n" + "\n".join(lines) + "\n\n"
    notes = [
        textwrap.fill(markdown_text(note), WIDTH, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
        for note in kept.table.notes
    ]
    return "\n".join([f"\n    {kept.command}\n", *lines, "", *notes, "\n"])


def course(kept: Kept, merges: list[int]) -> str:
    """The first metric of each row after some merges, in Markdown: mean over seeds, and sample standard deviation.

    Raises:
        ValueError: no run was evaluated after one of the numbers of merges.
    """
    lines = ["| merges | " + " | ".join(map(str, merges)) + " |", "|" + "---|" * (len(merges) + 1)]
    for name in dict.fromkeys(run.name for run in kept.runs if len(run.course) > 1):
        over = [dict(run.course) for run in kept.runs if run.name == name]
        if missing := [at for at in merges if any(at not in values for values in over)]:
            raise ValueError(f"{name} was not evaluated after {missing[0]} merges")
        columns = [[values[at] for values in over] for at in merges]
        cells = [f"{mean(each):.4f}" + (f" ± {stdev(each):.4f}" if len(each) > 1 else "") for each in columns]
        lines.append(f"| {markdown_cell(name)} | {_brief(' | '.join(cells))} |")
    return "\n" + "\n".join(lines) + "\n\n"


def _brief(text: str) -> str:
    """A cell with numbers below 1 without the leading zero, and a learning rate as ``rate``, to fit into a line."""
    return re.sub(r"\b0\.(?=\d{4,5}\b)", ".", text.replace("learning_rate=", "rate="))


def pages() -> dict[Path, str]:
    """The pages with tables, as they should be."""

    def read(match: re.Match[str]) -> Kept:
        return Kept.model_validate(json.loads((DATA / f"{match['name']}.json").read_text(encoding="utf-8")))

    def filled(match: re.Match[str]) -> str:
        columns, rows = (re.findall(r"[^,\s][^,]*", match[key] or "") for key in ("columns", "rows"))
        return match["begin"] + table(read(match), columns, rows, short=bool(match["short"])) + match["end"]

    def drawn(match: re.Match[str]) -> str:
        return match["begin"] + course(read(match), [int(at) for at in match["merges"].split(",")]) + match["end"]

    found = {path: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *DATA.parent.glob("*.md"))}
    return {
        path: _COURSE.sub(drawn, _TABLE.sub(filled, text)) for path, text in found.items() if "<!-- end -->" in text
    }


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
