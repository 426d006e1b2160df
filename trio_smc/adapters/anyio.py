"""SMC-R for AnyIO programs, on the Trio backend.

`open_stream` and `open_listener` replace `anyio.connect_tcp` and `anyio.create_tcp_listener`.  They
return an `anyio.abc.ByteStream` and an `anyio.abc.Listener`, so that TLS (`anyio.streams.tls`),
buffered and text streams work on top.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from typing import Any, Final

import anyio
import trio
from anyio.abc import ByteStream, Listener, SocketAttribute, TaskGroup
from anyio.streams.stapled import MultiListener

import trio_smc
from trio_smc._base.resources import LACK_ERRORS

__all__ = ["SmcByteListener", "SmcByteStream", "open_listener", "open_stream"]

# After these errors `accept` is retried, because descriptors or memory may become free.
_CAPACITY_ERRORS: Final = LACK_ERRORS - {errno.EAGAIN}
_CAPACITY_PAUSE: Final = 0.1  # seconds, as in `trio.serve_listeners`


@contextmanager
def _anyio_errors(action: str) -> Iterator[None]:
    try:
        yield
    except trio.ClosedResourceError as error:
        raise anyio.ClosedResourceError from error
    except trio.BrokenResourceError as error:
        raise anyio.BrokenResourceError from error
    except trio.BusyResourceError as error:
        raise anyio.BusyResourceError(action) from error


class SmcByteStream(ByteStream):
    """An `SmcStream` with the interface of AnyIO.

    The `extra_attributes` are those of `anyio.abc.SocketAttribute` except ``raw_socket``, because
    the socket carries no data while the mode is "smc-r".

    Attributes:
      stream: the wrapped stream, with its `mode` and `fallback`.
    """

    def __init__(self, stream: trio_smc.SmcStream) -> None:
        self.stream = stream

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Receive at least one byte and at most ``max_bytes``.

        Raises:
          anyio.EndOfStream: the peer has ended the stream.
          anyio.BrokenResourceError: the connection failed.
          anyio.ClosedResourceError: this side closed the stream.
          anyio.BusyResourceError: another task is receiving.
          ValueError: ``max_bytes`` is not positive.
        """
        with _anyio_errors("reading from"):
            data = await self.stream.receive_some(max_bytes)
        if not data:
            raise anyio.EndOfStream
        return bytes(data)

    async def send(self, item: bytes) -> None:
        """Send all of ``item``.

        Raises:
          anyio.BrokenResourceError: the connection failed, or the peer has closed it.
          anyio.ClosedResourceError: this side closed or shut down the stream.
          anyio.BusyResourceError: another task is sending.
        """
        with _anyio_errors("writing to"):
            await self.stream.send_all(item)

    async def send_eof(self) -> None:
        """End this side of the stream; receiving stays possible.  Idempotent."""
        with _anyio_errors("writing to"):
            await self.stream.send_eof()

    async def aclose(self) -> None:
        """Close, as `SmcStream.aclose` does; also if the caller is cancelled."""
        await self.stream.aclose()

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        """Addresses and ports of the TCP connection."""
        return {
            SocketAttribute.family: lambda: self.stream.socket.family,
            SocketAttribute.local_address: lambda: self.stream.socket.getsockname()[:2],
            SocketAttribute.local_port: lambda: self.stream.socket.getsockname()[1],
            SocketAttribute.remote_address: lambda: self.stream.socket.getpeername()[:2],
            SocketAttribute.remote_port: lambda: self.stream.socket.getpeername()[1],
        }


class SmcByteListener(Listener[SmcByteStream]):
    """An `SmcListener` with the interface of AnyIO.

    Attributes:
      listener: the wrapped listener.
    """

    def __init__(self, listener: trio_smc.SmcListener) -> None:
        self.listener = listener

    async def serve(
        self, handler: Callable[[SmcByteStream], Any], task_group: TaskGroup | None = None
    ) -> None:
        """Accept connections until the listener is closed, and start ``handler(stream)`` for each.

        The handler must close its stream, as with every listener of AnyIO.

        Args:
          handler: an async function.
          task_group: runs the handlers; None: a new task group.

        Raises:
          anyio.ClosedResourceError: the listener was closed.
        """
        async with AsyncExitStack() as stack:
            if task_group is None:
                task_group = await stack.enter_async_context(anyio.create_task_group())
            while True:
                try:
                    with _anyio_errors("accepting connections from"):
                        stream = await self.listener.accept()
                except OSError as error:
                    if error.errno not in _CAPACITY_ERRORS:
                        raise
                    await anyio.sleep(_CAPACITY_PAUSE)
                else:
                    task_group.start_soon(handler, SmcByteStream(stream))

    async def aclose(self) -> None:
        """Stop accepting; accepted connections continue."""
        await self.listener.aclose()

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        """Address and port of the listening TCP socket."""
        return {
            SocketAttribute.family: lambda: self.listener.socket.family,
            SocketAttribute.local_address: lambda: self.listener.socket.getsockname()[:2],
            SocketAttribute.local_port: lambda: self.listener.socket.getsockname()[1],
        }


async def open_stream(
    host: str,
    port: int,
    *,
    local_address: str | None = None,
    happy_eyeballs_delay: float = 0.25,
    config: trio_smc.Config | None = None,
) -> SmcByteStream:
    """Connect, as `trio_smc.open_stream` does, with the same arguments and errors."""
    return SmcByteStream(
        await trio_smc.open_stream(
            host,
            port,
            local_address=local_address,
            happy_eyeballs_delay=happy_eyeballs_delay,
            config=config,
        )
    )


async def open_listener(
    port: int,
    *,
    host: str | None = None,
    backlog: int | None = None,
    config: trio_smc.Config | None = None,
) -> MultiListener[SmcByteStream]:
    """Listen, as `trio_smc.open_listeners` does, with the same arguments and errors.

    Returns one listener for all addresses; ``.listeners`` has one listener for each address.
    """
    listeners = await trio_smc.open_listeners(port, host=host, backlog=backlog, config=config)
    return MultiListener([SmcByteListener(listener) for listener in listeners])
