"""The place of the server's end of a TCP connection, as the kernel shows it to the client."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from trio_smc.host.tcp_diag import FarEnd, far_end, has_local_end, original_destination

HOSTS = ["127.0.0.1", "::1"]


@contextmanager
def listening(host: str, *options: tuple[int, int, int]) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, backlog=1) as made:
        for option in options:
            made.setsockopt(*option)
        yield made


@pytest.mark.parametrize("host", HOSTS)
def test_a_connection_waits_and_is_accepted(host: str) -> None:
    with listening(host) as server, socket.create_connection(server.getsockname()[:2]) as client:
        assert far_end(client) is FarEnd.QUEUED
        accepted, _ = server.accept()
        with accepted:
            assert far_end(client) is FarEnd.ACCEPTED
            assert has_local_end(client)
            assert has_local_end(accepted)
            assert original_destination(client) in (None, server.getsockname()[:2])
        assert far_end(client) is not FarEnd.ACCEPTED


@pytest.mark.parametrize("host", HOSTS)
def test_a_listener_that_waits_for_data(host: str) -> None:
    deferred = (socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 10)
    with (
        listening(host, deferred) as server,
        socket.create_connection(server.getsockname()[:2]) as client,
    ):
        assert far_end(client) is FarEnd.OPENING
        client.sendall(b"x")
        assert far_end(client) is FarEnd.QUEUED


def test_a_mapped_address_is_ipv4() -> None:
    with ExitStack() as stack:
        server = stack.enter_context(
            socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        )
        client = stack.enter_context(
            socket.create_connection(("127.0.0.1", server.getsockname()[1]))
        )
        assert far_end(client) is FarEnd.QUEUED
        accepted, _ = server.accept()
        with accepted:
            assert far_end(client) is FarEnd.ACCEPTED
            assert far_end(accepted) is FarEnd.ACCEPTED
            assert has_local_end(client)


def test_a_socket_without_a_connection() -> None:
    with socket.socket() as unconnected:
        assert far_end(unconnected) is FarEnd.UNKNOWN
        assert not has_local_end(unconnected)
        assert original_destination(unconnected) is None
