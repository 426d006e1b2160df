"""Runs in guests: other ways to move bytes beside trio_smc, measured in turn.

``python3 -m tests.lab.guest_ways pair ROLE PEER CONTROL``, in each of two guests with rxe0 on
eth0: TCP, the kernel's AF_SMC and rsocket by a program in C, TCP and `trio-smc run` by a Trio
program.  The client also prints what librdmacm's preloaded library does for Python (`preloaded`).

``python3 -m tests.lab.guest_ways loopback``, in one guest whose kernel has the loopback device of
SMC-D: TCP and AF_SMC by either program, and `trio-smc run` with the software RNIC.

Prints a line for each run, and in the end a table for docs/comparison.md.  A connection of another
mode than the row names is an error: smc_diag reports the mode of the kernel's sockets, soft-RoCE
counts the packets of rsocket, which has no fallback, and trio_smc runs with ``--require-smc``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import platform
import re
import select
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import trio

from tests.lab import smc_netlink
from tests.lab.verbs_side import Control
from tests.timing import PATIENCE

PORT: Final = 7900
PYTHON: Final = "/usr/bin/python3"
STREAM_SPEED: Final = (PYTHON, "-m", "tests.lab.stream_speed")
LOAD: Final = {"pair": ("300", "16", "20"), "loopback": ("1000", "128", "50")}
"""Round trips, MiB of each stream, and connections of a run."""
ROUNDS: Final = {"pair": 5, "loopback": 5}
UEID: Final = "TRIO-SMC-LAB"
_SETTINGS: Final = (
    'discovery = "tcp-option"\nhandshake_timeout = 30\nfirst_contact_timeout = 30\n'
    "llc_timeout = 20\ntest_link_timeout = 20\n"
)
"""For two guests: the peer is on another host, and guests are slow."""
_COUNTERS: Final = Path("/sys/class/infiniband/rxe0/ports/1/hw_counters")
_FEW_PACKETS: Final = 40
"""More packets of soft-RoCE than this during a run are a way that uses it."""


class Way(NamedTuple):
    """One way to run one of the two programs.

    Attributes:
      title: of its row.
      base: the title of the way with the same program over TCP.
      mode: what smc_diag must call the connections; None if the kernel's SMC is not used.
      uses_roce: its bytes go over soft-RoCE.
    """

    title: str
    base: str
    command: Sequence[str]
    preload: str | None = None
    mode: str | None = None
    uses_roce: bool = False


def ways(place: str) -> list[Way]:
    """The ways to measure in this place, in the order of the rows."""
    compiled = f"{os.environ['KERNEL']}/socket_speed"
    preload = f"{os.environ['KERNEL']}/smc_sockets"
    in_c, in_trio = "TCP, C program", "TCP, Trio program"
    run = [PYTHON, "-m", "trio_smc.tools", "run", "--require-smc"]
    if place == "loopback":
        ours = [*run, "--", *STREAM_SPEED]
        return [
            Way(in_c, in_c, (compiled, "tcp")),
            Way("SMC-D, C program", in_c, (compiled, "smc"), mode="SMCD"),
            Way(in_trio, in_trio, STREAM_SPEED),
            Way("SMC-D, Trio program", in_trio, STREAM_SPEED, preload=preload, mode="SMCD"),
            Way("`trio-smc run`, Trio program", in_trio, ours),
        ]
    settings = Path("/tmp/ways.toml")
    settings.write_text(_SETTINGS, encoding="utf-8")
    ours = [*run, "--config", str(settings), "--", *STREAM_SPEED]
    return [
        Way(in_c, in_c, (compiled, "tcp")),
        Way("AF_SMC, C program", in_c, (compiled, "smc"), mode="SMCR", uses_roce=True),
        Way("rsocket, C program", in_c, (compiled, "rsocket"), uses_roce=True),
        Way(in_trio, in_trio, STREAM_SPEED),
        Way("`trio-smc run`, Trio program", in_trio, ours, uses_roce=True),
    ]


@contextlib.asynccontextmanager
async def serving(way: Way, port: int) -> AsyncIterator[None]:
    """Run the server's program; at the end wait until it has ended."""
    async with trio.open_nursery() as nursery:
        process: trio.Process = await nursery.start(
            partial(
                trio.run_process, [*way.command, "serve", str(port)], env=_environment(way),
                stdout=subprocess.PIPE,
            )
        )  # fmt: skip
        assert process.stdout is not None
        got = await process.stdout.receive_some()
        assert got == b"ready\n", (way.title, got)
        yield


async def run_client(way: Way, address: str, port: int, place: str) -> dict[str, float]:
    """Run the client's program; return its figures.  Raises AssertionError for another mode."""
    words = [*way.command, "ask", address, str(port), *LOAD[place]]
    modes: set[str] = set()

    async def watch() -> None:
        while True:
            modes.update(_modes())
            await trio.sleep(0.05)

    packets, fallbacks = _packets(), smc_netlink.fallback_counts()
    async with trio.open_nursery() as nursery:
        if way.mode is not None:
            nursery.start_soon(watch)
        done = await trio.run_process(words, env=_environment(way), capture_stdout=True)
        nursery.cancel_scope.cancel()
    if way.mode is not None:
        assert modes == {way.mode}, (way.title, modes)
        assert smc_netlink.fallback_counts() == fallbacks, (way.title, fallbacks)
    if place == "pair":
        sent = _packets() - packets
        assert (sent > _FEW_PACKETS) == way.uses_roce, (way.title, sent)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def _environment(way: Way) -> dict[str, str]:
    return {**os.environ, **({"LD_PRELOAD": way.preload} if way.preload else {})}


def _modes() -> set[str]:
    """Of the open connections of the kernel's SMC sockets."""
    return {each["mode"] for each in smc_netlink.sockets().values() if each["state"] == 1}


def _packets() -> int:
    """Packets that soft-RoCE has sent; 0 without a device."""
    counter = _COUNTERS / "sent_pkts"
    return int(counter.read_text()) if counter.exists() else 0


# --- results ------------------------------------------------------------------------------------

Rounds = dict[str, dict[str, list[float]]]
"""Values by figure and title of a way, one for each round."""
_COLUMNS: Final = {
    "round trip": ("round trip of 64 B", "µs", False),
    "64 KiB writes": ("64 KiB writes", "MiB/s", True),
    "1 MiB writes": ("1 MiB writes", "MiB/s", True),
    "connections": ("connections with one request", "1/s", True),
}
"""Heads of the columns, units, and True if more is better."""


def table(measured: Sequence[Way], rounds: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """The rows: numbers for TCP, and for the others how many times better they are than those."""
    heads = [head for head, _, _ in _COLUMNS.values()]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for way in measured:
        cells = []
        for name, (_, unit, more_is_better) in _COLUMNS.items():
            own, base = rounds[name][way.title], rounds[name][way.base]
            if way.title == way.base:
                cells.append(f"{_short(median(own))} {unit}")
                continue
            pairs = zip(own, base, strict=True)
            ratios = [one / other if more_is_better else other / one for one, other in pairs]
            span = f"{min(ratios):.2f}–{max(ratios):.2f}"
            cells.append(f"**{median(ratios):.2f}** ({span})")
        lines.append(f"| {way.title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# --- the preloaded library of rsocket -----------------------------------------------------------

_PRELOADED: Final = "rsocket/librspreload.so"
"""Part of librdmacm1, below the directory of libraries."""


def preloaded() -> None:
    """With the library preloaded: print what sockets of Python are, and if epoll takes one."""
    with socket.socket() as plain:
        log(f"preloaded: a socket of Python is {os.readlink(f'/proc/self/fd/{plain.fileno()}')}")
    library = ctypes.CDLL("librdmacm.so.1", use_errno=True)
    kinds = {
        "SOCK_STREAM": socket.SOCK_STREAM,
        "SOCK_STREAM | SOCK_CLOEXEC": socket.SOCK_STREAM | socket.SOCK_CLOEXEC,
    }
    for name, kind in kinds.items():
        number = library.rsocket(socket.AF_INET, kind, 0)
        result = "works" if number >= 0 else errno.errorcode[ctypes.get_errno()]
        log(f"preloaded: rsocket(AF_INET, {name}, 0): {result}")
    # The C library's function, as a program in C calls it.
    number = ctypes.CDLL(None).socket(socket.AF_INET, socket.SOCK_STREAM, 0)
    log(f"preloaded: a socket of a program in C is {os.readlink(f'/proc/self/fd/{number}')}")
    with select.epoll() as epoll:
        try:
            epoll.register(number)
        except OSError as error:
            log(f"preloaded: epoll refuses it: {errno.errorcode[error.errno or 0]}")
        else:
            log("preloaded: epoll takes it")


def run_preloaded() -> None:
    """Run `preloaded` in a process with the library."""
    [library] = Path("/usr/lib").glob(f"*/{_PRELOADED}")
    words = [PYTHON, "-m", "tests.lab.guest_ways", "preloaded"]
    subprocess.run(words, env={**os.environ, "LD_PRELOAD": str(library)}, check=True)


def about(place: str) -> str:
    """Guests, kernel and versions of the measurement."""
    librdmacm = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Version}", "librdmacm1"],
        capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    versions = [
        f"Linux {platform.release()}", f"Python {platform.python_version()}",
        f"trio {metadata.version('trio')}",
        *([f"librdmacm {librdmacm}"] if place == "pair" else []),
    ]  # fmt: skip
    found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    guests = "two guests, each" if place == "pair" else "one guest"
    processors = "a processor" if os.cpu_count() == 1 else f"{os.cpu_count()} processors"
    return (
        f"{guests} with {processors} ({found[1] if found else 'unknown'}), "
        f"{', '.join(versions)}; {ROUNDS[place]} interleaved rounds"
    )


def log(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


async def measure_pair(role: str, peer: str, control_peer: str) -> None:
    control = await Control.connect(role, control_peer, PATIENCE)
    rounds: Rounds = defaultdict(lambda: defaultdict(list))
    measured = ways("pair")
    for way, port in _turns(measured, "pair"):
        with trio.fail_after(PATIENCE):
            if role == "server":
                async with serving(way, port):
                    await control.swap()
                continue
            await control.swap()
            _record(rounds, way, await run_client(way, peer, port, "pair"))
    if role == "client":
        _report(measured, rounds, "pair")
    log(f"{role}: ok ways")


async def measure_loopback() -> None:
    # Version 2 of SMC, which the loopback device needs, asks for a name in common.
    smc_netlink.ueid(UEID)
    rounds: Rounds = defaultdict(lambda: defaultdict(list))
    measured = ways("loopback")
    for way, port in _turns(measured, "loopback"):
        with trio.fail_after(PATIENCE):
            async with serving(way, port):
                _record(rounds, way, await run_client(way, "127.0.0.1", port, "loopback"))
    _report(measured, rounds, "loopback")
    log("ok ways")


def _turns(measured: Sequence[Way], place: str) -> Iterator[tuple[Way, int]]:
    """All ways in turn, round after round; each time with a port of its own."""
    for number, way in enumerate(list(measured) * ROUNDS[place], PORT + 1):
        yield way, number


def _record(rounds: Rounds, way: Way, figures: Mapping[str, float]) -> None:
    log(f"{way.title}: " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))
    for name, value in figures.items():
        rounds[name][way.title].append(value)


def _report(measured: Sequence[Way], rounds: Rounds, place: str) -> None:
    log(about(place))
    for line in table(measured, rounds).splitlines():
        log(f"table: {line}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["pair", role, peer, control_peer]:
            if role == "client":
                run_preloaded()
            trio.run(measure_pair, role, peer, control_peer)
        case ["preloaded"]:
            preloaded()
        case ["loopback"]:
            trio.run(measure_loopback)
        case _:
            sys.exit(__doc__)
