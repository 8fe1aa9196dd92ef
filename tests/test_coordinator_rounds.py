"""The rounds state machine: every event in every phase, and invariants of all sequences of events."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator import rounds as machine
from coordinator.participation import RoundsPlan, Sampling
from coordinator.round_events import (
    Action,
    Arrived,
    Deadline,
    Discard,
    EvaluationAborted,
    Event,
    Expelled,
    Failed,
    Finish,
    Joined,
    Lost,
    Merge,
    Merged,
    Phase,
    Send,
    SetDeadline,
    StillConnected,
    Stop,
    Switched,
    WaitEnded,
)
from coordinator.rounds import TABLE, IllegalEventError, Rounds
from tests.round_steps import arrived, joined, sent

SILOS = ("silo-00", "silo-01", "silo-02", "silo-03")


def plan(**changes: object) -> RoundsPlan:
    return replace(RoundsPlan(seed=1, rounds=3, silos=SILOS, eligible=SILOS), **changes)  # type: ignore[arg-type]


def test_the_first_round_begins_once_every_silo_has_joined() -> None:
    rounds = Rounds(plan())
    for silo in SILOS[:-1]:
        rounds, actions = rounds.handle(Joined(silo))
        assert (rounds.phase, actions) == (Phase.GATHERING, ())
    rounds, actions = rounds.handle(Joined(SILOS[-1]))
    assert rounds.phase is Phase.COLLECTING
    assert actions == tuple(Send(silo, 1, 0, 0) for silo in SILOS)


@pytest.mark.parametrize("changes", [{}, {"mode": "buffered", "buffer": len(SILOS)}])
def test_replies_are_merged_in_the_fixed_silo_order_whatever_the_order_of_arrival(changes: dict[str, object]) -> None:
    rounds, _ = joined(plan(**changes))
    _, actions = arrived(rounds, *SILOS[::-1])
    assert actions == (Merge(0, tuple(Arrived(silo, 1) for silo in SILOS)),)


@pytest.mark.parametrize("phase", list(Phase))
def test_illegal_events_raise_and_change_nothing(phase: Phase) -> None:
    rounds = replace(joined(plan())[0], phase=phase)
    before = repr(rounds)
    samples: list[Event] = [
        Joined("silo-00"),
        StillConnected(("silo-00",)),
        Lost("silo-00"),
        Switched("silo-00", False),
        Arrived("silo-00", 1),
        Failed("silo-00", 1, "x"),
        Deadline(0),
        Merged(1),
        Stop(),
        Expelled("silo-00"),
        WaitEnded(),
        EvaluationAborted(),
    ]
    for event in samples:
        if type(event) not in TABLE[phase]:
            with pytest.raises(IllegalEventError, match=phase.value):
                rounds.handle(event)
            assert repr(rounds) == before


def test_a_run_resumes_without_an_expelled_silo_whose_task_then_fails() -> None:
    live, _ = joined(plan(mode="buffered", participation=0.5, buffer=1))
    live, (merge,) = live.handle(Arrived(min(live.pending), 1))
    (slow,) = live.pending
    rounds = Rounds.from_record(live.plan, live.after_merge().to_record())
    expelled, actions = rounds.handle(Expelled(slow))
    assert isinstance(merge, Merge) and set(rounds.pending) == {slow}
    assert actions == ()
    assert expelled == replace(rounds, gone=frozenset({slow}))
    others = [silo for silo in SILOS if silo != slow]
    for silo in others:
        assert expelled.phase is Phase.GATHERING
        expelled, actions = expelled.handle(Joined(silo))
    assert expelled.phase is Phase.COLLECTING
    assert set(sent(actions)) < set(others)
    failed, _ = expelled.handle(Failed(slow, expelled.pending[slow].sequence, "expelled", gone=True))
    assert slow not in failed.pending and slow in failed.gone


def test_the_last_silo_that_a_run_waits_for_can_be_expelled_and_the_run_starts() -> None:
    rounds, _ = joined(plan(), *SILOS[:-1])
    rounds, actions = rounds.handle(Expelled(SILOS[-1]))
    assert rounds.phase is Phase.COLLECTING
    assert set(sent(actions)) <= set(SILOS[:-1])


def test_an_expelled_silo_is_not_selected_until_it_joins_again() -> None:
    rounds, _ = joined(plan(participation=1.0))
    expelled, actions = rounds.handle(Expelled("silo-01"))
    assert (expelled.phase, actions) == (Phase.COLLECTING, ())
    assert "silo-01" in expelled.gone and "silo-01" not in expelled.online
    assert "silo-01" not in expelled.handle(Joined("silo-01"))[0].gone
    with pytest.raises(IllegalEventError, match="silo-77"):
        Rounds(plan()).handle(Expelled("silo-77"))


def test_an_aborted_evaluation_stops_only_a_run_whose_rounds_are_done() -> None:
    assert [phase for phase in Phase if EvaluationAborted in TABLE[phase]] == [Phase.DONE]
    rounds, _ = joined(plan(rounds=1))
    rounds, _ = arrived(rounds, *SILOS)
    rounds, _ = rounds.handle(Merged(1))
    assert rounds.phase is Phase.DONE
    assert rounds.handle(EvaluationAborted()) == (replace(rounds, phase=Phase.STOPPED), ())


def test_an_unknown_silo_and_a_wrong_version_are_illegal() -> None:
    rounds, _ = joined(plan())
    with pytest.raises(IllegalEventError, match="silo-77"):
        rounds.handle(Joined("silo-77"))
    rounds, _ = arrived(rounds, *SILOS)
    with pytest.raises(IllegalEventError, match=r"Merged\(7\)"):
        rounds.handle(Merged(7))


def test_the_deadline_merges_the_arrived_replies_once_they_are_a_quorum() -> None:
    rounds, _ = joined(plan(patience=5.0, quorum=0.5))
    rounds, _ = arrived(rounds, *SILOS[:1])
    rounds, actions = rounds.handle(Deadline(0))
    assert actions == ()  # one of four is no quorum
    rounds, actions = rounds.handle(Arrived("silo-01", 1))
    assert actions == (Merge(0, (Arrived("silo-00", 1), Arrived("silo-01", 1))),)


def test_stragglers_are_not_selected_before_they_reply_and_their_late_replies_are_discarded() -> None:
    rounds, _ = joined(plan(patience=5.0, quorum=0.5))
    rounds, _ = arrived(rounds, *SILOS[:2])
    rounds, _ = rounds.handle(Deadline(0))
    rounds, actions = rounds.handle(Merged(1))
    assert sent(actions) == ["silo-00", "silo-01"]
    assert SetDeadline(1, 5.0) in actions
    _, actions = rounds.handle(Arrived("silo-03", 1))
    assert actions == (Discard("silo-03", 1, "late"),)


@pytest.mark.parametrize("returns_first", [False, True])
def test_the_task_of_a_silo_given_up_fails_and_the_silo_is_selected_again_once_it_is_back(returns_first: bool) -> None:
    rounds, _ = joined(plan())
    rounds, _ = arrived(rounds, *SILOS[:3])
    rounds, _ = rounds.handle(Lost("silo-03"))
    if returns_first:
        rounds, _ = rounds.handle(Joined("silo-03"))
    rounds, actions = rounds.handle(Failed("silo-03", 1, "stayed_away", gone=True))
    assert actions == (Merge(0, tuple(Arrived(silo, 1) for silo in SILOS[:3])),)
    rounds, actions = rounds.handle(Merged(1))
    assert (Send("silo-03", 2, 1, 1) in actions) is returns_first
    rounds, _ = rounds.handle(Joined("silo-03"))
    assert not rounds.gone


def test_when_all_silos_are_gone_the_round_waits_for_the_first_to_return() -> None:
    rounds, _ = joined(plan())
    for silo in SILOS:
        rounds, _ = rounds.handle(Lost(silo))
        rounds, actions = rounds.handle(Failed(silo, 1, "stayed_away", gone=True))
    assert actions == (Merge(0, ()),)
    rounds, actions = rounds.handle(Merged(1))
    assert (rounds.phase, rounds.cohort, actions) == (Phase.COLLECTING, (), ())
    _, actions = rounds.handle(Joined("silo-01"))
    assert actions == (Send("silo-01", 2, 1, 1),)


def test_an_opening_round_selects_all_silos_once_and_waits_for_all_of_them() -> None:
    rounds, actions = joined(plan(participation=0.5, first_round_selects_all=True))
    assert sent(actions) == list(SILOS)
    rounds, actions = arrived(rounds, *SILOS[:3])
    assert (rounds.phase, actions) == (Phase.COLLECTING, ())
    rounds, (merge,) = arrived(rounds, *SILOS[3:])
    assert isinstance(merge, Merge)
    assert [reply.silo for reply in merge.replies] == list(SILOS)
    rounds, again = rounds.handle(Merged(1))
    assert len(again) == len(rounds.cohort) == 2


#: A kind of event, mostly of a silo with a pending task, and a number that picks the silo.
EVENT_CHOICES = st.tuples(
    st.sampled_from(
        ["reply"] * 8 + ["fail", "give up", "lose", "join", "off", "on", "deadline", "repeat", "old deadline", "abort"]
    ),
    st.integers(0, 11),
)


def chosen_event(rounds: Rounds, what: str, number: int) -> Event:
    """The chosen event for the present state; during a merge, a reply or a failure becomes the end of the merge."""
    if rounds.phase is Phase.MERGING and what in {"reply", "fail"}:
        return Merged(rounds.version + 1)
    out = sorted(rounds.pending)
    silo = out[number % len(out)] if out else SILOS[number % 4]
    sequence = rounds.pending[silo].sequence if out else 1
    match what:
        case "reply":
            return Arrived(silo, sequence, number / 10 if number % 3 else None)
        case "fail" | "give up":
            return Failed(silo, sequence, "x", what == "give up")
        case "repeat":
            return Arrived(SILOS[number % 4], rounds.sequences.get(SILOS[number % 4], 1) - number // 4)
        case "deadline" | "old deadline":
            return Deadline(rounds.version - (what == "old deadline"))
        case "off" | "on":
            return Switched(SILOS[number % 4], what == "on")
        case "lose":
            return Lost(SILOS[number % 4])
        case "abort":
            return EvaluationAborted()
        case _:
            return Joined(SILOS[number % 4])


PLANS = st.builds(
    plan,
    mode=st.sampled_from(["sync", "buffered", "async"]),
    rounds=st.integers(1, 6),
    participation=st.sampled_from([0.5, 0.75, 1.0]),
    quorum=st.sampled_from([0.5, 1.0]),
    over_select=st.sampled_from([1.0, 1.5]),
    buffer=st.sampled_from([None, 1, 2, 4]),
    patience=st.sampled_from([None, 1.0]),
    max_staleness=st.sampled_from([None, 0, 1]),
    first_round_selects_all=st.booleans(),
    sampling=st.sampled_from([Sampling(), Sampling(dict.fromkeys(SILOS, 3)), Sampling(dict.fromkeys(SILOS, 3), 3)]),
)


def stalled(rounds: Rounds) -> bool:
    """Whether no task is pending although a silo could be selected."""
    selectable = set(rounds.plan.eligible) - rounds.gone - rounds.off
    return rounds.phase is Phase.COLLECTING and not rounds.pending and bool(selectable)


class InvariantChecker:
    """Feeds events to a state machine and checks its invariants; an illegal event must change nothing."""

    def __init__(self, plan_: RoundsPlan) -> None:
        self.rounds = Rounds(plan_)
        self.merged: set[tuple[str, int]] = set()
        self.bases: dict[tuple[str, int], int] = {}
        for silo in SILOS:
            self.feed(Joined(silo))

    def feed(self, event: Event) -> None:
        before = self.rounds
        try:
            self.rounds, actions = before.handle(event)
        except IllegalEventError:
            assert self.rounds is before
            return
        rounds, plan_ = self.rounds, before.plan
        assert rounds.version - before.version == isinstance(event, Merged)
        exits = TABLE[before.phase][type(event)].exits
        assert rounds.phase in {before.phase, *(way.to for way in exits)}
        assert not stalled(rounds)
        for action in actions:
            self.check_action(action, event)
        if plan_.mode != "sync":
            cohort = plan_.cohort_size(rounds.version)
            waiting = len(rounds.arrived) if plan_.wanted(rounds.version) == cohort else 0
            assert len(rounds.pending) + waiting <= cohort

    def check_action(self, action: Action, event: Event) -> None:
        rounds, allowed = self.rounds, allowed_age(self.rounds.plan)
        if isinstance(action, Merge):
            keys = {(reply.silo, reply.sequence) for reply in action.replies}
            assert keys or rounds.failed, "a merge of nothing that nobody failed"
            assert not keys & self.merged
            assert len({silo for silo, _ in keys}) == len(keys)
            assert all(rounds.version - self.bases[key] <= allowed for key in keys)
            self.merged |= keys
        if isinstance(action, Send):
            assert rounds.pending[action.silo].sequence == action.sequence
            key = action.silo, action.sequence
            assert self.bases.setdefault(key, action.base_version) == action.base_version
            assert action.silo not in rounds.off or isinstance(event, Joined)
        if isinstance(action, Discard) and action.reason == "stale":
            assert rounds.version - self.bases[action.silo, action.sequence] > allowed


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(PLANS, st.lists(EVENT_CHOICES, min_size=20, max_size=60))
def test_no_sequence_of_events_merges_a_reply_twice_or_too_stale_stalls_a_run_or_skips_a_version(
    plan_: RoundsPlan, choices: list[tuple[str, int]]
) -> None:
    checker = InvariantChecker(plan_)
    for what, number in choices:
        checker.feed(chosen_event(checker.rounds, what, number))


def allowed_age(plan_: RoundsPlan) -> float:
    if plan_.mode == "sync":
        return 0
    return float("inf") if plan_.max_staleness is None else plan_.max_staleness


@settings(max_examples=40, deadline=None)
@given(PLANS, st.randoms(use_true_random=False))
def test_a_run_ends_with_replies_in_any_order_and_occasional_failures(plan_: RoundsPlan, chance: Random) -> None:
    rounds, _ = joined(plan_)
    failures, events = 6, 0
    actions: tuple[Action, ...] = ()
    while rounds.phase is not Phase.DONE:
        events += 1
        assert events < 400
        event: Event
        if rounds.phase is Phase.MERGING:
            event = Merged(rounds.version + 1)
        else:
            silo = chance.choice(sorted(rounds.pending))
            sequence = rounds.pending[silo].sequence
            if failures and chance.random() < 0.3:
                failures -= 1
                event = Failed(silo, sequence, "x")
            else:
                event = Arrived(silo, sequence, chance.random())
        rounds, actions = rounds.handle(event)
    assert rounds.version == plan_.rounds
    assert actions == (Finish(),)


@settings(max_examples=30, deadline=None)
@given(PLANS, st.randoms(use_true_random=False))
def test_a_state_machine_restored_from_any_checkpoint_sends_and_merges_the_same(
    plan_: RoundsPlan, chance: Random
) -> None:
    """Restored after a merge, it resends the pending tasks and then continues as an uninterrupted one."""
    rounds, _ = joined(plan_)
    for _ in range(chance.randrange(30)):
        if rounds.phase is Phase.COLLECTING:
            silo = chance.choice(sorted(rounds.pending))
            rounds, _ = rounds.handle(Arrived(silo, rounds.pending[silo].sequence, chance.random()))
        elif rounds.phase is Phase.MERGING:
            rounds, _ = rounds.handle(Merged(rounds.version + 1))
    while rounds.phase is Phase.COLLECTING:
        silo = min(rounds.pending)
        rounds, _ = rounds.handle(Arrived(silo, rounds.pending[silo].sequence, 0.5))
    if rounds.phase is not Phase.MERGING:
        return
    restored = Rounds.from_record(plan_, rounds.after_merge().to_record())
    open_tasks = dict(restored.pending)
    again: list[Action] = []
    for name in SILOS:
        restored, some = restored.handle(Joined(name))
        again += some
    live, expected = rounds.handle(Merged(rounds.version + 1))
    resent = [Send(name, each.sequence, each.base_version, each.round) for name, each in open_tasks.items()]
    assert set(again) == {*resent, *expected}
    assert replace(restored, online=live.online) == live


def test_the_diagram_in_the_docs_is_that_of_the_transition_table() -> None:
    drawing = (Path(__file__).parent.parent / "docs" / "images" / "rounds.svg").read_text()
    drawn = {
        (*arrow.split("-"), event)
        for arrow, texts in re.findall(r'<g id="([a-z]+-[a-z]+)">(.*?)</g>', drawing, re.DOTALL)
        for event in re.findall(r"<text.*?>(\w+)</text>", texts)
    }
    assert drawn == {
        (phase, way.to, event.__name__)
        for phase, row in machine.TABLE.items()
        for event, transition in row.items()
        for way in transition.exits
    }


# ------------------------------------------------------------------------------ cases that random events do not cover


def test_floating_point_error_does_not_round_up_the_number_of_tasks_or_the_quorum() -> None:
    names = tuple(f"silo-{index:02d}" for index in range(25))
    assert 1.12 * 25 > 28
    assert RoundsPlan(1, 1, names, names, over_select=1.12).tasks_out(0) == 28
    assert 0.28 * 25 > 7
    rounds, _ = joined(RoundsPlan(1, 1, names, names, patience=5.0, quorum=0.28))
    rounds, _ = arrived(rounds, *names[:6])
    rounds, actions = rounds.handle(Deadline(0))
    assert actions == ()
    rounds, _ = rounds.handle(Arrived(names[6], 1))
    assert rounds.phase is Phase.MERGING


def test_a_run_is_stalled_when_all_silos_are_off_unless_one_given_up_may_return() -> None:
    for gone in (False, True):
        rounds, _ = joined(plan())
        assert not rounds.stalled
        for silo in SILOS:
            rounds, _ = rounds.handle(Lost(silo))
            rounds, _ = rounds.handle(Switched(silo, False))
            rounds, _ = rounds.handle(Failed(silo, 1, "stayed_away", gone=gone and silo == SILOS[0]))
        assert not rounds.stalled  # a merge is under way
        rounds, _ = rounds.handle(Merged(1))
        assert rounds.stalled is not gone


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_a_reply_at_the_staleness_limit_is_merged_and_an_older_one_is_discarded(limit: int) -> None:
    rounds, _ = joined(plan(mode="async", rounds=9, max_staleness=limit))
    for age in range(limit + 2):
        after, actions = rounds.handle(Arrived("silo-00", 1))
        if age <= limit:
            assert actions[-1] == Merge(age, (Arrived("silo-00", 1),))
        else:
            assert actions[0] == Discard("silo-00", 1, "stale")
        rounds, _ = rounds.handle(Arrived("silo-01", rounds.pending["silo-01"].sequence))
        rounds, _ = rounds.handle(Merged(age + 1))
    assert after.phase is Phase.COLLECTING
