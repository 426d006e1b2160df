"""What a connection with one request costs, by phase: `python -m benchmarks.phases`.

Both ends run in one process that never sleeps, as in `benchmarks.cpu`.  A timer of processor time
looks every millisecond where the program is, and the innermost function that belongs to a phase
says which; so nothing is made dearer, as it is under a profiler.  System calls count for the phase
that makes them.
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

# Modules by phase; one that several phases use counts for whoever calls it.
_MODULES = {
    "open_stream, sockets, TCP connect": "_open _stack _stack_life _connect _dial _policy _rnics "
    "rendezvous.prefixes",
    "accepting, tasks of the listener": "_listener _accept",
    "discovery": "rendezvous._channels rendezvous._places rendezvous._announcement "
    "rendezvous._publication rendezvous._claims rendezvous.discovery rendezvous._local_directory "
    "rendezvous._private_directory rendezvous._local_protocol rendezvous._local_connection",
    "CLC messages: codec": "rendezvous.clc rendezvous._clc_base rendezvous._proposal "
    "rendezvous._wire rendezvous._wire_code rendezvous.clc_reader",
    "CLC messages: TCP, waits": "_handshake rendezvous.spinning rendezvous.timers",
    "negotiation": "rendezvous.negotiation rendezvous.client rendezvous.server _stack_core",
    "RMB element, link group": "rendezvous.own_rmbs datapath.rmb "
    "rendezvous.group_connections rendezvous.link_group rendezvous.links rendezvous.rtokens "
    "rendezvous.group_life",
    "calls of the stream, options": "_rdma_stream _rdma_calls _options _option_actions "
    "_option_inherited _urgent _tcp_names _views",
    "end of the TCP connection": "_endpoint _tcp_watch",
    "data, CDC messages, states": "datapath.connection datapath.sender datapath.receiver "
    "datapath.messenger wire.cdc "
    "rendezvous.link rnic.pump rnic.software rnic._softqp rnic._softmr rnic._ring rnic.memory",
}
_PHASE_OF = {
    str(_OURS.joinpath(*module.split(".")).with_suffix(".py")): phase
    for phase, modules in _MODULES.items()
    for module in modules.split()
}


def phase_of(frame: FrameType | None) -> str:
    """The phase that the innermost frame which has one belongs to."""
    while frame is not None:
        phase = _PHASE_OF.get(frame.f_code.co_filename)
        if phase is not None:
            return phase
        if frame.f_code.co_filename.endswith(("cpu.py", "answers.py")):
            return "the workload"
        frame = frame.f_back
    return "Trio's scheduler"


async def sample(transport_name: str, count: int) -> tuple[float, Counter[str]]:
    """Microseconds of a connection, the least of many; how often the program was in each phase."""
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
    """Print the table, the dearest phase first."""
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
