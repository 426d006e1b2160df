"""The tutorial's server with clients that reset or are killed, and its end by Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import trio

import trio_smc
from tests.docs.document_steps import steps_of
from tests.ports import reserved_port
from tests.tools.test_operating import read_until
from tests.tools.tools_processes import LIMIT, ROOT

RUDE = """
import os, signal, sys, trio, trio_smc
async def main():
    stream = await trio_smc.open_stream("127.0.0.1", int(sys.argv[1]))
    await stream.send_all(b"hello " * 100_000)
    os.kill(os.getpid(), signal.SIGKILL)
trio.run(main)
"""


async def test_rude_clients_and_ctrl_c(tmp_path: Path) -> None:
    """Killed and resetting clients end their connection only; Ctrl-C prints one line."""
    [step] = [each for each in steps_of(ROOT / "docs" / "tutorial.md") if each.what == "server.py"]
    with reserved_port() as port:
        program = tmp_path / "server.py"
        program.write_text(step.text.replace("7000", str(port)))
        process = await trio.lowlevel.open_process(
            [sys.executable, "-u", str(program)], cwd=ROOT, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert process.stdout is not None
        try:
            await read_until(process.stdout, f"serving on port {port}")
            with trio.fail_after(LIMIT):
                await trio.run_process([sys.executable, "-c", RUDE, str(port)], check=False)
                plain = await trio.open_tcp_stream("127.0.0.1", port)
                await plain.send_all(b"x" * 10_000)
                linger = trio.socket.SOL_SOCKET, trio.socket.SO_LINGER
                plain.setsockopt(*linger, b"\1\0\0\0\0\0\0\0")
                await plain.aclose()
                async with await trio.open_tcp_stream("127.0.0.1", port) as good:
                    await good.send_all(b"hello")
                    await good.send_eof()
                    assert b"".join([data async for data in good]) == b"HELLO"
                process.send_signal(signal.SIGINT)
                rest = b"".join([piece async for piece in process.stdout])
                assert await process.wait() == 0, rest
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            await process.stdout.aclose()
    async with trio_smc.open_stack():
        pass  # removes the socket that the killed client has left
    assert rest.endswith(b"stopped\n")
    assert b"Traceback" not in rest
