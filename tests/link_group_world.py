"""Two link-group cores back to back, and a scheduler that holds every string.

`GroupWorld` is a `World` (no sockets, no threads, no clock) with two sides of one or more RNICs
each.  What is on its way waits in a queue for each queue pair; `GroupWorld.nudge` moves one small
thing, chosen by the seed, so that everything may come in any order that the wire allows.
`Stream` is a connection whose bytes are known by their position, and `agreement` says what two
sides that were left to settle must agree on.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

from tests.memory_rnic import Fate, PlainQueuePair
from tests.rendezvous_pair import SIZE, Call, End, World
from trio_smc._base.config import Config
from trio_smc._base.errors import ProtocolError
from trio_smc.datapath.cdc import CDC_TYPE
from trio_smc.datapath.connection import Connection
from trio_smc.rendezvous import llc
from trio_smc.rendezvous.link import Link
from trio_smc.rendezvous.link_group import LinkGroup
from trio_smc.rendezvous.outcomes import Established
from trio_smc.rnic.verbs import QpState

__all__ = [
    "SIZES", "GroupWorld", "Stream", "Trace", "agreement", "is_sound", "kind_of", "known",
    "partners", "registered",
]  # fmt: skip

_PERIOD = 1 << 16
_BYTES = bytes(random.Random(7609).randbytes(_PERIOD)) * 2
_MOST = 16 * 1024
SIZES = (1 << 16, SIZE, 4 * SIZE)
"""Bytes of an RMB element: 64, four and one in an RMB."""


class Trace:
    """An observer that writes down LLC messages and states, in order, for whoever replays."""

    def __init__(self, name: str, world: World, write: Callable[[str], None]) -> None:
        self._name = name
        self._world = world
        self._write = write

    def say(self, text: str) -> None:
        self._write(f"{self._world.clock.now - 1000:8.2f} {self._name:6} {text}")

    def llc(self, link: Any, outgoing: bool, message: bytes) -> None:
        try:
            text = _brief(llc.decode_untrusted(message))
        except ProtocolError as error:
            text = f"{message.hex()}: {error}"
        self.say(f"{link!r} {'->' if outgoing else '<-'} {text}")

    def cdc(self, link: Any, outgoing: bool, message: bytes) -> None:
        self.say(
            f"{link!r} {'->' if outgoing else '<-'} CDC {message[2:8].hex()} {message[32:33]!r}"
        )

    def state(self, subject: Any, old: str, new: str, event: str) -> None:
        text = repr(subject)
        name = type(subject).__name__ if " object at 0x" in text else text
        self.say(f"{name}: {old} -> {new} ({event})")

    def clc(self, connection: object, outgoing: bool, message: bytes) -> None:
        self.say(f"CLC {'->' if outgoing else '<-'} type {message[4]}")

    def rdma_write(self, link: Any, address: int, rkey: int, data: Any) -> None:
        self.say(f"{link!r} RDMA write to {address:#x}, RKey {rkey:#x}")

    def mode(self, connection: object, fallback: object) -> None:
        self.say(f"mode: {fallback or 'SMC-R'}")


def _brief(message: llc.Message) -> str:
    """What is in an LLC message, without what is nothing and what only addresses it."""
    text = type(message).__name__
    for each in dataclasses.fields(message):
        value = getattr(message, each.name)
        if each.name == "gid":
            text += f" RNIC {value[-1]}"
        elif value and each.name not in ("mac", "user_data", "initial_psn", "link_user_id"):
            number = isinstance(value, int) and value > 255
            text += (
                f" {each.name}"
                if value is True
                else f" {each.name}={value:#x}"
                if number
                else (f" {each.name}={value}")
            )
    return text


class _Direction:
    """Bytes from one end of a stream to the other, known by their position."""

    def __init__(self, salt: int) -> None:
        self.salt = salt
        self.sent = 0
        self.received = 0

    def piece(self, length: int) -> memoryview:
        start = (self.salt + self.sent) % _PERIOD
        return memoryview(_BYTES[start : start + length])

    def check(self, data: bytes) -> None:
        start = (self.salt + self.received) % _PERIOD
        assert data == _BYTES[start : start + len(data)], (
            f"other bytes at position {self.received}: sent were {self.sent}"
        )
        self.received += len(data)
        assert self.received <= self.sent, "more bytes than were sent"


class Stream:
    """A connection between the two sides, from its first CLC message to its end.

    Attributes:
      call: the rendezvous; `call.ends` are client and server.
      closed: whether this side's application has closed, for each end.
      failed: whether this end's application got an error.
    """

    def __init__(self, call: Call, salt: int) -> None:
        self.call = call
        self.flows = (_Direction(salt), _Direction(salt + 1000))
        self.closed = [False, False]
        self.failed = [False, False]

    @property
    def settled(self) -> bool:
        """Whether the rendezvous is over on both sides."""
        return all(end.outcome is not None for end in self.call.ends)

    @property
    def both(self) -> bool:
        """Whether both sides took it for SMC-R."""
        return all(isinstance(end.outcome, Established) for end in self.call.ends)

    def connection(self, place: int) -> Connection | None:
        """This end's connection, once it is established."""
        end: End = self.call.ends[place]
        return end.connection if isinstance(end.outcome, Established) else None

    def alive(self, place: int) -> bool:
        """Whether this end can still be used."""
        connection = self.connection(place)
        return not (
            connection is None
            or self.closed[place]
            or self.failed[place]
            or connection.state == "CLOSED"
        )

    def send(self, place: int, length: int) -> None:
        """Send up to ``length`` bytes from this end."""
        connection, flow = self.connection(place), self.flows[place]
        if connection is None or not self.alive(place):
            return
        try:
            flow.sent += connection.send(flow.piece(length))
        except OSError:
            self.failed[place] = True

    def receive(self, place: int, length: int = _MOST) -> int:
        """Take up to ``length`` bytes at this end; how many."""
        connection, flow = self.connection(place), self.flows[1 - place]
        if connection is None or self.closed[place] or self.failed[place]:
            return 0
        try:
            data = connection.receive(length)
        except OSError:
            self.failed[place] = True
            return 0
        flow.check(data)
        return len(data)

    def close(self, place: int) -> None:
        """This end's application is done."""
        connection = self.connection(place)
        if connection is not None and not self.closed[place]:
            self.closed[place] = True
            connection.close()

    def abort(self, place: int) -> None:
        """This end's application gives up."""
        connection = self.connection(place)
        if connection is not None and not self.closed[place]:
            self.closed[place] = True
            connection.abort()


class GroupWorld(World):
    """Two sides, their streams, and everything on its way.

    Args:
      rng: decides what moves next.
      rnics: how many RNICs client and server have.
      write: takes the lines of a trace; None: no trace.
    """

    def __init__(
        self,
        rng: random.Random,
        rnics: tuple[int, int],
        *,
        config: Config | None = None,
        write: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(tells_death=False)
        self.rng = rng
        self.client = self.side(config, rnics=rnics[0])
        self.server = self.side(config, rnics=rnics[1])
        self.streams: list[Stream] = []
        self.fate = Fate.DONE
        """What becomes of the next request that is done."""
        self._trace: Trace | None = None
        if write is not None:
            self._trace = Trace("world", self, write)
            for side, name in ((self.client, "client"), (self.server, "server")):
                side.stack.observer = Trace(name, self, write)

    @property
    def client_groups(self) -> list[LinkGroup]:
        """The groups in the client's role, on both sides."""
        return [group for side in self.sides for group in side.groups if group.client]

    def say(self, text: str) -> None:
        """Tell the trace."""
        if self._trace is not None:
            self._trace.say(text)

    def open(self, size: int, *, reverse: bool = False) -> Stream:
        """A new connection; its rendezvous has only begun.  ``reverse``: the server opens it."""
        sides = (self.server, self.client) if reverse else (self.client, self.server)
        stream = Stream(self.call(*sides, size=size), 77 * len(self.streams))
        self.streams.append(stream)
        return stream

    def queue_pairs(self) -> list[PlainQueuePair]:
        """All there are."""
        return [qp for side in self.sides for rnic in side.rnics for qp in rnic.qps.values()]

    # --- moving ------------------------------------------------------------------------------

    def deliverable(self) -> list[PlainQueuePair]:
        """Queue pairs whose next request can be done; a SEND waits for a receive buffer."""
        return [qp for qp in self.fabric.busy if not _waits(qp)]

    def execute(self, qp: PlainQueuePair) -> None:
        """Do the oldest request of ``qp``; `fate` says what becomes of it."""
        fate, self.fate = self.fate, Fate.DONE
        if fate is not Fate.DONE:
            self.say(f"{fate} for a request of queue pair {qp.qp_num:#x}")
        qp.execute(fate)

    def nudge(self) -> None:
        """One small thing moves: a request of some queue pair, a side, a handshake."""
        rng = self.rng
        pick = rng.random()
        if pick < 0.45:
            ready = self.deliverable()
            if ready:
                qp = rng.choice(ready)
                for _ in range(rng.choice((1, 1, 2, 4))):
                    if qp.work and not _waits(qp):
                        self.execute(qp)
        elif pick < 0.8:
            rng.choice(self.sides).stack.pump.drain()
        elif self.news and pick < 0.87:
            self.news.popleft().look()
        elif self.calls:
            rng.choice(rng.choice(self.calls).ends).step(self.clock.now)

    def step(self) -> bool:
        """One round in which everything moves a little; False when nothing moved."""
        moved = False
        for call in list(self.calls):
            for end in call.ends:
                while end.step(self.clock.now):
                    moved = True
        while self.news:
            self.news.popleft().look()
            moved = True
        for qp in self.deliverable():
            while qp.work and not _waits(qp):
                self.execute(qp)
            moved = True
        for side in self.sides:
            moved |= side.stack.pump.drain()
        self.calls = [call for call in self.calls if any(end.outcome is None for end in call.ends)]
        return moved

    def stall(self) -> None:
        """Nothing moves until the next timer is due."""
        due = self.next_deadline()
        if due < float("inf"):
            self.clock.now = max(due, self.clock.now)
            for side in self.sides:
                side.stack.timers.run_due()
            for call in self.calls:
                for end in call.ends:
                    end.time_out(self.clock.now)

    def close(self) -> None:
        for rnic in (rnic for side in self.sides for rnic in side.rnics):
            assert not rnic.access_errors, f"{rnic.name} was written to where nothing is"
        super().close()


def _waits(qp: PlainQueuePair) -> bool:
    """Whether the next request is a SEND that the peer has no buffer for: RC tries again."""
    if not qp.work or qp.work[0].message is None:
        return False
    peer = qp.peer()
    return peer is not None and not peer.receives and peer.state is QpState.RTS


def kind_of(group: LinkGroup) -> str:
    """ "single", "asymmetric" or "symmetric"."""
    return str(group.links.kind)


def is_sound(world: GroupWorld) -> bool:
    """Whether there are groups, symmetric, whose links all work and which nobody is changing."""
    groups = [group for side in world.sides for group in side.groups]
    if not groups or any(kind_of(group) != "symmetric" for group in groups):
        return False
    if any(group.exchanges.state != "IDLE" or group.deletion._asked for group in groups):
        return False
    ours = {_ends(group) for group in groups if group.client}
    if ours != {_ends(group) for group in groups if not group.client}:
        return False
    for qp in world.queue_pairs():
        peer = qp.peer()
        if peer is None or qp.state is not QpState.RTS or not qp.reaches(peer):
            return False
        if any(work.message is not None and work.message[0] != CDC_TYPE for work in qp.work):
            return False
    return not any(
        done.status or (done.data is not None and done.data[0] != CDC_TYPE)
        for side in world.sides
        for rnic in side.rnics
        for done in rnic.done
    )


# --- what two sides agree on --------------------------------------------------------------


def partners(world: GroupWorld) -> list[tuple[LinkGroup, LinkGroup]]:
    """The two halves of each link group, the client's first; AssertionError when one is alone."""
    groups = [group for side in world.sides for group in side.groups]
    halves = {_ends(group): group for group in groups if not group.client}
    pairs = []
    for group in groups:
        if group.client:
            other = halves.pop(_ends(group), None)
            if other is None:
                theirs = [_links(each) for each in groups if not each.client]
                raise AssertionError(f"the client has links {_links(group)}, the server {theirs}")
            pairs.append((group, other))
    assert not halves, f"only the server has links {[_links(each) for each in halves.values()]}"
    return pairs


def _ends(group: LinkGroup) -> frozenset[tuple[int, int, int]]:
    """Number and queue pairs of each link, the client's first."""
    found = []
    for link in group.links.values():
        assert link.peer is not None, f"{link!r} has no peer"
        pair = (link.qp.qp_num, link.peer.qp_number)
        found.append((link.number, *(pair if group.client else pair[::-1])))
    return frozenset(found)


def _links(group: LinkGroup) -> list[str]:
    return [
        f"{link!r} {link.qp.qp_num:#x}-{link.peer.qp_number if link.peer else 0:#x}"
        for link in group.links.values()
    ]


def agreement(world: GroupWorld) -> None:
    """Raise AssertionError unless both sides mean the same links, RTokens and connections."""
    pairs = partners(world)
    for pair in pairs:
        for group in pair:
            _check_links(group)
        kinds = [kind_of(group) for group in pair]
        assert kinds[0] == kinds[1], f"the client's group is {kinds[0]}, the server's {kinds[1]}"
        for group, other in (pair, pair[::-1]):
            ours, theirs = registered(group), known(other)
            assert ours == theirs, (
                f"{group!r} registered {sorted(map(sorted, ours - theirs))} that the peer does not"
                f" know; the peer knows {sorted(map(sorted, theirs - ours))} that there is not"
            )
    for stream in world.streams:
        _check_stream(stream, pairs)
    _check_held(world)


def _check_links(group: LinkGroup) -> None:
    assert group.state in ("SINGLE", "ASYMMETRIC", "SYMMETRIC"), group
    assert group.exchanges.state == "IDLE", f"{group!r} is in {group.exchanges.state}"
    for number, link in group.links.items():
        assert number == link.number
        assert link.state in ("ACTIVE", "TESTING"), link
        assert link.qp.state is QpState.RTS, link


def registered(group: LinkGroup) -> set[frozenset[tuple[int, int, int]]]:
    """The RTokens (link number, RKey, address) of each own RMB."""
    return {
        frozenset((number, region.rkey, region.address) for number, region in regions.items())
        for regions in group.own_rmbs._regions.values()
    }


def known(group: LinkGroup) -> set[frozenset[tuple[int, int, int]]]:
    """The RTokens of each RMB of the peer."""
    return {
        frozenset((number, token.rkey, token.address) for number, token in rmb.tokens.items())
        for rmb in set(group.peer_rmbs._by_token.values())
    }


def _check_stream(stream: Stream, pairs: Sequence[tuple[LinkGroup, LinkGroup]]) -> None:
    alive = [stream.alive(0), stream.alive(1)]
    if not any(alive) or any(stream.closed):
        return
    assert alive == [True, True], f"alive are {alive}"
    ends = [stream.connection(0), stream.connection(1)]
    for place, mine in enumerate(ends):
        other = ends[1 - place]
        assert mine is not None
        assert other is not None
        link: Any = mine.channel
        assert isinstance(link, Link), f"{mine!r} sends on {link!r}"
        assert link.state in ("ACTIVE", "TESTING"), f"{mine!r} sends on {link!r}"
        pair = next(pair for pair in pairs if pair[place] is link.group)
        region = pair[1 - place].own_rmbs._regions[other.rmbe.rmb][link.number]
        writes_to = (mine._address - mine._peer_first, mine._rkey)
        right = (region.address + other.rmbe.offset, region.rkey)
        assert writes_to == right, f"{mine!r} writes to {writes_to}, not {right}"


def _check_held(world: GroupWorld) -> None:
    """Nothing is open but what groups and connections have."""
    groups = [group for side in world.sides for group in side.groups]
    links = sum(len(group.links) for group in groups)
    rmbs = [regions for group in groups for regions in group.own_rmbs._regions.values()]
    expected = {
        "memory": len(rmbs), "pd": links, "region": sum(map(len, rmbs)), "qp": links,
    }  # fmt: skip
    assert world.fabric.held == expected, f"open are {world.fabric.held}, in use {expected}"
