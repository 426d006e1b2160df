"""The limits of this machine for any transport: copying memory, and waking another process.

`python -m benchmarks.limits [--steps | --ring] [--core N]` is a client process like those of
`benchmarks.worker`.  A round trip uses two eventfds between two processes that sleep in read(2); a
stream copies each byte twice, into a ring and out of it, on one processor.

With --steps the stream has strict checkpoints as well: each write and each read of 64 KiB is a copy
and a step of Trio's scheduler.  Both ends work at the same time, so the slower one counts.

With --ring a stream goes from one processor to another: one process copies into a ring as large as
trio_smc's, the other one out of it into new objects of 64 KiB, and each polls the other's cursor
until it moves.  Two copies on two processors cannot be faster in Python.  Often they are slower
than both copies on one processor, since the bytes move between the caches.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator

import trio

from trio_smc import Config

NAMES = {"limit": (), "limit-steps": ("--steps",), "limit-ring": ("--ring",)}
"""The limits, which look like transports, and the arguments that select them."""
_RING = 1024 * 1024
_READ = 64 * 1024
_SIZES = {"stream-4k": 4 * 1024, "stream-64k": 64 * 1024, "stream-1m": 1024 * 1024}
_WARM_UP = 200

_SHARED_RING = Config().receive_buffer_for("software")
_CHUNK = _SHARED_RING // 4
# Words behind the ring, each in a cache line of its own.  x86-64 keeps stores in order.
_WRITTEN, _TAKEN, _END, _USED = 0, 8, 16, 24
_POLLS = 64


@contextlib.contextmanager
def _echo(core: int | None) -> Iterator[tuple[int, int]]:
    """Fork a child that answers each count on the first eventfd with one on the second; 2: end."""
    there, back = os.eventfd(0, os.EFD_CLOEXEC), os.eventfd(0, os.EFD_CLOEXEC)
    child = os.fork()
    if child == 0:
        if core is not None:
            os.sched_setaffinity(0, {core})
        while os.eventfd_read(there) == 1:
            os.eventfd_write(back, 1)
        os._exit(0)
    try:
        yield there, back
    finally:
        os.eventfd_write(there, 2)
        os.waitpid(child, 0)
        os.close(there)
        os.close(back)


def round_trips(seconds: float, core: int | None) -> list[float]:
    """The 50th and 99th percentile, in microseconds."""
    times: list[int] = []
    clock = time.perf_counter_ns
    with _echo(core) as (there, back):
        end = 0
        while len(times) < _WARM_UP or clock() < end:
            before = clock()
            os.eventfd_write(there, 1)
            os.eventfd_read(back)
            times.append(clock() - before)
            if len(times) == _WARM_UP:
                end = clock() + int(seconds * 1e9)
    times = sorted(times[_WARM_UP:] or times)
    return [times[len(times) * percent // 100] / 1e3 for percent in (50, 99)]


def copies(size: int, seconds: float) -> list[float]:
    """MiB/s, and processor time in seconds per GiB."""
    ring = memoryview(bytearray(_RING))
    data = memoryview(os.urandom(size))
    place = done = 0
    start, used = time.perf_counter(), time.process_time()
    while not done or time.perf_counter() - start < seconds:
        ring[place : place + size] = data
        for at in range(place, place + size, _READ):
            ring[at : min(at + _READ, place + size)].tobytes()
        done += size
        place = (place + size) % _RING
    elapsed, used = time.perf_counter() - start, time.process_time() - used
    return [done / elapsed / (1 << 20), used / done * (1 << 30)]


def steps(size: int, seconds: float) -> list[float]:
    """The same, with a step of Trio's scheduler for each write and each read."""
    ring = memoryview(bytearray(_RING))
    data = memoryview(os.urandom(size))

    def write(at: int) -> None:
        ring[at : at + size] = data

    def read(at: int) -> None:
        ring[at : at + _READ].tobytes()

    ends = [trio.run(_step_by_step, *end, seconds / 2) for end in ((write, size), (read, _READ))]
    elapsed = max(elapsed for elapsed, _ in ends)
    return [1 / elapsed / (1 << 20), sum(used for _, used in ends) * (1 << 30)]


async def _step_by_step(
    copy: Callable[[int], None], size: int, seconds: float
) -> tuple[float, float]:
    """Seconds, and seconds of processor time, for one byte."""
    place = done = 0
    start, used = time.perf_counter(), time.process_time()
    while not done or time.perf_counter() - start < seconds:
        copy(place)
        await trio.lowlevel.checkpoint()
        done += size
        place = (place + size) % _RING
    elapsed, used = time.perf_counter() - start, time.process_time() - used
    return elapsed / done, used / done


def across(size: int, seconds: float, core: int | None) -> list[float]:
    """MiB/s, and processor time of both processes in seconds per GiB; ``core``: the reader's."""
    memory = memoryview(mmap.mmap(-1, _SHARED_RING + mmap.PAGESIZE))
    ring, words = memory[:_SHARED_RING], memory[_SHARED_RING:].cast("Q")
    ring[:] = os.urandom(_SHARED_RING)  # all pages exist from now on
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            if core is not None:
                os.sched_setaffinity(0, {core})
            _read_all(ring, words, lambda: os.getppid() == parent)
        finally:
            os._exit(0)
    gone = os.WEXITED | os.WNOHANG | os.WNOWAIT
    try:
        start, used = time.perf_counter(), time.process_time()
        done = _write_for(seconds, size, ring, words, lambda: not os.waitid(os.P_PID, child, gone))
        elapsed, used = time.perf_counter() - start, time.process_time() - used
    finally:
        words[_END] = 1
        os.waitpid(child, 0)
    return [done / elapsed / (1 << 20), (used + words[_USED] / 1e9) / done * (1 << 30)]


def _poll_until(ready: Callable[[], object], alive: Callable[[], bool]) -> None:
    """Poll until `ready()` is true, and yield the processor now and then.

    Raises RuntimeError: the other process has ended.
    """
    while True:
        for _ in range(_POLLS):
            if ready():
                return
        if not alive():
            raise RuntimeError("the other process is gone")
        os.sched_yield()


def _write_for(
    seconds: float, size: int, ring: memoryview, words: memoryview, alive: Callable[[], bool]
) -> int:
    """Copy writes of ``size`` bytes into the ring for `seconds`; return the bytes read."""
    data = memoryview(os.urandom(size))
    done = 0
    end = time.perf_counter() + seconds

    def has_room() -> bool:
        return bool(done + step - words[_TAKEN] <= _SHARED_RING)

    while time.perf_counter() < end:
        at = 0
        while at < size:
            place = done % _SHARED_RING
            step = min(_CHUNK, size - at, _SHARED_RING - place)
            if not has_room():
                _poll_until(has_room, alive)
            ring[place : place + step] = data[at : at + step]
            at += step
            done += step
            words[_WRITTEN] = done
    words[_END] = 1
    _poll_until(lambda: words[_USED], alive)
    return done


def _read_all(ring: memoryview, words: memoryview, alive: Callable[[], bool]) -> None:
    """Copy everything out of the ring until the end; then store the processor time it took."""
    used = time.process_time_ns()
    taken = 0

    def has_data() -> bool:
        return bool(words[_WRITTEN] != taken or words[_END])

    while True:
        length = words[_WRITTEN] - taken
        if length:
            place = taken % _SHARED_RING
            length = min(length, _READ, _SHARED_RING - place)
            ring[place : place + length].tobytes()
            taken += length
            words[_TAKEN] = taken
        elif words[_END] and words[_WRITTEN] == taken:
            words[_USED] = time.process_time_ns() - used
            return
        else:
            _poll_until(has_data, alive)


def main() -> None:
    """Run the commands on standard input; answer `null` for a workload that has no limit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--core", type=int, default=None)
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--ring", action="store_true")
    arguments = parser.parse_args()
    if arguments.core is not None:
        os.sched_setaffinity(0, {arguments.core})
    for line in sys.stdin:
        request = json.loads(line)
        name, seconds = request["workload"], request.get("seconds", 0.0)
        values = None
        if name in _SIZES and arguments.ring:
            values = across(_SIZES[name], seconds, request["other_core"])
        elif name in _SIZES:
            values = (steps if arguments.steps else copies)(_SIZES[name], seconds)
        elif name == "rtt" and not (arguments.steps or arguments.ring):
            values = round_trips(seconds, request["other_core"])
        print(json.dumps({"values": values}), flush=True)


if __name__ == "__main__":
    main()
