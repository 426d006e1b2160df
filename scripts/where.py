"""Name the tests of a module.

    python -m scripts.where trio_smc/rnic/pump.py [FILE ...]     (make where FILE=...)

The import statements decide. A test file is listed if it imports the module, or a name from it
(`trio_smc.Config` counts as well), by itself or through helper modules of `tests`. If fewer than
three test files do, the text decides as well: those that name the module, or something that the
module defines, follow, the ones in the folder of the same room first. If these are few as well, the
tests of the modules that import FILE follow. The number behind a test file is how often its
text names the module or something that the module defines; the file with the module's name comes
first, then the one with the highest number. `--all` lists more than the first fifteen.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FAILED = 2
_FEW = 3
"""Test files that import a module: below this number the text of tests is searched as well."""
_SHOWN = 15
# Names that each command module defines.
_EVERYWHERE = frozenset({"HELP", "NAME", "add_arguments", "main", "run"})


@functools.cache
def imports_of_the_tree() -> Imports:
    """The import statements, read once."""
    return Imports()


def module_name(path: Path) -> str:
    """The dotted name of a file below the repository."""
    parts = path.resolve().relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class Imports:
    """The import statements of `trio_smc`, `scripts` and `tests`, by the module imported."""

    def __init__(self) -> None:
        rooms = ("trio_smc", "scripts", "tests")
        files = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
        self.files = {module_name(path): path for path in files}
        self._public = dict(self._re_exported())
        self._importers: dict[str, set[str]] = {}
        self._words: dict[str, Counter[str]] = {}
        for name, path in self.files.items():
            for imported in self._imported_by(path):
                self._importers.setdefault(imported, set()).add(name)

    def importers(self, name: str) -> set[str]:
        """The modules with an import statement for module `name`."""
        return self._importers.get(name, set())

    def named(self, test: str, words: set[str]) -> int:
        """How often the text of a test file has one of the words."""
        if test not in self._words:
            self._words[test] = Counter(re.findall(r"\w+", self.files[test].read_text()))
        return sum(self._words[test][word] for word in words)

    def _re_exported(self) -> Iterator[tuple[str, str]]:
        """Each public name of the package, with the module that defines it."""
        for node in ast.walk(ast.parse(self.files["trio_smc"].read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in self.files:
                yield from ((alias.asname or alias.name, node.module) for alias in node.names)

    def _imported_by(self, path: Path) -> Iterator[str]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self.files)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    yield from self._module_of(node.module, alias.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                yield from self._module_of(node.value.id, node.attr)

    def _module_of(self, module: str, name: str) -> Iterator[str]:
        """The module that `from module import name` leads to, if it is one of ours."""
        if f"{module}.{name}" in self.files:
            yield f"{module}.{name}"
        elif module == "trio_smc" and name in self._public:
            yield self._public[name]
        elif module in self.files:
            yield module


def tests_of(name: str, imports: Imports) -> set[str]:
    """The test files that import module `name`, by themselves or through helpers of `tests`."""
    waiting, seen, found = [name], {name}, set()
    while waiting:
        for user in imports.importers(waiting.pop()) - seen:
            seen.add(user)
            if not user.startswith("tests."):
                continue
            if _is_test(user):
                found.add(user)
            else:
                waiting.append(user)
    return found


def _is_test(name: str) -> bool:
    return name.startswith("tests.") and name.rpartition(".")[2].startswith("test_")


def defined_in(path: Path) -> set[str]:
    """The names of classes, functions and constants that a module defines at its top."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("__")}


def ranked(name: str, imports: Imports) -> list[tuple[int, Path]]:
    """The test files of module `name`, each with how often it names what the module defines."""
    words = {word for word in defined_in(imports.files[name]) if word not in _EVERYWHERE}
    words.add(name.rpartition(".")[2])
    importing = tests_of(name, imports)
    tests = set(importing)
    if len(importing) < _FEW:
        tests |= {each for each in imports.files if _is_test(each) and imports.named(each, words)}
    if len(tests) < _FEW:
        users = {each for each in imports.importers(name) if not each.startswith("tests.")}
        tests |= {test for user in users for test in tests_of(user, imports)}
    last = name.rpartition(".")[2]
    room = name.split(".")[1] if "." in name else ""

    def place(row: tuple[int, str]) -> tuple[bool, bool, bool, int, str]:
        count, test = row
        return (
            test.rpartition(".")[2] != f"test_{last}",
            test not in importing,
            not importing.issuperset(tests) and not test.startswith(f"tests.{room}."),
            -count,
            test,
        )

    counted = [(imports.named(test, words), test) for test in tests]
    return [(count, imports.files[test]) for count, test in sorted(counted, key=place)]


def main(arguments: list[str]) -> int:
    """Return the exit code: 0 if each file has tests, 1 if one has none, 2 for a wrong path."""
    parser = argparse.ArgumentParser(description="Name the tests of a module.")
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path)
    parser.add_argument("--all", action="store_true", help="list more than the first 15")
    options = parser.parse_args(arguments)
    imports = imports_of_the_tree()
    outcome = 0
    for path in options.files:
        name = module_name(path) if path.resolve().is_relative_to(ROOT) else ""
        if name not in imports.files or not name.startswith("trio_smc"):
            print(f"{path}: no module of trio_smc", file=sys.stderr)
            return FAILED
        rows = ranked(name, imports)
        if not rows:
            print(f"{path}: no test imports or names it", file=sys.stderr)
            outcome = 1
        shown = rows if options.all else rows[:_SHOWN]
        for count, test in shown:
            print(f"{test.relative_to(ROOT)}  {count}")
        if len(rows) > len(shown):
            print(f"{path}: {len(rows) - len(shown)} more with --all", file=sys.stderr)
    return outcome


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
