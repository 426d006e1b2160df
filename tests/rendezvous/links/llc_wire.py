"""Two sides and the wire between them.  A test names the LLC messages to lose, fail or change.

The name of a message consists of its sender (C or S), the number of the link that carries it, its
type, and the link that it is about: "S1 ADD_LINK 2", "C1 ADD_LINK 2 reply", "C1 DELETE_LINK all".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.rendezvous.rendezvous_pair import Call, Side, World, exchange
from tests.rnic.memory_rnic import PlainQueuePair
from trio_smc.config.config import Config
from trio_smc.wire import llc
from trio_smc.wire.cdc import CDC_TYPE

__all__ = ["Stage", "Wire"]

_Action = Callable[[bytes], list[bytes] | None]


class Wire:
    """Records and changes the LLC messages between ``client`` and ``server``.

    Attributes:
      log: the names of the messages, in the order of their execution.
      tests: True if `log` contains TEST LINK.
    """

    def __init__(self, world: World, client: Side, server: Side) -> None:
        self.log: list[str] = []
        self.tests = False
        self._sides = {"C": client, "S": server}
        self._rules: list[tuple[re.Pattern[str], int, _Action]] = []
        self._numbers: dict[int, int] = {}
        world.fabric.tamper = self._pass

    def lose(self, name: str, count: int = 1) -> None:
        """Drop the next ``count`` messages whose names match, although their sends complete.

        name: a regular expression, here and in the other methods.
        """
        self._rules.append((re.compile(name), count, lambda _: []))

    def fail(self, name: str, count: int = 1) -> None:
        """Let the next ``count`` sends of this name fail, and their queue pairs with them."""
        self._rules.append((re.compile(name), count, lambda _: None))

    def change(self, name: str, change: Callable[[Any], llc.Message], count: int = 1) -> None:
        """Replace the next ``count`` messages of this name by the results of ``change``."""
        self._rules.append(
            (re.compile(name), count, lambda data: [change(llc.decode_untrusted(data)).encode()])
        )

    def watch(self, name: str, call: Callable[[], object]) -> None:
        """Call ``call`` just before the next message of this name arrives."""

        def look(data: bytes) -> list[bytes]:
            call()
            return [data]

        self._rules.append((re.compile(name), 1, look))

    def watch_and_lose(self, name: str, call: Callable[[], object]) -> None:
        """As `watch`, but drop the message."""

        def look(_: bytes) -> list[bytes]:
            call()
            return []

        self._rules.append((re.compile(name), 1, look))

    def _pass(self, qp: PlainQueuePair, data: bytes) -> list[bytes] | None:
        if data[0] == CDC_TYPE:
            return [data]
        name = self._name(qp, data)
        if self.tests or "TEST_LINK" not in name:
            self.log.append(name)
        for place, (pattern, count, action) in enumerate(self._rules):
            if pattern.fullmatch(name):
                if count == 1:
                    del self._rules[place]
                else:
                    self._rules[place] = (pattern, count - 1, action)
                return action(data)
        return [data]

    def _name(self, qp: PlainQueuePair, data: bytes) -> str:
        letter = "C" if qp.rnic in self._sides["C"].rnics else "S"
        for group in self._sides[letter].groups:
            for link in group.links.values():
                self._numbers[link.qp.qp_num] = link.number
        message: Any = llc.decode_untrusted(data)
        text = f"{letter}{self._numbers.get(qp.qp_num, '?')} {llc.MessageType(data[0]).name}"
        if isinstance(message, llc.DeleteLink):
            text += " all" if message.all_links else f" {message.link_number}"
        elif isinstance(message, llc.AddLink):
            text += f" {message.link_number}"
        if message.reply:
            text += " reply"
        if getattr(message, "rejected", False) or getattr(message, "negative", False):
            text += " negative"
        return text


class Stage:
    """Two sides, the wire between them, and their first connection.

    Args:
      rnics: numbers of RNICs of client and server.
      down: number of RNICs of the server whose port is down at first.
      connect: True to complete the rendezvous of the connection.
      configs: configurations of client and server.
    """

    def __init__(
        self, world: World, rnics: tuple[int, int], *, down: int = 0, connect: bool = True,
        configs: tuple[Config | None, Config | None] = (None, None),
    ) -> None:  # fmt: skip
        self.world = world
        self.client = world.side(configs[0], rnics=rnics[0])
        self.server = world.side(configs[1], rnics=rnics[1])
        for rnic in self.server.rnics[rnics[1] - down :]:
            rnic.port_down()
        self.wire = Wire(world, self.client, self.server)
        self.call: Call = world.call(self.client, self.server)
        if connect:
            world.settle()
            self.wire.log.clear()

    @property
    def log(self) -> list[str]:
        return self.wire.log

    def end(self, place: int) -> Side:
        """The client (0) or the server (1)."""
        return (self.client, self.server)[place]

    def links(self) -> list[int]:
        """The numbers of the links; checks that both sides have the same ones."""
        mine, theirs = sorted(self.client.group.links), sorted(self.server.group.links)
        assert mine == theirs
        return mine

    def works(self) -> bool:
        """True if the connection carries bytes in both directions."""
        return exchange(self.world, self.call, (b"ping", b"pong")) == (b"pong", b"ping")

    def is_over(self) -> bool:
        """True if the group has ended on both sides, and TCP was reset."""
        assert [tcp.cut for tcp in self.call.tcp] == ["rst", "rst"] or self.call.tcp[0].ended
        for end in self.call.ends:
            connection = end.connection
            with pytest.raises(OSError, match=r"abort|reset|no link"):
                connection.receiver.receive(1)
        return not (
            self.client.groups or self.server.groups or any(self.world.fabric.held.values())
        )
