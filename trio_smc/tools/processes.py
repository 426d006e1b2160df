"""What /proc tells of processes: their family, their TCP sockets, the Python that they run.

`explain_listener` says what keeps the process behind a port of this host from SMC-R.  Only the
user's own processes can be looked into; of others the socket's user is known, no more.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from trio_smc.control.protocol import DIRECTORY, pid_of_name

__all__ = [
    "Obstacle",
    "executable",
    "explain_container",
    "explain_listener",
    "family",
    "has_tcp",
    "is_python",
]

_LISTEN: Final = "0A"
_PATIENCE: Final = 10.0
"""Seconds for an interpreter that is asked what it has."""
_ASK: Final = "import importlib.util as u; print(u.find_spec('trio_smc') is not None)"


def family(root: int) -> Iterator[int]:
    """A process and those below it."""
    yield root
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{root}/task"):
            for child in Path(f"/proc/{root}/task/{task}/children").read_text().split():
                yield from family(int(child))


def executable(pid: int) -> str:
    """The file that a process runs; "" when that cannot be known."""
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""


def is_python(path: str) -> bool:
    """Whether an executable is a Python, by its name."""
    return os.path.basename(path).startswith(("python", "pypy"))


def has_tcp(pid: int) -> bool:
    """Whether a process has a TCP socket."""
    own = _sockets(pid)
    return any(each.inode in own for each in _tcp_sockets(pid))


class _TcpSocket(NamedTuple):
    """A line of /proc/PID/net/tcp."""

    address: str
    port: int
    state: str
    uid: int
    inode: str


def _tcp_sockets(pid: int | str) -> Iterator[_TcpSocket]:
    """Those of a process's network namespace."""
    for table, form in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                parts = line.split()
                packed, port = parts[1].split(":")
                # Words of four bytes, each in the machine's order.
                words = (
                    bytes.fromhex(packed[at : at + 8])[::-1] for at in range(0, len(packed), 8)
                )
                address = socket.inet_ntop(form, b"".join(words)).removeprefix("::ffff:")
                yield _TcpSocket(address, int(port, 16), parts[3], int(parts[7]), parts[9])


def _sockets(pid: int | str) -> set[str]:
    """The inodes of a process's sockets."""
    links = (link for _, link in _descriptors(pid))
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def _descriptors(pid: int | str) -> Iterator[tuple[str, str]]:
    """Descriptors of a process: the name in /proc, and what it leads to."""
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                yield entry.path, os.readlink(entry.path)


# --- who listens -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Obstacle:
    """What keeps a listener from SMC-R.

    Attributes:
      text: what is so, without a full stop.
      remedy: what to do about it.
      pid, uid: the listener's process and user, where they are known.
    """

    text: str
    remedy: str
    pid: int | None = None
    uid: int | None = None


def explain_listener(address: str, port: int, directory: Path) -> Obstacle:
    """Look at what is behind an address of this host and say why it does not speak SMC-R.

    Args:
      address, port: where it listens.
      directory: this side's private directory.
    """
    proxy = f"put 'trio-smc proxy smc:HOST:PORT tcp:{address}:{port}' in front of it"
    found = [each for each in _tcp_sockets("self") if _listens(each, address, port)]
    if not found:
        return explain_container(None, port, directory) or Obstacle(
            "nothing in this network namespace listens there: a container, or the system passes it "
            "on",
            "connect to the listener's own address, and share a directory with it: "
            "Config(directory=...)",
        )
    uid = found[0].uid
    if uid != os.geteuid():
        text = f"the listener belongs to user {uid}, this process to {os.geteuid()}"
        remedy = "run both processes as one user, or let a group of both share a directory"
        return Obstacle(text, remedy, uid=uid)
    inodes = {each.inode for each in found}
    pid = next((pid for pid in _own_processes() if inodes & _sockets(pid)), None)
    if pid is None:
        text = "no process of this user has the listening socket; it may be in a container"
        return Obstacle(text, proxy, uid=uid)
    program = executable(pid)
    theirs = _private_directory(pid)
    if theirs is not None:
        return _with_stack(pid, theirs, directory)
    if not is_python(program):
        text = f"process {pid}, {os.path.basename(program)}, is no Python program"
        return Obstacle(text, proxy, pid, uid)
    python = _interpreter(pid) or program
    if not _has_trio_smc(pid, python):
        text = f"process {pid} runs {python}, which has no trio_smc"
        return Obstacle(text, "install trio-smc there and use 'trio-smc run'", pid, uid)
    if _uses_asyncio(pid):
        text = f"process {pid} has asyncio loaded and no stack of trio_smc"
        remedy = f"run it on Trio by 'trio-smc run'; if it knows asyncio alone, {proxy}"
        return Obstacle(text, remedy, pid, uid)
    text = f"process {pid} is a Python program without a stack of trio_smc"
    return Obstacle(text, "start it by 'trio-smc run', or use trio_smc in it", pid, uid)


def _listens(each: _TcpSocket, address: str, port: int) -> bool:
    anywhere = each.address in ("0.0.0.0", "::")
    return each.state == _LISTEN and each.port == port and (anywhere or each.address == address)


def _own_processes() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdecimal() and os.access(f"/proc/{name}/fd", os.R_OK):
            yield int(name)


def explain_container(address: str | None, port: int, directory: Path) -> Obstacle | None:
    """Look for a process of this user that listens in another network namespace of this host, and
    say what keeps it from SMC-R; None: there is none to be seen.

    Args:
      address, port: where it listens, an address of that namespace; None: at any one.
      directory: this side's private directory.
    """
    here = os.readlink("/proc/self/ns/net")
    for pid in _own_processes():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/ns/net") == here:
                continue
            if address is not None and address not in _addresses(pid):
                continue
            if any(
                _listens(each, address or each.address, port) and each.inode in _sockets(pid)
                for each in _tcp_sockets(pid)
            ):
                return _in_container(pid, directory)
    return None


def _addresses(pid: int) -> Iterator[str]:
    """Those of a process's network namespace."""
    lines = Path(f"/proc/{pid}/net/fib_trie").read_text().split("\n")
    for line, below in pairwise(lines):
        if below.strip() == "/32 host LOCAL":
            yield line.split()[-1]
    for line in Path(f"/proc/{pid}/net/if_inet6").read_text().splitlines():
        yield socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line.split()[0]))


def _in_container(pid: int, ours: Path) -> Obstacle:
    text = f"process {pid} listens in a network namespace of its own"
    found = _control_directory(pid)
    if found is None:
        text += ", without a stack of trio_smc"
        return Obstacle(text, "start it by 'trio-smc run', with one Config(directory=...)", pid)
    with contextlib.suppress(OSError):
        if os.path.samefile(found, ours / DIRECTORY):
            remedy = (
                "name the directory in Config(directory=...) at both ends, and connect to the "
                "listener's own address, with no NAT, proxy or closed ports between"
            )
            return Obstacle(f"{text}, and shares the directory", remedy, pid)
    text += ", with another private directory"
    return Obstacle(text, "let both mount one directory, and name it: Config(directory=...)", pid)


def _with_stack(pid: int, theirs: Path, ours: Path) -> Obstacle:
    if theirs != ours:
        text = f"the private directory of process {pid} is {theirs}, this one's is {ours}"
        remedy = (
            f"give both one $XDG_RUNTIME_DIR or Config(directory=...), here --directory {theirs}"
        )
        return Obstacle(text, remedy, pid, os.geteuid())
    text = f"process {pid} has a stack of trio_smc, and listens by another socket"
    remedy = "listen by trio_smc, or call trio_smc.enable() before the socket is made"
    return Obstacle(text, remedy, pid, os.geteuid())


def _private_directory(pid: int) -> Path | None:
    """Where a process has its control sockets; None: it has no stack, or none that shows."""
    found = _control_directory(pid)
    return None if found is None else Path(os.readlink(found)).parent


def _control_directory(pid: int) -> str | None:
    """The same as a path that leads there from here, to the control sockets."""
    numbers = _numbers(pid)
    for path, link in _descriptors(pid):
        if os.path.basename(link) == DIRECTORY:
            with contextlib.suppress(OSError):
                if any(pid_of_name(name) in numbers for name in os.listdir(path)):
                    return path
    return None


def _numbers(pid: int) -> tuple[int, ...]:
    """Of a process, in each namespace of processes that it is in."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return tuple(map(int, line.split()[1:]))
    return (pid,)


def _environment(pid: int) -> dict[str, str]:
    with contextlib.suppress(OSError):
        pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return dict(os.fsdecode(each).split("=", 1) for each in pairs if b"=" in each)
    return {}


def _interpreter(pid: int) -> str | None:
    """The Python as it was called, which is what finds its environment."""
    with contextlib.suppress(OSError):
        called = os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0])
        if os.path.dirname(called):
            found = os.path.join(os.readlink(f"/proc/{pid}/cwd"), called)
        else:
            found = shutil.which(called, path=_environment(pid).get("PATH")) or ""
        if is_python(called) and os.path.exists(found):
            return found
    return None


def _has_trio_smc(pid: int, python: str) -> bool:
    """Ask the interpreter, with the process's own path; True when it cannot be asked."""
    environment = {**_environment(pid), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        said = subprocess.run(
            [python, "-c", _ASK], env=environment, cwd=f"/proc/{pid}/cwd",
            capture_output=True, timeout=_PATIENCE, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return True
    return b"False" not in said.stdout


def _uses_asyncio(pid: int) -> bool:
    with contextlib.suppress(OSError):
        maps = Path(f"/proc/{pid}/maps").read_text()
        return "/_asyncio." in maps or "/uvloop/" in maps
    return False
