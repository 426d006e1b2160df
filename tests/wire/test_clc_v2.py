"""The CLC codec with messages of SMC-R version 2: from kernels, typed by hand, and hostile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from tests.wire import vectors
from trio_smc._base.errors import ProtocolError
from trio_smc.wire import clc
from trio_smc.wire.fields import eid_name, encode_ueid

KERNEL = {item.name: item for item in vectors.captured_v2("clc")}
PROPOSAL = KERNEL["proposal-v2-only"].data
ACCEPT = KERNEL["accept-first"].data
LATER = KERNEL["accept-subsequent"].data
CONFIRM = KERNEL["confirm-first-one-gid"].data
BOTH = vectors.CLC["Proposal, both versions and an IPv6 prefix"][1]


def patched(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def resized(data: bytes, change: int) -> bytes:
    """Add zeros or remove bytes before the trailer, and correct the length."""
    body = data[:-4] + bytes(max(change, 0))
    body = body[: len(data) - 4 + change] + data[-4:]
    return patched(body, 5, len(body).to_bytes(2, "big"))


NO_AREA = patched(vectors.CLC["Proposal, IPv4"][1], 7, b"\x20")


# --- messages of kernels -----------------------------------------------------------------------


def _flat(message: clc.Message) -> dict[str, Any]:
    """The fields of a message by their names in the golden file."""
    found: dict[str, Any] = {
        "type": type(message).__name__,
        "length": len(message.encode()),
        "version": message.version,
        "peer_id": message.peer_id.hex(),
    }
    if isinstance(message, clc.Decline):
        words = message.more_diagnosis or ()
        return found | {
            "out_of_sync": int(message.out_of_sync),
            "diagnosis": f"{message.diagnosis:#010x}",
            "os_type": message.system,
            "more_diagnosis": [f"{word:#010x}" for word in words],
        }
    found |= {"gid": vectors.gid_text(message.gid), "mac": message.mac.hex(":")}
    if isinstance(message, clc.Proposal):
        v2 = message.v2
        assert v2 is not None
        return found | {
            "typev2": "RDNB"[message.flags >> 2],
            "typev1": "RDNB"[message.flags & 3],
            "eid_cnt": len(v2.eids),
            "eids": [eid.decode() for eid in v2.eids],
            "release": v2.release,
            "rocev2_gid": vectors.gid_text(v2.gid),
            "max_conns": v2.max_connections,
            "max_links": v2.max_links,
            "feature_mask": v2.features,
        }
    assert message.v2 is not None
    found |= {
        "first_contact": message.first_contact,
        "qp_number": message.qp_number,
        "rkey": message.rkey,
        "rmbe_index": message.rmbe_index,
        "alert_token": message.alert_token,
        "rmbe_size_code": message.buffer_size_code,
        "qp_mtu": message.qp_mtu,
        "rmb_address": message.rmb_address,
        "initial_psn": message.initial_psn,
        "eid": message.v2.eid.decode(),
    }
    if message.v2.first is not None:
        first = message.v2.first
        found["first_contact_extension"] = {
            "direct": int(first.direct),
            "os_type": first.system,
            "release": first.release,
            "hostname": first.host.decode(),
            "max_conns": first.max_connections,
            "max_links": first.max_links,
            "feature_mask": first.features,
        }
        if isinstance(message, clc.Confirm):
            found["gid_count"] = len(message.v2.gids)
            found["gids"] = [vectors.gid_text(gid) for gid in message.v2.gids]
    return found


@pytest.mark.v2("v2.2/2", "v2.4/1", "v2.5/1", "v2.6/1")
@pytest.mark.parametrize("item", KERNEL.values(), ids=KERNEL)
def test_messages_captured_from_kernels(item: vectors.CapturedV2) -> None:
    message = clc.decode_untrusted(item.data)
    assert message.encode() == item.data
    assert clc.message_length_untrusted(item.data[:8]) == len(item.data)
    # The other fields of the golden file are offsets, reserved, or fields of SMC-D.
    found = _flat(message)
    wanted = {name: value for name, value in item.fields.items() if name in found}
    if "first_contact_extension" in wanted:
        extension = dict(wanted["first_contact_extension"])
        del extension["vendor_exp_options"], extension["reserved"]
        wanted["first_contact_extension"] = extension
    assert found == wanted


@pytest.mark.v2("v2.2/3")
def test_kernels_do_not_name_themselves_in_a_proposal_of_version_2_only() -> None:
    message = clc.decode_untrusted(PROPOSAL)
    assert isinstance(message, clc.Proposal)
    assert not any(message.peer_id + message.gid + message.mac)
    assert not message.offers_smc_r, "the Proposal offers version 1"
    assert clc.proposal_flags(v1=False, v2=True) == message.flags
    assert message.v2 is not None
    assert message.v2.eids == (encode_ueid("SMCLAB"),)


@pytest.mark.v2("v2.2/7")
@pytest.mark.parametrize("offset", [40 + 32 - 8, 0x0100], ids=hex)
def test_a_proposal_may_offer_smc_d_as_well(offset: int) -> None:
    """The decoder skips the part of SMC-D after the EIDs."""
    longer = resized(patched(PROPOSAL, 7, b"\x2e"), 48)
    data = patched(longer, 80 + 6, offset.to_bytes(2, "big"))
    message = clc.decode_untrusted(data)
    assert isinstance(message, clc.Proposal)
    only_r = clc.decode_untrusted(PROPOSAL)
    assert isinstance(only_r, clc.Proposal)
    assert message.v2 == only_r.v2
    # If the flags offer only SMC-D, the decoder ignores the part of version 2.
    message = clc.decode_untrusted(patched(data, 7, b"\x26"))
    assert isinstance(message, clc.Proposal)
    assert message.v2 is None


@pytest.mark.parametrize("nothing", [patched(BOTH, 50, b"\0\0"), NO_AREA])
def test_a_proposal_without_the_extension_that_it_speaks_of(nothing: bytes) -> None:
    """The offset of the extension is missing, or prefixes are in its place.  The offer of version 1
    still counts."""
    message = clc.decode_untrusted(nothing)
    assert isinstance(message, clc.Proposal)
    assert message.v2 is None
    assert message.offers_smc_r
    assert clc.decode_untrusted(message.encode()) == message


def test_a_host_name_is_shown_as_printable_text() -> None:
    first = clc.FirstContact(direct=True, release=1, host=b"a\x1b[2Jb\xff" + b" " * 25)
    assert first.host_name == "a\\x1b[2Jb\\xff"


# --- hostile messages --------------------------------------------------------------------------


def _gids(count: int, listed: int) -> bytes:
    data = resized(CONFIRM, 16 * (listed - 1))
    for n in range(listed):
        data = patched(data, 160 + 16 * n, vectors.GID)
    return patched(data, 156, bytes((count,)))


HOSTILE = {
    "offset into the area": patched(PROPOSAL, 50, b"\0\x1b"),
    "offset beyond": patched(PROPOSAL, 50, b"\xff\xff"),
    "offset into the trailer": patched(PROPOSAL, 50, b"\0\x65"),
    "offset one too far": patched(PROPOSAL, 50, b"\0\x1d"),
    "offset into the prefixes": patched(BOTH, 50, b"\0\x24"),
    "offset of the prefixes beyond": patched(BOTH, 38, b"\xff\xff"),
    "no room for the area": resized(PROPOSAL, -(156 - 80)),
    "no room for the extension": resized(PROPOSAL, -33),
    "no EID of one": resized(PROPOSAL, -32),
    "an EID cut off": resized(PROPOSAL, -1),
    "more than the EIDs": resized(PROPOSAL, 32),
    "no EID, and room for one": patched(PROPOSAL, 80, b"\0"),
    "two EIDs in the room of one": patched(PROPOSAL, 80, b"\x02"),
    "255 EIDs": patched(PROPOSAL, 80, b"\xff"),
    "nine EIDs, all there": patched(resized(PROPOSAL, 8 * 32), 80, b"\x09"),
    "two prefixes in the room of one": patched(BOTH, 87, b"\x02"),
    "first contact without extension": patched(LATER, 7, b"\x28"),
    "an extension without first contact": patched(ACCEPT, 7, b"\x20"),
    "version 1 of 108 bytes": patched(LATER, 7, b"\x10"),
    "version 1 of 160 bytes": patched(ACCEPT, 7, b"\x18"),
    "version 1 of 180 bytes": patched(CONFIRM, 7, b"\x18"),
    "Accept of 107 bytes": resized(LATER, -1),
    "Accept of 109 bytes": resized(LATER, 1),
    "Accept of 144 bytes": resized(ACCEPT, -16),
    "Accept of 161 bytes": resized(ACCEPT, 1),
    "Accept with GIDs": patched(CONFIRM, 4, b"\x02"),
    "Confirm without a list": patched(ACCEPT, 4, b"\x03"),
    "a GID cut off": resized(CONFIRM, -1),
    "a GID less than counted": _gids(2, 1),
    "a GID more than counted": _gids(1, 2),
    "255 GIDs": _gids(255, 1),
    "no GIDs counted": _gids(0, 1),
    "a GID of zeros": patched(CONFIRM, 160, bytes(16)),
    "GIDs beyond the longest message": _gids(60, 60),
    "the link's GID of zeros": patched(ACCEPT, 16, bytes(16)),
    "QP number 0": patched(LATER, 38, bytes(3)),
    "Decline of 40 bytes": resized(KERNEL["decline-v2"].data, -4),
    "no trailer": ACCEPT[:-4] + bytes(4),
}


@pytest.mark.v2("v2.2/6", "v2.4/9", "v2.5/6")
@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_hostile_messages_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="CLC"):
        clc.decode_untrusted(data)


@pytest.mark.v2("v2.2/6", "v2.4/10", "v2.5/6")
def test_every_length_but_the_right_one_is_refused() -> None:
    for item in KERNEL.values():
        for change in range(-len(item.data) + 8, 40):
            # Messages of each version may have the sizes of version 1.
            now = (item.data[4], len(item.data) + change)
            if change and now not in ((4, 28), (2, 68), (3, 68)):
                with pytest.raises(ProtocolError):
                    clc.decode_untrusted(resized(item.data, change))


@pytest.mark.v2("v2.2/6")
def test_an_extension_that_begins_in_the_area_that_names_it_is_refused() -> None:
    """The extension is well-formed, but overlaps the reserved bytes at the end of that area."""
    assert PROPOSAL[50:52] == (80 - 52).to_bytes(2, "big")
    for less in (1, 4, 27):
        earlier = PROPOSAL[: 80 - less] + PROPOSAL[80:]
        earlier = patched(earlier, 5, len(earlier).to_bytes(2, "big"))
        with pytest.raises(ProtocolError, match=f"version 2 at byte {80 - less}, before 80"):
            clc.decode_untrusted(patched(earlier, 50, (28 - less).to_bytes(2, "big")))


def test_the_longest_messages_fit() -> None:
    data = _gids(53, 53)
    message = clc.decode_untrusted(data)
    assert isinstance(message, clc.Confirm)
    assert message.v2 is not None
    assert len(message.v2.gids) == 53
    assert message.encode() == data
    eids = tuple(encode_ueid(f"N{n}") for n in range(8))
    offer = clc.V2Offer(eids=eids, gid=vectors.V4_GID, release=1)
    prefix = clc.Ipv6Prefix(prefix=bytes(16), length=1)
    proposal = clc.Proposal(
        peer_id=bytes(8),
        version=2,
        gid=bytes(16),
        mac=bytes(6),
        ipv6_prefixes=(prefix,) * 8,
        v2=offer,
    )
    assert len(proposal.encode()) == 524
    assert clc.decode_untrusted(proposal.encode()) == proposal


FIRST = clc.FirstContact(direct=True, release=1)
ANSWER = clc.V2Answer(eid=bytes(32), first=FIRST)


def _accept(**changes: Any) -> object:
    message: Any = clc.decode_untrusted(LATER)
    return dataclasses.replace(message, **changes)


def _confirm(**changes: Any) -> object:
    message: Any = clc.decode_untrusted(CONFIRM)
    return dataclasses.replace(message, v2=dataclasses.replace(message.v2, **changes))


@pytest.mark.v2("v2.1/3")
@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            lambda: clc.V2Offer(eids=(bytes(32),) * 9, gid=bytes(16), release=1),
            "9 eids instead of 8",
        ),
        (lambda: clc.V2Offer(eids=(b"SHORT",), gid=bytes(16), release=1), "32 bytes"),
        (lambda: clc.V2Offer(eids=(), gid=bytes(15), release=1), "gid has 15 bytes"),
        (lambda: clc.V2Offer(eids=(), gid=bytes(16), release=16), "release is 16"),
        (lambda: dataclasses.replace(FIRST, max_connections=256), "max_connections is 256"),
        (lambda: dataclasses.replace(FIRST, host=b"a"), "host has 1 bytes"),
        (lambda: clc.V2Answer(eid=b""), "eid has 0 bytes"),
        (lambda: _accept(version=1), "version 1 ends"),
        (lambda: _accept(v2=ANSWER), "first contact"),
        (lambda: _accept(first_contact=True), "first contact"),
        (
            lambda: _accept(
                first_contact=True, v2=dataclasses.replace(ANSWER, gids=(vectors.GID,))
            ),
            "GIDs in a message that has no field for them",
        ),
        (lambda: _confirm(gids=(bytes(15),)), "16 bytes"),
        (lambda: _confirm(gids=(vectors.GID,) * 54), "54 GIDs"),
        (lambda: clc.Decline(peer_id=bytes(8), diagnosis=0, system=2), "no field for the system"),
    ],
)
def test_invalid_messages_cannot_be_built(build: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        build()


# --- UEIDs -------------------------------------------------------------------------------------


@pytest.mark.v2("v2.1/1")
@pytest.mark.parametrize("name", ["A", "0", "SMCLAB", "A.B-C.9", "X" * 32, "PAD  "])
def test_valid_ueids_are_padded(name: str) -> None:
    assert encode_ueid(name) == name.encode() + b" " * (32 - len(name))
    assert eid_name(encode_ueid(name)) == name.rstrip()


@pytest.mark.v2("v2.1/2")
@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        " A",
        ".A",
        "-A",
        "a",
        "A_B",
        "A B",
        "X" * 33,
        "Ä",
        "A\n",
        "A\0",
        "A\t",
        "\uff21",
        "\u0663",
    ],
)
def test_invalid_ueids_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="invalid UEID"):
        encode_ueid(name)
