"""A timer with a descriptor, which wakes Trio in real time, whatever clock the Trio run has."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import sys
import time
from typing import Final

__all__ = ["Alarm"]


_CLOEXEC: Final = 0o2000000  # TFD_CLOEXEC, TFD_NONBLOCK: linux/include/uapi/linux/timerfd.h
_NONBLOCK: Final = 0o4000
_NANOSECONDS: Final = 1_000_000_000


class _Setting(ctypes.Structure):
    _fields_ = (
        ("interval_seconds", ctypes.c_long),
        ("interval_nanoseconds", ctypes.c_long),
        ("seconds", ctypes.c_long),
        ("nanoseconds", ctypes.c_long),
    )


class Alarm:
    """A timerfd (timerfd_create(2)).  Raises OSError if there is no descriptor left.

    Attributes:
      fd: readable when the time has passed.
    """

    __slots__ = ("fd",)

    def __init__(self) -> None:
        if sys.version_info >= (3, 13):
            self.fd: int = os.timerfd_create(time.CLOCK_MONOTONIC, flags=_CLOEXEC | _NONBLOCK)
            return
        self.fd = _libc().timerfd_create(time.CLOCK_MONOTONIC, _CLOEXEC | _NONBLOCK)
        if self.fd < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def set(self, seconds: float) -> None:
        """Make ``fd`` readable once, after ``seconds``.  A new call replaces the time.

        Args:
          seconds: the time from now.  If the time has passed already, ``fd`` is readable at once;
            infinity: never.
        """
        # A time of 0 would stop the timer.
        after = 0 if seconds == math.inf else max(1, int(seconds * _NANOSECONDS))
        if sys.version_info >= (3, 13):
            os.timerfd_settime_ns(self.fd, initial=after)
            return
        setting = _Setting(0, 0, *divmod(after, _NANOSECONDS))
        _libc().timerfd_settime(self.fd, 0, ctypes.byref(setting), None)

    def acknowledge(self) -> None:
        """Clear the readiness of the descriptor."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 8)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
