"""The sockets of announcements: each serves one announcement after the other.

Theory of operation
-------------------
An announcement is a datagram socket with a name (`trio_smc.rendezvous.discovery.names`).  To make a
socket, bind it, and remove both again is the most expensive part of discovery, so a client keeps a
few sockets.  Between two announcements a socket has only an *idle name*, in a directory where no
server looks for it.  The name of the next announcement is another link to it (link(2)).

A late datagram about an earlier announcement must not count as an answer about the present one.  So
an answer names its connection, and a socket has each name only once.  A socket whose announcement
was withdrawn without ACCEPTED was shut down (shutdown(2)), and is not used again.
"""

from __future__ import annotations

import socket
from typing import Final

from trio_smc.host.descriptors import Closer, datagram_probe
from trio_smc.rendezvous.discovery.names import Names

__all__ = ["Mailbox", "Mailboxes"]

_MOST_IDLE: Final = 8
"""Sockets that are kept, each of them a descriptor.  Chosen."""
_MOST_NAMES: Final = 256
"""Names that one socket may have, one after the other; all of them are remembered.  Chosen."""


class Mailbox:
    """A datagram socket that receives the answer to an announcement.

    Attributes:
      sock: the socket, for `messages.receive`.
      has_datagram: true if a datagram has arrived.
      required: the client takes SMC-R or nothing, which the mode of the socket shows.
      idle_name: the name between two announcements; empty: none yet.
      names: of its announcements so far.
    """

    __slots__ = ("has_datagram", "idle_name", "names", "required", "sock")

    def __init__(self, sock: socket.socket, name: str, *, required: bool) -> None:
        self.sock: socket.socket = sock
        self.has_datagram = datagram_probe(sock)
        self.required: bool = required
        self.idle_name: str = ""
        self.names: set[str] = {name}


class Mailboxes:
    """The sockets of one client's announcements.

    Args:
      names: where the announcements are made.
      closer: of what other processes may have sent.
    """

    def __init__(self, names: Names, closer: Closer) -> None:
        self._names = names
        self._closer = closer
        self._idle: list[Mailbox] = []

    def open(self, name: str, *, required: bool) -> Mailbox:
        """A socket with this name.  Arguments and errors as for `Names.listen`."""
        while self._idle:
            mailbox = self._idle.pop()
            if (
                mailbox.required is required
                and name not in mailbox.names
                and self._names.link(mailbox.idle_name, name)
            ):
                mailbox.names.add(name)
                return mailbox
            self.discard(mailbox)  # a cleaner has removed the idle name, or the name is taken
        return Mailbox(self._names.listen(name, required=required), name, required=required)

    def release(self, mailbox: Mailbox, name: str) -> None:
        """Remove the name of an announcement that was answered by ACCEPTED; keep the socket."""
        if len(self._idle) < _MOST_IDLE and len(mailbox.names) < _MOST_NAMES:
            if mailbox.idle_name:
                self._names.remove(name)
            else:
                mailbox.idle_name = self._names.make_idle(name)
            if mailbox.idle_name:
                self._idle.append(mailbox)
                return
        self._names.remove(name)
        self.discard(mailbox)

    def discard(self, mailbox: Mailbox) -> None:
        """Close the socket of an announcement whose name was removed."""
        if mailbox.idle_name:
            self._names.remove_idle(mailbox.idle_name)
        self._closer.discard_datagrams(mailbox.sock)

    def close(self) -> None:
        """Close the idle sockets.  Idempotent."""
        while self._idle:
            self.discard(self._idle.pop())

    def abandon(self) -> None:
        """Close the descriptors: this process is a forked child, and they are its parent's."""
        for mailbox in self._idle:
            mailbox.sock.close()
        self._idle.clear()

    def __del__(self) -> None:
        # A client that was not closed must not leave open sockets.
        self.abandon()
