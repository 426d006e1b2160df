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

What comes in on a Unix socket is a peer's input.  In a private directory the kernel lets only this
user send to a name or make one.  In a group's directory a datagram counts only if its sender is a
user whose listener was found, and a name only if it belongs to the member that has the directory.
Nothing that another user made can block this process, and the state per client is bounded by the
handshakes that are under way.
"""

from __future__ import annotations

import contextlib
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
    unusable,
)
from trio_smc.rendezvous.discovery import directory
from trio_smc.rendezvous.discovery.announcing import Announcement, Announcer
from trio_smc.rendezvous.discovery.lookup import AnySocket, Found
from trio_smc.rendezvous.discovery.publication import Answerer, Claim, Publication
from trio_smc.rnic.spinner import NEVER, Spinner

__all__ = ["Announcement", "AnySocket", "Claim", "Discovery", "Found", "Publication"]


class Discovery(Announcer):
    """Same-host discovery of one stack: publishes its listeners, announces its connections."""

    def __init__(
        self,
        private: Path,
        timers: Timers | None = None,
        spinner: Spinner = NEVER,
        ended: Callable[[], object] = lambda: None,
    ) -> None:
        """As `Announcer`."""
        super().__init__(private, timers, spinner, ended)
        self._answerer = Answerer(self.names, timers, spinner, self._is_named)
        self._publications: weakref.WeakSet[Publication] = weakref.WeakSet()

    def open(self) -> None:
        """Open the descriptors that a stack keeps, as far as the private directory is there.

        They are opened when they are needed otherwise.
        """
        with contextlib.suppress(OSError, DirectoryUnusable):
            PrivateDirectory.open(self._private, create=False).close()
            self.names.open()

    def close(self) -> None:
        """Close what announcing and answering need; neither is done any more.  Idempotent.

        Announcements that are open are withdrawn.
        """
        for announcement in tuple(self._open):
            announcement.cancel()
        self.names.remove_marks()
        self.names.close()
        self.closer.join()

    def abandon(self) -> None:
        """Close all descriptors: this process is a forked child, and they are its parent's."""
        super().abandon()
        for publication in self._publications:
            publication.abandon()

    def unusable(self) -> FallbackReason | None:
        """Why the private directory cannot be used, or None; it is made if it is missing."""
        try:
            with contextlib.closing(PrivateDirectory.open(self._private, create=True)) as found:
                found.check_room()
        except DirectoryUnusable as error:
            return error.reason
        except OSError as error:
            return unusable(error, self._private).reason
        return None

    def publish(
        self, sockname: tuple[str, int], nursery: trio.Nursery, *, dual_stack: bool = False
    ) -> Publication:
        """Let clients on this host announce connections to a listening TCP socket.

        sockname: address and port that it listens on.
        nursery: where the background task runs; it never raises there.
        dual_stack: the socket is an IPv6 one without IPV6_V6ONLY.

        Never fails: if nothing can be published, `Publication.unavailable` is the reason.
        """
        address = plain_address(sockname[0]), sockname[1]
        if sys.platform != "linux":
            return self.publish_nothing(address, FallbackReason.UNSUPPORTED_PLATFORM)
        name = directory.listener_name(*address, dual_stack=dual_stack)
        try:
            self.names.renew()
            made = directory.NewSocket(self._private, name)
        except (DirectoryUnusable, OSError) as error:
            return self.publish_nothing(address, self.why_not(error))
        publication = Publication(address, made, None, self._answerer)
        publication.start(nursery)
        self._publications.add(publication)
        return publication

    def wake_listener(self, announcement: Announcement) -> None:
        """As `Announcer.wake_listener`: `Publication.on_waiting` of a listener of this stack."""
        for publication in tuple(self._publications):
            if publication.path in announcement.found.names:
                publication.on_waiting()

    def publish_nothing(self, sockname: tuple[str, int], reason: FallbackReason) -> Publication:
        """The publication of a listener to which no connection shall be announced, and why."""
        address = plain_address(sockname[0]), sockname[1]
        return Publication(address, None, reason, self._answerer)
