"""What can go wrong with a software RNIC on purpose; `faults` lets it."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Fault"]


class Fault(StrEnum):
    """What can go wrong."""

    LINK_DOWN = "link-down"
    """A queue pair fails, and its peer is told."""
    LINK_DOWN_HERE = "link-down-here"
    """A queue pair fails; its peer notices when it posts something."""
    LINK_SILENT = "link-silent"
    """Nothing comes through any more and nobody is told: only time shows it."""
    PORT_DOWN = "port-down"
    """As `SoftRnic.fail`."""
    PORT_FLAP = "port-flap"
    """The port is down for `FaultPlan.flap` seconds."""
    COMPLETION_LOST = "completion-lost"
    """A message arrives, but here it fails, and with it the queue pair."""
    NOT_PLACED = "not-placed"
    """A message completes with success and never arrives; then the queue pair fails."""
    MESSAGE_LOST = "message-lost"
    """A message does not arrive, and the queue pair fails."""
    WRITE_LOST = "write-lost"
    """Of an RDMA write a part arrives, at most; the queue pair fails."""
    DELAY = "delay"
    """What a queue pair sends is held up for at most `FaultPlan.delay` seconds."""
    WAKEUP = "wakeup"
    """Both sides are woken, twice, with nothing there."""
