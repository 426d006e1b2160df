"""The thread of an RNIC: it sleeps until the RNIC has something to report, and wakes Trio.

The thread never polls completions: if it did, everything would be slower than TCP, because each
message would then pass two sleeping threads and the GIL.  Trio drains while it is awake; the
RNIC is armed only when Trio goes to sleep, so the thread is woken about once for each sleep.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

from .verbs import Rnic

__all__ = ["NoThread", "Poller"]


class NoThread(RuntimeError):
    """No thread can be started: there is no memory for one, or there may be no more of them."""


class Poller:
    """Waits on one RNIC's `Rnic.wait_fd` in a thread of its own.

    Args:
      rnic: an open RNIC.
      wake: called in the thread, without arguments, when the RNIC reports something; must be
        quick and may not block.

    Attributes:
      pending: set by the thread before `wake`; the caller of `Rnic.service` clears it before.
      wakeups: how often the thread woke up for the RNIC.

    Raises:
      OSError: descriptors or epoll watches run out.
      NoThread: no thread can be started.
    """

    def __init__(self, rnic: Rnic, wake: Callable[[], None]) -> None:
        self.pending: bool = False
        self.wakeups: int = 0
        self._wake = wake
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self._epoll = select.epoll()
        except OSError:
            os.close(self._stop)
            raise
        self._worker = threading.Thread(
            target=self._run, name=f"trio_smc poller {rnic.name}", daemon=True
        )
        try:
            self._epoll.register(self._stop, select.EPOLLIN)
            # Edge triggered: the thread sleeps until Trio has serviced the RNIC.
            self._epoll.register(rnic.wait_fd(), select.EPOLLIN | select.EPOLLET)
            try:
                self._worker.start()
            except RuntimeError as problem:
                raise NoThread(str(problem)) from problem
        except (OSError, NoThread):
            self._epoll.close()
            os.close(self._stop)
            raise

    def stop(self) -> None:
        """End the thread and wait for it.  Idempotent."""
        if self._stop < 0:
            return
        os.eventfd_write(self._stop, 1)
        self._worker.join()
        self._epoll.close()
        os.close(self._stop)
        self._stop = -1

    def _run(self) -> None:
        stop = self._stop
        while True:
            for fd, _ in self._epoll.poll():
                if fd == stop:
                    return
            self.wakeups += 1
            self.pending = True
            self._wake()
