"""A hostile peer over RoCE: follows the protocol up to some point, and then violates it.

Runs beside an honest client, against the same listener of trio_smc.  Each method of `Liar` and
`V2Liar` is one way to misbehave; each uses a peer ID, queue pair and TCP connection of its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, ClassVar

import trio

from tests.lab.verbs_side import Device, Pair, find
from tests.timing import PATIENCE
from trio_smc._base.reasons import Fallback, FallbackReason
from trio_smc.rnic.verbs import RECEIVE_SIZE, RnicError, WcOpcode
from trio_smc.wire import clc, llc
from trio_smc.wire.fields import encode_ueid

__all__ = ["LIES", "UEID", "V2_LIES", "Liar", "V2Liar"]

UEID = "TRIO-SMC.LAB"
"""The server's."""
SIZE_CODE = 2
RMB = 64 * 1024
DEAD = bytes(10) + b"\xff\xff\x0a\x09\0\x4d"  # 10.9.0.77


def at(place: int, lie: bytes) -> Callable[[bytes], bytes]:
    """Return a function that replaces the bytes at this place."""
    return lambda message: message[:place] + lie + message[place + len(lie) :]


class Liar:
    """One misbehaving client."""

    framing: ClassVar[llc.Framing] = llc.V1
    receive_size: ClassVar[int] = RECEIVE_SIZE

    def __init__(self, device: Device, host: str, port: int, prefix: tuple[str, int]) -> None:
        self.device = device
        self.host, self.port = host, port
        self.prefix = prefix
        self.peer_id = os.urandom(2) + device.rnic.mac
        self.tamper = at(0, b"")
        """Changes the reply to ADD LINK."""

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
        return self.proposed().encode()

    def proposed(self) -> clc.Proposal:
        subnet, length = self.prefix
        return clc.Proposal(
            peer_id=self.peer_id, gid=self.device.rnic.gid, mac=self.device.rnic.mac,
            ipv4_subnet=bytes(map(int, subnet.split("."))), ipv4_mask_length=length,
        )  # fmt: skip

    def answer(self, accept: clc.Accept) -> dict[str, Any]:
        """The parts of Confirm besides the credentials."""
        return {}

    async def accepted(self, stream: trio.SocketStream) -> clc.Accept:
        await stream.send_all(self.proposal())
        answer = await self.answered(stream)
        assert isinstance(answer, clc.Accept), answer
        return answer

    async def answered(self, stream: trio.SocketStream) -> clc.Message:
        """The server's next CLC message."""
        reader = clc.ClcReader()
        with trio.fail_after(PATIENCE):
            while True:
                more = await stream.receive_some(reader.wanted)
                assert more, "the server has ended the connection"
                message = reader.feed_untrusted(more)
                if message is not None:
                    return clc.decode_untrusted(message)

    async def cut_off(self, stream: trio.SocketStream) -> None:
        """Wait until the server ends this connection, or declines it and continues with TCP."""
        with trio.fail_after(PATIENCE), contextlib.suppress(trio.BrokenResourceError):
            while data := await stream.receive_some():
                if data[:5] == clc.EYE_CATCHER + b"\x04":
                    break

    @contextlib.asynccontextmanager
    async def first_contact(
        self, change: Callable[[bytes], bytes] = lambda same: same
    ) -> AsyncIterator[tuple[trio.SocketStream, Pair, clc.Accept]]:
        """Run up to SMC Confirm, with a real queue pair; ``change`` its fields."""
        pair = Pair(self.device, RMB, self.receive_size)
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
                    rmb_address=pair.region.address, initial_psn=7, **self.answer(accept),
                )  # fmt: skip
                await stream.send_all(change(confirm.encode()))
                yield stream, pair, accept
        finally:
            pair.close()

    async def received_message(self, pair: Pair) -> bytes:
        """The next message of the server."""
        while True:
            completion = await pair.take(PATIENCE)
            if completion.opcode == WcOpcode.RECV:
                assert completion.data is not None, completion
                return completion.data

    async def confirmed(self, pair: Pair, **answer: Any) -> None:
        """Answer CONFIRM LINK correctly, and reject the second link, or send other answers."""
        decode, encode = self.framing.decode_untrusted, self.framing.encode
        request = decode(await self.received_message(pair))
        assert isinstance(request, llc.ConfirmLink), request
        rnic = self.device.rnic
        reply = replace(request, reply=True, mac=rnic.mac, gid=rnic.gid, qp_number=pair.qp.qp_num)
        pair.qp.post_send(1, encode(reply))
        offer = decode(await self.received_message(pair))
        assert isinstance(offer, llc.AddLink), offer
        answer = answer or {"rejected": True, "reason": 1, "extension": None}
        pair.qp.post_send(2, self.tamper(encode(replace(offer, reply=True, **answer))))

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

    async def names_an_unknown_queue_pair(self) -> None:
        async with self.first_contact(at(38, b"\xab\xcd\xef")) as (stream, _, _):
            await self.cut_off(stream)

    async def names_a_dead_gid(self) -> None:
        """The address of the peer gets no answer."""
        async with self.first_contact(at(16, DEAD)) as (stream, _, _):
            await self.cut_off(stream)

    async def names_a_dead_gid_for_a_link(self) -> None:
        """The second link fails; the connection could continue without it."""
        async with self.first_contact() as (_, pair, accept):
            await self.confirmed(pair, gid=DEAD, mac=bytes(6), qp_number=17)
            message = self.framing.decode_untrusted(await self.received_message(pair))
            assert isinstance(message, llc.DeleteLink), message
            await self._send_cdc(pair, accept)

    async def names_element_zero(self) -> None:
        async with self.first_contact(at(45, b"\0")) as (stream, _, _):
            await self.cut_off(stream)

    async def vanishes_before_confirm_link(self) -> None:
        async with self.first_contact():
            pass

    async def sends_llc_out_of_order(self) -> None:
        async with self.first_contact() as (stream, pair, _):
            await self.received_message(pair)
            message = llc.DeleteRkey(rkeys=(1, 2, 3))
            pair.qp.post_send(1, self.framing.encode(message))
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
            await self._send_cdc(pair, accept)
            await self.cut_off(stream)

    async def lies_about_its_size(self) -> None:
        """The server writes beyond the registered memory."""
        async with self.first_contact(at(50, b"\x53")) as (
            stream, pair, accept,
        ):  # fmt: skip
            await self.confirmed(pair)
            for number in range(20):
                await self._send_cdc(pair, accept, number)
            await self.cut_off(stream)

    async def lies_about_cursors(self) -> None:
        async with self.first_contact() as (stream, pair, accept):
            await self.confirmed(pair)
            await self._send_cdc(pair, accept)
            # Wait for the echo: the connection is in use then.
            while (await self.received_message(pair))[0] != 0xFE:
                pass
            self._cdc(pair, accept, 2, produced=1 << 30)
            await self.cut_off(stream)

    async def lies_about_cursors_at_once(self) -> None:
        """Right after the first contact, before the connection is used."""
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
            await self._send_cdc(pair, accept)

    async def _send_cdc(self, pair: Pair, accept: clc.Accept, number: int = 0) -> None:
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


class V2Liar(Liar):
    """A misbehaving client that speaks version 2.

    The server has an answer of version 1 for an offer of version 2 that does not fit; `only_v2`
    takes it away.
    """

    framing = llc.V2
    receive_size = 2 * llc.V2.largest

    def proposed(self) -> clc.Proposal:
        rnic = self.device.rnic
        offer = clc.V2Offer(
            eids=(encode_ueid(UEID),), gid=rnic.gid, release=1, max_connections=255, max_links=2
        )
        flags = clc.proposal_flags(v1=True, v2=True)
        return replace(super().proposed(), version=2, flags=flags, v2=offer)

    def answer(self, accept: clc.Accept) -> dict[str, Any]:
        assert accept.v2 is not None
        return {
            "version": 2,
            "first_contact": True,
            "v2": replace(accept.v2, gids=(self.device.rnic.gid,)),
        }

    def only_v2(self, **offer: Any) -> bytes:
        """A Proposal of version 2 alone, with other values in its offer."""
        proposal = self.proposed()
        assert proposal.v2 is not None
        return replace(
            proposal, flags=clc.proposal_flags(v1=False, v2=True), ipv4_subnet=bytes(4),
            ipv4_mask_length=0, v2=replace(proposal.v2, **offer),
        ).encode()  # fmt: skip

    async def _ended(self, proposal: bytes) -> None:
        """No CLC message answers this."""
        async with self.connected() as stream:
            await stream.send_all(proposal)
            with trio.fail_after(PATIENCE), contextlib.suppress(trio.BrokenResourceError):
                assert not await stream.receive_some()

    async def _declined(self, reason: FallbackReason, **offer: Any) -> None:
        async with self.connected() as stream:
            await stream.send_all(self.only_v2(**offer))
            answer = await self.answered(stream)
            assert isinstance(answer, clc.Decline), answer
            assert answer.diagnosis == Fallback.local(reason).code, answer

    async def _confirms(self, change: Callable[[bytes], bytes]) -> None:
        async with self.first_contact(change) as (stream, _, _):
            await self.cut_off(stream)

    async def _sends(self, message: bytes) -> None:
        """In a group that works."""
        async with self.first_contact() as (stream, pair, _):
            await self.confirmed(pair)
            pair.qp.post_send(3, message)
            await self.cut_off(stream)

    async def offers_nine_eids(self) -> None:
        message = self.only_v2(eids=(encode_ueid("ELSE"),) * 8)
        eid = encode_ueid(UEID)
        longer = message[:-4] + eid + message[-4:]
        await self._ended(at(_EXTENSION, b"\x09")(_with_length(longer)))

    async def counts_more_eids(self) -> None:
        await self._ended(at(_EXTENSION, b"\x08")(self.only_v2()))

    async def points_beyond_its_proposal(self) -> None:
        await self._ended(at(50, b"\xff\xff")(self.only_v2()))

    async def points_into_its_proposal(self) -> None:
        await self._ended(at(50, b"\0\1")(self.only_v2()))

    async def shares_no_eid(self) -> None:
        await self._declined(FallbackReason.NO_COMMON_UEID, eids=(encode_ueid("ELSE"),) * 8)

    async def offers_too_little(self) -> None:
        await self._declined(FallbackReason.CONNECTION_LIMIT, max_connections=1)
        await self._declined(FallbackReason.LINK_LIMIT, max_links=0)

    async def has_no_gid(self) -> None:
        for gid in (bytes(16), b"\xfe\x80" + bytes(14)):
            await self._declined(FallbackReason.NO_ROUTE, gid=gid)

    async def confirms_another_eid(self) -> None:
        await self._confirms(at(64, encode_ueid("ELSE")))

    async def confirms_another_release(self) -> None:
        await self._confirms(at(105, b"\x2f"))

    async def confirms_other_limits(self) -> None:
        await self._confirms(at(140, b"\x10"))
        await self._confirms(at(141, b"\xff"))

    async def counts_more_gids(self) -> None:
        await self._confirms(at(156, b"\xff"))

    async def confirms_a_gid_of_zeros(self) -> None:
        await self._confirms(at(160, bytes(16)))

    async def confirms_in_version_1(self) -> None:
        def cut(message: bytes) -> bytes:
            return at(7, b"\x18")(_with_length(message[:64] + message[-4:]))

        await self._confirms(cut)

    async def confirms_nothing_new(self) -> None:
        """In the form of a subsequent contact."""

        def cut(message: bytes) -> bytes:
            return at(7, b"\x20")(_with_length(message[:104] + message[-4:]))

        await self._confirms(cut)

    async def lies_about_llc_length(self) -> None:
        await self._sends(at(1, b"\xff\xff")(llc.V2.encode(llc.TestLink(user_data=bytes(16)))))

    async def sends_more_than_fits(self) -> None:
        """The server's receives have room for the longest message."""
        await self._sends(_with_llc_length(b"\x22" + bytes(2 * llc.V2.largest - 1)))

    async def speaks_version_1_later(self) -> None:
        await self._sends(llc.V1.encode(llc.AddLinkContinuation(link_number=1, tokens_left=0)))

    async def counts_more_rtokens(self) -> None:
        """Of which it tells none."""
        async with self.first_contact() as (stream, pair, _):
            empty = llc.AddLinkExtension(direct=True, target_gid=self.device.rnic.gid, pairs=())
            own = {"gid": self.device.rnic.gid, "mac": bytes(6), "qp_number": 17}
            self.tamper = at(70, b"\xff\xff")
            await self.confirmed(pair, extension=empty, **own)
            await self.cut_off(stream)

    async def sends_strange_rtokens(self) -> None:
        async with self.first_contact() as (stream, pair, _):
            strange = llc.RTokenPair(reference_rkey=77, new_rkey=78, new_address=1 << 63)
            many = llc.AddLinkExtension(direct=False, target_gid=bytes(16), pairs=(strange,) * 255)
            own = {"gid": self.device.rnic.gid, "mac": bytes(6), "qp_number": 17}
            await self.confirmed(pair, extension=many, **own)
            await self.cut_off(stream)

    async def counts_more_gids_for_a_link(self) -> None:
        gid = self.device.rnic.gid
        await self._sends(at(24, b"\xff")(llc.V2.encode(llc.RequestAddLink(gids=(gid, gid)))))

    async def requests_links(self) -> None:
        """Many requests for links without an RNIC for them; the connection continues."""
        async with self.first_contact() as (_, pair, accept):
            await self.confirmed(pair)
            request = llc.V2.encode(llc.RequestAddLink(gids=(DEAD, bytes(16))))
            for number in range(32):
                pair.qp.post_send(3 + number, request)
            await self._send_cdc(pair, accept)

    async def counts_more_rkeys(self) -> None:
        await self._sends(at(4, b"\xff")(llc.V2.encode(llc.DeleteRkey(rkeys=(1, 2)))))


_EXTENSION = 80
"""Offset of the extension in a Proposal of version 2 alone."""


def _with_length(message: bytes) -> bytes:
    """Set the length field of a CLC message."""
    return at(5, len(message).to_bytes(2, "big"))(message)


def _with_llc_length(message: bytes) -> bytes:
    return at(1, len(message).to_bytes(2, "little"))(message)


LIES = (
    "truncates_proposal", "lies_about_length", "confirms_first", "vanishes_after_accept",
    "names_an_unknown_queue_pair", "names_a_dead_gid", "names_a_dead_gid_for_a_link",
    "names_element_zero", "vanishes_before_confirm_link",
    "sends_llc_out_of_order", "sends_short_messages", "lies_about_its_rkey",
    "lies_about_its_size", "lies_about_cursors", "lies_about_cursors_at_once",
    "writes_past_our_rmb", "vanishes_in_the_middle",
)  # fmt: skip
V2_LIES = (
    "names_a_dead_gid_for_a_link", "vanishes_before_confirm_link", "sends_short_messages",
    "lies_about_cursors", "vanishes_in_the_middle",
    "offers_nine_eids", "counts_more_eids", "points_beyond_its_proposal",
    "points_into_its_proposal", "shares_no_eid", "offers_too_little", "has_no_gid",
    "confirms_another_eid", "confirms_another_release", "confirms_other_limits",
    "counts_more_gids", "confirms_a_gid_of_zeros", "confirms_in_version_1",
    "confirms_nothing_new", "lies_about_llc_length", "sends_more_than_fits",
    "speaks_version_1_later", "counts_more_rtokens", "sends_strange_rtokens",
    "counts_more_gids_for_a_link", "requests_links", "counts_more_rkeys",
)  # fmt: skip
"""Some of the same, and what only version 2 has room for."""
