"""Failover validation messages that miss what another link brought (RFC 7609, 4.6.1)."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from trio_smc.datapath.cdc import CDC_TYPE, MessageMissing
from trio_smc.failover.mover import GroupMover
from trio_smc.rendezvous.link import Link
from trio_smc.rnic.verbs import Completion, WcOpcode

VALIDATION = 0x40


def message(token: int, sequence: int, flags: int = 0) -> bytes:
    head = bytes((CDC_TYPE, 44)) + sequence.to_bytes(2, "big") + token.to_bytes(4, "big")
    return head + bytes((flags,)) + bytes(35)


def validation(token: int, sequence: int) -> bytes:
    return message(token, sequence, VALIDATION)


class Reader:
    """A connection that notes what it is given."""

    def __init__(self) -> None:
        self.last = 0
        self.given: list[int] = []
        self.lost: list[Exception] = []

    def on_cdc_untrusted(self, data: bytes) -> None:
        sequence = int.from_bytes(data[2:4], "big")
        if data[8] & VALIDATION:
            if sequence > self.last:
                raise MessageMissing(f"{sequence} is missing after {self.last}")
            return
        self.last = sequence
        self.given.append(sequence)

    def protocol_error(self, error: Exception) -> None:
        self.lost.append(error)


class Rings:
    """Links with what lies in their receive rings, in the order in which it came."""

    def __init__(self, connections: dict[int, Reader], *contents: list[bytes]) -> None:
        group: Any = SimpleNamespace(host=SimpleNamespace(observer=None))
        group.mover = GroupMover(group, self.drain)
        self.rings: dict[int, deque[bytes]] = {}
        self.links: list[Link] = []
        for number, content in enumerate(contents, 1):
            link = Link.__new__(Link)
            link.number = number
            link.group = group
            link.rnic = SimpleNamespace(name=f"rnic{number}")  # type: ignore[assignment]
            link.qp = SimpleNamespace(qp_num=number, to_err=lambda: None)  # type: ignore[assignment]
            link.machine = SimpleNamespace(state="ACTIVE")  # type: ignore[assignment]
            link.failing = False
            link._behind = None
            link._connection_of = connections  # type: ignore[assignment]
            link._host = group.host
            link._received, link._replenish = 0, 1000
            self.links.append(link)
            self.rings[number] = deque(content)
        self.mover: GroupMover = group.mover
        self.group_links = group.links = dict(enumerate(self.links, 1))

    def drain(self, _: Any, qp: Any) -> None:
        link = next(each for each in self.links if each.qp is qp)
        ring = self.rings[qp.qp_num]
        while ring:
            link.on_completion(Completion(qp.qp_num, int(WcOpcode.RECV), 0, 0, ring.popleft()))

    def take(self, number: int) -> None:
        """A completion of this link is what wakes us."""
        link = self.links[number - 1]
        self.drain(link.rnic, link.qp)
        assert not any(each.waits for each in self.links)
        assert not any(self.rings.values())


def test_what_another_link_brought_is_found() -> None:
    one = Reader()
    Rings({1: one}, [validation(1, 5), message(1, 6)], [message(1, 5)]).take(1)
    assert (one.given, one.lost) == ([5, 6], [])


@pytest.mark.parametrize("first", [1, 2])
def test_two_that_wait_for_each_others_links(first: int) -> None:
    """One connection moved from the second link to the first, the other the other way."""
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
        [message(3, 1), validation(2, 1), message(1, 2)],
        [validation(3, 1), message(1, 1), message(2, 2)],
    ).take(1)
    for reader in (one, two):
        assert (sorted(reader.given), reader.lost) == ([1, 2], [])
    assert (three.given, three.lost) == ([1], [])


@pytest.mark.parametrize("first", [1, 2])
def test_what_is_lost_costs_one_connection(first: int) -> None:
    one, two = Reader(), Reader()
    Rings(
        {1: one, 2: two},
        [validation(1, 9), message(2, 7), message(1, 10)],
        [message(1, 5), validation(2, 7), message(2, 8)],
    ).take(first)
    assert len(one.lost) == 1
    assert "9 is missing after 5" in str(one.lost[0])
    assert (two.given, two.lost) == ([7, 8], [])


def test_a_connection_that_ended_meanwhile_is_nobodys_loss() -> None:
    one, two = Reader(), Reader()
    connections = {1: one, 2: two}
    rings = Rings(connections, [validation(1, 9), message(2, 1)], [message(2, 2)])

    def ended(data: bytes) -> None:
        connections.pop(1, None)
        two.given.append(int.from_bytes(data[2:4], "big"))

    two.on_cdc_untrusted = ended  # type: ignore[method-assign]
    rings.take(1)
    assert not one.lost
    assert sorted(two.given) == [1, 2]


def test_the_rest_of_a_link_that_ends_is_found() -> None:
    """The group has forgotten the link; what one of its messages sets off looks at the others."""
    one, two = Reader(), Reader()
    rings = Rings(
        {1: one, 2: two}, [validation(2, 3)], [message(1, 1), message(2, 3), message(1, 2)]
    )
    take = one.on_cdc_untrusted

    def catches_up(data: bytes) -> None:
        take(data)
        if one.last == 1:
            rings.mover.catch_up()

    one.on_cdc_untrusted = catches_up  # type: ignore[method-assign]
    del rings.group_links[2]
    rings.mover.link_ends(rings.links[1])
    assert (one.given, one.lost) == ([1, 2], [])
    assert (two.given, two.lost) == ([3], [])
