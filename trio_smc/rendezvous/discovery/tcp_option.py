"""The TCP option that announces SMC-R (RFC 7609, 3.1), for single sockets of a process.

The process marks a socket before it connects or listens.  The BPF program (`option_program`) adds
the option to the SYN or SYN-ACK of that socket, and records whether the peer sent it.  The program
does not change any other socket.

Loading the program takes CAP_BPF and CAP_NET_ADMIN.  So an administrator loads it once for a group
of users, and pins its link and its map (`option_setup`).  A user that may open the pinned map may
mark its own sockets.  If no pinned map is usable, the process loads a program for itself, which
ends with the process.  If the process may not load one, its connections have no option, and
`SmcStream.fallback` has the reason.

A program runs for the sockets of one cgroup and of the cgroups below it.  A process of another
cgroup can mark its sockets, but the mark has no effect; `TcpOption.answer` detects that.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import trio

from trio_smc._base.reasons import FallbackReason
from trio_smc.rendezvous.discovery import bpf as _bpf
from trio_smc.rendezvous.discovery.option_program import (
    DECIDED,
    GUARD_KEY_SIZE,
    OFFER,
    PEER,
    option_program,
)

__all__ = [
    "LINK_NAME",
    "MAP_NAME",
    "Loaded",
    "Mount",
    "TcpOption",
    "load_option",
    "mounts",
    "own_cgroup",
]


_log = logging.getLogger("trio_smc.tcp_option")

# A BPF file system allows no dots in names.  The number is the version of the words in the map.
MAP_NAME: Final = "sockets_1"
LINK_NAME: Final = "link_1"

_GUARDED_LISTENERS: Final = 16384
"""Entries of the guard map.  Chosen."""
_TCP_INFO_SIZE: Final = 8  # bytes that are read of struct tcp_info; their content is not used
_TRIES: Final = 4
"""Attempts to mark a socket while the kernel lacks memory.  Chosen."""
_ESCAPE: Final = re.compile(rb"\\([0-3][0-7]{2})")
"""A character of a path in /proc/self/mountinfo, by its octal number."""

_Socket = socket.socket | trio.socket.SocketType


@dataclass(frozen=True, slots=True)
class Loaded:
    """The descriptors that `load_option` made.

    Attributes:
      words: the map of sockets' words.
      link: while it is open, the program runs for the cgroup.
    """

    words: int
    link: int

    def close(self) -> None:
        """Close both descriptors.

        The option keeps working while they are pinned or another process holds them.
        """
        os.close(self.link)
        os.close(self.words)


def load_option(cgroup: Path) -> Loaded:
    """Load the program and run it for the sockets of a cgroup.  Raises OSError."""
    with contextlib.ExitStack() as temporary, contextlib.ExitStack() as undo:
        words = _bpf.create_socket_storage()
        undo.callback(os.close, words)
        guard = _bpf.create_hash(GUARD_KEY_SIZE, _GUARDED_LISTENERS)
        temporary.callback(os.close, guard)  # the program holds the map
        program = _bpf.load_sock_ops(option_program(words, guard))
        # Closed, so that no other process gets the program: attaching it takes no privilege.
        temporary.callback(os.close, program)
        link = _bpf.attach_to_cgroup(program, cgroup)
        undo.pop_all()
        return Loaded(words, link)


class Mount(NamedTuple):
    """A line of /proc/self/mountinfo.

    Attributes:
      root: the directory of the file system that is mounted.
      point: the path on which it is mounted.
      kind: the type of the file system.
    """

    root: str
    point: Path
    kind: str


def mounts() -> Iterator[Mount]:
    """The mounts that this process sees, in the kernel's order.  Raises OSError.

    Users choose some of the paths (fusermount).  In a path the kernel escapes only the space, the
    tab, the line feed and the backslash.  So only a line feed ends a line, and only a space ends a
    field.  Text mode would end a line at a carriage return too, and `str.split` would end a field
    at many other characters.
    """
    for line in Path("/proc/self/mountinfo").read_bytes().split(b"\n"):
        left, _, right = line.partition(b" - ")
        fields = left.split(b" ")
        if right:
            root, point = (os.fsdecode(_ESCAPE.sub(_unescaped, each)) for each in fields[3:5])
            yield Mount(root, Path(point), os.fsdecode(right.split(b" ", 1)[0]))


def _unescaped(escape: re.Match[bytes]) -> bytes:
    return bytes([int(escape[1], 8)])


def own_cgroup(*, root: bool = False) -> Path:
    """The directory of this process in the version-2 cgroup hierarchy, or the hierarchy's root.

    Raises:
      OSError: the hierarchy is not mounted (ENOENT).
    """
    lines = Path("/proc/self/cgroup").read_bytes().split(b"\n")
    own = next((os.fsdecode(line[3:]) for line in lines if line.startswith(b"0::")), "/")
    for each in mounts():
        if each.kind == "cgroup2":
            below = "." if root else os.path.relpath(own, each.root)
            return Path(os.path.normpath(each.point / below))
    raise FileNotFoundError(errno.ENOENT, "no cgroup2 file system is mounted")


def _reason(error: OSError) -> FallbackReason:
    if error.errno in (errno.EPERM, errno.EACCES):
        return FallbackReason.TCP_OPTION_NOT_PERMITTED
    return FallbackReason.TCP_OPTION_UNAVAILABLE


class TcpOption:
    """The TCP option of one stack.  The first `offer` opens the map.

    Args:
      pins: the directory where an administrator pins the map.
    """

    def __init__(self, pins: Path) -> None:
        self._pinned_map = pins / MAP_NAME
        self._words: int | None = None
        self._identity: tuple[int, int] | None = None  # of the pin from which `_words` was opened
        self._loaded: Loaded | None = None
        self._trouble: FallbackReason | None = None
        self._may_load = True
        self._last_trouble = ""  # the last message of the log

    def offer(self, sock: _Socket) -> FallbackReason | None:
        """Let ``sock`` offer SMC-R; to be called before it connects or listens.

        Returns None, or the reason why the option cannot be used and the socket offers nothing.
        """
        self._trouble = self._open()
        if self._words is not None:
            try:
                self._mark(sock, self._words)
            except OSError as error:
                # A member of the group froze the map, or memory ran out.
                self._trouble = self._failed("marking a socket", error)
        return self._trouble

    def _mark(self, sock: _Socket, words: int) -> None:
        """Record in the map that the socket offers SMC-R.

        Since Linux 7.0 the kernel allocates the memory of a socket's word without waiting.  So one
        attempt may fail with ENOMEM, and the next one may succeed.
        """
        for _ in range(_TRIES - 1):
            try:
                return _bpf.update(words, sock.fileno(), OFFER)
            except OSError as error:
                if error.errno != errno.ENOMEM:
                    raise
        return _bpf.update(words, sock.fileno(), OFFER)

    def answer(self, sock: _Socket) -> FallbackReason | None:
        """The result for a connected or an accepted socket.

        Returns None if both ends offered SMC-R; otherwise the reason why the connection is TCP.
        """
        word = self._word(sock)
        if word & OFFER and not word & DECIDED:
            # The connection is established, and the program has not ended yet.  This call waits
            # for it, because it takes the socket's lock.
            with contextlib.suppress(OSError):
                sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_SIZE)
            word = self._word(sock)
        if word & DECIDED:
            return None if word & PEER else FallbackReason.PEER_NOT_CAPABLE
        if word & OFFER:
            _log.debug("the BPF program does not run for this process's cgroup")
            return FallbackReason.TCP_OPTION_UNAVAILABLE
        return self._trouble or FallbackReason.PEER_NOT_CAPABLE

    def close(self) -> None:
        """Close all descriptors.  Idempotent."""
        if self._loaded is not None:
            self._loaded.close()
        elif self._words is not None:
            os.close(self._words)
        self._loaded = self._words = self._identity = None

    def _word(self, sock: _Socket) -> int:
        if self._words is None:
            return 0
        try:
            return _bpf.lookup(self._words, sock.fileno())
        except OSError as error:
            if error.errno != errno.ENOENT:
                self._failed("reading a socket's word", error)
            return 0

    def _open(self) -> FallbackReason | None:
        """Open the pinned map, or load a program.

        An administrator may pin, replace and remove the map at any moment, so each call checks.
        """
        if sys.platform != "linux":
            return FallbackReason.UNSUPPORTED_PLATFORM
        try:
            status = os.stat(self._pinned_map)
        except OSError as error:
            return self._load(None if error.errno == errno.ENOENT else error)
        identity = (status.st_dev, status.st_ino)
        if identity == self._identity:
            return None
        try:
            words = _bpf.open_pinned(self._pinned_map)
        except OSError as error:
            return self._load(error)
        storage, frozen = _bpf.map_kind(words)
        if not storage or frozen:
            os.close(words)
            text = "it is frozen: set it up again" if frozen else "it is another kind of map"
            return self._load(OSError(errno.EINVAL, text))
        self.close()
        self._words, self._identity = words, identity
        return None

    def _load(self, refused: OSError | None) -> FallbackReason | None:
        """Load a program for this process, because no pinned map can be used.

        refused: the error of the pinned map; None: there is none.
        """
        if self._loaded is not None:
            return None
        if self._words is not None:  # the pin was removed, and so the program has ended
            self.close()
        if self._may_load:
            try:
                self._loaded = load_option(own_cgroup())
            except OSError as error:
                self._may_load = False
                own = self._failed("loading a BPF program", error)
                if refused is None:
                    return own
            else:
                self._words = self._loaded.words
                return None
        if refused is not None:
            return self._failed(f"opening {self._pinned_map}", refused)
        return self._trouble or FallbackReason.TCP_OPTION_UNAVAILABLE

    def _failed(self, what: str, error: OSError) -> FallbackReason:
        trouble = f"{what} failed: {error}"
        # Each connection has the same problem.  Only the first one is logged as information.
        level = logging.DEBUG if trouble == self._last_trouble else logging.INFO
        _log.log(level, "no TCP option, %s", trouble)
        self._last_trouble = trouble
        return _reason(error)
