"""Refuse descriptors that arrive on Unix sockets, or close them without waiting.

Theory of operation.  A process that may connect to a Unix socket may attach descriptors to its
packets (SCM_RIGHTS, unix(7)).  To close some descriptors may take as long as the sender wants, for
example a TCP socket with SO_LINGER and unsent data, or a terminal with unsent output.  To close a
file of a file system in user space (FUSE) or of NFS waits for its server, and so may fstat(2) and
mmap(2).  The kernel closes two kinds of descriptors in the receiving thread: those for which
recv(2) or recvmsg(2) has no room, and those that are still in a socket, or in the backlog of a
listening socket, when that is closed.  Therefore:

* Where no descriptor is expected, the kernel refuses them (`refuse_descriptors`, Linux 6.16): the
  sender gets EPERM.  An accepted socket inherits this from the listening socket.  On older kernels
  `receive_bytes` peeks first.  With MSG_PEEK the flag MSG_CTRUNC shows that descriptors are
  attached, and the kernel drops only copies, because the packet stays in the queue.
* A socket with such a packet is not read again.  `Closer.discard` shuts it down, so that the peer
  notices at once and can send nothing more.  Unless its queue is empty, a thread closes it.
* The same thread closes all other descriptors whose close may wait.  Its owner joins it.

After a shutdown, the queue of a socket is empty if a peek finds no packet.  An empty packet would
look the same; so SO_PASSCRED is set, and then each packet has credentials, which set MSG_CTRUNC.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from trio_smc._base.errors import ProtocolError
from trio_smc.host.overcommit import can_start_thread

if sys.platform == "linux":  # on other systems nothing here is used
    import fcntl

__all__ = [
    "SO_PASSRIGHTS",
    "Closer",
    "datagram_probe",
    "descriptors_in",
    "is_anonymous_pipe",
    "is_memfd",
    "kernel_refuses",
    "receive_bytes",
    "receive_with_sender",
    "refuse_descriptors",
]

_log = logging.getLogger("trio_smc.host")

SO_PASSRIGHTS = 83  # linux/include/uapi/asm-generic/socket.h; Linux 6.16
kernel_refuses: bool | None = None  # True if each call of `refuse_descriptors` was successful
_PEEK: Final = socket.MSG_PEEK | getattr(socket, "MSG_DONTWAIT", 0)
_TRUNCATED: Final = getattr(socket, "MSG_CTRUNC", 0)
_NO_LINGER: Final = struct.pack("ii", 0, 0)
_MAX_RESETS: Final = 4
"""Attempts to empty a socket whose peer resets it.  Chosen: the kernel reports each reset once."""
_MAX_ATTACHED: Final = 253  # descriptors with one message (SCM_MAX_FD, linux/net/scm.h)
_MAX_DATAGRAMS: Final = 1024  # in a socket's queue: net.unix.max_dgram_qlen is 10 by default
_CREDENTIALS: Final = struct.Struct("iII")  # struct ucred: pid, uid, gid
_SENDER_SPACE: Final = socket.CMSG_SPACE(_CREDENTIALS.size) if sys.platform == "linux" else 0
_MAX_PENDING: Final = 64
"""Closes that wait for the thread before `Closer.is_full`.  Chosen."""
_JOIN_TIMEOUT: Final = 0.05
"""Seconds that the end of a stack waits for a close that hangs.  Chosen; no measurement is
recorded."""


def refuse_descriptors(sock: socket.socket) -> bool:
    """Make the kernel refuse descriptors that are sent to a Unix socket; True if it does.

    Call this before the socket listens or connects, so that no descriptor can have arrived.
    """
    global kernel_refuses
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)
    except OSError:
        kernel_refuses = False  # before Linux 6.16
        return False
    if kernel_refuses is None:
        kernel_refuses = True
    return True


def receive_bytes(sock: socket.socket, size: int) -> bytes:
    """Receive at most ``size`` bytes from a Unix socket on which no descriptor is expected.

    Args:
      sock: a socket for which `refuse_descriptors` was called, or for its listening socket.
      size: bytes.

    Raises:
      ProtocolError: descriptors are attached.  Nothing was received; give the socket to
        `Closer.discard`.
      OSError: as `socket.socket.recv`.
    """
    if kernel_refuses:
        return sock.recv(size)
    data, _, flags, _ = sock.recvmsg(size, 0, socket.MSG_PEEK)
    if flags & _TRUNCATED:
        raise ProtocolError("a descriptor arrived where none is expected")
    # Not more than the peek returned: a packet with descriptors may have arrived behind that.
    return sock.recv(len(data)) if data else data


def receive_with_sender(sock: socket.socket, size: int, closer: Closer) -> tuple[bytes, int | None]:
    """Receive a datagram of at most ``size`` bytes; returns it and the user that sent it.

    Descriptors that are attached in spite of `refuse_descriptors` are given to ``closer``, and the
    datagram counts as empty.  If the table of descriptors is full, the kernel closes those that
    have no place in it, before Linux 6.16 only.

    sock: a Unix datagram socket with SO_PASSCRED, for which `refuse_descriptors` was called.

    Raises:
      OSError: as `socket.socket.recvmsg`.
    """
    if kernel_refuses:
        data, ancillary, _, _ = sock.recvmsg(size, _SENDER_SPACE)
        return data, sender_of(ancillary) if ancillary else None
    space = _SENDER_SPACE + socket.CMSG_SPACE(4 * _MAX_ATTACHED)
    data, ancillary, _, _ = sock.recvmsg(size, space, socket.MSG_CMSG_CLOEXEC)
    fds = descriptors_in(ancillary)
    if fds:
        closer.close(fds)
        data = b""
    return data, sender_of(ancillary)


def datagram_probe(sock: socket.socket) -> Callable[[], bool]:
    """A function that is true if a datagram has arrived; to receive none takes twice as long.

    False if the socket is closed.
    """
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return partial(_has_datagram, sock.fileno, poll.poll)


def _has_datagram(number: Callable[[], int], poll: Callable[[int], object]) -> bool:
    return number() >= 0 and bool(poll(0))


def sender_of(ancillary: list[tuple[int, int, bytes]]) -> int | None:
    """The user that has sent a datagram (SCM_CREDENTIALS, unix(7)); None: it does not say.

    ``ancillary``: as `socket.socket.recvmsg` returns it.
    """
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            user: int = _CREDENTIALS.unpack(payload[: _CREDENTIALS.size])[1]
            return user
    return None


def descriptors_in(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors that recvmsg(2) has installed."""
    fds: list[int] = []
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            count = len(payload) // 4
            fds += struct.unpack(f"{count}i", payload[: count * 4])
    return fds


def is_memfd(fd: int) -> bool:
    """True for a memfd or a file of a tmpfs, for which fstat(2) and mmap(2) do not wait.

    Only these have seals, and F_GET_SEALS does not call the file system (fcntl(2)).
    """
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return True


def is_anonymous_pipe(fd: int) -> bool:
    """True for a pipe made by pipe(2).  A FIFO of a file system may wait for its server.

    Raises:
      OSError: /proc is missing.
    """
    return os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:[")


class Closer:
    """Closes descriptors whose close may wait, in a thread that runs only while there are any.

    Args:
      name: the owner, for the thread's name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], object]] = deque()
        self._worker: threading.Thread | None = None

    @property
    def is_full(self) -> bool:
        """True if so many closes wait that nothing more should be received or accepted."""
        return len(self._waiting) >= _MAX_PENDING

    def run(self, action: Callable[[], object]) -> None:
        """Call ``action``, which closes something, in the thread.  An OSError of it is ignored."""
        with self._lock:
            self._waiting.append(action)
            if self._worker is not None:
                return
            self._worker = threading.Thread(
                target=self._work, name=f"trio_smc closer {self._name}", daemon=True
            )
            try:
                if not can_start_thread():
                    raise RuntimeError("there is no memory for a thread")
                self._worker.start()
            except RuntimeError as error:  # no more threads: try again at the next close
                self._worker = None
                _log.info("descriptors stay open for now: %s", error)

    def close(self, fds: list[int]) -> None:
        """Close received descriptors, and empty the list."""
        for fd in fds:
            self.run(_Close(fd))
        fds.clear()

    def discard(self, sock: socket.socket) -> None:
        """Close a connected Unix socket, with all unread packets.  Idempotent."""
        if sock.fileno() < 0:
            return
        if _is_drained(sock):
            sock.close()
        else:
            self.run(sock.close)

    def discard_datagrams(self, sock: socket.socket) -> None:
        """Close a Unix datagram socket, for which `receive_with_sender` may be called.  Idempotent.

        Nothing can be sent to it from now on.
        """
        if not kernel_refuses and sock.fileno() >= 0:
            sock.setblocking(False)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RD)
                for _ in range(_MAX_DATAGRAMS):
                    receive_with_sender(sock, 1, self)
        sock.close()

    def discard_listener(self, listener: socket.socket) -> None:
        """Close a listening Unix socket that does not block, and the sockets in its backlog."""
        if listener.fileno() < 0:
            return
        try:
            listener.shutdown(socket.SHUT_RDWR)  # refuse new connections
            first, _ = listener.accept()
        except OSError as error:
            # Linux refuses further connections, so the backlog is empty and stays so.  It returns
            # EAGAIN for a socket that does not block, and EINVAL otherwise.
            if error.errno in (errno.EAGAIN, errno.EINVAL):
                listener.close()
            else:
                self.run(listener.close)
        else:
            self.run(first.close)
            self.run(listener.close)

    def join(self) -> None:
        """Wait for the thread, but not for a close that hangs.  Idempotent."""
        if self._waiting and self._worker is None:
            self.run(_no_action)  # perhaps a thread can be started now
        worker = self._worker
        if worker is None:
            return
        worker.join(_JOIN_TIMEOUT)
        if worker.is_alive():
            # The thread ends after its last close, or with this process.
            _log.warning("%s: a descriptor from another process takes long to close", worker.name)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._worker = None
                    return
                action = self._waiting[0]
            try:
                action()
            except OSError:
                pass
            except Exception:
                # The thread must go on, because no other one is started while it exists.
                _log.exception("%s: cannot close", self._name)
            del action  # the last reference may be to a socket
            self._waiting.popleft()


class _Close:
    """Closes one received descriptor."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __call__(self) -> None:
        try:
            sock = socket.socket(fileno=self._fd)
        except OSError:
            os.close(self._fd)
            return
        with sock, contextlib.suppress(OSError):
            # Then the close rarely waits.  The sender may set SO_LINGER again, hence the thread.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)


def _no_action() -> None:
    """No-op: makes `Closer.run` start the thread for earlier actions."""


def _is_drained(sock: socket.socket) -> bool:
    """Shut a socket down.  True if its queue is empty, which then cannot change."""
    for _ in range(_MAX_RESETS):
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            sock.shutdown(socket.SHUT_RDWR)
            data, _, flags, _ = sock.recvmsg(1, 0, _PEEK)
        except ConnectionResetError:
            continue  # reported once, and there may still be packets
        except OSError:
            return False
        return not data and not flags & _TRUNCATED
    return False
