"""Follow a file to which another thread or process appends lines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedmq.errors import InputError
from fedmq.storage.regular_files import open_regular


@dataclass
class AppendedLines:
    """The lines of a file as they are appended.

    Args:
        path: the file, which need not exist yet.
        position: number of bytes read so far.
    """

    path: Path
    position: int = 0

    def new(self) -> tuple[list[bytes], bool]:
        """Complete lines appended since the last call, and whether the file was cut and these are all its lines."""
        try:
            with open_regular(self.path, "a file to which lines are appended") as file:
                cut = file.seek(0, 2) < self.position
                if cut:
                    self.position = 0
                file.seek(self.position)
                content = file.read()
        except (OSError, InputError):
            return [], False
        complete, _, _ = content.rpartition(b"\n")
        self.position += len(complete) + bool(complete)
        return complete.split(b"\n") if complete else [], cut
