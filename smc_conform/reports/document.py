"""A run as plain data, and what differs between two of them."""

from __future__ import annotations

import base64
import json
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from smc_conform import __version__
from smc_conform.registry import Check
from smc_conform.session import Options
from smc_conform.verdicts import Result, Verdict

__all__ = [
    "Document",
    "changes",
    "counts",
    "differences",
    "document",
    "place",
    "read_document",
    "with_captures",
    "with_verdict",
]

Document: TypeAlias = dict[str, Any]
"""The data of a JSON report: "suite", "role", "target", "options" and "checks"."""


def document(options: Options, results: Iterable[tuple[Check, Result]], seconds: float) -> Document:
    """A run as plain data; checks are in the order of their IDs."""
    return {
        "suite": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "role": str(options.role),
        "target": f"{options.host or '*'}:{options.port}",
        "options": {
            "rnics": list(options.rnics), "version": options.version, "ueid": options.ueid,
            "eye_catcher": options.eye_catcher, "patience": options.patience, "seed": options.seed,
            "timers": options.timers, "jobs": options.jobs, "daytime": options.daytime,
            "discard": options.discard, "provides": sorted(options.provides),
        },
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "checks": [_entry(check, result) for check, result in sorted(results, key=_by_id)],
    }  # fmt: skip


def _by_id(pair: tuple[Check, Result]) -> tuple[str, str, int]:
    check, _ = pair
    return check.area, check.section, int(check.id.rpartition("-")[2])


def _entry(check: Check, result: Result) -> dict[str, Any]:
    return {
        "id": check.id,
        "requirement": check.requirement,
        "verdict": str(result.verdict),
        "detail": result.detail,
        "seconds": round(result.seconds, 3),
        "ladder": list(result.ladder),
        "messages": list(result.messages),
        "capture": base64.b64encode(result.capture).decode(),
    }


def place(name: str) -> str:
    """Where the requirement of a check is, from its ID: "RFC 7609, A.2.3"."""
    section = name.partition("/")[2].rpartition("-")[0]
    if section.startswith("v2."):
        return f"compliance with version 2, {section[3:]}"
    return f"RFC 7609, {section}"


def with_verdict(run: Document, verdict: Verdict) -> list[dict[str, Any]]:
    """The checks with this verdict, in the order of the documents."""
    found = [each for each in run["checks"] if each["verdict"] == verdict]
    return sorted(found, key=lambda each: _by_place(each["id"]))


def _by_place(name: str) -> tuple[bool, list[tuple[bool, int, str]], int, str]:
    section, _, number = name.partition("/")[2].rpartition("-")
    parts = [
        (not part.isdecimal(), int(part) if part.isdecimal() else 0, part)
        for part in section.split(".")
    ]
    return section.startswith("v2."), parts, int(number), name


def counts(run: Document) -> dict[str, int]:
    """The number of checks for each verdict, in the order of `Verdict`."""
    found = Counter(each["verdict"] for each in run["checks"])
    return {str(verdict): found[str(verdict)] for verdict in Verdict}


def with_captures(run: Document, directory: Path) -> Document:
    """Write the ladder and the capture of each check into files, and name them in the report."""
    directory.mkdir(parents=True, exist_ok=True)
    checks = []
    for each in run["checks"]:
        each = dict(each)
        if each["capture"]:
            name = each["id"].replace("/", "-")
            (directory / f"{name}.txt").write_text("\n".join(each["ladder"]) + "\n")
            path = directory / f"{name}.pcapng"
            path.write_bytes(base64.b64decode(each["capture"]))
            each["file"] = str(path)
        checks.append(each)
    return {**run, "checks": checks}


def read_document(path: Path) -> Document:
    """Read a JSON report.

    Raises:
      ValueError: the file is no report of this suite.
      OSError: the file cannot be read.
    """
    try:
        run = json.loads(path.read_text())
        ids = [each["id"] for each in run["checks"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a report of smc-conform: {error}") from None
    if len(set(ids)) != len(ids):
        raise ValueError(f"{path}: a check occurs twice")
    found: Document = run
    return found


def differences(old: Document, new: Document) -> Iterator[tuple[str, object, object]]:
    """The settings in which two reports differ: a name, and both values."""
    for name, was, now in (
        ("role", old.get("role"), new.get("role")),
        ("version", *(each.get("options", {}).get("version") for each in (old, new))),
    ):
        if was != now:
            yield name, was, now


def changes(old: Document, new: Document) -> Iterator[tuple[str, str, str, str]]:
    """For each check whose verdict has changed: its ID, both verdicts and the new detail.

    A check that one of the reports does not have has the verdict "absent" there.
    """
    before: Mapping[str, Any] = {each["id"]: each for each in old["checks"]}
    after: Mapping[str, Any] = {each["id"]: each for each in new["checks"]}
    for name in dict.fromkeys([*before, *after]):
        first, second = before.get(name), after.get(name)
        was = first["verdict"] if first else "absent"
        now = second["verdict"] if second else "absent"
        if was != now:
            yield name, was, now, (second or {}).get("detail", "")
