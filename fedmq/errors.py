"""The exception hierarchy.

FedmqError
├── InputError          a file, option or value given by the user is not allowed  (exit code 2)
├── RunError            the run cannot continue                                   (exit code 1)
│   ├── DivergedError   training diverged: its numbers are not finite, or implausibly large
│   └── DiskError       a file could not be written
└── WireError
    ├── LocalWireError  this process violated the wire format, which is a bug
    └── RemoteWireError a peer violated it: its message is dropped, the run continues
"""

from __future__ import annotations

from fedmq.text import printable


class FedmqError(Exception):
    """Base of all errors that fedmq raises deliberately."""


class InputError(FedmqError):
    """Input by the user is not allowed; the one-line message has the place, the value and what is allowed.

    Line ends and control characters, e.g. in a file's name, are escaped.

    Args:
        place: the file, line, key or option, e.g. ``"scenarios/x.yaml: partition.alpha"``.
        found: the invalid value, as the user wrote it.
        allowed: what is accepted, and what to do if that is not obvious.
    """

    def __init__(self, place: str, found: object, allowed: str) -> None:
        self.place = place
        self.found = found
        self.allowed = allowed
        super().__init__(printable(f"{place}: found {found!r}, allowed: {allowed}"))


class ConflictError(ValueError):
    """Keys of a scenario do not fit together; pydantic catches it, and the user gets an InputError.

    Args:
        key: the key that is refused, e.g. ``partition.shots``; its line is the error's place.
        why: the rest of the sentence.
    """

    def __init__(self, key: str, why: str) -> None:
        self.key = key
        super().__init__(f"{key} {why}")


class DataItemError(InputError):
    """An item of a data set cannot be used; the message ends with the command that lists all problems of the data."""

    def __init__(self, place: str, found: object, usable: str, command: str = "fedmq data check") -> None:
        self.usable = usable
        super().__init__(place, found, f"{usable}; {command} lists all problems")


class RunError(FedmqError):
    """The run failed for a reason other than the user's input."""


class DivergedError(RunError):
    """Training diverged by its own settings: losses or parameters are not finite, or implausibly large."""


class DiskError(RunError):
    """A file could not be written, e.g. because the disk is full or broken."""


class WireError(FedmqError):
    """A message could not be created or read."""


class LocalWireError(WireError):
    """The process itself tried to send something that the wire format does not allow."""


class RemoteWireError(WireError):
    """A peer sent something that the wire format or the protocol does not allow.

    Args:
        reason: a short, fixed word for counters and logs, e.g. ``"replay"``.
        detail: one line for a reader.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}" if detail else reason)


def line_of(error: UnicodeDecodeError) -> int:
    """Number of the line, from 1, with a file's first undecodable bytes."""
    return error.object.count(b"\n", 0, error.start) + 1
