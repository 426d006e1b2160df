"""Keeps the C library from returning the memory of received data after each message.

Theory of operation
-------------------
A read returns its data in a new object of up to the ring's size, and a program usually frees the
object soon. glibc's malloc returns the end of its heap to the kernel as soon as more than
M_TRIM_THRESHOLD bytes of the end are free, and takes blocks from M_MMAP_THRESHOLD bytes on from the
kernel directly. If the memory of each message goes back to the kernel, then the next message costs
a page fault for each 4 KiB, which takes longer than copying the data.

Both thresholds start at 128 KiB, and glibc raises them itself (mallopt(3)): when a program frees a
block that came from the kernel directly, M_MMAP_THRESHOLD becomes the block's size and
M_TRIM_THRESHOLD twice that. So a stack frees one block of the ring's size before its first read.
No page of the block is ever touched. A program that has set a threshold itself keeps it, because
glibc then raises none; other C libraries are not affected.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

__all__ = ["HEAP", "HeapThresholds"]


class HeapThresholds:
    """The thresholds of this process's heap, as far as this class has raised them."""

    MOST: Final = 32 * 1024 * 1024 - 64 * 1024
    """Bytes.  glibc does not raise its threshold for a block that takes more than 32 MiB with its
    header (DEFAULT_MMAP_THRESHOLD_MAX)."""

    def __init__(self) -> None:
        self._largest = 0

    def raise_for(self, size: int) -> None:
        """Let the heap keep freed blocks of up to this many bytes.

        Each size is allocated at most once: a block below the threshold would come from the heap,
        and be cleared.
        """
        size = min(size, self.MOST)
        if size > self._largest:
            self._largest = size
            with suppress(MemoryError):  # there is no memory to keep, either
                bytes(size)  # from calloc(3); a bytearray would be filled


HEAP: Final = HeapThresholds()
"""Of this process."""
