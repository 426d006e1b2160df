"""Queue pairs of a software RNIC that has a plan of faults (`faults`): they ask it at each request,
and fail as it says.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ._faultkinds import Fault
from ._ring import ring_doorbell
from ._softmr import SoftProtectionDomain
from ._softqp import STALLED, Request, SoftQueuePair
from .verbs import QpState, WcStatus

if TYPE_CHECKING:
    from .faults import FaultPlan
    from .software import SoftRnic

__all__ = ["FaultyQueuePair", "Moment"]

_OK: Final = int(WcStatus.SUCCESS)
_UNREACHABLE: Final = int(WcStatus.RETRY_EXC_ERR)


class Moment:
    """Something to be done at a later poll; the RNIC does not sleep before."""

    __slots__ = ("_action", "_due", "_rnic")

    def __init__(self, rnic: SoftRnic, seconds: float, action: Callable[[], None]) -> None:
        self._rnic = rnic
        self._due = time.monotonic() + seconds
        self._action = action
        rnic.stalled[self] = None
        rnic.restless += 1

    def push(self) -> None:
        """For `SoftRnic.poll`."""
        if time.monotonic() >= self._due:
            self._rnic.stalled.pop(self, None)
            self._rnic.restless -= 1
            self._action()


class FaultyQueuePair(SoftQueuePair):
    """A queue pair of an RNIC that has a plan; what is posted takes the slow path."""

    def __init__(
        self, rnic: SoftRnic, pd: SoftProtectionDomain, qp_num: int, plan: FaultPlan
    ) -> None:
        super().__init__(rnic, pd, qp_num)
        self._plan = plan
        self._silent = False
        self._held = 0

    # -- what the plan calls -------------------------------------------------------------

    def to_err_quietly(self) -> None:
        """As `to_err`, but the peer is not told."""
        self._rnic.look()  # who has dialled us already must not find the door closed
        self._enter_err(quietly=True)

    def fall_silent(self) -> None:
        """Do nothing more that is posted, take nothing more from the peer."""
        self._silent = True
        # What was published is taken by `poll`; beyond that no receive is posted any more.
        self.ring.take_untrusted(self._complete)
        self.ring.tell(self.ring.tail)

    def hold(self, seconds: float) -> None:
        """Let what is posted wait."""
        self._held += 1
        Moment(self._rnic, seconds, self._let_go)

    def wake_for_nothing(self) -> None:
        """Wake the peer and ourselves, twice, as if something had come."""
        for _ in range(2):
            ring_doorbell(self._doorbell)
            self._ring_peer()

    def _let_go(self) -> None:
        self._held -= 1

    # -- SoftQueuePair -------------------------------------------------------------------

    def refresh(self) -> None:
        self._ready = None

    def deliver(self, message: bytes, data: memoryview | None, address: int, rkey: int) -> bool:
        if self._waits():
            return False
        super().refresh()
        # Refused by the plan, both are posted, and meet it then.
        ready = self._ready is not None and self._plan.lets_pass(1 if data is None else 2)
        done = ready and super().deliver(message, data, address, rkey)
        self.refresh()
        if done:
            self._report(message, _OK)
        return done

    def post_receive(self, count: int) -> None:
        if self._silent and self.state is QpState.RTS:
            self.ring.posted += count
        else:
            super().post_receive(count)

    def port_changed(self) -> None:
        if not self._silent:
            super().port_changed()

    def _execute(self, request: Request) -> int:
        status = self._attempt(request)
        if request.message is not None and status != STALLED:
            self._report(request.message, status)
        return status

    def _report(self, message: bytes, status: int) -> None:
        if self._plan.on_message is not None:
            self._plan.on_message(self.qp_num, message, status)

    def _attempt(self, request: Request) -> int:
        if self._waits():
            return STALLED
        contact = self._contact
        if contact.peer is None:
            self._rnic.look()
        peer = contact.peer
        if not self._rnic.port_active or peer is None or peer.ring.gone() or contact.unsaid:
            return super()._execute(request)
        kind = self._plan.meet(self, request.message)
        # A fault of the link or port that came by itself has ended all this, or holds it up.
        if self._waits():
            return STALLED
        if kind is None:
            return super()._execute(request)
        return self._execute_faultily(kind, request)

    def _waits(self) -> bool:
        return self._silent or self._held > 0 or self.state is not QpState.RTS

    def _execute_faultily(self, kind: Fault, request: Request) -> int:
        status = _UNREACHABLE
        if kind is Fault.COMPLETION_LOST:
            if super()._execute(request) == STALLED:
                self._plan.inject(kind, self.qp_num)  # not yet
                return STALLED
        elif kind is Fault.WRITE_LOST:
            super()._execute(self._torn(request))
        elif kind is Fault.NOT_PLACED:
            self._silent = True
            # Failing now would be seen before this completion.
            self._rnic.gone.append(self)
            status = _OK
        self._plan.note(kind, self.qp_num, request.message)
        return status

    def _torn(self, request: Request) -> Request:
        """The beginning of a write."""
        assert request.data is not None
        return request._replace(
            data=request.data[: self._plan.rng.randrange(len(request.data) + 1)], more=None
        )
