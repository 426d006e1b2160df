"""Commands name each process that does not answer, and wait once for all of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import trio

from tests.tools.tools_processes import Done, command_here, one_line, quick_command, running
from trio_smc.control import protocol as control
from trio_smc.tools import client
from trio_smc.tools.client import SilentProcesses, take_snapshots
from trio_smc.tools.commands import load

TIMEOUT = 1.0
"""Seconds that the commands wait in these tests, in place of the default of `client.TIMEOUT`."""
MANY = 10
FIRST = 1 << 22
"""A process number above those of all real processes."""
QUERIES = {
    "ss": ("ss", "--json"),
    "lg": ("lg", "--json"),
    "stats": ("stats", "--json"),
    "rnic": ("rnic", "--json"),
    "ueid": ("ueid", "--json"),
    "report": ("report", "--json"),
    "drain": ("drain", "soft0", "--json"),
    "top": ("top", "--json", "--count", "1", "--interval", "0.01"),
}


@pytest.fixture(autouse=True)
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "TIMEOUT", TIMEOUT)


@contextlib.contextmanager
def silent_sockets(
    runtime_directory: Path, count: int = MANY, backlog: int = 8
) -> Iterator[list[int]]:
    """Control sockets that accept connections and never answer. Yields their process numbers."""
    directory = runtime_directory / "trio-smc" / control.DIRECTORY
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.parent.chmod(0o700)
    numbers = list(range(FIRST, FIRST + count))
    with contextlib.ExitStack() as exits:
        for number in numbers:
            path = directory / f"{number}-0"
            listener = exits.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(path))
            exits.callback(path.unlink)
            listener.listen(backlog)
        yield numbers


def timed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[Done, float]:
    """Run a command. Returns its result and its duration in seconds."""
    start = time.monotonic()
    done = command_here(capsys, *arguments)
    return done, time.monotonic() - start


def assert_names_each(name: str, done: Done, numbers: list[int]) -> None:
    """Assert that the command failed and printed one line about each of these processes."""
    assert done.code == 1
    lines = done.err.splitlines()
    assert len(lines) == len(numbers), done.err
    for number, line in zip(numbers, sorted(lines), strict=True):
        why = "does not answer; it may be stopped, or its event loop blocked"
        assert line == f"trio-smc {name}: process {number} {why}"


def test_every_command_that_queries_processes_has_a_case() -> None:
    querying = {each.NAME for each in load() if hasattr(each, "take_snapshots")}
    assert querying == {*QUERIES, "check", "exporter"}  # `exporter`: tests/tools/test_exporter.py


@pytest.mark.parametrize("name", QUERIES)
def test_each_silent_process_is_named(
    name: str, runtime_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with silent_sockets(runtime_directory) as numbers:
        done, seconds = timed(capsys, *QUERIES[name])
    if name == "drain":  # none of those that answer has the RNIC
        assert (done.code, json.loads(done.out)) == (2, [])
        assert (
            done.err.splitlines()[-1] == "trio-smc drain: no process that answers has an RNIC soft0"
        )
    else:
        assert_names_each(name, done, numbers)
        json.loads(done.out)
    assert seconds < 3 * TIMEOUT


@pytest.mark.parametrize("name", QUERIES)
async def test_processes_that_answer_are_still_shown(name: str, runtime_directory: Path) -> None:
    async with running("server") as peer, running("server") as other:
        os.kill(other.pid, signal.SIGSTOP)
        try:
            with silent_sockets(runtime_directory, 1) as numbers:
                start = trio.current_time()
                done = await quick_command(*QUERIES[name])
                seconds = trio.current_time() - start
        finally:
            os.kill(other.pid, signal.SIGCONT)
    assert_names_each(name, done, sorted([other.pid, *numbers], key=str))
    found = json.loads(done.out)
    if name == "top":
        assert found["stacks"] == 1
    elif name == "report":
        assert "processes.json" in [each["file"] for each in found]
    else:
        stacks = found["stacks"] if name in ("rnic", "ueid") else found
        assert [each["pid"] for each in stacks] == [peer.pid]
    assert seconds < 4 * TIMEOUT


def test_a_silent_process_delays_only_the_first_frame(
    runtime_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with silent_sockets(runtime_directory) as numbers:
        done, seconds = timed(capsys, "top", "--json", "--count", "4", "--interval", "0.01")
        assert seconds < 3 * TIMEOUT  # five rounds
        assert_names_each("top", done, numbers)
        done, seconds = timed(capsys, "stats", "--json", "--count", "4", "--interval", "0.01")
        assert seconds < 3 * TIMEOUT
        assert_names_each("stats", done, numbers)


def test_a_frame_on_a_terminal_names_silent_processes(
    runtime_directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # print colours as on a terminal
    with (
        silent_sockets(runtime_directory, 2) as numbers,
        mock.patch("sys.stdout.isatty", return_value=True),
    ):
        done = command_here(capsys, "top", "--count", "1", "--interval", "0.01")
    for number in numbers:
        assert f"process {number} does not answer" in done.out
    assert_names_each("top", done, numbers)


def test_connect_does_not_wait_for_a_full_backlog(
    runtime_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        silent_sockets(runtime_directory, 3, backlog=0) as numbers,
        contextlib.ExitStack() as exits,
    ):
        for number in numbers:
            path = runtime_directory / "trio-smc" / control.DIRECTORY / f"{number}-0"
            exits.enter_context(socket.socket(socket.AF_UNIX)).connect(str(path))
        done, seconds = timed(capsys, "ss", "--json")
        assert_names_each("ss", done, numbers)
        assert seconds < 2 * TIMEOUT


def test_a_capture_names_a_silent_process(
    runtime_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first command's connection fills the backlog, so the second cannot connect."""
    with silent_sockets(runtime_directory, 1, backlog=0) as [number]:
        for _ in range(2):
            done, seconds = timed(capsys, "capture", str(number), "-o", "-", "--seconds", "1")
            assert one_line(done).endswith(
                "does not answer; it may be stopped, or its event loop blocked"
            )
            assert TIMEOUT <= seconds < 2 * TIMEOUT


async def test_an_endless_answer_costs_one_deadline(runtime_directory: Path) -> None:
    """The process sends a byte at short intervals, so no single read times out."""
    with silent_sockets(runtime_directory, 1) as [number]:
        path = runtime_directory / "trio-smc" / control.DIRECTORY / f"{number}-1"

        async def trickle(stream: trio.SocketStream) -> None:
            with contextlib.suppress(trio.BrokenResourceError):
                await stream.send_all(b"\0\0\xff\xff")
                while True:
                    await stream.send_all(b" ")
                    await trio.sleep(TIMEOUT / 20)

        listener = trio.socket.socket(socket.AF_UNIX)
        await listener.bind(str(path))
        listener.listen()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, trickle, [trio.SocketListener(listener)])
            start, silent = trio.current_time(), SilentProcesses(quiet=True)
            found = await trio.to_thread.run_sync(
                lambda: take_snapshots(runtime_directory / "trio-smc", (), silent=silent)
            )
            assert trio.current_time() - start < 2 * TIMEOUT
            nursery.cancel_scope.cancel()
        path.unlink()
    assert found == []
    assert list(silent.last) == [number]


def test_one_process_that_is_silent_is_bad_input(
    runtime_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with silent_sockets(runtime_directory, 2) as [number, _]:
        assert "does not answer" in one_line(command_here(capsys, "lg", "--pid", str(number)))


def test_more_processes_than_descriptors(
    runtime_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from resource import RLIMIT_NOFILE, getrlimit, setrlimit

    limits = getrlimit(RLIMIT_NOFILE)
    with silent_sockets(runtime_directory) as numbers:
        spare = os.dup(0)
        os.close(spare)
        setrlimit(RLIMIT_NOFILE, (spare + 8, limits[1]))
        try:
            done = command_here(capsys, "ss", "--json")
        finally:
            setrlimit(RLIMIT_NOFILE, limits)
    assert done.code == 1
    assert len(done.err.splitlines()) == len(numbers)
    assert "cannot be queried: Too many open files" in done.err


@pytest.mark.parametrize("silent", [0, 3])
def test_check_is_delayed_once(
    silent: int, runtime_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`check` queries all processes for the server's view of the connection, once."""
    with (
        silent_sockets(runtime_directory, silent) as numbers,
        socket.create_server(("127.0.0.1", 0)) as own,
    ):
        done, seconds = timed(capsys, "check", "127.0.0.1", str(own.getsockname()[1]))
    assert_names_each("check", done, numbers)
    assert seconds < 6 * TIMEOUT


def test_a_link_to_another_socket_is_not_queried(
    runtime_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a shared directory another user may create a link to any socket of this user."""
    with silent_sockets(runtime_directory, 1), socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "other"))
        other.listen()
        other.setblocking(False)
        name = runtime_directory / "trio-smc" / control.DIRECTORY / f"{FIRST + 1}-0"
        name.symlink_to(tmp_path / "other")
        done = command_here(capsys, "ss", "--json")
        name.unlink()
        assert_names_each("ss", done, [FIRST])
        with pytest.raises(BlockingIOError):
            other.accept()
    (tmp_path / "other").unlink()
