"""The messages and writes of a check: the ladder, and the capture as pcapng."""

from __future__ import annotations

import time
from typing import Any

from smc_conform.messages import describe, read
from trio_smc.capture.recorder import Capture

__all__ = ["Trace"]


class Trace:
    """Notes the events of one check.

    A ladder has one line for each event: milliseconds since the start, the direction as seen from
    the suite, the connection or link, and the event.
    """

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._lines: list[str] = []
        self._bytes: list[str] = []
        self._blocks: list[bytes] = []
        self._capture = Capture(self._blocks.append, payload=64)

    @property
    def ladder(self) -> tuple[str, ...]:
        """The lines so far."""
        return tuple(self._lines)

    @property
    def messages(self) -> tuple[str, ...]:
        """The messages so far, in hexadecimal, with their direction and connection or link."""
        return tuple(self._bytes)

    @property
    def capture(self) -> bytes:
        """The messages and writes so far, as the bytes of a pcapng file."""
        return b"".join(self._blocks)

    def note(self, text: str, *, arrow: str = " ·", channel: str = "") -> None:
        """Add a line of the suite's own."""
        now = (time.monotonic() - self._start) * 1000
        self._lines.append(f"{now:9.1f} ms {arrow} {channel:8} {text}")

    def _keep(self, outgoing: bool, channel: str, raw: bytes) -> None:
        self._bytes.append(f"{'->' if outgoing else '<-'} {channel:8} {raw.hex()}")

    def clc(self, tcp: Any, outgoing: bool, raw: bytes) -> None:
        """Add a CLC message, or other bytes of a TCP connection."""
        self._keep(outgoing, "TCP", raw)
        text = describe(read(raw, clc=True)) if len(raw) > 8 else f"{len(raw)} bytes: {raw.hex()}"
        self.note(f"{text} ({len(raw)} bytes)", arrow="->" if outgoing else "<-", channel="TCP")
        if len(raw) > 8:
            self._capture.clc(tcp, outgoing, raw)

    def message(self, link: Any, outgoing: bool, raw: bytes) -> None:
        """Add an LLC or CDC message."""
        self._keep(outgoing, f"link {link.number}", raw)
        text = describe(read(raw))
        self.note(text, arrow="->" if outgoing else "<-", channel=f"link {link.number}")
        if link.peer is not None:
            (self._capture.cdc if raw[:1] == b"\xfe" else self._capture.llc)(link, outgoing, raw)

    def write(self, link: Any, address: int, rkey: int, data: bytes) -> None:
        """Add an RDMA write of the suite."""
        self.note(
            f"RDMA write of {len(data)} bytes to 0x{address:x}, RKey 0x{rkey:08x}",
            arrow="->", channel=f"link {link.number}",
        )  # fmt: skip
        if link.peer is not None:
            self._capture.rdma_write(link, address, rkey, memoryview(data))
