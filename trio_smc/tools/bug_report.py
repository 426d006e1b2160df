"""The content of a bug report: versions, settings, processes, reasons, events, kernel, devices.

`collect` makes the files, and `archive` packs them.  Nothing secret is collected: no data of
connections, no command lines, no environment variables except the paths in `_VARIABLES`, no keys.
The files contain addresses, names of interfaces and paths of directories.

The answers of processes and the files of the kernel are untrusted: `tools.client` checks the
answers, each file of the system is read up to a limit, and every text is escaped in JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import io
import json
import os
import platform
import resource
import stat
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import trio_smc
from trio_smc import FallbackReason, Settings
from trio_smc._base.reasons import Fallback
from trio_smc._base.regular_file import read_regular_file
from trio_smc.tools.client import Snapshot
from trio_smc.tools.settings import described

__all__ = ["PARTS", "File", "archive", "collect"]

PARTS: Final = (
    "statistics", "connections", "link_groups", "rnics", "listeners", "settings", "events",
)  # fmt: skip
"""The parts of the control protocol that a report has."""
_FOLDER: Final = "trio-smc-report"
_MOST_ITEMS: Final = 2000
"""Items of one list in the report.  Chosen: a bound on its size."""
_LONGEST: Final = 1 << 16
"""Bytes of a file of the kernel.  Chosen."""
_PACKAGES: Final = (
    "trio", "anyio", "httpcore", "httpx", "prometheus-client", "rich", "pyverbs", "uvloop",
)  # fmt: skip
_VARIABLES: Final = ("TRIO_SMC_CONFIG", "TRIO_SMC_DIRECTORY", "XDG_RUNTIME_DIR")
_KERNEL_FILES: Final = (
    "/proc/sys/vm/overcommit_memory", "/proc/sys/net/smc/smcr_max_links_per_lgr",
    "/proc/sys/net/smc/smcr_max_conns_per_lgr", "/proc/sys/net/ipv4/ip_local_port_range",
    "/proc/sys/net/core/somaxconn", "/proc/sys/user/max_user_namespaces",
    "/sys/fs/cgroup/memory.max", "/proc/meminfo",
)  # fmt: skip
_MODULES: Final = ("smc", "smc_diag", "rdma_rxe", "ib_core", "mlx5_ib", "siw")
_LIMITS: Final = ("NOFILE", "MEMLOCK", "NPROC", "AS")


class File(NamedTuple):
    """One file of the report.

    Attributes:
      name: the name in the archive.
      content: a phrase that describes it.
      data: the bytes.
    """

    name: str
    content: str
    data: bytes


def collect(
    settings: Settings, snapshots: Sequence[Snapshot], problems: Sequence[str],
    devices: Sequence[object],
) -> list[File]:  # fmt: skip
    """Make the files of the report.

    Args:
      settings: those of a new program.
      snapshots: the processes, with `PARTS`.
      problems: a sentence for each process that sent no valid answer.
      devices: the ports of RDMA devices, as dataclasses.
    """
    processes = [_process(each) for each in snapshots]
    events = [{"pid": s.pid, "stack": s.stack, "events": s.events} for s in snapshots]
    return [
        _json("versions.json", "trio_smc, Python, libraries", _versions()),
        _json("settings.json", "settings of a new program, with their origins",
              {"settings": described(settings),
               "environment": {name: os.environ.get(name) for name in _VARIABLES}}),
        _json("processes.json", "settings, counters, connections, link groups and RNICs of each",
              processes),
        _json("events.json", "the last events of each process", events),
        _json("reasons.json", "reasons for TCP that occurred, with remedies", _reasons(snapshots)),
        _json("silent.json", "processes that sent no valid answer", list(problems)),
        _json("directory.json", "owner and mode of the private directory",
              _directory(settings.config.private_directory())),
        _json("kernel.json", "kernel, modules and limits", _kernel()),
        _json("devices.json", "RDMA devices and network interfaces",
              {"ports": [dataclasses.asdict(each) for each in devices],  # type: ignore[call-overload]
               "interfaces": _names("/sys/class/net")}),
    ]  # fmt: skip


def archive(files: Sequence[File]) -> bytes:
    """The files as a compressed tar archive."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", format=tarfile.PAX_FORMAT) as tar:
        for each in files:
            entry = tarfile.TarInfo(f"{_FOLDER}/{each.name}")
            entry.size, entry.mode, entry.mtime = len(each.data), 0o600, int(time.time())
            tar.addfile(entry, io.BytesIO(each.data))
    return packed.getvalue()


def _json(name: str, content: str, value: Any) -> File:
    return File(name, content, json.dumps(value, indent=1, ensure_ascii=True).encode() + b"\n")


def _process(snapshot: Snapshot) -> dict[str, Any]:
    """A snapshot without the command line, whose arguments may be secret, and without events."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(snapshot):
        if field.name not in ("program", "events", "drain"):
            value = getattr(snapshot, field.name)
            if isinstance(value, list) and len(value) > _MOST_ITEMS:
                found[f"{field.name}_omitted"] = len(value) - _MOST_ITEMS
                value = value[:_MOST_ITEMS]
            found[field.name] = value
    return found


def _versions() -> dict[str, Any]:
    return {
        "trio_smc": trio_smc.__version__,
        "compiled": trio_smc.__compiled__,
        "software_rnic": trio_smc.SoftRnic.variant,
        "python": sys.version,
        "implementation": platform.python_implementation(),
        "gil": getattr(sys, "_is_gil_enabled", lambda: True)(),
        "packages": dict(_packages()),
    }


def _packages() -> Iterator[tuple[str, str | None]]:
    for name in _PACKAGES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, None


def _reasons(snapshots: Sequence[Snapshot]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    known = {each.value for each in FallbackReason}
    for snapshot in snapshots:
        for each in snapshot.statistics.get("fallbacks") or ():
            name = each["reason"]
            if name in known:
                why = Fallback.local(FallbackReason(name))
                found.setdefault(name, {"message": why.message, "remedy": why.remedy, "count": 0})
                found[name]["count"] += each["count"]
    return found


def _directory(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"path": str(path), "user": os.geteuid(), "groups": os.getgroups()}
    try:
        status = os.lstat(path)
    except OSError as error:
        return {**found, "error": error.strerror}
    return {
        **found,
        "owner": status.st_uid,
        "group": status.st_gid,
        "mode": f"{stat.S_IMODE(status.st_mode):04o}",
        "is_directory": stat.S_ISDIR(status.st_mode),
    }


def _kernel() -> dict[str, Any]:
    system = os.uname()
    loaded = {line.split()[0] for line in _read("/proc/modules").splitlines() if line}
    return {
        "system": system.sysname,
        "release": system.release,
        "version": system.version,
        "machine": system.machine,
        "processors": os.cpu_count(),
        "modules": [name for name in _MODULES if name in loaded],
        "files": {path: _read(path).strip() for path in _KERNEL_FILES},
        "limits": {
            name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}")) for name in _LIMITS
        },
        "cgroup": _read("/proc/self/cgroup").strip(),
    }


def _read(path: str) -> str:
    with contextlib.suppress(OSError, ValueError):
        return read_regular_file(path, _LONGEST).decode(errors="replace")
    return ""


def _names(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))[:_MOST_ITEMS]
    except OSError:
        return []
