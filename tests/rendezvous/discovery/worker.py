"""A listening process for the tests of same-host discovery.

Arguments: the private directory, address and port (0: any), and "smc" or "plain".  One more
argument is the descriptor of an inherited listening socket; without it, the process makes a socket
with SO_REUSEPORT.  The process prints its port, then "smc-r" or "tcp" for each accepted connection.
Each client receives that word and the end of the stream.  The process runs until its standard input
ends.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import trio

from trio_smc.rendezvous.discovery.same_host import Discovery, Publication

WAIT = 10.0
"""Seconds for which the process waits for the client's result."""


async def serve(stream: trio.SocketStream, publication: Publication | None) -> None:
    async with stream:
        word = "tcp"
        if publication is not None:
            local, remote = stream.socket.getsockname(), stream.socket.getpeername()
            claim = publication.claim(local[:2], remote[:2])
            if claim is not None and await claim.confirm(stream.socket, trio.current_time() + WAIT):
                word = "smc-r"
        sys.stdout.write(word + "\n")
        sys.stdout.flush()
        await stream.send_all(word.encode())


async def main(private: Path, address: str, port: int, kind: str, *inherited: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    if inherited:
        listening = trio.socket.from_stdlib_socket(socket.socket(fileno=int(inherited[0])))
    else:
        listening = trio.socket.socket(family)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        await listening.bind((address, port))
        listening.listen(100)
    async with trio.open_nursery() as nursery:
        publication = None
        if kind == "smc":
            publication = Discovery(private).publish(listening.getsockname()[:2], nursery)
        listener = trio.SocketListener(listening)

        async def handle(stream: trio.SocketStream) -> None:
            await serve(stream, publication)

        nursery.start_soon(trio.serve_listeners, handle, [listener])
        sys.stdout.write(f"{listening.getsockname()[1]}\n")
        sys.stdout.flush()
        async with trio.lowlevel.FdStream(0) as commands:
            await commands.receive_some()
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], *sys.argv[5:])
