"""Polls the RNICs of a stack and passes each completion to the sink of its queue pair.

Pure: no Trio, no clock.  The completions of one queue pair reach their sink in order, even if the
sink itself calls `Dispatcher.drain_queue_pair`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from .poller import Poller
from .spinner import Probe
from .verbs import PlainCompletion, QueuePair, Rnic

__all__ = ["CompletionSink", "Dispatcher", "Lane"]

_log = logging.getLogger("trio_smc.rnic")

_PROBES_PER_ROUND: Final = 6
"""Probes of each RNIC in a round of a spin.  A round ends with a read of the clock and a yield of
the processor, which take longer than a probe.  Chosen; no measurement is recorded."""


class CompletionSink(Protocol):
    """The receiver of the completions of a queue pair."""

    def on_completion(self, completion: PlainCompletion) -> None:
        """Called on the Trio thread; must not block."""


class Lane:
    """One RNIC of a pump: its bound methods, looked up once, and its sinks.

    Args:
      rnic: an open RNIC.
      fd: as the attribute.
      drain: `Dispatcher.drain` of the dispatcher that the lane belongs to.

    Attributes:
      fd: the descriptor that Trio waits on; None: the RNIC's thread waits for everything.
      watched: a task waits on ``fd``.
      failed: the RNIC failed, and ``fd`` is never readable again.
      undispatched: completions that were polled and have not reached their sinks yet.
      probe: drains if `Rnic.has_pending`; True if there were completions.
    """

    __slots__ = (
        "arm", "disarm", "failed", "fd", "has_pending", "poll", "poller", "probe", "queue_pairs",
        "rnic", "sinks", "undispatched", "watched",
    )  # fmt: skip

    def __init__(self, rnic: Rnic, fd: int | None, drain: Probe) -> None:
        self.rnic = rnic
        self.fd = fd
        self.watched = False
        self.failed = False
        self.poll = rnic.poll_plain
        self.arm = rnic.arm
        self.disarm = rnic.disarm
        self.has_pending = has_pending = rnic.has_pending
        self.probe: Probe = lambda: has_pending() and drain()
        self.sinks: dict[int, Callable[[PlainCompletion], None]] = {}
        self.queue_pairs: dict[int, QueuePair] = {}
        self.poller: Poller | None = None
        self.undispatched: Iterator[PlainCompletion] = iter(())


class Dispatcher:
    """Polls RNICs and dispatches completions.

    Attributes:
      lanes: one for each RNIC.  The list is replaced and never changed, because `drain` iterates
        over it.
    """

    __slots__ = ("_backlog", "_draining", "_nested", "lanes")

    def __init__(self) -> None:
        self.lanes: list[Lane] = []
        self._draining = False
        # Completions that `drain_queue_pair` polled for other queue pairs.
        self._backlog: deque[tuple[Lane, PlainCompletion]] = deque()
        # Calls of `drain_queue_pair` may nest: what each has found and not dispatched yet.
        self._nested: list[tuple[Lane, int, deque[PlainCompletion]]] = []

    @property
    def has_backlog(self) -> bool:
        """True if completions were polled that no sink has received yet."""
        return bool(self._backlog)

    def lane(self, rnic: Rnic) -> Lane:
        """The lane of ``rnic``.

        Raises:
          ValueError: the RNIC was not added.
        """
        for lane in self.lanes:
            if lane.rnic is rnic:
                return lane
        raise ValueError(f"{rnic.name} does not belong to this pump")

    def add(self, lane: Lane) -> None:
        """Poll this lane too."""
        self.lanes = [*self.lanes, lane]

    def remove(self, rnic: Rnic) -> Lane | None:
        """Remove and return the lane of ``rnic``; None if there is none."""
        for lane in self.lanes:
            if lane.rnic is rnic:
                self.lanes = [other for other in self.lanes if other is not lane]
                return lane
        return None

    def clear(self) -> None:
        """Remove all lanes."""
        self.lanes = []

    def register(self, rnic: Rnic, qp: QueuePair, sink: CompletionSink) -> None:
        """Pass the completions of this queue pair to ``sink``; see `Pump.register`."""
        lane = self.lane(rnic)
        lane.sinks[qp.qp_num] = sink.on_completion
        lane.queue_pairs[qp.qp_num] = qp

    def unregister(self, rnic: Rnic, qp: QueuePair) -> None:
        """Undo `register`.  Unknown queue pairs are ignored."""
        for lane in self.lanes:
            if lane.rnic is rnic:
                lane.sinks.pop(qp.qp_num, None)
                lane.queue_pairs.pop(qp.qp_num, None)

    def drain(self) -> bool:
        """Poll every RNIC and dispatch all completions; True if there were any.

        Quick if there are none.  A nested call by a sink returns False; the outer call continues.
        """
        if self._draining:
            return False
        self._draining = True
        found = False
        try:
            for lane in self.lanes:
                if self._backlog:
                    found = True
                    self._dispatch_backlog()  # older than the completions polled below
                poll = lane.poll  # a local variable: `lane.poll()` through the slot would be slower
                completions = poll()
                if completions:
                    found = True
                    sinks = lane.sinks
                    lane.undispatched = iter(completions)
                    for completion in lane.undispatched:
                        sink = sinks.get(completion[0])
                        if sink is not None:
                            try:
                                sink(completion)
                            except Exception:
                                _close_queue_pair(lane, completion)
            if self._backlog:
                found = True
                self._dispatch_backlog()
        finally:
            self._draining = False
        return found

    def drain_if_pending(self) -> None:
        """`drain`, but cheaper if there is nothing to poll."""
        if self._backlog:
            self.drain()
        for lane in self.lanes:
            has_pending = lane.has_pending  # a local variable, as in `drain`
            if has_pending():
                self.drain()

    def probes(self) -> list[Probe]:
        """One round of a spin, for `AdaptiveSpin.spin`."""
        return [lane.probe for lane in self.lanes] * _PROBES_PER_ROUND

    def drain_queue_pair(self, rnic: Rnic, qp: QueuePair) -> None:
        """Dispatch what has completed on one queue pair.  Sinks may call it.

        Completions of other queue pairs that are polled meanwhile are dispatched later, in order.

        Raises:
          ValueError: the RNIC was not added.
        """
        lane = self.lane(rnic)
        polled = [*self._backlog, *((lane, each) for each in (*lane.undispatched, *lane.poll()))]
        self._backlog.clear()
        wanted: deque[PlainCompletion] = deque()
        for each, number, rest in self._nested:
            if each is lane and number == qp.qp_num:
                # An outer call drains the same queue pair: its completions are older.
                wanted.extend(rest)
                rest.clear()
        for each, completion in polled:
            if each is lane and completion[0] == qp.qp_num:
                wanted.append(completion)
            else:
                self._backlog.append((each, completion))
        outer, self._draining = self._draining, True
        self._nested.append((lane, qp.qp_num, wanted))
        try:
            while wanted:
                _dispatch(lane, wanted.popleft())
        finally:
            self._nested.pop()
            self._draining = outer

    def _dispatch_backlog(self) -> None:
        while self._backlog:
            _dispatch(*self._backlog.popleft())


def _dispatch(lane: Lane, completion: PlainCompletion) -> None:
    sink = lane.sinks.get(completion[0])
    if sink is not None:
        try:
            sink(completion)
        except Exception:
            _close_queue_pair(lane, completion)


def _close_queue_pair(lane: Lane, completion: PlainCompletion) -> None:
    _log.exception("%s: queue pair %d fails: its sink raised", lane.rnic.name, completion[0])
    qp = lane.queue_pairs.get(completion[0])
    if qp is not None:
        qp.to_err()
