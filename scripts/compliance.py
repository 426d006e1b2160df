"""Which tests cover what RFC 7609 demands: writes docs/compliance.md.

    python -m scripts.compliance [--check]

The demands are in `tests/requirements.toml`; tests name those they cover by the marker ``rfc``.
``--check`` writes nothing; the exit code is 1 when a marker names an unknown requirement, when a
requirement has no test, or when the page is out of date.
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
REQUIREMENTS = ROOT / "tests" / "requirements.toml"
PAGE = ROOT / "docs" / "compliance.md"
LEVELS = ("must", "should")


class Requirement(NamedTuple):
    """One demand of the RFC.

    Fields:
      id: section and number: "2.2.1/3".
      level: "must" or "should".
      text: in our own words.
      differs: why this software does otherwise, if it does; the tests hold what it does.
    """

    id: str
    level: str
    text: str
    differs: str = ""


class Section(NamedTuple):
    """One section of the RFC with its demands."""

    number: str
    title: str
    requirements: list[Requirement]


def read(text: str) -> list[Section]:
    """Parse the data file.  Raises ValueError when it is not in order."""
    sections = []
    for number, table in tomllib.loads(text).items():
        title = table.pop("title", None)
        if not isinstance(title, str):
            raise ValueError(f"section {number} has no title")
        requirements = []
        for name, entry in table.items():
            differs = entry.pop("differs", "") if isinstance(entry, dict) else ""
            if not name.isdigit() or not isinstance(entry, dict) or len(entry) != 1:
                raise ValueError(f"{number}/{name} is not a numbered demand with one level")
            ((level, demand),) = entry.items()
            if level not in LEVELS or not isinstance(demand, str):
                raise ValueError(f"{number}/{name}: {level!r} is neither of {LEVELS}")
            requirements.append(Requirement(f"{number}/{name}", level, demand, differs))
        sections.append(Section(number, title, requirements))
    return sections


class _Collector:
    """A pytest plugin that notes the marker of every test."""

    def __init__(self) -> None:
        self.tests: dict[str, set[str]] = defaultdict(set)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            for marker in item.iter_markers("rfc"):
                for name in marker.args:
                    self.tests[str(name)].add(item.nodeid.split("[")[0])


def collect(paths: Iterable[str] = ("tests",)) -> dict[str, set[str]]:
    """The tests that name each requirement.  Raises RuntimeError when pytest finds errors."""
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
    """What is wrong: one line each."""
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


def page(sections: Iterable[Section], tests: Mapping[str, set[str]]) -> str:
    """The text of docs/compliance.md."""
    sections = list(sections)
    demands = [each for section in sections for each in section.requirements]
    kept = [each for each in demands if not each.differs]
    covered = sum(each.id in tests for each in kept)
    lines = [
        "# Compliance with RFC 7609",
        "",
        "What the RFC demands, in our own words, and the tests that hold it.  What it leaves open",
        "is not listed.  What each socket option does is in [Socket options](socket-options.md).",
        "`make compliance` makes this page from `tests/requirements.toml` and the tests' markers.",
        "",
        f"{covered} of {len(kept)} requirements have a test.  In {len(demands) - len(kept)} more",
        "we differ from the RFC, each with its reason; their tests hold what we do instead.",
    ]
    for section in sections:
        lines += ["", f"## {section.number} {section.title}", ""]
        lines += ["| id | level | requirement | tests |", "|---|---|---|---|"]
        for each in section.requirements:
            names = "<br>".join(f"`{_short(name)}`" for name in sorted(tests.get(each.id, ())))
            text = each.text.replace("|", "\\|")
            if each.differs:
                text += f" **Differs:** {each.differs}"
            lines.append(f"| {each.id} | {each.level} | {text} | {names or '**none**'} |")
    return "\n".join(lines) + "\n"


def _short(name: str) -> str:
    return name.removeprefix("tests/").replace(".py::", ": ").replace("::", ": ")


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description="which tests cover what RFC 7609 demands")
    parser.add_argument("--check", action="store_true", help="write nothing, report what is wrong")
    arguments = parser.parse_args()
    sections = read(REQUIREMENTS.read_text())
    tests = collect()
    found = problems(sections, tests)
    text = page(sections, tests)
    if not arguments.check:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        found.append(f"{PAGE.relative_to(ROOT)} is out of date: run `make compliance`")
    for line in found:
        print(line)
    count = sum(len(section.requirements) for section in sections)
    print(f"compliance: {count} requirements, {len(found)} problems")
    return 1 if arguments.check and found else 0


if __name__ == "__main__":
    sys.exit(main())
