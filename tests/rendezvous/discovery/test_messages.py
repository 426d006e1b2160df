"""The messages of same-host discovery."""

from __future__ import annotations

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from trio_smc._base.errors import ProtocolError
from trio_smc._base.reasons import FallbackReason
from trio_smc.rendezvous.discovery import messages
from trio_smc.rendezvous.discovery.messages import Kind
from trio_smc.rendezvous.discovery.names import announced_name


@given(st.binary(max_size=60) | st.binary(max_size=60).map(lambda tail: b"TSMC\x05\x05" + tail))
def test_any_bytes_are_a_message_or_a_protocol_error(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        message = messages.decode_untrusted(data)
        assert (message.kind is Kind.REFUSED) == (message.reason is not None)
        with_token = message.is_common and message.kind in (Kind.ACCEPTED, Kind.NOT_MINE)
        assert len(message.token) == (8 if with_token else 0)
        with_addresses = message.kind in (Kind.PROVE, Kind.LISTENING)
        assert len(message.connection) == (36 if with_addresses else 0)
        assert len(message.name) == (16 if message.kind is Kind.PROVE else 0)


@given(st.ip_addresses(), st.integers(0, 65535), st.ip_addresses(), st.integers(0, 65535))
def test_a_name_shows_the_connection_and_fits_into_an_address(
    source: object, source_port: int, destination: object, port: int
) -> None:
    key = messages.four_tuple((str(source), source_port), (str(destination), port))
    name = announced_name("4294967295", key)
    assert len(f"/proc/self/fd/9999999/{name}".encode()) < 108
    other = messages.four_tuple((str(source), source_port), (str(destination), port ^ 1))
    assert announced_name("4294967295", other) != name
    assert announced_name("4294967294", key) != name


def test_the_name_of_an_announcement() -> None:
    key = messages.four_tuple(("192.0.2.1", 0x1234), ("2001:db8::1%eth0", 0x5678))
    assert announced_name("4026531840", key) == (
        "4026531840-00000000000000000000ffffc0000201123420010db80000000000000000000000015678"
    )


def test_the_layout() -> None:
    token = bytes(range(8))
    head = "54534d43 05 05"
    assert messages.accepted(token, 4) == bytes.fromhex(f"{head} 03 00 0001020304050607 04")
    packed = messages.accepted(token, 4, required=True)
    assert packed == bytes.fromhex(f"{head} 03 01 0001020304050607 04")
    assert messages.not_mine(token) == bytes.fromhex(f"{head} 08 00 0001020304050607")
    assert messages.refused(FallbackReason.NO_RNIC) == bytes.fromhex(f"{head} 05 05")


def test_an_answer_arrives() -> None:
    token = bytes(range(8))
    for required in (False, True):
        packed = messages.accepted(token, 4, required=required)
        # Also as a message of a later version of the same protocol, with more bytes at its end.
        for each in (packed, packed[:5] + b"\x09" + packed[6:] + b"more"):
            message = messages.decode_untrusted(each)
            assert message == messages.Message(
                Kind.ACCEPTED, required=required, token=token, rnic_version=4
            )
    denied = messages.decode_untrusted(messages.not_mine(token))
    assert denied == messages.Message(Kind.NOT_MINE, token=token)


def test_an_answer_of_another_version_still_has_its_kind() -> None:
    for packed, kind in (
        (messages.accepted(bytes(8), 4), Kind.ACCEPTED),
        (messages.refused(FallbackReason.NO_RNIC), Kind.REFUSED),
    ):
        for versions in (b"\x06\x09", b"\x01\x04"):
            message = messages.decode_untrusted(packed[:4] + versions + packed[6:8])
            assert (message.kind, message.is_common) == (kind, False)


def test_every_reason_with_a_code_arrives() -> None:
    for reason in messages.REASONS.values():
        message = messages.decode_untrusted(messages.refused(reason))
        assert message.reason is reason
