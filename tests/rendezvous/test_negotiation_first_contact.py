"""First contact of two whole stacks: figures 8 and 9 message by message, and the resources that
each side has committed at each message (RFC 7609, 3.5.1; A.2, A.3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.rendezvous.rendezvous_pair import SIZE, Recorder, Side, World, exchange
from tests.rendezvous.transcripts import line
from tests.rnic.memory_rnic import PlainQueuePair
from trio_smc._base.reasons import FallbackReason, Origin
from trio_smc.config.config import Config
from trio_smc.wire import clc, llc


class QpRecorder(Recorder):
    """Records the states of the side's queue pairs at each message."""

    def __init__(self, side: Side) -> None:
        super().__init__()
        self.side = side
        self.qps: list[tuple[str, list[str]]] = []

    def clc(self, connection: object, outgoing: bool, message: bytes) -> None:
        super().clc(connection, outgoing, message)
        self._note()

    def llc(self, link: object, outgoing: bool, message: bytes) -> None:
        super().llc(link, outgoing, message)
        self._note()

    def _note(self) -> None:
        states = [qp.state.value for qp in self.side.rnic.qps.values()]
        self.qps.append((line(self.events[-1]), states))


@pytest.mark.rfc("3.5.1.6/3", "3.5.1.6/5", "3.5.1.6.1/1", "A.3.2/2", "3.5.1.3/2", "3.5.1.5/1")
def test_figure_8_with_the_second_link_rejected() -> None:
    """The whole transcript of both sides, in order (figures 8 and 9; 3.5.1.6.1)."""
    with World() as world:
        client, server = world.side(), world.side()
        at_client, at_server = client.record(), server.record()
        call = world.connect(client, server)
        assert call.states == ("ESTABLISHED", "ESTABLISHED")
        assert [line(each) for each in at_client.messages()] == [
            "out PROPOSAL",
            "in ACCEPT",
            "out CONFIRM",
            "in CONFIRM_LINK",
            "out CONFIRM_LINK reply",
            "in ADD_LINK",
            "out ADD_LINK reply",
        ]
        mirrored = {"out": "in", "in": "out"}
        assert [(kind, mirrored[way], data) for kind, way, data in at_client.messages()] == (
            at_server.messages()
        )
        assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")
        assert [line(each) for each in at_client.messages()[7:]] == ["out CDC", "in CDC"]


@pytest.mark.rfc(
    "A.3.1/2",
    "A.4/6",
    "2.1/6",
    "3.2/3",
    "3.2/4",
    "3.5.1.2/6",
    "3.5.1.3/2",
    "3.5.1.5/1",
    "3.5.1.5/2",
    "3.5.1.5/4",
    "A.2/1",
    "A.2.3/1",
    "A.2.3/2",
    "A.2.3/3",
    "A.2.3/4",
    "A.2.4/1",
    "A.2.4/2",
)
def test_the_brackets_of_figure_8() -> None:
    with World() as world:
        client, server = world.side(), world.side()
        record = client.record()
        call = world.connect(client, server)
        data = [message for _, _, message in record.messages()]
        proposal, accept, confirm = (clc.decode_untrusted(each) for each in data[:3])
        request, reply, add, rejection = (llc.decode_untrusted(each) for each in data[3:])
        (server_qp,) = server.rnic.qps.values()
        (client_qp,) = client.rnic.qps.values()

        assert proposal == call.proposal
        assert (len(data[0]), len(data[1]), len(data[2])) == (52, 68, 68)
        assert isinstance(accept, clc.Accept)
        assert isinstance(confirm, clc.Confirm)
        assert (data[1][7], data[2][7]) == (0x18, 0x10)
        for message, side, qp in ((accept, server, server_qp), (confirm, client, client_qp)):
            group, rmb = side.group, side.group.own_rmbs.pool.rmbs[0]
            region = group.own_rmbs.region(rmb, group.links[1])
            assert message.peer_id == side.stack.groups.peer_id
            assert (message.gid, message.mac) == (side.rnic.gid, side.rnic.mac)
            assert (message.qp_number, message.initial_psn) == (qp.qp_num, group.links[1].psn)
            assert (message.rkey, message.rmb_address) == (region.rkey, region.address)
            assert (message.rmbe_index, message.buffer_size, message.qp_mtu) == (1, 1 << 20, 5)
            assert [message.alert_token] == list(group.connections)

        assert isinstance(request, llc.ConfirmLink)
        assert isinstance(reply, llc.ConfirmLink)
        assert (data[3][3], data[4][3]) == (0x03, 0x83)
        assert (request.gid, request.qp_number) == (server.rnic.gid, server_qp.qp_num)
        assert (reply.gid, reply.qp_number) == (client.rnic.gid, client_qp.qp_num)
        assert (request.link_number, reply.link_number) == (1, 1)
        assert (request.max_links, reply.max_links) == (8, 8)
        assert client.group.links[1].peer_user_id == request.link_user_id
        assert server.group.links[1].peer_user_id == reply.link_user_id

        assert isinstance(add, llc.AddLink)
        assert isinstance(rejection, llc.AddLink)
        assert (add.link_number, add.gid, add.qp_mtu) == (2, server.rnic.gid, 5)
        assert add.qp_number not in (0, server_qp.qp_num)
        assert data[6][2:4] == bytes((llc.AddLinkReason.NO_ALTERNATE_PATH, 0xC0))
        assert rejection.link_number == 2


@pytest.mark.rfc("3.5.1.2/6", "3.5.1.3/2", "3.5.1.4/1", "3.5.1.5/4")
def test_queue_pairs_take_their_states_when_the_peer_counts_on_them() -> None:
    """3.5.1.2-3.5.1.5: the server is in INIT before Accept, the client in RTR before Confirm, the
    server in RTS on Confirm, and the client in RTS on CONFIRM LINK.  The server frees the queue
    pair that it has offered by ADD LINK when the client rejects it."""
    with World() as world:
        client, server = world.side(), world.side()
        at_client = client.stack.groups.observer = QpRecorder(client)
        at_server = server.stack.groups.observer = QpRecorder(server)
        world.connect(client, server)
        assert at_client.qps == [
            ("out PROPOSAL", []),
            ("in ACCEPT", []),
            ("out CONFIRM", ["RTR"]),
            ("in CONFIRM_LINK", ["RTR"]),
            ("out CONFIRM_LINK reply", ["RTS"]),
            ("in ADD_LINK", ["RTS"]),
            ("out ADD_LINK reply", ["RTS"]),
        ]
        assert at_server.qps == [
            ("in PROPOSAL", []),
            ("out ACCEPT", ["INIT"]),
            ("in CONFIRM", ["INIT"]),
            ("out CONFIRM_LINK", ["RTS"]),
            ("in CONFIRM_LINK reply", ["RTS"]),
            ("out ADD_LINK", ["RTS", "INIT"]),
            ("in ADD_LINK reply", ["RTS", "INIT"]),
        ]
        assert [qp.state.value for qp in server.rnic.qps.values()] == ["RTS"]


def test_receives_are_posted_before_the_peer_may_send() -> None:
    with World() as world:
        client, server = world.side(), world.side()
        call = world.call(client, server)
        world.until(lambda: call.client.state == "CONFIRMING_LINK")
        (qp,) = client.rnic.qps.values()
        assert qp.receives == qp.receive_depth


@pytest.mark.rfc("3.5.1.2/2")
def test_the_client_allocates_nothing_before_accept() -> None:
    """3.5.1.2: the client commits no local resources at this point."""
    with World() as world:
        client, server = world.side(), world.side()
        call = world.call(client, server)
        world.until(lambda: call.server.state == "ACCEPTED")
        assert not client.groups
        assert world.fabric.held == {"memory": 1, "pd": 1, "region": 1, "qp": 1}
        world.finish()


@pytest.mark.rfc("4.2/2")
@pytest.mark.parametrize("catchers", [(False, False), (True, False), (False, True), (True, True)])
def test_both_sides_have_eye_catchers_or_neither(catchers: tuple[bool, bool]) -> None:
    """The RFC does not define the bits for "no eye catcher".  They count only if both sides send
    them."""
    with World() as world:
        client, server = (world.side(Config(rmbe_eye_catcher=each)) for each in catchers)
        record = client.record()
        call = world.connect(client, server)
        flags = [message[3] for kind, _, message in record.messages() if kind == "llc"][:2]
        assert flags == [0x00 if catchers[1] else 0x03, 0x80 if any(catchers) else 0x83]
        assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")
        # On later contacts the agreement of the group holds.
        again = world.connect(client, server)
        assert exchange(world, again, (b"one", b"two")) == (b"two", b"one")
        cursors = [message[12:16] for kind, way, message in record.messages() if kind == "cdc"]
        assert len(cursors) == 4
        for side in (client, server):
            (rmb,) = side.group.own_rmbs.pool.rmbs
            assert rmb.eye_catcher is any(catchers)
            assert all(each.first == 4 * any(catchers) for each in rmb.elements)
            assert all(each.check_eye_catcher() for each in rmb.elements)
            # The agreement also holds for later RMBs.
            side.group.request_element(4 * SIZE, lambda _: None)
        world.settle()
        for side in (client, server):
            assert side.group.own_rmbs.pool.rmbs[1].eye_catcher is any(catchers)


@pytest.mark.rfc("A.3.1/3")
@pytest.mark.parametrize("number", [0, 1, 7, 255])
def test_the_server_numbers_links(number: int) -> None:
    """3.5.1.5; older servers count from 0."""

    def renumber(qp: PlainQueuePair, message: bytes) -> list[bytes]:
        if message[0] != llc.MessageType.CONFIRM_LINK:
            return [message]
        other = number if message[29] == 1 and qp.rnic is server.rnic else 1
        return [message[:29] + bytes((other,)) + message[30:]]

    with World() as world:
        client, server = world.side(), world.side()
        world.fabric.tamper = renumber
        call = world.connect(client, server)
        assert list(client.group.links) == [number]
        assert client.group.links[number].number == number
        assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")
        # The RTokens belong to the link: an existing RMB is found under the new number.
        again = world.connect(client, server)
        assert exchange(world, again, (b"one", b"two")) == (b"two", b"one")


def answer(kind: llc.MessageType, change: Callable[[Any], Any]) -> Any:
    """Return a function that changes replies of one type."""

    def tamper(_: PlainQueuePair, message: bytes) -> list[bytes]:
        if message[0] == kind and message[3] & 0x80:
            return [change(message)]
        return [message]

    return tamper


def test_an_accepted_second_link_is_deleted_before_data_flows() -> None:
    """A peer with a second RNIC may accept the link.  The server deletes it, and waits for the
    reply to DELETE LINK before it establishes the connection (C.7.1)."""
    with World() as world:
        client, server = world.side(), world.side()
        record = server.record()
        world.fabric.tamper = answer(
            llc.MessageType.ADD_LINK, lambda m: m[:2] + b"\0\x80" + m[4:28] + b"\0\0\x09" + m[31:]
        )
        call = world.call(client, server)
        world.until(lambda: "out DELETE_LINK" in map(line, record.messages()))
        request = llc.decode_untrusted(record.messages()[-1][2])
        assert isinstance(request, llc.DeleteLink)
        assert (request.link_number, request.all_links) == (2, False)
        assert request.reason == llc.DeleteLinkReason.LOST_PATH
        assert call.server.state == "CONFIRMING_LINK"
        world.finish()
        assert line(record.messages()[-1]) == "in DELETE_LINK reply"
        assert call.states == ("ESTABLISHED", "ESTABLISHED")
        assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")
        assert list(server.group.links) == [1]


def test_an_accepted_second_link_that_cannot_be_deleted_ends_everything() -> None:
    """C.7.1, DELETE LINK from server: the link of the request is not usable either."""
    accepted = answer(
        llc.MessageType.ADD_LINK, lambda m: m[:2] + b"\0\x80" + m[4:28] + b"\0\0\x09" + m[31:]
    )

    def tamper(qp: PlainQueuePair, message: bytes) -> list[bytes]:
        if message[0] == llc.MessageType.DELETE_LINK:
            return []
        return list(accepted(qp, message))

    with World() as world:
        client, server = world.side(), world.side()
        world.fabric.tamper = tamper
        call = world.call(client, server)
        assert world.finish() == pytest.approx(5.0)
        assert call.server.state == "FAILED"
        assert not server.groups
        world.settle()
        with pytest.raises(OSError, match=r"reset|abort|no link"):
            call.client.connection.send(memoryview(b"x"))


def test_a_server_without_a_second_queue_pair_offers_queue_pair_0() -> None:
    """The client waits for ADD LINK (C.7.1), so the server must send one."""
    with World() as world:
        client, server = world.side(), world.side(most_qps=1)
        record = client.record()
        call = world.connect(client, server)
        add = llc.decode_untrusted(record.messages()[5][2])
        assert isinstance(add, llc.AddLink)
        assert (add.qp_number, add.qp_mtu) == (0, 0)
        assert call.states == ("ESTABLISHED", "ESTABLISHED")


def test_add_link_with_a_reserved_mtu_gets_reason_2() -> None:
    """C.7.1, ADD LINK."""

    def tamper(_: PlainQueuePair, message: bytes) -> list[bytes]:
        if message[0] == llc.MessageType.ADD_LINK and not message[3] & 0x80:
            return [message[:32] + b"\x07" + message[33:]]
        return [message]

    with World() as world:
        client, server = world.side(), world.side()
        record = client.record()
        world.fabric.tamper = tamper
        call = world.connect(client, server)
        assert record.messages()[6][2][2:4] == b"\x02\xc0"
        assert call.states == ("ESTABLISHED", "ESTABLISHED")


@pytest.mark.rfc("2.2.2/7")
@pytest.mark.parametrize("limit", [0, 1, 2, 3, 255])
def test_the_link_limit_is_at_least_2(limit: int) -> None:
    """3.5.1.5; 0 stands for the limit that the server has sent."""
    with World() as world:
        client, server = world.side(), world.side()
        world.fabric.tamper = answer(
            llc.MessageType.CONFIRM_LINK, lambda m: m[:34] + bytes((limit,)) + m[35:]
        )
        call = world.connect(client, server)
        counts = {0: 8, 1: 2, 255: 8}.get(limit, limit)
        assert server.group.setup.max_links == counts
        assert call.states == ("ESTABLISHED", "ESTABLISHED")


@pytest.mark.rfc("A.2/4")
def test_a_proposal_of_version_2_is_answered_as_version_1() -> None:
    """92 bytes, as newer kernels send them even when they offer version 1 only."""
    with World() as world:
        client, server = world.side(), world.side()
        proposal = clc.Proposal(
            version=2,
            flags=0x08,
            peer_id=client.stack.groups.peer_id,
            gid=client.rnic.gid,
            mac=client.rnic.mac,
            ipv4_subnet=b"\x0a\0\0\0",
            ipv4_mask_length=8,
        )
        assert len(proposal.encode()) == 92
        record = server.record()
        call = world.connect(client, server, proposal=proposal)
        accept = record.messages()[1][2]
        assert (len(accept), accept[7]) == (68, 0x18)
        assert call.states == ("ESTABLISHED", "ESTABLISHED")
        refused = world.connect(
            client, server, proposal=proposal, refusal=FallbackReason.PREFIX_MISMATCH
        )
        decline = record.messages()[-1][2]
        assert (len(decline), decline[7]) == (28, 0x10)
        assert refused.states == ("FALLEN_BACK", "FALLEN_BACK")


@pytest.mark.parametrize("more", [None, (1, 2, 3, 4)])
def test_declines_of_both_lengths_are_read(more: tuple[int, int, int, int] | None) -> None:
    with World() as world:
        client, server = world.side(), world.side()
        decline = clc.Decline(
            version=1 if more is None else 2,
            peer_id=server.stack.groups.peer_id,
            diagnosis=0x03030000,
            more_diagnosis=more,
        ).encode()
        call = world.call(client, server)
        call.tcp[1].tamper = lambda _: decline + b"and at once the application"
        world.until(lambda: call.client.outcome)
        assert call.client.fallback.origin is Origin.PEER
        assert call.client.fallback.reason is FallbackReason.NO_RNIC
        assert call.client.fallback.peer_code == 0x03030000
        assert call.tcp[0].receive(100) == b"and at once the application"
        call.tcp[0].end("fin")
        world.finish()


@pytest.mark.rfc("2.2.3/2")
def test_a_stack_connects_to_itself_in_both_roles() -> None:
    with World() as world:
        side = world.side()
        call = world.connect(side, side)
        assert call.states == ("ESTABLISHED", "ESTABLISHED")
        assert sorted(group.client for group in side.groups) == [False, True]
        assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")
