"""The generated diagrams and tables: current, complete, and checked for drift."""

from __future__ import annotations

import shutil
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from scripts.states.__main__ import main
from scripts.states.figures import ANY as ANY_STATE
from scripts.states.figures import FIGURES, Arrow, Box, arrow_edges, figure_svg
from scripts.states.flatten import flatten
from scripts.states.generate import MACHINES
from scripts.states.pages import differences, texts
from scripts.states.picture import ANY, picture, raise_labels, svg_content, svg_shows
from trio_smc.states.engine import Table
from trio_smc.states.tables import CONNECTION

DOCS = Path(__file__).parents[2] / "docs" / "states"
SVG = "{http://www.w3.org/2000/svg}"


def test_committed_files_are_current() -> None:
    assert differences(MACHINES, DOCS) == []


def test_files_are_deterministic() -> None:
    assert texts(MACHINES) == texts(MACHINES)


@pytest.mark.parametrize("name", MACHINES)
def test_every_edge_that_acts_is_in_the_picture(name: str) -> None:
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


@pytest.mark.parametrize("name", MACHINES)
def test_no_arrow_is_drawn_across_the_text_of_another(name: str) -> None:
    """The texts of arrows come after all arrows, each group of lines after its ground."""
    [graph] = ET.parse(DOCS / f"{name}.svg").getroot()
    *parts, labels = graph
    arrows = [part for part in parts if part.get("class") == "edge"]
    assert len(arrows) == len(picture(flatten(MACHINES[name])).arrows) + 1  # that of the start
    assert not [arrow for arrow in arrows if arrow.findall(f".//{SVG}text")]
    assert labels.get("class") == "labels"
    grounds = [part for part in labels if part.tag == f"{SVG}polygon"]
    assert len(grounds) == len(arrows) - 1
    assert labels[0] is grounds[0]


def test_raised_labels_keep_their_order() -> None:
    edge = (
        '<g class="edge"><title>{0}</title><path d="M0 0"/><polygon fill-opacity="0.7"/>'
        "<text>{0}1</text><text>{0}2</text></g>"
    )
    drawn = f'<svg xmlns="{SVG[1:-1]}"><g>{edge.format("a")}{edge.format("b")}</g></svg>'
    raised = raise_labels(drawn)
    assert svg_shows(raised) == svg_shows(drawn)
    *arrows, labels = ET.fromstring(raised)[0]
    assert [[part.tag for part in arrow] for arrow in arrows] == [[f"{SVG}title", f"{SVG}path"]] * 2
    assert [part.text for part in labels] == [None, "a1", "a2", None, "b1", "b2"]


def test_check_finds_each_kind_of_drift(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "states"
    shutil.copytree(DOCS, copy)
    assert main(["--check", str(copy)]) == 0
    mermaid, svg = copy / "connection.mmd", copy / "connection.svg"
    mermaid.write_text(mermaid.read_text().replace("send_done", "send_dome"))
    svg.write_text(svg.read_text().replace(">open_to_application<", "><", 1))
    (copy / "connection.dot").unlink()
    (copy / "old.md").write_text("left over")
    assert main(["--check", str(copy)]) == 1
    report = capsys.readouterr().err
    assert "connection.mmd: differs" in report
    assert "connection.svg: lacks ['open_to_application']" in report
    assert "connection.dot: missing" in report
    assert "old.md: belongs to no machine" in report
    assert "connection.md:" not in report


def test_check_finds_a_stale_label_of_which_the_text_stands_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "states"
    shutil.copytree(DOCS, copy)
    svg = copy / "connection.svg"
    text = svg.read_text(encoding="utf-8")
    fresh, stale = ">peer_abort [else]<", ">peer_abort<"
    assert text.count(fresh) > 1, "the set of texts stays the same"
    assert text.count(stale) > 1
    svg.write_text(text.replace(fresh, stale, 1), encoding="utf-8")
    assert main(["--check", str(copy)]) == 1
    report = capsys.readouterr().err
    assert report.splitlines() == [
        f"{copy}/connection.svg: lacks ['peer_abort [else]'], shows ['peer_abort'] in addition"
    ]


@pytest.mark.skipif(shutil.which("dot") is None, reason="graphviz is not installed")
def test_graphviz_draws_all_of_it(tmp_path: Path) -> None:
    assert main([str(tmp_path)]) == 0
    for name, chart in MACHINES.items():
        svg = (tmp_path / f"{name}.svg").read_text(encoding="utf-8")
        assert svg_shows(svg) == svg_content(flatten(chart))
    drawn = [tmp_path / f"{name}.svg" for name in MACHINES]
    stamps = [path.stat().st_mtime_ns for path in drawn]
    assert main([str(tmp_path)]) == 0
    assert stamps == [path.stat().st_mtime_ns for path in drawn]


def test_without_graphviz_everything_else_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing-here"))
    target = tmp_path / "out"
    assert main([str(target)]) == 2
    assert "apt-get install graphviz" in capsys.readouterr().err
    assert {path.name for path in target.iterdir()} == set(texts(MACHINES))


# --- the RFC's figures -------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_has_the_layout_of_the_rfc(name: str) -> None:
    """Boxes are in rows and columns; arrows start and end at their boxes, or at another arrow."""
    figure = FIGURES[name]
    boxes = figure.boxes
    lefts, tops = ({box.left for box in boxes.values()}, {box.top for box in boxes.values()})
    assert len(lefts) + len(tops) < 2 * len(boxes), "rows and columns"
    for arrow in figure.arrows:
        for (x, y), (u, v) in zip(arrow.path, arrow.path[1:], strict=False):
            assert x == u or y == v, "lines are upright or level"
        start, end = arrow.path[0], arrow.path[-1]
        sources = {"CLOSED" if source == "INIT" else source for source, _ in arrow.ends}
        assert any(on_edge(boxes[source], start) for source in sources), arrow
        targets = {target for _, target in arrow.ends}
        joins = any(between(end, other) for other in figure.arrows if other is not arrow)
        assert joins or any(on_edge(boxes[target], end) for target in targets), arrow


def on_edge(box: Box, point: tuple[int, int]) -> bool:
    x, y = point
    right, bottom = box.left + box.width, box.top + box.height
    upright = x in (box.left, right) and box.top <= y <= bottom
    return upright or (y in (box.top, bottom) and box.left <= x <= right)


def between(point: tuple[int, int], arrow: Arrow) -> bool:
    return any(
        min(x, u) <= point[0] <= max(x, u) and min(y, v) <= point[1] <= max(y, v)
        for (x, y), (u, v) in zip(arrow.path, arrow.path[1:], strict=False)
    )


def test_the_figures_name_every_paragraph_and_state() -> None:
    paragraphs = {
        name: {arrow.paragraph for arrow in figure.arrows} for name, figure in FIGURES.items()
    }
    assert paragraphs["figure22"] == {"2", "3A", "3B", "3C", "3D", "4A", "4B", "4C", "4D"}
    assert paragraphs["figure23"] == {"1A", "1B", "2A", "2B"}
    shown = {state for figure in FIGURES.values() for state in figure.boxes}
    assert shown | {"INIT"} == {*CONNECTION.states, ANY_STATE}


def test_a_figure_cannot_show_an_edge_that_the_table_lacks() -> None:
    figure = FIGURES["figure22"]
    wrong = Arrow("3A", (("ACTIVE", "APPCLOSEWAIT1"),), ((0, 0), (1, 0)), (1, 1))
    with pytest.raises(ValueError, match="no edge leads from ACTIVE"):
        arrow_edges(wrong, figure.section, CONNECTION)
    empty = Table(name="x", initial="a", states=("a",), stopped=(), events=(), edges={}, values={})
    with pytest.raises(ValueError, match="no edge leads"):
        figure_svg(figure, empty)


def test_figure_22_shows_the_events() -> None:
    figure = FIGURES["figure22"]
    expected = {
        arrow.paragraph: {event for event, _ in arrow_edges(arrow, figure.section, CONNECTION)}
        for arrow in figure.arrows
        if not arrow.dashed
    }
    assert expected == {
        "2": {"established"},
        "3A": {"shutdown_wr", "close", "all_sent"},
        "3B": {"peer_done"},
        "3C": {"peer_closed"},
        "3D": {"close"},
        "4A": {"peer_done", "peer_closed"},
        "4B": {"shutdown_wr", "all_sent"},
        "4C": {"close", "all_sent"},
        "4D": {"peer_closed"},
    }
