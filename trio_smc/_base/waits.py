"""Trio's waits for descriptors, as they are before `enable` replaces them.

The functions that `enable` installs in `trio.lowlevel` find the connection over SMC-R that has a
descriptor.  The package itself waits for the descriptor: for bytes of TCP, or for another file.
"""

from __future__ import annotations

from typing import Final

import trio

__all__ = ["notify_closing", "wait_readable", "wait_writable"]

wait_readable: Final = trio.lowlevel.wait_readable
wait_writable: Final = trio.lowlevel.wait_writable
notify_closing: Final = trio.lowlevel.notify_closing
