"""`Runtime`: the background tasks of a stack, how a stack is left, and forked children.

Theory of operation
-------------------
A stack is a peer in the terms of RFC 7609. Its background tasks run in one nursery: the pump with
the RNICs' threads, one task for all timers, one for all TCP connections, and the tasks of
listeners. All other code has no task of its own: these tasks and the user's tasks call it. So only
the Trio thread changes state.

`open_stack` opens this nursery around the user's block. Calls outside any `open_stack` share a
default stack, which runs in a system task of the Trio run. It is closed when the run's main task
has ended.

Leaving a stack (`Runtime.shut_down`): Listeners are closed, and calls under way end with
ClosedResourceError. Streams that are still open are closed as close(2) closes a socket, with a
ResourceWarning. Connections get `shutdown_timeout` seconds, all together, to finish. Link groups
are terminated orderly (3.5.4). Then the nursery is cancelled and the RNICs are closed. SIGINT ends
all waits (`_Interrupts`).

A forked child shares the memory and sockets of its parent's stacks, but has none of their threads
and cannot use them. So a fork hook makes all stacks unusable in the child. Since streams hold
connections and their two halves directly, the hook also changes the class of these objects: each
use then raises RuntimeError.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Final, NoReturn, Protocol

import trio

from trio_smc._base.interrupts import ki_protected
from trio_smc._base.reasons import FallbackReason
from trio_smc._base.timers import Timers
from trio_smc._base.waits import wait_readable
from trio_smc._base.weak import WeakSet
from trio_smc.datapath.connection import Connection
from trio_smc.datapath.receiver import Receiver
from trio_smc.datapath.sender import Sender
from trio_smc.host.alarm import Alarm
from trio_smc.host.platform import is_supported
from trio_smc.host.real_time import move_on_at, real_clock
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

_HANDSHAKE_SPINS: Final = 4
"""The longest spin of a handshake, in multiples of `Config.spin`. A peer takes longer to answer a
message of a handshake than one of a stream. Chosen: with these spins opening a connection took
530 µs, with sleeps 730 (docs/decisions.md)."""
_MAX_TURN: Final = 0.001
"""Seconds of work on many streams or link groups before other tasks run. Chosen; docs/decisions.md,
"many ends at once", has the longest passes with this value."""
_MIN_GROUP_TIME: Final = 0.5
"""Seconds that link groups have at least to end orderly, even after `shutdown_timeout`. Chosen."""
_SAME_HOST_ANSWER: Final = 0.05
"""Seconds for the answer of a process on this host to the end of a link group. Chosen: an idle
process answers within a millisecond, and the end of this process must not depend on a busy or
stopped one, as it does not over TCP."""
_FORKED: Final = "trio_smc cannot be used in a forked child; start a new process"


class Cancellable(Protocol):
    """Work that can be cancelled."""

    def cancel(self) -> None:
        """Make the work end soon."""


class Closable(Protocol):
    """A listener, as seen by the code that closes it."""

    @property
    def socket(self) -> trio.socket.SocketType:
        """The listening socket."""

    def leave_stack(self) -> None:
        """End the listener, because the stack ends."""


class Attached(Protocol):
    """A service beside the stack, such as its control socket."""

    async def run(self) -> None:
        """Serve until cancelled."""

    def abandon(self) -> None:
        """Give up in a forked child."""


@ki_protected
class Tracked:
    """The context manager of `Runtime.track`."""

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


@ki_protected
class Call(Tracked):
    """The context manager of `Runtime.call`."""

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


@ki_protected
class Runtime:
    """The parts of one stack, and the tasks that serve them.

    Args:
      clock: seconds, for timers; None: real time.

    Attributes:
      config: the stack's configuration.
      rnic_set: the stack's RNICs.
      groups: the stack's link groups and connections.
      pump, budget, timers, spinner, discovery, tcp_option: one each, for all connections.
      short_connections: the peers whose connections are short.
      nursery: for tasks that are cancelled when the stack has been left; set by `run`.
      trio_token: of the stack's Trio run; set by `run`.
      closing: True once the stack is being left.
      failure: the defect that ended a background task, and so the stack.
      attached: the services from `attach`.
      unclosed: a warning for each stream that `shut_down` found open.

    Raises:
      RnicError, ValueError: as `StackRnics.open`.
    """

    nursery: trio.Nursery
    trio_token: trio.lowlevel.TrioToken

    def __init__(self, config: Config, clock: Callable[[], float] | None = None) -> None:
        clock = clock or real_clock()
        self.config = config
        self.pump: Pump = Pump(spin=config.spin, wake=config.wake)
        self.budget: Budget = Budget(self.pump)
        self.timers: Timers = Timers(clock, self._timer_is_earlier)
        self.spinner: Spinner = Spinner(_HANDSHAKE_SPINS * config.spin, self.pump.drain)
        self.short_connections: ShortConnections = ShortConnections(clock)
        self.discovery: Discovery = Discovery(
            config.private_directory(), self.timers, self.spinner, self.short_connections.clear
        )
        self.tcp_option: TcpOption = TcpOption(Path(config.tcp_option))
        self.attached: list[Attached] = []
        self.closing: bool = False
        self.failure: Exception | None = None
        self.unclosed: list[str] = []
        self._scope = trio.CancelScope()  # shielded once `run` has started
        self._ended = trio.Event()
        self._listeners: set[Closable] = set()
        # Sockets that may offer SMC-R by the TCP option, now or once there is a RoCE port.
        self._offering: WeakSet[trio.socket.SocketType] = WeakSet()
        self._under_way: set[Cancellable] = set()
        self._timers_changed = trio.Event()
        self._alarm: Alarm | None = None
        self._something_ended = trio.Event()
        self._forked = False
        self._in_forked_child: list[Callable[[], object]] = []
        self._stops_waiting = False  # `shut_down` no longer waits
        self._supported = is_supported()
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
        """The RNIC that serves a connection between two addresses, or the reason for TCP.

        Args:
          near: the peer is on this host, whatever its address says.
        """
        if not self._supported:
            return FallbackReason.UNSUPPORTED_PLATFORM
        return self.rnic_set.serving(local, remote, near=near)

    def is_usable(self, rnic: Rnic) -> bool:
        """True if an RNIC that `rnic_for` returned still serves new connections."""
        return self.rnic_set.is_usable(rnic)

    def spinner_for(self, rnic: Rnic | FallbackReason) -> Spinner:
        """The spinner for a handshake. A peer on another host answers too slowly for a spin."""
        local = not isinstance(rnic, FallbackReason) and rnic.kind == "software"
        return self.spinner if local else NEVER

    def _rnic_changed(self, rnic: Rnic, change: RnicChange) -> None:
        """Notify listeners and link groups of a change of an RNIC."""
        if change is RnicChange.AVAILABLE and rnic.kind == "roce":
            for sock in list(self._offering):
                if sock.fileno() >= 0:
                    self.tcp_option.offer(sock)
        self.groups.rnic_changed(rnic, change)

    def offer_option(self, config: Config, sock: trio.socket.SocketType) -> None:
        """Let a socket offer SMC-R by the TCP option before it listens, if ``config`` allows.

        Under "auto" the socket offers SMC-R once there is a RoCE port, so perhaps later.
        """
        if config.discovery == "auto":
            self._offering.add(sock)
        remote = any(rnic.kind == "roce" for rnic in self.rnic_set.opened)
        if config.discovery == "tcp-option" or (config.discovery == "auto" and remote):
            self.tcp_option.offer(sock)

    @property
    def listeners(self) -> tuple[Closable, ...]:
        """The open listeners."""
        return tuple(self._listeners)

    def add_listener(self, listener: Closable) -> None:
        """Close ``listener`` when the stack is left."""
        self._listeners.add(listener)

    def remove_listener(self, listener: Closable) -> None:
        """Undo `add_listener`: the listener was closed."""
        self._listeners.discard(listener)

    # --- running ---------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the background tasks until `shut_down`; nothing is left afterwards.

        Shielded once it has started, so that the data of closed streams is sent although the user
        was cancelled. A defect in a background task closes the stack and is kept in `failure`.
        """
        started = False
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    self.nursery = nursery
                    self.trio_token = trio.lowlevel.current_trio_token()
                    if self._supported:
                        self._alarm = Alarm()
                        self.groups.tcp_watch = TcpWatch()
                        if self.config.discovery != "tcp-option":
                            self.discovery.open()
                        await nursery.start(self.pump.run)
                        await nursery.start(self.rnic_set.follow)
                        nursery.start_soon(self.groups.tcp_watch.run)
                    nursery.start_soon(self._run_timers)
                    started = True
                    # If Ctrl-C has interrupted the start, this task is cancelled and has to end.
                    self._scope.shield = trio.current_effective_deadline() > -math.inf
                    task_status.started()
        except ExceptionGroup as group:
            if not started:
                raise _unwrap_group(group) from None
            self.failure = group
            LOGGER.error("the stack failed", exc_info=group)
        finally:
            self.closing = True
            try:
                self.free()
            finally:
                self._ended.set()

    @property
    def running(self) -> bool:
        """True from the start of `run` until the stack is left."""
        return not self.closing and hasattr(self, "nursery")

    def attach(self, thing: Attached) -> None:
        """Run ``thing`` until the stack is left."""
        self.attached.append(thing)
        self.nursery.start_soon(thing.run)

    async def _run_timers(self) -> None:
        while True:
            if self._alarm is None:
                await self._sleep_until_timer()
            else:
                self._set_alarm(self._alarm)
                await wait_readable(self._alarm.fd)
                self._alarm.acknowledge()
            if self.timers.run_due():
                self.pump.resume_hooks()  # a timer may have sent something

    async def _sleep_until_timer(self) -> None:
        """Wait for the next timer by Trio's clock, on a system without `Alarm`."""
        self._timers_changed = trio.Event()
        with trio.move_on_at(self.timers.next_deadline()):
            await self._timers_changed.wait()

    def _set_alarm(self, alarm: Alarm) -> None:
        alarm.set(self.timers.next_deadline() - self.timers.now())

    def _timer_is_earlier(self) -> None:
        if self._alarm is not None:
            self._set_alarm(self._alarm)
        else:
            self._timers_changed.set()

    # --- the end ---------------------------------------------------------------------------

    def call(self) -> Call:
        """A context manager for a user's call: leaving the stack ends it with an error.

        Raises:
          trio.ClosedResourceError: the stack was closed, before the call or during the call.
          RuntimeError: called in a forked child.
        """
        self.check_usable()
        return Call(self._under_way, self._note_end)

    def track(self, work: Cancellable) -> Tracked:
        """A context manager: leaving the stack cancels ``work`` and waits for its end."""
        return Tracked(self._under_way, work, self._note_end)

    def check_usable(self) -> None:
        """Raise ClosedResourceError on a closed stack and RuntimeError in a forked child."""
        self.check_not_forked()
        if self.closing:
            raise trio.ClosedResourceError("the stack is closed") from self.failure

    def cancel(self) -> None:
        """End `run` without closing anything in order, because Ctrl-C has interrupted its start."""
        self._scope.cancel()

    async def shut_down(self) -> None:
        """Finish orderly, within about `shutdown_timeout` or until SIGINT, and end `run`."""
        if self._forked:
            return  # everything belongs to the parent
        with trio.CancelScope(shield=True):
            try:
                with _INTERRUPTS.forward_to(self):
                    await self._finish()
            finally:
                self._scope.cancel()
                await self._ended.wait()

    async def _finish(self) -> None:
        self.closing = True
        self._leave_listeners()
        for work in list(self._under_way):
            work.cancel()
        deadline = self.timers.now() + self.config.shutdown_timeout
        await self._wait_while(lambda: bool(self._under_way), deadline)
        await _run_in_turns(map(self.unclosed.append, self.groups.close_open()))
        await self._wait_while(lambda: self.groups.has_unfinished, deadline)
        await self._end_groups(deadline)

    async def _end_groups(self, deadline: float) -> None:
        """Terminate all link groups, and wait for the replies of their peers.

        First all peers have a moment to reply, then peers on other hosts until ``deadline``, or
        longer if that is near. After that no group waits for its peer, and timers end the groups.
        """
        patience = self.config.shutdown_timeout
        await _run_in_turns(self.groups.terminate_all())
        last = self.timers.now() + min(patience, _SAME_HOST_ANSWER)
        await self._wait_while(lambda: bool(self.groups.groups), last)
        last = self.timers.now() + min(patience, _MIN_GROUP_TIME)
        await self._wait_while(lambda: self.groups.has_roce, max(deadline, last))
        await _run_in_turns(self.groups.give_up_all())
        last = self.timers.now() + min(patience, _MIN_GROUP_TIME)
        await self._wait_while(lambda: bool(self.groups.groups), last)

    async def _wait_while(self, condition: Callable[[], bool], deadline: float) -> None:
        self.pump.resume_hooks()  # no reader polls for the answers of peers
        with move_on_at(self.timers, deadline):
            while condition() and not self._stops_waiting:
                self._something_ended = trio.Event()
                await self._something_ended.wait()

    def stop_waiting(self) -> None:
        """Make `shut_down` end without further waits."""
        self._stops_waiting = True
        self._something_ended.set()

    def _note_end(self) -> None:
        """Note the end of a call, a connection or a link group."""
        self._something_ended.set()

    def _leave_listeners(self) -> None:
        for listener in self.listeners:
            listener.leave_stack()

    def free(self) -> None:
        if self._forked:
            return
        # Each step, whatever the others raise: the program may have closed descriptors.
        with contextlib.ExitStack() as steps:
            steps.callback(self._close_alarm)
            if hasattr(self.groups, "tcp_watch"):
                steps.callback(self.groups.tcp_watch.close)
            steps.callback(self.discovery.close)
            steps.callback(self.tcp_option.close)
            steps.callback(self.rnic_set.close)
            steps.callback(self.groups.lose_links)
            steps.callback(self._leave_listeners)

    def _close_alarm(self) -> None:
        alarm, self._alarm = self._alarm, None
        if alarm is not None:
            alarm.close()

    # --- forks -----------------------------------------------------------------------------

    def check_not_forked(self) -> None:
        """Raise RuntimeError in a forked child."""
        if self._forked:
            raise RuntimeError(_FORKED)

    def call_in_forked_child(self, abandon: Callable[[], object]) -> None:
        """Call ``abandon`` in each process that is forked from this one."""
        self._in_forked_child.append(abandon)

    def forked(self) -> None:
        """Make the stack unusable in a forked child, without touching anything of the parent.

        The parent's other threads do not exist here and may have held locks, so no lock is taken.
        If abandoning one part fails, the other parts are still abandoned.
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
            parts.callback(self._close_alarm)
            for thing in self.attached:
                parts.callback(thing.abandon)
            for abandon in self._in_forked_child:
                parts.callback(abandon)

    def _refuse_connections(self) -> None:
        for endpoint in self.groups.endpoints.values():
            connection = endpoint.connection
            if type(connection) in _IN_FORKED_CHILD:  # otherwise this is the child of a child
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
"""The classes of connections and their halves in a forked child. They cost nothing elsewhere."""


class _Interrupts:
    """Forwards SIGINT to stacks that are being left, and to the program's own handler.

    If the signal arrives after Trio's main task has ended, Trio holds it back until the end of the
    run, which waits for these stacks.
    """

    def __init__(self) -> None:
        self._leaving: set[Runtime] = set()
        self._before: Callable[[int, FrameType | None], object] | None = None

    @contextlib.contextmanager
    def forward_to(self, runtime: Runtime) -> Iterator[None]:
        """Forward SIGINT to ``runtime`` while it is being left."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread handles signals
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
                self._before = None  # the handler refers to the whole Trio run

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        for runtime in list(self._leaving):
            with contextlib.suppress(trio.RunFinishedError):
                runtime.trio_token.run_sync_soon(runtime.stop_waiting)
        if self._before is not None:
            self._before(number, frame)


_INTERRUPTS = _Interrupts()
_RUNTIMES: WeakSet[Runtime] = WeakSet()


def _after_fork() -> None:
    for runtime in list(_RUNTIMES):
        runtime.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _unwrap_group(error: Exception) -> Exception:
    """The only exception in a group of one, also of nested groups."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
