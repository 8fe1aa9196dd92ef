"""Errors that silos report: an error fails the silo's task; a round in which every silo reports one ends the run."""

from __future__ import annotations

from collections.abc import Iterable

from fedmq.federation.fault_effects import FailureReason
from fedmq.text import printable
from fedmq.wire.messages import Message
from fedmq.wire.payloads import Error, Refusal


def text_of(message: Message) -> str:
    """A peer's error text for logs and terminals: one line without control characters."""
    payload = message.payloads[0]
    if isinstance(payload, Refusal):
        return f"its policy forbids {payload.withheld} ({payload.rule})"
    return printable(payload.text) if isinstance(payload, Error) else ""


def reason_of(message: Message) -> FailureReason:
    """Why the task fails that a peer answers with this error or refusal."""
    return FailureReason.POLICY if isinstance(message.payloads[0], Refusal) else FailureReason.ERROR


class TaskErrors:
    """Task errors since the last merge that had a reply, at most one per silo to bound memory.

    Args:
        errors: by silo; updated in place. Checkpoints store it, so that a resumed run in which no silo could train
            still ends with an error.
    """

    def __init__(self, errors: dict[str, str]) -> None:
        self._reported: dict[str, str] = {}
        self._errors = errors

    def reported(self, silo: str, text: str) -> None:
        """A silo reported an error of its pending task; it is recorded when the failure is due on the timeline."""
        self._reported[silo] = text

    def task_failed(self, silo: str) -> None:
        """The failure of a silo's task is due: record its error."""
        self._errors[silo] = self._reported.pop(silo, "")

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
