"""Mappings are larger than the pages that they use: no kind of system allocates the others."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.timing import PATIENCE
from trio_smc.rnic.memory import Memory, PeerMemory

SIZE = 1 << 30
NAME = "trio_smc-test-mapping"
MCL_CURRENT, MCL_FUTURE = 1, 2  # asm-generic/mman.h


@contextlib.contextmanager
def mapped_twice() -> Iterator[tuple[Memory, PeerMemory]]:
    """Memory, mapped as its owner and as a peer map it."""
    own = Memory(SIZE, name=NAME, progress=True)
    peers = PeerMemory.map_untrusted(own.fd, SIZE, progress=True)
    try:
        yield own, peers
    finally:
        peers.close()
        own.close()


def test_a_core_dump_and_huge_pages_leave_it_out() -> None:
    """Otherwise a core dump has all pages of the mapping, and a byte may take 2 MiB."""
    with mapped_twice():
        text = Path("/proc/self/smaps").read_text()
    flags = [each.split() for each in re.findall(rf"memfd:{NAME}(?:.*\n)*?VmFlags:(.*)", text)]
    if not flags:
        pytest.skip("this system does not show the flags of mappings")
    assert len(flags) == 2
    assert all("dd" in each for each in flags)  # do not dump (proc_pid_smaps(5))
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert all("nh" in each for each in flags)  # no huge pages


@pytest.mark.processes
def test_locked_memory_takes_only_the_pages_in_use() -> None:
    done = subprocess.run(
        [sys.executable, "-m", __name__], capture_output=True, text=True, timeout=PATIENCE,
        check=False,
    )  # fmt: skip
    if "refused" in done.stdout:
        pytest.skip("this user may not lock memory")
    assert done.returncode == 0, done.stderr


def main() -> None:
    if ctypes.CDLL(None).mlockall(MCL_CURRENT | MCL_FUTURE):
        sys.stdout.write("refused")
        return
    with mapped_twice() as (own, peers):
        peers.view[SIZE // 2] = own.view[0] = 1
        allocated = os.fstat(own.fd).st_blocks * 512
        assert 0 < allocated < 1 << 20, allocated


if __name__ == "__main__":
    main()
