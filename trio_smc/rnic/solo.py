"""The solo reader: the only task that waits, which waits on the RNIC's doorbell descriptor itself.

Theory of operation.  If a single task waits for messages, again and again and longer than a spin
lasts, hooks in Trio's loop are more than it needs.  It becomes the *solo reader*: it arms the RNIC
and waits on the doorbell descriptor, like a task that reads from a socket.  A reader that never
waits, in a loop that never sleeps, becomes one too: it drains when it has read all that had
arrived, and not in each pass of the scheduler.

A successful spin does not end solo mode.  Any other user of the pump ends it
(`Pump.resume_hooks`): a second waiting task, a writer, a timer, the end of a connection or of the
stack.  The solo reader then waits like every other task.  A wait that is cancelled ends solo mode,
too.

No other task polls in solo mode, so the solo reader has to come back often.  A watchdog checks
that it does.  Meanwhile sends, shutdown(2) and getsockopt(2) poll by themselves, so that they
report the end of the peer at once.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Final, Protocol

import trio

from trio_smc._base.waits import notify_closing, wait_readable

if TYPE_CHECKING:
    from trio_smc.states.engine import Machine

    from .deferred import Deferred
    from .dispatch import Dispatcher, Lane
    from .waits import WaitHistory

__all__ = ["MAX_GAP", "SOLO_AFTER_WAITS", "WATCHDOG_INTERVAL", "SoloHost", "SoloReader"]

SOLO_AFTER_WAITS: Final = 8
"""Consecutive long waits by a single task before it becomes the solo reader.  Chosen."""

MAX_GAP: Final = 0.05
"""Seconds: two long waits further apart do not count as consecutive.  Chosen; no measurement is
recorded."""

_MIN_READS: Final = 4
"""Reads without waiting between two calls of `reads_alone` that show a busy reader.  Chosen; no
measurement is recorded."""

WATCHDOG_INTERVAL: Final = 0.5
"""Seconds between checks that a solo reader that is not waiting still polls.  With 0.05 the
watchdog woke both processes for 200 µs for five requests 10 ms apart (docs/decisions.md); 0.5 was
chosen, so that completions for other tasks are noticed within a second."""

# Looked up before `enable` replaces them.


class SoloHost(Protocol):
    """The pump, as seen by its solo reader."""

    machine: Machine
    waiting: int
    passes: int
    wakeups: int

    def resume_hooks(self) -> None:
        """End solo mode: another part of the program needs the pump."""

    def fail(self, problem: BaseException) -> None:
        """Stop the stack, because of ``problem``."""

    def acknowledge_all(self) -> None:
        """Acknowledge what ended the last sleep."""

    def acknowledge_later(self, lane: Lane) -> None:
        """Acknowledge this lane's descriptor before the next wait."""

    def acknowledge(self, lane: Lane) -> None:
        """Acknowledge this lane's descriptor now."""


class SoloReader:
    """Decides which task becomes the solo reader, waits for it, and checks on it.

    Attributes:
      streak: consecutive long waits by a single task.  Tasks that wait beside others reset it.
      reads: how often a reader found data without waiting while no task waited.
      last_reader: the reader that did so last; see `change_reader`.
      polls: how often a reader that found no data drained before it waited.
      fd: the doorbell descriptor while the solo reader waits on it, and else -1.
      watchdog: the scope of `watch`; its deadline is the time of the next check.
    """

    __slots__ = (
        "_deferred", "_dispatcher", "_host", "_reads_before", "_several_readers", "_streak_at",
        "_waits", "fd", "last_reader", "polls", "reads", "streak", "watchdog",
    )  # fmt: skip

    def __init__(
        self, host: SoloHost, dispatcher: Dispatcher, deferred: Deferred, waits: WaitHistory
    ) -> None:
        self._host = host
        self._dispatcher = dispatcher
        self._deferred = deferred
        self._waits = waits
        self.streak = 0
        self._streak_at = 0.0  # when `streak` last grew
        self.reads = 0
        self.last_reader: object = None
        self._reads_before = 0  # `reads` at the last `reads_alone`
        self._several_readers = False  # since the last `reads_alone`
        self.polls = 0
        self.fd = -1
        self.watchdog: trio.CancelScope | None = None

    # -- becoming solo -------------------------------------------------------------------

    def count_wait(self) -> bool:
        """Count a wait by a single task; True if that task has earned solo mode."""
        waits = self._waits
        if waits.spin.ns and not waits.spin.discouraged:
            self.streak = 0
            return False
        before, self._streak_at = self._streak_at, time.perf_counter()
        if self._streak_at - before > MAX_GAP:
            self.streak = 0
        self.streak += 1
        return self.streak > SOLO_AFTER_WAITS

    def reads_alone(self) -> bool:
        """True if a single reader found data at least `_MIN_READS` times since the last call, and
        no task waits."""
        reads, self._reads_before = self.reads - self._reads_before, self.reads
        several, self._several_readers = self._several_readers, False
        return reads >= _MIN_READS and not several and not self._host.waiting

    def change_reader(self, reader: object) -> None:
        """Note that another reader finds data without waiting.  Of several readers none becomes
        solo."""
        self.last_reader = reader
        self._several_readers = True
        if self._host.machine.state == "SOLO":
            self._host.resume_hooks()

    def restart_counts(self) -> None:
        """Forget the waits and reads so far."""
        self.streak = 0
        self._reads_before = self.reads

    # -- waiting -------------------------------------------------------------------------

    def should_wait_at_once(self) -> bool:
        """True if the running task, which is about to wait in solo mode, should call `wait` at
        once, because polling first would find nothing."""
        if self._host.waiting:
            return False
        self._waits.begin()
        return self._waits.spin.discouraged

    async def wait(self, *, at_once: bool = False, sent: bool = False) -> bool:
        """Wait for a message, or until solo mode ends.

        A task that receives the message that the solo reader waits for calls `end_wait`.

        Args:
          at_once: `should_wait_at_once` was true, and the caller has not called `Pump.try_spin`.
          sent: as for `Pump.try_spin`.

        Returns:
          True if other tasks ran.  False: a completion came first, perhaps for another stream.
        """
        host, dispatcher = self._host, self._dispatcher
        lane = dispatcher.lanes[0]
        fd = lane.fd
        assert fd is not None
        try:
            if (at_once and self._spin_or_yield(lane, sent)) or self._drain_or_arm(lane):
                return False
        except Exception as problem:
            host.fail(problem)
            host.resume_hooks()
            return False
        host.waiting += 1
        self.fd = fd
        try:
            await wait_readable(fd)
        except trio.ClosedResourceError:
            return True
        except BaseException:
            # Cancelled: this task may never wait again, and no other task polls in solo mode.
            self.fd = -1
            host.resume_hooks()
            raise
        finally:
            self.fd = -1
            host.waiting -= 1
            self._start_watchdog()
        host.passes += 1
        host.wakeups += 1
        try:
            if dispatcher.drain():
                host.acknowledge_later(lane)
            else:
                host.acknowledge(lane)
                dispatcher.drain()
        except Exception as problem:
            host.fail(problem)
        self._waits.note_wakeup()
        if lane.failed:
            host.resume_hooks()
        return True

    def _spin_or_yield(self, lane: Lane, sent: bool) -> bool:
        """Spin or yield the processor if that is worthwhile; True if completions were drained."""
        waits, spin = self._waits, self._waits.spin
        if spin.should_spin():
            if trio.lowlevel.current_statistics().tasks_runnable:
                spin.spin_skipped()
                return False
            return spin.spin(self._dispatcher.probes(), waits.since + spin.ns) is not None
        if not sent or not spin.ns or not spin.should_yield():
            return False
        has_pending = lane.has_pending
        if not has_pending():  # or else the peer has run on this processor and answered already
            spin.yield_processor()
            if not has_pending():
                return False
        self.polls += 1
        return self._dispatcher.drain()

    def _drain_or_arm(self, lane: Lane) -> bool:
        """Arm the RNIC; True if completions came first, so that no doorbell would ring."""
        self.polls += 1
        self._host.acknowledge_all()
        if self._deferred.soon:
            self._deferred.run_all()
        arm = lane.arm
        if arm():
            return False
        if not self._dispatcher.drain():
            self._host.resume_hooks()  # the RNIC cannot be armed and has to be polled
        return True

    def end_wait(self) -> None:
        """Wake the solo reader if it waits: its message has arrived, or solo mode ends."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            notify_closing(fd)

    # -- the watchdog --------------------------------------------------------------------

    async def watch(self) -> None:
        """Return when solo mode has ended; end it if the solo reader no longer polls.

        While the solo reader waits on the doorbell the watchdog sleeps: an idle program is not
        woken.  Its interval begins when that wait ends.
        """
        host = self._host
        while host.machine.state == "SOLO":
            polls = self.polls
            with trio.CancelScope() as self.watchdog:
                if self.fd < 0:
                    self._start_watchdog()
                await trio.sleep_forever()
            self.watchdog = None
            self._deferred.run_all()
            if self.fd < 0 and self.polls == polls:
                host.resume_hooks()

    def _start_watchdog(self) -> None:
        watchdog = self.watchdog
        if watchdog is not None and watchdog.deadline == math.inf:
            watchdog.deadline = trio.current_time() + WATCHDOG_INTERVAL

    def end(self) -> None:
        """End solo mode: wake the solo reader and the watchdog."""
        self.end_wait()
        if self.watchdog is not None:
            self.watchdog.cancel()
