"""Descriptors whose last close waits, limits on descriptors, and a heartbeat that shows a wait."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Final

LINGER: Final = 1
"""Seconds for which the last close of a `lingering` socket waits."""
AT_ONCE: Final = 0.5
"""Seconds that a loop may stand still on a busy machine; less than `LINGER`."""


@contextlib.contextmanager
def lingering() -> Iterator[int]:
    """A TCP socket with SO_LINGER and unsent data; the descriptor becomes the caller's, to close.

    In the end all closers of the package that wait for it are joined.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        sender = socket.create_connection(listener.getsockname())
        peer, _ = listener.accept()
        with peer:
            sender.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    sender.send(bytes(65536))
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER))
            yield sender.detach()
    join_closers()


def give_away(sock: socket.socket, data: bytes, fd: int, count: int = 1) -> bool:
    """Send the only descriptor of a file ``count`` times; False: the kernel refuses it."""
    try:
        socket.send_fds(sock, [data], [fd] * count)
    except OSError:
        # Closed without waiting, so that no time of the victim's is counted.
        with socket.socket(fileno=fd) as mine:
            mine.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
        return False
    os.close(fd)
    return True


def join_closers() -> None:
    """Wait for threads that close what this module made."""
    for thread in threading.enumerate():
        if thread.name.startswith("trio_smc closer"):
            thread.join(30)
            assert not thread.is_alive()


@contextlib.contextmanager
def full_table(room: int = 0) -> Iterator[None]:
    """Have no more than ``room`` descriptors left (RLIMIT_NOFILE)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(room):
            os.close(taken.pop())
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Stopwatch:
    """Measures how long a call takes.

    Attributes:
      seconds: of the last one.
    """

    seconds = 0.0

    def __enter__(self) -> None:
        self._start = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.seconds = time.monotonic() - self._start
