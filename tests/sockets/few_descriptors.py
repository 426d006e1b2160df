"""A process with few free descriptors opens its first connection, over TCP or under `enable()`.

    python -m tests.sockets.few_descriptors tcp|smc PORT

prints a JSON array: for each number of free descriptors what an echo server at PORT has answered,
or the error.  Each connection is the first one of a process of its own.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Final

import trio

import trio_smc

NUMBERS: Final = range(1, 40)
"""Free descriptors.  A stack needs fewer than the last one."""


async def connect(free: int, port: int) -> str:
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(100)]
    limit = max(held) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    for each in held[:free]:
        os.close(each)
    try:
        with trio.socket.socket() as sock:
            await sock.connect(("127.0.0.1", port))
            await sock.send(b"?")
            return (await sock.recv(1)).decode()
    except OSError as error:
        return repr(error)


def first_connection(transport: str, free: int, port: int) -> str:
    """The outcome in a new process."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        if transport == "smc":
            trio_smc.enable(trio_smc.Config(learn_short=False))
        os.write(writer, trio.run(connect, free, port).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with open(reader) as file:
        return file.read()


if __name__ == "__main__":
    outcomes = [first_connection(sys.argv[1], free, int(sys.argv[2])) for free in NUMBERS]
    sys.stdout.write(json.dumps(outcomes))
