"""A lie in every field: the implementation answers, or ends that connection or link.

No requirement names each case.  RFC 7609, C.6 and C.7.1 end what is clearly wrong, and 5 demands
that a peer cannot harm more than its own connections.  So a check passes if the implementation goes
on, declines, or ends the connection or the link within its time-outs, and then serves a new
connection.  A check fails if the implementation neither goes on nor ends.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from functools import partial

from smc_conform.connection import Connection
from smc_conform.messages import (
    ACCEPT,
    ADD_LINK,
    ADD_LINK_CONTINUATION,
    CDC,
    CONFIRM,
    CONFIRM_LINK,
    CONFIRM_RKEY,
    CONFIRM_RKEY_CONTINUATION,
    DECLINE,
    DELETE_LINK,
    DELETE_RKEY,
    PROPOSAL,
    TEST_LINK,
    V2,
    Field,
    Layout,
    pack,
    with_bytes,
)
from smc_conform.peer import Handshake, Peer, Phase
from smc_conform.registry import check
from smc_conform.roles import Role
from smc_conform.verdicts import Failed, Silence

SERVER, CLIENT = Role.SERVER, Role.CLIENT


def lies(field: Field) -> list[int | bytes]:
    """Wrong values for a field: the least and the greatest one, and one in between."""
    if field.raw:
        return [bytes(field.size), b"\xff" * field.size, b"\x5a" * field.size]
    most = (1 << 8 * field.size) - 1
    if field.mask:
        most = field.mask // (field.mask & -field.mask)
    return [0, most, most // 2 + 1] if most > 1 else [0, 1]


def version_of(layout: Layout, field: str) -> tuple[str, ...]:
    """The need of a check of this field: version 1, if version 2 has no such field."""
    if layout in (ADD_LINK_CONTINUATION, CONFIRM_RKEY_CONTINUATION):
        return ("version-1",)
    return () if field in V2.get(layout, layout).fields else ("version-1",)


async def ends_or_goes_on(peer: Peer, handshake: Handshake) -> None:
    """Continue a handshake with a lie in it; accept each of the possible answers."""
    try:
        connection = await handshake.advance()
        await connection.echo(b"goes on")
    except (Failed, Silence):
        # The implementation does not continue, or answers something that does not fit.
        await stops(peer, handshake)


async def stops(peer: Peer, handshake: Handshake) -> None:
    """Wait for the end of the TCP connection or of the link, for SMC Decline, or for data.

    An implementation may take one of its time-outs before it goes on.

    An answer is right, too: over TCP to bytes without an eye catcher, which are not CLC, and a CDC
    message to a wrong alert token.
    """
    tcp = handshake.tcp

    def over() -> bool:
        group = handshake.group
        stray = group is not None and (bool(group.strays) or bool(group.link.failed))
        connection = getattr(handshake, "connection", None)
        goes_on = connection is not None and connection.peer_produced > 0
        return goes_on or bool(tcp.buffer) or tcp.declined or tcp.end is not None or stray

    await peer.until(over, "an end of the connection", patience=peer.session.options.timers)


async def _handshake_lie(name: str, field: str, value: int | bytes, peer: Peer) -> None:
    handshake = await peer.start(change={name: {field: value}})
    await ends_or_goes_on(peer, handshake)


_HANDSHAKE: tuple[tuple[str, Layout, tuple[Role, ...]], ...] = (
    ("proposal", PROPOSAL, (SERVER,)),
    ("accept", ACCEPT, (CLIENT,)),
    ("confirm", CONFIRM, (SERVER,)),
    ("confirm_link", CONFIRM_LINK, ()),
    ("add_link", ADD_LINK, ()),
)
# The number of a section of the RFC for the layout of each message.
_SECTIONS = {
    PROPOSAL: "A.2.2", ACCEPT: "A.2.3", CONFIRM: "A.2.4", DECLINE: "A.2.5", CONFIRM_LINK: "A.3.1",
    ADD_LINK: "A.3.2", ADD_LINK_CONTINUATION: "A.3.3", DELETE_LINK: "A.3.4", CONFIRM_RKEY: "A.3.5",
    CONFIRM_RKEY_CONTINUATION: "A.3.6", DELETE_RKEY: "A.3.7", TEST_LINK: "A.3.8", CDC: "A.4",
}  # fmt: skip


def _words(value: int | bytes) -> str:
    return f"0x{value.hex()}" if isinstance(value, bytes) else f"0x{value:x}"


Lie = Callable[[int | bytes, Peer], Awaitable[None]]


async def _each_lie(steps: Lie, values: list[int | bytes], peer: Peer) -> None:
    for value in values:
        await steps(value, peer)


for _name, _layout, _roles in _HANDSHAKE:
    for _place, (_field, _about) in enumerate(_layout.fields.items(), 1):
        check(
            f"{_SECTIONS[_layout]}-{_place}",
            f"A wrong {_field.replace('_', ' ')} in {_layout.name} of a handshake "
            f"({', '.join(map(_words, lies(_about)))}) does no harm.",
            *_roles, needs=version_of(_layout, _field), robust=True, slow=True,
        )(partial(_each_lie, partial(_handshake_lie, _name, _field), lies(_about)))  # fmt: skip


# --- LLC messages in an established group ---------------------------------------------------------


async def link_survives(peer: Peer, connection: Connection) -> None:
    """The link answers TEST LINK, or ends; the connection goes on, or ends."""
    link, tcp = connection.link, connection.tcp
    link.send_llc(TEST_LINK, user_data=b"are you there ?!")
    await peer.until(
        lambda: bool(link.failed) or tcp.end is not None
        or any(each.layout is TEST_LINK and each.reply for each in link.inbox),
        "an answer to TEST LINK, or the end of the link",
    )  # fmt: skip


async def _llc_lie(layout: Layout, reply: int, field: str, value: int | bytes, peer: Peer) -> None:
    connection = await peer.connect()
    await connection.echo(b"begin")
    link = connection.link
    plausible: dict[str, int | bytes] = {
        "reply": reply, "link_number": link.number, "gid": link.rnic.gid, "mac": link.rnic.mac,
        "qp_number": 0x4711, "qp_mtu": link.rnic.mtu, "psn": 1, "rkey": link.region.rkey,
        "address": link.region.address, "max_links": 2, "count": 1, "rkey_1": link.region.rkey,
        "reference_rkey": link.region.rkey, "new_rkey": 7, "new_address": 4096,
    }  # fmt: skip
    fields = {name: value for name, value in plausible.items() if name in layout.fields}
    link.send_llc(layout, **{**fields, field: value})
    await link_survives(peer, connection)


_LLC = (
    CONFIRM_LINK, ADD_LINK, ADD_LINK_CONTINUATION, DELETE_LINK, CONFIRM_RKEY,
    CONFIRM_RKEY_CONTINUATION, DELETE_RKEY, TEST_LINK,
)  # fmt: skip
_FIRST = 100
for _layout in _LLC:
    for _reply in (0, 1):
        for _place, (_field, _about) in enumerate(_layout.fields.items()):
            if _field == "reply":
                continue
            check(
                f"{_SECTIONS[_layout]}-{_FIRST * (_reply + 1) + _place}",
                f"A wrong {_field.replace('_', ' ')} in {_layout.name}{' reply' * _reply} of a "
                f"group ({', '.join(map(_words, lies(_about)))}) does no harm.",
                needs=version_of(_layout, _field),
                robust=True,
            )(partial(_each_lie, partial(_llc_lie, _layout, _reply, _field), lies(_about)))


# --- CDC messages --------------------------------------------------------------------------------


async def _cdc_lie(field: str, value: int | bytes, peer: Peer) -> None:
    connection = await peer.connect()
    await connection.echo(b"begin")
    connection.send_cdc(**{field: value})
    await link_survives(peer, connection)


for _place, (_field, _about) in enumerate(CDC.fields.items(), 1):
    check(
        f"A.4-{_place}",
        f"A wrong {_field.replace('_', ' ')} in a CDC message "
        f"({', '.join(map(_words, lies(_about)))}) does no harm.",
        robust=True,
    )(partial(_each_lie, partial(_cdc_lie, _field), lies(_about)))


# --- floods and noise ---------------------------------------------------------------------------


@check("5-1", "Random messages of 44 bytes end the link at most.", robust=True)
async def noise(peer: Peer) -> None:
    choose = random.Random(peer.session.options.seed)
    for _ in range(5):
        connection = await peer.connect()
        for _ in range(20):
            connection.link.send(choose.randbytes(44))
        await link_survives(peer, connection)


@check(
    "5-2",
    "Random bytes in each type of message end the link at most.",
    robust=True,
    needs=("version-1",),
)
async def noise_in_messages(peer: Peer) -> None:
    choose = random.Random(peer.session.options.seed)
    for layout in (*_LLC, CDC):
        connection = await peer.connect()
        await connection.echo(b"begin")
        for _ in range(5):
            head = bytes((layout.kind, 44))
            connection.link.send(head + choose.randbytes(42))
        await link_survives(peer, connection)


@check("5-3", "Random bytes in place of CLC messages end the TCP connection.", robust=True)
async def noise_in_clc(peer: Peer) -> None:
    choose = random.Random(peer.session.options.seed)
    for _ in range(5):
        handshake = await peer.reach(Phase.ACCEPTED if peer.role is SERVER else Phase.PROPOSED)
        head = pack(CONFIRM if peer.role is SERVER else ACCEPT)[:8]
        await handshake.tcp.send(head + choose.randbytes(60))
        await peer.refused(handshake.tcp, decline=True)


@check("5-4", "A flood of TEST LINKs is answered, or ends the link.", robust=True)
async def flood_of_tests(peer: Peer) -> None:
    connection = await peer.connect()
    for _ in range(500):
        await peer.room(connection.link)
        connection.link.send_llc(TEST_LINK)
    await peer.until(
        lambda: bool(connection.link.failed) or len(connection.link.inbox) >= 500,
        "500 replies, or the end of the link",
    )


@check("5-5", "A flood of CDC messages does not delay the data.", robust=True)
async def flood_of_cdc(peer: Peer) -> None:
    connection = await peer.connect()
    for _ in range(1000):
        await peer.room(connection.link)
        connection.send_cdc()
    await connection.echo(b"data")


@check("5-6", "A write outside of the element is refused by the RNIC or does no harm.", robust=True)
async def write_outside(peer: Peer) -> None:
    connection = await peer.connect()
    link = connection.link
    link.write(b"x" * 64, connection.peer_address + (1 << 40), connection.peer_rkey)
    await peer.until(lambda: bool(link.failed), "the refusal of the write")
    await peer.ended(connection.tcp)


@check("5-7", "A write with an RKey that does not exist is refused by the RNIC.", robust=True)
async def write_with_a_wrong_rkey(peer: Peer) -> None:
    connection = await peer.connect()
    link = connection.link
    link.write(b"x", connection.peer_address, connection.peer_rkey ^ 0x55555555)
    await peer.until(lambda: bool(link.failed), "the refusal of the write")
    await peer.ended(connection.tcp)


@check("5-8", "A peer whose element is smaller than its credentials say harms only itself.",
       robust=True)  # fmt: skip
async def element_that_is_too_small(peer: Peer) -> None:
    name = "confirm" if peer.role is SERVER else "accept"
    handshake = await peer.start(change={name: {"size_code": 5, "rmbe_index": 16}})
    connection = await handshake.advance()
    for _ in range(20):
        if connection.window < 4096:
            break
        connection.write(bytes(4096))
    await link_survives(peer, connection)


@check("5-9", "A peer that leaves the TCP connection half-open is noticed by the end of its link.",
       robust=True, slow=True)  # fmt: skip
async def vanished_link(peer: Peer) -> None:
    connection = await peer.connect()
    connection.link.qp.to_err()
    connection.link.qp.close()
    await peer.until(
        lambda: connection.tcp.end is not None, "the end of the TCP connection",
        patience=peer.session.options.timers,
    )  # fmt: skip


@check("5-10", "Half an LLC exchange followed by the end of the link does no harm.", robust=True)
async def half_an_exchange(peer: Peer) -> None:
    connection = await peer.connect()
    link = connection.link
    link.send_llc(CONFIRM_RKEY, other_tokens=3, rkey=1, address=1)
    link.fail()
    await peer.ended(connection.tcp)


@check("5-11", "Many connections that end in the middle of the handshake do no harm.", robust=True)
async def many_halves(peer: Peer) -> None:
    for number in range(30):
        phase = Phase(1 + number % 4)
        handshake = await peer.reach(phase)
        handshake.tcp.reset()


@check(
    "5-12",
    "A Decline with random content leads to TCP, or ends the connection.",
    robust=True,
    needs=("version-1",),
)
async def odd_declines(peer: Peer) -> None:
    for at in range(8, 24):
        handshake = await peer.reach(Phase.ACCEPTED if peer.role is SERVER else Phase.PROPOSED)
        await handshake.tcp.send(with_bytes(pack(DECLINE), at, b"\xff"))
        await peer.plain_echo(handshake.tcp)
        handshake.tcp.close()
