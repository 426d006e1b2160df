"""The Linux kernel as implementation under test of `smc-conform`: runs in a guest.

``python3 -m tests.lab.conform_target HERE THERE PORT LANES READ``: an echo service (RFC 862) on
port 7007, a daytime service (RFC 867) on 7013 and a discard service (RFC 863) on 7009 of HERE, and
a client of the suite on THERE: with LANES connections to PORT it echoes, and with a few to READ it
only reads.  All are blocking sockets of AF_SMC.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable

from tests.lab.kernel_agent import make

__all__ = ["DAYTIME", "DISCARD", "ECHO"]

ECHO, DAYTIME, DISCARD = 7007, 7013, 7009
PIECE = 64 * 1024
SMALL_PIECE = 512
"""Bytes that the discard service reads at a time: less than a tenth of a ring (RFC 7609, 4.5.1)."""


READERS = 2
"""Connections on which the client only reads; the suite uses one at a time."""


def echo(sock: socket.socket) -> None:
    """Send all received bytes back, until the end."""
    while data := sock.recv(PIECE):
        sock.sendall(data)


def daytime(sock: socket.socket) -> None:
    """Send a line and close."""
    sock.sendall(b"Thursday, November 26, 2026 12:00:00-UTC\r\n")


def discard(sock: socket.socket) -> None:
    """Read in small pieces until the end."""
    while sock.recv(SMALL_PIECE):
        pass


def _serve(host: str, port: int, service: Callable[[socket.socket], None]) -> None:
    listener = make("smc")
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(256)

    def one(sock: socket.socket) -> None:
        # Many checks end the connection by a reset.
        with sock, contextlib.suppress(OSError):
            service(sock)

    while True:
        with contextlib.suppress(OSError):
            threading.Thread(target=one, args=(listener.accept()[0],), daemon=True).start()


def _connect(host: str, port: int, service: Callable[[socket.socket], None]) -> None:
    while True:
        with make("smc") as sock:
            try:
                sock.connect((host, port))
                service(sock)
            except ConnectionRefusedError:
                time.sleep(0.2)  # the suite does not listen yet
            except OSError:
                time.sleep(0.02)


def main() -> None:
    """Serve and connect until killed."""
    here, there = sys.argv[1], sys.argv[2]
    port, lanes, read = map(int, sys.argv[3:])
    for number, service in ((ECHO, echo), (DAYTIME, daytime), (DISCARD, discard)):
        threading.Thread(target=_serve, args=(here, number, service), daemon=True).start()
    for number, service in [(port, echo)] * lanes + [(read, discard)] * READERS:
        threading.Thread(target=_connect, args=(there, number, service), daemon=True).start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
