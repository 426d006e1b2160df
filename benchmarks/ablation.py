"""Measure what each heuristic gains: `python -m benchmarks.ablation`.

Every variant is a copy of the package in which one heuristic is switched off, or a number has
another value.  The unmodified programs of `benchmarks.unmodified` run under `trio-smc run` of each
copy, in the same rounds, so that a disturbance of the machine affects all of them.  A ratio above 1
means that the program is faster without the heuristic.  In the variant "nothing" none is switched
off: its ratios show how far two copies of the same code differ.  A heuristic stays if at least one
row is slower without it by 3 %, by more than the spread of that row, and by more than "nothing"
(docs/decisions.md has the table).
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks import progress, report, unmodified
from benchmarks.processes import Failed

__all__ = ["VARIANTS", "Edit", "copies"]

_ROOT: Final = Path(__file__).parent.parent
_BASE: Final = "all heuristics"


@dataclass(frozen=True, slots=True)
class Edit:
    """One change of the source of a variant.

    file: below ``trio_smc``.
    now: a text that occurs in the file exactly once.
    then: its replacement.
    """

    file: str
    now: str
    then: str


_ACCEPT: Final = "AcceptSpin(_ACCEPT_SPINS * config.spin)"
_DISCOURAGED: Final = "if not self.discouraged:\n            return True"
_BACKOFF: Final = "if self._yield_backoff:\n            self._yield_backoff -= 1"
_SKIPPED: Final = 'them takes as long as a short spin."""\n        self._note_failures(1)'
_ANNOUNCE: Final = "_MAX_UNANNOUNCED = 64 * 1024"
_RING: Final = "_SOFTWARE_RECEIVE_BUFFER = 4 << 20"
_USABLE: Final = "if each == wanted), usable[0])"
_NO_BUSY_SOLO: Final = Edit("rnic/solo.py", "return reads >= _MIN_READS and", "return False and")

VARIANTS: Final[dict[str, list[Edit]]] = {
    "nothing": [],
    "no spin": [
        Edit("rnic/waits.py", "            seconds, max_failures", "            0.0, max_failures"),
    ],
    "no stretched spin": [
        Edit("rnic/spinner.py", "if self._near_misses == self._waits_to_stretch:", "if False:"),
    ],
    "spins always": [
        Edit("rnic/spinner.py", _DISCOURAGED, "if True:\n            return True"),
    ],
    "skipped spins do not count": [
        Edit("rnic/spinner.py", _SKIPPED, _SKIPPED.replace("self._note_failures(1)", "")),
    ],
    "no yield": [
        Edit("rnic/spinner.py", _BACKOFF, "if True:\n            pass"),
    ],
    "no solo mode": [
        Edit("rnic/solo.py", "return self.streak > SOLO_AFTER_WAITS", "return False"),
        _NO_BUSY_SOLO,
    ],
    "no solo mode while busy": [_NO_BUSY_SOLO],
    "no shared drain": [
        Edit("streams/parking.py", "if pump.woken and waiter is _READER:", "if False:"),
        Edit("streams/parking.py", "if not pump.woken:\n", "if True:\n"),
    ],
    "no spin in handshakes": [
        Edit("stack/runtime.py", "Spinner(_HANDSHAKE_SPINS * config.spin,", "Spinner(0.0,"),
    ],
    "no spin in accept": [
        Edit("connecting/listener.py", _ACCEPT, "AcceptSpin(0.0)"),
    ],
    "deferred while the peer sleeps": [
        Edit("datapath/sender.py", "asleep = messenger.peer_asleep[0]", "asleep = 0"),
    ],
    **{
        f"words of {variant}": [Edit("rnic/words.py", _USABLE, _USABLE.replace("usable[0]", given))]
        for variant, given in (("x86-64", "usable[-2]"), ("socket", "usable[-1]"))
    },
    "heap trimmed at once": [
        Edit("host/heap.py", "bytes(size)", "pass"),
    ],
    **{
        f"announces {size} KiB": [
            Edit("datapath/sender.py", _ANNOUNCE, f"_MAX_UNANNOUNCED = {size} * 1024")
        ]
        for size in (16, 32, 128, 256, 2048)
    },
    **{
        f"ring of {size} KiB": [
            Edit("config/config.py", _RING, f"_SOFTWARE_RECEIVE_BUFFER = {size} << 10")
        ]
        for size in (512, 1024, 2048, 8192)
    },
}  # fmt: skip


@contextlib.contextmanager
def copies(names: list[str]) -> Iterator[dict[str, Path]]:
    """A copy of the repository's code for each of these variants.

    Raises ValueError: an edit does not fit the source.
    """
    with tempfile.TemporaryDirectory(prefix="trio-smc-ablation-") as directory:
        found = {}
        for number, name in enumerate(names):
            tree = Path(directory, str(number))
            # Compiled modules would hide the edits.  The native module belongs to both sides.
            ignored = shutil.ignore_patterns("__pycache__", "*.cpython-*.so")
            for package in ("trio_smc", "benchmarks"):
                shutil.copytree(_ROOT / package, tree / package, ignore=ignored)
            for edit in VARIANTS[name]:
                path = tree / "trio_smc" / edit.file
                source = path.read_text()
                if source.count(edit.now) != 1:
                    raise ValueError(f"{name}: {edit.now!r} is not once in {edit.file}")
                path.write_text(source.replace(edit.now, edit.then))
            found[name] = tree
        yield found


def _row(comparison: report.Comparison, names: list[str], index: int) -> list[str]:
    metric = comparison.metrics[index]
    cells = [metric.name, report.short(median(comparison.values(metric, _BASE)))]
    for name in names:
        ratios = comparison.ratios(metric, name)
        cells.append(f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")
    return cells


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ablation", description=__doc__)
    parser.add_argument(
        "--runs", type=int, default=5, help="with processes of their own; default 5"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of each run; default 3")
    parser.add_argument(
        "--seconds", type=float, default=0.2, help="of each measurement; default 0.2"
    )
    parser.add_argument("--workloads", default=",".join(unmodified.WORKLOADS))
    parser.add_argument("--variants", default=",".join(VARIANTS), help="default: all")
    parser.add_argument("--json", type=Path, help="write ratios and all numbers to this file")
    arguments = parser.parse_args()
    names, workloads = arguments.variants.split(","), arguments.workloads.split(",")
    for given, known in (names, VARIANTS), (workloads, unmodified.WORKLOADS):
        if unknown := set(given) - set(known):
            parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    start, load = time.monotonic(), progress.load_before()
    runs = []
    with copies(names) as trees:
        for tree in trees.values():
            # As installed: a process that compiles modules frees large blocks, and then the heap
            # keeps more (`trio_smc.host.heap`).
            compileall.compile_dir(tree, quiet=1)
        transports: dict[str, Path | None] = {_BASE: None, **trees}
        for _ in range(arguments.runs):
            try:
                runs.append(
                    unmodified.measure(
                        workloads, arguments.rounds, arguments.seconds, (None, None), transports
                    )
                )
            except Failed as failure:
                print(failure, file=sys.stderr)
                return 1
    progress.clear()
    comparison = report.Comparison(
        metrics=[each for name in workloads for each in unmodified.WORKLOADS[name].metrics],
        runs=runs,
        base=_BASE,
        about=report.circumstances(
            runs=arguments.runs,
            rounds=arguments.rounds,
            seconds=arguments.seconds,
            pinned=False,
            load=load,
        ),
    )
    rows = [_row(comparison, names, index) for index in range(len(comparison.metrics))]
    print(report.text_of([["", _BASE, *names], *rows], left=1))
    took = time.monotonic() - start
    print(f"{arguments.runs} x {arguments.rounds} rounds, load before {load}, {took:.0f} s in all")
    if arguments.json:
        report.save(arguments.json, [comparison])
    return 0


if __name__ == "__main__":
    sys.exit(main())
