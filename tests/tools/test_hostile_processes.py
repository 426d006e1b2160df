"""Processes with misleading entries in /proc: `trio-smc check` executes none of the files that they
name, and waits for none of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.ports import reserved_port
from tests.timing import PATIENCE
from trio_smc import Config
from trio_smc.tools.proc import Process
from trio_smc.tools.processes import Obstacle, explain_container, explain_listener, process_tree
from trio_smc.tools.sock_diag import Listener, candidates
from trio_smc.tools.trusted_files import TrustedFiles, UntrustedPathError

own_directory = Config().private_directory
QUICK = 10.0
"""Upper bound in seconds for a check that waits for no other process, on a busy machine."""
OTHER_USER = 65534
PYTHON: str = getattr(sys, "_base_executable", sys.executable)
"""The Python executable outside of any virtual environment."""
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")

LISTEN = """
import os, socket, sys
family, host, port, only, user = sys.argv[1:]
sock = socket.socket(getattr(socket, family))
for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
    sock.setsockopt(socket.SOL_SOCKET, option, 1)
if family == "AF_INET6":
    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(only))
if user.startswith("before:"):
    os.setuid(int(user[7:]))
sock.bind((host, int(port)))
sock.listen()
if user.startswith("after:"):
    os.setuid(int(user[6:]))
print(sock.getsockname()[1], flush=True)
held = []
while True:
    held.append(sock.accept()[0])
    held[-1].send(str(os.getpid()).encode())
"""


@dataclass
class Started:
    """A process, and the number that it has printed, usually its port."""

    popen: subprocess.Popen[str]
    port: int

    @property
    def pid(self) -> int:
        """The process number."""
        return self.popen.pid


@contextlib.contextmanager
def process(command: Sequence[str], **options: Any) -> Iterator[Started]:
    """Run a process until it has printed a number; kill the process after the block."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options) as popen:
        try:
            assert popen.stdout is not None
            yield Started(popen, int(popen.stdout.readline()))
        finally:
            popen.kill()


def listener(
    family: str, host: str, port: int = 0, *, v6_only: bool = False, user: str = "",
    before: tuple[str, ...] = (), called: str | None = None, **options: Any,
) -> contextlib.AbstractContextManager[Started]:  # fmt: skip
    """Run a process that listens and keeps each accepted connection open."""
    arguments = [family, host, str(port), str(int(v6_only)), user]
    command = [*before, called or sys.executable, "-c", LISTEN, *arguments]
    if called is not None and not before:
        options["executable"] = PYTHON
    return process(command, **options)


def explain(host: str, port: int, client: tuple[str, int] | None = None) -> Obstacle:
    """Return the obstacle; assert that the search took less than `QUICK`."""
    start = time.monotonic()
    found = explain_listener(host, port, own_directory(), client)
    assert time.monotonic() - start < QUICK
    return found


def place_trap(place: Path) -> tuple[str, Path]:
    """Make an executable python3 that creates a file when it runs. Returns both paths."""
    place.mkdir(exist_ok=True)
    mark, python = place / "executed", place / "python3"
    python.write_text(f"#!/bin/sh\n: > {mark}\necho False\n")
    python.chmod(0o755)
    return str(python), mark


# --- nothing is executed -----------------------------------------------------------------------


def test_a_process_of_this_user_names_a_file(tmp_path: Path) -> None:
    python, mark = place_trap(tmp_path / "bin")
    hostile = {**os.environ, "PATH": str(tmp_path / "bin"), "PYTHONPATH": str(tmp_path)}
    for called in (python, "python3", "./python3"):
        with (
            reserved_port() as port,
            listener("AF_INET", "127.0.0.1", port, called=called, env=hostile, cwd=tmp_path / "bin")
            as started,
        ):  # fmt: skip
            found = explain("127.0.0.1", port)
        assert found.pid == started.pid
        assert not mark.exists()


@root_only
def test_another_user_names_a_file_beside_our_port(tmp_path: Path) -> None:
    python, mark = place_trap(tmp_path / "bin")
    with (
        reserved_port() as port,
        listener("AF_INET6", "::", port, v6_only=True, user=f"before:{OTHER_USER}", called=python),
        listener("AF_INET", "127.0.0.1", port) as ours,
    ):
        found = explain("127.0.0.1", port)
        assert (found.pid, found.uid) == (ours.pid, 0)
        found = explain("::1", port)
        assert (found.pid, found.uid) == (None, OTHER_USER)
    assert not mark.exists()


CHECK = """
import os, sys
started = []
def audit(event, arguments):
    if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork"):
        if arguments[0] != "/sbin/ldconfig":  # `ctypes.util` runs it to find a library
            started.append((event, arguments))
    elif event == "open" and "HOSTILE" in str(arguments[0]):
        checked = os.O_PATH | os.O_NOFOLLOW
        if arguments[2] & checked != checked:
            started.append((event, arguments))
sys.addaudithook(audit)
from trio_smc.tools.cli import main
code = main(["check", "127.0.0.1", sys.argv[1]])
assert code == 1, code
print("started:", started)
"""


def test_check_starts_no_process_and_opens_no_path_by_name(tmp_path: Path) -> None:
    """An audit hook records each started process and each opened path."""
    hostile = tmp_path / "HOSTILE"
    python, _ = place_trap(hostile)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", hostile / "venv"], check=True)
    environment = {**os.environ, "PYTHONPATH": str(hostile), "PATH": str(hostile)}
    for called in (python, str(hostile / "venv" / "bin" / "python")):
        with (
            reserved_port() as port,
            listener("AF_INET", "127.0.0.1", port, called=called, env=environment),
        ):
            done = subprocess.run(
                [sys.executable, "-c", CHECK, str(port)],
                capture_output=True, text=True, timeout=2 * PATIENCE, check=True,
            )  # fmt: skip
        assert done.stdout.endswith("started: []\n"), done.stdout
        assert "listener   process" in done.stdout


# --- the files of a Python -------------------------------------------------------------------


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A virtual environment without packages; no test runs its Python."""
    place = tmp_path / "venv"
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (place / "lib" / name / "site-packages").mkdir(parents=True)
    (place / "bin").mkdir()
    (place / "bin" / "python").symlink_to(PYTHON)
    (place / "pyvenv.cfg").write_text("home = /nowhere\ninclude-system-site-packages = false\n")
    return place


def site_of(venv: Path) -> Path:
    [site] = venv.glob("lib/*/site-packages")
    return site


def run_in(venv: Path, change: Callable[[], object] = lambda: None) -> Obstacle:
    """Return the obstacle of a process whose command line names this environment's Python.

    Args:
      change: called while the process runs, to change the environment.
    """
    called = str(venv / "bin" / "python")
    environment = {"PATH": os.environ["PATH"], "HOME": str(venv)}
    with (
        reserved_port() as port,
        listener("AF_INET", "127.0.0.1", port, called=called, env=environment, cwd=venv),
    ):
        change()
        return explain("127.0.0.1", port)


def test_a_python_without_the_package(venv: Path) -> None:
    assert run_in(venv).text.endswith(f" runs {venv}/bin/python, which has no trio_smc")


@pytest.mark.parametrize("kind", ["package", "metadata", "link", "system"])
def test_a_python_with_the_package(venv: Path, kind: str) -> None:
    site = site_of(venv)
    if kind == "package":
        (site / "trio_smc").mkdir()
        (site / "trio_smc" / "__init__.py").touch()
    elif kind == "metadata":
        (site / "trio_smc-1.0.dist-info").mkdir()
    elif kind == "link":
        source = venv / "checkout" / "trio_smc"
        source.mkdir(parents=True)
        (source / "__init__.py").touch()
        (site / "editable.pth").write_text(f"import os\n# {venv}\n{venv}/checkout\n")
    else:
        (venv / "pyvenv.cfg").write_text("include-system-site-packages = TRUE\n")
        found = venv / ".local" / "lib" / site.parent.name / "site-packages" / "trio_smc"
        found.mkdir(parents=True)
        (found / "__init__.py").touch()
    assert run_in(venv).text.endswith("is a Python program without a stack of trio_smc")


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_huge_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def make_writable_by_others(path: Path) -> None:
    path.touch()
    path.chmod(0o666)


@pytest.mark.parametrize(
    "make", [make_fifo, make_huge_file, link_to_device, link_to_itself, make_writable_by_others]
)
@pytest.mark.parametrize("name", ["pyvenv.cfg", "site-packages/evil.pth"])
def test_a_file_that_must_not_be_read(venv: Path, name: str, make: Callable[[Path], None]) -> None:
    path = site_of(venv).parent / name if "/" in name else venv / name

    def change() -> None:
        path.unlink(missing_ok=True)
        make(path)

    text = run_in(venv, change).text
    path.unlink()
    assert "; it is unknown if its Python has trio_smc: " in text
    assert path.name in text


@pytest.mark.parametrize("make", [make_fifo, link_to_device, link_to_itself])
def test_site_packages_that_are_no_directory(venv: Path, make: Callable[[Path], None]) -> None:
    site = site_of(venv)

    def change() -> None:
        site.rmdir()
        make(site)

    text = run_in(venv, change).text
    site.unlink()
    assert text.startswith("process ")


def test_a_directory_with_too_many_names(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trio_smc.tools.interpreters.MAX_NAMES", 50)
    for number in range(51):
        (site_of(venv) / f"package{number}").mkdir()
    assert "has more than 50 names" in run_in(venv).text


def test_a_directory_that_others_can_change(venv: Path) -> None:
    site_of(venv).chmod(0o777)
    assert "other users can write to a directory of" in run_in(venv).text


@root_only
@pytest.mark.parametrize("what", ["link", "directory", "file"])
def test_names_that_another_user_placed(venv: Path, what: str) -> None:
    site = site_of(venv)
    (site / "trio_smc").mkdir()
    (site / "trio_smc" / "__init__.py").touch()
    if what == "link":
        site.rename(site.with_name("elsewhere"))
        site.symlink_to("elsewhere")
        os.lchown(site, OTHER_USER, OTHER_USER)
    elif what == "directory":
        os.chown(site, OTHER_USER, OTHER_USER)
    else:
        os.chown(site / "trio_smc" / "__init__.py", OTHER_USER, OTHER_USER)
    assert "belongs to user 65534" in run_in(venv).text


@contextlib.contextmanager
def silent_fuse(place: Path) -> Iterator[None]:
    """Mount a FUSE file system that never answers a request, not even `stat`."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        pytest.skip("no FUSE here")
    try:
        settings = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
        if libc.mount(b"fuse", os.fsencode(place), b"fuse", 0, settings):
            pytest.skip("no FUSE here")
        try:
            yield
        finally:
            libc.umount2(os.fsencode(place), 2)  # MNT_DETACH
    finally:
        os.close(device)  # ends all waiting requests


@root_only
@pytest.mark.parametrize("where", ["python", "path", "site", "home"])
def test_a_file_system_that_never_answers(tmp_path: Path, venv: Path, where: str) -> None:
    fuse = tmp_path / "fuse"
    fuse.mkdir()
    called = str(fuse / "python" if where == "python" else venv / "bin" / "python")
    environment = {"PATH": os.environ["PATH"], "HOME": str(venv)}
    if where == "python":
        Path(called).symlink_to(PYTHON)
    elif where == "path":
        environment["PYTHONPATH"] = f"{fuse}/x{os.pathsep}{fuse}"
    elif where == "site":
        (site_of(venv) / "evil.pth").write_text(f"{fuse}\n")
    else:
        (venv / "pyvenv.cfg").unlink()
        environment["HOME"] = str(fuse)
    with (
        reserved_port() as port,
        listener("AF_INET", "127.0.0.1", port, called=called, env=environment, cwd=venv),
        silent_fuse(fuse),
    ):
        found = explain("127.0.0.1", port)
    assert "is not on a local file system" in found.text


@root_only
def test_a_private_directory_that_never_answers(tmp_path: Path, venv: Path) -> None:
    fuse = tmp_path / "fuse"
    fuse.mkdir()
    (site_of(venv) / "trio_smc-1.0.dist-info").mkdir()
    environment = {"HOME": str(venv), "TRIO_SMC_DIRECTORY": f"{fuse}/smc"}
    called = str(venv / "bin" / "python")
    with (
        reserved_port() as port,
        listener("AF_INET", "127.0.0.1", port, called=called, env=environment, cwd=venv),
        silent_fuse(fuse),
    ):
        start = time.monotonic()
        found = explain("127.0.0.1", port)
        assert time.monotonic() - start < QUICK
    assert found.text.endswith("is a Python program without a stack of trio_smc")


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("relative", "is not an absolute path"),
        ("/proc/self/status", "is not on a local file system"),
        ("/dev/zero", "is not on a local file system"),
        ("/" + "x/" * 3000, "is not an absolute path"),
        ("/\0", "is not an absolute path"),
    ],
)
def test_untrusted_paths_are_refused(path: str, why: str) -> None:
    with pytest.raises(UntrustedPathError, match=why):
        TrustedFiles(QUICK).is_file(path)


def test_the_walk_follows_names_as_the_kernel_does(tmp_path: Path) -> None:
    files = TrustedFiles(QUICK)
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "file").write_text("text")
    (tmp_path / "a" / "up").symlink_to("../file")
    (tmp_path / "away").symlink_to(tmp_path / "a")
    for path in ("file", "a/b/../../file", "a/up", "away/up", "away/../file", "./a//up"):
        assert files.read(f"{tmp_path}/{path}", 4) == b"text"
    for path in ("a", "nothing", "file/below", "a/nothing/../up"):
        assert not files.is_file(f"{tmp_path}/{path}")
    assert files.exists(f"{tmp_path}/away")
    with pytest.raises(UntrustedPathError, match="larger than 3 bytes"):
        files.read(str(tmp_path / "file"), 3)
    with pytest.raises(UntrustedPathError, match="took too long"):
        TrustedFiles(-1).is_file(str(tmp_path))


def test_links_cost_no_descriptors(tmp_path: Path) -> None:
    """The walk keeps few descriptors: each link here leads through a deep directory and back."""
    deep = "/".join(["d"] * 100)
    (tmp_path / deep).mkdir(parents=True)
    (tmp_path / "0").touch()
    back = "/".join([".."] * 100)
    for number in range(1, 31):
        (tmp_path / str(number)).symlink_to(f"{deep}/{back}/{number - 1}")
    assert TrustedFiles(QUICK).is_file(f"{tmp_path}/20") is True
    with pytest.raises(UntrustedPathError, match="has too many components"):
        TrustedFiles(QUICK).is_file(f"{tmp_path}/30")
    (tmp_path / deep / deep).mkdir(parents=True)
    with pytest.raises(UntrustedPathError, match="has too many components"):
        TrustedFiles(QUICK).is_file(f"{tmp_path}/{deep}/{deep}")


def test_a_lease_does_not_delay_a_read(tmp_path: Path) -> None:
    """An `open` that breaks a lease waits for the other process, up to 45 seconds."""
    path = tmp_path / "file"
    path.touch()
    lease = (
        "import fcntl, signal, sys, time\n"
        "signal.signal(signal.SIGIO, signal.SIG_IGN)\n"
        "file = open(sys.argv[1], 'r+')\n"
        "fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)\n"
        "print(1, flush=True)\n"
        "time.sleep(60)\n"
    )
    start = time.monotonic()
    with process([sys.executable, "-c", lease, str(path)]):
        with pytest.raises(UntrustedPathError, match="cannot be read"):
            TrustedFiles(QUICK).read(str(path), 10)
        assert time.monotonic() - start < QUICK


# --- finding the socket and its process ----------------------------------------------------------


def wildcard_listener(
    inode: str, *, is_ipv6: bool, v6_only: bool | None = False, interface: int = 0
) -> Listener:
    address = "::" if is_ipv6 else "0.0.0.0"
    return Listener(address, 7, is_ipv6, v6_only, interface, 0, inode)


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1", "b"), ("127.0.0.2", "a"), ("::1", "c"), ("::2", "c")],
)
def test_a_socket_of_the_address_comes_first(address: str, expected: str) -> None:
    sockets = [
        wildcard_listener("a", is_ipv6=False),
        Listener("127.0.0.1", 7, False, False, 0, 0, "b"),
        wildcard_listener("c", is_ipv6=True),
        Listener("127.0.0.1", 8, False, False, 0, 0, "d"),
        wildcard_listener("e", is_ipv6=False, interface=7),
    ]
    assert [each.inode for each in candidates(sockets, address, 7)] == [expected]


@pytest.mark.parametrize(("v6_only", "expected"), [(False, 1), (None, 1), (True, 0)])
def test_a_socket_of_both_families(v6_only: bool | None, expected: int) -> None:
    sockets = [wildcard_listener("a", is_ipv6=True, v6_only=v6_only)]
    assert len(candidates(sockets, "127.0.0.1", 7)) == expected
    assert len(candidates(sockets, "::1", 7)) == 1


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (("AF_INET6", "::", True), ("AF_INET", "0.0.0.0")),
        (("AF_INET6", "::", False), ("AF_INET", "127.0.0.1")),
        (("AF_INET", "0.0.0.0", False), ("AF_INET", "127.0.0.1")),
        (("AF_INET", "127.0.0.2", False), ("AF_INET", "127.0.0.1")),
        (("AF_INET", "127.0.0.2", False), ("AF_INET6", "::ffff:127.0.0.1")),
    ],
)
def test_the_process_that_the_kernel_chooses(
    theirs: tuple[str, str, bool], ours: tuple[str, str]
) -> None:
    """`check` finds the same process as a real connection does."""
    with (
        reserved_port() as port,
        listener(theirs[0], theirs[1], port, v6_only=theirs[2]),
        listener(*ours, port) as expected,
    ):
        with socket.create_connection(("127.0.0.1", port), PATIENCE) as client:
            assert int(client.recv(20)) == expected.pid
        found = explain("127.0.0.1", port)
    assert found.pid == expected.pid
    assert "shares the listener" not in found.text


@root_only
def test_a_port_that_processes_of_two_users_share() -> None:
    with (
        reserved_port() as port,
        listener("AF_INET", "0.0.0.0", port) as ours,
        listener("AF_INET", "0.0.0.0", port, user=f"after:{OTHER_USER}") as theirs,
    ):
        found = explain("127.0.0.1", port)
        first, second = sorted([(ours.pid, 0), (theirs.pid, OTHER_USER)])
        assert found.text == (
            "2 processes of several users hold the listener: "
            f"{first[0]} of user {first[1]}, {second[0]} of user {second[1]}"
        )
        assert (found.pid, found.uid) == (None, OTHER_USER)
        accepted: set[int] = set()
        while accepted != {ours.pid, theirs.pid}:
            with socket.create_connection(("127.0.0.1", port), PATIENCE) as client:
                pid = int(client.recv(20))
                accepted.add(pid)
                found = explain("127.0.0.1", port, client.getsockname())
                assert found.uid == (0 if pid == ours.pid else OTHER_USER)
                assert found.pid == (ours.pid if pid == ours.pid else None)


def test_a_port_that_processes_of_this_user_share() -> None:
    with (
        reserved_port() as port,
        listener("AF_INET", "0.0.0.0", port) as one,
        listener("AF_INET", "0.0.0.0", port) as other,
    ):
        found = explain("127.0.0.1", port)
    first, second = sorted([one.pid, other.pid])
    assert found.pid == first
    assert found.text.endswith(f"; it shares the listener with process {second}")


@root_only
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_process_is_judged_by_its_own_user(when: str) -> None:
    """A socket keeps the user that created it, although its process may change its user."""
    with (
        reserved_port() as port,
        listener("AF_INET", "127.0.0.1", port, user=f"{when}:{OTHER_USER}"),
    ):
        found = explain("127.0.0.1", port)
    assert found.text == "the listener belongs to user 65534, this process to 0"
    assert (found.pid, found.uid) == (None, OTHER_USER)


def test_a_process_in_another_user_namespace(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-U", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces here")
    python, mark = place_trap(tmp_path / "bin")
    hostile = ("unshare", "-U", "bash", "-c", 'exec -a "$0" "$@"', python)
    with (
        reserved_port() as port,
        listener("AF_INET", "127.0.0.1", port, before=hostile) as started,
    ):
        found = explain("127.0.0.1", port)
    assert found.pid == started.pid
    assert "is in another user namespace" in found.text
    assert not mark.exists()


def test_a_process_in_another_mount_namespace(tmp_path: Path) -> None:
    """In another mount namespace the same path may be another file."""
    command = ("unshare", "-rm")
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces here")
    if os.geteuid() == 0:
        command = ("unshare", "-m")
    with reserved_port() as port, listener("AF_INET", "127.0.0.1", port, before=command) as started:
        found = explain("127.0.0.1", port)
    assert found.pid == started.pid
    ending = "another user namespace" if "-rm" in command else "a file system of its own"
    assert ending in found.text


BOUND = """
import json, os, socket, subprocess, sys
from trio_smc import Config
from trio_smc.tools.processes import explain_listener

def bound(interface, user):
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
    sock.bind(("", 7000))
    sock.listen()
    ready, wait = os.pipe()
    if not os.fork():
        if user:
            os.setuid(user)
        os.close(ready)
        os.close(wait)
        while True:
            sock.accept()[0].send(str(os.getpid()).encode())
    sock.close()
    os.close(wait)
    os.read(ready, 1)

for command in ("link set lo up", "link add one type veth peer name two", "link set two up",
                "addr add 192.0.2.9/24 dev one", "link set one up"):
    subprocess.run(["ip", *command.split()], check=True)
bound("one", int(sys.argv[1]))
bound("lo", 0)
for host in ("192.0.2.9", "127.0.0.1"):
    with socket.create_connection((host, 7000)) as client:
        pid = client.recv(20).decode()
        found = explain_listener(host, 7000, Config().private_directory, client.getsockname())
    print(json.dumps([pid, str(found.pid), found.text]))
"""


@root_only
@pytest.mark.parametrize("user", [0, OTHER_USER])
def test_sockets_that_are_bound_to_interfaces(user: int) -> None:
    """A connection within the host arrives on the interface that has the address."""
    alone = ["unshare", "-n", "--kill-child", "-pf", "--mount-proc"]
    make = [*alone, "ip", "link", "add", "one", "type", "veth", "peer", "name", "two"]
    try:
        if subprocess.run(make, capture_output=True, check=False).returncode:
            pytest.skip("no interface can be made here")
    except FileNotFoundError:
        pytest.skip("no unshare here")
    command = [*alone, sys.executable, "-c", BOUND, str(user)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=2 * PATIENCE)
    (first, judged, text), (second, own, _) = map(json.loads, done.stdout.splitlines())
    assert own == second
    if user:
        assert text == f"the listener belongs to user {user}, this process to 0"
    else:
        assert judged == first


ANOTHER_NETWORK = """
import socket, sys, os
ipv6 = socket.socket(socket.AF_INET6)
ipv6.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
ipv6.bind(("::", 7000))
ipv6.listen()
ready, wait = os.pipe()
if os.fork():
    ipv6.close()
    os.setuid(int(sys.argv[1]))
    ipv4 = socket.create_server(("0.0.0.0", 7000))
    print(os.getpid(), flush=True)
    os.close(wait)
input()
"""


@root_only
def test_an_ipv6_listener_in_another_network_namespace() -> None:
    """For an IPv4 address `check` finds the other user's IPv4 listener on the same port."""
    try:
        made = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
        if subprocess.run([*made, "true"], capture_output=True, check=False).returncode:
            pytest.skip("no network namespaces here")
    except FileNotFoundError:
        pytest.skip("no unshare here")
    command = [*made, sys.executable, "-c", ANOTHER_NETWORK, str(OTHER_USER)]
    with process(command, stdin=subprocess.PIPE) as started:
        ipv4 = explain_container("127.0.0.1", 7000, own_directory())
        ipv6 = explain_container("::1", 7000, own_directory())
    assert ipv4 is not None
    assert ipv6 is not None
    assert (ipv4.pid, ipv4.uid) == (started.port, OTHER_USER)
    assert ipv6.pid != started.port
    assert "without a stack of trio_smc" in ipv6.text


# --- names ---------------------------------------------------------------------------------------


def test_a_path_that_looks_like_the_socket_of_another_process(tmp_path: Path) -> None:
    """A path of a Unix socket may contain a line feed, which /proc/net/unix does not escape."""
    with (
        reserved_port() as port,
        listener("AF_INET", "127.0.0.1", port) as started,
        socket.socket(socket.AF_UNIX) as forged,
    ):
        with Process(started.pid) as seen:
            inode = next(iter(seen.sockets()))
        where = os.open(tmp_path, os.O_PATH)
        try:
            path = f"a\n0: 0 0 0 0001 01 {inode} {started.pid}-abcd"
            forged.bind(f"/proc/self/fd/{where}/{path}")
        finally:
            os.close(where)
        forged.listen()
        with Process(started.pid) as seen:
            assert (inode, f"{started.pid}-abcd") in seen.unix_streams()
        found = explain("127.0.0.1", port)
        (tmp_path / path).unlink()
    assert "without a stack of trio_smc" in found.text


def test_control_characters_in_a_name(tmp_path: Path) -> None:
    program = tmp_path / "server\x1b[2J\nremedy     run it as root"
    shutil.copy(PYTHON, program)
    environment = {**os.environ, "PYTHONHOME": sys.base_prefix}
    arguments = ["-c", LISTEN, "AF_INET", "127.0.0.1"]
    with (
        reserved_port() as port,
        process([str(program), *arguments, str(port), "0", ""], env=environment),
    ):
        found = explain("127.0.0.1", port)
    assert found.text.isprintable()
    assert found.text.endswith(
        "server\\x1b[2J\\nremedy     run it as root, is not a Python program"
    )


RENAMED = """
import ctypes, sys
ctypes.CDLL(None).prctl(15, sys.argv.pop(1).encode(), 0, 0, 0)  # PR_SET_NAME
"""


@pytest.mark.parametrize("name", ["a\rUid:\t0 0", "a\rUid:\tx", "a\rNSpid:\tx", "a\nUid:\t7"])
def test_a_name_that_looks_like_another_field(name: str) -> None:
    """In /proc/PID/status the name of a process precedes its user IDs."""
    program = f"{RENAMED}\nprint(1, flush=True); input()"
    with (
        process([sys.executable, "-c", program, name], stdin=subprocess.PIPE) as started,
        Process(started.pid) as seen,
    ):
        assert name[:2].encode() in Path(f"/proc/{started.pid}/comm").read_bytes()
        assert seen.users() == (os.getuid(),) * 4
        assert seen.numbers()[0] == started.pid


@root_only
def test_a_process_that_claims_this_user_by_its_name() -> None:
    arguments = ["AF_INET", "127.0.0.1"]
    with (
        reserved_port() as port,
        process(
            [sys.executable, "-c", RENAMED + LISTEN, "a\rUid:\t0 0", *arguments, str(port), "0",
             f"before:{OTHER_USER}"]
        ),
    ):  # fmt: skip
        found = explain("127.0.0.1", port)
    assert found.text == f"the listener belongs to user {OTHER_USER}, this process to 0"


def test_a_reused_process_number_is_another_process() -> None:
    """An open /proc/PID directory belongs to the ended process even if its number is reused."""
    program = "print(1, flush=True); input()"
    with process([sys.executable, "-c", program], stdin=subprocess.PIPE) as started:
        seen = Process(started.pid)
        assert seen.link("exe")
        started.popen.kill()
        started.popen.wait(2 * PATIENCE)
    with seen:
        assert (seen.link("exe"), seen.users(), seen.command()) == ("", (), [])
        assert (seen.environment(), seen.sockets(), list(seen.mapped())) == ({}, set(), [])


def test_a_deep_process_tree_is_not_searched_recursively() -> None:
    """A recursive search would raise RecursionError here."""
    deep = 60
    program = (
        "import os, sys, time\n"
        "for _ in range(int(sys.argv[1])):\n"
        "    if os.fork():\n"
        "        time.sleep(60)\n"
        "        os._exit(0)\n"
        "print(1, flush=True)\n"
        "time.sleep(60)\n"
    )
    with process([sys.executable, "-c", program, str(deep)], start_new_session=True) as started:
        limit = sys.getrecursionlimit()
        depth = len(_stack_frames())
        sys.setrecursionlimit(depth + deep // 2)
        try:
            found = list(process_tree(started.pid))
        finally:
            sys.setrecursionlimit(limit)
            os.killpg(started.pid, signal.SIGKILL)
    assert len(found) == deep + 1


def _stack_frames() -> list[object]:
    import inspect

    return list(inspect.stack(0))
