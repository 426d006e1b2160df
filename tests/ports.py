"""Ports without a listener, which the system assigns to no other socket."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_port(port: int = 0) -> Iterator[int]:
    """A port of all addresses that is bound, so that a connect to it is refused.

    A server that sets SO_REUSEADDR, as nearly all do, can listen there meanwhile.  A port that was
    free a moment ago can belong to another process by now, or to the socket that connects to it,
    which then is connected to itself.

    Args:
      port: this one; 0: one that is free.
    """
    with socket.socket(socket.AF_INET6) as holder:
        holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("::", port))
        yield holder.getsockname()[1]
