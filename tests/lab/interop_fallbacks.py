"""Steps with the kernel as peer: connections that stay on TCP, with the reasons at both ends."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import trio

from tests.lab.interop_world import World
from tests.timing import PATIENCE
from trio_smc import Fallback, FallbackReason, Mode, Origin
from trio_smc.connecting import connect as _connect
from trio_smc.rnic.verbs import Rnic
from trio_smc.wire import clc

__all__ = ["kernel_declines", "plain_peer", "we_decline"]

NO_DEVICE = 0x03030000
PREFIX = 0x03070000
PEER_DECLINED = 0x05000000


@contextlib.asynccontextmanager
async def no_device(world: World) -> AsyncIterator[None]:
    """The kernel has no GID that SMC-R version 1 may use: stock behaviour over soft-RoCE."""
    switch = "echo {} > /sys/module/smc/parameters/lab_gids"
    await world.kernel.call("shell", command=switch.format(0))
    try:
        yield
    finally:
        with trio.CancelScope(shield=True), trio.move_on_after(PATIENCE):
            await world.kernel.call("shell", command=switch.format(1))


async def kernel_declines(world: World) -> None:
    """The kernel's Decline has the Proposal's version; as client the kernel declines at once."""
    async with no_device(world):
        for role, connect in world.both_ways():
            fallback = await _declined(world, connect, 28)
            world.log(f"{role}: a Decline of 28 bytes: {fallback.message}; {fallback.remedy}")
        ours = _connect._proposal

        def newer(peer_id: bytes, rnic: Rnic, address: str) -> clc.Proposal:
            # 92 bytes that name version 2 and offer version 1 only, as the kernel's own do.
            return replace(ours(peer_id, rnic, address), version=2, flags=0x08)

        _connect._proposal = newer
        try:
            await _declined(world, world.to_kernel, 44)
        finally:
            _connect._proposal = ours
        world.log("client: to a Proposal of version 2 a Decline of 44 bytes")


async def _declined(world: World, connect: Any, size: int) -> Fallback:
    async with world.stack() as (stack, seen):
        both = await connect(stack, mode=Mode.TCP)
        fallback, info = await world.fell_back(both, FallbackReason.NO_RNIC)
    assert fallback.origin is Origin.PEER
    assert fallback.peer_code == NO_DEVICE
    assert info["reason"] == NO_DEVICE, info
    [decline] = [m for out, m in seen.clc_messages if m[4] == 4]
    assert len(decline) == size, decline.hex()
    return fallback


async def we_decline(world: World) -> None:
    """The reasons of trio_smc arrive at the kernel as codes that its tools explain."""
    async with world.stack(pnet=(("eth0", "rxe9"),)) as (stack, seen):
        both = await world.from_kernel(stack, mode=Mode.TCP)
        fallback, info = await world.fell_back(both)
        assert fallback.origin is Origin.LOCAL
        declines = [m for _, m in seen.clc_messages if m[4] == 4]
        assert declines, seen.clc_messages
        assert info["reason"] == PEER_DECLINED, info
        assert info["peer_reason"] == fallback.code == NO_DEVICE, (info, fallback)
        world.log(f"we declined: {fallback.message}; the kernel has {info['peer_reason']:#x}")


async def plain_peer(world: World) -> None:
    """Programs with TCP alone never receive a CLC message."""
    async with world.stack() as (stack, seen):
        for connect in (world.to_kernel, world.from_kernel):
            both = await connect(stack, "tcp", mode=Mode.TCP)
            fallback = both.stream.fallback
            assert fallback is not None
            assert fallback.reason is FallbackReason.PEER_NOT_CAPABLE, fallback
            with trio.fail_after(PATIENCE):
                await both.stream.send_all(b"plain")
            assert await both.there("text", count=5) == "plain"
            await both.end()
        assert not seen.clc_messages
