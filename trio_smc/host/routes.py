"""Routes and neighbours of the kernel, as requests and answers of rtnetlink(7).

Numbers and structures are those of linux/rtnetlink.h and linux/neighbour.h.  Addresses are text in
canonical form, and both addresses of a request have the same IP version.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from typing import Final

from trio_smc.host.netlink import Message, Request, attribute

__all__ = [
    "neighbour_request",
    "neighbour_state",
    "next_hop",
    "outgoing_interface",
    "route_request",
    "route_type",
]


_RTM_GETROUTE: Final = 26
_RTM_GETNEIGH: Final = 30
# rtmsg: family, length of destination and source, TOS, table, protocol, scope, type, flags
_ROUTE_HEAD: Final = struct.Struct("=8BI")
_NEIGHBOUR_HEAD: Final = struct.Struct("=BxxxiHBB")  # ndmsg: family, interface, state, flags, type
_RTA_DST: Final = 1
_RTA_SRC: Final = 2
_RTA_OIF: Final = 4
_RTA_GATEWAY: Final = 5
_RTA_VIA: Final = 18
_VIA_HEAD: Final = 2  # rtvia: the family of the address that follows
_NDA_DST: Final = 1


def route_request(source: str, destination: str, interface: int = 0) -> Request:
    """Request the route from one address to another.

    Args:
      source, destination: the addresses.
      interface: the index of the interface that the route must use; 0: any.
    """
    family, own = _packed(source)
    _, peer = _packed(destination)
    bits = 8 * len(own)
    body = _ROUTE_HEAD.pack(family, bits, bits, 0, 0, 0, 0, 0, 0)
    body += attribute(_RTA_DST, peer) + attribute(_RTA_SRC, own)
    if interface:
        body += attribute(_RTA_OIF, struct.pack("=I", interface))
    return Request(_RTM_GETROUTE, body, _ROUTE_HEAD.size)


def route_type(route: Message) -> int:
    """The type of a route, such as RTN_UNICAST."""
    return int(_ROUTE_HEAD.unpack(route.head)[7])


def outgoing_interface(route: Message) -> int | None:
    """The index of the interface that packets leave by; None for a route without one."""
    value = route.attributes.get(_RTA_OIF)
    return None if value is None else int.from_bytes(value, sys.byteorder)


def next_hop(route: Message) -> str | None:
    """The gateway of a route; the gateway of an IPv4 route may be an IPv6 address."""
    via = route.attributes.get(_RTA_VIA)
    gateway = route.attributes.get(_RTA_GATEWAY) if via is None else via[_VIA_HEAD:]
    return None if gateway is None else str(ipaddress.ip_address(gateway))


def neighbour_request(address: str, interface: int) -> Request:
    """Request the entry of the neighbour table for an address at an interface."""
    family, packed = _packed(address)
    body = _NEIGHBOUR_HEAD.pack(family, interface, 0, 0, 0) + attribute(_NDA_DST, packed)
    return Request(_RTM_GETNEIGH, body, _NEIGHBOUR_HEAD.size)


def neighbour_state(entry: Message) -> int:
    """The state of an entry of the neighbour table, NUD_ flags."""
    return int(_NEIGHBOUR_HEAD.unpack(entry.head)[2])


def _packed(address: str) -> tuple[int, bytes]:
    parsed = ipaddress.ip_address(address)
    return (socket.AF_INET if parsed.version == 4 else socket.AF_INET6), parsed.packed
