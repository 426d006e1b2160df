"""`Runtime`: what a stack runs in the background, how it is left, and what a fork makes of it.

Theory of operation
-------------------
A stack is what RFC 7609 calls a peer. Its background work runs in one nursery: the pump with
the RNICs' threads, one task for all timers, one for all TCP connections, and what listeners
need. Everything else are cores that are called from there or from the user's own tasks, so all
state changes on the Trio thread.

`open_stack` puts that nursery around the user's block. Calls outside of any `open_stack` share
a default stack, which runs in a system task of the Trio run and is closed when the run's main
task is done.

Leaving a stack (`Runtime.shut_down`): listeners are closed and calls under way end with
ClosedResourceError; streams still open are closed as close(2) closes a socket, with a
ResourceWarning; connections get `shutdown_timeout`, all of them together, to finish; link groups
are terminated in order; then the nursery is cancelled and the RNICs are closed. SIGINT ends the
waiting: `_Interrupts`.

A forked child shares the memory, sockets and threads' work of its parent's stacks without being
able to go on with any of it, so a hook at fork makes all of them unusable there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Final, NoReturn, Protocol

import trio

from trio_smc._base.reasons import FallbackReason
from trio_smc._base.timers import Timers
from trio_smc.datapath.connection import Connection
from trio_smc.datapath.receiver import Receiver
from trio_smc.datapath.sender import Sender
from trio_smc.rendezvous.discovery.same_host import Discovery
from trio_smc.rendezvous.discovery.tcp_option import TcpOption
from trio_smc.rnic.pump import Pump
from trio_smc.rnic.spinner import NEVER, Spinner
from trio_smc.stack.budget import Budget
from trio_smc.stack.groups import GroupTable
from trio_smc.stack.policy import ShortConnections
from trio_smc.stack.rnics import RnicChange, StackRnics
from trio_smc.stack.tcp_watch import TcpWatch

if TYPE_CHECKING:
    from trio_smc.config.config import Config
    from trio_smc.rnic.verbs import Rnic

__all__ = ["Attached", "Cancellable", "Closable", "Runtime", "Tracked"]

LOGGER = logging.getLogger("trio_smc")

_HANDSHAKE_SPINS = 4
"""A peer takes longer to answer a message of a handshake than one of a stream."""
_MAX_TURN = 0.001
"""Seconds after which the end of many streams, or link groups, lets other tasks run."""
_MIN_GROUP_TIME = 0.5
"""Seconds that link groups have at least to end in order, when `shutdown_timeout` is over."""
_FORKED = "trio_smc cannot be used in a forked child; start a new process"


class Cancellable(Protocol):
    """Work that can be told to end."""

    def cancel(self) -> None:
        """End soon."""


class Closable(Protocol):
    """A listener, for who ends it."""

    @property
    def socket(self) -> trio.socket.SocketType:
        """The listening socket."""

    def close(self) -> None:
        """Accept nothing more."""


class Attached(Protocol):
    """What runs beside the stack for those who watch it."""

    async def run(self) -> None:
        """Until cancelled."""

    def abandon(self) -> None:
        """This process is a forked child."""


class Tracked:
    """Around work that leaving the stack cancels and waits for; see `Runtime.track`."""

    __slots__ = ("_ended", "_under_way", "_work")

    def __init__(
        self, under_way: set[Cancellable], work: Cancellable, ended: Callable[[], None]
    ) -> None:
        self._under_way = under_way
        self._work = work
        self._ended = ended

    def __enter__(self) -> None:
        self._under_way.add(self._work)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._under_way.remove(self._work)
        self._ended()


class Call(Tracked):
    """Around a user's call: leaving the stack ends it with ClosedResourceError."""

    __slots__ = ("_scope",)

    def __init__(self, under_way: set[Cancellable], ended: Callable[[], None]) -> None:
        self._scope = trio.CancelScope()
        super().__init__(under_way, self._scope, ended)

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


class Runtime:
    """The parts of one stack, and the tasks that serve them.

    Args:
      clock: seconds, for timers.

    Attributes:
      config: the stack's configuration.
      rnic_set: its RNICs.
      groups: its link groups and connections.
      pump, budget, timers, spinner, discovery, tcp_option: one each, for all connections.
      short_connections: whose connections were not worth SMC-R.
      nursery: for tasks that are cancelled when the stack has been left; while it runs.
      trio_token: of the Trio run it belongs to; as soon as it runs.
      closing: whether it is being left, or was.
      failure: the defect that ended a background task, and with it the stack.
      attached: what was attached by `attach`.
      unclosed: what `shut_down` found open, for a ResourceWarning each.

    Raises:
      RnicError, ValueError: as `StackRnics.open`.
    """

    nursery: trio.Nursery
    trio_token: trio.lowlevel.TrioToken

    def __init__(self, config: Config, clock: Callable[[], float] = trio.current_time) -> None:
        self.config = config
        self.pump: Pump = Pump(spin=config.spin, wake=config.wake)
        self.budget: Budget = Budget(self.pump)
        self.timers: Timers = Timers(clock, self._timer_is_earlier)
        self.spinner: Spinner = Spinner(_HANDSHAKE_SPINS * config.spin, self.pump.drain)
        self.short_connections: ShortConnections = ShortConnections(clock)
        self.discovery: Discovery = Discovery(
            config.private_directory(), self.spinner, self.short_connections.clear
        )
        self.tcp_option: TcpOption = TcpOption(Path(config.tcp_option))
        self.attached: list[Attached] = []
        self.closing: bool = False
        self.failure: Exception | None = None
        self.unclosed: list[str] = []
        self._scope = trio.CancelScope(shield=True)
        self._ended = trio.Event()
        self._listeners: set[Closable] = set()
        # Sockets that may offer SMC-R by the TCP option, now or when there is a RoCE port.
        self._offering: weakref.WeakSet[trio.socket.SocketType] = weakref.WeakSet()
        self._under_way: set[Cancellable] = set()
        self._timers_changed = trio.Event()
        self._something_ended = trio.Event()
        self._forked = False
        self._in_forked_child: list[Callable[[], object]] = []
        self._stops_waiting = False  # no wait of `shut_down` is worth it any more
        self._supported = sys.platform == "linux"
        self.rnic_set: StackRnics = StackRnics(
            config, self.discovery, self.pump, self._rnic_changed
        )
        if self._supported:
            self.rnic_set.open()
        try:
            self.groups: GroupTable = GroupTable(
                config, self.rnic_set, self.pump, self.timers, self.short_connections,
                self._note_end,
            )  # fmt: skip
        except BaseException:
            self.rnic_set.close()
            raise
        _RUNTIMES.add(self)

    # --- RNICs and listeners ---------------------------------------------------------------

    def rnic_for(self, local: str, remote: str, *, near: bool = False) -> Rnic | FallbackReason:
        """The RNIC that serves a connection between two addresses, or why none does.

        ``near``: the peer is on this host, whatever its address says.
        """
        if not self._supported:
            return FallbackReason.UNSUPPORTED_PLATFORM
        return self.rnic_set.serving(local, remote, near=near)

    def spinner_for(self, rnic: Rnic | FallbackReason) -> Spinner:
        """Who may wait awake: the peer must be on this host, or it takes too long to answer."""
        local = not isinstance(rnic, FallbackReason) and rnic.kind == "software"
        return self.spinner if local else NEVER

    def _rnic_changed(self, rnic: Rnic, change: RnicChange) -> None:
        """An RNIC came or went: listeners and link groups are told."""
        if change is RnicChange.AVAILABLE and rnic.kind == "roce":
            for sock in list(self._offering):
                if sock.fileno() >= 0:
                    self.tcp_option.offer(sock)
        self.groups.rnic_changed(rnic, change)

    def offer_option(self, config: Config, sock: trio.socket.SocketType) -> None:
        """Let a socket that is going to listen offer SMC-R by the TCP option, where it may.

        Under "auto" that is when there is a RoCE port, so perhaps later.
        """
        if config.discovery == "auto":
            self._offering.add(sock)
        remote = any(rnic.kind == "roce" for rnic in self.rnic_set.opened)
        if config.discovery == "tcp-option" or (config.discovery == "auto" and remote):
            self.tcp_option.offer(sock)

    @property
    def listeners(self) -> tuple[Closable, ...]:
        """Those that are open."""
        return tuple(self._listeners)

    def add_listener(self, listener: Closable) -> None:
        """Close ``listener`` when the stack is left."""
        self._listeners.add(listener)

    def remove_listener(self, listener: Closable) -> None:
        """It was closed."""
        self._listeners.discard(listener)

    # --- running ---------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the background tasks until `shut_down`; nothing is left afterwards.

        Shielded: what closed streams still owe goes out although the user was cancelled. A
        defect in a background task closes the stack and is kept in `failure`.
        """
        started = False
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    self.nursery = nursery
                    self.trio_token = trio.lowlevel.current_trio_token()
                    if self._supported:
                        self.groups.tcp_watch = TcpWatch()
                        self.discovery.open()
                        await nursery.start(self.pump.run)
                        await nursery.start(self.rnic_set.follow)
                        nursery.start_soon(self.groups.tcp_watch.run)
                        nursery.start_soon(self.discovery.run)
                    nursery.start_soon(self._run_timers)
                    started = True
                    task_status.started()
        except ExceptionGroup as group:
            if not started:
                raise _unwrap_group(group) from None
            self.failure = group
            LOGGER.error("the stack failed", exc_info=group)
        finally:
            self.closing = True
            try:
                self._free()
            finally:
                self._ended.set()

    @property
    def running(self) -> bool:
        """Whether it was begun and is not being left."""
        return not self.closing and hasattr(self, "nursery")

    def attach(self, thing: Attached) -> None:
        """Run ``thing`` until the stack is left."""
        self.attached.append(thing)
        self.nursery.start_soon(thing.run)

    async def _run_timers(self) -> None:
        while True:
            self._timers_changed = trio.Event()
            with trio.move_on_at(self.timers.next_deadline()):
                await self._timers_changed.wait()
            if self.timers.run_due():
                self.pump.resume_hooks()  # it may have sent something

    def _timer_is_earlier(self) -> None:
        self._timers_changed.set()

    # --- the end ---------------------------------------------------------------------------

    def call(self) -> Call:
        """Around a user's call: leaving the stack ends it with ClosedResourceError."""
        self.check_usable()
        return Call(self._under_way, self._note_end)

    def track(self, work: Cancellable) -> Tracked:
        """Around work that leaving the stack cancels and waits for; once for each ``work``."""
        return Tracked(self._under_way, work, self._note_end)

    def check_usable(self) -> None:
        """Raise ClosedResourceError on a closed stack and RuntimeError in a forked child."""
        self.check_not_forked()
        if self.closing:
            raise trio.ClosedResourceError("the stack is closed") from self.failure

    async def shut_down(self) -> None:
        """Finish in order, for about ``shutdown_timeout`` at most, or until SIGINT; ends `run`."""
        if self._forked:
            return  # all of it belongs to the parent
        with trio.CancelScope(shield=True):
            try:
                with _INTERRUPTS.forward_to(self):
                    await self._finish()
            finally:
                self._scope.cancel()
                await self._ended.wait()

    async def _finish(self) -> None:
        self.closing = True
        self._close_listeners()
        for work in list(self._under_way):
            work.cancel()
        patience = self.config.shutdown_timeout
        deadline = trio.current_time() + patience
        await self._wait_while(lambda: bool(self._under_way), deadline)
        await _run_in_turns(map(self.unclosed.append, self.groups.close_open()))
        await self._wait_while(lambda: self.groups.has_unfinished, deadline)
        await _run_in_turns(self.groups.terminate_all())
        last = trio.current_time() + min(patience, _MIN_GROUP_TIME)
        await self._wait_while(lambda: bool(self.groups.groups), max(deadline, last))
        await _run_in_turns(self.groups.give_up_all())
        last = trio.current_time() + min(patience, _MIN_GROUP_TIME)
        await self._wait_while(lambda: bool(self.groups.groups), last)

    async def _wait_while(self, condition: Callable[[], bool], deadline: float) -> None:
        self.pump.resume_hooks()  # peers' answers are awaited, by no task that reads
        with trio.move_on_at(deadline):
            while condition() and not self._stops_waiting:
                self._something_ended = trio.Event()
                await self._something_ended.wait()

    def stop_waiting(self) -> None:
        """Wait for nothing and nobody any more."""
        self._stops_waiting = True
        self._something_ended.set()

    def _note_end(self) -> None:
        """A call, a connection or a link group."""
        self._something_ended.set()

    def _close_listeners(self) -> None:
        for listener in self.listeners:
            listener.close()

    def _free(self) -> None:
        if self._forked:
            return
        self._close_listeners()
        self.groups.lose_links()
        self.rnic_set.close()
        self.tcp_option.close()
        self.discovery.close()
        if hasattr(self.groups, "tcp_watch"):
            self.groups.tcp_watch.close()

    # --- forks -----------------------------------------------------------------------------

    def check_not_forked(self) -> None:
        """Raise RuntimeError in a forked child."""
        if self._forked:
            raise RuntimeError(_FORKED)

    def in_forked_child(self, abandon: Callable[[], object]) -> None:
        """Call ``abandon`` in each process that is forked from this one."""
        self._in_forked_child.append(abandon)

    def forked(self) -> None:
        """This process is a forked child: nothing here may touch what the parent works with.

        The parent's other threads do not exist here, and may have held locks: none is taken. A
        part that fails keeps none of the others from being abandoned.
        """
        self._forked = self.closing = True
        with contextlib.ExitStack() as parts:
            parts.callback(self._refuse_connections)
            parts.callback(self.pump.abandon)
            parts.callback(self.rnic_set.abandon)
            parts.callback(self.discovery.abandon)
            if hasattr(self.groups, "tcp_watch"):
                parts.callback(self.groups.tcp_watch.abandon)
            parts.callback(self.timers.abandon)
            for thing in self.attached:
                parts.callback(thing.abandon)
            for abandon in self._in_forked_child:
                parts.callback(abandon)

    def _refuse_connections(self) -> None:
        for endpoint in self.groups.endpoints.values():
            connection = endpoint.connection
            for part in (connection.receiver, connection.sender, connection):
                part.__class__ = _IN_FORKED_CHILD[type(part)]


async def _run_in_turns(steps: Iterator[None]) -> None:
    """Do all steps, and let other tasks run after each millisecond of them."""
    turn = trio.current_time() + _MAX_TURN
    for _ in steps:
        if trio.current_time() >= turn:
            await trio.lowlevel.checkpoint()
            turn = trio.current_time() + _MAX_TURN


def _refuse(*_: object) -> NoReturn:
    raise RuntimeError(_FORKED)


_IN_FORKED_CHILD: Final = {
    kind: type(f"Forked{kind.__name__}", (kind,), {"__slots__": (), "__getattribute__": _refuse})
    for kind in (Connection, Receiver, Sender)
}
"""What becomes of a connection and its halves, which streams hold; free where nobody forks."""


class _Interrupts:
    """SIGINT while stacks are being left: they wait no longer, and the program has it as well.

    Trio keeps an interrupt that comes behind its main task until the run is over.
    """

    def __init__(self) -> None:
        self._leaving: set[Runtime] = set()
        self._before: Callable[[int, FrameType | None], object] | None = None

    @contextlib.contextmanager
    def forward_to(self, runtime: Runtime) -> Iterator[None]:
        """Tell this one, too, while it is being left."""
        if threading.current_thread() is not threading.main_thread():
            yield  # signals are the main thread's
            return
        before = signal.getsignal(signal.SIGINT)
        if not self._leaving and callable(before):
            self._before = before
            signal.signal(signal.SIGINT, self._interrupted)
        self._leaving.add(runtime)
        try:
            yield
        finally:
            self._leaving.remove(runtime)
            if not self._leaving and signal.getsignal(signal.SIGINT) == self._interrupted:
                signal.signal(signal.SIGINT, self._before)
                self._before = None  # it knows the whole run

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        for runtime in list(self._leaving):
            with contextlib.suppress(trio.RunFinishedError):
                runtime.trio_token.run_sync_soon(runtime.stop_waiting)
        if self._before is not None:
            self._before(number, frame)


_INTERRUPTS = _Interrupts()
_RUNTIMES: weakref.WeakSet[Runtime] = weakref.WeakSet()


def _after_fork() -> None:
    for runtime in list(_RUNTIMES):
        runtime.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _unwrap_group(error: Exception) -> Exception:
    """What is in a group of one."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
