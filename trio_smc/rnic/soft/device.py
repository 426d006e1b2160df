"""The software RNIC: RDMA between processes of one host, without privileges or hardware.

Memory regions are sealed memfds that peers map; an RDMA write is a copy into the mapping, checked
for RKey, bounds and validity by the writer.  A send is a slot in a ring of the receiver's queue
pair; a doorbell (a packet on the queue pair's socket, or for the first few peers a byte in a pipe,
which is quicker and takes two descriptors more) is rung only when the receiver is asleep.  So data
needs no system call at all while both sides are busy.

Idle peers cost those that are busy nothing.  Of many rings only those are looked at in which
something came lately; the others *doze*: they stay armed, so that the next message rings, and are
looked at again from then on.  No word is shared by several peers: who rings for nothing, or does
not ring, has its own ring looked at in vain, or late.

Here is the device, and its `Reception`, where peers come in.  Its parts are `ring` (sends),
`regions` (memory), `queue_pair`, and `messages` and `contact` (how RNICs find and tell each
other); `port` is the device as they see it, and `faults` lets things go wrong on purpose.

Several can be open in one process, also under one name, and a process may connect to itself.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
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
from trio_smc.host.descriptors import Closer
from trio_smc.host.private_directory import is_admitted
from trio_smc.rnic.memory import Memory
from trio_smc.rnic.soft.alarm import Alarm
from trio_smc.rnic.soft.messages import (
    Bell,
    Directory,
    Hello,
    Intake,
    decode_untrusted,
)
from trio_smc.rnic.soft.port import PortUser, Pushed
from trio_smc.rnic.soft.queue_pair import SoftQueuePair
from trio_smc.rnic.soft.regions import SoftProtectionDomain
from trio_smc.rnic.soft.ring import ReceiveRing, fence
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

__all__ = [
    "SoftRnic",
]


_GID_PREFIX: Final = bytes.fromhex("fd534d4352000000")
_MACHINES: Final = ("x86_64", "AMD64")
_SEND_DEPTH: Final = 1024
_EVENTS_AT_ONCE: Final = 64
_MOST_ROUNDS: Final = 16
_MOST_ACCEPTED: Final = 32
"""Strangers that are let in at a time: less than a millisecond."""
_MOST_STRANGERS: Final = 64
_EDGES: Final = select.EPOLLIN | select.EPOLLET
_FEW: Final = 8
"""Rings that are always looked at."""
_MOST_BELLS: Final = 4
_RETRY_INTERVAL: Final = 0.05
"""Seconds after which what lacked resources is tried again."""
_DOZE_AFTER: Final = 256
"""Looks of which none found anything: then a ring may doze, where there are more than a few."""


class Faults(Protocol):
    """What goes wrong (`faults.FaultPlan`)."""

    def attach(self, rnic: SoftRnic) -> None:
        """Whose plan this is."""

    def queue_pair(self, rnic: SoftRnic, pd: SoftProtectionDomain, qp_num: int) -> SoftQueuePair:
        """A new queue pair that is subject to it."""


class SoftRnic(Rnic):
    """A software RNIC port.

    Args:
      name: what it is called in statistics and logs.
      faults: what goes wrong on it, for tests; it costs time only where it is given.
    """

    __slots__ = (
        "_again", "_alarm", "_bells", "_directory", "_epoll", "_events", "_handlers", "_limbo",
        "_looks", "_many", "_new_qp", "_only_bell", "_open", "_pds", "_peers", "_qps",
        "_reception", "_retries", "_rings", "_rkeys", "_rung", "_self_wake", "crowded", "done",
        "faults", "gid", "gone", "intake", "mac", "mtu", "name", "on_event", "port_active",
        "restless", "send_depth", "stalled",
    )  # fmt: skip

    kind: Literal["software", "roce"] = "software"
    copies_on_post = False

    def __init__(self, name: str = "soft0", *, faults: Faults | None = None) -> None:
        self.name = name
        self.faults = faults
        self.gid: bytes = bytes(16)
        self.mac: bytes = bytes(6)
        self.mtu = 5
        self.port_active: bool = False
        self.send_depth = _SEND_DEPTH
        self.on_event: Callable[[RnicEvent], None] | None = None
        self.done: list[PlainCompletion] = []
        self.stalled: dict[Pushed, None] = {}
        self.gone: list[PortUser] = []
        # How many of `stalled` wait for a moment and not for the peer: nobody sleeps meanwhile.
        self.restless: int = 0
        self.crowded: bool = False
        self._again: dict[Callable[[], None], None] = {}
        self._retries: dict[Callable[[], None], None] = {}
        self._rings: tuple[ReceiveRing, ...] = ()  # those that do not doze
        self._many = False  # of them
        self._looks = 0  # while they were many, since they were last asked how busy they are
        self._qps: dict[int, SoftQueuePair] = {}
        self._pds: set[SoftProtectionDomain] = set()
        self._rkeys: set[int] = set()
        self._handlers: dict[int, Callable[[int], object]] = {}
        self._peers: dict[int, int] = {}  # sockets to queue pairs' peers, and what to tell of them
        self._bells: dict[int, Callable[[], bool]] = {}  # by descriptors, which `_peers` has, too
        self._only_bell: Callable[[], bool] | None = None
        self._rung: select.epoll | None = None  # tells of them where `wait_fd` does not
        # Sockets of queue pairs that ended while the port was down, or quietly: nobody may notice
        # yet.
        self._limbo: list[socket.socket] = []
        self._events: list[RnicEvent] = []
        self._open = False
        self._new_qp: Callable[[SoftRnic, SoftProtectionDomain, int], SoftQueuePair] = SoftQueuePair
        if faults is not None:
            faults.attach(self)
            self._new_qp = faults.queue_pair

    # -- the device ----------------------------------------------------------------------

    def open(self, directory: Path) -> None:
        if self._open:
            raise RnicError(errno.EBUSY, f"{self.name} is open")
        if not sys.platform.startswith("linux") or platform.machine() not in _MACHINES:
            raise RnicError(
                errno.ENOTSUP,
                "the software RNIC needs Linux on x86-64: it relies on that memory model",
            )
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            raise RnicError(
                errno.ENOTSUP,
                "the software RNIC needs the GIL, which a free-threaded Python runs without",
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
            self._reception = Reception(self, self._directory)
            undo.callback(self._reception.close)
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
        self._reception.close()
        self._end_limbo()
        self._handlers.clear()
        self._events.clear()
        self.stalled.clear()
        self.restless = 0
        self.crowded = False
        self._again.clear()
        self._retries.clear()
        self.done.clear()
        self._directory.close()
        self._epoll.close()
        if self._rung is not None:
            self._rung.close()
            self._rung = None
        os.close(self._self_wake)
        self._alarm.close()
        self.intake.end()
        self.port_active = False
        self._open = False

    def abandon(self) -> None:
        # Only descriptors are closed: a changed epoll set or a removed name would be the parent's.
        if self._open:
            self._open = False
            self._reception.abandon()
            for qp in self._qps.values():
                qp.abandon()
            for sock in self._limbo:
                sock.close()
            self.intake.abandon()

    def alloc_memory(self, size: int) -> Memory:
        return Memory(size)

    def alloc_pd(self) -> SoftProtectionDomain:
        self._check_open()
        with refusals():
            pd = SoftProtectionDomain(self, self._pds.discard)
        self._pds.add(pd)
        return pd

    def create_qp(self, pd: ProtectionDomain, receive_size: int = RECEIVE_SIZE) -> SoftQueuePair:
        self._check_open()
        if receive_size != RECEIVE_SIZE:
            raise RnicError(errno.EINVAL, f"receives have {RECEIVE_SIZE} bytes")
        if not isinstance(pd, SoftProtectionDomain) or pd not in self._pds:
            raise RnicError(errno.EINVAL, "a protection domain of another RNIC")
        with refusals():
            self._reception.keep_name()  # before anybody is told to come here
        qp_num = 0
        while qp_num < 2 or qp_num in self._qps:
            qp_num = secrets.randbits(24)
        with refusals():
            qp = self._new_qp(self, pd, qp_num)
        self._qps[qp_num] = qp
        pd.admit(qp)
        self._look_at(qp.ring)
        return qp

    # -- faults --------------------------------------------------------------------------

    def fail(self) -> None:
        """The port goes down without warning.

        Our own posts are flushed from now on, peers' posts to us end with RETRY_EXC_ERR, queue
        pairs that nobody uses stay in RTS, and `service` reports PORT_DOWN.  Idempotent.
        """
        self._check_open()
        self._set_port(False)

    def restore(self) -> None:
        """The port comes up again; queue pairs that are still in RTS go on.  Idempotent."""
        self._check_open()
        self._set_port(True)

    def _set_port(self, active: bool) -> None:
        if self.port_active == active:
            return
        # Who had reached us before is connected, and must not notice.
        self.look()
        self.port_active = active
        self._events.append(RnicEvent.PORT_UP if active else RnicEvent.PORT_DOWN)
        for qp in tuple(self._qps.values()):
            qp.port_changed()
        if active:
            self._end_limbo()
        os.eventfd_write(self._self_wake, 1)

    def _end_limbo(self) -> None:
        for sock in self._limbo:
            self.intake.discard(sock)
        self._limbo.clear()

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
                self._qps[ring.qp_num].broken()
        if self.stalled or self.gone or self._many:
            self._catch_up()
        if done:
            taken += done
            done.clear()
        return taken

    def has_pending(self) -> bool:
        for ring in self._rings:
            if ring.head[0] != ring.tail:
                return True
        return bool(self.done or self.stalled or self.gone)

    def arm(self) -> bool:
        if self.done or self.gone or self.restless:
            return False
        rings = self._rings
        for ring in rings:
            ring.armed[0] = 1
        fence()
        for ring in rings:
            if ring.head[0] != ring.tail:
                break
        else:
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
        if self._rung is None:
            with refusals():
                self._rung = select.epoll()
            for fd, events in self._peers.items():
                self._epoll.unregister(fd)
                self._rung.register(fd, events)
        return self._rung.fileno()

    def acknowledge(self) -> bool:
        if self._rung is None:
            return False
        rung = self._only_bell
        if rung is not None and rung():
            return True  # where there is but one, mostly it was that
        self._hand_out(self._rung.poll(0, _EVENTS_AT_ONCE))
        return True

    def service(self) -> None:
        self.look()
        while self._events:
            event = self._events.pop(0)
            if self.on_event is not None:
                self.on_event(event)

    def _catch_up(self) -> None:
        self._looks += 1
        if self._many and self._looks >= _DOZE_AFTER:
            self._let_doze()
        for qp in tuple(self.stalled):
            qp.push()
        while self.gone:
            self.gone.pop().peer_gone()

    def _let_doze(self) -> None:
        """Look no more at the rings in which nothing has come lately."""
        self._looks = 0
        idle = [ring for ring in self._rings if ring.tail == ring.looked]
        for ring in idle:
            ring.armed[0] = 1
        fence()
        for ring in idle:
            ring.dozes = ring.head[0] == ring.tail
        for ring in self._rings:
            ring.looked = ring.tail
        self._set_rings(ring for ring in self._rings if not ring.dozes)

    def _look_at(self, ring: ReceiveRing) -> None:
        ring.dozes = False
        ring.looked = ring.tail
        self._set_rings((*self._rings, ring))

    def _set_rings(self, rings: Iterable[ReceiveRing]) -> None:
        self._rings = tuple(rings)
        self._many = len(self._rings) > _FEW

    # -- what queue pairs and protection domains call -------------------------------------

    def look(self) -> None:
        """Handle what the sockets have, without waiting; each has its turn once at most."""
        again, self._again = self._again, {}
        for action in again:
            action()
        for _ in range(_MOST_ROUNDS):
            events = self._epoll.poll(0, _EVENTS_AT_ONCE)
            if self._rung is not None:
                events += self._rung.poll(0, _EVENTS_AT_ONCE)
            self._hand_out(events)
            if len(events) < _EVENTS_AT_ONCE:
                break
        else:
            self._again[_nothing] = None
        if self._again:
            os.eventfd_write(self._self_wake, 1)  # after the last poll, which would have taken it

    def look_again(self, action: Callable[[], None]) -> None:
        """Call ``action`` at the next look, which comes soon: it has had its turn for now."""
        self._again[action] = None
        self.look_soon()

    def look_soon(self) -> None:
        """Have `wait_fd` tell that there is something to look at."""
        os.eventfd_write(self._self_wake, 1)

    def retry_later(self, action: Callable[[], None]) -> None:
        """Call ``action`` at a look `_RETRY_INTERVAL` from now: something lacked resources."""
        if not self._retries:
            self._alarm.set(_RETRY_INTERVAL)
        self._retries[action] = None

    def _retry(self) -> None:
        self._alarm.acknowledge()
        retries, self._retries = self._retries, {}
        for action in retries:
            action()

    def _hand_out(self, events: list[tuple[int, int]]) -> None:
        for fd, mask in events:
            handler = self._handlers.get(fd)
            if handler is not None:
                handler(mask)

    def dial(self, gid: bytes) -> socket.socket:
        """A socket to the RNIC of that GID.  Raises RnicError."""
        with refusals():
            return self._directory.dial(socket_name(gid))

    def watch(self, fd: int, events: int, handler: Callable[[int], None] | None) -> None:
        """Let `wait_fd` report ``fd``; `service` calls ``handler`` with the epoll events."""
        self._epoll.register(fd, events)
        if handler is not None:
            self._handlers[fd] = handler

    def unwatch(self, fd: int) -> None:
        """Undo `watch`."""
        self._epoll.unregister(fd)
        self._handlers.pop(fd, None)

    def watch_peer(self, sock: socket.socket, handler: Callable[[int], None]) -> None:
        """Let `completion_fd` report what a queue pair's peer says, and its rings, where that is
        wanted, else `wait_fd`."""
        self._watch_peer(sock.fileno(), handler)

    def watch_reader(self, sock: socket.socket, *, wanted: bool) -> None:
        """Report from now on that such a socket can be read, or do not."""
        fd = sock.fileno()
        if fd in self._peers:
            self._watch_events(fd, select.EPOLLIN if wanted else 0)

    def hang_bell(self, rung: Callable[[], bool]) -> Bell | None:
        """A bell for a queue pair's peer, reported as its socket is; None: it has to do with that.

        Of many peers, which take descriptors, only the first have one.
        """
        if len(self._bells) >= _MOST_BELLS:
            return None
        try:
            bell = Bell()
        except OSError:
            return None
        try:
            self._watch_peer(bell.fd, lambda _: rung())
        except OSError:
            bell.close()
            return None
        self._bells[bell.fd] = rung
        self._find_only_bell()
        return bell

    def take_down(self, bell: Bell) -> None:
        """Undo `hang_bell`."""
        del self._bells[bell.fd]
        self._find_only_bell()
        self._unwatch_peer(bell.fd)
        bell.close()

    def _find_only_bell(self) -> None:
        self._only_bell = next(iter(self._bells.values())) if len(self._bells) == 1 else None

    def _watch_peer(self, fd: int, handler: Callable[[int], object]) -> None:
        if self._rung is not None:
            self._rung.register(fd, select.EPOLLIN)
        else:
            self._epoll.register(fd, _EDGES)
        self._peers[fd] = select.EPOLLIN
        self._handlers[fd] = handler

    def watch_room(self, sock: socket.socket, *, wanted: bool) -> None:
        """Whether to report also that such a socket takes something again.

        Else nobody may be woken for that: there is room again for each ring that the peer took.
        """
        fd = sock.fileno()
        reading = self._peers[fd] & select.EPOLLIN
        self._watch_events(fd, reading | (select.EPOLLOUT if wanted else 0))

    def _watch_events(self, fd: int, events: int) -> None:
        self._peers[fd] = events
        if self._rung is not None:
            self._rung.modify(fd, events)
        else:
            self._epoll.modify(fd, events | select.EPOLLET)

    def rouse(self, ring: ReceiveRing) -> None:
        """Look again at this ring, which dozes: its doorbell was rung."""
        ring.armed[0] = 0
        self._look_at(ring)

    def queue_pairs(self) -> list[SoftQueuePair]:
        """Those there are, in the order of their making."""
        return list(self._qps.values())

    def queue_pair(self, qp_num: int) -> SoftQueuePair | None:
        """The queue pair of that number."""
        return self._qps.get(qp_num)

    def retire(self, user: PortUser) -> None:
        """A queue pair went to ERR: it needs no polling any more."""
        user.ring.dozes = False
        self._set_rings(ring for ring in self._rings if ring is not user.ring)
        self.stalled.pop(user, None)

    def hang_up(self, sock: socket.socket | None, *, quietly: bool) -> None:
        """Close a watched socket, or keep it where the other side may not notice yet: the port is
        down, or it goes ``quietly``."""
        if sock is None:
            return
        self._unwatch_peer(sock.fileno())
        if self.port_active and not quietly:
            self.intake.discard(sock)
            return
        for other in tuple(self._limbo):
            if _peer_has_ended(other):
                self._limbo.remove(other)
                self.intake.discard(other)
        self._limbo.append(sock)

    def _unwatch_peer(self, fd: int) -> None:
        if self._peers.pop(fd, None) is None:
            return  # there were too many watches for it
        del self._handlers[fd]
        (self._rung or self._epoll).unregister(fd)

    def new_rkey(self) -> int:
        """An RKey that no region of this RNIC has."""
        rkey = 0
        while rkey == 0 or rkey in self._rkeys:
            rkey = secrets.randbits(32)
        self._rkeys.add(rkey)
        return rkey

    def free_rkey(self, rkey: int) -> None:
        """Undo `new_rkey`."""
        self._rkeys.discard(rkey)

    def forget(self, user: PortUser) -> None:
        """A queue pair was destroyed."""
        del self._qps[user.qp_num]
        self.gone = [other for other in self.gone if other is not user]

    def _check_open(self) -> None:
        if not self._open:
            raise RnicError(errno.EBADF, f"{self.name} is not open")


def _peer_has_ended(sock: socket.socket) -> bool:
    looker = select.poll()
    looker.register(sock, 0)
    return bool(looker.poll(0))


def _nothing() -> None:
    """All that has to be done is to look."""


def socket_name(gid: bytes) -> str:
    """The name under which the RNIC of this GID listens."""
    return f"rnic-{gid.hex()}"


class Reception:
    """Accepts, reads one Hello of each and hands it to the queue pair it is for.

    Who says nothing is kept until `_MOST_STRANGERS` others have come; who says anything else, or
    belongs to another user, is shown the door.
    """

    def __init__(self, rnic: SoftRnic, directory: Directory) -> None:
        self._rnic = rnic
        self._directory = directory
        self._name = socket_name(rnic.gid)
        self._strangers: dict[int, socket.socket] = {}
        self._listener = directory.listen(self._name)
        rnic.watch(self._listener.fileno(), _EDGES, lambda _: self._accept())

    def close(self) -> None:
        """Remove the name, close everything."""
        for fd in tuple(self._strangers):
            self._show_out(fd)
        self._rnic.unwatch(self._listener.fileno())
        self._directory.remove(self._name)
        self._rnic.intake.closer.discard_listener(self._listener)

    def keep_name(self) -> None:
        """Listen anew when somebody has removed the socket's name, as cleaners of /tmp do."""
        if self._listener.fileno() < 0 or self._directory.has(self._name):
            return
        self._directory.renew()
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
        for sock in (*self._strangers.values(), self._listener):
            sock.close()

    def _accept(self) -> None:
        self._rnic.crowded = False
        intake = self._rnic.intake
        for _ in range(_MOST_ACCEPTED):
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
            # A port that is down hears nobody.
            group = self._directory.group
            if not self._rnic.port_active or not is_admitted(sock, group):
                intake.discard(sock)
                continue
            sock.setblocking(False)
            if len(self._strangers) >= _MOST_STRANGERS:
                self._show_out(next(iter(self._strangers)))
            fd = sock.fileno()
            try:
                self._rnic.watch(fd, _EDGES, partial(self._greet, fd))
            except OSError:  # there are too many epoll watches: this one is refused
                intake.discard(sock)
                continue
            self._strangers[fd] = sock
            self._greet(fd, 0)
        self._rnic.crowded = True
        self._rnic.look_again(self._accept)

    def _accept_later(self) -> None:
        """They wait in the backlog for resources to be had."""
        self._rnic.crowded = True
        self._rnic.retry_later(self._accept)

    def _show_out(self, fd: int) -> None:
        self._rnic.unwatch(fd)
        self._rnic.intake.discard(self._strangers.pop(fd))

    def _greet(self, fd: int, _events: int) -> None:
        sock = self._strangers.get(fd)
        if sock is None:
            return
        intake = self._rnic.intake
        try:
            packet = intake.receive(sock)
        except OSError:  # no descriptors: its Hello waits in the socket
            self._rnic.retry_later(self._greet_all)
            return
        if packet is None:
            return
        data, fds = packet
        try:
            hello = decode_untrusted(data, len(fds))
            if not isinstance(hello, Hello):
                raise ProtocolError("a software RNIC that does not say Hello")
            qp = self._rnic.queue_pair(hello.peer_qp_num)
            if qp is None or qp.state is QpState.ERR:
                raise ProtocolError("no such queue pair")
        except ProtocolError:
            intake.close(fds, sock)
            self._show_out(fd)
            return
        self._rnic.unwatch(fd)
        del self._strangers[fd]
        qp.offer(hello, sock, fds)

    def _greet_all(self) -> None:
        for fd in tuple(self._strangers):
            self._greet(fd, 0)
