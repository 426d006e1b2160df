"""Processes that run commands of a test or campaign: one JSON object per line in each direction.

The program is `tests.e2e.peer`. It runs one command after the other, and answers each; it ends at
the end of its input.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import trio

__all__ = ["Peer", "PeerError", "open_peer"]


class PeerError(Exception):
    """A process answered with an error, or ended instead of answering."""


class Peer:
    """A running `tests.e2e.peer`."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        self._unread = b""

    async def call(self, command: str, **arguments: object) -> dict[str, Any]:
        """Send a command and return its answer.  Raises PeerError."""
        await self.send_command(command, **arguments)
        return await self.answer()

    async def send_command(self, command: str, **arguments: object) -> None:
        """Send a command; a call of `answer` must follow."""
        assert self.process.stdin is not None
        line = json.dumps({"do": command, **arguments}) + "\n"
        await self.process.stdin.send_all(line.encode())

    async def answer(self) -> dict[str, Any]:
        """Return the answer to the last command.  Raises PeerError."""
        assert self.process.stdout is not None
        while b"\n" not in self._unread:
            piece = await self.process.stdout.receive_some()
            if not piece:
                raise PeerError(f"the process ended, exit code {await self.process.wait()}")
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer


@contextlib.asynccontextmanager
async def open_peer(
    settings: dict[str, object] | None = None,
    *,
    module: str = "tests.e2e.peer",
    patience: float = 30,
) -> AsyncIterator[Peer]:
    """Start a process; at the end of the block let it finish, and check its exit code.

    Args:
      settings: of its `Config`; None: it uses the default stack.
      module: what to run.
      patience: seconds it may take to end.
    """
    arguments = [] if settings is None else [json.dumps(settings)]
    process = await trio.lowlevel.open_process(
        [sys.executable, "-W", "error", "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    peer = Peer(process)
    try:
        yield peer
        await process.stdin.aclose()
        with trio.move_on_after(patience):
            await process.wait()
    finally:
        hung = process.poll() is None
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            await process.stdin.aclose()
            await process.stdout.aclose()
    if hung:
        raise PeerError(f"the process did not end within {patience} s")
    if process.returncode not in (0, -9):
        raise PeerError(f"the process ended with exit code {process.returncode}")
