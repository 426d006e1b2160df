"""Events as log records, with fields that a log collector can read without parsing a sentence.

`Config(log_events=True)` turns it on.  Logger "trio_smc.events"; INFO for decisions about a mode
and for links and link groups, WARNING for refused and aborted connections.  docs/monitoring.md
describes the fields; all begin with "smc_".
"""

from __future__ import annotations

import logging
from typing import Any, Final

from trio_smc._events import StackEvent

__all__ = ["log_event"]

LOGGER: Final = logging.getLogger("trio_smc.events")


def log_event(event: StackEvent) -> None:
    """Write one event to the log; states of connections only when they were aborted."""
    if event.subject == "connection" and not event.aborted:
        return
    bad = event.subject == "connection" or event.new == "refused"
    level = logging.WARNING if bad else logging.INFO
    if LOGGER.isEnabledFor(level):
        LOGGER.log(level, "%s", _sentence(event), extra=_fields(event))


def _sentence(event: StackEvent) -> str:
    match event.subject:
        case "mode":
            text = f"connection {_ends(event)} is {event.new}"
            if event.fallback is not None:
                text += f": {event.fallback.message}"
        case "connection":
            text = f"connection {_ends(event)} was aborted ({event.cause})"
        case "link":
            text = f"link {event.link} on {event.rnic} {_group(event)}: {event.old} to {event.new}"
        case _:
            text = f"link group {_group(event)}: {event.old} to {event.new}"
    return text


def _ends(event: StackEvent) -> str:
    return f"{_address(event.local_address)} to {_address(event.peer_address)}"


def _group(event: StackEvent) -> str:
    peer = event.peer_id.hex() if event.peer_id is not None else "?"
    return f"as {event.role} of {peer}"


def _address(name: tuple[str, int] | None) -> str:
    return "?" if name is None else f"{name[0]} port {name[1]}"


def _fields(event: StackEvent) -> dict[str, Any]:
    fallback = event.fallback
    values = {
        "event": "abort" if event.subject == "connection" else event.subject,
        "new": event.new,
        "old": event.old,
        "cause": event.cause,
        "local": event.local_address,
        "peer": event.peer_address,
        "reason": fallback and fallback.reason.value,
        "origin": fallback and fallback.origin.value,
        "code": fallback and fallback.code,
        "peer_code": fallback and fallback.peer_code,
        "role": event.role,
        "peer_id": event.peer_id.hex() if event.peer_id is not None else None,
        "link": event.link,
        "rnic": event.rnic,
    }
    return {f"smc_{name}": value for name, value in values.items()}
