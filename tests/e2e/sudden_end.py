"""The cost for a process when many connections end at once without an orderly close.

``python -m tests.e2e.sudden_end CASE CONNECTIONS`` prints it as a line of JSON.  The server is this
process; the clients are another one, which sends only a few bytes on each connection.  CASE:

killed: the clients' process is killed while the server has a reader on each connection.
unread: the server closes all of them one after the other, with `UNREAD` bytes unread in each.
left: the server leaves its stack while all of them are open.

``seconds`` and ``processor``: from then until all is closed.  ``memory``: bytes by
which the peak of the server's resident memory grew.  ``pause``: the longest time in seconds that
its loop took from one poll of I/O to the next; if the system ran another process
meanwhile, only the running time of the loop.  ``work``: the longest processor time of that.
``open``, ``left``: descriptors of the server while they were open, and when all were closed.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import resource
import subprocess
import sys
import time

import trio

import trio_smc
from tests.timing import PATIENCE
from trio_smc import Config, SmcStream, Stack

HOST = "127.0.0.1"
UNREAD = 10


class Pauses(trio.abc.Instrument):
    """The time of the loop between two polls of I/O, for which all tasks wait."""

    def __init__(self) -> None:
        self.longest = self.work = 0.0
        self.after_io_wait(0.0)

    def after_io_wait(self, timeout: float) -> None:
        self._switches = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
        self._since = time.perf_counter(), time.thread_time()

    def before_io_wait(self, timeout: float) -> None:
        length, work = time.perf_counter() - self._since[0], time.thread_time() - self._since[1]
        self.work = max(self.work, work)
        if resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw != self._switches:
            length = work
        self.longest = max(self.longest, length)


class Costs:
    """The costs from its creation until `end`."""

    def __init__(self) -> None:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # resets the peak
        with open("/proc/self/statm") as file:
            self._resident = int(file.read().split()[1]) * mmap.PAGESIZE
        self._open = len(os.listdir("/proc/self/fd"))
        self._pauses = Pauses()
        trio.lowlevel.add_instrument(self._pauses)
        self._start = time.perf_counter(), time.process_time()

    def end(self) -> dict[str, float]:
        """Return the costs."""
        seconds = time.perf_counter() - self._start[0]
        processor = time.process_time() - self._start[1]
        trio.lowlevel.remove_instrument(self._pauses)
        with open("/proc/self/status") as file:
            peak = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
        return {
            "seconds": seconds, "processor": processor, "memory": peak - self._resident,
            "pause": self._pauses.longest, "work": self._pauses.work, "open": self._open,
            "left": len(os.listdir("/proc/self/fd")),
        }  # fmt: skip


async def all_closed(stack: Stack) -> None:
    """Wait until all connections are closed, and the resources of ended link groups are free."""
    table = stack.runtime.groups
    with trio.fail_after(2 * PATIENCE):
        # There is no event, and `Stack.statistics` would add up all of them each time.
        while table.endpoints or any(group.state == "GONE" for group in table.groups):  # noqa: ASYNC110
            await trio.sleep(0.001)


async def read(stream: SmcStream) -> None:
    assert len(await stream.receive_some()) == UNREAD
    with contextlib.suppress(trio.BrokenResourceError):
        await stream.receive_some()


async def serve(case: str, connections: int) -> dict[str, float]:
    """Run the server; returns the cost of the end."""
    async with trio.open_nursery() as nursery:
        async with trio_smc.open_stack(Config(tcp_option="off", learn_short=False)) as stack:
            [listener] = await trio_smc.open_listeners(0, host=HOST)
            port = listener.socket.getsockname()[1]
            command = [sys.executable, "-m", __spec__.name, "client", str(connections), str(port)]
            client = await trio.lowlevel.open_process(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            assert client.stdin is not None
            assert client.stdout is not None
            streams: list[SmcStream] = []
            with trio.fail_after(2 * PATIENCE * (1 + connections // 1000)):
                while len(streams) < connections:
                    streams.append(await listener.accept())
                await client.stdout.receive_some(1)
            assert {stream.mode for stream in streams} == {trio_smc.Mode.SMC_R}
            if case == "killed":
                for stream in streams:
                    nursery.start_soon(read, stream)
            await trio.sleep(0.5)  # the handshakes' last work is not measured
            costs = Costs()
            if case == "killed":
                client.kill()
                await all_closed(stack)
            elif case == "unread":
                for stream in streams:
                    await stream.aclose()
                await all_closed(stack)
            cost = costs.end() if case != "left" else {}
            await listener.aclose()
        cost = cost or costs.end()
        await client.stdin.aclose()
        await client.wait()
        await client.stdout.aclose()
    async with trio_smc.open_stack(Config(tcp_option="off", learn_short=False)):
        # The next process removes the files that a killed process has left in the directory.
        [listener] = await trio_smc.open_listeners(0, host=HOST)
        await listener.aclose()
    return cost


async def dial(connections: int, port: int) -> None:
    """Run the clients."""
    async with trio_smc.open_stack(Config(tcp_option="off", learn_short=False)):
        streams = []
        for _ in range(connections):
            streams.append(await trio_smc.open_stream(HOST, port))
            await streams[-1].send_all(bytes(UNREAD))
        sys.stdout.write("\n")
        sys.stdout.flush()
        await trio.to_thread.run_sync(sys.stdin.read)  # the server's end is ours


def main() -> None:
    case, connections, *port = sys.argv[1:]
    if case == "client":
        trio.run(dial, int(connections), int(port[0]))
    else:
        sys.stdout.write(json.dumps(trio.run(serve, case, int(connections))) + "\n")


if __name__ == "__main__":
    main()
