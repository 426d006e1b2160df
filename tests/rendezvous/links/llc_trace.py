"""A trace of the messages and states of two sides, to debug a failed run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tests.rendezvous.rendezvous_pair import World
from trio_smc._base.errors import ProtocolError
from trio_smc.wire import llc

__all__ = ["Trace"]


class Trace:
    """An observer that writes messages and states in order.

    Args:
      name: the name of the side.
      world: its clock gives the times.
      write: receives each line.
    """

    def __init__(self, name: str, world: World, write: Callable[[str], None]) -> None:
        self._name = name
        self._world = world
        self._write = write

    def write_line(self, text: str) -> None:
        self._write(f"{self._world.clock.now - 1000:8.2f} {self._name:6} {text}")

    def llc(self, link: Any, outgoing: bool, message: bytes) -> None:
        try:
            text = _brief(llc.decode_untrusted(message))
        except ProtocolError as error:
            text = f"{message.hex()}: {error}"
        self.write_line(f"{link!r} {'->' if outgoing else '<-'} {text}")

    def cdc(self, link: Any, outgoing: bool, message: bytes) -> None:
        self.write_line(
            f"{link!r} {'->' if outgoing else '<-'} CDC {message[2:8].hex()} {message[32:33]!r}"
        )

    def state(self, subject: Any, old: str, new: str, event: str) -> None:
        text = repr(subject)
        name = type(subject).__name__ if " object at 0x" in text else text
        self.write_line(f"{name}: {old} -> {new} ({event})")

    def clc(self, connection: object, outgoing: bool, message: bytes) -> None:
        self.write_line(f"CLC {'->' if outgoing else '<-'} type {message[4]}")

    def rdma_write(self, link: Any, address: int, rkey: int, data: Any) -> None:
        self.write_line(f"{link!r} RDMA write to {address:#x}, RKey {rkey:#x}")

    def mode(self, connection: object, fallback: object) -> None:
        self.write_line(f"mode: {fallback or 'SMC-R'}")


def _brief(message: llc.Message) -> str:
    """The fields of an LLC message, without addresses and without fields that are empty."""
    text = type(message).__name__
    for each in dataclasses.fields(message):
        value = getattr(message, each.name)
        if each.name == "gid":
            text += f" RNIC {value[-1]}"
        elif value and each.name not in ("mac", "user_data", "initial_psn", "link_user_id"):
            number = isinstance(value, int) and value > 255
            text += (
                f" {each.name}"
                if value is True
                else f" {each.name}={value:#x}"
                if number
                else (f" {each.name}={value}")
            )
    return text
