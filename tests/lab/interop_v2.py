"""Steps with the kernel as peer in SMC-R version 2: Debian's own module, as it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import trio

from tests.lab import smc_netlink
from tests.lab.interop_links import SECOND, UNDO, expect_kind, here, newest_links, two
from tests.lab.interop_streams import MIB, file_digest, transfer
from tests.lab.interop_world import PATIENCE, Both, World, until
from trio_smc import FallbackReason, LinkGroupKind, Origin, Stack
from trio_smc._base.reasons import Diagnosis

__all__ = ["UEID", "contacts", "kernel_ueids", "limits", "release_0", "symmetric", "ueids_differ"]

UEID = "TRIO-SMC.LAB"
V2 = 0x20
ADD_LINK, CONFIRM_RKEY, REQUEST_ADD_LINK = V2 | 2, V2 | 6, V2 | 5


async def talk(both: Both) -> None:
    """A few bytes each way."""
    await both.confirm()
    await both.stream.send_all(b"to the kernel")
    assert await both.there("text", count=13) == "to the kernel"
    await both.there("send", text="and back")
    assert await both.stream.receive_some() == b"and back"


def terms_of(stack: Stack) -> Any:
    """What the only link group was formed on."""
    [group] = stack.runtime.groups.groups
    return group.terms


async def contacts(world: World) -> None:
    """First and subsequent contact in both roles; the kernel counts them as version 2."""
    for role, connect in world.both_ways():
        before = await world.kernel.call("versions")
        async with world.stack() as (stack, seen):
            first = await connect(stack)
            second = await connect(stack)
            assert second.stream.link_group == first.stream.link_group
            for both in (first, second):
                await talk(both)
            terms = terms_of(stack)
            assert (terms.version, terms.release, terms.direct) == (2, 1, True), terms
            for both in (first, second):
                await both.end()
        after = await world.kernel.call("versions")
        theirs = {"client": "server_v2", "server": "client_v2"}[role]
        assert after[theirs] - before[theirs] == 2, (before, after)
        types = seen.types(True) | seen.types(False)
        assert {V2 | 1, ADD_LINK, CONFIRM_RKEY} <= types, types
        assert all(each & V2 for each in types), types
        sizes = [len(m) for _, m in seen.clc_messages]
        world.say(f"{role}: two connections of version 2, CLC messages of {sizes} bytes")


async def kernel_ueids(world: World) -> None:
    """Our UEIDs are those of our guest's kernel."""
    for name in ("ELSE", UEID):
        smc_netlink.ueid(name)
    try:
        for role, connect in world.both_ways():
            async with world.stack(ueids="kernel") as (stack, _):
                offer = stack.runtime.groups.offer
                assert offer is not None
                assert {each.decode().rstrip() for each in offer.eids} == {"ELSE", UEID}
                both = await connect(stack)
                await talk(both)
                assert terms_of(stack).eid.rstrip() == UEID.encode()
                await both.end()
            world.say(f"{role}: the UEIDs of our kernel")
    finally:
        for name in ("ELSE", UEID):
            smc_netlink.ueid(name, add=False)
    async with world.stack(ueids="kernel") as (stack, _):
        assert stack.runtime.groups.offer is None


async def ueids_differ(world: World) -> None:
    """Another UEID here, none here, none at the kernel: TCP, and why."""
    for role, connect in world.both_ways():
        async with world.stack(ueids=("ELSE",)) as (stack, _):
            fallback, info = await world.fell_back(
                await connect(stack), FallbackReason.NO_COMMON_UEID
            )
            assert fallback.origin is {"client": Origin.PEER, "server": Origin.LOCAL}[role]
            world.say(f"{role}, another UEID: {fallback.message}; the kernel says {info}")
    async with world.stack(ueids=()) as (stack, _):
        fallback, info = await world.fell_back(await world.from_kernel(stack))
        assert fallback.reason is FallbackReason.MODE_MISMATCH, fallback
        assert info["peer_reason"] == Diagnosis.MODE_MISMATCH, info
        world.say(f"server without UEIDs: {fallback.message}")
    await world.kernel.call("ueid", name=UEID, add=False)
    try:
        for role, connect in world.both_ways():
            async with world.stack() as (stack, _):
                fallback, info = await world.fell_back(await connect(stack))
                assert fallback.origin is Origin.PEER
                assert fallback.peer_code == Diagnosis.NO_DEVICE, fallback
                world.say(f"{role}, none at the kernel: {fallback.message}; it says {info}")
    finally:
        with trio.CancelScope(shield=True), trio.move_on_after(PATIENCE):
            await world.kernel.call("ueid", name=UEID)


async def limits(world: World) -> None:
    """16 connections and one link, by the kernel's settings: more connections, more groups."""
    switch = "sysctl -q -w net.smc.smcr_max_conns_per_lgr={} net.smc.smcr_max_links_per_lgr={}"
    await world.kernel.call("shell", command=switch.format(16, 1))
    try:
        for role, connect in world.both_ways():
            async with world.stack() as (stack, seen):
                open_ones = [await connect(stack) for _ in range(16)]
                terms = terms_of(stack)
                assert (terms.max_connections, terms.max_links) == (16, 1), terms
                assert ADD_LINK not in seen.types(True) | seen.types(False)
                open_ones.append(await connect(stack))
                assert len(stack.runtime.groups.groups) == 2
                for both in open_ones:
                    await talk(both)
                for both in open_ones:
                    await both.end()
            world.say(f"{role}: 16 connections and one link in a group, no ADD LINK")
    finally:
        with trio.CancelScope(shield=True), trio.move_on_after(PATIENCE):
            await world.kernel.call("shell", command=switch.format(255, 2))


async def release_0(world: World) -> None:
    """Asked by our side."""
    for role, connect in world.both_ways():
        async with world.stack() as (stack, _):
            groups = stack.runtime.groups
            assert groups.offer is not None
            groups.offer = replace(groups.offer, release=0)
            both = await connect(stack)
            await talk(both)
            assert terms_of(stack).release == 0
            await both.end()
        world.say(f"{role}: release 0")


async def symmetric(world: World) -> None:
    """Two RNICs at both ends, the client's second one later: REQUEST ADD LINK, and data."""
    await world.kernel.call("shell", command=SECOND.format(12))
    await here(SECOND.format(11))
    try:
        for role, connect in world.both_ways():
            async with world.stack(**two()) as (stack, seen):
                both = await connect(stack)
                await expect_kind(world, both, LinkGroupKind.SYMMETRIC)
                assert ADD_LINK in seen.types(True, replies=role == "client")
                again = await connect(stack)
                wanted = file_digest(world, MIB)
                for each in (both, again):
                    await each.confirm()
                    await transfer(each, world, MIB, wanted)
                    await each.end()
                world.say(f"{role}: symmetric by version 2")
        async with world.stack(**two()) as (stack, seen):
            rnics = stack.runtime.rnic_set
            rnics.drain(rnics.named("rxe1"))
            both = await world.to_kernel(stack)
            await both.confirm()
            await until(
                lambda: (
                    both.stream.link_group is not None and len(both.stream.link_group.links) == 2
                ),
                "an asymmetric link",
            )
            stack.undrain_rnic("rxe1")
            await until(
                lambda: (
                    stack.link_groups[0].kind is LinkGroupKind.SYMMETRIC
                    and len(stack.link_groups[0].links) == 2
                ),
                "a symmetric group",
            )
            with trio.fail_after(PATIENCE):
                while len(await newest_links(world)) != 2:  # noqa: ASYNC110 - has no event
                    await trio.sleep(0.1)  # the kernel's asymmetric link is going, too
            await expect_kind(world, both, LinkGroupKind.SYMMETRIC)
            assert REQUEST_ADD_LINK in seen.types(True)
            await talk(both)
            await both.end()
            world.say(f"client: REQUEST ADD LINK was answered; {await newest_links(world)}")
    finally:
        await world.kernel.call("shell", command=UNDO)
        await here(UNDO)
