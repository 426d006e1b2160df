"""What the parts of a software RNIC share: its port, as queue pairs, domains and sockets see it."""

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
    """What a poll has to look after."""

    def push(self) -> None:
        """Go on if that is possible now."""


class PortUser(Stalled, Protocol):
    """A queue pair, as its port sees it."""

    qp_num: int
    ring: ReceiveRing

    def on_peer_end(self) -> None:
        """The peer's end is no more."""


class Port(Protocol):
    """The port of a software RNIC.

    Attributes:
      intake: takes what peers send, and closes it.
      done: completions for the next poll.
      stalled: what the next poll looks after.
      gone: whose peers have ended.
      timed_waits: how many of ``stalled`` wait for a moment: nobody sleeps meanwhile.
      accepting_later: so many have dialled that some still wait to be let in.
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

    def poll_sockets(self) -> None:
        """Handle what the sockets have, without waiting."""

    def call_at_service(self, action: Callable[[], None]) -> None:
        """Call ``action`` at the next look, which comes soon: it has had its turn for now."""

    def dial(self, gid: bytes) -> socket.socket:
        """A socket to the RNIC of that GID.  Raises RnicError."""

    def request_service(self) -> None:
        """Have somebody look, as if something had come."""

    def retry_later(self, action: Callable[[], None]) -> None:
        """Call ``action`` at a look a moment from now: something lacked resources.

        ``action``: given several times before that, it is called once.
        """

    def watch_peer(self, sock: socket.socket, handler: Callable[[int], None]) -> None:
        """Report a socket to a queue pair's peer; ``handler`` gets the epoll events.

        Raises OSError: there are too many epoll watches.
        """

    def add_doorbell(self, rung: Callable[[], bool]) -> Doorbell | None:
        """A bell for a queue pair's peer, reported as its socket is; None: it has to do with that.

        ``rung`` takes what was rung, and tells whether that was anything.
        """

    def remove_doorbell(self, doorbell: Doorbell) -> None:
        """Undo `add_doorbell`."""

    def watch_writable(self, sock: socket.socket, *, wanted: bool) -> None:
        """Whether to report also that such a socket takes something again."""

    def watch_readable(self, sock: socket.socket, *, wanted: bool) -> None:
        """Report from now on that such a socket can be read, or do not."""

    def resume_polling(self, ring: ReceiveRing) -> None:
        """Look again at this ring, which interrupt_mode: its doorbell was rung."""

    def close_peer_socket(self, sock: socket.socket | None, *, quietly: bool) -> None:
        """Close a watched socket, or keep it where the other side may not notice yet."""

    def new_rkey(self) -> int:
        """An RKey that no region has."""

    def free_rkey(self, rkey: int) -> None:
        """Undo `new_rkey`."""

    def stop_polling(self, user: PortUser) -> None:
        """A queue pair went to ERR: it needs no polling any more."""

    def remove_queue_pair(self, user: PortUser) -> None:
        """A queue pair was destroyed."""
