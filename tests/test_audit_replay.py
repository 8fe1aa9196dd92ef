"""Replay: a repeated run is the same run; otherwise the first difference is named."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from coordinator import loop
from coordinator.round_events import Phase
from fedmq.audit.log_checks import audit_run
from fedmq.audit.replay import Difference, first_difference, read_record
from fedmq.clock import VirtualClock
from fedmq.config.scenario import Scenario
from fedmq.errors import InputError
from fedmq.storage.run_folder import RunFolder, write_json
from fedmq.wire import channel
from fedmq.wire.log_events import LogEvent, TimelineEvent
from fedmq.wire.message_log import MessageLog
from tests import in_process_run
from tests.adversary_forged_logs import edit
from tests.command_line import printed, refused
from tests.in_process_run import notes, run_restarted
from tests.test_audit_run_checks import FORGED
from tests.test_federation_faults import struck
from tests.threaded_run import resolved, run


@pytest.fixture
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats of 0.4 s, so that lost silos are noticed soon."""
    for module in (channel, loop):
        monkeypatch.setattr(module, "BEAT_SECONDS", 0.4)


def finished(scenario: Scenario, out: Path, *, in_process: bool = True) -> RunFolder:
    outcome = run_restarted(scenario, out) if in_process else run(scenario, out)
    assert outcome.phase is Phase.DONE
    return RunFolder(out)


@pytest.fixture(scope="module")
def first(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run in one process, which no test changes."""
    return finished(resolved(tiny), tmp_path_factory.mktemp("replay") / "run")


@pytest.fixture
def copy(first: RunFolder, tmp_path: Path) -> RunFolder:
    """A copy of it to be changed."""
    return RunFolder(Path(shutil.copytree(first.root, tmp_path / "copy")))


def difference(one: RunFolder, other: RunFolder) -> Difference | None:
    return first_difference(read_record(one), read_record(other))


@pytest.mark.slow
def test_a_repeated_run_is_the_same_even_if_it_crashed_and_resumed(
    first: RunFolder, tiny: Path, tmp_path: Path
) -> None:
    assert difference(first, finished(resolved(tiny), tmp_path / "second")) is None
    assert len(read_record(first).events) == 12
    crashing = resolved(
        tiny, "faults=[{kind: coordinator_crash, after_event: 4}, {kind: disk_full, round: 3, times: 3}]"
    )
    assert difference(first, finished(crashing, tmp_path / "killed")) is None


@pytest.mark.slow
def test_runs_in_one_process_and_over_messages_have_the_same_events_and_a_lying_silo_is_named(
    first: RunFolder, tiny: Path, tmp_path: Path
) -> None:
    called, over_messages = read_record(first), finished(resolved(tiny), tmp_path / "sent", in_process=False)
    sent = read_record(over_messages)
    assert called.events == sent.events
    assert called.digest == sent.digest
    assert sum(kind in ("task", "reply") for kind, _, _ in sent.messages) == 2 * len(sent.events)
    assert not called.messages
    lying = resolved(tiny, "faults=[{kind: sign_flip, silos: [silo-02], rounds: [1]}]")
    found = difference(over_messages, finished(lying, tmp_path / "lying", in_process=False))
    assert found is not None
    assert found.place.startswith(("reply 2 of silo-02", "reply 1 of silo-02"))


@pytest.mark.slow
def test_a_repeated_run_with_personal_models_is_the_same(tiny: Path, tmp_path: Path) -> None:
    # A silo's measurement carries the sequence number of its last merged task, as the reply to that task did.
    own = resolved(tiny, "protocol={name: rcsr, personal: fixed, personal_onset: 0}", "evaluation.every=1")
    first, second = (finished(own, tmp_path / name, in_process=False) for name in ("first", "second"))
    record = read_record(first)
    assert {version for kind, silo, version in record.messages if kind == "measurement of version"} >= {1, 2}
    assert all(len(contents) == 1 for contents in record.messages.values())
    assert difference(first, second) is None


def test_logged_deadlines_of_finished_merges_do_not_make_a_run_different(first: RunFolder, copy: RunFolder) -> None:
    with MessageLog(copy.messages("coordinator"), "coordinator", VirtualClock()) as log:
        log.event(TimelineEvent.DEADLINE, silo="", sequence=0, now=1.0, version=0, number=9)
    assert difference(first, copy) is None
    with MessageLog(copy.messages("coordinator"), "coordinator", VirtualClock()) as log:
        log.event(TimelineEvent.ARRIVED, silo="silo-00", sequence=99, now=1.0, version=0, number=10)
    assert difference(first, copy) is not None


def test_the_first_difference_is_named(first: RunFolder, copy: RunFolder, tiny: Path, tmp_path: Path) -> None:
    late = resolved(tiny, "faults=[{kind: late, seconds: 5, silos: [silo-00], rounds: [2]}]")
    found = difference(first, finished(late, tmp_path / "late"))
    assert found is not None
    assert found.place.startswith("event ")
    assert "silo-00" in found.was
    text = copy.metrics.read_text()
    copy.metrics.write_text(text.replace('"kind": "evaluation", "version": 4', '"kind": "evaluation", "version": 5'))
    found = difference(first, copy)
    assert found is not None and found.place == "evaluation of version 4"
    copy.metrics.write_text(text)
    summary = json.loads(copy.summary.read_text())
    write_json(copy.summary, {**summary, "model_digest": "0" * 64})
    assert difference(first, copy) == Difference("model_digest", read_record(first).digest, "0" * 64)


#: Forged figures that a replay compares, and forgeries of real time and of bytes, which may differ.
REPEATED = ("metrics", "per_silo", "participations", "fairness", "per_silo_mean", "versions", "seed", "rounds", "tasks")


def test_a_run_with_forged_figures_in_its_summary_is_not_the_same(copy: RunFolder) -> None:
    honest, text = read_record(copy), copy.summary.read_text()
    forgeries = {name: FORGED[name] for name in REPEATED}
    forgeries["failed"] = lambda summary: summary["tasks"].update(failed=7)
    forgeries["seconds"] = lambda summary: summary["seconds"].update(virtual=1e6)
    for what, forge_it in forgeries.items():
        copy.summary.write_text(text)
        edit(copy.summary, forge_it)
        found = first_difference(read_record(copy), honest)
        assert found is not None and found.place.startswith("summary: "), what
    copy.summary.write_text(text)
    edit(copy.summary, lambda summary: summary["seconds"].update(total=1e6))
    edit(copy.summary, lambda summary: summary.update(bytes={"up": {}, "down": {}}))
    assert first_difference(read_record(copy), honest) is None


def test_a_run_with_a_swapped_model_is_not_the_same(copy: RunFolder) -> None:
    run = copy
    honest, path = read_record(run), run.model / "model.safetensors"
    save_file({name: -array for name, array in load_file(path).items()}, path)
    found = first_difference(read_record(run), honest)
    assert found is not None
    assert (found.place, found.now) == ("model/model.safetensors", honest.digest)
    path.unlink()
    with pytest.raises(InputError, match=r"model\.safetensors"):
        read_record(run)


def test_a_message_without_an_event_must_be_in_both_runs(first: RunFolder) -> None:
    honest = read_record(first)
    last = max(event["sequence"] for event in honest.events if event["silo"] == "silo-00")

    def compared(*keys: tuple[str, str, int]) -> Difference | None:
        more = replace(honest, messages=dict.fromkeys(keys, ("said",)))
        found, back = first_difference(more, honest), first_difference(honest, more)
        assert (found is None) == (back is None)
        return found

    task, reply = ("task", "silo-00", last + 1), ("reply", "silo-00", last + 1)
    assert compared(task, reply) is None  # still pending when the run ended
    for invented in (
        reply,
        ("error", "silo-00", 0),
        ("reply", "silo-00", 99),
        ("measurement of version", "evaluator", 1),
    ):
        keys = (invented,) if invented == reply else (task, reply, invented)
        found = compared(*keys)
        assert found is not None, invented
        assert (found.place, found.was, found.now) == ("{0} {2} of {1}".format(*invented), "said", "nothing")


def test_an_unfinished_run_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"summary\.json"):
        read_record(RunFolder(tmp_path))


WIRE = {
    "drop": "{kind: drop, silos: [silo-00, silo-01], rounds: [1, 2], again: 3}",
    "corrupt": "{kind: corrupt, silos: [silo-00, silo-01], rounds: [1, 2]}",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "refusals"),
    [
        # On a busy machine a session may be lost before the next message shows the gap.
        ("drop", {"gap", "unknown_session"}),
        ("corrupt", {"tampered"}),
    ],
)
@pytest.mark.usefixtures("quick_beats")
def test_faulty_frames_are_refused_and_the_model_is_that_of_the_run_in_one_process(
    kind: str, refusals: set[str], tiny: Path, tmp_path: Path
) -> None:
    """Faults hit real frames between transport and roster; the outcome is the one drawn in advance."""
    scenario = resolved(tiny, f"faults=[{WIRE[kind]}]", "participation=1.0")
    sent = finished(scenario, tmp_path / "sent", in_process=False)
    called = finished(scenario, tmp_path / "called")
    assert struck(sent.root, kind)
    assert struck(sent.root, kind) == struck(called.root, kind)
    assert refusals & {note["reason"] for note in _refused(sent)}
    assert read_record(sent).events == read_record(called).events
    assert read_record(sent).digest == read_record(called).digest
    assert not audit_run(sent.root).findings


def _refused(folder: RunFolder) -> list[dict[str, Any]]:
    path = folder.messages("coordinator")
    return [record for record in map(json.loads, path.read_text().splitlines()) if record["action"] == "refused"]


@pytest.mark.slow
def test_a_run_whose_processes_are_killed_frozen_and_removed_replays(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    struck_by = (
        "{kind: crash, silos: [silo-00], rounds: [1]}",
        "{kind: freeze, silos: [silo-01], rounds: [1], seconds: 9, beats: 6}",
        "{kind: leave, silos: [silo-02], rounds: [2]}",
        "{kind: coordinator_crash, after_round: 3}",
    )
    faults = f"faults=[{', '.join(struck_by)}]"
    printed("scenario", tiny, "--out", out, "--quiet", "--set", faults, "--set", "participation=1.0")
    for kind, silo in (("crash", "silo-00"), ("freeze", "silo-01"), ("leave", "silo-02")):
        assert {name for name, _ in struck(out, kind)} == {silo}
    assert struck(out, "coordinator_crash") == [("coordinator", 3)]
    assert not notes(out, LogEvent.FAULT_SKIPPED)
    assert [len(notes(out, LogEvent.STARTED, name)) for name in ("silo-00", "silo-01", "silo-02")] == [2, 1, 2]
    assert len(notes(out, LogEvent.RESUMED)) == 1
    # Whether the frozen silo is noticed as lost depends on how soon the coordinator crashes.
    assert not audit_run(out).findings
    called = in_process_run.run_restarted(resolved(tiny, faults, "participation=1.0"), tmp_path / "called")
    assert json.loads((out / "summary.json").read_text())["model_digest"] == called.summary.model_digest
    assert json.loads(printed("replay", out, "--quiet", "--json"))["same"]


@pytest.mark.slow
def test_replay_exits_with_3_and_names_the_difference(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    printed("scenario", tiny, "--out", out, "--quiet", "--set", "launcher=inline")
    assert "the same run" in printed("replay", out, "--quiet")
    log = out / "messages" / "coordinator.jsonl"
    log.write_text(log.read_text().replace('"event":"arrived"', '"event":"failed"', 1))
    shown = printed("replay", out, "--quiet", code=3)
    assert "event 1\n" in shown
    assert "made alike" not in shown
    summary = json.loads((out / "summary.json").read_text())
    own = summary["versions_of"]["processor"]
    summary["versions_of"]["processor"] = "x86_64 NO VECTORS"
    (out / "summary.json").write_text(json.dumps(summary))
    assert f"processor: run x86_64 NO VECTORS, replay {own}\n" in printed("replay", out, "--quiet", code=3)
    assert json.loads(printed("replay", out, "--quiet", "--json", code=3))["made_otherwise"] == {
        "processor": {"run": "x86_64 NO VECTORS", "replay": own}
    }


@pytest.mark.slow
def test_a_run_stopped_by_a_scripted_full_disk_and_resumed_replays(tiny: Path, tmp_path: Path) -> None:
    out, full = tmp_path / "run", "faults=[{kind: disk_full, round: 2, times: 3}]"
    printed("scenario", tiny, "--out", out, "--quiet", "--set", full, code=1)
    printed("scenario", out / "scenario.yaml", "--resume", out, "--quiet")
    assert json.loads(printed("replay", out, "--quiet", "--json"))["same"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("clock=wall", "a run on real time cannot be repeated"),
        (
            "privacy={clip_norm: 1.0, noise_multiplier: 1.0, noise_from: key}",
            "privacy.noise_from: found 'key', allowed: seed",
        ),
    ],
)
def test_a_run_in_real_time_or_with_noise_drawn_from_keys_cannot_be_replayed(
    tiny: Path, tmp_path: Path, setting: str, why: str
) -> None:
    folder = finished(resolved(tiny, setting), tmp_path / "run", in_process="clock" in setting)
    assert why in refused("replay", folder.root)
