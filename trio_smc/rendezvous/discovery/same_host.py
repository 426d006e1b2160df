"""Same-host discovery: two processes of one host agree on SMC-R before the first byte of CLC.

A client must not send a CLC message to a process that does not speak SMC-R.  Between hosts, a TCP
option shows that the peer speaks SMC-R (RFC 7609, 3.1).  On one host, this module finds out without
privileges.  The client announces a TCP connection by the *name* of a datagram socket::

    client                                       server
      bind a datagram socket, named by the
      four-tuple of the future TCP connection
      connect TCP  ............................>   accept
                                    <-----------   ACCEPTED, to the socket with that name;
                                                   if sendto(2) fails: plain TCP
      send CLC over TCP  ......................>   read CLC

The name exists before the kernel knows of the TCP connection.  So the server either finds the name,
or knows that the client has not announced the connection.  The server never waits for such a
client.  Only the process that accepts the connection sends ACCEPTED.  This holds if several
processes share the port, and if a plain server listens on the specific address beside a listener on
the wildcard address.  The client announces only if there is a listener that speaks SMC-R.

Theory of operation: both sides must agree, although each of them may give up at any moment
(deadline, cancellation, exit).  If sendto(2) succeeds, the client finds ACCEPTED in its queue.
Then the client has to send a CLC message (a Proposal or a Decline), or to end the TCP connection.
To give up, the client removes the name, shuts the socket down for receiving, and then reads its
queue.  The kernel decides under one lock whether it queues or refuses the datagram, so there is no
third outcome.  A killed client has no socket, and its TCP connection ends.  If sendto(2) has
succeeded and no CLC message arrives in time, the server resets the TCP connection, as it does
whenever a message of a handshake is missing (RFC 7609, C.5).

If sendto(2) fails for any other reason, such as a full queue, the client has received nothing
either, and the server treats the connection as plain TCP.

The client may choose a local port that another process uses for a connection to the same address.
Then both connections have the same four-tuple, and the announced one cannot be made while the other
one exists.  If the server has answered for the other connection, the client sends NOT_MINE to the
server before it does anything else.

ACCEPTED contains the version of the server's software RNIC.  If the client's software RNIC has
another version, the client sends SMC Decline, so both sides know why the connection is plain TCP.

An address has a meaning only within its network, so all of this happens within one network
namespace.  A client announces a connection to a listener of another network namespace, such as
that of another container, only if the *path* was proven
(`trio_smc.rendezvous.discovery.proofs`).

All data from a Unix socket is untrusted input.  In a private directory, the kernel lets only this
user make a name or send to one.  In a group's directory, a datagram counts only if its sender is a
user whose listener was found, and a name counts only if it belongs to the member that owns the
directory.  No file or socket of another user can block this process, and the handshakes in progress
limit the state per client.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import trio

from trio_smc._base.reasons import FallbackReason
from trio_smc._base.timers import Timers
from trio_smc._base.weak import WeakSet
from trio_smc.host.addresses import plain_address
from trio_smc.host.platform import is_supported
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
        """The parameters are those of `Announcer`."""
        super().__init__(private, timers, spinner, ended)
        self._answerer = Answerer(self.names, timers, spinner, self._is_named)
        self._publications: WeakSet[Publication] = WeakSet()

    def open(self) -> None:
        """Open the descriptors that a stack keeps, if the private directory exists.

        Otherwise they are opened when they are needed.
        """
        with contextlib.suppress(OSError, DirectoryUnusable):
            PrivateDirectory.open(self._private, create=False).close()
            self.names.open()

    def close(self) -> None:
        """Withdraw open announcements, and close the descriptors of announcing and answering.

        After this, the stack neither announces connections nor answers announcements.  Idempotent.
        """
        for announcement in tuple(self._open):
            announcement.cancel()
        self.names.remove_marks()
        self.names.close()
        self.closer.join()

    def abandon(self) -> None:
        """Close all descriptors in a forked child.  They belong to the parent process."""
        super().abandon()
        for publication in self._publications:
            publication.abandon()

    def unusable(self) -> FallbackReason | None:
        """Make the private directory if it is missing.  Returns why it cannot be used, or None."""
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

        sockname: the address and port of the listening socket.
        nursery: runs the background task, which never raises an exception.
        dual_stack: True for an IPv6 socket without IPV6_V6ONLY.

        Never fails: if nothing can be published, `Publication.unavailable` is the reason.
        """
        address = plain_address(sockname[0]), sockname[1]
        if not is_supported():
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
        """Call `Publication.on_waiting` for each listener of this stack that may answer."""
        for publication in tuple(self._publications):
            if publication.path in announcement.found.names:
                publication.on_waiting()

    def publish_nothing(self, sockname: tuple[str, int], reason: FallbackReason) -> Publication:
        """Return the publication of a listener that clients cannot find.

        reason: becomes `Publication.unavailable`.
        """
        address = plain_address(sockname[0]), sockname[1]
        return Publication(address, None, reason, self._answerer)
