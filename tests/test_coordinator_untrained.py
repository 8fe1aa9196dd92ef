"""Runs in which no silo trains complete, and the summary, the terminal and tables report it."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from fedmq.cli.terminal import print_summary
from fedmq.experiments import tables
from fedmq.storage.run_folder import RunFolder
from tests import in_process_run
from tests.run_summaries import summary
from tests.threaded_run import resolved


def unchanged_and_screen(scenario_file: Path, out: Path, *settings: str) -> tuple[bool, str]:
    """Whether the summary marks the model as unchanged, and the text that is printed of the summary."""
    scenario = resolved(scenario_file, "rounds=2", "participation=1", *settings)
    written, screen = in_process_run.run(scenario, out).summary, io.StringIO()
    print_summary(written, RunFolder(out), Console(file=screen, width=200))
    return written.unchanged, screen.getvalue()


@pytest.mark.parametrize("way", ["idle", "anchored to what nobody has"])
def test_a_run_in_which_no_silo_trained_reports_it(tiny: Path, tmp_path: Path, way: str) -> None:
    protocol = "{name: fedavg, single_modality: idle}" if way == "idle" else "{name: rcsr, client_align: false}"
    lone = ["missing_modality={rate: 1, only: image}"]
    unchanged, screen = unchanged_and_screen(tiny, tmp_path, f"protocol={protocol}", *lone)
    assert unchanged and "no silo's update changed it" in screen


@pytest.mark.parametrize("protocol", ["fedavg", "local", "fedproto"])
def test_a_run_that_trained_or_shares_no_model_does_not_report_it(tiny: Path, tmp_path: Path, protocol: str) -> None:
    unchanged, screen = unchanged_and_screen(tiny, tmp_path, f"protocol={protocol}")
    assert not unchanged and "changed it" not in screen


def test_a_table_names_rows_whose_model_no_update_changed() -> None:
    def row(name: str, **facts: bool) -> Any:
        outcomes = {seed: SimpleNamespace(summary=own) for seed, own in enumerate([summary(), summary(**facts)])}
        entry = SimpleNamespace(method=name, name=name, candidates=(None,))
        return SimpleNamespace(entry=entry, outcomes=outcomes, against=None, best=())

    plan: Any = SimpleNamespace(seeds=(0, 1), across=None)
    notes = tables.notes_of([row("fedavg"), row("idle", unchanged=True)], plan, False, False)
    assert [note for note in notes if "changed the model" in note] == [
        "no silo's update changed the model of at least one seed: idle"
    ]
    assert not any("changed the model" in note for note in tables.notes_of([row("fedavg")], plan, False, False))
