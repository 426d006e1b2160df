"""Files of settings, read without waiting for another process."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

__all__ = ["open_regular_file", "read_regular_file", "read_up_to"]

_FLAGS: Final = (
    os.O_RDONLY
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_NOCTTY", 0)
    | getattr(os, "O_CLOEXEC", 0)
)
_PIECE: Final = 1 << 16  # bytes of one read(2); chosen


def open_regular_file(path: Path | str) -> int:
    """Open a file for reading, without waiting, and return its descriptor.

    A FIFO or a device is not opened.

    Raises:
      OSError: the file cannot be opened.
      ValueError: it is not a regular file.
    """
    _check(os.stat(path))  # before the open, because opening a device can have effects
    descriptor = os.open(path, _FLAGS)
    try:
        _check(os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_regular_file(path: Path | str, limit: int) -> bytes:
    """Read a file of at most ``limit`` bytes.

    A FIFO or a device is not opened.  A file such as /proc/kmsg, which is a regular file and has
    nothing to read yet, is an error.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is not a regular file, or it has more than ``limit`` bytes.
    """
    descriptor = open_regular_file(path)
    try:
        return read_up_to(descriptor, limit)
    finally:
        os.close(descriptor)


def read_up_to(descriptor: int, limit: int) -> bytes:
    """Read a descriptor to its end.

    Raises:
      OSError: it cannot be read.
      ValueError: it has more than ``limit`` bytes.
    """
    data = bytearray()
    while piece := os.read(descriptor, _PIECE):
        data += piece
        if len(data) > limit:
            raise ValueError(f"more than {limit} bytes")
    return bytes(data)


def _check(found: os.stat_result) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("not a regular file")
