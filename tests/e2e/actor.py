"""One end of a connection that runs the commands of the test: here, or in a process of its own.

`Actor` has the operations; `open_ends` gives one in this process and one in another
(`python -m tests.e2e.actor CONFIG`), connected, and both are used the same way.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import trio
from trio.testing import wait_all_tasks_blocked

import trio_smc
from tests.e2e.peer import HOST, lines
from tests.e2e.processes import Peer, open_peer
from tests.peers import endpoint_of
from tests.tcp_ends import tcp_has_ended
from tests.timing import PATIENCE
from trio_smc import Config, Stack
from trio_smc.stack.connection_host import Endpoint
from trio_smc.streams import socket_options
from trio_smc.streams.rdma_stream import RdmaStream

__all__ = ["Actor", "End", "join", "open_ends"]

_ERRORS = (trio.BrokenResourceError, trio.ClosedResourceError)


class Actor:
    """One end; every operation is a method, which the test calls by name."""

    def __init__(self, stack: Stack, nursery: trio.Nursery) -> None:
        self._stack = stack
        self._nursery = nursery
        self._listener: trio_smc.SmcListener | None = None
        self._stream: RdmaStream
        self._endpoint: Endpoint
        self._kept: dict[str, tuple[RdmaStream, Endpoint]] = {}
        self._under_way: dict[str, Any] | None = None
        self._finished = trio.Event()

    async def act(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Do one operation: {"value": what it returned} or {"raised": name, "errno": cause}."""
        try:
            with trio.fail_after(PATIENCE):
                return {"value": await getattr(self, op)(**arguments)}
        except _ERRORS as error:
            cause = error.__cause__
            number = cause.errno if isinstance(cause, OSError) else None
            return {"raised": type(error).__name__, "errno": number}

    # --- connections -------------------------------------------------------------------------

    async def listen(self) -> int:
        """Listen; returns the port."""
        if self._listener is None:
            [self._listener] = await trio_smc.open_listeners(0, host=HOST)
        port: int = self._listener.socket.getsockname()[1]
        return port

    async def stop_listening(self) -> None:
        """Close what `listen` opened."""
        if self._listener is not None:
            await self._listener.aclose()

    async def accept(self) -> None:
        """Take the next connection."""
        assert self._listener is not None
        self._take(await self._listener.accept())

    async def connect(self, port: int) -> None:
        """Make a connection."""
        self._take(await trio_smc.open_stream(HOST, port))

    def _take(self, stream: trio_smc.SmcStream) -> None:
        assert isinstance(stream, RdmaStream), stream.fallback
        self._stream = stream
        self._endpoint = endpoint_of(self._stack, stream)

    async def keep_as(self, name: str) -> None:
        """Name the current connection."""
        self._kept[name] = self._stream, self._endpoint

    async def use(self, name: str) -> None:
        """Make the connection of that name the current one."""
        self._stream, self._endpoint = self._kept.pop(name)

    # --- the stream --------------------------------------------------------------------------

    async def send(self, size: int = 10) -> None:
        """Send that many bytes."""
        await self._stream.send_all(bytes(size))

    async def receive(self, size: int = 65536) -> int:
        """Receive once; how many bytes came."""
        return len(await self._stream.receive_some(size))

    async def read_all(self) -> int:
        """Receive to the end; how many bytes came."""
        total = 0
        while size := len(await self._stream.receive_some()):
            total += size
        return total

    async def send_eof(self) -> None:
        """Half close."""
        await self._stream.send_eof()

    async def aclose(self) -> None:
        """Close."""
        await self._stream.aclose()

    async def aclose_into(self) -> str:
        """Close; returns the state then, before a short timer can end it."""
        await self._stream.aclose()
        return self._endpoint.connection.state

    async def abort(self) -> None:
        """Abort."""
        self._stream.abort()

    async def abort_into(self) -> tuple[str, int]:
        """Abort; returns the state and how many RMB elements are in use then."""
        self._stream.abort()
        return self._endpoint.connection.state, await self.elements()

    async def start(self, what: str, **arguments: Any) -> None:
        """Begin another operation; `finish` returns its outcome."""

        async def run() -> None:
            self._under_way = await self.act(what, **arguments)
            self._finished.set()

        self._finished = trio.Event()
        self._nursery.start_soon(run)
        await wait_all_tasks_blocked()

    async def finish(self) -> dict[str, Any] | None:
        """The outcome of the operation that `start` began."""
        await self._finished.wait()
        return self._under_way

    async def setsockopt(self, level: int, option: int, value: int | list[int]) -> None:
        """Set an option; a list stands for bytes."""
        self._stream.setsockopt(level, option, value if isinstance(value, int) else bytes(value))

    async def hold_for_ever(self) -> None:
        """A cork has no time limit: corked data is never sent because of time."""
        socket_options.MAX_MERGE_DELAY = 1e6  # type: ignore[misc]

    async def clog(self) -> None:
        """Send to a stopped peer until its RNIC accepts no more."""
        core = self._endpoint.connection
        for _ in range(4000):
            with trio.move_on_after(0.2):
                await self._stream.send_all(b"x")
            await wait_all_tasks_blocked()  # deferred messages have been sent
            if core.sender.unacknowledged:
                return
        raise AssertionError("it takes all of it")

    # --- TCP, behind the stream's back ---------------------------------------------------------

    async def tcp_reset(self) -> None:
        """Reset the TCP connection; this end does not notice."""
        sock = self._endpoint_socket()
        self._stack.runtime.groups.tcp_watch.remove(sock)
        # Disconnecting is the only way to send RST and keep the descriptor.
        nowhere = bytes(16)  # AF_UNSPEC
        if ctypes.CDLL(None, use_errno=True).connect(sock.fileno(), nowhere, len(nowhere)):
            raise OSError(ctypes.get_errno(), "connect to AF_UNSPEC")

    async def tcp_fin(self) -> None:
        """Half close the TCP connection."""
        self._endpoint_socket().shutdown(socket.SHUT_WR)

    async def tcp_data(self) -> None:
        """Send a byte on the TCP connection."""
        os.write(self._stream.socket.fileno(), b"x")

    def _endpoint_socket(self) -> trio.socket.SocketType:
        sock = self._endpoint.sock
        assert sock is not None
        return sock

    # --- looking -----------------------------------------------------------------------------

    async def state(self) -> str:
        """The state of the connection (RFC 7609, 4.8)."""
        return self._endpoint.connection.state

    async def reach(self, state: str) -> None:
        """Wait for a state."""
        while self._endpoint.connection.state != state:  # noqa: ASYNC110
            await trio.sleep(0.001)  # no event to wait for

    async def arrived(self, size: int) -> None:
        """Wait until that many bytes are there to be read."""
        while self._endpoint.connection.receiver.readable < size:  # noqa: ASYNC110
            await trio.sleep(0.001)  # no event to wait for

    async def elements(self) -> int:
        """How many RMB elements are in use."""
        return sum(rmb.in_use for group in self._stack.link_groups for rmb in group.rmbs)

    async def tcp_open(self) -> bool:
        """True if the TCP connection still exists."""
        return not tcp_has_ended(self._stream)

    async def all_free(self) -> None:
        """Wait until no connection and no resource of a connection is left."""
        while self._stack.statistics().open_connections or await self.elements():  # noqa: ASYNC110
            await trio.sleep(0.001)  # no event to wait for

    async def unknown_tokens(self) -> int:
        """Number of CDC messages for connections that had ended."""
        return self._stack.statistics().unknown_tokens


class End:
    """An actor, here or in another process: ``await end.send(size=3)`` calls an operation by name.

    An operation that raises returns (name of the exception, errno of its cause).
    """

    def __init__(self, act: Callable[..., Awaitable[dict[str, Any]]], peer: Peer | None) -> None:
        self._act = act
        self._peer = peer

    def __getattr__(self, op: str) -> Callable[..., Awaitable[Any]]:
        async def call(**arguments: Any) -> Any:
            return _outcome(await self._act(op=op, **arguments))

        return call

    async def finished(self) -> Any:
        """The outcome of `Actor.start`."""
        return _outcome(await self.finish())

    @property
    def remote(self) -> bool:
        """True if this side is another process, which can be stopped."""
        return self._peer is not None

    def stop(self) -> None:
        """SIGSTOP."""
        assert self._peer is not None
        self._peer.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        assert self._peer is not None
        self._peer.process.send_signal(signal.SIGCONT)


def _outcome(answer: dict[str, Any]) -> Any:
    if "raised" in answer:
        return answer["raised"], answer["errno"]
    return answer["value"]


@contextlib.asynccontextmanager
async def open_ends(**settings: Any) -> AsyncIterator[tuple[End, End]]:
    """An end here and one in another process; `join` connects them.

    Args:
      settings: of both `Config`s.
    """
    async with (
        open_peer(settings, module="tests.e2e.actor") as peer,
        trio_smc.open_stack(Config(**{"learn_short": False, **settings})) as stack,
        trio.open_nursery() as nursery,
    ):
        actor = Actor(stack, nursery)

        async def send_command(**arguments: Any) -> dict[str, Any]:
            return await peer.call("act", **arguments)

        here, there = End(actor.act, None), End(send_command, peer)
        yield here, there
        await actor.stop_listening()


async def join(client: End, server: End, port: int) -> None:
    """Connect them."""
    await client.connect(port=port)
    await server.accept()


async def main(settings: dict[str, Any]) -> None:
    """Run commands until the input ends."""
    async with (
        trio_smc.open_stack(Config(**{"learn_short": False, **settings})) as stack,
        trio.open_nursery() as nursery,
        trio.lowlevel.FdStream(os.dup(0)) as stdin,
    ):
        actor = Actor(stack, nursery)
        async for line in lines(stdin):
            command = json.loads(line)
            assert command.pop("do") == "act"
            sys.stdout.write(json.dumps(await actor.act(**command)) + "\n")
            sys.stdout.flush()
        await actor.stop_listening()


if __name__ == "__main__":
    trio.run(main, json.loads(sys.argv[1]))
