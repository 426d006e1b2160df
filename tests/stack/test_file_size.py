"""A program with a low limit of file sizes, for which memfds count."""

from __future__ import annotations

import json
import mmap
import resource
import signal
import subprocess
import sys
from functools import partial

import pytest
import trio

import trio_smc
from tests.peers import echo
from tests.timing import PATIENCE

pytestmark = pytest.mark.processes
LIMITS = (0, 4096, 1 << 20, 1 << 30)


def test_a_low_limit_ends_no_process() -> None:
    """The kernel sends SIGXFSZ, which ends a process that has restored the default action.

    ``-B``: Python itself would write bytecode into a file.
    """
    done = subprocess.run(
        [sys.executable, "-B", "-m", __name__], capture_output=True, text=True,
        timeout=2 * PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["0"] == "out-of-resources"
    assert found[str(LIMITS[-1])] == "smc-r"


async def outcome() -> str:
    """Send from a mapped file, and receive into one; returns how the bytes travelled."""
    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(trio_smc.serve, echo, 0, host="127.0.0.1"))
        port = listener.socket.getsockname()[1]
        async with await trio_smc.open_stream("127.0.0.1", port) as stream:
            with mmap.mmap(-1, 8192) as memory, memoryview(memory) as whole:
                await stream.send_all(whole)
                count = 0
                while count < len(whole):
                    with whole[count:] as rest:
                        count += await stream.receive_some_into(rest)
            fallback = stream.fallback
        nursery.cancel_scope.cancel()
    return str(fallback.reason) if fallback is not None else "smc-r"


def main() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    found = {}
    for limit in LIMITS:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        found[limit] = trio.run(outcome)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
