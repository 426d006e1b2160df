"""Write the matrix of docs/conformance from the reports of `make conform` and `make interop`.

    python -m scripts.conform_matrix [--check]

Reads build/conform and build/interop, and writes docs/conformance/results.json, which keeps the
results of earlier runs: a report replaces an area of an implementation, unless it has fewer checks
(a share of them).  From the results it makes docs/conformance/matrix.md, and for each check that a
Linux kernel has failed a page in docs/conformance/linux, with the capture of the newest report.
The reasons are in scripts/conform_findings.toml; a failed check without a reason is an error.

--check   only compare the results with the matrix, and the reasons with the pages.
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scripts.conform import REPORTS, ROOT
from scripts.conform_findings import Finding, findings
from smc_conform.catalogue import all_checks
from smc_conform.registry import Check

__all__ = ["Area", "Column", "main"]

PAGES = ROOT / "docs" / "conformance"
RESULTS = PAGES / "results.json"
LAB = ROOT / "build" / "interop"
_LADDER = "The ladder, as the suite sees it (`->` is sent by the suite):"
_SHOWN = "Ladder, messages and capture are of "
_OPENING = re.compile(r"ms (->|<-) TCP +SMC Proposal( version 2)?")
_ANSWER = re.compile(r"ms (?:->|<-) TCP +SMC Accept( version 2)?")
_QUOTED = re.compile(r"<(.*?)>")
_READ = "tshark --disable-protocol rpcordma -o infiniband.identify_payload:FALSE -r FILE"
_NOT_PASSED = ("fail", "differs", "inconclusive")
_MOST_LINES = 60
"""Lines of a ladder or of messages on a page; the capture has all."""


class Area(NamedTuple):
    """The results of an area of checks.

    Attributes:
      passed, checks: how many have passed, and how many apply.
      others: verdict and detail of the checks that have not passed, by ID.
    """

    passed: int
    checks: int
    others: dict[str, tuple[str, str]]


class Column(NamedTuple):
    """One implementation in one role and version.

    Attributes:
      name: of the implementation.
      version: of SMC-R.
      role: of the implementation.
      areas: the results, by area.
    """

    name: str
    version: int
    role: str
    areas: dict[str, Area]

    @property
    def words(self) -> str:
        """For a headline."""
        return f"{self.name}, version {self.version}, {self.role}"

    @property
    def order(self) -> tuple[bool, bool, list[int], int, bool]:
        """The place in the matrix: trio_smc first, then kernels from the newest on."""
        kernel = self.name.startswith("Linux")
        numbers = [-int(each) for each in self.name.split()[1].split(".")] if kernel else []
        return kernel, "soft-RoCE" in self.name, numbers, self.version, self.role == "client"

    def others(self, verdict: str) -> dict[str, str]:
        """The details of all checks with this verdict, by ID."""
        found = [each for area in self.areas.values() for each in area.others.items()]
        return {name: detail for name, (given, detail) in found if given == verdict}


class Reports(NamedTuple):
    """The reports of an implementation in one role and version; its checks by ID."""

    name: str
    version: int
    role: str
    checks: dict[str, dict[str, Any]]

    def column(self) -> Column:
        """Their results."""
        areas: dict[str, Area] = {}
        for name, each in sorted(self.checks.items()):
            area = areas.get(name.partition("/")[0], Area(0, 0, {}))
            passed = each["verdict"] == "pass"
            if not passed:
                area.others[name] = (each["verdict"], each["detail"])
            areas[name.partition("/")[0]] = Area(area.passed + passed, area.checks + 1, area.others)
        return Column(self.name, self.version, self.role, areas)


def reports() -> Iterator[Reports]:
    """All reports that there are; the parts of a run in the lab are put together."""
    for directory, version in ((REPORTS, 1), (REPORTS / "version-2", 2)):
        for role in ("server", "client"):
            path = directory / f"{role}.json"
            if path.exists():
                yield Reports("trio_smc, software RNIC", version, role, _checks([path]))
    names = {"ours": "trio_smc, soft-RoCE"}
    found: dict[tuple[str, int, str], list[Path]] = {}
    # Of a check in several parts the newest result counts.
    written = LAB.glob("conform-*-v[12]-*-*/*.json")
    for path in sorted(written, key=lambda each: each.stat().st_mtime):
        _, target, speaks, role, _ = path.parent.name.split("-", 4)
        name = names.get(target, f"Linux {target}")
        found.setdefault((name, int(speaks[1:]), role), []).append(path)
    for (name, number, role), paths in found.items():
        yield Reports(name, number, role, _checks(paths))


def _checks(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    return {
        each["id"]: each
        for path in paths
        for each in json.loads(path.read_text())["checks"]
        if each["verdict"] != "not applicable"
    }


def kept_results() -> list[Column]:
    """The results of earlier runs."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    columns = []
    for each in kept:
        areas = {}
        for name, area in each["areas"].items():
            others = {check: (word, detail) for check, (word, detail) in area["others"].items()}
            areas[name] = Area(area["passed"], area["checks"], others)
        columns.append(Column(each["implementation"], each["version"], each["role"], areas))
    return columns


def merged(kept: Iterable[Column], new: Iterable[Column]) -> list[Column]:
    """The results with each area of ``new`` in place of that of ``kept``, if it is no smaller."""
    columns = {(each.name, each.version, each.role): each for each in kept}
    for each in new:
        key = (each.name, each.version, each.role)
        areas = dict(columns[key].areas) if key in columns else {}
        for name, area in each.areas.items():
            if name not in areas or area.checks >= areas[name].checks:
                areas[name] = area
        columns[key] = each._replace(areas=dict(sorted(areas.items())))
    return sorted(columns.values(), key=lambda column: column.order)


def in_json(found: Sequence[Column]) -> str:
    """The text of results.json."""
    rows = [
        {
            "implementation": column.name, "version": column.version, "role": column.role,
            "areas": {name: area._asdict() for name, area in column.areas.items()},
        }
        for column in found
    ]  # fmt: skip
    return json.dumps(rows, indent=1) + "\n"


def matrix(found: Sequence[Column], reasons: dict[str, Finding]) -> str:
    """The page with the matrix."""
    areas = sorted({name for column in found for name in column.areas})
    lines = [
        "# The matrix",
        "",
        "Passed checks of all checks that apply, for each area; then the checks that have failed,",
        "or differ. An empty cell was not run, and in a cell with far fewer checks than others of",
        "its column only a share of them was. `python -m scripts.conform_matrix` makes this page",
        "from the reports of `make conform` and `make interop`; {download}`results.json` has the",
        "results of all runs.",
        "",
        "| implementation | version | role | " + " | ".join(areas) + " |",
        "|---" * (3 + len(areas)) + "|",
    ]
    for column in found:
        cells = [
            f"{column.areas[area].passed}/{column.areas[area].checks}"
            if area in column.areas
            else ""
            for area in areas
        ]
        words = (column.name, str(column.version), column.role, *cells)
        lines.append("| " + " | ".join(words) + " |")
    lines += ["", "## Failed, or different", ""]
    lines += ["| check | implementation | verdict | why |", "|---|---|---|---|"]
    names = {
        name for column in found for area in column.areas.values() for name in area.others
    }  # fmt: skip
    for name in sorted(names):
        for verdict in _NOT_PASSED:
            details = {
                column.words: column.others(verdict)[name]
                for column in found
                if name in column.others(verdict)
            }
            if not details:
                continue
            linux = any(each.startswith("Linux") for each in details)
            if name in reasons and verdict == "fail" and linux:
                why = f"[{reasons[name].title}](linux/{reasons[name].page}.md)"
            elif name in reasons and reasons[name].ours:
                why = reasons[name].title
            else:
                why = f"`{next(iter(details.values()))}`"
            lines.append(f"| `{name}` | {'<br>'.join(details)} | {verdict} | {why} |")
    return "\n".join(lines) + "\n"


def linux_page(
    finding: Finding, found: Sequence[Column], newest: dict[str, Any] | None, run: str, before: str
) -> str:
    """The page about a check that a Linux kernel has failed.

    Args:
      newest: the check in a report; None: no report of a failure is there, and the messages are
        those of the page as it was ``before``.
      run: kernel, version and role of that report.
    """
    check = next(each for each in all_checks() if each.id == finding.id)
    failed = [column for column in found if finding.id in column.others("fail")]
    if newest is None:
        messages = _LADDER + before.partition(_LADDER)[2]
        shown = before.partition(_SHOWN)[2].partition("\n")[0] or _run_of(
            finding.id, messages, failed
        )
    else:
        shown = run + "."
        messages = "\n".join((
            _LADDER,
            "",
            "```text",
            *_cut(newest["ladder"]),
            "```",
            "",
            "The messages:",
            "",
            "```text",
            *_cut(newest.get("messages", [])),
            "```",
            "",
            f"The capture is {{download}}`{finding.page}.pcapng`.",
            "",
        ))  # fmt: skip
    lines = [
        f"# {finding.title[0].upper()}{finding.title[1:]}",
        "",
        f"Check `{finding.id}`, {_document(check)}: {check.requirement}",
        "",
        finding.reason.strip(),
        "",
        "| kernel | version of SMC-R | role | observation |",
        "|---|---|---|---|",
        *(
            f"| {column.name} | {column.version} | {column.role} "
            f"| `{column.others('fail')[finding.id]}` |"
            for column in failed
        ),
        "",
        "Each row again, in [the lab](../../interop.md):",
        "",
        "```text",
        *(_command(check, column) for column in failed),
        "```",
        "",
        f"{_SHOWN}{shown}",
        "",
    ]
    return "\n".join(lines) + "\n" + messages


def _document(check: Check) -> str:
    if check.area == "version2":
        return f"[compliance with version 2](../../compliance-v2.md), section {check.section}"
    return f"RFC 7609, section {check.section}"


def _command(check: Check, column: Column) -> str:
    """The command that runs the check again with the kernel of this column."""
    kernel = column.name.removeprefix("Linux ")
    # Only checks of this part have two RNICs on both sides.
    part = "failover" if "two-rnics" in check.needs and check.area != "failover" else check.id
    words = f"conform kernel {column.role} {column.version} {part}"
    return f"python -m tests.lab.runner --kernel {kernel} {words}"


def _run_of(check: str, messages: str, failed: Sequence[Column]) -> str:
    """The kernels that a ladder without a name may be of: those of its version and role.

    If observations name messages, these are in the ladder.
    """
    opening, answer = _OPENING.search(messages), _ANSWER.search(messages)
    if opening is not None:
        role = "server" if opening[1] == "->" else "client"
        # A Proposal may offer both versions.
        version = 2 if (opening[2] if answer is None else answer[1]) else 1
        failed = [each for each in failed if (each.version, each.role) == (version, role)]
    failed = [
        each
        for each in failed
        if all(quoted in messages for quoted in _QUOTED.findall(each.others("fail")[check]))
    ]
    words = "; ".join(each.words for each in failed)
    return f"{words}." if len(failed) == 1 else f"one of these: {words}."


def _cut(lines: Sequence[str]) -> list[str]:
    if len(lines) <= _MOST_LINES:
        return list(lines)
    return [*lines[:_MOST_LINES], f"... {len(lines) - _MOST_LINES} more lines"]


def linux_index(known: Sequence[Finding]) -> str:
    """The list of the pages."""
    lines = [
        "# What Linux fails",
        "",
        "Each page has the requirement, what the kernel did, the bytes, and a capture. The lab",
        "makes Linux's SMC-R work over soft-RoCE ([interop](../../interop.md)): version 2 with",
        "the module as it comes, version 1 with one that accepts soft-RoCE's GIDs. The places in",
        "the source are those of Linux 6.12. Each row of a table is a run of its own. The bytes on",
        "a page are those of one run, which the page names.",
        "",
        "Read a capture with this command; [bugs of tshark](../../capture.md) need the options:",
        "",
        "```",
        _READ,
        "```",
        "",
        "```{toctree}",
        ":maxdepth: 1",
        "",
        *(each.page for each in known),
        "```",
    ]
    return "\n".join(lines) + "\n"


def checked(reasons: dict[str, Finding]) -> list[str]:
    """The faults of the pages as they are."""
    pages = {path.stem for path in (PAGES / "linux").glob("*.md")} - {"index"}
    wrong = [f"{each}: no reason" for each in sorted(pages - {r.page for r in reasons.values()})]
    if matrix(kept_results(), reasons) != (PAGES / "matrix.md").read_text():
        wrong.append("matrix.md does not have the results of results.json")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only compare, and write nothing")
    given = parser.parse_args(arguments)
    reasons = findings()
    linux = PAGES / "linux"
    if given.check:
        wrong = checked(reasons)
        print(*wrong, sep="\n", end="\n" if wrong else "")
        return int(bool(wrong))
    new = list(reports())
    found = merged(kept_results(), (each.column() for each in new))
    linux.mkdir(parents=True, exist_ok=True)
    kernels = [column for column in found if column.name.startswith("Linux")]
    failed = sorted({name for column in kernels for name in column.others("fail")})
    missing = [name for name in failed if name not in reasons]
    print(*(f"no reason: {name}" for name in missing), sep="\n", end="\n" if missing else "")
    known = [reasons[name] for name in failed if name in reasons]
    for each in known:
        newest, run = next(
            (
                (report.checks[each.id], report.column().words)
                for report in new
                if report.name.startswith("Linux")
                and report.checks.get(each.id, {}).get("verdict") == "fail"
            ),
            (None, ""),
        )
        page = linux / f"{each.page}.md"
        before = page.read_text() if page.exists() else ""
        page.write_text(linux_page(each, kernels, newest, run, before))
        if newest is not None:
            capture = base64.b64decode(newest["capture"])
            page.with_suffix(".pcapng").write_bytes(capture)
    for path in linux.glob("*-*.*"):
        if path.stem not in {each.page for each in known}:
            path.unlink()
    (linux / "index.md").write_text(linux_index(known))
    RESULTS.write_text(in_json(found))
    (PAGES / "matrix.md").write_text(matrix(found, reasons))
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
