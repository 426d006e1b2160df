"""Mutations of the protocol cores and of the trust boundaries that no test notices.

    python -m scripts.mutations [ROOM | MODULE ...] [--count N] [--seed N] [--minutes M]

cosmic-ray (the extra "mutations") changes one thing in one place, `ROOMS` says which tests must
notice, and what they let pass is printed.  It works in a copy of the tree.  Of all mutations of a
room, or of one of its modules ("wire/llc.py"), ``--count`` are drawn with the seed; a run ends
after ``--minutes``.  Types, log messages and the texts of errors are nobody's behaviour, and
``is`` for a comparison shows only which integers CPython shares: these mutations are left out.
The exit code is 1 when one survived that `CONTRIBUTING.md` does not explain.
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
from collections.abc import Iterable
from pathlib import Path

from cosmic_ray.commands.init import _all_work_items
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_item import MutationSpec, TestOutcome

__all__ = ["ROOMS", "behaviour"]

TREE = Path(__file__).resolve().parents[1]
_TAKES = 120.0
"""Seconds after which the tests hang: that is noticed, too."""

ROOMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # Protocol cores.
    "wire": (("wire/cdc.py", "wire/clc.py", "wire/llc.py", "wire/fields.py"), ("tests/wire",)),
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
    # Trust boundaries: what comes from another process.
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
    """The lines in which a mutation may change what the program does."""
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


def asked(name: str) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Modules and their tests, of a room or of one module; None: there is no such thing."""
    if name in ROOMS:
        return ROOMS[name]
    return next((((name,), tests) for modules, tests in ROOMS.values() if name in modules), None)


def mutations(modules: Iterable[str], copy: Path) -> list[MutationSpec]:
    """All of these modules."""
    found = []
    for name in modules:
        path = copy / "trio_smc" / name
        lines = behaviour(path.read_text())
        for item in _all_work_items([path], {}):
            [mutation] = item.mutations
            if mutation.start_pos[0] in lines and not _IDENTITY.search(mutation.operator_name):
                found.append(mutation)
    return found


def explained() -> set[tuple[str, str]]:
    """Lines, and those (or nothing) that CONTRIBUTING.md says are as good in their place."""
    text = (TREE / "CONTRIBUTING.md").read_text().replace(r"\|", "|")
    return set(re.findall(r"^\| `([^`]+)` → (?:`([^`]+)`|nothing) \|", text, re.MULTILINE))


def _changed(diff: str) -> tuple[str, str]:
    """The line that was there, and the one in its place."""
    old = [line[1:].strip() for line in diff.splitlines() if re.match(r"-(?!-- )", line)]
    new = [line[1:].strip() for line in diff.splitlines() if re.match(r"\+(?!\+\+ )", line)]
    return " ".join(filter(None, old)), " ".join(filter(None, new))


def run(name: str, copy: Path, count: int, rng: random.Random, until: float) -> int:
    """Try some mutations of a room or module; returns how many survived without a reason."""
    found = asked(name)
    assert found is not None
    modules, tests = found
    every = mutations(modules, copy)
    chosen = rng.sample(every, min(count, len(every)))
    command = f"{sys.executable} -m pytest -x -q -n0 -p no:cacheprovider {' '.join(tests)}"
    reasons, tried, survivors, unexplained = explained(), 0, 0, 0
    for mutation in chosen:
        if time.monotonic() > until:
            break
        result = mutate_and_test([mutation], command, _TAKES)
        tried += 1
        if result.test_outcome is TestOutcome.SURVIVED:
            survivors += 1
            old, new = _changed(result.diff or "")
            known = (old, new) in reasons
            unexplained += not known
            place = f"{mutation.module_path.relative_to(copy)}:{mutation.start_pos[0]}"
            print(f"{place}{' (explained)' if known else ''}\n  - {old}\n  + {new}", flush=True)
    print(f"{name}: {tried} of {len(every)} mutations tried, {survivors} survived", flush=True)
    return unexplained


def main() -> int:
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
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if asked(name) is None]
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
