"""Runs that each get SIGINT at another place of trio_smc.

``python -m tests.e2e.interrupted_anywhere API COUNT SEED`` makes connections in each run, with both
ends in tasks of the program; API is one of `PROGRAMS`. The first run finds the places: calls of
functions of trio_smc, and returns to them from built-in functions, where Python looks for signals.
COUNT further runs get the signal at one of them each. The command fails if such a run does not end
with KeyboardInterrupt, or ends later than `PATIENCE` seconds after the signal. It also fails if a
function that is not in `UNPROTECTED` is not protected from KeyboardInterrupt.
"""

from __future__ import annotations

import dis
import random
import signal
import sys
import time
import warnings
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

import trio

import trio_smc
from tests.e2e.process_end import HOST, handle_as_usual

if TYPE_CHECKING:
    from types import FrameType

PATIENCE: Final = 2.0
"""Seconds, well below `Config.shutdown_timeout`. Chosen."""
DATA: Final = bytes(1000)
UNPROTECTED: Final = {"_handle", "_serve_one", "_set_factory"}
"""The functions that call the program's code."""
_RESUME: Final = dis.opmap["RESUME"]


class Place:
    """Counts the places of a run, and raises SIGINT at one of them.

    Args:
      number: of the place; 0: none.

    Attributes:
      count: places so far.
      unprotected: functions that are not protected.
      struck: when the signal was raised.
      where: the place of the signal.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self.count = 0
        self.unprotected: set[str] = set()
        self.struck = 0.0
        self.where = ""

    def __enter__(self) -> None:
        sys.setprofile(self._profile)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "c_return" and (event != "call" or _is_resumed(frame)):
            return
        # Trio itself is not proof against a signal in each of its functions, over TCP either.
        if not frame.f_globals.get("__name__", "").startswith(("trio_smc", "contextlib")):
            return
        self.count += 1
        if not self._number and not trio.lowlevel.currently_ki_protected():
            self.unprotected.add(frame.f_code.co_qualname)
        if self.count == self._number:
            sys.setprofile(None)
            self.struck, self.where = time.monotonic(), f"{frame.f_code.co_qualname}, {event}"
            signal.raise_signal(signal.SIGINT)


def _is_resumed(frame: FrameType) -> bool:
    """True if a coroutine goes on behind an ``await``, where Python does not look for signals."""
    operation, argument = frame.f_code.co_code[frame.f_lasti : frame.f_lasti + 2]
    return operation != _RESUME or argument & 3 > 1


async def _echo(stream: trio.abc.Stream) -> None:
    async for data in stream:
        await stream.send_all(data)


async def _talk(stream: trio.abc.HalfCloseableStream) -> None:
    async with stream:
        await stream.send_all(DATA)
        received = 0
        while received < len(DATA):
            received += len(await stream.receive_some())
        await stream.send_eof()
        assert not await stream.receive_some()


async def _serve_tcp(*, task_status: trio.TaskStatus[Any]) -> None:
    await trio.serve_tcp(_echo, 0, host=HOST, task_status=task_status)


async def run_drop_in(place: Place) -> None:
    """A program for TCP."""
    with place:
        async with trio.open_nursery() as nursery:
            [listener] = await nursery.start(_serve_tcp)
            port = listener.socket.getsockname()[1]
            for _ in range(2):
                await _talk(await trio.open_tcp_stream(HOST, port))
            nursery.cancel_scope.cancel()
        await trio.lowlevel.checkpoint()


async def run_native(place: Place) -> None:
    """A program with a stack of its own."""
    with place:
        async with trio_smc.open_stack() as stack, trio.open_nursery() as nursery:
            [listener] = await stack.open_listeners(0, host=HOST)
            nursery.start_soon(_accept_one, listener)
            port = listener.socket.getsockname()[1]
            await _talk(await stack.open_stream(HOST, port))
            await listener.aclose()
        await trio.lowlevel.checkpoint()


async def _accept_one(listener: trio_smc.SmcListener) -> None:
    async with await listener.accept() as stream:
        await _echo(stream)


PROGRAMS: Final[dict[str, Callable[[Place], Awaitable[None]]]] = {
    "drop-in": run_drop_in,
    "native": run_native,
}


def interrupt(program: Callable[[Place], Awaitable[None]], place: Place) -> str:
    """Run ``program``; returns the defect of the run's end after the signal, or nothing."""
    ended = " returned"
    try:
        trio.run(program, place)
    except KeyboardInterrupt:
        ended = ""
    except BaseException as error:
        ended = f" raised {error!r}"
        # A task that is cut off may raise an error before it is cancelled.
        if isinstance(error, BaseExceptionGroup) and error.subgroup(KeyboardInterrupt) is not None:
            ended = ""
    finally:
        sys.setprofile(None)
    took = time.monotonic() - place.struck
    if not place.where:
        return ""
    if not ended and took > PATIENCE:
        ended = f" ended after {took:.1f} s"
    return ended and f"after SIGINT at {place.where}, the run{ended}"


def main(api: str, count: int, seed: int) -> int:
    """Run the program ``count`` times; returns 1 if there is a defect, which it prints."""
    program = PROGRAMS[api]
    interrupt(program, Place(0))  # imports and caches
    first = Place(0)
    interrupt(program, first)
    assert first.count
    unprotected = sorted(first.unprotected - UNPROTECTED)
    chosen = random.Random(seed).sample(range(1, first.count + 1), min(count, first.count))
    defects = [defect for each in sorted(chosen) if (defect := interrupt(program, Place(each)))]
    report = f"{first.count} places, {len(chosen)} signals, {len(defects)} defects"
    sys.stdout.write("\n".join([report, *defects, f"not protected: {unprotected}", ""]))
    return 1 if defects or unprotected else 0


if __name__ == "__main__":
    handle_as_usual()
    # A call that is interrupted may lose its stream.
    warnings.simplefilter("ignore", ResourceWarning)
    trio_smc.enable(trio_smc.Config(require_smc=True))
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
