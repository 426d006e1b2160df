"""A page of shared memory that the system may refuse when it is first touched.

With ``vm.overcommit_memory`` 2 Linux counts each page of a memfd against the commit limit when the
page is allocated (proc_sys_vm(5), "mm/shmem.c").  A page that is allocated by a store or a load has
no call that could fail, so at the limit the process gets SIGBUS.  A page that `posix_fallocate`
allocated before is never refused again, until it is given back.  In the modes 0 and 1 a page of a
memfd is never refused: the kernel reclaims memory, or the OOM killer ends a process.
"""

from __future__ import annotations

import os
from typing import Final

__all__ = ["commit_is_limited"]

_MODE: Final = "/proc/sys/vm/overcommit_memory"
_NEVER: Final = b"2"


def commit_is_limited() -> bool:
    """True if a page may be refused when it is first touched.

    Read anew in each call, which takes 1.5 microseconds: an administrator can change the mode at
    any time.  Where the mode cannot be read, the answer is True: allocating needlessly costs
    memory, SIGBUS costs the process.
    """
    try:
        descriptor = os.open(_MODE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        return os.read(descriptor, 16).strip() == _NEVER
    except OSError:
        return True
    finally:
        os.close(descriptor)
