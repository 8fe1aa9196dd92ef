"""A run that starts with a minimum of silos: late ones join and are selected from then on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.participation import RoundsPlan
from coordinator.round_events import Action, Arrived, Joined, Lost, Merge, Merged, Send, StillConnected, WaitEnded
from coordinator.rounds import Phase, Rounds
from fedmq.errors import InputError
from tests.threaded_run import resolved, run

SILOS = ("silo-00", "silo-01", "silo-02", "silo-03")
PLAN = RoundsPlan(seed=1, rounds=5, silos=SILOS, eligible=SILOS, minimum=2)


def sends(actions: tuple[Action, ...]) -> list[str]:
    return [action.silo for action in actions if isinstance(action, Send)]


def joined(plan: RoundsPlan, *silos: str) -> tuple[Rounds, tuple[Action, ...]]:
    rounds, actions = Rounds(plan), ()
    for silo in silos:
        rounds, actions = rounds.handle(Joined(silo))
    return rounds, actions


def test_a_run_starts_with_the_minimum_and_selects_late_silos_from_the_next_round() -> None:
    rounds, actions = joined(PLAN, "silo-03")
    assert (rounds.phase, actions) == (Phase.GATHERING, ())
    rounds, actions = rounds.handle(Joined("silo-01"))
    assert rounds.phase is Phase.COLLECTING
    assert sends(actions) == ["silo-01", "silo-03"]
    rounds, actions = rounds.handle(Joined("silo-00"))
    assert not actions, "the round has begun"
    rounds, _ = rounds.handle(Arrived("silo-01", 1))
    rounds, actions = rounds.handle(Arrived("silo-03", 1))
    assert actions == (Merge(0, (Arrived("silo-01", 1), Arrived("silo-03", 1))),)
    rounds, actions = rounds.handle(Merged(1))
    assert sends(actions) == ["silo-00", "silo-01", "silo-03"]


def test_silos_that_the_method_cannot_select_do_not_count() -> None:
    rounds, _ = joined(replace(PLAN, eligible=SILOS[1:]), "silo-00", "silo-01")
    assert rounds.phase is Phase.GATHERING
    rounds, _ = rounds.handle(Lost("silo-01"))
    rounds, _ = rounds.handle(Joined("silo-02"))
    assert rounds.phase is Phase.GATHERING, "a silo that left again does not count"


def test_a_resumed_run_waits_a_while_for_silos_that_took_part_then_starts_with_the_minimum() -> None:
    rounds, _ = joined(replace(PLAN, mode="async"), *SILOS)
    rounds, _ = rounds.handle(Arrived("silo-00", 1))
    resumed = Rounds.from_record(replace(PLAN, mode="async"), rounds.after_merge().to_record())
    resumed, _ = resumed.handle(Joined("silo-00"))
    resumed, actions = resumed.handle(Joined("silo-01"))
    assert resumed.phase is Phase.GATHERING
    assert sends(actions) == ["silo-01"], "its pending task is sent again"
    resumed, actions = resumed.handle(WaitEnded())
    assert resumed.phase is Phase.COLLECTING
    assert sends(actions) == ["silo-00"]
    assert set(resumed.pending) >= {"silo-02", "silo-03"}
    resumed, actions = resumed.handle(Joined("silo-02"))
    assert sends(actions) == ["silo-02"]


def test_silos_that_stayed_connected_begin_together_and_get_their_pending_tasks_again() -> None:
    plan = replace(PLAN, mode="buffered", buffer=2, minimum=None)
    rounds, _ = joined(plan, *SILOS)
    rounds, _ = rounds.handle(Arrived("silo-00", 1))
    rounds, _ = rounds.handle(Arrived("silo-01", 1))
    restored = Rounds.from_record(plan, rounds.after_merge().to_record())
    waiting, actions = restored.handle(StillConnected(SILOS[:3]), 7)
    assert waiting.phase is Phase.GATHERING, "the fourth is not there"
    assert [(each.silo, each.sequence, each.cause) for each in actions if isinstance(each, Send)] == [("silo-02", 1, 7)]
    begun, actions = restored.handle(StillConnected(SILOS))
    assert begun.phase is Phase.COLLECTING
    assert begun.online == frozenset(SILOS)
    sent = {each.silo: each.sequence for each in actions if isinstance(each, Send)}
    assert sent == {"silo-02": 1, "silo-03": 1, "silo-00": 2, "silo-01": 2}
    assert len(actions) == len(sent), "every task is sent once"


def test_a_resumed_run_waits_for_no_silo_that_had_not_joined_before() -> None:
    rounds, _ = joined(PLAN, *SILOS[:2])
    rounds, _ = rounds.handle(Arrived("silo-00", 1))
    rounds, _ = rounds.handle(Arrived("silo-01", 1))
    resumed, _ = Rounds.from_record(PLAN, rounds.after_merge().to_record()).handle(Joined("silo-01"))
    resumed, _ = resumed.handle(WaitEnded())
    assert resumed.phase is Phase.GATHERING, "the minimum is two"
    resumed, actions = resumed.handle(Joined("silo-00"))
    assert sends(actions) == ["silo-00", "silo-01"]


def test_a_minimum_that_cannot_be_reached_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"participation.minimum \(5\) must be at most silos.count \(4\)"):
        resolved(tiny, "participation.minimum=5")
    one_sided = resolved(
        tiny, "participation.minimum=4", "missing_modality.silos={silo-00: image}", "protocol=paired_only"
    )
    with pytest.raises(InputError, match="at most 3, the silos that paired_only can select"):
        run(one_sided, tmp_path)
