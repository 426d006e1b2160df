"""Buffers of many shapes and formats, for calls that send and receive."""

from __future__ import annotations

import array
import ctypes
import mmap
from collections.abc import Callable
from typing import Any, Final

__all__ = ["ALIGNMENT", "SENT", "WRITABLE"]

ALIGNMENT: Final = 48
"""The length of the data is a multiple of this number of bytes."""


class _Record(ctypes.Structure):
    _fields_ = (("number", ctypes.c_uint16), ("bytes", ctypes.c_uint8 * 2))


def _mapped(data: bytes) -> mmap.mmap:
    mapped = mmap.mmap(-1, len(data))
    mapped[:] = data
    return mapped


def _typed(data: bytes, item: Any, shape: tuple[int, ...] = ()) -> Any:
    """A ctypes array of these items, with the items of ``shape`` in each."""
    for length in reversed(shape):
        item *= length
    return (item * (len(data) // ctypes.sizeof(item))).from_buffer_copy(data)


def _single(data: bytes) -> ctypes.Structure:
    """A single record that contains all data: a buffer with one item and no dimension."""
    fields = [("bytes", ctypes.c_uint8 * len(data))]
    kind: type[ctypes.Structure] = type("Single", (ctypes.Structure,), {"_fields_": fields})
    return kind.from_buffer_copy(data)


def _spread(data: bytes, item: str) -> memoryview:
    """A view of every second item of an array."""
    width = array.array(item).itemsize
    spread = bytearray(2 * len(data))
    for at in range(width):
        spread[at :: 2 * width] = data[at::width]
    return memoryview(array.array(item, bytes(spread)))[::2]


WRITABLE: Final[dict[str, Callable[[bytes], Any]]] = {
    "bytearray": bytearray,
    "view of a bytearray": lambda data: memoryview(bytearray(data)),
    "part of a view": lambda data: memoryview(bytearray(b"xx" + data + b"xx"))[2:-2],
    "memory map": _mapped,
    "signed bytes": lambda data: memoryview(bytearray(data)).cast("b"),
    "characters": lambda data: memoryview(bytearray(data)).cast("c"),
    "array of short integers": lambda data: array.array("H", data),
    "array of integers": lambda data: array.array("I", data),
    "array of doubles": lambda data: array.array("d", data),
    "view of doubles": lambda data: memoryview(array.array("d", data)),
    "part of a view of integers": lambda data: memoryview(array.array("I", data + data))[
        : len(data) // 4
    ],
    "two dimensions": lambda data: memoryview(bytearray(data)).cast("B", [3, len(data) // 3]),
    "three dimensions": lambda data: memoryview(bytearray(data)).cast("B", [2, 2, len(data) // 4]),
    "two dimensions of integers": lambda data: memoryview(bytearray(data)).cast(
        "I", [3, len(data) // 12]
    ),
    "foreign byte order": lambda data: _typed(data, ctypes.c_uint32.__ctype_be__),
    "three dimensions of a foreign byte order": lambda data: _typed(
        data, ctypes.c_uint16.__ctype_be__, (2, 3)
    ),
    "records": lambda data: _typed(data, _Record),
    "no dimension": _single,
}
"""Writable buffers in C order.  Each function makes a buffer with the given contents."""

SENT: Final[dict[str, Callable[[bytes], Any]]] = {
    "bytes": bytes,
    "view of bytes": memoryview,
    "read-only integers": lambda data: memoryview(data).cast("I"),
    **WRITABLE,
    "every second byte": lambda data: _spread(data, "B"),
    "every second integer": lambda data: _spread(data, "I"),
    "backwards": lambda data: memoryview(data[::-1])[::-1],
    "backwards in rows": lambda data: memoryview(
        b"".join(data[at : at + 24] for at in range(len(data) - 24, -1, -24))
    ).cast("B", [len(data) // 24, 24])[::-1],
}
"""All kinds of buffers that a stream sends.  Each function makes one from the bytes that have to
arrive."""
