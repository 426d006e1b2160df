"""Messages typed by hand from RFC 7609, appendix A: each message next to its bytes.

Hand-typed messages cover the cases that the captured messages of ``golden/kernel_messages.json``
lack: CONFIRM RKEY CONTINUATION, negative and rejecting replies, every flag, the 52-byte Proposal
and its IPv6 form, the 44-byte Decline.  :func:`captured` reads the captured messages.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.wire.tshark_reader import Reading
from trio_smc.wire import cdc, clc, llc

_GOLDEN = Path(__file__).parents[1] / "golden" / "kernel_messages.json"
_GOLDEN_V2 = _GOLDEN.with_name("kernel_v2_messages.json")


@dataclass(frozen=True)
class Captured:
    """A message between two Linux kernels, and the fields that tshark has shown."""

    codec: str
    frame: int
    data: bytes
    tshark: list[Reading]


def captured(codec: str = "") -> list[Captured]:
    """Read the captured messages of one codec ("clc", "llc" or "cdc"), or of all codecs ("")."""
    return [
        Captured(
            codec=item["codec"],
            frame=item["frame"],
            data=bytes.fromhex(item["hex"]),
            tshark=[(k, bytes.fromhex(v) if isinstance(v, str) else v) for k, v in item["tshark"]],
        )
        for item in json.loads(_GOLDEN.read_text())
        if codec in ("", item["codec"])
    ]


@dataclass(frozen=True)
class CapturedV2:
    """A message of version 2 between stock kernels, and the fields of an independent decoder."""

    name: str
    codec: str
    data: bytes
    fields: dict[str, Any]


def captured_v2(codec: str = "") -> list[CapturedV2]:
    """Read the captured messages of version 2 of one codec ("clc" or "llc"), or of both ("")."""
    return [
        CapturedV2(item["name"], item["codec"], bytes.fromhex(item["hex"]), item["fields"])
        for item in json.loads(_GOLDEN_V2.read_text())
        if codec in ("", item["codec"])
    ]


def gid_text(gid: bytes) -> str:
    """A GID as text in the form of version 2's golden file."""
    if gid.startswith(bytes(10) + b"\xff\xff"):
        return "::ffff:" + ".".join(map(str, gid[12:]))
    return gid.hex()


PEER = bytes.fromhex("0102 a0b0c0d0e0f0")
GID = bytes.fromhex("fe80 0000 0000 0000 a0b0 c0ff fed0 e0f0")
MAC = bytes.fromhex("a0b0c0d0e0f0")
_PEER, _GID, _MAC = PEER.hex(), GID.hex(), MAC.hex()
V4_GID = bytes(10) + b"\xff\xff" + bytes((192, 0, 2, 1))
_V4_GID = V4_GID.hex()
_EYE = "e2d4c3d9"


def _bytes(*pieces: str) -> bytes:
    return b"".join(bytes.fromhex(piece) for piece in pieces)


CLC: dict[str, tuple[clc.Message, bytes]] = {
    "Proposal, IPv4": (
        clc.Proposal(
            peer_id=PEER,
            gid=GID,
            mac=MAC,
            ipv4_subnet=bytes((192, 0, 2, 0)),
            ipv4_mask_length=24,
        ),
        _bytes(_EYE, "01 0034 10", _PEER, _GID, _MAC, "0000", "c0000200 18 0000 00", _EYE),
    ),
    "Proposal, two IPv6 prefixes": (
        clc.Proposal(
            peer_id=PEER,
            gid=GID,
            mac=MAC,
            ipv6_prefixes=(
                clc.Ipv6Prefix(prefix=bytes.fromhex("20010db8") + bytes(12), length=64),
                clc.Ipv6Prefix(prefix=bytes.fromhex("fd") + bytes(15), length=8),
            ),
        ),
        _bytes(
            *(_EYE, "01 0056 10", _PEER, _GID, _MAC, "0000", "00000000 00 0000 02"),
            "20010db8 00000000 00000000 00000000 40",
            "fd000000 00000000 00000000 00000000 08",
            _EYE,
        ),
    ),
    "Proposal, version 2 with a growth area and two IPv6 prefixes": (
        clc.Proposal(
            peer_id=PEER,
            version=2,
            flags=0x08,
            gid=GID,
            mac=MAC,
            ipv6_prefixes=(
                clc.Ipv6Prefix(prefix=bytes.fromhex("20010db8") + bytes(12), length=64),
                clc.Ipv6Prefix(prefix=bytes.fromhex("fd") + bytes(15), length=8),
            ),
        ),
        _bytes(
            *(_EYE, "01 007e 28", _PEER, _GID, _MAC, "0028", "00" * 40, "00000000 00 0000 02"),
            "20010db8 00000000 00000000 00000000 40",
            "fd000000 00000000 00000000 00000000 08",
            _EYE,
        ),
    ),
    "Proposal, version 2 that offers SMC-R in both versions": (
        clc.Proposal(
            peer_id=PEER,
            version=2,
            flags=0x00,
            gid=GID,
            mac=MAC,
            ipv4_subnet=bytes((10, 0, 0, 0)),
            ipv4_mask_length=8,
            v2=clc.V2Offer(eids=(b"\x40" * 32,), gid=bytes(16), release=0),
        ),
        _bytes(
            *(_EYE, "01 00a4 20", _PEER, _GID, _MAC, "0028", "00" * 10, "0024", "00" * 28),
            *("0a000000 08 0000 00", "01", "00" * 39, "40" * 32, _EYE),
        ),
    ),
    "Proposal, both versions and an IPv6 prefix": (
        clc.Proposal(
            peer_id=PEER,
            version=2,
            flags=clc.proposal_flags(v1=True, v2=True),
            gid=GID,
            mac=MAC,
            ipv6_prefixes=(
                clc.Ipv6Prefix(prefix=bytes.fromhex("20010db8") + bytes(12), length=64),
            ),
            v2=clc.V2Offer(
                eids=(b"A" * 32, b"B" * 32),
                gid=V4_GID,
                release=1,
                max_connections=16,
                max_links=1,
                features=0x8001,
            ),
        ),
        _bytes(
            *(_EYE, "01 00d5 20", _PEER, _GID, _MAC, "0028", "00" * 10, "0035", "00" * 28),
            "00000000 00 0000 01",
            "20010db8 00000000 00000000 00000000 40",
            *("02 00 00 10 0000 0000", _V4_GID, "10 01 8001", "00" * 12, "41" * 32, "42" * 32),
            _EYE,
        ),
    ),
    "Proposal, version 2 without an offer of version 1": (
        clc.Proposal(
            peer_id=PEER,
            version=2,
            flags=clc.proposal_flags(v1=False, v2=True),
            gid=bytes(16),
            mac=bytes(6),
            v2=clc.V2Offer(eids=(), gid=V4_GID, release=15),
        ),
        _bytes(
            *(_EYE, "01 007c 22", _PEER, "00" * 16, "00" * 6, "0000"),
            *("00" * 10, "001c", "00" * 28, "00 00 00 f0 0000 0000", _V4_GID, "00" * 16, _EYE),
        ),
    ),
    "Accept, first contact": (
        clc.Accept(
            peer_id=PEER,
            first_contact=True,
            gid=GID,
            mac=MAC,
            qp_number=0x123456,
            rkey=0x89ABCDEF,
            rmbe_index=255,
            alert_token=0xFEDCBA98,
            buffer_size_code=5,
            qp_mtu=clc.QpMtu.MTU_4096,
            rmb_address=0x00007F0012340000,
            initial_psn=0x0A0B0C,
        ),
        _bytes(
            *(_EYE, "02 0044 18", _PEER, _GID, _MAC, "123456", "89abcdef", "ff", "fedcba98"),
            *("55", "00", "00007f0012340000", "00", "0a0b0c", _EYE),
        ),
    ),
    "Accept, reserved MTU": (
        clc.Accept(
            peer_id=PEER,
            gid=GID,
            mac=MAC,
            qp_number=1,
            rkey=0,
            rmbe_index=1,
            alert_token=0,
            buffer_size_code=15,
            qp_mtu=6,
            rmb_address=0,
            initial_psn=0,
        ),
        _bytes(
            *(_EYE, "02 0044 10", _PEER, _GID, _MAC, "000001", "00000000", "01", "00000000"),
            *("f6", "00", "0000000000000000", "00", "000000", _EYE),
        ),
    ),
    "Confirm": (
        clc.Confirm(
            peer_id=PEER,
            gid=GID,
            mac=MAC,
            qp_number=0xFFFFFF,
            rkey=1,
            rmbe_index=2,
            alert_token=3,
            buffer_size_code=0,
            qp_mtu=clc.QpMtu.MTU_256,
            rmb_address=0x1122334455660000,
            initial_psn=0xFFFFFF,
        ),
        _bytes(
            *(_EYE, "03 0044 10", _PEER, _GID, _MAC, "ffffff", "00000001", "02", "00000003"),
            *("01", "00", "1122334455660000", "00", "ffffff", _EYE),
        ),
    ),
    "Decline": (
        clc.Decline(peer_id=PEER, diagnosis=0x03070000),
        _bytes(_EYE, "04 001c 10", _PEER, "03070000", "00000000", _EYE),
    ),
    "Decline, out of sync": (
        clc.Decline(peer_id=PEER, out_of_sync=True, diagnosis=0x04000000),
        _bytes(_EYE, "04 001c 18", _PEER, "04000000", "00000000", _EYE),
    ),
    "Decline, 44 bytes from a Linux of version 2": (
        clc.Decline(
            peer_id=PEER,
            version=2,
            diagnosis=0x03030000,
            more_diagnosis=(1, 2, 3, 0xFFFFFFFF),
            system=clc.LINUX,
        ),
        _bytes(
            *(_EYE, "04 002c 20", _PEER, "03030000", "20000000"),
            *("00000001 00000002 00000003 ffffffff", _EYE),
        ),
    ),
}

_TOKENS = tuple(
    llc.LinkRToken(link_number=n, rkey=0x01010101 * n, address=0x0101010101010101 * n)
    for n in (2, 3, 4)
)
_LINK2, _LINK3, _LINK4 = ("02" * 13, "03" * 13, "04" * 13)

LLC: dict[str, tuple[llc.Message, bytes]] = {
    "CONFIRM LINK": (
        llc.ConfirmLink(
            mac=MAC,
            gid=GID,
            qp_number=0x123456,
            link_number=1,
            link_user_id=0xDEADBEEF,
            max_links=8,
        ),
        _bytes("01 2c 00 00", _MAC, _GID, "123456", "01", "deadbeef", "08", "00" * 9),
    ),
    "CONFIRM LINK reply, no eye catcher": (
        llc.ConfirmLink(
            reply=True,
            no_eye_catcher=True,
            mac=MAC,
            gid=GID,
            qp_number=1,
            link_number=255,
            link_user_id=0,
            max_links=2,
        ),
        _bytes("01 2c 00 83", _MAC, _GID, "000001", "ff", "00000000", "02", "00" * 9),
    ),
    "ADD LINK": (
        llc.AddLink(
            mac=MAC,
            gid=GID,
            qp_number=0x000102,
            link_number=2,
            qp_mtu=clc.QpMtu.MTU_1024,
            initial_psn=0x445566,
        ),
        _bytes("02 2c 00 00", _MAC, "0000", _GID, "000102", "02", "03", "445566", "00" * 8),
    ),
    "ADD LINK reply, rejected": (
        llc.AddLink(
            reply=True, rejected=True, reason=llc.AddLinkReason.NO_ALTERNATE_PATH, mac=MAC, gid=GID
        ),
        _bytes("02 2c 01 c0", _MAC, "0000", _GID, "000000", "00", "00", "000000", "00" * 8),
    ),
    "ADD LINK CONTINUATION, the first two of five": (
        llc.AddLinkContinuation(
            link_number=2,
            tokens_left=5,
            pairs=(
                llc.RTokenPair(reference_rkey=1, new_rkey=2, new_address=3),
                llc.RTokenPair(reference_rkey=4, new_rkey=5, new_address=6),
            ),
        ),
        _bytes(
            *("03 2c 00 00", "02", "05", "0000", "00000001", "00000002", "0000000000000003"),
            *("00000004", "00000005", "0000000000000006", "00000000"),
        ),
    ),
    "ADD LINK CONTINUATION reply, empty": (
        llc.AddLinkContinuation(reply=True, link_number=2, tokens_left=0),
        _bytes("03 2c 00 80", "02", "00", "0000", "00" * 36),
    ),
    "DELETE LINK, all of them": (
        llc.DeleteLink(all_links=True, orderly=True, reason=llc.DeleteLinkReason.PROGRAM),
        _bytes("04 2c 00 60", "00", "00030000", "00" * 35),
    ),
    "DELETE LINK reply, unknown link": (
        llc.DeleteLink(reply=True, link_number=9, reason=llc.DeleteLinkReason.UNKNOWN_LINK),
        _bytes("04 2c 00 80", "09", "00100000", "00" * 35),
    ),
    "DELETE LINK with an unknown reason": (
        llc.DeleteLink(link_number=1, reason=0xDEADBEEF),
        _bytes("04 2c 00 00", "01", "deadbeef", "00" * 35),
    ),
    "CONFIRM RKEY, single link": (
        llc.ConfirmRkey(rkey=0x11223344, address=0x5566778899AABBCC),
        _bytes("06 2c 00 00", "00", "11223344", "5566778899aabbcc", "00" * 27),
    ),
    "CONFIRM RKEY, five other links": (
        llc.ConfirmRkey(rkey=1, address=2, other_tokens=5, others=_TOKENS[:2]),
        _bytes("06 2c 00 00", "05", "00000001", "0000000000000002", _LINK2, _LINK3, "00"),
    ),
    "CONFIRM RKEY reply, negative, retry later": (
        llc.ConfirmRkey(
            reply=True,
            negative=True,
            retry=True,
            rkey=1,
            address=2,
            other_tokens=1,
            others=_TOKENS[:1],
        ),
        _bytes("06 2c 00 b0", "01", "00000001", "0000000000000002", _LINK2, "00" * 14),
    ),
    "CONFIRM RKEY CONTINUATION": (
        llc.ConfirmRkeyContinuation(tokens_left=3, others=_TOKENS),
        _bytes("08 2c 00 00", "03", _LINK2, _LINK3, _LINK4),
    ),
    "CONFIRM RKEY CONTINUATION reply, negative": (
        llc.ConfirmRkeyContinuation(reply=True, negative=True, tokens_left=1, others=_TOKENS[:1]),
        _bytes("08 2c 00 a0", "01", _LINK2, "00" * 26),
    ),
    "DELETE RKEY, eight": (
        llc.DeleteRkey(rkeys=tuple(range(1, 9))),
        _bytes(
            *("09 2c 00 00", "08", "00", "0000"),
            "00000001 00000002 00000003 00000004 00000005 00000006 00000007 00000008",
            "00000000",
        ),
    ),
    "DELETE RKEY reply, the second of three failed": (
        llc.DeleteRkey(reply=True, negative=True, error_mask=0x40, rkeys=(7, 8, 9)),
        _bytes("09 2c 00 a0", "03", "40", "0000", "00000007 00000008 00000009", "00" * 24),
    ),
    "TEST LINK": (
        llc.TestLink(user_data=bytes(range(16))),
        _bytes("07 2c 00 00", "00010203 04050607 08090a0b 0c0d0e0f", "00" * 24),
    ),
    "TEST LINK reply": (
        llc.TestLink(reply=True, user_data=b"\xff" * 16),
        _bytes("07 2c 00 80", "ff" * 16, "00" * 24),
    ),
    "optional message": (
        llc.OptionalMessage(data=b"\x80\x2c" + b"\x5a" * 42),
        _bytes("80 2c", "5a" * 42),
    ),
}


def _cdc(producer_flags: int = 0, connection_flags: int = 0) -> tuple[cdc.CdcMessage, bytes]:
    message = cdc.CdcMessage(
        sequence=0x0102,
        alert_token=0x03040506,
        producer_wrap=0x0708,
        producer_cursor=0x090A0B0C,
        consumer_wrap=0x0D0E,
        consumer_cursor=0x0F101112,
        producer_flags=producer_flags,
        connection_flags=connection_flags,
    )
    flags = bytes((producer_flags, connection_flags)).hex()
    data = ("fe 2c 0102", "03040506", "0000 0708 090a0b0c", "0000 0d0e 0f101112", flags, "00" * 18)
    return message, _bytes(*data)


CDC: dict[str, tuple[cdc.CdcMessage, bytes]] = {
    "no flags": _cdc(),
    "writer blocked": _cdc(0x80),
    "urgent pending": _cdc(0x40),
    "urgent present": _cdc(0x20),
    "update requested": _cdc(0x10),
    "failover validation": _cdc(0x08),
    "sending done": _cdc(0, 0x80),
    "connection closed": _cdc(0, 0x40),
    "abnormal close": _cdc(0, 0x20),
    "all flags": _cdc(0xF8, 0xE0),
    "reserved flags": (
        cdc.CdcMessage(1, 2, producer_flags=7, connection_flags=31),
        _bytes("fe 2c 0001 00000002", "00" * 16, "07 1f", "00" * 18),
    ),
}

ALL: dict[str, dict[str, tuple[clc.Message | llc.Message | cdc.CdcMessage, bytes]]] = {
    "clc": {**CLC},
    "llc": {**LLC},
    "cdc": {**CDC},
}
