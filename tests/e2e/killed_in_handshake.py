"""A process that kills itself at one message of an SMC-R handshake.

``python -m tests.e2e.killed_in_handshake server BEFORE MESSAGE`` writes its port and accepts
BEFORE connections and one more, in the handshake of which it kills itself at MESSAGE.
``… client BEFORE MESSAGE PORT`` connects as many times to the port.  MESSAGE: "in" or "out", and
the type of a CLC or LLC message, as in "in PROPOSAL".
"""

from __future__ import annotations

import os
import signal
import sys

import trio

import trio_smc
from trio_smc.wire import clc, llc

HOST = "127.0.0.1"
CONFIG = trio_smc.Config(learn_short=False, tcp_option="off")


class Killer(trio_smc.BaseObserver):
    """An observer that kills the process at a message, after as many messages of the same kind."""

    def __init__(self, before: int, message: str) -> None:
        self._before, self._message = before, message

    def clc(self, connection: object, outgoing: bool, message: bytes) -> None:
        self._meet(outgoing, clc.MessageType(message[4]).name)

    def llc(self, link: object, outgoing: bool, message: bytes) -> None:
        self._meet(outgoing, llc.MessageType(message[0]).name)

    def _meet(self, outgoing: bool, name: str) -> None:
        if f"{'out' if outgoing else 'in'} {name}" == self._message:
            if not self._before:
                os.kill(os.getpid(), signal.SIGKILL)
            self._before -= 1


async def main(role: str, before: int, message: str, port: int) -> None:
    async with trio_smc.open_stack(CONFIG) as stack:
        stack.add_observer(Killer(before, message))
        if role == "server":
            [listener] = await stack.open_listeners(0, host=HOST)
            sys.stdout.write(str(listener.socket.getsockname()[1]))
            sys.stdout.flush()
            opened = [await listener.accept() for _ in range(before + 1)]
        else:
            opened = [await stack.open_stream(HOST, port) for _ in range(before + 1)]
        raise RuntimeError(f"not killed, with {len(opened)} connections")


if __name__ == "__main__":
    trio.run(main, sys.argv[1], int(sys.argv[2]), sys.argv[3], int((*sys.argv, "0")[4]))
