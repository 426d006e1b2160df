"""`Stack` and `open_stack`: views, counters, and the end of a stack."""

from __future__ import annotations

import contextlib
import errno
import gc
import socket
import threading
import traceback
import warnings
from collections.abc import AsyncIterator
from functools import partial

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
    read_exactly,
    read_to_end,
    wait_until_freed,
)
from tests.peers import check_echo, echo
from tests.timing import PATIENCE
from trio_smc import (
    Config,
    Fallback,
    LinkGroup,
    Mode,
    SmcListener,
    SmcSocket,
    SmcStream,
    SoftRnic,
    Stack,
    StreamStatistics,
)
from trio_smc._base.reasons import Diagnosis


@contextlib.asynccontextmanager
async def two_stacks() -> AsyncIterator[tuple[Stack, Stack, SmcListener]]:
    """Open a client's stack, a server's stack, and a listener of the server."""
    async with trio_smc.open_stack(QUICK) as server, trio_smc.open_stack(QUICK) as client:
        [listener] = await server.open_listeners(0, host=HOST)
        yield client, server, listener


def pollers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "trio_smc" in thread.name]


# --- the stack of a call -------------------------------------------------------------------------


async def test_calls_use_the_stack_around_them() -> None:
    async with trio_smc.open_stack(QUICK) as outer:
        [listener] = await trio_smc.open_listeners(0, host=HOST)
        async with trio_smc.open_stack(QUICK) as inner:
            stream = await trio_smc.open_stream(*address_of(listener))
            await close_all(stream, await listener.accept())
            assert inner.statistics().connections == 1
            assert outer.statistics().connections == 1
        stream = await trio_smc.open_stream(*address_of(listener))
        await close_all(stream, await listener.accept())
        assert outer.statistics().connections == 3


@pytest.mark.rfc("2.2.4/4", "A.2.1/2")
async def test_peer_ids_are_new_at_every_start() -> None:
    seen = set()
    for _ in range(3):
        async with trio_smc.open_stack() as one, trio_smc.open_stack() as two:
            for stack in (one, two):
                assert len(stack.peer_id) == 8
                assert stack.peer_id[2:] == stack.rnics[0].mac
                seen.add(stack.peer_id)
    assert len(seen) == 6


async def test_named_rnics_belong_to_one_stack_at_a_time() -> None:
    names = (SoftRnic("left"), SoftRnic("right"))
    async with trio_smc.open_stack(Config(rnics=names)) as stack:
        assert stack.rnics == names
        assert len(pollers()) == 2
        with pytest.raises(OSError, match="is open") as caught:
            async with trio_smc.open_stack(Config(rnics=names)):
                raise AssertionError("opened twice")
        assert caught.value.errno == errno.EBUSY
    assert pollers() == []
    async with trio_smc.open_stack(Config(rnics=names)) as stack:
        [listener] = await stack.open_listeners(0, host=HOST)
        await check_serves(stack, listener)


def test_the_default_stack_of_each_run() -> None:
    seen: set[bytes] = set()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            [listener] = await nursery.start(partial(trio_smc.serve, echo, 0, host=HOST))
            async with await trio_smc.open_stream(*address_of(listener)) as stream:
                assert stream.link_group is not None
                seen.add(stream.link_group.peer_id)
                await check_echo(stream)
            nursery.cancel_scope.cancel()

    for _ in range(3):
        trio.run(main)
        assert pollers() == []
    assert len(seen) == 3


def test_a_stream_left_open_on_the_default_stack() -> None:
    kept: list[SmcStream] = []

    async def main() -> None:
        [listener] = await trio_smc.open_listeners(0, host=HOST)
        kept.append(await trio_smc.open_stream(*address_of(listener)))
        await close_all(await listener.accept(), listener)

    with pytest.warns(ResourceWarning, match="was open when its stack was closed"):
        trio.run(main)
    assert pollers() == []


def test_a_failed_default_stack_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        with monkeypatch.context() as patch:
            patch.setattr("os.eventfd", no_descriptors)
            with pytest.raises(trio_smc.NoStack, match="no default stack") as caught:
                await trio_smc.open_stream(HOST, 1)
            assert caught.value.errno == errno.EMFILE
            [line] = traceback.format_exception_only(caught.value)
            assert line.startswith("trio_smc.NoStack: ")
        listeners = await trio_smc.open_listeners(0, host=HOST)
        await close_all(*listeners)

    def no_descriptors(*args: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    trio.run(main)


# --- views ---------------------------------------------------------------------------------------


async def test_views_of_link_groups() -> None:
    async with two_stacks() as (client, server, listener):
        assert not [*client.link_groups, *server.link_groups]
        streams = [*await connect(client, listener), *await connect(client, listener)]
        for stack, peer, role in ((client, server, "client"), (server, client, "server")):
            [group] = stack.link_groups
            assert isinstance(group, LinkGroup)
            assert (group.role, group.kind, group.peer_id) == (role, "single", peer.peer_id)
            [link] = group.links
            assert (link.number, link.state, link.connections) == (1, "ACTIVE", 2)
            assert link.rnic is stack.rnics[0]
            assert sum(rmb.in_use for rmb in group.rmbs) == 2
            assert {rmb.element_size for rmb in group.rmbs} == {16384}
            assert all(1 <= rmb.elements <= 255 for rmb in group.rmbs)
        [mine], [other] = client.link_groups, server.link_groups
        assert mine.links[0].user_id == other.links[0].peer_user_id != 0
        assert mine.links[0].peer_user_id == other.links[0].user_id != 0
        assert streams[0].link_group == streams[2].link_group == mine != other
        assert len({mine, streams[0].link_group}) == 1
        for view in (mine, mine.links[0], mine.rmbs[0]):
            assert view == type(view)(*[getattr(view, name) for name in ("_core",)], *(
                [lambda: None] if isinstance(view, LinkGroup) else []
            ))  # fmt: skip
            for name in ("role", "number", "in_use", "anything"):
                with pytest.raises(AttributeError):
                    setattr(view, name, 1)
        assert "single" in repr(mine)
        assert "ACTIVE" in repr(mine.links[0])
        assert "16384" in repr(mine.rmbs[0])
        await close_all(*streams)
        await wait_until_freed(client)
        assert mine.links[0].connections == 0
        assert sum(rmb.in_use for rmb in mine.rmbs) == 0
    assert mine.state == "GONE"
    assert mine.links == ()
    assert mine.rmbs == ()


async def test_a_stack_connected_to_itself() -> None:
    async with trio_smc.open_stack(QUICK) as stack:
        [listener] = await stack.open_listeners(0, host=HOST)
        mine, other = await connect(stack, listener)
        assert {group.role for group in stack.link_groups} == {"client", "server"}
        assert {group.peer_id for group in stack.link_groups} == {stack.peer_id}
        assert mine.link_group != other.link_group
        await check_talk(mine, other)
        await close_all(mine, other)


@pytest.mark.parametrize("side", ["client", "server"])
async def test_terminate_breaks_the_streams_of_a_group(side: str) -> None:
    async with two_stacks() as (client, server, listener):
        mine, other = await connect(client, listener)
        [group] = (client if side == "client" else server).link_groups
        group.terminate()
        for stream in (mine, other):
            with trio.fail_after(PATIENCE), pytest.raises(trio.BrokenResourceError):
                await stream.receive_some()
        with trio.fail_after(PATIENCE):
            while client.link_groups or server.link_groups:  # noqa: ASYNC110  # no event
                await trio.sleep(0.001)
        group.terminate()
        await close_all(mine, other)
        await check_serves(client, listener)


@pytest.mark.parametrize("side", ["client", "server"])
async def test_delete_the_only_link(side: str) -> None:
    async with two_stacks() as (client, server, listener):
        mine, other = await connect(client, listener)
        [group] = (client if side == "client" else server).link_groups
        with pytest.raises(ValueError, match="no link 7"):
            group.delete_link(7)
        await check_talk(mine, other)
        group.delete_link(group.links[0].number)
        for stream in (mine, other):
            with trio.fail_after(PATIENCE), pytest.raises(trio.BrokenResourceError):
                await stream.receive_some()
        assert group.state == "GONE"
        with pytest.raises(ValueError, match="no link 1"):
            group.delete_link(1)
        await close_all(mine, other)
        await check_serves(client, listener)


# --- counters ------------------------------------------------------------------------------------


async def test_statistics_agree() -> None:
    async with two_stacks() as (client, server, listener):
        for number in range(3):
            mine, other = await connect(client, listener)
            await mine.send_all(bytes(1000 + number))
            await read_exactly(other, 1000 + number)
            await other.send_all(bytes(7))
            await read_exactly(mine, 7)
            here, there = mine.statistics(), other.statistics()
            assert (here.bytes_sent, here.bytes_received) == (1000 + number, 7)
            assert (there.bytes_sent, there.bytes_received) == (7, 1000 + number)
            assert here.writes >= 1
            assert here.cdcs_sent >= 1
            await close_all(mine, other)
            await wait_until_freed(client)
            await wait_until_freed(server)
        tcp = await plain_client(listener)
        await close_all(tcp, await listener.accept())
        here_all, there_all = client.statistics(), server.statistics()
        assert (here_all.bytes_sent, there_all.bytes_sent) == (3003, 21)
        assert (here_all.bytes_received, there_all.bytes_received) == (21, 3003)
        assert here_all.cdcs_sent == there_all.cdcs_received
        assert here_all.cdcs_received == there_all.cdcs_sent
        for statistics in (here_all, there_all):
            assert (statistics.connections, statistics.open_connections) == (3, 0)
            assert (statistics.handshakes, statistics.handshakes_failed) == (3, 0)
            assert (statistics.buffers_allocated, statistics.buffers_reused) == (3, 2)
            assert (statistics.link_groups, statistics.failovers) == (1, 0)
            assert (statistics.unknown_tokens, statistics.stale_cdcs) == (0, 0)
            assert statistics.refused == 0
        assert here_all.fallbacks == {}
        assert there_all.fallbacks == {("local", "peer-not-capable"): 1}
    assert client.statistics() == here_all


async def test_bytes_over_tcp_are_counted_without_the_handshakes() -> None:
    nothing = Config(rnics=(), discovery="assume")
    async with (
        trio_smc.open_stack(ASSUME) as client,
        trio_smc.open_stack(nothing) as server,
    ):
        [listener] = await server.open_listeners(0, host=HOST)
        async with listener:
            mine, other = await connect(client, listener)
            assert mine.fallback == Fallback.from_peer(Diagnosis.NO_DEVICE)
            assert mine.statistics() == other.statistics() == StreamStatistics()
            await mine.send_all(bytes(1000))
            await read_exactly(other, 1000)
            await other.send_all(bytes(7))
            await mine.send_eof()  # a FIN does not count as a byte
            assert await other.receive_some() == b""
            both = (
                (client, mine, StreamStatistics(bytes_sent=1000, bytes_received=7)),
                (server, other, StreamStatistics(bytes_sent=7, bytes_received=1000)),
            )
            await read_exactly(mine, 7)
            for _ in ("open", "closed"):
                for stack, stream, expected in both:
                    assert stream.statistics() == expected
                    counted = stack.statistics()
                    assert counted.tcp_bytes_sent == expected.bytes_sent
                    assert counted.tcp_bytes_received == expected.bytes_received
                    assert (counted.bytes_sent, counted.bytes_received) == (0, 0)
                await close_all(mine, other)


async def test_statistics_are_frozen() -> None:
    async with trio_smc.open_stack() as stack:
        statistics = stack.statistics()
        with pytest.raises(AttributeError):
            statistics.connections = 1  # type: ignore[misc]
        with pytest.raises(TypeError):
            statistics.fallbacks["local", "policy"] = 1  # type: ignore[index]
        assert statistics == stack.statistics()


# --- the end of a stack --------------------------------------------------------------------------


@pytest.mark.parametrize("unread", [False, True], ids=["all-read", "unread"])
async def test_open_streams_are_closed_as_sockets_are(unread: bool) -> None:
    async with trio_smc.open_stack(QUICK) as server:
        [listener] = await server.open_listeners(0, host=HOST)
        with pytest.warns(ResourceWarning, match="open when its stack") as caught:  # noqa: PT031
            async with trio_smc.open_stack(QUICK) as client:
                mine, other = await connect(client, listener)
                plain, accepted = await open_tcp(client)
                for stream in (mine, plain):
                    await stream.send_all(b"sent")
                if unread:
                    for peer in (other, accepted):
                        await peer.send_all(b"unread")
        assert len(caught) == 2
        with trio.fail_after(PATIENCE):
            if unread:
                assert await other.receive_some() == b"sent"
                with pytest.raises(trio.BrokenResourceError) as there:
                    await other.receive_some()
                assert isinstance(there.value.__cause__, ConnectionResetError)
                assert isinstance(await read_to_end(accepted), ConnectionResetError)
            else:
                for peer in (other, accepted):
                    assert await peer.receive_some() == b"sent"
                    assert await peer.receive_some() == b""
        for stream in (mine, plain):
            with pytest.raises(trio.ClosedResourceError):
                await stream.send_all(b"x")
            with pytest.raises(trio.ClosedResourceError):
                await stream.receive_some()
        await close_all(mine, other, plain, accepted)
        await wait_until_freed(server)
    assert pollers() == []


async def open_tcp(stack: Stack) -> tuple[SmcStream, trio.SocketStream]:
    async with plain_server() as server:
        return await stack.open_stream(*address_of(server)), await server.accept()


async def test_streams_waiting_when_the_stack_is_left() -> None:
    async with two_stacks() as (_, _, listener), trio.open_nursery() as nursery:
        with pytest.warns(ResourceWarning):  # noqa: PT031
            async with trio_smc.open_stack(QUICK) as client:
                mine, other = await connect(client, listener)

                async def wait() -> None:
                    with pytest.raises(trio.ClosedResourceError):
                        await mine.receive_some()

                nursery.start_soon(wait)
                await trio.testing.wait_all_tasks_blocked()
        await close_all(other)


async def test_warnings_that_are_errors_are_raised_last() -> None:
    """`open_stack` raises the warning only after the stack is closed completely."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ResourceWarning):
            async with two_stacks() as (client, server, listener):
                streams = await connect(client, listener)
    assert pollers() == []
    assert client.statistics().open_connections == server.statistics().open_connections == 0
    await close_all(*streams)


@pytest.mark.rfc("4.8.3/1")
async def test_closed_streams_are_finished() -> None:
    """Sent data arrives although the stack ends at once."""
    async with trio_smc.open_stack(QUICK) as server:
        [listener] = await server.open_listeners(0, host=HOST)
        async with trio.open_nursery() as nursery:

            async def read() -> None:
                async with await listener.accept() as stream:
                    await trio.sleep(0.05)
                    assert await read_to_end(stream) == bytes(16000)

            nursery.start_soon(read)
            async with trio_smc.open_stack(QUICK) as client:
                stream = await client.open_stream(*address_of(listener))
                await stream.send_all(bytes(16000))
                await stream.aclose()


async def test_closed_streams_are_finished_in_time() -> None:
    """The end of a stack waits at most shutdown_timeout for a peer that neither reads nor
    closes."""
    config = Config(receive_buffer=16384, shutdown_timeout=0.05)
    async with trio_smc.open_stack(QUICK) as server:
        [listener] = await server.open_listeners(0, host=HOST)
        with trio.fail_after(PATIENCE):
            async with trio_smc.open_stack(config) as client:
                stream, other = await connect(client, listener)
                await stream.aclose()
        with contextlib.suppress(trio.BrokenResourceError):
            assert await other.receive_some() == b""
        await other.aclose()
        await wait_until_freed(server)


async def test_calls_fail_after_the_end_of_the_stack() -> None:
    async with trio_smc.open_stack(QUICK) as stack:
        [listener] = await stack.open_listeners(0, host=HOST)
    with pytest.raises(trio.ClosedResourceError):
        await stack.open_stream(HOST, 1)
    with pytest.raises(trio.ClosedResourceError):
        await stack.open_listeners(0)
    with pytest.raises(trio.ClosedResourceError):
        await stack.serve(echo, 0)
    with pytest.raises(trio.ClosedResourceError):
        await listener.accept()
    await listener.aclose()


async def test_a_task_that_outlives_the_stack() -> None:
    """The task has inherited the stack with its context."""
    left = trio.Event()

    async def late() -> None:
        await left.wait()
        with pytest.raises(trio.ClosedResourceError):
            await trio_smc.open_stream(HOST, 1)

    async with trio.open_nursery() as nursery:
        async with trio_smc.open_stack(QUICK):
            nursery.start_soon(late)
        left.set()


@pytest.mark.parametrize(
    "error", [ValueError("user"), KeyboardInterrupt(), ExceptionGroup("group", [OSError()])]
)
async def test_exceptions_of_the_block_are_passed_on_unchanged(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        async with trio_smc.open_stack(QUICK):
            raise error
    assert caught.value is error


async def test_an_exception_is_not_lost_to_a_cancellation_or_a_warning() -> None:
    with trio.CancelScope() as scope, pytest.raises(LookupError):  # noqa: SIM117, PT012
        with pytest.warns(ResourceWarning):  # noqa: PT031
            async with two_stacks() as (client, _, listener):
                streams = await connect(client, listener)
                scope.cancel()
                raise LookupError
    await close_all(*streams)


async def test_cancelled_in_the_block() -> None:
    with trio.CancelScope() as scope:
        async with two_stacks() as (client, _, listener):
            mine, other = await connect(client, listener)
            async with mine, other:
                scope.cancel()
                await trio.sleep_forever()
    assert scope.cancelled_caught
    assert pollers() == []


@pytest.mark.parametrize("step", range(1, 12))
async def test_cancelled_while_it_opens(step: int) -> None:
    class CancelAtStep(trio.abc.Instrument):
        left = step

        def before_task_step(self, task: trio.lowlevel.Task) -> None:
            self.left -= 1
            if self.left == 0:
                scope.cancel()

    instrument = CancelAtStep()
    with trio.fail_after(PATIENCE), trio.CancelScope() as scope:
        trio.lowlevel.add_instrument(instrument)
        try:
            async with trio_smc.open_stack(QUICK):
                await trio.lowlevel.checkpoint()
        finally:
            trio.lowlevel.remove_instrument(instrument)
    assert pollers() == []


async def test_cancelled_before_it_opens() -> None:
    with trio.fail_after(PATIENCE), trio.CancelScope() as scope:
        scope.cancel()
        async with trio_smc.open_stack(QUICK):
            raise AssertionError("opened")
    assert scope.cancelled_caught


async def test_a_stack_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is not an ExceptionGroup, and the failed stack has freed everything."""

    def no_descriptors(*args: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("trio_smc.stack.tcp_watch.select.epoll", no_descriptors)
        with pytest.raises(OSError, match="open files"):
            async with trio_smc.open_stack(Config(rnics=())):
                raise AssertionError("opened")


@pytest.mark.parametrize("where", ["timers", "pump"])
async def test_a_defect_in_a_background_task(where: str, caplog: pytest.LogCaptureFixture) -> None:
    """The stack is closed, its streams are broken, and the end of the block raises the defect."""
    with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012
        async with trio_smc.open_stack(QUICK) as stack:
            [listener] = await stack.open_listeners(0, host=HOST)
            mine, other = await connect(stack, listener)

            def broken() -> None:
                raise LookupError("a defect")

            if where == "timers":
                stack.runtime.timers.call_later(0, broken)
            else:
                stack.runtime.pump.flush_later(broken)
            with trio.fail_after(PATIENCE), pytest.raises(trio.BrokenResourceError):
                await mine.receive_some()
            with pytest.raises(trio.ClosedResourceError) as refused:
                await stack.open_stream(HOST, 1)
            assert isinstance(refused.value.__cause__, ExceptionGroup)
            await close_all(mine, other)
    assert caught.group_contains(LookupError)
    assert "the stack failed" in caplog.text
    assert pollers() == []


# --- the TCP connection under a stream -----------------------------------------------------------


async def test_the_socket_of_an_smc_stream() -> None:
    async with two_stacks() as (client, _, listener):
        mine, other = await connect(client, listener)
        assert isinstance(mine.socket, SmcSocket)
        assert mine.socket.getpeername() == listener.socket.getsockname()
        assert mine.socket.getsockname() == other.socket.getpeername()
        assert (mine.socket.family, mine.socket.type) == (socket.AF_INET, socket.SOCK_STREAM)
        assert mine.socket.proto in (0, socket.IPPROTO_TCP)
        assert mine.socket.fileno() > 2
        level, name = socket.SOL_SOCKET, socket.SO_KEEPALIVE
        mine.socket.setsockopt(level, name, 1)
        assert mine.socket.getsockopt(level, name) == 1
        assert mine.socket.getsockopt(level, name, 4) == b"\1\0\0\0"
        mine.socket.setsockopt(level, name, b"\0\0\0\0")
        assert mine.socket.getsockopt(level, name) == 0
        for method in ("send", "sendto", "sendmsg", "recv", "recv_into", "recvfrom", "shutdown",
                     "close", "accept", "connect", "detach", "dup", "is_readable"):  # fmt: skip
            assert not hasattr(mine.socket, method), method
        assert "127.0.0.1" in repr(mine.socket)
        await close_all(mine, other)
        await wait_until_freed(client)
        assert mine.socket.fileno() == -1
        with pytest.raises(OSError, match="Bad file descriptor"):
            mine.socket.getpeername()


async def test_the_socket_of_a_tcp_stream() -> None:
    async with trio_smc.open_stack(QUICK) as stack:
        stream, accepted = await open_tcp(stack)
        assert stream.mode is Mode.TCP
        assert isinstance(stream.socket, trio.socket.SocketType)
        assert stream.socket.getpeername() == accepted.socket.getsockname()
        await close_all(stream, accepted)


# --- observers -----------------------------------------------------------------------------------


class Recorder:
    """An observer that records its calls.

    broken: True if each call raises an exception.
    """

    def __init__(self, *, broken: bool = False) -> None:
        self.events: list[tuple[str, tuple[object, ...]]] = []
        self._broken = broken

    def __getattr__(self, name: str) -> object:
        if name not in ("clc", "llc", "cdc", "rdma_write", "state", "mode"):
            raise AttributeError(name)

        def note(*args: object) -> None:
            self.events.append((name, args))
            if self._broken:
                raise LookupError("an observer's defect")

        return note

    def kinds(self) -> set[str]:
        return {name for name, _ in self.events}


async def test_observers_see_all_events(caplog: pytest.LogCaptureFixture) -> None:
    broken, whole = Recorder(broken=True), Recorder()
    async with two_stacks() as (client, _, listener):
        client.add_observer(broken)  # type: ignore[arg-type]
        client.add_observer(whole)  # type: ignore[arg-type]
        await check_serves(client, listener)
        await wait_until_freed(client)
        assert whole.kinds() == {"clc", "llc", "cdc", "rdma_write", "state", "mode"}
        assert whole.events == broken.events
        assert "an observer failed" in caplog.text
        client.remove_observer(broken)  # type: ignore[arg-type]
        seen = len(broken.events)
        async with await client.open_stream(*address_of(listener)) as stream:
            assert whole.events[-1] == ("mode", (stream, None))
            await close_all(await listener.accept())
        client.remove_observer(whole)  # type: ignore[arg-type]
        client.remove_observer(whole)  # type: ignore[arg-type]
        assert client.runtime.groups.observer is None
        assert len(broken.events) == seen


async def test_an_observer_defines_only_the_methods_that_it_needs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Modes(trio_smc.BaseObserver):
        def __init__(self) -> None:
            self.seen: list[trio_smc.Fallback | None] = []

        def mode(self, connection: object, fallback: trio_smc.Fallback | None) -> None:
            self.seen.append(fallback)

    async with two_stacks() as (client, _, listener):
        modes = Modes()
        client.add_observer(modes)
        await check_serves(client, listener)
        await wait_until_freed(client)
    assert modes.seen == [None]
    assert not caplog.records


async def test_observers_of_fallbacks() -> None:
    recorder = Recorder()
    async with trio_smc.open_stack(QUICK) as stack:
        stack.add_observer(recorder)  # type: ignore[arg-type]
        stream, accepted = await open_tcp(stack)
        assert recorder.events == [("mode", (stream, stream.fallback))]
        await close_all(stream, accepted)


# --- memory --------------------------------------------------------------------------------------


async def test_a_stack_is_garbage_after_it_was_left() -> None:
    import weakref

    async with trio_smc.open_stack(QUICK) as stack:
        [listener] = await stack.open_listeners(0, host=HOST)
        await check_serves(stack, listener)
        reference = weakref.ref(stack)
    del stack, listener
    await trio.testing.wait_all_tasks_blocked()
    gc.collect()
    assert reference() is None
