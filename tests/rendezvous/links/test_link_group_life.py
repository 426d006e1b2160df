"""A link group from its first idle second to its end: TEST LINK, DELETE LINK, RKey exchanges at the
same time, the loss of the last link (RFC 7609, 3.5.4, 3.5.5, 4.5.3, 4.8.3, C.7.1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container
from typing import Any

import pytest

from tests.rendezvous.rendezvous_pair import SIZE, Side, World, exchange
from tests.rendezvous.transcripts import line
from tests.rnic.memory_rnic import PlainMemory, PlainQueuePair
from trio_smc.config.config import Config
from trio_smc.datapath.connection import Connection
from trio_smc.rendezvous.links.link import Link
from trio_smc.streams.group_views import LinkGroupView
from trio_smc.wire import llc

TEST_LINK = llc.MessageType.TEST_LINK
BIG = 4 * SIZE


def link_of(side: Side) -> Link:
    (link,) = side.group.links.values()
    return link


def lose(kind: llc.MessageType, *, reply: bool) -> Callable[[PlainQueuePair, bytes], list[bytes]]:
    def tamper(_: PlainQueuePair, message: bytes) -> list[bytes]:
        lost = message[0] == kind and bool(message[3] & 0x80) is reply
        return [] if lost else [message]

    return tamper


def is_broken(connection: Connection) -> bool:
    with pytest.raises(OSError, match=r"abort|reset|no link"):
        connection.receiver.receive(1)
    return connection.state == "CLOSED"


def transcript(side: Side) -> list[str]:
    """The LLC messages."""
    return [line(each) for each in side.recorder.messages() if each[0] == "llc"]


def alternative(**fields: Any) -> Config:
    """A configuration whose side does not test links, so that only the other side's tests count."""
    return Config(test_link_interval=10_000, **fields)


# --- TEST LINK ------------------------------------------------------------------------------------


@pytest.mark.rfc("4.5.3/1", "A.3.8/1", "3.5.1.5/5")
def test_an_idle_link_is_tested() -> None:
    """4.5.3: the side tests after 30 s without a message, and the reply echoes the request."""
    with World() as world:
        client, server = world.side(alternative()), world.side()
        world.connect(client, server)
        record = server.record()
        world.pass_time(29.0)
        assert record.messages() == []
        world.pass_time(9.0)  # a link checks four times in an interval if a message has arrived
        assert transcript(server) == ["out TEST_LINK", "in TEST_LINK reply"]
        request, reply = (data for _, _, data in record.messages())
        assert request[4:20] == reply[4:20]
        assert any(request[4:20])
        world.pass_time(305.0)
        tests = [each for each in transcript(server) if "TEST_LINK" in each]
        assert tests == ["out TEST_LINK", "in TEST_LINK reply"] * 10
        assert link_of(server).state == "ACTIVE"


def test_a_busy_link_is_not_tested() -> None:
    with World() as world:
        client, server = world.side(), world.side()
        call = world.connect(client, server)
        client.record()
        for _ in range(20):
            assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")
            world.pass_time(20.0)
        assert "out TEST_LINK" not in transcript(client)


@pytest.mark.rfc("C.7.1/time-outs/18", "C.7.1/time-outs/19", "4.8.3/2")
@pytest.mark.parametrize("lost", ["request", "reply"])
@pytest.mark.parametrize("end", [0, 1])
def test_a_test_without_reply_ends_the_group_on_both_sides(end: int, lost: str) -> None:
    """C.7.1, TEST LINK: the last link fails, which resets its connections (4.8.3)."""
    with World() as world:
        configs = [alternative(), alternative()]
        configs[end] = Config()
        client, server = (world.side(config) for config in configs)
        call = world.connect(client, server)
        world.fabric.tamper = lose(TEST_LINK, reply=lost == "reply")
        start = world.clock.now
        world.pass_time_until(lambda: not (client, server)[end].groups)
        assert world.clock.now - start == pytest.approx(39.5)
        assert not client.groups
        assert not server.groups
        assert [is_broken(each) for each in call.connections] == [True, True]
        assert [tcp.cut for tcp in call.tcp] == ["rst", "rst"]
        assert not any(world.fabric.held.values())


@pytest.mark.rfc("C.7.1/messages/10")
def test_a_reply_with_other_data_is_a_protocol_error() -> None:
    """C.7.1, TEST LINK reply."""
    with World() as world:
        client, server = world.side(alternative()), world.side()
        call = world.connect(client, server)

        def change(_: PlainQueuePair, message: bytes) -> list[bytes]:
            if message[0] == TEST_LINK and message[3] & 0x80:
                return [message[:19] + bytes((message[19] ^ 1,)) + message[20:]]
            return [message]

        world.fabric.tamper = change
        world.pass_time(70.0)
        assert not server.groups
        assert is_broken(call.server.connection)


@pytest.mark.rfc("C.7.1/messages/14")
@pytest.mark.parametrize("end", [0, 1])
def test_a_reply_without_a_request_is_ignored(end: int) -> None:
    """Such replies, in any number, count as received messages, and answer no later test."""
    with World() as world:
        configs = [alternative(), alternative()]
        configs[1 - end] = Config()
        sides = [world.side(config) for config in configs]
        call = world.connect(*sides)
        for byte in range(5):
            link_of(sides[end]).send_llc(llc.TestLink(reply=True, user_data=bytes((byte,)) * 16))
            world.settle()
        assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")
        sides[1 - end].record()
        world.pass_time(70.0)
        assert transcript(sides[1 - end])[:2] == ["out TEST_LINK", "in TEST_LINK reply"]
        assert link_of(sides[1 - end]).state == "ACTIVE"


@pytest.mark.rfc("C.7.1/messages/10")
def test_a_reply_without_a_request_answers_no_test() -> None:
    """During a test, a reply with other data is a protocol error."""
    with World() as world:
        client, server = world.side(alternative()), world.side()
        call = world.connect(client, server)
        world.fabric.tamper = lose(TEST_LINK, reply=False)
        world.pass_time_until(lambda: link_of(server).state == "TESTING")
        link_of(client).send_llc(llc.TestLink(reply=True, user_data=bytes(16)))
        world.settle()
        assert not server.groups
        assert is_broken(call.server.connection)


# --- the end of a group ---------------------------------------------------------------------------


@pytest.mark.rfc("A.3.4/4", "A.3.4/5", "A.3.4/8")
@pytest.mark.parametrize("end", [0, 1])
@pytest.mark.parametrize(
    ("call", "flags", "number", "reason"),
    [
        (lambda view: view.delete_link(2), 0x20, 2, 0x00020000),
        (lambda view: view.terminate(), 0x60, 0, 0x00030000),
    ],
    ids=["delete_link", "terminate"],
)
def test_the_reasons_of_the_calls_that_users_have(
    end: int, call: Callable[[LinkGroupView], None], flags: int, number: int, reason: int
) -> None:
    with World() as world:
        sides = [world.side(rnics=2) for _ in range(2)]
        world.connect(*sides)
        assert list(sides[end].group.links) == [1, 2]
        record = sides[end].record()
        call(LinkGroupView(sides[end].group, lambda: None))
        world.settle()
        deletions = [data for kind, way, data in record.messages() if (kind, way) == ("llc", "out")]
        first = deletions[0]
        assert (first[0], first[3], first[4]) == (4, flags, number)
        assert int.from_bytes(first[5:9], "big") == reason


@pytest.mark.rfc("3.5.4/3", "3.5.4/4", "A.3.4/3", "A.3.4/5")
@pytest.mark.parametrize("client_has_connections", [False, True])
def test_the_server_ends_a_group(client_has_connections: bool) -> None:
    """3.5.4: on DELETE LINK for all, the client complies at once, and sends nothing."""
    with World() as world:
        client, server = world.side(), world.side()
        call = world.connect(client, server)
        if not client_has_connections:
            for connection in call.connections:
                connection.close()
            world.settle()
        client.record()
        server.record()
        server.group.terminate()
        world.settle()
        assert transcript(client) == ["in DELETE_LINK"]
        (data,) = (data for kind, _, data in client.recorder.messages() if kind == "llc")
        assert (data[3], data[4], data[5:9]) == (0x60, 0, bytes.fromhex("00030000"))
        assert not client.groups
        assert not server.groups
        assert not any(world.fabric.held.values())
        if client_has_connections:
            assert [is_broken(each) for each in call.connections] == [True, True]


@pytest.mark.rfc("3.5.4/5", "A.3.4/5", "A.3.4/8")
@pytest.mark.parametrize("reason", [0x10000, 0x20000, 0x30000, 0x40000, 0xDEADBEEF])
def test_the_server_gives_the_clients_reason_for_the_end_of_a_group(reason: int) -> None:
    """A.3.4: the reason code is that of the termination, which the client has given."""
    with World() as world:
        client, server = world.side(), world.side()
        world.connect(client, server)
        client.record()
        link = client.group.links[1]
        link.send_llc(llc.DeleteLink(all_links=True, reason=reason))
        world.settle()
        request, answer = (data for kind, _, data in client.recorder.messages() if kind == "llc")
        assert request[5:9] == answer[5:9] == reason.to_bytes(4, "big")
        assert not client.groups
        assert not server.groups


@pytest.mark.rfc("3.5.4/2", "3.5.4/5", "3.5.4/6")
def test_the_client_requests_the_end_of_a_group() -> None:
    """3.5.4: the server complies with a DELETE LINK of its own."""
    with World() as world:
        client, server = world.side(), world.side()
        call = world.connect(client, server)
        client.record()
        client.group.terminate()
        assert client.group.state == "TERMINATING"
        world.settle()
        assert transcript(client) == ["out DELETE_LINK", "in DELETE_LINK"]
        flags = [data[3] for kind, _, data in client.recorder.messages() if kind == "llc"]
        assert flags == [0x60, 0x60]
        assert not client.groups
        assert not server.groups
        assert [is_broken(each) for each in call.connections] == [True, True]


def test_both_sides_end_a_group_at_once() -> None:
    with World() as world:
        client, server = world.side(), world.side()
        world.connect(client, server)
        client.group.terminate()
        server.group.terminate()
        world.settle()
        assert not client.groups
        assert not server.groups


@pytest.mark.rfc("C.7.1/time-outs/14")
@pytest.mark.parametrize("end", [0, 1])
def test_a_peer_that_is_gone_does_not_keep_a_group_from_ending(end: int) -> None:
    """C.7.1: without an answer, the side ends the group itself."""
    with World(announces_end=False) as world:
        client, server = world.side(), world.side()
        world.connect(client, server)
        world.fabric.tamper = lambda *_: []
        side = (client, server)[end]
        side.group.terminate()
        world.pass_time(2.1)
        assert not side.groups


@pytest.mark.rfc("3.5.4/1")
@pytest.mark.parametrize(("end", "seconds"), [(0, 610.0), (1, 600.0)])
def test_idle_groups_end(end: int, seconds: float) -> None:
    """3.5.4: the server ends the group; if it does not, the client does so ten seconds later."""
    with World() as world:
        configs = [Config(link_group_idle=100_000)] * 2
        configs[end] = Config()
        client, server = (world.side(config) for config in configs)
        call = world.connect(client, server)
        start = world.clock.now
        world.pass_time(1000.0)
        assert len(server.groups) == 1  # a connection keeps the group
        for connection in call.connections:
            connection.close()
        world.settle()
        start = world.clock.now
        world.pass_time_until(lambda: not client.groups)
        assert world.clock.now - start == pytest.approx(seconds)
        assert not server.groups
        # The next connection is a first contact.
        assert world.connect(client, server).states == ("ESTABLISHED", "ESTABLISHED")


def test_a_connection_in_time_keeps_an_idle_group() -> None:
    with World() as world:
        client, server = world.side(), world.side()
        for _ in range(4):
            call = world.connect(client, server)
            for connection in call.connections:
                connection.close()
            world.pass_time(500.0)
            assert len(server.groups) == 1


@pytest.mark.rfc("4.8.3/2")
@pytest.mark.parametrize("announces_end", [False, True])
@pytest.mark.parametrize("end", [0, 1])
def test_the_last_links_loss_frees_everything(end: int, announces_end: bool) -> None:
    """4.8.3: its connections get an error, and their TCP connections are reset."""
    with World(announces_end=announces_end) as world:
        client, server = world.side(), world.side()
        calls = [world.connect(client, server) for _ in range(6)]
        next(iter((client, server)[end].rnic.qps.values())).to_err()
        world.pass_time(70.0)
        assert not client.groups
        assert not server.groups
        for call in calls:
            assert [is_broken(each) for each in call.connections] == [True, True]
        assert not any(world.fabric.held.values())
        assert not client.connections
        assert not server.connections


@pytest.mark.pure
@pytest.mark.parametrize("leave", [False, True])
def test_the_end_of_many_connections_takes_many_turns(
    monkeypatch: pytest.MonkeyPatch, leave: bool
) -> None:
    """One turn ends connections and frees RMBs for one millisecond.  The end of the stack ends all
    remaining ones at once."""
    with World() as world:
        client, server = world.side(alternative()), world.side(alternative())
        for _ in range(20):
            world.connect(client, server)
        group, connections = server.group, set(server.connections)
        memories = {rmb.memory for rmb in group.own_rmbs.pool.rmbs}
        assert len(connections) == 20
        assert len(memories) >= 5
        turns = [Counter[str]()]

        def slow(owner: type, name: str, of_server: Container[object]) -> None:
            whole: Callable[..., None] = getattr(owner, name)

            def work(self: object, **options: object) -> None:
                whole(self, **options)
                if self in of_server:
                    turns[-1][name] += 1
                    world.clock.now += 0.0004

            monkeypatch.setattr(owner, name, work)

        slow(Connection, "links_lost", connections)
        slow(PlainMemory, "close", memories)
        link_of(server).machine.send("failed")
        while server.groups:
            assert group.state == "GONE"
            if leave and turns[-1]["close"]:
                server.free()
                break
            turns.append(Counter())
            world.clock.now = server.stack.timers.next_deadline()
            server.stack.timers.run_due()
        else:
            assert max(turn.total() for turn in turns) == 3
        assert sum(turns, Counter()) == Counter(links_lost=20, close=len(memories))
        assert not server.groups
        assert not server.connections


def test_a_connection_that_was_closed_on_both_sides_never_breaks() -> None:
    with World() as world:
        client, server = world.side(), world.side()
        call = world.connect(client, server)
        call.client.connection.send(memoryview(b"all of it"))
        world.settle()
        call.client.connection.close()
        world.settle()
        connection = call.server.connection
        link_of(client).machine.send("failed")
        world.settle()
        assert not server.groups
        assert connection.receiver.receive(100) == b"all of it"
        assert connection.receiver.receive(100) == b""


# --- DELETE LINK of one link ----------------------------------------------------------------------


@pytest.mark.rfc("3.5.5.1.3/3", "3.5.5.1.3/4", "3.5.5.1.3/5")
def test_the_server_deletes_the_only_link() -> None:
    """3.5.5.1.3: the server keeps the link's resources until the reply."""
    with World() as world:
        client, server = world.side(), world.side()
        call = world.connect(client, server)
        server.record()
        server.group.deletion.delete_link(1)
        assert server.group.exchanges.state == "DELETE_LINK"
        assert world.fabric.held["qp"] == 2
        world.settle()
        assert transcript(server) == ["out DELETE_LINK", "in DELETE_LINK reply"]
        request, reply = (data for _, _, data in server.recorder.messages())
        assert (request[3], request[4], request[5:9]) == (0x20, 1, bytes.fromhex("00020000"))
        assert (reply[3], reply[4]) == (0x80, 1)
        assert not server.groups
        assert not client.groups
        assert [is_broken(each) for each in call.connections] == [True, True]


@pytest.mark.rfc("3.5.5.1.4/1", "3.5.5.3/5", "A.3.4/2", "2.2.3/4")
def test_the_client_requests_the_deletion_of_the_only_link() -> None:
    """Figure 11."""
    with World() as world:
        client, server = world.side(), world.side()
        world.connect(client, server)
        client.record()
        client.group.deletion.delete_link(1)
        world.settle()
        assert transcript(client) == ["out DELETE_LINK", "in DELETE_LINK", "out DELETE_LINK reply"]
        assert not server.groups
        assert not client.groups


@pytest.mark.rfc("C.7.1/time-outs/13", "C.7.1/time-outs/15")
@pytest.mark.parametrize(("end", "seconds"), [(0, 6.0), (1, 2.0)])
def test_delete_link_without_an_answer(end: int, seconds: float) -> None:
    """C.7.1: the link that carried DELETE LINK is no longer usable either.  A client gives its
    server time to end an exchange, and to move connections."""
    with World(announces_end=False) as world:
        client, server = world.side(), world.side()
        call = world.connect(client, server)
        world.fabric.tamper = lambda *_: []
        side = (client, server)[end]
        side.group.deletion.delete_link(1)
        world.pass_time(seconds - 0.1)
        assert side.groups
        world.pass_time(0.2)
        assert not side.groups
        assert is_broken(call.ends[end].connection)


@pytest.mark.rfc("C.7.1/messages/6", "C.7.1/messages/7", "A.3.4/6")
@pytest.mark.parametrize("end", [0, 1])
def test_a_link_that_does_not_exist(end: int) -> None:
    """C.7.1: the reply gives the reason "unknown link", and the group does not change."""
    with World() as world:
        client, server = world.side(), world.side()
        call = world.connect(client, server)
        side = (client, server)[end]
        side.record()
        link_of(side).send_llc(llc.DeleteLink(link_number=9, reason=1))
        world.settle()
        assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")
        reply = llc.decode_untrusted(side.recorder.messages()[1][2])
        assert isinstance(reply, llc.DeleteLink)
        assert (reply.reply, reply.link_number) == (True, 9)
        assert reply.reason == 0x00100000


# --- collisions (3.5.5.3) -------------------------------------------------------------------------


@pytest.mark.rfc("3.5.5.3.2/5", "3.5.5.3/3")
def test_confirm_rkey_during_delete_link_is_to_be_tried_again() -> None:
    """3.5.5.3.2: the end of the link ends the retries (2.3)."""
    with World() as world:
        client, server = world.side(), world.side()
        world.connect(client, server)
        done: list[Any] = []
        server.group.deletion.delete_link(1)
        client.group.request_element(BIG, done.append)
        client.record()
        world.settle()
        assert done == [None]
        replies = [
            llc.decode_untrusted(data)
            for _, _, data in client.recorder.messages()
            if data[0] == llc.MessageType.CONFIRM_RKEY
        ]
        assert all(isinstance(each, llc.ConfirmRkey) and each.retry for each in replies)
        assert not client.groups


def test_delete_rkey_during_delete_link_is_answered_afterwards() -> None:
    """The RFC does not define this case.  A side changes no RKeys while its links change."""
    with World() as world:
        client, server = world.side(), world.side()
        world.connect(client, server)
        server.group.exchanges.begin("delete_link", link_of(server))
        server.record()
        rkey = client.group.own_rmbs.region(
            client.group.own_rmbs.pool.rmbs[0], link_of(client)
        ).rkey
        server.group.on_llc_untrusted(link_of(server), llc.DeleteRkey(rkeys=(rkey,)).encode())
        assert transcript(server) == []
        assert server.group.peer_rmbs.find(1, rkey) is not None
        server.group.exchanges.done()
        assert transcript(server) == ["out DELETE_RKEY reply"]
        assert server.group.peer_rmbs.find(1, rkey) is None
        world.fabric.lose()
        # If a peer sends many requests without waiting for replies, its link fails.
        server.group.exchanges.begin("delete_link", link_of(server))
        link = link_of(server)
        for _ in range(17):
            server.group.on_llc_untrusted(link, llc.DeleteRkey(rkeys=(1,)).encode())
        assert link.state == "DOWN"


@pytest.mark.rfc("3.5.5.3.3/4")
def test_a_clients_delete_link_waits_for_the_servers_confirm_rkey() -> None:
    """3.5.5.3.3: queued, and processed after the exchange."""
    with World() as world:
        client, server = world.side(), world.side()
        world.connect(client, server)
        done: list[Any] = []
        server.record()
        server.group.request_element(BIG, done.append)
        client.group.deletion.delete_link(1)
        world.settle()
        assert transcript(server) == [
            "out CONFIRM_RKEY",
            "in DELETE_LINK",
            "in CONFIRM_RKEY reply",
            "out DELETE_LINK",
            "in DELETE_LINK reply",
        ]
        assert done[0] is not None
        assert not server.groups


@pytest.mark.rfc("3.5.5.3.3/6")
def test_delete_link_for_all_during_an_exchange_ends_it() -> None:
    """3.5.5.3: immediately clean up the link group."""
    with World() as world:
        client, server = world.side(), world.side()
        world.connect(client, server)
        done: list[Any] = []
        client.group.request_element(BIG, done.append)
        server.group.terminate()
        world.settle()
        assert done == [None] or done[0] is not None
        assert not client.groups
        assert not server.groups


def test_add_link_from_the_client_is_a_notice() -> None:
    """3.5.5.1.2: the server does not answer, and the client does not wait."""
    with World() as world:
        client, server = world.side(), world.side()
        call = world.connect(client, server)
        client.record()
        link_of(client).send_llc(llc.AddLink(mac=client.rnic.mac, gid=client.rnic.gid))
        world.pass_time(9.9)
        # The server checks if it can add a link; here it would be a parallel one again.
        assert transcript(client) == ["out ADD_LINK", "in ADD_LINK", "out ADD_LINK reply"]
        assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")


def test_a_server_may_offer_a_link_later() -> None:
    """C.8: data flows while the sides add the link (3.5.5.1.1)."""
    with World() as world:
        client, server = world.side(), world.side()
        call = world.connect(client, server)
        server.record()
        server.group.demand.want()
        assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")
        assert "in ADD_LINK reply" in transcript(server)


# --- messages that no peer may send ---------------------------------------------------------------


@pytest.mark.rfc("C.7.1/messages/12")
@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(44),
        bytes((5, 44)) + bytes(42),
        bytes((0x40, 44)) + bytes(42),
        bytes((0xC1, 44)) + bytes(42),
        llc.TestLink().encode()[:43],
        llc.TestLink().encode() + b"\0",
        llc.TestLink().encode()[:1] + b"\x2d" + llc.TestLink().encode()[2:],
        llc.ConfirmLink(
            mac=bytes(6), gid=bytes(16), qp_number=1, link_number=1, link_user_id=0, max_links=2
        ).encode(),
        llc.AddLinkContinuation(link_number=2, tokens_left=0).encode(),
        llc.ConfirmRkeyContinuation(tokens_left=0).encode(),
        llc.ConfirmRkey(reply=True, other_tokens=0, rkey=1, address=1).encode(),
        llc.DeleteRkey(reply=True, rkeys=(1,)).encode(),
        llc.AddLink(reply=True, mac=bytes(6), gid=bytes(16), link_number=7).encode(),
    ],
    ids=lambda data: data[:4].hex() + f" {len(data)}",
)
@pytest.mark.parametrize("end", [0, 1])
def test_an_unambiguously_wrong_message_costs_the_link(end: int, data: bytes) -> None:
    """C.7.1: the receiver treats the link as failed."""
    with World() as world:
        client, server = world.side(), world.side()
        call = world.connect(client, server)
        sender, receiver = (client, server) if end else (server, client)
        world.fabric.tamper = lambda qp, m: [data] if qp.rnic is sender.rnic else [m]
        link_of(sender).send_llc(llc.TestLink())
        world.settle()
        assert not receiver.groups
        assert not sender.groups
        assert [is_broken(each) for each in call.connections] == [True, True]


@pytest.mark.rfc("A.3/4", "C.7.1/messages/11", "3.3/3")
def test_unknown_optional_messages_are_discarded() -> None:
    """A.3: the first two bits of such a type are b10."""
    with World() as world:
        client, server = world.side(), world.side()
        call = world.connect(client, server)
        server.record()
        optional = bytes((0xBF, 1)) + bytes(range(42))
        world.fabric.tamper = lambda qp, m: [optional, m] if qp.rnic is client.rnic else [m]
        link_of(client).send_llc(llc.TestLink())
        assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")
        assert [data for _, _, data in server.recorder.messages()].count(optional) == 2


def test_the_peers_256th_rmb_gets_a_negative_reply() -> None:
    with World() as world:
        client, server = world.side(), world.side()
        world.connect(client, server)
        server.record()
        for number in range(255):
            message = llc.ConfirmRkey(other_tokens=0, rkey=number, address=number << 20)
            server.group.rkey_exchanges.on_request_untrusted(link_of(server), message)
            world.fabric.deliver()
            server.stack.pump.drain()
            client.rnic.done.clear()
            next(iter(client.rnic.qps.values())).receives += 1
        flags = [data[3] for _, _, data in server.recorder.messages()]
        assert flags == [0x80] * 254 + [0xA0]
        world.fabric.lose()


def test_a_peer_that_reads_no_replies_loses_the_link() -> None:
    """The send queue is bounded, and a side does not wait for room in it."""
    with World() as world:
        client, server = world.side(), world.side()
        world.connect(client, server)
        link, group = link_of(server), server.group
        request = llc.TestLink().encode()
        for _ in range(200):
            group.on_llc_untrusted(link, request)
        assert link.state == "DOWN"
        world.settle()
        assert not client.groups
