"""Records of what happens in a stack: kept in memory to explain how a connection ended, or written
to a log file (`chaos.py --log`).
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from itertools import islice

from trio_smc import BaseObserver, Fallback, Stack
from trio_smc.wire import cdc, llc

__all__ = ["Recollection", "log_everything"]

LOGGER = logging.getLogger("chaos")
RECORDS, MESSAGES, CONNECTIONS = 2000, 60, 500
"""Numbers of log records kept, and of messages kept for each connection."""
LAST_RECORDS = 400


class Recollection(logging.Handler):
    """The last log records, and the last CDC messages sent on each connection.

    Errors are also written to standard error.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._records: deque[tuple[float, str]] = deque(maxlen=RECORDS)
        self._messages: dict[bytes, deque[tuple[float, str, int, int, bytes]]] = {}

    def install(self) -> None:
        """Handle all log records."""
        to_stderr = logging.StreamHandler(sys.stderr)
        to_stderr.setLevel(logging.ERROR)
        logging.basicConfig(level=logging.INFO, handlers=[self, to_stderr])

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the record as text, formatted now: its arguments may change."""
        self._records.append((record.created, f"{record.name}: {record.getMessage()}"))

    def sent(self, device: str, qp_num: int, message: bytes, status: int) -> None:
        """Note a message that was posted and has completed (`FaultPlan.on_message`)."""
        if not message or message[0] != cdc.CDC_TYPE:
            return
        token = message[4:8]
        kept = self._messages.get(token)
        if kept is None:
            if len(self._messages) >= CONNECTIONS:
                del self._messages[next(iter(self._messages))]
            kept = self._messages[token] = deque(maxlen=MESSAGES)
        kept.append((time.time(), device, qp_num, status, message))

    def of(self, tokens: list[int]) -> list[tuple[float, str]]:
        """Return the records about the connection with these alert tokens (local, peer).

        Each has its time of day in seconds. Failovers of other connections are left out.
        """
        names = [f"{token:#010x}" for token in tokens]
        records = [
            (when, text)
            for when, text in islice(self._records, max(0, len(self._records) - LAST_RECORDS), None)
            if "continues on link" not in text or any(name in text for name in names)
        ]
        for token in tokens:
            for when, device, qp_num, status, message in self._messages.get(
                token.to_bytes(4, "big"), ()
            ):
                found = cdc.decode_untrusted(message)
                what = "validation of" if found.producer_flags & cdc.FAILOVER_VALIDATION else "sent"
                records.append((when, (
                    f"{device}, queue pair {qp_num}: {what} message {found.sequence} to "
                    f"{token:#010x}, flags {found.connection_flags:#04x}, status {status}"
                )))  # fmt: skip
        return sorted(records)


class LogObserver(BaseObserver):
    """Logs transitions, LLC messages and fallbacks."""

    def llc(self, link: object, outgoing: bool, message: bytes) -> None:
        """Log each LLC message, decoded."""
        LOGGER.info("%r %s %r", link, "->" if outgoing else "<-", llc.decode_untrusted(message))

    def cdc(self, link: object, outgoing: bool, message: bytes) -> None:
        """Log CDC messages with flags of failover validation."""
        if message[24] & 0x08:
            LOGGER.info(
                "%r %s validation of %s, message %d",
                link, "->" if outgoing else "<-", message[4:8].hex(),
                int.from_bytes(message[2:4], "big"),
            )  # fmt: skip

    def state(self, subject: object, old: str, new: str, event: str) -> None:
        """Log every transition."""
        LOGGER.info("%r: %s to %s by %s", subject, old, new, event)

    def mode(self, connection: object, fallback: Fallback | None) -> None:
        """Log why a connection stays on TCP."""
        if fallback is not None:
            LOGGER.info("TCP: %s", fallback.message)


def log_everything(stack: Stack, path: str) -> None:
    """Write the log to a file from now on."""
    logging.basicConfig(
        filename=path, filemode="w", level=logging.INFO,
        format="%(asctime)s.%(msecs)03d %(name)s: %(message)s", datefmt="%S",
    )  # fmt: skip
    stack.add_observer(LogObserver())
