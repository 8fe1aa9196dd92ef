"""What a process asks of the C library's allocator."""

from __future__ import annotations

import contextlib
import ctypes

_LARGEST = 1 << 30


def keep_buffers(unused: int = _LARGEST) -> None:
    """Ask the C library to keep freed buffers of a model's size for the next one.

    Given back to the kernel they would be paged in again, zeroed, for every single message: a quarter of the time of
    sealing and opening. The process holds at most as many as were ever in use at once.

    Args:
        unused: free memory above which the C library gives some back all the same [bytes].
    """
    mmap_threshold, trim_threshold = -3, -1
    with contextlib.suppress(OSError, AttributeError):  # another C library goes without
        library = ctypes.CDLL(None)
        library.mallopt(mmap_threshold, _LARGEST)
        library.mallopt(trim_threshold, unused)
