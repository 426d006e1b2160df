"""Mutations of the protocol cores and of the trust boundaries that no test notices.

    python -m scripts.mutations [ROOM | MODULE ...] [--count N] [--seed N] [--minutes M]
    python -m scripts.mutations --check     only compare mutations.toml with the tree

cosmic-ray (the extra "mutations") changes one thing in one place of a copy of the tree.  `ROOMS`
names the tests that must fail then; if they pass, the mutation has survived and is printed.
``--count`` mutations of each room, or of one of its modules ("wire/llc.py"), are drawn with the
seed; a run ends after ``--minutes``.  Left out are mutations of types, log messages and the texts
of errors, which change no behaviour, and ``is`` in place of a comparison, which shows only the
integers that CPython shares.

The exit code is 1 if a mutation survived that `mutations.toml` does not list, or if an entry of
that file does not fit the tree: its line has changed or gone, so the reason needs a new review.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from cosmic_ray.work_item import MutationSpec

__all__ = ["ROOMS", "behaviour"]

TREE = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_suffix(".toml")
_TIMEOUT = 120.0
"""Seconds after which the tests count as hung: a hung test has noticed the mutation, too."""

ROOMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # Protocol cores.
    "wire": (
        ("wire/cdc.py", "wire/clc.py", "wire/llc.py", "wire/fields.py", "wire/layout.py"),
        ("tests/wire",),
    ),
    "datapath": (
        ("datapath/connection.py", "datapath/cursor.py", "datapath/receiver.py",
         "datapath/sender.py", "datapath/rmb.py"),
        ("tests/datapath",),
    ),
    "negotiation": (
        ("rendezvous/negotiation.py", "rendezvous/client.py", "rendezvous/server.py",
         "rendezvous/terms.py"),
        ("tests/rendezvous/test_negotiation_declines.py",
         "tests/rendezvous/test_negotiation_first_contact.py",
         "tests/rendezvous/test_negotiation_subsequent.py",
         "tests/rendezvous/test_terms.py", "tests/rendezvous/test_rendezvous_rules.py",
         "tests/rendezvous/test_version_2.py", "tests/rendezvous/test_rfc_peer.py"),
    ),
    "links": (
        ("rendezvous/links/link.py", "rendezvous/links/group.py", "rendezvous/links/rkeys.py",
         "rendezvous/links/add_link.py", "rendezvous/links/delete_link.py",
         "rendezvous/links/exchanges.py", "rendezvous/links/peer_rmbs.py"),
        ("tests/rendezvous/links", "tests/rendezvous/test_version_2.py"),
    ),
    "failover": (
        ("failover/mover.py", "failover/replay.py", "failover/validation.py"),
        ("tests/failover", "tests/test_campaign_losses.py", "tests/test_campaign_link_groups.py"),
    ),
    # Trust boundaries: bytes of another process.
    "rnic": (
        ("rnic/soft/messages.py", "rnic/soft/regions.py", "rnic/soft/ring.py",
         "rnic/soft/peer_sockets.py"),
        ("tests/rnic/test_soft_hostile.py", "tests/rnic/test_soft.py", "tests/rnic/test_ring.py"),
    ),
    "discovery": (
        ("rendezvous/discovery/messages.py", "rendezvous/discovery/publication.py"),
        ("tests/rendezvous/discovery",),
    ),
    "control": (
        ("control/protocol.py", "control/server.py", "control/snapshot.py"),
        ("tests/control", "tests/connecting/test_cleaner.py", "tests/tools/test_run.py"),
    ),
}  # fmt: skip


def behaviour(source: str) -> set[int]:
    """The lines in which a mutation may change the behaviour."""
    lines = set(range(1, source.count("\n") + 2))
    for node in ast.walk(ast.parse(source)):
        leaves: Iterable[ast.AST] = ()
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            leaves = node.exc.args
        elif isinstance(node, ast.Call) and "LOGGER." in ast.unparse(node.func):
            leaves = [node]
        elif isinstance(node, ast.AnnAssign):
            leaves = [node.annotation]
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            everyone = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            leaves = [each.annotation for each in everyone if each.annotation is not None]
            leaves = [*leaves, *([node.returns] if node.returns else [])]
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            leaves = [node]
        for leaf in leaves:
            lines -= set(
                range(getattr(leaf, "lineno", 0), (getattr(leaf, "end_lineno", 0) or 0) + 1)
            )
    return lines


_IDENTITY = re.compile(r"/ReplaceComparisonOperator_(Eq|NotEq|Lt|LtE|Gt|GtE)_(Is|IsNot)$")


def find_room(name: str) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Modules and their tests, of a room or of one module; None if there is no such name."""
    if name in ROOMS:
        return ROOMS[name]
    return next((((name,), tests) for modules, tests in ROOMS.values() if name in modules), None)


def mutations(modules: Iterable[str], copy: Path) -> list[MutationSpec]:
    """All mutations of these modules."""
    from cosmic_ray.commands.init import _all_work_items

    found = []
    for name in modules:
        path = copy / "trio_smc" / name
        lines = behaviour(path.read_text())
        for item in _all_work_items([path], {}):
            [mutation] = item.mutations
            if mutation.start_pos[0] in lines and not _IDENTITY.search(mutation.operator_name):
                found.append(mutation)
    return found


class Equivalent(NamedTuple):
    """A mutation that changes no behaviour: an entry of `mutations.toml`, which has the fields."""

    modules: tuple[str, ...]
    old: str
    new: str
    why: str


def equivalents(text: str) -> list[Equivalent]:
    """The entries of the list.

    Raises:
      ValueError, TypeError: it is no TOML, or an entry has other fields.
    """
    entries: list[dict[str, Any]] = tomllib.loads(text)["equivalent"]
    return [Equivalent(**{**each, "modules": tuple(each["modules"])}) for each in entries]


def misfits(listed: Iterable[Equivalent], package: Path) -> Iterator[str]:
    """The entries that do not fit the modules of ``package``, each with the reason."""
    mutated = {module for modules, _ in ROOMS.values() for module in modules}
    seen = set[tuple[str, str, str]]()
    for entry in listed:
        if not entry.modules or not entry.why:
            yield f"{entry.old}: needs a module and a reason"
        if entry.old == entry.new:
            yield f"{entry.old}: is no mutation"
        for module in entry.modules:
            if module not in mutated:
                yield f"{module}: is in no room of the tool"
            elif not (package / module).exists():
                yield f"{module}: does not exist"
            elif not _has_lines((package / module).read_text(), entry.old):
                yield f"{module}: has no line {entry.old!r}"
            key = module, entry.old, entry.new
            if key in seen:
                yield f"{module}: {entry.old!r} is listed twice"
            seen.add(key)


def _has_lines(text: str, wanted: str) -> bool:
    """True if ``wanted`` is a line of ``text``, or some lines in a row joined by blanks."""
    lines = [line.strip() for line in text.splitlines()]
    for start in range(len(lines)):
        joined, rest = lines[start], iter(lines[start + 1 :])
        while len(joined) < len(wanted) and (line := next(rest, None)):
            joined += f" {line}"
        if joined == wanted:
            return True
    return False


def _changed(diff: str) -> tuple[str, str]:
    """The changed line before and after; several lines are joined by blanks."""
    old = [line[1:].strip() for line in diff.splitlines() if re.match(r"-(?!-- )", line)]
    new = [line[1:].strip() for line in diff.splitlines() if re.match(r"\+(?!\+\+ )", line)]
    return " ".join(filter(None, old)), " ".join(filter(None, new))


def run(name: str, copy: Path, count: int, rng: random.Random, until: float) -> int:
    """Try some mutations of a room or module; returns how many survived without a reason."""
    from cosmic_ray.mutating import mutate_and_test
    from cosmic_ray.work_item import TestOutcome

    found = find_room(name)
    assert found is not None
    modules, tests = found
    every = mutations(modules, copy)
    chosen = rng.sample(every, min(count, len(every)))
    command = f"{sys.executable} -m pytest -x -q -n0 -p no:cacheprovider {' '.join(tests)}"
    listed = {
        (module, each.old, each.new)
        for each in equivalents(LIST.read_text())
        for module in each.modules
    }
    tried, survivors, unexplained = 0, 0, 0
    for mutation in chosen:
        if time.monotonic() > until:
            break
        result = mutate_and_test([mutation], command, _TIMEOUT)
        tried += 1
        if result.test_outcome is TestOutcome.SURVIVED:
            survivors += 1
            old, new = _changed(result.diff or "")
            module = mutation.module_path.relative_to(copy / "trio_smc").as_posix()
            known = (module, old, new) in listed
            unexplained += not known
            place = f"trio_smc/{module}:{mutation.start_pos[0]}"
            print(f"{place}{' (equivalent)' if known else ''}\n  - {old}\n  + {new}", flush=True)
    print(f"{name}: {tried} of {len(every)} mutations tried, {survivors} survived", flush=True)
    return unexplained


def main(argv: list[str] | None = None) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.mutations", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "names", nargs="*", metavar="ROOM | MODULE", help=f"of {', '.join(ROOMS)} and their modules"
    )
    parser.add_argument("--count", type=int, default=50, help="of each; default %(default)s")
    parser.add_argument("--minutes", type=float, default=60.0, help="default %(default)s")
    parser.add_argument("--seed", type=int, default=None, help="random by default, and printed")
    parser.add_argument("--check", action="store_true", help="only check the list")
    arguments = parser.parse_args(argv)
    wrong = list(misfits(equivalents(LIST.read_text()), TREE / "trio_smc"))
    for text in wrong:
        print(f"{LIST.name}: {text}")
    if wrong or arguments.check:
        return 1 if wrong else 0
    unknown = [name for name in arguments.names if find_room(name) is None]
    if unknown:
        parser.error(f"no such room or module: {', '.join(unknown)}")
    seed = arguments.seed
    if seed is None:
        seed = random.SystemRandom().getrandbits(32)
    print(f"mutations: seed {seed}", flush=True)
    until = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory(prefix="smc-") as directory:
        copy = Path(directory) / "tree"
        shutil.copytree(
            TREE, copy, symlinks=True, ignore=shutil.ignore_patterns(".git", ".*_cache")
        )
        os.chdir(copy)
        os.environ["PYTHONPATH"] = str(copy)
        left = sum(
            run(name, copy, arguments.count, random.Random(f"{seed} {name}"), until)
            for name in arguments.names or ROOMS
        )
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
