"""The rounds machine: every event in every phase, and what no sequence of events may ever do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator import rounds as machine
from coordinator.rounds import (
    TABLE,
    Action,
    Arrived,
    Deadline,
    Discard,
    Event,
    Failed,
    Finish,
    IllegalEventError,
    Joined,
    Lost,
    Merge,
    Merged,
    Phase,
    Plan,
    Rounds,
    Send,
    SetDeadline,
    Stop,
    Switched,
)
from fedmq.participation import Sampling

SILOS = ("silo-00", "silo-01", "silo-02", "silo-03")


def plan(**changes: object) -> Plan:
    return replace(Plan(seed=1, rounds=3, silos=SILOS, eligible=SILOS), **changes)  # type: ignore[arg-type]


def gathered(plan_: Plan) -> tuple[Rounds, list[Send]]:
    rounds, actions = Rounds(plan_), ()
    for silo in plan_.silos:
        rounds, actions = rounds.handle(Joined(silo))
    return rounds, [action for action in actions if isinstance(action, Send)]


def answer(rounds: Rounds, sends: list[Send]) -> tuple[Rounds, tuple[Action, ...]]:
    actions: tuple[Action, ...] = ()
    for send in sends:
        rounds, actions = rounds.handle(Arrived(send.silo, send.sequence))
    return rounds, actions


def test_the_first_round_begins_once_every_silo_has_joined() -> None:
    rounds = Rounds(plan())
    for silo in SILOS[:-1]:
        rounds, actions = rounds.handle(Joined(silo))
        assert (rounds.phase, actions) == (Phase.GATHERING, ())
    rounds, actions = rounds.handle(Joined(SILOS[-1]))
    assert rounds.phase is Phase.COLLECTING
    assert actions == tuple(Send(silo, 1, 0, 0) for silo in SILOS)


def test_a_round_merges_in_the_fixed_silo_order_whoever_comes_first() -> None:
    rounds, sends = gathered(plan())
    _, actions = answer(rounds, sends[::-1])
    assert actions == (Merge(0, tuple(Arrived(silo, 1) for silo in SILOS)),)


def test_a_merge_leads_to_the_next_round_and_the_last_one_to_the_end() -> None:
    rounds, sends = gathered(plan(rounds=2))
    for version in (1, 2):
        rounds, _ = answer(rounds, sends)
        assert rounds.phase is Phase.MERGING
        rounds, actions = rounds.handle(Merged(version))
        sends = [action for action in actions if isinstance(action, Send)]
    assert rounds.phase is Phase.DONE
    assert actions == (Finish(),)


def test_a_second_reply_is_discarded() -> None:
    rounds, sends = gathered(plan())
    rounds, _ = rounds.handle(Arrived("silo-00", 1))
    again, actions = rounds.handle(Arrived("silo-00", 1))
    assert again == rounds
    assert actions == (Discard("silo-00", 1, "duplicate"),)
    assert sends


@pytest.mark.parametrize("phase", list(Phase))
def test_illegal_events_raise_and_change_nothing(phase: Phase) -> None:
    rounds = replace(gathered(plan())[0], phase=phase)
    before = repr(rounds)
    samples: list[Event] = [
        Joined("silo-00"),
        Lost("silo-00"),
        Switched("silo-00", False),
        Arrived("silo-00", 1),
        Failed("silo-00", 1, "x"),
        Deadline(0),
        Merged(1),
        Stop(),
    ]
    for event in samples:
        if type(event) not in TABLE[phase]:
            with pytest.raises(IllegalEventError, match=phase.value):
                rounds.handle(event)
            assert repr(rounds) == before


def test_an_unknown_silo_and_a_wrong_version_are_illegal() -> None:
    rounds, sends = gathered(plan())
    with pytest.raises(IllegalEventError, match="silo-77"):
        rounds.handle(Joined("silo-77"))
    rounds, _ = answer(rounds, sends)
    with pytest.raises(IllegalEventError, match=r"Merged\(7\)"):
        rounds.handle(Merged(7))


def test_the_deadline_merges_what_is_there_if_it_is_a_quorum() -> None:
    rounds, sends = gathered(plan(patience=5.0, quorum=0.5))
    rounds, _ = answer(rounds, sends[:1])
    rounds, actions = rounds.handle(Deadline(0))
    assert actions == ()  # one of four is no quorum
    rounds, actions = rounds.handle(Arrived(sends[1].silo, 1))
    assert actions == (Merge(0, (Arrived("silo-00", 1), Arrived("silo-01", 1))),)


def test_stragglers_are_not_asked_again_until_they_answered_and_come_too_late() -> None:
    rounds, sends = gathered(plan(patience=5.0, quorum=0.5))
    rounds, _ = answer(rounds, sends[:2])
    rounds, _ = rounds.handle(Deadline(0))
    rounds, actions = rounds.handle(Merged(1))
    assert [action.silo for action in actions if isinstance(action, Send)] == ["silo-00", "silo-01"]
    assert SetDeadline(1, 5.0) in actions
    _, actions = rounds.handle(Arrived("silo-03", 1))
    assert actions == (Discard("silo-03", 1, "late"),)


def test_a_silo_that_returns_gets_its_open_task_under_the_same_number() -> None:
    rounds, _ = gathered(plan())
    rounds, _ = rounds.handle(Lost("silo-02"))
    _, actions = rounds.handle(Joined("silo-02"))
    assert actions == (Send("silo-02", 1, 0, 0),)


def test_a_silo_given_up_shrinks_the_cohort_and_is_asked_again_once_it_is_back() -> None:
    rounds, sends = gathered(plan())
    rounds, _ = answer(rounds, sends[:3])
    rounds, _ = rounds.handle(Lost("silo-03"))
    rounds, actions = rounds.handle(Failed("silo-03", 1, "stayed away", gone=True))
    assert actions == (Merge(0, tuple(Arrived(silo, 1) for silo in SILOS[:3])),)
    rounds, actions = rounds.handle(Merged(1))
    assert "silo-03" not in {action.silo for action in actions if isinstance(action, Send)}
    rounds, _ = rounds.handle(Joined("silo-03"))
    assert not rounds.gone


def test_a_silo_that_is_back_before_it_is_given_up_has_failed_a_task_and_is_asked_the_next() -> None:
    rounds, sends = gathered(plan())
    rounds, _ = answer(rounds, sends[:3])
    rounds, _ = rounds.handle(Lost("silo-03"))
    rounds, _ = rounds.handle(Joined("silo-03"))
    rounds, actions = rounds.handle(Failed("silo-03", 1, "stayed away", gone=True))
    assert actions == (Merge(0, tuple(Arrived(silo, 1) for silo in SILOS[:3])),)
    rounds, actions = rounds.handle(Merged(1))
    assert Send("silo-03", 2, 1, 1) in actions
    assert not rounds.gone


def test_when_everybody_is_gone_the_round_waits_and_begins_again_with_whoever_returns() -> None:
    rounds, sends = gathered(plan())
    for send in sends:
        rounds, _ = rounds.handle(Lost(send.silo))
        rounds, actions = rounds.handle(Failed(send.silo, send.sequence, "stayed away", gone=True))
    assert actions == (Merge(0, ()),)
    rounds, actions = rounds.handle(Merged(1))
    assert (rounds.phase, rounds.cohort, actions) == (Phase.COLLECTING, (), ())
    _, actions = rounds.handle(Joined("silo-01"))
    assert actions == (Send("silo-01", 2, 1, 1),)


def test_participation_takes_the_floor_and_at_least_one() -> None:
    assert plan(participation=0.5).cohort_size(0) == 2
    assert plan(participation=0.74).cohort_size(0) == 2
    assert plan(participation=0.01).cohort_size(0) == 1
    assert Plan(0, 1, tuple(map(str, range(100))), tuple(map(str, range(100))), participation=0.29).cohort_size(0) == 29


def test_an_opening_round_asks_everybody_once_and_waits_for_all_of_them() -> None:
    rounds, sends = gathered(plan(participation=0.5, opening=True))
    assert [send.silo for send in sends] == list(SILOS)
    rounds, actions = answer(rounds, sends[:3])
    assert (rounds.phase, actions) == (Phase.COLLECTING, ())
    rounds, (merge,) = answer(rounds, sends[3:])
    assert isinstance(merge, Merge)
    assert [reply.silo for reply in merge.replies] == list(SILOS)
    rounds, again = rounds.handle(Merged(1))
    assert len(again) == len(rounds.cohort) == 2


def test_modes_without_rounds_have_no_opening() -> None:
    _, sends = gathered(plan(participation=0.5, opening=True, mode="buffered"))
    assert len(sends) == 2


def test_a_method_that_may_ask_nobody_is_refused() -> None:
    with pytest.raises(ValueError, match="none of the silos"):
        plan(eligible=())


def test_the_machine_survives_a_checkpoint_between_rounds() -> None:
    rounds, sends = gathered(plan(patience=5.0, quorum=0.5))
    rounds, _ = answer(rounds, sends[:2])
    rounds, _ = rounds.handle(Deadline(0))
    restored = Rounds.from_plain(rounds.plan, rounds.after_merge().to_plain())
    assert restored == rounds.after_merge()
    live, expected = rounds.handle(Merged(1))
    actions: tuple[Action, ...] = ()
    resent: list[Action] = []
    for silo in SILOS:
        restored, actions = restored.handle(Joined(silo))
        resent += [a for a in actions if isinstance(a, Send) and a.round == 0]
    assert tuple(a for a in actions if not (isinstance(a, Send) and a.round == 0)) == expected
    assert [(send.silo, send.sequence) for send in resent if isinstance(send, Send)] == [("silo-02", 1), ("silo-03", 1)]
    assert replace(restored, online=live.online) == live


EVENTS = st.one_of(
    st.builds(Joined, st.sampled_from(SILOS)),
    st.builds(Lost, st.sampled_from(SILOS)),
    st.builds(Switched, st.sampled_from(SILOS), st.booleans()),
    st.builds(Arrived, st.sampled_from(SILOS), st.integers(1, 4), st.none() | st.floats(0, 9)),
    st.builds(Failed, st.sampled_from(SILOS), st.integers(1, 4), st.just("x"), st.booleans()),
    st.builds(Deadline, st.integers(0, 3)),
    st.just(Merged(0)),  # the version is filled in below
)

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
    opening=st.booleans(),
    sampling=st.sampled_from([Sampling(), Sampling(dict.fromkeys(SILOS, 3)), Sampling(dict.fromkeys(SILOS, 3), 3)]),
)


def stalled(rounds: Rounds) -> bool:
    """Whether nothing is out though somebody could be asked."""
    askable = set(rounds.plan.eligible) - rounds.gone - rounds.off
    return rounds.phase is Phase.COLLECTING and not rounds.flights and bool(askable)


@settings(max_examples=200, deadline=None)
@given(st.lists(EVENTS, max_size=80), PLANS)
def test_whatever_happens_nothing_is_merged_twice_too_stale_or_never_and_versions_rise_by_one(
    events: list[Event], plan_: Plan
) -> None:
    rounds = Rounds(plan_)
    merged: set[tuple[str, int]] = set()
    bases: dict[tuple[str, int], int] = {}
    for event in [*map(Joined, SILOS), *events]:
        actual = Merged(rounds.version + 1) if isinstance(event, Merged) else event
        before = rounds
        try:
            rounds, actions = rounds.handle(actual)
        except IllegalEventError:
            assert rounds is before
            continue
        assert rounds.version - before.version == (1 if isinstance(actual, Merged) else 0)
        assert rounds.phase in TABLE[before.phase][type(actual)]
        assert not stalled(rounds)
        for action in actions:
            if isinstance(action, Merge):
                keys = {(reply.silo, reply.sequence) for reply in action.replies}
                assert not keys & merged
                assert len({silo for silo, _ in keys}) == len(keys)
                assert all(rounds.version - bases[key] <= allowed_age(plan_) for key in keys)
                merged |= keys
            if isinstance(action, Send):
                assert rounds.flights[action.silo].sequence == action.sequence
                assert bases.setdefault((action.silo, action.sequence), action.base_version) == action.base_version
                assert action.silo not in rounds.off or isinstance(actual, Joined)
        if plan_.mode != "sync":
            cohort = plan_.cohort_size(rounds.version)
            waiting = len(rounds.arrived) if plan_.wanted(rounds.version) == cohort else 0
            assert len(rounds.flights) + waiting <= cohort


def allowed_age(plan_: Plan) -> float:
    if plan_.mode == "sync":
        return 0
    return float("inf") if plan_.max_staleness is None else plan_.max_staleness


@settings(max_examples=80, deadline=None)
@given(PLANS, st.randoms(use_true_random=False))
def test_replies_in_any_order_and_a_failure_now_and_then_lead_to_the_end(plan_: Plan, chance: Random) -> None:
    rounds, _ = gathered(plan_)
    failures, events = 6, 0
    while rounds.phase is not Phase.DONE:
        events += 1
        assert events < 400
        event: Event
        if rounds.phase is Phase.MERGING:
            event = Merged(rounds.version + 1)
        else:
            silo = chance.choice(sorted(rounds.flights))
            sequence = rounds.flights[silo].sequence
            if failures and chance.random() < 0.3:
                failures -= 1
                event = Failed(silo, sequence, "x")
            else:
                event = Arrived(silo, sequence, chance.random())
        rounds, _ = rounds.handle(event)
    assert rounds.version == plan_.rounds


@settings(max_examples=60, deadline=None)
@given(PLANS, st.randoms(use_true_random=False))
def test_a_machine_restored_from_any_checkpoint_sends_and_merges_the_same(plan_: Plan, chance: Random) -> None:
    """Killed after a merge and restored, it hands out the open tasks again and then goes on as it would have."""
    rounds, _ = gathered(plan_)
    for _ in range(chance.randrange(30)):
        if rounds.phase is Phase.COLLECTING:
            silo = chance.choice(sorted(rounds.flights))
            rounds, _ = rounds.handle(Arrived(silo, rounds.flights[silo].sequence, chance.random()))
        elif rounds.phase is Phase.MERGING:
            rounds, _ = rounds.handle(Merged(rounds.version + 1))
    while rounds.phase is Phase.COLLECTING:
        silo = min(rounds.flights)
        rounds, _ = rounds.handle(Arrived(silo, rounds.flights[silo].sequence, 0.5))
    if rounds.phase is not Phase.MERGING:
        return
    restored = Rounds.from_plain(plan_, json.loads(json.dumps(rounds.after_merge().to_plain())))
    open_tasks = dict(restored.flights)
    again: list[Action] = []
    for name in SILOS:
        restored, some = restored.handle(Joined(name))
        again += some
    live, expected = rounds.handle(Merged(rounds.version + 1))
    resent = [Send(name, each.sequence, each.base_version, each.round) for name, each in open_tasks.items()]
    assert set(again) == {*resent, *expected}
    assert replace(restored, online=live.online) == live


def test_the_documented_diagram_is_the_table() -> None:
    text = (Path(__file__).parent.parent / "docs" / "rounds.md").read_text()
    assert machine.diagram() in text
