"""The end of the TCP connection under a stream of SMC-R."""

from __future__ import annotations

import socket

from trio_smc import SmcStream


def tcp_has_ended(stream: SmcStream) -> bool:
    """True if the TCP connection has ended.  The descriptor number of an open stream stays taken,
    but its socket has no options any more."""
    try:
        stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
    except OSError:
        return True
    return False
