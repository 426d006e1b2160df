"""The thread that closes descriptors whose close may block."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

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


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
@pytest.mark.parametrize("has_client", [False, True])
def test_a_listener_needs_the_thread_only_for_its_backlog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_client: bool, kind: socket.SocketKind
) -> None:
    """The end of a stack would wait for the thread."""
    monkeypatch.chdir(tmp_path)
    closer = Closer("test")
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def note(thread: threading.Thread) -> None:
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", note)
    listener, client = (socket.socket(socket.AF_UNIX, kind) for _ in range(2))
    with client, socket.socket(socket.AF_UNIX, kind) as late:
        listener.bind("name")
        listener.listen()
        listener.setblocking(False)
        if has_client:
            client.connect("name")
        closer.discard_listener(listener)
        closer.join()
        assert len(started) == has_client
        assert listener.fileno() == -1
        with pytest.raises(ConnectionRefusedError):
            late.connect("name")
        Path("name").unlink()
