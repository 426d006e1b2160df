"""If descriptors, epoll watches or threads are missing, the operation is retried or fails."""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import trio

import trio_smc
from tests.api.api_peers import HOST, QUICK, address_of
from tests.lingering import full_table
from tests.timing import PATIENCE
from trio_smc._base import resources
from trio_smc.host import private_directory
from trio_smc.rnic.poller import NoThread, Poller
from trio_smc.rnic.roce.hotplug import active_ports, present_devices
from trio_smc.rnic.soft.device import SoftRnic
from trio_smc.stack.tcp_watch import TcpWatch

pytestmark = pytest.mark.pure


def test_an_error_means_a_lack_or_the_end_of_the_peer() -> None:
    for number in errno.errorcode:
        error = OSError(number, os.strerror(number))
        assert not (resources.is_lack(error) and resources.is_peer_gone(error))
    for number in (errno.EMFILE, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS, errno.ENOSPC):
        assert resources.is_lack(OSError(number, ""))
    for number in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN):
        assert resources.is_peer_gone(OSError(number, ""))


def test_a_full_table_does_not_remove_devices(tmp_path: Path) -> None:
    """Listing fails instead of omitting a device, because the stack would close its links."""
    (tmp_path / "infiniband_verbs" / "uverbs0").mkdir(parents=True)
    (tmp_path / "infiniband_verbs" / "uverbs0" / "ibdev").write_text("rxe0\n")
    assert present_devices(tmp_path) == {"rxe0"}
    for look in (present_devices, active_ports):
        with full_table(), pytest.raises(OSError, match="Too many open files"):
            look(tmp_path)
        with full_table(1):
            look(tmp_path)


async def test_a_tcp_connection_is_watched_later(monkeypatch: pytest.MonkeyPatch) -> None:
    class Epoll:
        """An epoll object that refuses its first two watches."""

        def __init__(self, epoll: Any) -> None:
            self.epoll = epoll
            self.refusals = 2

        def register(self, *arguments: Any) -> None:
            if self.refusals:
                self.refusals -= 1
                raise OSError(errno.ENOSPC, "injected")
            self.epoll.register(*arguments)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.epoll, name)

    class Watcher:
        owns_number = True

        def __init__(self) -> None:
            self.reported = trio.Event()

        def tcp_reset(self) -> None:
            raise AssertionError

        def tcp_data(self) -> None:
            self.reported.set()

    epoll = select.epoll
    with monkeypatch.context() as patch:
        patch.setattr(select, "epoll", lambda: Epoll(epoll()))
        watch = TcpWatch()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = trio.socket.from_stdlib_socket(socket.create_connection(listener.getsockname()))
        theirs, _ = listener.accept()
        watcher = Watcher()
        with ours, theirs:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch.run)
                watch.add(ours, watcher)
                theirs.send(b"x")
                with trio.fail_after(PATIENCE):
                    await watcher.reported.wait()
                nursery.cancel_scope.cancel()
            watch.remove(ours)
    watch.close()


def test_a_poller_without_a_thread_raises_nothread(
    runtime_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has a type of its own, and no descriptor is left open."""
    rnic = SoftRnic()
    rnic.open(runtime_directory / "smc")

    def failing(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", failing)
        before = os.listdir("/proc/self/fd")
        with pytest.raises(NoThread, match="thread"):
            Poller(rnic, lambda: None)
        assert os.listdir("/proc/self/fd") == before
        # The RNIC closes a descriptor later if no thread can be started for it.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.send(b"x")
        rnic.intake.discard(ours)
        assert ours.fileno() >= 0
    rnic.close()
    assert ours.fileno() < 0
    theirs.close()


def test_a_full_table_admits_no_other_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """The overflow user ID represents all unknown users, and is not accepted as this user."""
    monkeypatch.setattr(private_directory, "overflow_id", lambda kind: os.geteuid())
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs, full_table():
        assert not private_directory.is_same_user(ours)


async def test_a_step_of_the_end_that_fails_skips_no_other_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The descriptors and the names of the stack are gone afterwards, which the leak check sees."""

    async def open_and_leave() -> None:
        async with trio_smc.open_stack(QUICK) as stack:
            [listener] = await stack.open_listeners(0, host=HOST)
            async with await stack.open_stream(*address_of(listener)):
                pass
            close = stack.runtime.rnic_set.close

            def fail() -> None:
                close()
                raise OSError(errno.EBADF, "closed by the program")

            monkeypatch.setattr(stack.runtime.rnic_set, "close", fail)

    with pytest.RaisesGroup(pytest.RaisesExc(OSError, match="closed by the program")):
        await open_and_leave()
