"""How a stack runs its background work, is left, and what a fork makes of it.

Theory of operation
-------------------
A stack is what RFC 7609 calls a peer.  Its background work runs in one nursery: the pump with
the RNICs' threads, one task for all timers, one for all TCP connections, and what listeners
need.  Everything else are cores that are called from there or from the user's own tasks, so all
state changes on the Trio thread.

`open_stack` puts that nursery around the user's block.  Calls outside of any `open_stack` share
a default stack, which runs in a system task of the Trio run and is closed when the run's main
task is done.

Leaving a stack (`StackLife.shut_down`): listeners are closed and calls under way end with
ClosedResourceError; streams still open are aborted with a ResourceWarning; connections whose
streams were closed get `shutdown_timeout` to finish; link groups are terminated in order; then
the nursery is cancelled and the RNICs are closed.

A forked child shares the memory, sockets and threads' work of its parent's stacks without being
able to go on with any of it, so a hook at fork makes all of them unusable there.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import trio

from trio_smc._base.timers import Timers
from trio_smc.config.config import Config
from trio_smc.datapath.connection import Connection
from trio_smc.rendezvous.discovery.same_host import Discovery
from trio_smc.rendezvous.discovery.tcp_option import TcpOption
from trio_smc.rnic.pump import Pump
from trio_smc.rnic.spinner import Spinner
from trio_smc.stack.rnics import RnicChange, StackRnics
from trio_smc.stack.tcp_watch import TcpWatch

if TYPE_CHECKING:
    from trio_smc.rendezvous.links.group import LinkGroup
    from trio_smc.rnic.verbs import Rnic
    from trio_smc.stack.connection_host import Endpoint

__all__ = [
    "Attached",
    "Busy",
    "Call",
    "Cancellable",
    "Closable",
    "OpenStream",
    "StackLife",
    "UnderWay",
    "running_stacks",
]


class Cancellable(Protocol):
    """Work that can be told to end."""

    def cancel(self) -> None:
        """End soon."""


class UnderWay:
    """All of one stack's; true while there is some.

    Args:
      ended: called when one of them has ended.
    """

    __slots__ = ("_ended", "_works")

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._works: dict[Busy, Cancellable] = {}

    def __bool__(self) -> bool:
        return bool(self._works)

    def cancel(self) -> None:
        """Tell all of them to end."""
        for work in list(self._works.values()):
            work.cancel()


class Busy:
    """Around work that leaving the stack cancels and waits for."""

    __slots__ = ("_under_way", "_work")

    def __init__(self, under_way: UnderWay, work: Cancellable) -> None:
        self._under_way = under_way
        self._work = work

    def __enter__(self) -> None:
        self._under_way._works[self] = self._work

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        del self._under_way._works[self]
        self._under_way._ended()


class Call(Busy):
    """Around a user's call: leaving the stack ends it with ClosedResourceError."""

    __slots__ = ("_scope",)

    def __init__(self, under_way: UnderWay) -> None:
        self._scope = trio.CancelScope()
        super().__init__(under_way, self._scope)

    def __enter__(self) -> None:
        super().__enter__()
        self._scope.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, traceback)
        self._scope.__exit__(kind, error, traceback)
        if self._scope.cancelled_caught:
            raise trio.ClosedResourceError("the stack was closed")


LOGGER = logging.getLogger("trio_smc")

_HANDSHAKE_SPINS = 4
"""A peer takes longer to answer a message of a handshake than one of a stream."""
_FORKED = "trio_smc cannot be used in a forked child; start a new process"


class Closable(Protocol):
    """A listener, for who ends it."""

    @property
    def socket(self) -> Any:
        """The listening socket."""

    def close(self) -> None:
        """Accept nothing more."""


class OpenStream(Protocol):
    """A stream over TCP, for who ends it."""

    @property
    def socket(self) -> Any:
        """The TCP connection."""

    def abort(self) -> None:
        """Reset it."""


class Attached(Protocol):
    """What runs beside the stack for those who watch it."""

    async def run(self) -> None:
        """Until cancelled."""

    def abandon(self) -> None:
        """This process is a forked child."""


class StackLife:
    """What a stack has to run, to end, and to give back.

    Attributes:
      config: the stack's configuration.
      rnic_set: its RNICs.
      number: counts the stacks of this process.
      closing: whether it is being left, or was.
      failure: the defect that ended a background task, and with it the stack.
      trio_token: of the Trio run it belongs to.
      unclosed: what `shut_down` found open, for a ResourceWarning each.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.pump = Pump(spin=config.spin)
        self.timers = Timers(trio.current_time, self._timer_is_earlier)
        self.tcp_watch: TcpWatch
        self.spinner = Spinner(_HANDSHAKE_SPINS * config.spin, self.pump.drain)
        self.discovery = Discovery(config.private_directory(), self.spinner)
        self.tcp_option = TcpOption(Path(config.tcp_option))
        self.attached: list[Attached] = []
        self.closing = False
        self.failure: Exception | None = None
        self.unclosed: list[str] = []
        self.nursery: trio.Nursery
        self.trio_token: trio.lowlevel.TrioToken
        self.rnic_set = StackRnics(config, self.discovery, self.pump, self._rnic_changed)
        self._scope = trio.CancelScope(shield=True)
        self._ended = trio.Event()
        self._groups: list[LinkGroup] = []
        self._endpoints: dict[object, Endpoint] = {}
        self._tcp_streams: weakref.WeakSet[OpenStream] = weakref.WeakSet()
        self._listeners: set[Closable] = set()
        self._timers_changed = trio.Event()
        self._something_ended = trio.Event()
        self._under_way = UnderWay(self._work_ended)
        self._forked = False
        self._supported = sys.platform == "linux"
        if self._supported:
            self.rnic_set.open()
        self.number = next(_NUMBERS)
        _STACKS.add(self)

    def _rnic_changed(self, rnic: Rnic, change: RnicChange) -> None:
        raise NotImplementedError

    # --- running ---------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the background tasks until `shut_down`; nothing is left afterwards.

        Shielded: what closed streams still owe goes out although the user was cancelled.  A
        defect in a background task closes the stack and is kept in `failure`.
        """
        started = False
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    self.nursery = nursery
                    self.trio_token = trio.lowlevel.current_trio_token()
                    if self._supported:
                        self.tcp_watch = TcpWatch()
                        self.discovery.open()
                        await nursery.start(self.pump.run)
                        await nursery.start(self.rnic_set.follow)
                        nursery.start_soon(self.tcp_watch.run)
                        nursery.start_soon(self.discovery.run)
                    nursery.start_soon(self._run_timers)
                    started = True
                    task_status.started()
        except ExceptionGroup as group:
            if not started:
                raise _sole(group) from None
            self.failure = group
            LOGGER.error("the stack failed", exc_info=group)
        finally:
            self.closing = True
            try:
                self._free()
            finally:
                self._ended.set()

    def attach(self, thing: Attached) -> None:
        """Run ``thing`` until the stack is left."""
        self.attached.append(thing)
        self.nursery.start_soon(thing.run)

    def _free(self) -> None:
        if self._forked:
            return
        for listener in list(self._listeners):
            listener.close()
        for group in list(self._groups):
            group.machine.send("links_lost")
        self.rnic_set.close()
        self.tcp_option.close()
        self.discovery.close()
        if hasattr(self, "tcp_watch"):
            self.tcp_watch.close()

    async def shut_down(self) -> None:
        """Finish in order, ``shutdown_timeout`` at most for each of three steps; ends `run`."""
        if self._forked:
            return  # all of it belongs to the parent
        with trio.CancelScope(shield=True):
            await self._finish()
            self._scope.cancel()
            await self._ended.wait()

    async def _finish(self) -> None:
        self.closing = True
        for listener in list(self._listeners):
            listener.close()
        self._under_way.cancel()
        with trio.move_on_after(self.config.shutdown_timeout):
            while self._under_way:
                await self._wait_for_an_ending()
        self._abort_open_streams()
        with trio.move_on_after(self.config.shutdown_timeout):
            while any(not endpoint.abandoned for endpoint in self._endpoints.values()):
                await self._wait_for_an_ending()
        for group in list(self._groups):
            group.terminate()
        with trio.move_on_after(self.config.shutdown_timeout):
            while self._groups:
                await self._wait_for_an_ending()

    def call(self) -> Call:
        """Around a user's call: leaving the stack ends it with ClosedResourceError."""
        self.check_usable()
        return Call(self._under_way)

    def busy(self, work: Cancellable) -> Busy:
        """Around work that leaving the stack cancels and waits for."""
        return Busy(self._under_way, work)

    def check_usable(self) -> None:
        """Raise ClosedResourceError on a closed stack and RuntimeError in a forked child."""
        self.check_not_forked()
        if self.closing:
            raise trio.ClosedResourceError("the stack is closed") from self.failure

    def check_not_forked(self) -> None:
        """Raise RuntimeError in a forked child."""
        if self._forked:
            raise RuntimeError(_FORKED)

    def forked(self) -> None:
        """This process is a forked child: nothing here may touch what the parent works with."""
        self._forked = self.closing = True
        for thing in self.attached:
            thing.abandon()
        self.discovery.abandon()
        self.pump.abandon()
        for endpoint in self._endpoints.values():
            endpoint.connection.__class__ = _ForkedConnection

    def _abort_open_streams(self) -> None:
        for endpoint in list(self._endpoints.values()):
            if not endpoint.closed_by_user:
                self.unclosed.append(f"{endpoint.connection!r} was open when its stack was closed")
                endpoint.abandoned = True
                endpoint.connection.abort()
        for stream in list(self._tcp_streams):
            if stream.socket.fileno() >= 0:
                self.unclosed.append(f"{stream!r} was open when its stack was closed")
                stream.abort()

    async def _wait_for_an_ending(self) -> None:
        self._something_ended = trio.Event()
        await self._something_ended.wait()

    def _work_ended(self) -> None:
        self._something_ended.set()

    async def _run_timers(self) -> None:
        while True:
            self._timers_changed = trio.Event()
            with trio.move_on_at(self.timers.next_deadline()):
                await self._timers_changed.wait()
            self.timers.run_due()

    def _timer_is_earlier(self) -> None:
        self._timers_changed.set()


def running_stacks() -> tuple[StackLife, ...]:
    """The stacks of this process that are open, oldest first."""
    running = [stack for stack in list(_STACKS) if not stack.closing and hasattr(stack, "nursery")]
    return tuple(sorted(running, key=lambda stack: stack.number))


def _sole(error: Exception) -> Exception:
    """What is in a group of one."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


class _ForkedConnection(Connection):
    """What becomes of a connection in a forked child; costs nothing where nobody forks."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> NoReturn:
        raise RuntimeError(_FORKED)


_STACKS: weakref.WeakSet[StackLife] = weakref.WeakSet()
_NUMBERS = itertools.count()


def _after_fork() -> None:
    for stack in list(_STACKS):
        stack.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
