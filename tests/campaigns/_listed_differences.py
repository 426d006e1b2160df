"""The differences between TCP and SMC-R that docs/programs.md lists: each with its reason.

A difference that no entry explains fails the campaign.  An entry that explains none in a long run
fails it, too: it describes what is no longer so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tests.campaigns._program_runner import Observation
from tests.campaigns._programs import Program

__all__ = ["LISTED", "Listed"]


@dataclass(frozen=True, slots=True)
class Listed:
    """A row of the table "What differs from TCP".

    Attributes:
      name: the beginning of the row in docs/programs.md.
      explains: True if this program's observation over SMC-R, the third argument, differs from
        that over TCP, the second, for this reason only.
    """

    name: str
    explains: Callable[[Program, Observation, Observation], bool]


LISTED: Final[tuple[Listed, ...]] = ()
