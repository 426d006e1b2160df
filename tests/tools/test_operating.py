"""Commands for operators: settings from the environment, `check --listen`, drains, bug reports."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

import trio_smc
from tests.timing import PATIENCE
from tests.tools.tools_processes import LIMIT, ROOT, command, one_line, quick_command, running
from trio_smc.control import protocol as control
from trio_smc.tools import cli, site

RUN = [sys.executable, "-m", "trio_smc.tools"]
SHOW = (
    "import trio, trio_smc\n"
    "async def main():\n"
    "    [each] = await trio_smc.open_listeners(0, host='127.0.0.1')\n"
    "    [stack] = trio_smc.stacks()\n"
    "    print(stack.config.private_directory(), stack.config.receive_buffer)\n"
    "trio.run(main)\n"
)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Name a private directory and a settings file in the environment."""
    directory, file = tmp_path / "smc", tmp_path / "smc.toml"
    directory.mkdir(mode=0o700)
    file.write_text("receive_buffer = 65536\n")
    monkeypatch.setenv("TRIO_SMC_DIRECTORY", str(directory))
    monkeypatch.setenv("TRIO_SMC_CONFIG", str(file))
    return directory


@contextlib.asynccontextmanager
async def started(*arguments: object) -> AsyncIterator[tuple[trio.Process, trio.abc.ReceiveStream]]:
    """Run a command until the end of the block, which sends SIGTERM.

    Yields the process and its standard output.
    """
    process = await trio.lowlevel.open_process(
        [*RUN, *map(str, arguments)], cwd=ROOT, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout
    finally:
        with trio.CancelScope(shield=True), trio.fail_after(LIMIT):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            await process.wait()
            await process.stdout.aclose()


async def read_until(stream: trio.abc.ReceiveStream, pattern: str) -> re.Match[str]:
    """Read until the output matches the pattern."""
    data = b""
    with trio.fail_after(LIMIT):
        while not (found := re.search(pattern, data.decode())):
            piece = await stream.receive_some()
            assert piece, data
            data += piece
    return found


# --- settings ------------------------------------------------------------------------------------


async def test_the_environment_reaches_every_command(settings: Path, tmp_path: Path) -> None:
    """Stacks, `run`, `proxy`, and the commands that query them use the same settings."""
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    async with running("server") as peer:
        assert [each["pid"] for each in (await quick_command("ss", "--json")).json] == [peer.pid]
        report = (await quick_command("check", "127.0.0.1", peer.details["port"], "--json")).json
        assert report["mode"] == "smc-r"
        origins = {each["name"]: (each["value"], each["origin"]) for each in report["settings"]}
        assert origins["directory"] == (str(settings), "TRIO_SMC_DIRECTORY")
        file = f"TRIO_SMC_CONFIG={tmp_path / 'smc.toml'}"
        assert origins["receive_buffer"] == (65536, file)
        assert origins["spin"] == (50e-6, "default")
        assert set(origins) == set(trio_smc.Config.__dataclass_fields__)
        named = await quick_command(
            "check",
            "127.0.0.1",
            peer.details["port"],
            "--directory",
            settings,
            "--discovery",
            "auto",
        )
        assert re.search(r"^discovery +auto +--discovery$", named.out, re.MULTILINE), named.out
        assert re.search(r"^directory +\S+ +--directory$", named.out, re.MULTILINE), named.out
        listen, target = "smc:127.0.0.1:0", f"tcp:127.0.0.1:{peer.details['port']}"
        (tmp_path / "own.toml").write_text("require_smc = true\n")
        own = ("--directory", other, "--config", tmp_path / "own.toml")
        async with started("proxy", listen, target, *own) as (process, lines):
            await read_until(lines, "listening on .* port")
            [found] = (await quick_command("report", "--directory", other, "--json")).json[2:3]
            assert found["file"] == "processes.json"
            [proxy] = (await quick_command("ss", "--json", "--directory", other)).json
            assert proxy["pid"] == process.pid
    program = tmp_path / "show.py"
    program.write_text(SHOW)
    for options, expected in (
        ((), f"{settings} 65536"),
        (("--directory", "other", "--config", "own.toml"), f"{other} None"),
    ):
        with trio.fail_after(2 * PATIENCE):
            done = await trio.run_process(
                [*RUN, "run", *options, "--", sys.executable, program], cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_stdout=True,
            )  # fmt: skip
        assert done.stdout.decode().strip() == expected


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize(
    "words", [("proxy", "smc:127.0.0.1:0", "tcp:127.0.0.1:9"), ("exporter", "--listen", "[::1]:0")]
)
async def test_a_signal_ends_a_server_without_an_error(words: tuple[str, ...], name: str) -> None:
    process = await trio.lowlevel.open_process(
        [*RUN, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    async with process.stdout, process.stderr:
        await read_until(process.stdout, "listening on|serving")
        process.send_signal(getattr(signal, name))
        with trio.fail_after(LIMIT):
            errors = b"".join([piece async for piece in process.stderr])
            assert await process.wait() == 0
    assert b"Traceback" not in errors, errors.decode()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError()])
def test_an_interrupt_inside_a_nursery_is_an_interrupt(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_: object) -> int:
        raise BaseExceptionGroup("in a nursery", [BaseExceptionGroup("", [error])])

    monkeypatch.setattr("trio_smc.tools.commands.reasons.run", run)
    if isinstance(error, KeyboardInterrupt):
        assert cli.main(["reasons"]) == 130
    else:
        with pytest.raises(BaseExceptionGroup):
            cli.main(["reasons"])


PROXY = "proxy", "smc:[::1]:0", "tcp:[::1]:1"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("ss",), "(TRIO_SMC_DIRECTORY)"),
        (("report",), "(TRIO_SMC_DIRECTORY)"),
        (("check", "::1", "1"), "(TRIO_SMC_DIRECTORY)"),
        (("lg", "--directory", "~/smc"), "directory: '~/smc' begins with ~, which only a shell"),
        (("run", "--directory", "~/smc", "--", "true"), "begins with ~, which only a shell"),
        ((*PROXY, "--directory", "~/smc"), "begins with ~, which only a shell"),
        (("run", "--directory", "/dev/null", "--", "true"), "/dev/null: Not a directory"),
        (("run", "--directory", "/dev/null/x", "--", "true"), "/dev/null/x: Not a directory"),
        ((*PROXY, "--directory", "/dev/null"), "/dev/null: Not a directory"),
        (("ss", "--directory", "/dev/null"), "/dev/null: not a directory"),
        (("ss", "--directory", "/proc/self/root/" + "d" * 300), "File name too long"),
        (("check", "::1"), "the following arguments are required: PORT"),
        (
            ("check", "::1", "7", "--listen", "7"),
            "--listen cannot be used with PORT: it has a port of its own",
        ),
        (("check", "::1", "7", "--count", "7"), "--count needs --listen"),
        (("drain",), "name one RNIC, or one link group"),
        (("drain", "soft0", "--group", "1", "--pid", "1"), "name one RNIC, or one link group"),
        (("undrain", "--group", "1"), "--group needs --pid"),
        (("run", "--config", "/nowhere", "--", "true"), "/nowhere: No such file"),
        ((*PROXY, "--config", "/nowhere"), "/nowhere: No such file"),
    ],
    ids=lambda value: " ".join(value)[:20] if isinstance(value, tuple) else "",
)
async def test_wrong_settings_give_one_line(
    words: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIO_SMC_DIRECTORY", "/nowhere/smc")
    try:
        done = await quick_command(*words)
    except SystemExit:
        done = await command(*words)
    assert expected in one_line(done)


# --- the test server -----------------------------------------------------------------------------


async def test_check_listen_reports_each_client(settings: Path) -> None:
    """The server reports each client with its mode, and continues after a client resets."""
    async with started("check", "--listen", "0", "127.0.0.1") as (process, lines):
        port = (await read_until(lines, r"listening on 127\.0\.0\.1:(\d+)\n"))[1]
        report = (await quick_command("check", "127.0.0.1", port, "--json")).json
        assert (report["mode"], report["server"]["pid"]) == ("smc-r", process.pid)
        await read_until(lines, r"127\.0\.0\.1:\d+  smc-r, version 1, single link group\n")
        for _ in range(2):
            plain = await trio.open_tcp_stream("127.0.0.1", int(port))
            await plain.send_all(b"\x1b[31m" * 100_000)
            plain.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            await plain.aclose()
        found = await read_until(lines, r"(?s)(tcp: .*\n.*){2}")
        assert "\x1b" not in found[0]
        assert "peer-not-capable, decided by this side" in found[0]
        assert "remedy: " in found[0]
    assert process.returncode == 0
    async with started("check", "--listen", "0", "--count", "1", "--json") as (process, lines):
        listening = json.loads((await read_until(lines, r"(?s)\{.*\n\}\n"))[0])
        port = listening["listening"][0][1]
        assert (await quick_command("check", "localhost", port)).code == 0
        assert '"mode": "smc-r"' in (await read_until(lines, r"(?s)\{.*\n\}\n"))[0]
        with trio.fail_after(LIMIT):
            assert await process.wait() == 0


# --- drains --------------------------------------------------------------------------------------


async def test_drains_through_the_control_socket() -> None:
    """`drain` reports the connections that still use an RNIC or a link group."""
    async with running("pair") as peer, running("server") as server:
        # The connections have no other RNIC, so they stay on this one.
        done = await quick_command("drain", "soft0", "--pid", peer.pid, "--timeout", "0.3")
        assert (done.code, done.err) == (1, "")
        line = "soft0 takes no new connections; open ones that still use it: 2"
        assert done.out == f"process {peer.pid}: {line}\n"
        [stack] = (await quick_command("rnic", "--pid", peer.pid, "--json")).json["stacks"]
        assert [each["drained"] for each in stack["rnics"]] == [True]
        check = await quick_command("check", "127.0.0.1", peer.details["port"], "--timeout", "5")
        assert "rnic-down, decided by the server" in check.out
        # Drain in all processes; one of them has no connections.
        done = await quick_command("drain", "soft0", "--timeout", "0.3", "--json")
        assert done.code == 1
        found = {each["pid"]: each for each in json.loads(done.out)}
        assert (found[peer.pid]["done"], found[peer.pid]["connections"]) == (False, 2)
        assert (found[server.pid]["done"], found[server.pid]["connections"]) == (True, 0)
        assert (await quick_command("undrain", "soft0", "--json")).code == 0
        # Drain a link group of the server side.
        [stack] = (await quick_command("lg", "--pid", peer.pid, "--json")).json
        number = {each["role"]: each["number"] for each in stack["link_groups"]}["server"]
        group = ("--group", number, "--pid", peer.pid)
        done = await quick_command("drain", *group, "--timeout", "0.3")
        assert done.code == 1
        assert "open ones that still use it: 1" in done.out
        assert "SINGLE, drained" in (await quick_command("lg", "--pid", peer.pid)).out
        assert (await quick_command("undrain", *group)).code == 0
        assert "drained" not in (await quick_command("lg", "--pid", peer.pid)).out
        for words, line in (
            (("drain", "nope"), "no process has an RNIC nope"),
            (("undrain", "nope", "--pid", peer.pid), f"process {peer.pid} has no RNIC nope"),
            (("drain", "--group", 99, "--pid", peer.pid), f"{peer.pid} has no link group 99"),
        ):
            assert line in one_line(await quick_command(*words))


@pytest.mark.parametrize("role", ["server", "client"])
async def test_a_drained_link_group(role: str) -> None:
    """The open connection continues, no new one uses the group, and the group ends with it."""
    config = trio_smc.Config(receive_buffer=16384, shutdown_timeout=2)
    async with trio_smc.open_stack(config) as one, trio_smc.open_stack(config) as two:
        [listener] = await one.open_listeners(0, host="127.0.0.1")
        address = listener.socket.getsockname()
        first = await two.open_stream(*address)
        other = await listener.accept()
        stack = one if role == "server" else two
        [group] = stack.link_groups
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stack.drain_link_group, group)
            await trio.testing.wait_all_tasks_blocked()
            assert group.drained
            second = await two.open_stream(*address)
            accepted = await listener.accept()
            if role == "server":
                assert second.mode == "smc-r"
                assert second.link_group != first.link_group
            else:
                assert second.fallback is not None
                assert second.fallback.reason == trio_smc.FallbackReason.RNIC_DOWN
            for stream, peer in ((first, other), (second, accepted)):
                await stream.send_all(b"x" * 1000)
                assert await peer.receive_some(1000) == b"x" * 1000
            assert group.state == "SINGLE"
            for each in (first, other, second, accepted):
                await each.aclose()
            # The end of the nursery block waits for the drain.
        assert group.state == "GONE"
        with pytest.raises(ValueError, match="the stack has no link group"):
            stack.undrain_link_group(group)
        third = await two.open_stream(*address)
        await (await listener.accept()).aclose()
        assert third.mode == "smc-r"
        await third.aclose()


@pytest.mark.parametrize(
    "request_",
    [
        {}, {"rnic": 7}, {"rnic": ["soft0"]}, {"rnic": "soft0", "link_group": 1},
        {"link_group": "1"}, {"link_group": True}, {"link_group": 1.5}, {"link_group": None},
    ],
    ids=str,
)  # fmt: skip
async def test_requests_that_drain_nothing(request_: dict[str, Any]) -> None:
    """The stack answers with an error, and drains nothing."""
    async with trio_smc.open_stack() as stack:
        root = stack.config.private_directory() / control.DIRECTORY
        [name] = os.listdir(root)
        for want in control.DRAINS:
            with trio.fail_after(LIMIT):
                async with await trio.open_unix_socket(str(root / name)) as sock:
                    await sock.send_all(control.encode({"want": [want], **request_}))
                    answer = b"".join([piece async for piece in sock])
            assert b"a drain names one RNIC or one link group" in answer
        assert not stack.runtime.rnic_set.is_drained(stack.rnics[0])


# --- reports -------------------------------------------------------------------------------------


async def test_a_report_explains_and_has_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_PASSWORD", "hunter2-environment")
    monkeypatch.setenv("TRIO_SMC_WORDS", "socket")  # another variant than that of the command
    file = tmp_path / "report.tar.gz"
    async with running("pair") as peer:
        listed = await quick_command("report")
        assert not file.exists()
        done = await quick_command("report", "-o", file)
        assert (done.code, done.err) == (0, "")
        assert listed.out.splitlines()[0].split() == ["FILE", "SIZE", "CONTENT"]
        assert done.out.splitlines()[-1] == f"written: {file}"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with tarfile.open(file) as tar:
        names = [os.path.basename(each.name) for each in tar.getmembers()]
        texts = {
            os.path.basename(each.name): tar.extractfile(each).read()  # type: ignore[union-attr]
            for each in tar.getmembers()
        }
    assert [line.split()[0] for line in done.out.splitlines()[1:-1]] == names
    found = {name: json.load(io.BytesIO(text)) for name, text in texts.items()}
    assert found["versions.json"]["trio_smc"] == trio_smc.__version__
    assert found["versions.json"]["software_rnic"] == trio_smc.SoftRnic.variant
    [process] = found["processes.json"]
    assert process["pid"] == peer.pid
    assert len(process["connections"]) == 3
    assert [(each["name"], each["variant"]) for each in process["rnics"]] == [("soft0", "socket")]
    assert {"name": "receive_buffer", "value": "16384"} in process["settings"]
    [events] = found["events.json"]
    changes = {(each["subject"], each["new"]) for each in events["events"]}
    assert {("link", "ACTIVE"), ("link_group", "SINGLE"), ("connection", "tcp")} <= changes
    assert found["reasons.json"]["peer-not-capable"]["count"] == 1
    assert found["kernel.json"]["release"] == os.uname().release
    assert found["directory.json"]["mode"] == "0700"
    everything = b"".join(texts.values())
    for secret in (b"hunter2", b"tools_peer", b"DATABASE"):  # of a variable, and of a command line
        assert secret not in everything
    assert "cannot write" in (await quick_command("report", "-o", "/nowhere/x")).err


# --- programs with another release ---------------------------------------------------------------


@pytest.mark.parametrize("knows", [True, False])
def test_run_with_a_release_that_has_no_load_settings(
    knows: bool, settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Python of the program may have an older trio_smc."""
    source = (ROOT / "trio_smc" / "tools" / "site" / "sitecustomize.py").read_text()
    [function] = re.findall(r"^def _settings\(.*?\n(?=\n\n)", source, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"os": os, "Any": Any}
    exec(function, names)
    package: Any = trio_smc
    if not knows:
        package = SimpleNamespace(load_config=trio_smc.load_config, Config=trio_smc.Config)
    config = names["_settings"](package)
    assert Path(config.directory) == settings
    assert config.receive_buffer == 65536
    monkeypatch.delenv("TRIO_SMC_CONFIG")
    monkeypatch.delenv("TRIO_SMC_DIRECTORY")
    assert names["_settings"](package) == trio_smc.Config()


def test_the_hook_repeats_the_list_of_enable() -> None:
    program = (
        "import sitecustomize as hook, trio; from trio_smc.sockets import enable; "
        "print(hook.run_starters(trio) == list(enable.RUNS), len(enable.RUNS))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(site.__file__).parent)}
    environment.pop("TRIO_SMC_RUN", None)
    command = [sys.executable, "-c", program]
    assert subprocess.check_output(command, env=environment, text=True) == "True 3\n"


async def test_a_missing_directory_above_is_named_and_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`check` and `rnic` print the same cause."""
    runtime = tmp_path / "mistyped"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    cause = f"{runtime}/trio-smc cannot be made: there is no directory {runtime}"
    done = await quick_command("rnic")
    assert f"No software RNIC: the private directory {cause}.\n" in done.out
    with socket.create_server(("127.0.0.1", 0)) as server:
        done = await quick_command("check", "127.0.0.1", server.getsockname()[1])
    assert done.code == 1
    assert f"no software RNIC: the private directory {cause}\n" in done.out
    assert "  reason     directory-unusable, decided by this side\n" in done.out
    assert f"  directory  {cause}\n  remedy     give it a parent directory" in done.out
    assert not runtime.exists()


@pytest.mark.parametrize("options", [(), ("--interface", "lo")])
async def test_rnic_does_not_make_the_private_directory(
    runtime_directory: Path, options: tuple[str, ...]
) -> None:
    done = await quick_command("rnic", *options)
    assert (done.code, done.err) == (0, "")
    assert "soft0" in done.out
    assert os.listdir(runtime_directory) == []
