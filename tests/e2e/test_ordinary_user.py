"""Two processes of an ordinary user, without any privilege, use SMC-R."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from tests.timing import SLOWER

USER = 65534

# Root changes to another user after the imports: that user may not be able to read the modules.
BOTH = """
    import encodings.idna, os, sys
    sys.path[:0] = {path!r}
    import trio, trio_smc
    from tests.e2e.bytes_by_position import Text

    if os.getuid() == 0:
        os.setgroups([])
        os.setgid({user})
        os.setuid({user})
    assert os.getuid() != 0
    text = Text(1).piece(0, 3_000_000)

    async def server():
        [listener] = await trio_smc.open_listeners(0, host="127.0.0.1")
        print(listener.socket.getsockname()[1], flush=True)
        async with await listener.accept() as stream:
            got = b""
            while data := await stream.receive_some():
                got += data
            assert got == text
            await stream.send_all(got)
        await listener.aclose()

    async def client():
        async with await trio_smc.open_stream("127.0.0.1", int(sys.argv[1])) as stream:
            await stream.send_all(text)
            await stream.send_eof()
            got = b""
            while data := await stream.receive_some():
                got += data
            assert got == text
            print(stream.mode)

    trio.run(server if len(sys.argv) == 1 else client)
"""


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """With a runtime directory that belongs to the user."""
    directory = Path(tempfile.mkdtemp(prefix="smc-", dir="/tmp"))
    if os.getuid() == 0:
        os.chown(directory, USER, USER)
    yield {
        "PATH": os.environ["PATH"],
        "PYTHONDONTWRITEBYTECODE": "1",
        "XDG_RUNTIME_DIR": str(directory),
    }
    assert [path for path in directory.rglob("*") if not path.is_dir()] == []
    shutil.rmtree(directory)


@pytest.mark.timeout(120)  # two processes that import all of it, and may keep no bytecode
async def test_two_processes_of_an_ordinary_user(environment: dict[str, str]) -> None:
    root = str(Path(__file__).parents[2])
    program = textwrap.dedent(BOTH).format(path=[root, *sys.path], user=USER)
    command = [sys.executable, "-W", "error", "-c", program]
    with trio.fail_after(100 * SLOWER):
        server = await trio.lowlevel.open_process(command, env=environment, stdout=subprocess.PIPE)
        try:
            assert server.stdout is not None
            port = await server.stdout.receive_some()
            client = await trio.run_process(
                [*command, port.decode().strip()], env=environment, capture_stdout=True
            )
            assert client.stdout == b"smc-r\n"
            assert await server.wait() == 0
        finally:
            server.kill()
            with trio.CancelScope(shield=True):
                await server.wait()
            if server.stdout is not None:
                await server.stdout.aclose()
