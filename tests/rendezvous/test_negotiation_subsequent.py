"""Subsequent contacts of two whole stacks: figure 13, new RMBs, data before Confirm (3.5.2.4),
elements in use (4.4.2), and link groups that begin or end during a rendezvous (RFC 7609, 3.5.2,
3.5.5.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.rendezvous.rendezvous_pair import SIZE, Call, World, exchange
from tests.rendezvous.transcripts import line
from tests.rnic.memory_rnic import PlainQueuePair
from trio_smc._base.reasons import FallbackReason
from trio_smc.config.config import Config
from trio_smc.rendezvous.links import own_rmbs
from trio_smc.rendezvous.links.rkeys import PeerRequest
from trio_smc.rendezvous.negotiation import Established
from trio_smc.wire import clc, llc

CONFIRM_RKEY = llc.MessageType.CONFIRM_RKEY
BIG = 4 * SIZE
"""An RMB has one such element, so every connection needs a new RMB on both sides."""


def on_replies(do: Callable[[bytes], Any]) -> Any:
    """Return a function that changes replies to CONFIRM RKEY by ``do``."""

    def tamper(_: PlainQueuePair, message: bytes) -> list[bytes] | None:
        if message[0] == CONFIRM_RKEY and message[3] & 0x80:
            changed: list[bytes] = do(message)
            return changed
        return [message]

    return tamper


def hold(held: list[bytes]) -> Callable[[bytes], bytes]:
    """Return a function that holds back a sent message."""

    def keep(data: bytes) -> bytes:
        held.append(data)
        return b""

    return keep


def works(world: World, call: Call) -> bool:
    return exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")


# --- transcripts ----------------------------------------------------------------------------------


@pytest.mark.rfc(
    "3.5.2/1",
    "3.5.2/2",
    "2.2.3/3",
    "3.5.1.2/4",
    "3.5.2/5",
    "3.5.2/8",
    "3.5.2/14",
    "A.2.3/2",
)
def test_a_subsequent_contact_with_room_in_the_rmbs() -> None:
    """3.5.2: the sides exchange no LLC message."""
    with World() as world:
        client, server = world.side(), world.side()
        world.connect(client, server)
        at_client = client.record()
        call = world.connect(client, server)
        assert [line(each) for each in at_client.messages()] == [
            "out PROPOSAL",
            "in ACCEPT",
            "out CONFIRM",
        ]
        accept, confirm = (clc.decode_untrusted(m) for _, _, m in at_client.messages()[1:])
        assert isinstance(accept, clc.Accept)
        assert isinstance(confirm, clc.Confirm)
        assert not accept.first_contact
        assert (accept.rmbe_index, confirm.rmbe_index) == (2, 2)
        assert at_client.messages()[2][2][7] == 0x10
        assert len(client.rnic.qps) == len(server.rnic.qps) == 1
        assert works(world, call)
        assert [line(each) for each in at_client.messages()[3:]] == ["out CDC", "in CDC"]


@pytest.mark.rfc("3.5.5.2.1/3", "3.5.2/6", "3.5.2/9")
def test_figure_13_with_a_new_rmb_on_both_sides() -> None:
    """The client's half is the figure; the server's CONFIRM RKEY comes before SMC Accept."""
    with World() as world:
        client, server = world.side(), world.side()
        world.connect(client, server)
        at_client, at_server = client.record(), server.record()
        call = world.connect(client, server, size=BIG)
        assert [line(each) for each in at_client.messages()] == [
            "out PROPOSAL",
            "in CONFIRM_RKEY",
            "out CONFIRM_RKEY reply",
            "in ACCEPT",
            "out CONFIRM_RKEY",
            "in CONFIRM_RKEY reply",
            "out CONFIRM",
        ]
        assert [line(each) for each in at_server.messages()] == [
            "in PROPOSAL",
            "out CONFIRM_RKEY",
            "in CONFIRM_RKEY reply",
            "out ACCEPT",
            "in CONFIRM_RKEY",
            "out CONFIRM_RKEY reply",
            "in CONFIRM",
        ]
        request = llc.decode_untrusted(at_client.messages()[4][2])
        reply = llc.decode_untrusted(at_client.messages()[5][2])
        confirm = clc.decode_untrusted(at_client.messages()[6][2])
        assert isinstance(request, llc.ConfirmRkey)
        assert isinstance(reply, llc.ConfirmRkey)
        assert isinstance(confirm, clc.Confirm)
        # One link, so no other tokens: the message has only the token of its own link.
        assert (request.other_tokens, request.others) == (0, ())
        assert (request.rkey, request.address) == (confirm.rkey, confirm.rmb_address)
        assert (reply.rkey, reply.address) == (request.rkey, request.address)
        assert (at_client.messages()[5][2][3], reply.negative) == (0x80, False)
        assert works(world, call)


@pytest.mark.rfc("3.5.5.3/4", "3.5.5.3.3/7")
def test_concurrent_confirm_rkeys_of_both_sides_are_no_collision() -> None:
    """3.5.5.3: neither side waits for the other."""
    with World() as world:
        client, server = world.side(), world.side()
        world.connect(client, server)
        done: list[Any] = []
        for side in (client, server):
            side.group.request_element(BIG, done.append)
        assert [side.group.exchanges.state for side in (client, server)] == ["CHANGE_RKEYS"] * 2
        world.settle()
        assert len(done) == 2
        assert all(rmbe is not None for rmbe in done)
        for side, rmbe in zip((client, server), done, strict=True):
            side.group.own_rmbs.release(rmbe, 0)


def test_many_connections_wait_for_one_new_rmb() -> None:
    """39 connections of three sizes open at once.  Each new RMB needs one exchange."""
    with World() as world:
        client, server = world.side(), world.side()
        world.connect(client, server)
        record = client.record()
        calls = [world.call(client, server, size=size) for size in (SIZE, SIZE // 2, 2 * SIZE) * 13]
        world.settle()
        assert all(call.states == ("ESTABLISHED", "ESTABLISHED") for call in calls)
        sent = [each for each in record.messages() if line(each) == "out CONFIRM_RKEY"]
        assert len(sent) == len(client.group.own_rmbs.pool.rmbs) - 1
        # An RMB has four, eight or two elements of these sizes; three elements were free.
        assert len(sent) == 3 + 2 + 7
        tokens = {
            connection.rmbe.rmb.memory: connection.rmbe.index for connection in client.connections
        }
        assert len(tokens) == len(sent) + 1


# --- 3.5.2.4 --------------------------------------------------------------------------------------


@pytest.mark.rfc("3.5.2/3", "3.5.2/15", "3.5.2/16")
def test_data_that_outruns_confirm_waits_for_it() -> None:
    with World() as world:
        client, server = world.side(), world.side()
        world.connect(client, server)
        call = world.call(client, server)
        held: list[bytes] = []
        world.until(lambda: call.server.state == "ACCEPTED")
        call.tcp[0].tamper = hold(held)
        world.until(lambda: isinstance(call.client.outcome, Established))
        call.client.connection.send(memoryview(b"early"))
        world.settle()
        (waiting,) = [each for each in server.connections if each.state == "INIT"]
        assert waiting.cdcs_received == 1
        assert waiting.receiver.receive(100) == b""
        with pytest.raises(OSError, match=r"rendezvous"):
            waiting.send(memoryview(b"x"))
        call.tcp[1].inbox += held[0]
        world.settle()
        assert call.server.connection is waiting
        assert waiting.receiver.receive(100) == b"early"
        assert works(world, call)


@pytest.mark.parametrize("how", ["close", "abort"])
def test_an_ending_that_outruns_confirm(how: str) -> None:
    """The server's program receives the client's bytes and its end; A is answered (4.8.2, 2)."""
    with World() as world:
        client, server = world.side(), world.side()
        world.connect(client, server)
        call = world.call(client, server)
        held: list[bytes] = []
        world.until(lambda: call.server.state == "ACCEPTED")
        call.tcp[0].tamper = hold(held)
        world.until(lambda: isinstance(call.client.outcome, Established))
        call.client.connection.send(memoryview(b"last words"))
        getattr(call.client.connection, how)()
        world.settle()
        call.tcp[1].inbox += held[0]
        world.settle()
        connection = call.server.connection
        assert connection.receiver.receive(100) == b"last words"
        if how == "close":
            assert connection.receiver.at_eof
            connection.close()
        else:
            with pytest.raises(ConnectionResetError):
                connection.receiver.receive(100)
        world.settle()
        assert len(server.connections) == len(client.connections) == 1


@pytest.mark.parametrize("closes", [True, False])
def test_a_client_that_has_sent_and_gone_before_its_confirm_is_read(closes: bool) -> None:
    """The server's program receives the client's bytes and the end, as it would over TCP."""
    with World() as world:
        client, server = world.side(), world.side()
        world.connect(client, server)
        call = world.call(client, server)
        held: list[bytes] = []
        world.until(lambda: call.server.state == "ACCEPTED")
        call.tcp[0].tamper = hold(held)
        world.until(lambda: isinstance(call.client.outcome, Established))
        call.tcp[0].silent = True
        call.client.connection.send(memoryview(b"last words"))
        if closes:
            call.client.connection.close()
        world.settle()
        client.group.terminate()
        world.settle()
        assert not server.groups
        call.tcp[1].inbox += held[0]
        world.settle()
        receiver = call.server.connection.receiver
        assert receiver.receive(100) == b"last words"
        assert receiver.at_eof is closes
        if not closes:
            with pytest.raises(ConnectionResetError, match="no link"):
                receiver.receive(100)


@pytest.mark.parametrize("aborts", [True, False])
def test_a_client_that_has_sent_nothing_before_its_end_is_accepted(aborts: bool) -> None:
    """The server's program receives the connection and its error, as it would over TCP."""
    with World() as world:
        client, server = world.side(), world.side()
        world.connect(client, server)
        call = world.call(client, server)
        held: list[bytes] = []
        world.until(lambda: call.server.state == "ACCEPTED")
        call.tcp[0].tamper = hold(held)
        world.until(lambda: isinstance(call.client.outcome, Established))
        call.tcp[0].silent = True
        if aborts:
            call.client.connection.abort()
            world.settle()
        client.group.terminate()
        world.settle()
        call.tcp[1].inbox += held[0]
        world.settle()
        with pytest.raises(ConnectionResetError):
            call.server.connection.receiver.receive(100)


# --- roles ----------------------------------------------------------------------------------------


@pytest.mark.rfc("2.2/4", "2.2.3/2")
def test_link_groups_are_separate_by_role() -> None:
    """The client of the first contact stays the client of the group.  Connections in the other
    direction use another group."""
    with World() as world:
        one, two = world.side(), world.side()
        forth, back = world.connect(one, two), world.connect(two, one)
        assert [group.client for group in one.groups] == [True, False]
        assert [group.client for group in two.groups] == [False, True]
        again = world.connect(one, two), world.connect(two, one)
        assert len(one.groups) == len(two.groups) == 2
        for call in (forth, back, *again):
            assert works(world, call)


@pytest.mark.rfc("3.5.1.2/4")
def test_every_peer_has_a_group_of_its_own() -> None:
    with World() as world:
        server, *clients = (world.side() for _ in range(4))
        calls = [world.connect(client, server) for client in clients]
        assert len(server.groups) == 3
        rmbs = [rmb for group in server.groups for rmb in group.own_rmbs.pool.rmbs]
        assert len({id(rmb.memory) for rmb in rmbs}) == 3
        assert all(works(world, call) for call in calls)


# --- 4.4.2 and RKeys ------------------------------------------------------------------------------


@pytest.mark.rfc("4.4.2/2", "4.4.2/3", "4.4.2/5", "3.5.2/10", "3.5.2/11")
@pytest.mark.parametrize("end", [0, 1])
def test_an_element_in_use_given_again_resets_its_old_connection(end: int) -> None:
    """4.4.2: the side does not write to the old connection, and the new one continues."""
    kind = (clc.MessageType.CONFIRM, clc.MessageType.ACCEPT)[end]
    with World() as world:
        client, server = world.side(), world.side()
        first = world.connect(client, server)
        reader = first.ends[1 - end].connection
        owner = first.ends[end].connection
        call = world.call(client, server)
        index = owner.rmbe.index
        call.tcp[end].tamper = lambda d: d[:45] + bytes((index,)) + d[46:] if d[4] == kind else d
        record = (server, client)[end].record()
        world.until(lambda: call.ends[1 - end].outcome)
        assert reader.state == "CLOSED"
        with pytest.raises(OSError, match=r"reset"):
            reader.receiver.receive(1)
        assert first.tcp[1 - end].cut == "rst"
        assert not [event for event in record.events if event[0] == "write"]
        assert not [m for m in record.messages() if m[:2] == ("cdc", "out")]
        world.settle()
        assert call.states == ("ESTABLISHED", "ESTABLISHED")


@pytest.mark.parametrize("field", [slice(41, 45), slice(52, 60)], ids=["rkey", "address"])
@pytest.mark.parametrize("end", [0, 1])
def test_an_rkey_that_was_never_confirmed(end: int, field: slice) -> None:
    """3.5.5.2.1: on a subsequent contact, a CLC message must not contain an unknown RToken."""
    kind = (clc.MessageType.CONFIRM, clc.MessageType.ACCEPT)[end]

    def change(data: bytes) -> bytes:
        raw = bytearray(data)
        if raw[4] == kind:
            raw[field.start + 2] ^= 0x55
        return bytes(raw)

    with World() as world:
        client, server = world.side(), world.side()
        before = world.connect(client, server)
        call = world.call(client, server)
        call.tcp[end].tamper = change
        world.settle()
        assert call.ends[1 - end].state == "FAILED"
        assert "never confirmed" in str(call.ends[1 - end].error)
        world.finish()
        assert works(world, before)


@pytest.mark.rfc("3.5.2/12")
@pytest.mark.parametrize("place", [16, 32, 38], ids=["gid", "mac", "qp"])
def test_confirm_must_name_an_active_link(place: int) -> None:
    """3.5.2.3."""
    with World() as world:
        client, server = world.side(), world.side()
        before = world.connect(client, server)
        call = world.call(client, server)

        def change(data: bytes) -> bytes:
            raw = bytearray(data)
            if raw[4] == clc.MessageType.CONFIRM:
                raw[place] ^= 0x55
            return bytes(raw)

        call.tcp[0].tamper = change
        world.settle()
        assert call.server.state == "FAILED"
        assert "no active link" in str(call.server.error)
        with pytest.raises(OSError, match=r"reset|abort|no link"):
            call.client.connection.receiver.receive(1)
        world.pass_time(70)
        assert works(world, before)


def test_delete_rkey_of_an_rmb_in_use_resets_its_connections_only() -> None:
    with World() as world:
        client, server = world.side(), world.side()
        first = world.connect(client, server)
        other = world.connect(client, server, size=BIG)
        link = server.group.links[1]
        region = server.group.own_rmbs.region(first.server.connection.rmbe.rmb, link)
        record = client.record()
        link.send_llc(llc.DeleteRkey(rkeys=(region.rkey, 0x123)))
        with pytest.MonkeyPatch.context() as patch:
            # No side sends DELETE RKEY here, so its reply would be a protocol error.
            patch.setattr(server.group, "on_llc_untrusted", lambda *_: None)
            world.settle()
        reply = llc.decode_untrusted(record.messages()[1][2])
        assert isinstance(reply, llc.DeleteRkey)
        assert (reply.negative, reply.error_mask) == (True, 0x40)
        assert reply.rkeys == (region.rkey, 0x123)
        with pytest.raises(OSError, match=r"reset"):
            first.client.connection.receiver.receive(1)
        assert works(world, other)


def test_an_rmb_that_is_deleted_between_accept_and_confirm() -> None:
    with World() as world:
        client, server = world.side(), world.side()
        world.connect(client, server)
        call = world.call(client, server, size=BIG)
        world.until(lambda: call.client.state == "PREPARING")
        rkey = clc.decode_untrusted(bytes(call.tcp[0].taken)).rkey  # type: ignore[union-attr]
        deletion = llc.DeleteRkey(rkeys=(rkey,))
        client.group.rkeys.answer(PeerRequest(client.group.links[1], deletion, None, last=True))
        with pytest.MonkeyPatch.context() as patch:
            dispatch = server.group.on_llc_untrusted
            patch.setattr(
                server.group,
                "on_llc_untrusted",
                lambda link, data: None if data[0] == 9 else dispatch(link, data),
            )
            world.settle()
        assert call.client.state == "FAILED"
        world.finish()


def test_a_negative_confirm_rkey_reply_declines() -> None:
    """The peer has no room for another RKey.  This is no error, and the next connection may
    succeed."""
    with World() as world:
        client, server = world.side(), world.side()
        world.connect(client, server)
        world.fabric.tamper = on_replies(lambda m: [m[:3] + b"\xa0" + m[4:]])
        call = world.connect(client, server, size=BIG)
        assert call.states == ("FALLEN_BACK", "FALLEN_BACK")
        assert call.server.fallback.reason is FallbackReason.OUT_OF_RESOURCES
        world.fabric.tamper = None
        assert len(server.group.own_rmbs.pool.rmbs) == 1
        assert world.fabric.held["memory"] == 2
        assert world.connect(client, server, size=BIG).states == ("ESTABLISHED", "ESTABLISHED")


def test_a_retry_reply_is_retried_a_little_later() -> None:
    """3.5.5.3.1: the peer replies so while it changes its links."""
    replies = 0

    def refuse_twice(message: bytes) -> list[bytes]:
        nonlocal replies
        replies += 1
        return [message[:3] + b"\xb0" + message[4:]] if replies <= 2 else [message]

    with World() as world:
        client, server = world.side(), world.side()
        world.connect(client, server)
        world.fabric.tamper = on_replies(refuse_twice)
        call = world.call(client, server, size=BIG)
        assert world.finish() == pytest.approx(0.05 + 0.2)
        assert call.states == ("ESTABLISHED", "ESTABLISHED")
        assert replies == 4


def test_a_peer_that_always_replies_retry_is_given_up() -> None:
    with World() as world:
        client, server = world.side(), world.side()
        world.connect(client, server)
        world.fabric.tamper = on_replies(lambda m: [m[:3] + b"\xb0" + m[4:]])
        call = world.call(client, server, size=BIG)
        assert world.finish() == pytest.approx(0.05 + 0.2 + 0.8)
        assert call.states == ("FALLEN_BACK", "FALLEN_BACK")


@pytest.mark.rfc("C.7.1/time-outs/17")
def test_an_unanswered_confirm_rkey_fails_the_link_and_the_server_starts_over() -> None:
    """C.7.1: the connection becomes a first contact, because its group has ended."""
    lost: list[bytes] = []

    def lose_first(message: bytes) -> list[bytes]:
        lost.append(message)
        return [] if len(lost) == 1 else [message]

    with World() as world:
        client, server = world.side(), world.side()
        before = world.connect(client, server)
        world.fabric.tamper = on_replies(lose_first)
        record = client.record()
        call = world.call(client, server, size=BIG)
        assert world.finish() == pytest.approx(2.0)
        assert call.states == ("ESTABLISHED", "ESTABLISHED")
        assert record.messages()[-6][2][7] == 0x18  # SMC Accept, first contact
        with pytest.raises(OSError, match=r"abort|no link"):
            before.server.connection.receiver.receive(1)
        assert works(world, call)


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.rfc("3.5.3/1", "2.2.3/3")
def test_a_server_with_all_its_rmbs_opens_a_parallel_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """3.5.3; two groups share no RMB.  (The limit is 255, here 3.)"""
    with World() as world:
        client, server = world.side(), world.side()
        monkeypatch.setattr(own_rmbs, "MAX_RMBS", 3)
        calls = [world.connect(client, server, size=BIG) for _ in range(3)]
        assert len(server.groups) == 1
        calls.append(world.connect(client, server, size=BIG))
        assert len(server.groups) == len(client.groups) == 2
        # Connections use the second group as long as it has room, then the first if it has room.
        calls.append(world.connect(client, server, size=BIG))
        assert len(server.groups) == 2
        assert all(call.states == ("ESTABLISHED", "ESTABLISHED") for call in calls)
        assert all(works(world, call) for call in calls)
        for connection in calls[0].connections:
            connection.close()
        world.settle()
        again = world.connect(client, server, size=BIG)
        assert len(server.groups) == 2
        assert works(world, again)


def test_a_client_with_all_its_rmbs_declines(monkeypatch: pytest.MonkeyPatch) -> None:
    with World() as world:
        client, server = world.side(), world.side()
        world.connect(client, server)
        call = world.call(client, server, size=BIG)
        world.until(lambda: call.server.state == "ACCEPTED")
        monkeypatch.setattr(own_rmbs, "MAX_RMBS", 1)
        world.settle()
        assert call.states == ("FALLEN_BACK", "FALLEN_BACK")
        assert call.client.fallback.reason is FallbackReason.OUT_OF_RESOURCES


# --- groups that end during a rendezvous ----------------------------------------------------------


def test_many_first_contacts_at_once_are_one() -> None:
    """3.5.1.6: all other connections wait for the group, and are subsequent contacts."""
    with World() as world:
        client, server = world.side(), world.side()
        calls = [world.call(client, server) for _ in range(10)]
        world.until(lambda: calls[0].server.state == "CONFIRMING_LINK")
        assert [call.server.state for call in calls[1:]] == ["WAITING"] * 9
        world.settle()
        assert len(client.groups) == len(server.groups) == 1
        assert all(call.states == ("ESTABLISHED", "ESTABLISHED") for call in calls)
        assert all(works(world, call) for call in calls)


def test_if_the_first_contact_fails_the_next_connection_makes_one() -> None:
    with World() as world:
        client, server = world.side(), world.side()
        calls = [world.call(client, server) for _ in range(4)]
        world.until(lambda: calls[0].server.state == "ACCEPTED")
        calls[0].tcp[0].end("rst")
        world.settle()
        assert calls[0].states == ("FAILED", "FAILED")
        assert all(call.states == ("ESTABLISHED", "ESTABLISHED") for call in calls[1:])
        assert len(client.groups) == len(server.groups) == 1


def test_no_connection_waits_long_for_a_stalled_first_contact() -> None:
    """3.5.3: after two seconds the next connection opens a group of its own."""
    with World() as world:
        client, server = world.side(), world.side()
        stalled = world.call(client, server)
        world.until(lambda: stalled.server.state == "ACCEPTED")
        stalled.tcp[0].silent = stalled.tcp[1].silent = True
        call = world.call(client, server)
        world.pass_time(1.9)
        assert call.server.state == "WAITING"
        world.pass_time(0.2)
        assert call.states == ("ESTABLISHED", "ESTABLISHED")
        assert works(world, call)
        world.finish()
        assert len(server.groups) == 1


def test_waiting_ends_with_the_tcp_connection() -> None:
    with World() as world:
        client, server = world.side(), world.side()
        first, second = world.call(client, server), world.call(client, server)
        world.until(lambda: second.server.state == "WAITING")
        second.tcp[0].end("fin")
        world.settle()
        assert second.server.state == "FAILED"
        assert first.states == ("ESTABLISHED", "ESTABLISHED")
        handshakes_end = world.clock.now + Config().handshake_timeout  # links are only tested later
        assert server.stack.timers.next_deadline() > handshakes_end


def test_a_group_that_ends_while_the_server_prepares() -> None:
    """The connection starts again as a first contact."""
    with World() as world:
        client, server = world.side(), world.side()
        world.connect(client, server)
        call = world.call(client, server, size=BIG)
        world.until(lambda: call.server.state == "PREPARING")
        server.group.machine.send("links_lost")
        world.settle()
        assert call.states == ("ESTABLISHED", "ESTABLISHED")
        assert works(world, call)


@pytest.mark.rfc("C.1/1")
def test_a_group_that_ends_while_the_client_prepares() -> None:
    """C.1: the client can still decline instead of SMC Confirm."""
    with World() as world:
        client, server = world.side(), world.side()
        world.connect(client, server)
        call = world.call(client, server, size=BIG)
        world.until(lambda: call.client.state == "PREPARING")
        client.group.machine.send("links_lost")
        world.settle()
        assert call.states == ("FALLEN_BACK", "FALLEN_BACK")
        assert not server.groups


@pytest.mark.rfc("C.1/4", "C.3/4")
@pytest.mark.parametrize("knows", [True, False])
def test_a_group_that_ends_after_accept(knows: bool) -> None:
    """The server cannot decline any more (C.1).  It resets the connection, unless the client
    declines."""
    with World(announces_end=knows) as world:
        client, server = world.side(), world.side()
        world.connect(client, server)
        call = world.call(client, server)
        world.until(lambda: call.server.state == "ACCEPTED")
        if knows:
            server.group.machine.send("links_lost")
            world.settle()
            assert call.states == ("FALLEN_BACK", "FALLEN_BACK")
            assert call.client.fallback.reason is FallbackReason.OUT_OF_SYNC
        else:
            held: list[bytes] = []
            call.tcp[0].tamper = hold(held)
            world.until(lambda: call.client.outcome)
            server.group.machine.send("links_lost")
            world.tcp_changes.clear()
            call.tcp[1].inbox += held[0]
            world.settle()
            assert call.tcp[1].cut == "rst"
            for side in (call.server, call.client):
                with pytest.raises(OSError, match=r"reset|abort|no link"):
                    side.connection.receiver.receive(1)
        assert not client.groups


@pytest.mark.rfc("C.1/5", "C.3/4")
def test_a_group_that_ends_while_confirm_is_on_its_way_out() -> None:
    with World() as world:
        client, server = world.side(), world.side()
        world.connect(client, server)
        call = world.call(client, server)
        world.until(lambda: call.client.state == "CONFIRMED")
        client.group.machine.send("links_lost")
        world.settle()
        assert call.client.state == "FAILED"
        assert "link failed" in str(call.client.error)
        world.finish()


def test_terminating_groups_accept_no_connection() -> None:
    with World() as world:
        client, server = world.side(), world.side()
        world.connect(client, server)
        call = world.call(client, server, size=BIG)
        world.until(lambda: call.server.state == "PREPARING")
        server.group.terminate()
        world.settle()
        assert call.states == ("ESTABLISHED", "ESTABLISHED")
        assert [group.state for group in server.groups] == ["SINGLE"]
        assert works(world, call)


def test_a_group_without_idle_time_waits_for_a_coming_connection() -> None:
    """3.5.4: the last connection ends while a new RMB is being confirmed."""
    with World() as world:
        client, server = world.side(), world.side(Config(link_group_idle=0, llc_timeout=8))
        first = world.connect(client, server)
        held: list[bytes] = []
        keep = hold(held)
        world.fabric.tamper = on_replies(lambda m: [keep(m)][:0])
        call = world.call(client, server, size=BIG)
        world.pass_time(1.0)
        for connection in first.connections:
            connection.close()
        world.pass_time(4.0)
        assert server.group.state == "SINGLE"
        server.group.on_llc_untrusted(server.group.links[1], held[0])
        world.fabric.tamper = None
        world.settle()
        assert call.states == ("ESTABLISHED", "ESTABLISHED")


def test_an_idle_group_is_not_ended_while_a_connection_comes() -> None:
    """3.5.4: the timer ends while a new RMB is being confirmed."""
    with World() as world:
        config = Config(link_group_idle=10, llc_timeout=8)
        client, server = world.side(), world.side(config)
        first = world.connect(client, server)
        for connection in first.connections:
            connection.close()
        world.settle()
        held: list[bytes] = []
        keep = hold(held)
        world.fabric.tamper = on_replies(lambda m: [keep(m)][:0])
        world.pass_time(7.0)
        call = world.call(client, server, size=BIG)
        world.pass_time(4.0)
        assert server.group.state == "SINGLE"
        server.group.on_llc_untrusted(server.group.links[1], held[0])
        world.fabric.tamper = None
        world.settle()
        assert call.states == ("ESTABLISHED", "ESTABLISHED")
