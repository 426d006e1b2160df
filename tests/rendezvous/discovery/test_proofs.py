"""Proofs that an address leads to a listener of another network namespace, message by message.

These tests imitate a second namespace: the client treats the listener's namespace as another one.
`tests/e2e/test_networks.py` uses real namespaces, with bridges and NAT.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import struct
from pathlib import Path

import pytest
import trio

from tests.rendezvous.discovery.world import (
    SHORT,
    Pair,
    bound,
    deadline_after,
    serving,
    short_path,
    sockets_below,
    start_smc_r,
)
from tests.timing import PATIENCE
from trio_smc._base.errors import ProtocolError
from trio_smc._base.reasons import FallbackReason
from trio_smc.host.descriptors import Closer
from trio_smc.rendezvous.discovery import (
    announcing,
    directory,
    messages,
    proofs,
    publication,
)
from trio_smc.rendezvous.discovery.messages import Kind
from trio_smc.rendezvous.discovery.names import Names
from trio_smc.rendezvous.discovery.proofs import reply_name
from trio_smc.rendezvous.discovery.same_host import Announcement, Discovery, Found

HOST = "127.0.0.1"
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def two_namespaces(monkeypatch: Patch) -> None:
    """Let clients treat the listener's namespace as another one, and the directory as a configured
    one."""
    monkeypatch.setattr(directory, "other_namespaces", directory.namespace_paths)
    for module in (directory, announcing):
        monkeypatch.setattr(module, "is_named", lambda path: True)


async def prove(private: Path, port: int) -> Found | FallbackReason:
    """The result for a client that requests a proof."""
    with trio.socket.socket() as client:
        return await Discovery(private).prove(HOST, (HOST, port), client)


async def raw_proof(private: Path, there: str = HOST) -> messages.Message:
    """The message that a client receives after a PROVE."""
    names, token, closer = Names(private), secrets.token_bytes(16), Closer("test")
    (listener,) = sockets_below(private)
    with names.listen(reply_name(token)) as waiting, short_path(listener) as path:
        key = messages.four_tuple((HOST, 0), (there, 0))
        waiting.sendto(messages.prove(key, token), path)
        await trio.lowlevel.wait_readable(waiting)
        answer, _ = messages.receive(waiting, closer)
        names.remove(reply_name(token))
    names.close()
    assert answer is not None
    return answer


async def read_all(port: int, source: str = HOST) -> bytes:
    """The bytes that the listener of a proof sends to a client that connects."""
    with trio.socket.socket() as client:
        await client.bind((source, 0))
        await client.connect((HOST, port))
        got = b""
        while more := await client.recv(100):
            got += more
        return got


async def test_a_client_announces_to_a_proven_listener(private: Path) -> None:
    discovery = Discovery(private)
    async with serving(private) as server, bound() as client:
        found = await discovery.prove(HOST, server.address, client)
        assert isinstance(found, Found)
        source: tuple[str, int] = client.getsockname()[:2]
        announcement = discovery.announce(source, server.address, client, elsewhere=found)
        assert isinstance(announcement, Announcement)
        await client.connect(server.address)
        connection, claim = await server.accept()
        with connection:
            assert claim is not None
            await start_smc_r(Pair(client, announcement, connection, claim))


async def test_a_proven_path_on_which_another_process_accepts(private: Path) -> None:
    """The listener does not answer, and for a minute no connection is announced to it."""
    discovery = Discovery(private)
    async with serving(private) as server, bound() as client:
        found = await discovery.prove(HOST, server.address, client)
        assert isinstance(found, Found)
        source: tuple[str, int] = client.getsockname()[:2]
        announcement = discovery.announce(source, server.address, client, elsewhere=found)
        assert isinstance(announcement, Announcement)
        await client.connect(server.address)
        reason = await announcement.accepted(deadline_after(SHORT))
        assert reason is FallbackReason.PATH_NOT_PROVEN
        again = discovery.announce(source, server.address, client, elsewhere=found)
        assert again is FallbackReason.PATH_NOT_PROVEN
        assert found.until > trio.current_time() + 30


async def test_a_port_without_listener_has_no_proof(private: Path) -> None:
    async with serving(private) as server:
        assert await prove(private, server.address[1] ^ 1) is FallbackReason.PEER_NOT_CAPABLE


async def test_an_address_of_another_host(private: Path) -> None:
    async with serving(private, "0.0.0.0") as server:
        with trio.socket.socket() as client:
            there = ("203.0.113.9", server.address[1])
            found = await Discovery(private).prove("192.0.2.1", there, client)
        assert found is FallbackReason.PATH_NOT_PROVEN


@pytest.mark.parametrize("change", ["nonce", "source", "destination", "short", "silent"])
async def test_a_proof_that_is_not_valid(change: str, private: Path, monkeypatch: Patch) -> None:
    """Another process uses the address, or NAT translates the address."""
    proof = messages.proof

    def other(nonce: bytes, source: tuple[str, int], destination: tuple[str, int]) -> bytes:
        if change == "nonce":
            return proof(bytes(16), source, destination)
        if change == "source":
            return proof(nonce, (source[0], source[1] ^ 1), destination)
        if change == "destination":
            return proof(nonce, source, ("127.0.0.2", destination[1]))
        return proof(nonce, source, destination)[:-1] if change == "short" else b""

    async with serving(private) as server:
        sent = []

        def answer(self: proofs.Probe) -> bool:
            with self.listener.accept()[0] as connection:
                here, there = connection.getsockname(), connection.getpeername()
                sent.append(other(self._nonce, there, here))
                connection.send(sent[-1])
            return True

        monkeypatch.setattr(proofs.Probe, "answer", answer)
        assert await prove(private, server.address[1]) is FallbackReason.PATH_NOT_PROVEN
    assert len(sent) == 1


async def test_a_silent_listener_costs_only_the_timeout(private: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(proofs, "PROOF_PATIENCE", SHORT)
    monkeypatch.setattr(proofs.Probe, "answer", lambda self: False)
    async with serving(private) as server:
        with trio.fail_after(PATIENCE):
            assert await prove(private, server.address[1]) is FallbackReason.PATH_NOT_PROVEN


async def test_another_client_is_sent_nothing(private: Path) -> None:
    """The client connects from another address than the one in its request."""
    async with serving(private):
        answer = await raw_proof(private)
        assert answer.kind is Kind.LISTENING
        assert await read_all(answer.port, "127.0.0.2") == b""
        got = await read_all(answer.port)
        assert got.startswith(answer.nonce)
        assert len(got) == messages.PROOF_SIZE


@pytest.mark.parametrize("comes", [True, False])
async def test_a_probe_listens_until_the_client_has_connected(
    comes: bool, private: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(proofs, "PROBE_TIMEOUT", 2.0 if comes else SHORT)
    async with serving(private) as server:
        answer = await raw_proof(private)
        if comes:
            await read_all(answer.port)
        with trio.fail_after(PATIENCE):
            while server.publication.probes:  # noqa: ASYNC110 - no event to wait for
                await trio.sleep(0.01)
        with pytest.raises(ConnectionRefusedError):
            await read_all(answer.port)


async def test_a_listener_of_another_address(private: Path) -> None:
    """A client requests a proof of an address of this host that has no listener."""
    async with serving(private):
        assert (await raw_proof(private, there="127.0.0.2")).kind is Kind.REFUSED


async def test_no_proof_if_the_server_lacks_descriptors(private: Path, monkeypatch: Patch) -> None:
    def full(self: proofs.Probe) -> bool:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(proofs.Probe, "answer", full)
    async with serving(private) as server:
        with trio.fail_after(PATIENCE):
            assert await prove(private, server.address[1]) is FallbackReason.PATH_NOT_PROVEN
        assert not server.publication.probes


def test_a_client_that_leaves_early_does_not_block_the_probe() -> None:
    probe = proofs.Probe(messages.four_tuple((HOST, 0), (HOST, 0)), 0)
    with probe.listener:
        assert not probe.answer()


async def test_the_number_of_probes_is_limited(private: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(publication, "MAX_PROBES", 1)
    async with serving(private):
        answer = await raw_proof(private)
        refused = await raw_proof(private)
        assert (answer.kind, refused.kind) == (Kind.LISTENING, Kind.REFUSED)


async def test_a_directory_at_a_default_place_proves_nothing(
    private: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(directory, "is_named", lambda path: False)
    async with serving(private):
        assert (await raw_proof(private)).kind is Kind.REFUSED


async def test_a_socket_with_another_route_is_not_proven(private: Path) -> None:
    """The packets of the socket may take another route than those of a proof."""
    async with serving(private) as server:
        with trio.socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
            found = await Discovery(private).prove(HOST, server.address, client)
        assert found is FallbackReason.PATH_NOT_PROVEN


async def test_a_proven_path_is_not_probed_again(private: Path, monkeypatch: Patch) -> None:
    probes = 0
    real = proofs.Probe.answer

    def count(self: proofs.Probe) -> bool:
        nonlocal probes
        probes += 1
        return real(self)

    monkeypatch.setattr(proofs.Probe, "answer", count)
    monkeypatch.setattr(directory.Stamps, "settled", lambda self: True)
    discovery = Discovery(private)
    async with serving(private) as server, bound() as client:
        first = await discovery.prove(HOST, server.address, client)
        assert await discovery.prove(HOST, server.address, client) is first
        assert probes == 1
        assert isinstance(first, Found)
        first.disprove(trio.current_time())
        assert await discovery.prove(HOST, server.address, client) is FallbackReason.PATH_NOT_PROVEN
    assert probes == 1


def test_the_layout_of_messages() -> None:
    key = messages.four_tuple(("192.0.2.1", 0), ("2001:db8::1", 0))
    assert messages.parties(key) == ("192.0.2.1", "2001:db8::1")
    name = bytes(range(16))
    request = messages.decode_untrusted(messages.prove(key, name))
    assert (request.kind, request.connection, request.name) == (Kind.PROVE, key, name)
    packed = messages.listening(key, 0x1234, bytes(range(16)))
    head = struct.pack(">4sBBBB", b"TSMC", 5, 5, 7, 0)
    assert packed == head + key + b"\x12\x34" + bytes(range(16))
    answer = messages.decode_untrusted(packed)
    assert (answer.port, answer.nonce) == (0x1234, bytes(range(16)))
    with pytest.raises(ProtocolError):
        messages.decode_untrusted(packed[:-1])
