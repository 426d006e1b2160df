"""A process with clients that connect and then stall.

``python -m tests.connecting.silent_clients HOST PORT COUNT ADDRESSES KIND`` keeps COUNT connections
from ADDRESSES addresses of 127.0.0.0/8, and replaces each connection that the server resets.  KIND
is "silent", "drip" (one byte per second of a Proposal) or "proposal" (a Proposal, and then
nothing).  When all clients have connected once, the process prints a line.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import select
import socket
import sys
import time

from tests.api.api_peers import proposal


def main(host: str, port: int, count: int, addresses: int, kind: str) -> None:
    """Run the clients until this process is killed."""
    sources = itertools.cycle(f"127.7.{n // 250}.{n % 250 + 1}" for n in range(addresses))
    poll = select.epoll()
    clients: dict[int, tuple[socket.socket, bytes]] = {}

    def connect() -> None:
        sock = socket.socket()
        sock.bind((next(sources), 0))
        sock.connect((host, port))
        sock.setblocking(False)
        message = proposal(peer_id=secrets.token_bytes(8), gid=secrets.token_bytes(16)).encode()
        if kind == "proposal":
            sock.send(message)
        clients[sock.fileno()] = sock, message
        poll.register(sock, select.EPOLLIN)

    for _ in range(count):
        connect()
    sys.stdout.write("connected\n")
    sys.stdout.flush()
    next_byte = time.monotonic()
    while True:
        for number, _ in poll.poll(0.1):
            sock, _ = clients[number]
            with contextlib.suppress(BlockingIOError, ConnectionError):
                if sock.recv(100):
                    continue
            del clients[number]
            sock.close()
            connect()
        if kind == "drip" and time.monotonic() >= next_byte:
            next_byte += 1
            for number, (sock, message) in clients.items():
                with contextlib.suppress(OSError):
                    sock.send(message[:1])
                clients[number] = sock, message[1:]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
