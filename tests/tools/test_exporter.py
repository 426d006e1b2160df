"""Metrics of all processes: `trio-smc exporter` and `trio-smc stats --prometheus`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import yaml
from prometheus_client.parser import text_string_to_metric_families

import trio_smc
from tests.ports import reserved_port
from tests.tools.test_foreign_text import HostileSocket
from tests.tools.test_operating import read_until
from tests.tools.tools_processes import LIMIT, ROOT, one_line, quick_command, running
from trio_smc.tools import metric_help
from trio_smc.tools.client import SHAPES, Snapshot, check_untrusted
from trio_smc.tools.exposition import exposition

EXAMPLES = ROOT / "examples" / "prometheus"


def require_program(program: str) -> None:
    """Skip the test if the program is missing; under `make prometheus`, fail."""
    if not shutil.which(program):
        if os.environ.get("TRIO_SMC_FULL") == "1":
            pytest.fail(f"{program} is not installed (apt-get install prometheus)")
        pytest.skip(f"{program} is not installed (apt-get install prometheus)")


@contextlib.asynccontextmanager
async def running_server(*command: object) -> AsyncIterator[trio.Process]:
    """Run a server; SIGTERM ends the server after the block."""
    process = await trio.lowlevel.open_process(
        [str(each) for each in command], cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        yield process
    finally:
        with trio.CancelScope(shield=True), trio.fail_after(LIMIT):
            process.send_signal(signal.SIGTERM)
            await process.wait()
            await process.stdout.aclose()


@contextlib.asynccontextmanager
async def exporter() -> AsyncIterator[int]:
    """Run an exporter. Yields its port."""
    command = (sys.executable, "-m", "trio_smc.tools", "exporter", "--listen", "127.0.0.1:0")
    async with running_server(*command) as process:
        assert process.stdout is not None
        yield int((await read_until(process.stdout, r"http://127\.0\.0\.1:(\d+)/metrics"))[1])
    assert process.returncode == 0


async def get(port: int, path: str, request: bytes | None = None) -> tuple[int, str]:
    """Return the status and the body of an HTTP response."""
    with trio.fail_after(LIMIT):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            text = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
            await stream.send_all(text if request is None else request)
            answer = b"".join([piece async for piece in stream])
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode()


def values(text: str) -> dict[str, float]:
    """Return all values by metric name and label values, without the label `pid`."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [value for name, value in sorted(sample.labels.items()) if name != "pid"]
            found[" ".join([sample.name, *labels])] = sample.value
    return found


async def test_bad_clients_do_not_disturb_a_scrape() -> None:
    async with running("pair") as peer, exporter() as port, trio.open_nursery() as nursery:
        silent = await trio.open_tcp_stream("127.0.0.1", port)
        for request, status in (
            (b"POST /metrics HTTP/1.1\r\n\r\n", 405), (b"\r\n\r\n", 400), (b"x" * 8193, 400),
            (b"GET /../etc HTTP/1.1\r\n\r\n", 404), (b"\xff\xff \0 \x80\n\n", 405),
        ):  # fmt: skip
            assert (await get(port, "", request))[0] == status
        for _ in range(3):
            resetting = await trio.open_tcp_stream("127.0.0.1", port)
            await resetting.send_all(b"GET /metrics HTTP/1.1\r\n\r\n")
            resetting.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            await resetting.aclose()
        answers: list[tuple[int, str]] = []

        async def scrape() -> None:
            answers.append(await get(port, "/metrics"))

        for _ in range(4):  # at the same time
            nursery.start_soon(scrape)
        while len(answers) < 4:
            await trio.lowlevel.checkpoint()
        await silent.aclose()
        assert [status for status, _ in answers] == [200] * 4
        text = answers[0][1]
        found = values(text)
        assert found["trio_smc_open_connections"] == 2
        assert found["trio_smc_bytes_sent_total"] == 1700
        assert found["trio_smc_client_connections_total"] == 1
        assert found["trio_smc_fallbacks_total local peer-not-capable"] == 1
        assert found["trio_smc_connections_now tcp"] == 1
        assert found["trio_smc_rnic_drained software soft0"] == 0
        python = sys.version.split()[0].rstrip("+")
        assert found[f"trio_smc_build_info {python} {trio_smc.__version__}"] == 1
        assert 'python=""' not in text
        once = await quick_command("stats", "--prometheus")
        assert once.code == 0
        scraped = {name for name in found if "scrape_failures" not in name}
        assert scraped == set(values(once.out))
        os.kill(peer.pid, signal.SIGSTOP)
        try:
            async with trio.open_nursery() as both:  # each waits for the stopped process
                both.start_soon(scrape)
                once = await quick_command("stats", "--prometheus")
        finally:
            os.kill(peer.pid, signal.SIGCONT)
        found = values(answers[-1][1])
        assert (found["trio_smc_silent_processes"], found["trio_smc_scrape_failures_total"]) == (
            1, 1,
        )  # fmt: skip
        assert "trio_smc_open_connections" not in found
        # Otherwise a timer would drop the metrics of all processes.
        assert once.code == 0
        assert values(once.out)["trio_smc_silent_processes"] == 1
        helps = dict(re.findall(r"^# HELP trio_smc_(\w+?)(?:_total)? (.*)$", text, re.MULTILINE))
        assert helps.items() <= metric_help.HELP.items()
        assert all(len(words) > 15 and words.endswith(".") for words in helps.values())


async def test_a_real_prometheus_scrapes_the_exporter(tmp_path: Path) -> None:
    require_program("prometheus")
    with reserved_port() as web:
        await _check_scrape_by_prometheus(tmp_path, web)


async def _check_scrape_by_prometheus(tmp_path: Path, web: int) -> None:
    async with running("pair") as peer, exporter() as port:
        config = yaml.safe_load((EXAMPLES / "prometheus.yml").read_text())
        config["global"]["scrape_interval"] = "1s"
        config["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{port}"]
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
        shutil.copy(EXAMPLES / "alerts.yml", tmp_path)
        options = (
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'db'}",
            f"--web.listen-address=127.0.0.1:{web}",
        )  # fmt: skip
        async with running_server("prometheus", *options):
            found: list[Any] = []
            with trio.fail_after(LIMIT):
                while not found:
                    with contextlib.suppress(OSError, ValueError):  # Prometheus is not ready yet
                        query = "/api/v1/query?query=trio_smc_fallbacks_total"
                        answer = await get(web, query, _http_10(query))
                        found = json.loads(answer[1])["data"]["result"]
                    await trio.sleep(0.1)
            [series] = found
            assert series["metric"]["reason"] == "peer-not-capable"
            assert series["metric"]["pid"] == str(peer.pid)
            assert series["value"][1] == "1"
            rules = json.loads((await get(web, "", _http_10("/api/v1/rules")))[1])
            assert len(rules["data"]["groups"][0]["rules"]) == 6


def _http_10(path: str) -> bytes:
    """An HTTP/1.0 request, whose response is not chunked."""
    return f"GET {path} HTTP/1.0\r\nHost: x\r\n\r\n".encode()


def test_the_examples_are_valid(tmp_path: Path) -> None:
    """promtool accepts the configuration, the alerts and each expression of the dashboard."""
    known = {f"trio_smc_{name}" for name in metric_help.HELP}
    dashboard = json.loads((EXAMPLES / "dashboard.json").read_text())
    targets = [each for panel in dashboard["panels"] for each in panel["targets"]]
    names = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(names)) == len(names) == 10
    alerts = yaml.safe_load((EXAMPLES / "alerts.yml").read_text())
    rules = alerts["groups"][0]["rules"]
    for text in [each["expr"] for each in (*targets, *rules)]:
        for name in re.findall(r"trio_smc_\w+", text):
            assert name.removesuffix("_total") in known, text
    for rule in rules:
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
    require_program("promtool")
    expressions = [
        each["expr"].replace("$__rate_interval", "5m").replace("$instance", ".*")
        for each in targets
    ]
    made = [{"record": f"panel:{n}", "expr": each} for n, each in enumerate(expressions)]
    (tmp_path / "panels.yml").write_text(
        json.dumps({"groups": [{"name": "panels", "rules": made}]})
    )
    for words in (
        ("rules", EXAMPLES / "alerts.yml"), ("rules", tmp_path / "panels.yml"),
        ("config", EXAMPLES / "prometheus.yml"),
    ):  # fmt: skip
        done = subprocess.run(
            ["promtool", "check", *words], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    text = exposition([], silent=0, failures=0)
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_hostile_values_are_escaped_and_bounded() -> None:
    """Strings of a process are escaped, and its number of series is bounded."""
    statistics: dict[str, Any] = {}
    check_untrusted(statistics, SHAPES["statistics"], "statistics")
    hostile = 'a"b\\c\nd} 1\n# TYPE x counter'
    statistics["fallbacks"] = [
        {"origin": hostile * 50, "reason": f"{hostile}{number}", "count": 1}
        for number in range(5000)
    ]
    snapshot = Snapshot(7, "x", None, None, statistics=statistics)
    text = exposition([snapshot], silent=3)
    found = values(text)
    assert found["trio_smc_silent_processes"] == 3
    assert sum(name.startswith("trio_smc_fallbacks_total") for name in found) == 500
    assert "trio_smc_writes_total" not in found  # the value is unknown, and not 0
    assert len(text) < 300_000
    # A large counter keeps all its digits.
    statistics |= {"bytes_sent": (1 << 60) + 1, "fallbacks": None}
    assert f'bytes_sent_total{{pid="7"}} {(1 << 60) + 1}\n' in exposition([snapshot], silent=0)


async def test_the_exporter_reports_an_unusable_directory() -> None:
    """The response has status 500 and the reason; later requests succeed."""
    async with running("pair") as peer, exporter() as port:
        assert (await get(port, "/metrics"))[0] == 200
        private = Path(os.environ["XDG_RUNTIME_DIR"], "trio-smc")
        mode = stat.S_IMODE(os.stat(private).st_mode)
        os.chmod(private, 0o755)
        try:
            status, text = await get(port, "/metrics")
        finally:
            os.chmod(private, mode)
        assert (status, "where only 700 is private" in text) == (500, True)
        found = values((await get(port, "/metrics"))[1])
        assert found["trio_smc_open_connections"] == 2
        assert peer.process.returncode is None


@pytest.fixture
def damaged_stacks() -> Iterator[None]:
    """Two control sockets of this process whose answers have no parts."""
    private = Path(os.environ["XDG_RUNTIME_DIR"], "trio-smc")
    private.mkdir(mode=0o700)
    with contextlib.ExitStack() as exits:
        for name in "12":
            socket_ = HostileSocket(private, name)
            exits.callback(socket_.close)
            socket_.parts = ()
        yield


async def test_a_process_whose_answers_are_all_damaged(damaged_stacks: None) -> None:
    """The process counts as silent, and the scrape still succeeds."""
    async with exporter() as port:
        for scrapes in (1, 2):
            status, text = await get(port, "/metrics")
            assert status == 200, text
            found = values(text)
            assert found["trio_smc_silent_processes"] == 1
            assert found["trio_smc_scrape_failures_total"] == scrapes


async def test_the_exporter_refuses_a_used_port_and_a_missing_directory() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = await quick_command("exporter", "--listen", f"127.0.0.1:{port}")
        assert "cannot listen on 127.0.0.1" in one_line(done)
    done = await quick_command("exporter", "--listen", "127.0.0.1:0", "--directory", "/nowhere")
    assert "/nowhere: no such directory" in one_line(done)
