"""The drop-in socket: a `trio.socket.SocketType` whose connection may be SMC-R.

Theory of operation
-------------------
`enable` installs the socket factory of this module, so that `trio.socket.socket` returns a
`DropInSocket` for TCP.  A drop-in socket wraps a plain socket, and has one of four *sides*, which
do its calls:

- `Unconnected`: the plain socket handles options, bind and listen.  `connect` runs the handshake of
  `open_stream` on the plain socket; `accept` returns a connection that an `SmcListener` accepted.
- `ShutDown`: the program has called `shutdown` on a socket without a connection.  The kernel keeps
  this for the connection, so no handshake is possible on it, and the connection is plain TCP.
- `OverTcp`: all calls go to the plain socket.
- `OverSmc`: data calls go to the stream; only names and options come from the plain socket.

The side changes when a connection is established, and between the first two.  `OverSmc` is
replaced once more, by `Closed`, when the program closes the socket: calls that begin later raise
EBADF, and calls that are under way raise `trio.ClosedResourceError`, as with Trio's sockets.

Where a socket and a stream differ, the drop-in socket behaves as a socket on Linux (recv(2),
send(2), socket(7), tcp(7)): `send` may send a part of the data; errors are OSErrors with a number;
`close` is synchronous, so it cannot wait for the peer; after SHUT_RD the data that has arrived is
still readable, and its end follows.  While a call waits, it holds neither the buffer nor a view of
it, so the program may resize the buffer.  Arguments of rare calls are checked by the standard
library's own methods, called on a closed socket: they raise the same errors as over TCP.

`listen` is synchronous too, but a listener is published asynchronously: a task of the stack
publishes it, and `accept` waits for that task.

Operations without a meaning over SMC-R raise OSError (EOPNOTSUPP), for example `detach` and `dup`.
docs/programs.md lists all differences from TCP.
"""

from __future__ import annotations

import builtins
import errno
import logging
import os
import socket as stdlib_socket
import struct
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from enum import Enum
from functools import lru_cache, partial
from io import BytesIO
from operator import index
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self, TypeVar

import trio

from trio_smc._base.errors import NoStack, SmcUnavailable
from trio_smc._base.interrupts import protect_module
from trio_smc._base.reasons import Fallback, FallbackReason
from trio_smc._base.waits import notify_closing, wait_readable
from trio_smc.connecting.connect import connect_socket, connect_without_smc
from trio_smc.connecting.listener import Incoming, SmcListener, WaitEnded
from trio_smc.host.mapped import PIECE, copies_of, may_fault, store
from trio_smc.host.tcp import CLOSE, tcp_state
from trio_smc.sockets.exposed import NUMBERS, expose, owners_of
from trio_smc.streams.parking import BUSY_DESCRIPTOR
from trio_smc.streams.rdma_stream import SENT_EOF, RdmaStream
from trio_smc.streams.socket_options import integer
from trio_smc.streams.stream import byte_view
from trio_smc.streams.tcp_stream import TcpStream

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Buffer

    from trio_smc._stack import Stack
    from trio_smc.config.config import Config
    from trio_smc.streams.stream import SmcStream

__all__ = [
    "Closed",
    "DropInFactory",
    "DropInSocket",
    "FindStack",
    "OverSmc",
    "OverTcp",
    "Side",
    "Unconnected",
    "find_drop_in",
    "unsupported",
    "wrap",
]


# Plain integers, because operations of an IntFlag are slow.
_PEEK: Final = int(stdlib_socket.MSG_PEEK)
_OUT_OF_BAND: Final = int(stdlib_socket.MSG_OOB)
_DISCARD: Final = int(stdlib_socket.MSG_TRUNC)
_ERROR_QUEUE: Final = int(getattr(stdlib_socket, "MSG_ERRQUEUE", 0))
_CLOSE_ON_EXEC: Final = int(getattr(stdlib_socket, "MSG_CMSG_CLOEXEC", 0))
_MORE: Final = int(getattr(stdlib_socket, "MSG_MORE", 0))
_MOST_BUFFERS: Final = 1024
"""Buffers that one call of sendmsg(2) or recvmsg(2) may have: UIO_MAXIOV of linux/uio.h."""
_MOST_JOINED: Final = 4 << 20
"""Bytes of several buffers that one call sends at most: as many as a ring of the usual size has."""
_FAST_OPEN: Final = int(getattr(stdlib_socket, "MSG_FASTOPEN", 0))
_ZERO_COPY: Final = 0x4000000  # MSG_ZEROCOPY (linux/socket.h); the socket module has no name for it
_SO_ZEROCOPY: Final = 60  # asm-generic/socket.h
# SCM_RIGHTS and SCM_CREDENTIALS (linux/socket.h): TCP ignores both.
_IGNORED_ANCILLARY: Final = frozenset({1, 2})
_SHUTDOWNS: Final = frozenset(
    {stdlib_socket.SHUT_RD, stdlib_socket.SHUT_WR, stdlib_socket.SHUT_RDWR}
)

_LARGE: Final = 1 << 30
"""Bytes: the standard library may lack the memory for as many."""
_NO_FLAGS: Final = 0
"""Flags are compared with it by identity, which is one step, because `None` and `0.0` are wrong
flags, and must reach the check of arguments."""
_LAST_PORT: Final = 0xFFFF
_Result = TypeVar("_Result")
_Value = TypeVar("_Value")
_STREAM_ERRORS: Final = (
    trio.ClosedResourceError,
    trio.BrokenResourceError,
    trio.BusyResourceError,
)


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def unsupported() -> NoReturn:
    raise os_error(errno.EOPNOTSUPP)


LOGGER = logging.getLogger("trio_smc")

_IP: Final = int(stdlib_socket.IPPROTO_IP)
_NO_PORT_AT_BIND: Final = int(getattr(stdlib_socket, "IP_BIND_ADDRESS_NO_PORT", 24))

_DEFER_ACCEPT: Final = (
    stdlib_socket.IPPROTO_TCP,
    getattr(stdlib_socket, "TCP_DEFER_ACCEPT", 9),
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
        self._side: Side
        if stream is None:
            self._side = Unconnected(plain, find_stack, listening)
        else:
            self._connected(stream)

    def __repr__(self) -> str:
        return f"<DropInSocket {self.stream or self.plain!r}>"

    @property
    def stream(self) -> SmcStream | None:
        """The connection, with its `mode` and `fallback`; None before it is established."""
        return self._side.stream

    # --- names and options -------------------------------------------------------------------

    @property
    def _sock(self) -> stdlib_socket.socket:
        # AnyIO reads the raw socket from this attribute, and programs get it there.
        sock = self._side.descriptor_socket()
        if sock.fileno() >= 0:
            expose(sock, self)
        return sock

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
        number = self._side.fileno()
        if number >= 0:
            expose(self._side.descriptor_socket(), self)
        return number

    def getsockname(self) -> Any:
        """The local address."""
        return self._side.getsockname()

    def getpeername(self) -> Any:
        """The peer's address."""
        return self._side.getpeername()

    def get_inheritable(self) -> bool:
        """As `socket.socket.get_inheritable`."""
        return self._side.get_inheritable()

    def set_inheritable(self, inheritable: bool) -> None:
        """As `socket.socket.set_inheritable`."""
        self._side.set_inheritable(inheritable)

    def getsockopt(self, level: int, optname: int, buflen: int | None = None) -> Any:
        """As `SmcStream.getsockopt`."""
        if optname == _NO_PORT_AT_BIND and level == _IP and buflen is None:
            return self._no_port_at_bind
        return self._side.getsockopt(level, optname, buflen)

    def setsockopt(
        self, level: int, optname: int, value: int | Buffer | None, optlen: int | None = None
    ) -> None:
        """As `SmcStream.setsockopt`."""
        if optname == _NO_PORT_AT_BIND and level == _IP:
            # Only stored, not set: a client announces its port to processes of this host before it
            # connects, so it must get the port at bind.
            _check_option(level, optname, value, optlen)
            with suppress(TypeError):
                value = index(value)  # type: ignore[arg-type]
            if isinstance(value, int) or value is None:
                self._no_port_at_bind = int(bool(integer(value)))
            else:  # the kernel takes as few bytes as there are, for this option
                self._no_port_at_bind = int(any(memoryview(value).cast("B")[:4]))
        else:
            self._side.setsockopt(level, optname, value, optlen)

    def is_readable(self) -> bool:
        """True if `recv` would return or raise at once."""
        return self._side.is_readable()

    @property
    def has_own_readiness(self) -> bool:
        """True if the descriptor does not show what arrives."""
        return self._side.has_own_readiness

    # --- data --------------------------------------------------------------------------------

    def recv(self, buflen: int, flags: int = 0, /) -> Coroutine[Any, Any, bytes]:
        """As `socket.socket.recv`, with the flags of recv(2) except MSG_ERRQUEUE."""
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
        """As `socket.socket.sendto` of a connected socket, which ignores the address."""
        return self._side.sendto(*arguments)

    def sendmsg(
        self, buffers: Any, ancdata: Any = (), flags: int = 0, address: Any = None, /
    ) -> Coroutine[Any, Any, int]:
        """As `socket.socket.sendmsg`; ancillary data is checked as TCP does, and not sent."""
        return self._side.sendmsg(buffers, ancdata, flags, address)

    def wait_writable(self) -> Coroutine[Any, Any, None]:
        """Wait until `send` might send something; `trio.SocketStream` calls this."""
        return self._side.wait_writable()

    def wait_readable(self) -> Coroutine[Any, Any, None]:
        """Wait until `recv` would return or raise at once; `trio.lowlevel.wait_readable` calls
        this."""
        return self._side.wait_readable()

    def end_waits(self) -> None:
        """Make waiting calls raise `trio.ClosedResourceError`; `trio.lowlevel.notify_closing` calls
        this.  Later calls work as before."""
        self._side.end_waits()

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

    @property
    def can_hand_out(self) -> bool:
        """True if `hand_out` accepts connections; else only `accept` does."""
        return not isinstance(self._side, ShutDown)

    async def hand_out(self, take: Callable[[Incoming], None]) -> NoReturn:
        """Accept connections in a loop.

        ``take`` is called for each connection at once.  It must start a task, which waits for the
        stream and passes it to `wrap_stream`.
        """
        await self._side.hand_out(take)

    async def connect(self, address: Any) -> None:
        """Connect and run the handshake; after a fallback the socket is plain TCP."""
        side = self._side
        try:
            stream = await side.connect(address)
        except OSError as error:
            if isinstance(side, ShutDown) and side.is_ended_by(error):
                self._side = side.after_failure()
            raise
        except trio.Cancelled:
            self.close()  # as Trio does, at every point of the call, also if it is connected
            raise
        if stream is not None:
            self._connected(stream, has_connected=True)

    async def connect_to(self, resolved: Any) -> None:
        """Connect a new socket to an address that needs no lookup.

        If this raises, the caller must close the socket.
        """
        stream = await self._side.connect_to(resolved)
        if stream is not None:
            self._connected(stream, has_connected=True)

    def _connected(self, stream: SmcStream, *, has_connected: bool = False) -> None:
        if isinstance(stream, RdmaStream):
            self._side = OverSmc(self.plain, stream, has_connected=has_connected)
            return
        assert isinstance(stream, TcpStream)
        side = OverTcp if stream.accepted is None or not _is_reset(stream) else ClientGone
        self._side = side(self.plain, stream)

    def shutdown(self, flag: int) -> None:
        """As `socket.socket.shutdown`."""
        side = self._side
        try:
            side.shutdown(flag)
        except OSError as error:
            if error.errno == errno.ENOTCONN and isinstance(side, Unconnected):
                self._side = ShutDown(side)
            raise
        if isinstance(side, ShutDown) and flag != stdlib_socket.SHUT_WR:
            self._side = side.after_failure()  # this socket no longer listens

    def close(self) -> None:
        """Close; data already sent still arrives, unless SO_LINGER is set with 0 s."""
        side = self._side
        side.close()
        if isinstance(side, OverSmc):
            self._side = Closed(side)

    def __copy__(self) -> Self:
        return self  # copies of Trio's socket share its connection, too

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: builtins.type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # --- descriptors -------------------------------------------------------------------------

    def detach(self) -> int:
        """As `socket.socket.detach`; only for plain TCP."""
        return self._side.detach()

    def dup(self) -> trio.socket.SocketType:
        """As `socket.socket.dup`; only before the connection, and for plain TCP."""
        copy = _raw_socket(self._side.dup())
        return wrap(copy, self._find_stack)


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

    @property
    def has_own_readiness(self) -> bool:
        """True if the descriptor does not show what arrives."""
        return False

    def fileno(self) -> int:
        return self.descriptor_socket().fileno()

    def descriptor_socket(self) -> stdlib_socket.socket:
        """The socket whose descriptor `fileno` returns."""
        return _raw_socket(self.plain)

    def get_inheritable(self) -> bool:
        return bool(self.plain.get_inheritable())

    def set_inheritable(self, inheritable: bool) -> None:
        self.plain.set_inheritable(inheritable)

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
        if optlen is None:
            self.plain.setsockopt(level, optname, value)
        else:
            self.plain.setsockopt(level, optname, value, optlen)

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

    def wait_readable(self) -> Coroutine[Any, Any, None]:
        return wait_readable(self.plain)

    def end_waits(self) -> None:
        notify_closing(self.plain)

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
        self.find_stack = find_stack
        self._listening = listening
        self._stack: Stack | None = None
        self._publishing: trio.Lock | None = None
        self._port_is_stale = False
        self._port_may_be_released = False  # a listening socket was shut down
        self.listener: SmcListener | None = None

    async def bind(self, address: Any) -> None:
        await self.plain.bind(address)
        self._port_is_stale = False
        with suppress(OSError):  # `accept` or `connect` looks again, and raises the error
            self._stack = await self.find_stack()

    def listen(self, backlog: int) -> None:
        self._forget_stopped_listener()
        stack = self._stack if self.listener is None else None
        if stack is not None and not stack.runtime.closing:
            # The TCP option can be enabled only on a socket that does not listen yet.
            stack.runtime.offer_option(stack.config, self.plain)
        self.plain.listen(backlog)
        self._listening = True
        if stack is not None and not stack.runtime.closing:
            self.listener = _listener(stack, self.plain)
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
                stack = await self.find_stack()
                if self.plain.fileno() < 0:
                    raise trio.ClosedResourceError("the socket was closed")
                if not self._listening:
                    raise os_error(errno.EINVAL)  # shut down meanwhile
                self.listener = _listener(stack, self.plain)
        return self.listener

    def getsockopt(self, level: int, optname: int, buflen: int | None) -> Any:
        # The listener has taken this option over from the TCP socket.
        if (level, optname) == _DEFER_ACCEPT and self.listener and self.listener.deferral:
            seconds = self.listener.deferral
            return seconds if buflen is None else struct.pack("=i", seconds)[:buflen]
        return super().getsockopt(level, optname, buflen)

    def setsockopt(
        self, level: int, optname: int, value: int | Buffer | None, optlen: int | None
    ) -> None:
        super().setsockopt(level, optname, value, optlen)
        if (level, optname) == _DEFER_ACCEPT and self.listener is not None:
            self.listener.deferral = 0
            self.listener.take_deferral()

    async def accept(self) -> tuple[trio.socket.SocketType, Any]:
        self._forget_stopped_listener()
        if not self._listening:
            with suppress(OSError):
                # `listen` may have been called by another descriptor of the socket.
                self._listening = _is_listening(self.plain)
        if not self._listening:
            return await super().accept()
        with self._listener_errors():
            listener = await self._find_listener()
            stream = await (self._accept_plain() if listener is None else listener.accept())
        return _accepted(stream, self.find_stack)

    async def _find_listener(self) -> SmcListener | None:
        """The listener; None if there is none for lack of resources, and TCP is allowed."""
        try:
            return await self._ensure_published()
        except NoStack as error:
            if not error.allows_tcp:
                raise
            return None

    async def _accept_plain(self) -> TcpStream:
        plain, address = await self.plain.accept()
        return TcpStream(plain, _OUT_OF_RESOURCES, lambda _: None, accepted=address)

    @property
    def has_own_readiness(self) -> bool:
        return self.listener is not None and not self.listener.has_stopped

    async def wait_readable(self) -> None:
        if self.listener is not None and self.has_own_readiness:
            try:
                await self.listener.wait_readable()
            except WaitEnded as error:
                raise trio.ClosedResourceError(str(error)) from None
        elif (wrapper := self._find_other_wrapper()) is not None:
            await wrapper.wait_readable()
        else:
            await super().wait_readable()

    def end_waits(self) -> None:
        if self.listener is not None:
            self.listener.end_waits()
        elif (wrapper := self._find_other_wrapper()) is not None:
            wrapper.end_waits()
        super().end_waits()

    def _find_other_wrapper(self) -> DropInSocket | None:
        """The wrapper by which the program has accepted or connected, if it has several."""
        return find_drop_in(_raw_socket(self.plain))

    async def hand_out(self, take: Callable[[Incoming], None]) -> NoReturn:
        with self._listener_errors():
            while (listener := await self._find_listener()) is None:
                take(_PlainIncoming(await self._accept_plain()))
            await listener.hand_out(take)

    def _forget_stopped_listener(self) -> None:
        """Let `listen` and `accept` begin again, if a process has shut the socket down."""
        if self.listener is not None and self.listener.has_stopped:
            self._note_shutdown()

    def _note_shutdown(self) -> None:
        self.listener = None
        self._listening = False
        self._port_may_be_released = True

    @contextmanager
    def _listener_errors(self) -> Iterator[None]:
        """Raise the error of a socket that was closed before the call, or of a stack that was left.

        A call during which the socket is closed raises `trio.ClosedResourceError`.
        """
        was_closed = self.plain.fileno() < 0
        try:
            yield
        except WaitEnded as error:
            raise trio.ClosedResourceError(str(error)) from None
        except trio.ClosedResourceError as error:
            if was_closed or self.plain.fileno() >= 0:
                raise os_error(errno.EBADF) from error
            raise

    # MSG_FASTOPEN would connect the plain socket, past SMC-R.  Linux raises the same error if
    # net.ipv4.tcp_fastopen is off, so programs are prepared for it.

    async def sendto(self, *arguments: Any) -> int:
        if len(arguments) == 3 and self._would_connect(arguments[1]):
            unsupported()
        return await super().sendto(*arguments)

    async def sendmsg(self, buffers: Any, ancdata: Any, flags: int, address: Any) -> int:
        # Without an address, and with the sign, which is MSG_CMSG_COMPAT, the kernel raises EINVAL.
        if address is not None and self._would_connect(flags) and index(flags) >= 0:
            unsupported()
        return await super().sendmsg(buffers, ancdata, flags, address)

    def _would_connect(self, flags: int) -> bool:
        try:
            return bool(index(flags) & _FAST_OPEN) and not self._listening
        except Exception:
            return False  # the plain socket raises the error

    async def connect(self, address: Any) -> SmcStream | None:
        if self._listening:
            return await super().connect(address)
        resolved = await self.plain._resolve_address_nocp(address, local=False)
        if not 0 <= resolved[1] <= _LAST_PORT or any(resolved[2:]):
            # Otherwise without this check, which may take a descriptor.
            await _checked_call(partial(_closed_socket(self.plain.family).connect, resolved))
        return await self._connect(resolved, bound=self.is_bound)

    @property
    def is_bound(self) -> bool:
        """True if the program has bound the socket to a port."""
        return not self._port_is_stale and _raw_socket(self.plain).getsockname()[1] != 0

    def note_failure(self, *, bound: bool) -> None:
        """Note an attempt to connect that failed on another side."""
        self._forget_port(_raw_socket(self.plain), bound)

    async def connect_to(self, resolved: Any) -> SmcStream:
        return await self._connect(resolved, bound=False)

    async def _connect(self, resolved: Any, *, bound: bool) -> SmcStream:
        try:
            stack = await self.find_stack()
        except NoStack as error:
            if not error.allows_tcp:
                raise
            await self.plain.connect(resolved)
            return TcpStream(self.plain, _OUT_OF_RESOURCES, lambda _: None)
        stack.runtime.check_usable()
        raw = _raw_socket(self.plain)
        if self._port_may_be_released:
            self._port_may_be_released = False
            self._forget_port(raw, bound)
        try:
            return await connect_socket(
                stack.runtime, self.plain, resolved, stack.config, raw, bound=bound
            )
        except OSError:
            self._forget_port(raw, bound)
            raise

    def _forget_port(self, raw: stdlib_socket.socket, bound: bool) -> None:
        """Clean up after a failed attempt or a shutdown, which leave the socket usable.

        The kernel releases the port, unless the program has chosen its number, but getsockname(2)
        still returns it.
        """
        if not bound:
            self._port_is_stale = True
        elif raw.fileno() >= 0:
            host, _, *scope = raw.getsockname()
            with suppress(OSError):  # EINVAL: the port is not released
                raw.bind((host, 0, *scope))

    def shutdown(self, flag: int) -> None:
        super().shutdown(flag)
        if flag != stdlib_socket.SHUT_WR:
            # A listening socket does not listen any more.  It may do so again, or connect.
            if self.listener is not None:
                self.listener.stop()
            self._note_shutdown()

    def close(self) -> None:
        if self.listener is not None:
            self.listener.close()
        self.plain.close()  # the listener closes only the socket that it was made for

    def detach(self) -> int:
        if self.listener is not None:
            self.listener.stop()
            self.listener = None
        return super().detach()


class ShutDown(Side):
    """A socket that was shut down before it was connected.

    Linux keeps the shutdown for the next connection, and for those that the socket accepts if it
    listens; a failed attempt to connect, or the end of listening, ends it.

    Args:
      unconnected: the side of the socket until now.
    """

    def __init__(self, unconnected: Unconnected) -> None:
        super().__init__(unconnected.plain)
        self._unconnected = unconnected
        self._bound = unconnected.is_bound

    @staticmethod
    def is_ended_by(error: OSError) -> bool:
        """True if this error of `connect` shows that Linux has tried to connect."""
        return (
            not isinstance(error, (SmcUnavailable, stdlib_socket.gaierror))
            and error.errno != errno.EISCONN  # the socket listens
        )

    def after_failure(self) -> Unconnected:
        """The side of the socket when Linux has ended the shutdown."""
        self._unconnected.note_failure(bound=self._bound)
        return self._unconnected

    async def bind(self, address: Any) -> None:
        await super().bind(address)
        self._bound = True

    async def connect(self, address: Any) -> SmcStream | None:
        stack = await self._unconnected.find_stack()
        stack.runtime.check_usable()
        return await connect_without_smc(
            stack.runtime, self.plain, address, stack.config, FallbackReason.ALREADY_SHUT_DOWN
        )

    async def accept(self) -> tuple[trio.socket.SocketType, Any]:
        find_stack = self._unconnected.find_stack
        if (await find_stack()).config.require_smc:
            raise SmcUnavailable(_ALREADY_SHUT_DOWN)
        plain, address = await self.plain.accept()
        stream = TcpStream(plain, _ALREADY_SHUT_DOWN, lambda _: None, accepted=address)
        return _accepted(stream, find_stack)


class OverTcp(Side):
    """A connection over plain TCP.  Its end goes through the stream, which the stack counts."""

    def __init__(self, plain: trio.socket.SocketType, stream: TcpStream) -> None:
        super().__init__(plain)
        self.stream: TcpStream = stream
        # The usual calls, without a function of this module between the socket and Trio's.
        calls: Any = self
        calls.recv, calls.send = plain.recv, plain.send

    def close(self) -> None:
        self.stream.close()

    def detach(self) -> int:
        self.stream.release_stream()
        return super().detach()


class ClientGone(OverTcp):
    """An accepted connection whose client ended in the handshake, and whose kernel has reset it.

    Over TCP, without a handshake, the client's end arrives in order.  So the calls do what they do
    then: reading shows the end, the first send succeeds, and later ones fail with EPIPE.
    """

    def __init__(self, plain: trio.socket.SocketType, stream: TcpStream) -> None:
        super().__init__(plain, stream)
        calls: Any = self
        calls.send = self._send
        self._may_send = True
        self._write_shut = False

    @property
    def write_shut(self) -> bool:
        return self._write_shut

    def getpeername(self) -> Any:
        return self.stream.accepted

    async def _send(self, data: Buffer, flags: int) -> int:
        return await self._drop(lambda: _closed_socket().send(data, flags), [data])

    async def sendto(self, *arguments: Any) -> int:
        return await self._drop(lambda: _closed_socket().sendto(*arguments), arguments[:1])

    async def sendmsg(self, buffers: Any, ancdata: Any, flags: int, address: Any) -> int:
        data = [bytes(each) for each in buffers]
        return await self._drop(
            lambda: _closed_socket().sendmsg(data, ancdata, flags, address), data
        )

    async def _drop(self, check: Callable[[], int], data: Iterable[Buffer]) -> int:
        _checked(check)
        await trio.lowlevel.checkpoint()
        if self.fileno() < 0:
            raise os_error(errno.EBADF)
        if not self._may_send:
            raise os_error(errno.EPIPE)
        size = sum(memoryview(each).nbytes for each in data)
        self._may_send = size == 0
        return size

    def shutdown(self, flag: int) -> None:
        _checked(lambda: _closed_socket().shutdown(flag))
        if self.fileno() < 0:
            raise os_error(errno.EBADF)
        if flag != stdlib_socket.SHUT_RD:
            self._may_send, self._write_shut = False, True


def _is_reset(stream: TcpStream) -> bool:
    """True if the peer has ended in the handshake, and has reset the connection."""
    fallback = stream.fallback
    if fallback is None or fallback.reason is not FallbackReason.ENDED_IN_HANDSHAKE:
        return False
    try:
        return tcp_state(stream.socket) == CLOSE
    except OSError:
        return False


class _ConnectCall(Enum):
    """The state of the call of `connect`.  Its value is the error of another call."""

    PENDING = 0
    """In Linux, the call that follows a connect(2) without a wait completes it."""
    COMPLETE = errno.EISCONN
    ENDED = errno.EINVAL
    """`shutdown` has found an ended connection before that call."""


class OverSmc(Side):
    """A connection over SMC-R.

    Args:
      has_connected: `connect` has made the connection, and not `accept`.
    """

    def __init__(
        self, plain: trio.socket.SocketType, stream: RdmaStream, *, has_connected: bool = False
    ) -> None:
        super().__init__(plain)
        self.stream: RdmaStream = stream
        self._connect_call = _ConnectCall.PENDING if has_connected else _ConnectCall.COMPLETE
        _make_closed_in_advance()
        self._closed = False
        self._eof_socket: stdlib_socket.socket | None = None

    @property
    def write_shut(self) -> bool:
        return self.stream.write_shut

    def descriptor_socket(self) -> stdlib_socket.socket:
        if self.plain.fileno() >= 0:
            return super().descriptor_socket()
        ended = self.stream.socket.ended
        if ended is not None:
            return ended
        if self._eof_socket is None:  # the end of TCP has closed the socket
            self._eof_socket, other = stdlib_socket.socketpair()
            other.close()
        return self._eof_socket

    @property
    def has_own_readiness(self) -> bool:
        # Otherwise the program has closed the TCP socket itself, and gets the kernel's error.
        return self.plain.fileno() >= 0 or self.stream.has_ended

    # TCP may end while this socket is open.  Then `fileno` has a substitute, and the stream still
    # has the names.

    def get_inheritable(self) -> bool:
        return os.get_inheritable(self.fileno())

    def set_inheritable(self, inheritable: bool) -> None:
        os.set_inheritable(self.fileno(), inheritable)

    def getsockname(self) -> Any:
        return self.stream.socket.getsockname()

    def getpeername(self) -> Any:
        if self.stream.has_ended:
            raise os_error(errno.ENOTCONN)
        return self.stream.socket.getpeername()

    def getsockopt(self, level: int, optname: int, buflen: int | None) -> Any:
        more = () if buflen is None else (buflen,)
        _checked(partial(_closed_socket().getsockopt, level, optname, *more))
        return self.stream.getsockopt(index(level), index(optname), index(buflen or 0))

    def setsockopt(
        self, level: int, optname: int, value: int | Buffer | None, optlen: int | None
    ) -> None:
        _check_option(level, optname, value, optlen)
        with suppress(TypeError):
            value = index(value)  # type: ignore[arg-type]
        self.stream.setsockopt(index(level), index(optname), value, optlen)

    def is_readable(self) -> bool:
        return self.stream.is_readable()

    # --- receiving ---------------------------------------------------------------------------

    async def recv(self, buflen: int, flags: int) -> bytes:
        if type(buflen) is int and 0 < buflen < _LARGE and flags is _NO_FLAGS:
            try:
                return await self.stream.receive_some(buflen)
            except trio.BusyResourceError:
                pass  # an error only if this call has to wait, too
            except _STREAM_ERRORS as error:
                self._raise_socket_error(error)
        checked = await _checked_call(partial(_closed_socket().recv, buflen, flags))
        if checked is not None:
            await trio.lowlevel.checkpoint()
            return checked  # as the standard library: 0 bytes were requested
        flags = index(flags)
        return await self._receive(partial(self._take, index(buflen), flags), flags)

    async def recv_into(self, buffer: Buffer, nbytes: int, flags: int) -> int:
        if type(nbytes) is not int or type(flags) is not int:
            await _checked_call(partial(_closed_socket().recv_into, buffer, nbytes, flags))
            nbytes, flags = index(nbytes), index(flags)

        def take() -> int | None:
            # In each turn, because the program may change the buffer while the call waits.
            if _checked(partial(_closed_socket().recv_into, buffer, nbytes, flags)) is not None:
                return 0  # no room in the buffer
            return self._take_into([buffer], nbytes or memoryview(buffer).nbytes, flags)

        return await self._receive(take, flags)

    async def recvfrom(self, bufsize: int, flags: int) -> tuple[bytes, Any]:
        await _checked_call(partial(_closed_socket().recvfrom, bufsize, flags))
        flags = index(flags)
        return await self._receive(partial(self._take, index(bufsize), flags), flags), None

    async def recvfrom_into(self, buffer: Buffer, nbytes: int, flags: int) -> Any:
        if type(nbytes) is not int or type(flags) is not int:
            await _checked_call(partial(_closed_socket().recvfrom_into, buffer, nbytes, flags))
            nbytes, flags = index(nbytes), index(flags)

        def take() -> int | None:
            _checked(partial(_closed_socket().recvfrom_into, buffer, nbytes, flags))
            return self._take_into([buffer], nbytes or memoryview(buffer).nbytes, flags)

        return await self._receive(take, flags), None

    async def recvmsg(self, bufsize: int, ancbufsize: int, flags: int) -> Any:
        await _checked_call(partial(_closed_socket().recvmsg, bufsize, ancbufsize, flags))
        bufsize, flags = index(bufsize), index(flags)
        data = await self._receive(partial(self._take, bufsize, flags), flags)
        return data, [], _returned_flags(flags, bufsize), None

    async def recvmsg_into(self, buffers: Any, ancbufsize: int, flags: int) -> Any:
        check = _closed_socket().recvmsg_into
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            kept = _listed(buffers, partial(check, buffers, ancbufsize, flags))
            _checked(partial(check, kept, ancbufsize, flags))
        except Exception:
            await trio.lowlevel.cancel_shielded_checkpoint()
            raise
        flags = index(flags)
        room = 0

        def take() -> int | None:
            nonlocal room
            _checked(partial(check, kept, ancbufsize, flags))
            if len(kept) > _MOST_BUFFERS:
                raise os_error(errno.EMSGSIZE)
            room = sum(memoryview(each).nbytes for each in kept)
            return self._take_into(kept, room, flags)

        count = await self._receive(take, flags)
        return count, [], _returned_flags(flags, room), None

    def _take_into(self, buffers: Sequence[Buffer], most: int, flags: int) -> int | None:
        """Take at most ``most`` bytes into buffers, or discard them; None if the call has to wait.

        Raises:
          OSError: EFAULT: the memory of a buffer is not there.  The bytes can be received again.
        """
        peeks = not flags & (_DISCARD | _PEEK) and any(map(may_fault, buffers))
        data = self._take(most, flags | _PEEK if peeks else flags)
        if data and not flags & _DISCARD:
            _store(data, buffers)
            if peeks:
                self._take(len(data), flags)
        return None if data is None else len(data)

    def _take(self, most: int, flags: int) -> bytes | None:
        """Take at most ``most`` bytes; None if the call has to wait."""
        stream = self.stream
        if flags & _OUT_OF_BAND:
            byte = stream.try_receive_urgent(peek=bool(flags & _PEEK))
            return None if byte is None else byte[:most]
        if not most:
            data = stream.try_receive(1, peek=True)  # an error is reported, as by Linux
            return None if data is None else b""
        if flags & _DISCARD:
            count = stream.try_discard(most, peek=bool(flags & _PEEK))
            return None if count is None else bytes(count)
        return stream.try_receive(most, peek=bool(flags & _PEEK))

    async def _receive(self, take: Callable[[], _Result | None], flags: int) -> _Result:
        if flags & _ERROR_QUEUE:
            raise os_error(errno.EINVAL)  # as Linux over AF_SMC: there is no error queue
        try:
            return await self.stream.receive_by(take, urgent=bool(flags & _OUT_OF_BAND))
        except _STREAM_ERRORS as error:
            self._raise_socket_error(error)

    # --- sending -----------------------------------------------------------------------------

    async def send(self, data: Buffer, flags: int) -> int:
        if type(data) is not bytes and may_fault(data):
            await trio.lowlevel.checkpoint_if_cancelled()
            data = _joined([data], sys.maxsize if flags & _OUT_OF_BAND else PIECE)
        try:
            if flags is _NO_FLAGS:
                try:
                    return await self.stream.send_some(data)
                except (TypeError, ValueError, BufferError):
                    _checked(partial(_closed_socket().send, data))  # with the right text
                    raise
            await _checked_call(partial(_closed_socket().send, data, flags))
            flags = index(flags)
            if flags & _FAST_OPEN:
                self._complete_connect_call()
            if flags & _ZERO_COPY and self.getsockopt(stdlib_socket.SOL_SOCKET, _SO_ZEROCOPY, None):
                unsupported()  # the program would wait for a completion from the error queue
            if flags & _OUT_OF_BAND and memoryview(data).nbytes:
                view = byte_view(data)
                await self.stream.send_urgent(view)
                return len(view)
            return await self.stream.send_some(data, more=bool(flags & _MORE))
        except _STREAM_ERRORS as error:
            self._raise_socket_error(error, sending=True)

    async def sendto(self, *arguments: Any) -> int:
        # TCP ignores the address of a connected socket, after the checks of Trio and of the
        # standard library.
        sent, address = arguments[:-1], await self._resolve(arguments[-1])
        checks = _closed_socket(self.plain.family)
        await _checked_call(partial(checks.sendto, *sent, address))
        return await self.send(sent[0], sent[1] if len(sent) > 1 else 0)

    async def sendmsg(self, buffers: Any, ancdata: Any, flags: int, address: Any) -> int:
        if address is not None:
            address = await self._resolve(address)
        await trio.lowlevel.checkpoint_if_cancelled()
        check = _closed_socket(self.plain.family).sendmsg
        try:
            buffers = _listed(buffers, partial(check, buffers, ancdata, flags, address))
            ancdata = _listed(ancdata, partial(check, buffers, ancdata, flags, address))
            _checked(partial(check, buffers, ancdata, flags, address))
        except Exception:
            await trio.lowlevel.cancel_shielded_checkpoint()
            raise
        flags = index(flags)
        if len(buffers) > _MOST_BUFFERS:
            raise os_error(errno.EMSGSIZE)
        for level, kind, _ in () if self.stream.write_shut else ancdata:
            # Linux's TCP ignores other levels.  Its few settings of this level, for one packet,
            # have no meaning here (docs/programs.md).
            if level == stdlib_socket.SOL_SOCKET and kind not in _IGNORED_ANCILLARY:
                raise os_error(errno.EINVAL)
        if len(buffers) == 1:
            return await self.send(buffers[0], flags)
        # The last of all bytes is the urgent one.
        most = sys.maxsize if flags & _OUT_OF_BAND else _MOST_JOINED
        return await self.send(_joined(buffers, most), flags)

    # --- waiting -----------------------------------------------------------------------------

    async def wait_writable(self) -> None:
        with self._socket_errors():
            await self.stream.wait_writable()

    async def wait_readable(self) -> None:
        stream = self.stream
        with self._socket_errors():
            await stream.receive_by(lambda: stream.is_readable() or None)

    def end_waits(self) -> None:
        self.stream.end_waits()
        notify_closing(self.plain)

    def _raise_socket_error(self, error: Exception, *, sending: bool = False) -> NoReturn:
        """Raise the error of a socket for an error of a stream."""
        if isinstance(error, trio.BusyResourceError):
            raise trio.BusyResourceError(BUSY_DESCRIPTOR) from None
        if not isinstance(error, trio.ClosedResourceError):
            number = getattr(error.__cause__, "errno", None) or errno.ECONNRESET
        elif sending and self._closed and error.args == (SENT_EOF,):
            number = errno.EPIPE  # another task has closed the socket since
        elif sending and self.stream.write_shut and not self._closed:
            # Linux reports an error that is pending first.
            pending = self.getsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_ERROR, None)
            number = pending or errno.EPIPE
        elif self.stream.is_abandoned and not self._closed:
            number = errno.EBADF  # the stack was left
        else:
            raise error  # another task has closed the socket, or has called `end_waits`
        raise os_error(number) from error

    @contextmanager
    def _socket_errors(self) -> Iterator[None]:
        """Turn the errors of a stream into those of a socket."""
        try:
            yield
        except _STREAM_ERRORS as error:
            self._raise_socket_error(error)

    def bind_fast_path(self, stream: trio.SocketStream) -> None:
        # Otherwise each error would be translated twice, and each call would make two checks for a
        # second task, and two views.  Closing still goes through the socket.  The methods of this
        # one object are replaced: Trio's class is final, and a wrapper in the class would make all
        # streams of the program slower, also those over TCP.
        target: Any = stream
        target.send_all = self.stream.send_all
        target.receive_some = self.stream.receive_some
        target.wait_send_all_might_not_block = self.stream.wait_send_all_might_not_block
        target.send_eof = self.stream.send_eof

    # --- calls for a socket that is not connected --------------------------------------------
    # The kernel's errors for them, also after TCP has ended.

    async def connect(self, address: Any) -> SmcStream | None:
        address = await self._resolve(address)
        await trio.lowlevel.checkpoint()
        _checked(partial(_closed_socket(self.plain.family).connect, address))
        self._complete_connect_call()
        return None

    def _complete_connect_call(self) -> None:
        """Do what connect(2) does on a connected socket."""
        if self._connect_call is _ConnectCall.PENDING and self.stream.write_shut:
            self._connect_call = _ConnectCall.COMPLETE  # `send_eof` of the stream has completed it
        if self._connect_call is not _ConnectCall.PENDING:
            raise os_error(self._connect_call.value)
        self._connect_call = _ConnectCall.COMPLETE
        if self.stream.has_ended:
            pending = self.getsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_ERROR, None)
            raise os_error(pending or errno.ECONNABORTED)

    async def bind(self, address: Any) -> None:
        address = await self._resolve(address, local=True)
        await trio.lowlevel.checkpoint()
        _checked(partial(_closed_socket(self.plain.family).bind, address))
        raise os_error(errno.EINVAL)

    async def accept(self) -> tuple[trio.socket.SocketType, Any]:
        await trio.lowlevel.checkpoint()
        raise os_error(errno.EINVAL)

    def listen(self, backlog: int) -> None:
        _checked(partial(_closed_socket().listen, backlog))
        raise os_error(errno.EINVAL)

    async def _resolve(self, address: Any, *, local: bool = False) -> Any:
        if self.plain.fileno() >= 0:
            return await self.plain._resolve_address_nocp(address, local=local)
        fresh: Any
        with _make_plain(stdlib_socket.socket(self.plain.family)) as fresh:  # TCP has ended
            return await fresh._resolve_address_nocp(address, local=local)

    # --- ending ------------------------------------------------------------------------------

    def shutdown(self, flag: int) -> None:
        _checked(partial(_closed_socket().shutdown, flag))
        flag = index(flag)
        if flag not in _SHUTDOWNS:
            raise os_error(errno.EINVAL)
        pending = self._connect_call is _ConnectCall.PENDING
        if self.stream.has_ended:
            if pending:
                self._connect_call = _ConnectCall.ENDED
            raise os_error(errno.ENOTCONN)
        if pending:
            self._connect_call = _ConnectCall.COMPLETE
        if flag != stdlib_socket.SHUT_RD:
            with self._socket_errors():
                if flag == stdlib_socket.SHUT_RDWR:
                    self.stream.shut_down_both()
                else:
                    self.stream.shut_down_writing()
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


class _PlainIncoming:
    """A connection that was accepted without a listener, and uses plain TCP (`Incoming`)."""

    __slots__ = ("_stream",)

    def __init__(self, stream: TcpStream) -> None:
        self._stream = stream

    async def stream(self) -> TcpStream:
        """The stream."""
        return self._stream

    async def spin_for_next(self) -> None:
        """No-op."""


class Closed(Side):
    """After the close of a connection over SMC-R: every call raises EBADF.

    TCP may still be open, because it ends after the SMC-R connection.
    """

    def __init__(self, before: OverSmc) -> None:
        super().__init__(_make_closed(_family_of(_raw_socket(before.plain))))
        self.stream: RdmaStream = before.stream

    @property
    def has_own_readiness(self) -> bool:
        return True

    @property
    def write_shut(self) -> bool:
        return self.stream.write_shut

    def close(self) -> None:
        """No-op."""


def _accepted(stream: SmcStream, find_stack: FindStack) -> tuple[DropInSocket, Any]:
    sock: Any = stream.socket
    # Not `getpeername`, which fails if the peer has reset the connection.
    if isinstance(stream, RdmaStream):
        return DropInSocket(sock._sock, find_stack, stream), sock._peer
    assert isinstance(stream, TcpStream)
    return DropInSocket(sock, find_stack, stream), stream.accepted


def _raw_socket(plain: Any) -> stdlib_socket.socket:
    return plain._sock  # type: ignore[no-any-return]


def _listener(stack: Stack, plain: trio.socket.SocketType) -> SmcListener:
    """The listener of a socket; another process may have the socket, too, and accept.

    A client on another host has to be answered in time, whatever the program does.
    """
    runtime = stack.runtime
    for known in runtime.listeners:
        if isinstance(known, SmcListener):
            # The program may wrap one socket of the standard library again and again.
            if known.is_for(plain):
                return known
            known.end_if_replaced(plain)
    remote = any(rnic.kind == "roce" for rnic in runtime.rnic_set.opened)
    return SmcListener(runtime, plain, stack.config, accept_on_demand=not remote, of_program=True)


def _is_listening(plain: trio.socket.SocketType) -> bool:
    return bool(plain.getsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_ACCEPTCONN))


# The number: the enumeration takes longer than the rest of `Closed`.
_family_of: Final[Callable[[stdlib_socket.socket], int]] = stdlib_socket.SocketType.family.__get__

# Trio's function, looked up before `enable` replaces it.
_make_plain: Final = trio.socket.from_stdlib_socket


@lru_cache
def _make_closed(family: int) -> trio.socket.SocketType:
    """A socket of Trio that is closed: all its calls raise the right error.

    ``family``: a plain integer, because the cache counts an enumeration as another key.
    """
    plain = _make_plain(stdlib_socket.socket(family, stdlib_socket.SOCK_STREAM))
    plain.close()
    return plain


@lru_cache
def _make_closed_in_advance() -> None:
    """Make the closed sockets of both families at the first connection over SMC-R.

    A process without a free descriptor can close and read its TCP sockets, so it must be able to
    close and read drop-in sockets, too.
    """
    for family in (stdlib_socket.AF_INET, stdlib_socket.AF_INET6):
        with suppress(OSError):  # a system without IPv6 has no sockets of this family
            _make_closed(int(family))


def _closed_socket(family: int = stdlib_socket.AF_INET) -> stdlib_socket.socket:
    """A closed socket, whose methods only check their arguments."""
    return _raw_socket(_make_closed(int(family)))


async def _checked_call(call: Callable[[], _Result]) -> _Result | None:
    """`_checked` for a call of Trio's socket, which looks for a cancellation first."""
    await trio.lowlevel.checkpoint_if_cancelled()
    try:
        return _checked(call)
    except Exception:
        await trio.lowlevel.cancel_shielded_checkpoint()
        raise


def _checked(call: Callable[[], _Result]) -> _Result | None:
    """Check arguments by ``call``, a method of `_closed_socket`.

    Returns:
      None if the arguments are valid; a result if the call needs no connection.

    Raises:
      ValueError, TypeError, OverflowError, BufferError: as from the standard library.
    """
    try:
        return call()
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        return None


def _check_option(level: int, optname: int, value: int | Buffer | None, optlen: int | None) -> None:
    """Check the arguments of setsockopt as Trio and the standard library do."""
    checks: Any = _make_closed(stdlib_socket.AF_INET)
    _checked(partial(checks.setsockopt, level, optname, value, optlen))


def _listed(values: Iterable[_Value], check: Callable[[], object]) -> list[_Value]:
    """The list of an argument, which may be an iterator; ``check`` raises if it is not iterable."""
    try:
        iterator = iter(values)
    except TypeError:
        check()
        raise
    return list(iterator)


def _store(data: bytes, buffers: Sequence[Buffer]) -> None:
    """Copy ``data`` into buffers of any format, which have room for it.

    Raises:
      OSError: EFAULT: the memory of a buffer is not there.
    """
    source = BytesIO(data)
    for buffer in buffers:
        if may_fault(buffer):
            with memoryview(buffer) as view:
                store(source.read(view.nbytes), view)
        else:
            source.readinto(buffer)


def _joined(buffers: Sequence[Buffer], most: int) -> bytes:
    """The first ``most`` bytes of buffers, or those before memory that is not there.

    Raises:
      OSError: EFAULT: the memory of the first bytes is not there.
    """
    joined = bytearray()
    for buffer in buffers:
        with byte_view(buffer, strided=False) as view, view[: most - len(joined)] as piece:
            if not may_fault(piece):
                joined += piece
                continue
            try:
                for copied in copies_of(piece):
                    joined += copied
            except OSError:
                if joined:
                    break
                raise
    return bytes(joined)


def _returned_flags(flags: int, room: int) -> int:
    """The flags that recvmsg(2) returns."""
    returned = flags & _CLOSE_ON_EXEC
    if flags & _OUT_OF_BAND:
        returned |= _OUT_OF_BAND | (0 if room else _DISCARD)
    return returned


def find_drop_in(waitable: Any) -> DropInSocket | None:
    """The drop-in socket to wait for, if a program names ``waitable``; None: the kernel's wait.

    A program names it by the drop-in socket itself, by the socket of the standard library below it,
    or by the number of the descriptor.
    """
    if isinstance(waitable, int):
        number = waitable
    elif type(waitable) is DropInSocket:  # `isinstance` takes longer
        return waitable
    else:
        try:
            number = waitable.fileno()
        except Exception:
            return None  # Trio's function raises it again
    if number not in NUMBERS and number != -1:
        return None  # each wait for another file comes here
    for owner in owners_of(waitable, number):
        if owner.has_own_readiness:
            return owner  # type: ignore[no-any-return]
    return None


_TCP: Final = {0, stdlib_socket.IPPROTO_TCP}
_MPTCP: Final = getattr(stdlib_socket, "IPPROTO_MPTCP", 262)


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
      find_config: returns the settings for new sockets.
    """

    def __init__(self, find_stack: FindStack, find_config: Callable[[], Config]) -> None:
        self._find_stack = find_stack
        self._find_config = find_config

    def socket(
        self,
        family: int | None = stdlib_socket.AF_INET,
        type: int | None = stdlib_socket.SOCK_STREAM,
        proto: int | None = 0,
    ) -> trio.socket.SocketType:
        """Create a drop-in socket for TCP, or a socket of Trio for other protocols.

        Raises:
          SmcUnavailable: the protocol is MPTCP, and `Config.require_smc` is set.
        """
        if proto == _MPTCP and self._find_config().require_smc:
            raise SmcUnavailable(_MULTIPATH)
        # None is wrong here, as for Trio, which always passes all three.
        raw = stdlib_socket.socket(family, type, proto)  # type: ignore[arg-type]
        plain = _make_plain(raw)
        if _is_tcp(raw.family, raw.type, raw.proto):
            return DropInSocket(plain, self._find_stack)
        return plain

    def wrap(self, sock: stdlib_socket.socket) -> trio.socket.SocketType:
        """As `trio.socket.from_stdlib_socket`, with a drop-in socket for TCP.

        A socket that is connected already stays on TCP: its peer expects no handshake any more.

        Raises:
          SmcUnavailable: `Config.require_smc` is set, and the socket is connected or MPTCP.
          TypeError: ``sock`` is no socket of the standard library.
        """
        # Trio refuses an object of any other class.
        if type(sock) is stdlib_socket.socket and self._find_config().require_smc:
            if sock.proto == _MPTCP:
                raise SmcUnavailable(_MULTIPATH)
            if _is_tcp(sock.family, sock.type, sock.proto) and _is_connected(sock):
                raise SmcUnavailable(_ALREADY_CONNECTED)
        return wrap(sock, self._find_stack)


_ALREADY_SHUT_DOWN: Final = Fallback.local(FallbackReason.ALREADY_SHUT_DOWN)
_OUT_OF_RESOURCES: Final = Fallback.local(FallbackReason.OUT_OF_RESOURCES)
_ALREADY_CONNECTED: Final = Fallback.local(FallbackReason.ALREADY_CONNECTED)
_MULTIPATH: Final = Fallback.local(FallbackReason.MULTIPATH)


def wrap(sock: stdlib_socket.socket, find_stack: FindStack) -> trio.socket.SocketType:
    """A drop-in socket for a TCP socket of the standard library; else a socket of Trio."""
    plain = _make_plain(sock)
    if not _is_tcp(sock.family, sock.type, sock.proto):
        return plain
    if not _is_connected(sock):
        wrapped = DropInSocket(plain, find_stack, listening=_is_listening(plain))
    else:
        stream = TcpStream(plain, _ALREADY_CONNECTED, lambda _: None)
        wrapped = DropInSocket(plain, find_stack, stream)
    expose(sock, wrapped)
    return wrapped


def _is_connected(sock: stdlib_socket.socket) -> bool:
    try:
        sock.getpeername()
    except OSError as error:
        return error.errno != errno.ENOTCONN
    return True


protect_module(globals())
