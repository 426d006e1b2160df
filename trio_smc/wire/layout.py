"""The positions of the fields of a CLC or LLC message, read from the annotations of its class.

A message, or a part of one, is a dataclass.  The annotation of each field gives its position, in
the terms of the figures of RFC 7609, A.2 and A.3::

    qp_number: Annotated[int, Span(26, 3)]            # bytes 26-28
    reply: Annotated[bool, Bits(3, 0x80)]             # one bit of byte 3
    max_connections: Annotated[int, Span(35, 1, 2)]   # byte 35, in version 2 only

:func:`laid_out` adds a :class:`Layout`, which reads the annotations at the first use and then
packs, unpacks and checks values.  Encoder, decoder and range checks cannot disagree, because they
share the annotations.  Bits without a field in the version are reserved: sent as zero, and ignored
when received (A.2, A.3).  Numbers are big-endian.  Fields without a position are not packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from functools import cached_property
from struct import Struct
from typing import (
    Annotated,
    Any,
    NamedTuple,
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
    """``size`` whole bytes from ``offset`` on: an int, or bytes.

    ``version`` is the version that has the field; 0: both versions.
    """

    offset: int
    size: int
    version: int = 0


class Bits(NamedTuple):
    """The adjacent bits ``mask`` of the byte at ``offset``: an int, or a bool.

    A bool is True if any of the bits is set.
    """

    offset: int
    mask: int
    version: int = 0


class Slots(NamedTuple):
    """``slots`` slots of ``size`` bytes each from ``offset`` on: a tuple of ints, bytes or items.

    Slots beyond the layout's size exist only if the message is long enough.

    ``count_in`` says where the number of items is.  If it is the name of a field, the field counts
    all items of the sender and may exceed ``slots``: a continuation message has the other items.
    If it is the offset of a byte, the byte is the length of the tuple.
    """

    offset: int
    size: int
    slots: int
    count_in: str | int
    version: int = 0


class _Field(NamedTuple):
    name: str
    kind: type
    start: int
    size: int
    low: int  # the number of the field's lowest bit
    largest: int  # the largest number that fits

    def check(self, message: Any) -> None:
        value = getattr(message, self.name)
        if self.kind is bytes:
            if len(value) != self.size:
                raise ValueError(f"{self.name} has {len(value)} bytes instead of {self.size}")
        elif not 0 <= value <= self.largest:
            raise ValueError(f"{self.name} is {value}, beyond 0..{self.largest}")


class _List(NamedTuple):
    name: str
    item: Any  # int, bytes or a class with a layout
    place: Slots

    def read_untrusted(self, data: bytes, values: dict[str, Any]) -> tuple[Any, ...]:
        offset, size, slots, where, _ = self.place
        room = min(slots, (len(data) - offset) // size)
        count = values[where] if isinstance(where, str) else data[where]
        if count > room and not isinstance(where, str):
            raise ProtocolError(f"{count} {self.name} in a message that holds {room}")
        ends = range(offset + size, offset + size * min(count, room) + 1, size)
        pieces = [data[end - size : end] for end in ends]
        if self.item is int:
            return tuple(int.from_bytes(piece, "big") for piece in pieces)
        if self.item is bytes:
            return tuple(pieces)
        return tuple(self.item(**self.item.LAYOUT.unpack_untrusted(piece)) for piece in pieces)

    def write(self, items: tuple[Any, ...], body: bytearray) -> None:
        offset, size, slots, where, _ = self.place
        if len(items) > slots:
            raise ValueError(f"{len(items)} {self.name}, more than {slots}")
        if not isinstance(where, str):
            body[where] = len(items)
        body[offset : offset + size * len(items)] = b"".join(map(self._packed, items))

    def _packed(self, item: Any) -> bytes:
        if self.item is int:
            return int(item).to_bytes(self.place.size, "big")
        return bytes(item if self.item is bytes else self.item.LAYOUT.pack(item))

    def check(self, value: Any) -> None:
        _, size, slots, where, _ = self.place
        items = getattr(value, self.name)
        count = getattr(value, where) if isinstance(where, str) else len(items)
        if len(items) != min(count, slots):
            raise ValueError(f"{len(items)} {self.name} instead of {min(count, slots)}")
        if self.item is int and any(not 0 <= item < 1 << 8 * size for item in items):
            raise ValueError(f"{self.name} beyond 0..{(1 << 8 * size) - 1}")
        if self.item is bytes and any(len(item) != size for item in items):
            raise ValueError(f"{self.name} are not of {size} bytes each")


_CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}
"""The codes of module `struct` for integers of these sizes."""


class _Bits(NamedTuple):
    """A field that is a part of a cell (see `_Fixed`)."""

    cell: int
    name: str
    kind: type
    low: int
    mask: int
    unit: int  # the number in the cell that encodes the value 1, or True


class _Fixed:
    """All fields of one version but its lists, as one struct.

    A *cell* is an item of the struct: a field, or a byte whose bits are fields.

    Each function is written as Python source and compiled, as `dataclasses` does for constructors.
    A loop over the fields takes four times as long, and each connection packs, unpacks and checks
    six messages.

    Attributes:
      pack_into: writes the fields of a message, which have passed `Layout.check`, into a buffer of
        at least the struct's size.
      unpack_untrusted: the fields by name; the data has at least as many bytes as the struct.
      read_untrusted: the same, into the attributes of a message.
    """

    def __init__(self, placed: Iterable[_Field]) -> None:
        form, names, end = ">", list[str](), 0
        bits: list[_Bits] = []
        long = dict[int, int]()  # integers not in `_CODES`: cell and size
        for field in sorted(placed, key=lambda each: each.start):
            name, kind, start, size, low, largest = field
            if start >= end:
                code = f"{size}s" if kind is bytes else _CODES.get(size)
                if code is None:
                    long[len(names)] = size
                form += f"{start - end}x{code or f'{size}s'}"
                end = start + size
                names.append(name)
            if largest < (1 << 8 * size) - 1:
                mask = largest << low
                unit = mask if kind is bool else 1 << low
                bits.append(_Bits(len(names) - 1, name, kind, low, mask, unit))
        struct = Struct(form)
        values = dict(zip(names, (f"c{cell}" for cell in range(len(names))), strict=True))
        cells = [f"message.{name}" for name in names]
        for cell in {each.cell for each in bits}:
            parts = [f"message.{each.name} * {each.unit}" for each in bits if each.cell == cell]
            cells[cell] = " | ".join(parts)
        for cell, name, kind, low, mask, _ in bits:
            values[name] = f"{kind.__name__}((c{cell} & {mask}) >> {low})"
        for cell, size in long.items():
            cells[cell] += f".to_bytes({size}, 'big')"
            values[names[cell]] = f"int.from_bytes(c{cell}, 'big')"
        got = ", ".join(f"c{cell}" for cell in range(len(names)))
        items = ", ".join(f"{name!r}: {value}" for name, value in values.items())
        targets = ", ".join(f"message.{name}" for name in values)
        compiled = _compiled(
            "def pack_into(body, message):\n"
            f"    pack(body, 0, {', '.join(cells)})\n"
            "def unpack_untrusted(data):\n"
            f"    {got}, = unpack(data)\n"
            f"    return {{{items}}}\n"
            "def read_untrusted(message, data):\n"
            f"    {got}, = unpack(data)\n"
            f"    {targets}, = {', '.join(values.values())},\n",
            pack=struct.pack_into,
            unpack=struct.unpack_from,
        )
        self.pack_into: Callable[[bytearray, Any], None] = compiled["pack_into"]
        self.unpack_untrusted: Callable[[bytes], dict[str, Any]] = compiled["unpack_untrusted"]
        self.read_untrusted: Callable[[Any, bytes], None] = compiled["read_untrusted"]


def _fits(placed: Iterable[_Field]) -> Callable[[Any], bool]:
    """A function that is True if the values of a message's fields pass `_Field.check`."""
    terms = [
        f"len(message.{name}) == {size}" if kind is bytes else f"0 <= message.{name} <= {largest}"
        for name, kind, _, size, _, largest in placed
    ]
    source = f"def fits(message):\n    return {' and '.join(terms) or True}\n"
    fits: Callable[[Any], bool] = _compiled(source)["fits"]
    return fits


def _compiled(source: str, **names: object) -> dict[str, Any]:
    """The functions of ``source``, all of which comes from annotations."""
    exec(source, names)
    return names


class _Form(NamedTuple):
    """The fields of one version, and the defaults of the fields that only the other version has."""

    fixed: _Fixed
    lists: list[_List]
    absent: dict[str, Any]


class Layout:
    """The positions of the fields of one message class in ``size`` bytes, in versions 1 and 2."""

    def __init__(self, cls: type, size: int) -> None:
        self.size = size
        self._cls = cls

    @cached_property
    def _placed(self) -> list[tuple[int, _Field | _List]]:
        # At the first use, because reading the annotations makes the import of the package slower
        # (docs/decisions.md, "what an import makes").
        hints = get_type_hints(self._cls, include_extras=True)
        found = []
        for name in [field.name for field in fields(self._cls)]:
            if get_origin(hints[name]) is Annotated:
                kind, *places = get_args(hints[name])
                found += [(place.version, _field_of(name, kind, place)) for place in places]
        return found

    @cached_property
    def _checks(self) -> tuple[Callable[[Any], bool], list[_Field], list[_List]]:
        # If both versions have a field with one name, that of version 2 counts: it has more room.
        found = {field.name: field for _, field in self._placed}.values()
        fixed = [each for each in found if isinstance(each, _Field)]
        return _fits(fixed), fixed, [each for each in found if isinstance(each, _List)]

    @cached_property
    def _forms(self) -> dict[int, _Form]:
        forms = {}
        for version in (1, 2):
            chosen = [field for number, field in self._placed if number in (0, version)]
            absent = {field.name: field.default for field in fields(self._cls)}
            for each in chosen:
                del absent[each.name]
            forms[version] = _Form(
                _Fixed(each for each in chosen if isinstance(each, _Field)),
                [each for each in chosen if isinstance(each, _List)],
                {name: default for name, default in absent.items() if default is not MISSING},
            )
        return forms

    def unpack_untrusted(self, data: bytes, version: int = 1) -> dict[str, Any]:
        """The fields of a message of at least ``size`` bytes, by name.

        The values need no `check`, because each bit pattern fits its field.  A field that this
        version does not have gets its default.

        Raises:
          ProtocolError: a list is longer than its slots, or than the message.
        """
        fixed, lists, absent = self._forms[version]
        values = fixed.unpack_untrusted(data)
        values.update(absent)
        for each in lists:
            values[each.name] = each.read_untrusted(data, values)
        return values

    def read_untrusted(self, message: Any, data: bytes, version: int = 1) -> None:
        """As `unpack_untrusted`, but into the attributes of ``message``.

        Raises:
          ProtocolError: as `unpack_untrusted`.
        """
        fixed, lists, absent = self._forms[version]
        if lists:
            for name, value in self.unpack_untrusted(data, version).items():
                setattr(message, name, value)
            return
        fixed.read_untrusted(message, data)
        for name, value in absent.items():
            setattr(message, name, value)

    def pack(self, value: Any, version: int = 1) -> bytearray:
        """The bytes of ``value``: ``size`` of them, or more if a list is longer.

        Raises:
          ValueError: a list is longer than this version allows.
        """
        fixed, lists, _ = self._forms[version]
        body = bytearray(self.size)
        fixed.pack_into(body, value)
        for each in lists:
            each.write(getattr(value, each.name), body)
        return body

    def check(self, value: Any) -> None:
        """Raise ValueError if a value does not fit its field."""
        fits, fixed, lists = self._checks
        if not fits(value):
            for field in fixed:  # one of them knows what is wrong
                field.check(value)
        for each in lists:
            each.check(value)


def _field_of(name: str, kind: Any, place: Span | Bits | Slots) -> _Field | _List:
    if isinstance(place, Slots):
        return _List(name, get_args(kind)[0], place)
    if isinstance(place, Span):
        return _Field(name, kind, place.offset, place.size, 0, (1 << 8 * place.size) - 1)
    low = (place.mask & -place.mask).bit_length() - 1
    return _Field(name, kind, place.offset, 1, low, place.mask >> low)


def laid_out(size: int) -> Callable[[_T], _T]:
    """Class decorator above ``@dataclass``: sets ``LAYOUT`` of a message of ``size`` bytes."""

    def decorate(cls: _T) -> _T:
        cls.LAYOUT = Layout(cls, size)
        return cls

    return decorate
