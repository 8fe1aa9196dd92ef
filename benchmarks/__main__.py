"""Command line of the benchmarks: ``python -m benchmarks [--only A,B] [--json FILE]``, names as in ``BENCHMARKS``."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import blockwise, delta, hamming, rounds, soak, startup, vit, whole
from benchmarks.measure import Number, Result, load_average, machine

BENCHMARKS: Mapping[str, Callable[[], Result]] = {
    "delta": delta.run,
    "rounds": rounds.run,
    "startup": startup.run,
    "hamming": hamming.run,
    "loop": whole.run,
    "vit": vit.run,
    "blockwise": blockwise.run,
    "soak": soak.run,
}
#: Run only if named by ``--only``: they take minutes each.
LONG = ("soak", "vit", "blockwise")


def _names(text: str) -> list[str]:
    chosen = text.split(",")
    for name in chosen:
        if name not in BENCHMARKS:
            raise argparse.ArgumentTypeError(f"found {name}, allowed: {', '.join(BENCHMARKS)}")
    return chosen


def _cell(number: Number) -> str:
    text = f"{number.value:.4g} {number.unit}"
    return text if number.low is None or number.high is None else f"{text} ({number.low:.4g} to {number.high:.4g})"


def _table(result: Result) -> Table:
    table = Table("measured", "median (min to max)", "target", title=result.name, title_justify="left")
    for number in result.numbers:
        table.add_row(number.name, _cell(number), number.aim)
    before, after = result.load
    table.caption = "; ".join((*result.notes, f"load average {before:.1f} before, {after:.1f} after"))
    table.caption_justify = "left"
    return table


def main() -> None:
    """Run the chosen benchmarks; print a table of each, then all results as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure fedmq on this machine.")
    parser.add_argument(
        "--only",
        type=_names,
        default=[name for name in BENCHMARKS if name not in LONG],
        metavar="A,B",
        help=f"{', '.join(BENCHMARKS)}; default: all but {', '.join(LONG)}",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON to this file instead of printing it")
    arguments = parser.parse_args()
    console = Console()
    about = machine()
    console.print(", ".join(f"{key} {value}" for key, value in about.items()), highlight=False, soft_wrap=True)
    results: list[dict[str, Any]] = []
    for name in arguments.only:
        before = load_average()
        result = dataclasses.replace(BENCHMARKS[name](), load=(before, load_average()))
        results.append(dataclasses.asdict(result))
        console.print(_table(result))
    text = json.dumps({"machine": about, "benchmarks": results}, indent=1)
    if arguments.json is None:
        print(text)
    else:
        arguments.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
