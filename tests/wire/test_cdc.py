"""The CDC codec with hand-typed, captured and hostile messages."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wire import strategies as wire
from tests.wire import vectors
from tests.wire.tshark_reader import expected
from trio_smc._base.errors import ProtocolError
from trio_smc.wire import cdc

VECTORS = pytest.mark.parametrize(("message", "data"), vectors.CDC.values(), ids=vectors.CDC)


@pytest.mark.rfc("A.4/1", "A.4/2", "3.4/1", "3.4/2")
@VECTORS
def test_hand_typed(message: cdc.CdcMessage, data: bytes) -> None:
    assert message.encode() == data
    assert cdc.decode_untrusted(data) == message


@VECTORS
def test_fast_path_agrees_with_the_value(message: cdc.CdcMessage, data: bytes) -> None:
    items = (
        message.sequence,
        message.alert_token,
        message.producer_wrap,
        message.producer_cursor,
        message.consumer_wrap,
        message.consumer_cursor,
        message.producer_flags,
        message.connection_flags,
    )
    assert cdc.unpack_untrusted(memoryview(data)) == (cdc.HEADER, *items)
    assert cdc.pack(*items) == data


@pytest.mark.rfc("A.4/2")
def test_flags_are_where_the_rfc_has_them() -> None:
    """Figure 41: B, P, U, R and F from the first bit of byte 24 on, D, C and A of byte 25."""
    producer = [
        cdc.WRITER_BLOCKED, cdc.URGENT_PENDING, cdc.URGENT_PRESENT, cdc.UPDATE_REQUESTED,
        cdc.FAILOVER_VALIDATION,
    ]  # fmt: skip
    assert producer == [0x80, 0x40, 0x20, 0x10, 0x08]
    assert [cdc.SENDING_DONE, cdc.CONNECTION_CLOSED, cdc.ABNORMAL_CLOSE] == [0x80, 0x40, 0x20]


@pytest.mark.rfc("A.4/2")
def test_captured() -> None:
    captured = vectors.captured("cdc")
    assert len(captured) == 29
    for item in captured:
        message = cdc.decode_untrusted(item.data)
        assert message.encode() == item.data
        assert expected(message) == item.tshark, item.frame
    # The captured messages have only one of the flags; hand-typed messages have the others.
    flags = {(item.data[24], item.data[25]) for item in captured}
    assert flags == {(0, 0), (0, cdc.CONNECTION_CLOSED)}


@pytest.mark.rfc("3.4/1")
@given(wire.CDC_MESSAGES)
def test_round_trip(message: cdc.CdcMessage) -> None:
    data = message.encode()
    assert len(data) == cdc.CDC_SIZE
    assert cdc.decode_untrusted(data) == message


@given(st.binary(min_size=42, max_size=42))
def test_any_body_comes_back_without_reserved_bytes(body: bytes) -> None:
    raw = bytearray(b"\xfe\x2c" + body)
    data = cdc.decode_untrusted(memoryview(raw)).encode()
    raw[8:10] = raw[16:18] = bytes(2)
    raw[26:] = bytes(18)
    assert data == raw


@given(st.binary(max_size=100))
def test_anything_else_is_a_protocol_error(data: bytes) -> None:
    if len(data) == cdc.CDC_SIZE and data[:2] == b"\xfe\x2c":
        return
    for decode in (cdc.decode_untrusted, cdc.unpack_untrusted):
        with pytest.raises(ProtocolError):
            decode(data)


@pytest.mark.rfc("A.4/1")
@pytest.mark.parametrize(
    "data",
    [
        b"",
        vectors.CDC["no flags"][1][:-1],
        vectors.CDC["no flags"][1] + b"\0",
        b"\x01" + vectors.CDC["no flags"][1][1:],
        b"\xff" + vectors.CDC["no flags"][1][1:],
        b"\xfe\x2b" + vectors.CDC["no flags"][1][2:],
        b"\xfe\x2d" + vectors.CDC["no flags"][1][2:],
        b"\xfe\x2c" * 11,
    ],
    ids=[
        "empty",
        "43 bytes",
        "45 bytes",
        "an LLC type",
        "an unknown type",
        "length byte 43",
        "length byte 45",
        "22 bytes",
    ],
)
def test_malformed(data: bytes) -> None:
    for decode in (cdc.decode_untrusted, cdc.unpack_untrusted):
        with pytest.raises(ProtocolError, match="CDC message"):
            decode(data)


@pytest.mark.parametrize("name", ["sequence", "producer_wrap", "consumer_wrap", "producer_flags"])
def test_a_value_too_large_is_not_truncated(name: str) -> None:
    message = cdc.CdcMessage(1, 2)._replace(**{name: 1 << 16})
    with pytest.raises(struct.error):
        message.encode()
