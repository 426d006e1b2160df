"""`trio-smc proxy`: forward connections between TCP and SMC-R."""

from __future__ import annotations

import argparse
import logging
import signal
import time
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import trio

import trio_smc
from trio_smc.tools.commands import add_directory, check_directory, whole_number
from trio_smc.tools.output import ToolError, error_text, print_line, size
from trio_smc.tools.settings import add_config, settings_of

NAME = "proxy"
SUMMARY = "forward connections between TCP and SMC-R"
DESCRIPTION = """
Accept connections on LISTEN, connect to TARGET for each of them, and forward the data and the end
of each direction.  A connection at an smc: address uses SMC-R if its two ends can, a connection at
a tcp: address uses plain TCP.  So an SMC-R client can reach a server that has only TCP, and a
client that has only TCP can reach a server over SMC-R.

The proxy makes nothing faster.  A connection through the proxy is slower than TCP directly to
TARGET: it consists of two connections, each message wakes one more process, and each byte is
received and sent once more.  At its end the proxy prints the number of forwarded bytes and its own
processor time.

LISTEN and TARGET are smc:HOST:PORT or tcp:HOST:PORT, with IPv6 addresses in brackets.  If the port
of LISTEN is 0, the system chooses a free port, which the proxy prints.  If the private directory is
missing, the proxy creates it.
"""
EPILOG = """
Examples:
  trio-smc proxy smc:localhost:6380 tcp:localhost:6379     in front of a database
  trio-smc proxy tcp:localhost:5433 smc:localhost:5432     in front of a client

Exit codes: 0 after SIGTERM or Ctrl-C; 2 for bad input, such as an address on which the proxy cannot
listen, or a directory that cannot be used.
"""

LOGGER: Final = logging.getLogger("trio_smc.proxy")
_PIECE: Final = 1 << 18
"""Largest number of bytes that one call receives.  Chosen."""
_MAX_HOST: Final = 255
"""Characters of a host name (RFC 1035, 2.3.4)."""
_port = whole_number("TCP port", 0, 65535)


class _Address(NamedTuple):
    smc: bool
    host: str
    port: int


@dataclass(slots=True)
class _Totals:
    """The numbers of forwarded connections, and of forwarded bytes in both directions together."""

    connections: int = 0
    forwarded: int = 0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "listen", type=_address, metavar="LISTEN", help="the address on which clients connect"
    )
    parser.add_argument("target", type=_address, metavar="TARGET", help="the address of the server")
    parser.add_argument(
        "--require-smc",
        action="store_true",
        help="let connections at an smc: address fail if they would stay on TCP",
    )
    add_config(parser)
    add_directory(parser)


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    if not (options.listen.smc or options.target.smc):
        raise ToolError("one of LISTEN and TARGET must be smc:HOST:PORT")
    if not options.target.port:
        raise ToolError("TARGET needs a port; only LISTEN may have port 0")
    settings = settings_of(options, require_smc=options.require_smc or None)
    check_directory(settings)  # the stack logs another directory that cannot be used
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        trio.run(_serve, options.listen, options.target, settings.config)
    except OSError as error:
        raise ToolError(f"cannot open a stack: {error_text(error)}") from None
    return 0


def _address(text: str) -> _Address:
    kind, _, rest = text.partition(":")
    host, _, port = rest.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if kind not in ("smc", "tcp") or not bare or len(bare) > _MAX_HOST:
        raise argparse.ArgumentTypeError(
            f"{text[:_MAX_HOST]!r} is neither smc:HOST:PORT nor tcp:HOST:PORT"
        )
    return _Address(kind == "smc", bare, _port(port))


async def _serve(listen: _Address, target: _Address, config: trio_smc.Config) -> None:
    totals, started = _Totals(), time.process_time()
    # The receiver surrounds the stack, so that a second signal does not end the process before the
    # stack has removed its sockets from the private directory.
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio_smc.open_stack(config) as stack:
            listeners = await _listeners(stack, listen)
            for each in listeners:
                name = each.socket.getsockname()
                print_line(f"listening on {name[0]} port {name[1]}", flush=True)
            handler = partial(_forward, stack, target, totals)
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(trio.serve_listeners, handler, listeners)
                    await anext(signals)
                    nursery.cancel_scope.cancel()
            finally:
                LOGGER.info(
                    "connections: %d; bytes: %s; processor time of the proxy: %.2f s",
                    totals.connections, size(totals.forwarded), time.process_time() - started,
                )  # fmt: skip


async def _listeners(stack: trio_smc.Stack, listen: _Address) -> list[Any]:
    try:
        if listen.smc:
            return await stack.open_listeners(listen.port, host=listen.host)
        return await trio.open_tcp_listeners(listen.port, host=listen.host)
    except OSError as error:
        text = f"cannot listen on {_shown(listen)}: {error_text(error)}"
        raise ToolError(text) from error


def _shown(address: _Address) -> str:
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"{host}:{address.port}"


async def _connect(stack: trio_smc.Stack, target: _Address) -> trio.abc.HalfCloseableStream:
    if target.smc:
        return await stack.open_stream(target.host, target.port)
    return await trio.open_tcp_stream(target.host, target.port)


async def _forward(
    stack: trio_smc.Stack,
    target: _Address,
    totals: _Totals,
    client: trio.abc.HalfCloseableStream,
) -> None:
    """Connect to the target, and forward one client's connection.  An error resets both sides."""
    async with client:
        try:
            server = await _connect(stack, target)
        except OSError as error:
            LOGGER.info("cannot connect to %s: %s", _shown(target), _last_error_text(error))
            _reset(client)
            return
        totals.connections += 1
        smc = client if isinstance(client, trio_smc.SmcStream) else server
        LOGGER.info("forwarding a connection, mode %s", getattr(smc, "mode", "tcp"))
        async with server:
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_copy, client, server, totals)
                    nursery.start_soon(_copy, server, client, totals)
            except* trio.BrokenResourceError:
                # Reset both connections, because the other end would take a close for the regular
                # end of the data.
                _reset(client)
                _reset(server)


def _last_error_text(error: OSError) -> str:
    """The error of the last attempt to connect.

    The text of Trio's own error only says that all attempts failed.
    """
    cause = error.__cause__
    if isinstance(cause, ExceptionGroup):
        cause = cause.exceptions[-1]
    return error_text(cause if isinstance(cause, OSError) else error)


async def _copy(
    source: trio.abc.HalfCloseableStream, target: trio.abc.HalfCloseableStream, totals: _Totals
) -> None:
    while data := await source.receive_some(_PIECE):
        await target.send_all(data)
        totals.forwarded += len(data)
    await target.send_eof()


def _reset(stream: trio.abc.HalfCloseableStream) -> None:
    if isinstance(stream, trio_smc.SmcStream):
        stream.abort()
    elif isinstance(stream, trio.SocketStream):
        linger = trio.socket.SOL_SOCKET, trio.socket.SO_LINGER
        if stream.socket.fileno() >= 0:
            stream.socket.setsockopt(*linger, b"\1\0\0\0\0\0\0\0")
            stream.socket.close()
