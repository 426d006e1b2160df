"""Where the fields of an LLC message lie, read from the annotations of its class.

A message class is a frozen dataclass whose annotations say where each field lies, in the words of
the figures of RFC 7609, A.3::

    qp_number: Annotated[int, Span(26, 3)]     # bytes 26-28
    reply: Annotated[bool, Bits(3, 0x80)]      # one bit of byte 3

:func:`laid_out` reads them once, at import, into a :class:`Layout`, which packs, unpacks and checks
values.  So the annotation is the only place that knows a layout, and encoder, decoder and range
checks cannot disagree about it.  Bits that no field owns are reserved: zero from us, and never
looked at (A.3).  Numbers are big-endian.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import (
    Annotated,
    Any,
    ClassVar,
    NamedTuple,
    Protocol,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)  # fmt: skip

from trio_smc._base.errors import ProtocolError

__all__ = [
    "Bits",
    "Layout",
    "Slots",
    "Span",
    "laid_out",
]


_T = TypeVar("_T", bound="type[Any]")


class Span(NamedTuple):
    """``size`` whole bytes from ``offset`` on: an int, or bytes."""

    offset: int
    size: int


class Bits(NamedTuple):
    """The adjacent bits ``mask`` of the byte at ``offset``: an int, or a bool, which is set when
    any of them is."""

    offset: int
    mask: int


class Slots(NamedTuple):
    """``slots`` places of ``size`` bytes each from ``offset`` on: a tuple of ints or of items.

    ``count_in`` tells how many items the sender has in all.  It is the name of a field, which may
    exceed ``slots`` (the rest follows in a continuation message), or the offset of a byte, which
    is the length of the tuple.
    """

    offset: int
    size: int
    slots: int
    count_in: str | int


class _Item(Protocol):
    LAYOUT: ClassVar[Layout]


class _Field(NamedTuple):
    name: str
    kind: type
    start: int
    size: int
    low: int  # of the field's bits: the lowest
    largest: int  # number that fits

    def read(self, data: bytes) -> int | bytes:
        piece = data[self.start : self.start + self.size]
        if self.kind is bytes:
            return piece
        number = int.from_bytes(piece, "big") >> self.low & self.largest
        return number != 0 if self.kind is bool else number

    def write(self, value: Any, body: bytearray) -> None:
        if self.kind is bool:
            value = self.largest if value else 0
        if self.size == 1:
            body[self.start] |= value << self.low
        else:
            piece = value if self.kind is bytes else value.to_bytes(self.size, "big")
            body[self.start : self.start + self.size] = piece

    def check(self, value: Any) -> None:
        if self.kind is bytes:
            if len(value) != self.size:
                raise ValueError(f"{self.name} has {len(value)} bytes instead of {self.size}")
        elif not 0 <= value <= self.largest:
            raise ValueError(f"{self.name} is {value}, beyond 0..{self.largest}")


class _List(NamedTuple):
    name: str
    item: type[_Item] | None  # None: ints
    place: Slots

    def read_untrusted(self, data: bytes, values: dict[str, Any]) -> tuple[Any, ...]:
        offset, size, slots, where = self.place
        count = values[where] if isinstance(where, str) else data[where]
        if count > slots and not isinstance(where, str):
            raise ProtocolError(f"{count} {self.name} in a message that holds {slots}")
        ends = range(offset + size, offset + size * min(count, slots) + 1, size)
        pieces = [data[end - size : end] for end in ends]
        if self.item is None:
            return tuple(int.from_bytes(piece, "big") for piece in pieces)
        return tuple(self.item(**self.item.LAYOUT.unpack_untrusted(piece)) for piece in pieces)

    def write(self, items: tuple[Any, ...], body: bytearray) -> None:
        offset, size, _, where = self.place
        if not isinstance(where, str):
            body[where] = len(items)
        pieces = [
            each.to_bytes(size, "big") if self.item is None else self.item.LAYOUT.pack(each)
            for each in items
        ]
        body[offset : offset + size * len(items)] = b"".join(pieces)

    def check(self, value: Any) -> None:
        _, size, slots, where = self.place
        items = getattr(value, self.name)
        count = getattr(value, where) if isinstance(where, str) else len(items)
        if len(items) != min(count, slots):
            raise ValueError(f"{len(items)} {self.name} where {min(count, slots)} belong")
        if self.item is None and any(not 0 <= item < 1 << 8 * size for item in items):
            raise ValueError(f"{self.name} beyond 0..{(1 << 8 * size) - 1}")


class Layout:
    """Where the fields of one message class lie in ``size`` bytes."""

    def __init__(self, cls: type, size: int) -> None:
        self.size = size
        self._fields: list[_Field] = []
        self._lists: list[_List] = []
        hints = get_type_hints(cls, include_extras=True)
        for name in [field.name for field in fields(cls)]:
            if get_origin(hints[name]) is not Annotated:
                continue
            kind, place = get_args(hints[name])
            if isinstance(place, Slots):
                item = get_args(kind)[0]
                self._lists.append(_List(name, None if item is int else item, place))
            elif isinstance(place, Span):
                largest = (1 << 8 * place.size) - 1
                self._fields.append(_Field(name, kind, place.offset, place.size, 0, largest))
            else:
                low = (place.mask & -place.mask).bit_length() - 1
                self._fields.append(_Field(name, kind, place.offset, 1, low, place.mask >> low))

    def unpack_untrusted(self, data: bytes) -> dict[str, Any]:
        """The fields of a message of ``size`` bytes, by name.

        Any bit pattern fits a field; what a class forbids beyond that, its constructor refuses.

        Raises:
          ProtocolError: a list is longer than its slots.
        """
        values: dict[str, Any] = {field.name: field.read(data) for field in self._fields}
        for item in self._lists:
            values[item.name] = item.read_untrusted(data, values)
        return values

    def pack(self, value: Any, head: bytes = b"") -> bytes:
        """The ``size`` bytes of ``value``; ``head`` are the first of them."""
        body = bytearray(self.size)
        body[: len(head)] = head
        for field in self._fields:
            field.write(getattr(value, field.name), body)
        for item in self._lists:
            item.write(getattr(value, item.name), body)
        return bytes(body)

    def check(self, value: Any) -> None:
        """Raise ValueError where a value does not fit its field."""
        for field in self._fields:
            field.check(getattr(value, field.name))
        for item in self._lists:
            item.check(value)


def laid_out(size: int) -> Callable[[_T], _T]:
    """Class decorator, above ``@dataclass``: sets ``LAYOUT``, of a message of ``size`` bytes."""

    def decorate(cls: _T) -> _T:
        cls.LAYOUT = Layout(cls, size)
        return cls

    return decorate
