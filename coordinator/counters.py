"""Counters of a run for its summary, and the errors of its tasks; checkpoints store both, so that they continue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from copy import copy
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict

from coordinator.updates import ImplausibleError
from fedmq.errors import DivergedError, RemoteWireError, RunError
from fedmq.runs.run_records import UnusableReplies
from fedmq.runs.status import ERROR_CHARACTERS
from fedmq.storage.json_files import Amount, Count
from fedmq.text import printable
from fedmq.wire.payloads import DIVERGED, Error, Payload, decoded_bytes, tensor_bytes


def _counts(tally: Counter[str]) -> Counter[str]:
    if tally and min(tally.values()) < 0:
        raise ValueError("a number below 0")
    return tally


#: Numbers by name.
Tally = Annotated[Counter[str], Strict(strict=False), AfterValidator(_counts)]


class Counters(BaseModel):
    """Counters of a run."""

    model_config = ConfigDict(strict=True, extra="forbid")

    # Payload tensors [bytes] by kind in all replies that reached the coordinator, merged or not.
    up: Tally = Field(default_factory=Counter)
    down: Tally = Field(default_factory=Counter)  # payload tensors [bytes] by kind in all tasks sent, including resends
    # Size once decoded [bytes] of the kinds in ``up`` that travelled compressed.
    decoded_up: Tally = Field(default_factory=Counter)
    decoded_down: Tally = Field(default_factory=Counter)  # the same of ``down``
    silo_up: Tally = Field(default_factory=Counter)  # the same as ``up`` by silo instead of by kind
    silo_down: Tally = Field(default_factory=Counter)  # the same as ``down`` by silo
    sent: Count = 0  # messages that the coordinator sent
    received: Count = 0  # messages that it received
    refused: Tally = Field(default_factory=Counter)  # messages that it refused, by reason
    participations: Tally = Field(default_factory=Counter)  # merged replies, by silo
    discarded: Tally = Field(default_factory=Counter)  # replies that arrived but were not merged, by reason
    failed: Count = 0  # tasks without a usable reply
    failures: Tally = Field(default_factory=Counter)  # the same by reason
    unusable: dict[str, UnusableReplies] = Field(default_factory=dict)  # refused replies and reported errors, by silo
    # Task errors reported since the last merge that had a reply, by silo.
    errors: dict[str, str] = Field(default_factory=dict)
    events: Count = 0  # timeline events handled, including the present one
    # Real seconds by phase and in total, summed over resumes; until the first round, ``gathering`` is the part of
    # ``startup`` before the run's data were known.
    seconds: dict[str, Amount] = Field(default_factory=dict)

    def add_seconds(self, phase: str, seconds: float) -> None:
        """Add real seconds to a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def add_traffic(self, direction: Literal["up", "down"], silo: str, payloads: Sequence[Payload]) -> None:
        """Count the payloads of a silo's message."""
        up = direction == "up"
        kinds, silos = (self.up, self.silo_up) if up else (self.down, self.silo_down)
        decoded = self.decoded_up if up else self.decoded_down
        for payload in payloads:
            size, kind = tensor_bytes(payload), payload.KIND
            # Scalars are in the body's header; count each as the eight bytes of a number.
            kinds[kind] += size or 8
            silos[silo] += size or 8
            if (whole := decoded_bytes(payload)) != size:
                decoded[kind] += whole

    def subtract(self, sent: int, received: int, refused: Counter[str]) -> None:
        """Take back messages that will be counted again."""
        self.sent, self.received = self.sent - sent, self.received - received
        self.refused = self.refused - refused

    def copied(self) -> Counters:
        """The present counts, for a checkpoint; they do not change any more."""
        return Counters(**{name: copy(value) for name, value in vars(self).items()})


class TaskErrors:
    """Task errors since the last merge that had a reply, at most one per silo to bound memory.

    Both tables, of errors and of unusable replies of the whole run, are updated in place: checkpoints store them, so
    that a resumed run in which no silo could train still ends with an error.
    """

    def __init__(self, errors: dict[str, str], unusable: dict[str, UnusableReplies]) -> None:
        self._pending: dict[str, tuple[str, str, bool]] = {}
        self._errors, self._unusable = errors, unusable

    def reported(self, silo: str, text: str, error: Payload) -> None:
        """A silo reported an error of its pending task; it is recorded when the failure is due on the timeline."""
        self._pending[silo] = "errors", text, isinstance(error, Error) and error.code == DIVERGED

    def refused(self, silo: str, why: RemoteWireError | str, *, scripted: bool) -> None:
        """The reply to a silo's pending task was refused; recorded like an error unless the scenario scripts it."""
        text, diverged = f"its reply was refused: {printable(str(why))}", isinstance(why, ImplausibleError)
        self._pending[silo] = ("scripted", text, False) if scripted else ("refused", text, diverged)

    def task_failed(self, silo: str) -> None:
        """The failure of a silo's task is due: record its error or refusal, if that is why it failed."""
        if silo not in self._pending:
            return
        kind, text, diverged = self._pending.pop(silo)
        if kind != "scripted":
            self._errors[silo] = text
        before = self._unusable.get(silo) or UnusableReplies(refused=0, scripted=0, errors=0, diverged=0, last="")
        changes = {
            kind: getattr(before, kind) + 1,
            "diverged": before.diverged + diverged,
            "last": text[:ERROR_CHARACTERS],
        }
        self._unusable[silo] = before.model_copy(update=changes)

    def silo_failed(self, silo: str, text: str) -> None:
        """A silo reported that it cannot continue."""
        self._errors[silo] = text

    def clear(self) -> None:
        """Forget all errors: a merge had a reply."""
        self._errors.clear()

    @property
    def first(self) -> str | None:
        """The first error, if there is one."""
        return next((f"{name}: {text}" for name, text in self._errors.items()), None)

    def of_all(self, silos: Iterable[str]) -> str | None:
        """The first error, if every one of these silos had one."""
        return self.first if set(silos) <= set(self._errors) else None

    def failure(self, why: str) -> RunError:
        """The error that ends the run: a DivergedError if training diverged in all tasks of the silos with errors."""
        found = [self._unusable.get(silo, UnusableReplies(errors=1)) for silo in self._errors]
        diverged = found and all(each.diverged == each.refused + each.errors for each in found)
        return DivergedError(why) if diverged else RunError(why)


def nothing_merged(errors: TaskErrors, counters: Counters, rounds: int) -> RunError:
    """The error of a run without a merged reply."""
    if (error := errors.first) is not None:
        return errors.failure(f"no silo could train in any round; the first error was {error}")
    lost = {**counters.failures, **counters.discarded}
    why = ", ".join(f"{reason} {count}" for reason, count in sorted(lost.items())) or "no task was sent"
    return RunError(f"no silo trained: no reply was merged in any of the {rounds} rounds ({why})")
