"""The pcapng file format: writes the four kinds of blocks of our captures, reads any capture.

`read` also accepts the older pcap format of tcpdump and QEMU.  The bytes are not trusted: any error
in them raises `DamagedCapture`, which names the byte.
(draft-ietf-opsawg-pcapng; draft-ietf-opsawg-pcap)
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, Final, NamedTuple

from trio_smc._base.errors import ProtocolError

__all__ = [
    "ETHERNET",
    "DamagedCapture",
    "Packet",
    "header",
    "packet",
    "read",
    "statistics",
    "whole_blocks_untrusted",
]

ETHERNET: Final = 1
"""Link type of both `header` and the frames we write."""

_SECTION, _INTERFACE, _SIMPLE, _STATISTICS, _ENHANCED = 0x0A0D0D0A, 1, 3, 5, 6
_ORDER_MAGIC: Final = 0x1A2B3C4D
_END_OF_OPTIONS, _USER_APPLICATION, _IF_NAME, _IF_TSRESOL, _ISB_IFDROP = 0, 4, 2, 9, 5
_NANOSECONDS: Final = 9
_MAX_BLOCK: Final = 1 << 24
"""Largest accepted block, in bytes.  Chosen: far more than a frame, which has at most about 64
KiB."""

# The magic numbers of pcap: byte order, and nanoseconds per unit of a time stamp's second half.
_PCAP: Final = {
    b"\xd4\xc3\xb2\xa1": ("<", 1000),
    b"\xa1\xb2\xc3\xd4": (">", 1000),
    b"\x4d\x3c\xb2\xa1": ("<", 1),
    b"\xa1\xb2\x3c\x4d": (">", 1),
}


class DamagedCapture(ValueError):
    """The file is not a capture, or not a complete one; the text names the byte of the error."""


class Packet(NamedTuple):
    """One captured frame.

    Fields:
      time: nanoseconds since 1970.
      link_type: the number of the link type at tcpdump.org; `ETHERNET` is 1.
      data: the captured bytes.
      length: bytes of the frame on the network.
    """

    time: int
    link_type: int
    data: bytes
    length: int


# --- writing -----------------------------------------------------------------------------------


def header(application: str, interface: str) -> bytes:
    """The start of a file: a section, and one Ethernet interface with times in nanoseconds."""
    section = struct.pack("<IHHq", _ORDER_MAGIC, 1, 0, -1)
    options = _option(_USER_APPLICATION, application.encode()) + _option(_END_OF_OPTIONS, b"")
    described = struct.pack("<HHI", ETHERNET, 0, 0)
    names = (
        _option(_IF_NAME, interface.encode())
        + _option(_IF_TSRESOL, bytes((_NANOSECONDS,)))
        + _option(_END_OF_OPTIONS, b"")
    )
    return _block(_SECTION, section + options) + _block(_INTERFACE, described + names)


def packet(time: int, data: bytes, length: int) -> bytes:
    """A block for one frame.  ``time``: nanoseconds; ``length``: bytes of the complete frame."""
    head = struct.pack("<IIIII", 0, time >> 32, time & 0xFFFFFFFF, len(data), length)
    return _block(_ENHANCED, head + data)


def statistics(time: int, dropped: int) -> bytes:
    """A block that reports how many frames were dropped since the start of the file."""
    head = struct.pack("<III", 0, time >> 32, time & 0xFFFFFFFF)
    option = _option(_ISB_IFDROP, struct.pack("<Q", dropped)) + _option(_END_OF_OPTIONS, b"")
    return _block(_STATISTICS, head + option)


def whole_blocks_untrusted(data: bytes | bytearray) -> int:
    """The number of leading bytes that are complete blocks, in a file that this module writes.

    Raises:
      ProtocolError: the bytes are not blocks of such a file.
    """
    end = 0
    while end + 8 <= len(data):
        [length] = struct.unpack_from("<I", data, end + 4)
        if length % 4 or not 12 <= length <= _MAX_BLOCK:
            raise ProtocolError(f"a pcapng block of {length} bytes")
        if end + length > len(data):
            break
        end += length
    return end


def _block(kind: int, body: bytes) -> bytes:
    padding = -len(body) & 3
    total = 12 + len(body) + padding
    return b"".join(
        (struct.pack("<II", kind, total), body, bytes(padding), struct.pack("<I", total))
    )


def _option(code: int, value: bytes) -> bytes:
    return struct.pack("<HH", code, len(value)) + value + bytes(-len(value) & 3)


# --- reading -----------------------------------------------------------------------------------


def read(file: BinaryIO) -> Iterator[Packet]:
    """The packets of a pcapng or pcap file, in the order of the file.

    Raises:
      DamagedCapture: the file is damaged; all packets before the error were yielded.
    """
    start = file.read(4)
    if start in _PCAP:
        return _read_pcap(file, *_PCAP[start])
    if start == struct.pack("<I", _SECTION):
        return _Pcapng(file).packets()
    raise DamagedCapture("not a capture: neither pcapng nor pcap")


def _read_pcap(file: BinaryIO, order: str, unit: int) -> Iterator[Packet]:
    rest = _read_exactly(file, 20, 4)
    link_type = struct.unpack(order + "HHiIII", rest)[5] & 0xFFFF
    record = struct.Struct(order + "IIII")
    at = 24
    while head := file.read(record.size):
        if len(head) < record.size:
            raise DamagedCapture(f"cut off at byte {at}")
        seconds, fraction, kept, length = record.unpack(head)
        if kept > _MAX_BLOCK:
            raise DamagedCapture(f"a packet of {kept} bytes at byte {at}")
        data = _read_exactly(file, kept, at)
        yield Packet(seconds * 1_000_000_000 + fraction * unit, link_type, data, length)
        at += record.size + kept


@dataclass(slots=True)
class _Interface:
    link_type: int
    snap: int
    per_second: int = 1_000_000


@dataclass(slots=True)
class _Pcapng:
    """Reads the rest of a pcapng file whose first four bytes were read."""

    file: BinaryIO
    order: str = "<"
    at: int = 0
    interfaces: list[_Interface] = field(default_factory=list)

    def packets(self) -> Iterator[Packet]:
        kind = _SECTION
        while True:
            body = self._body(kind)
            try:
                found = self._packet(kind, body)
            except struct.error:
                raise DamagedCapture(f"a block too short for its type at byte {self.at}") from None
            if found is not None:
                yield found
            self.at += len(body) + 12
            start = self.file.read(4)
            if not start:
                return
            if len(start) < 4:
                raise DamagedCapture(f"cut off at byte {self.at}")
            [kind] = struct.unpack(self.order + "I", start)

    def _body(self, kind: int) -> bytes:
        raw = _read_exactly(self.file, 4, self.at)
        known = b""
        if kind == _SECTION:
            known = _read_exactly(self.file, 4, self.at)
            for order in "<>":
                if struct.unpack(order + "I", known)[0] == _ORDER_MAGIC:
                    self.order = order
                    break
            else:
                raise DamagedCapture(f"a section without byte order at byte {self.at}")
        [total] = struct.unpack(self.order + "I", raw)
        if total % 4 or not 12 + len(known) <= total <= _MAX_BLOCK:
            raise DamagedCapture(f"a block of {total} bytes at byte {self.at}")
        body = known + _read_exactly(self.file, total - 12 - len(known), self.at)
        if _read_exactly(self.file, 4, self.at) != raw:
            raise DamagedCapture(f"a block with two lengths at byte {self.at}")
        return body

    def _packet(self, kind: int, body: bytes) -> Packet | None:
        if kind == _SECTION:
            self.interfaces.clear()
        elif kind == _INTERFACE:
            link_type, _, snap = struct.unpack_from(self.order + "HHI", body)
            self.interfaces.append(_Interface(link_type, snap))
            self._read_options(body[8:])
        elif kind == _ENHANCED:
            number, high, low, kept, length = struct.unpack_from(self.order + "IIIII", body)
            return self._new_packet(number, high << 32 | low, body[20:], kept, length)
        elif kind == _SIMPLE:
            [length] = struct.unpack_from(self.order + "I", body)
            snap = self.interfaces[0].snap if self.interfaces else 0
            return self._new_packet(0, 0, body[4:], min(length, snap or length), length)
        return None

    def _new_packet(self, number: int, stamp: int, data: bytes, kept: int, length: int) -> Packet:
        if number >= len(self.interfaces):
            raise DamagedCapture(f"a packet of an unknown interface at byte {self.at}")
        if kept > len(data):
            raise DamagedCapture(f"a packet longer than its block at byte {self.at}")
        interface = self.interfaces[number]
        time = stamp * 1_000_000_000 // interface.per_second
        return Packet(time, interface.link_type, data[:kept], length)

    def _read_options(self, options: bytes) -> None:
        while len(options) >= 4:
            code, size = struct.unpack_from(self.order + "HH", options)
            if code == _END_OF_OPTIONS:
                return
            if code == _IF_TSRESOL and size == 1 and len(options) > 4:
                power = options[4] & 0x7F
                if power > 63:
                    raise DamagedCapture(f"an impossible time resolution at byte {self.at}")
                self.interfaces[-1].per_second = (2 if options[4] & 0x80 else 10) ** power
            options = options[4 + size + (-size & 3) :]


def _read_exactly(file: BinaryIO, count: int, at: int) -> bytes:
    data = file.read(count)
    if len(data) < count:
        raise DamagedCapture(f"cut off at byte {at}")
    return data
