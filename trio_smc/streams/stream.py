"""`SmcStream`: what users hold.  One face, two kinds of stream behind it: `_rdma_stream` is a thin
layer over the connection core, `_tcp_stream` wraps Trio's own socket stream and says why.

Both are registered as kinds of `trio.SocketStream`: a program that asks for one asks for what they
have, `socket` with its names, `setsockopt` and `getsockopt`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import trio
from trio.abc import HalfCloseableStream

from trio_smc._base.reasons import Fallback, Mode
from trio_smc._base.statistics import StreamStatistics
from trio_smc.streams.smc_socket import SmcSocket

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from trio_smc.streams.group_views import LinkGroupView

__all__ = [
    "SmcStream",
    "UrgentState",
    "flat",
    "some_bytes",
    "writable",
]


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

    def statistics(self) -> StreamStatistics:
        """Counters of this connection; all zero over TCP."""
        raise NotImplementedError

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
        raise NotImplementedError

    async def send_urgent(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of ``data``; its last byte is urgent (RFC 7609, 4.7.5).

        Over SMC-R whatever is sent next waits until the peer has taken everything up to that
        byte.  Cancelled, some of ``data`` may be sent, without anything being urgent.

        Raises:
          ValueError: ``data`` is empty.
          trio.ClosedResourceError, trio.BrokenResourceError, trio.BusyResourceError: as
            `send_all`.
        """
        raise NotImplementedError

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
        raise NotImplementedError

    async def receive_urgent(self) -> bytes:
        """Receive the urgent byte, waiting for it; of several not received, the last.

        It is not in the stream, unless ``Config(urgent_inline=True)`` (or SO_OOBINLINE) leaves
        it there: then `receive_some` has it, and this raises OSError (EINVAL).

        Raises:
          trio.EndOfChannel, trio.ClosedResourceError, trio.BrokenResourceError,
            trio.BusyResourceError: as `wait_urgent`.
        """
        raise NotImplementedError

    def setsockopt(
        self, level: int, option: int, value: int | Buffer | None, length: int | None = None
    ) -> None:
        """Set a socket option, as `trio.SocketStream.setsockopt` does.

        docs/socket-options.md says what each does over SMC-R.

        Raises:
          OSError: as from `socket.socket.setsockopt`; EBADF on a closed stream.
        """
        raise NotImplementedError

    def getsockopt(self, level: int, option: int, buffersize: int = 0) -> int | bytes:
        """The value of a socket option, as `trio.SocketStream.getsockopt` returns it.

        Raises:
          OSError: as from `socket.socket.getsockopt`; EBADF on a closed stream.
        """
        raise NotImplementedError

    def is_readable(self) -> bool:
        """Whether `receive_some` would return or raise at once; never blocks.

        For pools of connections: an idle one that is readable was closed by its peer, or is out
        of step.  `socket.is_readable` cannot tell: over SMC-R no data comes by the TCP connection.
        """
        raise NotImplementedError

    def abort(self) -> None:
        """Reset the connection at once: what is under way in both directions is lost.

        The peer gets BrokenResourceError (RFC 7609, 4.8.2).  Never blocks.  Idempotent.
        """
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.mode}>"


def flat(data: bytes | bytearray | memoryview) -> memoryview:
    """A view of ``data`` as single bytes."""
    view = memoryview(data)
    if view.format != "B" or view.ndim != 1 or not view.c_contiguous:
        view = memoryview(bytes(view))
    return view


def writable(buffer: Buffer) -> memoryview:
    """A view of ``buffer`` as single bytes, at least one."""
    view = memoryview(buffer).cast("B")
    if view.readonly:
        raise TypeError("the buffer cannot be written to")
    if not view:
        raise ValueError("the buffer is empty")
    return view


def some_bytes(data: bytes | bytearray | memoryview) -> memoryview:
    """`flat`, but not empty: what urgent data has to be."""
    view = flat(data)
    if not view:
        raise ValueError("at least one byte is urgent")
    return view


UrgentState = Literal["pending", "present"]
OVER: Final = "no urgent data will come: the peer has ended its side"
