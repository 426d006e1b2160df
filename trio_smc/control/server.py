"""The control socket of a stack, which answers the command `trio-smc` of the same user.

`RunReport` sends a stack's counters to the `trio-smc run` that started the program.

Theory of operation
-------------------
`control.protocol` describes the protocol.  One task of the stack waits for clients.  Each client
has a task and a deadline, and receives its answer piece by piece, so that a stack with many
connections does its own work in between.  An error of a client affects only that client.  If the
socket cannot be created, the stack runs without it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import secrets
import socket
from typing import TYPE_CHECKING, Any, Final

import trio

from trio_smc._base.errors import ProtocolError
from trio_smc.config.config import Config
from trio_smc.control import protocol as control
from trio_smc.control.snapshot import Snapshots, plain_statistics
from trio_smc.host.descriptors import Closer, receive_bytes
from trio_smc.host.private_directory import DirectoryUnusable, PrivateDirectory
from trio_smc.host.tcp import unsent_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from trio_smc._stack import Stack

__all__ = ["ControlSocket", "RunReport"]

LOGGER = logging.getLogger("trio_smc.control")

_MAX_CLIENTS: Final = 8
"""Clients served at the same time; more wait in the backlog."""
_MAX_CAPTURES: Final = 4
"""Captures at the same time.  Each lasts until its client closes."""
_CLIENT_TIMEOUT: Final = 5.0
"""Seconds in which a client must send its request and receive the answer."""
_CAPACITY_PAUSE: Final = 0.5
_NAME_INTERVAL: Final = 10.0
"""Seconds between checks that the socket still has its name."""


class ControlSocket:
    """The control socket of one stack, from `open` to the end of `run`."""

    def __init__(self, stack: Stack, directory: Path) -> None:
        self._stack = stack
        self._path = directory
        self._snapshots = Snapshots(stack)
        self._name = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._slots = trio.CapacityLimiter(_MAX_CLIENTS)
        self._captures = 0
        self._closed = False
        self._clients: set[socket.socket] = set()
        self._closer = Closer("control socket")
        self._directory, self._socket = self._listen()
        self._directory.remove_stale()

    def _listen(self) -> tuple[PrivateDirectory, socket.socket]:
        root = PrivateDirectory.open(self._path, create=True)
        try:
            self._member_name = root.member_directory(control.DIRECTORY, create=True, private=True)
            directory = root.below(self._member_name)
        finally:
            root.close()
        try:
            return directory, directory.listen(self._name, _MAX_CLIENTS, socket.SOCK_STREAM)
        except BaseException:
            directory.close()
            raise

    def _ensure_name(self) -> None:
        """Listen again if the socket's name was removed, for example by a cleaner of /tmp."""
        if self._has_name():
            return
        try:
            directory, sock = self._listen()
        except (OSError, DirectoryUnusable) as error:
            LOGGER.info("the control socket cannot listen again: %s", error)
            return
        self._closer.discard_listener(self._socket)
        self._directory.close()
        self._directory, self._socket = directory, sock

    def _has_name(self) -> bool:
        """True if a client would find the socket by its name."""
        with contextlib.suppress(OSError, DirectoryUnusable), contextlib.ExitStack() as opened:
            root = PrivateDirectory.open(self._path, create=False)
            opened.callback(root.close)
            directory = root.below(self._member_name)
            opened.callback(directory.close)
            ours = os.fstat(self._directory.descriptor)
            return os.path.samestat(ours, os.fstat(directory.descriptor)) and directory.has(
                self._name
            )
        return False

    @classmethod
    def open(cls, stack: Stack, directory: Path) -> ControlSocket | None:
        """Create the socket; if that is not possible, log the reason and return None."""
        try:
            return cls(stack, directory)
        except (OSError, DirectoryUnusable) as error:
            LOGGER.info("no control socket: %s", error)
            return None

    def abandon(self) -> None:
        """Close the descriptors in a forked child: name and socket belong to the parent."""
        if self._closed:
            return
        self._closed = True
        # Not closed by Trio, whose epoll instance is shared with the parent.
        for each in (self._socket, *self._clients):
            with contextlib.suppress(OSError):
                os.close(each.detach())
        self._directory.close()

    async def run(self) -> None:
        """Serve clients until cancelled; then close."""
        try:
            async with trio.open_nursery() as nursery:
                while True:
                    await self._slots.acquire_on_behalf_of(token := object())
                    client = None
                    with trio.move_on_after(_NAME_INTERVAL):
                        client = await self._accept()
                    if self._closed:
                        await trio.sleep_forever()  # in a forked child
                    if client is None:
                        self._ensure_name()
                        self._slots.release_on_behalf_of(token)
                    else:
                        nursery.start_soon(self._serve, client, token)
        finally:
            self.close()

    def close(self) -> None:
        """Remove the name and close the sockets.  Idempotent."""
        if not self._closed:
            self._closed = True
            self._closer.discard_listener(self._socket)
            self._closer.join()
            with contextlib.suppress(OSError):
                self._directory.remove(self._name)
            self._directory.remove_stale()
            self._directory.close()

    async def _accept(self) -> socket.socket | None:
        if self._closer.is_full:
            await trio.sleep(_CAPACITY_PAUSE)
            return None
        try:
            await trio.lowlevel.wait_readable(self._socket)
            client, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        except OSError as error:
            LOGGER.warning("the control socket cannot accept: %s", error)
            await trio.sleep(_CAPACITY_PAUSE)
            return None
        return client

    async def _serve(self, client: socket.socket, token: object) -> None:
        self._clients.add(client)
        try:
            with trio.move_on_after(_CLIENT_TIMEOUT) as scope:
                stream = _Client(client)
                uid = control.peer_user(client)
                if uid != os.geteuid():
                    raise ProtocolError(f"this process does not belong to user {uid}")
                await self._answer(stream, scope)
        except (OSError, ProtocolError, trio.BrokenResourceError) as error:
            LOGGER.info("a client of the control socket was rejected: %s", error)
        except Exception:
            LOGGER.exception("a client of the control socket received no answer")
        finally:
            self._slots.release_on_behalf_of(token)
            self._clients.discard(client)
            trio.lowlevel.notify_closing(client)
            self._closer.discard(client)

    async def _answer(self, stream: _Client, scope: trio.CancelScope) -> None:
        try:
            request = await _request(stream)
            wanted = request["want"]
            if wanted == [control.CAPTURE]:
                await self._send_capture(stream, request.get("payload", 0), scope)
                return
            for part, data in self._snapshots.parts(wanted):
                await stream.send_all(control.encode({"part": part, "data": data}))
            last: dict[str, Any] = {"part": "end", "data": None}
        except ProtocolError as error:
            last = {"part": "error", "data": str(error)}
        except Exception:
            failure = {"part": "error", "data": "the process failed to answer; see its log"}
            await stream.send_all(control.encode(failure))
            raise
        await stream.send_all(control.encode(last))

    async def _send_capture(
        self, stream: _Client, payload: object, scope: trio.CancelScope
    ) -> None:
        """Send a capture until the client closes or the stack ends."""
        try:
            payload_limit = Config(capture_payload=payload).capture_payload  # type: ignore[arg-type]
        except ValueError as error:
            raise ProtocolError(str(error)) from None
        if self._captures >= _MAX_CAPTURES:
            raise ProtocolError(f"{_MAX_CAPTURES} captures of this process are already running")
        self._captures += 1
        try:
            started = {"part": control.CAPTURE, "data": self._stack.peer_id.hex()}
            await stream.send_all(control.encode(started))
            scope.deadline = math.inf
            from trio_smc.capture.sinks import send_capture

            await send_capture(
                self._stack, stream, payload_limit, lambda: unsent_bytes(stream.socket) > 0
            )
        finally:
            self._captures -= 1


class _Client(trio.abc.Stream):
    """A client's socket as a stream, on which no descriptor is received.

    Attributes:
      socket: the socket, for use without Trio.
    """

    def __init__(self, client: socket.socket) -> None:
        client.setblocking(False)
        self.socket: socket.socket = client
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(client))

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """As `trio.SocketStream.send_all`."""
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        """As `trio.SocketStream.wait_send_all_might_not_block`."""
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """As `trio.SocketStream.receive_some`.  A descriptor raises BrokenResourceError, too."""
        while True:
            await trio.lowlevel.wait_readable(self.socket)
            try:
                return receive_bytes(self.socket, max_bytes or control.REQUEST_LIMIT)
            except BlockingIOError:
                continue
            except (OSError, ProtocolError) as error:
                raise trio.BrokenResourceError(str(error)) from error

    async def aclose(self) -> None:
        """No-op: `ControlSocket` closes the socket."""


async def _request(stream: trio.abc.ReceiveStream) -> dict[str, Any]:
    """Receive the request of a client.  Raises ProtocolError."""
    header = await _receive_exactly(stream, control.HEADER_SIZE)
    length = control.length_untrusted(header, control.REQUEST_LIMIT)
    request = control.decode_untrusted(await _receive_exactly(stream, length))
    wanted = request.get("want")
    if not isinstance(wanted, list) or not all(isinstance(part, str) for part in wanted):
        raise ProtocolError("a request has no list of parts in 'want'")
    return request


async def _receive_exactly(stream: trio.abc.ReceiveStream, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = await stream.receive_some(count - len(data))
        if not piece:
            raise ProtocolError(f"a request ended after {len(data)} of {count} bytes")
        data += piece
    return bytes(data)


class RunReport:
    """Reports the start of one stack, and its counters at its end, to `trio-smc run`.

    Each message is one JSON object on its own connection.  To send a message never waits: if the
    reader has gone or is too slow, the message is lost, and the next one includes the number of
    lost messages.

    Args:
      stack: the stack.
      path: the socket of `trio-smc run`.
      every: seconds between additional reports of the counters, because the process may be killed.
    """

    def __init__(self, stack: Stack, path: str, every: float = math.inf) -> None:
        self._stack = stack
        self._path = path
        self._every = every
        self._dropped = 0

    async def run(self) -> None:
        """Report until cancelled, which happens after all connections have ended."""
        self._send("stack-open")
        last_sent = None
        try:
            while True:
                await trio.sleep(self._every)
                counts = plain_statistics(self._stack.statistics())
                if counts != last_sent:
                    self._send("stack-counts", statistics=counts)
                    last_sent = counts
        finally:
            self._send("stack-end", statistics=plain_statistics(self._stack.statistics()))

    def abandon(self) -> None:
        """Stop reporting in a forked child: the counters belong to the parent."""
        self._path = ""

    def _send(self, kind: str, **more: Any) -> None:
        if not self._path:
            return
        message = {"kind": kind, "stack": self._stack.peer_id.hex(), **more}
        if self._dropped:
            message["dropped"] = self._dropped
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.setblocking(False)
                sock.connect(self._path)
                sock.send(json.dumps(message).encode())
        except OSError:
            self._dropped += 1
        else:
            self._dropped = 0
