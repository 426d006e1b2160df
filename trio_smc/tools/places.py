"""`Places`: directories of several users, and the identity in which each is opened."""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Place", "Places", "identity_of"]


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
def identity_of(uid: int) -> Iterator[None]:
    """Have the effective user, group and groups of a user for the block, and the real user's after
    it.

    Raises:
      OSError: the system refuses it.
    """
    if uid == os.geteuid():
        yield
        return
    group, groups = os.getegid(), os.getgroups()
    theirs, their_groups = _groups_of(uid)
    own = os.geteuid()
    try:
        os.setgroups(their_groups)
        os.setegid(theirs)
        os.seteuid(uid)
        yield
    finally:
        os.seteuid(own)
        os.setegid(group)
        os.setgroups(groups)


def _groups_of(uid: int) -> tuple[int, list[int]]:
    """The primary group and all groups of a user; one without an entry has none but its number."""
    try:
        known = pwd.getpwuid(uid)
    except KeyError:
        return uid, []
    return known.pw_gid, os.getgrouplist(known.pw_name, known.pw_gid)
