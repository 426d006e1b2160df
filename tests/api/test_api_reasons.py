"""Every reason for a fallback: the cause of the reason, and its text."""

from __future__ import annotations

import errno
import importlib
import re
from collections.abc import Callable

import pytest
import trio

import trio_smc
from tests.api.api_peers import (
    ASSUME,
    HOST,
    QUICK,
    accept,
    address_of,
    check_serves,
    close_all,
    connect,
    decline,
    open_to,
    plain_client,
    plain_server,
    proposal,
    read_clc,
    read_exactly,
    wait_until_freed,
)
from tests.timing import PATIENCE
from trio_smc import Config, Fallback, FallbackReason, Mode, Origin, SoftRnic
from trio_smc._base.reasons import Diagnosis
from trio_smc.rendezvous.discovery import announcing as _announcing
from trio_smc.rendezvous.discovery import messages as _local_protocol
from trio_smc.rendezvous.discovery import publication as _claims
from trio_smc.wire import clc

Reason = FallbackReason
LOCAL, PEER = Origin.LOCAL, Origin.PEER


# --- texts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", Reason)
def test_each_reason_has_texts(reason: Reason) -> None:
    fallback = Fallback.local(reason)
    for text in (fallback.message, fallback.remedy):
        assert re.fullmatch(r"(?!\s).{15,120}[^.!\s]", text), text
    assert fallback.message != fallback.remedy
    assert fallback.code in [*Diagnosis]
    assert (fallback.origin, fallback.peer_code) == (LOCAL, None)
    assert re.fullmatch("[a-z]+(-[a-z]+)*", reason)
    assert reason.name.lower().replace("_", "-") == reason.value


def test_messages_differ() -> None:
    assert len({Fallback.local(reason).message for reason in Reason}) == len(Reason)
    assert len({Fallback.local(reason).remedy for reason in Reason}) == len(Reason)


def test_messages_of_a_peers_decline() -> None:
    fallback = Fallback.from_peer(0x12345678)
    assert fallback.reason is Reason.DECLINED
    assert (fallback.origin, fallback.code, fallback.peer_code) == (PEER, 0x05000000, 0x12345678)
    assert (
        fallback.message == "the peer declined SMC-R (reported by the peer, diagnosis 0x12345678)"
    )


# --- Declines of a peer --------------------------------------------------------------------------

TEXTS = {
    Diagnosis.OUT_OF_MEMORY: Reason.OUT_OF_RESOURCES,
    Diagnosis.CONFIRM_LINK_TIMEOUT: Reason.LINK_FAILED,
    Diagnosis.ADD_LINK_TIMEOUT: Reason.LINK_FAILED,
    Diagnosis.CONFIGURATION: Reason.DECLINED,
    Diagnosis.PEER_NOT_CAPABLE: Reason.PEER_NOT_CAPABLE,
    Diagnosis.NO_DEVICE: Reason.NO_RNIC,
    Diagnosis.MODE_MISMATCH: Reason.MODE_MISMATCH,
    Diagnosis.NO_V2_DEVICE: Reason.NO_RNIC,
    Diagnosis.NO_V2_OFFER: Reason.VERSION_MISMATCH,
    Diagnosis.NO_UEID: Reason.NO_COMMON_UEID,
    Diagnosis.RELEASE_MISMATCH: Reason.RELEASE_MISMATCH,
    Diagnosis.MAX_CONNECTIONS: Reason.CONNECTION_LIMIT,
    Diagnosis.MAX_LINKS: Reason.LINK_LIMIT,
    Diagnosis.NO_ROUTE: Reason.NO_ROUTE,
    Diagnosis.ROUTE_MISMATCH: Reason.ROUTE_MISMATCH,
    Diagnosis.EYE_CATCHER: Reason.EYE_CATCHER,
    Diagnosis.PREFIX_MISMATCH: Reason.PREFIX_MISMATCH,
    Diagnosis.VERSION_MISMATCH: Reason.VERSION_MISMATCH,
    Diagnosis.OUT_OF_SYNC: Reason.OUT_OF_SYNC,
    Diagnosis.PEER_DECLINED: Reason.DECLINED,
    0x09990000: Reason.DECLINED,
    0: Reason.DECLINED,
}


@pytest.mark.v2("v2.6/4")
@pytest.mark.rfc("C.1/1")
@pytest.mark.parametrize("word", TEXTS)
async def test_a_server_declines(word: int) -> None:
    async def peer(stream: trio.SocketStream) -> None:
        assert isinstance(await read_clc(stream), clc.Proposal)
        await stream.send_all(decline(word).encode())
        assert await read_exactly(stream, 11) == b"application", "the client answered a Decline"

    outcome = await open_to(peer)
    assert outcome.stream is not None
    assert outcome.stream.fallback == Fallback(
        reason=TEXTS[Diagnosis(word) if word in [*Diagnosis] else word],
        origin=PEER,
        code=0x05000000,
        peer_code=word,
    )


async def test_a_client_declines() -> None:
    async with trio_smc.open_stack(ASSUME) as stack:
        [listener] = await stack.open_listeners(0, host=HOST)
        async with await plain_client(listener) as plain:
            await plain.send_all(proposal().encode())
            assert isinstance(await read_clc(plain), clc.Accept)
            await plain.send_all(decline(Diagnosis.OUT_OF_MEMORY).encode() + b"application")
            with trio.fail_after(PATIENCE):
                stream = await listener.accept()
            assert stream.fallback is not None
            assert stream.fallback.reason is Reason.OUT_OF_RESOURCES
            assert (stream.fallback.origin, stream.fallback.peer_code) == (PEER, 0x01010000)
            assert await read_exactly(stream, 11) == b"application"
            await stream.aclose()
        assert stack.statistics().fallbacks == {(PEER, Reason.OUT_OF_RESOURCES): 1}
        await wait_until_freed(stack)
        await listener.aclose()


# --- reasons found by the client -----------------------------------------------------------------


async def answer_of_our_client(answer: clc.Message) -> tuple[Fallback | None, clc.Message]:
    """Answer the Proposal of the stack; returns the client's fallback, and its next message."""
    sent: list[clc.Message] = []

    async def peer(stream: trio.SocketStream) -> None:
        await read_clc(stream)
        await stream.send_all(answer.encode())
        sent.append(await read_clc(stream))
        assert await read_exactly(stream, 11) == b"application"

    outcome = await open_to(peer)
    assert outcome.stream is not None
    return outcome.stream.fallback, sent[0]


@pytest.mark.rfc("C.4/1", "C.6/4")
@pytest.mark.parametrize(
    ("answer", "reason", "word"),
    [
        (accept(qp_mtu=9), Reason.RESERVED_VALUE, 0x03000000),
        (accept(), Reason.LINK_FAILED, 0x02010000),
        (accept(first_contact=False), Reason.OUT_OF_SYNC, 0x04000000),
    ],
)
async def test_our_client_declines(answer: clc.Message, reason: Reason, word: int) -> None:
    fallback, sent = await answer_of_our_client(answer)
    assert fallback == Fallback(reason=reason, origin=LOCAL, code=word)
    assert isinstance(sent, clc.Decline)
    assert sent.diagnosis == word
    assert sent.out_of_sync is (reason is Reason.OUT_OF_SYNC)


# --- reasons found by the server -----------------------------------------------------------------


@pytest.mark.rfc("5/2", "3.5.1.2/5", "3.5.1.2/8")
@pytest.mark.parametrize(
    ("sent", "reason", "word"),
    [
        (proposal(ipv4_subnet=bytes((203, 0, 113, 0)), ipv4_mask_length=24),
         Reason.PREFIX_MISMATCH, 0x03070000),
        (proposal(version=2, flags=1), Reason.MODE_MISMATCH, 0x03040000),
    ],
)  # fmt: skip
async def test_our_server_declines(sent: clc.Proposal, reason: Reason, word: int) -> None:
    async with trio_smc.open_stack(ASSUME) as stack:
        [listener] = await stack.open_listeners(0, host=HOST)
        async with await plain_client(listener) as plain:
            await plain.send_all(sent.encode())
            answer = await read_clc(plain)
            assert isinstance(answer, clc.Decline)
            assert answer.diagnosis == word
            await plain.send_all(b"application")
            async with await listener.accept() as stream:
                assert stream.fallback == Fallback(reason=reason, origin=LOCAL, code=word)
                assert await read_exactly(stream, 11) == b"application"
        await listener.aclose()


# --- between two stacks --------------------------------------------------------------------------


async def fallbacks_between(
    client: Config,
    server: Config,
    prepare: Callable[[trio_smc.Stack, trio_smc.Stack], None] = lambda client, server: None,
) -> tuple[Fallback | None, Fallback | None]:
    """Open a connection between two stacks; returns the fallbacks of its two ends."""
    async with trio_smc.open_stack(server) as there, trio_smc.open_stack(client) as here:
        [listener] = await there.open_listeners(0, host=HOST)
        prepare(here, there)
        mine, other = await connect(here, listener)
        await close_all(mine, other, listener)
    return mine.fallback, other.fallback


def local(reason: Reason) -> Fallback:
    return Fallback.local(reason)


async def test_no_rnic() -> None:
    none = Config(rnics=())
    assert await fallbacks_between(none, QUICK) == (
        local(Reason.NO_RNIC),
        local(Reason.PEER_NOT_CAPABLE),
    )
    assert await fallbacks_between(QUICK, none) == (
        Fallback(reason=Reason.NO_RNIC, origin=PEER),
        local(Reason.NO_RNIC),
    )


async def test_a_server_without_an_rnic_declines_under_assume() -> None:
    """Under "assume" the server answers with a CLC message."""
    fallbacks = await fallbacks_between(ASSUME, Config(rnics=(), discovery="assume"))
    assert fallbacks == (Fallback.from_peer(0x03030000), local(Reason.NO_RNIC))


def fail_rnic(stack: trio_smc.Stack) -> None:
    [rnic] = stack.rnics
    assert isinstance(rnic, SoftRnic)
    rnic.fail()


async def test_rnic_down() -> None:
    fallbacks = await fallbacks_between(QUICK, QUICK, lambda client, server: fail_rnic(client))
    assert fallbacks == (local(Reason.RNIC_DOWN), local(Reason.PEER_NOT_CAPABLE))
    fallbacks = await fallbacks_between(QUICK, QUICK, lambda client, server: fail_rnic(server))
    assert fallbacks == (
        Fallback(reason=Reason.RNIC_DOWN, origin=PEER),
        local(Reason.RNIC_DOWN),
    )


async def test_rnic_restored() -> None:
    async with trio_smc.open_stack(QUICK) as stack:
        [listener] = await stack.open_listeners(0, host=HOST)
        [rnic] = stack.rnics
        assert isinstance(rnic, SoftRnic)
        rnic.fail()
        mine, other = await connect(stack, listener)
        assert mine.fallback == local(Reason.RNIC_DOWN)
        rnic.restore()
        await check_serves(stack, listener)
        await close_all(mine, other, listener)


@pytest.mark.parametrize("side", ["client", "server"])
async def test_out_of_memory(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(client: trio_smc.Stack, server: trio_smc.Stack) -> None:
        def full(size: int) -> None:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

        [rnic] = (client if side == "client" else server).rnics
        monkeypatch.setattr(rnic, "alloc_memory", full)

    fallbacks = await fallbacks_between(QUICK, QUICK, prepare)
    here, there = local(Reason.OUT_OF_RESOURCES), Fallback.from_peer(0x01010000)
    assert fallbacks == ((here, there) if side == "client" else (there, here))
    assert there.reason is Reason.OUT_OF_RESOURCES


async def test_discovery_has_too_many_announcements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_announcing, "MOST_OPEN", 0)
    assert await fallbacks_between(QUICK, QUICK) == (
        local(Reason.OUT_OF_RESOURCES),
        local(Reason.PEER_NOT_CAPABLE),
    )


async def test_discovery_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    accepted = _local_protocol.accepted

    def from_the_future(token: bytes, rnic_version: int, *, required: bool) -> bytes:
        message = bytearray(accepted(token, rnic_version, required=required))
        message[4:6] = b"\xfe\xff"
        return bytes(message)

    monkeypatch.setattr(_local_protocol, "accepted", from_the_future)
    mine, other = await fallbacks_between(QUICK, QUICK)
    assert mine == local(Reason.LOCAL_VERSION_MISMATCH)
    assert other == Fallback.from_peer(0x030C0000)
    assert other.reason is Reason.VERSION_MISMATCH


async def test_a_software_rnic_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_claims, "VERSION", 99)
    mine, other = await fallbacks_between(QUICK, QUICK)
    assert mine == local(Reason.VERSION_MISMATCH)
    assert other == Fallback.from_peer(0x030C0000)


async def test_no_directory_for_the_software_rnic(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process has no free descriptors when the stack opens."""

    def full(self: SoftRnic, directory: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(SoftRnic, "open", full)
    async with trio_smc.open_stack() as stack, plain_server() as server:
        stream = await stack.open_stream(*address_of(server))
        assert stream.fallback == local(Reason.OUT_OF_RESOURCES)
        await stream.aclose()


async def test_a_python_without_the_gil(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("sys._is_gil_enabled", lambda: False, raising=False)
        async with trio_smc.open_stack() as stack, plain_server() as server:
            stream = await stack.open_stream(*address_of(server))
            assert stream.mode is Mode.TCP
            assert stream.fallback == local(Reason.UNSUPPORTED_PLATFORM)
            await stream.aclose()


# Tests in other files, for the reasons that this file does not cover.
ELSEWHERE = {
    Reason.HANDSHAKE_LIMIT: "stack.test_policy.test_handshakes_beyond_the_limit_use_tcp",
    Reason.DIRECTORY_UNUSABLE: "api.test_api_discovery.test_a_hostile_directory",
    Reason.OTHER_USER: "api.test_api_discovery.test_a_process_of_another_user",
    Reason.ALREADY_CONNECTED: "sockets.test_enable_sockets."
    "test_a_connected_socket_of_the_standard_library",
    Reason.ALREADY_SHUT_DOWN: "sockets.test_enable_sockets.test_a_socket_that_was_shut_down_first",
    Reason.MULTIPATH: "sockets.test_enable_sockets.test_mptcp_is_refused_if_smc_r_is_required",
    Reason.DIRECTORY_FULL: "rendezvous.discovery.test_names.test_a_full_directory",
    Reason.ENDED_IN_HANDSHAKE: "api.test_api_listeners.test_a_defect_ends_one_connection",
    Reason.NOT_ACCEPTED: "rendezvous.discovery.test_silence.test_a_connection_that_stays_queued",
    Reason.PATH_NOT_PROVEN: "e2e.test_networks.test_masquerading_between_two",
    Reason.TCP_OPTION_UNAVAILABLE: "api.test_api_discovery.test_the_tcp_option_cannot_be_used",
    Reason.NOT_PERMITTED: "stack.test_policy.test_a_server_that_is_not_permitted_uses_tcp",
    Reason.SHORT_CONNECTIONS: "stack.test_policy.test_short_connections_become_tcp",
    Reason.TCP_OPTION_NOT_PERMITTED: "api.test_api_discovery.test_the_tcp_option_cannot_be_used",
}


def test_every_reason_has_a_test() -> None:
    """A test of this file or of the table names each reason."""
    with open(__file__) as file:
        text = file.read()
    for reason in Reason:
        named = len(re.findall(rf"Reason\.{reason.name}\b", text))
        assert named >= 1, reason
    for place in ELSEWHERE.values():
        module, _, name = place.rpartition(".")
        assert callable(getattr(importlib.import_module(f"tests.{module}"), name))
