"""Whether the kernel knows where a peer's GID is, on the network of one of our interfaces.

Theory of operation.  To connect a queue pair the kernel needs the MAC address behind the peer's
GID.  What its neighbour table does not have it asks the network for, and ``ibv_modify_qp`` waits
for that, a second if nobody answers, and often as long if somebody does; the whole process stands
still, for pyverbs keeps the interpreter's lock.  A peer may name any GID.  So the same two
questions are asked here first, which nobody waits for: by which neighbour is the GID's address
reached from our interface, and is its MAC address known.  If it is not, an empty datagram to the
discard port makes the kernel ask the network; it goes no further than the LAN.  (The kernel could
be asked for that by netlink too, but not by everybody.)
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from typing import Any, Final

from trio_smc.host.netlink import ask, ask_anew

__all__ = [
    "is_direct",
    "is_known",
]


_UNICAST: Final = 1  # RTN_UNICAST
_USABLE: Final = 0x02 | 0x04 | 0x08 | 0x10 | 0x40 | 0x80
"""NUD_REACHABLE, STALE, DELAY, PROBE, NOARP, PERMANENT: what the kernel takes as it is."""
_INCOMPLETE: Final = 0x01
"""NUD_INCOMPLETE: the network is being asked."""
_DISCARD: Final = 9


def is_known(peer: bytes, own: bytes, interface: int) -> bool:
    """Whether a queue pair is connected to this peer, or refused, without waiting; if not, the
    network is being asked now.  True as well where there is no netlink to tell.

    Args:
      peer, own: GIDs, 16 bytes each.
      interface: index of the interface that our GID belongs to.
    """
    source, destination = _address(own), _address(peer)
    if (":" in source) != (":" in destination):
        return True  # refused at once
    try:
        routes = ask_anew(
            lambda route: route.route("get", dst=destination, src=source, oif=interface)
        )
    except OSError:
        return True  # no way leads there: refused at once
    if not routes or routes[0]["type"] != _UNICAST:
        return True  # here, or everybody
    state = _neighbour_state(_next_hop(routes[0]) or destination, routes[0].get_attr("RTA_OIF"))
    if state is None or state & _USABLE:
        return True
    if state != _INCOMPLETE:
        _resolve(destination, interface)
    return False


def is_direct(peer: bytes, own: bytes, interface: int) -> bool | None:
    """Whether no gateway is between this peer and our interface; None: no way leads there, or
    there is no netlink to tell.  Args are those of `is_known`."""
    source, destination = _address(own), _address(peer)
    if (":" in source) != (":" in destination):
        return None
    found = ask(
        lambda route: route.route("get", dst=destination, src=source, oif=interface),
        lambda message: _next_hop(message) is None,
        ("gateway", source, destination, interface),
    )
    return found[0] if found else None


def _neighbour_state(hop: str, interface: int) -> int | None:
    """What the kernel's neighbour table says; None: it cannot be asked."""
    try:
        found = ask_anew(lambda route: route.neigh("get", dst=hop, ifindex=interface))
    except OSError as error:
        # Before Linux 5.0 there is another error: it cannot be asked for one entry.
        return 0 if error.errno == errno.ENOENT else None
    return int(found[0]["state"]) if found else None


def _resolve(destination: str, interface: int) -> None:
    """Let the kernel ask the network for it.  Never waits."""
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


def _next_hop(route: Any) -> str | None:
    """The gateway, which an IPv4 route may have an IPv6 address of."""
    via = route.get_attr("RTA_VIA")
    hop: str | None = via["addr"] if via else route.get_attr("RTA_GATEWAY")
    return hop


def _address(gid: bytes) -> str:
    address = ipaddress.IPv6Address(gid)
    return str(address.ipv4_mapped or address)
