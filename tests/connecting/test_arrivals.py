"""Accepted TCP connections before their handshake."""

from __future__ import annotations

from typing import Any

import pytest
import trio

import trio_smc
from trio_smc import FallbackReason
from trio_smc.connecting import accept
from trio_smc.stack.policy import Route, choose_route

HOST = "127.0.0.1"


@pytest.mark.usefixtures("runtime_directory")
async def test_a_client_in_another_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """No RNIC serves the client's address. The server finds the RNIC with the announcement."""

    def choose(*args: Any, near: bool, **options: Any) -> Route:
        if not near:
            return Route(FallbackReason.NO_RNIC, HOST)
        return choose_route(*args, near=near, **options)

    monkeypatch.setattr(accept, "choose_route", choose)
    with trio.fail_after(10):
        async with trio_smc.open_stack(), trio.open_nursery() as nursery:
            [listener] = await trio_smc.open_listeners(0, host=HOST)

            async def answer() -> None:
                async with await listener.accept() as stream:
                    assert stream.mode == "smc-r"
                    await stream.send_all(await stream.receive_some())

            nursery.start_soon(answer)
            async with await trio_smc.open_stream(*listener.socket.getsockname()) as stream:
                assert stream.mode == "smc-r", stream.fallback
                await stream.send_all(b"x")
                assert await stream.receive_some() == b"x"
            await listener.aclose()
