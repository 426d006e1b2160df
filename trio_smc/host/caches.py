"""The size of the cache that a processor does not share with others, as reported by Linux."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

__all__ = ["private_cache", "size_of_private_cache"]

_CACHES: Final = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS: Final = {"K": 1 << 10, "M": 1 << 20}


@cache
def private_cache() -> int:
    """Bytes of the level 2 cache of processor 0; 0 if the size is unknown."""
    return size_of_private_cache(_CACHES)


def size_of_private_cache(directory: Path) -> int:
    """Bytes of the level 2 cache that is described in ``directory``; 0 if the size is unknown.

    Args:
      directory: a directory like /sys/devices/system/cpu/cpu0/cache.
    """
    try:
        for each in directory.glob("index*"):
            if (each / "level").read_text().strip() == "2":
                size = (each / "size").read_text().strip()
                return int(size[:-1]) * _UNITS[size[-1]]
    except (OSError, ValueError, KeyError, IndexError):
        pass
    return 0
