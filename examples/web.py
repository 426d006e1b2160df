"""A website over SMC-R: `python -m examples.web`.

hypercorn serves a quart-trio application, by HTTP/1 and HTTP/2 over TLS; the client is httpx. Only
the listeners below hypercorn and the transport below httpx come from trio_smc.
"""

from __future__ import annotations

import signal
import ssl
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import hypercorn.config
import quart
import quart_trio
import trio
from hypercorn.trio.lifespan import Lifespan
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState, LifespanState
from hypercorn.utils import wrap_app

import trio_smc
from examples import both_ends
from trio_smc.adapters.httpx import SmcTransport

app = quart_trio.QuartTrio(__name__)


@app.get("/hello/<name>")
async def hello(name: str) -> str:
    """Greet."""
    return f"hello {name} over HTTP/{quart.request.http_version}"


@app.post("/length")
async def length() -> dict[str, int]:
    """Return the length of the request's body."""
    return {"length": len(await quart.request.get_data())}


async def serve_app(
    application: Any,
    listeners: Sequence[trio.abc.Listener[Any]],
    shutdown_trigger: Callable[[], Awaitable[object]],
    config: hypercorn.config.Config | None = None,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve an ASGI application on any listeners; `hypercorn.trio.serve` accepts only TCP sockets.

    Starts the application, serves until `shutdown_trigger` returns, gives requests in progress
    `config.graceful_timeout` seconds, and shuts the application down. `config` sets time-outs,
    limits and logging; its settings for binding and TLS are not used.
    """
    config = config or hypercorn.config.Config()
    wrapped = wrap_app(application, config.wsgi_max_body_size, "asgi")
    state = LifespanState({})
    lifespan = Lifespan(wrapped, config, state)
    context = WorkerContext(None)
    handler = partial(TCPServer, wrapped, config, context, ConnectionState(state))
    async with trio.open_nursery() as lifespan_nursery:
        await lifespan_nursery.start(lifespan.handle_lifespan)
        await lifespan.wait_for_startup()
        async with trio.open_nursery() as connections:
            async with trio.open_nursery() as accepting:
                await accepting.start(
                    partial(trio.serve_listeners, handler_nursery=connections),
                    handler,
                    list(listeners),
                )
                task_status.started()
                await shutdown_trigger()
                accepting.cancel_scope.cancel()
            await context.terminated.set()
            connections.cancel_scope.deadline = trio.current_time() + config.graceful_timeout
        await lifespan.wait_for_shutdown()
        lifespan_nursery.cancel_scope.cancel()


async def interrupted() -> None:
    """Return when the process is asked to stop."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            return


def over_tls(
    listeners: Sequence[trio_smc.SmcListener], context: ssl.SSLContext
) -> list[trio.SSLListener[trio_smc.SmcStream]]:
    """Return the listeners with TLS on top that offers HTTP/2 and HTTP/1."""
    context.set_alpn_protocols(["h2", "http/1.1"])
    return [trio.SSLListener(listener, context, https_compatible=True) for listener in listeners]


async def serve(port: int, directory: Path) -> None:
    """Serve until interrupted."""
    context = both_ends.server_context(directory)
    async with trio_smc.open_stack() as stack:
        listeners = await trio_smc.open_listeners(port, host=both_ends.HOST)
        both_ends.print_address(listeners[0], directory)
        await serve_app(app, over_tls(listeners, context), interrupted)
        print("server: connections over smc-r:", stack.statistics().connections)


async def connect(port: int, ca: Path) -> None:
    """Make requests by both versions of HTTP, several at once."""
    site = f"https://{both_ends.HOST}:{port}"
    for http2 in (False, True):
        transport = SmcTransport(ssl_context=both_ends.client_context(ca), http2=http2)
        async with httpx.AsyncClient(transport=transport) as client, trio.open_nursery() as nursery:
            for name in ("this", "that"):
                nursery.start_soon(get, client, f"{site}/hello/{name}")
            answer = await client.post(f"{site}/length", content=bytes(1_000_000))
            print(answer.json())


async def get(client: httpx.AsyncClient, url: str) -> None:
    """Make a request; print the answer and how it travelled."""
    answer = await client.get(url)
    stream = answer.extensions["network_stream"].get_extra_info("smc_stream")
    print(answer.http_version, answer.text, "-", both_ends.describe("client", stream))


if __name__ == "__main__":
    both_ends.main("web", serve, connect)
