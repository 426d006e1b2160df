"""Answering clients that have announced a TCP connection: the server's half of discovery.

`trio_smc.rendezvous.discovery.same_host` describes the protocol, and why both sides always agree.

Theory of operation
-------------------
The listener has a datagram socket with a name in the directory of its address.  So clients know
that the listener speaks SMC-R, and can check that its process is alive.  When the server accepts a
TCP connection, it searches the name of the announcement and sends one datagram to that name.  If
that fails, the server knows at once that the connection is plain TCP.  The only state of a client
at the server is its claim, which lasts as long as the handshake.

Connections share ports (`trio_smc.connecting.dial`), so the accepted connection may be an earlier
one with the same port as the announced one.  Then the client sends NOT_MINE, or the first bytes are
not CLC, or the connection has ended.  In each case the connection is plain TCP.  If a connection
has ended before the server accepts it, the server does not answer.

A client of another network namespace requests a proof first (`discovery.proofs`).  Proofs are
counted by user (`discovery.shares`).  If no place is left, the oldest proof of the user with the
most proofs is cancelled, unless the requesting user has as many.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from collections.abc import Callable
from typing import Final, NamedTuple

import trio

from trio_smc._base.interrupts import ki_protected
from trio_smc._base.reasons import FallbackReason
from trio_smc._base.timers import Timers
from trio_smc._base.waits import wait_readable
from trio_smc.host.addresses import is_same_host
from trio_smc.host.descriptors import Closer
from trio_smc.host.private_directory import DirectoryUnusable, PrivateDirectory, admits_user
from trio_smc.host.real_time import move_on_after, now
from trio_smc.host.tcp import end_waits, is_established, unread_bytes
from trio_smc.rendezvous.discovery import messages
from trio_smc.rendezvous.discovery.directory import NewSocket
from trio_smc.rendezvous.discovery.lookup import AnySocket
from trio_smc.rendezvous.discovery.messages import Kind, Message
from trio_smc.rendezvous.discovery.names import Names, announced_name
from trio_smc.rendezvous.discovery.proofs import Probe, reply_name
from trio_smc.rendezvous.discovery.shares import Shares
from trio_smc.rendezvous.discovery.waiting import wait_readable_until
from trio_smc.rnic.soft.messages import VERSION
from trio_smc.rnic.spinner import Spinner
from trio_smc.wire.clc import EYE_CATCHER, MAX_MESSAGE_SIZE

__all__ = ["MAX_PROBES", "NAME_INTERVAL", "Answerer", "Claim", "Publication"]

_log = logging.getLogger(__name__)

_MESSAGES_AT_ONCE: Final = 64
"""Messages that are handled before other tasks run.  Chosen; no measurement is recorded."""
NAME_INTERVAL: Final = 10.0
"""Seconds between checks that the socket still has its name.  Chosen."""
_ANY: Final = ("0.0.0.0", "::")
MAX_PROBES: Final = 16
"""Proofs of one listener that are under way at a time, each with a descriptor.  Chosen."""


_CLOSED: Final = "the connection was closed during the handshake"


def _no_op() -> None:
    """No-op: no listener."""


class Answerer(NamedTuple):
    """The parts of a stack that all of its listeners use to answer clients.

    Fields:
      names: of announcements.
      timers, spinner: of the stack.
      is_named: True if the user has configured the private directory, so clients of other network
        namespaces may share it.
    """

    names: Names
    timers: Timers | None
    spinner: Spinner
    is_named: bool


class Claim:
    """An accepted TCP connection that was announced: to be accepted or refused, then confirmed.

    Args:
      name: of the announcement.
      found: the directories with that name, nearly always one.
      accepted: the connection, from which nothing was read; None: only its addresses are known.

    Attributes:
      tokens: of the clients to which ACCEPTED was sent, and which have not sent NOT_MINE.
    """

    __slots__ = (
        "_accepted", "_connection", "_found", "_name", "_publication", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        publication: Publication,
        name: str,
        found: list[PrivateDirectory],
        accepted: socket.socket | None,
    ) -> None:
        self._publication = publication
        self._name = name
        self._found = found  # not yet answered
        self._accepted = accepted
        self._connection: AnySocket | None = None  # that `confirm` waits for
        self.tokens: set[bytes] = set()

    def is_required(self) -> bool:
        """True if the client requires SMC-R; to be called before the answer."""
        names = self._publication.answerer.names
        return any(names.is_required(directory, self._name) for directory in self._found)

    def accept(self, *, required: bool = False) -> bool:
        """Send ACCEPTED at once; `confirm` is to follow.  False: the client has given up.

        required: this side requires SMC-R.
        """
        publication, name = self._publication, self._name
        send = publication.answerer.names.send
        for directory in self._found:
            if not directory.is_admitted():
                send(directory, name, messages.refused(FallbackReason.OTHER_USER))
                continue
            token = os.urandom(messages.TOKEN_SIZE)
            if send(directory, name, messages.accepted(token, VERSION, required=required)):
                self.tokens.add(token)
                publication.claims[token] = self
        self._found = []
        return bool(self.tokens)

    def refuse(self, reason: FallbackReason) -> None:
        """Refuse: notify the client at once that its connection is plain TCP, and why."""
        for directory in self._found:
            names = self._publication.answerer.names
            names.send(directory, self._name, messages.refused(reason))
        self.forget()

    async def confirm(self, connection: AnySocket, deadline: float) -> bool:
        """Wait until the client has sent something; True if the client continues with SMC-R.

        connection: the accepted TCP connection, from which nothing was read.
        deadline: end of the wait, by the clock of the stack's timers.

        True: the client's first bytes have arrived on the TCP connection.  They are CLC unless it
        is another connection than the announced one (`first_bytes`).  False: the connection is
        plain TCP, and the client knows it.

        Raises OSError (ETIMEDOUT) if the client sends nothing in time.  Then, and after a
        cancellation, the caller must close the TCP connection, because the client may still send
        CLC.
        """
        try:
            if self._found:
                self.accept()
            if not self.tokens:
                return False
            self._connection = connection
            while not await self._publication.wait(connection, deadline):
                if not self.tokens:
                    return False
                if now(self._publication.answerer.timers) >= deadline:
                    raise OSError(errno.ETIMEDOUT, "the client announced SMC-R and sends nothing")
            # A client sends NOT_MINE before anything but CLC.
            self._publication.receive_now()
            return bool(self.tokens)
        finally:
            self.forget()

    def first_bytes(self) -> bytes:
        """The first bytes of the connection, which stay unread; empty if they are not CLC.

        If they are not CLC, this is another connection than the announced one, with the same port.

        Raises OSError: no byte has arrived, or the connection was reset.
        """
        if self._accepted is None:
            raise OSError(errno.ENOTCONN, "only the addresses of the connection are known")
        # Trio's `recv` takes a pass of the scheduler.
        first = self._accepted.recv(MAX_MESSAGE_SIZE, socket.MSG_PEEK)
        return first if EYE_CATCHER.startswith(first[: len(EYE_CATCHER)]) else b""

    def forget(self) -> None:
        """Drop the claim: send nothing more, and ignore NOT_MINE.  Idempotent."""
        self._connection = None
        self._found = []
        for token in self.tokens:
            self._publication.claims.pop(token, None)
        self.tokens = set()

    def deny(self, token: bytes) -> None:
        """A client has sent NOT_MINE."""
        self.tokens.discard(token)
        if not self.tokens and self._connection is not None:
            end_waits(self._connection)


@ki_protected
class Publication:
    """One listening TCP socket to which clients on this host can announce connections.

    Attributes:
      address: the address and port of the socket.
      unavailable: why nothing is published, or None.
      answerer: of the stack.
      claims: by token, of the clients to which ACCEPTED was sent.
      probes: the proofs that are under way.
      on_waiting: called when a client of the same stack finds that its connection waits in the
        backlog of a listener with this address.
    """

    def __init__(
        self,
        address: tuple[str, int],
        made: NewSocket | None,
        unavailable: FallbackReason | None,
        answerer: Answerer,
    ) -> None:
        self.address = address
        self.unavailable = unavailable
        self.answerer = answerer
        self._made = made
        self._group = made.group if made is not None else None
        self._namespace = made.namespace if made is not None else ""
        self._closer = Closer("same-host discovery")
        self._scope = trio.CancelScope()
        self._nursery: trio.Nursery | None = None
        self._abandoned = False
        self.claims: dict[bytes, Claim] = {}
        self.probes: set[Probe] = set()
        self.on_waiting: Callable[[], object] = _no_op
        self._shares: Shares[Probe] = Shares()

    @property
    def path(self) -> str:
        """The name of its socket, below the private directory; empty if nothing is published."""
        return "" if self._made is None else self._made.path

    def claim(
        self,
        local: tuple[str, int],
        remote: tuple[str, int],
        accepted: socket.socket | None = None,
    ) -> Claim | None:
        """Find the announcement of an accepted TCP connection; None if there is none.

        local, remote: its two addresses, text and port.
        accepted: the connection, from which nothing was read.

        Never waits, because a client announces a connection before it connects.  The caller must
        accept or refuse the claim; otherwise the client waits until its deadline.
        """
        if self._made is None:
            return None
        if self._made.user != os.geteuid():
            self._on_other_user()
            return None
        if not self.answerer.is_named and not is_same_host(local[0], remote[0]):
            return None
        name = announced_name(self._namespace, messages.four_tuple(remote, local))
        found = self.answerer.names.find(name)
        # A connection that has ended is an earlier one with this port, or its client has given up.
        if not found or (accepted is not None and not is_established(accepted)):
            return None
        return Claim(self, name, found, accepted)

    def _on_other_user(self) -> None:
        """Publish nothing more: the process has changed its user, as daemons do.

        In a private directory the process can no longer open the names of clients.  In a group's
        directory clients ignore answers of the new user.  Without the listener's name clients do
        not wait for an answer.
        """
        _log.info("same-host discovery ends for one listener: this process changed its user")
        self.unavailable = FallbackReason.OTHER_USER
        self.close()

    def is_short(self, local: tuple[str, int], remote: tuple[str, int]) -> bool:
        """True if a client has marked connections between these addresses as too short for SMC-R
        (`Announcer.mark_short`)."""
        if self._made is None:
            return False
        key = messages.four_tuple((remote[0], 0), local)
        return self.answerer.names.is_marked(announced_name(self._namespace, key))

    async def wait(self, connection: AnySocket, deadline: float) -> bool:
        """Wait for bytes on an accepted TCP connection.

        False: the deadline has passed, or `end_waits` was called.

        Raises trio.ClosedResourceError: another task has closed the connection.
        """
        number = connection.fileno()
        if number < 0:
            raise trio.ClosedResourceError(_CLOSED)
        spinner = self.answerer.spinner
        if unread_bytes(number) or spinner.until(lambda: unread_bytes(number) > 0, soon=True):
            return True
        spinner.sleeping += 1
        try:
            readable = await wait_readable_until(connection, self.answerer.timers, deadline)
        finally:
            spinner.sleeping -= 1
        if connection.fileno() < 0:
            raise trio.ClosedResourceError(_CLOSED)
        return readable

    def close(self) -> None:
        """Remove the listener's name.  Idempotent."""
        made, self._made = self._made, None
        if made is not None and not self._abandoned:
            made.remove()
            end_waits(made.socket)
            self._closer.discard_datagrams(made.socket)
            self._scope.cancel()

    def abandon(self) -> None:
        """Close the descriptors: this process is a forked child, and they are its parent's."""
        self._abandoned = True
        for probe in self.probes:
            probe.listener.close()
        if self._made is not None:
            self._made.abandon()
        self.claims.clear()
        self.probes.clear()

    def start(self, nursery: trio.Nursery) -> None:
        """Receive messages in a background task of `nursery`, until `close`."""
        nursery.start_soon(self._run, name="trio_smc same-host discovery")

    async def _run(self) -> None:
        try:
            with self._scope:
                async with trio.open_nursery() as self._nursery:
                    self._start_signpost(self._nursery)
                    while self._made is not None and not self._abandoned:
                        with move_on_after(self.answerer.timers, NAME_INTERVAL) as timeout:
                            await self._receive_some()
                        if timeout.cancelled_caught:
                            self._keep_name()
        except Exception:
            # A defect.  From now on the connections of this listener are TCP.
            _log.exception("same-host discovery ends for one listener")
        finally:
            self._nursery = None
            self.close()
            self._closer.join()

    def _start_signpost(self, nursery: trio.Nursery) -> None:
        """Answer clients of older releases."""
        if self._made is not None and self._made.signpost is not None:
            nursery.start_soon(self._made.signpost.run, self.answerer.timers)

    async def _receive_some(self) -> None:
        """Wait for messages, and handle them, until cancelled."""
        while self._made is not None:
            with contextlib.suppress(trio.ClosedResourceError):
                await wait_readable(self._made.socket)
            if self._abandoned:
                await trio.sleep_forever()
            self.receive()
            await trio.lowlevel.checkpoint()

    def _keep_name(self) -> None:
        """Make the names again that a cleaner of /tmp has removed.

        The socket gets another name, and the directory of announcements is opened again.
        """
        made, names = self._made, self.answerer.names
        if made is None or self._abandoned:
            return
        try:
            names.renew()
            if made.is_there():
                return
            renewed = made.renewed()
        except (DirectoryUnusable, OSError) as error:
            _log.info("same-host discovery cannot publish again: %s", error)
            return
        made.remove()
        self._closer.discard_datagrams(made.socket)
        self._made = renewed
        if self._nursery is not None:
            self._start_signpost(self._nursery)

    def receive_now(self) -> None:
        """Call `receive` if messages have arrived."""
        if self._made is not None and not self._abandoned and self._made.has_datagram():
            self.receive()

    def receive(self) -> None:
        """Handle the messages that have arrived, at most `_MESSAGES_AT_ONCE`."""
        for _ in range(_MESSAGES_AT_ONCE):
            if self._made is None or self._abandoned:
                return
            try:
                message, sender = messages.receive(self._made.socket, self._closer)
            except BlockingIOError:
                return
            if message is None or sender is None or not admits_user(sender, self._group):
                continue
            if message.kind is Kind.NOT_MINE:
                claim = self.claims.pop(message.token, None)
                if claim is not None:
                    claim.deny(message.token)
            elif message.kind is Kind.PROVE:
                self._prove(message, sender)

    def _prove(self, message: Message, user: int) -> None:
        """Listen on the address to which a client of another network namespace will connect."""
        try:
            answer = self._probe(message.connection, user).message
        except OSError as error:
            _log.debug("same-host discovery: no proof of an address: %s", error)
            answer = messages.refused(FallbackReason.PATH_NOT_PROVEN)
        name = reply_name(message.name)
        for directory in self.answerer.names.find(name):
            if directory.owner == user:
                self.answerer.names.send(directory, name, answer)

    def _probe(self, connection: bytes, user: int) -> Probe:
        """Start a proof.  Raises OSError: this listener cannot prove the address."""
        if self._made is None or self._nursery is None or not self._made.may_prove():
            raise OSError(errno.EPERM, "a default directory, or not the listener's network")
        if self.address[0] not in (*_ANY, messages.parties(connection)[1]):
            raise OSError(errno.EADDRNOTAVAIL, "this listener has another address")
        if len(self.probes) >= MAX_PROBES:
            loser = self._shares.oldest_of_largest(user)
            if loser is None:
                raise OSError(errno.EMFILE, "too many proofs are under way")
            loser.cancel()
            self._end_probe(loser)
        probe = Probe(connection, user)
        self.probes.add(probe)
        self._shares.add(user, probe)
        self._nursery.start_soon(self._run_probe, probe)
        return probe

    async def _run_probe(self, probe: Probe) -> None:
        try:
            await probe.run()
        finally:
            self._end_probe(probe)

    def _end_probe(self, probe: Probe) -> None:
        if probe in self.probes:
            self.probes.remove(probe)
            self._shares.remove(probe.user, probe)
