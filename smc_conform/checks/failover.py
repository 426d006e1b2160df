"""Groups with two links, and failover between them (RFC 7609, 2.2, 2.3, 3.5.1.6, 3.5.5, 4.6)."""

from __future__ import annotations

import random

from smc_conform.connection import Connection
from smc_conform.link import Link
from smc_conform.messages import (
    ADD_LINK,
    ADD_LINK_CONTINUATION,
    CONFIRM_LINK,
    CONFIRM_RKEY,
    DELETE_LINK,
    TEST_LINK,
)
from smc_conform.peer import Peer, Phase
from smc_conform.registry import check
from smc_conform.roles import Role
from smc_conform.verdicts import Failed

SERVER, CLIENT = Role.SERVER, Role.CLIENT
TWO = ("two-rnics",)
LOST_PATH = 0x00010000
OPERATOR = 0x00020000


async def two_links(peer: Peer) -> tuple[Connection, Link, Link]:
    """A connection that has carried data in a group with two links."""
    connection = await peer.connect(links=2)
    await connection.echo(b"begin")
    first, second = connection.group.links.values()
    return connection, first, second


def validation(connection: Connection, link: Link, sequence: int) -> None:
    """Move the suite's end of the connection, with a failover validation (4.6.1)."""
    connection.link = link
    last = connection.sequence
    connection.send_cdc(failover_validation=1, sequence=sequence)
    connection.sequence = last


async def lose(peer: Peer, link: Link) -> None:
    """Let the link fail, once the implementation has what was sent over it.

    The validation names the last completed message (4.6.1), and one that the queue pair still has
    is lost with it.
    """
    await peer.until(lambda: link.completed >= link.posted, "the completion of all messages")
    link.fail()


# --- the second link -----------------------------------------------------------------------------


@check("3.5.1.6-1", "A second link comes up over another RNIC of the suite.", needs=TWO)
async def second_link(peer: Peer) -> None:
    connection, first, second = await two_links(peer)
    await peer.ping(first)
    await peer.ping(second)
    await connection.echo(b"over two links")


@check("3.5.1.6.3-1", "ADD LINK CONTINUATION gives the RToken of every RMB on the new link.",
       needs=TWO)  # fmt: skip
async def tokens_of_the_new_link(peer: Peer) -> None:
    connection, _, second = await two_links(peer)
    if second.number not in connection.tokens:
        raise Failed("no RToken of the connection's RMB on the new link has come")


@check("2.3-1", "The suite's data may come over either link.", needs=TWO)
async def data_over_either_link(peer: Peer) -> None:
    connection, first, second = await two_links(peer)
    for number in range(6):
        link = (first, second)[number % 2]
        # A move needs a validation, for which the last message must have completed.
        await peer.ping(connection.link)
        validation(connection, link, connection.sequence)
        await connection.echo(bytes((number,)) * 300)


@check("A.3.8-1", "TEST LINK is answered on its own link.", needs=TWO)
async def test_link_on_each_link(peer: Peer) -> None:
    _, first, second = await two_links(peer)
    for link, other in ((first, second), (second, first)):
        link.send_llc(TEST_LINK, user_data=b"0123456789abcdef")
        await peer.llc(link, TEST_LINK, reply=True)
        if any(each.layout is TEST_LINK and each.reply for each in other.inbox):
            raise Failed("the reply came over the other link")


@check("A.3.5-1", "CONFIRM RKEY in a group with two links carries both RTokens.", needs=TWO)
async def confirm_rkey_over_two_links(peer: Peer) -> None:
    connection, first, second = await two_links(peer)
    with first.new_region() as one, second.register(one.memory) as other:
        first.send_llc(
            CONFIRM_RKEY, other_tokens=1, rkey=one.rkey, address=one.address,
            link_1=second.number, rkey_1=other.rkey, address_1=other.address,
        )  # fmt: skip
        reply = await peer.llc(first, CONFIRM_RKEY, reply=True)
        if reply.negative:
            raise Failed("the reply is negative")
        await connection.echo(b"goes on")


@check(
    "C.7.1-1", "CONFIRM RKEY without the RToken of a link ends that link.", needs=TWO, robust=True
)
async def confirm_rkey_without_a_link(peer: Peer) -> None:
    connection, first, second = await two_links(peer)
    with first.new_region() as one:
        first.send_llc(CONFIRM_RKEY, rkey=one.rkey, address=one.address)
        await peer.until(
            lambda: (
                bool(second.failed)
                or any(each.layout is DELETE_LINK for each in [*first.inbox, *first.answered])
            ),
            "the end of the link without an RToken",
        )
        await connection.echo(b"over the other one")


# --- the loss of a link --------------------------------------------------------------------------


@check("2.3-2", "When a link fails, its connection continues over the other one.", needs=TWO)
async def connection_continues(peer: Peer) -> None:
    connection, first, second = await two_links(peer)
    last = connection.sequence
    await lose(peer, first)
    validation(connection, second, last)
    await connection.echo(b"over the other link")


@check("4.6.1-1", "The first message on the new link is a failover validation.", needs=TWO)
async def validation_comes_first(peer: Peer) -> None:
    connection, first, second = await two_links(peer)
    before = len(connection.messages)
    await lose(peer, first)
    validation(connection, second, connection.sequence)
    await connection.echo(b"over the other link")
    message = connection.messages[before]
    if not message.failover_validation:
        raise Failed(f"the first message is {message}")


@check(
    "4.6.1-2", "The validation has the sequence number of the last completed message.", needs=TWO
)
async def validation_number(peer: Peer) -> None:
    connection, first, second = await two_links(peer)
    await peer.ping(first)
    last = connection.last.sequence
    before = len(connection.messages)
    await lose(peer, first)
    validation(connection, second, connection.sequence)
    await connection.echo(b"over the other link")
    message = connection.messages[before]
    if message.sequence != last:
        raise Failed(f"the validation has the number {message.sequence} instead of {last}")


@check("4.6.2-1", "Messages after the validation have higher numbers than those before.", needs=TWO)
async def numbers_continue(peer: Peer) -> None:
    connection, first, second = await two_links(peer)
    last = connection.last.sequence
    await lose(peer, first)
    validation(connection, second, connection.sequence)
    await connection.echo(b"over the other link")
    if connection.last.sequence <= last:
        raise Failed(f"number {connection.last.sequence} follows {last}")


@check("4.6.1-3", "A validation of a message that was received lets the connection continue.",
       needs=TWO)  # fmt: skip
async def good_validation(peer: Peer) -> None:
    connection, _, second = await two_links(peer)
    await peer.ping(connection.link)
    for sequence in (connection.sequence, connection.sequence - 1, 0):
        validation(connection, second, sequence)
        await connection.echo(b"continues")


@check("4.6.1-4", "A validation of a message that was not received resets the connection.",
       needs=TWO, robust=True)  # fmt: skip
async def bad_validation(peer: Peer) -> None:
    connection, first, second = await two_links(peer)
    last = connection.sequence
    await lose(peer, first)
    validation(connection, second, last + 3)
    await peer.ended(connection.tcp, "RST")


@check("4.6.1-5", "The cursors and flags of a validation have no meaning.", needs=TWO)
async def validation_without_cursors(peer: Peer) -> None:
    connection, _, second = await two_links(peer)
    await peer.ping(connection.link)
    connection.link = second
    last = connection.sequence
    connection.send_cdc(
        failover_validation=1, sequence=last, producer=0xFFFFFFFF, consumer=0xFFFFFFFF, aborted=1
    )
    connection.sequence = last
    await connection.echo(b"continues")


@check("4.6.2-2", "Data under way when a link fails arrives once, and complete.", needs=TWO)
async def data_under_way(peer: Peer) -> None:
    choose = random.Random(peer.session.options.seed)
    connection, first, second = await two_links(peer)
    data = choose.randbytes(connection.own_room // 2)
    connection.write(data)
    await peer.until(lambda: first.completed >= first.posted, "the completion", connection)
    last = connection.sequence
    await lose(peer, first)
    validation(connection, second, last)
    back = await connection.read(len(data))
    if back != data:
        raise Failed("the echo is wrong after the failover")
    await connection.echo(choose.randbytes(20_000))


@check("4.6-1", "Data that is written again after a failover is not read twice.", needs=TWO)
async def replay_is_not_read_twice(peer: Peer) -> None:
    connection, first, second = await two_links(peer)
    await connection.echo(b"once")
    last = connection.sequence
    place = connection.produced
    await lose(peer, first)
    validation(connection, second, last - 1)
    connection.produced = place - 4
    connection.put(b"once")
    connection.sequence = last - 1
    connection.send_cdc()
    connection.sequence = last
    await connection.echo(b"twice?")


@check("2.3-3", "After a failure DELETE LINK of the lost link comes over the other one.", needs=TWO)
async def delete_link_follows(peer: Peer) -> None:
    _, first, second = await two_links(peer)
    second.group.auto.discard(DELETE_LINK)
    await lose(peer, first)
    request = await peer.llc(second, DELETE_LINK, patience=peer.session.options.timers)
    if request.link_number != first.number or request.all_links:
        raise Failed(f"the message is {request} instead of one for link {first.number}")
    if request.reply:
        raise Failed("DELETE LINK is a reply")


@check("3.5.5.1.3-1", "A client answers DELETE LINK of one link, and its connections move.", CLIENT,
       needs=TWO)  # fmt: skip
async def server_deletes_a_link(peer: Peer) -> None:
    connection, first, second = await two_links(peer)
    connection.group.auto.discard(DELETE_LINK)
    await peer.ping(first)
    validation(connection, second, connection.sequence)
    second.send_llc(DELETE_LINK, link_number=first.number, orderly=1, reason=OPERATOR)
    reply = await peer.llc(second, DELETE_LINK, reply=True)
    if reply.link_number != first.number:
        raise Failed(f"the reply is for link {reply.link_number}")
    await connection.echo(b"over the other link")


@check("3.5.5.1.4-1", "A server answers a client's DELETE LINK of one link by its own request.",
       SERVER, needs=TWO)  # fmt: skip
async def client_deletes_a_link(peer: Peer) -> None:
    connection, first, second = await two_links(peer)
    connection.group.auto.discard(DELETE_LINK)
    await peer.ping(first)
    validation(connection, second, connection.sequence)
    second.send_llc(DELETE_LINK, link_number=first.number, reason=LOST_PATH)
    request = await peer.llc(second, DELETE_LINK)
    if request.reply or request.link_number != first.number:
        raise Failed(f"the answer is {request} instead of a request for link {first.number}")
    second.send_llc(
        DELETE_LINK, reply=1, link_number=first.number, reason=request.reason,
        orderly=request.orderly,
    )  # fmt: skip
    await connection.echo(b"over the other link")


@check("4.8.3-1", "The loss of both links resets the connection.", needs=TWO, robust=True)
async def both_links(peer: Peer) -> None:
    connection, first, second = await two_links(peer)
    for link in (first, second):
        link.fail()
        link.qp.close()
    await peer.until(
        lambda: connection.tcp.end is not None, "the end of the TCP connection",
        patience=peer.session.options.timers,
    )  # fmt: skip


@check("3.5.2-1", "A further connection of a group with two links works.",
       needs=("two-rnics", "parallel"))  # fmt: skip
async def further_connection(peer: Peer) -> None:
    connection, _, _ = await two_links(peer)
    second = await peer.connect(group=connection.group)
    await second.echo(b"second")
    await connection.echo(b"first")


@check("3.5.2-2", "A further connection after the loss of a link works.",
       needs=("two-rnics", "parallel"))  # fmt: skip
async def further_connection_after_a_loss(peer: Peer) -> None:
    connection, first, second = await two_links(peer)
    last = connection.sequence
    await lose(peer, first)
    validation(connection, second, last)
    await connection.echo(b"moved")
    other = await peer.connect(group=connection.group)
    await other.echo(b"new")


# --- failures while a link is added --------------------------------------------------------------


@check("C.7.1-2", "A missing CONFIRM LINK reply on the second link ends that link alone.",
       SERVER, needs=TWO, slow=True)  # fmt: skip
async def no_confirm_link_reply(peer: Peer) -> None:
    handshake = await peer.reach(Phase.LINK_OFFERED)
    old = handshake.link
    new = await handshake.accept_offer(peer.session.devices[1])
    await peer.llc(new, CONFIRM_LINK)
    await peer.until(
        lambda: any(each.layout is DELETE_LINK for each in old.answered),
        "DELETE LINK of the new link", handshake.tcp, patience=peer.session.options.timers,
    )  # fmt: skip
    await handshake.connection.echo(b"with one link")


@check("C.7.1-3", "ADD LINK CONTINUATION whose count does not fit ends the link or the new one.",
       SERVER, needs=(*TWO, "version-1"), robust=True)  # fmt: skip
async def continuation_with_a_wrong_count(peer: Peer) -> None:
    handshake = await peer.reach(Phase.LINK_OFFERED)
    offer, group = handshake.link_offer, handshake.group
    assert group is not None
    old = handshake.link
    new = group.new_link(peer.session.devices[1], offer.link_number)
    await peer.connect_link(new, offer)
    old.send_llc(
        ADD_LINK, reply=1, **new.own, link_number=new.number, qp_mtu=new.rnic.mtu, psn=new.psn
    )
    await peer.llc(old, ADD_LINK_CONTINUATION)
    new.ready()
    old.send_llc(ADD_LINK_CONTINUATION, reply=1, link_number=new.number, tokens_left=0)
    await peer.until(
        lambda: handshake.tcp.end is not None or bool(old.failed or new.inbox)
        or any(each.layout is DELETE_LINK for each in old.answered),
        "the end of a link", patience=peer.session.options.timers,
    )  # fmt: skip
    if any(each.layout is CONFIRM_LINK for each in new.inbox):
        raise Failed("the server confirms a link on which it has no RToken of the RMB in use")


@check("C.7.1-4", "An ADD LINK reply with a reserved MTU gives the new link up.", SERVER, needs=TWO,
       slow=True)  # fmt: skip
async def reply_with_a_reserved_mtu(peer: Peer) -> None:
    handshake = await peer.reach(Phase.LINK_OFFERED)
    old = handshake.link
    rnic = peer.session.devices[1].rnic
    old.send_llc(
        ADD_LINK, reply=1, gid=rnic.gid, mac=rnic.mac, qp_number=0x4711,
        link_number=handshake.link_offer.link_number, qp_mtu=15, psn=1,
    )  # fmt: skip
    await peer.until(
        lambda: any(each.layout is DELETE_LINK for each in old.answered),
        "DELETE LINK of the new link", handshake.tcp, patience=peer.session.options.timers,
    )  # fmt: skip
    await handshake.connection.echo(b"with one link")
