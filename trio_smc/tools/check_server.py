"""`trio-smc check --listen`: a server for tests, which reports the mode of each connection.

The server reads and discards what clients send, and sends nothing.  A client is never waited for
without a limit: each connection has a deadline, the number of connections has a bound, and an error
of one connection ends only that connection.
"""

from __future__ import annotations

import contextlib
import signal
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import trio

import trio_smc
from trio_smc import Config, SmcStream
from trio_smc.tools.output import (
    ToolError,
    address,
    agreed,
    diagnosis,
    error_text,
    print_json,
    print_line,
)

__all__ = ["serve"]

_HOLD: Final = 60.0
"""Seconds after which the server closes a connection.  Chosen."""
_MAX_CONNECTIONS: Final = 64
"""Connections at the same time.  Further ones are closed after their report.  Chosen."""
_PIECE: Final = 1 << 16
"""Largest number of bytes that one call receives.  Chosen."""


@dataclass(slots=True)
class _Server:
    """The state of the server.

    Attributes:
      as_json: True if each connection is one JSON document.
      count: the connections after which the server ends; None: no limit.
      ended: cancelled when the server ends.
      seen, open: numbers of connections.
    """

    as_json: bool
    count: int | None
    ended: trio.CancelScope = field(default_factory=trio.CancelScope)
    seen: int = 0
    open: int = 0

    async def handle(self, stream: SmcStream) -> None:
        """Report one connection, and hold it until the client closes."""
        self.seen += 1
        self.open += 1
        is_last = self.count is not None and self.seen >= self.count
        try:
            async with stream:
                self._report(stream)
                if self.open <= _MAX_CONNECTIONS:
                    with trio.move_on_after(_HOLD), contextlib.suppress(trio.BrokenResourceError):
                        while await stream.receive_some(_PIECE):
                            pass
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the client's reset ends its connection only
        finally:
            self.open -= 1
            if is_last:
                self.ended.cancel()

    def _report(self, stream: SmcStream) -> None:
        ends = [_name(stream.socket, which) for which in ("getsockname", "getpeername")]
        group = stream.link_group
        found: dict[str, Any] = {
            "mode": stream.mode.value,
            "local": ends[0],
            "peer": ends[1],
            "fallback": None if stream.fallback is None else stream.fallback.as_dict(),
            "kind": None if group is None else group.kind,
            "agreed": None if group is None else group.agreed._asdict(),
        }
        if self.as_json:
            print_json(found, flush=True)
        else:
            print_line(f"{address(ends[1])}  {_verdict(found)}", flush=True)


def _name(sock: Any, which: str) -> list[Any] | None:
    try:
        return list(getattr(sock, which)()[:2])
    except OSError:
        return None  # the client has reset the connection


def _verdict(found: dict[str, Any]) -> str:
    fallback = found["fallback"]
    if fallback is None:
        terms = found["agreed"] or {}
        version = agreed(**terms) if terms else "1"
        return f"smc-r, version {version}, {found['kind']} link group"
    side = "this side" if fallback["origin"] == "local" else "the client"
    code = diagnosis(fallback["code"])
    why = f"{fallback['message']} ({fallback['reason']}, decided by {side}, {code})"
    return f"{found['mode']}: {why}; remedy: {fallback['remedy']}"


def serve(
    host: str | None, port: int, config: Config, *, as_json: bool, count: int | None,
    seconds: float,
) -> None:  # fmt: skip
    """Serve until Ctrl-C, SIGTERM, ``count`` connections, or for so many ``seconds``.

    Raises:
      ToolError: the server cannot listen.
    """
    server = _Server(as_json, count)
    with contextlib.suppress(KeyboardInterrupt):
        trio.run(partial(_serve, server, host, port, config, seconds))


async def _serve(
    server: _Server, host: str | None, port: int, config: Config, seconds: float
) -> None:
    with server.ended, trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        server.ended.deadline = trio.current_time() + seconds
        async with contextlib.AsyncExitStack() as exits:
            try:
                stack = await exits.enter_async_context(trio_smc.open_stack(config))
            except OSError as error:
                raise ToolError(f"cannot open a stack: {error_text(error)}") from None
            try:
                listeners = await stack.open_listeners(port, host=host)
            except OSError as error:
                where = f"port {port}" if host is None else address([host, port])
                text = f"cannot listen on {where}: {error_text(error)}"
                raise ToolError(text) from None
            if not server.as_json:
                names = (listener.socket.getsockname()[:2] for listener in listeners)
                for name in names:
                    print_line(f"listening on {address(list(name))}", flush=True)
            else:
                where_all = [list(listener.socket.getsockname()[:2]) for listener in listeners]
                print_json({"listening": where_all}, flush=True)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.serve_listeners, server.handle, listeners)
                await anext(signals)
                nursery.cancel_scope.cancel()
