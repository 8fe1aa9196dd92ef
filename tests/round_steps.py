"""Steps of the rounds state machine: silos that join, and replies that arrive."""

from __future__ import annotations

from coordinator.participation import RoundsPlan
from coordinator.round_events import Action, Arrived, Joined, Send
from coordinator.rounds import Rounds


def joined(plan: RoundsPlan, *silos: str, off: frozenset[str] = frozenset()) -> tuple[Rounds, tuple[Action, ...]]:
    """The rounds of a plan once silos, by default all of them, have joined; and the last actions."""
    rounds, actions = Rounds(plan, off=off), ()
    for silo in silos or plan.silos:
        rounds, actions = rounds.handle(Joined(silo))
    return rounds, actions


def arrived(rounds: Rounds, *silos: str) -> tuple[Rounds, tuple[Action, ...]]:
    """The rounds after replies of silos to their pending tasks, one after the other; and the last actions."""
    actions: tuple[Action, ...] = ()
    for silo in silos:
        rounds, actions = rounds.handle(Arrived(silo, rounds.pending[silo].sequence))
    return rounds, actions


def sent(actions: tuple[Action, ...]) -> list[str]:
    """The silos to which tasks are sent."""
    return [action.silo for action in actions if isinstance(action, Send)]
