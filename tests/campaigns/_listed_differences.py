"""The differences between TCP and SMC-R that docs/programs.md lists: each with its reason.

A difference that no entry explains fails the campaign.  Each entry has an example, which the
campaign runs first: if it shows no difference, the entry describes what is no longer so, and the
campaign fails, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from tests.campaigns._program_runner import Line, Observation
from tests.campaigns._programs import EXITS, LARGE, Program, Step, sends

__all__ = ["LISTED", "Listed"]


@dataclass(frozen=True, slots=True)
class Listed:
    """A row of the table "What differs from TCP".

    Attributes:
      name: the beginning of the row in docs/programs.md.
      example: a program that shows it, as `Program.as_data`.
      explains: True if this program's observation over SMC-R, the third argument, differs from
        that over TCP, the second, for this reason only.
    """

    name: str
    example: list[Any]
    explains: Callable[[Program, Observation, Observation], bool]


_KILLING_SIGNALS: Final = {9, 15, 1}
_KILLING_EXITS: Final = {EXITS.index("os._exit")}
# Results of calls after RST has arrived, and after FIN.
_RESET: Final = {"ECONNRESET", "EPIPE", "ENOTCONN", "end", "0"}
_ENDED: Final = {"end", "sent", "shut", "EPIPE", "0", "127.0.0.1 127.0.0.1"}


def _kills(step: Step) -> bool:
    name, argument = step.operations[0]
    return (name == "signal" and argument in _KILLING_SIGNALS) or (
        name == "exit" and argument in _KILLING_EXITS
    )


def _outcome(line: Line) -> str:
    """The result, without the exception of a stream around the one of its socket."""
    return line.result.removeprefix("BrokenResourceError from ")


def _differing(tcp: Observation, smc: Observation) -> list[tuple[Line, Line]] | None:
    """The results that differ, in pairs; None if one transport has a result more."""
    over_tcp, over_smc = ({line[:3]: line for line in each} for each in (tcp, smc))
    if over_tcp.keys() != over_smc.keys():
        return None
    return [(over_tcp[key], over_smc[key]) for key in over_tcp if over_tcp[key] != over_smc[key]]


def _killed_with_unread_data(program: Program, tcp: Observation, smc: Observation) -> bool:
    """An end is killed, and the other sees FIN over SMC-R and RST over TCP, and the same bytes."""
    killed = {step.end: number for number, step in enumerate(program.steps) if _kills(step)}
    pairs = _differing(tcp, smc)
    if len(killed) != 1 or pairs is None:
        return False
    [(end, number)] = killed.items()
    return any(_outcome(line) == "ECONNRESET" for line in tcp) and all(
        ours.end != end
        and (ours.at >= number or program.kind == "full")  # such a program has no times
        and _outcome(theirs) in _RESET
        and _outcome(ours) in _ENDED
        for theirs, ours in pairs
    )


def _closed_with_data_in_a_send_buffer(
    program: Program, tcp: Observation, smc: Observation
) -> bool:
    """Buffers are full, and only the errors of sends differ, after a close; or TCP resets, because
    data waits in a send buffer or arrives late; or data that waits there keeps a send waiting."""
    pairs = _differing(tcp, smc)
    full = _ends_that_fill(program)
    return bool(pairs and full) and all(
        (_outcome(theirs) in ("ECONNRESET", "EPIPE") and _outcome(ours) in ("EPIPE", "sent"))
        or (_outcome(theirs) == "ECONNRESET" and _outcome(ours) in ("end", "0", "SSLEOFError"))
        or (theirs.result == "shut" and ours.result == "ENOTCONN" and ours.end in full)
        or (
            _outcome(theirs) in ("cancelled", "BusyResourceError")
            and _outcome(ours) in ("EPIPE", "sent")
            and ours.end in full
            and _shuts_both(program, 1 - ours.end)
        )
        for theirs, ours in pairs or ()
    )


def _shut_down_during_a_large_send(program: Program, tcp: Observation, smc: Observation) -> bool:
    """An end shuts down both directions while the other's send fills its buffer."""
    pairs = _differing(tcp, smc)
    full = _ends_that_fill(program)
    shut = {end for end in range(2) if 1 - end in full and _shuts_both(program, end)}
    return (
        bool(pairs)
        and bool(shut)
        and all(
            {_outcome(theirs), _outcome(ours)}
            <= _RESET | _ENDED | {"cancelled", "BusyResourceError"}
            for theirs, ours in pairs or ()
        )
        and any(_outcome(line) in ("EPIPE", "ECONNRESET") for line in smc)
    )


def _shuts_both(program: Program, end: int) -> bool:
    names = {name for step in program.steps if step.end == end for name, _ in step.operations}
    return "shut_both" in names or {"shut_rd", "shut_wr"} <= names


def _data_in_a_send_buffer(program: Program, tcp: Observation, smc: Observation) -> bool:
    return _closed_with_data_in_a_send_buffer(program, tcp, smc) or _shut_down_during_a_large_send(
        program, tcp, smc
    )


def _ends_that_fill(program: Program) -> set[int]:
    """The ends that send more than the buffers hold."""
    return {end for end in range(2) if any(size == LARGE for *_, size in sends(program, end))}


def _first_differing(tcp: Observation, smc: Observation) -> list[tuple[Line, Line]] | None:
    """As `_differing`, but only the first pair of each task: what follows may come of it."""
    over_tcp, over_smc = ({line[:3]: line for line in each} for each in (tcp, smc))
    first: dict[tuple[int, int], tuple[Line, Line]] = {}
    for key in sorted(over_tcp.keys() | over_smc.keys()):
        if key[:2] in first or over_tcp.get(key) == over_smc.get(key):
            continue
        if key not in over_tcp or key not in over_smc:
            return None
        first[key[:2]] = over_tcp[key], over_smc[key]
    return list(first.values())


def _sent_after_one_that_waits(program: Program, tcp: Observation, smc: Observation) -> bool:
    """Only a send of an end whose earlier one had to wait finds room over one transport."""
    pairs = _first_differing(tcp, smc)
    full = _ends_that_fill(program)
    return bool(pairs) and all(
        ours.end in full
        and "sent" in (theirs.result, ours.result)
        and {theirs.result, ours.result} <= {"sent", "BusyResourceError", "cancelled"}
        for theirs, ours in pairs or ()
    )


def _reset_by_a_process_that_has_shut_down(
    program: Program, tcp: Observation, smc: Observation
) -> bool:
    """The peer has shut down both directions, and calls after the first send see no reset yet."""
    pairs = _differing(tcp, smc)
    return bool(pairs) and all(
        _shuts_both(program, 1 - ours.end)
        and any(line[:2] == ours[:2] and line < ours and line.result == "sent" for line in smc)
        and _outcome(theirs) in _RESET
        and _outcome(ours) in _ENDED
        for theirs, ours in pairs or ()
    )


def _shut_down_before_connect(program: Program, tcp: Observation, smc: Observation) -> bool:
    """A socket was shut down and then connected."""
    steps = [each for step in program.steps if step.end for each, _ in step.operations]
    shut = [number for number, name in enumerate(steps) if name.startswith("shut")]
    return (
        program.kind == "connecting"
        and bool(shut)
        and "connect" in steps[shut[0] :]
        and any(line.end == 1 and line.result == "ECONNRESET" for line in smc)
    )


LISTED: Final[tuple[Listed, ...]] = (
    Listed(
        name="Data waits in a send buffer because the peer's buffer is full",
        example=[
            ["socket", "socket"],
            "full",
            [[0, [["send", LARGE]]], [1, [["shut_rd", 0]]]],
        ],
        explains=_data_in_a_send_buffer,
    ),
    Listed(
        name="A send has waited for room in a send buffer, and another one follows",
        example=[
            ["socket", "socket"],
            "full",
            [[0, [["send", 1], ["send", LARGE]]], [1, [["shut_wr", 0]]], [0, [["send", 1]]]],
        ],
        explains=_sent_after_one_that_waits,
    ),
    Listed(
        name="A process shuts down both directions of a socket with unread data",
        example=[
            ["socket", "socket"],
            "usual",
            [
                [0, [["send", 1]]],
                [1, [["shut_both", 0]]],
                [1, [["stop", 0]]],
                [0, [["send", 1], ["send", 1]]],
            ],
        ],
        explains=_reset_by_a_process_that_has_shut_down,
    ),
    Listed(
        name="`shutdown` of a socket that is not connected",
        example=[
            ["socket", "socket"],
            "connecting",
            [[0, [["accept", 0]]], [1, [["shut_wr", 0], ["connect", 0]]]],
        ],
        explains=_shut_down_before_connect,
    ),
    Listed(
        name="A process is killed with unread data in a socket",
        example=[
            ["socket", "socket"],
            "usual",
            [[1, [["send", 1]]], [0, [["signal", 9]]]],
        ],
        explains=_killed_with_unread_data,
    ),
)
