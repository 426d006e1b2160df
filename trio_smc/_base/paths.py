"""Checks of paths that a user has written: in an argument, a variable or a file of settings."""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["check_tilde"]

_SHOWN: Final = 60
"""Characters of a wrong path in an error.  Chosen."""


def check_tilde(path: Path | str) -> None:
    """Check that a path does not begin with ``~``.

    A shell replaces ``~`` only at the start of a word, so it stays in ``--directory=~/smc``, and in
    the variables of a service or container.  Without this check it would be a directory named "~"
    below the working directory.

    Raises:
      ValueError: it begins with ``~``.
    """
    if str(path).startswith("~"):
        shown = ascii(str(path))
        shown = shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 3]}..."
        raise ValueError(
            f"{shown} begins with ~, which only a shell replaces, and only at the start of a word: "
            "write the whole path"
        )
