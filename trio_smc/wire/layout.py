"""How fields lie in the fixed-size messages of RFC 7609, appendices A.2 and A.3.

Theory of operation.  A message class is a frozen dataclass whose annotations say where each
field lies, in the words of the RFC's figures::

    qp_number: Annotated[int, Span(26, 3)]     # bytes 26-28
    reply: Annotated[bool, Bits(3, 0x80)]      # one bit of byte 3

:func:`laid_out` reads them once, at import, into a :class:`Layout`, which treats a message as
one big-endian integer: every field is a shift and a mask in it.  So the annotation is the only
place that knows a layout, and encoder, decoder and range checks cannot disagree about it.  For
messages of plain fields and zeros between them, as a connection exchanges them, `_wire_code` writes
the same out.

"Reserved fields must be set to zero and not validated" (A.2), but what decodes must encode back
to the same bytes.  So all bits that no field owns are kept together in the value's ``reserved``:
the message with every field's bits cleared, trailing zero bytes dropped, b"" for ours.

Two kinds of field need a little more.  A flag of several bits (``Bits(3, 0x03)`` on a bool) is
set when any of them is; bits a peer left out of it are noted in ``reserved``.  A list fills as
many of its ``Slots`` as the count byte says; unused slots are reserved bits like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Protocol, TypeVar, get_args, get_origin, get_type_hints

from trio_smc._base.errors import ProtocolError
from trio_smc.wire.layout_code import Code, Place, write_code

__all__ = [
    "Bits",
    "Layout",
    "Slots",
    "Span",
    "laid_out",
]


_T = TypeVar("_T", bound="type[Any]")


@dataclass(frozen=True, slots=True)
class Span:
    """``size`` whole bytes from ``offset`` on: a big-endian int, or bytes."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Bits:
    """The adjacent bits ``mask`` of the byte at ``offset``: an int, or a bool."""

    offset: int
    mask: int


@dataclass(frozen=True, slots=True)
class Slots:
    """``slots`` places of ``size`` bytes each from ``offset`` on: a tuple.

    The byte at ``count_at`` tells how many items the sender has in all.  Where that byte is a
    field of its own it may exceed ``slots`` (the rest follows in a continuation message);
    otherwise it is the length of the tuple.
    """

    offset: int
    size: int
    slots: int
    count_at: int


class _Item(Protocol):
    LAYOUT: ClassVar[Layout]


class _Field:
    """One annotated field: where it lies in the integer, and its Python type."""

    __slots__ = ("kind", "mask", "name", "place", "shift", "size")

    def __init__(self, name: str, kind: type, place: Span | Bits, message_size: int) -> None:
        self.name = name
        self.kind = kind
        if isinstance(place, Span):
            self.size = place.size
            self.shift = 8 * (message_size - place.offset - place.size)
            self.mask = (1 << 8 * place.size) - 1
            self.place = Place(name, kind, place.offset, place.size)
        else:
            low = (place.mask & -place.mask).bit_length() - 1
            self.size = 1
            self.shift = 8 * (message_size - place.offset - 1) + low
            self.mask = place.mask >> low
            self.place = Place(name, kind, place.offset, 1, low, self.mask)

    def write(self, value: int) -> int:
        """The bits of a number, all of them for a flag that is set."""
        if self.kind is bool:
            return self.mask << self.shift if value else 0
        return value << self.shift


class _List:
    """One field with :class:`Slots`."""

    __slots__ = ("count_shift", "counted", "item", "name", "place", "shifts")

    def __init__(self, name: str, item: type, place: Slots, message_size: int) -> None:
        self.name = name
        self.place = place
        self.item: type[_Item] | None = None if item is int else item
        self.shifts = [
            8 * (message_size - place.offset - place.size * (i + 1)) for i in range(place.slots)
        ]
        self.count_shift = 8 * (message_size - place.count_at - 1)
        self.counted = ""  # name of the field that is the count, if there is one

    @property
    def item_mask(self) -> int:
        return (1 << 8 * self.place.size) - 1

    def used(self, count: int) -> int:
        """All bits of the first ``count`` slots."""
        return sum(self.item_mask << shift for shift in self.shifts[:count])

    def read_untrusted(self, whole: int) -> tuple[Any, ...]:
        count = whole >> self.count_shift & 0xFF
        if count > self.place.slots and not self.counted:
            raise ProtocolError(f"{count} {self.name} in a message that holds {self.place.slots}")
        raw = [whole >> shift & self.item_mask for shift in self.shifts[:count]]
        if self.item is None:
            return tuple(raw)
        return tuple(self.item(**self.item.LAYOUT.read_untrusted(number)) for number in raw)

    def write(self, items: tuple[Any, ...]) -> int:
        whole = 0 if self.counted else len(items) << self.count_shift
        for shift, item in zip(self.shifts, items, strict=False):
            whole |= (item if self.item is None else self.item.LAYOUT.write(item)) << shift
        return whole

    def check(self, value: Any) -> None:
        items = getattr(value, self.name)
        slots = self.place.slots
        expected = min(getattr(value, self.counted), slots) if self.counted else len(items)
        if len(items) != expected or expected > slots:
            raise ValueError(f"{len(items)} {self.name} where {min(expected, slots)} belong")
        if self.item is None and any(not 0 <= item <= self.item_mask for item in items):
            raise ValueError(f"{self.name} beyond 0..{self.item_mask}")


class Layout:
    """Where the fields of one message class lie.

    Parameters:
      cls: the dataclass.
      size: bytes that the layout covers, from the message's first byte on.
      head: leading bytes that are no field's and not reserved (type, length); the caller of
        :meth:`pack` gives them.
    """

    def __init__(self, cls: type, size: int, head: int = 0) -> None:
        self.size = size
        self.head = head
        self._fields: list[_Field] = []
        self._lists: list[_List] = []
        # Bits that a value of this class tells exactly, but for lists; a flag of several bits
        # is "loose": the field only tells whether any of them is set.
        self._owned = ((1 << 8 * head) - 1) << 8 * (size - head)
        self._loose: list[_Field] = []
        hints = get_type_hints(cls, include_extras=True)
        names = [field.name for field in fields(cls)]
        for name in names:
            if get_origin(hints[name]) is Annotated:
                kind, place = get_args(hints[name])
                self._add(name, kind, place)
        self._keeps_reserved = "reserved" in names
        # All fields of a kind in one look: messages are made for each connection.
        of_kind = {
            kind: [field for field in self._fields if (field.kind is bytes) is kind]
            for kind in (True, False)
        }
        self._bytes = [(field.name, field.shift, field.mask, field.size) for field in of_kind[True]]
        self._numbers = of_kind[False]
        self._get_bytes = _getter([field.name for field in of_kind[True]])
        self._get_numbers = _getter([field.name for field in of_kind[False]])
        self._code: Code | None = None
        if self._keeps_reserved and not self._lists and not self._loose:
            self._code = write_code(cls, [field.place for field in self._fields], size, head)

    def _add(self, name: str, kind: Any, place: Span | Bits | Slots) -> None:
        if isinstance(place, Slots):
            item = _List(name, get_args(kind)[0], place, self.size)
            for field in self._fields:
                if field.shift == item.count_shift and field.mask == 0xFF:
                    item.counted = field.name
            if not item.counted:
                self._owned |= 0xFF << item.count_shift
            self._lists.append(item)
            return
        field = _Field(name, kind, place, self.size)
        self._fields.append(field)
        if kind is bool and field.mask != 1:
            self._loose.append(field)
        else:
            self._owned |= field.mask << field.shift

    def read_untrusted(self, whole: int) -> dict[str, Any]:
        """The fields of a message given as an integer.  ProtocolError: a list is too long."""
        values: dict[str, Any] = {}
        for name, shift, mask, size in self._bytes:
            values[name] = (whole >> shift & mask).to_bytes(size, "big")
        for field in self._numbers:
            number = whole >> field.shift & field.mask
            values[field.name] = number != 0 if field.kind is bool else number
        owned = self._owned
        for item in self._lists:
            values[item.name] = item.read_untrusted(whole)
            owned |= item.used(len(values[item.name]))
        if self._keeps_reserved:
            rest = whole & ~owned
            for field in self._loose:
                rest ^= field.write(values[field.name])
            values["reserved"] = rest.to_bytes(self.size, "big").rstrip(b"\0")
        return values

    def unpack_untrusted(self, data: bytes) -> dict[str, Any]:
        """The fields of the first ``size`` bytes of ``data``, by name.

        Any bit pattern fits a field; what a class forbids beyond that, its constructor refuses.

        Raises:
          ProtocolError: a list is longer than its slots.
        """
        if self._code is not None:
            values = self._code.unpack(data)
            if values is not None:
                return values
        return self.read_untrusted(int.from_bytes(data[: self.size], "big"))

    def make_untrusted(self, data: bytes) -> Any | None:
        """A message of the first ``size`` bytes of ``data``, as `unpack_untrusted` and the class
        would make it, but for what ``_check`` says; None where those two are to make it."""
        code = self._code
        return code.make(data) if code is not None and code.make is not None else None

    def write(self, value: Any) -> int:
        """The message as an integer, without its head."""
        whole = 0
        for (_, shift, _, _), data in zip(self._bytes, self._get_bytes(value), strict=True):
            whole |= int.from_bytes(data, "big") << shift
        for field, number in zip(self._numbers, self._get_numbers(value), strict=True):
            whole |= field.write(number) if field.kind is bool else number << field.shift
        for item in self._lists:
            whole |= item.write(getattr(value, item.name))
        if self._keeps_reserved:
            whole ^= self._reserved(value)
        return whole

    def pack(self, value: Any, head: bytes) -> bytes:
        """The ``size`` bytes of ``value``; ``head`` are the first of them."""
        if self._code is not None and not value.reserved:
            return self._code.pack(value, head)
        body = self.write(value).to_bytes(self.size, "big")
        return head + body[self.head :]

    def check(self, value: Any) -> None:
        """Raise ValueError where a value does not fit its field, or ``reserved`` meets a field."""
        if self._code is not None and not value.reserved and self._code.fits(value):
            return
        for (name, _, _, size), data in zip(self._bytes, self._get_bytes(value), strict=True):
            if len(data) != size:
                raise ValueError(f"{name} has {len(data)} bytes instead of {size}")
        for field, number in zip(self._numbers, self._get_numbers(value), strict=True):
            if not 0 <= number <= field.mask:
                raise ValueError(f"{field.name} is {number}, beyond 0..{field.mask}")
        for item in self._lists:
            item.check(value)
        if self._keeps_reserved and value.reserved:
            self._check_reserved(value)

    def _reserved(self, value: Any) -> int:
        return int.from_bytes(value.reserved.ljust(self.size, b"\0"), "big")

    def _check_reserved(self, value: Any) -> None:
        if len(value.reserved) > self.size or value.reserved.endswith(b"\0"):
            raise ValueError("reserved is longer than the message or ends with a zero byte")
        rest = self._reserved(value)
        owned = self._owned
        for item in self._lists:
            owned |= item.used(len(getattr(value, item.name)))
        for field in self._loose:
            missing = rest >> field.shift & field.mask
            if missing and (not getattr(value, field.name) or missing == field.mask):
                owned |= field.mask << field.shift
        if rest & owned:
            raise ValueError("reserved has bits that belong to a field")


def _getter(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Returns a tuple of these attributes of an object."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)


def laid_out(size: int, head: int = 0) -> Callable[[_T], _T]:
    """Class decorator, above ``@dataclass``: sets ``LAYOUT``.  Parameters as :class:`Layout`."""

    def decorate(cls: _T) -> _T:
        cls.LAYOUT = Layout(cls, size, head)
        return cls

    return decorate
