"""What no transport can beat on this machine: copying memory, and waking another process.

`python -m benchmarks.limits [--steps] [--core N]` is a client process as `benchmarks.worker` has
them.  A round trip is two eventfds between two processes that sleep in read(2); a stream is each
byte copied twice, into a ring and out of it, by one processor.

With --steps a stream is what strict checkpoints leave of that: each write and each read of 64 KiB
is a copy and a step of Trio's scheduler.  Both ends work at once, so the slower one counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator

import trio

NAMES = {"limit": (), "limit-steps": ("--steps",)}
"""The pretended transports, and the arguments that make them."""
_RING = 1024 * 1024
_READ = 64 * 1024
_SIZES = {"stream-4k": 4 * 1024, "stream-64k": 64 * 1024, "stream-1m": 1024 * 1024}
_WARM_UP = 200


@contextlib.contextmanager
def _echo(core: int | None) -> Iterator[tuple[int, int]]:
    """A child that answers each count on the first eventfd with one on the second; 2: end."""
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
    while time.perf_counter() - start < seconds:
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
    """Seconds and seconds of processor time that a byte takes."""
    place = done = 0
    start, used = time.perf_counter(), time.process_time()
    while time.perf_counter() - start < seconds:
        copy(place)
        await trio.lowlevel.checkpoint()
        done += size
        place = (place + size) % _RING
    elapsed, used = time.perf_counter() - start, time.process_time() - used
    return elapsed / done, used / done


def main() -> None:
    """Answer what standard input asks for; `null` for a workload without a limit of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--core", type=int, default=None)
    parser.add_argument("--steps", action="store_true")
    arguments = parser.parse_args()
    if arguments.core is not None:
        os.sched_setaffinity(0, {arguments.core})
    for line in sys.stdin:
        asked = json.loads(line)
        name, seconds = asked["workload"], asked.get("seconds", 0.0)
        values = None
        if name in _SIZES:
            values = (steps if arguments.steps else copies)(_SIZES[name], seconds)
        elif name == "rtt" and not arguments.steps:
            values = round_trips(seconds, asked["other_core"])
        print(json.dumps({"values": values}), flush=True)


if __name__ == "__main__":
    main()
