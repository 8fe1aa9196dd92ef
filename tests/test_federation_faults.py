"""Scripted faults: which silos they hit and when, a task's outcome, and what the message log records."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from pydantic import TypeAdapter, ValidationError

from coordinator.round_events import Phase
from fedmq.config.faults import FAULTS, AnyFault, Drift, LabelNoise
from fedmq.data.silo_dataset import CaptionRows, SiloDataset
from fedmq.errors import InputError
from fedmq.federation.faults import FaultSchedule, TaskOutcome, attacked, drifted_rows, with_noisy_labels
from fedmq.federation.protocol import SiloFacts
from fedmq.wire.log_events import LogEvent, TimelineEvent
from fedmq.wire.log_records import NoteRecord, TimelineRecord
from fedmq.wire.payloads import ClassPrototypes, Delta, Loss, Memory, ModalityPrototypes
from tests import in_process_run
from tests.in_process_run import lines, notes, run_restarted
from tests.log_causes import records
from tests.threaded_run import resolved

ROOT = Path(__file__).parent.parent
SILOS = (
    SiloFacts("silo-00", 0, True, True),
    SiloFacts("silo-01", 1, True, True),
    SiloFacts("silo-02", 2, True, False),
    SiloFacts("silo-03", 3, False, True),
)
ADAPTER: TypeAdapter[Any] = TypeAdapter(AnyFault)


def fault(**facts: object) -> Any:
    return ADAPTER.validate_python(facts)


def script(*faults: dict[str, object], seed: int = 0) -> FaultSchedule:
    return FaultSchedule(tuple(fault(**each) for each in faults), seed, SILOS)


def fate(*faults: dict[str, object], issued_at: float = 100.0, work: float = 10.0, round_: int = 0) -> TaskOutcome:
    return script(*faults).outcome("silo-00", 1, round_, issued_at, work)[0]


# ----------------------------------------------------------------------------------------------- targets and times
@pytest.mark.parametrize(
    ("group", "struck"),
    [
        ("all", {"silo-00", "silo-01", "silo-02", "silo-03"}),
        ("paired", {"silo-00", "silo-01"}),
        ("image_only", {"silo-02"}),
        ("text_only", {"silo-03"}),
        (["silo-01", "silo-03"], {"silo-01", "silo-03"}),
    ],
)
def test_a_fault_hits_only_its_group(group: object, struck: set[str]) -> None:
    made = script({"kind": "late", "seconds": 1, "silos": group})
    assert {silo.name for silo in SILOS if list(made.strikes(silo.name, 1, 0, 0.0))} == struck


def test_a_share_of_silos_is_fixed_for_the_run_and_depends_on_the_seed() -> None:
    def struck(seed: int) -> set[str]:
        made = script({"kind": "late", "seconds": 1, "share": 0.5}, seed=seed)
        every = [{s.name for s in SILOS if list(made.strikes(s.name, number, 0, 0.0))} for number in range(5)]
        assert all(each == every[0] for each in every)
        return every[0]

    assert len(struck(0)) == 2
    assert len({frozenset(struck(seed)) for seed in range(20)}) > 1


@pytest.mark.parametrize(("rounds", "on"), [(None, [0, 1, 2, 3, 4]), ([1, 3], [1, 3]), ("1-2", [1, 2]), ("3-", [3, 4])])
def test_rounds_are_a_list_or_a_range(rounds: object, on: list[int]) -> None:
    made = fault(kind="late", seconds=1, rounds=rounds)
    assert [round_ for round_ in range(5) if made.in_rounds(round_)] == on


def test_a_probability_is_drawn_per_task_and_deterministically() -> None:
    made = script({"kind": "late", "seconds": 1, "probability": 0.3})
    hits = [bool(list(made.strikes("silo-00", number, 0, 0.0))) for number in range(1000)]
    assert 250 < sum(hits) < 350
    assert hits == [bool(list(made.strikes("silo-00", number, 5, 9.0))) for number in range(1000)]


@pytest.mark.parametrize(
    "facts",
    [
        {"kind": "late"},
        {"kind": "late", "seconds": 1, "rounds": "7-3"},
        {"kind": "late", "seconds": 1, "time": [20, 10]},
        {"kind": "leave", "every": 10, "away": 20},
        {"kind": "coordinator_crash", "after_round": 1, "after_event": 2},
        {"kind": "earthquake"},
        {"kind": "modality_lost", "modality": "text", "probability": 0.5},
    ],
)
def test_inconsistent_faults_are_refused(facts: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        fault(**facts)


def test_an_invalid_fault_is_refused_with_its_line_and_the_existing_silos(tiny: Path) -> None:
    with pytest.raises(InputError, match=r"faults\.0\.seconds"):
        resolved(tiny, "faults=[{kind: late}]")
    with pytest.raises(InputError, match="silo-09"):
        resolved(tiny, "faults=[{kind: late, seconds: 1, silos: [silo-09]}]")


# ---------------------------------------------------------------------------------- outcomes computed manually
def test_delays_of_several_faults_add_up() -> None:
    assert fate().due == 110.0
    assert fate({"kind": "late", "seconds": 5}, {"kind": "freeze", "seconds": 7}).due == 122.0
    assert fate({"kind": "crash", "restart": 20}).due == 140.0  # 10 s lost, 20 s restart, 10 s repeated
    assert fate({"kind": "reorder", "seconds": 3}, {"kind": "corrupt", "seconds": 2}).due == 115.0
    assert fate({"kind": "duplicate"}).due == 110.0


def test_a_dropped_reply_fails_when_due_or_arrives_after_a_retry() -> None:
    assert fate({"kind": "drop"}) == TaskOutcome(100.0, 10.0, 110.0, "dropped")
    assert fate({"kind": "drop", "again": 5}) == TaskOutcome(100.0, 10.0, 125.0)


def test_an_absent_silo_receives_no_task_and_one_that_leaves_repeats_its_task() -> None:
    assert fate({"kind": "leave", "time": [90, 200]}) == TaskOutcome(100.0, 10.0, 104.0, "away", sent=False)
    assert fate({"kind": "leave", "time": [105, 200]}).due == 210.0
    assert fate({"kind": "leave", "time": [110, 200]}).due == 110.0
    assert fate({"kind": "leave", "rounds": [1]}, round_=1).fails == "away"


def test_recurring_absences_take_the_configured_fraction_of_time() -> None:
    made = script({"kind": "leave", "every": 100, "away": 30})
    away = [made.outcome("silo-00", 1, 0, float(at), 1e-9)[0].fails == "away" for at in range(100, 10100)]
    assert math.isclose(sum(away) / len(away), 0.3, abs_tol=0.01)


def test_a_network_split_blocks_tasks_and_replies_until_it_ends() -> None:
    assert fate({"kind": "split", "time": [100, 200]}) == TaskOutcome(100.0, 10.0, 104.0, "unreachable", sent=False)
    assert fate({"kind": "split", "time": [105, 200]}).due == 200.0
    assert fate({"kind": "split", "time": [10, 100]}).due == 110.0


# ------------------------------------------------------------------------------------------------ silos' data changes
def test_modalities_are_lost_and_regained_by_round() -> None:
    made = script(
        {"kind": "modality_lost", "modality": "text", "silos": ["silo-00"], "rounds": "2-3"},
        {"kind": "modality_gained", "modality": "image", "silos": "text_only", "rounds": "4-"},
    )
    assert [made.facts(SILOS[0], round_).text for round_ in range(5)] == [True, True, False, False, True]
    assert [made.facts(SILOS[3], round_).paired for round_ in range(5)] == [False] * 4 + [True]
    assert len(made.phases(SILOS[0], 5)) == 2


def test_a_silo_cannot_lose_its_only_modality() -> None:
    with pytest.raises(InputError, match="silo-03 without any modality"):
        script({"kind": "modality_lost", "modality": "text", "silos": ["silo-03"]}).phases(SILOS[3], 1)


def test_drift_replaces_a_fraction_of_the_samples() -> None:
    own, everybody = np.arange(100), np.arange(1000, 2000)
    rows = drifted_rows(Drift(amount=0.3), own, everybody, np.random.default_rng(0))
    assert (rows >= 1000).sum() == 30
    assert (own == np.arange(100)).all()


def test_label_noise_moves_the_captions_of_exactly_its_fraction() -> None:
    share = SiloDataset(
        torch.arange(10),
        CaptionRows(torch.arange(10) * 10, torch.arange(10)),
        torch.arange(1, 11),
        torch.arange(10),
        torch.arange(10),
    )
    spoilt = with_noisy_labels(LabelNoise(amount=0.5), share, np.random.default_rng(0))
    assert spoilt.text is not None
    assert spoilt.labels is not None
    was, now = share.text[:, 0], spoilt.text[:, 0]  # type: ignore[index]
    assert int((was != now).sum()) == 5
    assert sorted(was.tolist()) == sorted(now.tolist())
    assert torch.equal(spoilt.captions - 1, spoilt.labels)
    assert torch.equal(spoilt.image, share.image)  # type: ignore[arg-type]


def delta() -> Delta:
    return Delta("0" * 64, np.array([3.0, 0.0, 4.0, 0.0], np.float32), 5)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"kind": "sign_flip"}, [-3, 0, -4, 0]),
        ({"kind": "sign_flip", "scale": 2}, [-6, 0, -8, 0]),
        ({"kind": "scaled", "factor": 10}, [30, 0, 40, 0]),
        ({"kind": "nan"}, [math.nan] * 4),
        ({"kind": "prototype_poisoning"}, [3, 0, 4, 0]),
    ],
)
def test_byzantine_updates(facts: dict[str, object], expected: list[float]) -> None:
    poisoned = attacked(fault(**facts), delta(), np.random.default_rng(0))
    np.testing.assert_array_equal(poisoned.buffer, np.array(expected, np.float32))
    assert poisoned.n_samples == 5


def test_byzantine_noise_has_the_configured_size_and_the_tasks_own_seed() -> None:
    made = script({"kind": "noise", "factor": 2})
    payload = Delta("0" * 64, np.full(10_000, 3.0, np.float32), 5)

    def noise(sequence: int) -> Any:
        ((each, generator),) = made.attacks("silo-00", sequence, 0, 0.0)
        return attacked(each, payload, generator).buffer - 3.0  # type: ignore[union-attr]

    assert math.isclose(noise(1).std(), 6.0, rel_tol=0.05)
    np.testing.assert_array_equal(noise(1), noise(1))
    assert not np.array_equal(noise(1), noise(2))


def test_poisoned_prototypes_are_negated_and_losses_stay() -> None:
    poison = fault(kind="prototype_poisoning", scale=3)
    row, table = np.array([1.0, -2.0], np.float32), np.array([[1.0, -2.0]], np.float32)
    counts, generator = np.array([4]), np.random.default_rng(0)
    np.testing.assert_array_equal(attacked(poison, ModalityPrototypes(row, row, 3), generator).text, [-3, 6])
    np.testing.assert_array_equal(
        attacked(poison, ClassPrototypes(table, counts, "both"), generator).prototypes, [[-3, 6]]
    )
    np.testing.assert_array_equal(attacked(poison, Memory(table, counts), generator).centroids, [[-3, 6]])
    loss = Loss(0.5)
    assert attacked(poison, loss, generator) is loss


# ---------------------------------------------------------------------------------------- records in the message log
def struck(out: Path, kind: str) -> list[tuple[str, int]]:
    """Silo and task number of each logged fault of a kind."""
    return [(note["silo"], note["sequence"]) for note in notes(out, LogEvent.FAULT) if note.get("kind") == kind]


def failed(out: Path) -> list[tuple[str, int, str]]:
    return [(note["silo"], note["sequence"], note["reason"]) for note in notes(out, LogEvent.TASK_FAILED)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(FAULTS))
def test_every_fault_runs_and_is_logged(kind: str, tiny: Path, tmp_path: Path) -> None:
    more = {
        "late": "seconds: 3",
        "freeze": "seconds: 3",
        "leave": "time: [0, 2]",
        "split": "time: [0, 2]",
        "coordinator_crash": "after_round: 2",
        "disk_full": "round: 2",
        "modality_lost": "modality: text",
        "modality_gained": "modality: text",
    }
    where = "" if kind in ("coordinator_crash", "disk_full") else ", silos: [silo-00], rounds: [1, 2]"
    if kind in ("leave", "split"):
        where = ", silos: [silo-00]"
    scenario = resolved(tiny, f"faults=[{{kind: {kind}{where}, {more.get(kind, '')}}}]", "participation=1.0")
    outcome = run_restarted(scenario, tmp_path)
    assert outcome.phase is Phase.DONE
    assert [line["version"] for line in lines(tmp_path, "merge")] == [1, 2, 3, 4]
    assert struck(tmp_path, kind)


def test_a_dropped_reply_is_not_merged_and_the_silo_is_selected_again(tiny: Path, tmp_path: Path) -> None:
    scenario = resolved(tiny, "faults=[{kind: drop, silos: [silo-01], rounds: [1]}]", "participation=1.0")
    in_process_run.run(scenario, tmp_path)
    assert struck(tmp_path, "drop") == [("silo-01", 2)]
    assert failed(tmp_path) == [("silo-01", 2, "dropped")]
    replies = [line["replies"] for line in lines(tmp_path, "merge")]
    assert ["silo-01" in each for each in replies] == [True, False, True, True]


def test_every_note_names_the_event_that_caused_it(tiny: Path, tmp_path: Path) -> None:
    faults = "[{kind: drop, silos: [silo-01], rounds: [1]}, {kind: coordinator_crash, after_round: 2}]"
    run_restarted(resolved(tiny, f"faults={faults}", "participation=1.0"), tmp_path)
    found = records(tmp_path)
    events = {record.number: record for record in found if isinstance(record, TimelineRecord)}
    assert sorted(events) == list(range(1, 4 * 4 + 1)), "four rounds of four silos, whatever was done twice"
    (lost,) = [record for record in events.values() if record.event is TimelineEvent.FAILED]
    noted = {(each.event, each.facts.get("kind")): each for each in found if isinstance(each, NoteRecord)}
    failed, dropped = noted[LogEvent.TASK_FAILED, None], noted[LogEvent.FAULT, "drop"]
    assert (failed.caused_by, failed.facts["silo"], lost.silo) == (lost.n, "silo-01", "silo-01")
    assert dropped.facts["sequence"] == lost.sequence
    last_of_round_0 = events[4]
    assert dropped.caused_by == lost.caused_by == last_of_round_0.n, "the task was sent, and then lost, in round 1"
    assert noted[LogEvent.FAULT, "coordinator_crash"].caused_by == events[8].n
    for kind in (LogEvent.ALL_MERGED, LogEvent.RELEASED, LogEvent.RESULT_DIGESTS, LogEvent.ENDED):
        assert noted[kind, None].caused_by == events[16].n


def test_nan_is_refused_by_name_and_only_its_task_fails(tiny: Path, tmp_path: Path) -> None:
    scenario = resolved(tiny, "faults=[{kind: nan, silos: [silo-02], rounds: [2]}]", "participation=1.0")
    outcome = in_process_run.run(scenario, tmp_path)
    assert failed(tmp_path) == [("silo-02", 3, "not_finite")]
    assert outcome.summary.messages.refused == 1


@pytest.mark.slow
def test_a_lost_modality_is_not_uploaded_from_that_round_on(tiny: Path, tmp_path: Path) -> None:
    """The modalities change at both ends: what the silo trains, and what the coordinator merges."""
    scenario = resolved(
        tiny, "faults=[{kind: modality_lost, modality: text, silos: [silo-00], rounds: 2-}]", "participation=1.0"
    )
    seen: dict[int, bool] = {}

    from protocols import rcsr

    original = rcsr.PROTOCOL.merge

    def merge(self: Any, state: Any, replies: Any, round_: int) -> Any:
        reply = next(each for each in replies if each.silo.name == "silo-00")
        (update,) = [payload for payload in reply.payloads if isinstance(payload, Delta)]
        assert reply.silo.text is bool(np.any(update.buffer[self.branches["text"]]))
        seen[round_] = reply.silo.text
        return original(self, state, replies, round_)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rcsr.PROTOCOL, "merge", merge)
        in_process_run.run(scenario, tmp_path)
    assert seen == {0: True, 1: True, 2: False, 3: False}


@pytest.mark.slow
def test_a_coordinator_without_a_supervisor_skips_its_own_crash_and_logs_that(tiny: Path, tmp_path: Path) -> None:
    outcome = in_process_run.run(resolved(tiny, "faults=[{kind: coordinator_crash, after_round: 1}]"), tmp_path)
    assert outcome.phase is Phase.DONE
    assert [note["kind"] for note in notes(tmp_path, LogEvent.FAULT_SKIPPED)] == ["coordinator_crash"]


@pytest.mark.slow
def test_a_wall_clock_run_ends_and_says_that_it_cannot_be_replayed(tiny: Path, tmp_path: Path) -> None:
    late, drop = "{kind: late, seconds: 0.2}", "{kind: drop, silos: [silo-01], rounds: [1]}"
    split = "{kind: split, silos: [silo-00], noticed: 0.1, time: [0, 1000]}"
    assert (
        in_process_run.run(resolved(tiny, f"faults=[{late}, {drop}, {split}]", "clock=wall"), tmp_path).phase
        is Phase.DONE
    )
    assert notes(tmp_path, LogEvent.WALL_CLOCK_FAULTS)
    assert "unreachable" in {reason for *_, reason in failed(tmp_path)}


# -------------------------------------------------------------------------------------------------------- documents
def test_the_reference_page_lists_every_fault_with_a_valid_example() -> None:
    text = (ROOT / "docs" / "reference" / "faults.md").read_text()
    listed = [yaml.safe_load(line) for line in re.findall(r"^    - (\{.*\})$", text, flags=re.MULTILINE)]
    assert {line["kind"] for line in listed} == set(FAULTS)
    for line in listed:
        fault(**line)


def test_the_reference_page_names_every_option_of_every_fault() -> None:
    text = (ROOT / "docs" / "reference" / "faults.md").read_text()
    shared = {"kind", "silos", "share", "rounds", "time", "probability"}
    for name, each in FAULTS.items():
        for option in set(each.model_fields) - shared:
            assert f"`{option}`" in text, f"{name}.{option}"
