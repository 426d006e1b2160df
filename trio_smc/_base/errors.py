"""The exceptions of trio_smc that are not Trio's own."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .reasons import Fallback

__all__ = ["HandshakeCut", "NoStack", "ProtocolError", "SmcUnavailable"]


class ProtocolError(Exception):
    """The peer broke RFC 7609.

    The only exception that functions named ``*_untrusted`` raise.  During the handshake it ends
    the TCP connection (RFC 7609, C.6).  A method of an open stream raises
    :exc:`trio.BrokenResourceError`, whose cause is an OSError, whose cause is this exception.
    """


class HandshakeCut(ConnectionResetError):
    """The peer has ended the TCP connection before the handshake was complete.

    Neither side has sent data of its application then. No part of a CLC message has been read after
    the last whole one.
    """


class NoStack(OSError):
    """The default stack of a Trio run cannot be opened; the cause is the ``__cause__``.

    A function that uses the default stack raises it.  The next call tries again.

    Attributes:
      allows_tcp: the cause is a lack of descriptors or memory, and SMC-R is not required.
    """

    allows_tcp: bool = False


class SmcUnavailable(OSError):
    """The connection cannot use SMC-R, and ``require_smc`` is set.

    Attributes:
      fallback: the reason.
    """

    def __init__(self, fallback: Fallback) -> None:
        super().__init__(errno.EPROTONOSUPPORT, f"SMC-R is required: {fallback.message}")
        self.fallback = fallback
