"""Rules of the rendezvous that no single figure shows: the link of each message, access to RMBs,
the settings that two queue pairs share, and the time of a Decline (RFC 7609, 2.1, 3.3, 3.5.1,
3.5.2.2, appendix C)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import trio

import trio_smc
from tests.api.api_peers import (
    ASSUME,
    HOST,
    address_of,
    close_all,
    connect,
    decline,
    plain_client,
    plain_server,
    proposal,
    read_clc,
    read_exactly,
)
from tests.rendezvous.links.llc_wire import Stage
from tests.rendezvous.rendezvous_pair import SIZE, World, exchange
from tests.rendezvous.transcripts import line
from tests.rnic.memory_rnic import PlainQueuePair
from trio_smc import Stack
from trio_smc._base.reasons import Diagnosis, FallbackReason
from trio_smc.wire import clc, llc

BIG = 4 * SIZE


@pytest.fixture
def world() -> Iterator[World]:
    with World(announces_end=False) as world:
        yield world


# --- links ----------------------------------------------------------------------------------------


@pytest.mark.rfc("3.3/2", "3.3/5")
def test_a_reply_travels_on_the_link_of_its_request(world: World) -> None:
    """Each request gets a reply of the same type."""
    stage = Stage(world, (3, 3), down=1)
    world.connect(stage.client, stage.server, size=BIG)
    stage.server.rnics[2].port_up()
    world.settle()
    stage.server.group.delete_link(1, orderly=True)
    world.settle()
    stage.client.group.request_element(2 * BIG, lambda _: None)
    world.settle()
    requests: list[str] = []
    kinds = set()
    for name in stage.log:
        side, link, message = name[0], name[1], name[2:].removesuffix(" reply")
        if not name.endswith(" reply"):
            requests.append(name)
            continue
        request = f"{'S' if side == 'C' else 'C'}{link}{message}"
        assert request in requests, (name, stage.log)
        requests.remove(request)
        kinds.add(message.split()[0])
    assert requests == []
    assert kinds == {
        "CONFIRM_RKEY", "ADD_LINK", "ADD_LINK_CONTINUATION", "CONFIRM_LINK", "DELETE_LINK"
    }  # fmt: skip


@pytest.mark.rfc("A.3.5/7")
def test_a_new_rmb_is_announced_over_the_link_of_its_first_connection(world: World) -> None:
    stage = Stage(world, (2, 2))
    records = [side.record() for side in (stage.client, stage.server)]
    world.connect(stage.client, stage.server, size=BIG)
    requests = [name for name in stage.log if name.endswith("CONFIRM_RKEY")]
    assert requests == ["S2 CONFIRM_RKEY", "C2 CONFIRM_RKEY"], "link 1 has a connection already"
    for record, side in zip(records, (stage.client, stage.server), strict=True):
        (sent,) = [
            clc.decode_untrusted(data)
            for kind, way, data in record.messages()
            if (kind, way) == ("clc", "out") and data[4] in (2, 3)
        ]
        assert isinstance(sent, clc.Accept | clc.Confirm)
        assert sent.qp_number == side.group.links[2].qp.qp_num


@pytest.mark.rfc("A.3.5/7")
def test_a_new_rmb_is_announced_over_another_link_if_that_one_is_lost(world: World) -> None:
    stage = Stage(world, (2, 2))
    call = world.call(stage.client, stage.server, size=BIG)
    stage.wire.fail("S2 CONFIRM_RKEY")
    world.pass_time(10.0)
    assert "S1 CONFIRM_RKEY" in stage.log
    assert call.states == ("ESTABLISHED", "ESTABLISHED")


@pytest.mark.rfc("3.3/4")
def test_confirm_link_and_test_link_travel_on_their_own_link(world: World) -> None:
    stage = Stage(world, (3, 3), connect=False)
    stage.wire.tests = True
    listen = world.fabric.tamper
    assert listen is not None
    confirmed: list[int] = []

    def note(qp: PlainQueuePair, data: bytes) -> list[bytes] | None:
        if data[0] == llc.MessageType.CONFIRM_LINK:
            message: Any = llc.decode_untrusted(data)
            # The message names its sender's queue pair on the new link.
            assert (message.qp_number, message.gid) == (qp.qp_num, qp.rnic.gid)
            confirmed.append(message.link_number)
        return listen(qp, data)

    world.fabric.tamper = note
    world.settle()
    assert confirmed == [1, 1, 2, 2, 3, 3]
    stage.log.clear()
    world.pass_time(45.0)
    for number in "123":
        tests = [name[0] + name[2:] for name in stage.log if name[1] == number]
        sent, answered = tests.count("C TEST_LINK"), tests.count("S TEST_LINK reply")
        assert sent == answered
        sent_back, answered_back = tests.count("S TEST_LINK"), tests.count("C TEST_LINK reply")
        assert sent_back == answered_back
        assert sent + sent_back > 0


@pytest.mark.rfc("A.2.3/5", "A.2.3/7", "A.2.4/3", "A.2.4/4")
@pytest.mark.parametrize("place", [0, 1])
def test_both_queue_pairs_of_the_first_link_agree(world: World, place: int) -> None:
    """Both use the smaller MTU, and each expects the first sequence number of the other."""
    sides = client, server = world.side(), world.side()
    sides[place].rnic.mtu = 3
    record = client.record()
    call = world.connect(client, server)
    messages = [clc.decode_untrusted(m) for kind, _, m in record.messages() if kind == "clc"]
    for message, side, other in ((messages[1], server, client), (messages[2], client, server)):
        assert isinstance(message, clc.Accept | clc.Confirm)
        (qp,), (peer,) = side.rnic.qps.values(), other.rnic.qps.values()
        assert message.qp_mtu == side.rnic.mtu
        assert qp.mtu == 3
        sends, _ = qp.psns
        _, expects = peer.psns
        assert message.initial_psn == sends == expects
    assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")


# --- RMBs -----------------------------------------------------------------------------------------


@pytest.mark.rfc("2.1/4")
def test_only_the_peer_of_its_group_reaches_an_rmb(world: World) -> None:
    """2.1: each link has its own protection domain."""
    server, one, two = world.side(rnics=2), world.side(rnics=2), world.side(rnics=1)
    first, second = world.connect(one, server), world.connect(two, server)
    links = [link for group in server.groups for link in group.links.values()]
    assert len(links) == 4
    assert len({id(link.pd) for link in links}) == 4
    rmb = server.groups[0].own_rmbs.pool.rmbs[0]
    before = bytes(rmb.memory.view[:64])
    region = server.groups[0].own_rmbs.region(rmb, server.groups[0].links[1])
    intruder = two.group.links[1].qp
    intruder.post_write(0, memoryview(b"x" * 64), None, address=region.address, rkey=region.rkey)
    world.settle()
    assert server.rnic.access_errors == 1
    assert bytes(rmb.memory.view[:64]) == before
    assert exchange(world, first, (b"ping", b"pong")) == (b"pong", b"ping")
    world.pass_time(60.0)
    assert exchange(world, first, (b"one", b"two")) == (b"two", b"one")
    assert second.states == ("ESTABLISHED", "ESTABLISHED")


# --- Declines -------------------------------------------------------------------------------------


@pytest.mark.rfc("3.5.2/8", "C.4/1")
@pytest.mark.parametrize("place", [8, 16, 32, 38], ids=["peer ID", "gid", "mac", "qp"])
def test_an_accept_of_no_known_link_without_the_flag_is_out_of_sync(place: int) -> None:
    with World() as world:
        client, server = world.side(), world.side()
        world.connect(client, server)
        call = world.call(client, server)

        def change(data: bytes) -> bytes:
            raw = bytearray(data)
            if raw[4] == clc.MessageType.ACCEPT:
                assert raw[7] == 0x10, "the first-contact flag is off"
                raw[place] ^= 0x55
            return bytes(raw)

        call.tcp[1].tamper = change
        record = client.record()
        world.settle()
        sent = [m for kind, way, m in record.messages() if (kind, way) == ("clc", "out")]
        answer = clc.decode_untrusted(sent[-1])
        assert isinstance(answer, clc.Decline)
        assert answer.out_of_sync
        assert call.states == ("FALLEN_BACK", "FALLEN_BACK")
        assert call.client.fallback.reason is FallbackReason.OUT_OF_SYNC


@pytest.mark.rfc("C.1/2")
def test_a_client_that_loses_its_rnic_waits_for_accept_before_it_declines(world: World) -> None:
    """C.1: the client sends no Decline before it has received SMC Accept."""
    client, server = world.side(), world.side()
    record = client.record()
    call = world.call(client, server)
    world.until(lambda: call.client.state == "PROPOSED" and not call.client.negotiation.outgoing)
    client.rnic.port_down(fatal=True)
    client.rnic.most_qps = 0
    world.settle()
    clcs = [line(each) for each in record.messages() if each[0] == "clc"]
    assert clcs == ["out PROPOSAL", "in ACCEPT", "out DECLINE"]
    assert call.states == ("FALLEN_BACK", "FALLEN_BACK")
    assert not any(world.fabric.held.values())


@pytest.mark.rfc("C.3/1", "C.3/2")
def test_the_point_of_no_return_with_two_links(world: World) -> None:
    """C.3: if the client accepts the second link, this point is the completion of its reply."""
    stage = Stage(world, (2, 2), connect=False)
    seen: list[tuple[str, bool, bool]] = []
    listen = world.fabric.tamper
    assert listen is not None

    def note(qp: PlainQueuePair, data: bytes) -> list[bytes] | None:
        passed = listen(qp, data)
        client, server = (stage.end(place).group.setup.may_fall_back for place in (0, 1))
        seen.append((stage.log[-1], client, server))
        return passed

    world.fabric.tamper = note
    world.settle()
    assert seen == [
        ("S1 CONFIRM_LINK", True, True),
        ("C1 CONFIRM_LINK reply", True, True),
        ("S1 ADD_LINK 2", True, True),
        ("C1 ADD_LINK 2 reply", True, False),
        ("S1 ADD_LINK_CONTINUATION", False, False),
        ("C1 ADD_LINK_CONTINUATION reply", False, False),
        ("S2 CONFIRM_LINK", False, False),
        ("C2 CONFIRM_LINK reply", False, False),
    ]


# --- messages on real sockets ---------------------------------------------------------------------


async def declined_proposal(
    stack: Stack, listener: trio.SocketListener, more: bytes = b"", answer: bytes = b""
) -> clc.Proposal:
    """Let the stack connect to a server that declines; returns the client's Proposal.

    Then the application of the server sends ``more``, and that of the client sends ``answer``.
    """
    proposals: list[clc.Message] = []

    async def serve() -> None:
        async with await listener.accept() as stream:
            proposals.append(await read_clc(stream))
            await stream.send_all(decline(Diagnosis.PEER_DECLINED).encode() + more)
            assert await read_exactly(stream, len(answer)) == answer

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        async with await stack.open_stream(*address_of(listener)) as stream:
            assert stream.mode is trio_smc.Mode.TCP
            assert await read_exactly(stream, len(more)) == more
            await stream.send_all(answer or b"application")
    (message,) = proposals
    assert isinstance(message, clc.Proposal)
    return message


@pytest.mark.rfc("3.2/2", "3.5.1.2/1", "A.2.2/4", "A.2/1", "A.2.2/2")
@pytest.mark.parametrize("host", [HOST, "::1"])
async def test_the_fields_of_a_proposal(host: str) -> None:
    async with plain_server(host) as server, trio_smc.open_stack(ASSUME) as stack:
        message = await declined_proposal(stack, server)
        [rnic] = stack.rnics
        assert (message.peer_id, message.gid, message.mac) == (stack.peer_id, rnic.gid, rnic.mac)
        if host == HOST:
            assert (message.ipv4_subnet, message.ipv4_mask_length) == (bytes((127, 0, 0, 0)), 8)
            assert message.ipv6_prefixes == ()
            assert len(message.encode()) == 52
        else:
            assert (message.ipv4_subnet, message.ipv4_mask_length) == (bytes(4), 0)
            own = clc.Ipv6Prefix(prefix=bytes(15) + b"\1", length=128)
            assert message.ipv6_prefixes[0] == own
        assert message.encode()[38:40] == bytes(2), "the offset is zero"
        assert message.flags == 0


@pytest.mark.rfc("3.5.2/4", "3.5.1.2/3")
async def test_a_client_that_has_a_link_group_proposes_as_before() -> None:
    """3.5.2.1: the client cannot know the peer at an address before it connects."""
    async with (
        trio_smc.open_stack(ASSUME) as peer,
        trio_smc.open_stack(ASSUME) as stack,
        plain_server() as server,
    ):
        before = await declined_proposal(stack, server)
        [listener] = await peer.open_listeners(0, host=HOST)
        mine, other = await connect(stack, listener)
        assert len(stack.link_groups) == 1
        assert await declined_proposal(stack, server) == before
        await close_all(mine, other, listener)


@pytest.mark.rfc("3.5.1.2/5", "3.5.1.2/8")
@pytest.mark.parametrize(
    ("text", "welcome"),
    [(bytes(15) + b"\1", True), (b"\xfd" * 16, False)],
    ids=["own", "foreign"],
)
async def test_a_server_needs_one_of_the_listed_prefixes(text: bytes, welcome: bool) -> None:
    foreign = clc.Ipv6Prefix(prefix=b"\xfc" * 16, length=128)
    sent = proposal(
        ipv4_subnet=bytes(4),
        ipv4_mask_length=0,
        ipv6_prefixes=(foreign, clc.Ipv6Prefix(prefix=text, length=128)),
    )
    async with trio_smc.open_stack(ASSUME) as stack:
        [listener] = await stack.open_listeners(0, host="::1")
        async with await plain_client(listener) as plain:
            await plain.send_all(sent.encode())
            answer = await read_clc(plain)
            if welcome:
                assert isinstance(answer, clc.Accept)
                await plain.send_all(decline(Diagnosis.PEER_DECLINED).encode())
            else:
                assert isinstance(answer, clc.Decline)
                assert answer.diagnosis == Diagnosis.PREFIX_MISMATCH
            async with await listener.accept() as stream:
                await plain.send_all(b"application")
                assert await read_exactly(stream, 11) == b"application"
        await listener.aclose()


@pytest.mark.rfc("C.6/3")
async def test_application_data_that_looks_like_clc_is_application_data() -> None:
    """Even if the data is in the same segment as the Decline."""
    async with plain_server() as server, trio_smc.open_stack(ASSUME) as stack:
        theirs = proposal().encode() + decline(Diagnosis.OUT_OF_MEMORY).encode()
        ours = decline(Diagnosis.OUT_OF_SYNC).encode() + proposal().encode()
        await declined_proposal(stack, server, theirs, ours)
