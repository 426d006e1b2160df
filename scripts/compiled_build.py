"""Compile the native module of shared words, and with TRIO_SMC_COMPILED=1 the hot modules.

A hook of hatchling. The native module (trio_smc/rnic/_words.c) has the stable ABI, so that one file
serves all versions of Python. It is compiled if this machine has a C compiler and Python's headers,
also in an editable installation, then beside its source. Without them the wheel is pure: the
software RNIC then works without the module (trio_smc/rnic/words.py). TRIO_SMC_NATIVE=1 makes a lack
of a compiler an error, as TRIO_SMC_COMPILED=1 does, and TRIO_SMC_NATIVE=0 leaves the module out.

The hot modules are compiled with mypyc; `[tool.hatch.build.targets.wheel.hooks.custom]` of
pyproject.toml lists them. Their sources are in the wheel as well: an import prefers a compiled
module, and tracebacks show the source.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "TRIO_SMC_COMPILED"
NATIVE = "TRIO_SMC_NATIVE"
SOURCE = Path("trio_smc/rnic/_words.c")
OLDEST = (3, 11)
"""The version of Python whose stable ABI the native module has."""
FLAGS = ["-O2", "-Wall", "-Wextra", f"-DPy_LIMITED_API=0x{OLDEST[0]:02x}{OLDEST[1]:02x}0000"]
# The module calls no function of the C library, and many linkers would leave that out.  auditwheel
# recognises by it which systems can load the module.
LIBRARIES = ["-Wl,--no-as-needed", "-lc"]
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
        """Compile; add the files to ``build_data``, and name in the wheel what it needs."""
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        if version == "editable":
            native(root / SOURCE, root / SOURCE.with_suffix(".abi3.so"))
            return
        self._place = tempfile.TemporaryDirectory()
        place = Path(self._place.name)
        library = place / SOURCE.with_suffix(".abi3.so").name
        # This module takes a second, mypyc minutes: so a lack of a compiler is noticed at once.
        if native(root / SOURCE, library, required=self._wanted):
            build_data["force_include"][str(library)] = str(SOURCE.with_suffix(".abi3.so"))
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"cp{OLDEST[0]}{OLDEST[1]}-abi3-{platform}"
        if self._wanted:
            for built in compiled(root, self.config["modules"], place):
                build_data["force_include"][str(built)] = str(built.relative_to(place / "lib"))
            build_data["pure_python"] = False
            build_data.pop("tag", None)
            build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the files that were needed only for the wheel."""
        if hasattr(self, "_place"):
            self._place.cleanup()


def native(source: Path, library: Path, *, required: bool = False) -> bool:
    """Compile the native module; False: it is not wanted here, or there is no compiler.

    Raises:
      RuntimeError: the module cannot be compiled, and it is ``required``, or `NATIVE` is 1.
    """
    wanted = os.environ.get(NATIVE)
    library.unlink(missing_ok=True)
    if wanted == "0" or "t" in sys.abiflags:  # a free-threaded build has another ABI
        return False
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    headers = f"-I{sysconfig.get_path('include')}"
    options = [*FLAGS, "-shared", "-fPIC", headers]
    command = [*compiler, *options, "-o", str(library), str(source), *LIBRARIES]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        problem = done.stderr if done.returncode else ""
    except OSError as error:
        problem = str(error)
    if problem and (required or wanted == "1"):
        variable = NATIVE if wanted == "1" else VARIABLE
        raise RuntimeError(
            f"{variable}=1 needs a C compiler and the headers of Python, such as Debian's gcc, "
            f"libc6-dev and python3-dev: {problem.strip()}"
        )
    return not problem


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
