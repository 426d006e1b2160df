"""The resources of this process: descriptors, threads, children, memfd mappings, files.

A test takes a `Snapshot` before and after and asks `leaked(before, after)` for one line of text
per thing that is there afterwards and was not before. Everything is read from /proc and from
`threading`, so descriptors that a library opened count as well.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from dataclasses import dataclass
from pathlib import Path

# Trio keeps idle worker threads for ten seconds for the next to_thread.run_sync; they carry this
# name only while idle, so a worker still busy after its test is reported.
_IDLE_TRIO_WORKER = "Trio thread "


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The resources at one moment; each mapping goes from an identity to a description."""

    descriptors: dict[tuple[int, str], str]
    threads: dict[int, str]
    children: dict[int, str]
    mappings: dict[str, str]
    files: dict[str, str]


def take(*directories: Path) -> Snapshot:
    """Return what this process holds now.

    directories: trees whose files, sockets and pipes count as held. Directories themselves do
    not: the next user of the tree needs them.
    """
    files: dict[str, str] = {}
    for directory in directories:
        files.update(_files(directory))
    return Snapshot(
        descriptors=_descriptors(),
        threads=_threads(),
        children=_children(),
        mappings=_memfd_mappings(),
        files=files,
    )


def leaked(before: Snapshot, after: Snapshot) -> list[str]:
    """Return one line for each thing in `after` that is not in `before`."""
    lines: list[str] = []
    for what in ("children", "threads", "descriptors", "mappings", "files"):
        old, new = getattr(before, what), getattr(after, what)
        lines += [text for identity, text in new.items() if identity not in old]
    return lines


def _descriptors() -> dict[tuple[int, str], str]:
    found: dict[tuple[int, str], str] = {}
    for name in os.listdir("/proc/self/fd"):
        # The descriptor that listed the directory is gone by now.
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(f"/proc/self/fd/{name}")
            found[int(name), target] = f"descriptor {name} -> {target}"
    return found


def _threads() -> dict[int, str]:
    return {
        id(thread): f"thread {thread.name!r} (daemon={thread.daemon})"
        for thread in threading.enumerate()
        if not thread.name.startswith(_IDLE_TRIO_WORKER)
    }


def _children() -> dict[int, str]:
    found: dict[int, str] = {}
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for pid in Path(f"/proc/self/task/{task}/children").read_text().split():
                found[int(pid)] = f"child process {pid} ({_describe(int(pid))})"
    return found


def _describe(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    return command or "zombie: its parent did not wait for it"


def _memfd_mappings() -> dict[str, str]:
    found: dict[str, str] = {}
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "/memfd:" in line:
                where = line.split(" ", 1)[0]
                found[where] = f"memfd mapping {line.strip()}"
    return found


def _files(directory: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for parent, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(parent, name)
            with contextlib.suppress(FileNotFoundError):
                found[path] = f"{_kind(os.lstat(path).st_mode)} {path}"
    return found


def _kind(mode: int) -> str:
    if stat.S_ISSOCK(mode):
        return "socket file"
    return "named pipe" if stat.S_ISFIFO(mode) else "file"
