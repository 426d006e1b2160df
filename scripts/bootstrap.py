"""Prepare make's virtual environment for a target; do nothing if it is ready.

    python3 scripts/bootstrap.py EXTRA [COMMAND ...]

EXTRA is a set of pyproject.toml ("cli" or "dev"). Each COMMAND (dot, tshark) comes from a Debian
package, which is installed if the user is root or `sudo -n` works. Otherwise the script prints the
apt-get command, and exits with 2. Standard library only: it runs before anything is installed.

The environment is .venv. If the user has made one there, it stays as it is, and the environment is
build/venv. The Makefile makes the same choice.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARK = ".made-by-make"
OLDEST = (3, 11)
PACKAGES_OF = {
    "aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu libc6-dev-arm64-cross",
    "chromium": "chromium",
    "dot": "graphviz",
    "ip": "iproute2",
    "nft": "nftables",
    "prometheus": "prometheus",
    "redis-server": "redis-server",
    "tshark": "tshark",
}
# The sets that each set includes: an environment made for "dev" serves "cli" too.
INCLUDED_IN = {"bench": ("bench", "dev"), "cli": ("cli", "dev"), "dev": ("dev",)}
# A machine that was just started may be installing packages itself: seconds to wait for that.
WAITING = ("-o", "DPkg::Lock::Timeout=300")
FAILED = 2


def main(arguments: list[str]) -> int:
    """Return the exit code: 0 if everything is there."""
    if len(arguments) < 1 or arguments[0] not in INCLUDED_IN:
        print(__doc__, file=sys.stderr)
        return FAILED
    if sys.version_info < OLDEST:
        return _complain(f"Python {OLDEST[0]}.{OLDEST[1]} or newer is needed: make PYTHON=...")
    extra, commands = arguments[0], arguments[1:]
    # Debian's users have no directories of system commands in their PATH.
    places = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    missing = [command for command in commands if not shutil.which(command, path=places)]
    packages = [package for command in missing for package in PACKAGES_OF[command].split()]
    ready = any(_stamp(name).exists() for name in INCLUDED_IN[extra])
    if not ready and not _has_ensurepip():
        packages.append(f"python3.{sys.version_info.minor}-venv")
    if packages and not _install_debian(packages):
        return FAILED
    return 0 if ready else install_python(extra)


def choose_venv() -> Path:
    """The environment of make; another one at .venv is the user's, and stays as it is."""
    venv = ROOT / ".venv"
    if not venv.exists() or (venv / MARK).exists() or any(venv.glob(".ready-*")):
        return venv
    return ROOT / "build" / "venv"


VENV = choose_venv()


def _stamp(extra: str) -> Path:
    """The file that marks the environment as ready for this pyproject.toml and this interpreter."""
    state = (ROOT / "pyproject.toml").read_bytes() + sys.version.encode() + bytes(VENV)
    state += (ROOT / "trio_smc" / "rnic" / "_words.c").read_bytes()  # compiled in place
    return VENV / f".ready-{extra}-{hashlib.sha256(state).hexdigest()[:16]}"


def _has_ensurepip() -> bool:
    # In a new process: after an installation this process would still remember the absence.
    code = "import ensurepip, venv"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    return done.returncode == 0


def _install_debian(packages: list[str]) -> bool:
    line = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *packages]
    prefix = _as_root()
    if prefix is None or not shutil.which("apt-get"):
        _complain("missing: please run\n    sudo " + " ".join(line))
        return False
    print("installing " + " ".join(packages), flush=True)
    prefix = [*prefix, "env", "DEBIAN_FRONTEND=noninteractive"]
    install = [*prefix, *line, *WAITING]
    if run_quietly(install) or (
        run_quietly([*prefix, "apt-get", "update", "-q"]) and run_quietly(install)
    ):
        return True
    _complain("that failed; please run\n    sudo " + " ".join(line))
    return False


def _as_root() -> list[str] | None:
    if os.geteuid() == 0:
        return []
    if shutil.which("sudo") and run_quietly(["sudo", "-n", "true"]):
        return ["sudo", "-n"]
    return None


def install_python(extra: str) -> int:
    name = VENV.relative_to(ROOT)
    kept = "" if name == Path(".venv") else "; your .venv stays as it is"
    print(f"setting up {name} ({extra}){kept}; this happens once", flush=True)
    VENV.mkdir(parents=True, exist_ok=True)
    (VENV / MARK).touch()  # before the rest, which may fail
    for stale in VENV.glob(".ready-*"):
        stale.unlink()
    create = [sys.executable, "-m", "venv", "--upgrade", str(VENV)]
    if not (VENV / "pyvenv.cfg").exists():
        create.remove("--upgrade")
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    for command in (create, [*pip, "-q", "-e", f"{ROOT}[{extra}]"]):
        if not run_quietly(command):
            return _complain("failed: " + " ".join(command))
    _stamp(extra).touch()
    return 0


def run_quietly(command: list[str]) -> bool:
    """Run a command, and show its output only if it fails. Return True if it worked."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode and command[:3] != ["sudo", "-n", "true"]:
        sys.stderr.write(done.stdout.decode(errors="replace"))
    return done.returncode == 0


def _complain(text: str) -> int:
    print(text, file=sys.stderr)
    return FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
