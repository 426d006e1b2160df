"""Test suites of other projects, unmodified, over SMC-R.

The repository has no copy of them: trio-websocket's tests come with its source distribution, which
pip downloads once into build/suites; Trio's are in the installed package. Each suite runs in its
own process with a plug-in of tests/programs that hands out streams of trio_smc, counts them, and
fails a run in which a stream was not SMC-R.
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
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUITES = ROOT / "build" / "suites"
PLUGINS = ROOT / "tests" / "programs"

pytestmark = [pytest.mark.full, pytest.mark.timeout(240)]  # a suite in a process of its own

# These use the hooks of memory streams, which no other stream has; each in two versions
# of TLS.
HOOKED = (
    "test_unwrap",
    "test_send_all_fails_in_the_middle",
    "test_ssl_only_closes_stream_once",
    "test_send_error_during_handshake",
    "test_receive_error_during_handshake",
)


# Trio's tests come with a plug-in that runs them; others would interfere.
TRIOS_OWN = ("trio._tests.pytest_plugin", "no:trio", "no:anyio")


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
            # Python 3.11.4 and later have filters.
            safely: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            tar.extractall(directory, **safely)
        # Another worker may have been faster: in both cases the directory is complete.
        try:
            Path(directory, name).rename(unpacked)
        except OSError:
            assert unpacked.exists()
    return unpacked


def run_pytest(
    where: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run pytest in a process of its own, with the plug-ins at hand."""
    path = os.pathsep.join((str(ROOT), str(PLUGINS)))
    # Without the settings of this project: the suite runs as in its own project.
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(where)]
    return subprocess.run(
        [*command, "-p", "no:cacheprovider", "--timeout", "60", *arguments],
        cwd=where,
        env={**os.environ, "PYTHONPATH": path, "PYTEST_ADDOPTS": "", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def run_suite(where: Path, *arguments: str, **environment: str) -> tuple[dict[str, int], str]:
    """Run a suite that has to pass; return its counts of outcomes, and what it printed."""
    done = run_pytest(where, *arguments, **environment)
    assert done.returncode == 0, done.stdout
    return outcomes(done.stdout), done.stdout


def outcomes(output: str) -> dict[str, int]:
    """Read pytest's last line: how many passed, failed, ..."""
    summary = output.strip().splitlines()[-1]
    return {what: int(count) for count, what in re.findall(r"(\d+) ([a-z]+)", summary)}


def plugins(*names: str) -> list[str]:
    """Arguments that load these plug-ins, or with "no:" leave them out."""
    return [word for name in names for word in ("-p", name)]


@pytest.mark.parametrize(
    ("checkpoints", "left_out"),
    [
        ("strict", []),
        # Needs a turn of the client between two sends of the server, a response and a ping.
        ("amortised", ["test_open_websocket_internal_exc"]),
    ],
)
def test_trio_websocket(checkpoints: str, left_out: list[str]) -> None:
    source = source_of("trio-websocket")
    chosen = [word for name in left_out for word in ("-k", f"not {name}")]
    counts, output = run_suite(
        source,
        *("-p", "smc_for_tcp", "-o", "trio_mode=true", *chosen, "tests"),
        SMC_CHECKPOINTS=checkpoints,
    )
    assert counts["passed"] >= 60, output
    assert counts.get("deselected", 0) == len(left_out), output
    assert not counts.keys() & {"failed", "skipped", "xfailed"}, output
    streams = dict(re.findall(r"^streams (\w+ \S+) (\d+)$", output, re.MULTILINE))
    assert streams.keys() == {"client smc-r", "server smc-r"}, output
    assert min(map(int, streams.values())) >= 40, output


def test_trio_ssl(tmp_path: Path) -> None:
    """Trio's tests of SSLStream and SSLListener, wherever they make a pair of streams."""
    left_out = " or ".join(HOOKED)
    counts, output = run_suite(
        tmp_path,
        *plugins(*TRIOS_OWN, "smc_pairs"),
        *("-k", f"not ({left_out})", "--pyargs", "trio._tests.test_ssl"),
    )
    assert counts["passed"] >= 50, output
    assert counts["deselected"] == 2 * len(HOOKED), output
    assert not counts.keys() & {"failed", "xfailed"}, output
    (pairs,) = re.findall(r"^pairs smc-r (\d+)$", output, re.MULTILINE)
    assert int(pairs) >= 80, output


def test_trio_ssl_helpers(tmp_path: Path) -> None:
    """Trio's tests of serve_ssl_over_tcp, open_ssl_over_tcp_listeners, open_ssl_over_tcp_stream."""
    counts, output = run_suite(
        tmp_path,
        *plugins(*TRIOS_OWN, "smc_for_tcp"),
        *("--pyargs", "trio._tests.test_highlevel_ssl_helpers"),
    )
    assert counts.keys() == {"passed"}, output
    assert dict(re.findall(r"^streams (\w+ \S+) (\d+)$", output, re.MULTILINE)).keys() == {
        "client smc-r",
        "server smc-r",
    }, output


# Trio's tests of sockets that cannot pass with sockets other than its own, and why.
OF_TRIOS_OWN_SOCKET = (
    # These need the private class `trio._socket._SocketType`; the first calls its private
    # method, the others replace that or its private socket.
    "test_SocketType_resolve",
    "test_resolve_address_exception_in_connect_closes_socket",
    "test_SocketType_connect_paths",
    "test_custom_socket_factory",  # this test must be the first to set a factory
)
SOCKET_SUITES = (
    "test_socket",
    "test_highlevel_socket",
    "test_highlevel_open_tcp_stream",
    "test_highlevel_open_tcp_listeners",
    "test_highlevel_serve_listeners",
    "test_highlevel_ssl_helpers",
    "test_ssl",
)


@pytest.mark.parametrize("checkpoints", ["strict", "amortised"])
def test_trio_sockets_enabled(checkpoints: str, tmp_path: Path) -> None:
    """Trio's tests of sockets, of streams and listeners of sockets and of TLS, after `enable()`."""
    left_out = " or ".join(OF_TRIOS_OWN_SOCKET)
    counts, output = run_suite(
        tmp_path,
        *plugins(*TRIOS_OWN, "smc_enabled"),
        *("-rs", "--run-slow", "-k", f"not ({left_out})"),
        *("--pyargs", *(f"trio._tests.{module}" for module in SOCKET_SUITES)),
        SMC_CHECKPOINTS=checkpoints,
    )
    assert counts["passed"] >= 145, output
    assert counts["deselected"] == len(OF_TRIOS_OWN_SOCKET) + 1, output  # one is there twice
    assert re.findall(r"^SKIPPED \[\d+\] .*: (.*)$", output, re.MULTILINE) == ["windows only"]
    assert not counts.keys() & {"failed", "xfailed"}, output
    (streams,) = re.findall(r"^streams smc-r (\d+)$", output, re.MULTILINE)
    assert int(streams) >= 40, output


@pytest.mark.parametrize(
    ("module", "plugin"),
    [
        ("test_highlevel_ssl_helpers", "smc_for_tcp"),
        ("test_highlevel_ssl_helpers", "smc_enabled"),
        ("test_timeouts", "smc_pairs"),
    ],
)
def test_a_suite_that_passes_without_smc_fails(tmp_path: Path, module: str, plugin: str) -> None:
    """If all tests pass over TCP, or without a stream of trio_smc, the run fails."""
    done = run_pytest(
        tmp_path,
        *plugins(*TRIOS_OWN, plugin),
        *("--pyargs", f"trio._tests.{module}"),
        # No file can be made below it, so no peer with SMC-R is found.
        **({"XDG_RUNTIME_DIR": os.devnull} if plugin != "smc_pairs" else {}),
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    counts = outcomes(done.stdout)
    assert counts["passed"], done.stdout
    assert "failed" not in counts, done.stdout
    assert "smc-r 0" in done.stdout or "streams client tcp" in done.stdout
