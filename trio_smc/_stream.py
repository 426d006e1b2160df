"""`SmcStream`: what users hold.  One face, two kinds of stream behind it.

`RdmaStream` is a thin layer over the connection core: the core never waits, the stream does.
`TcpStream` wraps Trio's own socket stream and says why.

Checkpoints: every call is a full Trio checkpoint, as the stream contract wants.  A call that
parks has been one by that; one that finds everything ready yields once
(`Config(checkpoints="amortised")`: cancellation is checked always, yielding only now and then).
"""

from __future__ import annotations

import contextlib
import errno
import math
import operator
import os
import time
import warnings
from functools import partial
from typing import TYPE_CHECKING, Final

import trio
from trio.abc import HalfCloseableStream
from trio.lowlevel import Abort, RaiseCancelT

from trio_smc._base.reasons import Fallback, Mode
from trio_smc._base.statistics import StreamStatistics
from trio_smc._endpoint import close_with_reset
from trio_smc._options import StreamOptions
from trio_smc._tcp_names import SmcSocket
from trio_smc._urgent import URGENT, RdmaUrgent, TcpUrgent, UrgentState

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from trio_smc._base.config import Config
    from trio_smc._endpoint import Endpoint
    from trio_smc._stack import Stack
    from trio_smc._views import LinkGroup

__all__ = ["RdmaStream", "SmcStream", "TcpStream"]

_DEFAULT_RECEIVE: Final = 65536
# What each call needs, looked up once.
_reschedule: Final = trio.lowlevel.reschedule
_sleep: Final = trio.lowlevel.wait_task_rescheduled
_yield: Final = trio.lowlevel.cancel_shielded_checkpoint
_check_cancelled: Final = trio.lowlevel.checkpoint_if_cancelled
_ABORTED: Final = Abort.SUCCEEDED
_YIELD_EVERY_CALLS: Final = 32
_YIELD_EVERY_NS: Final = 200_000
# Waiters of the core; `URGENT` is another.
_READER: Final = "on_readable"
_WRITER: Final = "on_writable"


def _nothing() -> None:
    """A waiter of somebody who is awake: that it is gone says that it was called."""


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
    link_group: LinkGroup | None

    def statistics(self) -> StreamStatistics:
        """Counters of this connection; all zero over TCP."""
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


class TcpStream(SmcStream):
    """Plain TCP, and why."""

    mode = Mode.TCP
    link_group = None
    socket: trio.socket.SocketType

    def __init__(
        self, sock: trio.socket.SocketType, fallback: Fallback, *, urgent_inline: bool = False
    ) -> None:
        self.socket = sock
        self.fallback = fallback
        self._stream = trio.SocketStream(sock)
        self._urgent = TcpUrgent(sock, urgent_inline)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """As `trio.SocketStream.send_all`."""
        if self._urgent.sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        """As `trio.SocketStream.wait_send_all_might_not_block`."""
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        """As `trio.SocketStream.send_eof`."""
        await self._stream.send_eof()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """As `trio.SocketStream.receive_some`."""
        return await self._stream.receive_some(max_bytes)

    async def send_urgent(self, data: bytes | bytearray | memoryview) -> None:
        """By MSG_OOB."""
        await self._urgent.send(self._stream, _some_bytes(data))

    async def wait_urgent(self) -> UrgentState:
        """Wait for the exceptional condition of the socket."""
        return await self._urgent.wait()

    async def receive_urgent(self) -> bytes:
        """By MSG_OOB."""
        return await self._urgent.receive()

    async def aclose(self) -> None:
        """As `trio.SocketStream.aclose`."""
        self._urgent.closing()
        await self._stream.aclose()

    def statistics(self) -> StreamStatistics:
        """All zero."""
        return StreamStatistics()

    def setsockopt(
        self, level: int, option: int, value: int | Buffer | None, length: int | None = None
    ) -> None:
        """As `trio.SocketStream.setsockopt`."""
        if length is None and value is not None:
            self._stream.setsockopt(level, option, value)
        else:
            # It knows what is wrong with the rest of the combinations.
            self._stream.setsockopt(level, option, value, length)  # type: ignore[arg-type]

    def getsockopt(self, level: int, option: int, buffersize: int = 0) -> int | bytes:
        """As `trio.SocketStream.getsockopt`."""
        return self._stream.getsockopt(level, option, buffersize)

    def is_readable(self) -> bool:
        """As `trio.socket.SocketType.is_readable`."""
        return self.socket.fileno() < 0 or self.socket.is_readable()

    def abort(self) -> None:
        """Close with RST."""
        self._urgent.closing()
        close_with_reset(self.socket)


class RdmaStream(RdmaUrgent, SmcStream):
    """A connection whose bytes travel by RDMA writes."""

    mode = Mode.SMC_R
    fallback = None
    socket: SmcSocket
    _closed = True  # until there is something to close

    def __init__(
        self, stack: Stack, endpoint: Endpoint, sock: trio.socket.SocketType, config: Config
    ) -> None:
        self.socket = SmcSocket(sock)
        self.link_group = stack.view(endpoint.group)
        self._endpoint = endpoint
        self._core = endpoint.connection
        self._pump = stack.pump
        self._drain = stack.pump.drain
        self._token = trio.lowlevel.current_trio_token()
        self._closed = False
        self._sending = False
        self._receiving = False
        self._strict = config.checkpoints == "strict"
        self._calls = 0
        self._yielded = 0
        self._options = StreamOptions(
            self._core,
            endpoint.group,
            sock,
            stack.timers,
            None if self._strict else stack.pump.flush_later,
        )

    def __del__(self) -> None:
        """A stream that nobody closed is reset."""
        endpoint = self._endpoint
        if self._closed or endpoint.abandoned:
            return
        # The collector may run in any thread, and in the middle of anything.
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(endpoint.forgotten)
        warnings.warn(f"unclosed stream {self!r}", ResourceWarning, source=self, stacklevel=1)

    # --- sending ---------------------------------------------------------------------------

    async def send_urgent(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of ``data``, its last byte as urgent; see `SmcStream.send_urgent`."""
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        self._sending = True
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            if self._closed or self._core.write_closed:
                raise trio.ClosedResourceError("the stream was closed for sending")
            parked = await self._send_view(_some_bytes(data), urgent=True)
            if not parked and (self._strict or self._is_due()):
                await _yield()
        finally:
            self._sending = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of ``data``; returns when it is written or safely kept.

        Raises:
          trio.ClosedResourceError: this side closed or shut down the stream.
          trio.BrokenResourceError: the connection failed, or the peer has closed it.
          trio.BusyResourceError: another task is sending.
        """
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        self._sending = True
        try:
            await _check_cancelled()
            if self._closed or self._core.write_closed:
                raise trio.ClosedResourceError("the stream was closed for sending")
            view = _flat(data)
            parked = False
            if not view:
                self._check_sendable()
            elif type(view.obj) is not bytes:
                parked = await self._send_view(view)
            else:
                # Bytes that fit, the usual case, need none of its care.
                sent = self._send_some(view, False)
                if sent < len(view):
                    parked = await self._send_view(view, sent)
            if not parked and (self._strict or self._is_due()):
                await _yield()
        finally:
            self._sending = False

    async def _send_view(self, view: memoryview, sent: int = -1, *, urgent: bool = False) -> bool:
        """Send all of it; True when that took waiting.  ``sent``: of a first try, -1: none."""
        core = self._core
        parked = False
        rest = view
        try:
            if sent < 0:
                sent = self._send_some(rest, urgent)
            while sent < len(rest):
                rest = rest[sent:]
                parked = await self._park(_WRITER) or parked
                if self._closed:
                    raise trio.ClosedResourceError("the stream was closed")
                sent = self._send_some(rest, urgent)
            while core.borrowed:
                parked = await self._park(_WRITER) or parked
        finally:
            if urgent:
                core.withdraw_urgent()  # unless all of it is sent
            # The caller may change or resize its buffer, whatever happened here.
            if core.borrowed:
                core.keep_copies()
            if type(view.obj) is not bytes:
                rest.release()
                view.release()
        return parked

    def _send_some(self, view: memoryview, urgent: bool) -> int:
        try:
            return self._core.send_urgent(view) if urgent else self._core.send(view)
        except OSError as error:
            raise self._translated(error) from error

    def _check_sendable(self) -> None:
        core = self._core
        if core.error is not None or core.got_closed:
            raise trio.BrokenResourceError("the connection is broken") from core.error

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until `send_all` might not block; see `trio.abc.SendStream`."""
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        self._sending = True
        try:
            await _check_cancelled()
            core = self._core
            if self._closed:
                raise trio.ClosedResourceError("the stream was closed")
            parked = False
            while not (core.can_send or core.write_closed or core.got_closed or core.error):
                parked = await self._park(_WRITER) or parked
                if self._closed:
                    raise trio.ClosedResourceError("the stream was closed")
            if not parked and (self._strict or self._is_due()):
                await _yield()
        finally:
            self._sending = False

    async def send_eof(self) -> None:
        """Tell the peer that nothing more will be sent (RFC 7609, 4.8.1); idempotent."""
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        self._sending = True
        try:
            await trio.lowlevel.checkpoint()
        finally:
            self._sending = False
        if self._closed:
            raise trio.ClosedResourceError("the stream was closed")
        if self._core.error is not None:
            raise trio.BrokenResourceError("the connection is broken") from self._core.error
        self._core.shutdown_write()

    # --- receiving -------------------------------------------------------------------------

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Receive at least one byte and at most ``max_bytes``; b"" at the end of the stream.

        Raises:
          trio.ClosedResourceError: this side closed the stream.
          trio.BrokenResourceError: the connection failed.
          trio.BusyResourceError: another task is receiving.
        """
        if max_bytes is None:
            max_bytes = _DEFAULT_RECEIVE
        else:
            max_bytes = operator.index(max_bytes)
            if max_bytes < 1:
                raise ValueError("max_bytes must be >= 1")
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving on this stream")
        self._receiving = True
        try:
            await _check_cancelled()
            parked = False
            while True:
                if self._closed:
                    raise trio.ClosedResourceError("the stream was closed")
                try:
                    data = self._core.receive(max_bytes)
                except OSError as error:
                    raise self._translated(error) from error
                if data or self._core.at_eof:
                    break
                parked = await self._park(_READER) or parked
            if not parked and (self._strict or self._is_due()):
                await _yield()
            return data
        finally:
            self._receiving = False

    # --- ending ----------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Close: what was sent still arrives, then the peer sees the end (RFC 7609, 4.8.1).

        Returns when own data and the end have reached the peer's memory, so that this process may
        exit at once; not when the peer has closed too.
        With unread data the connection is reset instead.  Under cancellation it still closes.
        SO_LINGER bounds the wait; with 0 s it makes this an `abort`.
        """
        if self._closed:
            await trio.lowlevel.checkpoint()
            return
        patience = self._options.linger
        if patience == 0:
            self.abort()
        else:
            self._close_now()
        core = self._core
        try:
            with trio.move_on_after(math.inf if patience is None else patience):
                while core.ending:
                    await self._park(_WRITER)
        finally:
            await trio.lowlevel.checkpoint()

    def _close_now(self) -> None:
        self._closed = True
        self._endpoint.closed_by_user = True
        self._drain()
        self._core.close()
        self._wake_waiters()

    def _wake_waiters(self) -> None:
        # The core wakes them when its state changes; a close that waits for data changes none.
        core = self._core
        for waiter in (_READER, _WRITER, URGENT):
            wake = getattr(core, waiter)
            if wake is not None:
                setattr(core, waiter, None)
                wake()

    def abort(self) -> None:
        """Reset the connection at once (RFC 7609, 4.8.2)."""
        self._closed = True
        self._endpoint.closed_by_user = True
        self._core.abort()

    def statistics(self) -> StreamStatistics:
        """Counters of this connection."""
        return self._core.statistics()

    def setsockopt(
        self, level: int, option: int, value: int | Buffer | None, length: int | None = None
    ) -> None:
        """Set a socket option; docs/socket-options.md says what each does."""
        self._check_descriptor()
        self._options.set(level, option, value, length)

    def getsockopt(self, level: int, option: int, buffersize: int = 0) -> int | bytes:
        """The value of a socket option."""
        self._check_descriptor()
        return self._options.get(level, option, buffersize)

    def _check_descriptor(self) -> None:
        if self._closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    def is_readable(self) -> bool:
        """Whether there is data, the end or an error; looks at completions first."""
        self._drain()
        core = self._core
        return bool(self._closed or core.readable or core.at_eof or core.error is not None)

    # --- waiting ---------------------------------------------------------------------------

    async def _park(self, waiter: str) -> bool:
        """Wait until the core calls its ``waiter``; False if it did before anybody slept."""
        core, pump = self._core, self._pump
        setattr(core, waiter, _nothing)
        self._drain()
        if getattr(core, waiter) is None:
            return False
        if waiter is _READER and not pump.waiting:
            pump.try_spin(lambda: core.on_readable is None)
            if core.on_readable is None:
                return False

        def abort(_: RaiseCancelT) -> Abort:
            setattr(core, waiter, None)
            return _ABORTED

        setattr(core, waiter, partial(_reschedule, trio.lowlevel.current_task()))
        pump.waiting += 1
        try:
            await _sleep(abort)
        finally:
            pump.waiting -= 1
        return True

    def _is_due(self) -> bool:
        """Whether an amortised checkpoint is to be a full one."""
        self._calls += 1
        now = time.perf_counter_ns()
        if self._calls < _YIELD_EVERY_CALLS and now - self._yielded < _YIELD_EVERY_NS:
            return False
        self._calls = 0
        self._yielded = now
        return True

    def _translated(self, error: OSError) -> Exception:
        if self._closed or self._endpoint.abandoned:
            return trio.ClosedResourceError("the stream was closed")
        return trio.BrokenResourceError(f"the connection is broken: {error.strerror}")


def _flat(data: bytes | bytearray | memoryview) -> memoryview:
    """A view of ``data`` as single bytes."""
    view = memoryview(data)
    if view.format != "B" or view.ndim != 1 or not view.c_contiguous:
        view = memoryview(bytes(view))
    return view


def _some_bytes(data: bytes | bytearray | memoryview) -> memoryview:
    view = _flat(data)
    if not view:
        raise ValueError("at least one byte is urgent")
    return view


# A program that asks for a SocketStream asks for what both have: `socket` with its names,
# `setsockopt` and `getsockopt`.  trio-websocket and httpcore refuse TLS streams over anything else.
trio.SocketStream.register(RdmaStream)
trio.SocketStream.register(TcpStream)
