"""`SmcStream`: the interface of a connection, whether it became SMC-R or stayed TCP.

There are two kinds: `rdma_stream` puts waiting around a connection core, `tcp_stream` wraps Trio's
own socket stream and says why.  Both are registered as kinds of `trio.SocketStream`: a program that
asks for one asks for what they have, `socket` with its names, `setsockopt` and `getsockopt`.

`SmcSocket` is what an SMC-R stream shows of its TCP connection: names and TCP-level options.  After
the switch to SMC-R the TCP connection carries no data: bytes read from it or written to it would be
a protocol violation.  So nothing that moves data is there.
"""

from __future__ import annotations

import errno
import os
import socket
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Final, Literal, overload

import trio
from trio.abc import HalfCloseableStream

from trio_smc._base.reasons import Fallback, Mode
from trio_smc._base.statistics import StreamStatistics

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from trio_smc.streams.group_views import LinkGroupView

__all__ = [
    "NO_MORE_URGENT",
    "SmcSocket",
    "SmcStream",
    "UrgentState",
    "byte_view",
    "nonempty_byte_view",
    "urgent_inline_error",
    "writable_byte_view",
]


class SmcSocket:
    """The TCP connection of an SMC-R stream: `SmcStream.socket` while the mode is "smc-r".

    Once the connection is CLOSED its descriptor is gone, and everything but ``family``, ``type``,
    ``proto`` and `fileno` raises OSError (EBADF), and so do names unless they were kept.
    """

    __slots__ = ("_accepted", "_names", "_sock")

    def __init__(self, sock: trio.socket.SocketType, accepted: Any = None) -> None:
        """``accepted``: the peer's address, as ``accept`` gave it."""
        self._sock = sock
        self._accepted = accepted
        self._names: tuple[Any, Any] | None = None

    def keep_names(self) -> None:
        """Have both names also when the descriptor is gone."""
        if self._names is None:
            try:
                peer = self.getpeername()
            except OSError:
                peer = None  # it has reset TCP already
            self._names = self._sock.getsockname(), peer

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
        """The descriptor, for looking at the connection from outside; -1 once it is closed."""
        return self._sock.fileno()

    def getsockname(self) -> Any:
        """The local address, as `socket.socket.getsockname` gives it."""
        return self._names[0] if self._names is not None else self._sock.getsockname()

    def getpeername(self) -> Any:
        """The peer's address, as `socket.socket.getpeername` gives it."""
        if self._names is not None and self._names[1] is not None:
            return self._names[1]
        try:
            return self._sock.getpeername()
        except OSError as error:
            # The peer of a socket may have reset TCP before `accept` handed it out.
            if error.errno != errno.ENOTCONN or self._accepted is None:
                raise
            return self._accepted

    @overload
    def getsockopt(self, level: int, optname: int, /) -> int: ...

    @overload
    def getsockopt(self, level: int, optname: int, buflen: int, /) -> bytes: ...

    def getsockopt(self, level: int, optname: int, buflen: int | None = None, /) -> int | bytes:
        """An option of the TCP connection; `SmcStream.getsockopt` knows those of SMC-R."""
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
        """Set an option of the TCP connection; `SmcStream.setsockopt` sets those of SMC-R."""
        if value is not None:
            self._sock.setsockopt(level, optname, value)
        elif optlen is not None:
            self._sock.setsockopt(level, optname, None, optlen)
        else:
            raise TypeError("setsockopt: a None value needs a length")

    def __repr__(self) -> str:
        return f"<SmcSocket of {self._sock!r}>"


class SmcStream(HalfCloseableStream):
    """A byte stream to a peer: over SMC-R, or over TCP with the reason why.

    Attributes:
      mode: `Mode.SMC_R` or `Mode.TCP`.
      fallback: why the mode is TCP; None exactly when it is SMC-R.
      socket: the TCP connection, for names and TCP-level options; over SMC-R it can neither send
        nor receive (`SmcSocket`).
      link_group: the link group, or None over TCP.
    """

    mode: Mode
    fallback: Fallback | None
    socket: trio.socket.SocketType | SmcSocket
    link_group: LinkGroupView | None

    @abstractmethod
    def statistics(self) -> StreamStatistics:
        """Counters of this connection; over TCP only its bytes are counted."""

    @abstractmethod
    async def receive_some_into(self, buffer: Buffer) -> int:
        """As `receive_some`, into a buffer of the caller's own: no bytes object is made.

        Args:
          buffer: writable, contiguous and not empty; filled from its start.

        Returns:
          How many bytes were received; 0 at the end of the stream.  Cancelled, none were.

        Raises:
          ValueError: ``buffer`` is empty.
          TypeError: it cannot be written to, or is not contiguous.
          trio.ClosedResourceError, trio.BrokenResourceError, trio.BusyResourceError: as
            `receive_some`.
        """

    @abstractmethod
    async def send_urgent(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of ``data``; its last byte is urgent (RFC 7609, 4.7.5).

        Over SMC-R whatever is sent next waits until the peer has taken everything up to that
        byte.  Cancelled, some of ``data`` may be sent, without anything being urgent.

        Raises:
          ValueError: ``data`` is empty.
          trio.ClosedResourceError, trio.BrokenResourceError, trio.BusyResourceError: as
            `send_all`.
        """

    @abstractmethod
    async def wait_urgent(self) -> UrgentState:
        """Wait until the peer has urgent data.

        Returns:
          "present": the byte is there.  "pending": the peer waits to send it, most likely for
          this side to receive what came before; `receive_urgent` waits for it.  Over TCP
          "pending" ends no wait, it is only noticed at the call.

        Raises:
          trio.EndOfChannel: the peer has ended its side.
          trio.ClosedResourceError: this side closed the stream.
          trio.BrokenResourceError: the connection failed.
          trio.BusyResourceError: another task waits for urgent data.
        """

    @abstractmethod
    async def receive_urgent(self) -> bytes:
        """Receive the urgent byte, waiting for it; of several not received, the last.

        It is not in the stream, unless ``Config(urgent_inline=True)`` (or SO_OOBINLINE) leaves
        it there: then `receive_some` has it, and this raises OSError (EINVAL).

        Raises:
          trio.EndOfChannel, trio.ClosedResourceError, trio.BrokenResourceError,
            trio.BusyResourceError: as `wait_urgent`.
        """

    @abstractmethod
    def setsockopt(
        self, level: int, option: int, value: int | Buffer | None, length: int | None = None
    ) -> None:
        """Set a socket option, as `trio.SocketStream.setsockopt` does.

        docs/socket-options.md says what each does over SMC-R.

        Raises:
          OSError: as from `socket.socket.setsockopt`; EBADF on a closed stream.
        """

    @abstractmethod
    def getsockopt(self, level: int, option: int, buffersize: int = 0) -> int | bytes:
        """The value of a socket option, as `trio.SocketStream.getsockopt` returns it.

        Raises:
          OSError: as from `socket.socket.getsockopt`; EBADF on a closed stream.
        """

    @abstractmethod
    def is_readable(self) -> bool:
        """Whether `receive_some` would return or raise at once; never blocks.

        For pools of connections: an idle one that is readable was closed by its peer, or is out
        of step.  `socket.is_readable` cannot tell: over SMC-R no data comes by the TCP connection.
        """

    @abstractmethod
    def abort(self) -> None:
        """Reset the connection at once: what is under way in both directions is lost.

        The peer gets BrokenResourceError (RFC 7609, 4.8.2).  Never blocks.  Idempotent.
        """

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.mode}>"


def byte_view(data: Buffer) -> memoryview:
    """A view of ``data`` as single bytes."""
    view = memoryview(data)
    if view.format != "B" or view.ndim != 1 or not view.c_contiguous:
        view = memoryview(bytes(view))
    return view


def writable_byte_view(buffer: Buffer) -> memoryview:
    """A view of ``buffer`` as single bytes, at least one."""
    view = memoryview(buffer).cast("B")
    if view.readonly:
        raise TypeError("the buffer cannot be written to")
    if not view:
        raise ValueError("the buffer is empty")
    return view


def nonempty_byte_view(data: bytes | bytearray | memoryview) -> memoryview:
    """`byte_view`, but not empty: what urgent data has to be."""
    view = byte_view(data)
    if not view:
        raise ValueError("at least one byte is urgent")
    return view


def urgent_inline_error() -> OSError:
    """Of `SmcStream.receive_urgent` where urgent data stays in the stream."""
    return OSError(errno.EINVAL, f"{os.strerror(errno.EINVAL)}: urgent data stays in the stream")


UrgentState = Literal["pending", "present"]
NO_MORE_URGENT: Final = "no urgent data will come: the peer has ended its side"
