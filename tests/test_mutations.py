"""The list of equivalent mutations fits the tree; each way not to fit is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import mutations
from scripts.mutations import Equivalent

ENTRY = Equivalent(("wire/cdc.py",), "one = 1", "one = 2", "it is not used")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "wire").mkdir()
    (tmp_path / "wire" / "cdc.py").write_text("if True:\n    one = 1\nlong = (\n    2\n)\n")
    return tmp_path


def test_the_list_fits_the_tree(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutations.main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("old", ["one = 1", "long = ( 2 )", "long = ("])
def test_a_line_is_found_without_its_indentation(package: Path, old: str) -> None:
    assert list(mutations.misfits([ENTRY._replace(old=old)], package)) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"old": "one = 3"}, "has no line 'one = 3'"),
        ({"old": "one"}, "has no line 'one'"),
        ({"old": "one = 2"}, "is no mutation"),
        ({"modules": ("wire/llc.py",)}, "wire/llc.py: does not exist"),
        ({"modules": ("config/config.py",)}, "config/config.py: is in no room"),
        ({"modules": ()}, "needs a module"),
        ({"why": ""}, "needs a module and a reason"),
    ],
)
def test_an_entry_that_does_not_fit_is_refused(
    package: Path, change: dict[str, object], message: str
) -> None:
    found = list(mutations.misfits([ENTRY._replace(**change)], package))  # type: ignore[arg-type]
    assert any(message in each for each in found), found


def test_an_entry_is_listed_once(package: Path) -> None:
    [found] = mutations.misfits([ENTRY, ENTRY], package)
    assert "listed twice" in found


def test_a_list_that_does_not_fit_fails_the_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is mutated."""
    path = tmp_path / "mutations.toml"
    path.write_text('[[equivalent]]\nmodules = ["wire/cdc.py"]\nold = "a"\nnew = "b"\nwhy = "c"\n')
    monkeypatch.setattr(mutations, "LIST", path)
    assert mutations.main([]) == 1
    assert capsys.readouterr().out == "mutations.toml: wire/cdc.py: has no line 'a'\n"
