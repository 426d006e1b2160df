"""The port of a software RNIC, as its queue pairs, protection domains and sockets see it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Protocol

from trio_smc.rnic.soft.messages import Doorbell, Intake
from trio_smc.rnic.soft.ring import ReceiveRing
from trio_smc.rnic.verbs import PlainCompletion

__all__ = [
    "Port",
    "PortUser",
    "Stalled",
]


class Stalled(Protocol):
    """Work that each poll tries to continue."""

    def push(self) -> None:
        """Continue, if that is possible now."""


class PortUser(Stalled, Protocol):
    """A queue pair, as its port sees it."""

    qp_num: int
    ring: ReceiveRing

    def on_peer_end(self) -> None:
        """The peer's queue pair has ended."""


class Port(Protocol):
    """The port of a software RNIC.

    Attributes:
      intake: receives the packets of peers, and closes their descriptors.
      done: completions for the next poll.
      stalled: the work that the next poll tries to continue.
      disconnected: queue pairs whose peers have ended; the next poll handles them.
      timed_waits: how many of ``stalled`` wait for a time and not for the peer.  If there are any,
        `Rnic.arm` returns False, so that Trio does not sleep.
      accepting_later: more connections of peers may wait in the backlog; a later call accepts them.
      sends_packets: True if messages travel over sockets, because this process cannot use a ring.
    """

    intake: Intake
    gid: bytes
    port_active: bool
    send_depth: int
    done: list[PlainCompletion]
    stalled: dict[Stalled, None]
    disconnected: list[PortUser]
    timed_waits: int
    accepting_later: bool
    sends_packets: bool

    def poll_sockets(self) -> None:
        """Handle the events of all sockets, without waiting."""

    def call_at_service(self, action: Callable[[], None]) -> None:
        """Call ``action`` at the next `poll_sockets`, which comes soon."""

    def dial(self, gid: bytes) -> socket.socket:
        """Connect a socket to the RNIC with this GID.  Raises RnicError."""

    def request_service(self) -> None:
        """Make the caller of `Rnic.service` call it soon."""

    def retry_later(self, action: Callable[[], None]) -> None:
        """Call ``action`` a moment from now, because it failed for lack of resources.

        If the same action is passed several times before, it is called once.
        """

    def watch_peer(self, sock: socket.socket, handler: Callable[[int], None]) -> None:
        """Watch the socket of a queue pair's peer; ``handler`` receives the epoll events.

        Raises OSError: there are too many epoll watches.
        """

    def add_doorbell(self, rung: Callable[[], bool]) -> Doorbell | None:
        """Make a doorbell for a queue pair's peer; None: the peer has to use its socket.

        ``rung`` reads the doorbell, and returns True if it has been rung.
        """

    def remove_doorbell(self, doorbell: Doorbell) -> None:
        """Undo `add_doorbell`."""

    def watch_writable(self, sock: socket.socket, *, wanted: bool) -> None:
        """Watch for room in a peer's socket; ``wanted=False``: stop watching."""

    def watch_readable(self, sock: socket.socket, *, wanted: bool) -> None:
        """Watch for packets in a peer's socket; ``wanted=False``: stop watching."""

    def resume_polling(self, ring: ReceiveRing) -> None:
        """End the interrupt mode of a ring, because its doorbell was rung."""

    def replace_ring(self, old: ReceiveRing, new: ReceiveRing) -> None:
        """Poll ``new`` instead of ``old``."""

    def close_peer_socket(self, sock: socket.socket | None, *, quietly: bool) -> None:
        """Close a watched socket; ``quietly``: not yet, so that the peer does not notice."""

    def new_rkey(self) -> int:
        """Draw an RKey that no region has."""

    def free_rkey(self, rkey: int) -> None:
        """Undo `new_rkey`."""

    def stop_polling(self, user: PortUser) -> None:
        """Stop polling a queue pair that went to ERR."""

    def remove_queue_pair(self, user: PortUser) -> None:
        """Remove a destroyed queue pair."""
