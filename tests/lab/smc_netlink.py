"""The kernel's reports about its own SMC sockets: smc_diag, and its generic netlink families.

Numbers are those of the kernel's user interface (linux/smc_diag.h, linux/smc.h).  This is the
witness of the tests: whether a connection is SMC-R is asked here, not of trio_smc.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from typing import Any, Final

__all__ = [
    "fallback_counts",
    "links",
    "pnet_add",
    "pnet_flush",
    "socket_info",
    "sockets",
    "ueid",
    "versions",
]

_HEADER: Final = struct.Struct("=IHHII")
_REQUEST, _ACK, _DUMP = 1, 4, 0x300
_ERROR, _DONE = 2, 3
_SOCK_DIAG: Final = 4
_GENERIC: Final = 16
_MODES: Final = ("SMCR", "TCP", "SMCD")
_SOCKET = struct.Struct("=4B2H16s16sI8sIQ")
_FALLBACK: Final = 5


def _query(protocol: int, kind: int, flags: int, body: bytes) -> Iterator[bytes]:
    """The payloads of the answers to one request.  Raises OSError."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol) as netlink:
        netlink.settimeout(10)
        netlink.bind((0, 0))
        netlink.send(_HEADER.pack(_HEADER.size + len(body), kind, flags | _REQUEST, 1, 0) + body)
        more = True
        while more:
            got = netlink.recv(1 << 17)
            more = bool(flags & _DUMP)
            while got:
                length, answer, *_ = _HEADER.unpack_from(got)
                payload, got = got[_HEADER.size : length], got[(length + 3) & ~3 :]
                if answer == _ERROR:
                    [code] = struct.unpack_from("=i", payload)
                    if code:
                        raise OSError(-code, os.strerror(-code))
                    return
                if answer == _DONE:
                    return
                yield payload


def _attributes(data: bytes) -> dict[int, bytes]:
    found = {}
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        found[kind & 0x3FFF] = data[4:length]
        data = data[(length + 3) & ~3 :]
    return found


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def _family(name: str) -> int:
    body = struct.pack("=BBH", 3, 1, 0) + _attribute(2, name.encode() + b"\0")
    [answer] = list(_query(_GENERIC, _GENERIC, 0, body))[:1]
    return int.from_bytes(_attributes(answer[4:])[1], "little")


def _command(
    family: str, command: int, flags: int, body: bytes = b""
) -> Iterator[dict[int, bytes]]:
    head = struct.pack("=BBH", command, 1, 0)
    for answer in _query(_GENERIC, _family(family), flags, head + body):
        yield _attributes(answer[4:])


def socket_info(fd: int) -> dict[str, Any] | None:
    """The kernel's data about an SMC socket of this process; None: there is no such socket.

    ``mode`` is "SMCR" or "TCP"; ``reason`` and ``peer_reason`` are the diagnosis words of a
    fallback.
    """
    return sockets().get(os.fstat(fd).st_ino)


def sockets() -> dict[int, dict[str, Any]]:
    """The same of all SMC sockets, by inode."""
    found = {}
    request = struct.pack("=BxxB48x", 43, 0xFF)  # AF_SMC; every extension
    for answer in _query(_SOCK_DIAG, 20, _DUMP, request):
        _, state, mode, _, _, _, _, _, _, _, _, inode = _SOCKET.unpack_from(answer)
        info: dict[str, Any] = {"state": state, "mode": _MODES[mode]}
        fallback = _attributes(answer[_SOCKET.size :]).get(_FALLBACK)
        if fallback:
            info["reason"], info["peer_reason"] = struct.unpack_from("=II", fallback)
        found[inode] = info
    return found


def _text(value: bytes) -> str:
    return value.rstrip(b"\0").decode("ascii", "replace")


def links() -> list[dict[str, Any]]:
    """Every link of every link group: group, role, type (1 single, 2 symmetric, 3 and 4
    asymmetric peer and local), device, state, connections."""
    found: list[dict[str, Any]] = []
    group: dict[int, bytes] = {}
    for attributes in _command("SMC_GEN_NETLINK", 3, _DUMP):
        if 2 in attributes:
            group = _attributes(attributes[2])
        if 3 in attributes:
            link = _attributes(attributes[3])
            found.append(
                {
                    "group": int.from_bytes(group[1], "little"),
                    "role": ("client", "server")[group[2][0]],
                    "type": group[3][0],
                    "link": link[1][0],
                    "device": _text(link[2]),
                    "gid": _text(link[4]),
                    "peer_gid": _text(link[5]),
                    "connections": int.from_bytes(link[6], "little"),
                    "state": int.from_bytes(link[10], "little"),
                }
            )
    return found


def fallback_counts() -> list[dict[str, int]]:
    """How often the kernel fell back, by reason, as server and as client."""
    found = []
    for attributes in _command("SMC_GEN_NETLINK", 8, _DUMP):
        each = {
            kind: int.from_bytes(value, "little")
            for kind, value in _attributes(attributes[8]).items()
        }
        if each.get(4):
            found.append({"server": each.get(2, 0), "client": each.get(3, 0), "reason": each[4]})
    return found


def versions() -> dict[str, int]:
    """How many connections the kernel has counted as SMC-R, by its role and version."""
    [answer] = _command("SMC_GEN_NETLINK", 7, _DUMP)
    counts = _attributes(_attributes(answer[7])[2])
    names = {7: "client_v1", 8: "client_v2", 9: "server_v1", 10: "server_v2"}
    return {name: int.from_bytes(counts[kind], "little") for kind, name in names.items()}


def ueid(name: str, *, add: bool = True) -> None:
    """Give the kernel a UEID, or take it back, as ``smcr ueid`` does."""
    body = _attribute(1, name.ljust(32).encode() + b"\0")
    list(_command("SMC_GEN_NETLINK", 10 if add else 11, _ACK, body))


def pnet_add(name: str, *, interface: str | None = None, device: str | None = None) -> None:
    """Put a network interface or an RDMA device's first port into a physical network."""
    body = _attribute(1, name.encode() + b"\0")
    if interface:
        body += _attribute(2, interface.encode() + b"\0")
    if device:
        body += _attribute(3, device.encode() + b"\0") + _attribute(4, b"\1")
    list(_command("SMC_PNETID", 2, _ACK, body))


def pnet_flush() -> None:
    """Take everything out of all physical networks."""
    list(_command("SMC_PNETID", 4, _ACK))
