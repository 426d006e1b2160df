"""Rounds of stopping or killing one of two processes at a random moment of a transfer.

All rounds end with SIGKILL. In odd rounds SIGSTOP stops the victim before that, for longer than the
timers of the links, and SIGCONT resumes it; its streams survive. Several victims live at a time,
each with its own link group; the survivor is this process and the same stack for all rounds.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import random
import signal
import sys
import tracemalloc
from dataclasses import dataclass, field
from pathlib import Path

import trio

import trio_smc
from tests import leaks
from tests.e2e.processes import Peer, open_peer
from tests.e2e.victim import HOST, config, text_seeds, transfer_until_broken
from tests.timing import PATIENCE, SLOWER
from trio_smc import Config, SmcStream, Stack
from trio_smc.rendezvous.discovery.lookup import Lookups

__all__ = ["LANES", "SETTINGS", "Outcome", "stop_and_kill"]

LANES = 4
SETTINGS = {"test_link_interval": 0.2, "test_link_timeout": 0.6, "close_timeout": 2.0}
CONFIGURED = 2 * SETTINGS["test_link_interval"] + SETTINGS["test_link_timeout"]
"""Seconds after which a link without an answer would be given up by its settings: an interval in
which the last message came, one without any, and the time for the answer."""
SLACK = 12.0 * SLOWER
"""Additional seconds for a busy machine."""
_STREAMS = 3
_LIFE = 20.0 * SLOWER
"""Seconds for which a victim lives at most after the survivor has noticed its end."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The result of the run.

    Attributes:
      killed: seconds from the signal until the survivor's last call had ended.
      stopped: victims that stood still and went on.
      received: bytes the survivor got and checked.
      early: rounds whose link was given up before the signal; links are tested with times that a
        busy machine may exceed.
      rss: bytes by which the survivor's resident memory grew from the second fifth of the rounds
        to the fourth.
      traced: bytes by which its Python memory grew in the last tenth; traced only from then on, as
        the books for that are resident too.
    """

    killed: list[float] = field(default_factory=list)
    stopped: int = 0
    received: int = 0
    early: int = 0
    traced: int = 0
    rss: int = 0


class Survivor:
    """The process that survives."""

    def __init__(self, stack: Stack, seed: int, outcome: Outcome) -> None:
        self._stack = stack
        self._seed = seed
        self._outcome = outcome

    async def round(self, number: int, zygote: Peer) -> None:
        """One victim from its start to its end."""
        rng = random.Random(f"{self._seed}/{number}")
        listens = rng.random() < 0.5
        count = rng.randint(1, _STREAMS)
        seed = rng.getrandbits(30)
        stop = number % 2 == 1
        listener = None
        port = None
        if not listens:
            [listener] = await trio_smc.open_listeners(0, host=HOST)
            port = listener.socket.getsockname()[1]
        begun = await zygote.call("start", port=port, streams=count, seed=seed, settings=SETTINGS)
        pid = begun["pid"]
        try:
            streams = await self._connect(listener, zygote, count)
            if len(streams) < count:
                # The machine stood still for longer than the links' timers, or nearly so.
                self._outcome.early += 1
                for stream in streams:
                    stream.abort()
                os.kill(pid, signal.SIGKILL)
                with trio.fail_after(_LIFE):
                    await zygote.call("wait")
                return
            early = await self._transfer(streams, pid, seed, rng, stop=stop)
            with trio.fail_after(_LIFE):
                code = (await zygote.call("wait"))["code"]
        except BaseException:
            os.kill(pid, signal.SIGKILL)  # the process may be stopped; its zygote has not reaped it
            raise
        assert early or code == -signal.SIGKILL, f"the victim's exit code is {code}"

    async def _connect(
        self, listener: trio_smc.SmcListener | None, zygote: Peer, count: int
    ) -> list[SmcStream]:
        """The streams to or from the victim; fewer when a link was given up meanwhile."""
        streams: list[SmcStream] = []
        with trio.move_on_after(SLACK), contextlib.suppress(OSError):
            if listener is None:
                there = (await zygote.answer())["port"]
                while len(streams) < count:
                    streams.append(await trio_smc.open_stream(HOST, there))
            else:
                while len(streams) < count:
                    streams.append(await listener.accept())
        if listener is not None:
            await listener.aclose()
        return streams

    async def _transfer(
        self, streams: list[SmcStream], pid: int, seed: int, rng: random.Random, *, stop: bool
    ) -> bool:
        """Wait until all streams have ended; True if one had ended before the signal."""
        ends: list[float] = []
        begun = [trio.Event() for _ in streams]

        async def use(index: int) -> None:
            ours = text_seeds(seed, index)[::-1]
            when, came = await transfer_until_broken(
                streams[index], (ours[0], ours[1]), random.Random(seed + index), begun[index]
            )
            ends.append(when)
            begun[index].set()
            self._outcome.received += came

        async with trio.open_nursery() as nursery:
            for index in range(len(streams)):
                nursery.start_soon(use, index)
            with trio.fail_after(SLACK):
                for event in begun:
                    await event.wait()
            await trio.sleep(rng.random() * 0.15)
            early = len(ends) > 0
            if stop and not early:
                os.kill(pid, signal.SIGSTOP)
                await trio.sleep(CONFIGURED * (1 + rng.random()))
                assert not ends, "a stream has ended while its peer stood still"
                os.kill(pid, signal.SIGCONT)
                await trio.sleep(rng.random() * 0.15)
                assert not ends, "a stream has ended after its peer stood still"
                self._outcome.stopped += 1
            at = trio.current_time()
            os.kill(pid, signal.SIGKILL)
            nursery.cancel_scope.deadline = at + CONFIGURED + SLACK
        if nursery.cancel_scope.cancelled_caught:
            raise AssertionError("a call still waited after the configured time")
        if early:
            self._outcome.early += 1
        else:
            self._outcome.killed.append(max(ends) - at)
        return early

    async def at_rest(self) -> None:
        """Wait until the survivor has cleaned up after all victims; there is no event for that."""
        with trio.fail_after(2 * PATIENCE):
            while self._stack.statistics().open_connections or self._stack.link_groups:  # noqa: ASYNC110
                await trio.sleep(0.005)


async def stop_and_kill(rounds: int, seed: int, only: int | None = None) -> Outcome:
    """Run ``rounds`` rounds (or round number ``only``); AssertionError names the failed round."""
    outcome = Outcome()
    directory = Path(Config().private_directory())
    async with contextlib.AsyncExitStack() as exits:
        zygotes = [
            await exits.enter_async_context(open_peer(module="tests.e2e.victim"))
            for _ in range(LANES)
        ]
        stack = await exits.enter_async_context(trio_smc.open_stack(config(**SETTINGS)))
        survivor = Survivor(stack, seed, outcome)
        before = leaks.take()
        await _clean(directory)
        files = set(os.listdir(directory))
        numbers = list(range(rounds)) if only is None else [only]
        batches = [numbers[first : first + LANES] for first in range(0, len(numbers), LANES)]
        memory = _Memory(len(batches), outcome)
        for done, batch in enumerate(batches):
            memory.look(done)
            async with trio.open_nursery() as nursery:
                for number, zygote in zip(batch, zygotes, strict=False):
                    nursery.start_soon(_annotated, survivor, number, zygote)
            await survivor.at_rest()
            left = leaks.leaked(before, leaks.take())
            if left:
                gc.collect()
                left = leaks.leaked(before, leaks.take())
            assert not left, f"after rounds {batch}: {left}"
        memory.look(len(batches))
        await _clean(directory)
        assert set(os.listdir(directory)) == files, "files are left"
    return outcome


async def _annotated(survivor: Survivor, number: int, zygote: Peer) -> None:
    try:
        await survivor.round(number, zygote)
    except BaseException as error:
        error.add_note(f"round {number}")
        raise


async def _clean(directory: Path) -> None:
    """The next process removes what killed processes left in the directory."""
    async with trio_smc.open_stack(config()):
        [listener] = await trio_smc.open_listeners(0, host=HOST)
        await listener.aclose()


class _Memory:
    """Measures the memory of this process at some moments of a campaign."""

    def __init__(self, batches: int, outcome: Outcome) -> None:
        self._batches = batches
        self._outcome = outcome
        self._before = 0
        self._least: dict[int, int] = {}

    def look(self, done: int) -> None:
        """Note that this number of batches is done."""
        fifth = done * 5 // max(1, self._batches)
        if fifth in (1, 3):
            # The least of a fifth: how much the allocator keeps differs from moment to moment.
            self._least[fifth] = min(_resident(), self._least.get(fifth, sys.maxsize))
        if done == self._batches * 4 // 5:
            self._outcome.rss = self._least.get(3, 0) - self._least.get(1, 0)
            tracemalloc.start()
        if done == self._batches * 9 // 10:
            self._before = _traced()
        if done == self._batches:
            self._outcome.traced = _traced() - self._before
            tracemalloc.stop()


def _resident() -> int:
    gc.collect()
    # What is free already but not given back yet differs by megabytes.
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _traced() -> int:
    # What the bounded caches hold counts only since the tracing began; each round has new ports.
    for each in gc.get_objects():
        if isinstance(each, functools._lru_cache_wrapper):
            each.cache_clear()
        elif isinstance(each, Lookups):
            each.known.clear()
    each = None  # the last one may be of a cycle that is to be collected: a whole RMB
    gc.collect()
    return tracemalloc.get_traced_memory()[0]
