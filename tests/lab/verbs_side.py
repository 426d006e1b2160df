"""A device that is drained, and queue pairs connected over TCP: for the guests' programs."""

from __future__ import annotations

import json
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import trio
import trio.testing

from tests.timing import PATIENCE
from trio_smc.rnic.memory import Memory
from trio_smc.rnic.pump import Pump
from trio_smc.rnic.roce.device import VerbsRnic
from trio_smc.rnic.verbs import (
    RECEIVE_SIZE,
    Completion,
    MemoryRegion,
    PlainCompletion,
    ProtectionDomain,
    QueuePair,
    Rnic,
)

PORT = 7654


async def find(rnic: Rnic, gid: bytes) -> None:
    """Until the RNIC knows this peer's address."""
    with trio.fail_after(PATIENCE):
        while not rnic.address_known(gid):  # noqa: ASYNC110 - no event to wait for
            await trio.sleep(0.01)


class Control:
    """Lines of JSON to the peer's program."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._got = b""

    @classmethod
    async def connect(cls, role: str, peer: str, patience: float = PATIENCE) -> Self:
        with trio.fail_after(patience):
            if role == "server":
                (listener,) = await trio.open_tcp_listeners(PORT, host="0.0.0.0")
                async with listener:
                    return cls(await listener.accept())
            while True:
                try:
                    return cls(await trio.open_tcp_stream(peer, PORT))
                except OSError:
                    await trio.sleep(0.2)  # the other guest is still booting

    async def swap(self, value: Any = None, patience: float = PATIENCE) -> Any:
        """Give the peer a value and take its own; so also a barrier."""
        with trio.fail_after(patience):
            await self.stream.send_all(json.dumps(value).encode() + b"\n")
            while b"\n" not in self._got:
                more = await self.stream.receive_some()
                if not more:
                    raise EOFError("the peer's program is gone")
                self._got += more
        line, _, self._got = self._got.partition(b"\n")
        return json.loads(line)


class Device:
    """An open RNIC whose completions go to the queue pairs' own sinks.

    Args:
      pump: let a stack's pump do it, with its poller thread; else this task polls and sleeps on
        the RNIC's own descriptor.
    """

    def __init__(self, rnic: Rnic, pump: Pump | None) -> None:
        self.rnic = rnic
        self._pump = pump
        self._sinks: dict[int, Callable[[PlainCompletion], None]] = {}
        self._sleeps = 0

    @property
    def sleeps(self) -> int:
        """How often a sleep was ended by the RNIC."""
        return self._sleeps if self._pump is None else self._pump.wakeups

    def attach(self, pair: Pair) -> None:
        if self._pump is None:
            self._sinks[pair.qp.qp_num] = pair.on_completion
        else:
            self._pump.register(self.rnic, pair.qp, pair)

    def detach(self, pair: Pair) -> None:
        if self._pump is None:
            del self._sinks[pair.qp.qp_num]
        else:
            self._pump.unregister(self.rnic, pair.qp)

    async def run(self) -> None:
        rnic = self.rnic
        if self._pump is not None:
            self._pump.add(rnic)
            try:
                await self._pump.run()
            finally:
                self._pump.remove(rnic)
        while True:
            found = rnic.poll()
            for completion in found:
                self._sinks[completion.qp_num](completion)
            if found:
                await trio.lowlevel.checkpoint()
            elif rnic.arm():
                await trio.lowlevel.wait_readable(rnic.wait_fd())
                self._sleeps += 1
                rnic.service()


@asynccontextmanager
async def open_device(name: str, pump: Pump | None = None) -> AsyncIterator[Device]:
    rnic = VerbsRnic(name)
    rnic.open(Path("/nonexistent"))
    try:
        async with trio.open_nursery() as nursery:
            device = Device(rnic, pump)
            nursery.start_soon(device.run)
            await trio.testing.wait_all_tasks_blocked()
            yield device
            nursery.cancel_scope.cancel()
    finally:
        rnic.close()


class Pair:
    """A queue pair, its domain and a region of its own; all completions kept in order."""

    def __init__(self, device: Device, size: int, receive_size: int = RECEIVE_SIZE) -> None:
        self.device = device
        self.rnic = device.rnic
        self.pd: ProtectionDomain = self.rnic.alloc_pd()
        self.qp: QueuePair = self.rnic.create_qp(self.pd, receive_size)
        self.memory: Memory = self.rnic.alloc_memory(size)
        self.region: MemoryRegion = self.pd.register(self.memory)
        self.got: list[Completion] = []
        self._news = trio.Event()
        self.peer: dict[str, Any] = {}
        device.attach(self)

    def on_completion(self, plain: PlainCompletion) -> None:
        self.got.append(Completion(*plain))
        self._news.set()

    async def wait(self, until: Callable[[Self], bool], seconds: float = PATIENCE) -> None:
        """Until the condition holds, looked at after every completion."""
        with trio.move_on_after(seconds):
            while not until(self):
                self._news = trio.Event()
                await self._news.wait()
            return
        raise AssertionError(
            f"nothing came: state {self.qp.state}, got {self.got[:9]}, {self.rnic.poll()} unseen"
        )

    async def take(self, seconds: float = PATIENCE) -> Completion:
        await self.wait(lambda pair: bool(pair.got), seconds)
        return self.got.pop(0)

    async def connect(self, control: Control, receives: int) -> None:
        psn = random.getrandbits(24)
        self.qp.to_init()
        self.qp.post_receive(receives)
        self.peer = await control.swap(
            {
                "gid": self.rnic.gid.hex(),
                "qp_num": self.qp.qp_num,
                "psn": psn,
                "mtu": self.rnic.mtu,
                "rkey": self.region.rkey,
                "address": self.region.address,
                "length": self.region.length,
            }
        )
        await find(self.rnic, bytes.fromhex(self.peer["gid"]))
        self.qp.to_rtr(
            gid=bytes.fromhex(self.peer["gid"]),
            qp_num=self.peer["qp_num"],
            psn=self.peer["psn"],
            mtu=min(self.rnic.mtu, self.peer["mtu"]),
        )
        self.qp.to_rts(psn=psn)
        await control.swap()

    def write(self, data: bytes, offset: int, *, wr_id: int = 0, signaled: bool = True) -> None:
        self.qp.post_write(
            wr_id,
            memoryview(data),
            None,
            address=self.peer["address"] + offset,
            rkey=self.peer["rkey"],
            signaled=signaled,
        )

    def close(self) -> None:
        self.device.detach(self)
        self.close_all()

    def close_all(self) -> None:
        self.qp.close()
        self.region.close()
        self.pd.close()
        self.memory.close()


@asynccontextmanager
async def connected(
    device: Device, control: Control, *, size: int = 4096, receives: int = 4
) -> AsyncIterator[Pair]:
    pair = Pair(device, size)
    try:
        await pair.connect(control, receives)
        yield pair
        await control.swap()
    finally:
        pair.close()


def descriptors() -> list[str]:
    """The open descriptors of this process, as sorted link texts."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue
    return sorted(text for text in found if "/proc/" not in text)
