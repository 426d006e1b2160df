"""The results of each measured machine: a file in ``benchmarks/machines`` for each processor and
version of Python.

`make bench ARGS="--machine"` and `make bench ARGS="--programs --machine"` write the results of this
machine there; `make performance` shows the ranges over all machines in README and on the pages.
`make bench` compares with the machine that has the same processor and Python, because ratios differ
much more between those than from run to run.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

import trio

import trio_smc
from benchmarks.report import Comparison, Earlier

__all__ = [
    "DIRECTORY", "Kind", "earlier", "load", "path_of", "plain_name", "save", "this_machine",
    "title",
]  # fmt: skip

DIRECTORY: Final = Path(__file__).with_name("machines")
Kind = Literal["programs", "transports"]
PROCESSORS: Final = Path("/proc/cpuinfo")
CACHES: Final = Path("/sys/devices/system/cpu/cpu0/cache")


def this_machine() -> dict[str, Any]:
    """Processor, number of processors, caches of one, kernel, Python, Trio, and the variant of the
    software RNIC."""
    return {
        "processor": _processor(),
        "processors": os.cpu_count(),
        "caches": _caches(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "trio": trio.__version__,
        "variant": trio_smc.SoftRnic.variant,
    }


def _processor() -> str:
    """The name of the processor.  On ARM64 the kernel knows only numbers, and lscpu the names."""
    found = re.search(r"^model name\s*: (.+)$", PROCESSORS.read_text(), re.MULTILINE)
    if found is None:
        try:
            shown = subprocess.run(
                ["lscpu"], env={**os.environ, "LC_ALL": "C"},
                capture_output=True, text=True, check=True,
            ).stdout  # fmt: skip
        except (OSError, subprocess.CalledProcessError):
            shown = ""
        found = re.search(r"^ *Model name: *(\S.*)$", shown, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or "unknown"


def _caches() -> dict[str, str]:
    """Sizes of the first processor's caches.  Virtual machines may show caches without sizes."""
    found = {}
    for index in sorted(CACHES.glob("index*")):
        with contextlib.suppress(FileNotFoundError):
            level, kind, size = (
                (index / name).read_text().strip() for name in ("level", "type", "size")
            )
            found[f"L{level} {kind.lower()}"] = size
    return found


def plain_name(processor: str) -> str:
    """The name of a processor for a file."""
    plain = re.sub(r"\((r|tm)\)| processor| cpu|@.*", "", processor.lower())
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")


def title(machine: Mapping[str, Any]) -> str:
    """The processor and the version of Python, such as "AMD EPYC, Python 3.11"."""
    return f"{machine['processor']}, Python {_minor(machine)}"


def _minor(machine: Mapping[str, Any]) -> str:
    major, minor, *_ = machine["python"].split(".")
    return f"{int(major)}.{int(minor)}"


def path_of(machine: Mapping[str, Any], directory: Path = DIRECTORY) -> Path:
    """The file of the machines with the processor and the version of Python of ``machine``."""
    return directory / f"{plain_name(machine['processor'])}-python-{_minor(machine)}.json"


def load(directory: Path = DIRECTORY) -> list[dict[str, Any]]:
    """The contents of all files, ordered by their names.

    Raises ValueError: a file is not one of `save`.
    """
    contents = [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]
    for content in contents:
        if not isinstance(content, dict) or "processor" not in content.get("machine", {}):
            raise ValueError("a file without a machine")
    return contents


def earlier(
    kind: Kind, *, pinned: bool, directory: Path = DIRECTORY
) -> tuple[Mapping[str, Earlier], str]:
    """The ratios of the machine with the processor and the Python of this one, and a sentence about
    it."""
    machine = this_machine()
    path = path_of(machine, directory)
    content = json.loads(path.read_text()) if path.exists() else {}
    part = content.get(kind, {}).get(_placed(pinned))
    if part is None:
        return {}, f"no earlier results of this kind of machine: {title(machine)}"
    found = {
        name: Earlier(ratio=ratio, least=least, most=most)
        for name, (ratio, least, most) in part["ratios"].items()
    }
    return found, f"before: {title(content['machine'])}, {path.name}"


def _placed(pinned: bool) -> str:
    return "pinned" if pinned else "not pinned"


def save(kind: Kind, comparisons: Sequence[Comparison], directory: Path = DIRECTORY) -> Path:
    """Write the ratios of this machine; rows that were not measured now keep their values."""
    machine = this_machine()
    path = path_of(machine, directory)
    content = json.loads(path.read_text()) if path.exists() else {}
    content["machine"] = machine
    for each in comparisons:
        part = content.setdefault(kind, {}).setdefault(_placed(each.about["pinned"]), {})
        part["about"] = {
            name: each.about[name] for name in ("runs", "rounds", "seconds", "load_before")
        }
        part.setdefault("ratios", {}).update(_ratios(each))
    directory.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return path


def _ratios(comparison: Comparison) -> dict[str, list[float]]:
    found = {}
    for metric in comparison.metrics:
        for name in comparison.transports(metric):
            each = comparison.ratios(metric, name)
            found[f"{metric.name} | {name}"] = [
                round(value, 3) for value in (median(each), min(each), max(each))
            ]
    return found
