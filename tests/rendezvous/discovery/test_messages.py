"""The messages of same-host discovery."""

from __future__ import annotations

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from trio_smc._base.errors import ProtocolError
from trio_smc._base.reasons import FallbackReason
from trio_smc.rendezvous.discovery import messages
from trio_smc.rendezvous.discovery.messages import Kind


@given(st.binary(max_size=60) | st.binary(max_size=60).map(lambda tail: b"TSMC\x02\x02" + tail))
def test_any_bytes_are_a_message_or_a_protocol_error(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        message = messages.decode_untrusted(data)
        assert (message.kind is Kind.REFUSED) == (message.reason is not None)
        everything = message.kind in (None, Kind.REFUSED)
        assert len(message.connection) in ((0, 36) if everything else (36,))


@given(st.ip_addresses(), st.integers(0, 65535), st.ip_addresses(), st.integers(0, 65535))
def test_an_announcement_names_its_connection(
    source: object, source_port: int, destination: object, port: int
) -> None:
    name = messages.four_tuple((str(source), source_port), (str(destination), port))
    message = messages.decode_untrusted(messages.announce(name))
    assert message.kind is Kind.ANNOUNCE
    assert message.connection == name
    other = messages.four_tuple((str(source), source_port), (str(destination), port ^ 1))
    assert other != name


def test_the_layout_of_an_announcement() -> None:
    name = messages.four_tuple(("192.0.2.1", 0x1234), ("2001:db8::1%eth0", 0x5678))
    expected = (
        "54534d43 02 04 01 00"
        "00000000000000000000ffffc0000201 1234"
        "20010db8000000000000000000000001 5678"
        "00000102"
    )
    assert messages.announce(name, messages.packed_number(258)) == bytes.fromhex(expected)


def test_an_answer_carries_the_number_of_the_announcement() -> None:
    name = messages.four_tuple(("127.0.0.1", 1), ("127.0.0.1", 2))
    number = messages.packed_number((1 << 32) + 7)
    refused = messages.refused(FallbackReason.NO_RNIC, name, number)
    for said in (messages.announce(name, number), messages.accepted(name, number), refused):
        message = messages.decode_untrusted(said)
        assert message.number == bytes([0, 0, 0, 7])
        assert message.connection == name
        # What earlier versions say.
        assert messages.decode_untrusted(said[:44]).number == b""


def test_who_requires_smc_says_so() -> None:
    name = messages.four_tuple(("127.0.0.1", 1), ("127.0.0.1", 2))
    for make in (messages.announce, messages.accepted):
        for required in (False, True):
            said = make(name, required=required)
            assert said[7] == required
            assert messages.decode_untrusted(said).required is required
            # As a later version of the same protocol says it.
            later = said[:5] + b"\x09" + said[6:]
            assert messages.decode_untrusted(later).required is required
    assert not messages.decode_untrusted(messages.withdraw(name)).required


def test_every_reason_with_a_code_arrives() -> None:
    for reason in messages._REASONS.values():
        message = messages.decode_untrusted(messages.refused(reason))
        assert message.reason is reason
