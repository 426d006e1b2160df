"""The command: arguments that cannot be right, runs that end early, and comparisons."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from smc_conform.cli import main
from smc_conform.messages import PROPOSAL, pack
from smc_conform.peer import Peer, Phase
from smc_conform.registry import Check
from smc_conform.reports.document import Document, document
from smc_conform.roles import Role
from smc_conform.runner import Runner
from smc_conform.session import Options, open_session
from smc_conform.verdicts import Failed, Result, Verdict
from tests.conform.test_first_contact import target
from tests.timing import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = Options(role=Role.SERVER, host="127.0.0.1", port=1, patience=0.5)


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--jobs", "0"], "--jobs must be at least 1, not 0"),
        (["--max-failures", "-1"], "--max-failures must be at least 1, not -1"),
        (["--patience", "0"], "--patience must be a number of seconds above 0, not 0"),
        (["--patience", "nan"], "--patience must be a number of seconds above 0, not nan"),
        (["--timers", "inf"], "--timers must be a number of seconds above 0, not inf"),
        (["--daytime", "70000"], "--daytime must be from 1 to 65535, not 70000"),
        (["--daytime", "7"], "--daytime 7 is the same port as PORT"),
        (["--daytime", "8", "--discard", "8"], "--discard 8 is the same port as --daytime"),
        (["--html", "/nonexistent/x.html"], "--html /nonexistent/x.html: the file cannot be"),
        (["--json", "/"], "--json /: the file cannot be written"),
        (["--keep", "/dev/null"], "--keep /dev/null: the directory cannot be written"),
        (["--keep", "/dev/null/below"], "--keep /dev/null/below: the directory cannot be written"),
        (["--version", "2"], "version 2 needs --ueid"),
    ],
)
def test_wrong_values_are_refused_in_one_line(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["connect", "127.0.0.1", "7", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"smc-conform: {text}")
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize("port", ["0", "-1", "65536"])
def test_ports_out_of_range(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["connect", "127.0.0.1", "--", port]) == 2
    assert f"PORT must be from 1 to 65535, not {port}" in capsys.readouterr().err


# --- runs that end early --------------------------------------------------------------------------


async def passes(peer: Peer) -> None:
    await peer.session.tcp()


async def proposes(peer: Peer) -> None:
    await peer.reach(Phase.PROPOSED)


@pytest.mark.parametrize("jobs", [1, 3])
async def test_a_run_ends_if_the_server_is_gone(jobs: int, tmp_path: Path) -> None:
    found: list[Result] = []
    left = 2 * jobs

    async def serve(stream: trio.SocketStream) -> None:
        nonlocal left
        left -= 1
        if not left:
            services.cancel_scope.cancel()
        await stream.aclose()

    checks = [
        Check(f"a/1-{number}", "It works.", frozenset(Role), frozenset(), proposes)
        for number in range(100)
    ]
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as services:
            [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
            port = listener.socket.getsockname()[1]
            services.start_soon(trio.serve_listeners, serve, [listener])
            async with trio.open_nursery() as nursery:
                nursery.cancel_scope.shield = True
                options = replace(OPTIONS, port=port, jobs=jobs, directory=tmp_path)
                async with open_session(options) as session:
                    runner = Runner(session)
                    await runner.run_all(checks, lambda check, result: found.append(result))
    assert "refused" in runner.gone
    assert 1 <= len(runner.suspects) <= jobs
    assert len(found) <= 3 * jobs
    assert {each.id for each in found} >= set(runner.suspects)
    for each in found:
        is_suspect = each.id in runner.suspects
        assert each.verdict is (Verdict.INCONCLUSIVE if is_suspect else Verdict.PASS)


async def answers(peer: Peer) -> None:
    await peer.any_clc(await peer.dial())


async def test_a_run_ends_if_the_client_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections that the client has left behind do not count."""
    monkeypatch.setattr(Peer, "still_serves", answers)
    found: list[Result] = []
    checks = [
        Check(f"a/1-{number}", "It works.", frozenset(Role), frozenset(), answers, robust=True)
        for number in range(100)
    ]
    options = replace(
        OPTIONS, role=Role.CLIENT, port=0, directory=tmp_path, patience=0.1, timers=0.1
    )
    with trio.fail_after(PATIENCE):
        async with open_session(options) as session:
            for number in range(16):
                stream = await trio.open_tcp_stream("127.0.0.1", session.port)
                if number < 8:  # a check and its probe take one each
                    await stream.send_all(pack(PROPOSAL))
                await stream.aclose()
            await trio.sleep(0.05)
            runner = Runner(session)
            await runner.run_all(checks, lambda check, result: found.append(result))
    assert runner.gone
    assert [each.verdict for each in found[:4]] == [Verdict.PASS] * 4
    assert [each.id for each in found[4:]] == list(runner.suspects)
    assert len(runner.suspects) == 1


@contextmanager
def suite(directory: Path, port: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """The command against a server on this port, with all output in one pipe."""
    process = subprocess.Popen(
        [sys.executable, "-m", "smc_conform", "connect", "127.0.0.1", port,
         "--directory", str(directory), "--verbose", *options],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("how", ["interrupt", "kill the server"])
def test_an_interrupted_run_reports_its_results(how: str, tmp_path: Path) -> None:
    report, html = tmp_path / "report.json", tmp_path / "report.html"
    directory = tmp_path / "rnics"
    directory.mkdir(mode=0o700)
    more = ("--json", str(report), "--html", str(html), "--only", "clc/*", "--patience", "1")
    with target(directory, "server") as server:
        assert server.stdout is not None
        port = server.stdout.readline().split()[0]
        with suite(directory, port, *more) as process:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert first.startswith(("pass", "not applicable", "differs"))
            if how == "interrupt":
                process.send_signal(signal.SIGINT)
            else:
                server.send_signal(signal.SIGINT)
            shown = first + process.stdout.read()
            assert process.wait(PATIENCE) == (130 if how == "interrupt" else 2), shown
    run = json.loads(report.read_text())
    assert 0 < len(run["checks"]) < 90
    assert html.exists()
    assert "inconclusive" in shown  # the table
    if how == "interrupt":
        assert "interrupted after" in shown
    else:
        assert f"the server is gone since {run['suspects'][0]}" in shown
        assert "refused" in run["ended"]


def test_a_run_that_has_judged_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with target(tmp_path, "server") as server:
        assert server.stdout is not None
        port = server.stdout.readline().split()[0]
        arguments = ["connect", "127.0.0.1", port, "--directory", str(tmp_path)]
        assert main([*arguments, "--only", "data/4.5.1-7"]) == 2
        shown = capsys.readouterr()
        assert "nothing was judged" in shown.err
        assert main([*arguments, "--only", "llc/A.3-1"]) == 0


async def fails(peer: Peer) -> None:
    raise Failed("wrong")


def test_the_number_of_failures_that_ends_a_run_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = [
        Check(f"a/1-{number}", "It works.", frozenset(Role), frozenset(), fails)
        for number in range(4)
    ]
    monkeypatch.setattr("smc_conform.cli.all_checks", lambda: checks)
    with target(tmp_path, "server") as server:
        assert server.stdout is not None
        port = server.stdout.readline().split()[0]
        arguments = ["connect", "127.0.0.1", port, "--directory", str(tmp_path)]
        assert main([*arguments, "--max-failures", "2"]) == 1
    assert "ended at --max-failures 2; 2 of 4 checks have run" in capsys.readouterr().err


# --- comparisons ----------------------------------------------------------------------------------


def report_of(*verdicts: Verdict, **options: object) -> Document:
    results = []
    for number, verdict in enumerate(verdicts, 1):
        check = Check(f"a/1-{number}", "It works.", frozenset(Role), frozenset(), passes)
        results.append((check, Result(check.id, verdict, "seen")))
    return document(replace(OPTIONS, **options), results, 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("new", "code", "text"),
    [
        ((Verdict.PASS, Verdict.PASS), 0, ""),
        ((Verdict.PASS, Verdict.DIFFERS), 0, "a/1-2"),
        ((Verdict.PASS,), 1, "now worse: 1 absent"),
        ((Verdict.FAIL, Verdict.INCONCLUSIVE), 1, "now worse: 1 fail, 1 inconclusive"),
    ],
)
def test_lost_passes_are_worse(
    new: tuple[Verdict, ...], code: int, text: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    paths[0].write_text(json.dumps(report_of(Verdict.PASS, Verdict.PASS)))
    paths[1].write_text(json.dumps(report_of(*new)))
    assert main(["compare", *map(str, paths)]) == code
    assert text in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "text"), [({"role": Role.CLIENT}, "roles"), ({"version": 2}, "versions")]
)
def test_different_runs_are_compared_on_demand(
    change: dict[str, object], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    paths[0].write_text(json.dumps(report_of(Verdict.PASS)))
    paths[1].write_text(json.dumps(report_of(Verdict.PASS, **change)))
    assert main(["compare", *map(str, paths)]) == 2
    assert f"different {text}" in capsys.readouterr().err
    assert main(["compare", "--across", *map(str, paths)]) == 0
