"""The size of a processor's private cache, as reported by Linux."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

__all__ = ["private_cache", "size_of_private_cache"]

_CACHES: Final = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS: Final = {"K": 1 << 10, "M": 1 << 20}


@cache
def private_cache() -> int:
    """Bytes of a processor's level 2 cache; 0: unknown."""
    return size_of_private_cache(_CACHES)


def size_of_private_cache(directory: Path) -> int:
    """As `private_cache`, for the processor whose caches ``directory`` describes."""
    try:
        for each in directory.glob("index*"):
            if (each / "level").read_text().strip() == "2":
                size = (each / "size").read_text().strip()
                return int(size[:-1]) * _UNITS[size[-1]]
    except (OSError, ValueError, KeyError, IndexError):
        pass
    return 0
