"""A second process for the tests of the software RNIC.

``python -m tests.rnic.soft_peer MODE DIRECTORY [SEED]`` opens an RNIC and a queue pair, prints its
GID, queue pair number, RKey and address as JSON, reads the same of its peer, connects, prints
"ready", reads a line and then acts as MODE says; it ends when its standard input ends.

echo: sends every message back, and sleeps while there is none.
burst: writes and sends 50 messages, prints "sent", and does nothing more.
fork: forks a child that lives until standard input ends.
silent: connects and never polls its RNIC again.
"""

from __future__ import annotations

import json
import os
import random
import select
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.rnic.contract import MEMORY, End, make_end
from tests.timing import PATIENCE
from trio_smc.rnic.soft.device import SoftRnic

BURST = 50


class Peer:
    """The second process, as the first one controls it; a context manager that ends the process."""

    def __init__(self, mode: str, directory: Path, seed: int = 0) -> None:
        command = [sys.executable, "-m", "tests.rnic.soft_peer", mode, str(directory), str(seed)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def connect(self, end: End) -> dict[str, Any]:
        """Connect ``end`` to the process. Returns the rkey and the address of its memory."""
        found: dict[str, Any] = json.loads(self.line())
        self.send_line(json.dumps(describe(end)))
        join(end, found)
        assert self.line() == "ready"
        self.send_line("go")
        return found

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def send_line(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: object, trace: TracebackType | None
    ) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        if kind is not None:
            self.process.kill()
        self.process.wait(PATIENCE)
        self.process.stdout.close()


def describe(end: End) -> dict[str, Any]:
    return {
        "gid": end.rnic.gid.hex(),
        "qp_num": end.qp.qp_num,
        "rkey": end.region.rkey,
        "address": end.region.address,
    }


def join(end: End, peer: dict[str, Any]) -> None:
    """Bring ``end`` to RTS; all sequence numbers are 1."""
    end.qp.post_receive(512)
    end.qp.to_rtr(gid=bytes.fromhex(peer["gid"]), qp_num=peer["qp_num"], psn=1, mtu=5)
    end.qp.to_rts(psn=1)


def main() -> None:
    mode, directory, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    rnic = SoftRnic("peer")
    rnic.open(directory)
    end = make_end(rnic)
    print_line(json.dumps(describe(end)))
    peer = json.loads(sys.stdin.readline())
    join(end, peer)
    print_line("ready")
    sys.stdin.readline()
    if mode == "echo":
        echo(end, random.Random(seed))
    elif mode == "burst":
        burst(end, peer)
    elif mode == "fork":
        if os.fork() == 0:
            rnic.abandon()
            sys.stdin.read()
            os._exit(0)
        print_line("forked")
    sys.stdin.read()
    end.close()
    rnic.close()


def print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def burst(end: End, peer: dict[str, Any]) -> None:
    for index in range(BURST):
        offset = index * 16
        assert offset < MEMORY
        end.qp.post_write(
            index + 1,
            memoryview(b"written %4d" % index),
            None,
            address=peer["address"] + offset,
            rkey=peer["rkey"],
        )
        end.qp.post_send(index + 1, b"message %4d" % index)
    statuses = {completion.status for completion in end.rnic.poll()}
    print_line("sent" if statuses == {0} else f"failed: {statuses}")


def echo(end: End, rng: random.Random) -> None:
    """Echo until standard input ends; sleep whenever possible, after pauses of random length."""
    rnic = end.rnic
    sleeper = select.poll()
    sleeper.register(rnic.wait_fd(), select.POLLIN)
    sleeper.register(sys.stdin.fileno(), select.POLLIN)
    while True:
        messages = [completion for completion in rnic.poll() if completion.data is not None]
        for completion in messages:
            end.qp.post_receive(1)
            end.qp.post_send(1, completion.data or b"", signaled=False)
        if messages:
            continue
        pause(rng)
        if rnic.arm():
            ready = dict(sleeper.poll(PATIENCE * 1000))
            if sys.stdin.fileno() in ready:
                return
            assert ready, "no wakeup"
            rnic.service()


def pause(rng: random.Random) -> None:
    """Busy-wait up to 20 microseconds, so that the peer's message arrives at any step of arming."""
    end = time.perf_counter() + rng.random() * 20e-6
    while time.perf_counter() < end:
        pass


if __name__ == "__main__":
    main()
