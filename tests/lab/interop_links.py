"""Steps with the kernel as peer: link groups over two RoCE devices, and the loss of a device."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import trio

from tests.lab.interop_streams import MIB, file_digest, transfer
from tests.lab.interop_world import Both, Seen, World, until
from tests.lab.routing import second_interface
from tests.timing import PATIENCE
from trio_smc import LinkGroupKind, SmcStream, VerbsRnic

__all__ = ["asymmetric", "big_file", "link_down", "survive", "symmetric", "test_link"]

BIG = 64 * MIB
FEW = 16 * MIB
ADD_LINK, DELETE_LINK, TEST_LINK = 2, 4, 7
UNDO = "rdma link delete rxe1; ip link delete mac0"
THIRD = "rxe 1 eth1"


def two() -> dict[str, Any]:
    """Settings with both RNICs of trio_smc in one network."""
    return {
        "rnics": (VerbsRnic("rxe0"), VerbsRnic("rxe1")),
        "pnet": (("eth0", "rxe0"), ("eth0", "rxe1")),
    }


async def here(command: str) -> None:
    await trio.run_process(["bash", "-c", command])


async def asymmetric(world: World) -> None:
    """One side has two RNICs, the other one has one: first the kernel has two, then trio_smc."""
    await world.kernel.call("shell", command=second_interface(12))
    try:
        for role, connect in world.both_ways():
            async with world.stack() as (stack, _):
                both = await connect(stack)
                await expect_kind(world, both, LinkGroupKind.ASYMMETRIC)
                await both.end()
                world.log(f"{role}: asymmetric, two RNICs at the kernel")
    finally:
        await world.kernel.call("shell", command=UNDO)
    await here(second_interface(11))
    try:
        for role, connect in world.both_ways():
            async with world.stack(**two()) as (stack, _):
                both = await connect(stack)
                await expect_kind(world, both, LinkGroupKind.ASYMMETRIC)
                await both.end()
                world.log(f"{role}: asymmetric, two RNICs of ours")
    finally:
        await here(UNDO)


async def expect_kind(world: World, both: Both, kind: LinkGroupKind) -> None:
    await both.confirm()
    group = both.stream.link_group
    assert group is not None
    await until(lambda: group.kind is kind and all_active(both.stream), f"{kind}, not {group!r}")
    links = await newest_links(world)
    assert len(links) == 2, links
    wanted = {LinkGroupKind.SYMMETRIC: {2}, LinkGroupKind.ASYMMETRIC: {3, 4}}[kind]
    assert {link["type"] for link in links} <= wanted, links


async def newest_links(world: World) -> list[dict[str, Any]]:
    """The links of the kernel's newest group; older ones may be waiting for their end."""
    links: list[dict[str, Any]] = await world.kernel.call("links")
    newest = max(link["group"] for link in links)
    return [link for link in links if link["group"] == newest]


def all_active(stream: SmcStream) -> bool:
    assert stream.link_group is not None
    return all(link.state == "ACTIVE" for link in stream.link_group.links)


async def symmetric(world: World) -> None:
    """Two RNICs at both ends: ADD LINK, CONTINUATION and CONFIRM LINK in both roles."""
    await world.kernel.call("shell", command=THIRD)
    await here(THIRD)
    for role, connect in world.both_ways():
        async with world.stack(**two()) as (stack, seen):
            both = await connect(stack)
            await expect_kind(world, both, LinkGroupKind.SYMMETRIC)
            # The server offers a link, and the client accepts it in a reply.
            offers = [m for _, _, m in seen.llc_messages if m[0] == ADD_LINK and not m[3] & 0x80]
            answers = [m for _, _, m in seen.llc_messages if m[0] == ADD_LINK and m[3] & 0x80]
            assert offers, seen.llc_messages
            assert any(not m[3] & 0x40 for m in answers), answers
            assert 3 in seen.types(True) & seen.types(False), "CONTINUATION both ways"
            again = await connect(stack)
            await again.confirm()
            wanted = file_digest(world, MIB)
            for each in (both, again):
                await transfer(each, world, MIB, wanted)
                await each.end()
            world.log(f"{role}: symmetric; LLC types {sorted(seen.types(True))} sent")


async def test_link(world: World) -> None:
    """Each side tests idle links, and the other answers.

    One after the other: a link that one side tests is not idle to the other.
    """
    sysctl = "sysctl -w net.smc.smcr_testlink_time={}"
    for ours in (False, True):
        await world.kernel.call("shell", command=sysctl.format(30 if ours else 1))
        for _, connect in world.both_ways():
            async with world.stack(test_link_interval=0.5 if ours else 30, **two()) as (
                stack,
                seen,
            ):
                both = await connect(stack)
                await expect_kind(world, both, LinkGroupKind.SYMMETRIC)
                for outgoing, replies in ((ours, False), (not ours, True)):
                    await until(
                        partial(_tested, seen, outgoing, replies),
                        f"TEST LINK, outgoing {outgoing}, reply {replies}",
                    )
                assert all_active(both.stream)
                await both.end()


def _tested(seen: Seen, outgoing: bool, replies: bool) -> bool:
    return TEST_LINK in seen.types(outgoing, replies=replies)


@contextlib.asynccontextmanager
async def interface_down(world: World, both: Both, *, ours: bool) -> AsyncIterator[str]:
    """Take down the interface that carries the connection, on one side; up again at the end."""
    if ours:
        assert both.stream.link_group is not None
        [link] = [each for each in both.stream.link_group.links if each.connections]
        device = link.rnic.name
    else:
        links = await newest_links(world)
        [device] = [each["device"] for each in links if each["connections"]]
    number = device.removeprefix("rxe")
    interface = f"eth{number}"

    async def do(command: str) -> None:
        if ours:
            await here(command)
        else:
            await world.kernel.call("shell", command=command)

    await do(f"cable {number} off; ip link set {interface} down")
    try:
        yield interface
    finally:
        with trio.CancelScope(shield=True), trio.move_on_after(PATIENCE):
            await do(f"ip link set {interface} up; cable {number} on")


async def link_down(world: World, size: int = FEW) -> None:
    """The interface that carries a stream goes down in the middle of it, on either side."""
    wanted = file_digest(world, size)
    for ours in (False, True):
        for role, connect in world.both_ways():
            if ours or role == "server":  # `big_file` is the fourth
                await survive(world, connect, size, wanted, role, ours=ours)


@contextlib.asynccontextmanager
async def impatient_kernel(world: World) -> AsyncIterator[None]:
    """New links of the kernel fail without an answer for a second, as those of adapters do.

    Else soft-RoCE repeats its sends for ever, and the kernel's server, which waits for the end of
    its sends on a link that the client has lost, changes nothing in the group any more.
    """
    switch = "echo {} > /sys/module/smc/parameters/lab_retries"
    await world.kernel.call("shell", command=switch.format(6))
    try:
        yield
    finally:
        with trio.CancelScope(shield=True), trio.move_on_after(PATIENCE):
            await world.kernel.call("shell", command=switch.format(0))


async def survive(
    world: World,
    connect: Any,
    size: int,
    wanted: str,
    role: str,
    *,
    ours: bool,
    stock: bool = False,
) -> None:
    """The file in both directions at once; in the middle one side's interface is down for a while.

    Afterwards the group is symmetric again, although one try may come just when the interface does,
    before the addresses are known again, and the kernel makes only one.  The ``stock`` module,
    which is for version 2, has no other number of retries: as server it may stay as it is.
    """
    patient = ours and role == "client"
    mark = 0x20 if stock else 0
    async with contextlib.AsyncExitStack() as ending:
        if patient and not stock:
            await ending.enter_async_context(impatient_kernel(world))
        stack, seen = await ending.enter_async_context(world.stack(**two()))
        both = await connect(stack)
        await expect_kind(world, both, LinkGroupKind.SYMMETRIC)
        group = both.stream.link_group
        start = trio.current_time()
        async with contextlib.AsyncExitStack() as down:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(transfer, both, world, size, wanted)
                received = both.stream.statistics
                await until(lambda: received().bytes_received > size // 2, "the middle", 300)
                interface = await down.enter_async_context(interface_down(world, both, ours=ours))
            assert group.kind is not LinkGroupKind.SYMMETRIC, group
            if role == "client" and not ours and not stock:
                # If the kernel has offered a new link while the interface was down, trio_smc
                # requests one ten seconds later. When the interface is up again, the kernel may be
                # quicker.
                await until(lambda: has_request(seen), "the link that failed is asked for")
        took = trio.current_time() - start
        assert mark | DELETE_LINK in seen.types(True) | seen.types(False)
        whole = f"the group is {group.kind}"
        if not (patient and stock):
            start = trio.current_time()
            await until(lambda: group.kind is LinkGroupKind.SYMMETRIC, f"whole again: {group!r}")
            await expect_kind(world, both, LinkGroupKind.SYMMETRIC)
            whole = f"symmetric again {trio.current_time() - start:.1f} s after it is back"
        await both.end()
        side = "our" if ours else "the kernel's"
        world.log(
            f"{role}: {size >> 20} MiB each way with {side} {interface} down in the middle in "
            f"{took:.1f} s, SHA-256 right; {whole}"
        )


def has_request(seen: Any) -> bool:
    """True if this side has rejected an ADD LINK, and has requested one itself (3.5.5.1.2)."""
    sent = [m for _, outgoing, m in seen.llc_messages if outgoing and m[0] == ADD_LINK]
    return any(m[3] & 0x40 for m in sent) and any(not m[3] & 0x80 for m in sent)


async def big_file(world: World) -> None:
    """A quarter of the file of ``make demo`` both ways, and a link fails in the middle.

    In version 2 the whole file is sent so.
    """
    await survive(world, world.to_kernel, BIG, file_digest(world, BIG), "client", ours=False)
