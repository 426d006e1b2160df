"""One end of a program of `_programs`: a process that performs the operations it is sent.

The runner sends commands over a Unix socket: a length and a marshalled tuple.  Each `step` starts a
task that performs its operations one after the other, as a handler would.  `settle` waits until
every task of this process waits for something, and answers with what has ended since.

A read of up to n bytes is a loop of receive calls, because two transports may divide the same bytes
into different pieces.  The loop ends at n bytes, at the end of the stream or an error, or, when the
runner has seen that all is quiet (`settle` with ``collect``), with the bytes received so far.
"""

from __future__ import annotations

import errno
import marshal
import os
import socket
import ssl
import struct
import warnings
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import trio
import trio.testing

import trio_smc
from tests.campaigns._programs import Kind, text
from tests.timing import PATIENCE
from trio_smc import Config
from trio_smc.datapath.connection import Connection as SmcConnection

__all__ = ["Channel", "EndSettings", "live"]

HOST: Final = "127.0.0.1"
_TURNS: Final = 3
_LENGTH: Final = struct.Struct("<I")
_PIECE: Final = 1 << 15
_CHUNK: Final = 1 << 15
BUFFER: Final = 1 << 16
"""Bytes of the socket's buffers in programs that fill them."""
RING: Final = 1 << 17
"""Bytes of the receive ring of SMC-R: more than a program sends that fills no buffers."""


class Channel:
    """Length-prefixed marshalled messages over a Unix socket; blocking, for the runner."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._unread = b""

    def send(self, *message: Any) -> None:
        """Send one message.  Raises OSError if the other process is gone."""
        data = marshal.dumps(message)
        self.sock.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> Any:
        """Return the next answer.  Raises EOFError if the other process is gone, TimeoutError."""
        while True:
            message = self._next()
            if message is not None:
                return message[0]
            data = self.sock.recv(_CHUNK)
            if not data:
                raise EOFError
            self._unread += data

    async def receive_async(self) -> Any:
        """As `receive`, on Trio."""
        while True:
            message = self._next()
            if message is not None:
                return message
            await trio.lowlevel.wait_readable(self.sock)
            data = self.sock.recv(_CHUNK)
            if not data:
                raise EOFError
            self._unread += data

    def _next(self) -> Any:
        if len(self._unread) < 4:
            return None
        [length] = _LENGTH.unpack_from(self._unread)
        if len(self._unread) < 4 + length:
            return None
        message = marshal.loads(self._unread[4 : 4 + length])
        self._unread = self._unread[4 + length :]
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class EndSettings:
    """The settings of the process of an end.

    Attributes:
      number: 0 is the server, 1 the client.
      smc: use SMC-R.
      config: fields of its `Config`.
      contexts: for TLS: the server's and the client's.
    """

    number: int
    smc: bool
    config: dict[str, Any]
    contexts: tuple[ssl.SSLContext, ssl.SSLContext]


def name_of(error: BaseException) -> str:
    """The kind of an exception: its type or the name of its number, and that of its cause."""
    if isinstance(error, OSError) and error.errno and not isinstance(error, ssl.SSLError):
        return errno.errorcode.get(error.errno, str(error.errno))
    name = type(error).__name__
    cause = error.__cause__
    if cause is error:
        return f"{name} from itself"
    return name if cause is None else f"{name} from {name_of(cause)}"


def _mode(sock: trio.socket.SocketType) -> str | None:
    """The mode of a connection over a drop-in socket; None before, and for sockets of Trio."""
    stream = getattr(sock, "stream", None)
    return None if stream is None else str(stream.mode)


class Connection:
    """The operations of a program on one end of its connection.

    Each returns what is compared: words and numbers.
    """

    def __init__(self, end: End, sock: trio.socket.SocketType, style: str) -> None:
        self._end = end
        self.style = style
        self.stream: Any = None
        self._use(sock)
        if style != "socket":
            self.stream = trio.SocketStream(sock)

    def _use(self, sock: trio.socket.SocketType) -> None:
        self.sock = sock
        # Otherwise a second small send waits for the ACK of the first one, which may be delayed.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def secure(self) -> None:
        """Begin TLS, if this is its style."""
        if self.style == "tls":
            settings = self._end.settings
            self.stream = trio.SSLStream(
                self.stream,
                settings.contexts[settings.number],
                server_hostname="localhost" if settings.number else None,
                server_side=settings.number == 0,
            )
            await self.stream.do_handshake()

    # --- connecting ----------------------------------------------------------------------------

    async def connect(self, _: int, task: Task) -> str:
        """Connect to the server; `End.settle` waits until it has ended.

        Over SMC-R a handshake waits for the server's `accept`, for a time; over TCP a client is
        connected before.
        """
        task.connects = True
        try:
            await self.sock.connect((HOST, self._end.port))
        finally:
            task.connects = False
        self._end.note_mode(self.sock)
        return "connected"

    async def connect_refused(self, _: int, task: Task) -> str:
        with socket.socket() as bound:
            bound.bind((HOST, 0))
            task.connects = True
            try:
                await self.sock.connect(bound.getsockname())
            finally:
                task.connects = False
        return "connected"

    async def renew(self, *_: object) -> str:
        self.sock.close()
        self._use(trio.socket.socket())
        return "new"

    async def accept(self, *_: object) -> str:
        sock, address = await self._end.listeners["connecting"].accept()
        self.sock.close()
        self._use(sock)
        self._end.note_mode(sock)
        return f"accepted from {address[0]}"

    async def close_listener(self, *_: object) -> str:
        self._end.listeners["connecting"].close()
        return "closed"

    async def shut_listener(self, *_: object) -> str:
        self._end.listeners["connecting"].shutdown(socket.SHUT_RD)
        return "shut"

    async def listen(self, *_: object) -> str:
        self._end.listeners["connecting"].listen(16)
        return "listens"

    # --- data --------------------------------------------------------------------------------

    async def send(self, size: int, task: Task) -> str:
        data = memoryview(text(task.number, task.position, size))
        if self.style != "socket":
            await self.stream.send_all(data)
            return "sent"
        while data:
            sent = await self.sock.send(data)
            self._end.activity += 1
            data = data[sent:]
        return "sent"

    async def sendmsg(self, size: int, task: Task) -> str:
        data = memoryview(text(task.number, task.position, size))
        while data:
            half = len(data) // 2
            sent = await self.sock.sendmsg([data[:half], data[half:]])
            self._end.activity += 1
            data = data[sent:]
        return "sent"

    async def recv(self, size: int, task: Task) -> str:
        receive = self.sock.recv if self.style == "socket" else self.stream.receive_some
        return await self._read(size, receive, task)

    async def recv_into(self, size: int, task: Task) -> str:
        async def receive(wanted: int) -> bytes:
            place = bytearray(wanted)
            return bytes(place[: await self.sock.recv_into(place)])

        return await self._read(size, receive, task)

    async def read_all(self, _: int, task: Task) -> str:
        receive = self.sock.recv if self.style == "socket" else self.stream.receive_some
        return await self._read(None, receive, task)

    async def _read(
        self, size: int | None, receive: Callable[[int], Awaitable[bytes]], task: Task
    ) -> str:
        """Read ``size`` bytes, or all; fewer at the end, and if no more have arrived."""
        before = self._end.received
        try:
            with trio.CancelScope() as scope:
                if size is not None:
                    task.collect = scope
                while size is None or self._end.received - before < size:
                    wanted = _PIECE if size is None else size - (self._end.received - before)
                    data = await receive(wanted)
                    self._end.activity += 1
                    task.has_some = True
                    if not data:
                        task.record(self._end.describe(before))
                        return "end"
                    self._end.note_received(data)
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            task.record(self._end.describe(before))
            raise
        finally:
            task.collect = None
            task.has_some = False
        return self._end.describe(before)

    async def peek(self, size: int, _: Task) -> str:
        data = await self.sock.recv(size, socket.MSG_PEEK)
        return f"peeked {len(data)} {zlib.crc32(data):08x}"

    async def wait_writable(self, *_: object) -> str:
        await self.stream.wait_send_all_might_not_block()
        return "writable"

    async def wait(self, for_writing: int, _: Task) -> str:
        if self.sock.fileno() < 0:
            return "closed"  # Trio 0.35 keeps a task that waits for -1
        if for_writing:
            await trio.lowlevel.wait_writable(self.sock)
            return "writable"
        await trio.lowlevel.wait_readable(self.sock)
        return "readable"

    async def notify(self, *_: object) -> str:
        if self.sock.fileno() >= 0:
            trio.lowlevel.notify_closing(self.sock)
        return "notified"

    # --- ends --------------------------------------------------------------------------------

    async def close(self, *_: object) -> str:
        if self.style == "socket":
            self.sock.close()
        else:
            await self.stream.aclose()
        return "closed"

    async def close_socket(self, *_: object) -> str:
        self.sock.close()
        return "closed"

    async def close_transport(self, *_: object) -> str:
        await self.stream.transport_stream.aclose()
        return "closed"

    async def unwrap(self, *_: object) -> str:
        _, rest = await self.stream.unwrap()
        return f"unwrapped {len(rest)}"

    async def shut_wr(self, *_: object) -> str:
        if self.style == "socket":
            self.sock.shutdown(socket.SHUT_WR)
        elif self.style == "stream":
            await self.stream.send_eof()
        else:
            await self.stream.transport_stream.send_eof()
        return "shut"

    async def shut_rd(self, *_: object) -> str:
        self.sock.shutdown(socket.SHUT_RD)
        return "shut"

    async def shut_both(self, *_: object) -> str:
        self.sock.shutdown(socket.SHUT_RDWR)
        return "shut"

    async def linger(self, seconds: int, _: Task) -> str:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, seconds))
        return "set"

    # --- questions ---------------------------------------------------------------------------

    async def readable(self, *_: object) -> str:
        return str(self.sock.is_readable())

    async def names(self, *_: object) -> str:
        here, there = self.sock.getsockname(), self.sock.getpeername()
        return f"{here[0]} {there[0]}"

    async def error(self, *_: object) -> str:
        number = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        return errno.errorcode.get(number, str(number))


class Task:
    """A step that runs: its operations, and what has come of them."""

    def __init__(self, end: End, number: int, operations: Sequence[tuple[str, int]]) -> None:
        self._end = end
        self.number = number
        self.position = 0
        self.operations = operations
        self._scope = trio.CancelScope()
        self._cancelled = False
        self.collect: trio.CancelScope | None = None
        self.has_some = False
        self.connects = False

    def record(self, result: str) -> None:
        """Note a result of the operation at `position`."""
        self._end.activity += 1
        self._end.results.append((self.number, self.position, result))

    async def run(self) -> None:
        """Perform the operations."""
        self._end.tasks.add(self)
        connection = self._end.connection
        assert connection is not None
        for position, (name, argument) in enumerate(self.operations):
            self.position = position
            if self._cancelled:
                break
            result = "cancelled"
            with trio.CancelScope() as self._scope:
                try:
                    result = await getattr(connection, name)(argument, self)
                except Exception as error:
                    result = name_of(error)
            self.record(result)
            # A task that this operation has woken runs now: with amortised checkpoints the
            # operation need not have let it run (docs/programs.md).
            for _ in range(_TURNS):
                await trio.lowlevel.cancel_shielded_checkpoint()
        self._end.tasks.discard(self)

    def cancel(self) -> None:
        """Cancel the operation that waits, and the rest."""
        self._cancelled = True
        self._scope.cancel()


class End:
    """The process."""

    def __init__(self, settings: EndSettings, channel: Channel) -> None:
        self.settings = settings
        self._channel = channel
        self.listeners: dict[Kind, trio.socket.SocketType] = {}
        self.port = 0
        self.connection: Connection | None = None
        self.tasks: set[Task] = set()
        self.results: list[tuple[int, int, str]] = []
        self.activity = 0
        self.received = 0
        self.over_smc = 0
        self._pieces: list[bytes] = []

    def note_mode(self, sock: trio.socket.SocketType) -> None:
        """Count a connection that a program has made, if it is SMC-R."""
        self.over_smc += _mode(sock) == "smc-r"

    def note_received(self, data: bytes) -> None:
        """Count and keep what has arrived."""
        self.received += len(data)
        self._pieces.append(data)

    def describe(self, before: int) -> str:
        """A read since ``before`` bytes had been received: its bytes, by number and checksum."""
        count = self.received - before
        if not count:
            return "read 0"
        data = b"".join(self._pieces)[-count:]
        return f"read {count} {zlib.crc32(data):08x}"

    async def run(self) -> None:
        """Do what the runner says until it is gone, or says how to end."""
        async with trio.open_nursery() as nursery:
            while True:
                try:
                    name, *arguments = await self._channel.receive_async()
                except (EOFError, OSError):
                    nursery.cancel_scope.cancel()
                    return
                if name == "step":
                    nursery.start_soon(Task(self, *arguments).run)
                    continue
                if name == "cancel":
                    for task in self.tasks:
                        task.cancel()
                    continue
                if name == "exit":
                    self._leave(*arguments)
                    nursery.cancel_scope.cancel()
                    return
                self._channel.send(await getattr(self, f"_{name}")(*arguments))

    @staticmethod
    def _leave(how: str) -> None:
        if how == "raise":
            raise RuntimeError("the program has a defect")
        if how == "SystemExit":
            raise SystemExit(0)
        if how == "os._exit":
            os._exit(0)

    async def _listen(self, kind: Kind) -> int:
        listener = self.listeners.get(kind)
        if kind == "connecting" and listener is not None:
            listener.close()
            listener = None
        if listener is None:
            listener = trio.socket.socket()
            self._set_buffers(listener, kind)
            await listener.bind((HOST, 0))
            listener.listen(16)
            self.listeners[kind] = listener
        return int(listener.getsockname()[1])

    @staticmethod
    def _set_buffers(sock: trio.socket.SocketType, kind: Kind) -> None:
        if kind == "full":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)

    async def _open(self, style: str, kind: Kind, port: int) -> str:
        self.port = port
        if self.settings.number == 0 and kind != "connecting":
            sock, _ = await self.listeners[kind].accept()
        else:
            sock = trio.socket.socket()
            self._set_buffers(sock, kind)
            if kind != "connecting":
                await sock.connect((HOST, port))
        mode = _mode(sock) or "tcp"
        self.connection = Connection(self, sock, style)
        self.tasks = set()
        self.results = []
        self.activity = self.received = self.over_smc = 0
        self._pieces = []
        await self.connection.secure()
        return mode

    async def _settle(self, collect: bool) -> tuple[int, list[tuple[int, int, str]]]:
        with trio.fail_after(PATIENCE):
            while any(task.connects for task in self.tasks):  # noqa: ASYNC110
                await trio.sleep(0.002)
        await trio.testing.wait_all_tasks_blocked()
        if collect:
            for task in self.tasks:
                if task.has_some and task.collect is not None:
                    task.collect.cancel()
            await trio.testing.wait_all_tasks_blocked()
        results, self.results = self.results, []
        return self.activity + _messages.count, results

    async def _finish(self) -> tuple[bytes, int]:
        """Forget the connection; return all that has arrived, and the number of connections that
        the program has made over SMC-R."""
        for task in self.tasks:
            task.cancel()
        await trio.testing.wait_all_tasks_blocked()
        if self.connection is not None:
            self.connection.sock.close()
            self.connection = None
        return b"".join(self._pieces), self.over_smc


class _Messages:
    """Counts the CDC messages that this process receives, so that `settle` reports them."""

    def __init__(self) -> None:
        self.count = 0

    def begin(self) -> None:
        """Count from now on."""
        on_cdc_untrusted = SmcConnection.on_cdc_untrusted

        def counted(connection: SmcConnection, *arguments: Any) -> Any:
            self.count += 1
            return on_cdc_untrusted(connection, *arguments)

        SmcConnection.on_cdc_untrusted = counted  # type: ignore[method-assign,assignment]


_messages: Final = _Messages()


def live(settings: EndSettings, sock: socket.socket) -> None:
    """The life of the process of an end, which was forked."""
    warnings.simplefilter("ignore", ResourceWarning)
    if settings.smc:
        _messages.begin()
        trio_smc.enable(Config(**{"receive_buffer": RING, "require_smc": True, **settings.config}))
    sock.setblocking(True)
    end = End(settings, Channel(sock))
    trio.run(end.run)
