"""Another process sends descriptors over every Unix socket of a stack: nothing waits for them."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

import trio_smc
from tests.api.api_peers import QUICK
from tests.lingering import AT_ONCE, full_table, give_away, join_closers, lingering
from tests.peers import active_links, check_echo, echo_until_reset
from tests.rendezvous.discovery.world import short_path
from tests.timing import PATIENCE
from trio_smc import SmcStream, Stack
from trio_smc.control import protocol as control
from trio_smc.host import descriptors
from trio_smc.rendezvous.discovery import directory, messages, names
from trio_smc.rendezvous.links import link_demand
from trio_smc.rnic.soft.device import SoftRnic
from trio_smc.rnic.soft.messages import VERSION
from trio_smc.rnic.soft.peer_sockets import Peer
from trio_smc.rnic.soft.regions import PeerRegions
from trio_smc.tools import client
from trio_smc.tools.output import ToolError

pytestmark = pytest.mark.pure

REQUEST = control.encode({"want": ["statistics"]})
DENIAL = messages.not_mine(bytes(8))


@pytest.fixture(params=["refused", "dropped"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernel refuses descriptors, as from Linux 6.16 on, or takes them."""
    way: str = request.param
    monkeypatch.setattr(descriptors, "kernel_refuses", None)
    if way == "dropped":
        monkeypatch.setattr(descriptors, "SO_PASSRIGHTS", 0x7FFF)
    else:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            if not descriptors.refuse_descriptors(sock):
                pytest.skip("before Linux 6.16 the kernel refuses no descriptors")
    return way


@contextlib.asynccontextmanager
async def connected(path: Path) -> AsyncIterator[tuple[Stack, SmcStream, int]]:
    """A client's stack, its connection to an echo server of another stack, and the port."""
    config = replace(QUICK, directory=path)
    async with (
        trio_smc.open_stack(config) as server,
        trio_smc.open_stack(config) as clients,
        trio.open_nursery() as nursery,
    ):
        listeners: Any = await nursery.start(server.serve, echo_until_reset, 0)
        port = listeners[0].socket.getsockname()[1]
        stream = await clients.open_stream("127.0.0.1", port)
        assert stream.mode == "smc-r"
        await check_echo(stream)
        yield clients, stream, port
        await stream.aclose()
        nursery.cancel_scope.cancel()


MODES = {
    "control": socket.SOCK_STREAM,
    "rnic": socket.SOCK_SEQPACKET,
    "discovery": socket.SOCK_DGRAM,
    "signpost": socket.SOCK_SEQPACKET,
}


def sockets(path: Path) -> Iterator[tuple[str, socket.socket]]:
    """A connection to each Unix socket below the directory, and what kind that is."""
    for root, _, files in os.walk(path):
        for name in files:
            if name.endswith(".older"):
                kind = "signpost"
            else:
                kind = "control" if "control" in root else "rnic" if "rnic" in name else "discovery"
            sock = socket.socket(socket.AF_UNIX, MODES[kind])
            try:
                sock.connect(f"{root}/{name}")
                yield kind, sock
            finally:
                sock.close()


async def longest_pause(turns: int = 10) -> float:
    """How long the loop stood still at most, in seconds.

    Descriptors that have arrived are taken in the first turns.
    """
    longest = 0.0
    for _ in range(turns):
        before = trio.current_time()
        await trio.sleep(0.01)
        longest = max(longest, trio.current_time() - before)
    return longest


@pytest.mark.parametrize("when", ["first", "after a message", "253", "unread"])
async def test_all_sockets(runtime_directory: Path, way: str, when: str) -> None:
    proper = {"control": REQUEST[:6], "discovery": DENIAL, "rnic": b"", "signpost": b""}
    reached = []
    async with connected(runtime_directory / "d") as (_, stream, _):
        for kind, sock in sockets(runtime_directory / "d"):
            with lingering() as fd:
                if when == "after a message" and proper[kind]:
                    sock.send(proper[kind])
                    assert await longest_pause(5) < AT_ONCE
                taken = give_away(sock, b"x" * 40, fd, 253 if when == "253" else 1)
                assert taken is (kind == "rnic" or way == "dropped")
                if when == "unread":
                    sock.close()
                assert await longest_pause() < AT_ONCE
                reached.append(kind)
            await check_echo(stream)
    assert set(reached) == {"control", "discovery", "rnic", "signpost"}


async def test_waiting_in_a_backlog_when_the_stack_is_closed(
    runtime_directory: Path, way: str
) -> None:
    with contextlib.ExitStack() as exits:
        fds = [exits.enter_context(lingering()) for _ in range(8)]
        async with connected(runtime_directory / "d"):
            for _, sock in sockets(runtime_directory / "d"):
                kept = sock.dup()
                exits.callback(kept.close)
                give_away(kept, b"x", fds.pop())
            began = trio.current_time()
        assert trio.current_time() - began < AT_ONCE + QUICK.close_timeout
        for fd in fds:
            os.close(fd)
    join_closers()


@pytest.mark.parametrize("before", [b"", control.encode({"part": "process", "data": {}})[:7]])
async def test_descriptors_of_a_queried_process(
    runtime_directory: Path, way: str, before: bytes
) -> None:
    """The command `trio-smc` reports it, and does not wait for it."""
    directory = runtime_directory / "d"
    (directory / "control").mkdir(parents=True, mode=0o700)
    directory.chmod(0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, lingering() as fd:
        listener.bind(str(directory / "control" / f"{os.getpid()}-{'0' * 16}"))
        listener.listen()
        outcome: list[BaseException] = []

        def query() -> None:
            try:
                client.take_snapshots(directory, ["statistics"])
            except ToolError as error:
                outcome.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, query)
            await trio.lowlevel.wait_readable(listener)
            sock, _ = listener.accept()
            if before:
                sock.send(before)
            taken = give_away(sock, b"x" * 40, fd)
            assert taken is (way == "dropped")
            began = trio.current_time()
            if not taken:
                sock.close()
        assert trio.current_time() - began < AT_ONCE
        sock.close()
        assert len(outcome) == 1
    os.unlink(directory / "control" / f"{os.getpid()}-{'0' * 16}")


async def test_of_a_process_that_answers(runtime_directory: Path, way: str) -> None:
    """An answer to an announcement with a descriptor is not one."""
    path = runtime_directory / "d"
    async with connected(path) as (clients, stream, _):
        with socket.create_server(("127.0.0.1", 0)) as plain, lingering() as fd:
            port = plain.getsockname()[1]
            made = directory.NewSocket(path, f"4-127.0.0.1-{port}")
            results: list[SmcStream] = []

            async def dial() -> None:
                results.append(await clients.open_stream("127.0.0.1", port))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(dial)
                await trio.lowlevel.wait_readable(plain)
                (name,) = (path / names.KIND).iterdir()
                with (
                    short_path(name) as address,
                    socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as raw,
                ):
                    raw.connect(address)
                    taken = give_away(raw, messages.accepted(bytes(8), VERSION), fd)
                    assert taken is (way == "dropped")
                    assert await longest_pause() < AT_ONCE
                accepted, _ = plain.accept()
                accepted.send(b"220 ready")
            assert results[0].mode == "tcp"
            assert await results[0].receive_some() == b"220 ready"
            await results[0].aclose()
            accepted.close()
            made.remove()
            made.socket.close()
        await check_echo(stream)
    join_closers()


@pytest.mark.parametrize("room", [0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16])
async def test_a_full_table_of_descriptors_costs_no_connection(
    runtime_directory: Path, room: int
) -> None:
    """New connections fail or are TCP; those that are open go on, and later ones are SMC-R."""
    async with connected(runtime_directory / "d") as (clients, stream, port):
        with full_table(room):
            for size in (16384, 65536, 262144):
                config = replace(QUICK, receive_buffer=size)
                opened: list[SmcStream] = []
                with trio.move_on_after(1), contextlib.suppress(OSError):
                    opened.append(await clients.open_stream("127.0.0.1", port, config=config))
                await check_echo(stream)
                for each in opened:
                    each.abort()
        await check_echo(stream)
        with trio.fail_after(PATIENCE):
            while True:
                late = await clients.open_stream("127.0.0.1", port)
                mode = late.mode
                await check_echo(late)
                await late.aclose()
                if mode == "smc-r":
                    break
                await trio.sleep(0.1)  # what could not be announced is looked for again


@pytest.mark.parametrize("room", [0, 2, 4, 8])
async def test_a_failover_needs_no_descriptors(runtime_directory: Path, room: int) -> None:
    config = replace(QUICK, directory=runtime_directory / "d")
    rnics = tuple(SoftRnic(f"soft{number}") for number in range(4))
    ours, theirs = replace(config, rnics=rnics[:2]), replace(config, rnics=rnics[2:])
    async with (
        trio_smc.open_stack(ours) as server,
        trio_smc.open_stack(theirs) as clients,
        trio.open_nursery() as nursery,
    ):
        listeners: Any = await nursery.start(server.serve, echo_until_reset, 0)
        port = listeners[0].socket.getsockname()[1]
        stream = await clients.open_stream("127.0.0.1", port)
        await has_two_links(clients, stream)
        with full_table(room):
            rnics[0].fail()
            for _ in range(5):
                await check_echo(stream)
            rnics[0].restore()
            for _ in range(5):
                await check_echo(stream)
                await trio.sleep(0.05)
        await has_two_links(clients, stream)
        await stream.aclose()
        nursery.cancel_scope.cancel()


async def has_two_links(clients: Stack, stream: SmcStream) -> None:
    """Echo until the link group has two links that both carry data."""
    with trio.fail_after(PATIENCE):
        while True:
            await check_echo(stream)
            if active_links(clients.link_groups[0]) == 2:
                return
            await trio.sleep(0.02)


class Lack:
    """Some RNICs cannot map their peers' memory, as where RLIMIT_AS is reached.

    Attributes:
      lasts: False: they can again.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *rnics: SoftRnic, rings: bool) -> None:
        self.lasts = True
        self._rnics = rnics
        self._rings = rings
        self._regions: list[PeerRegions] = []
        self._map = Peer.map_untrusted
        self._add = PeerRegions.add_untrusted
        monkeypatch.setattr(Peer, "map_untrusted", self._map_peer)

        def add_untrusted(regions: PeerRegions, *arguments: Any) -> None:
            self._add_region(regions, *arguments)

        monkeypatch.setattr(PeerRegions, "add_untrusted", add_untrusted)

    def _map_peer(self, rnic: Any, *arguments: Any) -> Peer:
        if rnic in self._rnics and self._rings:
            self._refuse()
        peer = self._map(rnic, *arguments)
        if rnic in self._rnics:
            self._regions.append(peer.regions)
        return peer

    def _add_region(self, regions: PeerRegions, *arguments: Any) -> None:
        if any(regions is each for each in self._regions):
            self._refuse()
        self._add(regions, *arguments)

    def _refuse(self) -> None:
        if self.lasts:
            raise OSError(errno.ENOMEM, "injected")


@pytest.mark.parametrize("rings", [False, True], ids=["RMBs", "rings"])
@pytest.mark.parametrize("limited", [0, 1], ids=["server", "client"])
async def test_a_first_contact_without_memory_for_the_peers_is_tcp(
    runtime_directory: Path, monkeypatch: pytest.MonkeyPatch, limited: int, rings: bool
) -> None:
    """The memory may be missing for as long as the process lives."""
    config = replace(QUICK, directory=runtime_directory / "d")
    rnics = SoftRnic("soft0"), SoftRnic("soft1")
    lack = Lack(monkeypatch, rnics[limited], rings=rings)
    async with (
        trio_smc.open_stack(replace(config, rnics=rnics[:1])) as server,
        trio_smc.open_stack(replace(config, rnics=rnics[1:])) as clients,
        trio.open_nursery() as nursery,
    ):
        listeners: Any = await nursery.start(server.serve, echo_until_reset, 0)
        port = listeners[0].socket.getsockname()[1]
        for mode in ("tcp", "tcp", "smc-r"):
            lack.lasts = mode == "tcp"
            with trio.fail_after(PATIENCE):
                stream = await clients.open_stream("127.0.0.1", port)
                await check_echo(stream)
            assert stream.mode == mode
            if stream.fallback is not None:
                assert stream.fallback.reason == "out-of-resources"
            await stream.aclose()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("limited", [1, 3], ids=["server", "client"])
async def test_a_link_without_memory_for_the_peers_is_added_later(
    runtime_directory: Path, monkeypatch: pytest.MonkeyPatch, limited: int
) -> None:
    """Until then no connection is moved to it, where its writes would wait."""
    monkeypatch.setattr(link_demand, "FIRST_RETRY", 0.5)
    config = replace(QUICK, directory=runtime_directory / "d")
    rnics = tuple(SoftRnic(f"soft{number}") for number in range(4))
    lack = Lack(monkeypatch, rnics[limited], rings=False)
    async with (
        trio_smc.open_stack(replace(config, rnics=rnics[:2])) as server,
        trio_smc.open_stack(replace(config, rnics=rnics[2:])) as clients,
        trio.open_nursery() as nursery,
    ):
        listeners: Any = await nursery.start(server.serve, echo_until_reset, 0)
        port = listeners[0].socket.getsockname()[1]
        stream = await clients.open_stream("127.0.0.1", port)
        with trio.move_on_after(1):
            while True:
                await check_echo(stream)
                assert active_links(clients.link_groups[0]) == 1
                await trio.sleep(0.01)
        lack.lasts = False
        await has_two_links(clients, stream)
        await stream.aclose()
        nursery.cancel_scope.cancel()
