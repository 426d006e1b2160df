"""An event at each step of the scheduler, or with each number of free descriptors: the stacks free
everything, and tasks without a part in the event continue."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import trio

import trio_smc
from tests.api.api_peers import HOST, QUICK, address_of, check_serves, wait_until_freed
from tests.peers import check_echo, echo_until_reset
from tests.timing import PATIENCE
from trio_smc import SmcListener, SmcStream, Stack


class AtStep(trio.abc.Instrument):
    """Calls a function after a number of task steps."""

    def __init__(self, step: int, function: Callable[[], None]) -> None:
        self.left = step
        self._function = function

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.left -= 1
        if self.left == 0:
            trio.lowlevel.current_trio_token().run_sync_soon(self._function)


@contextlib.contextmanager
def at_step(step: int, function: Callable[[], None]) -> Iterator[AtStep]:
    instrument = AtStep(step, function)
    trio.lowlevel.add_instrument(instrument)
    try:
        yield instrument
    finally:
        trio.lowlevel.remove_instrument(instrument)


def check_log(caplog: pytest.LogCaptureFixture) -> None:
    ours = [record for record in caplog.records if record.name.startswith("trio_smc")]
    assert not [record for record in ours if record.exc_info], caplog.text


async def open_and_close(stack: Stack, address: tuple[str, int]) -> None:
    """Open a stream and close it.  Accepts any result, and each documented error."""
    with contextlib.suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError):
        stream = await stack.open_stream(*address)
        async with stream:
            await stream.send_all(b"ping")
            await stream.receive_some()


@pytest.mark.parametrize("contact", ["first", "subsequent"])
async def test_a_listener_may_close_at_each_step(
    contact: str, caplog: pytest.LogCaptureFixture
) -> None:
    step, early = 1, True
    async with trio_smc.open_stack(QUICK) as server:
        while early:
            async with trio_smc.open_stack(QUICK) as client:
                [listener] = await server.open_listeners(0, host=HOST)
                if contact == "subsequent":
                    await check_serves(client, listener)
                with trio.fail_after(PATIENCE), at_step(step, listener.close) as instrument:
                    async with trio.open_nursery() as nursery:

                        async def accept(listener: SmcListener = listener) -> None:
                            with contextlib.suppress(trio.ClosedResourceError):
                                stream = await listener.accept()
                                await stream.aclose()

                        nursery.start_soon(accept)
                        await open_and_close(client, address_of(listener))
                early = instrument.left <= 0
                listener.close()
                [other] = await server.open_listeners(0, host=HOST)
                await check_serves(client, other)
                await other.aclose()
                await wait_until_freed(client)
            await wait_until_freed(server)
            step += 1
    assert step > 10
    check_log(caplog)


@pytest.mark.filterwarnings("ignore:.* was open when its stack was closed:ResourceWarning")
@pytest.mark.parametrize("side", ["client", "server"])
async def test_a_stack_may_end_at_each_step(side: str, caplog: pytest.LogCaptureFixture) -> None:
    step, early = 1, True
    while early:
        async with trio_smc.open_stack(QUICK) as survivor:
            left = trio.Event()
            with trio.fail_after(PATIENCE):
                async with trio.open_nursery() as nursery:
                    async with trio_smc.open_stack(QUICK) as leaver:
                        client, server = (
                            (leaver, survivor) if side == "client" else (survivor, leaver)
                        )
                        [listener] = await server.open_listeners(0, host=HOST)

                        async def accept(listener: SmcListener = listener) -> None:
                            with contextlib.suppress(
                                trio.ClosedResourceError, trio.BrokenResourceError
                            ):
                                async with await listener.accept() as stream:
                                    await stream.send_all(await stream.receive_some())

                        async def connect(
                            client: Stack = client,
                            address: tuple[str, int] = address_of(listener),
                            left: trio.Event = left,
                        ) -> None:
                            await open_and_close(client, address)
                            left.set()

                        with at_step(step, left.set) as instrument:
                            nursery.start_soon(accept)
                            nursery.start_soon(connect)
                            await left.wait()
                    early = instrument.left <= 0
                    nursery.cancel_scope.cancel()
            if side == "client":
                await check_serves(survivor, listener)
            await wait_until_freed(survivor)
        step += 1
    assert step > 20
    check_log(caplog)


@contextlib.contextmanager
def few_descriptors(count: int) -> Iterator[None]:
    """Let the process open only ``count`` further descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [os.dup(0) for _ in range(count + 1)]
    highest = max(free)
    for descriptor in free:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("named", [False, True])
async def test_a_stack_with_few_descriptors(named: bool) -> None:
    """The stack opens, perhaps without its RNIC, or `open_stack` raises an OSError.

    An RNIC that the program has not named leaves more descriptors to it.
    """
    outcomes: list[int] = []
    for count in (*range(24), 300):
        rnics = (trio_smc.SoftRnic(),)
        with few_descriptors(count):
            try:
                async with trio_smc.open_stack(
                    trio_smc.Config(rnics=rnics if named else "auto")
                ) as stack:
                    outcomes.append(len(stack.rnics))
            except OSError:
                outcomes.append(-1)
    assert outcomes[0] == -1
    assert outcomes[-1] == 1


@pytest.mark.parametrize("contact", ["first", "subsequent"])
async def test_a_connection_with_few_descriptors(
    contact: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The result is SMC-R, TCP with a reason, or an OSError.  The next connection works."""
    hurried = replace(QUICK, handshake_timeout=0.2)  # in case the server cannot accept
    outcomes: list[str] = []

    async with trio_smc.open_stack(QUICK) as server, trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(server.serve, echo_until_reset, 0, host=HOST))

        async def use(stream: SmcStream) -> None:
            async with stream:
                await check_echo(stream)

        while outcomes[-8:] != ["smc-r"] * 8:
            async with trio_smc.open_stack(QUICK) as client:
                if contact == "subsequent":
                    await use(await client.open_stream(*address_of(listener)))
                stream = None
                with few_descriptors(len(outcomes)), contextlib.suppress(OSError):
                    stream = await client.open_stream(*address_of(listener), config=hurried)
                outcomes.append(stream.mode if stream else "error")
                if stream is not None:
                    with contextlib.suppress(trio.BrokenResourceError):
                        await use(stream)
                await use(await client.open_stream(*address_of(listener)))
            await wait_until_freed(server)
            assert len(outcomes) < 100
        nursery.cancel_scope.cancel()
    assert outcomes[0] == "error"
    check_log(caplog)
