"""An RNIC of the suite: polls completions and passes each to the link that owns the queue pair."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from smc_conform.routable import RoutableRnic
from trio_smc.rnic.soft.device import SoftRnic
from trio_smc.rnic.verbs import Completion, Rnic

if TYPE_CHECKING:
    from trio_smc.rnic.verbs import QueuePair

__all__ = ["Device", "open_rnic"]


def open_rnic(name: str, directory: Path, version: int) -> Rnic:
    """Open the RNIC with this name: "soft" or a RoCE port, such as "rxe0" or "mlx5_0:1".

    Args:
      version: of SMC-R; version 2 has a software RNIC of its own.

    Raises:
      RnicError: the RNIC cannot be opened.
    """
    rnic: Rnic
    if name == "soft":
        rnic = RoutableRnic("conform") if version > 1 else SoftRnic("conform")
    else:
        # pyverbs is needed for RoCE ports only.
        from trio_smc.rnic.roce.device import VerbsRnic

        device, _, port = name.partition(":")
        rnic = VerbsRnic(device, int(port or 1))
    rnic.open(directory)
    return rnic


class Device:
    """An open RNIC whose completions are passed to the owners of its queue pairs."""

    def __init__(self, rnic: Rnic) -> None:
        self.rnic = rnic
        self._owners: dict[int, Callable[[Completion], None]] = {}
        self._sleep = trio.CancelScope()

    def attach(self, qp: QueuePair, owner: Callable[[Completion], None]) -> None:
        """Pass the completions of this queue pair to ``owner``."""
        self._owners[qp.qp_num] = owner

    def detach(self, qp: QueuePair) -> None:
        """Stop passing them; the queue pair is about to be closed."""
        self._owners.pop(qp.qp_num, None)

    def wake(self) -> None:
        """Poll soon.  Every call that posts a request or changes a queue pair needs this.

        A software RNIC completes a request while it is posted, and makes no descriptor readable.
        Such a completion is often the last event: a refused write ends the queue pair.
        """
        self._sleep.cancel()

    async def run(self) -> None:
        """Poll until cancelled; sleep while there is nothing to poll."""
        rnic = self.rnic
        while True:
            found = rnic.poll()
            for completion in found:
                owner = self._owners.get(completion.qp_num)
                if owner is not None:
                    owner(completion)
            if found:
                await trio.lowlevel.checkpoint()
            elif rnic.arm():
                with trio.CancelScope() as self._sleep:
                    await trio.lowlevel.wait_readable(rnic.wait_fd())
                rnic.service()
            else:
                await trio.lowlevel.checkpoint()
