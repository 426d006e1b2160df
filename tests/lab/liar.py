"""A hostile peer over RoCE: speaks SMC-R well enough to be listened to, and then lies.

Runs beside an honest client, against the same listener of trio_smc.  Each method of `Liar` is one
way to misbehave; each uses a peer ID, queue pair and TCP connection of its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import trio

from tests.lab.verbs_side import Device, Pair, find
from trio_smc.rnic.verbs import RnicError, WcOpcode
from trio_smc.wire import clc, llc

__all__ = ["LIES", "Liar"]

SIZE_CODE = 2
RMB = 64 * 1024
PATIENCE = 60.0
DEAD = bytes(10) + b"\xff\xff\x0a\x09\0\x4d"  # 10.9.0.77


def at(place: int, lie: bytes) -> Callable[[bytes], bytes]:
    """Say something else there."""
    return lambda message: message[:place] + lie + message[place + len(lie) :]


class Liar:
    """One misbehaving client."""

    def __init__(self, device: Device, host: str, port: int, prefix: tuple[str, int]) -> None:
        self.device = device
        self.host, self.port = host, port
        self.prefix = prefix
        self.peer_id = os.urandom(2) + device.rnic.mac

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[trio.SocketStream]:
        with trio.fail_after(PATIENCE):
            stream = await trio.open_tcp_stream(self.host, self.port)
        try:
            yield stream
        finally:
            with trio.CancelScope(shield=True):
                await stream.aclose()

    def proposal(self) -> bytes:
        subnet, length = self.prefix
        return clc.Proposal(
            peer_id=self.peer_id, gid=self.device.rnic.gid, mac=self.device.rnic.mac,
            ipv4_subnet=bytes(map(int, subnet.split("."))), ipv4_mask_length=length,
        ).encode()  # fmt: skip

    async def accepted(self, stream: trio.SocketStream) -> clc.Accept:
        await stream.send_all(self.proposal())
        got = b""
        with trio.fail_after(PATIENCE):
            while len(got) < 68:
                more = await stream.receive_some(68 - len(got))
                assert more, got.hex()
                got += more
        answer = clc.decode_untrusted(got)
        assert isinstance(answer, clc.Accept), answer
        return answer

    async def cut_off(self, stream: trio.SocketStream) -> None:
        """The server ends this connection, or has it go on as TCP: an SMC Decline."""
        with trio.fail_after(PATIENCE), contextlib.suppress(trio.BrokenResourceError):
            while data := await stream.receive_some():
                if data[:5] == clc.EYE_CATCHER + b"\x04":
                    break

    @contextlib.asynccontextmanager
    async def first_contact(
        self, change: Callable[[bytes], bytes] = lambda same: same
    ) -> AsyncIterator[tuple[trio.SocketStream, Pair, clc.Accept]]:
        """Up to SMC Confirm, with a real queue pair; ``change`` what it says."""
        pair = Pair(self.device, RMB)
        try:
            async with self.connected() as stream:
                accept = await self.accepted(stream)
                pair.qp.to_init()
                pair.qp.post_receive(64)
                await find(self.device.rnic, accept.gid)
                pair.qp.to_rtr(
                    gid=accept.gid, qp_num=accept.qp_number, psn=accept.initial_psn,
                    mtu=min(self.device.rnic.mtu, accept.qp_mtu),
                )  # fmt: skip
                pair.qp.to_rts(psn=7)
                confirm = clc.Confirm(
                    peer_id=self.peer_id, gid=self.device.rnic.gid, mac=self.device.rnic.mac,
                    qp_number=pair.qp.qp_num, rkey=pair.region.rkey, rmbe_index=1,
                    alert_token=5, buffer_size_code=SIZE_CODE, qp_mtu=self.device.rnic.mtu,
                    rmb_address=pair.region.address, initial_psn=7,
                )  # fmt: skip
                await stream.send_all(change(confirm.encode()))
                yield stream, pair, accept
        finally:
            pair.close()

    async def heard(self, pair: Pair) -> bytes:
        """The next message of the server's."""
        while True:
            completion = await pair.take(PATIENCE)
            if completion.opcode == WcOpcode.RECV:
                assert completion.data is not None, completion
                return completion.data

    async def confirmed(self, pair: Pair, **answer: Any) -> None:
        """Answer CONFIRM LINK as we should, and turn the second link down, or answer otherwise."""
        request = llc.decode_untrusted(await self.heard(pair))
        assert isinstance(request, llc.ConfirmLink), request
        rnic = self.device.rnic
        reply = replace(request, reply=True, mac=rnic.mac, gid=rnic.gid, qp_number=pair.qp.qp_num)
        pair.qp.post_send(1, reply.encode())
        offer = llc.decode_untrusted(await self.heard(pair))
        assert isinstance(offer, llc.AddLink), offer
        answer = answer or {"rejected": True, "reason": 1}
        pair.qp.post_send(2, replace(offer, reply=True, **answer).encode())

    # --- lies -------------------------------------------------------------------------------

    async def truncates_proposal(self) -> None:
        async with self.connected() as stream:
            await stream.send_all(self.proposal()[:30])

    async def lies_about_length(self) -> None:
        async with self.connected() as stream:
            message = bytearray(self.proposal())
            message[5:7] = (60000).to_bytes(2, "big")
            await stream.send_all(message)
            await self.cut_off(stream)

    async def confirms_first(self) -> None:
        async with self.connected() as stream:
            await stream.send_all(b"\xe2\xd4\xc3\xd9\x03\x00\x44\x10" + bytes(56) + clc.EYE_CATCHER)
            await self.cut_off(stream)

    async def vanishes_after_accept(self) -> None:
        async with self.connected() as stream:
            await self.accepted(stream)

    async def names_nobodys_queue_pair(self) -> None:
        async with self.first_contact(at(38, b"\xab\xcd\xef")) as (stream, _, _):
            await self.cut_off(stream)

    async def names_a_dead_gid(self) -> None:
        """Nobody answers for its address."""
        async with self.first_contact(at(16, DEAD)) as (stream, _, _):
            await self.cut_off(stream)

    async def names_a_dead_gid_for_a_link(self) -> None:
        """The second link is not to be; the connection could go on without it."""
        async with self.first_contact() as (_, pair, accept):
            await self.confirmed(pair, gid=DEAD, mac=bytes(6), qp_number=17)
            message = llc.decode_untrusted(await self.heard(pair))
            assert isinstance(message, llc.DeleteLink), message
            await self._say(pair, accept)

    async def names_element_zero(self) -> None:
        async with self.first_contact(at(45, b"\0")) as (stream, _, _):
            await self.cut_off(stream)

    async def vanishes_before_confirm_link(self) -> None:
        async with self.first_contact():
            pass

    async def sends_llc_out_of_order(self) -> None:
        async with self.first_contact() as (stream, pair, _):
            await self.heard(pair)
            message = llc.DeleteRkey(rkeys=(1, 2, 3))
            pair.qp.post_send(1, message.encode())
            await self.cut_off(stream)

    async def sends_short_messages(self) -> None:
        async with self.first_contact() as (stream, pair, _):
            await self.confirmed(pair)
            pair.qp.post_send(3, b"\x07\x2c")
            pair.qp.post_send(4, os.urandom(44))
            pair.qp.post_send(5, b"\x05" + bytes(43))
            await self.cut_off(stream)

    async def lies_about_its_rkey(self) -> None:
        """The server's first write of data is refused, which ends the link."""
        async with self.first_contact(at(43, b"\xff")) as (
            stream, pair, accept,
        ):  # fmt: skip
            await self.confirmed(pair)
            await self._say(pair, accept)
            await self.cut_off(stream)

    async def lies_about_its_size(self) -> None:
        """The server writes past the end of what is registered."""
        async with self.first_contact(at(50, b"\x53")) as (
            stream, pair, accept,
        ):  # fmt: skip
            await self.confirmed(pair)
            for number in range(20):
                await self._say(pair, accept, number)
            await self.cut_off(stream)

    async def lies_about_cursors(self) -> None:
        async with self.first_contact() as (stream, pair, accept):
            await self.confirmed(pair)
            await self._say(pair, accept)
            while (await self.heard(pair))[0] != 0xFE:  # the echo: the connection is in use
                pass
            self._cdc(pair, accept, 2, produced=1 << 30)
            await self.cut_off(stream)

    async def lies_about_cursors_at_once(self) -> None:
        """Right behind the first contact, before anybody uses the connection."""
        async with self.first_contact() as (stream, pair, accept):
            await self.confirmed(pair)
            self._cdc(pair, accept, 1, produced=1 << 30)
            await self.cut_off(stream)

    async def writes_past_our_rmb(self) -> None:
        """With the server's own RKey, outside of its memory."""
        async with self.first_contact() as (stream, pair, accept):
            await self.confirmed(pair)
            address = accept.rmb_address + (1 << 40)
            pair.qp.post_write(9, memoryview(b"x"), None, address=address, rkey=accept.rkey)
            await self.cut_off(stream)

    async def vanishes_in_the_middle(self) -> None:
        async with self.first_contact() as (_, pair, accept):
            await self.confirmed(pair)
            await self._say(pair, accept)

    async def _say(self, pair: Pair, accept: clc.Accept, number: int = 0) -> None:
        """16 KiB of data, which the server echoes into our RMB."""
        piece = 16 * 1024
        place = number * piece
        start = accept.rmb_address + (accept.rmbe_index - 1) * accept.buffer_size + place
        with contextlib.suppress(RnicError):  # the server has ended the link already
            pair.qp.post_write(10, memoryview(bytes(piece)), None, address=start, rkey=accept.rkey)
            self._cdc(pair, accept, number + 1, produced=place + piece)
        await trio.sleep(0.05)

    def _cdc(self, pair: Pair, accept: clc.Accept, sequence: int, *, produced: int) -> None:
        message = bytearray(44)
        message[0:2] = b"\xfe\x2c"
        message[2:4] = sequence.to_bytes(2, "big")
        message[4:8] = accept.alert_token.to_bytes(4, "big")
        message[12:16] = produced.to_bytes(4, "big")
        pair.qp.post_send(11, bytes(message))


LIES = (
    "truncates_proposal", "lies_about_length", "confirms_first", "vanishes_after_accept",
    "names_nobodys_queue_pair", "names_a_dead_gid", "names_a_dead_gid_for_a_link",
    "names_element_zero", "vanishes_before_confirm_link",
    "sends_llc_out_of_order", "sends_short_messages", "lies_about_its_rkey",
    "lies_about_its_size", "lies_about_cursors", "lies_about_cursors_at_once",
    "writes_past_our_rmb", "vanishes_in_the_middle",
)  # fmt: skip
