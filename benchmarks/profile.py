"""Where the processor time goes: `python -m benchmarks.profile`.

One of the measures of `benchmarks.cpu` runs under Python's profiler, both ends in one process.
Printed is the share of each part: Trio, the modules of trio_smc, built-in functions (system calls
and copies of memory are among them), the workload itself.  Use a machine that does nothing else.
The profiler makes each call dearer, so parts with many small functions look larger than they are:
compare shares, not times.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
from pathlib import Path
from typing import Any

import trio

import trio_smc
from benchmarks.cpu import MEASURES, serve
from benchmarks.transports import TRANSPORTS

_TRIO = Path(trio.__file__).parent
_OURS = Path(trio_smc.__file__).parent
_BENCHMARKS = Path(__file__).parent
_ROWS = 20


def part_of(filename: str) -> str:
    """The part of the table that a function of this file belongs to."""
    if filename == "~":
        return "built-in functions"
    path = Path(filename)
    if path.is_relative_to(_OURS):
        return ".".join(("trio_smc", *path.relative_to(_OURS).with_suffix("").parts))
    if path.is_relative_to(_BENCHMARKS):
        return "the workload"
    # What Trio calls for each step of a task is Trio, too.
    of_trio = path.is_relative_to(_TRIO) or "outcome" in path.parts or filename.startswith("<attrs")
    return "Trio" if of_trio else "other libraries"


async def profile(transport_name: str, measure: str) -> pstats.Stats:
    """Run one measure twice over a transport, the second time under the profiler."""
    transport = TRANSPORTS[transport_name]
    # By the clock: asking for processor time is a system call, which makes each call so slow that
    # amortised checkpoints, which also go by the clock, come with every call.
    profiler = cProfile.Profile()
    async with transport.scope(), trio.open_nursery() as nursery:
        port = await nursery.start(serve, transport)
        async with await transport.connect(port):  # keeps the link group warm
            await MEASURES[measure](transport, port)
            profiler.enable()
            await MEASURES[measure](transport, port)
            profiler.disable()
        nursery.cancel_scope.cancel()
    return pstats.Stats(profiler)


def table(stats: pstats.Stats) -> list[tuple[str, float, int]]:
    """Part, share of the time, calls; the largest share first."""
    functions: dict[tuple[str, int, str], tuple[int, int, float, float, Any]] = stats.stats  # type: ignore[attr-defined]
    times: dict[str, float] = {}
    calls: dict[str, int] = {}
    for (filename, _, _), (_, count, spent, _, _) in functions.items():
        part = part_of(filename)
        times[part] = times.get(part, 0.0) + spent
        calls[part] = calls.get(part, 0) + count
    whole = sum(times.values())
    return [
        (part, times[part] / whole, calls[part])
        for part in sorted(times, key=times.__getitem__, reverse=True)
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=__doc__)
    parser.add_argument("--transport", default="smc-r", choices=TRANSPORTS)
    parser.add_argument("--measure", default=next(iter(MEASURES)), choices=MEASURES)
    arguments = parser.parse_args()
    print(f"{arguments.transport}, {arguments.measure}")
    for part, share, calls in table(trio.run(profile, arguments.transport, arguments.measure))[
        :_ROWS
    ]:
        print(f"{part:40}{share:7.1%}{calls:12,} calls")


if __name__ == "__main__":
    main()
