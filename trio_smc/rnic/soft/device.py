"""The software RNIC: RDMA between processes of one host, without privileges or hardware.

Memory regions are sealed memfds that peers map.  An RDMA write is a copy into the mapping; the
writer checks RKey, bounds and validity.  A send fills a slot in a ring of the receiver's queue
pair.  The sender rings a doorbell only if the receiver sleeps, so two busy sides need no system
call.  A doorbell is a packet on the queue pair's socket.  The first four peers have a pipe instead,
which is faster and takes two more descriptors.

Idle peers do not slow down busy ones.  If there are many rings, the RNIC polls only those that had
messages recently.  The others are in *interrupt mode*: they stay armed, so that the next message
rings the doorbell, and from then on the RNIC polls them again.  No word of memory is shared by
several peers: a peer that rings without need, or does not ring, affects only its own ring.

This module has the device, and its `Acceptor`, which accepts peers.  The other parts are `ring`
(sends), `regions` (memory), `queue_pair`, and `messages` and `peer_sockets` (how RNICs find and
notify each other).  `port` is the device as these parts see it, and `faults` injects failures for
tests.

A process can open several RNICs, even with the same name, and can connect to itself.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import select
import socket
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Final, Literal, Protocol

from trio_smc._base.errors import ProtocolError
from trio_smc._base.resources import is_lack
from trio_smc.host.alarm import Alarm
from trio_smc.host.descriptors import Closer
from trio_smc.host.private_directory import is_admitted
from trio_smc.rnic.memory import Memory
from trio_smc.rnic.soft.messages import (
    Directory,
    Doorbell,
    Hello,
    Intake,
    decode_untrusted,
)
from trio_smc.rnic.soft.port import PortUser, Stalled
from trio_smc.rnic.soft.queue_pair import SoftQueuePair
from trio_smc.rnic.soft.regions import SoftProtectionDomain
from trio_smc.rnic.soft.ring import ReceiveRing
from trio_smc.rnic.verbs import (
    RECEIVE_SIZE,
    Completion,
    PlainCompletion,
    ProtectionDomain,
    QpState,
    Rnic,
    RnicError,
    RnicEvent,
    refusals,
)
from trio_smc.rnic.words import VARIANT, Variant, fence, why_unusable

__all__ = [
    "SoftRnic",
]


_GID_PREFIX: Final = bytes.fromhex("fd534d4352000000")
"""A unique local address (RFC 4193): fd, and the letters "SMCR"."""
_SEND_DEPTH: Final = 1024
"""Requests that can wait in a send queue.  Chosen: as many as a ring has slots."""
_PACKET_SEND_DEPTH: Final = 3 * _SEND_DEPTH
"""The same without rings.  Chosen, so that ring or socket and send queue together take as many
messages: a Unix socket has room for fewer than 300 (net.core.wmem_default)."""
_EVENTS_AT_ONCE: Final = 64
"""Events of one call of epoll_wait(2).  Chosen; no measurement is recorded."""
_MAX_ROUNDS: Final = 16
"""Calls of epoll_wait(2) in one `poll_sockets`; more events wait for the next one.  Chosen."""
_MAX_ACCEPTED: Final = 32
"""Connections accepted in one turn.  Chosen, to keep a turn under a millisecond; no measurement is
recorded."""
_MAX_BEFORE_HELLO: Final = 64
"""Accepted connections that have not sent a Hello yet.  Chosen; no measurement is recorded."""
_EDGES: Final = select.EPOLLIN | select.EPOLLET
_ALWAYS_POLLED: Final = 8
"""Up to this number of rings, all are always polled.  Chosen; docs/decisions.md, "which rings a
software RNIC polls", has the cost of idle rings with this value and that of `_IDLE_POLLS`."""
_MAX_DOORBELLS: Final = 4
"""Peers with a doorbell pipe.  Chosen, because each pipe takes two descriptors."""
_RETRY_INTERVAL: Final = 0.05
"""Seconds after which an action that failed for lack of resources is retried.  Chosen; no
measurement is recorded."""
_IDLE_POLLS: Final = 256
"""If there are more rings than `_ALWAYS_POLLED`, a ring without a message in this number of polls
enters interrupt mode.  Chosen."""
_IDLE_PACKET_POLLS: Final = 4
"""The same without rings, where each poll takes a system call per queue pair.  Chosen: with 256,
400 peers that end together held the loop up for 50 ms, and with 4 for 8 ms (`python -m
tests.e2e.mass_ends left 400` with TRIO_SMC_WORDS=socket, on a Xeon)."""


class Faults(Protocol):
    """A plan of faults (`faults.FaultPlan`)."""

    def attach(self, rnic: SoftRnic) -> None:
        """Bind the plan to this RNIC."""

    def queue_pair(self, rnic: SoftRnic, pd: SoftProtectionDomain, qp_num: int) -> SoftQueuePair:
        """Make a queue pair that is subject to the plan."""


class SoftRnic(Rnic):
    """A software RNIC port.

    Args:
      name: the name in statistics and logs.
      faults: a plan of faults, for tests.  An RNIC without one is not slower because of it.
    """

    __slots__ = (
        "_acceptor", "_alarm", "_completion_epoll", "_directory", "_doorbells", "_epoll",
        "_events", "_handlers", "_has_many_rings", "_kept_open", "_make_qp", "_next_actions",
        "_only_doorbell", "_open", "_pds", "_peer_events", "_polls", "_qps", "_retries", "_rings",
        "_rkeys", "_self_wake", "accepting_later", "disconnected", "done", "faults", "gid",
        "intake", "mac", "mtu", "name", "on_event", "port_active", "send_depth", "sends_packets",
        "stalled", "timed_waits",
    )  # fmt: skip

    kind: Literal["software", "roce"] = "software"
    copies_on_post = False
    variant: Variant = VARIANT
    """How processes order their accesses to shared memory: "native", "x86-64" or "socket"
    (`trio_smc.rnic.words`)."""

    def __init__(self, name: str = "soft0", *, faults: Faults | None = None) -> None:
        self.name = name
        self.faults = faults
        self.gid: bytes = bytes(16)
        self.mac: bytes = bytes(6)
        self.mtu = 5
        self.port_active: bool = False
        self.send_depth = _SEND_DEPTH if VARIANT != "socket" else _PACKET_SEND_DEPTH
        self.on_event: Callable[[RnicEvent], None] | None = None
        self.done: list[PlainCompletion] = []
        self.stalled: dict[Stalled, None] = {}
        self.disconnected: list[PortUser] = []
        self.timed_waits: int = 0
        self.accepting_later: bool = False
        self.sends_packets: bool = VARIANT == "socket"
        self._next_actions: dict[Callable[[], None], None] = {}
        self._retries: dict[Callable[[], None], None] = {}
        self._rings: tuple[ReceiveRing, ...] = ()  # polled: all that are not in interrupt mode
        self._has_many_rings = False
        self._polls = 0  # polls since the last check for idle rings, if there are many rings
        self._qps: dict[int, SoftQueuePair] = {}
        self._pds: set[SoftProtectionDomain] = set()
        self._rkeys: set[int] = set()
        self._handlers: dict[int, Callable[[int], object]] = {}
        # The sockets and doorbells of peers: the epoll events that are watched on each descriptor.
        self._peer_events: dict[int, int] = {}
        self._doorbells: dict[int, Callable[[], bool]] = {}  # by descriptor
        self._only_doorbell: Callable[[], bool] | None = None
        # Watches the descriptors of `_peer_events` in place of `_epoll`, once `completion_fd` has
        # been called.
        self._completion_epoll: select.epoll | None = None
        # Sockets of queue pairs that went to ERR while the port was down, or for a fault that the
        # peer is not to notice: an open socket shows the peer no end.
        self._kept_open: list[socket.socket] = []
        self._events: list[RnicEvent] = []
        self._open = False
        self._make_qp: Callable[[SoftRnic, SoftProtectionDomain, int], SoftQueuePair] = (
            SoftQueuePair
        )
        if faults is not None:
            faults.attach(self)
            self._make_qp = faults.queue_pair

    # -- the device ----------------------------------------------------------------------

    def open(self, directory: Path) -> None:
        if self._open:
            raise RnicError(errno.EBUSY, f"{self.name} is open")
        if not sys.platform.startswith("linux"):
            raise RnicError(errno.ENOTSUP, "the software RNIC needs Linux")
        if problem := why_unusable():
            raise RnicError(errno.ENOTSUP, problem)
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            raise RnicError(
                errno.ENOTSUP,
                "the software RNIC needs the GIL, and this Python runs without one",
            )
        self.gid = _GID_PREFIX + secrets.token_bytes(8)
        # Locally administered, unicast.
        self.mac = b"\x02" + secrets.token_bytes(5)
        self._directory = Directory(directory)
        with contextlib.ExitStack() as undo:
            undo.callback(self._directory.close)
            self._directory.remove_stale()
            self._epoll = select.epoll()
            undo.callback(self._epoll.close)
            self.intake = Intake(Closer(self.name))
            undo.callback(self.intake.end)
            self._acceptor = Acceptor(self, self._directory)
            undo.callback(self._acceptor.close)
            self._self_wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, self._self_wake)
            self._alarm = Alarm()
            undo.callback(self._alarm.close)
            self.watch(self._self_wake, select.EPOLLIN | select.EPOLLET, None)
            self.watch(self._alarm.fd, _EDGES, lambda _: self._retry())
            undo.pop_all()
        self.port_active = True
        self._open = True

    def close(self) -> None:
        if not self._open:
            return
        for qp in tuple(self._qps.values()):
            qp.close()
        for pd in tuple(self._pds):
            for region in pd.regions:
                region.close()
            pd.close()
        self._acceptor.close()
        self._close_kept_open()
        self._handlers.clear()
        self._events.clear()
        self.stalled.clear()
        self.timed_waits = 0
        self.accepting_later = False
        self._next_actions.clear()
        self._retries.clear()
        self.done.clear()
        self._directory.close()
        self._epoll.close()
        if self._completion_epoll is not None:
            self._completion_epoll.close()
            self._completion_epoll = None
        os.close(self._self_wake)
        self._alarm.close()
        self.intake.end()
        self.port_active = False
        self._open = False

    def abandon(self) -> None:
        # Close only descriptors: the epoll set and the name belong to the parent process.
        if self._open:
            self._open = False
            self._acceptor.abandon()
            for qp in self._qps.values():
                qp.abandon()
            for sock in self._kept_open:
                sock.close()
            self.intake.abandon()

    def alloc_memory(self, size: int) -> Memory:
        return Memory(size, progress=True)

    def alloc_pd(self) -> SoftProtectionDomain:
        self._check_open()
        with refusals():
            pd = SoftProtectionDomain(self, self._pds.discard)
        self._pds.add(pd)
        return pd

    def create_qp(self, pd: ProtectionDomain, receive_size: int = RECEIVE_SIZE) -> SoftQueuePair:
        self._check_open()
        if receive_size != RECEIVE_SIZE:
            raise RnicError(errno.EINVAL, f"a receive buffer has {RECEIVE_SIZE} bytes")
        if not isinstance(pd, SoftProtectionDomain) or pd not in self._pds:
            raise RnicError(errno.EINVAL, "the protection domain belongs to another RNIC")
        with refusals():
            self._acceptor.ensure_name()  # the peer will dial this name
        qp_num = 0
        while qp_num < 2 or qp_num in self._qps:
            qp_num = secrets.randbits(24)
        with refusals():
            qp = self._make_qp(self, pd, qp_num)
        self._qps[qp_num] = qp
        pd.add_queue_pair(qp)
        self._poll_ring(qp.ring)
        return qp

    # -- faults --------------------------------------------------------------------------

    def fail(self) -> None:
        """Take the port down without warning.

        From now on, posts of this port are flushed, and posts of peers to this port end with
        RETRY_EXC_ERR.  Unused queue pairs stay in RTS.  `service` reports PORT_DOWN.  Idempotent.
        """
        self._check_open()
        self._set_port(False)

    def restore(self) -> None:
        """Bring the port up again; queue pairs that are still in RTS continue.  Idempotent."""
        self._check_open()
        self._set_port(True)

    def _set_port(self, active: bool) -> None:
        if self.port_active == active:
            return
        # First accept the peers that dialled before the change: they must not notice it.
        self.poll_sockets()
        self.port_active = active
        self._events.append(RnicEvent.PORT_UP if active else RnicEvent.PORT_DOWN)
        for qp in tuple(self._qps.values()):
            qp.on_port_change()
        if active:
            self._close_kept_open()
        os.eventfd_write(self._self_wake, 1)

    def _close_kept_open(self) -> None:
        for sock in self._kept_open:
            self.intake.discard(sock)
        self._kept_open.clear()

    # -- completions ---------------------------------------------------------------------

    def poll(self) -> list[Completion]:
        return [Completion(*plain) for plain in self.poll_plain()]

    def poll_plain(self) -> list[PlainCompletion]:
        done = self.done
        taken: list[PlainCompletion] = []
        if done:
            taken += done
            done.clear()
        for ring in self._rings:
            if ring.head[0] != ring.tail and not ring.take_untrusted(taken.append):
                self._qps[ring.qp_num].on_invalid_ring()
        if self.stalled or self.disconnected or self._has_many_rings:
            self._catch_up()
        if done:
            taken += done
            done.clear()
        return taken

    def has_pending(self) -> bool:
        for ring in self._rings:
            if ring.head[0] != ring.tail:
                return True
        # `bool` would be looked up and called, in each probe of a spin.
        return True if self.done or self.stalled or self.disconnected else False  # noqa: SIM210

    def arm(self) -> bool:
        if self.done or self.disconnected or self.timed_waits:
            return False
        rings = self._rings
        for ring in rings:
            ring.armed[0] = 1
        fence()
        for ring in rings:
            if ring.head[0] != ring.tail:
                break
        else:
            if not self.disconnected:  # reading a socket in place of a ring may find its end
                return True
        self.disarm()
        return False

    def disarm(self) -> None:
        for ring in self._rings:
            ring.armed[0] = 0

    def wait_fd(self) -> int:
        self._check_open()
        return self._epoll.fileno()

    def completion_fd(self) -> int:
        self._check_open()
        if self._completion_epoll is None:
            with refusals():
                self._completion_epoll = select.epoll()
            for fd, events in self._peer_events.items():
                self._epoll.unregister(fd)
                self._completion_epoll.register(fd, events)
        return self._completion_epoll.fileno()

    def acknowledge(self) -> bool:
        if self._completion_epoll is None:
            return False
        doorbell = self._only_doorbell
        if doorbell is not None and doorbell():
            return True  # the usual case: the only doorbell has rung
        self._dispatch(self._completion_epoll.poll(0, _EVENTS_AT_ONCE))
        return True

    def service(self) -> None:
        self.poll_sockets()
        while self._events:
            event = self._events.pop(0)
            if self.on_event is not None:
                self.on_event(event)

    def _catch_up(self) -> None:
        self._polls += 1
        idle_polls = _IDLE_PACKET_POLLS if self.sends_packets else _IDLE_POLLS
        if self._has_many_rings and self._polls >= idle_polls:
            self._stop_polling_idle()
        for qp in tuple(self.stalled):
            qp.push()
        while self.disconnected:
            self.disconnected.pop().on_peer_end()

    def _stop_polling_idle(self) -> None:
        """Put the rings that had no message recently into interrupt mode."""
        self._polls = 0
        idle = [ring for ring in self._rings if ring.tail == ring.polled_tail]
        for ring in idle:
            ring.armed[0] = 1
        fence()
        for ring in idle:
            ring.interrupt_mode = ring.head[0] == ring.tail
        for ring in self._rings:
            ring.polled_tail = ring.tail
        self._set_rings(ring for ring in self._rings if not ring.interrupt_mode)

    def _poll_ring(self, ring: ReceiveRing) -> None:
        ring.interrupt_mode = False
        ring.polled_tail = ring.tail
        self._set_rings((*self._rings, ring))

    def _set_rings(self, rings: Iterable[ReceiveRing]) -> None:
        self._rings = tuple(rings)
        self._has_many_rings = len(self._rings) > _ALWAYS_POLLED

    # -- what queue pairs and protection domains call -------------------------------------

    def poll_sockets(self) -> None:
        """Call the actions of `call_at_service`, and handle the events of all sockets."""
        actions, self._next_actions = self._next_actions, {}
        for action in actions:
            action()
        for _ in range(_MAX_ROUNDS):
            events = self._epoll.poll(0, _EVENTS_AT_ONCE)
            if self._completion_epoll is not None:
                events += self._completion_epoll.poll(0, _EVENTS_AT_ONCE)
            self._dispatch(events)
            if len(events) < _EVENTS_AT_ONCE:
                break
        else:
            self._next_actions[_no_action] = None
        if self._next_actions:
            os.eventfd_write(self._self_wake, 1)  # last, because the polls above consume the event

    def call_at_service(self, action: Callable[[], None]) -> None:
        """Call ``action`` at the next `poll_sockets`, so that other work has its turn first."""
        self._next_actions[action] = None
        self.request_service()

    def request_service(self) -> None:
        """Make `wait_fd` readable, so that `service` is called soon."""
        os.eventfd_write(self._self_wake, 1)

    def retry_later(self, action: Callable[[], None]) -> None:
        """Call ``action`` after `_RETRY_INTERVAL`, because it failed for lack of resources."""
        if not self._retries:
            self._alarm.set(_RETRY_INTERVAL)
        self._retries[action] = None

    def _retry(self) -> None:
        self._alarm.acknowledge()
        retries, self._retries = self._retries, {}
        for action in retries:
            action()

    def _dispatch(self, events: list[tuple[int, int]]) -> None:
        for fd, mask in events:
            handler = self._handlers.get(fd)
            if handler is not None:
                handler(mask)

    def dial(self, gid: bytes) -> socket.socket:
        """Connect a socket to the RNIC with this GID.  Raises RnicError."""
        with refusals():
            return self._directory.dial(socket_name(gid))

    def watch(self, fd: int, events: int, handler: Callable[[int], None] | None) -> None:
        """Watch ``fd`` with `wait_fd`; `service` passes the epoll events to ``handler``."""
        self._epoll.register(fd, events)
        if handler is not None:
            self._handlers[fd] = handler

    def unwatch(self, fd: int) -> None:
        """Undo `watch`."""
        self._epoll.unregister(fd)
        self._handlers.pop(fd, None)

    def watch_peer(self, sock: socket.socket, handler: Callable[[int], None]) -> None:
        """Watch a peer's socket with `completion_fd`, or with `wait_fd` if that is not in use."""
        self._watch_peer(sock.fileno(), handler)

    def watch_readable(self, sock: socket.socket, *, wanted: bool) -> None:
        """Watch for packets in a peer's socket; ``wanted=False``: stop watching."""
        fd = sock.fileno()
        if fd in self._peer_events:
            self._watch_events(fd, select.EPOLLIN if wanted else 0)

    def add_doorbell(self, rung: Callable[[], bool]) -> Doorbell | None:
        """Make a doorbell for a queue pair's peer, watched like its socket.

        Args:
          rung: called when the descriptor is readable; True: the doorbell has been rung.

        Returns:
          None: the peer uses its socket, because there are `_MAX_DOORBELLS` already, or no
          descriptors.
        """
        if len(self._doorbells) >= _MAX_DOORBELLS:
            return None
        try:
            doorbell = Doorbell()
        except OSError:
            return None
        try:
            self._watch_peer(doorbell.fd, lambda _: rung())
        except OSError:
            doorbell.close()
            return None
        self._doorbells[doorbell.fd] = rung
        self._update_only_doorbell()
        return doorbell

    def remove_doorbell(self, doorbell: Doorbell) -> None:
        """Undo `add_doorbell`."""
        del self._doorbells[doorbell.fd]
        self._update_only_doorbell()
        self._unwatch_peer(doorbell.fd)
        doorbell.close()

    def _update_only_doorbell(self) -> None:
        self._only_doorbell = (
            next(iter(self._doorbells.values())) if len(self._doorbells) == 1 else None
        )

    def _watch_peer(self, fd: int, handler: Callable[[int], object]) -> None:
        if self._completion_epoll is not None:
            self._completion_epoll.register(fd, select.EPOLLIN)
        else:
            self._epoll.register(fd, _EDGES)
        self._peer_events[fd] = select.EPOLLIN
        self._handlers[fd] = handler

    def watch_writable(self, sock: socket.socket, *, wanted: bool) -> None:
        """Watch for room in a peer's socket; ``wanted=False``: stop watching.

        A socket is watched for room only while messages wait for it.  Otherwise this process would
        wake up whenever the peer reads a doorbell, because that makes room.
        """
        fd = sock.fileno()
        reading = self._peer_events[fd] & select.EPOLLIN
        self._watch_events(fd, reading | (select.EPOLLOUT if wanted else 0))

    def _watch_events(self, fd: int, events: int) -> None:
        self._peer_events[fd] = events
        if self._completion_epoll is not None:
            self._completion_epoll.modify(fd, events)
        else:
            self._epoll.modify(fd, events | select.EPOLLET)

    def resume_polling(self, ring: ReceiveRing) -> None:
        """End the interrupt mode of a ring, because its doorbell was rung."""
        ring.armed[0] = 0
        self._poll_ring(ring)

    def replace_ring(self, old: ReceiveRing, new: ReceiveRing) -> None:
        """Poll ``new`` instead of ``old``."""
        self._set_rings(ring for ring in self._rings if ring is not old)
        self._poll_ring(new)

    def queue_pairs(self) -> list[SoftQueuePair]:
        """All queue pairs, in the order of creation."""
        return list(self._qps.values())

    def queue_pair(self, qp_num: int) -> SoftQueuePair | None:
        """The queue pair with this number."""
        return self._qps.get(qp_num)

    def stop_polling(self, user: PortUser) -> None:
        """Stop polling a queue pair that went to ERR."""
        user.ring.interrupt_mode = False
        self._set_rings(ring for ring in self._rings if ring is not user.ring)
        self.stalled.pop(user, None)

    def close_peer_socket(self, sock: socket.socket | None, *, quietly: bool) -> None:
        """Close a watched socket; if the port is down, only when the port is up again.

        Args:
          quietly: do not close the socket yet, so that the peer does not notice.
        """
        if sock is None:
            return
        self._unwatch_peer(sock.fileno())
        if self.port_active and not quietly:
            self.intake.discard(sock)
            return
        for other in tuple(self._kept_open):
            if _peer_has_ended(other):
                self._kept_open.remove(other)
                self.intake.discard(other)
        self._kept_open.append(sock)

    def _unwatch_peer(self, fd: int) -> None:
        if self._peer_events.pop(fd, None) is None:
            return  # the socket was never watched, because there were too many epoll watches
        del self._handlers[fd]
        (self._completion_epoll or self._epoll).unregister(fd)

    def new_rkey(self) -> int:
        """Draw an RKey that no region of this RNIC has."""
        rkey = 0
        while rkey == 0 or rkey in self._rkeys:
            rkey = secrets.randbits(32)
        self._rkeys.add(rkey)
        return rkey

    def free_rkey(self, rkey: int) -> None:
        """Undo `new_rkey`."""
        self._rkeys.discard(rkey)

    def remove_queue_pair(self, user: PortUser) -> None:
        """Remove a destroyed queue pair."""
        del self._qps[user.qp_num]
        self.disconnected = [other for other in self.disconnected if other is not user]

    def _check_open(self) -> None:
        if not self._open:
            raise RnicError(errno.EBADF, f"{self.name} is not open")


def _peer_has_ended(sock: socket.socket) -> bool:
    poller = select.poll()
    poller.register(sock, 0)
    return bool(poller.poll(0))


def _no_action() -> None:
    """No-op, for `poll_sockets` to be called again without another action."""


def socket_name(gid: bytes) -> str:
    """The name of the socket on which the RNIC with this GID listens."""
    return f"rnic-{gid.hex()}"


class Acceptor:
    """Accepts connections, reads one Hello from each and passes it to its queue pair.

    A connection that sends nothing is kept until `_MAX_BEFORE_HELLO` others have come.  A peer that
    sends anything but a Hello, or that belongs to another user, is disconnected.
    """

    def __init__(self, rnic: SoftRnic, directory: Directory) -> None:
        self._rnic = rnic
        self._directory = directory
        self._name = socket_name(rnic.gid)
        self._before_hello: dict[int, socket.socket] = {}
        self._listener = directory.listen(self._name)
        rnic.watch(self._listener.fileno(), _EDGES, lambda _: self._accept())

    def close(self) -> None:
        """Remove the name and close all sockets."""
        for fd in tuple(self._before_hello):
            self._disconnect(fd)
        self._rnic.unwatch(self._listener.fileno())
        self._directory.remove(self._name)
        self._rnic.intake.closer.discard_listener(self._listener)

    def ensure_name(self) -> None:
        """Listen again if the socket's name was removed, for example by systemd-tmpfiles."""
        if self._listener.fileno() < 0 or self._directory.has(self._name):
            return
        self._directory.reopen()
        listener = self._directory.listen(self._name)
        try:
            self._rnic.watch(listener.fileno(), _EDGES, lambda _: self._accept())
        except OSError:
            listener.close()
            raise
        self._rnic.unwatch(self._listener.fileno())
        self._rnic.intake.closer.discard_listener(self._listener)
        self._listener = listener

    def abandon(self) -> None:
        """In a forked child: close this process's descriptors and nothing else."""
        for sock in (*self._before_hello.values(), self._listener):
            sock.close()

    def _accept(self) -> None:
        self._rnic.accepting_later = False
        intake = self._rnic.intake
        for _ in range(_MAX_ACCEPTED):
            if intake.closer.is_full:
                self._accept_later()
                return
            try:
                sock, _ = self._listener.accept()
            except ConnectionAbortedError:
                continue
            except OSError as problem:
                if not isinstance(problem, BlockingIOError) and is_lack(problem):
                    self._accept_later()
                return
            # A port that is down disconnects each new peer.
            group = self._directory.group
            if not self._rnic.port_active or not is_admitted(sock, group):
                intake.discard(sock)
                continue
            sock.setblocking(False)
            if len(self._before_hello) >= _MAX_BEFORE_HELLO:
                self._disconnect(next(iter(self._before_hello)))
            fd = sock.fileno()
            try:
                self._rnic.watch(fd, _EDGES, partial(self._read_hello, fd))
            except OSError:  # too many epoll watches: disconnect this peer
                intake.discard(sock)
                continue
            self._before_hello[fd] = sock
            self._read_hello(fd, 0)
        self._rnic.accepting_later = True
        self._rnic.call_at_service(self._accept)

    def _accept_later(self) -> None:
        """Leave connections in the backlog until there are resources."""
        self._rnic.accepting_later = True
        self._rnic.retry_later(self._accept)

    def _disconnect(self, fd: int) -> None:
        self._rnic.unwatch(fd)
        self._rnic.intake.discard(self._before_hello.pop(fd))

    def _read_hello(self, fd: int, _events: int) -> None:
        sock = self._before_hello.get(fd)
        if sock is None:
            return
        intake = self._rnic.intake
        try:
            packet = intake.receive(sock)
        except OSError:  # no descriptors or memory left: the Hello waits in the socket
            self._rnic.retry_later(self._read_all_hellos)
            return
        if packet is None:
            return
        data, fds = packet
        try:
            hello = decode_untrusted(data, len(fds))
            if not isinstance(hello, Hello):
                raise ProtocolError("the first message of a software RNIC is not Hello")
            qp = self._rnic.queue_pair(hello.peer_qp_num)
            if qp is None or qp.state is QpState.ERR:
                raise ProtocolError("no such queue pair")
        except ProtocolError:
            intake.close_fds(fds, sock)
            self._disconnect(fd)
            return
        self._rnic.unwatch(fd)
        del self._before_hello[fd]
        qp.on_hello(hello, sock, fds)

    def _read_all_hellos(self) -> None:
        for fd in tuple(self._before_hello):
            self._read_hello(fd, 0)
