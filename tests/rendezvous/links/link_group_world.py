"""Two link groups back to back, and a scheduler that chooses the next step at random.

`GroupWorld` is a `World` (no sockets, no threads, no real clock) with two sides of one or more
RNICs each.  Each queue pair has a queue of requests on their way.  `GroupWorld.nudge` executes one
small step, chosen by the seed, so that messages arrive in any order that the network allows.
`Stream` is a connection whose expected bytes depend only on their position.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from tests.rendezvous.links.llc_trace import Trace
from tests.rendezvous.rendezvous_pair import SIZE, Call, End, World
from tests.rnic.memory_rnic import Fate, PlainQueuePair
from trio_smc.config.config import Config
from trio_smc.datapath.connection import Connection
from trio_smc.rendezvous.links.group import LinkGroup
from trio_smc.rendezvous.negotiation import Established
from trio_smc.rnic.verbs import QpState

__all__ = ["SIZES", "GroupWorld", "Stream"]

_PERIOD = 1 << 16
_BYTES = bytes(random.Random(7609).randbytes(_PERIOD)) * 2
_MOST = 16 * 1024
SIZES = (1 << 16, SIZE, 4 * SIZE)
"""Bytes of an RMB element: 64, four and one in an RMB."""


class _Direction:
    """Bytes from one end of a stream to the other, which depend only on their position."""

    def __init__(self, salt: int) -> None:
        self.salt = salt
        self.sent = 0
        self.received = 0

    def piece(self, length: int) -> memoryview:
        start = (self.salt + self.sent) % _PERIOD
        return memoryview(_BYTES[start : start + length])

    def check(self, data: bytes) -> None:
        start = (self.salt + self.received) % _PERIOD
        assert data == _BYTES[start : start + len(data)], (
            f"wrong bytes at position {self.received} of {self.sent} sent ones"
        )
        self.received += len(data)
        assert self.received <= self.sent, "more bytes than were sent"


class Stream:
    """A connection between the two sides, from its first CLC message to its end.

    Attributes:
      call: the rendezvous; `call.ends` are client and server.
      closed: for each end, True if its application has closed the connection.
      failed: for each end, True if its application got an error.
      parked: for each end, True if its application could not send all bytes, and waits for
        ``on_writable``.
    """

    def __init__(self, call: Call, salt: int) -> None:
        self.call = call
        self.flows = (_Direction(salt), _Direction(salt + 1000))
        self.closed = [False, False]
        self.failed = [False, False]
        self.parked = [False, False]

    @property
    def settled(self) -> bool:
        """True if the rendezvous has ended on both sides."""
        return all(end.outcome is not None for end in self.call.ends)

    @property
    def both(self) -> bool:
        """True if the connection is SMC-R on both sides."""
        return all(isinstance(end.outcome, Established) for end in self.call.ends)

    def connection(self, place: int) -> Connection | None:
        """The connection of this end, or None before it is established."""
        end: End = self.call.ends[place]
        return end.connection if isinstance(end.outcome, Established) else None

    def alive(self, place: int) -> bool:
        """True if this end is still usable."""
        connection = self.connection(place)
        return not (
            connection is None
            or self.closed[place]
            or self.failed[place]
            or connection.state == "CLOSED"
        )

    def send(self, place: int, length: int) -> None:
        """Send up to ``length`` bytes from this end, unless it is `parked`."""
        connection, flow = self.connection(place), self.flows[place]
        if connection is None or not self.alive(place) or self.parked[place]:
            return
        try:
            sent = connection.send(flow.piece(length))
        except OSError:
            self.failed[place] = True
            return
        flow.sent += sent
        if sent < length:
            self.parked[place] = True
            connection.on_writable = partial(self._unpark, place)

    def _unpark(self, place: int) -> None:
        self.parked[place] = False

    def check_waits(self) -> None:
        """Check that no application waits to send on a connection that cannot send any more."""
        for place in (0, 1):
            connection = self.connection(place)
            if self.parked[place] and connection is not None:
                assert connection.sender.sendable, f"{connection!r}: a writer was not woken"

    def receive(self, place: int, length: int = _MOST) -> int:
        """Receive up to ``length`` bytes at this end.  Returns their number."""
        connection, flow = self.connection(place), self.flows[1 - place]
        if connection is None or self.closed[place] or self.failed[place]:
            return 0
        try:
            data = connection.receiver.receive(length)
        except OSError:
            self.failed[place] = True
            return 0
        flow.check(data)
        return len(data)

    def close(self, place: int) -> None:
        """Close the connection at this end."""
        connection = self.connection(place)
        if connection is not None and not self.closed[place]:
            self.closed[place] = True
            connection.close()

    def abort(self, place: int) -> None:
        """Abort the connection at this end."""
        connection = self.connection(place)
        if connection is not None and not self.closed[place]:
            self.closed[place] = True
            connection.abort()


class UnevenWork:
    """A clock of processor time: some calls take longer than a turn, most take no time.

    So `trio_smc._base.timers` postpones some ends of connections; the seed determines which.
    """

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._now = 0.0

    def __call__(self) -> float:
        """Return the processor time in seconds."""
        if self._rng.random() < 0.1:
            self._now += 0.002
        return self._now


class GroupWorld(World):
    """Two sides, their streams, and all messages on their way.

    Args:
      rng: chooses the next step.
      rnics: numbers of RNICs of client and server.
      write: receives the lines of a trace.  None: no trace.
    """

    def __init__(
        self,
        rng: random.Random,
        rnics: tuple[int, int],
        *,
        config: Config | None = None,
        write: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(announces_end=False)
        self.work_clock = UnevenWork(rng.getstate()[1][0])
        self.rng = rng
        self.client = self.side(config, rnics=rnics[0])
        self.server = self.side(config, rnics=rnics[1])
        self.streams: list[Stream] = []
        self.fate = Fate.DONE
        """The fate of the next executed request."""
        self._trace: Trace | None = None
        if write is not None:
            self._trace = Trace("world", self, write)
            for side, name in ((self.client, "client"), (self.server, "server")):
                side.stack.groups.observer = Trace(name, self, write)

    @property
    def client_groups(self) -> list[LinkGroup]:
        """The groups in the client's role, on both sides."""
        return [group for side in self.sides for group in side.groups if group.client]

    def trace(self, text: str) -> None:
        """Write a line to the trace."""
        if self._trace is not None:
            self._trace.write_line(text)

    def open(self, size: int, *, reverse: bool = False) -> Stream:
        """Begin the rendezvous of a new connection.

        reverse: True if the server opens it.
        """
        sides = (self.server, self.client) if reverse else (self.client, self.server)
        stream = Stream(self.call(*sides, size=size), 77 * len(self.streams))
        self.streams.append(stream)
        return stream

    def queue_pairs(self) -> list[PlainQueuePair]:
        """All queue pairs of both sides."""
        return [qp for side in self.sides for rnic in side.rnics for qp in rnic.qps.values()]

    # --- moving ------------------------------------------------------------------------------

    def deliverable(self) -> list[PlainQueuePair]:
        """Queue pairs whose next request can be executed; a SEND waits for a receive buffer."""
        return [qp for qp in self.fabric.busy if not _waits(qp)]

    def execute(self, qp: PlainQueuePair) -> None:
        """Execute the oldest request of ``qp`` with the result `fate`."""
        fate, self.fate = self.fate, Fate.DONE
        if fate is not Fate.DONE:
            self.trace(f"{fate} for a request of queue pair {qp.qp_num:#x}")
        qp.execute(fate)

    def nudge(self) -> None:
        """Do one small step of a queue pair, a side, a TCP connection or a handshake."""
        rng = self.rng
        pick = rng.random()
        if pick < 0.45:
            ready = self.deliverable()
            if ready:
                qp = rng.choice(ready)
                for _ in range(rng.choice((1, 1, 2, 4))):
                    if qp.work and not _waits(qp):
                        self.execute(qp)
        elif pick < 0.8:
            rng.choice(self.sides).stack.pump.drain()
        elif self.tcp_changes and pick < 0.87:
            self.tcp_changes.popleft().process_change()
        elif self.calls:
            rng.choice(rng.choice(self.calls).ends).step(self.clock.now)

    def step(self) -> bool:
        """Run one round of all ends, queue pairs and sides.  Returns False if nothing changed."""
        moved = False
        for call in list(self.calls):
            for end in call.ends:
                while end.step(self.clock.now):
                    moved = True
        while self.tcp_changes:
            self.tcp_changes.popleft().process_change()
            moved = True
        for qp in self.deliverable():
            while qp.work and not _waits(qp):
                self.execute(qp)
            moved = True
        for side in self.sides:
            moved |= side.stack.pump.drain()
        self.calls = [call for call in self.calls if any(end.outcome is None for end in call.ends)]
        return moved

    def stall(self) -> None:
        """Execute nothing until the next timer expires, and run that timer."""
        due = self.next_deadline()
        if due < float("inf"):
            self.clock.now = max(due, self.clock.now)
            for side in self.sides:
                side.stack.timers.run_due()
            for call in self.calls:
                for end in call.ends:
                    end.time_out(self.clock.now)

    def close(self) -> None:
        for rnic in (rnic for side in self.sides for rnic in side.rnics):
            assert not rnic.access_errors, f"a peer wrote to an invalid address of {rnic.name}"
        super().close()


def _waits(qp: PlainQueuePair) -> bool:
    """True if the next request is a SEND and the peer has no receive buffer: RC tries again."""
    if not qp.work or qp.work[0].message is None:
        return False
    peer = qp.peer()
    return peer is not None and not peer.receives and peer.state is QpState.RTS
