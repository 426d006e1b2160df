"""Failover validation messages that cannot be judged yet (RFC 7609, 4.6.1).

Theory of operation
-------------------
A failover validation message may overtake the message that it vouches for: that came over another
link, whose completions nobody has looked at yet, or waits there behind such a message itself.  So
it waits, and with it all that its own link brings after it (`Backlog`), until all links of the
group have been looked at (`Validation`) and it can be judged again, or given up.

The first message of a link's backlog is the validation message that waits.  A link without a
backlog, as nearly all are nearly always, pays one test for None per message.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Final

from trio_smc._base.errors import ProtocolError
from trio_smc.wire.cdc import (
    CDC_SIZE,
    CDC_TYPE,
    FAILOVER_VALIDATION,
    MessageMissing,
    unpack_untrusted,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_smc.rendezvous.links.link import Link

__all__ = ["Backlog", "Validation"]

LOGGER = logging.getLogger("trio_smc.failover")

_PRODUCER_FLAGS: Final = 24  # where they stand in a CDC message (A.4)


class Backlog:
    """A validation message that waits on one link, and what the link brought behind it.

    It is the link's `links.link.Backlog` for as long as it waits.
    """

    __slots__ = ("_messages", "link")

    def __init__(self, link: Link) -> None:
        self.link: Link = link
        self._messages: deque[bytes] = deque()

    @property
    def waits(self) -> bool:
        """Whether a validation message still waits."""
        return self.link.backlog is self

    def append(self, message: bytes) -> None:
        """Something came behind it."""
        self._messages.append(message)

    def wait(self, message: bytes) -> None:
        """This one, before all the others, is to be judged."""
        self._messages.appendleft(message)
        self.link.backlog = self

    def resume_untrusted(self, *, give_up: bool = False) -> bool:
        """Judge the message that waits once more, then take what came behind it.

        Args:
          give_up: when it still misses something, that is lost.

        Returns:
          Whether it did not have to wait any longer; `waits` tells of the next one.
        """
        link, messages = self.link, self._messages
        message = messages.popleft()
        unpacked = unpack_untrusted(message)
        connection = link.group.connections.get(unpacked[2])
        if connection is not None:
            try:
                connection.on_cdc_untrusted(unpacked)
            except MessageMissing as error:
                if not give_up:
                    messages.appendleft(message)
                    return False
                LOGGER.warning("%r: %s", link, error)
                connection.protocol_error(error)
            except ProtocolError as error:
                LOGGER.warning("%r: %s", link, error)
        while messages:
            message = messages.popleft()
            link.receive_untrusted(message)
            if messages and messages[0] is message:
                return True  # the next one waits
        link.backlog = None
        return True

    def waits_for(self, other: Backlog) -> bool:
        """Whether what it waits for is among what ``other`` holds back.

        A validation message is nothing to wait for, nor is what was sent after the message that
        is missing: a connection that has lost one and moved twice has both on several links.
        """
        missing = self._messages[0]
        token, sequence = missing[4:8], missing[2] << 8 | missing[3]
        return any(
            each[4:8] == token
            and each[0] == CDC_TYPE
            and len(each) == CDC_SIZE
            and not each[_PRODUCER_FLAGS] & FAILOVER_VALIDATION
            and not (sequence - (each[2] << 8 | each[3])) & 0x8000
            for each in other._messages
        )


class Validation:
    """The validation messages of one link group that wait, and when they are judged again.

    Args:
      catch_up: takes what has arrived on all links of the group.
    """

    def __init__(self, catch_up: Callable[[], None]) -> None:
        self._catch_up = catch_up
        self._waiting: dict[Link, Backlog] = {}
        self._judging = False

    def missing(self, link: Link, message: bytes) -> None:
        """A validation message on ``link`` misses one that may have come over another link.

        What other links brought is taken first, and may itself have to wait in the same way: for
        something behind the first message.  So each link stops at a message that waits, and all
        are looked at in turn, until one waits for what nobody has: that is lost (4.6.1).  They
        cannot wait for each other in a circle: what a validation message misses was complete
        before it was sent, and was sent after the validation message that it lies behind.
        """
        backlog = self._waiting.get(link)
        if backlog is None:
            backlog = self._waiting[link] = Backlog(link)
        backlog.wait(message)
        if self._judging:
            return
        self._judging = True
        try:
            while self._waiting:
                self._catch_up()
                waiting = list(self._waiting.values())
                if not [each for each in waiting if each.resume_untrusted()]:
                    self._give_up()
                self._waiting = {at: each for at, each in self._waiting.items() if each.waits}
        finally:
            self._judging = False

    def _give_up(self) -> None:
        hopeless = self._hopeless()
        if LOGGER.isEnabledFor(logging.INFO):
            links = self._waiting.items()
            waiting = {
                link.number: [other.number for other, held in links if backlog.waits_for(held)]
                for link, backlog in links
            }
            LOGGER.info(
                "%r waits for what nobody has; who waits for whom: %s", hopeless.link, waiting
            )
        hopeless.resume_untrusted(give_up=True)

    def _hopeless(self) -> Backlog:
        """Of those that wait, one that waits for none of the others."""
        waiting = list(self._waiting.values())
        for one in waiting:
            if not any(one.waits_for(other) for other in waiting if other is not one):
                return one
        return waiting[0]  # a circle: the peer lies
