"""The LLC codec with hand-typed, captured and hostile messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wire import strategies as wire
from tests.wire import vectors
from tests.wire.layouts import EXCEPTIONS, reserved_bits
from tests.wire.tshark_reader import expected
from trio_smc._base.errors import ProtocolError
from trio_smc.wire import llc

VERSION_1 = [kind for kind in llc.MessageType if kind is not llc.MessageType.REQUEST_ADD_LINK]

# One message of each type, with data in all of its slots.
FULL = {
    type(vectors.LLC[name][0]): vectors.LLC[name][1]
    for name in (
        "CONFIRM LINK",
        "ADD LINK",
        "ADD LINK CONTINUATION, the first two of five",
        "DELETE LINK, all of them",
        "CONFIRM RKEY, five other links",
        "CONFIRM RKEY CONTINUATION",
        "DELETE RKEY, eight",
        "TEST LINK",
    )
}


@pytest.mark.rfc("A.3/1", "A.3/2", "A.3.1/6", "A.3.2/6", "A.3.3/6", "A.3.3/7", "A.3.4/7")
@pytest.mark.rfc("A.3.5/8", "A.3.5/9", "A.3.6/3", "A.3.7/5", "A.3.8/2")
@pytest.mark.parametrize(("message", "data"), vectors.LLC.values(), ids=vectors.LLC)
def test_hand_typed(message: llc.Message, data: bytes) -> None:
    assert len(data) == llc.MESSAGE_SIZE
    assert message.encode() == data
    assert llc.decode_untrusted(data) == message


def test_captured() -> None:
    captured = vectors.captured("llc")
    assert {item.data[0] for item in captured} == {1, 2, 3, 4, 6, 7, 9}
    for item in captured:
        message: Any = llc.decode_untrusted(item.data)
        assert message.encode() == item.data
        assert expected(message) == item.tshark, item.frame
        if isinstance(message, llc.ConfirmLink):
            assert message.no_eye_catcher


@given(wire.LLC_MESSAGES)
def test_round_trip(message: llc.Message) -> None:
    data = message.encode()
    assert len(data) == llc.MESSAGE_SIZE
    assert llc.decode_untrusted(data) == message


@given(st.sampled_from(VERSION_1), st.binary(min_size=42, max_size=42))
def test_any_body_is_a_message(kind: llc.MessageType, body: bytes) -> None:
    data = bytes((kind, llc.MESSAGE_SIZE)) + body
    if kind is llc.MessageType.DELETE_RKEY and body[2] > 8:
        with pytest.raises(ProtocolError, match="rkeys in a message that holds 8"):
            llc.decode_untrusted(data)
        return
    message: Any = llc.decode_untrusted(data)
    assert llc.decode_untrusted(memoryview(bytearray(data))) == message
    assert llc.decode_untrusted(message.encode()) == message


@given(st.binary(max_size=100))
def test_random_bytes_are_a_message_or_an_error(data: bytes) -> None:
    try:
        message = llc.decode_untrusted(data)
    except ProtocolError:
        return
    assert llc.decode_untrusted(message.encode()) == message


@pytest.mark.parametrize("kind", FULL)
def test_every_bit_is_a_field_or_reserved(kind: type) -> None:
    """Flip each bit behind type and length: a reserved bit must change nothing, and any other bit
    must change a field."""
    data = FULL[kind]
    original: Any = llc.decode_untrusted(data)
    reserved = bytearray(reserved_bits("llc", data))
    for (_, number, byte), (bits, _) in EXCEPTIONS.items():
        reserved[byte] &= ~bits if data[0] == number else 0xFF
    for position in range(16, 8 * llc.MESSAGE_SIZE):
        byte, bit = position // 8, 0x80 >> position % 8
        flipped = bytearray(data)
        flipped[byte] ^= bit
        try:
            message = llc.decode_untrusted(flipped)
        except ProtocolError:
            assert kind is llc.DeleteRkey
            assert byte == 4  # a count above 8
            continue
        assert (message == original) == bool(reserved[byte] & bit)


@pytest.mark.rfc("A.3/3", "A.3/4", "A.3/5")
@pytest.mark.parametrize("kind", range(256))
def test_types(kind: int) -> None:
    data = bytes((kind, llc.MESSAGE_SIZE)) + bytes(42)
    if kind in VERSION_1:
        message = llc.decode_untrusted(data)
        assert not isinstance(message, llc.OptionalMessage)
        assert type(message).TYPE.value == kind
    elif kind >> 6 == 0b10:
        assert llc.decode_untrusted(data) == llc.OptionalMessage(data=data)
    else:
        with pytest.raises(ProtocolError, match=f"unknown type {kind:#04x}"):
            llc.decode_untrusted(data)


@pytest.mark.rfc("3.3/1")
@pytest.mark.parametrize("size", [0, 1, 2, 43, 45, 48, 1000])
@pytest.mark.parametrize("kind", [1, 7, 0x80])
def test_other_sizes_are_refused(size: int, kind: int) -> None:
    data = (bytes((kind, llc.MESSAGE_SIZE)) + bytes(998))[:size]
    with pytest.raises(ProtocolError, match=f"of {size} bytes"):
        llc.decode_untrusted(data)


@pytest.mark.rfc("3.3/1")
def test_the_length_byte_is_checked() -> None:
    with pytest.raises(ProtocolError, match="length byte 43"):
        llc.decode_untrusted(b"\x07\x2b" + bytes(42))
    # The format of an optional message is unknown, so its length byte is not checked.
    assert llc.decode_untrusted(b"\xbf\x2b" + bytes(42)).encode()[1] == 43


def test_reasons_of_delete_link_match_the_rfc() -> None:
    """A.3.4: the reasons of requests and of responses, and those that Linux adds."""
    reasons = [
        "LOST_PATH", "OPERATOR", "PROGRAM", "PROTOCOL_VIOLATION", "ASYMMETRIC_NOT_NEEDED",
    ]  # fmt: skip
    known = {name: (place + 1) << 16 for place, name in enumerate(reasons)}
    linux = {"UNKNOWN_LINK": 0x00100000, "UNKNOWN_LINK_GROUP": 0x00200000}
    assert {each.name: each.value for each in llc.DeleteLinkReason} == known | linux


def test_unknown_reasons_survive() -> None:
    data = b"\x04\x2c\x00\x80\x01\x00\x11\x22\x33" + bytes(35)
    message = llc.decode_untrusted(data)
    assert isinstance(message, llc.DeleteLink)
    assert message.reason == 0x00112233
    rejection = llc.decode_untrusted(b"\x02\x2c\x0f\xc0" + bytes(40))
    assert isinstance(rejection, llc.AddLink)
    assert rejection.rejected
    assert rejection.reason == 15


def test_no_eye_catcher_is_either_bit() -> None:
    link = vectors.LLC["CONFIRM LINK"][1]
    for bits in range(4):
        message = llc.decode_untrusted(link[:3] + bytes((bits,)) + link[4:])
        assert isinstance(message, llc.ConfirmLink)
        assert message.no_eye_catcher == bool(bits)
        assert message.encode()[3] == (3 if bits else 0)


def _link(**changes: Any) -> llc.ConfirmLink:
    return dataclasses.replace(FULL_LINK, **changes)


FULL_LINK = llc.ConfirmLink(
    mac=bytes(6), gid=bytes(16), qp_number=1, link_number=1, link_user_id=1, max_links=2
)
TOKEN = llc.LinkRToken(link_number=1, rkey=2, address=3)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: _link(mac=bytes(5)), "mac has 5 bytes instead of 6"),
        (lambda: _link(gid=bytes(17)), "gid has 17 bytes instead of 16"),
        (lambda: _link(qp_number=1 << 24), "qp_number is 16777216"),
        (lambda: _link(link_number=-1), "link_number is -1"),
        (lambda: llc.ConfirmRkey(rkey=1, address=2, other_tokens=1), "0 others instead of 1"),
        (lambda: llc.ConfirmRkey(rkey=1, address=2, others=(TOKEN,)), "1 others instead of 0"),
        (
            lambda: llc.ConfirmRkey(rkey=1, address=2, other_tokens=3, others=(TOKEN,) * 3),
            "3 others instead of 2",
        ),
        (lambda: llc.ConfirmRkey(rkey=1 << 32, address=2), "rkey is 4294967296"),
        (
            lambda: llc.ConfirmRkeyContinuation(tokens_left=4, others=(TOKEN,) * 4),
            "4 others instead of 3",
        ),
        (lambda: llc.DeleteRkey(rkeys=tuple(range(9))).encode(), "9 rkeys, more than 8"),
        (lambda: llc.DeleteRkey(rkeys=(1 << 32,)), "rkeys beyond"),
        (
            lambda: llc.RTokenPair(reference_rkey=1, new_rkey=2, new_address=1 << 64),
            "new_address is",
        ),
        (lambda: llc.LinkRToken(link_number=256, rkey=1, address=1), "link_number is 256"),
        (lambda: llc.TestLink(user_data=b""), "user_data has 0 bytes"),
    ],
)
def test_invalid_messages_cannot_be_built(build: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        build()


def test_an_answer_repeats_its_request() -> None:
    data = vectors.LLC["CONFIRM RKEY, five other links"][1]
    request = llc.decode_untrusted(data)
    assert isinstance(request, llc.ConfirmRkey)
    reply = dataclasses.replace(request, reply=True, negative=True)
    assert reply.encode() == data[:3] + b"\xa0" + data[4:]
