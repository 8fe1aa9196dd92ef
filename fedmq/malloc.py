"""Tuning of the C library's memory allocator."""

from __future__ import annotations

import contextlib
import ctypes

_LARGEST = 1 << 30


def keep_buffers(unused: int = _LARGEST) -> None:
    """Make the C library reuse freed buffers of a model's size instead of returning them to the kernel.

    Otherwise the kernel maps and zeroes new pages for every message, a quarter of the time of sealing and opening. The
    process keeps at most as much memory as it ever used at the same time.

    Args:
        unused: amount of free memory above which the C library returns some to the kernel [bytes].
    """
    mmap_threshold, trim_threshold = -3, -1
    with contextlib.suppress(OSError, AttributeError):  # other C libraries have no mallopt
        library = ctypes.CDLL(None)
        library.mallopt(mmap_threshold, _LARGEST)
        library.mallopt(trim_threshold, unused)
