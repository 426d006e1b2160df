"""Older releases on the same host: recognise their listeners, and refuse their clients.

Theory of operation
-------------------
Releases before 0.3.0 use another protocol for same-host discovery.  Their listener is a
SOCK_SEQPACKET socket.  A client connects to this socket, and sends one ANNOUNCE for each TCP
connection.  The two protocols share the directories and the names of sockets
(`discovery.directory`), and the layout of the first eight bytes of a message
(`discovery.messages`).  The type of the socket keeps the two protocols apart.  The kernel refuses
to connect two sockets of different types, and the process that owns the listener does not notice
the attempt (unix_find_bsd, linux/net/unix/af_unix.c).

*A listener of an older release.*  To find out if a listener is alive, a client connects a datagram
socket to its name.  The kernel compares the types only if a process still has the listener.  So
EPROTOTYPE means that a process of an older release listens (`connects`).  This check needs no
further system call, and reads no data of another process.

*A client of an older release.*  Such a client skips datagram sockets, so it finds no listener of
this release.  Therefore each listener also has a *signpost*, a SOCK_SEQPACKET socket beside its
own.  The signpost answers an ANNOUNCE with REFUSED and the reason LOCAL_VERSION_MISMATCH.  The
answer has eight bytes and no four-tuple, so it refuses every TCP connection that the client has
announced on this Unix connection.  Older clients impose three rules:

- The signpost sends its answer after the ANNOUNCE.  A client ignores an earlier answer.
- The client closes the Unix connection.  If the signpost closed it, an ANNOUNCE that is being sent
  at the same moment would fail, and the client would report that the peer is not capable of SMC-R.
- The signpost does not end the wait for other listeners.  If a listener of the client's release
  shares the port, that listener may still accept the TCP connection.

A client of this release recognises a signpost by its name and ignores it, at no cost.  The server
makes one signpost when it publishes a listener, and answers each client of an older release once.

The reason on the *server's* side is always that the peer is not capable of SMC-R.  An older server
does not read the names by which clients of this release announce connections, and a server of this
release accepts the TCP connection without the ANNOUNCE.

Security: older releases do not use a directory that a group shares.  So such a directory contains
no signpost, and no name in it counts as an older listener.  In a private directory, a process of
the same user in another container may connect to a signpost.  The signpost decodes nothing, accepts
no descriptors, and serves a limited number of clients for a limited time.
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
from trio_smc._base.waits import wait_readable
from trio_smc.host.descriptors import Closer, receive_bytes
from trio_smc.host.private_directory import PrivateDirectory
from trio_smc.host.real_time import now, sleep
from trio_smc.host.tcp import end_waits
from trio_smc.rendezvous.discovery import messages
from trio_smc.rendezvous.discovery.waiting import wait_readable_until

__all__ = [
    "CLIENT_TIMEOUT",
    "MAX_CLIENTS",
    "MAX_PACKETS",
    "Signpost",
    "connects",
    "is_signpost",
    "signpost_name",
]

_SUFFIX: Final = ".older"
_BACKLOG: Final = 64  # connections that may wait for `accept`; chosen
MAX_CLIENTS: Final = 16
"""Clients that a signpost serves at a time, each with a descriptor.  A further client gets its
answer at once, and the signpost closes the connection.  Chosen."""
CLIENT_TIMEOUT: Final = 2.0
"""Seconds for which a client may keep its connection.  Chosen: a client of an older release sends
its ANNOUNCE as soon as it is connected, and closes the connection when the answer arrives."""
MAX_PACKETS: Final = 64
"""Packets that a signpost receives from one client: the first ANNOUNCE, and those that the client
sends before the answer arrives.  Chosen."""
_CAPACITY_PAUSE: Final = 0.5
"""Seconds without `accept` if the process has too many open files or no memory.  Chosen."""
_ANSWER: Final = messages.refused(FallbackReason.LOCAL_VERSION_MISMATCH)


def connects(probe: socket.socket, path: str) -> bool:
    """Connect a datagram socket to a listener.  False if the listener is of an older release.

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
    """True if ``name`` is the name of a signpost."""
    return name.endswith(_SUFFIX)


@ki_protected
class Signpost:
    """The socket that refuses clients of older releases, beside the socket of one listener.

    Args:
      directory: the directory of the listener's address.  The caller closes it, after `close`.
      listener: the name of the listener's socket.

    Raises OSError: the socket cannot be made.
    """

    def __init__(self, directory: PrivateDirectory, listener: str) -> None:
        self._directory = directory
        self._name = signpost_name(listener)
        self._clients: set[socket.socket] = set()
        self._closer = Closer("signpost")
        self._is_running = self._is_closed = self._is_abandoned = False
        self._socket = directory.listen(self._name, _BACKLOG)

    async def run(self, timers: Timers | None) -> None:
        """Answer clients until `close` or cancellation.  Never raises OSError.

        timers: the timers of the stack.
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
        """Accept a client.  None if there is none, or if the signpost was closed."""
        try:
            if self._closer.is_full:
                await sleep(timers, _CAPACITY_PAUSE)
                return None
            await wait_readable(self._socket)
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
        is_excess = len(self._clients) > MAX_CLIENTS
        deadline = now(timers) + CLIENT_TIMEOUT
        try:
            with contextlib.suppress(OSError, ProtocolError, trio.ClosedResourceError):
                if is_excess:
                    client.send(_ANSWER)
                    return
                for number in range(MAX_PACKETS):
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
        """Close the descriptors in a forked child.  The signpost belongs to the parent process."""
        self._is_closed = self._is_abandoned = True
        for each in (self._socket, *self._clients):
            each.close()
