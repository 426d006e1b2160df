"""Starts short-lived processes quickly: `python -m tests.e2e.zygote` has everything imported, and
forks for each before Trio or trio_smc ran in it.

For each JSON line it forks a process that connects, or listens and says its port, sends, closes
its stream and is gone at once; then it answers whether the exit code was 0.
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
from trio_smc import Config, SmcStream

WAYS = [
    "open_stack",
    "default stack",
    "_exit in open_stack",
    "_exit in default stack",
    "_exit in open_stack, amortised",
]


async def send_and_leave(port: int | None, way: str, **settings: Any) -> None:
    """One process's life."""
    if "open_stack" in way:
        config = Config(checkpoints="amortised" if "amortised" in way else "strict")
        async with trio_smc.open_stack(config):
            await _send(await _connect(port), **settings)
            if way.startswith("_exit"):
                os._exit(0)
    else:
        await _send(await _connect(port), **settings)
        if way.startswith("_exit"):
            os._exit(0)


async def _connect(port: int | None) -> SmcStream:
    if port is not None:
        return await trio_smc.open_stream(HOST, port)
    [listener] = await trio_smc.open_listeners(0, host=HOST)
    write_answer({"port": listener.socket.getsockname()[1]})
    stream = await listener.accept()
    await listener.aclose()
    return stream


def write_answer(answer: dict[str, Any]) -> None:
    """Write one line to the caller."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


async def _send(
    stream: SmcStream, case: int, size: int, seed: int, pause: float, pieces: int
) -> None:
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
        write_answer({} if code == 0 else {"error": f"exit code {code}"})


if __name__ == "__main__":
    main()
