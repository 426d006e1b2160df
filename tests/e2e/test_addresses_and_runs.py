"""Addresses, many streams at once, several stacks and several runs in one process."""

from __future__ import annotations

import random
import socket
import threading

import pytest
import trio

import trio_smc
from tests.peers import echo
from tests.ports import reserved_port
from tests.streams.stream_pairs import SMALL_RING, open_pairs, smc_config
from trio_smc import Config, SmcStream

LOOPBACK_NAMES = ["127.0.0.1", "::1", "localhost", "127.1.2.3"]


async def talk(host: str, port: int, text: bytes = b"hello") -> SmcStream:
    """Send bytes to an echo server, receive them, close; returns the closed stream."""
    async with await trio_smc.open_stream(host, port) as stream:
        assert stream.mode == "smc-r", stream.fallback
        await stream.send_all(text)
        await stream.send_eof()
        back = b""
        while data := await stream.receive_some():
            back += data
        assert back == text
    return stream


async def serve(nursery: trio.Nursery, host: str | None = "127.0.0.1") -> int:
    """Start an echo server; returns its port."""
    listeners = await nursery.start(lambda **kw: trio_smc.serve(echo, 0, host=host, **kw))
    port: int = listeners[0].socket.getsockname()[1]
    return port


# --- addresses ---------------------------------------------------------------------------------


@pytest.mark.rfc("B/1")
@pytest.mark.parametrize("host", LOOPBACK_NAMES)
async def test_the_address_a_server_listens_on(host: str) -> None:
    async with trio_smc.open_stack(smc_config()), trio.open_nursery() as nursery:
        port = await serve(nursery, host)
        await talk(host, port)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("host", LOOPBACK_NAMES)
async def test_every_address_of_a_server_that_listens_on_all(host: str) -> None:
    async with trio_smc.open_stack(smc_config()), trio.open_nursery() as nursery:
        # One port for both families, as `trio.serve_tcp` has it.
        with reserved_port() as port:
            await nursery.start(lambda **kw: trio_smc.serve(echo, port, **kw))
        await talk(host, port)
        nursery.cancel_scope.cancel()


async def test_an_ipv4_address_in_ipv6_clothes() -> None:
    async with trio_smc.open_stack(smc_config()), trio.open_nursery() as nursery:
        await talk("::ffff:127.0.0.1", await serve(nursery, "127.0.0.1"))
        nursery.cancel_scope.cancel()


async def test_names_of_the_two_ends() -> None:
    async with open_pairs(smc_config()) as pairs:
        a, b = await pairs.make()
        assert a.socket.getsockname() == b.socket.getpeername()
        assert a.socket.getpeername() == b.socket.getsockname()
        assert a.socket.family == b.socket.family == socket.AF_INET
        await a.aclose()
        await b.aclose()


# --- many at once ------------------------------------------------------------------------------


@pytest.mark.parametrize("stacks", [1, 2])
async def test_many_streams_in_both_directions(stacks: int, rng: random.Random) -> None:
    async def sender(stream: SmcStream, text: bytes) -> None:
        left = memoryview(text)
        while left:
            size = rng.randint(1, 2 * SMALL_RING)
            await stream.send_all(left[:size])
            left = left[size:]
        await stream.send_eof()

    async def receiver(stream: SmcStream, text: bytes) -> None:
        got = b""
        while data := await stream.receive_some(rng.randint(1, 2 * SMALL_RING)):
            got += data
        assert got == text

    async with open_pairs(smc_config(), stacks=stacks) as pairs:
        made = [await pairs.make() for _ in range(20)]
        texts = [rng.randbytes(rng.randint(1, 200_000)) for _ in range(40)]
        async with trio.open_nursery() as nursery:
            for number, (a, b) in enumerate(made):
                there, back = texts[2 * number : 2 * number + 2]
                nursery.start_soon(sender, a, there)
                nursery.start_soon(receiver, b, there)
                nursery.start_soon(sender, b, back)
                nursery.start_soon(receiver, a, back)
        # One group for each of the two roles in which a stack knows the other.
        for stack in {pairs.client, pairs.server}:
            assert len(stack.link_groups) == (2 if stacks == 1 else 1)
        for pair in made:
            for stream in pair:
                await stream.aclose()


async def test_two_stacks_connect_to_each_other() -> None:
    async with trio_smc.open_stack(smc_config()) as one, trio.open_nursery() as nursery:
        port_of_one = await serve(nursery)
        async with trio_smc.open_stack(smc_config()) as other:
            port_of_other = await serve(nursery)
            await talk("127.0.0.1", port_of_one)
            [group] = other.link_groups
            assert (group.role, group.peer_id) == ("client", one.peer_id)
            await talk("127.0.0.1", port_of_other)
            assert {group.peer_id for group in other.link_groups} == {one.peer_id, other.peer_id}
            nursery.cancel_scope.cancel()


# --- runs --------------------------------------------------------------------------------------


async def _talk_to_oneself() -> bytes:
    async with trio.open_nursery() as nursery:
        port = await serve(nursery)
        stream = await talk("127.0.0.1", port)
        assert stream.link_group is not None
        nursery.cancel_scope.cancel()
        return stream.link_group.peer_id


async def _in_a_stack_of_its_own() -> bytes:
    async with trio_smc.open_stack(smc_config()):
        return await _talk_to_oneself()


def test_the_default_stack_of_each_run_is_new() -> None:
    assert len({trio.run(_talk_to_oneself) for _ in range(3)}) == 3


def test_stacks_of_runs_one_after_the_other() -> None:
    assert len({trio.run(_in_a_stack_of_its_own) for _ in range(3)}) == 3


@pytest.mark.parametrize("how", [_talk_to_oneself, _in_a_stack_of_its_own])
def test_runs_in_several_threads_at_once(how: object) -> None:
    ids: list[bytes] = []
    threads = [threading.Thread(target=lambda: ids.append(trio.run(how))) for _ in range(4)]  # type: ignore[arg-type]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(ids)) == 4


def test_a_run_within_a_run_by_way_of_a_thread() -> None:
    async def outer() -> None:
        await _talk_to_oneself()
        await trio.to_thread.run_sync(trio.run, _talk_to_oneself)
        await _talk_to_oneself()

    trio.run(outer)


async def test_streams_between_two_runs() -> None:
    """Server and client in one process, each with a run, and so a stack, of its own."""
    port = trio.Event()
    ports: list[int] = []
    done = threading.Event()
    token = trio.lowlevel.current_trio_token()

    async def server() -> None:
        async with trio_smc.open_stack(smc_config()), trio.open_nursery() as nursery:
            ports.append(await serve(nursery))
            token.run_sync_soon(port.set)
            await trio.to_thread.run_sync(done.wait)
            nursery.cancel_scope.cancel()

    async with trio_smc.open_stack(Config()), trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, trio.run, server)
        await port.wait()
        try:
            await talk("127.0.0.1", ports[0], bytes(300_000))
        finally:
            done.set()
