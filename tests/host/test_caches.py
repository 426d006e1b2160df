"""The size of a processor's own cache, from the files in which Linux tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

from trio_smc.host.caches import size_of_private_cache


def describe(directory: Path, *caches: tuple[str, str]) -> None:
    """Caches with these levels and sizes."""
    for number, (level, size) in enumerate(caches):
        each = directory / f"index{number}"
        each.mkdir()
        (each / "level").write_text(f"{level}\n")
        (each / "size").write_text(f"{size}\n")


@pytest.mark.parametrize(
    ("told", "size"), [("2048K", 2 << 20), ("1280K", 1280 << 10), ("4M", 4 << 20)]
)
def test_level_2_counts(tmp_path: Path, told: str, size: int) -> None:
    describe(tmp_path, ("1", "48K"), ("1", "32K"), ("2", told), ("3", "480M"))
    assert size_of_private_cache(tmp_path) == size


@pytest.mark.parametrize("told", ["", "K", "much", "2048", "2 GiB"])
def test_nonsense_is_nothing(tmp_path: Path, told: str) -> None:
    describe(tmp_path, ("2", told))
    assert size_of_private_cache(tmp_path) == 0


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    describe(tmp_path, ("1", "48K"))
    assert size_of_private_cache(tmp_path) == 0
    assert size_of_private_cache(tmp_path / "missing") == 0
    (tmp_path / "index9").mkdir()
    assert size_of_private_cache(tmp_path) == 0
