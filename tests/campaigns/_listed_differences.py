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
from tests.campaigns._programs import LARGE, Program, sends

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


# Results of calls after RST has arrived, and after FIN.
_ADDRESSES: Final = "127.0.0.1 127.0.0.1"
_RESET: Final = {"ECONNRESET", "EPIPE", "ENOTCONN", "end", "0"}
_ENDS_OF_CONNECT: Final = {"ECONNRESET", "EPIPE", "ECONNABORTED"}
_ENDED: Final = {"end", "sent", "shut", "EPIPE", "0", _ADDRESSES}


def _outcome(line: Line) -> str:
    """The result, without the exception of a stream around the one of its socket."""
    return line.result.removeprefix("BrokenResourceError from ")


_Lines = dict[tuple[int, int, int, bool], Line]
_NOTHING: Final = ""
"""Stands for a result that only the other transport has."""


def _by_operation(tcp: Observation, smc: Observation) -> tuple[_Lines, _Lines]:
    """The lines over both, without totals that only one of them has.

    A read has two lines: what it has read, and how it has ended.
    """
    over_tcp, over_smc = (
        {(*line[:3], line.result.startswith("read")): line for line in each} for each in (tcp, smc)
    )
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


# Results that depend on when a send waits, and when it has ended.
_WAITING: Final = (*_SENDS, "wait", "wait_writable")
_WAITS: Final = {"sent", "writable", "cancelled", "BusyResourceError"}
_CLOSED: Final = {"EBADF", "ClosedResourceError"}
_FAILED: Final = {"ECONNRESET", "EPIPE", "BrokenResourceError", *_CLOSED}
_DURING_SENDS: Final = {
    _WAITING: _WAITS | _FAILED,
    _SHUTS: {"shut", "ENOTCONN", "BusyResourceError", *_FAILED},
    _READS: {"end", "ECONNRESET", "SSLEOFError", "cancelled"},
    ("names",): {_ADDRESSES, "ENOTCONN"},
    ("error",): {"0", "ECONNRESET", "EPIPE"},
}


def _data_in_a_send_buffer(program: Program, tcp: Observation, smc: Observation) -> bool:
    """An end sends more than the buffers hold, and one of them closes, or shuts down both ways.

    Over TCP, data waits in a send buffer or is refused when it arrives.  So it depends on the sizes
    of buffers which send waits, and whether the connection ends by a reset.
    """
    pairs = _first_differing(tcp, smc)
    reset = _has_reset(tcp) != _has_reset(smc)
    breaks = _breaks(program) or any(_is_refused_beside_it(program, *pair) for pair in pairs)
    return bool(pairs and _ends_that_fill(program)) and all(
        _is_of_a_waiting_send(program, theirs, ours)
        or _is_of_a_share(program, theirs, ours)
        or _is_of_a_part(program, theirs, ours)
        or ((breaks or ours.step >= len(program.steps)) and _is_of_an_end(program, theirs, ours))
        or (reset and ours.position == TOTAL)
        for theirs, ours in pairs
    )


def _is_of_a_waiting_send(program: Program, theirs: Line, ours: Line) -> bool:
    return (
        _operation(program, ours) in _WAITING
        and ours.end in _ends_that_fill(program)
        and {theirs.result, ours.result} <= _WAITS
    )


def _is_of_a_share(program: Program, theirs: Line, ours: Line) -> bool:
    """True if readers of one end have other shares of the data, and of its end."""
    return (
        _operation(program, ours) in _READS
        and program.readers(ours.end) > 1
        and {_outcome(theirs), _outcome(ours)} <= {"read", "peeked", "end", "cancelled", _NOTHING}
    )


def _is_of_a_part(program: Program, theirs: Line, ours: Line) -> bool:
    """True if an end that has shut down reading reads only a part of much data over TCP: the rest
    waits in the send buffer of the other end."""
    return (
        _operation(program, ours) in _READS
        and 1 - ours.end in _ends_that_fill(program)
        and not _names(program, ours.end).isdisjoint({"shut_rd", "shut_both"})
        and {_outcome(theirs), _outcome(ours)} <= {"read", "peeked", "end", _NOTHING}
    )


def _is_refused_beside_it(program: Program, theirs: Line, ours: Line) -> bool:
    """True if a stream cannot end, over one transport, because a send waits."""
    return (
        _operation(program, ours) in _SHUTS
        and ours.end in _ends_that_fill(program)
        and {theirs.result, ours.result} == {"shut", "BusyResourceError"}
    )


def _is_of_an_end(program: Program, theirs: Line, ours: Line) -> bool:
    """True if it depends on when a send has ended how a connection ends.  Only for programs that
    end one, and for the epilogue, which closes the server."""
    name = _operation(program, ours)
    pair = {_outcome(theirs), _outcome(ours)}
    if pair & _CLOSED and ours.end in _ends_that_fill(program) and _closes(program, ours.end):
        return True  # the close follows a send that waits over the other transport
    results = next((each for names, each in _DURING_SENDS.items() if name in names), set())
    if name in _READS and program.readers(ours.end) > 1:
        results = results | {"read", "peeked", _NOTHING}
    if name in _WAITING and not _names(program, ours.end).isdisjoint({"exit", "signal"}):
        results = results | {_NOTHING}  # the process ends while a send waits
    return pair <= results


def _breaks(program: Program) -> bool:
    """True if an end closes, or shuts down both ways, or both ends shut down writing."""
    ends = range(2)
    return any(_shuts_both(program, end) or _closes(program, end) for end in ends) or all(
        _names(program, end) & {"shut_wr", "shut_both"} for end in ends
    )


def _names(program: Program, end: int) -> set[str]:
    return {name for step in program.steps if step.end == end for name, _ in step.operations}


def _closes(program: Program, end: int) -> bool:
    return not _names(program, end).isdisjoint(set(_CLOSES) - set(_SHUTS))


def _has_reset(seen: Observation) -> bool:
    return any(_outcome(line) == "ECONNRESET" for line in seen)


def _shuts_both(program: Program, end: int) -> bool:
    names = _names(program, end)
    return "shut_both" in names or {"shut_rd", "shut_wr"} <= names


def _ends_that_fill(program: Program) -> set[int]:
    """The ends that send more than the buffers hold."""
    return {end for end in range(2) if any(size == LARGE for *_, size in sends(program, end))}


def _first_differing(tcp: Observation, smc: Observation) -> list[tuple[Line, Line]]:
    """As `_differing`, but only the first pair of each task: what follows may come of it."""
    over_tcp, over_smc = _by_operation(tcp, smc)
    first: dict[tuple[int, int], tuple[Line, Line]] = {}
    for key in sorted(over_tcp.keys() | over_smc.keys()):
        theirs, ours = over_tcp.get(key), over_smc.get(key)
        if key[:2] in first or theirs == ours:
            continue
        [one, *_] = [each for each in (theirs, ours) if each]
        nothing = one._replace(result=_NOTHING)
        first[key[:2]] = theirs or nothing, ours or nothing
    return list(first.values())


def _sent_after_one_that_waits(program: Program, tcp: Observation, smc: Observation) -> bool:
    """Only a send of an end whose earlier one had to wait finds room over one transport.

    If it finds room for a few bytes over TCP, and then has to wait, too, these bytes lie in the
    middle of the other send's.
    """
    pairs = _first_differing(tcp, smc)
    return bool(pairs) and all(
        (
            _is_of_a_waiting_send(program, theirs, ours)
            and not {"sent", "writable"}.isdisjoint((theirs.result, ours.result))
        )
        or (
            (theirs.result, ours.result) == ("wrong bytes", _NOTHING)
            and 1 - ours.end in _ends_that_fill(program)
            and any((each.end, each.result) == (1 - ours.end, "BusyResourceError") for each in tcp)
        )
        for theirs, ours in pairs
    )


def _reset_by_a_process_that_has_shut_down(
    program: Program, tcp: Observation, smc: Observation
) -> bool:
    """The peer has shut down both directions, and calls after the first send see no reset yet."""
    pairs = _first_differing(tcp, smc)

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
            _has_unread(program, tcp, line.end, line.at + 1)
            for line in tcp
            if line.end != ours.end and _operation(program, line) in _SHUTS
        )
        and (
            ours in late
            # A call that has succeeded shows in later calls of this end, too: a shutdown, and a
            # send, which over TCP has taken the error that SO_ERROR would report.
            or (
                (_outcome(theirs), ours.result) == ("EPIPE", "ClosedResourceError")
                and any((line.end, line.result) == (ours.end, "shut") for line in late)
            )
            or (
                (_operation(program, ours), theirs.result, ours.result) == ("error", "0", "EPIPE")
                and any((line.end, line.result) == (ours.end, "sent") for line in late)
            )
        )
        for theirs, ours in pairs
    )


_CONNECTS: Final = ("connect", "connect_refused")


def _connected_after_the_end(program: Program, tcp: Observation, smc: Observation) -> bool:
    """A second `connect` has reported the end, and only later calls of the client differ."""
    names = {
        (number, position): name
        for number, step in enumerate(program.steps)
        for position, (name, _) in enumerate(step.operations)
    }
    connects = [line for line in tcp if line.end == 1 and names.get(line[1:3]) in _CONNECTS]
    again = next(
        (
            line
            for before, line in itertools.pairwise(connects)
            if before.result == "connected" and line.result in _ENDS_OF_CONNECT and line in smc
        ),
        None,
    )
    pairs = _first_differing(tcp, smc)
    if again is None or not pairs:
        return False
    # Over TCP a third call makes a new connection, which both ends use from then on.
    anew = any(line[1:3] > again[1:3] and line.result == "connected" for line in connects)
    return all(
        ours[1:3] > again[1:3]
        and (
            anew
            or (
                ours.end == 1 and (theirs.result == "ENOTCONN" or names.get(ours[1:3]) in _CONNECTS)
            )
        )
        for theirs, ours in pairs
    )


_SENT: Final = {"sent", "shut", "BusyResourceError"}


def _sent_beside_another_task(program: Program, tcp: Observation, smc: Observation) -> bool:
    """Two tasks of one end send on a stream at the same moment: one raises BusyResourceError over
    one transport only, and the other end reads what was sent."""
    busy = {
        line.end
        for seen in (tcp, smc)
        for line in seen
        if line.result == "BusyResourceError"
        and program.styles[line.end] != "socket"
        and any(
            (each.end, each.result, each.at) == (line.end, "sent", line.at)
            and each.step != line.step
            for each in seen
        )
    }
    pairs = _first_differing(tcp, smc)

    def is_of_a_sender(theirs: Line, ours: Line) -> bool:
        return (
            ours.end in busy
            and _operation(program, ours) in (*_SENDS, "shut_wr")
            and {theirs.result, ours.result} <= _SENT
        )

    def is_of_the_reader(theirs: Line, ours: Line) -> bool:
        if 1 - ours.end not in busy:
            return False
        if _operation(program, ours) not in _READS:
            return ours.position in (TOTAL - 1, TOTAL)  # the bytes of both tasks are mixed
        words = {_outcome(each).partition(" ")[0] for each in (theirs, ours)}
        return words <= {"read", "peeked", "end", _NOTHING}

    return any(is_of_a_sender(*pair) for pair in pairs) and all(
        is_of_a_sender(*pair) or is_of_the_reader(*pair) for pair in pairs
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
        name="Two tasks call `send_all` of one stream at the same moment",
        example=[
            ["stream", "stream"],
            "usual",
            [
                [1, [["recv", 1], ["shut_rd", 0], ["send", 1]]],
                [1, [["shut_rd", 0], ["send", 1], ["send", 1]]],
            ],
        ],
        explains=_sent_beside_another_task,
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
)
