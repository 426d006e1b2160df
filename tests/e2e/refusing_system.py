"""Processes whose system refuses one call, as a sandbox or an emulator does: an echo server and its
client, over TCP or under `enable()`.

    python -m tests.e2e.refusing_system ERRNO [CALL ...]

For each call that trio_smc makes and the same program does not make over TCP, it starts a server
and a client, once with a server that is refused the call, and once with such a client.  It prints a
JSON object: for each call the two outcomes, "smc-r", "tcp", or what went wrong.  Both processes are
also refused each CALL.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import mmap
import os
import resource
import select
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Final

import trio

import trio_smc
from tests.timing import PATIENCE

_HOST: Final = "127.0.0.1"
_DATA: Final = os.urandom(50_000)
_FUNCTIONS: Final = {
    os: (
        "eventfd", "fchmod", "fstat", "fstatvfs", "ftruncate", "listdir", "lstat", "memfd_create",
        "mkdir", "open", "pipe2", "posix_fallocate", "readlink", "rename", "rmdir", "scandir",
        "sched_yield", "stat", "timerfd_create", "unlink",
    ),
    mmap: ("mmap",),
    select: ("poll",),
    resource: ("getrlimit", "setrlimit"),
    socket: ("recv_fds", "send_fds", "socketpair"),
}  # fmt: skip
_METHODS: Final = (
    "bind", "connect", "getpeername", "getsockname", "listen", "recv_into", "recvfrom", "recvmsg",
    "send", "sendmsg", "sendto", "shutdown",
)  # fmt: skip
_OPTIONS: Final = ("getsockopt", "setsockopt")
_EVERYWHERE: Final = {
    "getpeername AF_INET", f"getsockopt AF_INET {socket.SOL_SOCKET} {socket.SO_LINGER}",
}  # fmt: skip
"""Calls that this program does not make over TCP, but that every system with TCP sockets allows."""


class System:
    """Notes or refuses the calls of this process.

    Attributes:
      calls: names of the calls so far.
      refused: the name of the call that fails, or "".
      unknown: names of calls that always fail.
    """

    def __init__(self, number: int, unknown: Collection[str]) -> None:
        self.number = number
        self.unknown = unknown
        self.calls: dict[str, None] = {}
        self.refused = ""

    def install(self) -> None:
        """Replace the functions of the standard library.  Modules look them up at each call."""
        for module, names in _FUNCTIONS.items():
            for name in filter(partial(hasattr, module), names):  # Python 3.13 has timerfd_create
                self._replace(module, name, lambda *_, n=f"{module.__name__}.{name}", **__: n)
        self._replace(fcntl, "fcntl", lambda _, command, *__: f"fcntl {command}")
        self._replace(fcntl, "ioctl", lambda _, request, *__: f"ioctl {request}")
        for name in _METHODS:
            self._replace(
                socket.socket, name, lambda sock, *_, n=name, **__: f"{n} {sock.family.name}"
            )
        for name in _OPTIONS:
            self._replace(
                socket.socket, name,
                lambda sock, level, option, *_, n=name: f"{n} {sock.family.name} {level} {option}",
            )  # fmt: skip
        old = socket.socket.__init__

        def new(
            sock: Any, family: int = -1, kind: int = -1, proto: int = -1, fileno: Any = None
        ) -> None:
            if fileno is None:
                self._call(f"socket {int(family)} {int(kind) & 15}")
            old(sock, family, kind, proto, fileno)

        socket.socket.__init__ = new  # type: ignore[assignment, method-assign]

    def _replace(self, place: Any, name: str, name_of: Callable[..., str]) -> None:
        old = getattr(place, name)

        @functools.wraps(old)
        def new(*arguments: Any, **options: Any) -> Any:
            self._call(name_of(*arguments, **options))
            return old(*arguments, **options)

        setattr(place, name, new)

    def _call(self, name: str) -> None:
        self.calls[name] = None
        if name == self.refused or name in self.unknown:
            raise OSError(self.number, os.strerror(self.number))


async def serve(report: int) -> None:
    """Serve one connection; write the port to the descriptor ``report``."""
    [listener] = await trio.open_tcp_listeners(0, host=_HOST)
    async with listener:
        os.write(report, b"%d\n" % listener.socket.getsockname()[1])
        async with await listener.accept() as stream:
            while data := await stream.receive_some(10_000):
                await stream.send_all(data)


async def request(port: int) -> str:
    """Send `_DATA` to the server, and return how the answer arrived."""
    async with await trio.open_tcp_stream(_HOST, port) as stream:
        assert isinstance(stream, trio.SocketStream)
        got = b""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send_all, _DATA)
            while len(got) < len(_DATA):
                if not (data := await stream.receive_some(10_000)):
                    break
                got += data
        ours = getattr(stream.socket, "stream", None)  # of trio_smc's sockets
        await stream.send_eof()
        rest = await stream.receive_some(1)
    if got + rest != _DATA:
        return f"{len(got + rest)} other bytes"
    return "tcp" if ours is None else str(ours.mode)


def in_child(smc: bool, body: Callable[[int], str]) -> tuple[int, int]:
    """Run ``body(write_end)`` in a forked process; return its number and the read end of a pipe, to
    which its result is written at the end."""
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        return child, reader
    os.close(reader)
    try:
        if smc:
            trio_smc.enable(trio_smc.Config(learn_short=False))
        result = body(writer)
    except BaseException as error:
        places = traceback.extract_tb(error.__traceback__)
        result = f"{error!r} in {places[-1].name if places else '?'}"
    os.write(writer, result.encode())
    os._exit(0)


def once(system: System, *, smc: bool, server: str = "", client: str = "") -> tuple[str, list[str]]:
    """Connect two new processes; return the client's outcome, and the calls of both."""
    calls = os.memfd_create("calls")

    def run(body: Callable[..., Any], argument: int, refused: str) -> str:
        system.refused = refused
        system.calls.clear()
        try:
            with_limit = functools.partial(_limited, body)
            return trio.run(with_limit, argument) or "served"
        finally:
            system.refused = ""
            os.pwrite(calls, "".join(f"{name}\n" for name in system.calls).encode(), place)

    place = 0
    server_id, server_output = in_child(smc, lambda writer: run(serve, writer, server))
    with open(server_output) as from_server:
        port = from_server.readline()
        if not port.strip().isdigit():
            os.waitpid(server_id, 0)
            return f"server: {port}", []
        place = 1 << 16
        client_id, client_output = in_child(smc, lambda _: run(request, int(port), client))
        with open(client_output) as from_client:
            outcome = from_client.read()
        os.waitpid(client_id, 0)
        end = from_server.read()
        os.waitpid(server_id, 0)
    if end != "served":
        outcome += f", server: {end}"
    noted = os.pread(calls, 1 << 17, 0).replace(b"\0", b"").decode().split("\n")
    os.close(calls)
    return outcome, [name for name in noted if name]


async def _limited(body: Callable[..., Any], argument: int) -> str | None:
    with trio.fail_after(PATIENCE):
        result: str | None = await body(argument)
    return result


def main() -> None:
    """Try all calls."""
    signal.alarm(int(8 * PATIENCE))
    system = System(int(sys.argv[1]), sys.argv[2:])
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        os.environ["XDG_RUNTIME_DIR"] = directory
        system.install()
        outcome, over_tcp = once(system, smc=False)
        assert outcome == "tcp", outcome
        outcome, over_smc = once(system, smc=True)
        assert outcome == "smc-r", outcome
        found = {
            name: [
                once(system, smc=True, server=name)[0],
                once(system, smc=True, client=name)[0],
            ]
            for name in dict.fromkeys(over_smc)
            if name not in over_tcp and name not in _EVERYWHERE
        }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
