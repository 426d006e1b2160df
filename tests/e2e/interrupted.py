"""A client that gets SIGINT while code of the stack runs.

``python -m tests.e2e.interrupted PORT OWNER`` connects, sends `DATA`, and gets the signal at the
next call of a method that the tasks of the stack call: OWNER is one of `PLACES`.  So the signal
arrives at the same place each time.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

import trio
import trio.testing

import trio_smc
from tests.e2e.process_end import HOST, handle_as_usual
from trio_smc._base.timers import Timers
from trio_smc.datapath.receiver import Receiver
from trio_smc.datapath.sender import Sender
from trio_smc.rendezvous.links.link import Link
from trio_smc.rnic.dispatch import Dispatcher

DATA: Final = bytes(1000)
PLACES: Final[dict[str, tuple[Any, str]]] = {
    "timer": (Timers, "run_due"),
    "drain": (Dispatcher, "drain"),
    "completion": (Link, "on_completion"),
    "send": (Sender, "send"),
    "receive": (Receiver, "receive"),
}


class Armed:
    """Raises SIGINT once, in the first call of `method` after ``armed`` was set."""

    armed = False

    def method(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``original``, with the signal before it and its result after it."""

        @wraps(original)
        def interrupted(*arguments: Any) -> Any:
            if self.armed:
                self.armed = False
                signal.raise_signal(signal.SIGINT)
            return original(*arguments)

        return interrupted


async def main(port: int, armed: Armed) -> None:
    """Never returns."""
    stream = await trio_smc.open_stream(HOST, port)
    await stream.send_all(DATA)
    assert await stream.receive_some() == DATA
    await trio.testing.wait_all_tasks_blocked(0.01)
    armed.armed = True
    await stream.send_all(DATA)
    while True:
        await stream.receive_some()


if __name__ == "__main__":
    handle_as_usual()
    port, place = sys.argv[1:]
    owner, name = PLACES[place]
    switch = Armed()
    setattr(owner, name, switch.method(getattr(owner, name)))
    trio_smc.enable(trio_smc.Config(require_smc=True, test_link_interval=0.05))
    try:
        trio.run(main, int(port), switch)
    except KeyboardInterrupt:
        sys.exit(0 if not switch.armed else 1)
