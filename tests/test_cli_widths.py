"""What commands print at 80 columns: long names whole, no line broken oddly, no result that means nothing."""

from __future__ import annotations

import io
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner

import protocols  # noqa: F401 - a model card names the network of a base loss
from fedmq.audit.log_checks import Audit
from fedmq.cli import audit as audit_command
from fedmq.cli import console, operate, search, terminal
from fedmq.cli.console import out
from fedmq.cli.data import show_data
from fedmq.cli.main import app
from fedmq.launch.data_check import DataFacts, SiloData
from fedmq.retrieval.search import Hit
from fedmq.runs.release import model_card
from fedmq.runs.results import gallery_of
from fedmq.runs.run_records import EvaluatedItems, MessageCounts, OwnHeldOut, RunSummary, SiloSummary
from fedmq.runs.status import SiloPhase, SiloStatus, Status, StatusFile
from fedmq.safe_console import SafeConsole
from fedmq.storage.run_folder import RunFolder
from fedmq.text import print_line
from tests.run_summaries import release_config, summary

WAYS = ("i2t", "t2i", "mean")
PERFECT = {f"{way}_r{k}": 1.0 for k in (1, 5, 10) for way in WAYS}
CONFIG = release_config(backbone={"name": "lite"}, data_digest="cd" * 32)


def of_photos(images: int, captions: int) -> RunSummary:
    """A run with a perfect score."""
    silo: dict[str, object] = {"modalities": ["image", "text"], "samples": 12, "participations": 3, "tasks": 3}
    silo |= {"heldout": 1200, "mean_r1": 0.5}
    return summary(
        metrics=PERFECT,
        evaluated=EvaluatedItems(split="test", images=images, captions=captions),
        per_silo={
            f"silo-{n}": SiloSummary.model_validate({**silo, "heldout": 1200 + n, "ignored": 12}) for n in range(4)
        },
        messages=MessageCounts(sent=9, received=9),
        personal_missing={"silo-1": "it was disconnected when its personal model was to be evaluated at the end"},
    )


def printed(found: RunSummary) -> str:
    """What an 80 column terminal shows of a run's result."""
    screen = io.StringIO()
    terminal.print_summary(found, RunFolder(Path("runs/smoke")), Console(file=screen, width=80, force_terminal=True))
    return re.sub(r"\x1b\[[\d;]*m", "", screen.getvalue())


def test_a_perfect_score_on_five_items_is_shown_with_their_number_and_without_certain_recalls() -> None:
    found = of_photos(5, 5)
    for text in (printed(found), model_card(CONFIG, found, "FedAvg", "test")):
        assert "5 test images, 5 captions" in text
        assert "R@5 and R@10 are not shown" in text.replace("recall@", "R@")
        assert "ew items (5 test images, 5 captions)" in text
    rows = [line for line in printed(found).splitlines() if line.startswith("│")]
    assert [row.split("│")[2:5] for row in rows[-3:]] == [[" 1.0000 ", " -   ", " -    "]] * 3
    card = model_card(CONFIG, found, "FedAvg", "test")
    assert "recall@1, mean" in card
    assert not re.search(r"recall@(5|10)", card)


def test_a_gallery_hides_only_the_recalls_that_every_model_reaches() -> None:
    gallery = gallery_of(of_photos(8, 40))
    assert gallery is not None
    assert [name for name in PERFECT if gallery.certain(name)] == ["t2i_r10", "mean_r10"]
    large = gallery_of(of_photos(1000, 5000))
    assert large is not None and large.items == "1,000 test images, 5,000 captions"
    assert large.remarks(PERFECT) == []
    assert gallery_of(summary()) is None


def test_without_an_evaluator_the_galleries_of_the_silos_are_stated() -> None:
    silos = {name: {"items": items, "mean_r1": 1.0} for name, items in (("silo-0", 4), ("silo-1", 12))}
    fairness = {"std_r1": 0.0, "worst_r1": 1.0, "gap_r1": 0.0}
    facts = {"items": 16, "metrics": PERFECT, "per_silo": silos, "per_silo_mean": PERFECT, "fairness": fairness}
    found = summary(metrics={}, fairness={}, own_heldout=OwnHeldOut.model_validate(facts))
    for text in (printed(found), model_card(CONFIG, found, "FedAvg", "test")):
        assert "16 held-out pairs, 4 to 12" in " ".join(text.split())
        assert "R@5 and R@10 are not shown: with 4 items to retrieve from" in " ".join(text.split())
        # 16 queries a direction: one of them is a sixteenth of a direction's R@1, and half of that of the mean.
        assert "changes the R@1 of its direction by 0.062, and the mean of both directions by 0.031" in " ".join(
            text.split()
        )


def test_every_line_of_a_result_fits_80_columns() -> None:
    lines = printed(of_photos(5000, 25000)).splitlines()
    assert max(map(len, lines)) <= 80
    assert "R@1 over silos: std 0.0000, worst 0.5000, gap 0.0000 (1200 to 1203 items each)" in lines
    # sqrt(.5 * .5 / 2n) with n about 1,200
    assert "std 0.0102 is expected by chance if the model is equally good for all silos" in lines


def test_the_live_display_keeps_each_metric_with_its_value_at_80_columns() -> None:
    metrics = dict.fromkeys([*PERFECT, "map"], 0.5)
    status = Status("collecting", 7, 9, 2, (), ({}, ""), 4, 0, 0.5, metrics, 9_876_543, 0.0, 20.0, metrics_round=4)
    screen = io.StringIO()
    title = "own photos (fedavg, 30 silos, seed 0)"
    Console(file=screen, width=80).print(terminal.status_table(status, "1.5 min", title))
    shown = screen.getvalue()
    assert max(map(len, shown.splitlines())) <= 80
    for name in ("R@1 0.500", "R@5 0.500", "R@10 0.500", "mAP 0.500", "(of round 4)", "ETA 1.5 min", title):
        assert name in shown


def test_a_step_that_is_done_again_from_the_cache_is_shown_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "err", Console(stderr=True, force_terminal=False))
    show = console.bar()
    for _ in range(3):
        for done in (0, 26, 52):
            show("files read", done, 52)
    show("texts encoded", 52, 52)
    assert capsys.readouterr().err.splitlines() == ["files read: 0/52", "files read: 52/52", "texts encoded: 52/52"]


def commands(node: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command."""
    yield path
    for name, each in getattr(node, "commands", {}).items():
        yield from commands(each, (*path, name))


@pytest.mark.slow
def test_the_help_of_every_command_breaks_lines_only_where_80_columns_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    runner: Callable[..., object] = CliRunner().invoke
    for path in commands(get_command(app)):
        text = str(getattr(runner(app, [*path, "--help"], terminal_width=80), "output", ""))
        prose = text.partition("╭")[0].splitlines()
        for line, following in itertools.pairwise(line.strip() for line in prose):
            if line and following:
                assert len(line) + 1 + len(following.split()[0]) > 78, f"fedmq {' '.join(path)}: {line!r}"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("short", ["short"]),
        ("word " * 30, [("word " * 16).strip(), ("word " * 14).strip()]),
        ("  words  " + "word " * 20, ["  words  " + ("word " * 14).strip(), "  " + ("word " * 6).strip()]),
        (
            f"private key {'/a-long-folder' * 8}.key: keep it",
            ["private key", f"{'/a-long-folder' * 8}.key:", "keep it"],
        ),
    ],
)
def test_a_terminal_gets_long_lines_broken_between_words_and_paths_whole(
    line: str, shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, expected in ((Terminal(), shown), (io.StringIO(), [line])):
        monkeypatch.setattr("sys.stdout", stream)
        monkeypatch.setenv("COLUMNS", "80")
        print_line(line)
        assert stream.getvalue() == "".join(f"{each}\n" for each in expected)


def test_a_warning_is_wrapped_on_a_terminal_and_one_line_in_a_file() -> None:
    for terminal_, most in ((True, 80), (False, 200)):
        screen = io.StringIO()
        SafeConsole(file=screen, width=80, force_terminal=terminal_).print("word " * 30, soft_wrap=True)
        assert max(map(len, screen.getvalue().splitlines())) <= most
        assert (len(screen.getvalue().splitlines()) == 1) == (not terminal_)


# ------------------------------------------------------------------------------------------ names and paths in tables
NAMES = [f"hospital-of-saint-mary-{number}" for number in range(3)]
PATH = "/srv/" + "photographs-of-the-year/" * 4 + "a-red-fox-in-snow.png"
REASON = f"training failed: CUDA out of memory, see {PATH}"
STATUS = StatusFile(
    run="own-0123456789ab", written="2026-11-26T17:00:00+00:00", phase="collecting", round=1, rounds=200, loss=0.5,
    metrics={"mean_r1": 0.5}, metrics_round=1, up=1, down=2, now=1.0, elapsed=1.0, refused={}, last_refused="",
    silos={
        name: SiloStatus(
            phase=SiloPhase.GIVEN_UP, heard="2026-11-26T17:00:00+00:00", task_seconds=123.0, limit=600.0,
            error=REASON, up=123_456_789_012, down=987_654_321,
        )
        for name in NAMES
    },
)  # fmt: skip


def status() -> None:
    operate._show(STATUS, datetime(2026, 11, 26, 18, tzinfo=UTC))


def hits() -> None:
    out.print(search.hits_table([Hit(1, 0.5, PATH, "a red fox in the snow " * 5)], binary=False))


def audited() -> None:
    audit = Audit()
    for name in NAMES:
        audit.records[name], audit.frames[name] = 1_234_567, 123_456_789_012
        audit.payloads.number[name], audit.payloads.bytes[name] = (
            Counter(modality_prototypes=1_234_567),
            Counter(modality_prototypes=123_456_789_012),
        )
    out.print(audit_command._kinds_table(audit, verbose=True))


def checked() -> None:
    labels = {f"smileys-and-emotion-{number}": 12_345 for number in range(8)}
    silos = {name: SiloData(("image", "text"), 123_456, labels, 12_345, 100, 200) for name in NAMES}
    show_data(DataFacts("folder", 9, 9, {}, labels, 0, silos=silos, missing=(PATH,)))


@pytest.mark.parametrize("show", [status, hits, audited, checked])
def test_long_names_and_paths_are_whole_in_a_table_of_80_columns(
    show: Callable[[], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    show()
    text = capsys.readouterr().out
    rows = [line for line in text.splitlines() if line[:1] in tuple("┏┃┡│└├")]
    assert rows
    assert max(map(len, rows)) <= 80
    assert "…" not in text
    assert ("123.5 GB" in text) == (show in (status, audited)), "one way to write bytes"
    first = "".join(re.split("[│┃]", line)[1 if show is not hits else 3].strip() for line in rows if "│" in line)
    for name in [PATH] if show is hits else NAMES:
        assert name in first
    if show is status:
        assert f"{NAMES[0]}, last error: {REASON}" in text.splitlines()
