"""Pictures stored as one pixel array in a .mat, .h5 or .npz file."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedmq.data.readers.array_files import Stored, guarded, is_hdf5
from fedmq.encoders.images import Pixels
from fedmq.errors import InputError
from fedmq.packages import package
from fedmq.storage.file_digests import file_digests

_OPENING = threading.Lock()
_ALLOWED = "whole numbers 0 to 255 in three channels"


@dataclass(frozen=True)
class PixelArray:
    """Pictures in one stored array, for ``stored_pictures.Rows``; pictures in an HDF5 file are read one by one.

    Args:
        stored: array of four dimensions: pictures first or last, and three channels before or after height and width.
        n: number of pictures.
    """

    stored: Stored
    n: int

    def __len__(self) -> int:
        return self.n

    @property
    def place(self) -> str:
        """Name of the array in error messages."""
        return self.stored.place

    def name(self, row: int) -> str:
        """Name of one picture in error messages."""
        return f"{self.place}[{row}]"

    @cached_property
    def stamp(self) -> str:
        """The digest of the file, and the array's name."""
        return f"{file_digests([self.stored.path])[0]}|{self.stored.key}"

    @cached_property
    def _source(self) -> Any:
        path = self.stored.path
        if path.suffix.lower() != ".npz" and is_hdf5(path):
            return guarded(path, lambda: package("h5py", "formats", str(path)).File(path, "r")[self.stored.key])
        return self.stored.read()

    def checked(self) -> PixelArray:
        """Validate the array, so that it is reported once and not for each picture, and return it.

        Raises:
            InputError: there is no channel axis of size 3, or the dtype is not an integer type and the first, middle or
                last picture has values other than integers from 0 to 255.
        """
        shape = self.stored.shape[::-1] if self.stored.matlab else self.stored.shape
        rest = shape[1:] if shape[0] == self.n else shape[:-1]
        if 3 not in (rest[0], rest[2]) or 0 in shape:
            raise InputError(self.place, f"shape {list(self.stored.shape)}", _ALLOWED)
        if not self.stored.integers:
            # MATLAB's default type is double. Checking every picture would take as long as the extraction.
            for row in sorted({0, self.n // 2, self.n - 1}):
                self.picture(row)
        return self

    def picture(self, row: int) -> Pixels:
        """Read one picture: uint8 [height, width, 3].

        Raises:
            InputError: the picture cannot be read, or its values are not integers from 0 to 255.
        """
        # Version 5 .mat files can only be read as a whole; the lock keeps threads from doing so several times.
        with _OPENING:
            source = self._source
        picture = guarded(
            self.stored.path, lambda: np.asarray(source[row] if source.shape[0] == self.n else source[..., row])
        )
        # MATLAB stores arrays in HDF5 with reversed axes.
        picture = picture.transpose() if self.stored.matlab else picture
        picture = picture.transpose(1, 2, 0) if picture.shape[2] != 3 and picture.shape[0] == 3 else picture
        place = self.name(row)
        if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype.kind not in "uif":
            raise InputError(place, f"{picture.dtype} {list(picture.shape)}", _ALLOWED)
        if picture.dtype != np.uint8:
            low, high = picture.min(), picture.max()
            # The comparisons are false for NaN.
            if not (low >= 0 and high <= 255 and (picture == np.round(picture)).all()):
                raise InputError(place, f"{picture.dtype} values from {low:.6g} to {high:.6g}", _ALLOWED)
        return np.ascontiguousarray(picture.astype(np.uint8))
