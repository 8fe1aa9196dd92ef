"""The rounds state machine with over-selection, buffered and async modes, stale replies, late and absent silos."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.participation import RoundsPlan, Sampling
from coordinator.round_events import (
    Arrived,
    Deadline,
    Discard,
    Failed,
    Joined,
    Lost,
    Merge,
    Merged,
    Phase,
    Send,
    SetDeadline,
    StillConnected,
    Switched,
    WaitEnded,
)
from coordinator.rounds import Rounds
from fedmq.errors import InputError
from tests.round_steps import arrived, joined, sent
from tests.threaded_run import resolved, run

SILOS = tuple(f"silo-{index:02d}" for index in range(6))


def plan(**changes: object) -> RoundsPlan:
    return replace(RoundsPlan(seed=1, rounds=9, silos=SILOS, eligible=SILOS), **changes)  # type: ignore[arg-type]


def test_over_selection_selects_more_silos_and_merges_the_first_replies_up_to_the_cohort_size() -> None:
    rounds, actions = joined(plan(participation=0.5, over_select=1.6))
    selected = sent(actions)
    assert len(selected) == 5
    rounds, actions = arrived(rounds, *selected[4:1:-1])
    assert actions == (Merge(0, tuple(Arrived(silo, 1) for silo in selected[2:])),)
    rounds, actions = rounds.handle(Merged(1))
    assert not {*selected[:2]} & {*sent(actions)}  # their tasks are still pending
    _, actions = rounds.handle(Arrived(selected[0], 1))
    assert actions == (Discard(selected[0], 1, "surplus"),)


def test_buffered_mode_keeps_a_cohort_of_tasks_pending_and_selects_a_silo_once_per_version() -> None:
    rounds, actions = joined(plan(mode="buffered", participation=0.67, buffer=2))
    first = sent(actions)
    assert len(first) == 4
    rounds, actions = arrived(rounds, first[3])
    (other,) = sent(actions)
    assert other not in first
    assert len(rounds.pending) == 4
    rounds, actions = arrived(rounds, first[1])
    assert actions == (Merge(0, (Arrived(first[1], 1), Arrived(first[3], 1))),)
    rounds, actions = rounds.handle(Merged(1))
    assert len(rounds.pending) == 4
    assert [send.base_version for send in actions if isinstance(send, Send)] == [1]


def test_a_reply_two_versions_old_is_merged_with_the_fresh_ones() -> None:
    rounds, _ = joined(plan(mode="buffered", buffer=2))
    for version in (1, 2):
        rounds, _ = arrived(rounds, *SILOS[1:3])
        rounds, _ = rounds.handle(Merged(version))
    assert rounds.pending["silo-00"].base_version == 0
    _, actions = arrived(rounds, "silo-00", "silo-01")
    assert actions == (Merge(2, (Arrived("silo-00", 1), Arrived("silo-01", 3))),)


def test_async_mode_merges_replies_one_by_one() -> None:
    rounds, actions = joined(plan(mode="async", participation=0.5))
    one, two, _ = sent(actions)
    rounds, actions = arrived(rounds, two)
    assert actions == (Merge(0, (Arrived(two, 1),)),)
    rounds, actions = rounds.handle(Merged(1))
    assert len(sent(actions)) == 1
    _, actions = arrived(rounds, one)
    assert actions == (Merge(1, (Arrived(one, 1),)),)


def test_a_deadline_merges_the_arrived_replies_or_else_the_next_one() -> None:
    rounds, actions = joined(plan(mode="buffered", buffer=4, patience=5.0))
    assert actions[-1] == SetDeadline(0, 5.0)
    rounds, _ = arrived(rounds, "silo-04")
    rounds, actions = rounds.handle(Deadline(0))
    assert actions == (Merge(0, (Arrived("silo-04", 1),)),)
    rounds, actions = rounds.handle(Merged(1))
    assert actions[-1] == SetDeadline(1, 5.0)
    rounds, actions = rounds.handle(Deadline(1))
    assert actions == ()
    _, actions = arrived(rounds, "silo-00")
    assert actions == (Merge(1, (Arrived("silo-00", 1),)),)


def test_a_failed_task_goes_to_a_silo_not_yet_selected_at_this_version() -> None:
    rounds, actions = joined(plan(mode="buffered", participation=0.67, buffer=4))
    selected = sent(actions)
    tried = set(selected)
    for _ in range(2):
        rounds, actions = rounds.handle(Failed(selected[0], 1, "x"))
        (substitute,) = sent(actions)
        assert substitute not in tried
        tried.add(substitute)
        selected[0] = substitute
    assert tried == set(SILOS)
    rounds, actions = rounds.handle(Failed(selected[0], 1, "x"))
    assert actions == ()
    _, actions = arrived(rounds, *selected[1:])
    assert len(actions[0].replies) == 3  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", ["sync", "buffered", "async"])
def test_when_every_task_fails_nothing_is_merged_and_the_run_continues(mode: str) -> None:
    rounds, _ = joined(plan(mode=mode))
    for silo in SILOS:
        rounds, actions = rounds.handle(Failed(silo, 1, "x"))
    assert actions == (Merge(0, ()),)
    _, actions = rounds.handle(Merged(1))
    assert set(sent(actions)) == set(SILOS)


@pytest.mark.parametrize("mode", ["sync", "buffered", "async"])
def test_silos_that_are_off_are_not_selected(mode: str) -> None:
    off = frozenset(SILOS[:4])
    rounds, actions = joined(plan(mode=mode), off=off)
    assert sent(actions) == ["silo-04", "silo-05"]
    rounds, actions = rounds.handle(Switched("silo-00", True))
    assert sent(actions) == ([] if mode == "sync" else ["silo-00"])
    rounds, actions = rounds.handle(Switched("silo-00", False))
    assert actions == ()
    assert "silo-00" not in rounds.pending or mode != "sync"


@pytest.mark.parametrize("mode", ["sync", "buffered", "async"])
def test_when_all_silos_are_off_the_first_to_return_is_selected(mode: str) -> None:
    rounds, actions = joined(plan(mode=mode, patience=None if mode == "async" else 3.0), off=frozenset(SILOS))
    assert actions == ()
    assert rounds.phase is Phase.COLLECTING
    _, actions = rounds.handle(Switched("silo-03", True))
    assert sent(actions) == ["silo-03"]
    assert sum(isinstance(action, SetDeadline) for action in actions) == (mode != "async")


def test_power_of_choice_selects_the_silos_with_the_highest_last_known_loss() -> None:
    sampling = Sampling(dict.fromkeys(SILOS, 1), candidates=6)
    rounds, _ = joined(plan(participation=0.34, sampling=sampling))
    heard = []
    for version in (1, 2, 3):  # silos without a known loss come first
        for silo in sorted(rounds.pending):
            heard.append(silo)
            rounds, _ = rounds.handle(Arrived(silo, 1, loss=float(silo[-2:])))
        rounds, actions = rounds.handle(Merged(version))
    assert sorted(heard) == list(SILOS)
    assert sent(actions) == ["silo-04", "silo-05"]


def test_a_buffer_is_a_third_of_the_cohort_by_default_and_never_larger_than_the_cohort() -> None:
    assert plan(mode="buffered").wanted(0) == 2
    assert plan(mode="buffered", buffer=4).wanted(0) == 4
    assert plan(mode="buffered", buffer=99).wanted(0) == 6
    assert plan(mode="async", buffer=4).wanted(0) == 1


# -------------------------------------------------------------------------------- a minimum, and silos that join late
FOUR_SILOS = ("silo-00", "silo-01", "silo-02", "silo-03")
PLAN = RoundsPlan(seed=1, rounds=5, silos=FOUR_SILOS, eligible=FOUR_SILOS, minimum=2)


def test_a_run_starts_with_the_minimum_and_selects_late_silos_from_the_next_round() -> None:
    rounds, actions = joined(PLAN, "silo-03")
    assert (rounds.phase, actions) == (Phase.GATHERING, ())
    rounds, actions = rounds.handle(Joined("silo-01"))
    assert rounds.phase is Phase.COLLECTING
    assert sent(actions) == ["silo-01", "silo-03"]
    rounds, actions = rounds.handle(Joined("silo-00"))
    assert not actions, "the round has begun"
    rounds, _ = rounds.handle(Arrived("silo-01", 1))
    rounds, actions = rounds.handle(Arrived("silo-03", 1))
    assert actions == (Merge(0, (Arrived("silo-01", 1), Arrived("silo-03", 1))),)
    rounds, actions = rounds.handle(Merged(1))
    assert sent(actions) == ["silo-00", "silo-01", "silo-03"]


def test_silos_that_the_method_cannot_select_do_not_count() -> None:
    rounds, _ = joined(replace(PLAN, eligible=FOUR_SILOS[1:]), "silo-00", "silo-01")
    assert rounds.phase is Phase.GATHERING
    rounds, _ = rounds.handle(Lost("silo-01"))
    rounds, _ = rounds.handle(Joined("silo-02"))
    assert rounds.phase is Phase.GATHERING, "a silo that left again does not count"


def test_a_resumed_run_waits_a_while_for_silos_that_took_part_then_starts_with_the_minimum() -> None:
    rounds, _ = joined(replace(PLAN, mode="async"), *FOUR_SILOS)
    rounds, _ = rounds.handle(Arrived("silo-00", 1))
    resumed = Rounds.from_record(replace(PLAN, mode="async"), rounds.after_merge().to_record())
    resumed, _ = resumed.handle(Joined("silo-00"))
    resumed, actions = resumed.handle(Joined("silo-01"))
    assert resumed.phase is Phase.GATHERING
    assert sent(actions) == ["silo-01"], "its pending task is sent again"
    resumed, actions = resumed.handle(WaitEnded())
    assert resumed.phase is Phase.COLLECTING
    assert sent(actions) == ["silo-00"]
    assert set(resumed.pending) >= {"silo-02", "silo-03"}
    resumed, actions = resumed.handle(Joined("silo-02"))
    assert sent(actions) == ["silo-02"]


def test_silos_that_stayed_connected_begin_together_and_get_their_pending_tasks_again() -> None:
    plan = replace(PLAN, mode="buffered", buffer=2, minimum=None)
    rounds, _ = joined(plan, *FOUR_SILOS)
    rounds, _ = rounds.handle(Arrived("silo-00", 1))
    rounds, _ = rounds.handle(Arrived("silo-01", 1))
    restored = Rounds.from_record(plan, rounds.after_merge().to_record())
    waiting, actions = restored.handle(StillConnected(FOUR_SILOS[:3]), 7)
    assert waiting.phase is Phase.GATHERING, "the fourth is not there"
    assert [(each.silo, each.sequence, each.cause) for each in actions if isinstance(each, Send)] == [("silo-02", 1, 7)]
    begun, actions = restored.handle(StillConnected(FOUR_SILOS))
    assert begun.phase is Phase.COLLECTING
    assert begun.online == frozenset(FOUR_SILOS)
    sent = {each.silo: each.sequence for each in actions if isinstance(each, Send)}
    assert sent == {"silo-02": 1, "silo-03": 1, "silo-00": 2, "silo-01": 2}
    assert len(actions) == len(sent), "every task is sent once"


def test_a_resumed_run_waits_for_no_silo_that_had_not_joined_before() -> None:
    rounds, _ = joined(PLAN, *FOUR_SILOS[:2])
    rounds, _ = rounds.handle(Arrived("silo-00", 1))
    rounds, _ = rounds.handle(Arrived("silo-01", 1))
    resumed, _ = Rounds.from_record(PLAN, rounds.after_merge().to_record()).handle(Joined("silo-01"))
    resumed, _ = resumed.handle(WaitEnded())
    assert resumed.phase is Phase.GATHERING, "the minimum is two"
    resumed, actions = resumed.handle(Joined("silo-00"))
    assert sent(actions) == ["silo-00", "silo-01"]


def test_a_minimum_that_cannot_be_reached_is_refused(tiny: Path, tmp_path: Path) -> None:
    one_sided = resolved(
        tiny, "participation.minimum=4", "missing_modality.silos={silo-00: image}", "protocol=paired_only"
    )
    with pytest.raises(InputError, match="at most 3, the silos that paired_only can select"):
        run(one_sided, tmp_path)
