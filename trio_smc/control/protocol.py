"""The control protocol between a stack and the command `trio-smc`.

Theory of operation
-------------------
Each running stack listens on a Unix stream socket.  Its path is ``control/<pid>-<random>`` in the
user's private directory, or ``control-<random>/<pid>-<random>`` in a directory that a group shares.
A message consists of its length in four bytes, most significant first, and a JSON object in UTF-8.
Every object has the field "version".

The client sends one request, ``{"version": 1, "want": [parts]}``.  The stack answers with messages
``{"version": 1, "part": name, "data": ...}``: first "process", then the requested parts, then
"end", or "error" with a sentence as data.  The items of a list come in several messages of at most
`PIECE` items.  Then the stack closes the connection.  Each side checks by SO_PEERCRED that the
other side belongs to the same user.

A request ``{"version": 1, "want": ["capture"], "payload": 16}`` starts a capture.  The stack
answers with one message of the part "capture", whose data is the stack's peer ID.  Then the stack
sends a pcapng file of all later events, with at most ``payload`` bytes of each RDMA write, until
one side closes.

A request ``{"version": 1, "want": ["sizes"], "seconds": 5}`` counts the sizes of RDMA writes and of
the data that CDC messages announce for so many seconds, and answers with "process" and "sizes".
Nothing is counted otherwise, so that the data path has no extra work.

A request ``{"version": 1, "want": ["drain"], "rnic": NAME}``, or with ``"link_group": NUMBER``,
takes an RNIC or a link group out of service (`Stack.drain_rnic`, `Stack.drain_link_group`);
"undrain" puts it back.  With ``"stack": PEERID`` only the stack with this peer ID does so.  The
stack answers with "process" and the part "drain" or "undrain", whose data is the number of
connections that still use the RNIC or link group, and does not wait for them.  A stack that has no
such RNIC or link group answers without that part.  A request never contains anything that the stack
executes, and only the user of the process can send one.

Releases differ in parts and fields, and need no new version for that: stacks ignore unknown parts,
clients ignore unknown fields and take a missing one for null, and each stack names its release in
"process".  A field keeps its type and its meaning.
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
from trio_smc.host.private_directory import (
    DirectoryUnusable,
    PrivateDirectory,
    default_directory,
    peer_user,
)
from trio_smc.states.tables import CONNECTION
from trio_smc.streams.connection_views import TCP_STATES

__all__ = [
    "CAPTURE",
    "DIRECTORY",
    "DRAINS",
    "HEADER_SIZE",
    "MOST_SECONDS",
    "PARTS",
    "PIECE",
    "REPLY_LIMIT",
    "REPORT_EVERY",
    "REPORT_TO",
    "REQUEST_LIMIT",
    "SIZES",
    "STATES",
    "VERSION",
    "Closer",
    "DirectoryUnusable",
    "PrivateDirectory",
    "decode_untrusted",
    "default_directory",
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
"""The name of the directory of control sockets, in the private directory."""
STATES: Final = tuple(dict.fromkeys((*CONNECTION.states, *TCP_STATES)))
"""The states of connections in the answers of this release.  Another one may have others."""
PARTS: Final = (
    "statistics", "connections", "link_groups", "rnics", "listeners", "settings", "events",
    "interfaces",
)  # fmt: skip
"""The parts that a client may request."""
SIZES: Final = "sizes"
"""The part with histograms of sizes.  A request for this part names no other part."""
MOST_SECONDS: Final = 60
"""The longest time for which sizes are counted.  Chosen."""
CAPTURE: Final = "capture"
"""The part that starts a capture.  A request for this part names no other part."""
DRAINS: Final = ("drain", "undrain")
"""The parts that change the service of an RNIC or a link group.  A request for one of them names no
other part."""
PIECE: Final = 25
"""Items of a list in one message.  Between two messages other tasks of the stack run.  Chosen."""
REQUEST_LIMIT: Final = 4096
"""Largest number of bytes of a request, without the length.  Chosen."""
REPLY_LIMIT: Final = 1 << 20
"""Largest number of bytes of each message of a reply, without the length.  Chosen."""
REPORT_TO: Final = "TRIO_SMC_RUN"
"""The environment variable with the path of the socket of `trio-smc run`."""
REPORT_EVERY: Final = "TRIO_SMC_REPORT_EVERY"
"""The environment variable with the seconds between two reports of a stack's counters.  If the
variable is not set, a stack reports only at its end."""

_HEADER: Final = struct.Struct("!I")
HEADER_SIZE: Final = _HEADER.size
_MIN_INTERVAL: Final = 0.1
"""The shortest time in seconds between two reports of a stack.  Chosen."""


def encode(message: Mapping[str, Any]) -> bytes:
    """Encode a message, with the field "version" added."""
    body = json.dumps({"version": VERSION, **message}, separators=(",", ":")).encode()
    return _HEADER.pack(len(body)) + body


def length_untrusted(header: bytes, limit: int) -> int:
    """The length of a message, from its header of `HEADER_SIZE` bytes.

    Raises:
      ProtocolError: the length is 0 or more than ``limit``.
    """
    (length,) = _HEADER.unpack(header)
    if not 0 < length <= limit:
        raise ProtocolError(f"a control message has {length} bytes; 1 to {limit} are allowed")
    return int(length)


def decode_untrusted(body: bytes) -> dict[str, Any]:
    """Decode the object of a message.

    Raises:
      ProtocolError: the message is not a JSON object, or has another version.
    """
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        raise ProtocolError("a control message is not JSON") from None
    if not isinstance(message, dict):
        raise ProtocolError("a control message is not a JSON object")
    version = message.get("version")
    if version != VERSION or isinstance(version, bool):
        shown = printable(version, 20)
        raise ProtocolError(f"a control message has version {shown}; {VERSION} is supported")
    return message


def pid_of_name(name: str) -> int | None:
    """The process number in the name of a control socket; None if this is another name."""
    pid, dash, random = name.partition("-")
    if dash and random and pid.isascii() and pid.isdigit() and len(pid) < len("4294967296"):
        return int(pid)
    return None


def report_interval(text: str) -> float:
    """The seconds in a value of `REPORT_EVERY`, at least `_MIN_INTERVAL`.

    Infinity if the value is not a positive number.
    """
    try:
        seconds = float(text)
    except ValueError:
        return math.inf
    return max(seconds, _MIN_INTERVAL) if seconds > 0 else math.inf
