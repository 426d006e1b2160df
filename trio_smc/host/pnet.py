"""The RNIC ports on the network of a TCP connection (RFC 7609, 2.1, 5.1).

SMC-R must stay on the network and the VLAN of the TCP connection, because no firewall and no router
checks RoCE traffic (5.1).  So the network interface of the connection determines the RNIC ports:

* A port serves a network interface if the port's GID table has an entry for that interface.  The
  kernel makes entries for the interface of the adapter, for VLANs on this interface (frames then
  have the tag of the VLAN) and for bonds that this interface belongs to.
* If no port has an entry for a bond, the ports of the bond's members serve it.
* A PNET table names interfaces and the ports for each of them.  These ports serve the interface,
  and no others do.  The GID of the port must be in the same VLAN as the interface, or both must be
  in none.

If a port has several GIDs, the best one is that of the connection's local address, then one in the
subnet of this address, which a peer on that subnet can reach (3.5.1.2), then a link-local one,
which peers on the same LAN can reach.

Only `interfaces` and `route_interface` query the kernel, and only `read_table` and `table_of` read
files.  The other functions depend on their arguments alone.
"""

from __future__ import annotations

import ipaddress
import os
import re
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trio_smc._base.regular_file import read_regular_file
from trio_smc.host.addresses import Prefix, address_interface, plain_address
from trio_smc.host.netlink import Message, Request, attribute, attributes, query
from trio_smc.host.routes import outgoing_interface, route_request

__all__ = [
    "Interface",
    "PnetTable",
    "PortGid",
    "choose_gids",
    "explain_interface",
    "interfaces",
    "parse_table",
    "problem_of_name",
    "read_table",
    "route_interface",
    "same_network",
    "table_of",
]


_ROCE_V2: Final = 2  # IBV_GID_TYPE_ROCE_V2
_MAX_SIZE: Final = 1 << 20
"""Bytes of a PNET table.  Chosen."""
_BYTE_ORDER_MARK: Final = "\ufeff"
_SMC_PNET_COLUMNS: Final = 4
"""Columns of the listing of smc_pnet (smc_pnet(8)): PNET ID, interface, RNIC, number of the port.
Both names may be "n/a"."""
_INTERFACE_NAME: Final = re.compile(r"[\w.@+-]{1,15}", re.ASCII)
"""At most 15 bytes (IFNAMSIZ of linux/if.h).  The kernel refuses "/", ":" and spaces only.  The
other characters that are missing here are those of lists, quotations and markup."""
_RNIC_NAME: Final = re.compile(r"[\w.-]{1,63}(/[1-9]\d{0,2})?", re.ASCII)
"""The name of a device, at most 63 bytes (IB_DEVICE_NAME_MAX), and the number of a port of at most
255."""
_SHOWN: Final = 40
"""Characters of a wrong name that an error shows.  Chosen."""
_MAPPED: Final = bytes(10) + b"\xff\xff"
"""The first bytes of an IPv4-mapped IPv6 address (RFC 4291, 2.5.5.2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """A network interface.

    Attributes:
      index, name: the index and the name in the kernel.
      vlan: the VLAN ID if this is a VLAN interface; None: frames have no tag.
      lower: the index of the interface below a VLAN, else None.
      master: the index of the bond or bridge that the interface belongs to, else None.
      bond: True if the interface is a bond.
    """

    index: int
    name: str
    vlan: int | None = None
    lower: int | None = None
    master: int | None = None
    bond: bool = False


@dataclass(frozen=True, slots=True)
class PortGid:
    """An entry of the GID table of an RNIC port.

    Attributes:
      port: the RNIC's name ("rxe0", "mlx5_0/2").
      number: the index in the table.
      kind: 2 for RoCE v2, as in the verbs.
      interface: the index of the network interface that the entry belongs to.
      value: the GID, 16 bytes.
    """

    port: str
    number: int
    kind: int
    interface: int
    value: bytes


PnetTable = tuple[tuple[str, str], ...]
"""Pairs of an interface's name and an RNIC's name.  The RNICs of one interface are in order of
preference."""


def parse_table(text: str, source: str = "the PNET table") -> PnetTable:
    """Parse a table.  Each line names an interface and then its RNICs.  "#" starts a comment.

    Args:
      text: the table.
      source: the name of the table in errors.

    Raises:
      ValueError: a line names no RNIC, or has a word that is no name.
    """
    pairs = []
    for number, line in enumerate(text.split("\n"), 1):
        words = line.partition("#")[0].split()
        problem = _problem_of_line(words)
        if problem is not None:
            raise ValueError(f"{source}, line {number}: {problem}")
        pairs += [(words[0], rnic) for rnic in words[1:]]
    return tuple(pairs)


def _problem_of_line(words: Sequence[str]) -> str | None:
    if not words:
        return None
    if words[0].startswith(_BYTE_ORDER_MARK):
        return "a byte order mark; save the file as UTF-8 without one"
    if any("," in word for word in words):
        return "a comma; separate names by spaces"
    if len(words) == _SMC_PNET_COLUMNS and words[-1].isdecimal():
        return (
            "a line of the listing of smc_pnet; a line of a PNET table has an interface and the "
            "RNICs that serve it"
        )
    for kind, name in zip(("interface", *["RNIC"] * len(words)), words, strict=False):
        problem = problem_of_name(kind, name)
        if problem is not None:
            return problem
    if len(words) == 1:
        return f"no RNIC for interface {words[0]!r}"
    return None


def problem_of_name(kind: str, name: str) -> str | None:
    """The reason why an interface or an RNIC cannot have this name; None if it can.

    Args:
      kind: "interface" or "RNIC".
      name: the name.
    """
    if name.isascii() and name.isdecimal():
        return f"the number {name[:_SHOWN]} is not the name of an {kind}"
    pattern = _INTERFACE_NAME if kind == "interface" else _RNIC_NAME
    if pattern.fullmatch(name) is None or name in (".", ".."):
        return f"{name[:_SHOWN]!a} is not the name of an {kind}"
    return None


def read_table(path: Path) -> PnetTable:
    """Read and parse a table from a file.

    Raises:
      ValueError: the file cannot be read, or a line is wrong.
    """
    try:
        data = read_regular_file(path, _MAX_SIZE)
    except OSError as error:
        raise ValueError(f"the PNET table {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"the PNET table {path} cannot be read: {error}") from error
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"the PNET table {path} cannot be read: line {line} is not UTF-8"
        ) from error
    return parse_table(text, str(path))


def choose_gids(
    route: Interface,
    *,
    gids: Sequence[PortGid],
    interfaces: Mapping[int, Interface],
    table: PnetTable,
    address: str,
    network: Prefix | None,
) -> list[PortGid]:
    """The GIDs that may serve a connection: the best one of each port, the preferred port first.

    Args:
      route: the outgoing interface of the connection's route.
      gids: the GIDs of all usable ports.
      interfaces: the interfaces of this host, by index.
      table: the PNET table.
      address: the connection's local IP address.
      network: the subnet or prefix of that address.
    """
    ports = _ports_in_table(route, interfaces, table)
    if ports is not None:
        fitting = [
            gid
            for gid in gids
            if gid.port in ports
            and gid.interface in interfaces
            and interfaces[gid.interface].vlan == route.vlan
        ]
        order = {port: place for place, port in reversed(list(enumerate(ports)))}
    else:
        fitting = _gids_of(route, gids, interfaces)
        order = {gid.port: place for place, gid in reversed(list(enumerate(gids)))}
    best: dict[str, PortGid] = {}
    for gid in sorted(fitting, key=lambda gid: (_rank(gid, address, network), gid.number)):
        best.setdefault(gid.port, gid)
    return sorted(best.values(), key=lambda gid: order[gid.port])


def explain_interface(
    name: str, *, gids: Sequence[PortGid], interfaces: Mapping[int, Interface], table: PnetTable
) -> list[tuple[str, bool, str]]:
    """The ports that serve an interface or are named for it: name, True if it serves, and why.

    Args:
      name: the name of the interface.
      gids, interfaces, table: as for `choose_gids`.

    Raises:
      ValueError: there is no such interface.
    """
    route = next((each for each in interfaces.values() if each.name == name), None)
    if route is None:
        raise ValueError(f"this host has no network interface {name[:_SHOWN]!r}")
    vlan = "no VLAN" if route.vlan is None else f"VLAN {route.vlan}"
    ports = _ports_in_table(route, interfaces, table)
    if ports is None:
        found: dict[str, tuple[str, bool, str]] = {}
        for gid in _gids_of(route, gids, interfaces):
            owner = interfaces[gid.interface].name if gid.interface in interfaces else "?"
            member = "" if owner == name else f", a member of the bond {name}"
            why = f"its GID {gid.number} belongs to {owner}{member}; no line of the PNET table"
            found.setdefault(gid.port, (gid.port, True, why))
        return list(found.values())
    explained = []
    for port in dict.fromkeys(ports):
        own = [gid for gid in gids if gid.port == port and gid.interface in interfaces]
        fits = any(interfaces[gid.interface].vlan == route.vlan for gid in own)
        why = "the PNET table names it"
        if not own:
            why += ", but there is no such port with a GID"
        elif not fits:
            why += f", but it has no GID in {vlan}"
        explained.append((port, fits, why))
    return explained


def same_network(
    one: Interface,
    other: Interface,
    *,
    networks: tuple[Prefix | None, Prefix | None],
    ports: tuple[str, str],
    table: PnetTable,
) -> bool:
    """True if links on two ports may be in one link group: both ports are in the same VLAN and LAN.

    Args:
      one, other: the interfaces that the ports' GIDs belong to.
      networks: the subnet or prefix of each GID's address; None for a GID without one.
      ports: the names of the two RNICs.
      table: the PNET table.
    """
    if one.vlan != other.vlan:
        return False
    for name in {name for name, _ in table}:
        if {rnic for interface, rnic in table if interface == name}.issuperset(ports):
            return True
    if any(rnic in ports for _, rnic in table):
        return False
    if one.index == other.index or (one.master is not None and one.master == other.master):
        return True  # two ports of one interface, or of one bond
    # As in 3.5.1.2.  Equal link-local prefixes show nothing, because every LAN has the same one.
    first, second = networks
    return first is not None and first == second and not first.is_link_local


def _ports_in_table(
    route: Interface, interfaces: Mapping[int, Interface], table: PnetTable
) -> list[str] | None:
    """The ports that the table names for an interface, or for an interface below a VLAN.

    None: the table names no such interface.
    """
    names = {name for name, _ in table}
    interface: Interface | None = route
    while interface is not None:
        if interface.name in names:
            return [rnic for name, rnic in table if name == interface.name]
        interface = None if interface.lower is None else interfaces.get(interface.lower)
    return None


def _gids_of(
    route: Interface, gids: Sequence[PortGid], interfaces: Mapping[int, Interface]
) -> list[PortGid]:
    own = [gid for gid in gids if gid.interface == route.index]
    if own or not route.bond:
        return own
    members = {each.index for each in interfaces.values() if each.master == route.index}
    return [gid for gid in gids if gid.interface in members]


def _rank(gid: PortGid, address: str, network: Prefix | None) -> tuple[bool, int]:
    """A sort key for the GIDs of a port.  The best GID has the smallest key.

    RoCE v2 comes first, because both sides must use the same encapsulation.
    """
    own = ipaddress.ip_address(plain_address(address)).packed
    value = gid.value[12:] if gid.value[:12] == _MAPPED else gid.value
    if value == own:
        place = 0
    elif network is not None and _is_in_network(value, network):
        place = 1
    elif value[:2] == b"\xfe\x80":
        place = 2
    else:
        place = 3
    return gid.kind != _ROCE_V2, place


def _is_in_network(value: bytes, network: Prefix) -> bool:
    if len(value) != len(network.network) or network.is_link_local:
        return False
    shift = 8 * len(value) - network.length
    return int.from_bytes(value, "big") >> shift == int.from_bytes(network.network, "big") >> shift


# --- queries of the kernel ---------------------------------------------------------------------


# Numbers and structures of linux/if_link.h and linux/rtnetlink.h.
_LINK_HEAD: Final = struct.Struct("=BxHiII")  # ifinfomsg: family, device, index, flags, change
_RTM_GETLINK: Final = 18
_IFLA_IFNAME: Final = 3
_IFLA_LINK: Final = 5
_IFLA_MASTER: Final = 10
_IFLA_LINKINFO: Final = 18
_IFLA_EXT_MASK: Final = 29
_IFLA_INFO_KIND: Final = 1
_IFLA_INFO_DATA: Final = 2
_IFLA_VLAN_ID: Final = 1
_SKIP_STATISTICS: Final = 8  # RTEXT_FILTER_SKIP_STATS
_INTERFACES: Final = Request(
    _RTM_GETLINK,
    _LINK_HEAD.pack(0, 0, 0, 0, 0) + attribute(_IFLA_EXT_MASK, struct.pack("=I", _SKIP_STATISTICS)),
    _LINK_HEAD.size,
    dump=True,
)


def interfaces() -> dict[int, Interface]:
    """The network interfaces of this host by index; empty without netlink."""
    return {interface.index: interface for interface in query(_INTERFACES, _interface)}


def route_interface(local: str, remote: str) -> int | None:
    """The index of the outgoing interface for packets from `local` to `remote`, or None."""
    source, destination = plain_address(local), plain_address(remote)
    if ipaddress.ip_address(destination).is_link_local:
        # A link-local address is in the network of each interface.  The right interface is the one
        # that has the local address.
        return address_interface(source)
    found = query(route_request(source, destination), outgoing_interface)
    return found[0] if found else None


def _interface(message: Message) -> Interface:
    found = message.attributes
    details = attributes(found.get(_IFLA_LINKINFO, b""))
    kind = details.get(_IFLA_INFO_KIND, b"").removesuffix(b"\0")
    data = attributes(details.get(_IFLA_INFO_DATA, b"")) if kind == b"vlan" else {}
    return Interface(
        index=_LINK_HEAD.unpack(message.head)[2],
        name=os.fsdecode(found[_IFLA_IFNAME].removesuffix(b"\0")),
        vlan=_number(data.get(_IFLA_VLAN_ID)),
        lower=_number(found.get(_IFLA_LINK)) if kind == b"vlan" else None,
        master=_number(found.get(_IFLA_MASTER)),
        bond=kind == b"bond",
    )


def _number(value: bytes | None) -> int | None:
    return None if value is None else int.from_bytes(value, sys.byteorder)


def table_of(setting: PnetTable | Path | str) -> PnetTable:
    """The PNET table of a setting `Config.pnet`, which is a table or the path of one.

    Raises:
      ValueError: the file cannot be read, or a line is wrong.
    """
    return setting if isinstance(setting, tuple) else read_table(Path(setting))
