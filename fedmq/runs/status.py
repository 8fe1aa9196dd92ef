"""How a run stands: what the coordinator tells displays and supervisors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Status:
    """Where a run stands, for displays.

    Args:
        phase: of the rounds machine.
        round: merges so far.
        rounds: in all.
        training: silos whose reply is awaited.
        missing: silos, and the evaluator, that have no session.
        refused: messages refused so far, by reason, and of the last one whose it was and one line on it.
        online: silos with a session.
        lost: silos that had a session and lost it.
        loss: mean training loss of the last merge.
        metrics: of the last evaluation.
        bytes: of payload tensors, both ways.
        now: the run's time [s].
        elapsed: real seconds since the loop began.
    """

    phase: str
    round: int
    rounds: int
    training: int
    missing: tuple[str, ...]
    refused: tuple[Mapping[str, int], str]
    online: int
    lost: int
    loss: float | None
    metrics: Mapping[str, float]
    bytes: int
    now: float
    elapsed: float
