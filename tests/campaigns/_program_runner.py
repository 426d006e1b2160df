"""Runs programs of `_programs` over TCP or over SMC-R, step by step, and returns what was observed.

Both ends are processes that are kept from program to program.  A program that stops or ends one has
fresh ones.  After each step the runner waits until both ends are quiet: no task of either can go
on, twice in a row.  So the order of events is the same over both transports, and a program over TCP
has only one outcome.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import ssl
import sys
import tempfile
import time
import traceback
import zlib
from dataclasses import dataclass, field
from typing import IO, Any, Final, NamedTuple

import trustme

from tests.campaigns._program_end import Channel, EndSettings, live
from tests.campaigns._programs import (
    ENDS,
    EXITS,
    LARGE,
    Operation,
    Program,
    Step,
    sends,
    text,
)
from tests.timing import PATIENCE

__all__ = ["EPILOGUE", "MISSING", "TOTAL", "Line", "Observation", "Runner"]

_QUIET_ROUNDS: Final = 3
_MOST_ROUNDS: Final = 20_000
_STOPPED: Final = 0.25
"""Seconds that a stopped process stands still: longer than `_OFTEN_TESTED` needs to test a link."""
_NOTICED: Final = 0.05
"""Seconds until the end of a process is noticed over SMC-R: a thread of the RNIC notices it and
looks at the TCP connections, which the kernel may close later.  It takes 0.7 to 5 ms on a machine
with little load."""
_CONNECTING: Final = {"require_smc": False, "handshake_timeout": 0.2}
_OFTEN_TESTED: Final = {
    "test_link_interval": 0.05,
    "test_link_timeout": 0.05,
    "shutdown_timeout": 1.0,
}
_PR_SET_PDEATHSIG: Final = 1
_DYING: Final = 1.0
"""Seconds from the end of a process's connection until it has ended."""
_LAST_WORDS: Final = 3000


class Line(NamedTuple):
    """A result: the operation, and the step after which it was there."""

    end: int
    step: int
    position: int
    result: str
    at: int

    def __str__(self) -> str:
        return f"{ENDS[self.end]} {self.step}.{self.position}: {self.result} (after {self.at})"


Observation = tuple[Line, ...]
MISSING: Final = "the end before all bytes"
"""The result of a reader that finds the end of the stream, but not all that was sent before."""
TOTAL: Final = 10
"""The position of a line with all that an end has received."""
# Operations after which an end need not read all bytes, and errors after which it may not.
_READS_NOT_ALL: Final = {
    "shut_rd",
    "shut_both",
    "close",
    "close_socket",
    "close_transport",
    "unwrap",
    "linger",
}
_CLOSES_BELOW_TLS: Final = ("close_transport", "close_socket")
_ERRORS_OF_A_CLOSED_TRANSPORT: Final = {
    "ClosedResourceError",
    "BrokenResourceError",
    "BrokenResourceError from SSLError",
}
_BREAKS: Final = ("ECONNRESET", "SSL")


@dataclass
class _Process:
    pid: int
    channel: Channel
    errors: IO[bytes]
    """Its standard error."""
    stopped: bool = False
    alive: bool = True
    activity: int = -1


class Hung(Exception):
    """An end does not answer."""


@dataclass
class Runner:
    """Both ends over one transport.

    Attributes:
      smc: use SMC-R.
      hung: ends that did not answer in one run of a program, and did in the next one.
      gone: processes that have ended, with the end of their standard error.
      over_smc: connections over SMC-R that programs have made themselves.
    """

    smc: bool
    contexts: tuple[ssl.SSLContext, ssl.SSLContext]
    hung: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    over_smc: int = 0
    _kept: dict[bool, list[_Process]] = field(default_factory=dict)

    def run(self, program: Program) -> Observation:
        """Run a program; return what both ends observed.

        An end that hangs does so twice in a row, with fresh processes: a machine may stand still.
        An end whose process is gone has failed the first time.
        """
        run = self._run(program)
        if run.hung and not run.gone:
            transport = "SMC-R" if self.smc else "TCP"
            [line] = [line for line in run.observation if line.result.startswith("hung")]
            self.hung.append(f"{transport}, {line}\n{program}")
            run = self._run(program)
        if run.gone:
            transport = "SMC-R" if self.smc else "TCP"
            words = "\n".join(run.last_words)
            self.gone.append(f"{transport}, {run.observation[-1]}\n{program}\n{words}")
        self.over_smc += run.over_smc
        return run.observation

    def _run(self, program: Program) -> _Run:
        connecting = program.kind == "connecting"
        config = _CONNECTING if connecting else {}
        if program.needs_processes:
            ends = self._fork(config | _OFTEN_TESTED)
            try:
                return _Run(program, ends, self.smc)
            finally:
                _end(ends)
        if connecting not in self._kept:
            self._kept[connecting] = self._fork(config)
        run = _Run(program, self._kept[connecting], self.smc)
        if run.hung:
            _end(self._kept.pop(connecting))
        return run

    def close(self) -> None:
        """End the processes that are kept."""
        while self._kept:
            _end(self._kept.popitem()[1])

    def _fork(self, config: dict[str, Any]) -> list[_Process]:
        made: list[_Process] = []
        for number in range(2):
            ours, theirs = socket.socketpair()
            settings = EndSettings(
                number=number, smc=self.smc, config=config, contexts=self.contexts
            )
            errors = tempfile.TemporaryFile()  # noqa: SIM115 - `_end` closes it
            pid = os.fork()
            if pid == 0:
                _child(settings, theirs, errors)
            theirs.close()
            ours.settimeout(PATIENCE)
            made.append(_Process(pid, Channel(ours), errors))
        return made


def _child(settings: EndSettings, sock: socket.socket, errors: IO[bytes]) -> None:
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # If the shell of the campaign exits, the kernel sends SIGHUP to each process of its group,
        # provided that one of them is stopped.
        os.setsid()
        os.dup2(errors.fileno(), 2)
        keep = os.dup2(sock.fileno(), 3)
        os.closerange(4, 1024)
        # The parent's may belong to a descriptor that is closed here, and whose number is reused.
        sys.stdout = sys.stderr = os.fdopen(2, "w", closefd=False)
        faulthandler.enable(sys.stderr)
        # A shell ignores SIGINT for a command in the background, nohup ignores SIGHUP, and their
        # processes inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        live(settings, socket.socket(fileno=keep))
        code = 0
    except SystemExit:
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _end(processes: list[_Process]) -> None:
    for process in processes:
        process.channel.sock.close()
        process.errors.close()
        if process.alive:
            os.kill(process.pid, signal.SIGKILL)
            os.waitpid(process.pid, 0)
            process.alive = False


def _last_words(process: _Process) -> str:
    """How a process has ended, and the end of its standard error."""
    ending = "has ended before"
    if process.alive:
        deadline = time.monotonic() + _DYING
        while not (found := os.waitpid(process.pid, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.001)
        process.alive = not found[0]
        code = os.waitstatus_to_exitcode(found[1])
        ending = "lives" if process.alive else f"has ended with {code}"
    process.errors.seek(0)
    text = process.errors.read()[-_LAST_WORDS:].decode(errors="replace")
    return f"process {process.pid} {ending}; standard error: {text!r}"


class _Run:
    """A program and its epilogue, which have run.

    Attributes:
      hung: an end did not answer; its process is not usable.
      gone: its process has ended; ``last_words`` tell how both ended, with their standard error.
      over_smc: connections over SMC-R that the server has accepted in the program.
      observation: what both ends observed.
    """

    def __init__(self, program: Program, ends: list[_Process], smc: bool) -> None:
        self._program = program
        self._ends = ends
        self._smc = smc
        self._lines: list[Line] = []
        self._step = -1
        self._incomplete = [True, True]  # a send of `LARGE` bytes of that end has not returned
        self.hung = self.gone = False
        self.last_words: list[str] = []
        self.over_smc = 0
        self.observation = self._observe()

    def _observe(self) -> Observation:
        try:
            self._open()
            for step in self._program.steps:
                self._step += 1
                self._perform(self._step, step)
                self._settle()
            if any(end.stopped for end in self._ends):
                for end in self._ends:
                    self._resume(end)
                self._settle()
            for both in EPILOGUE:
                self._step += 1
                for step in both:
                    self._perform(self._step, step)
                self._settle()
            self._check_bytes()
        except (Hung, TimeoutError) as error:
            self.hung = True
            self._lines.append(Line(0, self._step, 0, f"hung: {error}", self._step))
        except (EOFError, OSError) as error:
            self.hung = self.gone = True
            self._lines.append(Line(0, self._step, 0, f"an end is gone: {error!r}", self._step))
            self.last_words = [_last_words(end) for end in self._ends]
        return self._normalised()

    def _open(self) -> None:
        server, client = (end.channel for end in self._ends)
        kind = self._program.kind
        server.send("listen", kind)
        port = server.receive()
        server.send("open", self._program.styles[0], kind, 0)
        client.send("open", self._program.styles[1], kind, port)
        modes = client.receive(), server.receive()
        for end in self._ends:
            end.activity = -1
        expected = "smc-r" if self._smc else "tcp"
        if kind == "connecting":
            expected = "tcp"
        assert modes == (expected, expected), modes

    def _perform(self, number: int, step: Step) -> None:
        end = self._ends[step.end]
        name, argument = step.operations[0]
        if name == "pause":
            time.sleep(argument / 1000)
        elif name == "continue":
            self._resume(end)
        elif not end.alive:
            return
        elif name == "signal":
            os.kill(end.pid, argument)
            self._resume(end)
            self._reap(end)
        elif end.stopped:
            return
        elif name == "stop":
            os.kill(end.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, end.pid, os.WSTOPPED)
            end.stopped = True
        elif name == "exit":
            end.channel.send("exit", EXITS[argument])
            self._reap(end)
        elif name == "cancel":
            end.channel.send("cancel")
        else:
            end.channel.send("step", number, step.operations)

    def _resume(self, end: _Process) -> None:
        if end.stopped:
            time.sleep(_STOPPED if self._smc else 0)
            os.kill(end.pid, signal.SIGCONT)
            time.sleep(_NOTICED if self._smc else 0)
            end.stopped = False

    def _reap(self, end: _Process) -> None:
        deadline = time.monotonic() + PATIENCE
        while not os.waitpid(end.pid, os.WNOHANG)[0]:
            if time.monotonic() > deadline:
                raise Hung("the process does not end")
            time.sleep(0.001)
        end.alive = False
        time.sleep(_NOTICED if self._smc else 0)

    def _settle(self) -> None:
        """Wait until nothing more happens at either end.

        Both ends wait at the same time.  An end that has answered sleeps before it answers again,
        and only before a sleep a stack posts what it has deferred; the other end finds that in the
        round after the next.  So all is quiet if nothing happens in `_QUIET_ROUNDS` rounds.
        """
        active = [
            (number, end) for number, end in enumerate(self._ends) if end.alive and not end.stopped
        ]
        quiet = 0
        for _ in range(_MOST_ROUNDS):
            if self._round(active, collect=quiet == _QUIET_ROUNDS - 1):
                quiet = 0
                continue
            quiet += 1
            if quiet == _QUIET_ROUNDS:
                return
        raise Hung("the ends are never quiet")

    def _round(self, active: list[tuple[int, _Process]], *, collect: bool) -> bool:
        changed = False
        for _, end in active:
            end.channel.send("settle", collect)
        for number, end in active:
            activity, results = end.channel.receive()
            for step, position, result in results:
                self._lines.append(Line(number, step, position, result, self._step))
            if activity != end.activity or results:
                end.activity = activity
                changed = True
        return changed

    def _check_bytes(self) -> None:
        arrived: list[bytes | None] = []
        for end in self._ends:
            if not end.alive:
                arrived.append(None)
                continue
            end.channel.send("finish")
            data, over_smc = end.channel.receive()
            arrived.append(data)
            if end is self._ends[0]:
                self.over_smc = over_smc
        for number in range(2):
            done = {
                (line.step, line.position)
                for line in self._lines
                if line.end == number and line.result == "sent"
            }
            mine = list(sends(self._program, number))
            self._incomplete[number] = any(
                size == LARGE and (step, position) not in done for step, position, size in mine
            )
            other = arrived[1 - number]
            if other is None:
                continue
            texts = [
                (text(step, position, size), (step, position) in done)
                for step, position, size in mine
            ]
            for phase, both in enumerate(EPILOGUE, len(self._program.steps)):
                texts += [
                    (text(phase, position, size), False)
                    for step in both
                    if step.end == number
                    for position, (name, size) in enumerate(step.operations)
                    if name == "send"
                ]
            if self._program.kind == "connecting":
                continue
            if not self._overlap(number) and not _fits(other, texts):
                self._lines.append(Line(1 - number, self._step, 9, "wrong bytes", self._step))
            if not self._incomplete[number]:
                # The share of each reader is not compared, but their sum is.
                total = f"received {len(other)} {zlib.crc32(other):08x}"
                self._lines.append(Line(1 - number, self._step, TOTAL, total, self._step))
            least = sum(len(piece) for piece, complete in texts if complete)
            if len(other) < least and self._must_read_all(1 - number):
                self._lines.append(Line(1 - number, self._step, TOTAL + 1, MISSING, self._step))

    def _overlap(self, end: int) -> bool:
        """True if a send of this end has succeeded while an earlier one waited for room.

        Then the bytes of both are mixed.
        """
        lines = {line[1:3]: line for line in self._lines if line.end == end}
        mine = {(step, position): size for step, position, size in sends(self._program, end)}
        large = [key for key, size in mine.items() if size == LARGE]
        return any(
            first[0] <= lines[key].at <= (lines[first].at if first in lines else self._step)
            for key in mine
            if key in lines and lines[key].result == "sent"
            for first in large
            if first != key
        )

    def _must_read_all(self, reader: int) -> bool:
        """True if this end has found an orderly end of the stream.

        Then all that the other end has sent with success must have arrived before, on any transport
        and whatever the other one shows.
        """
        operations = {
            name
            for step in self._program.steps
            if step.end == reader
            for name, _ in step.operations
        }
        if operations & _READS_NOT_ALL:
            return False
        for line in self._lines:
            if line.end == reader and line.result == "end":
                return True
            if line.end == reader and any(word in line.result for word in _BREAKS):
                return False
        return False

    def _without_order(self, line: Line) -> Line:
        """Which tasks of a TLS stream get ClosedResourceError, and which BrokenResourceError, when
        one of them closes its transport, depends on the order in which Trio runs them."""
        steps = [step for step in self._program.steps if step.end == line.end]
        closes = (
            number
            for number, step in enumerate(self._program.steps)
            if step.end == line.end
            and any(name in _CLOSES_BELOW_TLS for name, _ in step.operations)
        )
        if (
            self._program.styles[line.end] == "tls"
            and len(steps) > 1
            and line.result in _ERRORS_OF_A_CLOSED_TRANSPORT
            and line.at >= next(closes, line.at + 1)
        ):
            return line._replace(result="closed or broken")
        return line

    def _normalised(self) -> Observation:
        lines = [
            self._without_order(line) for line in sorted(self._lines, key=lambda line: line[:3])
        ]
        if self._program.kind != "full":
            return tuple(lines)
        return tuple(
            line._replace(
                at=0,
                result=line.result.split()[0]
                if line.result.startswith(("read ", "peeked "))
                and (self._incomplete[1 - line.end] or self._program.readers(line.end) > 1)
                else line.result,
            )
            for line in lines
        )


def _common(data: bytes, piece: bytes) -> int:
    """Bytes at the beginning of both."""
    if data.startswith(piece):
        return len(piece)
    pairs = zip(data, piece, strict=False)
    differing = (position for position, (ours, theirs) in enumerate(pairs) if ours != theirs)
    return next(differing, min(len(data), len(piece)))


def _fits(data: bytes, texts: list[tuple[bytes, bool]]) -> bool:
    """True if the data is a beginning of these texts in a row, of which some may be cut off."""
    if not data or not texts:
        return not data
    piece, complete = texts[0]
    common = _common(data, piece)
    if common == len(piece):
        return _fits(data[common:], texts[1:])
    if common == len(data):
        return True
    if complete:
        return False
    return any(_fits(data[cut:], texts[1:]) for cut in (common, common - 1, 0) if cut >= 0)


def _phase(server: tuple[Operation, ...], client: tuple[Operation, ...]) -> tuple[Step, ...]:
    return tuple(Step(end, each) for end, each in enumerate((server, client)) if each)


_CANCEL: Final = (("cancel", 0),)
_READ: Final = (("read_all", 0),)
EPILOGUE: Final = (
    _phase(_CANCEL, _CANCEL),
    _phase(_READ, ()),
    _phase(_CANCEL, _READ),
    _phase((), _CANCEL),
    _phase((("close", 0),), ()),
    _phase((), (("send", 1),)),
    _phase((), (("send", 1), ("read_all", 0))),
    _phase(_CANCEL, _CANCEL),
    _phase((), (("close", 0),)),
    _phase((), _CANCEL),
)
"""Steps that follow every program: which bytes and which end are left, and how a send fails after
the peer has closed."""


def make_contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """TLS contexts of the server and the client."""
    authority = trustme.CA()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(server)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    return server, client
