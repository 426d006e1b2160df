"""Find out from files alone if the Python of another process has trio_smc installed.

This module never executes or imports a file that the process names.  It takes directories from the
command line, the environment and the memory map of the process.  In these directories it looks only
for a package `trio_smc`, the package's metadata (``trio_smc-*.dist-info``), ``pyvenv.cfg`` and
``.pth`` files, and reads them by `TrustedFiles`.  The rules are those of Python's `site` module and
of PEP 405.  A directory that only the program's own code adds to `sys.path` is not found.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from trio_smc.tools.proc import Process
from trio_smc.tools.trusted_files import TrustedFiles, UntrustedPathError

__all__ = ["MAX_NAMES", "Finding", "find_trio_smc", "is_python"]

_PACKAGE: Final = "trio_smc"
_TIME_LIMIT: Final = 2.0
"""Seconds for one search.  Chosen."""
_MAX_FILE: Final = 1 << 16
"""Bytes of a file.  Chosen; ``pyvenv.cfg`` and ``.pth`` files have a few lines."""
MAX_NAMES: Final = 20_000
"""Names in a directory.  Chosen: a bound on time and memory."""
_MAX_PATHS: Final = 64
"""Directories of one variable, and files of one kind, that are examined.  Chosen, as above."""
_VERSION: Final = re.compile(r"(?:python|pypy)(\d+\.\d+t?)")
_LIBRARIES: Final = ("lib", "lib64", "local/lib")
_SITES: Final = ("site-packages", "dist-packages")
# Options of Python whose value is the next word of the command line.
_WITH_VALUE: Final = ("-W", "-X", "--check-hash-based-pycs")


@dataclass(slots=True)
class Finding:
    """The result of a search for trio_smc.

    Attributes:
      python: the path by which the Python was called, or its executable if that path is unknown.
      has_package: True if trio_smc is installed, False if not, None if that is unknown.
      reasons: the reasons why `has_package` is None.
    """

    python: str
    has_package: bool | None = None
    reasons: list[str] = field(default_factory=list)


def is_python(path: str) -> bool:
    """True if the name of an executable is that of a Python."""
    return os.path.basename(path).startswith(("python", "pypy"))


def find_trio_smc(process: Process) -> Finding:
    """Search the directories in which the Python of a process of this user finds packages."""
    executable = process.link("exe")
    finding = Finding(executable)
    here = os.readlink("/proc/self/ns/mnt")
    if process.link("ns/mnt") != here or process.link("root") != "/":
        finding.reasons.append("it has a file system of its own")
        return finding
    _Search(process, executable, finding).run()
    return finding


class _Search:
    """One search; `run` completes the finding."""

    def __init__(self, process: Process, executable: str, finding: Finding) -> None:
        self._process = process
        self._executable = executable
        self._finding = finding
        self._files = TrustedFiles(_TIME_LIMIT)
        self._command = process.command()
        self._variables = process.environment()
        self._directory = process.link("cwd")

    def run(self) -> None:
        """Search one directory after the other until trio_smc is found."""
        called = self._called_as()
        if called is not None:
            self._finding.python = called
        else:
            self._finding.reasons.append("its command line does not name its Python")
        found = any(self._attempt(self._has_package, each) for each in self._first_paths())
        sites = dict.fromkeys(self._sites(called))
        found = found or any(self._attempt(self._is_in_site, each) for each in sites)
        if found:
            self._finding.has_package = True
            self._finding.reasons.clear()
        elif not self._finding.reasons:
            self._finding.has_package = False

    def _attempt(self, search: Callable[[str], bool], path: str) -> bool:
        """Call ``search``.  If the path is not trusted, note the reason and return False."""
        try:
            return search(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except UntrustedPathError as error:
            self._finding.reasons.append(str(error))
            return False

    # --- where Python looks ------------------------------------------------------------------

    def _called_as(self) -> str | None:
        """The path by which the Python was called, which determines its environment (PEP 405)."""
        word = self._command[0] if self._command else ""
        if not is_python(word):
            return None  # a program may overwrite its command line, for example with a title
        if os.path.dirname(word):
            choices = [os.path.join(self._directory, word)]
        else:
            search = self._variables.get("PATH", os.defpath).split(os.pathsep)
            choices = [os.path.join(each, word) for each in search[:_MAX_PATHS] if each[:1] == "/"]
        return next((each for each in choices if self._attempt(self._files.exists, each)), None)

    def _first_paths(self) -> Iterator[str]:
        """The directories that `sys.path` has before the standard library."""
        paths = self._variables.get("PYTHONPATH", "").split(os.pathsep)
        yield from (os.path.join(self._directory, each) for each in paths[:_MAX_PATHS] if each)
        words = iter(self._command[1:])
        for word in words:
            if word in _WITH_VALUE:
                next(words, None)
            elif not word.startswith("-"):
                yield os.path.join(self._directory, os.path.dirname(word))
                return
            elif word[-1:] in "cm":
                break
        yield self._directory

    def _sites(self, called: str | None) -> Iterator[str]:
        """The directories of installed packages."""
        prefix, with_system = None, True
        if called is not None:
            prefix, with_system = self._virtual_environment(called)
        if prefix is not None:
            yield from self._sites_below(prefix)
        # The command line may not name the environment, but the process has mapped its extension
        # modules.
        yield from islice(self._mapped_sites(), _MAX_PATHS)
        if with_system:
            base = os.path.dirname(os.path.dirname(self._executable))
            yield from self._sites_below(self._variables.get("PYTHONHOME") or base)
            home = self._variables.get("HOME", "")
            user = self._variables.get("PYTHONUSERBASE") or f"{home}/.local"
            yield from self._sites_below(user)

    def _virtual_environment(self, called: str) -> tuple[str | None, bool]:
        """The prefix of the virtual environment, and True if it includes the system's packages."""
        below = os.path.dirname(called)
        for prefix in (below, os.path.dirname(below)):
            try:
                text = self._files.read(os.path.join(prefix, "pyvenv.cfg"), _MAX_FILE)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except UntrustedPathError as error:
                self._finding.reasons.append(str(error))
                return prefix, True
            pairs = (line.partition("=") for line in text.decode("utf-8", "replace").split("\n"))
            settings = {name.strip().lower(): value.strip().lower() for name, _, value in pairs}
            return prefix, settings.get("include-system-site-packages") == "true"
        return None, True

    def _sites_below(self, prefix: str) -> Iterator[str]:
        version = _VERSION.match(os.path.basename(self._executable))
        for library in _LIBRARIES:
            above = os.path.join(prefix, library)
            try:
                names = self._files.names(above, MAX_NAMES)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except UntrustedPathError as error:
                self._finding.reasons.append(str(error))
                continue
            for name in names:
                found = _VERSION.fullmatch(name)
                # Debian has one lib/python3/dist-packages for all versions.
                if name == "python3" or (found and (not version or found[1] == version[1])):
                    yield from (os.path.join(above, name, each) for each in _SITES)

    def _mapped_sites(self) -> Iterator[str]:
        seen = set()
        for path in self._process.mapped():
            for name in _SITES:
                above, middle, _ = path.partition(f"/{name}/")
                if middle and above not in seen:
                    seen.add(above)
                    yield f"{above}/{name}"

    # --- files -------------------------------------------------------------------------------

    def _has_package(self, directory: str) -> bool:
        return self._files.is_file(os.path.join(directory, _PACKAGE, "__init__.py"))

    def _is_in_site(self, site: str) -> bool:
        """True if a directory of packages has trio_smc, or a ``.pth`` file that leads to it."""
        names = self._files.names(site, MAX_NAMES)
        if _PACKAGE in names and self._has_package(site):
            return True
        if any(each.startswith(f"{_PACKAGE}-") and each.endswith(".dist-info") for each in names):
            return True
        path_files = [each for each in names if each.endswith(".pth")]
        if len(path_files) > _MAX_PATHS:
            raise UntrustedPathError(f"{site} has more than {_MAX_PATHS} .pth files")
        return any(
            self._attempt(self._path_file_adds_package, os.path.join(site, each))
            for each in path_files
        )

    def _path_file_adds_package(self, path: str) -> bool:
        site = os.path.dirname(path)
        lines = self._files.read(path, _MAX_FILE).decode("utf-8", "replace").split("\n")
        added = [
            os.path.join(site, line.strip())
            for line in lines
            if line.strip() and not line.startswith(("#", "import ", "import\t"))
        ]
        return any(self._attempt(self._has_package, each) for each in added[:_MAX_PATHS])
