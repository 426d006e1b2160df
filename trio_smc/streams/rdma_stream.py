"""`RdmaStream`, the SMC-R stream: calls, errors and checkpoints around a connection core.

Theory of operation.  The core (`trio_smc.datapath.connection`) never waits: it sends or returns
what it can at the moment.  A call of the stream tries, and while there is nothing to send or to
return, it waits in `Parking` until the core calls it back.

Checkpoints: every call checks for cancellation.  A call that has parked needs no other checkpoint.
A call that finds everything ready yields only if the pass is over its budget
(`trio_smc.stack.budget`), or always with `Config(checkpoints="strict")`, which makes every call a
full Trio checkpoint.  It yields after its work: if the peer runs in the same scheduler, its task
can then continue in the same pass.  A call that fails without a wait always yields, as with Trio's
sockets: a program that repeats such a call lets other tasks run.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, Final, ParamSpec, Protocol, TypeVar

import trio

from trio_smc._base.interrupts import ki_protected
from trio_smc._base.reasons import Fallback, Mode
from trio_smc._base.statistics import StreamStatistics
from trio_smc.host.mapped import PIECE, copies_of, may_fault, store
from trio_smc.streams.parking import (
    BROKEN,
    BUSY_DESCRIPTOR,
    BUSY_SENDING,
    CLOSED,
    CLOSED_MEANWHILE,
    Busy,
    Parking,
    SocketBusy,
)
from trio_smc.streams.socket_options import StreamOptions
from trio_smc.streams.stream import (
    NO_MORE_URGENT,
    STILL_IN_USE,
    ReceiveView,
    SmcSocket,
    SmcStream,
    UrgentState,
    byte_view,
    checked_size,
    nonempty_byte_view,
    urgent_inline_error,
    writable_byte_view,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Buffer

    from trio_smc._base.timers import Timers
    from trio_smc.config.config import Config
    from trio_smc.datapath.connection import Connection
    from trio_smc.rnic.pump import Pump
    from trio_smc.stack.budget import Budget
    from trio_smc.streams.group_views import LinkGroupView
    from trio_smc.streams.socket_options import Inherited, KeepaliveGroup

__all__ = [
    "SENT_EOF",
    "RdmaStream",
    "StreamEndpoint",
    "StreamOwner",
]


class StreamOwner(Protocol):
    """The stack, as seen by its streams."""

    pump: Pump
    budget: Budget
    timers: Timers


class StreamEndpoint(Protocol):
    """The stack's record of a connection, as seen by its stream."""

    connection: Connection
    closed_by_user: bool
    """The stream was closed, or shut down for both directions; set by the stream."""
    lingers: bool
    """SO_LINGER is on; set by the stream."""
    abandoned: bool
    """The connection was closed because its stack was left."""
    on_tcp_end: Callable[[], None] | None
    """Called before TCP ends under an open stream; set by the stream."""
    close_socket: Callable[[bool], None] | None
    """Ends the TCP connection, by RST if its argument is True; set by the stream."""

    @property
    def group(self) -> KeepaliveGroup:
        """The connection's link group."""

    def forgotten(self) -> None:
        """The stream was garbage-collected without having been closed."""


_DEFAULT_RECEIVE: Final = 131072
"""Bytes of `receive_some` without a size.  Measured: docs/decisions.md, "how much `receive_some`
takes if no size is given"."""
# Trio's texts: programs compare them.
SENT_EOF: Final = "can't send data after sending EOF"
_CLOSED_WITHOUT_DATA: Final = "socket was already closed"
# Looked up once, because each call needs them.
_yield: Final = trio.lowlevel.cancel_shielded_checkpoint
_check_cancelled: Final = trio.lowlevel.checkpoint_if_cancelled

_Taken = TypeVar("_Taken", int, bytes, memoryview)
_Argument = TypeVar("_Argument")
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def _checked(max_bytes: int | None) -> int:
    """``max_bytes`` as an integer, with its default.  Raises ValueError if it is not positive."""
    return _DEFAULT_RECEIVE if max_bytes is None else checked_size(max_bytes)


def _keep_facts(sock: SmcSocket, options: StreamOptions) -> None:
    """Keep what a program may ask about a TCP connection that ends before its stream."""
    sock.keep_names()
    options.keep_values()


@ki_protected
class RdmaStream(SmcStream):
    """A connection whose bytes travel by RDMA writes.

    Attributes:
      write_shut: `send_eof` or shutdown(2) has ended sending, perhaps before the stream was closed.
    """

    mode = Mode.SMC_R
    fallback: Fallback | None = None
    socket: SmcSocket
    _closed = True  # until there is something to close
    _read_shut = True

    def __init__(
        self,
        stack: StreamOwner,
        endpoint: StreamEndpoint,
        link_group: LinkGroupView,
        sock: trio.socket.SocketType,
        config: Config,
        peer_name: Any = None,
    ) -> None:
        """``peer_name``: the peer's address; see `SmcSocket`."""
        self.socket = SmcSocket(sock, peer_name)
        self.link_group: LinkGroupView | None = link_group
        self._endpoint = endpoint
        self._core = core = endpoint.connection
        # Shortcuts, because each call needs them.
        self._receiver, self._sender = core.receiver, core.sender
        self._pump = stack.pump
        strict = config.checkpoints == "strict"
        self._parking = Parking(core, stack.pump, stack.budget, strict=strict)
        core.messenger.update_later = stack.pump.flush_soon
        self._token = trio.lowlevel.current_trio_token()
        self._closed = False
        self._read_shut = False  # closed, or shut down for reading
        self.write_shut: bool = False
        self._sending = Busy(BUSY_SENDING)
        self._socket_sending = SocketBusy(self._sending)
        self._receiving = Busy(BUSY_DESCRIPTOR)
        self._taking_urgent = Busy(BUSY_DESCRIPTOR)
        self._options = StreamOptions(
            core,
            endpoint.group,
            sock,
            stack.timers,
            None if strict else stack.pump.flush_later,
        )
        # No bound method: the endpoint must not keep alive a stream that the program has dropped.
        endpoint.on_tcp_end = partial(_keep_facts, self.socket, self._options)
        endpoint.close_socket = self.socket.close_tcp

    def inherit(self, options: Inherited) -> None:
        """Apply the options that were set on the TCP connection."""
        self._options.inherit(options)

    def __del__(self) -> None:
        """Close a stream that was not closed, as close(2) closes a socket."""
        endpoint = self._endpoint
        if self._closed:
            return
        self.socket.free_number()
        if endpoint.abandoned:
            return
        # The garbage collector may run in any thread, and in the middle of any other code.
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(endpoint.forgotten)
        warnings.warn(f"unclosed stream {self!r}", ResourceWarning, source=self, stacklevel=1)

    # --- sending ---------------------------------------------------------------------------

    async def send_urgent(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of ``data``, its last byte as urgent; see `SmcStream.send_urgent`."""
        with self._sending:
            await _check_cancelled()
            self._drain_if_solo()
            if self._closed or self._core.write_closed:
                await _yield()
                self._check_open_for_sending()
            parked = await self._send_view(nonempty_byte_view(data), urgent=True)
            await self._parking.end_call(parked)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of ``data``; return when the data is written or copied.

        Raises:
          trio.ClosedResourceError: this side closed or shut down the stream.
          trio.BrokenResourceError: the connection failed, or the peer has closed it and an earlier
            call has sent data since.  As over TCP, the first send after the peer's close succeeds.
          trio.BusyResourceError: another task is sending.
        """
        sending = self._sending
        if sending.taken:  # inlined `Busy`
            await self._send_beside_another(data)
            return
        sending.taken = True
        try:
            try:
                await _check_cancelled()
            except trio.Cancelled:
                self._check_sending_first(data)
                raise
            pump, sender = self._pump, self._sender
            if pump.machine.state == "SOLO":  # inlined `_drain_if_solo`
                pump.dispatcher.drain_if_pending()
            parked = False
            if type(data) is bytes and data and sender.sendable and sender.send_limit is None:
                # The usual case: bytes that fit.  `_send_view` is not needed: they cannot change.
                # `sendable` shows that sending has not ended, either.
                try:
                    sent = sender.send(data)  # inlined `Connection.send`
                except OSError as error:
                    raise await self._error_after_yield(error) from error
                if sent < len(data):
                    parked = await self._send_view(memoryview(data), sent)
            else:
                if self._closed or self._core.write_closed:
                    self._check_sending_first(data)
                    await _yield()  # as Trio's stream, which knows only that it has shut down
                    self._check_open_for_sending()
                if view := byte_view(data):
                    if may_fault(view):
                        parked = await self._send_copies(view)
                    else:
                        parked = await self._send_view(view)
            if not parked:  # inlined `Parking.end_call`
                parking = self._parking
                if parking.strict or parking.budget.is_exceeded():
                    await _yield()
        finally:
            sending.taken = False

    async def send_some(self, data: Buffer, *, more: bool = False) -> int:
        """Send at least one byte of ``data``, and as many as there is room for; for sockets.

        A call that waits holds no view of ``data``, so that the program may resize its buffer, and
        only calls that wait exclude each other, as with a socket of Trio.

        Args:
          data: bytes in any C-contiguous buffer that is not a mapped file (`trio_smc.host.mapped`).
          more: MSG_MORE: the bytes may be announced together with those of the next call.

        Returns:
          The number of bytes sent; 0 only for an empty buffer.  A cancelled call sends none.

        Raises:
          BufferError: the buffer is not contiguous.
          trio.ClosedResourceError, trio.BrokenResourceError, trio.BusyResourceError: as
            `send_all`.
        """
        core, sending = self._core, self._sending
        if sending.taken and core.messenger.urgent_goal:
            raise sending.error()  # these bytes must not come between those of an urgent send
        await _check_cancelled()
        pump, sender = self._pump, self._sender
        if pump.machine.state == "SOLO":  # inlined `_drain_if_solo`
            pump.dispatcher.drain_if_pending()
        sent, parked = 0, False
        try:
            if sender.sendable and sender.send_limit is None and not more:
                # The usual case: data that fits.  Bytes cannot change, so they need no view.
                # AnyIO sends views.
                piece = data if type(data) is bytes else byte_view(data, strided=False)
                if piece:
                    sent = sender.send(piece)  # inlined `Connection.send`
                del piece
        except OSError as error:
            raise await self._error_after_yield(error) from error
        except Exception:
            await _yield()
            raise
        if not sent:
            sent, parked = await self._send_when_there_is_room(data, more=more)
        if sender.borrowed:
            sender.keep_copies()  # the caller may change its buffer from now on
        if sending.taken:
            core.wake_all()  # a call that waits for room announces again that it is blocked
        if not parked:  # inlined `Parking.end_call`
            parking = self._parking
            if parking.strict or parking.budget.is_exceeded():
                await _yield()
        return sent

    async def _send_when_there_is_room(self, data: Buffer, *, more: bool) -> tuple[int, bool]:
        """Send as `send_some`; returns the number of bytes, and True if the call has parked."""
        core, sent, parked = self._core, 0, False
        send = partial(self._options.send_more, core) if more else core.send
        try:
            while not sent:
                view = byte_view(data, strided=False)
                if self._closed or core.write_closed:
                    self._check_open_for_sending()
                if not view:
                    self._translating(core.check_sendable)
                    break
                sent = self._translating(send, view)
                if not sent:
                    del view
                    with self._socket_sending:
                        parked = await self._parking.writer() or parked
        except Exception:
            await self._parking.end_failed_call(parked)
            raise
        return sent, parked

    async def _send_copies(self, view: memoryview) -> bool:
        """Send all of ``view`` as `_send_view` does, by copies of its pieces."""
        parked = False
        pieces = copies_of(view)
        while True:
            try:
                piece = next(pieces, b"")
            except OSError as error:
                if parked:
                    raise self._translated(error) from error
                raise await self._error_after_yield(error) from error
            if not piece:
                return parked
            parked = await self._send_view(memoryview(piece)) or parked

    async def _send_view(self, view: memoryview, sent: int = -1, *, urgent: bool = False) -> bool:
        """Send all of ``view``; True if the call has parked.

        ``sent``: bytes that a first try has sent; -1: there was no first try.
        """
        core = self._core
        send = core.send_urgent if urgent else core.send
        parked = False
        rest = view
        try:
            if sent < 0:
                sent = self._translating(send, rest)
            while sent < len(rest):
                rest = rest[sent:]
                if core.error is None:  # otherwise nothing would wake this task
                    parked = await self._parking.writer() or parked
                self._check_open(waited=parked)
                sent = self._translating(send, rest)
            while core.sender.borrowed:
                parked = await self._parking.writer() or parked
        except trio.BrokenResourceError:
            await self._parking.end_failed_call(parked)
            raise
        finally:
            if urgent:
                core.sender.withdraw_urgent()  # no-op if all data was sent
            # After this call the caller may change or resize its buffer, even if the call failed.
            if core.sender.borrowed:
                core.sender.keep_copies()
            if type(view.obj) is not bytes:
                rest.release()
                view.release()
        return parked

    def _drain_if_solo(self) -> None:
        """Learn before a send that the peer has ended: in solo mode no hook drains in each pass,
        and the task that reads may be busy with other work."""
        if self._pump.machine.state == "SOLO":
            self._pump.dispatcher.drain_if_pending()

    def _catch_up(self) -> None:
        """Learn of an end that the hooks of the pump and `TcpWatch` have not noticed yet."""
        self._pump.drain_if_pending()
        self._core.notice_tcp_reset()

    async def _send_beside_another(self, data: Buffer) -> None:
        """A send beside another call: an error, unless that call is one of the socket, and there is
        no data.  As with Trio's stream, the error of a shutdown comes first."""
        if self.write_shut:
            raise trio.ClosedResourceError(SENT_EOF)
        if not self._sending.by_socket or memoryview(data).nbytes:
            raise self._sending.error()
        if self._closed:
            raise trio.ClosedResourceError(_CLOSED_WITHOUT_DATA)
        await trio.lowlevel.checkpoint()

    def _check_open(self, *, waited: bool = False) -> None:
        """``waited``: the call has waited, so another task has closed the stream meanwhile."""
        if self._closed:
            raise trio.ClosedResourceError(CLOSED_MEANWHILE if waited else CLOSED)

    def _check_sending_first(self, data: object) -> None:
        """Raise what Trio's stream raises before it looks for a cancellation."""
        if self.write_shut:
            raise trio.ClosedResourceError(SENT_EOF) from None
        if not memoryview(data).nbytes and self._closed:  # type: ignore[arg-type]
            raise trio.ClosedResourceError(_CLOSED_WITHOUT_DATA) from None

    def _check_open_for_sending(self) -> None:
        if self._closed or self._core.write_closed:
            raise trio.ClosedResourceError(CLOSED if self._closed else SENT_EOF)

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until `send_all` might not block; see `trio.abc.SendStream`."""
        with self._sending:
            if self._closed:
                raise trio.ClosedResourceError  # as Trio, without a text
            await _check_cancelled()
            core = self._core
            self._check_open()
            parked = False
            while not (core.sender.can_send or core.write_closed or core.got_closed or core.error):
                parked = await self._parking.writer() or parked
                self._check_open(waited=True)
            await self._parking.end_call(parked)

    async def wait_writable(self) -> None:
        """As `wait_send_all_might_not_block`, for sockets: only calls that wait exclude each
        other."""
        await _check_cancelled()
        core = self._core
        self._check_open()
        parked = False
        while not (core.sender.can_send or core.write_closed or core.got_closed or core.error):
            with self._socket_sending:
                parked = await self._parking.writer() or parked
            self._check_open(waited=True)
        await self._parking.end_call(parked)

    async def send_eof(self) -> None:
        """End this side of the stream (RFC 7609, 4.8.1); receiving stays possible.

        Idempotent, also if the stream was closed in between.
        """
        with contextlib.nullcontext() if self._sending.by_socket else self._sending:
            await trio.lowlevel.checkpoint()
        if not self.write_shut:
            self.shut_down_writing()

    def shut_down_writing(self) -> None:
        """As `send_eof`, without its checkpoint.

        Raises:
          trio.ClosedResourceError, trio.BrokenResourceError: as `send_eof`.
        """
        self._check_can_shut_down()
        if self._read_shut:
            # Not D first: data that answers it would count as arrived before the shutdown.
            self._shut_both()
        else:
            self._core.shutdown_write()
            self.write_shut = True

    def _check_can_shut_down(self) -> None:
        """Raise if the connection has ended: the errors of shutdown(2)."""
        self._check_open()
        self._catch_up()
        core = self._core
        if core.error is not None or (core.write_closed and core.receiver.peer_done):
            error = OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
            raise self._translated(error) from error

    # --- receiving -------------------------------------------------------------------------

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Receive at least one byte and at most ``max_bytes`` (128 KiB if None); b"" at the
        end of the stream.

        Raises:
          trio.ClosedResourceError: this side closed the stream.
          trio.BrokenResourceError: the connection failed.  All data that had arrived is returned
            first.  As over TCP, only one call reports the error; later calls return b"".
          trio.BusyResourceError: another task is receiving.
        """
        most = max_bytes if type(max_bytes) is int and max_bytes > 0 else _checked(max_bytes)
        receiving = self._receiving
        if receiving.taken:  # inlined `Busy`
            raise receiving.error()
        receiving.taken = True
        try:
            receiver, parking = self._receiver, self._parking
            parked, data = False, b""
            if receiver.received != receiver.consumed or (
                receiver.peer_done or receiver.error or self._read_shut
            ):
                await _check_cancelled()
            # Inlined `Receiver.is_blank`: trying to receive would find nothing.
            elif self._pump.waiting:
                parked = await parking.reader()
                if not parked:
                    await _check_cancelled()
            else:
                # The only task that waits may spin, and no other task runs meanwhile.  So the check
                # comes first, while the peer is busy, and does not delay data that has arrived.
                await _check_cancelled()
                parked = await parking.reader()
            while not self._read_shut:
                try:
                    data = receiver.receive(most)
                except OSError as error:
                    raise await self._receive_error(error, parked) from error
                if data or receiver.at_eof:
                    break
                parked = await parking.reader() or parked
            else:
                data = await self._read_rest(receiver.receive, most, parked)
        finally:
            receiving.taken = False
        if not parked:
            pump = self._pump
            if not pump.waiting:
                solo = pump.solo
                solo.reads += 1
                if solo.last_reader is not parking.identity:
                    solo.change_reader(parking.identity)
            if parking.strict or parking.budget.is_exceeded():
                await _yield()  # inlined `Parking.end_call`
        return data

    async def receive_some_into(self, buffer: Buffer) -> int:
        """Receive into a buffer of the caller; see `SmcStream.receive_some_into`."""
        with writable_byte_view(buffer) as view:
            take = self._copy_into if may_fault(view) else self._receiver.receive_into
            return await self._receive(take, view)

    def _copy_into(self, view: memoryview) -> int:
        """`Receiver.receive_into` for memory whose access might end this process.

        Raises:
          OSError: EFAULT: the memory is not there.  The bytes can be received again.
        """
        receiver = self._receiver
        if data := receiver.peek(min(len(view), PIECE)):
            store(data, view)
            receiver.discard(len(data))
        return len(data)

    def receive_view(self, max_bytes: int | None = None) -> ReceiveView:
        """Lend a view of the ring; see `SmcStream.receive_view`."""
        return _RingView(self, sys.maxsize if max_bytes is None else checked_size(max_bytes))

    async def lend(self, max_bytes: int) -> memoryview:
        """Wait for `Receiver.lend`; no other task can receive until `take_back`."""
        view = await self._receive(self._receiver.lend, max_bytes)
        self._receiving.taken = True
        return view

    def take_back(self, count: int) -> bool:
        """See `Receiver.take_back`."""
        self._receiving.taken = False
        return self._receiver.take_back(count)

    async def _receive(self, take: Callable[[_Argument], _Taken], argument: _Argument) -> _Taken:
        """Wait until ``take`` returns something, and return that; or nothing at the end."""
        with self._receiving:
            await _check_cancelled()
            parked = False
            while True:
                if self._read_shut:
                    taken = await self._read_rest(take, argument, parked)
                    break
                try:
                    taken = take(argument)
                except OSError as error:
                    raise await self._receive_error(error, parked) from error
                if taken or self._receiver.at_eof:
                    break
                parked = await self._parking.reader() or parked
            await self._parking.end_call(parked)
            return taken

    async def _receive_error(self, error: OSError, parked: bool) -> Exception:
        """The stream's error for one of the core; yields unless the call has ``parked``."""
        if parked:
            return self._translated(error)
        self._receiving.taken = False
        return await self._error_after_yield(error)

    async def _error_after_yield(self, error: OSError) -> Exception:
        """The stream's error for one of the core, as it was before the yield."""
        translated = self._translated(error)
        await _yield()
        return translated

    async def _read_rest(
        self, take: Callable[[_Argument], _Taken], argument: _Argument, parked: bool
    ) -> _Taken:
        """Take data that has arrived, because this side has shut down reading.

        Args:
          parked: the call has waited.

        Raises:
          trio.ClosedResourceError: this side closed the stream.
        """
        if self._closed and not parked:
            self._receiving.taken = False  # the next task gets the same error
            await _yield()
        self._check_open(waited=parked)
        self._pump.drain_if_pending()
        return self._translating(take, argument)

    # The methods from here to `shut_down_reading` are for sockets.

    async def receive_by(
        self, take: Callable[[], _Result | None], *, urgent: bool = False
    ) -> _Result:
        """Wait until ``take`` returns something, and return that.

        Only calls that wait exclude each other, as with a socket of Trio.

        Args:
          take: calls the ``try_...`` methods below, or asks the stream for its state.
          urgent: wait for a change of urgent data.

        Raises:
          Exception: whatever ``take`` raises, with the errors of the connection translated.
          trio.ClosedResourceError, trio.BrokenResourceError, trio.BusyResourceError: as
            `receive_some`.
        """
        busy, wait = (
            (self._taking_urgent, self._parking.urgent)
            if urgent
            else (self._receiving, self._parking.reader)
        )
        await _check_cancelled()
        parked = False
        try:
            while True:
                self._check_open(waited=parked)
                taken = take()
                if taken is not None:
                    break
                with busy:
                    parked = await wait() or parked
        except Exception:
            await self._parking.end_failed_call(parked)
            raise
        await self._parking.end_call(parked)
        return taken

    def try_receive(self, most: int, *, peek: bool) -> bytes | None:
        """Take at most ``most`` bytes; b"" at the end, None if nothing has arrived.

        Args:
          most: positive.
          peek: the bytes stay in the stream.
        """
        if self._read_shut:
            self._pump.drain_if_pending()
        receiver = self._receiver
        data = self._translating(receiver.peek if peek else receiver.receive, most)
        return data if data or self._read_shut or receiver.at_eof else None

    def try_discard(self, most: int, *, peek: bool) -> int | None:
        """As `try_receive`, but return only the number of bytes."""
        receiver = self._receiver
        count = self._translating(receiver.measure if peek else receiver.discard, most)
        return count if count or self._read_shut or receiver.at_eof else None

    def try_receive_urgent(self, *, peek: bool) -> bytes | None:
        """Take the urgent byte, as recv(2) with MSG_OOB does; None if it has not arrived yet.

        Args:
          peek: the byte can be taken again.

        Raises:
          OSError: EINVAL: there is no urgent byte, or it stays in the stream.
        """
        self._pump.drain_if_pending()
        receiver = self._receiver
        state = "none" if receiver.urgent_inline else receiver.urgent
        if state == "none":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        byte = receiver.peek_urgent() if peek else self._translating(receiver.receive_urgent)
        return None if byte is None else bytes((byte,))

    def end_waits(self) -> None:
        """Make the calls that wait raise ClosedResourceError; later calls work as before."""
        self._parking.end_waits()

    @property
    def is_abandoned(self) -> bool:
        """True if the stack was left while the stream was open."""
        return self._endpoint.abandoned

    @property
    def has_ended(self) -> bool:
        """True if the connection is over in both directions, as a socket in TCP's state CLOSE."""
        self._catch_up()
        core = self._core
        return core.error is not None or bool(
            core.write_closed and self._receiver.peer_done and not (core.unsent or core.eof_pending)
        )

    def shut_down_reading(self) -> None:
        """End the stream for its reader after the data that has arrived; the peer is not
        notified."""
        self._read_shut = True
        if self.write_shut:
            self._shut_both()
        self._parking.wake_reader()

    def shut_down_both(self) -> None:
        """End both directions, by a close of the connection (RFC 7609, 4.8.1, 3A).

        The stream object stays open: a reader finds the end of the stream, and a later `close` has
        nothing to do at the connection.

        If data is unread, such a close would reset the connection, where TCP sends its FIN and
        leaves the data readable.  Then only the sending direction ends now, and `close` does the
        rest.  In both cases data that arrives from now on resets the connection, as over TCP.

        Raises:
          trio.ClosedResourceError, trio.BrokenResourceError: as `shut_down_writing`.
        """
        self._check_can_shut_down()
        self._shut_both()

    def _shut_both(self) -> None:
        """As `shut_down_both`; one direction may have ended before."""
        self.socket.keep_names()
        self._pump.drain()  # data that has just arrived is unread, too
        self._core.refuse_data()
        if self._core.unread:
            self._core.shutdown_write()
        else:
            self._end()
        self.write_shut = True

    # --- urgent data (RFC 7609, 4.7.5, 4.7.6) ------------------------------------------------

    async def wait_urgent(self) -> UrgentState:
        """Wait until the peer has urgent data; see `SmcStream.wait_urgent`."""
        with self._taking_urgent:
            await trio.lowlevel.checkpoint()
            self._check_open()
            while True:
                match self._receiver.urgent:
                    case "pending":
                        return "pending"
                    case "present":
                        return "present"
                if self._receiver.urgent_over:
                    self._translating(self._receiver.receive_urgent)  # raises if it has failed
                    raise trio.EndOfChannel(NO_MORE_URGENT)
                await self._parking.urgent()
                self._check_open(waited=True)

    async def receive_urgent(self) -> bytes:
        """Receive the urgent byte; see `SmcStream.receive_urgent`."""
        with self._taking_urgent:
            await trio.lowlevel.checkpoint()
            self._check_open()
            while True:
                if self._receiver.urgent_inline:
                    raise urgent_inline_error()
                byte = self._translating(self._receiver.receive_urgent)
                if byte is not None:
                    return bytes((byte,))
                if self._receiver.urgent_over:
                    raise trio.EndOfChannel(NO_MORE_URGENT)
                await self._parking.urgent()
                self._check_open(waited=True)

    # --- ending ----------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Close: data already sent still arrives, then the peer sees the end (RFC 7609, 4.8.1).

        Returns when this side's data and end have reached the peer's memory, so that this process
        may exit at once; the peer may close later.  If there is unread data, the connection is
        reset instead.  A cancelled call still closes the stream.  SO_LINGER limits the wait; with
        0 s the connection is aborted.
        """
        if self._closed:
            await trio.lowlevel.checkpoint()
            return
        linger = self._begin_ending()
        parked = False
        try:
            if linger is None:
                parked = await self._wait_for_end()
            else:
                with trio.move_on_after(linger):
                    parked = await self._wait_for_end()
        finally:
            if not parked:
                await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """`aclose` without the wait: data already sent still arrives, unless SO_LINGER is set with
        0 s.  Idempotent."""
        if not self._closed:
            self._begin_ending()

    def _begin_ending(self) -> int | None:
        linger = self._options.linger
        self._endpoint.lingers = linger is not None
        if linger == 0:
            self.abort()
        else:
            self._close_now()
        return linger

    async def _wait_for_end(self) -> bool:
        parked = False
        while self._core.ending:
            parked = await self._parking.writer() or parked
        return parked

    def _close_now(self) -> None:
        self._closed = True
        self.socket.free_number()
        self._end()

    def _end(self) -> None:
        self._read_shut = True
        self._pump.resume_hooks()  # they receive the peer's answer, for which no task waits
        if not self._endpoint.closed_by_user:
            self._endpoint.closed_by_user = True
            self._pump.drain()
            self._core.close()
        # The core wakes its waiters only at a change of state, and a close that waits for data is
        # none.
        self._core.wake_all()

    def abort(self) -> None:
        """Reset the connection at once (RFC 7609, 4.8.2)."""
        self._closed = self._read_shut = True
        self.socket.free_number()
        self._endpoint.closed_by_user = True
        self._pump.resume_hooks()
        self._core.abort()

    def statistics(self) -> StreamStatistics:
        """Counters of this connection."""
        return self._core.statistics()

    def setsockopt(
        self, level: int, option: int, value: int | Buffer | None, length: int | None = None
    ) -> None:
        """Set a socket option; docs/socket-options.md lists the effects."""
        self._check_descriptor()
        self._options.set(level, option, value, length)

    def getsockopt(self, level: int, option: int, buffersize: int = 0) -> int | bytes:
        """The value of a socket option."""
        self._check_descriptor()
        self._catch_up()
        return self._options.get(level, option, buffersize)

    def _check_descriptor(self) -> None:
        if self._closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    def is_readable(self) -> bool:
        """True if there is data, the end or an error; drains first."""
        self._pump.drain_if_pending()
        receiver = self._receiver
        return bool(
            self._read_shut or receiver.readable or receiver.at_eof or receiver.error is not None
        )

    # --- errors ----------------------------------------------------------------------------

    def _translating(
        self,
        call: Callable[_Parameters, _Result],
        *args: _Parameters.args,
        **kwargs: _Parameters.kwargs,
    ) -> _Result:
        """Call the core; raise its errors as those of a stream."""
        try:
            return call(*args, **kwargs)
        except OSError as error:
            raise self._translated(error) from error

    def _translated(self, error: OSError) -> Exception:
        if self._closed or self._endpoint.abandoned:
            return trio.ClosedResourceError(CLOSED_MEANWHILE)
        return trio.BrokenResourceError(BROKEN.format(error))


# See `SmcStream`.
trio.SocketStream.register(RdmaStream)


@ki_protected
class _RingView(ReceiveView):
    """A view of the ring of an `RdmaStream`."""

    def __init__(self, stream: RdmaStream, max_bytes: int) -> None:
        self._stream = stream
        self._max_bytes = max_bytes

    async def __aenter__(self) -> memoryview:
        return self._begin(await self._stream.lend(self._max_bytes))

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # A traceback keeps the variables of the block, and so its arrays.
        if not self._stream.take_back(self._end()) and error is None:
            raise BufferError(STILL_IN_USE)
