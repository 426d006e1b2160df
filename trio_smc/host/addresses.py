"""The addresses of this host, and the networks of its interfaces (RFC 7609, 3.5.1.2).

A client proposes the subnet or the prefixes of the interface that its connection uses.  A server
accepts a first contact only from a network that the server is attached to.  Addresses are text as
`socket.getsockname` returns it.  Scopes ("%eth0") are ignored, and IPv4-mapped IPv6 counts as IPv4.

Theory of operation
-------------------
Networks come from the kernel's list of addresses, which may change at any moment.  `host.netlink`
caches this list until the next change.  Loopback networks, which most same-host connections use,
are the same on every host and need no query.

Each connection needs to know if the peer's address belongs to this host.  The connect of one UDP
socket and the bind of another nearly always show that (`probe_own`), in at most 20 µs (timeit).
Without netlink the host has no known networks except loopback, and the results are None, False or
empty.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import ipaddress
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from trio_smc.host.netlink import Message, Request, query

__all__ = [
    "OwnAddress",
    "Prefix",
    "address_block",
    "address_interface",
    "all_prefixes",
    "interface_prefixes",
    "is_attached",
    "is_on_network",
    "is_same_host",
    "is_wildcard",
    "local_prefix",
    "own_addresses",
    "plain_address",
    "probe_own",
    "reached_address",
    "source_address",
]


_CACHE_SIZE = 1024
"""Parsed addresses that are kept, because parsing one takes longer than a system call.  Chosen."""
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Prefix(NamedTuple):
    """A network that an interface may be in.

    Fields:
      network: the network address, 4 bytes for IPv4 and 16 for IPv6; bits beyond `length` are 0.
      length: the length of the prefix in bits, 0..32 or 0..128.
    """

    network: bytes
    length: int

    @property
    def is_ipv4(self) -> bool:
        """True if this is an IPv4 subnet and not an IPv6 prefix."""
        return len(self.network) == 4

    @property
    def is_link_local(self) -> bool:
        """True for the IPv6 link-local prefix, which is the same on every LAN."""
        return not self.is_ipv4 and ipaddress.IPv6Address(self.network).is_link_local


_LOOPBACKS = (
    (ipaddress.IPv4Network("127.0.0.0/8"), Prefix(network=bytes((127, 0, 0, 0)), length=8)),
    (ipaddress.IPv6Network("::1/128"), Prefix(network=bytes(15) + b"\x01", length=128)),
)
_LOOPBACK_PREFIXES = frozenset(prefix for _, prefix in _LOOPBACKS)

# A connection from this host to one of these addresses has the same address at both ends.
_LOOPBACK_ADDRESSES = frozenset({"127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnAddress:
    """One address of this host, with its interface and its network."""

    interface: int
    address: str
    prefix: Prefix


@functools.lru_cache(_CACHE_SIZE)
def plain_address(address: str) -> str:
    """The canonical form of an address: without scope, and IPv4-mapped IPv6 as IPv4.

    Raises:
      ValueError: `address` is not an IP address.
    """
    return str(_parse(address))


@functools.lru_cache(_CACHE_SIZE)
def reached_address(address: str, source: str | None = None) -> str:
    """`plain_address` of the address that a connection to ``address`` reaches.

    Connecting to 0.0.0.0 or :: reaches this host: the address that the socket is bound to, or a
    loopback address (ip(7); Linux: ip_route_output_key_hash_rcu, tcp_v6_connect).

    Args:
      source: the local address to which the socket is bound; None: it is not bound.

    Raises:
      ValueError: `address` is not an IP address.
    """
    plain = _parse(address)
    if not plain.is_unspecified:
        return str(plain)
    bound = None
    if source is not None:
        with contextlib.suppress(ValueError):  # the name of a host
            bound = _parse(source)
    if plain.version == 4:
        own = bound is not None and bound.version == 4 and not bound.is_unspecified
        return str(bound) if own else "127.0.0.1"
    return "127.0.0.1" if bound is not None and bound.version == 4 else "::1"


@functools.lru_cache(_CACHE_SIZE)
def is_wildcard(address: str) -> bool:
    """True if the address stands for all addresses of this host; the name of a host does not."""
    try:
        return _parse(address).is_unspecified
    except ValueError:
        return False


@functools.lru_cache(_CACHE_SIZE)
def address_block(address: str) -> str:
    """The block of addresses that one host may use: a single IPv4 address, or an IPv6 /64.

    IPv4-mapped IPv6 counts as IPv4.  A link-local address keeps its scope, because the same /64 on
    another link belongs to other hosts.

    Raises:
      ValueError: `address` is not an IP address.
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
    """The network of the interface that has the local `address`; None if no interface has it.

    The loopback interface has all of 127.0.0.0/8, and ::1.
    """
    found = interface_prefixes(address, link_local=True)
    return found[0] if found else None


def interface_prefixes(address: str, *, link_local: bool = False) -> tuple[Prefix, ...]:
    """All networks of the interface that has the local `address`, of the same IP version.

    These are the subnet (IPv4) or the prefix list (IPv6) of a Proposal (RFC 7609, A.2.2).  The
    network of the address itself comes first.

    Args:
      address: an address of this host.
      link_local: include IPv6 link-local prefixes.
    """
    loopback = _loopback_prefixes(address)
    if loopback:
        return loopback
    owned = own_addresses()
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
    """The index of the interface that has the local `address`; None if no interface has it."""
    plain = plain_address(address)
    return next((item.interface for item in own_addresses() if item.address == plain), None)


def interface_addresses() -> dict[int, list[str]]:
    """The addresses of each interface, by its index."""
    found: dict[int, list[str]] = {}
    for item in own_addresses():
        found.setdefault(item.interface, []).append(str(item.address))
    return found


def all_prefixes() -> tuple[Prefix, ...]:
    """All networks of this host's interfaces, including loopback and link-local ones."""
    return tuple(dict.fromkeys(item.prefix for item in own_addresses()))


def is_on_network(address: str, networks: Iterable[Prefix]) -> bool:
    """True if the interface that has the local `address` is in one of these networks."""
    return not set(interface_prefixes(address)).isdisjoint(networks)


def is_attached(networks: Iterable[Prefix]) -> bool:
    """True if an interface of this host is in one of these networks.  Link-local prefixes are
    ignored on both sides."""
    wanted = {prefix for prefix in networks if not prefix.is_link_local}
    if not wanted.isdisjoint(_LOOPBACK_PREFIXES):
        return True
    return bool(wanted) and any(item.prefix in wanted for item in own_addresses())


def is_same_host(local: str, remote: str) -> bool:
    """True if the peer of a connection from `local` to `remote` is on this host.

    This is True if `remote` is `local`, a loopback address, or another address of this host.
    """
    if _is_plainly_same_host(local, remote):
        return True
    plain = str(_parse(remote))
    known = probe_own(plain)
    if known is not None:
        return known
    return any(item.address == plain for item in own_addresses())


@functools.lru_cache(_CACHE_SIZE)
def _is_plainly_same_host(local: str, remote: str) -> bool:
    """True if the two addresses show without a query that the peer is on this host.

    The results are cached, because each connection calls this several times.
    """
    peer = _parse(remote)
    return peer.is_loopback or peer == _parse(local)


def source_address(address: str, port: int) -> str | None:
    """The local address that the kernel would use to connect to `address` and `port`.

    No packet is sent.  A link-local result includes its scope, so that a socket can bind to it.
    None: there is no route.

    Raises:
      ValueError: `address` is not an IP address.
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


def probe_own(address: str) -> bool | None:
    """True if this host has the address, False if not, None if only a query can show that."""
    # If the destination is an address of this host, the kernel chooses the same address as the
    # source.  It does so for no other destination.  But if the destination is a secondary address,
    # the kernel may choose the primary one.
    if source_address(address, 1) == address:
        return True
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError as error:
        return False if error.errno == errno.EADDRNOTAVAIL else None
    # This host has the address, or it allows to bind to any address (ip_nonlocal_bind).
    return None


@functools.lru_cache(_CACHE_SIZE)
def _parse(address: str) -> _Address:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        return parsed.ipv4_mapped
    return parsed


# Numbers and structures of linux/if_addr.h and linux/rtnetlink.h.
_HEAD: Final = struct.Struct("=BBBBI")  # ifaddrmsg: family, prefix length, flags, scope, interface
_RTM_GETADDR: Final = 22
_IFA_ADDRESS: Final = 1
_IFA_LOCAL: Final = 2
_DUMP: Final = Request(_RTM_GETADDR, _HEAD.pack(0, 0, 0, 0, 0), _HEAD.size, dump=True)


def own_addresses() -> list[OwnAddress]:
    """All addresses that this host has now."""
    return query(_DUMP, own_address)


def own_address(message: Message) -> OwnAddress:
    _, length, _, _, interface = _HEAD.unpack(message.head)
    # On a point-to-point interface IFA_LOCAL is the address of this host, and IFA_ADDRESS is that
    # of the peer, which determines the network.  On other interfaces both are the same, but for
    # IPv6 there is only IFA_ADDRESS.
    other = message.attributes.get(_IFA_ADDRESS)
    own = message.attributes.get(_IFA_LOCAL) or other
    assert own is not None  # every address has one of them
    network = other or own
    host_bits = 8 * len(network) - length
    first = int.from_bytes(network, "big") >> host_bits << host_bits
    return OwnAddress(
        interface=interface,
        address=str(_parse(str(ipaddress.ip_address(own)))),
        prefix=Prefix(network=first.to_bytes(len(network), "big"), length=length),
    )
