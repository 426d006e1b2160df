"""SMC-R for httpcore, the transport of httpx.

    pool = httpcore.AsyncConnectionPool(network_backend=SmcBackend())

httpcore itself handles HTTP/1, HTTP/2 and TLS.  For httpx see `trio_smc.adapters.httpx`.
"""

from __future__ import annotations

import math
import ssl
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpcore
import trio

import trio_smc

if TYPE_CHECKING:
    from httpcore import SOCKET_OPTION

__all__ = ["SmcBackend", "SmcNetworkStream"]


@contextmanager
def _httpcore_errors(
    seconds: float | None, timeout_error: type[Exception], failure: type[Exception]
) -> Iterator[None]:
    """Limit the time of a block, and raise the exceptions of httpcore instead of Trio's."""
    try:
        with trio.fail_after(math.inf if seconds is None else seconds):
            yield
    except trio.TooSlowError as error:
        raise timeout_error(str(error)) from error
    except (trio.BrokenResourceError, trio.ClosedResourceError, OSError) as error:
        raise failure(str(error)) from error


class SmcNetworkStream(httpcore.AsyncNetworkStream):
    """A connection with the interface of httpcore: with timeouts, and TLS on request.

    Attributes:
      transport: the `SmcStream`, with its `mode` and `fallback`.
    """

    def __init__(
        self,
        transport: trio_smc.SmcStream,
        tls: trio.SSLStream[Any] | None = None,
    ) -> None:
        self.transport = transport
        self._tls = tls
        self._stream: trio.abc.Stream = transport if tls is None else tls

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        """Receive at most ``max_bytes``; b"" at the end.  ``timeout`` in seconds.

        Raises:
          httpcore.ReadTimeout: no data arrived in time.
          httpcore.ReadError: the connection failed.
        """
        with _httpcore_errors(timeout, httpcore.ReadTimeout, httpcore.ReadError):
            return bytes(await self._stream.receive_some(max_bytes))

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        """Send all of ``buffer``.  ``timeout`` in seconds.

        Raises:
          httpcore.WriteTimeout: not all data was sent in time.
          httpcore.WriteError: the connection failed.
        """
        with _httpcore_errors(timeout, httpcore.WriteTimeout, httpcore.WriteError):
            await self._stream.send_all(buffer)

    async def aclose(self) -> None:
        """Close the connection."""
        await self._stream.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> SmcNetworkStream:
        """Start TLS on this connection; a failure closes it.  ``timeout`` in seconds.

        Raises:
          httpcore.ConnectTimeout: the handshake did not finish in time.
          httpcore.ConnectError: the handshake failed.
        """
        tls = trio.SSLStream(
            self._stream, ssl_context, server_hostname=server_hostname, https_compatible=True
        )
        try:
            with _httpcore_errors(timeout, httpcore.ConnectTimeout, httpcore.ConnectError):
                await tls.do_handshake()
        except BaseException:
            await trio.aclose_forcefully(self._stream)
            raise
        return SmcNetworkStream(self.transport, tls)

    def get_extra_info(self, info: str) -> Any:
        """The same items as the streams of httpcore, and ``"smc_stream"``, the `SmcStream`.

        The ``"ssl_object"`` is Trio's SSLStream, which has the same methods to query TLS.
        """
        match info:
            case "ssl_object":
                return self._tls
            case "client_addr":
                return self.transport.socket.getsockname()
            case "server_addr":
                return self.transport.socket.getpeername()
            case "socket":
                return self.transport.socket
            case "is_readable":
                return self.transport.is_readable()
            case "smc_stream":
                return self.transport
        return None


class SmcBackend(httpcore.AsyncNetworkBackend):
    """A backend that connects with `trio_smc.open_stream`.

    Args:
      config: settings of the connections; None: those of the stack.
    """

    def __init__(self, config: trio_smc.Config | None = None) -> None:
        self._config = config

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109
        local_address: str | None = None,
        socket_options: Iterable[SOCKET_OPTION] | None = None,
    ) -> SmcNetworkStream:
        """Connect.  ``timeout`` in seconds; ``socket_options`` as for `socket.setsockopt`.

        Raises:
          httpcore.ConnectTimeout: no connection was established in time.
          httpcore.ConnectError: the connection failed.
        """
        with _httpcore_errors(timeout, httpcore.ConnectTimeout, httpcore.ConnectError):
            stream = await trio_smc.open_stream(
                host, port, local_address=local_address, config=self._config
            )
            try:
                for option in socket_options or ():
                    stream.setsockopt(*option)
            except BaseException:
                await trio.aclose_forcefully(stream)
                raise
        return SmcNetworkStream(stream)

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ASYNC109
        socket_options: Iterable[SOCKET_OPTION] | None = None,
    ) -> SmcNetworkStream:
        """Raise httpcore.UnsupportedProtocol, because SMC-R needs a TCP connection."""
        raise httpcore.UnsupportedProtocol("SMC-R needs a TCP connection, not a Unix socket")

    async def sleep(self, seconds: float) -> None:
        """Sleep."""
        await trio.sleep(seconds)
