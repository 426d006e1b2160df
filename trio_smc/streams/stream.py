"""`SmcStream`: the interface of a connection, over SMC-R or over TCP.

There are two kinds of streams: `rdma_stream.RdmaStream` wraps an SMC-R connection, and
`tcp_stream.TcpStream` wraps Trio's socket stream and has the reason for TCP.  Both are registered
as subclasses of `trio.SocketStream`: a program that checks for a `trio.SocketStream` uses only its
``socket`` (for names), `setsockopt` and `getsockopt`, which both have.

`SmcSocket` is the TCP connection of an SMC-R stream, with names and TCP-level options.  After the
switch to SMC-R the TCP connection carries no data: reading from it or writing to it would violate
the protocol.  So `SmcSocket` has no method that moves data.
"""

from __future__ import annotations

import contextlib
import errno
import operator
import os
import socket
from abc import abstractmethod
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Final, Literal, overload

import trio
from trio.abc import HalfCloseableStream

from trio_smc._base.reasons import Fallback, Mode
from trio_smc._base.statistics import StreamStatistics
from trio_smc.host.mapped import copies_of, may_fault
from trio_smc.host.tcp import close_past_program, end_connection

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from trio_smc.streams.group_views import LinkGroupView

__all__ = [
    "NO_MORE_URGENT",
    "STILL_IN_USE",
    "ReceiveView",
    "SmcSocket",
    "SmcStream",
    "UrgentState",
    "byte_view",
    "checked_size",
    "nonempty_byte_view",
    "urgent_inline_error",
    "writable_byte_view",
]


STILL_IN_USE: Final = (
    "receive_view: a slice of the view, or an array made from it, still exists; delete it before "
    "the block ends. No byte of the view counts as received"
)


_TOO_FEW: Final = "max_bytes must be >= 1"


def checked_size(max_bytes: int) -> int:
    """``max_bytes`` as an integer.

    Raises:
      ValueError, TypeError: as from Trio's stream, which compares first.
    """
    try:
        size = operator.index(max_bytes)
    except TypeError:
        if max_bytes < 1:
            raise ValueError(_TOO_FEW) from None
        raise
    if size < 1:
        raise ValueError(_TOO_FEW)
    return size


class SmcSocket:
    """The TCP connection of an SMC-R stream: `SmcStream.socket` while the mode is "smc-r".

    When the connection is CLOSED, the TCP connection ends, too.  After that only ``family``,
    ``type``, ``proto`` and `fileno` are available, and both names if the program has not closed the
    stream (`keep_names`); everything else raises OSError (EBADF).  Until the program closes the
    stream, its descriptor stays open, and shows the end: programs use the number as a key, and have
    it in selectors.
    """

    __slots__ = ("_in_use", "_names", "_peer", "_sock", "ended")

    def __init__(self, sock: trio.socket.SocketType, peer: Any = None) -> None:
        """``peer``: the peer's address, from ``accept`` or for ``connect``; None: unknown."""
        self._sock = sock
        if peer is None:
            # Asked at once: the kernel forgets the address of a peer that resets TCP.
            with contextlib.suppress(OSError):
                peer = sock.getpeername()
        self._peer = peer
        self._names: tuple[Any, Any] | None = None
        self._in_use = True  # by the program
        self.ended: socket.socket | None = None
        """The socket after the end of TCP, until the program closes the stream."""

    def close_tcp(self, reset: bool) -> None:
        """End the TCP connection, because that of SMC-R is CLOSED.

        The program may have the descriptor number, in a selector for example.  So the socket stays
        open until the program closes the stream.
        """
        if self._in_use and self._sock.fileno() >= 0 and end_connection(self._sock, reset=reset):
            self.ended = socket.socket(fileno=self._sock.detach())
        else:
            close_past_program(self._sock, reset=reset)

    def free_number(self) -> None:
        """The program no longer uses the descriptor number."""
        self._in_use = False
        if self.ended is not None:
            with contextlib.suppress(OSError):  # the program has closed the number itself
                self.ended.close()

    def keep_names(self) -> None:
        """Store both names, so that they outlive the descriptor."""
        if self._names is None and self._sock.fileno() >= 0:
            try:
                own = self._sock.getsockname()
            except OSError:
                return  # the program has closed the descriptor
            try:
                peer = self.getpeername()
            except OSError:
                peer = None  # the peer has reset TCP already
            self._names = own, peer

    @property
    def family(self) -> socket.AddressFamily:
        """AF_INET or AF_INET6."""
        return self._sock.family

    @property
    def type(self) -> socket.SocketKind:
        """SOCK_STREAM."""
        return self._sock.type

    @property
    def proto(self) -> int:
        """The protocol number."""
        return self._sock.proto

    def fileno(self) -> int:
        """The descriptor, for tools that examine the connection; -1 after the close."""
        return self._sock.fileno() if self.ended is None else self.ended.fileno()

    def getsockname(self) -> Any:
        """As `socket.socket.getsockname`."""
        return self._names[0] if self._names is not None else self._sock.getsockname()

    def getpeername(self) -> Any:
        """As `socket.socket.getpeername`."""
        if self._names is not None and self._names[1] is not None:
            return self._names[1]
        try:
            return self._sock.getpeername()
        except OSError as error:
            # The peer has reset TCP, perhaps before `accept` returned.
            if error.errno != errno.ENOTCONN or self._peer is None:
                raise
            return self._peer

    @overload
    def getsockopt(self, level: int, optname: int, /) -> int: ...

    @overload
    def getsockopt(self, level: int, optname: int, buflen: int, /) -> bytes: ...

    def getsockopt(self, level: int, optname: int, buflen: int | None = None, /) -> int | bytes:
        """An option of the TCP connection; for SMC-R use `SmcStream.getsockopt`."""
        if buflen is None:
            return self._sock.getsockopt(level, optname)
        return self._sock.getsockopt(level, optname, buflen)

    @overload
    def setsockopt(self, level: int, optname: int, value: int | Buffer, /) -> None: ...

    @overload
    def setsockopt(self, level: int, optname: int, value: None, optlen: int, /) -> None: ...

    def setsockopt(
        self, level: int, optname: int, value: int | Buffer | None, optlen: int | None = None, /
    ) -> None:
        """Set an option of the TCP connection; for SMC-R use `SmcStream.setsockopt`."""
        if value is not None:
            self._sock.setsockopt(level, optname, value)
        elif optlen is not None:
            self._sock.setsockopt(level, optname, None, optlen)
        else:
            raise TypeError("setsockopt: a None value needs a length")

    def __repr__(self) -> str:
        return f"<SmcSocket of {self._sock!r}>"


class ReceiveView(AbstractAsyncContextManager[memoryview]):
    """A loan of a part of the receive ring, by `SmcStream.receive_view`.

    The block gets a memoryview, which can have no further methods; so `consume` is a method of this
    object.
    """

    _size = -1  # bytes of the view; -1: outside of the block
    _count = 0

    @abstractmethod
    async def __aenter__(self) -> memoryview:
        """Wait for data; return the view."""

    def consume(self, count: int) -> None:
        """Count only the first ``count`` bytes of the view as received; the others stay unread.

        The last call before the end of the block counts.

        Raises:
          ValueError: the view has fewer bytes, or there is none.
        """
        if not 0 <= operator.index(count) <= self._size:
            raise ValueError(f"consume: {count} is not a number of bytes of the view")
        self._count = operator.index(count)

    def _begin(self, view: memoryview) -> memoryview:
        self._size = self._count = len(view)
        return view

    def _end(self) -> int:
        """End the block; return how many bytes count as received."""
        self._size = -1
        return self._count


class SmcStream(HalfCloseableStream):
    """A byte stream to a peer, over SMC-R or over TCP.

    Attributes:
      mode: `Mode.SMC_R` or `Mode.TCP`.
      fallback: the reason why the mode is TCP; None over SMC-R.
      socket: the TCP connection, for names and TCP-level options; over SMC-R a `SmcSocket`, which
        can neither send nor receive.
      link_group: the link group, or None over TCP.
    """

    mode: Mode
    fallback: Fallback | None
    socket: trio.socket.SocketType | SmcSocket
    link_group: LinkGroupView | None

    @abstractmethod
    def statistics(self) -> StreamStatistics:
        """Counters of this connection; over TCP only the bytes."""

    @abstractmethod
    async def receive_some_into(self, buffer: Buffer) -> int:
        """As `receive_some`, into a buffer of the caller, without creating a bytes object.

        Args:
          buffer: writable, contiguous and not empty; filled from its start.

        Returns:
          The number of bytes received; 0 at the end of the stream.  A cancelled call receives
          none.

        Raises:
          ValueError: ``buffer`` is empty.
          TypeError: ``buffer`` is read-only or not contiguous.
          trio.ClosedResourceError, trio.BrokenResourceError, trio.BusyResourceError: as
            `receive_some`.
        """

    @abstractmethod
    def receive_view(self, max_bytes: int | None = None) -> ReceiveView:
        """Receive without a copy: lend a read-only view of the receive ring itself.

        ::

            async with stream.receive_view() as data:
                total += numpy.frombuffer(data, numpy.uint8).sum()

        ``data`` is a memoryview of at least one byte, or of none at the end of the stream.  It ends
        where the ring wraps, so it may have fewer bytes than have arrived.  All of them count as
        received when the block ends, unless `ReceiveView.consume` was called::

            view = stream.receive_view()
            async with view as data:
                view.consume(bytes(data).rfind(b"\\n") + 1)

        Inside the block no task can receive, and the peer cannot use this part of the ring.  So do
        not wait in the block for the peer's next data.  A peer that violates the protocol can
        change the bytes while they are read: check a copy of what has to be checked.  Over TCP the
        view is one of a copy.

        Args:
          max_bytes: the most bytes of the view; None: as many as there are.

        Raises:
          ValueError: ``max_bytes`` is not positive.
          trio.ClosedResourceError, trio.BrokenResourceError, trio.BusyResourceError: as
            `receive_some`, at the beginning of the block.  A block that is cancelled there receives
            nothing.
          BufferError: at the end of the block a slice of the view or an array of it still exists.
            Nothing was received then, and the stream stays usable; the contents of that array may
            change from now on.
        """

    @abstractmethod
    async def send_urgent(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of ``data``; its last byte is urgent (RFC 7609, 4.7.5).

        Over SMC-R the next send waits until the peer has received all data up to that byte.  If the
        call is cancelled, a part of ``data`` may have been sent, without an urgent byte.

        Raises:
          ValueError: ``data`` is empty.
          trio.ClosedResourceError, trio.BrokenResourceError, trio.BusyResourceError: as
            `send_all`.
        """

    @abstractmethod
    async def wait_urgent(self) -> UrgentState:
        """Wait until the peer has urgent data.

        Returns:
          "present": the byte has arrived.  "pending": the peer has announced the byte and cannot
          send it yet, most likely because this side has not received the data before it;
          `receive_urgent` waits for the byte.  Over TCP an announcement does not end a wait that
          has begun; the next call reports it.

        Raises:
          trio.EndOfChannel: the peer has ended its side.
          trio.ClosedResourceError: this side closed the stream.
          trio.BrokenResourceError: the connection failed.
          trio.BusyResourceError: another task waits for urgent data.
        """

    @abstractmethod
    async def receive_urgent(self) -> bytes:
        """Wait for the urgent byte and receive it; a newer urgent byte replaces an older one.

        The byte is not in the stream, unless the socket option SO_OOBINLINE is set: then
        `receive_some` returns the byte, and this method raises OSError (EINVAL).

        Raises:
          trio.EndOfChannel, trio.ClosedResourceError, trio.BrokenResourceError,
            trio.BusyResourceError: as `wait_urgent`.
        """

    @abstractmethod
    def setsockopt(
        self, level: int, option: int, value: int | Buffer | None, length: int | None = None
    ) -> None:
        """Set a socket option, as `trio.SocketStream.setsockopt` does.

        docs/socket-options.md lists the effects over SMC-R.

        Raises:
          OSError: as from `socket.socket.setsockopt`; EBADF on a closed stream.
        """

    @abstractmethod
    def getsockopt(self, level: int, option: int, buffersize: int = 0) -> int | bytes:
        """Read a socket option, as `trio.SocketStream.getsockopt` does.

        Raises:
          OSError: as from `socket.socket.getsockopt`; EBADF on a closed stream.
        """

    @abstractmethod
    def is_readable(self) -> bool:
        """True if `receive_some` would return or raise at once; never blocks.

        For pools of connections: if an idle connection is readable, its peer has closed it or has
        sent unexpected data.  `socket.is_readable` does not show this over SMC-R, because data does
        not arrive on the TCP connection.
        """

    @abstractmethod
    def abort(self) -> None:
        """Reset the connection at once; data in flight is lost in both directions.

        At the peer, calls raise BrokenResourceError (RFC 7609, 4.8.2).  Never blocks; idempotent.
        """

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.mode}>"


def byte_view(data: Buffer, *, strided: bool = True) -> memoryview:
    """A view of ``data`` as single bytes, in C order.

    Streams send only such views, because the length of any other view counts items and not bytes.
    Memory in C order is not copied.

    Args:
      data: a bytes-like object.
      strided: copy the elements of a view that is not in C order, such as every second byte; if
        False, refuse the view, as `socket.socket.send` does.

    Raises:
      TypeError: ``data`` is not a bytes-like object.
      BufferError: ``data`` is not in C order.
    """
    view = memoryview(data)
    if view.ndim == 1 and view.format == "B" and view.c_contiguous:
        return view
    if not view.nbytes:
        return memoryview(b"")  # `cast` refuses a view with a dimension of 0 items
    if view.c_contiguous:
        return view.cast("B")
    if not strided:
        raise BufferError("memoryview: underlying buffer is not C-contiguous")
    return memoryview(view.tobytes())


def writable_byte_view(buffer: Buffer) -> memoryview:
    """A view of ``buffer`` as single bytes, writable and not empty.

    Raises:
      TypeError: ``buffer`` is read-only or not in C order.
      ValueError: ``buffer`` is empty.
    """
    view = memoryview(buffer)
    if view.readonly:
        raise TypeError("the buffer is read-only")
    if not view.nbytes:
        raise ValueError("the buffer is empty")
    return view.cast("B")


def nonempty_byte_view(data: bytes | bytearray | memoryview) -> memoryview:
    """`byte_view`, for urgent data, which must not be empty."""
    view = byte_view(data)
    if not view:
        raise ValueError("urgent data needs at least one byte")
    if may_fault(view):
        return memoryview(b"".join(copies_of(view)))
    return view


def urgent_inline_error() -> OSError:
    """The error of `SmcStream.receive_urgent` if urgent data stays in the stream."""
    return OSError(errno.EINVAL, f"{os.strerror(errno.EINVAL)}: urgent data stays in the stream")


UrgentState = Literal["pending", "present"]
NO_MORE_URGENT: Final = "no urgent data will come: the peer has ended its side"
