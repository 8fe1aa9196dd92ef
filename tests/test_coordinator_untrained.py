"""A run or a round in which no silo trained ends with an error that says why; silos that never did are named."""

from __future__ import annotations

import io
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from fedmq.cli.terminal import print_summary
from fedmq.config.scenario import Scenario
from fedmq.errors import RunError
from fedmq.runs.report import run_report
from fedmq.runs.status import read_status
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.log_events import LogEvent
from fedmq.wire.messages import Kind, Message
from fedmq.wire.payloads import Delta, Loss, Payload
from silos.tasks import Silo
from tests import in_process_run
from tests.threaded_run import resolved

pytestmark = pytest.mark.slow

EVERYONE = ("rounds=2", "participation=1")


def refused(scenario_file: Path, out: Path, *settings: str) -> str:
    """The error of a run that trained nothing; it releases nothing and has no summary, not even after a resume."""
    scenario, folder = resolved(scenario_file, *EVERYONE, *settings), RunFolder(out)
    with pytest.raises(RunError) as ended:
        in_process_run.run(scenario, out)
    with pytest.raises(RunError):
        in_process_run.run(scenario, out, resume=True)
    assert not folder.summary.exists() and not folder.model.exists()
    return str(ended.value)


def screen_of(written: Any, out: Path) -> str:
    """What is printed of a summary."""
    screen = io.StringIO()
    print_summary(written, RunFolder(out), Console(file=screen, width=200))
    return screen.getvalue()


@pytest.mark.parametrize("way", ["idle", "anchored to what nobody has"])
def test_a_run_whose_model_no_update_changed_ends_with_an_error(tiny: Path, tmp_path: Path, way: str) -> None:
    protocol = "{name: fedavg, single_modality: idle}" if way == "idle" else "{name: rcsr, client_align: false}"
    error = refused(tiny, tmp_path, f"protocol={protocol}", "missing_modality={rate: 1, only: image}")
    assert "no silo trained: the model is identical to the initial one" in error


def test_a_run_whose_updates_are_all_refused_ends_with_the_refusal_and_its_cause(tiny: Path, tmp_path: Path) -> None:
    error = refused(tiny, tmp_path, "protocol=paired_only", "training.learning_rate=1e12", "training.warmup_rounds=0")
    assert error.startswith("no silo could train")
    assert "lower training.learning_rate" in error
    assert read_status(RunFolder(tmp_path).status).diverged


def test_a_run_that_loses_every_reply_ends_with_the_counts_by_reason(tiny: Path, tmp_path: Path) -> None:
    error = refused(tiny, tmp_path, "faults=[{kind: drop, probability: 1}]")
    assert error == "no silo trained: no reply was merged in any of the 2 rounds (dropped 8)"
    assert not read_status(RunFolder(tmp_path).status).diverged


def test_a_silo_whose_replies_are_all_refused_is_named_in_the_last_line(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    respond = Silo.respond

    def forged(silo: Silo, message: Message) -> tuple[Payload, ...]:
        """Like an honest reply, but silo-01 omits its loss."""
        payloads = respond(silo, message)
        return tuple(each for each in payloads if silo.facts.name != "silo-01" or not isinstance(each, Loss))

    monkeypatch.setattr(Silo, "respond", forged)
    written = in_process_run.run(resolved(tiny, *EVERYONE), tmp_path).summary
    (found,) = written.unusable_replies.values()
    assert (found.refused, found.scripted, found.errors) == (2, 0, 0)
    last = screen_of(written, tmp_path).splitlines()[-1]
    assert last.startswith("silo-01: none of its replies was merged: 2 refused, 0 errors")
    assert "unexpected: a reply with" in last
    run_report.write(RunFolder(tmp_path), {})
    assert (
        '<p class="remark">silo-01: none of its replies was merged: 2 refused' in (tmp_path / "report.html").read_text()
    )


def test_silos_without_a_part_in_any_merge_are_named_with_the_reason(tiny: Path, tmp_path: Path) -> None:
    given = in_process_run.run(
        resolved(tiny, *EVERYONE, "faults=[{kind: drop, probability: 1, silos: [silo-00, silo-01]}]"), tmp_path / "lost"
    ).summary
    assert (given.without_part, given.per_silo["silo-00"].tasks) == (([], ["silo-00", "silo-01"]), 2)
    assert "were lost or too late: silo-00 and silo-01" in screen_of(given, tmp_path / "lost")
    pairs = in_process_run.run(resolved(tiny, *EVERYONE, "protocol=paired_only"), tmp_path / "pairs").summary
    assert pairs.without_part == (["silo-02", "silo-03"], [])
    assert "given no task in any round: silo-02 and silo-03; paired_only does not" in screen_of(
        pairs, tmp_path / "pairs"
    )


def test_refusals_of_scripted_attacks_are_counted_apart_and_do_not_end_the_run(tiny: Path, tmp_path: Path) -> None:
    attack = "faults=[{kind: nan, silos: [silo-00, silo-01, silo-02, silo-03], rounds: [0]}]"
    written = in_process_run.run(resolved(tiny, *EVERYONE, attack), tmp_path).summary
    assert {name: (each.refused, each.scripted) for name, each in written.unusable_replies.items()} == {
        f"silo-0{number}": (0, 1) for number in range(4)
    }
    assert not written.never_merged


def test_a_run_whose_tasks_are_single_steps_says_so(tiny: Path, tmp_path: Path) -> None:
    for name, batch_size, warns in (("one", 128, True), ("several", 8, False)):
        out, batch = tmp_path / name, f"training.batch_size={batch_size}"
        written = in_process_run.run(resolved(tiny, *EVERYONE, batch), out).summary
        assert written is not None and written.one_step_tasks is warns
        for place in (screen_of(written, out), (out / "report.html").read_text()):
            assert ("every task is one optimiser step" in place) is warns
        assert [note["batch_size"] for note in in_process_run.notes(out, LogEvent.ONE_STEP_TASKS)] == [128] * warns
    assert {silo.steps for silo in written.per_silo.values()} != {1}


def test_a_run_that_ends_below_its_start_says_so(tiny: Path, tmp_path: Path) -> None:
    for name, rate, warns in (("worse", 0.5, True), ("better", 0.003, False)):
        out, learning = tmp_path / name, (f"training.learning_rate={rate}", "training.warmup_rounds=0", "rounds=4")
        written = in_process_run.run(resolved(tiny, "participation=1", *learning), out).summary
        lines = in_process_run.lines(out, "evaluation")
        before, after = (lines[at]["metrics"]["mean_r1"] for at in (0, -1))
        assert (after < before) is warns
        for place in (screen_of(written, out), (out / "report.html").read_text()):
            assert (f"worse than before training: R@1 {after:.4f}, untrained {before:.4f}" in place) is warns
        expected = [{"metric": "mean_r1", "before": before, "after": after}] if warns else []
        assert in_process_run.notes(out, LogEvent.BELOW_START) == expected


# ------------------------------------------------------------------------------------- any silo's updates are refused
SILOS, ROUNDS = 4, 2
#: For each silo, whether its update diverges in each round.
Diverging = tuple[tuple[bool, ...], ...]
NEVER: Diverging = ((False,) * ROUNDS,) * SILOS
ALWAYS: Diverging = ((True,) * ROUNDS,) * SILOS


@pytest.fixture(scope="module")
def scenario(tiny: Path) -> Scenario:
    """Each silo has both modalities, so that each trains in each round."""
    changes = ("participation=1", "protocol=fedavg", "evaluation.every=0", "missing_modality.silos={}")
    return resolved(tiny, f"rounds={ROUNDS}", *changes)


def with_longer_updates(diverging: Diverging, patch: pytest.MonkeyPatch) -> None:
    """Let silos send updates that are too long to be accepted, as they are when training diverges."""
    respond = Silo.respond

    def diverged(silo: Silo, message: Message) -> tuple[Payload, ...]:
        payloads = respond(silo, message)
        if message.header.kind is not Kind.TASK or message.task is None:
            return payloads
        if not diverging[silo.facts.index][message.task.round]:
            return payloads
        (delta,) = (each for each in payloads if isinstance(each, Delta))
        longer = replace(delta, buffer=np.full_like(np.asarray(delta.buffer), 1e12))
        return tuple(longer if each is delta else each for each in payloads)

    patch.setattr(Silo, "respond", diverged)


@given(st.tuples(*[st.tuples(*[st.booleans()] * ROUNDS)] * SILOS))
@example(NEVER)
@example(ALWAYS)
@example(((True, False),) * SILOS)
@example(((False, True),) * SILOS)
@example(((True, True), *NEVER[1:]))
@settings(max_examples=2)
def test_a_run_fails_if_a_round_trains_no_silo_and_otherwise_names_silos_refused_throughout(
    scenario: Scenario, diverging: Diverging
) -> None:
    untrained = [all(silo[round_] for silo in diverging) for round_ in range(ROUNDS)]
    with tempfile.TemporaryDirectory() as base, pytest.MonkeyPatch.context() as patch:
        with_longer_updates(diverging, patch)
        folder = RunFolder(Path(base) / "run")
        if any(untrained):
            with pytest.raises(RunError, match=r"no silo could train .*was refused.*lower training\.learning_rate"):
                in_process_run.run(scenario, folder.root)
            assert not folder.summary.exists() and not folder.model.exists()
            return
        written = in_process_run.run(scenario, folder.root).summary
        screen = io.StringIO()
        print_summary(written, folder, Console(file=screen, width=200))
    refused = {f"silo-{index:02d}": sum(rounds) for index, rounds in enumerate(diverging) if any(rounds)}
    assert {name: each.refused for name, each in written.unusable_replies.items()} == refused
    throughout = [name for name, number in refused.items() if number == ROUNDS]
    assert list(written.never_merged) == throughout
    last = screen.getvalue().splitlines()[-max(1, len(throughout)) :]
    assert [line.partition(":")[0] for line in last if "none of its replies was merged" in line] == throughout
