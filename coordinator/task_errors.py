"""Why tasks have no usable reply: a silo reported an error, or its reply was refused.

Either fails the silo's task; if it happens to every silo, the run ends.
"""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.counters import Counters
from coordinator.reply_validation import ImplausibleError
from fedmq.errors import DivergedError, RemoteWireError, RunError
from fedmq.federation.faults import FailureReason
from fedmq.runs.run_records import UnusableReplies
from fedmq.runs.status import ERROR_CHARACTERS
from fedmq.text import printable
from fedmq.wire.messages import Message
from fedmq.wire.payloads import DIVERGED, Error, Refusal


def text_of(message: Message) -> str:
    """A peer's error text for logs and terminals: one line without control characters."""
    payload = message.payloads[0]
    if isinstance(payload, Refusal):
        return f"its policy forbids {payload.withheld} ({payload.rule})"
    return printable(payload.text) if isinstance(payload, Error) else ""


def says_diverged(message: Message) -> bool:
    """Whether a silo reports that its training diverged."""
    payload = message.payloads[0]
    return isinstance(payload, Error) and payload.code == DIVERGED


def reason_of(message: Message) -> FailureReason:
    """Why the task fails that a peer answers with this error or refusal."""
    return FailureReason.POLICY if isinstance(message.payloads[0], Refusal) else FailureReason.ERROR


class TaskErrors:
    """Task errors since the last merge that had a reply, at most one per silo to bound memory.

    Args:
        errors: by silo; updated in place. Checkpoints store it, so that a resumed run in which no silo could train
            still ends with an error.
        unusable: replies that could not be merged in the whole run, by silo; updated in place.
    """

    def __init__(self, errors: dict[str, str], unusable: dict[str, UnusableReplies]) -> None:
        self._pending: dict[str, tuple[str, str, bool]] = {}
        self._errors, self._unusable = errors, unusable

    def reported(self, silo: str, text: str, *, diverged: bool = False) -> None:
        """A silo reported an error of its pending task; it is recorded when the failure is due on the timeline."""
        self._pending[silo] = "errors", text, diverged

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
    """The error of a run without a merged reply.

    Args:
        errors: errors of the run.
        counters: counters of the run.
        rounds: number of its rounds.
    """
    if (error := errors.first) is not None:
        return errors.failure(f"no silo could train in any round; the first error was {error}")
    lost = {**counters.failures, **counters.discarded}
    why = ", ".join(f"{reason} {count}" for reason, count in sorted(lost.items())) or "no task was sent"
    return RunError(f"no silo trained: no reply was merged in any of the {rounds} rounds ({why})")
