"""`SmcListener`: accepts TCP connections, runs their handshakes, returns streams.

Handshakes run in tasks of their own, so that a slow or hostile client delays no other client. At
most `MOST_WAITING` streams wait for `accept`, or `Config.handshake_limit` if that is more; further
connections wait in the TCP backlog. Four times as many may be in a handshake; beyond that,
connections whose handshake has made no progress for a second are reset (`connecting.pending`). An
error of one connection never reaches the caller of `accept`.

`SmcListener.hand_out` passes on each connection as soon as TCP has accepted it: the same task
finishes the handshake and uses the stream. This saves a task and two passes of the scheduler for
each connection. `SmcListener.serve` is `hand_out` with a handler in a task.

The listening socket may be shared: a copy of its descriptor in this process, or in another one.
Over TCP a connection goes to the process that calls accept(2), and waits in the backlog as long as
none does.  So a listener accepts at once only while a task waits for a connection.  If no task
waits, other processes have ten milliseconds to accept the connection; then the listener accepts it,
so that a program that works on one connection does not delay the handshake of the next.  With
``accept_on_demand`` a listener accepts only after the first call of `accept` or `hand_out`, or
after a client of the same stack has waited for it.  `connecting.acceptance` has these states.

A listener clears TCP_DEFER_ACCEPT on its TCP socket and implements it itself, like Linux' AF_SMC.
With the option the kernel would wait for data of the client, and the client waits for the server's
answer before it sends a byte.  The listener passes on a connection when data or the end of the
stream has arrived, or when the seconds are over.

This module opens the listening sockets itself, because a socket has to offer the TCP option before
it listens (`rendezvous.discovery.tcp_option`). The sockets of `trio.open_tcp_listeners` listen
already.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket as stdlib_socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from typing import TYPE_CHECKING, Final, NoReturn, Protocol

import trio

from trio_smc._base.interrupts import ki_protected
from trio_smc._base.reasons import FallbackReason
from trio_smc._base.resources import LACK_ERRORS, is_lack
from trio_smc._base.waits import wait_readable
from trio_smc.connecting.accept import Arrival
from trio_smc.connecting.acceptance import Acceptance
from trio_smc.connecting.established import HandshakeHost
from trio_smc.connecting.pending import PendingHandshakes
from trio_smc.host.free_descriptors import leaves_reserve
from trio_smc.host.platform import is_supported
from trio_smc.host.real_time import move_on_after, move_on_at
from trio_smc.host.tcp import SocketIdentity, backlog, queued
from trio_smc.rnic.spinner import AcceptSpin
from trio_smc.streams.parking import BUSY_DESCRIPTOR
from trio_smc.streams.rdma_stream import RdmaStream

if TYPE_CHECKING:
    from trio_smc.config.config import Config
    from trio_smc.rendezvous.discovery.same_host import Discovery, Publication
    from trio_smc.stack.runtime import Cancellable, Closable, Tracked
    from trio_smc.streams.stream import SmcStream

__all__ = [
    "CAPACITY_ERRORS",
    "CAPACITY_PAUSE",
    "LEAST_BACKLOG",
    "MOST_WAITING",
    "Incoming",
    "ListenerHost",
    "SmcListener",
    "WaitEnded",
    "open_listening_sockets",
]

LOGGER = logging.getLogger("trio_smc")

CAPACITY_ERRORS: Final = LACK_ERRORS - {errno.EAGAIN}
"""Errors after which accepting is retried: descriptors or memory may be available later."""
CAPACITY_PAUSE: Final = 0.1
"""Seconds before the retry, as in `trio.serve_listeners`."""
_DESCRIPTORS: Final = 4
"""Descriptors of a listener beside its TCP socket: the epoll instance of `_Readiness`, the
directory and the datagram socket of its name, and the socket that refuses clients of older
releases."""
_CLOSED_ERRORS: Final = {errno.EBADF, errno.ENOTSOCK}
_ACCEPT_BATCH: Final = 16
"""Connections accepted in one pass of the scheduler.  Chosen; no measurement is recorded."""
MOST_WAITING: Final = 128
"""Streams of one listener that wait for `accept`, if `Config.handshake_limit` is not larger.
Chosen; no measurement is recorded."""
LEAST_BACKLOG: Final = 4096
"""Connections that may wait in the kernel at least; net.core.somaxconn, whose default is the same,
may limit it further.  Chosen."""
_DEFER_ACCEPT: Final = (stdlib_socket.IPPROTO_TCP, getattr(stdlib_socket, "TCP_DEFER_ACCEPT", 9))
_HANDSHAKES_PER_STREAM: Final = 4
"""Handshakes under way for each stream that may wait for `accept`.  Chosen; no measurement is
recorded."""
_ACCEPT_SPINS: Final = 4
"""The longest spin for a next connection, in multiples of `Config.spin`.  Chosen: docs/decisions.md
has a measurement with this value only (short connections 0.57 and 0.63 times TCP)."""


# The kernel keeps the backlog in 16 bits. It may truncate a larger number.
_MAX_BACKLOG: Final = 0xFFFF


class _PlainSocket(stdlib_socket.socket):
    """A socket whose `accept` is 4 µs faster, because it makes no enumerations."""

    family = stdlib_socket.SocketType.family  # type: ignore[assignment]
    type = stdlib_socket.SocketType.type  # type: ignore[assignment]


class _Readiness:
    """Waits for connections of a listening socket that belongs to the program.

    The program may wait for its descriptor itself, or close it and use the number for another file.
    So the descriptor is in an epoll instance of its own, and Trio waits for that.
    """

    __slots__ = ("_epoll",)

    def __init__(self, sock: trio.socket.SocketType) -> None:
        self._epoll = select.epoll()
        try:
            self._epoll.register(sock.fileno(), select.EPOLLIN)
        except BaseException:
            self._epoll.close()
            raise

    async def wait(self) -> None:
        await wait_readable(self._epoll.fileno())

    def close(self) -> None:
        self._epoll.close()


class WaitEnded(trio.ClosedResourceError):
    """`SmcListener.end_waits` has ended the call.  The listener is open."""


class ListenerHost(HandshakeHost, Protocol):
    """The stack, as seen by a listener."""

    discovery: Discovery
    nursery: trio.Nursery

    def add_listener(self, listener: Closable) -> None:
        """Close ``listener`` when the stack is left."""

    def remove_listener(self, listener: Closable) -> None:
        """Undo `add_listener`: the listener was closed."""

    def track(self, work: Cancellable) -> Tracked:
        """A context manager: leaving the stack cancels ``work`` and waits for its end."""


class Incoming(Protocol):
    """An accepted connection, as seen by the task that serves the connection."""

    async def stream(self) -> SmcStream | None:
        """Finish the handshake and return the stream; None if the connection had to be closed.

        Never raises because of the client.
        """

    async def spin_for_next(self) -> None:
        """Spin for the next connection. To be awaited after the stream was closed."""


@ki_protected
class _Accepted:
    """A connection of a listener (`Incoming`): a stream, or one that needs a handshake first."""

    __slots__ = ("_accepted", "_listener")

    def __init__(self, listener: SmcListener, accepted: SmcStream | Arrival) -> None:
        self._listener = listener
        self._accepted = accepted

    async def stream(self) -> SmcStream | None:
        """See `Incoming.stream`."""
        accepted = self._accepted
        if isinstance(accepted, Arrival):
            return await self._listener._finish_handshake(accepted)
        return accepted

    async def spin_for_next(self) -> None:
        """See `Incoming.spin_for_next`."""
        await self._listener._spin_for_next()


@ki_protected
class SmcListener(trio.abc.Listener["SmcStream"]):
    """A listener of `SmcStream`; made by `open_listeners`.

    Args:
      stack, config: of the listener.
      sock: the listening TCP socket.
      accept_on_demand: accept only after the first call of `accept` or `hand_out`.
      of_program: the socket belongs to the program, which may close it, wait for it, and go on to
        use it when the stack has ended.

    Attributes:
      socket: the listening TCP socket, for names and options.
      deferral: seconds that a connection waits for data before `accept` returns it
        (TCP_DEFER_ACCEPT); 0: it does not wait.
    """

    def __init__(
        self,
        stack: ListenerHost,
        sock: trio.socket.SocketType,
        config: Config,
        *,
        accept_on_demand: bool = False,
        of_program: bool = False,
    ) -> None:
        self.socket = sock
        self._of_program = of_program
        shared = of_program and is_supported()
        # Otherwise the program could not accept.  The connections are TCP then.
        self._may_publish = leaves_reserve(_DESCRIPTORS)
        self._readiness = self._open_readiness() if shared else None
        self._identity = SocketIdentity(sock) if shared else None
        self._stack = stack
        self._config = config
        self._ready: deque[SmcStream] = deque()
        self._error: BaseException | None = None
        self._waiting_calls = trio.lowlevel.ParkingLot()
        self._watching_calls = trio.lowlevel.ParkingLot()  # of `wait_readable`
        self._ended_waits = 0  # calls of `end_waits`
        self._left = False  # the stack has ended, and the socket is open
        self._start_task: Callable[[Incoming], None] | None = None  # of `hand_out`
        self._closed = False
        self._arrivals: set[Arrival] = set()
        self._scope = trio.CancelScope()
        self._most_waiting = max(config.handshake_limit or 0, MOST_WAITING)
        self._pending = PendingHandshakes(_HANDSHAKES_PER_STREAM * self._most_waiting)
        # Connections that TCP has accepted and `accept` has not returned yet.
        self._in_listener = 0
        self._accepted_count = 0  # all connections so far
        self._accept_spin = AcceptSpin(_ACCEPT_SPINS * config.spin)
        self._room_changed = trio.Event()
        is_shared = accept_on_demand and config.discovery == "auto"
        self._acceptance = Acceptance(on_demand=is_shared)
        self.deferral = 0
        self.take_deferral()
        self._raise_backlog()
        self.publication: Publication = self._publish()
        self.publication.on_waiting = self._acceptance.client_waits
        stack.add_listener(self)
        stack.nursery.start_soon(self._run)

    def _open_readiness(self) -> _Readiness | None:
        """None for lack of descriptors or epoll watches: the listener waits for the program's
        descriptor then, and publishes nothing."""
        if self._may_publish:
            try:
                return _Readiness(self.socket)
            except OSError as error:
                if not is_lack(error):
                    raise
                self._may_publish = False
        return None

    def _publish(self) -> Publication:
        sock, discovery = self.socket, self._stack.discovery
        name = sock.getsockname()
        dual_stack = sock.family == stdlib_socket.AF_INET6 and not sock.getsockopt(
            stdlib_socket.IPPROTO_IPV6, stdlib_socket.IPV6_V6ONLY
        )
        if self._config.discovery == "tcp-option":
            return discovery.publish_nothing(name, FallbackReason.PEER_NOT_CAPABLE)
        if not self._may_publish:
            LOGGER.info("no SMC-R on %s: too few free descriptors for a listener", name)
            return discovery.publish_nothing(name, FallbackReason.OUT_OF_RESOURCES)
        return discovery.publish(name, self._stack.nursery, dual_stack=dual_stack)

    def is_for(self, sock: trio.socket.SocketType) -> bool:
        """True if this is the open listener of a socket of the program."""
        if self._identity is None or self._closed or self.socket.fileno() != sock.fileno():
            return False
        return self._has_own_descriptor()

    def end_if_replaced(self, sock: trio.socket.SocketType) -> None:
        """End the listener if the program has closed its socket, or if ``sock`` is another socket
        and has the number of its descriptor."""
        if self._identity is None or self._closed:
            return
        number = self.socket.fileno()
        if number < 0 or (number == sock.fileno() and not self._has_own_descriptor()):
            self.stop()

    def _has_own_descriptor(self) -> bool:
        """True if the descriptor of `socket` is still open, and that of the same socket."""
        if self.socket.fileno() < 0:
            return False
        return self._identity is None or self._identity.is_of(self.socket)

    async def accept(self) -> SmcStream:
        """Return the next stream; its mode is the result of the handshake.

        An error of one connection closes this connection and is never raised here.  Only calls that
        wait exclude each other, as with a socket of Trio.

        Raises:
          trio.ClosedResourceError: the listener or its stack was closed.
          trio.BusyResourceError: another task waits, and over TCP it would still wait, too: TCP has
            no connection for it.
          OSError: out of descriptors or memory (EMFILE, ENFILE, ENOMEM, ENOBUFS);
            `trio.serve_listeners` tries again later.  EINVAL: the socket was shut down.
          RuntimeError: called in a forked child.
        """
        self._begin_to_accept()
        try:
            if self._ready or self._closed or self._error is not None:
                await trio.lowlevel.checkpoint()  # otherwise the wait is a checkpoint
            may_wait = False
            while not self._closed:
                if self._ready:
                    self._connection_left()
                    return self._ready.popleft()
                if not may_wait:
                    self._check_may_wait()
                    may_wait = True
                await self._wait_for_change()
            self._raise_end()
        finally:
            self._acceptance.end_call()

    async def hand_out(self, start_task: Callable[[Incoming], None]) -> NoReturn:
        """Accept in a loop; call ``start_task`` for each connection as soon as TCP has accepted it.

        ``start_task`` starts a task that finishes the handshake and uses the stream (`Incoming`).

        Raises:
          Exception: whatever ``start_task`` raises.
          trio.BusyResourceError: another task is accepting.
          trio.ClosedResourceError, OSError, RuntimeError: as `accept`.
        """
        self._stack.check_not_forked()
        if self._acceptance.calls and not self._closed:
            raise _busy()
        self._begin_to_accept()
        self._start_task = start_task
        try:
            await trio.lowlevel.checkpoint()
            while self._ready:
                self._hand_ready(self._ready.popleft(), start_task)
            while not self._closed:
                await self._wait_for_change()
            self._raise_end()
        finally:
            self._start_task = None
            self._acceptance.end_call()

    async def wait_readable(self) -> None:
        """Wait until `accept` would return or raise at once.

        Raises trio.ClosedResourceError: the listener is closed, or `end_waits` was called.
        """
        if self._acceptance.is_on_demand:
            await wait_readable(self.socket)
            return
        await trio.lowlevel.checkpoint()
        while not (self._ready or self._closed or self._error is not None):
            await self._park(self._watching_calls)

    def end_waits(self) -> None:
        """Let all calls that wait raise `trio.ClosedResourceError`."""
        self._ended_waits += 1
        self._waiting_calls.unpark_all()
        self._watching_calls.unpark_all()

    def _begin_to_accept(self) -> None:
        self._stack.check_not_forked()
        if self.socket.fileno() < 0:
            self.close()  # the program has closed the socket itself
        self._acceptance.begin_call()
        if not self._closed:
            self.take_deferral()

    def _check_may_wait(self) -> None:
        """Raise BusyResourceError if over TCP another task would be waiting already.

        Over TCP a task waits only while no connection is in the backlog.  Here a task waits for a
        handshake, too, and the connection of that handshake counts as taken.
        """
        waiting = len(self._waiting_calls)
        if not waiting:
            return
        if self._start_task is not None or waiting > self._in_listener + self._queued():
            raise _busy()

    def _queued(self) -> int:
        if sys.platform != "linux":
            return 0
        with contextlib.suppress(OSError):
            return queued(self.socket)
        return 0

    def _raise_end(self) -> NoReturn:
        """Raise the error of a listener that has ended."""
        if self.has_stopped and not self._left:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        raise trio.ClosedResourceError("the listener was closed")

    def take_deferral(self) -> None:
        """Take TCP_DEFER_ACCEPT over from the TCP socket, if the program has set it there."""
        if sys.platform != "linux" or self.socket.fileno() < 0:
            return
        seconds = 0
        with contextlib.suppress(OSError):  # a system without the option
            seconds = self.socket.getsockopt(*_DEFER_ACCEPT)
        if seconds and self._has_own_descriptor():
            self.socket.setsockopt(*_DEFER_ACCEPT, 0)
            self.deferral = seconds

    def _raise_backlog(self) -> None:
        """Let more connections wait in the kernel.

        If the backlog is full, the kernel drops the client's last ACK.  Over TCP the client's first
        data repeats it.  A client that waits for this side's answer sends no data, and would wait
        for the repeated SYN-ACK, a second or more.
        """
        with contextlib.suppress(OSError):
            if sys.platform == "linux" and backlog(self.socket) < LEAST_BACKLOG:
                self.socket.listen(LEAST_BACKLOG)

    async def _wait_for_change(self) -> None:
        """Wait for a stream or the end of the listener. Raises the listener's pending error."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        await self._park(self._waiting_calls)

    async def _park(self, lot: trio.lowlevel.ParkingLot) -> None:
        ended_waits = self._ended_waits
        await lot.park()
        if self._ended_waits != ended_waits:
            raise WaitEnded("another task has ended this wait")

    def _hand_ready(self, stream: SmcStream, start_task: Callable[[Incoming], None]) -> None:
        self._connection_left()
        try:
            start_task(_Accepted(self, stream))
        except BaseException:
            stream.abort()
            raise

    async def aclose(self) -> None:
        """Close, and reset connections in a handshake and streams that were not accepted yet."""
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """`aclose` without the checkpoint."""
        self.stop()
        if self._has_own_descriptor():
            self.socket.close()

    def leave_stack(self) -> None:
        """End the listener, because the stack ends; a socket of the program stays open."""
        if not self._of_program:
            self.close()
        elif not self._closed:
            self._left = True
            self.stop()

    def stop(self) -> None:
        """End the listener, but leave its socket open, which shutdown(2) has ended.

        `accept` raises EINVAL from now on.  Connections in a handshake and streams that were not
        accepted yet are reset, as those in the kernel's backlog.
        """
        if self._closed:
            return
        self._stack.check_not_forked()
        self._closed = True
        self._scope.cancel()
        for arrival in list(self._arrivals):
            arrival.cancel()
        self.publication.close()
        while self._ready:
            self._ready.popleft().abort()
        self._waiting_calls.unpark_all()
        self._watching_calls.unpark_all()
        if self.deferral and self._has_own_descriptor():
            self.socket.setsockopt(*_DEFER_ACCEPT, self.deferral)  # for the next `listen`
        self._stack.remove_listener(self)

    @property
    def has_stopped(self) -> bool:
        """True if the listener has ended, and its socket is open: it was shut down, or the stack
        has ended."""
        return self._closed and self.socket.fileno() >= 0

    async def serve(
        self, handler: Callable[[SmcStream], Awaitable[object]], nursery: trio.Nursery
    ) -> NoReturn:
        """Run ``handler(stream)`` for each connection, in a task of ``nursery``.

        Like `trio.serve_listeners`: retries when descriptors or memory run out. Closes the
        listener at the end.

        Raises:
          trio.ClosedResourceError: the listener or its stack was closed.
        """
        context = copy_context()  # handlers have the context of this call

        def start_task(incoming: Incoming) -> None:
            context.run(nursery.start_soon, _serve_one, handler, incoming)

        try:
            while True:
                try:
                    await self.hand_out(start_task)
                except OSError as error:
                    if error.errno not in CAPACITY_ERRORS:
                        raise
                    # `_accept_batch` waits before the retry.
                    name = errno.errorcode[error.errno]
                    LOGGER.error("cannot accept: %s; retrying in %s s", name, CAPACITY_PAUSE)
        finally:
            self.close()

    async def _finish_handshake(self, arrival: Arrival) -> SmcStream | None:
        """Run the handshake of a connection that was handed out before it."""
        try:
            stream = await self._run_handshake(arrival)
            return await self._defer(stream) if stream is not None and self.deferral else stream
        finally:
            self._connection_left()

    async def _defer(self, stream: SmcStream) -> SmcStream:
        """Wait until data or the end of the stream has arrived, for `deferral` seconds at most."""
        try:
            with move_on_after(self._stack.timers, self.deferral):
                if isinstance(stream, RdmaStream):
                    await stream.receive_by(lambda: stream.is_readable() or None)
                else:
                    await wait_readable(stream.socket)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the stream reports the error
        except BaseException:
            stream.abort()
            raise
        return stream

    async def _spin_for_next(self) -> None:
        """Spin for the next connection, if this is worthwhile.

        A server of short connections would sleep between two of them. The wakeup takes a tenth of
        the time of such a connection: 38 of 340 µs (docs/decisions.md).
        """
        before = self._accepted_count
        await self._accept_spin.spin(lambda: self._accepted_count != before or self._closed)

    async def _run(self) -> None:
        try:
            await self._accept_and_begin()
        finally:
            if self._readiness is not None:
                self._readiness.close()

    async def _accept_and_begin(self) -> None:
        with self._stack.track(self._scope), self._scope:
            async with trio.open_nursery() as nursery:

                def begin(arrival: Arrival) -> None:
                    stream = None if self.deferral else arrival.plain_stream()
                    if stream is not None:
                        self._arrivals.remove(arrival)
                        self._add_ready(stream)
                    elif self._start_task is None or not self._hand_arrival(
                        arrival, self._start_task
                    ):
                        nursery.start_soon(self._handshake_and_keep, arrival)

                await self._accept_until_closed(begin)

    def _hand_arrival(self, arrival: Arrival, start_task: Callable[[Incoming], None]) -> bool:
        """Hand a connection out before its handshake; False if its task cannot be started."""
        try:
            start_task(_Accepted(self, arrival))
        except BaseException as error:
            self._report_error(error)
            return False
        return True

    def _report_error(self, error: BaseException) -> None:
        """Raise an error in `hand_out`, not in the task that accepts."""
        self._start_task = None
        self._note_error(error)

    def _note_error(self, error: BaseException) -> None:
        """Raise an error in a call of `accept` or `hand_out`."""
        self._error = error
        self._waiting_calls.unpark()
        self._watching_calls.unpark_all()

    async def _handshake_and_keep(self, arrival: Arrival) -> None:
        stream = None
        try:
            stream = await self._run_handshake(arrival)
            if stream is not None and self.deferral:
                stream = await self._defer(stream)
        finally:
            if stream is None:
                self._connection_left()
        if stream is not None:
            self._add_ready(stream)

    def _add_ready(self, stream: SmcStream) -> None:
        if self._start_task is not None and not self._ready and not self._closed:
            try:
                self._hand_ready(stream, self._start_task)
            except BaseException as error:
                self._report_error(error)
            return
        if self._closed:
            stream.abort()
            return
        self._ready.append(stream)
        self._waiting_calls.unpark()
        self._watching_calls.unpark_all()

    async def _run_handshake(self, arrival: Arrival) -> SmcStream | None:
        try:
            with self._stack.track(arrival):
                return await arrival.stream()
        finally:
            self._arrivals.remove(arrival)
            self._handshake_ended(arrival)

    async def _accept_until_closed(self, begin: Callable[[Arrival], None]) -> None:
        """Accept until the listener is closed; ``begin`` starts a task for each connection."""
        if self.socket.fileno() < 0:
            self.close()
            return
        # Trio's `accept` takes two more passes of the scheduler for each connection.
        sock = self.socket
        plain = _PlainSocket(sock.family, sock.type, sock.proto, fileno=sock.fileno())
        try:
            plain.setblocking(False)
            while not self._closed:
                await self._accept_batch(plain, begin)
        finally:
            plain.detach()  # the descriptor belongs to `socket`

    async def _accept_batch(
        self, plain: stdlib_socket.socket, begin: Callable[[Arrival], None]
    ) -> None:
        """Wait for connections, and begin their handshakes, or wait for room for one."""
        if not self._has_room():
            await self._wait_for_room()
            return
        try:
            if self._acceptance.is_on_demand:
                await self._acceptance.wait_for_demand()
                if self._closed:
                    return  # the next listener may be waiting on this socket
            await self._wait_for_connections()
            if self._acceptance.is_later:
                await self._acceptance.leave_to_others(self._stack.timers)
            if self._closed:
                return
            if not self._has_own_descriptor():
                self.stop()  # the program has closed the socket itself
                return
            self._stack.check_not_forked()  # the connections are the parent's
            self._accept_waiting(plain, begin)
        except BlockingIOError:
            return
        except trio.ClosedResourceError:
            self.close()  # the program closed the socket itself
        except trio.BusyResourceError as error:  # a task of the program waits for the socket
            self._note_error(error)
            await trio.sleep(CAPACITY_PAUSE)
        except OSError as error:
            await self._after_error(error)

    def _accept_waiting(
        self, plain: stdlib_socket.socket, begin: Callable[[Arrival], None]
    ) -> None:
        """Accept connections that wait, and begin their handshakes.

        Raises:
          BlockingIOError: no further connection waits.
          OSError: of accept(2).
        """
        config = self._config
        # If connections come one after the other, a second `accept` only delays the first one.
        for _ in range(_ACCEPT_BATCH if self._pending else 1):
            if not self._has_room() or self.socket.fileno() < 0:
                break
            accepted, remote = plain.accept()
            limit = config.handshake_limit
            at_limit = limit is not None and len(self._arrivals) >= limit
            arrival = Arrival(
                self._stack,
                config,
                self.publication,
                accepted,
                remote,
                at_limit=at_limit,
                is_crowded=self._pending.is_nearly_full,
            )
            self._in_listener += 1
            self._accepted_count += 1
            self._arrivals.add(arrival)
            if arrival.needs_handshake:
                arrival.on_progress = self._pending.renew
                self._pending.add(arrival)
            begin(arrival)

    async def _wait_for_connections(self) -> None:
        if self._readiness is not None:
            await self._readiness.wait()
        else:
            await wait_readable(self.socket)

    async def _after_error(self, error: OSError) -> None:
        """Continue after an error of accept(2), or end the listener."""
        if error.errno in CAPACITY_ERRORS:
            self._note_error(error)
            await trio.sleep(CAPACITY_PAUSE)
        elif error.errno in _CLOSED_ERRORS:
            LOGGER.error("the listening socket %s failed: %s", self.socket, error)
            self.close()
        elif error.errno == errno.EINVAL:
            self.stop()  # the socket no longer listens: a process has shut it down
        # Otherwise the client has already ended the connection.

    async def _wait_for_room(self) -> None:
        """Wait until another connection may be accepted."""
        while not self._has_room():
            self._room_changed = trio.Event()
            timers = self._stack.timers
            with move_on_at(timers, self._pending.give_way(timers.now())):
                await self._room_changed.wait()

    def _has_room(self) -> bool:
        waiting = self._in_listener - len(self._pending)
        return waiting < self._most_waiting and not self._pending.is_full

    def _handshake_ended(self, arrival: Arrival) -> None:
        """The handshake of ``arrival`` is over."""
        if self._pending.discard(arrival):
            self._room_changed.set()

    def _connection_left(self) -> None:
        """A connection was passed on or closed, so there is room for another one."""
        self._in_listener -= 1
        self._room_changed.set()


def _busy() -> trio.BusyResourceError:
    return trio.BusyResourceError(BUSY_DESCRIPTOR)


async def _serve_one(handler: Callable[[SmcStream], Awaitable[object]], incoming: Incoming) -> None:
    """The task of a connection: the rest of its handshake, then the handler."""
    stream = await incoming.stream()
    if stream is None:
        return
    try:
        await handler(stream)
    finally:
        if isinstance(stream, RdmaStream):
            stream.close()
        else:
            await trio.aclose_forcefully(stream)
    if isinstance(stream, RdmaStream):
        await incoming.spin_for_next()


# A program that checks for a SocketListener wants its `socket`.
trio.SocketListener.register(SmcListener)


async def open_listening_sockets(
    port: int,
    *,
    host: str | bytes | None,
    backlog: int | None,
    prepare: Callable[[trio.socket.SocketType], object],
) -> list[trio.socket.SocketType]:
    """Open sockets like `trio.open_tcp_listeners`: same arguments, same errors.

    Args:
      prepare: called with each socket before it listens.
    """
    if not isinstance(port, int):
        raise TypeError(f"port must be an int, not {port!r}")
    if backlog is not None and not isinstance(backlog, int):
        raise TypeError(f"backlog must be an int or None, not {backlog!r}")
    waiting = _MAX_BACKLOG if backlog is None else min(backlog, _MAX_BACKLOG)
    found = await trio.socket.getaddrinfo(
        host, port, type=stdlib_socket.SOCK_STREAM, flags=stdlib_socket.AI_PASSIVE
    )
    unsupported: OSError | None = None
    with contextlib.ExitStack() as undo:
        listening = []
        for family, kind, protocol, _, address in found:
            try:
                # The program may have a socket factory; `enable` is one.
                made = trio.socket.socket(family, kind, protocol)
                sock = getattr(made, "plain", made)  # the socket that a `DropInSocket` wraps
            except OSError as error:
                if error.errno != errno.EAFNOSUPPORT:
                    raise
                unsupported = error  # the other family may be supported
                continue
            undo.callback(sock.close)
            if sys.platform != "win32":
                sock.setsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_REUSEADDR, 1)
            if family == stdlib_socket.AF_INET6:
                sock.setsockopt(stdlib_socket.IPPROTO_IPV6, stdlib_socket.IPV6_V6ONLY, 1)
            prepare(sock)
            await sock.bind(address)
            sock.listen(waiting)
            listening.append(sock)
        if unsupported is not None and not listening:
            raise unsupported
        undo.pop_all()
        return listening
