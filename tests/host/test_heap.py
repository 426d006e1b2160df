"""The block that raises the heap's thresholds; tests/e2e/test_page_faults.py has the effect."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trio_smc.host import heap
from trio_smc.host.heap import HeapThresholds


def test_each_larger_size_is_allocated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated: list[int] = []
    monkeypatch.setattr(heap, "bytes", allocated.append, raising=False)
    thresholds = HeapThresholds()
    for size in (1 << 20, 1 << 20, 1 << 16, 1 << 22, 1 << 20, 1 << 30, 1 << 31):
        thresholds.raise_for(size)
    assert allocated == [1 << 20, 1 << 22, HeapThresholds.MOST]


def test_a_lack_of_memory_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int) -> None:
        raise MemoryError(size)

    monkeypatch.setattr(heap, "bytes", refuse, raising=False)
    HeapThresholds().raise_for(1 << 20)


_COUNT_FAULTS = """
import resource
from trio_smc.host.heap import HeapThresholds

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

before = faults()
HeapThresholds().raise_for(HeapThresholds.MOST)
print(faults() - before)
"""


def test_no_page_of_the_block_is_touched() -> None:
    """Filling the block would cost a page fault for each 4 KiB, and the first connection 2 ms."""
    command = [sys.executable, "-c", _COUNT_FAULTS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100
