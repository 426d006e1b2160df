"""The generated diagrams and tables: current, complete, and checked for drift."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import trio_smc.states
from trio_smc.states import MACHINES
from trio_smc.states.__main__ import main
from trio_smc.states.engine import flatten
from trio_smc.states.picture import ANY, picture, svg_content, svg_shows
from trio_smc.states.render import differences, texts

DOCS = Path(trio_smc.states.__file__).parents[2] / "docs" / "states"


def test_committed_files_are_current() -> None:
    assert differences(MACHINES, DOCS) == []


def test_files_are_deterministic() -> None:
    assert texts(MACHINES) == texts(MACHINES)


@pytest.mark.parametrize("name", MACHINES)
def test_nothing_that_happens_is_left_out_of_the_picture(name: str) -> None:
    table = flatten(MACHINES[name])
    drawn = picture(table)
    for (state, event), row in table.edges.items():
        for edge in row:
            if edge.ignored:
                continue
            labels = drawn.inside[state] if edge.internal else ()
            for source in () if edge.internal else (state, ANY):
                labels += drawn.arrows.get((source, edge.target), ())
            heads = {head for label in labels for head in label.heads}
            assert any(head.split(" ")[0] == event for head in heads), (state, event)


@pytest.mark.parametrize("name", MACHINES)
def test_the_page_lists_every_edge_with_its_paragraph(name: str) -> None:
    table = flatten(MACHINES[name])
    text = texts(MACHINES)[f"{name}.md"]
    sections = dict(
        part.split("\n", 1) for part in text.split("## Every edge")[1].split("\n### ")[1:]
    )
    assert list(sections) == list(table.states)
    for state, section in sections.items():
        rows = [line for line in section.splitlines() if line.startswith("| `")]
        edges = [(e, edge) for e in table.events for edge in table.edges.get((state, e), ())]
        assert len(rows) == len(edges)
        for row, (event, edge) in zip(rows, edges, strict=True):
            cells = [cell.strip() for cell in row.strip("|").split(" | ")]
            assert cells[0] == f"`{event}`"
            assert cells[1] == " ".join(f"`{guard}`" for guard in edge.guards)
            assert cells[2] == " ".join(f"`{action}`" for action in edge.actions)
            assert cells[3] == ("*ignored*" if edge.ignored else
                                "*stays*" if edge.internal else edge.target)  # fmt: skip
            assert cells[4] == edge.source


def test_check_finds_each_kind_of_drift(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "states"
    shutil.copytree(DOCS, copy)
    assert main(["--check", str(copy)]) == 0
    mermaid, svg = copy / "connection.mmd", copy / "connection.svg"
    mermaid.write_text(mermaid.read_text().replace("send_done", "send_dome"))
    svg.write_text(svg.read_text().replace(">wake_receivers<", "><"))
    (copy / "connection.dot").unlink()
    (copy / "old.md").write_text("left over")
    assert main(["--check", str(copy)]) == 1
    report = capsys.readouterr().err
    assert "connection.mmd: differs" in report
    assert "connection.svg: lacks ['wake_receivers']" in report
    assert "connection.dot: missing" in report
    assert "old.md: belongs to no machine" in report
    assert "connection.md:" not in report


@pytest.mark.skipif(shutil.which("dot") is None, reason="graphviz is not installed")
def test_graphviz_draws_all_of_it(tmp_path: Path) -> None:
    assert main([str(tmp_path)]) == 0
    for name, chart in MACHINES.items():
        svg = (tmp_path / f"{name}.svg").read_text(encoding="utf-8")
        assert svg_shows(svg) == svg_content(flatten(chart))
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.svg")}
    assert main([str(tmp_path)]) == 0
    assert stamps == {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.svg")}


def test_without_graphviz_everything_else_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing-here"))
    target = tmp_path / "out"
    assert main([str(target)]) == 2
    assert "apt-get install graphviz" in capsys.readouterr().err
    assert {path.name for path in target.iterdir()} == set(texts(MACHINES))
