"""The variants of `benchmarks.ablation` fit the package as it is."""

from __future__ import annotations

import compileall
from pathlib import Path

import pytest

from benchmarks.ablation import VARIANTS, copies

_PACKAGE = Path(__file__).parent.parent / "trio_smc"


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_differs_from_the_package_and_compiles(name: str) -> None:
    edited = {edit.file for edit in VARIANTS[name]}
    with copies([name]) as trees:
        copy = trees[name] / "trio_smc"
        differing = {
            str(path.relative_to(copy))
            for path in copy.rglob("*.py")
            if path.read_bytes() != (_PACKAGE / path.relative_to(copy)).read_bytes()
        }
        assert differing == edited
        assert all(compileall.compile_file(copy / file, quiet=2) for file in edited)
