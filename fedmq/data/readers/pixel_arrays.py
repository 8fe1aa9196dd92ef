"""Pictures that are stored as one array of pixels in a .mat, .h5 or .npz file."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedmq.data.readers.array_files import Stored, guarded, is_hdf5
from fedmq.encoders.images import Pixels
from fedmq.errors import InputError
from fedmq.extras import package

_OPENING = threading.Lock()
_ALLOWED = "whole numbers 0 to 255 in three channels"


@dataclass(frozen=True)
class Pile:
    """Pictures of one stored array, for ``pictures.Rows``; rows of an HDF5 file are read one by one.

    Args:
        stored: of four dimensions; one of the ends counts the pictures, one of the rest the three channels.
        n: pictures.
    """

    stored: Stored
    n: int

    def __len__(self) -> int:
        return self.n

    @property
    def place(self) -> str:
        """What a message calls it."""
        return self.stored.place

    @cached_property
    def stamp(self) -> str:
        """The file's name, size and time of change, and the array's name."""
        about = self.stored.path.stat()
        return f"{self.stored.path.name}|{about.st_size}|{about.st_mtime_ns}|{self.stored.key}"

    @cached_property
    def _source(self) -> Any:
        path = self.stored.path
        if path.suffix.lower() != ".npz" and is_hdf5(path):
            return guarded(path, lambda: package("h5py", "formats", str(path)).File(path, "r")[self.stored.key])
        return self.stored.read()

    def checked(self) -> Pile:
        """The pile itself, if it looks like pictures: else one line for the whole array, and not one for each picture.

        Raises:
            InputError: no side counts three channels; or the type is none of whole numbers, and the first, the middle
                or the last picture has other values than those from 0 to 255.
        """
        shape = self.stored.shape[::-1] if self.stored.matlab else self.stored.shape
        rest = shape[1:] if shape[0] == self.n else shape[:-1]
        if 3 not in (rest[0], rest[2]) or 0 in shape:
            raise InputError(self.place, f"shape {list(self.stored.shape)}", _ALLOWED)
        if not self.stored.integers:
            # MATLAB's own type is double. To look at all of a large file would take as long as its extraction.
            for row in sorted({0, self.n // 2, self.n - 1}):
                self.picture(row)
        return self

    def picture(self, row: int) -> Pixels:
        """uint8 [height, width, 3].

        Raises:
            InputError: it cannot be read, or its values are no whole numbers from 0 to 255.
        """
        # A file of version 5 is read as a whole: once, not by every thread that asks first.
        with _OPENING:
            source = self._source
        found = guarded(
            self.stored.path, lambda: np.asarray(source[row] if source.shape[0] == self.n else source[..., row])
        )
        # A picture that MATLAB stored in HDF5 comes with all its axes the other way round.
        found = found.transpose() if self.stored.matlab else found
        found = found.transpose(1, 2, 0) if found.shape[2] != 3 and found.shape[0] == 3 else found
        place = f"{self.place}[{row}]"
        if found.ndim != 3 or found.shape[2] != 3 or found.dtype.kind not in "uif":
            raise InputError(place, f"{found.dtype} {list(found.shape)}", _ALLOWED)
        if found.dtype != np.uint8:
            low, high = found.min(), found.max()
            # Neither holds of a value that is no number.
            if not (low >= 0 and high <= 255 and (found == np.round(found)).all()):
                raise InputError(place, f"{found.dtype} values from {low:.6g} to {high:.6g}", _ALLOWED)
        return np.ascontiguousarray(found.astype(np.uint8))
