"""Runs in each of two guests: trio_smc at both ends over soft-RoCE, and links that fail.

``python3 -m tests.lab.guest_ours ROLE PEER CONTROL FILE``; rxe0 is on eth0, rxe1 on eth1.  Prints
"ROLE: ok STEP" for every step.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace
from pathlib import Path

import trio

import trio_smc
from tests.lab.interop_links import here, two
from tests.lab.interop_world import CONFIG, PIECE, until
from tests.lab.verbs_side import Control
from trio_smc import LinkGroupKind, Mode, SmcStream

PORT = 7800
SIZE = 32 << 20
PATIENCE = 150
STEPS = ("nobody", "client", "server")
"""Whose interface goes down in the middle of the transfer."""


def say(role: str, text: str) -> None:
    sys.stdout.write(f"{role}: {text}\n")
    sys.stdout.flush()


async def echo(stream: SmcStream) -> int:
    total = 0
    while data := await stream.receive_some():
        await stream.send_all(data)
        total += len(data)
    return total


async def there_and_back(stream: SmcStream, file: Path) -> None:
    """Send the file's beginning and receive its echo: the SHA-256 of both."""
    sent, got = hashlib.sha256(), hashlib.sha256()

    async def send() -> None:
        with open(file, "rb") as source:  # noqa: ASYNC230 - in the cache
            for _ in range(SIZE // PIECE):
                piece = source.read(PIECE)
                sent.update(piece)
                await stream.send_all(piece)
        await stream.send_eof()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        while data := await stream.receive_some():
            got.update(data)
    assert got.digest() == sent.digest()


async def fail_in_the_middle(stream: SmcStream) -> str:
    """Take down the interface that this side sends on, once half of the bytes have come."""
    await until(lambda: stream.statistics().bytes_received > SIZE // 2, "half of it", PATIENCE)
    group = stream.link_group
    assert group is not None
    [link] = [each for each in group.links if each.connections]
    number = link.rnic.name.removeprefix("rxe")
    await here(f"cable {number} off; ip link set eth{number} down")
    await until(lambda: group.kind is LinkGroupKind.SINGLE, f"the link is lost: {group!r}", 30)
    return number


async def one_step(role: str, peer: str, control: Control, file: Path, failing: str) -> None:
    async with trio_smc.open_stack(replace(CONFIG, **two())) as stack:
        if role == "server":
            [listener] = await stack.open_listeners(PORT, host="0.0.0.0")
            await control.swap(patience=PATIENCE)
            async with listener:
                stream = await listener.accept()
        else:
            await control.swap(patience=PATIENCE)
            stream = await stack.open_stream(peer, PORT)
        assert stream.mode is Mode.SMC_R, stream.fallback
        group = stream.link_group
        assert group is not None
        await until(lambda: group.kind is LinkGroupKind.SYMMETRIC, f"symmetric: {group!r}")
        numbers: list[str] = []

        async def fail() -> None:
            numbers.append(await fail_in_the_middle(stream))

        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            if failing == role:
                nursery.start_soon(fail)
            if role == "server":
                assert await echo(stream) == SIZE
                await stream.send_eof()
            else:
                await there_and_back(stream, file)
        took = trio.current_time() - start
        for number in numbers:
            await here(f"ip link set eth{number} up; cable {number} on")
        await until(lambda: group.kind is LinkGroupKind.SYMMETRIC, f"whole again: {group!r}")
        await control.swap(patience=PATIENCE)
        await stream.aclose()
        say(
            role,
            f"ok {failing}_fails: {SIZE >> 20} MiB there and back in {took:.1f} s, "
            f"SHA-256 right, {['eth' + number for number in numbers]} taken down here",
        )


async def main() -> None:
    role, peer, control_host, file = sys.argv[1:]
    control = await Control.connect(role, control_host, PATIENCE)
    async with control.stream:
        for failing in STEPS:
            with trio.fail_after(PATIENCE):
                await one_step(role, peer, control, Path(file), failing)
            await control.swap(patience=PATIENCE)


if __name__ == "__main__":
    trio.run(main)
