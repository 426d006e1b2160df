"""Cursors: the place in a ring where the next byte is written or read (RFC 7609, 4.3).

Theory of operation
-------------------
In this program, a cursor is the number of bytes since the connection began: it only grows, and
never wraps. On the wire it is a pair (wrap sequence number, offset): the offset
counts from the start of the RMBE, so it skips an eye catcher (``first`` is 4 with one, else 0),
and the 16-bit wrap sequence number grows each time the offset starts again at ``first``. For a
ring of ``usable`` bytes (element size - first) therefore::

    wrap   = count // usable  mod 65536
    offset = first + count % usable

A pair stands for a count modulo 65536 rings. A correct cursor advances by at most one ring between
two messages, so the count is unique, and one comparison rejects every wrong cursor: a cursor that
goes back looks like an advance of nearly 65536 rings. After a failover a cursor may go back; then
the advance is counted from the smallest count that the pair may stand for.
"""

from __future__ import annotations

from trio_smc._base.errors import ProtocolError

__all__ = ["advance_untrusted", "to_wire"]


def to_wire(count: int, usable: int, first: int) -> tuple[int, int]:
    """The (wrap sequence number, offset) pair of a CDC message (RFC 7609, A.4).

    Args:
      count: bytes since the connection began.
      usable: bytes of the ring, without an eye catcher.
      first: offset of the ring's first byte in its RMBE: 4 with an eye catcher, else 0.
    """
    wraps, offset = divmod(count, usable)
    return wraps & 0xFFFF, first + offset


def advance_untrusted(
    count: int, wrap: int, offset: int, *, usable: int, first: int, limit: int
) -> int:
    """The count that a received (wrap, offset) pair stands for.

    Args:
      count: the smallest count possible, usually the last value of this cursor.
      wrap: wrap sequence number received, 16 bits.
      offset: cursor received, bytes from the start of the RMBE.
      usable: bytes of the ring.
      first: offset of the ring's first byte: 4 or 0.
      limit: the largest count possible: the end of the window for a producer cursor, the bytes
        announced for a consumer cursor.

    Raises:
      ProtocolError: the cursor lies outside the ring, lies before ``count`` or exceeds ``limit``.
    """
    position = offset - first
    if not 0 <= position < usable:
        raise ProtocolError(f"cursor {offset} outside {first}..{first + usable - 1}")
    advance = (wrap * usable + position - count) % (usable << 16)
    if advance > limit - count:
        raise ProtocolError(
            f"cursor {wrap}:{offset} is not within {limit - count} bytes after {{}}:{{}}".format(
                *to_wire(count, usable, first)
            )
        )
    return count + advance
