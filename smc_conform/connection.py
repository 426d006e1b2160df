"""A connection of the suite over a link group: cursors, CDC messages, writes and reads.

Positions are counted in bytes since the connection began.  `Connection.cursor` makes a wrap
sequence number and a cursor from a position, as RFC 7609, 4.3 and A.4 define them.
"""

from __future__ import annotations

import secrets
from typing import Any

from smc_conform.link import ELEMENT_SIZE, Group, Link, LinkUser
from smc_conform.messages import CDC, FLAG_LETTERS, Message, pack
from smc_conform.tcp import Tcp
from smc_conform.verdicts import Failed
from trio_smc.rnic.memory import Memory

__all__ = ["Connection"]

_EYE_SIZE = 4
_FIRST_WRAP = 0


class Connection(LinkUser):
    """One connection.

    Attributes:
      tcp: its TCP connection.
      group, link: the link is the one that the suite sends on.
      index, token: the suite's element and alert token.
      own_size: bytes of the suite's element.
      peer_token: the implementation's alert token.
      sequence: of the last CDC message of the suite.
      produced: bytes that the suite has written.
      consumed: bytes that the suite has read.
      peer_produced, peer_consumed: the same of the implementation, by its last CDC message.
      messages: all CDC messages for this connection, in order.
    """

    def __init__(self, tcp: Tcp, group: Group) -> None:
        self.tcp = tcp
        self.group = group
        self.link: Link = group.link
        self.index = group.take_element()
        self.own_size = ELEMENT_SIZE
        self.token = secrets.randbits(32)
        while self.token in group.connections:
            self.token = secrets.randbits(32)
        group.connections[self.token] = self
        self.peer_token = 0
        # The RToken of the implementation's RMB on each link, by link number.
        self.tokens: dict[int, tuple[int, int]] = {}
        self.peer_index = 1
        self.peer_size = ELEMENT_SIZE
        self.first_contact = False
        self.sequence = 0
        self.produced = self.consumed = 0
        self.peer_produced = self.peer_consumed = 0
        self.messages: list[Message] = []
        self._memory = group.memory

    @property
    def ended(self) -> str:
        return self.link.ended

    # --- the implementation's element --------------------------------------------------------

    def know_peer(self, message: Message) -> None:
        """Note the implementation's element, from SMC Accept or SMC Confirm."""
        self.peer_token = message.alert_token
        self.peer_size = 16 * 1024 << message.size_code
        self.peer_index = message.rmbe_index
        self.tokens = self.group.tokens_of(message.rkey, message.rmb_address)

    @property
    def peer_rkey(self) -> int:
        """The RKey of the implementation's RMB on the link in use."""
        return self.tokens[self.link.number][0]

    @property
    def peer_address(self) -> int:
        """The address of the implementation's element on the link in use."""
        return self.tokens[self.link.number][1] + (self.peer_index - 1) * self.peer_size

    def use_memory(self, memory: Memory, index: int) -> None:
        """The suite's element is in another RMB than the group's first one."""
        self._memory = memory
        self.index = index

    @property
    def base(self) -> int:
        """The offset of the first byte of data in an element (A.4)."""
        return _EYE_SIZE if self.group.eye_catcher else 0

    @property
    def peer_room(self) -> int:
        """Bytes of data for which the implementation's element has room."""
        return self.peer_size - self.base

    @property
    def own_room(self) -> int:
        """The same of the suite's element."""
        return self.own_size - self.base

    @property
    def window(self) -> int:
        """Bytes that the suite may write now."""
        return self.peer_room - (self.produced - self.peer_consumed)

    def cursor(self, position: int, room: int) -> tuple[int, int]:
        """The wrap sequence number and the cursor of a position in a ring of ``room`` bytes."""
        return (_FIRST_WRAP + position // room) & 0xFFFF, self.base + position % room

    def position(self, wrap: int, cursor: int, room: int) -> int:
        """The position of a wrap sequence number and a cursor."""
        return ((wrap - _FIRST_WRAP) & 0xFFFF) * room + cursor - self.base

    # --- CDC messages ------------------------------------------------------------------------

    def cdc(self, **values: int | bytes) -> bytes:
        """The next CDC message, with the present cursors or other values."""
        self.sequence = (self.sequence + 1) & 0xFFFF
        producer_wrap, producer = self.cursor(self.produced, self.peer_room)
        consumer_wrap, consumer = self.cursor(self.consumed, self.own_room)
        fields: dict[str, Any] = {
            "sequence": self.sequence, "alert_token": self.peer_token,
            "producer_wrap": producer_wrap, "producer": producer,
            "consumer_wrap": consumer_wrap, "consumer": consumer,
        }  # fmt: skip
        return pack(CDC, **{**fields, **values})

    def send_cdc(self, **values: int | bytes) -> bytes:
        """Send the next CDC message; returns its bytes."""
        raw = self.cdc(**values)
        self.link.send(raw)
        return raw

    def receive(self, link: Link, message: Message) -> None:
        """Note a CDC message of the implementation."""
        self.messages.append(message)
        if message.failover_validation:
            return
        self.peer_produced = self.position(message.producer_wrap, message.producer, self.own_room)
        self.peer_consumed = self.position(message.consumer_wrap, message.consumer, self.peer_room)

    @property
    def last(self) -> Message:
        """The last CDC message of the implementation."""
        if not self.messages:
            raise Failed("the implementation has sent no CDC message")
        return self.messages[-1]

    def has(self, flag: str) -> bool:
        """True if a CDC message of the implementation had this flag: "done", "closed", ..."""
        return any(getattr(message, flag) for message in self.messages)

    # --- data --------------------------------------------------------------------------------

    def put(self, data: bytes) -> None:
        """Write data into the implementation's element, without a CDC message."""
        at = 0
        while at < len(data):
            place = self.produced % self.peer_room
            piece = data[at : at + self.peer_room - place]
            self.link.write(piece, self.peer_address + self.base + place, self.peer_rkey)
            self.produced += len(piece)
            at += len(piece)

    def write(self, data: bytes, **values: int | bytes) -> None:
        """Write data, and announce it by a CDC message, with other values if given."""
        self.put(data)
        self.send_cdc(**values)

    def peek(self, count: int, position: int | None = None) -> bytes:
        """Bytes of the suite's element from a position on; default: the next unread ones."""
        begin = self.consumed if position is None else position
        start = (self.index - 1) * self.own_size + self.base
        view = self._memory.view
        found = bytearray()
        while len(found) < count:
            place = (begin + len(found)) % self.own_room
            more = min(count - len(found), self.own_room - place)
            found += view[start + place : start + place + more]
        return bytes(found)

    async def read(self, count: int, *, update: bool = True) -> bytes:
        """Wait for this many bytes and read them.

        Args:
          update: send the consumer cursor afterwards.
        """
        await self.group.waits.until(
            lambda: self.peer_produced - self.consumed >= count,
            f"{count} bytes of data", self, self.tcp,
        )  # fmt: skip
        data = self.peek(count)
        self.consumed += count
        if update:
            self.send_cdc()
        return data

    async def echo(self, data: bytes, **values: int | bytes) -> None:
        """Write data, and read it back from the implementation's echo service.

        Data beyond the windows is written in pieces.
        """
        at = 0
        while at < len(data):
            piece = data[at : at + min(self.window, self.own_room)]
            if not piece:
                await self.group.waits.until(
                    lambda: self.window > 0, "a larger window", self, self.tcp
                )
                continue
            self.write(piece, **values)
            back = await self.read(len(piece))
            if back != piece:
                wrong = next(i for i in range(len(piece)) if piece[i] != back[i])
                raise Failed(
                    f"byte {at + wrong} of the echo is 0x{back[wrong]:02x} "
                    f"instead of 0x{piece[wrong]:02x}"
                )
            at += len(piece)

    # --- endings -----------------------------------------------------------------------------

    async def expect_flag(self, flag: str) -> Message:
        """Wait for a CDC message with this flag: "done", "closed", "aborted", ..."""
        awaited = f"a CDC message with the flag {FLAG_LETTERS[flag]}"
        await self.group.waits.until(lambda: self.has(flag), awaited, self)
        return next(message for message in self.messages if getattr(message, flag))
