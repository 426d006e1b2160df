"""The LLC codec with messages of SMC-R version 2: from kernels, and hostile."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wire import strategies as wire
from tests.wire import vectors
from trio_smc._base.errors import ProtocolError
from trio_smc.wire import llc

KERNEL = {item.name: item for item in vectors.captured_v2("llc")}
ADD = KERNEL["add-link-request-one-rtoken"].data
REQUEST = KERNEL["request-add-link"].data
OTHER = "big" if sys.byteorder == "little" else "little"
PAIR = llc.RTokenPair(reference_rkey=1, new_rkey=2, new_address=3)


def sized(data: bytes, size: int) -> bytes:
    """Cut or pad a message to ``size`` bytes, and set its length field to ``size``."""
    data = data[:size].ljust(size, b"\0")
    return data[:1] + size.to_bytes(2, sys.byteorder) + data[3:]


# --- messages of kernels -----------------------------------------------------------------------


def _flat(m: Any) -> dict[str, Any]:
    """The fields of a message by their names in the golden file."""
    found: dict[str, Any] = {"reply": int(m.reply), "length_le": len(llc.V2.encode(m))}
    numbers = ("qp_number", "link_number", "qp_mtu", "initial_psn", "max_links", "other_tokens")
    found |= {name: getattr(m, name) for name in (*numbers, "rkey") if hasattr(m, name)}
    if hasattr(m, "mac"):
        found |= {"mac": m.mac.hex(":"), "gid": vectors.gid_text(m.gid)}
    if isinstance(m, llc.ConfirmLink):
        found["link_user_id"] = f"{m.link_user_id:08x}"
        found["max_conns"] = m.max_connections
    if isinstance(m, llc.AddLink):
        found["rejected"] = int(m.rejected)
        if m.extension is not None:
            found["direct"] = int(m.extension.direct)
            found["client_target_gid"] = vectors.gid_text(m.extension.target_gid)
            found["num_rkeys_le"] = len(m.extension.pairs)
            found["rtokens"] = [
                {
                    "reference_rkey": pair.reference_rkey,
                    "new_rkey": pair.new_rkey,
                    "new_address": f"{pair.new_address:#018x}",
                }
                for pair in m.extension.pairs
            ]
    if isinstance(m, llc.ConfirmRkey):
        found["address"] = f"{m.address:#018x}"
        found |= {"negative": int(m.negative), "retry": int(m.retry), "others": list(m.others)}
    if isinstance(m, llc.RequestAddLink):
        found["gids"] = [vectors.gid_text(gid) for gid in m.gids]
        found["gid_count"] = len(m.gids)
    return found


@pytest.mark.v2("v2.9/1", "v2.10/1", "v2.10/3", "v2.10/5", "v2.11/1", "v2.12/5")
@pytest.mark.skipif(sys.byteorder == "big", reason="from a little-endian machine, byte for byte")
@pytest.mark.parametrize("item", KERNEL.values(), ids=KERNEL)
def test_messages_captured_from_kernels(item: vectors.CapturedV2) -> None:
    message: Any = llc.V2.decode_untrusted(item.data)
    assert llc.V2.encode(message) == item.data
    name = "".join(f" {c}" if c.isupper() else c for c in type(message).__name__).strip().upper()
    assert name == item.fields["type"]
    wanted = dict(item.fields)
    for known in ("type", "version", "bytes", "flags", "no_eye_catcher"):
        wanted.pop(known, None)
    assert _flat(message) == wanted


# --- both versions -----------------------------------------------------------------------------


@pytest.mark.v2("v2.9/1")
@given(wire.V2_LLC)
def test_round_trip(message: llc.Message) -> None:
    data = llc.V2.encode(message)
    assert llc.MESSAGE_SIZE <= len(data) <= llc.V2.largest
    again: Any = llc.V2.decode_untrusted(memoryview(bytearray(data)))
    assert llc.V2.encode(again) == data
    if not isinstance(message, llc.OptionalMessage):
        assert int.from_bytes(data[1:3], sys.byteorder) == len(data)
        assert data[0] == 0x20 | message.TYPE
    if not isinstance(message, llc.DeleteRkey):  # version 2 has no error mask
        assert again == message


def test_a_version_sends_only_its_own_fields() -> None:
    rejection = llc.AddLink(
        reply=True,
        rejected=True,
        reason=llc.AddLinkReason.INVALID_MTU,
        mac=bytes(6),
        gid=bytes(16),
        extension=llc.AddLinkExtension(direct=True, target_gid=bytes(16), pairs=(PAIR,)),
    )
    assert llc.V1.encode(rejection)[:4] == bytes((2, 44, 2, 0xC0))
    assert len(llc.V1.encode(rejection)) == 44
    again = llc.V2.decode_untrusted(llc.V2.encode(rejection))
    assert isinstance(again, llc.AddLink)
    assert (again.reason, again.extension) == (0, rejection.extension)
    link = llc.ConfirmLink(
        mac=bytes(6),
        gid=bytes(16),
        qp_number=1,
        link_number=1,
        link_user_id=1,
        max_links=2,
        max_connections=16,
    )
    assert llc.V1.encode(link)[34:36] == b"\x02\0"
    assert llc.V2.encode(link)[34:36] == b"\x02\x10"


@pytest.mark.v2("v2.9/3")
def test_messages_of_the_other_version_are_refused() -> None:
    with pytest.raises(ValueError, match="REQUEST_ADD_LINK is not a message of version 1"):
        llc.V1.encode(llc.RequestAddLink())
    with pytest.raises(ValueError, match="ADD_LINK_CONTINUATION is not a message of version 2"):
        llc.V2.encode(llc.AddLinkContinuation(link_number=1, tokens_left=0))
    for _, data in vectors.LLC.values():
        if data[0] < 0x80:
            with pytest.raises(ProtocolError, match="unknown type"):
                llc.V2.decode_untrusted(data)
    for item in KERNEL.values():
        with pytest.raises(ProtocolError):
            llc.V1.decode_untrusted(item.data)


@pytest.mark.v2("v2.9/3")
@pytest.mark.parametrize("kind", range(256))
def test_types(kind: int) -> None:
    data = bytes((kind,)) + (44).to_bytes(2, sys.byteorder) + bytes(41)
    if kind in {0x21, 0x22, 0x24, 0x25, 0x26, 0x27, 0x29}:
        message: Any = llc.V2.decode_untrusted(data)
        assert kind == 0x20 | message.TYPE
    elif kind >> 6 == 0b10:
        assert llc.V2.decode_untrusted(data) == llc.OptionalMessage(data=data)
    else:
        with pytest.raises(ProtocolError, match=f"unknown type {kind:#04x}"):
            llc.V2.decode_untrusted(data)


@pytest.mark.v2("v2.9/2")
def test_a_length_is_in_the_senders_byte_order() -> None:
    for item in KERNEL.values():
        size = len(item.data)
        swapped = item.data[:1] + size.to_bytes(2, OTHER) + item.data[3:]  # type: ignore[arg-type]
        assert llc.V2.decode_untrusted(swapped) == llc.V2.decode_untrusted(item.data)
        for wrong in (0, size - 1, size + 1, 0xFFFF):
            data = item.data[:1] + wrong.to_bytes(2, sys.byteorder) + item.data[3:]
            with pytest.raises(ProtocolError, match="with length"):
                llc.V2.decode_untrusted(data)


# --- counts and sizes --------------------------------------------------------------------------


@pytest.mark.v2("v2.10/2")
@pytest.mark.parametrize("count", [0, 1, 2, 255, 256, 0xFFFF])
def test_the_count_of_rtokens_is_ignored(count: int) -> None:
    data = ADD[:70] + count.to_bytes(2, sys.byteorder) + ADD[72:]
    assert llc.V2.decode_untrusted(data) == llc.V2.decode_untrusted(ADD)


@pytest.mark.v2("v2.10/2")
@pytest.mark.parametrize("size", [*range(44), *range(45, 72), *range(73, 88), 89, 103, 4153, 4168])
def test_sizes_that_no_add_link_has(size: int) -> None:
    with pytest.raises(ProtocolError, match="bytes"):
        llc.V2.decode_untrusted(sized(ADD, size) if size > 2 else ADD[:size])


@pytest.mark.v2("v2.10/3", "v2.10/2")
@pytest.mark.parametrize("pairs", [0, 1, 2, 254, 255])
def test_an_add_link_with_any_number_of_rtokens(pairs: int) -> None:
    tokens = tuple(
        llc.RTokenPair(reference_rkey=n, new_rkey=n << 16, new_address=n << 32)
        for n in range(pairs)
    )
    extension = llc.AddLinkExtension(direct=False, target_gid=bytes(16), pairs=tokens)
    message = llc.AddLink(mac=bytes(6), gid=bytes(16), extension=extension)
    data = llc.V2.encode(message)
    assert len(data) == 72 + 16 * pairs
    assert int.from_bytes(data[70:72], sys.byteorder) == pairs
    assert llc.V2.decode_untrusted(data) == message
    assert llc.V2.largest == 72 + 16 * 255


@pytest.mark.v2("v2.11/3")
@pytest.mark.parametrize(
    ("count", "fits"), [(0, True), (1, True), (2, True), (3, False), (255, False)]
)
def test_a_gid_count_beyond_the_message_is_refused(count: int, fits: bool) -> None:
    data = REQUEST[:24] + bytes((count,)) + REQUEST[25:]
    if fits:
        message = llc.V2.decode_untrusted(data)
        assert isinstance(message, llc.RequestAddLink)
        assert len(message.gids) == count
    else:
        with pytest.raises(ProtocolError, match=f"{count} gids in a message that holds 2"):
            llc.V2.decode_untrusted(data)


@pytest.mark.v2("v2.11/2")
def test_a_request_add_link_reply_without_gids() -> None:
    reply = llc.RequestAddLink(reply=True)
    data = llc.V2.encode(reply)
    assert data == b"\x25" + (44).to_bytes(2, sys.byteorder) + b"\x80" + bytes(40)
    assert llc.V2.decode_untrusted(data) == reply


@pytest.mark.v2("v2.12/1", "v2.12/3")
@pytest.mark.parametrize("count", [0, 1, 9, 10, 255])
def test_delete_rkey_with_any_number_of_rkeys(count: int) -> None:
    message = llc.DeleteRkey(rkeys=tuple(range(count)))
    data = llc.V2.encode(message)
    assert len(data) == max(44, 8 + 4 * count)
    assert llc.V2.decode_untrusted(data) == message
    for beyond in {(len(data) - 8) // 4 + 1, 255} - {count}:
        if beyond < 256:
            with pytest.raises(ProtocolError, match=f"{beyond} rkeys in a message that holds"):
                llc.V2.decode_untrusted(data[:4] + bytes((beyond,)) + data[5:])


@pytest.mark.v2("v2.9/4")
def test_a_message_too_long_for_its_type_is_refused() -> None:
    for name in ("confirm-link-request", "confirm-rkey-request"):
        with pytest.raises(ProtocolError, match="of 48 bytes instead of 44"):
            llc.V2.decode_untrusted(sized(KERNEL[name].data, 48))
    with pytest.raises(ProtocolError, match="instead of 44 to 1028"):
        llc.V2.decode_untrusted(sized(b"\x29", 1032))
    with pytest.raises(ProtocolError, match="instead of 44 to 4108"):
        llc.V2.decode_untrusted(sized(REQUEST, 4112))


def test_invalid_messages_cannot_be_built() -> None:
    with pytest.raises(ValueError, match="256 pairs"):
        llc.AddLinkExtension(direct=True, target_gid=bytes(16), pairs=(PAIR,) * 256)
    with pytest.raises(ValueError, match="target_gid has 4 bytes"):
        llc.AddLinkExtension(direct=True, target_gid=bytes(4), pairs=())
    with pytest.raises(ValueError, match="256 gids"):
        llc.V2.encode(llc.RequestAddLink(gids=(bytes(16),) * 256))
    with pytest.raises(ValueError, match="gids are not of 16 bytes each"):
        llc.RequestAddLink(gids=(bytes(15),))
    with pytest.raises(ValueError, match="256 rkeys"):
        llc.V2.encode(llc.DeleteRkey(rkeys=tuple(range(256))))


@given(st.sampled_from(list(KERNEL.values())), st.data())
def test_a_damaged_message_is_refused_or_valid(
    item: vectors.CapturedV2, data: st.DataObject
) -> None:
    raw = bytearray(item.data)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    try:
        message: Any = llc.V2.decode_untrusted(raw)
    except ProtocolError:
        return
    assert llc.V2.decode_untrusted(llc.V2.encode(message)) == message
