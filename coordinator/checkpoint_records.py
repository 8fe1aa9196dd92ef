"""What ``checkpoint.json`` holds, one type for writing and reading; the tensors lie beside it in files of their own."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, JsonValue

from fedmq.storage.json_files import Digest, Stored


class RoundsRecord(Stored):
    """The rounds machine between two rounds.

    Args:
        version: merges done.
        gone: silos that were given up.
        flights: tasks in flight by silo: number, base version and round.
        sequences: number of each silo's last task.
        losses: the last training loss that each silo reported.
    """

    version: int
    gone: list[str]
    flights: dict[str, Annotated[list[int], Field(min_length=3, max_length=3)]]
    sequences: dict[str, int]
    losses: dict[str, float]


class CountersRecord(Stored):
    """The counters of :class:`coordinator.counters.Counters`; older checkpoints lack those with defaults."""

    up: dict[str, int]
    down: dict[str, int]
    sent: int
    received: int
    refused: dict[str, int]
    participations: dict[str, int]
    discarded: dict[str, int]
    failed: int
    errors: dict[str, str] = Field(default_factory=dict)
    events: int = 0
    seconds: dict[str, float]


class CheckpointRecord(Stored):
    """``checkpoint.json``.

    Args:
        rounds: the machine.
        now: the run's time [s].
        due: arrival time [s] of each task in flight, by silo.
        tally: the counters.
        handed: number and time of handing out [s] of each task in flight, by silo.
        data: digest of the prepared data; empty in checkpoints of older versions.
        trace: digest of the file that says when silos are on; empty where there is none.
        digests: SHA-256 (hex) of the files of states; None in checkpoints of older versions.
        values: what each state holds besides tensors, by version.
    """

    rounds: RoundsRecord
    now: float
    due: dict[str, float]
    tally: CountersRecord
    handed: dict[str, Annotated[list[int | float], Field(min_length=2, max_length=2)]]
    data: str = ""
    trace: str = ""
    digests: dict[str, Digest] | None = None
    values: dict[Annotated[str, Field(pattern=r"^\d+$")], dict[str, JsonValue]]
