"""The suite's own messages: two implementations of the same formats, beside trio_smc's codecs."""

from __future__ import annotations

from typing import Any

import pytest

from smc_conform import messages
from smc_conform.messages import pack, read, with_bytes
from trio_smc.wire import cdc, clc, llc

CLC = (messages.PROPOSAL, messages.ACCEPT, messages.CONFIRM, messages.DECLINE)
LLC = tuple(messages.LLC_KINDS.values())
CLC_V2 = (
    messages.V2[messages.DECLINE],
    *(kinds[each] for kinds in (messages.V2, messages.V2_FIRST) for each in CLC[1:3]),
)
V2 = (*CLC_V2, *(messages.V2[each] for each in LLC))


@pytest.mark.parametrize("kind", [clc.Accept, clc.Confirm])
def test_credentials_match_the_codec(kind: type[clc.Accept | clc.Confirm]) -> None:
    fields: dict[str, Any] = {
        "peer_id": b"12345678", "gid": bytes(range(16)), "mac": b"abcdef", "qp_number": 0x123456,
        "rkey": 0x89ABCDEF, "rmbe_index": 7, "alert_token": 0x13572468, "qp_mtu": 3,
        "rmb_address": 0x123456789ABC,
    }  # fmt: skip
    theirs = kind(**fields, buffer_size_code=2, initial_psn=0xFEDCBA)
    own = messages.CLC_KINDS[kind.TYPE]
    assert pack(own, **fields, size_code=2, psn=0xFEDCBA) == theirs.encode()
    found = read(theirs.encode(), clc=True)
    assert (found.size_code, found.psn, found.gid) == (2, 0xFEDCBA, bytes(range(16)))


def test_cdc_messages_match_the_codec() -> None:
    theirs = cdc.pack(1, 2, 3, 4, 5, 6, cdc.WRITER_BLOCKED, cdc.CONNECTION_CLOSED)
    ours = pack(
        messages.CDC, sequence=1, alert_token=2, producer_wrap=3, producer=4, consumer_wrap=5,
        consumer=6, writer_blocked=1, closed=1,
    )  # fmt: skip
    assert ours == theirs


def test_llc_messages_match_the_codec() -> None:
    other = llc.LinkRToken(link_number=9, rkey=5, address=6)
    theirs = llc.ConfirmRkey(rkey=1, address=2, other_tokens=1, others=(other,), reply=True)
    ours = pack(
        messages.CONFIRM_RKEY, rkey=1, address=2, other_tokens=1, link_1=9, rkey_1=5, address_1=6,
        reply=1,
    )  # fmt: skip
    assert ours == theirs.encode()
    offer = llc.AddLink(mac=b"abcdef", gid=bytes(16), qp_number=7, link_number=2, qp_mtu=5)
    assert pack(
        messages.ADD_LINK, mac=b"abcdef", qp_number=7, link_number=2, qp_mtu=5
    ) == offer.encode()  # fmt: skip


@pytest.mark.parametrize("kind", [*CLC, *LLC, messages.CDC, *V2])
def test_each_field_is_written_where_it_is_read(kind: Any) -> None:
    is_clc = kind in CLC or kind in CLC_V2
    for name, field in kind.fields.items():
        value = b"\x5a" * field.size if field.raw else 1
        found = read(pack(kind, **{name: value}), clc=is_clc)
        if name not in ("type", "version", "eye_catcher"):
            assert getattr(found, name) == value, name
    assert not any(read(pack(kind), clc=is_clc).reserved_bits())


def codec(message: Any) -> bytes:
    """The bytes that trio_smc sends in a group of version 2."""
    return llc.V2.encode(message)


def test_llc_messages_of_version_2_match_the_codec() -> None:
    v2 = messages.V2
    pair = llc.RTokenPair(reference_rkey=1, new_rkey=2, new_address=3)
    extension = llc.AddLinkExtension(direct=True, target_gid=b"g" * 16, pairs=(pair,))
    offer = llc.AddLink(
        mac=b"abcdef", gid=bytes(16), qp_number=7, link_number=2, qp_mtu=5, extension=extension
    )
    ours = pack(
        v2[messages.ADD_LINK], length=88, mac=b"abcdef", qp_number=7, link_number=2, qp_mtu=5,
        direct=1, target_gid=b"g" * 16, token_count=1,
    ) + messages.rtoken_pair(1, 2, 3)  # fmt: skip
    assert ours == codec(offer)
    assert messages.pairs_of(read(ours)) == [(1, 2, 3)]
    assert pack(v2[messages.DELETE_RKEY], count=1, rkey_1=5, unknown=1, reply=1) == codec(
        llc.DeleteRkey(rkeys=(5,), unknown=1, reply=True)
    )
    assert pack(v2[messages.REQUEST_ADD_LINK], gid_count=1, gid_1=b"g" * 16) == codec(
        llc.RequestAddLink(gids=(b"g" * 16,))
    )
    confirm = llc.ConfirmLink(
        mac=b"abcdef", gid=bytes(16), qp_number=7, link_number=2, link_user_id=1, max_links=2,
        max_connections=255,
    )  # fmt: skip
    assert codec(confirm) == pack(
        v2[messages.CONFIRM_LINK], mac=b"abcdef", qp_number=7, link_number=2, link_user_id=1,
        max_links=2, max_connections=255,
    )  # fmt: skip


@pytest.mark.parametrize("v1", [True, False])
def test_a_proposal_of_version_2_is_that_of_the_codec(v1: bool) -> None:
    eids = (b"A".ljust(32), b"B".ljust(32))
    offer = clc.V2Offer(eids=eids, gid=b"r" * 16, release=1, max_connections=255, max_links=2)
    area: dict[str, Any] = {"ipv4_subnet": b"\x0a\0\0\0", "ipv4_mask_length": 8} if v1 else {}
    theirs = clc.Proposal(
        peer_id=b"12345678", gid=b"g" * 16, mac=b"abcdef", version=2,
        flags=clc.proposal_flags(v1=v1, v2=True), v2=offer, **area,
    ).encode()  # fmt: skip
    ours = messages.proposal_v2(
        eids, offer_1=0 if v1 else 2, peer_id=b"12345678", gid=b"g" * 16, mac=b"abcdef",
        subnet=b"\x0a\0\0\0", mask_length=8, roce_gid=b"r" * 16, release=1, max_connections=255,
        max_links=2,
    )  # fmt: skip
    assert ours == theirs
    found = read(theirs, clc=True)
    assert (found.eids, found.roce_gid, found.max_links) == (b"".join(eids), b"r" * 16, 2)
    assert not any(found.reserved_bits())


def test_credentials_of_version_2_match_the_codec() -> None:
    first = clc.FirstContact(
        direct=True, release=1, max_connections=255, max_links=2, host=b"h" * 32
    )
    fields: dict[str, Any] = {
        "peer_id": b"12345678", "gid": b"g" * 16, "mac": b"abcdef", "qp_number": 5, "rkey": 6,
        "rmbe_index": 1, "alert_token": 7, "qp_mtu": 3, "rmb_address": 8,
    }  # fmt: skip
    more: dict[str, Any] = {
        "eid": b"A".ljust(32), "direct": 1, "release": 1, "max_connections": 255, "max_links": 2,
        "host": b"h" * 32, "system": clc.LINUX, "first_contact": 1,
    }  # fmt: skip
    for cls, gids in ((clc.Accept, ()), (clc.Confirm, (b"g" * 16,))):
        theirs = cls(
            **fields, buffer_size_code=0, initial_psn=9, version=2, first_contact=True,
            v2=clc.V2Answer(eid=b"A".ljust(32), first=first, gids=gids),
        ).encode()  # fmt: skip
        listed: dict[str, Any] = {"gid_count": 1, "gid_1": gids[0]} if gids else {}
        own = messages.V2_FIRST[messages.CLC_KINDS[cls.TYPE]]
        assert pack(own, **fields, **more, **listed, psn=9) == theirs
        assert read(theirs, clc=True).eid == b"A".ljust(32)


def test_other_bytes_keep_the_length() -> None:
    assert with_bytes(b"abcdef", 2, b"XY") == b"abXYef"


def test_reserved_bits_are_named_by_offset() -> None:
    clean = pack(messages.TEST_LINK, reply=1, user_data=b"0123456789abcdef")
    assert read(clean).reserved_words() == ""
    wrong = with_bytes(with_bytes(clean, 2, b"\x40"), 43, b"\x01")
    text = "TEST LINK reply has reserved bits: 0x40 at offset 2, 0x01 at offset 43"
    assert read(wrong).reserved_words() == text
    assert read(wrong).reserved_words(43) == text.partition(",")[0]
