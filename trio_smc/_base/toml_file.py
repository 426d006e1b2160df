"""TOML files of settings, read with bounds on time and memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from .regular_file import read_regular_file

__all__ = ["read_toml_file"]

_LARGEST: Final = 1 << 20
"""Bytes of a file.  Chosen."""
_LONG_KEY: Final = re.compile(
    r"""(?<![\w-])(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){32}""", re.ASCII
)
"""A key of more than 32 parts.  tomllib takes 90 s for one of 50,000, in a file of 100 KB."""


def read_toml_file(path: Path | str) -> dict[str, Any]:
    """Read the tables and values of a TOML file.

    Raises:
      ValueError: the file cannot be read, is no regular file, has more than 1 MiB, or is no TOML.
    """
    import tomllib  # slow to import, and few programs have such a file

    try:
        text = read_regular_file(path, _LARGEST)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    try:
        settings = text.decode()
        if _LONG_KEY.search(settings):
            raise ValueError("a key has more than 32 parts")
        return tomllib.loads(settings)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 (at byte {error.start})") from error
    except RecursionError as error:
        raise ValueError(f"{path}: its values are nested too deeply") from error
    except ValueError as error:
        # No TOML, too long a key, or an integer with more digits than Python converts.
        raise ValueError(f"{path}: {error}") from error
