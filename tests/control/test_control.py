"""The control protocol: a bad request affects only the client that sent it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import socket
import stat
import struct
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

import trio_smc
from tests.api.api_peers import QUICK
from tests.tools.tools_processes import LIMIT, command_here, one_line
from trio_smc import Config, ProtocolError, Stack
from trio_smc.capture import sinks
from trio_smc.control import protocol as control
from trio_smc.control.server import RunReport
from trio_smc.tools.client import KEYS, SHAPES, Snapshot, check_untrusted, take_snapshots
from trio_smc.tools.output import ToolError

GOOD = control.encode({"want": ["statistics"]})


@contextlib.asynccontextmanager
async def open_stack_with_control(**settings: Any) -> AsyncIterator[tuple[Stack, Path]]:
    """Open a stack. Yields the stack and the path of its control socket."""
    async with trio_smc.open_stack(Config(**settings) if settings else QUICK) as stack:
        [directory] = stack.config.private_directory().glob(f"{control.DIRECTORY}*")
        [name] = [name for name in os.listdir(directory) if name.startswith(f"{os.getpid()}-")]
        yield stack, directory / name


async def query(path: Path, *pieces: bytes, end: bool = False) -> list[dict[str, Any]]:
    """Send these bytes as a client, and return the messages of the stack's answer."""
    data = bytearray()
    with trio.fail_after(LIMIT):
        async with await trio.open_unix_socket(str(path)) as stream:
            with contextlib.suppress(trio.BrokenResourceError):
                for piece in pieces:
                    await stream.send_all(piece)
                if end:
                    await stream.send_eof()
            with contextlib.suppress(trio.BrokenResourceError):
                async for received in stream:
                    data += received
    messages = []
    while data:
        length = control.length_untrusted(bytes(data[:4]), control.REPLY_LIMIT)
        messages.append(control.decode_untrusted(bytes(data[4 : 4 + length])))
        del data[: 4 + length]
    return messages


# --- the server: the stack -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "pid"),
    [
        ("4711-a1b2", 4711),
        ("4194304-x-y", 4194304),
        ("4711", None),
        ("4711-", None),
        ("-a1b2", None),
        ("notes-1", None),
        ("\N{SUPERSCRIPT TWO}-a1b2", None),
        ("\N{ARABIC-INDIC DIGIT FOUR}-a1b2", None),
        ("9999999999-a1b2", None),
    ],
)
def test_the_name_of_a_control_socket_contains_its_process_number(
    name: str, pid: int | None
) -> None:
    """Other names in the directory are ignored."""
    assert control.pid_of_name(name) == pid


async def test_an_answer_is_made_of_parts() -> None:
    async with open_stack_with_control() as (stack, path):
        [process, statistics, end] = await query(path, GOOD)
        assert (process["part"], process["data"]["stack"]) == ("process", stack.peer_id.hex())
        assert (statistics["part"], statistics["data"]["connections"]) == ("statistics", 0)
        assert (end["part"], end["version"]) == ("end", control.VERSION)
        # A request may also arrive byte by byte.
        assert len(await query(path, *(bytes((byte,)) for byte in GOOD))) == 3
        # The stack leaves out parts that it does not know.
        newer = control.encode({"want": ["statistics", "horoscope"], "more": {"new": 1}})
        assert [each["part"] for each in await query(path, newer)] == [
            "process", "statistics", "end",
        ]  # fmt: skip


async def test_a_process_that_cannot_import_modules_answers_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may be unable to import after it has changed its user or its root directory."""
    path = tmp_path / "report"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as reader:
        reader.bind(str(path))
        reader.listen()
        async with open_stack_with_control() as (stack, control_path):
            with monkeypatch.context() as patch:
                patch.setitem(sys.modules, "json", None)
                with trio.move_on_after(0):
                    await RunReport(stack, str(path)).run()
                answered = [message["part"] for message in await query(control_path, GOOD)]
        assert answered == ["process", "statistics", "end"]
        connection, _ = reader.accept()
        with connection:
            assert json.loads(connection.recv(4096))["kind"] == "stack-open"
    path.unlink()


async def test_a_group_that_shares_the_directory_may_not_query(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o3770)
    async with open_stack_with_control(directory=shared) as (stack, path):
        assert stack.config.private_directory() == shared
        [rnic] = shared.glob("rnic-*")
        assert stat.S_IMODE(rnic.stat().st_mode) == 0o660
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        command = partial(take_snapshots, shared, ("statistics",), os.getpid())
        assert len(await trio.to_thread.run_sync(command)) == 1


async def test_only_the_user_can_open_the_socket() -> None:
    async with open_stack_with_control() as (_, path):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert stat.S_IMODE(os.stat(path.parent).st_mode) == 0o700
    assert not path.exists()


def framed(body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + body


@pytest.mark.parametrize(
    ("request_bytes", "error"),
    [
        (struct.pack("!I", 0), "has 0 bytes"),
        (struct.pack("!I", control.REQUEST_LIMIT + 1), "has 4097 bytes"),
        (b"\xff" * 4, "has 4294967295 bytes"),
        (framed(b"{"), "not JSON"),
        (framed(b"\xff\xfe"), "not JSON"),
        (framed(b"[" * 4000), "not JSON"),
        (framed(b"1" * 4096), "not a JSON object"),
        (framed(b"[]"), "not a JSON object"),
        (framed(b"{}"), "version None"),
        (framed(b'{"version": 2}'), "version 2"),
        (framed(b'{"version": true}'), "version True"),
        (framed(b'{"version": 1}'), "no list of parts"),
        (framed(b'{"version": 1, "want": [1]}'), "no list of parts"),
        (framed(b'{"version": 1, "want": "rnics"}'), "no list of parts"),
    ],
)
async def test_bad_requests_are_refused_with_a_message(request_bytes: bytes, error: str) -> None:
    async with open_stack_with_control() as (_, path):
        [refusal] = await query(path, request_bytes)
        assert refusal["part"] == "error"
        assert error in refusal["data"]
        assert len(await query(path, GOOD)) == 3, "the next client is answered"


CAPTURE = control.encode({"want": [control.CAPTURE]})


async def test_captures_use_at_most_half_of_the_slots() -> None:
    """Clients that request captures and then idle leave half of the slots to other clients."""
    async with open_stack_with_control() as (_, path), contextlib.AsyncExitStack() as opened:
        idle = await trio.open_unix_socket(str(path))
        for turn in range(4):
            if turn:
                idle = await trio.open_unix_socket(str(path))
            await opened.enter_async_context(idle)
            await idle.send_all(CAPTURE)
            with trio.fail_after(LIMIT):
                assert await idle.receive_some()  # the capture has begun
        for _ in range(8):
            [refusal] = await query(path, CAPTURE)
            assert refusal["part"] == "error"
            assert "captures of this process are already running" in refusal["data"]
        assert len(await query(path, GOOD)) == 3
        await idle.aclose()
        with trio.fail_after(LIMIT):
            while True:
                async with await trio.open_unix_socket(str(path)) as another:
                    await another.send_all(CAPTURE)
                    if b"error" not in await another.receive_some():
                        break


async def test_a_capture_that_no_client_reads_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "STALLED", 0.2)
    async with (
        open_stack_with_control() as (_, path),
        await trio.open_unix_socket(str(path)) as idle,
        await trio.open_unix_socket(str(path)) as reading,
    ):
        await idle.send_all(CAPTURE)
        await reading.send_all(CAPTURE)
        with trio.move_on_after(1) as watched:
            while await reading.receive_some():
                pass
        assert watched.cancelled_caught, "the capture of a client that reads has ended"
        # The client gets what was sent, and then the end of the stream.
        with trio.fail_after(LIMIT):
            while await idle.receive_some():
                pass


async def test_damaged_requests_affect_only_their_client(rng: random.Random) -> None:
    async with open_stack_with_control() as (_, path):
        for _ in range(100):
            data = bytearray(GOOD)
            for _ in range(rng.randrange(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            reply = await query(path, bytes(data[: rng.randrange(len(data) + 1)]), end=True)
            assert not reply or reply[-1]["part"] in ("end", "error")
        assert len(await query(path, GOOD)) == 3


async def test_silent_clients_do_not_block_others_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trio_smc.control.server.CLIENT_TIMEOUT", 0.5)
    async with open_stack_with_control() as (_, path), contextlib.AsyncExitStack() as clients:
        for _ in range(12):
            await clients.enter_async_context(await trio.open_unix_socket(str(path)))
        assert len(await query(path, GOOD)) == 3


async def test_a_defect_affects_one_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: object) -> None:
        raise RuntimeError("a defect")

    async with open_stack_with_control() as (stack, path):
        with monkeypatch.context() as patch:
            patch.setattr(Stack, "statistics", broken)
            reply = await query(path, GOOD)
        assert (reply[-1]["part"], "see the log" in reply[-1]["data"]) == ("error", True)
        assert "a defect" in caplog.text
        assert len(await query(path, GOOD)) == 3
        assert stack.runtime.failure is None


async def test_a_failed_accept_is_logged_unless_the_client_has_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trio_smc.control.server.CAPACITY_PAUSE", 0.01)
    errors = [errno.ECONNABORTED, errno.EMFILE]
    accept = socket.socket.accept

    def fail_first(listener: socket.socket) -> Any:
        if errors and listener.type == socket.SOCK_STREAM:
            raise OSError(errors.pop(0), "injected")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fail_first)
    async with open_stack_with_control() as (_, path):
        for _ in range(2):
            assert len(await query(path, GOOD)) == 3
        assert errors == []
        logged = [each.getMessage() for each in caplog.records if "accept" in each.getMessage()]
        assert len(logged) == 1
        assert f"[Errno {errno.EMFILE}]" in logged[0]


async def test_another_user_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_stack_with_control() as (_, path):
        with monkeypatch.context() as patch:
            patch.setattr(control, "peer_user", lambda sock: os.geteuid() + 1)
            assert await query(path, GOOD) == []
        assert len(await query(path, GOOD)) == 3


async def test_a_stack_opens_without_a_usable_directory(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o755)
    async with trio_smc.open_stack(Config(directory=tmp_path)) as stack:
        assert not stack.runtime.attached
        assert os.listdir(tmp_path) == []


async def test_the_path_of_a_directory_may_be_longer_than_a_socket_address(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.parent.mkdir()
    async with trio_smc.open_stack(Config(directory=deep)) as stack:
        [snapshot] = await trio.to_thread.run_sync(take_snapshots, deep, ("rnics",))
        assert snapshot.stack == stack.peer_id.hex()
        assert [each["name"] for each in snapshot.rnics] == [each.name for each in stack.rnics]


async def test_a_long_list_is_sent_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trio_smc.control.snapshot.PIECE", 2)
    request = control.encode({"want": ["listeners"]})
    async with open_stack_with_control() as (stack, path):
        for _ in range(5):
            await stack.open_listeners(0, host="127.0.0.1")
        pieces = [m["data"] for m in await query(path, request) if m["part"] == "listeners"]
        assert [len(piece) for piece in pieces] == [2, 2, 1]
        names = [name for piece in pieces for name in piece]
        assert names == [list(name) for name in stack.listening_addresses]


async def test_a_forked_child_leaves_the_socket_to_its_parent() -> None:
    async with open_stack_with_control() as (_, path):
        child = os.fork()
        if child == 0:
            os._exit(0)
        assert (await trio.to_thread.run_sync(os.waitpid, child, 0))[1] == 0
        assert len(await query(path, GOOD)) == 3


# --- the client: the tools -----------------------------------------------------------------------


@contextlib.contextmanager
def hostile_server(directory: Path, reply: Callable[[socket.socket], None]) -> Iterator[None]:
    """A control socket of this process whose answers are made by ``reply``."""
    import threading

    place = directory / control.DIRECTORY
    place.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)
    place.chmod(0o700)
    path = place / f"{os.getpid()}-0"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            client, _ = listener.accept()
            with client, contextlib.suppress(OSError):
                client.recv(4096)
                reply(client)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            thread.join(LIMIT)
            path.unlink()


def process_part(**changes: object) -> bytes:
    data = {"pid": 1, "stack": "00", "uptime": 0, "ueids": []} | changes
    return control.encode({"part": "process", "data": data})


END = control.encode({"part": "end", "data": None})


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (b"", "the answer ends after 0 of 4 bytes"),
        (b"\0\0\0\x09{", "the answer ends after 1 of 9 bytes"),
        (b"\xff\xff\xff\xff", "4294967295 bytes"),
        (framed(b"nonsense"), "not JSON"),
        (END, 'the answer has no part "process"'),
        (process_part() + framed(b'{"version": 9}'), "version 9; 1 is supported"),
        (process_part(uptime="long") + END, "process.uptime has the wrong type"),
        (process_part() + control.encode({"part": "statistics", "data": []}), "is not an object"),
        (process_part() + control.encode({"part": "connections", "data": {}}), "is not a list"),
        (process_part() + control.encode({"part": "connections", "data": [{}]}), "has no mode"),
    ],
)
def test_damaged_answers_give_one_line_and_exit_code_2(
    runtime_directory: Path, capsys: pytest.CaptureFixture[str], reply: bytes, error: str
) -> None:
    with hostile_server(runtime_directory / "trio-smc", lambda client: client.sendall(reply)):
        line = one_line(command_here(capsys, "ss"))
    assert line.startswith(f"trio-smc ss: process {os.getpid()} sent a damaged answer: ")
    assert error in line


def test_an_error_in_an_answer_gives_one_line_and_exit_code_2(
    runtime_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reply = process_part() + control.encode({"part": "error", "data": "no, thanks"})
    with hostile_server(runtime_directory / "trio-smc", lambda client: client.sendall(reply)):
        line = one_line(command_here(capsys, "ss"))
    assert line == f"trio-smc ss: process {os.getpid()} answers with an error: no, thanks"


def valid_value(shape: Any) -> Any:
    """Return a valid value of a shape."""
    match shape:
        case dict():
            return {name: valid_value(inner) for name, inner in shape.items()}
        case [inner]:
            return [valid_value(inner)]
        case tuple():
            return shape[0]()
        case type():
            return shape()
    return valid_value(shape.shape)


def damage(value: Any, rng: random.Random) -> Any:
    """Return a copy of the value with one wrong or missing part."""
    if isinstance(value, dict) and value:
        name = rng.choice(sorted(value))
        if name in KEYS and rng.random() < 0.5:
            return {key: inner for key, inner in value.items() if key != name}
        return value | {name: damage(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        return [damage(value[0], rng)]
    return rng.choice([each for each in (1.5j, b"", object()) if type(each) is not type(value)])


@pytest.mark.parametrize("part", SHAPES)
def test_check_untrusted_rejects_every_damage(part: str, rng: random.Random) -> None:
    good = valid_value(SHAPES[part])
    check_untrusted(good, SHAPES[part], part)
    for _ in range(200):
        with pytest.raises(ProtocolError, match=part):
            check_untrusted(damage(good, rng), SHAPES[part], part)


async def test_each_part_of_a_snapshot_has_its_shape() -> None:
    """Each part of a real answer is valid for the client after a round trip through JSON."""
    async with open_stack_with_control() as (stack, path):
        [listener] = await stack.open_listeners(0, host="127.0.0.1")
        stream = await stack.open_stream(*listener.socket.getsockname())
        other = await listener.accept()
        everything = control.encode({"want": list(control.PARTS)})
        parts = {m["part"]: m["data"] for m in await query(path, everything)}
        assert parts.keys() == {"process", *control.PARTS, "end"}
        for part, shape in SHAPES.items():
            assert parts[part], part
            check_untrusted(json.loads(json.dumps(parts[part])), shape, part)
        await stream.aclose()
        await other.aclose()


async def test_a_snapshot_has_links_and_rnics() -> None:
    """Numbers of link groups are never reused, and the MTU of an RNIC is in bytes."""
    wanted = control.encode({"want": ["connections", "link_groups", "rnics"]})
    table = (("eth0", "soft0"), ("eth1", "another"))
    async with open_stack_with_control(pnet=table) as (stack, path):
        for number in (1, 2):
            [listener] = await stack.open_listeners(0, host="127.0.0.1")
            stream = await stack.open_stream(*listener.socket.getsockname())
            other = await listener.accept()
            parts = {m["part"]: m["data"] for m in await query(path, wanted)}
            groups = {group["role"]: group["number"] for group in parts["link_groups"]}
            assert sorted(groups.values()) == [2 * number - 1, 2 * number]
            for each in parts["connections"]:
                assert each["link_group"] in groups.values()
                assert each["link"] == 1
            links = [link for group in stack.link_groups for link in group.links]
            for rnic, described in zip(stack.rnics, parts["rnics"], strict=True):
                assert (described["name"], described["mtu"]) == (rnic.name, 4096)
                assert described["pnet"] == [net for net, name in table if name == rnic.name]
                assert described["links"] == sum(link.rnic is rnic for link in links)
            assert sum(described["links"] for described in parts["rnics"]) == len(links) > 0
            for group in stack.runtime.groups.groups.copy():
                group.terminate()
            for end in (stream, other):
                await trio.aclose_forcefully(end)
            await listener.aclose()
            with trio.fail_after(LIMIT):
                while stack.link_groups:  # noqa: ASYNC110 - Trio has no event for it
                    await trio.sleep(0.01)


async def test_unknown_parts_are_ignored(runtime_directory: Path) -> None:
    reply = process_part() + control.encode({"part": "horoscope", "data": 1}) + END
    directory = runtime_directory / "trio-smc"
    with hostile_server(directory, lambda client: client.sendall(reply)):
        [snapshot] = take_snapshots(directory, ())
    assert isinstance(snapshot, Snapshot)
    assert (snapshot.pid, snapshot.stack) == (os.getpid(), "00")


def test_a_directory_of_another_user_is_not_queried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ToolError, match="belongs to user"):
        take_snapshots(tmp_path, ())


@pytest.mark.parametrize("arguments", [["ss"], ["rnic"], ["capture", "-o", "x"]])
def test_a_process_of_another_user_is_not_queried(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    pid = [str(os.getpid())] if arguments[0] == "capture" else ["--pid", str(os.getpid())]
    error = one_line(command_here(capsys, *arguments, *pid))
    assert (
        f"process {os.getpid()} belongs to user {owner}, and only that user may query it" in error
    )


def test_an_answer_of_another_user_is_rejected(
    runtime_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = runtime_directory / "trio-smc"
    monkeypatch.setattr(control, "peer_user", lambda sock: os.geteuid() + 1)
    with (
        hostile_server(directory, lambda client: None),
        pytest.raises(ToolError, match="cannot be queried: its control socket belongs to user"),
    ):
        take_snapshots(directory, ())
