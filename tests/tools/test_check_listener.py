"""`trio-smc check` explains why a listener on this host does not use SMC-R."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ports import reserved_port
from tests.timing import PATIENCE
from trio_smc import Config
from trio_smc.rnic import words
from trio_smc.tools.processes import explain_listener

own_directory = Config().private_directory
NATIVE = any(Path(words.__file__).parent.glob("_words.*so"))
ASYNCIO = """
import asyncio
async def main():
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""
PLAIN = """
import socket, time
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
while True:
    listener.accept()[0].close()
"""
WITH_STACK = """
import trio, trio_smc
async def main():
    async with trio_smc.open_stack():
        [listener] = await {module}.open_{kind}listeners(0, host="127.0.0.1")
        print(listener.socket.getsockname()[1], flush=True)
        async with trio.open_nursery() as nursery:
            while True:
                nursery.start_soon((await listener.accept()).aclose)
trio.run(main)
"""


@contextlib.contextmanager
def server(
    program: str, python: str = sys.executable, *before: str, **environment: str
) -> Iterator[tuple[int, int]]:
    """Run a program that prints its port. Yields the port and the process number."""
    with subprocess.Popen(
        [*before, python, "-c", program],
        stdout=subprocess.PIPE, text=True, env={**os.environ, **environment},
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline()), process.pid
        finally:
            process.send_signal(signal.SIGINT)  # the stack removes its sockets
            process.wait(2 * PATIENCE)


def check(port: int) -> str:
    """Run `trio-smc check`, as text and as JSON, which must agree. Returns the text."""
    command = [sys.executable, "-m", "trio_smc.tools", "check", "127.0.0.1", str(port)]
    output = subprocess.run(
        command, capture_output=True, text=True, timeout=2 * PATIENCE, check=False
    )
    assert output.returncode == 1, output.stderr
    done = subprocess.run(
        [*command, "--json"], capture_output=True, timeout=2 * PATIENCE, check=False
    )
    found = json.loads(done.stdout)["listener"]
    assert found["text"] in output.stdout
    assert f"remedy     {found['remedy']}\n" in output.stdout
    return output.stdout


def test_check_names_an_asyncio_server() -> None:
    with server(ASYNCIO) as (port, pid):
        output = check(port)
    assert f"listener   process {pid} has asyncio loaded and no stack of trio_smc\n" in output
    assert "remedy     run it on Trio with 'trio-smc run'; if it needs asyncio, put" in output
    assert f"tcp:127.0.0.1:{port}' in front of it\n" in output


def test_check_names_a_python_program_without_a_stack() -> None:
    with server(PLAIN) as (port, pid):
        output = check(port)
    assert f"process {pid} is a Python program without a stack of trio_smc\n" in output
    assert "remedy     start it with 'trio-smc run', or use trio_smc in it\n" in output


def test_check_names_a_python_without_trio_smc(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    with server(PLAIN, python, "env", "-C", str(tmp_path), PYTHONPATH="") as (port, pid):
        output = check(port)
    assert f"listener   process {pid} runs {python}, which has no trio_smc\n" in output
    assert "remedy     install trio-smc there and use 'trio-smc run'\n" in output


def test_check_names_both_private_directories(tmp_path: Path) -> None:
    program = WITH_STACK.format(module="trio_smc", kind="")
    with server(program, XDG_RUNTIME_DIR=str(tmp_path)) as (port, pid):
        output = check(port)
    theirs, ours = tmp_path / "trio-smc", own_directory()
    assert (
        f"private directory of process {pid} is {theirs}, that of this process is {ours}\n"
        in output
    )
    assert f"for this command use --directory {theirs}\n" in output


@pytest.mark.parametrize("problem", ["mode", "parent", "file"])
def test_check_names_an_unusable_directory_of_the_server(problem: str, tmp_path: Path) -> None:
    """The stack of such a server has no control socket, and its connections are TCP."""
    directory = tmp_path / "smc"
    causes = {
        "mode": f"{directory} has mode 755 where only 700 is private",
        "parent": f"there is no directory {directory / 'missing'}",
        "file": f"{directory}: Not a directory",
    }
    if problem == "file":
        directory.touch()
    else:
        directory.mkdir(mode=0o755)
    named = directory / "missing" / "smc" if problem == "parent" else directory
    program = WITH_STACK.format(module="trio_smc", kind="")
    with server(program, TRIO_SMC_DIRECTORY=str(named)) as (port, pid):
        output = check(port)
    begin = "has loaded trio_smc, and its" if NATIVE else "has an environment whose"
    text = f"process {pid} {begin} private directory cannot be used: {causes[problem]}\n"
    assert f"listener   {text}" in output
    assert "remedy     give it a parent directory, and mode 0700" in output


@pytest.mark.skipif(not NATIVE, reason="the file shows that a process has loaded trio_smc")
@pytest.mark.parametrize("option", ["control=False", "directory='{}'"])
def test_check_names_the_possible_causes_of_a_missing_control_socket(
    option: str, tmp_path: Path
) -> None:
    """The program's own `Config` is not visible."""
    os.chmod(tmp_path, 0o755)
    program = WITH_STACK.format(module="trio", kind="tcp_").replace(
        "open_stack()", f"open_stack(trio_smc.Config({option.format(tmp_path)}))"
    )
    with server(program) as (port, pid):
        output = check(port)
    assert f"process {pid} has loaded trio_smc, and has no control socket: it has no sta" in output
    assert "or its private directory cannot be used\n" in output


def test_check_names_a_listener_outside_of_its_stack() -> None:
    with server(WITH_STACK.format(module="trio", kind="tcp_")) as (port, pid):
        output = check(port)
    assert (
        f"process {pid} has a stack of trio_smc, but does not use it for this listener\n" in output
    )


def test_check_names_a_stopped_process() -> None:
    with server(WITH_STACK.format(module="trio_smc", kind="")) as (port, pid):
        os.kill(pid, signal.SIGSTOP)
        try:
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
            found = explain_listener("127.0.0.1", port, own_directory())
        finally:
            os.kill(pid, signal.SIGCONT)
    assert found.text == f"process {pid} is stopped, by a signal or a debugger"
    assert found.remedy == f"let it continue: kill -CONT {pid}"


def test_check_names_a_listener_that_is_no_python_process(tmp_path: Path) -> None:
    redis = shutil.which("redis-server")
    assert redis, "redis-server is missing"
    with reserved_port() as port:
        command = [redis, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
        with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
            try:
                end = time.monotonic() + 2 * PATIENCE
                while time.monotonic() < end:
                    with contextlib.suppress(ConnectionRefusedError):
                        socket.create_connection(("127.0.0.1", port)).close()
                        break
                found = explain_listener("127.0.0.1", port, own_directory())
            finally:
                process.kill()
    assert found.pid == process.pid
    assert found.text.endswith(" is not a Python program")
    assert found.remedy.startswith("put 'trio-smc proxy smc:HOST:PORT tcp:127.0.0.1:")


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_check_names_a_listener_of_another_user() -> None:
    as_nobody = f"import os, socket, time; os.setuid(65534)\n{PLAIN}"
    with server(as_nobody) as (port, _):
        found = explain_listener("127.0.0.1", port, own_directory())
    assert (found.uid, found.pid) == (65534, None)
    assert found.text == f"the listener belongs to user 65534, this process to {os.geteuid()}"
    assert found.remedy.startswith("run both processes as one user, or let a group")


@pytest.mark.usefixtures("runtime_directory")
def test_check_names_another_network_namespace(tmp_path: Path) -> None:
    made = subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("no network namespaces here")
    begin = "listens in a network namespace of its own"
    with server(PLAIN, sys.executable, "unshare", "-rn") as (port, pid):
        found = explain_listener("127.0.0.1", port, own_directory())
    assert found.text == f"process {pid} {begin}, without a stack of trio_smc"
    assert found.remedy == "start it with 'trio-smc run' and a shared Config(directory=...)"
    program = WITH_STACK.format(module="stack", kind="").replace(
        "open_stack()", "open_stack() as stack"
    )
    with server(program, sys.executable, "unshare", "-rn") as (port, pid):
        found = explain_listener("127.0.0.1", port, own_directory())
        assert found.text == f"process {pid} {begin}, and shares the directory"
        assert found.remedy.startswith("name the directory in Config(directory=...) at both ends")
        found = explain_listener("127.0.0.1", port, tmp_path)
        assert found.text == f"process {pid} {begin}, with another private directory"
        assert found.remedy.startswith("mount one directory at both ends")


@pytest.mark.usefixtures("runtime_directory")
def test_check_names_another_mount_namespace() -> None:
    """As in a container: both processes use the same path, but see different directories."""
    mounting = 'mount -t tmpfs -o mode=700 x "$XDG_RUNTIME_DIR" && exec "$@"'
    own = ("unshare", "-rm", "sh", "-c", mounting, "sh")
    if subprocess.run([*own, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces here")
    program = WITH_STACK.format(module="trio_smc", kind="")
    with server(program, sys.executable, *own) as (port, pid):
        found = explain_listener("127.0.0.1", port, own_directory())
    assert found.text == (
        f"process {pid} has a private directory of its own at the same path, {own_directory()}: "
        "it is in another mount namespace"
    )
    assert found.remedy == "mount one directory at both ends, and name it in TRIO_SMC_DIRECTORY"


@pytest.mark.skipif(os.geteuid() != 0, reason="changes its groups")
@pytest.mark.parametrize("is_member", [False, True])
def test_check_names_a_shared_directory_that_this_process_may_not_use(
    is_member: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listener is in the group of the directory; this process of the same user is not."""
    group, shared = 54323, tmp_path / "shared"
    shared.mkdir()
    os.chown(shared, 0, group)
    shared.chmod(0o3770)
    if is_member:
        monkeypatch.setattr("os.getgrouplist", lambda name, own: [own, group])
    program = WITH_STACK.format(module="trio_smc", kind="")
    as_member = f"import os\nos.setgroups([{group}])\n{program}"
    with server(as_member, TRIO_SMC_DIRECTORY=str(shared)) as (port, pid):
        found = explain_listener("127.0.0.1", port, shared)
    assert found.text == (
        f"process {pid} uses {shared}, and this process cannot: {shared} is for the group {group}, "
        "and this process is not in that group"
    )
    assert found.remedy == (
        "its user is a member by now, so start it again from a new login"
        if is_member
        else f"add its user 0 to the group (usermod -aG {group} USER), and start it again"
    )


@pytest.mark.usefixtures("runtime_directory")
def test_check_names_a_directory_that_was_replaced(tmp_path: Path) -> None:
    directory = tmp_path / "trio-smc"
    with server(
        WITH_STACK.format(module="trio_smc", kind=""), TRIO_SMC_DIRECTORY=str(directory)
    ) as (port, pid):
        shutil.rmtree(directory)
        directory.mkdir(mode=0o700)
        found = explain_listener("127.0.0.1", port, directory)
    assert found.text.startswith(f"the private directory of process {pid} was removed or replaced:")
    assert found.remedy == f"start process {pid} again"


def test_check_finds_no_listening_process() -> None:
    with reserved_port() as port:
        found = explain_listener("127.0.0.1", port, own_directory())
    assert found.pid is None
    assert found.text.startswith("no process in this network namespace listens there")
