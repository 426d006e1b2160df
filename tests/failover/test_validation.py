"""Failover validation messages that overtake messages on other links (RFC 7609, 4.6.1)."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from trio_smc._base.errors import ProtocolError
from trio_smc.failover.mover import GroupMover
from trio_smc.rendezvous.links.link import Link
from trio_smc.rnic.verbs import Completion, WcOpcode
from trio_smc.wire import cdc
from trio_smc.wire.cdc import MessageMissing


def message(token: int, sequence: int, flags: int = 0) -> bytes:
    return cdc.pack(sequence & 0xFFFF, token, 0, 0, 0, 0, flags)


def validation(token: int, sequence: int) -> bytes:
    return cdc.pack(sequence & 0xFFFF, token, 0, 0, 0, 0, cdc.FAILOVER_VALIDATION)


class Reader:
    """A connection that records the messages that it receives.

    A connection with a loss reports it again and again, which must not cost other connections more.
    """

    def __init__(self, last: int = 0) -> None:
        self.last = last
        self.given: list[int] = []
        self.lost: list[Exception] = []

    def on_cdc_untrusted(self, message: cdc.CdcItems) -> None:
        sequence, flags = message[1], message[7]
        if flags & cdc.FAILOVER_VALIDATION:
            if (self.last - sequence) & 0x8000:
                raise MessageMissing(f"{sequence} is missing after {self.last}")
            return
        if not (sequence - self.last) & 0x8000:
            self.last = sequence
            self.given.append(sequence)

    def protocol_error(self, error: Exception) -> None:
        self.lost.append(error)


class Rings:
    """Links with the messages in their receive rings, in the order of arrival."""

    def __init__(self, connections: dict[int, Reader], *contents: list[bytes]) -> None:
        self.connections = connections
        group: Any = SimpleNamespace(host=SimpleNamespace(observer=None), links={})
        self.group = group
        self.mover = group.mover = GroupMover(group, self.drain)
        group.connections = connections
        self.rings: dict[int, deque[bytes]] = {}
        self.links: list[Link] = []
        for content in contents:
            self.add(content)

    def add(self, content: list[bytes]) -> int:
        """One more link; returns its number."""
        number = len(self.links) + 1
        link = Link.__new__(Link)
        link.number = number
        link.group = self.group
        link.rnic = SimpleNamespace(name=f"rnic{number}")  # type: ignore[assignment]
        link.qp = SimpleNamespace(qp_num=number, to_err=lambda: None)  # type: ignore[assignment]
        link.machine = SimpleNamespace(state="ACTIVE")  # type: ignore[assignment]
        link.failing = False
        link.backlog = None
        link._connection_of = self.connections  # type: ignore[assignment]
        link._host = self.group.host
        link._received, link._replenish = 0, 100_000
        self.links.append(link)
        self.rings[number] = deque(content)
        self.group.links[number] = link
        return number

    def ends(self, number: int) -> None:
        """The link fails or is deleted at this side."""
        del self.group.links[number]
        self.mover.link_ends(self.links[number - 1])

    def drain(self, _: Any, qp: Any) -> None:
        link = next(each for each in self.links if each.qp is qp)
        ring = self.rings[qp.qp_num]
        while ring:
            link.on_completion(Completion(qp.qp_num, int(WcOpcode.RECV), 0, 0, ring.popleft()))

    def take(self, number: int) -> None:
        """Process a completion of this link."""
        link = self.links[number - 1]
        self.drain(link.rnic, link.qp)
        assert not any(each.backlog for each in self.links)
        assert not any(self.rings.values())


def test_a_message_on_another_link_is_found() -> None:
    one = Reader()
    Rings({1: one}, [validation(1, 5), message(1, 6)], [message(1, 5)]).take(1)
    assert (one.given, one.lost) == ([5, 6], [])


@pytest.mark.parametrize("first", [1, 2])
def test_two_that_wait_for_each_others_links(first: int) -> None:
    """One connection moved from the second link to the first, the other one to the second."""
    one, two = Reader(), Reader()
    Rings(
        {1: one, 2: two},
        [validation(1, 5), message(2, 7), message(1, 6)],
        [message(1, 5), validation(2, 7), message(2, 8)],
    ).take(first)
    assert (one.given, one.lost) == ([5, 6], [])
    assert (two.given, two.lost) == ([7, 8], [])


def test_a_chain_over_three_links() -> None:
    one, two, three = Reader(), Reader(), Reader()
    Rings(
        {1: one, 2: two, 3: three},
        [validation(1, 1), message(2, 1)],
        [message(3, 1), validation(2, 1), validation(1, 1), message(1, 2)],
        [validation(3, 1), message(1, 1), validation(2, 1), message(2, 2)],
    ).take(1)
    for reader in (one, two):
        assert (sorted(reader.given), reader.lost) == ([1, 2], [])
    assert (three.given, three.lost) == ([1], [])


@pytest.mark.parametrize("flags", [0, cdc.WRITER_BLOCKED])
@pytest.mark.parametrize("seven", [7, 0x1007])
@pytest.mark.parametrize("first", [1, 2])
def test_a_lost_message_costs_one_connection(first: int, seven: int, flags: int) -> None:
    one, two = Reader(), Reader()
    Rings(
        {1: one, 2: two},
        [validation(1, 9), message(2, seven, flags), message(1, 10)],
        [message(1, 5), validation(2, seven), message(2, seven + 1)],
    ).take(first)
    assert len(one.lost) == 1
    assert "9 is missing after 5" in str(one.lost[0])
    assert (two.given, two.lost) == ([seven, seven + 1], [])


def test_a_connection_that_ended_meanwhile_is_no_loss() -> None:
    one, two = Reader(), Reader()
    connections = {1: one, 2: two}
    rings = Rings(connections, [validation(1, 9), message(2, 1)], [message(2, 2)])

    def ended(message: cdc.CdcItems) -> None:
        connections.pop(1, None)
        two.given.append(message[1])

    two.on_cdc_untrusted = ended  # type: ignore[method-assign]
    rings.take(1)
    assert not one.lost
    assert sorted(two.given) == [1, 2]


def test_a_connection_that_fails_when_it_is_judged_again_costs_no_other() -> None:
    one, two = Reader(), Reader()
    rings = Rings(
        {1: one, 2: two},
        [validation(1, 5), message(2, 1), message(1, 6)],
        [message(1, 5)],
    )
    take = one.on_cdc_untrusted

    def fails(message: cdc.CdcItems) -> None:
        take(message)
        if message[7]:
            raise ProtocolError("its cursors make no sense")

    one.on_cdc_untrusted = fails  # type: ignore[method-assign]
    rings.take(1)
    assert one.given == [5, 6]
    assert (two.given, two.lost) == ([1], [])


def test_the_rest_of_a_link_that_ends_is_found() -> None:
    """The group has removed the link; one of its messages starts a check of the other links."""
    one, two = Reader(), Reader()
    rings = Rings(
        {1: one, 2: two}, [validation(2, 3)], [message(1, 1), message(2, 3), message(1, 2)]
    )
    take = one.on_cdc_untrusted

    def catches_up(message: cdc.CdcItems) -> None:
        take(message)
        if one.last == 1:
            rings.mover.catch_up()

    one.on_cdc_untrusted = catches_up  # type: ignore[method-assign]
    rings.ends(2)
    assert (one.given, one.lost) == ([1, 2], [])
    assert (two.given, two.lost) == ([3], [])


# --- what waits, and what only seems to -------------------------------------------------------


def test_a_loss_reported_on_two_links_blocks_no_reader() -> None:
    """One connection lost a message and its validation message failed with the next link, too.

    Both links of this connection wait for messages that no longer exist.  The first messages of a
    new connection are behind them, and are not lost.
    """
    one, new, two = Reader(30), Reader(), Reader(9)
    Rings(
        {1: one, 2: new, 3: two},
        [validation(1, 31), message(1, 32), validation(2, 3), message(2, 4)],
        [validation(3, 10), message(2, 1), message(2, 2), message(2, 3)],
        [validation(3, 10), message(3, 11)],
    ).take(1)
    assert (new.given, new.lost) == ([1, 2, 3, 4], [])
    assert one.lost
    assert two.lost


def test_messages_behind_the_loss_are_not_awaited() -> None:
    """A later message has no information on the missing one."""
    one, new = Reader(2), Reader()
    Rings(
        {1: one, 2: new},
        [validation(2, 1), message(2, 2), validation(1, 4), message(1, 5)],
        [validation(1, 3), message(2, 1), message(1, 4)],
    ).take(1)
    assert (new.given, new.lost) == ([1, 2], [])
    assert len(one.lost) == 1


def test_a_message_cut_short_is_not_waited_for() -> None:
    one, two = Reader(), Reader()
    rings = Rings(
        {1: one, 2: two},
        [validation(1, 1), validation(2, 1)],
        [validation(2, 1), message(1, 1)[:8], message(1, 1)[:20]],
    )
    rings.take(1)
    assert one.lost
    assert two.lost


def test_sequence_numbers_wrap_while_one_waits() -> None:
    one, two = Reader(0xFFFE), Reader()
    Rings(
        {1: one, 2: two},
        [validation(1, 0x10001), validation(2, 1), message(2, 2), message(1, 0x10002)],
        [validation(2, 1), message(1, 0xFFFF), message(1, 0x10000), message(1, 0x10001)],
    ).take(1)
    assert (one.given, one.lost) == ([0xFFFF, 0, 1, 2], [])
    assert two.lost


class Sent:
    """The messages that one connection of the peer has sent."""

    def __init__(self, token: int, link: int) -> None:
        self.token = token
        self.link = link
        self.sequence = self.completed = 0
        self.lost = False


class Schedule:
    """A peer whose connections send, move and lose messages, and links that are polled late."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.readers: dict[int, Reader] = {}
        self.rings = Rings(self.readers)
        self.up = [self.rings.add([]) for _ in range(self.rng.randint(2, 4))]
        self.failed: list[int] = []  # links whose failure this side has not noticed
        self.sent: list[Sent] = []

    def begin(self) -> None:
        one = Sent(len(self.sent) + 1, self.rng.choice(self.up))
        self.readers[one.token] = Reader()
        self.sent.append(one)

    def post(self, one: Sent, *, complete: bool) -> None:
        """Post a message that arrives; ``complete``: the sender gets the completion."""
        one.sequence += 1
        self.rings.rings[one.link].append(message(one.token, one.sequence))
        if complete:
            one.completed = one.sequence

    def lose(self, one: Sent) -> None:
        """Lose a message whose completion is good: the link fails with it."""
        one.sequence += 1
        one.completed = one.sequence
        one.lost = True
        self.fail(one.link)

    def fail(self, link: int) -> None:
        self.up.remove(link)
        self.failed.append(link)
        self.up.append(self.rings.add([]))
        for each in self.sent:
            if each.link == link:
                self.move(each, self.rng.choice(self.up[:-1]))

    def move(self, one: Sent, link: int) -> None:
        one.link = link
        self.rings.rings[link].append(validation(one.token, one.completed))
        if one.completed != one.sequence or self.rng.random() < 0.7:
            self.post(one, complete=self.rng.random() < 0.5)

    def leave(self, one: Sent) -> None:
        """Move to another link if no message is in flight."""
        one.completed = one.sequence
        self.move(one, self.rng.choice(self.up))

    def look(self) -> None:
        """Process the messages of a link, or notice that a link has failed."""
        if self.failed and self.rng.random() < 0.4:
            link = self.failed.pop(self.rng.randrange(len(self.failed)))
            self.rings.ends(link)
        else:
            link = self.rng.choice([*self.up, *self.failed])
            self.rings.drain(None, self.rings.links[link - 1].qp)

    def run(self, steps: int) -> None:
        for _ in range(2):
            self.begin()
        for _ in range(steps):
            one = self.rng.choice(self.sent)
            [what] = self.rng.choices(range(6), (8, 40, 3, 4, 10, 12))
            if what == 0:
                self.begin()
            elif what == 1:
                self.post(one, complete=self.rng.random() < 0.7)
            elif what == 2 and not one.lost:
                self.lose(one)
            elif what == 3:
                self.fail(self.rng.choice(self.up))
            elif what == 4:
                self.leave(one)
            elif what == 5:
                self.look()
        for link in [*self.up, *self.failed]:
            self.rings.drain(None, self.rings.links[link - 1].qp)

    def wrong(self) -> list[str]:
        """The connections whose result is wrong."""
        found = []
        for one in self.sent:
            reader = self.readers[one.token]
            if bool(reader.lost) != one.lost:
                found.append(f"{one.token}: {reader.lost} instead of {one.lost}")
            elif not one.lost and reader.last != one.sequence:
                found.append(f"{one.token}: {reader.last} instead of {one.sequence}")
        return found


def test_many_moves_and_losses(seed: int) -> None:
    """Links fail again and again while others wait: exactly the readers with a loss report one."""
    losses = 0
    for number in range(400):
        schedule = Schedule(seed + number)
        schedule.run(60)
        assert schedule.wrong() == [], f"schedule {seed + number}"
        losses += sum(one.lost for one in schedule.sent)
    assert losses > 100
