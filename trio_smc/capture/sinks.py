"""The destinations of a capture: the file of `Config(capture=...)`, or a stream.

Theory of operation
-------------------
A separate thread writes the file, so that a slow disk never blocks Trio.  The Trio thread appends
blocks to a queue.  The thread writes all queued blocks in one system call and then sleeps for
`_WRITE_INTERVAL` seconds.  So busy connections cost few wakeups, and a block reaches the file after
at most that time.  There is no other buffer, so written blocks survive the end of the process.

The queue is bounded.  If a disk is slower than the traffic, blocks are dropped and counted, and the
file contains the count (interface statistics, ``isb_ifdrop``).  If a disk is full or fails, only
the capture ends: an error is logged, and the file is truncated to its last complete block.

`send_capture` sends a capture over a stream while the stack runs.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from trio_smc.capture import pcapng
from trio_smc.capture.recorder import Capture
from trio_smc.host.overcommit import can_start_thread

if TYPE_CHECKING:
    from trio_smc._base.observer import Observed

if sys.platform == "linux":  # other systems have no SMC-R to capture
    from trio_smc.capture.output_file import create

__all__ = ["MAX_QUEUED", "MOST_UNSENT", "PATIENCE", "STALLED", "FileCapture", "send_capture"]


LOGGER = logging.getLogger("trio_smc.capture")

_WRITE_INTERVAL: Final = 0.02
"""Seconds between two writes to the file.  Chosen; no measurement is recorded."""
MAX_QUEUED: Final = 16 * 1024 * 1024
"""Largest number of bytes in the queue for the disk.  Chosen: a bound on memory."""


class FileCapture:
    """Captures a stack into a file until `end` is called.  Call `join` afterwards.

    Args:
      stack: the stack to capture; it must be open.
      path: the file, created with mode 0600.  A regular file of this user is replaced
        (`trio_smc.capture.output_file`).
      payload: bytes of each RDMA write to keep.

    Raises:
      OSError: the file cannot be created, another user could replace a part of its path, the path
        is not a regular file, or another capture is writing to it.

    Attributes:
      dropped: blocks that were dropped because the disk was too slow.
    """

    def __init__(self, stack: Observed, path: Path | str, payload: int = 0) -> None:
        self._path = Path(path)
        self._fd = create(self._path)
        self._stack = stack
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0  # only the Trio thread adds to it
        self._dequeued_bytes = 0  # only the capture's thread adds to it
        self._complete_bytes = 0  # bytes of complete blocks in the file
        self._wakeup = threading.Event()
        self._ending = threading.Event()
        self._failed = False
        self._abandoned = False
        self.dropped: int = 0
        self._observer = Capture(self._append, payload)
        self._thread = threading.Thread(target=self._run, name="trio_smc capture", daemon=True)
        try:
            if not can_start_thread():
                raise RuntimeError("there is no memory for a thread")
            self._thread.start()
        except RuntimeError as error:
            os.close(self._fd)
            raise OSError(errno.EAGAIN, f"capture: {error}") from error
        stack.add_observer(self._observer)

    def end(self) -> None:
        """Stop capturing; queued blocks are still written.  On the Trio thread.  Idempotent."""
        self._stack.remove_observer(self._observer)
        if self._abandoned:
            return
        self._ending.set()
        self._wakeup.set()

    def abandon(self) -> None:
        """Release the file in a forked child: it, its lock and the thread belong to the parent.

        The thread may have held the lock of an event at the fork, so no event is used.
        """
        self._abandoned = self._failed = True
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def join(self, timeout: float) -> None:
        """After `end`: block until everything is written, at most ``timeout`` seconds.

        If the thread hangs in the driver of a disk, it stays until the process ends.
        """
        if self._abandoned:
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            LOGGER.error("the capture %s is incomplete: its disk does not respond", self._path)

    # --- the Trio thread ---------------------------------------------------------------------

    def _append(self, block: bytes) -> None:
        if self._failed:
            return
        if self._queued_bytes - self._dequeued_bytes + len(block) > MAX_QUEUED:
            self.dropped += 1
            return
        self._queued_bytes += len(block)
        self._queue.append(block)
        if not self._wakeup.is_set():
            self._wakeup.set()

    # --- the capture's thread ----------------------------------------------------------------

    def _run(self) -> None:
        reported = 0
        try:
            while True:
                self._wakeup.wait()
                last = self._ending.is_set()
                self._wakeup.clear()
                blocks = self._dequeue()
                if self.dropped != reported:
                    reported = self.dropped
                    blocks.append(pcapng.statistics(time.time_ns(), reported))
                self.write_blocks(blocks)
                if last:
                    return
                self._ending.wait(_WRITE_INTERVAL)
        except OSError as error:
            self._failed = True
            LOGGER.error("the capture %s has ended early: %s", self._path, error)
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._complete_bytes)
        finally:
            self._queue.clear()
            # Cleared first, so that a forked child does not close another file of this number.
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _dequeue(self) -> list[bytes]:
        queue = self._queue
        blocks = [queue.popleft() for _ in range(len(queue))]
        self._dequeued_bytes += sum(map(len, blocks))
        return blocks

    def write_blocks(self, blocks: list[bytes]) -> None:
        rest = memoryview(b"".join(blocks))
        written = 0
        try:
            while rest:
                count = os.write(self._fd, rest)
                written += count
                rest = rest[count:]
        finally:
            for block in blocks:
                if len(block) > written:
                    break
                written -= len(block)
                self._complete_bytes += len(block)


_SEND_INTERVAL: Final = 0.02
"""Seconds between two sends.  Chosen, as `_WRITE_INTERVAL`."""
PATIENCE: Final = 1.0
"""Seconds for which the end of a capture waits until the receiver has read the rest.  Chosen."""
MOST_UNSENT: Final = 4 * 1024 * 1024
"""Largest number of bytes in the backlog of a slow receiver.  Chosen: a bound on memory."""
_PIECE: Final = 64 * 1024
"""Bytes that one `send_all` gets, so that `STALLED` limits the time of each piece.  Chosen."""
STALLED: Final = 30.0
"""Seconds after which a capture ends because its receiver reads nothing.  Chosen."""


class _Backlog:
    """A bounded queue of blocks to send."""

    def __init__(self) -> None:
        self.arrived = trio.Event()
        self.end = trio.Event()
        self.dropped = 0
        self._blocks: deque[bytes] = deque()
        self._size = 0

    def append(self, block: bytes) -> None:
        if self._size + len(block) > MOST_UNSENT:
            self.dropped += 1
            return
        self._size += len(block)
        self._blocks.append(block)
        self.arrived.set()

    def take(self) -> bytes:
        self.arrived = trio.Event()
        data = b"".join(self._blocks)
        self._blocks.clear()
        self._size = 0
        return data


async def send_capture(
    stack: Observed,
    stream: trio.abc.Stream,
    payload: int = 0,
    has_unread: Callable[[], bool] = lambda: False,
) -> None:
    """Send a pcapng file of all traffic from now on, until cancelled or the receiver ends it.

    Args:
      stream: the receiver.  If it sends anything or closes the stream, the capture ends.
      payload: bytes of each RDMA write to keep.
      has_unread: returns True if the receiver has not read all sent bytes.  If it reads nothing for
        30 s, the capture ends.
    """
    backlog = _Backlog()
    observer = Capture(backlog.append, payload)
    stack.add_observer(observer)
    try:
        async with trio.open_nursery() as nursery:
            # Shielded, because a block that is cut off would make the rest unreadable.
            scope = trio.CancelScope(shield=True)

            async def send() -> None:
                await _send(backlog, stream, scope, has_unread)
                nursery.cancel_scope.cancel()

            nursery.start_soon(send)
            try:
                with contextlib.suppress(trio.BrokenResourceError):
                    await stream.receive_some(1)
            finally:
                backlog.end.set()
                backlog.arrived.set()
                scope.deadline = trio.current_time() + PATIENCE
    finally:
        stack.remove_observer(observer)


async def _send(
    backlog: _Backlog,
    stream: trio.abc.Stream,
    scope: trio.CancelScope,
    has_unread: Callable[[], bool],
) -> None:
    reported = 0
    with scope, contextlib.suppress(trio.BrokenResourceError, trio.TooSlowError):
        ended = False
        while not ended:
            with trio.move_on_after(STALLED) as quiet:
                await backlog.arrived.wait()
            if quiet.cancelled_caught:
                if has_unread():
                    return
                continue
            ended = backlog.end.is_set()
            data = backlog.take()
            if backlog.dropped != reported:
                reported = backlog.dropped
                data += pcapng.statistics(time.time_ns(), reported)
            for begin in range(0, len(data), _PIECE):
                with trio.fail_after(STALLED):
                    await stream.send_all(data[begin : begin + _PIECE])
            with trio.move_on_after(_SEND_INTERVAL):
                await backlog.end.wait()
