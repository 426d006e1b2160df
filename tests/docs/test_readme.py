"""The commands of README, tutorial and troubleshooting, unchanged, as a newcomer runs them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from tests.docs.document_steps import ROOT, Walk, steps_of
from tests.e2e.test_careless import clear_directory
from tests.ports import reserved_port

PAGES = [ROOT / "README.md", ROOT / "docs" / "tutorial.md", ROOT / "docs" / "troubleshooting.md"]
FIVE_MINUTES = 300.0


@pytest.fixture
def ports() -> Iterator[dict[str, str]]:
    """Free ports in place of those of the pages."""
    with reserved_port() as one, reserved_port() as two:
        yield {"7000": str(one), "8000": str(two)}


@pytest.mark.full
@pytest.mark.timeout(180)  # a dozen processes, each of which starts Python
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
async def test_the_steps_of_a_page(page: Path, tmp_path: Path, ports: dict[str, str]) -> None:
    walk = Walk(tmp_path, fresh=False, ports=ports)
    await walk.go(steps_of(page))
    assert walk.count >= 4
    await clear_directory()  # removes the files of killed processes


@pytest.mark.full
@pytest.mark.timeout(2 * FIVE_MINUTES)
async def test_a_newcomer_with_nothing_but_the_readme(
    tmp_path: Path, ports: dict[str, str]
) -> None:
    """In a copy of the project and a new environment, in under five minutes."""
    clone = tmp_path / "clone"
    shutil.copytree(
        ROOT, clone, ignore=shutil.ignore_patterns(".*", "build", "__pycache__"), symlinks=True
    )
    steps = steps_of(PAGES[0])
    assert [step.what for step in steps].count("install") == 1
    start = trio.current_time()
    await Walk(clone, fresh=True, ports=ports).go(steps)
    assert trio.current_time() - start < FIVE_MINUTES


def test_the_walk_notices_output_that_is_not_shown(tmp_path: Path, ports: dict[str, str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- step: run -->\n```sh\necho 17 apples\n```\n\n<!-- shows -->\n```text\n4 pears\n```\n"
    )
    with pytest.RaisesGroup(pytest.RaisesExc(AssertionError, match="17 apples")):
        trio.run(Walk(tmp_path, fresh=False, ports=ports).go, steps_of(page))


def test_the_walk_notices_a_command_that_fails(tmp_path: Path, ports: dict[str, str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- step: run -->\n```sh\nfalse\n```\n")
    with pytest.RaisesGroup(pytest.RaisesExc(AssertionError, match="false")):
        trio.run(Walk(tmp_path, fresh=False, ports=ports).go, steps_of(page))


def test_a_block_that_is_no_step_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh\nfalse\n```\n")
    with pytest.raises(AssertionError, match="without step"):
        steps_of(page)
