"""LLC messages that arrive during an exchange of the receiver: each row of RFC 7609, 3.5.5.3.1,
3.5.5.3.2 and 3.5.5.3.3, in each state of the exchange."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.rendezvous.links.llc_wire import Stage
from tests.rendezvous.rendezvous_pair import SIZE, Side, World, exchange
from tests.rendezvous.transcripts import messages, transcript
from trio_smc.wire import llc

BIG = 4 * SIZE
ADDING = ["ADD_LINK", "ADD_LINK_CONTINUATION", "ADD_LINK_CONFIRM"]


def adding(world: World, state: str) -> tuple[Side, Side]:
    """Make client and server with links 1 and 2; the server is adding link 3, in ``state``."""
    client, server = world.side(rnics=3), world.side(rnics=2)
    world.connect(client, server)
    server.add_rnic()
    world.until(lambda: server.group.exchanges.state == state)
    client.record()
    server.record()
    return client, server


def deleting(world: World) -> tuple[Side, Side]:
    """Make client and server with links 1, 2 and 3; the server is deleting link 3."""
    client, server = world.side(rnics=3), world.side(rnics=3)
    world.connect(client, server)
    client.record()
    server.record()
    server.group.delete_link(3)
    assert server.group.exchanges.state == "DELETE_LINK"
    return client, server


def changing_rkeys(world: World, end: int, done: list[object]) -> tuple[Side, Side]:
    """Make client and server with links 1 and 2; one of them has sent CONFIRM RKEY."""
    client, server = world.side(rnics=2), world.side(rnics=2)
    world.connect(client, server)
    client.record()
    server.record()
    group = (client, server)[end].group
    group.request_element(BIG, done.append)
    assert group.exchanges.state == "CHANGE_RKEYS"
    return client, server


def send_test_link(side: Side) -> None:
    """Send TEST LINK on link 1."""
    side.group.links[1].send_llc(llc.TestLink(user_data=b"collides with it"))


def answers_test_next(side: Side) -> bool:
    """True if the reply is the next message of ``side`` after TEST LINK has arrived."""
    lines = transcript(side)
    return lines[lines.index("in TEST_LINK") + 1] == "out TEST_LINK reply"


# --- 3.5.5.3.1: during ADD LINK -------------------------------------------------------------------


@pytest.mark.rfc("3.5.5.3.1/1", "3.5.5.3/1", "A.3.8/1")
@pytest.mark.parametrize("state", ADDING)
def test_add_link_and_test_link(state: str) -> None:
    """Answered at once."""
    with World() as world:
        client, server = adding(world, state)
        send_test_link(client)
        world.settle()
        assert answers_test_next(server)
        assert len(server.group.links) == len(client.group.links) == 3


@pytest.mark.rfc("3.5.5.3.1/2", "3.5.5.3/1")
@pytest.mark.parametrize("state", ADDING)
def test_add_link_and_the_clients_add_link(state: str) -> None:
    """The server ignores the message: the link that it is adding is the answer."""
    with World() as world:
        client, server = adding(world, state)
        client.group.links[1].send_llc(
            llc.AddLink(mac=client.rnics[2].mac, gid=client.rnics[2].gid)
        )
        world.settle()
        assert len(server.group.links) == len(client.group.links) == 3
        requests = [each for each in messages(client, llc.AddLink) if not each.reply]
        assert len(requests) <= 2  # the notice, and the server's offer if it was on its way


@pytest.mark.rfc("3.5.5.3.1/2", "3.5.5.3/1")
def test_both_sides_have_a_new_rnic_at_once() -> None:
    """The server ignores the client's ADD LINK; the client treats the server's as the answer."""
    with World(announces_end=False) as world:
        stage = Stage(world, (1, 2), down=1)
        stage.server.rnics[1].port_up()
        stage.client.add_rnic()
        world.settle()
        assert stage.log[:2] == ["S1 ADD_LINK 3", "C1 ADD_LINK 0"]
        assert [each for each in stage.log if "S1 ADD_LINK " in each] == ["S1 ADD_LINK 3"]
        assert stage.server.group.kind == stage.client.group.kind == "symmetric"


@pytest.mark.rfc("3.5.5.3.1/3", "3.5.5.3/1", "3.5.5.3/2")
@pytest.mark.parametrize("state", ADDING)
@pytest.mark.parametrize("orderly", [False, True])
def test_add_link_and_the_clients_delete_link(state: str, orderly: bool) -> None:
    """The server queues the message, and processes it after it has added the link."""
    with World() as world:
        client, server = adding(world, state)
        client.group.delete_link(2, orderly=orderly)
        world.settle()
        lines = transcript(server)
        assert lines.index("in DELETE_LINK") < lines.index("in CONFIRM_LINK reply")
        assert lines.index("in CONFIRM_LINK reply") < lines.index("out DELETE_LINK")
        assert list(server.group.links) == list(client.group.links) == [1, 3]


def test_the_clients_delete_link_names_a_higher_number_than_the_link_that_is_added() -> None:
    """2.2.4: after 255 the numbers start again, so link 255 is older than the added link."""
    with World() as world:
        client, server = world.side(rnics=3), world.side(rnics=1)
        world.connect(client, server)
        while server.group.links.next_number() != 254:
            pass
        server.add_rnic()
        world.settle()
        assert list(server.group.links) == [1, 255]
        server.add_rnic()
        world.until(lambda: server.group.exchanges.state == "ADD_LINK_CONFIRM")
        client.group.delete_link(255)
        world.settle()
        assert list(server.group.links) == list(client.group.links) == [1, 2]


@pytest.mark.rfc("3.5.5.3.1/4", "3.5.5.3/1")
@pytest.mark.parametrize("end", [0, 1])
@pytest.mark.parametrize("state", ADDING)
def test_add_link_and_delete_link_for_all(state: str, end: int) -> None:
    """The group ends immediately."""
    with World() as world:
        client, server = adding(world, state)
        (client, server)[end].group.terminate()
        world.settle()
        assert not client.groups
        assert not server.groups
        assert not any(world.fabric.held.values())


@pytest.mark.rfc("3.5.5.3.1/5", "3.5.5.3/3")
@pytest.mark.parametrize("state", ADDING)
def test_add_link_and_the_clients_confirm_rkey(state: str) -> None:
    """The server refuses the request, and the client repeats it with the new link.  A client that
    already knows of the new link waits without a request."""
    with World() as world:
        client, server = adding(world, state)
        done: list[object] = []
        client.group.request_element(BIG, done.append)
        world.pass_time(1.0)
        assert done
        assert done[0] is not None
        tokens = client.group.own_rmbs.tokens(client.group.own_rmbs.pool.rmbs[-1])
        assert sorted(tokens) == [1, 2, 3]
        known = server.group.peer_rmbs.find(3, tokens[3].rkey)
        assert known is not None
        assert known.tokens == tokens
        replies = [each for each in messages(client, llc.ConfirmRkey) if each.reply]
        assert replies[0].negative is (state == "ADD_LINK")
        assert not replies[-1].negative


# --- 3.5.5.3.2: during DELETE LINK ----------------------------------------------------------------


@pytest.mark.rfc("3.5.5.3.2/1", "3.5.5.3/1", "A.3.8/1")
@pytest.mark.parametrize("end", [0, 1])
def test_delete_link_and_test_link(end: int) -> None:
    """Answered at once."""
    with World() as world:
        client, server = deleting(world)
        send_test_link((client, server)[end])
        world.settle()
        assert answers_test_next((server, client)[end])
        assert list(server.group.links) == list(client.group.links) == [1, 2]


@pytest.mark.rfc("3.5.5.3.2/2")
def test_delete_link_and_the_clients_add_link() -> None:
    """The server queues the message, and processes it after the exchange."""
    with World() as world:
        client, server = deleting(world)
        client.group.links[1].send_llc(
            llc.AddLink(mac=client.rnics[2].mac, gid=client.rnics[2].gid)
        )
        world.settle()
        lines = transcript(server)
        assert lines.index("in ADD_LINK") < lines.index("in DELETE_LINK reply")
        assert lines.index("in DELETE_LINK reply") < lines.index("out ADD_LINK")
        assert list(server.group.links) == list(client.group.links) == [1, 2, 4]


@pytest.mark.rfc("3.5.5.3.2/3", "3.5.5.3/1", "3.5.5.3/2")
@pytest.mark.parametrize("orderly", [False, True])
def test_delete_link_and_the_clients_delete_link(orderly: bool) -> None:
    """The server queues the message, and processes it after the exchange."""
    with World() as world:
        client, server = deleting(world)
        client.group.delete_link(2, orderly=orderly)
        world.settle()
        deletions = [each.link_number for each in messages(server, llc.DeleteLink) if each.reply]
        assert deletions == [3, 2]
        assert list(server.group.links) == list(client.group.links) == [1]


def test_both_sides_delete_the_same_link() -> None:
    with World() as world:
        client, server = deleting(world)
        client.group.delete_link(3)
        world.settle()
        world.pass_time(10.0)
        assert list(server.group.links) == list(client.group.links) == [1, 2]
        assert server.group.exchanges.state == client.group.exchanges.state == "IDLE"


@pytest.mark.rfc("3.5.5.3.2/4", "3.5.5.3/1")
@pytest.mark.parametrize("end", [0, 1])
def test_delete_link_and_delete_link_for_all(end: int) -> None:
    """The group ends immediately."""
    with World() as world:
        client, server = deleting(world)
        (client, server)[end].group.terminate()
        world.settle()
        assert not client.groups
        assert not server.groups


@pytest.mark.rfc("3.5.5.3.2/5", "3.5.5.3/3")
def test_delete_link_and_the_clients_confirm_rkey() -> None:
    """The server refuses the request, and the client repeats it without the link."""
    with World() as world:
        client, server = deleting(world)
        done: list[object] = []
        client.group.request_element(BIG, done.append)
        world.pass_time(1.0)
        assert done
        assert done[0] is not None
        tokens = client.group.own_rmbs.tokens(client.group.own_rmbs.pool.rmbs[-1])
        assert sorted(tokens) == [1, 2]
        replies = [each for each in messages(client, llc.ConfirmRkey) if each.reply]
        assert (replies[0].negative, replies[0].retry) == (True, True)
        assert not replies[-1].negative
        assert server.group.peer_rmbs.find(2, tokens[2].rkey) is not None


# --- 3.5.5.3.3: during CONFIRM RKEY ---------------------------------------------------------------


@pytest.mark.rfc("3.5.5.3.3/1", "3.5.5.3/1", "A.3.8/1")
@pytest.mark.parametrize("end", [0, 1])
def test_confirm_rkey_and_test_link(end: int) -> None:
    """Answered at once."""
    with World() as world:
        done: list[object] = []
        client, server = changing_rkeys(world, end, done)
        send_test_link((server, client)[end])
        world.settle()
        assert answers_test_next((client, server)[end])
        assert done


@pytest.mark.rfc("3.5.5.3.3/2")
def test_the_servers_confirm_rkey_and_the_clients_add_link() -> None:
    """The server queues the message, and processes it after the exchange."""
    with World() as world:
        done: list[object] = []
        client, server = changing_rkeys(world, 1, done)
        server.add_rnic()  # the server's own ADD LINK has to wait, too
        client.add_rnic()
        world.settle()
        lines = transcript(server)
        assert lines.index("in CONFIRM_RKEY reply") < lines.index("out ADD_LINK")
        assert len(server.group.links) == len(client.group.links) == 3
        tokens = server.group.own_rmbs.tokens(server.group.own_rmbs.pool.rmbs[-1])
        assert client.group.peer_rmbs.find(3, tokens[3].rkey) is not None


@pytest.mark.rfc("3.5.5.3.3/3", "3.5.5.3/3")
@pytest.mark.parametrize("order", [0, 1])
def test_the_clients_confirm_rkey_and_the_servers_add_link(order: int) -> None:
    """The client processes ADD LINK, and repeats CONFIRM RKEY afterwards."""
    with World() as world:
        client, server = world.side(rnics=3), world.side(rnics=2)
        world.connect(client, server)
        client.record()
        done: list[object] = []

        def request() -> None:
            client.group.request_element(BIG, done.append)

        def offer() -> None:
            server.add_rnic()

        steps: list[Callable[[], None]] = [request, offer] if order else [offer, request]
        for step in steps:
            step()
        assert client.group.exchanges.state == "CHANGE_RKEYS"
        assert server.group.exchanges.state == "ADD_LINK"
        world.pass_time(1.0)
        assert done
        assert done[0] is not None
        replies = [each for each in messages(client, llc.ConfirmRkey) if each.reply]
        assert (replies[0].negative, replies[0].retry) == (True, True)
        assert not replies[-1].negative
        tokens = client.group.own_rmbs.tokens(client.group.own_rmbs.pool.rmbs[-1])
        assert sorted(tokens) == [1, 2, 3]
        known = server.group.peer_rmbs.find(3, tokens[3].rkey)
        assert known is not None
        assert known.tokens == tokens


@pytest.mark.rfc("3.5.5.3.3/4", "3.5.5.3/1", "3.5.5.3/2")
@pytest.mark.parametrize("orderly", [False, True])
def test_the_servers_confirm_rkey_and_the_clients_delete_link(orderly: bool) -> None:
    """The server queues the message, and processes it after the exchange."""
    with World() as world:
        done: list[object] = []
        client, server = changing_rkeys(world, 1, done)
        client.group.delete_link(2, orderly=orderly)
        world.settle()
        lines = transcript(server)
        assert lines.index("in DELETE_LINK") < lines.index("in CONFIRM_RKEY reply")
        assert lines.index("in CONFIRM_RKEY reply") < lines.index("out DELETE_LINK")
        assert list(server.group.links) == list(client.group.links) == [1]
        assert done[0] is not None


@pytest.mark.rfc("3.5.5.3.3/5", "3.5.5.3/3")
def test_the_clients_confirm_rkey_and_the_servers_delete_link() -> None:
    """The client processes DELETE LINK, and repeats CONFIRM RKEY afterwards."""
    with World() as world:
        done: list[object] = []
        client, server = changing_rkeys(world, 0, done)
        server.group.delete_link(2)
        world.pass_time(1.0)
        assert done
        assert done[0] is not None
        assert list(server.group.links) == list(client.group.links) == [1]
        tokens = client.group.own_rmbs.tokens(client.group.own_rmbs.pool.rmbs[-1])
        assert sorted(tokens) == [1]
        assert server.group.peer_rmbs.find(1, tokens[1].rkey) is not None


@pytest.mark.rfc("2.3/2")
def test_the_link_that_brought_delete_link_fails_before_the_reply() -> None:
    """Data is on its way over the deleted link, so the reply has to wait.  Then another link
    carries the reply."""
    with World(announces_end=False) as world:
        stage = Stage(world, (3, 3))
        calls = [stage.call, *(world.connect(stage.client, stage.server) for _ in range(2))]
        [call] = [each for each in calls if each.connections[0].channel.number == 3]  # type: ignore[union-attr]
        stage.wire.log.clear()
        stage.wire.watch(
            r"S\d DELETE_LINK 3", lambda: call.connections[0].send(memoryview(b"on its way"))
        )
        stage.server.group.delete_link(3)
        world.until(lambda: stage.client.group.exchanges.state == "DELETE_LINK")
        assert stage.log == ["S1 DELETE_LINK 3"]
        stage.client.group.links[1].machine.send("failed")
        world.settle()
        assert "C2 DELETE_LINK 3 reply" in stage.log
        assert stage.links() == [2]
        assert call.connections[1].receiver.receive(100) == b"on its way"
        for each in calls:
            assert exchange(world, each, (b"ping", b"pong")) == (b"pong", b"ping")


@pytest.mark.rfc("2.3/2")
def test_the_link_of_a_confirm_rkey_fails_while_another_is_deleted() -> None:
    """The deletion continues over a working link, and the client repeats CONFIRM RKEY after it."""
    with World(announces_end=False) as world:
        client, server = world.side(rnics=3), world.side(rnics=3)
        world.connect(client, server)
        done: list[object] = []
        client.group.request_element(BIG, done.append)
        carrier = client.group.rkey_exchanges.carrier
        assert carrier is not None
        others = [number for number in client.group.links if number != carrier.number]
        server.group.delete_link(others[0])
        world.until(lambda: client.group.exchanges.state == "DELETE_LINK")
        carrier.machine.send("failed")
        world.pass_time(1.0)
        assert done
        assert done[0] is not None
        assert others[0] not in client.group.links
        assert list(client.group.links) == list(server.group.links)
        assert others[1] in client.group.links
        tokens = client.group.own_rmbs.tokens(client.group.own_rmbs.pool.rmbs[-1])
        assert set(tokens) == set(client.group.links)


@pytest.mark.rfc("3.5.5.3.3/6", "3.5.5.3/1")
@pytest.mark.parametrize("terminator", [0, 1])
@pytest.mark.parametrize("end", [0, 1])
def test_confirm_rkey_and_delete_link_for_all(end: int, terminator: int) -> None:
    """The group ends immediately."""
    with World() as world:
        done: list[object] = []
        client, server = changing_rkeys(world, end, done)
        (client, server)[terminator].group.terminate()
        world.settle()
        assert not client.groups
        assert not server.groups
        assert len(done) == 1


@pytest.mark.rfc("3.5.5.3.3/7", "3.5.5.3/4")
def test_confirm_rkeys_of_both_sides() -> None:
    """3.5.5.3 and the last row of the table: this is no collision.  Each side answers, although its
    own request waits for a reply."""
    with World() as world:
        done: list[object] = []
        client, server = changing_rkeys(world, 0, done)
        server.group.request_element(BIG, done.append)
        assert server.group.exchanges.state == "CHANGE_RKEYS"
        world.settle()
        assert len(done) == 2
        assert None not in done
        replies = [each for each in messages(client, llc.ConfirmRkey) if each.reply]
        assert [each.negative for each in replies] == [False, False]


def test_an_unexpected_confirm_link_fails_its_link() -> None:
    """The last row as printed: only the server starts CONFIRM LINK (C.7.1, out of sync)."""
    with World() as world:
        client, server = changing_rkeys(world, 1, [])
        link = client.group.links[2]
        link.send_llc(client.group.setup.confirm_link(link, reply=False))
        world.settle()
        assert 2 not in server.group.links
        assert 2 not in client.group.links
        call = world.connect(client, server)
        assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")


# --- all exchanges -------------------------------------------------------------------------------


@pytest.mark.rfc("3.5.5.3/2", "3.5.5.3/3")
def test_one_exchange_at_a_time() -> None:
    """The server has reasons for three exchanges at the same moment."""
    with World(announces_end=False) as world:
        stage = Stage(world, (3, 3))
        stage.server.group.request_element(BIG, lambda _: None)
        stage.server.group.delete_link(3, orderly=False)
        stage.server.group.delete_link(2, orderly=False)
        world.settle()
        requests = [each for each in stage.log if each.startswith("S")]
        replies = [each for each in stage.log if each.startswith("C")]
        assert stage.log[:6] == [
            each for pair in zip(requests, replies, strict=True) for each in pair
        ]
        assert {each.split(" ", 1)[1] for each in requests} == {
            "CONFIRM_RKEY", "DELETE_LINK 3", "DELETE_LINK 2"
        }  # fmt: skip


@pytest.mark.rfc("C.7/1", "C.7/3")
@pytest.mark.parametrize("state", ["ADD_LINK", "DELETE_LINK", "CHANGE_RKEYS"])
def test_a_reply_ends_its_timer(state: str) -> None:
    with World(announces_end=False) as world:
        if state == "ADD_LINK":
            client, server = adding(world, state)
        elif state == "DELETE_LINK":
            client, server = deleting(world)
        else:
            client, server = changing_rkeys(world, 1, [])
        world.pass_time(10.0)
        assert sorted(server.group.links) == sorted(client.group.links)
        assert len(server.group.links) >= 2
        assert server.group.exchanges.state == client.group.exchanges.state == "IDLE"
        assert exchange(world, world.calls[0], (b"ping", b"pong")) == (b"pong", b"ping")
