"""Unmodified programs of other projects under `trio-smc run`, in processes of their own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ports import reserved_port
from tests.timing import PATIENCE

RUN = [sys.executable, "-m", "trio_smc.tools", "run"]

APPLICATION = """
from quart_trio import QuartTrio
app = QuartTrio(__name__)

@app.route("/")
async def index():
    return "unmodified " * 1000
"""

BROWSER = """
import sys, httpx, trio

async def main():
    async with httpx.AsyncClient() as client:
        for _ in range(3):
            answer = await client.get(sys.argv[1])
            print(answer.status_code, len(answer.content))

trio.run(main)
"""

UPLOAD_REFUSED = """
import functools, httpx, hypercorn.config, hypercorn.trio, trio

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": message["type"] + ".complete"})
            if message["type"] == "lifespan.shutdown":
                return
    headers = [(b"content-length", b"3"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 413, "headers": headers})
    await send({"type": "http.response.body", "body": b"big"})

async def pieces():
    for _ in range(20):
        yield b"x" * 5000
        await trio.sleep(0.005)

async def main():
    config = hypercorn.config.Config()
    config.bind = ["127.0.0.1:0"]
    config.errorlog = config.accesslog = None
    serve = functools.partial(hypercorn.trio.serve, app, config)
    async with trio.open_nursery() as nursery, httpx.AsyncClient() as client:
        [address] = await nursery.start(serve)
        for _ in range(5):
            for content in (b"x" * 5_000_000, pieces()):
                print((await client.post(address, content=content)).status_code, flush=True)
        nursery.cancel_scope.cancel()

trio.run(main)
"""

WEBSOCKET_SERVER = """
import trio
from trio_websocket import ConnectionClosed, serve_websocket

async def echo(request):
    connection = await request.accept()
    try:
        while True:
            await connection.send_message(await connection.get_message())
    except ConnectionClosed:
        pass

async def main():
    async with trio.open_nursery() as nursery:
        server = await nursery.start(serve_websocket, echo, "127.0.0.1", 0, None)
        print("port", server.port, flush=True)

trio.run(main)
"""

WEBSOCKET_CLIENT = """
import sys, trio
from trio_websocket import open_websocket_url

async def main():
    async with open_websocket_url(sys.argv[1]) as connection:
        await connection.send_message("hello " * 10_000)
        print(len(await connection.get_message()))

trio.run(main)
"""

DATABASE_CLIENT = """
import sys, coredis, trio

async def main():
    client = coredis.Redis(host="127.0.0.1", port=int(sys.argv[1]), decode_responses=True)
    async with client:
        await client.set("name", "x" * 100_000)
        print(len(await client.get("name")))

trio.run(main)
"""

SUCCESSOR = """
import sys, trio, trio_smc

async def main():
    async with trio_smc.open_stack() as stack:
        for listener in await stack.open_listeners(int(sys.argv[1]), host="127.0.0.1"):
            await listener.aclose()

trio.run(main)
"""


@contextmanager
def started(
    command: list[str], cwd: Path, *, stop: signal.Signals = signal.SIGTERM
) -> Iterator[subprocess.Popen[str]]:
    """A server that is stopped at the end; its output is one pipe."""
    with subprocess.Popen(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            process.send_signal(stop)
            process.communicate(timeout=2 * PATIENCE)


def wait_for(process: subprocess.Popen[str], text: str) -> str:
    """The first line of its output that has ``text``."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return line
    raise AssertionError("".join(seen))


def run_client(cwd: Path, program: str, *arguments: str) -> str:
    """The output of a client that must not fall back to TCP."""
    (cwd / "client.py").write_text(program)
    done = subprocess.run(
        [*RUN, "--require-smc", "--", sys.executable, "client.py", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_answer_that_comes_before_the_upload_ends_is_read(tmp_path: Path) -> None:
    """The server answers 413 and closes, without reading the upload."""
    done = subprocess.run(
        [*RUN, "--require-smc", "--", sys.executable, "-c", UPLOAD_REFUSED],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )
    assert done.stdout.split() == ["413"] * 10, done.stderr


@pytest.mark.parametrize("workers", [1, 2])
def test_hypercorns_own_command_line(workers: int, tmp_path: Path) -> None:
    """The workers are processes of its own, spawned by multiprocessing.

    When the first worker has ended, hypercorn kills what is left of the others, which then cannot
    remove their sockets; the next process that opens an RNIC and listens there does.
    """
    (tmp_path / "application.py").write_text(APPLICATION)
    hypercorn = str(Path(sys.executable).with_name("hypercorn"))
    command = [*RUN, "--", hypercorn, "-k", "trio", "-w", str(workers)]
    with started([*command, "-b", "127.0.0.1:0", "application:app"], tmp_path) as server:
        line = wait_for(server, "Running on")
        address = line.split("Running on ")[1].split()[0]
        output = run_client(tmp_path, BROWSER, address)
    assert output.splitlines() == ["200 11000"] * 3
    port = address.rpartition(":")[2]
    subprocess.run([sys.executable, "-c", SUCCESSOR, port], timeout=2 * PATIENCE, check=True)


def test_trio_websocket(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(WEBSOCKET_SERVER)
    command = [*RUN, "--", sys.executable, "server.py"]
    with started(command, tmp_path, stop=signal.SIGINT) as server:
        port = wait_for(server, "port").split()[-1]
        output = run_client(tmp_path, WEBSOCKET_CLIENT, f"ws://127.0.0.1:{port}/")
    assert output == "60000\n"


def test_a_database_client_and_the_stock_server(tmp_path: Path) -> None:
    """Client - SMC-R - `trio-smc proxy` - TCP - an unmodified server."""
    redis = shutil.which("redis-server")
    assert redis, "redis-server is missing"
    proxy = [sys.executable, "-u", "-m", "trio_smc.tools", "proxy", "--require-smc"]
    with (
        reserved_port() as port,
        started([redis, "--port", str(port), "--save", ""], tmp_path) as database,
        started([*proxy, "smc:127.0.0.1:0", f"tcp:127.0.0.1:{port}"], tmp_path) as front,
    ):
        wait_for(database, "eady to accept connections")
        front_port = wait_for(front, "listening on").split()[-1]
        output = run_client(tmp_path, DATABASE_CLIENT, front_port)
        wait_for(front, "forwarding a connection, mode smc-r")
        front.send_signal(signal.SIGTERM)
        passed = wait_for(front, "connections: ")
    assert output == "100000\n"
    # The bytes that the proxy passed on, and their cost.
    costs = r"connections: (\d+); bytes: (\d.*B); processor time of the proxy: (\d+\.\d\d) s"
    found = re.search(costs, passed)
    assert found
    assert int(found[1]) >= 1
    assert "KiB" in found[2]
    assert float(found[3]) > 0


def test_from_tcp_to_smc_and_back_to_tcp(tmp_path: Path) -> None:
    """Two proxies in a row between two programs of plain sockets; both directions, half closed."""
    proxy = [sys.executable, "-u", "-m", "trio_smc.tools", "proxy", "--require-smc"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        target = f"tcp:127.0.0.1:{server.getsockname()[1]}"
        with started([*proxy, "smc:127.0.0.1:0", target], tmp_path) as near:
            middle = wait_for(near, "listening on").split()[-1]
            with started([*proxy, "tcp:127.0.0.1:0", f"smc:127.0.0.1:{middle}"], tmp_path) as far:
                port = int(wait_for(far, "listening on").split()[-1])
                with socket.create_connection(("127.0.0.1", port), PATIENCE) as client:
                    accepted, _ = server.accept()
                    with accepted:
                        accepted.settimeout(PATIENCE)
                        client.sendall(b"question")
                        client.shutdown(socket.SHUT_WR)
                        assert accepted.makefile("rb").read() == b"question"
                        accepted.sendall(b"answer")
                        accepted.shutdown(socket.SHUT_WR)
                        assert client.makefile("rb").read() == b"answer"
                with socket.create_connection(("127.0.0.1", port), PATIENCE) as client:
                    accepted, _ = server.accept()
                    client.sendall(b"half a")
                    assert accepted.recv(100)
                    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1" + bytes(7))
                    accepted.close()
                    with pytest.raises(ConnectionResetError):
                        client.recv(1)


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        ([], "no program is given"),
        (["--config", "missing.toml", "--", "true"], "missing.toml"),
        (["--config", "bad.toml", "--", "true"], "there is no setting 'colour'"),
        (["--config", "worse.toml", "--", "true"], "worse.toml: not UTF-8 (at byte 0)"),
        (["--config", ".", "--", "true"], "trio-smc run: .: Is a directory\n"),
        (["--config", "pnet.toml", "--", "true"], "the PNET table missing.pnet cannot be read: No"),
        (["--config", "port.toml", "--", "true"], "rnics: 'roce:rxe0:x' is neither "),
        (["--config", "capture.toml", "--", "true"], "the directory of 'a/b' does not exist"),
        (["--config", "switch.toml", "--", "true"], "require_smc: 1 is not true or false"),
        (["--config", "path.toml", "--", "true"], "directory: 7 is not a path"),
    ],
)
def test_bad_input(arguments: list[str], output: str, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text('colour = "red"')
    (tmp_path / "worse.toml").write_bytes(b"\xff\xfe = [")
    (tmp_path / "pnet.toml").write_text('pnet = "missing.pnet"')
    (tmp_path / "port.toml").write_text('rnics = ["roce:rxe0:x"]')
    (tmp_path / "capture.toml").write_text('capture = "a/b"')
    (tmp_path / "switch.toml").write_text("require_smc = 1")
    (tmp_path / "path.toml").write_text("directory = 7")
    done = subprocess.run(
        [*RUN, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert output in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_no_such_program(tmp_path: Path) -> None:
    done = subprocess.run(
        [*RUN, "--", "no-such-program"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 127
    assert done.stderr == "trio-smc run: cannot start no-such-program: no such program\n"
    assert not done.stdout


def test_a_hidden_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('theirs')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [*RUN, "--", sys.executable, "-c", "import trio_smc; import trio; print(trio.run)"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    # The command itself is a Python program with that path.
    assert done.stdout.splitlines()[:-1] == ["theirs", "theirs"]
    assert "run at" in done.stdout
    assert "_enable" not in done.stderr
