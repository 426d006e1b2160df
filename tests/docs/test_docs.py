"""The pages: generated ones are up to date, and the checker of links notices broken ones."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import itertools
import json
import re
import subprocess
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import trio_smc
from benchmarks import comparison, machines, plot, unmodified
from scripts import check_docs, performance_page, reasons_page, rooms
from trio_smc.tools.commands import load

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
GOOD = '<h1 id="top">A page</h1><a href="#top">up</a><a href="other.html#there">on</a>'
OTHER = '<h1 id="there">Another</h1><img src="picture.svg"><a href="https://example.org/">out</a>'


def test_the_page_of_reasons_is_as_generated() -> None:
    assert reasons_page.main(["--check"]) == 0, "python -m scripts.reasons_page"


def test_every_reason_is_explained_in_the_code() -> None:
    assert set(reasons_page.explanations()) == set(trio_smc.FallbackReason)


def site(directory: Path, **changes: str) -> Path:
    """Two pages and a picture."""
    pages = {"index.html": GOOD, "other.html": OTHER, "picture.svg": "<svg/>"}
    for name, text in (pages | changes).items():
        (directory / name).write_text(text)
    return directory


def test_good_links(tmp_path: Path) -> None:
    assert check_docs.link_problems(site(tmp_path)) == []
    assert check_docs.main([str(tmp_path), "--no-browser"]) == 0


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('<a href="nowhere.html">x</a>', "nowhere.html leads nowhere"),
        ('<a href="#nowhere">x</a>', "#nowhere has no such anchor"),
        ('<a href="other.html#here">x</a>', "other.html#here has no such anchor"),
        ('<img src="missing.svg">', "missing.svg leads nowhere"),
        ('<a href="../elsewhere.html">x</a>', "../elsewhere.html leads nowhere"),
        ('<script src="https://example.org/x.js"></script>', "from the network"),
        ('<link rel="stylesheet" href="//example.org/x.css">', "from the network"),
    ],
)
def test_bad_links(
    tmp_path: Path, text: str, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = site(tmp_path / "", **{"index.html": GOOD + text})
    [line] = check_docs.link_problems(directory)
    assert line.startswith("index.html: ")
    assert line.endswith(wrong)
    assert check_docs.main([str(directory), "--no-browser"]) == 1
    assert line in capsys.readouterr().out


def test_no_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_docs.main([str(tmp_path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "has no pages" in line


def test_the_reference_names_everything_public() -> None:
    text = (DOCS / "api.md").read_text()
    named = set(re.findall(r"^\.\. auto\w+:: (?:trio_smc\.)?(\w+)$", text, re.MULTILINE))
    assert named >= set(trio_smc.__all__)


def test_the_page_about_stability_names_everything_public() -> None:
    """Each group of the reference has a row, and the row has each name of the group."""
    reference, page = ((DOCS / f"{name}.md").read_text() for name in ("api", "stability"))
    groups = re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", reference, re.MULTILINE | re.DOTALL)
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|.*\|$", page, re.MULTILINE))
    assert len(groups) > 10
    public = set()
    for group, text in groups:
        names = re.findall(r"^\.\. auto\w+:: trio_smc\.(\S+)$", text, re.MULTILINE)
        short = {re.sub(r"^adapters\.(\w+)\.\w+$", r"trio_smc.adapters.\1", name) for name in names}
        short = {f"trio_smc.{name}" if name.startswith("tools.") else name for name in short}
        assert set(re.findall(r"`([\w.]+)`", rows[group])) == short
        public |= set(names)
    assert public >= set(trio_smc.__all__)


def test_the_page_about_stability_names_each_command_with_json() -> None:
    page = (DOCS / "stability.md").read_text()
    [row] = re.findall(r"^\| `--json` of ([^|]+)\|", page, re.MULTILINE)
    with_json = set()
    for command in load():
        parser = argparse.ArgumentParser()
        command.configure(parser)
        if "--json" in parser.format_help():
            with_json.add(command.NAME)
    assert set(re.findall(r"`(\w+)`", row)) == with_json


@pytest.mark.parametrize("source", sorted((DOCS / "figures").glob("*.dot")), ids=lambda p: p.stem)
def test_drawn_figures_match_their_source(source: Path) -> None:
    """The texts of the drawing are those of dot; the places may differ."""
    drawn = source.with_suffix(".svg").read_text()
    again = subprocess.run(["dot", "-Tsvg", source], capture_output=True, check=True, text=True)
    assert words_of(drawn) == words_of(again.stdout), "make figures"


def words_of(svg: str) -> list[str]:
    """The titles and texts of a drawing, in order."""
    return re.findall(r"<(?:text|title)[^>]*>([^<]*)<", svg)


def test_the_numbers_of_the_pages_are_measured() -> None:
    assert performance_page.main(["--check"]) == 0, "make performance"


def test_each_program_belongs_to_one_kind_of_the_summary() -> None:
    names = [name for kind in performance_page.SUMMARY.values() for name in kind]
    assert sorted(names) == sorted(unmodified.WORKLOADS)


def machine(processor: str, ratio: float) -> dict[str, Any]:
    """The content of a file of a machine on which everything is ``ratio`` times better."""
    metrics = [metric for each in unmodified.WORKLOADS.values() for metric in each.metrics]
    ratios = {
        f"{each.name} | {unmodified.RUN}": [ratio, ratio - 0.1, ratio + 0.1] for each in metrics
    }
    about = {"runs": 1, "rounds": 3, "seconds": 0.2, "load_before": 0.1}
    return {
        "machine": {
            "processor": processor, "processors": 2, "caches": {"L2 unified": "2048K"},
            "kernel": "6.18", "python": "3.11.7", "trio": "0.35.0",
        },
        "programs": {"not pinned": {"about": about, "ratios": ratios}},
        "transports": {"pinned": {"about": about, "ratios": {"streaming | smc-r": [2, 1, 3]}}},
    }  # fmt: skip


def test_the_pages_show_ranges_over_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = tmp_path / "machines"
    measured.mkdir()
    for processor, ratio in (("One CPU", 1.5), ("Other CPU", 2.5)):
        content = machine(processor, ratio)
        machines.path_of(content["machine"], measured).write_text(json.dumps(content))
    monkeypatch.setattr(machines, "load", partial(machines.load, measured))
    monkeypatch.setattr(comparison, "load", partial(list[dict[str, Any]], [compared()]))
    for name in ("README", "PAGE", "HELPS", "COMPARISON"):
        original = getattr(performance_page, name)
        copy = tmp_path / original.name
        copy.write_text(original.read_text())
        monkeypatch.setattr(performance_page, name, copy)
    # test_documents.py checks the drawings; matplotlib keeps fonts open.
    drawn = []
    monkeypatch.setattr(plot, "ranges", lambda path, *_: drawn.append(path.name))
    assert performance_page.main(["--check"]) == 1
    assert performance_page.main([]) == 0
    assert performance_page.main(["--check"]) == 0
    assert drawn == ["programs.svg", "transports-pinned.svg"]
    for page in ("README.md", "when-it-helps.md"):
        lines = (tmp_path / page).read_text().splitlines()
        for kind in performance_page.SUMMARY:
            assert f"| {kind} | 1.50 to 2.50 | 1.50 to 2.50 |" in lines
    lines = (tmp_path / "when-it-helps.md").read_text().splitlines()
    for workload in unmodified.WORKLOADS.values():
        assert f"| {workload.metrics[0].name} | 1.50 to 2.50 | 1.50 to 2.50 |" in lines
    lines = (tmp_path / "performance.md").read_text().splitlines()
    for workload in unmodified.WORKLOADS.values():
        cells = ["**1.50** (1.40 to 1.60)"] * 2 + ["**2.50** (2.40 to 2.60)"] * 2
        assert f"| {' | '.join([workload.metrics[0].name, *cells])} |" in lines


def compared() -> dict[str, Any]:
    """The content of a file of the comparison: two transports, one metric."""
    metric = "64 B round trip, p50"
    return {
        "machine": machine("Other CPU", 1)["machine"],
        "about": {
            "runs": 1, "rounds": 9, "seconds": 0.2, "pinned": False,
            "load_before": 0.5, "load_after": 2.5,
        },
        "versions": {"trio": "0.35.0", "grpcio": "1.85.3"},
        "medians": {f"{metric} | tcp": 41.26, f"{metric} | unix": 20.6},
        "ratios": {f"{metric} | tcp": [1, 1, 1], f"{metric} | unix": [2.0, 1.9, 2.25]},
    }  # fmt: skip


def test_the_table_of_other_ways() -> None:
    about, _, head, _, *rows = comparison.table([compared()]).splitlines()
    assert about == (
        "Other CPU, 2 processors, Linux 6.18, Python 3.11.7, trio 0.35.0, grpcio 1.85.3; "
        "1 x 9 interleaved rounds of 0.2 s, not pinned to cores; load 0.5 before and 2.5 after."
    )
    assert head.startswith("| | round trip of 64 B | requests, 10 connections |")
    assert rows == [
        "| TCP, Trio | 41.3 µs |  |  |  |  |  |",
        "| Unix socket, Trio | **2.00** (1.90–2.25) |  |  |  |  |  |",
    ]


def test_numbers_of_a_busy_machine_are_called_rough() -> None:
    content = compared()
    content["about"]["load_before"] = 3.2
    about = comparison.table([content]).splitlines()[0]
    assert about.endswith(" Other programs used the processors, too: these numbers are rough.")


def test_the_files_of_the_comparison_have_every_transport() -> None:
    contents = comparison.load()
    assert contents
    for content in contents:
        measured = {key.partition(" | ")[2] for key in content["ratios"]}
        assert measured >= set(comparison.TRANSPORTS) - {"ucx"}
        assert all(low <= middle <= high for middle, low, high in content["ratios"].values())


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_to_files_lead_somewhere(name: str) -> None:
    """scripts/check_docs.py follows the links of the pages."""
    links = re.findall(r"\]\(([^)#]+)", (ROOT / name).read_text())
    lost = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert lost == []


def test_lines_of_code_are_counted_without_prose() -> None:
    text = (
        '"""A module.\n\nMore of it.\n"""\n\n# A comment.\nimport ast  # another\n\nLIMIT = 3\n'
        '"""The limit."""\n\ndef f() -> str:\n    """No code."""\n    return """a\n\nb"""\n'
    )
    assert rooms.code_lines(text) == 6


def test_the_map_of_the_rooms_is_that_of_the_import_rules() -> None:
    assert rooms.main(["--check"]) == 0, "make rooms"


def test_the_map_notices_another_house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    turned = text.replace('"failover",\n    "rendezvous",', '"rendezvous",\n    "failover",')
    assert turned != text
    assert rooms.table(rooms.read(turned)) != rooms.table(rooms.read(text))
    assert rooms.drawing(rooms.read(turned)) != rooms.drawing(rooms.read(text))
    with pytest.raises(ValueError, match="does not name all rooms"):
        rooms.read(text.replace("exhaustive = true", "exhaustive = false"))
    stale = tmp_path / "CONTRIBUTING.md"
    stale.write_text(rooms.PAGE.read_text().replace("`trio_smc/rnic/`", "`trio_smc/cards/`"))
    monkeypatch.setattr(rooms, "PAGE", stale)
    assert rooms.main(["--check"]) == 1


def test_the_rule_on_imports_of_the_package_itself_names_each_other_room() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    contracts = tomllib.loads(text)["tool"]["importlinter"]["contracts"]
    [named] = [each["source_modules"] for each in contracts if each["id"] == "root"]
    expected = set()
    for room in itertools.chain.from_iterable(rooms.read(text).floors):
        if room not in ("tools", "adapters"):
            expected.add(f"trio_smc.{room}")
            if (ROOT / "trio_smc" / room).is_dir():
                expected.add(f"trio_smc.{room}.**")
    assert set(named) == expected


def test_files_that_pages_name_are_there() -> None:
    pages = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *DOCS.rglob("*.dot")]
    named = {
        path
        for page in pages
        for path in re.findall(r"\b(?:trio_smc|tests|scripts|benchmarks|examples)/[\w./-]*\w/?",
                               page.read_text())
    }  # fmt: skip
    assert len(named) > 50
    assert sorted(path for path in named if not (ROOT / path).exists()) == []


def test_functions_that_how_it_works_names_are_there() -> None:
    """A function stands behind its file: "`trio_smc/x.py`: `Class.method`, `Class.other`"."""
    text = (DOCS / "how-it-works.md").read_text()
    found = re.findall(r"`(trio_smc/[\w/]+\.py)`: (`[\w.]+`(?:, `[\w.]+`)*)", text)
    functions = [(path, name) for path, names in found for name in re.findall(r"[\w.]+", names)]
    assert len(functions) > 15
    missing = [
        (path, name)
        for path, name in functions
        if not has_function(ast.parse((ROOT / path).read_text()), name.split("."))
    ]
    assert missing == []


def has_function(node: ast.AST, names: list[str]) -> bool:
    """True if a module or class defines the function, by the names of its classes and its own."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return not names or any(
        has_function(each, names[1:])
        for each in ast.iter_child_nodes(node)
        if isinstance(each, kinds) and each.name == names[0]
    )


def test_the_tests_that_the_security_page_names_are_there() -> None:
    """Each word of a selection (`-k`) is part of a name in the file that stands before it."""
    named = re.findall(r'`(tests/\S+\.py)(?: -k (?:"([^"`]+)"|([^"` ]+)))?`',
                       (DOCS / "security.md").read_text())  # fmt: skip
    assert len(named) > 40
    missing = [
        (path, word)
        for path, several, one in named
        for word in re.split(" or | and ", several or one)
        if word.lower() not in (ROOT / path).read_text().lower()
    ]
    assert missing == []


def test_every_page_is_in_the_contents() -> None:
    contents = (DOCS / "index.md").read_text()
    trees = "\n".join(re.findall(r"```{toctree}\n(.*?)```", contents, re.DOTALL))
    listed = set(re.findall(r"^(?!:)(\S+)$", trees, re.MULTILINE))
    # A directory with an index of its own is listed by this index.
    pages = {
        page.relative_to(DOCS).with_suffix("").as_posix()
        for page in DOCS.rglob("*.md")
        if page.stem == "index" or not (page.parent / "index.md").exists() or page.parent == DOCS
    }
    assert listed == pages - {"index"}


def all_pages() -> str:
    """All text that a reader reads."""
    pages = [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
        *DOCS.glob("*.md"),
    ]
    return "\n".join(page.read_text() for page in pages)


def test_commands_that_pages_name_are_there() -> None:
    text = all_pages()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`|^    )make ([a-z-]+)", text, re.MULTILINE))
    assert len(named) > 10
    assert named <= targets
    ours = r"python -m ((?:benchmarks|examples|scripts|tests|trio_smc)(?:\.\w+)*)"
    modules = set(re.findall(ours, text))
    assert len(modules) > 10
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []
    commands = set(re.findall(r"(?:`|^    )trio-smc ([a-z]+)", text, re.MULTILINE))
    assert len(commands) > 10
    assert commands <= {command.NAME for command in load()}


def test_settings_that_the_operating_guide_shows(tmp_path: Path) -> None:
    text = (DOCS / "operating.md").read_text()
    [block] = re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "smc.toml").write_text(block)
    assert trio_smc.load_config(tmp_path / "smc.toml") != trio_smc.Config()
    times = re.findall(r"`(\w+)` (\d+) s\b", text)
    assert len(times) > 5
    assert [(name, getattr(trio_smc.Config(), name)) for name, _ in times] == [
        (name, float(seconds)) for name, seconds in times
    ]


def test_python_on_the_pages_can_be_parsed() -> None:
    found = 0
    for page in [ROOT / "README.md", *DOCS.glob("*.md")]:
        for block in re.findall(
            r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL
        ):
            compile(block, page.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            found += 1
    assert found > 5
