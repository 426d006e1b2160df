"""Check, without waiting, that the kernel knows the MAC address of a peer's GID.

Theory of operation.  To connect a queue pair, the kernel needs the MAC address of the peer's GID.
If its neighbour table lacks the address, the kernel queries the network, and ``ibv_modify_qp``
waits for the answer: for a second if no host answers, and often as long if one does.  Meanwhile the
whole process is stopped, because pyverbs holds the GIL.  And a peer may announce any GID.

So this module queries the kernel first, by netlink, which never blocks: which neighbour leads to
the GID's address from our interface, and is the neighbour's MAC address known?  If it is unknown,
an empty datagram to the discard port makes the kernel query the network.  The datagram does not
leave the LAN.  (A netlink message could do the same, but needs a privilege.)
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from typing import Final

from trio_smc.host.netlink import Message, query, query_now
from trio_smc.host.routes import (
    neighbour_request,
    neighbour_state,
    next_hop,
    outgoing_interface,
    route_request,
    route_type,
)

__all__ = ["is_direct", "is_known", "resolve"]


_UNICAST: Final = 1  # RTN_UNICAST
_LOCAL: Final = 2  # RTN_LOCAL
_USABLE: Final = 0x02 | 0x04 | 0x08 | 0x10 | 0x40 | 0x80
"""NUD_REACHABLE, STALE, DELAY, PROBE, NOARP, PERMANENT: the kernel uses such an entry at once."""
_INCOMPLETE: Final = 0x01
"""NUD_INCOMPLETE: the kernel has queried the network and waits for an answer."""
_DISCARD: Final = 9


def is_known(peer: bytes, own: bytes, interface: int) -> bool:
    """True if the verbs connect a queue pair to this peer, or refuse it, without waiting.

    If False, the kernel now resolves the address.  True also if there is no netlink.

    Args:
      peer, own: GIDs, 16 bytes each.
      interface: index of the interface that our GID belongs to.
    """
    source, destination = _address(own), _address(peer)
    if (":" in source) != (":" in destination):
        return True  # the verbs refuse it at once
    try:
        routes = query_now(route_request(source, destination, interface))
    except OSError:
        return True  # no route: the verbs refuse it at once
    if not routes or route_type(routes[0]) != _UNICAST:
        return True  # an address of this host, or a multicast or broadcast address
    outgoing = outgoing_interface(routes[0]) or interface
    state = _neighbour_state(next_hop(routes[0]) or destination, outgoing)
    if state is None or state & _USABLE:
        return True
    if state != _INCOMPLETE:
        resolve(destination, interface)
    return False


def is_direct(peer: bytes, own: bytes, interface: int) -> bool | None:
    """True if no gateway is between this peer and our interface; None: there is no route to one
    host, or no netlink.  The parameters are those of `is_known`."""
    source, destination = _address(own), _address(peer)
    if (":" in source) != (":" in destination):
        return None
    found = query(route_request(source, destination, interface), _has_no_gateway)
    return found[0] if found else None


def _has_no_gateway(route: Message) -> bool | None:
    # A route to a broadcast or multicast address leads to no peer.
    return next_hop(route) is None if route_type(route) in (_UNICAST, _LOCAL) else None


def _neighbour_state(hop: str, interface: int) -> int | None:
    """The state of an entry of the kernel's neighbour table; None: it cannot be queried."""
    try:
        found = query_now(neighbour_request(hop, interface))
    except OSError as error:
        # Before Linux 5.0 the kernel cannot look up one entry, and reports another error.
        return 0 if error.errno == errno.ENOENT else None
    return neighbour_state(found[0]) if found else None


def resolve(destination: str, interface: int) -> None:
    """Make the kernel query the network for the MAC address.  Never waits."""
    v6 = ":" in destination
    with contextlib.suppress(OSError), _datagrams(v6=v6) as sock:
        with contextlib.suppress(PermissionError):  # before Linux 5.7
            name = socket.if_indextoname(interface).encode()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name)
        if v6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS, 1)
            sock.sendto(b"", (destination, _DISCARD, 0, interface))
        else:
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, 1)
            sock.sendto(b"", (destination, _DISCARD))


def _datagrams(*, v6: bool) -> socket.socket:
    family = socket.AF_INET6 if v6 else socket.AF_INET
    return socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)


def _address(gid: bytes) -> str:
    address = ipaddress.IPv6Address(gid)
    return str(address.ipv4_mapped or address)
