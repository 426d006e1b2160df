"""A website: hypercorn serves a quart-trio application; the client is httpx."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import hypercorn.config
import hypercorn.trio
import quart
import quart_trio
import trio

from benchmarks.programs.common import (
    HOST,
    READ,
    Server,
    Workload,
    client_context,
    main,
    move,
    request_concurrently,
    request_in_turn,
)

_FILE = 256 * 1024 * 1024
_BEFORE = 8 * 1024 * 1024  # bytes of warm-up, not timed
_PIECE = bytes(READ)

app = quart_trio.QuartTrio(__name__)
app.config["MAX_CONTENT_LENGTH"] = None
app.config["RESPONSE_TIMEOUT"] = None
app.config["BODY_TIMEOUT"] = None


@app.get("/items")
async def items() -> list[dict[str, Any]]:
    """About a KiB of JSON."""
    return [{"number": number, "name": f"item {number}", "price": 9.99} for number in range(20)]


async def _pieces(size: int) -> AsyncIterator[bytes]:
    for _ in range(size // READ):
        yield _PIECE


@app.get("/file/<int:size>")
async def file(size: int) -> quart.Response:
    """Return `size` bytes."""
    return quart.Response(_pieces(size), headers={"content-length": str(size)})


@app.post("/length")
async def length() -> dict[str, int]:
    """Return the length of the body."""
    got = 0
    async for data in quart.request.body:
        got += len(data)
    return {"length": got}


async def serve(directory: Path, *, task_status: trio.TaskStatus[dict[str, int]]) -> None:
    """Serve until cancelled."""
    config = hypercorn.config.Config()
    config.bind = config.insecure_bind = [f"{HOST}:0"]
    config.certfile = config.keyfile = str(directory / "server.pem")
    config.errorlog = None
    async with trio.open_nursery() as nursery:
        binds = await nursery.start(partial(hypercorn.trio.serve, app, config))
        task_status.started({bind.split(":")[0]: int(bind.rsplit(":", 1)[1]) for bind in binds})


def _client(server: Server, scheme: str = "http", **settings: Any) -> httpx.AsyncClient:
    url = f"{scheme}://{HOST}:{server.ports[scheme]}"
    return httpx.AsyncClient(base_url=url, timeout=None, trust_env=False, **settings)


async def _get(client: httpx.AsyncClient) -> None:
    response = await client.get("/items")
    response.raise_for_status()
    response.json()


async def json(connections: int, server: Server, seconds: float) -> tuple[float, float]:
    """Requests over `connections` connections at once."""
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    async with _client(server, limits=limits) as client:
        return await request_concurrently(server, seconds, [partial(_get, client)] * connections)


async def http2(server: Server, seconds: float) -> tuple[float, float]:
    """Requests by HTTP/2 with TLS."""
    context = client_context(server.directory)
    async with _client(server, "https", http1=False, http2=True, verify=context) as client:
        return await request_in_turn(server, seconds, partial(_get, client))


async def download(server: Server, _: float) -> tuple[float, float]:
    """A file from the server."""
    async with _client(server) as client:

        async def some(size: int) -> int:
            got = 0
            async with client.stream("GET", f"/file/{size}") as response:
                response.raise_for_status()
                async for data in response.aiter_bytes():
                    got += len(data)
            if got != size:
                raise RuntimeError(f"{got} bytes of {size} arrived")
            return size

        return await move(server, partial(some, _BEFORE), partial(some, _FILE))


async def upload(server: Server, _: float) -> tuple[float, float]:
    """A file to the server."""
    async with _client(server) as client:

        async def some(size: int) -> int:
            headers = {"content-length": str(size)}
            response = await client.post("/length", content=_pieces(size), headers=headers)
            if response.raise_for_status().json()["length"] != size:
                raise RuntimeError(f"not all of {size} bytes arrived")
            return size

        return await move(server, partial(some, _BEFORE), partial(some, _FILE))


WORKLOADS: dict[str, Workload] = {
    "json": partial(json, 1),
    "json-10": partial(json, 10),
    "json-50": partial(json, 50),
    "http2": http2,
    "download": download,
    "upload": upload,
}

if __name__ == "__main__":
    main(serve, WORKLOADS)
