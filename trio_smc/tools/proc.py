"""Read /proc of one process: bounded, and of the same process throughout.

Names, command lines, environments and links in /proc are written by the process that is looked at.
They are text here: nothing below a link is opened.  Everything is read below one descriptor of the
directory /proc/PID, which stays that of the process when its number is used again.  Only the kernel
answers; what it answers with is bounded here.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from types import TracebackType
from typing import Final, NamedTuple, Self

__all__ = ["Process", "TcpSocket", "parse_tcp", "process_numbers"]

_STATUS: Final = 1 << 16
_COMMAND: Final = 1 << 17
_ENVIRONMENT: Final = 1 << 20
_MAPS: Final = 1 << 23
_TABLE: Final = 1 << 25
"""Bytes of /proc/PID/net/tcp: 200,000 sockets."""
_PIECE: Final = 1 << 16
_STREAM: Final = "0001"
"""SOCK_STREAM in /proc/PID/net/unix."""


class TcpSocket(NamedTuple):
    """A line of /proc/PID/net/tcp; the user is the one that made the socket."""

    address: str
    port: int
    state: str
    uid: int
    inode: str


class Process:
    """One process, as /proc shows it.

    Use it in a `with` block.  Methods return what can be read: "" or nothing if the process is
    gone or must not be looked into.

    Args:
      pid: its number.

    Raises:
      OSError: there is no such process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        self._directory = os.open(f"/proc/{pid}", flags)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        os.close(self._directory)

    def link(self, name: str) -> str:
        """The text of a link: "exe", "cwd", "root", "ns/net"; "" if it cannot be read."""
        try:
            return os.readlink(name, dir_fd=self._directory)
        except OSError:
            return ""

    def descriptors(self) -> Iterator[tuple[str, str]]:
        """Numbers of its descriptors, and the text of what each leads to."""
        with (
            contextlib.suppress(OSError),
            self._opened("fd", os.O_DIRECTORY) as directory,
            os.scandir(directory) as entries,
        ):
            for entry in entries:
                with contextlib.suppress(OSError):
                    yield entry.name, os.readlink(entry.name, dir_fd=directory)

    def sockets(self) -> set[str]:
        """The inodes of its sockets."""
        links = (link for _, link in self.descriptors())
        return {link[8:-1] for link in links if link.startswith("socket:[")}

    def users(self) -> tuple[int, ...]:
        """Its real, effective, saved and file system user; none if it is gone."""
        return self._status("Uid")

    def numbers(self) -> tuple[int, ...]:
        """Its number in each PID namespace that it is in, this one's first."""
        return self._status("NSpid") or (self.pid,)

    def _status(self, field: str) -> tuple[int, ...]:
        # The name of the process comes before the other fields.  The kernel escapes a line feed in
        # the name, but no carriage return, which would end a line for `splitlines`.
        for line in self._read("status", _STATUS).split(b"\n"):
            if line.startswith(field.encode() + b":"):
                return tuple(map(int, line.split()[1:]))
        return ()

    def command(self) -> list[str]:
        """Its command line; not a word that was cut off."""
        words = self._read("cmdline", _COMMAND).split(b"\0")
        return [os.fsdecode(word) for word in words[:-1]]

    def environment(self) -> dict[str, str]:
        """The environment that it was started with."""
        pairs = self._read("environ", _ENVIRONMENT).split(b"\0")
        return dict(os.fsdecode(each).split("=", 1) for each in pairs if b"=" in each)

    def mapped(self) -> Iterator[str]:
        """Paths of the files that it has mapped."""
        for line in self._read("maps", _MAPS).split(b"\n"):
            path = line.split(None, 5)[5:]
            if path and path[0].startswith(b"/"):
                yield os.fsdecode(path[0])

    def tcp_sockets(self) -> Iterator[TcpSocket]:
        """The TCP sockets of its network namespace."""
        for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
            yield from parse_tcp(self._read(f"net/{table}", _TABLE), family)

    def unix_streams(self) -> Iterator[tuple[str, str]]:
        """Inodes and paths of the stream sockets with a name in its network namespace."""
        for line in self._read("net/unix", _TABLE).split(b"\n")[1:]:
            parts = line.split(None, 7)
            if len(parts) == 8 and parts[4] == _STREAM.encode():
                yield parts[6].decode("ascii", "replace"), os.fsdecode(parts[7])

    def addresses(self) -> Iterator[str]:
        """The IP addresses of its network namespace."""
        last = ""
        for line in self._read("net/fib_trie", _TABLE).decode("ascii", "replace").split("\n"):
            if line.strip() == "/32 host LOCAL":
                yield last
            last = line.split()[-1] if line.strip() else ""
        for entry in self._read("net/if_inet6", _TABLE).splitlines():
            packed = bytes.fromhex(entry.split()[0].decode("ascii"))
            yield socket.inet_ntop(socket.AF_INET6, packed)

    def children(self) -> list[int]:
        """Numbers of its child processes."""
        found: list[int] = []
        with contextlib.suppress(OSError), self._opened("task", os.O_DIRECTORY) as tasks:
            for task in os.listdir(tasks):
                found += map(int, self._read(f"task/{task}/children", _TABLE).split())
        return found

    @contextlib.contextmanager
    def _opened(self, name: str, flags: int = 0) -> Iterator[int]:
        flags |= os.O_RDONLY | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=self._directory)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _read(self, name: str, limit: int) -> bytes:
        """The first bytes of a file of /proc."""
        data = bytearray()
        with contextlib.suppress(OSError), self._opened(name) as descriptor:
            while len(data) < limit:
                piece = os.read(descriptor, min(_PIECE, limit - len(data)))
                if not piece:
                    break
                data += piece
        return bytes(data)


def parse_tcp(text: bytes, family: int) -> Iterator[TcpSocket]:
    """The sockets in a table of the kernel's; a line that was cut off is left out."""
    for line in text.split(b"\n")[1:-1]:
        parts = line.decode("ascii", "replace").split()
        packed, port = parts[1].split(":")
        # Words of four bytes, each in the machine's order.
        words = (bytes.fromhex(packed[at : at + 8])[::-1] for at in range(0, len(packed), 8))
        address = socket.inet_ntop(family, b"".join(words)).removeprefix("::ffff:")
        yield TcpSocket(address, int(port, 16), parts[3], int(parts[7]), parts[9])


def process_numbers() -> list[int]:
    """The numbers of all processes that /proc shows."""
    return sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())
