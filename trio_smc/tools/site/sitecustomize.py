"""Loaded by every Python that `trio-smc run` starts: enables SMC-R as soon as Trio is imported.

Python imports `sitecustomize` at its start, from the first directory of its path that has one;
`trio-smc run` puts this one there.  Programs that do not use Trio pay nothing but this file.  A
`sitecustomize` that this one hides is run afterwards.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_FIRST = ("trio", "trio_smc")


class _WhenImported(importlib.abc.MetaPathFinder):
    """Calls `_enable` when Trio, or trio_smc on top of it, has been imported whole."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _FIRST:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = _afterwards(loader.exec_module)
        return spec


def _afterwards(execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def exec_module(module: ModuleType) -> None:
        execute(module)
        _enable()

    return exec_module


def _enable() -> None:
    try:
        from dataclasses import replace

        import trio_smc

        path = os.environ.get("TRIO_SMC_CONFIG")
        config = trio_smc.load_config(path) if path else trio_smc.Config()
        if os.environ.get("TRIO_SMC_REQUIRE"):
            config = replace(config, require_smc=True)
    except (ImportError, ValueError) as error:
        # The program would quietly run over TCP.
        sys.exit(f"trio-smc run: {error}")
    trio_smc.enable(config)


def _run_hidden() -> None:
    elsewhere = [each for each in sys.path if os.path.abspath(each or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, _WhenImported())
_run_hidden()
