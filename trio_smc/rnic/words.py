"""The words of memory that processes share, and the order of their accesses.

Theory of operation.  All 8-byte words of shared memory that control other memory are `Words`: the
control words and RKeys of a receive ring (`trio_smc.rnic.soft.ring`), and the progress words of
RMBs (`trio_smc.rnic.memory`).  In the terms of the C11 memory model, ``words[i]`` is a load with
``memory_order_acquire``, ``words[i] = value`` a store with ``memory_order_release``, `fence` is
``atomic_thread_fence(memory_order_seq_cst)``, and `exchange` is sequentially consistent.  Slots of
rings and elements of RMBs are plain memory: a process reads them only after a word has announced
them.  Each word needs the following order:

========  ==========================================================================================
word      order that the protocol needs, and why it suffices
========  ==========================================================================================
HEAD      *Release and acquire.*  The sender writes the slot and RDMA data, then stores HEAD.  A
          receiver that loads this HEAD synchronizes with the store, so it reads that slot and data.
POSTED    *Release and acquire.*  The receiver reads a slot, then stores POSTED.  A sender that
          loads this POSTED overwrites the slot only after the receiver has read it.
ARMED     *Fences.*  The receiver stores ARMED, then loads HEAD; the sender stores HEAD, then loads
          ARMED.  With a fence in between on both sides, at least one of them loads what the other
          has stored (C11, 7.17.3).  Without one, both may load old values, also on x86-64, and a
          wakeup is lost.
          *Exchange.*  A receiver that ends stores POSTED = CLOSED, then ARMED = 1.  The sender
          clears ARMED by an exchange, which returns the latest value.  If that is the receiver's,
          the sender synchronizes with it and loads CLOSED afterwards.  If a mere store cleared
          it, the sender's next message could count as sent, and the receiver would not take it.
          As a hint of whether the receiver sleeps (`QueuePair.peer_asleep`) it needs none.
WAITING   *Fences*, as ARMED: the sender stores WAITING, then loads POSTED; the receiver stores
          POSTED, then loads WAITING.
HELD and  None.  The receiver loads them after the end of the sender's process.  The kernel closes
progress  the process's sockets after the last store of its threads, and the receiver notices the
          end of a socket first.
TAKEN     None.  The receiver stores it before it closes the socket of the queue pair, and the
          sender loads it when it has noticed the end of that socket.
RKeys     None.  A side that revokes a region sends DELETE RKEY first, and waits for the reply
          (RFC 7609, 3.5.5.2).  The word only stops a peer that goes on writing.
========  ==========================================================================================

`tests/rnic/test_litmus.py` runs the code of the ring against models of C11, ARM64 and x86-64, with
every order that they allow.

There are three variants, `VARIANT`:

* ``native``: the C module ``_words`` has `Words` and `fence`, made with the compiler's atomics.
* ``x86-64``: Python, on a processor that keeps stores in order, and loads in order.  There a
  memoryview's 8-byte load or store is one instruction, with acquire or release order.  Only a store
  and a later load can change places.  To acquire and release a lock that no other thread uses
  executes locked instructions, which are full fences, and so does a system call that takes a lock,
  such as that of a doorbell.  Each ring has a lock of its own for that, because a process can have
  a stack in each of several threads.
* ``socket``: every other processor, without the native module.  No message passes through a ring.
  It travels over the Unix socket of the queue pairs (`trio_smc.rnic.soft.packets`): send(2) and
  recv(2) order all memory.  HELD, progress words and RKeys need no order of their own.

The environment variable ``TRIO_SMC_WORDS`` names another variant than the fastest that works, for
tests and measurements.
"""

from __future__ import annotations

import importlib
import operator
import os
import platform
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

if TYPE_CHECKING:
    from trio_smc.rnic import _words

__all__ = [
    "VARIABLE",
    "VARIANT",
    "Variant",
    "Words",
    "exchange",
    "fence",
    "fence_lock",
    "shared_words",
    "why_unusable",
]

Variant = Literal["x86-64", "native", "socket"]
Words: TypeAlias = "memoryview[int] | _words.Words"

VARIABLE: Final = "TRIO_SMC_WORDS"
_MACHINES: Final = ("x86_64", "AMD64")


def fence_lock() -> tuple[Callable[[bool], object], Callable[[], object]]:
    """The two calls that `fence` consists of without the native module, for one thread.

    To call both, the first with False, takes less time than a Python function that does.  If an
    exception leaves the lock acquired, the next fence does not wait, and releases it.
    """
    lock = threading.Lock()
    return lock.acquire, lock.release


def _lock_fence() -> None:
    """A full memory fence on x86-64, as the theory of operation explains."""
    acquire, release = fence_lock()
    acquire(False)
    release()


def _memoryview_words(memory: memoryview) -> memoryview[int]:
    words = memory.cast("Q")
    memory.release()
    return words


fence: Callable[[], None] = _lock_fence
"""A sequentially consistent fence."""
exchange: Callable[[Any, int, int], object] = operator.setitem
"""Store a value in a word, given words and index.  On x86-64 this is a store; a system call that
takes a lock must follow (see the theory of operation)."""
shared_words: Callable[[memoryview], Words] = _memoryview_words
"""Make words of memory whose length is a multiple of 8 bytes.

The words take over the view that they get; their method ``release`` gives it up.  Afterwards each
access raises ValueError."""


def _usable() -> list[Variant]:
    """The variants that work here, the fastest first."""
    found: list[Variant] = []
    if "t" not in sys.abiflags:  # a free-threaded build has another ABI
        try:
            importlib.import_module("trio_smc.rnic._words")
            found.append("native")
        except ImportError:
            pass
    if platform.machine() in _MACHINES:
        found.append("x86-64")
    return [*found, "socket"]


def _choose() -> Variant:
    usable = _usable()
    wanted = os.environ.get(VARIABLE)
    return next((each for each in usable if each == wanted), usable[0])


VARIANT: Final = _choose()
if VARIANT == "native":
    from trio_smc.rnic import _words

    fence = _words.fence
    exchange = _words.Words.exchange
    shared_words = _words.Words


def why_unusable() -> str | None:
    """The reason why the variant that ``TRIO_SMC_WORDS`` names does not work; None: it does."""
    wanted = os.environ.get(VARIABLE)
    if not wanted or wanted == VARIANT:
        return None
    return f"{VARIABLE}={wanted} does not work here: usable are {', '.join(_usable())}"
