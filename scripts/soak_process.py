"""One of the processes of `soak.py`: serves conversations, and begins some on command.

    python -m scripts.soak_process '{"name": "client", "id": 2, "seed": 1, "certificate": ...}'

It reads commands and writes events, one JSON object per line.  A conversation is one of
`examples.chaos_load`, in which both sides know every byte in advance.  TLS and websockets cannot
end one direction alone, so there the conversation is put into frames.  The upper half of the seed
is the ID of the process that began the conversation: so the server knows the other process, too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import ssl
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import trio
from trio_websocket import (
    ConnectionClosed,
    HandshakeError,
    WebSocketConnection,
    wrap_client_stream,
    wrap_server_stream,
)

import trio_smc
from examples.chaos_load import KINDS, Conversation, EndedEarly, Wrong
from examples.chaos_peer import HOST, outcome, write_event
from trio_smc import Config, SmcListener, SmcStream, SoftRnic, Stack
from trio_smc.rnic.soft.faults import Fault, FaultPlan

PATIENCE = 60.0
"""Seconds of the process's own running time after which a conversation counts as hung."""
_TICK = 0.25
BY_TRANSPORT = {
    "plain": KINDS,
    "tls": ("stream", "request", "half-close"),
    "websocket": ("stream", "request", "half-close"),
}
_FAULTS = ("port-flap", Fault.LINK_DOWN, Fault.LINK_DOWN_HERE, Fault.DELAY, Fault.WAKEUP)
_WHOLE_FOR = 0.8
"""Seconds for which all link groups must have both links before the next fault."""
_ABNORMAL = 1006


class TlsFrames:
    """The stream of a `Conversation` over TLS: frames of length and bytes; length 0 is the end."""

    def __init__(self, stream: trio.SSLStream[SmcStream]) -> None:
        self._stream = stream
        self._unread = bytearray()
        self._left: int | None = None

    async def send_all(self, data: bytes | memoryview) -> None:
        with _tls_errors():
            await self._stream.send_all(len(data).to_bytes(4, "big") + bytes(data))

    async def send_eof(self) -> None:
        await self.send_all(b"")

    async def _more(self) -> None:
        with _tls_errors():
            data = await self._stream.receive_some()
        if not data:
            raise Wrong("TLS ended in order in the middle of a conversation")
        self._unread += data

    async def receive_some(self, most: int) -> bytes:
        if self._left is None:
            while len(self._unread) < 4:
                await self._more()
            self._left = int.from_bytes(self._unread[:4], "big")
            del self._unread[:4]
        if self._left == 0:
            return b""
        if not self._unread:
            await self._more()
        data = bytes(self._unread[: min(most, self._left)])
        del self._unread[: len(data)]
        self._left = self._left - len(data) or None
        return data

    async def aclose(self) -> None:
        with _tls_errors():
            await self._stream.aclose()


@contextlib.contextmanager
def _tls_errors() -> Iterator[None]:
    """Report a record that does not decrypt as a wrong byte, not as a broken connection.

    The end of the stream below is an early end: TLS ends by a record of its own.
    """
    try:
        yield
    except trio.BrokenResourceError as error:
        if isinstance(error.__cause__, ssl.SSLEOFError):
            raise EndedEarly(f"TLS: {error.__cause__}") from error
        if isinstance(error.__cause__, ssl.SSLError):
            raise Wrong(f"TLS: {error.__cause__}") from error
        raise


class WebSocketFrames:
    """The stream of a `Conversation` over a websocket: binary messages; a text is the end."""

    def __init__(self, connection: WebSocketConnection, stream: SmcStream) -> None:
        self._connection = connection
        self._stream = stream
        self._unread = memoryview(b"")
        self._ended = False

    async def send_all(self, data: bytes | memoryview) -> None:
        with _websocket_errors():
            await self._connection.send_message(bytes(data))

    async def send_eof(self) -> None:
        with _websocket_errors():
            await self._connection.send_message("end")

    async def receive_some(self, most: int) -> bytes:
        if not self._unread and not self._ended:
            with _websocket_errors():
                message = await self._connection.get_message()
            self._ended = isinstance(message, str)
            self._unread = memoryview(message if isinstance(message, bytes) else b"")
        data, self._unread = bytes(self._unread[:most]), self._unread[most:]
        return data

    async def aclose(self) -> None:
        try:
            await self._connection.aclose()
        finally:
            await trio.aclose_forcefully(self._stream)


@contextlib.contextmanager
def _websocket_errors() -> Iterator[None]:
    try:
        yield
    except ConnectionClosed as closed:
        if closed.reason is None or closed.reason.code == _ABNORMAL:
            raise trio.BrokenResourceError from closed
        raise Wrong(f"the websocket was closed with {closed.reason}") from closed


class _EndNoticing:
    """A stream that sets an event when a send or a receive finds that it has ended."""

    def __init__(self, stream: SmcStream) -> None:
        self._stream = stream
        self.over = trio.Event()

    async def send_all(self, data: bytes) -> None:
        with self._noticing():
            await self._stream.send_all(data)

    async def receive_some(self, most: int) -> bytes:
        with self._noticing():
            data = bytes(await self._stream.receive_some(most))
        if not data:
            self.over.set()
        return data

    @contextlib.contextmanager
    def _noticing(self) -> Iterator[None]:
        try:
            yield
        except trio.BrokenResourceError:
            self.over.set()
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


async def _websocket(
    nursery: trio.Nursery, stream: SmcStream, *, client: bool
) -> WebSocketConnection:
    """Do the handshake of one side; trio-websocket waits for ever if the connection is cut."""
    noticing: Any = _EndNoticing(stream)

    async def give_up() -> None:
        await noticing.over.wait()
        raise trio.BrokenResourceError

    async with trio.open_nursery() as racing:
        racing.start_soon(give_up)
        if client:
            connection = await wrap_client_stream(nursery, noticing, HOST, "/soak")
        else:
            connection = await (await wrap_server_stream(nursery, noticing)).accept()
        racing.cancel_scope.cancel()
    return connection


@contextlib.asynccontextmanager
async def framed(
    transport: str, stream: SmcStream, context: ssl.SSLContext, *, client: bool
) -> AsyncIterator[SmcStream]:
    """Yield the stream of a conversation over that transport."""
    if transport == "plain":
        yield stream
    elif transport == "tls":
        name = "localhost" if client else None
        tls = trio.SSLStream(stream, context, server_hostname=name, server_side=not client)
        yield cast(SmcStream, TlsFrames(tls))
    else:
        async with trio.open_nursery() as nursery:
            with trio.fail_after(PATIENCE):
                connection = await _websocket(nursery, stream, client=client)
            yield cast(SmcStream, WebSocketFrames(connection, stream))
            await trio.aclose_forcefully(stream)


class Log(logging.Handler):
    """The last log records of the stack, to explain why a connection broke."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._records: deque[logging.LogRecord] = deque(maxlen=12)

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(record)

    def formatted(self) -> list[str]:
        """The text of each record, with its age."""
        now = time.time()
        return [f"{each.created - now:.1f} s: {self.format(each)}" for each in self._records]


class Patience:
    """Deadlines in running time of this process: the time in which it is stopped does not count."""

    def __init__(self) -> None:
        self._ran = 0.0
        self._waiting: list[tuple[float, trio.CancelScope, trio.lowlevel.Task, list[str]]] = []

    async def tick(self) -> None:
        while True:
            await trio.sleep(_TICK)
            self._ran += _TICK
            for until, scope, task, waits in self._waiting:
                if self._ran > until and not scope.cancel_called:
                    waits += where(task)
                    scope.cancel()

    @contextlib.contextmanager
    def move_on_after(self, seconds: float) -> Iterator[list[str]]:
        """Like Trio's, but yields a list that gets a description of what the tasks waited for."""
        with trio.CancelScope() as scope:
            waiting = (self._ran + seconds, scope, trio.lowlevel.current_task(), list[str]())
            self._waiting.append(waiting)
            try:
                yield waiting[-1]
            finally:
                self._waiting.remove(waiting)


def where(task: trio.lowlevel.Task) -> list[str]:
    """Describe what a task and its children wait for: one line each, the innermost frame last."""
    waits = " < ".join(
        f"{frame.f_code.co_name}:{line}" for frame, line in reversed([*task.iter_await_frames()])
    )
    below = [each for nursery in task.child_nurseries for each in nursery.child_tasks]
    return [waits, *(line for each in below for line in where(each))]


@dataclass(kw_only=True)
class Process:
    """The state of this process.

    Attributes:
      lanes: conversations at once with each other process, for each transport.
      gone: processes with which no further conversation begins.
      patience: the time that a conversation may take.
    """

    name: str
    id: int
    seed: int
    scale: int
    lanes: int
    stack: Stack
    rnics: tuple[SoftRnic, ...]
    contexts: tuple[ssl.SSLContext, ssl.SSLContext]
    log: Log
    numbers: int = 0
    open_conversations: int = 0
    gone: set[int] = field(default_factory=set)
    patience: Patience = field(default_factory=Patience)
    stopping: trio.Event = field(default_factory=trio.Event)

    # -- conversations -------------------------------------------------------------------

    async def serve(self, transport: str, stream: SmcStream) -> None:
        """Serve one connection that another process has opened."""
        if stream.mode != "smc-r":
            await stream.aclose()  # the client reports it
            return
        self.open_conversations += 1
        try:
            async with framed(transport, stream, self.contexts[0], client=False) as channel:
                with trio.fail_after(PATIENCE):
                    conversation = await Conversation.accept(channel)
                await self.converse(transport, conversation, conversation.seed >> 32)
        except* (
            trio.BrokenResourceError, HandshakeError, ConnectionClosed, EndedEarly
        ) as broken:  # fmt: skip
            write_event(event="nameless", transport=transport, why=repr(broken))
        except* (trio.TooSlowError, Wrong) as wrong:
            write_event(event="problem", what=f"{transport}, before its first byte: {wrong!r}")
        finally:
            await trio.aclose_forcefully(stream)
            self.open_conversations -= 1

    async def keep_conversing(self, other: int, transport: str, port: int, lane: int) -> None:
        """Have one conversation after the other with one process."""
        rng = random.Random(f"{self.seed} {self.id} {other} {transport} {lane}")
        while not self.stopping.is_set() and other not in self.gone:
            await trio.sleep(rng.random() * 0.2)
            try:
                stream = await self.stack.open_stream(HOST, port)
            except OSError as error:
                write_event(event="refused", other=other, why=str(error))
                await trio.sleep(0.1)
                continue
            if stream.mode != "smc-r":
                write_event(
                    event="fallback",
                    other=other,
                    why=str(stream.fallback and stream.fallback.reason),
                )
                await stream.aclose()
                continue
            self.open_conversations += 1
            began = trio.current_time()
            try:
                async with framed(transport, stream, self.contexts[1], client=True) as channel:
                    await self.converse(transport, self.next(transport, channel), other)
            except* (trio.BrokenResourceError, HandshakeError, ConnectionClosed) as broken:
                self.report_end(other, transport, "reset", 0, repr(broken), began)
            except* EndedEarly as early:
                self.report_end(other, transport, "ended early", 0, repr(early), began)
            except* (trio.TooSlowError, Wrong) as wrong:
                write_event(event="problem", what=f"{transport}, before its first byte: {wrong!r}")
            finally:
                await trio.aclose_forcefully(stream)
                self.open_conversations -= 1

    def next(self, transport: str, channel: SmcStream) -> Conversation:
        """Return the next conversation, of a kind that this transport supports."""
        while True:
            self.numbers += 1
            conversation = Conversation(
                stream=channel, seed=self.id << 32 | self.seed, number=self.numbers,
                scale=self.scale,
            )  # fmt: skip
            if conversation.kind in BY_TRANSPORT[transport]:
                return conversation

    async def converse(self, transport: str, conversation: Conversation, other: int) -> None:
        """Have one conversation and report how it ended."""
        began, how = trio.current_time(), "hung"
        with self.patience.move_on_after(PATIENCE) as waits:
            how = await outcome(conversation)
        activity = f"{conversation.number} ({conversation.kind}): {conversation.activity}"
        self.report_end(other, transport, how, conversation.received, activity, began, waits)
        if how != "done":
            await trio.aclose_forcefully(conversation.stream)

    def report_end(
        self, other: int, transport: str, how: str, received: int, activity: str, began: float,
        waits: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Report how a conversation ended."""
        log = [] if how == "done" else [*waits, *self.log.formatted()]
        write_event(event="ended", other=other, transport=transport, how=how, bytes=received,
            activity=activity, seconds=trio.current_time() - began, log=log)  # fmt: skip

    # -- faults --------------------------------------------------------------------------

    def whole(self) -> bool:
        """True if every link group has both of its links."""
        groups = [group for group in self.stack.link_groups if group.state != "TERMINATING"]
        return bool(groups) and all(
            group.kind == "symmetric" and [link.state for link in group.links] == ["ACTIVE"] * 2
            for group in groups
        )

    async def make_faults(self, every: float) -> None:
        """Make RNICs of this process fail, one at a time, each when all groups have both links."""
        rng = random.Random(f"{self.seed} {self.id} faults")
        while True:
            await trio.sleep(rng.expovariate(1 / every))
            since = trio.current_time()
            while trio.current_time() - since < _WHOLE_FOR:
                await trio.sleep(0.05)
                if not self.whole():
                    since = trio.current_time()
            kind, rnic = rng.choice(_FAULTS), rng.choice(self.rnics)
            write_event(event="fault", kind=kind)
            if kind == "port-flap":
                rnic.fail()
                await trio.sleep(rng.random())
                rnic.restore()
            else:
                assert isinstance(rnic.faults, FaultPlan)
                with contextlib.suppress(ValueError):  # there is no queue pair at this moment
                    rnic.faults.inject(Fault(kind))

    # -- commands ------------------------------------------------------------------------

    async def run_commands(self, nursery: trio.Nursery) -> None:
        """Run commands from standard input until "stop" or its end."""
        buffered = b""
        async with trio.lowlevel.FdStream(os.dup(0)) as stdin:
            async for data in stdin:
                *lines, buffered = (buffered + data).split(b"\n")
                for line in lines:
                    command = json.loads(line)
                    match command["do"]:
                        case "connect":
                            for transport, port in command["ports"].items():
                                for lane in range(self.lanes):
                                    nursery.start_soon(
                                        self.keep_conversing,
                                        command["other"],
                                        transport,
                                        port,
                                        lane,
                                    )
                        case "forget":
                            self.gone.add(command["other"])
                        case "stop":
                            self.stopping.set()
                            return
        self.stopping.set()

    async def rest(self) -> None:
        """Wait until all conversations have ended and nothing is left, and report that."""
        with trio.move_on_after(PATIENCE):
            while self.open_conversations or self.stack.statistics().open_connections:  # noqa: ASYNC110
                await trio.sleep(0.05)  # there is no event to wait for
        left = self.stack.statistics().open_connections
        write_event(event="rests", open_conversations=self.open_conversations, connections=left,
            received=self.stack.statistics().bytes_received)  # fmt: skip


async def main(
    name: str, id: int, seed: int, scale: int, lanes: int, directory: str,
    settings: dict[str, Any], faults: float,
) -> None:  # fmt: skip
    """Run the process; ``faults``: seconds from one fault of its RNICs to the next, or 0."""
    path = Path(directory)
    contexts = (
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH),
        ssl.create_default_context(cafile=path / "ca.pem"),
    )
    contexts[0].load_cert_chain(path / "server.pem")
    rnics = tuple(
        SoftRnic(f"{name}-{index}", faults=FaultPlan(seed + index) if faults else None)
        for index in range(2)
    )
    log = Log()
    logger = logging.getLogger("trio_smc")
    logger.setLevel(logging.INFO)
    logger.addHandler(log)
    logger.propagate = False
    async with (
        trio_smc.open_stack(Config(rnics=rnics, learn_short=False, **settings)) as stack,
        trio.open_nursery() as nursery,
    ):
        process = Process(
            name=name, id=id, seed=seed, scale=scale, lanes=lanes, stack=stack, rnics=rnics,
            contexts=contexts, log=log,
        )  # fmt: skip
        nursery.start_soon(process.patience.tick)
        ports = {}
        for transport in BY_TRANSPORT:
            listeners: list[SmcListener] = await stack.open_listeners(0, host=HOST)
            ports[transport] = listeners[0].socket.getsockname()[1]
            handler = partial(process.serve, transport)
            nursery.start_soon(trio.serve_listeners, handler, listeners)
        if faults:
            nursery.start_soon(process.make_faults, faults)
        write_event(event="ready", ports=ports)
        async with trio.open_nursery() as talks:
            await process.run_commands(talks)
        await process.rest()
        # The controller checks what is left, and then lets this process end.
        await trio.lowlevel.wait_readable(0)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(partial(main, **json.loads(sys.argv[1])))
