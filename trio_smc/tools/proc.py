"""Read /proc of one process, with limits on the size of each file.

The process controls its own name, command line, environment and links in /proc.  This module treats
these as text, and opens no file through a link.  It opens the directory /proc/PID once, and reads
everything relative to this descriptor: if the process ends and another one receives its number, the
descriptor still belongs to the first process, and reading fails.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from types import TracebackType
from typing import Final, NamedTuple, Self

__all__ = ["Process", "TcpSocket", "parse_tcp", "process_numbers"]

# Bytes that are read of each file in /proc/PID.  Chosen: larger than these files usually are.
_MAX_STATUS: Final = 1 << 16
_MAX_COMMAND: Final = 1 << 17
_MAX_ENVIRONMENT: Final = 1 << 20
_MAX_MAPS: Final = 1 << 23
_MAX_TABLE: Final = 1 << 25
"""The same of a table, such as /proc/PID/net/tcp: enough for 200,000 sockets of 150 bytes."""
_PIECE: Final = 1 << 16  # bytes of one read(2); chosen
_SOCK_STREAM: Final = "0001"
"""SOCK_STREAM in /proc/PID/net/unix."""


class TcpSocket(NamedTuple):
    """A line of /proc/PID/net/tcp or tcp6.

    Fields:
      address, port: the local address.
      state: the state as two hexadecimal digits ("0A": LISTEN).
      uid: the user that created the socket.
      inode: the inode of the socket; "0" if no process has it.
    """

    address: str
    port: int
    state: str
    uid: int
    inode: str


class Process:
    """One process in /proc, for use in a `with` block.

    Methods return "" or an empty result if the process has ended, or if this user may not read it.

    Args:
      pid: the process number.

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
        """The text of a link: "exe", "cwd", "root", "ns/net"; "" if the link cannot be read."""
        try:
            return os.readlink(name, dir_fd=self._directory)
        except OSError:
            return ""

    def descriptors(self) -> Iterator[tuple[str, str]]:
        """The numbers of the process's descriptors, each with the text of its link."""
        with (
            contextlib.suppress(OSError),
            self._opened("fd", os.O_DIRECTORY) as directory,
            os.scandir(directory) as entries,
        ):
            for entry in entries:
                with contextlib.suppress(OSError):
                    yield entry.name, os.readlink(entry.name, dir_fd=directory)

    def sockets(self) -> set[str]:
        """The inodes of the process's sockets."""
        links = (link for _, link in self.descriptors())
        return {link[8:-1] for link in links if link.startswith("socket:[")}

    def users(self) -> tuple[int, ...]:
        """The real, effective, saved and file system user of the process."""
        return tuple(map(int, self._status("Uid")))

    def groups(self) -> tuple[int, ...]:
        """The supplementary groups of the process."""
        return tuple(map(int, self._status("Groups")))

    def numbers(self) -> tuple[int, ...]:
        """The number of the process in each of its PID namespaces, that of this process first."""
        return tuple(map(int, self._status("NSpid"))) or (self.pid,)

    def is_stopped(self) -> bool:
        """True if a signal or a debugger has stopped the process."""
        return self._status("State")[:1] in ([b"T"], [b"t"])

    def _status(self, field: str) -> list[bytes]:
        # Not `splitlines`, which also splits at a carriage return: the first line contains the name
        # of the process, and in it the kernel escapes only line feeds.
        for line in self._read("status", _MAX_STATUS).split(b"\n"):
            if line.startswith(field.encode() + b":"):
                return line.split()[1:]
        return []

    def command(self) -> list[str]:
        """The words of the command line, without the last one if it was cut off."""
        words = self._read("cmdline", _MAX_COMMAND).split(b"\0")
        return [os.fsdecode(word) for word in words[:-1]]

    def environment(self) -> dict[str, str]:
        """The environment with which the process was started."""
        pairs = self._read("environ", _MAX_ENVIRONMENT).split(b"\0")
        return dict(os.fsdecode(each).split("=", 1) for each in pairs if b"=" in each)

    def mapped(self) -> Iterator[str]:
        """The paths of the files that the process has mapped."""
        for line in self._read("maps", _MAX_MAPS).split(b"\n"):
            path = line.split(None, 5)[5:]
            if path and path[0].startswith(b"/"):
                yield os.fsdecode(path[0])

    def tcp_sockets(self) -> Iterator[TcpSocket]:
        """The TCP sockets of the process's network namespace."""
        for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
            yield from parse_tcp(self._read(f"net/{table}", _MAX_TABLE), family)

    def unix_streams(self) -> Iterator[tuple[str, str]]:
        """The inodes and paths of named Unix stream sockets in the process's network namespace."""
        for line in self._read("net/unix", _MAX_TABLE).split(b"\n")[1:]:
            parts = line.split(None, 7)
            if len(parts) == 8 and parts[4] == _SOCK_STREAM.encode():
                yield parts[6].decode("ascii", "replace"), os.fsdecode(parts[7])

    def addresses(self) -> Iterator[str]:
        """The IP addresses of the process's network namespace."""
        last = ""
        for line in self._read("net/fib_trie", _MAX_TABLE).decode("ascii", "replace").split("\n"):
            if line.strip() == "/32 host LOCAL":
                yield last
            last = line.split()[-1] if line.strip() else ""
        for entry in self._read("net/if_inet6", _MAX_TABLE).splitlines():
            packed = bytes.fromhex(entry.split()[0].decode("ascii"))
            yield socket.inet_ntop(socket.AF_INET6, packed)

    def children(self) -> list[int]:
        """The numbers of the process's children."""
        found: list[int] = []
        with contextlib.suppress(OSError), self._opened("task", os.O_DIRECTORY) as tasks:
            for task in os.listdir(tasks):
                found += map(int, self._read(f"task/{task}/children", _MAX_TABLE).split())
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
        """The contents of a file below /proc/PID, at most ``limit`` bytes."""
        data = bytearray()
        with contextlib.suppress(OSError), self._opened(name) as descriptor:
            while len(data) < limit:
                piece = os.read(descriptor, min(_PIECE, limit - len(data)))
                if not piece:
                    break
                data += piece
        return bytes(data)


def parse_tcp(text: bytes, family: int) -> Iterator[TcpSocket]:
    """The sockets in /proc/net/tcp or tcp6, without the last line if it was cut off.

    Args:
      text: the contents of the file.
      family: AF_INET for tcp, AF_INET6 for tcp6.
    """
    for line in text.split(b"\n")[1:-1]:
        parts = line.decode("ascii", "replace").split()
        packed, port = parts[1].split(":")
        # An address is a sequence of words of four bytes in the byte order of the host.  This
        # reverses each word, so it is for little-endian hosts.
        words = (bytes.fromhex(packed[at : at + 8])[::-1] for at in range(0, len(packed), 8))
        address = socket.inet_ntop(family, b"".join(words)).removeprefix("::ffff:")
        yield TcpSocket(address, int(port, 16), parts[3], int(parts[7]), parts[9])


def process_numbers() -> list[int]:
    """The numbers of all processes that /proc lists."""
    return sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())
