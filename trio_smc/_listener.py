"""`SmcListener`: accepts TCP connections, runs their handshakes, hands out ready streams.

Handshakes run in child tasks, so that a slow or hostile client holds up nobody; at most
`Config.max_handshakes` at once, after which the TCP backlog has to wait.  Nothing that goes wrong
with one connection reaches the caller of `accept`.
"""

from __future__ import annotations

import errno
import logging
import socket as stdlib_socket
from collections import deque
from typing import TYPE_CHECKING, Final

import trio

from trio_smc._accept import accept_stream

if TYPE_CHECKING:
    from trio_smc._base.config import Config
    from trio_smc._stack import Stack
    from trio_smc._stream import SmcStream

__all__ = ["SmcListener"]

LOGGER = logging.getLogger("trio_smc")

# What `trio.serve_listeners` backs off from.
_CAPACITY_ERRORS: Final = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}
# The connection was gone before it could be accepted (accept(2)).
_CLOSED_ERRORS: Final = {errno.EBADF, errno.ENOTSOCK, errno.EINVAL}
_CAPACITY_PAUSE: Final = 0.1


class SmcListener(trio.abc.Listener["SmcStream"]):
    """A listener of `SmcStream`; made by `open_listeners`.

    Attributes:
      socket: the listening TCP socket.
    """

    def __init__(self, stack: Stack, sock: trio.socket.SocketType, config: Config) -> None:
        self.socket = sock
        self._stack = stack
        self._config = config
        self._ready: deque[SmcStream | OSError] = deque()
        self._arrived = trio.Event()
        self._accepting = False
        self._closed = False
        self._scope = trio.CancelScope()
        self._slots = trio.CapacityLimiter(config.max_handshakes)
        name = sock.getsockname()
        dual_stack = sock.family == stdlib_socket.AF_INET6 and not sock.getsockopt(
            stdlib_socket.IPPROTO_IPV6, stdlib_socket.IPV6_V6ONLY
        )
        self.publication = stack.discovery.publish(
            (name[0], name[1]), stack.nursery, dual_stack=dual_stack
        )
        stack.add_listener(self)
        stack.nursery.start_soon(self._run)

    async def accept(self) -> SmcStream:
        """The next connection whose handshake is done.

        Raises:
          trio.ClosedResourceError: the listener or its stack was closed.
          trio.BusyResourceError: another task is accepting.
          OSError: out of descriptors or memory; `trio.serve_listeners` tries again later.
        """
        if self._accepting:
            raise trio.BusyResourceError("another task is accepting")
        self._accepting = True
        try:
            await trio.lowlevel.checkpoint()
            while not self._ready:
                if self._closed:
                    raise trio.ClosedResourceError("the listener was closed")
                self._arrived = trio.Event()
                await self._arrived.wait()
            if self._closed:
                raise trio.ClosedResourceError("the listener was closed")
            stream = self._ready.popleft()
        finally:
            self._accepting = False
        if isinstance(stream, OSError):
            raise stream
        return stream

    async def aclose(self) -> None:
        """Close; connections that were not accepted yet are ended."""
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """`aclose` without the checkpoint."""
        if self._closed:
            return
        self._closed = True
        self._scope.cancel()
        self.publication.close()
        self.socket.close()
        while self._ready:
            stream = self._ready.popleft()
            if not isinstance(stream, OSError):
                stream.abort()
        self._arrived.set()
        self._stack.remove_listener(self)

    async def _run(self) -> None:
        with self._scope:
            try:
                async with trio.open_nursery() as nursery:
                    while True:
                        await self._accept_one(nursery)
            except* OSError as group:
                LOGGER.error("listener %s: %s", self.socket, group.exceptions[0])
                self._put(OSError(errno.EBADF, "the listening socket failed"))

    async def _accept_one(self, nursery: trio.Nursery) -> None:
        token = object()
        await self._slots.acquire_on_behalf_of(token)
        try:
            sock, _ = await self.socket.accept()
        except OSError as error:
            self._slots.release_on_behalf_of(token)
            if error.errno in _CAPACITY_ERRORS:
                self._put(error)
                await trio.sleep(_CAPACITY_PAUSE)
            elif error.errno in _CLOSED_ERRORS:
                raise
            return
        except BaseException:
            self._slots.release_on_behalf_of(token)
            raise
        nursery.start_soon(self._handshake, sock, token)

    async def _handshake(self, sock: trio.socket.SocketType, token: object) -> None:
        try:
            stream = await accept_stream(self._stack, sock, self._config, self.publication)
        finally:
            self._slots.release_on_behalf_of(token)
        if stream is not None:
            if self._closed:
                stream.abort()
            else:
                self._put(stream)

    def _put(self, stream: SmcStream | OSError) -> None:
        self._ready.append(stream)
        self._arrived.set()


# As for streams: a program that asks for a SocketListener wants its `socket`.
trio.SocketListener.register(SmcListener)
