"""Two connection cores with real RMBEs under random schedules of everything that ends them.

    python -m tests.campaigns.endings --cases N --seed S [--case K]

A scheduler of its own: each step is one of what could happen next, sends, urgent sends, reads,
half closes, closes and aborts on either side, posted work that arrives or completes, merged
messages, TCP resets under way. Most applications have tasks that wait as those of a stream do: one
that could not send all, or found nothing to receive, does nothing until its connection calls it.
With --case one schedule is run again and told step by step.

Kinds of schedules:

- ``polite``: no side aborts, and a side that closes has read to the end. Every byte arrives, both
  end by FIN, no timer fires.
- ``wild``: the applications half-close, close and abort at any time. Both reach CLOSED without
  any timer.
- ``early``: as wild, with messages that overtake the end of the rendezvous (3.5.2.4). A timer may
  be needed: an abort can meet a side that has nowhere to answer.
- ``faults``: as early, and timers fire at will, links are lost at different times for the two,
  TCP is reset from outside, the peer gives our RMBE to another (4.4.2), user timeouts,
  violations of the protocol.

Always: both reach CLOSED; no byte is lost, duplicated or reordered, and at the end of the stream
none is missing; no task waits for what cannot happen any more; the urgent byte is the newest one
sent that has arrived, at most once, and in the stream or out of it as asked; no write meets an
element that was given back in agreement, nor the one beside it, and elements given back are zero;
nothing follows C or A; TCP ends once.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from dataclasses import dataclass

from tests.campaigns._endings_world import Broken, World
from tests.campaigns._options import parse
from tests.datapath.datapath_pair import Cdc
from trio_smc._base.errors import ProtocolError
from trio_smc.datapath.connection import Connection
from trio_smc.states.tables import CONNECTION
from trio_smc.wire.cdc import ABNORMAL_CLOSE, CONNECTION_CLOSED

KINDS = ("polite", "wild", "early", "faults")
_FINAL = ABNORMAL_CLOSE | CONNECTION_CLOSED
_TEXT = random.Random("text").randbytes(1 << 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a campaign.

    ``untaken`` are pairs of state and event that act but never did; ``half_closed`` applications
    waited to send while the peer had ended its side.
    """

    cases: int
    kinds: dict[str, int]
    received: int
    urgent: int
    timers: int
    half_closed: int
    untaken: list[str]


class App:
    """One application: what it sent, what it read, and what the other one sent."""

    def __init__(self, name: str, connection: Connection, rng: random.Random, inline: bool) -> None:
        self.name = name
        self.it = connection
        self.rng = rng
        self.inline = connection.receiver.urgent_inline = inline
        self.peer: App = self
        self.start = rng.randrange(1 << 15)  # of its text
        self.marks: list[int] = []  # counts behind its urgent bytes
        self.sent = 0
        self.urgent_left = 0  # bytes of an urgent send under way
        self.position = 0  # in the peer's text
        self.fetched = 0  # the last mark of the peer whose byte was received
        self.urgent = 0
        self.budget = rng.choice((0, 1, 30, 200, 1000))  # bytes to send
        self.ended = False  # closed or aborted
        self.parks = rng.random() < 0.8
        self.parked: set[str] = set()  # kinds of tasks that wait
        self.half_closed = False  # True after a wait to send while the peer's side had ended

    def text(self, start: int, end: int) -> bytes:
        return _TEXT[self.start + start : self.start + end]

    # --- tasks that wait ---------------------------------------------------------------------

    def park(self, kind: str) -> None:
        """A task waits until the connection calls its ``on_{kind}``."""
        if self.parks:
            self.parked.add(kind)
            setattr(self.it, f"on_{kind}", lambda: self.parked.remove(kind))

    def check_waits(self) -> None:
        """No task waits for what cannot happen any more, or is there already."""
        it, receiver = self.it, self.it.receiver
        self.half_closed = self.half_closed or ("writable" in self.parked and receiver.peer_done)
        over = {
            "writable": not it.sender.sendable,
            # Before `established` there is no stream, and nothing is shown.
            "readable": receiver.open
            and (receiver.readable > 0 or receiver.at_eof or receiver.error is not None),
            "urgent": receiver.urgent_over,
        }
        for kind in sorted(self.parked):
            if over[kind]:
                raise Broken(f"{self.name} {it.state}: a task waits until it is {kind}")

    # --- what it may do; each returns a word for the trace -----------------------------------

    def send(self, largest: int) -> str:
        """Ordinary data, or more of the urgent data under way."""
        if "writable" in self.parked:
            return ""
        if self.urgent_left:
            return self.go_on_urgently()
        size = min(self.rng.randint(1, largest), self.budget - self.sent)
        if size <= 0 or self.it.write_closed:
            return ""
        data: bytes | bytearray = self.text(self.sent, self.sent + size)
        if self.rng.random() < 0.3:
            data = bytearray(data)
        sent = self.account(self.it.send(memoryview(data)))
        if sent < size and self.it.error is None:
            self.park("writable")
        return f"sends {sent} of {size}"

    def send_urgent(self, largest: int) -> str:
        size = min(self.rng.randint(1, largest), self.budget - self.sent)
        if "writable" in self.parked or self.urgent_left or size <= 0 or self.it.write_closed:
            return ""
        self.urgent_left = size
        return self.go_on_urgently()

    def go_on_urgently(self) -> str:
        if self.it.write_closed:
            return ""
        if self.rng.random() < 0.05:
            self.urgent_left = 0
            self.it.sender.withdraw_urgent()
            return "withdraws urgent data"
        data = self.text(self.sent, self.sent + self.urgent_left)
        sent = self.account(self.it.send_urgent(memoryview(data)))
        self.urgent_left -= sent
        if sent and not self.urgent_left:
            self.marks.append(self.sent)
            return f"sends {sent}, urgent: mark {self.sent}"
        if self.it.error is None:
            self.park("writable")
        return f"sends {sent} of urgent data"

    def account(self, sent: int) -> int:
        if self.it.sender.borrowed:
            self.it.sender.keep_copies()
        self.sent += sent
        if self.it.got_closed:
            self.sent = self.it.sender.bytes_sent  # the rest was dropped: no reader is left
        if self.sent != self.it.sender.bytes_sent:
            raise Broken(
                f"{self.name}: {self.it.sender.bytes_sent} bytes sent, {self.sent} accepted"
            )
        return sent

    def receive(self, largest: int) -> str:
        if "readable" in self.parked:
            return ""
        size = self.rng.randint(1, largest)
        seen = self.it.receiver.peek(size) if self.rng.random() < 0.2 else None
        if self.rng.random() < 0.5:
            got = self.it.receiver.receive(size)
        else:
            buffer = bytearray(size)
            got = bytes(buffer[: self.it.receiver.receive_into(buffer)])
        if seen is not None and seen != got:
            raise Broken(f"{self.name}: peek shows {seen!r}, receive {got!r}")
        wanted = self.expected(len(got))
        if got != wanted:
            raise Broken(f"{self.name}: receives {got!r} instead of {wanted!r}")
        if self.it.receiver.at_eof and not self.it.receiver.peer_done:
            if self.it.error is None:
                raise Broken(f"{self.name}: an end that the peer has not sent")
        elif self.it.receiver.at_eof:
            self.expected(0)
            if self.position != self.peer.sent:
                raise Broken(f"{self.name}: the end at {self.position} of {self.peer.sent}")
        elif not got:
            self.park("readable")
        return f"receives {len(got)}"

    def expected(self, length: int) -> bytes:
        """The next bytes of the peer's stream, and its urgent ones skipped."""
        pieces: list[bytes] = []
        while True:
            while not self.inline and self.position + 1 in self.peer.marks:
                self.position += 1
            if not length:
                return b"".join(pieces)
            end = self.position + length
            if not self.inline:
                end = min([end, *(m - 1 for m in self.peer.marks if m > self.position)])
            pieces.append(self.peer.text(self.position, end))
            length -= end - self.position
            self.position = end

    def receive_urgent(self) -> str:
        if "urgent" in self.parked:
            return ""
        known = self.it.receiver.urgent
        byte = self.it.receiver.receive_urgent()
        if (byte is not None) != (known == "present" and not self.inline):
            raise Broken(f"{self.name}: urgent data is {known}, and the byte {byte}")
        if byte is None:
            if not self.it.receiver.urgent_over and known == "none":
                self.park("urgent")
            return ""
        mark = max(m for m in self.peer.marks if m <= self.it.receiver.bytes_received)
        if mark <= self.fetched or byte != self.peer.text(mark - 1, mark)[0]:
            raise Broken(f"{self.name}: urgent byte {byte}, mark {mark}, before: {self.fetched}")
        self.fetched = mark
        self.urgent += 1
        return f"receives the urgent byte of mark {mark}"

    def shut_down(self) -> str:
        self.it.shutdown_write()
        return "shuts down"

    def close(self) -> str:
        self.ended = True
        self.it.close()
        return "closes"

    def abort(self) -> str:
        self.ended = True
        self.it.abort()
        return "aborts"


class Schedule:
    """One case."""

    def __init__(self, rng: random.Random, trace: list[str] | None = None) -> None:
        self.rng = rng
        self.kind = rng.choice(KINDS)
        self.world = World(
            (int(2 ** rng.uniform(2.4, 9)), int(2 ** rng.uniform(2.4, 9))),
            (rng.random() < 0.5, rng.random() < 0.5),
            chunks=rng.random() < 0.7,
            copy_limit=rng.choice((0, 16, 1000)),
            merge=rng.random() < 0.3,
            early=self.kind in ("early", "faults") and rng.random() < 0.5,
        )
        self.apps = tuple(
            App(host.name, connection, rng, rng.random() < 0.3)
            for host, connection in zip(self.world.hosts, self.world.connections, strict=True)
        )
        for app, peer in (self.apps, self.apps[::-1]):
            app.peer = peer
            app.budget = min(app.budget, 8 * peer.it.rmbe.usable)  # many wraps, few steps
        self.largest = max(rng.choice((3, 50, 400)), *(app.budget // 12 for app in self.apps))
        for link in self.world.links:
            if rng.random() < 0.3:
                link.slots = rng.randint(1, 4)
            if rng.random() < 0.3:
                link.work = rng.randint(3, 9)
            if rng.random() < 0.3:
                link.room = rng.randint(1, 300)
        for app in self.apps:
            if rng.random() < 0.1:
                app.it.limit_unacknowledged(rng.randint(1, 50))
        self.fired = 0
        self.trace = trace
        for host in self.world.hosts:
            host.trace = trace

    def run(self) -> None:
        """Run to the end; Broken when a promise fails."""
        try:
            if self.kind == "polite":
                self.run_polite()
            else:
                self.run_wild()
            self.check_end()
        finally:
            self.world.close()

    # --- kinds -------------------------------------------------------------------------------

    def run_polite(self) -> None:
        for step in range(1 << 20):
            self.network_or_app()
            for app in self.apps:
                if app.sent == app.budget and not app.urgent_left and not app.it.write_closed:
                    self.note(app, app.shut_down())
                if app.it.receiver.at_eof and app.it.write_closed and not app.ended:
                    self.note(app, app.close())
            if all(app.ended for app in self.apps):
                self.world.settle()
                return
            if step % 64 == 63:
                self.check_progress()
        raise Broken("it never ends")

    def check_progress(self) -> None:
        """No side is stuck while the other end reads and the links move."""

        def standing() -> object:
            return [(app.sent, app.position, app.it.state, app.ended) for app in self.apps]

        before = standing()
        for _ in range(3):
            self.world.settle()
            for app in self.apps:
                if not app.ended:
                    app.send(self.largest)
                    app.receive(1 << 12)
        self.world.settle()
        idle = all(app.sent == app.budget and app.position == app.peer.sent for app in self.apps)
        if standing() == before and not idle:
            raise Broken(f"stuck: {before}")

    def run_wild(self) -> None:
        patience = self.rng.choice((20, 60, 200))
        while not all(app.ended for app in self.apps):
            self.network_or_app()
            app = self.rng.choice(self.apps)
            if not app.ended and self.rng.randrange(patience) == 0:
                self.note(app, self.rng.choice((app.shut_down, app.close, app.close, app.abort))())
            elif app.ended and self.rng.randrange(patience) == 0:
                self.note(app, app.abort())  # after a close that takes too long
            if self.kind == "faults" and self.rng.randrange(patience) == 0:
                self.fault()
        for _ in range(self.rng.randrange(20)):
            self.network()
        self.world.settle()
        if self.kind in ("early", "faults"):
            while any(self.world.fire(side) for side in (0, 1)):
                self.fired += 1
                self.world.settle()

    # --- steps -------------------------------------------------------------------------------

    def network_or_app(self) -> None:
        if self.rng.random() < 0.5:
            self.network()
            return
        app = self.rng.choice(self.apps)
        if app.ended:
            return
        doing = self.rng.random()
        try:
            if doing < 0.35:
                text = app.send(self.largest)
            elif doing < 0.5:
                text = app.send_urgent(self.largest)
            elif doing < 0.62:
                text = app.receive_urgent()
            else:
                text = app.receive(self.largest)
        except OSError as error:
            if self.kind == "polite":
                raise
            text = f"gets {error!r}"
        self.note(app, text)

    def network(self) -> None:
        side = self.rng.randrange(2)
        world, link = self.world, self.world.links[side]
        doing = int(self.rng.random() * 12)
        if doing < 5:
            link.deliver(1 + doing)
        elif doing < 9:
            link.complete(doing - 4)
        elif doing == 9:
            world.flush()
        elif doing == 10:
            world.deliver_reset(side)
        elif not world.established[1] and self.rng.random() < 0.3:
            world.establish(1)
        world.notice_loss(side)
        self.check_waits()

    def fault(self) -> None:
        side = self.rng.randrange(2)
        world, it = self.world, self.world.connections[side]
        doing = self.rng.randrange(6 if self.fired else 9)
        if doing < 2 or doing > 5:
            self.fired += world.fire(side)
        elif doing == 2:
            self.note(self.apps[side], "finds the links lost")
            world.lose_link()
        elif doing == 3:
            world.hosts[side].reset_coming = True
        elif doing == 4:
            self.note(self.apps[side], "sees its element of the peer given to another")
            it.rmbe_conflict()
        elif self.rng.random() < 0.5:
            self.note(self.apps[side], "has waited too long")
            it.user_timeout()
        else:
            self.note(self.apps[side], "finds the protocol broken")
            it.protocol_error(ProtocolError("data on the TCP connection"))

    def note(self, app: App, text: str) -> None:
        """Trace a step of an application, and check that no task waits in vain behind it."""
        self.check_waits()
        if self.trace is not None and text:
            self.trace.append(f"{app.name} {app.it.state}: {text}")

    # --- checks ------------------------------------------------------------------------------

    def check_waits(self) -> None:
        for app in self.apps:
            app.check_waits()

    def check_end(self) -> None:
        world = self.world
        self.check_waits()
        for app, host, link in zip(self.apps, world.hosts, world.links, strict=True):
            if app.it.state != "CLOSED" or host.calls.count("closed") != 1:
                raise Broken(f"{app.name} ends in {app.it.state}: {host.calls}")
            ends = [call for call in host.calls if call.endswith("_tcp")]
            if len(ends) != 1 or host.timer is not None:
                raise Broken(f"{app.name}: {ends}, timer {host.timer}")
            messages = [entry for entry in link.log if isinstance(entry, Cdc)]
            last = [i for i, entry in enumerate(messages) if entry.endings & _FINAL]
            if last and (last != [len(messages) - 1] or link.log[-1] is not messages[-1]):
                raise Broken(f"{app.name}: something follows C or A")
            if self.kind == "polite":
                if app.it.error is not None or ends != ["close_tcp"]:
                    raise Broken(f"{app.name}: {app.it.error}, {ends} at an ordinary end")
                app.expected(0)
                if app.sent != app.budget or app.position != app.peer.sent:
                    raise Broken(f"{app.name}: sent {app.sent}, received {app.position}")
        world.check_neighbours()


def run_case(seed: int, case: int, trace: list[str] | None = None) -> Schedule:
    """One schedule; returns it when it has kept all promises."""
    schedule = Schedule(random.Random(f"{seed}/{case}"), trace)
    schedule.run()
    return schedule


def run(cases: int, seed: int) -> Result:
    """Run ``cases`` schedules; the exception names the one that failed."""
    kinds: Counter[str] = Counter()
    received = urgent = timers = half_closed = 0
    taken: set[tuple[str, str]] = set()
    for case in range(cases):
        try:
            schedule = run_case(seed, case)
        except Exception as error:
            error.add_note(f"replay: python -m tests.campaigns.endings --seed {seed} --case {case}")
            raise
        kinds[schedule.kind] += 1
        timers += schedule.fired > 0
        for app, host in zip(schedule.apps, schedule.world.hosts, strict=True):
            received += app.position
            urgent += app.urgent
            half_closed += app.half_closed
            taken.update((old, event) for old, _, event in host.states)
    pairs = {
        pair for pair, row in CONNECTION.edges.items() if any(not edge.internal for edge in row)
    }
    return Result(
        cases=cases,
        kinds=dict(kinds),
        received=received,
        urgent=urgent,
        timers=timers,
        half_closed=half_closed,
        untaken=sorted(f"{state} {event}" for state, event in pairs - taken),
    )


def _replay(seed: int, case: int) -> int:
    trace: list[str] = []
    try:
        schedule = run_case(seed, case, trace)
    finally:
        print("\n".join(trace))
    print(f"case {case} of seed {seed}, {schedule.kind}: all promises kept")
    return 0


def main() -> int:
    """Return the exit code."""
    options = parse(__doc__, cases=20_000, replay="case")
    seed = options.seed
    if options.case is not None:
        return _replay(seed, options.case)
    start = time.perf_counter()
    result = run(options.cases, seed)
    print(
        f"endings: {result.cases} schedules {result.kinds}, {result.received} bytes and "
        f"{result.urgent} urgent bytes received, timers fired in {result.timers}, "
        f"{result.half_closed} writers waited behind a half close, seed {seed}, "
        f"{time.perf_counter() - start:.1f} s"
    )
    print(f"transitions that never occurred: {', '.join(result.untaken) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
