"""One side of the connection model: a machine with a small environment.

The environment is as simple as the rules of 4.8 allow: bytes are counted, not stored; the peer
receives posted CDCs in order, and their completions arrive here in order, independently of that.

Two rules beside the table matter (``connection_model`` shows what happens without them):

- a CDC that only opens the window is not ``unsent``;
- after ``close``, while C waits for ``all_sent``, arriving bytes are dropped and the window is
  opened, but they count as ``unread``. Otherwise two sides that closed with bytes to send and
  full windows wait for their close timers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from trio_smc.states.engine import Machine, Table

RING = 3  # bytes of an RMBE: small, so that windows close
# States in which arriving data is ignored (4.8.2, 1A and 2A).
DEAF = frozenset({"PEERABORTWAIT", "PROCESSABORT", "CLOSED"})
# Events that end a connection without the peer: then only 4.4.2 protects its RMBE.
_ALONE = frozenset({"close_timeout", "abort_timeout", "links_lost", "rmbe_conflict"})

Step = Callable[[], None]


class Broken(AssertionError):
    """A promise of ``connection_model`` did not hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cdc:
    """One CDC message: bytes written before it, window opened by it, and at most one flag."""

    data: int = 0
    window: int = 0
    flag: str = ""


class Side:
    """One peer: the machine's model, its application and its half of the channels."""

    def __init__(self, name: str, table: Table, note: Callable[[str], None]) -> None:
        self.name = name
        self.note = note
        self.machine = Machine(table, self)
        self.peer: Side = self
        # Facts that guards read.
        self.unread = 0
        self.sent_closed = self.got_closed = False
        self.closed_arrived = False  # the campaign has no end of TCP
        self.eof_pending = self.close_pending = False
        self.peer_rmbe_known = True
        # The application.
        self.established = self.open = self.ended = self.done = self.failed = False
        self.written = self.read = 0
        # Sending half.
        self.accepted = 0  # bytes not yet posted
        self.window = RING
        self.arriving: deque[Cdc] = deque()  # posted, not received by the peer
        self.completing: deque[Cdc] = deque()  # posted, not completed here
        self.aborts = 0
        # Receiving half and the rest.
        self.seen: set[str] = set()
        self.tcp_reset_sent = self.tcp_reset_coming = False
        self.links_up = True
        self.close_timer = self.abort_timer = False
        self.fired = 0
        self.gave_up = False  # closed without a message of the peer

    @property
    def state(self) -> str:
        return self.machine.state

    @property
    def unsent(self) -> bool:
        return bool(self.accepted) or any(cdc.data for cdc in self.completing)

    @property
    def writing(self) -> bool:
        return self.unsent

    def raise_(self, event: str) -> None:
        self.note(f"{self.name} {self.state} {event}")
        self.machine.send(event)
        self.note(f"{self.name} -> {self.state}")

    # --- actions of the table ---

    def post(self, cdc: Cdc) -> None:
        if self.sent_closed or self.state == "CLOSED" or not self.peer_rmbe_known:
            raise Broken(f"{self.name} posts {cdc} in {self.state}, C sent: {self.sent_closed}")
        self.note(f"{self.name} posts {cdc}")
        if self.links_up:
            self.arriving.append(cdc)
            self.completing.append(cdc)

    def send_done(self) -> None:
        self.post(Cdc(flag="D"))

    def send_closed(self) -> None:
        if self.unsent:
            raise Broken(f"{self.name} sends C with unsent data")
        self.post(Cdc(flag="C"))
        self.sent_closed = True

    def send_abort(self) -> None:
        self.aborts += 1
        if self.aborts > 1:
            raise Broken(f"{self.name} sends A twice")
        if self.peer_rmbe_known and self.links_up:
            self.post(Cdc(flag="A"))
        else:
            self.machine.send("abort_sent")

    def reset_tcp(self) -> None:
        if not self.tcp_reset_sent and not self.peer.tcp_reset_sent:
            self.tcp_reset_sent = True
            self.peer.tcp_reset_coming = True

    def close_tcp(self) -> None:
        # The peer's Confirm is on its way to a closed socket: TCP answers it with a reset.
        self.reset_tcp()

    def purge(self) -> None:
        self.unread = self.accepted = 0

    @property
    def sender(self) -> Side:
        """The part of a connection that the table names."""
        return self

    def drop_unsent(self) -> None:
        self.accepted = 0

    def fail(self) -> None:
        self.failed = True

    fail_aborted = fail_reset = fail_refused = fail_links_lost = fail_handshake = fail

    def open_to_application(self) -> None:
        self.open = True

    def arm_close_timer(self) -> None:
        self.close_timer = True

    def arm_abort_timer(self) -> None:
        self.abort_timer = True

    def set_eof_pending(self) -> None:
        self.eof_pending = True

    def set_close_pending(self) -> None:
        self.close_pending, self.eof_pending = True, False

    def set_got_closed(self) -> None:
        self.got_closed = True

    def state_changed(self, old: str, new: str, event: str) -> None:
        if old == new or old == "CLOSED":
            raise Broken(f"{self.name} went from {old} to {new} by {event}")
        if new == "CLOSED":
            self.close_timer = self.abort_timer = False
            self.gave_up = event in _ALONE or not self.peer_rmbe_known

    # --- what the application may do ---

    def write(self) -> None:
        if self.got_closed:
            self.raise_("abort")  # no reader can get the data: the send aborts
            self.done = True
            return
        self.accepted += 1
        self.written += 1

    def take(self) -> None:
        self.unread -= 1
        self.read += 1
        if not self.sent_closed and self.state not in DEAF and self.peer_rmbe_known:
            self.post(Cdc(window=1))

    def end(self) -> None:
        self.ended = True
        self.raise_("shutdown_wr")

    def close(self) -> None:
        self.done = True
        self.raise_("close")

    def abort(self) -> None:
        self.done = True
        self.raise_("abort")

    @property
    def end_of_stream(self) -> bool:
        return self.open and not self.unread and bool(self.seen & {"D", "C"})

    # --- what the network may do ---

    def transmit(self) -> None:
        self.accepted -= 1
        self.window -= 1
        self.post(Cdc(data=1))

    def complete(self) -> None:
        owed = self.unsent
        cdc = self.completing.popleft()
        if cdc.flag == "A":
            self.raise_("abort_sent")
        if owed and not self.unsent:
            self.raise_("all_sent")

    def arrive(self) -> None:
        """Receive the next CDC of the peer: data first, then A, C, D, each only once."""
        cdc = self.peer.arriving.popleft()
        if self.state == "CLOSED":
            if cdc.data and not self.gave_up:
                raise Broken(f"{self.peer.name} wrote into the free RMBE of {self.name}")
            return
        if self.state not in DEAF:
            self.window += cdc.window
            self.unread += cdc.data
            if cdc.data and self.close_pending and not self.sent_closed:
                self.post(Cdc(window=cdc.data))  # dropped; stays unread for the guard
        if cdc.flag and cdc.flag not in self.seen:
            self.seen.add(cdc.flag)
            self.raise_({"A": "peer_abort", "C": "peer_closed", "D": "peer_done"}[cdc.flag])

    def tcp_reset(self) -> None:
        self.tcp_reset_coming = False
        if "A" not in self.seen:
            self.raise_("abort")

    def fire(self, timer: str) -> None:
        self.fired += 1
        setattr(self, timer, False)
        self.raise_({"close_timer": "close_timeout", "abort_timer": "abort_timeout"}[timer])

    def network(self) -> list[Step]:
        steps: list[Step] = []
        if self.accepted and self.window and self.links_up and self.state not in DEAF:
            steps.append(self.transmit)
        if self.completing:
            steps.append(self.complete)
        if self.peer.arriving:
            steps.append(self.arrive)
        if self.tcp_reset_coming:
            steps.append(self.tcp_reset)
        return steps

    def timers(self) -> list[Step]:
        names = [name for name in ("close_timer", "abort_timer") if getattr(self, name)]
        return [partial(self.fire, name) for name in names]
