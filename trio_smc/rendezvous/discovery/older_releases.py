"""Processes of older releases on the same host: recognise a listener, and answer a client.

Theory of operation
-------------------
Releases before 0.2.0 have another same-host discovery.  Their listener is a SOCK_SEQPACKET socket;
a client connects to it and sends an ANNOUNCE for each TCP connection.  Directories, names and the
first eight bytes of messages are those of `discovery.directory` and `discovery.messages`.  The
kernel keeps the two kinds apart by the type of a socket: a connection of the wrong type fails, and
the process that has the socket does not notice (unix_find_bsd, linux/net/unix/af_unix.c).

*A listener of an older release.*  A client connects a datagram socket to each name, to find out if
its process is alive.  The kernel compares the types only if the process is alive, so EPROTOTYPE
means an older listener (`connects`).  This takes no further system call, and nothing is
read that another process has written.

*A client of an older release.*  It connects to each name and passes over datagram sockets, so it
finds no listener here.  Therefore a listener also has a *signpost*, a SOCK_SEQPACKET socket beside
its own.  The signpost answers an ANNOUNCE with REFUSED and LOCAL_VERSION_MISMATCH: eight bytes
without a four-tuple, which concern all that the client has announced on this Unix connection.
Three details are required by older clients:

- The answer follows the ANNOUNCE.  A client ignores an answer that comes before it.
- The client closes the Unix connection.  If the signpost closed it, an ANNOUNCE that is being sent
  at the same moment would fail, and the client would report that the peer is not capable of SMC-R.
- The client waits for each listener, so a listener of its own release that shares the port may
  still accept the TCP connection.

Clients of this release know a signpost by its name and ignore it.  It costs them nothing, and the
server pays for it once when it publishes a listener, and once for each client of an older release.

An older server does not look at names of announcements, and this server does not receive an
ANNOUNCE before it accepts.  So the *server's* reason is that the peer is not capable of SMC-R.

Security: older releases use no directory that a group shares, so there is neither a signpost in
one, nor counts a name there as an older listener.  In a private directory a process of the same
user in another container may connect to a signpost.  The signpost decodes nothing, serves a limited
number of clients for a limited time, and takes no descriptors.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from typing import Final

import trio

from trio_smc._base.errors import ProtocolError
from trio_smc._base.interrupts import ki_protected
from trio_smc._base.reasons import FallbackReason
from trio_smc._base.resources import is_lack
from trio_smc._base.timers import Timers
from trio_smc.host.descriptors import Closer, receive_bytes
from trio_smc.host.private_directory import PrivateDirectory
from trio_smc.host.real_time import now, sleep
from trio_smc.host.tcp import end_waits
from trio_smc.rendezvous.discovery import messages
from trio_smc.rendezvous.discovery.waiting import wait_readable_until

__all__ = ["Signpost", "connects", "is_signpost", "signpost_name"]

_SUFFIX: Final = ".older"
_BACKLOG: Final = 64
_MAX_CLIENTS: Final = 16
"""Clients that are waited for, each of them a descriptor.  A further one is answered at once, and
its connection closed.  Chosen."""
_CLIENT_TIMEOUT: Final = 2.0
"""Seconds for which a client may keep its connection.  Chosen: a client of an older release sends
its ANNOUNCE as soon as it is connected, and closes as soon as it is answered."""
_MAX_PACKETS: Final = 64
"""Packets that are received from one client, the first one and those for which it was too late to
wait for the answer.  Chosen."""
_CAPACITY_PAUSE: Final = 0.5
"""Seconds without `accept` if the process has too many open files or no memory.  Chosen."""
_ANSWER: Final = messages.refused(FallbackReason.LOCAL_VERSION_MISMATCH)


def connects(probe: socket.socket, path: str) -> bool:
    """Connect a datagram socket to a listener; False if it is of an older release.

    Raises OSError: as connect(2); ECONNREFUSED if no process has the listener.
    """
    try:
        probe.connect(path)
    except OSError as error:
        if error.errno != errno.EPROTOTYPE:
            raise
        return False
    return True


def signpost_name(listener: str) -> str:
    """The name of the signpost beside the socket of a listener."""
    return listener + _SUFFIX


def is_signpost(name: str) -> bool:
    """True for the name of a signpost."""
    return name.endswith(_SUFFIX)


@ki_protected
class Signpost:
    """The socket that refuses clients of older releases, beside the socket of one listener.

    Args:
      directory: of the listener's address; it stays open, and belongs to the caller.
      listener: the name of the listener's socket.

    Raises OSError: it cannot be made.
    """

    def __init__(self, directory: PrivateDirectory, listener: str) -> None:
        self._directory = directory
        self._name = signpost_name(listener)
        self._clients: set[socket.socket] = set()
        self._closer = Closer("signpost")
        self._is_running = self._is_closed = self._is_abandoned = False
        self._socket = directory.listen(self._name, _BACKLOG)

    async def run(self, timers: Timers | None) -> None:
        """Answer clients until `close` or cancelled; never raises OSError.

        timers: of the stack.
        """
        self._is_running = True
        try:
            async with trio.open_nursery() as nursery:
                while not self._is_closed:
                    client = await self._accept(timers)
                    if self._is_abandoned:
                        await trio.sleep_forever()
                    if client is not None:
                        self._clients.add(client)
                        nursery.start_soon(self._serve, client, timers)
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
        finally:
            self._is_running = False
            self._closer.join()

    async def _accept(self, timers: Timers | None) -> socket.socket | None:
        """The next client; None: there is none, or the signpost was closed."""
        try:
            if self._closer.is_full:
                await sleep(timers, _CAPACITY_PAUSE)
                return None
            await trio.lowlevel.wait_readable(self._socket)
            client, _ = self._socket.accept()
        except (BlockingIOError, trio.ClosedResourceError):
            return None
        except OSError as error:
            if is_lack(error):
                await sleep(timers, _CAPACITY_PAUSE)
            return None
        client.setblocking(False)
        return client

    async def _serve(self, client: socket.socket, timers: Timers | None) -> None:
        """Answer the first packet of a client, and wait until the client closes."""
        is_excess = len(self._clients) > _MAX_CLIENTS
        deadline = now(timers) + _CLIENT_TIMEOUT
        try:
            with contextlib.suppress(OSError, ProtocolError, trio.ClosedResourceError):
                if is_excess:
                    client.send(_ANSWER)
                    return
                for number in range(_MAX_PACKETS):
                    if not await wait_readable_until(client, timers, deadline):
                        return
                    if not receive_bytes(client, messages.MAX_SIZE):
                        return
                    if not number:
                        client.send(_ANSWER)
        finally:
            self._clients.discard(client)
            self._closer.discard(client)

    def close(self) -> None:
        """Remove the name, and close the socket.  Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._directory.remove(self._name)
        if self._is_running:
            end_waits(self._socket)
        self._closer.discard_listener(self._socket)
        self._closer.join()

    def abandon(self) -> None:
        """Close the descriptors: this process is a forked child, and they are its parent's."""
        self._is_closed = self._is_abandoned = True
        for each in (self._socket, *self._clients):
            each.close()
