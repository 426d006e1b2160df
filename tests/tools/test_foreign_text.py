"""Text from other processes is escaped before a terminal, a pipe or a log gets it."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import pty
import re
import select
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.timing import PATIENCE
from tests.tools.tools_processes import Done, command_here
from trio_smc import ProtocolError, tools
from trio_smc._base.printable import clean, printable
from trio_smc.control import protocol as control
from trio_smc.tools import client, ladder_svg, ladder_text, output
from trio_smc.tools.client import SHAPES, Maybe
from trio_smc.tools.commands import MODULES, load

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
# Characters that control a terminal, or that a reader cannot see.
STEERING = (
    "\x1b[2J\x1b]0;title\x07\x00\r\n\x0b\x0c\x1c\x7f\x85\x9b31m"  # C0, DEL, C1
    "\u061c\u200b\u200d\u200e\u202a\u202e\u2028\u2029\u2066\ufeff\ufff9"  # lines, direction, width
    "\u0301\u0489\ufe0f\u3164\u2800\u00ad\xa0\u3000"  # marks, without ink, blanks
    "\udc80\ud800\ue000\U000e0041\U0010ffff"  # surrogates, private, tags, unassigned
)
HOSTILE = f"[red]{STEERING}[/][link=file:///]:boom:" + "long " * 2000
DANGEROUS = {each for each in STEERING if not " " <= each <= "~"} - {"\n"}
ARGUMENT = HOSTILE[:100].replace("\0", "").replace("\ud800", "")
"""Hostile text that can be an argument or the name of a file."""


def assert_harmless(text: str, *, terminal: bool = False) -> None:
    """Assert that the text has no control characters and a bounded length.

    Args:
      terminal: allow the colours and line ends of the command itself.
    """
    if terminal:
        text = re.sub(r"\x1b\[[0-9;]*m", "", text).replace("\r\n", "\n")
    found = {each for each in text if each in DANGEROUS or not each.isprintable()} - {"\n"}
    assert not found, ascii(found)
    assert len(text) < 300_000


# --- a process with hostile answers --------------------------------------------------------------


def hostile(shape: Any) -> Any:
    """Return a value of the shape whose strings, and one more field name, are hostile."""
    match shape:
        case Maybe():
            return hostile(shape.shape)
        case dict():
            return {HOSTILE: HOSTILE, **{name: hostile(each) for name, each in shape.items()}}
        case [tuple()]:
            return [HOSTILE, 2]
        case [inner]:
            return [hostile(inner)]
        case tuple():
            return 2
    return {str: HOSTILE, int: 2, bool: False}[shape]


class HostileSocket:
    """A control socket of this process that gives hostile answers."""

    def __init__(self, directory: Path, name: str = "1", refuse: bool = False) -> None:
        below = directory / control.DIRECTORY
        below.mkdir(mode=0o700, exist_ok=True)
        self.ends: tuple[Any, Any] | None = None
        self.is_ready = threading.Event()  # answers wait for it
        self.is_ready.set()
        self.parts: Sequence[str] | None = None  # sent in place of the requested parts
        self._refuse = refuse
        self._name = name
        self._path = below / f"{os.getpid()}-{name}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self._path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self._path.unlink()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        (length,) = struct.unpack("!I", connection.recv(4, socket.MSG_WAITALL))
        wanted = json.loads(connection.recv(length, socket.MSG_WAITALL))["want"]
        if self._refuse:
            connection.sendall(control.encode({"part": "error", "data": HOSTILE}))
            return
        if wanted == [control.CAPTURE]:
            connection.sendall(
                control.encode({"part": control.CAPTURE, "data": self._name + HOSTILE})
            )
            connection.recv(1)
            return
        self.is_ready.wait(2 * PATIENCE)
        for part in ("process", *(wanted if self.parts is None else self.parts)):
            data: Any = 2 if part in control.DRAINS else {}
            if part not in (*control.DRAINS, control.SIZES):
                data = hostile(SHAPES[part])
            if part == "connections":
                data += [{**data[0], "mode": "smc-r"}, {**data[0], "version": 1, "link": None}]
                if self.ends is not None:
                    data[0]["local"], data[0]["peer"] = self.ends
            connection.sendall(control.encode({"part": part, "data": data}))
        connection.sendall(control.encode({"part": "end", "data": None}))


@pytest.fixture
def private(tmp_path: Path) -> Path:
    directory = tmp_path / "private"
    directory.mkdir(mode=0o700)
    return directory


@pytest.fixture
def hostile_socket(private: Path) -> Iterator[HostileSocket]:
    made = HostileSocket(private)
    yield made
    made.close()


QUERIES = (
    ("ss",), ("ss", "-v"), ("ss", "--json"), ("lg",), ("lg", "--json"), ("rnic",), ("stats",),
    ("stats", "--interval", "0.05", "--count", "1"), ("top", "--interval", "0.05", "--count", "1"),
    ("top", "--interval", "0.05", "--count", "1", "--json"),
    ("drain", "[red]", "--timeout", "0.05"), ("drain", HOSTILE, "--timeout", "0.05", "--json"),
    ("undrain", "[red]"), ("report",), ("lg", "-v"), ("lg", "--device", "[red]"), ("ueid",),
    ("stats", "--prometheus"), ("stats", "--rows"), ("stats", "--sum"),
    ("stats", "--sizes", "0.01"),
)  # fmt: skip


@pytest.mark.parametrize("words", QUERIES, ids=" ".join)
def test_queries_escape_hostile_answers(
    words: tuple[str, ...],
    private: Path,
    hostile_socket: HostileSocket,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each command that queries processes escapes the text, and does not interpret markup."""
    done = command_here(capsys, *words, "--directory", str(private))
    assert done.code == 0, done.err
    assert_harmless(done.out)
    assert_harmless(done.err)
    if words[0] not in ("top", "report") and len(words) < 2:  # the others print few strings
        assert "[red]" in done.out


def assert_no_result(words: tuple[str, ...], done: Done) -> None:
    """Assert that stdout is empty, or with --json the command's document without any item."""
    empty = {each.NAME: each.EMPTY for each in load() if hasattr(each, "EMPTY")}
    if "--json" in words:
        assert json.loads(done.out) == empty[words[0]]
    else:
        assert done.out == ""


@pytest.mark.parametrize("words", QUERIES, ids=" ".join)
def test_answers_without_the_wanted_parts(
    words: tuple[str, ...],
    private: Path,
    hostile_socket: HostileSocket,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command names the process with the damaged answer; no exception ends it."""
    hostile_socket.parts = ()
    done = command_here(capsys, *words, "--directory", str(private))
    if "--sizes" in words:
        assert done.code == 2
        assert_no_result(words, done)
        assert "no process has counted sizes" in done.err
    elif words[0] in ("stats", "top"):
        assert done.code == 2
        assert_no_result(words, done)
        assert "sent a damaged answer: the answer has no statistics" in done.err
    elif "drain" in words[0]:
        assert done.code == 2
        assert_no_result(words, done)
        assert_harmless(done.err)
    elif words[0] == "report":  # the report contains the error
        assert done.code == 1
        assert "silent.json" in done.out
        assert "sent a damaged answer: the answer has no statistics" in done.err
    else:
        assert done.code == 0
        assert done.err.startswith(f"trio-smc {words[0]}: another release of trio_smc, [red]")
        assert_harmless(done.err)


def test_a_capture_does_not_go_to_a_terminal(
    private: Path,
    hostile_socket: HostileSocket,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    done = command_here(capsys, "capture", str(os.getpid()), "-o", "-", "--directory", str(private))
    assert (done.code, done.out) == (2, "")
    assert "cannot write binary data to a terminal" in done.err


@pytest.mark.parametrize("words", [*QUERIES, ("capture", "PID", "-o", "-")], ids=" ".join)
def test_queries_escape_hostile_errors(
    words: tuple[str, ...], private: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process answers with an error message of its own choice."""
    made = HostileSocket(private, refuse=True)
    try:
        if words[0] != "capture":
            words = (*words, "--pid", "PID")
        here = [str(os.getpid()) if word == "PID" else word for word in words]
        done = command_here(capsys, *here, "--directory", str(private))
    finally:
        made.close()
    assert done.code in (1, 2)
    assert "[red]" in done.err
    assert_harmless(done.err)
    assert_harmless(done.out)
    assert len(done.err.splitlines()) == 1


def test_capture_escapes_the_names_of_several_stacks(
    private: Path, hostile_socket: HostileSocket, capsys: pytest.CaptureFixture[str]
) -> None:
    second = HostileSocket(private, "2")
    try:
        done = command_here(
            capsys, "capture", str(os.getpid()), "-o", "-", "--directory", str(private)
        )
    finally:
        second.close()
    assert done.code == 2
    assert "several stacks" in done.err
    assert_harmless(done.err)


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_check_escapes_the_view_of_the_server(
    options: tuple[str, ...],
    private: Path,
    hostile_socket: HostileSocket,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`check` prints the connection as the server's process describes it."""
    hostile_socket.is_ready.clear()  # the command may query before the server has accepted
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, address = server.accept()
            hostile_socket.ends = list(connection.getsockname()), list(address)
            hostile_socket.is_ready.set()
            with connection:
                connection.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        port = str(server.getsockname()[1])
        done = command_here(
            capsys, "check", "127.0.0.1", port, "--directory", str(private), *options
        )
        thread.join()
    assert done.code == 1, done.err
    assert "[red]" in done.out
    assert_harmless(done.out)
    assert_harmless(done.err)


def test_run_escapes_hostile_reports(tmp_path: Path) -> None:
    """A process below `trio-smc run` sends reports with hostile strings."""
    counts = {
        **dict.fromkeys(("connections", "refused", "bytes_sent", "bytes_received"), 1),
        **dict.fromkeys(("tcp_bytes_sent", "tcp_bytes_received"), 1),
        "fallbacks": [{"origin": HOSTILE[:60], "reason": HOSTILE[40:100], "count": 1}],
    }
    messages = [
        {"kind": "missing", "executable": HOSTILE, "error": HOSTILE},
        {"kind": "stack-end", "stack": HOSTILE[:32], "statistics": counts},
    ]
    (tmp_path / "program.py").write_text(
        f"""
import os, socket
for text in {[json.dumps(each) for each in messages]!r}:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(os.environ["TRIO_SMC_RUN"])
    sock.send(text.encode())
"""
    )
    done = subprocess.run(
        [sys.executable, "-m", "trio_smc.tools", "run", "--report", "--", sys.executable,
         "program.py"],
        cwd=tmp_path, capture_output=True, timeout=2 * PATIENCE, check=False,
    )  # fmt: skip
    errors = done.stderr.decode()
    assert "[red]" in errors
    assert len(errors.splitlines()) == 6, errors
    assert_harmless(errors)


@pytest.mark.parametrize("form", ["text", "svg"])
def test_ladders_escape_hostile_titles(
    form: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ladders escape all text, although no decoder returns hostile text today."""
    for module in (ladder_text, ladder_svg):
        monkeypatch.setattr(module, "title", lambda row: HOSTILE)
        monkeypatch.setattr(module, "details", lambda row: [HOSTILE])
    [path, *_] = sorted(GOLDEN.rglob("*.pcapng"))
    done = command_here(capsys, "ladder", str(path), *(("--svg", "-") if form == "svg" else ()))
    assert done.code == 0, done.err
    text = re.sub(r"&#\d+;", "", done.out)
    assert {each for each in text if each in DANGEROUS} == set()


@pytest.mark.parametrize(
    "words",
    [
        ("ss", "--directory", ARGUMENT), ("lg", "--pid", ARGUMENT), ("stats", ARGUMENT),
        ("top", "--interval", ARGUMENT), ("rnic", ARGUMENT), ("reasons", ARGUMENT), (ARGUMENT,),
        ("check", ARGUMENT, "1"), ("check", "127.0.0.1", ARGUMENT),
        ("capture", ARGUMENT, "-o", "x"), ("ladder", ARGUMENT),
        ("ladder", "/dev/null", "--limit", ARGUMENT), ("run", "--", ARGUMENT),
        ("proxy", ARGUMENT, "tcp:a:1"), ("exporter", "--listen", ARGUMENT),
        ("setup", "--group", ARGUMENT, "--pin", "/nowhere"),
        ("teardown", "--pin", ARGUMENT),
    ],
    ids=lambda words: words[0][:8].strip("[") if isinstance(words, tuple) else None,
)  # fmt: skip
def test_commands_escape_hostile_arguments(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """A script may pass a name that another user chose."""
    done = _run_here(capsys, *words)
    assert done.code != 130
    assert_harmless(done.out)
    assert_harmless(done.err)


def _run_here(capsys: pytest.CaptureFixture[str], *words: str) -> Done:
    environment = dict(os.environ)
    try:
        return command_here(capsys, *words)
    finally:
        os.environ.clear()
        os.environ.update(environment)


def test_every_command_has_a_case() -> None:
    """A new command needs a case in this module."""
    named = {
        *(words[0] for words in QUERIES), "capture", "check", "ladder", "run", "reasons", "proxy",
        "setup", "teardown", "exporter",
    }  # fmt: skip
    assert named == set(MODULES)


@pytest.mark.parametrize("words", QUERIES[:3], ids=" ".join)
def test_queries_print_ascii_in_the_c_locale(
    words: tuple[str, ...], private: Path, hostile_socket: HostileSocket
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trio_smc.tools", *words, "--directory", private],
        env={**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        cwd=ROOT, capture_output=True, timeout=2 * PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert_harmless(done.stdout.decode("ascii"))
    assert_harmless(done.stderr.decode("ascii"))
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("words", [QUERIES[1], ("top", "--interval", "0.1", "--count", "1")])
def test_a_terminal_gets_only_escapes_of_the_command(
    words: tuple[str, ...], private: Path, hostile_socket: HostileSocket
) -> None:
    """The only escape sequences on a terminal are those of the command itself."""
    ours, theirs = pty.openpty()
    try:
        with subprocess.Popen(
            [sys.executable, "-m", "trio_smc.tools", *words, "--directory", private],
            env={**os.environ, "TERM": "xterm", "COLUMNS": "200", "LINES": "50"},
            cwd=ROOT, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            os.close(theirs)
            errors = b""
            with contextlib.suppress(OSError):  # EIO: the process has closed its end
                while select.select([ours], [], [], PATIENCE)[0] and (
                    piece := os.read(ours, 65536)
                ):
                    errors += piece
            assert process.wait(2 * PATIENCE) == 0
    finally:
        os.close(ours)
    text = errors.decode()
    assert "title" not in text or "\x1b]0" not in text
    if words[0] == "top":
        # Switch to the alternative screen, hide the cursor, move it.
        text = re.sub(r"\x1b\[(\?1049[hl]|\?25[hl]|H|2J\x1b\[H)", "", text, count=20)
        text = text.replace("\r", "")
    else:
        assert "[red]" in text
    assert_harmless(text, terminal=True)


# --- the functions -----------------------------------------------------------------------------


def test_printable_escapes_every_unprintable_character() -> None:
    """An escape identifies the original character; printable text of any script is unchanged."""
    for text in ("", "plain text 7", "Grüße → 日本語", "עברית", "[red]"):
        assert printable(text) == text
    assert printable("a\x1b\u202e\ud800\U000e0041") == r"a\x1b\u202e\ud800\U000e0041"
    for number in range(sys.maxunicode + 1):
        character = chr(number)
        shown = printable(character)
        assert shown == character or re.fullmatch(r"\\([tnr]|x..|u.{4}|U.{8})", shown), number
        assert shown.isprintable()
    assert not DANGEROUS & set(printable(STEERING))
    assert len(printable("x" * 10_000)) == 1003
    assert len(printable("x" * 10_000, None)) == 10_000
    assert clean({"\x1b": [{"a": "\x1b"}, 1, None]}) == {r"\x1b": [{"a": r"\x1b"}, 1, None]}


@pytest.mark.parametrize("value", [10**400, -(10**30), float("inf"), float("nan"), 1e300])
def test_numbers_of_answers_are_bounded(value: float, private: Path) -> None:
    """The commands compute sizes and times from these numbers."""
    with pytest.raises(ProtocolError):
        client.check_untrusted({"uptime": value}, {"uptime": (int, float)}, "process")


def test_a_hostile_version_is_escaped_in_the_error() -> None:
    """The log of a running process contains this error about a client."""
    body = json.dumps({"version": "\n\x1b[2J"}).encode()
    with pytest.raises(ProtocolError) as caught:
        control.decode_untrusted(body)
    assert str(caught.value).isprintable()


def test_only_one_module_prints() -> None:
    """Only `output` prints, so that no module can print unescaped text."""
    found = set()
    for path in Path(tools.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if named and node.func.id == "print":  # type: ignore[attr-defined]
                found.add(path.name)
            if isinstance(node, ast.Attribute) and node.attr in ("stdout", "stderr"):
                assert path.name in (
                    "output.py", "cli.py", "capture.py", "ladder.py", "processes.py"
                ), path  # fmt: skip
    assert found <= {"output.py", "ladder.py"}  # `ladder` prints an SVG picture, which is escaped
    assert output.__file__.endswith("output.py")
