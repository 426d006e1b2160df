"""How the RNICs of a stack come and go.

Theory of operation.  With ``Config(rnics="auto")`` a stack uses the RoCE ports that are active,
also those that become so later; with a list it uses what the list names.  `RnicLife.follow` sleeps
until the kernel says that devices or interfaces have changed (`rnic._portwatch`), or that a
device has failed, and then looks: ports that came are opened, and link groups may grow onto
them; of a device that has gone everything is given back, because the kernel waits for that before
it lets go of a device.  An RNIC that was named comes back as the same object.

Nothing is polled.  Only after news is looked again, a few times: a device's node belongs to
root until udev has seen it, and a port follows its interface, on a busy host seconds later.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from trio_smc._base.netlink import Remembering
from trio_smc._base.reasons import FallbackReason
from trio_smc.rnic._portwatch import PortWatch
from trio_smc.rnic._rocedevices import active_ports, present_devices
from trio_smc.rnic.roce import VerbsRnic
from trio_smc.rnic.software import SoftRnic
from trio_smc.rnic.verbs import Rnic, RnicError, RnicEvent

if TYPE_CHECKING:
    from trio_smc._base.config import Config
    from trio_smc.rendezvous.discovery import Discovery
    from trio_smc.rnic.pump import Pump

__all__ = ["RnicChange", "RnicLife"]

LOGGER = logging.getLogger("trio_smc.rnic")

_LOOK_AGAIN: Final = (0.3, 1.0, 5.0)
"""Seconds after news, each after the one before."""


class RnicChange(Enum):
    """What happened to an RNIC, as far as link groups care."""

    AVAILABLE = auto()
    """Its port came up, or it was undrained: links may be added on it."""
    DRAINED = auto()
    """An operator takes it out: its links are to be deleted in order."""
    LOST = auto()
    """Its port went down, or the device failed: its links are dead or dying."""


class RnicLife:
    """Opens and closes the RNICs of one stack.

    Attributes:
      opened: in the order of the configuration, then those that came.
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
        # A port's RNICs that were opened for further GIDs, and the one they are of.
        self._port_of: dict[Rnic, Rnic] = {}
        # Names of those that could not be opened.
        self._refused: set[str] = set()
        # Those of the configuration whose devices are gone.
        self._away: list[VerbsRnic] = []
        self._failure = trio.Event()
        self._network = Remembering()

    # --- opening and closing ---------------------------------------------------------------

    @property
    def _automatic(self) -> bool:
        return isinstance(self._config.rnics, str)

    def open_rnics(self) -> None:
        """Open what the configuration names.

        Raises RnicError: an RNIC that was asked for by name cannot be opened; none is open then.
        """
        rnics: Sequence[Rnic] = (
            (SoftRnic(), *self._unused_ports())
            if isinstance(self._config.rnics, str)
            else self._config.rnics
        )
        for rnic in rnics:
            try:
                rnic.open(self._directory)
            except OSError as error:
                if not self._automatic:
                    for opened in self.opened:
                        opened.close()
                    raise
                if rnic.kind == "software":
                    self._none = self._why_not(error)
                self._complain(rnic, error)
                continue
            self.adopt(rnic)
        self._network.open()

    def close(self) -> None:
        """Close all of them; what used them is gone."""
        self._network.close()
        for rnic in self.opened:
            self._close(rnic)

    def adopt(self, rnic: Rnic) -> None:
        """Use an RNIC that is open."""
        self._refused.discard(rnic.name)
        self.opened.append(rnic)
        rnic.on_event = partial(self._event, rnic)
        self._pump.add(rnic)

    def _close(self, rnic: Rnic) -> None:
        self._pump.remove(rnic)
        rnic.on_event = None
        rnic.close()

    @property
    def _directory(self) -> Path:
        return Path(self._config.private_directory())

    def _complain(self, rnic: Rnic, error: OSError) -> None:
        """It cannot be opened.  Tried again and again, that is no news."""
        level = logging.DEBUG if rnic.name in self._refused else logging.WARNING
        self._refused.add(rnic.name)
        LOGGER.log(level, "%s cannot be used: %s", rnic.name, error)

    def _why_not(self, error: OSError) -> FallbackReason:
        """What to tell users of a software RNIC that cannot be opened."""
        if error.errno == errno.ENOTSUP:
            return FallbackReason.UNSUPPORTED_PLATFORM
        return self._discovery.unusable() or FallbackReason.OUT_OF_RESOURCES

    @staticmethod
    def make_port(device: str, port: int) -> VerbsRnic:
        """An RNIC for a port that was found, not open."""
        return VerbsRnic(device, port)

    # --- what comes and goes ----------------------------------------------------------------

    async def follow(
        self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Keep to what there is, until cancelled; returns at once where nothing can come."""
        if not self._automatic and not any(isinstance(each, VerbsRnic) for each in self.opened):
            task_status.started()
            return
        with contextlib.ExitStack() as stack:
            try:
                changed = stack.enter_context(PortWatch.open()).changed
            except OSError as error:
                LOGGER.debug("RoCE ports that come later are not seen: %s", error)
                changed = trio.sleep_forever
            task_status.started()
            await self._follow(changed)

    async def _follow(self, changed: Callable[[], Awaitable[object]]) -> None:
        later: Sequence[float] = ()
        self.look()  # nobody has told what changed before this
        while True:
            patience = later[0] if later else float("inf")
            told = False
            with trio.move_on_after(patience):
                told = await self._news(changed)
            later = later[1:]
            if self._failure.is_set():
                # A device that has failed is not tried again before the kernel tells of it.
                self._failure = trio.Event()
                later = ()
            if told:
                later = _LOOK_AGAIN  # also when a device has failed: another may have its name
            self.look()

    async def _news(self, changed: Callable[[], Awaitable[object]]) -> bool:
        """Until the kernel tells something, or a device has failed; whether the kernel told."""
        told = False
        async with trio.open_nursery() as nursery:

            async def failure() -> None:
                await self._failure.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(failure)
            await changed()
            told = True
            nursery.cancel_scope.cancel()
        return told

    def look(self) -> None:
        """Open what has come and let go of what has gone."""
        present = present_devices()
        gone = set()
        for rnic in [each for each in self.opened if isinstance(each, VerbsRnic)]:
            if rnic.failed or rnic.device not in present:
                gone.add(rnic.device)
                self._let_go(rnic)
            else:
                rnic.look_at_port()
        found = [rnic for rnic in self._unused_ports() if rnic.device not in gone]
        for rnic in found:
            self._take_in(rnic)

    def _unused_ports(self) -> list[VerbsRnic]:
        """An RNIC for each port that is active and that this stack could use, not open."""
        active = active_ports()
        if not self._automatic:
            return [each for each in self._away if (each.device, each.port) in active]
        used = {(each.device, each.port) for each in self.opened if isinstance(each, VerbsRnic)}
        return [self.make_port(*each) for each in active if each not in used]

    def _take_in(self, rnic: VerbsRnic) -> None:
        try:
            rnic.open(self._directory)
        except OSError as error:
            self._complain(rnic, error)
            return
        LOGGER.info("%s has come", rnic.name)
        if rnic in self._away:
            self._away.remove(rnic)
        self.adopt(rnic)
        self.on_change(rnic, RnicChange.AVAILABLE)

    def _let_go(self, rnic: VerbsRnic) -> None:
        """Its device is gone, and so are its links."""
        LOGGER.info("%s has gone", rnic.name)
        self.opened.remove(rnic)
        self._drained.discard(rnic)
        self.on_change(rnic, RnicChange.LOST)
        try:
            self._close(rnic)
        except RnicError as error:
            LOGGER.warning("%s cannot be closed: %s", rnic.name, error)
        if self._port_of.pop(rnic, None) is None and not self._automatic:
            self._away.append(rnic)

    def is_drained(self, rnic: Rnic) -> bool:
        """Whether an operator has taken it out, or the port that it is on."""
        return rnic in self._drained or self._port_of.get(rnic) in self._drained

    def _event(self, rnic: Rnic, event: RnicEvent) -> None:
        LOGGER.info("%s: %s", rnic.name, event)
        if event is RnicEvent.FATAL:
            # Closed by `follow`, not here: the device is at work.
            self._failure.set()
        elif rnic.port_active is not (event is RnicEvent.PORT_UP):
            return  # old news: the links that are there by now know nothing of it
        if event is not RnicEvent.PORT_UP:
            self.on_change(rnic, RnicChange.LOST)
        elif not self.is_drained(rnic):
            self.on_change(rnic, RnicChange.AVAILABLE)
