"""Why an implementation fails a check of `smc-conform`, or differs: conform_findings.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

__all__ = ["Finding", "findings"]

LIST = Path(__file__).with_suffix(".toml")


class Finding(NamedTuple):
    """A reason.

    Attributes:
      id: of the check.
      title: in a few words.
      reason: what the implementation does, and where it is decided.
      ours: trio_smc differs for this reason; otherwise Linux fails for it.
      crashes: Linux crashes.
    """

    id: str
    title: str
    reason: str = ""
    ours: bool = False
    crashes: bool = False

    @property
    def page(self) -> str:
        """The name of the page about what Linux fails."""
        return self.id.replace("/", "-")


def findings() -> dict[str, Finding]:
    """The reasons, by ID of the check."""
    listed = tomllib.loads(LIST.read_text()).get("finding", [])
    return {each["id"]: Finding(**each) for each in listed}
