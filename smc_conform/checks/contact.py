"""First and subsequent contacts (RFC 7609, 3.5.1, 3.5.2)."""

from __future__ import annotations

from smc_conform.peer import Peer
from smc_conform.registry import check


@check("3.5.1-1", "After a first contact, data flows in both directions.")
async def first_contact_carries_data(peer: Peer) -> None:
    connection = await peer.connect()
    await connection.echo(b"hello")
