"""A process that speaks the same-host discovery of release 0.1.0.

The process imports no module of this release.  It imports the unchanged discovery of release 0.1.0
from `tests/golden/release-0.1.0.tar.xz`: ``git archive`` of ``trio_smc`` in commit 3290ec0.

Arguments: the directory with the unpacked files, the private directory, and

- "serve" and a port (0: any): the process prints its port, and then "announced" or "plain" for each
  connection that it accepts.
- "connect" and the ports of listeners: for each port, the process prints the reason for TCP, or
  "smc-r".
- "connect-briefly" and the ports of listeners: the same with a short time limit.  A process of the
  other release may share the port, accept the connection, and send no answer.

The process runs until its standard input ends.
"""

from __future__ import annotations

import socket
import sys
import types
from importlib import import_module
from pathlib import Path
from typing import Any

import trio

WAITS = {"connect": 20.0, "connect-briefly": 3.0}
"""Time limit for an answer, in seconds."""


def print_line(text: object) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def serve(discovery: Any, port: int, nursery: trio.Nursery) -> None:
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen()
        listening.setblocking(False)
        publication = discovery.publish(listening.getsockname(), nursery)
        assert publication.unavailable is None
        print_line(listening.getsockname()[1])
        while True:
            await trio.lowlevel.wait_readable(listening)
            accepted, remote = listening.accept()
            with accepted:
                claim = publication.claim(accepted.getsockname(), remote)
                if claim is not None:
                    claim.accept()
                print_line("plain" if claim is None else "announced")


async def connect(discovery: Any, port: int, wait: float) -> None:
    with trio.socket.socket() as client:
        await client.bind(("127.0.0.1", 0))
        deadline = trio.current_time() + wait
        here, there = client.getsockname(), ("127.0.0.1", port)
        announcement = await discovery.announce(here, there, deadline, client)
        if not hasattr(announcement, "accepted"):
            print_line(announcement)
            return
        with announcement:
            await client.connect(there)
            print_line(await announcement.accepted(deadline) or "smc-r")


async def main(*arguments: str) -> None:
    private, kind, *ports = arguments
    # In the current release, `trio_smc.rendezvous.discovery` is a package without this class.
    discovery: Any = import_module("trio_smc.rendezvous.discovery").Discovery(Path(private))
    discovery.open()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(discovery.run)
        if kind == "serve":
            nursery.start_soon(serve, discovery, int(ports[0]), nursery)
        else:
            for each in ports:
                await connect(discovery, int(each), WAITS[kind])
        async with trio.lowlevel.FdStream(0) as commands:
            await commands.receive_some()
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    # The real `__init__` imports the whole package, which takes longer to start.
    package = types.ModuleType("trio_smc")
    package.__path__ = [f"{sys.argv[1]}/trio_smc"]
    sys.modules["trio_smc"] = package
    trio.run(main, *sys.argv[2:])
