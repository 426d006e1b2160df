"""Ratios of the benchmarks, and their plots."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from benchmarks import progress, unmodified
from benchmarks.report import ratios
from benchmarks.workloads import Metric

ROOT = Path(__file__).resolve().parents[1]
SVG = "{http://www.w3.org/2000/svg}"
SIZE = 10
"""Points of the letters in the plots."""
DRAW = """
import sys
from pathlib import Path
from benchmarks import plot
names = ["a name that is much longer than half of the plot is wide", "a short one"]
bars = {"A machine": {name: [2.0, 0.5, 3.0] for name in names}}
plot.ranges(Path(sys.argv[1]), "Title", names, bars)
"""


@pytest.mark.parametrize("smaller_is_better", [True, False])
def test_a_ratio_above_1_is_better(smaller_is_better: bool) -> None:
    metric = Metric(name="x", unit="s", smaller_is_better=smaller_is_better)
    good, bad = (1.0, 4.0) if smaller_is_better else (4.0, 1.0)
    assert ratios(metric, [bad, good], [good, bad]) == [4.0, 0.25]


def test_ratios_of_values_too_small_to_measure() -> None:
    metric = Metric(name="x", unit="s", smaller_is_better=True)
    assert ratios(metric, [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]) == [math.inf, 1.0, 0.0]


def test_only_workloads_with_tls_need_trustme(monkeypatch: pytest.MonkeyPatch) -> None:
    with unmodified.working_directory(["echo", "tls-echo"]) as directory:
        assert sorted(each.name for each in directory.iterdir()) == ["ca.pem", "server.pem"]
    monkeypatch.setitem(sys.modules, "trustme", None)
    with unmodified.working_directory(["echo", "anyio", "file", "queue"]) as directory:
        assert list(directory.iterdir()) == []
    with pytest.raises(ImportError), unmodified.working_directory(["http2"]):
        pytest.fail("this server needs certificates")


def test_a_workload_has_the_name_that_the_tables_print() -> None:
    for key, workload in unmodified.WORKLOADS.items():
        for name in (key, *(metric.name for metric in workload.metrics)):
            assert unmodified.keys_of(name) == [key]
    assert unmodified.keys_of("nope") == []


def test_a_busy_machine_gets_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (1.254, 0.0, 0.0))
    assert progress.load_before() == 1.25
    output = capsys.readouterr()
    assert output.err.startswith("warning: other programs keep this machine busy (load 1.25)")
    monkeypatch.setattr("os.getloadavg", lambda: (0.5, 9.0, 9.0))
    assert progress.load_before() == 0.5
    assert (output.out, *capsys.readouterr()) == ("", "", "")


def test_progress_is_shown_in_a_pipe_and_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in ("round 1 of 2", "round 2 of 2"):
        progress.show(text)
    progress.clear()
    assert capsys.readouterr() == ("", "round 1 of 2\nround 2 of 2\n")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    progress.show("round 1 of 2")
    progress.clear()
    assert re.fullmatch(r"round 1 of 2 +\r +\r", capsys.readouterr().err)


def test_no_name_crosses_the_line_of_tcp(tmp_path: Path) -> None:
    """In the plot of the page, and in one with long names, the line is only beside the bars."""
    made = tmp_path / "made.svg"
    # matplotlib leaves its fonts open, so another process draws.
    subprocess.run([sys.executable, "-c", DRAW, made], cwd=ROOT, check=True)
    for path, least in ((ROOT / "docs/figures/programs.svg", 20), (made, 2)):
        tree = ET.parse(path)
        [base] = tree.iterfind(f".//{SVG}g[@id='base']")
        lines = []
        for each in base.iterfind(f"{SVG}path"):
            numbers = [float(word) for word in re.findall(r"[\d.]+", each.attrib["d"])]
            [x, above, same, below] = numbers
            assert x == same
            lines.append((above, below))
        baselines = [
            float(each.attrib["y"])
            for each in tree.iter(f"{SVG}text")
            if "text-anchor: start" in each.attrib["style"]
        ]
        assert len(lines) >= least
        for y in baselines:
            # The letters of 10 points reach from the baseline up to their size, and a bit below.
            top, bottom = y - SIZE, y + SIZE / 4
            assert all(below < top or bottom < above for above, below in lines), (path, y)
