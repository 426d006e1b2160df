"""A client that connects and ends before its server has accepted its connections.

``python -m tests.e2e.brief_client TRANSPORT HOW SIZE PORT`` opens `CONNECTIONS` connections one
after the other, sends SIZE bytes on each, and ends them by HOW: "reset" and "close" end each before
the next one is opened; "leave" ends the process, and "SIGKILL" kills it, while all are open.
TRANSPORT: "tcp"; "enabled" for `trio.socket` under `trio_smc.enable()`.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
from socket import SO_LINGER, SOL_SOCKET

import trio

import trio_smc

HOST = "127.0.0.1"
CONNECTIONS = 10
RESET_AT_CLOSE = struct.pack("ii", 1, 0)
CONFIG = trio_smc.Config(learn_short=False, require_smc=True)


async def main(how: str, size: int, port: int) -> None:
    left = []
    for _ in range(CONNECTIONS):
        sock = trio.socket.socket()
        await sock.connect((HOST, port))
        if size:
            await sock.send(b"x" * size)
        if how == "reset":
            sock.setsockopt(SOL_SOCKET, SO_LINGER, RESET_AT_CLOSE)
        if how in ("reset", "close"):
            sock.close()
        left.append(sock)
    if how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    way, how_to_end, number, at = sys.argv[1:]
    if way == "enabled":
        trio_smc.enable(CONFIG)
    trio.run(main, how_to_end, int(number), int(at))
