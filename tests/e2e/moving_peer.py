"""A process with two software RNICs that fail, return and are drained while streams are busy.

One JSON object per line, as `tests.e2e.processes` speaks it. Each stream sends an endless text in
both directions; both sides know each byte by its position.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import trio

import trio_smc
from tests.e2e.bytes_by_position import Text
from tests.timing import PATIENCE
from trio_smc import Config, SmcStream, SoftRnic, Stack

TO_SERVER, TO_CLIENT = 1, 2
PIECE = 50_000


class Watch(trio_smc.BaseObserver):
    """An observer that wakes tasks that wait for states."""

    def __init__(self) -> None:
        self._changed = trio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return when the condition holds; each state change checks it."""
        while not condition():
            await self._changed.wait()

    def state(self, subject: object, old: str, new: str, event: str) -> None:
        self.wake()

    def wake(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()


class Traffic:
    """One stream, busy in both directions until the command to end."""

    def __init__(self, stream: SmcStream, outgoing: int, incoming: int, watch: Watch) -> None:
        self.stream = stream
        self.sent = self.received = 0
        self.error = ""
        self._outgoing, self._incoming = Text(outgoing), Text(incoming)
        self._watch = watch
        self._ending = False
        self.over = False

    def __repr__(self) -> str:
        done = "over" if self.over else "ending" if self._ending else "going on"
        return f"<{self.stream.mode}, {self.sent} sent, {self.received} received, {done}>"

    def end(self) -> None:
        """Send the rest of the current piece, then the end of the data."""
        self._ending = True

    async def run(self) -> None:
        """Send and receive until both directions have ended."""
        try:
            async with self.stream, trio.open_nursery() as nursery:
                nursery.start_soon(self._send)
                await self._receive()
        except BaseExceptionGroup as group:
            self.error = " / ".join(sorted(_described(each) for each in group.exceptions))
        self.over = True
        self._watch.wake()

    async def _send(self) -> None:
        while not self._ending:
            piece = self._outgoing.piece(self.sent, PIECE)
            await self.stream.send_all(piece)
            self.sent += len(piece)
        await self.stream.send_eof()

    async def _receive(self) -> None:
        async for piece in self.stream:
            expected = self._incoming.piece(self.received, len(piece))
            if piece != expected:
                raise AssertionError(f"wrong bytes after {self.received}")
            self.received += len(piece)
            self._watch.wake()


def _described(error: BaseException) -> str:
    return f"{type(error).__name__} from {error.__cause__!r}"


class Peer:
    """The commands of the process."""

    def __init__(self, stack: Stack, rnics: dict[str, SoftRnic], nursery: trio.Nursery) -> None:
        self._stack = stack
        self._rnics = rnics
        self._nursery = nursery
        self._traffic: list[Traffic] = []
        self._watch = Watch()
        stack.add_observer(self._watch)

    async def listen(self) -> dict[str, Any]:
        listeners = await self._stack.open_listeners(0, host="127.0.0.1")

        async def handle(stream: SmcStream) -> None:
            await self._busy(stream, TO_CLIENT, TO_SERVER).run()

        self._nursery.start_soon(trio.serve_listeners, handle, listeners)
        return {"port": listeners[0].socket.getsockname()[1]}

    async def connect(self, port: int, count: int = 1) -> dict[str, Any]:
        streams = [await self._stack.open_stream("127.0.0.1", port) for _ in range(count)]
        for stream in streams:
            self._nursery.start_soon(self._busy(stream, TO_SERVER, TO_CLIENT).run)
        fallbacks = [stream.fallback and stream.fallback.reason.name for stream in streams]
        return {"modes": [str(stream.mode) for stream in streams], "fallbacks": fallbacks}

    def _busy(self, stream: SmcStream, outgoing: int, incoming: int) -> Traffic:
        # At once, and not when its task runs: the next command may ask for its progress.
        traffic = Traffic(stream, outgoing, incoming, self._watch)
        self._traffic.append(traffic)
        return traffic

    async def fail(self, name: str) -> dict[str, Any]:
        self._rnics[name].fail()
        return {}

    async def restore(self, name: str) -> dict[str, Any]:
        self._rnics[name].restore()
        return {}

    async def drain(self, name: str) -> dict[str, Any]:
        await self._stack.drain_rnic(name)
        return {"left": [link["rnic"] for link in self._links()].count(name)}

    async def undrain(self, name: str) -> dict[str, Any]:
        self._stack.undrain_rnic(name)
        return {}

    def describe(self) -> str:
        """The links and the traffic, for an error."""
        return f"links: {self._links()}; {self._traffic}"

    def _links(self) -> list[dict[str, Any]]:
        return [
            {"rnic": link.rnic.name, "state": link.state, "load": link.connections}
            for group in self._stack.link_groups
            for link in group.links
        ]

    async def links(self, rnics: list[str], kind: str, even: bool = False) -> dict[str, Any]:
        """Wait until there are links on exactly these RNICs, and the group is of this kind."""

        def there() -> bool:
            links = self._links()
            loads = [link["load"] for link in links]
            return (
                sorted(link["rnic"] for link in links) == sorted(rnics)
                and {link["state"] for link in links} == {"ACTIVE"}
                and {str(group.kind) for group in self._stack.link_groups} == {kind}
                and (not even or max(loads) - min(loads) <= 1)
            )

        await self._watch.until(there)
        return {"loads": [link["load"] for link in self._links()]}

    async def progress(self, size: int = 500_000) -> dict[str, Any]:
        """Wait until each stream has received so many bytes more, or is over."""
        goals = [(each, each.received + size) for each in self._traffic]
        await self._watch.until(
            lambda: all(each.over or each.received >= goal for each, goal in goals)
        )
        return {"errors": [each.error for each in self._traffic if each.error]}

    async def finish(self, end: bool = True) -> dict[str, Any]:
        """End all streams, or wait for their end; returns their counters."""
        for each in self._traffic:
            if end:
                each.end()
        await self._watch.until(lambda: all(each.over for each in self._traffic))
        done, self._traffic = self._traffic, []
        return {
            "sent": [each.sent for each in done],
            "received": [each.received for each in done],
            "errors": [each.error for each in done],
            "failovers": self._stack.statistics().failovers,
        }


async def _lines() -> Any:
    unread = b""
    source = trio.lowlevel.FdStream(sys.stdin.fileno())
    async for piece in source:
        unread += piece
        *lines, unread = unread.split(b"\n")
        for line in lines:
            yield json.loads(line)


async def main() -> None:
    """Run commands until stdin ends."""
    rnics = {name: SoftRnic(name) for name in json.loads(sys.argv[1])["rnics"]}
    config = Config(rnics=tuple(rnics.values()), learn_short=False)
    async with trio_smc.open_stack(config) as stack, trio.open_nursery() as nursery:
        peer = Peer(stack, rnics, nursery)
        async for command in _lines():
            method = getattr(peer, command.pop("do"))
            try:
                with trio.fail_after(2 * PATIENCE):
                    answer = await method(**command)
            except Exception as problem:
                answer = {"error": f"{problem!r}; {peer.describe()}"}
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
