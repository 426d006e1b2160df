"""The lab's reading of captures finds messages, and what is malformed."""

from __future__ import annotations

from pathlib import Path

from tests.api.api_peers import accept
from tests.lab import captures
from tests.wire.tshark_reader import capture, require_tshark
from trio_smc.wire import clc, llc

DECLINE = clc.Decline(peer_id=bytes(8), diagnosis=0x03030000)
PROPOSAL = clc.Proposal(peer_id=bytes(8), gid=bytes(16), mac=bytes(6), ipv4_mask_length=24)


def reading(path: Path, *messages: bytes) -> captures.Reading:
    require_tshark()
    path.write_bytes(capture(messages))
    return captures.read(path)


def test_messages_are_counted_by_name(tmp_path: Path) -> None:
    got = reading(
        tmp_path / "some.pcap", PROPOSAL.encode(), DECLINE.encode(),
        llc.TestLink(user_data=bytes(16)).encode(), llc.TestLink(user_data=bytes(16)).encode(),
    )  # fmt: skip
    assert str(got) == "1 Decline, 1 Proposal, 2 TEST LINK"
    assert got.malformed == []  # tshark's known error is none


def test_a_malformed_message_is_found(tmp_path: Path) -> None:
    whole = accept().encode()
    short = whole[:5] + (30).to_bytes(2, "big") + whole[7:30]
    got = reading(tmp_path / "short.pcap", PROPOSAL.encode(), short)
    assert [each.partition(",")[0] for each in got.malformed] == ["frame 2"]
