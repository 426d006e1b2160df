"""Sends and receives with the memory of mapped files that have become shorter.

    python -m tests.sockets.mapped_buffers [smc]

Prints a JSON object: the outcome of each case.  An access to a page that is not there would end
this process by SIGBUS.
"""

from __future__ import annotations

import json
import mmap
import sys
import tempfile
from array import array
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import trio

import trio_smc
from tests.timing import PATIENCE

CONFIG: Final = trio_smc.Config(learn_short=False, tcp_option="off", require_smc=True)
OFF: Final = trio_smc.Config(rnics=())
PAGE: Final = mmap.PAGESIZE
LARGE: Final = 1 << 20
SENT: Final = b"0123456789abcdef"


def mapped(size: int, left: int) -> mmap.mmap:
    """A mapping of ``size`` bytes of a file that then has only ``left``."""
    with tempfile.TemporaryFile() as file:
        file.write(b"x" * size)
        file.flush()
        found = mmap.mmap(file.fileno(), size)
        file.truncate(left)
        return found


Call = Callable[[Any], Awaitable[Any]]
SENDS: Final[dict[str, Call]] = {
    "send": lambda sock: sock.send(mapped(LARGE, 0)),
    "send-view": lambda sock: sock.send(memoryview(mapped(LARGE, PAGE))[PAGE:]),
    "send-few": lambda sock: sock.send(memoryview(mapped(LARGE, PAGE))[2 * PAGE : 2 * PAGE + 8]),
    "send-items": lambda sock: sock.send(memoryview(mapped(LARGE, 0)).cast("I")),
    "send-flags": lambda sock: sock.send(mapped(LARGE, 0), 0x4000),  # MSG_NOSIGNAL
    "sendto": lambda sock: sock.sendto(mapped(LARGE, 0), sock.getpeername()),
    "sendmsg": lambda sock: sock.sendmsg([mapped(LARGE, 0)]),
    "sendmsg-two": lambda sock: sock.sendmsg([mapped(LARGE, 0), b"a"]),
    "send-all": lambda sock: trio.SocketStream(sock).send_all(memoryview(mapped(LARGE, 0))),
    "send-all-later": lambda sock: trio.SocketStream(sock).send_all(
        memoryview(mapped(8 * LARGE, 6 * LARGE))
    ),
}
RECEIVES: Final[dict[str, Call]] = {
    "recv_into": lambda sock: sock.recv_into(mapped(LARGE, 0)),
    "recv_into-view": lambda sock: sock.recv_into(memoryview(mapped(LARGE, PAGE))[PAGE:], 9),
    "recv_into-peek": lambda sock: sock.recv_into(mapped(LARGE, 0), 0, 2),  # MSG_PEEK
    "recvfrom_into": lambda sock: sock.recvfrom_into(mapped(LARGE, 0)),
    "recvmsg_into": lambda sock: sock.recvmsg_into([mapped(LARGE, 0)]),
    "recvmsg_into-two": lambda sock: sock.recvmsg_into([bytearray(4), mapped(LARGE, 0)]),
}
STREAMS: Final[dict[str, Call]] = {
    "stream-send_all": lambda stream: stream.send_all(mapped(LARGE, 0)),
    "stream-send_urgent": lambda stream: stream.send_urgent(memoryview(mapped(LARGE, 0))[:9]),
    "stream-receive_some_into": lambda stream: stream.receive_some_into(mapped(LARGE, 0)),
}
WHOLE: Final[dict[str, Callable[[], Any]]] = {
    "bytearray": lambda: bytearray(SENT),
    "array": lambda: array("B", SENT),
    "mapping": lambda: memoryview(_filled(mapped(PAGE, PAGE)))[: len(SENT)],
    "anonymous": lambda: memoryview(_filled(mmap.mmap(-1, PAGE)))[: len(SENT)],
}


def _filled(memory: mmap.mmap) -> mmap.mmap:
    memory[: len(SENT)] = SENT
    return memory


async def outcome_of(call: Awaitable[Any]) -> str:
    try:
        return repr(await call)
    except (OSError, trio.BrokenResourceError) as error:
        return f"{type(error).__name__}: {error}"


async def connected() -> tuple[Any, Any]:
    with trio.socket.socket() as listener:
        await listener.bind(("127.0.0.1", 0))
        listener.listen()
        client = trio.socket.socket()
        await client.connect(listener.getsockname())
        return client, (await listener.accept())[0]


async def send_outcome(call: Call) -> str:
    """The outcome, and that the connection goes on."""
    client, server = await connected()
    with client, server:
        async with trio.open_nursery() as nursery:
            got = bytearray()

            async def read() -> None:
                while data := await server.recv(1 << 20):
                    got.extend(data)

            nursery.start_soon(read)
            outcome = await outcome_of(call(client))
            await client.send(SENT)
            client.shutdown(trio.socket.SHUT_WR)
        assert got.endswith(SENT)
        return f"{outcome}, {len(got)} bytes"


async def receive_outcome(call: Call) -> str:
    """The outcome, and that the bytes can be received again."""
    client, server = await connected()
    with client, server:
        await server.send(SENT)
        outcome = await outcome_of(call(client))
        rest = await client.recv(100)
        return f"{outcome}, then {rest!r}"


async def stream_outcome(call: Call) -> str:
    """As `receive_outcome`, with a stream of `trio_smc.open_stream`."""
    async with trio.open_nursery() as nursery:
        serve = partial(trio_smc.serve, _answer, 0, host="127.0.0.1")
        [listener] = await nursery.start(serve)
        async with await trio_smc.open_stream(*listener.socket.getsockname()) as stream:
            await stream.send_all(SENT)
            outcome = await outcome_of(call(stream))
            rest = await stream.receive_some(100)
        nursery.cancel_scope.cancel()
    return f"{outcome}, then {rest!r}"


async def _answer(stream: trio_smc.SmcStream) -> None:
    await stream.send_all(await stream.receive_some(len(SENT)))
    await stream.receive_some(1)


async def whole_outcome(make: Callable[[], Any]) -> str:
    client, server = await connected()
    with client, server:
        await client.send(make())
        buffer = make()
        memoryview(buffer)[: len(SENT)] = bytes(len(SENT))
        count = await server.recv_into(buffer)
        return f"{count}: {bytes(buffer)!r}"


async def main(smc: bool) -> dict[str, str]:
    found = {}
    with trio.fail_after(2 * PATIENCE):
        for name, call in SENDS.items():
            found[name] = await send_outcome(call)
        for name, call in RECEIVES.items():
            found[name] = await receive_outcome(call)
        async with trio_smc.open_stack(CONFIG if smc else OFF):
            for name, call in STREAMS.items():
                found[name] = await stream_outcome(call)
        for name, make in WHOLE.items():
            found[name] = await whole_outcome(make)
    return found


if __name__ == "__main__":
    smc = sys.argv[1:] == ["smc"]
    if smc:
        trio_smc.enable(CONFIG)
    sys.stdout.write(json.dumps(trio.run(main, smc)))
