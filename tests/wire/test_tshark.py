"""tshark reads the values that trio_smc has encoded, except for the known errors of tshark."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.wire import strategies as wire
from tests.wire import tshark_reader as tshark
from tests.wire import vectors
from trio_smc.wire import cdc, clc, llc

# tshark shows fields of these messages that the codec does not have: an extension of version 2, and
# the SMC-D part of a Proposal that offers SMC-D.  tshark shows nothing of the optional message.
TSHARK_SHOWS_MORE = {
    "Proposal, version 2 that offers SMC-R in both versions",
    "Proposal, both versions and an IPv6 prefix",
    "Proposal, version 2 without an offer of version 1",
    "Proposal with reserved flags",
    "optional message",
}


@pytest.fixture(autouse=True)
def _tshark(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("tshark"):
        tshark.require_tshark()


@pytest.mark.tshark
def test_hand_typed_messages(tmp_path: Path) -> None:
    chosen = {
        name: message
        for group in vectors.ALL.values()
        for name, (message, _) in group.items()
        if name not in TSHARK_SHOWS_MORE
    }
    readings = tshark.read([message.encode() for message in chosen.values()], tmp_path)
    for (name, message), reading in zip(chosen.items(), readings, strict=True):
        assert reading == tshark.expected(message), name


@pytest.mark.tshark
def test_captured_messages_framed_by_us(tmp_path: Path) -> None:
    """tshark reads the same values in the original frames and in the frames of the tests."""
    captured = vectors.captured()
    readings = tshark.read([item.data for item in captured], tmp_path)
    for item, reading in zip(captured, readings, strict=True):
        assert reading == item.tshark, item.frame


def _ordinary(message: clc.Message) -> clc.Message:
    """Convert a message to version 1, or to version 2 with an offer of version 1 only, like Linux.

    tshark shows fields of other messages that the codec does not have: those of SMC-D, if the low
    flag bits offer it, and extensions.
    """
    if isinstance(message, clc.Proposal):
        newer = message.version > 1 and message.flags & 3 != 2
        return dataclasses.replace(
            message,
            version=2 if newer else 1,
            flags=8 if newer else 0,
            v2=None,
        )
    if isinstance(message, clc.Decline):
        return dataclasses.replace(message, version=1 if message.more_diagnosis is None else 2)
    first_contact = message.first_contact and isinstance(message, clc.Accept)
    return dataclasses.replace(message, version=1, first_contact=first_contact, v2=None)


@pytest.mark.tshark
@settings(max_examples=4, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        wire.CLC_MESSAGES.map(_ordinary) | wire.TSHARK_LLC | wire.CDC_MESSAGES,
        min_size=60,
        max_size=80,
    )
)
def test_random_messages(messages: list[clc.Message | llc.Message | cdc.CdcMessage]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        readings = tshark.read([message.encode() for message in messages], Path(directory))
    for message, reading in zip(messages, readings, strict=True):
        assert reading == tshark.expected(message)


@pytest.mark.tshark
def test_known_error_52_byte_proposal(tmp_path: Path) -> None:
    [reading] = tshark.read([vectors.CLC["Proposal, IPv4"][1]], tmp_path)
    assert reading[-2:] == [("smc.proposal.smcv1_subnet_ext_offset", 0), tshark.MALFORMED]


@pytest.mark.tshark
def test_known_error_add_link_continuation(tmp_path: Path) -> None:
    message = llc.AddLinkContinuation(
        link_number=2,
        tokens_left=1,
        pairs=(llc.RTokenPair(reference_rkey=0x11223344, new_rkey=0x55667788, new_address=0x99),),
    )
    [reading] = tshark.read([message.encode()], tmp_path)
    fields = dict(reading)
    assert fields["smc.add.link.cont.rmb.RTok1.Rkey1"] == 0x00001122
    assert fields["smc.add.link.cont.rmb.RTok1.Rkey2"] == 0x33445566
    assert fields["smc.add.link.cont.rmb.RTok1.virt"] == 0x7788000000000000
    assert tshark.MALFORMED not in reading


@pytest.mark.parametrize(
    ("shown", "value"), [("0", 0), ("False", 0), ("1", 1), ("True", 1), ("0x0a", 10)]
)
def test_a_flag_is_a_number_whichever_tshark_shows_it(shown: str, value: int) -> None:
    assert tshark.value(shown) == value


@pytest.mark.parametrize(
    ("name", "value", "outcome"),
    [
        ("CI", "true", pytest.fail.Exception),
        ("TRIO_SMC_FULL", "1", pytest.fail.Exception),
        ("CI", "", pytest.skip.Exception),
    ],
)
def test_a_missing_tshark_is_reported(
    name: str, value: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("TRIO_SMC_FULL", raising=False)
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(outcome, match="not installed"):
        tshark.require_tshark()
