"""All checks of the suite."""

from __future__ import annotations

import importlib
import pkgutil

from smc_conform import checks
from smc_conform.registry import Check, declared_checks

__all__ = ["all_checks"]


def all_checks() -> list[Check]:
    """All checks, by area in the order of the files' names, and as declared."""
    for module in sorted(each.name for each in pkgutil.iter_modules(checks.__path__)):
        importlib.import_module(f"{checks.__name__}.{module}")
    return declared_checks()
