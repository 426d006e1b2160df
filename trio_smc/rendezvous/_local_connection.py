"""One Unix connection of same-host discovery: packets in and out, and who is at the other end."""

from __future__ import annotations

import logging
import os
import socket
import struct

from trio_smc._base.errors import ProtocolError
from trio_smc.rendezvous._local_protocol import MAX_SIZE, Message, decode_untrusted

__all__ = ["is_same_user", "take"]

_log = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


def is_same_user(connection: socket.socket) -> bool:
    """Whether the peer's effective user, when it connected or listened, is ours."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(raw)[1] == os.geteuid())


def take(connection: socket.socket) -> Message | None:
    """The packet that has arrived; None when the peer is gone or sent none of our messages.

    Raises:
      BlockingIOError: nothing has arrived.
    """
    try:
        data = connection.recv(MAX_SIZE)
        return decode_untrusted(data) if data else None
    except BlockingIOError:
        raise
    except (OSError, ProtocolError) as error:
        _log.debug("same-host discovery: a peer is ignored: %s", error)
        return None
