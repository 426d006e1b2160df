"""The shape that the parts of a snapshot have; the other process may have said anything.

A shape is a type, a tuple of types, a dict of fields that must be there (others may be, too), or
a list of one shape for the items of a list.  `Maybe` is a shape or null.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final

from trio_smc import ConnectionCursors, ProtocolError, StackStatistics, StreamStatistics

__all__ = ["SHAPES", "check_untrusted"]


@dataclass(frozen=True, slots=True)
class Maybe:
    """Null, or this shape."""

    shape: Any


_ADDRESS: Final = [(str, int)]
SHAPES: Final[dict[str, Any]] = {
    "process": {"pid": int, "stack": str, "uptime": (int, float)},
    "statistics": {
        **{each.name: int for each in fields(StackStatistics) if each.name != "fallbacks"},
        "fallbacks": [{"origin": str, "reason": str, "count": int}],
    },
    "connections": [
        {
            "mode": str,
            "state": str,
            "local": Maybe(_ADDRESS),
            "peer": Maybe(_ADDRESS),
            "send_queue": int,
            "receive_queue": int,
            "link_group": Maybe(int),
            "link": Maybe(int),
            "rnic": Maybe(str),
            "fallback": Maybe(
                {
                    "reason": str,
                    "origin": str,
                    "code": Maybe(int),
                    "peer_code": Maybe(int),
                    "message": str,
                    "remedy": str,
                }
            ),
            "cursors": Maybe({each.name: int for each in fields(ConnectionCursors)}),
            "statistics": {each.name: int for each in fields(StreamStatistics)},
        }
    ],
    "link_groups": [
        {
            "number": int,
            "role": str,
            "peer_id": str,
            "kind": str,
            "state": str,
            "links": [
                {
                    "number": int,
                    "state": str,
                    "rnic": str,
                    "user_id": int,
                    "peer_user_id": int,
                    "connections": int,
                }
            ],
            "rmbs": [{"element_size": int, "elements": int, "in_use": int}],
        }
    ],
    "rnics": [
        {
            "name": str,
            "kind": str,
            "device": Maybe(str),
            "port": Maybe(int),
            "port_active": bool,
            "drained": bool,
            "gid": str,
            "mac": str,
            "mtu": int,
            "pnet": [str],
            "links": int,
        }
    ],
    "listeners": [_ADDRESS],
}


def check_untrusted(value: Any, shape: Any, where: str) -> None:
    """Raise ProtocolError when ``value``, which is at ``where`` in an answer, has another shape."""
    match shape:
        case Maybe():
            if value is not None:
                check_untrusted(value, shape.shape, where)
        case dict():
            if not isinstance(value, dict):
                raise ProtocolError(f"{where} is no object")
            for name, inner in shape.items():
                if name not in value:
                    raise ProtocolError(f"{where} has no {name}")
                check_untrusted(value[name], inner, f"{where}.{name}")
        case [inner]:
            if not isinstance(value, list):
                raise ProtocolError(f"{where} is no list")
            for item in value:
                check_untrusted(item, inner, where)
        case _:
            truth = isinstance(value, bool) and shape is not bool
            if truth or not isinstance(value, shape):
                raise ProtocolError(f"{where} is of the wrong kind")
