"""Statistics of link groups and connections."""

from __future__ import annotations

import gc

from tests.rendezvous.rendezvous_pair import World, exchange

MANY = 10_000


def test_statistics_of_many_connections_start_no_garbage_collection() -> None:
    """A garbage collection scans all objects of the process: a tenth of a second for so many."""
    with World() as world:
        client, server = world.side(), world.side()
        call = world.connect(client, server)
        assert exchange(world, call, (b"ping", b"pong!")) == (b"pong!", b"ping")
        groups = server.stack.groups
        once = groups.statistics()
        [(connection, endpoint)] = groups.endpoints.items()
        groups.endpoints |= dict.fromkeys(range(MANY - 1), endpoint)
        collections: list[int] = []

        def note(phase: str, info: dict[str, int]) -> None:
            if phase == "start":
                collections.append(info["generation"])

        gc.collect()
        gc.callbacks.append(note)
        try:
            statistics = groups.statistics()
        finally:
            gc.callbacks.remove(note)
            groups.endpoints = {connection: endpoint}
        assert collections == []
        assert statistics.open_connections == MANY
        assert statistics.bytes_received == MANY * once.bytes_received == MANY * 4
        assert statistics.bytes_sent == MANY * once.bytes_sent == MANY * 5
