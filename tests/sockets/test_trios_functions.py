"""`trio.open_tcp_stream` and `trio.serve_tcp` under `enable()`: the same results in fewer steps."""

from __future__ import annotations

import errno
import re
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import memory_stream_pair, wait_all_tasks_blocked

import trio_smc
from tests.peers import echo
from trio_smc.sockets.drop_in import DropInSocket

LOOPBACK = "127.0.0.1"
KINDS = ("Trio's own", "enabled")


@pytest.fixture
def run() -> Iterator[Callable[[str, Callable[[], Any]], Any]]:
    """Return a function that runs a program with plain Trio, or with `enable()`."""

    def run(kind: str, function: Callable[[], Any]) -> Any:
        if kind == "enabled":
            trio_smc.enable()
        try:
            return trio.run(function)
        finally:
            trio_smc.disable()

    try:
        yield run
    finally:
        trio_smc.disable()


async def request(port: int, data: bytes = b"hello") -> bytes:
    async with await trio.open_tcp_stream(LOOPBACK, port) as stream:
        await stream.send_all(data)
        return bytes(await stream.receive_some())


def description(error: BaseException | None) -> Any:
    """The properties of an error that a program can observe, without port numbers."""
    if error is None:
        return None
    within = [*map(description, error.exceptions)] if isinstance(error, BaseExceptionGroup) else []
    text = re.sub(r"\d{4,5}", "PORT", str(error))
    return type(error), text, getattr(error, "errno", None), within, description(error.__cause__)


class Spawned(trio.abc.Instrument):
    """Records the names of new tasks."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        self.names.append(task.name)


async def outcome_of(function: Callable[[], Awaitable[object]]) -> BaseException:
    """Call a function that must raise an exception, and return the exception."""
    try:
        await function()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


# --- open_tcp_stream ---------------------------------------------------------------------------


@pytest.mark.parametrize("host", [LOOPBACK, LOOPBACK.encode(), "::1"])
def test_an_address_is_connected_to_without_a_race(run: Any, host: str | bytes) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            [listener] = await nursery.start(partial(trio.serve_tcp, echo, 0, host=host))
            port = listener.socket.getsockname()[1]
            spawned = Spawned()
            # The first connect finds the listener.
            async with await trio.open_tcp_stream(host, port) as first:
                trio.lowlevel.add_instrument(spawned)
                async with await trio.open_tcp_stream(host, port) as stream:
                    assert isinstance(stream, trio.SocketStream)
                    assert isinstance(stream.socket, DropInSocket)
                    await stream.send_all(b"hello")
                    assert await stream.receive_some() == b"hello"
                trio.lowlevel.remove_instrument(spawned)
                names = {name.rpartition(".")[2] for name in spawned.names}
                assert names == {"_handle"}  # only the server has started a task
                await first.send_all(b"still there")
                assert await first.receive_some() == b"still there"
            nursery.cancel_scope.cancel()

    run("enabled", main)


@pytest.mark.parametrize("options", [{"local_address": LOOPBACK}, {"happy_eyeballs_delay": 1.0}])
@pytest.mark.parametrize("host", ["localhost", LOOPBACK])
def test_names_and_options_go_trios_own_way(run: Any, host: str, options: Any) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            [listener] = await nursery.start(partial(trio.serve_tcp, echo, 0, host=LOOPBACK))
            port = listener.socket.getsockname()[1]
            async with await trio.open_tcp_stream(host, port, **options) as stream:
                await stream.send_all(b"hello")
                assert await stream.receive_some() == b"hello"
            nursery.cancel_scope.cancel()

    run("enabled", main)


@pytest.mark.parametrize("case", ["no listener", "host", "port", "range", "name"])
def test_errors_are_trios(run: Any, case: str) -> None:
    async def main() -> Any:
        with trio.socket.socket() as bound:
            await bound.bind((LOOPBACK, 0))
            port = bound.getsockname()[1]
            arguments: dict[str, tuple[Any, Any]] = {
                "no listener": (LOOPBACK, port),
                "host": (None, port),
                "port": (LOOPBACK, str(port)),
                "range": (LOOPBACK, 1 << 40),
                "name": ("unknown.invalid", port),
            }
            with pytest.raises(Exception) as caught:  # noqa: PT011
                await trio.open_tcp_stream(*arguments[case])
            return description(caught.value)

    seen = {kind: run(kind, main) for kind in KINDS}
    assert seen["enabled"] == seen["Trio's own"]
    if case == "no listener":
        [inner] = seen["enabled"][-1][3]
        assert inner[2] == errno.ECONNREFUSED


def test_a_cancelled_connect_leaves_no_socket(run: Any) -> None:
    async def main() -> None:
        [listener] = await trio.open_tcp_listeners(0, host=LOOPBACK)
        with trio.CancelScope() as scope:
            scope.cancel()
            await trio.open_tcp_stream(LOOPBACK, listener.socket.getsockname()[1])
        assert scope.cancelled_caught
        await listener.aclose()

    run("enabled", main)  # a leaked descriptor fails the test


# --- serve_listeners ---------------------------------------------------------------------------

SERVER: ContextVar[str] = ContextVar("SERVER")


@pytest.mark.parametrize("kind", KINDS)
def test_handlers_have_the_context_of_their_server(run: Any, kind: str) -> None:
    seen: list[str] = []

    async def handler(stream: trio.SocketStream) -> None:
        seen.append(SERVER.get())
        SERVER.set("a handler")  # changes only the handler's copy of the context
        await echo(stream)

    async def serve(name: str, *, task_status: trio.TaskStatus[Any]) -> None:
        listeners = await trio.open_tcp_listeners(0, host=LOOPBACK)
        SERVER.set(name)
        await trio.serve_listeners(handler, listeners, task_status=task_status)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for name in ("one", "other"):
                [listener] = await nursery.start(serve, name)
                assert type(listener) is trio.SocketListener
                for _ in range(2):
                    assert await request(listener.socket.getsockname()[1]) == b"hello"
            nursery.cancel_scope.cancel()

    run(kind, main)
    assert seen == ["one", "one", "other", "other"]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["own nursery", "handler_nursery"])
def test_a_handler_that_raises_ends_the_server_as_with_trio(run: Any, elsewhere: bool) -> None:
    async def handler(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        raise ValueError("a defect of the program")

    async def main() -> Any:
        ended: list[str] = []

        async def serve(
            handlers: trio.Nursery | None, *, task_status: trio.TaskStatus[Any]
        ) -> None:
            try:
                await trio.serve_tcp(
                    handler, 0, host=LOOPBACK, handler_nursery=handlers, task_status=task_status
                )
            finally:
                ended.append("server")

        async def together() -> None:
            async with trio.open_nursery() as nursery, trio.open_nursery() as handlers:
                [listener] = await nursery.start(serve, handlers if elsewhere else None)
                port = listener.socket.getsockname()[1]
                async with await trio.open_tcp_stream(LOOPBACK, port) as stream:
                    await stream.send_all(b"x")
                    await trio.sleep_forever()

        return description(await outcome_of(together)), ended

    seen = {kind: run(kind, main) for kind in KINDS}
    assert seen["enabled"] == seen["Trio's own"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_its_handler_left_open_is_closed(run: Any, kind: str) -> None:
    async def handler(stream: trio.SocketStream) -> None:
        left.append(stream)
        await stream.receive_some()

    left: list[trio.SocketStream] = []

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            [listener] = await nursery.start(partial(trio.serve_tcp, handler, 0, host=LOOPBACK))
            port = listener.socket.getsockname()[1]
            async with await trio.open_tcp_stream(LOOPBACK, port) as stream:
                await stream.send_all(b"x")
                assert await stream.receive_some() == b""
            assert left[0].socket.fileno() == -1
            nursery.cancel_scope.cancel()

    run(kind, main)


def test_a_client_that_connected_before_the_server_started_is_served(run: Any) -> None:
    async def main() -> None:
        [listener] = await trio.open_tcp_listeners(0, host=LOOPBACK)
        port = listener.socket.getsockname()[1]
        async with await trio.open_tcp_stream(LOOPBACK, port) as early:
            await early.send_all(b"early")
            await wait_all_tasks_blocked()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.serve_listeners, echo, [listener])
                assert await early.receive_some() == b"early"
                assert await request(port) == b"hello"
                with pytest.raises(trio.BusyResourceError):
                    await listener.accept()  # the server already waits in `accept`
                nursery.cancel_scope.cancel()

    run("enabled", main)


@pytest.mark.parametrize("early", [False, True], ids=["in time", "before the server"])
def test_a_nursery_that_is_closed_ends_the_server_and_resets_the_connection(
    run: Any, early: bool
) -> None:
    async def main() -> Any:
        async with trio.open_nursery() as closed:
            pass
        broken: list[BaseException] = []

        async def together() -> None:
            [listener] = await trio.open_tcp_listeners(0, host=LOOPBACK)
            port = listener.socket.getsockname()[1]
            serve = partial(trio.serve_listeners, echo, [listener], handler_nursery=closed)
            async with trio.open_nursery() as nursery:

                async def read() -> None:
                    async with await trio.open_tcp_stream(LOOPBACK, port) as stream:
                        if early:
                            await wait_all_tasks_blocked()
                            nursery.start_soon(serve)
                        await stream.receive_some()

                if not early:
                    await nursery.start(serve)
                with trio.CancelScope(shield=True):
                    broken.append(await outcome_of(read))
                await trio.sleep_forever()

        error = await outcome_of(together)
        assert [*map(type, broken)] == [trio.BrokenResourceError]
        return description(error)

    seen = run("enabled", main)
    while seen[0] is ExceptionGroup:
        [seen] = seen[3]
    assert seen[:2] == (RuntimeError, "Nursery is closed to new arrivals")


class Watched:
    """Replaces the `AcceptSpin` of a listener."""

    def __init__(self) -> None:
        self.spins: list[Callable[[], bool]] = []

    async def spin(self, ready: Callable[[], bool]) -> None:
        assert not ready()
        self.spins.append(ready)


@pytest.mark.parametrize("kind", ["SMC-R", "TCP"])
def test_a_server_stays_awake_for_the_next_connection_over_smc_r(
    run: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spin = Watched()
    monkeypatch.setattr("trio_smc.connecting.listener.AcceptSpin", lambda _: spin)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            [listener] = await nursery.start(partial(trio.serve_tcp, echo, 0, host=LOOPBACK))
            port = listener.socket.getsockname()[1]
            assert await request(port) == b"hello"
            await wait_all_tasks_blocked()
            assert len(spin.spins) == (kind == "SMC-R")
            assert await request(port) == b"hello"
            assert all(ready() for ready in spin.spins[:1])
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()

    trio_smc.enable(trio_smc.Config(deny=() if kind == "SMC-R" else (LOOPBACK,)))
    run("enabled", main)
    assert len(spin.spins) == (2 if kind == "SMC-R" else 0)


def test_descriptors_that_have_run_out_are_waited_for(
    run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            [listener] = await nursery.start(partial(trio.serve_tcp, echo, 0, host=LOOPBACK))
            port = listener.socket.getsockname()[1]
            assert await request(port) == b"hello"
            smc_listener = listener.socket._side.listener
            smc_listener._error = OSError(errno.EMFILE, "too many open files")
            smc_listener._waiting_calls.unpark()
            await wait_all_tasks_blocked()
            assert await request(port) == b"hello"
            nursery.cancel_scope.cancel()

    run("enabled", main)
    [record] = [each for each in caplog.records if each.name == "trio.serve_listeners"]
    assert record.getMessage().startswith("cannot accept: EMFILE; retrying in 0.1 s")


@pytest.mark.parametrize("kind", KINDS)
def test_closing_the_listener_ends_the_server(run: Any, kind: str) -> None:
    async def main() -> None:
        async def together() -> None:
            async with trio.open_nursery() as nursery:
                [listener] = await nursery.start(partial(trio.serve_tcp, echo, 0, host=LOOPBACK))
                assert await request(listener.socket.getsockname()[1]) == b"hello"
                await listener.aclose()

        error = await outcome_of(together)
        while isinstance(error, ExceptionGroup):
            [error] = error.exceptions
        assert type(error) is trio.ClosedResourceError

    run(kind, main)


@pytest.mark.parametrize("kind", KINDS)
def test_serving_no_listener_is_an_error(run: Any, kind: str) -> None:
    async def main() -> None:
        await trio.serve_listeners(echo, [])

    with pytest.raises(AssertionError):
        run(kind, main)


def test_other_listeners_are_served_by_trio_itself(run: Any) -> None:
    async def main() -> None:
        memory = MemoryListener()
        async with trio.open_nursery() as nursery:
            tcp = await trio.open_tcp_listeners(0, host=LOOPBACK)
            nursery.start_soon(trio.serve_listeners, echo, [memory, *tcp])
            assert await request(tcp[0].socket.getsockname()[1]) == b"hello"
            one, other = memory_stream_pair()
            await memory.send.send(other)
            await one.send_all(b"by memory")
            assert await one.receive_some() == b"by memory"
            nursery.cancel_scope.cancel()

    run("enabled", main)


class MemoryListener(trio.abc.Listener[Any]):
    """Accepts the streams that are sent to it."""

    def __init__(self) -> None:
        self.send, self._receive = trio.open_memory_channel[Any](0)

    async def accept(self) -> Any:
        return await self._receive.receive()

    async def aclose(self) -> None:
        await self._receive.aclose()


def test_disable_restores_trios_functions() -> None:
    before = trio.open_tcp_stream, trio.serve_listeners
    trio_smc.enable()
    assert (trio.open_tcp_stream, trio.serve_listeners) != before
    trio_smc.disable()
    assert (trio.open_tcp_stream, trio.serve_listeners) == before
