"""Steps with the kernel as peer in SMC-R version 2: Debian's own module, unchanged."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import trio

from tests.lab import routing, smc_netlink
from tests.lab.interop_links import FEW, UNDO, expect_kind, here, newest_links, survive, two
from tests.lab.interop_streams import MIB, file_digest, transfer
from tests.lab.interop_world import Both, Seen, World, proposes_smc_d, until
from tests.timing import PATIENCE
from trio_smc import Fallback, FallbackReason, LinkGroupKind, Mode, Origin, Stack, VerbsRnic
from trio_smc._base.reasons import Diagnosis
from trio_smc.rendezvous.negotiation import Negotiation

__all__ = [
    "UEID",
    "contacts",
    "ipv6",
    "kernel_checks",
    "kernel_ueids",
    "limits",
    "link_down",
    "release_0",
    "request_add_link",
    "routed",
    "symmetric",
    "ueids_differ",
]

UEID = "TRIO-SMC.LAB"
WHOLE = 256 * MIB
"""The file of ``make demo``."""
V2 = 0x20
ADD_LINK, CONFIRM_RKEY, REQUEST_ADD_LINK = V2 | 2, V2 | 6, V2 | 5
# A second RNIC on its own wire; the kernel requires its address in the connection's subnet.
# The route of TCP stays that of eth0.
WIRE = (
    "sysctl -q -w net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2;"
    "ip addr flush dev eth1; ip addr add 10.9.0.{}/24 dev eth1 metric 1000; rxe 1 eth1"
)


async def talk(both: Both) -> None:
    """Exchange a few bytes."""
    await both.confirm()
    await both.stream.send_all(b"to the kernel")
    assert await both.there("text", count=13) == "to the kernel"
    await both.there("send", text="and back")
    assert await both.stream.receive_some() == b"and back"


def expect_no_device(fallback: Fallback, seen: Seen) -> None:
    """The kernel has no RNIC for SMC-R, or no UEID, and declines with that reason.

    A kernel with SMC-D proposes that instead, and our side declines.
    """
    if proposes_smc_d(seen):
        assert fallback.origin is Origin.LOCAL, fallback
        assert fallback.reason is FallbackReason.MODE_MISMATCH, fallback
    else:
        assert fallback.origin is Origin.PEER, fallback
        assert fallback.peer_code == Diagnosis.NO_DEVICE, fallback


def terms_of(stack: Stack) -> Any:
    """The agreed parameters of the only link group."""
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
        world.log(f"{role}: two connections of version 2, CLC messages of {sizes} bytes")


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
            world.log(f"{role}: the UEIDs of our kernel")
    finally:
        for name in ("ELSE", UEID):
            smc_netlink.ueid(name, add=False)
    async with world.stack(ueids="kernel") as (stack, _):
        assert stack.runtime.groups.offer is None


async def ueids_differ(world: World) -> None:
    """Another UEID here, none here, none at the kernel: the connection is TCP, with the reason."""
    for role, connect in world.both_ways():
        async with world.stack(ueids=("ELSE",)) as (stack, _):
            fallback, info = await world.fell_back(
                await connect(stack, mode=Mode.TCP), FallbackReason.NO_COMMON_UEID
            )
            assert fallback.origin is {"client": Origin.PEER, "server": Origin.LOCAL}[role]
            world.log(f"{role}, another UEID: {fallback.message}; the kernel says {info}")
    async with world.stack(ueids=()) as (stack, _):
        both = await world.from_kernel(stack, mode=Mode.TCP)
        fallback, info = await world.fell_back(both)
        assert fallback.reason is FallbackReason.MODE_MISMATCH, fallback
        assert info["peer_reason"] == Diagnosis.MODE_MISMATCH, info
        world.log(f"server without UEIDs: {fallback.message}")
    await world.kernel.call("ueid", name=UEID, add=False)
    try:
        for role, connect in world.both_ways():
            async with world.stack() as (stack, seen):
                fallback, info = await world.fell_back(await connect(stack, mode=Mode.TCP))
                expect_no_device(fallback, seen)
                world.log(f"{role}, none at the kernel: {fallback.message}; it says {info}")
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
            world.log(f"{role}: 16 connections and one link in a group, no ADD LINK")
    finally:
        with trio.CancelScope(shield=True), trio.move_on_after(PATIENCE):
            await world.kernel.call("shell", command=switch.format(255, 2))


async def release_0(world: World) -> None:
    """trio_smc requests the link."""
    for role, connect in world.both_ways():
        async with world.stack() as (stack, _):
            groups = stack.runtime.groups
            assert groups.offer is not None
            groups.offer = replace(groups.offer, release=0)
            both = await connect(stack)
            await talk(both)
            assert terms_of(stack).release == 0
            await both.end()
        world.log(f"{role}: release 0")


async def symmetric(world: World) -> None:
    """Two RNICs at both ends; two connections, and data on both."""
    await world.kernel.call("shell", command=routing.second_interface(12))
    await here(routing.second_interface(11))
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
                world.log(f"{role}: symmetric by version 2")
    finally:
        await world.kernel.call("shell", command=UNDO)
        await here(UNDO)


async def request_add_link(world: World) -> None:
    """The client's second RNIC appears later; first the client is trio_smc, then the kernel."""
    await world.kernel.call("shell", command=routing.second_interface(12))
    await here(routing.second_interface(11))
    try:
        async with world.stack(**two()) as (stack, seen):
            rnics = stack.runtime.rnic_set
            rnics.drain(rnics.named("rxe1"))
            both = await world.to_kernel(stack)
            await _two_links(both, LinkGroupKind.ASYMMETRIC)
            stack.undrain_rnic("rxe1")
            await _symmetric_then(world, both)
            assert REQUEST_ADD_LINK in seen.types(True)
            await talk(both)
            await both.end()
            world.log(f"client: REQUEST ADD LINK was answered; {await newest_links(world)}")
        await world.kernel.call("shell", command="ip link set mac0 down")
        async with world.stack(**two()) as (stack, seen):
            both = await world.from_kernel(stack)
            await _two_links(both, LinkGroupKind.ASYMMETRIC)
            await world.kernel.call("shell", command="ip link set mac0 up")
            await _symmetric_then(world, both)
            [request] = [
                m for _, out, m in seen.llc_messages if m[0] == REQUEST_ADD_LINK and not out
            ]
            await talk(both)
            await both.end()
            world.log(f"server: answered REQUEST ADD LINK with {request[24]} GIDs")
    finally:
        await world.kernel.call("shell", command=UNDO)
        await here(UNDO)


async def _two_links(both: Both, kind: LinkGroupKind) -> None:
    await both.confirm()
    group = both.stream.link_group
    assert group is not None
    await until(lambda: group.kind is kind and len(group.links) == 2, f"{kind}, not {group!r}")


async def _symmetric_then(world: World, both: Both) -> None:
    """A link of the new RNIC replaces the asymmetric link."""
    await _two_links(both, LinkGroupKind.SYMMETRIC)
    with trio.fail_after(PATIENCE):
        while len(await newest_links(world)) != 2:  # noqa: ASYNC110 - has no event
            await trio.sleep(0.1)  # the kernel is deleting its asymmetric link as well
    await expect_kind(world, both, LinkGroupKind.SYMMETRIC)


async def link_down(world: World) -> None:
    """The interface that carries a stream goes down in the middle of it, on either side.

    Leaves both guests in that state: the kernel may wait for ever for its completions.
    """
    await world.kernel.call("shell", command=WIRE.format(22))
    await here(WIRE.format(21))
    for ours, sizes in ((False, (WHOLE, FEW)), (True, (FEW, WHOLE))):
        for size, (role, connect) in zip(sizes, world.both_ways(), strict=True):
            wanted = file_digest(world, size)
            await survive(world, connect, size, wanted, role, ours=ours, stock=True)


async def routed(world: World) -> None:
    """A router is between the two RNICs, and each is in a subnet of its own."""
    await world.kernel.call("shell", command=routing.behind_router(1, number=2))
    # Linux looks for the RDMA device below a macvlan; its table says which one it is.
    await world.kernel.call("pnet", name="LAB", interface=routing.below(1))
    await world.kernel.call("pnet", name="LAB", device="rxe1")
    await here(f"{routing.route_to(1, number=2)}; rxe 1 eth1")
    away = replace(world, here="10.9.1.1", there=routing.address(1))
    size = 8 * MIB
    wanted = file_digest(world, size)
    for role, connect in away.both_ways():
        async with away.stack(rnics=(VerbsRnic("rxe1"),)) as (stack, _):
            first, second = await connect(stack), await connect(stack)
            await first.confirm()
            assert second.stream.link_group == first.stream.link_group
            terms = terms_of(stack)
            assert (terms.version, terms.direct) == (2, False), terms
            for both in (first, second):
                await talk(both)
            took = await transfer(first, world, size, wanted)
            gids = {ipaddress.IPv6Address(each["gid"]) for each in await newest_links(world)}
            assert [str(gid.ipv4_mapped) for gid in gids] == [away.there], gids
            for both in (first, second):
                await both.end()
        world.log(f"{role}: {size >> 20} MiB each way through a router in {took:.1f} s")
    # The kernel's device first, because the kernel would send to a removed one for ever.
    await world.kernel.call("pnet_flush")
    await world.kernel.call("shell", command=routing.undo(1, number=2))
    await here(f"rdma link delete rxe1; {routing.route_to(1, number=2, verb='delete')}")


async def ipv6(world: World) -> None:
    """Linux has version 2 over IPv4 alone, and soft-RoCE has no GID for its version 1."""
    switch = "ip addr add fd00:9::{}/64 dev eth0 nodad"
    await world.kernel.call("shell", command=switch.format(2))
    await here(switch.format(1))
    away = replace(world, here="fd00:9::1", there="fd00:9::2")
    for role, connect in away.both_ways():
        async with away.stack() as (stack, seen):
            host = {"host": "::"} if role == "client" else {}
            both = await connect(stack, "smc6", mode=Mode.TCP, **host)
            fallback, info = await away.fell_back(both)
            expect_no_device(fallback, seen)
            if not proposes_smc_d(seen):
                assert info["reason"] == Diagnosis.NO_DEVICE, info
            assert all(m[7] >> 4 == 1 for out, m in seen.clc_messages if out), seen.clc_messages
            world.log(
                f"{role}, IPv6: {fallback.message}; {[m.hex() for _, m in seen.clc_messages]}"
            )


@contextlib.contextmanager
def changed_credentials(first: dict[str, Any], **credentials: Any) -> Iterator[None]:
    """Change fields of our Accepts and Confirms; ``first``: of the first contact extension."""
    honest = Negotiation._credentials

    def lying(self: Negotiation, kind: Any) -> Any:
        output = replace(honest(self, kind), **credentials)
        v2 = output.v2
        return replace(output, v2=replace(v2, first=replace(v2.first, **first)))

    Negotiation._credentials = lying  # type: ignore[method-assign]
    try:
        yield
    finally:
        Negotiation._credentials = honest  # type: ignore[method-assign]


async def kernel_checks(world: World) -> None:
    """The kernel's answer to an Accept or a Confirm of trio_smc that it cannot use."""
    nowhere = ipaddress.ip_address("::ffff:192.0.2.1").packed
    for connect, first, more, code in (
        (world.to_kernel, {"release": 0}, {}, Diagnosis.RELEASE_MISMATCH),
        (world.to_kernel, {"max_connections": 20}, {}, Diagnosis.MAX_CONNECTIONS),
        (world.to_kernel, {"max_links": 1}, {}, Diagnosis.MAX_LINKS),
        (world.from_kernel, {"direct": False}, {}, Diagnosis.ROUTE_MISMATCH),
        (world.from_kernel, {"direct": False}, {"gid": nowhere}, Diagnosis.NO_ROUTE),
    ):
        async with world.stack() as (stack, _):
            with changed_credentials(first, **more):
                both = await connect(stack, mode=Mode.TCP)
            fallback, _ = await world.fell_back(both)
            assert (fallback.origin, fallback.peer_code) == (Origin.PEER, code), fallback
            world.log(f"{first} {list(more)}: {fallback.message}, 0x{code:08x}")
