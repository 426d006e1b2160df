"""Runs in one guest, by pytest: a RoCE RNIC fulfils the contract of `tests.rnic.contract`.

The devices rxe0 on mac0 and rxe1 on mac1 must reach each other; `tests.lab.runner.contract` makes
them.  Every test of the contract runs here unchanged; a test that soft-RoCE cannot pass would have
to be in `IMPOSSIBLE`, with its reason.
"""

from __future__ import annotations

import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest

from tests.rnic.contract import (
    End,
    RnicContract,
    assert_no_completions,
    connect,
    got,
    make_end,
    until,
)
from tests.timing import PATIENCE
from trio_smc.rnic.roce.device import VerbsRnic
from trio_smc.rnic.roce.queue_pair import RoceQueuePair
from trio_smc.rnic.verbs import Rnic, RnicError

IMPOSSIBLE: Final[dict[str, str]] = {}
"""Names of the contract's tests that soft-RoCE cannot pass, and why."""


class TestVerbsRnic(RnicContract):
    @pytest.fixture
    def rnics(self, runtime_directory: Path) -> Iterator[tuple[Rnic, Rnic]]:
        with closing(VerbsRnic("rxe0")) as first, closing(VerbsRnic("rxe1")) as second:
            first.open(runtime_directory)
            second.open(runtime_directory)
            yield first, second


@pytest.fixture
def ends(runtime_directory: Path) -> Iterator[tuple[End, End]]:
    """Two ends in INIT."""
    with closing(VerbsRnic("rxe0")) as first, closing(VerbsRnic("rxe1")) as second:
        first.open(runtime_directory)
        second.open(runtime_directory)
        with closing(make_end(first)) as a, closing(make_end(second)) as b:
            yield a, b


def pair_of(end: End) -> RoceQueuePair:
    assert isinstance(end.qp, RoceQueuePair)
    return end.qp


def rnic_of(end: End) -> VerbsRnic:
    assert isinstance(end.rnic, VerbsRnic)
    return end.rnic


def test_short_data_is_sent_inline(ends: tuple[End, End]) -> None:
    """The adapter has the data when the post has returned: then the memory may change."""
    a, b = ends
    connect(a, b, receives=0)
    pair = pair_of(a)
    assert pair._inline_limit >= 64
    short, long = b"w" * pair._inline_limit, b"l" * (pair._inline_limit + 1)
    a.qp.post_send(1, b"m" * 44)  # waits for a receive, and all later requests wait with it
    a.write(2, b, 0, short[:20], short[20:])
    a.write(3, b, 1000, long)
    ring = pair._ring_start
    pair._view[pair._send_slots_start : ring + 1000] = b"x" * (ring + 1000 - pair._send_slots_start)
    assert_no_completions(a, b)
    b.qp.post_receive(1)
    until(lambda: len(a.sent) == 3 and len(b.received) == 1, a, b)
    assert b.received == [b"m" * 44]
    assert bytes(b.memory.view[: len(short)]) == short
    assert bytes(b.memory.view[1000 : 1000 + len(long)]) == b"x" * len(long), "not inline"


def test_messages_are_solicited(ends: tuple[End, End]) -> None:
    """With solicited events only, messages wake the process, its own completions do not."""
    a, b = ends
    connect(a, b)
    cq = rnic_of(b)._cq
    assert cq is not None
    sleeper = select.poll()
    sleeper.register(b.rnic.wait_fd(), select.POLLIN)
    b.rnic.service()
    cq.req_notify(1)
    b.write(1, a, 0, b"own")
    deadline = time.monotonic() + PATIENCE
    while not b.sent:
        assert time.monotonic() < deadline
        for completion in b.rnic.poll():
            b.take(completion)
    assert sleeper.poll(0) == []
    a.qp.post_send(1, b"message")
    assert sleeper.poll(PATIENCE * 1000)
    until(got(b, 1), a, b)


def test_the_path_mtu_is_the_lower_one(ends: tuple[End, End]) -> None:
    a, b = ends
    assert (a.rnic.mtu, b.rnic.mtu) == (3, 3)
    subprocess.run(["ip", "link", "set", "mac1", "mtu", "600"], check=True)
    try:
        rnic_of(b).refresh_port()
        assert b.rnic.mtu == 2, "512 bytes fit"
        with pytest.raises(RnicError, match="MTU"):
            b.qp.to_rtr(gid=a.rnic.gid, qp_num=a.qp.qp_num, psn=7, mtu=a.rnic.mtu)
        connect(a, b)
        data = bytes(range(256)) * 16
        a.write(1, b, 0, data)
        b.write(1, a, 0, data)
        until(lambda: bool(a.sent and b.sent), a, b)
        assert a.sent == b.sent == [(1, 0)]
        assert bytes(a.memory.view[:4096]) == bytes(b.memory.view[:4096]) == data
    finally:
        subprocess.run(["ip", "link", "set", "mac1", "mtu", "1500"], check=True)
