"""A capture that somebody asked for while the stack runs: sent to them as it is made."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final

import trio

from trio_smc.capture import pcapng
from trio_smc.capture.recorder import Capture

if TYPE_CHECKING:
    from trio_smc import Stack

__all__ = ["send_capture"]

_GATHER: Final = 0.02
_MOST_WAITING: Final = 4 * 1024 * 1024
"""Bytes that may wait for a receiver that is too slow."""


class _Backlog:
    """Blocks that wait, bounded."""

    def __init__(self) -> None:
        self.news = trio.Event()
        self.dropped = 0
        self._blocks: deque[bytes] = deque()
        self._size = 0

    def append(self, block: bytes) -> None:
        if self._size + len(block) > _MOST_WAITING:
            self.dropped += 1
            return
        self._size += len(block)
        self._blocks.append(block)
        self.news.set()

    def take(self) -> bytes:
        self.news = trio.Event()
        data = b"".join(self._blocks)
        self._blocks.clear()
        self._size = 0
        return data


async def send_capture(stack: Stack, stream: trio.abc.SendStream, payload: int = 0) -> None:
    """Send a pcapng file of what happens from now on, until cancelled.

    Args:
      payload: how many bytes of each RDMA write to keep.

    Raises:
      trio.BrokenResourceError: the receiver has gone, which ends a capture.
    """
    backlog = _Backlog()
    observer = Capture(backlog.append, payload)
    stack.add_observer(observer)
    told = 0
    try:
        while True:
            await backlog.news.wait()
            data = backlog.take()
            if backlog.dropped != told:
                told = backlog.dropped
                data += pcapng.statistics(time.time_ns(), told)
            await stream.send_all(data)
            await trio.sleep(_GATHER)
    finally:
        stack.remove_observer(observer)
