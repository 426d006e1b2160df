"""This host's own addresses, and the networks its interfaces are in (RFC 7609, 3.5.1.2).

A client proposes the subnet or prefixes of the interface its connection leaves by; a server
accepts a first contact only from a network that it is attached to itself.  Addresses are text as
`socket.getsockname` gives it: scopes ("%eth0") are ignored, IPv4-mapped IPv6 counts as IPv4.

Theory of operation: networks are read from a dump of the kernel's addresses; they may change at any
moment, and `host.netlink` knows for how long a dump is good.  Loopback, where most same-host
connections are, is answered without asking: its networks are the same everywhere.  Whether an
address is this host's own is asked for every connection, and two sockets can nearly always tell (20
microseconds).  Where there is no netlink the host has no networks: every answer is None, False or
empty.
"""

from __future__ import annotations

import errno
import functools
import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from trio_smc.host.netlink import query

__all__ = [
    "Prefix",
    "address_block",
    "address_interface",
    "all_prefixes",
    "interface_prefixes",
    "is_attached",
    "is_on_network",
    "is_same_host",
    "local_prefix",
    "plain_address",
    "source_address",
]


_CACHE_SIZE = 1024  # addresses parsed last: parsing one costs more than a system call
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Prefix(NamedTuple):
    """A network that an interface may be in.

    Fields:
      network: its number, 4 bytes for IPv4 and 16 for IPv6, the bits beyond `length` zero.
      length: bits that count, 0..32 or 0..128.
    """

    network: bytes
    length: int

    @property
    def is_ipv4(self) -> bool:
        """Whether it is an IPv4 subnet and not an IPv6 prefix."""
        return len(self.network) == 4

    @property
    def is_link_local(self) -> bool:
        """Whether it is IPv6 link-local, which tells nothing about who is on the same LAN."""
        return not self.is_ipv4 and ipaddress.IPv6Address(self.network).is_link_local


_LOOPBACKS = (
    (ipaddress.IPv4Network("127.0.0.0/8"), Prefix(network=bytes((127, 0, 0, 0)), length=8)),
    (ipaddress.IPv6Network("::1/128"), Prefix(network=bytes(15) + b"\x01", length=128)),
)
_LOOPBACK_PREFIXES = frozenset(prefix for _, prefix in _LOOPBACKS)

# Whoever connects to these connects from them.
_LOOPBACK_ADDRESSES = frozenset({"127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnAddress:
    """One address of this host: which interface has it, and the network it is in there."""

    interface: int
    address: str
    prefix: Prefix


@functools.lru_cache(_CACHE_SIZE)
def plain_address(address: str) -> str:
    """`address` in its one canonical form: no scope, IPv4-mapped IPv6 as IPv4.

    Raises:
      ValueError: it is no address.
    """
    return str(_parse(address))


@functools.lru_cache(_CACHE_SIZE)
def address_block(address: str) -> str:
    """The addresses that one host may choose among: an IPv4 address alone, or an IPv6 /64.

    IPv4-mapped IPv6 counts as IPv4.  A link-local address keeps its scope: each host of a link may
    choose any of its link-local addresses, and hosts of another link choose among others.

    Raises:
      ValueError: it is no address.
    """
    plain = plain_address(address)
    if ":" not in plain:
        return plain
    network = socket.inet_ntop(
        socket.AF_INET6, socket.inet_pton(socket.AF_INET6, plain)[:8] + bytes(8)
    )
    _, percent, scope = address.partition("%")
    return f"{network}{percent}{scope}/64"


def local_prefix(address: str) -> Prefix | None:
    """The network of the interface that owns the local `address`; None when none does.

    All of 127.0.0.0/8 and ::1 are owned by the loopback interface.
    """
    found = interface_prefixes(address, link_local=True)
    return found[0] if found else None


def interface_prefixes(address: str, *, link_local: bool = False) -> tuple[Prefix, ...]:
    """All networks, of its own family, of the interface that owns the local `address`.

    The network of the address itself comes first: for IPv4 the subnet, for IPv6 the prefix list
    of a Proposal (RFC 7609, A.2.2).  IPv6 link-local prefixes are left out unless `link_local`.
    """
    loopback = _loopback_prefixes(address)
    if loopback:
        return loopback
    owned = _addresses()
    plain = plain_address(address)
    own = next((item for item in owned if item.address == plain), None)
    if own is None:
        return ()
    others = (
        item.prefix
        for item in owned
        if item.interface == own.interface and item.prefix.is_ipv4 == own.prefix.is_ipv4
    )
    unique = dict.fromkeys((own.prefix, *others))
    return tuple(item for item in unique if link_local or not item.is_link_local)


@functools.lru_cache(_CACHE_SIZE)
def _loopback_prefixes(address: str) -> tuple[Prefix, ...]:
    parsed = _parse(address)
    return tuple(prefix for network, prefix in _LOOPBACKS if parsed in network)


def address_interface(address: str) -> int | None:
    """Index of the interface that owns the local `address`; None when none does."""
    plain = plain_address(address)
    return next((item.interface for item in _addresses() if item.address == plain), None)


def all_prefixes() -> tuple[Prefix, ...]:
    """All networks that this host's interfaces are in, loopback and link-local ones included."""
    return tuple(dict.fromkeys(item.prefix for item in _addresses()))


def is_on_network(address: str, networks: Iterable[Prefix]) -> bool:
    """Whether the interface that owns the local `address` is in one of these networks."""
    return not set(interface_prefixes(address)).isdisjoint(networks)


def is_attached(networks: Iterable[Prefix]) -> bool:
    """Whether an interface of this host is in one of these networks.

    Link-local prefixes do not count, whoever lists them.
    """
    wanted = {prefix for prefix in networks if not prefix.is_link_local}
    if not wanted.isdisjoint(_LOOPBACK_PREFIXES):
        return True
    return bool(wanted) and any(item.prefix in wanted for item in _addresses())


def is_same_host(local: str, remote: str) -> bool:
    """Whether the peer of a connection from `local` to `remote` is on this host.

    True when `remote` is the same address, any loopback address, or another of this host's own.
    """
    if _is_plainly_same_host(local, remote):
        return True
    plain = str(_parse(remote))
    known = _probe_own(plain)
    if known is not None:
        return known
    return any(item.address == plain for item in _addresses())


@functools.lru_cache(_CACHE_SIZE)
def _is_plainly_same_host(local: str, remote: str) -> bool:
    """Whether `is_same_host` needs no look at the host; several calls for each connection ask."""
    peer = _parse(remote)
    return peer.is_loopback or peer == _parse(local)


def source_address(address: str, port: int) -> str | None:
    """The local address that the kernel would connect to `address` and `port` from.

    No packet is sent.  A link-local result carries its scope, so that it can be bound to.  None
    when there is no route.

    Raises:
      ValueError: `address` is no address.
    """
    if address in _LOOPBACK_ADDRESSES:
        return address
    _parse(address)
    try:
        family, _, _, _, destination = socket.getaddrinfo(
            address, port, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST
        )[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(destination)
            name = probe.getsockname()
    except OSError:
        return None
    scope = name[3] if family == socket.AF_INET6 else 0
    return f"{name[0]}%{scope}" if scope else str(name[0])


def _probe_own(address: str) -> bool | None:
    """Whether the address is this host's own, where two system calls can tell; else None."""
    # The kernel reaches its own addresses from themselves, and no other one that way; secondary
    # addresses it may reach from the primary one.
    if source_address(address, 1) == address:
        return True
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError as error:
        return False if error.errno == errno.EADDRNOTAVAIL else None
    # Own, or the administrator allows binding to addresses that are not (ip_nonlocal_bind).
    return None


@functools.lru_cache(_CACHE_SIZE)
def _parse(address: str) -> _Address:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        return parsed.ipv4_mapped
    return parsed


def _addresses() -> list[_OwnAddress]:
    """Every address of this host, as the kernel tells now."""
    return query(lambda route: route.get_addr(), _own_address, "addresses")


def _own_address(message: Any) -> _OwnAddress:
    attribute = message.get_attr
    # On a point-to-point interface LOCAL is ours, and ADDRESS, the peer's, says the network;
    # elsewhere they are the same, and IPv6 gives ADDRESS alone.
    network = attribute("IFA_ADDRESS")
    length = message["prefixlen"]
    whole = ipaddress.ip_network(f"{network or attribute('IFA_LOCAL')}/{length}", strict=False)
    return _OwnAddress(
        interface=message["index"],
        address=str(_parse(attribute("IFA_LOCAL") or network)),
        prefix=Prefix(network=whole.network_address.packed, length=whole.prefixlen),
    )
