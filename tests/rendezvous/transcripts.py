"""The messages of a side of `rendezvous_pair`, as lines and decoded."""

from __future__ import annotations

from typing import TypeVar

from tests.rendezvous.rendezvous_pair import Side
from trio_smc.wire import clc, llc

__all__ = ["line", "messages", "transcript"]

M = TypeVar("M")

_TYPES = {**{kind.value: kind.name for kind in llc.MessageType}, 0xFE: "CDC"}


def line(event: tuple[str, str, bytes]) -> str:
    """One line of a transcript: direction, name of the message, and "reply" for a reply."""
    kind, way, data = event
    if kind == "clc":
        return f"{way} {clc.MessageType(data[4]).name}"
    name = _TYPES[data[0] if kind == "cdc" else data[0] & 0x0F]
    if kind == "cdc" or not data[3] & 0x80:
        return f"{way} {name}"
    return f"{way} {name} reply"


def transcript(side: Side) -> list[str]:
    """The LLC messages that the side has sent and received."""
    return [line(each) for each in side.recorder.messages() if each[0] == "llc"]


def messages(side: Side, kind: type[M], framing: llc.Framing = llc.V1) -> list[M]:
    """The messages of one kind."""
    events = side.recorder.messages()
    found = [framing.decode_untrusted(data) for codec, _, data in events if codec == "llc"]
    return [each for each in found if isinstance(each, kind)]
