"""Test suites of other projects, unmodified, over SMC-R.

Nothing of theirs is kept here: trio-websocket's tests come with its source distribution, which pip
downloads once into build/suites; Trio's are in the installed package. Each runs in a process of
its own with a plug-in of tests/programs that hands out our streams, counts them, and fails a run
in which a stream was not SMC-R.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SUITES = ROOT / "build" / "suites"
PLUGINS = ROOT / "tests" / "programs"

# These reach into the hooks of memory streams, which no other stream has; each in two versions
# of TLS.
HOOKED = (
    "test_unwrap",
    "test_send_all_fails_in_the_middle",
    "test_ssl_only_closes_stream_once",
    "test_send_error_during_handshake",
    "test_receive_error_during_handshake",
)


def source_of(project: str) -> Path:
    """Return the unpacked source distribution of the installed version of a project."""
    version = importlib.metadata.version(project)
    name = f"{project.replace('-', '_')}-{version}"
    unpacked = SUITES / name
    if unpacked.exists():
        return unpacked
    SUITES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=SUITES) as directory:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
        what = ["--no-deps", "--no-binary", project, "--dest", directory, f"{project}=={version}"]
        done = subprocess.run([*pip, *what], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"the suite cannot be had:\n{done.stdout}{done.stderr}"
        (archive,) = Path(directory).glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(directory, filter="data")
        # Another worker may have been faster: either way it is there, and whole.
        try:
            Path(directory, name).rename(unpacked)
        except OSError:
            assert unpacked.exists()
    return unpacked


def run_suite(where: Path, *arguments: str) -> tuple[dict[str, int], str]:
    """Run pytest in a process of its own; return its counts of outcomes, and what it printed."""
    path = os.pathsep.join((str(ROOT), str(PLUGINS)))
    # None of our own settings: the suite is run as its project would.
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(where)]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "--timeout", "60", *arguments],
        cwd=where,
        env={**os.environ, "PYTHONPATH": path, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    summary = output.strip().splitlines()[-1]
    counts = {what: int(count) for count, what in re.findall(r"(\d+) ([a-z]+)", summary)}
    return counts, output


@pytest.mark.timeout(240)
def test_trio_websocket() -> None:
    source = source_of("trio-websocket")
    counts, output = run_suite(source, "-p", "smc_for_tcp", "-o", "trio_mode=true", "tests")
    assert counts["passed"] >= 60, output
    assert not counts.keys() & {"failed", "skipped", "deselected", "xfailed"}, output
    streams = dict(re.findall(r"^streams (\w+ \S+) (\d+)$", output, re.MULTILINE))
    assert streams.keys() == {"client smc-r", "server smc-r"}, output
    assert min(map(int, streams.values())) >= 40, output


@pytest.mark.timeout(240)
def test_trio_ssl(tmp_path: Path) -> None:
    """Trio's tests of SSLStream and SSLListener, wherever they make a pair of streams."""
    plugins = ["trio._tests.pytest_plugin", "no:trio", "no:anyio", "smc_pairs"]
    arguments = [word for plugin in plugins for word in ("-p", plugin)]
    left_out = " or ".join(HOOKED)
    counts, output = run_suite(
        tmp_path, *arguments, "-k", f"not ({left_out})", "--pyargs", "trio._tests.test_ssl"
    )
    assert counts["passed"] >= 50, output
    assert counts["deselected"] == 2 * len(HOOKED), output
    assert not counts.keys() & {"failed", "xfailed"}, output
    (pairs,) = re.findall(r"^pairs smc-r (\d+)$", output, re.MULTILINE)
    assert int(pairs) >= 80, output
