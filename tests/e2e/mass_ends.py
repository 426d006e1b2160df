"""The time for which the loop of a process is blocked when many resources end together.

``python -m tests.e2e.mass_ends CASE COUNT`` prints the cost as a line of JSON: that of
`tests.e2e.sudden_end.Costs`, and how many bytes of memory the server had more than in the beginning
while all were there (``held``) and after the end (``kept``).  The server is this process, its peers
are another one.  CASE:

first-contacts: COUNT clients confirm and then never answer CONFIRM LINK (RFC 7609, C.7).
handshakes: COUNT clients read SMC Accept and never confirm (C.5).
killed: a process with COUNT link groups, a connection in each, is killed.
left: such a process leaves all its stacks in order (3.5.4).
stopped: such a process is stopped and does not answer TEST LINK on any link (4.5.3).  The RNIC
    shows that the process lives, so all links stay, and answer when the process goes on.
silent: the same, but the RNIC does not show that the process lives: all links fail.
closed: one peer closes COUNT connections of one link group at once.
idle: COUNT link groups without connections have been idle for too long (3.5.4).
port: the server's RNIC fails under COUNT link groups.
move: one of two RNICs fails; COUNT connections go on over the other one (4.6).
leave: the server leaves its stack with COUNT link groups.
"""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final, Literal

import trio

import trio_smc
from tests.e2e.sudden_end import Costs
from tests.timing import PATIENCE, SLOWER
from trio_smc import Config, SmcListener, SmcStream, SoftRnic, Stack
from trio_smc.rnic.soft.faults import FaultPlan
from trio_smc.stack.groups import GroupTable
from trio_smc.streams.rdma_stream import RdmaStream
from trio_smc.wire import clc

HOST: Final = "127.0.0.1"
TIMEOUT: Final = 4.0 * SLOWER
"""Seconds of the time-outs that end many resources together.  All must begin in that time."""
SILENT: Final = frozenset({"first-contacts", "handshakes"})
STOPPED: Final = frozenset({"stopped", "silent"})
GREETING: Final = b"hello"


# --- the server ---------------------------------------------------------------------------------


def settings(case: str) -> Config:
    """The configuration of the process that is measured."""
    return Config(
        tcp_option="off",
        learn_short=False,
        discovery="assume" if case in SILENT else "auto",
        first_contact_timeout=TIMEOUT,
        handshake_timeout=TIMEOUT,
        receive_buffer=16 * 1024 if case == "move" else None,
        test_link_interval=1.0 if case in STOPPED else 30.0,
        link_group_idle=TIMEOUT if case == "idle" else 600.0,
        rnics=rnics(case),
    )


def rnics(case: str) -> tuple[SoftRnic, ...] | Literal["auto"]:
    if case in ("move", "port"):
        return SoftRnic("soft0"), SoftRnic("soft1")
    # With a plan of faults an RNIC does not know if a peer lives, like a RoCE adapter.
    return (SoftRnic("soft0", faults=FaultPlan()),) if case == "silent" else "auto"


def have_links(groups: GroupTable, count: int, state: str) -> bool:
    """True if there are ``count`` link groups, and each of their links is in this state."""
    links = [link for group in groups.groups for link in group.links.values()]
    return len(groups.groups) == count and all(link.state == state for link in links)


def resident() -> int:
    """Bytes of memory that this process has, shared memory included."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


class MassCosts(Costs):
    """``before``: `resident` before the first of the ending resources exists."""

    def __init__(self, before: int) -> None:
        super().__init__()
        self._before = before
        self._held = resident() - before

    def end(self) -> dict[str, float]:
        cost = super().end()
        gc.collect()
        return {**cost, "held": self._held, "kept": resident() - self._before}


def have_active_links(groups: GroupTable, number: int) -> bool:
    """True if each link group has this many links that carry data."""
    return all(
        [link.state for link in group.links.values()] == ["ACTIVE"] * number
        for group in groups.groups
    )


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that has no event."""
    with trio.fail_after(2 * PATIENCE):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.01)


async def serve(case: str, count: int) -> dict[str, float]:
    """Run the server; returns the cost of the end."""
    config = settings(case)
    cost: dict[str, float] = {}
    async with trio.open_nursery() as nursery:
        async with trio_smc.open_stack(config) as stack:
            [listener] = await trio_smc.open_listeners(0, host=HOST)
            port = listener.socket.getsockname()[1]
            command = [sys.executable, "-m", __spec__.name, f"peer-{case}", str(count), str(port)]
            peer = await trio.lowlevel.open_process(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            try:
                costs = await end_all(case, count, stack, listener, peer, nursery)
                if case != "leave":
                    cost = costs.end()
                if case == "stopped":
                    peer.kill()
                    await until(lambda: not stack.runtime.groups.groups)
                await listener.aclose()
            except BaseException:
                peer.kill()
                raise
        cost = cost or costs.end()
        with contextlib.suppress(ProcessLookupError):
            peer.kill()
        await peer.wait()
        for pipe in (peer.stdin, peer.stdout):
            assert pipe is not None
            await pipe.aclose()
        nursery.cancel_scope.cancel()
    async with trio_smc.open_stack(Config(tcp_option="off", learn_short=False)):
        # The next process removes the files that a killed process has left in the directory.
        [listener] = await trio_smc.open_listeners(0, host=HOST)
        await listener.aclose()
    return cost


async def end_all(
    case: str,
    count: int,
    stack: Stack,
    listener: SmcListener,
    peer: trio.Process,
    nursery: trio.Nursery,
) -> MassCosts:
    """Let the peer connect, then end everything; returns the costs of the end."""
    groups = stack.runtime.groups
    before = resident()
    await come(case, count, groups, listener, peer, nursery)
    await trio.sleep(0.3)  # the last work of the handshakes is not measured
    gc.collect()
    costs = MassCosts(before)
    if case in STOPPED:
        os.kill(peer.pid, signal.SIGSTOP)
        await until(lambda: have_links(groups, count, "TESTING"))
    stand_still(case, stack, peer)
    if case == "stopped":
        timers = stack.runtime.timers
        await until(lambda: timers.next_deadline() > timers.now())  # the time-outs are over
        assert have_links(groups, count, "TESTING")
        os.kill(peer.pid, signal.SIGCONT)
        await until(lambda: have_links(groups, count, "ACTIVE"))
    elif case == "closed":
        await until(lambda: not groups.endpoints)
    elif case == "move":
        # A link to the client's other RNIC may be added at once: the group may have two again.
        await until(lambda: not groups.on_rnics(list(stack.rnics[:1])))
        assert len(groups.endpoints) == count
    elif case != "leave":
        await until(lambda: not groups.groups)
    return costs


async def come(
    case: str,
    count: int,
    groups: GroupTable,
    listener: SmcListener,
    peer: trio.Process,
    nursery: trio.Nursery,
) -> None:
    """Wait until all resources that will end exist."""
    assert peer.stdin is not None
    assert peer.stdout is not None
    streams: list[SmcStream] = []
    nursery.start_soon(accept_all, listener, streams)
    with trio.fail_after(2 * PATIENCE):
        assert await peer.stdout.receive_some(1)
    if case in SILENT:
        await until(lambda: len(groups.groups) >= count)
        return
    await until(lambda: len(streams) >= count)
    for stream in streams:
        assert await stream.receive_some() == GREETING
    if case == "idle":
        await peer.stdin.send_all(b"c")
        for stream in streams:
            await stream.aclose()
        await until(lambda: not groups.endpoints)
    elif case != "leave":
        for stream in streams:
            nursery.start_soon(read_to_end, stream)
    if case == "move":
        await until(lambda: have_active_links(groups, 2))


def stand_still(case: str, stack: Stack, peer: trio.Process) -> None:
    """End all of them, or make them due, while the loop stands still; it then finds all at once."""
    if case in SILENT | STOPPED or case == "idle":
        time.sleep(TIMEOUT)
    elif case == "killed":
        peer.kill()
        os.waitid(os.P_PID, peer.pid, os.WEXITED | os.WNOWAIT)
    elif case in ("left", "closed"):
        assert isinstance(peer.stdin, trio.lowlevel.FdStream)
        assert isinstance(peer.stdout, trio.lowlevel.FdStream)
        os.write(peer.stdin.fileno(), b"c")
        select.select([peer.stdout.fileno()], [], [])
    elif case in ("port", "move"):
        for rnic in stack.rnics[: 1 if case == "move" else None]:
            assert isinstance(rnic, SoftRnic)
            rnic.fail()


async def accept_all(listener: SmcListener, streams: list[SmcStream]) -> None:
    with contextlib.suppress(trio.ClosedResourceError):
        while True:
            streams.append(await listener.accept())


async def read_to_end(stream: SmcStream) -> None:
    with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        while await stream.receive_some():
            pass
    await stream.aclose()


# --- the peers ----------------------------------------------------------------------------------


def stay_silent(case: str, count: int, port: int) -> None:
    """Run clients that do not answer the server."""
    rnic = SoftRnic("silent")
    rnic.open(Path(Config().private_directory()))
    pd = rnic.alloc_pd()
    connections = []
    for number in range(count):
        peer_id = number.to_bytes(2, "big") + rnic.mac
        sock = socket.create_connection((HOST, port))
        sock.sendall(
            clc.Proposal(
                peer_id=peer_id, gid=rnic.gid, mac=rnic.mac, ipv4_subnet=bytes((127, 0, 0, 0)),
                ipv4_mask_length=8,
            ).encode()
        )  # fmt: skip
        connections.append((peer_id, sock))
    for peer_id, sock in connections:
        accept = clc.decode_untrusted(sock.recv(68, socket.MSG_WAITALL))
        assert isinstance(accept, clc.Accept), accept
        if case == "first-contacts":
            qp = rnic.create_qp(pd)
            qp.to_init()
            qp.to_rtr(gid=accept.gid, qp_num=accept.qp_number, psn=accept.initial_psn, mtu=5)
            qp.post_receive(10)
            sock.sendall(
                clc.Confirm(
                    peer_id=peer_id, gid=rnic.gid, mac=rnic.mac,
                    qp_number=qp.qp_num, rkey=1, rmbe_index=1, alert_token=1, buffer_size_code=0,
                    qp_mtu=5, rmb_address=0, initial_psn=1,
                ).encode()
            )  # fmt: skip
    signal_ready()
    sys.stdin.read()


def signal_ready() -> None:
    sys.stdout.write("\n")
    sys.stdout.flush()


@contextlib.asynccontextmanager
async def stacks(case: str, count: int) -> AsyncIterator[list[Stack]]:
    """Run one stack for each link group."""
    config = Config(tcp_option="off", learn_short=False, control=False, shutdown_timeout=1.0)
    if case == "move":
        config = Config(
            tcp_option="off", learn_short=False, rnics=(SoftRnic("soft0"), SoftRnic("soft1"))
        )
    async with contextlib.AsyncExitStack() as opened:
        number = 1 if case in ("closed", "move") else count
        yield [await opened.enter_async_context(trio_smc.open_stack(config)) for _ in range(number)]


async def speak(case: str, count: int, port: int) -> None:
    """Run clients of trio_smc."""
    async with stacks(case, count) as opened:
        streams: list[RdmaStream] = []
        for number in range(count):
            stream = await opened[number % len(opened)].open_stream(HOST, port)
            assert isinstance(stream, RdmaStream), stream.fallback
            await stream.send_all(GREETING)
            streams.append(stream)
        signal_ready()
        await trio.to_thread.run_sync(sys.stdin.buffer.read, 1)
        for stream in streams:
            if case != "left":
                stream.close()
        for stack in opened:
            for group in stack.runtime.groups.groups:
                if case == "left":
                    group.terminate()
        await trio.sleep(0.1)  # deferred messages are sent in each pass
        signal_ready()
        await trio.to_thread.run_sync(sys.stdin.buffer.read)


def main() -> None:
    case, number, *port = sys.argv[1:]
    if not port:
        sys.stdout.write(json.dumps(trio.run(serve, case, int(number))) + "\n")
    elif case.removeprefix("peer-") in SILENT:
        stay_silent(case.removeprefix("peer-"), int(number), int(port[0]))
    else:
        trio.run(speak, case.removeprefix("peer-"), int(number), int(port[0]))


if __name__ == "__main__":
    main()
