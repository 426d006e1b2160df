"""The last events of a stack, for bug reports: a bounded record that is always kept.

Observers cost something for each message.  The journal costs nothing for data: it has only changes
of links and link groups, connections that ended with an error, and decisions for TCP.  Each
subject has a record of its own, so that many aborts or decisions do not displace the changes of
links.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Final, NamedTuple

__all__ = ["Entry", "Journal"]

_LIMIT: Final = 128
"""Entries of each record.  Chosen."""
_ROUTINE: Final = "TESTING"
"""The state of a link under test.  A link is tested whenever it is idle, so that is no event."""


class Entry(NamedTuple):
    """One event.

    Attributes:
      time: seconds since the epoch.
      subject: "link", "link_group" or "connection".
      what: the link, group or connection as text.
      old, new: states; for a decision None and "tcp" or "refused".
      cause: the event of the state machine; for a decision the side and the reason; for the end of
        a connection its error.
    """

    time: float
    subject: str
    what: str
    old: str | None
    new: str
    cause: str


class Journal:
    """The last events of one stack."""

    def __init__(self) -> None:
        self._changes: dict[str, deque[Entry]] = {}
        self._decisions: deque[tuple[float, str, str, str]] = deque(maxlen=_LIMIT)

    def changed(self, subject: str, what: str, old: str | None, new: str, event: str) -> None:
        """Record a new state."""
        if old != _ROUTINE and new != _ROUTINE:
            record = self._changes.get(subject)
            if record is None:
                record = self._changes[subject] = deque(maxlen=_LIMIT)
            record.append(Entry(time.time(), subject, what, old, new, event))

    def decided(self, mode: str, origin: str, reason: str) -> None:
        """Record that a connection stays on TCP, or was refused."""
        self._decisions.append((time.time(), mode, origin, reason))

    def entries(self) -> list[Entry]:
        """All events, oldest first."""
        decisions = [
            Entry(at, "connection", "", None, mode, f"{origin}: {reason}")
            for at, mode, origin, reason in self._decisions
        ]
        changes = [each for record in self._changes.values() for each in record]
        return sorted([*changes, *decisions], key=lambda entry: entry.time)
