"""The messages that the processes of a program send to `trio-smc run`, and their checks.

Each message is one JSON object of at most `MAX_SIZE` bytes:

| kind | fields | sent by |
|---|---|---|
| "python" | | the hook in `site/sitecustomize.py`, when an interpreter starts or forks |
| "trio" | | the hook, when Trio runs |
| "asyncio" | | the hook, when asyncio opens a TCP connection |
| "missing" | "executable", "error" | the hook, if trio_smc cannot be imported |
| "stack-open" | "stack" | a stack (`control.server.RunReport`) when it opens |
| "stack-counts", "stack-end" | "stack", "statistics" | a stack, at intervals and at its end |

Each message may include "dropped", the number of earlier messages that could not be sent.  A
message does not include the number of its process, because the kernel provides this number.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from trio_smc import ProtocolError
from trio_smc._base.printable import printable

__all__ = ["BYTES", "MAX_SIZE", "MAX_TEXT", "Counts", "Message", "decode_untrusted"]

MAX_SIZE: Final = 1 << 16
"""Largest number of bytes of one message.  Chosen."""
BYTES: Final = ("bytes_sent", "bytes_received", "tcp_bytes_sent", "tcp_bytes_received")
_KINDS: Final = ("python", "trio", "asyncio", "missing", "stack-open", "stack-counts", "stack-end")
# Limits of what a message may contain.  All are chosen: far above what a stack sends.
_MAX_NUMBER: Final = (1 << 63) - 1
MAX_TEXT: Final = 200
"""Characters of a text that are shown."""
_MAX_ID: Final = 32
_MAX_REASON: Final = 64
_MAX_FALLBACKS: Final = 128


@dataclass(frozen=True, slots=True)
class Counts:
    """Those counters of one stack that ``--report`` shows.

    Attributes:
      connections: the number of SMC-R connections.
      refused: the number of connections that ``require_smc`` closed.
      sizes: numbers of bytes, in the order of `BYTES`.
      fallbacks: the number of connections that stay on TCP, by the side that decided ("local" or
        "peer") and the reason.
    """

    connections: int
    refused: int
    sizes: tuple[int, ...]
    fallbacks: dict[tuple[str, str], int]


@dataclass(frozen=True, slots=True)
class Message:
    """One message.  Its strings are safe to print."""

    kind: str
    dropped: int = 0
    executable: str = ""
    error: str = ""
    stack: str = ""
    counts: Counts | None = None


def decode_untrusted(data: bytes) -> Message:
    """Decode one message.

    Raises:
      ProtocolError: the message is not valid, or a value is out of bounds.
    """
    if len(data) > MAX_SIZE:
        raise ProtocolError("a message is too long")
    try:
        fields = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):
        raise ProtocolError("a message is not JSON") from None
    if not isinstance(fields, dict):
        raise ProtocolError("a message is not an object")
    kind = fields.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ProtocolError("a message has an unknown kind")
    dropped = _number(fields, "dropped") if "dropped" in fields else 0
    if kind == "missing":
        executable, error = (_text(fields, name, MAX_SIZE) for name in ("executable", "error"))
        return Message(kind, dropped, printable(executable, MAX_TEXT), printable(error, MAX_TEXT))
    if not kind.startswith("stack-"):
        return Message(kind, dropped)
    stack = printable(_text(fields, "stack", _MAX_ID))
    counts = None if kind == "stack-open" else _counts(fields.get("statistics"))
    return Message(kind, dropped, stack=stack, counts=counts)


def _counts(statistics: Any) -> Counts:
    if not isinstance(statistics, dict):
        raise ProtocolError("statistics is not an object")
    listed = statistics.get("fallbacks")
    if not isinstance(listed, list) or len(listed) > _MAX_FALLBACKS:
        raise ProtocolError(f"fallbacks is not a list of at most {_MAX_FALLBACKS} items")
    fallbacks: dict[tuple[str, str], int] = {}
    for each in listed:
        if not isinstance(each, dict):
            raise ProtocolError("a fallback is not an object")
        origin, reason = (
            printable(_text(each, name, _MAX_REASON)) for name in ("origin", "reason")
        )
        fallbacks[origin, reason] = _number(each, "count")
    return Counts(
        _number(statistics, "connections"),
        _number(statistics, "refused"),
        tuple(_number(statistics, name) for name in BYTES),
        fallbacks,
    )


def _number(fields: dict[Any, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or not 0 <= value <= _MAX_NUMBER:
        raise ProtocolError(f"{name} is not a number from 0 to {_MAX_NUMBER}")
    return value


def _text(fields: dict[Any, Any], name: str, limit: int) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or len(value) > limit:
        raise ProtocolError(f"{name} is not a text of at most {limit} characters")
    return value
