"""A TCP connection that a client announced to processes of its host, until it is settled.

`trio_smc.rendezvous.discovery` explains the protocol, `_channels` who reads the answers.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Self

from trio_smc._base.reasons import FallbackReason
from trio_smc.rendezvous import _local_protocol as protocol
from trio_smc.rendezvous._local_protocol import Kind, Message

if TYPE_CHECKING:
    from trio_smc.rendezvous._channels import Channels

__all__ = ["Announcement", "Channel"]


class Channel:
    """A Unix connection to a listening process."""

    __slots__ = ("announced", "connection", "entry")

    def __init__(self, connection: socket.socket, entry: tuple[int, int, str]) -> None:
        self.connection = connection
        self.entry = entry  # device and inode of the directory, name there
        self.announced: set[Announcement] = set()

    @property
    def is_open(self) -> bool:
        return self.connection.fileno() >= 0

    def send(self, message: bytes) -> None:
        """Send a packet without waiting.  Raises OSError, BlockingIOError: not now."""
        self.connection.send(message, socket.MSG_NOSIGNAL)


class Announcement:
    """A TCP connection that was announced; settled by `accepted` or `close`.

    Leaving it as a context manager withdraws, when it is not settled yet.
    """

    __slots__ = ("_owner", "answered", "asked", "key", "reason")

    def __init__(self, owner: Channels, key: bytes) -> None:
        self._owner = owner
        self.key = key
        self.asked: list[Channel] = []  # who may still say that it is theirs
        self.answered = False
        self.reason: FallbackReason | None = FallbackReason.PEER_NOT_CAPABLE

    async def accepted(self, deadline: float) -> FallbackReason | None:
        """Wait until the process that accepted the TCP connection says so; settles in any case.

        deadline: when to stop waiting, as `trio.current_time`.

        None: both sides start SMC-R; send the Proposal, or end the TCP connection.  A reason:
        both sides stay on TCP.
        """
        try:
            if not self.answered and not self._owner.spin(self):
                await self._owner.wait(self, deadline)
        finally:
            self.close()
        return self.reason

    def tell(self, channel: Channel) -> bool:
        """Announce it there; False when nothing can be sent now, or ever."""
        try:
            channel.send(protocol.announce(self.key))
        except BlockingIOError:
            return False
        except OSError:
            self._owner.drop(channel)
            return False
        self.asked.append(channel)
        channel.announced.add(self)
        return True

    def heard(self, channel: Channel, message: Message | None) -> None:
        """What a listening process answered; None: its Unix connection ended."""
        self.asked.remove(channel)
        channel.announced.discard(self)
        if message is not None and message.kind is Kind.ACCEPTED:
            self.reason = None
        elif message is not None and message.reason not in (None, FallbackReason.PEER_NOT_CAPABLE):
            self.reason = message.reason
        self.answered = self.reason is None or not self.asked

    def forsake(self) -> None:
        """Another announcement of the same connection takes its place."""
        for channel in self.asked:
            channel.announced.discard(self)
        self.asked = []
        self.answered = True
        self._owner.wake(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Withdraw: the connection is plain TCP, or was never opened; idempotent.

        To be called before anything is sent over TCP.
        """
        self.answered = True
        asked, self.asked = self.asked, []
        for channel in asked:
            channel.announced.discard(self)
            try:
                channel.send(protocol.withdraw(self.key))
            except OSError:
                # The end of the channel tells the other side the same.
                self._owner.drop(channel)
        self._owner.forget(self)
