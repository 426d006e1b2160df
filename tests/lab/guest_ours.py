"""Runs in each of two guests: trio_smc at both ends over soft-RoCE, and links that fail.

``python3 -m tests.lab.guest_ours ROLE PEER CONTROL FILE``; rxe0 is on eth0, rxe1 on eth1.  Prints
"ROLE: ok STEP" for every step.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import sys
from dataclasses import replace
from pathlib import Path

import trio

import trio_smc
from tests.lab import routing
from tests.lab.interop_links import here, two
from tests.lab.interop_world import CONFIG, PIECE, Seen, until
from tests.lab.verbs_side import Control
from tests.timing import PATIENCE
from trio_smc import Config, LinkGroupKind, Mode, SmcStream
from trio_smc.rendezvous.links.link import Link

PORT = 7800
SIZE = 16 << 20
STEPS = (
    "client_fails_idle", "client_fails", "server_fails", "client_loses_device",
    "server_fails_in_version_2", "client_fails_behind_routers_in_version_2",
)  # fmt: skip
"""Events before or in the middle of the transfer: an interface of that side goes down, or its RDMA
device is deleted, and comes back.  Behind routers both RNICs of the server are in other
subnets than those of the client."""
UEID = "TRIO-SMC.LAB"


class Diary(Seen, logging.Handler):
    """The events of RNICs and links, in order."""

    def __init__(self) -> None:
        Seen.__init__(self)
        logging.Handler.__init__(self)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def state(self, subject: object, old: str, new: str, event: str) -> None:
        if isinstance(subject, Link) and new == "DOWN":
            self.lines.append(f"{subject.rnic.name}'s link is down")

    def until_down(self, rnic: str) -> list[str]:
        """The events before the first link on this RNIC was down."""
        return list(itertools.takewhile(lambda line: line != f"{rnic}'s link is down", self.lines))


def log(role: str, text: str) -> None:
    sys.stdout.write(f"{role}: {text}\n")
    sys.stdout.flush()


async def echo(stream: SmcStream) -> int:
    total = 0
    while data := await stream.receive_some():
        await stream.send_all(data)
        total += len(data)
    return total


async def there_and_back(stream: SmcStream, file: Path) -> None:
    """Send the beginning of the file and receive its echo; returns the SHA-256 of both."""
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


async def fail(stream: SmcStream, diary: Diary, step: str) -> str:
    """Fail the link on which this side sends; unless "idle", after half of the data."""
    idle = "idle" in step
    if not idle:
        await until(lambda: stream.statistics().bytes_received > SIZE // 2, "half", PATIENCE)
    group = stream.link_group
    assert group is not None
    [link] = [each for each in group.links if each.connections]
    name = link.rnic.name
    number = name.removeprefix("rxe")
    diary.lines.clear()
    if "device" in step:
        await here(f"rdma link delete {name}")
        event = f"{name} has disappeared"
    else:
        await here(f"cable {number} off; ip link set eth{number} down")
        event = f"{name}: port-down"
    await until(
        lambda: group.kind is LinkGroupKind.SINGLE, f"the link is lost: {group!r}", PATIENCE
    )
    before = diary.until_down(name)
    if idle:
        assert before[0] == event, diary.lines
        assert not any("failed" in line for line in before), diary.lines
    else:
        # Requests posted while the interface is down are flushed at once.  The flush may be
        # noticed first, and so may the port of a deleted device.
        signs = (event, f"{name} has failed: ")
        assert before[0].startswith(signs) or "WR_FLUSH_ERR" in before[0], diary.lines
        await until(lambda: event in diary.lines, f"the event was told: {diary.lines}", PATIENCE)
    late = [line for line in before if "RETRY_EXC_ERR" in line or "TEST LINK" in line]
    assert late == [], diary.lines
    return number


async def mend(step: str, number: str) -> None:
    if "device" in step:
        await here(f"rxe {number} eth{number}")
    else:
        await here(f"ip link set eth{number} up; cable {number} on")
    if "routers" in step:
        await here(routing.route_to(int(number), number=1))


async def move(role: str) -> None:
    """Put a router into each wire."""
    for wire in (0, 1):
        if role == "server":
            await here(f"rdma link delete rxe{wire}; {routing.behind_router(wire, number=1)}")
        else:
            await here(routing.route_to(wire, number=1))


def settings(role: str, step: str) -> Config:
    config = replace(CONFIG, **two())
    if "version_2" in step:
        config = replace(config, ueids=(UEID,))
    if "routers" in step and role == "server":
        config = replace(config, pnet=(("in0", "rxe0"), ("in0", "rxe1")))
    return config


async def one_step(role: str, peer: str, control: Control, file: Path, step: str) -> None:
    diary = Diary()
    logging.getLogger("trio_smc").addHandler(diary)
    if "routers" in step:
        await move(role)
        peer = routing.address(0)
    async with trio_smc.open_stack(settings(role, step)) as stack:
        stack.add_observer(diary)
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
        terms = stack.runtime.groups.groups[0].terms
        agreed = (2 if "version_2" in step else 1, "routers" not in step)
        assert (terms.version, terms.direct) == agreed, terms
        numbers: list[str] = []

        async def fail_here() -> None:
            numbers.append(await fail(stream, diary, step))

        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            if step.startswith(role):
                if "idle" in step:
                    await fail_here()
                else:
                    nursery.start_soon(fail_here)
            if role == "server":
                assert await echo(stream) == SIZE
                await stream.send_eof()
            else:
                await there_and_back(stream, file)
        took = trio.current_time() - start
        downs = [line for line in diary.lines if "link is down" in line]
        for number in numbers:
            await mend(step, number)
        await until(lambda: group.kind is LinkGroupKind.SYMMETRIC, f"whole again: {group!r}")
        await control.swap(patience=PATIENCE)
        await stream.aclose()
        log(
            role,
            f"ok {step}: {SIZE >> 20} MiB there and back in {took:.1f} s, "
            f"SHA-256 right, {['eth' + number for number in numbers]} lost here; {downs}",
        )
    logging.getLogger("trio_smc").removeHandler(diary)


async def main() -> None:
    role, peer, control_host, file = sys.argv[1:]
    logging.getLogger("trio_smc").setLevel(logging.INFO)
    control = await Control.connect(role, control_host, PATIENCE)
    async with control.stream:
        for step in STEPS:
            with trio.fail_after(PATIENCE):
                await one_step(role, peer, control, Path(file), step)
            await control.swap(patience=PATIENCE)


if __name__ == "__main__":
    trio.run(main)
