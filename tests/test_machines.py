"""The files of `benchmarks.machines`."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import pytest

from benchmarks import machines
from benchmarks.report import Comparison, Earlier
from benchmarks.workloads import Metric

ABOUT = {
    "runs": 1, "rounds": 2, "seconds": 0.2, "load_before": 0.1, "python": "3.11", "trio": "0.35",
}  # fmt: skip


def comparison(name: str, *, pinned: bool, faster: float) -> Comparison:
    metric = Metric(name=name, unit="µs", smaller_is_better=True)
    numbers = {name: {"tcp": [10.0, 20.0], "it": [10.0 / faster, 20.0 / faster]}}
    about = {**ABOUT, "pinned": pinned}
    return Comparison(metrics=[metric], runs=[numbers], base="tcp", about=about)


def test_this_machine() -> None:
    machine = machines.this_machine()
    assert machine["processor"]
    assert machine["processors"] >= 1
    json.dumps(machine)


@pytest.mark.parametrize(
    ("cpuinfo", "lscpu", "processor"),
    [
        ("model name\t: AMD EPYC\n", "exit 1", "AMD EPYC"),
        ("CPU part\t: 0xd0c\n", "echo 'Vendor ID: ARM'; echo '  Model name:  Neoverse-N1'",
         "Neoverse-N1"),
        ("CPU part\t: 0xd0c\n", "exit 1", "other"),
    ],
)  # fmt: skip
def test_the_name_of_a_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpuinfo: str, lscpu: str, processor: str
) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    program = tmp_path / "lscpu"
    program.write_text(f"#!/bin/sh\n{lscpu}\n")
    program.chmod(0o755)
    monkeypatch.setattr(machines, "PROCESSORS", tmp_path / "cpuinfo")
    monkeypatch.setattr(platform, "processor", lambda: "other")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert machines.this_machine()["processor"] == processor


def test_a_cache_without_a_size_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, files in enumerate(
        [{"level": "1", "type": "Data", "size": "32K"}, {"level": "2", "type": "Unified"}, {}]
    ):
        index = tmp_path / f"index{number}"
        index.mkdir()
        for name, text in files.items():
            (index / name).write_text(f"{text}\n")
    monkeypatch.setattr(machines, "CACHES", tmp_path)
    assert machines.this_machine()["caches"] == {"L1 data": "32K"}


@pytest.mark.parametrize(
    ("processor", "name"),
    [
        ("Intel(R) Xeon(R) Processor @ 2.10GHz", "intel-xeon-python-3.14"),
        ("Intel(R) Xeon(R) Processor", "intel-xeon-python-3.14"),
        ("AMD EPYC 7R13 Processor", "amd-epyc-7r13-python-3.14"),
        ("../../etc/passwd", "etc-passwd-python-3.14"),
    ],
)
def test_the_name_of_a_file(processor: str, name: str) -> None:
    machine = {"processor": processor, "python": "3.14.0rc1"}
    assert machines.path_of(machine) == machines.DIRECTORY / f"{name}.json"


def test_results_are_saved_and_found_again(tmp_path: Path) -> None:
    found, note = machines.earlier("programs", pinned=False, directory=tmp_path)
    assert found == {}
    assert note.startswith("no earlier results of this kind of machine: ")
    machines.save("programs", [comparison("echo", pinned=False, faster=2)], tmp_path)
    machines.save("programs", [comparison("file", pinned=False, faster=3)], tmp_path)
    both = [comparison("rtt", pinned=pinned, faster=4 + pinned) for pinned in (True, False)]
    path = machines.save("transports", both, tmp_path)
    found, note = machines.earlier("programs", pinned=False, directory=tmp_path)
    assert found == {
        "echo | it": Earlier(ratio=2, least=2, most=2),
        "file | it": Earlier(ratio=3, least=3, most=3),
    }
    assert path.name in note
    for pinned in (True, False):
        found, _ = machines.earlier("transports", pinned=pinned, directory=tmp_path)
        assert found["rtt | it"].ratio == 4 + pinned
    [content] = machines.load(tmp_path)
    assert content["machine"] == machines.this_machine()


def test_results_of_another_python_are_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = machines.save("programs", [comparison("echo", pinned=False, faster=2)], tmp_path)
    other = {**machines.this_machine(), "python": "3.99.1"}
    monkeypatch.setattr(machines, "this_machine", lambda: other)
    assert machines.earlier("programs", pinned=False, directory=tmp_path)[0] == {}
    second = machines.save("programs", [comparison("echo", pinned=False, faster=3)], tmp_path)
    assert first != second
    assert len(machines.load(tmp_path)) == 2


def test_the_files_of_the_repository() -> None:
    for path in machines.DIRECTORY.glob("*.json"):
        assert machines.path_of(json.loads(path.read_text())["machine"]) == path
    for content in machines.load():
        for kind in ("programs", "transports"):
            for part in content.get(kind, {}).values():
                assert all(
                    least <= middle <= most for middle, least, most in part["ratios"].values()
                )


@pytest.mark.parametrize("content", ["[]", "{}", '{"machine": {}}', "not JSON"])
def test_a_file_that_is_none(content: str, tmp_path: Path) -> None:
    (tmp_path / "some.json").write_text(content)
    with pytest.raises(ValueError, match=r".+"):
        machines.load(tmp_path)
