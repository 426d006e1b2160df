"""How late a task that sleeps is beside a busy one: `python -m benchmarks.ticker`.

One task wakes up each millisecond, and another one sends and receives in a loop for a second, both
ends in one process.  Over TCP every call of the loop lets the first task run; with amortised
checkpoints only some calls do, and with strict ones every call.  The lateness includes one call of
the loop, and half of the passes of the scheduler run the loop first.
"""

from __future__ import annotations

import argparse
import os
import time
from statistics import median
from typing import Any, Final, Literal

import trio

import trio_smc
from benchmarks import report

_HOST: Final = "127.0.0.1"
_SIZES: Final = {"64 B": 64, "64 KiB": 64 * 1024}
_PERIOD: Final = 0.001
_SECONDS: Final = 1.0
_CHECKPOINTS: Final[dict[str, Literal["amortised", "strict"] | None]] = {
    "tcp": None, "amortised": "amortised", "strict": "strict",
}  # fmt: skip


async def _send_and_receive(client: Any, server: Any, size: int) -> int:
    """Return how many times ``size`` bytes went from one to the other."""
    data, done = bytes(size), 0
    end = time.perf_counter() + _SECONDS
    while time.perf_counter() < end:
        await client.send_all(data)
        left = size
        while left:
            left -= len(await server.receive_some())
        done += 1
    return done


async def _tick(late: list[float]) -> None:
    while True:
        due = trio.current_time() + _PERIOD
        await trio.sleep_until(due)
        late.append(trio.current_time() - due)


async def _measure(way: str, size: int) -> tuple[list[float], int]:
    """Return the delays of the ticks in seconds, and the number of messages."""
    late: list[float] = []
    module: Any = trio
    settings: dict[str, Any] = {}
    if checkpoints := _CHECKPOINTS[way]:
        module = trio_smc
        settings["config"] = trio_smc.Config(checkpoints=checkpoints, require_smc=True)
    opened = trio.open_tcp_listeners if module is trio else trio_smc.open_listeners
    connect = trio.open_tcp_stream if module is trio else trio_smc.open_stream
    [listener] = await opened(0, host=_HOST, **settings)
    port = listener.socket.getsockname()[1]
    async with (
        listener,
        await connect(_HOST, port, **settings) as client,
        await listener.accept() as server,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(_tick, late)
        done = await _send_and_receive(client, server, size)
        nursery.cancel_scope.cancel()
    return late, done


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ticker", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    load = os.getloadavg()[0]
    found: dict[tuple[str, str], list[tuple[list[float], int]]] = {}
    for number in range(rounds):
        for text, size in _SIZES.items():
            for way in [*_CHECKPOINTS][:: -1 if number % 2 else 1]:
                found.setdefault((text, way), []).append(trio.run(_measure, way, size))
    table = [["message", "", "late by, µs", "range", "a tenth later than", "messages/s"]]
    for (text, way), results in found.items():
        middles = [median(late) * 1e6 for late, _ in results]
        late = sorted(each for some, _ in results for each in some)
        table.append(
            [
                text,
                way,
                f"{median(middles):.0f}",
                f"{min(middles):.0f} - {max(middles):.0f}",
                f"{late[len(late) * 9 // 10] * 1e6:.0f}",
                report.short(median(done for _, done in results) / _SECONDS),
            ]
        )
    print(report.text_of(table, left=2))
    print(f"{rounds} interleaved rounds, load before {load:.2f}")


if __name__ == "__main__":
    main()
