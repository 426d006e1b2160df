"""Draw the ladder diagrams of docs/capture.md from a conversation of two stacks.

    python -m scripts.ladders [DIRECTORY]

Two stacks with two software RNICs each exchange data; then one RNIC of the client fails.  One
`Capture` records both stacks, so that the writes of both are drawn.  Peer IDs, QP numbers, RKeys
and times are new in every run.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
import time
from pathlib import Path

import trio

import trio_smc
from trio_smc import Config, SmcStream, SoftRnic
from trio_smc.capture import pcapng
from trio_smc.capture.dissection import dissect
from trio_smc.capture.recorder import Capture
from trio_smc.tools import ladder_svg, ladder_text
from trio_smc.tools.ladder import Ladder, read_ladders

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = "capture.md"
FENCE = "```"


async def converse(directory: Path) -> tuple[bytes, int]:
    """Record a first contact with a little data, and a failover; return it and the failure's time.

    Args:
      directory: the stacks' private directory.
    """
    blocks: list[bytes] = []
    capture = Capture(blocks.append)
    ours, theirs = ((SoftRnic(f"{side}0"), SoftRnic(f"{side}1")) for side in ("client", "server"))
    async with (
        trio_smc.open_stack(Config(directory=directory, rnics=theirs)) as server,
        trio_smc.open_stack(Config(directory=directory, rnics=ours)) as client,
        trio.open_nursery() as nursery,
    ):
        server.add_observer(capture)
        client.add_observer(capture)
        [listener] = await server.open_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, _echo, [listener])
        with trio.fail_after(20):
            async with await client.open_stream(*listener.socket.getsockname()[:2]) as stream:
                await _exchange(stream, bytes(1000))
                await _until_links(client, {1, 2})
                failing = time.time_ns()
                ours[0].fail()
                await _exchange(stream, bytes(2000))
                await _until_links(client, {2, 3})
        nursery.cancel_scope.cancel()
    return b"".join(blocks), failing


async def record(directory: Path) -> tuple[Ladder, Ladder]:
    """Return the ladders of `converse` until the RNIC fails, and from then on."""
    captured, failing = await converse(directory)
    [ladder] = read_ladders(dissect(pcapng.read(io.BytesIO(captured))))
    rows = ladder.rows
    first = next(n for n, row in enumerate(rows) if row.time >= failing)
    return (
        Ladder(ladder.client, ladder.server, rows[:first]),
        Ladder(ladder.client, ladder.server, rows[first:]),
    )


async def _echo(stream: SmcStream) -> None:
    async with stream:
        async for data in stream:
            await stream.send_all(data)


async def _exchange(stream: SmcStream, data: bytes) -> None:
    await stream.send_all(data)
    left = len(data)
    while left:
        left -= len(await stream.receive_some(left))


async def _until_links(stack: trio_smc.Stack, numbers: set[int]) -> None:
    """Wait until the stack's only link group has these links, all of them usable."""
    while True:
        [group] = stack.link_groups
        if {link.number for link in group.links if link.state == "ACTIVE"} == numbers:
            return
        await trio.sleep(0.01)


def main(arguments: list[str] | None = None) -> int:
    """Write the pictures, and the text in the page."""
    parser = argparse.ArgumentParser(description="draw the ladder diagrams of docs/capture.md")
    parser.add_argument("directory", type=Path, nargs="?", default=DOCS)
    directory: Path = parser.parse_args(arguments).directory
    with tempfile.TemporaryDirectory() as private:
        first_contact, failover = trio.run(record, Path(private))
    (directory / "ladders").mkdir(exist_ok=True)
    for name, ladder in (("first-contact", first_contact), ("failover", failover)):
        drawn = ladder_svg.picture([ladder], start=ladder.rows[0].time, limit=len(ladder.rows))
        (directory / "ladders" / f"{name}.svg").write_text(drawn, encoding="utf-8")
    lines = ladder_text.draw(failover, start=failover.rows[0].time, limit=8)
    page = directory / PAGE
    before, _, rest = page.read_text(encoding="utf-8").partition(f"{FENCE}text\n")
    _, end, after = rest.partition(f"\n{FENCE}\n")
    page.write_text(f"{before}{FENCE}text\n{chr(10).join(lines)}{end}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
