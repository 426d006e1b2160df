"""The socket on which `trio-smc run` receives messages from the processes of PROGRAM only.

Theory of operation
-------------------
The socket is in a new directory that other users cannot list, and has a random name that is only in
the environment of PROGRAM's processes.  It was bound to another name and renamed, because
/proc/net/unix shows the bound name to every user.  So a process of another user cannot reach the
socket.  Its mode is 0666, because a process of the tree may have changed its user.

Such a process exposes the name to all processes of its new user, which may read its environment.
A process of the same user may list the directory.  Therefore the kernel names the sender of each
connection (SO_PEERCRED), and the sender must descend from PROGRAM, or must have done so when it
sent before.  This process adopts PROGRAM's orphans (PR_SET_CHILD_SUBREAPER), so they descend from
this process.  With SO_PEERPIDFD (Linux 6.5) the number of a sender that has ended is never taken
for another process.

If a sender of this user has ended before its first message is read, its descent is not known.  Such
a message is marked as unproven.

A message is one packet on its own connection (SOCK_SEQPACKET).  So a sender never waits: if the
backlog is full, connect(2) fails at once, and the sender counts the message as lost.  The reading
thread never waits for a sender either.  It only peeks at a packet, so that this process never
receives a descriptor sent with it.  To close the connection destroys such a descriptor, which may
block (SO_LINGER), so another thread does that.  From Linux 6.16 on, the kernel refuses descriptors
(SO_PASSRIGHTS).

The reader pauses after a number of connections, so that a flood uses a bounded part of one
processor.  If the backlog may have been full, messages may be missing (`overflowed`).
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
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, Self

from trio_smc.capture.output_file import trust_directory
from trio_smc.tools.report_messages import MAX_SIZE

__all__ = ["ProcessState", "ReportSocket", "process_state"]

_BACKLOG: Final = 4096
_BURST: Final = 32
"""The largest number of connections accepted between two pauses."""
_PAUSE: Final = 0.01
_MAX_WITHOUT_PACKET: Final = 64
"""Connections without a packet: their senders were stopped between connect(2) and send(2)."""
_PACKET_TIMEOUT: Final = 5.0
_MAX_TO_CLOSE: Final = 256
_END_TIMEOUT: Final = 2.0
"""Seconds for reading the messages that were sent before PROGRAM ended."""
_MAX_DESCENDANTS: Final = 1 << 16
_DIRECTORIES: Final = ("/tmp", "/var/tmp", "/dev/shm")
"""Places for the socket's directory.  The /tmp of a container may lack the sticky bit."""
_MAX_ADDRESS: Final = 107
"""Bytes of the name of a Unix socket (unix(7))."""
_CREDENTIALS: Final = struct.Struct("iII")  # struct ucred: pid, uid, gid
_SO_PEERPIDFD: Final = 77  # linux/include/uapi/asm-generic/socket.h
_SO_PASSRIGHTS: Final = 83
_MAX_ANCESTORS: Final = 4096


class ProcessState(NamedTuple):
    """A line of /proc/PID/stat.

    Attributes:
      state: "R", "S", "T" (stopped), "Z" (zombie), ...
      parent: the number of the parent process.
      start: the start time, in clock ticks since the boot.
    """

    state: str
    parent: int
    start: int


class _Sender(NamedTuple):
    """The process at the other end of a connection.

    Attributes:
      proven: True if it is known to descend from PROGRAM.
    """

    pid: int
    proven: bool


def process_state(pid: int) -> ProcessState | None:
    """Read the state of a process; None: there is no process with this number."""
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
      path: the path of the socket, which only PROGRAM's processes may know.
      overflowed: True if the backlog may have been full, so that messages may be missing.
      refused: the number of connections of processes that are not PROGRAM's.
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

    def start(self, root: int) -> None:
        """Start to receive.  ``root`` is PROGRAM's process."""
        self._root = root
        for function in (self._receive, self._close):
            # Daemon threads, because a descriptor may block the second one for ever.
            thread = threading.Thread(target=function, name="trio-smc run", daemon=True)
            self._threads.append(thread)
            thread.start()

    def finish(self) -> None:
        """Read the messages sent before this call, and stop, within a few seconds.  Idempotent."""
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
        """Read the messages in the backlog; later messages are ignored."""
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
        """Accept up to `_BURST` connections, and return their number."""
        if self._to_close.qsize() > _MAX_TO_CLOSE:
            self.overflowed = True
            return 0
        for count in range(_BURST):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return count
            except OSError:
                # No descriptor or no memory is left: try again after a pause.
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
        """Read the packet; False if it has not arrived yet."""
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
        """The sender of a connection; None: it is not one of PROGRAM's processes."""
        pid, uid, _ = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if pid == 0:
            return None  # the sender is in a PID namespace that PROGRAM cannot have created
        found = process_state(pid)
        known = found is not None and self._descendants.get(pid) == found.start
        descends = found is not None and (known or self._descends(pid, found))
        # Check this last: before, another process may have received the number.
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
        """True if PROGRAM is an ancestor, or this process, which adopts PROGRAM's orphans."""
        for _ in range(_MAX_ANCESTORS):
            if pid in (self._root, os.getpid()):
                return True
            parent = process_state(found.parent)
            if parent is None:
                # The parent has just ended, and another process has adopted this one.
                now = process_state(pid)
                if now is None or now.start != found.start or now.parent == found.parent:
                    return False
                found = now
            elif parent.start > found.start:
                return False  # the number belongs to another process by now
            else:
                pid, found = found.parent, parent
        return False

    # --- the thread that closes --------------------------------------------------------------

    def _close(self) -> None:
        while (connection := self._to_close.get()) is not None:
            connection.close()


def _still_exists(connection: socket.socket) -> bool:
    """True unless the process that connected has ended and was waited for.

    True before Linux 6.5, too, which cannot say.
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


def _new_directory() -> tuple[str, str]:
    """Create a directory for the socket, and return it with the path of the socket.

    Raises:
      OSError: other users could replace the directory in all places.
    """
    problem: OSError | None = None
    for place in dict.fromkeys((tempfile.gettempdir(), *_DIRECTORIES)):
        try:
            trust_directory(place)
            directory = tempfile.mkdtemp(prefix="trio-smc-run-", dir=place)
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
    """Create a socket that listens at a path, and return it with the length of its backlog."""
    backlog = _BACKLOG
    with contextlib.suppress(OSError, ValueError):
        backlog = min(backlog, int(Path("/proc/sys/net/core/somaxconn").read_bytes()))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.setblocking(False)
        with contextlib.suppress(OSError):
            listener.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
        bound_path = os.path.join(directory, "new")
        listener.bind(bound_path)
        os.chmod(bound_path, 0o666)
        listener.listen(backlog)
        os.rename(bound_path, path)
        os.chmod(directory, 0o711)
    except BaseException:
        listener.close()
        raise
    return listener, backlog
