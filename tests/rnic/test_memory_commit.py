"""If the kernel may refuse a page at its first use, memory allocates its pages in advance."""

from __future__ import annotations

import errno
import mmap
import os
import sys
from pathlib import Path
from typing import Self

import pytest

from trio_smc.host import overcommit
from trio_smc.rnic import memory as memory_module
from trio_smc.rnic.memory import Memory, PeerMemory
from trio_smc.rnic.soft.ring import RING_SIZE, ReceiveRing

MIB = 1 << 20


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate vm.overcommit_memory = 2."""
    monkeypatch.setattr(memory_module, "may_refuse_pages", lambda: True)


def allocated(memory: Memory) -> int:
    """Size of the memory's allocated pages in bytes."""
    return os.fstat(memory.fd).st_blocks * 512


def accounted() -> int:
    """Size of the mappings that count against the commit limit, in bytes (proc_pid_smaps(5))."""
    total = size = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("Size:"):
            size = int(line.split()[1]) << 10
        elif line.startswith("VmFlags:"):
            total += size * ("ac" in line.split())
    return total


@pytest.mark.parametrize(
    ("text", "expected"), [("0\n", False), ("1\n", False), ("2\n", True), (None, True)]
)
def test_the_mode_is_read_each_time(
    text: str | None, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "overcommit_memory"
    monkeypatch.setattr(overcommit, "MODE", str(place))
    assert overcommit.commit_is_limited()
    if text is not None:
        place.write_text(text)
    assert overcommit.commit_is_limited() is expected


def test_pages_are_allocated_and_given_back(limited: None) -> None:
    memory = Memory(4 * MIB)
    try:
        assert allocated(memory) == 0
        assert memory.commit(MIB, MIB)
        assert allocated(memory) == MIB
        assert memory.commit(MIB, MIB), "a second commit changes nothing"
        assert allocated(memory) == MIB
        place = MIB
        while place < 2 * MIB:
            place = memory.wipe(place, 2 * MIB, 256 << 10)
        assert allocated(memory) == 0, "pages that were never written are freed, too"
    finally:
        memory.close()


def test_nothing_is_allocated_if_no_page_can_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "may_refuse_pages", lambda: False)
    memory = Memory(MIB)
    try:
        assert not memory.commit(0, MIB)
        assert allocated(memory) == 0
    finally:
        memory.close()


def test_a_ring_has_all_its_pages(limited: None) -> None:
    ring = ReceiveRing(7)
    try:
        assert allocated(ring.memory) == RING_SIZE
    finally:
        ring.close()


def test_a_ring_without_pages_leaves_nothing(
    limited: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="No space"):
        ReceiveRing(7)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_no_mapping_counts_against_the_commit_limit() -> None:
    size = 1 << 40
    before = accounted()
    try:
        memory = Memory(size)
    except OSError as error:  # ulimit -v
        pytest.skip(str(error))
    try:
        peer = PeerMemory.map_untrusted(memory.fd, size)
        # The heap of Python may also have grown.
        assert accounted() - before < size // 1024
        memory.view[size - 1] = 7
        assert peer.view[size - 1] == 7
        peer.close()
        with pytest.raises(ValueError, match="released"):
            _ = peer.view[0]
    finally:
        memory.close()


@pytest.mark.pure  # a function of a compiled module is replaced
@pytest.mark.skipif(sys.version_info >= (3, 13), reason="Python then needs no placeholder")
def test_the_placeholder_is_one_page(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    class RecordingMap(mmap.mmap):
        def __new__(cls, fd: int, length: int, *rest: int) -> Self:
            lengths.append(length)
            return super().__new__(cls, fd, length, *rest)

    monkeypatch.setattr(mmap, "mmap", RecordingMap)
    memory = Memory(64 * MIB)
    try:
        memory.view[64 * MIB - 1] = 1
        assert lengths == [mmap.PAGESIZE]
    finally:
        memory.close()


def test_the_mode_is_read_again_only_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "overcommit_memory"
    place.write_text("2\n")
    now = 1000.0
    monkeypatch.setattr(overcommit, "MODE", str(place))
    for name, value in (("_known_until", 0.0), ("_known", False)):
        monkeypatch.setattr(overcommit, name, value)  # restores them at the end
    monkeypatch.setattr("trio_smc.host.overcommit.time.monotonic", lambda: now)
    assert overcommit.may_refuse_pages()
    place.write_text("0\n")
    assert overcommit.may_refuse_pages(), "the value was read less than 0.2 s ago"
    now += 0.2
    assert not overcommit.may_refuse_pages()
