"""The declaration of checks: `check` declares one, `catalogue.all_checks` returns all.

A check is an async function that gets a `Peer`, drives it step by step and returns if the
implementation under test does what the document requires.  Each file in `smc_conform/checks` has
the checks of one area, and its name is the area.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

from smc_conform.roles import Role

if TYPE_CHECKING:
    from smc_conform.peer import Peer

__all__ = ["NEEDS", "Check", "Role", "check", "declared_checks"]


BOTH: Final = frozenset(Role)

NEEDS: Final = {
    "roce": "a RoCE port; the software RNIC differs here",
    "soft": "a software RNIC",
    "two-rnics": "two RNICs on the suite's side",
    "one-rnic": "one RNIC on the implementation's side",
    "parallel": "a client under test with several connections at a time",
    "daytime": "a daytime service (RFC 867), which closes the connection first",
    "discard": "a discard service (RFC 863), which reads and sends nothing",
    "version-1": "version 1",
    "version-2": "version 2",
}
"""Descriptions of the resources that a check may need beside the implementation."""

Steps: TypeAlias = "Callable[[Peer], Awaitable[None]]"


@dataclass(frozen=True, slots=True)
class Check:
    """A requirement, and the steps that show if an implementation meets it.

    Attributes:
      id: the area, the document's section and a number: "clc/A.2.3-1".
      requirement: of the document, in the suite's words.
      roles: of the implementation under test for which the check exists.
      needs: keys of `NEEDS`.
      steps: drive the peer.
      robust: the implementation is treated badly, so afterwards a new connection must be served.
      slow: waits for a time-out of the implementation.
    """

    id: str
    requirement: str
    roles: frozenset[Role]
    needs: frozenset[str]
    steps: Steps
    robust: bool = False
    slow: bool = False

    @property
    def area(self) -> str:
        """The file of the check."""
        return self.id.partition("/")[0]

    @property
    def section(self) -> str:
        """The section of the document."""
        return self.id.partition("/")[2].rpartition("-")[0]


_CHECKS: dict[str, Check] = {}


def check(
    number: str,
    requirement: str,
    *roles: Role,
    needs: tuple[str, ...] = (),
    robust: bool = False,
    slow: bool = False,
) -> Callable[[Steps], Steps]:
    """Declare a check; its area is the module of the function.

    Checks that differ in a value only are declared in a loop, by ``check(...)(partial(...))``.

    Args:
      number: the document's section and a number: "A.2.3-1"; unique in its area.
      requirement: one sentence that names the actor: "The server answers ...".
      roles: of the implementation under test; none: both.
      needs: keys of `NEEDS`.
      robust, slow: see `Check`.
    """

    def declare(steps: Steps) -> Steps:
        function = steps.func if isinstance(steps, partial) else steps
        area = function.__module__.rpartition(".")[2]
        unknown = set(needs) - set(NEEDS)
        name = f"{area}/{number}"
        if unknown or name in _CHECKS:
            raise ValueError(f"{name}: {'unknown needs' if unknown else 'declared twice'}")
        _CHECKS[name] = Check(
            name, requirement, frozenset(roles) or BOTH, frozenset(needs), steps, robust, slow
        )
        return steps

    return declare


def declared_checks() -> list[Check]:
    """The checks of the modules that were imported, as declared."""
    return list(_CHECKS.values())
