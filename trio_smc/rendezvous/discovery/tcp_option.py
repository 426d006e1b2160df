"""The TCP option that announces SMC-R (RFC 7609, 3.1), for single sockets of a process.

A socket that shall offer SMC-R is marked before it connects or listens; a BPF program
(`_option_program`) adds the option to its SYN or SYN-ACK and notes what the peer's had.  All other
sockets of the process stay as they are.

Loading the program takes CAP_BPF and CAP_NET_ADMIN.  So an administrator does it once for a group
of users and pins program and map (`_option_setup`); a user that may open the pinned map may mark
its own sockets.  A process that finds no pinned map it may use loads a program for itself, which
lasts as long as it does; where it may not do that either there is no option, and a reason.

A program runs for the sockets of one cgroup and those below it.  A process elsewhere can mark its
sockets without any effect; `TcpOption.answer` notices that.
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

# A bpffs takes no dots in names.  The number is that of the meaning of the words in the map.
MAP_NAME: Final = "sockets_1"
LINK_NAME: Final = "link_1"

_GUARDED_LISTENERS: Final = 16384
_TCP_INFO_SIZE: Final = 8
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
      link: keeps the program running for the cgroup.
    """

    words: int
    link: int

    def close(self) -> None:
        """The option goes on as long as another process holds both, or they are pinned."""
        os.close(self.link)
        os.close(self.words)


def load_option(cgroup: Path) -> Loaded:
    """Load the program and run it for the sockets of a cgroup.  Raises OSError."""
    with contextlib.ExitStack() as temporary, contextlib.ExitStack() as undo:
        words = _bpf.create_socket_storage()
        undo.callback(os.close, words)
        guard = _bpf.create_hash(GUARD_KEY_SIZE, _GUARDED_LISTENERS)
        temporary.callback(os.close, guard)  # the program keeps it
        program = _bpf.load_sock_ops(option_program(words, guard))
        # No other process may get it: attaching a program takes no privilege.
        temporary.callback(os.close, program)
        link = _bpf.attach_to_cgroup(program, cgroup)
        undo.pop_all()
        return Loaded(words, link)


class Mount(NamedTuple):
    """A line of /proc/self/mountinfo.

    Attributes:
      root: the directory of the file system that is mounted.
      point: where it is mounted.
      kind: the type of the file system.
    """

    root: str
    point: Path
    kind: str


def mounts() -> Iterator[Mount]:
    """The mounts that this process sees, in the kernel's order.  Raises OSError.

    Users choose some of the paths (fusermount).  The kernel escapes a space, a tab, a line feed and
    a backslash in them, and nothing else, so only a line feed ends a line and only a space a field:
    text mode would end a line at a carriage return, and `str.split` a field at many characters.
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
    """This process's directory in the version-2 cgroup hierarchy, or the hierarchy's root.

    Raises:
      OSError: none is mounted (ENOENT).
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
    """The TCP option as one stack uses it.  Nothing is opened before the first `offer`."""

    def __init__(self, pins: Path) -> None:
        """``pins``: where an administrator pins the map."""
        self._pinned_map = pins / MAP_NAME
        self._words: int | None = None
        self._identity: tuple[int, int] | None = None  # of the pin that `_words` came from
        self._loaded: Loaded | None = None
        self._trouble: FallbackReason | None = None
        self._may_load = True
        self._last_trouble = ""

    def offer(self, sock: _Socket) -> FallbackReason | None:
        """Let ``sock`` offer SMC-R; before it connects or listens.

        Returns None, or why the option cannot be used; the socket is a plain one then.
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
        """Note in the map that the socket offers SMC-R.

        From Linux 7.0 on, the kernel takes the memory of a socket's word without waiting, so it may
        lack memory now and have it at the next attempt.
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

        Returns None when both ends offered SMC-R, or why the connection is plain TCP.
        """
        word = self._word(sock)
        if word & OFFER and not word & DECIDED:
            # Established before the program was through: this takes the socket's lock.
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
        """Give everything back; idempotent."""
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
        """Have a map; the pinned one where there is one, which may come, change and go."""
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
            text = "it is frozen: set it up again" if frozen else "it is no map of ours"
            return self._load(OSError(errno.EINVAL, text))
        self.close()
        self._words, self._identity = words, identity
        return None

    def _load(self, refused: OSError | None) -> FallbackReason | None:
        """Without a pinned map: one of our own.  ``refused``: why the pinned one is not used."""
        if self._loaded is not None:
            return None
        if self._words is not None:  # the pin it came from is gone, and with it the program
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
        # Each connection meets it again, and that is no news.
        level = logging.DEBUG if trouble == self._last_trouble else logging.INFO
        _log.log(level, "no TCP option, %s", trouble)
        self._last_trouble = trouble
        return _reason(error)
