"""The RNICs of a stack: which there are, which one serves a connection, which are taken out.

A link group uses RNICs of one kind only.  An RNIC that an operator has drained stays open but
carries nothing until it is undrained; one whose port is down carries nothing until it is up.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trio_smc._base.reasons import FallbackReason
from trio_smc.rendezvous.prefixes import is_same_host
from trio_smc.rnic.software import SoftRnic
from trio_smc.rnic.verbs import Rnic, RnicEvent

if TYPE_CHECKING:
    from trio_smc._base.config import Config
    from trio_smc.rendezvous.discovery import Discovery
    from trio_smc.rnic.pump import Pump

__all__ = ["RnicChange", "StackRnics"]

LOGGER = logging.getLogger("trio_smc.rnic")


class RnicChange(Enum):
    """What happened to an RNIC, as far as link groups care."""

    AVAILABLE = auto()
    """Its port came up, or it was undrained: links may be added on it."""
    DRAINED = auto()
    """An operator takes it out: its links are to be deleted in order."""
    LOST = auto()
    """Its port went down, or the device failed: its links are dead or dying."""


class StackRnics:
    """Opens, chooses and closes the RNICs of one stack.

    Attributes:
      opened: in the order of the configuration.
      on_change: called on the Trio thread when an RNIC comes or goes.
    """

    def __init__(
        self, config: Config, discovery: Discovery, pump: Pump,
        on_change: Callable[[Rnic, RnicChange], None],
    ) -> None:  # fmt: skip
        self.opened: list[Rnic] = []
        self.on_change = on_change
        self._config = config
        self._discovery = discovery
        self._pump = pump
        self._drained: set[Rnic] = set()
        self._none = FallbackReason.NO_RNIC

    # --- life ------------------------------------------------------------------------------

    def open(self) -> None:
        """Open what the configuration names.

        Raises:
          RnicError: an RNIC that was asked for by name cannot be opened; none is open then.
        """
        automatic = self._config.rnics == "auto"
        rnics = (SoftRnic(),) if isinstance(self._config.rnics, str) else self._config.rnics
        directory = Path(self._config.private_directory())
        for rnic in rnics:
            try:
                rnic.open(directory)
            except OSError as error:
                if not automatic:
                    for opened in self.opened:
                        opened.close()
                    raise
                self._none = self._why_not(error)
                LOGGER.warning("%s cannot be used: %s", rnic.name, error)
                continue
            self.adopt(rnic)

    def adopt(self, rnic: Rnic) -> None:
        """Use an RNIC that is open."""
        self.opened.append(rnic)
        rnic.on_event = partial(self._event, rnic)
        self._pump.add(rnic)

    def close(self) -> None:
        """Close all of them; what used them is gone."""
        for rnic in self.opened:
            self._pump.remove(rnic)
            rnic.on_event = None
            rnic.close()

    def _why_not(self, error: OSError) -> FallbackReason:
        """What to tell users of a software RNIC that cannot be opened."""
        if error.errno == errno.ENOTSUP:
            return FallbackReason.UNSUPPORTED_PLATFORM
        return self._discovery.unusable() or FallbackReason.OUT_OF_RESOURCES

    # --- choice ----------------------------------------------------------------------------

    def usable(self, kind: str) -> list[Rnic]:
        """RNICs of this kind that may carry links now, the preferred one first."""
        return [
            rnic
            for rnic in self.opened
            if rnic.kind == kind and rnic.port_active and rnic not in self._drained
        ]

    def serving(self, local: str, remote: str) -> Rnic | FallbackReason:
        """The RNIC for a connection between two addresses, or why there is none."""
        if not is_same_host(local, remote):
            return FallbackReason.NO_RNIC
        for rnic in self.usable("software"):
            return rnic
        software = any(rnic.kind == "software" for rnic in self.opened)
        return FallbackReason.RNIC_DOWN if software else self._none

    # --- changes ---------------------------------------------------------------------------

    def named(self, name: str) -> Rnic:
        """The RNIC of this name.  Raises ValueError when there is none."""
        for rnic in self.opened:
            if rnic.name == name:
                return rnic
        raise ValueError(f"the stack has no RNIC {name!r}")

    def is_drained(self, rnic: Rnic) -> bool:
        """Whether an operator has taken it out."""
        return rnic in self._drained

    def drain(self, rnic: Rnic) -> None:
        """Take it out: nothing new goes over it, and `on_change` is told.  Idempotent."""
        if rnic not in self._drained:
            self._drained.add(rnic)
            self.on_change(rnic, RnicChange.DRAINED)

    def undrain(self, rnic: Rnic) -> None:
        """Put it back.  Idempotent."""
        if rnic in self._drained:
            self._drained.discard(rnic)
            if rnic.port_active:
                self.on_change(rnic, RnicChange.AVAILABLE)

    def _event(self, rnic: Rnic, event: RnicEvent) -> None:
        LOGGER.info("%s: %s", rnic.name, event)
        if event is not RnicEvent.PORT_UP:
            self.on_change(rnic, RnicChange.LOST)
        elif rnic not in self._drained:
            self.on_change(rnic, RnicChange.AVAILABLE)
