"""The messages between software RNICs, and the sockets on which they find each other.

Every open RNIC listens on a Unix SEQPACKET socket ``rnic-<GID in hex>`` in the user's private
directory.  When a queue pair goes to RTR, it connects to the peer RNIC and sends `Hello` together
with its receive ring, which is all that the peer needs in order to send.  The peer's queue pair
sends its Hello on the same socket.  If both connect at the same time, they have two sockets, and
each side sends on its own.  No side waits for an answer, and the order does not matter.

Later a side announces memory regions (`Register`, `Revoke`), and wakes its peer by `DOORBELL`.
Unlike the ends of a pipe, each end of a socket has flags of its own.  So a peer can neither make
this process wait when this process rings, nor read the doorbells of another process.  The end of a
socket shows that the peer has ended, even by SIGKILL.  Messages of the queue pairs (`Send`) pass
the socket only if a side cannot use a ring (`packets`).

A pipe wakes a process faster than a socket.  So a Hello to a process of the same user may include
a `Doorbell`, a pipe that the receiver of the Hello rings instead of the socket.  Both sides open
the pipe again through /proc, to have flags of their own.  They open it for reading *and* writing,
because writing to a pipe without readers raises SIGPIPE, and a pipe without writers is always
readable.  Both ends of a pipe share one lock, which a hostile peer could hold.  Therefore only a
process of the same user gets a pipe: that user could stop this process anyway.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trio_smc._base.errors import ProtocolError
from trio_smc._base.resources import is_lack
from trio_smc.host.descriptors import Closer, descriptors_in, is_anonymous_pipe, is_memfd
from trio_smc.host.private_directory import (
    DirectoryUnusable,
    PrivateDirectory,
    is_admitted,
    is_same_user,
)
from trio_smc.rnic.memory import is_quick_to_free
from trio_smc.rnic.verbs import RECEIVE_SIZE, RnicError

if sys.platform == "linux":  # on other systems this code does not run
    import fcntl
    import termios

__all__ = [
    "DOORBELL",
    "DOORBELL_READ_SIZE",
    "VERSION",
    "Directory",
    "Doorbell",
    "Hello",
    "Intake",
    "Message",
    "Register",
    "Revoke",
    "close_all",
    "decode_untrusted",
    "open_doorbell_untrusted",
    "take_doorbell",
]


_MAGIC: Final = b"SMCN"
VERSION: Final = 6
"""The version of these messages, and of the memory that software RNICs share."""
DOORBELL: Final = b"\0"
"""A packet, or a byte in a pipe, that makes the peer poll its ring."""
_HELLO: Final = 1
_REGISTER: Final = 2
_REVOKE: Final = 3
_SEND: Final = 4
_WAITING: Final = 5

_HEADER: Final = struct.Struct("<4sBBxx")
_HELLO_BODY: Final = struct.Struct("<16sIIIB")
_REGISTER_BODY: Final = struct.Struct("<IIQQB")
_REVOKE_BODY: Final = struct.Struct("<I")
_MAX_SIZE: Final = _HEADER.size + max(_HELLO_BODY.size, _REGISTER_BODY.size, RECEIVE_SIZE)
_MAX_FDS: Final = 2
_PEEK: Final = socket.MSG_PEEK | socket.MSG_DONTWAIT

_BACKLOG: Final = 1024
"""Peers that have connected and wait for `Acceptor`.  Chosen; no measurement is recorded."""
DOORBELL_READ_SIZE: Final = 64
"""Bytes read from a doorbell at a time.  Chosen: the peer rings once for each time it is armed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message on a socket: names the two queue pairs.

    With it come descriptors of the sender's receive ring and, if the sender has a `Doorbell`, of
    its write end.

    Attributes:
      gid: the GID of the sender's RNIC.
      qp_num: the sender's queue pair.
      peer_qp_num: the receiver's queue pair.
      peer_psn: the initial packet sequence number that the sender expects from the receiver.
      packets: True if both sides must send their messages as packets (`Send`), because the sender
        of the Hello cannot use a ring (`trio_smc.rnic.words`).
    """

    gid: bytes
    qp_num: int
    peer_qp_num: int
    peer_psn: int
    packets: bool = False

    def encode(self) -> bytes:
        return _HEADER.pack(_MAGIC, VERSION, _HELLO) + _HELLO_BODY.pack(
            self.gid, self.qp_num, self.peer_qp_num, self.peer_psn, self.packets
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """A memory region of the sender that the receiver may write into; its memfd comes with it.

    Attributes:
      rkey: the RKey, which is also in the key page while the region is valid.
      slot: the index in the key page.
      address: the address of the first byte, as writes use it.
      length: the size in bytes.
      progress: True if the memfd has progress words behind the region (`trio_smc.rnic.memory`).
    """

    rkey: int
    slot: int
    address: int
    length: int
    progress: bool = False

    def encode(self) -> bytes:
        return _HEADER.pack(_MAGIC, VERSION, _REGISTER) + _REGISTER_BODY.pack(
            self.rkey, self.slot, self.address, self.length, self.progress
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Revoke:
    """A memory region of the sender is no longer valid; the receiver unmaps it."""

    rkey: int

    def encode(self) -> bytes:
        return _HEADER.pack(_MAGIC, VERSION, _REVOKE) + _REVOKE_BODY.pack(self.rkey)


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """A message of a queue pair, for a peer that receives no messages in a ring.

    Attributes:
      data: at most `RECEIVE_SIZE` bytes.
    """

    data: bytes

    def encode(self) -> bytes:
        return _HEADER.pack(_MAGIC, VERSION, _SEND) + self.data


@dataclass(frozen=True, slots=True)
class Waiting:
    """The sender has a message and no posted receive: ring when one is posted."""

    def encode(self) -> bytes:
        return _HEADER.pack(_MAGIC, VERSION, _WAITING)


Message = Hello | Register | Revoke | Send | Waiting
_FDS: Final = {Hello: (1, 2), Register: (1,), Revoke: (0,), Send: (0,), Waiting: (0,)}


def decode_untrusted(data: bytes, fds: int) -> Message:
    """Decode one message that came with ``fds`` descriptors.  Raises ProtocolError."""
    try:
        magic, version, kind = _HEADER.unpack_from(data)
        body = data[_HEADER.size :]
        if magic != _MAGIC or version != VERSION:
            raise ProtocolError("the peer is not a software RNIC of this version")
        message: Message
        if kind == _HELLO:
            gid, qp_num, peer_qp_num, psn, packets = _HELLO_BODY.unpack(body)
            message = Hello(
                gid=gid,
                qp_num=qp_num,
                peer_qp_num=peer_qp_num,
                peer_psn=psn,
                packets=_flag_untrusted(packets),
            )
        elif kind == _REGISTER:
            rkey, slot, address, length, progress = _REGISTER_BODY.unpack(body)
            message = Register(
                rkey=rkey,
                slot=slot,
                address=address,
                length=length,
                progress=_flag_untrusted(progress),
            )
        elif kind == _REVOKE:
            (rkey,) = _REVOKE_BODY.unpack(body)
            message = Revoke(rkey=rkey)
        elif kind == _SEND:
            if len(body) > RECEIVE_SIZE:
                raise ProtocolError("a message is longer than a receive buffer")
            message = Send(data=body)
        elif kind == _WAITING:
            if body:
                raise ProtocolError("a software RNIC's message has a wrong length")
            message = Waiting()
        else:
            raise ProtocolError(f"a software RNIC's message has an unknown kind: {kind}")
    except struct.error as problem:
        raise ProtocolError("a software RNIC's message has a wrong length") from problem
    if fds not in _FDS[type(message)]:
        raise ProtocolError("a software RNIC's message has a wrong number of descriptors")
    return message


def _flag_untrusted(value: int) -> bool:
    if value > 1:
        raise ProtocolError("a software RNIC's message has an invalid flag")
    return bool(value)


class Intake:
    """Receives packets and descriptors from peers, and closes descriptors that are not needed.

    `receive` peeks at a packet before it removes it from the socket.  So the kernel never closes a
    surplus descriptor in this thread, which might wait (`trio_smc.host.descriptors`).  A packet
    with too many descriptors stays in its socket until the `Closer` closes both.  A packet for
    which the descriptor table has no room stays until there is room.  Two spare descriptors reserve
    room for a message whose descriptors are mapped and then closed at once.

    Args:
      closer: closes descriptors in a thread of its own.

    Attributes:
      spare: descriptors that are closed to make room.
      unmapper: unmaps large memory of peers, in a thread of its own, because it has work even
        without an attack, unlike ``closer``.
    """

    def __init__(self, closer: Closer) -> None:
        self.closer: Closer = closer
        self.unmapper: Closer = Closer("of memory")
        self.spare: list[int] = []
        self._refill()

    def receive(self, sock: socket.socket) -> tuple[bytes, list[int]] | None:
        """Receive one packet and its descriptors, which the caller must pass to `close_fds`.

        Returns:
          None: there is no packet.  An empty packet: the socket has ended, or the packet has too
          many descriptors; the caller must pass the socket to `discard`.

        Raises:
          OSError: this process lacks descriptors or memory (`is_lack`); the packet stays.
        """
        self._refill()
        while True:
            try:
                data, _, flags, _ = sock.recvmsg(_MAX_SIZE + 1, 0, _PEEK)
                break
            except BlockingIOError:
                return None
            except ConnectionResetError:
                # The peer closed its end before it had read all.  The packets that it sent are
                # still here.
                continue
            except OSError as problem:
                if is_lack(problem):
                    raise
                return b"", []
        fds: list[int] = []
        if flags & socket.MSG_CTRUNC:
            most = _max_descriptors(data)
            if not most or not self._copy_descriptors(sock, most, fds):
                return b"", []
        if data:
            # This process has copies of the descriptors, so the kernel closes no file here.
            sock.recv(_MAX_SIZE + 1, socket.MSG_DONTWAIT)
        return data, fds

    def _copy_descriptors(self, sock: socket.socket, most: int, fds: list[int]) -> bool:
        """Append copies of a packet's descriptors to ``fds``; False: there are more than ``most``.

        Raises:
          OSError: EMFILE, there is no room.
        """
        while True:
            _, ancillary, flags, _ = sock.recvmsg(
                _MAX_SIZE + 1, socket.CMSG_LEN(most * 4), _PEEK | socket.MSG_CMSG_CLOEXEC
            )
            fds += descriptors_in(ancillary)
            if not flags & socket.MSG_CTRUNC:
                return True
            too_many = len(fds) == most
            self.close_fds(fds)
            if too_many:
                return False
            if not self.spare:
                raise OSError(errno.EMFILE, "no room for a peer's descriptor")
            close_all(self.spare)

    def close_fds(
        self, fds: list[int], sender: socket.socket | None = None, *, mapped: bool = False
    ) -> None:
        """Close descriptors that came with a message, and empty the list.

        Args:
          fds: the descriptors.
          sender: the socket they came on.  A pipe of the same user is closed in this thread,
            because closing it takes only the pipe's lock.
          mapped: they are memory that this process has mapped, so closing them frees nothing.
        """
        while fds:
            fd = fds.pop()
            if mapped or self._is_quick(fd, sender):
                os.close(fd)
            else:
                self.closer.close([fd])

    def _is_quick(self, fd: int, sender: socket.socket | None) -> bool:
        try:
            if is_memfd(fd):
                return is_quick_to_free(fd)
            return sender is not None and is_anonymous_pipe(fd) and is_same_user(sender)
        except OSError:
            return False

    def discard(self, sock: socket.socket) -> None:
        """Close a peer's socket, with all unread packets.  Idempotent."""
        self.closer.discard(sock)

    def end(self) -> None:
        """Close the spare descriptors and join both threads.  Idempotent."""
        close_all(self.spare)
        self.closer.join()
        self.unmapper.join()

    def abandon(self) -> None:
        """In a forked child: close this process's descriptors and nothing else."""
        close_all(self.spare)

    def _refill(self) -> None:
        while len(self.spare) < _MAX_FDS:
            try:
                self.spare.append(os.eventfd(0, os.EFD_CLOEXEC))
            except OSError:
                return  # the next packet for which there is no room will wait


def _max_descriptors(data: bytes) -> int:
    """The largest number of descriptors of a message that begins with ``data``."""
    if len(data) < _HEADER.size:
        return 0
    return {_HELLO: max(_FDS[Hello]), _REGISTER: max(_FDS[Register])}.get(data[5], 0)


_unread = array("i", [0])


def take_doorbell(sock: socket.socket) -> bool:
    """Read a doorbell, if the socket holds nothing else; False: nothing was read, use `receive`.

    A packet of one byte is a doorbell, because all messages are longer.  Reading it needs no room
    for descriptors.
    """
    fcntl.ioctl(sock.fileno(), termios.FIONREAD, _unread)
    if _unread[0] != len(DOORBELL):
        return False
    # Peek first: if a descriptor came with the byte, the kernel would close it in this thread.
    data, _, flags, _ = sock.recvmsg(len(DOORBELL), 0, _PEEK)
    if len(data) != len(DOORBELL) or flags & socket.MSG_CTRUNC:
        return False
    return len(sock.recv(len(DOORBELL), socket.MSG_DONTWAIT)) == len(DOORBELL)


class Doorbell:
    """A pipe that one peer writes to.  Raises OSError if there is no descriptor left.

    Attributes:
      fd: readable when the doorbell was rung.
      write_fd: the end that is sent to the peer; -1 after `close_write_end`.
    """

    __slots__ = ("fd", "write_fd")

    def __init__(self) -> None:
        self.fd: int
        self.write_fd: int
        fd, self.write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self.fd = _reopened(fd)
        except OSError:
            self.close_write_end()
            raise
        finally:
            os.close(fd)

    def close_write_end(self) -> None:
        """Close the write end, after it was sent to the peer.  Idempotent."""
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def close(self) -> None:
        """Close both ends."""
        self.close_write_end()
        os.close(self.fd)


def open_doorbell_untrusted(fd: int) -> int:
    """Open a peer's doorbell again, with flags of this process; writing to it never waits.

    Raises:
      ProtocolError: the descriptor is not a pipe.
      OSError: the pipe cannot be opened, for example because /proc is missing.
    """
    if not is_anonymous_pipe(fd):  # fstat(2) of another kind of file may wait
        raise ProtocolError("a doorbell is not a pipe")
    return _reopened(fd)


def _reopened(fd: int) -> int:
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


def close_all(fds: list[int]) -> None:
    """Close descriptors that this process has created, and empty the list."""
    while fds:
        os.close(fds.pop())


class Directory:
    """The private directory, in which software RNICs listen.  Errors are `RnicError`.

    Attributes:
      group: `PrivateDirectory.group`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._directory = self._open()
        self.group = self._directory.group

    def _open(self) -> PrivateDirectory:
        try:
            return PrivateDirectory.open(self._path, create=True)
        except DirectoryUnusable as problem:
            text = f"the private directory {problem}"
            raise RnicError(problem.number, text) from problem

    def has(self, name: str) -> bool:
        """True if peers would find a socket of this user under this name."""
        try:
            found = PrivateDirectory.open(self._path, create=False)
        except (OSError, DirectoryUnusable):
            return False
        try:
            return found.has(name)
        finally:
            found.close()

    def reopen(self) -> None:
        """Open the directory again, because it may have been removed.  Raises RnicError."""
        older, self._directory = self._directory, self._open()
        self.group = self._directory.group
        older.close()

    def listen(self, name: str) -> socket.socket:
        """A listening socket.  The name appears only when the socket accepts connections."""
        try:
            return self._directory.listen(name, _BACKLOG, descriptors=True)
        except OSError as problem:
            raise RnicError(problem.errno, f"cannot listen as {name}: {problem}") from problem

    def dial(self, name: str) -> socket.socket:
        """Connect a socket to the listener with this name.  Raises RnicError."""
        try:
            sock = self._directory.connect(name, descriptors=True)
            if not is_admitted(sock, self.group):
                sock.close()
                raise PermissionError(errno.EPERM, "the listener belongs to another user")
        except OSError as problem:
            raise RnicError(problem.errno, f"cannot reach {name}: {problem}") from problem
        return sock

    def remove(self, name: str) -> None:
        """Remove a name; no-op if there is none."""
        self._directory.remove(name)

    def remove_stale(self) -> None:
        """Remove the sockets that killed processes left behind."""
        self._directory.remove_stale("rnic-")

    def close(self) -> None:
        """Close the directory.  Idempotent."""
        self._directory.close()
