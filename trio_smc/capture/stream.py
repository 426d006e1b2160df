"""A capture that somebody asked for while the stack runs: sent to them as it is made."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import trio

from trio_smc.capture import pcapng
from trio_smc.capture.recorder import Capture

if TYPE_CHECKING:
    from trio_smc._base.observer import Observed

__all__ = ["send_capture"]

_GATHER: Final = 0.02
_PATIENCE: Final = 1.0
"""Seconds a receiver may take for what is left when the capture ends."""
_MOST_WAITING: Final = 4 * 1024 * 1024
"""Bytes that may wait for a receiver that is too slow."""
_PIECE: Final = 64 * 1024
_STALLED: Final = 30.0
"""Seconds after which a receiver that takes nothing of what waits for it is given up."""


class _Backlog:
    """Blocks that wait, bounded."""

    def __init__(self) -> None:
        self.news = trio.Event()
        self.end = trio.Event()
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


async def send_capture(
    stack: Observed,
    stream: trio.abc.Stream,
    payload: int = 0,
    untaken: Callable[[], bool] = lambda: False,
) -> None:
    """Send a pcapng file of what happens from now on, until cancelled or the receiver leaves.

    Args:
      stream: whatever comes from there, or its end, ends the capture.
      payload: how many bytes of each RDMA write to keep.
      untaken: whether something that was sent waits for the receiver; one that takes nothing for
        30 s is given up.
    """
    backlog = _Backlog()
    observer = Capture(backlog.append, payload)
    stack.add_observer(observer)
    try:
        async with trio.open_nursery() as nursery:
            # Shielded: cancelled in the middle of a block, all of the rest could not be read.
            scope = trio.CancelScope(shield=True)

            async def send() -> None:
                await _send(backlog, stream, scope, untaken)
                nursery.cancel_scope.cancel()

            nursery.start_soon(send)
            try:
                with contextlib.suppress(trio.BrokenResourceError):
                    await stream.receive_some(1)
            finally:
                backlog.end.set()
                backlog.news.set()
                scope.deadline = trio.current_time() + _PATIENCE
    finally:
        stack.remove_observer(observer)


async def _send(
    backlog: _Backlog,
    stream: trio.abc.Stream,
    scope: trio.CancelScope,
    untaken: Callable[[], bool],
) -> None:
    told = 0
    with scope, contextlib.suppress(trio.BrokenResourceError, trio.TooSlowError):
        ended = False
        while not ended:
            with trio.move_on_after(_STALLED) as quiet:
                await backlog.news.wait()
            if quiet.cancelled_caught:
                if untaken():
                    return
                continue
            ended = backlog.end.is_set()
            data = backlog.take()
            if backlog.dropped != told:
                told = backlog.dropped
                data += pcapng.statistics(time.time_ns(), told)
            for begin in range(0, len(data), _PIECE):
                with trio.fail_after(_STALLED):
                    await stream.send_all(data[begin : begin + _PIECE])
            with trio.move_on_after(_GATHER):
                await backlog.end.wait()
