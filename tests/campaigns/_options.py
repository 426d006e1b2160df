"""The command line that all campaigns have: --cases, --seed, and often one to replay a case."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable


def parse(
    doc: str | None,
    *,
    cases: int = 50_000,
    replay: str = "",
    add_options: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
) -> argparse.Namespace:
    """Parse the command line; ``cases`` and ``seed`` of the result are numbers in any case.

    Args:
      doc: the campaign's docstring; its first line is the description.
      cases: how many by default.
      replay: name of the option that takes the number of one case to run alone, else None.
      add_options: adds what only this campaign has.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=cases, help=f"default {cases}")
    parser.add_argument("--seed", type=int, default=None, help="random by default, and printed")
    if replay:
        parser.add_argument(f"--{replay}", type=int, default=None, help="run this one alone")
    add_options(parser)
    options = parser.parse_args()
    if options.seed is None:
        options.seed = random.SystemRandom().getrandbits(32)
    return options
