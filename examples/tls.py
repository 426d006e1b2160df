"""TLS over SMC-R, by Trio's own SSLStream and SSLListener: `python -m examples.tls`."""

from __future__ import annotations

from pathlib import Path

import trio

import trio_smc
from examples import both_ends

SmcTls = trio.SSLStream[trio_smc.SmcStream]


async def shout(stream: SmcTls) -> None:
    """Answer one client in capital letters."""
    print(both_ends.describe("server", stream.transport_stream))
    try:
        async for data in stream:
            await stream.send_all(data.upper())
    except trio.BrokenResourceError as error:  # the client has reset, or does not speak TLS
        print("server: a client is gone:", error.__cause__ or error)


async def serve(port: int, directory: Path) -> None:
    """Serve until interrupted."""
    context = both_ends.server_context(directory)
    listeners = await trio_smc.open_listeners(port, host=both_ends.HOST)
    both_ends.print_address(listeners[0], directory)
    await trio.serve_listeners(
        shout, [trio.SSLListener(listener, context) for listener in listeners]
    )


async def connect(port: int, ca: Path) -> None:
    """Send a line to the server and print the answer."""
    transport = await trio_smc.open_stream(both_ends.HOST, port)
    context = both_ends.client_context(ca)
    async with trio.SSLStream(transport, context, server_hostname=both_ends.HOST) as stream:
        await stream.send_all(b"hello over tls")
        answer = await stream.receive_some()
        print(answer.decode(), "-", tls_version(stream))
        print(both_ends.describe("client", transport))


def tls_version(stream: SmcTls) -> str:
    """Return the version of TLS that was agreed on."""
    # Trio passes attributes of ssl.SSLObject through.
    version = getattr(stream, "version")  # noqa: B009
    return str(version())


if __name__ == "__main__":
    both_ends.main("tls", serve, connect)
