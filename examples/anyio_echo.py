"""A program written against AnyIO, over SMC-R: `python -m examples.anyio_echo`.

Lines of text over TLS, all of it AnyIO's own: only the stream and the listener underneath come from
`trio_smc.adapters.anyio`.
"""

from __future__ import annotations

import ssl
from pathlib import Path

import anyio
from anyio import aclose_forcefully
from anyio.abc import AnyByteStream
from anyio.streams.buffered import BufferedByteReceiveStream
from anyio.streams.tls import TLSListener, TLSStream

from examples import both_ends
from trio_smc import SmcStream
from trio_smc.adapters import anyio as smc_anyio


async def shout(stream: TLSStream) -> None:
    """Answer every line of one client in capital letters."""
    print(both_ends.describe("server", transport_of(stream)))
    lines = BufferedByteReceiveStream(stream)
    try:
        async with stream:
            while True:
                line = await lines.receive_until(b"\n", 1024)
                await stream.send(line.upper() + b"\n")
    except anyio.EndOfStream:
        pass
    except anyio.DelimiterNotFound:
        print("server: a client sent a longer line")
    except (anyio.IncompleteRead, anyio.BrokenResourceError, ssl.SSLError) as error:
        print("server: a client is gone:", repr(error))


class Listener(TLSListener):
    """Prints one line about a client that does not speak TLS; AnyIO's own logs a traceback."""

    @staticmethod
    async def handle_handshake_error(exc: BaseException, stream: AnyByteStream) -> None:
        """End the connection of this client only."""
        await aclose_forcefully(stream)
        if not isinstance(exc, Exception):
            raise exc
        print("server: no TLS handshake:", repr(exc))


def transport_of(stream: TLSStream) -> SmcStream:
    """Return the stream that carries the bytes."""
    assert isinstance(stream.transport_stream, smc_anyio.SmcByteStream)
    return stream.transport_stream.stream


async def serve(port: int, directory: Path) -> None:
    """Serve until interrupted."""
    context = both_ends.server_context(directory)
    listener = await smc_anyio.open_listener(port, host=both_ends.HOST)
    first = listener.listeners[0]
    assert isinstance(first, smc_anyio.SmcByteListener)
    both_ends.print_address(first.listener, directory)
    await Listener(listener, context).serve(shout)


async def connect(port: int, ca: Path) -> None:
    """Send two lines and print what comes back."""
    transport = await smc_anyio.open_stream(both_ends.HOST, port)
    stream = await TLSStream.wrap(
        transport, hostname=both_ends.HOST, ssl_context=both_ends.client_context(ca)
    )
    async with stream:
        lines = BufferedByteReceiveStream(stream)
        await stream.send(b"hello over anyio\nand goodbye\n")
        for _ in range(2):
            print((await lines.receive_until(b"\n", 1024)).decode())
        print(both_ends.describe("client", transport.stream))


if __name__ == "__main__":
    both_ends.main("anyio_echo", serve, connect)
