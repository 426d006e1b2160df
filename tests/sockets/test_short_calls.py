"""The calls of an echo use the short code path, which keeps a round trip cheap.

These tests count Python functions instead of time, because on a busy machine a clock does not show
microseconds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest
import trio
import trio.testing

import trio_smc
from tests.sockets.test_as_over_tcp import connected
from tests.timing import PATIENCE

MESSAGE = bytes(64)


@contextmanager
def called() -> Iterator[list[str]]:
    """Record the names of the called Python functions, in order."""
    names: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            names.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield names
    finally:
        sys.setprofile(before)


@pytest.mark.pure  # compiled functions call no profile function
@pytest.mark.parametrize(
    "view",
    [memoryview(MESSAGE), memoryview(bytearray(MESSAGE)), memoryview(MESSAGE * 2)[64:]],
    ids=["bytes", "bytearray", "slice"],
)
async def test_a_view_is_sent_in_as_few_calls_as_bytes(view: memoryview) -> None:
    # AnyIO sends views.
    trio_smc.enable(trio_smc.Config(require_smc=True))
    async with connected(smc=True) as ends:
        ways = []
        for data in (MESSAGE, view):
            await ends.client.send(MESSAGE)  # an earlier message, so that both sends are alike
            await ends.server.recv(1000)
            with called() as names:
                assert await ends.client.send(data) == len(MESSAGE)
            ways.append(names[: names.index("put") + 1])
            with trio.fail_after(PATIENCE):
                assert await ends.server.recv(1000) == MESSAGE
        bytes_way, view_way = ways
        needed = ("byte_view", "may_fault")
        assert [name for name in view_way if name not in needed] == bytes_way


async def test_the_only_reader_checks_for_cancellation_before_it_waits() -> None:
    # A later check would delay data that arrives during a spin.
    trio_smc.enable(trio_smc.Config(require_smc=True))
    async with connected(smc=True) as ends:

        async def receive() -> None:
            with called() as names:
                assert await ends.client.recv(1000) == MESSAGE
            assert names.index("checkpoint_if_cancelled") < names.index("reader")

        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(receive)
                await trio.testing.wait_all_tasks_blocked()
                await ends.server.send(MESSAGE)
