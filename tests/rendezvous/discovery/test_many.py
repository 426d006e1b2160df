"""Same-host discovery: many connections at a time, forks, and full descriptor tables."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import struct
import time
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.lingering import full_table
from tests.rendezvous.discovery.world import (
    Pair,
    Server,
    agree,
    announce,
    bound,
    deadline_after,
    names_below,
    serving,
    start_smc_r,
)
from tests.timing import PATIENCE
from trio_smc._base.reasons import FallbackReason
from trio_smc.rendezvous.discovery import announcing, directory
from trio_smc.rendezvous.discovery.names import Names
from trio_smc.rendezvous.discovery.publication import Answerer
from trio_smc.rendezvous.discovery.same_host import Announcement, Claim, Discovery, Publication
from trio_smc.rnic.spinner import NEVER

COUNT = 600
HOST = "127.0.0.1"


async def test_many_connections_at_once(private: Path) -> None:
    results: list[bool] = []

    async def serve(server: Server, nursery: trio.Nursery) -> None:
        for _ in range(COUNT):
            connection, claim = await server.accept()
            assert claim is not None
            nursery.start_soon(confirm, connection, claim)

    async def confirm(connection: trio.socket.SocketType, claim: Claim) -> None:
        with connection:
            results.append(await claim.confirm(connection, deadline_after()))

    discovery = Discovery(private)

    async def call(server: Server) -> None:
        async with bound() as client:
            # The last connection may wait for more than a second.
            calling = announce(discovery, client, server.address, required=True)
            with await calling as announcement:
                await client.connect(server.address)
                results.append(await announcement.accepted(deadline_after()) is None)
                await client.send(b"C")
                with contextlib.suppress(ConnectionResetError):
                    await client.recv(1)

    async with serving(private) as server, trio.open_nursery() as nursery:
        nursery.start_soon(serve, server, nursery)
        for _ in range(COUNT):
            nursery.start_soon(call, server)
    assert results == [True] * (2 * COUNT)
    assert names_below(private) == []


async def test_races_of_giving_up(private: Path, seed: int, full: bool) -> None:
    """A client withdraws while a server, in another process, answers: both come to the same
    result."""
    rounds, there = 20_000 if full else 500, ("127.0.0.1", 9)
    step = struct.Struct("Q")
    # Two counters, of announced and of answered connections; and the results of the server.
    shared, verdicts = mmap.mmap(-1, 16), mmap.mmap(-1, rounds)
    made = directory.NewSocket(private, directory.listener_name(*there, dual_stack=False))
    names = Names(private)
    names.open()
    publication = Publication(there, made, None, Answerer(names, None, NEVER, False))
    discovery = Discovery(private)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            rng = random.Random(seed + 1)
            for number in range(rounds):
                while step.unpack_from(shared, 0)[0] <= number and os.getppid() == parent:
                    os.sched_yield()
                for _ in range(rng.randrange(600)):
                    pass
                claim = publication.claim(there, ("127.0.0.1", number + 1))
                verdicts[number] = claim is not None and claim.accept()
                if claim is not None:
                    claim.forget()
                step.pack_into(shared, 8, number + 1)
        os._exit(0)
    rng = random.Random(seed)
    agreed = smc = 0
    pause = 300.0
    for number in range(rounds):
        announcement = discovery.announce(("127.0.0.1", number + 1), there)
        assert isinstance(announcement, Announcement)
        step.pack_into(shared, 0, number + 1)
        for _ in range(int(pause * rng.random())):
            pass
        ours = announcement.withdraw()
        # Approach the moment of the answer, so that each side wins about half of the rounds.
        pause = max(10.0, pause * (0.95 if ours else 1.05))
        while step.unpack_from(shared, 8)[0] <= number:
            os.sched_yield()
        agreed += ours == bool(verdicts[number])
        smc += ours
    assert os.waitpid(child, 0)[1] == 0  # noqa: ASYNC222 - it has ended
    assert agreed == rounds, f"seed {seed}: {agreed} of {rounds} agreed"
    assert rounds // 20 < smc < rounds - rounds // 20, "one side was nearly always faster"
    names.close()
    made.remove()
    made.socket.close()


def left_in_a_child(made: list[Discovery], descriptors: list[int]) -> int:
    """Fork; the child abandons ``made``.  Returns how many of the descriptors stay open in it."""
    child = os.fork()
    if child == 0:
        left = 99
        with contextlib.suppress(BaseException):
            for each in made:
                each.abandon()
            left = sum(os.path.exists(f"/proc/self/fd/{each}") for each in descriptors)
        os._exit(left)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def open_descriptors() -> set[int]:
    """The numbers of all descriptors of this process."""
    listed = os.listdir("/proc/self/fd")
    # `listdir` has closed its own descriptor, which is in the list.
    return {int(each) for each in listed if os.path.exists(f"/proc/self/fd/{each}")}


async def test_a_forked_child_abandons_discovery_and_its_parent_continues(private: Path) -> None:
    discovery = Discovery(private)
    async with trio.open_nursery() as nursery, serving(private) as server:
        before = open_descriptors()
        await agree(discovery, server, server.address)
        publishing = Discovery(private)
        publication = publishing.publish(("127.0.0.1", 9), nursery)
        await trio.testing.wait_all_tasks_blocked()
        async with bound() as client:
            tcp = {client.fileno()}
            with await announce(discovery, client, server.address) as announcement:
                held = sorted(open_descriptors() - before - tcp)
                # Those of the listener, of its directory, and of announcements.
                assert len(held) >= 5
                assert left_in_a_child([discovery, publishing], held) == 0
                await client.connect(server.address)
                connection, claim = await server.accept()
                with connection:
                    assert claim is not None
                    await start_smc_r(Pair(client, announcement, connection, claim))
        await agree(discovery, server, server.address)
        publication.close()


async def test_a_cached_listener_that_has_ended_is_noticed(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client notices the end of a server when no answer comes, and finds the next server."""
    ended: list[bool] = []
    discovery = Discovery(private, None, ended=lambda: ended.append(True))
    async with serving(private) as server:
        await agree(discovery, server, server.address)
        assert not discovery.has_ended(HOST, server.address)
        port = server.address[1]
        server.publication.close()
        async with bound() as client:
            announcement = await announce(discovery, client, server.address)
            await client.connect(server.address)
            with trio.fail_after(PATIENCE):
                reason = await announcement.accepted(deadline_after())
            assert reason is FallbackReason.PEER_NOT_CAPABLE
            assert ended == [True]
            assert discovery.announce(("127.0.0.1", 1), server.address) is reason
    async with serving(private, port=port) as server:
        with trio.fail_after(PATIENCE):
            while True:
                found = discovery.announce(("127.0.0.1", 1), server.address)
                if isinstance(found, Announcement):
                    break
                await trio.sleep(0.01)
        found.close()


async def test_an_ended_listener_is_known_without_a_request(private: Path) -> None:
    discovery = Discovery(private)
    async with serving(private) as server:
        await agree(discovery, server, server.address)
        server.publication.close()
        assert discovery.has_ended(HOST, server.address)
        assert not discovery.has_ended(HOST, server.address), "nothing is known any more"


async def test_a_full_table_does_not_hide_a_listener(private: Path) -> None:
    """If a connection cannot be announced for lack of descriptors, the next one can."""
    async with serving(private) as server:
        discovery = Discovery(private)
        await trio.sleep(0.15)  # until the time stamps of directories change
        reasons = []
        for room in range(1, 6):
            with full_table(room):
                found = discovery.announce(("127.0.0.1", 9), server.address)
                reasons.append(found)
                if isinstance(found, Announcement):
                    found.close()
        assert FallbackReason.OUT_OF_RESOURCES in reasons
        assert FallbackReason.PEER_NOT_CAPABLE not in reasons
        found = discovery.announce(("127.0.0.1", 9), server.address)
        assert isinstance(found, Announcement)
        found.close()


@pytest.mark.parametrize("first", [0.001, 0.05])
async def test_a_wait_makes_few_checks(
    first: float, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcing, "FIRST_CHECK", first)
    checks = 0
    real = announcing.Announcer.has_listener

    def count(self: announcing.Announcer, *args: object) -> bool:
        nonlocal checks
        checks += 1
        return real(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(announcing.Announcer, "has_listener", count)
    async with serving(private) as server, bound() as client:
        announcement = await announce(private, client, server.address)
        await client.connect(server.address)
        reason = await announcement.accepted(deadline_after(1))
        assert reason is FallbackReason.PEER_NOT_CAPABLE
    assert 2 <= checks <= 12


async def test_a_process_that_was_held_up_waits_before_its_first_check(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check takes time: it reads directories, and lists the kernel's connections.  If this
    process has not run, the server's answer may come very soon without a check."""
    checks: list[object] = []

    def has_listener(_: announcing.Announcer, announcement: Announcement) -> bool:
        checks.append(announcement)
        return True

    monkeypatch.setattr(announcing.Announcer, "has_listener", has_listener)
    hold_up, reasons = time.sleep, list[FallbackReason | None]()
    async with serving(private) as server, bound() as client:
        announcement = await announce(private, client, server.address)
        await client.connect(server.address)
        with announcement:
            async with trio.open_nursery() as nursery:

                async def wait() -> None:
                    reasons.append(await announcement.accepted(deadline_after()))

                nursery.start_soon(wait)
                await trio.testing.wait_all_tasks_blocked()
                hold_up(3 * announcing.FIRST_CHECK)  # no task of this process runs
                connection, claim = await server.accept()
                assert claim is not None
                claim.accept()
        connection.close()
    assert reasons == [None]
    assert not checks
