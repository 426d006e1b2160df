"""The client of the control protocol: snapshots and captures of this user's running stacks.

`trio_smc.control.protocol` describes the protocol.  The client queries all stacks at the same time,
with one deadline for all.  The client decodes no answer before all answers have arrived or the
deadline has passed, so that decoding a large answer takes no time from the other processes.

An answer comes from another process, so this module checks the answer's shape (`SHAPES`) and the
range of its numbers, and makes its strings `printable`.  A shape is a type, a tuple of types, a
dict of fields, or a list with the shape of its items.  `Maybe` is a shape or null.

The process may run another release.  So an answer may have more fields than its shape, and a
missing field becomes None, which commands print as "-" and JSON has as null.  Only the fields that
identify an item (`KEYS`) are required.  If the release differs, one line on stderr says so.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import selectors
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from trio_smc import ConnectionCursors, ProtocolError, StackStatistics, StreamStatistics
from trio_smc._base.printable import clean, printable
from trio_smc._base.release import RELEASE
from trio_smc.capture.pcapng import whole_blocks_untrusted
from trio_smc.control import protocol as control
from trio_smc.control.protocol import DirectoryUnusable, PrivateDirectory
from trio_smc.tools.output import NoResult, ToolError, print_problem, user_name
from trio_smc.tools.places import Places, groups_of_processes, identity_of
from trio_smc.tools.proc import Process

__all__ = [
    "CHILD_START",
    "INCOMPLETE",
    "KEYS",
    "SHAPES",
    "TIMEOUT",
    "NoAnswer",
    "NotOwner",
    "SilentProcesses",
    "Snapshot",
    "UserDirectory",
    "check_untrusted",
    "start_child",
    "stream_capture",
    "take_snapshots",
    "take_untrusted",
]

TIMEOUT: Final = 3.0
"""Seconds for the answers of all stacks together.  Chosen."""
_MOST_USERS: Final = 64
"""Users that are inspected at the same time.  Chosen."""
CHILD_START: Final = 5.0
"""Seconds that a child process may take to start, in addition to `TIMEOUT`.  Chosen."""
_CHILD_END: Final = 1.0
"""Seconds that a killed child may take to end.  Chosen."""
_LATER_TIMEOUT: Final = 0.2
"""Seconds for a process that did not answer in the last round.  Chosen."""
_RETRY_INTERVAL: Final = 0.05
"""Seconds between two attempts to connect to a socket whose backlog is full.  Chosen."""
INCOMPLETE: Final = 1
"""The exit code if a process did not answer."""
_MAX_ANSWER: Final = 1 << 28
"""Largest number of bytes in the answer of one stack.  Chosen: a bound on memory."""
_MAX_ITEMS: Final = 1_000_000
"""Largest number of items in one list of an answer.  Chosen: a bound on memory."""
_PIECE: Final = 65536
"""Largest number of bytes that one call receives.  Chosen."""
_MAX_PROGRAM: Final = 60
"""Characters of a command line that are shown.  Chosen."""
_MAX_SENTENCE: Final = 200
"""Characters of an error message from a process that are shown.  Chosen."""
_PEER_ID: Final = 32
"""Largest number of characters of a peer ID.  Chosen; a peer ID has 16 hexadecimal digits."""
_MAX_RELEASE: Final = 20
"""Characters of the name of a release that are shown.  Chosen."""
_SHOWN: Final = 8
"""The largest number of processes that one line on stderr names.  Chosen."""
_MAX_NUMBER: Final = 1 << 64
"""The absolute value of each number in an answer is smaller.  Chosen: counters have 64 bits."""


class UserDirectory(NamedTuple):
    """A directory of a user that could not be inspected, among the processes that are silent."""

    uid: int
    number: int


_Silent = int | UserDirectory
"""A process number, or a directory."""


class NoAnswer(NoResult):
    """There are processes, and none of them sent a valid answer."""


class NotOwner(NoResult):
    """A process or a directory belongs to another user.

    Args:
      text: the error without a remedy.
      owner: the user.
      more: further options that root needs beside ``--user``.
    """

    def __init__(self, text: str, owner: int, more: str = "") -> None:
        super().__init__(text)
        self._owner = user_name(owner)
        self._more = more

    def line(self, options: argparse.Namespace) -> str:
        if os.geteuid() != 0:
            return str(self)
        if "user" in options:
            return f"{self} (as root: --user {self._owner}{self._more})"
        return f"{self} (run this command as user {self._owner})"


class NotMember(ToolError):
    """Root names a directory that a group shares, and is not in the group.

    Args:
      text: the error with a remedy.
      directory: the directory.
    """

    def __init__(self, text: str, directory: Path) -> None:
        super().__init__(text)
        self._directory = directory

    def line(self, options: argparse.Namespace) -> str:
        if "user" not in options:
            return str(self)
        return f"{self}; as root: --user NAME --directory {self._directory}, or --all"


@dataclass(slots=True)
class Snapshot:
    """The data of one stack.

    Attributes:
      pid: the process.
      stack: the peer ID, hexadecimal.
      release: of trio_smc in the process; None: it is older than 0.3.0.
      python: the version of Python, or None.
      uptime: seconds since the stack was opened, or None.
      uid: the user of the process.
      program: the command line of the process, shortened.
      ueids: the UEIDs with which the stack offers SMC-R version 2, or None.
      statistics, connections, link_groups, rnics, listeners, settings, events, interfaces: as in
        `control.snapshot`; empty if they were not requested.
    """

    pid: int
    stack: str = ""
    release: str | None = None
    python: str | None = None
    uptime: float | None = 0.0
    uid: int | None = None
    program: str = ""
    ueids: list[str] | None = field(default_factory=list)
    statistics: dict[str, Any] = field(default_factory=dict)
    connections: list[dict[str, Any]] = field(default_factory=list)
    link_groups: list[dict[str, Any]] = field(default_factory=list)
    rnics: list[dict[str, Any]] = field(default_factory=list)
    listeners: list[list[Any]] = field(default_factory=list)
    settings: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    interfaces: list[dict[str, Any]] = field(default_factory=list)
    sizes: dict[str, Any] | None = None
    """Histograms of sizes, if they were requested."""
    drain: int | None = None
    """After a drain or its end: the connections that still use the RNIC or the link group."""


class SilentProcesses:
    """The processes that did not answer.  One line on stderr names each of them, once; and another
    line those that run another release, once, which answer what they can.

    One object may serve several rounds of `take_snapshots`.  A process that was silent in the last
    round is queried again, but has less time to answer.

    Args:
      quiet: print nothing before `report` is called.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._named: dict[_Silent, str] = {}
        self._releases: dict[int, str | None] = {}  # of processes that run another one
        self.last: dict[_Silent, str] = {}
        """The silent processes and unusable directories of the last round, with error messages."""

    @property
    def exit_code(self) -> int:
        """1 if any process was silent in any round, else 0."""
        return INCOMPLETE if self._named else 0

    def replace(self, problems: dict[_Silent, str]) -> None:
        """Replace the silent processes of the last round, and print the new ones."""
        new = {pid: text for pid, text in problems.items() if pid not in self._named}
        self.last = problems
        self._named |= new
        if not self._quiet:
            _print_problems(new)

    def note_releases(self, snapshots: Sequence[Snapshot]) -> None:
        """Note the processes that run another release, and print the new ones."""
        found = {each.pid: each.release for each in snapshots if each.release != RELEASE}
        new = {pid: found[pid] for pid in found if pid not in self._releases}
        self._releases |= new
        if not self._quiet:
            _print_releases(new)

    def report(self) -> None:
        """Print all silent processes and other releases, if ``quiet`` has delayed that."""
        if self._quiet:
            _print_problems(self._named)
            _print_releases(self._releases)


def _print_problems(problems: dict[_Silent, str]) -> None:
    for text in problems.values():
        print_problem(text)


def _print_releases(releases: dict[int, str | None]) -> None:
    for release in dict.fromkeys(releases.values()):
        pids = [str(pid) for pid, each in releases.items() if each == release]
        more = f" and {len(pids) - _SHOWN} more" if len(pids) > _SHOWN else ""
        names = f"{'processes' if len(pids) > 1 else 'process'} {', '.join(pids[:_SHOWN])}{more}"
        print_problem(
            f"another release of trio_smc, {release or 'before 0.3.0'}, in {names}; this "
            f'command has {RELEASE}; "-" is a value that the other release does not report'
        )


def take_snapshots(
    directory: Path | Places,
    want: Sequence[str],
    pid: int | None = None,
    *,
    required: bool = True,
    silent: SilentProcesses | None = None,
    more: Mapping[str, Any] | None = None,
    seconds: float = 0,
) -> list[Snapshot]:
    """Query all stacks at the same time, or those of one process, and sort them by process number.

    All answers together may take `TIMEOUT` seconds.  The sockets of processes that have ended are
    removed from the directory.

    Args:
      directory: the private directory, or those of several users.
      want: the requested parts (`trio_smc.control.protocol.PARTS`).
      pid: the process to query; None: all.
      required: True if the absence of any stack is an error.
      seconds: how much longer than `TIMEOUT` the answers may take.
      more: further fields of the request, for the parts `trio_smc.control.protocol.DRAINS`.
      silent: receives the processes without a valid answer.  If ``silent`` is None, these processes
        are ignored as long as another process answers.

    Raises:
      NoAnswer: the process ``pid`` sent no valid answer, or all answers are damaged; without
        ``silent`` also if no process sent an answer.
      NoResult: there is no stack.
      ToolError: the directory is not private.
    """
    request = control.encode({"want": list(want), **(more or {})})
    last = silent.last if silent is not None else ()
    silent_before = frozenset(each for each in last if isinstance(each, int))
    round_ = _Round([], {})
    if isinstance(directory, Places):
        _take_places(round_, directory, want, pid, request, silent_before, seconds)
    else:
        _take(round_, directory, want, pid, request, silent_before, seconds, clean=True)
    found, problems, timed_out = round_.found, round_.problems, round_.timed_out
    if not found and problems and (silent is None or pid is not None or not timed_out):
        first, *others = problems
        if silent is not None:
            silent.replace({each: problems[each] for each in others})
        raise NoAnswer(problems[first])
    if not found and not problems and required:
        raise _no_stack(directory, pid)
    if silent is not None:
        silent.replace(problems)
        silent.note_releases(found)
    return found


@dataclass(slots=True)
class _Round:
    """The result of one round of queries.

    Attributes:
      found: the stacks that answered.
      problems: a sentence for each process that sent no valid answer, and for each directory that
        could not be inspected.
      timed_out: True if a process did not answer in time.
    """

    found: list[Snapshot]
    problems: dict[_Silent, str]
    timed_out: bool = False


def _take(
    round_: _Round, directory: Path, want: Sequence[str], pid: int | None, request: bytes,
    silent_before: AbstractSet[int], seconds: float, *, clean: bool,
) -> None:  # fmt: skip
    """Query the stacks of one directory.

    Args:
      clean: True if the sockets of dead processes are removed.
    """
    with _opened(directory) as root:
        names = [each for each in _named_sockets(root) if pid is None or each[0] == pid]
        queries = _query_all(root, names, request, silent_before, seconds, clean=clean)
        if clean and any(query.gone for query in queries):
            _remove_leftovers(directory)
        for query in queries:
            try:
                snapshot = _snapshot_untrusted(query, want)
            except (OSError, ProtocolError) as error:
                round_.problems[query.pid] = f"process {query.pid} {_problem(error)}"
                round_.timed_out = round_.timed_out or isinstance(error, TimeoutError)
            else:
                if snapshot is not None:
                    round_.found.append(snapshot)


def take_untrusted(request: dict[str, Any]) -> dict[str, Any]:
    """Query the stacks of one user, in the child process of `_take_places`, and return the result
    as values for JSON.  The request has the fields that `_take_places` sends."""
    round_ = _Round([], {})
    errors: list[str] = []
    with identity_of(request["uid"], request["groups"]):
        for directory in request["directories"]:
            try:
                _take(
                    round_, Path(directory), request["want"], request["pid"],
                    request["request"].encode("latin-1"), frozenset(request["silent_before"]),
                    request["seconds"], clean=False,
                )  # fmt: skip
            except ToolError as error:
                errors.append(str(error))
    return {
        "found": [asdict(each) for each in round_.found],
        "problems": list(round_.problems.items()),
        "timed_out": round_.timed_out,
        "errors": errors,
    }


def _take_places(
    round_: _Round, places: Places, want: Sequence[str], pid: int | None, request: bytes,
    silent_before: AbstractSet[int], seconds: float,
) -> None:  # fmt: skip
    """Query the stacks of several users at the same time, with one child process for each.

    Nothing is removed.  A child that does not end in time is killed.
    """
    by_uid: dict[int, list[str]] = {}
    for place in places.all:
        by_uid.setdefault(place.uid, []).append(str(place.directory))
    users = list(by_uid.items())
    if places.truncated or len(users) > _MOST_USERS:
        print_problem("there are more users or directories than are inspected")
    groups = groups_of_processes()
    deadline = time.monotonic() + TIMEOUT + seconds + CHILD_START
    with contextlib.ExitStack() as exits:
        children = []
        for uid, directories in users[:_MOST_USERS]:
            message = {
                "uid": uid, "groups": sorted(groups.get(uid, ())), "directories": directories,
                "want": list(want), "pid": pid,
                "request": request.decode("latin-1"), "silent_before": list(silent_before),
                "seconds": seconds,
            }  # fmt: skip
            child, output = start_child(message)
            exits.enter_context(output)
            exits.callback(_end_child, child)
            children.append((uid, child, output))
        for uid, child, output in children:
            try:
                child.wait(max(deadline - time.monotonic(), 0.1))
                output.seek(0)
                answer = json.load(output)
            except (subprocess.TimeoutExpired, ValueError) as error:
                late = isinstance(error, subprocess.TimeoutExpired)
                why = "does not answer in time" if late else "cannot be inspected"
                problem = f"user {user_name(uid)}: a directory {why}"
                round_.problems[UserDirectory(uid, 0)] = problem
                round_.timed_out = True
                continue
            round_.found += [Snapshot(**each) for each in answer["found"]]
            round_.problems |= dict(answer["problems"])
            round_.timed_out = round_.timed_out or answer["timed_out"]
            for index, text in enumerate(answer["errors"], 1):
                round_.problems[UserDirectory(uid, index)] = f"user {user_name(uid)}: {text}"
    # One process may have been found by two paths to its directory.
    once = {(each.pid, each.stack): each for each in round_.found}
    round_.found = sorted(once.values(), key=lambda each: each.pid)


def start_child(message: dict[str, Any]) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """Start a child process, and return it with the file of its output."""
    # The child finds modules where this process does, and not in the working directory.
    code = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    code += "from trio_smc.tools.inspection import main; main()"
    paths = [os.path.abspath(each) for each in sys.path if each]
    output = os.fdopen(os.memfd_create("trio-smc-inspection", os.MFD_CLOEXEC), "w+b")
    with os.fdopen(os.memfd_create("trio-smc-request", os.MFD_CLOEXEC), "w+b") as request:
        request.write(json.dumps(message).encode())
        request.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", code, json.dumps(paths)],
            stdin=request, stdout=output, stderr=subprocess.DEVNULL, cwd="/",
        )  # fmt: skip
    return child, output


def _end_child(child: subprocess.Popen[bytes]) -> None:
    """Kill a child that has not ended, and forget it if it cannot be killed."""
    if child.poll() is None:
        child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_CHILD_END)


def _is_shared(directory: Path) -> bool:
    """True if a group shares the directory."""
    try:
        with contextlib.closing(PrivateDirectory.open(directory, create=False)) as root:
            return root.group is not None
    except (OSError, DirectoryUnusable):
        return False


def _remove_leftovers(directory: Path) -> None:
    """Remove what a dead process has left: its control socket is not its only one."""
    with contextlib.suppress(OSError, DirectoryUnusable), contextlib.ExitStack() as opened:
        root = PrivateDirectory.open(directory, create=False)
        opened.callback(root.close)
        root.remove_leftovers()


def _no_stack(directory: Path | Places, pid: int | None) -> NoResult:
    if isinstance(directory, Places):
        users = {each.uid for each in directory.all}
        whose = f"user {user_name(users.pop())}" if len(users) == 1 else "any user"
        number = f" and number {pid}" if pid else ""
        return NoResult(f"no running process of {whose} has a stack{number}")
    if pid is None:
        if _is_shared(directory):
            return NoResult(
                f"no running process of user {user_name(os.geteuid())} has a stack in {directory}, "
                "which a group shares; a process answers only its own user"
            )
        return NoResult(f"no running process has a stack in {directory}")
    try:
        owner = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return NoResult(f"there is no process {pid}")
    if owner != os.geteuid():
        text = f"process {pid} belongs to user {owner}, and only that user may query it"
        return NotOwner(text, owner)
    return NoResult(
        f"process {pid} has no stack in {directory}: it does not use trio_smc, "
        "has another directory, or has Config(control=False)"
    )


def _problem(error: Exception) -> str:
    if isinstance(error, _RefusedError):
        return f"answers with an error: {error}"
    if isinstance(error, ProtocolError):
        return f"sent a damaged answer: {error}"
    if isinstance(error, TimeoutError):
        return "does not answer; it may be stopped, or its event loop blocked"
    return f"cannot be queried: {error.strerror if isinstance(error, OSError) else error}"


# --- names -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[PrivateDirectory | None]:
    """Open the directory of this user's control sockets; None if there is none."""
    with contextlib.ExitStack() as opened:
        below = None
        try:
            root = PrivateDirectory.open(directory, create=False)
            opened.callback(root.close)
            below = root.below(root.member_directory(control.DIRECTORY, private=True))
            opened.callback(below.close)
        except FileNotFoundError:
            pass
        except DirectoryUnusable as error:
            raise _of_another_user(directory, str(error)) or ToolError(str(error)) from None
        except OSError as error:
            raise ToolError(f"{directory}: {error.strerror}") from None
        yield below


def _of_another_user(directory: Path, text: str) -> NotOwner | NotMember | None:
    """The error if root names the directory of another user, or of a group of other users.

    text: the error if it does not depend on the command's options.
    """
    with contextlib.suppress(OSError):
        found = os.lstat(directory)
        owner = found.st_uid
        if os.geteuid() == 0 and owner == 0 and stat.S_IMODE(found.st_mode) == 0o3770:
            # That mode shares it, so the only reason is that root is not in the group.
            return NotMember(text, directory)
        if os.geteuid() == 0 and owner != 0:
            text = f"{directory} belongs to user {user_name(owner)}, and root does not use it"
            return NotOwner(text, owner, f" --directory {directory}")
    return None


def _named_sockets(root: PrivateDirectory | None) -> list[tuple[int, str]]:
    if root is None:
        return []
    named = ((control.pid_of_name(name), name) for name in root.sockets())
    return sorted((pid, name) for pid, name in named if pid is not None and root.has(name))


# --- all stacks at once -----------------------------------------------------------------------


class _RefusedError(ProtocolError):
    """The answer is an error message of the process."""


class _Query:
    """The query of one stack, and the bytes of its answer so far.

    Attributes:
      pid: the process.
      data: the bytes of the answer.
      done: True if the query has ended: the answer is complete, or the query failed.
      gone: True if the process has ended.
      error: the reason why the query failed.
      uid: the user of the process, once it is connected.
    """

    def __init__(
        self, root: PrivateDirectory, name: str, pid: int, request: bytes, *, clean: bool
    ) -> None:
        self._clean = clean
        self.pid = pid
        self.data = bytearray()
        self.done = self.gone = False
        self.error: Exception | None = None
        self.uid: int | None = None
        self._root = root
        self._name = name
        self._request = memoryview(request)
        self._connected = False
        self.sock: socket.socket | None = None

    @property
    def interest(self) -> int:
        """The events to wait for; 0 if the backlog is full: `proceed` must try again later."""
        if not self._connected:
            return 0
        return selectors.EVENT_WRITE if self._request else selectors.EVENT_READ

    def close(self) -> None:
        """Close the socket.  This does not wait, even if the process has sent descriptors whose
        closing blocks."""
        if self.sock is not None:
            closer = control.Closer("control client")
            closer.discard(self.sock)
            closer.join()

    def proceed(self) -> None:
        """Connect, send and receive as far as possible without waiting."""
        try:
            if self.sock is None:
                self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                control.refuse_descriptors(self.sock)
                self.sock.setblocking(False)
            if not self._connected:
                if not _connect(self.sock, self._root, self._name, clean=self._clean):
                    self.gone = self.done = True
                    return
                self._connected = True
                self.uid = control.peer_user(self.sock)
            while self._request:
                self._request = self._request[self.sock.send(self._request) :]
            # Receive only one piece, so that a fast sender does not delay the other queries.
            piece = control.receive_bytes(self.sock, _PIECE)
            self.data += piece
            self.done = not piece
            if len(self.data) > _MAX_ANSWER:
                raise ProtocolError(f"more than {_MAX_ANSWER} bytes")
        except BlockingIOError:
            pass
        except (OSError, ProtocolError) as error:
            self.error, self.done = error, True


def _query_all(
    root: PrivateDirectory | None,
    names: Sequence[tuple[int, str]],
    request: bytes,
    silent_before: AbstractSet[int],
    seconds: float,
    *,
    clean: bool,
) -> list[_Query]:
    """Send ``request`` to all sockets, and receive their answers for at most `TIMEOUT` seconds.

    Args:
      root: the directory of the sockets.
      names: process numbers and names of sockets.
      request: the encoded request.
      silent_before: processes that did not answer in the last round, and have less time now.
      seconds: how much longer the answers may take.
      clean: True if the sockets of dead processes are removed.
    """
    start = time.monotonic()
    if root is None:
        return []
    with contextlib.ExitStack() as exits:
        queries = []
        for pid, name in names:
            query = _Query(root, name, pid, request, clean=clean)
            exits.callback(query.close)
            queries.append(query)
        selector = exits.enter_context(selectors.DefaultSelector())
        waiting = queries
        while True:
            for each in waiting:
                each.proceed()
                _register(selector, each)
            waiting = [each for each in queries if not each.done]
            any_new = any(each.pid not in silent_before for each in waiting)
            timeout = TIMEOUT if any_new else min(TIMEOUT, _LATER_TIMEOUT)
            left = start + timeout + seconds - time.monotonic()
            if not waiting or left <= 0:
                return queries
            backlog_full = [each for each in waiting if not each.interest]
            ready = selector.select(min(left, _RETRY_INTERVAL) if backlog_full else left)
            waiting = [key.data for key, _ in ready] + backlog_full


def _register(selector: selectors.BaseSelector, query: _Query) -> None:
    """Let the selector wait for the events of a query."""
    if query.sock is None:
        return  # no socket could be created: this process has too many open files
    known = query.sock in selector.get_map()
    if query.done or not query.interest:
        if known:
            selector.unregister(query.sock)
    elif known:
        selector.modify(query.sock, query.interest, query)
    else:
        selector.register(query.sock, query.interest, query)


def _snapshot_untrusted(query: _Query, want: Sequence[str]) -> Snapshot | None:
    """Return the snapshot in an answer; None if the process has ended.

    A requested list may be missing, because the stack of an older release ignores unknown parts.

    Raises:
      OSError, ProtocolError: the process sent no valid answer.
    """
    if query.gone:
        return None
    if query.error is not None:
        raise query.error
    if query.done and not query.data and not os.path.exists(f"/proc/{query.pid}"):
        return None  # the process has ended after it accepted the connection
    snapshot = Snapshot(query.pid)
    answer = _Answer(query.data, complete=query.done)
    while True:
        length = control.length_untrusted(answer.take(control.HEADER_SIZE), control.REPLY_LIMIT)
        if not _add_untrusted(snapshot, control.decode_untrusted(answer.take(length))):
            break
    if "statistics" in want and not snapshot.statistics:
        raise ProtocolError("the answer has no statistics")
    snapshot.program = _program(query.pid)
    snapshot.uid = query.uid
    return snapshot


class _Answer:
    """Reads the bytes of an answer in order.

    Args:
      data: the bytes that have arrived.
      complete: True if the process has closed the connection, so that no more bytes arrive.
    """

    def __init__(self, data: bytearray, *, complete: bool) -> None:
        self._data = memoryview(data)
        self._complete = complete

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes.

        Raises:
          ProtocolError: the answer ends too early.
          TimeoutError: the rest of the answer did not arrive in time.
        """
        taken, self._data = self._data[:count], self._data[count:]
        if len(taken) == count:
            return bytes(taken)
        if self._complete:
            raise ProtocolError(f"the answer ends after {len(taken)} of {count} bytes")
        raise TimeoutError


def _connect(sock: socket.socket, root: PrivateDirectory, name: str, *, clean: bool = True) -> bool:
    """Connect to a stack's control socket; False if the process has ended.

    Args:
      sock: a new socket.
      root: the directory of the socket.
      name: its name.
      clean: True if the socket of a dead process is removed.

    Raises:
      BlockingIOError, TimeoutError: the backlog is full.
      OSError: the socket cannot be reached, or belongs to another user.
    """
    try:
        with root.socket_at(name) as path:
            sock.connect(path)
    except FileNotFoundError:
        return False  # the process has just ended
    except ConnectionRefusedError:
        if clean:
            with contextlib.suppress(OSError):
                root.remove(name)
        return False
    uid = control.peer_user(sock)
    if uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"its control socket belongs to user {uid}")
    return True


def _connect_before(
    sock: socket.socket, root: PrivateDirectory, name: str, deadline: float
) -> bool:
    """As `_connect`, but wait while the backlog is full.  Raises TimeoutError at the deadline."""
    while True:
        sock.settimeout(_time_left(deadline))
        try:
            return _connect(sock, root, name)
        except BlockingIOError:
            time.sleep(min(_RETRY_INTERVAL, _time_left(deadline)))


def _add_untrusted(snapshot: Snapshot, message: dict[str, Any]) -> bool:
    """Add a message to the snapshot; False if this is the last message.

    Raises:
      ProtocolError: the message has a wrong shape, or is an error.
    """
    part: Any = message.get("part")
    data: Any = message.get("data")
    if part == "error":
        raise _RefusedError(printable(data, _MAX_SENTENCE))
    if part == "end":
        if not snapshot.stack:
            raise ProtocolError('the answer has no part "process"')
        return False
    if part in control.DRAINS:
        check_untrusted(data, int, part)
        snapshot.drain = data
        return True
    if part == control.SIZES:
        check_untrusted(data, _SIZES, part)
        snapshot.sizes = data
        return True
    if part not in SHAPES:
        return True  # the process is newer than this command
    check_untrusted(data, SHAPES[part], part)
    data = clean(data)
    if part == "process":
        snapshot.stack, snapshot.uptime = data["stack"], data["uptime"]
        snapshot.ueids = data["ueids"]
        if data["release"] is not None:
            snapshot.release = printable(data["release"], _MAX_RELEASE)
        if data["python"] is not None:
            snapshot.python = printable(data["python"], _MAX_RELEASE)
    elif part == "statistics":
        snapshot.statistics = data
    else:
        present = getattr(snapshot, part)
        if len(present) + len(data) > _MAX_ITEMS:
            raise ProtocolError(f"more than {_MAX_ITEMS} {part}")
        present += data
    return True


def _program(pid: int) -> str:
    """The command line of a process, shortened, and without the directory of the executable."""
    words: list[str] = []
    with contextlib.suppress(OSError), Process(pid) as process:
        words = process.command()
    words = [os.path.basename(words[0]), *words[1:]] if words else words
    return printable(" ".join(words).strip(), _MAX_PROGRAM)


# --- captures ---------------------------------------------------------------------------------


def stream_capture(
    directory: Path, pid: int, stack: str | None, payload: int, seconds: float | None
) -> Generator[bytes, None, None]:
    """Yield pieces of a capture until the stack is closed or ``seconds`` have passed.

    Each piece consists of whole pcapng blocks, so that after each piece the file is valid.

    Args:
      directory: the private directory.
      pid: the process.
      stack: the peer ID of the stack; None: the only stack of the process.
      payload: bytes of each RDMA write to keep.
      seconds: the duration; None: no limit.

    Raises:
      ToolError: there is no such stack, or it sent no valid answer.
    """
    end = None if seconds is None else time.monotonic() + seconds
    with contextlib.ExitStack() as exits:
        sock = _start_capture(directory, pid, stack, payload, exits)
        waiting = bytearray()
        while True:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return
            sock.settimeout(left)
            try:
                piece = control.receive_bytes(sock, _PIECE)
            except (TimeoutError, ConnectionError):
                return
            except ProtocolError as error:
                raise ToolError(f"process {pid} {_problem(error)}") from None
            if not piece:
                return
            waiting += piece
            try:
                count = whole_blocks_untrusted(waiting)
            except ProtocolError as error:
                raise ToolError(f"process {pid} {_problem(error)}") from None
            if count:
                yield bytes(waiting[:count])
                del waiting[:count]


def _start_capture(
    directory: Path, pid: int, stack: str | None, payload: int, exits: contextlib.ExitStack
) -> socket.socket:
    """Connect to the chosen stack and start the capture."""
    found: dict[str, socket.socket] = {}
    deadline = time.monotonic() + TIMEOUT
    with _opened(directory) as root:
        for number, name in _named_sockets(root):
            if root is None or number != pid:
                continue
            sock = exits.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            control.refuse_descriptors(sock)
            try:
                if _connect_before(sock, root, name, deadline):
                    sock.sendall(control.encode({"want": [control.CAPTURE], "payload": payload}))
                    first = _read_message(sock, deadline)
                    found[_stack_untrusted(first)] = sock
            except (OSError, ProtocolError) as error:
                raise ToolError(f"process {number} {_problem(error)}") from None
    if not found:
        raise _no_stack(directory, pid)
    if stack is None and len(found) > 1:
        raise ToolError(f"process {pid} has several stacks (--stack): {', '.join(sorted(found))}")
    chosen = found.pop(next(iter(found)) if stack is None else stack.lower(), None)
    if chosen is None:
        raise ToolError(f"process {pid} has no stack {stack}; it has {', '.join(sorted(found))}")
    for other in found.values():
        other.close()
    return chosen


def _read_message(sock: socket.socket, deadline: float) -> dict[str, Any]:
    header = _receive_exactly(sock, control.HEADER_SIZE, deadline)
    length = control.length_untrusted(header, control.REPLY_LIMIT)
    return control.decode_untrusted(_receive_exactly(sock, length, deadline))


def _receive_exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < count:
        sock.settimeout(_time_left(deadline))
        piece = control.receive_bytes(sock, min(count - len(data), _PIECE))
        if not piece:
            raise ProtocolError(f"the answer ends after {len(data)} of {count} bytes")
        data += piece
    return bytes(data)


def _time_left(deadline: float) -> float:
    """Seconds until the deadline.  Raises TimeoutError if it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _stack_untrusted(message: dict[str, Any]) -> str:
    """The peer ID in the message that starts a capture.

    Raises:
      ProtocolError: the message does not start a capture.
    """
    data = message.get("data")
    if message.get("part") == "error":
        raise _RefusedError(printable(data, _MAX_SENTENCE))
    if message.get("part") != control.CAPTURE or not isinstance(data, str):
        raise ProtocolError("the process does not support captures")
    return printable(data, _PEER_ID)


# --- shapes -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Maybe:
    """The shape of a value that is null or has the shape ``shape``."""

    shape: Any


_ADDRESS: Final = [(str, int)]
_LISTS: Final = ("agreed", "fallbacks")
_AGREED: Final = {"version": int, "release": int, "ueid": Maybe(str), "direct": bool}
KEYS: Final = frozenset({"stack", "mode", "number", "name", "count"})
"""The fields that an item must have, because nothing can be said about it without them."""
SHAPES: Final[dict[str, Any]] = {
    "process": {
        "pid": int,
        "release": str,
        "python": str,
        "stack": str,
        "uptime": (int, float),
        "ueids": [str],
    },
    "statistics": {
        **{each.name: int for each in fields(StackStatistics) if each.name not in _LISTS},
        "agreed": [{**_AGREED, "count": int}],
        "fallbacks": [{"origin": str, "reason": str, "count": int}],
    },
    "connections": [
        {
            "mode": str,
            "state": str,
            "local": Maybe(_ADDRESS),
            "peer": Maybe(_ADDRESS),
            "flags_sent": Maybe(str),
            "flags_received": Maybe(str),
            "send_queue": int,
            "receive_queue": int,
            "link_group": Maybe(int),
            "link": Maybe(int),
            "rnic": Maybe(str),
            **{name: Maybe(shape) for name, shape in _AGREED.items()},
            "fallback": Maybe(
                {
                    "reason": str,
                    "origin": str,
                    "code": Maybe(int),
                    "peer_code": Maybe(int),
                    "message": str,
                    "remedy": str,
                }
            ),
            "cursors": Maybe({each.name: int for each in fields(ConnectionCursors)}),
            "statistics": {each.name: int for each in fields(StreamStatistics)},
        }
    ],
    "link_groups": [
        {
            "number": int,
            "role": str,
            "peer_id": str,
            "kind": str,
            "asymmetric_side": Maybe(str),
            "state": str,
            "drained": bool,
            **_AGREED,
            "links": [
                {
                    "number": int,
                    "state": str,
                    "rnic": str,
                    "port": Maybe(int),
                    "gid": str,
                    "peer_gid": Maybe(str),
                    "netdev": Maybe(str),
                    "vlan": Maybe(int),
                    "pnet": [str],
                    "user_id": int,
                    "peer_user_id": int,
                    "connections": int,
                }
            ],
            "rmbs": [{"element_size": int, "elements": int, "in_use": int}],
        }
    ],
    "rnics": [
        {
            "name": str,
            "kind": str,
            "variant": Maybe(str),
            "device": Maybe(str),
            "port": Maybe(int),
            "port_active": bool,
            "drained": bool,
            "gid": str,
            "mac": str,
            "mtu": int,
            "netdev": Maybe(str),
            "vlan": Maybe(int),
            "pnet": [str],
            "links": int,
            "critical": int,
        }
    ],
    "listeners": [_ADDRESS],
    "interfaces": [{"name": str, "vlan": Maybe(int), "addresses": [str]}],
    "settings": [{"name": str, "value": str}],
    "events": [
        {
            "time": (int, float),
            "subject": str,
            "what": str,
            "old": Maybe(str),
            "new": str,
            "cause": str,
        }
    ],
}


_HISTOGRAM: Final = [{"limit": int, "count": int}]
_SIZES: Final = {"sent": _HISTOGRAM, "received": _HISTOGRAM}


def check_untrusted(value: Any, shape: Any, where: str) -> None:
    """Check the shape of a part of an answer.  Missing fields become None, unless required.

    Args:
      value: the decoded part; it is changed.
      shape: the expected shape.
      where: the name of the part, for the error.

    Raises:
      ProtocolError: the part has another shape.
    """
    match shape:
        case Maybe():
            if value is not None:
                check_untrusted(value, shape.shape, where)
        case dict():
            _check_fields_untrusted(value, shape, where)
        case [inner]:
            if not isinstance(value, list):
                raise ProtocolError(f"{where} is not a list")
            for item in value:
                check_untrusted(item, inner, where)
        case _:
            unexpected_bool = isinstance(value, bool) and shape is not bool
            if unexpected_bool or not isinstance(value, shape):
                raise ProtocolError(f"{where} has the wrong type")
            # The comparison is also False for NaN.
            if isinstance(value, int | float) and not -_MAX_NUMBER < value < _MAX_NUMBER:
                raise ProtocolError(f"{where} is out of range")


def _check_fields_untrusted(value: Any, shape: dict[str, Any], where: str) -> None:
    """`check_untrusted` of an object."""
    if not isinstance(value, dict):
        raise ProtocolError(f"{where} is not an object")
    for name, inner in shape.items():
        if name in value:
            check_untrusted(value[name], inner, f"{where}.{name}")
        elif name in KEYS:
            raise ProtocolError(f"{where} has no {name}")
        else:
            value[name] = None
