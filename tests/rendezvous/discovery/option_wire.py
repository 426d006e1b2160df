"""The TCP options of real packets, read from a network interface.

`Wire` is a packet socket, independent of the tested code.  On the loopback interface it records
only the watched ports.  All processes use this interface, and the packets of one other process can
fill any buffer within a second.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest

__all__ = ["SYN", "SYN_ACK", "Segment", "Wire", "may_load_programs", "requires_bpf"]

_ETH_P_ALL = 3
_LOOPBACK = "lo"
_ETHERNET = 14
_SO_RCVBUFFORCE = 33
_CAP_NET_ADMIN, _CAP_SYS_ADMIN, _CAP_BPF = 12, 21, 39
_SOL_PACKET, _PACKET_STATISTICS = 263, 6
_SO_ATTACH_FILTER = 26
_IPV4, _IPV6 = 0x0800, 0x86DD
# Opcodes of classic BPF: load a byte or a half-word from an offset, or a half-word from an offset
# relative to X; set X to the length of an IPv4 header; jump if equal; return.
_BYTE, _HALF, _HALF_BEHIND, _HEADER, _EQUAL, _RETURN = 0x30, 0x28, 0x48, 0xB1, 0x15, 0x06

SYN, ACK = 0x02, 0x10
SYN_ACK = SYN | ACK


def may_load_programs() -> bool:
    """True if this process has the capabilities to load and attach a program."""
    with open("/proc/self/status", encoding="ascii") as lines:
        effective = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
    has = {bit for bit in range(64) if effective >> bit & 1}
    return bool(has & {_CAP_BPF, _CAP_SYS_ADMIN}) and {_CAP_NET_ADMIN, _CAP_SYS_ADMIN} <= has


requires_bpf = pytest.mark.skipif(
    not may_load_programs(), reason="takes CAP_BPF, CAP_NET_ADMIN and CAP_SYS_ADMIN"
)


@dataclass(frozen=True, slots=True)
class Segment:
    """One TCP segment: ports, flags, bytes of the options, and data."""

    source: int
    destination: int
    flags: int
    options: bytes
    data: bytes

    @property
    def kinds(self) -> dict[int, bytes]:
        """The options by kind, without padding."""
        found, rest = {}, self.options
        while rest and rest[0] != 0:
            if rest[0] == 1:
                rest = rest[1:]
                continue
            found[rest[0]] = rest[: rest[1]]
            rest = rest[rest[1] :]
        return found


class Wire:
    """Records all packets of an interface while it is open, or those of the ports of `watch`.

    Attributes:
      frames: the frames that `segments` has read so far, of all kinds.
    """

    def __init__(self, interface: str) -> None:
        self._interface = interface
        self._ports: set[int] = set()
        # Protocol 0: the socket receives nothing before `bind`.
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 0)
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 1 << 24)
        if interface == _LOOPBACK:
            self.watch()
        self._socket.bind((interface, _ETH_P_ALL))
        self.frames: list[bytes] = []

    @classmethod
    @contextmanager
    def open(cls, interface: str = _LOOPBACK) -> Iterator[Self]:
        wire = cls(interface)
        try:
            yield wire
        finally:
            wire._socket.close()

    def watch(self, *ports: int) -> None:
        """Add ports: from now on, record only TCP segments from and to the watched ports."""
        self._ports.update(ports)
        program = ctypes.create_string_buffer(_only(sorted(self._ports)))
        code = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(program))
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, code)

    def segments(self, port: int) -> list[Segment]:
        """The TCP segments from or to a port so far, in order."""
        assert port in self._ports or not self._ports, "this port is not watched"
        while True:
            try:
                frame, (_, _, kind, *_) = self._socket.recvfrom(1 << 16)
            except BlockingIOError:
                break
            # The loopback interface shows each frame twice: outgoing and incoming.
            if self._interface != _LOOPBACK or kind == socket.PACKET_OUTGOING:
                self.frames.append(frame)
        lost = struct.unpack("II", self._socket.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8))[1]
        assert lost == 0, f"{lost} frames were lost"
        found = [_segment(frame) for frame in self.frames]
        return [each for each in found if each and port in (each.source, each.destination)]

    def write_pcap(self, path: Path) -> None:
        """Write the recorded frames to a capture file."""
        with path.open("wb") as file:
            file.write(struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 1 << 16, 1))
            for number, frame in enumerate(self.frames):
                file.write(struct.pack("<IIII", number, 0, len(frame), len(frame)) + frame)


def _only(ports: Iterable[int]) -> bytes:
    """A classic BPF program that accepts only TCP segments from and to these ports."""

    def step(code: int, value: int = 0, then: int = 0, otherwise: int = 0) -> bytes:
        return struct.pack("HBBI", code, then, otherwise, value)

    def tcp(kind: int, load: int, place: int) -> bytes:
        """Check one IP version.

        kind: the offset of the protocol number.
        place: the offset of the source port.
        """
        code = step(_BYTE, kind) + step(_EQUAL, socket.IPPROTO_TCP, then=1) + step(_RETURN)
        if load == _HALF_BEHIND:
            code += step(_HEADER, _ETHERNET)
        for offset in (place, place + 2):
            code += step(load, offset)
            for port in ports:
                code += step(_EQUAL, port, otherwise=1) + step(_RETURN, 0xFFFFFFFF)
        return code + step(_RETURN)

    ipv6 = tcp(_ETHERNET + 6, _HALF, _ETHERNET + 40)
    ipv4 = tcp(_ETHERNET + 9, _HALF_BEHIND, _ETHERNET)
    return b"".join((
        step(_HALF, _ETHERNET - 2),
        step(_EQUAL, _IPV6, otherwise=len(ipv6) // 8), ipv6,
        step(_EQUAL, _IPV4, then=1), step(_RETURN), ipv4,
    ))  # fmt: skip


def _segment(frame: bytes) -> Segment | None:
    packet = frame[_ETHERNET:]
    if len(packet) < 40 or packet[0] >> 4 not in (4, 6):
        return None
    if packet[0] >> 4 == 4:
        protocol, header = packet[9], (packet[0] & 15) * 4
        packet = packet[: int.from_bytes(packet[2:4], "big")]
    else:
        protocol, header = packet[6], 40
    if protocol != socket.IPPROTO_TCP:
        return None
    tcp = packet[header:]
    end = (tcp[12] >> 4) * 4
    source, destination = struct.unpack_from(">HH", tcp)
    return Segment(source, destination, tcp[13], tcp[20:end], tcp[end:])


def cgroup2() -> Path:
    """The mount point of the cgroup hierarchy of version 2."""
    with open("/proc/self/mountinfo", encoding="utf-8") as lines:
        for line in lines:
            left, _, right = line.partition(" - ")
            if right.split()[0] == "cgroup2":
                return Path(left.split()[4])
    raise FileNotFoundError("no cgroup2 is mounted")


@contextmanager
def cgroup(name: str) -> Iterator[Path]:
    """Make an empty cgroup for the test."""
    path = cgroup2() / f"trio-smc-test-{os.getpid()}-{name}"
    path.mkdir()
    try:
        yield path
    finally:
        path.rmdir()
