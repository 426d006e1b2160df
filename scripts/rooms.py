"""The map of the package: CONTRIBUTING.md's table of rooms and docs/figures/rooms.svg.

    python -m scripts.rooms [--check | --lines COMMIT]

The floors are those of the import contracts in pyproject.toml, which `make lint` checks; the
description of a room is the first line of its docstring.  ``--check`` writes nothing; its exit code
is 1 if the table or the drawing is out of date.  ``--lines`` prints how many lines of code each
room has in COMMIT and in HEAD: lines that are neither blank nor only comments or docstrings.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tarfile
import textwrap
import tokenize
import tomllib
from collections import Counter
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "trio_smc"
PAGE = ROOT / "CONTRIBUTING.md"
FIGURE = ROOT / "docs" / "figures" / "rooms.dot"
BEGIN, END = "<!-- made by `make rooms` -->\n", "<!-- end -->"


class House(NamedTuple):
    """The contracts of kind ``layers``.

    Fields:
      floors: the rooms, the highest floor first.
      inside: for each room with a contract of its own, the floors within it.
    """

    floors: list[list[str]]
    inside: dict[str, list[list[str]]]


def read(text: str) -> House:
    """Read the floors from the text of pyproject.toml.

    Raises:
      ValueError: no contract is about the package itself, or one does not name all rooms.
    """
    found: dict[str, list[list[str]]] = {}
    for contract in tomllib.loads(text)["tool"]["importlinter"]["contracts"]:
        if contract["type"] != "layers":
            continue
        if not contract.get("exhaustive"):
            raise ValueError(f"the contract {contract['id']} does not name all rooms")
        floors = [[room.strip() for room in floor.split("|")] for floor in contract["layers"]]
        for container in contract["containers"]:
            found[container] = floors
    if PACKAGE not in found:
        raise ValueError(f"no contract gives the floors of the rooms of {PACKAGE}")
    floors = found.pop(PACKAGE)
    return House(floors, {name.removeprefix(f"{PACKAGE}."): inner for name, inner in found.items()})


def subject(room: str) -> str:
    """The description of a room ("rendezvous.links"): its docstring's first sentence or line."""
    path = ROOT.joinpath(PACKAGE, *room.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(source.read_text())) or ""
    if not text:
        raise ValueError(f"{source.relative_to(ROOT)} has no docstring")
    return text.splitlines()[0].rstrip(".")


def table(house: House) -> str:
    """The table of CONTRIBUTING.md, the highest floor first."""
    lines = ["| floor | room | what lives there |", "|---|---|---|"]
    for number, rooms in zip(range(len(house.floors), 0, -1), house.floors, strict=True):
        for room in rooms:
            lines.append(f"| {number} | {_link(room)} | {subject(room)} |")
            lines += (
                f"| {number} | {_link(f'{room}.{inner}')} | {subject(f'{room}.{inner}')} |"
                for floor in house.inside.get(room, ())
                for inner in floor
            )
    return "\n".join(lines) + "\n"


def _link(room: str) -> str:
    path = f"{PACKAGE}/{room.replace('.', '/')}"
    return f"`{path}/`" if (ROOT / path).is_dir() else f"`{path}.py`"


def drawing(house: House) -> str:
    """The source of the figure: floors above each other, an arrow from each to the next below."""
    lines = [
        "// Made by `make rooms` from the import contracts in pyproject.toml.",
        "digraph rooms {",
        '    rankdir=TB; bgcolor="transparent"; nodesep=0.3; ranksep=0.2;',
        '    node [shape=box, style="rounded,filled", fillcolor="#eef2fb", color="#5a6b8c",',
        '          fontname="DejaVu Sans", fontsize=11, margin="0.16,0.06"];',
        '    edge [color="#5a6b8c", arrowsize=0.6];',
    ]
    for floor in house.floors:
        lines += (f"    {room} [label=<{_label(house, room)}>];" for room in floor)
    lines += (f"    {{rank=same; {' '.join(floor)}}}" for floor in house.floors)
    for above, below in pairwise(house.floors):
        lines += (f"    {one} -> {other};" for one in above for other in below)
    return "\n".join([*lines, "}"]) + "\n"


def _label(house: House, room: str) -> str:
    """The label of a room, with its floors if a contract has them, otherwise its files."""
    path = ROOT / PACKAGE / room
    files = sorted(each.stem for each in path.glob("*.py") if not each.stem.startswith("__"))
    inner = sorted(f"{each.parent.name}/" for each in path.glob("*/__init__.py"))
    listed = house.inside.get(room) or [files + inner]
    lines = (textwrap.wrap(", ".join(floor), 72) for floor in listed)
    return "<BR/>".join([f"<B>{room}</B>", *chain.from_iterable(lines)])


def page(text: str, made: str) -> str:
    """Return the page with this table.  Raises ValueError: the page has no place for it."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE.name} has no place for the table of rooms")
    return f"{before}{BEGIN}{made}{END}{after}"


_NO_CODE = frozenset(
    {
        tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
)  # fmt: skip


def code_lines(text: str) -> int:
    """Lines of Python code that are neither blank nor only comments or docstrings."""
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in _NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for each in node.body:
                match each:
                    case ast.Expr(value=ast.Constant(value=str())):
                        lines -= {*range(each.lineno, (each.end_lineno or each.lineno) + 1)}
    return len(lines)


def lines_of_rooms(commit: str) -> Counter[str]:
    """The lines of code of each room in a commit."""
    archive = subprocess.run(
        ["git", "archive", commit, PACKAGE], cwd=ROOT, stdout=subprocess.PIPE, check=True
    ).stdout
    found: Counter[str] = Counter()
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for each in files:
            file = files.extractfile(each)
            if file is not None and each.name.endswith(".py"):
                found[each.name.split("/")[1]] += code_lines(file.read().decode())
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m scripts.rooms", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--lines", metavar="COMMIT", help="print the lines of code of each room")
    options = parser.parse_args(arguments)
    if options.lines is not None:
        before, now = lines_of_rooms(options.lines), lines_of_rooms("HEAD")
        for room in sorted(before | now):
            print(f"{room:<12} {before[room]:>7,} {now[room]:>7,}")
        print(f"{'all':<12} {before.total():>7,} {now.total():>7,}")
        return 0
    house = read((ROOT / "pyproject.toml").read_text())
    made = {PAGE: page(PAGE.read_text(), table(house)), FIGURE: drawing(house)}
    stale = [path for path, text in made.items() if path.read_text() != text]
    if options.check:
        for path in stale:
            print(f"{path.name} is out of date: make rooms", file=sys.stderr)
        return 1 if stale else 0
    for path, text in made.items():
        path.write_text(text)
    subprocess.run(["dot", "-Tsvg", "-o", FIGURE.with_suffix(".svg"), FIGURE], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
