"""Compile the hot modules with mypyc while a wheel is built, if TRIO_SMC_COMPILED=1.

A hook of hatchling; `[tool.hatch.build.targets.wheel.hooks.custom]` of pyproject.toml lists the
modules. Their sources are in the wheel as well: an import prefers a compiled module, and tracebacks
show the source. Without the variable, and in editable installations, nothing happens.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "TRIO_SMC_COMPILED"
# All options are given here: the project's own settings of mypy are for development.
MYPY = ["--config-file=", "--explicit-package-bases", "--ignore-missing-imports"]


class CompiledBuild(BuildHookInterface[Any]):
    """Adds the compiled modules to the wheel that is being built."""

    def dependencies(self) -> list[str]:
        """Packages for the build besides hatchling; mypyc reads the types of imported modules."""
        if not self._wanted:
            return []
        return ["mypy>=1.18", "setuptools>=77", *self.metadata.core.dependencies]

    @property
    def _wanted(self) -> bool:
        return self.target_name == "wheel" and os.environ.get(VARIABLE) == "1"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; add the files to ``build_data``, and bind the wheel to this interpreter."""
        if version == "editable" or not self._wanted:
            return
        self._place = tempfile.TemporaryDirectory()
        place = Path(self._place.name)
        for built in compiled(Path(self.root), self.config["modules"], place):
            build_data["force_include"][str(built)] = str(built.relative_to(place / "lib"))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the files that were needed only for the wheel."""
        if hasattr(self, "_place"):
            self._place.cleanup()


def compiled(root: Path, modules: list[str], place: Path) -> list[Path]:
    """Compile modules, which are named by their paths below ``root``, into ``place``/lib."""
    from mypyc.build import mypycify
    from setuptools import Distribution

    here = Path.cwd()
    os.chdir(root)
    try:
        arguments = [*MYPY, f"--cache-dir={place / 'cache'}", *modules]
        extensions = mypycify(
            arguments, debug_level="0", target_dir=str(place / "c"), group_name="trio_smc"
        )
        command = Distribution({"ext_modules": extensions}).get_command_obj("build_ext")
        command.build_lib, command.build_temp = str(place / "lib"), str(place / "objects")
        command.ensure_finalized()
        command.run()
    finally:
        os.chdir(here)
    return sorted((place / "lib").rglob("*.so"))
