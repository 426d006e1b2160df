"""Two whole stacks back to back, without sockets, threads and a real clock.

A `Side` is a real stack (cores, link groups, pump and timers) on RNICs of plain memory.  A `Call`
is one TCP connection between two sides, with a negotiation at each end.  The test delivers each
message, may change it, and advances the clock.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Self, cast

import trio

from tests.rnic.memory_rnic import Fabric, MemoryRnic
from trio_smc._base.errors import ProtocolError
from trio_smc._base.reasons import Fallback, FallbackReason
from trio_smc.config.config import Config
from trio_smc.datapath.connection import Connection
from trio_smc.rendezvous.client import ClientNegotiation
from trio_smc.rendezvous.links.group import LinkGroup
from trio_smc.rendezvous.negotiation import Established, Failed, FellBack
from trio_smc.rendezvous.server import ServerNegotiation
from trio_smc.rendezvous.terms import Terms, answer, with_v2_offer
from trio_smc.stack.connection_host import Endpoint
from trio_smc.stack.rnics import RnicChange
from trio_smc.stack.runtime import Runtime
from trio_smc.wire import clc
from trio_smc.wire.clc import ClcReader

__all__ = [
    "SIZE", "Call", "Clock", "ErrorLog", "Recorder", "Side", "Tcp", "World", "admitted",
    "exchange", "proposal_of",
]  # fmt: skip

SIZE = 1 << 20
"""Bytes of an RMB element: four in an RMB of 4 MiB."""
HANDSHAKE_TIMEOUT = 6.0
"""Time limit for one state of a negotiation, in seconds of the test's clock."""
_DIRECTORY = "/nonexistent"  # plain RNICs have no files


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class ErrorLog(logging.Handler):
    """Collects errors and tracebacks in the log; a test expects none."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or record.levelno >= logging.ERROR:
            self.records.append(record)

    def __enter__(self) -> Self:
        logging.getLogger("trio_smc").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("trio_smc").removeHandler(self)


class Recorder:
    """An observer that records all events in order.

    `events` has tuples (kind, "in" or "out", bytes or names).  Events of different calls are not
    distinguished.
    """

    def __init__(self) -> None:
        self.events: list[tuple[str, str, Any]] = []

    def clc(self, connection: object, outgoing: bool, message: bytes) -> None:
        self.events.append(("clc", "out" if outgoing else "in", message))

    def llc(self, link: object, outgoing: bool, message: bytes) -> None:
        self.events.append(("llc", "out" if outgoing else "in", message))

    def cdc(self, link: object, outgoing: bool, message: bytes) -> None:
        self.events.append(("cdc", "out" if outgoing else "in", message))

    def rdma_write(self, link: object, address: int, rkey: int, data: memoryview) -> None:
        self.events.append(("write", "out", len(data)))

    def state(self, subject: object, old: str, new: str, event: str) -> None:
        self.events.append(("state", type(subject).__name__, (old, new, event)))

    def mode(self, connection: object, fallback: Fallback | None) -> None:
        self.events.append(("mode", "", fallback))

    def messages(self) -> list[tuple[str, str, bytes]]:
        """The CLC, LLC and CDC messages."""
        return [each for each in self.events if each[0] in ("clc", "llc", "cdc")]


class _Watch:
    """Replaces the stack's watch over TCP connections."""

    def add(self, sock: object, watcher: Any) -> None:
        cast(Tcp, sock).watcher = watcher

    def remove(self, sock: object) -> None:
        cast(Tcp, sock).watcher = None

    @staticmethod
    def peer_end(sock: object) -> str:
        tcp = cast(Tcp, sock)
        if tcp.ended == "rst" or (tcp.ended and tcp.inbox):
            return "reset"
        return tcp.ended or "none"

    @staticmethod
    def has_bytes(sock: object) -> bool:
        return bool(cast(Tcp, sock).inbox)

    def close(self) -> None:
        pass


class Tcp:
    """One end of a TCP connection.

    Attributes:
      taken: all bytes that this end has read.
      tamper: called with each sent piece; returns the bytes that arrive.
      cut: how this end has ended the connection: "", "fin" or "rst".
    """

    def __init__(self, changes: deque[Tcp]) -> None:
        self.peer: Tcp = self
        self.tcp_changes = changes
        self.inbox = bytearray()
        self._arriving: deque[bytes | str] = deque()
        self.taken = bytearray()
        self.tamper: Callable[[bytes], bytes] = lambda piece: piece
        self.watcher: Any = None
        self.ended = ""  # how the peer has ended its direction, as far as it has arrived
        self.cut = ""
        self.silent = False  # True if sent bytes no longer arrive

    def send(self, data: bytes) -> None:
        """Send; the bytes arrive later."""
        if self.ended == "rst" or self.cut:
            raise ConnectionResetError("the connection is gone")
        self._transmit(self.tamper(data))

    def receive(self, most: int) -> bytes | None:
        """Receive bytes.  Returns b"" at the end, and None if no bytes have arrived."""
        if self.ended == "rst":
            raise ConnectionResetError("reset by the peer")
        if self.inbox:
            piece = bytes(self.inbox[:most])
            del self.inbox[:most]
            self.taken += piece
            return piece
        return b"" if self.ended else None

    def end(self, how: str) -> None:
        """Close ("fin") or reset ("rst") the connection from this end."""
        if not self.cut:
            # As with a real socket, closing with unread bytes resets the connection.
            self.cut = "rst" if self.inbox else how
            self._transmit(self.cut)

    def _transmit(self, event: bytes | str) -> None:
        if not self.silent:
            self.peer._arriving.append(event)
            self.peer.wake()

    def wake(self) -> None:
        """Queue a change, which `World` processes later."""
        self.tcp_changes.append(self)

    def process_change(self) -> None:
        """Deliver sent bytes, and notify an SMC-R connection, like `TcpWatch`."""
        if self._arriving:
            event = self._arriving.popleft()
            if isinstance(event, bytes):
                if self.cut:
                    self._transmit("rst")  # the socket is closed
                elif not self.ended:
                    self.inbox += event
            elif event == "rst":
                self.ended = event
                self.inbox.clear()
            else:
                self.ended = self.ended or event
        if self.watcher is not None:
            if self.ended == "rst":
                self.watcher.tcp_reset()
            elif self.inbox:
                self.watcher.tcp_data()

    # The methods that `Endpoint` calls on a socket.

    def setsockopt(self, _level: int, _option: int, value: bytes) -> None:
        self._linger = value

    _linger = b""

    def getsockopt(self, _level: int, _option: int, _size: int) -> bytes:
        return b"cookie"

    def shutdown(self, _how: int) -> None:
        """No-op: `Endpoint` ends only reading, which sends nothing."""

    def close(self) -> None:
        self.end("rst" if self._linger[:1] == b"\x01" else "fin")

    def detach(self) -> int:
        self.close()
        return -1

    def fileno(self) -> int:
        return -1


class Side:
    """One stack.

    Attributes:
      directory: the private directory.
      rnics: the RNICs.  `rnic` is the first one, memory0, which first contacts use.
    """

    def __init__(self, world: World, config: Config, *, rnics: int = 1, **rnic: Any) -> None:
        self.stack = stack = Runtime(config, world.clock)
        stack.timers.work_clock = stack.timers.turn_clock = world.work_clock
        self._fabric = world.fabric
        self.directory = config.private_directory()
        self._options = rnic
        self.rnics: list[MemoryRnic] = []
        for _ in range(rnics):
            self.open_rnic()
        stack.groups.tcp_watch = cast(Any, _Watch())
        stack.groups.peer_id = world.fabric.number().to_bytes(2, "big") + self.rnic.mac
        self.recorder = Recorder()

    @property
    def rnic(self) -> MemoryRnic:
        return self.rnics[0]

    def serving(self) -> MemoryRnic:
        """The RNIC that the rendezvous of a new connection names."""
        usable = self.stack.rnic_set.usable(self.rnic.kind)
        return next((rnic for rnic in self.rnics if rnic in usable), self.rnic)

    def add_rnic(self) -> MemoryRnic:
        """Add an RNIC while the stack runs."""
        rnic = self.open_rnic()
        self.stack.rnic_set.on_change(rnic, RnicChange.AVAILABLE)
        return rnic

    def open_rnic(self, **options: Any) -> MemoryRnic:
        """Add an RNIC before the stack serves a connection."""
        name = f"memory{len(self.rnics)}"
        rnic = MemoryRnic(self._fabric, **{"name": name, **self._options, **options})
        rnic.open(self.directory)
        self.stack.rnic_set.adopt(rnic)
        self.rnics.append(rnic)
        return rnic

    def record(self) -> Recorder:
        """Record all events from now on."""
        self.recorder = Recorder()
        self.stack.groups.observer = self.recorder
        return self.recorder

    @property
    def groups(self) -> list[LinkGroup]:
        return self.stack.groups.groups

    @property
    def group(self) -> LinkGroup:
        (group,) = self.stack.groups.groups
        return group

    @property
    def connections(self) -> list[Connection]:
        return cast(list[Connection], list(self.stack.groups.endpoints))

    def free(self) -> None:
        """Free the stack at once, without waiting for a peer."""
        self.stack.free()


class End:
    """One end of a call: a negotiation, and a synchronous replacement of `rendezvous.handshake`.

    Attributes:
      pieces: maximum number of bytes that the end reads at once.
    """

    def __init__(
        self, side: Side, tcp: Tcp, negotiation: ClientNegotiation | ServerNegotiation
    ) -> None:
        self.side = side
        self.tcp = tcp
        self.negotiation = negotiation
        self.reader = ClcReader()
        self.pieces = 1 << 16
        self.outcome: Established | FellBack | Failed | None = None
        self._state = ""
        self.deadline = 0.0

    @property
    def state(self) -> str:
        return self.negotiation.state

    @property
    def connection(self) -> Connection:
        assert isinstance(self.outcome, Established), self.outcome
        return cast(Connection, self.outcome.connection)

    @property
    def fallback(self) -> Fallback:
        assert isinstance(self.outcome, FellBack), self.outcome
        return self.outcome.fallback

    @property
    def error(self) -> OSError:
        assert isinstance(self.outcome, Failed), self.outcome
        return self.outcome.error

    def step(self, now: float) -> bool:
        """Do one step.  Returns False if there is nothing to do."""
        if self.outcome is not None:
            return False
        negotiation = self.negotiation
        if negotiation.outcome is not None:
            self._finish()
            return True
        if negotiation.outgoing:
            self._flush()
            return True
        if self.state != self._state:
            self._state, self.deadline = self.state, now + HANDSHAKE_TIMEOUT
        return self._read()

    def _flush(self) -> None:
        negotiation = self.negotiation
        if self.reader.halfway or self.tcp.inbox:
            negotiation.protocol_error(ProtocolError("bytes before the answer"))
            return
        messages = list(negotiation.outgoing)
        negotiation.outgoing.clear()
        try:
            for message in messages:
                self.tcp.send(message)
        except OSError as error:
            negotiation.tcp_lost(error)
        else:
            negotiation.sent()

    def _read(self) -> bool:
        negotiation = self.negotiation
        try:
            piece = self.tcp.receive(min(self.pieces, self.reader.wanted))
            if piece is None:
                return False
            if not piece:
                negotiation.tcp_lost(ConnectionResetError("closed by the peer"))
                return True
            message = self.reader.feed_untrusted(piece, negotiation.expected)
            if message is not None:
                negotiation.receive_untrusted(message)
        except ProtocolError as error:
            negotiation.protocol_error(error)
        except OSError as error:
            negotiation.tcp_lost(error)
        return True

    def due(self) -> float:
        """The time at which the CLC timer expires."""
        waits = self.outcome is None and self.negotiation.awaits_clc
        return self.deadline if waits and self._state == self.state else float("inf")

    def time_out(self, now: float) -> None:
        if self.due() <= now:
            self.deadline = float("inf")
            self.negotiation.timed_out()

    def _finish(self) -> None:
        outcome = self.outcome = self.negotiation.outcome
        stack = self.side.stack
        if isinstance(outcome, Established):
            if self.reader.halfway:
                outcome.connection.abort()
                self.outcome = Failed(OSError("bytes over TCP after the switch"))
                self.tcp.end("rst")
                return
            endpoint = stack.groups.endpoint_of(outcome.connection)
            if endpoint is None:  # the endpoint ended at the same moment
                self.tcp.end("rst")
                return
            assert isinstance(endpoint, Endpoint)
            endpoint.adopt(cast(trio.socket.SocketType, self.tcp))
            self.tcp.wake()
        elif isinstance(outcome, Failed):
            self.tcp.end("rst")


def proposal_of(client: Side) -> clc.Proposal:
    """The Proposal of a client, like that of `connecting.connect`."""
    rnic, groups = client.serving(), client.stack.groups
    proposal = clc.Proposal(
        peer_id=groups.peer_id,
        gid=rnic.gid,
        mac=rnic.mac,
        ipv4_subnet=b"\x0a\0\0\0",
        ipv4_mask_length=8,
    )
    if groups.offer is not None and rnic.routable:
        return with_v2_offer(proposal, groups.offer)
    return proposal


def admitted(proposal: clc.Proposal, server: Side) -> tuple[MemoryRnic, Terms] | FallbackReason:
    """Check a Proposal like `connecting.accept`, except that the prefix always matches."""
    rnic, groups = server.serving(), server.stack.groups
    direct = None if proposal.v2 is None else rnic.is_direct(proposal.v2.gid)
    terms = answer(proposal, groups.offer if rnic.routable else None, None, direct)
    return terms if isinstance(terms, FallbackReason) else (rnic, terms)


class Call:
    """One TCP connection between a client and a server, and its two negotiations."""

    def __init__(
        self,
        world: World,
        client: Side,
        server: Side,
        *,
        size: int = SIZE,
        proposal: clc.Proposal | None = None,
        refusal: FallbackReason | None = None,
    ) -> None:
        self.tcp = (Tcp(world.tcp_changes), Tcp(world.tcp_changes))
        self.tcp[0].peer, self.tcp[1].peer = self.tcp[1], self.tcp[0]
        ours = client.serving()
        self.proposal = proposal or proposal_of(client)
        negotiation = ClientNegotiation(host=client.stack.groups, receive_buffer=size)
        self.client = End(client, self.tcp[0], negotiation)
        self.server = End(
            server,
            self.tcp[1],
            ServerNegotiation(
                host=server.stack.groups,
                admit=lambda proposal: refusal or admitted(proposal, server),
                receive_buffer=size,
            ),
        )
        world.calls.append(self)
        negotiation.propose(ours, self.proposal)

    @property
    def ends(self) -> tuple[End, End]:
        return self.client, self.server

    @property
    def states(self) -> tuple[str, str]:
        return self.client.state, self.server.state

    @property
    def connections(self) -> tuple[Connection, Connection]:
        return self.client.connection, self.server.connection


def _no_work() -> float:
    """A clock of processor time that stands still, so that no call has to wait."""
    return 0.0


class World:
    """Stacks, the fabric, and the calls between the stacks.

    As a context manager, it frees everything at the end, and checks that nothing is left.
    """

    def __init__(self, *, announces_end: bool = True) -> None:
        self.fabric = Fabric(announces_end=announces_end)
        self.clock = Clock()
        self.work_clock: Callable[[], float] = _no_work
        self.sides: list[Side] = []
        self.calls: list[Call] = []
        self.error_log = ErrorLog()
        self.tcp_changes: deque[Tcp] = deque()

    def side(self, config: Config | None = None, **rnic: Any) -> Side:
        """Make a stack.

        rnic: parameters of `Side` and of its `MemoryRnic` objects.
        """
        settings = config or Config()
        fields = {name: getattr(settings, name) for name in settings.__slots__}
        fields |= {"rnics": (), "directory": _DIRECTORY, "spin": 0}
        side = Side(self, Config(**fields), **rnic)
        self.sides.append(side)
        return side

    def call(self, client: Side, server: Side, **options: Any) -> Call:
        """Open a TCP connection; the parameters are those of `Call`."""
        return Call(self, client, server, **options)

    def connect(self, client: Side, server: Side, **options: Any) -> Call:
        """Open a TCP connection, and run until nothing changes any more."""
        call = self.call(client, server, **options)
        self.settle()
        return call

    def step(self) -> bool:
        """Run one round: each end does one step, and one message is delivered.

        Returns False if nothing has changed.
        """
        moved = False
        for call in self.calls:
            for end in call.ends:
                moved |= end.step(self.clock.now)
        if self.tcp_changes:
            self.tcp_changes.popleft().process_change()
            moved = True
        moved |= self.fabric.deliver(1) > 0
        for side in self.sides:
            moved |= side.stack.pump.drain()
        return moved

    def settle(self) -> None:
        """Run until nothing changes any more."""
        for _ in range(10_000):
            if not self.step():
                return
        raise AssertionError("this never ends")

    def until(self, condition: Callable[[], object]) -> None:
        """Run until ``condition()`` is true."""
        for _ in range(10_000):
            if condition():
                return
            assert self.step(), f"nothing changes any more in {[c.states for c in self.calls]}"
        raise AssertionError("this never ends")

    def next_deadline(self) -> float:
        """The time at which the next timer expires, in seconds of the clock."""
        timers = (side.stack.timers.next_deadline() for side in self.sides)
        ends = (end.due() for call in self.calls for end in call.ends)
        return min(itertools.chain(timers, ends), default=float("inf"))

    def pass_time(self, seconds: float) -> None:
        """Let time pass, in steps from timer to timer."""
        end = self.clock.now + seconds
        while True:
            self.settle()
            due = self.next_deadline()
            self.clock.now = min(max(due, self.clock.now), end)
            if due > end:
                return
            for side in self.sides:
                side.stack.timers.run_due()
            for call in self.calls:
                for each in call.ends:
                    each.time_out(self.clock.now)

    def pass_time_until(self, condition: Callable[[], object]) -> None:
        """Let time pass, from timer to timer, until ``condition()`` is true."""
        for _ in range(1000):
            if condition():
                return
            self.pass_time(max(0.0, self.next_deadline() - self.clock.now))
        raise AssertionError("the condition did not become true within 1000 timers")

    def finish(self) -> float:
        """Let time pass until every call has its outcome.  Returns the passed seconds."""
        start = self.clock.now
        self.settle()
        while any(end.outcome is None for call in self.calls for end in call.ends):
            due = self.next_deadline()
            assert due < float("inf"), [call.states for call in self.calls]
            self.pass_time(max(0.0, due - self.clock.now))
            assert self.clock.now - start < 120, [call.states for call in self.calls]
        return self.clock.now - start

    def close(self) -> None:
        """Free everything, and check that nothing is left."""
        for side in self.sides:
            side.free()
            while side.stack.timers.next_deadline() <= self.clock.now:
                side.stack.timers.run_due()  # runs ends that are still queued
        for side in self.sides:
            assert not side.groups
            assert not side.connections
            assert side.stack.timers.next_deadline() == float("inf")
        assert not any(self.fabric.held.values()), self.fabric.held
        self.calls.clear()

    def __enter__(self) -> Self:
        self.error_log.__enter__()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.error_log.__exit__()
        if kind is None:
            self.close()
            records = [record.getMessage() for record in self.error_log.records]
            assert not records, records
            return
        for side in self.sides:
            with contextlib.suppress(Exception):  # the first error is being raised already
                side.stack.rnic_set.close()


def exchange(world: World, call: Call, data: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    """Send ``data[0]`` from the client and ``data[1]`` from the server.

    Returns the bytes that the client and the server have received.
    """
    received = [b"", b""]
    for connection, piece in zip(call.connections, data, strict=True):
        connection.send(memoryview(piece))
    world.settle()
    for place, connection in enumerate(call.connections):
        received[place] = connection.receiver.receive(1 << 16)
    return received[0], received[1]
