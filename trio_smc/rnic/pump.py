"""The pump of a stack: polls its RNICs from within Trio's loop, in one of five modes.

Theory of operation.  Completions are always taken on the Trio thread, by `Pump.drain`:

* by senders and receivers, before they wait;
* once in each pass of Trio's scheduler, from the instrument hook ``before_io_wait``;
* before Trio sleeps: the hook polls for at most ``spin`` seconds, arms the RNICs, and polls once
  more (poll, req_notify, poll);
* after Trio slept: the hook ``after_io_wait`` disarms the RNICs, so that no peer wakes a loop that
  is awake, and drains before any task runs.

Which of these hooks are installed is the mode of the pump, a state of the machine
`trio_smc.states.pump.PumpChart`:

* STOPPED: `Pump.run` does not run.
* IDLE: the stack has no connection (`Pump.unused`).  The RNICs are armed and no hook is left, so
  that a program whose connections are all TCP pays nothing.
* BUSY: ``before_io_wait`` only, as the loop has not slept for `AWAKE_PASSES` passes.  A hook costs
  each pass something, even if it finds nothing.
* SLEEPY: both hooks.
* SOLO: no hook.  One reader waits on the doorbell descriptor itself; see `solo`.

`Pump.resume_hooks` leaves IDLE and SOLO.  All code that is about to use the pump calls it, and so
do a doorbell and an RNIC's thread.

What wakes a sleeping Trio is either the RNIC's `Rnic.completion_fd`, or the RNIC's thread
(`poller`), which writes to the wake eventfd (the parameter ``wake``).  With the thread each wait
costs two wakeups, its own and Trio's; over RoCE the network's round trip hides the second.  In both
cases the thread waits for all other reports of the RNIC: events, ports, peers that come and go.

To wake a sleeping thread costs more than all other work for a small message.  So the pump polls for
a moment before a sleep: it *spins* (`spinner`), once for each task that begins to wait.  If no task
has begun to wait for a completion since the last spin, there is no spin: then Trio may be sleeping
for an event that no completion announces, such as a new TCP connection.

After a sleep, tasks whose data arrived run first, and the descriptor that reported the data is
acknowledged before the next wait.  A task that has sent something and waits for the answer yields
the processor before it sleeps: Linux often wakes the peer on the same processor, where the peer
cannot run before this process yields.

When ``before_io_wait`` is called, Trio has already computed how long to sleep.  If the drain woke
a task, the wake eventfd is made readable, so that the sleep ends at once.  Completions that wake no
task, such as those of the last messages of a connection, end no sleep: the eventfd costs three
system calls, and often a pass of the scheduler.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Final, Literal

import trio

from trio_smc._base.interrupts import ki_protected
from trio_smc._base.waits import notify_closing, wait_readable
from trio_smc.states.engine import Machine
from trio_smc.states.tables import PUMP

from .deferred import Deferred
from .dispatch import CompletionSink, Dispatcher, Lane
from .poller import NoThread, Poller
from .solo import SoloReader
from .spinner import AdaptiveSpin
from .verbs import QueuePair, Rnic
from .waits import WaitHistory

__all__ = ["AWAKE_PASSES", "UNHOOKED", "UNUSED_PASSES", "CompletionSink", "Pump"]

_log = logging.getLogger("trio_smc.rnic")

UNHOOKED: Final = frozenset({"STOPPED", "IDLE", "SOLO"})
"""States of a pump that has no hook in Trio's loop."""

AWAKE_PASSES: Final = 32
"""Passes without a sleep after which the hook after the sleep is removed.  Chosen; no measurement
is recorded."""

UNUSED_PASSES: Final = 64
"""Passes without a connection after which all hooks are removed.  Chosen: docs/decisions.md has a
measurement of IDLE with this value only."""

_now: Final = time.perf_counter_ns


@ki_protected
class Pump:
    """Drains the RNICs of one stack and dispatches their completions.

    The model of `trio_smc.states.pump.PumpChart`; ``machine.state`` is the pump's mode.

    Args:
      spin: seconds to poll before Trio sleeps; 0: do not spin.
      wake: what waits for completions while Trio sleeps: "trio" itself, or the RNIC's "thread".
        "auto": the thread on RoCE ports, Trio on software RNICs.

    Attributes:
      machine: the machine that runs `PumpChart`.
      dispatcher, deferred, waits, solo: the parts of the pump.
      waiting: tasks that are parked until a completion arrives.  Each task adds 1 before it parks
        and subtracts 1 afterwards.  `try_spin` polls only for the first.
      spin_due: a task has parked since the last spin and since the last completions; set by tasks
        that park.  Each wait gets one spin only, because a spinning loop delays all other tasks.
      woken: parked tasks that were rescheduled and have not run yet.  The code that reschedules a
        task adds 1, and the task subtracts 1 when it runs.  The last of these tasks drains before
        it parks again.  This drain wakes the tasks whose completions it finds without the wake
        eventfd, which costs more than a small message.
      unused: the stack has no connection; kept by the table of connections, which calls
        `resume_hooks` when that ends.
      broken: the exception of a hook, of deferred work or of `Rnic.service`, which ends `run`; None
        while all is well.
      passes: passes of Trio's scheduler that the pump has seen: each one in BUSY and SLEEPY, one
        for each wait in SOLO, none in IDLE.
      wakeups: how often the wake eventfd or an RNIC woke the scheduler.
    """

    __slots__ = (
        "_after_hook", "_awake_passes", "_before_hook", "_drained_after_sleep", "_nursery",
        "_unacknowledged", "_unused_passes", "_wake_by", "_wake_fd", "broken", "deferred",
        "dispatcher", "machine", "passes", "solo", "spin_due", "unused", "waiting",
        "waits", "wakeups", "woken",
    )  # fmt: skip

    def __init__(self, *, spin: float, wake: Literal["auto", "trio", "thread"] = "auto") -> None:
        self._wake_by = wake
        self.machine = Machine(PUMP, self)
        self.dispatcher = Dispatcher()
        self.deferred = Deferred(self.fail)
        self.waits = WaitHistory(spin)
        self.solo = SoloReader(self, self.dispatcher, self.deferred, self.waits)
        self.waiting: int = 0
        self.spin_due: bool = False
        self.woken: int = 0
        self.unused: bool = False
        self.broken: BaseException | None = None
        self.passes: int = 0
        self.wakeups: int = 0
        self._wake_fd = -1
        self._nursery: trio.Nursery
        # Lanes whose descriptors ended a sleep and are still readable.
        self._unacknowledged: list[Lane] = []
        self._drained_after_sleep = False  # the drain after the last sleep found completions
        self._before_hook = _BeforeWait(self)
        self._after_hook = _AfterWait(self)
        self._unused_passes = 0
        self._awake_passes = 0  # passes since the last sleep

    # -- RNICs and queue pairs -----------------------------------------------------------

    def add(self, rnic: Rnic) -> None:
        """Drain this open RNIC too.  Its thread starts now if the pump runs."""
        by = self._wake_by
        if by == "auto":
            by = "trio" if rnic.kind == "software" else "thread"
        lane = Lane(rnic, rnic.completion_fd() if by == "trio" else None, self.dispatcher.drain)
        self.resume_hooks()
        self.dispatcher.add(lane)
        if self.machine.state != "STOPPED":
            self._start(lane)

    def remove(self, rnic: Rnic) -> None:
        """Stop draining this RNIC and join its thread; to be called before the RNIC is closed."""
        self.resume_hooks()
        lane = self.dispatcher.remove(rnic)
        if lane is not None:
            if lane.poller is not None:
                lane.poller.stop()
            elif self.machine.state != "STOPPED":  # the RNIC has no thread
                notify_closing(rnic.wait_fd())
            if lane.watched and lane.fd is not None:
                notify_closing(lane.fd)

    def abandon(self) -> None:
        """Never touch the RNICs again: this process is a forked child, and they belong to its
        parent."""
        for lane in self.dispatcher.lanes:
            lane.rnic.abandon()
        self.dispatcher.clear()
        self.deferred.clear()

    def register(self, rnic: Rnic, qp: QueuePair, sink: CompletionSink) -> None:
        """Pass the completions of this queue pair to ``sink.on_completion``.

        Completions of queue pairs that are not registered are dropped.  If a sink raises, the
        exception is logged and the queue pair goes to ERR.

        Raises:
          ValueError: the RNIC was not added.
        """
        self.resume_hooks()
        self.dispatcher.register(rnic, qp, sink)

    def unregister(self, rnic: Rnic, qp: QueuePair) -> None:
        """Undo `register`.  Unknown queue pairs are ignored."""
        self.dispatcher.unregister(rnic, qp)

    def drain(self) -> bool:
        """See `Dispatcher.drain`."""
        return self.dispatcher.drain()

    def drain_if_pending(self) -> None:
        """`drain`, but cheaper if there is nothing to poll."""
        self.dispatcher.drain_if_pending()

    def drain_queue_pair(self, rnic: Rnic, qp: QueuePair) -> None:
        """See `Dispatcher.drain_queue_pair`."""
        self.dispatcher.drain_queue_pair(rnic, qp)

    # -- deferred work -------------------------------------------------------------------

    def flush_later(self, flush: Callable[[], None]) -> None:
        """Call ``flush()`` once, before the scheduler sleeps or polls for I/O."""
        self.deferred.now.append(flush)
        state = self.machine.state
        if state == "SOLO":
            self.deferred.run()
        elif state == "IDLE":
            self.resume_hooks()

    def flush_soon(self, flush: Callable[[], None]) -> None:
        """Call ``flush()`` once, before the scheduler sleeps or a few passes later."""
        self.deferred.add_soon(flush)
        if self.machine.state == "IDLE":
            self.resume_hooks()

    # -- spinning ------------------------------------------------------------------------

    def try_spin(self, ready: Callable[[], bool] | None = None, *, sent: bool = False) -> bool:
        """Poll for a moment instead of parking a task; True if its message arrived.

        Only for the first task that waits (`waiting` is 0), if no other task is runnable.
        Otherwise, or if ``spin`` is 0, returns False at once.  Runs deferred work first.

        Args:
          ready: returns True if the caller's message has arrived; None: any completion is enough.
          sent: the caller has sent something since its last wait, and Linux may have woken the peer
            on this processor.  If a spin is not worthwhile, the processor is yielded once.
        """
        waits = self.waits
        spin = waits.spin
        if not spin.ns or self.waiting:
            return False
        now = waits.begin()
        discouraged = spin.discouraged
        if discouraged and not sent:
            return False
        if self.deferred.now:
            self.deferred.run()
            if self.drain() and (ready is None or ready()):
                waits.since = 0
                return True
        if discouraged:
            return self._yield_and_drain(spin, ready)
        end = now + spin.ns
        while not trio.lowlevel.current_statistics().tasks_runnable:
            if not self._spin(end):
                return False
            if ready is None or ready():
                waits.since = 0
                return True
            if _now() >= end:
                return False  # all completions were for other streams
        spin.spin_skipped()
        return False

    def _yield_and_drain(self, spin: AdaptiveSpin, ready: Callable[[], bool] | None) -> bool:
        """Yield the processor if that is worthwhile, and drain; True if ``ready`` then."""
        if not spin.should_yield():
            return False
        # A solo reader has no other runnable task to check for, and the check takes as long as the
        # rest of this method.
        if self.machine.state != "SOLO" and trio.lowlevel.current_statistics().tasks_runnable:
            spin.yield_was_useless()
            return False
        spin.yield_processor()
        if not self.drain() or not (ready is None or ready()):
            return False
        self.waits.since = 0
        self.try_solo()  # counts as a wait; the next one may be solo
        return True

    def _spin(self, end: int) -> bool:
        """Poll until completions arrive (True) or the clock shows ``end``, in nanoseconds."""
        return self.waits.spin.spin(self.dispatcher.probes(), end) is not None

    def try_solo(self) -> bool:
        """Count a wait of the running task, the first to wait; True if it is the solo reader now.

        A solo reader calls `SoloReader.wait` instead of parking.
        """
        if self.machine.state != "SOLO" and self.solo.count_wait():
            self._begin_solo()
        return self.machine.state == "SOLO"

    def _begin_solo(self) -> None:
        self.machine.send("sole_reader")
        if self.machine.state == "SOLO":
            # No hook will run it.  If a piece of this work needs the pump, the event "needed" ends
            # solo mode before the reader waits.
            self.deferred.run_all()

    # -- the model of PumpChart ----------------------------------------------------------

    def resume_hooks(self) -> None:
        """Have the hooks from this pass of the scheduler on, if the pump runs."""
        if self.machine.state in UNHOOKED:
            self.machine.send("needed")

    @property
    def has_one_doorbell(self) -> bool:
        """True if a single task can wait for all completions: there is one RNIC, and `_watch`
        waits on its descriptor."""
        lanes = self.dispatcher.lanes
        return len(lanes) == 1 and lanes[0].fd is not None and lanes[0].watched

    def restart_counts(self) -> None:
        """Action."""
        self._drained_after_sleep = False
        self._unused_passes = self._awake_passes = 0
        self.solo.restart_counts()

    def disarm_rnics(self) -> None:
        """Action."""
        for lane in self.dispatcher.lanes:
            lane.disarm()

    def add_before_hook(self) -> None:
        """Action."""
        trio.lowlevel.add_instrument(self._before_hook)

    def remove_before_hook(self) -> None:
        """Action."""
        trio.lowlevel.remove_instrument(self._before_hook)

    def add_after_hook(self) -> None:
        """Action."""
        trio.lowlevel.add_instrument(self._after_hook)

    def remove_after_hook(self) -> None:
        """Action."""
        trio.lowlevel.remove_instrument(self._after_hook)

    def release_doorbell(self) -> None:
        """Action: `_watch` stops waiting on the descriptor, because a descriptor has one waiter."""
        fd = self.dispatcher.lanes[0].fd
        assert fd is not None
        notify_closing(fd)

    def state_changed(self, old: str, new: str, event: str) -> None:
        """No-op: the pump keeps no other record of its mode than the state."""

    # -- inside Trio's loop --------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled; each RNIC has its thread meanwhile.

        Removes the hooks and joins the threads at the end.  Raises `broken`.
        """
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.machine.send("start")
        try:
            async with trio.open_nursery() as self._nursery:
                for lane in self.dispatcher.lanes:
                    self._start(lane)
                task_status.started()
                while self.broken is None:
                    await wait_readable(self._wake_fd)
                    os.eventfd_read(self._wake_fd)
                    self.wakeups += 1
                    self.resume_hooks()
                    self._service()
                self._nursery.cancel_scope.cancel()
            raise self.broken
        finally:
            self.machine.send("stop")
            for lane in self.dispatcher.lanes:
                if lane.poller is not None:
                    lane.poller.stop()
                    lane.poller = None
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _start(self, lane: Lane) -> None:
        try:
            lane.poller = Poller(lane.rnic, self._wake)
        except NoThread as problem:
            # A program that needs no thread over TCP must not fail here because the system refuses
            # the memory for a thread.
            _log.warning("%s: Trio waits instead of a thread: %s", lane.rnic.name, problem)
            self._nursery.start_soon(self._wait_without_thread, lane)
        if lane.fd is not None:
            self._nursery.start_soon(self._watch, lane, lane.fd)

    async def _wait_without_thread(self, lane: Lane) -> None:
        """Do the work of an RNIC's thread, and serve the RNIC at once."""
        while lane in self.dispatcher.lanes:
            try:
                await wait_readable(lane.rnic.wait_fd())
            except trio.ClosedResourceError:
                continue  # `remove`
            self.resume_hooks()
            try:
                lane.rnic.service()
            except Exception as problem:
                self.fail(problem)
                return

    async def _watch(self, lane: Lane, fd: int) -> None:
        """Have Trio wait on the doorbell descriptor of an RNIC.

        The hook has drained before this task wakes.  If the drain found completions, the tasks that
        waited for them run in this pass, some before this task and some after it; so the descriptor
        stays readable until they have run.
        """
        while lane in self.dispatcher.lanes and not lane.failed:
            await self.solo.watch()
            if lane not in self.dispatcher.lanes:
                return  # removed meanwhile: its descriptor may belong to another file by now
            lane.watched = True
            try:
                await wait_readable(fd)
            except trio.ClosedResourceError:
                continue  # the RNIC was removed, or solo mode began
            finally:
                lane.watched = False
            self.wakeups += 1
            if self.machine.state == "SOLO":
                continue  # solo mode began after the wakeup, and the reader polls before it waits
            self.resume_hooks()
            if lane not in self.dispatcher.lanes:
                return
            if self._drained_after_sleep:
                self.acknowledge_later(lane)
                continue
            try:
                self.acknowledge(lane)
                if not lane.failed:
                    lane.probe()  # rings that were in interrupt mode are polled from now on
            except Exception as problem:
                self.fail(problem)
                return

    def acknowledge_later(self, lane: Lane) -> None:
        """Acknowledge this lane's descriptor before the next wait."""
        self._unacknowledged.append(lane)

    def acknowledge_all(self) -> None:
        """Acknowledge the descriptors that ended the last sleep."""
        while self._unacknowledged:
            self.acknowledge(self._unacknowledged.pop())

    def acknowledge(self, lane: Lane) -> None:
        """Clear the readiness of this lane's descriptor."""
        if lane in self.dispatcher.lanes and not lane.rnic.acknowledge():
            lane.failed = True

    def _wake(self) -> None:
        """End Trio's sleep, or prevent the next one; from any thread."""
        os.eventfd_write(self._wake_fd, 1)

    def _service(self) -> None:
        for lane in self.dispatcher.lanes:
            poller = lane.poller
            if poller is not None and poller.pending:
                poller.pending = False
                try:
                    lane.rnic.service()
                except Exception as problem:
                    self.fail(problem)

    def fail(self, problem: BaseException) -> None:
        """Have `run` raise ``problem``; only the first one counts."""
        if self.broken is None:
            _log.error("the stack failed", exc_info=problem)
            self.broken = problem
            if self.machine.state != "STOPPED":
                self._wake()

    def before_io_wait(self, timeout: float) -> None:
        """The hook: run deferred work, drain, and before a sleep also spin and arm.

        Raises nothing: Trio would drop the hook.
        """
        self.passes += 1
        try:
            if self._unacknowledged:
                self.acknowledge_all()
            deferred = self.deferred
            if deferred.soon or deferred.now:
                deferred.begin_pass(sleeping=timeout > 0)
            found = self.dispatcher.drain()
            if found:
                self.waits.since = 0
                self.spin_due = False
            if timeout > 0:
                self._awake_passes = 0
                if (found and self._has_woken_tasks()) or self._prepare_sleep(timeout):
                    self._wake()
            else:
                self._awake_passes += 1
                if self._awake_passes > AWAKE_PASSES:
                    self._stay_awake()
            if deferred.now:
                deferred.run()
            if self.unused:
                self._count_unused()
        except Exception as problem:
            self.fail(problem)

    def _has_woken_tasks(self) -> bool:
        """True if completions that were found before a sleep have made a task runnable.

        Runs the work that these completions have deferred, because no pass may follow.
        """
        if self.woken:
            return True
        if self.deferred.now or self.deferred.soon:
            self.deferred.run_all()
        return trio.lowlevel.current_statistics().tasks_runnable > 0

    def _count_unused(self) -> None:
        """Go to IDLE after `UNUSED_PASSES` passes, if a doorbell announces all that can arrive."""
        self._unused_passes += 1
        if self._unused_passes <= UNUSED_PASSES:
            return
        self._unused_passes = 0
        if self.deferred.soon or self.dispatcher.has_backlog or self.waiting:
            return
        if all(lane.arm() for lane in self.dispatcher.lanes):
            self.machine.send("unused")
        else:
            self.drain()

    def _stay_awake(self) -> None:
        """The loop has not slept for `AWAKE_PASSES` passes: see which hooks it needs."""
        self._awake_passes = 0
        self.machine.send("awake_for_long")
        if self.solo.reads_alone():
            self._begin_solo()

    def _prepare_sleep(self, timeout: float) -> bool:
        """Spin if that is worthwhile, then arm; True if completions arrived, so that Trio must not
        sleep."""
        waits = self.waits
        spin = waits.spin
        if self.spin_due and spin.ns and self.waiting:
            now = _now()
            if not waits.since:
                waits.since = now
            # One spin for each wait: the scheduler may have woken for another reason meanwhile, or
            # a reader has spun.
            # At most a second, because ``timeout`` may be infinite.
            end = min(waits.since + spin.ns, now + int(min(timeout, 1.0) * 1e9))
            if now < end and spin.should_spin():
                self.spin_due = False
                if self._spin(end):
                    waits.since = 0
                    return True
        if self.machine.state == "BUSY":
            self.machine.send("about_to_sleep")
        armed = True
        for lane in self.dispatcher.lanes:
            if not lane.arm():
                armed = False
        if not armed:
            # Do not sleep even if this finds nothing: the next pass has to arm again.
            self.drain()
        return not armed

    def after_io_wait(self, timeout: float) -> None:
        """The hook: drain what ended a sleep, before any task runs.  Raises nothing."""
        if timeout > 0:
            try:
                for lane in self.dispatcher.lanes:
                    lane.disarm()
                self._drained_after_sleep = self.dispatcher.drain()
                if self._drained_after_sleep and self.waiting:
                    self.waits.note_wakeup()
            except Exception as problem:
                self.fail(problem)


# The hooks are bound methods of the pump, so that Trio calls the pump directly.


class _BeforeWait(trio.abc.Instrument):
    def __init__(self, pump: Pump) -> None:
        self.before_io_wait = pump.before_io_wait  # type: ignore[method-assign]


class _AfterWait(trio.abc.Instrument):
    def __init__(self, pump: Pump) -> None:
        self.after_io_wait = pump.after_io_wait  # type: ignore[method-assign]
