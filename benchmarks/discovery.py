"""Time of same-host discovery for one connection: `python -m benchmarks.discovery`.

Both halves run in one process, without TCP: announce, find the announcement and answer it, receive
the answer, close.  A second line is the server's look for an announcement that is not there, as for
each plain TCP connection.  Each DIRECTORY is a place for a private directory: the names of
announcements are files there, so its file system counts.  With ``--writing`` another process writes
to the same file system and calls fsync(2) all the time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import trio

from trio_smc.rendezvous.discovery.same_host import Announcement, Discovery

_SERVER = ("127.0.0.1", 9)
_WARM_UP = 200
_WRITER = """
import os, sys
with open(sys.argv[1], "wb", buffering=0) as file:
    while True:
        file.write(bytes(1 << 20))
        os.fsync(file.fileno())
        if file.tell() > 1 << 28:
            file.seek(0)
"""


@contextlib.contextmanager
def _writing(directory: str) -> Iterator[None]:
    """Another process writes to a file there."""
    command = [sys.executable, "-c", _WRITER, f"{directory}/written"]
    with subprocess.Popen(command) as writer:
        try:
            yield
        finally:
            writer.kill()


def _report(label: str, count: int, call: Callable[[int], object]) -> None:
    for number in range(_WARM_UP):
        call(number)
    times = []
    for number in range(count):
        began = time.perf_counter_ns()
        call(number)
        times.append((time.perf_counter_ns() - began) / 1000)
    times.sort()
    shares = ((0.5, "median"), (0.99, "99 %"), (0.999, "99.9 %"))
    text = ", ".join(f"{name} {times[int(share * count)]:.1f}" for share, name in shares)
    print(f"  {label}: {text}, most {times[-1]:.0f} µs")


async def _measure(directory: str, count: int) -> None:
    private = Path(directory) / "private"
    server, client = Discovery(private), Discovery(private)
    async with trio.open_nursery() as nursery:
        publication = server.publish(_SERVER, nursery)
        tcp = socket.socket()

        def whole(number: int) -> None:
            source = ("127.0.0.1", number + 10)
            announcement = client.announce(source, _SERVER, tcp)
            if not isinstance(announcement, Announcement):
                raise RuntimeError(f"not announced: {announcement}")
            claim = publication.claim(_SERVER, source)
            if claim is None or not claim.accept() or not announcement.is_too_late():
                raise RuntimeError("not answered")
            announcement.withdraw()
            claim.forget()

        def missing(number: int) -> None:
            if publication.claim(_SERVER, ("127.0.0.1", number + 10)) is not None:
                raise RuntimeError("nothing was announced")

        _report("announce, answer, receive, close", count, whole)
        _report("look for what is not announced  ", count, missing)
        tcp.close()
        publication.close()
        client.close()
        server.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.discovery", description=__doc__)
    parser.add_argument("directory", nargs="*", default=["/dev/shm", tempfile.gettempdir()])
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--writing", action="store_true", help="another process writes there")
    options = parser.parse_args()
    for place in options.directory:
        with tempfile.TemporaryDirectory(dir=place) as directory:
            os.chmod(directory, 0o700)
            print(f"{place}:")
            with _writing(directory) if options.writing else contextlib.nullcontext():
                trio.run(_measure, directory, options.count)


if __name__ == "__main__":
    main()
