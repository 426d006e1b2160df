"""Steps with the kernel as peer: close, half close, abort, urgent data."""

from __future__ import annotations

import trio

from tests.lab.interop_world import World
from tests.lab.kernel import KernelError
from tests.timing import PATIENCE

__all__ = ["abort", "close_with_data", "half_close", "urgent"]


async def half_close(world: World) -> None:
    """After the end of one direction the other still carries data; either side first."""
    for _, connect in world.both_ways():
        async with world.stack() as (stack, _):
            both = await connect(stack)
            await both.stream.send_eof()
            assert (await both.there("receive"))[0] == 0
            await both.there("send", text="still open")
            assert await both.stream.receive_some() == b"still open"
            await both.there("close")
            assert await both.stream.receive_some() == b""
            await both.stream.aclose()

            both = await connect(stack)
            await both.there("shutdown")
            with trio.fail_after(PATIENCE):
                assert await both.stream.receive_some() == b""
            await both.stream.send_all(b"still open")
            assert await both.there("text", count=10) == "still open"
            await both.stream.aclose()
            assert (await both.there("receive"))[0] == 0
            await both.there("close")


async def close_with_data(world: World) -> None:
    """Data sent before the close is still received."""
    for _, connect in world.both_ways():
        async with world.stack() as (stack, _):
            both = await connect(stack)
            await both.there("send", text="last words")
            await both.there("close")
            with trio.fail_after(PATIENCE):
                assert await both.stream.receive_some() == b"last words"
                assert await both.stream.receive_some() == b""
                await both.stream.aclose()

            both = await connect(stack)
            await both.stream.send_all(b"last words")
            await both.stream.aclose()
            assert await both.there("text", count=10) == "last words"
            assert (await both.there("receive"))[0] == 0
            await both.there("close")


async def abort(world: World) -> None:
    """A reset of either side is a reset at the other one."""
    for role, connect in world.both_ways():
        async with world.stack() as (stack, _):
            both = await connect(stack)
            both.stream.abort()
            try:
                # Linux's recv() returns the end first; only the error shows that it was an abort.
                error = await both.there("error")
            except KernelError as raised:
                error = raised.name
            assert error in ("ECONNRESET", "ECONNABORTED"), error
            await both.there("close")
            world.log(f"{role}: our abort is {error} at the kernel")

            both = await connect(stack)
            # Data that the kernel's program has not read makes its close an abort (CDC 0x20).  The
            # kernel must have received the data first: the command to close takes another way.
            await both.stream.send_all(b"unread")
            await both.there("arrived", count=len(b"unread"))
            await both.there("close")
            with trio.fail_after(PATIENCE):
                try:
                    while await both.stream.receive_some():
                        pass
                except trio.BrokenResourceError as error:
                    world.log(f"{role}: the kernel's abort is {error!r} here")
                else:
                    raise AssertionError("an orderly end here")
            await both.stream.aclose()


async def urgent(world: World) -> None:
    """The urgent byte in both directions."""
    for _, connect in world.both_ways():
        async with world.stack() as (stack, _):
            both = await connect(stack)
            with trio.fail_after(PATIENCE):
                await both.stream.send_all(b"abc")
                await both.stream.send_urgent(b"U")
                assert await both.there("urgent") == "U"
                assert await both.there("text", count=3) == "abc"
                await both.there("send", text="def")
                await both.there("send_urgent", text="V")
                assert await both.stream.receive_urgent() == b"V"
                got = b""
                while len(got) < 3:
                    got += await both.stream.receive_some()
                assert got == b"def"
            await both.end()
