"""The data that the control socket sends about a stack: the public views as values for JSON.

The names and units are those of the views, and byte strings are hexadecimal.  docs/cli.md describes
the fields that scripts can read.
"""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import trio

from trio_smc._base.errors import ProtocolError
from trio_smc._base.release import RELEASE
from trio_smc._base.statistics import Agreed
from trio_smc.config.config import Config
from trio_smc.control.protocol import PARTS, PIECE
from trio_smc.host.addresses import interface_addresses
from trio_smc.host.pnet import interfaces
from trio_smc.rnic.roce.device import VerbsRnic

if TYPE_CHECKING:
    from trio_smc._base.statistics import StackStatistics, StreamStatistics
    from trio_smc._stack import Stack
    from trio_smc.rnic.verbs import Rnic
    from trio_smc.streams.connection_views import ConnectionCursors, ConnectionView
    from trio_smc.streams.group_views import LinkGroupView

__all__ = ["Snapshots", "plain_statistics"]


_View = TypeVar("_View")
_PYTHON: Final = platform.python_version()
_MAX_VALUE: Final = 1000
"""Characters of the text of a setting.  Chosen."""


class Snapshots:
    """Takes snapshots of one stack.

    Each link group gets a number in its first snapshot, and keeps the number.
    """

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._opened_at = trio.current_time()
        self._numbers: dict[LinkGroupView, int] = {}
        self._last_number = 0

    def parts(self, wanted: list[str]) -> Iterator[tuple[str, Any]]:
        """Yield the part and the data of each message.

        The data is read when it is yielded, so the messages may show different moments.
        """
        self._number_groups()
        yield "process", self._process()
        for part in PARTS:
            if part not in wanted:
                continue
            stack = self._stack
            match part:
                case "statistics":
                    yield part, plain_statistics(stack.statistics())
                case "connections":
                    yield from _pieces(part, stack.connections, self._connection)
                case "link_groups":
                    yield from _pieces(part, tuple(self._numbers), self._link_group)
                case "rnics":
                    yield from _pieces(part, stack.rnics, self._rnic)
                case "listeners":
                    yield from _pieces(part, stack.listening_addresses, list)
                case "settings":
                    yield part, _settings(stack.config)
                case "interfaces":
                    yield from _pieces(part, list(_interfaces()), dict)
                case "events":
                    entries = stack.runtime.groups.journal.entries()
                    yield from _pieces(part, entries, lambda entry: entry._asdict())

    def drain(
        self, change: str, rnic: object, number: object
    ) -> Callable[[], Awaitable[None]] | None:
        """The call that changes the service of an RNIC or a link group; None if there is none.

        Args:
          change: "drain" or "undrain".
          rnic: the name of the RNIC, or None.
          number: the number of the link group, or None.

        Raises:
          ProtocolError: the request does not name exactly one of the two.
        """
        stack = self._stack
        if isinstance(rnic, str) and number is None:
            if all(each.name != rnic for each in stack.rnics):
                return None
            if change == "drain":
                return partial(stack.drain_rnic, rnic)
            return partial(_at_once, partial(stack.undrain_rnic, rnic))
        if isinstance(number, int) and not isinstance(number, bool) and rnic is None:
            self._number_groups()
            for group, known in self._numbers.items():
                if known == number:
                    if change == "drain":
                        return partial(stack.drain_link_group, group)
                    return partial(_at_once, partial(stack.undrain_link_group, group))
            return None
        raise ProtocolError("a drain names one RNIC or one link group")

    def users(self, rnic: object, number: object) -> int:
        """The connections on an RNIC, or in a link group."""
        return sum(
            link.connections
            for group in self._stack.link_groups
            for link in group.links
            if link.rnic.name == rnic or (rnic is None and self._numbers.get(group) == number)
        )

    def process(self) -> tuple[str, Any]:
        """The first message of each answer."""
        return "process", self._process()

    def _process(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "release": RELEASE,
            "python": _PYTHON,
            "stack": self._stack.peer_id.hex(),
            "uptime": trio.current_time() - self._opened_at,
            "ueids": list(self._stack.ueids or ()),
        }

    def _number_groups(self) -> None:
        present = self._stack.link_groups
        for group in present:
            if group not in self._numbers:
                self._last_number += 1
                self._numbers[group] = self._last_number
        self._numbers = {group: self._numbers[group] for group in present}

    # --- connections -----------------------------------------------------------------------

    def _connection(self, view: ConnectionView) -> dict[str, Any]:
        group, link, cursors = view.link_group, view.link, view.cursors
        return {
            "mode": view.mode,
            "state": view.state,
            "local": view.local_address,
            "peer": view.peer_address,
            "flags_sent": view.flags_sent,
            "flags_received": view.flags_received,
            "send_queue": view.send_queue,
            "receive_queue": view.receive_queue,
            "link_group": None if group is None else self._numbers.get(group),
            "link": None if link is None else link.number,
            "rnic": None if link is None else link.rnic.name,
            **(dict.fromkeys(Agreed._fields) if group is None else group.agreed._asdict()),
            "fallback": None if view.fallback is None else view.fallback.as_dict(),
            "cursors": None if cursors is None else _values(cursors),
            "statistics": _values(view.statistics()),
        }

    # --- link groups -----------------------------------------------------------------------

    def _link_group(self, view: LinkGroupView) -> dict[str, Any]:
        return {
            "number": self._numbers[view],
            "role": view.role,
            "peer_id": view.peer_id.hex(),
            "kind": view.kind,
            "asymmetric_side": _asymmetric_side(view),
            "state": view.state,
            "drained": view.drained,
            **view.agreed._asdict(),
            "links": [
                {
                    "number": link.number,
                    "state": link.state,
                    "rnic": link.rnic.name,
                    "port": getattr(link.rnic, "port", None),
                    "gid": link.rnic.gid.hex(),
                    "peer_gid": None if link.peer_gid is None else link.peer_gid.hex(),
                    **self._network(link.rnic),
                    "user_id": link.user_id,
                    "peer_user_id": link.peer_user_id,
                    "connections": link.connections,
                }
                for link in view.links
            ],
            "rmbs": [
                {"element_size": rmb.element_size, "elements": rmb.elements, "in_use": rmb.in_use}
                for rmb in view.rmbs
            ],
        }

    # --- RNICs -----------------------------------------------------------------------------

    def _network(self, rnic: Rnic) -> dict[str, Any]:
        """The network interface and the VLAN of an RNIC, and its interfaces in the PNET table."""
        interface = None
        if isinstance(rnic, VerbsRnic):
            interface = interfaces().get(rnic.gid_entry.ifindex)
        table = self._stack.runtime.rnic_set.table
        return {
            "netdev": None if interface is None else interface.name,
            "vlan": None if interface is None else interface.vlan,
            "pnet": [net for net, name in table if name == rnic.name],
        }

    def _rnic(self, rnic: Rnic) -> dict[str, Any]:
        return {
            "name": rnic.name,
            "kind": rnic.kind,
            "variant": getattr(rnic, "variant", None),  # of a software RNIC
            "device": getattr(rnic, "device", None),
            "port": getattr(rnic, "port", None),
            "port_active": rnic.port_active,
            "drained": self._stack.runtime.rnic_set.is_drained(rnic),
            "gid": rnic.gid.hex(),
            "mac": rnic.mac.hex(),
            "mtu": 128 << rnic.mtu,
            **self._network(rnic),
            "links": sum(
                link.rnic is rnic for group in self._stack.link_groups for link in group.links
            ),
            "critical": sum(
                link.rnic is rnic
                for group in self._stack.link_groups
                if all(link.rnic is rnic for link in group.links)
                for link in group.links
            ),
        }


async def _at_once(call: Callable[[], None]) -> None:
    call()


def _settings(config: Config) -> list[dict[str, str]]:
    """The settings that differ from the defaults, as text.  No setting is secret."""
    default = Config()
    found = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != getattr(default, field.name):
            text = str(value)
            if field.name == "rnics":
                text = ", ".join(each.name for each in value)
            found.append({"name": field.name, "value": text[:_MAX_VALUE]})
    return found


def _asymmetric_side(view: LinkGroupView) -> str | None:
    """The side that has only one RNIC for the links of an asymmetric group (RFC 7609, 2.2.2)."""
    if view.kind != "asymmetric":
        return None
    return "local" if len({link.rnic for link in view.links}) == 1 else "peer"


def _interfaces() -> Iterator[dict[str, Any]]:
    """The network interfaces of this host with their addresses."""
    addresses = interface_addresses()
    for index, interface in interfaces().items():
        yield {
            "name": interface.name,
            "vlan": interface.vlan,
            "addresses": addresses.get(index, []),
        }


def _pieces(
    part: str, views: Sequence[_View], describe: Callable[[_View], Any]
) -> Iterator[tuple[str, list[Any]]]:
    """Yield the descriptions in pieces.  Between two pieces other tasks of the stack run."""
    for start in range(0, len(views), PIECE):
        yield part, [describe(view) for view in views[start : start + PIECE]]


def plain_statistics(statistics: StackStatistics) -> dict[str, Any]:
    """The counters of a stack as values for JSON."""
    values = {
        field.name: getattr(statistics, field.name)
        for field in dataclasses.fields(statistics)
        if field.name not in ("agreed", "fallbacks")
    }
    values["agreed"] = [
        {**agreed._asdict(), "count": count} for agreed, count in statistics.agreed.items()
    ]
    counted = sorted(statistics.fallbacks.items())
    values["fallbacks"] = [
        {"origin": origin, "reason": reason, "count": count} for (origin, reason), count in counted
    ]
    return values


def _values(frozen: ConnectionCursors | StreamStatistics) -> dict[str, int]:
    """As `dataclasses.asdict`, but ten times as fast (timeit): there may be many connections."""
    return {name: getattr(frozen, name) for name in type(frozen).__slots__}
