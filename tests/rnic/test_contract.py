"""The software RNIC passes the tests of `tests.rnic.contract`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rnic.contract import HAS_RINGS, RnicContract, use_completion_fd
from trio_smc.rnic.soft.device import SoftRnic
from trio_smc.rnic.verbs import Rnic


class TestSoftRnic(RnicContract):
    @pytest.fixture(params=["together", "apart", "packets", *["packets of one"][:HAS_RINGS]])
    def rnics(
        self, runtime_directory: Path, request: pytest.FixtureRequest
    ) -> Iterator[tuple[Rnic, Rnic]]:
        """Two RNICs.

        "together": one descriptor reports everything; "apart": another one reports completions;
        "packets", "packets of one": both RNICs, or the first one, send packets and use no rings.
        """
        first, second = SoftRnic("soft0"), SoftRnic("soft1")
        if request.param.startswith("packets"):
            first.sends_packets = True
            second.sends_packets = second.sends_packets or request.param == "packets"
        for rnic in (first, second):
            rnic.open(runtime_directory / "smc")
            if request.param == "apart":
                use_completion_fd(rnic)
        yield first, second
        first.close()
        second.close()
