"""The two programs that compare ways to move bytes, and the table of their figures."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.guest_ways import Way, table
from tests.ports import reserved_port

HERE = Path(__file__).resolve().parent
FIGURES = {"round trip", "64 KiB writes", "1 MiB writes", "connections"}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The commands of both programs over TCP."""
    compiler = shutil.which("cc") or shutil.which("gcc-12")
    if compiler is None:
        pytest.fail("a C compiler is needed")
    program = tmp_path_factory.mktemp("compiled") / "socket_speed"
    subprocess.run(
        [compiler, "-O1", "-Wall", "-Werror", "-o", program, HERE / "socket_speed.c", "-ldl"],
        check=True,
    )
    return [[str(program), "tcp"], [sys.executable, "-m", "tests.lab.stream_speed"]]


@pytest.mark.parametrize("server", [0, 1])
@pytest.mark.parametrize("client", [0, 1])
def test_the_programs_have_one_protocol(
    programs: list[list[str]], server: int, client: int
) -> None:
    with (
        reserved_port() as number,
        subprocess.Popen(
            [*programs[server], "serve", str(number)], stdout=subprocess.PIPE
        ) as serving,
    ):
        assert serving.stdout is not None
        assert serving.stdout.readline() == b"ready\n"
        answer = subprocess.run(
            [*programs[client], "ask", "127.0.0.1", str(number), "3", "2", "2"],
            capture_output=True, check=True,
        )  # fmt: skip
        assert serving.wait() == 0
    figures = json.loads(answer.stdout)
    assert set(figures) == FIGURES
    assert all(value > 0 for value in figures.values())


def test_the_table_compares_each_round_with_tcp_of_the_same_program() -> None:
    measured = [Way("TCP", "TCP", ()), Way("other", "TCP", ())]
    rounds = {
        "round trip": {"TCP": [100.0, 200.0, 300.0], "other": [50.0, 50.0, 600.0]},
        "64 KiB writes": {"TCP": [10.0, 10.0, 12.5], "other": [20.0, 5.0, 25.0]},
        "1 MiB writes": {"TCP": [1000.0] * 3, "other": [1000.0] * 3},
        "connections": {"TCP": [1.0] * 3, "other": [3.0] * 3},
    }
    ratios = (
        "**2.00** (0.50–4.00)",
        "**2.00** (0.50–2.00)",
        "**1.00** (1.00–1.00)",
        "**3.00** (3.00–3.00)",
    )
    assert table(measured, rounds).splitlines()[2:] == [
        "| TCP | 200 µs | 10 MiB/s | 1,000 MiB/s | 1 1/s |",
        f"| other | {' | '.join(ratios)} |",
    ]
