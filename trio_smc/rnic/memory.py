"""Memory that peers write into: a sealed memfd, so that another process can map the same pages.

`Memory` is ours; `PeerMemory` is a peer's, mapped from a descriptor that came over a socket.
A mapping needs no descriptor.  `mmap.mmap` keeps a copy of the one it is given, and without
asking before Python 3.13; a server with hundreds of link groups would run out of them.

Theory of operation: pages
--------------------------
A memfd has no page before one is touched, by this process or by a peer that maps it.  Where the
system may refuse a page then (`host.overcommit`), the process that touches it is killed by SIGBUS.
So the owner allocates all pages before they are touched (`Memory.commit`): those of a ring when it
is made, those of an RMB element when it is handed out.  Pages that `Memory.wipe` gave back have
to be allocated anew.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable

from trio_smc._base.errors import ProtocolError
from trio_smc._base.resources import is_lack
from trio_smc.host.overcommit import commit_is_limited

__all__ = ["QUICK_TO_FREE", "Memory", "PeerMemory", "is_quick_to_free"]

_ZEROES = memoryview(bytes(64 * 1024))
QUICK_TO_FREE = 32 << 20  # bytes, in about 2 ms; 2 GiB took 140 ms
_HUGE_PAGE = 2 << 20  # the last page of a memfd may be one ("shmem_enabled")
_BLOCK = 512  # unit of st_blocks (stat(3type))
if sys.platform == "linux":  # elsewhere there is no RNIC, and no caller
    import fcntl

    _SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    _MAP_FIXED = 0x10  # linux/include/uapi/linux/mman.h
    _mmap = ctypes.CDLL(None, use_errno=True).mmap
    _mmap.restype = ctypes.c_void_p
    _mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
    ]  # fmt: skip


def is_quick_to_free(fd: int) -> bool:
    """True if the last close of a memfd frees little memory.

    A memfd may have pages behind its end: fallocate(2) with FALLOC_FL_KEEP_SIZE allocates them as
    long as the memfd is not sealed against growing.
    """
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_GROW:
        return False
    status = os.fstat(fd)
    return max(status.st_size, status.st_blocks * _BLOCK) <= QUICK_TO_FREE


def _address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def _mapped(fd: int, size: int) -> mmap.mmap:
    """A shared mapping that keeps no descriptor.  Raises OSError, ValueError, OverflowError."""
    if sys.version_info >= (3, 13):
        return mmap.mmap(fd, size, trackfd=False)
    # One anonymous page, the file's first page in its place at once, then the rest by mremap(2).
    # A placeholder of the full size would count against the commit limit, unlike shared memory:
    # where vm.overcommit_memory is 2, MAP_NORESERVE has no effect.  A placeholder of PROT_NONE
    # would not count, but makes an `mmap` object that cannot be written to.
    first = min(size, mmap.PAGESIZE)
    mapping = mmap.mmap(-1, first, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = _address(mapping)
    try:
        if _mmap(address, first, access, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) != address:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        if size > first:
            mapping.resize(size)
    except BaseException:
        mapping.close()
        raise
    return mapping


class Memory:
    """A zeroed, page-aligned piece of shared memory of fixed size.

    Attributes:
      fd: the memfd, sealed against shrinking and growing; -1 when it is closed.
      size: bytes.
      view: the whole memory as a writable memoryview of bytes.
      pinned: an adapter writes to these very pages, whatever the memfd holds; it sets this itself.
    """

    pinned = False

    def __init__(self, size: int, *, name: str = "trio_smc") -> None:
        if size <= 0:
            raise ValueError("size must be positive")
        self.size = size
        self.fd: int = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            self._map = _mapped(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise
        self.view: memoryview[int] = memoryview(self._map)
        self._slices: list[memoryview] = []
        self._committed = False  # some of it was allocated by `commit`

    def commit(self, start: int, length: int) -> bool:
        """Allocate the pages of ``length`` bytes from ``start``, if the system might refuse one of
        them when it is first touched.

        Takes 0.1 ms for each MiB.  `wipe` undoes it.

        Returns:
          True: they are allocated now.  False: no page is refused on this system.

        Raises:
          OSError: the commit limit (ENOSPC) or another limit does not allow it; no page is left
            allocated then.
        """
        if self.pinned or not commit_is_limited():
            return False
        self._committed = True
        os.posix_fallocate(self.fd, start, length)
        return True

    def slice(self, start: int, length: int) -> memoryview:
        """A view of ``length`` bytes from ``start`` that `close` releases."""
        piece = self.view[start : start + length]
        self._slices.append(piece)
        return piece

    @property
    def address(self) -> int:
        """Where this process sees the memory; for RNICs that take virtual addresses."""
        return _address(self._map)

    def zero(self, start: int, length: int) -> None:
        """Zero ``length`` bytes from ``start``; the pages stay in memory, or come into being."""
        view = self.view
        while length > 0:
            piece = min(length, len(_ZEROES))
            view[start : start + piece] = _ZEROES[:piece]
            start += piece
            length -= piece

    def wipe(self, start: int, end: int, most: int) -> int:
        """Zero some of the bytes from ``start`` to ``end``; returns where to go on: there all is
        zero when that is ``end``.

        The pages go back to the system, so that the next use costs 25 to 40 times as much as that
        of memory that was zeroed in place, on each side that has it mapped.  Pages that nobody
        wrote to cost nothing, unless `commit` allocated some: SEEK_DATA does not find those, and
        they go back, too.  Pinned memory is zeroed in place.

        Args:
          most: bytes that are zeroed at most, which is what takes the time.
        """
        if not self.pinned and not self._committed:
            try:
                start = os.lseek(self.fd, start, os.SEEK_DATA)
            except OSError:  # ENXIO: no page from here to the end of the memory
                return end
        if start >= end:
            return end
        end = min(end, start + most)
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end - end % mmap.PAGESIZE
        if self.pinned or first >= last:
            self.zero(start, end - start)
        else:
            self._map.madvise(mmap.MADV_REMOVE, first, last - first)
            self.zero(start, first - start)
            self.zero(last, end - last)
        return end

    def close_descriptor(self) -> None:
        """Nobody else will be given the memory, which stays mapped.  Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def close(self) -> None:
        """Unmap and close; views of it become invalid.  Idempotent."""
        for piece in self._slices:
            piece.release()
        self._slices.clear()
        self.view.release()
        self._map.close()
        self.close_descriptor()


class PeerMemory:
    """Memory of a peer process, mapped for writing.

    Attributes:
      size: bytes.
      view: the whole memory as a writable memoryview of bytes.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self._map = _mapped(fd, size)
        self.view: memoryview[int] = memoryview(self._map)
        self._casts: list[memoryview] = []

    @classmethod
    def map_untrusted(cls, fd: int, size: int) -> PeerMemory:
        """Map ``size`` bytes of a memfd that a peer sent; ``fd`` stays the caller's to close.

        Memory that could shrink would kill this process with SIGBUS at the next access, so the
        seal and the size are checked first; so would huge pages that the system has run out of.
        Only a memfd and a tmpfs file have seals: fstat(2) and mmap(2) of others may wait.

        Raises:
          ProtocolError: it cannot be mapped, or not safely.
          OSError: this process lacks memory or address space (`is_lack`); try again later.
        """
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            if not seals & fcntl.F_SEAL_SHRINK:
                raise ProtocolError("shared memory that is not sealed against shrinking")
            if os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:
                raise ProtocolError("shared memory of huge pages")
            status = os.fstat(fd)
            there = status.st_size
            if not 0 < size <= there:
                raise ProtocolError("shared memory that is smaller than announced")
            allocated = status.st_blocks * _BLOCK
            if not seals & fcntl.F_SEAL_GROW or size != there or allocated > size + _HUGE_PAGE:
                # This process may be the last to unmap it, which frees all of its pages, also
                # those behind its end.
                raise ProtocolError("shared memory that is larger than announced")
            return cls(fd, size)
        except (OSError, ValueError, OverflowError) as problem:
            if isinstance(problem, OSError) and is_lack(problem):
                raise
            raise ProtocolError(f"shared memory that cannot be mapped: {problem}") from problem

    def cast(self, start: int, length: int, code: str) -> memoryview:
        """A view of part of it as native integers (``code`` as in `struct`)."""
        piece = self.view[start : start + length]
        words = piece.cast(code)  # type: ignore[call-overload]
        piece.release()
        self._casts.append(words)
        return words  # type: ignore[no-any-return]

    def close(self, later: Callable[[Callable[[], object]], object] | None = None) -> None:
        """Unmap; views of it become invalid.  Idempotent.

        ``later``: calls what it is given in another thread; used if there is much to free, should
        this process be the last that maps the memory.
        """
        for words in self._casts:
            words.release()
        self._casts.clear()
        self.view.release()
        if later is None or self.size <= QUICK_TO_FREE or self._map.closed:
            self._map.close()
        else:
            later(self._map.close)
