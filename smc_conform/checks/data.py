"""Data: cursors, wraps, windows, flags and urgent data (RFC 7609, 3.4, 4.3, 4.5, 4.7, A.4)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial

from smc_conform.connection import Connection
from smc_conform.messages import CDC, Message, with_bytes
from smc_conform.peer import Peer, Phase
from smc_conform.registry import check
from smc_conform.roles import Role
from smc_conform.verdicts import Differs, Failed, Inconclusive, Silence

_CODE_OF_128_KIB = 3
"""The size code of an element in SMC Accept and SMC Confirm (A.2.3)."""


def pattern(count: int, seed: int = 0) -> bytes:
    """Bytes without a period that a ring's size could hide."""
    return random.Random(seed).randbytes(count)


# --- fields of CDC messages ----------------------------------------------------------------------


@check("A.4-1", "The first CDC message has sequence number 1, and each further one is higher by 1.")
async def sequence_numbers(peer: Peer) -> None:
    connection = await peer.connect()
    for number in range(300):  # beyond 255
        await connection.echo(number.to_bytes(2, "big"))
    numbers = [message.sequence for message in connection.messages]
    for place, number in enumerate(numbers, 1):
        if number != place:
            raise Failed(f"CDC message {place} has the sequence number {number}")


@check("A.4-2", "A CDC message has 44 bytes, length 44, and zeros in reserved bytes and bits.")
async def cdc_format(peer: Peer) -> None:
    connection = await peer.connect()
    await connection.echo(pattern(40_000))
    for message in connection.messages:
        if len(message.raw) != 44 or message.length != 44:
            raise Failed(f"a CDC message has {len(message.raw)} bytes, and length {message.length}")
        if wrong := message.reserved_words():
            raise Failed(wrong)


@check("A.4-3", "A CDC message carries the receiver's alert token.")
async def alert_token(peer: Peer) -> None:
    connection = await peer.connect()
    connection.write(b"x")
    await peer.until(
        lambda: bool(connection.messages or connection.group.strays), "a CDC message", connection
    )
    if connection.group.strays:
        raise Failed(f"a CDC message has the token 0x{connection.group.strays[0].alert_token:08x}")


@check("A.4-4", "Cursors lie in the element, and behind an eye catcher if there is one.")
async def cursors_lie_in_the_ring(peer: Peer) -> None:
    connection = await peer.connect()
    await connection.echo(pattern(70_000))
    low, own, other = connection.base, connection.base + connection.own_room, connection.peer_size
    for message in connection.messages:
        if not low <= message.producer < own or not low <= message.consumer < other:
            raise Failed(f"{message} is not in a ring from {low} to {own}")


@check("A.4-5", "The producer wrap sequence number grows by one with each wrap.")
async def producer_wraps(peer: Peer) -> None:
    connection = await peer.connect()
    await connection.echo(pattern(5 * connection.own_room + 7))
    wraps = [message.producer_wrap for message in connection.messages]
    steps = {b - a for a, b in itertools.pairwise(wraps)}
    if not steps <= {0, 1} or wraps[-1] != 5:
        raise Failed(f"after five wraps the wrap sequence numbers are {sorted(set(wraps))}")


@check("A.4-6", "The consumer wrap sequence number follows the suite's wraps.")
async def consumer_wraps(peer: Peer) -> None:
    connection = await peer.connect()
    await connection.echo(pattern(3 * connection.peer_room + 7))
    await peer.ping(connection.link)
    if connection.peer_consumed > connection.produced:
        raise Failed(f"{connection.peer_consumed} of {connection.produced} bytes were consumed")
    if connection.last.consumer_wrap not in (2, 3):
        raise Failed(f"the consumer wrap sequence number is {connection.last.consumer_wrap}")


_MANY_WRAPS = 257
"""Rings after which a wrap sequence number of 8 bits is wrong."""
_LARGEST_ROOM = 64 * 1024
"""Bytes of the largest ring that `_MANY_WRAPS` may fill, so that the check takes about a second."""


async def _echo_rings(peer: Peer, connection: Connection, total: int) -> None:
    """Echo this many bytes; the wrap sequence numbers of both cursors may only grow."""
    data = pattern(connection.own_room)
    while connection.produced < total:
        before = connection.messages[-1] if connection.messages else None
        seen = len(connection.messages)
        piece = data[: min(len(data), connection.window)]
        connection.write(piece)
        goal = connection.consumed + len(piece)

        def gone_back(before: Message | None = before, seen: int = seen) -> str:
            last = before
            for message in connection.messages[seen:]:
                for cursor in ("producer", "consumer"):
                    was = getattr(last, f"{cursor}_wrap") if last is not None else 0
                    now = getattr(message, f"{cursor}_wrap")
                    if now < was:
                        return f"the {cursor} wrap sequence number goes from {was} to {now}"
                last = message
            return ""

        def is_over(goal: int = goal, gone_back: Callable[[], str] = gone_back) -> bool:
            ready = connection.peer_produced >= goal and connection.window > 0
            return ready or bool(gone_back())

        await peer.until(is_over, "the echo, and a window", connection, connection.tcp)
        if wrong := gone_back():
            raise Failed(wrong)
        if await connection.read(len(piece)) != piece:
            raise Failed(f"the echo is wrong after {goal} bytes")


@check("A.4-31", "The producer wrap sequence number goes beyond 255.")
async def many_producer_wraps(peer: Peer) -> None:
    connection = await peer.connect()
    await _echo_rings(peer, connection, _MANY_WRAPS * connection.own_room)
    if connection.last.producer_wrap < _MANY_WRAPS - 1:
        raise Failed(f"the producer wrap sequence number is {connection.last.producer_wrap}")


@check("A.4-32", "The consumer wrap sequence number goes beyond 255.")
async def many_consumer_wraps(peer: Peer) -> None:
    connection = await peer.connect()
    if connection.peer_room > _LARGEST_ROOM:
        raise Inconclusive(
            f"the implementation's element has {connection.peer_size} bytes: with at most "
            f"{_LARGEST_ROOM} the check can fill it {_MANY_WRAPS} times"
        )
    await _echo_rings(peer, connection, _MANY_WRAPS * connection.peer_room)
    connection.write(b"x", update_requested=1)
    await all_consumed(peer, connection)
    if connection.last.consumer_wrap < _MANY_WRAPS:
        raise Failed(f"the consumer wrap sequence number is {connection.last.consumer_wrap}")


@check("A.4-33", "In an element of 128 KiB the producer cursor goes beyond 65,535.")
async def large_element(peer: Peer) -> None:
    name = "accept" if peer.role is Role.CLIENT else "confirm"
    connection = await peer.connect(change={name: {"size_code": _CODE_OF_128_KIB}})
    connection.own_size = 128 * 1024
    data = pattern(3 * connection.own_room + 7)
    for at in range(0, len(data), 8000):
        await connection.echo(data[at : at + 8000])
    if max(message.producer for message in connection.messages) <= 0xFFFF:
        raise Failed("no producer cursor is beyond 65,535")


@check("A.4-7", "Both cursors of the first CDC message show an empty ring, and the data of it.")
async def first_cursors(peer: Peer) -> None:
    connection = await peer.connect()
    connection.write(b"0123456789")
    await connection.read(10, update=False)
    first = next(each for each in connection.messages if each.producer != connection.base)
    if first.producer_wrap or first.producer != connection.base + 10:
        raise Failed(f"the message that announces 10 bytes is {first}")


@check("4.7.1-1", "The data is in the element before the CDC message that announces it.")
async def data_before_the_message(peer: Peer) -> None:
    connection = await peer.connect()
    for number in range(50):
        data = pattern(200, number)
        connection.write(data)
        if await connection.read(200) != data:
            raise Failed(f"message {number} announces data that is not there")


@check("4.7.2-1", "The message that announces an answer also carries the consumer cursor.")
async def answer_carries_the_cursor(peer: Peer) -> None:
    connection = await peer.connect()
    connection.write(b"request")
    await connection.read(7, update=False)
    message = next(each for each in connection.messages if each.producer != connection.base)
    if message.consumer != connection.base + 7:
        raise Failed(f"the answer's message is {message}")


# --- rings ---------------------------------------------------------------------------------------

_SIZES = {"1": 1, "2": 2, "3": 43, "4": 1000, "5": 4096, "6": 16_379, "7": 16_384}


async def _writes(size: int, peer: Peer) -> None:
    connection = await peer.connect()
    total = max(5 * size, min(200 * size, 3 * connection.own_room))
    data = pattern(total, size)
    for at in range(0, total, size):
        await connection.echo(data[at : at + size])


for _number, _size in _SIZES.items():
    check(f"4.3-{_number}", f"Data in writes of {_size} bytes arrives complete and in order.")(
        partial(_writes, _size)
    )


@check("4.3-8", "Data in writes of random sizes arrives complete and in order, over many wraps.")
async def random_sizes(peer: Peer) -> None:
    choose = random.Random(peer.session.options.seed)
    connection = await peer.connect()
    for _ in range(60):
        await connection.echo(choose.randbytes(choose.randint(1, 12_000)))


@check(
    "4.3-9", "A write that ends at the end of the ring is announced with the cursor at its start."
)
async def ends_at_the_end(peer: Peer) -> None:
    connection = await peer.connect()
    for _ in range(3):
        rest = connection.peer_room - connection.produced % connection.peer_room
        await connection.echo(pattern(rest))
        await connection.echo(b"next")


@check("4.3-10", "A full ring and an empty ring are told apart by the wrap sequence number.")
async def full_ring(peer: Peer) -> None:
    connection = await peer.connect()
    await connection.echo(b"seven b")
    await peer.ping(connection.link)
    data = pattern(min(connection.window, connection.own_room))
    connection.write(data)
    if await connection.read(len(data)) != data:
        raise Failed("a full ring is echoed wrongly")


@check("4.3-11", "Several writes that one CDC message announces are read together.")
async def several_writes_one_message(peer: Peer) -> None:
    connection = await peer.connect()
    for number in range(10):
        connection.put(bytes((number,)) * 100)
    connection.send_cdc()
    data = await connection.read(1000)
    if data != b"".join(bytes((number,)) * 100 for number in range(10)):
        raise Failed("the echo is wrong")


@check("4.3-12", "Data that no CDC message has announced is not read.")
async def unannounced_data(peer: Peer) -> None:
    connection = await peer.connect()
    connection.put(b"secret")
    connection.produced -= 6
    connection.send_cdc()
    await peer.ping(connection.link)
    if connection.peer_produced:
        raise Failed("the implementation echoes data that was not announced")
    await connection.echo(b"public")


# --- windows (4.5.1) -----------------------------------------------------------------------------


async def closed_window(peer: Peer) -> tuple[Connection, bytes]:
    """A connection whose window towards the suite is closed, and all data that was written.

    The suite writes until the implementation, which cannot echo any more, stops reading.
    """
    connection = await peer.connect()
    written = b""
    while True:
        await peer.quiet(0.05)
        await peer.ping(connection.link)
        if not connection.window:
            return connection, written
        piece = pattern(min(connection.window, 4096), len(written))
        connection.write(piece)
        written += piece
        if len(written) > 64 << 20:
            raise Differs("the implementation buffers more than 64 MiB beyond the window")


@check("4.3-13", "The implementation never writes beyond the consumer cursor that it knows.")
async def respects_the_window(peer: Peer) -> None:
    connection, _ = await closed_window(peer)
    if connection.peer_produced > connection.own_room:
        raise Failed(f"{connection.peer_produced} bytes were written into {connection.own_room}")


@check("4.3-14", "The implementation uses the whole window.")
async def fills_the_window(peer: Peer) -> None:
    connection, _ = await closed_window(peer)
    if connection.peer_produced < connection.own_room:
        raise Differs(f"{connection.peer_produced} of {connection.own_room} bytes were used")


@check("A.4-8", "A writer that waits for room sets the B flag.")
async def blocked_writer_sets_b(peer: Peer) -> None:
    connection, _ = await closed_window(peer)
    if not connection.last.writer_blocked:
        raise Failed(f"the last message is {connection.last}")


@check("A.4-9", "The B flag is cleared when the writer does not wait any more.")
async def b_is_cleared(peer: Peer) -> None:
    connection, written = await closed_window(peer)
    back = b""
    while len(back) < len(written):
        more = min(len(written) - len(back), connection.own_room)
        back += await connection.read(more)
    await connection.echo(b"the last")
    if connection.last.writer_blocked:
        raise Failed("B is still set")


@check("4.3-15", "A writer that was blocked goes on when the window opens, and loses nothing.")
async def goes_on_after_blocking(peer: Peer) -> None:
    connection, written = await closed_window(peer)
    back = b""
    while len(back) < len(written):
        await peer.until(
            lambda: connection.peer_produced > connection.consumed, "more data", connection
        )
        back += await connection.read(connection.peer_produced - connection.consumed)
    if back != written:
        raise Failed("the echo differs from what was written")


@check("A.4-34", "The consumer cursor never passes data that the application has not read.")
async def cursor_does_not_pass_unread_data(peer: Peer) -> None:
    # The application reads slowly, because the suite takes its echo in small pieces.  The suite
    # writes whenever a cursor shows room: if the room is not there, unread data is overwritten.
    connection, begin = await closed_window(peer)
    written = bytearray(begin)
    read = 0
    total = len(written) + 3 * connection.peer_room
    while read < total:
        if connection.window < 0:
            raise Failed(f"{connection.last} takes back {-connection.window} bytes of the window")
        await peer.until(
            lambda: connection.peer_produced > connection.consumed
            or (connection.window > 0 and len(written) < total),
            "more data, or a larger window", connection, connection.tcp,
        )  # fmt: skip
        ready = min(connection.peer_produced - connection.consumed, connection.own_room // 8)
        back = await connection.read(ready) if ready else b""
        for byte, expected in zip(back, written[read : read + ready], strict=True):
            if byte != expected:
                raise Failed(
                    f"byte {read} of the echo is wrong, and the suite never wrote beyond the "
                    f"window: the consumer cursor has passed data that was not read"
                )
            read += 1
        await peer.ping(connection.link)
        if piece := pattern(max(0, min(connection.window, total - len(written))), len(written)):
            written.extend(piece)
            connection.write(piece)


@check("4.5.1-1", "A writer that has set B learns of any consumption.")
async def update_after_b(peer: Peer) -> None:
    connection, _ = await closed_window(peer)
    await connection.read(connection.own_room, update=False)
    connection.send_cdc(writer_blocked=1)
    await peer.until(lambda: connection.window > 0, "a window update", connection)


@check("4.5.1-2", "A window that is small and would grow by a tenth of the ring is announced.")
async def ten_percent(peer: Peer) -> None:
    connection, _ = await closed_window(peer)
    # The implementation can echo all that it has read, and read more: its ring becomes empty.
    for _ in range(8):
        await peer.quiet(0.02)
        if connection.peer_produced > connection.consumed:
            await connection.read(connection.peer_produced - connection.consumed)
    await peer.until(
        lambda: connection.window >= connection.peer_room // 2, "a window update", connection
    )


@check("4.5.1-3", "A wide window is not announced for a few bytes.")
async def no_needless_update(peer: Peer) -> None:
    connection = await peer.connect()
    await connection.echo(b"begin")
    await peer.ping(connection.link)
    before = len(connection.messages)
    for _ in range(10):
        await connection.echo(b"x" * 10)
    await peer.ping(connection.link)
    alone = len(connection.messages) - before - 10
    if alone > 1:
        raise Differs(f"{alone} messages carry a consumer cursor alone, while the window is wide")


@check("4.5.1-4", "After the R flag the consumer cursor comes with the next consumption.")
async def update_requested(peer: Peer) -> None:
    connection = await peer.connect()
    await connection.echo(b"begin")
    for number in range(3):
        connection.write(bytes((number,)), update_requested=1)
        await all_consumed(peer, connection)


DISCARD = ("discard",)


async def all_consumed(peer: Peer, connection: Connection) -> None:
    """Wait until the peer's consumer cursor shows that it has everything."""
    await peer.until(
        lambda: connection.peer_consumed == connection.produced, "the consumer cursor", connection
    )


async def discarding(peer: Peer) -> Connection:
    """A connection to the discard service: all its messages are window updates."""
    connection = await peer.connect(port=peer.session.discard)
    connection.write(b"begin")
    await peer.ping(connection.link)
    return connection


@check("4.5.1-5", "Below a tenth of the ring, consumption is not announced alone.",
       needs=DISCARD)  # fmt: skip
async def small_growth_is_not_announced(peer: Peer) -> None:
    connection = await discarding(peer)
    connection.write(bytes(connection.peer_room // 20))
    await peer.quiet()
    await peer.ping(connection.link)
    if connection.messages:
        raise Failed(f"{connection.last} comes for a twentieth of the ring")


@check("4.5.1-6", "While more than half of the ring is free, consumption is not announced alone.",
       needs=DISCARD)  # fmt: skip
async def wide_window_is_not_announced(peer: Peer) -> None:
    connection = await discarding(peer)
    connection.write(bytes(connection.peer_room // 4))
    await peer.quiet()
    await peer.ping(connection.link)
    if connection.messages:
        raise Failed(f"{connection.last} comes, although the window is wide")


async def _growths(peer: Peer) -> tuple[list[int], int]:
    """The growths of the window that a slow reader announces, and the room of its element.

    The suite fills most of the ring by one message.  The discard service reads small pieces of it.

    Raises:
      Failed: a growth is announced while half of the ring is free for the sender.
    """
    connection = await discarding(peer)
    room = connection.peer_room
    announced = connection.peer_consumed
    begin = len(connection.messages)
    connection.write(bytes(connection.window - room // 50))
    await peer.until(
        lambda: 2 * connection.window >= room, "a wide window", connection, connection.tcp
    )
    await peer.quiet(0.05)
    await peer.ping(connection.link)
    growths = []
    for message in connection.messages[begin:]:
        consumed = connection.position(message.consumer_wrap, message.consumer, room)
        window = room - (connection.produced - announced)
        if 2 * window >= room:
            raise Failed(f"{message} comes, although {window} of {room} bytes were free")
        growths.append(consumed - announced)
        announced = consumed
    return growths, room


@check("4.5.1-13", "A slow reader does not announce less than a tenth of the ring alone.",
       needs=DISCARD)  # fmt: skip
async def small_growth_of_a_small_window(peer: Peer) -> None:
    growths, room = await _growths(peer)
    if 10 * min(growths) < room:
        raise Failed(f"the window grows by {min(growths)} bytes, of a ring of {room}")


@check("4.5.1-14", "A slow reader announces a tenth of the ring while the window is below half.",
       needs=DISCARD)  # fmt: skip
async def growth_by_a_tenth(peer: Peer) -> None:
    growths, room = await _growths(peer)
    # The service reads in pieces, and the RFC does not limit them.
    if 20 * growths[0] > 3 * room:
        raise Differs(
            f"the window first grows by {growths[0]} bytes, of a ring of {room}: either it is "
            f"announced late, or the discard service reads in large pieces"
        )


@check("4.5.1-7", "A window below half that would grow by a tenth is announced.",
       needs=DISCARD)  # fmt: skip
async def small_window_is_announced(peer: Peer) -> None:
    connection = await discarding(peer)
    for _ in range(6):
        connection.write(bytes(connection.peer_room // 9))
    room = connection.peer_room
    # A reader that is slower than the writes announces tenths, until the window is wide.
    await peer.until(
        lambda: 2 * connection.window >= room
        or 10 * (connection.produced - connection.peer_consumed) < room,
        "a window update", connection,
    )  # fmt: skip


@check("4.5.1-8", "After the B flag even a small consumption is announced.", needs=DISCARD)
async def update_for_a_blocked_writer(peer: Peer) -> None:
    connection = await discarding(peer)
    for _ in range(3):
        connection.write(bytes(100), writer_blocked=1)
        await all_consumed(peer, connection)


@check("4.5.1-9", "A message without B ends the announcements of small consumptions.",
       needs=DISCARD)  # fmt: skip
async def no_update_after_b(peer: Peer) -> None:
    connection = await discarding(peer)
    connection.write(bytes(100), writer_blocked=1)
    await all_consumed(peer, connection)
    before = len(connection.messages)
    connection.write(bytes(100))
    await peer.quiet()
    await peer.ping(connection.link)
    if len(connection.messages) > before:
        raise Failed(f"{connection.last} comes, although B was cleared")


@check("4.5.1-10", "After the R flag even a small consumption is announced.", needs=DISCARD)
async def update_requested_from_a_reader(peer: Peer) -> None:
    connection = await discarding(peer)
    for _ in range(3):
        connection.write(bytes(100), update_requested=1)
        await all_consumed(peer, connection)


@check("4.5.1-11", "R without data brings the cursor of what was consumed before.",
       needs=DISCARD)  # fmt: skip
async def update_requested_without_data(peer: Peer) -> None:
    connection = await discarding(peer)
    connection.write(bytes(300))
    await peer.quiet()
    connection.send_cdc(update_requested=1)
    await all_consumed(peer, connection)


@check("4.5.1-12", "Many rings of data go to a reader that sends nothing.", needs=DISCARD)
async def many_rings(peer: Peer) -> None:
    connection = await discarding(peer)
    for _ in range(60):
        await peer.until(lambda: connection.window >= 4000, "a window update", connection)
        connection.write(bytes(4000))
    await peer.ping(connection.link)


# --- sequence numbers and flags of the suite -----------------------------------------------------


@check("A.4-10", "Missing sequence numbers do no harm.")
async def missing_sequence_numbers(peer: Peer) -> None:
    connection = await peer.connect()
    for skip in (5, 100, 30_000):
        connection.sequence += skip
        await connection.echo(b"after a gap")


@check("A.4-11", "The sequence number wraps from 65,535 to 0.")
async def sequence_wraps(peer: Peer) -> None:
    connection = await peer.connect()
    for target in (20_000, 45_000, 65_530):
        connection.sequence = target
        await connection.echo(b"higher")
    for _ in range(12):
        await connection.echo(b"over the top")


@check("A.4-12", "A message that is older than the last one is discarded.")
async def older_message(peer: Peer) -> None:
    connection = await peer.connect()
    await connection.echo(b"one")
    await connection.echo(b"two")
    last = connection.sequence
    connection.send_cdc(sequence=last - 1, producer=connection.base + 100, aborted=1)
    connection.sequence = last
    await connection.echo(b"three")


@check("A.4-13", "Reserved bytes and bits of CDC messages are ignored.")
async def reserved_in_cdc(peer: Peer) -> None:
    connection = await peer.connect()
    for number in range(3):
        connection.put(bytes((number,)) * 10)
        raw = bytearray(connection.cdc())
        for at, mask in enumerate(CDC.reserved()):
            raw[at] |= mask
        connection.link.send(bytes(raw))
        if await connection.read(10) != bytes((number,)) * 10:
            raise Failed("the echo is wrong")


@check("A.4-14", "A message that repeats the cursors does no harm.")
async def repeated_cursors(peer: Peer) -> None:
    connection = await peer.connect()
    for _ in range(5):
        await connection.echo(b"data")
        for _ in range(3):
            connection.send_cdc()
    await connection.echo(b"data")


@check("A.4-15", "A CDC message with an unknown alert token is dropped, and the link goes on.")
async def unknown_token(peer: Peer) -> None:
    connection = await peer.connect()
    await connection.echo(b"begin")
    connection.link.send(connection.cdc(alert_token=connection.peer_token ^ 0x5A5A5A5A, aborted=1))
    connection.sequence -= 1
    await peer.ping(connection.link)
    await connection.echo(b"goes on")


@check("A.4-16", "The B flag of a writer with room does no harm.")
async def b_without_need(peer: Peer) -> None:
    connection = await peer.connect()
    for _ in range(5):
        await connection.echo(b"data", writer_blocked=1)


async def _urgent_round(peer: Peer, connection: Connection) -> None:
    """Send data with an urgent byte; the implementation may leave the byte out of its echo."""
    connection.write(b"before")
    if (data := await connection.read(6)) != b"before":
        raise Failed(f"the echo is {data!r}")
    begin = connection.consumed
    connection.send_cdc(urgent_pending=1)
    connection.write(b"!", urgent_pending=1, urgent_present=1)
    connection.write(b"after")
    await peer.until(lambda: connection.peer_produced >= begin + 5, "the echo", connection)
    await peer.ping(connection.link)
    data = await connection.read(connection.peer_produced - begin)
    if data not in (b"!after", b"after"):
        raise Failed(f"the echo is {data!r}")


@check("A.4-17", "Urgent flags do not disturb the data around the urgent byte.")
async def urgent_data(peer: Peer) -> None:
    connection = await peer.connect()
    # The result may depend on whether the implementation's program reads between the urgent byte
    # and the data behind it, so one round is not enough.
    for _ in range(20):
        await _urgent_round(peer, connection)


@check("A.4-18", "An urgent byte that is announced and never comes does no harm.")
async def urgent_pending_alone(peer: Peer) -> None:
    connection = await peer.connect()
    await connection.echo(b"one", urgent_pending=1)
    await connection.echo(b"two")


# --- impossible cursors --------------------------------------------------------------------------

_IMPOSSIBLE: dict[str, tuple[str, dict[str, int | str]]] = {
    "19": ("a producer cursor beyond the ring", {"producer": 0xFFFFFFF0}),
    "20": ("a producer cursor at the ring's size", {"producer": "size"}),
    "21": ("a producer that has overtaken the consumer", {"producer_wrap": 2}),
    "22": ("a producer that has gone back", {"producer": "base"}),
    "23": ("a producer wrap that has gone back", {"producer_wrap": 0xFFFF}),
    "24": ("a consumer cursor beyond the ring", {"consumer": 0xFFFFFFF0}),
    "25": ("a consumer cursor at the ring's size", {"consumer": "own size"}),
    "26": ("a consumer that has overtaken the producer", {"consumer_wrap": 1}),
    "27": ("a consumer that has gone back", {"consumer": "base"}),
    "29": ("a producer one byte beyond the window", {"producer": "beyond"}),
    "30": ("a consumer one byte beyond the producer", {"consumer": "beyond own"}),
    "28": ("a consumer wrap that has gone back", {"consumer_wrap": 0xFFFF}),
}


async def connection_ends(peer: Peer, connection: Connection) -> None:
    """Wait until the implementation ends the connection, or its link.

    The RFC forbids the message, and does not say what its receiver does.
    """
    try:
        await peer.until(
            lambda: connection.has("aborted") or connection.tcp.end is not None
            or bool(connection.link.failed),
            "the end of the connection",
        )  # fmt: skip
    except Silence:
        await peer.ping(connection.link)  # the message was processed
        raise Differs("the connection continues") from None


async def _impossible(values: dict[str, int | str], peer: Peer) -> None:
    connection = await peer.connect()
    await connection.echo(b"0123456789")
    await connection.echo(b"0123456789")
    await peer.ping(connection.link)
    # The implementation has consumed, and produced, 20 bytes, and has announced that.
    wrap = {"producer_wrap": 1} if values.get("producer") == "beyond" else {}
    beyond = connection.base + 21
    words = {
        "beyond": beyond,
        "beyond own": beyond,
        "size": connection.peer_size,
        "own size": 16 * 1024,
        "base": connection.base,
    }
    given = {name: words[v] if isinstance(v, str) else v for name, v in values.items()}
    connection.send_cdc(**wrap, **given)
    await connection_ends(peer, connection)


for _number, (_words, _values) in _IMPOSSIBLE.items():
    check(
        f"A.4-{_number}", f"A CDC message with {_words} ends the connection.", robust=True
    )(partial(_impossible, _values))  # fmt: skip


@check("4.2-1", "A corrupted eye catcher ends its connection, and no other one.", robust=True)
async def corrupted_eye_catcher(peer: Peer) -> None:
    connection = await peer.connect()
    if not connection.group.eye_catcher:
        return  # nothing was agreed on that could be corrupted
    await connection.echo(b"begin")
    connection.link.write(b"\0", connection.peer_address, connection.peer_rkey)
    connection.write(b"more")
    await peer.ended(connection.tcp, "RST")


@check("4.2-2", "The suite's eye catchers stay as they were.")
async def eye_catchers_stay(peer: Peer) -> None:
    connection = await peer.connect()
    await connection.echo(pattern(40_000))
    start = (connection.index - 1) * 16 * 1024
    found = bytes(connection.group.memory.view[start : start + 4])
    if connection.group.eye_catcher and found != bytes.fromhex("E2D4C3D9"):
        raise Failed(f"the eye catcher is {found.hex()}")


@check(
    "3.4-1", "A CDC message of another size than 44 bytes ends its connection or link.", robust=True
)
async def cdc_size(peer: Peer) -> None:
    for size in (8, 43, 48):
        handshake = await peer.reach(Phase.READY)
        connection = handshake.connection
        await connection.echo(b"x")
        connection.link.send(connection.cdc().ljust(size, b"\0")[:size])
        await connection_ends(peer, connection)


@check(
    "3.4-2", "A CDC message with another length than 44 ends its connection or link.", robust=True
)
async def cdc_length(peer: Peer) -> None:
    for length in (0, 43, 255):
        connection = await peer.connect()
        await connection.echo(b"x")
        connection.link.send(with_bytes(connection.cdc(), 1, bytes((length,))))
        await connection_ends(peer, connection)
