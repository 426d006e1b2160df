"""The table of requirements: its data file, and what the check would notice."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.compliance import (
    PAGES,
    RFC,
    VERSION_2,
    Requirement,
    Section,
    collect,
    page,
    problems,
    read,
)

SECTIONS = [Section("1.2", "A section", [Requirement("1.2/1", "must", "Do | it.")])]


def test_the_data_file_is_in_order() -> None:
    sections = read(RFC.requirements.read_text())
    demands = [each for section in sections for each in section.requirements]
    assert len(demands) > 300
    assert all(each.text.endswith(".") for each in demands)
    assert {"2.2.1/1", "4.8.2/13", "A.4/19", "C.7.1/messages/12", "C.8/4"} <= {
        each.id for each in demands
    }


def test_the_data_file_of_version_2_is_in_order() -> None:
    sections = read(VERSION_2.requirements.read_text())
    demands = [each for section in sections for each in section.requirements]
    assert len(demands) > 60
    assert all(each.text.endswith(".") and each.source for each in demands)
    assert all(each.id.startswith("v2.") for each in demands)


def test_no_id_is_on_two_pages() -> None:
    ids = [each.id for about in PAGES for section in read(about.requirements.read_text())
           for each in section.requirements]  # fmt: skip
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    "text",
    [
        '["1.2"]\n1 = { must = "Do." }',
        '["1.2"]\ntitle = "A"\n1 = { may = "Do." }',
        '["1.2"]\ntitle = "A"\none = { must = "Do." }',
        '["1.2"]\ntitle = "A"\n1 = "Do."',
        '["1.2"]\ntitle = "A"\n1 = { must = "Do.", source = "heard" }',
    ],
    ids=["no title", "level", "number", "shape", "source"],
)
def test_invalid_requirements_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"1\.2"):
        read(text)


def test_unknown_and_uncovered_requirements_are_problems() -> None:
    assert problems(SECTIONS, {"1.2/1": {"tests/test_a.py::test_b"}}) == []
    assert problems(SECTIONS, {}) == ["1.2/1 has no test (must): Do | it."]
    assert problems(SECTIONS, {"1.2/1": {"a"}, "1.2/2": {"b"}}) == ["1.2/2 is no requirement: b"]


def test_where_we_differ_is_not_counted_and_still_needs_a_test() -> None:
    text = '["1.2"]\ntitle = "A section"\n1 = { must = "Do it.", differs = "It cannot." }'
    sections = read(text)
    assert problems(sections, {}) == ["1.2/1 has no test (must): Do it."]
    made = page(sections, {"1.2/1": {"tests/test_a.py::test_b"}})
    assert "0 of 0 requirements have a test.  In 1 more" in made
    assert "| Do it. **Differs:** It cannot. | `test_a: test_b` |" in made


def test_the_page_names_the_tests() -> None:
    text = page(SECTIONS, {"1.2/1": {"tests/test_a.py::test_b", "tests/e2e/test_c.py::T::test_d"}})
    assert "| 1.2/1 | must | Do \\| it. | `e2e/test_c: T: test_d`<br>`test_a: test_b` |" in text
    assert "1 of 1 requirements" in text
    assert "**none**" in page(SECTIONS, {})


def test_the_page_names_the_sources() -> None:
    sections = read('["v2.1"]\ntitle = "A"\n1 = { must = "Do it.", source = "tried" }')
    made = page(sections, {"v2.1/1": {"tests/test_a.py::test_b"}}, VERSION_2)
    assert "| id | level | requirement | source | tests |\n|---|---|---|---|---|\n" in made
    assert "| v2.1/1 | must | Do it. | tried | `test_a: test_b` |" in made
    assert made.startswith("# Compliance with SMC-R version 2\n")


_MARKED = """
import pytest

pytestmark = pytest.mark.rfc("1.2/1")

@pytest.mark.rfc("1.2/2", "1.2/3")
@pytest.mark.v2("v2.1/1")
def test_one():
    pass

@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.rfc("1.2/4"))])
def test_two(number):
    pass
"""


def test_markers_of_modules_tests_and_parameters_are_collected(tmp_path: Path) -> None:
    (tmp_path / "test_marked.py").write_text(_MARKED)
    tests = collect([str(tmp_path)])
    names = {key: sorted(name.split("::")[1] for name in names) for key, names in tests.items()}
    assert names == {
        "1.2/1": ["test_one", "test_two"],
        "1.2/2": ["test_one"],
        "1.2/3": ["test_one"],
        "1.2/4": ["test_two"],
        "v2.1/1": ["test_one"],
    }


def test_tests_that_cannot_be_collected_are_no_empty_table(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import no_such_module")
    with pytest.raises(RuntimeError, match="no_such_module"):
        collect([str(tmp_path)])
