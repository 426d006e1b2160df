"""The names by which a program waits for a drop-in socket.

Theory of operation
-------------------
Besides the drop-in socket a program may know the socket of the standard library below it: the
program has wrapped that socket, or reads it as AnyIO does.  It may also know the number of the
descriptor.  `expose` notes such a socket as soon as the program knows it; all other sockets cost
nothing.  `owners_of` finds the drop-in sockets that belong to a name.

All references are weak.  A program may close a descriptor by its number, and the kernel then gives
the number to another file.  So each socket is noted with the identity of its file, and a number
finds the owners only while it belongs to this file.
"""

from __future__ import annotations

import os
import socket as stdlib_socket
from collections.abc import Collection, Iterable
from typing import Any, Final

from trio_smc._base.weak import WeakKeyMapping, WeakSet, WeakValueMapping

__all__ = ["NUMBERS", "expose", "owners_of"]


class _Exposed:
    """A socket of the standard library that the program knows.

    Attributes:
      file: the identity of its file; None if the socket was closed before.
      owners: its drop-in sockets; several if the program has wrapped it several times.
    """

    __slots__ = ("__weakref__", "file", "owners")

    def __init__(self, file: tuple[int, int] | None) -> None:
        self.file = file
        self.owners: WeakSet[Any] = WeakSet()


_exposed: Final[WeakKeyMapping[stdlib_socket.socket, _Exposed]] = WeakKeyMapping()
_by_number: Final[WeakValueMapping[int, _Exposed]] = WeakValueMapping()
NUMBERS: Final[Collection[int]] = _by_number.keys()
"""The numbers that may belong to a drop-in socket.  Most numbers that a program waits for are not
among them."""


def expose(sock: stdlib_socket.socket, owner: object) -> None:
    """Note that the program knows ``sock``, and so its number; ``owner`` is a drop-in socket."""
    number = sock.fileno()
    exposed = _exposed.get(sock)
    if exposed is None:
        exposed = _exposed[sock] = _Exposed(_file(number))
    exposed.owners.add(owner)
    if _by_number.get(number) is exposed or exposed.file is None:
        return
    if exposed.file == _file(number):
        _by_number[number] = exposed


def owners_of(waitable: object, number: int) -> Iterable[Any]:
    """The drop-in sockets of ``waitable``, which is a number or has it; -1: it is closed."""
    exposed = _by_number.get(number)
    if exposed is not None:
        if exposed.file == _file(number):
            return exposed.owners
    elif number == -1 and isinstance(waitable, stdlib_socket.socket):
        # The TCP connection of an SMC-R connection may end before the program closes its socket.
        exposed = _exposed.get(waitable)
        if exposed is not None:
            return exposed.owners
    return ()


def _file(number: int) -> tuple[int, int] | None:
    """The identity of an open file; None if the number is not in use.

    Only the number is known here.  A `host.tcp.SocketIdentity` needs a socket object, and to make
    one for each wait would take three times as long as fstat(2).
    """
    try:
        status = os.fstat(number)
    except (OSError, OverflowError):
        return None
    return status.st_dev, status.st_ino
