"""`Endpoint` resets the TCP connection of an aborted connection at the right time."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from tests.datapath.datapath_pair import FakeHost, Pair
from trio_smc.stack.connection_host import Endpoint
from trio_smc.stack.tcp_watch import TcpWatch


def no_op(*_: object) -> None:
    """No-op."""


async def tcp_pair() -> tuple[trio.socket.SocketType, trio.socket.SocketType]:
    with trio.socket.socket() as listener:
        await listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        client = trio.socket.socket()
        await client.connect(listener.getsockname())
        return client, (await listener.accept())[0]


def is_reset(peer: trio.socket.SocketType) -> bool:
    return bool(peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))


@pytest.mark.rfc("4.8.2/3")
@pytest.mark.parametrize("kind", ["software", "roce"])
async def test_a_tcp_reset_does_not_overtake_data_of_a_roce_port(kind: str) -> None:
    """On RoCE, posted writes and the abort message are in flight, and RST could overtake them."""
    timer = SimpleNamespace(cancel=no_op)
    stack: Any = SimpleNamespace(
        tcp_watch=SimpleNamespace(add=no_op, remove=no_op, has_bytes=TcpWatch.has_bytes),
        timers=SimpleNamespace(call_later=lambda *_: timer),
        observer=None,
        connection_closed=no_op,
    )
    group: Any = SimpleNamespace(
        rnic=SimpleNamespace(kind=kind),
        own_rmbs=SimpleNamespace(release=no_op),
        remove_connection=no_op,
    )
    pair = Pair()
    client, server = await tcp_pair()
    try:
        endpoint = Endpoint(stack, group, pair.a.rmbe)
        endpoint.connection = pair.a
        endpoint.adopt(client)
        for name in vars(FakeHost):
            if not name.startswith("_") and hasattr(endpoint, name):
                setattr(pair.hosts[0], name, getattr(endpoint, name))
        assert pair.b.send(memoryview(b"data")) == 4
        pair.settle()
        assert pair.a.send(memoryview(b"last")) == 4
        pair.a.abort()
        assert is_reset(server) is (kind == "software")
        pair.settle()
        assert pair.states() == ("CLOSED", "CLOSED")
        assert pair.b.receiver.receive(9) == b"last"
        assert client.fileno() == -1
        if kind == "roce":
            assert is_reset(server)
    finally:
        client.close()
        server.close()
        pair.close()
