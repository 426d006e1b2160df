"""What happens in a stack, as lines of a log: for who wants to know why (`chaos.py --log`)."""

from __future__ import annotations

import logging

from trio_smc import Fallback, Stack
from trio_smc.rendezvous import llc

__all__ = ["log_everything"]

LOGGER = logging.getLogger("chaos")


class LogObserver:
    """A `trio_smc.Observer`."""

    def clc(self, connection: object, outgoing: bool, message: bytes) -> None:
        """Not logged."""

    def llc(self, link: object, outgoing: bool, message: bytes) -> None:
        """Each LLC message, decoded."""
        LOGGER.info("%r %s %r", link, "->" if outgoing else "<-", llc.decode_untrusted(message))

    def cdc(self, link: object, outgoing: bool, message: bytes) -> None:
        """Those with flags of failover validation."""
        if message[24] & 0x08:
            LOGGER.info(
                "%r %s validation of %s, message %d",
                link, "->" if outgoing else "<-", message[4:8].hex(),
                int.from_bytes(message[2:4], "big"),
            )  # fmt: skip

    def rdma_write(self, link: object, address: int, rkey: int, data: memoryview) -> None:
        """Not logged."""

    def state(self, subject: object, old: str, new: str, event: str) -> None:
        """Every transition."""
        LOGGER.info("%r: %s to %s by %s", subject, old, new, event)

    def mode(self, connection: object, fallback: Fallback | None) -> None:
        """Why a connection stays TCP."""
        if fallback is not None:
            LOGGER.info("TCP: %s", fallback.message)


def log_everything(stack: Stack, path: str) -> None:
    """Write the log to a file from now on."""
    logging.basicConfig(
        filename=path, filemode="w", level=logging.INFO,
        format="%(asctime)s.%(msecs)03d %(name)s: %(message)s", datefmt="%S",
    )  # fmt: skip
    stack.add_observer(LogObserver())
