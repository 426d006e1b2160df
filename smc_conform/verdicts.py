"""The verdicts of a check, and the exceptions by which a check reaches one.

A check that returns has passed.  Everything else is raised:

- `Failed`: the implementation violates the requirement; the text says what was seen.
- `Differs`: the document is silent or leaves the choice, and the implementation's choice is noted.
- `NotApplicable`: the implementation does not have what the check needs.
- `Inconclusive`: the check could not come to a verdict, for the reason in the text.
- `Silence`: an expected event did not come in time.  The runner then opens another connection: if
  that is served at once, the silence is a failure, and otherwise nothing was found out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

__all__ = [
    "Differs",
    "Failed",
    "Inconclusive",
    "NotApplicable",
    "Outcome",
    "Result",
    "Silence",
    "Verdict",
]


class Verdict(StrEnum):
    """The result of a check in one word."""

    PASS = "pass"
    FAIL = "fail"
    DIFFERS = "differs"
    NOT_APPLICABLE = "not applicable"
    INCONCLUSIVE = "inconclusive"


class Outcome(Exception):
    """Ends a check with a verdict; the text is for the report."""

    verdict = Verdict.INCONCLUSIVE


class Failed(Outcome):
    """The implementation violates the requirement."""

    verdict = Verdict.FAIL


class Differs(Outcome):
    """The implementation does something that the document neither requires nor forbids."""

    verdict = Verdict.DIFFERS


class NotApplicable(Outcome):
    """The implementation, or the set-up, does not have what the check needs."""

    verdict = Verdict.NOT_APPLICABLE


class Inconclusive(Outcome):
    """The check could not come to a verdict."""


class Silence(Outcome):
    """An expected event did not come in time."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one check.

    Attributes:
      id: of the check.
      detail: what was seen; empty if the check has passed.
      seconds: how long the check took.
      ladder: lines of the ladder, if the check has not passed.
      messages: all messages in hexadecimal, if the check has not passed.
      capture: pcapng, if the check has not passed.
    """

    id: str
    verdict: Verdict
    detail: str = ""
    seconds: float = 0.0
    ladder: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()
    capture: bytes = field(default=b"", repr=False)
