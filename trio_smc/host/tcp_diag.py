"""Which socket of this host is the other end of a TCP connection (sock_diag(7)).

The kernel answers over netlink, without privileges, for the sockets of all users in one network
namespace.  The answer shows if a process has accepted a connection: before that the server's socket
has no inode.  The kernel answers during the call of sendto(2), so no call here blocks.

Network address translation shows as well: if a rule has sent the connection to another address or
port, no socket has the client's two addresses.
"""

from __future__ import annotations

import errno
import ipaddress
import itertools
import socket
import struct
import sys
from enum import Enum
from typing import Final

import trio

from trio_smc.host.tcp import ESTABLISHED

__all__ = ["FarEnd", "far_end", "has_local_end", "original_destination"]

# Constants and structures of linux/include/uapi/linux: netlink.h, sock_diag.h, inet_diag.h,
# netfilter_ipv4.h, netfilter_ipv6/ip6_tables.h.
_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_NLM_F_REQUEST: Final = 0x1
_NLM_F_DUMP: Final = 0x300
_NLMSG_ERROR: Final = 2
_NLMSG_DONE: Final = 3
_INET_DIAG_REQ_BYTECODE: Final = 1
_INET_DIAG_BC_D_COND: Final = 8
_SO_ORIGINAL_DST: Final = 80  # the same number for IPv4 and IPv6
_SO_NETNS_COOKIE: Final = 71  # asm-generic/socket.h; 8 bytes
_LOOPBACK: Final = 1  # the index of the loopback interface, in every network namespace
_MOST_INTERFACES: Final = 64  # of which each costs a request; chosen
_ALL_STATES: Final = 0xFFFFFFFF
_SYN_RECV: Final = 3
_LISTEN: Final = 10
_NO_COOKIE: Final = b"\xff" * 8
_RECEIVE_SIZE: Final = 1 << 16  # bytes of one recv(2); chosen

_HEADER: Final = struct.Struct("=IHHII")
_REQUEST: Final = struct.Struct("=BBBBI")  # inet_diag_req_v2, before the socket's name
_NAME: Final = struct.Struct("!HH16s16s")  # inet_diag_sockid: both ports, both addresses
_REPLY: Final = struct.Struct("=BBBB")  # inet_diag_msg, before the socket's name
_REPLY_END: Final = struct.Struct("=I8sIIIII")  # interface, cookie, expires, queues, uid, inode
_SOCKADDR_IN: Final = struct.Struct("!2xH4s8x")
_SOCKADDR_IN6: Final = struct.Struct("!2xH4x16s4x")

AnySocket = trio.socket.SocketType | socket.socket
_Name = tuple[str, int]


class FarEnd(Enum):
    """The state of the server's end of a connection, as a client on the same host finds it."""

    UNKNOWN = "unknown"
    """The kernel does not answer, or the client's socket is not connected or in another network
    namespace."""
    MISSING = "missing"
    """No socket of this network namespace has these addresses."""
    LOST = "lost"
    """The server's kernel knows nothing of the connection: it answered with a SYN cookie, and had
    no room in the listener's backlog when the last ACK came.  `far_end` returns MISSING, since only
    its caller may know that the address leads to the listener."""
    OPENING = "opening"
    """The server's kernel has not taken the last ACK: the listener's backlog was full, or the
    listener waits for data (TCP_DEFER_ACCEPT)."""
    QUEUED = "queued"
    """The connection waits in the listener's backlog."""
    ACCEPTED = "accepted"
    """A process has accepted the connection."""


def far_end(sock: AnySocket) -> FarEnd:
    """The state of the other end of a connection within this network namespace.

    Args:
      sock: the client's TCP socket.
    """
    if sys.platform != "linux":
        return FarEnd.UNKNOWN
    try:
        here, there = sock.getsockname(), sock.getpeername()
        with _open_diag() as diag:
            if not _is_same_namespace(diag, sock):
                return FarEnd.UNKNOWN
            for interface in itertools.chain((_LOOPBACK,), _other_interfaces()):
                found = _lookup(diag, there, here, interface)
                if found is not FarEnd.MISSING:
                    return found
    except (OSError, ValueError, struct.error):
        return FarEnd.UNKNOWN
    return FarEnd.MISSING


def has_local_end(sock: AnySocket) -> bool:
    """True if a socket of this network namespace has the client's address and port as its peer.

    So a connection to an address of another host that this host redirects to itself is found.
    Looks through all connections; about 1 ms on an idle host.

    Args:
      sock: the client's TCP socket.
    """
    if sys.platform != "linux":
        return False
    try:
        host, port = sock.getsockname()[:2]
        address = ipaddress.ip_address(host.partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None)
        packed = (mapped or address).packed
        with _open_diag() as diag:
            if not _is_same_namespace(diag, sock):
                return False
            for family in (socket.AF_INET, socket.AF_INET6):
                if _dump(diag, family, packed, port):
                    return True
    except (OSError, ValueError, struct.error):
        pass
    return False


def original_destination(sock: AnySocket) -> _Name | None:
    """The address and port to which the client of a TCP connection connected.

    They differ from the server's own name if a rule of this host has translated them.  None: this
    host's connection tracking does not know the connection.

    Args:
      sock: either end of a connection.
    """
    if sys.platform != "linux":
        return None
    try:
        if sock.family == socket.AF_INET6:
            host = sock.getsockname()[0]
            if not ipaddress.ip_address(host.partition("%")[0]).ipv4_mapped:  # type: ignore[union-attr]
                found = sock.getsockopt(socket.IPPROTO_IPV6, _SO_ORIGINAL_DST, _SOCKADDR_IN6.size)
                port, packed = _SOCKADDR_IN6.unpack(found)
                return socket.inet_ntop(socket.AF_INET6, packed), port
        found = sock.getsockopt(socket.IPPROTO_IP, _SO_ORIGINAL_DST, _SOCKADDR_IN.size)
        port, packed = _SOCKADDR_IN.unpack(found)
        return socket.inet_ntop(socket.AF_INET, packed), port
    except (OSError, ValueError, struct.error):
        return None


def _open_diag() -> socket.socket:
    kind = int(socket.SOCK_RAW) | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    return socket.socket(socket.AF_NETLINK, kind, _NETLINK_SOCK_DIAG)


def _is_same_namespace(diag: socket.socket, sock: AnySocket) -> bool:
    """True if two sockets are in one network namespace, as far as the kernel shows that."""
    try:
        ours = diag.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8)
        return ours == sock.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8)
    except OSError:
        return True  # Linux before 5.14


def _other_interfaces() -> list[int]:
    """A listener that is bound to an interface is found only with the index of that interface."""
    return [index for index, _ in socket.if_nameindex() if index != _LOOPBACK][:_MOST_INTERFACES]


def _lookup(
    diag: socket.socket, server: tuple[str, int], client: tuple[str, int], interface: int
) -> FarEnd:
    """Find the server's socket by both names.  Raises OSError: the kernel does not answer."""
    ends = [_packed(name[0]) for name in (server, client)]
    if len(ends[0]) != len(ends[1]):
        return FarEnd.UNKNOWN
    family = socket.AF_INET if len(ends[0]) == 4 else socket.AF_INET6
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, _ALL_STATES)
    request += _NAME.pack(server[1], client[1], *ends)
    request += struct.pack("=I", interface) + _NO_COOKIE
    _send(diag, request, 0)
    data = diag.recv(_RECEIVE_SIZE)
    _, kind, _, _, _ = _HEADER.unpack_from(data)
    if kind == _NLMSG_ERROR:
        (code,) = struct.unpack_from("=i", data, _HEADER.size)
        if -code == errno.ENOENT:
            return FarEnd.MISSING
        raise OSError(-code, "sock_diag")
    state = data[_HEADER.size + 1]
    if state == _LISTEN:
        return FarEnd.MISSING  # what the kernel returns if there is no connection
    if state == _SYN_RECV:
        return FarEnd.OPENING
    inode = _REPLY_END.unpack_from(data, _HEADER.size + _REPLY.size + _NAME.size)[-1]
    return FarEnd.ACCEPTED if inode else FarEnd.QUEUED


def _dump(diag: socket.socket, family: int, packed: bytes, port: int) -> bool:
    """True if an open connection has this peer.  Raises OSError: the kernel does not answer."""
    peer_family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    # One condition (inet_diag_hostcond): the peer's address and port.  On success the program goes
    # on behind the condition, where it ends: accepted.  On failure it goes on 4 bytes further:
    # rejected (inet_diag_bc_run).
    condition = struct.pack("=BBxxi", peer_family, 8 * len(packed), port) + packed
    size = 4 + len(condition)
    code = struct.pack("=BBH", _INET_DIAG_BC_D_COND, size, size + 4) + condition
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, 1 << ESTABLISHED) + bytes(48)
    request += struct.pack("=HH", 4 + len(code), _INET_DIAG_REQ_BYTECODE) + code
    _send(diag, request, _NLM_F_DUMP)
    found = False
    while True:
        data = diag.recv(_RECEIVE_SIZE)
        at = 0
        while at + _HEADER.size <= len(data):
            size, kind, _, _, _ = _HEADER.unpack_from(data, at)
            if kind == _NLMSG_DONE:
                return found
            if kind == _NLMSG_ERROR:
                (number,) = struct.unpack_from("=i", data, at + _HEADER.size)
                raise OSError(-number, "sock_diag")
            found = True
            at += max(_HEADER.size, size + 3 & ~3)


def _send(diag: socket.socket, request: bytes, flags: int) -> None:
    length = _HEADER.size + len(request)
    header = _HEADER.pack(length, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST | flags, 1, 0)
    diag.sendto(header + request, (0, 0))


def _packed(host: str) -> bytes:
    """The bytes of an address; an IPv4-mapped address as IPv4."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    packed: bytes = (mapped or address).packed
    return packed
