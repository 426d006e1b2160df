"""The conformance suite itself: its messages, its list of checks, its verdicts and its reports."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import trio

from scripts import conform_mutants
from smc_conform import messages
from smc_conform.catalogue import all_checks
from smc_conform.cli import main
from smc_conform.messages import pack, read, with_bytes
from smc_conform.peer import Peer
from smc_conform.registry import NEEDS, Check
from smc_conform.reports.document import Document, changes, counts, document, read_document
from smc_conform.reports.junit import junit
from smc_conform.reports.page import page
from smc_conform.roles import Role
from smc_conform.runner import Runner
from smc_conform.session import Options, open_session
from smc_conform.verdicts import Differs, Failed, Result, Silence, Verdict
from tests.timing import PATIENCE
from trio_smc.wire import cdc, clc, llc

OPTIONS = Options(role=Role.SERVER, host="192.0.2.1", port=7)
CLC = (messages.PROPOSAL, messages.ACCEPT, messages.CONFIRM, messages.DECLINE)


# --- messages: two implementations of the same formats ------------------------------------------


@pytest.mark.parametrize("kind", [clc.Accept, clc.Confirm])
def test_credentials_are_those_of_the_codec(kind: type[clc.Accept | clc.Confirm]) -> None:
    fields: dict[str, Any] = {
        "peer_id": b"12345678", "gid": bytes(range(16)), "mac": b"abcdef", "qp_number": 0x123456,
        "rkey": 0x89ABCDEF, "rmbe_index": 7, "alert_token": 0x13572468, "qp_mtu": 3,
        "rmb_address": 0x123456789ABC,
    }  # fmt: skip
    theirs = kind(**fields, buffer_size_code=2, initial_psn=0xFEDCBA)
    layout = messages.CLC_KINDS[kind.TYPE]
    assert pack(layout, **fields, size_code=2, psn=0xFEDCBA) == theirs.encode()
    found = read(theirs.encode(), clc=True)
    assert (found.size_code, found.psn, found.gid) == (2, 0xFEDCBA, bytes(range(16)))


def test_cdc_messages_are_those_of_the_codec() -> None:
    theirs = cdc.pack(1, 2, 3, 4, 5, 6, cdc.WRITER_BLOCKED, cdc.CONNECTION_CLOSED)
    ours = pack(
        messages.CDC, sequence=1, alert_token=2, producer_wrap=3, producer=4, consumer_wrap=5,
        consumer=6, writer_blocked=1, closed=1,
    )  # fmt: skip
    assert ours == theirs


def test_llc_messages_are_those_of_the_codec() -> None:
    other = llc.LinkRToken(link_number=9, rkey=5, address=6)
    theirs = llc.ConfirmRkey(rkey=1, address=2, other_tokens=1, others=(other,), reply=True)
    ours = pack(
        messages.CONFIRM_RKEY, rkey=1, address=2, other_tokens=1, link_1=9, rkey_1=5, address_1=6,
        reply=1,
    )  # fmt: skip
    assert ours == theirs.encode()
    offer = llc.AddLink(mac=b"abcdef", gid=bytes(16), qp_number=7, link_number=2, qp_mtu=5)
    assert pack(
        messages.ADD_LINK, mac=b"abcdef", qp_number=7, link_number=2, qp_mtu=5
    ) == offer.encode()  # fmt: skip


@pytest.mark.parametrize("layout", [*CLC, *messages.LLC_KINDS.values(), messages.CDC])
def test_each_field_is_written_where_it_is_read(layout: messages.Layout) -> None:
    for name, field in layout.fields.items():
        value = b"\x5a" * field.size if field.raw else 1
        found = read(pack(layout, **{name: value}), clc=layout in CLC)
        if name != "type":
            assert getattr(found, name) == value
        assert not any(read(pack(layout), clc=layout in CLC).reserved_bits())


def test_other_bytes_keep_the_length() -> None:
    assert with_bytes(b"abcdef", 2, b"XY") == b"abXYef"


# --- the list -------------------------------------------------------------------------------------


def test_checks_are_many_and_described() -> None:
    checks = all_checks()
    assert len(checks) >= 300
    assert len({check.id for check in checks}) == len(checks)
    for check in checks:
        assert check.requirement.endswith("."), check.id
        assert check.needs <= set(NEEDS)
        assert check.section
        assert check.id.rpartition("-")[2].isdecimal(), check.id


def test_the_list_of_faults_fits_the_tree() -> None:
    assert len(conform_mutants.mutants()) >= 60
    assert list(conform_mutants.problems()) == []


def test_the_command_lists_the_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert f"{len(all_checks())} checks" in capsys.readouterr().out


def test_a_target_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["connect", "127.0.0.1", "1", "--directory", str(tmp_path)]) == 2
    assert "127.0.0.1" in capsys.readouterr().err


# --- verdicts -------------------------------------------------------------------------------------


async def passes(peer: Peer) -> None:
    pass


async def fails(peer: Peer) -> None:
    raise Failed("wrong")


async def differs(peer: Peer) -> None:
    raise Differs("otherwise")


async def is_silent(peer: Peer) -> None:
    raise Silence("nothing came")


async def has_a_defect(peer: Peer) -> None:
    raise KeyError("oops")


@pytest.mark.parametrize(
    ("steps", "serves", "verdict"),
    [
        (passes, True, Verdict.PASS),
        (fails, True, Verdict.FAIL),
        (differs, True, Verdict.DIFFERS),
        (is_silent, True, Verdict.FAIL),
        (is_silent, False, Verdict.INCONCLUSIVE),
        (has_a_defect, True, Verdict.INCONCLUSIVE),
    ],
)
async def test_verdicts(
    steps: object, serves: bool, verdict: Verdict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def still_serves(peer: Peer) -> None:
        if not serves:
            raise Failed("no answer")

    monkeypatch.setattr(Peer, "still_serves", still_serves)
    check = Check("a/1-1", "It works.", frozenset(Role), frozenset(), steps)  # type: ignore[arg-type]
    with trio.fail_after(PATIENCE):
        async with open_session(replace(OPTIONS, directory=tmp_path)) as session:
            result = await Runner(session).run(check)
    assert result.verdict is verdict
    assert bool(result.detail) is (verdict is not Verdict.PASS)


async def test_a_robust_check_fails_if_nothing_is_served_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Peer, "still_serves", fails)
    check = Check("a/1-1", "It works.", frozenset(Role), frozenset(), passes, robust=True)
    with trio.fail_after(PATIENCE):
        async with open_session(replace(OPTIONS, directory=tmp_path)) as session:
            result = await Runner(session).run(check)
    assert result.verdict is Verdict.FAIL
    assert "a new connection afterwards: wrong" in result.detail


async def test_what_a_run_does_not_have(tmp_path: Path) -> None:
    needy = Check("a/1-1", "It works.", frozenset({Role.SERVER}), frozenset({"roce"}), fails)
    other = Check("a/1-2", "It works.", frozenset({Role.CLIENT}), frozenset(), fails)
    async with open_session(replace(OPTIONS, directory=tmp_path)) as session:
        runner = Runner(session)
        assert (await runner.run(needy)).detail == "needs roce"
        assert (await runner.run(other)).verdict is Verdict.NOT_APPLICABLE


# --- reports -------------------------------------------------------------------------------------


def run_of(*verdicts: Verdict) -> Document:
    results = []
    for number, verdict in enumerate(verdicts, 1):
        check = Check(f"a/1-{number}", "It <works>.", frozenset(Role), frozenset(), passes)
        results.append((check, Result(check.id, verdict, "seen & noted", 0.5, ("a ladder",), b"x")))
    return document(OPTIONS, results, 1.0)


def test_reports_of_a_run() -> None:
    run = run_of(Verdict.FAIL, Verdict.DIFFERS, Verdict.INCONCLUSIVE)
    assert counts(run)["fail"] == 1
    suite = ET.fromstring(junit(run))
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("3", "1", "1")
    html = page(run)
    assert "It &lt;works&gt;." in html
    assert "seen &amp; noted" in html
    assert "http" not in html.replace("https://", "")


def test_changes_between_two_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = tmp_path / "a.json", tmp_path / "b.json"
    for path, verdict in zip(paths, (Verdict.PASS, Verdict.FAIL), strict=True):
        path.write_text(json.dumps(run_of(verdict, Verdict.PASS)))
    old, new = map(read_document, paths)
    assert list(changes(old, new)) == [("a/1-1", "pass", "fail", "seen & noted")]
    assert main(["compare", *map(str, paths)]) == 1
    assert "pass -> fail" in capsys.readouterr().out
    paths[1].write_text("{}")
    assert main(["compare", *map(str, paths)]) == 2
