"""One SMC-R link: a reliably connected queue pair, its states and its messages.

Theory of operation
-------------------
A link posts three kinds of work: RDMA writes and CDC messages of connections, and LLC messages of
its group. All go through one queue pair in order, so a completed CDC message shows that every write
before it is in the peer's memory. Only sends are signaled: a completion frees its own work request
and all earlier ones. A post that a queue pair performs at once (`try_post`) has no completion. Such
a post is not possible while a completion is awaited, since completions come in order, nor while a
connection waits for room, because only a completion makes room.

The send queue is bounded. `capacity` keeps a reserve for LLC messages, so that a link full of data
can still be tested and deleted. Connections that find no room are called back one after the other.
If a peer requests replies faster than it receives them, they use up the reserve and the link fails.

Receives are posted in bulk and replenished in quarters of the queue.

Link implements `trio_smc.datapath.messenger.Channel` and is the model of `states.link`.

If a failover validation message shows that another message is missing (RFC 7609, 4.6.1), the
validation message has to wait, and so do all later messages of its link. For that time the mover of
connections (`Mover`) gives the link a `Backlog`.

Before a queue pair is connected, its RNIC must know the peer's address (`AddressWait`). A peer may
name any address, and connecting to an address that no host answers would block the whole process
(`Rnic.address_known`). So the link first waits a short time, by a timer, and then connects in any
case: the RNIC refuses at once if it still does not know the address.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import struct
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from trio_smc._base.errors import ProtocolError
from trio_smc.datapath.messenger import Poster
from trio_smc.rnic.verbs import (
    RECEIVE_SIZE,
    PlainCompletion,
    ProtectionDomain,
    QueuePair,
    Rnic,
    RnicError,
    WcOpcode,
    WcStatus,
)
from trio_smc.rnic.words import Words
from trio_smc.states.engine import Machine
from trio_smc.states.tables import LINK
from trio_smc.wire import llc
from trio_smc.wire.cdc import CDC_TYPE, HEADER, LAYOUT, MessageMissing, unpack_untrusted

if TYPE_CHECKING:
    from trio_smc._base.journal import Journal
    from trio_smc._base.observer import Observer
    from trio_smc._base.timers import Timer, Timers
    from trio_smc.config.config import Config
    from trio_smc.rendezvous.terms import Terms
    from trio_smc.wire.cdc import CdcItems

__all__ = [
    "PATIENCE",
    "AddressWait",
    "Backlog",
    "Link",
    "LinkConnection",
    "LinkHost",
    "LinkOwner",
    "Mover",
    "PeerPort",
    "PeerQueuePair",
]


PATIENCE: Final = 1.0
"""Seconds to wait for an address: the kernel sends its next query to the network after one second
(retrans_time_ms in arp(7))."""
_FIRST_PAUSE: Final = 0.002
"""Seconds until the second check; each pause is twice as long as the previous one. Chosen; no
measurement is recorded."""
_LAST_PAUSE: Final = 0.064
"""Seconds between two checks at most. Chosen; no measurement is recorded."""


_TCP_END_PATIENCE: Final = 1.0
"""Seconds that the kernel has to close the sockets of a process that has ended. Chosen: it takes
milliseconds, unless another process holds the same socket."""
_TURN: Final = 0.001
"""Seconds of processor time after which the rest is left to the scheduler's next pass. Chosen."""


class AddressWait:
    """Waits for the address of a peer; a new wait replaces the previous one."""

    __slots__ = ("_timer", "_timers")

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._timer: Timer | None = None

    def begin(self, rnic: Rnic, gid: bytes, then: Callable[[], None]) -> bool:
        """Call ``then`` once: when ``rnic`` knows the address of this GID, or after `PATIENCE`.

        Returns:
          True if ``then`` was called, the usual case. False if a timer will call ``then``, which
            must check its conditions again.
        """
        self.cancel()
        if rnic.address_known(gid):
            then()
            return True
        give_up = self._timers.now() + PATIENCE
        pause = _FIRST_PAUSE

        def check() -> None:
            nonlocal pause
            self._timer = None
            now = self._timers.now()
            if now >= give_up or rnic.address_known(gid):
                then()
                return
            pause = min(2 * pause, _LAST_PAUSE)
            self._timer = self._timers.call_at(min(now + pause, give_up), check)

        self._timer = self._timers.call_later(pause, check)
        return False

    def cancel(self) -> None:
        """End the wait.  Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class TcpEndWait:
    """Waits until the TCP connections of a process that has ended show their ends.

    The kernel closes the descriptors of such a process one after the other, so the socket of the
    queue pair may end first.
    """

    __slots__ = ("_timer", "_timers")

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._timer: Timer | None = None

    def begin(self, connections: Iterable[LinkConnection], then: Callable[[], None]) -> None:
        """Call ``then`` once: when all connections have ended, or after `_TCP_END_PATIENCE`."""
        left = list(connections)
        give_up = self._timers.now() + _TCP_END_PATIENCE
        pause = _FIRST_PAUSE

        def check() -> None:
            nonlocal pause
            self._timer = None
            turn_end = self._timers.work_clock() + _TURN
            while left and left[-1].tcp_has_ended:
                left.pop()
                if self._timers.work_clock() >= turn_end:
                    self._timer = self._timers.call_later(0.0, check)
                    return
            if not left or self._timers.now() >= give_up:
                then()
                return
            self._timer = self._timers.call_later(pause, check)
            pause = min(2 * pause, _LAST_PAUSE)

        check()

    def cancel(self) -> None:
        """End the wait.  Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


LOGGER = logging.getLogger("trio_smc.link")

_RECV: Final = int(WcOpcode.RECV)
_LLC_RESERVE: Final = 32
"""Work requests that are kept for LLC messages. Chosen; no measurement is recorded."""
_unpack_cdc: Final = LAYOUT.unpack
_UNBOUNDED: Final = 1 << 62
_MOST_PER_POST: Final = 3  # a wrapping write takes two requests, its CDC message a third
_LEAST_FREE: Final = _LLC_RESERVE + _MOST_PER_POST
_CHECKS: Final = 4
"""Checks in each test interval whether a message has arrived. Chosen: the test of a silent link is
late by a quarter of the interval at most."""


class PeerPort(NamedTuple):
    """An RNIC port of the peer."""

    gid: bytes
    mac: bytes


class PeerQueuePair:
    """The peer's end of a link, as SMC Accept, SMC Confirm or ADD LINK names it."""

    __slots__ = ("gid", "mac", "mtu", "psn", "qp_number")

    def __init__(self, *, gid: bytes, mac: bytes, qp_number: int, mtu: int, psn: int) -> None:
        self.gid: bytes = gid
        self.mac: bytes = mac
        self.qp_number: int = qp_number
        self.mtu: int = mtu
        self.psn: int = psn

    @property
    def port(self) -> PeerPort:
        """The peer's RNIC port."""
        return PeerPort(self.gid, self.mac)


class LinkConnection(Poster, Protocol):
    """A connection, as seen by its link."""

    def on_cdc_untrusted(self, message: CdcItems) -> None:
        """A CDC message for this connection arrived.  Raises MessageMissing, ProtocolError."""

    def protocol_error(self, exc: ProtocolError) -> None:
        """Abort: the peer violated the protocol."""

    @property
    def tcp_has_ended(self) -> bool:
        """True if the TCP connection has ended at the peer, or at this side.

        False in the handshake: its messages are read first, and then the end.
        """


class LinkHost(Protocol):
    """The stack, as seen by a link."""

    observer: Observer | None
    journal: Journal

    def register(self, rnic: Rnic, qp: QueuePair, link: Link) -> None:
        """Pass the completions of a queue pair to ``link.on_completion`` from now on."""

    def unregister(self, rnic: Rnic, qp: QueuePair) -> None:
        """Undo `register`."""

    def count_unknown_token(self) -> None:
        """Count a CDC message that named no connection and was dropped."""


class Backlog(Protocol):
    """The messages received after a failover validation message that waits (4.6.1)."""

    def append(self, message: bytes) -> None:
        """Add one message."""


class Mover(Protocol):
    """Moves the connections of one link group between its links (RFC 7609, 2.3, 4.6).

    `Link.users` has the connections of each link; `GroupConnections.move` changes it.
    """

    def link_lost(self, link: Link) -> None:
        """The link is failing: move its connections now.

        Called before the queue pair is closed. Without another usable link this does nothing, and
        the group ends its connections.
        """

    def link_leaving(self, link: Link, done: Callable[[], None]) -> None:
        """The link will be deleted: move its connections while it still works.

        ``done()`` is called when the connections have nothing in flight on the link, perhaps before
        this call returns.
        """

    def link_ready(self, link: Link) -> None:
        """A link became ACTIVE: connections may be distributed again."""

    def link_stays(self, link: Link) -> None:
        """The link is not deleted after all: `link_leaving`'s ``done`` is not called."""

    def catch_up(self) -> None:
        """Process all messages that have arrived on all links: for the peer they are delivered."""

    def close(self) -> None:
        """The group is gone."""

    def message_missing(self, link: Link, message: bytes) -> None:
        """A failover validation message shows that a message is missing (4.6.1).

        Another link may have received the missing message. If not, ``message`` waits in
        `Link.backlog`.
        """

    def link_ends(self, link: Link) -> None:
        """Process everything that the link has received; its queue pair is closed next."""


class LinkOwner(Protocol):
    """The group, as seen by its links. The module of the group imports this one."""

    client: bool
    peer_id: bytes
    config: Config
    timers: Timers
    terms: Terms

    @property
    def host(self) -> LinkHost:
        """The stack."""

    @property
    def mover(self) -> Mover:
        """Moves connections between the links of the group."""

    @property
    def connections(self) -> Mapping[int, LinkConnection]:
        """The connections of the group, by alert token."""

    @property
    def test_interval(self) -> float:
        """Seconds after which an idle link is tested."""

    def on_llc_untrusted(self, link: Link, data: bytes) -> None:
        """Process an LLC message."""

    def link_failing(self, link: Link) -> None:
        """Move the link's connections now: its queue pair is closed next."""

    def link_down(self, link: Link) -> None:
        """The link has failed; its connections have moved if another link was usable."""


class Link:
    """One link of a link group.

    Attributes:
      number: assigned by the server, unique within the group (RFC 7609, 3.5.1.5).
      user_id, peer_user_id: 4-byte link user IDs, for display only.
      peer: the peer's queue pair, once known.
      users: the connections that send on this link.
      empty_since: the time when the last of `users` left.
      reason: the reason of a failure, for the peer (A.3.4).
      needs_test: True if the peer must answer a test before more connections use the link.
      failing: True if the link is failing or has failed, even before its state is DOWN.
      has_received: True if a message has arrived since the idle timer was last started.
      backlog: receives the messages while a failover validation message waits; usually None.
    """

    __slots__ = (
        "_qp_failed", "_connection_of", "_deliver", "_echo", "_free", "_host", "_pending",
        "_post_send", "_post_write", "_idle_checks", "_received", "_replenish", "_since_signal",
        "_tcp_ends", "_test_data", "_timer", "_waiting", "_wr_id", "backlog", "copies_on_post",
        "needs_test", "empty_since", "failing", "group", "has_received", "machine", "number", "pd",
        "peer", "peer_user_id", "psn", "qp", "reason", "rnic", "user_id", "users",
    )  # fmt: skip

    def __init__(self, group: LinkOwner, number: int, rnic: Rnic) -> None:
        """Make the queue pair and take it to INIT.  Raises RnicError."""
        self.group: LinkOwner = group
        self.number: int = number
        self.rnic: Rnic = rnic
        self.pd: ProtectionDomain = rnic.alloc_pd()
        try:
            self.qp: QueuePair = rnic.create_qp(
                self.pd, max(RECEIVE_SIZE, group.terms.framing.largest)
            )
            try:
                self.qp.to_init()
            except BaseException:
                self.qp.close()
                raise
        except BaseException:
            self.pd.close()
            raise
        self.psn: int = secrets.randbits(24)
        self.user_id: int = secrets.randbits(32)
        self.peer_user_id: int = 0
        self.peer: PeerQueuePair | None = None
        self.has_received: bool = False
        self._idle_checks = 0
        self.needs_test: bool = False
        self.failing: bool = False
        self._qp_failed = False  # the queue pair has failed; `Timers.in_turn` will fail the link
        self.reason: llc.DeleteLinkReason = llc.DeleteLinkReason.LOST_PATH
        self.users: dict[LinkConnection, None] = {}
        self.empty_since: float = group.timers.now()
        self.machine: Machine = Machine(LINK, self)
        self._timer: Timer | None = None
        self._tcp_ends = TcpEndWait(group.timers)
        self._test_data = b""
        self._echo = b""
        self._connection_of = group.connections
        self.backlog: Backlog | None = None
        self.copies_on_post: bool = rnic.copies_on_post
        # Looked up once, because every message needs them.
        self._host = group.host
        self._post_send = self.qp.post_send
        self._post_write = self.qp.post_write
        self._deliver = self.qp.deliver
        self._free = rnic.send_depth
        self._wr_id = 0
        self._since_signal = 0
        # Signaled work requests under way: the ID; how many work requests its completion frees; for
        # a CDC message its connection and sequence number; for an LLC message its callback.
        self._pending: deque[tuple[int, int, Poster | None, int, Callable[[], None] | None]] = (
            deque()
        )
        self._waiting: dict[Poster, None] = {}
        self._received = 0
        self._replenish = max(1, self.qp.receive_depth // 4)
        group.host.register(rnic, self.qp, self)

    def __repr__(self) -> str:
        return f"<Link {self.number} {self.state} on {self.rnic.name}>"

    @property
    def state(self) -> str:
        """The link's state (`trio_smc.states.link`)."""
        return self.machine.state

    @property
    def usable(self) -> bool:
        """True if more connections may send on the link."""
        return self.machine.state in ("ACTIVE", "TESTING") and not self.failing

    @property
    def confirmed(self) -> bool:
        """True if LLC messages may be sent on the link."""
        return self.machine.state in ("ACTIVE", "TESTING", "LEAVING") and not self.failing

    @property
    def load(self) -> int:
        """The number of connections that send on the link."""
        return len(self.users)

    @property
    def unacknowledged(self) -> bool:
        """True if a message was sent that may not have arrived."""
        return bool(self._pending)

    # --- connections: trio_smc.datapath.messenger.Channel -------------------------------------

    def capacity(self) -> int:
        """Bytes that a connection may post now; 0 if the send queue has no room."""
        if self._free < _LEAST_FREE or self.machine.state == "DOWN":
            return 0
        return self.qp.write_capacity() if self.copies_on_post else _UNBOUNDED

    def wait_for_room(self, poster: Poster) -> None:
        """Call ``poster.on_room()`` once, when `capacity` is positive again."""
        self._waiting[poster] = None

    def hand_over(self, poster: Poster, successor: Poster | None) -> None:
        """Report the completions of ``poster`` to ``successor``; None: drop them."""
        self._waiting.pop(poster, None)
        for place, (wr_id, weight, owner, sequence, on_sent) in enumerate(self._pending):
            if owner is poster:
                self._pending[place] = (wr_id, weight, successor, sequence, on_sent)

    def post_write(self, poster: Poster, data: memoryview, address: int, rkey: int) -> None:
        """RDMA-write ``data`` to ``address``; completes with the poster's next CDC message."""
        self._free -= 1
        self._since_signal += 1
        self._wr_id = wr_id = self._wr_id + 1
        observer = self._host.observer
        if observer is not None:
            observer.rdma_write(self, address, rkey, data)
        self._post_write(wr_id, data, None, address, rkey)

    def post_cdc(self, poster: Poster, message: bytes) -> None:
        """Send a CDC message; ``poster.on_cdc_complete`` follows."""
        self._free -= 1
        self._wr_id = wr_id = self._wr_id + 1
        weight = self._since_signal + 1
        self._since_signal = 0
        self._pending.append((wr_id, weight, poster, message[2] << 8 | message[3], None))
        observer = self._host.observer
        if observer is not None:
            observer.cdc(self, True, message)
        self._post_send(wr_id, message)

    def try_post(
        self, message: bytes, data: bytes | memoryview | None, address: int, rkey: int
    ) -> bool:
        """Write and send at once, if that is possible; see `Channel.try_post`."""
        if self._pending or self._waiting or self._host.observer is not None:
            return False
        deliver = self._deliver
        if not deliver(message, data, address, rkey):
            return False
        if self._since_signal:
            # Earlier writes without a signal are complete, too.
            self._free += self._since_signal
            self._since_signal = 0
        return True

    def progress_words(self, address: int, rkey: int, size: int) -> tuple[Words, int] | None:
        """See `QueuePair.progress_words`."""
        return self.qp.progress_words(address, rkey, size)

    def peer_asleep(self) -> Words:
        """See `QueuePair.peer_asleep`."""
        return self.qp.peer_asleep()

    def send_llc(self, message: llc.Message, on_sent: Callable[[], None] | None = None) -> None:
        """Send an LLC message; ``on_sent`` is called when it has reached the peer."""
        if self.machine.state == "DOWN":
            return
        if self._free <= 0:
            LOGGER.warning("%r: the peer does not receive LLC messages", self)
            self.machine.send("failed")
            return
        data = self.group.terms.framing.encode(message)
        self._free -= 1
        self._wr_id += 1
        self._pending.append((self._wr_id, self._since_signal + 1, None, 0, on_sent))
        self._since_signal = 0
        observer = self.group.host.observer
        if observer is not None:
            observer.llc(self, True, data)
        try:
            self.qp.post_send(self._wr_id, data)
        except RnicError as error:
            LOGGER.info("%r: %s", self, error)
            self.machine.send("failed")

    # --- completions -----------------------------------------------------------------------

    def on_completion(self, completion: PlainCompletion) -> None:
        """Process one completion of this link's queue pair."""
        _, opcode, status, wr_id, data = completion
        if data is not None and not status:
            if self.backlog is None:
                self.receive_untrusted(data)
            else:
                self.backlog.append(data)
        elif status:
            self._failed(status)
        elif opcode != _RECV:
            self._sent(wr_id)

    def receive_untrusted(self, data: bytes) -> None:
        """Process one message of the peer. A message in the backlog comes here later."""
        self.has_received = True
        self._received = count = self._received + 1
        if count >= self._replenish:
            self._received = 0
            if self.machine.state != "DOWN":
                self.qp.post_receive(count)
        # Like `unpack_untrusted`, without a call.
        try:
            message = _unpack_cdc(data)
        except struct.error:
            self._other_untrusted(data)
            return
        if message[0] != HEADER:
            self._other_untrusted(data)
            return
        observer = self._host.observer
        if observer is not None:
            observer.cdc(self, False, data)
        connection = self._connection_of.get(message[2])
        if connection is None:
            self._host.count_unknown_token()
            return
        try:
            connection.on_cdc_untrusted(message)
        except MessageMissing:
            self.group.mover.message_missing(self, data)
        except ProtocolError as error:
            LOGGER.warning("%r: %s", self, error)  # the connection has aborted itself

    def _other_untrusted(self, data: bytes) -> None:
        """Process an LLC message, or an invalid CDC message, which aborts its connection."""
        observer = self._host.observer
        if not data or data[0] != CDC_TYPE:
            if observer is not None:
                observer.llc(self, False, data)
            if not self.failing:  # otherwise exchanges begin again over another link (2.3)
                self.group.on_llc_untrusted(self, data)
            return
        if observer is not None:
            observer.cdc(self, False, data)
        connection = self._connection_of.get(int.from_bytes(data[4:8], "big"))
        if connection is None:
            self._host.count_unknown_token()
            return
        try:
            unpack_untrusted(data)
        except ProtocolError as error:
            LOGGER.warning("%r: %s", self, error)
            connection.protocol_error(error)

    def _sent(self, wr_id: int) -> None:
        pending = self._pending
        while pending and pending[0][0] <= wr_id:
            _, weight, connection, sequence, on_sent = pending.popleft()
            self._free += weight
            if connection is not None:
                connection.on_cdc_complete(sequence)
            elif on_sent is not None and not self.failing:
                on_sent()
        while self._waiting and self.capacity():
            waiter = next(iter(self._waiting))
            del self._waiting[waiter]
            waiter.on_room()

    def _failed(self, status: int) -> None:
        if not self.failing and not self._qp_failed:
            LOGGER.info("%r failed: %s", self, _status_name(status))
            self._qp_failed = True
            # Also those that are in a handshake: its last message may be unread.
            connections = self.group.connections
            if self.qp.received_all and connections:
                self.group.timers.in_turn(
                    lambda: self._tcp_ends.begin(connections.values(), self._fail)
                )
            else:
                self.group.timers.in_turn(self._fail)

    def _fail(self) -> None:
        if not self.failing:
            self.machine.send("failed")

    # --- actions of states.link: the end -----------------------------------------------------

    def move_connections(self) -> None:
        """Move the connections to another link, if there is one (4.6)."""
        self.failing = True
        self.group.link_failing(self)

    def report_failure(self) -> None:
        """Notify the group."""
        self.group.link_down(self)

    def close_queue_pair(self) -> None:
        """Free the link's resources. Connections that could not move are ended by the group."""
        self.failing = True
        self.group.mover.link_ends(self)
        self._waiting.clear()
        self._pending.clear()
        self.stop_timer()
        self._tcp_ends.cancel()
        self.group.host.unregister(self.rnic, self.qp)
        self.qp.close()

    # --- actions and guards of states.link ------------------------------------------------

    def connect_queue_pair(self) -> None:
        """Take the queue pair to RTR, a server also to RTS (RFC 7609, 3.5.1.3); post receives."""
        peer = self.peer
        if peer is None:
            raise RuntimeError("connect needs the peer's queue pair")
        self.qp.to_rtr(
            gid=peer.gid, qp_num=peer.qp_number, psn=peer.psn, mtu=min(peer.mtu, self.rnic.mtu)
        )
        self.qp.post_receive(self.qp.receive_depth)
        if not self.group.client:
            self.ready_to_send()

    def ready_to_send(self) -> None:
        """Take the queue pair to RTS (RFC 7609, 3.5.1.4, 3.5.1.5)."""
        self.qp.to_rts(psn=self.psn)

    def check_reach(self, rkey: int) -> None:
        """Raise RnicError (`is_lack`) if an RMB of the peer cannot be written to on this link."""
        if not self.qp.can_reach(rkey):
            raise RnicError(errno.ENOMEM, "no resources to reach the peer's RMB")

    @property
    def idle(self) -> bool:
        """True if no message has arrived for a whole test interval."""
        return not self.has_received and self._idle_checks + 1 >= _CHECKS

    def start_idle_timer(self) -> None:
        """Check `_CHECKS` times in each test interval whether a message has arrived.

        With one check, a silent link would be noticed only after up to two intervals.
        """
        self.needs_test = False
        self._idle_checks = -1
        self.check_again()

    def check_again(self) -> None:
        """Count one more check, and start the timer for the next one; the link is not idle yet."""
        self._idle_checks = 0 if self.has_received else self._idle_checks + 1
        self.has_received = False
        self._restart_timer(self.group.test_interval / _CHECKS, "idle_timer")

    @property
    def peer_lives(self) -> bool:
        """True if the peer's process exists, even if it does not run now (guard)."""
        return self.qp.peer_lives()

    def test_interval_shortened(self) -> None:
        """Restart the timer with the shorter interval."""
        if self.machine.state == "ACTIVE":
            self._restart_timer(self.group.test_interval / _CHECKS, "idle_timer")

    def test_now(self) -> None:
        """Test the link now, even if it is not idle, because the peer may have lost the link."""
        self.needs_test = True
        self.has_received = False
        self._idle_checks = _CHECKS
        if self.machine.state == "ACTIVE":
            self.machine.send("idle_timer")

    def send_test_link(self) -> None:
        """Send TEST LINK, because the link is idle (RFC 7609, 4.5.3)."""
        self._test_data = os.urandom(16)
        self._restart_timer(self.group.config.test_link_timeout, "test_timeout")
        self.send_llc(llc.TestLink(user_data=self._test_data))

    def on_test_reply_untrusted(self, message: llc.TestLink) -> None:
        """Check the echoed data.  Raises ProtocolError if it differs (C.7.1)."""
        if self.machine.state == "TESTING" and message.user_data != self._test_data:
            raise ProtocolError("TEST LINK reply with other data")
        self.machine.send("test_reply")

    def answer_test(self) -> None:
        """Send the reply for `on_test_request`."""
        self.send_llc(llc.TestLink(reply=True, user_data=self._echo))

    def on_test_request(self, message: llc.TestLink) -> None:
        """Answer the peer's TEST LINK at once (RFC 7609, 4.5.3)."""
        self._echo = message.user_data
        self.machine.send("test_request")

    def state_changed(self, old: str, new: str, event: str) -> None:
        """Notify observers, and record the change."""
        host, group = self.group.host, self.group
        role = "as client" if group.client else "as server"
        what = f"link {self.number} on {self.rnic.name}, {role} of {group.peer_id.hex()}"
        host.journal.changed("link", what, old, new, event)
        observer = host.observer
        if observer is not None:
            observer.state(self, old, new, event)

    def connect(self, peer: PeerQueuePair) -> None:
        """Connect to the peer's queue pair.  Raises RnicError; the link is unusable then."""
        self.peer = peer
        self.machine.send("connect")

    def close(self) -> None:
        """End the link without a message to the peer.  Idempotent; regions must be closed first."""
        self.machine.send("delete")
        self.pd.close()

    def _restart_timer(self, seconds: float, event: str) -> None:
        self.stop_timer()
        self._timer = self.group.timers.call_later(seconds, lambda: self._timer_due(event))

    def _timer_due(self, event: str) -> None:
        if event == "test_timeout":
            # The reply may have arrived while this process did not run.
            self.group.mover.catch_up()
            if self.machine.state != "TESTING":
                return
            LOGGER.info("%r: TEST LINK was not answered", self)
        self.machine.send(event)

    def stop_timer(self) -> None:
        """Stop the timer; no test is due."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _status_name(status: int) -> str:
    try:
        return WcStatus(status).name
    except ValueError:
        return f"status {status}"
