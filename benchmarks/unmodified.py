"""Unmodified programs over TCP and under `trio-smc run`: `python -m benchmarks --programs`.

The programs are in `benchmarks.programs`.  Each has a server's and a client's process for either
transport; a round runs each workload over one right after the other, in alternating order.  Under
`trio-smc run` a connection is SMC-R or fails (``--require-smc``), except in the workload that
measures learned short connections: there the command has its default options, and the connections
end up as TCP.  Copies of the repository may be measured beside this one, in the same rounds: a
compiled build, or variants of the code (`benchmarks.ablation`).
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import progress, report
from benchmarks.processes import Worker, interrupts_deferred, terminated_together
from benchmarks.programs.common import HOST
from benchmarks.transports import BASE
from benchmarks.workloads import Metric

__all__ = [
    "COMPILED",
    "RUN",
    "WORKLOADS",
    "Workload",
    "clients",
    "in_turn",
    "keys_of",
    "measure",
    "working_directory",
]

RUN: Final = "trio-smc run"
COMPILED: Final = "trio-smc run, compiled"
_COMMAND: Final = (sys.executable, "-m", "trio_smc.tools", "run")
_STRICTLY: Final = (*_COMMAND, "--require-smc", "--")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One line of the table.

    program: the module of `benchmarks.programs`.
    metrics: the time or rate that a user sees, and the processor time of both ends.
    under: the command that makes its connections SMC-R.
    tls: True if the server needs certificates.
    """

    program: str
    metrics: tuple[Metric, Metric]
    under: Sequence[str] = _STRICTLY
    tls: bool = False


def _workload(program: str, name: str, unit: str, **settings: Any) -> Workload:
    per = {"MiB/s": "s per GiB"}.get(unit, "µs each")
    return Workload(
        program=program,
        metrics=(
            Metric(name=name, unit=unit, smaller_is_better=unit == "µs"),
            Metric(name=f"processor time, {name}", unit=per, smaller_is_better=True),
        ),
        **settings,
    )


WORKLOADS: Final = {
    "echo": _workload("plain", "Trio echo, 64 B", "µs"),
    "echo-10": _workload("plain", "Trio echo, 64 B, 10 connections", "1/s"),
    "echo-1ms": _workload("plain", "Trio echo, 1 ms between requests", "µs"),
    "echo-10ms": _workload("plain", "Trio echo, 10 ms between requests", "µs"),
    "stream-4k": _workload("plain", "Trio stream, 4 KiB writes", "MiB/s"),
    "stream-64k": _workload("plain", "Trio stream, 64 KiB writes", "MiB/s"),
    "stream-1m": _workload("plain", "Trio stream, 1 MiB writes", "MiB/s"),
    "tls-echo": _workload("plain", "TLS echo, 64 B", "µs", tls=True),
    "tls-stream": _workload("plain", "TLS stream, 64 KiB writes", "MiB/s", tls=True),
    "anyio": _workload("over_anyio", "AnyIO echo, 64 B", "µs"),
    "anyio-64k": _workload("over_anyio", "AnyIO echo, 64 KiB", "µs"),
    "websocket": _workload("websocket", "websocket echo, 64 B", "µs"),
    "websocket-64k": _workload("websocket", "websocket echo, 64 KiB", "µs"),
    "json": _workload("web", "JSON over HTTP/1", "1/s", tls=True),
    "json-10": _workload("web", "JSON over HTTP/1, 10 connections", "1/s", tls=True),
    "json-50": _workload("web", "JSON over HTTP/1, 50 connections", "1/s", tls=True),
    "http2": _workload("web", "JSON over HTTP/2 and TLS", "µs", tls=True),
    "download": _workload("web", "download of 256 MiB", "MiB/s", tls=True),
    "upload": _workload("web", "upload of 256 MiB", "MiB/s", tls=True),
    "file": _workload("files", "file of 256 MiB, read and sent", "MiB/s"),
    "file-write": _workload("files", "file of 256 MiB, received and written", "MiB/s"),
    "file-hash": _workload("files", "file of 256 MiB, received and hashed", "MiB/s"),
    "proxy": _workload("files", "file of 256 MiB through a copying proxy", "MiB/s"),
    "arrays": _workload("messages", "numpy arrays of 1 MiB, made anew", "MiB/s"),
    "pickles": _workload("messages", "pickles of 1 to 100 KiB", "µs"),
    "answers": _workload("messages", "requests with answers of 10 KiB", "µs"),
    "chat": _workload("messages", "chat with 20 clients, lines read", "1/s"),
    "queue": _workload("jobs", "queue with 8 worker processes, jobs", "1/s"),
    "short": _workload("plain", "connection with one request", "µs"),
    "short-learned": _workload(
        "plain", "connection with one request, learned to be short", "µs", under=(*_COMMAND, "--")
    ),
}


def keys_of(word: str) -> list[str]:
    """The keys of `WORKLOADS` that a user means: by the key, or by a name that a table prints."""
    return [
        key
        for key, workload in WORKLOADS.items()
        if word in (key, *(metric.name for metric in workload.metrics))
    ]


@contextlib.contextmanager
def working_directory(names: Iterable[str]) -> Iterator[Path]:
    """Yield a directory for the programs of some workloads.

    It has the certificates that `benchmarks.programs.common` describes, if a workload needs them.
    """
    with tempfile.TemporaryDirectory(prefix="trio-smc-benchmark-") as name:
        directory = Path(name)
        if any(WORKLOADS[each].tls for each in names):
            _make_certificates(directory)
        yield directory


def _make_certificates(directory: Path) -> None:
    import trustme  # other workloads run without it

    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(directory / "ca.pem"))
    certificate = authority.issue_cert(HOST)
    certificate.private_key_and_cert_chain_pem.write_to_path(str(directory / "server.pem"))


@contextlib.contextmanager
def clients(
    program: str,
    under: Sequence[str],
    directory: Path,
    cores: tuple[int | None, int | None],
    transports: Mapping[str, Path | None],
) -> Iterator[dict[str, Worker]]:
    """Start a program's client for each transport, each with a server of its own."""
    module = f"benchmarks.programs.{program}"
    here, there = cores
    workers: list[Worker] = []
    found = {}
    with contextlib.ExitStack() as stack, terminated_together(workers):
        for transport, tree in transports.items():
            words = () if transport == BASE else under
            with interrupts_deferred():
                server = Worker(module, "serve", str(directory), core=there, under=words, tree=tree)
                workers.append(stack.enter_context(server))
            reply = json.dumps(server.answer())
            with interrupts_deferred():
                client = Worker(
                    module, "client", str(directory), reply, core=here, under=words, tree=tree
                )
                workers.append(stack.enter_context(client))
            found[transport] = client
            client.answer()  # wait until it is ready: its start would disturb the measurement
        yield found


def measure(
    names: Sequence[str],
    rounds: int,
    seconds: float,
    cores: tuple[int | None, int | None],
    transports: Mapping[str, Path | None],
) -> report.Numbers:
    """Run all rounds once, one program after the other.

    Args:
      names: keys of `WORKLOADS`.
      seconds: length of each measurement, except for whole files.
      cores: the cores of client and server; None: not pinned.
      transports: the columns of the table, and the copy of this repository whose code each runs;
        None: this one.  `BASE` runs over TCP, the others under `trio-smc run`.

    Raises Failed.
    """
    numbers: dict[str, dict[str, list[float]]] = {
        metric.name: {transport: [] for transport in transports}
        for name in names
        for metric in WORKLOADS[name].metrics
    }
    programs = dict.fromkeys((WORKLOADS[name].program, WORKLOADS[name].under) for name in names)
    with working_directory(names) as directory:
        for program, under in programs:
            ours = [
                name
                for name in names
                if (WORKLOADS[name].program, WORKLOADS[name].under) == (program, under)
            ]
            with clients(program, under, directory, cores, transports) as workers:
                for name, transport, values in in_turn(
                    workers, ours, rounds, seconds, progress.show
                ):
                    for metric, value in zip(WORKLOADS[name].metrics, values, strict=True):
                        numbers[metric.name][transport].append(value)
    return numbers


def in_turn(
    workers: Mapping[str, Worker],
    names: Sequence[str],
    rounds: int,
    seconds: float,
    begin: Callable[[str], object] | None = None,
) -> Iterator[tuple[str, str, tuple[float, float]]]:
    """Run each workload over each transport in every round, in alternating order.

    Yields the name of the workload, the transport, and the values of the workload's metrics, as
    soon as they are measured.

    Args:
      workers: the clients of one program, as from `clients`, by transport.
      names: keys of `WORKLOADS` with that program.
      seconds: length of each measurement, except for whole files.
      begin: called with the round and the name before each workload.
    """
    for number in range(rounds):
        for name in names:
            if begin is not None:
                begin(f"round {number + 1} of {rounds}: {WORKLOADS[name].metrics[0].name}")
            for transport in list(workers)[:: -1 if number % 2 else 1]:
                reply = workers[transport].call(
                    workload=name.removesuffix("-learned"), seconds=seconds
                )
                first, second = reply["values"]
                yield name, transport, (first, second)
