"""Injected faults of the software RNIC, for tests: on real RNICs these faults are rare.

Theory of operation.  A `FaultPlan` belongs to one `SoftRnic`, whose queue pairs are then of the
class `FaultyQueuePair`.  An RNIC without a plan runs none of this code.  A faulty queue pair
queries its plan before it executes a request.  If the plan has no fault for them, a write and its
message are executed together, as without a plan (`QueuePair.deliver`).  A fault either *strikes* at
once (a link or port goes down, messages are delayed), or is *armed* until the next request of its
kind.  Faults are injected on command (`FaultPlan.inject`), or at random, after random numbers of
requests.  The seed and the sequence of requests determine the random faults.  `FaultPlan.log` lists
all faults.

A fault looks as it does with hardware: the request completes with RETRY_EXC_ERR, the other requests
are flushed, and the queue pair is in ERR.  A queue pair that stays in RTS never loses anything: a
reliable connection delivers all messages in order, or ends.

Only `Fault.NOT_PLACED` breaks the rules of a reliable connection: the request completes with
success, and the message did not arrive.  For this case RFC 7609, 4.6.1 compares sequence numbers.
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
    """The kinds of faults."""

    LINK_DOWN = "link-down"
    """A queue pair fails, and its peer is notified."""
    LINK_DOWN_HERE = "link-down-here"
    """A queue pair fails; its peer notices when it posts something."""
    LINK_SILENT = "link-silent"
    """Nothing arrives any more, and neither side is notified."""
    PORT_DOWN = "port-down"
    """As `SoftRnic.fail`."""
    PORT_FLAP = "port-flap"
    """The port is down for `FaultPlan.flap` seconds."""
    COMPLETION_LOST = "completion-lost"
    """A message arrives, but its request fails, and with it the queue pair."""
    NOT_PLACED = "not-placed"
    """A message completes with success and never arrives; then the queue pair fails."""
    MESSAGE_LOST = "message-lost"
    """A message does not arrive, and the queue pair fails."""
    WRITE_LOST = "write-lost"
    """At most a part of an RDMA write arrives; the queue pair fails."""
    DELAY = "delay"
    """The requests of a queue pair are delayed for at most `FaultPlan.delay` seconds."""
    WAKEUP = "wakeup"
    """Both sides are woken twice without a message."""


_OF_MESSAGES: Final = frozenset({Fault.COMPLETION_LOST, Fault.NOT_PLACED, Fault.MESSAGE_LOST})
_OF_REQUESTS: Final = _OF_MESSAGES | {Fault.WRITE_LOST}

_OK: Final = int(WcStatus.SUCCESS)
_UNREACHABLE: Final = int(WcStatus.RETRY_EXC_ERR)


class Struck(NamedTuple):
    """A fault that happened."""

    request: int
    """How many requests the RNIC had executed before the fault."""
    kind: Fault
    qp_num: int
    """0 for a fault of the whole port."""
    message: bytes | None
    """The message that the fault hit; None if it hit no message."""


class _Armed(NamedTuple):
    kind: Fault
    qp_num: int | None


class FaultPlan:
    """The faults of one software RNIC, injected on command or at random.

    Args:
      seed: the seed of all random choices.
      kinds: faults that are injected at random, all with the same frequency.
      every: requests between two random faults, on average; 0: faults only on command.
      delay: the longest delay by `Fault.DELAY`, seconds.
      flap: how long the port is down in `Fault.PORT_FLAP`, seconds.
      concerns: returns True for the messages that `Fault.COMPLETION_LOST`, `Fault.MESSAGE_LOST` and
        `Fault.NOT_PLACED` may hit; by default all messages.

    Attributes:
      log: the faults that have happened, oldest first.
      on_struck: called with each fault as it happens; it must not call the RNIC.
      on_message: called with each message that was sent: the queue pair's number, the message, and
        the status of its completion; it must not call the RNIC.
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
        """Bind the plan to an RNIC; called by `SoftRnic`.

        Raises:
          ValueError: the plan belongs to another RNIC already.
        """
        if hasattr(self, "_rnic"):
            raise ValueError("the fault plan belongs to another RNIC")
        self._rnic = rnic

    def queue_pair(self, rnic: SoftRnic, pd: SoftProtectionDomain, qp_num: int) -> FaultyQueuePair:
        """Make a queue pair that is subject to this plan; called by `SoftRnic`."""
        return FaultyQueuePair(rnic, pd, qp_num, self)

    @property
    def armed(self) -> tuple[Fault, ...]:
        """Faults that wait for a request of their kind."""
        return tuple(each.kind for each in self._armed)

    def disarm(self) -> None:
        """Drop the armed faults, and inject no more random ones."""
        self._armed.clear()
        self._next = -1

    def inject(self, kind: Fault, qp_num: int | None = None) -> None:
        """Inject a fault now, or arm it for the next request of its kind.

        Args:
          kind: the fault.
          qp_num: a queue pair in RTS.  None: for a fault of a request, the first queue pair with a
            suitable request; for a fault of a link, a random one.

        Raises:
          ValueError: there is no such queue pair.
        """
        if kind in _OF_REQUESTS:
            self._armed.append(_Armed(kind, qp_num))
        elif kind in (Fault.PORT_DOWN, Fault.PORT_FLAP):
            self._inject_port_fault(kind)
        else:
            self._inject_link_fault(kind, self._choose(qp_num))

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
            raise ValueError("no such queue pair in RTS")
        # In the order of creation, because the queue pair numbers do not depend on the seed.
        return self.rng.choice(usable)

    def _inject_port_fault(self, kind: Fault) -> None:
        self.note(kind, 0, None)
        self._rnic.fail()
        if kind is Fault.PORT_FLAP:
            DelayedAction(self._rnic, self.flap, self._rnic.restore)

    def _inject_link_fault(self, kind: Fault, qp: FaultyQueuePair) -> None:
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

    def next_fault(self, qp: FaultyQueuePair, message: bytes | None) -> Fault | None:
        """The fault that hits the next request, or None.

        Args:
          qp: the queue pair of the request.
          message: the message; None: the request is a write.
        """
        self._requests += 1
        if self._requests == self._next:
            self._next = self._draw()
            kind = self.rng.choice(self._kinds)
            self.inject(kind, None if kind in _OF_REQUESTS else qp.qp_num)
        for each in self._armed:
            if each.qp_num in (None, qp.qp_num) and self._can_hit(each.kind, message):
                self._armed.remove(each)
                return each.kind
        return None

    def lets_pass(self, requests: int) -> bool:
        """True if no fault is due for the next ``requests`` requests; then they are counted."""
        if self._armed or self._requests < self._next <= self._requests + requests:
            return False
        self._requests += requests
        return True

    def _can_hit(self, kind: Fault, message: bytes | None) -> bool:
        if message is None:
            return kind is Fault.WRITE_LOST
        return kind in _OF_MESSAGES and (self.concerns is None or self.concerns(message))


class DelayedAction:
    """An action for a later poll; until then the RNIC does not let Trio sleep."""

    __slots__ = ("_action", "_due", "_rnic")

    def __init__(self, rnic: Port, seconds: float, action: Callable[[], None]) -> None:
        self._rnic = rnic
        self._due = time.monotonic() + seconds
        self._action = action
        rnic.stalled[self] = None
        rnic.timed_waits += 1

    def push(self) -> None:
        """Called by `SoftRnic.poll`."""
        if time.monotonic() >= self._due:
            self._rnic.stalled.pop(self, None)
            self._rnic.timed_waits -= 1
            self._action()


class FaultyQueuePair(SoftQueuePair):
    """A queue pair of an RNIC that has a plan.  All posts take the slow path."""

    def __init__(self, rnic: Port, pd: SoftProtectionDomain, qp_num: int, plan: FaultPlan) -> None:
        super().__init__(rnic, pd, qp_num)
        self._plan = plan
        self._silent = False
        self._delays = 0

    # -- what the plan calls -------------------------------------------------------------

    def to_err_quietly(self) -> None:
        """As `to_err`, but without a notification of the peer."""
        self._rnic.poll_sockets()  # accept a peer that has already connected
        self._enter_err(quietly=True)

    def stop_silently(self) -> None:
        """Execute no more requests, and receive no more messages, without notification."""
        self._rnic.poll_sockets()  # accept a peer that has already connected
        self._silent = True
        # Take the messages that the peer has published.  For later ones no receive is posted.
        self.ring.take_untrusted(self._complete)
        self.ring.set_posted(self.ring.tail)

    def delay(self, seconds: float) -> None:
        """Delay all requests."""
        self._delays += 1
        DelayedAction(self._rnic, seconds, self._end_delay)

    def wake_spuriously(self) -> None:
        """Wake the peer and this side twice, as if there were messages."""
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
        # If a fault is due, return False: the caller then posts write and message separately, and
        # the fault hits one of them.
        ready = self._ready_peer is not None and self._plan.lets_pass(1 if data is None else 2)
        done = ready and super().deliver(message, data, address, rkey)
        self.update_ready()
        if done:
            self._report(message, _OK)
        return done

    def peer_lives(self) -> bool:
        # With faults the socket shows nothing: TEST LINK alone finds a silent link.
        return False

    def on_peer_end(self) -> None:
        super().on_peer_end()
        self.received_all = False  # a fault may have hit a message

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
        kind = self._plan.next_fault(self, request.message)
        # `next_fault` may have injected a fault of the link or port, which ends or delays this one.
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
                self._plan.inject(kind, self.qp_num)  # try again when the request can be executed
                return STALLED
        elif kind is Fault.WRITE_LOST:
            super()._execute(self._partial(request))
        elif kind is Fault.NOT_PLACED:
            self._silent = True
            # The next poll reports the failure, after this completion.
            self._rnic.disconnected.append(self)
            status = _OK
        self._plan.note(kind, self.qp_num, request.message)
        return status

    def _partial(self, request: Request) -> Request:
        """The request with only a random part of its data, from the beginning."""
        assert request.data is not None
        return request._replace(
            data=request.data[: self._plan.rng.randrange(len(request.data) + 1)], more=None
        )
