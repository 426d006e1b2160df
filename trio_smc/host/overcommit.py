"""Memory that the system may refuse: pages and sizes of memfds, and new threads.

If ``vm.overcommit_memory`` is 2, Linux counts each page of a memfd against the commit limit when
the page is allocated (proc_sys_vm(5), mm/shmem.c).  If a load or a store allocates the page, there
is no call that could fail, so at the limit the process gets SIGBUS.  A page that `posix_fallocate`
has allocated before is not refused, until it is given back.  In the modes 0 and 1 a page of a memfd
is never refused: the kernel reclaims memory, or the OOM killer ends a process.

A memfd is a file, so RLIMIT_FSIZE limits its size.  Beyond the limit the kernel sends SIGXFSZ.
Python ignores that signal.  If the program has restored the default action, it ends the process.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import time
from typing import Final

if sys.platform == "linux":
    import resource

__all__ = ["MODE", "can_start_thread", "check_file_size", "commit_is_limited", "may_refuse_pages"]

MODE: Final = "/proc/sys/vm/overcommit_memory"
_STRICT: Final = b"2"
_KNOWN: Final = 0.1
"""Seconds until `may_refuse_pages` reads the mode again.  Chosen."""
_THREAD_MEMORY: Final = 16 << 20
"""Bytes that a new thread may need: a stack of 8 MiB (the usual RLIMIT_STACK), and Python objects.
The other 8 MiB are chosen."""


def check_file_size(size: int) -> None:
    """Raise OSError (EFBIG) if this process may not have a file of this size in bytes."""
    if sys.platform == "linux":
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if limit != resource.RLIM_INFINITY and size > limit:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))


def commit_is_limited() -> bool:
    """True if a page may be refused when it is first touched.

    An administrator can change the mode at any time, so each call reads the mode from /proc.  If
    the mode cannot be read, the result is True: a needless allocation costs only memory, but SIGBUS
    ends the process.
    """
    try:
        descriptor = os.open(MODE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        return os.read(descriptor, 16).strip() == _STRICT
    except OSError:
        return True
    finally:
        os.close(descriptor)


_known_until = 0.0
_known = True


def may_refuse_pages() -> bool:
    """As `commit_is_limited`, but the result may be a tenth of a second old.

    For memory of a new connection: to read the mode for each one took 15 of 750 microseconds
    (benchmarks.phases).  A later change of the mode protects no page of an older connection either.
    """
    global _known, _known_until
    now = time.monotonic()
    if now >= _known_until:
        _known = commit_is_limited()
        _known_until = now + _KNOWN
    return _known


def can_start_thread() -> bool:
    """True if a new thread would have enough memory to run.

    At the commit limit, or if the program has lowered RLIMIT_AS, a new thread may get a stack, such
    as that of a thread that has ended, and then no other memory, so that the thread cannot run.
    `threading.Thread.start` would wait for this thread for ever.
    """
    if sys.platform != "linux":
        return True
    try:
        mmap.mmap(-1, _THREAD_MEMORY, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, MemoryError):
        return False
    return True
