"""RMBs: places of elements, the elements that a pool hands out, and that all of them are zeroed."""

from __future__ import annotations

import errno
import mmap
import os
import random
import time
from collections.abc import Iterator

import pytest

from tests.timing import SLOWER
from trio_smc.datapath.rmb import (
    EYE_CATCHER,
    MAX_RMBS,
    WARM,
    Rmb,
    Rmbe,
    RmbPool,
    rmb_elements,
)
from trio_smc.rnic import memory as memory_module
from trio_smc.rnic.memory import Memory

KIB = 1024
SIZE = 16 * KIB


@pytest.fixture
def memories() -> Iterator[list[Memory]]:
    """Memory that the test made, unmapped when it ends."""
    made: list[Memory] = []
    yield made
    for memory in made:
        memory.close()


def make(
    memories: list[Memory], size: int = SIZE, count: int = 4, eye_catcher: bool = False
) -> Rmb:
    memories.append(Memory(-(-size * count // 4096) * 4096))
    return Rmb(memories[-1], size, count, eye_catcher=eye_catcher)


@pytest.mark.rfc("4.2/1", "4.2/2", "4.4.1/1", "2.1/5", "2.1/8")
@pytest.mark.parametrize("eye_catcher", [False, True])
def test_elements_lie_side_by_side_and_share_no_byte(
    memories: list[Memory], eye_catcher: bool
) -> None:
    rmb = make(memories, 10_000, 5, eye_catcher)
    for rmbe in rmb.elements:
        rmbe.data[:] = bytes([rmbe.index]) * rmbe.usable
    for number, rmbe in enumerate(rmb.elements):
        assert rmbe.index == number + 1
        assert rmbe.offset == number * 10_000
        assert rmbe.first == (4 if eye_catcher else 0)
        assert rmbe.usable == 10_000 - rmbe.first == len(rmbe.data)
        element = bytes(rmb.memory.view[rmbe.offset : rmbe.offset + 10_000])
        assert element == EYE_CATCHER[: rmbe.first] + bytes([rmbe.index]) * rmbe.usable


def test_an_overwritten_eye_catcher_is_noticed(memories: list[Memory]) -> None:
    first, second = make(memories, count=2, eye_catcher=True).elements
    assert first.check_eye_catcher()
    assert second.check_eye_catcher()
    second.rmb.memory.view[second.offset + 3] ^= 1
    assert first.check_eye_catcher()
    assert not second.check_eye_catcher()
    second.clear(0)
    assert second.check_eye_catcher()


def test_without_an_eye_catcher_there_is_nothing_to_overwrite(memories: list[Memory]) -> None:
    rmbe = make(memories).elements[0]
    rmbe.data[:4] = b"abcd"
    assert rmbe.check_eye_catcher()


@pytest.mark.rfc("4.2/1")
def test_bad_divisions_are_refused(memories: list[Memory]) -> None:
    memories.append(Memory(SIZE))
    for size, count in ((SIZE, 2), (SIZE, 0), (16, 256), (4, 1)):
        with pytest.raises(ValueError, match="element"):
            Rmb(memories[0], size, count, eye_catcher=True)


@pytest.mark.parametrize(
    ("size", "kind", "count"),
    [
        (SIZE, "software", 255),
        (1024 * KIB, "software", 255),
        (SIZE, "roce", 255),
        (64 * KIB, "roce", 64),
        (512 * KIB, "roce", 8),
        (8192 * KIB, "roce", 1),
    ],
)
def test_elements_of_a_new_rmb(size: int, kind: str, count: int) -> None:
    assert rmb_elements(size, "software" if kind == "software" else "roce") == count


@pytest.mark.rfc("2.1/3")
def test_all_255_elements_are_handed_out_once(memories: list[Memory]) -> None:
    pool = RmbPool()
    assert pool.take(SIZE) is None
    pool.add(make(memories, count=255))
    taken = [pool.take(SIZE) for _ in range(255)]
    assert sorted(rmbe.index for rmbe in taken if rmbe) == list(range(1, 256))
    assert pool.take(SIZE) is None
    assert (pool.allocated, pool.reused) == (255, 0)
    assert taken[7]
    pool.release(taken[7])
    assert pool.take(SIZE) is taken[7]
    assert pool.take(SIZE) is None
    assert (pool.allocated, pool.reused) == (256, 1)


@pytest.mark.rfc("4.1/3", "2.1/5")
def test_sizes_are_rounded_up_to_their_class_and_not_mixed(memories: list[Memory]) -> None:
    pool = RmbPool()
    small, large = make(memories, SIZE, 1), make(memories, 4 * SIZE, 2)
    pool.add(small)
    pool.add(large)
    got = pool.take(3 * SIZE)
    assert got
    assert got.rmb is large
    got = pool.take(1)
    assert got
    assert got.rmb is small
    assert pool.take(SIZE) is None, "a free element of another class is not taken"
    assert pool.take(2 * SIZE) is None
    with pytest.raises(ValueError, match="size"):
        pool.add(make(memories, 10_000, 1))


def wipe_some(pool: RmbPool) -> list[Rmb]:
    """Zero all freed elements, without a limit of time."""
    return pool.wipe_some(lambda: 0.0)


def pages(memory: Memory) -> int:
    """The number of pages that the memory has."""
    return os.fstat(memory.fd).st_blocks * 512 // mmap.PAGESIZE


def take(pool: RmbPool, size: int = SIZE) -> Rmbe:
    rmbe = pool.take(size)
    assert rmbe
    return rmbe


@pytest.mark.rfc("4.4.1/1", "4.4.1/2")
@pytest.mark.parametrize("eye_catcher", [False, True])
@pytest.mark.parametrize("used", [0, 1, 100, 4092, 4096, 9000, SIZE - 4, None])
def test_used_bytes_are_zero_before_reuse(
    memories: list[Memory], eye_catcher: bool, used: int | None
) -> None:
    pool = RmbPool()
    pool.add(make(memories, count=3, eye_catcher=eye_catcher))
    left, middle, right = (take(pool) for _ in range(3))
    for rmbe in (left, middle, right):
        rmbe.data[: rmbe.usable if used is None else used] = b"\xee" * (
            rmbe.usable if used is None else used
        )
    before = bytes(left.data), bytes(right.data)
    pool.release(middle, used)
    assert take(pool) is middle
    assert bytes(middle.data) == bytes(middle.usable)
    assert middle.check_eye_catcher()
    assert (bytes(left.data), bytes(right.data)) == before
    assert left.check_eye_catcher()
    assert right.check_eye_catcher()


@pytest.mark.rfc("4.4.1/2", "2.1/3")
def test_an_element_in_use_is_never_handed_out_again(
    memories: list[Memory], rng: random.Random
) -> None:
    pool = RmbPool()
    for _ in range(3):
        pool.add(make(memories, count=5))
    held: list[Rmbe] = []
    for _ in range(3000):
        if held and rng.random() < 0.5:
            rmbe = held.pop(rng.randrange(len(held)))
            used = rng.choice([0, 10, 5000, SIZE])
            rmbe.data[:used] = b"x" * used
            pool.release(rmbe, rng.choice([used, None]))
        elif (got := pool.take(SIZE)) is not None:
            assert got not in held
            assert not any(got.data)
            held.append(got)
        else:
            assert len(held) == 15
        if rng.random() < 0.5:
            wipe_some(pool)
            assert not pool.has_dirty
        if pool.has_dirty:
            continue
        in_use = {rmbe.rmb for rmbe in held}
        assert {rmb for rmb in pool.rmbs if pool.is_empty(rmb)} == set(pool.rmbs) - in_use


def test_wrong_releases_are_refused(memories: list[Memory]) -> None:
    pool, other = RmbPool(), RmbPool()
    pool.add(make(memories))
    other.add(make(memories))
    rmbe = take(pool)
    with pytest.raises(ValueError, match="not in use"):
        other.release(rmbe)
    pool.release(rmbe)
    with pytest.raises(ValueError, match="not in use"):
        pool.release(rmbe)
    wipe_some(pool)
    assert take(pool) is rmbe


def test_an_empty_rmb_can_be_removed_and_a_used_one_not(memories: list[Memory]) -> None:
    pool = RmbPool()
    first, second = make(memories, count=1), make(memories, count=1)
    pool.add(first)
    pool.add(second)
    with pytest.raises(ValueError, match="already"):
        pool.add(first)
    one = take(pool)
    assert one.rmb is first, "the oldest RMB is filled first, so that others become empty"
    assert [pool.is_empty(rmb) for rmb in (first, second)] == [False, True]
    with pytest.raises(ValueError, match="in use"):
        pool.remove(first)
    pool.remove(second)
    with pytest.raises(ValueError, match="not in this pool"):
        pool.remove(second)
    assert pool.take(SIZE) is None
    pool.release(one)
    assert [pool.is_empty(rmb) for rmb in pool.rmbs] == [False], "it is still to be zeroed"
    assert wipe_some(pool) == [first]
    assert [pool.is_empty(rmb) for rmb in pool.rmbs] == [True]


@pytest.mark.rfc("2.1/1")
def test_a_pool_holds_at_most_255_rmbs(memories: list[Memory]) -> None:
    pool = RmbPool()
    for _ in range(MAX_RMBS):
        pool.add(make(memories, count=1))
    assert len(pool.rmbs) == 255
    with pytest.raises(OverflowError):
        pool.add(make(memories, count=1))


BIG = 4096 * KIB


def test_no_page_is_allocated_for_unwritten_memory(memories: list[Memory]) -> None:
    """Also if the peer may have written to any place."""
    pool = RmbPool()
    rmb = make(memories, BIG, 255)
    pool.add(rmb)
    taken = [take(pool, BIG) for _ in range(255)]
    for rmbe in taken:
        rmbe.data[:10] = b"some bytes"
        rmbe.data[BIG // 2] = 1
    for rmbe in taken:
        pool.release(rmbe)
    assert pages(rmb.memory) == 2 * 255, "nothing is zeroed before its turn"
    assert wipe_some(pool) == [rmb] * 255
    assert pages(rmb.memory) == 0
    again = [take(pool, BIG) for _ in range(255)]
    assert sorted(rmbe.index for rmbe in again) == list(range(1, 256))
    assert not any(rmbe.data[:10].tobytes().strip(b"\0") or rmbe.data[BIG // 2] for rmbe in again)


@pytest.mark.parametrize("used", [BIG, None])
def test_much_is_zeroed_in_steps(memories: list[Memory], used: int | None) -> None:
    pool = RmbPool()
    pool.add(make(memories, BIG, 2))
    rmbe = take(pool, BIG)
    other = take(pool, BIG)
    rmbe.data[:] = b"x" * BIG
    other.data[:] = b"y" * BIG
    pool.release(rmbe, used)
    assert pool.take(BIG) is None, "it is not free before it is zero"
    now = iter(range(1000))
    steps = 1
    while not pool.wipe_some(lambda: float(next(now))):
        steps += 1
        zero = bytes(rmbe.data).count(0)
        assert 0 < zero < BIG
    assert steps >= 8
    assert take(pool, BIG) is rmbe
    assert bytes(rmbe.data) == bytes(BIG)
    assert bytes(other.data) == b"y" * BIG


def test_a_step_takes_less_than_a_millisecond(memories: list[Memory]) -> None:
    pool = RmbPool()
    rmb = make(memories, BIG, 4)
    pool.add(rmb)
    for rmbe in [take(pool, BIG) for _ in range(4)]:
        rmbe.data[:] = b"x" * BIG
        pool.release(rmbe, BIG if rmbe.index % 2 else None)
    took = []
    while pool.has_dirty:
        start = time.thread_time()
        pool.wipe_some(time.perf_counter)
        took.append(time.thread_time() - start)
    took.sort()
    # Processor time, and the median, so that other processes do not count.
    assert took[len(took) // 2] < 0.001 * SLOWER


def test_pages_go_back_after_a_burst(memories: list[Memory]) -> None:
    """After any ending; the pages of a few connections stay, for the next ones."""
    pool = RmbPool()
    rmb = make(memories, BIG, 64)
    pool.add(rmb)
    taken = [take(pool, BIG) for _ in range(64)]
    for rmbe in taken:
        rmbe.data[:] = b"x" * BIG
    for rmbe in taken:
        pool.release(rmbe, BIG)
    wipe_some(pool)
    assert pages(rmb.memory) * mmap.PAGESIZE == WARM
    assert not any(take(pool, BIG).data.tobytes().strip(b"\0") for _ in range(64))


def test_a_warm_element_is_given_back_as_a_whole(memories: list[Memory]) -> None:
    pool = RmbPool()
    rmb = make(memories, BIG, 8)
    pool.add(rmb)
    first, *others = [take(pool, BIG) for _ in range(8)]
    first.data[:] = b"x" * BIG
    pool.release(first, BIG)
    wipe_some(pool)
    assert take(pool, BIG) is first
    for rmbe in others[:4]:
        rmbe.data[:] = b"x" * BIG
        pool.release(rmbe, BIG)
    pool.release(first, 0)
    wipe_some(pool)
    assert pages(rmb.memory) * mmap.PAGESIZE == WARM


def test_memory_about_to_be_unmapped_is_not_zeroed(memories: list[Memory]) -> None:
    pool = RmbPool()
    pool.add(make(memories, BIG, 2))
    before, after = take(pool, BIG), take(pool, BIG)
    before.data[0] = after.data[0] = 1
    pool.release(before)
    pool.close()
    pool.release(after, 1)
    assert not pool.has_dirty
    assert before.data[0] == after.data[0] == 1


def test_pinned_memory_keeps_its_pages(memories: list[Memory]) -> None:
    """An adapter would continue to write to the pages that it knows."""
    pool = RmbPool()
    rmb = make(memories, BIG, 8)
    rmb.memory.pinned = True
    pool.add(rmb)
    for number, rmbe in enumerate([take(pool, BIG) for _ in range(8)]):
        rmbe.data[:] = b"x" * BIG
        pool.release(rmbe, BIG if number % 2 else None)
    wipe_some(pool)
    assert pages(rmb.memory) * mmap.PAGESIZE == 8 * BIG
    assert not any(take(pool, BIG).data.tobytes().strip(b"\0") for _ in range(8))


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if vm.overcommit_memory were 2."""
    monkeypatch.setattr(memory_module, "may_refuse_pages", lambda: True)


@pytest.mark.parametrize("eye_catcher", [False, True])
def test_an_element_has_its_pages_when_it_is_handed_out(
    memories: list[Memory], limited: None, eye_catcher: bool
) -> None:
    """After any earlier use, and without the pages of other elements."""
    pool = RmbPool()
    rmb = make(memories, BIG, 16, eye_catcher)
    pool.add(rmb)
    assert pages(rmb.memory) == 0
    taken = []
    for number in range(1, 9):
        taken.append(take(pool, BIG))
        assert pages(rmb.memory) * mmap.PAGESIZE == number * BIG
    for number, rmbe in enumerate(taken):
        rmbe.data[:5] = b"bytes"
        pool.release(rmbe, None if number % 2 else 5)
    wipe_some(pool)
    assert pages(rmb.memory) * mmap.PAGESIZE == WARM, "only the kept pages"
    again = [take(pool, BIG) for _ in range(16)]
    assert pages(rmb.memory) * mmap.PAGESIZE == 16 * BIG
    assert not any(rmbe.data[0] for rmbe in again)
    assert all(rmbe.check_eye_catcher() for rmbe in again)


def test_an_element_that_gets_no_pages_stays_free(
    memories: list[Memory], limited: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = RmbPool()
    rmb = make(memories, BIG, 2)
    pool.add(rmb)
    used = take(pool, BIG)
    pool.release(used)
    wipe_some(pool)
    allocate = os.posix_fallocate

    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            pool.take(BIG)
    assert pool.is_empty(rmb)
    assert pool.allocated == 1
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    assert {take(pool, BIG).index, take(pool, BIG).index} == {1, 2}
    assert pool.take(BIG) is None


def test_an_element_is_made_when_it_is_first_used(memories: list[Memory]) -> None:
    """A link group of one connection has one, and not 255."""
    pool = RmbPool()
    rmb = make(memories, count=255)
    pool.add(rmb)
    assert rmb.made == 0
    assert take(pool).index == 1
    assert rmb.in_use == 1
    assert len(rmb.elements) == 255
    assert rmb.made == 1
    assert rmb.elements[-1].index == 255
    assert [each.index for each in rmb.elements[1:3]] == [2, 3]
    with pytest.raises(IndexError):
        _ = rmb.elements[255]
