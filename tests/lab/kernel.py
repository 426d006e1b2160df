"""The Linux kernel as a peer: calls to `tests.lab.kernel_agent`, from Trio."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import trio

__all__ = ["Kernel", "KernelError"]

PORT = 7655


class KernelError(Exception):
    """A call failed there; ``name`` is that of the error number."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name


class Kernel:
    """One agent."""

    def __init__(self, control: trio.SocketStream) -> None:
        self._control = control
        self._calls = 0
        self._waiting: dict[int, tuple[trio.Event, list[Any]]] = {}
        self._sending = trio.Lock()

    @classmethod
    @contextlib.asynccontextmanager
    async def at(cls, host: str, patience: float) -> AsyncIterator[Kernel]:
        """Connect to the agent of a guest that may still be booting."""
        with trio.fail_after(patience):
            control = await _reach(host)
        kernel = cls(control)
        async with control, trio.open_nursery() as nursery:
            nursery.start_soon(kernel._read)
            yield kernel
            nursery.cancel_scope.cancel()

    async def _read(self) -> None:
        got = b""
        while more := await self._control.receive_some():
            *lines, got = (got + more).split(b"\n")
            for line in lines:
                number, result, problem = json.loads(line)
                event, answer = self._waiting.pop(number)
                answer += [result, problem]
                event.set()
        raise EOFError("the kernel's guest is gone")

    async def call(self, function: str, *, patience: float = 60, **arguments: Any) -> Any:
        """Call a method of `tests.lab.kernel_agent.Agent` there.  Raises KernelError."""
        self._calls += 1
        number, event, answer = self._calls, trio.Event(), list[Any]()
        self._waiting[number] = event, answer
        line = json.dumps([number, function, arguments]).encode() + b"\n"
        async with self._sending:
            await self._control.send_all(line)
        try:
            with trio.fail_after(patience):
                await event.wait()
        except trio.TooSlowError:
            raise TimeoutError(f"{function} {arguments} at the kernel") from None
        result, problem = answer
        if problem:
            raise KernelError(*problem)
        return result


async def _reach(host: str) -> trio.SocketStream:
    while True:
        try:
            return await trio.open_tcp_stream(host, PORT)
        except OSError:
            await trio.sleep(0.2)
