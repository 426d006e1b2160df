"""The asking side of a capture: the bytes of a pcapng file, as a stack makes them."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

from trio_smc import ProtocolError
from trio_smc.capture.pcapng import whole_blocks_untrusted
from trio_smc.control import protocol as control
from trio_smc.tools.client import (
    PATIENCE,
    connect,
    named_sockets,
    nobody,
    opened,
    read_message,
    said,
)
from trio_smc.tools.errors import ToolError

__all__ = ["stream_capture"]

_PIECE: Final = 65536


def stream_capture(
    directory: Path, pid: int, stack: str | None, payload: int, seconds: float | None
) -> Generator[bytes, None, None]:
    """Pieces of the file, until the stack is closed or ``seconds`` have passed.

    Each is made of whole blocks, so that the file is whole whenever one stops.

    Args:
      directory: the private directory.
      pid, stack: whose capture; ``stack`` is a peer ID, needed where a process has several.
      payload: how many bytes of each RDMA write to keep.

    Raises:
      ToolError: there is no such stack, or it does not answer as it should.
    """
    end = None if seconds is None else time.monotonic() + seconds
    with contextlib.ExitStack() as exits:
        sock = _chosen(directory, pid, stack, payload, exits)
        waiting = bytearray()
        while True:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return
            sock.settimeout(left)
            try:
                piece = sock.recv(_PIECE)
            except (TimeoutError, ConnectionError):
                return
            if not piece:
                return
            waiting += piece
            try:
                count = whole_blocks_untrusted(waiting)
            except ProtocolError as error:
                raise ToolError(f"process {pid} {said(error)}") from None
            if count:
                yield bytes(waiting[:count])
                del waiting[:count]


def _chosen(
    directory: Path, pid: int, stack: str | None, payload: int, exits: contextlib.ExitStack
) -> socket.socket:
    """The connection to the stack that is meant, its answer begun."""
    found: dict[str, socket.socket] = {}
    with opened(directory) as root:
        for number, name in named_sockets(root):
            if number != pid:
                continue
            sock = exits.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            try:
                if connect(sock, root, name):
                    sock.sendall(control.encode({"want": [control.CAPTURE], "payload": payload}))
                    begun = read_message(sock, time.monotonic() + PATIENCE)
                    found[_stack_untrusted(begun)] = sock
            except (OSError, ProtocolError) as error:
                raise ToolError(f"process {number} {said(error)}") from None
    if not found:
        raise ToolError(nobody(directory, pid))
    if stack is None and len(found) > 1:
        raise ToolError(f"process {pid} has several stacks (--stack): {', '.join(sorted(found))}")
    chosen = found.pop(next(iter(found)) if stack is None else stack.lower(), None)
    if chosen is None:
        raise ToolError(f"process {pid} has no stack {stack}; it has {', '.join(sorted(found))}")
    for other in found.values():
        other.close()
    return chosen


def _stack_untrusted(message: dict[str, Any]) -> str:
    """The peer ID in the message that begins a capture.

    Raises:
      ProtocolError: it is another message.
    """
    data = message.get("data")
    if message.get("part") == "error":
        raise ProtocolError(str(data)[:200])
    if message.get("part") != control.CAPTURE or not isinstance(data, str):
        raise ProtocolError("it does not know captures")
    return data[:32]
