"""What silos say goes wrong with their tasks: one silo's word costs its task, that of all of them ends the run."""

from __future__ import annotations

from collections.abc import Iterable

from fedmq.text import printable
from fedmq.wire.messages import Error, Message


def text_of(message: Message) -> str:
    """A peer's error for logs and terminals: one line, nothing that a terminal would obey."""
    payload = message.payloads[0]
    return printable(payload.text) if isinstance(payload, Error) else ""


class TaskErrors:
    """Errors of silos' tasks since the last merge that had a reply; one of each silo, so that nobody can fill it.

    Args:
        errors: by silo, kept up to date here; the checkpoint has them, so that a run in which nobody could train does
            not end well once it is resumed.
    """

    def __init__(self, errors: dict[str, str]) -> None:
        self._reported: dict[str, str] = {}
        self._errors = errors

    def reported(self, silo: str, text: str) -> None:
        """A silo said what is wrong with its open task; it counts when the task's time has come."""
        self._reported[silo] = text

    def task_failed(self, silo: str) -> None:
        """That time has come."""
        self._errors[silo] = self._reported.pop(silo, "")

    def silo_failed(self, silo: str, text: str) -> None:
        """A silo said that it cannot go on at all."""
        self._errors[silo] = text

    def clear(self) -> None:
        """Somebody could train."""
        self._errors.clear()

    @property
    def first(self) -> str | None:
        """The first error, if there is one."""
        return next((f"{name}: {text}" for name, text in self._errors.items()), None)

    def of_all(self, silos: Iterable[str]) -> str | None:
        """The first error, if every one of these silos had one."""
        return self.first if set(silos) <= set(self._errors) else None
