"""Records a stack's messages and RDMA writes as a capture for Wireshark.

Theory of operation
-------------------
`Capture` is an observer.  It builds one frame from each CLC, LLC and CDC message, sent or received,
and from each RDMA write, and passes the frames as pcapng blocks to a function.  The capture
contains only events that observers receive:

- The peer's RDMA writes are missing.  This side learns of them only by the cursor in the CDC
  message that follows.
- Handshakes and acknowledgements of TCP and RoCE are missing.  The kernel and the RNIC handle them.
- PSNs start at the first one that the peers agreed on and count the packets in the capture.  The
  PSN of a received message is a lower bound, because the peer's writes before it also have PSNs.

A write becomes one RDMA WRITE ONLY packet.  Its header has the address, the RKey and the length of
the whole write; the packet contains only as much data as ``payload`` allows.  The next PSN counts
as many packets as the path MTU requires for the write.  (A truncated packet is the usual way to
leave data out, but Wireshark reports truncated packets as damaged.)

If a stack is connected to itself, each message is observed at both ends of a link.  So a message
that one of the stack's own ends has sent is recorded only there.
"""

from __future__ import annotations

import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, TypeAlias, TypeVar

from trio_smc._base.observer import BaseObserver, LinkEnd, link_ends, tcp_names
from trio_smc.capture import frames, pcapng

__all__ = ["Capture"]

_MAX_ENTRIES: Final = 4096
"""Links, and connections, that are kept.  Chosen: a bound on memory."""
_PSN_MASK: Final = 0xFFFFFF
_PROPOSAL: Final = 1
_NEXT_CONNECTION: Final = 1 << 16
"""Added to the sequence numbers of a TCP connection that has the addresses and ports of an earlier
one.  Chosen: larger than all CLC messages of a handshake together."""
_Name: TypeAlias = tuple[bytes, int]
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class _Link:
    """The parts of a frame that are the same for all frames of one link.

    Attributes:
      peer_end: GID and QP number of the other end; a key of `Capture._own_ends` if the stack is
        connected to itself.
      psn, peer_psn: PSN of the next packet that this side sends, and that it receives.
    """

    __slots__ = ("local", "mtu", "peer", "peer_end", "peer_psn", "psn", "source", "target")

    def __init__(self, local: LinkEnd, peer: LinkEnd, mtu: int) -> None:
        self.local = local
        self.peer = peer
        self.mtu = mtu
        self.peer_end = peer.gid, peer.qp_number
        self.source = frames.gid_address(local.gid)
        self.target = frames.gid_address(peer.gid)
        if len(self.source) != len(self.target):
            self.source, self.target = local.gid, peer.gid
        self.psn = local.psn
        self.peer_psn = peer.psn


class Capture(BaseObserver):
    """An observer that records messages and writes (`trio_smc.Stack.add_observer`).

    Args:
      write: called with one or more complete pcapng blocks on the Trio thread; must not block.  The
        first call passes the file's header.
      payload: bytes of each RDMA write to keep, at most the path MTU; 0: none.
    """

    def __init__(self, write: Callable[[bytes], None], payload: int = 0) -> None:
        self._write = write
        self._payload = payload
        self._links: OrderedDict[object, _Link] = OrderedDict()
        self._own_ends: OrderedDict[tuple[bytes, int], None] = OrderedDict()
        # By (local, remote) address and port: the next sequence numbers of both directions.
        self._sequences: OrderedDict[tuple[_Name, _Name], list[int]] = OrderedDict()
        write(pcapng.header(f"trio_smc, {os.path.basename(sys.argv[0])} {os.getpid()}", "trio_smc"))

    # --- trio_smc.Observer -------------------------------------------------------------------

    def clc(self, connection: object, outgoing: bool, message: bytes) -> None:
        """Record a CLC message (RFC 7609, A.2) as a TCP segment."""
        names = tcp_names(connection)
        if names is None:
            return
        here, there = ((frames.host_address(host), port) for host, port in names)
        if len(here[0]) != len(there[0]):
            return
        if not outgoing and (there, here) in self._sequences:
            return
        counts = _get_or_create(self._sequences, (here, there), lambda: [1, 1])
        if message[4] == _PROPOSAL and counts != [1, 1]:
            # A new connection of the same addresses and ports.
            counts[:] = (each + _NEXT_CONNECTION for each in counts)
        first, second = (here, there) if outgoing else (there, here)
        mine = 0 if outgoing else 1
        self._frame(frames.tcp_frame(first, second, counts[mine], counts[1 - mine], message))
        counts[mine] += len(message)

    def llc(self, link: object, outgoing: bool, message: bytes) -> None:
        """Record an LLC message (A.3) as a SEND."""
        self._send(link, outgoing, message)

    def cdc(self, link: object, outgoing: bool, message: bytes) -> None:
        """Record a CDC message (A.4) as a SEND."""
        self._send(link, outgoing, message)

    def rdma_write(self, link: object, address: int, rkey: int, data: memoryview) -> None:
        """Record an RDMA write (RFC 7609, 4.3)."""
        known = self._link_of(link)
        if known is None:
            return
        kept = bytes(data[: min(self._payload, known.mtu)])
        head = frames.reth(address, rkey, len(data))
        self._roce(known, True, frames.RDMA_WRITE_ONLY, known.psn, head + kept)
        known.psn += max(1, -(-len(data) // known.mtu))

    def state(self, subject: object, old: str, new: str, event: str) -> None:
        """Remove a link that is DOWN."""
        if new == "DOWN":
            self._links.pop(subject, None)

    # --- frames ------------------------------------------------------------------------------

    def _send(self, link: object, outgoing: bool, message: bytes) -> None:
        known = self._link_of(link)
        if known is None or (not outgoing and known.peer_end in self._own_ends):
            return
        if outgoing:
            psn, known.psn = known.psn, known.psn + 1
        else:
            psn, known.peer_psn = known.peer_psn, known.peer_psn + 1
        self._roce(known, outgoing, frames.SEND_ONLY, psn, message)

    def _roce(self, link: _Link, outgoing: bool, opcode: int, psn: int, payload: bytes) -> None:
        sender, receiver = (link.local, link.peer) if outgoing else (link.peer, link.local)
        source, target = (link.source, link.target) if outgoing else (link.target, link.source)
        self._frame(
            frames.roce_frame(
                source_mac=sender.mac,
                target_mac=receiver.mac,
                source=source,
                target=target,
                opcode=opcode,
                target_qp=receiver.qp_number,
                psn=psn & _PSN_MASK,
                payload=payload,
            )
        )

    def _frame(self, data: bytes) -> None:
        self._write(pcapng.packet(time.time_ns(), data, len(data)))

    def _link_of(self, link: object) -> _Link | None:
        known = self._links.get(link)
        if known is not None:
            return known
        ends = link_ends(link)
        if ends is None:
            return None
        _get_or_create(self._own_ends, (ends.local.gid, ends.local.qp_number), lambda: None)
        return _get_or_create(self._links, link, lambda: _Link(*ends))


def _get_or_create(
    table: OrderedDict[_Key, _Value], key: _Key, make: Callable[[], _Value]
) -> _Value:
    """The value of ``key``, created if missing.  A full table loses its oldest entry."""
    if key not in table:
        table[key] = make()
        if len(table) > _MAX_ENTRIES:
            table.popitem(last=False)
    return table[key]
