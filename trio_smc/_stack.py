"""`Stack`: one SMC-R peer as users see it, with its RNICs, link groups, connections and counters.

Its `Runtime` does the work.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from trio_smc._base.interrupts import ki_protected
from trio_smc._base.observer import ObserverGroup
from trio_smc._base.weak import WeakSet
from trio_smc.config.config import Config, short_repr
from trio_smc.connecting.connect import connect_stream
from trio_smc.connecting.listener import SmcListener, open_listening_sockets
from trio_smc.host.real_time import move_on_after
from trio_smc.stack.runtime import Runtime
from trio_smc.streams.connection_views import (
    ConnectionView,
    RdmaConnectionView,
    TcpConnectionView,
)
from trio_smc.streams.group_views import LinkGroupView
from trio_smc.streams.tcp_stream import TcpStream

if TYPE_CHECKING:
    from trio_smc._base.observer import Observer
    from trio_smc._base.statistics import StackStatistics
    from trio_smc.rendezvous.links.group import LinkGroup
    from trio_smc.rnic.verbs import Rnic
    from trio_smc.streams.stream import SmcStream

__all__ = ["Stack", "stacks"]

LOGGER = logging.getLogger("trio_smc.failover")

_UNUSED_CHECK_INTERVAL: Final = 0.5
"""Seconds between two checks of a drain for unused link groups.  Chosen; no measurement is
recorded."""


@ki_protected
class Stack:
    """One SMC-R peer (RFC 7609, 2); made by `open_stack`.

    Attributes:
      config: the stack's configuration.
      peer_id: 8 bytes, new at every start (RFC 7609, 2.2.1).
      runtime: the working parts of the stack; not part of the public API.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.runtime: Runtime = Runtime(config)
        self.peer_id: bytes = self.runtime.groups.peer_id
        _STACKS.add(self)

    @property
    def trio_token(self) -> trio.lowlevel.TrioToken:
        """The token of the stack's Trio run."""
        return self.runtime.trio_token

    @property
    def rnics(self) -> tuple[Rnic, ...]:
        """The RNICs of the stack."""
        return tuple(self.runtime.rnic_set.opened)

    @property
    def ueids(self) -> tuple[str, ...] | None:
        """The UEIDs that this stack offers for SMC-R version 2, on RNICs that support it.

        None with ``Config(ueids="kernel")`` if the kernel has no SMC: version 1 only.
        """
        return self.runtime.groups.ueids

    @property
    def link_groups(self) -> tuple[LinkGroupView, ...]:
        """The link groups, including those that form or end."""
        return tuple(self._view(group) for group in self.runtime.groups.groups)

    def _view(self, group: LinkGroup) -> LinkGroupView:
        return LinkGroupView(group, self.runtime.check_not_forked)

    @property
    def connections(self) -> tuple[ConnectionView, ...]:
        """The connections over SMC-R, then the open ones over TCP.

        Those over SMC-R include connections in a handshake and closing ones.
        """
        groups = self.runtime.groups
        return (
            *(
                RdmaConnectionView(self._view(endpoint.group), endpoint)
                for endpoint in groups.endpoints.values()
            ),
            *(
                TcpConnectionView(stream)
                for stream in groups.tcp_streams
                if isinstance(stream, TcpStream) and stream.socket.fileno() >= 0
            ),
        )

    @property
    def listening_addresses(self) -> tuple[tuple[str, int], ...]:
        """Address and port of each open listener."""
        names = (listener.socket.getsockname() for listener in self.runtime.listeners)
        return tuple(sorted((name[0], name[1]) for name in names))

    def statistics(self) -> StackStatistics:
        """The counters so far; a frozen value."""
        return self.runtime.groups.statistics()

    def add_observer(self, observer: Observer) -> None:
        """Notify ``observer`` of all events from now on.

        The observer is called on the Trio thread and must not block. Its exceptions are logged and
        have no other effect. Without observers each event costs one comparison.
        """
        self._set_observers((*self._observers(), observer))

    def remove_observer(self, observer: Observer) -> None:
        """Undo `add_observer`. An unknown observer is ignored."""
        self._set_observers(tuple(each for each in self._observers() if each is not observer))

    def _observers(self) -> tuple[Observer, ...]:
        group = self.runtime.groups.observer
        return group.observers if isinstance(group, ObserverGroup) else ()

    def _set_observers(self, observers: tuple[Observer, ...]) -> None:
        self.runtime.groups.observer = ObserverGroup(observers) if observers else None

    async def open_stream(
        self,
        host: str | bytes,
        port: int,
        *,
        happy_eyeballs_delay: float | None = 0.25,
        local_address: str | None = None,
        config: Config | None = None,
    ) -> SmcStream:
        """Like `trio_smc.open_stream`, with this stack."""
        self.runtime.check_usable()
        return await connect_stream(
            self.runtime,
            host,
            port,
            happy_eyeballs_delay=happy_eyeballs_delay,
            local_address=local_address,
            config=self._effective(config),
        )

    async def open_listeners(
        self,
        port: int,
        *,
        host: str | bytes | None = None,
        backlog: int | None = None,
        config: Config | None = None,
    ) -> list[SmcListener]:
        """Like `trio_smc.open_listeners`, with this stack."""
        with self.runtime.call():
            effective = self._effective(config)
            offer = partial(self.runtime.offer_option, effective)
            listening = await open_listening_sockets(
                port, host=host, backlog=backlog, prepare=offer
            )
            with contextlib.ExitStack() as undo:
                for each in listening:
                    undo.callback(each.close)
                listeners: list[SmcListener] = []
                for each in listening:
                    listener = SmcListener(self.runtime, each, effective)
                    undo.callback(listener.close)
                    listeners.append(listener)
                undo.pop_all()
            return listeners

    async def serve(
        self,
        handler: Callable[[SmcStream], Awaitable[object]],
        port: int,
        *,
        host: str | bytes | None = None,
        backlog: int | None = None,
        config: Config | None = None,
        handler_nursery: trio.Nursery | None = None,
        task_status: trio.TaskStatus[list[SmcListener]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Like `trio_smc.serve`, with this stack."""
        listeners = await self.open_listeners(port, host=host, backlog=backlog, config=config)
        async with trio.open_nursery() as nursery:
            for each in listeners:
                nursery.start_soon(each.serve, handler, handler_nursery or nursery)
            task_status.started(listeners)

    def _effective(self, config: Config | None) -> Config:
        if config is None:
            return self.config
        if not isinstance(config, Config):
            raise TypeError(f"config: {short_repr(config)} is not a Config")
        config.check_call(self.config)
        return config

    # --- RNICs -----------------------------------------------------------------------------

    def explain_interface(self, name: str) -> list[tuple[str, bool, str]]:
        """The RoCE ports for connections through a network interface, and why (docs/rnic.md).

        Args:
          name: of the interface, such as "eth0".

        Returns:
          For each port its name, True if it serves the interface, and the reason.

        Raises:
          ValueError: this host has no such interface.
        """
        return self.runtime.rnic_set.explain(name)

    async def drain_rnic(self, name: str) -> None:
        """Take an RNIC out of service without data loss, and wait until no link uses the RNIC.

        New connections use other RNICs from now on; without another RNIC they stay on TCP
        (`FallbackReason.RNIC_DOWN`). Open connections move to links on other RNICs, then the links
        of this RNIC are deleted in order (RFC 7609, 3.5.5.1.3, 4.6). If a peer cannot be reached
        over another RNIC, its connections stay here until they end, and this call waits for them;
        a cancel scope limits the wait. Even if the call is cancelled, the RNIC stays drained until
        `undrain_rnic`, which also ends the wait.

        Args:
          name: of an RNIC in `rnics`.

        Raises:
          ValueError: the stack has no such RNIC.
          trio.ClosedResourceError: the stack is closed, or was closed during the wait.
          RuntimeError: called in a forked child.
        """
        with self.runtime.call():
            rnics, table = self.runtime.rnic_set, self.runtime.groups
            rnic = rnics.named(name)
            rnics.drain(rnic)
            while rnics.is_drained(rnic) and (groups := table.on_rnics(rnics.on_port(rnic))):
                table.end_unused(groups)
                # A group without connections may have a handshake under way.
                with move_on_after(self.runtime.timers, _UNUSED_CHECK_INTERVAL):
                    await table.link_gone.park()
            if rnics.is_drained(rnic):
                LOGGER.info("%s is drained: no link uses it", name)
            await trio.lowlevel.checkpoint()

    def undrain_rnic(self, name: str) -> None:
        """Put a drained RNIC back into service. Link groups get links on it again. Idempotent.

        Args:
          name: of an RNIC in `rnics`.

        Raises:
          ValueError: the stack has no such RNIC.
          trio.ClosedResourceError: the stack is closed.
          RuntimeError: called in a forked child.
        """
        self.runtime.check_usable()
        rnics = self.runtime.rnic_set
        rnics.undrain(rnics.named(name))
        self.runtime.groups.link_gone.unpark_all()

    # --- link groups -----------------------------------------------------------------------

    async def drain_link_group(self, group: LinkGroupView) -> None:
        """Take a link group out of service without data loss, and wait until it has ended.

        New connections to the peer form another link group if this side is the server of the group,
        because the server chooses (RFC 7609, 3.5.2). A client declines new connections of the
        group, which stay on TCP (`FallbackReason.RNIC_DOWN`). Open connections stay in the group
        until they end, and this call waits for them; a cancel scope limits the wait. Then the group
        is terminated (3.5.4). Even if the call is cancelled, the group stays drained until
        `undrain_link_group`, which also ends the wait.

        Args:
          group: one of `link_groups`.

        Raises:
          ValueError: the group belongs to another stack, or has ended.
          trio.ClosedResourceError: the stack is closed, or was closed during the wait.
          RuntimeError: called in a forked child.
        """
        with self.runtime.call():
            table, core = self.runtime.groups, self._core_of(group)
            core.drained = True
            while core.drained and core in table.groups:
                table.end_if_unused(core)
                # A group without connections may have a handshake under way.
                with move_on_after(self.runtime.timers, _UNUSED_CHECK_INTERVAL):
                    await table.link_gone.park()
            await trio.lowlevel.checkpoint()

    def undrain_link_group(self, group: LinkGroupView) -> None:
        """Put a drained link group back into service. Idempotent.

        Args:
          group: one of `link_groups`.

        Raises:
          ValueError: the group belongs to another stack, or has ended.
          trio.ClosedResourceError: the stack is closed.
          RuntimeError: called in a forked child.
        """
        self.runtime.check_usable()
        self._core_of(group).drained = False
        self.runtime.groups.link_gone.unpark_all()

    def _core_of(self, group: LinkGroupView) -> LinkGroup:
        for each in self.runtime.groups.groups:
            if self._view(each) == group:
                return each
        raise ValueError(f"the stack has no link group {group!r}")


_STACKS: WeakSet[Stack] = WeakSet()


def stacks() -> tuple[Stack, ...]:
    """The open stacks of this process, including default ones, oldest first.

    Each stack belongs to the thread of its Trio run. No other thread may call its methods.
    """
    return tuple(stack for stack in _STACKS if stack.runtime.running)
