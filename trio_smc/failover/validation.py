"""Failover validation messages that cannot be checked yet (RFC 7609, 4.6.1).

Theory of operation
-------------------
A failover validation message may overtake the CDC message that it names. That CDC message came over
another link: either its completion has not been polled yet, or it waits in the backlog of that link
behind another validation message. So the validation message waits, and with it every later message
of its own link (`Backlog`). All links of the group are polled (`Validation`), and then the
validation message is checked again. If the named CDC message is still missing and no link holds it,
that message is lost.

The first message of a link's backlog is the validation message that waits. Nearly every link has no
backlog; then the check costs one test for None per message.
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

_PRODUCER_FLAGS: Final = 24  # offset of the producer flags in a CDC message (A.4)


class Backlog:
    """A validation message that waits on one link, and the messages that the link received later.

    While the message waits, this object is the link's `links.link.Backlog`.
    """

    __slots__ = ("_messages", "link")

    def __init__(self, link: Link) -> None:
        self.link: Link = link
        self._messages: deque[bytes] = deque()

    @property
    def waits(self) -> bool:
        """True if a validation message still waits."""
        return self.link.backlog is self

    def append(self, message: bytes) -> None:
        """Add a message that the link received later."""
        self._messages.append(message)

    def wait(self, message: bytes) -> None:
        """Put a validation message in front of all others."""
        self._messages.appendleft(message)
        self.link.backlog = self

    def resume_untrusted(self, *, give_up: bool = False) -> bool:
        """Check the waiting message again, then process the messages behind it.

        Args:
          give_up: True if a message that is still missing counts as lost.

        Returns:
          True if the first message no longer waits. Another one may wait now: see `waits`.
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
                return True  # the next validation message waits
        link.backlog = None
        return True

    def waits_for(self, other: Backlog) -> bool:
        """True if the missing message may be in the backlog ``other``.

        A validation message is never the missing one, and neither is a message with a later
        sequence number. If a connection lost a message and moved twice, the backlogs of several
        links can contain messages of both kinds.
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
    """The waiting validation messages of one link group.

    Args:
      catch_up: drains all links of the group.
    """

    def __init__(self, catch_up: Callable[[], None]) -> None:
        self._catch_up = catch_up
        self._waiting: dict[Link, Backlog] = {}
        self._checking = False

    def missing(self, link: Link, message: bytes) -> None:
        """A validation message on ``link`` names a message that has not been received.

        First the other links are drained, because one of them may deliver the missing message.
        Meanwhile another link may deliver a validation message that has to wait as well, perhaps
        for a message in the backlog of ``link``. So each link stops at a message that waits, and
        all waiting messages are checked in turn. A missing message that no link holds is lost
        (4.6.1).

        The validation messages of an honest peer cannot wait for each other in a circle. A
        validation message is sent after the message that it names, and each message in a backlog
        was sent after the validation message at its front. So in a circle each message would have
        been sent before itself.
        """
        backlog = self._waiting.get(link)
        if backlog is None:
            backlog = self._waiting[link] = Backlog(link)
        backlog.wait(message)
        if self._checking:
            return
        self._checking = True
        try:
            while self._waiting:
                self._catch_up()
                waiting = list(self._waiting.values())
                if not [each for each in waiting if each.resume_untrusted()]:
                    self._give_up()
                self._waiting = {at: each for at, each in self._waiting.items() if each.waits}
        finally:
            self._checking = False

    def _give_up(self) -> None:
        hopeless = self._hopeless()
        if LOGGER.isEnabledFor(logging.INFO):
            links = self._waiting.items()
            waiting = {
                link.number: [other.number for other, held in links if backlog.waits_for(held)]
                for link, backlog in links
            }
            LOGGER.info(
                "%r waits for a message that no link holds; links that wait for links: %s",
                hopeless.link,
                waiting,
            )
        hopeless.resume_untrusted(give_up=True)

    def _hopeless(self) -> Backlog:
        """A backlog that waits for a message that no other backlog holds."""
        waiting = list(self._waiting.values())
        for one in waiting:
            if not any(one.waits_for(other) for other in waiting if other is not one):
                return one
        return waiting[0]  # a circle: the peer sent invalid messages
