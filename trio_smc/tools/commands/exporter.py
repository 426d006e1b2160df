"""`trio-smc exporter`: serve the metrics of all processes to Prometheus.

Theory of operation
-------------------
The server speaks as much of HTTP/1.1 as a scrape needs: it reads one request of at most
`_MAX_REQUEST` bytes, answers it, and closes the connection.  Clients are untrusted: each has a
deadline, their number has a bound, and an error of one ends only its connection.  Processes are
queried in a thread, at most one query at a time; requests that arrive meanwhile get its answer.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
from typing import Final, NamedTuple

import trio

from trio_smc.tools.client import NoAnswer, SilentProcesses, take_snapshots
from trio_smc.tools.commands import add_directory, add_users, directories, whole_number
from trio_smc.tools.exposition import CONTENT_TYPE, PARTS, exposition
from trio_smc.tools.output import ToolError, address, error_text, print_line

NAME = "exporter"
SUMMARY = "serve the metrics of all processes to Prometheus"
DESCRIPTION = """
Serve the metrics of all running processes of this user, of those of --directory, or as root of
another user (--user) or of all users (--all), at http://HOST:PORT/metrics, until SIGTERM or Ctrl-C.
The programs need no change and no library.  Each metric has the label pid.

The server has no authentication and no TLS: listen on 127.0.0.1, or behind a firewall or a proxy.
The metrics name RNICs, UEIDs and reasons for TCP, and no addresses of connections.

trio-smc stats --prometheus prints the same metrics once, for the textfile collector of
node_exporter.
"""
EPILOG = """
Examples:
  trio-smc exporter --listen 127.0.0.1:9470
  trio-smc exporter --listen [::1]:9470 --directory /run/app/smc
  curl http://127.0.0.1:9470/metrics

examples/prometheus has a configuration, alerts and a Grafana dashboard.

Exit codes: 0 after SIGTERM or Ctrl-C; 2 for bad input, such as an address on which the exporter
cannot listen.
"""

_MAX_REQUEST: Final = 8192
"""Bytes of a request.  Chosen; a scrape of Prometheus has about 300."""
_TIMEOUT: Final = 10.0
"""Seconds for a request and its answer, the query of the processes included.  Chosen."""
_MAX_CLIENTS: Final = 16
"""Clients at the same time.  Further ones are disconnected.  Chosen."""
_MAX_HOST: Final = 255
"""Characters of a host name (RFC 1035, 2.3.4)."""
_port = whole_number("TCP port", 0, 65535)


class _Address(NamedTuple):
    host: str
    port: int


def _address(text: str) -> _Address:
    host, _, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not bare or len(bare) > _MAX_HOST or (":" in bare and bare == host):
        raise argparse.ArgumentTypeError(f"{text[:_MAX_HOST]!r} is not HOST:PORT")
    return _Address(bare, _port(port))


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--listen", type=_address, required=True, metavar="HOST:PORT",
        help="the address of the server; port 0: a free port, which is printed",
    )  # fmt: skip
    add_directory(parser)
    add_users(parser)


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    directories(options)  # an error must come before the exporter listens
    with contextlib.suppress(KeyboardInterrupt):
        trio.run(_serve, options)
    return 0


async def _serve(options: argparse.Namespace) -> None:
    listen = options.listen
    try:
        listeners = await trio.open_tcp_listeners(listen.port, host=listen.host)
    except (OSError, UnicodeError) as error:
        why = error_text(error) if isinstance(error, OSError) else "not a host name"
        where = address(list(listen))
        raise ToolError(f"cannot listen on {where}: {why}") from None
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        for each in listeners:
            name = address(list(each.socket.getsockname()[:2]))
            print_line(f"serving http://{name}/metrics", flush=True)
        exporter = _Exporter(options)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, exporter.handle, listeners)
            await anext(signals)
            nursery.cancel_scope.cancel()


class _Exporter:
    """Answers scrapes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._failures = 0
        self._clients = 0
        self._query: _Query | None = None

    async def handle(self, stream: trio.SocketStream) -> None:
        """Answer one client."""
        self._clients += 1
        try:
            async with stream:
                if self._clients <= _MAX_CLIENTS:
                    with (
                        trio.move_on_after(_TIMEOUT),
                        contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError),
                    ):
                        await self._answer(stream)
        finally:
            self._clients -= 1

    async def _answer(self, stream: trio.SocketStream) -> None:
        request = bytearray()
        while b"\r\n\r\n" not in request and b"\n\n" not in request:
            piece = await stream.receive_some(_MAX_REQUEST)
            request += piece
            if not piece or len(request) > _MAX_REQUEST:
                await stream.send_all(_response("400 Bad Request", "the request is not HTTP\n"))
                return
        words = bytes(request.split(b"\n", 1)[0]).split()
        method, path = (words[0], words[1].partition(b"?")[0]) if len(words) == 3 else (b"", b"")
        if method not in (b"GET", b"HEAD"):
            status = "405 Method Not Allowed" if method else "400 Bad Request"
            await stream.send_all(_response(status, "only GET\n"))
        elif path == b"/":
            await stream.send_all(_response("200 OK", "trio-smc exporter: see /metrics\n"))
        elif path != b"/metrics":
            await stream.send_all(_response("404 Not Found", "only /metrics\n"))
        else:
            status, text = await self._metrics()
            await stream.send_all(_response(status, text, head=method == b"HEAD"))

    async def _metrics(self) -> tuple[str, str]:
        """The metrics; requests at the same time share one query."""
        query = self._query
        if query is not None:
            await query.done.wait()
            return query.result
        query = self._query = _Query()
        try:
            # The client's time limit does not leave other clients without an answer.
            with trio.CancelScope(shield=True):
                query.result = await trio.to_thread.run_sync(self._take)
        finally:
            self._query = None
            query.done.set()
        return query.result

    def _take(self) -> tuple[str, str]:
        silent = SilentProcesses(quiet=True)
        try:
            # Looked for each time, because other users may have started processes.
            found = directories(self._options)
            snapshots = take_snapshots(found, PARTS, required=False, silent=silent)
        except OSError as error:  # such as too many open files
            return "503 Service Unavailable", f"{error_text(error)}\n"
        except NoAnswer:
            snapshots, missing = [], 1 + len(silent.last)  # the error is about one more
        except ToolError as error:
            return "500 Internal Server Error", f"{error.line(self._options)}\n"
        else:
            missing = len(silent.last)
        self._failures += missing
        return "200 OK", exposition(snapshots, silent=missing, failures=self._failures)


class _Query:
    """One query of all processes.

    Attributes:
      done: set when the query has ended.
      result: status and text of the answer.
    """

    def __init__(self) -> None:
        self.done = trio.Event()
        self.result = ("503 Service Unavailable", "the query failed\n")


def _response(status: str, text: str, *, head: bool = False) -> bytes:
    body = text.encode("utf-8", "replace")
    lines = (
        f"HTTP/1.1 {status}", f"Content-Type: {CONTENT_TYPE}", f"Content-Length: {len(body)}",
        "Connection: close", "", "",
    )  # fmt: skip
    return "\r\n".join(lines).encode() + (b"" if head else body)
