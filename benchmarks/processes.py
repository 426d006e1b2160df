"""A process of a benchmark, as seen by the process that started it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["Failed", "Worker", "interrupts_deferred", "terminated_together"]


class Failed(Exception):
    """A worker process failed; the text names the workload and the error."""


class Worker:
    """A process that reads commands and answers them; it ends when its input is closed.

    Args:
      under: a command that runs the process, in words.
      tree: the copy of this repository whose code it runs; None: this one.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        core: int | None,
        under: Sequence[str] = (),
        tree: Path | None = None,
    ) -> None:
        command = [*under, sys.executable, "-m", module, *arguments]
        if core is not None:
            command += ["--core", str(core)]
        # With -m Python looks first in the working directory.  In a process group of its own the
        # worker gets no SIGINT by Ctrl-C, which would print a traceback: see `__exit__`.
        self.process = subprocess.Popen(
            command, cwd=tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            process_group=0,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.process.send_signal(signal.SIGCONT)
        if isinstance(error, KeyboardInterrupt):
            self.signal_group(signal.SIGTERM)
        self.process.__exit__(kind, error, traceback)

    def signal_group(self, number: int) -> None:
        """Send a signal to this process and to its descendants in the same process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Stop the process (SIGSTOP) at the end of the block; it runs on in the next one."""
        self.process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGSTOP)

    def call(self, **command: Any) -> Any:
        """Send a command; return the answer."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(command), file=self.process.stdin, flush=True)
        return self.answer()

    def answer(self) -> Any:
        """Return the next line that the process prints, decoded."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise Failed("a worker process ended; its error is above")
        reply = json.loads(line)
        if "error" in reply:
            raise Failed(reply["error"])
        return reply


@contextlib.contextmanager
def terminated_together(workers: Iterable[Worker]) -> Iterator[None]:
    """Terminate all workers at the same time if Ctrl-C ends the block.

    Otherwise a worker that still runs would print an error about the end of its peer.  A stopped
    process handles SIGTERM as soon as it continues.
    """
    try:
        yield
    except KeyboardInterrupt:
        for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGCONT):
            for worker in workers:
                worker.signal_group(number)
        raise


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Raise the KeyboardInterrupt of a Ctrl-C in the block at its end.

    Otherwise a process that has just been started could be unknown to the code that terminates it.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # SIGINT does not raise KeyboardInterrupt
        return
    pending: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: pending.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pending:
        raise KeyboardInterrupt
