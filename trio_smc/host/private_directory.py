"""The user's private directory, or one that a group shares, and the Unix sockets below it.

Theory of operation
-------------------
This process opens the private directory once, without following a symbolic link, and checks the
open descriptor.  The directory must belong to this user and have mode 0700.  A directory that the
user has configured may belong to a group: it must have mode 3770, and this process must be in that
group.  A default directory cannot be a group's, because other users could create it first.  The
sticky bit lets only the owner of a name remove or replace the name.

The sticky bit of a group's directory does not protect the directories below.  Each of them belongs
to the member that made it, and that member may replace every name inside.  So no two members share
a directory.  Each member has one directory for each kind of socket, ``tcp-<random>`` and
``control-<random>``, and only its owner may write there (mode 2750 or 0700).  So a member can
change only the names of its own sockets.  Another user cannot take a random name in advance, and
random names need no user numbers, which differ between user namespaces.

This process opens each directory of a path relative to the one above, without following a symbolic
link, and checks its owner (the owner of the directory above), its mode and its group.  Each listing
has a limit.

A Unix address has at most 107 bytes, and a directory may have a longer path.  So sockets are bound
as /proc/self/fd/N/name.  Before this process connects, it opens the name (O_PATH, O_NOFOLLOW) and
checks that it is a socket.  It connects to the open descriptor, so a symbolic link that replaces
the name has no effect.

If the process of a socket has ended, or the socket is bound and does not listen yet, connect(2)
fails with ECONNREFUSED.  So a socket gets its name only when it listens, and a process that gets
ECONNREFUSED may remove the name.  To find out if a process owns a name, connect a socket of another
type.  ECONNREFUSED: no process owns it.  Any other error: a process owns it, and was not woken.

The kernel identifies the other end of a Unix socket (SO_PEERCRED and SO_PEERGROUPS, unix(7)).  In a
user namespace all unknown users, and all unknown groups, have the same number, the overflow id.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import secrets
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple, Self

from trio_smc._base.printable import printable
from trio_smc._base.reasons import FallbackReason
from trio_smc._base.resources import is_lack
from trio_smc.host.descriptors import refuse_descriptors
from trio_smc.host.overcommit import commit_is_limited

__all__ = [
    "PATH_FLAGS",
    "STALE_AFTER",
    "DirectoryUnusable",
    "PrivateDirectory",
    "admits_user",
    "default_directories",
    "default_directory",
    "is_admitted",
    "is_for_all_users",
    "is_named",
    "is_same_user",
    "overflow_id",
    "own_credentials",
    "peer_user",
    "shared_group",
    "unusable",
]


if sys.platform == "linux":  # only Linux uses this module; other systems may have no groups
    # Imported here, because a process that has given up its rights may not read modules any more.
    import grp
    import pwd

    _FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    PATH_FLAGS = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
else:
    _FLAGS = PATH_FLAGS = 0
_RUNTIME: Final = "XDG_RUNTIME_DIR"
"""The variable with the directory above a user's private directory."""
_FULL_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMLINK})  # of inodes or room
_HIDDEN = "."  # prefix of the name of a socket that does not listen yet
STALE_AFTER = 60.0
"""Seconds after which such a name belongs to a process that has crashed.  Chosen; no measurement
is recorded."""
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid
_SO_PEERGROUPS = 59  # linux/include/uapi/asm-generic/socket.h; 4 bytes for each
_MOST_GROUPS = 256  # groups of a peer: getsockopt of Python returns at most 1,024 bytes
_SHARED_MODE = 0o3770
_MEMBER_MODE = 0o2750  # of a member's directory, and of all directories below it
_MAX_DEPTH = 3  # levels of directories below: tcp/NAMESPACE/ADDRESS
_ANNOUNCED = "announced"  # has sockets named before their use (discovery.names)
_MOST_NAMES = 4096
"""Names read from one directory.  Chosen, as are the next three limits."""
_MOST_SOCKETS = 1024
"""Sockets read from one directory."""
_MOST_MEMBERS = 64
"""Users whose directories are read."""
_MOST_OF_ONE_USER = 4
"""Directories read for one user."""
_STATUS_COSTS: Final = 8
"""The status of a name takes as long as that many names of a listing: 2.8 and 0.35 µs, measured
with 4,096 names on a tmpfs."""
_BATCH: Final = 16
"""Names of a listing whose cost is counted together.  Chosen: a call for each name would take as
long as reading it."""


class DirectoryUnusable(Exception):
    """The private directory cannot be used, so connections stay on TCP.

    Attributes:
      reason: the fallback reason.
      cause: the cause; the text of the exception is the cause and the remedy.
      remedy: the remedy, or "" if there is none but that of the reason.
      number: the most similar error number.
    """

    def __init__(
        self, reason: FallbackReason, cause: str, number: int = errno.EPERM, *, remedy: str = ""
    ) -> None:
        super().__init__(f"{cause}: {remedy}" if remedy else cause)
        self.reason = reason
        self.cause = cause
        self.remedy = remedy
        self.number = number


def unusable(error: OSError, path: Path) -> DirectoryUnusable:
    """The `DirectoryUnusable` for an error in the directory ``path``."""
    reason = FallbackReason.DIRECTORY_UNUSABLE
    if error.errno in _FULL_ERRORS:
        reason = FallbackReason.DIRECTORY_FULL
    elif is_lack(error):
        reason = FallbackReason.OUT_OF_RESOURCES
    elif error.errno in (errno.EACCES, errno.EPERM):
        with contextlib.suppress(OSError):
            if os.lstat(path).st_uid != os.geteuid():
                reason = FallbackReason.OTHER_USER
    return DirectoryUnusable(reason, f"{path}: {error.strerror or error}", error.errno or errno.EIO)


class DefaultDirectory(NamedTuple):
    """The private directory if none is configured.

    Attributes:
      path: the directory.
      origin: "XDG_RUNTIME_DIR" if the variable names it, else "default".
    """

    path: Path
    origin: str


def default_directory(variables: Mapping[str, str] = os.environ) -> DefaultDirectory:
    """The private directory if none is configured.

    variables: the environment of the process.

    A relative XDG_RUNTIME_DIR has no effect, as the XDG Base Directory Specification demands.
    """
    runtime = variables.get(_RUNTIME, "")
    if os.path.isabs(runtime):
        return DefaultDirectory(Path(runtime) / "trio-smc", _RUNTIME)
    return DefaultDirectory(_places()[0], "default")


def default_directories() -> tuple[Path, ...]:
    """The private directory if none is configured (the first), and the other default places."""
    return tuple(dict.fromkeys((default_directory().path, *_places())))


def _places() -> tuple[Path, ...]:
    """The default places for a process without XDG_RUNTIME_DIR, the first of which it uses.

    Without XDG_RUNTIME_DIR the directory is on a tmpfs, if the system has one for all users.
    Discovery makes a name there for each connection, and on a disk that may wait for a journal
    (docs/decisions.md).
    """
    # A system without user numbers does not use the directory.
    name = f"trio-smc-{os.getuid() if hasattr(os, 'getuid') else 0}"
    places = [Path("/dev/shm", name), Path("/tmp", name)]
    if not is_for_all_users("/dev/shm"):
        places.reverse()
    return tuple(places)


def is_for_all_users(path: str) -> bool:
    """True for a directory like /tmp: every user may write there, and only the owner of a name may
    remove or replace the name."""
    try:
        found = os.stat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == 0 and found.st_mode & 0o1777 == 0o1777


def is_named(path: Path) -> bool:
    """True if the user has configured the directory: it is none of the default places."""
    return path not in default_directories()


def shared_group(path: Path, found: os.stat_result) -> int | None:
    """The group that shares a directory with this process; None: it is not shared.

    path: the path of the directory, as configured.
    found: the status of the directory.
    """
    if not is_named(path) or stat.S_IMODE(found.st_mode) != _SHARED_MODE:
        return None
    if found.st_gid not in (os.getegid(), *os.getgroups()) or _is_overflow_id(found.st_gid, "gid"):
        return None
    return found.st_gid


def _why_link(path: Path, found: os.stat_result) -> tuple[str, str] | None:
    """The cause why a symbolic link is no private directory, and a remedy; None: it is no link.

    The text names the target only if no other user can have chosen it.

    path: the path of the directory.
    found: its status; that of the link itself.
    """
    if not stat.S_ISLNK(found.st_mode):
        return None
    cause = f"{path} is a symbolic link, which trio_smc does not follow"
    if found.st_uid not in (0, os.geteuid()):
        return f"{cause}; it belongs to user {found.st_uid}", "name a directory of your own"
    if not path.is_dir():
        return cause, "name a directory"
    return cause, f"name the directory itself, {printable(os.path.realpath(path), None)}"


def _why_not_shared(path: Path, found: os.stat_result) -> tuple[str, str] | None:
    """The cause why a group's directory is not shared, and a remedy that lets the group share it.

    None if the directory is not for a group: it is a default directory, or it has no set-group-ID
    bit and not only its owner and the group can write there.

    path, found: as in `shared_group`.
    """
    writers = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not is_named(path) or (writers != stat.S_IWGRP and not found.st_mode & stat.S_ISGID):
        return None
    group, mode = _group_name(found.st_gid), stat.S_IMODE(found.st_mode)
    if found.st_gid not in (os.getegid(), *os.getgroups()) or _is_overflow_id(found.st_gid, "gid"):
        remedy = (
            "its user is a member by now, so start it again from a new login"
            if _is_member(found.st_gid)
            else f"add its user {os.geteuid()} to the group (usermod -aG {group} USER), and start "
            "it again"
        )
        return f"{path} is for the group {group}, and this process is not in that group", remedy
    cause = (
        f"{path} has mode {mode:04o} where only 700 is private, and only {_SHARED_MODE:o} is "
        f"shared; it is for the group {group}"
    )
    return cause, f"chmod {_SHARED_MODE:o} {path} keeps it shared"


def _group_name(group: int) -> str:
    """The name of a group, or its number."""
    try:
        return grp.getgrgid(group).gr_name
    except (KeyError, OSError):
        return str(group)


def _is_member(group: int) -> bool:
    """True if the user database has this user in a group.  The process may be older than that."""
    try:
        found = pwd.getpwuid(os.geteuid())
        return group in os.getgrouplist(found.pw_name, found.pw_gid)
    except (KeyError, OSError):
        return False


class PrivateDirectory:
    """The user's private directory, or a group's, or one below it, open until `close`.

    Made by `open` and `below`.

    Args:
      descriptor: of the open directory; `close` closes it.

    Attributes:
      group: this process may connect to members of this group besides processes of its own user;
        None: only to processes of its own user.
      owner: the user that owns the directory and all names below it; None: each name in it may have
        another owner.
    """

    def __init__(self, descriptor: int, group: int | None = None, owner: int | None = None) -> None:
        self.descriptor: int = descriptor
        self.group = group
        self.owner: int | None = owner

    def is_admitted(self) -> bool:
        """True if the owner may exchange messages with this process (`admits_user`).

        The owner of an open private directory, and of all below it, is this user."""
        return self.group is None or (
            self.owner is not None and admits_user(self.owner, self.group)
        )

    @property
    def _is_shared(self) -> bool:
        """True if several users have names in it: it is the directory of a group itself."""
        return self.owner is None

    @classmethod
    def open(cls, path: Path, *, create: bool) -> Self:
        """Open the private directory itself, or one that a group shares.

        create: make it if it is missing.  The directory above it must exist.

        Raises:
          FileNotFoundError: it is missing, and ``create`` is False.
          DirectoryUnusable: it is a symbolic link or not a directory, it belongs to another user,
            others may access it and it is not a group's, or it cannot be made.
        """
        try:
            if create:
                # Without parents: a wrong path must not become a new tree of directories.
                with contextlib.suppress(FileExistsError):
                    _make_private(path)
            descriptor = os.open(path, _FLAGS)
        except FileNotFoundError:
            if create:
                text = f"{path} cannot be made"
                if not os.path.isdir(path.parent):
                    text += f": there is no directory {path.parent}"
                reason = FallbackReason.DIRECTORY_UNUSABLE
                raise DirectoryUnusable(reason, text, errno.ENOENT) from None
            raise
        except OSError as error:
            known = None
            with contextlib.suppress(OSError):
                found = os.lstat(path)
                known = _why_link(path, found) or _why_not_shared(path, found)
            problem = unusable(error, path)
            if known is not None:
                cause, remedy = known
                raise DirectoryUnusable(problem.reason, cause, remedy=remedy) from error
            raise problem from error
        found = os.fstat(descriptor)
        group = shared_group(path, found)
        if group is not None:
            return cls(descriptor, group)
        if found.st_uid != os.geteuid():
            os.close(descriptor)
            whose = f"{path} belongs to user {found.st_uid}"
            cause, remedy = _why_not_shared(path, found) or (whose, "")
            raise DirectoryUnusable(FallbackReason.OTHER_USER, cause, remedy=remedy)
        if found.st_mode & 0o077:
            os.close(descriptor)
            mode = f"{path} has mode {stat.S_IMODE(found.st_mode):o} where only 700 is private"
            cause, remedy = _why_not_shared(path, found) or (mode, "")
            raise DirectoryUnusable(FallbackReason.DIRECTORY_UNUSABLE, cause, remedy=remedy)
        return cls(descriptor, owner=found.st_uid)

    def below(self, path: str, *, create: bool = False) -> PrivateDirectory:
        """Open a directory below this one.

        path: relative to this directory.  In a group's directory its first part comes from
          `member_directory` or `member_directories`, and is never created here.
        create: make the missing directories of the path.

        Raises:
          FileNotFoundError: it is missing, or was removed meanwhile.
          PermissionError: `_check` rejects a directory of the path.
          OSError: it cannot be opened or made.
        """
        opened = self
        try:
            for part in path.split("/"):
                if create and not opened._is_shared:
                    with contextlib.suppress(FileExistsError):
                        opened._make(part)
                inner = opened._inner(part)
                if opened is not self:
                    opened.close()
                opened = inner
        except BaseException:
            if opened is not self:
                opened.close()
            raise
        return opened

    def _inner(self, name: str) -> PrivateDirectory:
        """Open a directory in this one, and check it.  Raises OSError."""
        descriptor = os.open(name, _FLAGS, dir_fd=self.descriptor)
        try:
            found = os.fstat(descriptor)
            self._check(found, name)
        except BaseException:
            os.close(descriptor)
            raise
        group = self.group if stat.S_IMODE(found.st_mode) & 0o077 else None
        return PrivateDirectory(descriptor, group, found.st_uid)

    def _check(self, found: os.stat_result, name: str) -> None:
        """Raise PermissionError if users other than its owner could change the directory ``name``
        in this one, or if its owner is not the one of this directory."""
        mode = stat.S_IMODE(found.st_mode)
        if not self._is_shared and found.st_uid != self.owner:
            text = f"it belongs to user {found.st_uid}, and the directory above to {self.owner}"
            raise PermissionError(errno.EPERM, text, name)
        if mode & 0o077 and (
            self.group is None or mode != _MEMBER_MODE or found.st_gid != self.group
        ):
            wanted = "0700" if self.group is None else f"0700, or {_MEMBER_MODE:o} and its group"
            raise PermissionError(errno.EPERM, f"it has mode {mode:o} instead of {wanted}", name)

    def _make(self, name: str, *, private: bool = False) -> None:
        """Make a directory in this one, with its final mode.  Raises FileExistsError."""
        if self.group is None:
            _make_private(name, self.descriptor)
            return
        if os.access(name, os.F_OK, dir_fd=self.descriptor, follow_symlinks=False):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
        hidden = f"{_HIDDEN}{name}-{secrets.token_hex(8)}"
        _make_private(hidden, self.descriptor)
        try:
            descriptor = os.open(hidden, _FLAGS, dir_fd=self.descriptor)
            try:
                if os.fstat(descriptor).st_uid != os.geteuid():
                    raise FileNotFoundError(errno.ENOENT, "another user has replaced it", name)
                # chmod(2) ignores the umask.
                os.fchmod(descriptor, 0o700 if private else _MEMBER_MODE)
            finally:
                os.close(descriptor)
            os.rename(hidden, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        except OSError:
            os.rmdir(hidden, dir_fd=self.descriptor)
            if not os.access(name, os.F_OK, dir_fd=self.descriptor, follow_symlinks=False):
                raise  # otherwise another process has made it meanwhile

    # --- the directories of each user --------------------------------------------------------

    def member_directory(self, kind: str, *, create: bool = False, private: bool = False) -> str:
        """The name of this user's directory for a kind of sockets: ``kind`` itself, or
        ``<kind>-<random>`` in a directory that a group shares.

        create: make it if it is missing.
        private: other members of the group may not enter it.

        Raises:
          FileNotFoundError: it is missing, and ``create`` is False.
          OSError: it cannot be made, or the directory has too many names (E2BIG).
        """
        if not self._is_shared:
            if create:
                with contextlib.suppress(FileExistsError):
                    self._make(kind)
            return kind
        user = os.geteuid()
        if not _is_overflow_id(user, "uid"):
            for name in self._members(kind).get(user, ()):
                with contextlib.suppress(OSError):
                    found = self._inner(name)
                    found.close()
                    if found.owner == user and (found.group is None) == private:
                        return name
        if not create:
            if len(self.entries()) >= _MOST_NAMES:
                text = f"it has {_MOST_NAMES} names or more; this user's are not the first"
                raise OSError(errno.E2BIG, text, kind)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), kind)
        made = f"{kind}-{secrets.token_hex(8)}"
        self._make(made, private=private)
        return made

    def member_directories(self, kind: str) -> list[str]:
        """The names of all users' directories for a kind of sockets, this user's first; `below` may
        reject some."""
        if not self._is_shared:
            return [kind]
        found = self._members(kind)
        own = sorted(found.pop(os.geteuid(), ()))
        return own + sorted(itertools.chain.from_iterable(found.values()))

    def _members(self, kind: str) -> dict[int, list[str]]:
        """The directories of a kind, by owner.

        Only the first `_MOST_NAMES` names are read, so a member that makes thousands of names hides
        some of the other members.
        """
        found: dict[int, list[str]] = {}
        for entry in self.entries():
            with contextlib.suppress(OSError):
                if entry.name.startswith(f"{kind}-") and entry.is_dir(follow_symlinks=False):
                    owner = entry.stat(follow_symlinks=False).st_uid
                    if owner in found or len(found) < _MOST_MEMBERS:
                        theirs = found.setdefault(owner, [])
                        if len(theirs) < _MOST_OF_ONE_USER:
                            theirs.append(entry.name)
        return found

    def entries(self, most: int = _MOST_NAMES) -> list[os.DirEntry[str]]:
        """The entries of this directory, at most ``most``."""
        with os.scandir(self.descriptor) as found:
            return list(itertools.islice(found, most))

    def check_room(self) -> None:
        """Make a name and remove it.  Raises OSError: the file system has no room for a name."""
        name = f"{_HIDDEN}room-{secrets.token_hex(8)}"
        os.mkdir(name, mode=0o700, dir_fd=self.descriptor)
        os.rmdir(name, dir_fd=self.descriptor)

    def remove_empty(self, path: str) -> None:
        """Remove a directory below this one, and then each directory of its path that is empty.

        In a directory that is not shared, the first directory of the path stays.
        """
        while path and (self._is_shared or "/" in path):
            parent, _, name = path.rpartition("/")
            try:
                above = self.below(parent) if parent else self
                try:
                    os.rmdir(name, dir_fd=above.descriptor)
                finally:
                    if above is not self:
                        above.close()
            except OSError:
                return
            path = parent

    def close(self) -> None:
        """Close the descriptor.  Idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    # --- sockets -----------------------------------------------------------------------------

    def listen(
        self,
        name: str,
        backlog: int,
        kind: socket.SocketKind = socket.SOCK_SEQPACKET,
        *,
        descriptors: bool = False,
    ) -> socket.socket:
        """A nonblocking listening socket, which gets its name only when it listens.

        kind: a datagram socket is bound and receives the credentials of its senders.
        descriptors: True: clients may send descriptors; False: the kernel rejects them, if it
          supports that.
        """
        listener, hidden = socket.socket(socket.AF_UNIX, kind), _HIDDEN + name
        try:
            if not descriptors:
                refuse_descriptors(listener)
            if kind == socket.SOCK_DGRAM:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            listener.setblocking(False)
            os.fchmod(listener.fileno(), 0o600)  # becomes the mode of the name
            listener.bind(self._bind_path(hidden))
            try:
                self._give_mode(hidden)
                if kind != socket.SOCK_DGRAM:
                    listener.listen(backlog)
                os.rename(hidden, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
            except BaseException:
                self.remove(hidden)
                raise
        except BaseException:
            listener.close()
            raise
        return listener

    def _give_mode(self, name: str) -> None:
        """Give a new socket the bits of its mode that a umask may have taken away."""
        if self.group is not None:
            self._share(name)
            return
        mode = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_mode
        if mode & 0o600 != 0o600:
            with self.socket_at(name) as path:
                os.chmod(path, stat.S_IMODE(mode) | 0o600)

    def _share(self, name: str) -> None:
        """Let the group connect to a socket of this user.  The umask has no effect."""
        with self.socket_at(name) as path:
            found = os.stat(path)
            if found.st_uid != os.geteuid():
                raise FileNotFoundError(errno.ENOENT, "another user has replaced it", name)
            os.chmod(path, found.st_mode & stat.S_ISVTX | 0o660)

    @contextlib.contextmanager
    def socket_at(self, name: str) -> Iterator[str]:
        """A path to the socket with this name, even if the name is replaced meanwhile.

        Raises OSError: the name is missing, or is not a socket.
        """
        descriptor = os.open(name, PATH_FLAGS, dir_fd=self.descriptor)
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK), name)
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)

    def bind(self, sock: socket.socket, name: str) -> None:
        """Give a Unix socket a name, before it listens.

        Every user that may enter the directory may send to it.

        Raises OSError: EADDRINUSE if the name exists.
        """
        sock.bind(self._bind_path(name))
        self._give_mode(name)

    def remove_dead(self, name: str, *, young: bool = False) -> bool:
        """Remove the socket ``name`` if its process has ended; True if it was removed.

        young: remove also a new socket, which another process may not have finished yet.
        """
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            try:
                with self.socket_at(name) as path:
                    sock.connect(path)
            except ConnectionRefusedError:
                made = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_mtime
                if young or time.time() - made >= STALE_AFTER:
                    self.remove(name)
                    return True
        return False

    def has(self, name: str) -> bool:
        """True if there is a socket of this user with that name."""
        try:
            found = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except OSError:
            return False
        return stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid()

    def connect(
        self,
        name: str,
        kind: socket.SocketKind = socket.SOCK_SEQPACKET,
        *,
        descriptors: bool = False,
    ) -> socket.socket:
        """A nonblocking connection to the socket ``name``.

        descriptors: True: the other end may send descriptors; False: the kernel rejects them, if
          it supports that.

        Raises:
          BlockingIOError: its backlog is full.
          ConnectionRefusedError: its process has ended.  The name is removed.
          OSError: there is no such socket.
        """
        connection = socket.socket(socket.AF_UNIX, kind)
        try:
            if not descriptors:
                refuse_descriptors(connection)
            connection.setblocking(False)
            with self.socket_at(name) as path:
                connection.connect(path)
        except BaseException as error:
            connection.close()
            if isinstance(error, ConnectionRefusedError):
                with contextlib.suppress(OSError):
                    self.remove(name)
            raise
        return connection

    def remove(self, name: str) -> None:
        """Remove a name.  No-op if it is missing, or if this process may not remove it any more."""
        with contextlib.suppress(FileNotFoundError, PermissionError):
            os.unlink(name, dir_fd=self.descriptor)

    def sockets(self, may_read: Callable[[int], bool] | None = None) -> list[str]:
        """The names of the sockets, at most `_MOST_SOCKETS`.

        may_read: called with the cost of each step; if it returns False, the search ends.  The
          costs are `_BATCH` for so many names, and `_STATUS_COSTS` for the status of a name.
        """
        return [name for name in self._sockets(may_read) if not name.startswith(_HIDDEN)]

    def remove_stale(self, prefix: str = "", *, listening: bool = True) -> None:
        """Remove the sockets of dead processes whose names begin with ``prefix``.

        A socket that cannot be examined, for example for lack of descriptors, stays.

        listening: True: sockets got their names when they listened (`listen`); False: before
          (`bind`).
        """
        with contextlib.suppress(OSError):
            for name in self._sockets():
                if name.removeprefix(_HIDDEN).startswith(prefix):
                    self.remove_dead(name, young=listening and not name.startswith(_HIDDEN))

    def remove_leftovers(self, depth: int = _MAX_DEPTH) -> None:
        """Remove the sockets of dead processes here and in this user's directories below.

        A socket that cannot be examined stays.

        depth: levels of directories below that are searched.
        """
        if not self._is_shared:
            self.remove_stale()
        if not depth:
            return
        with contextlib.suppress(OSError):
            for entry in self.entries():
                if entry.name == _ANNOUNCED or not entry.is_dir(follow_symlinks=False):
                    continue
                with (
                    contextlib.suppress(OSError),
                    contextlib.closing(self._inner(entry.name)) as one,
                ):
                    if one.owner == os.geteuid():
                        one.remove_leftovers(depth - 1)

    def _sockets(self, may_read: Callable[[int], bool] | None = None) -> list[str]:
        found: list[str] = []
        with os.scandir(self.descriptor) as entries:
            for number, entry in enumerate(itertools.islice(entries, _MOST_NAMES)):
                if len(found) >= _MOST_SOCKETS:
                    break
                if may_read is not None and number % _BATCH == 0 and not may_read(_BATCH):
                    break
                try:
                    # The listing contains the types of names: this makes no system call.
                    if entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False):
                        continue
                    if may_read is not None and not may_read(_STATUS_COSTS):
                        break
                    # A symbolic link could lead out of the private directory.
                    if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
                        found.append(entry.name)
                except OSError:
                    continue
        return found

    def _bind_path(self, name: str) -> str:
        return f"/proc/self/fd/{self.descriptor}/{name}"


def _make_private(path: str | Path, directory: int | None = None) -> None:
    """Make a directory in which only this user can do anything, whatever the umask is.

    Other processes of the user use it, too, and a umask such as 0177 would take it from them.

    directory: the descriptor to which ``path`` is relative.
    """
    os.mkdir(path, mode=0o700, dir_fd=directory)
    try:
        descriptor = os.open(path, PATH_FLAGS | os.O_DIRECTORY, dir_fd=directory)
    except OSError:
        os.rmdir(path, dir_fd=directory)
        raise
    try:
        found = os.fstat(descriptor)
        if found.st_uid == os.geteuid() and found.st_mode & 0o700 != 0o700:
            os.chmod(f"/proc/self/fd/{descriptor}", stat.S_IMODE(found.st_mode) | 0o700)
    finally:
        os.close(descriptor)


def own_credentials() -> list[tuple[int, int, bytes]]:
    """Ancillary data for a datagram that names the effective user, as Unix connections do.

    Without it the kernel names the real user.  Empty if both are the same, as they nearly always
    are.
    """
    user = os.geteuid()
    if user == os.getuid():
        return []
    credentials = _CREDENTIALS.pack(os.getpid(), user, os.getegid())
    return [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, credentials)]


def admits_user(user: int, group: int | None) -> bool:
    """True if this user may exchange messages with this process.

    The kernel lets only members of ``group`` enter a directory of that group, so the user of a name
    or datagram there is a member.  `is_admitted` says where members are not admitted.

    user: the owner of the name, or the sender.
    group: `PrivateDirectory.group`.
    """
    if user == os.geteuid() and not _is_overflow_id(user, "uid"):
        return True
    return group is not None and not commit_is_limited()


def peer_user(connection: socket.socket) -> int:
    """The effective user of the other end of a Unix socket when that end connected or listened."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(found)[1]
    return user


def is_same_user(connection: socket.socket) -> bool:
    """True if the process at the other end has the effective user of this process."""
    user = peer_user(connection)
    return user == os.geteuid() and not _is_overflow_id(user, "uid")


def is_admitted(connection: socket.socket, group: int | None) -> bool:
    """True if the other end of a Unix connection may exchange messages with this process.

    It has the same user, or is a member of the group.  If the system limits the commitment of
    memory, members of the group are not admitted: a peer can free pages of any memory that it maps,
    and at the limit SIGBUS would kill this process at its next access to such a page
    (`host.overcommit`).

    group: `PrivateDirectory.group`.
    """
    if is_same_user(connection):
        return True
    return group is not None and group in _peer_groups(connection) and not commit_is_limited()


def _peer_groups(connection: socket.socket) -> tuple[int, ...]:
    """All groups of the other end, the primary one first."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    primary: int = _CREDENTIALS.unpack(found)[2]
    try:
        more = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MOST_GROUPS)
    except OSError:  # more than `_MOST_GROUPS` groups: only the primary one is known
        more = b""
    return (primary, *struct.unpack(f"{len(more) // 4}I", more))


def _is_overflow_id(number: int, kind: str) -> bool:
    """True if this number stands for all unknown users, or groups, of this user namespace.

    kind: "uid" or "gid".
    """
    try:
        if number != overflow_id(kind):
            return False
        known = Path(f"/proc/self/{kind}_map").read_bytes().split()
    except OSError as error:
        return is_lack(error)  # without /proc there is no such number
    return known != [b"0", b"0", b"4294967295"]


@functools.cache  # each accepted connection needs it; an error is not cached
def overflow_id(kind: str) -> int:
    """The number of all unknown users, or groups, of a user namespace.  Raises OSError."""
    return int(Path(f"/proc/sys/kernel/overflow{kind}").read_bytes())
