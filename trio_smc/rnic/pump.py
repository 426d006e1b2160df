"""The shared drain of a stack: who takes completions, and when.

Theory of operation.  Completions are always taken on the Trio thread, by `Pump.drain`:

* by senders and receivers themselves, when they look;
* once in each pass of Trio's scheduler, from the instrument hook ``before_io_wait``;
* when Trio is about to sleep: the hook polls for at most ``spin`` seconds, then arms the RNICs
  and looks once more (poll, req_notify, poll);
* after Trio slept: the RNIC's `Rnic.completion_fd` was readable, or its thread (`poller`) made the
  wake eventfd so, or something else was; the hook ``after_io_wait`` disarms the RNICs, so that
  nobody wakes a Trio that is awake, and drains before any task runs.

Either Trio waits for completions itself, or the RNIC's thread does and wakes Trio (``wake``).  With
the thread each wait for a message is two sleeps, its own and Trio's, and over RoCE a network's
round trip hides the second.  All else that an RNIC has to say, events, ports, peers that come and
go, its thread waits for in any case.

Waking a sleeping thread costs more than everything else a small message costs, hence the spin
(`spinner`), one for each task that begins to wait.  There is none while no task waits for a
completion, or none has begun to since the last one: what Trio sleeps for then may come by another
way, as a new connection does.  And there is none after a pause (`PAUSE_NS`): the peer has fallen
asleep, and to wake it takes longer than a spin.

What ends a sleep is worked off in the order in which somebody waits for it: those whose data came
run first, and the descriptor that told of it is read before the next wait.  And who has sent
something and waits for the answer first lets others have the processor for a moment: the peer was
perhaps woken on this one, as Linux likes it, and cannot begin before.

When ``before_io_wait`` is called Trio has already computed how long to sleep.  If the drain woke a
task, the wake eventfd is made readable, so that the wait ends at once.

A hook costs each pass of the scheduler something, called or not.  So ``after_io_wait`` is there
only while the loop sleeps now and then, and gone after `_SLEEPLESS` passes without a sleep.  And a
pump that is ``unused`` rests after `_UNUSED` passes: the RNICs are armed and no hook is left, so
that a program whose connections are all TCP pays nothing.  Whoever is going to use it calls
`rouse`; a doorbell or an RNIC's thread does the same.

Where one task alone waits for messages, time and again for longer than a spin, it *leads*: it waits
for the doorbell itself, as who reads a socket waits for that, and no hook is left either.  It goes
on leading when a spin meets what comes.  Who reads alone in a loop that never sleeps leads, too: it
drains when it has taken all that it knew of, and not in each pass.  Meanwhile nobody watches the
doorbell, so whoever leads has to look again and again (`_TERM`).  Whoever else wants the pump, a
second waiter, a writer, a timer, the end of a connection or of the stack, rouses it, and the leader
is sent back to wait as others do.

Work that was put off with `flush_later` is done in the next pass, before the loop sleeps; that of
`flush_soon` before the loop sleeps, or after `_SOON` passes of a loop that does not.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Literal, Protocol

import trio

from .poller import NoThread, Poller
from .spinner import PAUSE_NS, AdaptiveSpin, Look
from .verbs import PlainCompletion, QueuePair, Rnic

__all__ = ["CompletionSink", "Pump"]

_log = logging.getLogger("trio_smc.rnic")

_SOON: Final = 16
_SLEEPLESS: Final = 32
_READS: Final = 4
"""So many reads in as many passes show a task that reads for a living."""
_UNUSED: Final = 64
_ALONE: Final = 8
"""So many waits in a row of one task alone, each too long for a spin, make it lead."""
_PAUSES_COUNT: Final = 4
"""As so many of them counts one after a pause, when nobody spins anyway."""
_GAP: Final = 0.05
"""Seconds between two of these waits, at most."""
_TERM: Final = 0.5
"""Seconds after which it is asked whether who leads, and does not wait, has looked since."""
_MOST_CALLS: Final = 64
_LONG_PASS_NS: Final = 400_000
_LOOKS: Final = 6
_AWAKE: Final = object()
"""In a task's ``custom_sleep_data``, which Trio clears when the task is rescheduled."""
# What each wait needs, looked up once.
_wait_readable: Final = trio.lowlevel.wait_readable
_now: Final = time.perf_counter_ns


class CompletionSink(Protocol):
    """Who gets the completions of a queue pair."""

    def on_completion(self, completion: PlainCompletion) -> None:
        """Called on the Trio thread; must not block."""


class _Lane:
    """One RNIC of the pump."""

    __slots__ = (
        "arm",
        "disarm",
        "fd",
        "look",
        "poll",
        "poller",
        "queue_pairs",
        "rest",
        "rnic",
        "silent",
        "sinks",
        "stirs",
        "watched",
    )

    def __init__(self, rnic: Rnic, fd: int | None, drain: Look) -> None:
        self.rnic = rnic
        self.fd = fd  # what Trio waits for; None: the thread waits for everything
        self.watched = False  # a task waits for it
        self.silent = False  # it failed: nothing comes any more
        self.poll = rnic.poll_plain
        self.arm = rnic.arm
        self.disarm = rnic.disarm
        self.stirs = stirs = rnic.stirs
        self.look: Look = lambda: stirs() and drain()
        self.sinks: dict[int, Callable[[PlainCompletion], None]] = {}
        self.queue_pairs: dict[int, QueuePair] = {}
        self.poller: Poller | None = None
        self.rest: Iterator[PlainCompletion] = iter(())  # polled, and not dispatched yet


class Pump:
    """Drains the RNICs of one stack and hands completions to their sinks.

    Args:
      spin: seconds to poll before Trio sleeps; 0 = off.
      wake: who waits for completions while Trio sleeps: "trio" itself, or the RNIC's "thread".
        "auto": the thread on RoCE ports, Trio on software RNICs.

    Attributes:
      waiting: tasks that are parked until a completion comes; kept by those tasks (add 1 before
        parking, take it off after).  `try_spin` polls only for a sole waiter.
      fresh: one of them was parked since the last spin, and since completions came; who parks sets
        it.  For the others there was a spin, and a loop that spins keeps everybody else waiting.
      awake: those of them that were rescheduled and did not run yet; who does that adds 1, and
        each takes 1 off when it runs.  The last one drains before it parks again: what that finds
        for others makes them run without the wake eventfd, which costs more than a small message.
      unused: nobody has a connection; kept by whoever knows, who calls `rouse` when that ends.
      alone: waits in a row that might have been led; 0 from who waits beside others.
      reads: how often a reader found data without waiting while nobody waited; kept by those.
      reader: who did so last, where it is another `change_reader` sets it.
      looks: how often one that found none has drained before waiting; kept by those.
      resting: no hook is left; see `rouse`.
      broken: what went wrong in a place where nothing may be raised (an instrument hook, a
        flush, an RNIC's `Rnic.service`), and soon ends `run`; None while all is well.
      passes: of Trio's scheduler since `run` was called, without those in which it rested.
      wakeups: how often the scheduler was woken through the wake eventfd, or by an RNIC itself.
    """

    __slots__ = (
        "_after_wait", "_alone_at", "_awake_passes", "_before_wait", "_busy_passes", "_calls",
        "_draining", "_finishing", "_flushes", "_lanes", "_leader_fd", "_led", "_listening",
        "_met", "_met_at", "_nursery", "_pass", "_pass_began", "_paused", "_put_off", "_rang",
        "_reads_before", "_several_readers", "_soon", "_spinning", "_term", "_term_may_begin",
        "_turn", "_unused_passes", "_waiting_since", "_wake_by", "_wake_fd", "_yielded",
        "_yielding", "alone", "awake", "broken", "fresh", "looks", "passes", "reader", "reads",
        "resting", "unused", "waiting", "wakeups",
    )  # fmt: skip

    def __init__(self, *, spin: float, wake: Literal["auto", "trio", "thread"] = "auto") -> None:
        self._wake_by = wake
        self.waiting = 0
        self.fresh: bool = False
        self.awake = 0
        self.unused: bool = False
        self.broken: BaseException | None = None
        self.passes: int = 0
        self.wakeups: int = 0
        self._spinning = AdaptiveSpin(spin, patience=8, seldom=64)
        # When the wait for the next completion began, by `time.perf_counter_ns`; 0: nobody waits.
        self._waiting_since = 0
        self._met_at = 0  # when the last completions came for who waited
        self._paused = False  # the wait began after a pause
        self._lanes: list[_Lane] = []
        self._flushes: list[Callable[[], None]] = []
        self._soon: list[Callable[[], None]] = []
        self._busy_passes = 0  # since the first of `_soon` came
        # For `is_due`: the pass of its last call, when that began and how many calls it had, the
        # task that called last in a long one; who was told to yield in the pass before, and in it.
        self._pass = 0
        self._pass_began = 0
        self._calls = 0
        self._turn: trio.lowlevel.Task | None = None
        self._yielded: set[trio.lowlevel.Task] = set()
        self._yielding: set[trio.lowlevel.Task] = set()
        self._put_off: deque[tuple[_Lane, PlainCompletion]] = deque()
        # What calls of `drain_queue_pair` have found and not dispatched yet; they nest.
        self._finishing: list[tuple[_Lane, int, deque[PlainCompletion]]] = []
        self._draining = False
        self._wake_fd = -1
        self._nursery: trio.Nursery
        self._rang: list[_Lane] = []  # their descriptors ended a sleep, and are readable still
        self._met = False  # the drain after that sleep has found what they rang for
        self._before_wait = _BeforeWait(self)
        self.resting: bool = True
        self._unused_passes = 0
        self._after_wait = _AfterWait(self)
        self._listening = False  # `_after_wait` is installed
        self._awake_passes = 0  # passes since the last sleep
        self.reads: int = 0
        self.reader: object = None
        self._reads_before = 0
        self._several_readers = False  # since the last `_stay_awake`
        self.alone: int = 0
        self._alone_at = 0.0  # when it last counted
        self._led = False
        self._leader_fd = -1  # what the leader waits for, while he does
        self.looks: int = 0
        self._term: trio.CancelScope | None = None  # of `_let_lead`
        self._term_may_begin = False  # it does not run yet

    # -- who takes part ------------------------------------------------------------------

    def add(self, rnic: Rnic) -> None:
        """Drain this open RNIC too; its thread starts now if the pump runs."""
        by = self._wake_by
        if by == "auto":
            by = "trio" if rnic.kind == "software" else "thread"
        lane = _Lane(rnic, rnic.completion_fd() if by == "trio" else None, self.drain)
        self.rouse()
        self._lanes = [*self._lanes, lane]
        if self._wake_fd >= 0:
            self._start(lane)

    def remove(self, rnic: Rnic) -> None:
        """Drain it no more and join its thread; to be called before the RNIC is closed."""
        self.rouse()
        self.end_wait()
        for lane in self._lanes:
            if lane.rnic is rnic:
                self._lanes = [other for other in self._lanes if other is not lane]
                if lane.poller is not None:
                    lane.poller.stop()
                elif self._wake_fd >= 0:
                    trio.lowlevel.notify_closing(rnic.wait_fd())
                if lane.watched and lane.fd is not None:
                    trio.lowlevel.notify_closing(lane.fd)
                return

    def abandon(self) -> None:
        """Touch no RNIC ever again: this process is a forked child, they are its parent's."""
        for lane in self._lanes:
            lane.rnic.abandon()
        self._lanes = []
        self._flushes = []
        self._soon = []

    def register(self, rnic: Rnic, qp: QueuePair, sink: CompletionSink) -> None:
        """Hand the completions of this queue pair to ``sink.on_completion``.

        Completions of queue pairs that are not registered are dropped.  When a sink raises, that
        is logged and its queue pair goes to ERR.
        """
        self.rouse()
        lane = self._lane(rnic)
        lane.sinks[qp.qp_num] = sink.on_completion
        lane.queue_pairs[qp.qp_num] = qp

    def unregister(self, rnic: Rnic, qp: QueuePair) -> None:
        """Undo `register`; unknown ones are fine."""
        for lane in self._lanes:
            if lane.rnic is rnic:
                lane.sinks.pop(qp.qp_num, None)
                lane.queue_pairs.pop(qp.qp_num, None)

    def _lane(self, rnic: Rnic) -> _Lane:
        for lane in self._lanes:
            if lane.rnic is rnic:
                return lane
        raise ValueError(f"{rnic.name} does not belong to this pump")

    # -- draining ------------------------------------------------------------------------

    def drain(self) -> bool:
        """Take all completions there are now and dispatch them; True if there were any.

        Quick when there are none.  Called from within a sink it does nothing: the outer call
        is still at work.
        """
        if self._draining:
            return False
        self._draining = True
        came = False
        try:
            for lane in self._lanes:
                if self._put_off:
                    came = True
                    self._dispatch_put_off()  # older than what is polled now
                poll = lane.poll  # a method in a slot, called through it, is looked up the slow way
                completions = poll()
                if completions:
                    came = True
                    sinks = lane.sinks
                    lane.rest = iter(completions)
                    for completion in lane.rest:
                        sink = sinks.get(completion[0])
                        if sink is not None:
                            try:
                                sink(completion)
                            except Exception:
                                self._sink_failed(lane, completion)
            if self._put_off:
                came = True
                self._dispatch_put_off()
        finally:
            self._draining = False
        return came

    def look(self) -> None:
        """`drain`, but quicker where there is nothing."""
        if self._put_off:
            self.drain()
        for lane in self._lanes:
            look = lane.look
            look()

    def drain_queue_pair(self, rnic: Rnic, qp: QueuePair) -> None:
        """Take what has completed on one queue pair and dispatch it, from within a sink too.

        What is found of others on the way is dispatched later, in its order.
        """
        lane = self._lane(rnic)
        found = [*self._put_off, *((lane, each) for each in (*lane.rest, *lane.poll()))]
        self._put_off.clear()
        wanted: deque[PlainCompletion] = deque()
        for each, number, rest in self._finishing:
            if each is lane and number == qp.qp_num:
                # A call around this one is at it: what it has left is older than the rest.
                wanted.extend(rest)
                rest.clear()
        for each, completion in found:
            if each is lane and completion[0] == qp.qp_num:
                wanted.append(completion)
            else:
                self._put_off.append((each, completion))
        inside, self._draining = self._draining, True
        self._finishing.append((lane, qp.qp_num, wanted))
        try:
            while wanted:
                self._dispatch(lane, wanted.popleft())
        finally:
            self._finishing.pop()
            self._draining = inside

    def _dispatch_put_off(self) -> None:
        while self._put_off:
            self._dispatch(*self._put_off.popleft())

    def _dispatch(self, lane: _Lane, completion: PlainCompletion) -> None:
        sink = lane.sinks.get(completion[0])
        if sink is not None:
            try:
                sink(completion)
            except Exception:
                self._sink_failed(lane, completion)

    def flush_later(self, flush: Callable[[], None]) -> None:
        """Call ``flush()`` once before the scheduler sleeps or polls for I/O, at the latest."""
        self._flushes.append(flush)
        if self._led:
            self._flush()
        elif self.resting:
            self.rouse()

    def flush_soon(self, flush: Callable[[], None]) -> None:
        """Call ``flush()`` once before the scheduler sleeps, or a few passes later."""
        if not self._soon:
            self._busy_passes = 0
        self._soon.append(flush)
        if self.resting and not self._led:
            self.rouse()

    def is_due(self) -> bool:
        """Whether an amortised checkpoint of the running task is to be a full one.

        Not while the scheduler's pass is short.  When it is long already, or has had many such
        calls, each task gets one, as with strict checkpoints, so that a pass with many busy tasks
        is no longer than with those: the first call of a turn is full if the task has come from
        such a checkpoint, and the second in any case.
        """
        now = _now()
        if self._pass != self.passes:
            self._begin_pass(now, trio.lowlevel.current_task())
            if self._yielded or self._yielding:
                self._yielded, self._yielding = self._yielding, set()
            return False
        if self.resting:
            return self._is_due_at_rest(now)
        self._calls = calls = self._calls + 1
        if calls < _MOST_CALLS and now - self._pass_began < _LONG_PASS_NS:
            return False
        task = trio.lowlevel.current_task()
        if self._turn is not task:
            self._turn = task
            if task not in self._yielded:
                return False
        self._yielding.add(task)
        return True

    def _is_due_at_rest(self, now: int) -> bool:
        """As `is_due`, while nobody counts passes."""
        task = trio.lowlevel.current_task()
        if task.custom_sleep_data is not _AWAKE:  # it has let others run since its last call
            task.custom_sleep_data = _AWAKE
            if self._turn is task:
                self._begin_pass(now, task)
                return False
        self._calls += 1
        if self._calls < _MOST_CALLS and now - self._pass_began < _LONG_PASS_NS:
            return False
        self._pass_began = now
        if self._turn is not task:
            self._turn = task
            if self._calls < _MOST_CALLS:
                return False  # perhaps the loop has slept in between
            self.rouse()  # with several busy tasks they have to be counted
        self._calls = 0
        return True

    def _begin_pass(self, now: int, task: trio.lowlevel.Task) -> None:
        self._pass = self.passes
        self._pass_began = now
        self._calls = 1
        self._turn = task

    def expect(self) -> None:
        """A connection begins: what is said over it first is no less quickly answered than the
        rest."""
        self._met_at = _now()
        self.rouse()

    def try_spin(self, ready: Callable[[], bool] | None = None, *, answered: bool = False) -> bool:
        """Poll for a moment instead of parking a task; True if what it waits for came.

        Only for a sole waiter (`waiting` is 0), with nothing else to run, and not after a pause in
        which the peer has fallen asleep; otherwise, or with ``spin`` 0, returns False at once.
        Flushes what is to be flushed first.

        Args:
          ready: whether what the caller waits for is there; None: it waits for any completion.
          answered: the peer has just been sent something, and may have been woken for it on this
            processor.  Where a spin is not worth it, it gets the processor at least.
        """
        spinning = self._spinning
        if not spinning.ns or self.waiting:
            return False
        self._waiting_since = now = _now()
        self._paused = now - self._met_at > PAUSE_NS
        tired = self._paused or spinning.tired
        if tired and not answered:
            return False
        if self._flushes:
            self._flush()
            if self.drain() and (ready is None or ready()):
                self._waiting_since, self._met_at = 0, now
                return True
        if tired:
            return self._is_met_aside(now, ready)
        end = now + spinning.ns
        while not trio.lowlevel.current_statistics().tasks_runnable:
            if not self._spin(end):
                return False
            if ready is None or ready():
                self._waiting_since, self._met_at = 0, now
                return True
            if _now() >= end:
                return False  # all that comes is for others
        spinning.hindered()
        return False

    def _is_met_aside(self, now: int, ready: Callable[[], bool] | None) -> bool:
        """Step aside if that is worth it; True: what ``ready`` tells of came."""
        spinning = self._spinning
        if not spinning.may_step_aside():
            return False
        # Who leads is alone, and needs not ask, which takes as long as all the rest.
        if not self._led and trio.lowlevel.current_statistics().tasks_runnable:
            spinning.stay()
            return False
        spinning.step_aside()
        if not self.drain() or not (ready is None or ready()):
            return False
        self._waiting_since, self._met_at = 0, now
        self.may_lead()  # as if it had waited, which is for the next time
        return True

    def _spin(self, end: int) -> bool:
        """Poll until something comes (True) or the clock shows ``end``, in ns."""
        return self._spinning.spin([lane.look for lane in self._lanes] * _LOOKS, end) is not None

    def _flush(self) -> None:
        while self._flushes:
            flushes, self._flushes = self._flushes, []
            for flush in flushes:
                try:
                    flush()
                except Exception as problem:
                    self._break(problem)

    def _flush_all(self) -> None:
        self._flushes += self._soon
        self._soon = []
        self._flush()

    def _sink_failed(self, lane: _Lane, completion: PlainCompletion) -> None:
        _log.exception("%s: queue pair %d is given up", lane.rnic.name, completion[0])
        qp = lane.queue_pairs.get(completion[0])
        if qp is not None:
            qp.to_err()

    # -- one task alone ------------------------------------------------------------------

    def may_lead(self) -> bool:
        """Whether the running task, which is the first to wait, is to `lead`."""
        if self._led:
            return True
        spinning = self._spinning
        if spinning.ns and not (self._paused or spinning.tired):
            self.alone = 0
            return False
        before, self._alone_at = self._alone_at, time.perf_counter()
        if self._alone_at - before > _GAP:
            self.alone = 0
        self.alone += _PAUSES_COUNT if self._paused else 1
        return self.alone > _ALONE and self._begin_to_lead()

    def change_reader(self, reader: object) -> None:
        """Another stream finds data without waiting: with several, nobody leads."""
        self.reader = reader
        self._several_readers = True
        if self._led:
            self.rouse()

    def _begin_to_lead(self) -> bool:
        """Whether one task can lead from now on: there is one doorbell, and `_watch` is at it."""
        lane = self._lanes[0] if len(self._lanes) == 1 else None
        if lane is None or lane.fd is None or not lane.watched:
            return False
        self._led = True
        self._remove_hooks()
        trio.lowlevel.notify_closing(lane.fd)  # `_watch` lets go of it
        self._flush_all()
        return self._led

    def is_led_asleep(self) -> bool:
        """Whether the running task, which is to wait, leads already and will not find anything by
        looking first: then it is to `lead` at once."""
        if not self._led or self.waiting:
            return False
        self._waiting_since = now = _now()
        self._paused = now - self._met_at > PAUSE_NS
        return self._paused or self._spinning.tired

    async def lead(self, *, asleep: bool = False, answered: bool = False) -> bool:
        """Wait for a message, or for nothing when the pump is wanted otherwise.

        Whoever `may_lead` calls this instead of parking.  If another task finds what the leader
        waits for, that one has to call `end_wait`.

        Args:
          asleep: it `is_led_asleep`, and the caller has not called `try_spin`.
          answered: as for that.

        Returns:
          Whether others ran; False: something came before that, perhaps for others.
        """
        lane = self._lanes[0]
        fd = lane.fd
        assert fd is not None
        try:
            if (asleep and self._is_met_awake(lane, answered)) or self._is_met_armed(lane):
                return False
        except Exception as problem:
            self._break(problem)
            self.rouse()
            return False
        self.waiting += 1
        self._leader_fd = fd
        try:
            await _wait_readable(fd)
        except trio.ClosedResourceError:
            return True
        finally:
            self._leader_fd = -1
            self.waiting -= 1
            if self._term_may_begin:
                self._begin_term()
        self.passes += 1
        self.wakeups += 1
        try:
            if self.drain():
                self._rang.append(lane)  # its descriptor is read before the next wait
            else:
                self._quieten(lane)
                self.drain()
        except Exception as problem:
            self._break(problem)
        self._met_at = now = _now()
        if not self._paused:
            self._spinning.slept(now - self._waiting_since)
        self._waiting_since = 0
        if lane.silent:
            self.rouse()
        return True

    def _is_met_awake(self, lane: _Lane, answered: bool) -> bool:
        """Spin or step aside if that is worth it; True: something came, which was taken."""
        spinning, began = self._spinning, self._waiting_since
        if not self._paused and spinning.worthwhile():
            if trio.lowlevel.current_statistics().tasks_runnable:
                spinning.hindered()
                return False
            if not self._spin(began + spinning.ns):
                return False
            self._met_at = began
            return True
        if not answered or not spinning.ns or not spinning.may_step_aside():
            return False
        stirs = lane.stirs
        if not stirs():  # else the peer has run on this processor in between, and has answered
            spinning.step_aside()
            if not stirs():
                return False
        self.looks += 1
        self._met_at = began
        return self.drain()

    def _is_met_armed(self, lane: _Lane) -> bool:
        """Arm; True: something came before that, do not wait for the doorbell."""
        self.looks += 1
        while self._rang:
            self._quieten(self._rang.pop())
        if self._soon:
            self._flush_all()
        arm = lane.arm
        if arm():
            return False
        if self.drain():
            self._met_at = _now()
        else:
            self.rouse()  # it cannot be armed: somebody has to look
        return True

    def end_wait(self) -> None:
        """Have the leader look, if he waits: what he waits for has come, or he leads no more."""
        fd, self._leader_fd = self._leader_fd, -1
        if fd >= 0:
            trio.lowlevel.notify_closing(fd)

    async def _let_lead(self) -> None:
        """Return when nobody leads, any more, or who does has stopped looking."""
        while self._led:
            before = self.looks
            self._term_may_begin = self._leader_fd >= 0  # when he has what he waits for
            with trio.CancelScope() as self._term:
                if not self._term_may_begin:
                    self._begin_term()
                await trio.sleep_forever()
            self._term = None
            self._term_may_begin = False
            self._flush_all()
            if self._leader_fd < 0 and self.looks == before:
                self.rouse()

    def _begin_term(self) -> None:
        self._term_may_begin = False
        if self._term is not None:
            self._term.deadline = trio.current_time() + _TERM

    # -- inside Trio's loop --------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled: the hooks are installed, each RNIC has its thread.

        At the end the hooks are gone and the threads are joined.  Raises what is `broken`.
        """
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.rouse()
        try:
            async with trio.open_nursery() as self._nursery:
                for lane in self._lanes:
                    self._start(lane)
                task_status.started()
                while self.broken is None:
                    await trio.lowlevel.wait_readable(self._wake_fd)
                    os.eventfd_read(self._wake_fd)
                    self.wakeups += 1
                    self.rouse()
                    self._service()
                self._nursery.cancel_scope.cancel()
            raise self.broken
        finally:
            self._remove_hooks()
            self._led = False
            self.end_wait()
            for lane in self._lanes:
                if lane.poller is not None:
                    lane.poller.stop()
                    lane.poller = None
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _start(self, lane: _Lane) -> None:
        try:
            lane.poller = Poller(lane.rnic, self._wake)
        except NoThread as problem:
            # A program that needs no thread over TCP, as where the memory for one is refused, must
            # not need one here.
            _log.warning("%s: Trio waits in place of a thread: %s", lane.rnic.name, problem)
            self._nursery.start_soon(self._wait_without_thread, lane)
        if lane.fd is not None:
            self._nursery.start_soon(self._watch, lane, lane.fd)

    async def _wait_without_thread(self, lane: _Lane) -> None:
        """Do what the thread of an RNIC does, and serve it at once."""
        while lane in self._lanes:
            try:
                await trio.lowlevel.wait_readable(lane.rnic.wait_fd())
            except trio.ClosedResourceError:
                continue  # `remove`
            self.rouse()
            try:
                lane.rnic.service()
            except Exception as problem:
                self._break(problem)
                return

    async def _watch(self, lane: _Lane, fd: int) -> None:
        """Have Trio wait for the completions of an RNIC.

        The hook has drained when this wakes.  If that found what had come, those who waited for
        it run in this pass, some of them before this, and some after; so the descriptor is left
        readable until they have run.
        """
        while lane in self._lanes and not lane.silent:
            await self._let_lead()
            if lane not in self._lanes:
                return  # removed meanwhile: its descriptor may be another file's by now
            lane.watched = True
            try:
                await trio.lowlevel.wait_readable(fd)
            except trio.ClosedResourceError:
                continue  # the RNIC is gone, or somebody leads
            finally:
                lane.watched = False
            self.wakeups += 1
            if self._led:
                continue  # whoever leads was first, and looks before he waits
            self.rouse()
            if lane not in self._lanes:
                return
            if self._met:
                self._rang.append(lane)
                continue
            try:
                self._quieten(lane)
                if not lane.silent:
                    lane.look()  # at rings that were not looked at before, as they rang
            except Exception as problem:
                self._break(problem)
                return

    def _quieten(self, lane: _Lane) -> None:
        if lane in self._lanes and not lane.rnic.quieten():
            lane.silent = True

    def _wake(self) -> None:
        """End Trio's wait, or prevent the next; from any thread."""
        os.eventfd_write(self._wake_fd, 1)

    def _service(self) -> None:
        for lane in self._lanes:
            poller = lane.poller
            if poller is not None and poller.pending:
                poller.pending = False
                try:
                    lane.rnic.service()
                except Exception as problem:
                    self._break(problem)

    def _break(self, problem: BaseException) -> None:
        if self.broken is None:
            _log.error("the stack cannot go on", exc_info=problem)
            self.broken = problem
            if self._wake_fd >= 0:
                self._wake()  # `run` raises it

    def before_io_wait(self, timeout: float) -> None:
        """The hook: flush, drain, and before a sleep also spin and arm.  Raises nothing."""
        self.passes += 1
        try:
            while self._rang:
                self._quieten(self._rang.pop())
            if self._soon:
                self._take_soon(timeout)
            if self._flushes:
                self._flush()
            came = self.drain()
            if came:
                self._waiting_since = 0
                self.fresh = False
                if self.waiting:
                    self._paused = False
                    self._met_at = _now()
            if timeout > 0:
                self._awake_passes = 0
                if came or self._idle(timeout):
                    self._wake()
            else:
                self._awake_passes += 1
                if self._awake_passes > _SLEEPLESS:
                    self._stay_awake()
            if self._flushes:
                self._flush()
            if self.unused:
                self._count_unused()
        except Exception as problem:
            self._break(problem)

    def _take_soon(self, timeout: float) -> None:
        self._busy_passes += 1
        if timeout > 0 or self._busy_passes >= _SOON:
            self._flush_all()

    def _count_unused(self) -> None:
        """Rest after so many passes, if all that can come rings."""
        self._unused_passes += 1
        if self._unused_passes <= _UNUSED:
            return
        self._unused_passes = 0
        if self._soon or self._put_off or self.waiting:
            return
        if all(lane.arm() for lane in self._lanes):
            self._remove_hooks()
        else:
            self.drain()

    def _stay_awake(self) -> None:
        """The loop has not slept for so many passes: need it be asked in each of them?"""
        self._awake_passes = 0
        self._stop_listening()
        reads, self._reads_before = self.reads - self._reads_before, self.reads
        several, self._several_readers = self._several_readers, False
        if reads >= _READS and not several and not self.waiting:
            self._begin_to_lead()

    def _remove_hooks(self) -> None:
        if not self.resting:
            self.resting = True
            trio.lowlevel.remove_instrument(self._before_wait)
        self._stop_listening()

    def rouse(self) -> None:
        """Have the hooks, from this pass of the scheduler on: something has come, or is to."""
        if self.resting and self._wake_fd >= 0:
            self.resting = self._met = False
            self._unused_passes = self.alone = self._awake_passes = 0
            self._reads_before = self.reads
            if self._led:
                self._led = False
                self.end_wait()
                if self._term is not None:
                    self._term.cancel()
            for lane in self._lanes:
                lane.disarm()
            trio.lowlevel.add_instrument(self._before_wait)

    def _stop_listening(self) -> None:
        if self._listening:
            self._listening = False
            trio.lowlevel.remove_instrument(self._after_wait)

    def _idle(self, timeout: float) -> bool:
        """Spin if that is worth it, then arm; True: do not sleep, completions came after all."""
        spinning = self._spinning
        if self.fresh and spinning.ns and self.waiting and not self._paused:
            now = _now()
            if not self._waiting_since:
                self._waiting_since = now
            # One wait is one spin: others may wake the scheduler meanwhile, or a reader has spun.
            end = min(self._waiting_since + spinning.ns, now + int(min(timeout, 1.0) * 1e9))
            if now < end and spinning.worthwhile():
                self.fresh = False
                if self._spin(end):
                    self._waiting_since = 0
                    return True
        if not self._listening:
            self._listening = True
            trio.lowlevel.add_instrument(self._after_wait)
        armed = True
        for lane in self._lanes:
            if not lane.arm():
                armed = False
        if not armed:
            # Also when nothing comes of it: the next pass must arm again before it sleeps.
            self.drain()
        return not armed

    def after_io_wait(self, timeout: float) -> None:
        """The hook: drain what ended a sleep, before any task runs.  Raises nothing."""
        if timeout > 0:
            try:
                for lane in self._lanes:
                    lane.disarm()
                self._met = self.drain()
                if self._met and self.waiting:
                    self._paused = False
                    self._met_at = now = _now()
                    if self._waiting_since:
                        self._spinning.slept(now - self._waiting_since)
                        self._waiting_since = 0
            except Exception as problem:
                self._break(problem)


# Trio's hooks, without a call between; they may not raise, Trio would drop them and nobody would
# drain.


class _BeforeWait(trio.abc.Instrument):
    def __init__(self, pump: Pump) -> None:
        self.before_io_wait = pump.before_io_wait  # type: ignore[method-assign]


class _AfterWait(trio.abc.Instrument):
    def __init__(self, pump: Pump) -> None:
        self.after_io_wait = pump.after_io_wait  # type: ignore[method-assign]
