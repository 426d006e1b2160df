"""The books of a send queue against a list of what was posted."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_smc.rnic.roce import pyverbs as _pyverbs
from trio_smc.rnic.roce.device import VerbsRnic
from trio_smc.rnic.roce.queue_pair import PostedSends
from trio_smc.rnic.verbs import QueueFull, RnicError, WcOpcode

DEPTH, SIZE = 16, 1024


@given(
    st.lists(
        st.tuples(st.integers(0, SIZE), st.booleans(), st.integers(0, 3)), min_size=1, max_size=200
    )
)
def test_every_byte_and_slot_comes_back(steps: list[tuple[int, bool, int]]) -> None:
    """An adapter that tells of signalled requests only, in order, after any delay."""
    posted = PostedSends(depth=DEPTH, size=SIZE)
    waiting: list[tuple[int, int, int, bool, bool]] = []  # id, wr_id, length, wanted, signalled
    position = 0

    def complete_one() -> bool:
        for place, (number, wr_id, _, wanted, signaled) in enumerate(waiting):
            if signaled:
                assert posted.complete(number) == (wr_id, WcOpcode.RDMA_WRITE, wanted)
                del waiting[: place + 1]
                return True
        return False

    for length, wanted, completions in steps:
        used = sum(entry[2] for entry in waiting)
        assert posted.free == SIZE - used
        assert posted.position == position
        try:
            posted.check(length)
        except QueueFull:
            assert len(waiting) == DEPTH or length > SIZE - used
            # What is full must be able to drain: something in it was signalled.
            if len(waiting) == DEPTH or used == SIZE:
                assert any(entry[4] for entry in waiting)
        else:
            assert len(waiting) < DEPTH
            assert length <= SIZE - used
            number = posted.next_id
            signaled = wanted or posted.must_signal(length)
            posted.post(number * 7, WcOpcode.RDMA_WRITE, length, wanted=wanted, signaled=signaled)
            waiting.append((number, number * 7, length, wanted, signaled))
            position = (position + length) % SIZE
        for _ in range(completions):
            complete_one()
    while complete_one():
        pass
    assert sum(entry[2] for entry in waiting) * 4 < SIZE
    assert len(waiting) * 4 < DEPTH


def test_an_error_completes_an_unsignalled_request() -> None:
    posted = PostedSends(depth=4, size=100)
    for wr_id in (10, 11, 12):
        posted.post(wr_id, WcOpcode.SEND, 20, wanted=False, signaled=False)
    assert posted.complete(1) == (11, WcOpcode.SEND, False)
    assert posted.free == 80
    assert posted.complete(2) == (12, WcOpcode.SEND, False)
    assert posted.free == 100


def test_without_pyverbs_opening_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyverbs", None)
    _pyverbs.load.cache_clear()
    rnic = VerbsRnic("rxe0")
    with pytest.raises(RnicError, match="pyverbs") as caught:
        rnic.open(tmp_path)
    assert caught.value.errno == errno.ENOSYS
    assert rnic.poll() == []
    rnic.close()
    for refused in (rnic.alloc_pd, rnic.arm, rnic.wait_fd, rnic.service):
        with pytest.raises(RnicError, match="not open"):
            refused()
