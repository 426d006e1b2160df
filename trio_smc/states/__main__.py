"""Write the diagrams and tables of every state machine, or check that they are current.

    python -m trio_smc.states [--check] [DIR]

DIR is docs/states unless given. Exit code: 0, 1 when ``--check`` finds a difference, 2 when the
SVG files cannot be written because graphviz's ``dot`` is missing (all else is written then).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trio_smc.states import MACHINES
from trio_smc.states.drawing.pages import NoGraphviz, differences, write_svgs, write_texts

_DOCS = Path("docs/states")
_PURPOSE = "Write the diagrams and tables of every state machine, or check that they are current."
_NO_DOT = (
    "no SVG: graphviz's `dot` is missing (Debian: apt-get install graphviz); all else is written"
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m trio_smc.states", description=_PURPOSE)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("directory", nargs="?", type=Path, default=_DOCS, metavar="DIR")
    options = parser.parse_args(arguments)
    if options.check:
        found = differences(MACHINES, options.directory)
        for line in found:
            print(f"{options.directory}/{line}", file=sys.stderr)
        if not found:
            print(f"{options.directory}: {len(MACHINES)} machines, all files are current")
        return 1 if found else 0
    write_texts(MACHINES, options.directory)
    try:
        write_svgs(MACHINES, options.directory)
    except NoGraphviz:
        print(_NO_DOT, file=sys.stderr)
        return 2
    print(f"{options.directory}: {len(MACHINES)} machines written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
