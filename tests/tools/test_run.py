"""`trio-smc run` reports programs that do not use SMC-R, and returns the program's exit code."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.timing import PATIENCE

RUN = [sys.executable, "-m", "trio_smc.tools", "run"]
SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2)."""

TRIO = """
import sys, trio

async def serve(stream):
    async for data in stream:
        await stream.send_all(data)

async def main(count=5):
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, serve, 0)
        port = listeners[0].socket.getsockname()[1]
        for _ in range(count):
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                await stream.send_all(bytes(1000))
                await stream.receive_some()
        nursery.cancel_scope.cancel()
"""
ASYNCIO = """
import asyncio, sys

async def main():
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    assert await reader.read() == b""
    writer.close()
    server.close()
"""
WORKERS = f"""{TRIO}
import asyncio, multiprocessing, subprocess

if __name__ == "__main__":
    asyncio.run(asyncio.sleep(0))  # no connection, so no problem
    subprocess.run([sys.executable, "-I", "-c", "pass"], check=True)
    subprocess.run([sys.executable, "-c", "import asyncio; asyncio.run(asyncio.sleep(0))"])
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=trio.run, args=(main, count)) for count in (2, 3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    sys.exit(sum(worker.exitcode for worker in workers))
"""
GUEST = f"""{TRIO}
import asyncio

async def host():
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    trio.lowlevel.start_guest_run(
        main, run_sync_soon_threadsafe=loop.call_soon_threadsafe,
        done_callback=lambda outcome: (outcome.unwrap(), done.set()),
    )
    await done.wait()

asyncio.run(host())
"""


TRIO_ASYNCIO = f"""{TRIO}
import asyncio, signal, socket, trio_asyncio

# The program ends by the error of its connection, and its stack removes its files.
signal.signal(signal.SIGTERM, signal.SIG_IGN)

async def serve_asyncio():
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    server.close()

async def connect_asyncio(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.close()

async def connect_socket(port):
    with socket.socket() as sock:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))

async def both():
    async with trio_asyncio.open_loop():
        await main()  # Trio's own connections
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            await CALL
        await main()
"""


def run(
    directory: Path, program: str, *options: str, python: tuple[str, ...] = (sys.executable,)
) -> tuple[int, str]:
    """Run a program under `trio-smc run`. Returns the exit code and stderr."""
    (directory / "program.py").write_text(program)
    done = subprocess.run(
        [*RUN, *options, "--", *python, "program.py"],
        cwd=directory, capture_output=True, text=True, timeout=2 * PATIENCE, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr


def test_a_trio_program_is_silent_and_reported(tmp_path: Path) -> None:
    assert run(tmp_path, f"{TRIO}\ntrio.run(main)") == (0, "")
    code, report = run(tmp_path, f"{TRIO}\ntrio.run(main)", "--report", "--require-smc")
    assert code == 0
    # Both ends are in the program.
    assert [line.removeprefix("trio-smc run: ") for line in report.splitlines()] == [
        "10 connections of 1 process",
        "       10 SMC-R, sent 9.8 KiB, received 9.8 KiB",
        "        0 TCP, sent 0 B, received 0 B",
    ]


@pytest.mark.parametrize("options", [(), ("--require-smc",)], ids=["", "require"])
@pytest.mark.parametrize("variable", ["TRIO_SMC_DIRECTORY", "XDG_RUNTIME_DIR"])
def test_a_directory_of_the_environment_that_cannot_be_used_is_named(
    variable: str, options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program runs, and one line names the directory, its origin and the consequence."""
    missing = tmp_path / "missing"
    monkeypatch.setenv(variable, str(missing / "smc"))
    code, report = run(tmp_path, f"{TRIO}\ntrio.run(main)" if not options else "", *options)
    made = missing / "smc" if variable == "TRIO_SMC_DIRECTORY" else missing / "smc" / "trio-smc"
    result = "fail" if options else "stay on TCP"
    assert report.splitlines()[0] == (
        f"trio-smc run: warning: {made} cannot be made: there is no directory {made.parent} "
        f"({variable}); connections on this host {result}"
    )
    assert (code, len(report.splitlines())) == ((1, 2) if options else (0, 1))
    assert not missing.exists()


def test_a_file_is_named_where_a_directory_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "smc").touch()
    monkeypatch.setenv("TRIO_SMC_DIRECTORY", str(tmp_path / "smc"))
    _, report = run(tmp_path, f"{TRIO}\ntrio.run(main)")
    assert f"warning: {tmp_path}/smc: Not a directory (TRIO_SMC_DIRECTORY); " in report


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_service_that_is_killed_is_reported(number: int, tmp_path: Path) -> None:
    """The report has the last counters that the service sent before it was killed.

    The program waits for 1.5 s because a stack sends its counters periodically.
    """
    private = tmp_path / "private"
    (tmp_path / "smc.toml").write_text(f'directory = "{private}"')
    (tmp_path / "program.py").write_text(
        f"""{TRIO}
import os

async def service():
    await main()
    await trio.sleep(1.5)
    print(os.getpid(), flush=True)
    await trio.sleep_forever()

trio.run(service)
"""
    )
    with subprocess.Popen(
        [*RUN, "--report", "--config", "smc.toml", "--", sys.executable, "program.py"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        os.kill(int(process.stdout.readline()), number)
        _, report = process.communicate(timeout=2 * PATIENCE)
    assert process.returncode == -number
    for left in (*private.glob("rnic-*"), *private.glob("control/*")):
        left.unlink()  # the killed process could not remove it
    lines = report.splitlines()
    assert re.match(r"trio-smc run: +10 SMC-R, sent 9.8 KiB", lines[1]), report
    assert lines[-1].startswith("trio-smc run:   1 of 1 stacks ended with a killed process: ")


@pytest.mark.parametrize("name", ["trio", "trio_smc"])
def test_a_program_may_look_for_trio_before_its_import(name: str, tmp_path: Path) -> None:
    """Frameworks that support several async libraries call `find_spec`."""
    program = f"import importlib.util; assert importlib.util.find_spec({name!r})\n{TRIO}"
    code, report = run(tmp_path, f"{program}\ntrio.run(main)", "--report", "--require-smc")
    assert code == 0
    assert re.search(r" 10 SMC-R, ", report)


def test_a_report_has_the_reason_for_tcp(tmp_path: Path) -> None:
    (tmp_path / "smc.toml").write_text('deny = ["127.0.0.0/8"]')
    code, report = run(tmp_path, f"{TRIO}\ntrio.run(main)", "--report", "--config", "smc.toml")
    assert code == 0
    # Both ends are in the program.
    assert re.search(
        r"^trio-smc run: +10 TCP, sent 9.8 KiB, received 9.8 KiB$", report, re.MULTILINE
    )
    assert re.search(r"^trio-smc run: +\d+ local: not-permitted$", report, re.MULTILINE)


SHORT = f"""{TRIO}
trio.run(main, 40)
"""


def test_short_connections_become_tcp_unless_smc_is_required(tmp_path: Path) -> None:
    code, report = run(tmp_path, SHORT, "--report", "--require-smc")
    assert code == 0
    assert report.splitlines()[1].startswith("trio-smc run:        80 SMC-R, ")
    assert report.splitlines()[2:] == ["trio-smc run:         0 TCP, sent 0 B, received 0 B"]
    code, report = run(tmp_path, SHORT, "--report")
    assert code == 0
    assert re.search(r" [1-9]\d* TCP, sent [1-9]", report)
    assert re.search(r" local: short-connections$", report, re.MULTILINE)
    (tmp_path / "smc.toml").write_text("learn_short = false")
    code, report = run(tmp_path, SHORT, "--report", "--config", "smc.toml")
    assert re.search(r" 80 SMC-R, ", report)


EITHER_END = f"""{TRIO}
async def run_server():
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, serve, 0)
        print(listeners[0].socket.getsockname()[1], flush=True)
        await trio.lowlevel.wait_readable(0)
        nursery.cancel_scope.cancel()

def run(run_client):
    # With a port as argument the client, otherwise the server.
    trio.run(*((run_client, int(sys.argv[1])) if sys.argv[1:] else (run_server,)))
"""


APART = f"""{EITHER_END}
async def run_client(port):
    for _ in range(40):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(bytes(1000))
            assert await stream.receive_some()

run(run_client)
"""


COUNTED = f"""{EITHER_END}
async def run_client(port):
    for number in range(3):  # closed in three ways
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        await stream.send_all(bytes(200_000))
        await stream.send_eof()
        got = 0
        async for data in stream:
            got += len(data)
        assert got == 200_000
        if number == 0:
            await stream.aclose()
        elif number == 1:
            stream.socket.close()
        else:
            trio.socket.socket(fileno=stream.socket.detach()).close()
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(bytes(300))
        await stream.receive_some()
        await trio.sleep(1.5)
        print("counted", flush=True)
        await trio.sleep_forever()

run(run_client)
"""


def test_bytes_of_connections_that_stay_tcp(tmp_path: Path) -> None:
    """Both ends count the bytes, however a connection is closed or left open."""
    (tmp_path / "program.py").write_text(COUNTED)
    (tmp_path / "smc.toml").write_text('deny = ["127.0.0.0/8"]')
    program = [*RUN, "--report", "--config", "smc.toml", "--", sys.executable, "program.py"]
    with subprocess.Popen(
        program, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        with subprocess.Popen(
            [*program, port],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) as client:  # fmt: skip
            assert client.stdout is not None
            assert client.stdout.readline() == "counted\n"
            client.send_signal(signal.SIGINT)
            _, client_report = client.communicate(timeout=2 * PATIENCE)
        _, server_report = server.communicate("", timeout=2 * PATIENCE)
    for report in (client_report, server_report):
        assert re.search(
            r"^trio-smc run: +4 TCP, sent 586.2 KiB, received 586.2 KiB$", report, re.MULTILINE
        ), report


def test_short_connections_to_a_peer_that_requires_smc_stay_smc_r(tmp_path: Path) -> None:
    """The server requires SMC-R, so the client does not learn to use TCP for short connections."""
    (tmp_path / "program.py").write_text(APART)
    program = ["--", sys.executable, "program.py"]
    with subprocess.Popen(
        [*RUN, "--require-smc", *program],
        cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        client_report = subprocess.run(
            [*RUN, "--report", *program, port],
            check=False, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=2 * PATIENCE,
        )  # fmt: skip
        assert client_report.returncode == 0, client_report.stderr
        assert re.search(r" 40 SMC-R, ", client_report.stderr)
        assert re.search(r" 0 TCP, sent 0 B, received 0 B$", client_report.stderr, re.MULTILINE)


def test_two_workers_and_helpers_have_one_report(tmp_path: Path) -> None:
    code, report = run(tmp_path, WORKERS, "--report", "--require-smc")
    assert code == 0
    lines = report.splitlines()
    assert lines[0] == "trio-smc run: 10 connections of 2 processes"
    assert len(lines) == 3


@pytest.mark.parametrize("way", ["fromfd(number)", "socket(fileno=number)"])
def test_a_service_gets_its_listening_socket_as_a_descriptor(tmp_path: Path, way: str) -> None:
    """systemd passes listening sockets this way (LISTEN_FDS)."""
    (tmp_path / "service.py").write_text(f"""
import sys, trio, trio.testing

async def main(number):
    async def echo(stream):
        await stream.send_all(await stream.receive_some())
        await stream.receive_some()
        nursery.cancel_scope.cancel()

    listener = trio.SocketListener(trio.socket.{way})
    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, echo, [listener])
        await trio.testing.wait_all_tasks_blocked()
        print("ready", flush=True)

trio.run(main, int(sys.argv[1]))
""")
    client = """
import sys, trio

async def main(port):
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(b"x")
        assert await stream.receive_some() == b"x"

trio.run(main, int(sys.argv[1]))
"""
    with socket.create_server(("127.0.0.1", 0)) as passed:
        port = passed.getsockname()[1]
        number = str(passed.fileno())
        with subprocess.Popen(
            [*RUN, "--require-smc", "--", sys.executable, "service.py", number],
            cwd=tmp_path, stdout=subprocess.PIPE, pass_fds=[passed.fileno()],
        ) as service:  # fmt: skip
            assert service.stdout is not None
            assert service.stdout.readline() == b"ready\n"
            (tmp_path / "program.py").write_text(client)
            done = subprocess.run(
                [*RUN, "--require-smc", "--", sys.executable, "program.py", str(port)],
                cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False,
            )  # fmt: skip
            assert (done.returncode, done.stderr) == (0, "")
            assert service.wait(PATIENCE) == 0


def test_trio_as_a_guest_of_asyncio_is_trio(tmp_path: Path) -> None:
    assert run(tmp_path, GUEST, "--require-smc") == (0, "")


@pytest.mark.parametrize("runner", ["asyncio.run(main())", "import uvloop; uvloop.run(main())"])
def test_connections_of_asyncio(tmp_path: Path, runner: str) -> None:
    code, report = run(tmp_path, f"{ASYNCIO}\n{runner}")
    assert code == 0
    assert re.fullmatch(r"trio-smc run: warning: process \d+ opens TCP .* asyncio, .*\n", report)
    code, report = run(tmp_path, f"{ASYNCIO}\n{runner}", "--require-smc")
    assert code == 1
    # Both processes write at the same time, so the line may be in the middle of another one.
    assert re.search(r"trio-smc run: error: process \d+ opens TCP .*asyncio", report)


@pytest.mark.parametrize(
    "call",
    [
        "serve_asyncio)()",
        "connect_asyncio)(other.getsockname()[1])",
        "connect_socket)(other.getsockname()[1])",
    ],
    ids=["server", "client", "socket"],
)
def test_connections_of_asyncio_inside_a_trio_run(tmp_path: Path, call: str) -> None:
    program = TRIO_ASYNCIO.replace("CALL", f"trio_asyncio.aio_as_trio({call}") + "\ntrio.run(both)"
    code, report = run(tmp_path, program)
    assert code == 0, report
    assert re.fullmatch(r"trio-smc run: warning: process \d+ opens TCP .* asyncio, .*\n", report)
    code, report = run(tmp_path, program, "--require-smc")
    assert code == 1
    # Both processes write at the same time, so the line may be in the middle of another one.
    assert re.search(r"trio-smc run: error: process \d+ opens TCP .*asyncio", report)


def test_a_loop_of_asyncio_inside_a_trio_run_without_connections(tmp_path: Path) -> None:
    program = TRIO_ASYNCIO.replace("await CALL", "pass") + "\ntrio.run(both)"
    assert run(tmp_path, program, "--require-smc") == (0, "")


def test_connections_of_asyncio_in_a_worker(tmp_path: Path) -> None:
    """The warning comes when the worker connects, not when the program ends, and only once."""
    program = f"""{ASYNCIO}
import subprocess, time
if sys.argv[1:]:
    asyncio.run(main())
else:
    workers = [subprocess.Popen([sys.executable, __file__, "worker"]) for _ in range(2)]
    assert [worker.wait() for worker in workers] == [0, 0]
    print("ready", flush=True)
    time.sleep({PATIENCE})
"""
    (tmp_path / "program.py").write_text(program)
    with subprocess.Popen(
        [*RUN, "--", sys.executable, "program.py"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        seen = {process.stdout.readline().split(":")[0] for _ in range(2)}
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
    assert seen == {"trio-smc run", "ready\n"}
    assert rest == ""
    assert process.returncode == -signal.SIGTERM


@pytest.mark.parametrize("program", ["print('no network')", "import trio; print(trio.run)"])
def test_a_program_that_never_uses_trio(tmp_path: Path, program: str) -> None:
    ended = "the program ended without using Trio, so it could not use SMC-R\n"
    assert run(tmp_path, program) == (0, f"trio-smc run: warning: {ended}")
    assert run(tmp_path, program, "--require-smc") == (1, f"trio-smc run: error: {ended}")
    code, report = run(tmp_path, f"{program}; raise SystemExit(5)", "--require-smc")
    assert (code, report) == (5, f"trio-smc run: error: {ended}")


def test_a_program_that_leaves_a_daemon(tmp_path: Path) -> None:
    """The daemon may use Trio later, so the command says nothing about it."""
    program = """
import os, time
program = os.getpid()
if os.fork():
    os._exit(0)
os.closerange(0, 3)
while os.getppid() == program:
    time.sleep(0.01)
command = os.getppid()
while os.getppid() == command:
    time.sleep(0.01)
"""
    assert run(tmp_path, program) == (0, "")
    assert run(tmp_path, program, "--require-smc") == (0, "")


def test_a_program_that_a_signal_ends_before_it_uses_trio(tmp_path: Path) -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    for options in ((), ("--require-smc",)):
        assert run(tmp_path, program, *options) == (-signal.SIGTERM, "")


def test_no_place_for_the_report_socket(tmp_path: Path) -> None:
    """PROGRAM runs all the same, as in a container without a writable directory."""
    command = """
import sys, tempfile
from trio_smc.tools import cli, report_socket

def none():
    raise FileNotFoundError(2, "No usable temporary directory found")

tempfile.gettempdir = none
report_socket.DIRECTORIES = ()
sys.exit(cli.main(["run", *sys.argv[1:], "--", sys.executable, "-c", "print(7); exit(5)"]))
"""
    lack = "cannot create the report socket: no directory for temporary files"
    warning = f"trio-smc run: warning: {lack}; problems of the program are not reported\n"
    for options, outcome in (
        ((), (5, "7\n", warning)),
        (("--report",), (2, "", f"trio-smc run: {lack}\n")),
        (("--require-smc",), (2, "", f"trio-smc run: {lack}\n")),
    ):
        done = subprocess.run(
            [sys.executable, "-c", command, *options], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == outcome


def test_a_system_that_refuses_threads(tmp_path: Path) -> None:
    """PROGRAM runs all the same, as under `ulimit -u` or in a sandbox."""
    command = """
import sys, threading
from trio_smc.tools import cli

def refuse(thread):
    raise RuntimeError("can't start new thread")

threading.Thread.start = refuse
sys.exit(cli.main(["run", *sys.argv[1:], "--", sys.executable, "-c", "print(7); exit(5)"]))
"""
    lack = "cannot receive reports: can't start new thread"
    warning = f"trio-smc run: warning: {lack}; problems of the program are not reported\n"
    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (5, "7\n", warning)
    for option in ("--report", "--require-smc"):
        done = subprocess.run(
            [sys.executable, "-c", command, option], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (2, f"trio-smc run: {lack}\n")


def test_a_python_that_does_not_load_the_hook(tmp_path: Path) -> None:
    code, report = run(tmp_path, f"{TRIO}\ntrio.run(main)", python=(sys.executable, "-I"))
    assert code == 0
    assert re.fullmatch(r"trio-smc run: warning: process \d+ runs .* without the hook .*\n", report)
    # Deeper in the process tree, the command finds it by its sockets while it runs.
    server = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); time.sleep(60)"
    program = f"""
import signal, subprocess, sys
helper = subprocess.Popen([sys.executable, "-I", "-c", {server!r}])
signal.signal(signal.SIGTERM, lambda *_: helper.kill())
helper.wait()
"""
    begun = time.monotonic()
    code, report = run(tmp_path, program, "--require-smc")
    assert time.monotonic() - begun < PATIENCE
    assert code == 1, report
    assert re.fullmatch(r"trio-smc run: error: process \d+ runs .* without the hook .*\n", report)


def test_a_python_without_trio_smc(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "trio.py").write_text("")
    shell = (
        f"PYTHONPATH=${{PYTHONPATH%%:*}}:{tmp_path}/other "
        f"exec {tmp_path}/venv/bin/python -c 'import trio; print(7)'"
    )
    for options, code, level, printed in (
        ([], 0, "warning", "7\n"),
        (["--require-smc"], 1, "error", ""),
    ):
        done = subprocess.run(
            [*RUN, *options, "--", "sh", "-c", shell],
            cwd=tmp_path, capture_output=True, text=True, timeout=2 * PATIENCE, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (code, printed)
        pattern = rf"trio-smc run: {level}: process \d+ uses Trio, .*No module named 'trio_smc'.*\n"
        assert re.fullmatch(pattern, done.stderr), done.stderr  # one line in all


def test_exit_codes_and_signals_are_the_programs(tmp_path: Path) -> None:
    assert run(tmp_path, f"{TRIO}\ntrio.run(main, 1)\nsys.exit(7)") == (7, "")
    fatal = f"{TRIO}\nimport os\ntrio.run(main, 1)\nos.kill(os.getpid(), 9)"
    assert run(tmp_path, fatal) == (-9, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_signals_are_passed_on(tmp_path: Path, number: signal.Signals) -> None:
    program = f"""
import signal, sys, trio
async def main():
    with trio.open_signal_receiver({int(number)}) as received:
        print("ready", flush=True)
        async for number in received:
            sys.exit(number + 1)
try:
    trio.run(main)
except* SystemExit as group:
    sys.exit(group.exceptions[0].code)
"""
    (tmp_path / "program.py").write_text(program)
    command = [*RUN, "--", sys.executable, "program.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(2 * PATIENCE) == number + 1


def test_a_caller_that_ignores_sigchld(tmp_path: Path) -> None:
    """SIG_IGN for SIGCHLD is inherited, and the kernel then keeps no exit codes of children."""
    (tmp_path / "program.py").write_text(
        "import signal, sys, time; time.sleep(0.2)\n"
        "sys.exit(6 if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN else 1)"
    )
    done = subprocess.run(
        [*RUN, "--", sys.executable, "program.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=2 * PATIENCE, check=False,
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
    )  # fmt: skip
    assert done.returncode == 6, done.stderr


def test_the_program_does_not_outlive_the_command(tmp_path: Path) -> None:
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    (tmp_path / "program.py").write_text(program)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [*RUN, "--", sys.executable, "program.py"]
    libc = ctypes.CDLL(None)
    libc.prctl(SUBREAPER, 1, 0, 0, 0)
    try:
        with subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=environment
        ) as process:
            assert process.stdout is not None
            pid = int(process.stdout.readline())
            process.kill()
            process.wait(2 * PATIENCE)
            _, status = os.waitpid(pid, 0)
        for left in tmp_path.glob("trio-smc-run-*/*"):
            left.unlink()  # the killed process could not remove it
    finally:
        libc.prctl(SUBREAPER, 0, 0, 0, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory with a path short enough for the address of a Unix socket."""
    with tempfile.TemporaryDirectory(prefix="smc-") as path:
        yield Path(path)


def test_the_next_command_removes_the_files_of_a_killed_one(short_path: Path) -> None:
    """The command keeps an empty directory, one that is in use, and one with a plain file."""
    program = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    environment = {**os.environ, "TMPDIR": str(short_path)}

    def start() -> subprocess.Popen[bytes]:
        process = subprocess.Popen([*RUN, "--", *program], env=environment, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    def directories() -> set[Path]:
        return set(short_path.glob("trio-smc-run-*"))

    killed = start()
    [left] = directories()
    killed.kill()
    killed.communicate()  # returns after the program has ended, too
    empty, file = short_path / "trio-smc-run-empty", short_path / "trio-smc-run-file"
    empty.mkdir()
    file.mkdir()
    (file / "file").touch()
    running = start()
    try:
        assert left not in directories()
        assert len(directories() - {empty, file}) == 1
        last = start()
        try:
            assert len(directories() - {empty, file}) == 2
        finally:
            last.terminate()
            last.communicate()
    finally:
        running.terminate()
        running.communicate()
    assert directories() == {empty, file}
