"""The thread of an RNIC: it sleeps until the RNIC has something to report, and wakes Trio.

The thread never polls completions.  If it did, each message would have to wake two threads and
pass the GIL, which is slower than TCP.  Trio drains while it is awake.  The RNIC is armed only when
Trio goes to sleep, so the thread is woken about once for each sleep of Trio.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

from trio_smc.host.overcommit import can_start_thread

from .verbs import Rnic

__all__ = ["NoThread", "Poller"]


class NoThread(RuntimeError):
    """No thread can be started: memory is short, or the limit on threads is reached."""


class Poller:
    """Waits on the `Rnic.wait_fd` of one RNIC in a separate thread.

    Args:
      rnic: an open RNIC.
      wake: called in the thread, without arguments, when the RNIC reports something; must be
        quick and may not block.

    Attributes:
      pending: the thread sets it before it calls ``wake``.  The task that calls `Rnic.service`
        clears it before that call.
      wakeups: how often the RNIC has woken the thread.

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
            # Edge-triggered, so that the thread sleeps again until Trio has serviced the RNIC.
            self._epoll.register(rnic.wait_fd(), select.EPOLLIN | select.EPOLLET)
            if not can_start_thread():
                raise NoThread("there is no memory for a thread")
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
