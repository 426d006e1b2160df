"""Write the matrix of docs/conformance from the reports of `make conform` and `make interop`.

    python -m scripts.conform_matrix [--check]

Reads build/conform and build/interop, and writes docs/conformance/matrix.md, and for each check
that a Linux kernel has failed a page in docs/conformance/linux, with its capture.  The reasons are
in scripts/conform_findings.toml; a failed check without a reason is an error.

--check   only compare the reasons with the pages.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scripts.conform import REPORTS, ROOT
from scripts.conform_findings import Finding, findings

__all__ = ["Column", "main"]

PAGES = ROOT / "docs" / "conformance"
LAB = ROOT / "build" / "interop"
_MOST_LINES = 60
"""Lines of a ladder or of messages on a page; the capture has all."""


class Column(NamedTuple):
    """One implementation in one role and version.

    Attributes:
      name: of the implementation.
      version: of SMC-R.
      role: of the implementation.
      checks: by ID, as in the reports.
    """

    name: str
    version: int
    role: str
    checks: dict[str, dict[str, Any]]

    @property
    def words(self) -> str:
        """For a headline."""
        return f"{self.name}, version {self.version}, {self.role}"


def columns() -> Iterator[Column]:
    """All reports that there are; the parts of a run in the lab are put together."""
    for directory, version in ((REPORTS, 1), (REPORTS / "version-2", 2)):
        for role in ("server", "client"):
            path = directory / f"{role}.json"
            if path.exists():
                yield Column("trio_smc, software RNIC", version, role, _checks([path]))
    names = {"ours": "trio_smc, soft-RoCE"}
    found: dict[tuple[str, int, str], list[Path]] = {}
    for path in sorted(LAB.glob("conform-*-v[12]-*-*/*.json")):
        _, target, speaks, role, _ = path.parent.name.split("-", 4)
        name = names.get(target, f"Linux {target}")
        found.setdefault((name, int(speaks[1:]), role), []).append(path)
    for (name, number, role), paths in sorted(found.items(), reverse=True):
        yield Column(name, number, role, _checks(paths))


def _checks(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    return {
        each["id"]: each
        for path in paths
        for each in json.loads(path.read_text())["checks"]
        if each["verdict"] != "not applicable"
    }


def matrix(found: Sequence[Column], reasons: dict[str, Finding]) -> str:
    """The page with the matrix."""
    areas = sorted({name.partition("/")[0] for column in found for name in column.checks})
    lines = [
        "# The matrix",
        "",
        "Passed checks of all checks that apply, for each area; then the checks that have failed,",
        "or differ. An empty cell was not run. `python -m scripts.conform_matrix` makes this page",
        "from the reports of `make conform` and `make interop`.",
        "",
        "| implementation | version | role | " + " | ".join(areas) + " |",
        "|---" * (3 + len(areas)) + "|",
    ]
    for column in found:
        cells = []
        for area in areas:
            verdicts = Counter(
                each["verdict"]
                for name, each in column.checks.items()
                if name.startswith(f"{area}/")
            )
            cells.append(f"{verdicts['pass']}/{verdicts.total()}" if verdicts else "")
        words = (column.name, str(column.version), column.role, *cells)
        lines.append("| " + " | ".join(words) + " |")
    lines += ["", "## Failed, or different", ""]
    lines += ["| check | implementation | verdict | why |", "|---|---|---|---|"]
    for name in sorted({name for column in found for name in column.checks}):
        for verdict in ("fail", "differs", "inconclusive"):
            where = [
                column.words
                for column in found
                if column.checks.get(name, {}).get("verdict") == verdict
            ]
            if where:
                details = (
                    column.checks[name]["detail"] for column in found if column.words in where
                )
                why = reasons[name].title if name in reasons else f"`{next(details)}`"
                if any(each.startswith("Linux") for each in where) and verdict == "fail":
                    why = f"[{why}](linux/{reasons[name].page}.md)" if name in reasons else why
                lines.append(f"| `{name}` | {'<br>'.join(where)} | {verdict} | {why} |")
    return "\n".join(lines) + "\n"


def linux_page(finding: Finding, found: Sequence[Column]) -> str:
    """The page about a check that a Linux kernel has failed."""
    seen = [(column, column.checks[finding.id]) for column in found if finding.id in column.checks]
    first = seen[0][1]
    lines = [
        f"# {finding.title[0].upper()}{finding.title[1:]}",
        "",
        f"Check `{finding.id}`: {first['requirement']}",
        "",
        finding.reason.strip(),
        "",
        "| kernel | version of SMC-R | role | observation |",
        "|---|---|---|---|",
        *(
            f"| {column.name} | {column.version} | {column.role} | `{each['detail']}` |"
            for column, each in seen
        ),
        "",
        "The ladder, as the suite sees it (`->` is sent by the suite):",
        "",
        "```text",
        *_cut(first["ladder"]),
        "```",
        "",
        "The messages:",
        "",
        "```text",
        *_cut(first.get("messages", [])),
        "```",
        "",
        f"The capture is {{download}}`{finding.page}.pcapng`.",
        "",
    ]
    return "\n".join(lines)


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
        "Debian's own module, version 1 with one that accepts soft-RoCE's GIDs. The places in the",
        "source are those of Linux 6.12.",
        "",
        "```{toctree}",
        ":maxdepth: 1",
        "",
        *(each.page for each in known),
        "```",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only compare reasons and pages")
    given = parser.parse_args(arguments)
    reasons = findings()
    linux = PAGES / "linux"
    if given.check:
        pages = {path.stem for path in linux.glob("*.md")} - {"index"}
        unknown = sorted(pages - {each.page for each in reasons.values()})
        print(*(f"{page}: no reason" for page in unknown), sep="\n", end="\n" if unknown else "")
        return int(bool(unknown))
    found = list(columns())
    linux.mkdir(parents=True, exist_ok=True)
    kernels = [column for column in found if column.name.startswith("Linux")]
    failed = dict.fromkeys(
        name
        for column in kernels
        for name, each in column.checks.items()
        if each["verdict"] == "fail"
    )
    missing = [name for name in failed if name not in reasons]
    print(*(f"no reason: {name}" for name in missing), sep="\n", end="\n" if missing else "")
    known = [reasons[name] for name in sorted(failed) if name in reasons]
    for each in known:
        where = [
            column for column in kernels if column.checks.get(each.id, {}).get("verdict") == "fail"
        ]
        (linux / f"{each.page}.md").write_text(linux_page(each, where))
        capture = base64.b64decode(where[0].checks[each.id]["capture"])
        (linux / f"{each.page}.pcapng").write_bytes(capture)
    (linux / "index.md").write_text(linux_index(known))
    (PAGES / "matrix.md").write_text(matrix(found, reasons))
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
