"""What clients on this host announced to one listening TCP socket, until it is claimed and settled.

`trio_smc.rendezvous.discovery` explains the protocol, `_publication` who hears the clients.
"""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING

import trio

from trio_smc._base.reasons import FallbackReason
from trio_smc.rendezvous import _local_protocol as protocol

if TYPE_CHECKING:
    from trio_smc.rendezvous._publication import Publication

__all__ = ["Claim", "Claims", "Client"]

_MAX_PENDING = 4096  # announcements per publication
_ANNOUNCE_TIMEOUT = 2.0  # from a Unix connection to its first announcement, seconds
_PENDING_TIMEOUT = 60.0  # from an announcement to the accepted TCP connection, seconds


class Client:
    """A client's Unix connection."""

    __slots__ = ("connection", "deadline", "pending")

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.deadline = trio.current_time() + _ANNOUNCE_TIMEOUT  # while it has said nothing
        self.pending: set[bytes] = set()  # what it announced, and nobody claimed

    def tell(self, message: bytes) -> bool:
        """Send a packet without waiting; False when it is gone or takes nothing more."""
        try:
            self.connection.send(message, socket.MSG_NOSIGNAL)
        except OSError:
            return False
        return True


class Claim:
    """An accepted TCP connection whose client announced it: to be confirmed or refused."""

    __slots__ = ("_client", "_key", "_publication", "_settled", "_told", "withdrawn")

    def __init__(self, publication: Publication, client: Client, key: bytes) -> None:
        self._publication = publication
        self._client = client
        self._key = key
        self._settled = False
        self._told = False
        self.withdrawn = False

    def accept(self) -> None:
        """Tell the client at once that its connection was accepted; `confirm` is to follow."""
        self._told = not self._is_over() and self._client.tell(protocol.accepted(self._key))

    async def confirm(self, connection: trio.socket.SocketType, deadline: float) -> bool:
        """Tell the client that its connection was accepted; whether it goes on with SMC-R.

        connection: the accepted TCP connection, which nobody has read from.
        deadline: when to stop waiting for the client, as `trio.current_time`.

        True: the client's next bytes on the TCP connection are CLC, and they are there.  False:
        the connection is plain TCP, and the client knows.

        Raises OSError (ETIMEDOUT) when the client decided nothing in time.  Then, and when this
        is cancelled, nobody knows here what the client is going to say: close the TCP connection.
        """
        publication, client = self._publication, self._client
        try:
            if not self._told:
                self.accept()
            if self._is_over() or not self._told:
                return False
            while not await publication.wait(connection):
                publication.hear_all(client)
                if self._is_over():
                    return False
                if trio.current_time() >= deadline:
                    raise OSError(errno.ETIMEDOUT, "the client announced SMC-R and says nothing")
            # Before a client sends anything else than CLC it withdraws.
            publication.hear_all(client)
            return not self._is_over()
        finally:
            self._settle()

    def refuse(self, reason: FallbackReason) -> None:
        """Tell the client at once that its connection is plain TCP, and why."""
        if not self._settled:
            self._client.tell(protocol.refused(reason, self._key))
            self._settle()

    def _is_over(self) -> bool:
        return self._settled or self.withdrawn

    def _settle(self) -> None:
        self._settled = True
        self._publication.claims.forget(self._key, self)


class Claims:
    """The announced connections of one listening socket.

    Attributes:
      pending: those that wait to be claimed, by four-tuple, with the time when to forget them, as
        `trio.current_time`; oldest first.
      taken: the claims that are not settled.
    """

    def __init__(self) -> None:
        self.pending: dict[bytes, tuple[Client, float]] = {}
        self.taken: dict[bytes, Claim] = {}

    def announced(self, client: Client, key: bytes) -> None:
        """It waits to be claimed, or the client is told that too many wait."""
        now = trio.current_time()
        while self.pending:
            oldest = next(iter(self.pending))
            other, until = self.pending[oldest]
            if until > now:
                break
            self.withdrawn(other, oldest)
        older = self.pending.pop(key, None)
        if older is not None:
            # The new client is bound to the port, so the old one no longer is.
            older[0].pending.discard(key)
        if len(self.pending) >= _MAX_PENDING:
            client.tell(protocol.refused(FallbackReason.HANDSHAKE_LIMIT, key))
            return
        self.pending[key] = client, now + _PENDING_TIMEOUT
        client.pending.add(key)

    def withdrawn(self, client: Client, key: bytes) -> None:
        """It is plain TCP, or will never be opened; a claim is told."""
        claim = self.taken.get(key)
        if claim is not None and claim._client is client:
            claim.withdrawn = True
        if key in client.pending:
            client.pending.discard(key)
            del self.pending[key]

    def forget(self, key: bytes, claim: Claim) -> None:
        """A claim is settled."""
        if self.taken.get(key) is claim:
            del self.taken[key]

    def lost(self, client: Client) -> None:
        """Nothing it has announced can be claimed any more; claims know already."""
        for key in client.pending:
            del self.pending[key]
        client.pending.clear()
