"""Memory models, and a search for all executions of two threads that a model allows.

A thread is code that accesses memory through a `Trace`, which records each access as an event and
lets the explorer choose what a load returns.  `executions` runs the threads with every choice, and
yields the results that are consistent with a memory model, given as axioms over events:

* `c11`: C11's atomics in the repaired form RC11 (Lahav, Vafeiadis, Kang, Hur and Dreyer, "Repairing
  sequential consistency in C/C++11", PLDI 2017), without sequentially consistent accesses: an
  exchange counts as acquire and release only.  Two accesses to plain memory that are not ordered by
  happens-before are a data race, which counts as a wrong result.
* `arm64`: ARM64 as in Arm's "aarch64.cat" (Deacon; Pulte and others, "Simplifying ARM concurrency",
  POPL 2018).  Dependencies are ignored, so this model allows more than the processor does.
* `x86`: total store order (Sewell and others, "x86-TSO", CACM 2010).

The models follow their papers; no processor was measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

INITIAL = -1
"""The thread number of the stores that set initial values."""
Thread = Callable[["Trace"], Any]


@dataclass(frozen=True, slots=True)
class Event:
    """One access of a thread.

    Attributes:
      kind: "R", "W", "F" for a full fence, "A" and "U" for acquiring and releasing a lock that no
        other thread uses.
      order: "plain", "relaxed", or "ordered": acquire for a load and release for a store.
      atomic: True for a "W" that forms an exchange with the "R" before it.
    """

    thread: int
    kind: str
    place: str
    value: Any
    order: str
    atomic: bool = False


class _Undecided(Exception):
    """A load has no chosen value; the search has to try every value of the place."""


class Trace:
    """Records the accesses of a thread.

    Args:
      thread: the number of the thread.
      choices: the values that its first loads return.
    """

    def __init__(self, thread: int, choices: Sequence[Any]) -> None:
        self.events: list[Event] = []
        self._thread = thread
        self._choices = list(choices)

    def load(self, place: str, order: str = "plain") -> Any:
        if not self._choices:
            raise _Undecided(place)
        value = self._choices.pop(0)
        self.events.append(Event(self._thread, "R", place, value, order))
        return value

    def store(self, place: str, value: Any, order: str = "plain", *, atomic: bool = False) -> None:
        self.events.append(Event(self._thread, "W", place, value, order, atomic))

    def exchange(self, place: str, value: Any) -> None:
        self.load(place, "ordered")
        self.store(place, value, "ordered", atomic=True)

    def fence(self) -> None:
        self.events.append(Event(self._thread, "F", "", None, "ordered"))

    def lock(self) -> None:
        """Acquire and release a lock of this thread's own."""
        self.events.append(Event(self._thread, "A", "", None, "ordered"))
        self.events.append(Event(self._thread, "U", "", None, "ordered"))


Run = tuple[list[Event], Any]


def _runs(
    number: int, thread: Thread, values: dict[str, list[Any]], most: int = 4000
) -> Iterator[Run]:
    """Yield every run of a thread in which each load returns some value that its place ever has."""
    open_choices: list[list[Any]] = [[]]
    while open_choices:
        choices = open_choices.pop()
        trace = Trace(number, choices)
        try:
            result = thread(trace)
        except _Undecided as undecided:
            place = str(undecided)
            open_choices += [[*choices, value] for value in values.setdefault(place, [0])]
            continue
        most -= 1
        assert most > 0, "too many runs for an exhaustive search"
        yield trace.events, result


def executions(
    threads: Sequence[Thread], initial: dict[str, Any], consistent: Callable[[Execution], bool]
) -> Iterator[tuple[Any, ...]]:
    """Yield the threads' results of each execution that a model allows."""
    values = {place: [value] for place, value in initial.items()}
    while True:
        runs = [list(_runs(number, thread, values)) for number, thread in enumerate(threads)]
        grown = False
        for events, _ in itertools.chain(*runs):
            for event in events:
                known = values.setdefault(event.place, [0])
                if event.kind == "W" and event.value not in known:
                    known.append(event.value)
                    grown = True
        if not grown:
            break
    for chosen in itertools.product(*runs):
        first = [
            Event(INITIAL, "W", place, values[place][0], "relaxed")
            for place in sorted({e.place for events, _ in chosen for e in events if e.place})
        ]
        events = [*first, *itertools.chain.from_iterable(events for events, _ in chosen)]
        for execution in _candidates(events):
            if consistent(execution):
                yield tuple(result for _, result in chosen)


class Relation:
    """A relation between events, as a bit mask of successors for each."""

    def __init__(self, size: int, pairs: Iterator[tuple[int, int]] | None = None) -> None:
        self.rows = [0] * size
        for a, b in pairs or ():
            self.rows[a] |= 1 << b

    def __or__(self, other: Relation) -> Relation:
        both = Relation(len(self.rows))
        both.rows = [a | b for a, b in zip(self.rows, other.rows, strict=True)]
        return both

    def then(self, other: Relation) -> Relation:
        """Return the composition with another relation."""
        joined = Relation(len(self.rows))
        for a, row in enumerate(self.rows):
            for b, further in enumerate(other.rows):
                if row >> b & 1:
                    joined.rows[a] |= further
        return joined

    def closed(self) -> Relation:
        """Return the transitive closure."""
        whole = Relation(len(self.rows))
        whole.rows = list(self.rows)
        for middle in range(len(whole.rows)):
            for a, row in enumerate(whole.rows):
                if row >> middle & 1:
                    whole.rows[a] |= whole.rows[middle]
        return whole

    def is_acyclic(self) -> bool:
        return not any(row >> a & 1 for a, row in enumerate(self.closed().rows))

    def has(self, a: int, b: int) -> bool:
        return bool(self.rows[a] >> b & 1)


class Execution:
    """Events with the store that each load reads (rf) and the order of stores (co)."""

    def __init__(self, events: list[Event], rf: dict[int, int], co: list[list[int]]) -> None:
        self.events = events
        size = len(events)
        rank = {event: place for order in co for place, event in enumerate(order)}
        self.po = Relation(
            size,
            (
                (a, b)
                for a, b in itertools.combinations(range(size), 2)
                if events[a].thread == events[b].thread != INITIAL
            ),
        )
        self.rf = Relation(size, ((write, read) for read, write in rf.items()))
        self.co = Relation(
            size, (pair for order in co for pair in itertools.combinations(order, 2))
        )
        self.fr = Relation(
            size,
            (
                (read, later)
                for read, write in rf.items()
                for order in co
                if write in order
                for later in order[rank[write] + 1 :]
            ),
        )

    def external(self, relation: Relation) -> Relation:
        events, rows = self.events, enumerate(relation.rows)
        return Relation(
            len(events),
            (
                (a, b)
                for a, row in rows
                for b in range(len(events))
                if row >> b & 1 and events[a].thread != events[b].thread
            ),
        )

    def ordered(self, rule: Callable[[int, int], bool]) -> Relation:
        """The pairs in program order for which ``rule`` is true."""
        size = len(self.events)
        pairs = itertools.combinations(range(size), 2)
        return Relation(size, ((a, b) for a, b in pairs if self.po.has(a, b) and rule(a, b)))

    def fenced(self, a: int, b: int) -> bool:
        return any(self.events[each].kind == "F" for each in range(a + 1, b))


def _candidates(events: list[Event]) -> Iterator[Execution]:
    writes: dict[str, list[int]] = {}
    for number, event in enumerate(events):
        if event.kind == "W":
            writes.setdefault(event.place, []).append(number)
    reads = [number for number, event in enumerate(events) if event.kind == "R"]
    sources = [
        [write for write in writes[events[read].place] if events[write].value == events[read].value]
        for read in reads
    ]
    if not all(sources):
        return
    # Check coherence for each place first; few combinations remain.
    ways: list[list[tuple[dict[int, int], tuple[int, ...]]]] = []
    for place, numbers in writes.items():
        here = [at for at, read in enumerate(reads) if events[read].place == place]
        ways.append(
            [
                (rf, order)
                for order in _merged(events, numbers)
                for chosen in itertools.product(*(sources[at] for at in here))
                for rf in [dict(zip((reads[at] for at in here), chosen, strict=True))]
                if _is_coherent(events, rf, order)
            ]
        )
    for combined in itertools.product(*ways):
        whole = {read: write for rf, _ in combined for read, write in rf.items()}
        yield Execution(events, whole, [list(order) for _, order in combined])


def _is_coherent(events: list[Event], rf: dict[int, int], order: tuple[int, ...]) -> bool:
    """The accesses to one place are sequentially consistent, and its exchanges are atomic."""
    rank = {write: 2 * number for number, write in enumerate(order)}
    for write in order:
        if events[write].atomic and rank[write] != rank[rf[write - 1]] + 2:
            return False
    # A load comes after the store that it reads, and before the next store.
    at = rank | {read: rank[write] + 1 for read, write in rf.items()}
    return all(
        at[a] <= at[b]
        for a, b in itertools.combinations(sorted(at), 2)
        if events[a].thread == events[b].thread
    ) and all(
        at[write] > at[read]
        for read in rf
        for write in order
        if read < write and events[read].thread == events[write].thread
    )


def _merged(events: list[Event], numbers: list[int]) -> Iterator[tuple[int, ...]]:
    """Yield the possible orders of stores to one place.

    The initial store comes first, and stores of one thread keep their order.
    """
    for order in itertools.permutations(numbers):
        if all(
            a < b
            or (events[a].thread != events[b].thread != INITIAL and events[b].thread != INITIAL)
            for a, b in itertools.combinations(order, 2)
        ):
            yield order


# --- the models ------------------------------------------------------------------------------


def x86(execution: Execution) -> bool:
    """Total store order: only a store and a later load may be reordered."""
    events = execution.events

    def kept(a: int, b: int) -> bool:
        reordered = events[a].kind == "W" and events[b].kind == "R"
        return not reordered or events[a].atomic or execution.fenced(a, b)

    # An exchange, and so acquiring a lock, is a full fence.
    locked = execution.ordered(
        lambda a, b: any(
            events[each].atomic or events[each].kind == "A" for each in range(a + 1, b)
        )
    )
    rfe = execution.external(execution.rf)
    order = execution.ordered(kept) | locked | rfe | execution.co | execution.fr
    return order.is_acyclic()


def arm64(execution: Execution) -> bool:
    """The "external" axiom: ordered-before is acyclic."""
    events = execution.events

    def is_ordered(number: int, kinds: str) -> bool:
        return events[number].kind in kinds and events[number].order == "ordered"

    def kept(a: int, b: int) -> bool:
        return (
            execution.fenced(a, b)
            or is_ordered(a, "RA")
            or is_ordered(b, "WU")
            or (is_ordered(a, "WU") and is_ordered(b, "RA"))
        )

    external = execution.external(execution.rf | execution.co | execution.fr)
    return (execution.ordered(kept) | external).is_acyclic()


class DataRace(AssertionError):
    """Two accesses to plain memory are not ordered by happens-before."""


def c11(execution: Execution) -> bool:
    """RC11.  Raises DataRace if a consistent execution has one."""
    events, size = execution.events, len(execution.events)
    sb = execution.po | Relation(
        size,
        (
            (a, b)
            for a in range(size)
            for b in range(size)
            if events[a].thread == INITIAL != events[b].thread
        ),
    )
    if not (sb | execution.rf).is_acyclic():
        return False
    fences = [number for number, event in enumerate(events) if event.kind == "F"]
    hb = (sb | _synchronizes(execution, fences)).closed()
    eco = (execution.rf | execution.co | execution.fr).closed()
    if any(hb.has(a, a) or hb.then(eco).has(a, a) for a in range(size)):
        return False
    elsewhere = execution.ordered(lambda a, b: events[a].place != events[b].place)
    same = Relation(
        size,
        (
            (a, b)
            for a in range(size)
            for b in range(size)
            if hb.has(a, b) and events[a].place == events[b].place != ""
        ),
    )
    scb = sb | elsewhere.then(hb).then(elsewhere) | same | execution.co | execution.fr
    itself = Relation(size, ((a, a) for a in range(size)))
    maybe = hb | itself
    between = maybe.then(scb).then(maybe) | hb | hb.then(eco).then(hb)
    psc = Relation(size, ((a, b) for a in fences for b in fences if between.has(a, b)))
    if not psc.is_acyclic():
        return False
    for a, b in itertools.combinations(range(size), 2):
        one, other = events[a], events[b]
        if (
            one.place == other.place != ""
            and one.order == other.order == "plain"
            and one.thread != other.thread
            and "W" in (one.kind, other.kind)
            and not (hb.has(a, b) or hb.has(b, a))
        ):
            raise DataRace(f"{one} and {other}")
    return True


def _synchronizes(execution: Execution, fences: list[int]) -> Relation:
    """Synchronizes-with: a release, a load of what it stored, and an acquire."""
    events, size = execution.events, len(execution.events)
    sources: Relation = Relation(size)
    for write, event in enumerate(events):
        if event.kind != "W" or event.order == "plain" or event.thread == INITIAL:
            continue
        heads = [fence for fence in fences if execution.po.has(fence, write)]
        if event.order == "ordered":
            heads.append(write)
        for head in heads:
            sources.rows[head] |= 1 << write
    # An exchange that reads from a release sequence continues the sequence.
    links = Relation(
        size,
        (
            (write, number)
            for number, event in enumerate(events)
            if event.atomic
            for write in range(size)
            if execution.rf.has(write, number - 1)
        ),
    ).closed()
    reading = (sources | sources.then(links)).then(execution.rf)
    found = Relation(size)
    for head, row in enumerate(reading.rows):
        for read in range(size):
            if not row >> read & 1 or events[read].order == "plain":
                continue
            if events[read].order == "ordered":
                found.rows[head] |= 1 << read
            for fence in fences:
                if execution.po.has(read, fence):
                    found.rows[head] |= 1 << fence
    return found
