"""Setting the TCP option up for a group of users, and removing it.

Setup leaves two names in a BPF file system.  The first is the link, which only root may open; while
it exists, the program runs for a cgroup.  The second is the map of sockets' words, which a group
may open.  The map may be shared, because a process can change only the words of its own open
sockets.  A user with the map can freeze it, which stops the option until the next setup.  So only a
group may open the map.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from trio_smc.capture.output_file import trust_directory
from trio_smc.config.config import DEFAULT_PINS
from trio_smc.rendezvous.discovery import bpf as _bpf
from trio_smc.rendezvous.discovery.tcp_option import (
    LINK_NAME,
    MAP_NAME,
    load_option,
    mounts,
    own_cgroup,
)

__all__ = [
    "mounted_type",
    "set_up_tcp_option",
    "tear_down_tcp_option",
]


_NEEDS: Final = "this takes root (CAP_BPF, CAP_NET_ADMIN and CAP_SYS_ADMIN)"
_NOT_PERMITTED: Final = (errno.EPERM, errno.EACCES)


def set_up_tcp_option(
    *,
    group: str | None = None,
    cgroup: Path | str | None = None,
    pins: Path | str = DEFAULT_PINS,
) -> bool:
    """Let the users of a group announce SMC-R by the TCP option (RFC 7609, 3.1).

    The setup lasts until `tear_down_tcp_option` or the next start of the system.  If a working
    program is set up already, only the group changes.

    Args:
      group: the members of this group may use the option; None: root only.
      cgroup: a directory of the version-2 cgroup hierarchy: only processes in it and below it
        can use the option.  None: the root of the hierarchy, so all processes.
      pins: directory for the pinned objects.  It is created, with a BPF file system on it, unless
        it is in one already.  Other users must not be able to replace a directory on its path.
        Processes find it by `Config.tcp_option`.

    Returns:
      True if a program was loaded.

    Raises:
      ValueError: there is no such group, or no such cgroup.
      OSError: this process may not set it up, or the system cannot; the text names the step that
        failed.
    """
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "the TCP option needs Linux")
    owner = _group_id(group)
    where = own_cgroup(root=True) if cgroup is None else Path(cgroup)
    if not (where / "cgroup.procs").is_file():
        raise ValueError(f"{where} is no cgroup of the version-2 hierarchy")
    pins = Path(os.path.abspath(pins))
    make_directory(pins)
    made = not _is_set_up(pins, where)
    if made:
        _remove(pins)
        with _explained("loading the BPF program"):
            loaded = load_option(where)
        try:
            with _explained(f"pinning in {pins}"):
                _bpf.pin(loaded.link, pins / LINK_NAME)
                os.chmod(pins / LINK_NAME, 0o600)
                # The map is last: if a process finds the map, the program runs.
                _bpf.pin(loaded.words, pins / MAP_NAME)
        except OSError:
            _remove(pins)
            raise
        finally:
            loaded.close()
    with _explained(f"giving {pins / MAP_NAME} to the group"):
        os.chown(pins / MAP_NAME, 0, 0 if owner is None else owner)
        os.chmod(pins / MAP_NAME, 0o600 if owner is None else 0o660)
    return made


def tear_down_tcp_option(*, pins: Path | str = DEFAULT_PINS) -> bool:
    """Undo `set_up_tcp_option`.  Open connections continue.

    Returns:
      True if something was removed.

    Raises:
      OSError: this process may not remove it; the text names the step that failed.
    """
    if sys.platform != "linux":
        return False
    pins = Path(os.path.abspath(pins))
    check_path(pins)
    removed = _remove(pins)
    if mounted_type(pins, exactly=True) == "bpf":
        with _explained(f"listing {pins}"):
            # Names with dots belong to the kernel.
            empty = all("." in name for name in os.listdir(pins))
        if empty:
            with _explained(f"unmounting {pins}"):
                _bpf.unmount(pins)
            removed = True
    for directory in (pins, pins.parent) if pins == DEFAULT_PINS else (pins,):
        with contextlib.suppress(OSError):  # missing, or in use
            directory.rmdir()
    return removed


def _group_id(group: str | None) -> int | None:
    if group is None:
        return None
    import grp

    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ValueError(f"there is no group {group!r}") from None


def make_directory(pins: Path) -> None:
    check_path(pins)
    with _explained(f"making {pins}"):
        mounted = mounted_type(pins) == "bpf"
        pins.mkdir(mode=0o755, parents=not mounted, exist_ok=True)
    # Checked again, because in a sticky directory another user may have made it first.
    check_path(pins)
    if mounted:
        return
    with _explained(f"mounting a BPF file system on {pins}"):
        _bpf.mount_bpffs(pins)


def check_path(pins: Path) -> None:
    """Raise PermissionError if another user could make the path lead elsewhere.

    Root would mount a file system there, and give a name in it to a group.
    """
    known = pins
    while not os.path.lexists(known):
        known = known.parent
    try:
        trust_directory(known)
    except PermissionError as error:
        if error.errno != errno.EPERM:
            return  # this process cannot open root's directories; the next step raises the error
        text = f"{pins} is not safe: {error.strerror}"
        raise PermissionError(errno.EPERM, text) from error


def _is_set_up(pins: Path, cgroup: Path) -> bool:
    """True if the map and the link exist, are usable, and are for this cgroup."""
    try:
        link = _bpf.open_pinned(pins / LINK_NAME)
        try:
            attached = _bpf.link_cgroup(link)
        finally:
            os.close(link)
        words = _bpf.open_pinned(pins / MAP_NAME)
        try:
            storage, frozen = _bpf.map_kind(words)
        finally:
            os.close(words)
    except OSError as error:
        if error.errno in _NOT_PERMITTED:
            text = f"opening {pins} failed: {error.strerror}; {_NEEDS}"
            raise OSError(error.errno, text) from error
        return False
    return storage and not frozen and attached == os.stat(cgroup).st_ino


def _remove(pins: Path) -> bool:
    """Remove both names; returns True if at least one existed."""
    removed = False
    for name in (MAP_NAME, LINK_NAME):
        with _explained(f"removing {pins / name}"), contextlib.suppress(FileNotFoundError):
            (pins / name).unlink()
            removed = True
    return removed


def mounted_type(path: Path, *, exactly: bool = False) -> str | None:
    """Type of the file system that contains ``path``.

    exactly: of the file system that is mounted on ``path`` itself; None: there is none.
    """
    best, kind = -1, None
    for each in mounts():
        here = path == each.point or (not exactly and path.is_relative_to(each.point))
        # A later mount on the same point hides the earlier one.
        if here and len(each.point.parts) >= best:
            best, kind = len(each.point.parts), each.kind
    return kind


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Add the step ``what`` to an OSError, and the rights that the step needs."""
    try:
        yield
    except OSError as error:
        hint = f"; {_NEEDS}" if error.errno in _NOT_PERMITTED else ""
        text = f"{what} failed: {os.strerror(error.errno or 0)}{hint}"
        failure = OSError(error.errno, text)
        for note in getattr(error, "__notes__", ()):
            failure.add_note(note)
        raise failure from error
