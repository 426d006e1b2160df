"""`Places`: directories of several users, and the identity in which each is opened."""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from trio_smc.tools.proc import Process

__all__ = ["Place", "Places", "groups_of_processes", "identity_of"]

_MOST_GROUPS: Final = 4096
"""Chosen; the kernel takes 65,536 (NGROUPS_MAX)."""


class Place(NamedTuple):
    """A private directory, and the user as whom it is opened."""

    uid: int
    directory: Path


class Places(NamedTuple):
    """Several places.

    Attributes:
      all: the places; some may not exist.
      truncated: True if there are more.
    """

    all: tuple[Place, ...]
    truncated: bool = False


@contextlib.contextmanager
def identity_of(uid: int, of_processes: Collection[int] = ()) -> Iterator[None]:
    """Have the effective user, group and groups of a user for the block, and the real user's after
    it.

    Args:
      uid: the user.
      of_processes: groups beside those of the user database, as from `groups_of_processes`.

    Raises:
      OSError: the system refuses it.
    """
    own, group, groups = os.geteuid(), os.getegid(), os.getgroups()
    # Root needs the groups of its processes, too. A container may permit no change of groups.
    if uid == own and {group, *groups}.issuperset(of_processes):
        yield
        return
    theirs, their_groups = _groups_of(uid, of_processes)
    try:
        os.setgroups(their_groups)
        os.setegid(theirs)
        os.seteuid(uid)
        yield
    finally:
        os.seteuid(own)
        os.setegid(group)
        os.setgroups(groups)


def _groups_of(uid: int, of_processes: Collection[int]) -> tuple[int, list[int]]:
    """The primary group and all groups of a user; one without an entry has none but its number."""
    try:
        known = pwd.getpwuid(uid)
    except KeyError:
        primary, listed = uid, []
    else:
        primary, listed = known.pw_gid, os.getgrouplist(known.pw_name, known.pw_gid)
    return primary, sorted({*listed, *of_processes})[:_MOST_GROUPS]


def groups_of_processes() -> dict[int, set[int]]:
    """The supplementary groups of the processes that are one user's in every respect, by user.

    A service manager gives a process groups that the user database does not list, such as systemd's
    SupplementaryGroups. What the user's processes may open, root may open in its place.
    """
    found: dict[int, set[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError), Process(int(name)) as process:
                users = set(process.users())
                if len(users) == 1:
                    found.setdefault(users.pop(), set()).update(process.groups())
    return found
