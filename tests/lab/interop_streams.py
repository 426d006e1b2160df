"""Steps with the kernel as peer: bytes, many connections, loss."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import trio

from tests.lab.interop_world import PIECE, Both, World, proposes_smc_d
from tests.lab.kernel_agent import OPENING
from tests.timing import PATIENCE
from trio_smc import Mode, SmcStream, Stack

__all__ = ["first_contact", "loss", "many_connections", "second_connection", "window_full"]

MIB = 1 << 20
CONNECTIONS = 200
RING = 64 * 1024
"""The kernel's RMB element (net.smc.rmem)."""
OUR_RING = 512 * 1024


async def first_contact(world: World) -> None:
    """Programs with sockets of AF_SMC and of IPPROTO_SMC, in both roles."""
    for role, connect in world.both_ways():
        for kind in ("smc", "ipproto"):
            async with world.stack() as (stack, seen):
                both = await connect(stack, kind)
                await both.confirm()
                await both.stream.send_all(b"to the kernel")
                assert await both.there("text", count=13) == "to the kernel"
                await both.there("send", text="and back")
                assert await both.stream.receive_some() == b"and back"
                await both.end()
            proposal = next(m for _, m in seen.clc_messages if m[4] == 1)
            if role == "client":
                assert len(proposal) == 52, proposal.hex()
            else:
                # Longer only if the kernel offers SMC-D, too.
                assert (len(proposal) > 92) is proposes_smc_d(seen), proposal.hex()
            # CONFIRM LINK as Linux wants it: no eye catchers.
            assert all(m[3] & 0x03 for _, _, m in seen.llc_messages if m[0] == 1)
            assert {1, 2} <= seen.types(True) & seen.types(False), "ADD LINK was offered, answered"
            world.log(f"{role} {kind}: SMCR by smc_diag, Proposal of {len(proposal)} bytes")


async def second_connection(world: World) -> None:
    """The same link group again: each side confirms RKeys of new RMBs, then deletes them."""
    for role, connect in world.both_ways():
        async with world.stack() as (stack, seen):
            first = await connect(stack)
            second = await connect(stack)
            await second.confirm()
            assert second.stream.link_group == first.stream.link_group
            assert 6 in seen.types(False, replies=False), "the kernel's CONFIRM RKEY"
            for both in (first, second):
                await both.stream.send_all(b"x")
                assert await both.there("text", count=1) == "x"
                await both.end()
            world.log(
                f"{role}: LLC requests sent {sorted(seen.types(True, replies=False))}, "
                f"received {sorted(seen.types(False, replies=False))}"
            )


async def transfer(both: Any, world: World, size: int, wanted: str) -> float:
    """The file in both directions at once; returns the seconds."""
    start = trio.current_time()

    async def theirs() -> None:
        await both.there("send_file", path=str(world.file), count=size, patience=400)

    async def at_theirs() -> None:
        got = await both.there("receive", count=size, patience=400)
        assert got[:2] == [size, wanted], got

    async def ours() -> None:
        await both.send_file(world.file, size, patience=400)

    async with trio.open_nursery() as nursery:
        for each in (theirs, at_theirs, ours):
            nursery.start_soon(each)
        assert await both.receive(size, patience=400) == (size, wanted)
    return trio.current_time() - start


def file_digest(world: World, size: int) -> str:
    digest = hashlib.sha256()
    with open(world.file, "rb") as file:
        while size:
            piece = file.read(min(MIB, size))
            digest.update(piece)
            size -= len(piece)
    return digest.hexdigest()


async def window_full(world: World, size: int = 16 * MIB) -> None:
    """Both directions at once; each receiver always waits until the sender has no room."""
    wanted = file_digest(world, size)
    for role, connect in world.both_ways():
        async with world.stack() as (stack, _):
            both = await connect(stack)
            await both.confirm()
            start = trio.current_time()
            async with trio.open_nursery() as nursery:

                async def at_theirs(both: Both = both) -> None:
                    got = await both.there("receive_full", count=size, ring=RING, patience=300)
                    assert got == [size, wanted], got

                async def theirs(both: Both = both) -> None:
                    await both.there("send_file", path=str(world.file), count=size, patience=300)

                for each in (at_theirs, theirs):
                    nursery.start_soon(each)
                nursery.start_soon(both.send_file, world.file, size, 300)
                assert await _take_full(both, size) == wanted
            stalls = both.stream.statistics().window_stalls
            assert stalls >= size // PIECE // 2, stalls  # at most once in each send_all
            await both.end()
            world.log(
                f"{role}: {size >> 20} MiB each way in {trio.current_time() - start:.1f} s, our "
                f"window was full {size // RING} times, the kernel's {size // OUR_RING}"
            )


async def _take_full(both: Both, size: int) -> str:
    """Receive whenever the ring has no room for more; returns the SHA-256."""
    digest, got = hashlib.sha256(), 0
    statistics = both.stream.statistics
    while got < size:
        goal = got + OUR_RING
        with trio.fail_after(PATIENCE):
            while statistics().bytes_received < goal:  # noqa: ASYNC110 - there is no event
                await trio.sleep(0.001)
        while got < goal:
            data = await both.stream.receive_some(goal - got)
            digest.update(data)
            got += len(data)
    return digest.hexdigest()


async def many_connections(world: World) -> None:
    """200 connections open at once, data on all of them at the same time, in both roles."""
    text = "x" * 3000
    for role, run in (("server", _many_from_kernel), ("client", _many_to_kernel)):
        async with world.stack() as (stack, _):
            start = trio.current_time()
            modes = await run(world, stack, text)
            assert modes == {"SMCR": CONNECTIONS}, modes
            statistics = stack.statistics()
            world.log(
                f"{role}: {CONNECTIONS} connections at once in "
                f"{trio.current_time() - start:.1f} s, {statistics.link_groups} link groups"
            )


class _Meeting:
    """The point at which all connections wait for each other."""

    def __init__(self) -> None:
        self._missing = CONNECTIONS
        self._complete = trio.Event()

    async def wait(self) -> None:
        self._missing -= 1
        if not self._missing:
            self._complete.set()
        await self._complete.wait()


async def _exactly(stream: SmcStream, count: int) -> bytes:
    got = b""
    while len(got) < count:
        data = await stream.receive_some()
        assert data, "the end"
        got += data
    return got


async def _many_from_kernel(world: World, stack: Stack, text: str) -> Any:
    port = next(world.ports)
    carrying = _Meeting()

    async def echo(stream: SmcStream) -> None:
        async with stream:
            got = await _exactly(stream, len(text))
            await carrying.wait()
            await stream.send_all(got)
            assert await stream.receive_some() == b""

    [listener] = await stack.open_listeners(port, host=world.here, backlog=256)
    async with listener, trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, echo, [listener])
        modes = await world.kernel.call(
            "many_connect", kind="smc", host=world.here, port=port, count=CONNECTIONS, text=text,
            patience=200,
        )  # fmt: skip
        nursery.cancel_scope.cancel()
    return modes


async def _many_to_kernel(world: World, stack: Stack, text: str) -> Any:
    port = next(world.ports)
    number = await world.kernel.call("listen", kind="smc", port=port)
    all_open = _Meeting()
    modes: list[Any] = []
    opening = trio.Semaphore(OPENING)

    async def serve() -> None:
        modes.append(
            await world.kernel.call(
                "many_accept", number=number, count=CONNECTIONS, size=len(text), patience=200
            )
        )

    async def one() -> None:
        async with opening:
            stream = await stack.open_stream(world.there, port)
        async with stream:
            assert stream.mode is Mode.SMC_R, stream.fallback
            await all_open.wait()
            await stream.send_all(text.encode())
            assert await _exactly(stream, len(text)) == text.encode()
            assert await stream.receive_some() == b""

    with trio.fail_after(200):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            for _ in range(CONNECTIONS):
                nursery.start_soon(one)
    await world.kernel.call("close", number=number)
    return modes[0]


async def loss(world: World, size: int = 2 * MIB) -> None:
    """3 % of the packets of both directions are lost."""
    command = "tc qdisc {} dev eth0 root netem loss 3% delay 1ms"
    await trio.run_process(command.format("add").split())
    await world.kernel.call("shell", command=command.format("add"))
    try:
        wanted = file_digest(world, size)
        connect: Callable[..., Any]
        for role, connect in world.both_ways():
            async with world.stack() as (stack, _):
                both = await connect(stack)
                await both.confirm()
                took = await transfer(both, world, size, wanted)
                await both.end()
                world.log(f"{role}: {size >> 20} MiB each way with 3 % loss in {took:.1f} s")
    finally:
        with trio.CancelScope(shield=True), trio.move_on_after(PATIENCE):
            await trio.run_process(command.format("del").split()[:6])
            await world.kernel.call("shell", command="tc qdisc del dev eth0 root")
