"""The software RNIC fulfils the contract of `tests.rnic.contract`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rnic.contract import RnicContract
from trio_smc.rnic.soft.device import SoftRnic
from trio_smc.rnic.verbs import Rnic


class TestSoftRnic(RnicContract):
    @pytest.fixture
    def rnics(self, runtime_directory: Path) -> Iterator[tuple[Rnic, Rnic]]:
        first, second = SoftRnic("soft0"), SoftRnic("soft1")
        first.open(runtime_directory / "smc")
        second.open(runtime_directory / "smc")
        yield first, second
        first.close()
        second.close()
