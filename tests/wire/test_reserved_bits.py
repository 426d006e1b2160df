"""Reserved bits of all messages: the encoder sends zeros, and the decoder ignores them (A.2, A.3).

`tests.wire.layouts` lists the reserved bits, independently of the codecs.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wire import strategies as wire
from tests.wire import vectors
from tests.wire.layouts import EXCEPTIONS, KERNELS, reserved_bits, with_all_set, wrongly_set
from trio_smc.wire import cdc, clc, llc

# Messages with defined flags only.  The codec keeps undefined ones, but senders never set them.
CDC_SENT = st.builds(
    cdc.CdcMessage,
    sequence=wire.U16,
    alert_token=wire.U32,
    producer_wrap=wire.U16,
    producer_cursor=wire.U32,
    consumer_wrap=wire.U16,
    consumer_cursor=wire.U32,
    producer_flags=st.integers(0, 31).map(lambda bits: bits << 3),
    connection_flags=st.integers(0, 7).map(lambda bits: bits << 5),
)


def llc_sent(message: llc.Message, framing: llc.Framing) -> tuple[str, bytes]:
    return "llc", framing.encode(message)


SENT: st.SearchStrategy[tuple[str, bytes]] = st.one_of(
    wire.CLC_MESSAGES.map(lambda message: ("clc", message.encode())),
    wire.TSHARK_LLC.map(lambda message: llc_sent(message, llc.V1)),
    wire.V2_LLC.filter(lambda message: not isinstance(message, llc.OptionalMessage)).map(
        lambda message: llc_sent(message, llc.V2)
    ),
    CDC_SENT.map(lambda message: ("cdc", message.encode())),
)


def decoded(kind: str, data: bytes) -> Any:
    """Decode a message; for a CDC message, keep only the defined flags."""
    if kind == "clc":
        return clc.decode_untrusted(data)
    if kind == "llc":
        return (llc.V2 if data[0] & 0x20 else llc.V1).decode_untrusted(data)
    message = cdc.decode_untrusted(data)
    *rest, producer_flags, connection_flags = message
    return (*rest, producer_flags & 0xF8, connection_flags & 0xE0)


@pytest.mark.rfc("A.2/1", "A.3/1", "A.4/2")
@given(SENT)
def test_reserved_bits_are_sent_as_zeros(sent: tuple[str, bytes]) -> None:
    kind, data = sent
    assert wrongly_set(EXCEPTIONS, kind, data) == {}


@pytest.mark.rfc("A.2/2")
@given(SENT, st.data())
def test_reserved_bits_are_ignored(sent: tuple[str, bytes], choice: st.DataObject) -> None:
    kind, data = sent
    every = with_all_set(kind, data)
    assert decoded(kind, every) == decoded(kind, data)
    noise = choice.draw(st.binary(min_size=len(data), max_size=len(data)))
    some = bytes(
        had | (full & random) for had, full, random in zip(data, every, noise, strict=True)
    )
    assert decoded(kind, some) == decoded(kind, data)


@pytest.mark.rfc("A.2/1", "A.2/2")
@pytest.mark.parametrize(("name", "hand"), vectors.CLC.items(), ids=vectors.CLC)
def test_reserved_bits_of_each_clc_message(name: str, hand: tuple[clc.Message, bytes]) -> None:
    """Hand-typed messages cover each kind of message, independently of chance."""
    message, data = hand
    assert wrongly_set(EXCEPTIONS, "clc", message.encode()) == {}
    assert decoded("clc", with_all_set("clc", data)) == message
    if not name.startswith("Proposal") or data[7] >> 4 == 1:
        assert with_all_set("clc", data) != data


@pytest.mark.rfc("A.2/1", "A.2.4/6")
@pytest.mark.parametrize("version", [1, 2, 15])
def test_a_confirm_has_a_first_contact_flag_from_version_2_on(version: int) -> None:
    confirm, data = vectors.CLC["Confirm"]
    assert isinstance(confirm, clc.Confirm)
    flagged = data[:7] + bytes((version << 4 | 0x08,)) + data[8:]
    message = clc.decode_untrusted(flagged)
    assert isinstance(message, clc.Confirm)
    assert message.first_contact is (version > 1)
    assert message.encode() == (flagged if version > 1 else data)
    values = {each: getattr(confirm, each) for each in ("peer_id", "gid", "mac", "qp_number",
              "rkey", "rmbe_index", "alert_token", "buffer_size_code", "qp_mtu", "rmb_address",
              "initial_psn")}  # fmt: skip
    if version == 1:
        with pytest.raises(ValueError, match="first-contact flag"):
            clc.Confirm(first_contact=True, **values)


def test_a_proposal_of_version_1_has_no_flags() -> None:
    _, data = vectors.CLC["Proposal, IPv4"]
    for low in range(1, 16):
        message = clc.decode_untrusted(data[:7] + bytes((0x10 | low,)) + data[8:])
        assert isinstance(message, clc.Proposal)
        assert message.flags == 0
        assert message.offers_smc_r
        assert message.encode() == data
        with pytest.raises(ValueError, match="version 1"):
            clc.Proposal(peer_id=bytes(8), gid=bytes(16), mac=bytes(6), flags=low)


CAPTURED = {
    **{f"{each.codec} {number}": (each.codec, each.data)
       for number, each in enumerate(vectors.captured())},
    **{each.name: (kind, each.data) for kind in ("clc", "llc")
       for each in vectors.captured_v2(kind)},
}  # fmt: skip


@pytest.mark.parametrize(("kind", "data"), CAPTURED.values(), ids=CAPTURED)
def test_kernels_set_only_the_listed_reserved_bits(kind: str, data: bytes) -> None:
    """The decoder accepts each message of a kernel."""
    assert wrongly_set(KERNELS, kind, data) == {}
    assert decoded(kind, with_all_set(kind, data)) == decoded(kind, data)


@pytest.mark.parametrize("where", EXCEPTIONS, ids=str)
def test_each_exception_is_used(where: tuple[str, int, int]) -> None:
    """The bits of an exception are reserved, a message of trio_smc sets them, and the exception has
    a reason."""
    kind, number, at = where
    bits, why = EXCEPTIONS[where]
    assert kind == "llc"
    assert len(why.split()) > 5
    for framing in (llc.V1, llc.V2):
        data = framing.encode(
            llc.ConfirmLink(
                mac=bytes(6), gid=bytes(16), qp_number=1, link_number=1, link_user_id=1,
                max_links=2, no_eye_catcher=True,
            )
        )  # fmt: skip
        assert data[0] & 0x1F == number
        assert data[at] & bits
        assert reserved_bits(kind, data)[at] & bits == bits
