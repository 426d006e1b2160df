"""An implementation for `smc-conform` to test: an echo service, or a client that echoes.

    python examples/conform_target.py server [PORT [DAYTIME DISCARD]]
    python examples/conform_target.py client HOST PORT [LANES [DISCARD]]

The server has an echo service (RFC 862), and on other ports a daytime service (RFC 867) and a
discard service (RFC 863), on free ports unless they are given. It prints the three ports. The
client keeps LANES connections open: it opens each one, echoes what arrives until the peer ends the
stream, and opens the next. With DISCARD it keeps four open to that port, on which it only reads.

`discovery="assume"`: the suite is no peer that same-host discovery could find. The smallest ring
makes cursors wrap after 16 KiB, and short timers keep the time-out checks short.

With CONFORM_UEID in the environment both ends speak version 2; on one host they then use the
suite's own software RNIC, because version 2 is not for software RNICs otherwise. With CONFORM_RNIC,
such as "rxe0", they use this RoCE port. CONFORM_DIRECTORY is the private directory of software
RNICs, the same as `smc-conform --directory`. With CONFORM_EYE_CATCHER elements have the eye catcher
of RFC 7609, 4.2.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Literal, TypeAlias

import trio

import trio_smc
from smc_conform.routable import RoutableRnic


def rnics() -> tuple[trio_smc.SoftRnic | trio_smc.VerbsRnic, ...] | Literal["auto"]:
    """The RNIC that the environment names."""
    name = os.environ.get("CONFORM_RNIC")
    if name:
        return (trio_smc.VerbsRnic(name),)
    return (RoutableRnic(),) if os.environ.get("CONFORM_UEID") else "auto"


def ueids() -> tuple[str, ...]:
    """The UEID of version 2; none: version 1."""
    name = os.environ.get("CONFORM_UEID")
    return (name,) if name else ()


CONFIG = trio_smc.Config(
    discovery="assume",
    directory=os.environ.get("CONFORM_DIRECTORY"),
    receive_buffer=16 * 1024,
    rnics=rnics(),
    ueids=ueids(),
    rmbe_eye_catcher=bool(os.environ.get("CONFORM_EYE_CATCHER")),
    handshake_timeout=3,
    first_contact_timeout=3,
    llc_timeout=2,
    test_link_interval=2,
    test_link_timeout=2,
    close_timeout=3,
    learn_short=False,  # most checks use their connection for a short time
    control=False,
)


READERS = 4
"""Connections on which the client only reads."""
PIECE = 512
"""Bytes that the discard service reads at a time: much less than a tenth of the ring, so that the
window grows in small steps (RFC 7609, 4.5.1)."""


Service: TypeAlias = Callable[[trio_smc.SmcStream], Awaitable[None]]


async def echo(stream: trio_smc.SmcStream) -> None:
    """Send back what arrives, until the end of the stream."""
    # Many checks end the connection by a reset.
    with contextlib.suppress(trio.BrokenResourceError):
        async for data in stream:
            await stream.send_all(data)


async def daytime(stream: trio_smc.SmcStream) -> None:
    """Send a line and close (RFC 867), so that this side ends the connection first."""
    with contextlib.suppress(trio.BrokenResourceError):
        await stream.send_all(b"Thursday, November 26, 2026 12:00:00-UTC\r\n")


async def discard(stream: trio_smc.SmcStream) -> None:
    """Read and send nothing, until the end of the stream."""
    with contextlib.suppress(trio.BrokenResourceError):
        while await stream.receive_some(PIECE):
            pass


async def serve(*ports_of_services: int) -> None:
    """Serve all services until interrupted, and print their ports."""
    numbers = (*ports_of_services, 0, 0, 0)
    async with trio.open_nursery() as nursery:
        ports = []
        for service, number in zip((echo, daytime, discard), numbers, strict=False):
            start = partial(trio_smc.serve, service, number, host="0.0.0.0")
            listeners = await nursery.start(start)
            ports.append(listeners[0].socket.getsockname()[1])
        print(*ports, flush=True)


async def connect(service: Service, host: str, port: int) -> None:
    """Keep one connection open after the other, and use it as a server of this service does."""
    while True:
        try:
            stream = await trio_smc.open_stream(host, port)
        except OSError:
            await trio.sleep(0.05)
            continue
        async with stream:
            await service(stream)


async def main(role: str, *arguments: str) -> None:
    """Run one role, in a stack with the settings above."""
    async with trio_smc.open_stack(CONFIG):
        if role == "server":
            await serve(*map(int, arguments))
        else:
            host, port = arguments[0], int(arguments[1])
            lanes = int(arguments[2]) if len(arguments) > 2 else 4
            discard_port = int(arguments[3]) if len(arguments) > 3 else 0
            async with trio.open_nursery() as nursery:
                for _ in range(lanes):
                    nursery.start_soon(connect, echo, host, port)
                for _ in range(READERS if discard_port else 0):
                    nursery.start_soon(connect, discard, host, discard_port)


if __name__ == "__main__":
    try:
        trio.run(main, sys.argv[1], *sys.argv[2:])
    except* KeyboardInterrupt:
        print("stopped")
