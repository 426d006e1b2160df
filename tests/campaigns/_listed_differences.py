"""The differences between TCP and SMC-R that docs/programs.md lists: each with its reason.

A difference that no entry explains fails the campaign.  Each entry has an example, which the
campaign runs first: if it shows no difference, the entry describes what is no longer so, and the
campaign fails, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from tests.campaigns._program_runner import EPILOGUE, TOTAL, Line, Observation
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
_NAMES: Final = "127.0.0.1 127.0.0.1"
_RESET: Final = {"ECONNRESET", "EPIPE", "ENOTCONN", "end", "0"}
_ENDS_OF_CONNECT: Final = {"ECONNRESET", "EPIPE", "ECONNABORTED"}
_ENDED: Final = {"end", "sent", "shut", "EPIPE", "0", _NAMES}


def _kills(step: Step) -> bool:
    name, argument = step.operations[0]
    return (name == "signal" and argument in _KILLING_SIGNALS) or (
        name == "exit" and argument in _KILLING_EXITS
    )


def _outcome(line: Line) -> str:
    """The result, without the exception of a stream around the one of its socket."""
    return line.result.removeprefix("BrokenResourceError from ")


_Lines = dict[tuple[int, int, int], Line]


def _by_operation(tcp: Observation, smc: Observation) -> tuple[_Lines, _Lines]:
    """The lines over both, without totals that only one of them has."""
    over_tcp, over_smc = ({line[:3]: line for line in each} for each in (tcp, smc))
    for ours, theirs in ((over_tcp, over_smc), (over_smc, over_tcp)):
        for key in [each for each in ours if each[2] == TOTAL and each not in theirs]:
            del ours[key]
    return over_tcp, over_smc


def _differing(tcp: Observation, smc: Observation) -> list[tuple[Line, Line]] | None:
    """The results that differ, in pairs; None if one transport has a result more."""
    over_tcp, over_smc = _by_operation(tcp, smc)
    if over_tcp.keys() != over_smc.keys():
        return None
    return [(over_tcp[key], over_smc[key]) for key in over_tcp if over_tcp[key] != over_smc[key]]


_SENDS: Final = ("send", "sendmsg")
_READS: Final = ("recv", "recv_into", "read_all", "peek")
_SHUTS: Final = ("shut_wr", "shut_rd", "shut_both")
_CLOSES: Final = (*_SHUTS, "close", "close_socket", "close_transport", "unwrap")


def _operation(program: Program, line: Line) -> str:
    """The name of the operation that has this result; "" for a line of the runner."""
    if line.step < len(program.steps):
        steps = [program.steps[line.step]]
    elif line.position < TOTAL - 1 and line.step < len(program.steps) + len(EPILOGUE):
        steps = [each for each in EPILOGUE[line.step - len(program.steps)] if each.end == line.end]
    else:
        return ""
    return next((each.operations[line.position][0] for each in steps), "")


def _ends(program: Program, end: int) -> bool:
    """True if this end closes, or shuts down; the epilogue closes the server."""
    steps = (step for step in program.steps if step.end == end)
    return end == 0 or any(name in _CLOSES for step in steps for name, _ in step.operations)


def _has_unread(program: Program, seen: Observation, end: int, before: int) -> bool:
    """True if an end may have had unread data before this step."""
    if program.kind == "full" or program.styles[end] == "tls":
        return True  # numbers and times are not compared; TLS has records of its own
    arrived = sum(
        size
        for step, position, size in sends(program, 1 - end)
        if any(
            line[:3] == (1 - end, step, position) and line.result == "sent" and line.at < before
            for line in seen
        )
    )
    reads = [
        int(line.result.split()[1])
        for line in seen
        if line.end == end and line.result.startswith("read ") and line.at < before
    ]
    return arrived > sum(reads)


def _killed_with_unread_data(program: Program, tcp: Observation, smc: Observation) -> bool:
    """An end is killed, and the other sees FIN over SMC-R and RST over TCP, and the same bytes."""
    killed = {step.end: number for number, step in enumerate(program.steps) if _kills(step)}
    pairs = _differing(tcp, smc)
    if len(killed) != 1 or pairs is None:
        return False
    [(end, number)] = killed.items()
    return (
        any(_outcome(line) == "ECONNRESET" for line in tcp)
        and _has_unread(program, tcp, end, number)
        and all(
            ours.end != end
            and (ours.at >= number or program.kind == "full")  # such a program has no times
            and _outcome(theirs) in _RESET
            and _outcome(ours) in _ENDED
            for theirs, ours in pairs
        )
    )


def _data_in_a_send_buffer(program: Program, tcp: Observation, smc: Observation) -> bool:
    """Buffers are full, and an end closes or shuts down."""
    pairs = _first_differing(tcp, smc) or []
    explained = [pair for pair in pairs if _is_of_a_send_buffer(program, *pair)]
    return bool(explained and _ends_that_fill(program)) and all(
        pair in explained or any(_is_beside_a_send(pair, send) for send in explained)
        for pair in pairs
    )


def _is_beside_a_send(pair: tuple[Line, Line], send: tuple[Line, Line]) -> bool:
    """True if a call finds, over one transport only, that an explained send of its end waits."""
    return pair[0].end == send[0].end and any(
        line.result == "BusyResourceError" and waits.result == "cancelled" != other.result
        for line, waits, other in zip(pair, send, reversed(send), strict=True)
    )


def _is_of_a_send_buffer(program: Program, theirs: Line, ours: Line) -> bool:
    """True if these two results may differ because TCP's data waits in a send buffer.

    After a close the errors of sends differ; or TCP resets, because data waits or arrives late.  If
    an end has shut down both directions during a large send, such data may or may not arrive, over
    both transports.
    """
    end, name = ours.end, _operation(program, ours)
    if not _ends(program, 1 - end) and not _shuts_both(program, end):
        return False
    pair = _outcome(theirs), _outcome(ours)
    during_send = {each for each in range(2) if _is_shut_during_a_large_send(program, each)}
    if name in _SHUTS:
        return pair == ("shut", "ENOTCONN")  # the FIN of either end waits behind data
    if name == "names":
        return bool(during_send) and pair == (_NAMES, "ENOTCONN")
    if name in _READS:
        if pair in (("ECONNRESET", "end"), ("ECONNRESET", "SSLEOFError")):
            return True
        return pair == ("end", "ECONNRESET") and 1 - end in during_send
    if name == "error":
        return pair == ("ECONNRESET", "0")
    if name not in _SENDS:
        return False
    return (
        (pair[0] in _FAILED_SENDS and pair[1] in ("EPIPE", "sent"))
        or (end in during_send and set(pair) <= _SENDS_DURING_SHUTDOWN)
        or (1 - end in during_send and pair == ("EPIPE", "ECONNRESET"))
    )


_FAILED_SENDS: Final = {"ECONNRESET", "EPIPE"}
_SENDS_DURING_SHUTDOWN: Final = {
    *_FAILED_SENDS,
    "sent",
    "cancelled",
    "BusyResourceError",
    "ClosedResourceError",
}


def _is_shut_during_a_large_send(program: Program, sender: int) -> bool:
    return _fills(program, sender) and _shuts_both(program, 1 - sender)


def _fills(program: Program, end: int) -> bool:
    return end in _ends_that_fill(program)


def _shuts_both(program: Program, end: int) -> bool:
    names = {name for step in program.steps if step.end == end for name, _ in step.operations}
    return "shut_both" in names or {"shut_rd", "shut_wr"} <= names


def _ends_that_fill(program: Program) -> set[int]:
    """The ends that send more than the buffers hold."""
    return {end for end in range(2) if any(size == LARGE for *_, size in sends(program, end))}


def _first_differing(tcp: Observation, smc: Observation) -> list[tuple[Line, Line]] | None:
    """As `_differing`, but only the first pair of each task: what follows may come of it."""
    over_tcp, over_smc = _by_operation(tcp, smc)
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
        and _operation(program, ours) in (*_SENDS, "wait", "wait_writable")
        and not {"sent", "writable"}.isdisjoint((theirs.result, ours.result))
        and {theirs.result, ours.result} <= {"sent", "writable", "BusyResourceError", "cancelled"}
        for theirs, ours in pairs or ()
    )


def _reset_by_a_process_that_has_shut_down(
    program: Program, tcp: Observation, smc: Observation
) -> bool:
    """The peer has shut down both directions, and calls after the first send see no reset yet."""
    pairs = _first_differing(tcp, smc) or []

    def is_late(theirs: Line, ours: Line) -> bool:
        return (
            any(line[:2] == ours[:2] and line < ours and line.result == "sent" for line in smc)
            and _outcome(theirs) in _RESET
            and _outcome(ours) in _ENDED
        )

    late = [ours for theirs, ours in pairs if is_late(theirs, ours)]
    return bool(late) and all(
        _shuts_both(program, 1 - ours.end)
        and any(
            _has_unread(program, tcp, step.end, number)
            for number, step in enumerate(program.steps)
            if step.end != ours.end and any(name in _SHUTS for name, _ in step.operations)
        )
        and (
            ours in late
            # A shutdown that has succeeded shows in later calls of this end, too.
            or (
                (_outcome(theirs), ours.result) == ("EPIPE", "ClosedResourceError")
                and any((line.end, line.result) == (ours.end, "shut") for line in late)
            )
        )
        for theirs, ours in pairs
    )


def _shut_down_before_connect(program: Program, tcp: Observation, smc: Observation) -> bool:
    """The first difference is a connect of a socket that was shut down before."""
    differing = sorted(set(tcp) ^ set(smc), key=lambda line: line.at)
    failed = [
        line
        for line in differing
        if line.end == 1
        and line.result == "ECONNRESET"
        and line in smc
        and _operation(program, line) == "connect"
    ]
    if program.kind != "connecting" or not failed:
        return False
    first = failed[0]
    before = [
        name
        for number, step in enumerate(program.steps[: first.step + 1])
        if step.end
        for name, _ in step.operations[: first.position if number == first.step else None]
    ]
    return differing[0].at >= first.at and any(name in _SHUTS for name in before)


def _connected_after_the_end(program: Program, tcp: Observation, smc: Observation) -> bool:
    """A second `connect` has reported the end, and only later calls of the client differ."""
    names = {
        (number, position): name
        for number, step in enumerate(program.steps)
        for position, (name, _) in enumerate(step.operations)
    }
    connects = [line for line in tcp if line.end == 1 and names.get(line[1:3]) == "connect"]
    again = next(
        (
            line
            for before, line in itertools.pairwise(connects)
            if before.result == "connected" and line.result in _ENDS_OF_CONNECT and line in smc
        ),
        None,
    )
    pairs = _first_differing(tcp, smc)
    return (
        again is not None
        and bool(pairs)
        and all(
            ours.end == 1
            and ours[1:3] > again[1:3]
            and (theirs.result == "ENOTCONN" or names.get(ours[1:3]) == "connect")
            for theirs, ours in pairs or ()
        )
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
        name="`connect` a second time, after the connection was reset",
        example=[
            ["socket", "socket"],
            "connecting",
            [
                [0, [["accept", 0]]],
                [1, [["connect", 0]]],
                [0, [["shut_both", 0]]],
                [1, [["send", 1], ["connect", 0]]],
            ],
        ],
        explains=_connected_after_the_end,
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
