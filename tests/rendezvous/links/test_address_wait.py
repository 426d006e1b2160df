"""A side connects a queue pair while the peer's address is unknown.  Timers repeat the query, no
other connection waits, and an unreachable address affects only the peer that has named it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.rendezvous.rendezvous_pair import Call, Clock, World, exchange
from tests.rendezvous.transcripts import messages, transcript
from tests.rnic.memory_rnic import Fabric, MemoryRnic
from trio_smc._base.reasons import FallbackReason
from trio_smc._base.timers import Timers
from trio_smc.config.config import Config
from trio_smc.rendezvous.links.link import PATIENCE, AddressWait
from trio_smc.rendezvous.negotiation import Failed, FellBack
from trio_smc.wire import llc

NEVER = 1 << 30
QUERIES = (1, 2, 7, 17)


# --- queries --------------------------------------------------------------------------------------


class SlowAddress(MemoryRnic):
    """An RNIC that knows an address after ``left`` queries; `times` has the time of each query."""

    def __init__(self, clock: Clock, left: int) -> None:
        super().__init__(Fabric())
        self.clock, self.left = clock, left
        self.times: list[float] = []

    def address_known(self, gid: bytes) -> bool:
        self.times.append(round(self.clock.now - 1000.0, 6))
        self.left -= 1
        return self.left < 0


def waits(queries: int, *, cancel_after: float | None = None) -> tuple[list[float], list[float]]:
    """Wait for an address; returns the times of the queries, and of the end of the wait."""
    clock = Clock()
    timers = Timers(clock, lambda: None)
    rnic, over = SlowAddress(clock, queries), list[float]()
    wait = AddressWait(timers)
    at_once = wait.begin(rnic, bytes(16), lambda: over.append(round(clock.now - 1000.0, 6)))
    assert at_once is bool(over) is (queries == 0)
    if cancel_after is not None:
        timers.call_later(cancel_after, wait.cancel)
    while (due := timers.next_deadline()) < float("inf"):
        clock.now = due
        timers.run_due()
    return rnic.times, over


def test_a_wait_queries_at_growing_intervals() -> None:
    assert waits(0) == ([0.0], [0.0])
    times, over = waits(8)
    assert times == [0.0, 0.002, 0.006, 0.014, 0.030, 0.062, 0.126, 0.190, 0.254]
    assert over == [0.254]
    times, over = waits(NEVER)
    assert over == [PATIENCE]
    assert len(times) < 25


def test_a_cancelled_wait_makes_no_more_queries() -> None:
    times, over = waits(NEVER, cancel_after=0.01)
    assert times == [0.0, 0.002, 0.006]
    assert over == []


def test_a_new_wait_takes_the_place_of_the_one_before() -> None:
    clock = Clock()
    timers = Timers(clock, lambda: None)
    over: list[str] = []
    wait = AddressWait(timers)
    wait.begin(SlowAddress(clock, 3), bytes(16), lambda: over.append("first"))
    wait.begin(SlowAddress(clock, 3), bytes(16), lambda: over.append("second"))
    clock.now += 2 * PATIENCE
    timers.run_due()
    assert over == ["second"]


# --- the first link -------------------------------------------------------------------------------


def peer_of(world: World, place: str) -> bytes:
    """The GID that this side resolves."""
    client, server = world.sides[:2]
    return (server if place == "client" else client).rnic.gid


@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("place", ["client", "server"])
def test_a_first_contact_waits_for_the_address(place: str, queries: int) -> None:
    with World() as world:
        client, server = world.side(), world.side()
        world.fabric.looks[peer_of(world, place)] = queries
        call = world.call(client, server)
        took = world.finish()
        assert call.states == ("ESTABLISHED", "ESTABLISHED")
        assert 0 < took < PATIENCE
        assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")


@pytest.mark.parametrize("place", ["client", "server"])
def test_an_address_that_is_never_answered(place: str) -> None:
    """C.1, C.2: the side that cannot connect declines, and existing connections continue."""
    with World() as world:
        client, server = world.side(), world.side()
        other = world.side()
        sides = (client, other) if place == "client" else (other, server)
        open_already = world.connect(*sides)
        world.fabric.looks[peer_of(world, place)] = NEVER
        call = world.call(client, server)
        passed = 0
        while any(end.outcome is None for end in call.ends):
            world.pass_time(0.1)
            assert exchange(world, open_already, (b"ping", b"pong")) == (b"pong", b"ping")
            passed += 1
        assert passed == pytest.approx(10 * PATIENCE, abs=1)
        assert [end.fallback.reason for end in call.ends] == [FallbackReason.LINK_FAILED] * 2
        open_already.connections[0].abort()


def end_tcp(world: World, call: Call, place: str) -> None:
    end = call.client if place == "client" else call.server
    end.tcp.end("rst")


def lose_port(world: World, call: Call, place: str) -> None:
    end = call.client if place == "client" else call.server
    end.side.rnic.port_down(fatal=True)


def terminate(world: World, call: Call, place: str) -> None:
    end = call.client if place == "client" else call.server
    end.side.group.terminate()


@pytest.mark.parametrize("event", [end_tcp, lose_port, terminate])
@pytest.mark.parametrize("queries", [5, NEVER])
@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize("place", ["client", "server"])
def test_everything_ends_while_a_first_contact_waits(
    place: str, here: bool, queries: int, event: Callable[[World, Call, str], None]
) -> None:
    """Each side ends, and nothing is left (`World.close`)."""
    with World() as world:
        client, server = world.side(), world.side()
        world.fabric.looks[peer_of(world, place)] = queries
        call = world.call(client, server)
        world.settle()
        waiting = {"client": ("PREPARING", "ACCEPTED")}.get(place, ("CONFIRMING_LINK",) * 2)
        assert call.states == waiting
        other = "server" if place == "client" else "client"
        event(world, call, place if here else other)
        world.finish()
        for end in call.ends:
            assert isinstance(end.outcome, (Failed, FellBack))
        checks = dict(world.fabric.looks)
        world.pass_time(2 * PATIENCE)
        assert world.fabric.looks == checks, "a side still queries the address"


# --- further links --------------------------------------------------------------------------------


def with_late_link(world: World, place: str, queries: int, *, rnics: int = 2) -> Call:
    """Make a group in which link 3 has replaced link 2 after its RNIC had failed.  The RNIC works
    again, and link 4 waits for an address."""
    client, server = world.side(rnics=rnics), world.side(rnics=rnics)
    call = world.connect(client, server)
    assert server.group.kind == "symmetric"
    server.rnics[1].port_down()
    world.settle()
    for side in (client, server):
        side.record()
    far = server if place == "client" else client
    world.fabric.looks[far.rnics[1].gid] = queries
    server.rnics[1].port_up()
    world.settle()
    return call


def waiting_states(place: str) -> tuple[str, str]:
    """The states of the exchange at the client and at the server."""
    return ("IDLE", "ADD_LINK") if place == "client" else ("ADD_LINK_CONTINUATION", "ADD_LINK")


def exchange_states(world: World) -> tuple[str, ...]:
    return tuple(side.group.exchanges.state for side in world.sides[:2])


@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("place", ["client", "server"])
def test_a_link_waits_for_the_address(place: str, queries: int) -> None:
    """Data flows while the link waits, and the other links stay."""
    with World() as world:
        call = with_late_link(world, place, queries)
        client, server = world.sides
        assert exchange_states(world) == waiting_states(place)
        assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")
        world.pass_time(PATIENCE)
        assert server.group.kind == client.group.kind == "symmetric"
        assert transcript(client)[:2] == ["in ADD_LINK", "out ADD_LINK reply"]
        assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")


@pytest.mark.parametrize("queries", [3, NEVER])
@pytest.mark.parametrize("place", ["client", "server"])
def test_the_second_link_of_a_first_contact_waits(place: str, queries: int) -> None:
    """3.5.1.6.2: the first contact succeeds even without the second link."""
    with World() as world:
        client, server = world.side(rnics=2), world.side(rnics=2)
        far = server if place == "client" else client
        world.fabric.looks[far.rnics[1].gid] = queries
        call = world.call(client, server)
        took = world.finish()
        assert took == pytest.approx(0.014 if queries == 3 else PATIENCE)
        assert call.states == ("ESTABLISHED", "ESTABLISHED")
        kind = "symmetric" if queries == 3 else "single"
        assert client.group.kind == server.group.kind == kind
        assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")


@pytest.mark.parametrize("place", ["client", "server"])
def test_a_link_to_an_address_that_is_never_answered(place: str) -> None:
    """C.8: the sides give the link up, and try again later."""
    with World() as world:
        call = with_late_link(world, place, NEVER)
        client, server = world.sides
        world.pass_time(PATIENCE + 0.1)
        assert exchange_states(world) == ("IDLE", "IDLE")
        assert server.group.kind == client.group.kind == "asymmetric"
        world.fabric.looks.clear()
        world.pass_time(30.0)
        assert server.group.kind == client.group.kind == "symmetric"
        assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")


def test_a_reply_timer_does_not_run_while_the_server_waits() -> None:
    """The reply has arrived, so its link has not failed (C.7.1)."""
    with World() as world:
        client, server = world.side(Config(llc_timeout=10), rnics=2), world.side(rnics=2)
        call = world.connect(client, server)
        server.rnics[1].port_down()
        world.settle()
        world.fabric.looks[client.rnics[1].gid] = NEVER
        held: list[bytes] = []
        world.fabric.tamper = lambda qp, message: hold_reply(held, message)
        server.rnics[1].port_up()
        world.settle()
        (reply,) = held
        world.pass_time(server.stack.config.llc_timeout - 0.1)
        assert server.group.exchanges.state == "ADD_LINK"
        world.fabric.tamper = None
        carrier = server.group.links[1]
        message = llc.decode_untrusted(reply)
        assert isinstance(message, llc.AddLink)
        server.group.adding.on_message_untrusted(carrier, message)
        world.pass_time(0.5)
        assert server.group.exchanges.state == "ADD_LINK"
        assert carrier.state == "ACTIVE"
        world.pass_time(1.0)
        assert server.group.exchanges.state == "IDLE"
        assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")


def hold_reply(held: list[bytes], message: bytes) -> list[bytes]:
    if message[0] == llc.MessageType.ADD_LINK and message[3] & 0x80:
        held.append(message)
        return []
    return [message]


@pytest.mark.parametrize(
    ("change", "rejected"),
    [({}, False), ({"link_number": 77}, False), ({"link_number": 77, "qp_number": 0}, True)],
)
def test_only_the_newest_offer_is_answered(change: dict[str, int], rejected: bool) -> None:
    with World() as world:
        with_late_link(world, "client", 5)
        client, _ = world.sides
        (offer,) = messages(client, llc.AddLink)
        newer = replace(offer, **change)  # type: ignore[arg-type]
        client.group.adding.on_message_untrusted(client.group.links[1], newer)
        world.fabric.tamper = lambda qp, message: []  # the server has not sent this offer
        world.pass_time(PATIENCE / 2)
        replies = [each for each in messages(client, llc.AddLink) if each.reply]
        assert [(each.link_number, each.rejected) for each in replies] == [
            (newer.link_number, rejected)
        ]
        assert client.group.links.keys() == {1, 3} | (set() if rejected else {newer.link_number})


def test_a_client_may_reject_a_link_after_its_reply() -> None:
    """Linux does so if an error occurs after its reply."""
    with World() as world:
        with_late_link(world, "server", NEVER)
        _, server = world.sides
        (reply,) = (each for each in messages(server, llc.AddLink) if each.reply)
        taken_back = replace(reply, rejected=True, reason=1, qp_number=0)
        server.group.adding.on_message_untrusted(server.group.links[1], taken_back)
        assert server.group.exchanges.state == "IDLE"
        assert server.group.links.keys() == {1, 3}
        world.fabric.lose()


def links_fail(world: World, place: str) -> None:
    """Fail the link that carries all messages."""
    world.sides[0].group.links[1].qp.to_err()


def end_group(world: World, place: str) -> None:
    world.sides[place == "server"].group.terminate()


def lose_the_rnic(world: World, place: str) -> None:
    world.sides[place == "server"].rnics[1].port_down(fatal=True)


def delete_the_link(world: World, place: str) -> None:
    """An operator deletes the link that carries all messages."""
    world.sides[1].group.delete_link(1)


def confirm_rkey(world: World, place: str) -> None:
    """Open a connection that needs a new RMB (3.5.5.2.1)."""
    world.call(*world.sides, size=1 << 22)


EVENTS = [links_fail, end_group, lose_the_rnic, delete_the_link, confirm_rkey]


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("queries", [4, NEVER])
@pytest.mark.parametrize("rnics", [2, 3])
@pytest.mark.parametrize("place", ["client", "server"])
def test_everything_may_happen_while_a_link_waits(
    place: str, rnics: int, queries: int, event: Callable[[World, str], None]
) -> None:
    """No call raises an exception, no side waits for ever, and both sides agree afterwards."""
    with World() as world:
        call = with_late_link(world, place, queries, rnics=rnics)
        assert exchange_states(world) == waiting_states(place)
        event(world, place)
        world.pass_time(PATIENCE)
        world.fabric.looks.clear()
        world.pass_time(120.0)
        client, server = world.sides
        assert len(client.groups) == len(server.groups)
        if client.groups:
            ends = [
                {number: link.state for number, link in side.group.links.items()}
                for side in world.sides
            ]
            assert ends[0] == ends[1]
            assert set(ends[0].values()) == {"ACTIVE"}
            assert exchange_states(world) == ("IDLE", "IDLE")
            if event not in (lose_the_rnic, delete_the_link):
                assert client.group.kind == "symmetric"
            assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")
        else:
            assert all(each.state == "CLOSED" for each in call.connections)


def make_slow(rng: random.Random, world: World, rnics: list[MemoryRnic]) -> None:
    for rnic in rnics:
        world.fabric.looks[rnic.gid] = rng.choice((0, 0, 1, 3, 9, 15))


def test_random_delays_of_addresses_break_no_group(rng: random.Random) -> None:
    """Every query for an address is slow, while ports go down and return."""
    for _ in range(20):
        with World() as world:
            client, server = world.side(rnics=3), world.side(rnics=2)
            rnics = [*client.rnics, *server.rnics]

            make_slow(rng, world, rnics)
            call = world.call(client, server)
            world.finish()
            for _ in range(4):
                side = rng.choice((client, server))
                rnic = side.rnics[1]
                make_slow(rng, world, rnics)
                rnic.port_down()
                world.pass_time(rng.choice((0.0, 0.01, 0.5, 3.0)))
                rnic.port_up()
                world.pass_time(rng.choice((0.0, 0.01, 0.5, 3.0)))
                assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")
            world.pass_time(400.0)
            assert client.group.kind == server.group.kind == "symmetric"
            assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")
