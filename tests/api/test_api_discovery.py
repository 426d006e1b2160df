"""Which peers get CLC messages: discovery through the public API, and the bytes that peers
receive."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import trio
import trio.testing

import trio_smc
from tests.api.api_peers import (
    ASSUME,
    HOST,
    QUICK,
    address_of,
    check_serves,
    check_talk,
    close_all,
    connect,
    plain_client,
    plain_server,
    proposal,
    read_clc,
    read_exactly,
    read_to_end,
)
from tests.peers import check_echo, echo
from tests.timing import PATIENCE
from trio_smc import Config, Fallback, FallbackReason, Mode, SmcListener, SmcStream, Stack
from trio_smc.rendezvous.discovery import lookup, tcp_option
from trio_smc.rendezvous.discovery.tcp_option import TcpOption
from trio_smc.wire import clc

EYE = clc.EYE_CATCHER
SHORT_TIMEOUT = 0.05
"""Seconds of a handshake timeout that expires during a test."""


@contextlib.asynccontextmanager
async def listening(config: Config, host: str = HOST) -> AsyncIterator[tuple[Stack, SmcListener]]:
    async with trio_smc.open_stack(config) as stack:
        [listener] = await stack.open_listeners(0, host=host)
        async with listener:
            yield stack, listener


def reason_of(stream: SmcStream) -> FallbackReason | None:
    return None if stream.fallback is None else stream.fallback.reason


# --- "auto" --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "first", [b"GET / HTTP/1.1\r\n\r\n", b"", EYE, EYE[:2], proposal().encode()]
)
async def test_a_plain_client_gets_no_clc_and_its_bytes_stay_unchanged(first: bytes) -> None:
    async with listening(QUICK) as (_, listener):
        plain = await plain_client(listener)
        await plain.send_all(first)
        await plain.send_eof()
        stream = await listener.accept()
        assert stream.mode is Mode.TCP
        assert reason_of(stream) is FallbackReason.PEER_NOT_CAPABLE
        assert await read_to_end(stream) == first
        await stream.send_all(b"answer")
        await stream.aclose()
        assert await read_to_end(plain) == b"answer"
        await plain.aclose()


class ReusePort(trio.abc.SocketFactory):
    """Makes sockets with SO_REUSEPORT, so that several of them can listen on one port."""

    def socket(self, family=None, type=None, proto=None):  # type: ignore[no-untyped-def]
        sock = socket.socket(family, type, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        return trio.socket.from_stdlib_socket(sock)


async def test_a_port_shared_with_a_plain_tcp_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the process that accepts a connection answers; the plain process gets no CLC byte."""
    monkeypatch.setattr(lookup, "SILENCE_HOLDS", 0.0)
    trio.socket.set_custom_socket_factory(ReusePort())
    # This timeout expires once or twice, and is long enough for handshakes on a busy machine.
    config = Config(receive_buffer=16384, handshake_timeout=0.6)
    modes: set[Mode] = set()
    async with listening(config) as (stack, listener), trio.open_nursery() as nursery:

        async def ours(stream: SmcStream) -> None:
            assert await read_to_end(stream) == b"client"

        async def theirs(stream: trio.SocketStream) -> None:
            assert await read_to_end(stream) == b"client"

        async with plain_server(port=address_of(listener)[1]) as plain:
            nursery.start_soon(trio.serve_listeners, ours, [listener])
            nursery.start_soon(trio.serve_listeners, theirs, [plain])
            with trio.fail_after(PATIENCE):
                while len(modes) < 2:
                    async with await stack.open_stream(*address_of(listener)) as stream:
                        modes.add(stream.mode)
                        assert stream.mode is Mode.SMC_R or reason_of(stream) is (
                            FallbackReason.PEER_NOT_CAPABLE
                        )
                        await stream.send_all(b"client")
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()


async def test_a_plain_server_on_an_address_and_a_listener_on_the_wildcard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookup, "SILENCE_HOLDS", 0.0)
    trio.socket.set_custom_socket_factory(ReusePort())
    impatient = replace(QUICK, handshake_timeout=SHORT_TIMEOUT)
    async with listening(QUICK, "0.0.0.0") as (stack, listener):
        async with plain_server(port=address_of(listener)[1]) as plain:
            stream = await stack.open_stream(*address_of(listener), config=impatient)
            assert reason_of(stream) is FallbackReason.PEER_NOT_CAPABLE
            other = await plain.accept()
            await check_talk(stream, other)
            await close_all(stream, other)
        await check_serves(stack, listener)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::1", HOST])
async def test_listeners_on_each_kind_of_address(host: str) -> None:
    async with listening(QUICK, host) as (stack, listener):
        await check_serves(stack, listener)


async def test_two_stacks_on_one_port() -> None:
    """With SO_REUSEPORT, the client announces to both stacks, and the accepting one answers."""
    trio.socket.set_custom_socket_factory(ReusePort())
    async with listening(QUICK) as (stack, listener), trio_smc.open_stack(QUICK) as other:
        [second] = await other.open_listeners(address_of(listener)[1], host=HOST)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, echo, [listener, second])
            with trio.fail_after(PATIENCE):
                while not (stack.statistics().connections and other.statistics().connections):
                    async with await trio_smc.open_stream(*address_of(listener)) as stream:
                        assert stream.mode is Mode.SMC_R
                        await check_echo(stream)
            nursery.cancel_scope.cancel()


# --- directories ---------------------------------------------------------------------------------


async def expect_tcp(
    client: Config, server: Config, reason: FallbackReason, there: FallbackReason
) -> None:
    async with listening(server) as (_, listener), trio_smc.open_stack(client) as stack:
        mine, other = await connect(stack, listener)
        assert (reason_of(mine), reason_of(other)) == (reason, there)
        await check_talk(mine, other)
        await close_all(mine, other)


async def test_stacks_without_a_common_directory_use_tcp(runtime_directory: Path) -> None:
    """Same-host discovery needs a common directory."""
    await expect_tcp(
        Config(directory=runtime_directory / "one"),
        Config(directory=str(runtime_directory / "two")),
        FallbackReason.PEER_NOT_CAPABLE,
        FallbackReason.PEER_NOT_CAPABLE,
    )


def make_public(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def make_file(path: Path) -> None:
    path.touch()


def make_link(path: Path) -> None:
    (path.parent / "elsewhere").mkdir(mode=0o700)
    path.symlink_to("elsewhere")


def make_unreachable(path: Path) -> None:
    path.parent.joinpath("file").touch()
    path.symlink_to("file/below")


@pytest.mark.parametrize("make", [make_public, make_file, make_link, make_unreachable])
async def test_a_hostile_directory(
    make: object, runtime_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = runtime_directory / "private"
    make(directory)  # type: ignore[operator]
    config = Config(directory=directory)
    unusable = FallbackReason.DIRECTORY_UNUSABLE
    await expect_tcp(config, config, unusable, unusable)
    await expect_tcp(QUICK, config, FallbackReason.PEER_NOT_CAPABLE, unusable)
    await expect_tcp(config, QUICK, unusable, FallbackReason.PEER_NOT_CAPABLE)
    assert str(directory) in caplog.text
    assert not [record for record in caplog.records if record.exc_info]
    shutil.rmtree(runtime_directory)
    os.mkdir(runtime_directory)


async def test_a_directory_that_cannot_be_used_by_named_rnics(runtime_directory: Path) -> None:
    directory = runtime_directory / "private"
    make_public(directory)
    config = Config(directory=directory, rnics=(trio_smc.SoftRnic("a"), trio_smc.SoftRnic("b")))
    with pytest.raises(OSError, match="private directory"):
        async with trio_smc.open_stack(config):
            raise AssertionError("opened")


async def test_a_link_group_outlives_its_directory(runtime_directory: Path) -> None:
    """A cleaner removes the directory, and new connections of the same link group are SMC-R."""
    directory = runtime_directory / "private"
    async with listening(Config(directory=directory)) as (stack, listener):
        mine, other = await connect(stack, listener)
        shutil.rmtree(directory)
        await check_talk(mine, other)
        again, accepted = await connect(stack, listener)
        await check_talk(again, accepted)
        assert (again.mode, accepted.mode) == (Mode.SMC_R, Mode.SMC_R)
        await close_all(mine, other, again, accepted)


OTHER_USERS_SERVER = """
    import encodings.idna, os, sys
    sys.path[:0] = {path!r}
    import trio, trio_smc

    # After the imports, because the other user may be unable to read the modules.
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)

    async def main():
        async with trio_smc.open_stack(trio_smc.Config(directory={directory!r})) as stack:
            async with await stack.open_stream({host!r}, {port}) as stream:
                print(stream.mode, stream.fallback.reason, stream.fallback.origin)
                await stream.send_all(b"another user")

    trio.run(main)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_a_process_of_another_user() -> None:
    # Another user can read this directory, unlike the test's own one.
    directory = Path("/tmp") / f"smc-api-{os.getpid()}"
    config = Config(directory=directory)
    try:
        async with listening(config) as (_, listener):
            host, port = address_of(listener)
            program = textwrap.dedent(OTHER_USERS_SERVER).format(
                path=sys.path, directory=str(directory), host=host, port=port
            )
            environment = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
            with trio.fail_after(PATIENCE):
                done = await trio.run_process(
                    [sys.executable, "-c", program], env=environment, cwd="/",
                    capture_stdout=True, stderr=subprocess.STDOUT, check=False,
                )  # fmt: skip
                assert done.stdout.splitlines()[-1] == b"tcp other-user local"
                async with await listener.accept() as stream:
                    assert reason_of(stream) is FallbackReason.PEER_NOT_CAPABLE
                    assert await read_to_end(stream) == b"another user"
    finally:
        shutil.rmtree(directory)


# --- "assume" ------------------------------------------------------------------------------------


async def bytes_read_under_assume(
    pieces: list[bytes], *, end: bool, patience: float = PATIENCE
) -> bytes | OSError | None:
    """Send ``pieces`` to a server under "assume".  Returns the bytes that its application reads.

    end: True if the client then ends its direction.
    patience: the handshake timeout of the server.

    Returns an error if the connection is reset, and None if the application does not get it.
    """
    config = Config(receive_buffer=16384, discovery="assume", handshake_timeout=patience)
    async with listening(config) as (stack, listener), trio.open_nursery() as nursery:
        results: list[bytes | OSError | None] = []

        async def handler(stream: SmcStream) -> None:
            assert reason_of(stream) is FallbackReason.PEER_NOT_CAPABLE
            results.append(await read_to_end(stream))

        nursery.start_soon(trio.serve_listeners, handler, [listener])
        plain = await plain_client(listener)
        for piece in pieces:
            await plain.send_all(piece)
            await trio.testing.wait_all_tasks_blocked(0.01)
        if end:
            await plain.send_eof()
        elif results == [] and patience == PATIENCE:
            # The application got the stream without a wait for further bytes.
            assert stack.statistics().fallbacks
            await plain.send_eof()
        answer = await read_to_end(plain)
        await plain.aclose()
        await trio.testing.wait_all_tasks_blocked(0.01)
        nursery.cancel_scope.cancel()
        assert answer == b"" or isinstance(answer, ConnectionResetError), "bytes were sent"
        failed = stack.statistics().handshakes_failed
        assert failed == (0 if results else 1)
    return results[0] if results else None


@pytest.mark.parametrize("end", [True, False])
@pytest.mark.parametrize(
    "pieces",
    [
        [b"GET / HTTP/1.1\r\n\r\n"],
        [b"x"],
        [b"a", b"b", b"c", b"d"],
        [EYE[:1], b"x"],
        [EYE[:3] + b"x"],
        [EYE[:1], EYE[1:2], EYE[2:3], b"x", b"more"],
    ],
)
async def test_bytes_that_are_no_eye_catcher_stay_unread(pieces: list[bytes], end: bool) -> None:
    assert await bytes_read_under_assume(pieces, end=end) == b"".join(pieces)


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_a_stream_shorter_than_an_eye_catcher(count: int) -> None:
    assert await bytes_read_under_assume([EYE[:count]], end=True) == EYE[:count]


async def test_a_client_that_sends_no_byte() -> None:
    assert await bytes_read_under_assume([], end=False, patience=SHORT_TIMEOUT) is None
    assert await bytes_read_under_assume([], end=True) == b""  # as over TCP


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_an_incomplete_eye_catcher(count: int) -> None:
    """The bytes could begin a Proposal, which must never reach an application."""
    assert await bytes_read_under_assume([EYE[:count]], end=False, patience=SHORT_TIMEOUT) is None


async def test_a_proposal_byte_by_byte() -> None:
    async with listening(ASSUME) as (_, listener), await plain_client(listener) as plain:
        for byte in proposal().encode():
            await plain.send_all(bytes([byte]))
            await trio.lowlevel.checkpoint()
        assert isinstance(await read_clc(plain), clc.Accept)


async def test_assumed_at_both_ends() -> None:
    async with listening(ASSUME) as (stack, listener):
        await check_serves(stack, listener)


async def test_assumed_by_the_client_only() -> None:
    """The assumption is wrong, so the server's application gets the Proposal."""
    async with listening(QUICK) as (stack, listener), trio.open_nursery() as nursery:

        async def serve() -> None:
            async with await listener.accept() as stream:
                assert (await read_exactly(stream, 4)) == EYE

        nursery.start_soon(serve)
        with pytest.raises(ConnectionResetError):
            await stack.open_stream(*address_of(listener), config=ASSUME)


@pytest.mark.parametrize("kind", ["network", "address", "name", "own address", "bound address"])
async def test_each_kind_of_entry_in_the_assume_list(kind: str) -> None:
    async with plain_server("0.0.0.0") as free:
        port = address_of(free)[1]
    entry: dict[str, tuple[str, int] | str] = {
        "network": "127.0.0.0/30",
        "address": (HOST, port),
        "name": ("LocalHost", port),
        "own address": (HOST, port),
        "bound address": ("0.0.0.0", port),
    }
    # Only the client knows the name, and only the listener knows the bound address.
    there_entry = (HOST, port) if kind == "name" else entry[kind]
    here_entry = (HOST, port) if kind == "bound address" else entry[kind]
    server = Config(receive_buffer=16384, assume=(there_entry,))
    client = Config(receive_buffer=16384, assume=(here_entry,))
    async with trio_smc.open_stack(server) as there, trio_smc.open_stack(client) as here:
        [listener] = await there.open_listeners(port, host="0.0.0.0")
        # Without an announcement, only the list decides.
        listener.publication.close()
        name = "localhost" if kind == "name" else HOST
        async with await here.open_stream(name, port, happy_eyeballs_delay=1000) as stream:
            assert stream.mode is Mode.SMC_R
            await close_all(await listener.accept())
        # A client that is not on the list connects next.
        if kind == "network":
            async with await here.open_stream(HOST, port, local_address="127.0.0.9"):
                await close_all(await listener.accept())
        await listener.aclose()


async def test_the_assume_list_does_not_concern_other_peers() -> None:
    config = Config(receive_buffer=16384, assume=("192.0.2.0/24", ("127.0.0.1", 1)))
    async with listening(config) as (_, listener):
        plain = await plain_client(listener)
        stream = await listener.accept()
        await check_talk(plain, stream)
        await close_all(plain, stream)


async def test_random_first_bytes(rng: random.Random) -> None:
    """The application gets bytes that are not CLC, in whatever pieces they arrive."""
    for _ in range(20):
        first = bytes(rng.choice([EYE[i], rng.randrange(256)]) for i in range(4))
        if first == EYE:
            continue
        cuts = sorted(rng.sample(range(1, 4), rng.randrange(3)))
        pieces = [first[a:b] for a, b in zip([0, *cuts], [*cuts, 4], strict=True)]
        assert await bytes_read_under_assume(pieces, end=rng.random() < 0.5) == first


# --- "tcp-option" --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSYS, FallbackReason.TCP_OPTION_UNAVAILABLE),
        (errno.EINVAL, FallbackReason.TCP_OPTION_UNAVAILABLE),
        (errno.EPERM, FallbackReason.TCP_OPTION_NOT_PERMITTED),
    ],
)
async def test_the_tcp_option_cannot_be_used(
    number: int, reason: FallbackReason, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No program is pinned, and the kernel refuses to load one."""

    def refuse(cgroup: Path) -> NoReturn:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tcp_option, "load_option", refuse)
    config = Config(discovery="tcp-option", tcp_option="/nowhere")
    await expect_tcp(config, config, reason, reason)
    await expect_tcp(QUICK, config, FallbackReason.PEER_NOT_CAPABLE, reason)
    await expect_tcp(config, QUICK, reason, FallbackReason.PEER_NOT_CAPABLE)


async def test_only_the_option_counts_under_tcp_option(
    runtime_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under "tcp-option", the assume list has no effect."""
    monkeypatch.setattr(TcpOption, "offer", lambda self, sock: None)  # sends no option
    config = Config(discovery="tcp-option", assume=("127.0.0.0/8",))
    async with listening(config) as (stack, listener):
        published = os.listdir(runtime_directory / "trio-smc")
        assert {name.partition("-")[0] for name in published} == {"rnic", "control"}
        mine, other = await connect(stack, listener)
        assert mine.fallback == Fallback.local(FallbackReason.PEER_NOT_CAPABLE)
        await close_all(mine, other)
