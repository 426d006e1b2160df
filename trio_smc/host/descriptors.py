"""Descriptors that arrive on Unix sockets: refusing them, and closing them without waiting.

Theory of operation.  Any process that may connect to a Unix socket may attach descriptors to what
it sends (SCM_RIGHTS, unix(7)).  The last close of some kinds waits for as long as the sender wants:
a TCP socket with SO_LINGER and unsent data, a terminal that drains.  Each close of a file on a file
system in user space (FUSE) or on NFS waits for its server, and so may fstat(2) and mmap(2).  The
kernel closes in the thread that receives: a descriptor that recv(2) or recvmsg(2) has no room for,
and all those that still wait in a socket when that is closed, in the backlog of a listening
socket, too.  Therefore:

* Where no descriptor is expected the kernel refuses them (`refuse_descriptors`, Linux 6.16: the
  sender gets EPERM).  An accepted socket inherits this from the listening one.  On older kernels
  `receive_bytes` looks before it takes anything: MSG_PEEK shows by MSG_CTRUNC that descriptors are
  attached, and what it drops are copies while the packet stays in the queue.
* A socket with such a packet is not read again.  `Closer.discard` shuts it down, so that its peer
  notices at once and can send nothing more, and closes it in a thread unless its queue is empty.
* What else may wait is closed by that thread, too.  Its owner joins it.

The queue of a socket that is shut down is empty if a look finds no packet.  An empty packet would
look like the end; with SO_PASSCRED each packet brings credentials, for which MSG_CTRUNC is set.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from trio_smc._base.errors import ProtocolError
from trio_smc.host.overcommit import can_start_thread

if sys.platform == "linux":  # elsewhere nothing here is used
    import fcntl

__all__ = [
    "Closer",
    "descriptors_in",
    "is_anonymous_pipe",
    "is_memfd",
    "receive_bytes",
    "refuse_descriptors",
]

_log = logging.getLogger("trio_smc.host")

_SO_PASSRIGHTS = 83  # linux/include/uapi/asm-generic/socket.h; Linux 6.16
_kernel_refuses: bool | None = None  # True if each call of `refuse_descriptors` was successful
_PEEK: Final = socket.MSG_PEEK | getattr(socket, "MSG_DONTWAIT", 0)
_TRUNCATED: Final = getattr(socket, "MSG_CTRUNC", 0)
_NO_LINGER: Final = struct.pack("ii", 0, 0)
_MAX_RESETS: Final = 4
_MAX_PENDING: Final = 64
_JOIN_TIMEOUT: Final = 0.05
"""Seconds that the end of a stack may wait for a close that hangs."""


def refuse_descriptors(sock: socket.socket) -> bool:
    """Have the kernel refuse descriptors sent to a Unix socket; True if it does.

    To be called before the socket listens or connects, so that none can be on its way.
    """
    global _kernel_refuses
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
    except OSError:
        _kernel_refuses = False  # before Linux 6.16
        return False
    if _kernel_refuses is None:
        _kernel_refuses = True
    return True


def receive_bytes(sock: socket.socket, size: int) -> bytes:
    """Receive at most ``size`` bytes from a Unix socket on which no descriptor is expected.

    ``sock``: `refuse_descriptors` was called for it, or for the listening one it comes from.

    Raises:
      ProtocolError: descriptors are attached.  Nothing was taken; give the socket to
        `Closer.discard`.
      OSError: as `socket.socket.recv`.
    """
    if _kernel_refuses:
        return sock.recv(size)
    data, _, flags, _ = sock.recvmsg(size, 0, socket.MSG_PEEK)
    if flags & _TRUNCATED:
        raise ProtocolError("a descriptor where none is expected")
    # No more than was looked at: behind it there may be a packet with descriptors by now.
    return sock.recv(len(data)) if data else data


def descriptors_in(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors that recvmsg(2) has installed."""
    fds: list[int] = []
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            count = len(payload) // 4
            fds += struct.unpack(f"{count}i", payload[: count * 4])
    return fds


def is_memfd(fd: int) -> bool:
    """True if the descriptor is a memfd or a file of a tmpfs: fstat(2) and mmap(2) do not wait.

    F_GET_SEALS asks no file system; all other kinds have no seals (fcntl(2)).
    """
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return True


def is_anonymous_pipe(fd: int) -> bool:
    """True if the descriptor is a pipe(2) and no FIFO of a file system, whose server may wait.

    Raises OSError where /proc is missing.
    """
    return os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:[")


class Closer:
    """Closes what may wait, in a thread that is there while something is to be closed.

    Args:
      name: of the owner, for the thread's name.
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
        """Call ``action``, which closes something, in the thread; its OSError is ignored."""
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
            except RuntimeError as error:  # no more threads: with the next close
                self._worker = None
                _log.info("descriptors stay open for now: %s", error)

    def close(self, fds: list[int]) -> None:
        """Close received descriptors, and empty the list."""
        for fd in fds:
            self.run(_Close(fd))
        fds.clear()

    def discard(self, sock: socket.socket) -> None:
        """Close a connected Unix socket, whatever its peer has sent.  Idempotent."""
        if sock.fileno() < 0:
            return
        if _is_drained(sock):
            sock.close()
        else:
            self.run(sock.close)

    def discard_listener(self, listener: socket.socket) -> None:
        """Close a listening Unix socket that does not block, and what waits in its backlog."""
        if listener.fileno() < 0:
            return
        try:
            listener.shutdown(socket.SHUT_RDWR)  # from now on connecting is refused
            first, _ = listener.accept()
        except OSError as error:
            if error.errno == errno.EINVAL:  # shut down, and its backlog is empty
                listener.close()
            else:
                self.run(listener.close)
        else:
            self.run(first.close)
            self.run(listener.close)

    def join(self) -> None:
        """Wait for the thread, but not for a close that hangs.  Idempotent."""
        if self._waiting and self._worker is None:
            self.run(_no_action)  # perhaps there is a thread to be had now
        worker = self._worker
        if worker is None:
            return
        worker.join(_JOIN_TIMEOUT)
        if worker.is_alive():
            # The thread ends after its last close, or with this process.
            _log.warning("%s: closing what another process sent takes long", worker.name)

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
                # The thread must go on: no other is started while it is there.
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
            # Mostly it need not wait then; the sender may set it again, so the thread is needed.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)


def _no_action() -> None:
    """Nothing is to be closed but what waited for a thread."""


def _is_drained(sock: socket.socket) -> bool:
    """Shut a socket down; True if its queue is empty then, and so stays empty."""
    for _ in range(_MAX_RESETS):
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            sock.shutdown(socket.SHUT_RDWR)
            data, _, flags, _ = sock.recvmsg(1, 0, _PEEK)
        except ConnectionResetError:
            continue  # reported once; packets may wait all the same
        except OSError:
            return False
        return not data and not flags & _TRUNCATED
    return False
