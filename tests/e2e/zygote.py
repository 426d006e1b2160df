"""Starts short-lived clients quickly: `python -m tests.e2e.zygote` has everything imported, and
forks for each client before Trio or trio_smc ran in it.

For each JSON line it forks a client that connects, sends, closes its stream and is gone at once;
then it answers with the exit code.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import trio

import trio_smc
from tests.e2e.bytes_by_position import Text
from tests.e2e.peer import HEADER, HOST

WAYS = ["open_stack", "default stack", "_exit in open_stack", "_exit in default stack"]


async def send_and_leave(
    port: int, way: str, case: int, size: int, seed: int, pause: float, pieces: int
) -> None:
    """One client's life."""
    if way.endswith("open_stack"):
        async with trio_smc.open_stack():
            await _send(port, case, size, seed, pause, pieces)
            if way.startswith("_exit"):
                os._exit(0)
    else:
        await _send(port, case, size, seed, pause, pieces)
        if way.startswith("_exit"):
            os._exit(0)


async def _send(port: int, case: int, size: int, seed: int, pause: float, pieces: int) -> None:
    stream = await trio_smc.open_stream(HOST, port)
    await stream.send_all(HEADER.pack(case, size, seed, pause))
    text = Text(seed)
    step = -(-size // pieces)
    for position in range(0, size, step):
        await stream.send_all(text.piece(position, min(step, size - position)))
    await stream.aclose()


def fork_client(command: dict[str, Any]) -> int:
    """Run a client; returns its exit code.  In the child it does not return."""
    command.pop("do")
    child = os.fork()
    if child == 0:
        try:
            trio.run(lambda: send_and_leave(**command))
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        # The interpreter's own way out, with all that it does at the end.
        sys.exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    """Serve until the input ends."""
    while line := sys.stdin.buffer.readline():
        code = fork_client(json.loads(line))
        sys.stdout.write(json.dumps({} if code == 0 else {"error": f"exit code {code}"}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
