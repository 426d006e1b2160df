"""A client whose process ends while its peer has not closed the connection.

``python -m tests.e2e.process_end TRANSPORT HOW SENDS SIZE PORT`` connects, exchanges a greeting,
sends SENDS times SIZE bytes, and ends by HOW at once, without letting the scheduler run again.  If
HOW is "aclose", "send_eof" or "forceful", the client closes its stream before.
TRANSPORT: "tcp"; "ours" for `trio_smc.open_stream`; "enabled" for `trio.open_tcp_stream` under
`trio_smc.enable()`, which has amortised checkpoints.  The signals have their usual effect, even if
the parent ignores them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Any

import trio

import trio_smc

HOST = "127.0.0.1"
GREETING = b"hello"
CODE = 3
CLOSES = ("aclose", "send_eof", "forceful")
LONG = 600
"""Seconds, longer than any test: a process that waits for its peer's close is noticed."""
CONFIG = trio_smc.Config(learn_short=False, shutdown_timeout=LONG, llc_timeout=LONG)


def sent(number: int, size: int) -> bytes:
    """The data of one send."""
    return bytes([number % 251]) * size


def end(how: str) -> None:
    """End this process; returns if the end needs the scheduler."""
    match how:
        case "_exit":
            os._exit(CODE)
        case "exec":
            os.execv(sys.executable, [sys.executable, "-S", "-c", f"raise SystemExit({CODE})"])
        case "exit":
            sys.exit(CODE)
        case "error":
            raise RuntimeError("an end without closing")
        case "abort":
            os.abort()
        case _:
            os.kill(os.getpid(), getattr(signal, how))


def handle_as_usual() -> None:
    """Give each signal the effect that it has in a program started from a terminal.

    nohup(1) ignores SIGHUP, and a shell ignores SIGINT for its background jobs.  A child inherits
    this, and then no SIGHUP would end it, over TCP or SMC-R.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


async def main(transport: str, how: str, sends: int, size: int, port: int) -> None:
    if transport == "ours":
        async with contextlib.AsyncExitStack() as exits:
            if how in CLOSES:
                await exits.enter_async_context(trio_smc.open_stack(CONFIG))
            await use(await trio_smc.open_stream(HOST, port), how, sends, size)
    else:
        await use(await trio.open_tcp_stream(HOST, port), how, sends, size)


async def use(stream: Any, how: str, sends: int, size: int) -> None:
    """Exchange a greeting, send, and end."""
    await stream.send_all(GREETING)
    await stream.receive_some(len(GREETING))
    for number in range(sends):
        await stream.send_all(sent(number, size))
    if how in CLOSES:
        if how == "send_eof":
            await stream.send_eof()
        if how == "forceful":
            await trio.aclose_forcefully(stream)
        await stream.aclose()
        return
    if how == "block":
        sys.stdout.write("\n")
        sys.stdout.flush()
        signal.pause()  # the loop is blocked
    end(how)
    await trio.sleep_forever()


if __name__ == "__main__":
    handle_as_usual()
    way, how_to_end, sends, size, port = sys.argv[1:]
    if way == "enabled":
        trio_smc.enable(CONFIG)
    trio.run(main, way, how_to_end, int(sends), int(size), int(port))
