"""Users that share a directory by their group, and processes in namespaces of their own."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import trio

from tests.timing import PATIENCE, SLOWER

SERVICE, CLIENT, OTHER_USER, GROUP = 64201, 64202, 64203, 64210

BOTH = """
    import encodings.idna, json, os, sys
    sys.path[:0] = {path!r}
    import trio, trio_smc
    from tests.e2e.bytes_by_position import Text

    settings = json.loads(sys.argv[1])
    if settings["user"]:
        os.setgroups(settings["groups"])
        os.setgid(settings["user"])
        os.setuid(settings["user"])
    config = trio_smc.Config(directory=settings["directory"])
    text = Text(1).piece(0, 3_000_000)

    async def server():
        async with trio_smc.open_stack(config) as stack:
            [listener] = await stack.open_listeners(0, host="127.0.0.1")
            print(listener.socket.getsockname()[1], os.getpid(), flush=True)
            async with listener, await listener.accept() as stream:
                got = b""
                while data := await stream.receive_some():
                    got += data
                assert got == text
                await stream.send_all(got)

    async def client():
        async with trio_smc.open_stack(config) as stack:
            async with await stack.open_stream("127.0.0.1", settings["port"]) as stream:
                await stream.send_all(text)
                await stream.send_eof()
                got = b""
                while data := await stream.receive_some():
                    got += data
                assert got == text
                reason = stream.fallback.reason if stream.fallback else ""
                print(stream.mode, reason, os.getpid())

    trio.run(client if "port" in settings else server)
"""


@pytest.fixture
def base() -> Iterator[Path]:
    """A directory that every user may pass through."""
    if os.geteuid():
        pytest.skip("takes root: to become other users, and to make namespaces")
    made = Path(tempfile.mkdtemp(prefix="smc-", dir="/tmp"))
    made.chmod(0o711)
    yield made
    shutil.rmtree(made)


def _settings(user: int, groups: Sequence[int], directory: Path, port: int = 0) -> str:
    listed = ", ".join(map(str, groups))
    end = f', "port": {port}' if port else ""
    return f'{{"user": {user}, "groups": [{listed}], "directory": "{directory}"{end}}}'


async def _outcome(
    server: tuple[int, Sequence[int], Path],
    client: tuple[int, Sequence[int], Path],
    inside: Sequence[Sequence[str]] = ((), ()),
) -> tuple[str, str]:
    """A client's report about its connection, and the process numbers of both, as they see them.

    Args:
      server, client: each one's user, groups and directory.
      inside: the command that runs each one's.
    """
    root = str(Path(__file__).parents[2])
    program = textwrap.dedent(BOTH).format(path=[root, *sys.path])
    command = [sys.executable, "-W", "error", "-c", program]
    # Namespaces have a /tmp of this one's, so they see what they need of this tree.
    environment = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    with trio.fail_after(4 * PATIENCE):
        process = await trio.lowlevel.open_process(
            [*inside[0], *command, _settings(*server)], env=environment, stdout=subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            port, number = (await process.stdout.receive_some()).split()
            done = await trio.run_process(
                [*inside[1], *command, _settings(*client, int(port))],
                env=environment,
                capture_stdout=True,
            )
            assert await process.wait() == 0
        finally:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()
            if process.stdout is not None:
                await process.stdout.aclose()
    outcome, _, theirs = done.stdout.decode().strip().rpartition(" ")
    return outcome.strip(), f"{int(number)} {theirs}"


def shared(base: Path, mode: int = 0o3770) -> Path:
    path = base / "shared"
    path.mkdir()
    os.chown(path, 0, GROUP)
    path.chmod(mode)
    return path


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("mode", "user", "groups", "expected"),
    [
        (0o3770, CLIENT, [GROUP], "smc-r"),
        (0o3770, GROUP, [], "smc-r"),  # GROUP is the primary group
        (0o3770, OTHER_USER, [], "tcp other-user"),
        (0o2770, CLIENT, [GROUP], "tcp other-user"),
    ],
)
async def test_users_of_one_group(
    base: Path, mode: int, user: int, groups: list[int], expected: str
) -> None:
    path = shared(base, mode)
    outcome, _ = await _outcome((SERVICE, [GROUP], path), (user, groups, path))
    assert outcome == expected
    left = [each for each in path.rglob("*") if not each.is_dir()]
    assert left == []


MEMBER = 64204
HOSTILE = """
    import contextlib, os, pathlib, socket, sys
    shared, victim = map(pathlib.Path, sys.argv[1:])
    namespace = str(os.stat("/proc/self/ns/net").st_ino)
    for kind in ("tcp", "control"):
        (shared / kind).symlink_to(victim)
        (shared / f"{kind}-1").symlink_to(victim)
        (shared / f"{kind}-2").touch()
        os.mkfifo(shared / f"{kind}-3")
        (shared / f"{kind}-4").mkdir()
        (shared / f"{kind}-4").chmod(0o3770)
        own = shared / f"{kind}-5"
        own.mkdir()
        own.chmod(0o2750)
        (own / namespace).symlink_to(victim)
        (own / "1").mkdir()
        (own / "1").chmod(0o2750)
        (own / "1" / "4-127.0.0.1-1").symlink_to(victim)
    for number in range(100):
        (shared / f".rnic-{number}").symlink_to(victim / "dead")
        (shared / f"rnic-{number}").symlink_to(victim / "dead")
"""
MEDDLE = """
    import os, pathlib, sys
    shared = pathlib.Path(sys.argv[1])
    done = 0
    for place, _, names in os.walk(shared):
        for name in names:
            path = pathlib.Path(place) / name
            if path.lstat().st_uid == os.getuid():
                continue
            for meddle in (
                path.unlink,
                lambda: path.rename(path.parent / "moved"),
                lambda: (path.parent / "new").symlink_to("/"),
            ):
                try:
                    meddle()
                    if path.parent != shared:
                        done += 1
                except OSError:
                    pass
    for path in shared.iterdir():
        if path.lstat().st_uid != os.getuid():
            try:
                path.rename(shared / "moved")
                done += 1
            except OSError:
                pass
    sys.exit(done)
"""


def as_member(program: str, *arguments: Path) -> int:
    """Run a program as another member of the group; its exit code."""
    command = ["setpriv", f"--reuid={MEMBER}", f"--regid={MEMBER}", f"--groups={GROUP}"]
    text = textwrap.dedent(program)
    done = subprocess.run(
        [*command, sys.executable, "-c", text, *map(str, arguments)],
        check=False, timeout=60 * SLOWER, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    return done.returncode


@pytest.mark.timeout(120)
async def test_names_made_by_a_member_lead_nowhere(base: Path) -> None:
    """Nothing outside is touched, and the others go on with SMC-R."""
    path, victim = shared(base), base / "victim"
    victim.mkdir()
    os.chown(victim, SERVICE, SERVICE)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(victim / "dead"))
    os.chown(victim / "dead", SERVICE, SERVICE)
    victim.chmod(0o755)
    assert as_member(HOSTILE, path, victim) == 0
    before = victim.stat().st_ctime_ns
    outcome, _ = await _outcome((SERVICE, [GROUP], path), (CLIENT, [GROUP], path))
    assert outcome == "smc-r"
    assert os.listdir(victim) == ["dead"]
    assert victim.stat().st_ctime_ns == before


@pytest.mark.timeout(120)
async def test_a_member_replaces_no_name_of_another(base: Path) -> None:
    """Neither in the directory nor below it, while a service runs that is another member's."""
    path = shared(base)
    program = textwrap.dedent(BOTH).format(path=[str(Path(__file__).parents[2]), *sys.path])
    process = await trio.lowlevel.open_process(
        [sys.executable, "-c", program, _settings(SERVICE, [GROUP], path)],
        stdout=subprocess.PIPE,
        env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"},
    )
    try:
        assert process.stdout is not None
        with trio.fail_after(2 * PATIENCE):
            assert await process.stdout.receive_some()
        sockets = sorted(each for each in path.rglob("*") if each.is_socket())
        assert {each.relative_to(path).parts[0].partition("-")[0] for each in sockets} == {
            "control", "rnic", "tcp",
        }  # fmt: skip
        assert as_member(MEDDLE, path) == 0
        assert sorted(each for each in path.rglob("*") if each.is_socket()) == sockets
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
        if process.stdout is not None:
            await process.stdout.aclose()


@pytest.mark.timeout(120)
async def test_a_member_without_the_directorys_rights_on_the_way_is_no_peer(base: Path) -> None:
    """A listener in another directory is not found."""
    path = shared(base)
    other = base / "other"
    other.mkdir()
    os.chown(other, CLIENT, CLIENT)
    other.chmod(0o700)
    outcome, _ = await _outcome((SERVICE, [GROUP], path), (CLIENT, [GROUP], other))
    assert outcome == "tcp peer-not-capable"


@pytest.mark.timeout(120)
async def test_namespaces_of_processes_mounts_and_users(base: Path) -> None:
    """As in a pod: both are process 1, and have the directory at paths of their own."""
    real = base / "real"
    real.mkdir(0o700)
    places = [base / "one", base / "two"]
    commands = []
    for place in places:
        place.mkdir()
        enter = f"mount --bind {shlex.quote(str(real))} {shlex.quote(str(place))}"
        commands.append(
            ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount", "--mount-proc",
             "sh", "-c", f'{enter} && exec "$0" "$@"']
        )  # fmt: skip
    able = await trio.run_process(
        [*commands[0], "true"], capture_stdout=True, capture_stderr=True, check=False
    )
    if able.returncode:
        pytest.skip(f"no namespaces here: {able.stderr.decode().strip()}")
    outcome, numbers = await _outcome((0, [], places[0]), (0, [], places[1]), commands)
    assert (outcome, numbers) == ("smc-r", "1 1")
