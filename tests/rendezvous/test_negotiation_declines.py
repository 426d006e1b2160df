"""Declines and other ends of a rendezvous (RFC 7609, appendix C, row by row)."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Callable
from typing import Any

import pytest

from tests.rendezvous.rendezvous_pair import Call, Side, World, exchange, proposal_of
from tests.rnic.memory_rnic import PlainQueuePair
from trio_smc._base.reasons import Diagnosis, FallbackReason, Origin
from trio_smc.rendezvous.negotiation import Failed
from trio_smc.wire import clc, llc

CONFIRM_LINK = llc.MessageType.CONFIRM_LINK
ADD_LINK = llc.MessageType.ADD_LINK
RESET, TIMEOUT = errno.ECONNRESET, errno.ETIMEDOUT

Tamper = Callable[[PlainQueuePair, bytes], "list[bytes] | None"]


def on(kind: llc.MessageType, *, reply: bool, do: Callable[[bytes], Any]) -> Tamper:
    """Return a function that changes LLC messages of one type.

    do: returns the messages that arrive; None fails the send.
    """

    def tamper(_: PlainQueuePair, message: bytes) -> list[bytes] | None:
        if message[0] == kind and bool(message[3] & 0x80) is reply:
            changed = do(message)
            assert changed is None or isinstance(changed, list)
            return changed
        return [message]

    return tamper


def lose(_: bytes) -> list[bytes]:
    return []


def fail(_: bytes) -> None:
    return None


def decline(side: Side, **fields: Any) -> bytes:
    return clc.Decline(peer_id=side.stack.groups.peer_id, diagnosis=0x01010000, **fields).encode()


def check_both_fell_back(
    world: World, call: Call, *, by_client: bool, reason: FallbackReason, code: int
) -> None:
    """Check that both sides use TCP, know the side that declined, and carry application data."""
    assert call.states == ("FALLEN_BACK", "FALLEN_BACK")
    decider, other = call.ends if by_client else call.ends[::-1]
    assert decider.fallback.origin is Origin.LOCAL
    assert (decider.fallback.reason, decider.fallback.code) == (reason, code)
    assert other.fallback.origin is Origin.PEER
    assert other.fallback.peer_code == code
    for sender, receiver in (call.tcp, call.tcp[::-1]):
        sender.send(b"application data")
        world.settle()
        assert receiver.receive(1000) == b"application data"
    for side in world.sides:
        assert not [group for group in side.groups if group.state == "FORMING"]


def check_both_failed(call: Call, *numbers: int) -> None:
    assert call.states == ("FAILED", "FAILED")
    assert tuple(end.error.errno for end in call.ends) == numbers
    assert [tcp.cut for tcp in call.tcp] == ["rst", "rst"]


# --- C.1: in lieu of an expected CLC message -----------------------------------------------------


@pytest.mark.rfc("3.2/5", "3.5.1.2/8", "A.2/1", "A.2.5/1", "A.2.5/3", "C.1/1")
@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (FallbackReason.PREFIX_MISMATCH, Diagnosis.PREFIX_MISMATCH),
        (FallbackReason.NO_RNIC, Diagnosis.NO_DEVICE),
        (FallbackReason.RNIC_DOWN, Diagnosis.NO_DEVICE),
        (FallbackReason.VERSION_MISMATCH, Diagnosis.VERSION_MISMATCH),
    ],
)
def test_the_server_refuses_a_proposal(reason: FallbackReason, code: int) -> None:
    with World() as world:
        client, server = world.side(), world.side()
        record = server.record()
        call = world.connect(client, server, refusal=reason)
        data = record.messages()[-1][2]
        assert data == (
            bytes.fromhex("e2d4c3d9 04 001c 10")
            + server.stack.groups.peer_id
            + code.to_bytes(4, "big")
            + bytes(4)
            + bytes.fromhex("e2d4c3d9")
        )
        check_both_fell_back(world, call, by_client=False, reason=reason, code=code)


@pytest.mark.rfc("3.2/5", "3.5.1.2/8", "C.1/1")
@pytest.mark.parametrize("lack", ["memory", "qps"])
def test_a_server_without_resources_declines(lack: str) -> None:
    with World() as world:
        client, server = world.side(), world.side()
        if lack == "memory":
            server.rnic.no_memory = True
        else:
            server.rnic.most_qps = 0
        call = world.connect(client, server)
        check_both_fell_back(
            world, call, by_client=False, reason=FallbackReason.OUT_OF_RESOURCES, code=0x01010000
        )
        assert not any(world.fabric.held.values())
        # The next connection is a first contact again (3.5.1.6.4).
        server.rnic.no_memory, server.rnic.most_qps = False, None
        assert world.connect(client, server).states == ("ESTABLISHED", "ESTABLISHED")


@pytest.mark.rfc("3.2/5", "C.1/1")
@pytest.mark.parametrize("lack", ["memory", "qps"])
def test_a_client_without_resources_declines_in_lieu_of_confirm(lack: str) -> None:
    with World() as world:
        client, server = world.side(), world.side()
        if lack == "memory":
            client.rnic.no_memory = True
        else:
            client.rnic.most_qps = 0
        call = world.connect(client, server)
        check_both_fell_back(
            world, call, by_client=True, reason=FallbackReason.OUT_OF_RESOURCES, code=0x01010000
        )
        assert not any(world.fabric.held.values())


def test_an_accept_that_leads_nowhere_is_declined() -> None:
    """No RNIC has the GID of SMC Accept: the queue pair cannot be connected."""
    with World() as world:
        client, server = world.side(), world.side()
        call = world.call(client, server)
        call.tcp[1].tamper = lambda d: d[:16] + b"\xfd" * 16 + d[32:] if d[4] == 2 else d
        world.settle()
        check_both_fell_back(
            world, call, by_client=True, reason=FallbackReason.LINK_FAILED, code=0x02010000
        )


def test_a_client_may_decline_instead_of_proposing() -> None:
    with World() as world:
        client, server = world.side(), world.side()
        call = world.call(client, server)
        call.tcp[0].tamper = lambda _: decline(client) + b"data"
        world.until(lambda: call.server.outcome)
        assert call.server.fallback.reason is FallbackReason.OUT_OF_RESOURCES
        assert call.tcp[1].receive(100) == b"data"
        call.tcp[1].end("fin")
        world.finish()


@pytest.mark.rfc("C.1/3")
@pytest.mark.parametrize("end", [0, 1])
def test_a_decline_must_wait_for_the_answer(end: int) -> None:
    """C.1: a side sends Proposal or Accept, and then a Decline before the answer."""
    with World() as world:
        client, server = world.side(), world.side()
        call = world.call(client, server)
        call.tcp[end].tamper = lambda data: data + decline((client, server)[end])
        world.finish()
        check_both_failed(call, RESET, RESET)
        assert not any(world.fabric.held.values())


@pytest.mark.rfc("C.1/3")
def test_a_decline_right_after_confirm_resets_a_subsequent_contact() -> None:
    """C.3: the server is established, and the client's bytes on TCP are a violation."""
    with World() as world:
        client, server = world.side(), world.side()
        world.connect(client, server)
        call = world.call(client, server)
        world.until(lambda: call.server.state == "ACCEPTED")
        call.tcp[0].tamper = lambda data: data + decline(client)
        world.settle()
        assert call.states == ("ESTABLISHED", "ESTABLISHED")
        for connection in call.connections:
            with pytest.raises(OSError, match=r"reset|abort|no link"):
                connection.receiver.receive(100)


@pytest.mark.parametrize("state", ["PROPOSED", "CONFIRMING_LINK"])
def test_the_server_may_decline_while_the_client_waits(state: str) -> None:
    with World() as world:
        client, server = world.side(), world.side()
        call = world.call(client, server)
        world.until(lambda: call.client.state == state and not call.client.negotiation.outgoing)
        call.tcp[1].silent = True
        call.tcp[0].inbox[:] = decline(server)
        world.fabric.lose()
        world.until(lambda: call.client.outcome)
        assert call.client.fallback.reason is FallbackReason.OUT_OF_RESOURCES
        assert not client.groups
        call.tcp[0].end("fin")
        world.finish()


@pytest.mark.parametrize("state", ["ACCEPTED", "CONFIRMING_LINK"])
def test_the_client_may_decline_while_the_server_waits(state: str) -> None:
    with World() as world:
        client, server = world.side(), world.side()
        call = world.call(client, server)
        world.until(lambda: call.server.state == state and not call.server.negotiation.outgoing)
        call.tcp[1].inbox[:] = decline(client)
        world.until(lambda: call.server.outcome)
        assert call.server.fallback.reason is FallbackReason.OUT_OF_RESOURCES
        assert not server.groups
        call.tcp[1].end("fin")
        world.finish()


# --- C.2, C.3: LLC messages and the point of no return -------------------------------------------


@pytest.mark.rfc("3.5.1.6.4/1", "C.7/5", "C.2/1")
@pytest.mark.parametrize("announces_end", [False, True])
@pytest.mark.parametrize(
    ("kind", "reply", "by_client"),
    [(CONFIRM_LINK, False, False), (CONFIRM_LINK, True, True), (ADD_LINK, False, False)],
)
def test_the_side_whose_send_failed_declines(
    kind: llc.MessageType, reply: bool, by_client: bool, announces_end: bool
) -> None:
    """Figure 42 and C.7: the other side waits for the Decline, also if it notices the lost link."""
    with World(announces_end=announces_end) as world:
        client, server = world.side(), world.side()
        world.fabric.tamper = on(kind, reply=reply, do=fail)
        call = world.call(client, server)
        assert world.finish() == 0.0
        check_both_fell_back(
            world, call, by_client=by_client, reason=FallbackReason.LINK_FAILED, code=0x02010000
        )
        assert not any(world.fabric.held.values())


@pytest.mark.rfc("C.3/1", "C.3/2")
def test_the_point_of_no_return() -> None:
    """C.3: for the server the completion of ADD LINK, for the client the rejection."""
    with World() as world:
        client, server = world.side(), world.side()
        seen: list[tuple[bool, bool]] = []

        def note(_: PlainQueuePair, message: bytes) -> list[bytes]:
            seen.append((client.group.setup.may_fall_back, server.group.setup.may_fall_back))
            return [] if message[0] == ADD_LINK and message[3] & 0x80 else [message]

        world.fabric.tamper = note
        call = world.call(client, server)
        world.settle()
        # At CONFIRM LINK and its reply, and at ADD LINK and its rejection, before each arrives.
        assert seen == [(True, True), (True, True), (True, True), (False, False)]
        assert call.states == ("ESTABLISHED", "CONFIRMING_LINK")
        # After this point neither side may decline.
        call.tcp[0].send(decline(client))
        world.settle()
        assert call.server.error.errno == RESET
        assert "unexpected SMC Decline" in str(call.server.error)
        with pytest.raises(OSError, match=r"reset|abort|no link"):
            call.client.connection.receiver.receive(1)


@pytest.mark.rfc("C.3/3")
def test_a_link_lost_past_the_point_of_no_return_resets() -> None:
    with World() as world:
        client, server = world.side(), world.side()
        world.fabric.tamper = on(ADD_LINK, reply=True, do=lose)
        call = world.call(client, server)
        world.until(lambda: call.client.outcome)
        world.settle()
        next(iter(server.rnic.qps.values())).to_err()
        world.settle()
        assert call.server.error.errno == RESET
        assert not server.groups
        assert not client.groups


@pytest.mark.rfc("C.7.1/messages/1")
@pytest.mark.parametrize("field", [slice(4, 10), slice(10, 26), slice(26, 29)])
def test_confirm_link_of_another_queue_pair_is_declined_by_the_client(field: slice) -> None:
    """C.7.1, CONFIRM LINK from server: incorrect link information, first contact."""

    def change(message: bytes) -> list[bytes]:
        raw = bytearray(message)
        raw[field.start] ^= 0xFF
        return [bytes(raw)]

    with World() as world:
        client, server = world.side(), world.side()
        world.fabric.tamper = on(CONFIRM_LINK, reply=False, do=change)
        call = world.connect(client, server)
        check_both_fell_back(
            world, call, by_client=True, reason=FallbackReason.LINK_FAILED, code=0x02010000
        )


@pytest.mark.parametrize("place", [4, 10, 26, 29])
def test_a_wrong_confirm_link_reply_is_a_protocol_error(place: int) -> None:
    def change(message: bytes) -> list[bytes]:
        raw = bytearray(message)
        raw[place] ^= 0xFF
        return [bytes(raw)]

    with World() as world:
        client, server = world.side(), world.side()
        world.fabric.tamper = on(CONFIRM_LINK, reply=True, do=change)
        call = world.connect(client, server)
        check_both_failed(call, RESET, RESET)
        assert "CONFIRM LINK" in str(call.server.error)


@pytest.mark.parametrize(
    "message",
    [
        llc.TestLink(),
        llc.TestLink(reply=True),
        llc.AddLink(mac=bytes(6), gid=bytes(16)),
        llc.DeleteLink(link_number=1, reason=1),
        llc.ConfirmRkey(other_tokens=0, rkey=1, address=1),
        llc.DeleteRkey(rkeys=(1,)),
        llc.ConfirmLink(
            reply=True, mac=bytes(6), gid=bytes(16), qp_number=1, link_number=1,
            link_user_id=1, max_links=1,
        ),
    ],
    ids=lambda message: type(message).__name__,
)  # fmt: skip
def test_a_message_before_confirm_link_ends_the_connection(message: llc.Message) -> None:
    """3.5.1.5: the client cannot answer, because its queue pair cannot send yet."""
    with World() as world:
        client, server = world.side(), world.side()
        world.fabric.tamper = on(
            CONFIRM_LINK, reply=False, do=lambda data: [message.encode(), data]
        )
        call = world.connect(client, server)
        check_both_failed(call, RESET, RESET)


@pytest.mark.rfc("3.3/3")
def test_an_optional_message_may_precede_confirm_link() -> None:
    with World() as world:
        client, server = world.side(), world.side()
        optional = bytes((0x85, 44)) + bytes(42)
        world.fabric.tamper = on(CONFIRM_LINK, reply=False, do=lambda data: [optional, data])
        assert world.connect(client, server).states == ("ESTABLISHED", "ESTABLISHED")


# --- C.4: out of sync ----------------------------------------------------------------------------


@pytest.mark.rfc("A.2.5/2", "C.4/1")
def test_a_client_that_lost_the_group_declines_out_of_sync() -> None:
    with World(announces_end=False) as world:
        client, server = world.side(), world.side()
        first = world.connect(client, server)
        client.group.machine.send("links_lost")
        world.tcp_changes.clear()  # the server has not noticed it
        record = client.record()
        call = world.connect(client, server)
        data = record.messages()[-1][2]
        assert (data[7], data[16:20]) == (0x18, bytes.fromhex("04000000"))
        check_both_fell_back(
            world, call, by_client=True, reason=FallbackReason.OUT_OF_SYNC, code=0x04000000
        )
        # The server cleans up: open connections get an error, the next one is a first contact.
        assert not server.groups
        with pytest.raises(OSError, match=r"abort|no link"):
            first.server.connection.receiver.receive(1)
        assert world.connect(client, server).states == ("ESTABLISHED", "ESTABLISHED")


def test_a_decline_under_another_peers_id_and_gid_resets_no_connection() -> None:
    """Processes of two kernels or containers on one port may have the same peer ID and GID."""
    with World() as world:
        client, impostor, server = world.side(), world.side(), world.side()
        first = world.connect(client, server)
        impostor.stack.groups.peer_id = client.stack.groups.peer_id
        call = world.call(impostor, server, proposal=proposal_of(client))
        world.settle()
        check_both_fell_back(
            world, call, by_client=True, reason=FallbackReason.OUT_OF_SYNC, code=0x04000000
        )
        assert server.group.usable
        assert exchange(world, first, (b"ping", b"pong")) == (b"pong", b"ping")
        assert world.connect(client, server).states == ("ESTABLISHED", "ESTABLISHED")
        assert server.group.usable


def test_a_client_that_has_the_group_under_another_peer_id_forms_a_new_one() -> None:
    """A proxy had damaged the peer ID in the first SMC Accept."""
    with World() as world:
        client, server = world.side(), world.side()
        first = world.connect(client, server)
        damaged = bytes([client.group.peer_id[0] ^ 1]) + client.group.peer_id[1:]
        client.group.peer_id = damaged
        outcomes = []
        for _ in range(6):
            call = world.call(client, server)
            world.settle()
            outcomes.append(call.states == ("ESTABLISHED", "ESTABLISHED"))
        assert outcomes == [False, False, False, True, True, True]
        assert len(server.groups) == 2
        assert exchange(world, first, (b"ping", b"pong")) == (b"pong", b"ping")


def test_declines_count_only_in_a_row() -> None:
    with World() as world:
        client, impostor, server = world.side(), world.side(), world.side()
        world.connect(client, server)
        impostor.stack.groups.peer_id = client.stack.groups.peer_id
        for _ in range(4):
            world.call(impostor, server, proposal=proposal_of(client))
            world.settle()
            assert world.connect(client, server).states == ("ESTABLISHED", "ESTABLISHED")
        assert len(server.groups) == 1


def test_a_peer_id_that_two_clients_have_is_not_enough() -> None:
    """The two clients differ by their GIDs."""
    with World() as world:
        client, other, server = world.side(), world.side(), world.side()
        first = world.connect(client, server)
        other.stack.groups.peer_id = client.stack.groups.peer_id
        second = world.connect(other, server)
        assert second.states == ("ESTABLISHED", "ESTABLISHED")
        assert len(server.groups) == 2
        for call in (first, second):
            assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")


def test_a_client_whose_link_has_just_failed_is_recognised() -> None:
    """The client still proposes with the RNIC that lost the link."""
    with World() as world:
        client, server = world.side(rnics=2), world.side(rnics=2)
        world.connect(client, server)
        assert len(server.group.links) == 2
        link = server.group.links[2]
        assert link.peer is not None
        server.group.free_link(link)
        proposal = dataclasses.replace(proposal_of(client), gid=link.peer.gid)
        world.call(client, server, proposal=proposal)
        world.settle()
        assert len(server.groups) == 1
        assert len(server.group.connections) == 2


def test_a_client_with_a_new_rnic_is_recognised() -> None:
    """A software RNIC's peer ID names a process."""
    with World() as world:
        client, server = world.side(kind="software"), world.side(kind="software")
        world.connect(client, server)
        proposal = dataclasses.replace(proposal_of(client), gid=b"\xfe\x80" + bytes(13) + b"\x77")
        call = world.call(client, server, proposal=proposal)
        world.settle()
        assert call.states == ("ESTABLISHED", "ESTABLISHED")
        assert len(server.groups) == 1


def test_out_of_sync_at_first_contact_is_a_plain_decline() -> None:
    with World() as world:
        client, server = world.side(), world.side()
        call = world.call(client, server)
        world.until(lambda: call.server.state == "ACCEPTED")
        call.tcp[1].inbox += decline(client, out_of_sync=True)
        world.until(lambda: call.server.outcome)
        assert not server.groups
        call.tcp[1].end("fin")
        world.finish()


# --- C.5: time-outs of CLC -----------------------------------------------------------------------


@pytest.mark.rfc("C.5/1", "C.5/2")
@pytest.mark.parametrize("silent", [0, 1])
def test_a_silent_peer_costs_six_seconds_and_the_connection(silent: int) -> None:
    """There is no fallback, and the other side sends no further message."""
    with World() as world:
        client, server = world.side(), world.side()
        call = world.call(client, server)
        call.tcp[silent].silent = True
        assert world.finish() == pytest.approx(6.0)
        check_both_failed(call, TIMEOUT, TIMEOUT)
        assert b"".join(call.client.negotiation.outgoing) == b""
        assert not any(world.fabric.held.values())


@pytest.mark.rfc("C.5/1", "C.5/2")
def test_a_confirm_that_does_not_come() -> None:
    with World() as world:
        client, server = world.side(), world.side()
        call = world.call(client, server)
        world.until(lambda: call.server.state == "ACCEPTED")
        call.tcp[0].silent = True
        world.finish()
        assert call.server.error.errno == TIMEOUT
        assert isinstance(call.client.outcome, Failed)
        assert not any(world.fabric.held.values())


@pytest.mark.rfc("C.5/1")
def test_a_slow_message_gets_no_more_time() -> None:
    """One deadline holds for the whole message, also if single bytes arrive."""
    with World() as world:
        client, server = world.side(), world.side()
        call = world.call(client, server)
        proposal = call.proposal.encode()
        call.tcp[0].tamper = lambda data: b""
        for place in range(20):
            world.settle()
            call.tcp[1].inbox += proposal[place : place + 1]
            world.pass_time(0.5)
        assert call.server.error.errno == TIMEOUT
        world.finish()


@pytest.mark.parametrize("pieces", [1, 7])
def test_messages_may_arrive_in_pieces(pieces: int) -> None:
    with World() as world:
        client, server = world.side(), world.side()
        call = world.call(client, server)
        call.client.pieces = call.server.pieces = pieces
        world.settle()
        assert call.states == ("ESTABLISHED", "ESTABLISHED")


# --- C.6: protocol errors and reserved values ----------------------------------------------------


@pytest.mark.rfc("C.6/1", "C.6/2")
@pytest.mark.parametrize("end", [0, 1])
@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(68),
        b"\xe2\xd4\xc3\xd9\x07" + bytes(80),
        b"\xe2\xd4\xc3\xd9\x01\x00\x33\x10" + bytes(39) + b"\xe2\xd4\xc3\xd9",
        b"\xe2\xd4\xc3\xd9\x02\x00\x43\x18" + bytes(55) + b"\xe2\xd4\xc3\xd9",
        b"\xe2\xd4\xc3\xd9\x01\x00\x34\x10" + bytes(44),
        b"\xe2\xd4\xc3\xd9\x02\x00\x44\x18" + bytes(60),
    ],
    ids=[
        "http",
        "zeros",
        "unknown type",
        "Proposal of 51 bytes",
        "Accept of 67 bytes",
        "Proposal without end",
        "Accept without end",
    ],
)
def test_application_data_in_place_of_a_message(end: int, data: bytes) -> None:
    """The receiver ends the TCP connection, without a Decline and without fallback."""
    with World() as world:
        client, server = world.side(), world.side()
        call = world.call(client, server)
        call.tcp[end].tamper = lambda _: data
        world.settle()
        assert call.ends[1 - end].error.errno == RESET
        world.finish()
        assert not any(world.fabric.held.values())


@pytest.mark.rfc("C.6/1")
@pytest.mark.parametrize("refusal", [None, FallbackReason.PREFIX_MISMATCH])
def test_a_proposal_followed_at_once_by_data(refusal: FallbackReason | None) -> None:
    """The client must wait for the answer.  A server that declines must not pass such bytes to its
    application."""
    with World() as world:
        client, server = world.side(), world.side()
        call = world.call(client, server, refusal=refusal)
        call.tcp[0].tamper = lambda data: data + b"application data"
        world.settle()
        check_both_failed(call, RESET, RESET)


@pytest.mark.rfc("C.6/1")
def test_an_accept_followed_at_once_by_data_that_the_client_declines() -> None:
    with World() as world:
        client, server = world.side(), world.side()
        client.rnic.no_memory = True
        call = world.call(client, server)
        call.tcp[1].tamper = lambda data: data + b"application data"
        world.settle()
        check_both_failed(call, RESET, RESET)


@pytest.mark.rfc("A.2.3/6", "A.2.4/5", "C.6/4")
@pytest.mark.parametrize("mtu", [0, 6, 15])
@pytest.mark.parametrize("end", [0, 1])
def test_a_reserved_mtu_is_declined_at_first_contact(end: int, mtu: int) -> None:
    """C.6, an exception: the receiver of SMC Accept or SMC Confirm declines."""

    def change(data: bytes) -> bytes:
        if data[4] in (clc.MessageType.ACCEPT, clc.MessageType.CONFIRM):
            return data[:50] + bytes((data[50] & 0xF0 | mtu,)) + data[51:]
        return data

    with World() as world:
        client, server = world.side(), world.side()
        call = world.call(client, server)
        call.tcp[end].tamper = change
        world.settle()
        check_both_fell_back(
            world,
            call,
            by_client=end == 1,
            reason=FallbackReason.RESERVED_VALUE,
            code=Diagnosis.CONFIGURATION,
        )
        assert not any(world.fabric.held.values())


@pytest.mark.rfc("A.2.3/6", "A.2.4/5")
@pytest.mark.parametrize("end", [0, 1])
def test_later_contacts_do_not_look_at_the_mtu(end: int) -> None:
    """A.2.3: the MTU counts only at first contact."""
    with World() as world:
        client, server = world.side(), world.side()
        world.connect(client, server)
        call = world.call(client, server)
        call.tcp[end].tamper = lambda d: (
            d if d[4] == 1 else d[:50] + bytes((d[50] & 0xF0,)) + d[51:]
        )
        world.settle()
        assert call.states == ("ESTABLISHED", "ESTABLISHED")
        assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")


def test_confirm_must_come_from_the_proposing_peer() -> None:
    with World() as world:
        client, server = world.side(), world.side()
        call = world.call(client, server)
        world.until(lambda: call.server.state == "ACCEPTED")
        call.tcp[0].tamper = lambda data: data[:8] + bytes(8) + data[16:]
        world.settle()
        assert call.server.error.errno == RESET
        world.finish()


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize(
    ("end", "state"),
    [
        (0, "PROPOSED"), (0, "CONFIRMING_LINK"), (0, "LINK_LOST"),
        (1, "LISTENING"), (1, "ACCEPTED"), (1, "CONFIRMING_LINK"), (1, "LINK_LOST"),
    ],
)  # fmt: skip
def test_the_tcp_connection_ends_in_each_state(end: int, state: str, how: str) -> None:
    with World() as world:
        client, server = world.side(), world.side()
        call = world.call(client, server)
        if state == "LINK_LOST":
            world.fabric.tamper = on(CONFIRM_LINK, reply=end == 1, do=fail)
            call.tcp[1 - end].tamper = lambda d: b"" if d[4] == 4 else d
        subject = call.ends[end]
        world.until(lambda: subject.state == state and not subject.negotiation.outgoing)
        call.tcp[1 - end].end(how)
        world.until(lambda: subject.outcome)
        assert subject.error.errno == RESET
        world.finish()
        assert not any(world.fabric.held.values())


# --- C.7: time-outs of LLC -----------------------------------------------------------------------


@pytest.mark.rfc("C.7/1", "C.7/4", "C.7.1/time-outs/1", "3.5.1.3/3")
def test_confirm_link_from_the_server_is_lost() -> None:
    """C.7, C.7.1: client and server break the TCP connection after 5 s."""
    with World() as world:
        client, server = world.side(), world.side()
        world.fabric.tamper = on(CONFIRM_LINK, reply=False, do=lose)
        call = world.call(client, server)
        assert world.finish() == pytest.approx(5.0)
        check_both_failed(call, TIMEOUT, TIMEOUT)


@pytest.mark.rfc("C.7/6", "C.7.1/time-outs/1", "3.5.1.5/3")
def test_confirm_link_from_the_client_is_lost() -> None:
    """C.7.1, CONFIRM LINK from server, and CONFIRM LINK reply from client."""
    with World() as world:
        client, server = world.side(), world.side()
        world.fabric.tamper = on(CONFIRM_LINK, reply=True, do=lose)
        call = world.call(client, server)
        assert world.finish() == pytest.approx(5.0)
        check_both_failed(call, TIMEOUT, TIMEOUT)


@pytest.mark.rfc("C.7.1/time-outs/4")
def test_add_link_from_the_server_is_lost() -> None:
    """C.7.1, CONFIRM LINK reply from client: the client breaks the connection."""
    with World() as world:
        client, server = world.side(), world.side()
        world.fabric.tamper = on(ADD_LINK, reply=False, do=lose)
        call = world.call(client, server)
        assert world.finish() == pytest.approx(5.0)
        assert call.client.error.errno == TIMEOUT
        world.settle()
        assert not client.groups


@pytest.mark.rfc("C.7.1/time-outs/5", "C.8/1", "3.5.1.6.2/1")
def test_add_link_reply_is_lost_and_the_server_continues_with_one_link() -> None:
    """3.5.1.6.2, C.8, in contradiction to C.7.1: the link group may continue."""
    with World() as world:
        client, server = world.side(), world.side()
        late: list[bytes] = []

        def keep(message: bytes) -> list[bytes]:
            late.append(message)
            return []

        world.fabric.tamper = on(ADD_LINK, reply=True, do=keep)
        call = world.call(client, server)
        assert world.finish() == pytest.approx(5.0)
        assert call.states == ("ESTABLISHED", "ESTABLISHED")
        assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")
        # A late reply changes nothing.
        world.fabric.tamper = None
        server.group.on_llc_untrusted(server.group.links[1], late[0])
        assert exchange(world, call, (b"more", b"MORE")) == (b"MORE", b"more")


@pytest.mark.parametrize("end", [0, 1])
def test_a_lost_link_without_a_decline_is_given_up_in_time(end: int) -> None:
    """C.7: in either case the peer must break the TCP connection and clean up."""
    with World() as world:
        client, server = world.side(), world.side()
        world.fabric.tamper = on(CONFIRM_LINK, reply=end == 1, do=fail)
        call = world.call(client, server)
        call.tcp[1 - end].tamper = lambda data: b"" if data[4] == 4 else data
        world.until(lambda: call.ends[end].state == "LINK_LOST")
        assert not (client, server)[end].groups
        assert world.finish() == pytest.approx(6.0)
        assert call.ends[end].error.errno == RESET


def test_a_server_link_that_cannot_be_connected_is_declined() -> None:
    """SMC Confirm names an unknown RNIC."""
    with World() as world:
        client, server = world.side(), world.side()
        call = world.call(client, server)
        world.until(lambda: call.server.state == "ACCEPTED")
        call.tcp[0].tamper = lambda d: d[:16] + b"\xfd" * 16 + d[32:] if d[4] == 3 else d
        world.settle()
        check_both_fell_back(
            world, call, by_client=False, reason=FallbackReason.LINK_FAILED, code=0x02010000
        )
