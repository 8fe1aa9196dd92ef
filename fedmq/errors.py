"""The exception tree.

FedmqError
├── InputError          a file, option or value the user gave is not allowed      (exit code 2)
├── RunError            the run itself could not go on                            (exit code 1)
│   └── DiskError       the disk refused to take a file
└── WireError
    ├── LocalWireError  our own side broke the wire's rules: a bug, raised at once
    └── RemoteWireError the peer broke them: its message is dropped, the run goes on
"""

from __future__ import annotations


class FedmqError(Exception):
    """Base of every error this project raises on purpose."""


class InputError(FedmqError):
    """A user's input is not allowed; one line names the place, the value and what is allowed.

    Args:
        place: the file, line, key or option, e.g. ``"scenarios/x.yaml: partition.alpha"``.
        found: the offending value, as the user wrote it.
        allowed: what would have been accepted.
    """

    def __init__(self, place: str, found: object, allowed: str) -> None:
        self.place = place
        self.found = found
        self.allowed = allowed
        super().__init__(f"{place}: found {found!r}, allowed: {allowed}")


class RunError(FedmqError):
    """The run failed for a reason outside the user's input."""


class DiskError(RunError):
    """A file could not be written: a full or broken disk."""


class WireError(FedmqError):
    """A message could not be made or understood."""


class LocalWireError(WireError):
    """We tried to put something on the wire that the wire's rules forbid."""


class RemoteWireError(WireError):
    """A peer sent something that the wire's rules forbid.

    Args:
        reason: a short, fixed word for counters and logs, e.g. ``"replay"``.
        detail: one line for a reader.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}" if detail else reason)


def line_of(error: UnicodeDecodeError) -> int:
    """The line, from 1, of the first bytes of a file that are no text."""
    return error.object.count(b"\n", 0, error.start) + 1
