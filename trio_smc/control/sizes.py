"""Histograms of the sizes of data, while a client of the control socket counts them.

`SizeCounter` is an observer of the stack: an RDMA write is data sent, and the cursor of a CDC
message that arrives shows how much data the peer has written since its last message.  A class of
sizes has an upper limit, a power of two.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from trio_smc._base.errors import ProtocolError
from trio_smc._base.observer import BaseObserver
from trio_smc.wire import cdc

if TYPE_CHECKING:
    from trio_smc._stack import Stack

__all__ = ["SizeCounter"]


class SizeCounter(BaseObserver):
    """Counts sizes from `start` to `stop`."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        # By alert token: the size of the ring, and the last count of the producer.
        self._rings: dict[int, int] = {}
        self._counts: dict[int, int] = {}

    def start(self) -> None:
        """Begin to count."""
        self._learn()
        self._stack.add_observer(self)

    def stop(self) -> None:
        """End to count.  Idempotent."""
        self._stack.remove_observer(self)

    def histograms(self) -> dict[str, list[dict[str, int]]]:
        """Both histograms, each with the upper limit and the number of each class that is used."""
        return {"sent": _classes(self._sent), "received": _classes(self._received)}

    def _learn(self) -> None:
        for view in self._stack.connections:
            cursors = view.cursors
            if cursors is not None and cursors.alert_token not in self._rings:
                self._rings[cursors.alert_token] = cursors.ring
                self._counts[cursors.alert_token] = cursors.received

    def rdma_write(self, link: object, address: int, rkey: int, data: memoryview) -> None:
        """Count data sent."""
        self._sent[_limit(len(data))] += 1

    def cdc(self, link: object, outgoing: bool, message: bytes) -> None:
        """Count data received, by the advance of the producer's cursor (RFC 7609, 4.3)."""
        if outgoing:
            return
        try:
            decoded = cdc.decode_untrusted(message)
        except ProtocolError:
            return
        if decoded.alert_token not in self._rings:
            self._learn()
        ring = self._rings.get(decoded.alert_token)
        if not ring:
            return
        # An offset that skips an eye catcher changes no difference between two cursors.
        position = decoded.producer_wrap * ring + decoded.producer_cursor
        advance = (position - self._counts[decoded.alert_token]) % (ring << 16)
        if 0 < advance <= ring:
            self._received[_limit(advance)] += 1
        self._counts[decoded.alert_token] = position


def _limit(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def _classes(counted: Counter[int]) -> list[dict[str, Any]]:
    return [{"limit": limit, "count": counted[limit]} for limit in sorted(counted)]
