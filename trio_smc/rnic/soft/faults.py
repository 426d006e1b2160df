"""Faults of the software RNIC on purpose: what real ones do seldom, and tests need often.

Theory of operation.  A `FaultPlan` is given to one `SoftRnic`, whose queue pairs are
`FaultyQueuePair` from then on; those of an RNIC without one know nothing of this.  A
faulty queue pair asks its plan about each request just before it is done; where no fault can come,
a write and its message may also be done at once (`QueuePair.deliver`).  A fault is either
*struck* at once (links and ports go down, messages are held up) or *armed*, to meet the next
request that it is about.  Both happen on command (`FaultPlan.inject`), or by themselves after
random numbers of requests: the seed and the sequence of requests determine all of it, and
`FaultPlan.log` tells what happened.

What fails looks as it does with hardware: the request that met the fault completes with
RETRY_EXC_ERR, the rest is flushed, the queue pair is in ERR.  Nothing is ever lost from a queue
pair that goes on: a reliable connection delivers everything in order or ends.

`Fault.NOT_PLACED` alone breaks the rules of a reliable connection: the message counts as arrived
here, and did not.  It is the case for which RFC 7609, 4.6.1 compares sequence numbers.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from trio_smc.rnic.soft.port import Port
from trio_smc.rnic.soft.queue_pair import STALLED, Request, SoftQueuePair
from trio_smc.rnic.soft.regions import SoftProtectionDomain
from trio_smc.rnic.verbs import QpState, WcStatus

if TYPE_CHECKING:
    from trio_smc.rnic.soft.device import SoftRnic

__all__ = [
    "Fault",
    "FaultPlan",
    "FaultyQueuePair",
    "Struck",
]


class Fault(StrEnum):
    """What can go wrong."""

    LINK_DOWN = "link-down"
    """A queue pair fails, and its peer is told."""
    LINK_DOWN_HERE = "link-down-here"
    """A queue pair fails; its peer notices when it posts something."""
    LINK_SILENT = "link-silent"
    """Nothing comes through any more and nobody is told: only time shows it."""
    PORT_DOWN = "port-down"
    """As `SoftRnic.fail`."""
    PORT_FLAP = "port-flap"
    """The port is down for `FaultPlan.flap` seconds."""
    COMPLETION_LOST = "completion-lost"
    """A message arrives, but here it fails, and with it the queue pair."""
    NOT_PLACED = "not-placed"
    """A message completes with success and never arrives; then the queue pair fails."""
    MESSAGE_LOST = "message-lost"
    """A message does not arrive, and the queue pair fails."""
    WRITE_LOST = "write-lost"
    """Of an RDMA write a part arrives, at most; the queue pair fails."""
    DELAY = "delay"
    """What a queue pair sends is held up for at most `FaultPlan.delay` seconds."""
    WAKEUP = "wakeup"
    """Both sides are woken, twice, with nothing there."""


_OF_MESSAGES: Final = frozenset({Fault.COMPLETION_LOST, Fault.NOT_PLACED, Fault.MESSAGE_LOST})
_OF_REQUESTS: Final = _OF_MESSAGES | {Fault.WRITE_LOST}

_OK: Final = int(WcStatus.SUCCESS)
_UNREACHABLE: Final = int(WcStatus.RETRY_EXC_ERR)


class Struck(NamedTuple):
    """A fault that happened."""

    request: int
    """How many requests the RNIC had done before."""
    kind: Fault
    qp_num: int
    """0 for one of the whole port."""
    message: bytes | None
    """What it met; None unless it was a message."""


class _Armed(NamedTuple):
    kind: Fault
    qp_num: int | None


class FaultPlan:
    """What goes wrong on one software RNIC, and when.

    Args:
      seed: of everything random.
      kinds: faults that come by themselves, equally often.
      every: after so many requests on average; 0 = only on command.
      delay: longest time for which `Fault.DELAY` holds something up, seconds.
      flap: how long the port is down in `Fault.PORT_FLAP`, seconds.
      concerns: which messages `Fault.COMPLETION_LOST`, `Fault.MESSAGE_LOST` and
        `Fault.NOT_PLACED` may meet; all by default.

    Attributes:
      log: what has happened, oldest first.
      on_struck: told of each as it happens; it must not call the RNIC.
      on_message: told of each message that was sent: the queue pair's number, the message, and the
        status of its completion; it must not call the RNIC.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        kinds: tuple[Fault, ...] = (),
        every: int = 0,
        delay: float = 0.005,
        flap: float = 0.005,
        concerns: Callable[[bytes], bool] | None = None,
    ) -> None:
        self.log: list[Struck] = []
        self.on_struck: Callable[[Struck], object] | None = None
        self.on_message: Callable[[int, bytes, int], object] | None = None
        self.delay = delay
        self.flap = flap
        self.concerns = concerns
        self.rng: random.Random = random.Random(seed)
        self._kinds = kinds
        self._every = every
        self._requests = 0
        self._next = self._draw() if every and kinds else -1
        self._armed: list[_Armed] = []
        self._rnic: SoftRnic

    def attach(self, rnic: SoftRnic) -> None:
        """For `SoftRnic`: whose plan this is.  Raises ValueError when it is another's already."""
        if hasattr(self, "_rnic"):
            raise ValueError("a fault plan serves one RNIC")
        self._rnic = rnic

    def queue_pair(self, rnic: SoftRnic, pd: SoftProtectionDomain, qp_num: int) -> FaultyQueuePair:
        """For `SoftRnic`: a new queue pair that is subject to this plan."""
        return FaultyQueuePair(rnic, pd, qp_num, self)

    @property
    def armed(self) -> tuple[Fault, ...]:
        """Faults that wait for a request to meet."""
        return tuple(each.kind for each in self._armed)

    def disarm(self) -> None:
        """Forget the faults that wait for a request, and let none come by itself any more."""
        self._armed.clear()
        self._next = -1

    def inject(self, kind: Fault, qp_num: int | None = None) -> None:
        """Let something go wrong now, or with the next request that it is about.

        Args:
          qp_num: of a queue pair in RTS.  None: whichever comes, for faults of requests; one of
            those there are, at random, for faults of links.

        Raises:
          ValueError: there is no such queue pair.
        """
        if kind in _OF_REQUESTS:
            self._armed.append(_Armed(kind, qp_num))
        elif kind in (Fault.PORT_DOWN, Fault.PORT_FLAP):
            self._strike_port(kind)
        else:
            self._strike_link(kind, self._choose(qp_num))

    # -- inside --------------------------------------------------------------------------

    def _draw(self) -> int:
        return self._requests + self.rng.randint(1, 2 * self._every)

    def _choose(self, qp_num: int | None) -> FaultyQueuePair:
        usable = [
            qp
            for qp in self._rnic.queue_pairs()
            if isinstance(qp, FaultyQueuePair)
            and qp.state is QpState.RTS
            and qp_num in (None, qp.qp_num)
        ]
        if not usable:
            raise ValueError("no queue pair to fail")
        # Numbers are random, the order of creation is not.
        return self.rng.choice(usable)

    def _strike_port(self, kind: Fault) -> None:
        self.note(kind, 0, None)
        self._rnic.fail()
        if kind is Fault.PORT_FLAP:
            DelayedAction(self._rnic, self.flap, self._rnic.restore)

    def _strike_link(self, kind: Fault, qp: FaultyQueuePair) -> None:
        self.note(kind, qp.qp_num, None)
        if kind is Fault.LINK_DOWN:
            qp.to_err()
        elif kind is Fault.LINK_DOWN_HERE:
            qp.to_err_quietly()
        elif kind is Fault.LINK_SILENT:
            qp.stop_silently()
        elif kind is Fault.DELAY:
            qp.delay(self.delay * self.rng.random())
        else:
            qp.wake_spuriously()

    def note(self, kind: Fault, qp_num: int, message: bytes | None) -> None:
        """Add to `log`."""
        struck = Struck(self._requests, kind, qp_num, message)
        self.log.append(struck)
        if self.on_struck is not None:
            self.on_struck(struck)

    def meet(self, qp: FaultyQueuePair, message: bytes | None) -> Fault | None:
        """A request (a message, or a write) is about to be done: what happens to it?"""
        self._requests += 1
        if self._requests == self._next:
            self._next = self._draw()
            kind = self.rng.choice(self._kinds)
            self.inject(kind, None if kind in _OF_REQUESTS else qp.qp_num)
        for each in self._armed:
            if each.qp_num in (None, qp.qp_num) and self._is_about(each.kind, message):
                self._armed.remove(each)
                return each.kind
        return None

    def lets_pass(self, requests: int) -> bool:
        """Whether the next few requests meet no fault, whatever they are; they are done then."""
        if self._armed or self._requests < self._next <= self._requests + requests:
            return False
        self._requests += requests
        return True

    def _is_about(self, kind: Fault, message: bytes | None) -> bool:
        if message is None:
            return kind is Fault.WRITE_LOST
        return kind in _OF_MESSAGES and (self.concerns is None or self.concerns(message))


class DelayedAction:
    """Something to be done at a later poll; the RNIC does not sleep before."""

    __slots__ = ("_action", "_due", "_rnic")

    def __init__(self, rnic: Port, seconds: float, action: Callable[[], None]) -> None:
        self._rnic = rnic
        self._due = time.monotonic() + seconds
        self._action = action
        rnic.stalled[self] = None
        rnic.timed_waits += 1

    def push(self) -> None:
        """For `SoftRnic.poll`."""
        if time.monotonic() >= self._due:
            self._rnic.stalled.pop(self, None)
            self._rnic.timed_waits -= 1
            self._action()


class FaultyQueuePair(SoftQueuePair):
    """A queue pair of an RNIC that has a plan; what is posted takes the slow path."""

    def __init__(self, rnic: Port, pd: SoftProtectionDomain, qp_num: int, plan: FaultPlan) -> None:
        super().__init__(rnic, pd, qp_num)
        self._plan = plan
        self._silent = False
        self._delays = 0

    # -- what the plan calls -------------------------------------------------------------

    def to_err_quietly(self) -> None:
        """As `to_err`, but the peer is not told."""
        self._rnic.poll_sockets()  # who has dialled us already must not find the door closed
        self._enter_err(quietly=True)

    def stop_silently(self) -> None:
        """Do nothing more that is posted, take nothing more from the peer."""
        self._silent = True
        # What was published is taken by `poll`; beyond that no receive is posted any more.
        self.ring.take_untrusted(self._complete)
        self.ring.set_posted(self.ring.tail)

    def delay(self, seconds: float) -> None:
        """Let what is posted wait."""
        self._delays += 1
        DelayedAction(self._rnic, seconds, self._end_delay)

    def wake_spuriously(self) -> None:
        """Wake the peer and ourselves, twice, as if something had come."""
        for _ in range(2):
            self._rnic.request_service()
            self._ring_doorbell()

    def _end_delay(self) -> None:
        self._delays -= 1

    # -- SoftQueuePair -------------------------------------------------------------------

    def update_ready(self) -> None:
        self._ready_peer = None

    def deliver(
        self, message: bytes, data: bytes | memoryview | None, address: int, rkey: int
    ) -> bool:
        if self._must_wait():
            return False
        super().update_ready()
        # Refused by the plan, both are posted, and meet it then.
        ready = self._ready_peer is not None and self._plan.lets_pass(1 if data is None else 2)
        done = ready and super().deliver(message, data, address, rkey)
        self.update_ready()
        if done:
            self._report(message, _OK)
        return done

    def post_receive(self, count: int) -> None:
        if self._silent and self.state is QpState.RTS:
            self.ring.posted += count
        else:
            super().post_receive(count)

    def on_port_change(self) -> None:
        if not self._silent:
            super().on_port_change()

    def _execute(self, request: Request) -> int:
        status = self._attempt(request)
        if request.message is not None and status != STALLED:
            self._report(request.message, status)
        return status

    def _report(self, message: bytes, status: int) -> None:
        if self._plan.on_message is not None:
            self._plan.on_message(self.qp_num, message, status)

    def _attempt(self, request: Request) -> int:
        if self._must_wait():
            return STALLED
        sockets = self._sockets
        if sockets.peer is None:
            self._rnic.poll_sockets()
        peer = sockets.peer
        if not self._rnic.port_active or peer is None or peer.ring.is_closed() or sockets.unsent:
            return super()._execute(request)
        kind = self._plan.meet(self, request.message)
        # A fault of the link or port that came by itself has ended all this, or holds it up.
        if self._must_wait():
            return STALLED
        if kind is None:
            return super()._execute(request)
        return self._execute_faultily(kind, request)

    def _must_wait(self) -> bool:
        return self._silent or self._delays > 0 or self.state is not QpState.RTS

    def _execute_faultily(self, kind: Fault, request: Request) -> int:
        status = _UNREACHABLE
        if kind is Fault.COMPLETION_LOST:
            if super()._execute(request) == STALLED:
                self._plan.inject(kind, self.qp_num)  # not yet
                return STALLED
        elif kind is Fault.WRITE_LOST:
            super()._execute(self._partial(request))
        elif kind is Fault.NOT_PLACED:
            self._silent = True
            # Failing now would be seen before this completion.
            self._rnic.disconnected.append(self)
            status = _OK
        self._plan.note(kind, self.qp_num, request.message)
        return status

    def _partial(self, request: Request) -> Request:
        """The beginning of a write."""
        assert request.data is not None
        return request._replace(
            data=request.data[: self._plan.rng.randrange(len(request.data) + 1)], more=None
        )
