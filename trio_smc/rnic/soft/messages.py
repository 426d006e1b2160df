"""How software RNICs find each other and what their queue pairs tell each other.

Every open RNIC listens on a Unix SEQPACKET socket ``rnic-<GID in hex>`` in the user's private
directory.  When a queue pair goes to RTR it dials the peer RNIC and says `Hello`, with its receive
ring attached: everything that the peer needs to write to it.  The peer's queue pair says Hello on
the same socket.  If it has dialled meanwhile, too, the pair has two sockets, each with one speaker;
nobody waits for an answer, and it does not matter who is first.  Later a speaker
announces memory regions (`Register`, `Revoke`), and `DOORBELL` wakes its peer: a socket's end
has flags of its own, so that no peer can have a ring wait, and nobody else can take what was
rung.  The end of a socket tells of the end of its speaker, be it in order or by SIGKILL.

A pipe wakes in less time than a socket.  So a Hello to a process of the same user may bring a
`Doorbell`, too, which is rung instead.  Either side opens it anew, for flags of its own, and for
both directions: a pipe without readers would end the process that writes to it, and one without
writers would always be readable.  What remains is that a pipe has one lock for both ends, which a peer with
tricks could hold: hence the same user, who can stop this process anyhow.
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
from trio_smc.host.descriptors import Closer, attached, is_anonymous_pipe, is_memfd
from trio_smc.host.private_directory import (
    DirectoryUnusable,
    PrivateDirectory,
    is_admitted,
    is_same_user,
)
from trio_smc.rnic.memory import is_quick_to_free
from trio_smc.rnic.verbs import RnicError

if sys.platform == "linux":  # elsewhere nobody comes here
    import fcntl
    import termios

__all__ = [
    "DOORBELL",
    "DOORBELL_READ_SIZE",
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
_VERSION: Final = 4
DOORBELL: Final = b"\0"
"""A packet that says nothing: look at the ring."""
_HELLO: Final = 1
_REGISTER: Final = 2
_REVOKE: Final = 3

_HEADER: Final = struct.Struct("<4sBBxx")
_HELLO_BODY: Final = struct.Struct("<16sIII")
_REGISTER_BODY: Final = struct.Struct("<IIQQ")
_REVOKE_BODY: Final = struct.Struct("<I")
_MAX_SIZE: Final = _HEADER.size + max(_HELLO_BODY.size, _REGISTER_BODY.size, _REVOKE_BODY.size)
_MAX_FDS: Final = 2
_PEEK: Final = socket.MSG_PEEK | socket.MSG_DONTWAIT

_BACKLOG: Final = 1024
DOORBELL_READ_SIZE: Final = 64
"""Bytes read from a bell at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message of a socket: who speaks to whom.

    The speaker's receive ring goes with it, and the rope of its `Doorbell` if it has one.

    Attributes:
      gid: the speaker's RNIC.
      qp_num: the speaker's queue pair.
      peer_qp_num: the queue pair it speaks to.
      peer_psn: the sequence number it expects from that one.
    """

    gid: bytes
    qp_num: int
    peer_qp_num: int
    peer_psn: int

    def encode(self) -> bytes:
        return _HEADER.pack(_MAGIC, _VERSION, _HELLO) + _HELLO_BODY.pack(
            self.gid, self.qp_num, self.peer_qp_num, self.peer_psn
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """A memory region that the speaker's peer may write into; its memfd goes with it.

    Attributes:
      rkey: its key, which is also in the key page while it is valid.
      slot: where in the key page.
      address: what its first byte is called.
      length: bytes.
    """

    rkey: int
    slot: int
    address: int
    length: int

    def encode(self) -> bytes:
        return _HEADER.pack(_MAGIC, _VERSION, _REGISTER) + _REGISTER_BODY.pack(
            self.rkey, self.slot, self.address, self.length
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Revoke:
    """A memory region is no more; the peer unmaps it."""

    rkey: int

    def encode(self) -> bytes:
        return _HEADER.pack(_MAGIC, _VERSION, _REVOKE) + _REVOKE_BODY.pack(self.rkey)


Message = Hello | Register | Revoke
_FDS: Final = {Hello: (1, 2), Register: (1,), Revoke: (0,)}


def decode_untrusted(data: bytes, fds: int) -> Message:
    """Decode one message that came with ``fds`` descriptors.  Raises ProtocolError."""
    try:
        magic, version, kind = _HEADER.unpack_from(data)
        body = data[_HEADER.size :]
        if magic != _MAGIC or version != _VERSION:
            raise ProtocolError("not a software RNIC of this version")
        message: Message
        if kind == _HELLO:
            gid, qp_num, peer_qp_num, psn = _HELLO_BODY.unpack(body)
            message = Hello(gid=gid, qp_num=qp_num, peer_qp_num=peer_qp_num, peer_psn=psn)
        elif kind == _REGISTER:
            rkey, slot, address, length = _REGISTER_BODY.unpack(body)
            message = Register(rkey=rkey, slot=slot, address=address, length=length)
        elif kind == _REVOKE:
            (rkey,) = _REVOKE_BODY.unpack(body)
            message = Revoke(rkey=rkey)
        else:
            raise ProtocolError(f"unknown kind {kind} of a software RNIC's message")
    except struct.error as problem:
        raise ProtocolError("a software RNIC's message of a wrong length") from problem
    if fds not in _FDS[type(message)]:
        raise ProtocolError("a software RNIC's message with a wrong number of descriptors")
    return message


class Intake:
    """Takes packets and descriptors from peers, and closes what is not wanted.

    A packet is looked at before it is taken.  So the kernel never drops a descriptor in this
    thread, which might wait (`trio_smc.host.descriptors`): one with more descriptors than its
    message has stays in its socket, to be closed with it by the `Closer`; one for which the
    descriptor table has no room stays until there is room.  Two spare descriptors make room for
    what is mapped and closed at once.

    Args:
      closer: of the RNIC.

    Attributes:
      spare: descriptors that are closed to make room.
      unmapper: unmaps large memory of peers; there may be much of that without any attack.
    """

    def __init__(self, closer: Closer) -> None:
        self.closer: Closer = closer
        self.unmapper: Closer = Closer("of memory")
        self.spare: list[int] = []
        self._refill()

    def receive(self, sock: socket.socket) -> tuple[bytes, list[int]] | None:
        """Receive one packet and its descriptors, to be given to `close`.

        Returns None when nothing is there; an empty packet is the end of the socket, or has
        descriptors that no message has: the socket must be given to `discard`.

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
                # The peer closed with something of ours unread; what it said is still to come.
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
            # The copies are held, so what the queue held of the descriptors is not the last.
            sock.recv(_MAX_SIZE + 1, socket.MSG_DONTWAIT)
        return data, fds

    def _copy_descriptors(self, sock: socket.socket, most: int, fds: list[int]) -> bool:
        """Install copies of a packet's descriptors; False: there are more than ``most``.

        Raises OSError (EMFILE): there is no room.
        """
        while True:
            _, ancillary, flags, _ = sock.recvmsg(
                _MAX_SIZE + 1, socket.CMSG_LEN(most * 4), _PEEK | socket.MSG_CMSG_CLOEXEC
            )
            fds += attached(ancillary)
            if not flags & socket.MSG_CTRUNC:
                return True
            many = len(fds) == most
            self.close_fds(fds)
            if many:
                return False
            if not self.spare:
                raise OSError(errno.EMFILE, "no room for a peer's descriptor")
            close_all(self.spare)

    def close_fds(
        self, fds: list[int], sender: socket.socket | None = None, *, mapped: bool = False
    ) -> None:
        """Close descriptors that came with a message, and empty the list.

        Args:
          sender: the socket they came on; a pipe of the same user is closed at once, as closing
            that takes the pipe's lock and nothing more.
          mapped: they are memory that this process has mapped.
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
        """Close a peer's socket, whatever it holds.  Idempotent."""
        self.closer.discard(sock)

    def end(self) -> None:
        """Close the spare descriptors and join the closer.  Idempotent."""
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
                return  # the next packet that needs room waits


def _max_descriptors(data: bytes) -> int:
    """How many descriptors the message that begins so has at most."""
    if len(data) < _HEADER.size:
        return 0
    return {_HELLO: max(_FDS[Hello]), _REGISTER: max(_FDS[Register])}.get(data[5], 0)


_unread = array("i", [0])


def take_doorbell(sock: socket.socket) -> bool:
    """Take a doorbell, where that is all there is; False: nothing was taken, `receive` has to look.

    All messages are longer, so a byte is one; reading it needs no room for descriptors.
    """
    fcntl.ioctl(sock.fileno(), termios.FIONREAD, _unread)
    if _unread[0] != len(DOORBELL):
        return False
    # A descriptor that comes with it must not be dropped here.
    data, _, flags, _ = sock.recvmsg(len(DOORBELL), 0, _PEEK)
    if len(data) != len(DOORBELL) or flags & socket.MSG_CTRUNC:
        return False
    return len(sock.recv(len(DOORBELL), socket.MSG_DONTWAIT)) == len(DOORBELL)


class Doorbell:
    """A pipe that one peer rings.  Raises OSError when there is none to be had.

    Attributes:
      fd: readable when it was rung.
      rope: what the peer is given to ring it; -1 after `let_go`.
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
        """The peer has the rope, or will not get it.  Idempotent."""
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def close(self) -> None:
        """Close both ends."""
        self.close_write_end()
        os.close(self.fd)


def open_doorbell_untrusted(fd: int) -> int:
    """Open the rope of a peer's bell for this process alone; writing `DOORBELL` to it never waits.

    Raises:
      ProtocolError: it is none.
      OSError: it cannot be opened, as where /proc is missing.
    """
    if not is_anonymous_pipe(fd):  # fstat(2) of others may wait
        raise ProtocolError("a bell that is no pipe")
    return _reopened(fd)


def _reopened(fd: int) -> int:
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


def close_all(fds: list[int]) -> None:
    """Close descriptors of this process's own, and empty the list."""
    while fds:
        os.close(fds.pop())


class Directory:
    """The private directory, where software RNICs listen; what goes wrong is an `RnicError`.

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
        """True if there is a socket of this user with that name, by the way that peers take."""
        try:
            found = PrivateDirectory.open(self._path, create=False)
        except (OSError, DirectoryUnusable):
            return False
        try:
            return found.has(name)
        finally:
            found.close()

    def reopen(self) -> None:
        """Open it anew: somebody may have removed it.  Raises RnicError."""
        older, self._directory = self._directory, self._open()
        self.group = self._directory.group
        older.close()

    def listen(self, name: str) -> socket.socket:
        """A listening socket of that name; it appears only once it can be dialled."""
        try:
            return self._directory.listen(name, _BACKLOG, descriptors=True)
        except OSError as problem:
            raise RnicError(problem.errno, f"cannot listen as {name}: {problem}") from problem

    def dial(self, name: str) -> socket.socket:
        """A socket connected to the listener of that name.  Raises RnicError."""
        try:
            sock = self._directory.connect(name, descriptors=True)
            if not is_admitted(sock, self.group):
                sock.close()
                raise PermissionError(errno.EPERM, "it belongs to another user")
        except OSError as problem:
            raise RnicError(problem.errno, f"cannot reach {name}: {problem}") from problem
        return sock

    def remove(self, name: str) -> None:
        """Remove a name; one that is gone already is fine."""
        self._directory.remove(name)

    def remove_stale(self) -> None:
        """Remove the sockets that dead processes left behind."""
        self._directory.remove_stale("rnic-")

    def close(self) -> None:
        """Close the directory.  Idempotent."""
        self._directory.close()
