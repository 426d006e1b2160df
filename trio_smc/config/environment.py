"""The environment variables that configure every program: their names and their checks.

``TRIO_SMC_CONFIG`` names a TOML file (`trio_smc.config.file`), and ``TRIO_SMC_DIRECTORY`` the
private directory.  Containers and services are configured by them.  This module is the only place
that reads the two variables.

They belong to the caller of a program.  A set-user-ID program must not read or create files that
its caller names, so the variables have no effect there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from trio_smc._base.paths import check_tilde

__all__ = [
    "CONFIG_VARIABLE",
    "DIRECTORY_VARIABLE",
    "config_file",
    "directory",
]

CONFIG_VARIABLE: Final = "TRIO_SMC_CONFIG"
"""The variable with the path of a file of settings."""
DIRECTORY_VARIABLE: Final = "TRIO_SMC_DIRECTORY"
"""The variable with the path of the private directory."""

_LONGEST_PATH: Final = 4095
"""Bytes of a path (limits.h: PATH_MAX, less its NUL)."""
_SHOWN: Final = 60
"""Characters of a wrong value in an error.  Chosen."""


def config_file() -> Path | None:
    """The file in ``TRIO_SMC_CONFIG``; None if the variable is not set, or is empty.

    Raises:
      ValueError: the value cannot be the name of a file, or begins with ``~``.
    """
    return _path(CONFIG_VARIABLE)


def directory() -> Path | None:
    """The directory in ``TRIO_SMC_DIRECTORY``; None if the variable is not set, or is empty.

    Raises:
      ValueError: the value is no absolute path.  Processes that share a directory have different
        working directories, so a relative path would name different ones.
    """
    path = _path(DIRECTORY_VARIABLE)
    if path is not None and not path.is_absolute():
        raise ValueError(f"{DIRECTORY_VARIABLE}: {_shown(path)} is not an absolute path")
    return path


def _path(name: str) -> Path | None:
    value = os.environ.get(name)
    if not value or _is_set_user_id():
        return None
    if len(os.fsencode(value)) > _LONGEST_PATH:
        raise ValueError(f"{name}: {_shown(value)} is not a path of 1 to {_LONGEST_PATH} bytes")
    try:
        check_tilde(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return Path(value)


def _shown(value: Path | str) -> str:
    text = ascii(str(value))
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _is_set_user_id() -> bool:
    # Not every system has user numbers.
    return hasattr(os, "getuid") and (os.getuid() != os.geteuid() or os.getgid() != os.getegid())
