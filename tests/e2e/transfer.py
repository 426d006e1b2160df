"""Both directions at once between two processes; used by a test and by a campaign."""

from __future__ import annotations

from typing import Any

import trio

from tests.peers import open_pair

RINGS = [16 * 1024, 64 * 1024, 256 * 1024, 1024 * 1024]


async def transfer(ring: int, total: int, small: int, seed: int) -> dict[str, Any]:
    """Move ``total`` bytes each way; AssertionError when a byte is wrong.  Returns what the client
    saw."""
    settings: dict[str, object] = {"receive_buffer": ring}
    async with open_pair("process", settings) as (server, client):
        there = {"send_seed": seed, "receive_seed": seed + 1}
        back = {"send_seed": seed + 1, "receive_seed": seed}
        sizes = {"total": total, "small": small}
        port = (await server.call("listen", handler="exchange", **back, **sizes))["port"]
        answers: dict[str, Any] = {}

        async def call_client() -> None:
            answers["client"] = await client.call("exchange", port=port, **there, **sizes)

        async def call_server() -> None:
            answers["server"] = await server.call("exchanged")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call_client)
            nursery.start_soon(call_server)
    one, other = answers["client"], answers["server"]
    assert one["mode"] == other["mode"] == "smc-r"
    assert one["sent"] == other["received"]
    assert other["sent"] == one["received"]
    assert min(one["small_writes"], other["small_writes"]) >= small
    result: dict[str, Any] = one
    return result
