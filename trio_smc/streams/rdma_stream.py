"""`RdmaStream`, the SMC-R stream: waiting, errors and checkpoints around a connection core.

Theory of operation.  The core (`trio_smc.datapath.connection`) never waits: it takes or gives what
it can and calls its waiter, `on_readable`, `on_writable` or `on_urgent`, when there is more to be
had.  A call looks, and while there is nothing it parks until its waiter is called.

Checkpoints: every call is a full Trio checkpoint, as the stream contract wants.  A call that
parks has been one by that; one that finds everything ready yields once, behind its work, so that
the peer's task has something to do in the same pass of the scheduler
(`Config(checkpoints="amortised")`: cancellation is checked always, yielding only now and then).
"""

from __future__ import annotations

import contextlib
import errno
import operator
import os
import warnings
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import trio
from outcome import Outcome
from trio.lowlevel import Abort, RaiseCancelT

from trio_smc._base.reasons import Fallback, Mode
from trio_smc._base.statistics import StreamStatistics
from trio_smc.rnic.pump import UNHOOKED
from trio_smc.streams.socket_options import StreamOptions
from trio_smc.streams.stream import (
    OVER,
    SmcSocket,
    SmcStream,
    UrgentState,
    flat,
    inline_error,
    some_bytes,
    writable,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator, Iterator

    from typing_extensions import Buffer

    from trio_smc._base.timers import Timers
    from trio_smc.config.config import Config
    from trio_smc.datapath.connection import Connection
    from trio_smc.rnic.pump import Pump
    from trio_smc.stack.budget import Budget
    from trio_smc.streams.group_views import LinkGroupView
    from trio_smc.streams.socket_options import Inherited, KeptAlive

__all__ = [
    "RdmaStream",
    "StreamEndpoint",
    "StreamOwner",
]


class StreamOwner(Protocol):
    """What a stream wants of its stack."""

    pump: Pump
    budget: Budget
    timers: Timers


class StreamEndpoint(Protocol):
    """What a stream wants of the joint between its connection and the rest of the stack."""

    connection: Connection
    closed_by_user: bool
    """Set here: the stream was closed."""
    lingers: bool
    """Set here: SO_LINGER is on."""
    abandoned: bool
    """The connection was closed because its stack was left."""

    @property
    def group(self) -> KeptAlive:
        """The connection's link group."""

    def forgotten(self) -> None:
        """The stream was collected, and nobody had closed it."""


_DEFAULT_RECEIVE: Final = 131072
# What each call needs, looked up once.
_sleep: Final = trio.lowlevel.wait_task_rescheduled
_yield: Final = trio.lowlevel.cancel_shielded_checkpoint
_check_cancelled: Final = trio.lowlevel.checkpoint_if_cancelled
_current_task: Final = trio.lowlevel.current_task
_reschedule: Final = trio.lowlevel.reschedule
_ABORTED: Final = Abort.SUCCEEDED
_SELDOM: Final = 16
# Waiters of the core.
_READER: Final = "on_readable"
_WRITER: Final = "on_writable"
_URGENT: Final = "on_urgent"

_Taken = TypeVar("_Taken", int, bytes)
_Result = TypeVar("_Result")


def _checked(max_bytes: int) -> int:
    """As an integer.  Raises ValueError: it is not positive."""
    max_bytes = operator.index(max_bytes)
    if max_bytes < 1:
        raise ValueError("max_bytes must be >= 1")
    return max_bytes


def _nothing() -> None:
    """A waiter of somebody who is awake: that it is gone says that it was called."""


class _Woken(Outcome[None]):
    """What a sleeper wakes up with: nothing, as often as wanted, where `outcome.Value` is made anew
    each time."""

    __slots__ = ()

    def unwrap(self) -> None:
        """Nothing."""

    def send(self, gen: Generator[_Result, None, object]) -> _Result:
        """As for a value."""
        return gen.send(None)

    async def asend(self, agen: AsyncGenerator[_Result, None]) -> _Result:
        """As for a value."""
        return await agen.asend(None)


_WOKEN: Final = _Woken()


class _Sleeper:
    """The task that sleeps until the core calls one of its waiters."""

    __slots__ = ("_core", "_pump", "_waiter", "task")

    def __init__(self, core: Connection, pump: Pump, waiter: str) -> None:
        self._core = core
        self._pump = pump
        self._waiter = waiter
        self.task: trio.lowlevel.Task | None = None

    def wake(self) -> None:
        """What the core calls."""
        task, self.task = self.task, None
        assert task is not None
        self._pump.woken += 1
        _reschedule(task, _WOKEN)

    def abort(self, _: RaiseCancelT) -> Abort:
        """It was cancelled."""
        self.task = None
        setattr(self._core, self._waiter, None)
        return _ABORTED


class RdmaStream(SmcStream):
    """A connection whose bytes travel by RDMA writes."""

    mode = Mode.SMC_R
    fallback: Fallback | None = None
    socket: SmcSocket
    _closed = True  # until there is something to close
    _deaf = True

    def __init__(
        self,
        stack: StreamOwner,
        endpoint: StreamEndpoint,
        link_group: LinkGroupView,
        sock: trio.socket.SocketType,
        config: Config,
        accepted: Any = None,
    ) -> None:
        """``accepted``: of a server, the peer's address as ``accept`` gave it."""
        self.socket = SmcSocket(sock, accepted)
        self.link_group: LinkGroupView | None = link_group
        self._endpoint = endpoint
        self._core = core = endpoint.connection
        # Held by themselves: each call asks them.
        self._receiver, self._sender = core.receiver, core.sender
        core.messenger.tell_later = stack.pump.flush_soon
        self._pump = stack.pump
        self._budget = stack.budget
        # With its methods, which are made anew each time they are looked up.
        self._sleepers = {
            waiter: (sleeper, sleeper.wake, sleeper.abort)
            for waiter in (_READER, _WRITER, _URGENT)
            for sleeper in (_Sleeper(core, stack.pump, waiter),)
        }
        self._token = trio.lowlevel.current_trio_token()
        self._closed = False
        self._deaf = False  # closed, or shut down for reading
        self._sending = False
        self._receiving = False
        self._urgent_busy = False
        self._strict = config.checkpoints != "amortised"
        self._produced = 0  # bytes that had been sent when the last wait ended
        self._reader = object()  # this one to the pump, which must not keep it alive
        self._misses = 0  # readers that found nothing since a turn of others brought something
        self._options = StreamOptions(
            self._core,
            endpoint.group,
            sock,
            stack.timers,
            None if self._strict else stack.pump.flush_later,
        )

    def inherit(self, options: Inherited) -> None:
        """Act on the options that the TCP connection came with."""
        self._options.inherit(options)

    def __del__(self) -> None:
        """A stream that nobody closed is closed as close(2) closes a socket."""
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
            parked = await self._send_view(some_bytes(data), urgent=True)
            if not parked and (self._strict or self._budget.is_exceeded()):
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
            parked = False
            if type(data) is bytes and data:
                # Bytes that fit, the usual case, need none of `_send_view`'s care.
                sender = self._sender
                try:
                    if sender.sendable and sender.send_limit is None:
                        sent = sender.send(data)  # what that comes to
                    else:
                        sent = self._core.send(memoryview(data))
                except OSError as error:
                    raise self._translated(error) from error
                if sent < len(data):
                    parked = await self._send_view(memoryview(data), sent)
            elif view := flat(data):
                parked = await self._send_view(view)
            else:
                self._check_sendable()
            if not parked and (self._strict or self._budget.is_exceeded()):
                await _yield()
        finally:
            self._sending = False

    async def send_some(self, view: memoryview) -> int:
        """Send at least one byte of ``view`` (format "B"), and as many as there is room for.

        Returns:
          How many were sent; 0 only for an empty view.  Cancelled, nothing was.

        Raises:
          trio.ClosedResourceError, trio.BrokenResourceError, trio.BusyResourceError: as
            `send_all`.
        """
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        self._sending = True
        try:
            await _check_cancelled()
            core = self._core
            parked = False
            while True:
                if self._closed or core.write_closed:
                    raise trio.ClosedResourceError("the stream was closed for sending")
                try:
                    sent = core.send(view) if view else 0
                except OSError as error:
                    raise self._translated(error) from error
                if sent or not view:
                    break
                parked = await self._park(_WRITER) or parked
            if core.sender.borrowed:
                core.sender.keep_copies()  # the caller may change its buffer from now on
            if not parked and (self._strict or self._budget.is_exceeded()):
                await _yield()
            return sent
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
            while core.sender.borrowed:
                parked = await self._park(_WRITER) or parked
        finally:
            if urgent:
                core.sender.withdraw_urgent()  # unless all of it is sent
            # The caller may change or resize its buffer, whatever happened here.
            if core.sender.borrowed:
                core.sender.keep_copies()
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
            while not (core.sender.can_send or core.write_closed or core.got_closed or core.error):
                parked = await self._park(_WRITER) or parked
                if self._closed:
                    raise trio.ClosedResourceError("the stream was closed")
            if not parked and (self._strict or self._budget.is_exceeded()):
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
        self.shut_down_writing()

    def shut_down_writing(self) -> None:
        """`send_eof` without its checkpoint.

        Raises:
          trio.ClosedResourceError, trio.BrokenResourceError: as there.
        """
        if self._closed:
            raise trio.ClosedResourceError("the stream was closed")
        if self._core.error is not None:
            raise trio.BrokenResourceError("the connection is broken") from self._core.error
        self._core.shutdown_write()

    # --- receiving -------------------------------------------------------------------------

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Receive at least one byte and at most ``max_bytes`` (128 KiB if None); b"" at the
        end of the stream.

        Raises:
          trio.ClosedResourceError: this side closed the stream.
          trio.BrokenResourceError: the connection failed.
          trio.BusyResourceError: another task is receiving.
        """
        most = _DEFAULT_RECEIVE if max_bytes is None else max_bytes
        most = most if type(most) is int and most > 0 else _checked(most)
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving on this stream")
        self._receiving = True
        try:
            receiver, pump = self._receiver, self._pump
            parked = False
            if receiver.received == receiver.consumed and not (
                receiver.done or receiver.error or self._deaf
            ):
                # It `is_blank`, without a call.  To look again, as below, would be for nothing.
                is_solo = pump.machine.state == "SOLO" and pump.solo.should_wait_at_once()
                parked = await (self._wait_solo(at_once=True) if is_solo else self._park(_READER))
            if not parked:
                await _check_cancelled()
            while True:
                if self._deaf:
                    data = self._at_own_end(b"")
                    break
                try:
                    data = receiver.receive(most)
                except OSError as error:
                    raise self._translated(error) from error
                if data or (receiver.done and receiver.at_eof):
                    break
                parked = await self._park(_READER) or parked
            if not parked:
                if not pump.waiting:
                    solo = pump.solo
                    solo.reads += 1
                    if solo.last_reader is not self._reader:
                        solo.change_reader(self._reader)
                if self._strict or self._budget.is_exceeded():
                    await _yield()
            return data
        finally:
            self._receiving = False

    async def receive_some_into(self, buffer: Buffer) -> int:
        """Receive into a buffer of the caller's own; see `SmcStream.receive_some_into`."""
        with writable(buffer) as view:
            return await self._receive(lambda: self._receiver.receive_into(view), 0)

    async def peek_some(self, max_bytes: int) -> bytes:
        """What `receive_some` would return, left where it is; same errors."""
        return await self._receive(lambda: self._receiver.peek(max_bytes), b"")

    async def _receive(self, take: Callable[[], _Taken], nothing: _Taken) -> _Taken:
        """What ``take`` finds, as soon as that is something; ``nothing`` at the end."""
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving on this stream")
        self._receiving = True
        try:
            await _check_cancelled()
            parked = False
            while True:
                if self._deaf:
                    taken = self._at_own_end(nothing)
                    break
                try:
                    taken = take()
                except OSError as error:
                    raise self._translated(error) from error
                if taken or self._receiver.at_eof:
                    break
                parked = await self._park(_READER) or parked
            if not parked and (self._strict or self._budget.is_exceeded()):
                await _yield()
            return taken
        finally:
            self._receiving = False

    def _at_own_end(self, nothing: _Taken) -> _Taken:
        if self._closed:
            raise trio.ClosedResourceError("the stream was closed")
        return nothing

    def shut_down_reading(self) -> None:
        """Whoever receives is at the end of the stream from now on; the peer is not told."""
        self._deaf = True
        self._wake(_READER)

    def shut_down_both(self) -> None:
        """Close (RFC 7609, 4.8.1, 3A), as the end of both directions of a stream that stays open.

        Whoever receives is at the end from now on; `close` has nothing more to do.

        Raises:
          trio.ClosedResourceError, trio.BrokenResourceError: as `shut_down_writing`.
        """
        if self._closed:
            raise trio.ClosedResourceError("the stream was closed")
        if self._core.error is not None:
            raise trio.BrokenResourceError("the connection is broken") from self._core.error
        self._end()

    # --- urgent data (RFC 7609, 4.7.5, 4.7.6) ------------------------------------------------

    async def wait_urgent(self) -> UrgentState:
        """Wait until the peer has urgent data; see `SmcStream.wait_urgent`."""
        with self._alone():
            await trio.lowlevel.checkpoint()
            while not self._closed:
                match self._receiver.urgent:
                    case "pending":
                        return "pending"
                    case "present":
                        return "present"
                if self._receiver.urgent_over:
                    self._take_urgent()
                    raise trio.EndOfChannel(OVER)
                await self._park(_URGENT)
            raise trio.ClosedResourceError("the stream was closed")

    async def receive_urgent(self) -> bytes:
        """Receive the urgent byte; see `SmcStream.receive_urgent`."""
        with self._alone():
            await trio.lowlevel.checkpoint()
            while not self._closed:
                if self._receiver.urgent_inline:
                    raise inline_error()
                byte = self._take_urgent()
                if byte is not None:
                    return bytes((byte,))
                if self._receiver.urgent_over:
                    raise trio.EndOfChannel(OVER)
                await self._park(_URGENT)
            raise trio.ClosedResourceError("the stream was closed")

    def _take_urgent(self) -> int | None:
        try:
            return self._receiver.receive_urgent()
        except OSError as error:
            raise self._translated(error) from error

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if self._urgent_busy:
            raise trio.BusyResourceError("another task waits for urgent data on this stream")
        self._urgent_busy = True
        try:
            yield
        finally:
            self._urgent_busy = False

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
        patience = self._begin_ending()
        parked = False
        try:
            if patience is None:
                parked = await self._wait_for_end()
            else:
                with trio.move_on_after(patience):
                    parked = await self._wait_for_end()
        finally:
            if not parked:
                await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """`aclose` without the wait: what was sent still arrives.  Idempotent."""
        if not self._closed:
            self._close_now()

    def close_forcefully(self) -> None:
        """`trio.aclose_forcefully` without the checkpoint."""
        if not self._closed:
            self._begin_ending()

    def _begin_ending(self) -> int | None:
        patience = self._options.linger
        self._endpoint.lingers = patience is not None
        if patience == 0:
            self.abort()
        else:
            self._close_now()
        return patience

    async def _wait_for_end(self) -> bool:
        parked = False
        while self._core.ending:
            parked = await self._park(_WRITER) or parked
        return parked

    def _close_now(self) -> None:
        self._closed = True
        self._end()

    def _end(self) -> None:
        self._deaf = True
        self._pump.resume_hooks()  # the peer's answer is awaited, by nobody in particular
        if not self._endpoint.closed_by_user:
            self._endpoint.closed_by_user = True
            self._pump.drain()
            self._core.close()
        # The core wakes them when its state changes; a close that waits for data changes none.
        self._core.wake_all()

    def _wake(self, waiter: str) -> None:
        wake = getattr(self._core, waiter)
        if wake is not None:
            setattr(self._core, waiter, None)
            wake()

    def abort(self) -> None:
        """Reset the connection at once (RFC 7609, 4.8.2)."""
        self._closed = self._deaf = True
        self._endpoint.closed_by_user = True
        self._pump.resume_hooks()
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
        self._pump.drain_if_pending()
        receiver = self._receiver
        return bool(
            self._deaf or receiver.readable or receiver.at_eof or receiver.error is not None
        )

    # --- waiting ---------------------------------------------------------------------------

    async def _park(self, waiter: str) -> bool:
        """Wait until the core calls its ``waiter``; False if it did before others had a turn.

        True: that was a checkpoint, at which cancellation was seen.

        Where many read, each finds nothing and has it when the others had their turn.  Letting
        them run takes half of what sleeping does, so a reader tries that first; one of whom that
        brought nothing only now and then.  With strict checkpoints its last call has let them run.
        """
        core, pump = self._core, self._pump
        if waiter is _READER and pump.woken and (self._misses % _SELDOM or self._strict):
            # The shortest way to the usual end of all that follows.
            self._misses += 1
            if core.messenger.tell() and not self._receiver.is_blank():
                return False
        else:
            setattr(core, waiter, _nothing)
            core.messenger.tell()  # may call the waiter, too
            if waiter is _READER and pump.waiting and not self._strict:
                self._misses += 1
                if self._misses % _SELDOM == 1 and await self._comes_in_turn_of_others():
                    return True
            if not pump.woken:
                pump.drain()
                pump.solo.polls += 1
            if getattr(core, waiter) is None or (not pump.waiting and self._comes_in_spin(waiter)):
                return False
            if waiter is _READER and not pump.waiting and pump.try_solo():
                return await self._wait_solo()
        if pump.waiting:
            pump.solo.streak = 0
        if pump.machine.state in UNHOOKED:
            pump.resume_hooks()
        sleeper, wake, abort = self._sleepers[waiter]
        sleeper.task = _current_task()
        if waiter is _READER:
            core.on_readable = wake  # `setattr` takes longer
        else:
            setattr(core, waiter, wake)
        pump.waiting += 1
        pump.spin_due = True
        try:
            await _sleep(abort)
            pump.woken -= 1
        finally:
            pump.waiting -= 1
        self._produced = core.messenger.produced
        return True

    def _comes_in_spin(self, waiter: str) -> bool:
        """Spin, where that is worth it; whether what somebody waits for has come meanwhile."""
        core = self._core
        self._pump.try_spin(
            lambda: getattr(core, waiter) is None,
            sent=core.messenger.produced != self._produced,
        )
        if getattr(core, waiter) is not None:
            return False
        self._produced = core.messenger.produced
        return True

    async def _comes_in_turn_of_others(self) -> bool:
        """Let other tasks run; whether what a reader waits for has come meanwhile."""
        await _yield()
        if self._core.on_readable is not None:
            return False
        self._misses = 0
        await _check_cancelled()
        return True

    async def _wait_solo(self, *, at_once: bool = False) -> bool:
        """As `_park`, for the only one who waits."""
        core, pump = self._core, self._pump
        messenger = core.messenger
        core.on_readable = pump.solo.end_wait
        try:
            messenger.tell()
            if await pump.solo.wait(at_once=at_once, sent=messenger.produced != self._produced):
                return True
            if not self._receiver.is_blank():
                return False
            # It is all for others, and perhaps they send again and again.
            await trio.lowlevel.checkpoint()
            return True
        finally:
            core.on_readable = None
            self._produced = core.messenger.produced

    def _translated(self, error: OSError) -> Exception:
        if self._closed or self._endpoint.abandoned:
            return trio.ClosedResourceError("the stream was closed")
        return trio.BrokenResourceError(f"the connection is broken: {error.strerror}")


# See `SmcStream`.
trio.SocketStream.register(RdmaStream)
