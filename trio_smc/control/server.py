"""The control socket of a stack, which answers the command `trio-smc` of the same user.

`RunReport` sends the counters of a stack to `trio-smc run`, if that command started the program.

Theory of operation
-------------------
`control.protocol` describes the protocol.  One task of the stack waits for clients.  Each client
has a task and a deadline.  The answer is sent in several messages, so that between two of them the
other tasks of the program run, even if the stack has many connections.  An error of a client
affects only that client.  If the control socket cannot be created, the stack runs without one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

import trio

from trio_smc._base.errors import ProtocolError
from trio_smc._base.interrupts import ki_protected
from trio_smc._base.waits import notify_closing, wait_readable
from trio_smc.config.config import Config
from trio_smc.control import protocol as control
from trio_smc.control.sizes import SizeCounter
from trio_smc.control.snapshot import Snapshots, plain_statistics
from trio_smc.host.descriptors import Closer, receive_bytes
from trio_smc.host.private_directory import DirectoryUnusable, PrivateDirectory
from trio_smc.host.real_time import move_on_after, sleep
from trio_smc.host.tcp import unsent_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from trio_smc._stack import Stack

__all__ = ["CAPACITY_PAUSE", "CLIENT_TIMEOUT", "NAME_INTERVAL", "ControlSocket", "RunReport"]

LOGGER = logging.getLogger("trio_smc.control")

_MAX_CLIENTS: Final = 8
"""Clients served at the same time.  Further clients wait in the backlog.  Chosen."""
_MAX_CAPTURES: Final = 4
"""Captures at the same time.  Each lasts until its client closes.  Chosen: leaves half of the
`_MAX_CLIENTS` to other commands."""
_MAX_DRAINS: Final = 64
"""Drains under way at the same time.  Chosen: a bound on tasks."""
CLIENT_TIMEOUT: Final = 5.0
"""Seconds in which a client must send its request and receive the answer.  Chosen."""
CAPACITY_PAUSE: Final = 0.5
"""Seconds without `accept` if the process has too many open files or no memory.  Chosen."""
NAME_INTERVAL: Final = 10.0
"""Seconds between two checks that the socket still has its name in the directory.  Chosen."""


@ki_protected
class ControlSocket:
    """The control socket of one stack, from `open` to the end of `run`."""

    def __init__(self, stack: Stack, directory: Path) -> None:
        self._stack = stack
        self._path = directory
        self._snapshots = Snapshots(stack)
        self._name = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._slots = trio.CapacityLimiter(_MAX_CLIENTS)
        self._captures = 0
        self._drains: set[tuple[Any, Any]] = set()
        self._closed = False
        self._clients: set[socket.socket] = set()
        self._closer = Closer("control socket")
        self._directory, self._socket = self._listen()
        with contextlib.suppress(OSError, DirectoryUnusable):  # for lack of descriptors
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
        """Listen on a new socket if the name was removed, for example by a cleaner of /tmp."""
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
        """True if a client finds the socket by its name."""
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
        """Create the control socket.  If that is not possible, log the reason and return None."""
        try:
            return cls(stack, directory)
        except (OSError, DirectoryUnusable) as error:
            LOGGER.info("no control socket: %s", error)
            return None

    def abandon(self) -> None:
        """In a forked child, close the descriptors.  Socket and name belong to the parent."""
        if self._closed:
            return
        self._closed = True
        # Close them without Trio, which would change the epoll instance that the parent uses, too.
        for each in (self._socket, *self._clients):
            with contextlib.suppress(OSError):
                os.close(each.detach())
        self._directory.close()

    async def run(self) -> None:
        """Serve clients until cancelled, and then close the socket."""
        try:
            async with trio.open_nursery() as nursery:
                while True:
                    await self._slots.acquire_on_behalf_of(token := object())
                    client = None
                    with move_on_after(self._stack.runtime.timers, NAME_INTERVAL):
                        client = await self._accept()
                    if self._closed:
                        await trio.sleep_forever()  # `abandon` was called in a forked child
                    if client is None:
                        self._ensure_name()
                        self._slots.release_on_behalf_of(token)
                    else:
                        nursery.start_soon(self._serve, client, token)
        finally:
            self.close()

    def close(self) -> None:
        """Close the socket, and remove its name.  Idempotent."""
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
            await trio.sleep(CAPACITY_PAUSE)
            return None
        try:
            await wait_readable(self._socket)
            client, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        except OSError as error:
            LOGGER.warning("the control socket cannot accept: %s", error)
            await trio.sleep(CAPACITY_PAUSE)
            return None
        return client

    async def _serve(self, client: socket.socket, token: object) -> None:
        self._clients.add(client)
        try:
            with trio.move_on_after(CLIENT_TIMEOUT) as scope:
                stream = _Client(client)
                uid = control.peer_user(client)
                if uid != os.geteuid():
                    raise ProtocolError(f"user {uid} may not query this process")
                await self._answer(stream, scope)
        except (BrokenPipeError, ConnectionResetError, trio.BrokenResourceError):
            LOGGER.info("a client of the control socket was gone before the answer")
        except (OSError, ProtocolError) as error:
            LOGGER.info("a client of the control socket was rejected: %s", error)
        except Exception:
            LOGGER.exception("a client of the control socket received no answer")
        finally:
            self._slots.release_on_behalf_of(token)
            self._clients.discard(client)
            notify_closing(client)
            self._closer.discard(client)

    async def _answer(self, stream: _Client, scope: trio.CancelScope) -> None:
        try:
            request = await _request(stream)
            wanted = request["want"]
            if wanted == [control.CAPTURE]:
                await self._send_capture(stream, request.get("payload", 0), scope)
                return
            if len(wanted) == 1 and wanted[0] in control.DRAINS:
                await self._drain(stream, wanted[0], request)
                return
            if wanted == [control.SIZES]:
                await self._send_sizes(stream, request.get("seconds"), scope)
                return
            for part, data in self._snapshots.parts(wanted):
                await stream.send_all(control.encode({"part": part, "data": data}))
            last: dict[str, Any] = {"part": "end", "data": None}
        except ProtocolError as error:
            last = {"part": "error", "data": str(error)}
        except Exception:
            failure = {"part": "error", "data": "internal error; see the log of the process"}
            await stream.send_all(control.encode(failure))
            raise
        await stream.send_all(control.encode(last))

    async def _drain(self, stream: _Client, change: str, request: dict[str, Any]) -> None:
        """Change the service of an RNIC or a link group, and answer without waiting for its end.

        Raises:
          ProtocolError: the request names none, or too many drains run.
        """
        rnic, number = request.get("rnic"), request.get("link_group")
        call = self._snapshots.drain(change, rnic, number)
        key = rnic, number
        if request.get("stack") not in (None, self._stack.peer_id.hex()):
            call = None
        if call is None:
            pass
        elif change == "drain":
            if key not in self._drains:
                if len(self._drains) >= _MAX_DRAINS:
                    raise ProtocolError(f"{_MAX_DRAINS} drains of this process are already running")
                self._drains.add(key)
                self._stack.runtime.nursery.start_soon(self._finish_drain, key, call)
                await trio.lowlevel.checkpoint()
        else:
            await call()
        part, data = self._snapshots.process()
        await stream.send_all(control.encode({"part": part, "data": data}))
        if call is not None:
            users = self._snapshots.users(rnic, number)
            await stream.send_all(control.encode({"part": change, "data": users}))
        await stream.send_all(control.encode({"part": "end", "data": None}))

    async def _send_sizes(self, stream: _Client, seconds: object, scope: trio.CancelScope) -> None:
        """Count sizes for so many seconds, and send the histograms."""
        good = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not good or not 0 < seconds <= control.MOST_SECONDS:  # type: ignore[operator]
            raise ProtocolError(f"seconds are not a number above 0, at most {control.MOST_SECONDS}")
        if self._captures >= _MAX_CAPTURES:
            raise ProtocolError(f"{_MAX_CAPTURES} captures of this process are already running")
        self._captures += 1
        counter = SizeCounter(self._stack)
        try:
            scope.deadline += seconds  # type: ignore[operator]
            counter.start()
            # A client that closes early ends the count.
            with trio.move_on_after(seconds):  # type: ignore[arg-type]
                with contextlib.suppress(trio.BrokenResourceError):
                    await stream.receive_some(1)
                return
        finally:
            counter.stop()
            self._captures -= 1
        part, data = self._snapshots.process()
        await stream.send_all(control.encode({"part": part, "data": data}))
        sizes = counter.histograms()
        await stream.send_all(control.encode({"part": control.SIZES, "data": sizes}))
        await stream.send_all(control.encode({"part": "end", "data": None}))

    async def _finish_drain(
        self, key: tuple[Any, Any], call: Callable[[], Awaitable[None]]
    ) -> None:
        """Wait until nothing uses the RNIC or the link group.  The stack cancels this task."""
        try:
            await call()
        except (ValueError, RuntimeError, trio.ClosedResourceError) as error:
            LOGGER.info("a drain has ended early: %s", error)
        finally:
            self._drains.discard(key)

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
    """The socket of a client as a Trio stream that receives no descriptors.

    Attributes:
      socket: the plain socket.
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
        """As `trio.SocketStream.receive_some`.

        Raises:
          trio.BrokenResourceError: the client has reset the connection, or sent a descriptor.
        """
        while True:
            await wait_readable(self.socket)
            try:
                return receive_bytes(self.socket, max_bytes or control.REQUEST_LIMIT)
            except BlockingIOError:
                continue
            except (OSError, ProtocolError) as error:
                raise trio.BrokenResourceError(str(error)) from error

    async def aclose(self) -> None:
        """No-op: `ControlSocket` closes the socket."""


async def _request(stream: trio.abc.ReceiveStream) -> dict[str, Any]:
    """Receive the request of a client.

    Raises:
      ProtocolError: the request is incomplete or not valid.
    """
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


@ki_protected
class RunReport:
    """Reports to `trio-smc run` that a stack has opened, and the stack's counters at its end.

    Each message is one JSON object on its own connection (`tools.report_messages`).  Sending never
    waits: if the command has ended or reads too slowly, the message is lost.  The next message
    includes the number of lost messages.

    Args:
      stack: the stack.
      path: the path of the socket of `trio-smc run`.
      every: seconds between two reports of the counters before the end, for the case that the
        process is killed; infinity: only at the end.
    """

    def __init__(self, stack: Stack, path: str, every: float = math.inf) -> None:
        self._stack = stack
        self._path = path
        self._every = every
        self._dropped = 0
        self._send("stack-open")  # before the program can tell another process of its stack

    async def run(self) -> None:
        """Report until cancelled.  The stack cancels this task after all connections have ended."""
        last_sent = None
        try:
            while True:
                await sleep(self._stack.runtime.timers, self._every)
                counts = plain_statistics(self._stack.statistics())
                if counts != last_sent:
                    self._send("stack-counts", statistics=counts)
                    last_sent = counts
        finally:
            self._send("stack-end", statistics=plain_statistics(self._stack.statistics()))

    def abandon(self) -> None:
        """In a forked child, stop reporting.  The stack and its counters belong to the parent."""
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
