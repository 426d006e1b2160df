"""Counts that may only fall: words that the style avoids, and private names in tests.

    python -m scripts.ratchets            compare the tree with scripts/ratchets.json
    python -m scripts.ratchets --write    write lower counts into it; a higher one is refused
    python -m scripts.ratchets --show KIND PLACE    list what is counted

The file holds one count for each kind and place. A place is a room of `trio_smc`, another folder,
or a page. A place without an entry has the count 0. `make lint` runs the comparison.

| kind | what is counted |
|---|---|
| words | lines with "who", "whoever", "nobody", "somebody" or "anybody", also inside a name |
| openings | docstrings, also of constants, that begin with "Whether", "What" or "Who" |
| pronouns | comments that begin with "It" or "Its", also behind code |
| verbs | functions that are named by a verb of speech or of the body, such as "tell" or "rouse" |
| variables | assignments of variables, and parameters, that are named so |
| titles | tests whose names contain "what" or "stranger" |
| private | uses and imports of a private name of another class or module, in a test file |

A test file includes the programs that it holds as strings. All text files count except pictures,
measurements and licences. "nobody" as the name of a user does not count.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import re
import subprocess
import sys
import textwrap
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_suffix(".json")
KINDS = ("words", "openings", "pronouns", "verbs", "variables", "titles", "private")
# Rooms of trio_smc that contain rooms.
_DEEP = frozenset({"rendezvous", "rnic", "tools"})
# These files have the words because they are about them, or are no text of this project.
_EXEMPT = frozenset(
    {"scripts/ratchets.py", "tests/test_ratchets.py", "LICENSE-APACHE", "LICENSE-MIT"}
)
_NO_TEXT = frozenset({".bin", ".json", ".pcap", ".pcapng", ".png", ".svg", ".xz"})
# Unlike ``\b``, this also finds the words of a name such as ``test_who_waits``.
_WORDS = re.compile(r"(?<![A-Za-z])(who(ever)?|nobody|somebody|anybody)(?![A-Za-z])", re.IGNORECASE)
# The user of this name: quoted, as a constant, or in names such as `is_nobody`.
_USER = re.compile(r"\bNOBODY\b|([\"'`])nobody\1|\w*(is|of|as)_nobody\b")
_OPENINGS = re.compile(r"(Whether|What|Who)\b")
_PRONOUNS = re.compile(r"#\s*its?\b", re.IGNORECASE)
_PRIVATE = re.compile(r"_[A-Za-z]")
_SETTERS = {"getattr", "setattr", "delattr", "hasattr", "attrgetter"}
# Documented names that begin with an underscore: of named tuples, `ctypes`, `os` and `sys`.
_PUBLIC = {"_asdict", "_exit", "_fields", "_is_gil_enabled", "_make", "_replace"}
_SPEECH = {"tell", "tells", "told", "say", "says", "said", "hear", "hears", "heard", "ask", "asks"}
_BODY = {"stir", "stirs", "rouse", "rouses", "quieten", "doze", "dozes", "hang"}
_VERBS = _SPEECH | _BODY | {"asked", "asking", "saying", "telling", "hearing"}
_TITLES = {"what", "whatever", "stranger", "strangers"}


class Place(NamedTuple):
    """One counted line."""

    kind: str
    where: str
    path: str
    line: int
    text: str


def tracked_files() -> list[str]:
    """The text files of the repository, new ones included."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    names = set(done.stdout.decode().split("\0")) - _EXEMPT - {""}
    return sorted(
        name for name in names if Path(name).suffix not in _NO_TEXT and (ROOT / name).is_file()
    )


def place_of(path: str) -> str:
    """The room, folder or page that a file counts for."""
    parts = path.split("/")
    if path.endswith(".md") or len(parts) == 1:
        return path
    if parts[0] == "trio_smc":
        depth = 3 if parts[1] in _DEEP and len(parts) > 3 else 2
        return "/".join(parts[:depth])
    return "/".join(parts[: min(2, len(parts) - 1)])


def count(path: str, text: str) -> Iterator[Place]:
    """Everything in one file that is counted."""
    where, lines = place_of(path), text.splitlines()
    for number, line in enumerate(lines, 1):
        if _WORDS.search(_USER.sub("", line)):
            yield Place("words", where, path, number, line)
    for number in _pronouns(path, text):
        yield Place("pronouns", where, path, number, lines[number - 1])
    if path.endswith(".py"):
        tree = ast.parse(text)
        for node in ast.walk(tree):
            for kind, number in _in_node(node):
                yield Place(kind, where, path, number, lines[number - 1])
        if path.startswith("tests/"):
            for number in _private(tree, frozenset()):
                yield Place("private", path, path, number, lines[number - 1])


def _pronouns(path: str, text: str) -> Iterator[int]:
    """The lines with a comment that begins with a pronoun."""
    if path.endswith(".py"):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT and _PRONOUNS.match(token.string):
                yield token.start[0]
    elif not path.endswith(".md"):
        for number, line in enumerate(text.splitlines(), 1):
            if re.search(r"(^|\s)" + _PRONOUNS.pattern, line, re.IGNORECASE):
                yield number


def _private(node: ast.AST, own: frozenset[str]) -> Iterator[int]:
    """The lines that use a private name, but for ``own``, those of the classes around them."""
    if isinstance(node, ast.ClassDef):
        own |= set(_defined_in(node))
    for path in _names_used(node):
        if any(_is_private(name, own) for name in path.split(".")):
            yield node.lineno  # type: ignore[attr-defined]
    if isinstance(node, ast.Constant):
        for _ in _private(_program_in(node.value), frozenset()):
            yield node.lineno
    for child in ast.iter_child_nodes(node):
        yield from _private(child, own)


def _names_used(node: ast.AST) -> Iterator[str]:
    """The names, or paths of names, that a node uses of other objects and modules."""
    match node:
        case ast.Attribute(value=ast.Name(id="self" | "cls")):
            pass
        case ast.Attribute(attr=name):
            yield name
        case ast.Subscript(
            value=ast.Call(func=ast.Name(id="vars")), slice=ast.Constant(value=str(name))
        ):
            yield name
        case ast.Call():
            yield from filter(None, [_attribute_named_by(node)])
        case ast.ImportFrom(module=package, names=names):
            yield from (each.name for each in names if not _is_module(package, each.name))


def _is_private(name: str, own: frozenset[str]) -> bool:
    return bool(_PRIVATE.match(name)) and name not in own | _PUBLIC


def _attribute_named_by(call: ast.Call) -> str | None:
    """The attribute named by ``setattr(x, "_y", z)`` or ``monkeypatch.setattr("x._y", z)``, or the
    path of ``attrgetter("_x.y")``."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name not in _SETTERS or not call.args:
        return None
    if name == "attrgetter":
        match call.args[0]:
            case ast.Constant(value=str(path)):
                return path
    for argument in call.args[:2]:
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            return argument.value.rpartition(".")[2]
    return None


def _program_in(value: object) -> ast.Module:
    """The program in a string; an empty one if there is none.  A line of prose is no program."""
    if isinstance(value, str) and re.search(r"^\s*(import|from) \w", value, re.MULTILINE):
        with contextlib.suppress(SyntaxError):
            return ast.parse(textwrap.dedent(value))
    return ast.Module(body=[], type_ignores=[])


def _is_module(package: str | None, name: str) -> bool:
    """True if ``name``, imported from ``package``, is a module of this repository."""
    path = ROOT.joinpath(*(package or "").split("."), name)
    return path.is_dir() or path.with_suffix(".py").exists()


def _defined_in(node: ast.ClassDef) -> Iterator[str]:
    """The methods of a class, and the attributes that these set."""
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            yield each.name
        elif (
            isinstance(each, ast.Attribute)
            and isinstance(each.ctx, ast.Store)
            and isinstance(each.value, ast.Name)
            and each.value.id == "self"
        ):
            yield each.attr


def _in_node(node: ast.AST) -> Iterator[tuple[str, int]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        words = set(node.name.split("_"))
        if words & _VERBS:
            yield "verbs", node.lineno
        if "test" in words and words & _TITLES:
            yield "titles", node.lineno
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) if (
            set(name.lower().split("_")) & _VERBS
        ):
            yield "variables", node.lineno
    for documented, text in _documentation(node):
        if _OPENINGS.match(text.strip()):
            yield "openings", documented.lineno


def _documentation(node: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """The docstring of a module, class or function, and the strings below its constants."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return
    before: ast.stmt | None = None
    for each in node.body:
        if isinstance(before, ast.Assign | ast.AnnAssign | None):
            match each:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield each, text
        before = each


def counts() -> dict[str, dict[str, int]]:
    """The counts of the tree: kind, place, number."""
    found: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for place in _places():
        found[place.kind][place.where] += 1
    return {kind: dict(sorted(found[kind].items())) for kind in KINDS}


def _places() -> Iterator[Place]:
    for path in tracked_files():
        yield from count(path, (ROOT / path).read_text())


def differences(
    allowed: dict[str, dict[str, int]], found: dict[str, dict[str, int]]
) -> tuple[list[str], list[str]]:
    """Compare two sets of counts. Returns what is higher than allowed, and what is lower."""
    higher, lower = [], []
    for kind in KINDS:
        before, now = allowed.get(kind, {}), found.get(kind, {})
        for where in sorted({*before, *now}):
            old, new = before.get(where, 0), now.get(where, 0)
            if new > old:
                higher.append(f"{kind} in {where}: {new}, at most {old} are allowed")
            elif new < old:
                lower.append(f"{kind} in {where}: {new}, {old} are allowed")
    return higher, lower


def main(arguments: list[str]) -> int:
    """Return the exit code: 0 if the counts are those of the list."""
    parser = argparse.ArgumentParser(description="Compare counts that may only fall.")
    parser.add_argument("--write", action="store_true", help="write lower counts into the list")
    parser.add_argument("--show", nargs=2, metavar=("KIND", "PLACE"), help="list the places")
    options = parser.parse_args(arguments)
    if options.show:
        for place in _places():
            if place.kind == options.show[0] and place.where.startswith(options.show[1]):
                print(f"{place.path}:{place.line}: {place.text.strip()}")
        return 0
    found = counts()
    allowed = json.loads(LIST.read_text()) if LIST.exists() else found
    higher, lower = differences(allowed, found)
    for line in higher:
        print(line, file=sys.stderr)
    if higher:
        print("python -m scripts.ratchets --show KIND PLACE lists the places", file=sys.stderr)
        return 1
    if options.write:
        LIST.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    for line in lower:
        print(f"{line}: python -m scripts.ratchets --write", file=sys.stderr)
    return 1 if lower else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
