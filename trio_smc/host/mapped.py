"""Reads and writes memory of the program that may lie behind the end of a mapped file.

A mapping may be longer than its file: every process that may write the file can shorten it, and a
full file system has no page for a hole.  If this process touches such a page, the system ends it
with SIGBUS.  The system itself finds out without harm, so a send or receive over TCP raises OSError
with EFAULT.  SMC-R copies the program's bytes in this process.  So the system copies the bytes of a
buffer that may be a mapped file: between the buffer and a file in memory, and this process between
that file and the ring.

`bytes`, `bytearray`, `array.array`, `io.BytesIO` and arrays of numpy that own their memory are
never mapped files.  Any other object with a buffer may be one.
"""

from __future__ import annotations

import array
import errno
import io
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, TypeVar

from trio_smc.host.overcommit import check_file_size

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["PIECE", "copies_of", "copy_of", "may_fault", "store"]

_Result = TypeVar("_Result")

PIECE: Final = 1 << 20
"""Bytes that callers copy at a time, so that a large mapped file does not fill the memory.
Chosen."""
_UNMAPPED: Final = (bytes, bytearray, array.array, type(io.BytesIO().getbuffer().obj))
_BASE: Final = "base"
"""The attribute of an array of numpy: the object whose memory it uses, or None."""
_LONGEST_CHAIN: Final = 16
"""Owners that are asked.  Chosen: numpy itself leads to the first owner in two or three steps, but
an object of the program may name itself, for ever."""


def may_fault(buffer: Buffer) -> bool:
    """True if an access to the memory of ``buffer`` may end this process."""
    try:
        owner: object = memoryview(buffer).obj
    except TypeError:
        return False  # not a bytes-like object, as the caller will find
    for _ in range(_LONGEST_CHAIN):
        if isinstance(owner, _UNMAPPED):
            return False
        if isinstance(owner, memoryview):
            owner = owner.obj
        elif not hasattr(owner, _BASE):
            return True
        else:
            owner = getattr(owner, _BASE)
            if owner is None:
                return False
    return True


def copy_of(view: memoryview) -> bytes:
    """The bytes of ``view``, or those before the first page that is not there.

    Args:
      view: C-contiguous; not empty.

    Raises:
      OSError: EFAULT: the first page is not there.
    """
    return _through_file(lambda file: _copied_out(file, view), view.tobytes, view.nbytes)


def copies_of(view: memoryview) -> Iterator[bytes]:
    """Copies of ``view`` of at most `PIECE` bytes, in order.

    Raises:
      OSError: EFAULT: a page is not there; all bytes before it have been copied.
    """
    start = 0
    while start < len(view):
        piece = copy_of(view[start : start + PIECE])
        yield piece
        start += len(piece)


def store(data: bytes, view: memoryview) -> None:
    """Write ``data`` to the start of ``view``, which is C-contiguous and long enough.

    Raises:
      OSError: EFAULT: a page is not there.  Earlier pages may have been written.
    """

    def directly() -> None:
        view.cast("B")[: len(data)] = data

    _through_file(lambda file: _copied_in(file, data, view), directly, len(data))


def _copied_out(file: int, view: memoryview) -> bytes:
    count = os.pwrite(file, view, 0)
    return os.pread(file, count, 0)


def _copied_in(file: int, data: bytes, view: memoryview) -> None:
    os.pwrite(file, data, 0)
    with view.cast("B") as whole:
        count = 0
        while count < len(data):
            with whole[count : len(data)] as rest:
                count += os.preadv(file, [rest], count)


def _through_file(
    through: Callable[[int], _Result], directly: Callable[[], _Result], size: int
) -> _Result:
    """Have the system copy; if it has no file of that size or no memory, copy ``directly``."""
    try:
        check_file_size(size)
        file = os.memfd_create("trio-smc-copy", os.MFD_CLOEXEC)
    except OSError:
        return directly()
    try:
        return through(file)
    except OSError as error:
        if error.errno == errno.EFAULT:
            raise
        return directly()
    finally:
        os.close(file)
