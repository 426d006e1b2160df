"""Arguments of the command that cannot be right: found before the run."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["problems"]

_PORTS: Final = 65535


def problems(given: argparse.Namespace) -> Iterator[str]:
    """The wrong arguments of ``connect`` or ``listen``, one line each."""
    yield from _of_ports(given)
    yield from _of_numbers(given)
    if len(given.rnics or ()) > 2:
        yield "--rnic can be given twice at most"
    if given.version > 1 and given.command == "connect" and not given.ueid:
        yield "version 2 needs --ueid, a UEID that the server has"
    for name in ("json", "junit", "html"):
        path = getattr(given, name)
        if path is not None and not _can_write(path):
            yield f"--{name} {path}: the file cannot be written"
    if given.keep is not None and not _can_make(given.keep):
        yield f"--keep {given.keep}: the directory cannot be written"


def _of_ports(given: argparse.Namespace) -> Iterator[str]:
    least = 1 if given.command == "connect" else 0
    if not least <= given.port <= _PORTS:
        yield f"PORT must be from {least} to {_PORTS}, not {given.port}"
    taken = {given.port: "PORT"}
    for name in ("daytime", "discard"):
        port = getattr(given, name, None)
        if port is None:
            continue
        if not least <= port <= _PORTS:
            yield f"--{name} must be from {least} to {_PORTS}, not {port}"
        if port and port in taken:
            yield f"--{name} {port} is the same port as {taken[port]}"
        taken[port] = f"--{name}"


def _of_numbers(given: argparse.Namespace) -> Iterator[str]:
    for name in ("jobs", "max_failures"):
        number = getattr(given, name)
        if number is not None and number < 1:
            yield f"--{name.replace('_', '-')} must be at least 1, not {number}"
    for name in ("patience", "timers"):
        seconds = getattr(given, name)
        if not 0 < seconds < math.inf:
            yield f"--{name} must be a number of seconds above 0, not {seconds:g}"


def _can_write(path: Path) -> bool:
    """True if a file can be made here, or replaced."""
    if path.exists():
        return not path.is_dir() and os.access(path, os.W_OK)
    return path.parent.is_dir() and os.access(path.parent, os.W_OK | os.X_OK)


def _can_make(path: Path) -> bool:
    """True if a directory can be made here, or is there and can be written."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path.is_dir() and os.access(path, os.W_OK | os.X_OK)
