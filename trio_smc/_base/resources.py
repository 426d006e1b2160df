"""Kinds of system errors: the peer is gone, or this machine lacks resources.

All code that handles errors by their number uses these functions.  A lack of resources
(descriptors, memory, descriptors in flight, epoll watches) may be the fault of another process, and
may be temporary.  So it fails or delays only one operation.  Only an error that shows that the peer
is gone ends the connections and links with that peer.
"""

from __future__ import annotations

import errno
from typing import Final

__all__ = ["LACK_ERRORS", "is_lack", "is_peer_gone"]


LACK_ERRORS: Final = frozenset(
    {
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ENOBUFS,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.ETOOMANYREFS,  # sendmsg: too many descriptors in flight (unix(7))
        errno.EAGAIN,  # mmap, thread and process creation; for sockets see `is_lack`
        errno.EUSERS,
    }
)
"""Error numbers of a lack of resources."""

_GONE_ERRORS: Final = frozenset(
    {
        errno.EPIPE,
        errno.ECONNRESET,
        errno.ECONNREFUSED,
        errno.ECONNABORTED,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
        errno.ETIMEDOUT,
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
        errno.ENETDOWN,
        errno.EHOSTDOWN,
    }
)


def is_lack(error: OSError) -> bool:
    """True if the operation failed for lack of resources; it may succeed later.

    On a socket that does not block, EAGAIN means that the queue is full or empty.  For such a
    socket handle BlockingIOError first.
    """
    return error.errno in LACK_ERRORS


def is_peer_gone(error: OSError) -> bool:
    """True if an operation on a connected socket failed because its peer is gone."""
    return error.errno in _GONE_ERRORS
