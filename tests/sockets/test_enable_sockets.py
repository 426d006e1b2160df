"""`enable()`: sockets of Trio programs work like TCP sockets, and use SMC-R."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gc
import queue
import random
import re
import socket as stdlib_socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

import anyio
import anyio.abc
import pytest
import trio
from outcome import Outcome
from trio.testing import check_half_closeable_stream, wait_all_tasks_blocked

import trio_smc
from tests.peers import connect_sockets
from tests.streams.buffers import ALIGNMENT, SENT
from tests.streams.stream_pairs import cancel_when_blocked
from tests.tcp_ends import tcp_has_ended
from tests.timing import PATIENCE
from trio_smc.datapath.connection import Connection
from trio_smc.rnic.roce import pyverbs
from trio_smc.rnic.verbs import RnicError
from trio_smc.sockets import enable
from trio_smc.sockets.drop_in import DropInSocket, OverSmc, Side, Unconnected
from trio_smc.streams.rdma_stream import RdmaStream

LOOPBACK = "127.0.0.1"
# Python has no names for these.
TCP_ULP = 31
SO_ZEROCOPY = 60
MSG_ZEROCOPY = 0x4000000
CONFIG = trio_smc.Config(receive_buffer=16 * 1024)


@asynccontextmanager
async def drop_ins() -> AsyncIterator[tuple[DropInSocket, DropInSocket]]:
    """Open a connection; returns the client's and the server's socket."""
    listener = trio.socket.socket()
    await listener.bind((LOOPBACK, 0))
    listener.listen()
    client = trio.socket.socket()
    accepted: list[trio.socket.SocketType] = []

    async def accept() -> None:
        accepted.append((await listener.accept())[0])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept)
        await client.connect(listener.getsockname())
    with listener, client, accepted[0] as server:
        assert isinstance(client, DropInSocket)
        assert isinstance(server, DropInSocket)
        yield client, server


@contextmanager
def refused(number: int) -> Iterator[None]:
    with pytest.raises(OSError, match=re.escape(f"[Errno {number}]")):
        yield


def over_smc(sock: DropInSocket) -> bool:
    return sock.stream is not None and sock.stream.mode is trio_smc.Mode.SMC_R


async def make_pair(
    local_address: str | None = None,
) -> tuple[trio.SocketStream, trio.SocketStream]:
    client, server = await connect_sockets(local_address)
    assert over_smc(cast(DropInSocket, client.socket))
    return client, server


async def make_blocked() -> tuple[trio.SocketStream, trio.SocketStream]:
    client, server = await make_pair()
    for sending in (client, server):

        async def fill(sending: trio.SocketStream = sending) -> None:
            while True:
                await sending.socket.send(b"x" * 4096)

        assert await cancel_when_blocked(fill)
    return client, server


@pytest.mark.parametrize("checkpoints", ["strict", "amortised"])
def test_trios_own_streams_keep_their_contract(
    checkpoints: Literal["strict", "amortised"], enabled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if checkpoints == "amortised":
        # With this setting, not every call yields.  All other rules hold.
        monkeypatch.setattr(
            "trio.testing._check_streams.assert_checkpoints", contextlib.nullcontext
        )
    trio_smc.enable(dataclasses.replace(CONFIG, checkpoints=checkpoints))
    trio.run(check_half_closeable_stream, make_pair, make_blocked)


@pytest.mark.rfc("B/1", "B/2")
def test_bytes_and_names_of_both_ends(enabled: None, seed: int) -> None:
    data = random.Random(seed).randbytes(1_000_000)

    async def main() -> None:
        async with drop_ins() as (client, server):
            assert over_smc(client)
            assert over_smc(server)
            assert client.getsockname() == server.getpeername()
            assert (client.family, client.type) == (
                stdlib_socket.AF_INET,
                stdlib_socket.SOCK_STREAM,
            )
            got = bytearray()

            async def send() -> None:
                rest = memoryview(data)
                while rest:
                    sent = await client.send(rest)
                    assert 0 < sent <= len(rest)
                    rest = rest[sent:]
                client.shutdown(stdlib_socket.SHUT_WR)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(send)
                while piece := await server.recv(30_000):
                    got += piece
            assert got == data
            assert client.did_shutdown_SHUT_WR
            with pytest.raises(BrokenPipeError):
                await client.send(b"more")

    trio.run(main)


@pytest.mark.rfc("B/2", "B/3", "B/4")
def test_names_and_options_of_both_ends(enabled: None) -> None:
    """Options that were set before the connect apply over SMC-R (docs/socket-options.md)."""
    level, tcp = stdlib_socket.SOL_SOCKET, stdlib_socket.IPPROTO_TCP
    linger = b"\1\0\0\0\5\0\0\0"

    async def main() -> None:
        with trio.socket.socket() as listener, trio.socket.socket() as client:
            await listener.bind((LOOPBACK, 0))
            listener.setsockopt(level, stdlib_socket.SO_KEEPALIVE, 1)
            listener.setsockopt(level, stdlib_socket.SO_LINGER, linger)
            listener.setsockopt(level, stdlib_socket.SO_RCVBUF, 50_000)
            listener.listen()
            client.setsockopt(level, stdlib_socket.SO_SNDBUF, 8192)
            client.setsockopt(tcp, stdlib_socket.TCP_USER_TIMEOUT, 5000)
            accepted: list[tuple[trio.socket.SocketType, object]] = []

            async def accept() -> None:
                accepted.append(await listener.accept())

            async with trio.open_nursery() as nursery:
                nursery.start_soon(accept)
                await client.connect(listener.getsockname())
            server, address = accepted[0]
            with server:
                assert over_smc(cast(DropInSocket, client))
                assert over_smc(cast(DropInSocket, server))
                assert client.getsockname() == server.getpeername() == address
                assert client.getpeername() == server.getsockname() == listener.getsockname()
                assert client.getsockopt(level, stdlib_socket.SO_RCVBUF) == 16 * 1024
                assert client.getsockopt(level, stdlib_socket.SO_SNDBUF) == 8192
                assert client.getsockopt(level, stdlib_socket.SO_ERROR) == 0
                assert client.getsockopt(tcp, stdlib_socket.TCP_USER_TIMEOUT) == 5000
                assert server.getsockopt(level, stdlib_socket.SO_KEEPALIVE) == 1
                assert server.getsockopt(level, stdlib_socket.SO_RCVBUF) == 64 * 1024
                assert server.getsockopt(level, stdlib_socket.SO_LINGER, 8) == linger
                for value in (0, 1):
                    client.setsockopt(tcp, stdlib_socket.TCP_NODELAY, value)
                    assert client.getsockopt(tcp, stdlib_socket.TCP_NODELAY) == value
                with refused(errno.EOPNOTSUPP):
                    client.setsockopt(tcp, TCP_ULP, b"tls")

    trio.run(main)


def test_peeking_and_other_ways_to_receive(enabled: None) -> None:
    async def main() -> None:
        async with drop_ins() as (client, server):
            assert not server.is_readable()
            await client.sendmsg([b"abc", b"def"])
            assert await server.recv(4, stdlib_socket.MSG_PEEK) == b"abcd"
            assert server.is_readable()
            buffer = bytearray(2)
            assert await server.recv_into(buffer) == 2
            assert buffer == b"ab"
            first, second = bytearray(1), bytearray(1)
            assert (await server.recvmsg_into([first, second]))[0] == 2
            assert first + second == b"cd"
            assert await server.recvfrom(10) == (b"ef", None)

    trio.run(main)


@pytest.mark.parametrize("shape", SENT)
def test_send_takes_and_refuses_the_buffers_of_a_plain_socket(enabled: None, shape: str) -> None:
    data = bytes(range(ALIGNMENT))
    expected: int | type[Exception]
    near, far = stdlib_socket.socketpair()
    with near, far:
        try:
            expected = near.send(SENT[shape](data))
        except BufferError:
            expected = BufferError

    async def main() -> None:
        async with drop_ins() as (client, server):
            if expected is BufferError:
                with pytest.raises(BufferError):
                    await client.send(SENT[shape](data))
            else:
                assert await client.send(SENT[shape](data)) == expected == ALIGNMENT
                assert await server.recv(ALIGNMENT) == data

    trio.run(main)


def test_no_call_over_smc_r_is_left_to_the_plain_socket() -> None:
    """Exceptions are calls without a meaning for a connected socket, whose errors come from the
    kernel, and `fileno`, which asks `descriptor_socket`."""
    plain = {"hand_out", "connect_to", "fileno"}
    calls = {name for name in vars(Side) if not name.startswith("_")} - {"stream"}
    assert calls - set(vars(OverSmc)) == plain


@pytest.mark.parametrize("deny", [(), (LOOPBACK,)], ids=["SMC-R", "TCP"])
def test_a_call_can_be_replaced_for_all_sockets(
    monkeypatch: pytest.MonkeyPatch, deny: tuple[str, ...]
) -> None:
    """This works like on Trio's class.  A method in each socket object would hide the
    replacement."""

    async def counted(sock: DropInSocket, data: bytes) -> int:
        return 2 * await send(sock, data)

    async def main() -> None:
        async with drop_ins() as (client, server):
            assert over_smc(client) is not bool(deny)
            assert await client.send(b"abc") == 6
            assert await server.recv(10) == b"abc"

    send = DropInSocket.send
    monkeypatch.setattr(DropInSocket, "send", counted)
    trio_smc.enable(trio_smc.Config(deny=deny))
    try:
        trio.run(main)
    finally:
        trio_smc.disable()


def test_a_socket_that_is_shut_for_reading(enabled: None) -> None:
    async def main() -> None:
        async with drop_ins() as (client, server):
            await client.send(b"has arrived")
            server.shutdown(stdlib_socket.SHUT_RD)
            assert await server.recv(100) == b"has arrived"
            assert await server.recv(10) == b""
            await server.send(b"this is read")
            assert await client.recv(100) == b"this is read"

    trio.run(main)


def test_a_socket_is_shut_for_reading_while_a_task_reads(enabled: None) -> None:
    async def main() -> None:
        for way in ("recv", "receive_some"):
            async with drop_ins() as (client, _):
                stream = trio.SocketStream(client)
                got: list[bytes | bytearray] = []

                async def read(
                    way: str = way, client: DropInSocket = client,
                    stream: trio.SocketStream = stream, got: list[bytes | bytearray] = got,
                ) -> None:  # fmt: skip
                    reading = client.recv(10) if way == "recv" else stream.receive_some(10)
                    got.append(await reading)

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(read)
                    await wait_all_tasks_blocked()
                    client.shutdown(stdlib_socket.SHUT_RD)
                assert got == [b""]
                assert await stream.receive_some(10) == b""
                assert await client.recv(10) == b""

    trio.run(main)


def test_a_socket_stream_and_its_socket_agree(enabled: None) -> None:
    """The end of sending, closing and errors are those of `trio.SocketStream` over TCP."""

    async def main() -> None:
        client, server = await make_pair()
        await client.send_eof()
        await client.send_eof()
        assert client.socket.did_shutdown_SHUT_WR
        with pytest.raises(trio.ClosedResourceError):
            await client.send_all(b"x")
        with pytest.raises(BrokenPipeError):
            await client.socket.send(b"x")
        assert await server.receive_some() == b""
        server.socket.shutdown(stdlib_socket.SHUT_WR)
        with pytest.raises(trio.ClosedResourceError):
            await server.send_all(b"x")
        for stream in (client, server):
            await stream.aclose()
            await stream.send_eof()  # no error, because the stream has ended sending before
            for call in (stream.receive_some, partial(stream.send_all, b"x")):
                with pytest.raises(trio.ClosedResourceError):
                    await call()

        for how, error in (
            ("close", trio.ClosedResourceError),
            ("shutdown", trio.BrokenResourceError),
        ):
            client, server = await make_blocked()

            async def send(
                client: trio.SocketStream = client, error: type[Exception] = error
            ) -> None:
                with pytest.raises(error):
                    await client.send_all(b"x")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(send)
                await wait_all_tasks_blocked()
                with pytest.raises(trio.BusyResourceError):
                    await client.send_eof()
                if how == "close":
                    client.socket.close()
                else:
                    client.socket.shutdown(stdlib_socket.SHUT_WR)
            for stream in (client, server):
                await trio.aclose_forcefully(stream)

        client, server = await make_pair()
        cast(DropInSocket, server.socket).stream.abort()  # type: ignore[union-attr]
        with pytest.raises(trio.BrokenResourceError):
            await client.receive_some()
        with pytest.raises(trio.BrokenResourceError):
            await client.send_all(b"x")
        await client.aclose()

    trio.run(main)


def test_a_cancelled_connect_closes_the_socket(enabled: None) -> None:
    """Like Trio's socket, the socket is closed even if the call had not begun to connect."""

    class Slow(trio.abc.HostnameResolver):
        async def getaddrinfo(self, *_: object) -> NoReturn:
            raise AssertionError((await trio.sleep_forever(),))

        async def getnameinfo(self, *_: object) -> NoReturn:
            raise NotImplementedError

    async def main() -> None:
        trio.socket.set_custom_hostname_resolver(Slow())
        with trio.socket.socket() as client:
            with trio.CancelScope() as scope:
                scope.cancel()
                await client.connect(("localhost", 1))
            assert scope.cancelled_caught
            assert client.fileno() == -1

    trio.run(main)


class Turns(trio.abc.Instrument):
    """Counts the steps of the task that creates this object."""

    def __init__(self) -> None:
        self._task = trio.lowlevel.current_task()
        self.count = 0
        trio.lowlevel.add_instrument(self)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += task is self._task


async def turns_of_ten(call: Callable[[bytes], Awaitable[object]]) -> int:
    turns = Turns()
    for _ in range(10):
        await call(b"x")
    trio.lowlevel.remove_instrument(turns)
    return turns.count


@pytest.mark.parametrize(
    ("text", "of_sockets"),
    [("", 0), ('checkpoints = "strict"', 10), ('checkpoints = "amortised"', 0)],
)
def test_sockets_and_streams_have_one_default_of_checkpoints(
    text: str, of_sockets: int, tmp_path: Path
) -> None:
    """Sockets and streams of one process use the same default."""
    file = tmp_path / "smc.toml"
    file.write_text(f"receive_buffer = 16384\n{text}\n")
    config = trio_smc.load_config(file)

    async def main() -> None:
        for stack in (None, config):
            async with trio_smc.open_stack(stack) if stack else contextlib.nullcontext():
                client, server = await make_pair()
                await trio.lowlevel.checkpoint()
                assert (await turns_of_ten(client.send_all) >= 10) is (of_sockets == 10)
                assert (await turns_of_ten(server.socket.send) >= 10) is (of_sockets == 10)
                [listener] = await trio_smc.open_listeners(0, host=LOOPBACK)
                name = listener.socket.getsockname()
                async with listener, await trio_smc.open_stream(*name) as ours:
                    peer = await listener.accept()
                    assert ours.mode is trio_smc.Mode.SMC_R
                    assert (await turns_of_ten(ours.send_all) >= 10) is (of_sockets == 10)
                    await peer.aclose()
                for stream in (client, server):
                    await stream.aclose()

    trio_smc.enable(config)
    try:
        trio.run(main)
    finally:
        trio_smc.disable()


def test_a_socket_sends_before_it_yields(enabled: None) -> None:
    """If the call yielded first, each message would take one more pass of the scheduler."""
    trio_smc.enable(dataclasses.replace(CONFIG, checkpoints="strict"))

    async def main() -> None:
        async with drop_ins() as (client, server):
            readable: list[bool] = []

            async def check() -> None:
                readable.append(server.is_readable())

            for _ in range(5):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(check)  # runs as soon as this task yields
                    await client.send(b"x")
                await server.recv(1)
            assert readable == [True] * 5

    trio.run(main)


def test_cancellation_is_seen_by_every_call(enabled: None) -> None:
    """Calls that do not yield check for cancellation as well."""

    async def main() -> None:
        client, server = await make_pair()
        await server.send_all(b"x" * 100)
        for call in (
            partial(client.send_all, b"x"),
            partial(client.receive_some, 1),
            partial(client.socket.send, b"x"),
            partial(client.socket.recv, 1),
            partial(client.socket.recv_into, bytearray(1)),
        ):
            with trio.CancelScope() as scope:
                await call()  # without a cancellation
                scope.cancel()
                await call()
            assert scope.cancelled_caught
        with trio.move_on_after(0.02) as scope:
            while True:
                await client.send_all(b"x")
                await server.receive_some(100)
        assert scope.cancelled_caught, "a loop that never waits did not stop at its deadline"
        for stream in (client, server):
            await stream.aclose()

    trio.run(main)


def test_a_close_without_waiting_still_delivers(enabled: None) -> None:
    async def main() -> None:
        async with drop_ins() as (client, server):
            await client.send(b"goodbye")
            client.close()
            assert await server.recv(100) == b"goodbye"
            assert await server.recv(100) == b""
            with refused(errno.EBADF):
                await client.recv(1)
            assert client.fileno() == -1
            assert server.fileno() >= 0

    trio.run(main)


def test_operations_that_smc_r_does_not_support(enabled: None) -> None:
    async def main() -> None:
        async with drop_ins() as (client, _):
            with refused(errno.EINVAL):
                await client.recv(1, stdlib_socket.MSG_ERRQUEUE)
            client.setsockopt(stdlib_socket.SOL_SOCKET, SO_ZEROCOPY, 1)
            with refused(errno.EOPNOTSUPP):
                await client.send(b"x", MSG_ZEROCOPY)
            for sync in (client.detach, client.dup):
                with refused(errno.EOPNOTSUPP):
                    sync()
        with trio.socket.socket() as new:
            fast_open = stdlib_socket.MSG_FASTOPEN
            for attempt in (
                partial(new.sendto, b"x", fast_open, (LOOPBACK, 1)),
                partial(new.sendmsg, [b"x"], [], fast_open, (LOOPBACK, 1)),
            ):
                with refused(errno.EOPNOTSUPP):
                    await attempt()

    trio.run(main)


def test_a_socket_sends_urgent_data(enabled: None) -> None:
    async def main() -> None:
        async with drop_ins() as (client, server):
            assert await client.send(b"!", stdlib_socket.MSG_OOB) == 1
            assert server.stream is not None
            assert await server.stream.receive_urgent() == b"!"

    trio.run(main)


def test_sockets_of_the_standard_library(enabled: None) -> None:
    """hypercorn and AnyIO use sockets of the standard library to listen."""

    async def main() -> None:
        theirs = stdlib_socket.create_server((LOOPBACK, 0))
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(theirs))
        async with listener, trio.open_nursery() as nursery:
            accepted: list[trio.SocketStream] = []

            async def accept() -> None:
                accepted.append(await listener.accept())

            nursery.start_soon(accept)
            # `listen` was not called through Trio, so `accept` publishes the listener.
            await trio.testing.wait_all_tasks_blocked(0.05)
            client = await trio.open_tcp_stream(*theirs.getsockname())
        assert over_smc(cast(DropInSocket, client.socket))
        assert over_smc(cast(DropInSocket, accepted[0].socket))
        await accepted[0].aclose()
        await client.aclose()

    trio.run(main)


def test_a_connection_that_ended_before_it_was_accepted(enabled: None) -> None:
    """As over TCP, `accept` returns the connection with the peer's address, and the listener
    continues."""

    async def main() -> None:
        listener = trio.socket.socket()
        await listener.bind((LOOPBACK, 0))
        listener.listen()
        assert isinstance(listener, DropInSocket)
        names: list[object] = []

        async def abort() -> None:
            client = trio.socket.socket()
            await client.connect(listener.getsockname())
            assert isinstance(client, DropInSocket)
            assert client.stream is not None
            names.append(client.getsockname())
            client.stream.abort()

        with trio.fail_after(PATIENCE), listener:
            side = listener._side
            assert isinstance(side, Unconnected)
            assert side.listener is not None
            async with trio.open_nursery() as nursery:
                nursery.start_soon(abort)
                stream = await side.listener.accept()
            while not tcp_has_ended(stream):  # noqa: ASYNC110 - no event reports it
                await trio.sleep(0.01)
            ended, name = listener.wrap_stream(stream)
            assert [name] == names
            with ended, pytest.raises(ConnectionResetError):
                await ended.recv(1)

    trio.run(main)


def test_other_sockets_stay_as_they_are(enabled: None) -> None:
    async def main() -> None:
        one, other = trio.socket.socketpair()
        with one, other, trio.socket.socket(type=stdlib_socket.SOCK_DGRAM) as datagrams:
            for each in (one, other, datagrams):
                assert not isinstance(each, DropInSocket)

    trio.run(main)


def test_a_peer_that_knows_only_tcp(enabled: None) -> None:
    async def main() -> None:
        with stdlib_socket.create_server((LOOPBACK, 0)) as theirs:
            client = trio.socket.socket()
            with client:
                await client.connect(theirs.getsockname())
                with theirs.accept()[0] as peer:
                    peer.sendall(b"plain")
                    assert await client.recv(10) == b"plain"
                    assert isinstance(client, DropInSocket)
                    assert client.stream is not None
                    assert client.stream.fallback is not None
                    client.close()
                    assert peer.recv(1) == b""

    trio.run(main)


def test_connect_raises_if_smc_r_is_required(enabled: None) -> None:
    trio_smc.enable(trio_smc.Config(require_smc=True, handshake_timeout=0.5))

    async def main() -> None:
        with stdlib_socket.create_server((LOOPBACK, 0)) as theirs:
            client = trio.socket.socket()
            with pytest.raises(trio_smc.SmcUnavailable):
                await client.connect(theirs.getsockname())
            assert client.fileno() == -1

    trio.run(main)


@pytest.mark.parametrize("ports", [[], [("rxe0", 1)]])
@pytest.mark.parametrize("rnics", ["auto", ()])
def test_pyverbs_is_imported_before_the_run(
    enabled: None, ports: list[tuple[str, int]], rnics: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded_in_run: list[bool] = []

    def load() -> None:
        loaded_in_run.append(trio.lowlevel.in_trio_run())
        raise RnicError(errno.ENOSYS, "no pyverbs")

    async def main() -> None:
        pass

    monkeypatch.setattr(enable, "active_ports", lambda: ports)
    monkeypatch.setattr(pyverbs, "load", load)
    trio_smc.enable(dataclasses.replace(CONFIG, rnics=rnics))
    trio.run(main)
    assert loaded_in_run == ([False] if ports and rnics == "auto" else [])


def test_trios_decorator_for_tests_uses_smc_r(enabled: None) -> None:
    @trio.testing.trio_test
    async def connect() -> bool:
        client, server = await make_pair()
        async with client, server:
            assert isinstance(client.socket, DropInSocket)
            return over_smc(client.socket)

    assert connect()


def test_a_guest_run_uses_smc_r(enabled: None) -> None:
    """A host loop runs Trio beside its own work, like in graphical programs."""
    todo: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
    done: list[Outcome[str]] = []

    async def main() -> str:
        client, server = await make_pair()
        async with client, server:
            assert isinstance(client.socket, DropInSocket)
            assert over_smc(client.socket)
            await client.send_all(b"from the guest")
            return (await server.receive_some()).decode()

    trio.lowlevel.start_guest_run(
        main, run_sync_soon_threadsafe=todo.put, done_callback=done.append
    )
    while not done:
        todo.get(timeout=PATIENCE)()
    assert done[0].unwrap() == "from the guest"


async def test_enabled_inside_a_run() -> None:
    trio_smc.enable(CONFIG)
    try:
        async with drop_ins() as (client, server):
            assert over_smc(client)
            assert over_smc(server)
    finally:
        trio_smc.disable()
    with trio.socket.socket() as plain:
        assert not isinstance(plain, DropInSocket)


def test_disable_restores_trio() -> None:
    run, wrap = trio.run, trio.socket.from_stdlib_socket
    trio_smc.enable()
    assert trio.run is not run
    trio_smc.enable()  # a second call changes nothing
    trio_smc.disable()
    assert trio.run is run
    assert trio.socket.from_stdlib_socket is wrap


def test_a_program_with_a_factory_of_its_own_keeps_it(enabled: None) -> None:
    class Theirs(trio.abc.SocketFactory):
        def socket(self, *_: object) -> trio.socket.SocketType:
            raise RuntimeError("theirs")

    async def main() -> None:
        trio.socket.set_custom_socket_factory(Theirs())
        with pytest.raises(RuntimeError, match="theirs"):
            trio.socket.socket()

    trio.run(main)


def test_ports_are_known_before_connecting(enabled: None) -> None:
    """`trio.open_tcp_stream` with a local address defers the choice of a port to `connect`."""

    async def main() -> None:
        client, server = await make_pair(local_address="127.0.0.2")
        async with client, server:
            assert client.socket.getsockname()[0] == "127.0.0.2"

    trio.run(main)


def from_stdlib_socket(sock: stdlib_socket.socket) -> trio.socket.SocketType:
    return trio.socket.from_stdlib_socket(sock)


def from_descriptor(sock: stdlib_socket.socket) -> trio.socket.SocketType:
    with sock:
        return trio.socket.fromfd(sock.fileno(), sock.family, sock.type)


def from_taken_descriptor(sock: stdlib_socket.socket) -> trio.socket.SocketType:
    return trio.socket.socket(fileno=sock.detach())


def from_copy(sock: stdlib_socket.socket) -> trio.socket.SocketType:
    with trio.socket.from_stdlib_socket(sock) as original:
        return original.dup()


IPPROTO_MPTCP = 262  # linux/in.h; the socket module of Python 3.10 has no name for it
WAYS_IN = (from_stdlib_socket, from_descriptor, from_taken_descriptor, from_copy)


@pytest.mark.parametrize("way", WAYS_IN)
def test_every_way_from_the_standard_library_leads_to_smc_r(
    enabled: None, way: Callable[[stdlib_socket.socket], trio.socket.SocketType]
) -> None:
    """The listening socket, such as one of systemd, and the client's new socket."""

    async def main() -> None:
        listener = way(stdlib_socket.create_server((LOOPBACK, 0)))
        client = way(stdlib_socket.socket())
        accepted: list[trio.socket.SocketType] = []

        async def accept() -> None:
            accepted.append((await listener.accept())[0])

        with listener, client:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(accept)
                await wait_all_tasks_blocked()  # `accept` has published the listener
                await client.connect(listener.getsockname())
            for sock in (client, *accepted):
                assert isinstance(sock, DropInSocket)
                assert over_smc(sock)
            accepted[0].close()

    trio.run(main)


@pytest.mark.parametrize("way", WAYS_IN)
def test_a_connected_socket_of_the_standard_library(
    enabled: None, way: Callable[[stdlib_socket.socket], trio.socket.SocketType]
) -> None:
    """The socket stays on TCP with a reason, or is refused with this reason, and then the caller
    keeps it."""

    async def main() -> None:
        with stdlib_socket.create_server((LOOPBACK, 0)) as theirs:
            with way(stdlib_socket.create_connection(theirs.getsockname())) as sock:
                assert isinstance(sock, DropInSocket)
                assert sock.stream is not None
                assert sock.stream.fallback is not None
                assert sock.stream.fallback.reason is trio_smc.FallbackReason.ALREADY_CONNECTED
                await sock.send(b"plain")
                with theirs.accept()[0] as peer:
                    assert peer.recv(10) == b"plain"
            trio_smc.enable(trio_smc.Config(require_smc=True))
            connected = stdlib_socket.create_connection(theirs.getsockname())
            number = connected.fileno()
            with pytest.raises(trio_smc.SmcUnavailable, match="was connected before"):
                way(connected)
            if way is not from_descriptor:  # `from_descriptor` has closed its socket
                stdlib_socket.close(number)
                connected.detach()
            with theirs.accept()[0]:
                pass  # the connection may already be closed

    trio.run(main)


@pytest.mark.parametrize("case", ["at once", "after a failed attempt", "required"])
def test_a_socket_that_was_shut_down_first(case: str) -> None:
    """The connection is TCP with this reason, or is refused; after a failed attempt it is SMC-R."""
    reason = trio_smc.FallbackReason.ALREADY_SHUT_DOWN

    async def main() -> None:
        accepted: list[Any] = []
        with trio.socket.socket() as listener, trio.socket.socket() as client:
            await listener.bind(("127.0.0.1", 0))
            listener.listen()
            address = listener.getsockname()

            async def accept() -> None:
                accepted.append((await listener.accept())[0])

            with refused(errno.ENOTCONN):
                client.shutdown(stdlib_socket.SHUT_RD)
            if case == "required":
                for _ in range(2):  # the refusal does not end the shutdown
                    with pytest.raises(trio_smc.SmcUnavailable) as caught:
                        await client.connect(address)
                    assert caught.value.fallback.reason is reason
                return
            if case == "after a failed attempt":
                for error in (errno.ECONNREFUSED, errno.ECONNABORTED):  # as over TCP
                    with refused(error):
                        await client.connect(("127.0.0.1", 1))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(accept)
                await client.connect(address)
            stream = client.stream  # type: ignore[attr-defined]
            if case == "after a failed attempt":
                assert stream.mode is trio_smc.Mode.SMC_R
            else:
                assert stream.fallback.reason is reason
            for each in accepted:
                each.close()

    trio_smc.enable(trio_smc.Config(require_smc=case == "required"))
    try:
        trio.run(main)
    finally:
        trio_smc.disable()


@pytest.mark.parametrize("way", WAYS_IN)
def test_mptcp_is_refused_if_smc_r_is_required(
    enabled: None, way: Callable[[stdlib_socket.socket], trio.socket.SocketType]
) -> None:
    """An MPTCP socket moves data without SMC-R, and the kernel also accepts TCP clients on it."""
    kind = (stdlib_socket.AF_INET, stdlib_socket.SOCK_STREAM, IPPROTO_MPTCP)

    async def main() -> None:
        way(stdlib_socket.socket(*kind)).close()
        trio.socket.socket(*kind).close()
        trio_smc.enable(trio_smc.Config(require_smc=True))
        with pytest.raises(trio_smc.SmcUnavailable, match="MPTCP"):
            trio.socket.socket(*kind)
        sock = stdlib_socket.socket(*kind)
        number = sock.fileno()
        with pytest.raises(trio_smc.SmcUnavailable, match="MPTCP") as caught:
            way(sock)
        assert caught.value.fallback.reason is trio_smc.FallbackReason.MULTIPATH
        if way is not from_descriptor:  # `from_descriptor` has closed its socket
            stdlib_socket.close(number)
            sock.detach()

    trio.run(main)


def test_waiting_for_the_descriptor_of_a_socket(enabled: None) -> None:
    """Data does not arrive at the descriptor, but Trio's functions find the socket that owns it."""

    async def main() -> None:
        async with drop_ins() as (client, server):
            for waitable in (server, server.fileno()):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(trio.lowlevel.wait_readable, waitable)
                    await wait_all_tasks_blocked()
                    await client.send(b"x")
                assert await server.recv(10) == b"x"
                await trio.lowlevel.wait_writable(waitable)

    trio.run(main)


def test_anyio_connects_and_listens(enabled: None) -> None:
    async def echo(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.send(await stream.receive())

    def drop_in_sockets() -> list[DropInSocket]:
        # AnyIO gives no access to Trio's sockets.
        return [each for each in gc.get_objects() if isinstance(each, DropInSocket)]

    async def main() -> None:
        of_other_tests = drop_in_sockets()
        listener = await anyio.create_tcp_listener(local_host=LOOPBACK)
        async with listener, anyio.create_task_group() as group:
            group.start_soon(listener.serve, echo)
            port = listener.extra(anyio.abc.SocketAttribute.local_port)
            await trio.testing.wait_all_tasks_blocked(0.05)
            async with await anyio.connect_tcp(LOOPBACK, port) as client:
                await trio.testing.wait_all_tasks_blocked(0.05)  # the server has accepted
                new = [each for each in drop_in_sockets() if each not in of_other_tests]
                assert sum(over_smc(each) for each in new) == 2
                await client.send(b"by anyio")
                assert await client.receive() == b"by anyio"
            group.cancel_scope.cancel()

    trio.run(main)


# --- both directions at once ---------------------------------------------------------------------


@pytest.mark.parametrize("answered", [False, True], ids=["before-the-peer", "behind-the-peer"])
def test_a_shutdown_of_both_directions_is_a_close(enabled: None, answered: bool) -> None:
    async def main() -> None:
        async with drop_ins() as (client, server):
            name = client.getsockname()
            await client.send(b"last")
            client.shutdown(stdlib_socket.SHUT_RDWR)
            with trio.fail_after(PATIENCE):
                assert await server.recv(10) == b"last"
                assert await server.recv(10) == b""
                # The client sends C, not D: the server may not send either (RFC 7609, 4.8.1, 4A).
                assert await server.send(b"x") == 1
                with pytest.raises(BrokenPipeError):
                    await server.send(b"x")
                if answered:
                    server.close()
                    assert isinstance(client.stream, RdmaStream)
                    while not tcp_has_ended(client.stream):  # noqa: ASYNC110 - no event reports it
                        await trio.sleep(0.01)
            with pytest.raises(ConnectionResetError):
                await client.recv(10)  # the answer to the server's data
            assert await client.recv(10) == b""
            with pytest.raises(OSError, match=re.escape(f"[Errno {errno.EPIPE}]")):
                await client.send(b"x")
            assert client.getsockname() == name
            with pytest.raises(OSError, match=re.escape(f"[Errno {errno.ENOTCONN}]")):
                client.getpeername()
            client.close()
            assert client.fileno() == -1

    trio.run(main)


def test_a_shutdown_of_both_directions_leaves_unread_data_readable(enabled: None) -> None:
    """As over TCP, the peer receives the end, not a reset."""

    async def main() -> None:
        async with drop_ins() as (client, server):
            await server.send(b"unread")
            client.shutdown(stdlib_socket.SHUT_RDWR)
            with trio.fail_after(PATIENCE):
                assert await server.recv(10) == b""
                assert await client.recv(3) == b"unr"
                assert await client.recv(10) == b"ead"
                assert await client.recv(10) == b""

    trio.run(main)


def test_a_connection_that_was_reset_is_accepted_with_its_name(enabled: None) -> None:
    """Trio's sockets do the same, although the kernel no longer knows the name at that time."""

    async def main() -> None:
        listener = trio.socket.socket()
        await listener.bind((LOOPBACK, 0))
        listener.listen()
        assert isinstance(listener, DropInSocket)
        with listener, stdlib_socket.create_connection(listener.getsockname()) as client:
            name = client.getsockname()
            await wait_all_tasks_blocked(0.01)  # the listener has accepted the TCP connection
            linger = struct.pack("ii", 1, 0)
            client.setsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_LINGER, linger)
            client.close()
            with trio.fail_after(PATIENCE):
                accepted, peer = await listener.accept()
            with accepted:
                assert peer == name
                with pytest.raises(ConnectionResetError):
                    await accepted.recv(1)

    trio.run(main)


@pytest.mark.usefixtures("enabled")
def test_a_task_sends_while_another_one_waits_for_room() -> None:
    """As with a socket of Trio, only calls that wait exclude each other."""

    async def main() -> None:
        async with drop_ins() as (client, server):
            assert client.stream is not None
            whole = bytes(100_000)
            sent: list[int] = []

            async def send_all() -> None:
                await trio.SocketStream(client).send_all(whole)
                sent.append(len(whole))

            async def read(count: int) -> None:
                while count:
                    count -= len(await server.recv(count))

            with trio.fail_after(PATIENCE):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(send_all)
                    await wait_all_tasks_blocked(0.01)
                    ring = client.stream.statistics().bytes_sent
                    assert 0 < ring < len(whole)
                    await read(100)  # too little to wake a writer
                    await wait_all_tasks_blocked(0.01)
                    assert not sent
                    assert await client.send(bytes(10)) == 10
                    await wait_all_tasks_blocked(0.01)
                    with pytest.raises(trio.BusyResourceError):
                        await client.send(b"x")  # the first task has filled the ring
                    await read(len(whole) - 100 + 10)
            assert sent == [len(whole)]

    trio.run(main)


@pytest.mark.pure  # the test replaces a method of a class
@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("unread", [b"", b"unread"])
def test_no_end_leaves_before_data_is_refused(
    unread: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the end left earlier, data that answers it would count as received before the shutdown."""
    refuses: list[bool] = []
    send_done = Connection.send_done

    def noted(connection: Connection) -> None:
        refuses.append(connection.refuses_data)
        send_done(connection)

    monkeypatch.setattr(Connection, "send_done", noted)

    async def main() -> None:
        async with drop_ins() as (client, server):
            if unread:
                await client.send(unread)
                await server.recv(1, stdlib_socket.MSG_PEEK)
            server.shutdown(stdlib_socket.SHUT_RD)
            server.shutdown(stdlib_socket.SHUT_WR)
            assert refuses == [True] * bool(unread)
            assert await client.recv(1) == b""

    trio.run(main)


def _is_no_coroutine_function() -> int:
    return 0


async def _yields() -> AsyncIterator[int]:
    yield 0


async def _starts() -> None:
    """A coroutine function, which a program calls too early by mistake."""


def _errors_of_run() -> Iterator[str]:
    unused = _starts()
    mistakes: list[Any] = [unused, _is_no_coroutine_function, _yields, 0]
    for mistake in mistakes:
        with pytest.raises(TypeError) as caught:
            trio.run(mistake)
        yield re.sub("0x[0-9a-f]+", "", str(caught.value))
    unused.close()


def test_trio_explains_mistakes_in_calls_of_run() -> None:
    """The text is the same under `enable()`."""
    texts = [*_errors_of_run()]
    trio_smc.enable()
    try:
        assert [*_errors_of_run()] == texts
    finally:
        trio_smc.disable()
    assert "async function" in texts[0]
