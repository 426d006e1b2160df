"""Two connection cores back to back: channels that are queues, and hosts that record calls."""

from __future__ import annotations

from collections import deque
from typing import Any, Literal, NamedTuple

from trio_smc._base.errors import ProtocolError
from trio_smc.datapath.connection import Connection
from trio_smc.datapath.rmb import Rmb
from trio_smc.failover import replay
from trio_smc.rnic.memory import PROGRESS_SIZE, Memory, PeerMemory
from trio_smc.rnic.verbs import DeliveryUnknown
from trio_smc.rnic.words import Words
from trio_smc.wire import cdc

__all__ = [
    "CLOSE_TIMEOUT",
    "Cdc",
    "FakeChannel",
    "FakeHost",
    "Pair",
    "Write",
    "arrive",
    "receive_cdc",
]

CLOSE_TIMEOUT = 60.0
PAGE = 4096
SEND_QUEUE = 1 << 14
"""CDC messages that a link holds at most (`Channel.capacity`)."""


class Write(NamedTuple):
    """An RDMA write: the bytes first..last of the target RMBE, as the figures give them."""

    first: int
    last: int


class Cdc(NamedTuple):
    """The fields of a CDC message that the figures show."""

    sequence: int
    producer: tuple[int, int]  # (cursor, wrap), in the order of the figures
    consumer: tuple[int, int]
    flags: int = 0
    endings: int = 0


def receive_cdc(connection: Connection, message: bytes) -> None:
    """Deliver a message, like a link."""
    try:
        unpacked = cdc.unpack_untrusted(message)
    except ProtocolError as error:
        connection.protocol_error(error)
        raise
    connection.on_cdc_untrusted(unpacked)


def arrive(connection: Connection, message: bytes) -> None:
    """Deliver a message, like the only link."""
    try:
        receive_cdc(connection, message)
    except cdc.MessageMissing as error:
        connection.protocol_error(error)
        raise


class FakeHost:
    """Records the calls of a connection; the test fires its timers."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.states: list[tuple[str, str, str]] = []
        self.timer: float | None = None
        self.connection: Connection | None = None
        self.end: Literal["none", "fin", "reset"] = "none"
        """How the peer has ended the TCP connection."""

    def connection_closed(self, connection: Connection) -> None:
        self.calls.append("closed")

    def set_timer(self, connection: Connection, seconds: float | None) -> None:
        self.timer = seconds

    def reset_tcp(self, connection: Connection) -> None:
        self.calls.append("reset_tcp")

    def close_tcp(self, connection: Connection) -> None:
        self.calls.append("close_tcp")

    def show_end(self, connection: Connection) -> bool:
        return True

    def tcp_end(self, connection: Connection) -> Literal["none", "fin", "reset"]:
        return self.end

    def state_changed(self, connection: Connection, old: str, new: str, event: str) -> None:
        self.states.append((old, new, event))


class FakeChannel:
    """A link to one peer: posted work waits until the test delivers it.

    Writes are done at delivery, from the posted memory: a buffer that was changed too early shows
    as wrong bytes.

    An ``instant`` link delivers at once if it can: then only the peer has to poll the message
    ("told" in the queue).
    """

    def __init__(self, number: int = 1) -> None:
        self.number = number
        self.instant = False
        self.doubt = 0
        """Number of the immediate delivery that is the last: the link ends with it, and only the
        peer knows if the message has arrived. 0: none."""
        self.arrives = True
        """True if the message of `doubt` arrives."""
        self.dead = False
        self.queue: deque[tuple[str, object, int]] = deque()
        self.uncompleted: deque[tuple[Any, int]] = deque()
        self.log: list[Write | Cdc] = []
        self.raw: list[bytes] = []
        self.slots: int = SEND_QUEUE
        """CDC messages that may be uncompleted at a time."""
        self.work: int | None = None
        """Number of work requests, writes and messages, that the link holds; None: any number."""
        self.posted = 0
        self.unsignaled = 0
        self.weights: deque[int] = deque()  # work requests a completion gives back
        self.room = 1 << 40
        """Bytes `capacity` offers at most."""
        self.waiting: list[Any] = []
        self.words: Words = memoryview(bytearray(PROGRESS_SIZE)).cast("Q")
        """The progress words of the peer's memory."""
        self.asleep: memoryview[int] = memoryview(bytearray(8)).cast("Q")
        """Not 0 if the peer counts as asleep."""
        self.peer: Connection | None = None
        self.peer_base = 0
        self.rkey = 0

    def capacity(self) -> int:
        if len(self.uncompleted) >= self.slots:
            return 0
        if self.work is not None and self.work - self.posted < 3:
            return 0
        return self.room

    def wait_for_room(self, connection: Any) -> None:
        assert connection not in self.waiting
        self.waiting.append(connection)

    def post_write(self, connection: Any, data: memoryview, address: int, rkey: int) -> None:
        assert rkey == self.rkey
        assert len(data) > 0
        assert len(data) <= self.room
        self.posted += 1
        self.unsignaled += 1
        start = address - self.peer_base
        self.log.append(Write(start, start + len(data) - 1))
        if self.instant and self._nothing_waits():
            self._place(data, start)
        else:
            self.queue.append(("write", data, start))

    def post_cdc(self, connection: Any, message: bytes) -> None:
        self.posted += 1
        assert self.work is None or self.posted <= self.work
        self.weights.append(self.unsignaled + 1)
        self.unsignaled = 0
        sequence = self._note(message)
        self.queue.append(("cdc", message, sequence))
        self.uncompleted.append((connection, sequence))

    def try_post(
        self, message: bytes, data: bytes | memoryview | None, address: int, rkey: int
    ) -> bool:
        if not self.instant or self.uncompleted or self.waiting or not self._nothing_waits():
            return False
        self.doubt -= 1
        self.dead = self.doubt == 0
        if self.dead:
            self.instant = False
            if not self.arrives:
                raise DeliveryUnknown
        self.posted -= self.unsignaled
        self.unsignaled = 0
        if data is not None:
            assert rkey == self.rkey
            start = address - self.peer_base
            self.log.append(Write(start, start + len(data) - 1))
            self._place(memoryview(data), start)
        self.queue.append(("announced", message, self._note(message)))
        if self.dead:
            raise DeliveryUnknown
        return True

    def _nothing_waits(self) -> bool:
        return all(kind == "announced" for kind, _, _ in self.queue)

    def _note(self, message: bytes) -> int:
        items = cdc.unpack_untrusted(message)
        self.log.append(
            Cdc(items[1], (items[4], items[3]), (items[6], items[5]), items[7], items[8])
        )
        self.raw.append(message)
        return items[1]

    def _place(self, data: memoryview, start: int) -> None:
        assert self.peer is not None
        rmbe = self.peer.rmbe
        assert start >= rmbe.first
        assert start + len(data) <= rmbe.size
        memory = rmbe.rmb.memory.view
        memory[rmbe.offset + start : rmbe.offset + start + len(data)] = data

    def deliver_announced(self) -> None:
        """Fail the link: immediate deliveries have reached the peer."""
        self.deliver(sum(kind == "announced" for kind, _, _ in self.queue))

    def progress_words(self, address: int, rkey: int, size: int) -> tuple[Words, int] | None:
        return self.words, 0

    def peer_asleep(self) -> memoryview[int]:
        return self.asleep

    def hand_over(self, connection: object, successor: object) -> None:
        for entry, (owner, sequence) in enumerate(self.uncompleted):
            if owner is connection:
                self.uncompleted[entry] = (successor, sequence)
        if connection in self.waiting:
            self.waiting.remove(connection)

    def deliver(self, count: int | None = None) -> int:
        """Deliver up to ``count`` posted requests (all by default); returns their number."""
        done = 0
        peer = self.peer
        assert peer is not None
        if self.dead:
            announced = sum(kind == "announced" for kind, _, _ in self.queue)
            count = announced if count is None else min(count, announced)
        while self.queue and (count is None or done < count):
            kind, item, number = self.queue.popleft()
            if kind == "write":
                assert isinstance(item, memoryview)
                self._place(item, number)
            else:
                assert isinstance(item, bytes)
                arrive(peer, item)
            done += 1
        return done

    def complete(self, count: int | None = None) -> int:
        """Report up to ``count`` CDC messages that were delivered as complete."""
        done = 0
        delivered = len(self.uncompleted) - sum(kind == "cdc" for kind, _, _ in self.queue)
        while done < delivered and (count is None or done < count):
            connection, sequence = self.uncompleted.popleft()
            self.posted -= self.weights.popleft()
            if connection is not None:
                connection.on_cdc_complete(sequence)
            done += 1
        if self.waiting and self.capacity():
            waiting, self.waiting = self.waiting, []
            for connection in waiting:
                connection.on_room()
        return done


class Pair:
    """Connections ``a`` and ``b`` with their channels ``ab`` and ``ba`` and hosts.

    ``size``: bytes of the elements of a and b. ``eye_catcher``: the layouts of a and b.
    """

    def __init__(
        self,
        size: tuple[int, int] = (16384, 16384),
        eye_catcher: tuple[bool, bool] = (False, False),
        *,
        chunks: bool = True,
        copy_limit: int = 64 * 1024,
        connect: bool = True,
        merge: bool = False,
        progress: bool = False,
    ) -> None:
        self.size = size
        self.eye_catcher = eye_catcher
        self.memories = [Memory(-(-n // PAGE) * PAGE, progress=progress) for n in size]
        self.mapped = [
            PeerMemory(memory.fd, memory.view.nbytes, progress=progress) for memory in self.memories
        ]
        rmbs = [
            Rmb(memory, n, 1, eye_catcher=eye)
            for memory, n, eye in zip(self.memories, size, eye_catcher, strict=True)
        ]
        self.hosts = [FakeHost(), FakeHost()]
        self.flushes: list[object] = []
        self.a, self.b = (
            Connection(
                alert_token=0xA0 + i,
                rmbe=rmbs[i].elements[0],
                host=self.hosts[i],
                close_timeout=CLOSE_TIMEOUT,
                chunks=chunks,
                copy_limit=copy_limit,
                flush_later=self.flushes.append if merge else None,
            )
            for i in (0, 1)
        )
        if merge:
            self.a.messenger.update_later = self.b.messenger.update_later = self.flushes.append
        self.ab, self.ba = self._new_channel(0, 1), self._new_channel(1, 1)
        if connect:
            self.know(0)
            self.know(1)
            self.a.established()
            self.b.established()

    @property
    def connections(self) -> tuple[Connection, Connection]:
        return self.a, self.b

    @property
    def channels(self) -> tuple[FakeChannel, FakeChannel]:
        return self.ab, self.ba

    def know(self, side: int) -> None:
        """Give one side the contents of the other's Accept or Confirm."""
        other = 1 - side
        channel = self.channels[side]
        self.connections[side].peer_known(
            alert_token=self.connections[other].alert_token,
            element_size=self.size[other],
            eye_catcher=self.eye_catcher[other],
            channel=channel,
            address=channel.peer_base,
            rkey=channel.rkey,
        )

    def _new_channel(self, side: int, number: int) -> FakeChannel:
        channel = FakeChannel(number)
        channel.peer = self.connections[1 - side]
        words = self.mapped[1 - side].progress
        if words is not None:
            channel.words = words
        channel.peer_base = 0x7000_1FFF * number
        channel.rkey = 0x1234 + number
        return channel

    def next_channel(self, side: int) -> FakeChannel:
        """Replace the link on which one side sends; returns the old link.

        The side does not use it before `move`.
        """
        old = self.channels[side]
        new = self._new_channel(side, old.number + 1)
        if side == 0:
            self.ab = new
        else:
            self.ba = new
        return old

    def move(self, side: int) -> None:
        """Move one side to `next_channel`."""
        channel = self.channels[side]
        replay.move(self.connections[side], channel, channel.peer_base, channel.rkey)

    def fail_link(self, side: int) -> FakeChannel:
        """Fail the link on which one side sends, with all messages in flight; another link
        replaces it. Returns the old link."""
        self.channels[side].deliver_announced()
        old = self.next_channel(side)
        old.queue.clear()
        self.move(side)
        return old

    def flush(self) -> None:
        """Flush, like the scheduler before it sleeps."""
        flushes, self.flushes[:] = list(self.flushes), []
        for flush in flushes:
            assert callable(flush)
            flush()

    def settle(self) -> None:
        """Deliver and complete until nothing moves."""
        while True:
            self.flush()
            moved = sum(channel.deliver() + channel.complete() for channel in self.channels)
            for side in (0, 1):
                if self.channels[side].dead:
                    self.mend(side)
                    moved += 1
            if not moved and not self.flushes:
                return

    def mend(self, side: int) -> None:
        """Move one side to another link after its link has died."""
        self.fail_link(side)

    def states(self) -> tuple[str, str]:
        return self.a.state, self.b.state

    def close(self) -> None:
        """Unmap the memory."""
        for mapped in self.mapped:
            mapped.close()
        for memory in self.memories:
            memory.close()
