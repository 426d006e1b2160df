"""Other processes of this host: their children and TCP sockets, and why they do not use SMC-R.

`explain_listener` finds the process that listens on a port of this host, and explains why its
connections do not use SMC-R.

Security
--------
Another process may present false information about itself.  Therefore this module executes and
imports no file of another process, for any user.  Only `trio_smc.tools.interpreters` opens files
that the process names, and only if root or this user put them in place.  This module opens the
private directory that the environment of a process of this user names, under the same condition.
The kernel shows which socket serves an address.  The user of a socket is the one that created it,
but a process of another user may have the socket now.  So this module examines the users and the
user namespace of that process.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from trio_smc import Fallback, FallbackReason
from trio_smc.control.protocol import (
    DIRECTORY,
    DirectoryUnusable,
    PrivateDirectory,
    default_directory,
    pid_of_name,
)
from trio_smc.tools.interpreters import find_trio_smc, is_python
from trio_smc.tools.output import plain
from trio_smc.tools.proc import Process, process_numbers
from trio_smc.tools.sock_diag import (
    Listener,
    accepted_inode,
    arrival_interfaces,
    candidates,
    listeners,
    unix_listeners,
)
from trio_smc.tools.trusted_files import TrustedFiles, UntrustedPathError

__all__ = [
    "Obstacle",
    "executable",
    "explain_container",
    "explain_listener",
    "has_tcp",
    "is_python",
    "process_tree",
]

_LISTEN: Final = "0A"  # the state of a listening socket in /proc/PID/net/tcp
_SEARCH_TIME: Final = 3.0
"""Seconds for a search through the descriptors of all processes.  Chosen."""
_DIRECTORY_TIME: Final = 1.0
"""Seconds for the path of a private directory.  Chosen."""
_SHOWN: Final = 8
"""The largest number of processes in one message.  Chosen."""
_MAX_HOLDERS: Final = 256
"""The largest number of processes with one of the sockets.  Chosen: each needs a descriptor."""
_MAX_TREE: Final = 100_000
"""The largest number of processes of a tree.  Chosen: a bound on memory."""
_NATIVE_MODULE: Final = "/trio_smc/rnic/_words.abi3.so"
"""The end of the path of a file that every process with trio_smc maps, where the file exists."""
_SHARE_REMEDY: Final = (
    "run both processes as one user, or let a group of both users share a directory"
)


def process_tree(root: int) -> Iterator[int]:
    """The numbers of a process and of its descendants."""
    left, seen = [root], {root}
    while left and len(seen) < _MAX_TREE:
        pid = left.pop()
        yield pid
        with contextlib.suppress(OSError), Process(pid) as process:
            below = [each for each in process.children() if each not in seen]
            seen.update(below)
            left += below


def executable(pid: int) -> str:
    """The path of a process's executable; "" if unknown."""
    with contextlib.suppress(OSError), Process(pid) as process:
        return process.link("exe")
    return ""


def has_tcp(pid: int) -> bool:
    """True if a process has a TCP socket."""
    with contextlib.suppress(OSError), Process(pid) as process:
        own = process.sockets()
        return any(each.inode in own for each in process.tcp_sockets())
    return False


# --- the listener -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Obstacle:
    """The reason why a listener does not use SMC-R.

    Attributes:
      text: the reason, without a full stop.
      remedy: the remedy, without a full stop.
      pid, uid: the listener's process and user, if known.
    """

    text: str
    remedy: str
    pid: int | None = None
    uid: int | None = None


def explain_listener(
    address: str, port: int, directory: Path, client: tuple[str, int] | None = None
) -> Obstacle:
    """Explain why the listener at an address of this host does not use SMC-R.

    Args:
      address, port: the listener's address.
      directory: this side's private directory.
      client: this side's address of a connection to the listener.  If several processes share the
        port, this address identifies the process that has accepted the connection.
    """
    arrives_by = arrival_interfaces(address)
    found = candidates(_listeners(), address, port, arrives_by)
    if not found:
        return explain_container(None, port, directory) or Obstacle(
            "no process in this network namespace listens there: the listener is in a container, "
            "or the system forwards the connection",
            "connect to the listener's own address, and share a directory with it: "
            "Config(directory=...)",
        )
    with contextlib.ExitStack() as exits:
        holders = _holders({each.inode for each in found}, found[0].uid, exits)
        if len(holders) > 1 and client is not None:
            # Several processes share the port: explain the one that has accepted the connection.
            accepted = accepted_inode((address, port), client, arrives_by)
            serving = [each for each in holders if accepted in each.sockets()]
            holders = serving or holders
        proxy = f"put 'trio-smc proxy smc:HOST:PORT tcp:{_endpoint(address, port)}' in front of it"
        if not holders:
            return _explain_without_holder(found, proxy)
        foreign = next((each for each in holders if _is_foreign(each)), None)
        if foreign is not None:
            return _explain_foreign(holders, _foreign_user(foreign))
        obstacle = _explain_process(holders[0], directory, proxy)
        if len(holders) > 1:
            also = _numbers_of(holders[1:])
            obstacle = replace(
                obstacle, text=f"{obstacle.text}; it shares the listener with {also}"
            )
        return obstacle


def _listeners() -> list[Listener]:
    """The listening sockets of this network namespace."""
    try:
        return listeners()
    except OSError:
        with Process(os.getpid()) as own:
            return _listeners_of(own)


def _listeners_of(process: Process) -> list[Listener]:
    """The listening sockets of a process's network namespace."""
    return [
        Listener(each.address, each.port, ":" in each.address, None, 0, each.uid, each.inode)
        for each in process.tcp_sockets()
        if each.state == _LISTEN
    ]


def _holders(inodes: set[str], creator: int, exits: contextlib.ExitStack) -> list[Process]:
    """The processes that have one of these sockets.

    Args:
      inodes: the sockets.
      creator: the user that created the socket.  Processes of that user are examined first, because
        there may be no time to read the descriptors of all processes.
      exits: closes the returned processes.
    """
    end = time.monotonic() + _SEARCH_TIME
    numbers = process_numbers()
    owners = {pid: _owner(pid) for pid in numbers}
    found: list[Process] = []
    for pid in sorted(numbers, key=lambda pid: (owners[pid] != creator, pid)):
        if time.monotonic() > end or len(found) >= _MAX_HOLDERS:
            break
        with contextlib.suppress(OSError), contextlib.ExitStack() as own:
            process = own.enter_context(Process(pid))
            if _has_any(process, inodes, end):
                exits.enter_context(own.pop_all())
                found.append(process)
    return sorted(found, key=lambda each: each.pid)


def _has_any(process: Process, inodes: set[str], end: float) -> bool:
    links = {f"socket:[{inode}]" for inode in inodes}
    for number, (_, link) in enumerate(process.descriptors()):
        if link in links:
            return True
        if not number % 1024 and time.monotonic() > end:
            return False
    return False


def _owner(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def _explain_without_holder(found: Sequence[Listener], proxy: str) -> Obstacle:
    """The obstacle if no readable process has the socket, so that only its creator is known."""
    own = os.geteuid()
    uid = next((each.uid for each in found if each.uid != own), own)
    if uid != own:
        text = f"the listener belongs to user {uid}, this process to {own}"
        return Obstacle(text, _SHARE_REMEDY, uid=uid)
    text = "no process of this user has the listening socket; its process may be in a container"
    return Obstacle(text, proxy, uid=uid)


def _is_foreign(process: Process) -> bool:
    """True if any user of a process (real, effective, ...) is not the user of this process."""
    return set(process.users()) != {os.geteuid()}


def _foreign_user(process: Process) -> int:
    """The effective user of a process, which peers see (SO_PEERCRED).

    If that is the user of this process, the first of the other users instead.
    """
    own = os.geteuid()
    real, effective, *rest = process.users() or (own, own)
    return next((each for each in (effective, real, *rest) if each != own), own)


def _explain_foreign(holders: Sequence[Process], uid: int) -> Obstacle:
    own = os.geteuid()
    if all(_foreign_user(each) == uid for each in holders):
        text = f"the listener belongs to user {uid}, this process to {own}"
        if len(holders) > 1:
            text += f"; {len(holders)} processes hold it: {_numbers_of(holders)}"
        return Obstacle(text, _SHARE_REMEDY, uid=uid)
    named = [f"{each.pid} of user {_foreign_user(each)}" for each in holders[:_SHOWN]]
    text = f"{len(holders)} processes of several users hold the listener: {', '.join(named)}"
    remedy = "run all of them as one user, or let a group of all these users share a directory"
    return Obstacle(text, remedy, uid=uid)


def _numbers_of(holders: Sequence[Process]) -> str:
    """The numbers of processes as text: "process 7", "processes 7, 8 and 3 more"."""
    text = ", ".join(str(each.pid) for each in holders[:_SHOWN])
    more = len(holders) - _SHOWN
    if more > 0:
        text += f" and {more} more"
    return f"process{'es' * (len(holders) > 1)} {text}"


def _explain_process(process: Process, directory: Path, proxy: str) -> Obstacle:
    """The obstacle if the listener is a process of this user."""
    pid, uid, program = process.pid, os.geteuid(), process.link("exe")
    if process.is_stopped():
        text = f"process {pid} is stopped, by a signal or a debugger"
        return Obstacle(text, f"let it continue: kill -CONT {pid}", pid, uid)
    stacks = _control_sockets(process)
    if stacks:
        return _explain_stack(process, stacks, directory)
    if process.link("ns/user") != os.readlink("/proc/self/ns/user"):
        text = f"process {pid} is in another user namespace, so its program was not examined"
        return Obstacle(text, "start it with 'trio-smc run' in its container", pid, uid)
    if not is_python(program):
        text = f"process {pid}, {plain(os.path.basename(program))}, is not a Python program"
        return Obstacle(text, proxy, pid, uid)
    finding = find_trio_smc(process)
    if finding.has_package is False:
        text = f"process {pid} runs {plain(finding.python)}, which has no trio_smc"
        return Obstacle(text, "install trio-smc there and use 'trio-smc run'", pid, uid)
    install = unknown = ""
    mapped = list(process.mapped())
    uses_package = any(path.endswith(_NATIVE_MODULE) for path in mapped)
    if finding.has_package is None and not uses_package:
        install = "install trio-smc in its environment if it is missing there, then "
        unknown = f"; it is unknown if its Python has trio_smc: {plain(finding.reasons[0])}"
    problem = _problem_of_process(process)
    if problem is not None:
        begin = "has loaded trio_smc, and its" if uses_package else "has an environment whose"
        text = f"process {pid} {begin} private directory cannot be used: {plain(problem[0])}"
        return Obstacle(f"{text}{unknown}", f"{install}{plain(problem[1])}", pid, uid)
    if uses_package:
        text = (
            f"process {pid} has loaded trio_smc, and has no control socket: it has no stack, its "
            "stack has Config(control=False), or its private directory cannot be used"
        )
        remedy = "use trio_smc for the listener; the log of the process names other problems"
        return Obstacle(text, remedy, pid, uid)
    if any("/_asyncio." in path or "/uvloop/" in path for path in mapped):
        text = f"process {pid} has asyncio loaded and no stack of trio_smc{unknown}"
        remedy = f"{install}run it on Trio with 'trio-smc run'; if it needs asyncio, {proxy}"
        return Obstacle(text, remedy, pid, uid)
    text = f"process {pid} is a Python program without a stack of trio_smc{unknown}"
    remedy = f"{install}start it with 'trio-smc run', or use trio_smc in it"
    return Obstacle(text, remedy, pid, uid)


def _endpoint(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


# --- other network namespaces -----------------------------------------------------------------


def explain_container(address: str | None, port: int, directory: Path) -> Obstacle | None:
    """Explain why a process that listens in another network namespace of this host does not use
    SMC-R; None if there is no such process.

    Args:
      address, port: the listener's address, in that namespace; None: any address.
      directory: this side's private directory.
    """
    end = time.monotonic() + _SEARCH_TIME
    here = os.readlink("/proc/self/ns/net")
    own = os.geteuid()
    serving: dict[str, set[str]] = {here: set()}
    # Processes of this user come first, because of another user's process only the user is known.
    for pid in sorted(process_numbers(), key=lambda pid: (_owner(pid) != own, pid)):
        if time.monotonic() > end:
            break
        with contextlib.suppress(OSError), Process(pid) as process:
            namespace = process.link("ns/net")
            if not namespace:
                continue
            if namespace not in serving:
                serving[namespace] = _serving(process, address, port)
            if serving[namespace] and _has_any(process, serving[namespace], end):
                return _explain_in_container(process, directory)
    return None


def _serving(process: Process, address: str | None, port: int) -> set[str]:
    """The inodes of the sockets that serve an address in a process's network namespace."""
    found = _listeners_of(process)
    if address is None:
        return {each.inode for each in found if each.port == port}
    if address not in process.addresses():
        return set()
    return {each.inode for each in candidates(found, address, port)}


def _explain_in_container(process: Process, directory: Path) -> Obstacle:
    pid = process.pid
    text = f"process {pid} listens in a network namespace of its own"
    if _is_foreign(process):
        uid = _foreign_user(process)
        return Obstacle(f"{text}, and belongs to user {uid}", _SHARE_REMEDY, pid, uid)
    stacks = _control_sockets(process)
    if not stacks:
        text += ", without a stack of trio_smc"
        return Obstacle(
            text, "start it with 'trio-smc run' and a shared Config(directory=...)", pid
        )
    if _are_in(stacks, directory):
        remedy = (
            "name the directory in Config(directory=...) at both ends, and connect to the "
            "listener's own address, without NAT, proxy or closed ports in between"
        )
        return Obstacle(f"{text}, and shares the directory", remedy, pid)
    text += ", with another private directory"
    remedy = "mount one directory at both ends, and name it in Config(directory=...)"
    return Obstacle(text, remedy, pid)


# --- stacks of another process ------------------------------------------------------------------


def _explain_stack(process: Process, stacks: set[str], directory: Path) -> Obstacle:
    pid, uid = process.pid, os.geteuid()
    if _are_in(stacks, directory):
        text = f"process {pid} has a stack of trio_smc, but does not use it for this listener"
        remedy = "listen with trio_smc, or call trio_smc.enable() before the socket is created"
        return Obstacle(text, remedy, pid, uid)
    theirs = plain(_private_directory(process))
    if theirs != str(directory):
        text = (
            f"the private directory of process {pid} is {theirs}, "
            f"that of this process is {directory}"
        )
        remedy = (
            "use one $XDG_RUNTIME_DIR or Config(directory=...) for both processes; "
            f"for this command use --directory {theirs}"
        )
        return Obstacle(text, remedy, pid, uid)
    if process.link("ns/mnt") != os.readlink("/proc/self/ns/mnt"):
        text = (
            f"process {pid} has a private directory of its own at the same path, {theirs}: "
            "it is in another mount namespace"
        )
        remedy = "mount one directory at both ends, and name it in TRIO_SMC_DIRECTORY"
        return Obstacle(text, remedy, pid, uid)
    problem = _problem_of(directory)
    if problem is not None:
        cause, remedy = problem
        text = f"process {pid} uses {theirs}, and this process cannot: {cause}"
        return Obstacle(text, remedy, pid, uid)
    text = f"the private directory of process {pid} was removed or replaced: {theirs}"
    return Obstacle(text, f"start process {pid} again", pid, uid)


def _problem_of(directory: Path) -> tuple[str, str] | None:
    """The cause why this process cannot use a directory, and a remedy; None: it can.

    A missing directory is no problem, if the directory above it exists.
    """
    try:
        with contextlib.closing(PrivateDirectory.open(directory, create=False)):
            return None
    except FileNotFoundError:
        if os.path.isdir(directory.parent):
            return None
        cause = f"there is no directory {directory.parent}"
        return cause, Fallback.local(FallbackReason.DIRECTORY_UNUSABLE).remedy
    except DirectoryUnusable as error:
        return error.cause, error.remedy or Fallback.local(error.reason).remedy


def _problem_of_process(process: Process) -> tuple[str, str] | None:
    """The cause why a process of this user cannot use the private directory of its environment, and
    a remedy; None: it can, or its directory is unknown.

    Opens no file: at most the directory itself, and only if no other user and no file system server
    can have put the directory in place.
    """
    if process.link("ns/mnt") != os.readlink("/proc/self/ns/mnt") or process.link("root") != "/":
        return None
    variables = process.environment()
    if not variables:
        return None
    named = variables.get("TRIO_SMC_DIRECTORY")
    if not named and variables.get("TRIO_SMC_CONFIG"):
        return None  # the file may name another directory
    directory = Path(named) if named else default_directory(variables).path
    try:
        TrustedFiles(_DIRECTORY_TIME).exists(str(directory))  # the path may be on a FUSE mount
    except UntrustedPathError:
        return None
    return _problem_of(directory)


def _control_sockets(process: Process) -> set[str]:
    """The names of a process's control sockets, one for each stack.

    The names come from the kernel and not from the directory, because the process may have a mount
    namespace of its own.
    """
    own, numbers = process.sockets(), process.numbers()
    names = {
        # A stack binds its socket to the name with a dot before it, and then renames the socket.
        os.path.basename(path).lstrip(".")
        for inode, path in _unix_streams(process)
        if inode in own
    }
    return {name for name in names if pid_of_name(name) in numbers}


def _unix_streams(process: Process) -> Iterator[tuple[str, str]]:
    """Inodes and paths of Unix stream sockets in a process's network namespace."""
    if process.link("ns/net") == os.readlink("/proc/self/ns/net"):
        try:
            return iter(list(unix_listeners()))
        except OSError:
            pass  # this kernel has no sock_diag of Unix sockets
    return process.unix_streams()


def _are_in(stacks: set[str], directory: Path) -> bool:
    """True if one of these control sockets is in this side's private directory."""
    try:
        with contextlib.closing(PrivateDirectory.open(directory, create=False)) as root:
            name = root.member_directory(DIRECTORY, private=True)
            with contextlib.closing(root.below(name)) as control:
                return not stacks.isdisjoint(control.sockets())
    except (OSError, DirectoryUnusable):
        return False


def _private_directory(process: Process) -> str:
    """The path of a process's private directory, as the process itself sees it."""
    for _, link in process.descriptors():
        # The stack has its directory of control sockets open.  In a directory that a group shares,
        # the name of that directory is "control-<random>".  The kernel marks a removed one.
        name = os.path.basename(link.removesuffix(" (deleted)"))
        if name.partition("-")[0] == DIRECTORY:
            return os.path.dirname(link)
    return "another one"
