"""Who on this host speaks SMC-R: agreeing on it before a byte of CLC is sent.

Nobody who does not speak SMC-R may ever be sent a CLC message.  Across hosts a TCP option tells
(RFC 7609, 3.1); on one host, where processes need no privileges for it, this module does.

::

    client                                       server (one Unix socket per process and address)
      bind its TCP socket
      ANNOUNCE source, destination  ----------->   (read when it is looked for)
      connect TCP  ............................>   accept; look the accepted 4-tuple up
                                    <-----------   ACCEPTED
      send CLC over TCP  ......................>   read CLC
      or WITHDRAW, and TCP is plain ----------->   hand the TCP connection over as it is

The announcement lies in the server's queue before the kernel knows of the TCP connection, so the
server looks up and never waits for a client that did not announce itself.  A process whose accept
never returns the announced 4-tuple never says ACCEPTED: with several processes on one port, or a
plain TCP server on the specific address next to a wildcard one, the client learns which process is
behind its connection, if any.

Theory of operation: both sides must come to one answer although each may give up at any moment
(deadline, cancellation, exit).  The client decides.  It sends CLC over TCP only when it was told
ACCEPTED, and anything else only after WITHDRAW, which the kernel has put into the server's queue
when the client's `send` returns.  So a server that finds bytes on the TCP connection, and then no
WITHDRAW in its queue, has CLC before it.  One that was told neither in time resets the TCP
connection, as after any message of a handshake that does not come (RFC 7609, C.5).

The Unix connection of a client to a listening process is made once and kept.

An address means something only within its network, so all this is for one network namespace.  A
listener of another one, as that of another container, is announced to when the *path* was proven:

::

    client                                       server in another network namespace
      PROVE source, destination --------------->   listen at destination's address, some port
                                    <-----------   LISTENING port, nonce; or REFUSED: not mine
      connect TCP there, from source ..........>   accept
                                    <...........   nonce, and both names as they are seen here
      compare; ANNOUNCE, and so on as above

Nobody but that process knows the nonce, so the address leads to its namespace, and not to another
one with the same addresses.  It sees the names that the client sees, so nothing between them
translates them.  Then the four-tuple of a connection names it at both ends.  A stranger in the
server's place sees a connection without a byte.  What is left is a transparent proxy for the one
port, which keeps the addresses and ports of both ends.

What comes in on a Unix socket is a peer's input: only processes of the same user are listened to,
and of a group where the directory is that group's; what is not understood costs that peer only, and
the number of pending announcements is bounded.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import trio

from trio_smc._base.reasons import FallbackReason
from trio_smc.host.addresses import plain_address
from trio_smc.host.private_directory import (
    DirectoryUnusable,
    PrivateDirectory,
    is_named,
    unusable,
)
from trio_smc.rendezvous.discovery import directory
from trio_smc.rendezvous.discovery.announcing import (
    Announcement,
    Announcer,
    AnySocket,
    Lookup,
)
from trio_smc.rendezvous.discovery.publication import BACKLOG, Claim, Publication, Search
from trio_smc.rnic.spinner import NEVER, Spinner

__all__ = [
    "Announcement",
    "AnySocket",
    "Claim",
    "Discovery",
    "Lookup",
    "Publication",
    "Search",
]


_log = logging.getLogger(__name__)

_LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class Discovery:
    """Same-host discovery of one stack: publishes its listeners, asks other stacks' listeners."""

    def __init__(
        self, private: Path, spinner: Spinner = NEVER, gone: Callable[[], object] = lambda: None
    ) -> None:
        """`private`: the user's private directory (`Config.private_directory`).  `gone`: called
        when a listening process has ended: what was learned of it may be so no more."""
        self._private = private
        self._spinner = spinner
        self._announcer = Announcer(private, spinner, gone)
        self._publications: weakref.WeakSet[Publication] = weakref.WeakSet()
        self._warned = False

    def open(self) -> None:
        """Make what `run` needs.  Raises OSError: there are no descriptors."""
        self._announcer.open()

    async def run(self) -> None:
        """Let go of listening processes that have ended, until cancelled; after `open`."""
        await self._announcer.run()

    def close(self) -> None:
        """End the Unix connections to listening processes; nothing is announced any more."""
        self._announcer.close()

    def abandon(self) -> None:
        """Let go of all descriptors: this process is a forked child, they are its parent's."""
        self._announcer.abandon()
        for publication in self._publications:
            publication.abandon()

    def unusable(self) -> FallbackReason | None:
        """What is wrong with the private directory, which is made when it is missing."""
        try:
            PrivateDirectory.open(self._private, create=True).close()
        except DirectoryUnusable as error:
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
            made = directory.NewSocket(self._private, name, BACKLOG)
        except DirectoryUnusable as error:
            return self.publish_nothing(address, self._why_not(error))
        publication = Publication(address, made, None, self._spinner)
        publication.start(nursery)
        self._publications.add(publication)
        return publication

    def publish_nothing(self, sockname: tuple[str, int], reason: FallbackReason) -> Publication:
        """The publication of a listener that nobody shall announce connections to, and why."""
        return Publication((plain_address(sockname[0]), sockname[1]), None, reason)

    def is_announced(self, source: tuple[str, int], destination: tuple[str, int]) -> bool:
        """Whether a connection of this stack with these addresses is on its way already."""
        return self._announcer.is_announced(source, destination)

    def announce_now(
        self,
        source: tuple[str, int],
        destination: tuple[str, int],
        sock: AnySocket | None = None,
        *,
        required: bool = False,
    ) -> Announcement | FallbackReason | None:
        """As `announce`; None when that takes looking around, or waiting."""
        if sys.platform != "linux":
            return FallbackReason.UNSUPPORTED_PLATFORM
        try:
            return self._announcer.announce_now(
                source, _reached(destination), sock, required=required
            )
        except OSError as error:
            return self._why_not(error)

    async def announce(
        self,
        source: tuple[str, int],
        destination: tuple[str, int],
        deadline: float,
        sock: AnySocket | None = None,
        *,
        required: bool = False,
        elsewhere: Lookup | None = None,
    ) -> Announcement | FallbackReason:
        """Announce a TCP connection, before it is opened, to all who might accept it.

        source: local address and port that the TCP socket is bound to.
        destination: where it is going to connect.
        deadline: when to stop trying, as `trio.current_time`.
        sock: the TCP socket, whose network namespace counts; None: that of this thread.
        required: the connection is to be SMC-R, or closed.
        elsewhere: what `prove` returned, for an address of another network namespace.

        Returns an announcement, to be asked for `Announcement.accepted` once the TCP connection
        is open, or closed; or why the connection is plain TCP: PEER_NOT_CAPABLE when there is
        nobody to ask, OTHER_USER, or what is wrong with the private directory.
        """
        if sys.platform != "linux":
            return FallbackReason.UNSUPPORTED_PLATFORM
        destination = _reached(destination)
        try:
            with trio.move_on_at(deadline):
                return await self._announcer.announce(
                    source, destination, sock, required=required, elsewhere=elsewhere
                )
        except (DirectoryUnusable, OSError) as error:
            return self._why_not(error)
        return FallbackReason.PEER_NOT_CAPABLE

    async def prove(
        self, source: str, destination: tuple[str, int], sock: AnySocket
    ) -> Lookup | FallbackReason:
        """Who listens there in other network namespaces of this host, and shows that the network
        leads to it unchanged; nobody but where the directory was named outright.

        source: local address that the TCP socket is going to connect from.
        destination: where to; an address that is none of this network namespace's.
        sock: the TCP socket.

        Returns what `announce` takes as `elsewhere`; or PEER_NOT_CAPABLE when nobody listens there,
        PATH_NOT_PROVEN when somebody does and shows nothing of the kind, or another reason.
        """
        if sys.platform != "linux" or not is_named(self._private):
            return FallbackReason.PEER_NOT_CAPABLE
        try:
            return await self._announcer.prove(source, destination, sock)
        except (DirectoryUnusable, OSError) as error:
            return self._why_not(error)

    def _why_not(self, error: DirectoryUnusable | OSError) -> FallbackReason:
        """Warn of what kept a connection from discovery, and say why it is plain TCP."""
        self._warn(error)
        if isinstance(error, DirectoryUnusable):
            return error.reason
        if isinstance(error, PermissionError | NotADirectoryError):
            return unusable(error, self._private).reason
        # No descriptors, no /proc: the TCP connection does not fail for it.
        return FallbackReason.OUT_OF_RESOURCES

    def _warn(self, error: Exception) -> None:
        # Once: every connection has its reason, the log needs the details only.
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        _log.log(level, "no SMC-R between processes of this host: %s", error)


def _reached(destination: tuple[str, int]) -> tuple[str, int]:
    """Connecting to a wildcard address connects to loopback."""
    host = plain_address(destination[0])
    return _LOOPBACK_OF.get(host, host), destination[1]
