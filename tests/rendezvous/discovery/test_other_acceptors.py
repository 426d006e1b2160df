"""Another process accepts a connection of a listener, and receives no byte of CLC.

A listening process cannot prove that it will accept a connection.  Every process that has the
listening socket may accept, and the kernel does not show how many processes have this socket.  So
the client waits for an answer of the process that has accepted.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

import trio_smc
from tests.timing import PATIENCE
from trio_smc import Config, FallbackReason, Mode, SmcStream

HOST = "127.0.0.1"
HANDSHAKE_TIMEOUT = 0.5
"""Seconds for which the client waits for an answer of the process that has accepted."""


def accept_and_copy(listening: socket.socket, output: int) -> None:
    """Accept one connection, and write all received bytes to ``output``; in another process."""
    listening.setblocking(True)
    accepted, _ = listening.accept()
    with accepted:
        while data := accepted.recv(4096):
            os.write(output, data)


@contextmanager
def child(work: Callable[[], None]) -> Iterator[None]:
    """Run ``work`` in a forked process, and wait for its end."""
    number = os.fork()
    if not number:
        try:
            work()
        finally:
            os._exit(0)
    yield
    os.waitpid(number, 0)


@contextmanager
def forked(listening: socket.socket, output: int) -> Iterator[None]:
    """The other process has inherited the listening socket."""
    with child(lambda: accept_and_copy(listening, output)):
        yield


@contextmanager
def passed(listening: socket.socket, output: int) -> Iterator[None]:
    """The other process exists already, and gets the listening socket as a passed descriptor."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def work() -> None:
        ours.close()
        _, fds, _, _ = socket.recv_fds(theirs, 1, 1)
        accept_and_copy(socket.socket(fileno=fds[0]), output)

    with ours, theirs, child(work):
        socket.send_fds(ours, [b"x"], [listening.fileno()])
        yield


@pytest.mark.parametrize("way", [forked, passed])
async def test_another_acceptor_gets_only_the_bytes_of_the_program(
    way: Callable[[socket.socket, int], AbstractContextManager[None]],
) -> None:
    config = Config(handshake_timeout=HANDSHAKE_TIMEOUT)
    copied, output = os.pipe()
    async with trio_smc.open_stack(config) as stack:
        (listener,) = await stack.open_listeners(0, host=HOST)
        plain = socket.socket(fileno=os.dup(listener.socket.fileno()))
        port = plain.getsockname()[1]
        async with listener:
            # As long as only the listener accepts, connections are SMC-R.
            ends: list[SmcStream] = []

            async def accept() -> None:
                ends.append(await listener.accept())

            with trio.fail_after(PATIENCE):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(accept)
                    ends.append(await stack.open_stream(HOST, port))
            assert {each.mode for each in ends} == {Mode.SMC_R}
            # From now on only the other process accepts.
            listener._scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
            with way(plain, output):
                stream = await stack.open_stream(HOST, port)
                assert stream.fallback is not None
                assert stream.fallback.reason is FallbackReason.PEER_NOT_CAPABLE
                await stream.send_all(b"for the program")
                await stream.aclose()
            for each in ends:
                await each.aclose()
        plain.close()
    os.close(output)
    assert os.read(copied, 4096) == b"for the program"
    assert os.read(copied, 1) == b""
    os.close(copied)


def kernel_view(listening: socket.socket) -> str:
    """The line of /proc/net/tcp for a listening socket: inode, references, owner, queue."""
    port = listening.getsockname()[1]
    lines = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()
    [line] = [each for each in lines if f"0100007F:{port:04X} 00000000:0000 0A" in each]
    return line.split(":", 1)[1]


def test_the_kernel_does_not_show_the_holders_of_a_listening_socket() -> None:
    """A proof would need a difference, but the line is the same for one process and for two."""
    with socket.create_server((HOST, 0)) as listening:
        alone = kernel_view(listening)
        copied, output = os.pipe()
        with forked(listening, output):
            shared = kernel_view(listening)
            with socket.create_connection(listening.getsockname()) as connection:
                connection.sendall(b"sent before the connection was accepted")
        assert shared == alone
        os.close(output)
        with open(copied, "rb") as received:
            assert received.read() == b"sent before the connection was accepted"
