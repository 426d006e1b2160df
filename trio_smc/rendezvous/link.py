"""One SMC-R link: a reliably connected queue pair and what travels over it.

Theory of operation
-------------------
A link posts three kinds of work: RDMA writes and CDC messages of connections, and LLC messages
of its group.  All go through one queue pair in order, so one completed CDC message says that
every write before it is in the peer's memory.  Only sends are signaled; a completion gives back
the work requests of everything up to it.  What a queue pair does at once (`try_post`) has no
completion: not while one is awaited, since completions come in order, nor while somebody waits for
room, which only a completion tells of.

The send queue is bounded.  `capacity` keeps a reserve for LLC messages, so that a link full of
data can still be tested and deleted; connections that find no room are called back in turn.  A
peer that asks for replies faster than it takes them uses the reserve up and loses the link.

Receives are posted in bulk and replenished in quarters of the queue.

Link implements `trio_smc.datapath.channel.Channel`; its life is told in `link_life`, what of its
messages waits in `link_judged`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from trio_smc._base.errors import ProtocolError
from trio_smc.datapath.cdc import CDC_TYPE, MessageMissing
from trio_smc.rendezvous import llc
from trio_smc.rendezvous.link_judged import JudgedLink
from trio_smc.rendezvous.link_life import PeerPort, PeerQueuePair
from trio_smc.rnic.verbs import Completion, Rnic, RnicError, WcOpcode, WcStatus

if TYPE_CHECKING:
    from trio_smc.rendezvous.link_group import LinkGroup

__all__ = ["Link", "LinkConnection", "PeerPort", "PeerQueuePair"]

LOGGER = logging.getLogger("trio_smc.link")

_RECV: Final = int(WcOpcode.RECV)
_from_bytes: Final = int.from_bytes
_LLC_RESERVE: Final = 32
_UNBOUNDED: Final = 1 << 62
_MOST_PER_POST: Final = 3  # a wrapping write takes two requests, its CDC message a third


class LinkConnection(Protocol):
    """What a link needs of a connection that uses it."""

    def on_cdc_untrusted(self, message: bytes) -> None:
        """A CDC message for this connection arrived.  Raises MessageMissing, ProtocolError."""

    def protocol_error(self, exc: ProtocolError) -> None:
        """Abort, because of the peer."""

    def on_cdc_complete(self, sequence: int) -> None:
        """A CDC message of this connection, and all before it, reached the peer."""

    def on_room(self) -> None:
        """There is room in the send queue again."""


class Link(JudgedLink):
    """One link of a link group."""

    __slots__ = (
        "_deliver", "_free", "_host", "_pending", "_post_send",
        "_post_write", "_received", "_replenish", "_since_signal", "_waiting", "_wr_id",
        "copies_on_post",
    )  # fmt: skip

    def __init__(self, group: LinkGroup, number: int, rnic: Rnic) -> None:
        """Make the queue pair and take it to INIT.  Raises RnicError."""
        super().__init__(group, number, rnic)
        self.copies_on_post = rnic.copies_on_post
        # What every message needs, looked up once.
        self._host = group.host
        self._post_send = self.qp.post_send
        self._post_write = self.qp.post_write
        self._deliver = self.qp.deliver
        self._free = rnic.send_depth
        self._wr_id = 0
        self._since_signal = 0
        # (wr_id, work requests it gives back, connection and sequence or callback)
        self._pending: deque[
            tuple[int, int, LinkConnection | None, int, Callable[[], None] | None]
        ] = deque()
        self._waiting: dict[LinkConnection, None] = {}
        self._received = 0
        self._replenish = max(1, rnic.receive_depth // 4)
        group.host.register(rnic, self.qp, self)

    @property
    def unacknowledged(self) -> bool:
        """Whether something was sent that is not known to have arrived."""
        return bool(self._pending)

    # --- connections: trio_smc.datapath.channel.Channel -------------------------------------

    def capacity(self) -> int:
        """Bytes a connection may post now; 0 when the send queue has no room."""
        if self._free < _LLC_RESERVE + _MOST_PER_POST or self.machine.state == "DOWN":
            return 0
        return self.qp.write_capacity() if self.copies_on_post else _UNBOUNDED

    def wait_for_room(self, connection: LinkConnection) -> None:
        """Call ``connection.on_room()`` once, when `capacity` is positive again."""
        self._waiting[connection] = None

    def hand_over(self, connection: LinkConnection, heir: LinkConnection | None) -> None:
        """Report completions of what ``connection`` posted to ``heir``; None: to nobody."""
        self._waiting.pop(connection, None)
        for place, (wr_id, weight, owner, sequence, on_sent) in enumerate(self._pending):
            if owner is connection:
                self._pending[place] = (wr_id, weight, heir, sequence, on_sent)

    def post_write(
        self, connection: LinkConnection, data: memoryview, address: int, rkey: int
    ) -> None:
        """RDMA-write ``data`` to ``address``; completes with the connection's next CDC."""
        self._free -= 1
        self._since_signal += 1
        self._wr_id = wr_id = self._wr_id + 1
        observer = self._host.observer
        if observer is not None:
            observer.rdma_write(self, address, rkey, data)
        self._post_write(wr_id, data, None, address=address, rkey=rkey)

    def post_cdc(self, connection: LinkConnection, message: bytes) -> None:
        """Send a CDC message; ``connection.on_cdc_complete`` follows."""
        self._free -= 1
        self._wr_id = wr_id = self._wr_id + 1
        weight = self._since_signal + 1
        self._since_signal = 0
        self._pending.append((wr_id, weight, connection, message[2] << 8 | message[3], None))
        observer = self._host.observer
        if observer is not None:
            observer.cdc(self, True, message)
        self._post_send(wr_id, message)

    def try_post(self, message: bytes, data: memoryview | None, address: int, rkey: int) -> bool:
        """Write and send at once, if that is possible; see `Channel.try_post`."""
        if self._pending or self._waiting or self._host.observer is not None:
            return False
        if not self._deliver(message, data, address, rkey):
            return False
        if self._since_signal:
            # Unsignaled writes before it are done, too.
            self._free += self._since_signal
            self._since_signal = 0
        return True

    def send_llc(self, message: llc.Message, on_sent: Callable[[], None] | None = None) -> None:
        """Send an LLC message; ``on_sent`` is called when it reached the peer."""
        if self.machine.state == "DOWN":
            return
        if self._free <= 0:
            LOGGER.warning("%r: the peer takes no LLC messages", self)
            self.machine.send("failed")
            return
        data = message.encode()
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

    def on_completion(self, completion: Completion) -> None:
        """Take one completion of this link's queue pair."""
        _, opcode, status, wr_id, data = completion
        if status:
            self._failed(status)
        elif opcode != _RECV:
            self._sent(wr_id)
        elif data is not None:
            if self._behind is None:
                self._receive_untrusted(data)
            else:
                self._behind.append(data)

    def _receive_untrusted(self, data: bytes) -> None:
        self.heard = True
        self._received = count = self._received + 1
        if count >= self._replenish:
            self._received = 0
            if self.machine.state != "DOWN":
                self.qp.post_receive(count)
        observer = self._host.observer
        if not data or data[0] != CDC_TYPE:
            if observer is not None:
                observer.llc(self, False, data)
            if not self.failing:  # exchanges begin anew over another link (2.3)
                self.group.on_llc_untrusted(self, data)
            return
        if observer is not None:
            observer.cdc(self, False, data)
        connection = self._connection_of.get(_from_bytes(data[4:8], "big"))
        if connection is None:
            self._host.count_unknown_token()
            return
        try:
            connection.on_cdc_untrusted(data)
        except MessageMissing:
            self._wait_to_be_judged(data)
        except ProtocolError as error:
            LOGGER.warning("%r: %s", self, error)  # the connection has aborted itself

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
        if not self.failing:
            LOGGER.info("%r failed: %s", self, _status_name(status))
            self.machine.send("failed")

    # --- actions of states.link, beside those of `LinkLife` --------------------------------

    def lose_connections(self) -> None:
        """The connections carry on over another link, if there is one (4.6)."""
        self.failing = True
        self.group.deletion.keep_last(self)
        self.group.mover.link_lost(self)

    def report_failure(self) -> None:
        """Tell the group, which decides what that means."""
        self.group.link_down(self)

    def close_queue_pair(self) -> None:
        """Free what the link has; connections are told by the group."""
        self.failing = True
        self.group.mover.link_ends(self)
        self._waiting.clear()
        self._pending.clear()
        super().close_queue_pair()


def _status_name(status: int) -> str:
    try:
        return WcStatus(status).name
    except ValueError:
        return f"status {status}"
