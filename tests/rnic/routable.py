"""A software RNIC that serves SMC-R version 2, for whole stacks on one host without RoCE.

The RNIC has the GID of a RoCE port with an IPv4 address.  Its receives have the size of version 1,
so a link group must agree on a single link: see `single_link`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trio_smc import SoftRnic, Stack
from trio_smc.rnic.soft.queue_pair import SoftQueuePair
from trio_smc.rnic.verbs import RECEIVE_SIZE, ProtectionDomain

__all__ = ["RoutableRnic", "single_link"]

_MAPPED = bytes(10) + b"\xff\xff"


class RoutableRnic(SoftRnic):
    """A software RNIC for version 2 (see above).

    Args:
      direct: the result of `is_direct` for every GID.
    """

    routable = True

    def __init__(self, name: str = "soft0", *, direct: bool | None = True) -> None:
        super().__init__(name)
        self._direct = direct

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "gid" and any(value):
            value = _MAPPED + value[-4:]
        super().__setattr__(name, value)

    def create_qp(self, pd: ProtectionDomain, receive_size: int = RECEIVE_SIZE) -> SoftQueuePair:
        """Create a queue pair; its receives have the size of version 1, whatever is requested."""
        return super().create_qp(pd)

    def is_direct(self, gid: bytes) -> bool | None:
        """Return the argument of the constructor."""
        return self._direct


def single_link(stack: Stack) -> None:
    """Let a stack agree on one link only, so that no LLC message needs a longer receive."""
    groups = stack.runtime.groups
    assert groups.offer is not None
    groups.offer = replace(groups.offer, max_links=1)
