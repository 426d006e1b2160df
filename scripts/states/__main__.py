"""Write the files that are generated from the declared state machines, or check them.

    python -m scripts.states [--check] [DIR]

Diagrams and pages are written to DIR (default: docs/states), the tables of the engine to
`trio_smc/states/tables.py`. Exit code: 0; 1 if ``--check`` finds a difference; 2 if the SVG files
cannot be written because graphviz's ``dot`` is missing (all other files are written).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from scripts.states.generate import MACHINES, TABLES, source
from scripts.states.pages import NoGraphviz, differences, write_svgs, write_texts

_DOCS = Path("docs/states")
_PURPOSE = "Write the files that are generated from the declared state machines, or check them."
_NO_DOT = (
    "no SVG: graphviz's `dot` is missing (Debian: apt-get install graphviz); the rest is written"
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m scripts.states", description=_PURPOSE)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("directory", nargs="?", type=Path, default=_DOCS, metavar="DIR")
    options = parser.parse_args(arguments)
    if options.check:
        found = [f"{options.directory}/{each}" for each in differences(MACHINES, options.directory)]
        if _stale():
            found.append(f"{TABLES.name}: differs from the declarations")
        for line in found:
            print(line, file=sys.stderr)
        if not found:
            print(f"{options.directory}: {len(MACHINES)} machines, all files are current")
        return 1 if found else 0
    if _stale():
        TABLES.write_text(source(MACHINES), encoding="utf-8")
    write_texts(MACHINES, options.directory)
    try:
        write_svgs(MACHINES, options.directory)
    except NoGraphviz:
        print(_NO_DOT, file=sys.stderr)
        return 2
    print(f"{options.directory}: {len(MACHINES)} machines written")
    return 0


def _stale() -> bool:
    return not TABLES.exists() or TABLES.read_text(encoding="utf-8") != source(MACHINES)


if __name__ == "__main__":
    sys.exit(main())
