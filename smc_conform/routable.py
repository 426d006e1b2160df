"""A software RNIC for version 2, so that both ends can be judged on one host without RoCE.

Version 2 needs an IPv4-mapped GID, and messages of up to 4,152 bytes (ADD LINK with its RTokens).
trio_smc's software RNICs have neither, because two processes on one host gain nothing by version 2.
`RoutableRnic` has both.  The implementation under test must use it, too, as
`examples/conform_target.py` does.

Theory of operation: a message of at most 48 bytes is sent as it is.  A longer one is sent in pieces
of 48 bytes: a mark, the number of pieces that follow, the number of bytes, and the bytes.  The mark
is no LLC or CDC message: its type is of those that RFC 7609, A.3 does not define.  The receiver
puts the pieces together while it polls.  Each piece needs a posted receive, so the receiver posts
one for each piece but the last, for which the user of the queue pair posts one.
"""

from __future__ import annotations

import struct
from typing import Any, Final

from trio_smc.rnic.soft.device import SoftRnic
from trio_smc.rnic.soft.port import Port
from trio_smc.rnic.soft.queue_pair import SoftQueuePair
from trio_smc.rnic.soft.regions import SoftProtectionDomain
from trio_smc.rnic.verbs import (
    RECEIVE_SIZE,
    PlainCompletion,
    ProtectionDomain,
    RnicError,
    WcOpcode,
)

__all__ = ["RoutableRnic"]

_MAPPED: Final = bytes(10) + b"\xff\xff"
"""The prefix of an IPv4-mapped address (RFC 4291, 2.5.5.2)."""
_HEAD: Final = struct.Struct(">4sBB")
_MARK: Final = b"\x5fLLC"
_ROOM: Final = RECEIVE_SIZE - _HEAD.size
_LONGEST: Final = 4352
_RECV: Final = int(WcOpcode.RECV)


class _LongQueuePair(SoftQueuePair):
    """A queue pair whose messages may be longer than a slot of the receiver's ring."""

    def __init__(self, rnic: Port, pd: SoftProtectionDomain, qp_num: int) -> None:
        super().__init__(rnic, pd, qp_num)
        self._pieces = bytearray()

    def post_send(self, wr_id: int, data: bytes, *, signaled: bool = True) -> None:
        if len(data) <= RECEIVE_SIZE:
            super().post_send(wr_id, data, signaled=signaled)
            return
        if len(data) > _LONGEST:
            raise RnicError(0, f"a send has at most {_LONGEST} bytes")
        starts = range(0, len(data), _ROOM)
        for left, at in zip(reversed(range(len(starts))), starts, strict=True):
            piece = data[at : at + _ROOM]
            head = _HEAD.pack(_MARK, left, len(piece))
            super().post_send(wr_id, head + piece, signaled=signaled and not left)

    def put_together(self, data: bytes) -> bytes | None:
        """The message that this piece completes; None: more pieces follow."""
        _, left, size = _HEAD.unpack_from(data)
        self._pieces += data[_HEAD.size : _HEAD.size + size]
        if left:
            self.post_receive(1)
            return None
        message = bytes(self._pieces)
        self._pieces.clear()
        return message


class _LongMessages:
    """Makes the queue pairs of a `RoutableRnic` (`SoftRnic`, faults)."""

    def attach(self, rnic: SoftRnic) -> None:
        """Nothing to bind."""

    def queue_pair(self, rnic: SoftRnic, pd: SoftProtectionDomain, qp_num: int) -> SoftQueuePair:
        """A queue pair for long messages."""
        return _LongQueuePair(rnic, pd, qp_num)


class RoutableRnic(SoftRnic):
    """See the module's docstring.

    Args:
      name: the name in statistics and logs.
    """

    routable = True

    def __init__(self, name: str = "soft0") -> None:
        super().__init__(name, faults=_LongMessages())

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "gid" and any(value):
            value = _MAPPED + value[-4:]
        super().__setattr__(name, value)

    def create_qp(self, pd: ProtectionDomain, receive_size: int = RECEIVE_SIZE) -> SoftQueuePair:
        """A queue pair for messages of any length."""
        return super().create_qp(pd)

    def poll_plain(self) -> list[PlainCompletion]:
        """As `SoftRnic.poll_plain`, with the pieces of long messages put together."""
        found = super().poll_plain()
        if not any(each[4] is not None and each[4].startswith(_MARK) for each in found):
            return found
        whole: list[PlainCompletion] = []
        for each in found:
            qp_num, _, status, wr_id, data = each
            pair = self._qps.get(qp_num)
            if data is None or not data.startswith(_MARK) or not isinstance(pair, _LongQueuePair):
                whole.append(each)
                continue
            message = pair.put_together(data)
            if message is not None:
                whole.append((qp_num, _RECV, status, wr_id, message))
        return whole
