"""Which processes of this host speak SMC-R: agreeing on it before a byte of CLC is sent.

A process that does not speak SMC-R must never be sent a CLC message.  Across hosts a TCP option
shows that a peer speaks it (RFC 7609, 3.1); on one host this module does, without privileges.  The
announcement of a TCP connection is the *name* of a datagram socket::

    client                                       server
      bind a datagram socket, named by the
      four-tuple of the TCP connection to come
      connect TCP  ............................>   accept
                                    <-----------   ACCEPTED, to the socket with that name;
                                                   if that cannot be sent: plain TCP
      send CLC over TCP  ......................>   read CLC

The name is there before the kernel knows of the TCP connection.  So the server finds it or knows
that there is none, and never waits for a client that did not announce itself.  A process that does
not accept the connection does not send ACCEPTED: with several processes on one port, or a plain
server on the specific address beside a wildcard one, the answer comes from the process that has the
connection, if from any.  The client announces only if there is a listener that speaks SMC-R.

Theory of operation: both sides must agree although each may give up at any moment (deadline,
cancellation, exit).  If sendto(2) succeeds, the client finds ACCEPTED in its queue and owes the
server a CLC message (a Proposal or a Decline), or the end of the TCP connection.  To give up, the
client removes the name and shuts the socket down for receiving, and then looks into the queue.  The
kernel decides under one lock whether the datagram is in the queue or is refused, so there is no
third outcome.  A client that was killed has no socket, and its TCP connection ends.  A server that
was promised a CLC message and receives nothing in time resets the TCP connection, as after any
message of a handshake that does not come (RFC 7609, C.5).

What fails to be sent for any other reason, a full queue for example, was not sent either, and the
server takes the connection for plain TCP.

The client may draw a port that another process has for a connection to the same address; both then
have the same four-tuple.  The announced connection cannot be made as long as the other one exists.
If the server has answered for the other one, the client sends NOT_MINE to it, before it does
anything else.

ACCEPTED brings the version of the server's software RNIC.  If the client's is another one, the
client sends SMC Decline, and both sides know why the connection is plain TCP.

An address means something only within its network, so all this is for one network namespace.  A
listener of another one, for example that of another container, is announced to if the *path* was
proven (`trio_smc.rendezvous.discovery.proofs`).

What comes in on a Unix socket is a peer's input.  A datagram counts only if its sender is a user
whose listener was found; names count only if their owner is this user, or a member of the group
where the directory is that group's.  Nothing that another process made can block this one, and the
state per client is bounded by the handshakes that are under way.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import trio

from trio_smc._base.reasons import FallbackReason
from trio_smc._base.timers import Timers
from trio_smc.host.addresses import plain_address
from trio_smc.host.private_directory import (
    DirectoryUnusable,
    PrivateDirectory,
    is_named,
    unusable,
)
from trio_smc.rendezvous.discovery import directory
from trio_smc.rendezvous.discovery.announcing import Announcement, Announcer
from trio_smc.rendezvous.discovery.lookup import AnySocket, Found
from trio_smc.rendezvous.discovery.names import AllNames
from trio_smc.rendezvous.discovery.publication import Answerer, Claim, Publication
from trio_smc.rnic.spinner import NEVER, Spinner

__all__ = ["Announcement", "AnySocket", "Claim", "Discovery", "Found", "Publication"]

_log = logging.getLogger(__name__)

_LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class Discovery:
    """Same-host discovery of one stack: publishes its listeners, announces its connections."""

    def __init__(
        self,
        private: Path,
        timers: Timers | None = None,
        spinner: Spinner = NEVER,
        ended: Callable[[], object] = lambda: None,
    ) -> None:
        """
        Args:
          private: the user's private directory (`Config.private_directory`).
          timers: of the stack; None: each wait has a cancel scope.
          spinner: of the stack.
          ended: called when listening processes are found to have ended: what was learned of them
            may be true no more.
        """
        self._private = private
        self._announcer = Announcer(private, timers, spinner, ended)
        self._answerer = Answerer(AllNames(private), timers, spinner, is_named=is_named(private))
        self._publications: weakref.WeakSet[Publication] = weakref.WeakSet()
        self._warned = False

    def open(self) -> None:
        """Open the descriptors that a stack keeps, as far as the private directory is there.

        Each is opened when it is needed otherwise.
        """
        with contextlib.suppress(OSError, DirectoryUnusable):
            PrivateDirectory.open(self._private, create=False).close()
            self._answerer.open()
            self._announcer.open()

    def close(self) -> None:
        """Close what announcing and answering need; neither is done any more."""
        self._announcer.close()
        self._answerer.close()

    def abandon(self) -> None:
        """Close all descriptors: this process is a forked child, and they are its parent's."""
        self._announcer.abandon()
        self._answerer.close()
        for publication in self._publications:
            publication.abandon()

    def unusable(self) -> FallbackReason | None:
        """Why the private directory cannot be used, or None; it is made if it is missing."""
        try:
            PrivateDirectory.open(self._private, create=True).close()
        except DirectoryUnusable as error:
            return error.reason
        return None

    def publish(
        self, sockname: tuple[str, int], nursery: trio.Nursery, *, dual_stack: bool = False
    ) -> Publication:
        """Let clients on this host announce connections to a listening TCP socket.

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
            self._answerer.open()
            made = directory.NewSocket(self._private, name)
        except (DirectoryUnusable, OSError) as error:
            return self.publish_nothing(address, self._why_not(error))
        publication = Publication(address, made, None, self._answerer)
        publication.start(nursery)
        self._publications.add(publication)
        return publication

    def publish_nothing(self, sockname: tuple[str, int], reason: FallbackReason) -> Publication:
        """The publication of a listener to which no connection shall be announced, and why."""
        address = plain_address(sockname[0]), sockname[1]
        return Publication(address, None, reason, self._answerer)

    @property
    def is_full(self) -> bool:
        """True if so many announcements are open that another one waits (`wait_for_place`)."""
        return self._announcer.is_full

    async def wait_for_place(self, deadline: float) -> None:
        """Wait until another announcement may be made, at most until ``deadline``."""
        await self._announcer.wait_for_place(deadline)

    def has_ended(
        self, source: str, destination: tuple[str, int], sock: AnySocket | None = None
    ) -> bool:
        """True if the listeners of an address that were known are found to be gone.

        source, destination: the local address; the listeners' address and port.
        """
        try:
            return self._announcer.has_ended(source, _reached(destination), sock)
        except (DirectoryUnusable, OSError) as error:
            self._warn(error)
            return False

    def announce(
        self,
        source: tuple[str, int],
        destination: tuple[str, int],
        sock: AnySocket | None = None,
        *,
        required: bool = False,
        elsewhere: Found | None = None,
    ) -> Announcement | FallbackReason | None:
        """Announce a TCP connection, before it is opened.

        source: local address and port of the TCP socket.
        destination: where it is going to connect.
        sock: the TCP socket, whose network namespace counts; None: that of this thread.
        required: the connection is to be SMC-R, or closed.
        elsewhere: what `prove` returned, for an address of another network namespace.

        Returns an announcement, whose `Announcement.accepted` is to be called when the TCP
        connection is open, or which is to be closed; or why the connection is plain TCP:
        PEER_NOT_CAPABLE if there is no listener, OTHER_USER, or what is wrong with the private
        directory.  None: another connection with these addresses is announced.
        """
        if sys.platform != "linux":
            return FallbackReason.UNSUPPORTED_PLATFORM
        try:
            return self._announcer.announce(
                source, _reached(destination), sock, required=required, elsewhere=elsewhere
            )
        except (DirectoryUnusable, OSError) as error:
            return self._why_not(error)

    async def prove(
        self, source: str, destination: tuple[str, int], sock: AnySocket
    ) -> Found | FallbackReason:
        """The listeners in another network namespace of this host that prove that the network leads
        to them unchanged; none unless the directory was named outright.

        source: local address that the TCP socket is going to connect from.
        destination: where to; an address that is not one of this network namespace.
        sock: the TCP socket.

        Returns what `announce` takes as `elsewhere`; or PEER_NOT_CAPABLE if there is no listener,
        PATH_NOT_PROVEN if there is one and it proves nothing, or another reason.
        """
        if sys.platform != "linux" or not is_named(self._private):
            return FallbackReason.PEER_NOT_CAPABLE
        try:
            return await self._announcer.prove(source, destination, sock)
        except (DirectoryUnusable, OSError) as error:
            return self._why_not(error)

    def _why_not(self, error: DirectoryUnusable | OSError) -> FallbackReason:
        """Warn of what kept a connection from discovery; returns why it is plain TCP."""
        self._warn(error)
        if isinstance(error, DirectoryUnusable):
            return error.reason
        if isinstance(error, PermissionError | NotADirectoryError):
            return unusable(error, self._private).reason
        # No descriptors, no /proc, no room: the TCP connection does not fail for it.
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
