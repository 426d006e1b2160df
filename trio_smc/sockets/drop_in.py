"""A `trio.socket.SocketType` whose bytes travel over SMC-R, and the factory of such sockets.

Theory of operation
-------------------
`enable` makes `trio.socket.socket` return a `SocketFace` for TCP.  It starts as the plain socket
it
wraps: options, bind and listen go there.  `connect` runs the handshake of `open_stream` on it,
and
`accept` hands out what an `SmcListener` accepted; from then on the face has a stream.  While
that
is plain TCP, the face is the plain socket again.  Over SMC-R bytes go through the stream, and
only
names and options through the socket.

A socket and a stream differ in a few ways, and the face takes the socket's side: `send` may send
a
part; errors are OSErrors with a number; closing is no coroutine, so it cannot wait for the peer;
after SHUT_RD everything is at its end.  `listen` is no coroutine either, while to publish a
listener takes some; a task of the stack does that, and `accept` waits for it.

What has no meaning over SMC-R raises OSError (EOPNOTSUPP): ancillary data, a destination
address,
`detach` and `dup`.

Where `SocketFace`s come from: Trio's socket factory, and sockets of the standard library.
"""

from __future__ import annotations

import errno
import logging
import os
import socket as stdlib_socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self, cast

import trio

from trio_smc.connecting.connect import connect_socket
from trio_smc.connecting.listener import SmcListener
from trio_smc.streams.rdma_stream import RdmaStream

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from trio_smc._stack import Stack
    from trio_smc.streams.stream import SmcStream

__all__ = [
    "FaceData",
    "FaceFactory",
    "FindStack",
    "SocketFace",
    "plain_socket",
    "socket_errors",
    "unsupported",
]


_DONT_WAIT: Final = getattr(stdlib_socket, "MSG_DONTWAIT", 0)
_NO_SIGNAL: Final = getattr(stdlib_socket, "MSG_NOSIGNAL", 0)


@contextmanager
def socket_errors() -> Iterator[None]:
    """Errors of a stream as those of a socket."""
    try:
        yield
    except trio.ClosedResourceError as error:
        raise os_error(errno.EBADF) from error
    except trio.BrokenResourceError as error:
        number = getattr(error.__cause__, "errno", None) or errno.ECONNRESET
        raise os_error(number) from error


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def unsupported() -> NoReturn:
    raise os_error(errno.EOPNOTSUPP)


class FaceData(trio.socket.SocketType):
    """Receives and sends through the stream when there is one over SMC-R, else by TCP."""

    plain: trio.socket.SocketType
    _rdma: RdmaStream | None
    _read_shut: bool
    _write_shut: bool

    async def recv(self, buflen: int, flags: int = 0, /) -> bytes:
        """As `socket.socket.recv`; MSG_PEEK is the only flag."""
        rdma = self._rdma
        if rdma is None:
            return await self.plain.recv(buflen, flags)
        if self._read_shut or not buflen:
            await trio.lowlevel.checkpoint()
            return b""
        with socket_errors():
            if flags & ~_DONT_WAIT:
                return await self._peek(rdma, buflen, flags)
            return await rdma.receive_some(buflen)

    async def _peek(self, rdma: RdmaStream, buflen: int, flags: int) -> bytes:
        if flags & ~_DONT_WAIT != stdlib_socket.MSG_PEEK:
            unsupported()
        return await rdma.peek_some(buflen)

    async def recv_into(self, buffer: Buffer, nbytes: int = 0, flags: int = 0) -> int:
        """As `socket.socket.recv_into`."""
        if self._rdma is None:
            return await self.plain.recv_into(buffer, nbytes, flags)
        with memoryview(buffer).cast("B") as view:
            wanted = nbytes or len(view)
            if not (flags or self._read_shut) and 0 < wanted <= len(view):
                with socket_errors(), view[:wanted] as place:
                    return await self._rdma.receive_some_into(place)
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
        if flags & ~(_NO_SIGNAL | _DONT_WAIT | stdlib_socket.MSG_OOB):
            unsupported()
        if self._write_shut:
            raise os_error(errno.EPIPE)
        view = memoryview(data).cast("B")
        with socket_errors():
            if flags & stdlib_socket.MSG_OOB:
                await rdma.send_urgent(view)
                return len(view)
            return await rdma.send_some(view)

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
        with socket_errors():
            await self._rdma.wait_send_all_might_not_block()


LOGGER = logging.getLogger("trio_smc")

_LATE_PORT: Final = (
    stdlib_socket.IPPROTO_IP,
    getattr(stdlib_socket, "IP_BIND_ADDRESS_NO_PORT", 24),
)

FindStack = Callable[[], Awaitable["Stack"]]


def plain_socket(sock: trio.socket.SocketType) -> trio.socket.SocketType:
    """The socket behind a face; any other as it is."""
    return sock.plain if isinstance(sock, SocketFace) else sock


class SocketFace(FaceData):
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
    ) -> None:
        self.plain = plain
        self.stream = stream
        self._find_stack = find_stack
        self._stack: Stack | None = None
        self._rdma = stream if isinstance(stream, RdmaStream) else None
        self._listener: SmcListener | None = None
        self._listening = _is_listening(plain)
        self._publishing = trio.Lock()
        self._read_shut = self._write_shut = self._closed = False
        self._ended: stdlib_socket.socket | None = None

    def __repr__(self) -> str:
        return f"<SocketFace {self.stream or self.plain!r}>"

    # --- names and options -------------------------------------------------------------------

    @property
    def _sock(self) -> stdlib_socket.socket:
        # AnyIO looks here for the raw socket.
        return cast(Any, self.plain)._sock  # type: ignore[no-any-return]

    @property
    def family(self) -> stdlib_socket.AddressFamily:
        """AF_INET or AF_INET6."""
        return self.plain.family

    @property
    def type(self) -> stdlib_socket.SocketKind:
        """SOCK_STREAM."""
        return self.plain.type

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
        if self._ended is None:
            self._ended, other = stdlib_socket.socketpair()
            other.close()
        return self._ended.fileno()

    def getsockname(self) -> Any:
        """The local address."""
        return self.plain.getsockname()

    def getpeername(self) -> Any:
        """The peer's address."""
        return self.plain.getpeername()

    def get_inheritable(self) -> bool:
        """As `socket.socket.get_inheritable`."""
        return self.plain.get_inheritable()

    def set_inheritable(self, inheritable: bool) -> None:
        """As `socket.socket.set_inheritable`."""
        self.plain.set_inheritable(inheritable)

    def getsockopt(self, level: int, optname: int, buflen: int | None = None) -> Any:
        """As `SmcStream.getsockopt`."""
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
        elif (level, optname) == _LATE_PORT:
            pass  # a client on this host announces its port before it connects
        elif optlen is not None:
            self.plain.setsockopt(level, optname, cast(None, value), optlen)
        else:
            self.plain.setsockopt(level, optname, cast(int, value))

    def is_readable(self) -> bool:
        """Whether `recv` would return or raise at once."""
        return self._rdma.is_readable() if self._rdma is not None else self.plain.is_readable()

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
            self._listener = SmcListener(stack.runtime, self.plain, stack.config)
            return
        trio.lowlevel.spawn_system_task(self._publish, context=copy_context())

    async def _publish(self) -> None:
        try:
            await self._published()
        except Exception as error:
            # In a system task anything would end the whole run; `accept` meets it again.
            LOGGER.debug("%r is not published: %s", self, error)

    async def _published(self) -> SmcListener:
        async with self._publishing:
            if self._listener is None:
                stack = await self._find_stack()
                if self.plain.fileno() < 0:
                    raise trio.ClosedResourceError("the socket was closed")
                self._listener = SmcListener(stack.runtime, self.plain, stack.config)
        return self._listener

    async def accept(self) -> tuple[trio.socket.SocketType, Any]:
        """A connection whose handshake is done, and the peer's address."""
        if not self._listening:
            return await self.plain.accept()  # which says what is wrong
        with socket_errors():
            stream = await (await self._published()).accept()
        plain = stream.socket
        name = plain.getpeername()
        if not isinstance(stream, RdmaStream):
            return cast(trio.socket.SocketType, plain), name
        return SocketFace(cast(Any, plain)._sock, self._find_stack, stream), name

    async def connect(self, address: Any) -> None:
        """Connect and run the handshake; the socket is plain TCP afterwards if it must be."""
        if self.stream is not None or self._listening:
            await self.plain.connect(address)  # which says what is wrong
            return
        resolved = await cast(Any, self.plain)._resolve_address_nocp(address, local=False)
        stack = await self._find_stack()
        with stack.runtime.call():
            self.stream = await connect_socket(stack.runtime, self.plain, resolved, stack.config)
        if isinstance(self.stream, RdmaStream):
            self._rdma = self.stream

    def shutdown(self, flag: int) -> None:
        """As `socket.socket.shutdown`."""
        if self._rdma is None:
            self.plain.shutdown(flag)
            return
        with socket_errors():
            if flag != stdlib_socket.SHUT_RD:
                self._rdma.shut_down_writing()
                self._write_shut = True
            if flag != stdlib_socket.SHUT_WR:
                self._read_shut = True

    def close(self) -> None:
        """Close; what was sent still arrives."""
        self._closed = True
        if self._ended is not None:
            self._ended.close()
        if self._listener is not None:
            self._listener.close()
        elif self._rdma is not None:
            self._rdma.close()
        else:
            self.plain.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what makes two of one ---------------------------------------------------------------

    def detach(self) -> int:
        """Give the descriptor away: of plain TCP only."""
        if self._rdma is not None or self._listener is not None:
            unsupported()
        return self.plain.detach()

    def dup(self) -> trio.socket.SocketType:
        """A second socket for the same connection: of plain TCP only."""
        if self._rdma is not None:
            unsupported()
        return self.plain.dup()


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


class FaceFactory(trio.abc.SocketFactory):
    """What `trio.socket.set_custom_socket_factory` takes.

    Args:
      find_stack: which stack new connections and listeners use.
    """

    def __init__(self, find_stack: FindStack) -> None:
        self._find_stack = find_stack

    def socket(
        self, family: int | None = None, type: int | None = None, proto: int | None = None
    ) -> trio.socket.SocketType:
        """A new socket: a face for TCP, Trio's own for anything else."""
        return self.wrap(
            stdlib_socket.socket(
                stdlib_socket.AF_INET if family is None else family,
                stdlib_socket.SOCK_STREAM if type is None else type,
                0 if proto is None else proto,
            )
        )

    def wrap(self, sock: stdlib_socket.socket) -> trio.socket.SocketType:
        """What stands for ``sock`` in Trio: see `trio.socket.from_stdlib_socket`.

        A connected socket stays what it is: its handshake was or is somebody else's.
        """
        plain = _make_plain(sock)
        if not _is_tcp(sock.family, sock.type, sock.proto) or _is_connected(sock):
            return plain
        return SocketFace(plain, self._find_stack)


def _is_connected(sock: stdlib_socket.socket) -> bool:
    try:
        sock.getpeername()
    except OSError as error:
        return error.errno != errno.ENOTCONN
    return True
