"""The progress of a benchmark and its warnings, on stderr: stdout has only results."""

from __future__ import annotations

import os
import sys
from typing import Final

__all__ = ["clear", "load_before", "show"]

_WIDTH: Final = 70
"""Columns that a text on a terminal covers, so that it replaces the one before."""
_BUSY: Final = 0.5
"""Load by other programs above which absolute numbers mean little.  Chosen."""


def show(text: str) -> None:
    """Show how far the benchmark is: on a terminal in one line, otherwise in a line of its own."""
    if sys.stderr.isatty():
        print(f"{text:{_WIDTH}}", end="\r", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


def clear() -> None:
    """Remove the text of `show` from a terminal."""
    if sys.stderr.isatty():
        show("")


def load_before() -> float:
    """The load of this machine in the last minute; prints a warning if other programs keep it busy.

    To be called before the benchmark starts processes of its own.
    """
    load = round(os.getloadavg()[0], 2)
    if load > _BUSY:
        print(
            f"warning: other programs keep this machine busy (load {load}): above {_BUSY} times "
            "and rates mean little, and ratios are less exact",
            file=sys.stderr,
            flush=True,
        )
    return load
