"""How the tasks of a stream wait: for data, for room in the peer's ring, for urgent data.

Theory of operation.  A connection core never waits.  It has three waiters, the attributes
``on_readable``, ``on_writable`` and ``on_urgent``.  When the state for which a waiter waits has
changed, the core clears the attribute and calls the waiter once.  A call of a stream that finds
nothing to do waits in `Parking`, in this order:

1. The task posts the CDC message that was deferred, because the peer may be waiting for it.
2. The task drains the RNICs, unless tasks that were woken together with it have not run yet; the
   last of those tasks drains for all.  A reader that does not drain parks at once (5).
3. If no other task waits, the task spins, or yields the processor to the peer (`Pump.try_spin`).
4. A reader that waits alone, several times in a row, becomes the solo reader
   (`trio_smc.rnic.solo`).  A solo reader begins here if polling first would find nothing
   (`SoloReader.should_wait_at_once`).
5. The task parks: it sleeps until the core calls its waiter.

Two rules of all calls are here, too.  `Busy` refuses a second task in the same direction.
`Parking.end_call` and `end_failed_call` make the checkpoint of a call that did not park.  The
hottest calls of `RdmaStream` repeat `Busy` and `end_call` inline, with a comment that says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal, TypeVar

import trio
from outcome import Error, Outcome
from trio.lowlevel import Abort, RaiseCancelT

from trio_smc.rnic.pump import UNHOOKED

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Generator

    from trio_smc.datapath.connection import Connection
    from trio_smc.rnic.pump import Pump
    from trio_smc.stack.budget import Budget

__all__ = [
    "BROKEN",
    "BUSY_DESCRIPTOR",
    "BUSY_SENDING",
    "CLOSED",
    "CLOSED_MEANWHILE",
    "Busy",
    "Parking",
    "SocketBusy",
]

# Texts of Trio for its `SocketStream`, which programs compare.
CLOSED: Final = "this socket was already closed"
CLOSED_MEANWHILE: Final = "another task closed this fd"
BROKEN: Final = "socket connection broken: {}"
BUSY_DESCRIPTOR: Final = "another task is already reading / writing this fd"
BUSY_SENDING: Final = "another task is currently sending data on this SocketStream"

# Looked up once, because each call needs them.
_sleep: Final = trio.lowlevel.wait_task_rescheduled
_yield: Final = trio.lowlevel.cancel_shielded_checkpoint
_current_task: Final = trio.lowlevel.current_task
_reschedule: Final = trio.lowlevel.reschedule
_ABORTED: Final = Abort.SUCCEEDED

Waiter = Literal["on_readable", "on_writable", "on_urgent"]
_READER: Final = "on_readable"
_WRITER: Final = "on_writable"
_URGENT: Final = "on_urgent"

_Result = TypeVar("_Result")
_WAIT_ENDED: Final = "another task closed this socket"


class Busy:
    """Refuses a second task that calls the same direction of a stream.

    A call holds it by ``with``, and the second task gets `error`.  Three kinds of calls set
    ``taken`` themselves:

    - the hottest ones, `RdmaStream.send_all` and `receive_some`: ``with`` calls two functions;
    - those that lend a view and take it back, because the stream is busy between them;
    - those that fail without a wait: they clear ``taken`` before they yield, so that the next task
      gets the same error.

    Args:
      message: the text of the error.

    Attributes:
      taken: a task is in such a call.
      by_socket: that call is one of a socket, in `SocketBusy`.
    """

    __slots__ = ("_message", "by_socket", "taken")

    def __init__(self, message: str) -> None:
        self._message = message
        self.taken = False
        self.by_socket = False

    def __enter__(self) -> None:
        if self.taken:
            raise self.error()
        self.taken = True

    def __exit__(self, *_: object) -> None:
        self.taken = False

    def error(self) -> trio.BusyResourceError:
        """The error that the second task gets."""
        return trio.BusyResourceError(BUSY_DESCRIPTOR if self.by_socket else self._message)


class SocketBusy:
    """`Busy` for a call of a socket that waits.

    Trio's stream refuses a second call of the stream.  Below it, the descriptor refuses a second
    wait, so a call of the stream that need not wait succeeds beside a call of the socket.
    """

    __slots__ = ("_busy",)

    def __init__(self, busy: Busy) -> None:
        self._busy = busy

    def __enter__(self) -> None:
        self._busy.__enter__()
        self._busy.by_socket = True

    def __exit__(self, *_: object) -> None:
        self._busy.taken = self._busy.by_socket = False


def _mark() -> None:
    """Placeholder for a waiter: if the core has cleared the attribute, it has called this."""


class _Woken(Outcome[None]):
    """A reusable ``outcome.Value(None)``."""

    __slots__ = ()

    def unwrap(self) -> None:
        """Return nothing."""

    def send(self, gen: Generator[_Result, None, object]) -> _Result:
        """As for a value."""
        return gen.send(None)

    async def asend(self, agen: AsyncGenerator[_Result, None]) -> _Result:
        """As for a value."""
        return await agen.asend(None)


_WOKEN: Final = _Woken()


class _Sleeper:
    """A task that is parked until the core calls one of its waiters."""

    __slots__ = ("_core", "_pump", "_waiter", "task")

    def __init__(self, core: Connection, pump: Pump, waiter: Waiter) -> None:
        self._core = core
        self._pump = pump
        self._waiter = waiter
        self.task: trio.lowlevel.Task | None = None

    def wake(self) -> None:
        """The waiter that the core calls."""
        task, self.task = self.task, None
        assert task is not None
        self._pump.woken += 1
        _reschedule(task, _WOKEN)

    def fail(self, error: Exception) -> None:
        """Raise ``error`` in the parked task, if there is one."""
        task, self.task = self.task, None
        if task is not None:
            setattr(self._core, self._waiter, None)
            _reschedule(task, Error(error))

    def abort(self, _: RaiseCancelT) -> Abort:
        """The task was cancelled."""
        self.task = None
        setattr(self._core, self._waiter, None)
        return _ABORTED


_Waking = tuple[_Sleeper, Callable[[], None], Callable[[RaiseCancelT], Abort]]


class Parking:
    """How the tasks of one stream wait.

    Args:
      core: the stream's connection.
      pump, budget: of its stack.
      strict: every call is a full checkpoint (``Config(checkpoints="strict")``).

    Attributes:
      identity: names the stream for `SoloReader`, without a reference to the stream.
      strict, budget: as the parameters.
    """

    __slots__ = (
        "_core", "_produced", "_pump", "_sleepers", "_wait_ended", "budget", "identity", "strict",
    )  # fmt: skip

    def __init__(self, core: Connection, pump: Pump, budget: Budget, *, strict: bool) -> None:
        self._core = core
        self._pump = pump
        self.strict = strict
        self.budget = budget
        self.identity = object()
        self._produced = 0  # bytes that had been sent when the last wait ended
        self._wait_ended = False  # `end_waits` was called while this stream had the solo reader
        # Made at the first wait, because a short connection has few. Each with its bound methods,
        # because each lookup would make a new one.
        self._sleepers: dict[Waiter, _Waking] = {}

    # Each of the next three methods waits until the core calls the waiter.  They return False if
    # that happened before other tasks ran; True: the wait was a checkpoint.

    def reader(self) -> Awaitable[bool]:
        """Wait until data, the end or an error can be received."""
        pump = self._pump
        if pump.machine.state == "SOLO" and pump.solo.should_wait_at_once():
            return self._wait_solo(at_once=True)
        return self._wait(_READER)

    def writer(self) -> Awaitable[bool]:
        """Wait until more can be sent, or sending has failed."""
        return self._wait(_WRITER)

    def urgent(self) -> Awaitable[bool]:
        """Wait until the state of urgent data changes."""
        return self._wait(_URGENT)

    async def _wait(self, waiter: Waiter) -> bool:
        core, pump = self._core, self._pump
        if pump.woken and waiter is _READER:
            # The usual case: another task was woken together with this one, and drains for both.
            if core.messenger.flush_before_wait() and not core.receiver.is_blank():
                return False
        else:
            setattr(core, waiter, _mark)
            core.messenger.flush_before_wait()  # the core may call the waiter here
            if not pump.woken:
                pump.dispatcher.drain()
                pump.solo.polls += 1
            if getattr(core, waiter) is None:
                return False
            if not pump.waiting:
                if self._spin(waiter):
                    return False
                if waiter is _READER and pump.try_solo():
                    return await self._wait_solo()
        if pump.waiting:
            pump.solo.streak = 0
        if pump.machine.state in UNHOOKED:
            pump.resume_hooks()
        sleeper, wake, abort = self._sleepers.get(waiter) or self._new_sleeper(waiter)
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

    def _new_sleeper(self, waiter: Waiter) -> _Waking:
        sleeper = _Sleeper(self._core, self._pump, waiter)
        made = self._sleepers[waiter] = sleeper, sleeper.wake, sleeper.abort
        return made

    def _spin(self, waiter: Waiter) -> bool:
        """Spin if that is worthwhile; True if the core has called ``waiter``."""
        core = self._core
        if (
            not self._pump.try_spin(
                lambda: getattr(core, waiter) is None,
                sent=core.messenger.produced != self._produced,
            )
            and getattr(core, waiter) is not None
        ):
            return False
        self._produced = core.messenger.produced
        return True

    async def _wait_solo(self, *, at_once: bool = False) -> bool:
        """As `_wait`, for the solo reader.  ``at_once``: see `SoloReader.wait`."""
        core, pump = self._core, self._pump
        messenger = core.messenger
        core.on_readable = pump.solo.end_wait
        self._wait_ended = False
        try:
            messenger.flush_before_wait()
            waited = await pump.solo.wait(
                at_once=at_once, sent=messenger.produced != self._produced
            )
            if self._wait_ended:
                raise trio.ClosedResourceError(_WAIT_ENDED)
            if waited:
                return True
            if not core.receiver.is_blank():
                return False
            # The completions were for other streams.  Yield, because more of them may come at once,
            # so that this task would never wait.
            await trio.lowlevel.checkpoint()
            return True
        finally:
            core.on_readable = None
            self._produced = messenger.produced

    def wake_reader(self) -> None:
        """Wake the task in `reader`, if there is one."""
        wake, self._core.on_readable = self._core.on_readable, None
        if wake is not None:
            wake()

    def end_waits(self) -> None:
        """Make the waiting tasks raise ClosedResourceError, as `trio.lowlevel.notify_closing`
        does."""
        for sleeper, _, _ in self._sleepers.values():
            sleeper.fail(trio.ClosedResourceError(_WAIT_ENDED))
        if self._core.on_readable is not None:
            self._wait_ended = True
            self.wake_reader()  # the solo reader

    # Every call ends with one of these.

    async def end_call(self, parked: bool) -> None:
        """End a call with a checkpoint, if the call needs one.

        A call that has ``parked`` needs none, and neither does a call within the budget of
        amortised checkpoints.
        """
        if not parked and (self.strict or self.budget.is_exceeded()):
            await _yield()

    async def end_failed_call(self, parked: bool) -> None:
        """End a call that raises an error: it yields unless it has ``parked``, so that a program
        that repeats the call lets other tasks run."""
        if not parked:
            await _yield()
