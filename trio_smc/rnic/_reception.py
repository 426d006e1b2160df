"""The listening end of a software RNIC: who dials it, until they have said Hello."""

from __future__ import annotations

import select
import socket
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from trio_smc._base.errors import ProtocolError

from ._fabric import Directory, Hello, close_all, decode_untrusted, receive, same_user
from ._softport import Port
from .verbs import QpState

if TYPE_CHECKING:
    from ._softqp import SoftQueuePair

__all__ = ["Reception", "socket_name"]

_MOST_STRANGERS: Final = 64
_EDGES: Final = select.EPOLLIN | select.EPOLLET


def socket_name(gid: bytes) -> str:
    """The name under which the RNIC of this GID listens."""
    return f"rnic-{gid.hex()}"


class Listening(Port, Protocol):
    """The port, for who comes in by its name."""

    def queue_pair(self, qp_num: int) -> SoftQueuePair | None:
        """The queue pair of that number."""


class Reception:
    """Accepts, reads one Hello of each and hands it to the queue pair it is for.

    Who says nothing is kept until `_MOST_STRANGERS` others have come; who says anything else, or
    belongs to another user, is shown the door.
    """

    def __init__(self, rnic: Listening, directory: Directory) -> None:
        self._rnic = rnic
        self._directory = directory
        self._name = socket_name(rnic.gid)
        self._strangers: dict[int, socket.socket] = {}
        self._listener = directory.listen(self._name)
        rnic.watch(self._listener.fileno(), _EDGES, self._accept)

    def close(self) -> None:
        """Remove the name, close everything."""
        for fd in tuple(self._strangers):
            self._show_out(fd)
        self._rnic.unwatch(self._listener.fileno())
        self._listener.close()
        self._directory.remove(self._name)

    def abandon(self) -> None:
        """In a forked child: close this process's descriptors and nothing else."""
        for sock in (*self._strangers.values(), self._listener):
            sock.close()

    def _accept(self, _events: int) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # nobody left, or out of descriptors: the next who dials tries again
            # A port that is down hears nobody.
            if not self._rnic.port_active or not same_user(sock):
                sock.close()
                continue
            sock.setblocking(False)
            if len(self._strangers) >= _MOST_STRANGERS:
                self._show_out(next(iter(self._strangers)))
            fd = sock.fileno()
            self._strangers[fd] = sock
            self._rnic.watch(fd, _EDGES, partial(self._greet, fd))
            self._greet(fd, 0)

    def _show_out(self, fd: int) -> None:
        self._rnic.unwatch(fd)
        self._strangers.pop(fd).close()

    def _greet(self, fd: int, _events: int) -> None:
        sock = self._strangers.get(fd)
        packet = None if sock is None else receive(sock)
        if sock is None or packet is None:
            return
        data, fds = packet
        try:
            hello = decode_untrusted(data, len(fds))
            if not isinstance(hello, Hello):
                raise ProtocolError("a software RNIC that does not say Hello")
            qp = self._rnic.queue_pair(hello.peer_qp_num)
            if qp is None or qp.state is QpState.ERR:
                raise ProtocolError("no such queue pair")
        except ProtocolError:
            close_all(fds)
            self._show_out(fd)
            return
        self._rnic.unwatch(fd)
        del self._strangers[fd]
        qp.offer(hello, sock, fds)
