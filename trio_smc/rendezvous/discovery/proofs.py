"""Proofs that a TCP address leads to a listener of another network namespace, at both ends.

::

    client                                       server in another network namespace
      PROVE source, destination --------------->   listen at destination's address, some port
                                    <-----------   LISTENING port, nonce; or REFUSED: not mine
      connect TCP there, from source ..........>   accept
                                    <...........   nonce, and both names as they are seen here
      compare; announce, and so on

Only that process knows the nonce, so the address leads to its namespace, and not to another one
with the same addresses.  The server sees the names that the client sees, so nothing between them
translates them.  Then the four-tuple of a connection names it at both ends.  An unrelated process
in the server's place sees a connection without a byte.  A transparent proxy for the one port, which
keeps the addresses and ports of both ends, is not detected.

A `Probe`, the TCP socket of the server, lasts until its client has connected, two seconds at most.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
from typing import Final, NamedTuple, Self

import trio

from trio_smc._base.interrupts import ki_protected
from trio_smc._base.reasons import FallbackReason
from trio_smc._base.resources import is_lack
from trio_smc._base.waits import wait_readable
from trio_smc.host.addresses import plain_address
from trio_smc.host.descriptors import Closer
from trio_smc.host.private_directory import admits_user
from trio_smc.rendezvous.discovery import messages
from trio_smc.rendezvous.discovery.messages import Kind, Message
from trio_smc.rendezvous.discovery.names import Names, send_to

__all__ = ["PROBE_TIMEOUT", "PROOF_PATIENCE", "Listener", "Probe", "Proofs", "reply_name"]

PROOF_PATIENCE: Final = 1.0
"""Seconds that a client waits for the proofs of all listeners together.  Chosen; no measurement is
recorded."""
PROBE_TIMEOUT: Final = 2.0
"""Seconds that a server listens for a proof.  Chosen: longer than the client waits."""
_IFNAMSIZ: Final = 16
_SO_NETNS_COOKIE: Final = 71  # linux/include/uapi/asm-generic/socket.h; 8 bytes
_log = logging.getLogger(__name__)


def reply_name(name: bytes) -> str:
    """The name, among those of announcements, of the socket that waits for the answer to a
    PROVE."""
    return f"proof-{name.hex()}"


class Listener(NamedTuple):
    """A listener that was found.

    Fields:
      user: the owner of its name.
      name: path of the socket below the private directory.
      is_wildcard: True if it listens at a wildcard address.
    """

    user: int
    name: str
    is_wildcard: bool


@ki_protected
class Proofs:
    """Requests to listeners of other network namespaces to prove that an address leads to them.

    Leaving it as a context manager closes the sockets.

    Args:
      source, destination: the addresses of the TCP connections to come.
      sock: the socket of the first of them.
      group: `PrivateDirectory.group`.
      names: where the sockets that wait for answers have their names.
      closer: for descriptors that are attached to answers.

    Attributes:
      reason: why no listener has proven it.
    """

    def __init__(
        self,
        source: str,
        destination: str,
        sock: trio.socket.SocketType | socket.socket,
        group: int | None,
        names: Names,
        closer: Closer,
    ) -> None:
        self._source, self._destination = source, destination
        self._key = messages.four_tuple((source, 0), (destination, 0))
        self._sock = sock
        self._group = group
        self._names = names
        self._closer = closer
        self._waiting: dict[str, tuple[socket.socket, Listener]] = {}  # by name
        self.reason = FallbackReason.PEER_NOT_CAPABLE

    def request(self, listener: Listener, connected: socket.socket) -> None:
        """Send PROVE to a listener; ``connected``: a datagram socket that is connected to it.

        Raises DirectoryUnusable, OSError: this process cannot receive the answer.
        """
        if not admits_user(listener.user, self._group):
            self.reason = FallbackReason.OTHER_USER
            return
        self.reason = FallbackReason.PATH_NOT_PROVEN
        name = secrets.token_bytes(messages.NAME_SIZE)
        self._waiting[reply_name(name)] = self._names.listen(reply_name(name)), listener
        if not send_to(connected, messages.prove(self._key, name)):
            self._close(reply_name(name))

    async def collect(self) -> list[Listener]:
        """Wait for the answers; returns the listeners that have proven it.

        Raises OSError: what kept this process from receiving one of the proofs.
        """
        proven: list[Listener] = []
        lacks: list[Exception] = []

        @trio.lowlevel.enable_ki_protection
        async def receive(waiting: socket.socket, listener: Listener) -> None:
            try:
                answer = await self._answer(waiting, listener)
                is_proof = answer.kind is Kind.LISTENING and answer.connection == self._key
                if is_proof and await self._is_true(answer):
                    proven.append(listener)
            except OSError as error:
                if is_lack(error):
                    lacks.append(error)
                _log.debug("same-host discovery: no proof: %s", error)

        with trio.move_on_after(PROOF_PATIENCE):
            async with trio.open_nursery() as nursery:
                for waiting, listener in self._waiting.values():
                    nursery.start_soon(receive, waiting, listener)
        if lacks:
            raise lacks[0]
        return proven

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for name in tuple(self._waiting):
            self._close(name)

    def _close(self, name: str) -> None:
        waiting, _ = self._waiting.pop(name)
        self._names.remove(name)
        self._closer.discard_datagrams(waiting)

    async def _answer(self, waiting: socket.socket, listener: Listener) -> Message:
        """The first message that the listener sends; datagrams of others are ignored."""
        while True:
            await wait_readable(waiting)
            with contextlib.suppress(BlockingIOError):
                answer, sender = messages.receive(waiting, self._closer)
                is_known = sender == listener.user or not self._names.are_shared
                if answer is not None and is_known:
                    return answer

    async def _is_true(self, answer: Message) -> bool:
        """True if the address leads from here to the sender, and untranslated.  Raises OSError."""
        family = socket.AF_INET6 if ":" in self._destination else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as plain:
            if not _goes_the_same_way(plain, self._sock):
                return False
            plain.bind((self._source, 0))
            with trio.socket.from_stdlib_socket(plain) as probe:
                await probe.connect((self._destination, answer.port))
                here, there = probe.getsockname()[:2], probe.getpeername()[:2]
                wanted = messages.proof(answer.nonce, here, there)
                got = b""
                while len(got) < len(wanted):
                    more = await probe.recv(len(wanted) - len(got))
                    if not more:
                        return False
                    got += more
        return secrets.compare_digest(got, wanted)


def _goes_the_same_way(plain: socket.socket, sock: trio.socket.SocketType | socket.socket) -> bool:
    """True if only its addresses decide where a socket's packets go, as for a plain one."""
    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_MARK) or any(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _IFNAMSIZ)
    ):
        return False
    try:
        cookies = [
            each.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8) for each in (plain, sock)
        ]
    except OSError:
        return True  # Linux before 5.14
    return cookies[0] == cookies[1]


@ki_protected
class Probe:
    """A TCP socket that proves to the client that an address leads to this network namespace.

    Args:
      connection: the `messages.four_tuple` of the PROVE.
      user: of the client.

    Raises OSError: the address is not one of this namespace.

    Attributes:
      message: the LISTENING for the client.
    """

    __slots__ = ("_nonce", "_scope", "_source", "listener", "message", "user")

    def __init__(self, connection: bytes, user: int) -> None:
        self.user: int = user
        source, address = messages.parties(connection)
        self._source = plain_address(source)
        self._nonce = secrets.token_bytes(messages.NONCE_SIZE)
        self._scope = trio.CancelScope()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.listener: socket.socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self.listener.setblocking(False)
            self.listener.bind((address, 0))
            self.listener.listen()
            port = self.listener.getsockname()[1]
        except BaseException:
            self.listener.close()
            raise
        self.message: bytes = messages.listening(connection, port, self._nonce)

    async def run(self) -> None:
        """Wait for the client, and close the socket."""
        with self.listener, self._scope:
            self._scope.deadline = trio.current_time() + PROBE_TIMEOUT
            try:
                while True:
                    await wait_readable(self.listener)
                    if self.answer():
                        return
            except OSError as error:
                _log.debug("same-host discovery: no proof of an address: %s", error)

    def cancel(self) -> None:
        """End `run`."""
        self._scope.cancel()

    def answer(self) -> bool:
        """Accept one connection; True if it was the client's, which is sent the proof.

        Raises OSError: this process lacks descriptors.
        """
        with contextlib.suppress(BlockingIOError, ConnectionError):
            connection, name = self.listener.accept()
            with connection:
                connection.setblocking(False)
                here = connection.getsockname()
                if plain_address(name[0]) == self._source:
                    connection.send(messages.proof(self._nonce, name[:2], here[:2]))
                    return True
        return False
