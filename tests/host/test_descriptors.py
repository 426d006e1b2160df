"""The thread that closes descriptors whose close may block."""

from __future__ import annotations

import threading

import pytest

from trio_smc.host.descriptors import Closer


def test_an_unexpected_error_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    """An error must not end the thread: no other one is started, and later closes would be lost."""

    def fail() -> None:
        raise BufferError("cannot close exported pointers exist")

    closer = Closer("test")
    done = threading.Event()
    closer.run(fail)
    closer.run(done.set)
    assert done.wait(5)
    closer.join()
    assert not closer.is_full
    assert "cannot close" in caplog.text
