"""Two releases on one host: connections of both, and the commands of this release.

The older release is the whole package in `tests/golden/release-0.1.0.tar.xz`: ``git archive`` of
``trio_smc`` in commit 3290ec0.  Its processes run unchanged, with their own defaults.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.timing import PATIENCE
from tests.tools.tools_processes import command_here

ROOT = Path(__file__).parents[2]
TREE = ROOT / "tests" / "golden" / "release-0.1.0.tar.xz"
NOTE = "another release of trio_smc, before 0.3.0, in process {}; this command has "


class Peer(NamedTuple):
    """A process of a release."""

    process: subprocess.Popen[str]

    def line(self) -> str:
        """The next line that the process prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the package of the older release."""
    place = tmp_path_factory.mktemp("release")
    with tarfile.open(TREE) as archive:
        archive.extractall(place, filter="data")
    return place


@contextlib.contextmanager
def running(tree: Path, *arguments: object) -> Iterator[Peer]:
    """Run a process of a release until the block ends."""
    program = Path(__file__).with_name("side_by_side_peer.py")
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    with subprocess.Popen(
        [sys.executable, "-P", str(program), str(tree), *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    ) as process:  # fmt: skip
        try:
            yield Peer(process)
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()


def test_connections_between_releases_are_tcp_with_a_typed_reason(
    older: Path, runtime_directory: Path
) -> None:
    """Connections within a release are SMC-R at the same time."""
    with running(older, "serve") as old, running(ROOT, "serve") as new:
        ports = old.line(), new.line()
        assert (old.line(), new.line()) == ("smc-r None", "smc-r None")
        for tree, ends in (
            (older, ("smc-r None", "tcp local-version-mismatch")),
            (ROOT, ("tcp local-version-mismatch", "smc-r None")),
        ):
            for port, expected in zip(ports, ends, strict=True):
                with running(tree, "connect", port) as client:
                    assert client.line() == expected, (tree, port)


def test_commands_show_processes_of_both_releases(
    older: Path, runtime_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each command shows both, and one line names the process of the other release."""
    with running(older, "serve") as old, running(ROOT, "serve") as new:
        old_port, _ = old.line(), new.line()
        assert (old.line(), new.line()) == ("smc-r None", "smc-r None")
        both = {old.process.pid, new.process.pid}
        for words in (("ss",), ("ss", "-v"), ("lg",), ("stats",)):
            done = command_here(capsys, *words, "--json")
            assert done.code == 0, done.err
            assert {each["pid"] for each in json.loads(done.out)} == both, words
            assert NOTE.format(old.process.pid) in done.err
            assert done.err.count("\n") == 1, done.err
            shown = command_here(capsys, *words)
            assert (shown.code, shown.out.count("Traceback")) == (0, 0)
        found = command_here(capsys, "rnic", "--json").json["stacks"]
        assert {each["pid"] for each in found} == both
        modes = {
            each["pid"]: {connection["mode"] for connection in each["connections"]}
            for each in command_here(capsys, "ss", "--json").json
        }
        assert all(each == {"smc-r"} for each in modes.values())
        done = command_here(capsys, "check", "127.0.0.1", old_port)
        assert done.code == 1
        assert "local-version-mismatch" in done.out
