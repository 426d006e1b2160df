"""The control protocol: what a stack and the command `trio-smc` say to each other.

Theory of operation
-------------------
Each running stack listens on a Unix stream socket ``control/<pid>-<random>`` in the user's
private directory, or ``control-<random>/<pid>-<random>`` in one that a group shares.  A message is
four bytes of length, most significant first, and a JSON object in UTF-8 of that length.  Every
object has "version".

The client sends one request, ``{"version": 1, "want": [parts]}``, and the stack answers with
messages ``{"version": 1, "part": name, "data": ...}``: first "process", then the wanted parts,
those that are lists in pieces of at most `PIECE` items, and then "end" (or "error", whose data is
a sentence).  Then it closes.  Both sides check by SO_PEERCRED that the other is the same user's.

``{"version": 1, "want": ["capture"], "payload": 16}`` is answered by one message of the part
"capture", whose data is the stack's peer ID, and then, until either side closes, by the bytes of
a pcapng file of what happens from then on, with so many bytes of each RDMA write.

A new part or a new field needs no new version: a stack leaves out parts it does not know, and
clients ignore fields that they do not know.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any, Final

from trio_smc._base.errors import ProtocolError
from trio_smc._base.printable import printable
from trio_smc.host.descriptors import Closer, receive_bytes, refuse_descriptors
from trio_smc.host.private_directory import DirectoryUnusable, PrivateDirectory, peer_user

__all__ = [
    "CAPTURE",
    "DIRECTORY",
    "HEADER_SIZE",
    "PARTS",
    "PIECE",
    "REPLY_LIMIT",
    "REPORT_EVERY",
    "REPORT_TO",
    "REQUEST_LIMIT",
    "VERSION",
    "Closer",
    "DirectoryUnusable",
    "PrivateDirectory",
    "decode_untrusted",
    "encode",
    "length_untrusted",
    "peer_user",
    "pid_of_name",
    "receive_bytes",
    "refuse_descriptors",
    "report_interval",
]


VERSION: Final = 1
DIRECTORY: Final = "control"
"""Below the private directory."""
PARTS: Final = ("statistics", "connections", "link_groups", "rnics", "listeners")
"""What a client may want."""
CAPTURE: Final = "capture"
"""What it may want alone, and gets until it leaves."""
PIECE: Final = 25
"""Items of a list that go into one message; between two the stack does its own work."""
REQUEST_LIMIT: Final = 4096
"""Bytes of a request, without the length."""
REPLY_LIMIT: Final = 1 << 20
"""Bytes of each message of a reply, without the length."""
REPORT_TO: Final = "TRIO_SMC_RUN"
"""The variable of the environment that names the socket of `trio-smc run`."""
REPORT_EVERY: Final = "TRIO_SMC_REPORT_EVERY"
"""The variable that says how often a stack tells what it counted, in seconds; else at its end."""

_HEADER: Final = struct.Struct("!I")
HEADER_SIZE: Final = _HEADER.size
_MIN_INTERVAL: Final = 0.1
"""Seconds between two reports of a stack, at least."""


def encode(message: Mapping[str, Any]) -> bytes:
    """A message as bytes, "version" added."""
    body = json.dumps({"version": VERSION, **message}, separators=(",", ":")).encode()
    return _HEADER.pack(len(body)) + body


def length_untrusted(header: bytes, limit: int) -> int:
    """How many bytes follow the ``HEADER_SIZE`` bytes of a header.

    Raises:
      ProtocolError: more than ``limit``, or none.
    """
    (length,) = _HEADER.unpack(header)
    if not 0 < length <= limit:
        raise ProtocolError(f"a control message of {length} bytes where 1 to {limit} are allowed")
    return int(length)


def decode_untrusted(body: bytes) -> dict[str, Any]:
    """The object in a message.

    Raises:
      ProtocolError: it is no JSON object, or of another version.
    """
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        raise ProtocolError("a control message that is not JSON") from None
    if not isinstance(message, dict):
        raise ProtocolError("a control message that is not a JSON object")
    version = message.get("version")
    if version != VERSION or isinstance(version, bool):
        text = f"a control message of version {printable(version, 20)} where {VERSION} is spoken"
        raise ProtocolError(text)
    return message


def pid_of_name(name: str) -> int | None:
    """The process that made the control socket of this name; None: it is none."""
    pid, dash, random = name.partition("-")
    if dash and random and pid.isascii() and pid.isdigit() and len(pid) < len("4294967296"):
        return int(pid)
    return None


def report_interval(text: str) -> float:
    """The value of `REPORT_EVERY` in seconds; infinite where it is none."""
    try:
        seconds = float(text)
    except ValueError:
        return math.inf
    return max(seconds, _MIN_INTERVAL) if seconds > 0 else math.inf
