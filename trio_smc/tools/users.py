"""Root inspects the processes of other users: ``--user NAME`` and ``--all``.

Theory of operation
-------------------
Everything in another user's directory is untrusted, and so is its path: the user can replace every
part below the user's own directories.  So a child process (`tools.inspection`) takes the identity
of the user (effective user, group and groups), opens the directory and queries the processes.  A
symbolic link then leads nowhere that the user could not go anyway, and the processes answer as they
answer their user, also those of older releases.  The real user of the child stays root, so that the
user cannot send it a signal.  A file system of the user (FUSE) may never answer: then the child is
killed.  Nothing is written: not even the sockets of dead processes are removed.

Places are the default directories of each user, and those that the environment of a running process
names (TRIO_SMC_DIRECTORY, XDG_RUNTIME_DIR).  A process can name any path there.  The path is used
with the rights of the user of that process, and the number of places has a bound.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pwd
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from trio_smc._base.regular_file import read_regular_file
from trio_smc.tools.output import ToolError, user_name
from trio_smc.tools.places import Place, Places

__all__ = ["add_users", "places_of"]

_MOST_PLACES: Final = 256
"""Directories that are inspected.  Chosen."""
_MOST_PROCESSES: Final = 4096
"""Processes whose environment is read.  Chosen."""
_ENVIRONMENT: Final = 1 << 18
"""Bytes of an environment that are read.  Chosen."""
_LONGEST_PATH: Final = 4095
_NAMED: Final = re.compile(rb"\A(TRIO_SMC_DIRECTORY|XDG_RUNTIME_DIR)=(/.*)\Z", re.DOTALL)
_MOST_UID: Final = (1 << 32) - 2


class _User(NamedTuple):
    uid: int
    name: str


def add_users(parser: argparse.ArgumentParser) -> tuple[argparse.Action, argparse.Action]:
    """Add ``--user`` and ``--all``, and return them."""
    group = parser.add_mutually_exclusive_group()
    user = group.add_argument(
        "--user", metavar="NAME", help="processes of this user, by name or number; only for root"
    )
    all_ = group.add_argument(
        "--all", action="store_true", help="processes of all users; only for root"
    )
    return user, all_


def places_of(options: argparse.Namespace) -> Places | None:
    """The directories of ``--user`` and ``--all``; None without these options.

    Raises:
      ToolError: this user is not root, or there is no such user.
    """
    if options.user is None and not options.all:
        return None
    user = None if options.user is None else _user(options.user)
    if os.geteuid() != 0 and (user is None or user.uid != os.geteuid()):
        raise ToolError("only root may inspect the processes of another user")
    if options.directory is not None:
        if user is None:
            raise ToolError("--directory belongs to one user: use --user instead of --all")
        return Places((Place(user.uid, Path(options.directory)),))
    found = dict.fromkeys(_places(user))
    return Places(tuple(found)[:_MOST_PLACES], len(found) > _MOST_PLACES)


def _user(text: str) -> _User:
    try:
        known = pwd.getpwnam(text)
        return _User(known.pw_uid, known.pw_name)
    except (KeyError, ValueError):
        pass
    if text.isascii() and text.isdecimal() and len(text) < 11 and int(text) <= _MOST_UID:
        return _User(int(text), user_name(int(text)) or text)
    raise ToolError(f"there is no user {text[:60]!r}")


def _places(user: _User | None) -> Iterator[Place]:
    """The places of one user, or of all."""
    if user is not None:
        yield from _defaults(user.uid)
    else:
        for base, pattern in (
            ("/run/user", r"(\d+)"), ("/dev/shm", r"trio-smc-(\d+)"), ("/tmp", r"trio-smc-(\d+)"),
        ):  # fmt: skip
            with contextlib.suppress(OSError):
                for name in sorted(os.listdir(base)):
                    match = re.fullmatch(pattern, name, re.ASCII)
                    if match and len(match[1]) < 11 and int(match[1]) <= _MOST_UID:
                        yield from _defaults(int(match[1]))
    yield from _of_processes(user)


def _defaults(uid: int) -> Iterator[Place]:
    for path in (f"/run/user/{uid}/trio-smc", f"/dev/shm/trio-smc-{uid}", f"/tmp/trio-smc-{uid}"):
        yield Place(uid, Path(path))


def _of_processes(user: _User | None) -> Iterator[Place]:
    """The directories that the environments of running processes name."""
    with contextlib.suppress(OSError):
        numbers = [name for name in os.listdir("/proc") if name.isdecimal()]
        for number in numbers[:_MOST_PROCESSES]:
            with contextlib.suppress(OSError, ValueError):
                uid = os.stat(f"/proc/{number}").st_uid
                if user is not None and uid != user.uid:
                    continue
                data = read_regular_file(f"/proc/{number}/environ", _ENVIRONMENT)
                for each in data.split(b"\0"):
                    match = _NAMED.match(each)
                    if match and len(match[2]) <= _LONGEST_PATH:
                        path = Path(os.fsdecode(match[2]))
                        is_runtime = match[1] == b"XDG_RUNTIME_DIR"
                        yield Place(uid, path / "trio-smc" if is_runtime else path)
