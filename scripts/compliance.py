"""List the tests for each requirement of SMC-R in docs/compliance.md and docs/compliance-v2.md.

    python -m scripts.compliance [--check]

The requirements of RFC 7609 are in `tests/requirements.toml`; tests name them with the marker
``rfc``.  Those of version 2 are in `tests/requirements_v2.toml`; the marker is ``v2``.
``--check`` writes nothing; the exit code is 1 if a marker names an unknown requirement, if a
requirement has no test, or if a page is out of date.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
LEVELS = ("must", "should")
SOURCES = ("seen", "tried", "read", "ours")


class Page(NamedTuple):
    """A page of requirements.

    Fields:
      requirements: the data file.
      path: the page.
      marker: of the tests.
      title, intro: the beginning of the page.
      differs: the specification or implementation from which trio_smc differs.
    """

    requirements: Path
    path: Path
    marker: str
    title: str
    intro: tuple[str, ...]
    differs: str


RFC = Page(
    ROOT / "tests" / "requirements.toml",
    ROOT / "docs" / "compliance.md",
    "rfc",
    "Compliance with RFC 7609",
    (
        "The requirements of the RFC, in our own words, and the tests that verify them.  What the",
        "RFC leaves open is not listed.  [Socket options](socket-options.md) has the socket",
        "options.  SMC-R version 2 has [a page of its own](compliance-v2.md).",
    ),
    "the RFC",
)
VERSION_2 = Page(
    ROOT / "tests" / "requirements_v2.toml",
    ROOT / "docs" / "compliance-v2.md",
    "v2",
    "Compliance with SMC-R version 2",
    (
        "The requirements of version 2 beyond [RFC 7609](compliance.md), and the tests that verify",
        "them.  No RFC has them.  They are the rules of Linux 6.12, the implementation that is",
        "deployed; the column `source` says how each is known:",
        "",
        "- **seen**: between two stock kernels.  The messages are in `tests/golden`, as",
        "  `kernel_v2_messages.json` and `kernel-v2-two-links.pcapng`;",
        "- **tried**: a stock kernel answered this way to messages that were made for it;",
        "  [interop.md](interop.md) lists what is tested against a kernel regularly;",
        "- **read**: in Linux's sources, `net/smc/smc_clc.c`, `smc_llc.c` and `af_smc.c`;",
        "- **ours**: no message shows it, or trio_smc is stricter.",
        "",
        "Everything else is as in version 1: CDC messages, failover, cursors, the TCP option.",
    ),
    "Linux",
)
PAGES = (RFC, VERSION_2)


class Requirement(NamedTuple):
    """One requirement.

    Fields:
      id: section and number: "2.2.1/3".
      level: "must" or "should".
      text: in our own words.
      differs: why trio_smc differs, if it does; the tests verify what it does.
      source: how it is known, one of `SOURCES`; "" for the RFC.
    """

    id: str
    level: str
    text: str
    differs: str = ""
    source: str = ""


class Section(NamedTuple):
    """One section with its requirements."""

    number: str
    title: str
    requirements: list[Requirement]


def read(text: str) -> list[Section]:
    """Parse the data file.  Raises ValueError: it is not well formed."""
    sections = []
    for number, table in tomllib.loads(text).items():
        title = table.pop("title", None)
        if not isinstance(title, str):
            raise ValueError(f"section {number} has no title")
        requirements = []
        for name, entry in table.items():
            more = entry if isinstance(entry, dict) else {}
            differs, source = more.pop("differs", ""), more.pop("source", "")
            if source and source not in SOURCES:
                raise ValueError(f"{number}/{name}: {source!r} is none of {SOURCES}")
            if not name.isdigit() or not isinstance(entry, dict) or len(entry) != 1:
                raise ValueError(f"{number}/{name} is not a numbered demand with one level")
            ((level, demand),) = entry.items()
            if level not in LEVELS or not isinstance(demand, str):
                raise ValueError(f"{number}/{name}: {level!r} is neither of {LEVELS}")
            requirements.append(Requirement(f"{number}/{name}", level, demand, differs, source))
        sections.append(Section(number, title, requirements))
    return sections


class _Collector:
    """A pytest plugin that notes the marker of every test."""

    def __init__(self) -> None:
        self.tests: dict[str, set[str]] = defaultdict(set)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            for page in PAGES:
                for marker in item.iter_markers(page.marker):
                    for name in marker.args:
                        self.tests[str(name)].add(item.nodeid.split("[")[0])


def collect(paths: Iterable[str] = ("tests",)) -> dict[str, set[str]]:
    """Collect the tests that name each requirement.  Raises RuntimeError: pytest finds errors."""
    collector = _Collector()
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = pytest.main(
            [
                "--collect-only",
                "-q",
                "-p",
                "no:cacheprovider",
                f"--rootdir={ROOT}",
                f"-c{ROOT / 'pyproject.toml'}",
                *paths,
            ],
            plugins=[collector],
        )
    if code != pytest.ExitCode.OK:
        raise RuntimeError(f"the tests cannot be collected:\n{output.getvalue()[-2000:]}")
    return dict(collector.tests)


def problems(sections: Iterable[Section], tests: Mapping[str, set[str]]) -> list[str]:
    """Return the problems: one line each."""
    demands = {each.id: each for section in sections for each in section.requirements}
    found = [
        f"{name} is no requirement: {', '.join(sorted(tests[name]))}"
        for name in sorted(set(tests) - set(demands))
    ]
    found += [
        f"{each.id} has no test ({each.level}): {each.text}"
        for each in demands.values()
        if each.id not in tests
    ]
    return found


def page(sections: Iterable[Section], tests: Mapping[str, set[str]], about: Page = RFC) -> str:
    """The text of a page."""
    sections = list(sections)
    demands = [each for section in sections for each in section.requirements]
    kept = [each for each in demands if not each.differs]
    covered = sum(each.id in tests for each in kept)
    lines = [
        f"# {about.title}",
        "",
        *about.intro,
        f"`make compliance` makes this page from `tests/{about.requirements.name}` and the tests'",
        "markers.",
        "",
        f"{covered} of {len(kept)} requirements have a test.  In {len(demands) - len(kept)} more",
        f"trio_smc differs from {about.differs}; each has its reason, and its tests verify what",
        "trio_smc does instead.",
    ]
    for section in sections:
        lines += ["", f"## {section.number} {section.title}", ""]
        known = any(each.source for each in demands)
        lines += ["| id | level | requirement |" + " source |" * known + " tests |"]
        lines += ["|---|---|---|" + "---|" * known + "---|"]
        for each in section.requirements:
            names = "<br>".join(f"`{_short(name)}`" for name in sorted(tests.get(each.id, ())))
            text = each.text.replace("|", "\\|")
            if each.differs:
                text += f" **Differs:** {each.differs}"
            source = f" {each.source} |" * known
            lines.append(f"| {each.id} | {each.level} | {text} |{source} {names or '**none**'} |")
    return "\n".join(lines) + "\n"


def _short(name: str) -> str:
    return name.removeprefix("tests/").replace(".py::", ": ").replace("::", ": ")


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description="which tests cover what SMC-R demands")
    parser.add_argument("--check", action="store_true", help="write nothing, report problems")
    arguments = parser.parse_args()
    pages = {about: read(about.requirements.read_text()) for about in PAGES}
    everything = [section for sections in pages.values() for section in sections]
    tests = collect()
    found = problems(everything, tests)
    for about, sections in pages.items():
        text = page(sections, tests, about)
        if not arguments.check:
            about.path.write_text(text)
        elif not about.path.exists() or about.path.read_text() != text:
            found.append(f"{about.path.relative_to(ROOT)} is out of date: run `make compliance`")
    for line in found:
        print(line)
    count = sum(len(section.requirements) for section in everything)
    print(f"compliance: {count} requirements, {len(found)} problems")
    return 1 if arguments.check and found else 0


if __name__ == "__main__":
    sys.exit(main())
