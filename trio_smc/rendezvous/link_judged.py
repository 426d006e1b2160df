"""What a link brought and may not be taken yet: behind a validation message that misses something.

Theory of operation
-------------------
A failover validation message (RFC 7609, 4.6.1) may overtake the message that it vouches for: that
came over another link, whose completions nobody has looked at yet, or waits there behind such a
message itself.  So it waits, and with it all that its own link brings after it, until the group's
mover has looked at all links (`failover.mover`) and has it judged again, or given up.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Final

from trio_smc._base.errors import ProtocolError
from trio_smc.datapath.cdc import CDC_SIZE, CDC_TYPE, FAILOVER_VALIDATION, MessageMissing
from trio_smc.rendezvous.link_life import LinkLife

if TYPE_CHECKING:
    from trio_smc.rendezvous.group_host import GroupConnection
    from trio_smc.rendezvous.link_group import LinkGroup
    from trio_smc.rnic.verbs import Rnic

__all__ = ["JudgedLink"]

LOGGER = logging.getLogger("trio_smc.link")

_PRODUCER_FLAGS: Final = 24  # where they stand in a CDC message (A.4)
_from_bytes: Final = int.from_bytes


class JudgedLink(LinkLife):
    """Base of `link.Link`: messages that wait to be judged."""

    __slots__ = ("_behind", "_connection_of")

    def __init__(self, group: LinkGroup, number: int, rnic: Rnic) -> None:
        super().__init__(group, number, rnic)
        self._connection_of: dict[int, GroupConnection] = group.connections
        # What came behind a validation message that is being judged; None: none is.
        self._behind: deque[bytes] | None = None

    @abstractmethod
    def _receive_untrusted(self, data: bytes) -> None:
        """Take one message."""

    def _wait_to_be_judged(self, data: bytes) -> None:
        """What the message misses may have come over another link and wait there (4.6.1)."""
        if self._behind is None:
            self._behind = deque()
        self._behind.appendleft(data)
        self.group.mover.judge(self)

    def resume_untrusted(self, *, give_up: bool = False) -> bool:
        """Judge the message that waits once more, then take what came behind it.

        Args:
          give_up: when it still misses something, that is lost.

        Returns:
          Whether it did not have to wait any longer; `waits` tells of the next one.
        """
        behind = self._behind
        if behind is None:
            return True
        data = behind.popleft()
        connection = self._connection_of.get(_from_bytes(data[4:8], "big"))
        if connection is not None:
            try:
                connection.on_cdc_untrusted(data)
            except MessageMissing as error:
                if not give_up:
                    behind.appendleft(data)
                    return False
                LOGGER.warning("%r: %s", self, error)
                connection.protocol_error(error)
            except ProtocolError as error:
                LOGGER.warning("%r: %s", self, error)
        while behind:
            data = behind.popleft()
            self._receive_untrusted(data)
            if behind and behind[0] is data:
                return True  # the next one waits
        self._behind = None
        return True

    @property
    def waits(self) -> bool:
        """Whether a failover validation message waits for what other links brought."""
        return self._behind is not None

    def waits_for(self, other: JudgedLink) -> bool:
        """Whether what it waits for is among what waits behind such a message of ``other``.

        A validation message is nothing to wait for, nor is what was sent after the message that
        is missing: a connection that has lost one and moved twice has both on several links.
        """
        if not self._behind or not other._behind:
            return False
        missing = self._behind[0]
        token, sequence = missing[4:8], missing[2] << 8 | missing[3]
        return any(
            each[4:8] == token
            and each[0] == CDC_TYPE
            and len(each) == CDC_SIZE
            and not each[_PRODUCER_FLAGS] & FAILOVER_VALIDATION
            and not (sequence - (each[2] << 8 | each[3])) & 0x8000
            for each in other._behind
        )
