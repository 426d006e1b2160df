"""The conformance suite itself: its list of checks, its verdicts and its reports."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree as ET

import pytest
import trio

from scripts import conform_mutants
from scripts.conform_findings import findings
from smc_conform.catalogue import all_checks
from smc_conform.cli import main
from smc_conform.peer import Peer, Phase
from smc_conform.registry import NEEDS, Check
from smc_conform.reports.document import (
    Document,
    changes,
    counts,
    document,
    read_document,
    with_captures,
)
from smc_conform.reports.junit import junit
from smc_conform.reports.page import page
from smc_conform.reports.terminal import Progress, summary
from smc_conform.roles import Role
from smc_conform.runner import Runner
from smc_conform.session import Options, open_session
from smc_conform.verdicts import Differs, Failed, Result, Silence, Verdict
from tests.timing import PATIENCE

OPTIONS = Options(role=Role.SERVER, host="192.0.2.1", port=7)


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


def test_findings_are_about_checks_and_have_reasons() -> None:
    names = {check.id for check in all_checks()}
    assert {each.id for each in findings().values()} <= names
    assert all(each.title and (each.reason or each.ours) for each in findings().values())


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


async def test_checks_that_need_more_than_the_run_has(tmp_path: Path) -> None:
    needy = Check("a/1-1", "It works.", frozenset({Role.SERVER}), frozenset({"roce"}), fails)
    other = Check("a/1-2", "It works.", frozenset({Role.CLIENT}), frozenset(), fails)
    async with open_session(replace(OPTIONS, directory=tmp_path)) as session:
        runner = Runner(session)
        assert (await runner.run(needy)).detail == "needs roce"
        assert (await runner.run(other)).verdict is Verdict.NOT_APPLICABLE


@pytest.mark.parametrize(("most", "run"), [(None, 4), (1, 1), (3, 3)])
async def test_a_run_ends_at_a_number_of_failures(
    most: int | None, run: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Peer, "still_serves", passes)
    checks = [Check(f"a/1-{n}", "It works.", frozenset(Role), frozenset(), fails) for n in range(4)]
    found: list[Verdict] = []
    with trio.fail_after(PATIENCE):
        async with open_session(replace(OPTIONS, directory=tmp_path, max_failures=most)) as session:
            await Runner(session).run_all(
                checks, lambda check, result: found.append(result.verdict)
            )
    assert found == [Verdict.FAIL] * run


async def test_all_peer_ids_of_a_run_differ(tmp_path: Path) -> None:
    async with open_session(replace(OPTIONS, directory=tmp_path)) as session:
        assert len({session.new_instance() for _ in range(1 << 16)}) == 1 << 16


async def keep_open(stream: trio.SocketStream) -> None:
    await trio.sleep_forever()


@pytest.mark.parametrize("version", [1, 2])
async def test_two_checks_that_share_an_identity_do_not_pass(version: int, tmp_path: Path) -> None:
    """Such checks would find each other's link group, in some orders."""

    def proposes(*, own_gid: bool = False, **values: bytes) -> Check:
        async def steps(peer: Peer) -> None:
            more = {"roce_gid": peer.session.new_gid()} if own_gid else {}
            for _ in range(2):  # a check may use its identity again
                await peer.reach(Phase.PROPOSED, change={"proposal": {**values, **more}})

        return Check("a/1-1", "It works.", frozenset(Role), frozenset(), steps)

    with_peer_id, without = proposes(peer_id=bytes(range(8))), proposes(peer_id=bytes(8))
    own_gids = [proposes(own_gid=True, peer_id=bytes(8))] * (8 if version == 2 else 0)
    checks = [*[proposes()] * 8, with_peer_id, without, *own_gids, with_peer_id, without]
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, keep_open, [listener])
            port = listener.socket.getsockname()[1]
            options = replace(
                OPTIONS, host="127.0.0.1", port=port, directory=tmp_path, version=version,
                ueid="SMC-CONFORM.TEST",
            )  # fmt: skip
            async with open_session(options) as session:
                found = [await Runner(session).run(check) for check in checks]
            nursery.cancel_scope.cancel()
    assert {each.verdict for each in found[:-2]} == {Verdict.PASS}
    for each in found[-2:]:
        assert each.verdict is Verdict.INCONCLUSIVE
        assert "another check of this run has the identity" in each.detail


# --- reports -------------------------------------------------------------------------------------


def run_of(*verdicts: Verdict) -> Document:
    results = []
    for number, verdict in enumerate(verdicts, 1):
        check = Check(f"a/1-{number}", "It <works>.", frozenset(Role), frozenset(), passes)
        result = Result(check.id, verdict, "seen & noted", 0.5, ("a ladder",), ("-> 00",), b"x")
        results.append((check, result))
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


FAILED = (
    "version2/v2.10-2", "clc/C.6-4", "data/4.5.1-10", "llc/4.5-11", "llc/4.5.1-9", "clc/A.2-1",
)  # fmt: skip


def run_with(*names: str) -> Document:
    results = []
    for name in names:
        check = Check(name, f"{name} <works>.", frozenset(Role), frozenset(), passes)
        results.append((check, Result(name, Verdict.FAIL, f"{name} & broken")))
    return document(OPTIONS, results, 1.0)


def test_failed_checks_are_summed_up_in_the_order_of_the_documents() -> None:
    lines: list[str] = []
    summary(run_with(*FAILED), lines.append)
    text = "".join(lines).partition("failed, in the order of the documents:\n")[2]
    assert [line for line in text.splitlines() if not line.startswith(" ")] == [
        "RFC 7609, 4.5: llc/4.5-11: llc/4.5-11 <works>.",
        "RFC 7609, 4.5.1: llc/4.5.1-9: llc/4.5.1-9 <works>.",
        "RFC 7609, 4.5.1: data/4.5.1-10: data/4.5.1-10 <works>.",
        "RFC 7609, A.2: clc/A.2-1: clc/A.2-1 <works>.",
        "RFC 7609, C.6: clc/C.6-4: clc/C.6-4 <works>.",
        "compliance with version 2, 10: version2/v2.10-2: version2/v2.10-2 <works>.",
    ]
    assert "    clc/C.6-4 & broken" in text
    lines.clear()
    summary(run_of(Verdict.PASS, Verdict.INCONCLUSIVE), lines.append)
    assert "failed" not in "".join(lines)


def test_the_page_begins_with_the_failures() -> None:
    run = run_with(*FAILED) | {"ended": "the server is <gone>"}
    top, _, table = page(run).partition("<table>")
    assert "the server is &lt;gone&gt;" in top
    for name in FAILED:
        assert f'href="#{name}"' in top
        assert f'id="{name}"' in table
    assert "initial-scale=1" in top


def test_the_page_has_the_bytes_and_leads_to_the_captures(tmp_path: Path) -> None:
    run = with_captures(run_of(Verdict.FAIL), tmp_path / "kept # 1")
    html = page(run, tmp_path / "pages")
    assert "<pre>-&gt; 00</pre>" in html
    [link] = re.findall(r'<a href="([^"#]+)">capture</a>', html)
    assert (tmp_path / "pages" / unquote(link)).resolve().read_bytes() == b"x"
    assert "capture</a>" not in page(run_of(Verdict.FAIL))


def test_the_count_of_a_run() -> None:
    """Other output than a terminal has a line for each tenth; inconclusive checks run again."""
    check = Check("a/1-1", "It works.", frozenset(Role), frozenset(), passes)
    passed, out = Result(check.id, Verdict.PASS), io.StringIO()
    progress = Progress(out, 20)
    for done in range(20):
        progress.postponed(done % 4)
        progress.note(check, passed)
    progress.end()
    first, second, *others = out.getvalue().splitlines()
    assert first == "2 of 20, 1 inconclusive so far"
    assert second == "4 of 20, 3 inconclusive so far"
    assert len(others) == 8


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
