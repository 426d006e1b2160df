"""A process with a stack, which the tests of the tools query.

The process prints one line of JSON with its ports, then runs until its standard input ends.
"""

from __future__ import annotations

import json
import sys

import trio

import trio_smc


async def read_once_and_wait(stream: trio.abc.Stream) -> None:
    """Read up to 1000 bytes, then keep the connection open and send nothing."""
    await stream.receive_some(1000)
    await trio.sleep_forever()


def print_json(values: dict[str, object]) -> None:
    """Print one line of JSON."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


async def main(mode: str) -> None:
    """Run the process.

    Args:
      mode: "pair": an SMC-R connection with data in both directions, and a TCP connection;
        "server": listen; "require": listen with require_smc; "idle": do not listen; "off": listen
        without a control socket; "blocked": listen and block the event loop.
    """
    config = trio_smc.Config(
        receive_buffer=16384, control=mode != "off", require_smc=mode == "require"
    )
    async with trio.open_nursery() as nursery, trio_smc.open_stack(config) as stack:
        if mode == "idle":
            print_json({})
            await trio.sleep_forever()
        [listener] = await stack.open_listeners(0, host="127.0.0.1")
        address = listener.socket.getsockname()
        values: dict[str, object] = {"port": address[1]}
        if mode == "pair":
            mine = await stack.open_stream(*address)
            await mine.send_all(b"x" * 1500)
            other = await listener.accept()
            await other.receive_some(500)
            await other.send_all(b"y" * 200)
            plain = await trio.open_tcp_stream(*address)
            accepted = await listener.accept()
            await plain.send_all(b"unread")
            values |= {
                "client": mine.socket.getsockname()[1],
                "plain": plain.socket.getsockname()[1],
            }
            # No data is in flight when a test queries the process.
            await mine.receive_some(1000)
            await accepted.receive_some(1000)
        else:
            nursery.start_soon(trio.serve_listeners, read_once_and_wait, [listener])
        print_json(values)
        if mode == "blocked":
            sys.stdin.read()  # block the event loop on purpose
        await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    import warnings

    # This process leaves streams open on purpose.
    warnings.simplefilter("ignore", ResourceWarning)
    trio.run(main, sys.argv[1])
