"""The code of a layout, written out: a `struct` for the whole message, a line for each field.

`trio_smc.wire.layout` goes through the fields of a message one by one, which for the CLC
messages of every connection takes several times as long as the functions that are made here, once
at import and of the same table (as `dataclasses` makes ``__init__``).  They do the usual: a message
whose reserved bits are zero and whose values fit.  What is unusual, the caller's functions do.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

__all__ = [
    "Code",
    "Place",
    "write_code",
]


_INTEGERS = {1: "B", 2: "H", 4: "I", 8: "Q"}


class Place(NamedTuple):
    """Where a field lies.

    Fields:
      name, kind: of the field: int, bool or bytes.
      offset, size: its bytes.
      low, mask: of a field within one byte: its lowest bit, and its bits when that is bit 0; a mask
        of 0 is a field of whole bytes.
    """

    name: str
    kind: type
    offset: int
    size: int
    low: int = 0
    mask: int = 0

    @property
    def largest(self) -> int:
        """The largest number that fits."""
        return self.mask or (1 << 8 * self.size) - 1


class Code(NamedTuple):
    """What was made.

    Fields:
      unpack: bytes to the fields by name; None: bits are set that are no field's.
      make: bytes to a value, unchecked but for its fields; None as `unpack`.  There is none for a
        class with fields that are not in the layout.
      pack: a value and the message's head to bytes.
      fits: whether all values fit their fields.
    """

    unpack: Callable[[bytes], dict[str, Any] | None]
    make: Callable[[bytes], Any] | None
    pack: Callable[[Any, bytes], bytes]
    fits: Callable[[Any], bool]


def write_code(cls: type, places: list[Place], size: int, head: int) -> Code:
    """Write the functions for a frozen dataclass with the field ``reserved``.

    Args:
      cls: the class, which has slots.
      places: where its fields are.
      size, head: bytes of a message; of its first, which are given.
    """
    items = [f"{head}s"]  # of the struct
    taken, given, found, reserved = ["_head"], ["head"], [], []
    at = head
    while at < size:
        here = [place for place in places if place.offset == at]
        name = f"at{at}"
        taken.append(name)
        if not here:
            end = min([place.offset for place in places if place.offset > at], default=size)
            items.append(f"{end - at}s")
            given.append(repr(bytes(end - at)))
            reserved.append(f"{name} != {bytes(end - at)!r}")
            at = end
        elif here[0].mask:
            items.append("B")
            given.append(" | ".join(f"value.{place.name} << {place.low}" for place in here))
            for place in here:
                bits = f"{name} >> {place.low} & {place.mask}"
                found.append((place.name, f"{bits} != 0" if place.kind is bool else bits))
            rest = 0xFF & ~sum(place.mask << place.low for place in here)
            if rest:
                reserved.append(f"{name} & {rest}")
            at += 1
        else:
            (place,) = here
            whole = place.kind is not bytes and place.size in _INTEGERS
            items.append(_INTEGERS[place.size] if whole else f"{place.size}s")
            odd = place.kind is not bytes and not whole
            given.append(f"value.{place.name}" + (f".to_bytes({place.size}, 'big')" if odd else ""))
            found.append((place.name, f"int.from_bytes({name}, 'big')" if odd else name))
            at += place.size
    layout = struct.Struct(">" + "".join(items))
    fitting = [
        f"len(value.{place.name}) == {place.size}"
        if place.kind is bytes
        else f"0 <= value.{place.name} <= {place.largest}"
        for place in places
    ]
    lines = [
        "def unpack(data):",
        f"    {', '.join(taken)} = unpack_from(data)",
        f"    if {' or '.join(reserved) or False}:",
        "        return None",
        f"    return {{{', '.join(f'{name!r}: {text}' for name, text in found)}}}",
        "def make(data):",
        f"    {', '.join(taken)} = unpack_from(data)",
        f"    if {' or '.join(reserved) or False}:",
        "        return None",
        "    value = new(cls)",
        *(f"    set_{name}(value, {text})" for name, text in found),
        "    set_reserved(value, b'')",
        "    return value",
        f"def pack(value, head): return pack_all({', '.join(given)})",
        f"def fits(value): return {' and '.join(fitting)}",
    ]
    names = [field.name for field in fields(cls)]
    made: dict[str, Any] = {
        "cls": cls,
        "new": object.__new__,
        "unpack_from": layout.unpack_from,
        "pack_all": layout.pack,
        # Past the ``__setattr__`` that keeps others from it, as ``__init__`` does.
        **{f"set_{name}": getattr(cls, name).__set__ for name in names},
    }
    exec("\n".join(lines), made)
    whole = {place.name for place in places} | {"reserved"} == set(names)
    return Code(made["unpack"], made["make"] if whole else None, made["pack"], made["fits"])
