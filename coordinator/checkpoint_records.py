"""Record types of ``checkpoint.json``; tensors are stored next to it in safetensors files."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated

from pydantic import Field, JsonValue

from fedmq.runs.run_records import UnusableReplies
from fedmq.storage.json_files import Amount, Count, Digest, Stored


class RoundsRecord(Stored):
    """The rounds machine between two rounds.

    Args:
        version: number of merges.
        gone: silos that were given up.
        flights: number, base version and round of each pending task, by silo.
        sequences: number of each silo's last task.
        losses: last training loss reported by each silo.
    """

    version: Count
    gone: list[str]
    flights: dict[str, Annotated[list[Count], Field(min_length=3, max_length=3)]]
    sequences: dict[str, Count]
    losses: dict[str, float]


class CountersRecord(Stored):
    """See :class:`coordinator.counters.Counters`."""

    up: dict[str, Count]
    down: dict[str, Count]
    sent: Count
    received: Count
    refused: dict[str, Count]
    participations: dict[str, Count]
    discarded: dict[str, Count]
    failed: Count
    failures: dict[str, Count]
    unusable: dict[str, UnusableReplies]
    errors: dict[str, str]
    events: Count
    seconds: dict[str, Amount]
    silo_up: dict[str, Count]
    silo_down: dict[str, Count]


class CheckpointRecord(Stored):
    """``checkpoint.json``.

    Args:
        rounds: state of the rounds machine.
        now: the run's time [s].
        due: arrival time [s] of each pending task's outcome, by silo.
        tally: the counters.
        handed: number and issue time [s] of each pending task, by silo.
        data: digest of the prepared data.
        trace: digest of the availability trace's file; empty if there is none.
        digests: SHA-256 (hex) of the state files, by name.
        values: each state's values that are not tensors, by version.
        digest: SHA-256 (hex) of the other keys.
    """

    rounds: RoundsRecord
    now: Amount
    due: dict[str, Annotated[float, Field(ge=0)]]
    tally: CountersRecord
    handed: dict[str, Annotated[list[Count | Amount], Field(min_length=2, max_length=2)]]
    data: str
    trace: str
    digests: dict[str, Digest]
    values: dict[Annotated[str, Field(pattern=r"^\d+$")], dict[str, JsonValue]]
    digest: Digest

    @property
    def own_digest(self) -> str:
        """SHA-256 (hex) of all keys but ``digest``, as canonical JSON."""
        plain = {key: value for key, value in self.plain().items() if key != "digest"}
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
