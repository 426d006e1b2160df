"""Same-host discovery: which listeners a client can reach."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest
import trio

from tests.rendezvous.discovery.world import (
    Pair,
    agree,
    announce,
    bound,
    serving,
    sockets_below,
    start_smc_r,
)
from trio_smc._base.reasons import FallbackReason
from trio_smc.rendezvous.discovery.same_host import Discovery


@pytest.mark.parametrize(
    ("listen", "dual_stack", "connect"),
    [
        ("127.0.0.1", False, "127.0.0.1"),
        ("::1", False, "::1"),
        ("0.0.0.0", False, "127.0.0.1"),
        ("0.0.0.0", False, "127.0.0.9"),
        ("0.0.0.0", False, "0.0.0.0"),
        ("::", False, "::1"),
        ("::", True, "::1"),
        ("::", True, "127.0.0.1"),
    ],
)
async def test_both_ends_agree(listen: str, dual_stack: bool, connect: str, private: Path) -> None:
    async with serving(private, listen, dual_stack=dual_stack) as server:
        assert server.publication.unavailable is None
        for _ in range(3):
            await agree(private, server, (connect, server.address[1]))
    assert list((private / "tcp").iterdir()) == []


async def test_mapped_addresses_are_ipv4(private: Path) -> None:
    async with serving(private) as server:
        port = server.address[1]
        with trio.socket.socket(socket.AF_INET6) as client:
            client.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, False)
            await client.bind(("::ffff:127.0.0.1", 0))
            announcement = await announce(private, client, ("::ffff:127.0.0.1", port))
            await client.connect(("::ffff:127.0.0.1", port))
            connection, claim = await server.accept()
            with connection:
                assert claim is not None
                await start_smc_r(Pair(client, announcement, connection, claim))


async def test_an_ipv6_only_wildcard_does_not_serve_ipv4(private: Path) -> None:
    async with serving(private, "::") as server:
        destination = ("127.0.0.1", server.address[1])
        outcome = Discovery(private).announce(("127.0.0.1", 1), destination)
        assert outcome is FallbackReason.PEER_NOT_CAPABLE


async def test_a_wildcard_listener_does_not_serve_other_hosts(private: Path) -> None:
    async with serving(private, "0.0.0.0") as server:
        destination = ("203.0.113.9", server.address[1])
        outcome = Discovery(private).announce(("192.0.2.1", 1), destination)
        assert outcome is FallbackReason.PEER_NOT_CAPABLE


async def test_no_listener_is_published(private: Path) -> None:
    outcome = Discovery(private).announce(("127.0.0.1", 1), ("127.0.0.1", 2))
    assert outcome is FallbackReason.PEER_NOT_CAPABLE
    assert os.listdir(private.parent) == [], "the client made a directory"


async def test_names_hold_the_network_namespace(private: Path) -> None:
    async with serving(private):
        (found,) = sockets_below(private)
        inode = os.stat("/proc/self/ns/net").st_ino
        assert found.relative_to(private).parts[:2] == ("tcp", str(inode))


async def test_another_network_namespace_does_not_see_our_loopback(private: Path) -> None:
    tried = await trio.run_process(["unshare", "-n", "true"], check=False, capture_stderr=True)
    if tried.returncode != 0:
        pytest.skip("making a network namespace needs privileges")
    code = (
        "import sys, trio\n"
        "from pathlib import Path\n"
        "from trio_smc.rendezvous.discovery.same_host import Announcement, Discovery\n"
        "async def main():\n"
        "    there = ('127.0.0.1', int(sys.argv[2]))\n"
        "    d = Discovery(Path(sys.argv[1]))\n"
        "    said = d.announce(('127.0.0.1', 1), there)\n"
        "    print(said)\n"
        "    if isinstance(said, Announcement): said.close()\n"
        "trio.run(main)\n"
    )
    async with serving(private) as server:
        command = [sys.executable, "-c", code, str(private), str(server.address[1])]
        inside = await trio.run_process(["unshare", "-n", *command], capture_stdout=True)
        assert inside.stdout.decode().strip() == FallbackReason.PEER_NOT_CAPABLE
        outside = await trio.run_process(command, capture_stdout=True)
        assert b"Announcement" in outside.stdout


async def test_a_long_directory(runtime_directory: Path) -> None:
    private = runtime_directory / ("d" * 200) / ("e" * 200)
    private.parent.mkdir()
    async with serving(private) as server:
        await agree(private, server, server.address)


async def test_a_server_does_not_wait_for_an_unannounced_client(private: Path) -> None:
    async with serving(private) as server, bound() as client:
        await client.connect(server.address)
        connection, claim = await server.accept()
        connection.close()
        assert claim is None
