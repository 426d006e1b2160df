"""Packets of the software RNIC, for tests that implement its protocol themselves."""

from __future__ import annotations

import socket

from trio_smc.host.descriptors import Closer
from trio_smc.rnic.soft.messages import Intake


def receive(sock: socket.socket) -> tuple[bytes, list[int]] | None:
    """Receive one packet and its descriptors, as an RNIC does."""
    intake = Intake(Closer("test"))
    try:
        return intake.receive(sock)
    finally:
        intake.end()
