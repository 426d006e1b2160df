"""Show where the processor time goes: `python -m benchmarks.profile`.

One of the measures of `benchmarks.cpu`, or with ``--program`` a workload of the unmodified programs
under `enable`, runs under Python's profiler, both ends in one process.  The table has the share of
each part: Trio, the modules of trio_smc, built-in functions (with system calls and copies of
memory), and the workload itself.  Below it is the share of all trio_smc with the built-in functions
that it calls: what a program could gain if SMC-R cost nothing.  Use a machine without other work.
The profiler makes each call slower, so parts with many small functions look larger than they are:
compare shares, not times.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import trio
import trio.testing

import trio_smc
from benchmarks.cpu import MEASURES, serve
from benchmarks.programs.common import Server
from benchmarks.transports import TRANSPORTS
from benchmarks.unmodified import WORKLOADS, keys_of, working_directory

_TRIO = Path(trio.__file__).parent
_OURS = Path(trio_smc.__file__).parent
_BENCHMARKS = Path(__file__).parent
_ROWS = 20
_SECONDS = 1.0
# The connections of a peer that was learned to be short are TCP.
_PROGRAMS = [name for name in WORKLOADS if not name.endswith("-learned")]
_PACKAGE = "trio_smc"
_BUILT_IN = "built-in functions"
Functions = dict[tuple[str, int, str], tuple[int, int, float, float, dict[Any, Any]]]


def part_of(filename: str) -> str:
    """The part of the table that a function in this file belongs to."""
    if filename == "~":
        return _BUILT_IN
    path = Path(filename)
    if path.is_relative_to(_OURS):
        return ".".join((_PACKAGE, *path.relative_to(_OURS).with_suffix("").parts))
    if path.is_relative_to(_BENCHMARKS):
        return "the workload"
    # Functions that Trio calls for each step of a task count for Trio, too.
    of_trio = path.is_relative_to(_TRIO) or "outcome" in path.parts or filename.startswith("<attrs")
    return "Trio" if of_trio else "other libraries"


async def profile(transport_name: str, measure: str) -> pstats.Stats:
    """Run one measure twice over a transport, the second time under the profiler."""
    transport = TRANSPORTS[transport_name]
    # Use wall time: reading processor time is a system call, which makes each call so slow that an
    # amortised checkpoint, which also depends on the clock, becomes due with every call.
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


async def profile_program(name: str, directory: Path, seconds: float) -> pstats.Stats:
    """Run a workload of the unmodified programs twice, the second time under the profiler."""
    module = import_module(f"benchmarks.programs.{WORKLOADS[name].program}")
    profiler = cProfile.Profile()
    async with trio.open_nursery() as nursery:
        ports = await nursery.start(module.serve, directory)
        await trio.testing.wait_all_tasks_blocked()  # until its listeners are published
        server = Server(ports=ports, pids=[os.getpid()], directory=directory)
        workload = partial(module.WORKLOADS[name], server, seconds)
        await workload()
        profiler.enable()
        await workload()
        profiler.disable()
        nursery.cancel_scope.cancel()
    return pstats.Stats(profiler)


def functions_of(stats: pstats.Stats) -> Functions:
    """The profile of each function: calls, calls not nested, own time, cumulative time, callers."""
    functions: Functions = stats.stats  # type: ignore[attr-defined]
    return functions


def our_share(stats: pstats.Stats) -> float:
    """The part of the time that trio_smc takes, with the built-in functions that it calls."""
    whole = ours = 0.0
    for (filename, _, _), (_, _, spent, _, callers) in functions_of(stats).items():
        whole += spent
        part = part_of(filename)
        if part.startswith(_PACKAGE):
            ours += spent
        elif part == _BUILT_IN:
            ours += sum(
                taken
                for (caller, _, _), (_, _, taken, _) in callers.items()
                if part_of(caller).startswith(_PACKAGE)
            )
    return ours / whole


def table(stats: pstats.Stats) -> list[tuple[str, float, int]]:
    """Part, share of the time, calls; the largest share first."""
    functions = functions_of(stats)
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


def _program(word: str) -> str:
    """The argparse type of a workload of the unmodified programs; returns its key."""
    for key in keys_of(word):
        if key in _PROGRAMS:
            return key
    raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(_PROGRAMS)}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=__doc__)
    parser.add_argument("--transport", default="smc-r", choices=TRANSPORTS)
    parser.add_argument("--measure", default=next(iter(MEASURES)), choices=MEASURES)
    names = ", ".join(f"{each} ({WORKLOADS[each].metrics[0].name})" for each in _PROGRAMS)
    parser.add_argument(
        "--program", type=_program, metavar="NAME",
        help=f"instead of a measure, by either name: {names}",
    )  # fmt: skip
    arguments = parser.parse_args()
    if arguments.program is None:
        print(f"{arguments.transport}, {arguments.measure}")
        stats = trio.run(profile, arguments.transport, arguments.measure)
    else:
        print(WORKLOADS[arguments.program].metrics[0].name)
        trio_smc.enable(trio_smc.Config(require_smc=True))
        with working_directory([arguments.program]) as directory:
            stats = trio.run(profile_program, arguments.program, directory, _SECONDS)
    for part, share, calls in table(stats)[:_ROWS]:
        print(f"{part:40}{share:7.1%}{calls:12,} calls")
    print(f"trio_smc, with the built-in functions it calls: {our_share(stats):.1%}")


if __name__ == "__main__":
    main()
