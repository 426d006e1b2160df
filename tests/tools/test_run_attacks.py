"""Attacks on the socket through which the processes below `trio-smc run` send their reports."""

from __future__ import annotations

import array
import contextlib
import inspect
import json
import os
import random
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.timing import PATIENCE
from trio_smc import ProtocolError
from trio_smc.tools import report_messages, report_socket, site
from trio_smc.tools.processes import process_tree
from trio_smc.tools.report_messages import BYTES, MAX_SIZE, decode_untrusted
from trio_smc.tools.report_socket import ReportSocket
from trio_smc.tools.supervisor import Tree

RUN = [sys.executable, "-m", "trio_smc.tools", "run"]
OTHER = 12345
"""A user that owns nothing else."""
PUBLIC_PYTHON = shutil.which("python3", path="/usr/bin:/bin")
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or PUBLIC_PYTHON is None, reason="starts processes of another user"
)
COUNTS = {"connections": 1, "refused": 0, **dict.fromkeys(BYTES, 1), "fallbacks": []}
ACCUSATION = json.dumps({"kind": "asyncio", "pid": 1}).encode()


def send(path: str, data: bytes) -> bool:
    """Send one message as the hook does. Returns False if the connection was refused."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.setblocking(False)
        try:
            sock.connect(path)
            sock.send(data)
        except OSError:
            return False
        return True


class Inbox:
    """A report socket that records the messages it receives."""

    def __init__(self) -> None:
        self.socket = ReportSocket(self._record)
        self.messages: list[tuple[bytes, int]] = []
        self.proven: dict[bytes, bool] = {}
        self._changed = threading.Condition()

    def _record(self, data: bytes, pid: int, proven: bool) -> None:
        with self._changed:
            self.proven[data] = proven
            self.messages.append((data, pid))
            self._changed.notify_all()

    def wait(self, condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
        """Wait until the condition is true; the condition is checked after each message."""
        with self._changed:
            assert self._changed.wait_for(condition, seconds), self.messages[:10]


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    made = Inbox()
    with made.socket:
        yield made


# --- the parser --------------------------------------------------------------------------------

GOOD: list[dict[str, Any]] = [
    {"kind": "python"},
    {"kind": "trio", "dropped": 3},
    {"kind": "missing", "executable": "/usr/bin/python3", "error": "No module"},
    {"kind": "stack-open", "stack": "00" * 8},
    {"kind": "stack-end", "stack": "00" * 8, "statistics": {
        **COUNTS, "fallbacks": [{"origin": "local", "reason": "no-rnic", "count": 2}]}},
]  # fmt: skip


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xff", b"[1]", b"{}", b"null", b'"trio"', b'{"kind": 1}', b'{"kind": []}',
        b'{"kind": "other"}', b"[" * 50_000, b'{"kind":' * 8000, b"1" * 6000, b" " * (MAX_SIZE + 1),
        b'{"kind": "trio", "dropped": -1}', b'{"kind": "trio", "dropped": true}',
        b'{"kind": "trio", "dropped": 1e400}', b'{"kind": "missing"}', b'{"kind": "stack-open"}',
        b'{"kind": "stack-open", "stack": "' + b"x" * 33 + b'"}',
        b'{"kind": "stack-end", "stack": "x", "statistics": {}}',
        b'{"kind": "stack-counts", "stack": "x", "statistics": []}',
        json.dumps({**GOOD[4], "statistics": {**COUNTS, "bytes_sent": 10**400}}).encode(),
        json.dumps({**GOOD[4], "statistics": {**COUNTS, "bytes_sent": float("nan")}}).encode(),
        json.dumps({**GOOD[4], "statistics": {**COUNTS, "connections": -1}}).encode(),
        json.dumps({**GOOD[4], "statistics": {**COUNTS, "fallbacks": [{}]}}).encode(),
        json.dumps({**GOOD[4], "statistics": {**COUNTS, "fallbacks": [1] * 200}}).encode(),
    ],
)  # fmt: skip
def test_invalid_packets_are_ignored(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_untrusted(data)
    tree = Tree(require=True)
    tree.on_packet(data, 1)
    assert not tree.problem
    assert not tree.hooked


def test_damaged_messages_raise_only_protocol_errors(rng: random.Random) -> None:
    """The messages are valid ones with changed bytes and replaced values."""
    values: list[Any] = [
        None,
        True,
        -1,
        1 << 63,
        10**400,
        1.5,
        "",
        "\ud800\x1b[2J",
        [],
        {},
        [[]],
        {"a": 1},
    ]
    seen = {True: 0, False: 0}
    for _ in range(2000):
        message = json.loads(json.dumps(rng.choice(GOOD)))
        if rng.random() < 0.5:
            place: Any = message
            while True:
                key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
                if not isinstance(place[key], dict | list) or not place[key] or rng.random() < 0.3:
                    place[key] = rng.choice(values)
                    break
                place = place[key]
        data = bytearray(json.dumps(message).encode())
        for _ in range(rng.choice((0, 0, 1, 3))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            decoded = decode_untrusted(bytes(data))
        except ProtocolError:
            seen[False] += 1
        else:
            seen[True] += 1
            for text in (decoded.executable, decoded.error, decoded.stack):
                assert text.isprintable()
                assert len(text) <= 10 * report_messages.MAX_TEXT
    assert min(seen.values()) > 100


def test_the_tables_of_a_tree_are_bounded() -> None:
    """A process reports 20,000 stacks, each with a reason of its own."""
    tree = Tree(require=True)
    for number in range(20_000):
        fallbacks = [{"origin": "x", "reason": f"{number}", "count": 1}]
        statistics = {**COUNTS, "fallbacks": fallbacks}
        message = {"kind": "stack-end", "stack": f"{number}", "statistics": statistics}
        tree.on_packet(json.dumps(message).encode(), os.getpid())
        message = {"kind": "stack-open", "stack": f"{number}"}
        tree.on_packet(json.dumps(message).encode(), os.getpid())
    assert tree.incomplete
    lines = list(tree.report())
    assert len(lines) < 300
    assert "these counts may be incomplete" in lines[-1]


def test_no_conclusion_from_messages_that_may_be_missing() -> None:
    for kind in ({"kind": "python", "dropped": 1}, {"kind": "python"}):
        tree = Tree(require=True)
        tree.on_packet(json.dumps(kind).encode(), 2)
        tree.conclude(1, sys.executable)
        assert bool(tree.problem) == ("dropped" not in kind)


# --- the socket --------------------------------------------------------------------------------


def test_messages_wait_for_a_reader_that_was_stopped(inbox: Inbox) -> None:
    """The backlog is large enough for 300 messages; no sender waits."""
    for number in range(300):
        assert send(inbox.socket.path, b"%d" % number)
    inbox.socket.start(os.getpid())
    inbox.socket.finish()
    assert inbox.messages == [(b"%d" % number, os.getpid()) for number in range(300)]
    assert not inbox.socket.overflowed


def test_a_full_backlog_is_counted_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook of a new interpreter neither waits nor fails, and later reports the number of lost
    messages.
    """
    monkeypatch.setattr(report_socket, "BACKLOG", 8)
    inbox = Inbox()
    with inbox.socket:
        while send(inbox.socket.path, b"fill"):
            pass
        program = (
            "import sitecustomize as hook, sys; print(hook._dropped, flush=True); "
            "sys.stdin.readline(); print(hook._report('trio'), hook._dropped)"
        )
        environment = {
            **os.environ,
            "TRIO_SMC_RUN": inbox.socket.path,
            "PYTHONPATH": str(Path(site.__file__).parent),
        }
        with subprocess.Popen(
            [sys.executable, "-c", program], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            assert process.stdout.readline() == "1\n"
            inbox.socket.start(os.getpid())
            inbox.wait(lambda: len(inbox.messages) >= 8)
            out, _ = process.communicate("\n", timeout=2 * PATIENCE)
        assert out == "True 0\n"
        inbox.socket.finish()
        assert inbox.socket.overflowed
    assert json.loads(inbox.messages[-1][0]) == {"kind": "trio", "dropped": 1}


def test_a_sender_that_stops_between_connect_and_send(inbox: Inbox) -> None:
    """The reader keeps the connection for a limited time, and receives the messages of others."""
    inbox.socket.start(os.getpid())
    stopped = []
    try:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(200):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stopped.append(sock)
            sock.setblocking(False)
            sock.connect(inbox.socket.path)
        assert send(inbox.socket.path, b"other")
        inbox.wait(lambda: (b"other", os.getpid()) in inbox.messages)
        stopped[-1].send(b"late")
        inbox.wait(lambda: (b"late", os.getpid()) in inbox.messages)
        assert len(os.listdir("/proc/self/fd")) < before + 200 + 80, "too many connections are kept"
    finally:
        for sock in stopped:
            sock.close()


@pytest.mark.parametrize("refusable", [True, False])
def test_descriptors_in_messages_do_not_delay_the_reader(
    refusable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The descriptors are TCP sockets whose close would block for minutes (SO_LINGER)."""
    if not refusable:
        monkeypatch.setattr(report_socket, "SO_PASSRIGHTS", 9999)  # as on an older kernel
    inbox = Inbox()
    with (
        inbox.socket,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as lingering,
    ):
        accepted, _ = server.accept()
        with accepted:
            lingering.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 120))
            lingering.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    lingering.send(bytes(65536))
            sender = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sender.connect(inbox.socket.path)
            rights = [
                (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [lingering.fileno()]))
            ]
            try:
                sender.sendmsg([b"rights"], rights)
                taken = True
            except PermissionError:
                taken = False
                assert refusable
                lingering.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
            sender.close()
            lingering.close()  # the message has the last reference
            descriptors = len(os.listdir("/proc/self/fd"))
            inbox.socket.start(os.getpid())
            assert send(inbox.socket.path, b"behind")
            inbox.wait(lambda: (b"behind", os.getpid()) in inbox.messages, 2)
            assert ((b"rights", os.getpid()) in inbox.messages) == taken
            assert len(os.listdir("/proc/self/fd")) <= descriptors + 4, "a descriptor was received"
            begun = time.monotonic()
            inbox.socket.finish()
            assert time.monotonic() - begun < 5
    # The other end of the TCP connection is closed now, so a blocked close returns.
    for thread in threading.enumerate():
        if thread.name == "trio-smc run":
            thread.join(2 * PATIENCE)


# --- the command -------------------------------------------------------------------------------

PROGRAM = f"""
import os, sys, trio

async def main():
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, trio.sleep_forever, 0)
        print(os.environ["TRIO_SMC_RUN"], flush=True)
        worst, before = 0.0, trio.current_time()
        with trio.move_on_after({2 * PATIENCE}) as scope:
            async with trio.open_nursery() as inner:
                inner.start_soon(until_line, inner.cancel_scope)
                while True:
                    await trio.sleep(0.05)
                    now = trio.current_time()
                    worst, before = max(worst, now - before - 0.05), now
        nursery.cancel_scope.cancel()
    print(worst, flush=True)
    sys.exit(7)

async def until_line(scope):
    await trio.to_thread.run_sync(sys.stdin.readline)
    scope.cancel()

try:
    trio.run(main)
except* SystemExit as group:
    sys.exit(7)
"""
SENDER = """
import glob, itertools, json, re, socket, sys, time
seconds, place, *paths = sys.argv[1:]
seconds = float(seconds)
if not paths:
    for pattern in ("/*", "/*/*", "/*/*/*"):
        paths += glob.glob(place + pattern)
    listed = open("/proc/net/unix").read().splitlines()
    listed = [line.split()[7] for line in listed if len(line.split()) > 7]
    paths += [re.sub("^@", "\\0", name) for name in listed if place in name]
    assert paths, "nothing at all was found"
counts = {"connections": 10**6, "refused": 10**6, "bytes_sent": 10**6, "bytes_received": 0,
          "tcp_bytes_sent": 0, "tcp_bytes_received": 0, "fallbacks": []}
sent, end = 0, time.monotonic() + seconds
for number in itertools.count():
    for message in (
        {"kind": "asyncio", "pid": 1},
        {"kind": "missing", "pid": 1, "executable": "x" * 30000, "error": "\\x1b[2J"},
        {"kind": "stack-end", "pid": 1, "stack": f"{number}", "statistics": counts},
        {"kind": "stack-open", "pid": 1, "stack": f"{number}"},
    ):
        for path in paths:
            for kind in (socket.SOCK_SEQPACKET, socket.SOCK_DGRAM):
                with socket.socket(socket.AF_UNIX, kind) as sock:
                    sock.setblocking(False)
                    try:
                        sock.connect(path)
                        sock.send(json.dumps(message).encode())
                        sent += 1
                    except OSError:
                        pass
    if time.monotonic() >= end:
        break
print(sent)
"""


def run_sender(*arguments: object, user: int | None = OTHER) -> int:
    """Run SENDER. Returns the number of messages that it could send."""
    python = sys.executable if user is None else PUBLIC_PYTHON
    assert python is not None
    done = subprocess.run(
        [python, "-I", "-c", SENDER, *map(str, arguments)],
        capture_output=True, text=True, timeout=2 * PATIENCE, check=True,
        user=user, group=user, extra_groups=None if user is None else [], cwd="/",
    )  # fmt: skip
    return int(done.stdout)


@contextlib.contextmanager
def command(
    directory: Path, *options: str, program: str = PROGRAM, temporary: str | None = None
) -> Iterator[Any]:
    """Run a program under `trio-smc run`; kill the command after the block."""
    (directory / "program.py").write_text(program)
    with subprocess.Popen(
        [*RUN, *options, "--", sys.executable, "program.py"],
        cwd=directory, text=True,
        env={**os.environ, **({} if temporary is None else {"TMPDIR": temporary})},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def public_directory() -> Iterator[str]:
    """A new directory that other users can list."""
    directory = tempfile.mkdtemp(dir="/tmp")
    os.chmod(directory, 0o755)
    yield directory
    os.rmdir(directory)


def memory_of(pid: int) -> int:
    """Peak resident memory of a process in KiB."""
    [peak] = re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(peak)


@needs_root
@pytest.mark.parametrize("knows_the_name", [False, True])
def test_a_flood_from_another_user(
    knows_the_name: bool, tmp_path: Path, public_directory: str
) -> None:
    """Another user can neither find the socket nor, if the path is known, change the report."""
    with command(
        tmp_path, "--require-smc", "--report", temporary=public_directory
    ) as process:  # fmt: skip
        path = process.stdout.readline().strip()
        before, processor = memory_of(process.pid), _processor_time(process.pid)
        assert path.startswith(public_directory)
        sent = run_sender(2, public_directory, *([path] if knows_the_name else []))
        assert (sent > 100) == knows_the_name
        used = _processor_time(process.pid) - processor
        grown = memory_of(process.pid) - before
        out, errors = process.communicate("\n", timeout=2 * PATIENCE)
    assert process.returncode == 7, errors
    assert float(out) < 0.3
    assert "\x1b" not in errors
    assert "asyncio" not in errors
    assert "\n" not in errors.split("connections of", maxsplit=1)[0]
    assert errors.startswith("trio-smc run: 0 connections of 1 process\n")
    assert used < 1.2
    assert grown < 20_000


def test_a_flood_from_the_same_user(tmp_path: Path) -> None:
    """The sender does not descend from the program, so its messages are ignored."""
    with command(tmp_path, "--require-smc", "--report") as process:
        path = process.stdout.readline().strip()
        before = memory_of(process.pid)
        assert run_sender(2, "", path, user=None) > 100
        grown = memory_of(process.pid) - before
        begun = time.monotonic()
        out, errors = process.communicate("\n", timeout=2 * PATIENCE)
    assert process.returncode == 7, errors
    assert time.monotonic() - begun < 15
    assert float(out) < 0.3
    assert errors.startswith("trio-smc run: 0 connections of 1 process\n"), errors
    assert "asyncio" not in errors, errors
    assert grown < 60_000


def test_senders_of_the_same_user_that_have_ended(tmp_path: Path) -> None:
    """The command is stopped while they send, and afterwards cannot find their parents."""
    with command(tmp_path, "--require-smc", "--report") as process:
        path = process.stdout.readline().strip()
        process.send_signal(signal.SIGSTOP)
        assert run_sender(0, "", path, user=None) == 4
        process.send_signal(signal.SIGCONT)
        _, errors = process.communicate("\n", timeout=PATIENCE)
    assert process.returncode == 7, errors
    assert errors.startswith("trio-smc run: 0 connections of 1 process\n"), errors
    assert "asyncio" not in errors, errors
    assert "these counts may be incomplete" in errors, errors


def test_packets_of_an_orphan_are_received(tmp_path: Path) -> None:
    """The parent of a daemon has ended, and the command, a subreaper, has adopted the daemon."""
    program = """
import fcntl, json, os, socket, sys, termios, time
starter = os.getpid()
if os.fork() == 0:
    middle = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == middle:
        time.sleep(0.01)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(os.environ["TRIO_SMC_RUN"])
        sock.send(json.dumps({"kind": "stack-end", "stack": "x", "statistics": COUNTS}).encode())
        # The command can find the parents of this process only until the process ends.
        while any(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4))):
            time.sleep(0.01)
    print(os.getppid() != starter, flush=True)
    sys.stdin.readline()
    os._exit(0)
os.wait()
sys.stdin.readline()
""".replace("COUNTS", repr(COUNTS))
    with command(tmp_path, "--report", program=program) as process:
        assert process.stdout.readline() == "True\n"
        _, errors = process.communicate("\n\n", timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert errors.startswith("trio-smc run: 1 connection of 1 process\n"), errors


def test_orphans_that_have_ended_are_waited_for(tmp_path: Path) -> None:
    program = """
import os, sys, time
for _ in range(20):
    if os.fork() == 0:
        if os.fork() == 0:
            time.sleep(0.05)
        os._exit(0)
    os.wait()
print(os.getppid(), flush=True)
sys.stdin.readline()
sys.exit(4)
"""
    with command(tmp_path, program=program) as process:
        parent = int(process.stdout.readline())
        children = Path(f"/proc/{parent}/task/{parent}/children")
        end = time.monotonic() + PATIENCE
        while len(children.read_text().split()) > 1:
            assert time.monotonic() < end, "ended children were not reaped"
            time.sleep(0.02)
        process.communicate("\n", timeout=PATIENCE)
    assert process.returncode == 4


def _processor_time(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


@needs_root
def test_a_worker_that_changed_its_user(tmp_path: Path) -> None:
    """The worker descends from the program, so the report includes its stack."""
    program = """
import os, sys, trio, trio_smc
async def main():
    async with trio_smc.open_stack(trio_smc.Config(directory=sys.argv[1])) as stack:
        print(os.geteuid(), flush=True)
        await trio.sleep(0)
import trio_smc._stack, json
user = int(sys.argv[2])
if os.fork() == 0:
    os.setgroups([]); os.setresgid(user, user, user); os.setresuid(user, user, user)
    trio.run(main)
    os._exit(0)
# The process stays a zombie, so the command can still prove that it belongs to PROGRAM.
sys.exit(os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT).si_status)
"""
    private = Path("/tmp") / f"trio-smc-test-{os.getpid()}"
    private.mkdir(mode=0o700)
    os.chown(private, OTHER, OTHER)
    (tmp_path / "program.py").write_text(program)
    try:
        done = subprocess.run(
            [*RUN, "--report", "--", sys.executable, "program.py", private, str(OTHER)],
            cwd=tmp_path, capture_output=True, text=True, timeout=2 * PATIENCE, check=False,
        )  # fmt: skip
    finally:
        shutil.rmtree(private)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{OTHER}\n"
    assert done.stderr.startswith("trio-smc run: 0 connections of 1 process\n"), done.stderr
    assert "incomplete" not in done.stderr


@needs_root
@pytest.mark.parametrize("descends", [True, False])
def test_another_user_must_descend_from_the_program(descends: bool, inbox: Inbox) -> None:
    """Both senders know the path; the parent of the unrelated one has ended."""
    inbox.socket.start(os.getpid())
    code = f"""
import os, socket, sys
starter = os.getpid()
if not {descends} and os.fork():
    os._exit(0)
os.setresuid({OTHER}, {OTHER}, {OTHER})
while not {descends} and os.getppid() == starter:
    pass
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(sys.argv[1])
try:
    sock.send(b"hello")
except BrokenPipeError:
    pass  # the reader has already closed the connection
print("sent", flush=True)
sys.stdin.readline()
"""
    with subprocess.Popen(
        [str(PUBLIC_PYTHON), "-I", "-c", code, inbox.socket.path],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "sent\n"
        assert send(inbox.socket.path, b"own")
        inbox.wait(lambda: (b"own", os.getpid()) in inbox.messages)
        received = [pid for data, pid in inbox.messages if data == b"hello"]
        process.communicate("\n", timeout=2 * PATIENCE)
    assert received == ([process.pid] if descends else [])
    assert inbox.socket.refused == (not descends)


def test_a_grandchild_that_outlives_the_program(tmp_path: Path) -> None:
    """The command ends with the program, and reports that a stack is still open."""
    program = """
import subprocess, sys
child = '''
import os, sys, trio, trio_smc
async def main():
    async with trio_smc.open_stack():
        print(os.getpid(), flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)
trio.run(main)
'''
child = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True)
print(child.stdout.readline(), end="", flush=True)
sys.exit(9)
"""
    with command(tmp_path, "--report", program=program) as process:
        pid = int(process.stdout.readline())
        assert process.wait(2 * PATIENCE) == 9
        errors = process.stderr.readline() + process.stderr.readline() + process.stderr.readline()
        errors += process.stderr.readline()
        watch = os.pidfd_open(pid)
        try:
            process.stdin.close()
            assert select.select([watch], [], [], PATIENCE)[0]
        finally:
            os.close(watch)
            process.stdin = None
    assert "1 of 1 stacks are still open" in errors, errors


def test_a_stopped_worker_is_not_reported(tmp_path: Path) -> None:
    """The worker has a socket, but was stopped before its hook could run."""
    program = """
import signal, socket, subprocess, sys, time
sock = socket.create_server(("127.0.0.1", 0))
code = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
child = subprocess.Popen([sys.executable, "-I", "-c", code], pass_fds=[sock.fileno()])
sock.close()
print("ready", flush=True)
sys.stdin.readline()
child.kill()
child.wait()
"""
    with command(tmp_path, program=program) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(2.5)  # the tree is searched after 0.5 s and after 1.5 s
        _, errors = process.communicate("\n", timeout=2 * PATIENCE)
    assert "without the hook" not in errors, errors


def test_a_hundred_children_while_the_command_is_stopped(tmp_path: Path) -> None:
    """No child waits for the command, and the command reports none as without hook."""
    program = """
import subprocess, sys, trio
print("ready", flush=True)
sys.stdin.readline()
trio.run(trio.sleep, 0)
children = [subprocess.Popen([sys.executable, "-c", "pass"]) for _ in range(100)]
codes = [child.wait() for child in children]
print(sum(codes), flush=True)
sys.stdin.readline()
sys.exit(3)
"""
    with command(tmp_path, "--report", program=program) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "0\n"
        process.send_signal(signal.SIGCONT)
        _, errors = process.communicate("\n", timeout=2 * PATIENCE)
    assert process.returncode == 3
    assert "without" not in errors, errors
    assert "incomplete" not in errors, errors


def test_a_closed_stderr_does_not_change_the_exit_code(tmp_path: Path) -> None:
    """The reading end of stderr is closed; the exit code is still the program's."""
    (tmp_path / "program.py").write_text("import sys; sys.exit(5)")
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [*RUN, "--report", "--", sys.executable, "program.py"],
            cwd=tmp_path, stderr=writing, timeout=2 * PATIENCE, check=False,
        )  # fmt: skip
    finally:
        os.close(writing)
    assert done.returncode == 5


def test_a_temporary_directory_that_others_may_change_is_not_used(tmp_path: Path) -> None:
    """The command creates the socket in /tmp instead."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    program = "import os; print(os.environ['TRIO_SMC_RUN'])"
    done = subprocess.run(
        [*RUN, "--", sys.executable, "-c", program],
        env={**os.environ, "TMPDIR": str(tmp_path / "open")},
        capture_output=True, text=True, timeout=2 * PATIENCE, check=True,
    )  # fmt: skip
    assert re.fullmatch(r"/tmp/trio-smc-run-[^/]+/[\w-]{22}\n", done.stdout)
    assert not list((tmp_path / "open").iterdir())


def test_a_tmp_without_the_sticky_bit_is_not_used(tmp_path: Path) -> None:
    """/tmp may lack the bit in a container; the command then creates the socket elsewhere."""
    alone = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    mount = "mount -t tmpfs -o mode=777 none /tmp"
    if subprocess.run([*alone, "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces here")
    show_path = "import os; print(os.environ['TRIO_SMC_RUN'])"
    done = subprocess.run(
        [*alone, "sh", "-c", f'{mount} && exec "$@"', "sh", *RUN, "--", sys.executable, "-c",
         show_path],
        cwd="/", capture_output=True, text=True, check=False, timeout=2 * PATIENCE,
        env={**os.environ, "TMPDIR": "/tmp", "PYTHONPATH": str(Path.cwd())},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(("/var/tmp/trio-smc-run-", "/dev/shm/trio-smc-run-"))
    assert not Path(done.stdout.strip()).parent.exists()


def test_a_chain_of_processes_is_not_searched_recursively() -> None:
    """Each process is a child of the one before; a recursive search would raise RecursionError."""
    limit = sys.getrecursionlimit()
    shell = 'n=$1; [ $n -gt 0 ] && { sh -c "$0" "$0" $((n-1)); exit; }; echo ready; read line'
    with subprocess.Popen(
        ["sh", "-c", shell, shell, "60"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            sys.setrecursionlimit(_depth() + 40)
            try:
                found = list(process_tree(process.pid))
            finally:
                sys.setrecursionlimit(limit)
        finally:
            process.communicate(b"\n")
    assert len(found) == 61


def _depth() -> int:
    return len(inspect.stack(0))


def test_a_stopped_command_waits_on_when_it_continues(tmp_path: Path) -> None:
    """As after Ctrl-Z and `fg`: the command still returns the program's exit code."""
    program = "import sys; print(flush=True); sys.stdin.readline(); sys.exit(6)"
    with command(tmp_path, program=program) as process:
        assert process.stdout.readline() == "\n"
        for _ in range(2):
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.7)  # longer than the interval between searches of the tree
            process.send_signal(signal.SIGCONT)
        time.sleep(0.2)
        _, errors = process.communicate("\n", timeout=2 * PATIENCE)
    assert process.returncode == 6, errors
    assert "Invalid" not in errors
