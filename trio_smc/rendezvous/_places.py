"""Which listening processes of this host may be behind a TCP address.

Theory of operation: the directories of `_local_directory` say it.  What they said is kept as long
as they have not changed: looking at their time of change is all that a connection costs then.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from trio_smc._base.reasons import FallbackReason
from trio_smc.rendezvous import _local_directory as directory
from trio_smc.rendezvous._announcement import Channel
from trio_smc.rendezvous._local_connection import is_same_user
from trio_smc.rendezvous._private_directory import open_private
from trio_smc.rendezvous.prefixes import is_same_host

if TYPE_CHECKING:
    from trio_smc.rendezvous._channels import Channels

__all__ = ["AnySocket", "Place", "Places"]

_MAX_ASKED = 64  # listening processes that a client asks
_MOST_PLACES = 1024  # TCP addresses that are remembered
_RETRY_INTERVAL = 0.005  # after a full backlog, seconds
_SO_NETNS_COOKIE = 71  # linux/include/uapi/asm-generic/socket.h; 8 bytes

AnySocket = trio.socket.SocketType | socket.socket


class Place:
    """Who may be behind a TCP address, while the directories are as they were."""

    __slots__ = ("channels", "stamps")

    def __init__(self, channels: list[Channel], stamps: list[directory.Stamp]) -> None:
        self.channels = channels
        self.stamps = stamps

    def holds(self) -> bool:
        """Whether nobody came or went since."""
        for channel in self.channels:
            if not channel.is_open:
                return False
        return directory.unchanged(self.stamps)


class Places:
    """What one stack knows of the TCP addresses that it has connected to.

    Attributes:
      known: by namespace, address and port; each to be asked first whether it still holds.
    """

    def __init__(self, private: Path, owner: Channels) -> None:
        """`private`: the user's private directory (`Config.private_directory`)."""
        self._private = private
        self._owner = owner
        self._listings = directory.Listings()
        self._namespaces: dict[bytes, str] = {}
        self.known: dict[tuple[str, str, int], Place] = {}

    def namespace(self, sock: AnySocket | None) -> str:
        """Where the listeners of a socket's network namespace are, below the private directory."""
        if sock is None:
            return directory.namespace_path()
        try:
            cookie = sock.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8)
        except OSError:
            return directory.namespace_path()  # Linux before 5.14
        known = self._namespaces.get(cookie)
        if known is None:
            known = directory.namespace_path()
            # The thread may have changed its namespace since the socket was made.
            with socket.socket(sock.family, socket.SOCK_DGRAM) as ours:
                if ours.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8) == cookie:
                    self._namespaces[cookie] = known
        return known

    async def look_up(
        self, channels: list[Channel], namespace: str, source: str, destination: tuple[str, int]
    ) -> FallbackReason:
        """Add a channel to everyone who might accept the TCP connection; why there is none."""
        address, port = destination
        try:
            root = open_private(self._private, create=False)
        except FileNotFoundError:
            return FallbackReason.PEER_NOT_CAPABLE
        listeners: list[directory.Listeners] = []
        try:
            stamps = directory.stamps(self._private, root, namespace)
            exact = directory.listener_name(address, port, dual_stack=False)
            for name in (exact, *directory.wildcard_names(address, port)):
                each = directory.Listeners(root, namespace, name, self._listings)
                listeners.append(each)  # one by one: another may not open
                stamps += directory.stamps(self._private, root, f"{namespace}/{name}")
            # Our own wildcard listener says nothing about the same port of another host.
            wildcards = listeners[1:]
            others = any(each.waiting for each in wildcards) and not is_same_host(source, address)
            if others:
                for each in wildcards:
                    each.waiting.clear()
            for each in listeners:
                self._owner.connect(each, channels, _MAX_ASKED)
                while each.waiting and len(channels) < _MAX_ASKED:
                    await trio.sleep(_RETRY_INTERVAL)
                    self._owner.connect(each, channels, _MAX_ASKED)
        finally:
            for each in listeners:
                each.close()
            os.close(root)
        ours = [channel for channel in channels if is_same_user(channel.connection)]
        if not others and ours == channels and stamps and directory.settled(stamps):
            if len(self.known) >= _MOST_PLACES:
                self.known.clear()
            self.known[namespace, address, port] = Place(ours, stamps)
        foreign = [channel for channel in channels if channel not in ours]
        for channel in foreign:
            self._owner.drop(channel)
        channels[:] = ours
        return FallbackReason.OTHER_USER if foreign else FallbackReason.PEER_NOT_CAPABLE
