"""Progress display, also on terminals that cannot move their cursor (TERM=dumb, as inside an editor)."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from fedmq.cli import terminal
from fedmq.cli.compare import display_progress
from fedmq.experiments.process_pool import JobProgress
from fedmq.runs.status import Status
from tests.threaded_run import resolved


@pytest.fixture
def dumb(monkeypatch: pytest.MonkeyPatch) -> tuple[Console, io.StringIO]:
    monkeypatch.setenv("TERM", "dumb")
    screen = io.StringIO()
    return Console(file=screen, force_terminal=True, width=200), screen


def test_a_run_shows_its_progress_as_lines(tiny: Path, dumb: tuple[Console, io.StringIO]) -> None:
    console, screen = dumb
    with terminal.display(resolved(tiny), console, quiet=False) as show:
        show(Status("collecting", 3, 4, 4, (), ({}, ""), 4, 0, None, {}, 0, 0.0, 20.0))
    assert "round 3/4" in screen.getvalue()


def test_a_comparison_shows_its_progress_as_lines(dumb: tuple[Console, io.StringIO]) -> None:
    console, screen = dumb
    with display_progress(console, quiet=False) as show:
        show("runs", JobProgress(5, 12, (), None))
    assert "runs: 5 of 12 done" in screen.getvalue()


def test_missing_processes_are_named_and_refused_frames_are_counted(tiny: Path) -> None:
    screen = io.StringIO()
    names, wrong = (
        ("silo-02", "silo-03", "evaluator"),
        ({"wrong_run": 4, "bad_signature": 3}, "unknown: run [red]a, here b\nround 4/4"),
    )
    with terminal.display(resolved(tiny), Console(file=screen, width=200), quiet=False) as show:
        for elapsed, missing in ((1.0, names), (2.5, names), (3.0, names[2:]), (13.0, names[2:])):
            show(Status("gathering", 0, 4, 0, missing, wrong, 2, 0, None, {}, 0, 0.0, elapsed))
        show(Status("collecting", 0, 4, 4, (), wrong, 4, 0, None, {}, 0, 0.0, 14.0))
    shown = screen.getvalue().splitlines()[1:]
    refused_frames = "3 bad_signature, 4 wrong_run; the last: unknown: run [red]a, here b\\nround 4/4"
    assert shown[:2] == [
        f"waiting for silo-02, silo-03 and the evaluator  refused: {refused_frames}",
        f"waiting for the evaluator  refused: {refused_frames}",
    ]
    assert shown[2].startswith("round 0/4  silos: 4 training") and shown[2].endswith(f"refused: {refused_frames}")
    assert (
        terminal.name_some([f"silo-{n:02d}" for n in range(30)])
        == "silo-00, silo-01, silo-02, silo-03, silo-04 and 25 more"
    )


def test_an_evaluator_that_is_not_connected_is_named_during_the_rounds(tiny: Path) -> None:
    screen, alone = io.StringIO(), Console(file=io.StringIO(), width=200)
    with terminal.display(resolved(tiny), Console(file=screen, width=200), quiet=False) as show:
        for number, missing in enumerate((("silo-02", "evaluator"), ("silo-02",))):
            status = Status("collecting", 1, 4, 3, missing, ({}, ""), 4, 0, None, {}, 0, 0.0, 20.0 * number)
            show(status)
            alone.print(terminal.status_table(status, "-", "tiny"))
    shown = screen.getvalue().splitlines()[1:]
    assert [line.partition("  not connected: ")[2] for line in shown] == ["the evaluator", ""]
    assert [line.split() for line in alone.file.getvalue().splitlines() if "not connected" in line] == [  # type: ignore[attr-defined]
        ["not", "connected", "the", "evaluator"]
    ]


def test_the_last_refusal_is_shown_with_its_age_and_only_for_a_minute(tiny: Path) -> None:
    screen, wrong = io.StringIO(), ({"unknown_sender": 8}, "silo-09: no such key")
    with terminal.display(resolved(tiny), Console(file=screen, width=200), quiet=False) as show:
        for number, ago in enumerate((0.2, 34.0, 61.0)):
            at = 20.0 * (number + 1)
            show(Status("collecting", 1, 4, 3, (), wrong, 4, 0, None, {}, 0, 0.0, at, refused_ago=ago))
    shown = [line.partition("  refused: ")[2] for line in screen.getvalue().splitlines()[1:]]
    assert shown == [
        "8 unknown_sender; the last: silo-09: no such key",
        "8 unknown_sender; the last, 34 s ago: silo-09: no such key",
        "",
    ]


def test_the_processes_a_run_waits_for_are_shown_when_they_change_and_every_ten_seconds(tiny: Path) -> None:
    screen = io.StringIO()
    both, one = ("silo-02", "silo-03"), ("silo-03",)
    with terminal.display(resolved(tiny), Console(file=screen, width=200), quiet=False) as show:
        for elapsed, missing in ((1.0, both), (2.0, both), (4.0, both), (5.0, one), (8.0, one), (15.0, one)):
            show(Status("gathering", 0, 4, 0, missing, ({}, ""), 2, 0, None, {}, 0, 0.0, elapsed))
    shown = screen.getvalue().splitlines()[1:]
    assert shown == ["waiting for silo-02 and silo-03", "waiting for silo-03", "waiting for silo-03"]


def test_a_terminal_shows_the_missing_processes(tiny: Path) -> None:
    screen = io.StringIO()
    console = Console(file=screen, width=200, force_terminal=True)
    console.print(
        terminal.status_table(
            Status(
                "gathering", 0, 4, 0, ("silo-03",), ({"gap": 1}, "silo-02: [red]x\x1b"), 3, 0, None, {}, 0, 0.0, 9.0
            ),
            "-",
            "title",
        )
    )
    assert "waiting for  silo-03" in screen.getvalue() and "1 gap; the last: silo-02: [red]x\\x1b" in screen.getvalue()


def test_silos_that_the_run_waits_for_are_named(tiny: Path) -> None:
    base = Status("collecting", 3, 4, 4, (), ({}, ""), 4, 0, None, {}, 0, 0.0, 20.0)
    slow = (("silo-02", 95.4, 120.0), ("silo-01", 31.0, None))
    assert terminal.waited_for(base) == ""
    named = "silo-02, training for 95 s (limit 120 s); silo-01, training for 31 s"
    shown = terminal.waited_for(replace(base, slow=slow, overdue=("silo-00",)))
    assert shown == f"{named}; silo-00, without a reply within the limit"
    gathering = replace(base, phase="gathering", missing=("silo-03",), online=1, minimum=2)
    assert terminal.waited_for(gathering) == "silo-03; starts with 2 silos, joined: 1"
    screen = io.StringIO()
    with terminal.display(resolved(tiny), Console(file=screen, width=200), quiet=False) as show:
        show(replace(base, slow=slow[:1]))
    assert "waiting for silo-02, training for 95 s (limit 120 s)" in screen.getvalue()


def test_metrics_are_shown_with_the_round_that_they_are_of(tiny: Path) -> None:
    status = Status("collecting", 7, 9, 2, (), ({}, ""), 4, 0, 0.5, {"mean_r1": 0.25}, 0, 0.0, 20.0, metrics_round=4)
    screen = io.StringIO()
    with terminal.display(resolved(tiny), Console(file=screen, width=200), quiet=False) as show:
        show(status)
    assert "round 7/9" in screen.getvalue() and "R@1 0.250 (of round 4)" in screen.getvalue()
    screen = io.StringIO()
    Console(file=screen, width=200).print(terminal.status_table(status, "-", "title"))
    assert "R@1 0.250 (of round 4)" in screen.getvalue()
