"""Runs in a guest: trio_smc and the Linux kernel's own SMC-R, step by step.

``python3 -m tests.lab.guest_interop HERE THERE CONTROL FILE SUITE``: our address, the kernel's,
that of its `tests.lab.kernel_agent`, and the file of ``make demo``.  Prints "interop: ok STEP".
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import trio

from tests.lab import (
    interop_endings,
    interop_fallbacks,
    interop_links,
    interop_programs,
    interop_streams,
    interop_v2,
)
from tests.lab.interop_world import CONFIG, World
from tests.lab.kernel import Kernel
from trio_smc import VerbsRnic

Step = Callable[[World], Awaitable[None]]

SUITES: dict[str, tuple[Step, ...]] = {
    "quick": (interop_streams.first_contact, interop_streams.second_connection),
    "streams": (
        interop_streams.first_contact,
        interop_streams.second_connection,
        interop_streams.window_full,
        interop_endings.half_close,
        interop_endings.close_with_data,
        interop_endings.abort,
        interop_endings.urgent,
        interop_fallbacks.kernel_declines,
        interop_fallbacks.we_decline,
        interop_fallbacks.plain_peer,
        interop_programs.c_programs,
        interop_programs.python_programs,
        interop_streams.many_connections,
        interop_streams.loss,
    ),
    "v2": (
        interop_v2.contacts,
        interop_v2.kernel_ueids,
        interop_v2.ueids_differ,
        interop_v2.limits,
        interop_v2.release_0,
        interop_v2.kernel_checks,
        interop_v2.ipv6,
        interop_streams.window_full,
        interop_endings.half_close,
        interop_endings.close_with_data,
        interop_endings.abort,
        interop_endings.urgent,
        interop_fallbacks.plain_peer,
        interop_programs.c_programs,
        interop_programs.python_programs,
        interop_streams.many_connections,
        interop_streams.loss,
        interop_links.asymmetric,
        interop_v2.symmetric,
        interop_v2.request_add_link,
        interop_v2.routed,
        interop_v2.link_down,
    ),
    "links": (
        # This step is the first one, because it makes and removes a second device.
        interop_links.asymmetric,
        interop_links.symmetric,
        interop_links.test_link,
        interop_links.big_file,
        interop_links.link_down,
    ),
}


async def main() -> int:
    logging.getLogger("trio_smc").setLevel(logging.INFO)
    logging.basicConfig(format="ours: %(relativeCreated)d ms %(message)s", stream=sys.stdout)
    here, there, control, file, suite = sys.argv[1:6]
    only = sys.argv[6:]
    config = replace(CONFIG, rnics=(VerbsRnic("rxe0"),))
    if here.startswith("127."):
        # No RoCE port has a GID of 127.0.0.1, so the test names the port that the kernel uses.
        config = replace(config, rnics=(VerbsRnic("rxe0", gid_index=1),), pnet=(("lo", "rxe0"),))
    async with Kernel.at(control, 60) as kernel:
        world = World(kernel, here, there, config, Path(file))
        if suite == "v2":
            world.config = replace(config, ueids=(interop_v2.UEID,))
            await kernel.call("ueid", name=interop_v2.UEID)
        if here.startswith("127."):
            await kernel.call("pnet", name="LAB", interface="lo")
            await kernel.call("pnet", name="LAB", device="rxe0")
        failed = 0
        for step in SUITES[suite]:
            name = step.__name__
            if only and name not in only:
                continue
            start = time.monotonic()
            try:
                await step(world)
            except Exception:
                failed += 1
                world.log(f"FAILED {name} after {time.monotonic() - start:.1f} s")
                sys.excepthook(*sys.exc_info())
                world.log(f"kernel links: {await kernel.call('links')}")
                for when, out, message in world.seen.llc_messages[-40:]:
                    world.log(f"{when:9.3f} {'to' if out else 'by'} the kernel {message.hex()}")
                continue
            world.log(f"ok {name} {time.monotonic() - start:.1f} s")
    return failed


if __name__ == "__main__":
    sys.exit(trio.run(main))
