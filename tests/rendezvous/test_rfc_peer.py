"""A peer that implements only RFC 7609, byte by byte, without extensions of implementations.

The peer ignores the reserved bits of CONFIRM LINK.  In its elements, data begins behind an eye
catcher of four bytes, the only layout that the RFC defines (4.2, A.4).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest

from tests.rendezvous.rendezvous_pair import SIZE, End, Tcp, World
from tests.rnic.memory_rnic import MemoryRnic
from trio_smc.rendezvous.client import ClientNegotiation
from trio_smc.rendezvous.server import ServerNegotiation
from trio_smc.rendezvous.terms import VERSION_1
from trio_smc.wire import clc

EYE = bytes.fromhex("E2D4C3D9")
PEER_ID = b"\x12\x34\x02\0\0\0\0\x77"
SUBNET = b"\x0a\0\0\0"
TOKEN = 0x0BADCAFE
LENGTH = 16 * 1024
PSN = 0x123456
REPLY = 0x80
REJECTED = 0x40


class RfcPeer:
    """One end of a TCP connection with a queue pair and one element; the test calls each step.

    Attributes:
      memory: the memory of the element.
    """

    def __init__(self, world: World, tcp: Tcp) -> None:
        self._world = world
        self._tcp = tcp
        self._rnic = MemoryRnic(world.fabric, name="hand0")
        self._rnic.open(world.sides[0].directory)
        self._pd = self._rnic.alloc_pd()
        self._qp = self._rnic.create_qp(self._pd)
        self.memory = self._rnic.alloc_memory(LENGTH)
        self._region = self._pd.register(self.memory)
        self._target = self._rkey = self._token = self._sent = 0

    def close(self) -> None:
        self._qp.close()
        self._region.close()
        self._pd.close()
        self.memory.close()
        self._rnic.close()

    # --- CLC: figures 26 to 28 -----------------------------------------------------------------

    def propose(self) -> None:
        ends = self._rnic.gid + self._rnic.mac
        head = EYE + b"\x01\0\x34\x10" + PEER_ID + ends
        self._tcp.send(head + b"\0\0" + SUBNET + b"\x08\0\0\0" + EYE)

    def receive_clc(self, length: int) -> bytes:
        self._world.until(lambda: len(self._tcp.inbox) >= length)
        message = self._tcp.receive(length)
        assert message is not None
        return message

    def send_credentials(self, kind: int, first_contact: int) -> None:
        """Send SMC Accept (2) or SMC Confirm (3)."""
        head = EYE + struct.pack(">BHB", kind, 68, 0x10 | first_contact) + PEER_ID
        link = self._rnic.gid + self._rnic.mac + self._qp.qp_num.to_bytes(3, "big")
        element = struct.pack(">IBIBBQB", self._region.rkey, 1, TOKEN, 0x05, 0,
                              self._region.address, 0)  # fmt: skip
        self._tcp.send(head + link + element + PSN.to_bytes(3, "big") + EYE)

    def connect(self, named: bytes) -> None:
        """Connect the queue pair to the one that SMC Accept or SMC Confirm names."""
        qp_number = int.from_bytes(named[38:41], "big")
        self._rkey, index, self._token = struct.unpack(">IBI", named[41:50])
        address = int.from_bytes(named[52:60], "big")
        self._target = address + (index - 1) * (LENGTH << (named[50] >> 4))
        self._qp.to_init()
        psn = int.from_bytes(named[61:64], "big")
        self._qp.to_rtr(gid=named[16:32], qp_num=qp_number, psn=psn, mtu=5)
        self._qp.post_receive(20)
        self._qp.to_rts(psn=PSN)

    # --- LLC: figures 31 and 32 ------------------------------------------------------------------

    def receive_llc(self) -> bytes:
        received: list[bytes] = []

        def one() -> bool:
            received.extend(each.data for each in self._rnic.poll() if each.data is not None)
            return bool(received)

        self._world.until(one)
        (message,) = received
        return message

    def confirm_link(self, flags: int) -> None:
        head = b"\x01\x2c\0" + bytes((flags,)) + self._rnic.mac + self._rnic.gid
        number = self._qp.qp_num.to_bytes(3, "big") + b"\x01"
        self._qp.post_send(1, (head + number + b"USER\x02").ljust(44, b"\0"))

    def offer_link(self) -> None:
        """Send ADD LINK for the RNIC in use, like a server with a single RNIC (3.5.1.6)."""
        head = b"\x02\x2c\0\0" + self._rnic.mac + b"\0\0" + self._rnic.gid
        self._qp.post_send(2, (head + b"\0\0\x99\x02\x05\0\0\x01").ljust(44, b"\0"))

    def reject_link(self, offer: bytes) -> None:
        self._qp.post_send(2, offer[:2] + b"\x10" + bytes((REPLY | REJECTED,)) + offer[4:])

    # --- data: figures 16 and 41 ---------------------------------------------------------------

    def send_data(self, data: bytes) -> None:
        """Write the data behind the eye catcher, and send a CDC message."""
        view = memoryview(data)
        place = self._target + 4 + self._sent
        self._qp.post_write(3, view, None, address=place, rkey=self._rkey, signaled=True)
        self._sent += len(data)
        cursors = struct.pack(">HHIHHI", 0, 0, 4 + self._sent, 0, 0, 4)
        head = struct.pack(">BBHI", 0xFE, 44, 1, self._token)
        self._qp.post_send(4, (head + cursors).ljust(44, b"\0"))

    def received_data(self, cdc: bytes) -> bytes:
        """The bytes that the peer has written, up to the cursor of its CDC message."""
        token, wrap, cursor = struct.unpack(">I2xHI", cdc[4:16])
        assert (token, wrap) == (TOKEN, 0)
        return bytes(self.memory.view[4:cursor])


@pytest.fixture
def world() -> Iterator[World]:
    with World() as world:
        yield world


def tcp_pair(world: World) -> tuple[Tcp, Tcp]:
    one, other = Tcp(world.tcp_changes), Tcp(world.tcp_changes)
    one.peer, other.peer = other, one
    return one, other


class _Single:
    """A call for `World` with one tested end; the test itself plays the peer."""

    def __init__(self, end: End) -> None:
        self.ends = (end,)
        self.states = (end.state,)


def talk(world: World, peer: RfcPeer, end: End) -> None:
    world.settle()
    assert end.state == "ESTABLISHED"
    connection = end.connection
    peer.send_data(b"HELLO")
    world.settle()
    assert connection.receiver.receive(100) == b"HELLO"
    connection.send(memoryview(b"WORLD"))
    cdc = peer.receive_llc()
    assert peer.received_data(cdc) == b"WORLD"
    assert connection.rmbe.check_eye_catcher()
    assert connection.receiver.usable == connection.rmbe.size - 4


@pytest.mark.rfc("4.2/2", "A.4/10", "A.3.1/7")
def test_a_server_serves_a_peer_without_extensions(world: World) -> None:
    side = world.side()
    theirs, ours = tcp_pair(world)
    negotiation = ServerNegotiation(
        host=side.stack.groups, admit=lambda _: (side.rnic, VERSION_1), receive_buffer=SIZE
    )
    end = End(side, ours, negotiation)
    world.calls.append(_Single(end))  # type: ignore[arg-type]
    peer = RfcPeer(world, theirs)
    peer.propose()
    accept = peer.receive_clc(68)
    assert accept[4:8] == b"\x02\0\x44\x18"  # with the first-contact flag
    peer.connect(accept)
    peer.send_credentials(3, 0)
    request = peer.receive_llc()
    assert request[:3] == b"\x01\x2c\0"
    assert request[4:26] == side.rnic.mac + side.rnic.gid
    peer.confirm_link(REPLY)
    offer = peer.receive_llc()
    assert offer[:4] == b"\x02\x2c\0\0"
    peer.reject_link(offer)
    talk(world, peer, end)
    side.free()
    peer.close()


@pytest.mark.rfc("4.2/2", "A.4/10", "A.3.1/7")
def test_a_client_uses_a_server_without_extensions(world: World) -> None:
    side = world.side()
    theirs, ours = tcp_pair(world)
    negotiation = ClientNegotiation(host=side.stack.groups, receive_buffer=SIZE)
    end = End(side, ours, negotiation)
    world.calls.append(_Single(end))  # type: ignore[arg-type]
    peer = RfcPeer(world, theirs)
    proposal = clc.Proposal(
        peer_id=side.stack.groups.peer_id, gid=side.rnic.gid, mac=side.rnic.mac,
        ipv4_subnet=SUBNET, ipv4_mask_length=8,
    )  # fmt: skip
    negotiation.propose(side.rnic, proposal)
    assert peer.receive_clc(52)[8:16] == side.stack.groups.peer_id
    peer.send_credentials(2, 8)
    confirm = peer.receive_clc(68)
    peer.connect(confirm)
    peer.confirm_link(0)
    reply = peer.receive_llc()
    # The request had no extension bits, so the reply has none.
    assert reply[:4] == b"\x01\x2c\0" + bytes((REPLY,))
    peer.offer_link()
    rejection = peer.receive_llc()
    assert rejection[3] == REPLY | REJECTED
    talk(world, peer, end)
    side.free()
    peer.close()
