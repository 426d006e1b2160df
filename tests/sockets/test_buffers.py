"""Buffers of the program whose memory is not there, and large ones."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
import tracemalloc
from array import array
from io import BytesIO
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

import trio_smc
from tests.sockets import mapped_buffers
from tests.timing import PATIENCE
from trio_smc.host.mapped import copies_of, copy_of, may_fault, store

LARGE = 64 << 20


def outcomes(*arguments: str) -> dict[str, str]:
    command = [sys.executable, "-m", mapped_buffers.__name__, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=3 * PATIENCE, check=False)
    assert done.returncode == 0  # SIGBUS is a negative number
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.timeout(8 * PATIENCE)
def test_a_page_that_is_not_there_is_an_error_as_over_tcp() -> None:
    over_tcp, over_smc = outcomes(), outcomes("smc")
    for found in (over_tcp, over_smc):
        # How many bytes are sent before the missing page depends on the transport.
        found["send-all-later"] = found["send-all-later"].split(", ")[0]
    assert over_smc == over_tcp
    assert all("Bad address" in over_tcp[name] for name in mapped_buffers.SENDS)


class Circular(mmap.mmap):
    """Names itself as the owner of its memory."""

    @property
    def base(self) -> Circular:
        return self


@pytest.mark.parametrize(
    ("buffer", "expected"),
    [
        (b"a", False),
        (bytearray(b"a"), False),
        (array("I", [1]), False),
        (BytesIO(b"a").getbuffer(), False),
        (memoryview(memoryview(b"a")), False),
        (mmap.mmap(-1, 1), True),
        (memoryview(mmap.mmap(-1, 9))[3:], True),
        (Circular(-1, 1), True),
        (5, False),
        ("a", False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_which_memory_may_not_be_there(buffer: Any, expected: bool) -> None:
    assert may_fault(buffer) is expected


def test_arrays_of_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    own = numpy.zeros(10, dtype="i4")
    mapped = numpy.frombuffer(mmap.mmap(-1, 40), dtype="i4")
    assert not may_fault(own)
    assert not may_fault(own[2:])
    assert not may_fault(numpy.frombuffer(b"abcd", dtype="i4"))
    assert may_fault(mapped)
    assert may_fault(mapped[2:].reshape(2, 4))


@pytest.mark.parametrize("refused", [False, True])
def test_copies_are_complete(monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    """Also if the system has no file for them."""
    if refused:

        def refuse(*_: object) -> int:
            raise PermissionError

        monkeypatch.setattr("os.memfd_create", refuse)
    data = bytes(range(256)) * 10_000
    memory = memoryview(mmap.mmap(-1, len(data)))
    store(data, memory)
    assert memory == data
    assert copy_of(memory[1:100]) == data[1:100]
    pieces = list(copies_of(memory))
    assert len(pieces) > 1
    assert b"".join(pieces) == data
    items = memory[:400].cast("I")
    store(data[400:800], items)
    assert memory[:400] == data[400:800]


async def test_sendmsg_copies_at_most_a_ring() -> None:
    """A loop that sends the rest again would otherwise take quadratic time."""
    trio_smc.enable(trio_smc.Config(learn_short=False, tcp_option="off", require_smc=True))
    try:
        with trio.fail_after(PATIENCE), trio.socket.socket() as listener, bytes_of(LARGE) as data:
            await listener.bind(("127.0.0.1", 0))
            listener.listen()
            with trio.socket.socket() as client:
                await client.connect(listener.getsockname())
                server, _ = await listener.accept()
                tracemalloc.start()
                sent = await client.sendmsg([data, b"end"])
                one = await server.sendmsg([data])
                _, peak = tracemalloc.get_traced_memory()
                tracemalloc.stop()
                assert 0 < sent < LARGE
                assert 0 < one < LARGE
                assert peak < LARGE / 4
                server.close()
            await wait_all_tasks_blocked()
    finally:
        trio_smc.disable()


def bytes_of(size: int) -> memoryview:
    return memoryview(bytearray(size))
