"""One of the two processes of `chaos.py`: connections with traffic, RNICs, and faults on them.

    python -m examples.chaos_peer '{"role": "server", "seed": 1, "rnics": 2, ...}'

It reads commands from `chaos_sides.py` and writes events to it, one JSON object per line.
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import trio

import trio_smc
from examples.chaos_load import Conversation, EndedEarly, Wrong
from examples.chaos_log import Recollection, log_everything
from trio_smc import Config, SmcStream, SoftRnic, Stack
from trio_smc.rnic.soft.faults import Fault, FaultPlan, Struck

LOGGER = logging.getLogger("chaos")
HOST = "127.0.0.1"
PATIENCE = 60.0
"""Seconds after which a conversation counts as hung."""
POLL_INTERVAL = 0.004
USABLE = ("ACTIVE", "TESTING")
_CDC = 0xFE
_PRODUCER_FLAGS, _VALIDATION = 24, 0x08
_CONNECTION_FLAGS = 25  # the byte of a CDC message with the flags of endings (RFC 7609, A.4)


def write_event(**event: Any) -> None:
    """Write one line to the controller."""
    os.write(1, (json.dumps(event) + "\n").encode())


async def outcome(conversation: Conversation) -> str:
    """Run a conversation; return how it ended.

    Returns:
      "done", "reset", "ended early: " or "wrong: " with a description.
    """
    how, broke = "done", False
    try:
        await conversation.run()
    except* trio.BrokenResourceError as broken:
        broke = True
        # A client may abort.
        if conversation.kind != "abort" or conversation.client:
            how = "reset"
            conversation.activity = repr(_first(broken).__cause__)
    except* EndedEarly as early:
        # As over TCP, one call reports the error of a connection.  If another task was receiving,
        # that task finds the end of the stream.
        if not broke:
            how = f"ended early: {_first(early)}"
    except* Wrong as wrong:
        how = f"wrong: {_first(wrong)}"
    return how


def tokens_of(conversation: Conversation) -> list[int]:
    """Return the alert tokens of its connection (local, peer); empty for a TCP connection."""
    # Only the protocol needs alert tokens, so they are not public.
    core = getattr(conversation.stream, "_core", None)
    return [] if core is None else [core.alert_token, core.messenger.peer_token]


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@dataclass(kw_only=True)
class Peer:
    """The state of this process."""

    role: str
    seed: int
    rnics: list[SoftRnic]
    stack: Stack
    recollection: Recollection
    connections: int
    scale: int
    conversations: dict[int, Conversation] = field(default_factory=dict)
    targets: dict[bytes, tuple[int, bool]] = field(default_factory=dict)
    ended: trio.Event = field(default_factory=trio.Event)
    stopping: bool = False

    # -- traffic -------------------------------------------------------------------------

    async def serve(self, stream: SmcStream) -> None:
        """Serve one connection, on the server."""
        if stream.mode != "smc-r":
            await stream.aclose()  # the client reports it
            return
        try:
            with trio.fail_after(PATIENCE):
                conversation = await Conversation.accept(stream)
        except trio.BrokenResourceError:
            # The number of the conversation is unknown; the client reports the failure.
            await trio.aclose_forcefully(stream)
            return
        await self.converse(conversation)

    async def keep_conversing(self, port: int, lane: int) -> None:
        """Run one conversation after the other, on the client."""
        number = lane
        while not self.stopping:
            number += self.connections
            try:
                stream = await self.stack.open_stream(HOST, port)
            except OSError as error:
                write_event(event="refused", number=number, why=str(error))
                await trio.sleep(0.05)
                continue
            if stream.mode != "smc-r":
                # While no link is left, the connection is TCP.
                write_event(event="fallback", why=str(stream.fallback and stream.fallback.reason))
                await stream.aclose()
                await trio.sleep(0.05)
                continue
            await self.converse(
                Conversation(stream=stream, seed=self.seed, number=number, scale=self.scale)
            )

    async def converse(self, conversation: Conversation) -> None:
        """Run one conversation and report how it ended."""
        self.conversations[conversation.number] = conversation
        tokens = tokens_of(conversation)
        how = "hung"
        with trio.move_on_after(PATIENCE):
            how = await outcome(conversation)
        del self.conversations[conversation.number]
        self.ended.set()
        write_event(
            event="ended", number=conversation.number, kind=conversation.kind, how=how,
            bytes=conversation.received, pause=round(conversation.pause, 4),
            activity=conversation.activity, tokens=tokens,
        )  # fmt: skip
        if how != "done":
            await trio.aclose_forcefully(conversation.stream)

    # -- faults --------------------------------------------------------------------------

    async def strike(self, kind: str, rnic: int, seconds: float) -> None:
        """Inject the fault that the controller chose."""
        device = self.rnics[rnic]
        assert isinstance(device.faults, FaultPlan)
        if kind == "port-flap":
            write_event(event="struck", kind=kind, rnic=device.name, links=self.links(),
                hit=self.hit(device))  # fmt: skip
            device.fail()
            write_event(event="done", what="strike")
            await trio.sleep(seconds)
            device.restore()
            return
        try:
            device.faults.inject(Fault(kind))
        except ValueError as error:
            write_event(event="missed", kind=kind, why=str(error))
        write_event(event="done", what="strike")

    async def replace(self, name: str) -> None:
        """Remove an RNIC and add it again, as an operator would."""
        await self.stack.drain_rnic(name)
        self.stack.undrain_rnic(name)
        write_event(event="done", what="replace")

    def report_changes(self, last: dict[str, Any]) -> dict[str, Any]:
        """Report the link group if it has changed; return its current state."""
        now = self.links()
        if now != last:
            write_event(event="links", **now)
        return now

    def links(self) -> dict[str, Any]:
        """Return the current links of the link group."""
        groups = [group for group in self.stack.link_groups if group.state != "TERMINATING"]
        links = [link for group in groups for link in group.links]
        return {
            "groups": len(groups),
            "kind": groups[0].kind if groups else "none",
            "links": [link.number for link in links if link.state in USABLE],
            # Link numbers start again in a new group; user IDs do not.
            "ids": [link.user_id for link in links],
            "coming": any(link.state not in USABLE for link in links),
        }

    def hit(self, device: SoftRnic, qp_num: int | None = None) -> list[int]:
        """Return the links, complete or not, that use this queue pair, or any of this RNIC."""
        return [
            link.user_id
            for group in self.stack.link_groups
            for link in group.links
            # Only the protocol needs the queue pair of a link, so it is not public either.
            if link.rnic is device and qp_num in (None, link._core.qp.qp_num)
        ]

    def struck(self, device: SoftRnic, struck: Struck) -> None:
        """Report a fault at the moment when it happens."""
        number, must = self.targets.get(struck.message or b"", (None, False))
        LOGGER.info("%s on %s, connection %s: %r", struck.kind, device.name, number, struck.message)
        write_event(event="struck", kind=struck.kind, rnic=device.name, number=number, must=must,
            links=self.links(), hit=self.hit(device, struck.qp_num or None))  # fmt: skip

    def is_target(self, message: bytes) -> bool:
        """True if a fault may strike this message.

        That is the case for a CDC message of a known conversation that does not end it. Stores
        the conversation, and whether the loss of the message will be noticed.
        """
        if message[0] != _CDC or message[_CONNECTION_FLAGS]:
            return False
        token = int.from_bytes(message[4:8], "big")
        for number, conversation in self.conversations.items():
            if token in tokens_of(conversation)[1:]:
                # A failover validation message carries no data: its loss is not noticed.
                validation = message[_PRODUCER_FLAGS] & _VALIDATION
                # An application that aborts does not notice the loss of data that it has not read.
                must = not (conversation.sent_all or conversation.kind == "abort")
                self.targets = {} if validation else {message: (number, must)}
                return True
        return False

    async def watch(self) -> None:
        """Report changes until cancelled."""
        last: dict[str, Any] = {}
        while True:
            last = self.report_changes(last)
            await trio.sleep(POLL_INTERVAL)

    # -- commands ------------------------------------------------------------------------

    async def run_commands(self, nursery: trio.Nursery) -> None:
        """Run commands from standard input until "stop" or its end."""
        buffered = b""
        async with trio.lowlevel.FdStream(os.dup(0)) as stdin:
            async for data in stdin:
                *lines, buffered = (buffered + data).split(b"\n")
                for line in lines:
                    command = json.loads(line)
                    match command.pop("do"):
                        case "connect":
                            for lane in range(self.connections):
                                nursery.start_soon(self.keep_conversing, command["port"], lane)
                        case "strike":
                            nursery.start_soon(partial(self.strike, **command))
                        case "replace":
                            nursery.start_soon(self.replace, self.rnics[command["rnic"]].name)
                        case "disarm":
                            for rnic in self.rnics:
                                assert isinstance(rnic.faults, FaultPlan)
                                rnic.faults.disarm()
                            write_event(event="done", what="disarm")
                        case "activities":
                            write_event(event="activities", activities=[
                                f"{each.number} {each.kind}: {each.activity}"
                                for each in self.conversations.values()
                            ])  # fmt: skip
                        case "recall":
                            write_event(event="recalled", number=command["number"],
                                records=self.recollection.of(command["tokens"]))  # fmt: skip
                        case "stop":
                            self.stopping = True
                            return

    async def finish(self) -> None:
        """Wait until every conversation has ended, and report the totals."""
        while self.conversations:
            self.ended = trio.Event()
            await self.ended.wait()
        statistics = self.stack.statistics()
        write_event(event="statistics", bytes=statistics.bytes_received,
            failovers=statistics.failovers, connections=statistics.connections)  # fmt: skip


async def main(
    role: str, seed: int, rnics: int, connections: int, scale: int, settings: dict[str, Any],
    log: str | None,
) -> None:  # fmt: skip
    """Run one process; ``log`` names the directory of its log file."""
    rng = random.Random(f"{seed} {role}")
    devices = tuple(
        SoftRnic(f"{role}-{index}", faults=FaultPlan(rng.getrandbits(32))) for index in range(rnics)
    )
    config = Config(rnics=devices, learn_short=False, **settings)
    async with trio_smc.open_stack(config) as stack, trio.open_nursery() as nursery:
        recollection = Recollection()
        if log is None:
            recollection.install()
        else:
            log_everything(stack, f"{log}/{role}.log")
        peer = Peer(
            role=role, seed=seed, rnics=list(devices), stack=stack, recollection=recollection,
            connections=connections, scale=scale,
        )  # fmt: skip
        for device in devices:
            assert isinstance(device.faults, FaultPlan)
            device.faults.concerns = peer.is_target
            device.faults.on_struck = partial(peer.struck, device)
            device.faults.on_message = partial(recollection.sent, device.name)
        port = None
        if role == "server":
            serve = partial(stack.serve, peer.serve, 0, host=HOST)
            listeners = await nursery.start(serve)
            port = listeners[0].socket.getsockname()[1]
        write_event(event="ready", port=port)
        nursery.start_soon(peer.watch)
        async with trio.open_nursery() as lanes:
            await peer.run_commands(lanes)
        await peer.finish()
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    trio.run(lambda: main(**arguments))
