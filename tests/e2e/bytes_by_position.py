"""Bytes that show their position in a stream, and plans of sizes to write and read."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

BLOCK = 1 << 20
LARGEST = 1 << 20
_SMALL = 100


@cache
def _noise(seed: int) -> bytes:
    return random.Random(seed).randbytes(2 * BLOCK)


class Text:
    """An endless text.  Byte p is known from p alone, and no two near pieces are alike, so that
    bytes lost, doubled or swapped show where it happens."""

    def __init__(self, seed: int) -> None:
        self._noise = memoryview(_noise(seed))

    def piece(self, position: int, size: int) -> bytes:
        """Bytes ``position`` to ``position + size``."""
        pieces = []
        while size:
            block, offset = divmod(position, BLOCK)
            # Each block begins at another place in the noise.
            start = block * 7919 % BLOCK + offset
            take = min(size, BLOCK - offset)
            pieces.append(self._noise[start : start + take])
            position += take
            size -= take
        return b"".join(pieces)


def _log_uniform(rng: random.Random, largest: int) -> int:
    return int(largest ** rng.random())


def plan_writes(rng: random.Random, total: int, small: int) -> list[int]:
    """Sizes that add up to ``total``: log-uniform from 1 byte to 1 MiB, and among them at least
    ``small`` more below 100 bytes, which are log-uniform too."""
    little = [_log_uniform(rng, _SMALL - 1) for _ in range(small)]
    left = total - sum(little)
    assert left > 0
    sizes = []
    while left:
        sizes.append(min(left, _log_uniform(rng, LARGEST)))
        left -= sizes[-1]
    sizes += little
    rng.shuffle(sizes)
    return sizes


def plan_reads(rng: random.Random) -> Iterator[int]:
    """An endless sequence of sizes to read."""
    while True:
        yield _log_uniform(rng, LARGEST)
