"""The drop-in socket: a `trio.socket.SocketType` whose connection may be SMC-R.

Theory of operation
-------------------
`enable` installs the socket factory of this module, so that `trio.socket.socket` returns a
`DropInSocket` for TCP.  A drop-in socket wraps a plain socket, which handles options, bind and
listen.  `connect` runs the handshake of `open_stream` on the plain socket; `accept` returns a
connection that an `SmcListener` accepted.  From then on the drop-in socket has a stream.  If the
stream is plain TCP, all calls go to the plain socket.  Over SMC-R, data calls go to the stream, and
only names and options come from the plain socket.

Where a socket and a stream differ, the drop-in socket behaves as a socket: `send` may send a part
of the data; errors are OSErrors with a number; `close` is synchronous, so it cannot wait for the
peer; after SHUT_RD every read is at the end of the stream.  `listen` is synchronous too, but a
listener is published asynchronously: a task of the stack publishes it, and `accept` waits for that
task.

Programs for TCP seldom need a full checkpoint in every call, and a checkpoint takes a large part of
the time of a call.  So these sockets have amortised checkpoints unless `Config.checkpoints` is set.

Operations without a meaning over SMC-R raise OSError (EOPNOTSUPP): ancillary data, a destination
address, `detach` and `dup`.
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

    Attributes:
      plain: the TCP socket.
      stream: the connection, with its `mode` and `fallback`; None before it is established.
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
        # AnyIO takes the raw socket from this attribute.
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
        """True if `shutdown` has ended sending."""
        return self._write_shut or self.plain.did_shutdown_SHUT_WR

    def fileno(self) -> int:
        """The descriptor of the TCP socket; -1 after `close`.

        The TCP connection ends together with the SMC-R connection, maybe before the program closes
        its socket.  Then this is the descriptor of a substitute, a socket at the end of its stream.
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
        """The object with the names: TCP may end while this socket is open."""
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
            # Only stored: a client on this host needs its port before it connects, to announce it.
            self._no_port_at_bind = int(bool(integer(value)))
        else:
            plain: Any = self.plain
            more = () if optlen is None else (optlen,)
            plain.setsockopt(level, optname, value, *more)

    def is_readable(self) -> bool:
        """True if `recv` would return or raise at once."""
        return self._rdma.is_readable() if self._rdma is not None else self.plain.is_readable()

    # --- data --------------------------------------------------------------------------------

    async def recv(self, buflen: int, flags: int = 0, /) -> bytes:
        """As `socket.socket.recv`; the only flag with an effect is MSG_PEEK."""
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
        """As `socket.socket.recvfrom` of a connected socket: the address is None."""
        if self._rdma is None:
            return await self.plain.recvfrom(bufsize, flags)
        return await self.recv(bufsize, flags), None

    async def recvfrom_into(self, buffer: Buffer, nbytes: int = 0, flags: int = 0) -> Any:
        """As `socket.socket.recvfrom_into`."""
        if self._rdma is None:
            return await self.plain.recvfrom_into(buffer, nbytes, flags)
        return await self.recv_into(buffer, nbytes, flags), None

    async def recvmsg(self, bufsize: int, ancbufsize: int = 0, flags: int = 0, /) -> Any:
        """As `socket.socket.recvmsg`, without ancillary data."""
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
        """As `socket.socket.send`: sends at least one byte, and as many as there is room for."""
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
        """As `socket.socket.sendto` of a connected socket: an address is an error."""
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
        """Wait until `send` might send something; `trio.SocketStream` calls this."""
        if self._rdma is None:
            await cast(Any, self.plain).wait_writable()
            return
        try:
            await self._rdma.wait_send_all_might_not_block()
        except _STREAM_ERRORS as error:
            raise _as_socket_error(error) from error

    def bind_fast_path(self, stream: trio.SocketStream) -> None:
        """Connect the data methods of a `trio.SocketStream` directly to the SMC-R stream.

        Without this each error would be translated twice, and each call would take its locks and
        views twice.  Closing still goes through the socket.
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

    # --- connecting and closing --------------------------------------------------------------

    async def bind(self, address: Any) -> None:
        """As `socket.socket.bind`."""
        await self.plain.bind(address)
        with suppress(OSError):  # `accept` or `connect` raises it again
            self._stack = await self._find_stack()

    def listen(self, backlog: int = min(stdlib_socket.SOMAXCONN, 128)) -> None:
        """As `socket.socket.listen`.

        The listener is published at once if `bind` has found a stack, and otherwise as soon as a
        stack is found.
        """
        stack = self._stack if self._listener is None else None
        if stack is not None and not stack.runtime.closing:
            # The TCP option can be enabled only on a socket that does not listen yet.
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
            # An error in a system task would end the whole run; `accept` raises this one again.
            LOGGER.debug("cannot publish %r: %s", self, error)

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
        """A connection after its handshake, and the peer's address."""
        if not self._listening:
            return await self.plain.accept()  # raises the right error
        try:
            stream = await (await self._ensure_published()).accept()
        except _STREAM_ERRORS as error:
            raise _as_socket_error(error) from error
        return self.wrap_stream(stream)

    def wrap_stream(self, stream: SmcStream) -> tuple[DropInSocket, Any]:
        """The result of `accept` for an accepted stream: its socket, and the peer's address."""
        sock: Any = stream.socket
        if isinstance(stream, TcpStream):
            name = stream.accepted  # `getpeername` fails if the peer has reset the connection
        else:
            name, sock = sock.getpeername(), sock._sock
        return DropInSocket(sock, self._find_stack, stream), name

    async def hand_out(self, take: Callable[[Incoming], None]) -> NoReturn:
        """Accept connections in a loop.

        ``take`` is called for each connection at once.  It must start a task, which waits for the
        stream and passes it to `wrap_stream`.
        """
        try:
            await (await self._ensure_published()).hand_out(take)
        except _STREAM_ERRORS as error:
            raise _as_socket_error(error) from error

    async def connect(self, address: Any) -> None:
        """Connect and run the handshake; after a fallback the socket is plain TCP."""
        if self.stream is not None or self._listening:
            await self.plain.connect(address)  # raises the right error
            return
        try:
            plain: Any = self.plain
            await self.connect_to(await plain._resolve_address_nocp(address, local=False))
        except trio.Cancelled:
            self.close()  # as Trio does, at every point of the call
            raise

    async def connect_to(self, resolved: Any) -> None:
        """Connect a new socket to an address that needs no lookup.

        If this raises, the caller must close the socket.
        """
        stack = await self._find_stack()
        stack.runtime.check_usable()
        config = _config_of(stack)
        self._attach_stream(
            await connect_socket(stack.runtime, self.plain, resolved, config, self._sock)
        )

    def _attach_stream(self, stream: SmcStream) -> None:
        """Use ``stream`` for the connection from now on."""
        self.stream = stream
        if isinstance(stream, TcpStream):
            self._tcp = stream
            # Bound to the plain socket for speed; `close` stays, because it is counted.
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
        """Close; data already sent still arrives."""
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

    # --- descriptors -------------------------------------------------------------------------

    def detach(self) -> int:
        """As `socket.socket.detach`; only for plain TCP."""
        if self._rdma is not None or self._listener is not None:
            unsupported()
        if self._tcp is not None:
            self._tcp.release_stream()
        return self.plain.detach()

    def dup(self) -> trio.socket.SocketType:
        """As `socket.socket.dup`; only for plain TCP."""
        if self._rdma is not None:
            unsupported()
        return self.plain.dup()


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
