"""Status of a run, as the coordinator reports it to displays and supervisors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Status:
    """Status of a run.

    Args:
        phase: of the rounds' state machine.
        round: number of merges so far.
        rounds: total number of merges.
        training: number of silos with a pending task.
        missing: silos, and the evaluator, that have no session.
        refused: number of refused messages by reason, and one line about the last one, with its sender.
        online: number of silos with a session.
        lost: number of silos that lost their session.
        loss: mean training loss of the last merge.
        metrics: of the last evaluation.
        bytes: of payload tensors in both directions.
        now: the run's time [s].
        elapsed: real time since the loop started [s].
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
