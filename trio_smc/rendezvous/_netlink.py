"""Questions to the kernel's network configuration, by netlink.

Each is one synchronous exchange (about half a millisecond) and asked anew every time, because the
answer may change at any moment.  Where there is no netlink there is no answer: the caller has to
live with an empty list.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final

__all__ = ["ask"]

_log = logging.getLogger("trio_smc.netlink")

# A dump that the kernel flags as interrupted by a change is simply asked for again.
_ATTEMPTS: Final = 3

_complained = False


def ask(question: Callable[[Any], Iterable[Any]]) -> list[Any]:
    """The messages that ``question`` gets from a `pyroute2.IPRoute`."""
    if sys.platform != "linux":
        return []
    # 100 ms to import: only who needs it pays, once.
    try:
        from pyroute2 import IPRoute
        from pyroute2.netlink.exceptions import NetlinkDumpInterrupted, NetlinkError
    except (ImportError, OSError) as error:
        _complain("no netlink: %s", error)
        return []
    for _ in range(_ATTEMPTS):
        try:
            with IPRoute() as route:
                return list(question(route))
        except NetlinkDumpInterrupted:
            continue
        # RuntimeError: pyroute2 runs asyncio, which this thread may be running already when it
        # hosts Trio as a guest.
        except (OSError, NetlinkError, RuntimeError) as error:
            _complain("netlink does not answer: %s", error)
            return []
    return []


def _complain(text: str, error: Exception) -> None:
    """A warning the first time only: it is the same for every connection."""
    global _complained
    _log.log(logging.DEBUG if _complained else logging.WARNING, text, error)
    _complained = True
