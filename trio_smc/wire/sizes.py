"""Sizes that messages carry as codes: the size of an RMB element (RFC 7609, A.2.2)."""

from __future__ import annotations

RMBE_SIZE_UNIT = 16 * 1024
"""Bytes of the smallest RMB element; sizes are this << n (RFC 7609, A.2.2)."""


def rmbe_size_of(code: int) -> int:
    """Bytes of an RMB element whose size code is ``code`` (RFC 7609, A.2.2: 16 KiB << n)."""
    return RMBE_SIZE_UNIT << code


def rmbe_size_code(size: int) -> int:
    """The smallest size code whose element holds ``size`` bytes."""
    return ((size - 1) // RMBE_SIZE_UNIT).bit_length() if size > RMBE_SIZE_UNIT else 0
