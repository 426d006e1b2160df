"""SMC-R for httpx.

async with httpx.AsyncClient(transport=SmcTransport()) as client:
    await client.get("http://localhost:8000/")
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import httpcore
import httpx

from trio_smc.adapters.httpcore import SmcBackend

if TYPE_CHECKING:
    import trio_smc

__all__ = ["SmcTransport"]


@contextmanager
def _httpx_errors(request: httpx.Request) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # The exceptions of both libraries have the same names.
        for kind in type(error).__mro__:
            counterpart = getattr(httpx, kind.__name__, None)
            if (
                isinstance(counterpart, type)
                and issubclass(counterpart, httpx.TransportError)
                and kind.__module__.startswith("httpcore")
            ):
                raise counterpart(str(error), request=request) from error
        raise


class _Body(httpx.AsyncByteStream):
    def __init__(self, pieces: httpcore.Response, request: httpx.Request) -> None:
        self._pieces = pieces
        self._request = request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _httpx_errors(self._request):
            async for piece in self._pieces.aiter_stream():
                yield piece

    async def aclose(self) -> None:
        await self._pieces.aclose()


class SmcTransport(httpx.AsyncBaseTransport):
    """Sends requests over pooled SMC-R connections, or over TCP if the server has no SMC-R.

    ``extensions["network_stream"].get_extra_info("smc_stream")`` of a response is its `SmcStream`.

    Args:
      ssl_context: for https; None: `ssl.create_default_context`.
      http1: allow HTTP/1.1.
      http2: allow HTTP/2 (over TLS if the server supports it, or if ``http1`` is False).
      limits: of the pool, as for `httpx.AsyncClient`.
      config: settings of the connections; None: those of the stack.
    """

    def __init__(
        self,
        *,
        ssl_context: ssl.SSLContext | None = None,
        http1: bool = True,
        http2: bool = False,
        limits: httpx.Limits | None = None,
        config: trio_smc.Config | None = None,
    ) -> None:
        limits = limits or httpx.Limits(max_connections=100, max_keepalive_connections=20)
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=ssl_context or ssl.create_default_context(),
            max_connections=limits.max_connections,
            max_keepalive_connections=limits.max_keepalive_connections,
            keepalive_expiry=limits.keepalive_expiry,
            http1=http1,
            http2=http2,
            network_backend=SmcBackend(config),
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request; called by `httpx.AsyncClient`."""
        url = request.url
        with _httpx_errors(request):
            response = await self._pool.handle_async_request(
                httpcore.Request(
                    request.method,
                    httpcore.URL(
                        scheme=url.raw_scheme,
                        host=url.raw_host,
                        port=url.port,
                        target=url.raw_path,
                    ),
                    headers=request.headers.raw,
                    content=request.stream,
                    extensions=request.extensions,
                )
            )
        return httpx.Response(
            response.status,
            headers=response.headers,
            stream=_Body(response, request),
            extensions=response.extensions,
        )

    async def aclose(self) -> None:
        """Close all connections."""
        await self._pool.aclose()
