"""Builds Ethernet frames around SMC-R messages, as they would appear on a network.

CLC messages become TCP segments, LLC and CDC messages RoCE SENDs, and data RDMA writes.  RoCE is
always version 2: UDP port 4791, a base transport header, an invariant CRC.  All functions are
pure.  `trio_smc.capture.dissection` is the inverse.

InfiniBand Architecture Specification 1.4, 9.2, 9.3 and annex A17 (RoCEv2).
"""

from __future__ import annotations

import ipaddress
import struct
import zlib
from typing import Final

__all__ = [
    "MAX_PAYLOAD",
    "RDMA_WRITE_FIRST",
    "RDMA_WRITE_ONLY",
    "ROCE_PORT",
    "SEND_ONLY",
    "gid_address",
    "host_address",
    "invariant_crc",
    "reth",
    "roce_frame",
    "tcp_frame",
]

ROCE_PORT: Final = 4791
"""UDP port of RoCEv2."""

MAX_PAYLOAD: Final = 4096
"""The most bytes of an RDMA write that a capture keeps: the largest path MTU."""

# Opcodes of reliable connections, the only transport SMC-R uses.
SEND_ONLY: Final = 0x04
RDMA_WRITE_FIRST: Final = 0x06
RDMA_WRITE_ONLY: Final = 0x0A

_ICRC_SIZE: Final = 4
_V4_MAPPED: Final = bytes(10) + b"\xff\xff"
_TCP, _UDP = 6, 17
_PSH_ACK: Final = 0x18
_HOPS: Final = 64
_DEFAULT_PKEY: Final = 0xFFFF
_UDP_SOURCE: Final = 0xC000  # first source port of RoCEv2 (annex A17)
_BTH: Final = struct.Struct(">BBHII")
_RETH: Final = struct.Struct(">QII")
# The invariant CRC replaces all fields that routers may change by ones.  8 bytes for the absent
# local route header come first.  These are the offsets of the others: for IPv4 TOS, TTL and
# checksum, for IPv6 class, flow label and hop limit; the UDP checksum; a reserved byte of the BTH.
_V4_MASK: Final = (1, 8, 10, 11, 26, 27, 32)
_V6_MASK: Final = (1, 2, 3, 7, 46, 47, 52)


def gid_address(gid: bytes) -> bytes:
    """The IP address of a RoCEv2 GID, 4 or 16 bytes."""
    return gid[12:] if gid.startswith(_V4_MAPPED) else gid


def host_address(host: str) -> bytes:
    """Convert an IP address from text, with or without a zone, to 4 or 16 bytes."""
    return gid_address(ipaddress.ip_address(host.partition("%")[0]).packed)


def tcp_frame(
    source: tuple[bytes, int], target: tuple[bytes, int], sequence: int, acknowledged: int,
    payload: bytes,
) -> bytes:  # fmt: skip
    """A TCP segment with data between two (address, port) pairs.

    Both addresses have the same size.  The MAC addresses are zeros, as on a loopback interface.
    """
    head = struct.pack(
        ">HHIIBBHHH", source[1], target[1], sequence & 0xFFFFFFFF, acknowledged & 0xFFFFFFFF,
        5 << 4, _PSH_ACK, 0xFFFF, 0, 0,
    )  # fmt: skip
    pseudo = source[0] + target[0] + struct.pack(">IHH", len(head) + len(payload), 0, _TCP)
    check = _internet_checksum(pseudo + head + payload)
    segment = head[:16] + check.to_bytes(2, "big") + head[18:] + payload
    addresses = (source[0], target[0])
    return bytes(12) + _ether_type(source[0]) + _ip(*addresses, _TCP, len(segment)) + segment


def reth(address: int, rkey: int, length: int) -> bytes:
    """The extended header of an RDMA write's first packet; ``length`` counts the whole write."""
    return _RETH.pack(address, rkey, length)


def roce_frame(
    *, source_mac: bytes, target_mac: bytes, source: bytes, target: bytes,
    opcode: int, target_qp: int, psn: int, payload: bytes,
) -> bytes:  # fmt: skip
    """A RoCEv2 packet of a reliable connection.

    Args:
      source, target: IP addresses of one family, 4 or 16 bytes.
      target_qp, psn: 24 bits each; a base transport header does not name the sender's queue pair.
      payload: the bytes after the base transport header: extended header and data.
    """
    padding = -len(payload) & 3
    size = 8 + _BTH.size + len(payload) + padding + _ICRC_SIZE
    ip = _ip(source, target, _UDP, size)
    udp = struct.pack(">HHH", _UDP_SOURCE | target_qp & 0x3FFF, ROCE_PORT, size)
    bth = _BTH.pack(opcode, padding << 4, _DEFAULT_PKEY, target_qp, psn & 0xFFFFFF)
    body = bth + payload + bytes(padding)
    # The CRC does not depend on the value of the UDP checksum.
    body += invariant_crc(ip + udp + bytes(2) + body)
    # RoCEv2 does not need the UDP checksum, but readers report its absence over IPv6.
    check = _udp_checksum(source + target, udp + body) if len(source) == 16 else 0
    head = target_mac + source_mac + _ether_type(source)
    return b"".join((head, ip, udp, check.to_bytes(2, "big"), body))


def invariant_crc(packet: bytes) -> bytes:
    """The 4-byte CRC of a RoCEv2 packet that begins with its IP header (without options)."""
    masked = bytearray(packet)
    for place in _V4_MASK if packet[0] >> 4 == 4 else _V6_MASK:
        masked[place] = 0xFF
    if packet[0] >> 4 == 6:
        masked[0] |= 0x0F
    return zlib.crc32(masked, zlib.crc32(b"\xff" * 8)).to_bytes(_ICRC_SIZE, "little")


def _ether_type(address: bytes) -> bytes:
    return b"\x08\x00" if len(address) == 4 else b"\x86\xdd"


def _ip(source: bytes, target: bytes, protocol: int, size: int) -> bytes:
    if len(source) != len(target):
        raise ValueError("addresses of two families in one packet")
    if len(source) == 16:
        return struct.pack(">IHBB", 6 << 28, size, protocol, _HOPS) + source + target
    head = struct.pack(">BBHHHBBH", 0x45, 0, 20 + size, 0, 0x4000, _HOPS, protocol, 0)
    check = _internet_checksum(head + source + target)
    return head[:10] + check.to_bytes(2, "big") + source + target


def _udp_checksum(addresses: bytes, datagram: bytes) -> int:
    """The checksum of a datagram without its checksum field; never 0, which means "no checksum"."""
    size = len(datagram) + 2
    return _internet_checksum(addresses + struct.pack(">IHH", size, 0, _UDP) + datagram) or 0xFFFF


def _internet_checksum(data: bytes) -> int:
    """The ones' complement of the ones' complement sum, computed as a remainder (RFC 1071)."""
    number = int.from_bytes(data + bytes(len(data) & 1), "big")
    return 0xFFFF - (number % 0xFFFF or (0xFFFF if number else 0))
