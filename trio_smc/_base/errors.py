"""The exceptions of trio_smc that are not Trio's own."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .reasons import Fallback

__all__ = ["ProtocolError", "SmcUnavailable"]


class ProtocolError(Exception):
    """The peer broke RFC 7609.

    The only exception that a function named ``*_untrusted`` raises.  During the handshake it
    ends the TCP connection (RFC 7609, C.6); on an open stream its user sees
    :exc:`trio.BrokenResourceError`, whose cause is an OSError, whose cause is this.
    """


class SmcUnavailable(OSError):
    """A connection would have fallen back to TCP although ``require_smc`` is set.

    Attributes:
      fallback: why SMC-R could not be used.
    """

    def __init__(self, fallback: Fallback) -> None:
        super().__init__(errno.EPROTONOSUPPORT, f"SMC-R is required: {fallback.message}")
        self.fallback = fallback
