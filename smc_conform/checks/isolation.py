"""Connections do not disturb each other: memory, tokens, windows, ends (RFC 7609, 2.1, 4.2, 5)."""

from __future__ import annotations

import random

from smc_conform.checks.data import connection_ends
from smc_conform.connection import Connection
from smc_conform.link import ELEMENT_SIZE
from smc_conform.messages import DELETE_LINK
from smc_conform.peer import Peer
from smc_conform.registry import check
from smc_conform.roles import Role
from smc_conform.verdicts import Failed, Silence

SERVER = Role.SERVER
PARALLEL = ("parallel",)
GUARD = 0xA5


async def pair(peer: Peer) -> tuple[Connection, Connection]:
    """Two connections of one group, which have carried data."""
    first = await peer.connect()
    second = await peer.connect(group=first.group)
    await first.echo(b"first")
    await second.echo(b"second")
    return first, second


@check("2.1-1", "The implementation writes into the element of the connection, and nowhere else.")
async def writes_stay_in_the_element(peer: Peer) -> None:
    connection = await peer.connect()
    memory, size = connection.group.memory.view, ELEMENT_SIZE
    end = connection.index * size
    memory[end:] = bytes((GUARD,)) * (len(memory) - end)
    data = random.Random(1).randbytes(5 * size)
    await connection.echo(data)
    if any(each != GUARD for each in memory[end:]):
        raise Failed("bytes behind the element have changed")


@check("4.3-1", "The implementation writes only bytes that its next CDC message announces.")
async def writes_only_what_it_announces(peer: Peer) -> None:
    connection = await peer.connect()
    start = (connection.index - 1) * ELEMENT_SIZE + connection.base
    memory = connection.group.memory.view
    memory[start : start + connection.own_room] = bytes((GUARD,)) * connection.own_room
    await connection.echo(b"x" * 100)
    rest = memory[start + 100 : start + connection.own_room]
    if any(each != GUARD for each in rest):
        raise Failed("bytes beyond the producer cursor have changed")


@check("2.1-2", "Each of two connections gets its own data, written in turns.", needs=PARALLEL)
async def data_in_turns(peer: Peer) -> None:
    first, second = await pair(peer)
    for number in range(20):
        first.write(bytes((number,)) * 50)
        second.write(bytes((255 - number,)) * 70)
        if await first.read(50) != bytes((number,)) * 50:
            raise Failed("the first connection gets other data")
        if await second.read(70) != bytes((255 - number,)) * 70:
            raise Failed("the second connection gets other data")


@check("4.5.1-1", "A closed window of one connection does not stop another one.", needs=PARALLEL)
async def closed_window_of_one(peer: Peer) -> None:
    first, second = await pair(peer)
    first.write(bytes(min(first.window, first.own_room)))
    await peer.until(
        lambda: first.peer_produced - first.consumed >= first.own_room - 5, "a full element", first
    )
    for _ in range(10):
        await second.echo(b"goes on")


@check("4.8-1", "The end of one connection leaves another one alone.", needs=PARALLEL)
async def end_of_one(peer: Peer) -> None:
    first, second = await pair(peer)
    first.send_cdc(done=1, closed=1)
    await first.expect_flag("closed")
    await peer.ended(first.tcp)
    await second.echo(b"goes on")


@check("4.8.2-1", "RST of one connection leaves another one alone.", needs=PARALLEL, robust=True)
async def reset_of_one(peer: Peer) -> None:
    first, second = await pair(peer)
    first.tcp.reset()
    await first.expect_flag("aborted")
    await second.echo(b"goes on")


@check("A.4-1", "Impossible cursors of one connection end that one alone.", needs=PARALLEL,
       robust=True)  # fmt: skip
async def impossible_cursors_of_one(peer: Peer) -> None:
    first, second = await pair(peer)
    first.send_cdc(producer=0xFFFFFF00)
    await connection_ends(peer, first)
    await second.echo(b"goes on")


@check("A.4-2", "The sequence numbers of two connections are independent.", needs=PARALLEL)
async def independent_sequences(peer: Peer) -> None:
    first, second = await pair(peer)
    for _ in range(10):
        await first.echo(b"more")
    await second.echo(b"more")
    for connection in (first, second):
        numbers = [message.sequence for message in connection.messages]
        if numbers != list(range(1, len(numbers) + 1)):
            raise Failed(f"the sequence numbers are {numbers}")


@check("A.4-3", "A CDC message that announces data of another connection's element moves nothing.",
       needs=PARALLEL)  # fmt: skip
async def token_decides(peer: Peer) -> None:
    first, second = await pair(peer)
    first.put(b"hidden")
    first.produced -= 6
    second.send_cdc()
    await peer.ping(first.link)
    if first.peer_produced != 5:
        raise Failed("the first connection reads data that its CDC messages have not announced")
    await second.echo(b"goes on")


@check("2.2-1", "The end of a group leaves another group of the same peer alone.", robust=True)
async def end_of_a_group(peer: Peer) -> None:
    first = await peer.connect()
    await first.echo(b"first")
    second = await peer.connect()
    await second.echo(b"second")
    first.link.send_llc(DELETE_LINK, all_links=1, reason=0x00030000)
    await peer.ended(first.tcp)
    await second.echo(b"goes on")


@check("5-1", "An RKey of one group does not open the memory of another one.", robust=True)
async def rkey_of_another_group(peer: Peer) -> None:
    first = await peer.connect()
    second = await peer.connect()
    await second.echo(b"second")
    first.link.write(b"\xff" * 16, second.peer_address, second.peer_rkey)
    await peer.until(lambda: bool(first.link.failed), "the refusal of the write")
    await second.echo(b"goes on")


@check("5-2", "The memory that a new connection gets has no data of an earlier one.", SERVER)
async def no_old_data(peer: Peer) -> None:
    first = await peer.connect()
    await first.echo(b"secret" * 100)
    first.send_cdc(done=1, closed=1)
    await first.expect_flag("closed")
    second = await peer.connect(group=first.group)
    # Announce bytes that were never written: the echo shows the content of the element.
    second.produced += 600
    second.send_cdc()
    data = await second.read(600)
    if any(data):
        raise Failed("the element has data of an earlier connection")


@check("3.5.1-1", "A first contact that fails leaves an existing group alone.", robust=True)
async def failed_contact_beside_a_group(peer: Peer) -> None:
    first = await peer.connect()
    await first.echo(b"first")
    name = "confirm" if peer.role is SERVER else "accept"
    handshake = await peer.start(change={name: {"qp_number": 0}})
    try:
        await handshake.advance()
    except (Failed, Silence):
        await first.echo(b"goes on")
    else:
        raise Failed("credentials with QP number 0 are accepted")


@check("2.1-3", "Sixteen connections of a group work side by side.", needs=("parallel",))
async def many_at_once(peer: Peer) -> None:
    connections = [await peer.connect()]
    count = 16 if peer.role is SERVER else 4
    for _ in range(count - 1):
        connections.append(await peer.connect(group=connections[0].group))
    for number, each in enumerate(connections):
        each.write(bytes((number,)) * 1000)
    for number, each in enumerate(connections):
        if await each.read(1000) != bytes((number,)) * 1000:
            raise Failed(f"connection {number} gets other data")
