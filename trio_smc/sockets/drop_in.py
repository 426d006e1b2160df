"""The drop-in socket: a `trio.socket.SocketType` whose connection may be SMC-R.

Theory of operation
-------------------
`enable` installs the socket factory of this module, so that `trio.socket.socket` returns a
`DropInSocket` for TCP.  A drop-in socket wraps a plain socket, and has one of three *sides*, which
do its calls:

- `Unconnected`: the plain socket handles options, bind and listen.  `connect` runs the handshake of
  `open_stream` on the plain socket; `accept` returns a connection that an `SmcListener` accepted.
- `OverTcp`: all calls go to the plain socket.
- `OverSmc`: data calls go to the stream; only names and options come from the plain socket.

The side changes once, when a connection is established.

Where a socket and a stream differ, the drop-in socket behaves as a socket: `send` may send a part
of the data; errors are OSErrors with a number; `close` is synchronous, so it cannot wait for the
peer; after SHUT_RD every read is at the end of the stream.  `listen` is synchronous too, but a
listener is published asynchronously: a task of the stack publishes it, and `accept` waits for that
task.

Programs for TCP seldom need a full checkpoint in every call, and a checkpoint takes a large part of
the time of a call.  So drop-in sockets have amortised checkpoints unless `Config.checkpoints` is
set.

Operations without a meaning over SMC-R raise OSError (EOPNOTSUPP): ancillary data, a destination
address, `detach` and `dup`.
"""

from __future__ import annotations

import errno
import logging
import os
import socket as stdlib_socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self
from weakref import WeakKeyDictionary

import trio

from trio_smc.connecting.connect import connect_socket
from trio_smc.connecting.listener import Incoming, SmcListener
from trio_smc.streams.rdma_stream import RdmaStream
from trio_smc.streams.socket_options import integer
from trio_smc.streams.stream import byte_view
from trio_smc.streams.tcp_stream import TcpStream

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from trio_smc._stack import Stack
    from trio_smc.config.config import Config
    from trio_smc.streams.stream import SmcStream

__all__ = [
    "DropInFactory",
    "DropInSocket",
    "FindStack",
    "OverSmc",
    "OverTcp",
    "Side",
    "Unconnected",
    "unsupported",
]


# Plain integers, because operations of an IntFlag are slow.
_DONT_WAIT: Final = int(getattr(stdlib_socket, "MSG_DONTWAIT", 0))
_NO_SIGNAL: Final = int(getattr(stdlib_socket, "MSG_NOSIGNAL", 0))
_PEEK: Final = int(stdlib_socket.MSG_PEEK)
_OUT_OF_BAND: Final = int(stdlib_socket.MSG_OOB)
_NOT_FOR_SEND: Final = ~(_NO_SIGNAL | _DONT_WAIT | _OUT_OF_BAND)

_STREAM_ERRORS: Final = (trio.ClosedResourceError, trio.BrokenResourceError)


def _as_socket_error(error: Exception) -> OSError:
    """The OSError of a socket for an error of a stream."""
    if isinstance(error, trio.ClosedResourceError):
        return os_error(errno.EBADF)
    return os_error(getattr(error.__cause__, "errno", None) or errno.ECONNRESET)


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def unsupported() -> NoReturn:
    raise os_error(errno.EOPNOTSUPP)


LOGGER = logging.getLogger("trio_smc")

_NO_PORT_AT_BIND: Final = (
    stdlib_socket.IPPROTO_IP,
    getattr(stdlib_socket, "IP_BIND_ADDRESS_NO_PORT", 24),
)

FindStack = Callable[[], Awaitable["Stack"]]


class DropInSocket(trio.socket.SocketType):
    """A TCP socket whose connection may be SMC-R.

    Calls with data are plain functions that return the coroutine of the side.  If they were
    coroutines themselves, each call would need one more frame.

    Attributes:
      plain: the TCP socket.
    """

    def __init__(
        self,
        plain: trio.socket.SocketType,
        find_stack: FindStack,
        stream: SmcStream | None = None,
        *,
        listening: bool = False,
    ) -> None:
        self.plain = plain
        self._find_stack = find_stack
        self._no_port_at_bind = 0
        self._side: Side = Unconnected(plain, find_stack, listening)
        if stream is not None:
            self._side = _connected_side(plain, stream)

    def __repr__(self) -> str:
        return f"<DropInSocket {self.stream or self.plain!r}>"

    @property
    def stream(self) -> SmcStream | None:
        """The connection, with its `mode` and `fallback`; None before it is established."""
        return self._side.stream

    # --- names and options -------------------------------------------------------------------

    @property
    def _sock(self) -> stdlib_socket.socket:
        # AnyIO reads the raw socket from this attribute.
        return _raw_socket(self.plain)

    @property
    def family(self) -> stdlib_socket.AddressFamily:
        """AF_INET or AF_INET6."""
        return self.plain.family

    @property
    def type(self) -> stdlib_socket.SocketKind:
        """SOCK_STREAM."""
        return stdlib_socket.SOCK_STREAM

    @property
    def proto(self) -> int:
        """The protocol number."""
        return self.plain.proto

    @property
    def did_shutdown_SHUT_WR(self) -> bool:  # noqa: N802 - Trio's name
        """True if `shutdown` has ended sending."""
        return self._side.write_shut

    def fileno(self) -> int:
        """The descriptor of the TCP socket; -1 after `close`.

        The TCP connection ends together with the SMC-R connection, perhaps before the program
        closes its socket.  Then this is the descriptor of a substitute: a socket whose peer has
        closed, so that a selector finds it readable.
        """
        return self._side.fileno()

    def getsockname(self) -> Any:
        """The local address."""
        return self._side.getsockname()

    def getpeername(self) -> Any:
        """The peer's address."""
        return self._side.getpeername()

    def get_inheritable(self) -> bool:
        """As `socket.socket.get_inheritable`."""
        return self.plain.get_inheritable()

    def set_inheritable(self, inheritable: bool) -> None:
        """As `socket.socket.set_inheritable`."""
        self.plain.set_inheritable(inheritable)

    def getsockopt(self, level: int, optname: int, buflen: int | None = None) -> Any:
        """As `SmcStream.getsockopt`."""
        if buflen is None and (level, optname) == _NO_PORT_AT_BIND:
            return self._no_port_at_bind
        return self._side.getsockopt(level, optname, buflen)

    def setsockopt(
        self, level: int, optname: int, value: int | Buffer | None, optlen: int | None = None
    ) -> None:
        """As `SmcStream.setsockopt`."""
        if (level, optname) == _NO_PORT_AT_BIND:
            # Only stored, not set: a client announces its port to processes of this host before it
            # connects, so it must get the port at bind.
            self._no_port_at_bind = int(bool(integer(value)))
        else:
            self._side.setsockopt(level, optname, value, optlen)

    def is_readable(self) -> bool:
        """True if `recv` would return or raise at once."""
        return self._side.is_readable()

    # --- data --------------------------------------------------------------------------------

    def recv(self, buflen: int, flags: int = 0, /) -> Coroutine[Any, Any, bytes]:
        """As `socket.socket.recv`; over SMC-R the only flag with an effect is MSG_PEEK."""
        return self._side.recv(buflen, flags)

    def recv_into(
        self, buffer: Buffer, nbytes: int = 0, flags: int = 0
    ) -> Coroutine[Any, Any, int]:
        """As `socket.socket.recv_into`."""
        return self._side.recv_into(buffer, nbytes, flags)

    def recvfrom(self, bufsize: int, flags: int = 0, /) -> Coroutine[Any, Any, tuple[bytes, Any]]:
        """As `socket.socket.recvfrom` of a connected socket: the address is None."""
        return self._side.recvfrom(bufsize, flags)

    def recvfrom_into(
        self, buffer: Buffer, nbytes: int = 0, flags: int = 0
    ) -> Coroutine[Any, Any, Any]:
        """As `socket.socket.recvfrom_into`."""
        return self._side.recvfrom_into(buffer, nbytes, flags)

    def recvmsg(
        self, bufsize: int, ancbufsize: int = 0, flags: int = 0, /
    ) -> Coroutine[Any, Any, Any]:
        """As `socket.socket.recvmsg`, over SMC-R without ancillary data."""
        return self._side.recvmsg(bufsize, ancbufsize, flags)

    def recvmsg_into(
        self, buffers: Any, ancbufsize: int = 0, flags: int = 0, /
    ) -> Coroutine[Any, Any, Any]:
        """As `socket.socket.recvmsg_into`, over SMC-R without ancillary data."""
        return self._side.recvmsg_into(buffers, ancbufsize, flags)

    def send(self, data: Buffer, flags: int = 0, /) -> Coroutine[Any, Any, int]:
        """As `socket.socket.send`: sends at least one byte, and as many as there is room for."""
        return self._side.send(data, flags)

    def sendto(self, *arguments: Any) -> Coroutine[Any, Any, int]:
        """As `socket.socket.sendto` of a connected socket, where an address is an error."""
        return self._side.sendto(*arguments)

    def sendmsg(
        self, buffers: Any, ancdata: Any = (), flags: int = 0, address: Any = None, /
    ) -> Coroutine[Any, Any, int]:
        """As `socket.socket.sendmsg`, over SMC-R without ancillary data."""
        return self._side.sendmsg(buffers, ancdata, flags, address)

    def wait_writable(self) -> Coroutine[Any, Any, None]:
        """Wait until `send` might send something; `trio.SocketStream` calls this."""
        return self._side.wait_writable()

    def bind_fast_path(self, stream: trio.SocketStream) -> None:
        """Connect the data methods of a `trio.SocketStream` directly to the SMC-R stream."""
        self._side.bind_fast_path(stream)

    # --- connecting and closing --------------------------------------------------------------

    async def bind(self, address: Any) -> None:
        """As `socket.socket.bind`."""
        await self._side.bind(address)

    def listen(self, backlog: int = min(stdlib_socket.SOMAXCONN, 128)) -> None:
        """As `socket.socket.listen`.

        The listener is published at once if `bind` has found a stack, and otherwise as soon as a
        stack is found.
        """
        self._side.listen(backlog)

    async def accept(self) -> tuple[trio.socket.SocketType, Any]:
        """A connection after its handshake, and the peer's address."""
        return await self._side.accept()

    def wrap_stream(self, stream: SmcStream) -> tuple[DropInSocket, Any]:
        """The result of `accept` for a stream: a drop-in socket, and the peer's address."""
        return _accepted(stream, self._find_stack)

    async def hand_out(self, take: Callable[[Incoming], None]) -> NoReturn:
        """Accept connections in a loop.

        ``take`` is called for each connection at once.  It must start a task, which waits for the
        stream and passes it to `wrap_stream`.
        """
        await self._side.hand_out(take)

    async def connect(self, address: Any) -> None:
        """Connect and run the handshake; after a fallback the socket is plain TCP."""
        stream = await self._side.connect(address)
        if stream is not None:
            self._side = _connected_side(self.plain, stream)

    async def connect_to(self, resolved: Any) -> None:
        """Connect a new socket to an address that needs no lookup.

        If this raises, the caller must close the socket.
        """
        stream = await self._side.connect_to(resolved)
        if stream is not None:
            self._side = _connected_side(self.plain, stream)

    def shutdown(self, flag: int) -> None:
        """As `socket.socket.shutdown`."""
        self._side.shutdown(flag)

    def close(self) -> None:
        """Close; data already sent still arrives."""
        self._side.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- descriptors -------------------------------------------------------------------------

    def detach(self) -> int:
        """As `socket.socket.detach`; only for plain TCP."""
        return self._side.detach()

    def dup(self) -> trio.socket.SocketType:
        """As `socket.socket.dup`; only for plain TCP."""
        return self._side.dup()


class Side:
    """The calls of a drop-in socket whose effect depends on its connection.

    This class passes each call to the plain socket, which also raises the right error for a call
    that is not possible in the state.

    Attributes:
      plain: the TCP socket.
      stream: the connection; None before it is established.
    """

    stream: SmcStream | None = None

    def __init__(self, plain: trio.socket.SocketType) -> None:
        self.plain: Any = plain

    @property
    def write_shut(self) -> bool:
        """True if `shutdown` has ended sending."""
        return bool(self.plain.did_shutdown_SHUT_WR)

    def fileno(self) -> int:
        return int(self.plain.fileno())

    def getsockname(self) -> Any:
        return self.plain.getsockname()

    def getpeername(self) -> Any:
        return self.plain.getpeername()

    def getsockopt(self, level: int, optname: int, buflen: int | None) -> Any:
        more = () if buflen is None else (buflen,)
        return self.plain.getsockopt(level, optname, *more)

    def setsockopt(
        self, level: int, optname: int, value: int | Buffer | None, optlen: int | None
    ) -> None:
        more = () if optlen is None else (optlen,)
        self.plain.setsockopt(level, optname, value, *more)

    def is_readable(self) -> bool:
        return bool(self.plain.is_readable())

    def recv(self, buflen: int, flags: int) -> Coroutine[Any, Any, bytes]:
        return self.plain.recv(buflen, flags)  # type: ignore[no-any-return]

    def recv_into(self, buffer: Buffer, nbytes: int, flags: int) -> Coroutine[Any, Any, int]:
        return self.plain.recv_into(buffer, nbytes, flags)  # type: ignore[no-any-return]

    def recvfrom(self, bufsize: int, flags: int) -> Coroutine[Any, Any, tuple[bytes, Any]]:
        return self.plain.recvfrom(bufsize, flags)  # type: ignore[no-any-return]

    def recvfrom_into(self, buffer: Buffer, nbytes: int, flags: int) -> Coroutine[Any, Any, Any]:
        return self.plain.recvfrom_into(buffer, nbytes, flags)  # type: ignore[no-any-return]

    def recvmsg(self, bufsize: int, ancbufsize: int, flags: int) -> Coroutine[Any, Any, Any]:
        return self.plain.recvmsg(bufsize, ancbufsize, flags)  # type: ignore[no-any-return]

    def recvmsg_into(self, buffers: Any, ancbufsize: int, flags: int) -> Coroutine[Any, Any, Any]:
        return self.plain.recvmsg_into(buffers, ancbufsize, flags)  # type: ignore[no-any-return]

    def send(self, data: Buffer, flags: int) -> Coroutine[Any, Any, int]:
        return self.plain.send(data, flags)  # type: ignore[no-any-return]

    def sendto(self, *arguments: Any) -> Coroutine[Any, Any, int]:
        return self.plain.sendto(*arguments)  # type: ignore[no-any-return]

    def sendmsg(
        self, buffers: Any, ancdata: Any, flags: int, address: Any
    ) -> Coroutine[Any, Any, int]:
        return self.plain.sendmsg(buffers, ancdata, flags, address)  # type: ignore[no-any-return]

    def wait_writable(self) -> Coroutine[Any, Any, None]:
        return self.plain.wait_writable()  # type: ignore[no-any-return]

    def bind_fast_path(self, stream: trio.SocketStream) -> None:
        """No-op: ``stream`` keeps the methods of Trio."""

    async def bind(self, address: Any) -> None:
        await self.plain.bind(address)

    def listen(self, backlog: int) -> None:
        self.plain.listen(backlog)

    async def accept(self) -> tuple[trio.socket.SocketType, Any]:
        return await self.plain.accept()  # type: ignore[no-any-return]

    async def hand_out(self, _: Callable[[Incoming], None]) -> NoReturn:
        raise os_error(errno.EINVAL)

    async def connect(self, address: Any) -> SmcStream | None:
        await self.plain.connect(address)
        return None

    async def connect_to(self, resolved: Any) -> SmcStream | None:
        return await self.connect(resolved)

    def shutdown(self, flag: int) -> None:
        self.plain.shutdown(flag)

    def close(self) -> None:
        self.plain.close()

    def detach(self) -> int:
        return int(self.plain.detach())

    def dup(self) -> trio.socket.SocketType:
        return self.plain.dup()  # type: ignore[no-any-return]


class Unconnected(Side):
    """A socket that is new, bound or listening.

    Args:
      find_stack: returns the stack for a connection or listener.
      listening: the plain socket already listens.
    """

    def __init__(
        self, plain: trio.socket.SocketType, find_stack: FindStack, listening: bool
    ) -> None:
        super().__init__(plain)
        self._find_stack = find_stack
        self._listening = listening
        self._stack: Stack | None = None
        self._publishing: trio.Lock | None = None
        self.listener: SmcListener | None = None

    async def bind(self, address: Any) -> None:
        await self.plain.bind(address)
        with suppress(OSError):  # `accept` or `connect` looks again, and raises the error
            self._stack = await self._find_stack()

    def listen(self, backlog: int) -> None:
        stack = self._stack if self.listener is None else None
        if stack is not None and not stack.runtime.closing:
            # The TCP option can be enabled only on a socket that does not listen yet.
            stack.runtime.offer_option(stack.config, self.plain)
        self.plain.listen(backlog)
        self._listening = True
        if stack is not None and not stack.runtime.closing:
            self.listener = SmcListener(stack.runtime, self.plain, _config_of(stack))
            return
        trio.lowlevel.spawn_system_task(self._publish_in_background, context=copy_context())

    async def _publish_in_background(self) -> None:
        try:
            await self._ensure_published()
        except Exception as error:
            # An error in a system task would end the whole run.  `accept` publishes again, and
            # raises the error.
            LOGGER.debug("cannot publish %r: %s", self.plain, error)

    async def _ensure_published(self) -> SmcListener:
        if self.listener is not None:
            return self.listener
        if self._publishing is None:
            self._publishing = trio.Lock()
        async with self._publishing:
            if self.listener is None:
                stack = await self._find_stack()
                if self.plain.fileno() < 0:
                    raise trio.ClosedResourceError("the socket was closed")
                self.listener = SmcListener(stack.runtime, self.plain, _config_of(stack))
        return self.listener

    async def accept(self) -> tuple[trio.socket.SocketType, Any]:
        if not self._listening:
            return await super().accept()
        with _socket_errors():
            stream = await (await self._ensure_published()).accept()
        return _accepted(stream, self._find_stack)

    async def hand_out(self, take: Callable[[Incoming], None]) -> NoReturn:
        with _socket_errors():
            await (await self._ensure_published()).hand_out(take)

    async def connect(self, address: Any) -> SmcStream | None:
        if self._listening:
            return await super().connect(address)
        try:
            resolved = await self.plain._resolve_address_nocp(address, local=False)
            return await self.connect_to(resolved)
        except trio.Cancelled:
            self.close()  # as Trio does, at every point of the call
            raise

    async def connect_to(self, resolved: Any) -> SmcStream:
        stack = await self._find_stack()
        stack.runtime.check_usable()
        raw = _raw_socket(self.plain)
        return await connect_socket(stack.runtime, self.plain, resolved, _config_of(stack), raw)

    def close(self) -> None:
        (self.listener or self.plain).close()

    def detach(self) -> int:
        if self.listener is not None:
            unsupported()
        return super().detach()


class OverTcp(Side):
    """A connection over plain TCP.  Its end goes through the stream, which the stack counts."""

    def __init__(self, plain: trio.socket.SocketType, stream: TcpStream) -> None:
        super().__init__(plain)
        self.stream: TcpStream = stream

    def close(self) -> None:
        self.stream.close()

    def detach(self) -> int:
        self.stream.release_stream()
        return super().detach()


class OverSmc(Side):
    """A connection over SMC-R.  `bind`, `listen` and `accept` raise errors of the plain socket."""

    def __init__(self, plain: trio.socket.SocketType, stream: RdmaStream) -> None:
        super().__init__(plain)
        self.stream: RdmaStream = stream
        self._write_shut = self._closed = False
        self._eof_socket: stdlib_socket.socket | None = None

    @property
    def write_shut(self) -> bool:
        return self._write_shut

    def fileno(self) -> int:
        if self._closed:
            return -1
        number = super().fileno()
        if number >= 0:
            return number
        if self._eof_socket is None:
            self._eof_socket, other = stdlib_socket.socketpair()
            other.close()
        return self._eof_socket.fileno()

    # TCP may end while this socket is open.  Then the stream still has the names.

    def getsockname(self) -> Any:
        return (self.plain if self._closed else self.stream.socket).getsockname()

    def getpeername(self) -> Any:
        return (self.plain if self._closed else self.stream.socket).getpeername()

    def getsockopt(self, level: int, optname: int, buflen: int | None) -> Any:
        return self.stream.getsockopt(level, optname, buflen or 0)

    def setsockopt(
        self, level: int, optname: int, value: int | Buffer | None, optlen: int | None
    ) -> None:
        self.stream.setsockopt(level, optname, value, optlen)

    def is_readable(self) -> bool:
        return self.stream.is_readable()

    async def recv(self, buflen: int, flags: int) -> bytes:
        try:
            if buflen > 0 and not flags:
                return await self.stream.receive_some(buflen)
            return await self._recv(buflen, flags & ~_DONT_WAIT)
        except _STREAM_ERRORS as error:
            raise _as_socket_error(error) from error

    async def _recv(self, buflen: int, flags: int) -> bytes:
        if flags not in (0, _PEEK):
            unsupported()
        if not buflen:
            await trio.lowlevel.checkpoint()
            return b""
        return await (self.stream.peek_some if flags else self.stream.receive_some)(buflen)

    async def recv_into(self, buffer: Buffer, nbytes: int, flags: int) -> int:
        with memoryview(buffer).cast("B") as view:
            wanted = nbytes or len(view)
            if not flags and 0 < wanted <= len(view):
                with view[:wanted] as place:
                    try:
                        return await self.stream.receive_some_into(place)
                    except _STREAM_ERRORS as error:
                        raise _as_socket_error(error) from error
            data = await self.recv(wanted, flags)
            view[: len(data)] = data
        return len(data)

    async def recvfrom(self, bufsize: int, flags: int) -> tuple[bytes, Any]:
        return await self.recv(bufsize, flags), None

    async def recvfrom_into(self, buffer: Buffer, nbytes: int, flags: int) -> Any:
        return await self.recv_into(buffer, nbytes, flags), None

    async def recvmsg(self, bufsize: int, _: int, flags: int) -> Any:
        return await self.recv(bufsize, flags), [], 0, None

    async def recvmsg_into(self, buffers: Any, _: int, flags: int) -> Any:
        views = [memoryview(each).cast("B") for each in buffers]
        data = await self.recv(sum(map(len, views)), flags)
        left = memoryview(data)
        for view in views:
            view[: len(left)] = left[: len(view)]
            left = left[len(view) :]
        return len(data), [], 0, None

    async def send(self, data: Buffer, flags: int) -> int:
        if self._write_shut:
            raise os_error(errno.EPIPE)
        view = byte_view(data, strided=False)
        try:
            if not flags:
                return await self.stream.send_some(view)
            if flags & _NOT_FOR_SEND:
                unsupported()
            if flags & _OUT_OF_BAND:
                await self.stream.send_urgent(view)
                return len(view)
            return await self.stream.send_some(view)
        except _STREAM_ERRORS as error:
            raise _as_socket_error(error) from error

    async def sendto(self, data: Buffer, *flags_and_address: Any) -> int:
        *flags, address = flags_and_address
        if address is not None:
            raise os_error(errno.EISCONN)
        return await self.send(data, *(flags or (0,)))

    async def sendmsg(self, buffers: Any, ancdata: Any, flags: int, address: Any) -> int:
        if list(ancdata):
            unsupported()
        return await self.sendto(b"".join(buffers), flags, address)

    async def wait_writable(self) -> None:
        with _socket_errors():
            await self.stream.wait_send_all_might_not_block()

    def bind_fast_path(self, stream: trio.SocketStream) -> None:
        # Otherwise each error would be translated twice, and each call would make two checks for a
        # second task, and two views.  Closing still goes through the socket.  The methods of this
        # one object are replaced: Trio's class is final, and a wrapper in the class would make all
        # streams of the program slower, also those over TCP.
        target: Any = stream
        target.send_all = self.stream.send_all
        target.receive_some = self.stream.receive_some
        target.wait_send_all_might_not_block = self.stream.wait_send_all_might_not_block
        target.send_eof = self._send_eof

    async def _send_eof(self) -> None:
        await self.stream.send_eof()
        self._write_shut = True

    def shutdown(self, flag: int) -> None:
        if flag == stdlib_socket.SHUT_RDWR:
            self.stream.socket.keep_names()
        if flag != stdlib_socket.SHUT_RD:
            with _socket_errors():
                if flag == stdlib_socket.SHUT_RDWR:
                    self.stream.shut_down_both()
                else:
                    self.stream.shut_down_writing()
            self._write_shut = True
        if flag != stdlib_socket.SHUT_WR:
            self.stream.shut_down_reading()

    def close(self) -> None:
        self._closed = True
        if self._eof_socket is not None:
            self._eof_socket.close()
        self.stream.close()

    def detach(self) -> int:
        unsupported()

    def dup(self) -> trio.socket.SocketType:
        unsupported()


def _connected_side(plain: trio.socket.SocketType, stream: SmcStream) -> Side:
    if isinstance(stream, RdmaStream):
        return OverSmc(plain, stream)
    assert isinstance(stream, TcpStream)
    return OverTcp(plain, stream)


def _accepted(stream: SmcStream, find_stack: FindStack) -> tuple[DropInSocket, Any]:
    sock: Any = stream.socket
    if isinstance(stream, TcpStream):
        name = stream.accepted  # `getpeername` fails if the peer has reset the connection
    else:
        name, sock = sock.getpeername(), sock._sock
    return DropInSocket(sock, find_stack, stream), name


def _raw_socket(plain: Any) -> stdlib_socket.socket:
    return plain._sock  # type: ignore[no-any-return]


@contextmanager
def _socket_errors() -> Iterator[None]:
    """Turn the errors of a stream into those of a socket."""
    try:
        yield
    except _STREAM_ERRORS as error:
        raise _as_socket_error(error) from error


_configs: Final[WeakKeyDictionary[Stack, Config]] = WeakKeyDictionary()


def _config_of(stack: Stack) -> Config:
    """The stack's settings; with amortised checkpoints unless `Config.checkpoints` is set."""
    config = _configs.get(stack)
    if config is None:
        config = stack.config
        if config.checkpoints is None:
            config = replace(config, checkpoints="amortised")
        _configs[stack] = config
    return config


def _is_listening(plain: trio.socket.SocketType) -> bool:
    return bool(plain.getsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_ACCEPTCONN))


# Trio's function, looked up before `enable` replaces it.
_make_plain: Final = trio.socket.from_stdlib_socket
_TCP: Final = {0, stdlib_socket.IPPROTO_TCP}


def _is_tcp(family: int, kind: int, protocol: int) -> bool:
    """True if these are the parameters of a TCP socket."""
    return (
        family in (stdlib_socket.AF_INET, stdlib_socket.AF_INET6)
        and kind & 0xF == stdlib_socket.SOCK_STREAM
        and protocol in _TCP
    )


class DropInFactory(trio.abc.SocketFactory):
    """The factory for `trio.socket.set_custom_socket_factory`.

    Args:
      find_stack: returns the stack for new connections and listeners.
    """

    def __init__(self, find_stack: FindStack) -> None:
        self._find_stack = find_stack

    def socket(
        self, family: int | None = None, type: int | None = None, proto: int | None = None
    ) -> trio.socket.SocketType:
        """Create a drop-in socket for TCP, or a socket of Trio for other protocols."""
        family = stdlib_socket.AF_INET if family is None else family
        type = stdlib_socket.SOCK_STREAM if type is None else type
        proto = 0 if proto is None else proto
        plain = _make_plain(stdlib_socket.socket(family, type, proto))
        return DropInSocket(plain, self._find_stack) if _is_tcp(family, type, proto) else plain

    def wrap(self, sock: stdlib_socket.socket) -> trio.socket.SocketType:
        """As `trio.socket.from_stdlib_socket`, with a drop-in socket for TCP.

        A connected socket stays a plain one: another part of the program runs its handshake.
        """
        plain = _make_plain(sock)
        if not _is_tcp(sock.family, sock.type, sock.proto) or _is_connected(sock):
            return plain
        return DropInSocket(plain, self._find_stack, listening=_is_listening(plain))


def _is_connected(sock: stdlib_socket.socket) -> bool:
    try:
        sock.getpeername()
    except OSError as error:
        return error.errno != errno.ENOTCONN
    return True
