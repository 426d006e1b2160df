"""`trio-smc capture` records the messages of a running stack through its control socket."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

import trio_smc
from tests.capture.test_capture import SECRET, echo_port, talk
from tests.streams.stream_pairs import smc_config
from tests.timing import PATIENCE
from trio_smc.capture import pcapng, sinks
from trio_smc.capture.dissection import dissect
from trio_smc.tools.cli import main

COMMAND = (sys.executable, "-m", "trio_smc.tools", "capture")


async def run_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Run the command in a thread; the stack that it queries runs in this one.

    Returns:
      The exit code and stderr.
    """
    with trio.fail_after(PATIENCE):
        code = await trio.to_thread.run_sync(main, ["capture", *arguments])
    return code, capsys.readouterr().err


def own_arguments(stack: trio_smc.Stack) -> list[str]:
    return [str(os.getpid()), "--stack", stack.peer_id.hex()]


async def test_a_capture_ends_with_its_stack() -> None:
    """The capture contains all messages after its start, up to the end of the stack."""
    received = bytearray()
    async with trio.open_nursery() as nursery, echo_port() as port:
        async with trio_smc.open_stack(smc_config()) as stack:
            arguments = [*COMMAND, *own_arguments(stack), "-o", "-"]
            start = partial(
                trio.run_process, arguments, stdin=b"", stdout=subprocess.PIPE, check=True
            )
            process: trio.Process = await nursery.start(start)
            assert process.stdout is not None
            with trio.fail_after(2 * PATIENCE):
                received += await process.stdout.receive_some()
            assert received.startswith(b"\n\r\r\n")
            await talk(stack, port, SECRET)
        with trio.fail_after(PATIENCE):
            async for piece in process.stdout:
                received += piece
    count = Counter(
        type(each.event).__name__ for each in dissect(pcapng.read(io.BytesIO(received)))
    )
    assert (count["Proposal"], count["Write"], count["DeleteLink"]) == (1, 1, 2)
    assert SECRET not in received


async def test_capture_writes_a_file_for_some_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "capture.pcapng"
    async with trio_smc.open_stack(smc_config()) as stack:
        arguments = own_arguments(stack)
        code, err = await run_command(capsys, *arguments, "-o", str(path), "--seconds", "0.2")
        nbytes = path.stat().st_size
        assert (code, err) == (0, f"trio-smc capture: written: {path}, {nbytes} B\n")
        with trio.fail_after(PATIENCE):
            # The stack notices that the client has disconnected.
            while stack.runtime.groups.observer is not None:
                await trio.testing.wait_all_tasks_blocked()
    with path.open("rb") as file:
        assert list(pcapng.read(file)) == []
    assert path.stat().st_mode & 0o777 == 0o600


async def test_capture_needs_one_stack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "capture.pcapng"
    async with trio_smc.open_stack(smc_config()) as one, trio_smc.open_stack(smc_config()):
        [pid, *_] = own_arguments(one)
        for arguments, message in (
            ([pid], "several stacks"),
            ([pid, "--stack", "00"], "no stack 00"),
            (["999999999"], "no process 999999999"),
        ):
            code, err = await run_command(capsys, *arguments, "-o", str(path))
            assert (code, err.count("\n")) == (2, 1), err
            assert message in err
    assert not path.exists()
    assert (await run_command(capsys, pid, "-o", str(path)))[0] == 2


async def test_an_unread_capture_does_not_delay_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stack buffers a bounded number of bytes, and neither its streams nor its end wait.

    The receiver here is blocked in its first send.
    """
    monkeypatch.setattr(sinks, "MOST_UNSENT", 3000)
    monkeypatch.setattr(sinks, "PATIENCE", 0.1)
    ours, theirs = trio.testing.memory_stream_pair()
    taken = bytearray()

    async def block_forever() -> None:
        await trio.sleep_forever()

    ours.send_stream.send_all_hook = block_forever
    async with echo_port() as port, trio_smc.open_stack(smc_config()) as stack:
        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(sinks.send_capture, stack, ours)
                for _ in range(5):
                    await talk(stack, port, SECRET)
                nursery.cancel_scope.cancel()
        assert stack.runtime.groups.observer is None
    with trio.move_on_after(0.1):
        taken += await theirs.receive_some()
    assert len(taken) < 10_000
