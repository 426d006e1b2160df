"""RMBs without connections: made in advance, kept for a while, and deleted; and the limit of 255
RMBs (RFC 7609, 3.5.5.2)."""

from __future__ import annotations

import errno
import logging
from typing import Any

import pytest

from tests.rendezvous.links.rkey_links import knows_all_rmbs
from tests.rendezvous.links.test_rkeys import BIG, SMALL, all_messages, elements, with_links
from tests.rendezvous.rendezvous_pair import SIZE, Call, Side, World, exchange
from tests.rendezvous.transcripts import messages, transcript
from tests.rnic.memory_rnic import PlainQueuePair
from trio_smc._base.reasons import FallbackReason
from trio_smc.config.config import Config
from trio_smc.datapath import rmb as rmb_module
from trio_smc.datapath.rmb import MAX_RMBS
from trio_smc.rendezvous.links import own_rmbs
from trio_smc.rendezvous.links.link import Link
from trio_smc.rendezvous.links.own_rmbs import RMB_IDLE
from trio_smc.rendezvous.negotiation import Established
from trio_smc.rnic.verbs import RnicError
from trio_smc.wire import llc

CHECK_INTERVAL = 15.0
"""Seconds by which the deletion of an idle RMB may be late."""


def close(world: World, calls: list[Call]) -> None:
    for call in calls:
        for connection in call.connections:
            connection.close()
    world.settle()


def deletions(side: Side) -> list[llc.DeleteRkey]:
    """The DELETE RKEYs that this side sent."""
    kinds = messages(side, llc.DeleteRkey)
    lines = [line for line in transcript(side) if "DELETE_RKEY" in line]
    return [each for each, entry in zip(kinds, lines, strict=True) if entry == "out DELETE_RKEY"]


class Keeper:
    """Holds back messages of one kind."""

    def __init__(self, world: World, sender: Side, kind: llc.MessageType) -> None:
        self.kept: list[tuple[PlainQueuePair, bytes]] = []
        self._world, self._sender, self._kind = world, sender, kind
        world.fabric.tamper = self._tamper

    def _tamper(self, qp: PlainQueuePair, message: bytes) -> list[bytes]:
        if qp.rnic is self._sender.rnic and message[0] == self._kind:
            self.kept.append((qp, message))
            return []
        return [message]

    def release(self, change: Any = lambda message: message) -> None:
        """Deliver the held messages, each changed by ``change``."""
        self._world.fabric.tamper = None
        for qp, message in self.kept:
            qp.post_send(0, change(message))
        self._world.settle()


# --- the time until a deletion --------------------------------------------------------------------


@pytest.mark.rfc("3.5.5.2.2/1", "3.5.5.2.2/2", "A.3.7/1")
@pytest.mark.parametrize("links", [1, 3])
def test_rmbs_of_a_burst_stay_a_minute(links: int) -> None:
    """3.5.5.2.2: a DELETE RKEY names up to eight RMBs, and the last RMB of each size stays."""
    with World() as world:
        client, server, kept = with_links(world, links)
        calls = [world.connect(client, server, size=BIG) for _ in range(12)]
        rmbs = client.group.own_rmbs.pool.rmbs
        close(world, calls)
        held = dict(world.fabric.held)
        for side in (client, server):
            side.record()
        world.pass_time(RMB_IDLE - 1)
        assert client.group.own_rmbs.pool.rmbs == rmbs
        assert deletions(client) == deletions(server) == []
        world.pass_time(1 + CHECK_INTERVAL)
        for side, peer in ((client, server), (server, client)):
            left = side.group.own_rmbs.pool.rmbs
            assert [rmb.element_size for rmb in left] == [SIZE, BIG]
            assert [len(each.rkeys) for each in deletions(side)] == [8, len(rmbs) - 2 - 8]
            assert len(side.group.own_rmbs) == 2
            assert knows_all_rmbs(side.group, peer.group)
        gone = 2 * (len(rmbs) - 2)
        assert world.fabric.held["memory"] == held["memory"] - gone
        assert world.fabric.held["region"] == held["region"] - gone * links
        assert exchange(world, kept, (b"ping", b"pong")) == (b"pong", b"ping")


def test_the_next_burst_finds_the_rmbs_of_the_last() -> None:
    """No connection waits for a reply of the peer.  The sides make and delete only spare RMBs."""
    with World() as world:
        client, server, _ = with_links(world, 2)
        first: set[Any] = set()
        for _ in range(6):
            calls = [world.connect(client, server, size=BIG) for _ in range(5)]
            rmbs = {end.connection.rmbe.rmb for call in calls for end in call.ends}
            first = first or rmbs
            assert rmbs == first
            close(world, calls)
            world.pass_time(RMB_IDLE - 10)


@pytest.mark.parametrize("end", [0, 1])
def test_the_last_rmb_of_a_size_stays_as_long_as_an_idle_group(end: int) -> None:
    with World() as world:
        client, server = world.side(), world.side()
        world.connect(client, server)
        world.pass_time(10.0)
        call = world.connect(client, server, size=BIG)
        close(world, [call])
        side = (client, server)[end]
        side.record()
        world.pass_time(599.0)
        assert len(side.group.own_rmbs.pool.rmbs) == 2
        assert deletions(side) == []
        world.pass_time(1 + CHECK_INTERVAL)
        assert len(side.group.own_rmbs) == 1
        assert len(deletions(side)) == 1


def test_a_group_without_connections_ends_as_a_whole() -> None:
    """An idle group deletes no RMB: the next connection uses the RMBs, or they end with the
    group."""
    with World() as world:
        client, server = world.side(), world.side()
        calls = [world.connect(client, server, size=BIG) for _ in range(4)]
        close(world, calls)
        for side in (client, server):
            side.record()
        world.pass_time(500.0)
        assert deletions(client) == deletions(server) == []
        calls = [world.connect(client, server, size=BIG)]
        world.pass_time(CHECK_INTERVAL)
        # Now the group continues, and deletes the RMBs that were idle for long enough.
        assert len(client.group.own_rmbs) == len(server.group.own_rmbs) == 1
        close(world, calls)
        world.pass_time(610.0)
        assert not client.groups
        assert not server.groups


# --- the exchange ---------------------------------------------------------------------------------


@pytest.mark.rfc("3.5.5.2.2/3")
def test_an_rmb_is_freed_after_the_reply_and_not_used_meanwhile() -> None:
    with World() as world:
        client, server, _ = with_links(world, 2)
        close(world, [world.connect(client, server, size=BIG) for _ in range(3)])
        keeper = Keeper(world, server, llc.MessageType.DELETE_RKEY)
        world.pass_time_until(lambda: any(message[3] & 0x80 for _, message in keeper.kept))
        leaving = client.group.own_rmbs.leaving
        before = len(client.group.own_rmbs)
        assert len(leaving) == before - 2
        assert all(rmb.memory.size for rmb in leaving)
        for link in client.group.links.values():
            # The peer may write until it has replied, so the RKeys are still valid.
            assert isinstance(link.qp, PlainQueuePair)
            rkeys = [client.group.own_rmbs.region(rmb, link).rkey for rmb in leaving]
            assert set(rkeys) <= set(link.qp.domain.regions)
        assert client.group.exchanges.state == "CHANGE_RKEYS"
        calls = [world.call(client, server, size=BIG) for _ in range(2)]
        world.settle()
        assert not any(element.in_use for rmb in leaving for element in rmb.elements)
        keeper.release()
        assert all(call.states == ("ESTABLISHED", "ESTABLISHED") for call in calls)
        assert not any(rmb.memory.size for rmb in leaving)
        assert all(call.client.connection.rmbe.rmb not in leaving for call in calls)
        assert knows_all_rmbs(client.group, server.group)


@pytest.mark.rfc("A.3.7/4")
def test_a_negative_reply_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A.3.7: the peer no longer knew the RMBs, and this side does not recover aggressively."""
    caplog.set_level(logging.INFO, logger="trio_smc")
    with World() as world:
        client, server, kept = with_links(world, 2)
        close(world, [world.connect(client, server, size=BIG) for _ in range(3)])
        for rmb in client.group.own_rmbs.pool.rmbs[1:]:
            rkey = client.group.own_rmbs.tokens(rmb)[1].rkey
            known = server.group.peer_rmbs.find(1, rkey)
            assert known is not None
            server.group.peer_rmbs.remove(known)
        client.record()
        world.pass_time(RMB_IDLE + CHECK_INTERVAL)
        (reply,) = [each for each in all_messages(client) if _is_answer(each)]
        count = len(reply.rkeys)
        assert (reply.negative, reply.error_mask) == (True, 0xFF << 8 - count & 0xFF)
        assert "did not know all RKeys" in caplog.text
        assert len(client.group.own_rmbs) == 2
        assert exchange(world, kept, (b"ping", b"pong")) == (b"pong", b"ping")


def _is_answer(message: Any) -> bool:
    return isinstance(message, llc.DeleteRkey) and message.reply and message.negative


@pytest.mark.parametrize("how", ["terminate", "links lost", "stack"])
def test_a_group_may_end_during_delete_rkey(how: str) -> None:
    with World() as world:
        client, server, _ = with_links(world, 2)
        close(world, [world.connect(client, server, size=BIG) for _ in range(12)])
        keeper = Keeper(world, server, llc.MessageType.DELETE_RKEY)
        world.pass_time_until(lambda: any(message[3] & 0x80 for _, message in keeper.kept))
        group = client.group
        if how == "terminate":
            group.terminate()
        elif how == "links lost":
            for link in list(group.links.values()):
                link.machine.send("failed")
        else:
            client.free()
        world.pass_time(RMB_IDLE + 2 * CHECK_INTERVAL)
        assert not client.groups
        assert len(group.own_rmbs) == 0


def test_a_deletion_whose_reply_was_lost_is_repeated() -> None:
    """2.3: the side repeats the exchange over another link, and does not reuse its RMBs."""
    with World() as world:
        client, server, _ = with_links(world, 2)
        close(world, [world.connect(client, server, size=BIG) for _ in range(3)])
        keeper = Keeper(world, server, llc.MessageType.DELETE_RKEY)
        world.pass_time_until(lambda: any(message[3] & 0x80 for _, message in keeper.kept))
        leaving = client.group.own_rmbs.leaving
        world.fabric.tamper = None
        carrier = client.group.rkey_exchanges.carrier
        assert carrier is not None
        client.record()
        carrier.machine.send("failed")
        world.pass_time(CHECK_INTERVAL + 1)
        (again,) = deletions(client)
        assert len(again.rkeys) == len(leaving)
        assert not any(rmb.memory.size for rmb in leaving)
        assert knows_all_rmbs(client.group, server.group)


def test_a_new_rmb_that_the_peer_may_know_after_all_is_taken_back() -> None:
    """2.3, 3.5.5.3.1: the reply is lost with its link.  The peer, which knows the RMB, then refuses
    because it is busy, so the side deletes the RMB."""
    with World() as world:
        client, server, _ = with_links(world, 2)
        keeper = Keeper(world, server, llc.MessageType.CONFIRM_RKEY)
        done = elements(client, 1)
        world.until(lambda: bool(keeper.kept))
        assert len(server.group.peer_rmbs) == 2
        world.fabric.tamper = None
        carrier = client.group.rkey_exchanges.carrier
        assert carrier is not None
        other = 3 - carrier.number
        carrier.machine.send("failed")
        server.group.exchanges.begin("add_link", server.group.links[other])
        server.group.exchanges.stop_reply_timer()
        world.pass_time_until(lambda: bool(done))
        assert done == [None]
        server.group.exchanges.machine.send("refused")
        client.record()
        world.pass_time(CHECK_INTERVAL + 1)
        assert [len(each.rkeys) for each in deletions(client)] == [1]
        assert len(client.group.own_rmbs) == len(server.group.peer_rmbs) == 1
        assert knows_all_rmbs(client.group, server.group)


# --- RMBs made in advance -------------------------------------------------------------------------


def test_a_burst_finds_its_next_rmb_ready() -> None:
    """3.5.5.2.1: the side makes one RMB at a time in anticipation of need."""
    with World() as world:
        client, server, _ = with_links(world, 2)
        calls = [world.connect(client, server) for _ in range(2)]
        assert len(client.group.own_rmbs) == len(server.group.own_rmbs) == 1
        calls.append(world.connect(client, server))  # the fourth of four elements
        assert len(client.group.own_rmbs) == len(server.group.own_rmbs) == 2
        client.record()
        calls += [world.connect(client, server) for _ in range(3)]
        assert not [each for each in transcript(client) if "RKEY" in each]
        assert len(client.group.own_rmbs) == len(server.group.own_rmbs) == 2
        assert all(
            exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping") for call in calls
        )


def test_a_link_that_fails_while_a_spare_is_announced_is_not_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SMC Confirm names a remaining link, not the one that failed with the spare's CONFIRM RKEY."""
    with World() as world:
        client, server, _ = with_links(world, 2)
        for _ in range(2):
            world.connect(client, server)
        lost: list[Link] = []
        # The server names the link that carries the client's message.
        carrier = client.group.links.for_llc()
        assert carrier is not None
        named = server.group.links[carrier.number]
        choose = server.group.links.least_loaded

        def least_loaded(but: Link | None = None, among: Any = None) -> Link | None:
            return named if among is None else choose(but, among)  # SMC Accept names this link

        monkeypatch.setattr(server.group.links, "least_loaded", least_loaded)

        def refuse_once(link: Link) -> Any:
            post = link.qp.post_send

            def refuse(wr_id: int, data: bytes, *, signaled: bool = True) -> None:
                spare = len(client.group.own_rmbs) == 2
                if data[0] == llc.MessageType.CONFIRM_RKEY and spare and not lost:
                    lost.append(link)
                    raise RnicError(errno.EIO, "gone")
                post(wr_id, data, signaled=signaled)

            return refuse

        for link in client.group.links.values():
            monkeypatch.setattr(link.qp, "post_send", refuse_once(link))
        call = world.call(client, server)
        world.finish()
        assert [link.state for link in lost] == ["DOWN"]
        assert isinstance(call.client.outcome, Established)
        assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")


def test_connections_that_come_slowly_make_nothing_ahead() -> None:
    with World() as world:
        client, server, _ = with_links(world, 1)
        for _ in range(3):
            world.pass_time(1.5)
            world.connect(client, server)
        assert len(client.group.own_rmbs) == len(server.group.own_rmbs) == 1


def test_an_unused_spare_is_deleted() -> None:
    with World() as world:
        client, server, _ = with_links(world, 1)
        for _ in range(3):
            world.connect(client, server)
        assert len(client.group.own_rmbs) == 2
        world.pass_time(RMB_IDLE + CHECK_INTERVAL)
        assert len(client.group.own_rmbs) == len(server.group.own_rmbs) == 1


def test_no_memory_for_a_spare_harms_no_connection() -> None:
    with World() as world:
        client, server, _ = with_links(world, 1)
        world.connect(client, server)
        client.rnic.no_memory = True
        calls = [world.connect(client, server) for _ in range(2)]
        assert all(call.states == ("ESTABLISHED", "ESTABLISHED") for call in calls)
        assert len(client.group.own_rmbs) == 1
        client.rnic.no_memory = False
        call = world.connect(client, server)
        assert call.states == ("ESTABLISHED", "ESTABLISHED")


def test_spares_leave_room_for_requested_rmbs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_rmbs, "MAX_RMBS", 18)  # the last 16 are reserved for requests
    with World() as world:
        client, server, _ = with_links(world, 1)
        for _ in range(7):
            world.connect(client, server)
        assert len(client.group.own_rmbs) == 2  # both are full, without a spare
        for _ in range(4):
            world.connect(client, server)
            assert len(client.group.own_rmbs) == 3


# --- 255 RMBs -------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rmb_module, "ROCE_RMB_SIZE", SMALL)


@pytest.mark.pure
@pytest.mark.rfc("3.5.3/1", "2.1/1")
@pytest.mark.usefixtures("small")
def test_with_255_rmbs_a_server_opens_a_parallel_group_and_a_client_falls_back() -> None:
    with World() as world:
        client, server = (world.side(Config(link_group_idle=10_000)) for _ in range(2))
        world.connect(client, server, size=SMALL)
        full = server.group
        done = elements(server, MAX_RMBS - 1, SMALL)
        world.settle()
        assert (len(done), len(full.own_rmbs)) == (MAX_RMBS - 1, MAX_RMBS)
        assert not full.can_take(SMALL)
        call = world.connect(client, server, size=SMALL)
        assert call.states == ("ESTABLISHED", "ESTABLISHED")
        assert len(server.groups) == len(client.groups) == 2
        other = client.groups[1]
        taken: list[Any] = []
        for _ in range(MAX_RMBS):
            other.request_element(SMALL, taken.append)
        world.settle()
        assert taken.count(None) == 1
        call = world.connect(client, server, size=SMALL)
        assert call.states == ("FALLEN_BACK", "FALLEN_BACK")
        assert call.client.fallback.reason is FallbackReason.OUT_OF_RESOURCES
        # A released element makes room again.
        other.own_rmbs.release(taken[0], 0)
        call = world.connect(client, server, size=SMALL)
        assert call.states == ("ESTABLISHED", "ESTABLISHED")
