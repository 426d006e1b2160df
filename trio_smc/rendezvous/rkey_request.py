"""One RKey exchange of this side: what is sent, and what its echoes say (RFC 7609, A.3.5-A.3.7)."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from trio_smc._base.errors import ProtocolError
from trio_smc.rendezvous import llc

if TYPE_CHECKING:
    from trio_smc.rendezvous.link import Link
    from trio_smc.rendezvous.rkeys import RkeyMessage

__all__ = ["RkeyRequest"]

LOGGER = logging.getLogger("trio_smc.llc")

_RETRIES: Final = 3
_RETRY_DELAY: Final = 0.05
"""Seconds before the first retry; four times as long before each further one."""


@dataclass(slots=True, eq=False)
class RkeyRequest:
    """A CONFIRM RKEY with its CONTINUATIONs or a DELETE RKEY of ours, waiting or under way.

    Attributes:
      messages: makes the request for the link it will travel on, when its turn has come.
      finished: called once with whether the peer agreed.
    """

    messages: Callable[[Link], list[llc.Message]]
    finished: Callable[[bool], None]
    tries: int = 0
    _awaited: deque[type[llc.Message]] = field(default_factory=deque)
    _negative: bool = False
    _retry: bool = False

    def send(self, link: Link) -> None:
        """Send all messages; each is echoed by itself (A.3.5, A.3.6)."""
        messages = self.messages(link)
        self._awaited = deque(map(type, messages))
        self._negative = self._retry = False
        for message in messages:
            link.send_llc(message)

    def on_echo_untrusted(self, echo: RkeyMessage) -> bool:
        """Whether this echo was the last.  Raises ProtocolError when it is not one."""
        if not self._awaited or type(echo) is not self._awaited.popleft():
            raise ProtocolError(f"{type(echo).__name__} reply without a request")
        if isinstance(echo, llc.DeleteRkey):
            if echo.negative:  # nothing beyond logging (A.3.7)
                LOGGER.info("the peer did not know all RKeys: mask %#04x", echo.error_mask)
        elif echo.negative and not self._negative:
            self._negative = True
            # Only CONFIRM RKEY has the C bit; what refuses a CONTINUATION is a change (3.5.5.3).
            self._retry = not isinstance(echo, llc.ConfirmRkey) or echo.retry
        return not self._awaited

    @property
    def agreed(self) -> bool:
        """Whether no echo was negative."""
        return not self._negative

    def next_delay(self) -> float:
        """Seconds until it is to be tried again; each time longer."""
        self.tries += 1
        return _RETRY_DELAY * float(4 ** (self.tries - 1))

    @property
    def to_be_retried(self) -> bool:
        """Whether the peer wants it again when its configuration change is over."""
        return self._negative and self._retry and self.tries < _RETRIES
