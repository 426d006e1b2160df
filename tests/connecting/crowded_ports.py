"""The programs of `test_ports`, which run in a network namespace with few ports.

Arguments: "count", "reserved", "wanted" or "share"; the first and the last local port of the
system; and for "reserved" and "wanted" a range of ports, for "share" the number of clients.  If the
environment contains BEFORE_6_3, the program does not use IP_LOCAL_PORT_RANGE.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import resource
import socket
import struct
import sys
from functools import partial
from pathlib import Path

import trio

import trio_smc
from tests.timing import PATIENCE
from trio_smc.connecting import dial
from trio_smc.connecting.connect import connect_socket

HOST = "127.0.0.1"
CONFIG = trio_smc.Config(
    receive_buffer=16384, close_timeout=20, shutdown_timeout=20, learn_short=False
)
IP_LOCAL_PORT_RANGE = 51
CONNECTIONS = 20
SERVERS = 2


def report(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def system(name: str, value: str) -> None:
    Path(f"/proc/sys/net/ipv4/{name}").write_text(value)


def plain_servers(count: int) -> list[socket.socket]:
    made = [socket.socket() for _ in range(count)]
    for number, each in enumerate(made):
        each.bind((HOST, 50000 + number))
        each.listen(4096)
    return made


def count_tcp(addresses: list[tuple[str, int]]) -> list[int]:
    """Make as many TCP connections to each address as possible; returns their numbers."""
    opened: list[socket.socket] = []
    counts = []
    for address in addresses:
        before = len(opened)
        while True:
            sock = socket.socket()
            try:
                sock.connect(address)
            except OSError as error:
                sock.close()
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
                break
            opened.append(sock)
        counts.append(len(opened) - before)
    for sock in opened:  # a reset leaves no TIME_WAIT
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
    return counts


async def count() -> None:
    """Count the connections of TCP and `open_stream` to two SMC-R servers and a plain one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    plain = plain_servers(SERVERS + 1)
    addresses = [each.getsockname() for each in plain]
    report("tcp", *count_tcp(addresses))
    for each in plain[:SERVERS]:
        each.close()
    modes: collections.Counter[str] = collections.Counter()

    async def handler(stream: trio_smc.SmcStream) -> None:
        with contextlib.suppress(trio.BrokenResourceError):
            await stream.receive_some()

    async with trio_smc.open_stack(CONFIG) as stack, trio.open_nursery() as nursery:
        for _, port in addresses[:SERVERS]:
            await nursery.start(partial(stack.serve, handler, port, host=HOST))
        streams: list[trio_smc.SmcStream] = []
        counts = []
        for address in addresses:
            before = len(streams)
            while True:
                try:
                    streams.append(await stack.open_stream(*address))
                except OSError as error:
                    if error.errno != errno.EADDRNOTAVAIL:
                        raise
                    break
                modes[str(streams[-1].mode)] += 1
            counts.append(len(streams) - before)
        report("ours", *counts)
        report("modes", *(f"{mode}={number}" for mode, number in sorted(modes.items())))
        for stream in streams:
            stream.abort()
        nursery.cancel_scope.cancel()


async def ports_used(wanted: tuple[int, int] | None) -> None:
    """Print the ports of 20 connections, by `open_stream` or by a socket with a port range."""
    left, all_served = CONNECTIONS, trio.Event()

    async def handler(stream: trio_smc.SmcStream) -> None:
        nonlocal left
        left -= 1
        if not left:
            all_served.set()
        with contextlib.suppress(trio.BrokenResourceError):
            await stream.receive_some()

    async with trio_smc.open_stack(CONFIG) as stack, trio.open_nursery() as nursery:
        await nursery.start(partial(stack.serve, handler, 50000, host=HOST))
        opened: list[trio_smc.SmcStream] = []
        for _ in range(CONNECTIONS):
            if wanted is None:
                opened.append(await stack.open_stream(HOST, 50000))
                continue
            sock = trio.socket.socket()
            value = struct.pack("=I", wanted[1] << 16 | wanted[0])
            sock.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, value)
            opened.append(
                await connect_socket(stack.runtime, sock, (HOST, 50000), CONFIG, bound=False)
            )
            assert sock.getsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, 4) == value
        report(*sorted({str(stream.mode) for stream in opened}))
        report(*sorted(stream.socket.getsockname()[1] for stream in opened))
        # A server that has not read SMC Confirm does not answer an abort; the stack would wait.
        await all_served.wait()
        for stream in opened:
            stream.abort()
        nursery.cancel_scope.cancel()


async def share(clients: int) -> None:
    """Let clients in several processes connect to one server from the same ports."""
    seen: collections.Counter[str] = collections.Counter()

    async def handler(stream: trio_smc.SmcStream) -> None:
        data = b""
        async for piece in stream:
            data += piece
            if len(data) >= 8:
                break
        await stream.send_all(data)
        seen[str(stream.mode)] += 1
        with contextlib.suppress(trio.BrokenResourceError):  # the client aborts
            await stream.receive_some()

    async with trio_smc.open_stack(CONFIG) as stack, trio.open_nursery() as nursery:
        await nursery.start(partial(stack.serve, handler, 50000, host=HOST))
        command = [sys.executable, "-m", "tests.connecting.crowded_ports", "client", "0", "0"]
        async with trio.open_nursery() as running:
            for number in range(clients):
                running.start_soon(trio.run_process, [*command, str(number)])
        nursery.cancel_scope.cancel()
    report(sum(seen.values()), seen[str(trio_smc.Mode.SMC_R)] > 0)


async def client(number: int) -> None:
    """Make 20 connections, each with different data."""
    async with trio_smc.open_stack(CONFIG) as stack:
        for turn in range(20):
            word = struct.pack("!II", number, turn)
            while True:
                try:
                    stream = await stack.open_stream(HOST, 50000)
                except OSError as error:
                    if error.errno != errno.EADDRNOTAVAIL:
                        raise
                    await trio.sleep(0.01)  # other clients use all ports, as over TCP
                    continue
                break
            await stream.send_all(word)
            answer = b""
            while len(answer) < len(word):
                piece = await stream.receive_some()
                assert piece, "the stream ended too early"
                answer += piece
            assert answer == word
            stream.abort()


async def main(program: str, first: str, last: str, *rest: str) -> None:
    [more] = rest or [""]
    if program != "client":
        await trio.run_process(["ip", "link", "set", "lo", "up"])
        system("ip_local_port_range", f"{first} {last}")
    with trio.fail_after(2 * PATIENCE):
        if program == "count":
            await count()
        elif program == "reserved":
            system("ip_local_reserved_ports", more)
            await ports_used(None)
        elif program == "wanted":
            await ports_used((int(more.split("-", maxsplit=1)[0]), int(more.split("-")[1])))
        elif program == "share":
            await share(int(more))
        else:
            await client(int(more))


if __name__ == "__main__":
    if "BEFORE_6_3" in os.environ:
        dial.IP_LOCAL_PORT_RANGE = 9999  # ENOPROTOOPT
    program, first, last, *rest = sys.argv[1:]
    trio.run(main, program, first, last, *rest)
