"""Runs in each of two guests: streams over soft-RoCE, found by TCP option and PNET.

``python3 -m tests.lab.guest_streams ROLE PEER4``; the device rxe0 is on eth0, nothing on eth1
at first.
Prints "ROLE: ok STEP" for every step.
"""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import trio

import trio_smc
from tests.lab.verbs_side import Control
from tests.rendezvous.discovery.option_wire import SYN, SYN_ACK, Wire
from tests.timing import PATIENCE
from trio_smc import Config, FallbackReason, Mode, SmcStream, VerbsRnic
from trio_smc.rendezvous.discovery.option_program import OPTION

PORT = 7700
TEXT = bytes(range(256)) * 400  # more than the default MTU, less than an RMB element
VLAN = 7
CONFIG = Config(
    handshake_timeout=30, first_contact_timeout=30, llc_timeout=20, test_link_timeout=20,
    shutdown_timeout=20, learn_short=False,
)  # fmt: skip
_SHOWN = 8


class Side:
    """One guest's program.

    Args:
      role: "server" or "client".
      peer: the other guest's IPv4 address on eth0.
    """

    def __init__(self, role: str, peer: str, control: Control) -> None:
        self.role = role
        self.server = role == "server"
        self.peer = peer
        self.control = control
        self.number = 1 if self.server else 2

    def log(self, text: str) -> None:
        sys.stdout.write(f"{self.role}: {text}\n")
        sys.stdout.flush()

    def done(self, step: str) -> None:
        self.log(f"ok {step}")

    @contextlib.asynccontextmanager
    async def stream(self, network: str, config: Config) -> AsyncIterator[SmcStream]:
        """A connection between the guests' addresses in a network, by stacks of its own."""
        addresses = ipaddress.ip_network(network)
        here, there = str(addresses[self.number]), str(addresses[3 - self.number])
        with trio.fail_after(PATIENCE):
            async with trio_smc.open_stack(config) as stack:
                if self.server:
                    [listener] = await stack.open_listeners(PORT, host=here)
                    await self.control.swap(patience=PATIENCE)
                    async with listener, await listener.accept() as stream:
                        yield stream
                else:
                    await self.control.swap(patience=PATIENCE)
                    async with await stream_to(stack, there) as stream:
                        yield stream
                await self.control.swap(patience=PATIENCE)

    async def talk(self, stream: SmcStream) -> None:
        """Send bytes and check their echo."""
        with trio.fail_after(PATIENCE):
            if not self.server:
                await stream.send_all(TEXT)
            got = b""
            while len(got) < len(TEXT):
                piece = await stream.receive_some()
                assert piece, f"it ended after {len(got)} bytes"
                got += piece
            assert got == TEXT
            if self.server:
                await stream.send_all(got)

    async def over(self, network: str, config: Config) -> str:
        """Exchange bytes over SMC-R; returns the RNIC."""
        async with self.stream(network, config) as stream:
            assert stream.mode is Mode.SMC_R, stream.fallback
            await self.talk(stream)
            assert stream.link_group is not None
            [rnic] = {link.rnic for link in stream.link_group.links if link.connections}
            return gid_of(rnic)

    async def refused(self, network: str, config: Config, reason: FallbackReason) -> None:
        """Exchange bytes over TCP, for a reason that the client knows."""
        async with self.stream(network, config) as stream:
            assert stream.mode is Mode.TCP
            assert stream.fallback is not None
            if not self.server:
                assert stream.fallback.reason is reason, stream.fallback
            await self.talk(stream)


async def stream_to(stack: trio_smc.Stack, host: str) -> SmcStream:
    return await stack.open_stream(host, PORT)


def gid_of(rnic: object) -> str:
    assert isinstance(rnic, VerbsRnic), rnic
    gid = ipaddress.IPv6Address(rnic.gid)
    return str(gid.ipv4_mapped or gid)


def run(*command: str) -> str:
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout


def interface(name: str, *networks: str, number: int) -> None:
    """Bring an interface up with this guest's address in each network."""
    run("ip", "link", "set", name, "up")
    for network in map(ipaddress.ip_network, networks):
        command = ["ip", "addr", "add", f"{network[number]}/{network.prefixlen}", "dev", name]
        run(*command, *(["nodad"] if network.version == 6 else []))


def show(side: Side, name: str, wire: Wire, chosen: Callable[[bytes], bool]) -> None:
    """Print frames that were seen as a capture file, for a host with a fast tshark."""
    wire.frames = [frame for frame in wire.frames if chosen(frame)][:_SHOWN]
    with tempfile.NamedTemporaryFile() as file:
        wire.write_pcap(Path(file.name))
        text = base64.b64encode(Path(file.name).read_bytes()).decode()
    side.log(f"pcap {name} {text}")


async def plain(side: Side) -> None:
    """The option on the wire, and the RNIC that has the connection's own address."""
    with Wire.open("eth0") as wire:
        gid = await side.over("10.9.0.0/24", CONFIG)
        assert gid == f"10.9.0.{side.number}", gid
        options = [each for each in wire.segments(PORT) if 254 in each.kinds]
        assert [each.flags & SYN_ACK for each in options] == [SYN, SYN_ACK], options
        assert {each.kinds[254] for each in options} == {OPTION}
        # This process's other connection, the plain one to the other program, has none.
        async with await trio.open_tcp_stream(side.peer, 7655) if not side.server else Nothing():
            await side.control.swap(patience=PATIENCE)
        if not side.server:
            others = wire.segments(7655)
            assert others
            assert not any(254 in each.kinds for each in others)
        show(side, "option", wire, is_syn)
    side.done("option_on_the_wire")


def is_syn(frame: bytes) -> bool:
    return frame[12:14] == b"\x08\x00" and frame[23] == 6 and bool(frame[47] & SYN)


def is_roce(frame: bytes) -> bool:
    return frame[12:14] == b"\x08\x00" and frame[23] == 17 and frame[36:38] == b"\x12\xb7"


class Nothing:
    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, *exc_info: object) -> None:
        pass


async def strict(side: Side) -> None:
    assert await side.over("10.9.0.0/24", replace(CONFIG, discovery="tcp-option"))
    side.done("strict")


async def ipv6(side: Side) -> None:
    interface("eth0", "fd00:9::/64", number=side.number)
    gid = await side.over("fd00:9::/64", CONFIG)
    assert gid == str(ipaddress.ip_network("fd00:9::/64")[side.number]), gid
    side.done("ipv6")


async def vlan(side: Side) -> None:
    """RoCE frames carry the tag of the connection's own VLAN."""
    run(
        "ip", "link", "add", "link", "eth0", "name", f"eth0.{VLAN}", "type", "vlan", "id", f"{VLAN}"
    )
    interface(f"eth0.{VLAN}", "10.7.0.0/24", number=side.number)
    with Wire.open(f"eth0.{VLAN}") as tagged:
        gid = await side.over("10.7.0.0/24", CONFIG)
        assert gid == f"10.7.0.{side.number}", gid
        tagged.segments(PORT)
        assert any(map(is_roce, tagged.frames)), "RoCE went over the VLAN's interface"
        show(side, "vlan", tagged, is_roce)
    side.done("vlan")


async def unrelated(side: Side) -> None:
    """eth1 has no RNIC: never the one of eth0, unless the table says so."""
    await side.refused("10.9.1.0/24", CONFIG, FallbackReason.NO_RNIC)
    side.done("never_an_unrelated_port")
    gid = await side.over("10.9.1.0/24", replace(CONFIG, pnet=(("eth1", "rxe0"),)))
    assert gid.startswith("fe80::"), "the port has no address of that subnet"
    await side.refused(
        "10.9.0.0/24", replace(CONFIG, pnet=(("eth0", "rxe9"),)), FallbackReason.NO_RNIC
    )
    side.done("pnet_table")


async def bond(side: Side) -> None:
    """An RNIC on a bond, and on a VLAN of the bond."""
    for command in (
        "link add bond0 type bond mode active-backup miimon 100", "link set eth1 down",
        "link set eth1 master bond0", "link set bond0 up",
        f"link add link bond0 name bond0.{VLAN} type vlan id {VLAN}",
    ):  # fmt: skip
        run("ip", *command.split())
    interface("bond0", "10.6.0.0/24", number=side.number)
    interface(f"bond0.{VLAN}", "10.5.0.0/24", number=side.number)
    run("bash", "-c", "rxe 1 bond0")
    for network in ("10.6.0.0/24", "10.5.0.0/24"):
        with Wire.open("bond0" if "6" in network else f"bond0.{VLAN}") as wire:
            gid = await side.over(network, CONFIG)
            assert gid == str(ipaddress.ip_network(network)[side.number]), gid
            wire.segments(PORT)
            assert any(map(is_roce, wire.frames)), network
    side.done("bond")


async def port_down(side: Side) -> None:
    """The port that serves the route exists, but is down."""
    async with trio_smc.open_stack(CONFIG) as stack:
        [rnic] = [each for each in stack.rnics if isinstance(each, VerbsRnic)]
        rnic.port_active = False
        served_by = stack.runtime.rnic_for(f"10.9.0.{side.number}", side.peer)
        assert served_by is FallbackReason.RNIC_DOWN
    side.done("port_down")


async def main() -> None:
    role, peer = sys.argv[1:]
    control = await Control.connect(role, peer, PATIENCE)
    async with control.stream, trio.open_nursery() as nursery:
        if role == "server":
            listeners = await trio.open_tcp_listeners(7655, host="0.0.0.0")
            nursery.start_soon(
                trio.serve_listeners, lambda stream: stream.receive_some(), listeners
            )
        side = Side(role, peer, control)
        for step in (plain, strict, ipv6, vlan, unrelated, port_down, bond):
            await step(side)
            await control.swap(patience=PATIENCE)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
