"""Network namespaces joined by bridges and routers, like those of containers, for one test.

A namespace lives as long as the process that holds it, so nothing is left of one when a test ends
or is killed.  Programs run in namespaces of processes, mounts and users of their own as well: as
the root of one without any other user, or as an ordinary user of a `UserNamespace`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import trio

from tests.timing import PATIENCE

_ROOT = Path(__file__).parents[2]


class Network:
    """A network namespace, with its loopback interface up."""

    def __init__(self) -> None:
        command = [
            "unshare",
            "--net",
            "sh",
            "-c",
            "ip link set lo up && echo up && exec sleep 1000",
        ]
        self._holder = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        self._told = self._holder.stdout
        assert self._told.readline() == b"up\n"
        self.path = f"/proc/{self._holder.pid}/ns/net"

    @property
    def pid(self) -> int:
        """A process in it."""
        return self._holder.pid

    def run(self, *lines: str) -> str:
        """Run commands inside; returns the output of the last one."""
        output = ""
        for line in lines:
            done = subprocess.run(
                [*self.enter(), *shlex.split(line)],
                capture_output=True, text=True, check=False, timeout=2 * PATIENCE,
            )  # fmt: skip
            assert done.returncode == 0, f"{line}: {done.stderr}"
            output = done.stdout
        return output

    def enter(self) -> list[str]:
        """The command that runs another one inside."""
        return ["nsenter", f"--net={self.path}", "--"]

    def close(self) -> None:
        """Let go of it."""
        self._holder.kill()
        self._holder.wait()
        self._told.close()


class UserNamespace:
    """A user namespace with numbers of its own for a user and some groups of the host.

    Args:
      user: the host's number of the user, which is `USER` inside.
      groups: the host's numbers of groups that it is in, by the numbers inside.
      unknown: others that it is in, for which there is no number inside.
    """

    USER = 1000

    def __init__(self, user: int, groups: dict[int, int], *, unknown: Sequence[int] = ()) -> None:
        self.groups, self.unknown = groups, unknown
        self._holder = subprocess.Popen(
            ["unshare", "--user", "sh", "-c", "echo up && exec sleep 1000"], stdout=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        self._told = self._holder.stdout
        assert self._told.readline() == b"up\n"
        here = Path(f"/proc/{self._holder.pid}")
        (here / "uid_map").write_text(f"{self.USER} {user} 1\n")
        known = {self.USER: user, **groups}
        (here / "gid_map").write_text("".join(f"{a} {b} 1\n" for a, b in known.items()))
        self.descriptor = os.open(here / "ns" / "user", os.O_RDONLY)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)
        self._holder.kill()
        self._holder.wait()
        self._told.close()


class Networks:
    """The network namespaces of one test."""

    def __init__(self) -> None:
        self._made: list[Network] = []
        self._links = 0

    def new(self) -> Network:
        """A new namespace, without any link."""
        made = Network()
        self._made.append(made)
        return made

    def bridge(self, *ends: tuple[Network, str]) -> Network:
        """Join namespaces by a bridge in one of its own; each has an address with a mask there."""
        bridge = self.new()
        bridge.run("ip link add br0 type bridge", "ip link set br0 up")
        for network, address in ends:
            name = self.link((network, address), (bridge, None))
            bridge.run(f"ip link set {name} master br0")
        return bridge

    def link(self, one: tuple[Network, str | None], other: tuple[Network, str | None]) -> str:
        """Join two by a veth pair, with these addresses; returns the second interface."""
        self._links += 1
        names = f"a{self._links}", f"b{self._links}"
        one[0].run(f"ip link add {names[0]} type veth peer name {names[1]} netns {other[0].pid}")
        for (network, address), name in zip((one, other), names, strict=True):
            if address is not None:
                more = "nodad" if ":" in address else ""
                network.run(f"ip addr add {address} dev {name} {more}")
            network.run(f"ip link set {name} up")
        return names[1]

    def close(self) -> None:
        """Let go of all."""
        for each in self._made:
            each.close()


def unable() -> str:
    """The reason why namespaces cannot be made here; "" if they can."""
    if os.geteuid():
        return "takes root: to join network namespaces"
    for command in (
        ["unshare", "--net", "ip", "link", "add", "br0", "type", "bridge"],
        [
            "unshare",
            "--user",
            "--map-root-user",
            "--pid",
            "--fork",
            "--mount",
            "--mount-proc",
            "true",
        ],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"the kernel refuses namespaces: {done.stderr.strip()}"
    return ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A client's report about a connection.

    Attributes:
      mode: "smc-r" or "tcp".
      reason: of the latter.
      greeting: the name of the server.
      pid: the client's process number, as it sees it.
      user: its user's number, likewise.
      seconds: what connecting took.
    """

    mode: str
    reason: str
    greeting: str
    pid: int
    user: int
    seconds: float

    @property
    def what(self) -> tuple[str, str, str]:
        """Mode, reason, and the name of the server."""
        return self.mode, self.reason, self.greeting


class Containers:
    """Programs in networks that share a directory; each has it at another path.

    Args:
      base: a directory of the test's own.
      group: whose members share the directory; None: its mode is 0700.
    """

    def __init__(self, base: Path, group: int | None = None) -> None:
        self._base = base
        self.directory = base / "shared"
        self.directory.mkdir(0o700)
        if group is not None:
            os.chown(self.directory, 0, group)
            self.directory.chmod(0o3770)
        self._count = 0

    def command(
        self, network: Network, settings: dict[str, Any], users: UserNamespace | None = None
    ) -> list[str]:
        """The command that runs a program there, as process 1 in its own namespaces.

        ``users``: that of users; None: a new one, of which it is root.
        """
        self._count += 1
        place = self._base / f"place-{self._count}"
        place.mkdir()
        mounted = f"mount --bind {shlex.quote(str(self.directory))} {shlex.quote(str(place))}"
        program = [sys.executable, "-W", "error", "-m", "tests.e2e.container"]
        if users is not None:
            settings["user"] = users.USER
            settings["groups"], settings["unknown"] = list(users.groups), users.unknown
            settings["namespace"] = users.descriptor
        return [
            *network.enter(),
            "unshare", *(["--user", "--map-root-user"] if users is None else []),
            "--pid", "--fork", "--kill-child", "--mount", "--mount-proc",
            "sh", "-c", f'{mounted} && exec "$0" "$@"', *program,
            json.dumps({"directory": str(place), **settings}),
        ]  # fmt: skip

    @contextlib.asynccontextmanager
    async def server(
        self, network: Network, greeting: str, host: str = "0.0.0.0", port: int = 0,
        users: UserNamespace | None = None, **more: Any,
    ) -> AsyncIterator[int]:  # fmt: skip
        """Run a server there that sends its name; yield its port."""
        settings = {"greeting": greeting, "host": host, "port": port, **more}
        process = await trio.lowlevel.open_process(
            self.command(network, settings, users),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=_ROOT,
            pass_fds=_descriptors(users),
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with trio.fail_after(2 * PATIENCE):
                output = b""
                while not output.endswith(b"\n"):
                    output += await process.stdout.receive_some() or b"nothing\n"
            port, pid = map(int, output.split())
            assert pid == 1
            yield port
            with trio.fail_after(2 * PATIENCE):
                await process.stdin.aclose()
                assert await process.wait() == 0
        finally:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()
                await process.stdin.aclose()
                await process.stdout.aclose()

    async def connect(
        self, network: Network, *there: tuple[str, int], users: UserNamespace | None = None,
        **more: Any,
    ) -> list[Outcome]:  # fmt: skip
        """Connect a client there to these addresses, one after the other; return its reports."""
        with trio.fail_after(2 * PATIENCE):
            done = await trio.run_process(
                self.command(network, {"to": there, **more}, users),
                capture_stdout=True,
                cwd=_ROOT,
                pass_fds=_descriptors(users),
            )
        return [Outcome(**each) for each in json.loads(done.stdout)]


def _descriptors(users: UserNamespace | None) -> list[int]:
    return [] if users is None else [users.descriptor]
