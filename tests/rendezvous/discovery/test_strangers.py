"""Who else may accept a listener's connections, and that no CLC byte reaches them.

A listening process cannot show that a connection will be its own: whoever has its listening socket
may accept, and nothing that the kernel tells of that socket says how many have it.  So the client
waits until the process that has accepted says so.
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
from trio_smc import Config, FallbackReason, Mode, SmcStream

HOST = "127.0.0.1"
PATIENCE = 0.5
"""Seconds that the client waits for whoever has accepted."""


def accept_and_tell(listening: socket.socket, tell: int) -> None:
    """A stranger: accepts one connection and tells what it says to its end."""
    listening.setblocking(True)
    accepted, _ = listening.accept()
    with accepted:
        while data := accepted.recv(4096):
            os.write(tell, data)


@contextmanager
def child(work: Callable[[], None]) -> Iterator[None]:
    """A forked process that ends with ``work``."""
    number = os.fork()
    if not number:
        try:
            work()
        finally:
            os._exit(0)
    yield
    os.waitpid(number, 0)


@contextmanager
def forked(listening: socket.socket, tell: int) -> Iterator[None]:
    """The stranger has inherited the listening socket."""
    with child(lambda: accept_and_tell(listening, tell)):
        yield


@contextmanager
def passed(listening: socket.socket, tell: int) -> Iterator[None]:
    """The stranger was there before, and is given the listening socket now."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def work() -> None:
        ours.close()
        _, fds, _, _ = socket.recv_fds(theirs, 1, 1)
        accept_and_tell(socket.socket(fileno=fds[0]), tell)

    with ours, theirs, child(work):
        socket.send_fds(ours, [b"x"], [listening.fileno()])
        yield


@pytest.mark.parametrize("way", [forked, passed])
async def test_a_stranger_gets_what_the_program_says_and_nothing_else(
    way: Callable[[socket.socket, int], AbstractContextManager[None]],
) -> None:
    config = Config(handshake_timeout=PATIENCE)
    hear, tell = os.pipe()
    async with trio_smc.open_stack(config) as stack:
        (listener,) = await stack.open_listeners(0, host=HOST)
        plain = socket.socket(fileno=os.dup(listener.socket.fileno()))
        port = plain.getsockname()[1]
        async with listener:
            # It is ours: the same listener gives SMC-R to who comes before.
            ends: list[SmcStream] = []

            async def accept() -> None:
                ends.append(await listener.accept())

            with trio.fail_after(10):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(accept)
                    ends.append(await stack.open_stream(HOST, port))
            assert {each.mode for each in ends} == {Mode.SMC_R}
            # From now on the stranger is who accepts, however late it comes to that.
            listener._scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
            with way(plain, tell):
                stream = await stack.open_stream(HOST, port)
                assert stream.fallback is not None
                assert stream.fallback.reason is FallbackReason.PEER_NOT_CAPABLE
                await stream.send_all(b"for the program")
                await stream.aclose()
            for each in ends:
                await each.aclose()
        plain.close()
    os.close(tell)
    assert os.read(hear, 4096) == b"for the program"
    assert os.read(hear, 1) == b""
    os.close(hear)


def told_of(listening: socket.socket) -> str:
    """All that the kernel tells others of a listening socket: inode, references, owner, queue."""
    port = listening.getsockname()[1]
    lines = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()
    [line] = [each for each in lines if f"0100007F:{port:04X} 00000000:0000 0A" in each]
    return line.split(":", 1)[1]


def test_nothing_tells_who_holds_a_listening_socket() -> None:
    """What a proof would have to rest on is the same for one holder and for three."""
    with socket.create_server((HOST, 0)) as listening:
        alone = told_of(listening)
        hear, tell = os.pipe()
        with forked(listening, tell):
            shared = told_of(listening)
            with socket.create_connection(listening.getsockname()) as connection:
                connection.sendall(b"said before anybody had accepted")
        assert shared == alone
        os.close(tell)
        with open(hear, "rb") as said:
            assert said.read() == b"said before anybody had accepted"
