"""Progress where a terminal cannot move its cursor, as inside an editor (TERM=dumb)."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from fedmq import live
from fedmq.cli_compare import _display
from fedmq.jobs import Progress
from fedmq.status import Status
from tests.threads import resolved


@pytest.fixture
def dumb(monkeypatch: pytest.MonkeyPatch) -> tuple[Console, io.StringIO]:
    monkeypatch.setenv("TERM", "dumb")
    screen = io.StringIO()
    return Console(file=screen, force_terminal=True, width=200), screen


def test_a_run_shows_lines(tiny: Path, dumb: tuple[Console, io.StringIO]) -> None:
    console, screen = dumb
    with live.display(resolved(tiny), console, quiet=False) as show:
        show(Status("collecting", 3, 4, 4, 0, 4, 0, None, {}, 0, 0.0, 20.0))
    assert "round 3/4" in screen.getvalue()


def test_a_comparison_shows_lines(dumb: tuple[Console, io.StringIO]) -> None:
    console, screen = dumb
    with _display(console, quiet=False) as show:
        show("runs", Progress(5, 12, (), None))
    assert "runs: 5 of 12 done" in screen.getvalue()
