"""The commands of the README, and the programs in `examples/` and `benchmarks/`, work."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

import trio_smc
from benchmarks import comparison, cpu, limits, machines, report, unmodified
from benchmarks.__main__ import parse
from benchmarks.compared import missing
from benchmarks.transports import BASE, PROXIED, WAKES
from benchmarks.workloads import WORKLOADS, Metric
from tests.timing import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 160
"""Seconds after which a program counts as hung.  Two benchmarks at a time, each with up to nine
processes, took 30 seconds on two busy cores."""

pytestmark = pytest.mark.timeout(LIMIT + 20)


def run(*arguments: str) -> str:
    """Run Python in the project's directory; return its output, or fail with it."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=LIMIT,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_readme_program_runs_over_smc_r() -> None:
    program = re.search(
        r"```python\n(import trio\n.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    assert program is not None
    output = run("-c", program[1])
    assert output.splitlines() == ["bytes travel over smc-r", "b'HELLO'"]


async def test_the_echo_examples_talk() -> None:
    server = await trio.lowlevel.open_process(
        [sys.executable, "-u", "examples/echo_server.py", "0"], cwd=ROOT, stdout=subprocess.PIPE
    )
    assert server.stdout is not None
    try:
        with trio.fail_after(LIMIT):
            output = b""
            while b"\n" not in output:
                output += await server.stdout.receive_some()
            port = output.split()[-1].decode()
            client = await trio.run_process(
                [sys.executable, "examples/echo_client.py", port, "127.0.0.1"],
                cwd=ROOT,
                capture_stdout=True,
            )
    finally:
        # Like Ctrl-C: a killed server could not remove the names of its sockets.
        server.send_signal(signal.SIGINT)
        await server.wait()
        await server.stdout.aclose()
    assert client.stdout == b"hello over smc-r - no fallback\n"


@pytest.fixture(scope="module")
def demonstration() -> str:
    """The output of the demo."""
    return run("-m", "examples.demo", "--mib", "9", "--rounds", "1")


def test_the_demo_moves_a_file_over_smc_r(demonstration: str) -> None:
    output = demonstration
    assert "mode        smc-r\n" in output
    build = "compiled" if trio_smc.__compiled__ else "pure"
    assert f"build       {build}\n" in output
    assert f"variant     {trio_smc.SoftRnic.variant}\n" in output
    assert "4 of 4 copies have it" in output
    [*_, last] = output.split("\n\n")
    verdict = r"On this machine SMC-R is .* for (requests of 64 bytes|streams|files).*\."
    busy = r"; but other programs took \d+% of its processors meanwhile, so try again .*"
    assert re.fullmatch(f"{verdict}({busy})?", last.strip(), re.DOTALL)
    assert "NOT SMC-R" not in output
    ratios = [float(ratio) for ratio in re.findall(r"(\d+\.\d+) times", output)]
    assert len(ratios) == 8
    assert all(ratio > 0 for ratio in ratios)


def test_the_demo_first_compares_with_the_promise_of_the_readme(demonstration: str) -> None:
    """The same programs as in README's table, with their names and in their setting."""
    from examples import demo

    output = demonstration.splitlines()
    first, *lines = output[: output.index("file        9 MiB, pseudo-random")]
    setting = "of README, under trio-smc run, not pinned: times as fast as over TCP"
    assert first == f"programs    {setting}"
    [here] = [line for line in lines if line.startswith("here  ")]
    machine = machines.this_machine()
    shown = ", ".join(str(machine[key]) for key in ("variant", "processor", "processors"))
    assert f" build, software RNIC {shown} processors, " in here
    number = r"\d+\.\d\d"
    titles = [demo.title(name) for name in demo.PROGRAMS]
    in_readme = demo.promises()
    assert list(in_readme) == list(demo.PROGRAMS)
    assert all(re.fullmatch(rf"{number}( to {number})?", text) for text in in_readme.values())
    pairs = zip(titles, in_readme.values(), strict=True)
    text = "; ".join(f"{title}: {ratios}" for title, ratios in pairs)
    assert lines[0] == f"README      {text} (pure build)"
    spread = rf"{number} \({number} to {number}\)"
    assert re.fullmatch(" {12}" + "; ".join(f"{title}: {spread}" for title in titles), lines[-1])
    # README's ranges are those of the measured machines.
    for name in demo.PROGRAMS:
        medians = [
            float(demo.measured_earlier(content["machine"]["processor"])[name])
            for content in machines.load()
        ]
        low, _, high = in_readme[name].partition(" to ")
        assert (float(low), float(high or low)) == (min(medians), max(medians))


def test_the_demo_knows_when_others_take_the_processors() -> None:
    from examples import demo

    hog = [sys.executable, "-c", "while True: pass"]
    others = demo.Others()
    # Not waited for meanwhile, so they count for others, like unrelated processes.
    with contextlib.ExitStack() as stack:
        for _ in range(1 + (os.cpu_count() or 1) // 4):
            process = stack.enter_context(subprocess.Popen(hog))
            stack.callback(process.kill)
        while (share := others.share()) < demo.BUSY:
            time.sleep(0.1)
    assert share <= 1


@pytest.mark.parametrize("terminal", [False, True])
def test_the_demo_shows_the_progress_of_the_programs_on_a_terminal(terminal: bool) -> None:
    command = [
        sys.executable,
        "-c",
        """
from examples import demo
with demo.steps(4) as done:
    for number in range(3):
        done(f"measurement {number}")
""",
    ]
    reader, writer = os.openpty() if terminal else os.pipe()
    with open(reader, "rb", buffering=0) as output:
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
        done = subprocess.run(
            command, cwd=ROOT, stdout=writer, check=True, timeout=LIMIT, env=environment
        )
        assert done.returncode == 0
        os.set_blocking(reader, False)
        text = output.read()
        os.close(writer)
    if terminal:
        assert text is not None
        assert b"measurement 2" in text
        assert b"3/4" in text
    else:
        assert text is None


@pytest.mark.parametrize(("line", "rounds"), [("here  ", "9"), ("moved  ", "2")])
def test_ctrl_c_ends_the_demo_without_a_traceback(line: str, rounds: str) -> None:
    """While the programs run, and while the file is moved; its processes end, too."""
    with subprocess.Popen(
        [sys.executable, "-m", "examples.demo", "--mib", "64", "--rounds", rounds], cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        stop = threading.Timer(LIMIT, process.kill)
        stop.start()
        try:
            seen = next(each for each in process.stdout if each.startswith(line))
            os.killpg(process.pid, signal.SIGINT)
            # The output ends when the last process that may write into it has ended.
            rest = process.stdout.read()
        finally:
            stop.cancel()
            stop.join()
    assert process.wait() == 130, seen + rest
    assert "Traceback" not in rest


def test_the_demo_fails_when_a_copy_differs_or_the_mode_is_tcp(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from examples import demo

    def result(sha256: str) -> list[dict[str, object]]:
        took = {"seconds": 1.0, "processor": 2.0}
        return [
            {"event": "result", "transport": t, "way": w, "sha256": sha256, **took}
            for t in demo.NAMES
            for w in demo.WAYS
        ]

    mode = {"event": "mode", "transport": "smc", "build": "pure", "variant": "native"}
    smc = {**mode, "mode": "smc-r", "fallback": None}
    tcp = {**mode, "mode": "tcp", "fallback": "no RNIC"}
    assert demo.report({}, [smc, *result("aa")], "aa", 1)
    assert not demo.report({}, [smc, *result("bb")], "aa", 1)
    assert demo.used_smc([smc, *result("aa")])
    assert not demo.used_smc([smc, tcp, *result("aa")])
    assert demo.report({}, [smc, tcp, *result("aa")], "aa", 1)
    assert "mode        tcp: no RNIC" in capsys.readouterr().out


def test_the_demo_prints_first_that_it_uses_tcp_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line comes before the file is moved, and no line claims that SMC-R moved it."""
    monkeypatch.setenv("TRIO_SMC_DIRECTORY", "/proc/nowhere")  # no software RNIC opens there
    done = subprocess.run(
        [sys.executable, "-m", "examples.demo", "--mib", "9", "--rounds", "1"], cwd=ROOT,
        capture_output=True, text=True, check=False, timeout=2 * PATIENCE,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert done.stdout.index("NOT SMC-R") < done.stdout.index("moved ")
    assert "the bytes travel over TCP: " in done.stdout
    assert "moved       SMC-R" not in done.stdout
    assert "moved       TCP instead of SMC-R, client to server" in done.stdout
    assert "On this machine SMC-R was not used" in done.stdout


def test_the_last_sentence_of_the_demo() -> None:
    from examples import demo

    def sentence(echo: float, stream: float, files: float, busy: float = 0.0) -> str:
        """The sentence if SMC-R is so many times as fast."""
        values: demo.Values = {
            "echo": {"smc": [(10.0, 1.0)], "tcp": [(10.0 * echo, 1.0)]},  # a time
            "stream-64k": {"smc": [(10.0 * stream, 1.0)], "tcp": [(10.0, 1.0)]},  # a rate
        }
        took = {"smc": 1.0, "tcp": files}
        events: list[dict[str, object]] = [
            {"event": "result", "transport": each, "seconds": took[each]} for each in took
        ]
        return demo.conclusion(values, events, busy)

    assert sentence(2.5, 3.0, 1.0) == (
        "On this machine SMC-R is 2.5x as fast for requests of 64 bytes, 3.0x as fast for streams, "
        "no faster for files."
    )
    assert sentence(0.5, 1.0, 1.5) == (
        "On this machine SMC-R is 1.5x as fast for files, no faster for streams, slower for "
        "requests of 64 bytes (0.5x as fast)."
    )
    # On a busy machine the same sentence says so.
    idle, busy = sentence(2.5, 3.0, 1.0, demo.BUSY), sentence(2.5, 3.0, 1.0, 0.35)
    assert "other programs" not in idle
    assert busy == idle.removesuffix(".") + (
        "; but other programs took 35% of its processors meanwhile, so try again when it has "
        "nothing else to do."
    )
    assert demo.promises(Path("/nowhere")) == {}


@pytest.mark.benchmark
def test_the_benchmark_measures_every_workload(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    picture = tmp_path / "ratios.svg"
    smc = ("smc-r", *WAKES)
    names = ",".join(("tcp", "unix", "uvloop", *smc, "limit", "limit-steps", "limit-ring"))
    options = ("--rounds=1", "--seconds=0.01", f"--transports={names}")
    output = run("-m", "benchmarks", *options, "--json", str(numbers), "--plot", str(picture))
    content = json.loads(numbers.read_text())
    metrics = {metric.name for workload in WORKLOADS.values() for metric in workload.metrics}
    measured: dict[str, set[str]] = {}
    for key, ratio in content["ratios"].items():
        metric, name = key.split(" | ")
        measured.setdefault(name, set()).add(metric)
        assert ratio > 0
    streams = {each for each in metrics if each.startswith(("streaming", "processor time"))}
    round_trips = {each for each in metrics if each.startswith("64 B round trip, p")}
    others = dict.fromkeys(("unix", "uvloop", *smc), metrics)
    limits = {"limit": streams | round_trips, "limit-steps": streams, "limit-ring": streams}
    assert measured == {**others, **limits}
    assert "NOT smc-r" not in output
    assert "opening and accepting" in picture.read_text()


@pytest.mark.benchmark
def test_the_benchmark_measures_unmodified_programs(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    picture = tmp_path / "programs.svg"
    names = ["echo-10", "tls-stream", "anyio", "websocket", "json", "http2", "short-learned"]
    options = ("--short", "--rounds=1", "--seconds=0.01", "--workloads", ",".join(names))
    files = ("--json", str(numbers), "--plot", str(picture), "--compiled", str(ROOT))
    run("-m", "benchmarks", "--programs", *options, *files)
    content = json.loads(numbers.read_text())
    metrics = [metric for name in names for metric in unmodified.WORKLOADS[name].metrics]
    transports = (unmodified.RUN, unmodified.COMPILED)
    assert set(content["ratios"]) == {f"{m.name} | {name}" for m in metrics for name in transports}
    assert all(ratio > 0 for ratio in content["ratios"].values())
    assert not content["about"]["pinned"]
    assert all(f">{metric.name}<" in picture.read_text() for metric in metrics[::2])


@pytest.mark.benchmark
def test_the_benchmark_measures_other_ways_between_processes(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    options = ("--rounds=1", "--seconds=0.01", "--json", str(numbers))
    output = run("-m", "benchmarks", "--comparison", *options)
    content = json.loads(numbers.read_text())
    metrics = [metric.name for name in comparison.USED for metric in WORKLOADS[name].metrics]
    names = {name for name in comparison.TRANSPORTS if not missing(name)} - {BASE}
    assert names >= {"smc-r", "unix", "pipes", "multiprocessing", "shared-memory", "grpc"}
    assert set(content["ratios"]) == {f"{each} | {name}" for each in metrics for name in names}
    assert all(ratio > 0 for ratio in content["ratios"].values())
    left_out = set(comparison.TRANSPORTS) - names - {BASE}
    assert all(f"{name} is left out" in output for name in left_out)
    assert not content["about"]["pinned"]


@pytest.mark.benchmark
def test_the_benchmark_measures_the_cost_of_a_proxy(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    options = ("--rounds=1", "--seconds=0.01", "--workloads=rtt,stream-64k")
    run("-m", "benchmarks", "--proxy", *options, "--json", str(numbers))
    content = json.loads(numbers.read_text())
    metrics = [metric.name for name in ("rtt", "stream-64k") for metric in WORKLOADS[name].metrics]
    assert set(content["ratios"]) == {f"{each} | {name}" for each in metrics for name in PROXIED}
    assert all(ratio > 0 for ratio in content["ratios"].values())
    assert not content["about"]["pinned"]


def test_a_regression_beyond_spread_is_shown() -> None:
    metric = Metric(name="echo", unit="µs", smaller_is_better=True)
    numbers = {"echo": {"tcp": [100.0, 110.0], "it": [50.0, 50.0]}}
    found = report.Comparison(metrics=[metric], runs=[numbers], base="tcp", about={})
    better, same, worse = (
        {"echo | it": report.Earlier(ratio=least + 0.1, least=least, most=least + 0.2)}
        for least in (1.5, 2.2, 2.3)
    )
    assert [report.worse(found, earlier) for earlier in (better, same)] == [[], []]
    assert report.rows(found, same)[1][-1] == "2.30"
    assert report.worse(found, worse) == ["echo | it"]
    assert report.rows(found, worse)[1][-1] == "2.40*"


@pytest.mark.parametrize("measure", [limits.copies, limits.steps])
def test_a_limit_is_measured_although_its_time_is_over(
    measure: Callable[[int, float], list[float]],
) -> None:
    """A busy machine may suspend the process right after its clock has started."""
    assert measure(4096, 0.0)[0] > 0


@pytest.mark.parametrize(
    "content", ["", "not JSON", "[]", "{}", '{"ratios": {"a": "b"}}', "directory"]
)
def test_a_baseline_that_is_none(
    content: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "baseline.json"
    path.mkdir() if content == "directory" else path.write_text(content)
    monkeypatch.setattr("sys.argv", ["benchmarks", "--baseline", str(path)])
    with pytest.raises(SystemExit) as exited:
        parse()
    assert exited.value.code == 2
    assert f"--baseline {path}: " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.benchmark
def test_how_cost_grows(tmp_path: Path) -> None:
    numbers = tmp_path / "growth.json"
    options = ("--most=1", "--repetitions=1", "--parts=connections,links", "--plots", str(tmp_path))
    run("-m", "benchmarks.growth", *options, "--json", str(numbers))
    content = json.loads(numbers.read_text())
    assert set(content) == {"connections", "links"}
    assert all(cost > 0 for part in content.values() for cost in part["1"].values())
    assert "connections" in (tmp_path / "growth-connections.svg").read_text()


def test_the_plots_of_growth_match_the_numbers(tmp_path: Path) -> None:
    """The page has the tables of the file of numbers, and the plots have their titles and axes."""
    docs = ROOT / "docs"
    numbers = docs / "performance" / "growth.json"
    output = run("-m", "benchmarks.growth", "--measured", str(numbers), "--plots", str(tmp_path))
    tables = output.strip().split("\n\n")
    assert len(tables) == len(json.loads(numbers.read_text()))
    page = (docs / "performance.md").read_text()
    assert [table for table in tables if table not in page] == []
    words = {}
    for again in sorted(tmp_path.glob("*.svg")):
        committed = docs / "performance" / again.name
        words[again.stem] = re.findall(r"<text[^>]*>([^<]*)<", again.read_text())
        assert words[again.stem] == re.findall(r"<text[^>]*>([^<]*)<", committed.read_text())
    assert {"Memory of an idle connection", "connections"} <= set(words["growth-memory"])
    assert "size of a ring, bytes" in words["growth-rings"]


@pytest.mark.benchmark
def test_cost_of_link_groups_for_a_server(tmp_path: Path) -> None:
    """Two descriptors each, one for the TCP connection, and a pipe for the first four peers."""
    numbers = tmp_path / "growth.json"
    options = ("--most=10", "--repetitions=1", "--parts=groups")
    run("-m", "benchmarks.growth", *options, "--json", str(numbers))
    groups = json.loads(numbers.read_text())["groups"]
    assert set(groups) == {"1", "10"}
    more = 10 * groups["10"]["descriptors of a group"] - groups["1"]["descriptors of a group"]
    assert 3 <= more / 9 < 4


@pytest.mark.benchmark
def test_several_runs_of_the_benchmark_show_their_spread(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    options = ("--runs=2", "--rounds=1", "--seconds=0.02", "--workloads=rtt", "--both")
    output = run("-m", "benchmarks", *options, "--transports=tcp,smc-r", "--json", str(numbers))
    content = json.loads(numbers.read_text())
    assert output.count("2 x 1 interleaved rounds") == 2
    for part in (content, content["not pinned"]):
        assert len(part["runs"]) == 2
        low, high = part["spread"]["64 B round trip, p50 | smc-r"]
        assert 0 < low <= part["ratios"]["64 B round trip, p50 | smc-r"] <= high


@pytest.mark.benchmark
def test_the_processor_time_of_every_measure() -> None:
    output = run("-m", "benchmarks.cpu", "--repetitions=1", "--transports=tcp,smc-r")
    lines = output.splitlines()[1:]
    assert len(lines) == len(cpu.MEASURES)
    assert all(float(number) > 0 for line in lines for number in line.split()[-2:])
