"""The cost of a connection with one request, by phase: `python -m benchmarks.phases`.

Both ends run in one process that never sleeps, as in `benchmarks.cpu`.  A timer of processor time
interrupts the program every millisecond; the innermost function that belongs to a phase determines
the phase.  Unlike a profiler this does not slow any function down.  System calls count for the
phase that makes them.
"""

from __future__ import annotations

import argparse
import signal
from collections import Counter
from pathlib import Path
from types import FrameType

import trio

import trio_smc
from benchmarks.cpu import connections, serve
from benchmarks.transports import TRANSPORTS

_OURS = Path(trio_smc.__file__).parent
_INTERVAL = 0.001
_WARM_UP = 200
_AT_ONCE = 50

# Rooms and modules by phase; the longest matching name counts.  A module that several phases use
# counts for the phase of its caller.
_PLACES = {
    "open_stream, sockets, TCP connect": "_api _stack connecting.dial connecting.connect "
    "stack.policy stack.rnics host",
    "accepting, tasks of the listener": "connecting.listener connecting.accept",
    "discovery": "rendezvous.discovery host.private_directory",
    "CLC messages: codec": "wire.clc",
    "CLC messages: TCP, waits": "rendezvous.handshake rnic.spinner _base.timers",
    "negotiation": "rendezvous.negotiation rendezvous.client rendezvous.server stack.groups",
    "RMB element, link group": "rendezvous.links datapath.rmb",
    "calls of the stream, options": "streams",
    "end of the TCP connection": "stack.connection_host stack.tcp_watch",
    "data, CDC messages, states": "datapath failover wire.cdc rendezvous.links.link rnic",
}


def _phases() -> dict[str, str]:
    """The phase of each file that belongs to one."""
    found: dict[str, str] = {}
    places = [(place, phase) for phase, names in _PLACES.items() for place in names.split()]
    for place, phase in sorted(places, key=lambda each: len(each[0])):
        room = _OURS.joinpath(*place.split("."))
        files = [*room.rglob("*.py")] if room.is_dir() else [room.with_suffix(".py")]
        found |= {str(file): phase for file in files}
    missing = [name for name in found if not Path(name).is_file()]
    if missing:
        raise SystemExit(f"phases of files that are not there: {', '.join(missing)}")
    return found


_PHASE_OF = _phases()


def phase_of(frame: FrameType | None) -> str:
    """The phase of the innermost frame that has one."""
    while frame is not None:
        phase = _PHASE_OF.get(frame.f_code.co_filename)
        if phase is not None:
            return phase
        if frame.f_code.co_filename.endswith(("cpu.py", "answers.py")):
            return "the workload"
        frame = frame.f_back
    return "Trio's scheduler"


async def sample(transport_name: str, count: int) -> tuple[float, Counter[str]]:
    """The minimum of microseconds for a connection, and the number of samples in each phase."""
    transport = TRANSPORTS[transport_name]
    found: Counter[str] = Counter()

    def look(_: int, frame: FrameType | None) -> None:
        found[phase_of(frame)] += 1

    async with transport.scope(), trio.open_nursery() as nursery:
        port = await nursery.start(serve, transport)
        async with await transport.connect(port):  # keeps the link group warm
            await connections(_WARM_UP, transport, port)
            before = signal.signal(signal.SIGPROF, look)
            signal.setitimer(signal.ITIMER_PROF, _INTERVAL, _INTERVAL)
            try:
                each = [
                    await connections(_AT_ONCE, transport, port)
                    for _ in range(max(1, count // _AT_ONCE))
                ]
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
                signal.signal(signal.SIGPROF, before)
        nursery.cancel_scope.cancel()
    return min(each), found


def main() -> None:
    """Print the table, the most expensive phase first."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.phases", description=__doc__)
    parser.add_argument("--transport", default="smc-r", choices=TRANSPORTS)
    parser.add_argument("--connections", type=int, default=10_000)
    arguments = parser.parse_args()
    used, found = trio.run(sample, arguments.transport, arguments.connections)
    print(f"{'processor time of both ends, µs':40}{used:8.0f}")
    for phase, times in found.most_common():
        print(f"{phase:40}{times / found.total() * used:8.0f}")


if __name__ == "__main__":
    main()
