"""The number of descriptors that this process may still open.

Over TCP a program needs one descriptor for a connection and one for a listener.  trio_smc needs
more, and must not take the last ones: then the program could not accept any more.
"""

from __future__ import annotations

import os
import sys
from typing import Final

from trio_smc._base.resources import is_lack

if sys.platform == "linux":
    import resource

__all__ = ["RESERVE", "leaves_reserve"]

RESERVE: Final = 32
"""Descriptors that stay free for the program when a stack or a listener opens its own.  Chosen: the
first connection with a peer takes five beside its TCP socket, and a handshake up to two more for a
moment, so this is room for three peers and for ten TCP sockets or files."""

_SHARE: Final = 4
"""One in so many descriptors of a large limit stays free, too, because a program that has many
listeners has many connections.  Chosen: at a limit of 1,024 a program with 200 listeners had 20
descriptors left for its connections and files with `RESERVE` alone, and has 206 with this share."""

_OPEN: Final = "/proc/self/fd"


def leaves_reserve(count: int) -> bool:
    """True if `RESERVE` descriptors, and a quarter of all, are free when ``count`` more are open.

    True, too, if the number of open descriptors is unknown.
    """
    if sys.platform != "linux":
        return True
    try:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit == resource.RLIM_INFINITY:
            return True
        # The size is the number of open descriptors since Linux 6.2, and 0 before.
        number = os.stat(_OPEN).st_size or len(os.listdir(_OPEN))
    except OSError as error:
        # `listdir` needs a descriptor itself.  Other errors: /proc is not mounted, or a sandbox
        # refuses the call.
        return not is_lack(error)
    return number + count + max(RESERVE, limit // _SHARE) <= limit
