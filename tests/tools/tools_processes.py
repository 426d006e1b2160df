"""Run `trio-smc`, and processes that it queries."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.timing import PATIENCE
from trio_smc.tools.cli import main

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 2 * PATIENCE
"""Seconds after which a process that a test started has failed."""


@dataclass
class Peer:
    """A process of `tests.tools.tools_peer`, and the values that it printed."""

    process: trio.Process
    details: dict[str, Any]

    @property
    def pid(self) -> int:
        """The process number."""
        return self.process.pid


@contextlib.asynccontextmanager
async def running(mode: str, module: str = "tests.tools.tools_peer") -> AsyncIterator[Peer]:
    """Run a process of `tests.tools.tools_peer` until the end of the block."""
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", module, mode],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with trio.fail_after(LIMIT):
            received = b""
            while b"\n" not in received:
                piece = await process.stdout.receive_some()
                assert piece, "the process ended before it was ready"
                received += piece
        yield Peer(process, json.loads(received))
    finally:
        with trio.CancelScope(shield=True):
            await process.stdin.aclose()
            with trio.move_on_after(LIMIT):
                await process.wait()
            if process.returncode is None:
                process.kill()
                await process.wait()
            await process.stdout.aclose()


@dataclass
class Done:
    """The output and the exit code of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The output as JSON. The exit code must be 0."""
        assert self.code == 0, self.err
        return json.loads(self.out)

    def rows(self) -> list[list[str]]:
        """The output, as words in lines."""
        return [line.split() for line in self.out.splitlines()]


async def command(*arguments: object) -> Done:
    """Run `trio-smc` as a process."""
    with trio.fail_after(LIMIT):
        done = await trio.run_process(
            [sys.executable, "-W", "error", "-m", "trio_smc.tools", *map(str, arguments)],
            cwd=ROOT,
            capture_stdout=True,
            capture_stderr=True,
            check=False,
        )
    return Done(done.returncode, done.stdout.decode(), done.stderr.decode())


async def quick_command(*arguments: object) -> Done:
    """Run `trio-smc` in a thread of this process, which takes a tenth of the time."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
        trio.fail_after(LIMIT),
    ):
        code = await trio.to_thread.run_sync(_code_of, list(map(str, arguments)))
    return Done(code, out.getvalue(), err.getvalue())


def _code_of(arguments: Sequence[str]) -> int:
    """Run `trio-smc` and return its exit code."""
    try:
        return main(arguments)
    except SystemExit as exit_:  # how argparse ends
        return exit_.code if isinstance(exit_.code, int) else 1


def command_here(capsys: pytest.CaptureFixture[str], *arguments: str) -> Done:
    """Run `trio-smc` in this thread, which must not have a Trio run. Faster than `command`."""
    code = _code_of(arguments)
    captured = capsys.readouterr()
    return Done(code, captured.out, captured.err)


def one_line(done: Done) -> str:
    """Return the only line on stderr of a command that rejected its input."""
    assert (done.code, done.out) == (2, ""), done
    [line] = done.err.splitlines()
    assert line.startswith("trio-smc")
    return line
