"""The table of requirements: its data file, and what the check would notice."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.compliance import REQUIREMENTS, Requirement, Section, collect, page, problems, read

SECTIONS = [Section("1.2", "A section", [Requirement("1.2/1", "must", "Do | it.")])]


def test_the_data_file_is_in_order() -> None:
    sections = read(REQUIREMENTS.read_text())
    demands = [each for section in sections for each in section.requirements]
    assert len(demands) > 300
    assert all(each.text.endswith(".") for each in demands)
    assert {"2.2.1/1", "4.8.2/13", "A.4/19", "C.7.1/messages/12", "C.8/4"} <= {
        each.id for each in demands
    }


@pytest.mark.parametrize(
    "text",
    [
        '["1.2"]\n1 = { must = "Do." }',
        '["1.2"]\ntitle = "A"\n1 = { may = "Do." }',
        '["1.2"]\ntitle = "A"\none = { must = "Do." }',
        '["1.2"]\ntitle = "A"\n1 = "Do."',
    ],
    ids=["no title", "level", "number", "shape"],
)
def test_what_is_no_requirement(text: str) -> None:
    with pytest.raises(ValueError, match=r"1\.2"):
        read(text)


def test_unknown_and_uncovered_requirements_are_problems() -> None:
    assert problems(SECTIONS, {"1.2/1": {"tests/test_a.py::test_b"}}) == []
    assert problems(SECTIONS, {}) == ["1.2/1 has no test (must): Do | it."]
    assert problems(SECTIONS, {"1.2/1": {"a"}, "1.2/2": {"b"}}) == ["1.2/2 is no requirement: b"]


def test_where_we_differ_is_not_counted_and_still_needs_a_test() -> None:
    text = '["1.2"]\ntitle = "A section"\n1 = { must = "Do it.", differs = "Nobody does." }'
    sections = read(text)
    assert problems(sections, {}) == ["1.2/1 has no test (must): Do it."]
    made = page(sections, {"1.2/1": {"tests/test_a.py::test_b"}})
    assert "0 of 0 requirements have a test.  In 1 more" in made
    assert "| Do it. **Differs:** Nobody does. | `test_a: test_b` |" in made


def test_the_page_names_the_tests() -> None:
    text = page(SECTIONS, {"1.2/1": {"tests/test_a.py::test_b", "tests/e2e/test_c.py::T::test_d"}})
    assert "| 1.2/1 | must | Do \\| it. | `e2e/test_c: T: test_d`<br>`test_a: test_b` |" in text
    assert "1 of 1 requirements" in text
    assert "**none**" in page(SECTIONS, {})


_MARKED = """
import pytest

pytestmark = pytest.mark.rfc("1.2/1")

@pytest.mark.rfc("1.2/2", "1.2/3")
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
    }


def test_tests_that_cannot_be_collected_are_no_empty_table(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import no_such_module")
    with pytest.raises(RuntimeError, match="no_such_module"):
        collect([str(tmp_path)])
