"""Runs in each of two guests: a server of trio_smc, an honest client, and a dishonest one.

``python3 -m tests.lab.guest_hostile ROLE PEER``.  The client prints "client: ok LIE (version N)"
when the honest connection of that version has survived the lie without a long pause.  The server
prints "server: ok" when no resource of the dishonest clients is left.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import replace

import trio

import trio_smc
from tests.lab.interop_world import until
from tests.lab.liar import LIES, UEID, V2_LIES, Liar, V2Liar
from tests.lab.verbs_side import Control, Device, open_device
from tests.timing import PATIENCE
from trio_smc import Config, Mode, SmcStream, VerbsRnic

PORT = 7900
STANDSTILL = 0.8
"""Seconds: less than the kernel waits for an address without an answer."""
TRIES = 4
"""A busy host sometimes stops a guest for as long, but not for each lie."""
CONFIG = Config(
    rnics=(VerbsRnic("rxe0"),), discovery="assume", handshake_timeout=5, first_contact_timeout=5,
    llc_timeout=3, test_link_interval=2, test_link_timeout=8, shutdown_timeout=5, close_timeout=5,
    learn_short=False,
)  # fmt: skip
V2_CONFIG = replace(CONFIG, ueids=(UEID,))
PREFIX = ("10.9.0.0", 24)


def log(role: str, text: str) -> None:
    sys.stdout.write(f"{role}: {text}\n")
    sys.stdout.flush()


async def serve(control: Control) -> None:
    async def echo(stream: SmcStream) -> None:
        try:
            async for data in stream:
                await stream.send_all(data)
            await stream.send_eof()
        except trio.BrokenResourceError:
            pass  # a liar's

    async with trio_smc.open_stack(V2_CONFIG) as stack, trio.open_nursery() as nursery:
        listeners = await stack.open_listeners(PORT)
        nursery.start_soon(trio.serve_listeners, echo, listeners)
        await control.swap(patience=PATIENCE)
        await control.swap(patience=PATIENCE)  # the client has finished
        await until(
            lambda: not stack.connections and not stack.link_groups,
            f"nothing of theirs: {stack.connections} {stack.link_groups}", PATIENCE,
        )  # fmt: skip
        log("server", "ok")
        await control.swap(patience=PATIENCE)
        nursery.cancel_scope.cancel()


class Chatter:
    """An honest stream beside the attack.

    Attributes:
      longest: the longest time in seconds until an answer.
    """

    def __init__(self, stream: SmcStream) -> None:
        self.enough = False
        self.longest = 0.0
        self._stream = stream

    async def run(self) -> None:
        while not self.enough:
            start = trio.current_time()
            await self._stream.send_all(b"?")
            assert await self._stream.receive_some(1) == b"?"
            self.longest = max(self.longest, trio.current_time() - start)
            await trio.sleep(0.01)


async def detection_time(honest: SmcStream, liar: Liar, lie: str) -> float:
    """Send the lie; returns the longest time of an answer to the honest stream meanwhile."""
    chatter = Chatter(honest)
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(chatter.run)
            await getattr(liar, lie)()
            chatter.enough = True
    return chatter.longest


async def attack(peer: str, device: Device, kind: type[Liar], lies: tuple[str, ...]) -> None:
    """Send all lies beside an honest stream of the same version, and end it afterwards."""
    version = kind.framing.version
    async with (
        trio_smc.open_stack(V2_CONFIG if version == 2 else CONFIG) as stack,
        await stack.open_stream(peer, PORT) as honest,
    ):
        assert honest.mode is Mode.SMC_R, honest.fallback
        [group] = stack.runtime.groups.groups
        assert group.terms.version == version, group.terms
        for lie in lies:
            waits: list[float] = []
            while not waits or waits[-1] >= STANDSTILL:
                assert len(waits) < TRIES, (lie, waits)
                waits.append(await detection_time(honest, kind(device, peer, PORT, PREFIX), lie))
            with trio.fail_after(PATIENCE):
                await honest.send_all(lie.encode())
                got = b""
                while len(got) < len(lie):
                    got += await honest.receive_some()
            assert got == lie.encode()
            text = f"ok {lie} (version {version}), one answer took {waits[-1] * 1000:.0f} ms"
            log("client", text)
        await honest.send_eof()
        assert await honest.receive_some() == b""


async def main() -> None:
    role, peer = sys.argv[1:]
    logging.basicConfig(format=f"{role}: %(message)s", level=logging.INFO, stream=sys.stdout)
    control = await Control.connect(role, peer, PATIENCE)
    async with control.stream:
        if role == "server":
            await serve(control)
        else:
            await control.swap(patience=PATIENCE)
            async with open_device("rxe0") as device:
                await attack(peer, device, Liar, LIES)
                await attack(peer, device, V2Liar, V2_LIES)
                await control.swap(patience=PATIENCE)
                await control.swap(patience=PATIENCE)


if __name__ == "__main__":
    trio.run(main)
