"""Socket options of streams, as users set them, over SMC-R and over TCP."""

from __future__ import annotations

import errno
import inspect
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import wait_all_tasks_blocked

import trio_smc
from scripts import socket_options
from tests.datapath.datapath_pair import Pair
from tests.peers import endpoint_of, open_pair
from tests.streams.stream_pairs import SMALL_RING, Pairs, open_pairs, read, smc_config, tcp_config
from tests.tcp_ends import tcp_has_ended
from tests.timing import PATIENCE
from trio_smc import SmcStream
from trio_smc._base.observer import ObserverGroup
from trio_smc._base.timers import Timers
from trio_smc.host.tcp import CLOSE
from trio_smc.streams import socket_options as options_module
from trio_smc.streams.rdma_stream import RdmaStream
from trio_smc.streams.socket_options import OPTIONS, Owner, StreamOptions
from trio_smc.wire import llc

SOL, TCP = socket.SOL_SOCKET, socket.IPPROTO_TCP
NEVER = 1e6


@pytest.fixture
async def smc() -> AsyncIterator[Pairs]:
    async with open_pairs(smc_config()) as made:
        yield made


@pytest.fixture
async def pair(smc: Pairs) -> AsyncIterator[tuple[RdmaStream, RdmaStream]]:
    async with open_pair("stack", smc) as (client, server):
        assert isinstance(client, RdmaStream)
        assert isinstance(server, RdmaStream)
        yield client, server


@pytest.fixture
async def plain_pair() -> AsyncIterator[tuple[trio.SocketStream, trio.SocketStream]]:
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        client = await trio.testing.open_stream_to_socket_listener(listener)
        server = await listener.accept()
    async with client, server:
        yield client, server


@pytest.fixture(params=["smc-r", "tcp"])
async def stream(request: pytest.FixtureRequest) -> AsyncIterator[SmcStream]:
    config = smc_config() if request.param == "smc-r" else tcp_config()
    async with open_pairs(config) as made:
        both = await made.make()
        yield both[0]
        for each in both:
            each.abort()


# --- the table ---------------------------------------------------------------------------------


@pytest.mark.rfc("B/5")
def test_the_page_in_docs_is_the_table() -> None:
    assert socket_options.main(["--check"]) == 0
    text = socket_options.PAGE.read_text()
    for row in OPTIONS:
        assert f"`{row.name}`" in text


def test_the_table_has_each_option_once() -> None:
    keys = [row.key for row in OPTIONS]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert {row.owner for row in OPTIONS} == set(Owner)


def test_signatures_are_trios() -> None:
    for name in ("setsockopt", "getsockopt"):
        ours = inspect.signature(getattr(SmcStream, name)).parameters.values()
        trios = inspect.signature(getattr(trio.SocketStream, name)).parameters.values()
        assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in trios]


# --- arguments ---------------------------------------------------------------------------------


@pytest.mark.rfc("B/4")
async def test_values_have_the_forms_of_the_socket_module(stream: SmcStream) -> None:
    for value in (1, True, struct.pack("i", 1), bytearray(struct.pack("i", 1))):
        stream.setsockopt(TCP, socket.TCP_NODELAY, 0)
        assert stream.getsockopt(TCP, socket.TCP_NODELAY) == 0
        stream.setsockopt(TCP, socket.TCP_NODELAY, value)
        assert stream.getsockopt(TCP, socket.TCP_NODELAY) == 1
    assert stream.getsockopt(TCP, socket.TCP_NODELAY, 4) == struct.pack("i", 1)
    stream.setsockopt(TCP, socket.TCP_NODELAY, 7)
    assert stream.getsockopt(TCP, socket.TCP_NODELAY) == 1


async def test_wrong_arguments_raise_the_same_errors_as_trio(stream: SmcStream) -> None:
    with pytest.raises(TypeError):
        stream.setsockopt(TCP, socket.TCP_NODELAY, None)
    with pytest.raises(TypeError):
        stream.setsockopt(TCP, socket.TCP_NODELAY, 1, 4)
    with pytest.raises(OSError, match="Errno") as caught:
        stream.setsockopt(TCP, socket.TCP_NODELAY, None, 4)
    assert caught.value.errno == errno.EFAULT
    with pytest.raises(OSError, match="Errno") as caught:
        stream.setsockopt(TCP, socket.TCP_NODELAY, b"\1")
    assert caught.value.errno == errno.EINVAL
    with pytest.raises(TypeError):
        stream.setsockopt(TCP, socket.TCP_NODELAY, 1 << 40)
    with pytest.raises(OSError, match="Errno") as caught:
        stream.setsockopt(SOL, 12345, 1)
    assert caught.value.errno == errno.ENOPROTOOPT
    with pytest.raises(OSError, match="Errno") as caught:
        stream.setsockopt(SOL, socket.SO_ERROR, 1)
    assert caught.value.errno == errno.ENOPROTOOPT


async def test_a_closed_stream_has_no_options(stream: SmcStream) -> None:
    await stream.aclose()
    for call in (
        lambda: stream.setsockopt(TCP, socket.TCP_NODELAY, 1),
        lambda: stream.getsockopt(TCP, socket.TCP_NODELAY),
    ):
        with pytest.raises(OSError, match="Bad file descriptor") as caught:
            call()
        assert caught.value.errno == errno.EBADF


TIMES = [struct.pack("ll", seconds, 1000) for seconds in (0, 3, -1)]
VALUES = [0, 1, 5, -1, 70_000, b"", b"\1", b"reno", b"no such name", *TIMES]


def outcome_of(call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except OSError as error:
        return error.errno


async def test_options_of_tcp_have_the_values_and_errors_of_tcp(
    pair: tuple[RdmaStream, RdmaStream], plain_pair: tuple[trio.SocketStream, trio.SocketStream]
) -> None:
    keys = [row.key for row in OPTIONS if row.owner is Owner.TCP and row.key is not None]
    # TCP_MAXSEG reads what the kernel has estimated from segments.
    others = {(TCP, socket.TCP_INFO), (TCP, socket.TCP_MAXSEG), (SOL, socket.SO_BINDTODEVICE)}
    for key in {*keys} - others:
        for value in VALUES:
            over_smc, over_tcp = (
                [
                    outcome_of(stream.setsockopt, *key, value),
                    outcome_of(stream.getsockopt, *key),
                    outcome_of(stream.getsockopt, *key, 16),
                ]
                for stream in (pair[0], plain_pair[0])
            )
            assert over_smc == over_tcp, (key, value)


async def test_the_state_of_tcp_is_that_of_the_stream(
    pair: tuple[RdmaStream, RdmaStream], plain_pair: tuple[trio.SocketStream, trio.SocketStream]
) -> None:
    def states(streams: tuple[Any, Any]) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = []
        for stream in streams:
            read: Any = partial(stream.getsockopt, TCP, socket.TCP_INFO)
            found.append((read(1)[0], read(104)[0], read() & 0xFF))
        return found

    for ending in (None, 0, 1):
        if ending is not None:
            for streams in (pair, plain_pair):
                both: tuple[Any, Any] = streams
                await both[ending].send_eof()
                assert await both[1 - ending].receive_some() == b""
        with trio.fail_after(PATIENCE):
            while states(pair) != states(plain_pair):  # noqa: ASYNC110  # an acknowledgement
                await trio.sleep(0.001)


async def test_options_without_a_meaning_over_smc(pair: tuple[RdmaStream, RdmaStream]) -> None:
    client, _ = pair
    client.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 0x20)
    assert client.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) == 0x20
    assert client.socket.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) == 0x20
    for number in (19, 31):  # TCP_REPAIR, TCP_ULP
        with pytest.raises(OSError, match="over SMC-R") as caught:
            client.setsockopt(TCP, number, 1)
        assert caught.value.errno == errno.EOPNOTSUPP


async def test_options_work_until_the_stream_is_closed_though_the_peer_has_aborted(
    pair: tuple[RdmaStream, RdmaStream],
) -> None:
    client, server = pair
    assert server.getsockopt(SOL, socket.SO_ERROR) == 0
    client.abort()
    assert server.is_readable()
    await wait_all_tasks_blocked()
    assert tcp_has_ended(server), "TCP did not end after the answer to the abort"
    assert server.getsockopt(SOL, socket.SO_ERROR) == errno.ECONNRESET
    assert server.getsockopt(SOL, socket.SO_ERROR) == 0, "the error was reported twice"
    assert await server.receive_some() == b""
    for level, option in (
        (SOL, socket.SO_KEEPALIVE), (SOL, socket.SO_PRIORITY), (TCP, socket.TCP_NODELAY),
        (TCP, socket.TCP_CORK), (TCP, socket.TCP_KEEPIDLE), (TCP, socket.TCP_KEEPCNT),
        (TCP, socket.TCP_USER_TIMEOUT), (TCP, socket.TCP_QUICKACK),
    ):  # fmt: skip
        server.setsockopt(level, option, 1)
        assert server.getsockopt(level, option) == 1
    server.setsockopt(SOL, socket.SO_RCVBUF, 1)
    assert server.getsockopt(SOL, socket.SO_RCVBUF) == SMALL_RING
    server.setsockopt(SOL, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert server.getsockopt(TCP, socket.TCP_INFO, 1) == bytes((CLOSE,))
    assert server.getsockopt(SOL, socket.SO_TYPE) == socket.SOCK_STREAM
    with pytest.raises(OSError, match="Errno") as caught:
        server.getsockopt(SOL, 250)
    assert caught.value.errno == errno.ENOPROTOOPT


# --- buffers -----------------------------------------------------------------------------------


@pytest.mark.rfc("4.1/1", "4.1/2", "B/3")
async def test_so_rcvbuf_of_a_listener_sizes_later_connections() -> None:
    async with trio_smc.open_stack():
        [listener] = await trio_smc.open_listeners(0, host="127.0.0.1")

        async def sizes() -> tuple[object, object]:
            client = await trio_smc.open_stream(*listener.socket.getsockname())
            server = await listener.accept()
            assert client.mode == server.mode == "smc-r"
            found = [s.getsockopt(SOL, socket.SO_RCVBUF) for s in (client, server)]
            for stream in (client, server):
                stream.abort()
            return found[0], found[1]

        default = trio_smc.Config().receive_buffer_for("software")
        assert await sizes() == (default, default)
        # 65536 is half of the kernel's default, but it has an effect because the option is set.
        # Four bytes of an element are reserved for an eye catcher, and are not part of the ring.
        for size, rmbe in ((65532, 65536), (65536, 131072), (20_000, 32768), (1, SMALL_RING)):
            listener.socket.setsockopt(SOL, socket.SO_RCVBUF, size)
            assert await sizes() == (default, rmbe)


@pytest.mark.rfc("4.1/2", "B/3")
@pytest.mark.parametrize("eye_catcher", [False, True])
async def test_the_usable_ring_is_at_least_so_rcvbuf(eye_catcher: bool) -> None:
    """The client can send all bytes before the server reads, with and without an eye catcher."""
    async with trio_smc.open_stack(smc_config(rmbe_eye_catcher=eye_catcher)) as stack:
        [listener] = await trio_smc.open_listeners(0, host="127.0.0.1")
        for size in (32768 - 4, 32768 - 3, 32768, 65536):
            listener.socket.setsockopt(SOL, socket.SO_RCVBUF, size)
            client = await trio_smc.open_stream(*listener.socket.getsockname())
            server = await listener.accept()
            assert isinstance(client, RdmaStream)
            assert isinstance(server, RdmaStream)
            assert endpoint_of(stack, server).rmbe.first == (4 if eye_catcher else 0)
            with trio.fail_after(PATIENCE):
                await client.send_all(bytes(size))
            for stream in (client, server):
                stream.abort()
        await listener.aclose()


async def test_so_rcvbuf_of_a_stream_is_its_rmbe(pair: tuple[RdmaStream, RdmaStream]) -> None:
    client, _ = pair
    assert client.getsockopt(SOL, socket.SO_RCVBUF) == SMALL_RING
    client.setsockopt(SOL, socket.SO_RCVBUF, 100_000)
    assert client.getsockopt(SOL, socket.SO_RCVBUF) == SMALL_RING
    assert client.socket.getsockopt(SOL, socket.SO_RCVBUF) == 200_000


async def test_so_sndbuf_bounds_the_data_posted_at_a_time(
    smc: Pairs, pair: tuple[RdmaStream, RdmaStream]
) -> None:
    client, server = pair
    sender = endpoint_of(smc.client, client).connection.sender
    assert client.getsockopt(SOL, socket.SO_SNDBUF) == SMALL_RING, "size of the peer's element"
    client.setsockopt(SOL, socket.SO_SNDBUF, 1)
    assert client.getsockopt(SOL, socket.SO_SNDBUF) == options_module.MIN_SEND_BUFFER
    client.setsockopt(SOL, socket.SO_SNDBUF, 5000)
    assert client.getsockopt(SOL, socket.SO_SNDBUF) == 5000
    most = 0
    data = bytes(range(256)) * 1000

    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.send_all, data)
        got = b""
        while len(got) < len(data):
            got += await server.receive_some()
            most = max(most, sender.unacknowledged)
    assert got == data
    assert most <= 5000
    client.setsockopt(SOL, socket.SO_SNDBUF, -1)
    assert client.getsockopt(SOL, socket.SO_SNDBUF) == SMALL_RING


# --- merging -----------------------------------------------------------------------------------


@pytest.fixture
def no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the timer that posts deferred messages."""
    monkeypatch.setattr(options_module, "MAX_MERGE_DELAY", NEVER)


@pytest.mark.rfc("4.5.2/3")
@pytest.mark.usefixtures("no_timer")
@pytest.mark.parametrize("option", [socket.TCP_CORK, socket.TCP_NODELAY])
async def test_a_cork_holds_until_it_is_pulled(
    pair: tuple[RdmaStream, RdmaStream], option: int
) -> None:
    """TCP_NODELAY also posts the message, but the cork stays."""
    client, server = pair
    client.setsockopt(TCP, socket.TCP_CORK, 1)
    cdcs = client.statistics().cdcs_sent
    for word in (b"many ", b"small ", b"writes"):
        await client.send_all(word)
    await wait_all_tasks_blocked()
    assert not server.is_readable()
    client.setsockopt(TCP, option, option != socket.TCP_CORK)
    assert await server.receive_some() == b"many small writes"
    assert client.statistics().cdcs_sent == cdcs + 1
    assert client.getsockopt(TCP, socket.TCP_CORK) == (option != socket.TCP_CORK)
    client.setsockopt(TCP, socket.TCP_CORK, 0)
    await client.send_all(b"at once")
    assert await server.receive_some() == b"at once"


@pytest.mark.rfc("4.5.2/2")
async def test_a_cork_holds_for_a_bounded_time(
    pair: tuple[RdmaStream, RdmaStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options_module, "MAX_MERGE_DELAY", 0.01)
    client, server = pair
    client.setsockopt(TCP, socket.TCP_CORK, 1)
    for word in (b"one", b"two"):
        await client.send_all(word)
        with trio.fail_after(PATIENCE):
            assert await server.receive_some() == word


@pytest.mark.usefixtures("no_timer")
async def test_corked_data_comes_before_the_end(pair: tuple[RdmaStream, RdmaStream]) -> None:
    client, server = pair
    for stream in pair:
        stream.setsockopt(TCP, socket.TCP_CORK, 1)
    with trio.fail_after(PATIENCE):
        await client.send_all(b"request")
        await client.send_eof()
        assert await read(server, 7) == b"request"
        assert await server.receive_some() == b""
        await server.send_all(b"answer")
        await server.aclose()
        assert await read(client, 6) == b"answer"
        assert await client.receive_some() == b""


@pytest.mark.usefixtures("no_timer")
@pytest.mark.parametrize("option", [(socket.TCP_CORK, 1), (socket.TCP_NODELAY, 0)])
async def test_large_writes_are_not_held(
    pair: tuple[RdmaStream, RdmaStream], option: tuple[int, int]
) -> None:
    """Sending a mutable buffer that is larger than the window needs no timer."""
    client, server = pair
    client.setsockopt(TCP, *option)
    data = bytes(range(256)) * 1024
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.send_all, bytearray(data))
            assert await read(server, len(data) - SMALL_RING) == data[:-SMALL_RING]
        client.setsockopt(TCP, socket.TCP_CORK, 0)
        assert await read(server, SMALL_RING) == data[-SMALL_RING:]


@pytest.mark.rfc("4.5.2/1")
@pytest.mark.usefixtures("no_timer")
@pytest.mark.parametrize("checkpoints", ["strict", "amortised"])
async def test_without_nodelay_small_writes_still_need_no_timer(checkpoints: str) -> None:
    async with open_pairs(smc_config(checkpoints=checkpoints)) as pairs:
        client, server = await pairs.make()
        assert client.getsockopt(TCP, socket.TCP_NODELAY) == 1
        client.setsockopt(TCP, socket.TCP_NODELAY, 0)
        with trio.fail_after(PATIENCE):
            for number in range(200):
                await client.send_all(bytes([number]))
            assert await read(server, 200) == bytes(range(200))
        for stream in (client, server):
            await stream.aclose()


# --- keepalive ---------------------------------------------------------------------------------


@pytest.mark.rfc("4.5.3/1")
async def test_the_shortest_keepalive_decides_how_soon_an_idle_link_is_tested(smc: Pairs) -> None:
    first, second = await smc.make(), await smc.make()
    assert isinstance(first[0], RdmaStream)
    group = endpoint_of(smc.client, first[0]).group
    usual = group.config.test_link_interval
    assert group.test_interval == usual
    first[0].setsockopt(TCP, socket.TCP_KEEPIDLE, 5)
    assert group.test_interval == usual, "without SO_KEEPALIVE the time has no effect"
    first[0].setsockopt(SOL, socket.SO_KEEPALIVE, 1)
    assert group.test_interval == 5
    second[0].setsockopt(SOL, socket.SO_KEEPALIVE, 1)
    assert group.test_interval == 5
    second[0].setsockopt(TCP, socket.TCP_KEEPIDLE, 3)
    assert group.test_interval == 3
    second[0].setsockopt(TCP, socket.TCP_KEEPIDLE, 7200)
    assert group.test_interval == 5
    first[0].setsockopt(SOL, socket.SO_KEEPALIVE, 0)
    assert group.test_interval == usual, "an upper bound"
    first[0].setsockopt(SOL, socket.SO_KEEPALIVE, 1)
    for stream in (*first, *second):
        await stream.aclose()
    assert group.test_interval == usual


@pytest.mark.rfc("4.5.3/3")
async def test_keepalive_probes_of_tcp_are_answered(pair: tuple[RdmaStream, RdmaStream]) -> None:
    """Keepalive probes and their answers are the only TCP segments while both ends are open."""
    sock = pair[0].socket
    for name, value in (
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, 1),
        (socket.TCP_KEEPIDLE, 1),
    ):
        sock.setsockopt(TCP, name, value)
    sock.setsockopt(SOL, socket.SO_KEEPALIVE, 1)
    with trio.fail_after(PATIENCE):
        while True:
            # struct tcp_info: milliseconds since TCP sent data, and since TCP received an ACK.
            info = struct.unpack_from("8x13I", sock.getsockopt(TCP, socket.TCP_INFO, 60))
            if info[9] > 900 and info[12] < 500:
                break
            await trio.sleep(0.05)
    await pair[0].send_all(b"still there")
    assert await pair[1].receive_some(100) == b"still there"


@pytest.mark.rfc("4.5.3/2")
async def test_keepalive_probes_of_tcp_are_not_closer_than_a_bound(
    pair: tuple[RdmaStream, RdmaStream],
) -> None:
    client, _ = pair
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        assert client.getsockopt(TCP, option) == client.socket.getsockopt(TCP, option)
        for seconds in (1, 500):
            client.setsockopt(TCP, option, seconds)
            assert client.getsockopt(TCP, option) == seconds
            least = options_module.MIN_TCP_KEEPALIVE
            assert client.socket.getsockopt(TCP, option) == max(seconds, least)
        with pytest.raises(OSError, match="Invalid") as caught:
            client.setsockopt(TCP, option, 0)
        assert caught.value.errno == errno.EINVAL
        assert client.getsockopt(TCP, option) == 500
    assert client.socket.getsockopt(SOL, socket.SO_KEEPALIVE) == 0
    client.setsockopt(SOL, socket.SO_KEEPALIVE, 5)
    assert client.getsockopt(SOL, socket.SO_KEEPALIVE) == 1
    assert client.socket.getsockopt(SOL, socket.SO_KEEPALIVE) == 1
    client.setsockopt(TCP, socket.TCP_KEEPCNT, 3)
    assert client.getsockopt(TCP, socket.TCP_KEEPCNT) == 3
    assert client.socket.getsockopt(TCP, socket.TCP_KEEPCNT) == 3


class TestLinks(ObserverGroup):
    """Records the times at which this side sends TEST LINK requests."""

    __test__ = False

    def __init__(self) -> None:
        super().__init__(())
        self.times: list[float] = []
        self.second = trio.Event()

    def llc(self, link: object, outgoing: bool, message: bytes) -> None:
        decoded = llc.decode_untrusted(message)
        if outgoing and isinstance(decoded, llc.TestLink) and not decoded.reply:
            self.times.append(trio.current_time())
            if len(self.times) == 2:
                self.second.set()


async def test_an_idle_link_is_tested_once_for_all_its_connections() -> None:
    async with open_pairs(smc_config(), stacks=2) as pairs:
        streams = [*await pairs.make(), *await pairs.make()]
        for stream in streams[::2]:
            stream.setsockopt(SOL, socket.SO_KEEPALIVE, 1)
            stream.setsockopt(TCP, socket.TCP_KEEPIDLE, 1)
        pairs.client.runtime.groups.observer = observer = TestLinks()
        start = trio.current_time()
        with trio.fail_after(PATIENCE):
            await observer.second.wait()
        assert observer.times[0] - start >= 0.99
        assert observer.times[1] - observer.times[0] >= 0.99
        for stream in streams:
            await stream.aclose()


# --- options of a listener ---------------------------------------------------------------------


async def test_accepted_streams_inherit_options_of_the_listening_socket(smc: Pairs) -> None:
    listening = smc.listener.socket
    for level, option, value in (
        (SOL, socket.SO_KEEPALIVE, 1), (TCP, socket.TCP_KEEPIDLE, 4),
        (TCP, socket.TCP_USER_TIMEOUT, 60_000), (SOL, socket.SO_SNDBUF, 8000),
        (SOL, socket.SO_OOBINLINE, 1),
    ):  # fmt: skip
        listening.setsockopt(level, option, value)
    client, server = await smc.make()
    assert isinstance(server, RdmaStream)
    assert server.getsockopt(SOL, socket.SO_KEEPALIVE) == 1
    assert server.getsockopt(TCP, socket.TCP_KEEPIDLE) == 4
    assert endpoint_of(smc.server, server).group.test_interval == 4
    assert server.getsockopt(TCP, socket.TCP_USER_TIMEOUT) == 60_000
    assert server.getsockopt(SOL, socket.SO_SNDBUF) == 8000
    assert server.getsockopt(SOL, socket.SO_OOBINLINE) == 1
    assert client.getsockopt(SOL, socket.SO_KEEPALIVE) == 0
    assert client.getsockopt(SOL, socket.SO_OOBINLINE) == 0
    for stream in (client, server):
        await stream.aclose()


# --- linger ------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["stream", "socket", "listener"])
async def test_closing_with_linger_0_is_an_abort(smc: Pairs, by: str) -> None:
    value = struct.pack("ii", 1, 0)
    if by == "listener":
        smc.listener.socket.setsockopt(SOL, socket.SO_LINGER, value)
    client, server = await smc.make()
    if by == "stream":
        server.setsockopt(SOL, socket.SO_LINGER, value)
    elif by == "socket":
        server.socket.setsockopt(SOL, socket.SO_LINGER, value)
    assert server.getsockopt(SOL, socket.SO_LINGER, 8) == value
    await server.aclose()
    with pytest.raises(trio.BrokenResourceError) as caught:
        await client.receive_some()
    assert isinstance(caught.value.__cause__, ConnectionResetError)
    await client.aclose()


async def test_closing_with_linger_on_is_no_reset(
    smc: Pairs, pair: tuple[RdmaStream, RdmaStream]
) -> None:
    client, server = pair
    connections = [
        endpoint_of(stack, end).connection
        for stack, end in ((smc.client, client), (smc.server, server))
    ]
    server.setsockopt(SOL, socket.SO_LINGER, struct.pack("ii", 1, 5))
    await server.send_all(b"last words")
    await server.aclose()
    assert await read(client, 10) == b"last words"
    assert await client.receive_some() == b""
    await client.aclose()
    assert [(each.state, each.error) for each in connections] == [("CLOSED", None)] * 2


# --- user timeout ------------------------------------------------------------------------------


async def test_a_send_that_the_peer_does_not_read_times_out(smc: Pairs) -> None:
    client, server = await smc.clogged()
    client.setsockopt(TCP, socket.TCP_USER_TIMEOUT, 50)
    with trio.fail_after(PATIENCE), pytest.raises(trio.BrokenResourceError) as caught:
        await client.send_all(b"more")
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert caught.value.__cause__.errno == errno.ETIMEDOUT
    assert client.getsockopt(SOL, socket.SO_ERROR) == 0, "the error was reported twice"
    assert await server.receive_some(2 * SMALL_RING) == bytes(SMALL_RING)
    with pytest.raises(trio.BrokenResourceError):
        await server.receive_some()
    for stream in (client, server):
        await stream.aclose()


class UnusedGroup:
    """A link group that must get no keepalive request."""

    def keep_alive(self, user: object, seconds: float | None) -> None:
        raise AssertionError


class Clocked:
    """A connection on fake links, its options, and a clock that the test controls."""

    def __init__(self, milliseconds: int) -> None:
        self.pair = Pair()
        self.now = 0.0
        self.timers = Timers(lambda: self.now, lambda: None)
        self.tcp = socket.socket()
        options = StreamOptions(self.pair.a, UnusedGroup(), self.tcp, self.timers, None)  # type: ignore[arg-type]
        options.set(TCP, socket.TCP_USER_TIMEOUT, milliseconds, None)
        assert options.get(TCP, socket.TCP_USER_TIMEOUT) == milliseconds

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while self.timers.next_deadline() <= end:
            self.now = self.timers.next_deadline()
            self.timers.run_due()
        self.now = end

    @property
    def state(self) -> str:
        return self.pair.a.state

    def close(self) -> None:
        self.tcp.close()
        self.pair.close()


@pytest.fixture
def clocked() -> Iterator[Clocked]:
    made = Clocked(10_000)
    yield made
    made.close()


def test_the_user_timeout_ignores_idle_time(clocked: Clocked) -> None:
    clocked.wait(1000)
    clocked.pair.a.send(memoryview(b"x"))
    clocked.wait(9)
    clocked.pair.settle()
    clocked.wait(1000)
    assert clocked.state == "ACTIVE"


def test_the_user_timeout_needs_deliveries(clocked: Clocked) -> None:
    a = clocked.pair.a
    for _ in range(5):
        a.send(memoryview(b"x"))
        clocked.wait(9)
        clocked.pair.ab.deliver(2)
        clocked.pair.ab.complete(1)
        a.send(memoryview(b"x"))
    assert clocked.state == "ACTIVE", "the timeout passed although data arrived"
    clocked.wait(9.9)
    assert clocked.state == "ACTIVE"
    clocked.wait(1.2)
    assert clocked.state == "PEERABORTWAIT"
    assert isinstance(a.error, TimeoutError)


def test_the_user_timeout_needs_a_window_while_a_task_waits_for_one(clocked: Clocked) -> None:
    a, b = clocked.pair.connections
    a.send(memoryview(bytes(clocked.pair.size[1])))
    clocked.pair.settle()
    clocked.wait(1000)
    assert clocked.state == "ACTIVE", "the timeout passed although no task waits"
    assert a.send(memoryview(b"more")) == 0
    a.on_writable = lambda: None
    clocked.wait(9)
    b.receiver.receive(5000)
    clocked.pair.settle()
    assert a.send(memoryview(bytes(6000))) == 5000
    clocked.pair.settle()
    a.on_writable = lambda: None
    clocked.wait(9)
    assert clocked.state == "ACTIVE"
    clocked.wait(2.2)
    assert clocked.state == "PEERABORTWAIT"


def test_turning_the_user_timeout_off_ends_the_watch() -> None:
    clocked = Clocked(1000)
    try:
        clocked.pair.a.send(memoryview(b"x"))
        clocked.wait(0.5)
        options = StreamOptions(clocked.pair.a, UnusedGroup(), clocked.tcp, clocked.timers, None)  # type: ignore[arg-type]
        options.set(TCP, socket.TCP_USER_TIMEOUT, 100, None)
        options.set(TCP, socket.TCP_USER_TIMEOUT, 0, None)
        clocked.wait(0.4)
        assert clocked.state == "ACTIVE"
        with pytest.raises(OSError, match="Invalid"):
            options.set(TCP, socket.TCP_USER_TIMEOUT, -1, None)
        clocked.wait(2)
        assert clocked.state == "PEERABORTWAIT"
        clocked.wait(70)
        clocked.pair.settle()
        clocked.pair.a.on_timer()
        clocked.wait(2)
        assert clocked.state == "CLOSED"
        assert clocked.timers.next_deadline() == float("inf")
    finally:
        clocked.close()
