"""The asking side of the control protocol: snapshots and captures of this user's running stacks.

Plain blocking sockets with one deadline for each stack; the protocol is told in
`trio_smc.control.protocol`.  What an answer holds was written by another process: its parts are
checked for their shape here (`SHAPES`).

A shape is a type, a tuple of types, a dict of fields that must be there (others may be, too), or
a list of one shape for the items of a list.  `Maybe` is a shape or null.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from trio_smc import ConnectionCursors, ProtocolError, StackStatistics, StreamStatistics
from trio_smc.capture.pcapng import whole_blocks_untrusted
from trio_smc.control import protocol as control
from trio_smc.tools.output import ToolError

__all__ = [
    "PATIENCE",
    "SHAPES",
    "Snapshot",
    "check_untrusted",
    "stream_capture",
    "take_snapshots",
]

PATIENCE: Final = 3.0
"""Seconds for one stack's whole answer."""
_ITEMS: Final = 1_000_000
"""Items of one list that are taken from an answer."""
_PIECE: Final = 65536


@dataclass(slots=True)
class Snapshot:
    """What one stack said of itself.

    Attributes:
      pid: its process.
      stack: its peer ID, hexadecimal.
      uptime: seconds since it was opened.
      program: the command line of the process, shortened.
      ueids: by which it offers SMC-R version 2.
      statistics, connections, link_groups, rnics, listeners: as `control.snapshot` makes them;
        empty when they were not asked for.
    """

    pid: int
    stack: str = ""
    uptime: float = 0.0
    program: str = ""
    ueids: list[str] = field(default_factory=list)
    statistics: dict[str, Any] = field(default_factory=dict)
    connections: list[dict[str, Any]] = field(default_factory=list)
    link_groups: list[dict[str, Any]] = field(default_factory=list)
    rnics: list[dict[str, Any]] = field(default_factory=list)
    listeners: list[list[Any]] = field(default_factory=list)


def take_snapshots(
    directory: Path, want: Sequence[str], pid: int | None = None, *, some: bool = True
) -> list[Snapshot]:
    """Ask all stacks, or those of one process, in the order of their process numbers.

    Names of processes that are gone are skipped, and removed.  Without `pid`, stacks that do not
    answer are left out as long as another one does.

    Args:
      directory: the private directory.
      want: parts (`trio_smc.control.protocol.PARTS`).
      pid: only this process.
      some: whether finding no stack at all is an error.

    Raises:
      ToolError: the directory is not private, no stack answers, or an answer is damaged.
    """
    found: list[Snapshot] = []
    problems: list[str] = []
    with _opened(directory) as root:
        for number, name in _named_sockets(root):
            if pid is not None and number != pid:
                continue
            try:
                snapshot = _ask(root, name, number, want)
            except (OSError, ProtocolError) as error:
                problems.append(f"process {number} {_said(error)}")
            else:
                if snapshot is not None:
                    found.append(snapshot)
    if problems and (pid is not None or not found):
        raise ToolError(problems[0])
    if not found and some:
        raise ToolError(_nobody(directory, pid))
    return found


def _nobody(directory: Path, pid: int | None) -> str:
    if pid is None:
        return f"no running process has a stack in {directory}"
    try:
        owner = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return f"there is no process {pid}"
    if owner != os.geteuid():
        return f"process {pid} is user {owner}'s, and answers nobody else"
    return (
        f"process {pid} has no stack in {directory}; it may not use trio_smc, "
        "have another directory, or be set to Config(control=False)"
    )


def _said(error: Exception) -> str:
    if isinstance(error, ProtocolError):
        return f"gave a damaged answer: {error}"
    if isinstance(error, TimeoutError):
        return "does not answer; its event loop may be blocked"
    return f"cannot be asked: {error.strerror if isinstance(error, OSError) else error}"


# --- names -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[int | None]:
    """The open directory of control sockets; None where there is none."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    root = below = None
    try:
        try:
            root = os.open(directory, flags)
            found = os.fstat(root)
            shared = control.shared_group(directory, found) is not None
            if not shared and found.st_uid != os.geteuid():
                raise ToolError(f"{directory} belongs to user {found.st_uid}")
            if not shared and found.st_mode & 0o077:
                raise ToolError(
                    f"{directory} has mode {stat.S_IMODE(found.st_mode):o} "
                    "where only 700 is private"
                )
            below = os.open(control.DIRECTORY, flags, dir_fd=root)
        except FileNotFoundError:
            below = None
        except OSError as error:
            raise ToolError(f"{directory}: {error.strerror}") from None
        yield below
    finally:
        for descriptor in (root, below):
            if descriptor is not None:
                os.close(descriptor)


def _named_sockets(root: int | None) -> list[tuple[int, str]]:
    if root is None:
        return []
    named = ((control.pid_of_name(name), name) for name in os.listdir(root))
    return sorted((pid, name) for pid, name in named if pid is not None)


# --- one stack -------------------------------------------------------------------------------


def _ask(root: int | None, name: str, pid: int, want: Sequence[str]) -> Snapshot | None:
    """A stack's answer; None when its process is gone.

    Raises:
      OSError, ProtocolError: it does not answer, or not as it should.
    """
    deadline = time.monotonic() + PATIENCE
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        if not _connect(sock, root, name):
            return None
        snapshot = Snapshot(pid, program=_program(pid))
        sock.sendall(control.encode({"want": list(want)}))
        while _take_untrusted(snapshot, _read_message(sock, deadline)):
            pass
        return snapshot


def _connect(sock: socket.socket, root: int | None, name: str) -> bool:
    """Connect to a stack's control socket; False when its process is gone.

    Raises:
      OSError, ProtocolError: it does not answer, or is another user's.
    """
    sock.settimeout(PATIENCE)
    try:
        sock.connect(f"/proc/self/fd/{root}/{name}")
    except FileNotFoundError:
        return False  # it ended since
    except ConnectionRefusedError:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=root)
        return False
    uid = control.peer_user(sock)
    if uid != os.geteuid():
        raise ProtocolError(f"it is user {uid}'s")
    return True


def _take_untrusted(snapshot: Snapshot, message: dict[str, Any]) -> bool:
    """Add a message to the snapshot; False after the last one.

    Raises:
      ProtocolError: it has not the shape it should have, or is a refusal.
    """
    part: Any = message.get("part")
    data: Any = message.get("data")
    if part == "error":
        raise ProtocolError(str(data)[:200])
    if part == "end":
        if not snapshot.stack:
            raise ProtocolError("it ended before it began")
        return False
    if part not in SHAPES:
        return True  # something newer than this program
    check_untrusted(data, SHAPES[part], part)
    if part == "process":
        snapshot.stack, snapshot.uptime = data["stack"], float(data["uptime"])
        snapshot.ueids = data["ueids"]
    elif part == "statistics":
        snapshot.statistics = data
    else:
        present = getattr(snapshot, part)
        if len(present) + len(data) > _ITEMS:
            raise ProtocolError(f"more than {_ITEMS} {part}")
        present += data
    return True


def _read_message(sock: socket.socket, deadline: float) -> dict[str, Any]:
    header = _exactly(sock, control.HEADER_SIZE, deadline)
    length = control.length_untrusted(header, control.REPLY_LIMIT)
    return control.decode_untrusted(_exactly(sock, length, deadline))


def _exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < count:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        sock.settimeout(left)
        piece = sock.recv(min(count - len(data), _PIECE))
        if not piece:
            raise ProtocolError(f"it ends after {len(data)} of {count} bytes")
        data += piece
    return bytes(data)


def _program(pid: int) -> str:
    """The command line, as far as it tells programs apart."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return ""
    words = [os.path.basename(words[0]), *words[1:]] if words else words
    return " ".join(words).strip()[:60]


# --- captures ---------------------------------------------------------------------------------


def stream_capture(
    directory: Path, pid: int, stack: str | None, payload: int, seconds: float | None
) -> Generator[bytes, None, None]:
    """Pieces of the file, until the stack is closed or ``seconds`` have passed.

    Each is made of whole blocks, so that the file is whole whenever one stops.

    Args:
      directory: the private directory.
      pid, stack: whose capture; ``stack`` is a peer ID, needed where a process has several.
      payload: how many bytes of each RDMA write to keep.

    Raises:
      ToolError: there is no such stack, or it does not answer as it should.
    """
    end = None if seconds is None else time.monotonic() + seconds
    with contextlib.ExitStack() as exits:
        sock = _chosen(directory, pid, stack, payload, exits)
        waiting = bytearray()
        while True:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return
            sock.settimeout(left)
            try:
                piece = sock.recv(_PIECE)
            except (TimeoutError, ConnectionError):
                return
            if not piece:
                return
            waiting += piece
            try:
                count = whole_blocks_untrusted(waiting)
            except ProtocolError as error:
                raise ToolError(f"process {pid} {_said(error)}") from None
            if count:
                yield bytes(waiting[:count])
                del waiting[:count]


def _chosen(
    directory: Path, pid: int, stack: str | None, payload: int, exits: contextlib.ExitStack
) -> socket.socket:
    """The connection to the stack that is meant, its answer begun."""
    found: dict[str, socket.socket] = {}
    with _opened(directory) as root:
        for number, name in _named_sockets(root):
            if number != pid:
                continue
            sock = exits.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            try:
                if _connect(sock, root, name):
                    sock.sendall(control.encode({"want": [control.CAPTURE], "payload": payload}))
                    begun = _read_message(sock, time.monotonic() + PATIENCE)
                    found[_stack_untrusted(begun)] = sock
            except (OSError, ProtocolError) as error:
                raise ToolError(f"process {number} {_said(error)}") from None
    if not found:
        raise ToolError(_nobody(directory, pid))
    if stack is None and len(found) > 1:
        raise ToolError(f"process {pid} has several stacks (--stack): {', '.join(sorted(found))}")
    chosen = found.pop(next(iter(found)) if stack is None else stack.lower(), None)
    if chosen is None:
        raise ToolError(f"process {pid} has no stack {stack}; it has {', '.join(sorted(found))}")
    for other in found.values():
        other.close()
    return chosen


def _stack_untrusted(message: dict[str, Any]) -> str:
    """The peer ID in the message that begins a capture.

    Raises:
      ProtocolError: it is another message.
    """
    data = message.get("data")
    if message.get("part") == "error":
        raise ProtocolError(str(data)[:200])
    if message.get("part") != control.CAPTURE or not isinstance(data, str):
        raise ProtocolError("it does not know captures")
    return data[:32]


# --- shapes -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Maybe:
    """Null, or this shape."""

    shape: Any


_ADDRESS: Final = [(str, int)]
_LISTS: Final = ("agreed", "fallbacks")
_AGREED: Final = {"version": int, "release": int, "ueid": Maybe(str), "direct": bool}
SHAPES: Final[dict[str, Any]] = {
    "process": {"pid": int, "stack": str, "uptime": (int, float), "ueids": [str]},
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
            "state": str,
            **_AGREED,
            "links": [
                {
                    "number": int,
                    "state": str,
                    "rnic": str,
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
            "device": Maybe(str),
            "port": Maybe(int),
            "port_active": bool,
            "drained": bool,
            "gid": str,
            "mac": str,
            "mtu": int,
            "pnet": [str],
            "links": int,
        }
    ],
    "listeners": [_ADDRESS],
}


def check_untrusted(value: Any, shape: Any, where: str) -> None:
    """Raise ProtocolError when ``value``, which is at ``where`` in an answer, has another shape."""
    match shape:
        case Maybe():
            if value is not None:
                check_untrusted(value, shape.shape, where)
        case dict():
            if not isinstance(value, dict):
                raise ProtocolError(f"{where} is no object")
            for name, inner in shape.items():
                if name not in value:
                    raise ProtocolError(f"{where} has no {name}")
                check_untrusted(value[name], inner, f"{where}.{name}")
        case [inner]:
            if not isinstance(value, list):
                raise ProtocolError(f"{where} is no list")
            for item in value:
                check_untrusted(item, inner, where)
        case _:
            truth = isinstance(value, bool) and shape is not bool
            if truth or not isinstance(value, shape):
                raise ProtocolError(f"{where} is of the wrong kind")
