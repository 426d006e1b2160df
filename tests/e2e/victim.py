"""Processes to be stopped or killed: `python -m tests.e2e.victim` has everything imported, and
forks for each before Trio or trio_smc ran in it.

It is asked (see `processes`) to ``start`` one, which answers with its pid, and a listening one with
its port as well, and to ``wait`` for its end.
"""

from __future__ import annotations

import json
import os
import random
import sys
import traceback
from typing import Any

import trio

import trio_smc
from tests.e2e.bytes_by_position import Text
from trio_smc import Config, SmcStream

HOST = "127.0.0.1"
LARGEST = 100_000
"""Bytes of a write or read."""


def config(**settings: Any) -> Config:
    """The settings of both sides; links are tested often."""
    return Config(receive_buffer=64 * 1024, learn_short=False, **settings)


async def transfer_until_broken(
    stream: SmcStream,
    seeds: tuple[int, int],
    rng: random.Random,
    begun: trio.Event | None = None,
) -> tuple[float, int]:
    """Send text ``seeds[0]`` and check that text ``seeds[1]`` comes, until the stream is broken.

    Sets ``begun`` when the first bytes come.

    Or until the peer's process has ended.  Returns when both directions had, and how many bytes
    came.  AssertionError for wrong bytes, and when the stream is not SMC-R.
    """
    assert stream.mode == "smc-r", stream.fallback
    broken: list[float] = []
    came = 0

    async def send() -> None:
        text, position = Text(seeds[0]), 0
        try:
            while True:
                size = int(LARGEST ** rng.random())
                await stream.send_all(text.piece(position, size))
                position += size
                if rng.random() < 0.3:
                    await trio.sleep(rng.random() * 0.01)
        except trio.BrokenResourceError:
            broken.append(trio.current_time())

    async def receive() -> None:
        nonlocal came
        text = Text(seeds[1])
        try:
            while data := await stream.receive_some(max(1, int(LARGEST ** rng.random()))):
                assert data == text.piece(came, len(data)), f"wrong bytes at {came}"
                came += len(data)
                if begun is not None:
                    begun.set()
        except trio.BrokenResourceError:
            pass
        broken.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        nursery.start_soon(receive)
    await stream.aclose()
    return max(broken), came


async def live(port: int | None, streams: int, seed: int, settings: dict[str, float]) -> None:
    """A victim's life: transfers over new connections until they break."""
    rng = random.Random(seed)
    async with trio_smc.open_stack(config(**settings)):
        if port is None:
            [listener] = await trio_smc.open_listeners(0, host=HOST)
            write_answer(port=listener.socket.getsockname()[1])
            made = [await listener.accept() for _ in range(streams)]
            await listener.aclose()
        else:
            made = [await trio_smc.open_stream(HOST, port) for _ in range(streams)]
        async with trio.open_nursery() as nursery:
            for number, stream in enumerate(made):
                seeds = text_seeds(seed, number)
                nursery.start_soon(transfer_until_broken, stream, seeds, rng)


def text_seeds(seed: int, number: int) -> tuple[int, int]:
    """Which texts a victim sends and expects on its stream of that number; few, they are kept."""
    return (seed + number) % 4, 4 + (seed + number) % 4


def write_answer(**answer: Any) -> None:
    """One line."""
    os.write(1, (json.dumps(answer) + "\n").encode())


def start(command: dict[str, Any]) -> int:
    """Fork a victim and say its pid, then return it.  In the child it does not return."""
    wait, go = os.pipe()
    child = os.fork()
    if child:
        os.close(wait)
        write_answer(pid=child)
        os.close(go)
        return child
    # What the victim says must not come before its pid.
    os.close(go)
    os.read(wait, 1)
    os.close(wait)
    code = 1
    try:
        trio.run(lambda: live(**command))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def main() -> None:
    """Serve until the input ends."""
    child = 0
    while line := sys.stdin.buffer.readline():
        command = json.loads(line)
        what = command.pop("do")
        if what == "start":
            child = start(command)
        elif what == "wait":
            write_answer(code=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        else:
            write_answer(error=f"what is {what}?")


if __name__ == "__main__":
    main()
