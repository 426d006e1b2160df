"""Query the kernel for its listening TCP sockets, and find the one that accepts a connection.

The kernel answers over netlink (NETLINK_SOCK_DIAG, sock_diag(7)), for the sockets of all users in
the network namespace of this process.  Unlike /proc/net/tcp6, the answer shows if a socket bound to
`::` accepts IPv6 only.  If the kernel has no sock_diag, the caller reads /proc/net instead, and
this remains unknown.  The addresses of interfaces come from NETLINK_ROUTE (rtnetlink(7)).
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

__all__ = [
    "Listener",
    "accepted_inode",
    "arrival_interfaces",
    "candidates",
    "listeners",
    "unix_listeners",
]

# Constants and structures of linux/include/uapi/linux: netlink.h, rtnetlink.h, if_addr.h,
# sock_diag.h, inet_diag.h, unix_diag.h.
_NETLINK_ROUTE: Final = 0
_NETLINK_SOCK_DIAG: Final = 4
_RTM_GETADDR: Final = 22
_IFA_ADDRESS: Final = 1
_IFA_LOCAL: Final = 2
_SOCK_DIAG_BY_FAMILY: Final = 20
_NLM_F_REQUEST: Final = 0x1
_NLM_F_DUMP: Final = 0x300
_NLMSG_ERROR: Final = 2
_NLMSG_DONE: Final = 3
_INET_DIAG_SKV6ONLY: Final = 11
_TCP_LISTEN: Final = 10
_UDIAG_SHOW_NAME: Final = 1
_UNIX_DIAG_NAME: Final = 0
_LOOPBACK: Final = 1
"""The index of the loopback interface, in every network namespace."""
_TIMEOUT: Final = 2.0
"""Seconds to wait for the kernel, which normally answers at once.  Chosen."""
_RECEIVE_SIZE: Final = 1 << 18
"""Bytes of the receive buffer.  Chosen: the kernel's dumps have at most 32 KiB in one datagram."""
_NO_COOKIE: Final = b"\xff" * 8

_HEADER: Final = struct.Struct("=IHHII")
_REQUEST: Final = struct.Struct("=BBBBI")  # inet_diag_req_v2, before the addresses
_ADDRESSES: Final = struct.Struct("!HH16s16s")  # inet_diag_sockid: both ports, both addresses
_UNIX_REQUEST: Final = struct.Struct("=BBHIII8s")  # unix_diag_req
_UNIX_REPLY: Final = struct.Struct("=BBBBI8s")  # unix_diag_msg: family, type, ..., inode, cookie
_REPLY: Final = struct.Struct("=BBBB")  # inet_diag_msg, before the addresses
_AFTER_ADDRESSES: Final = struct.Struct(
    "=I8sIIIII"
)  # interface, cookie, expires, queues, uid, inode
_ATTRIBUTE: Final = struct.Struct("=HH")
_IF_ADDRESS: Final = struct.Struct("=BBBBI")  # ifaddrmsg: family, length, flags, scope, interface


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening TCP socket.

    Attributes:
      address: the bound address, as `ipaddress` writes it; an IPv4-mapped address as IPv4.
      port: the port.
      is_ipv6: True if the family of the socket is AF_INET6.
      v6_only: True if the socket does not accept IPv4; None if that is unknown.
      interface: the index of the interface that the socket is bound to; 0: none.
      uid: the user that created the socket, which a process of another user may have now.
      inode: the inode of the socket, as in /proc/PID/fd.
    """

    address: str
    port: int
    is_ipv6: bool
    v6_only: bool | None
    interface: int
    uid: int
    inode: str

    @property
    def is_wildcard(self) -> bool:
        """True if the socket is bound to all addresses."""
        return self.address in ("0.0.0.0", "::")


def candidates(
    found: Iterable[Listener], address: str, port: int, arrives_by: Collection[int] = ()
) -> list[Listener]:
    """The sockets of which the kernel chooses one for a connection to an address of this host.

    The kernel prefers a socket bound to the address to one bound to all addresses, then a socket
    bound to an interface to one that is not, then IPv4 to a socket of `::` that also accepts IPv4.
    There are several candidates only if they share the port by SO_REUSEPORT, or if `v6_only` is
    unknown.

    Args:
      found: all listening sockets.
      address, port: the destination of the connection.
      arrives_by: the interfaces at which the connection may arrive (`arrival_interfaces`).  A
        socket that is bound to another interface is not a candidate.
    """
    best: dict[tuple[int, int, int], list[Listener]] = {}
    destination = ipaddress.ip_address(address.partition("%")[0])
    for each in found:
        if each.port != port or (each.interface and each.interface not in arrives_by):
            continue
        specific = not each.is_wildcard
        if specific:
            serves = ipaddress.ip_address(each.address) == destination
        elif destination.version == 4:
            serves = not (each.is_ipv6 and each.v6_only)
        else:
            serves = each.is_ipv6
        if serves:
            score = (specific, each.interface != 0, not each.is_ipv6)
            best.setdefault(score, []).append(each)
    return best[max(best)] if best else []


def listeners() -> list[Listener]:
    """All listening TCP sockets of this network namespace.

    Raises:
      OSError: the kernel has no sock_diag.
    """
    found = []
    for family in (socket.AF_INET, socket.AF_INET6):
        request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, 1 << _TCP_LISTEN) + bytes(48)
        found += [_parse_listener(message) for message in _request(request, _NLM_F_DUMP)]
    return found


def unix_listeners() -> Iterator[tuple[str, str]]:
    """The inodes and paths of the listening Unix stream sockets of this network namespace.

    The source is not /proc/net/unix: a path may contain a line feed there, and so forge the line of
    another socket.

    Raises:
      OSError: the kernel has no sock_diag of Unix sockets.
    """
    states = 1 << _TCP_LISTEN
    request = _UNIX_REQUEST.pack(socket.AF_UNIX, 0, 0, states, 0, _UDIAG_SHOW_NAME, bytes(8))
    for message in _request(request, _NLM_F_DUMP):
        _, kind, _, _, inode, _ = _UNIX_REPLY.unpack_from(message)
        name = dict(_attributes(message[_UNIX_REPLY.size :])).get(_UNIX_DIAG_NAME)
        if kind == socket.SOCK_STREAM and name:
            yield str(inode), os.fsdecode(name.removesuffix(b"\0"))


def arrival_interfaces(address: str) -> set[int]:
    """The indices of the interfaces at which a connection to an address of this host arrives.

    Packets within the host pass through the loopback interface.  But if a listening socket is bound
    to an interface, the kernel compares that interface with the one that has the address.
    """
    wanted = ipaddress.ip_address(address.partition("%")[0])
    family = socket.AF_INET if wanted.version == 4 else socket.AF_INET6
    request = _IF_ADDRESS.pack(family, 0, 0, 0, 0)
    found = set()
    try:
        for message in _request(request, _NLM_F_DUMP, _NETLINK_ROUTE, _RTM_GETADDR):
            attributes = dict(_attributes(message[_IF_ADDRESS.size :]))
            # On a point-to-point interface IFA_ADDRESS is the address of the other end.
            local = attributes.get(_IFA_LOCAL) or attributes.get(_IFA_ADDRESS)
            if local is not None and local == wanted.packed:
                found.add(_IF_ADDRESS.unpack_from(message)[4])
    except OSError:
        return {_LOOPBACK}
    return found or {_LOOPBACK}  # no interface lists 127.0.0.2, for example


def accepted_inode(
    server: tuple[str, int], client: tuple[str, int], arrives_by: Collection[int] = (_LOOPBACK,)
) -> str | None:
    """The inode of the server's socket of a connection within this host.

    None: no process has accepted the connection yet, or the server has closed the connection.

    Args:
      server, client: address and port of each end.
      arrives_by: as in `candidates`.
    """
    for interface in arrives_by:
        inode = _accepted_inode(server, client, interface)
        if inode is not None:
            return inode
    return None


def _accepted_inode(server: tuple[str, int], client: tuple[str, int], interface: int) -> str | None:
    ends = [ipaddress.ip_address(host.partition("%")[0]) for host, _ in (server, client)]
    if ends[0].version != ends[1].version:
        return None
    family = socket.AF_INET if ends[0].version == 4 else socket.AF_INET6
    names = _ADDRESSES.pack(server[1], client[1], ends[0].packed, ends[1].packed)
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF)
    request += names + struct.pack("=I", interface) + _NO_COOKIE
    try:
        messages = list(_request(request, 0))
    except OSError:
        return None
    for message in messages:
        if message[1] != _TCP_LISTEN:
            inode = _parse_listener(message).inode
            return None if inode == "0" else inode
    return None


def _request(
    request: bytes,
    flags: int,
    protocol: int = _NETLINK_SOCK_DIAG,
    message_type: int = _SOCK_DIAG_BY_FAMILY,
) -> Iterator[bytes]:
    """Send a netlink request, and yield the kernel's messages without their headers.

    Args:
      request: the request without its header.
      flags: NLM_F_DUMP for a list of messages, 0 for a single one.
      protocol: the netlink protocol.
      message_type: the type of the request.

    Raises:
      OSError: the kernel reports an error, or does not support the request.
    """
    socket_type = socket.SOCK_RAW | socket.SOCK_CLOEXEC
    with socket.socket(socket.AF_NETLINK, socket_type, protocol) as sock:
        sock.settimeout(_TIMEOUT)
        length = _HEADER.size + len(request)
        header = _HEADER.pack(length, message_type, _NLM_F_REQUEST | flags, 1, 0)
        sock.sendto(header + request, (0, 0))
        while True:
            data, sender = sock.recvfrom(_RECEIVE_SIZE)
            if sender[0] != 0:
                continue  # from another process; the port number of the kernel is 0
            at = 0
            while at + _HEADER.size <= len(data):
                size, kind, _, _, _ = _HEADER.unpack_from(data, at)
                body = data[at + _HEADER.size : at + size]
                if kind == _NLMSG_DONE:
                    return
                if kind == _NLMSG_ERROR:
                    (code,) = struct.unpack_from("=i", body)
                    raise OSError(-code, "netlink")
                yield body
                at += max(_HEADER.size, size + 3 & ~3)
            if not flags:
                return


def _parse_listener(message: bytes) -> Listener:
    family = message[0]
    port, _, packed, _ = _ADDRESSES.unpack_from(message, _REPLY.size)
    interface, _, _, _, _, uid, inode = _AFTER_ADDRESSES.unpack_from(
        message, _REPLY.size + _ADDRESSES.size
    )
    is_ipv6 = family == socket.AF_INET6
    bound = ipaddress.ip_address(packed if is_ipv6 else packed[:4])
    mapped = getattr(bound, "ipv4_mapped", None)
    v6_only: bool | None = False
    if is_ipv6:
        attributes = dict(
            _attributes(message[_REPLY.size + _ADDRESSES.size + _AFTER_ADDRESSES.size :])
        )
        flag = attributes.get(_INET_DIAG_SKV6ONLY)
        v6_only = bool(flag[0]) if flag else None
    return Listener(str(mapped or bound), port, is_ipv6, v6_only, interface, uid, str(inode))


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _ATTRIBUTE.size <= len(data):
        size, kind = _ATTRIBUTE.unpack_from(data, at)
        yield kind, data[at + _ATTRIBUTE.size : at + size]
        at += max(_ATTRIBUTE.size, size + 3 & ~3)
