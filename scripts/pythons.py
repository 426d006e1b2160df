"""Run the tests on every Python that the project supports and that this machine has.

    python3 -m scripts.pythons [--debian SUITE ...] [--share PATH ...] [TESTS ...]
    python3 -m scripts.pythons --arch arm64 [--debian SUITE] [--share PATH ...] [TESTS ...]

Interpreters are those on the path and those of pyenv, the newest of each minor version; each has an
environment of its own in build/pythons. With --debian (as root, and with debootstrap) a root
directory of that suite is made there as well, with only the packages that the Makefile needs;
`make demo` and `make test` run in it, on its Python and with its programs, in a copy of this tree.
--share names paths of this machine that are visible in it (pip's settings, a mirror of packages).
--debian13 is --debian trixie. TESTS go to pytest; default: the whole suite. The exit code is 1 if
anything failed. Standard library only.

With --arch only a root directory of another processor is made, and its programs are emulated: that
needs Debian's packages debootstrap, qemu-user-static and binfmt-support. README's two commands run
there, `make demo` with a small file and `make quick`, and the tests of RNICs with processes and of
connections, with the native module and over sockets (docs/rnic.md). On two cores with other work
the root took nine minutes, and `make quick` eight for one variant. Emulation on x86-64 keeps the
order of x86-64's memory accesses, so it does not show what another order would break.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "build" / "pythons"
OLDEST, NEWEST = (3, 11), (3, 14)
DEBIAN_13 = "trixie"
SOURCE = Path("trio_smc/rnic/_words.c")
PACKAGES = "ca-certificates,git,make,mount,netbase,python3"
COMPILER = "gcc,libc6-dev,python3-dev"
VARIANTS = ("native", "socket")
EMULATED_DEMO = "make demo ARGS='--mib 4 --rounds 1'"
EMULATED_SUITES = {
    "make quick": "make quick JOBS=2",
    # `make quick` leaves these out.
    "tests of RNICs with processes": "make test JOBS=2 ARGS='-q -m processes tests/rnic'",
    # Two modules measure processor time and memory of many connections, which emulation multiplies.
    "tests of connections": (
        "make test JOBS=2 ARGS='-q tests/e2e "
        "--ignore=tests/e2e/test_mass_ends.py --ignore=tests/e2e/test_sudden_end.py'"
    ),
}
# Emulated processes take ten times as long as others. pip would compile each module, and without
# cached bytecode each process would.
EMULATED_SETTINGS = {
    "TRIO_SMC_NATIVE": "1",
    "TRIO_SMC_PATIENCE": "200",
    "PYTEST_TIMEOUT": "600",
    "PIP_NO_COMPILE": "1",
    "PYTHONDONTWRITEBYTECODE": "",
}
# QEMU's usual processor has pointer authentication, which QEMU calculates in software at each call
# of a function.  A loop of Python then takes 18 times as long, the compiler of Python 7 times.
PROCESSORS = {"arm64": "neoverse-n1"}
VERSION_CODE = (
    "import sys, sysconfig; print(*sys.version_info[:3], sysconfig.get_config_var('ABIFLAGS'))"
)
# Paths of the machine that processes in a root directory need.
SHARED = [Path("/dev"), Path("/proc"), Path("/sys"), Path("/etc/resolv.conf")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 if the tests passed everywhere."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--debian",
        dest="suites",
        metavar="SUITE",
        action="append",
        default=[],
        help="also run in a root directory of that suite of Debian",
    )
    parser.add_argument(
        "--debian13",
        dest="suites",
        action="append_const",
        const=DEBIAN_13,
        help=f"the same as --debian {DEBIAN_13}",
    )
    parser.add_argument(
        "--share",
        metavar="PATH",
        action="append",
        type=Path,
        default=[],
        help="a path of this machine that is visible in such a root directory",
    )
    parser.add_argument(
        "--arch", metavar="ARCH", help="only in a root directory for this processor, emulated"
    )
    parser.add_argument("tests", nargs="*", help="for pytest; default: all")
    options = parser.parse_args(arguments)
    outcomes: dict[str, bool] = {}
    if options.arch:
        for suite in options.suites or [DEBIAN_13]:
            print(f"\n=== Debian {suite}, {options.arch}", flush=True)
            passed = tested_in_debian(suite, options.share, options.tests, options.arch)
            outcomes[f"Debian {suite}, {options.arch}"] = passed
        return _report(outcomes)
    found = newest_of_each(interpreters(os.environ.get("PATH", ""), Path.home() / ".pyenv"))
    for version, python in found.items():
        print(f"\n=== Python {version} ({python})", flush=True)
        outcomes[f"Python {version}"] = tested(python, PLACE / version, options.tests)
    for suite in options.suites:
        print(f"\n=== Debian {suite}", flush=True)
        outcomes[f"Debian {suite}"] = tested_in_debian(suite, options.share, options.tests, None)
    code = _report(outcomes)
    if not found:
        print("no interpreter found")
    return code if found else 1


def _report(outcomes: dict[str, bool]) -> int:
    """Print the summary; return the exit code."""
    print("\n=== summary")
    for name, passed in outcomes.items():
        print(f"{name:16} {'passed' if passed else 'FAILED'}")
    return 0 if all(outcomes.values()) else 1


def interpreters(path: str, pyenv: Path) -> Iterator[Path]:
    """Yield possible interpreters in the directories of ``path`` and of pyenv."""
    for directory in map(Path, path.split(os.pathsep)):
        if directory.is_dir():
            names = sorted(directory.iterdir())
            yield from (each for each in names if re.fullmatch(r"python3(\.\d+t?)?", each.name))
    yield from sorted(pyenv.glob("versions/*/bin/python3"))


def newest_of_each(candidates: Iterator[Path]) -> dict[str, Path]:
    """Return the newest interpreter of each supported minor version and build ("3.13", "3.13t")."""
    best: dict[tuple[int, int, str], tuple[int, Path]] = {}
    for python in candidates:
        probe = subprocess.run(
            [python, "-c", VERSION_CODE], capture_output=True, text=True, check=False
        )
        words = probe.stdout.split()
        if probe.returncode or len(words) < 3:
            continue  # a shim without its version, or Python 2
        major, minor, micro = map(int, words[:3])
        build = words[3] if len(words) > 3 else ""
        if OLDEST <= (major, minor) <= NEWEST:
            known = best.get((major, minor, build))
            if known is None or known[0] < micro:
                best[major, minor, build] = micro, python
    return {f"{a}.{b}{build}": best[a, b, build][1] for a, b, build in sorted(best)}


def tested(python: Path, environment: Path, tests: Sequence[str]) -> bool:
    """Run the tests on an interpreter, in an environment made on first use; True if they pass."""
    inside = environment / "bin" / "python"
    steps: list[list[str | Path]] = [
        [python, "-m", "venv", environment],
        [inside, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-e", f"{ROOT}[dev]"],
        [inside, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", *tests],
    ]
    if inside.exists():
        del steps[0]
    return all(_run(step) for step in steps)


def tested_in_debian(
    suite: str, shared: Sequence[Path], tests: Sequence[str], arch: str | None
) -> bool:
    """Run the tests in a root directory of a suite, made on first use; True if they pass.

    ``arch``: Debian's name of another processor, which is emulated.
    """
    root = debian_root(suite, arch)
    commands = emulated_commands(tests) if arch else ["make demo", _make_test(tests)]
    return root is not None and made_in(root, [*SHARED, *shared], commands)


def debian_root(suite: str, arch: str | None = None) -> Path | None:
    """A root directory of a suite, with a copy of this tree in /work; None if that failed."""
    if os.geteuid() or not shutil.which("debootstrap"):
        print("needed: root, and Debian's package debootstrap")
        return None
    if arch in PROCESSORS:
        os.environ.setdefault("QEMU_CPU", PROCESSORS[arch])
    root = PLACE / (f"{suite}-{arch}" if arch else suite)
    if not (root / "ready").exists():
        shutil.rmtree(root, ignore_errors=True)
        packages = f"{PACKAGES},{COMPILER}" if arch else PACKAGES
        command = ["debootstrap", "--variant=minbase", f"--include={packages}"]
        if not _run([*command, *([f"--arch={arch}"] if arch else []), suite, root]):
            return None
        # Installed packages must not start services.
        policy = root / "usr" / "sbin" / "policy-rc.d"
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
        (root / "ready").touch()
    hosts = root / "etc" / "hosts"
    if not hosts.exists():  # debootstrap makes none, and not every libc knows localhost
        hosts.write_text("127.0.0.1 localhost\n::1 localhost\n")
    copy_tree(root / "work")
    return root


def emulated_commands(tests: Sequence[str]) -> list[str]:
    """Shell commands that run the demo and tests of an emulated processor, for each variant.

    A failure does not stop the following commands, which may take long to reach again; the last
    command names the failed ones, and fails if there are any.
    """
    suites = {"tests": f"{_make_test(tests)} JOBS=2"} if tests else EMULATED_SUITES
    commands = [f"export {name}={value}" for name, value in EMULATED_SETTINGS.items()]
    commands += ["make ready-dev", "failed="]
    for variant in VARIANTS:
        commands.append(f"export TRIO_SMC_WORDS={variant}")
        for name, command in {"make demo": EMULATED_DEMO, **suites}.items():
            title = f"{variant}: {name}"
            commands.append(f"echo '--- {title}'")
            commands.append(f'{{ {command} || failed="$failed, {title}"; }}')
    return [*commands, '{ [ -z "$failed" ] || { echo "failed${failed#,}"; exit 1; }; }']


def _make_test(tests: Sequence[str]) -> str:
    return f"make test ARGS={shlex.quote(shlex.join(tests))}"


def made_in(root: Path, shared: Sequence[Path], commands: Sequence[str]) -> bool:
    """Run shell commands in /work of a root directory, up to the first that fails.

    The directory becomes the root of a new mount namespace; the mounts end with it in any case. In
    a mere chroot the kernel would refuse the user namespaces that some tests make.
    """
    mounts = [(root, root)]
    for each in shared:
        place = root / each.relative_to("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        if each.is_dir():
            place.mkdir(exist_ok=True)
        else:
            place.touch()
        mounts.append((each, place))
    script = [
        *(shlex.join(["mount", "--rbind", str(of), str(at)]) for of, at in mounts),
        f"cd {shlex.quote(str(root))}",
        f"mount --move {shlex.quote(str(root))} /",
        shlex.join(["exec", "chroot", ".", "sh", "-c", " && ".join(["cd /work", *commands])]),
    ]
    return _run(["unshare", "--mount", "sh", "-ec", "\n".join(script)])


def copy_tree(tree: Path) -> None:
    """Copy the project's files into a repository of their own: some tests call git.

    An environment that is there stays, and so does the native module that its installation has
    compiled; `scripts.bootstrap` renews both if they are out of date.
    """
    tree.mkdir(parents=True, exist_ok=True)
    native = tree / SOURCE.with_suffix(".abi3.so")
    compiled = native.read_bytes() if native.exists() else None
    for each in tree.iterdir():
        if each.is_dir() and not each.is_symlink():
            if each.name != ".venv":
                shutil.rmtree(each)
        else:
            each.unlink()
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    if compiled is not None:
        native.write_bytes(compiled)
    for command in (["git", "init", "-q"], ["git", "add", "-A"]):
        subprocess.run(command, cwd=tree, check=True)


def _run(command: Sequence[str | Path]) -> bool:
    # Free-threaded builds run with the GIL: without it the software RNIC refuses to open.
    environment = {**os.environ, "PYTHON_GIL": "1"}
    try:
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0
    except OSError as error:
        print(error)
        return False


if __name__ == "__main__":
    sys.exit(main())
