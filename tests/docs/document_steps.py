"""Runs the commands of a page unchanged.

A comment that readers do not see describes the block below it:

    <!-- step: install -->              runs and ends well; only where everything is installed anew
    <!-- step: run -->                  runs and ends well; `run exit 1`: with that exit code
    <!-- step: start until "TEXT" -->   runs on; the next step waits until it has printed TEXT
    <!-- step: stop 1 -->               no block: Ctrl-C for the first started command
    <!-- file: NAME -->                 a file of that name
    <!-- shows -->                      the output of the step before, numbers aside
    <!-- shows start 1 -->              the output of the first started command, now or soon

Every block is a shell of its own, as a terminal is, in one directory. One without an activation of
its own is in the terminal of the installation.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import re
import shlex
import subprocess
import sys
import termios
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import trio

from tests.timing import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
_STEP: Final = re.compile(
    r"<!-- (step|file|shows):? ?([^\n]*?) ?-->\n+(?:```(\w+)\n(.*?)```)?", re.DOTALL
)
_USER: Final = "ann"
"""The user of the pages."""
_PORTS: Final = re.compile(r"\b(?:7000|8000)\b")


@dataclass(frozen=True)
class Step:
    """One comment and its block."""

    kind: str
    what: str
    language: str
    text: str


def steps_of(page: Path) -> list[Step]:
    """All steps of a page, in order; every block of shell commands must be a step."""
    text = page.read_text(encoding="utf-8")
    steps = [Step(*(part or "" for part in match.groups())) for match in _STEP.finditer(text)]
    shells = len(re.findall(r"^```sh\n", text, re.MULTILINE))
    assert shells == len([step for step in steps if step.language == "sh"]), "a block without step"
    return steps


@dataclass
class _Running:
    """A command that runs on, and its output."""

    process: trio.Process
    terminal: int
    """The other end of its terminal, where a reader types."""
    output: bytearray = field(default_factory=bytearray)
    more: trio.Event = field(default_factory=trio.Event)
    ended: bool = False

    async def listen(self) -> None:
        """Read its output until it ends."""
        assert self.process.stdout is not None
        async with self.process.stdout:
            async for piece in self.process.stdout:
                self.output += piece
                self._notify()
        self.ended = True
        self._notify()

    def _notify(self) -> None:
        self.more.set()
        self.more = trio.Event()

    async def until(self, text: str) -> None:
        """Wait until it has printed a text."""
        with trio.fail_after(2 * PATIENCE):
            while text.encode() not in self.output:
                assert not self.ended, self.output.decode()
                await self.more.wait()

    async def until_shown(self, text: str) -> None:
        """Wait until it has printed the lines of a text, numbers aside."""
        with trio.move_on_after(PATIENCE):
            while not self.ended and not shape(text) <= shape(self.output.decode()):
                await self.more.wait()
        assert shape(text) <= shape(self.output.decode()), self.output.decode()

    async def interrupt(self) -> None:
        """Ctrl-C: every process of the terminal gets it, once.

        A signal to the process group is no substitute: `trio-smc run` passes on signals that do not
        come from the terminal, and some programs fail if they get two at once.
        """
        if self.terminal >= 0:
            os.write(self.terminal, b"\x03")
        with trio.fail_after(2 * PATIENCE):
            await self.process.wait()
        self.close_terminal()

    def close_terminal(self) -> None:
        """Close the terminal, once; what still runs in it gets SIGHUP."""
        if self.terminal >= 0:
            os.close(self.terminal)
            self.terminal = -1


class Walk:
    """A reader's way through a page: a directory, its terminals, and their output.

    fresh: install everything as the page says, and use nothing else; otherwise the
      programs come from the environment of the tests, and `install` steps are left out.
    ports: a free port for each that pages use.
    """

    def __init__(self, directory: Path, *, fresh: bool, ports: dict[str, str]) -> None:
        self._directory = directory
        self._fresh = fresh
        self._ports = ports
        self._started: list[_Running] = []
        self._said = ""
        self._activation = ""
        self._environment = {
            name: value for name, value in os.environ.items() if name != "PYTHONPATH"
        }
        self.count = 0
        """Commands that were run."""
        if not fresh:
            self._lend()

    def _lend(self) -> None:
        """The environment after `. .venv/bin/activate`: programs of the tests' environment."""
        programs = self._directory / ".venv" / "bin"
        programs.mkdir(parents=True)
        ours = shlex.quote(sys.executable)
        (programs / "trio-smc").write_text(f'#!/bin/sh\nexec {ours} -m trio_smc.tools "$@"\n')
        (programs / "trio-smc").chmod(0o755)
        path = f"{programs}:{Path(sys.executable).parent}"
        (programs / "activate").write_text(f'PATH={shlex.quote(path)}:"$PATH"\n')
        (self._directory / "examples").symlink_to(ROOT / "examples")

    async def go(self, steps: Iterable[Step]) -> None:
        """All steps."""
        async with trio.open_nursery() as nursery:
            try:
                for step in steps:
                    await self._take(step, nursery)
            finally:
                with trio.CancelScope(shield=True):
                    for one in reversed(self._started):
                        try:
                            await one.interrupt()
                        finally:
                            one.close_terminal()

    async def _take(self, step: Step, nursery: trio.Nursery) -> None:
        match [step.kind, *step.what.split(maxsplit=2)]:
            case ["file", name]:
                path = trio.Path(self._directory / name)
                await path.write_text(self._with_ports(step.text))
            case ["step", "install"]:
                self._activation = "".join(re.findall(r"^\. .*\n", step.text, re.MULTILINE))
                if self._fresh:
                    await self._run(step.text, 0)
            case ["step", "run"]:
                await self._run(step.text, 0)
            case ["step", "run", "exit", code]:
                await self._run(step.text, int(code))
            case ["step", "start", "until", text]:
                await self._start(step.text, text.strip('"'), nursery)
            case ["step", "stop", number]:
                await self._started[int(number) - 1].interrupt()
            case ["shows"]:
                assert shape(step.text) <= shape(self._said), self._said
            case ["shows", "start", number]:
                await self._started[int(number) - 1].until_shown(step.text)
            case other:
                raise AssertionError(f"what is {other}?")

    async def _run(self, text: str, code: int) -> None:
        self.count += 1
        with trio.fail_after((40 if self._fresh else 2) * PATIENCE):
            done = await trio.run_process(
                self._shell(text),
                cwd=self._directory,
                env=self._environment,
                capture_stdout=True,
                stderr=subprocess.STDOUT,
                check=False,
            )
        self._said = done.stdout.decode()
        assert done.returncode == code, f"{text}\n{self._said}"

    async def _start(self, text: str, until: str, nursery: trio.Nursery) -> None:
        self.count += 1
        terminal, its_end = os.openpty()
        try:
            process = await trio.lowlevel.open_process(
                self._shell(text),
                cwd=self._directory,
                env={**self._environment, "PYTHONUNBUFFERED": "1"},
                stdin=its_end,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_take_terminal,
            )
        except BaseException:
            os.close(terminal)
            raise
        finally:
            os.close(its_end)
        running = _Running(process, terminal)
        self._started.append(running)
        nursery.start_soon(running.listen)
        await running.until(until)

    def _shell(self, text: str) -> list[str]:
        """The command that runs a block."""
        if self._activation and self._activation not in text:
            text = self._activation + text
        return ["bash", "-e", "-c", self._with_ports(text)]

    def _with_ports(self, text: str) -> str:
        return _PORTS.sub(lambda match: self._ports[match[0]], text)


def _take_terminal() -> None:
    """In the new process: its stdin becomes the terminal of its session."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def shape(text: str) -> set[str]:
    """The lines of an output without what differs each time: numbers, widths, the user's name."""
    user = re.escape(pwd.getpwuid(os.geteuid()).pw_name)
    text = re.sub(rf"(?<= )({user}|{_USER})(?= )", "USER", text)
    lines = (re.sub(r"\d+", "N", " ".join(line.split())) for line in text.splitlines())
    return {line for line in lines if line}
