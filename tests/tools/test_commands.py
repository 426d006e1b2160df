"""`trio-smc ss, lg, rnic, stats, top, check, reasons` against real processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import trio

import trio_smc
from tests.api.api_peers import plain_server
from tests.tcp_ends import tcp_has_ended
from tests.tools.tools_processes import (
    LIMIT,
    ROOT,
    command,
    command_here,
    one_line,
    quick_command,
    running,
)
from trio_smc import Fallback, FallbackReason
from trio_smc._base.reasons import Diagnosis
from trio_smc.tools import output
from trio_smc.tools.commands import check, top
from trio_smc.tools.tables import Marked

# --- ss ------------------------------------------------------------------------------------------


async def test_ss_shows_every_connection_with_its_mode_and_queues() -> None:
    async with running("pair") as peer:
        [stack] = (await quick_command("ss", "--json")).json
        assert stack["pid"] == peer.pid
        assert stack["listeners"] == [["127.0.0.1", peer.details["port"]]]
        server, client, plain = sorted(
            stack["connections"], key=lambda each: (each["mode"], -each["receive_queue"])
        )
        here, there = ["127.0.0.1", peer.details["port"]], ["127.0.0.1", peer.details["client"]]
        assert (server["mode"], server["state"]) == ("smc-r", "ACTIVE")
        assert (server["local"], server["peer"]) == (here, there)
        assert (client["local"], client["peer"]) == (there, here)
        # The server read 500 of the client's 1500 bytes, the client all 200 of the server's.
        assert server["receive_queue"] == 1000
        assert server["cursors"]["received"] == client["cursors"]["produced"] == 1500
        assert server["cursors"]["consumed"] == 500
        assert client["cursors"]["ring"] == server["cursors"]["peer_ring"] == 16384
        assert client["send_queue"] == 1500 - client["cursors"]["taken"]
        assert (client["receive_queue"], client["cursors"]["received"]) == (0, 200)
        assert client["statistics"]["bytes_sent"] == 1500
        assert {server["link_group"], client["link_group"]} == {1, 2}
        assert plain["mode"] == "tcp"
        assert plain["state"] == "ESTABLISHED"
        assert plain["peer"] == ["127.0.0.1", peer.details["plain"]]
        assert plain["fallback"]["reason"] == "peer-not-capable"
        assert plain["cursors"] is plain["link_group"] is None


async def test_the_table_of_ss() -> None:
    async with running("pair") as peer:
        heading, *rows = (await command("ss")).rows()
        assert heading[:4] == ["PID", "STATE", "MODE", "RECV-Q"]
        assert {row[0] for row in rows} == {str(peer.pid)}
        assert sorted(row[1:3] for row in rows) == [
            ["ACTIVE", "smc-r"], ["ACTIVE", "smc-r"], ["ESTABLISHED", "tcp"], ["LISTEN", "-"],
        ]  # fmt: skip
        [tcp] = [row for row in rows if row[2] == "tcp"]
        assert tcp[-2:] == ["local:", "peer-not-capable"]
        only = (await command("ss", "--tcp")).rows()[1:]
        assert [row[1:3] for row in only] == [["ESTABLISHED", "tcp"]]
        verbose = (await command("ss", "-v", "--pid", peer.pid)).out
        assert "1500 arrived, 500 consumed; ring 16.0 KiB" in verbose
        assert "local 0x03010000 peer-not-capable, peer none" in verbose
        assert Fallback.local(FallbackReason.PEER_NOT_CAPABLE).remedy in verbose


def test_tables_are_not_squeezed_into_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cells are not cut, sentences are wrapped, and escape sequences are escaped."""
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("LINES", "20")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    row = ["127.0.0.1:40001", 12345678, "some words " * 20]
    output.show(output.table(("NAME", ">NUMBER", "~TEXT"), [row]))
    lines = capsys.readouterr().out.splitlines()
    assert "127.0.0.1:40001  12345678" in lines[1]
    assert len(lines) > 4
    assert sum(line.count("words") for line in lines) == 20
    output.show(output.table(("NAME",), [["\x1b[31mred"]]))
    assert "\\x1b[31mred" in capsys.readouterr().out


def test_tables_do_not_need_rich(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wide characters count twice, sentences share the width, and TCP is coloured."""
    monkeypatch.setitem(sys.modules, "rich", None)
    assert command_here(capsys, "reasons", "no-rnic").out.startswith("reason   no-rnic\n")
    rows: list[list[object]] = [
        ["日本", Marked("tcp", "warning"), 1, "a b " * 10, "x" * 50], ["a", "b", None, "", "y"],
    ]  # fmt: skip
    made = output.table(("A", "MODE", ">N", "~ONE", "~TWO"), rows, "title")
    assert list(output.lines_of(made))[1:] == [
        "A     MODE  N  ONE" + " " * 39 + "TWO", f"日本  tcp   1  {'a b ' * 10}  {'x' * 50}",
        "a     b     -  -" + " " * 41 + "y",
    ]  # fmt: skip
    narrow = list(output.lines_of(made, width=60, colour=True))
    assert narrow[0] == "\x1b[1mtitle\x1b[0m"
    assert narrow[2].startswith("日本  \x1b[33mtcp\x1b[0m   1  a b")
    plain_lines = [re.sub("\x1b[^m]*m", "", line) for line in narrow]
    assert all(len(line) <= 60 for line in plain_lines)
    assert sum(line.count("x") for line in plain_lines) == 50
    for variable, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdout.isatty", lambda: True)
            patch.setenv("TERM", "xterm")
            assert output.has_colours(sys.stdout)
            patch.setenv(variable, value)
            assert not output.has_colours(sys.stdout)


@pytest.mark.parametrize(
    "words", [("reasons",), ("--help",), ("ss", "--help"), ("reasons", "--json"), ("--version",)]
)
def test_output_that_cannot_be_written(words: tuple[str, ...]) -> None:
    """The error is one line without a traceback, also for help, which argparse prints."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "trio_smc.tools", *words], stdout=full, stderr=subprocess.PIPE,
            cwd=ROOT, check=False, timeout=LIMIT,
        )  # fmt: skip
    error = done.stderr.decode()
    name = "trio-smc" if {"--help", "--version"} & {*words} else f"trio-smc {words[0]}"
    assert error == f"{name}: cannot write the output: No space left on device\n"
    assert done.returncode == 2


async def test_top_names_the_columns_that_it_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setenv("FORCE_COLOR", "1")
    async with running("pair"):
        with mock.patch.object(top, "is_terminal", return_value=True):
            done = await quick_command("top", "--interval", "0.05", "--count", "1")
    assert re.search(r"^hidden \(\d+ columns needed\): .*RECV-Q, STATE", done.out, re.MULTILINE)
    assert done.out.startswith("\x1b[?1049h")
    assert done.out.endswith("\x1b[?1049l")


async def test_several_processes_are_distinguished() -> None:
    async with running("server") as one, running("server") as two:
        both = (await quick_command("ss", "--json")).json
        assert [each["pid"] for each in both] == sorted((one.pid, two.pid))
        [single] = (await quick_command("ss", "--json", "--pid", two.pid)).json
        assert (single["pid"], single["listeners"][0][1]) == (two.pid, two.details["port"])


async def test_a_default_stack_answers_too() -> None:
    [listener] = await trio_smc.open_listeners(0, host="127.0.0.1")
    [stack] = (await command("ss", "--json")).json
    assert stack["pid"] == os.getpid()
    assert stack["listeners"] == [list(listener.socket.getsockname())]
    await listener.aclose()


# --- lg, rnic, stats, top ------------------------------------------------------------------------


async def test_lg_shows_both_roles_of_a_process_that_talks_to_itself() -> None:
    async with running("pair") as peer:
        [stack] = (await quick_command("lg", "--json")).json
        server, client = sorted(stack["link_groups"], key=lambda group: str(group["role"]))[::-1]
        assert (server["role"], client["role"]) == ("server", "client")
        assert server["peer_id"] == client["peer_id"] == stack["stack"]
        [link], [other] = server["links"], client["links"]
        assert (link["state"], link["rnic"], link["connections"]) == ("ACTIVE", "soft0", 1)
        assert link["user_id"] == other["peer_user_id"]
        [rmb] = server["rmbs"]
        assert (rmb["element_size"], rmb["in_use"]) == (16384, 1)
        rows = (await quick_command("lg", "--pid", peer.pid)).rows()[1:]
        assert sorted(row[3] for row in rows) == ["client", "server"]
        assert {row[1] for row in rows} == {stack["stack"]}
        assert {" ".join(row[-6:]) for row in rows} == {f"1 of {rmb['elements']} × 16.0 KiB"}


async def test_rnic_with_and_without_a_process() -> None:
    alone = (await quick_command("rnic", "--json")).json
    assert alone["stacks"] == []
    assert [each["name"] for each in alone["auto"] if each["kind"] == "software"] == ["soft0"]
    assert alone["variant"] == trio_smc.SoftRnic.variant
    shown = (await quick_command("rnic")).out
    assert "RNICs of running stacks" not in shown
    assert f"Variant of the software RNIC: {trio_smc.SoftRnic.variant}.\n" in shown
    async with running("pair") as peer:
        found = (await quick_command("rnic", "--json", "--pid", peer.pid)).json
        assert found.keys() == {"stacks"}
        [stack] = found["stacks"]
        assert [(each["name"], each["links"]) for each in stack["rnics"]] == [("soft0", 2)]
        text = (await quick_command("rnic")).out
        assert text.index("RNICs of running stacks") < text.index("RNICs of a new process")


async def test_stats_since_the_start_and_of_an_interval() -> None:
    async with running("pair"):
        [stack] = (await quick_command("stats", "--json")).json
        counters = stack["counters"]
        assert counters["connections"] == counters["open_connections"] == 2
        assert counters["bytes_sent"] == counters["bytes_received"] == 1700
        assert counters["fallbacks"] == 1
        assert stack["fallbacks"] == [{"origin": "local", "reason": "peer-not-capable", "count": 1}]
        names = {each.name for each in fields(trio_smc.StackStatistics)}
        assert set(counters) == names - {"agreed"}
        assert stack["agreed"] == [
            {"version": 1, "release": 0, "ueid": None, "direct": True, "count": 2}
        ]
        [added] = (
            await quick_command("stats", "--json", "--interval", "0.05", "--count", "1")
        ).json
        assert added["counters"]["open_connections"] == 2
        assert added["counters"]["bytes_sent"] == added["counters"]["fallbacks"] == 0
        rows = (await quick_command("stats")).rows()
        assert ["bytes", "sent", "1.7", "KiB"] in rows
        assert ["local:", "peer-not-capable", "1"] in rows


async def test_top_prints_frames_into_a_pipe() -> None:
    async with running("pair") as peer:
        done = await command("top", "--interval", "0.05", "--count", "2", "--lines", "1")
        assert (done.code, done.err) == (0, "")
        assert done.out.count("connections: 2 over SMC-R, 1 over TCP") == 2
        assert done.out.count("... and 1 more (--lines)") == 2
        shown = [row for row in done.rows() if row[:1] == [str(peer.pid)]]
        assert [row[-1] for row in shown] == ["ACTIVE"] * 2


async def test_top_as_documents() -> None:
    async with running("pair") as peer:
        done = await command("top", "--interval", "0.05", "--count", "2", "--lines", "1", "--json")
    assert (done.code, done.err) == (0, "")
    first, length = json.JSONDecoder().raw_decode(done.out)
    for report in (first, json.loads(done.out[length:])):
        assert {name: report[name] for name in ("stacks", "smc-r", "tcp", "fallbacks")} == {
            "stacks": 1, "smc-r": 2, "tcp": 1, "fallbacks": 1,
        }  # fmt: skip
        assert report["seconds"] >= 0.05
        [one] = report["connections"]
        assert (one["pid"], one["state"], one["bytes_sent"]) == (peer.pid, "ACTIVE", 0.0)
        assert (one["send_queue"], one["receive_queue"]) in ((200, 1000), (1000, 0))


# --- check ---------------------------------------------------------------------------------------


async def test_check_of_a_server_that_speaks_smc_r() -> None:
    async with running("server") as peer:
        done = await command("check", "127.0.0.1", peer.details["port"], "--json")
        report = done.json
        assert report["mode"] == "smc-r"
        steps = [(step["name"], step["verdict"]) for step in report["steps"]]
        assert [name for name, _ in steps if name != "LLC"] == [
            "resolve", "RNICs", "connect", "discovery", "CLC", "CLC", "CLC", "mode",
        ]  # fmt: skip
        assert {verdict for _, verdict in steps} == {"ok"}
        assert ("LLC", "ok") in steps
        assert (report["server"]["pid"], report["server"]["mode"]) == (peer.pid, "smc-r")
        text = await command("check", "127.0.0.1", peer.details["port"])
        variant = trio_smc.SoftRnic.variant
        assert report["variant"] == variant
        assert f"SMC-R is used.\n  variant    {variant}, of this side's software" in text.out
        assert "received Accept\n" in text.out


async def test_check_of_a_server_without_smc_r() -> None:
    async with plain_server() as listener:
        port = listener.socket.getsockname()[1]
        done = await quick_command("check", "127.0.0.1", port)
    assert (done.code, done.err) == (1, "")
    assert "variant" not in done.out
    expected = Fallback.local(FallbackReason.PEER_NOT_CAPABLE)
    assert f"SMC-R is not used: {expected.message}." in done.out
    assert "decided by this side" in done.out
    # The server is this process, so the command also explains its listener.
    assert f"listener   process {os.getpid()} " in done.out


async def test_check_of_an_address_in_brackets() -> None:
    """`check` accepts an IPv6 address in the form that is used before a port."""
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        done = await quick_command("check", "[::1]", server.getsockname()[1], "--json")
    assert done.code == 1, done.err
    assert json.loads(done.out)["host"] == "::1"


async def test_check_of_another_address_of_this_host() -> None:
    """The client's local address is 127.0.0.1, which is not the server's address."""
    with socket.create_server(("127.0.0.5", 0)) as server:
        done = await quick_command("check", "127.0.0.5", server.getsockname()[1], "--json")
    assert json.loads(done.out)["listener"]["pid"] == os.getpid(), done.out


async def test_check_prints_the_reason_of_a_decline() -> None:
    """The output has the diagnosis words of both sides, and the side that decided."""
    from tests.api.api_peers import decline, read_clc

    async with plain_server() as listener, trio.open_nursery() as nursery:

        async def refuse() -> None:
            async with await listener.accept() as stream:
                await read_clc(stream)
                await stream.send_all(decline(Diagnosis.PREFIX_MISMATCH).encode())
                await stream.receive_some()

        nursery.start_soon(refuse)
        port = listener.socket.getsockname()[1]
        done = await quick_command("check", "127.0.0.1", port, "--discovery", "assume")
    assert done.code == 1
    assert "received Decline, diagnosis 0x03070000 prefix-mismatch" in done.out
    assert "prefix-mismatch, decided by the server" in done.out
    assert "this side  0x05000000 peer-declined" in done.out
    assert "server     0x03070000 prefix-mismatch" in done.out


@pytest.mark.parametrize(
    ("rnics", "code", "server"),
    [("auto", 0, r"127\.0\.0\.1:\d+"), ((), 1, "-")],
    ids=["smc-r", "tcp"],
)
async def test_check_of_a_server_that_resets_at_once(
    rnics: Any, code: int, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a proxy without a target. The kernel then does not know the address of the server."""
    open_stream = trio_smc.Stack.open_stream
    connected = threading.Event()

    async def wait_for_reset(
        stack: trio_smc.Stack, *arguments: Any, **options: Any
    ) -> trio_smc.SmcStream:
        stream = await open_stream(stack, *arguments, **options)
        connected.set()
        with contextlib.suppress(OSError):
            # Trio has no event for a reset.
            while not tcp_has_ended(stream) and stream.socket.getpeername():  # noqa: ASYNC110
                await trio.sleep(0.01)
        return stream

    async def refuse(stream: trio_smc.SmcStream) -> None:
        await trio.to_thread.run_sync(connected.wait)
        stream.abort()

    monkeypatch.setattr(trio_smc.Stack, "open_stream", wait_for_reset)
    monkeypatch.setattr(check, "RETRY_INTERVAL", 0.001)  # the server has no connection to show
    config = trio_smc.Config(rnics=rnics, receive_buffer=16384)
    async with trio_smc.open_stack(config) as stack, trio.open_nursery() as nursery:
        [listener] = await stack.open_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, refuse, [listener])
        done = await quick_command("check", "127.0.0.1", listener.socket.getsockname()[1])
        nursery.cancel_scope.cancel()
    assert (done.code, done.err) == (code, ""), done
    connect = rf"^connect    ok  127\.0\.0\.1:\d+ → {server}$"
    assert re.search(connect, done.out, re.MULTILINE), done.out


async def test_check_without_a_server() -> None:
    with trio.socket.socket() as sock:
        await sock.bind(("127.0.0.1", 0))
        done = await quick_command("check", "127.0.0.1", sock.getsockname()[1])
    assert done.code == 1
    assert "connection refused" in done.out
    assert "Errno" not in done.out
    assert "No connection was established.\n" in done.out


# --- reasons -------------------------------------------------------------------------------------


async def test_reasons_explains_every_reason() -> None:
    everything = (await quick_command("reasons", "--json")).json
    assert [each["reason"] for each in everything["reasons"]] == list(FallbackReason)
    assert [int(each["word"], 0) for each in everything["words"]] == list(Diagnosis)
    text = (await quick_command("reasons")).out
    for reason in FallbackReason:
        assert Fallback.local(reason).remedy in text
    one = (await quick_command("reasons", "0x03030000", "--json")).json
    assert (one["name"], one["reason"]) == ("no-device", "no-rnic")
    assert (await quick_command("reasons", "RNIC_DOWN", "--json")).json["reason"] == "rnic-down"


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["ss"], "no running process has a stack in "),
        (["lg", "--pid", "0"], "'0' is not a process number"),
        (["stats", "--pid", str((1 << 22) + 1)], "there is no process 4194305"),
        (["stats", "--interval", "nan"], "'nan' is not a number of seconds above 0"),
        (["top", "--count", "-1"], "'-1'"),
        (["check", "127.0.0.1", "70000"], "'70000' is not a TCP port"),
        (["check", "host.invalid", "1"], "'host.invalid' has no address: Name or service not"),
        (["check", "a..b", "1"], "'a..b' has no address: it is not a host name"),
        (["check", "::1", "1", "--directory", "/nowhere"], "/nowhere: no such directory"),
        (["lg", "--colour"], "trio-smc lg: unrecognized arguments: --colour"),
        (["capture", "1", "-o", "x", "--payload", "4097"], "not a number of bytes from 0 to 4096"),
        (["capture", "1" * 5000, "-o", "x"], "is not a process number from 1 to 2147483647"),
        (["ss", "--pid", "٣"], "is not a process number"),
        (["check", "::1", "1" * 5000], "is not a TCP port from 1 to 65535"),
        (["check", "::1", "1", "--timeout", "1e400"], "'1e400' is not a number of seconds"),
        (["check", "::1", "1", "--ueid", "x" * 5000], "ueids: 'xxx"),
        (["top", "--lines", "9" * 5000], "is not a whole number from 1 to 1000000000"),
        (["stats", "--interval=-inf"], "'-inf' is not a number of seconds"),
        (["proxy", "tcp:[::1]:" + "9" * 5000, "smc:[::1]:7"], "is not a TCP port from 0 to 65535"),
        (["proxy", "tcp:" + "h" * 5000 + ":1", "smc:[::1]:7"], "is neither smc:HOST:PORT"),
        (["ss", "--directory", ""], "directory: '' is not a path"),
        (["rnic", "--directory", "x" * 5000], "is not a path of 1 to 4095 bytes"),
        (["run", "--config", "/dev/zero", "--", "true"], "not a regular file"),
        (["capture", "1", "-o", "x", "--payload", "-1"], "'-1'"),
        (["ladder", "x", "--svg", "y", "--json"], "not allowed with argument"),
        (["proxy", "tcp:[::1]:0", "tcp:[::1]:7"], "one of LISTEN and TARGET must be smc:"),
        (["proxy", "tcp:[::1]:0", "smc:[::1]:0"], "TARGET needs a port"),
        (["check"], "the following arguments are required: HOST, PORT"),
        (["reasons", "because"], "unknown reason: because"),
        (["reasons", "0x1_0000_0000"], "is not a diagnosis word of 32 bits"),
        (["reasons", "0x12345678"], "unknown diagnosis word: 0x12345678"),
        (["ss", "--directory", "/tmp"], "/tmp "),
        (["frobnicate"], "'frobnicate'"),
        ([], "COMMAND"),
    ],
)
def test_bad_input_gives_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], error: str
) -> None:
    assert error in one_line(command_here(capsys, *arguments))


async def test_a_process_that_has_no_stack() -> None:
    assert "has no stack in" in one_line(await quick_command("ss", "--pid", os.getpid()))


async def test_a_stack_without_control_socket(runtime_directory: Path) -> None:
    async with running("off") as peer:
        assert not (runtime_directory / "trio-smc" / "control").exists()
        assert "Config(control=False)" in one_line(await quick_command("ss", "--pid", peer.pid))


async def test_a_process_whose_event_loop_is_blocked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trio_smc.tools.client.TIMEOUT", 0.5)
    async with running("blocked") as blocked:
        error = one_line(command_here(capsys, "ss", "--pid", str(blocked.pid)))
        assert "does not answer" in error
        async with running("server") as peer:
            # The blocked process does not delay the other, which may be slow on a busy machine.
            with trio.fail_after(LIMIT):
                while not json.loads((done := command_here(capsys, "ss", "--json")).out):
                    await trio.lowlevel.checkpoint()
            [answered] = json.loads(done.out)
            assert answered["pid"] == peer.pid
            assert done.code == 1
            assert f"process {blocked.pid} does not answer" in done.err


def sockets_below(directory: Path) -> set[str]:
    """The paths of all sockets below a directory."""
    return {str(path) for path in directory.rglob("*") if path.is_socket()}


async def test_commands_and_stacks_remove_names_of_killed_processes(
    runtime_directory: Path,
) -> None:
    control = runtime_directory / "trio-smc" / "control"
    async with running("server") as peer, running("server") as alive:
        before = sockets_below(runtime_directory)
        peer.process.send_signal(signal.SIGKILL)
        with trio.fail_after(LIMIT):
            await peer.process.wait()
        [stack] = (await quick_command("ss", "--json")).json
        assert stack["pid"] == alive.pid
        # The command also removes the sockets of the listener and the RNIC, of that process only.
        left = sockets_below(runtime_directory)
        assert {name for name in left if f"{peer.pid}-" in name} == set()
        assert {name for name in before if f"{alive.pid}-" in name} <= left
        assert len(left) == len(before) // 2
    async with running("idle") as peer:
        peer.process.send_signal(signal.SIGKILL)
        with trio.fail_after(LIMIT):
            await peer.process.wait()
    [name] = os.listdir(control)
    assert name.startswith(f"{peer.pid}-")
    assert "no running process has a stack" in one_line(await command("ss"))
    assert os.listdir(control) == []
    async with running("idle") as peer:
        peer.process.send_signal(signal.SIGKILL)
    async with trio_smc.open_stack():
        # A new stack removes them, too.
        assert all(name.startswith(f"{os.getpid()}-") for name in os.listdir(control))


# --- help ----------------------------------------------------------------------------------------


async def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    from trio_smc.tools.commands import load

    text = (await command("--help")).out
    for each in load():
        assert f"    {each.NAME} " in text
        assert " ".join(each.SUMMARY.split()[:3]) in text
        one = command_here(capsys, each.NAME, "--help")
        assert one.code == 0
        assert f"trio-smc {each.NAME}" in one.out
        assert "Exit codes" in one.out


def test_the_help_and_the_page_have_the_same_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    listed = command_here(capsys, "--help").out.partition("Exit codes of all commands:")[2]
    helped = {
        int(code): " ".join(text.split())
        for code, text in re.findall(r"^  (\d+) +(.+(?:\n {7}.+)*)", listed, re.MULTILINE)
    }
    page = (ROOT / "docs" / "cli.md").read_text().partition("## Exit codes")[2]
    page = page.partition("\n## ")[0]
    documented = {
        int(code): text.replace("`", "")
        for code, text in re.findall(r"^\| (\d+) \| (.+) \|$", page, re.MULTILINE)
    }
    assert helped == documented
    assert set(helped) == {0, 1, 2, 127, 130}


@pytest.mark.parametrize(
    "words",
    [
        ("run",), ("run", "--nope"), ("ss", "--port", "x"),
        ("ss", "--directory", "/nowhere"), ("capture", "1", "-o", "-"), ("ladder", "/nowhere"),
        ("proxy", "127.0.0.1:1", "127.0.0.1:2"), ("stats", "--since", "/nowhere"),
        ("check", "127.0.0.1", "0"), ("reasons", "nope"), ("report", "--pid", "2147483647"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_an_error_begins_with_the_command(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """argparse finds some errors, and the commands others; all have one form."""
    done = command_here(capsys, *words)
    assert done.code == 2
    [line] = done.err.splitlines()
    assert re.match(rf"trio-smc {words[0]}: (?!{words[0]}: )\S", line), line


def test_the_command_and_the_page_have_the_same_reasons_for_each_word(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (ROOT / "docs" / "reasons.md").read_text(encoding="utf-8")
    found = command_here(capsys, "reasons", "--json").json
    by_word: dict[str, list[str]] = {}
    for each in found["reasons"]:
        by_word.setdefault(each["word"], []).append(each["reason"])
    for each in found["words"]:
        assert each["reasons_with_it"] == by_word.get(each["word"], [])
        [row] = re.findall(rf"^\| `{each['word']}` \| .* \| (.*) \|$", page, re.MULTILINE)
        assert re.findall(r"\[`([\w-]+)`\]", row) == each["reasons_with_it"]
