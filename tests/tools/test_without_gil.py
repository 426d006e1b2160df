"""A free-threaded Python without the GIL uses TCP only, and the commands print the reason.

If this Python is not free-threaded, the tests replace `sys._is_gil_enabled` in their processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.timing import PATIENCE
from tests.tools.test_run import TRIO

WHY = "the software RNIC needs the GIL, and this Python runs without one"
MESSAGE = "SMC-R does not work on this operating system, or with this Python"
REMEDY = "run both ends on Linux, with a Python that has the GIL"
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
BY_NAME = """
import sys, trio, trio_smc, trio_smc.tools.cli
assert not sys._is_gil_enabled()

async def main():
    try:
        async with trio_smc.open_stack(trio_smc.Config(rnics=(trio_smc.SoftRnic(),))):
            pass
    except OSError as error:
        print(error.strerror)

trio.run(main)
"""
SERVER = """
import sys, trio
from functools import partial

async def main():
    async with trio.open_nursery() as nursery:
        serve = partial(trio.serve_tcp, trio.aclose_forcefully, 0, host="127.0.0.1")
        listeners = await nursery.start(serve)
        print(listeners[0].socket.getsockname()[1], flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)
        nursery.cancel_scope.cancel()

trio.run(main)
"""

Python = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    if FREE_THREADED:
        return {**os.environ, "PYTHON_GIL": "0"}
    stand_in = tmp_path / "stand-in" / "sitecustomize.py"
    stand_in.parent.mkdir()
    stand_in.write_text("import sys\nsys._is_gil_enabled = lambda: False\n")
    path = os.pathsep.join(filter(None, (str(stand_in.parent), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


@pytest.fixture
def python(environment: dict[str, str]) -> Python:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            env=environment, capture_output=True, text=True, timeout=2 * PATIENCE, check=False,
        )  # fmt: skip

    return run


def test_the_software_rnic_refuses_with_a_reason(python: Python) -> None:
    """Importing trio_smc does not enable the GIL: no extension module requires it."""
    done = python("-c", BY_NAME)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{WHY}\n", "")


def test_programs_run_over_tcp(python: Python) -> None:
    command = ["-m", "trio_smc.tools", "run", "--report", "--", sys.executable, "-c"]
    done = python(*command, f"{TRIO}\ntrio.run(main)")
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("trio-smc run:").strip() for line in done.stderr.splitlines()]
    assert lines[:2] == ["10 connections of 1 process", "0 SMC-R, sent 0 B, received 0 B"]
    assert lines[2].startswith("10 TCP, sent ")
    assert "5 local: unsupported-platform" in lines


def test_programs_that_require_smc_end_with_the_reason(python: Python) -> None:
    command = ["-m", "trio_smc.tools", "run", "--require-smc", "--", sys.executable, "-c"]
    done = python(*command, f"{TRIO}\ntrio.run(main)")
    assert done.returncode == 1
    assert f"SMC-R is required: {MESSAGE}\n" in done.stderr


def test_the_commands_print_the_reason(python: Python, environment: dict[str, str]) -> None:
    command = ["-m", "trio_smc.tools", "rnic"]
    assert f"No software RNIC: {WHY}.\n" in python(*command).stdout
    assert json.loads(python(*command, "--json").stdout)["no_software_rnic"] == WHY
    with subprocess.Popen(
        [sys.executable, "-m", "trio_smc.tools", "run", "--", sys.executable, "-c", SERVER],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        assert server.stdout is not None
        checked = python(
            "-m", "trio_smc.tools", "check", "127.0.0.1", server.stdout.readline().strip()
        )
    assert checked.returncode == 1
    assert f"SMC-R is not used: {MESSAGE}.\n" in checked.stdout
    assert f"  remedy     {REMEDY}" in checked.stdout
