"""Same-host discovery: who knows when, and that both ends always know the same."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from trio_smc._base.errors import ProtocolError
from trio_smc._base.reasons import FallbackReason
from trio_smc.rendezvous import _channels, _local_directory, _local_protocol, _publication
from trio_smc.rendezvous._local_protocol import Kind
from trio_smc.rendezvous.discovery import Announcement, Claim, Discovery, Publication

WORKER = Path(__file__).with_name("discovery_worker.py")
LONG = 10.0  # a deadline that is not meant to pass, seconds
SHORT = 0.05  # one that is


@pytest.fixture
def private(runtime_directory: Path) -> Path:
    """A private directory that does not exist yet."""
    return runtime_directory / "trio-smc"


@pytest.fixture(autouse=True)
def all_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Discovery]]:
    """Every Discovery of a test is closed at its end, as that of a stack is."""
    made: list[Discovery] = []
    create = Discovery.__init__

    def note(self: Discovery, private: Path) -> None:
        create(self, private)
        made.append(self)

    monkeypatch.setattr(Discovery, "__init__", note)
    yield made
    for each in made:
        each._channels.abandon()


def soon(seconds: float = LONG) -> float:
    return trio.current_time() + seconds


class Server:
    """A listening TCP socket and its publication."""

    def __init__(self, listening: trio.socket.SocketType, publication: Publication) -> None:
        self.listening = listening
        self.publication = publication
        self.address: tuple[str, int] = listening.getsockname()[:2]

    async def accept(self) -> tuple[trio.socket.SocketType, Claim | None]:
        connection, _ = await self.listening.accept()
        local, remote = connection.getsockname()[:2], connection.getpeername()[:2]
        return connection, self.publication.claim(local, remote)


@contextlib.asynccontextmanager
async def serving(
    private: Path, address: str = "127.0.0.1", *, port: int = 0, dual_stack: bool = False
) -> AsyncIterator[Server]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with trio.socket.socket(family) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not dual_stack)
        await listening.bind((address, port))
        listening.listen(1000)
        async with trio.open_nursery() as nursery:
            publication = Discovery(private).publish(
                listening.getsockname()[:2], nursery, dual_stack=dual_stack
            )
            yield Server(listening, publication)
            publication.close()


@contextlib.asynccontextmanager
async def bound(address: str = "127.0.0.1") -> AsyncIterator[trio.socket.SocketType]:
    """A client's TCP socket, bound and not connected."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with trio.socket.socket(family) as client:
        await client.bind((address, 0))
        yield client


async def announce(
    asking: Path | Discovery, client: trio.socket.SocketType, destination: tuple[str, int]
) -> Announcement:
    if isinstance(asking, Path):
        asking = Discovery(asking)
    source: tuple[str, int] = client.getsockname()[:2]
    outcome = await asking.announce(source, destination, soon(), client)
    assert isinstance(outcome, Announcement)
    return outcome


async def agree(asking: Path | Discovery, server: Server, destination: tuple[str, int]) -> None:
    """Open one TCP connection and see both ends start SMC-R on it."""
    async with bound("::1" if ":" in destination[0] else "127.0.0.1") as client:
        announcement = await announce(asking, client, destination)
        await client.connect(destination)
        connection, claim = await server.accept()
        with connection:
            assert claim is not None
            await both_go(Both(client, announcement, connection, claim))


class Both(NamedTuple):
    """The two ends of a TCP connection that was announced and accepted."""

    client: trio.socket.SocketType
    announcement: Announcement
    connection: trio.socket.SocketType
    claim: Claim

    async def client_says(self, patience: float = LONG) -> FallbackReason | None:
        """What the client knows; it sends CLC, or as an application."""
        reason = await self.announcement.accepted(soon(patience))
        await self.client.send(b"C" if reason is None else b"A")
        return reason

    async def server_says(self, patience: float = LONG) -> bool:
        """What the server knows; the client must have sent what goes with it."""
        agreed = await self.claim.confirm(self.connection, soon(patience))
        assert await self.connection.recv(1) == (b"C" if agreed else b"A")
        return agreed


async def both_go(both: Both) -> None:
    answers: list[object] = []

    async def ask_server() -> None:
        answers.append(await both.server_says())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask_server)
        assert await both.client_says() is None
    assert answers == [True]


def sockets_below(private: Path) -> list[Path]:
    return [path for path in private.rglob("*") if path.is_socket()]


# --- who can reach whom ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listen", "dual_stack", "connect"),
    [
        ("127.0.0.1", False, "127.0.0.1"),
        ("::1", False, "::1"),
        ("0.0.0.0", False, "127.0.0.1"),
        ("0.0.0.0", False, "127.0.0.9"),
        ("0.0.0.0", False, "0.0.0.0"),
        ("::", False, "::1"),
        ("::", True, "::1"),
        ("::", True, "127.0.0.1"),
    ],
)
async def test_both_ends_agree(listen: str, dual_stack: bool, connect: str, private: Path) -> None:
    async with serving(private, listen, dual_stack=dual_stack) as server:
        assert server.publication.unavailable is None
        for _ in range(3):
            await agree(private, server, (connect, server.address[1]))
    assert list((private / "tcp").iterdir()) == []


async def test_mapped_addresses_are_ipv4(private: Path) -> None:
    async with serving(private) as server:
        port = server.address[1]
        with trio.socket.socket(socket.AF_INET6) as client:
            client.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, False)
            await client.bind(("::ffff:127.0.0.1", 0))
            announcement = await announce(private, client, ("::ffff:127.0.0.1", port))
            await client.connect(("::ffff:127.0.0.1", port))
            connection, claim = await server.accept()
            with connection:
                assert claim is not None
                await both_go(Both(client, announcement, connection, claim))


async def test_an_ipv6_only_wildcard_is_not_asked_for_ipv4(private: Path) -> None:
    async with serving(private, "::") as server:
        destination = ("127.0.0.1", server.address[1])
        outcome = await Discovery(private).announce(("127.0.0.1", 1), destination, soon())
        assert outcome is FallbackReason.PEER_NOT_CAPABLE


async def test_our_wildcard_listener_says_nothing_about_other_hosts(private: Path) -> None:
    async with serving(private, "0.0.0.0") as server:
        destination = ("203.0.113.9", server.address[1])
        outcome = await Discovery(private).announce(("192.0.2.1", 1), destination, soon())
        assert outcome is FallbackReason.PEER_NOT_CAPABLE


async def test_nobody_published(private: Path) -> None:
    outcome = await Discovery(private).announce(("127.0.0.1", 1), ("127.0.0.1", 2), soon())
    assert outcome is FallbackReason.PEER_NOT_CAPABLE
    assert os.listdir(private.parent) == [], "a client makes no directory"


async def test_names_hold_the_network_namespace(private: Path) -> None:
    async with serving(private):
        (found,) = sockets_below(private)
        inode = os.stat("/proc/self/ns/net").st_ino
        assert found.relative_to(private).parts[:2] == ("tcp", str(inode))


async def test_another_network_namespace_does_not_see_our_loopback(private: Path) -> None:
    tried = await trio.run_process(["unshare", "-n", "true"], check=False, capture_stderr=True)
    if tried.returncode != 0:
        pytest.skip("making a network namespace needs privileges")
    code = (
        "import sys, trio\n"
        "from pathlib import Path\n"
        "from trio_smc.rendezvous.discovery import Discovery\n"
        "async def main():\n"
        "    there = ('127.0.0.1', int(sys.argv[2]))\n"
        "    d = Discovery(Path(sys.argv[1]))\n"
        "    print(await d.announce(('127.0.0.1', 1), there, trio.current_time() + 10))\n"
        "trio.run(main)\n"
    )
    async with serving(private) as server:
        command = [sys.executable, "-c", code, str(private), str(server.address[1])]
        inside = await trio.run_process(["unshare", "-n", *command], capture_stdout=True)
        assert inside.stdout.decode().strip() == FallbackReason.PEER_NOT_CAPABLE
        outside = await trio.run_process(command, capture_stdout=True)
        assert b"Announcement" in outside.stdout


async def test_a_long_directory(runtime_directory: Path) -> None:
    private = runtime_directory / ("d" * 200) / ("e" * 200)
    async with serving(private) as server:
        await agree(private, server, server.address)


async def test_a_client_that_did_not_announce_itself_is_not_waited_for(private: Path) -> None:
    async with serving(private) as server, bound() as client:
        await client.connect(server.address)
        connection, claim = await server.accept()
        connection.close()
        assert claim is None


async def test_many_at_once(private: Path) -> None:
    count = 200
    results: list[bool] = []

    async def serve(server: Server, nursery: trio.Nursery) -> None:
        for _ in range(count):
            connection, claim = await server.accept()
            assert claim is not None
            nursery.start_soon(confirm, connection, claim)

    async def confirm(connection: trio.socket.SocketType, claim: Claim) -> None:
        with connection:
            results.append(await claim.confirm(connection, soon()))

    asking = Discovery(private)

    async def call(server: Server) -> None:
        async with bound() as client:
            announcement = await announce(asking, client, server.address)
            await client.connect(server.address)
            results.append(await announcement.accepted(soon()) is None)
            await client.send(b"C")

    async with serving(private) as server, trio.open_nursery() as nursery:
        nursery.start_soon(serve, server, nursery)
        for _ in range(count):
            nursery.start_soon(call, server)
    assert results == [True] * (2 * count)


async def test_a_unix_connection_is_made_once_and_kept(private: Path) -> None:
    asking = Discovery(private)
    async with serving(private) as server:
        for _ in range(5):
            await agree(asking, server, server.address)
        assert len(server.publication._clients) == 1


async def test_only_idle_unix_connections_make_room_for_others(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_channels, "_MOST_CHANNELS", 1)
    asking = Discovery(private)
    async with serving(private) as one, serving(private) as other, bound() as client:
        announcement = await announce(asking, client, one.address)
        await agree(asking, other, other.address)
        await client.connect(one.address)
        connection, claim = await one.accept()
        with connection:
            assert claim is not None
            await both_go(Both(client, announcement, connection, claim))
        assert len(asking._channels._channels) == 2
        async with serving(private) as third:
            await agree(asking, third, third.address)
            await trio.testing.wait_all_tasks_blocked()
            assert len(one.publication._clients) == 0, "the oldest has gone"
            assert len(other.publication._clients) == 1


def left_in_a_child(made: list[Discovery], descriptors: list[int]) -> int:
    """How many of these descriptors are open in a forked child that has abandoned them."""
    child = os.fork()
    if child == 0:
        left = 99
        with contextlib.suppress(BaseException):
            for each in made:
                each.abandon()
            left = sum(os.path.exists(f"/proc/self/fd/{each}") for each in descriptors)
        os._exit(left)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


async def test_a_forked_child_lets_go_and_its_parent_goes_on(private: Path) -> None:
    asking = Discovery(private)
    async with trio.open_nursery() as nursery, serving(private) as server:
        await agree(asking, server, server.address)
        publishing = Discovery(private)
        publication = publishing.publish(("127.0.0.1", 9), nursery)
        await trio.testing.wait_all_tasks_blocked()
        assert publication._listener is not None
        (channel,) = asking._channels._channels.values()
        held = [channel.connection.fileno(), publication._listener.fileno()]
        assert left_in_a_child([asking, publishing], held) == 0
        await agree(asking, server, server.address)
        assert len(server.publication._clients) == 1, "the parent's is as it was"
        publication.close()


async def test_what_is_remembered_of_a_directory_ends_with_its_next_change(private: Path) -> None:
    asking = Discovery(private)
    async with serving(private, "0.0.0.0") as server:
        there = ("127.0.0.1", server.address[1])
        while not asking._channels._places:
            await agree(asking, server, there)
            await trio.sleep(0.01)
        (place,) = asking._channels._places.values()
        assert place.holds()
        async with trio.open_nursery() as nursery:
            more = Discovery(private).publish(there, nursery)
            assert not place.holds()
            outcome = await asking.announce(("127.0.0.1", 1), there, soon())
            assert isinstance(outcome, Announcement)
            assert len(outcome.asked) == 2, "the new listener is asked as well"
            outcome.close()
            more.close()
        await agree(asking, server, there)


async def test_of_several_who_wait_each_gets_its_own_answer(private: Path) -> None:
    """Whoever reads does it for all, and leaves it to another one when it goes."""
    asking = Discovery(private)
    async with serving(private) as server, contextlib.AsyncExitStack() as opened:
        both: list[Both] = []
        for _ in range(4):
            client = await opened.enter_async_context(bound())
            announcement = await announce(asking, client, server.address)
            await client.connect(server.address)
            connection, claim = await server.accept()
            opened.enter_context(connection)
            assert claim is not None
            both.append(Both(client, announcement, connection, claim))
        reader = trio.CancelScope()
        said: dict[int, object] = {}

        async def ask(number: int) -> None:
            said[number] = await both[number].client_says()

        async def read() -> None:
            with reader:
                await both[0].announcement.accepted(soon())
            said[0] = "cancelled"

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            for number in (1, 2, 3):
                nursery.start_soon(ask, number)
            await trio.testing.wait_all_tasks_blocked()
            reader.cancel()
            await trio.testing.wait_all_tasks_blocked()
            both[3].claim.refuse(FallbackReason.NO_RNIC)
            for each in both[1:3]:
                assert await each.server_says()
        assert said == {0: "cancelled", 1: None, 2: None, 3: FallbackReason.NO_RNIC}


# --- several processes -------------------------------------------------------------------------


class Worker:
    """A `discovery_worker` process."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        self._text = b""

    async def line(self) -> str:
        assert self.process.stdout is not None
        with trio.fail_after(LONG * 2):
            while b"\n" not in self._text:
                more = await self.process.stdout.receive_some()
                assert more, "the worker ended"
                self._text += more
        line, _, self._text = self._text.partition(b"\n")
        return line.decode()


@contextlib.asynccontextmanager
async def worker(
    private: Path, kind: str = "smc", port: int = 0, address: str = "127.0.0.1"
) -> AsyncIterator[tuple[Worker, int]]:
    command = [sys.executable, str(WORKER), str(private), address, str(port), kind]
    environment = os.environ | {"PYTHONPATH": str(WORKER.parent.parent)}
    async with trio.open_nursery() as nursery:

        async def start(task_status: trio.TaskStatus[trio.Process]) -> None:
            await trio.run_process(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                check=False,
                task_status=task_status,
            )

        process: trio.Process = await nursery.start(start)
        try:
            made = Worker(process)
            yield made, int(await made.line())
        finally:
            if process.stdin is not None:
                await process.stdin.aclose()
            with trio.move_on_after(LONG, shield=True):
                await process.wait()
            if process.stdout is not None:
                await process.stdout.aclose()
            nursery.cancel_scope.cancel()


async def call_worker(private: Path, port: int, wait: float = LONG) -> tuple[bool, bytes]:
    """Connect; whether we agreed on SMC-R, and what the worker thinks."""
    async with bound() as client:
        announcement = await announce(private, client, ("127.0.0.1", port))
        await client.connect(("127.0.0.1", port))
        agreed = await announcement.accepted(soon(wait)) is None
        await client.send(b"C" if agreed else b"A")
        return agreed, await client.recv(100)


async def test_two_processes(private: Path) -> None:
    async with worker(private) as (_, port):
        for _ in range(20):
            assert await call_worker(private, port) == (True, b"smc-r")


async def test_with_several_processes_the_one_that_accepts_says_so(private: Path) -> None:
    async with worker(private) as (first, port), worker(private, port=port) as (second, _):
        assert len(sockets_below(private)) == 2
        for _ in range(30):
            assert await call_worker(private, port) == (True, b"smc-r")
        for each in (first, second):
            # Both had connections: 30 hashes that all pick one process come once in 2^29 runs.
            assert await each.line() == "smc-r"


async def test_a_plain_process_on_the_same_port_is_never_sent_clc(private: Path) -> None:
    async with worker(private) as (_, port), worker(private, "plain", port):
        seen = set()
        for _ in range(60):
            agreed, word = await call_worker(private, port, wait=0.2)
            seen.add((agreed, word))
            if len(seen) == 2:
                break
        assert seen == {(True, b"smc-r"), (False, b"tcp")}


async def test_a_plain_server_on_the_specific_address(private: Path) -> None:
    async with worker(private, address="0.0.0.0") as (_, port):
        with trio.socket.socket() as plain:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            await plain.bind(("127.0.0.1", port))
            plain.listen(5)
            async with bound() as client:
                announcement = await announce(private, client, ("127.0.0.1", port))
                await client.connect(("127.0.0.1", port))
                reason = await announcement.accepted(soon(SHORT))
                assert reason is FallbackReason.PEER_NOT_CAPABLE
                connection, _ = await plain.accept()
                with connection:
                    client.shutdown(socket.SHUT_WR)
                    assert await connection.recv(1) == b""


async def test_the_socket_of_a_killed_process_is_removed(private: Path) -> None:
    async with worker(private) as (killed, port):
        assert len(sockets_below(private)) == 1
        killed.process.kill()
        await killed.process.wait()
        assert len(sockets_below(private)) == 1
        there = ("127.0.0.1", port)
        outcome = await Discovery(private).announce(("127.0.0.1", 1), there, soon())
        assert outcome is FallbackReason.PEER_NOT_CAPABLE
        assert sockets_below(private) == []


async def test_who_publishes_removes_what_dead_processes_left(private: Path) -> None:
    async with worker(private) as (killed, port):
        killed.process.kill()
        await killed.process.wait()
        async with serving(private, port=port) as server:
            assert len(sockets_below(private)) == 1
            await agree(private, server, server.address)
    assert sockets_below(private) == []


async def test_a_stopped_process_delays_nobody(private: Path) -> None:
    async with serving(private) as server:
        (name,) = sockets_below(private)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
            silent.bind(str(name.parent / "1-silent"))
            silent.listen(1)
            with trio.fail_after(LONG / 2):
                await agree(private, server, server.address)
            (name.parent / "1-silent").unlink()


# --- giving up ---------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def claimed(private: Path) -> AsyncIterator[Both]:
    async with serving(private) as server, bound() as client:
        announcement = await announce(private, client, server.address)
        await client.connect(server.address)
        connection, claim = await server.accept()
        with connection:
            assert claim is not None
            yield Both(client, announcement, connection, claim)


async def test_a_client_that_withdraws(private: Path) -> None:
    async with claimed(private) as both:
        both.announcement.close()
        assert not await both.claim.confirm(both.connection, soon())


async def test_a_client_that_withdraws_and_lets_the_server_speak_first(private: Path) -> None:
    """Nothing comes over TCP that would wake the server."""
    async with claimed(private) as both, trio.open_nursery() as nursery:

        async def withdraw() -> None:
            await trio.testing.wait_all_tasks_blocked()
            both.announcement.close()

        nursery.start_soon(withdraw)
        assert not await both.claim.confirm(both.connection, soon())


async def test_a_client_that_withdraws_before_the_claim(private: Path) -> None:
    async with serving(private) as server, bound() as client:
        announcement = await announce(private, client, server.address)
        await client.connect(server.address)
        announcement.close()
        announcement.close()
        connection, claim = await server.accept()
        with connection:
            # Found before the withdrawal behind it was read: then that ends it.
            assert claim is None or not await claim.confirm(connection, soon())


async def test_a_client_that_is_tired_of_waiting(private: Path) -> None:
    async with claimed(private) as both:
        assert await both.client_says(SHORT) is FallbackReason.PEER_NOT_CAPABLE
        assert not await both.server_says()


async def test_a_server_that_is_tired_of_waiting(private: Path) -> None:
    """It does not know what the client is going to say: no fallback (RFC 7609, C.5)."""
    async with claimed(private) as both:
        with pytest.raises(TimeoutError):
            await both.claim.confirm(both.connection, soon(SHORT))
        # ACCEPTED is there to be read.
        assert await both.client_says() is None


async def test_bytes_of_an_application_come_after_a_withdrawal(private: Path) -> None:
    """Both are there when the server looks at the TCP connection for the first time."""
    async with claimed(private) as both:
        assert await both.client_says(0) is FallbackReason.PEER_NOT_CAPABLE
        assert not await both.server_says()


async def test_a_client_whose_queue_is_full_ends_its_unix_connection(private: Path) -> None:
    async with claimed(private) as both:
        (channel,) = both.announcement.asked
        with contextlib.suppress(BlockingIOError):
            while True:
                channel.connection.send(_local_protocol.withdraw(bytes(36)))
        assert await both.client_says(0) is FallbackReason.PEER_NOT_CAPABLE
        assert not channel.is_open
        assert not await both.server_says()


@pytest.mark.parametrize(
    ("reason", "arrives_as"),
    [
        (FallbackReason.HANDSHAKE_LIMIT, FallbackReason.HANDSHAKE_LIMIT),
        (FallbackReason.DIRECTORY_UNUSABLE, FallbackReason.DIRECTORY_UNUSABLE),
        (FallbackReason.DECLINED, FallbackReason.PEER_NOT_CAPABLE),  # has no code
    ],
)
async def test_a_server_that_refuses(
    reason: FallbackReason, arrives_as: FallbackReason, private: Path
) -> None:
    async with claimed(private) as both:
        both.claim.refuse(reason)
        both.claim.refuse(reason)
        assert await both.announcement.accepted(soon()) is arrives_as
        assert not await both.claim.confirm(both.connection, soon())


async def test_a_publication_that_ends_drops_its_announcements(private: Path) -> None:
    async with serving(private) as server, bound() as client:
        announcement = await announce(private, client, server.address)
        server.publication.close()
        server.publication.close()
        assert sockets_below(private) == []
        assert await announcement.accepted(soon()) is FallbackReason.PEER_NOT_CAPABLE


async def test_a_cancelled_nursery_removes_the_publication(private: Path) -> None:
    async with trio.open_nursery() as nursery:
        Discovery(private).publish(("127.0.0.1", 4), nursery)
        assert len(sockets_below(private)) == 1
        nursery.cancel_scope.cancel()
    assert sockets_below(private) == []


async def test_a_publication_closed_before_its_task_ran(private: Path) -> None:
    async with trio.open_nursery() as nursery:
        Discovery(private).publish(("127.0.0.1", 4), nursery).close()
    assert sockets_below(private) == []


async def test_an_announcement_that_no_connection_follows_is_forgotten(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_publication, "_PENDING_TIMEOUT", 0)
    asking = Discovery(private)
    async with serving(private) as server, bound() as one, bound() as two:
        first = await announce(asking, one, server.address)
        second = await announce(asking, two, server.address)
        await trio.testing.wait_all_tasks_blocked()
        (client,) = server.publication._clients.values()
        server.publication.hear_all(client)
        assert list(server.publication._pending) == [second.key]
        first.close()
        second.close()
        server.publication.hear_all(client)
        assert server.publication._pending == {}
        assert client.pending == set()


@pytest.mark.parametrize("stacks", [1, 2])
async def test_a_second_announcement_of_a_connection_replaces_the_first(
    stacks: int, private: Path
) -> None:
    one = Discovery(private)
    other = one if stacks == 1 else Discovery(private)
    async with serving(private) as server, bound() as client:
        first = await announce(one, client, server.address)
        second = await announce(other, client, server.address)
        await client.connect(server.address)
        connection, claim = await server.accept()
        with connection:
            assert claim is not None
            await both_go(Both(client, second, connection, claim))
            assert await first.accepted(soon(SHORT)) is FallbackReason.PEER_NOT_CAPABLE


class After:
    """Cancels a scope after so many scheduler passes."""

    def __init__(self, passes: int) -> None:
        self.passes = passes
        self.scope = trio.CancelScope()

    async def count(self) -> None:
        for _ in range(self.passes):
            await trio.lowlevel.cancel_shielded_checkpoint()
        self.scope.cancel()


@pytest.mark.parametrize("side", ["client", "server"])
@pytest.mark.parametrize("passes", range(14))
async def test_cancellation_at_each_wait(side: str, passes: int, private: Path) -> None:
    """Whoever is cancelled ends its TCP connection; the other one's answer comes at once."""
    after = After(passes)
    async with serving(private) as server:

        async def call() -> None:
            async with bound() as client:
                with (
                    after.scope if side == "client" else contextlib.nullcontext(),
                    await announce(private, client, server.address) as announcement,
                ):
                    await client.connect(server.address)
                    if await announcement.accepted(soon()) is None:
                        await client.send(b"C")

        async def serve() -> None:
            connection, claim = await server.accept()
            with connection, after.scope if side == "server" else contextlib.nullcontext():
                if claim is not None:
                    await claim.confirm(connection, soon())

        with trio.fail_after(LONG):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(after.count)
                async with trio.open_nursery() as caller:
                    with trio.CancelScope() as serving_scope:
                        async with trio.open_nursery() as servers:
                            servers.start_soon(serve)
                            caller.start_soon(finish, call, serving_scope, side)
        # Whatever was cancelled, the next connection is served.
        await agree_ignoring_older(private, server)


async def finish(call: Callable[[], object], serving_scope: trio.CancelScope, side: str) -> None:
    await call()  # type: ignore[misc]
    if side == "client":
        # The connection may never have been opened.
        serving_scope.cancel()


async def agree_ignoring_older(private: Path, server: Server) -> None:
    async with bound() as client:
        announcement = await announce(private, client, server.address)
        await client.connect(server.address)
        while True:
            connection, claim = await server.accept()
            with connection:
                if connection.getpeername() == client.getsockname():
                    assert claim is not None
                    await both_go(Both(client, announcement, connection, claim))
                    return


async def test_ends_in_parallel_always_agree(private: Path, rng: random.Random, full: bool) -> None:
    """Deadlines that race on two threads, each with its own Trio: never two different answers.

    A server that gave up resets the connection, whatever the client thinks.
    """
    rounds = 5000 if full else 400
    says: dict[str, dict[tuple[str, int], object]] = {"server": {}, "client": {}}
    send_address, receive_address = trio.open_memory_channel[tuple[str, int]](1)
    here = trio.lowlevel.current_trio_token()
    patience = [rng.choice((0.0, 50e-6, 200e-6, 1.0, 1.0)) for _ in range(rounds)]
    asking = Discovery(private)

    async def serve() -> None:
        async with serving(private) as server:
            here.run_sync_soon(send_address.send_nowait, server.address)
            for wait in patience:
                connection, claim = await server.accept()
                with connection:
                    peer = connection.getpeername()[:2]
                    # No claim: the client has withdrawn already.
                    agreed: object = False
                    if claim is not None:
                        try:
                            agreed = await claim.confirm(connection, soon(wait))
                        except TimeoutError:
                            agreed = None
                    if agreed is not None:
                        assert await connection.recv(1) == (b"C" if agreed else b"A")
                    says["server"][peer] = agreed
                    await connection.send(b"!")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, trio.run, serve)
        destination = await receive_address.receive()
        for _ in range(rounds):
            async with bound() as client:
                announcement = await announce(asking, client, destination)
                await client.connect(destination)
                wait = rng.choice((0.0, 50e-6, 100e-6, 200e-6, 1.0))
                went = await announcement.accepted(soon(wait)) is None
                says["client"][client.getsockname()[:2]] = went
                await client.send(b"C" if went else b"A")
                assert await client.recv(1) == b"!"
    for peer, said in says["client"].items():
        assert says["server"][peer] in (said, None)
    assert set(says["client"].values()) == {True, False}, "the race was no race"


# --- bad neighbours ----------------------------------------------------------------------------


def dial(private: Path) -> socket.socket:
    """A raw Unix connection to the only publication."""
    (name,) = sockets_below(private)
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    raw.connect(str(name))
    raw.settimeout(LONG)
    return raw


async def hear(raw: socket.socket) -> bytes:
    await trio.lowlevel.wait_readable(raw)
    return raw.recv(100)


@pytest.mark.parametrize(
    "packet",
    [
        b"x",
        b"TSMC",
        b"GET / HTTP/1.0\r\n\r\n",
        bytes(44),
        _local_protocol.announce(bytes(36))[:-1],
        _local_protocol.accepted(bytes(36)),
        _local_protocol.refused(FallbackReason.NO_RNIC),
        struct.pack(">4sBBBB", b"TSMC", 3, 2, 1, 0) + bytes(36),
        struct.pack(">4sBBBB", b"TSMC", 2, 2, 99, 0) + bytes(36),
        random.Random(7).randbytes(50_000),
    ],
)
async def test_garbage_costs_its_sender_only(packet: bytes, private: Path) -> None:
    async with serving(private) as server:
        with dial(private) as raw:
            raw.send(packet)
            with contextlib.suppress(ConnectionResetError):
                assert await hear(raw) == b""
            await agree(private, server, server.address)


async def test_clients_that_say_nothing_are_dropped(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_publication, "_ANNOUNCE_TIMEOUT", SHORT)
    async with serving(private) as server:
        with dial(private) as raw:
            await agree(private, server, server.address)
            assert await hear(raw) == b""
        assert server.publication._silent == {}


async def test_garbage_after_the_announcement(private: Path) -> None:
    async with serving(private) as server, bound() as client:
        announcement = await announce(private, client, server.address)
        announcement.asked[0].connection.send(b"what?")
        await agree(private, server, server.address)
        assert await announcement.accepted(soon()) is FallbackReason.PEER_NOT_CAPABLE
        assert server.publication._pending == {}


async def test_a_withdrawal_of_what_another_client_announced(private: Path) -> None:
    async with serving(private) as server, bound() as client:
        announcement = await announce(private, client, server.address)
        with dial(private) as raw:
            raw.send(_local_protocol.withdraw(announcement.key))
            await client.connect(server.address)
            connection, claim = await server.accept()
            with connection:
                assert claim is not None
                raw.send(_local_protocol.withdraw(announcement.key))
                await both_go(Both(client, announcement, connection, claim))


async def test_too_many_clients(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_publication, "_MAX_CLIENTS", 2)
    async with serving(private) as server, bound() as one, bound() as two, bound() as three:
        first, second = Discovery(private), Discovery(private)
        held = [
            await announce(first, one, server.address),
            await announce(second, two, server.address),
        ]
        await trio.testing.wait_all_tasks_blocked()
        turned_away = await announce(private, three, server.address)
        assert await turned_away.accepted(soon()) is FallbackReason.HANDSHAKE_LIMIT
        for each in held:
            each.close()
        first.close()
        await trio.testing.wait_all_tasks_blocked()
        await agree(private, server, server.address)


async def test_too_many_announcements(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_publication, "_MAX_PENDING", 2)
    asking = Discovery(private)
    async with serving(private) as server, contextlib.AsyncExitStack() as opened:
        held = []
        for _ in range(3):
            client = await opened.enter_async_context(bound())
            held.append(await announce(asking, client, server.address))
        await trio.testing.wait_all_tasks_blocked()
        (known,) = server.publication._clients.values()
        server.publication.hear_all(known)
        assert await held[2].accepted(soon()) is FallbackReason.HANDSHAKE_LIMIT
        for each in held:
            each.close()
        await agree(asking, server, server.address)


async def test_accept_without_descriptors_waits_for_better_times(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_publication, "_EXHAUSTED_INTERVAL", 0.001)
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with serving(private) as server, bound() as client:
        with dial(private) as raw:
            raw.send(_local_protocol.announce(bytes(36)))
            highest = max(map(int, os.listdir("/proc/self/fd")))
            filler = []
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, hard))
                with contextlib.suppress(OSError):
                    while True:
                        filler.append(os.open("/dev/null", os.O_RDONLY))
                await trio.testing.wait_all_tasks_blocked()
                # A client without descriptors gets its TCP connection all the same.
                outcome = await Discovery(private).announce(
                    client.getsockname(), server.address, soon()
                )
                assert outcome is FallbackReason.OUT_OF_RESOURCES
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                for each in filler:
                    os.close(each)
            raw.send(_local_protocol.announce(bytes(36)))
            await agree(private, server, server.address)
            assert bytes(36) in server.publication._pending


class FakeListener:
    """A raw socket in the place of a publication, answering one client with given packets."""

    def __init__(self, private: Path, *answers: bytes, backlog: int = 5) -> None:
        self.name = _local_directory.listener_name("127.0.0.1", 9, dual_stack=False)
        self.made = _local_directory.NewSocket(private, self.name, backlog)
        self.answers = answers

    async def serve(self) -> None:
        await trio.lowlevel.wait_readable(self.made.listener)
        connection, _ = self.made.listener.accept()
        with connection:
            await trio.lowlevel.wait_readable(connection)
            connection.recv(100)
            for answer in self.answers:
                connection.send(answer)
            with contextlib.suppress(OSError):
                await trio.lowlevel.wait_readable(connection)

    def close(self) -> None:
        self.made.remove()
        self.made.listener.close()


NAME = _local_protocol.four_tuple(("127.0.0.1", 1), ("127.0.0.1", 9))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", FallbackReason.PEER_NOT_CAPABLE),
        (b"HTTP/1.0 400 Bad Request", FallbackReason.PEER_NOT_CAPABLE),
        (_local_protocol.announce(NAME), FallbackReason.PEER_NOT_CAPABLE),
        (_local_protocol.accepted(NAME)[:-1], FallbackReason.PEER_NOT_CAPABLE),
        (
            struct.pack(">4sBBBB", b"TSMC", 7, 9, Kind.ACCEPTED, 0) + NAME,
            FallbackReason.LOCAL_VERSION_MISMATCH,
        ),
        (
            struct.pack(">4sBBBB", b"TSMC", 7, 9, Kind.REFUSED, 1),
            FallbackReason.LOCAL_VERSION_MISMATCH,
        ),
        (_local_protocol.refused(FallbackReason.NO_RNIC), FallbackReason.NO_RNIC),
        (_local_protocol.refused(FallbackReason.NO_RNIC, NAME), FallbackReason.NO_RNIC),
    ],
)
async def test_what_a_listener_may_answer(
    answer: bytes, reason: FallbackReason, private: Path
) -> None:
    fake = FakeListener(private, answer)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fake.serve)
        there = ("127.0.0.1", 9)
        outcome = await Discovery(private).announce(("127.0.0.1", 1), there, soon())
        assert isinstance(outcome, Announcement)
        assert await outcome.accepted(soon()) is reason
        nursery.cancel_scope.cancel()
    fake.close()


async def test_an_answer_for_a_connection_that_was_not_announced_is_ignored(private: Path) -> None:
    other = _local_protocol.four_tuple(("127.0.0.1", 2), ("127.0.0.1", 9))
    fake = FakeListener(private, _local_protocol.accepted(other), _local_protocol.accepted(NAME))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fake.serve)
        outcome = await Discovery(private).announce(("127.0.0.1", 1), ("127.0.0.1", 9), soon())
        assert isinstance(outcome, Announcement)
        assert await outcome.accepted(soon()) is None
        nursery.cancel_scope.cancel()
    fake.close()


async def test_a_newer_client_learns_that_no_version_is_common(private: Path) -> None:
    async with serving(private):
        with dial(private) as raw:
            raw.send(struct.pack(">4sBBBB", b"TSMC", 3, 5, Kind.ANNOUNCE, 0) + b"whatever")
            answer = _local_protocol.decode_untrusted(await hear(raw))
            assert answer.kind is Kind.REFUSED
            assert answer.reason is FallbackReason.LOCAL_VERSION_MISMATCH


async def test_a_newer_client_that_still_speaks_our_version(private: Path) -> None:
    async with serving(private) as server:
        with dial(private) as raw:
            head = struct.pack(">4sBBBB", b"TSMC", 2, 5, Kind.ANNOUNCE, 0)
            raw.send(head + bytes(36) + b"an extension")
            await agree(private, server, server.address)
            assert bytes(36) in server.publication._pending


async def test_a_listener_whose_backlog_stays_full(private: Path) -> None:
    fake = FakeListener(private, backlog=0)
    waiting = []
    try:
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                waiting[-1].setblocking(False)
                waiting[-1].connect(str(sockets_below(private)[0]))
        there = ("127.0.0.1", 9)
        outcome = await Discovery(private).announce(("127.0.0.1", 1), there, soon(SHORT))
        assert outcome is FallbackReason.PEER_NOT_CAPABLE
        # Once there is room again, a client that is still waiting gets through.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(drain, fake.made.listener)
            found = await Discovery(private).announce(("127.0.0.1", 1), there, soon())
            assert isinstance(found, Announcement)
            found.close()
            nursery.cancel_scope.cancel()
    finally:
        for each in waiting:
            each.close()
        fake.close()


async def drain(listener: socket.socket) -> None:
    """Accept everybody."""
    while True:
        await trio.lowlevel.wait_readable(listener)
        connection, _ = listener.accept()
        connection.close()


# --- other users, hostile directories ----------------------------------------------------------


async def test_a_client_of_another_user_is_refused(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_publication, "is_same_user", lambda connection: False)
    async with serving(private) as server:
        outcome = await Discovery(private).announce(("127.0.0.1", 1), server.address, soon())
        assert isinstance(outcome, Announcement)
        assert await outcome.accepted(soon()) is FallbackReason.OTHER_USER


async def test_a_listener_of_another_user_is_not_believed(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_channels, "is_same_user", lambda connection: False)
    async with serving(private) as server:
        outcome = await Discovery(private).announce(("127.0.0.1", 1), server.address, soon())
        assert outcome is FallbackReason.OTHER_USER


def announce_as_nobody(path: str) -> bytes:
    """The answer to an announcement that another user makes."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = os.fork()
        if child == 0:
            try:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
                    raw.connect(path)
                    raw.send(_local_protocol.announce(bytes(36)))
                    theirs.send(raw.recv(100))
            finally:
                os._exit(0)
        theirs.close()
        answer = ours.recv(100)
        os.waitpid(child, 0)
    return answer


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_the_kernel_tells_who_a_client_is(private: Path) -> None:
    async with serving(private):
        (name,) = sockets_below(private)
        # Open everything, so that only the credentials are left to refuse.
        name.chmod(0o777)
        for directory in name.parents:
            if directory.is_relative_to(private.parent.parent):
                directory.chmod(0o755)
        answer = await trio.to_thread.run_sync(announce_as_nobody, str(name))
        assert answer == _local_protocol.refused(FallbackReason.OTHER_USER)


async def unavailable(private: Path) -> FallbackReason:
    """Publish and announce where neither can work: the same reason and no exception."""
    async with trio.open_nursery() as nursery:
        publication = Discovery(private).publish(("127.0.0.1", 9), nursery)
        assert publication.unavailable is not None
        assert publication.claim(("127.0.0.1", 9), ("127.0.0.1", 1)) is None
        publication.close()
    outcome = await Discovery(private).announce(("127.0.0.1", 1), ("127.0.0.1", 9), soon())
    assert outcome is publication.unavailable
    return outcome


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
async def test_a_directory_that_others_can_enter(mode: int, private: Path) -> None:
    os.mkdir(private)
    os.chmod(private, mode)
    assert await unavailable(private) is FallbackReason.DIRECTORY_UNUSABLE


async def test_a_symbolic_link_is_not_followed(private: Path, tmp_path: Path) -> None:
    real = tmp_path / "real"
    os.mkdir(real, mode=0o700)
    os.symlink(real, private)
    assert await unavailable(private) is FallbackReason.DIRECTORY_UNUSABLE
    assert os.listdir(real) == []


async def test_a_file_in_the_place_of_the_directory(private: Path) -> None:
    os.mknod(private, mode=0o600)
    assert await unavailable(private) is FallbackReason.DIRECTORY_UNUSABLE
    os.unlink(private)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
async def test_a_directory_of_another_user(private: Path) -> None:
    os.mkdir(private, mode=0o700)
    os.chown(private, 65534, 65534)
    assert await unavailable(private) is FallbackReason.OTHER_USER


async def test_a_full_file_system(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", full)
        async with trio.open_nursery() as nursery:
            publication = Discovery(private).publish(("127.0.0.1", 9), nursery)
            assert publication.unavailable is FallbackReason.OUT_OF_RESOURCES


async def test_entries_that_are_no_sockets_are_left_alone(private: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as decoy:
        decoy.bind(str(elsewhere))
        decoy.listen()
        decoy.setblocking(False)
        async with serving(private) as server:
            (name,) = sockets_below(private)
            (name.parent / "1-link").symlink_to(elsewhere)
            (name.parent / "2-file").touch()
            await agree(private, server, server.address)
            with pytest.raises(BlockingIOError):
                decoy.accept()
            (name.parent / "1-link").unlink()
            (name.parent / "2-file").unlink()
    elsewhere.unlink()


async def test_other_systems_have_only_tcp(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert await unavailable(private) is FallbackReason.UNSUPPORTED_PLATFORM
    assert os.listdir(private.parent) == []


async def test_publishers_that_come_and_go_do_not_disturb_each_other(private: Path) -> None:
    """One removes the directory while another makes its socket there."""

    def come_and_go() -> None:
        for _ in range(200):
            made = _local_directory.NewSocket(private, "4-127.0.0.1-9", 1)
            made.remove()
            made.listener.close()

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(trio.to_thread.run_sync, come_and_go)
    assert sockets_below(private) == []


# --- the messages ------------------------------------------------------------------------------


@given(st.binary(max_size=60) | st.binary(max_size=60).map(lambda tail: b"TSMC\x02\x02" + tail))
def test_any_bytes_are_a_message_or_a_protocol_error(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        message = _local_protocol.decode_untrusted(data)
        assert (message.kind is Kind.REFUSED) == (message.reason is not None)
        everything = message.kind in (None, Kind.REFUSED)
        assert len(message.connection) in ((0, 36) if everything else (36,))


@given(st.ip_addresses(), st.integers(0, 65535), st.ip_addresses(), st.integers(0, 65535))
def test_an_announcement_names_its_connection(
    source: object, source_port: int, destination: object, port: int
) -> None:
    name = _local_protocol.four_tuple((str(source), source_port), (str(destination), port))
    message = _local_protocol.decode_untrusted(_local_protocol.announce(name))
    assert message.kind is Kind.ANNOUNCE
    assert message.connection == name
    other = _local_protocol.four_tuple((str(source), source_port), (str(destination), port ^ 1))
    assert other != name


def test_the_layout_of_an_announcement() -> None:
    name = _local_protocol.four_tuple(("192.0.2.1", 0x1234), ("2001:db8::1%eth0", 0x5678))
    expected = (
        "54534d43 02 02 01 00"
        "00000000000000000000ffffc0000201 1234"
        "20010db8000000000000000000000001 5678"
    )
    assert _local_protocol.announce(name) == bytes.fromhex(expected)


def test_every_reason_with_a_code_arrives() -> None:
    for reason in _local_protocol._REASONS.values():
        message = _local_protocol.decode_untrusted(_local_protocol.refused(reason))
        assert message.reason is reason
