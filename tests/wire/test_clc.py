"""The CLC codec with hand-typed, captured and hostile messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wire import strategies as wire
from tests.wire import vectors
from tests.wire.layouts import reserved_bits, without_reserved
from tests.wire.tshark_reader import expected
from trio_smc._base.errors import ProtocolError
from trio_smc.wire import clc

PROPOSAL = vectors.CLC["Proposal, IPv4"][1]
PROPOSAL6 = vectors.CLC["Proposal, two IPv6 prefixes"][1]
PROPOSAL92 = next(item.data for item in vectors.captured("clc") if item.data[4] == 1)
ACCEPT = vectors.CLC["Accept, first contact"][1]
CONFIRM = vectors.CLC["Confirm"][1]
DECLINE = vectors.CLC["Decline"][1]
TOP = (1 << 64) - 255 * (64 << 10)  # address of an RMB of 255 elements at the end of memory
DECLINE44 = vectors.CLC["Decline, 44 bytes from a Linux of version 2"][1]


def patch(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


@given(st.one_of(wire.credentials(clc.Accept), wire.credentials(clc.Confirm)), st.data())
def test_connections_of_one_link_differ_in_index_and_token(
    message: clc.Accept | clc.Confirm, data: st.DataObject
) -> None:
    message = dataclasses.replace(message, version=1, first_contact=False, v2=None)
    link = (
        message.peer_id, False, message.gid, message.mac, message.qp_number, message.rkey,
        message.buffer_size_code, message.qp_mtu, message.rmb_address, message.initial_psn,
    )  # fmt: skip
    for _ in range(2):
        index = data.draw(st.integers(1, message.rmbe_index))
        token = data.draw(st.integers(0, (1 << 32) - 1))
        each = dataclasses.replace(message, rmbe_index=index, alert_token=token)
        sent = clc.encode_credentials(type(each), link, rmbe_index=index, alert_token=token)
        assert sent == each.encode()
        assert clc.decode_untrusted(sent) == each


@pytest.mark.rfc("A.2.2/1", "A.2.3/1", "A.2.4/1", "A.2.5/1")
@pytest.mark.rfc("A.2.2/4", "A.2.2/6", "A.2.2/7", "A.2.3/10", "A.2.4/6", "A.2.5/4")
@pytest.mark.parametrize(("message", "data"), vectors.CLC.values(), ids=vectors.CLC)
def test_hand_typed(message: clc.Message, data: bytes) -> None:
    assert message.encode() == data
    assert clc.decode_untrusted(data) == message
    assert clc.message_length_untrusted(data[: clc.HEADER_SIZE]) == len(data)


def test_captured() -> None:
    captured = vectors.captured("clc")
    assert {(item.data[4], len(item.data)) for item in captured} == {
        (1, 92),
        (2, 68),
        (3, 68),
        (4, 28),
    }
    for item in captured:
        message = clc.decode_untrusted(item.data)
        assert message.encode() == without_reserved("clc", item.data)
        # tshark shows the F bit, which kernels set in Confirm, although the RFC reserves it there.
        flag = ("smc.confirm.first.contact", 1)
        shown = [(name, 0) if (name, value) == flag else (name, value)
                 for name, value in item.tshark]  # fmt: skip
        assert expected(message) == shown, item.frame
        assert clc.message_length_untrusted(item.data[: clc.HEADER_SIZE]) == len(item.data)


@pytest.mark.rfc("A.2.2/3")
def test_proposal_of_a_newer_kernel() -> None:
    message = clc.decode_untrusted(PROPOSAL92)
    assert isinstance(message, clc.Proposal)
    assert message.version == 2
    assert message.v2 is None
    assert message.offers_smc_r
    assert (message.ipv4_subnet, message.ipv4_mask_length) == (bytes((10, 9, 0, 0)), 24)


@given(wire.CLC_MESSAGES)
def test_round_trip(message: clc.Message) -> None:
    data = message.encode()
    assert clc.message_length_untrusted(data[: clc.HEADER_SIZE]) == len(data)
    assert clc.decode_untrusted(data) == message
    assert clc.decode_untrusted(memoryview(bytearray(data))) == message


@given(wire.CLC_MESSAGES, st.data())
def test_a_damaged_message_is_refused_or_valid(message: clc.Message, data: st.DataObject) -> None:
    raw = bytearray(message.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        again = clc.decode_untrusted(raw)
    except ProtocolError:
        return
    # The decoder drops reserved bits, so only the messages are compared, not the bytes.
    assert clc.decode_untrusted(again.encode()) == again


@given(wire.CLC_MESSAGES, st.data())
def test_every_other_length_is_refused(message: clc.Message, data: st.DataObject) -> None:
    raw = message.encode()
    short = raw[: data.draw(st.integers(0, len(raw) - 1))]
    for other in (short, raw + data.draw(st.binary(min_size=1, max_size=20))):
        with pytest.raises(ProtocolError):
            clc.decode_untrusted(other)


@pytest.mark.parametrize(("message", "data"), vectors.CLC.values(), ids=vectors.CLC)
def test_the_eye_catcher_at_another_length_is_no_end(message: clc.Message, data: bytes) -> None:
    cut, longer = data[:-8] + clc.EYE_CATCHER, data[:-4] + bytes(4) + clc.EYE_CATCHER
    for other in (cut, longer):
        with pytest.raises(ProtocolError):
            clc.decode_untrusted(other)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    for candidate in (data, clc.EYE_CATCHER + data):
        with pytest.raises(ProtocolError):
            clc.decode_untrusted(candidate)


@pytest.mark.rfc("A.2/2")
@pytest.mark.parametrize("data", [ACCEPT, CONFIRM, DECLINE], ids=["Accept", "Confirm", "Decline"])
def test_every_bit_is_a_field_or_reserved(data: bytes) -> None:
    """Flip each bit of a message: a reserved bit must change nothing; any other bit must change a
    field, or the message must be refused."""
    original: Any = clc.decode_untrusted(data)
    reserved = reserved_bits("clc", data)
    for position in range(8 * len(data)):
        byte, bit = position // 8, 0x80 >> position % 8
        try:
            message: Any = clc.decode_untrusted(patch(data, byte, bytes((data[byte] ^ bit,))))
        except ProtocolError:
            assert not reserved[byte] & bit
            continue
        if byte < 7:  # only the type can change: Accept and Confirm differ in one bit
            assert byte == 4
            assert type(message) is not type(original)
        else:
            assert (message == original) == bool(reserved[byte] & bit)


MALFORMED = {
    "first eye catcher": patch(PROPOSAL, 0, b"\xe3"),
    "eye catcher of SMC-D": patch(PROPOSAL, 3, b"\xc4"),
    "last eye catcher": patch(PROPOSAL, 51, b"\xda"),
    "last eye catcher of a Decline": patch(DECLINE, 24, b"\0"),
    "type 0": patch(ACCEPT, 4, b"\0"),
    "type 5": patch(ACCEPT, 4, b"\x05"),
    "version 0": patch(ACCEPT, 7, b"\x08"),
    "length 0": patch(PROPOSAL, 5, b"\0\0"),
    "Proposal of 51 bytes": patch(PROPOSAL[:47], 5, b"\0\x33") + clc.EYE_CATCHER,
    "Proposal of 53 bytes": patch(PROPOSAL[:48], 5, b"\0\x35") + b"\0" + clc.EYE_CATCHER,
    "Proposal longer than any": patch(PROPOSAL[:48], 5, b"\x04\x01")
    + bytes(1025 - 52)
    + clc.EYE_CATCHER,
    "Accept of 52 bytes": patch(PROPOSAL, 4, b"\x02"),
    "Accept of 108 bytes": patch(ACCEPT[:64], 5, b"\0\x6c") + bytes(40) + clc.EYE_CATCHER,
    "Confirm of 67 bytes": patch(CONFIRM[:63], 5, b"\0\x43") + clc.EYE_CATCHER,
    "Decline of 32 bytes": patch(DECLINE[:24], 5, b"\0\x20") + bytes(4) + clc.EYE_CATCHER,
    "offset beyond the message": patch(PROPOSAL, 38, b"\xff\xff"),
    "offset 1, nothing left for the prefix area": patch(PROPOSAL, 38, b"\0\x01"),
    "offset into the trailer": patch(PROPOSAL92, 38, b"\0\x30"),
    "offset 41 of a newer Proposal": patch(PROPOSAL92, 38, b"\0\x29"),
    "one IPv6 prefix without room": patch(PROPOSAL, 47, b"\x01"),
    "255 IPv6 prefixes": patch(PROPOSAL, 47, b"\xff"),
    "fewer IPv6 prefixes than there is room for": patch(PROPOSAL6, 47, b"\x01"),
    "IPv6 prefix of 129 bits": patch(PROPOSAL6, 64, b"\x81"),
    "IPv4 mask of 33 bits": patch(PROPOSAL, 44, b"\x21"),
    "RMBE index 0": patch(ACCEPT, 45, b"\0"),
    "RMBE index 0 in a Confirm": patch(CONFIRM, 45, b"\0"),
    "QP number 0": patch(ACCEPT, 38, bytes(3)),
    "GID of zeros": patch(ACCEPT, 16, bytes(16)),
    "RMBE beyond the end of memory": patch(ACCEPT, 52, b"\xff" * 8),
}


@pytest.mark.rfc("A.2/3", "A.2.2/1", "A.2.3/1", "A.2.4/1", "A.2.5/1")
@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_malformed(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="CLC"):
        clc.decode_untrusted(data)


@pytest.mark.rfc("A.2.2/5")
def test_nine_prefixes_are_refused() -> None:
    prefix = bytes(16) + b"\x40"
    body = patch(PROPOSAL[:48], 47, b"\x09") + 9 * prefix + clc.EYE_CATCHER
    with pytest.raises(
        ProtocolError, match="CLC PROPOSAL: 9 ipv6_prefixes in a message that holds 8"
    ):
        clc.decode_untrusted(patch(body, 5, len(body).to_bytes(2, "big")))


@pytest.mark.parametrize(("message", "data"), vectors.CLC.values(), ids=vectors.CLC)
@pytest.mark.parametrize("most", [1, 7, 1000])
def test_a_reader_takes_exactly_one_message(message: clc.Message, data: bytes, most: int) -> None:
    """The next bytes on the TCP connection may be another message, or application data."""
    reader = clc.ClcReader()
    rest = data + data + b"of the application"
    for _ in range(2):
        assert not reader.halfway
        found = None
        while found is None:
            piece, rest = rest[: min(reader.wanted, most)], rest[min(reader.wanted, most) :]
            found = reader.feed_untrusted(piece)
        assert clc.decode_untrusted(found) == message
    assert rest == b"of the application"


# (type, length) of all messages in versions 1 and 2.
KINDS = {
    *((1, size) for size in range(52, 1025)),
    *((2, 68), (2, 108), (2, 160), (3, 68), (3, 108), (4, 28), (4, 44)),
    *((3, size) for size in range(164, 1025, 16)),
}
STARTS = {
    (clc.EYE_CATCHER + bytes((kind,)) + size.to_bytes(2, "big"))[:end]
    for kind, size in KINDS
    for end in range(1, 8)
}


def fed(data: bytes, most: int = 1, **awaited: Any) -> tuple[int, bytes | None]:
    """Feed a reader.  Returns the number of bytes up to a refused one, or the message."""
    reader, taken, found = clc.ClcReader(), 0, None
    while taken < len(data) and found is None:
        piece = data[taken : taken + min(reader.wanted, most)]
        try:
            found = reader.feed_untrusted(piece, **awaited)
        except ProtocolError:
            return taken + len(piece), None
        taken += len(piece)
    return taken + 1, found


@pytest.mark.rfc("C.6/1", "C.6/2", "A.2/3")
@pytest.mark.parametrize("data", [data for _, data in vectors.CLC.values()], ids=vectors.CLC)
@pytest.mark.parametrize("place", range(7))
def test_a_byte_that_starts_no_message_is_refused_as_it_arrives(data: bytes, place: int) -> None:
    for byte in range(256):
        start = data[:place] + bytes((byte,))
        refused, _ = fed(start)
        assert refused == (place + 2 if start in STARTS else place + 1)
        # The same holds for each way to cut the data, with further bytes behind the wrong one.
        for most in (2, 3, 5, 8, 1000):
            refused, found = fed(start + bytes(7 - place), most)
            assert found is None
            assert start in STARTS or refused <= max(place + most, 8)


@pytest.mark.rfc("A.2/3", "C.6/2")
@pytest.mark.parametrize("data", [data for _, data in vectors.CLC.values()], ids=vectors.CLC)
def test_a_byte_that_ends_no_message_is_refused_as_it_arrives(data: bytes) -> None:
    assert fed(data) == (len(data) + 1, data)
    for place in range(len(data) - 4, len(data) - 1):
        for byte in set(range(256)) - {data[place]}:
            assert fed(data[:place] + bytes((byte,))) == (place + 1, None)
    for byte in set(range(256)) - {data[-1]}:
        _, found = fed(data[:-1] + bytes((byte,)))
        with pytest.raises(ProtocolError, match="eye catcher"):
            clc.decode_untrusted(found or b"")


@pytest.mark.rfc("C.6/1")
@pytest.mark.parametrize("data", [data for _, data in vectors.CLC.values()], ids=vectors.CLC)
def test_a_message_out_of_turn_is_refused_by_its_type(data: bytes) -> None:
    others = frozenset(clc.MessageType) - {data[4]}
    assert fed(data, awaited=others) == (5, None)
    assert fed(data, 1000, awaited=others) == (8, None)
    assert fed(data, awaited=frozenset((data[4],))) == (len(data) + 1, data)
    assert fed(data, awaited=frozenset()) == (1, None)


@pytest.mark.parametrize("size", range(clc.HEADER_SIZE))
def test_header_too_short(size: int) -> None:
    with pytest.raises(ProtocolError, match=f"header of {size} bytes"):
        clc.message_length_untrusted(PROPOSAL[:size])


@pytest.mark.parametrize(
    "data", [PROPOSAL, PROPOSAL6, PROPOSAL92, ACCEPT, DECLINE, DECLINE44], ids=len
)
def test_the_header_alone_has_the_length(data: bytes) -> None:
    assert clc.message_length_untrusted(data[:8]) == len(data)
    assert clc.message_length_untrusted(data[:8] + b"GET / HTTP/1.1") == len(data)


@pytest.mark.rfc("A.2/3")
@given(st.binary(min_size=8, max_size=8))
def test_application_data_is_no_header(header: bytes) -> None:
    with pytest.raises(ProtocolError, match="eye catcher"):
        clc.message_length_untrusted(b"GET " + header[4:])
    if header.startswith(clc.EYE_CATCHER):
        return
    with pytest.raises(ProtocolError, match="eye catcher"):
        clc.message_length_untrusted(header)


@pytest.mark.rfc("A.2/4")
@pytest.mark.parametrize("nibble", [1, 2, 15])
def test_the_version_nibble_is_read(nibble: int) -> None:
    for data in (PROPOSAL, ACCEPT, CONFIRM, DECLINE):
        message = clc.decode_untrusted(patch(data, 7, bytes((nibble << 4,))))
        assert message.version == nibble


@pytest.mark.rfc("A.2.3/8")
def test_mtu_values() -> None:
    """A reserved MTU is not a protocol error; the receiver declines it (RFC 7609, C.6)."""
    sizes = []
    for nibble in range(16):
        message = clc.decode_untrusted(patch(ACCEPT, 50, bytes((0x50 | nibble,))))
        assert isinstance(message, clc.Accept)
        assert message.qp_mtu == nibble
        if message.known_mtu is not None:
            sizes.append(message.known_mtu.size)
    assert sizes == [256, 512, 1024, 2048, 4096]


@pytest.mark.rfc("A.2.3/4")
def test_buffer_sizes() -> None:
    for code in range(16):
        message = clc.decode_untrusted(patch(ACCEPT, 50, bytes((code << 4 | 5,))))
        assert isinstance(message, clc.Accept)
        assert message.buffer_size_code == code
        assert message.buffer_size == 16 * 1024 * 2**code


PREFIX = clc.Ipv6Prefix(prefix=bytes(16), length=1)
OFFER = clc.V2Offer(eids=(), gid=bytes(16), release=0)


@pytest.mark.parametrize(
    ("version", "flags", "offered"),
    [(1, 0, True), (2, 0x8, True), (2, 0x3, True), (2, 0x9, False), (2, 0x2, False)],
)
def test_versions_that_a_proposal_offers(version: int, flags: int, offered: bool) -> None:
    message = clc.Proposal(
        peer_id=bytes(8),
        version=version,
        gid=bytes(16),
        mac=bytes(6),
        flags=flags,
        v2=OFFER if version == 2 and flags >> 2 == 0 else None,
    )
    decoded = clc.decode_untrusted(message.encode())
    assert isinstance(decoded, clc.Proposal)
    assert decoded == message
    assert decoded.offers_smc_r is offered


def _proposal(**changes: Any) -> clc.Proposal:
    return clc.Proposal(**{"peer_id": bytes(8), "gid": bytes(16), "mac": bytes(6), **changes})


def _accept(**changes: Any) -> clc.Message:
    return dataclasses.replace(vectors.CLC["Accept, first contact"][0], **changes)


def test_an_element_may_end_where_memory_ends() -> None:
    raw = _accept(buffer_size_code=2, rmb_address=TOP, rmbe_index=255).encode()
    assert clc.decode_untrusted(raw).encode() == raw


@pytest.mark.rfc("A.2.2/5")
def test_version_0_is_refused_by_the_header_alone() -> None:
    for low in range(16):
        with pytest.raises(ProtocolError, match="version 0"):
            clc.message_length_untrusted(patch(ACCEPT, 7, bytes((low,)))[: clc.HEADER_SIZE])


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: _proposal(peer_id=bytes(7)), "peer_id has 7 bytes"),
        (lambda: _proposal(version=0), "no version 0"),
        (lambda: _proposal(version=16), "version is 16"),
        (lambda: _proposal(ipv4_subnet=bytes(3)), "ipv4_subnet has 3 bytes instead of 4"),
        (lambda: _proposal(ipv4_mask_length=33), "mask of 33 bits"),
        (lambda: _proposal(version=2, flags=8, v2=OFFER), "version and flags do not announce it"),
        (lambda: _proposal(v2=OFFER), "version and flags do not announce it"),
        (lambda: _proposal(version=2, flags=2, ipv4_mask_length=8), "without a version-1 offer"),
        (lambda: _proposal(ipv6_prefixes=(PREFIX,) * 9), "9 ipv6_prefixes instead of 8"),
        (lambda: clc.Ipv6Prefix(prefix=bytes(15), length=1), "prefix has 15 bytes instead of 16"),
        (lambda: clc.Ipv6Prefix(prefix=bytes(16), length=129), "prefix of 129 bits"),
        (lambda: _accept(qp_number=0), "QP number 0"),
        (lambda: _accept(rmbe_index=256), "rmbe_index is 256"),
        (lambda: _accept(rmb_address=(1 << 64) - 1), "beyond the end of memory"),
        (
            lambda: _accept(buffer_size_code=2, rmb_address=TOP + 1, rmbe_index=255),
            "beyond the end of memory",
        ),
        (lambda: clc.Decline(peer_id=bytes(8), diagnosis=1 << 32), "diagnosis is"),
        (
            lambda: clc.Decline(peer_id=bytes(8), diagnosis=0, more_diagnosis=(1 << 32, 0, 0, 0)),
            "four words of 32 bits",
        ),
        (
            lambda: clc.Decline(peer_id=bytes(8), diagnosis=0, more_diagnosis=(0, 0, 0, -1)),
            "four words",
        ),
    ],
)
def test_invalid_messages_cannot_be_built(build: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        build()
