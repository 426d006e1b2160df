"""Programs of other projects, unmodified: `make programs`, in a venv that it makes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trustme

from tests.ports import reserved_port
from tests.programs.test_unmodified import started, wait_for
from tests.timing import PATIENCE

pytestmark = [pytest.mark.others, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "most": [
        "dnspython", "fastapi", "httpx[http2]", "hypercorn", "mcp>=2", "pg8000",
        "python-multipart", "trio", "trio-websocket", "wsproto",
    ],
    "purerpc": ["protobuf", "purerpc>=0.8", "trio"],  # purerpc needs an older h2
}  # fmt: skip

FASTAPI_APP = """
import trio
from fastapi import FastAPI, Request, UploadFile, WebSocket
from fastapi.responses import StreamingResponse

app = FastAPI()

@app.get("/stream")
async def stream():
    async def pieces():
        for number in range(200):
            yield bytes([number]) * 10_000
    return StreamingResponse(pieces())

@app.post("/upload")
async def upload(file: UploadFile):
    return {"size": len(await file.read())}

@app.get("/events")
async def events():
    async def events():
        for number in range(3):
            yield f"data: {number}\\n\\n"
            await trio.sleep(0.05)
    return StreamingResponse(events(), media_type="text/event-stream")

@app.websocket("/echo")
async def echo(websocket: WebSocket):
    await websocket.accept()
    await websocket.send_text(await websocket.receive_text())
    await websocket.close()
"""

FASTAPI_CLIENT = """
import sys, httpx, trio
from trio_websocket import open_websocket_url

async def main():
    url = sys.argv[1]
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        got = b""
        async with client.stream("GET", "/stream") as answer:
            async for piece in answer.aiter_bytes():
                got += piece
        assert got == b"".join(bytes([number]) * 10_000 for number in range(200))
        answer = await client.post("/upload", files={"file": ("name", b"u" * 3_000_000)})
        assert answer.json() == {"size": 3_000_000}
        async with client.stream("GET", "/events") as answer:
            events = [line async for line in answer.aiter_lines() if line]
        assert events == ["data: 0", "data: 1", "data: 2"]
    async with open_websocket_url(url.replace("http", "ws") + "/echo") as connection:
        await connection.send_message("hello " * 10_000)
        assert await connection.get_message() == "hello " * 10_000
    print("all of it")

trio.run(main)
"""

HTTP2_CLIENT = """
import ssl, sys, httpx, trio

async def main():
    context = ssl.create_default_context(cafile=sys.argv[2])
    async with httpx.AsyncClient(http2=True, verify=context, timeout=30) as client:
        answers = []
        async def ask():
            answers.append(await client.get(sys.argv[1] + "/stream"))
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(ask)
        print({(answer.http_version, len(answer.content)) for answer in answers})

trio.run(main)
"""

MCP_APP = """
from mcp.server import MCPServer

server = MCPServer("adder")

@server.tool()
def add(one: int, other: int) -> int:
    return one + other

app = server.streamable_http_app()
"""

MCP_CLIENT = """
import sys, anyio
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client

async def main():
    async with streamable_http_client(sys.argv[1] + "/mcp") as (receive, send):
        async with ClientSession(receive, send) as session:
            await session.initialize()
            answer = await session.call_tool("add", {"one": 40, "other": 2})
            print(answer.content[0].text)

anyio.run(main, backend="trio")
"""

RPC_SERVER = """
import anyio, purerpc
from google.protobuf.wrappers_pb2 import StringValue
from purerpc import Cardinality, RPCSignature

service = purerpc.Service("Echo")

@service.rpc("Shout")
async def shout(message: StringValue) -> StringValue:
    return StringValue(value=message.value.upper())

server = purerpc.Server(PORT)
server.add_service(service)
server.serve(backend="trio")
"""

RPC_CLIENT = """
import sys, anyio, purerpc
from google.protobuf.wrappers_pb2 import StringValue
from purerpc import Cardinality, RPCSignature

async def main():
    async with purerpc.insecure_channel("127.0.0.1", int(sys.argv[1])) as channel:
        kinds = RPCSignature(Cardinality.UNARY_UNARY, StringValue, StringValue)
        shout = purerpc.Client("Echo", channel).get_method_stub("Shout", kinds)
        print((await shout(StringValue(value="hello"))).value)

anyio.run(main, backend="trio")
"""

DNS_SERVER = """
import dns.message, dns.rrset, trio

async def exactly(stream, count):
    got = b""
    while len(got) < count:
        piece = await stream.receive_some(count - len(got))
        if not piece:
            return b""
        got += piece
    return got

async def answer(stream):
    while size := await exactly(stream, 2):
        query = dns.message.from_wire(await exactly(stream, int.from_bytes(size, "big")))
        reply = dns.message.make_response(query)
        reply.answer.append(dns.rrset.from_text(query.question[0].name, 60, "IN", "A", "192.0.2.1"))
        wire = reply.to_wire()
        await stream.send_all(len(wire).to_bytes(2, "big") + wire)

async def main():
    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(
            lambda task_status: trio.serve_tcp(answer, 0, host="127.0.0.1", task_status=task_status)
        )
        print("port", listener.socket.getsockname()[1], flush=True)

trio.run(main)
"""

DNS_CLIENT = """
import sys, dns.asyncquery, dns.message, trio

async def main():
    query = dns.message.make_query("www.example.com", "A")
    answer = await dns.asyncquery.tcp(query, "127.0.0.1", port=int(sys.argv[1]), timeout=30)
    print(answer.answer[0][0])

trio.run(main)
"""

POSTGRES_CLIENT = """
import sys, pg8000.dbapi

connection = pg8000.dbapi.connect("postgres", host="127.0.0.1", port=int(sys.argv[1]))
cursor = connection.cursor()
cursor.execute("select sum(length(repeat('x', 1000))) from generate_series(1, 3000)")
print(cursor.fetchone()[0])
cursor.execute("select repeat('x', 1000000)")
print(len(cursor.fetchone()[0]))
connection.close()
"""


def made(name: str) -> Path:
    """The programs of a venv that has these packages and this tree."""
    place = Path(os.environ.get("TRIO_SMC_PROGRAMS", ROOT / "build" / "programs")) / name
    if not (place / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
        pip = [str(place / "bin" / "pip"), "install", "--quiet"]
        subprocess.run([*pip, "--editable", ROOT, *PACKAGES[name]], check=True)
        (place / "ready").touch()
    return place / "bin"


@pytest.fixture(scope="session")
def theirs() -> Path:
    return made("most")


def running(theirs: Path, *command: str) -> list[str]:
    return [
        str(theirs / "python"), "-m", "trio_smc.tools", "run", "--require-smc", "--",
        *command,
    ]  # fmt: skip


def output_of(theirs: Path, cwd: Path, program: str, *arguments: str, plain: bool = False) -> str:
    """The output of a client, over SMC-R; ``plain``: over TCP."""
    (cwd / "client.py").write_text(program)
    command = [str(theirs / "python"), "client.py", *arguments]
    done = subprocess.run(
        command if plain else running(theirs, *command),
        cwd=cwd, capture_output=True, text=True, timeout=2 * PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def hypercorn(theirs: Path, cwd: Path, app: str, *options: str) -> Iterator[str]:
    """The address of a server of ``app``."""
    (cwd / "theirs.py").write_text(app)
    command = running(theirs, str(theirs / "hypercorn"), "-k", "trio", "-b", "127.0.0.1:0")
    with started([*command, *options, "theirs:app"], cwd) as server:
        yield wait_for(server, "Running on").split("Running on ")[1].split()[0]


@contextmanager
def proxies(theirs: Path, cwd: Path, port: int) -> Iterator[int]:
    """The port of the first of two proxies; SMC-R between them, TCP to ``port``."""
    proxy = [str(theirs / "python"), "-u", "-m", "trio_smc.tools", "proxy", "--require-smc"]
    with started([*proxy, "smc:127.0.0.1:0", f"tcp:127.0.0.1:{port}"], cwd) as near:
        middle = wait_for(near, "listening on").split()[-1]
        with started([*proxy, "tcp:127.0.0.1:0", f"smc:127.0.0.1:{middle}"], cwd) as far:
            yield int(wait_for(far, "listening on").split()[-1])
            wait_for(near, "forwarding a connection, mode smc-r")


def test_fastapi_on_hypercorn(theirs: Path, tmp_path: Path) -> None:
    """A stream, an upload, server-sent events, a WebSocket."""
    with hypercorn(theirs, tmp_path, FASTAPI_APP) as url:
        assert output_of(theirs, tmp_path, FASTAPI_CLIENT, url) == "all of it\n"


def test_http_2_with_tls_and_two_workers(theirs: Path, tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    for part in certificate.cert_chain_pems:
        part.write_to_path(str(tmp_path / "certificate.pem"), append=True)
    options = ["-w", "2", "--certfile", "certificate.pem", "--keyfile", "key.pem"]
    with hypercorn(theirs, tmp_path, FASTAPI_APP, *options) as url:
        output = output_of(theirs, tmp_path, HTTP2_CLIENT, url, "ca.pem")
    assert output == "{('HTTP/2', 2000000)}\n"


def test_mcp_over_streamable_http(theirs: Path, tmp_path: Path) -> None:
    with hypercorn(theirs, tmp_path, MCP_APP) as url:
        assert output_of(theirs, tmp_path, MCP_CLIENT, url) == "42\n"


def test_purerpc(tmp_path: Path) -> None:
    theirs = made("purerpc")
    with reserved_port() as port:
        (tmp_path / "server.py").write_text(RPC_SERVER.replace("PORT", str(port)))
        command = running(theirs, str(theirs / "python"), "server.py")
        with started(command, tmp_path, stop=signal.SIGINT):
            output = output_of(theirs, tmp_path, _when_listening(RPC_CLIENT), str(port))
    assert output == "HELLO\n"


def test_dnspython_over_tcp(theirs: Path, tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(DNS_SERVER)
    command = running(theirs, str(theirs / "python"), "server.py")
    with started(command, tmp_path, stop=signal.SIGINT) as server:
        port = wait_for(server, "port").split()[-1]
        assert output_of(theirs, tmp_path, DNS_CLIENT, port) == "192.0.2.1\n"


def test_a_postgres_driver_through_two_proxies(theirs: Path, tmp_path: Path) -> None:
    if not shutil.which("initdb") or not shutil.which("postgres"):
        pytest.skip("there is no PostgreSQL server in PATH")
    data, user = tmp_path / "data", "postgres"
    data.mkdir()
    enter: list[str] = []
    if os.geteuid() == 0:  # which PostgreSQL does not run as
        shutil.chown(data, user, user)
        for parent in data.parents[:-2]:
            parent.chmod(parent.stat().st_mode | 0o011)
        enter = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    made = subprocess.run(
        [*enter, "initdb", "-D", str(data), "-U", user, "-A", "trust", "--no-sync"],
        cwd="/", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stdout + made.stderr
    with reserved_port() as port:
        server = ["postgres", "-D", str(data), "-p", str(port), "-k", "", "-h", "127.0.0.1"]
        with started([*enter, *server], Path("/")) as database:
            wait_for(database, "ready to accept connections")
            with proxies(theirs, tmp_path, port) as front:
                program = POSTGRES_CLIENT.replace('"postgres"', f'"{user}"')
                output = output_of(theirs, tmp_path, program, str(front), plain=True)
    assert output == "3000000\n1000000\n"


def test_chromium_through_two_proxies(theirs: Path, tmp_path: Path) -> None:
    if not shutil.which("chromium"):
        pytest.skip("there is no chromium")
    (tmp_path / "page.html").write_text("<p id=it></p><script>it.append('a' + 'b')</script>")
    site = [sys.executable, "-u", "-m", "http.server", "--bind", "127.0.0.1", "0"]
    with started(site, tmp_path) as server:
        port = int(wait_for(server, "Serving HTTP").split(" port ")[1].split()[0])
        with proxies(theirs, tmp_path, port) as front:
            done = subprocess.run(
                ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom",
                 f"--user-data-dir={tmp_path / 'profile'}", f"http://127.0.0.1:{front}/page.html"],
                # Chromium leaves files in the runtime directory, which a fixture checks.
                env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
                capture_output=True, text=True, timeout=2 * PATIENCE, check=False,
            )  # fmt: skip
    assert '<p id="it">ab</p>' in done.stdout, done.stderr


def _when_listening(program: str) -> str:
    """A client that waits, without connecting, until its server listens."""
    look = """
import re, sys, time
pattern = re.compile(f":{int(sys.argv[1]):04X} [0-9A-F:]+ 0A ")
while not any(pattern.search(open(f"/proc/net/{name}").read()) for name in ("tcp", "tcp6")):
    time.sleep(0.05)
"""
    return look + program
