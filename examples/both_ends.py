"""The shared part of the examples with two ends: a command line, and a new certificate.

`python -m examples.NAME` runs both ends, in two processes. `python -m examples.NAME serve [PORT]`
runs a server until it is interrupted. `python -m examples.NAME connect PORT [CA]` runs a client; CA
is the file that a server with TLS prints.
"""

from __future__ import annotations

import contextlib
import signal
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import trio
import trustme

import trio_smc

HOST = "localhost"
Server = Callable[[int, Path], Awaitable[object]]
Client = Callable[[int, Path], Awaitable[object]]


def main(name: str, server: Server, client: Client) -> None:
    """Run the role that the command line of the example `examples.NAME` names.

    `server` gets a port (0 for any free one) and a directory for its certificate. It calls
    `print_address`, and serves until it is cancelled. `client` gets the port and the CA's file.
    """
    match sys.argv[1:]:
        case []:
            with server_process(name) as (port, ca):
                trio.run(client, port, ca)
        case ["serve", *rest]:
            with tempfile.TemporaryDirectory(prefix="trio-smc-example-") as directory:
                try:
                    trio.run(server, int(rest[0]) if rest else 0, Path(directory))
                except* KeyboardInterrupt:
                    pass
                print("server: stopped")
        case ["connect", port, *rest]:
            trio.run(client, int(port), Path(rest[0] if rest else "ca.pem"))
        case _:
            sys.exit(__doc__)


@contextlib.contextmanager
def server_process(name: str) -> Iterator[tuple[int, Path]]:
    """Run the example's server; the value is its port and its CA's file."""
    command = [sys.executable, "-u", "-m", f"examples.{name}", "serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        try:
            if words[:2] != ["listening", "on"]:
                sys.exit("the server did not start")
            yield int(words[2]), Path(words[4])
        finally:
            process.send_signal(signal.SIGINT)
            # Read the server's output of the time when the client ran; then the server ends.
            print(process.stdout.read(), end="")


def print_address(listener: trio_smc.SmcListener, directory: Path) -> None:
    """Print the port of a server and the file of its CA."""
    port = listener.socket.getsockname()[1]
    print("listening on", port, "CA", directory / "ca.pem", flush=True)


def describe(end: str, stream: trio_smc.SmcStream) -> str:
    """Return how the bytes of a stream travel, in words."""
    why = f" ({stream.fallback.message})" if stream.fallback else ""
    return f"{end}: {stream.mode}{why}"


def server_context(directory: Path) -> ssl.SSLContext:
    """Return TLS settings with a certificate for "localhost"; its CA goes to `directory`."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(directory / "ca.pem")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(HOST).configure_cert(context)
    return context


def client_context(ca: Path) -> ssl.SSLContext:
    """Return TLS settings that trust that CA."""
    return ssl.create_default_context(cafile=ca)
