"""Runs in one guest as root: programs at the commit limit, where vm.overcommit_memory is 2.

``python3 -m tests.lab.guest_overcommit`` prints "ok STEP" for every step.  Each step starts a
server and a client (``server``, ``client``), which read commands as lines on standard input and
answer with lines of JSON.  A process that SIGBUS kills fails its step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import trio

import trio_smc
from tests.timing import PATIENCE
from trio_smc import Config, SmcListener, SmcStream

HOST: Final = "127.0.0.1"
MIB: Final = 1 << 20
PIECE: Final = bytes(range(256)) * 256
TWICE: Final = PIECE + PIECE
READ: Final = 32 * 1024
"""Bytes of a read.  A program gets such a small buffer from its heap; for 128 KiB, the default, it
has to ask the system, which refuses it at the limit, over TCP as well."""
ALMOST_NOTHING: Final = 6 * MIB
"""Bytes: enough for a stack and some connections, and less than the stack of a thread."""


# --- the system ---------------------------------------------------------------------------------


def tune(**values: int) -> None:
    """Set values of /proc/sys/vm."""
    for name, value in values.items():
        Path(f"/proc/sys/vm/{name}").write_text(f"{value}\n")


def memory(name: str) -> int:
    """A value of /proc/meminfo, bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, value, *_ = line.split()
        if key == f"{name}:":
            return int(value) << 10
    raise KeyError(name)


def leave(room: int) -> None:
    """Set the commit limit to this number of bytes above the memory committed now."""
    tune(overcommit_kbytes=max(1, memory("Committed_AS") + room >> 10))


def lift() -> None:
    """The limit is that of the guest's memory: 90 % of it."""
    tune(overcommit_ratio=90)


# --- its programs -------------------------------------------------------------------------------


class Program:
    """One of the two processes; a context manager that checks its exit code."""

    def __init__(self, role: str, buffer: int | None) -> None:
        self.role = role
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.lab.guest_overcommit", role, str(buffer or 0)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def order(self, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the {self.role} has ended: {self._process.wait(PATIENCE)}"
        return json.loads(line)

    def answer_to(self, **order: Any) -> Any:
        self.order(**order)
        return self.answer()

    def __enter__(self) -> Self:
        assert self.answer() == "ready"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: object, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        if kind is not None:
            self._process.kill()
        status = self._process.wait(PATIENCE)
        assert kind is not None or status == 0, f"the {self.role} ended with {status}"


_came = bytearray()


async def orders() -> Any:
    """The next line on standard input; None at its end.  Without a thread, which may be refused."""
    while b"\n" not in _came:
        await trio.lowlevel.wait_readable(sys.stdin.fileno())
        data = os.read(sys.stdin.fileno(), 4096)
        if not data:
            return None
        _came.extend(data)
    line, _, rest = bytes(_came).partition(b"\n")
    _came[:] = rest
    return json.loads(line)


def answer_with(answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


async def echo(stream: SmcStream) -> None:
    while data := await stream.receive_some(READ):
        await stream.send_all(data)
    await stream.aclose()


async def accept_all(listener: SmcListener, nursery: trio.Nursery) -> None:
    while True:
        nursery.start_soon(echo, await listener.accept())


async def serve(config: Config) -> None:
    """Echo on all connections until the input ends."""
    answer_with("ready")
    await orders()
    async with trio_smc.open_stack(config), trio.open_nursery() as nursery:
        [listener] = await trio_smc.open_listeners(0, host=HOST)
        answer_with(listener.socket.getsockname()[1])
        nursery.start_soon(accept_all, listener, nursery)
        while await orders() is not None:
            pass
        nursery.cancel_scope.cancel()


async def dial(config: Config) -> None:
    """Connect, send bytes and receive their echo, as commanded."""
    answer_with("ready")
    [port] = [(await orders())["port"]]
    streams: list[SmcStream] = []
    async with trio_smc.open_stack(config):
        while (order := await orders()) is not None:
            with trio.fail_after(PATIENCE):
                streams += [
                    await trio_smc.open_stream(HOST, port) for _ in range(order.get("connect", 0))
                ]
                for stream in streams:
                    await have_echoed(stream, order["bytes"])
            answer_with([[each.mode, each.fallback and each.fallback.reason] for each in streams])
        for stream in streams:
            await stream.aclose()


async def have_echoed(stream: SmcStream, size: int) -> None:
    """Send pieces, and check that all of them come back."""
    sent = 0

    async def send() -> None:
        nonlocal sent
        while sent < size:
            sent += len(PIECE)
            await stream.send_all(PIECE)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        came = 0
        while came < size:
            data = await stream.receive_some(READ)
            assert data, "the end of the stream"
            start = came % 256
            assert data == TWICE[start : start + len(data)]
            came += len(data)
    while came < sent:
        came += len(await stream.receive_some(READ))


# --- the steps ----------------------------------------------------------------------------------


def begin(server: Program, client: Program) -> None:
    """Both open their stacks."""
    client.order(port=server.answer_to(go=True))


SMC: Final = ["smc-r", None]
REFUSED: Final = ["tcp", "out-of-resources"]


def defaults() -> None:
    """Elements of the default size fit: no mapping counts for more than its pages."""
    lift()
    with Program("server", None) as server, Program("client", None) as client:
        begin(server, client)
        before = memory("Committed_AS")
        found = client.answer_to(connect=1, bytes=MIB)
        assert found == [SMC], found
        assert memory("Committed_AS") - before < 64 * MIB, "more than two elements and two rings"


def rings_are_full_at_the_limit() -> None:
    """Elements that were handed out can be written completely when the limit is reached."""
    lift()
    with Program("server", 32 * MIB) as server, Program("client", 32 * MIB) as client:
        begin(server, client)
        assert client.answer_to(connect=1, bytes=1) == [SMC]
        leave(16 * MIB)
        assert client.answer_to(bytes=80 * MIB) == [SMC]


def no_room_for_an_element() -> None:
    """The connection is TCP, with its reason, and carries its bytes."""
    lift()
    with Program("server", 64 * MIB) as server, Program("client", 64 * MIB) as client:
        begin(server, client)
        leave(24 * MIB)
        found = client.answer_to(connect=2, bytes=4 * MIB)
        assert found == [REFUSED, REFUSED], found
        lift()
        assert client.answer_to(connect=1, bytes=MIB)[2] == SMC


def room_for_some() -> None:
    """In one link group, connections are SMC-R as long as there is room."""
    lift()
    with Program("server", 8 * MIB) as server, Program("client", 8 * MIB) as client:
        begin(server, client)
        leave(63 * MIB)  # three pairs, and one element that does not get its pair
        found = client.answer_to(connect=12, bytes=9 * MIB)
        assert found[:3] == [SMC] * 3, found
        assert found[4:] == [REFUSED] * 8, found
        assert client.answer_to(bytes=9 * MIB) == found


def no_room_for_a_thread() -> None:
    """A stack opens where no thread can be started."""
    lift()
    with Program("server", None) as server, Program("client", None) as client:
        leave(ALMOST_NOTHING)
        begin(server, client)
        found = client.answer_to(connect=2, bytes=MIB)
        assert found == [REFUSED, REFUSED], found


def ratio_of_nothing() -> None:
    """The limit is below the committed memory: existing connections continue."""
    lift()
    with Program("server", MIB) as server, Program("client", MIB) as client:
        begin(server, client)
        assert client.answer_to(connect=3, bytes=4 * MIB) == [SMC] * 3
        tune(overcommit_ratio=0)
        assert client.answer_to(bytes=4 * MIB) == [SMC] * 3


def growing() -> None:
    """Elements that were given back get their pages again, or are not handed out again."""
    lift()
    with Program("server", 4 * MIB) as server:
        port = server.answer_to(go=True)
        for room, expected in ((0, SMC), (6 * MIB, REFUSED), (0, SMC)):
            with Program("client", 4 * MIB) as client:
                client.order(port=port)
                client.answer_to(bytes=0)
                if room:
                    leave(room)
                found = client.answer_to(connect=6, bytes=5 * MIB)
                assert found[-1] == expected, found
                lift()


STEPS: Final = (
    defaults, rings_are_full_at_the_limit, no_room_for_an_element, room_for_some,
    no_room_for_a_thread, ratio_of_nothing, growing,
)  # fmt: skip


def main() -> None:
    if len(sys.argv) > 2:
        size = int(sys.argv[2])
        config = Config(tcp_option="off", receive_buffer=size or None, learn_short=False)
        trio.run(serve if sys.argv[1] == "server" else dial, config)
        return
    tune(overcommit_memory=2, admin_reserve_kbytes=0, user_reserve_kbytes=0)
    failed = 0
    for step in STEPS:
        if len(sys.argv) > 1 and sys.argv[1] != step.__name__:
            continue
        try:
            step()
        except Exception as problem:  # the errors of the other steps help as well
            lift()
            failed += 1
            sys.stdout.write(f"FAILED {step.__name__}: {type(problem).__name__}: {problem}\n")
        else:
            sys.stdout.write(f"ok {step.__name__}\n")
        sys.stdout.flush()
    sys.exit(failed)


if __name__ == "__main__":
    main()
