"""LLC messages of an established link group (RFC 7609, 3.3, 3.5.4, 3.5.5, A.3, C.7.1)."""

from __future__ import annotations

from functools import partial

from smc_conform.connection import Connection
from smc_conform.link import Link
from smc_conform.messages import (
    ADD_LINK,
    ADD_LINK_CONTINUATION,
    CONFIRM_RKEY,
    CONFIRM_RKEY_CONTINUATION,
    DELETE_LINK,
    DELETE_RKEY,
    TEST_LINK,
    Layout,
    Message,
    with_bytes,
)
from smc_conform.peer import Peer
from smc_conform.registry import check
from smc_conform.roles import Role
from smc_conform.verdicts import Differs, Failed, Silence

SERVER, CLIENT = Role.SERVER, Role.CLIENT
UNKNOWN_LINK = 0x00100000
LOST_PATH = 0x00010000
OPERATOR = 0x00020000


async def established(peer: Peer) -> tuple[Connection, Link]:
    """A connection that has carried data, and its link."""
    connection = await peer.connect()
    await connection.echo(b"begin")
    return connection, connection.link


async def reply_to(peer: Peer, link: Link, layout: Layout, **values: int | bytes) -> Message:
    """Send a request, and return the reply, whose reserved bits must be zero."""
    link.send_llc(layout, **values)
    reply = await peer.llc(link, layout, reply=True)
    if len(reply.raw) != 44 or reply.length != 44:
        raise Failed(f"the reply has {len(reply.raw)} bytes, and length {reply.length}")
    if wrong := reply.reserved_words():
        raise Failed(wrong)
    return reply


async def goes_on(peer: Peer, connection: Connection) -> None:
    """The link and the connection work."""
    await peer.ping(connection.link)
    await connection.echo(b"goes on")


# --- TEST LINK -----------------------------------------------------------------------------------


@check("A.3.8-1", "TEST LINK is answered by a reply with the same user data.")
async def test_link(peer: Peer) -> None:
    _, link = await established(peer)
    data = bytes(range(16))
    reply = await reply_to(peer, link, TEST_LINK, user_data=data)
    if reply.user_data != data:
        raise Failed(f"the reply has the user data {reply.user_data.hex()}")


@check("A.3.8-2", "Several TEST LINKs are answered in their order.")
async def test_link_order(peer: Peer) -> None:
    _, link = await established(peer)
    for number in range(20):
        link.send_llc(TEST_LINK, user_data=bytes((number,)) * 16)
    for number in range(20):
        reply = await peer.llc(link, TEST_LINK, reply=True)
        if reply.user_data != bytes((number,)) * 16:
            raise Failed(f"reply {number} has the user data {reply.user_data.hex()}")


@check("A.3.8-3", "Reserved bits of TEST LINK are ignored.", needs=("version-1",))
async def test_link_reserved(peer: Peer) -> None:
    connection, link = await established(peer)
    raw = peer_message(link, TEST_LINK, user_data=b"0123456789abcdef")
    link.send(with_bytes(with_bytes(raw, 2, b"\xff\x7f"), 20, b"\xff" * 24))
    reply = await peer.llc(link, TEST_LINK, reply=True)
    if reply.user_data != b"0123456789abcdef":
        raise Failed("the reply has other user data")
    await goes_on(peer, connection)


def peer_message(link: Link, layout: Layout, **values: int | bytes) -> bytes:
    """An LLC message in the version of the group."""
    return link.group.pack_llc(layout, **values)


@check("A.3.8-4", "TEST LINK is answered while data flows.")
async def test_link_beside_data(peer: Peer) -> None:
    connection, link = await established(peer)
    for number in range(10):
        connection.write(b"data" * 100)
        link.send_llc(TEST_LINK, user_data=bytes((number,)) * 16)
    for _ in range(10):
        await peer.llc(link, TEST_LINK, reply=True)
    if await connection.read(4000) != b"data" * 1000:
        raise Failed("the echo is wrong")


@check("4.5.3-1", "An idle link is tested by TEST LINK.", slow=True)
async def idle_link_is_tested(peer: Peer) -> None:
    _, link = await established(peer)
    link.group.auto.discard(TEST_LINK)
    request = await peer.llc(link, TEST_LINK, reply=False, patience=peer.session.options.timers)
    if wrong := request.reserved_words():
        raise Failed(wrong)


@check("C.7.1-1", "A TEST LINK reply with other user data ends the link.", slow=True, robust=True)
async def wrong_test_link_reply(peer: Peer) -> None:
    _, link = await established(peer)
    link.group.auto.discard(TEST_LINK)
    request = await peer.llc(link, TEST_LINK, patience=peer.session.options.timers)
    wrong = bytes(each ^ 0xFF for each in request.user_data)
    link.send_llc(TEST_LINK, reply=1, user_data=wrong)
    await peer.link_ended(link)


@check("C.7.1-2", "A TEST LINK that is not answered ends the link.", slow=True, robust=True)
async def no_test_link_reply(peer: Peer) -> None:
    connection, link = await established(peer)
    link.group.auto.discard(TEST_LINK)
    await peer.llc(link, TEST_LINK, patience=peer.session.options.timers)
    try:
        await peer.until(
            lambda: bool(link.failed) or connection.tcp.end is not None,
            "the end of the link", patience=peer.session.options.timers,
        )  # fmt: skip
    except Silence:
        if peer.session.roce:
            raise
        raise Differs(
            "the software RNIC shows that this process lives, so the link stays"
        ) from None


@check("C.7.1-3", "A TEST LINK reply that no request waits for ends the link, or is ignored.",
       robust=True)  # fmt: skip
async def unasked_test_link_reply(peer: Peer) -> None:
    connection, link = await established(peer)
    link.send_llc(TEST_LINK, reply=1, user_data=b"nothing asked for")
    link.send_llc(TEST_LINK, user_data=b"0123456789abcdef")
    if not await peer.answer_or_end(link):
        link.inbox.clear()
        await goes_on(peer, connection)
        raise Differs("the implementation ignores it")


# --- types (A.3) ---------------------------------------------------------------------------------


@check("A.3-1", "An unknown type with the high-order bits 10 is silently discarded.")
async def optional_type(peer: Peer) -> None:
    connection, link = await established(peer)
    for kind in (0x80, 0x81, 0x9F, 0xA0, 0xBF):
        link.send_llc(TEST_LINK, type=kind)
        link.send_llc(TEST_LINK, type=kind, reply=1)
    await peer.ping(link)
    if link.inbox:
        raise Failed(f"the answer is {link.inbox[0]}")
    await connection.echo(b"goes on")


_UNKNOWN = {"2": 0x00, "3": 0x0A, "4": 0x3F}


async def _unknown_type(kind: int, peer: Peer) -> None:
    connection, link = await established(peer)
    link.send_llc(TEST_LINK, type=kind)
    await peer.link_ended(link)
    await peer.ended(connection.tcp)


for _number, _kind in _UNKNOWN.items():
    check(
        f"A.3-{_number}",
        f"A message of the unknown type 0x{_kind:02x}, which must be supported, ends the link.",
        robust=True,
    )(partial(_unknown_type, _kind))


@check("A.3-5", "A message of a type with the high-order bits 01 ends the link.", robust=True)
async def undefined_type(peer: Peer) -> None:
    connection, link = await established(peer)
    link.send_llc(TEST_LINK, type=0x47)
    link.send_llc(TEST_LINK, user_data=bytes(16))
    if not await peer.answer_or_end(link):
        link.inbox.clear()
        await goes_on(peer, connection)
        raise Differs("the implementation ignores it; the RFC does not define these bits")


_LENGTHS = {"6": 0, "7": 43, "8": 45, "9": 255}


async def _wrong_length(length: int, peer: Peer) -> None:
    _, link = await established(peer)
    link.send_llc(TEST_LINK, length=length)
    await peer.link_ended(link)


for _number, _length in _LENGTHS.items():
    check(
        f"A.3-{_number}", f"An LLC message with length {_length} ends the link (C.7.1).",
        needs=("version-1",), robust=True,
    )(partial(_wrong_length, _length))  # fmt: skip

_SIZES = {"10": 1, "11": 4, "12": 43, "13": 48}


async def _wrong_size(size: int, peer: Peer) -> None:
    _, link = await established(peer)
    link.send(peer_message(link, TEST_LINK).ljust(size, b"\0")[:size])
    await peer.link_ended(link)


for _number, _size in _SIZES.items():
    check(
        f"A.3-{_number}",
        f"An LLC message of {_size} byte{'s' * (_size > 1)} ends the link (C.7.1).", robust=True
    )(partial(_wrong_size, _size))  # fmt: skip


# --- CONFIRM RKEY and DELETE RKEY ----------------------------------------------------------------


@check("A.3.5-1", "CONFIRM RKEY for a new RMB is echoed, with the reply flag only.")
async def confirm_rkey(peer: Peer) -> None:
    connection, link = await established(peer)
    with link.new_region() as region:
        reply = await reply_to(peer, link, CONFIRM_RKEY, rkey=region.rkey, address=region.address)
        if reply.negative or reply.retry:
            raise Failed(f"the reply is negative: {reply}")
        if (reply.rkey, reply.address) != (region.rkey, region.address):
            raise Failed("the reply has another RToken than the request")
        await connection.echo(b"goes on")


@check("A.3.5-2", "A further connection may use an RMB that CONFIRM RKEY has announced.",
       needs=("parallel",))  # fmt: skip
async def confirmed_rmb_is_used(peer: Peer) -> None:
    connection, link = await established(peer)
    with link.new_region() as region:
        await reply_to(peer, link, CONFIRM_RKEY, rkey=region.rkey, address=region.address)
        name = "confirm" if peer.role is SERVER else "accept"
        place = {"rkey": region.rkey, "rmb_address": region.address, "rmbe_index": 1}
        second = await peer.connect(group=connection.group, change={name: place})
        second.use_memory(region.memory, 1)
        await second.echo(b"in the new RMB")
        await connection.echo(b"in the old one")


@check("A.3.5-3", "CONFIRM RKEY may be repeated for a known RMB.")
async def confirm_rkey_again(peer: Peer) -> None:
    connection, link = await established(peer)
    for _ in range(2):
        await reply_to(peer, link, CONFIRM_RKEY, rkey=link.region.rkey, address=link.region.address)
    await connection.echo(b"goes on")


@check("A.3.5-4", "CONFIRM RKEY with other links' RTokens is echoed completely.", robust=True)
async def confirm_rkey_for_other_links(peer: Peer) -> None:
    connection, link = await established(peer)
    with link.new_region() as region:
        reply = await reply_to(
            peer, link, CONFIRM_RKEY, other_tokens=1, rkey=region.rkey, address=region.address,
            link_1=9, rkey_1=0x11111111, address_1=0x2222,
        )  # fmt: skip
        if (reply.link_1, reply.rkey_1, reply.address_1) != (9, 0x11111111, 0x2222):
            raise Failed("the reply does not echo the RToken of the other link")
        await goes_on(peer, connection)


@check("A.3.6-1", "CONFIRM RKEY with three other RTokens is continued, and both are echoed.",
       robust=True, needs=("version-1",))  # fmt: skip
async def confirm_rkey_continuation(peer: Peer) -> None:
    connection, link = await established(peer)
    with link.new_region() as region:
        link.send_llc(
            CONFIRM_RKEY, other_tokens=3, rkey=region.rkey, address=region.address,
            link_1=9, rkey_1=1, address_1=1, link_2=10, rkey_2=2, address_2=2,
        )  # fmt: skip
        link.send_llc(CONFIRM_RKEY_CONTINUATION, tokens_left=1, link_1=11, rkey_1=3, address_1=3)
        await peer.llc(link, CONFIRM_RKEY, reply=True)
        reply = await peer.llc(link, CONFIRM_RKEY_CONTINUATION, reply=True)
        if reply.tokens_left != 1 or reply.rkey_1 != 3:
            raise Failed("the reply does not echo CONFIRM RKEY CONTINUATION")
        await goes_on(peer, connection)


@check(
    "C.7.1-4",
    "CONFIRM RKEY CONTINUATION without CONFIRM RKEY ends the link.",
    robust=True,
    needs=("version-1",),
)
async def continuation_alone(peer: Peer) -> None:
    _, link = await established(peer)
    link.send_llc(CONFIRM_RKEY_CONTINUATION, tokens_left=1, link_1=1, rkey_1=3, address_1=3)
    await peer.link_ended(link)


@check(
    "C.7.1-5",
    "CONFIRM RKEY CONTINUATION whose count does not fit ends the link.",
    robust=True,
    needs=("version-1",),
)
async def continuation_with_another_count(peer: Peer) -> None:
    _, link = await established(peer)
    link.send_llc(CONFIRM_RKEY, other_tokens=3, rkey=5, address=5, link_1=9, link_2=10)
    link.send_llc(CONFIRM_RKEY_CONTINUATION, tokens_left=3, link_1=11, link_2=12, link_3=13)
    await peer.link_ended(link)


@check(
    "A.3.5-5", "CONFIRM RKEY that contradicts a known RToken gets a negative reply.", robust=True
)
async def contradicting_rkey(peer: Peer) -> None:
    connection, link = await established(peer)
    reply = await reply_to(
        peer, link, CONFIRM_RKEY, rkey=link.region.rkey, address=link.region.address + 4096
    )
    if not reply.negative:
        raise Differs("the implementation accepts it")
    await goes_on(peer, connection)


@check("A.3.7-1", "DELETE RKEY of an RMB that no connection uses is echoed.", needs=("version-1",))
async def delete_rkey(peer: Peer) -> None:
    connection, link = await established(peer)
    with link.new_region() as region:
        await reply_to(peer, link, CONFIRM_RKEY, rkey=region.rkey, address=region.address)
        reply = await reply_to(peer, link, DELETE_RKEY, count=1, rkey_1=region.rkey)
        if reply.negative or reply.error_mask or reply.count != 1:
            raise Failed(f"the reply is negative: mask 0x{reply.error_mask:02x}")
        if reply.rkey_1 != region.rkey:
            raise Failed("the reply has another RKey than the request")
        await connection.echo(b"goes on")


@check(
    "A.3.7-2",
    "DELETE RKEY of an unknown RKey gets a negative reply with its bit in the mask.",
    needs=("version-1",),
)
async def delete_unknown_rkey(peer: Peer) -> None:
    connection, link = await established(peer)
    reply = await reply_to(peer, link, DELETE_RKEY, count=1, rkey_1=link.region.rkey ^ 0x00FFFF00)
    if not reply.negative or reply.error_mask != 0x80:
        raise Failed(f"the reply is {reply} with mask 0x{reply.error_mask:02x}")
    await goes_on(peer, connection)


@check(
    "A.3.7-3",
    "The error mask of DELETE RKEY shows exactly the unknown ones of several RKeys.",
    needs=("version-1",),
)
async def error_mask(peer: Peer) -> None:
    connection, link = await established(peer)
    with link.new_region() as one, link.new_region() as other:
        for region in (one, other):
            await reply_to(peer, link, CONFIRM_RKEY, rkey=region.rkey, address=region.address)
        reply = await reply_to(
            peer, link, DELETE_RKEY, count=4, rkey_1=one.rkey, rkey_2=one.rkey ^ 0x00FFFF00,
            rkey_3=other.rkey, rkey_4=other.rkey ^ 0x00FFFF00,
        )  # fmt: skip
        if not reply.negative or reply.error_mask != 0x50:
            raise Failed(f"the mask is 0x{reply.error_mask:02x} instead of 0x50")
    await goes_on(peer, connection)


@check("A.3.7-4", "A deleted RKey is unknown afterwards.", needs=("version-1",))
async def delete_rkey_twice(peer: Peer) -> None:
    _, link = await established(peer)
    with link.new_region() as region:
        await reply_to(peer, link, CONFIRM_RKEY, rkey=region.rkey, address=region.address)
        await reply_to(peer, link, DELETE_RKEY, count=1, rkey_1=region.rkey)
        reply = await reply_to(peer, link, DELETE_RKEY, count=1, rkey_1=region.rkey)
    if not reply.negative:
        raise Failed("the second DELETE RKEY of the same RKey gets a positive reply")


@check("A.3.7-5", "DELETE RKEY that counts more RKeys than it has room for ends the link.",
       robust=True, needs=("version-1",))  # fmt: skip
async def delete_too_many(peer: Peer) -> None:
    _, link = await established(peer)
    link.send_llc(DELETE_RKEY, count=9, rkey_1=1)
    if not await peer.answer_or_end(link):
        raise Differs("the implementation answers it")


@check("C.7.1-6", "A reply to CONFIRM RKEY or DELETE RKEY without a request ends the link.",
       robust=True)  # fmt: skip
async def unasked_rkey_reply(peer: Peer) -> None:
    for layout in (CONFIRM_RKEY, DELETE_RKEY):
        _, link = await established(peer)
        link.send_llc(layout, reply=1, rkey_1=1)
        await peer.link_ended(link)


# --- ADD LINK and CONFIRM LINK -------------------------------------------------------------------


@check(
    "3.5.5.1.2-1",
    "A client's ADD LINK leads to ADD LINK of the server, or to nothing.",
    SERVER,
    needs=("version-1",),
)
async def client_notice(peer: Peer) -> None:
    connection, link = await established(peer)
    rnic = peer.session.devices[-1].rnic
    link.send_llc(ADD_LINK, gid=rnic.gid, mac=rnic.mac)
    await goes_on(peer, connection)
    if any(each.layout is ADD_LINK and each.reply for each in link.inbox):
        raise Failed("the server replies to it")


@check(
    "3.5.5.1.1-1", "A client answers ADD LINK of an established group, and data goes on.", CLIENT
)
async def later_add_link(peer: Peer) -> None:
    connection, link = await established(peer)
    link.send_llc(ADD_LINK, gid=link.rnic.gid, mac=link.rnic.mac, link_number=7, qp_number=0)
    connection.write(b"meanwhile")
    reply = await peer.llc(link, ADD_LINK, reply=True)
    if reply.link_number != 7:
        raise Failed(f"the reply has link number {reply.link_number} instead of 7")
    if await connection.read(9) != b"meanwhile":
        raise Failed("the echo is wrong")


@check(
    "C.7.1-7", "ADD LINK with the number of a link that exists ends the link.", CLIENT, robust=True
)
async def add_link_with_a_used_number(peer: Peer) -> None:
    _, link = await established(peer)
    rnic = peer.session.devices[-1].rnic
    link.send_llc(
        ADD_LINK, gid=rnic.gid, mac=rnic.mac, qp_number=0x4711, link_number=link.number, qp_mtu=5
    )
    if not await peer.answer_or_end(link):
        raise Differs(f"the answer is {link.inbox[0]}")


@check("C.7.1-8", "A reply to ADD LINK without a request ends the link.", robust=True)
async def unasked_add_link_reply(peer: Peer) -> None:
    _, link = await established(peer)
    link.send_llc(ADD_LINK, reply=1, **link.own, link_number=77, qp_mtu=5)
    await peer.link_ended(link)


@check(
    "C.7.1-9",
    "ADD LINK CONTINUATION without ADD LINK ends the link.",
    robust=True,
    needs=("version-1",),
)
async def unasked_continuation(peer: Peer) -> None:
    _, link = await established(peer)
    reply = int(peer.role is SERVER)
    link.send_llc(ADD_LINK_CONTINUATION, reply=reply, link_number=77, tokens_left=0)
    await peer.link_ended(link)


@check("C.7.1-10", "CONFIRM LINK on a link that is confirmed ends the link.", robust=True)
async def second_confirm_link(peer: Peer) -> None:
    connection, link = await established(peer)
    link.send(connection.group.confirm_link(link, reply=int(peer.role is SERVER)))
    await peer.link_ended(link)


# --- DELETE LINK ---------------------------------------------------------------------------------


@check("3.5.4-1", "A client complies with DELETE LINK for all links, and resets connections.",
       CLIENT, robust=True)  # fmt: skip
async def delete_all_links(peer: Peer) -> None:
    connection, link = await established(peer)
    link.group.auto.discard(DELETE_LINK)
    link.send_llc(DELETE_LINK, all_links=1, orderly=1, reason=0x00030000)
    await peer.ended(connection.tcp, "RST")


@check("3.5.4-2", "A server answers a client's DELETE LINK for all by one of its own.", SERVER,
       robust=True)  # fmt: skip
async def client_deletes_all_links(peer: Peer) -> None:
    connection, link = await established(peer)
    link.group.auto.discard(DELETE_LINK)
    link.send_llc(DELETE_LINK, all_links=1, orderly=1, reason=OPERATOR)
    request = await peer.llc(link, DELETE_LINK)
    if request.reply or not request.all_links:
        raise Failed(f"the answer is {request} instead of a request for all links")
    await peer.ended(connection.tcp, "RST")


@check("3.5.4-3", "After the end of a group the next contact of the same peers is a first one.",
       SERVER)  # fmt: skip
async def first_contact_after_the_end(peer: Peer) -> None:
    connection, link = await established(peer)
    link.send_llc(DELETE_LINK, all_links=1, orderly=1, reason=OPERATOR)
    await peer.ended(connection.tcp)
    second = await peer.connect(peer_id=connection.group.peer_id)
    await second.echo(b"anew")


@check("C.7.1-11", "DELETE LINK of an unknown link gets a reply with 'unknown link ID'.")
async def delete_unknown_link(peer: Peer) -> None:
    connection, link = await established(peer)
    link.group.auto.discard(DELETE_LINK)
    link.send_llc(DELETE_LINK, link_number=99, reason=OPERATOR, orderly=1)
    answer = await peer.llc(link, DELETE_LINK)
    if answer.reason != UNKNOWN_LINK or answer.link_number != 99:
        raise Failed(f"the answer is {answer} with reason 0x{answer.reason:08x}")
    if not answer.reply:
        raise Failed("the answer has no reply flag")
    await goes_on(peer, connection)


@check(
    "3.5.5.1.4-1", "A client's DELETE LINK of the only link ends the group.", SERVER, robust=True
)
async def client_deletes_the_only_link(peer: Peer) -> None:
    connection, link = await established(peer)
    link.send_llc(DELETE_LINK, link_number=link.number, reason=LOST_PATH)
    await peer.ended(connection.tcp)


@check(
    "3.5.5.1.3-1", "A server's DELETE LINK of the only link ends the group.", CLIENT, robust=True
)
async def server_deletes_the_only_link(peer: Peer) -> None:
    connection, link = await established(peer)
    link.send_llc(DELETE_LINK, link_number=link.number, reason=LOST_PATH)
    await peer.ended(connection.tcp)
