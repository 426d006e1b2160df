"""Two-ended programs over one connection: what they consist of, and how hypothesis draws them."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from hypothesis import strategies as st

__all__ = [
    "ENDS",
    "EXITS",
    "LARGE",
    "Kind",
    "Operation",
    "Program",
    "Step",
    "programs",
    "sends",
    "text",
]

ENDS: Final = ("server", "client")
LARGE: Final = 1_500_000
"""Bytes of a send that waits for the reader: more than the buffers of both sides hold."""
_SIZES: Final = (1, 10, 1000, 3000)
_TEXT_SIZE: Final = 1 << 22

Operation = tuple[str, int]
"""Name and argument; the names are the methods of `_program_end.Connection`."""
Kind = Literal["usual", "full", "connecting"]
"""The beginning of a program: a connection, one with small buffers (so that a send of `LARGE` bytes
waits), or a listener and a new socket, so that the program itself connects and accepts."""
_KINDS: Final[tuple[Kind, ...]] = ("usual", "usual", "usual", "full")
STYLES: Final = (
    ("socket", "socket"),
    ("stream", "stream"),
    ("stream", "socket"),
    ("socket", "stream"),
    ("tls", "tls"),
)

PROCESS_STEPS: Final = ("signal", "exit", "stop", "continue")
"""Steps that need processes of their own."""
EXITS: Final = ("return", "raise", "os._exit", "SystemExit")
SIGNALS: Final = (9, 15, 2, 1)


@dataclass(frozen=True, slots=True)
class Step:
    """One task of one end, or one action on the process of that end.

    Attributes:
      end: 0 is the server, 1 the client.
      operations: performed one after the other, also after one that fails.  An action on the
        process, or the end's tasks (`cancel`, `pause`), is alone.
    """

    end: int
    operations: tuple[Operation, ...]

    @property
    def action(self) -> str:
        """The name of the first operation."""
        return self.operations[0][0]

    def __str__(self) -> str:
        return f"{ENDS[self.end]}: " + ", ".join(
            name if argument == 0 else f"{name} {argument}" for name, argument in self.operations
        )


@dataclass(frozen=True, slots=True)
class Program:
    """A connection and what its two ends do with it.

    Attributes:
      styles: of the server and the client: "socket", "stream" (`trio.SocketStream`), or "tls".
      kind: what it begins with.
      steps: in this order; each begins when everything that came of the one before has arrived.
    """

    styles: tuple[str, str]
    kind: Kind
    steps: tuple[Step, ...]

    @property
    def needs_processes(self) -> bool:
        """True if a process is stopped or ends."""
        return any(step.action in PROCESS_STEPS for step in self.steps)

    def readers(self, end: int) -> int:
        """The number of tasks of this end that read: the bytes of a long send go to any of them."""
        return sum(
            step.end == end and any(name in (*_READS, "read_all") for name, _ in step.operations)
            for step in self.steps
        )

    def as_data(self) -> list[Any]:
        """The program as lists, for JSON and `from_data`."""
        return [
            list(self.styles),
            self.kind,
            [[step.end, [list(each) for each in step.operations]] for step in self.steps],
        ]

    @classmethod
    def from_data(cls, data: list[Any]) -> Program:
        """The program of which `as_data` is ``data``."""
        styles, kind, steps = data
        return cls(
            (styles[0], styles[1]),
            kind,
            tuple(Step(end, tuple((name, arg) for name, arg in ops)) for end, ops in steps),
        )

    def __str__(self) -> str:
        lines = [f"{self.kind}, server {self.styles[0]}, client {self.styles[1]}"]
        lines += [f"  {number} {step}" for number, step in enumerate(self.steps)]
        return "\n".join(lines)


@functools.cache
def _text() -> bytes:
    return random.Random(7609).randbytes(_TEXT_SIZE)


def text(step: int, position: int, size: int) -> bytes:
    """The bytes that operation number ``position`` of this step sends."""
    start = ((step * 16 + position) * 4099) % (_TEXT_SIZE - LARGE)
    return _text()[start : start + size]


_size = st.sampled_from(_SIZES)
_nothing = st.just(0)
_COMMON: Final = {
    "send": _size,
    "recv": _size,
    "read_all": _nothing,
    "close": _nothing,
    "shut_wr": _nothing,
}
_OF_SOCKETS: Final = {
    "shut_rd": _nothing,
    "shut_both": _nothing,
    "linger": st.sampled_from((0, 0, 1)),
    "peek": _size,
    "readable": _nothing,
    "names": _nothing,
    "error": _nothing,
    "wait": st.sampled_from((0, 0, 1)),
    "notify": _nothing,
}
_OPERATIONS: Final = {
    "socket": {**_COMMON, **_OF_SOCKETS, "recv_into": _size, "sendmsg": _size},
    "stream": {**_COMMON, **_OF_SOCKETS, "wait_writable": _nothing, "close_socket": _nothing},
    "tls": {**_COMMON, "unwrap": _nothing, "close_transport": _nothing},
}

_READS: Final = ("recv", "peek", "recv_into")
_CONNECTING: Final = (
    {
        "accept": _nothing,
        "close_listener": _nothing,
        "shut_listener": _nothing,
        "listen": _nothing,
    },
    {"connect": _nothing, "connect_refused": _nothing, "renew": _nothing},
)
# A connection is SMC-R only if the server has called `accept` before (docs/programs.md), which is
# seldom so in steps drawn at random.
_ACCEPT: Final = Step(0, (("accept", 0),))
_CONNECT: Final = Step(1, (("connect", 0),))
_BEGINNINGS: Final = (
    (),
    (_ACCEPT,),
    (_ACCEPT, _CONNECT),
    (_ACCEPT, _CONNECT, _ACCEPT),
    (_ACCEPT, Step(1, (("connect_refused", 0), ("connect", 0)))),
)


def _operation(style: str, end: int, kind: Kind) -> st.SearchStrategy[Operation]:
    kinds = dict(_OPERATIONS[style])
    if kind == "connecting":
        kinds |= _CONNECTING[end]
    if kind == "full":
        kinds["send"] = st.sampled_from((1, 1000, LARGE, LARGE))
        # TLS has no peek: encrypted bytes are different each time.
        kinds |= {name: st.sampled_from((1, 1000)) for name in _READS if name in kinds}
    weights = {"send": 4, "recv": 3, "close": 2, "read_all": 2, "shut_wr": 2}
    weights |= {"accept": 8, "connect": 8}
    return st.one_of(
        *(
            st.tuples(st.just(name), argument)
            for name, argument in kinds.items()
            for _ in range(weights.get(name, 1))
        )
    )


@functools.cache
def _steps(styles: tuple[str, str], kind: Kind, processes: bool) -> st.SearchStrategy[list[Step]]:
    kinds: list[st.SearchStrategy[Step]] = []
    for end, style in enumerate(styles):
        # `one_of` counts equal strategies once, so these are six different ones.
        for _ in range(6):
            operations = st.lists(_operation(style, end, kind), min_size=1, max_size=3)
            kinds.append(st.builds(Step, st.just(end), operations.map(tuple)))
        kinds.append(st.just(Step(end, (("cancel", 0),))))
        if processes:
            kinds.append(st.sampled_from(SIGNALS).map(functools.partial(_action, end, "signal")))
            kinds.append(
                st.sampled_from(range(len(EXITS))).map(functools.partial(_action, end, "exit"))
            )
            kinds.append(st.just(_action(end, "stop", 0)))
            kinds.append(st.just(_action(end, "continue", 0)))
    kinds.append(st.sampled_from((1, 5, 20)).map(functools.partial(_action, 0, "pause")))
    return st.lists(st.one_of(*kinds), min_size=1, max_size=12)


def _action(end: int, name: str, argument: int) -> Step:
    return Step(end, ((name, argument),))


@st.composite
def programs(draw: st.DrawFn, *, processes: bool = False, connecting: bool = False) -> Program:
    """A program; with ``processes``, its processes may be stopped and may end."""
    if connecting:
        styles = ("socket", "socket")
        steps = draw(_steps(styles, "connecting", processes))
        return Program(styles, "connecting", (*draw(st.sampled_from(_BEGINNINGS)), *steps))
    styles = draw(st.sampled_from(STYLES))
    kind: Kind = draw(st.sampled_from(_KINDS))
    return Program(styles, kind, tuple(draw(_steps(styles, kind, processes))))


def sends(program: Program, end: int) -> Iterator[tuple[int, int, int]]:
    """Step, position and bytes of each send of an end, in order."""
    for number, step in enumerate(program.steps):
        if step.end == end:
            for position, (name, argument) in enumerate(step.operations):
                if name in ("send", "sendmsg"):
                    yield number, position, argument
