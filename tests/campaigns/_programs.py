"""Two-ended programs over one connection: what they consist of, and how hypothesis draws them."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from hypothesis import strategies as st

__all__ = ["ENDS", "LARGE", "Operation", "Program", "Step", "programs", "text"]

ENDS: Final = ("server", "client")
LARGE: Final = 1_500_000
"""Bytes of a send that waits for the reader: more than the buffers of both sides hold."""
_SIZES: Final = (1, 10, 1000, 3000)
_TEXT_SIZE: Final = 1 << 22

Operation = tuple[str, int]
"""Name and argument; the names are the methods of `_program_end.Connection`."""
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
      small_buffers: SO_SNDBUF and SO_RCVBUF are small, so that a send of `LARGE` bytes waits.
      steps: in this order; each begins when everything that came of the one before has arrived.
    """

    styles: tuple[str, str]
    small_buffers: bool
    steps: tuple[Step, ...]

    @property
    def needs_processes(self) -> bool:
        """True if a process is stopped or ends."""
        return any(step.action in PROCESS_STEPS for step in self.steps)

    def as_data(self) -> list[Any]:
        """What `from_data` takes; JSON has it."""
        return [
            list(self.styles),
            self.small_buffers,
            [[step.end, [list(each) for each in step.operations]] for step in self.steps],
        ]

    @classmethod
    def from_data(cls, data: list[Any]) -> Program:
        """The program of which `as_data` is ``data``."""
        styles, small, steps = data
        return cls(
            (styles[0], styles[1]),
            bool(small),
            tuple(Step(end, tuple((name, arg) for name, arg in ops)) for end, ops in steps),
        )

    def __str__(self) -> str:
        buffers = ", small buffers" if self.small_buffers else ""
        lines = [f"server {self.styles[0]}, client {self.styles[1]}{buffers}"]
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
}
_OPERATIONS: Final = {
    "socket": {**_COMMON, **_OF_SOCKETS, "recv_into": _size, "sendmsg": _size},
    "stream": {**_COMMON, **_OF_SOCKETS, "wait_writable": _nothing, "close_socket": _nothing},
    "tls": {**_COMMON, "unwrap": _nothing, "close_transport": _nothing},
}


def _operation(style: str, small_buffers: bool) -> st.SearchStrategy[Operation]:
    kinds = dict(_OPERATIONS[style])
    if small_buffers:
        kinds["send"] = st.sampled_from((1, 1000, LARGE, LARGE))
        kinds["recv"] = kinds["peek"] = kinds["recv_into"] = st.sampled_from((1, 1000))
    weights = {"send": 4, "recv": 3, "close": 2, "read_all": 2, "shut_wr": 2}
    return st.one_of(
        *(
            st.tuples(st.just(name), argument)
            for name, argument in kinds.items()
            for _ in range(weights.get(name, 1))
        )
    )


@functools.cache
def _steps(
    styles: tuple[str, str], small_buffers: bool, processes: bool
) -> st.SearchStrategy[list[Step]]:
    kinds: list[st.SearchStrategy[Step]] = []
    for end, style in enumerate(styles):
        operations = st.lists(_operation(style, small_buffers), min_size=1, max_size=3)
        task = st.builds(Step, st.just(end), operations.map(tuple))
        kinds += [task] * 6
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
def programs(draw: st.DrawFn, *, processes: bool = False) -> Program:
    """A program; with ``processes``, its processes may be stopped and may end."""
    styles = draw(st.sampled_from(STYLES))
    small_buffers = draw(st.sampled_from((False, False, False, True)))
    return Program(styles, small_buffers, tuple(draw(_steps(styles, small_buffers, processes))))


def sends(program: Program, end: int) -> Iterator[tuple[int, int, int]]:
    """Step, position and bytes of each send of an end, in order."""
    for number, step in enumerate(program.steps):
        if step.end == end:
            for position, (name, argument) in enumerate(step.operations):
                if name in ("send", "sendmsg"):
                    yield number, position, argument
