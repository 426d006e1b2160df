"""Lists of connections in `Config`: networks, (host, port) pairs, ports of services."""

from __future__ import annotations

import ipaddress
from functools import lru_cache

__all__ = ["Listed", "check_list", "is_listed"]

Listed = str | int | tuple[str, int]
"""A network ("192.0.2.0/24"), a port, or a pair of host and port."""

_Parsed = ipaddress.IPv4Network | ipaddress.IPv6Network | tuple[str, int] | int


def check_list(name: str, entries: object, *, ports: bool = False) -> None:
    """Raise ValueError, which names the setting, when ``entries`` is no such list.

    Args:
      ports: a port alone may be an entry.
    """
    kinds = "networks, (host, port) pairs and ports" if ports else "networks and (host, port) pairs"
    if not isinstance(entries, tuple):
        raise ValueError(f"{name}: a tuple of {kinds}")
    for entry in entries:
        if not isinstance(entry, str | tuple | int) or (isinstance(entry, int) and not ports):
            raise ValueError(f"{name}: {entry!r} is neither a network nor a (host, port) pair")
        try:
            _parse(entry)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: {error}") from None


def is_listed(entry: Listed, addresses: tuple[tuple[str, int], ...]) -> bool:
    """Whether one of the (host, port) ``addresses`` is what the entry means."""
    parsed = _parse(entry)
    return any(_matches(parsed, host, port) for host, port in addresses)


@lru_cache(maxsize=1024)
def _parse(entry: Listed) -> _Parsed:
    """A network, a port, or a pair whose host is in canonical form."""
    match entry:
        case str():
            return ipaddress.ip_network(entry)
        case bool():
            pass
        case int() as port if 0 < port < 65536:
            return port
        case (str() as host, int() as port) if 0 < port < 65536:
            return _canonical(host), port
    raise ValueError(f"{entry!r} is neither a network nor a (host, port) pair")


def _matches(entry: _Parsed, host: str, port: int) -> bool:
    if isinstance(entry, int):
        return entry == port
    if isinstance(entry, tuple):
        return entry == (_canonical(host), port)
    try:
        return ipaddress.ip_address(host.partition("%")[0]) in entry
    except ValueError:
        return False  # a name


def _canonical(host: str) -> str:
    try:
        return str(ipaddress.ip_address(host.partition("%")[0]))
    except ValueError:
        return host.lower()
