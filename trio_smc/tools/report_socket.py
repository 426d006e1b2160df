"""The socket on which `trio-smc run` receives messages from the processes of PROGRAM only.

Theory of operation
-------------------
The name of the socket is a secret: a random name in a new directory that other users cannot list.
Only the environment of PROGRAM's processes contains the path.  The socket is bound to another name
first and then renamed, because /proc/net/unix shows the name at `bind` to every user.  So a process
of another user cannot find the socket.  The mode of the socket is 0666, because a process of
PROGRAM may have changed its user.

The secret can leak: after a process of PROGRAM has changed its user, other processes of the new
user can read its environment, and processes of this user can list the directory.  Therefore each
sender must also be one of PROGRAM's processes.  The kernel provides the number of the sender
(SO_PEERCRED), and the sender must have PROGRAM among its ancestors, or must have had it when an
earlier message was read.  This process adopts PROGRAM's orphans (PR_SET_CHILD_SUBREAPER), so this
process counts as an ancestor, too.  The number of a sender that has ended may belong to another
process now; with SO_PEERPIDFD (Linux 6.5) the reader notices that.

If a sender has ended before its first message is read, its ancestors are unknown.  If the sender
belonged to this user, the message is accepted as unproven.

Each message is one packet on its own connection (SOCK_SEQPACKET).  So a sender never waits: if the
backlog is full, connect(2) fails at once, and the sender counts the message as lost.  The reading
thread never waits for a sender either.  This thread only peeks at the packet (MSG_PEEK), so that no
descriptor that was sent with the packet is received.  Closing the connection destroys such a
descriptor, which may block (SO_LINGER), so a second thread closes connections.  From Linux 6.16 on,
the kernel refuses descriptors (SO_PASSRIGHTS).

The reading thread pauses after each burst of connections, so that a flood uses only a part of one
processor.  `overflowed` is True if the backlog may have been full, so that messages may be missing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import secrets
import selectors
import shutil
import signal
import socket
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, Self

from trio_smc.capture.output_file import trust_directory
from trio_smc.control.protocol import REPORT_TO
from trio_smc.tools.report_messages import MAX_SIZE

__all__ = [
    "BACKLOG",
    "DIRECTORIES",
    "SO_PASSRIGHTS",
    "NoReports",
    "ProcessState",
    "ReportSocket",
    "process_state",
]

BACKLOG: Final = 4096
"""Connections that may wait for `accept`: the default of net.core.somaxconn (Linux 5.4)."""
_BURST: Final = 32
"""The largest number of connections accepted between two pauses.  Chosen: with `_PAUSE` at most
3,200 per second."""
_PAUSE: Final = 0.01
"""Seconds of a pause.  Chosen."""
_MAX_WITHOUT_PACKET: Final = 64
"""Connections that may wait for their packet, if a process was stopped between connect(2) and
send(2).  Chosen."""
_PACKET_TIMEOUT: Final = 5.0
"""Seconds that a connection may wait for its packet.  Chosen."""
_MAX_TO_CLOSE: Final = 256
"""Connections that may wait to be closed.  Above it the reading thread accepts none.  Chosen."""
_END_TIMEOUT: Final = 2.0
"""Seconds for reading the messages that were sent before PROGRAM ended.  Chosen."""
_MAX_DESCENDANTS: Final = 1 << 16
"""Processes known to descend from PROGRAM.  Chosen: a bound on memory."""
DIRECTORIES: Final = ("/tmp", "/var/tmp", "/dev/shm")
"""Places for the socket's directory, tried in turn.  A place where other users could replace the
directory is refused, for example a /tmp without the sticky bit."""
_PREFIX: Final = "trio-smc-run-"
"""The beginning of the names of these directories."""
_NEW: Final = "new"
"""The name of the socket in its directory before it listens."""
_MOST_LEFTOVERS: Final = 64
"""Directories that one command looks at.  Chosen."""
_MAX_ADDRESS: Final = 107
"""Bytes of the path of a Unix socket (unix(7))."""
_CREDENTIALS: Final = struct.Struct("iII")  # struct ucred: pid, uid, gid
_SO_PEERPIDFD: Final = 77  # linux/include/uapi/asm-generic/socket.h
SO_PASSRIGHTS: Final = 83
_MAX_ANCESTORS: Final = 4096
"""Ancestors of one sender that are examined.  Chosen: ends the search if the tree changes."""


class ProcessState(NamedTuple):
    """The state of a process, from /proc/PID/stat.

    Attributes:
      state: "R", "S", "T" (stopped), "Z" (zombie), ...
      parent: the number of the parent process.
      start: the start time, in clock ticks since the boot.  Number and start time together
        identify a process.
    """

    state: str
    parent: int
    start: int


class _Sender(NamedTuple):
    """The process at the other end of a connection.

    Attributes:
      pid: the number of the process.
      proven: True if the process is known to descend from PROGRAM.
    """

    pid: int
    proven: bool


def process_state(pid: int) -> ProcessState | None:
    """Read the state of a process; None if there is no process with this number."""
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    words = line[line.rindex(b")") + 1 :].split()  # the name may contain blanks and brackets
    return ProcessState(words[0].decode("ascii"), int(words[1]), int(words[19]))


class ReportSocket:
    """Receives messages in a thread, from `start` to `finish`.  Use it as a context manager.

    Args:
      on_packet: called in the thread with each packet, the number of its sender, and True if the
        sender is known to descend from PROGRAM.

    Attributes:
      path: the path of the socket, for the environment of PROGRAM's processes only.
      overflowed: True if the backlog may have been full, so that messages may be missing.
      refused: the number of connections refused, because their processes are not PROGRAM's.
    """

    def __init__(self, on_packet: Callable[[bytes, int, bool], None]) -> None:
        self._on_packet = on_packet
        self._descendants: dict[int, int] = {}
        self._root = 0
        self.overflowed = False
        self.refused = 0
        self._without_packet: dict[socket.socket, tuple[_Sender, float]] = {}
        self._to_close: queue.SimpleQueue[socket.socket | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._finish = threading.Event()
        self._directory, self.path = _new_directory()
        try:
            self._listener, self._backlog = _new_listener(self._directory, self.path)
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except BaseException:
            shutil.rmtree(self._directory, ignore_errors=True)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()
        self._listener.close()
        os.close(self._wake)
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def environment(self) -> dict[str, str]:
        """The variable with the path, for PROGRAM's processes only."""
        return {REPORT_TO: self.path}

    def start(self, root: int) -> None:
        """Start to receive.  ``root`` is PROGRAM's process.

        Raises:
          OSError: the system refuses threads.
        """
        self._root = root
        for function in (self._receive, self._close):
            # Daemon threads, because closing a received descriptor may block `_close` for ever.
            thread = threading.Thread(target=function, name="trio-smc run", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self.overflowed = True  # no thread receives the messages
                raise OSError(errno.EAGAIN, str(error)) from error
            self._threads.append(thread)

    def finish(self) -> None:
        """Read the messages that were sent before this call, and stop.  Idempotent.

        This takes at most a few seconds (`_END_TIMEOUT`).
        """
        self._finish.set()
        os.eventfd_write(self._wake, 1)
        for thread in self._threads:
            thread.join(_END_TIMEOUT + 1)
            self._to_close.put(None)
        self._threads.clear()

    # --- the thread that reads ---------------------------------------------------------------

    def _receive(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            in_a_row = 0
            while not self._finish.is_set():
                wait = None if not self._without_packet else _PACKET_TIMEOUT
                for key, _ in selector.select(wait):
                    if (
                        isinstance(key.fileobj, socket.socket)
                        and key.fileobj in self._without_packet
                    ):
                        selector.unregister(key.fileobj)
                        self._read(key.fileobj, self._without_packet.pop(key.fileobj)[0])
                accepted = self._accept(selector)
                self._expire(selector)
                in_a_row += accepted
                self.overflowed |= in_a_row >= self._backlog
                in_a_row = in_a_row if accepted == _BURST else 0
                if accepted == _BURST or self._to_close.qsize() > _MAX_TO_CLOSE:
                    self._finish.wait(_PAUSE)
            self._drain(selector)

    def _drain(self, selector: selectors.BaseSelector) -> None:
        """Read the messages that are in the backlog.  Later messages are lost."""
        end = time.monotonic() + _END_TIMEOUT
        while time.monotonic() < end:
            if self._to_close.qsize() > _MAX_TO_CLOSE:
                time.sleep(_PAUSE)
            elif not self._accept(selector):
                break
        else:
            self.overflowed = True
        for connection, (sender, _) in self._without_packet.items():
            if not self._read(connection, sender):
                self._to_close.put(connection)
        self._without_packet.clear()

    def _accept(self, selector: selectors.BaseSelector) -> int:
        """Accept at most `_BURST` connections, and return their number."""
        if self._to_close.qsize() > _MAX_TO_CLOSE:
            self.overflowed = True
            return 0
        for count in range(_BURST):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return count
            except OSError:
                # This process has too many open files or no memory: try again after a pause.
                self._finish.wait(_PAUSE)
                return count
            connection.setblocking(False)
            sender = self._identify(connection)
            if sender is None:
                self.refused += 1
                self._to_close.put(connection)
            elif not self._read(connection, sender):
                self._without_packet[connection] = sender, time.monotonic() + _PACKET_TIMEOUT
                selector.register(connection, selectors.EVENT_READ)
        return _BURST

    def _read(self, connection: socket.socket, sender: _Sender) -> bool:
        """Read the packet of a connection; False if the packet has not arrived yet."""
        try:
            data = connection.recv(MAX_SIZE + 1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if data:
            self._on_packet(data, sender.pid, sender.proven)
        self._to_close.put(connection)
        return True

    def _expire(self, selector: selectors.BaseSelector) -> None:
        now = time.monotonic()
        for connection, (_, deadline) in list(self._without_packet.items()):
            if deadline > now and len(self._without_packet) <= _MAX_WITHOUT_PACKET:
                return
            del self._without_packet[connection]
            selector.unregister(connection)
            self._to_close.put(connection)

    # --- senders -----------------------------------------------------------------------------

    def _identify(self, connection: socket.socket) -> _Sender | None:
        """The sender of a connection; None if the sender is not one of PROGRAM's processes."""
        pid, uid, _ = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if pid == 0:
            # The sender is in a PID namespace outside this process's, and PROGRAM's processes can
            # only be in this one or in namespaces below it.
            return None
        found = process_state(pid)
        known = found is not None and self._descendants.get(pid) == found.start
        descends = found is not None and (known or self._descends(pid, found))
        # Check this last.  If the sender exists now, it also existed during the checks above, so
        # these were not about another process with the same number.
        if found is None or not _still_exists(connection):
            proven = pid in self._descendants or pid == self._root
            return _Sender(pid, proven) if proven or uid == os.geteuid() else None
        if not descends:
            return None
        if len(self._descendants) >= _MAX_DESCENDANTS:
            self._descendants.clear()
        self._descendants[pid] = found.start
        return _Sender(pid, True)

    def _descends(self, pid: int, found: ProcessState) -> bool:
        """True if PROGRAM or this process, which adopts PROGRAM's orphans, is an ancestor."""
        for _ in range(_MAX_ANCESTORS):
            if pid in (self._root, os.getpid()):
                return True
            parent = process_state(found.parent)
            if parent is None:
                # The parent has just ended, so another process has adopted process ``pid``.
                now = process_state(pid)
                if now is None or now.start != found.start or now.parent == found.parent:
                    return False
                found = now
            elif parent.start > found.start:
                return False  # the parent's number was used again: a parent starts first
            else:
                pid, found = found.parent, parent
        return False

    # --- the thread that closes --------------------------------------------------------------

    def _close(self) -> None:
        while (connection := self._to_close.get()) is not None:
            connection.close()


class NoReports(contextlib.nullcontext[None]):
    """In place of a `ReportSocket`, if there is no place for one: all messages are missing."""

    overflowed: Final = True
    environment: Final[dict[str, str]] = {}

    def start(self, root: int) -> None:
        """No-op."""

    def finish(self) -> None:
        """No-op."""


def _still_exists(connection: socket.socket) -> bool:
    """False if the process that connected has ended, and its parent has waited for it.

    Always True before Linux 6.5, which has no SO_PEERPIDFD.
    """
    try:
        pidfd = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        return error.errno not in (errno.ESRCH, errno.EINVAL, errno.ENODATA)
    try:
        signal.pidfd_send_signal(pidfd, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # another user's process
    finally:
        os.close(pidfd)
    return True


def _remove_leftovers(place: str) -> None:
    """Remove the directories of this user's commands that were killed."""
    with contextlib.suppress(OSError):
        names = [name for name in os.listdir(place) if name.startswith(_PREFIX)]
        for name in names[:_MOST_LEFTOVERS]:
            with contextlib.suppress(OSError):
                _remove_leftover(os.path.join(place, name))


def _remove_leftover(path: str) -> None:
    """Remove a directory if it has the socket of a process that has ended.

    Raises OSError: it has not, or it belongs to another user.
    """
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(directory).st_uid != os.geteuid():
            return
        # The socket of a command that is starting has the name `_NEW`, and does not listen yet.
        [name] = os.listdir(directory)
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if name == _NEW or not stat.S_ISSOCK(found.st_mode):
            return
        # A socket of another type: the kernel refuses it with EPROTOTYPE if a process has the name,
        # and that process does not notice.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(f"/proc/self/fd/{directory}/{name}")
            except ConnectionRefusedError:
                os.unlink(name, dir_fd=directory)
                os.rmdir(path)
    except ValueError:
        pass  # the command is starting or ending
    finally:
        os.close(directory)


def _new_directory() -> tuple[str, str]:
    """Create a directory for the socket.  Return its path and the path for the socket in it.

    Raises:
      OSError: there is no place where other users cannot replace the directory.
    """
    problem: OSError | None = None
    places = list(DIRECTORIES)
    with contextlib.suppress(OSError):  # none that it knows is writable
        places.insert(0, tempfile.gettempdir())
    for place in dict.fromkeys(places):
        try:
            trust_directory(place)
            _remove_leftovers(place)
            directory = tempfile.mkdtemp(prefix=_PREFIX, dir=place)
            os.chmod(directory, 0o700)  # a umask may have taken bits away
        except OSError as error:
            problem = problem or error
            continue
        path = os.path.join(directory, secrets.token_urlsafe(16))
        if len(os.fsencode(path)) <= _MAX_ADDRESS:
            return directory, path
        os.rmdir(directory)
        problem = OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), place)
    raise problem or FileNotFoundError(errno.ENOENT, "no directory for temporary files")


def _new_listener(directory: str, path: str) -> tuple[socket.socket, int]:
    """Create a socket that listens at ``path``; return it and the length of its backlog."""
    backlog = BACKLOG
    with contextlib.suppress(OSError, ValueError):
        backlog = min(backlog, int(Path("/proc/sys/net/core/somaxconn").read_bytes()))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.setblocking(False)
        with contextlib.suppress(OSError):
            listener.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)
        bound_path = os.path.join(directory, _NEW)
        listener.bind(bound_path)
        os.chmod(bound_path, 0o666)
        listener.listen(backlog)
        os.rename(bound_path, path)
        os.chmod(directory, 0o711)
    except BaseException:
        listener.close()
        raise
    return listener, backlog
