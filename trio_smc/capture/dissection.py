"""Extracts the SMC-R messages and RDMA writes from a capture of any program.

Theory of operation
-------------------
The contents of a capture are not trusted.  A frame with an unknown protocol is skipped.  A message
of SMC-R with a wrong format becomes an `Unreadable`.

- TCP: a segment that begins with the eye catcher starts a run of CLC messages in its direction.
  The run ends at the first bytes that are not a CLC message.  All other TCP data is skipped.
- RoCE, version 2 (UDP 4791) or 1 (its own Ethernet type): SENDs that contain an LLC or a CDC
  message, and the first packet of each RDMA write, whose header describes the whole write.  The
  first byte of an LLC message shows its version of SMC-R.  A message of version 2 may be longer
  than a packet.  The packets of such a SEND are consecutive, because a queue pair sends one message
  after the other.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from trio_smc._base.errors import ProtocolError
from trio_smc.capture import frames
from trio_smc.capture.pcapng import Packet
from trio_smc.wire import cdc, clc, llc

__all__ = ["End", "Event", "Seen", "Unreadable", "Write", "dissect"]

_LINK_HEADERS: Final = {1: (14, 12), 113: (16, 14), 276: (20, 0)}
"""Size of the link header, and offset of its Ethernet type. By link type (tcpdump.org): Ethernet,
Linux cooked capture, Linux cooked capture version 2."""
_RAW_IP: Final = frozenset({12, 101, 228, 229})
"""Link types without a link header."""
_VLANS: Final = frozenset({0x8100, 0x88A8})
_IPV4, _IPV6, _ROCE_V1 = 0x0800, 0x86DD, 0x8915
_TCP, _UDP = 6, 17
_GRH_SIZE, _BTH_SIZE, _ICRC_SIZE, _RETH_SIZE = 40, 12, 4, 16
# Opcodes of reliable connections (InfiniBand Architecture Specification 1.4, 9.2): SENDs and RDMA
# writes of one packet, and the first, middle and last packets of longer ones.
_SENDS: Final = frozenset({0x04, 0x05, 0x17})
_SEND_FIRST, _SEND_MIDDLE = 0x00, 0x01
_SEND_LASTS: Final = frozenset({0x02, 0x03, 0x16})
_WRITES: Final = frozenset({0x06, 0x0A, 0x0B})
_MAX_RUNS: Final = 4096
"""Runs of CLC messages, and incomplete SENDs, that are kept. Chosen: a bound on memory."""
_SYN: Final = 0x02


class End(NamedTuple):
    """The source or the destination of a frame.

    Fields:
      address: 4 or 16 bytes.
      number: TCP port or QP number; None for the source of a RoCE packet, which lacks it.
    """

    address: bytes
    number: int | None


class Write(NamedTuple):
    """An RDMA write of ``length`` bytes to ``address`` in the memory region of ``rkey``."""

    address: int
    rkey: int
    length: int


class Unreadable(NamedTuple):
    """A message with a wrong format; ``reason`` is the text of the error."""

    reason: str


Event: TypeAlias = clc.Message | llc.Message | cdc.CdcMessage | Write | Unreadable


@dataclass(frozen=True, slots=True)
class Seen:
    """One message or write.

    Attributes:
      time: nanoseconds since 1970.
      tcp: True for a CLC message on a TCP connection, False for traffic on a link.
    """

    time: int
    tcp: bool
    source: End
    target: End
    event: Event


def dissect(packets: Iterable[Packet]) -> Iterator[Seen]:
    """The SMC-R messages and RDMA writes in these packets, in their order."""
    runs, sends = _Runs(), _Sends()
    for packet in packets:
        try:
            kind, data = _network_packet(packet)
            if kind == _ROCE_V1:
                found = _roce_v1(packet.time, data, sends)
            elif kind in (_IPV4, _IPV6):
                found = _ip(packet.time, data, runs, sends)
            else:
                continue
        except (struct.error, IndexError):
            continue  # the packet is truncated
        yield from found


def _network_packet(packet: Packet) -> tuple[int, bytes]:
    data = packet.data
    if packet.link_type in _RAW_IP:
        return (_IPV4 if data[0] >> 4 == 4 else _IPV6), data
    if packet.link_type not in _LINK_HEADERS:
        return 0, b""
    start, type_at = _LINK_HEADERS[packet.link_type]
    [kind] = struct.unpack_from(">H", data, type_at)
    while kind in _VLANS:
        [kind] = struct.unpack_from(">H", data, start + 2)
        start += 4
    return kind, data[start:]


def _ip(time: int, data: bytes, runs: _Runs, sends: _Sends) -> list[Seen]:
    if data[0] >> 4 == 4:
        header = (data[0] & 15) * 4
        size, protocol = struct.unpack_from(">2xH5xB", data)
        [fragment] = struct.unpack_from(">H", data, 6)
        if fragment & 0x1FFF:
            return []
        source, target = data[12:16], data[16:20]
        # With segmentation offload the length is 0, and the adapter fills it in.
        body = data[header : size or None]
    else:
        size, protocol = struct.unpack_from(">4xHB", data)
        source, target = frames.gid_address(data[8:24]), frames.gid_address(data[24:40])
        body = data[40 : 40 + size] if size else data[40:]
    if protocol == _TCP:
        return runs.segment(time, source, target, body)
    if protocol == _UDP and struct.unpack_from(">H", body, 2)[0] == frames.ROCE_PORT:
        return _roce(time, source, target, body[8:], sends)
    return []


def _roce_v1(time: int, data: bytes, sends: _Sends) -> list[Seen]:
    if data[6] != 0x1B:  # next header: 0x1B is a base transport header
        return []
    [size] = struct.unpack_from(">H", data, 4)
    source, target = frames.gid_address(data[8:24]), frames.gid_address(data[24:40])
    return _roce(time, source, target, data[_GRH_SIZE : _GRH_SIZE + size], sends)


def _roce(time: int, source: bytes, target: bytes, data: bytes, sends: _Sends) -> list[Seen]:
    opcode, flags, target_qp = struct.unpack_from(">BB2xI", data)
    event: Event | None
    if opcode in _WRITES:
        event = Write(*struct.unpack_from(">QII", data, _BTH_SIZE))
    else:
        padding = flags >> 4 & 3
        payload = data[_BTH_SIZE : len(data) - _ICRC_SIZE - padding]
        message = sends.packet((source, target, target_qp), opcode, payload)
        event = _link_message_untrusted(message)
    if event is None:
        return []
    return [Seen(time, False, End(source, None), End(target, target_qp & 0xFFFFFF), event)]


def _link_message_untrusted(data: bytes) -> Event | None:
    """Decode a SEND; None: it does not look like a message of SMC-R."""
    try:
        if _is_version_2(data):
            return llc.V2.decode_untrusted(data)
        if len(data) != llc.MESSAGE_SIZE or data[1] != llc.MESSAGE_SIZE:
            return None
        if data[0] == cdc.CDC_TYPE:
            return cdc.decode_untrusted(data)
        return llc.V1.decode_untrusted(data)
    except ProtocolError as error:
        return Unreadable(str(error))


def _is_version_2(data: bytes) -> bool:
    return (
        len(data) >= llc.MESSAGE_SIZE
        and data[0] in llc.V2.types
        and len(data) in (int.from_bytes(data[1:3], "little"), int.from_bytes(data[1:3], "big"))
    )


class _Sends:
    """SENDs of several packets that are not complete; the last `_MAX_RUNS` are kept."""

    def __init__(self) -> None:
        self._begun: OrderedDict[tuple[bytes, bytes, int], bytes] = OrderedDict()

    def packet(self, ends: tuple[bytes, bytes, int], opcode: int, payload: bytes) -> bytes:
        """The message that this packet completes; b"" if it completes none."""
        if opcode in _SENDS:
            return payload
        if opcode == _SEND_FIRST:
            self._begun[ends] = b""
            if len(self._begun) > _MAX_RUNS:
                self._begun.popitem(last=False)
        elif opcode != _SEND_MIDDLE and opcode not in _SEND_LASTS:
            return b""
        if ends not in self._begun:
            return b""
        message = self._begun.pop(ends) + payload
        if opcode in _SEND_LASTS:
            return message
        if len(message) < llc.V2.largest:
            self._begun[ends] = message
        return b""


class _Run:
    """CLC messages in one direction of a TCP connection.

    Attributes:
      next: the next expected sequence number.
      data: bytes that are not decoded yet.
      ended: other data has followed the CLC messages.
    """

    __slots__ = ("data", "ended", "next")

    def __init__(self, sequence: int) -> None:
        self.next = sequence
        self.data = b""
        self.ended = False


class _Runs:
    """The runs of all TCP connections; the last `_MAX_RUNS` are kept."""

    def __init__(self) -> None:
        self._runs: OrderedDict[tuple[End, End], _Run] = OrderedDict()

    def segment(self, time: int, source: bytes, target: bytes, body: bytes) -> list[Seen]:
        from_port, to_port, sequence, offset, flags = struct.unpack_from(">HHI4xBB", body)
        ends = End(source, from_port), End(target, to_port)
        payload = body[(offset >> 4) * 4 :]
        if flags & _SYN:
            self._runs.pop(ends, None)
            return []
        if not payload:
            return []
        run = self._runs.get(ends)
        starts = payload.startswith(clc.EYE_CATCHER)
        if run is None:
            if not starts:
                return []
            run = self._runs[ends] = _Run(sequence)
            if len(self._runs) > _MAX_RUNS:
                self._runs.popitem(last=False)
        known = (run.next - sequence) & 0xFFFFFFFF
        if known >= 1 << 31:
            known = 0  # a segment is missing: continue at the start of this one
            run.data, run.ended = b"", not starts
        if run.ended or known >= len(payload):
            return []
        run.next = (sequence + len(payload)) & 0xFFFFFFFF
        run.data += payload[known:]
        return [Seen(time, True, *ends, event) for event in _messages_untrusted(run)]


def _messages_untrusted(run: _Run) -> Iterator[Event]:
    while run.data:
        if not run.data.startswith(clc.EYE_CATCHER[: len(run.data)]):
            run.ended, run.data = True, b""
            return
        if len(run.data) < clc.HEADER_SIZE:
            return
        try:
            length = clc.message_length_untrusted(run.data)
            if len(run.data) < length:
                return
            message, run.data = run.data[:length], run.data[length:]
            yield clc.decode_untrusted(message)
        except ProtocolError as error:
            run.ended, run.data = True, b""
            yield Unreadable(str(error))
