"""A stack's messages and RDMA writes as a capture that Wireshark reads.

Theory of operation
-------------------
`Capture` is an observer: it makes one frame of each CLC, LLC and CDC message, sent or received,
and of each RDMA write, and gives them as pcapng blocks to a function.  What the
observer interface does not show is not made up:

- The peer's RDMA writes are not in the capture: nothing tells this side of them but the cursor
  in the CDC message that follows.
- TCP's handshake and acknowledgements, and those of RoCE, belong to the kernel and the RNIC.
- PSNs count from the first one that the peers agreed on through what the capture contains.  A
  received message's is the least it can be: the peer's writes before it used some up, too.

A write is one RDMA WRITE ONLY packet, whose header tells the address, the RKey and the length of
all of it, and which carries only as much of the data as was asked for.  PSNs go on by as many
packets as the path MTU makes of the write.  (Wireshark takes packets that were cut off, the usual
way to leave data out, for damaged ones.)

A stack that talks to itself tells of every message twice, at both ends of a link, and so
everything that comes from one of the ends already seen is left out.
"""

from __future__ import annotations

import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, TypeAlias, TypeVar

from trio_smc._base.observer import LinkEnd, link_ends, tcp_names
from trio_smc._base.reasons import Fallback
from trio_smc.capture import frames, pcapng

__all__ = ["Capture"]

_MAX_ENTRIES: Final = 4096
_PSN_MASK: Final = 0xFFFFFF
_PROPOSAL: Final = 1
_NEXT_CONNECTION: Final = 1 << 16
_Name: TypeAlias = tuple[bytes, int]
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class _Link:
    """What frames of one link have in common.

    Attributes:
      peer_end: what its other end is called in `Capture._own_ends`, if it is there.
      psn, peer_psn: of the next packet from here, and to here.
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


class Capture:
    """An observer that writes what it hears (`trio_smc.Stack.add_observer`).

    Args:
      write: takes pcapng blocks, one or more whole ones a call, on the Trio thread; must not
        block.  The first call brings the file's header.
      payload: how many bytes of each RDMA write to keep, at most the path MTU; 0: none.
    """

    def __init__(self, write: Callable[[bytes], None], payload: int = 0) -> None:
        self._write = write
        self._payload = payload
        self._links: OrderedDict[object, _Link] = OrderedDict()
        self._own_ends: OrderedDict[tuple[bytes, int], None] = OrderedDict()
        # By (here, there): the next sequence numbers of both directions.
        self._sequences: OrderedDict[tuple[_Name, _Name], list[int]] = OrderedDict()
        write(pcapng.header(f"trio_smc, {os.path.basename(sys.argv[0])} {os.getpid()}", "trio_smc"))

    # --- trio_smc.Observer -------------------------------------------------------------------

    def clc(self, connection: object, outgoing: bool, message: bytes) -> None:
        """A CLC message (RFC 7609, A.2): a TCP segment."""
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
            counts[:] = (each + _NEXT_CONNECTION for each in counts)  # another one of the same name
        first, second = (here, there) if outgoing else (there, here)
        mine = 0 if outgoing else 1
        self._frame(frames.tcp_frame(first, second, counts[mine], counts[1 - mine], message))
        counts[mine] += len(message)

    def llc(self, link: object, outgoing: bool, message: bytes) -> None:
        """An LLC message (A.3): a SEND."""
        self._send(link, outgoing, message)

    def cdc(self, link: object, outgoing: bool, message: bytes) -> None:
        """A CDC message (A.4): a SEND."""
        self._send(link, outgoing, message)

    def rdma_write(self, link: object, address: int, rkey: int, data: memoryview) -> None:
        """An RDMA write (RFC 7609, 4.3)."""
        known = self._link_of(link)
        if known is None:
            return
        kept = bytes(data[: min(self._payload, known.mtu)])
        head = frames.reth(address, rkey, len(data))
        self._roce(known, True, frames.RDMA_WRITE_ONLY, known.psn, head + kept)
        known.psn += max(1, -(-len(data) // known.mtu))

    def state(self, subject: object, old: str, new: str, event: str) -> None:
        """Links that are DOWN are forgotten."""
        if new == "DOWN":
            self._links.pop(subject, None)

    def mode(self, connection: object, fallback: Fallback | None) -> None:
        """The CLC messages have told."""

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
    """The value of ``key``, made when there is none; the oldest go when there are too many."""
    if key not in table:
        table[key] = make()
        if len(table) > _MAX_ENTRIES:
            table.popitem(last=False)
    return table[key]
