"""The drop-in socket: a `trio.socket.SocketType` whose bytes may travel over SMC-R.

Theory of operation
-------------------
`enable` makes `trio.socket.socket` return a `DropInSocket` for TCP, by way of the socket factory
here.  It starts as the plain socket that it wraps: options, bind and listen go there.  `connect`
runs the handshake of `open_stream` on it, and `accept` hands out what an `SmcListener` accepted;
from then on it has a stream.  While that is plain TCP, it is the plain socket again.  Over SMC-R
bytes go through the stream, and only names and options through the plain socket.

A socket and a stream differ in a few ways, and this takes the socket's side: `send` may send a
part; errors are OSErrors with a number; closing is no coroutine, so it cannot wait for the peer;
after SHUT_RD everything is at its end.  `listen` is no coroutine either, while to publish a
listener takes some; a task of the stack does that, and `accept` waits for it.

Programs written for TCP seldom rely on each call being a full checkpoint, and it costs much of what
a call does: where nobody set `Config.checkpoints` these sockets have amortised ones.

What has no meaning over SMC-R raises OSError (EOPNOTSUPP): ancillary data, a destination address,
`detach` and `dup`.
"""

from __future__ import annotations

import errno
import logging
import os
import socket as stdlib_socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import copy_context
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self, cast
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
    "unsupported",
]


# Plain integers: an operation of an IntFlag costs as much as a copy of 16 KiB.
_DONT_WAIT: Final = int(getattr(stdlib_socket, "MSG_DONTWAIT", 0))
_NO_SIGNAL: Final = int(getattr(stdlib_socket, "MSG_NOSIGNAL", 0))
_PEEK: Final = int(stdlib_socket.MSG_PEEK)
_OUT_OF_BAND: Final = int(stdlib_socket.MSG_OOB)
_NOT_FOR_SEND: Final = ~(_NO_SIGNAL | _DONT_WAIT | _OUT_OF_BAND)

_STREAM_ERRORS: Final = (trio.ClosedResourceError, trio.BrokenResourceError)


def _as_socket_error(error: Exception) -> OSError:
    """An error of a stream as that of a socket."""
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
    """A socket of TCP whose connection may be SMC-R.

    Attributes:
      plain: the TCP socket itself.
      stream: the connection, once it is connected; its `mode` and `fallback` say how.
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
        self._stack: Stack | None = None
        self._listener: SmcListener | None = None
        self._listening = listening
        self._publishing: trio.Lock | None = None
        self._write_shut = self._closed = False
        self._no_port_at_bind = 0
        self._eof_socket: stdlib_socket.socket | None = None
        self.stream: SmcStream | None = None
        self._rdma: RdmaStream | None = None
        self._tcp: TcpStream | None = None
        if stream is not None:
            self._attach_stream(stream)

    def __repr__(self) -> str:
        return f"<DropInSocket {self.stream or self.plain!r}>"

    # --- names and options -------------------------------------------------------------------

    @property
    def _sock(self) -> stdlib_socket.socket:
        # AnyIO looks here for the raw socket.
        plain: Any = self.plain
        return plain._sock  # type: ignore[no-any-return]

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
        """Whether `shutdown` ended this side's sending."""
        return self._write_shut or self.plain.did_shutdown_SHUT_WR

    def fileno(self) -> int:
        """The TCP socket's descriptor; -1 once closed.

        The TCP connection ends with the SMC-R connection, which may be before the program closes
        its socket.  Until then there has to be a descriptor, which shows the end of a stream.
        """
        if self._closed:
            return -1
        number = self.plain.fileno()
        if number >= 0 or self._rdma is None:
            return number
        if self._eof_socket is None:
            self._eof_socket, other = stdlib_socket.socketpair()
            other.close()
        return self._eof_socket.fileno()

    def getsockname(self) -> Any:
        """The local address."""
        return self._name_source.getsockname()

    def getpeername(self) -> Any:
        """The peer's address."""
        return self._name_source.getpeername()

    @property
    def _name_source(self) -> Any:
        """Who knows the names: TCP may be gone while this socket is open."""
        return self.plain if self._rdma is None or self._closed else self._rdma.socket

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
        if self._rdma is not None:
            return self._rdma.getsockopt(level, optname, buflen or 0)
        if buflen is None:
            return self.plain.getsockopt(level, optname)
        return self.plain.getsockopt(level, optname, buflen)

    def setsockopt(
        self, level: int, optname: int, value: int | Buffer | None, optlen: int | None = None
    ) -> None:
        """As `SmcStream.setsockopt`."""
        if self._rdma is not None:
            self._rdma.setsockopt(level, optname, value, optlen)
        elif (level, optname) == _NO_PORT_AT_BIND:
            # Only kept: a client on this host announces its port before it connects.
            self._no_port_at_bind = int(bool(integer(value)))
        else:
            plain: Any = self.plain
            more = () if optlen is None else (optlen,)
            plain.setsockopt(level, optname, value, *more)

    def is_readable(self) -> bool:
        """Whether `recv` would return or raise at once."""
        return self._rdma.is_readable() if self._rdma is not None else self.plain.is_readable()

    # --- data --------------------------------------------------------------------------------

    async def recv(self, buflen: int, flags: int = 0, /) -> bytes:
        """As `socket.socket.recv`; MSG_PEEK is the only flag."""
        rdma = self._rdma
        if rdma is None:
            return await self.plain.recv(buflen, flags)
        try:
            if buflen > 0 and not flags:
                return await rdma.receive_some(buflen)
            return await self._recv(rdma, buflen, flags & ~_DONT_WAIT)
        except _STREAM_ERRORS as error:
            raise _as_socket_error(error) from error

    @staticmethod
    async def _recv(rdma: RdmaStream, buflen: int, flags: int) -> bytes:
        if flags not in (0, _PEEK):
            unsupported()
        if not buflen:
            await trio.lowlevel.checkpoint()
            return b""
        return await (rdma.peek_some(buflen) if flags else rdma.receive_some(buflen))

    async def recv_into(self, buffer: Buffer, nbytes: int = 0, flags: int = 0) -> int:
        """As `socket.socket.recv_into`."""
        if self._rdma is None:
            return await self.plain.recv_into(buffer, nbytes, flags)
        with memoryview(buffer).cast("B") as view:
            wanted = nbytes or len(view)
            if not flags and 0 < wanted <= len(view):
                with view[:wanted] as place:
                    try:
                        return await self._rdma.receive_some_into(place)
                    except _STREAM_ERRORS as error:
                        raise _as_socket_error(error) from error
            data = await self.recv(wanted, flags)
            view[: len(data)] = data
        return len(data)

    async def recvfrom(self, bufsize: int, flags: int = 0, /) -> tuple[bytes, Any]:
        """As `socket.socket.recvfrom`: of a connected socket, without an address."""
        if self._rdma is None:
            return await self.plain.recvfrom(bufsize, flags)
        return await self.recv(bufsize, flags), None

    async def recvfrom_into(self, buffer: Buffer, nbytes: int = 0, flags: int = 0) -> Any:
        """As `socket.socket.recvfrom_into`."""
        if self._rdma is None:
            return await self.plain.recvfrom_into(buffer, nbytes, flags)
        return await self.recv_into(buffer, nbytes, flags), None

    async def recvmsg(self, bufsize: int, ancbufsize: int = 0, flags: int = 0, /) -> Any:
        """As `socket.socket.recvmsg`; there is never any ancillary data."""
        if self._rdma is None:
            return await self.plain.recvmsg(bufsize, ancbufsize, flags)
        return await self.recv(bufsize, flags), [], 0, None

    async def recvmsg_into(self, buffers: Any, ancbufsize: int = 0, flags: int = 0, /) -> Any:
        """As `socket.socket.recvmsg_into`."""
        if self._rdma is None:
            return await self.plain.recvmsg_into(buffers, ancbufsize, flags)
        views = [memoryview(each).cast("B") for each in buffers]
        data = await self.recv(sum(map(len, views)), flags)
        left = memoryview(data)
        for view in views:
            view[: len(left)] = left[: len(view)]
            left = left[len(view) :]
        return len(data), [], 0, None

    async def send(self, data: Buffer, flags: int = 0, /) -> int:
        """As `socket.socket.send`: at least one byte, and as many as there is room for."""
        rdma = self._rdma
        if rdma is None:
            return await self.plain.send(data, flags)
        if self._write_shut:
            raise os_error(errno.EPIPE)
        view = byte_view(data)
        try:
            if not flags:
                return await rdma.send_some(view)
            if flags & _NOT_FOR_SEND:
                unsupported()
            if flags & _OUT_OF_BAND:
                await rdma.send_urgent(view)
                return len(view)
            return await rdma.send_some(view)
        except _STREAM_ERRORS as error:
            raise _as_socket_error(error) from error

    async def sendto(self, *arguments: Any) -> int:
        """As `socket.socket.sendto`; a connected socket takes no destination."""
        if self._rdma is None:
            return await self.plain.sendto(*arguments)
        if arguments[-1] is not None:
            raise os_error(errno.EISCONN)
        return await self.send(*arguments[:-1])

    async def sendmsg(
        self, buffers: Any, ancdata: Any = (), flags: int = 0, address: Any = None, /
    ) -> int:
        """As `socket.socket.sendmsg`, without ancillary data."""
        if self._rdma is None:
            return await self.plain.sendmsg(buffers, ancdata, flags, address)
        if list(ancdata):
            unsupported()
        return await self.sendto(b"".join(buffers), flags, address)

    async def wait_writable(self) -> None:
        """Wait until `send` might send something (`trio.SocketStream` asks)."""
        if self._rdma is None:
            await cast(Any, self.plain).wait_writable()
            return
        try:
            await self._rdma.wait_send_all_might_not_block()
        except _STREAM_ERRORS as error:
            raise _as_socket_error(error) from error

    def bind_fast_path(self, stream: trio.SocketStream) -> None:
        """Let a stream that was made of this socket hand its data calls to the SMC-R stream.

        A `trio.SocketStream` of its own would translate each error twice, and take views and
        locks for what the SMC-R stream does, too.  Closing stays the socket's affair.
        """
        rdma = self._rdma
        if rdma is not None:
            target: Any = stream
            target.send_all = rdma.send_all
            target.receive_some = rdma.receive_some
            target.wait_send_all_might_not_block = rdma.wait_send_all_might_not_block
            target.send_eof = self._send_eof

    async def _send_eof(self) -> None:
        assert self._rdma is not None
        await self._rdma.send_eof()
        self._write_shut = True

    # --- life --------------------------------------------------------------------------------

    async def bind(self, address: Any) -> None:
        """As `socket.socket.bind`."""
        await self.plain.bind(address)
        with suppress(OSError):  # `accept` or `connect` says so
            self._stack = await self._find_stack()

    def listen(self, backlog: int = min(stdlib_socket.SOMAXCONN, 128)) -> None:
        """As `socket.socket.listen`.

        Peers learn of it at once when it was bound before, else as soon as a stack is found.
        """
        stack = self._stack if self._listener is None else None
        if stack is not None and not stack.runtime.closing:
            # Only before it listens can it be asked to answer the TCP option.
            stack.runtime.offer_option(stack.config, self.plain)
        self.plain.listen(backlog)
        self._listening = True
        if stack is not None and not stack.runtime.closing:
            self._listener = SmcListener(stack.runtime, self.plain, _config_of(stack))
            return
        trio.lowlevel.spawn_system_task(self._publish_in_background, context=copy_context())

    async def _publish_in_background(self) -> None:
        try:
            await self._ensure_published()
        except Exception as error:
            # In a system task anything would end the whole run; `accept` meets it again.
            LOGGER.debug("%r is not published: %s", self, error)

    async def _ensure_published(self) -> SmcListener:
        if self._listener is not None:
            return self._listener
        if self._publishing is None:
            self._publishing = trio.Lock()
        async with self._publishing:
            if self._listener is None:
                stack = await self._find_stack()
                if self.plain.fileno() < 0:
                    raise trio.ClosedResourceError("the socket was closed")
                self._listener = SmcListener(stack.runtime, self.plain, _config_of(stack))
        return self._listener

    async def accept(self) -> tuple[trio.socket.SocketType, Any]:
        """A connection whose handshake is done, and the peer's address."""
        if not self._listening:
            return await self.plain.accept()  # which says what is wrong
        try:
            stream = await (await self._ensure_published()).accept()
        except _STREAM_ERRORS as error:
            raise _as_socket_error(error) from error
        return self.wrap_stream(stream)

    def wrap_stream(self, stream: SmcStream) -> tuple[DropInSocket, Any]:
        """As `accept` gives it: the socket of a stream that came here, and the peer's address."""
        sock: Any = stream.socket
        if isinstance(stream, TcpStream):
            name = stream.accepted  # the peer may have reset the connection since
        else:
            name, sock = sock.getpeername(), sock._sock
        return DropInSocket(sock, self._find_stack, stream), name

    async def hand_out(self, take: Callable[[Incoming], None]) -> NoReturn:
        """`accept` for one who goes on accepting: ``take`` is called for each connection at once,
        and starts a task that waits for the stream, which `wrap_stream` makes a socket of."""
        try:
            await (await self._ensure_published()).hand_out(take)
        except _STREAM_ERRORS as error:
            raise _as_socket_error(error) from error

    async def connect(self, address: Any) -> None:
        """Connect and run the handshake; the socket is plain TCP afterwards if it must be."""
        if self.stream is not None or self._listening:
            await self.plain.connect(address)  # which says what is wrong
            return
        try:
            plain: Any = self.plain
            await self.connect_to(await plain._resolve_address_nocp(address, local=False))
        except trio.Cancelled:
            self.close()  # as Trio does, wherever it was cancelled
            raise

    async def connect_to(self, resolved: Any) -> None:
        """`connect` of a new socket, to an address that need not be looked up.

        Whoever calls it closes the socket when it raises.
        """
        stack = await self._find_stack()
        stack.runtime.check_usable()
        config = _config_of(stack)
        self._attach_stream(
            await connect_socket(stack.runtime, self.plain, resolved, config, self._sock)
        )

    def _attach_stream(self, stream: SmcStream) -> None:
        """It is connected."""
        self.stream = stream
        if isinstance(stream, TcpStream):
            self._tcp = stream
            # For speed, the plain socket's own; closing it is counted here.
            target: Any = self
            target.send, target.recv = self.plain.send, self.plain.recv
            target.recv_into = self.plain.recv_into
        elif isinstance(stream, RdmaStream):
            self._rdma = stream

    def shutdown(self, flag: int) -> None:
        """As `socket.socket.shutdown`."""
        if self._rdma is None:
            self.plain.shutdown(flag)
            return
        if flag == stdlib_socket.SHUT_RDWR:
            self._rdma.socket.keep_names()
        if flag != stdlib_socket.SHUT_RD:
            try:
                if flag == stdlib_socket.SHUT_RDWR:
                    self._rdma.shut_down_both()
                else:
                    self._rdma.shut_down_writing()
            except _STREAM_ERRORS as error:
                raise _as_socket_error(error) from error
            self._write_shut = True
        if flag != stdlib_socket.SHUT_WR:
            self._rdma.shut_down_reading()

    def close(self) -> None:
        """Close; what was sent still arrives."""
        self._closed = True
        if self._eof_socket is not None:
            self._eof_socket.close()
        if self._listener is not None:
            self._listener.close()
        elif self._rdma is not None:
            self._rdma.close()
        else:
            (self._tcp or self.plain).close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what makes two of one ---------------------------------------------------------------

    def detach(self) -> int:
        """Give the descriptor away: of plain TCP only."""
        if self._rdma is not None or self._listener is not None:
            unsupported()
        if self._tcp is not None:
            self._tcp.release_stream()
        return self.plain.detach()

    def dup(self) -> trio.socket.SocketType:
        """A second socket for the same connection: of plain TCP only."""
        if self._rdma is not None:
            unsupported()
        return self.plain.dup()


_configs: Final[WeakKeyDictionary[Stack, Config]] = WeakKeyDictionary()


def _config_of(stack: Stack) -> Config:
    """The stack's settings; checkpoints are amortised unless somebody set them."""
    config = _configs.get(stack)
    if config is None:
        config = stack.config
        if config.checkpoints is None:
            config = replace(config, checkpoints="amortised")
        _configs[stack] = config
    return config


def _is_listening(plain: trio.socket.SocketType) -> bool:
    return bool(plain.getsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_ACCEPTCONN))


# Trio's own, taken before `enable` puts another in its place.
_make_plain: Final = trio.socket.from_stdlib_socket
_TCP: Final = {0, stdlib_socket.IPPROTO_TCP}


def _is_tcp(family: int, kind: int, protocol: int) -> bool:
    """Whether such a socket is one of TCP's."""
    return (
        family in (stdlib_socket.AF_INET, stdlib_socket.AF_INET6)
        and kind & 0xF == stdlib_socket.SOCK_STREAM
        and protocol in _TCP
    )


class DropInFactory(trio.abc.SocketFactory):
    """What `trio.socket.set_custom_socket_factory` takes.

    Args:
      find_stack: which stack new connections and listeners use.
    """

    def __init__(self, find_stack: FindStack) -> None:
        self._find_stack = find_stack

    def socket(
        self, family: int | None = None, type: int | None = None, proto: int | None = None
    ) -> trio.socket.SocketType:
        """A new socket: a drop-in socket for TCP, Trio's own for anything else."""
        family = stdlib_socket.AF_INET if family is None else family
        type = stdlib_socket.SOCK_STREAM if type is None else type
        proto = 0 if proto is None else proto
        plain = _make_plain(stdlib_socket.socket(family, type, proto))
        return DropInSocket(plain, self._find_stack) if _is_tcp(family, type, proto) else plain

    def wrap(self, sock: stdlib_socket.socket) -> trio.socket.SocketType:
        """What stands for ``sock`` in Trio: see `trio.socket.from_stdlib_socket`.

        A connected socket stays what it is: its handshake was or is somebody else's.
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
