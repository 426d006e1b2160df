"""How connections end: figures 22 and 23 as the peer sees them (RFC 7609, 4.8, A.4).

The implementation's application echoes, and closes when its stream ends.  So the suite ends first,
except with a daytime service (RFC 867).
"""

from __future__ import annotations

from functools import partial

from smc_conform.connection import Connection
from smc_conform.messages import DELETE_LINK
from smc_conform.peer import Peer
from smc_conform.registry import check
from smc_conform.roles import Role
from smc_conform.verdicts import Differs, Failed, Silence

SERVER, CLIENT = Role.SERVER, Role.CLIENT


async def used(peer: Peer) -> Connection:
    """A connection that has carried data in both directions."""
    connection = await peer.connect()
    await connection.echo(b"before the end")
    return connection


async def nothing_follows(peer: Peer, connection: Connection, flag: str) -> None:
    """Raise Failed if a CDC message of the connection follows the first one with this flag."""
    count = next(i for i, each in enumerate(connection.messages) if getattr(each, flag))
    if not connection.link.failed:
        await peer.ping(connection.link)
    more = connection.messages[count + 1 :]
    if more:
        raise Failed(f"{more[0]} follows {connection.messages[count]}")


# --- figure 22 -----------------------------------------------------------------------------------


@check("4.8.1-1", "After the peer's D the application reads the end, and its close sends C.")
async def done_is_answered_by_closed(peer: Peer) -> None:
    connection = await used(peer)
    connection.send_cdc(done=1)
    await connection.expect_flag("closed")


@check("4.8.1-2", "After the peer's C the implementation answers by C.")
async def closed_is_answered_by_closed(peer: Peer) -> None:
    connection = await used(peer)
    connection.send_cdc(closed=1, done=1)
    await connection.expect_flag("closed")


@check("4.8.1-3", "C without D ends the peer's stream, too.")
async def closed_without_done(peer: Peer) -> None:
    connection = await used(peer)
    connection.send_cdc(closed=1)
    await connection.expect_flag("closed")


@check("4.8.1-4", "TCP ends by FIN after both sides have sent C.")
async def tcp_ends_by_fin(peer: Peer) -> None:
    connection = await used(peer)
    connection.send_cdc(done=1)
    await connection.expect_flag("closed")
    if connection.tcp.end is not None:
        raise Differs(f"TCP has ended by {connection.tcp.end} before the suite's C")
    connection.send_cdc(closed=1, done=1)
    await peer.ended(connection.tcp, "FIN")


@check("4.8.1-5", "TCP does not end before the peer's C.")
async def tcp_stays_before_closed(peer: Peer) -> None:
    connection = await used(peer)
    connection.send_cdc(done=1)
    await connection.expect_flag("closed")
    await peer.quiet(0.3)
    if connection.tcp.end is not None:
        raise Differs(f"TCP has ended by {connection.tcp.end}")


@check("4.8.1-6", "Data in front of D is echoed before C.")
async def data_before_done(peer: Peer) -> None:
    connection = await used(peer)
    connection.write(b"the last words", done=1)
    if await connection.read(14, update=False) != b"the last words":
        raise Failed("the echo is wrong")
    await connection.expect_flag("closed")


@check("4.8.1-7", "Data in front of C is delivered, or the connection is reset.")
async def data_before_closed(peer: Peer) -> None:
    connection = await used(peer)
    connection.write(b"the last words", done=1, closed=1)
    await peer.until(
        lambda: connection.has("closed") or connection.has("aborted") or bool(connection.tcp.end),
        "an answer to C",
    )


@check("4.8.1-8", "A half-closed connection goes on in the other direction.")
async def half_closed(peer: Peer) -> None:
    connection = await used(peer)
    data = bytes(range(256)) * 100
    connection.write(data[: connection.own_room])
    connection.send_cdc(done=1)
    back = await connection.read(connection.own_room)
    if back != data[: connection.own_room]:
        raise Failed("the echo is wrong")
    await connection.expect_flag("closed")


@check("4.8.1-9", "After C the implementation sends no CDC message any more (A.4, C-bit).")
async def nothing_after_closed(peer: Peer) -> None:
    connection = await used(peer)
    connection.send_cdc(done=1)
    await connection.expect_flag("closed")
    for _ in range(3):
        connection.send_cdc(done=1, update_requested=1, writer_blocked=1)
    await nothing_follows(peer, connection, "closed")


@check("4.8.1-10", "After C the implementation writes no data any more.")
async def no_data_after_closed(peer: Peer) -> None:
    connection = await used(peer)
    connection.send_cdc(done=1)
    await connection.expect_flag("closed")
    end = connection.peer_produced
    before = connection.peek(connection.own_room, end)
    connection.send_cdc(done=1)
    await peer.ping(connection.link)
    if connection.peek(connection.own_room, end) != before:
        raise Failed("the element has changed after C")


@check("4.8.1-11", "D and C may be repeated in later messages.")
async def repeated_flags(peer: Peer) -> None:
    connection = await used(peer)
    for _ in range(3):
        connection.send_cdc(done=1)
    await connection.expect_flag("closed")
    connection.send_cdc(done=1, closed=1)
    await peer.ended(connection.tcp, "FIN")


@check("4.8.1-13", "The cursors of the message with C are those of all data.")
async def cursors_of_closed(peer: Peer) -> None:
    connection = await used(peer)
    connection.write(b"x" * 1000, done=1)
    message = await connection.expect_flag("closed")
    position = connection.position(message.producer_wrap, message.producer, connection.own_room)
    if position != 1014:
        raise Failed(f"C announces {position} bytes instead of 1014")


@check("4.8.1-14", "Messages after the peer's C are ignored.", robust=True)
async def messages_after_own_closed(peer: Peer) -> None:
    connection = await used(peer)
    connection.send_cdc(done=1, closed=1)
    connection.send_cdc(done=1, closed=1)
    connection.send_cdc()
    await connection.expect_flag("closed")
    await peer.ping(connection.link)


@check("4.8.1-15", "The element of a closed connection is used again only for another connection.",
       needs=("parallel",))  # fmt: skip
async def group_after_a_close(peer: Peer) -> None:
    first = await used(peer)
    second = await peer.connect(group=first.group)
    first.send_cdc(done=1, closed=1)
    await first.expect_flag("closed")
    await peer.ended(first.tcp)
    third = await peer.connect(group=first.group)
    await third.echo(b"third")
    await second.echo(b"second")


@check("4.8.1-16", "A peer that never answers C is given up, by the end of TCP.", slow=True,
       robust=True)  # fmt: skip
async def no_answer_to_closed(peer: Peer) -> None:
    connection = await used(peer)
    connection.send_cdc(done=1)
    await connection.expect_flag("closed")
    await peer.until(
        lambda: connection.tcp.end is not None, "the end of the TCP connection",
        patience=peer.session.options.timers,
    )  # fmt: skip
    await nothing_follows(peer, connection, "closed")


# --- the implementation ends first ---------------------------------------------------------------


async def daytime(peer: Peer) -> Connection:
    """A connection to the daytime service, whose line has arrived."""
    connection = await peer.connect(port=peer.session.options.daytime or 0)
    await peer.until(lambda: connection.peer_produced > 10, "the line", connection)
    return connection


@check("4.8.1-17", "A side that ends first sends its data, and then C.", SERVER, needs=("daytime",))
async def first_end(peer: Peer) -> None:
    connection = await daytime(peer)
    message = await connection.expect_flag("closed")
    position = connection.position(message.producer_wrap, message.producer, connection.own_room)
    if position != connection.peer_produced or not connection.peek(position).endswith(b"\r\n"):
        raise Failed("C came before all data")


@check("4.8.1-18", "The side that ended first takes the peer's C as the end.", SERVER,
       needs=("daytime",))  # fmt: skip
async def first_end_is_answered(peer: Peer) -> None:
    connection = await daytime(peer)
    await connection.expect_flag("closed")
    await connection.read(connection.peer_produced)
    connection.send_cdc(done=1, closed=1)
    await peer.ended(connection.tcp, "FIN")
    await nothing_follows(peer, connection, "closed")


@check("4.8.1-19", "The side that ended first waits for C after the peer's D.", SERVER,
       needs=("daytime",))  # fmt: skip
async def first_end_and_half_close(peer: Peer) -> None:
    connection = await daytime(peer)
    await connection.expect_flag("closed")
    connection.send_cdc(done=1)
    await peer.ping(connection.link)
    connection.send_cdc(done=1, closed=1)
    await peer.ended(connection.tcp, "FIN")


@check("4.8.1-20", "Both sides may send C at the same time.", SERVER, needs=("daytime",))
async def simultaneous_close(peer: Peer) -> None:
    connection = await peer.connect(port=peer.session.options.daytime or 0)
    connection.send_cdc(done=1, closed=1)
    await peer.ended(connection.tcp)


@check("4.8.2-1", "A of the peer after C needs no answer.", SERVER, needs=("daytime",), robust=True)
async def abort_after_their_close(peer: Peer) -> None:
    connection = await daytime(peer)
    await connection.expect_flag("closed")
    connection.send_cdc(aborted=1)
    await peer.ended(connection.tcp)
    await nothing_follows(peer, connection, "closed")


# --- figure 23 -----------------------------------------------------------------------------------

_BEFORE: dict[str, tuple[str, dict[str, int]]] = {
    "2": ("an open connection", {}),
    "3": ("a connection after D", {"done": 1}),
}


async def _abort(first: dict[str, int], peer: Peer) -> None:
    connection = await used(peer)
    if first:
        connection.send_cdc(**first)
    connection.send_cdc(aborted=1)
    await peer.until(
        lambda: connection.has("aborted") or connection.has("closed"), "an answer to A", connection
    )
    if not first and not connection.has("aborted"):
        raise Failed("A is not answered by A")
    await peer.ended(connection.tcp)


for _number, (_words, _first) in _BEFORE.items():
    check(f"4.8.2-{_number}", f"A ends {_words}; it is answered by A before C.", robust=True)(
        partial(_abort, _first)
    )


@check("4.8.2-4", "After A the implementation sends no CDC message any more (A.4, A-bit).",
       robust=True)  # fmt: skip
async def nothing_after_abort(peer: Peer) -> None:
    connection = await used(peer)
    connection.send_cdc(aborted=1)
    await connection.expect_flag("aborted")
    connection.send_cdc(aborted=1)
    connection.send_cdc()
    await nothing_follows(peer, connection, "aborted")


@check("4.8.2-5", "A counts whatever the cursors of its message are.", robust=True)
async def abort_with_impossible_cursors(peer: Peer) -> None:
    connection = await used(peer)
    connection.send_cdc(
        aborted=1, producer=0xFFFFFFFF, producer_wrap=77, consumer=0xFFFFFFFF, consumer_wrap=77
    )
    await connection.expect_flag("aborted")
    await peer.ping(connection.link)


@check("4.8.2-6", "A together with D and C counts as A.", robust=True)
async def abort_with_other_flags(peer: Peer) -> None:
    connection = await used(peer)
    connection.send_cdc(aborted=1, done=1, closed=1)
    await connection.expect_flag("aborted")


@check("4.8.2-7", "RST of TCP starts the abnormal end: the implementation sends A.", robust=True)
async def reset_of_tcp(peer: Peer) -> None:
    connection = await used(peer)
    connection.tcp.reset()
    await connection.expect_flag("aborted")
    await nothing_follows(peer, connection, "aborted")


@check("4.8.2-8", "FIN of TCP alone is no end of the connection.")
async def fin_of_tcp(peer: Peer) -> None:
    connection = await used(peer)
    await connection.tcp.send_eof()
    await peer.quiet(0.1)
    if connection.has("aborted"):
        raise Differs("the implementation aborts the connection")
    await connection.echo(b"goes on")


@check("4.8.2-9", "Data on the TCP connection after the switch aborts the connection.", robust=True)
async def data_on_tcp(peer: Peer) -> None:
    connection = await used(peer)
    await connection.tcp.send(b"stray data")
    try:
        await peer.until(
            lambda: connection.has("aborted") or connection.tcp.end is not None
            or bool(connection.tcp.buffer),
            "the end of the connection",
        )  # fmt: skip
    except Silence:
        await connection.echo(b"goes on")
        raise Differs("the implementation does not look at the TCP connection") from None
    if connection.tcp.buffer:
        raise Failed("the implementation answers over TCP")


@check("4.8.2-10", "An abort of one connection leaves the others of its group alone.",
       needs=("parallel",))  # fmt: skip
async def abort_of_one(peer: Peer) -> None:
    first = await used(peer)
    second = await peer.connect(group=first.group)
    first.send_cdc(aborted=1)
    await first.expect_flag("aborted")
    await second.echo(b"goes on")


@check("4.8.2-11", "An abort while the implementation waits for room ends the wait.", robust=True)
async def abort_of_a_blocked_writer(peer: Peer) -> None:
    connection = await peer.connect()
    data = bytes(connection.own_room)
    connection.write(data)
    await peer.until(lambda: connection.peer_produced >= len(data), "the echo", connection)
    connection.write(data[: connection.window])
    connection.send_cdc(aborted=1)
    await connection.expect_flag("aborted")
    await peer.ended(connection.tcp)


@check("4.8.2-12", "Unread data does not keep an abort from being answered.", robust=True)
async def abort_with_unread_data(peer: Peer) -> None:
    connection = await used(peer)
    connection.write(b"unread" * 100, aborted=1)
    await connection.expect_flag("aborted")


@check("4.8.2-13", "RST after the peer's D is an abort, too.", robust=True)
async def reset_after_done(peer: Peer) -> None:
    connection = await used(peer)
    connection.send_cdc(done=1)
    connection.tcp.reset()
    await peer.until(
        lambda: connection.has("aborted") or connection.has("closed"), "A or C", connection
    )


@check("4.8.3-1", "The end of the last link resets the connections of its group.", robust=True)
async def last_link(peer: Peer) -> None:
    connection = await used(peer)
    connection.link.fail()
    connection.link.qp.close()
    await peer.until(
        lambda: connection.tcp.end is not None, "the end of the TCP connection",
        patience=peer.session.options.timers,
    )  # fmt: skip
    if connection.tcp.end != "RST":
        raise Failed("TCP has ended by FIN, so the application learns of no error")


@check("4.8.3-2", "DELETE LINK for all resets every connection of the group.", needs=("parallel",),
       robust=True)  # fmt: skip
async def all_connections_of_a_group(peer: Peer) -> None:
    first = await used(peer)
    second = await peer.connect(group=first.group)
    first.link.send_llc(DELETE_LINK, all_links=1, reason=0x00030000)
    await peer.ended(first.tcp, "RST")
    await peer.ended(second.tcp, "RST")
