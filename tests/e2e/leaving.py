"""Processes that send, close and are gone at once; for a test and a campaign."""

from __future__ import annotations

import random

import trio

from tests.e2e.processes import open_peer
from tests.e2e.zygote import WAYS
from tests.timing import PATIENCE

LARGEST = 4 << 20
HELD = ("descriptors", "threads", "mappings", "open_connections", "groups")


async def leave_at_once(cases: int, seed: int) -> int:
    """Let ``cases`` processes come and go; returns how many bytes they sent.

    AssertionError when one lost anything, or when the server keeps anything of them.
    """
    rng = random.Random(seed)
    total = 0
    async with (
        open_peer({}) as server,
        open_peer(module="tests.e2e.zygote") as zygote,
    ):
        port = (await server.call("listen", handler="collect"))["port"]
        before = await server.call("measure")
        for case in range(cases + 1):
            size = int(LARGEST ** rng.random())
            total += size
            # Pauses that leave the data in the ring until its sender is gone; and many small
            # pieces, so that the server has no receive posted for a while.
            listens = rng.random() < 0.3
            await zygote.send_command(
                "",
                port=None if listens else port,
                # The last leaves in order: it removes the socket of one before that did not.
                way=WAYS[case % len(WAYS) if case < cases else 0],
                case=case,
                size=size,
                seed=seed + case % 16,
                pause=rng.choice([0, 0, 0.01, 0.05]),
                pieces=rng.choice([1, 3, 100, 3000]),
            )
            if listens:
                there = (await zygote.answer())["port"]
                answer = await server.call("collect_from", port=there)
            else:
                answer = await server.call("collected", count=1)
            await zygote.answer()
            assert answer == {"cases": [case], "errors": []}, f"{answer}, seed {seed}"
        held = {what: before[what] for what in HELD}
        left: dict[str, object] = {}
        # What the last process said when it ended may not have been read yet.
        with trio.move_on_after(PATIENCE):
            while left != held:
                after = await server.call("measure")
                left = {what: after[what] for what in HELD}
        assert left == held, f"the server held {held} before, {left} after"
    return total
