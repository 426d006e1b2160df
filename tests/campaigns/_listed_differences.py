"""The differences between TCP and SMC-R that docs/programs.md lists: each with its reason.

A difference that no entry explains fails the campaign.  Each entry has an example, which the
campaign runs first: if it shows no difference, the entry describes what is no longer so, and the
campaign fails, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from tests.campaigns._program_runner import Observation
from tests.campaigns._programs import Program

__all__ = ["LISTED", "Listed"]


@dataclass(frozen=True, slots=True)
class Listed:
    """A row of the table "What differs from TCP".

    Attributes:
      name: the beginning of the row in docs/programs.md.
      example: a program that shows it, as `Program.as_data`.
      explains: True if this program's observation over SMC-R, the third argument, differs from
        that over TCP, the second, for this reason only.
    """

    name: str
    example: list[Any]
    explains: Callable[[Program, Observation, Observation], bool]


LISTED: Final[tuple[Listed, ...]] = ()
