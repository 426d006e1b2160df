"""Memory that peers write into: a sealed memfd, so that another process can map the same pages.

`Memory` belongs to this process.  `PeerMemory` belongs to a peer and is mapped from a descriptor
that was received over a socket.  A mapping needs no descriptor.  But `mmap.mmap` keeps a copy of
the descriptor that it gets, before Python 3.13 in any case, and a server with hundreds of link
groups would run out of descriptors (`map_descriptor`).

Theory of operation: progress words
-----------------------------------
A process may be killed after it has written data into a peer's memory and before it has announced
the data.  It may also be killed before it has read what the peer has sent, or after it has read the
data and before it has announced that.  The memfd of memory made with ``progress`` has one page
more, behind the memory: the *progress words*, two for each element of the memory.  The peer stores
there how many bytes it has *written* into the element so far, and how many bytes it has *taken*
out of its own element of the same connection.  The owner reads the words when the peer's process
has ended.  The page is not part of the memory region, so no RDMA write reaches it.

Theory of operation: pages
--------------------------
A page of a memfd is allocated when this process, or a peer that maps the memfd, first touches it.
If the system refuses the page (`host.overcommit`), SIGBUS kills the process that touches it.  So
the owner allocates all pages in advance (`Memory.commit`): the pages of a ring when the ring is
created, those of an RMB element when a connection gets the element.  Pages that `Memory.wipe` has
given back to the system must be allocated again.

A mapping is larger than the pages that it uses: an RMB of 1 GiB may have one page.  A core dump
would allocate the others, and a system that gives shared memory huge pages ("shmem_enabled") would
take one for a byte, so `map_descriptor` excludes both by madvise(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Callable

from trio_smc._base.errors import ProtocolError
from trio_smc._base.resources import is_lack
from trio_smc.host.overcommit import check_file_size, may_refuse_pages
from trio_smc.rnic.words import Words, shared_words

__all__ = [
    "NOT_SHOWN",
    "PROGRESS_SIZE",
    "PROGRESS_WORDS",
    "QUICK_TO_FREE",
    "Memory",
    "PeerMemory",
    "is_quick_to_free",
    "map_descriptor",
]

_ZEROES = memoryview(bytes(64 * 1024))
QUICK_TO_FREE = 32 << 20
"""Bytes that the Trio thread may free in one call.  `Memory.close` of 32 MiB whose pages were
written takes 2.1 ms of thread time (Linux 6.18, least of 8 runs), and time grows with size: 2 GiB
took 140 ms."""
_HUGE_PAGE = 2 << 20  # the last page of a memfd may be one ("shmem_enabled")
_BLOCK = 512  # unit of st_blocks (stat(3type))
PROGRESS_SIZE = 4096
"""Bytes of the progress words, which begin a page of their own."""
PROGRESS_WORDS = PROGRESS_SIZE // 16
"""The number of elements that have progress words.  Element n has word n for the bytes written, and
word ``PROGRESS_WORDS + n`` for the bytes taken."""
NOT_SHOWN = (1 << 64) - 1
"""The word for the bytes taken, before the peer has stored it."""
if sys.platform == "linux":  # other systems have no RNIC, and no caller
    import fcntl

    _SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    _MAP_FIXED = 0x10  # linux/include/uapi/linux/mman.h
    _libc = ctypes.CDLL(None, use_errno=True)
    _mmap = _libc.mmap
    _mmap.restype = ctypes.c_void_p
    _mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
    ]  # fmt: skip
    _munlock = _libc.munlock
    _munlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    # In musl fallocate takes 64-bit offsets, and there is no fallocate64.
    _fallocate = getattr(_libc, "fallocate64", None) or _libc.fallocate
    _fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    _KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02  # linux/include/uapi/linux/falloc.h


def is_quick_to_free(fd: int) -> bool:
    """True if the last close of a memfd frees little memory.

    A memfd may have pages behind its end: fallocate(2) with FALLOC_FL_KEEP_SIZE allocates them as
    long as the memfd is not sealed against growing.
    """
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_GROW:
        return False
    status = os.fstat(fd)
    return max(status.st_size, status.st_blocks * _BLOCK) <= QUICK_TO_FREE


def _mapped_size(size: int, *, progress: bool) -> int:
    """Bytes of the memfd of ``size`` bytes of memory; ``progress``: with progress words."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE + PROGRESS_SIZE if progress else size


def _address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def map_descriptor(fd: int, size: int) -> mmap.mmap:
    """A shared mapping that keeps no descriptor, and whose untouched pages take no memory.

    Raises OSError, ValueError, OverflowError.
    """
    # Map one anonymous page, replace it by the file's first page, and add the rest by mremap(2).
    # A placeholder of the full size would count against the commit limit, unlike shared memory:
    # if vm.overcommit_memory is 2, MAP_NORESERVE has no effect.  A placeholder of PROT_NONE would
    # not count, but its `mmap` object would be read-only.
    # A program may have locked its memory (mlockall(2), MCL_FUTURE).  Then mmap(2) allocates all
    # pages of a mapping, but mremap(2) none of a mapping that is unlocked.
    first = min(size, mmap.PAGESIZE)
    mapping = mmap.mmap(-1, first, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = _address(mapping)
    try:
        if _mmap(address, first, access, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) != address:
            raise _last_error()
        if size > first:
            _munlock(address, first)
            mapping.resize(size)
        for advice in (mmap.MADV_DONTDUMP, mmap.MADV_NOHUGEPAGE):
            with contextlib.suppress(OSError):  # the system does not know this advice
                mapping.madvise(advice)
    except BaseException:
        mapping.close()
        raise
    return mapping


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def _give_back(fd: int, start: int, length: int) -> None:
    """Give the pages of a memfd back to the system; they are zero then.

    MADV_REMOVE does the same, but QEMU's user mode ignores that advice and returns success.
    """
    if _fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, start, length):
        raise _last_error()


class Memory:
    """A zeroed, page-aligned piece of shared memory of fixed size.

    Attributes:
      fd: the memfd, sealed against shrinking and growing; -1 after it was closed.
      size: bytes.
      view: the whole memory as a writable memoryview of bytes, without progress words.
      mapped: bytes of the memfd.
      has_progress: the last `PROGRESS_SIZE` bytes of the memfd are progress words.
      pinned: an adapter has these pages registered and writes to them even if the memfd drops them.
        The adapter's code sets it.
    """

    pinned = False
    has_progress: bool = False
    _progress: Words | None = None

    def __init__(self, size: int, *, name: str = "trio_smc", progress: bool = False) -> None:
        """``progress``: add progress words behind the pages of ``size`` bytes."""
        if size <= 0:
            raise ValueError("size must be positive")
        self.size = size
        self.has_progress = progress
        self.mapped: int = _mapped_size(size, progress=progress)
        check_file_size(self.mapped)
        self.fd: int = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.mapped)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            self._map = map_descriptor(self.fd, self.mapped)
        except BaseException:
            os.close(self.fd)
            raise
        whole = memoryview(self._map)
        self.view: memoryview[int] = whole[:size]
        self._slices: list[memoryview | Words] = []
        if progress:
            self._progress = self._words(whole[self.mapped - PROGRESS_SIZE :])
        whole.release()
        self._committed = False  # `commit` has allocated some pages
        self._progress_committed = False

    def commit(self, start: int, length: int) -> bool:
        """Allocate the pages of ``length`` bytes from ``start``, if the system could refuse a page
        at its first access.

        Takes 0.1 ms for each MiB (docs/decisions.md).  `wipe` undoes it.

        Returns:
          True: the pages are allocated.  False: this system refuses no page.

        Raises:
          OSError: the commit limit (ENOSPC) or another limit does not allow it; then no page stays
            allocated.
        """
        if self.pinned or not may_refuse_pages():
            return False
        self._committed = True
        os.posix_fallocate(self.fd, start, length)
        return True

    def written(self, number: int) -> int:
        """The bytes that the peer has written into an element, by its progress word, which the peer
        may change at any time.

        0 if the memory has no progress words.
        """
        return 0 if self._progress is None else self._progress[number]

    def taken(self, number: int) -> int:
        """The bytes that the peer has taken out of its own element, by its progress word, which the
        peer may change at any time.

        `NOT_SHOWN` if the peer has not stored it, or if the memory has no progress words.
        """
        return NOT_SHOWN if self._progress is None else self._progress[PROGRESS_WORDS + number]

    def clear_progress(self, number: int) -> None:
        """Set the progress words of an element to 0 and `NOT_SHOWN`; no-op if there are none.

        Raises:
          OSError: as `commit`.
        """
        if self._progress is not None:
            if not self._progress_committed:
                self._progress_committed = True
                if not self.pinned and may_refuse_pages():
                    start = self.mapped - PROGRESS_SIZE
                    os.posix_fallocate(self.fd, start, PROGRESS_SIZE)
            self._progress[number] = 0
            self._progress[PROGRESS_WORDS + number] = NOT_SHOWN

    def slice(self, start: int, length: int) -> memoryview:
        """A view of ``length`` bytes from ``start``; `close` releases it."""
        piece = self.view[start : start + length]
        self._slices.append(piece)
        return piece

    def words(self, start: int, length: int) -> Words:
        """The words in ``length`` bytes from ``start``; `close` releases them."""
        return self._words(self.view[start : start + length])

    def _words(self, piece: memoryview) -> Words:
        words = shared_words(piece)
        self._slices.append(words)
        return words

    @property
    def address(self) -> int:
        """The virtual address of the memory in this process, for RNICs that need one."""
        return _address(self._map)

    def zero(self, start: int, length: int) -> None:
        """Zero ``length`` bytes from ``start`` in place.  Missing pages are allocated."""
        view = self.view
        while length > 0:
            piece = min(length, len(_ZEROES))
            view[start : start + piece] = _ZEROES[:piece]
            start += piece
            length -= piece

    def wipe(self, start: int, end: int, most: int) -> int:
        """Zero some of the bytes from ``start`` to ``end``; returns the offset at which the next
        call has to start.  If that is ``end``, all bytes are zero.

        The pages are given back to the system.  Their next use then costs at least ten times as
        much as after zeroing in place, in each process that maps them: to write 1 MiB took 328 µs
        instead of 27 (thread time, least of 20).  Pages that were never written are
        skipped at no cost, unless `commit` has allocated some: SEEK_DATA does not report those, so
        all pages are given back then.  Pinned memory is zeroed in place.

        Args:
          most: bytes to zero at most in this call; zeroing is what takes time.
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
            _give_back(self.fd, first, last - first)
            self.zero(start, first - start)
            self.zero(last, end - last)
        return end

    def close_descriptor(self) -> None:
        """Close `fd`, so that no other process can map the memory; it stays mapped here.
        Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def close(self) -> None:
        """Unmap the memory, close `fd` and invalidate all views.  Idempotent.

        If a part is lent to the application (`Receiver.lend`), the memory stays mapped until the
        application has given up its last view.
        """
        for piece in self._slices:
            piece.release()
        self._slices.clear()
        self.view.release()
        with contextlib.suppress(BufferError):
            self._map.close()
        self.close_descriptor()


class PeerMemory:
    """Memory of a peer process, mapped for writing.

    Attributes:
      size: bytes.
      view: the whole memory as a writable memoryview of bytes, without progress words.
      mapped: bytes of the memfd.
      progress: the progress words; None if the memory has none.
    """

    progress: Words | None = None

    def __init__(self, fd: int, size: int, *, progress: bool = False) -> None:
        self.size = size
        self.mapped: int = _mapped_size(size, progress=progress)
        self._map = map_descriptor(fd, self.mapped)
        self._kept: list[Words] = []
        whole = memoryview(self._map)
        self.view: memoryview[int] = whole[:size]
        if progress:
            self.progress = self._words(whole[self.mapped - PROGRESS_SIZE :])
        whole.release()

    @classmethod
    def map_untrusted(cls, fd: int, size: int, *, progress: bool = False) -> PeerMemory:
        """Map memory of ``size`` bytes whose memfd a peer sent.  The caller closes ``fd``.

        If the peer could shrink the memory, or if the system had run out of huge pages for it, the
        next access would kill this process with SIGBUS.  So the seals, the page size and the size
        are checked first.  The seals come before all else: only a memfd and a tmpfs file have them,
        and fstat(2) and mmap(2) of another file may block.

        Raises:
          ProtocolError: the memory cannot be mapped, or not safely.
          OSError: this process lacks memory or address space (`is_lack`); try again later.
        """
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            if not seals & fcntl.F_SEAL_SHRINK:
                raise ProtocolError("the shared memory is not sealed against shrinking")
            if os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:
                raise ProtocolError("the shared memory has huge pages")
            status = os.fstat(fd)
            there, mapped = status.st_size, _mapped_size(size, progress=progress)
            if size <= 0 or mapped > there:
                raise ProtocolError("the shared memory is smaller than announced")
            allocated = status.st_blocks * _BLOCK
            if not seals & fcntl.F_SEAL_GROW or mapped != there or allocated > mapped + _HUGE_PAGE:
                # This process may be the last to unmap it, which frees all of its pages, also
                # those behind its end.
                raise ProtocolError("the shared memory is larger than announced")
            return cls(fd, size, progress=progress)
        except (OSError, ValueError, OverflowError) as problem:
            if isinstance(problem, OSError) and is_lack(problem):
                raise
            raise ProtocolError(f"the shared memory cannot be mapped: {problem}") from problem

    def words(self, start: int, length: int) -> Words:
        """The words in ``length`` bytes from ``start``; `close` releases them."""
        return self._words(self.view[start : start + length])

    def _words(self, piece: memoryview) -> Words:
        words = shared_words(piece)
        self._kept.append(words)
        return words

    def close(self, later: Callable[[Callable[[], object]], object] | None = None) -> None:
        """Unmap the memory and invalidate all views.  Idempotent.

        ``later``: calls its argument in another thread.  Used for large memory, because unmapping
        frees all pages if this process is the last one that maps them.
        """
        for words in self._kept:
            words.release()
        self._kept.clear()
        self.view.release()
        if later is None or self.mapped <= QUICK_TO_FREE or self._map.closed:
            self._map.close()
        else:
            later(self._map.close)
