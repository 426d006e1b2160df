"""The commands read answers of processes that run another release of trio_smc.

`tests/golden/release-0.1.0-control.json` is the answer of a process of release 0.1.0 (commit
3290ec0) to a request for all parts. The process had connections to itself over SMC-R and TCP.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import trio_smc
from tests.tools.tools_processes import Done, command_here
from trio_smc.control import protocol as control
from trio_smc.tools import client
from trio_smc.tools.client import SHAPES, Maybe

RECORDED = Path(__file__).parents[1] / "golden" / "release-0.1.0-control.json"
OLDER: list[dict[str, Any]] = json.loads(RECORDED.read_text())
BRIEFLY = ("--interval", "0.01", "--count", "1")
COMMANDS = (
    ("ss",), ("ss", "-v"), ("ss", "--smc"), ("lg",), ("rnic",), ("stats",), ("stats", *BRIEFLY),
    ("top", *BRIEFLY),
)  # fmt: skip
NOTE = (
    "trio-smc {}: another release of trio_smc, {}, in process {}; this command has {}; "
    '"-" is a value that the other release does not report\n'
)


@contextlib.contextmanager
def serving_messages(directory: Path, messages: Sequence[dict[str, Any]]) -> Iterator[None]:
    """A control socket of this process that sends those of the messages that a client requests."""
    below = directory / control.DIRECTORY
    below.mkdir(parents=True)
    directory.chmod(0o700)
    below.chmod(0o700)
    path = below / f"{os.getpid()}-0"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                with listener.accept()[0] as connection:
                    (length,) = struct.unpack("!I", connection.recv(4, socket.MSG_WAITALL))
                    wanted = json.loads(connection.recv(length, socket.MSG_WAITALL))["want"]
                    for each in messages:
                        if each["part"] not in control.PARTS or each["part"] in wanted:
                            body = json.dumps({"version": 1, **each}).encode()
                            connection.sendall(struct.pack("!I", len(body)) + body)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()
        path.unlink()


def run(
    messages: Sequence[dict[str, Any]],
    words: Sequence[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> Done:
    directory = tmp_path / "private"
    with serving_messages(directory, messages):
        return command_here(capsys, *words, "--directory", str(directory))


# --- an older release ----------------------------------------------------------------------------


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_an_older_process(
    words: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run(OLDER, words, tmp_path, capsys)
    assert done.code == 0, done.err
    assert done.err == NOTE.format(words[0], "before 0.3.0", os.getpid(), trio_smc.__version__)
    assert str(os.getpid()) in done.out or words[0] == "top"


def test_missing_fields_are_dashes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def rows(*words: str) -> list[list[str]]:
        return run(OLDER, words, tmp_path / words[0], capsys).rows()

    for name in ("ss", "lg", "stats", "sum"):
        (tmp_path / name).mkdir()
    assert ["version", "-"] in rows("ss", "-v")
    heads, group, *_ = rows("lg")
    assert group[heads.index("VERSION") - 1] == "-", "PEER ID counts as two words"
    assert ["tcp", "bytes", "sent", "-"] in rows("stats")
    done = run(OLDER, ("stats", "--sum"), tmp_path / "sum", capsys)
    assert ["tcp", "bytes", "sent", "-"] in done.rows()


@pytest.mark.parametrize("words", [("ss",), ("lg",), ("stats",)], ids=" ".join)
def test_missing_fields_are_null_in_json(
    words: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [found] = run(OLDER, [*words, "--json"], tmp_path, capsys).json
    assert found["release"] is None
    if words == ("ss",):
        assert {each["version"] for each in found["connections"]} == {None}
    elif words == ("lg",):
        assert {each["ueid"] for each in found["link_groups"]} == {None}
    else:
        assert found["agreed"] is None
        assert found["counters"]["tcp_bytes_sent"] is None
        assert found["counters"]["connections"] == 2


# --- any other release ---------------------------------------------------------------------------


def value(shape: Any, depth: int) -> Any:
    """Return a value of the shape, without the optional fields of objects at this depth."""
    match shape:
        case Maybe():
            return value(shape.shape, depth)
        case dict():
            return {
                name: value(inner, depth - 1)
                for name, inner in shape.items()
                if depth or name in client.KEYS
            }
        case [tuple()]:
            return ["127.0.0.1", 7000]
        case [inner]:
            return [value(inner, depth)]
        case tuple():
            return 2
    return {str: "text", int: 2, bool: True}[shape]


def answer(depth: int, **more: Any) -> list[dict[str, Any]]:
    parts = {name: value(shape, depth) for name, shape in SHAPES.items()}
    parts["process"] |= more
    end = {"part": "end", "data": None}
    return [*({"part": name, "data": data} for name, data in parts.items()), end]


@pytest.mark.parametrize("form", [(), ("--json",)], ids=["text", "json"])
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_any_field_may_be_missing(
    depth: int,
    words: Sequence[str],
    form: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    done = run(answer(depth), [*words, *form], tmp_path, capsys)
    assert done.code == 0, done.err
    assert "None" not in done.out
    assert "Traceback" not in done.err


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_newer_process(
    words: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newer process sends more fields and parts than this release knows, and its release."""
    messages = answer(9, release="9.9")
    for each in messages[:-1]:
        data = each["data"]
        for item in data if isinstance(data, list) else [data]:
            if isinstance(item, dict):
                item["of_the_future"] = {"deep": [1, None, "text"]}
    messages.insert(1, {"part": "of_the_future", "data": {}})
    done = run(messages, words, tmp_path, capsys)
    assert done.code == 0, done.err
    assert done.err == NOTE.format(words[0], "9.9", os.getpid(), trio_smc.__version__)


def test_this_release_is_not_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run(answer(9, release=trio_smc.__version__), ["ss"], tmp_path, capsys)
    assert (done.code, done.err) == (0, "")


def test_processes_of_several_releases(capsys: pytest.CaptureFixture[str]) -> None:
    """The note has one line for each release, and names each process once."""
    noted = client.SilentProcesses()
    for _ in range(2):
        noted.note_releases([client.Snapshot(pid, release=None) for pid in range(1, 11)])
        noted.note_releases([client.Snapshot(11, release="9.9")])
    first, second = capsys.readouterr().err.splitlines()
    assert "before 0.3.0, in processes 1, 2, 3, 4, 5, 6, 7, 8 and 2 more;" in first
    assert "9.9, in process 11;" in second
    assert noted.exit_code == 0
