"""Write docs/socket-options.md from the table that implements the socket options.

    python -m scripts.socket_options [--check]

With --check nothing is written; the exit code is 1 if the file is out of date.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trio_smc.streams.socket_options import render

PAGE = Path(__file__).resolve().parents[1] / "docs" / "socket-options.md"


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description="generate docs/socket-options.md")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args(arguments).check
    text = render()
    if not check:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        print(f"{PAGE} differs: run python -m scripts.socket_options", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
