"""`SmcSocket` knows the names of both ends, even after the peer has reset the TCP connection."""

from __future__ import annotations

import errno
import os
import socket
import struct

import pytest
import trio

from tests.timing import PATIENCE
from trio_smc.streams.stream import SmcSocket

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with RST


@pytest.mark.parametrize("kept", [False, True])
async def test_the_peers_name_outlives_a_reset(kept: bool) -> None:
    """The kernel forgets the peer's name.  After `keep_names` both names outlive the descriptor."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = trio.socket.socket()
        await client.connect(listener.getsockname())
        peer, own = client.getpeername(), client.getsockname()
        accepted, _ = listener.accept()
    ours = SmcSocket(client)
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    accepted.close()
    with trio.fail_after(PATIENCE), pytest.raises(ConnectionResetError):
        await client.recv(1)
    with pytest.raises(OSError, match=os.strerror(errno.ENOTCONN)):
        client.getpeername()
    assert (ours.getsockname(), ours.getpeername()) == (own, peer)
    if kept:
        ours.keep_names()
    client.close()
    if kept:
        assert (ours.getsockname(), ours.getpeername()) == (own, peer)
    else:
        with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
            ours.getpeername()
