"""The base class of messages, and the encoding of RMBE sizes and of EIDs.

The size of an RMB element is 16 KiB << n (RFC 7609, A.2.2).

Enterprise IDs (EIDs) select the peers of SMC-R version 2.  Two hosts with an EID in common use
version 2, even in different subnets.  An EID that a user has chosen is a UEID.  On the wire an EID
has 32 bytes, padded with blanks.  Linux's ``smcr ueid add`` accepts the same names.  A UEID is not
a secret.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any, cast

__all__ = [
    "EID_SIZE",
    "MAX_EIDS",
    "Value",
    "eid_name",
    "encode_ueid",
    "rmbe_size_code",
    "rmbe_size_for",
    "rmbe_size_of",
]


@functools.cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


class Value:
    """Base class of a message or of its parts: a value that is compared, hashed and shown by its
    fields.  No code changes a value.

    A dataclass would generate these methods again for each class, at each import, which makes the
    import slower (docs/decisions.md, "what an import makes").
    """

    __slots__ = ()

    def _values(self) -> tuple[Any, ...]:
        return tuple([getattr(self, name) for name in _names(cast(Any, type(self)))])

    def __eq__(self, other: object) -> bool:
        if self.__class__ is not other.__class__:
            return NotImplemented
        assert isinstance(other, Value)
        return self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{name}={getattr(self, name)!r}" for name in _names(cast(Any, type(self)))
        )
        return f"{type(self).__qualname__}({shown})"


RMBE_SIZE_UNIT = 16 * 1024
"""Bytes of the smallest RMB element (RFC 7609, A.2.2)."""


def rmbe_size_of(code: int) -> int:
    """Bytes of an RMB element with this size code (RFC 7609, A.2.2)."""
    return RMBE_SIZE_UNIT << code


def rmbe_size_code(size: int) -> int:
    """The size code of the smallest RMB element that holds ``size`` bytes."""
    return ((size - 1) // RMBE_SIZE_UNIT).bit_length() if size > RMBE_SIZE_UNIT else 0


@functools.lru_cache(16)
def rmbe_size_for(size: int) -> int:
    """Bytes of the smallest RMB element that holds ``size`` bytes."""
    return rmbe_size_of(rmbe_size_code(size))


EID_SIZE = 32
"""Bytes of an EID on the wire."""
MAX_EIDS = 8
"""The most EIDs in a Proposal.  If there are more, Linux closes the TCP connection."""

_NAME = re.compile(r"[A-Z0-9][A-Z0-9.-]*")


def encode_ueid(name: str) -> bytes:
    """The 32 bytes of a UEID.

    Parameters:
      name: 1 to 32 of ``A-Z``, ``0-9``, ``.`` and ``-``, the first a letter or a digit.  Blanks
        may follow.

    Raises:
      ValueError: ``name`` has another form.
    """
    if len(name) > EID_SIZE or not _NAME.fullmatch(name.rstrip(" ")):
        raise ValueError(
            f"invalid UEID {name!r}: 1 to {EID_SIZE} of A-Z, 0-9, '.', '-'; the first A-Z or 0-9"
        )
    return name.ljust(EID_SIZE).encode()


def eid_name(eid: bytes) -> str:
    """An EID as printable text; bytes that are not printable ASCII become ``\\xNN``."""
    return "".join(chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}" for byte in eid).rstrip(" ")
