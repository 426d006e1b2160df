"""Who on this host speaks SMC-R: agreeing on it before a byte of CLC is sent.

Nobody who does not speak SMC-R may ever be sent a CLC message.  Across hosts a TCP option tells
(RFC 7609, 3.1); on one host, where processes need no privileges for it, this module does.

::

    client                                       server (one Unix socket per process and address)
      bind its TCP socket
      ANNOUNCE source, destination  ----------->   remember it
                                    <-----------   HEARD
      connect TCP  ............................>   accept; look the accepted 4-tuple up
                                    <-----------   ACCEPTED
      GO                            ----------->   read CLC from the TCP connection
      send CLC

The client waits for HEARD before it connects, so the server looks up and never waits for a client
that did not announce itself.  A process whose accept never returns the announced 4-tuple never says
ACCEPTED: with several processes on one port, or a plain TCP server on the specific address next
to a wildcard one, the client learns which process is behind its connection, if any.

Theory of operation: both sides must come to one answer although each may give up at any moment
(deadline, cancellation, exit).  GO decides, and the kernel decides about GO: a server that stops
waiting first shuts its Unix socket down for reading and then reads once more.  A GO that was sent
before is found by that read; one sent after fails with EPIPE.  So "the client's send succeeded" and
"the server has a GO" are the same statement, and everything else, above all a Unix connection that
ends, means TCP.  Unix connections are closed once settled: no connection keeps a descriptor.

What comes in on a Unix socket is a peer's input: only processes of the same user are listened to,
what is not understood costs that peer only, and the number of pending announcements is bounded.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import sys
from pathlib import Path
from typing import Self

import trio

from trio_smc._base.reasons import FallbackReason
from trio_smc.rendezvous import _local_directory as directory
from trio_smc.rendezvous import _local_protocol as protocol
from trio_smc.rendezvous._local_connection import is_same_user, send, take
from trio_smc.rendezvous._local_protocol import Kind
from trio_smc.rendezvous._publication import Claim, Publication
from trio_smc.rendezvous.prefixes import is_same_host, plain_address

__all__ = ["Announcement", "Claim", "Discovery", "Publication"]

_log = logging.getLogger(__name__)

_BACKLOG = 1024
_MAX_ASKED = 64  # listening processes that a client asks
_STRAGGLER_TIMEOUT = 1.0  # for the rest once one process has answered, seconds
_RETRY_INTERVAL = 0.005  # after a full backlog, seconds
_LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class Discovery:
    """Same-host discovery of one stack: publishes its listeners, asks other stacks' listeners."""

    def __init__(self, private: Path) -> None:
        """`private`: the user's private directory (`Config.private_directory`)."""
        self._private = private
        self._listings = directory.Listings()
        self._warned = False

    def unusable(self) -> FallbackReason | None:
        """What is wrong with the private directory, which is made when it is missing."""
        try:
            os.close(directory.open_private(self._private, create=True))
        except directory.DirectoryUnusable as error:
            return error.reason
        return None

    def publish(
        self, sockname: tuple[str, int], nursery: trio.Nursery, *, dual_stack: bool = False
    ) -> Publication:
        """Let clients on this host announce themselves to a listening TCP socket.

        sockname: address and port that it listens on.
        nursery: where the background task runs; it never raises there.
        dual_stack: the socket is an IPv6 one without IPV6_V6ONLY.

        Never fails: where nothing can be published, `Publication.unavailable` says why.
        """
        address = plain_address(sockname[0]), sockname[1]
        if sys.platform != "linux":
            return self.publish_nothing(address, FallbackReason.UNSUPPORTED_PLATFORM)
        name = directory.listener_name(*address, dual_stack=dual_stack)
        try:
            made = directory.NewSocket(self._private, name, _BACKLOG)
        except directory.DirectoryUnusable as error:
            self._warn(error)
            return self.publish_nothing(address, error.reason)
        publication = Publication(address, made, None)
        publication.start(nursery)
        return publication

    def publish_nothing(self, sockname: tuple[str, int], reason: FallbackReason) -> Publication:
        """The publication of a listener that nobody shall announce connections to, and why."""
        return Publication((plain_address(sockname[0]), sockname[1]), None, reason)

    async def announce(
        self, source: tuple[str, int], destination: tuple[str, int], deadline: float
    ) -> Announcement | FallbackReason:
        """Announce a TCP connection, before it is opened, to all who might accept it.

        source: local address and port that the TCP socket is bound to.
        destination: where it is going to connect.
        deadline: when to stop waiting for answers, as `trio.current_time`.

        Returns an announcement, to be asked for `Announcement.accepted` once the TCP connection
        is open, or closed; or why the connection is plain TCP: PEER_NOT_CAPABLE when nobody
        answered, what the listener answered (OTHER_USER, LOCAL_VERSION_MISMATCH,
        HANDSHAKE_LIMIT), or what is wrong with the private directory.
        """
        if sys.platform != "linux":
            return FallbackReason.UNSUPPORTED_PLATFORM
        # Connecting to a wildcard address connects to loopback.
        host = plain_address(destination[0])
        destination = (_LOOPBACK_OF.get(host, host), destination[1])
        asked: list[socket.socket] = []
        heard: list[socket.socket] = []
        try:
            reason = await self._announce(asked, heard, source, destination, deadline)
        except BaseException:
            _close_all(asked)
            raise
        _close_all([connection for connection in asked if connection not in heard])
        return Announcement(heard) if heard else reason

    async def _announce(
        self,
        asked: list[socket.socket],
        heard: list[socket.socket],
        source: tuple[str, int],
        destination: tuple[str, int],
        deadline: float,
    ) -> FallbackReason:
        """Collect open connections in `asked`, and those that said HEARD in `heard`."""
        reason = FallbackReason.PEER_NOT_CAPABLE
        message = protocol.announce(protocol.four_tuple(source, destination))
        try:
            with trio.move_on_at(deadline) as scope:
                await self._connect(asked, source, destination)
                for connection in asked:
                    send(connection, message)
                waiting = list(asked)
                while waiting:
                    for connection in await _readable(waiting):
                        try:
                            refusal = _answer(connection)
                        except BlockingIOError:
                            continue
                        waiting.remove(connection)
                        if refusal is None:
                            heard.append(connection)
                        elif refusal is not FallbackReason.PEER_NOT_CAPABLE:
                            reason = refusal
                    if heard:
                        late = trio.current_time() + _STRAGGLER_TIMEOUT
                        scope.deadline = min(scope.deadline, late)
        except directory.DirectoryUnusable as error:
            self._warn(error)
            return error.reason
        except OSError as error:
            # No descriptors, no /proc: the TCP connection does not fail for it.
            self._warn(error)
            return FallbackReason.OUT_OF_RESOURCES
        return reason

    def _warn(self, error: Exception) -> None:
        # Once: every connection has its reason, the log needs the details only.
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        _log.log(level, "no SMC-R between processes of this host: %s", error)

    async def _connect(
        self,
        asked: list[socket.socket],
        source: tuple[str, int],
        destination: tuple[str, int],
    ) -> None:
        """Add a Unix connection to everyone who might accept the TCP connection."""
        address, port = destination
        try:
            root = directory.open_private(self._private, create=False)
        except FileNotFoundError:
            return
        listeners: list[directory.Listeners] = []
        try:
            namespace = directory.namespace_path()
            exact = directory.listener_name(address, port, dual_stack=False)
            for name in (exact, *directory.wildcard_names(address, port)):
                each = directory.Listeners(root, namespace, name, self._listings)
                listeners.append(each)  # one by one: another may not open
            # Our own wildcard listener says nothing about the same port of another host.
            wildcards = listeners[1:]
            if any(each.waiting for each in wildcards) and not is_same_host(source[0], address):
                for each in wildcards:
                    each.waiting.clear()
            for each in listeners:
                asked += each.connect(_MAX_ASKED - len(asked))
                while each.waiting:
                    await trio.sleep(_RETRY_INTERVAL)
                    asked += each.connect(_MAX_ASKED - len(asked))
        finally:
            for each in listeners:
                each.close()
            os.close(root)


class Announcement:
    """A TCP connection that was announced; its Unix connections are open until it is settled.

    Leaving it as a context manager withdraws, when it is not settled yet.
    """

    __slots__ = ("_connections",)

    def __init__(self, connections: list[socket.socket]) -> None:
        self._connections = connections

    async def accepted(self, deadline: float) -> FallbackReason | None:
        """Wait until the process that accepted the TCP connection says so; settles in any case.

        deadline: when to stop waiting, as `trio.current_time`.

        None: both sides start SMC-R; send the Proposal.  A reason: both sides stay on TCP.
        """
        reason = FallbackReason.PEER_NOT_CAPABLE
        try:
            with trio.move_on_at(deadline):
                while self._connections:
                    for connection in await _readable(self._connections):
                        # From here to `return` nothing may wait: GO is the point of no return.
                        try:
                            message = take(connection)
                        except BlockingIOError:
                            continue
                        if message is not None and message.kind is Kind.ACCEPTED:
                            if send(connection, protocol.GO):
                                return None
                        elif message is not None and message.reason is not None:
                            reason = message.reason
                        self._connections.remove(connection)
                        connection.close()
        finally:
            self.close()
        return reason

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Withdraw: the connection is plain TCP, or was never opened; idempotent."""
        connections, self._connections = self._connections, []
        _close_all(connections)


def _answer(connection: socket.socket) -> FallbackReason | None:
    """The answer to an announcement: None for HEARD.  BlockingIOError: not there yet."""
    message = take(connection)
    if not is_same_user(connection):
        return FallbackReason.OTHER_USER
    if message is None:
        return FallbackReason.PEER_NOT_CAPABLE
    if message.kind is Kind.HEARD:
        return None
    if message.kind is None:
        return FallbackReason.LOCAL_VERSION_MISMATCH
    return message.reason or FallbackReason.PEER_NOT_CAPABLE


async def _readable(connections: list[socket.socket]) -> list[socket.socket]:
    """Wait until packets or ends have arrived; the connections they arrived on."""
    if len(connections) == 1:
        await trio.lowlevel.wait_readable(connections[0])
        return list(connections)
    with select.epoll(len(connections)) as several:
        for connection in connections:
            several.register(connection, select.EPOLLIN)
        await trio.lowlevel.wait_readable(several.fileno())
        ready = {descriptor for descriptor, _ in several.poll(0)}
    return [connection for connection in connections if connection.fileno() in ready]


def _close_all(connections: list[socket.socket]) -> None:
    for connection in connections:
        connection.close()
