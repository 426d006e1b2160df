"""Root inspects processes of other users without changing them; groups share a directory."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import trio

import trio_smc
from tests.tools.tools_processes import (
    LIMIT,
    ROOT,
    Done,
    command_here,
    one_line,
    quick_command,
)
from trio_smc import FallbackReason
from trio_smc.control import protocol as control
from trio_smc.tools import client, inspection
from trio_smc.tools.cli import main
from trio_smc.tools.places import groups_of_processes, identity_of

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="inspects another user")
USER = 54321
"""A user without an entry in the user database and without processes."""
GROUP = 54323
"""A group that no user database lists."""
UNREACHABLE = 54322
"""Another user, whose process names a directory that the user may not enter."""
PEER = """
import os, sys, warnings
import encodings.idna, trio  # before: USER may be unable to import
from tests.tools import tools_peer
user, *groups = [int(each) for each in sys.argv[1:]]
os.setgroups(groups); os.setgid(user); os.setuid(user)
warnings.simplefilter("ignore", ResourceWarning)
trio.run(tools_peer.main, "pair")
"""


@pytest.fixture
def theirs() -> Iterator[Path]:
    """A private directory of the other user, below directories that any user may enter."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="smc-theirs-") as outer:
        os.chmod(outer, 0o755)
        directory = Path(outer, "smc")
        directory.mkdir(mode=0o700)
        os.chown(directory, USER, USER)
        yield directory


@contextlib.asynccontextmanager
async def running_as_other(directory: Path, *groups: int, user: int = USER) -> AsyncIterator[int]:
    """Run a process of a user with an SMC-R and a TCP connection. Yields its number.

    groups: its supplementary groups.
    """
    process = await trio.lowlevel.open_process(
        [sys.executable, "-c", PEER, str(user), *map(str, groups)],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={"PATH": os.environ["PATH"], "TRIO_SMC_DIRECTORY": str(directory)},
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with trio.fail_after(LIMIT):
            output = b""
            while b"\n" not in output:
                piece = await process.stdout.receive_some()
                assert piece, "the process ended before it was ready"
                output += piece
        yield process.pid
    finally:
        with trio.CancelScope(shield=True), trio.fail_after(LIMIT):
            await process.stdin.aclose()
            await process.wait()
            await process.stdout.aclose()


@root_only
async def test_root_inspects_a_user_and_changes_nothing(theirs: Path, tmp_path: Path) -> None:
    async with running_as_other(theirs) as pid:
        below = theirs / control.DIRECTORY
        dead = below / f"{pid + 1}-0"
        with socket.socket(socket.AF_UNIX) as sock:  # as if its process had been killed
            sock.bind(str(dead))
        os.chown(dead, USER, USER)
        before = sorted(os.listdir(below))
        # The command finds the directory in the environment of the process, or gets its name.
        words: tuple[object, ...]
        for words in (
            ("--user", USER), ("--all",), ("--user", USER, "--directory", theirs),
        ):  # fmt: skip
            done = await quick_command("ss", "--json", *words)
            # --all finds every process of this machine; directories of other users may fail.
            assert done.code == 0 or words == ("--all",), done.err
            assert f"user {USER}:" not in done.err
            found = json.loads(done.out)
            [stack] = [each for each in found if each["pid"] == pid]
            assert (stack["uid"], stack["user"]) == (USER, str(USER))
            assert len(stack["connections"]) == 3
        user = ("--user", USER, "--directory", theirs)
        rnics = (await quick_command("rnic", "--json", *user)).json
        assert rnics.keys() == {"stacks"}
        assert [each["name"] for each in rnics["stacks"][0]["rnics"]] == ["soft0"]
        assert (await quick_command("stats", "--json", *user)).json[0]["counters"]["fallbacks"] == 1
        report = tmp_path / "report.tar.gz"
        assert (await quick_command("report", "-o", report, *user)).code == 0
        assert sorted(os.listdir(below)) == before
        # Commands that change the process do not have --user.
        for words in (("drain", "soft0"), ("undrain", "soft0"), ("capture", pid, "-o", "-")):
            done = run_here(*words, "--user", USER)
            assert "unrecognized arguments: --user" in one_line(done)
        assert "cannot be used with --user: only the user of a process" in one_line(
            await quick_command("stats", "--sizes", "1", *user)
        )
        output = one_line(await quick_command("ss", "--pid", pid))
        assert output.endswith(f"and only that user may query it (as root: --user {USER})")
        # Without --user, root counts as another user.
        output = one_line(await quick_command("ss", "--directory", theirs))
        assert "belongs to user" in output
        assert output.endswith(f"(as root: --user {USER} --directory {theirs})")
        # A remedy names only options that the command has.
        for words in (
            ("drain", "soft0", "--pid", pid), ("undrain", "soft0", "--pid", pid),
            ("drain", "soft0", "--directory", theirs), ("capture", pid, "-o", "-"),
            ("capture", pid, "-o", "-", "--directory", theirs),
        ):  # fmt: skip
            output = one_line(run_here(*words))
            assert output.endswith(f" (run this command as user {USER})"), output
            assert "--user" not in output
        dead.unlink()
        assert (os.geteuid(), os.getegid()) == (0, 0)


@root_only
async def test_root_inspects_a_process_with_a_group_of_its_own(theirs: Path) -> None:
    """A service manager gives a process groups that the user database does not list."""
    os.chown(theirs, 0, GROUP)
    os.chmod(theirs, 0o3770)
    async with running_as_other(theirs, GROUP) as pid:
        for words in (("--user", USER, "--directory", theirs), ("--user", USER), ("--all",)):
            done = await quick_command("ss", "--json", *words)
            assert pid in [each["pid"] for each in json.loads(done.out)], done.err
            assert f"user {USER}:" not in done.err
        # A member of the group without a process of its own.
        groups = os.getgroups()
        os.setgroups([*groups, GROUP])
        try:
            done = await quick_command("ss", "--directory", theirs)
        finally:
            os.setgroups(groups)
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        f"trio-smc ss: no running process of user root has a stack in {theirs}, which a group "
        "shares; a process answers only its own user\n"
    )


@root_only
async def test_root_inspects_its_own_process_with_a_group_of_its_own(theirs: Path) -> None:
    os.chown(theirs, USER, GROUP)
    os.chmod(theirs, 0o3770)
    async with running_as_other(theirs, GROUP, user=0) as pid:
        for words in (("--user", "root", "--directory", theirs), ("--user", "root"), ("--all",)):
            done = await quick_command("ss", "--json", *words)
            assert done.out, done.err
            assert pid in [each["pid"] for each in json.loads(done.out)], done.err
            assert f"user root: {theirs}" not in done.err


@root_only
def test_root_needs_no_right_to_set_the_groups_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A user namespace may refuse setgroups(2), also to its root."""

    def refuse(groups: list[int]) -> None:
        raise PermissionError

    monkeypatch.setattr("os.setgroups", refuse)
    with identity_of(0, [os.getegid(), *os.getgroups()]):
        pass
    with pytest.raises(PermissionError), identity_of(0, [GROUP]):
        pytest.fail("root has the group without setgroups(2)")


@root_only
async def test_groups_of_processes_are_read_once_for_all_users(
    theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--all` reads each process once, and not once for each user."""
    calls: list[dict[int, set[int]]] = []

    def counted() -> dict[int, set[int]]:
        calls.append(groups_of_processes())
        return calls[-1]

    monkeypatch.setattr(client, "groups_of_processes", counted)
    async with running_as_other(theirs, GROUP), running_as_other(theirs):
        done = await quick_command("ss", "--json", "--all")
    assert {each["user"] for each in json.loads(done.out)} >= {str(USER)}
    [found] = calls
    assert GROUP in found[USER]
    assert 0 in found


@root_only
async def test_all_names_a_user_whose_directory_fails(theirs: Path, tmp_path: Path) -> None:
    """The command names that user, exits with 1, and prints the processes of the others."""
    hidden = tmp_path / "below a directory of root" / "trio-smc"
    async with running_as_other(theirs) as pid:
        process = await trio.lowlevel.open_process(
            ["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            env={"TRIO_SMC_DIRECTORY": str(hidden)}, user=UNREACHABLE, group=UNREACHABLE,
            extra_groups=[],
        )  # fmt: skip
        assert process.stdin is not None
        try:
            done = await quick_command("ss", "--json", "--all")
        finally:
            with trio.CancelScope(shield=True), trio.fail_after(LIMIT):
                await process.stdin.aclose()
                await process.wait()
    assert done.code == 1
    assert f"user {UNREACHABLE}: {hidden}: Permission denied" in done.err
    assert f"user {USER}:" not in done.err
    assert [each["user"] for each in json.loads(done.out) if each["pid"] == pid] == [str(USER)]


@root_only
async def test_a_process_answers_no_other_user(theirs: Path) -> None:
    """The process gets the sender's user from the kernel, whatever the request is."""
    async with running_as_other(theirs) as pid:
        below = theirs / control.DIRECTORY
        [name] = [each for each in os.listdir(below) if each.startswith(f"{pid}-")]
        for part in (*control.DRAINS, control.CAPTURE, control.SIZES, *control.PARTS):
            request = {"want": [part], "rnic": "soft0", "seconds": 1}
            with trio.fail_after(LIMIT):
                async with await trio.open_unix_socket(str(below / name)) as stream:
                    with contextlib.suppress(trio.BrokenResourceError):
                        await stream.send_all(control.encode(request))
                        assert await stream.receive_some() == b"", part
        user = ("--user", USER, "--directory", theirs)
        [stack] = (await quick_command("rnic", "--json", *user)).json["stacks"]
        assert [each["drained"] for each in stack["rnics"]] == [False]


@root_only
def test_hostile_directories_of_users(
    theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The errors name links, owners and modes; a helper process that does not answer is killed."""

    def inspect(directory: Path) -> Done:
        return run_here("ss", "--user", USER, "--directory", directory)

    secret = tmp_path / "secret"
    secret.mkdir(mode=0o700)
    link = theirs.parent / "link"
    link.symlink_to(secret)
    assert "Not a directory" in inspect(link).err
    loop = theirs.parent / "loop"
    loop.symlink_to(loop)
    assert inspect(loop).code == 2
    assert "Permission denied" in inspect(secret).err  # root could enter it, the user cannot
    os.chmod(theirs, 0o777)
    assert "where only 700 is private" in inspect(theirs).err
    os.chmod(theirs, 0o700)
    # A control socket that is named after process 1 and never answers.
    below = theirs / control.DIRECTORY
    below.mkdir(mode=0o700)
    os.chown(below, USER, USER)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(below / "1-0"))
        os.chown(below / "1-0", USER, USER)
        listener.listen()
        done = inspect(theirs)
        assert done.code == 2
        # SO_PEERCRED reports that the socket is root's, whichever user owns the file.
        assert "process 1 cannot be queried" in done.err
    (below / "1-0").unlink()

    def start_endless_child(message: dict[str, Any]) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
        assert message["uid"] == USER
        return subprocess.Popen(["sleep", "600"]), tempfile.TemporaryFile()

    monkeypatch.setattr(client, "start_child", start_endless_child)
    monkeypatch.setattr(client, "TIMEOUT", 0.2)
    monkeypatch.setattr(client, "CHILD_START", 0)
    start = time.monotonic()
    done = inspect(theirs)
    assert time.monotonic() - start < 10
    assert (done.code, done.err) == (
        1, f"trio-smc ss: user {USER}: a directory does not answer in time\n",
    )  # fmt: skip


def run_here(*words: object) -> Done:
    """Run `trio-smc` in this thread."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        try:
            code = main(list(map(str, words)))
        except SystemExit as exit_:  # how argparse ends
            code = int(exit_.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (("--user", "root"), "only root may inspect the processes of another user"),
        (("--all",), "only root may inspect the processes of another user"),
        (("--user", "no such user"), "there is no user 'no such user'"),
        (("--user", "9" * 11), "there is no user '99999999999'"),
        (("--user=-1",), "there is no user '-1'"),
    ],
)
def test_only_root_may_name_a_user(
    words: tuple[str, ...], output: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("os.geteuid", lambda: 1234)
    assert output in one_line(command_here(capsys, "ss", *words))


# --- directories that a group shares ------------------------------------------------------------


@root_only
@pytest.mark.parametrize(
    ("group", "mode", "output"),
    [
        (0, 0o2770, "shared; it is for the group root: chmod 3770 "),
        (0, 0o2750, "has mode 2750 where only 700 is private, and only 3770 is shared; it is"),
        (0, 0o3777, "shared; it is for the group root: chmod 3770 "),
        (USER, 0o2750, f"is for the group {USER}, and this process is not in that group: add"),
        (0, 0o770, "has mode 0770 where only 700 is private, and only 3770 is shared; it is"),
        (USER, 0o3770, f"is for the group {USER}, and this process is not in that group: add"),
    ],
)
async def test_directories_that_a_group_cannot_share_yet(
    group: int, mode: int, output: str, tmp_path: Path
) -> None:
    """The message names the group, and its remedy keeps the directory shared."""
    shared = tmp_path / "shared"
    shared.mkdir()
    os.chown(shared, 0, group)
    os.chmod(shared, mode)
    line = one_line(await quick_command("ss", "--directory", shared))
    assert output in line
    assert "chmod 700" not in line
    # Root need not be in the group to inspect it.
    more = f"; as root: --user NAME --directory {shared}, or --all"
    assert line.rstrip().endswith(more) == ((group, mode) == (USER, 0o3770))
    assert "--all" not in one_line(await quick_command("drain", "soft0", "--directory", shared))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = await quick_command("check", "127.0.0.1", port, "--directory", shared)
        report = json.loads(
            (await quick_command("check", "127.0.0.1", port, "--directory", shared, "--json")).out
        )
    assert report["fallback"]["reason"] in (
        FallbackReason.DIRECTORY_UNUSABLE, FallbackReason.OTHER_USER,
        FallbackReason.PEER_NOT_CAPABLE,
    ), report  # fmt: skip
    assert output in report["directory"]
    assert f"  directory  {report['directory']}\n" in done.out
    assert stat.S_IMODE(shared.stat().st_mode) == mode


def test_the_general_remedy_keeps_a_shared_directory() -> None:
    why = trio_smc.Fallback.local(FallbackReason.DIRECTORY_UNUSABLE)
    assert "or 3770 if a group shares it" in why.remedy


def test_the_child_prints_its_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`inspection.main` runs here, for this user: one directory is missing, one is a file."""
    (tmp_path / "file").write_text("")
    request = {
        "uid": os.geteuid(), "groups": [],
        "directories": [str(tmp_path / "none"), str(tmp_path / "file")], "want": [],
        "pid": None, "request": "", "silent_before": [], "seconds": 0,
    }  # fmt: skip
    (tmp_path / "request").write_text(json.dumps(request))
    for name in ("TRIO_SMC_DIRECTORY", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, "/roots/own")  # the child deletes it
    descriptor = os.open(tmp_path / "request", os.O_RDONLY)
    monkeypatch.setattr("os.dup", lambda number: descriptor)
    with pytest.raises(SystemExit, match="0"):
        inspection.main()
    found = json.loads(capsys.readouterr().out)
    assert (found["found"], found["problems"], found["timed_out"]) == ([], [], False)
    assert "Not a directory" in found["errors"][0]
    assert "XDG_RUNTIME_DIR" not in os.environ


def test_a_directory_that_fails_is_no_process(capsys: pytest.CaptureFixture[str]) -> None:
    """A user and a process may have the same number: both problems are named, each once."""
    silent = client.SilentProcesses()
    problems: dict[int | client.UserDirectory, str] = {
        client.UserDirectory(7, 0): "user 7: a directory cannot be inspected",
        client.UserDirectory(7, 1): "user 7: another one",
        7: "process 7 does not answer",
    }
    for _ in range(2):
        silent.replace(dict(problems))
    assert capsys.readouterr().err.splitlines() == [
        f"trio-smc: {text}" for text in problems.values()
    ]
    assert silent.exit_code == client.INCOMPLETE
