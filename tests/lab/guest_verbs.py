"""Runs in both guests: bytes between two RNICs through the interface of `trio_smc.rnic.verbs`.

usage: python3 -m tests.lab.guest_verbs server|client PEER DEVICE SEED [die]

Each step prints one line; the exit status is 0 if all steps pass.  With "die" the server kills
itself in the middle (its status is then that of SIGKILL), and the client must notice it.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import struct
import sys
import time
from collections import Counter
from contextlib import suppress

import trio

from tests.lab.verbs_side import (
    Control,
    Device,
    Pair,
    connected,
    descriptors,
    open_device,
)
from tests.timing import PATIENCE
from trio_smc.rnic.pump import Pump
from trio_smc.rnic.roce.queue_pair import RECEIVES
from trio_smc.rnic.verbs import (
    Completion,
    QpState,
    QueueFull,
    RnicError,
    RnicEvent,
    WcOpcode,
    WcStatus,
)

RING = 1 << 20
TOTAL = 32 << 20
MESSAGE = struct.Struct(">B3xQQ24x")
"""44 bytes: 0xfe, bytes produced, bytes consumed."""


def log(role: str, text: str) -> None:
    sys.stdout.write(f"{role}: {text}\n")
    sys.stdout.flush()


class Transfer:
    """Both directions of a byte stream over a pair, with the ring in the pair's region."""

    def __init__(self, pair: Pair, seed: int) -> None:
        self.pair = pair
        self.rng = random.Random(seed)
        self.sent = hashlib.sha256()
        self.received = hashlib.sha256()
        self.produced = self.acknowledged = 0
        self.consumed = self.announced = self.arrived = 0
        self.counts: Counter[str] = Counter()

    def handle(self) -> None:
        """All completions."""
        got, self.pair.got = self.pair.got, []
        for completion in got:
            assert completion.status == WcStatus.SUCCESS, completion
            if completion.opcode == WcOpcode.RECV:
                assert completion.data is not None
                assert len(completion.data) == MESSAGE.size, completion
                kind, produced, consumed = MESSAGE.unpack(completion.data)
                assert kind == 0xFE
                self.acknowledged = max(self.acknowledged, consumed)
                self.arrived = max(self.arrived, produced)
                self.pair.qp.post_receive(1)
                self.counts["receives"] += 1
            else:
                self.counts["own completions"] += 1
        self.consume()

    def consume(self) -> None:
        view = self.pair.memory.view
        while self.consumed < self.arrived:
            start = self.consumed % RING
            length = min(self.arrived - self.consumed, RING - start)
            self.received.update(view[start : start + length])
            self.consumed += length

    def send_cursor(self) -> bool:
        """Send both cursors; False if the queue is full."""
        try:
            self.pair.qp.post_send(self.produced, MESSAGE.pack(0xFE, self.produced, self.consumed))
        except QueueFull:
            self.counts["queue full"] += 1
            return False
        self.announced = self.consumed
        self.counts["sends"] += 1
        return True

    def write(self, data: bytes) -> None:
        """One turn of the ring needs two writes; each takes its data in two pieces."""
        start = self.produced % RING
        whole = memoryview(data)
        for offset, piece in ((start, whole[: RING - start]), (0, whole[RING - start :])):
            if not piece:
                continue
            cut = self.rng.randrange(len(piece) + 1)
            self.pair.qp.post_write(
                self.produced,
                piece[:cut],
                piece[cut:],
                address=self.pair.peer["address"] + offset,
                rkey=self.pair.peer["rkey"],
            )
            self.counts["writes"] += 1

    async def run(self) -> None:
        pair, pending = self.pair, b""
        owed = False
        # `told` comes after `consumed`: the peer waits for our last cursor too.
        while min(self.produced, self.announced, self.acknowledged) < TOTAL:
            moved = False
            if not pending and self.produced < TOTAL:
                size = int(2 ** self.rng.uniform(0, 18))
                pending = self.rng.randbytes(min(size, TOTAL - self.produced))
            room = RING - (self.produced - self.acknowledged)
            if pending and not owed and len(pending) <= min(room, pair.qp.write_capacity()):
                try:
                    self.write(pending)
                except QueueFull:
                    self.counts["queue full"] += 1
                else:
                    self.sent.update(pending)
                    self.produced += len(pending)
                    pending, owed, moved = b"", True, True
            if self.consumed - self.announced >= RING // 4 or (
                self.consumed == TOTAL and self.announced < TOTAL
            ):
                owed = True
            if owed and self.send_cursor():
                owed, moved = False, True
            if moved:
                await trio.lowlevel.checkpoint()
            else:
                await pair.wait(lambda pair: bool(pair.got))
            self.handle()


async def bytes_both_ways(device: Device, control: Control, role: str, seed: int) -> str:
    async with connected(device, control, size=RING, receives=RECEIVES) as pair:
        transfer = Transfer(pair, 2 * seed + (role == "server"))
        start = time.perf_counter()
        await transfer.run()
        seconds = time.perf_counter() - start
        theirs = await control.swap([transfer.sent.hexdigest(), TOTAL])
        assert theirs == [transfer.received.hexdigest(), transfer.consumed], theirs
        return (
            f"{TOTAL} bytes each way at once in {seconds:.2f} s, SHA-256 of what came "
            f"{transfer.received.hexdigest()[:16]} as sent; {dict(transfer.counts)}; "
            f"slept {device.sleeps} times"
        )


async def round_trips(device: Device, control: Control, role: str, seed: int) -> str:
    """Every message waits for the one before: a lost wakeup would hang."""
    count, times = 500, []
    async with connected(device, control) as pair:
        for number in range(count):
            start = time.perf_counter()
            for sending in (role == "client", role == "server"):
                if sending:
                    pair.qp.post_send(number, bytes(44), signaled=number % 16 == 0)
                else:
                    while True:
                        completion = await pair.take()
                        assert completion.status == WcStatus.SUCCESS, completion
                        if completion.opcode == WcOpcode.RECV:
                            break
                    pair.qp.post_receive(1)
            times.append(time.perf_counter() - start)
    times.sort()
    return f"{count} round trips of 44 bytes, median {times[count // 2] * 1e6:.0f} us"


async def wrong_state(device: Device, control: Control, role: str, seed: int) -> str:
    pair = Pair(device, 4096)
    refused = 0
    gid = device.rnic.gid
    for attempt in (
        lambda: pair.qp.post_send(1, b"x"),
        lambda: pair.qp.post_receive(1),
        lambda: pair.qp.to_rts(psn=1),
        lambda: pair.qp.to_rtr(gid=gid, qp_num=1, psn=1, mtu=1),
        lambda: (pair.qp.to_init(), pair.qp.to_rtr(gid=gid, qp_num=0, psn=1, mtu=1)),
        lambda: pair.qp.to_rtr(gid=gid, qp_num=1, psn=1, mtu=device.rnic.mtu + 1),
        pair.pd.close,
    ):
        try:
            attempt()
        except RnicError:
            refused += 1
    assert refused == 7, refused
    pair.close()
    for attempt in (lambda: pair.qp.post_send(1, b"x"), lambda: pair.qp.post_receive(1)):
        try:
            attempt()
        except RnicError:
            refused += 1
    assert refused == 9, refused
    for again in (pair.close_all, pair.qp.to_err):
        again()
    fresh = Pair(device, 4096)
    fresh.qp.to_err()
    assert fresh.qp.state is QpState.ERR
    fresh.close()
    await control.swap()
    return "9 calls in a wrong state or on a closed object: RnicError each"


def of_sends(pair: Pair) -> list[tuple[int, int]]:
    """(status, wr_id) of the completions of the send queue."""
    return [(c.status, c.wr_id) for c in pair.got if c.opcode != WcOpcode.RECV]


async def refused_write(device: Device, control: Control, role: str, what: str) -> str:
    """The client's write must fail with REM_ACCESS_ERR and end both queue pairs."""
    async with connected(device, control) as pair:
        other = device.rnic.alloc_pd()
        memory = device.rnic.alloc_memory(4096)
        region = other.register(memory)
        try:
            foreign = await control.swap([region.rkey, region.address])
            offset, data = 0, b"x" * 16
            if what == "wrong RKey":
                pair.peer["rkey"] ^= 0x100
            elif what == "one byte out of bounds":
                offset = 4096 - 15
            elif what == "RKey of another domain":
                pair.peer["rkey"], pair.peer["address"] = foreign
            elif role == "server":
                pair.region.close()
            await control.swap()
            start = time.perf_counter()
            if role == "client":
                pair.write(data, offset, wr_id=77, signaled=False)
                pair.write(data, 0, wr_id=78)
                # Flushed receives may come before, between or after: each queue has its own order.
                await pair.wait(lambda pair: len(of_sends(pair)) == 2)
                assert of_sends(pair) == [
                    (WcStatus.REM_ACCESS_ERR, 77),
                    (WcStatus.WR_FLUSH_ERR, 78),
                ], pair.got
            took = time.perf_counter() - start
            await pair.wait(lambda pair: any(c.opcode == WcOpcode.RECV for c in pair.got))
            flushed = [c for c in pair.got if c.opcode == WcOpcode.RECV]
            assert {(c.status, c.data) for c in flushed} == {(WcStatus.WR_FLUSH_ERR, None)}
            assert pair.qp.state is QpState.ERR
            assert not any(pair.memory.view), "refused, but written"
            assert not any(memory.view), "refused, but written"
            if role == "server":
                return f"{what}: receives flushed, nothing else told, state ERR"
            return f"{what}: REM_ACCESS_ERR after {took * 1e3:.0f} ms, the rest flushed, state ERR"
        finally:
            region.close()
            other.close()
            memory.close()


async def to_err(device: Device, control: Control, role: str, seed: int) -> str:
    async with connected(device, control) as pair:
        pair.qp.to_err()
        await pair.wait(lambda pair: len(pair.got) == 4)
        assert {c.status for c in pair.got} == {WcStatus.WR_FLUSH_ERR}, pair.got
        pair.got.clear()
        pair.qp.post_send(5, b"x", signaled=False)
        flushed = await pair.take()
        assert (flushed.status, flushed.wr_id) == (WcStatus.WR_FLUSH_ERR, 5), flushed
    return "to_err flushed the 4 receives, and a later send"


async def receiver_not_ready(device: Device, control: Control, role: str, seed: int) -> str:
    async with connected(device, control, receives=0) as pair:
        if role == "client":
            pair.qp.post_send(1, b"wait")
            with trio.move_on_after(0.3):
                raise AssertionError(await pair.take())
            await control.swap()
            done = await pair.take()
            assert (done.status, done.wr_id) == (WcStatus.SUCCESS, 1), done
        else:
            await control.swap()
            assert not pair.got, pair.got
            pair.qp.post_receive(1)
            got = await pair.take()
            assert (got.status, got.data) == (WcStatus.SUCCESS, b"wait"), got
    return "a send without a receive waited 0.3 s and went when one was posted"


async def full_queues(device: Device, control: Control, role: str, seed: int) -> str:
    rnic = device.rnic
    async with connected(device, control, receives=0) as pair:
        if role == "client":
            for number in range(rnic.send_depth):
                pair.qp.post_send(number, b"%d" % number, signaled=False)
            refused = 0
            try:
                pair.qp.post_send(999, b"")
            except QueueFull:
                refused += 1
            assert refused == 1
            await control.swap()
            await control.swap()
            pair.qp.post_send(999, b"last")
            done = await pair.take()
            assert (done.status, done.wr_id) == (WcStatus.SUCCESS, 999), done
        else:
            await control.swap()
            pair.qp.post_receive(pair.qp.receive_depth)
            refused = 0
            try:
                pair.qp.post_receive(1)
            except QueueFull:
                refused += 1
            assert refused == 1
            await pair.wait(lambda pair: len(pair.got) == rnic.send_depth)
            numbers = [int(c.data or b"-1") for c in pair.got]
            assert numbers == list(range(rnic.send_depth)), numbers
            pair.qp.post_receive(1)
            await control.swap()
    return f"QueueFull at {rnic.send_depth} sends and {pair.qp.receive_depth} receives; order kept"


async def full_ring(device: Device, control: Control, role: str, seed: int) -> str:
    async with connected(device, control, size=RING) as pair:
        whole = pair.qp.write_capacity()
        if role == "client":
            data = random.Random(seed).randbytes(whole // 8)
            for number in range(8):
                pair.write(data, number * len(data), wr_id=number, signaled=False)
            assert pair.qp.write_capacity() == 0
            refused = 0
            try:
                pair.write(b"x", 0)
            except QueueFull:
                refused += 1
            assert refused == 1
            pair.qp.post_send(9, b"all")
            done = await pair.take()
            assert (done.status, done.wr_id) == (WcStatus.SUCCESS, 9), done
            assert pair.qp.write_capacity() == whole
        else:
            got = await pair.take()
            assert got.data == b"all", got
            data = random.Random(seed).randbytes(whole // 8)
            assert bytes(pair.memory.view) == data * 8
    return f"a send ring of {whole} bytes filled, refused more, and came free"


async def zeroed_in_place(device: Device, control: Control, role: str, seed: int) -> str:
    """Peers' writes must still be seen after a registered region was zeroed."""
    size = 1 << 18
    async with connected(device, control, size=size) as pair:
        pair.memory.view[:] = b"\xff" * size
        pair.memory.zero(0, size)
        assert not any(pair.memory.view)
        await control.swap()
        pair.write(role.encode() * 100, 8192)
        pair.qp.post_send(2, b"done")
        other = "client" if role == "server" else "server"
        await pair.wait(lambda pair: any(c.data == b"done" for c in pair.got))
        assert bytes(pair.memory.view[8192:8792]) == other.encode() * 100
    return "a write arrived in a region that was zeroed while registered"


async def port_flap(device: Device, control: Control, role: str, seed: int) -> str:
    """The client's port goes down and up; queue pairs continue."""
    events: list[RnicEvent] = []
    send_cursor, news = trio.open_memory_channel[RnicEvent](9)

    def on_event(event: RnicEvent) -> None:
        events.append(event)
        send_cursor.send_nowait(event)

    device.rnic.on_event = on_event
    async with connected(device, control) as pair:
        if role == "client":
            for change, event in (("down", RnicEvent.PORT_DOWN), ("up", RnicEvent.PORT_UP)):
                await trio.run_process(["ip", "link", "set", "eth0", change])
                with trio.fail_after(PATIENCE):
                    assert await news.receive() == event
                assert device.rnic.port_active is (change == "up")
        await control.swap()
        pair.qp.post_send(1, b"after")
        await pair.wait(lambda pair: len(pair.got) == 2)
        assert {c.status for c in pair.got} == {WcStatus.SUCCESS}, pair.got
    device.rnic.on_event = None
    assert events == ([RnicEvent.PORT_DOWN, RnicEvent.PORT_UP] if role == "client" else [])
    return f"events {[str(event) for event in events]}, and the queue pair went on"


async def nothing_left(device: Device, control: Control, role: str, seed: int) -> str:
    """Open and close everything again and again: no descriptor, little memory."""

    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096

    before, grown = descriptors(), []
    for round_ in range(3):
        size = resident()
        for _ in range(20):
            pair = Pair(device, 65536)
            pair.qp.to_init()
            pair.qp.post_receive(8)
            if round_ % 2:
                pair.qp.to_err()
            pair.close()
            await trio.lowlevel.checkpoint()
        grown.append(resident() - size)
    assert descriptors() == before, set(descriptors()) ^ set(before)
    assert grown[-1] <= 65536, grown
    await control.swap()
    return f"60 domains, regions and queue pairs opened and closed; bytes grown {grown}"


STEPS = (
    wrong_state,
    bytes_both_ways,
    round_trips,
    to_err,
    receiver_not_ready,
    full_queues,
    full_ring,
    zeroed_in_place,
    port_flap,
    nothing_left,
)
REFUSED = ("wrong RKey", "one byte out of bounds", "RKey of another domain", "revoked RKey")


async def all_steps(control: Control, role: str, name: str, seed: int) -> None:
    before = descriptors()
    async with open_device(name) as device:
        rnic = device.rnic
        log(role, f"{rnic.name} gid {rnic.gid.hex(':', 2)} mac {rnic.mac.hex(':')} "
                  f"mtu {rnic.mtu} active {rnic.port_active} seed {seed}")  # fmt: skip
        for step in STEPS:
            log(role, f"ok {step.__name__}: {await step(device, control, role, seed)}")
    # A device can be opened again; this time by a stack's pump, first without spinning.
    for spin in (0, 50e-6):
        async with open_device(name, Pump(spin=spin)) as device:
            text = await round_trips(device, control, role, seed)
            log(role, f"ok round_trips: pump, spin {spin}: {text}; {device.sleeps} wakeups")
    async with open_device(name, Pump(spin=0)) as device:
        for what in REFUSED:
            log(role, f"ok refused_write: {await refused_write(device, control, role, what)}")
    assert descriptors() == before, set(descriptors()) ^ set(before)
    log(role, "ok close: no descriptor left")


async def peer_death(control: Control, role: str, name: str) -> None:
    async with open_device(name) as device, connected(device, control) as pair:
        if role == "server":
            os.kill(os.getpid(), signal.SIGKILL)
        with suppress(EOFError, trio.BrokenResourceError):
            await control.swap()
        # The kernel closes the dead process's files one by one: the socket may go before the
        # queue pair, which then still takes a send or two.
        failed = Completion(pair.qp.qp_num, WcOpcode.SEND, WcStatus.SUCCESS, 0, None)
        seconds = 0.0
        while failed.status == WcStatus.SUCCESS:
            start = time.perf_counter()
            pair.qp.post_send(1, b"anyone?")
            failed = await pair.take()
            seconds = time.perf_counter() - start
        assert (failed.status, failed.wr_id) == (WcStatus.RETRY_EXC_ERR, 1), failed
        assert pair.qp.state is QpState.ERR
        log(role, f"ok peer_death: RETRY_EXC_ERR after {seconds:.2f} s, state ERR")
        os._exit(0)  # the swap at the end of `connected` has no peer any more


async def main() -> None:
    role, peer, name, seed = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    control = await Control.connect(role, peer)
    async with control.stream:
        if "die" in sys.argv[5:]:
            await peer_death(control, role, name)
        else:
            await all_steps(control, role, name, seed)


if __name__ == "__main__":
    trio.run(main)
