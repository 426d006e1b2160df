"""`trio-smc ladder` draws captures of two kernels, of this implementation, and damaged files."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import random
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from scripts import ladders
from tests.capture.test_capture import GOLDEN, GOLDEN_V2, captured, packets_of
from trio_smc.capture import pcapng
from trio_smc.capture.dissection import End, Seen, Unreadable, Write, dissect
from trio_smc.capture.frames import gid_address
from trio_smc.tools import ladder_svg, ladder_text
from trio_smc.tools.cli import main
from trio_smc.tools.ladder import Ladder, Row, address_text, read_ladders
from trio_smc.tools.ladder_text import KINDS, details, kind, title
from trio_smc.tools.output import size
from trio_smc.wire import cdc, clc, llc

SVG = "{http://www.w3.org/2000/svg}"


def golden() -> list[Seen]:
    return list(dissect(packets_of(GOLDEN)))


def text(ladder: Ladder, limit: int = 10_000, width: int = 100) -> list[str]:
    start = ladder.rows[0].time if ladder.rows else 0
    return list(ladder_text.draw(ladder, start=start, limit=limit, width=width))


def titles(rows: list[Row]) -> list[tuple[str, str]]:
    return [("->" if row.to_server else "<-", title(row)) for row in rows]


# --- two kernels -------------------------------------------------------------------------------


def test_first_contact_of_two_kernels() -> None:
    [ladder] = read_ladders(golden())
    assert titles(ladder.rows[:16]) == [
        ("->", "Proposal"),
        ("<-", "Accept, first contact"),
        ("->", "Confirm"),
        ("<-", "CONFIRM LINK"),
        ("->", "CONFIRM LINK, reply"),
        ("<-", "ADD LINK 2"),
        ("->", "ADD LINK 2, reply"),
        ("<-", "ADD LINK CONTINUATION 2"),
        ("->", "ADD LINK CONTINUATION 2, reply"),
        ("<-", "CONFIRM LINK"),
        ("->", "CONFIRM LINK, reply"),
        ("->", "RDMA write, 20000 bytes at 0"),
        ("->", "CDC 1, prod 0:20000, cons 0:0"),
        ("<-", "RDMA write, 20000 bytes at 0"),
        ("<-", "CDC 1, prod 0:20000, cons 0:20000"),
        ("->", "CDC 2, prod 0:20000, cons 0:20000"),
    ]
    assert [row.link_number for row in ladder.rows[:11]] == [None] * 3 + [1] * 6 + [2] * 2


@pytest.mark.v2("v2.13/2")
def test_two_kernels_of_version_2() -> None:
    """The ladder has titles and details for the fields of version 2."""
    [ladder] = read_ladders(dissect(packets_of(GOLDEN_V2)))
    assert len(ladder.rows) == 118
    assert titles(ladder.rows[:9]) == [
        ("->", "Proposal"),
        ("<-", "Accept, first contact"),
        ("->", "Confirm"),
        ("<-", "CONFIRM LINK"),
        ("->", "CONFIRM LINK, reply"),
        ("<-", "ADD LINK 2"),
        ("->", "ADD LINK 2, reply"),
        ("<-", "CONFIRM LINK"),
        ("->", "CONFIRM LINK, reply"),
    ]
    assert [row.link_number for row in ladder.rows[:9]] == [None] * 3 + [1] * 4 + [2] * 2
    lines = {title(row): details(row) for row in reversed(ladder.rows)}
    assert lines["Proposal"] == [
        "version 2, release 1, at most 255 connections, 2 links",
        "GID 10.9.0.2, EIDs SMCLAB",
    ]
    assert lines["Accept, first contact"][3:] == [
        "version 2, EID SMCLAB",
        "release 1, at most 255 connections, 2 links, direct",
        "host a",
    ]
    assert lines["Confirm"][-1] == "GIDs 10.9.0.2, 10.9.0.12"
    assert lines["CONFIRM LINK"][0] == (
        "link 1, at most 2 links, 255 connections, user ID 0x00000101"
    )
    assert lines["ADD LINK 2"] == [
        "GID 10.9.0.11, QP 0x11, PSN 0x7b7d2b",
        "direct",
        "RKey 0x000003db is RToken 0x000003dc @ 0xff11000008310000",
    ]
    assert lines["REQUEST ADD LINK"] == ["GIDs 10.9.0.2, 10.9.0.12"]


@pytest.mark.v2("v2.13/3")
def test_writes_between_two_kernels_of_version_2() -> None:
    """The second connection moves from link 2, which fails, to link 1."""
    [ladder] = read_ladders(dissect(packets_of(GOLDEN_V2)))
    writes = [row for row in ladder.rows if isinstance(row.event, Write)]
    offers = [
        (row.connection and row.connection.number, row.link_number, row.offset) for row in writes
    ]
    before = [(1, 1), (2, 2), (3, 1)]
    assert offers == [
        *((*each, place) for place in (0, 200) for each in before for _ in range(2)),
        *((2, 1, place) for place in (3800, 3800, 4000, 4000)),
    ]


@pytest.mark.v2("v2.13/3")
@pytest.mark.parametrize("number", [2, 3, 4])
def test_add_link_of_version_2_has_the_rtokens(number: int) -> None:
    """A write with any RToken of ADD LINK or of its reply is assigned to the new link."""
    seen = list(dissect(packets_of(GOLDEN_V2)))
    offers = [
        each.event for each in seen
        if isinstance(each.event, llc.AddLink) and each.event.link_number == number
    ]  # fmt: skip
    assert [each.reply for each in offers] == [False, True]
    agreed = next(at for at, each in enumerate(seen) if each.event is offers[1])
    for message in offers:
        assert message.extension is not None
        pairs = message.extension.pairs
        assert len(pairs) == (1 if number == 2 else 3)
        target = End(gid_address(message.gid), message.qp_number)
        writes = [
            Seen(0, False, target, target, Write(pair.new_address + 5, pair.new_rkey, 10))
            for pair in pairs
        ]
        [ladder] = read_ladders([*seen[: agreed + 1], *writes])
        rows = ladder.rows[agreed + 1 :]
        assert {(row.link_number, row.offset, row.to_server) for row in rows} == {
            (number, 5, not message.reply)
        }
        connections = {row.connection.number for row in rows if row.connection}
        assert connections == set(range(1, len(pairs) + 1))


def test_kernels_without_peer_id_are_distinguished() -> None:
    """Two clients propose only version 2, without a peer ID, and are declined."""
    server = End(b"\x0a\0\0\1", 5000)
    proposal = clc.Proposal(
        peer_id=bytes(8), version=2, flags=clc.proposal_flags(v1=False, v2=True), gid=bytes(16),
        mac=bytes(6), v2=clc.V2Offer(eids=(b"A".ljust(32),), gid=bytes(16), release=1),
    )  # fmt: skip
    decline = clc.Decline(peer_id=b"server77", diagnosis=0x03030000)
    clients = [End(bytes((10, 0, 0, number)), 40000) for number in (2, 3)]
    seen = []
    for client in clients:
        seen.append(Seen(0, True, client, server, proposal))
        seen.append(Seen(0, True, server, client, decline))
    drawn = read_ladders(seen)
    assert [(each.client.peer_id, each.client.addresses) for each in drawn] == [
        (None, [client.address]) for client in clients
    ]


def test_every_message_of_two_kernels_is_assigned() -> None:
    """Five connections alternate between two links; each write lies in a known RMB element."""
    [ladder] = read_ladders(golden())
    assert len(ladder.rows) == 160
    used: dict[int, set[int | None]] = {}
    for row in ladder.rows:
        if kind(row.event) in ("CDC", "write"):
            assert row.connection is not None
            used.setdefault(row.connection.number, set()).add(row.link_number)
        if kind(row.event) == "write":
            assert row.offset is not None
    assert used == {1: {1}, 2: {2}, 3: {1}, 4: {2}, 5: {1}}
    assert Counter(kind(row.event) for row in ladder.rows) == {
        "CLC": 15, "LLC": 93, "CDC": 32, "write": 20,
    }  # fmt: skip


def test_connection_filter_keeps_the_messages_of_the_group() -> None:
    [whole], [second] = read_ladders(golden()), read_ladders(golden(), 2)
    assert {row.connection.number for row in second.rows if row.connection} == {2}
    count, of_whole = (Counter(kind(r.event) for r in each.rows) for each in (second, whole))
    assert count["LLC"] == of_whole["LLC"]  # LLC messages belong to the group
    assert (count["CLC"], count["write"]) == (3, 4)
    assert read_ladders(golden(), 6) == []


@pytest.mark.parametrize("width", [1, 60, 100, 137])
def test_text_has_straight_edges(width: int) -> None:
    [ladder] = read_ladders(golden())
    drawn = [line for line in text(ladder, width=width) if "|" in line]
    assert len({line.rindex("|") for line in drawn}) == 1
    assert len({line.index("|") for line in drawn}) == 1
    arrows = [line for line in drawn if "|<-" in line or "->|" in line]
    assert len(arrows) == len(ladder.rows)


def test_limit_counts_the_omitted_messages() -> None:
    [ladder] = read_ladders(golden())
    drawn = text(ladder, limit=3)
    assert sum("->|" in line or "|<-" in line for line in drawn) == 3
    assert "157 more messages (--limit 160)" in drawn[-1]


def test_svg_shows_every_message() -> None:
    [ladder] = read_ladders(golden())
    root = ET.fromstring(ladder_svg.picture([ladder], start=ladder.rows[0].time, limit=1000))
    arrows = [line for line in root.iter(f"{SVG}line") if line.get("marker-end")]
    assert len(arrows) == len(ladder.rows) + len({kind(row.event) for row in ladder.rows})
    words = Counter(each.text for each in root.iter(f"{SVG}text"))
    wanted = Counter(word for row in ladder.rows for word in (title(row), *details(row)))
    assert wanted.items() <= words.items() or all(words[w] >= n for w, n in wanted.items())
    markers = {each.get("id") for each in root.iter(f"{SVG}marker")}
    assert markers == set(KINDS)


def test_svg_breaks_long_details() -> None:
    """The picture contains all eight addresses, and no line exceeds its width."""
    [ladder] = read_ladders(golden())
    request = next(row for row in ladder.rows if isinstance(row.event, llc.ConfirmLink))
    gids = [bytes((0xFD, *range(101, 115), number)) for number in range(1, 9)]
    event = llc.RequestAddLink(gids=tuple(gids))
    row = dataclasses.replace(request, event=event)
    assert len(details(row)[0]) > 300
    svg = ladder_svg.picture([Ladder(ladder.client, ladder.server, [row])], start=0, limit=1)
    lines = [each.text or "" for each in ET.fromstring(svg).iter(f"{SVG}text")]
    addresses = [address_text(gid_address(gid)) for gid in gids]
    assert all(any(address in line for line in lines) for address in addresses)
    assert max(map(len, lines)) <= 88


@pytest.mark.parametrize("missing", range(1, 60, 7))
def test_a_capture_without_its_beginning(missing: int) -> None:
    """The ladder omits unknown parts; directions and links are still correct."""
    late = golden()[missing:]
    drawn = read_ladders(late)
    assert sum(len(each.rows) for each in drawn) == len(late)
    for ladder in drawn:
        assert text(ladder)
    confirms = [row for each in drawn for row in each.rows
                if isinstance(row.event, llc.ConfirmLink)]  # fmt: skip
    assert all(row.to_server is row.event.reply for row in confirms)  # type: ignore[union-attr]


def test_damaged_packets_can_be_drawn(rng: random.Random) -> None:
    whole = packets_of(GOLDEN)
    unreadable = 0
    for _ in range(60):
        packets = []
        for packet in rng.sample(whole, 60):
            data = bytearray(packet.data)
            for _ in range(rng.choice((0, 0, 1, 5))):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            packets.append(packet._replace(data=bytes(data)))
        seen = list(dissect(packets))
        unreadable += sum(isinstance(each.event, Unreadable) for each in seen)
        drawn = read_ladders(seen)
        for ladder in drawn:
            assert len(text(ladder)) > len(ladder.rows)
        ET.fromstring(ladder_svg.picture(drawn, start=0, limit=50))
    assert unreadable > 0


async def test_a_failover_of_this_implementation(tmp_path: Path) -> None:
    """The example of docs/capture.md: both sides write before and after an RNIC fails."""
    first_contact, failover = await ladders.record(tmp_path / "private")
    assert titles(first_contact.rows)[:3] == titles(read_ladders(golden())[0].rows)[:3]
    assert {row.link_number for row in first_contact.rows} == {None, 1, 2}
    labels = titles(failover.rows)
    validated = ("->", "CDC 1, failover validation [F]")
    assert validated in labels
    replayed = failover.rows[labels.index(validated) :]
    assert {row.link_number for row in replayed} == {2, 3}
    writes = {(row.to_server, title(row)) for row in replayed if kind(row.event) == "write"}
    assert writes == {(way, "RDMA write, 2000 bytes at 1000") for way in (True, False)}


def test_the_page_shows_the_ladders() -> None:
    page = (ladders.DOCS / ladders.PAGE).read_text(encoding="utf-8")
    for name in ("first-contact", "failover"):
        assert f"(ladders/{name}.svg)" in page
        ET.parse(ladders.DOCS / "ladders" / f"{name}.svg")
    assert "failover validation [F]" in page


# --- titles and details --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "words", "more"),
    [
        (
            cdc.CdcMessage(65535, 7, 1, 16, 2, 32, cdc.WRITER_BLOCKED | cdc.UPDATE_REQUESTED,
                           cdc.SENDING_DONE | cdc.CONNECTION_CLOSED),
            "CDC 65535, prod 1:16, cons 2:32 [B R D C]",
            ["writer blocked, update requested, sending done, connection closed"],
        ),
        (
            cdc.CdcMessage(3, 7, 1, 16, 2, 32, cdc.FAILOVER_VALIDATION),
            "CDC 3, failover validation [F]",
            [],
        ),
        (
            llc.DeleteLink(link_number=2, reason=llc.DeleteLinkReason.LOST_PATH),
            "DELETE LINK 2",
            ["disorderly, lost path"],
        ),
        (
            llc.AddLink(mac=bytes(6), gid=bytes(16), reply=True, rejected=True, reason=1),
            "ADD LINK 0, rejected",
            ["reason no alternate path"],
        ),
        (llc.OptionalMessage(data=b"\x81" + bytes(43)), "optional message 0x81", []),
        (Unreadable("too short"), "unreadable", ["too short"]),
    ],
)  # fmt: skip
def test_titles_and_details(
    event: cdc.CdcMessage | llc.Message | Unreadable, words: str, more: list[str]
) -> None:
    row = Row(0, True, event)
    assert (title(row), details(row)) == (words, more)


# --- the command -------------------------------------------------------------------------------


async def test_a_capture_of_this_implementation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "capture.pcapng"
    await captured(path, data=bytes(1000))
    assert main(["ladder", str(path), "--connection", "2"]) == 0
    drawn = capsys.readouterr().out
    assert drawn.count("Proposal") == 1
    assert "RDMA write, 1000 bytes at 0" in drawn
    assert "prod 0:1000" in drawn
    assert main(["ladder", str(path), "--svg", str(tmp_path / "x.svg")]) == 0
    ET.parse(tmp_path / "x.svg")
    nbytes = (tmp_path / "x.svg").stat().st_size
    note = f"trio-smc ladder: written: {tmp_path}/x.svg, {size(nbytes)}\n"
    assert capsys.readouterr() == ("", note)
    assert main(["ladder", str(path), "--svg", "-"]) == 0
    drawn = (tmp_path / "x.svg").read_text(encoding="utf-8") + "\n"
    assert capsys.readouterr() == (drawn, "")


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_a_file_whose_open_could_block_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    path = tmp_path / "capture.pcapng"
    if kind == "fifo":
        os.mkfifo(path)
        # A writer has the FIFO open, so opening it for reading would not block.
        writer = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        os.write(writer, b"no capture, but more than four bytes")
    else:
        path.symlink_to("/dev/null")
        writer = os.open(path, os.O_RDONLY)
    try:
        assert main(["ladder", str(path)]) == 2
    finally:
        os.close(writer)
        path.unlink()
    assert capsys.readouterr().err == f"trio-smc ladder: {path}: not a regular file\n"


def test_a_pipe_that_the_shell_opened(capsys: pytest.CaptureFixture[str]) -> None:
    """For <(zcat capture.gz) bash passes a name below /dev/fd."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as file:
        file.write(GOLDEN.read_bytes()[:4096])
    try:
        main(["ladder", f"/dev/fd/{reader}", "--limit", "1"])
    finally:
        os.close(reader)
    assert "Proposal" in capsys.readouterr().out


def test_a_ladder_for_scripts_from_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    piped = io.TextIOWrapper(io.BytesIO(GOLDEN.read_bytes()))
    monkeypatch.setattr("sys.stdin", piped)
    assert main(["ladder", "-", "--json", "--limit", "3"]) == 0
    [drawn] = json.loads(capsys.readouterr().out)
    [whole] = read_ladders(golden())
    assert drawn["client"]["peer_id"] == (whole.client.peer_id or b"").hex()
    assert drawn["server"]["addresses"]
    arrows = [(each["from"], each["title"], each["connection"]) for each in drawn["messages"]]
    assert arrows == [
        ("client", "Proposal", 1), ("server", "Accept, first contact", 1), ("client", "Confirm", 1),
    ]  # fmt: skip
    assert drawn["messages"][0]["seconds"] == 0


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut, empty, other = (tmp_path / name for name in ("cut", "empty.pcapng", "other"))
    cut.write_bytes(GOLDEN.read_bytes()[:-3])
    empty.write_bytes(pcapng.header("a", "b"))
    other.write_bytes(b"no capture at all")
    for path, code, message in (
        (cut, 2, "cut off at byte"),
        (other, 2, "neither pcapng nor pcap"),
        (tmp_path / "missing", 2, "No such file"),
        (empty, 1, "contains no SMC-R"),
    ):
        assert main(["ladder", str(path)]) == code
        out, err = capsys.readouterr()
        assert message in err
        assert err.count("\n") == 1
        assert ("Proposal" in out) is (path is cut)  # messages before the damage are drawn
    assert main(["ladder", str(GOLDEN), "--connection", "9"]) == 1
    assert main(["ladder", str(GOLDEN), "--svg", str(tmp_path / "no" / "x.svg")]) == 2


def test_both_formats_are_drawn_alike() -> None:
    parts = [pcapng.packet(p.time, p.data, p.length) for p in packets_of(GOLDEN)]
    modern = io.BytesIO(pcapng.header("a", "b") + b"".join(parts))
    [one], [other] = read_ladders(golden()), read_ladders(dissect(pcapng.read(modern)))
    assert text(one) == text(other)
