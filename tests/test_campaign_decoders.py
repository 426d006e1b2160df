"""A short run of the decoder campaign, and whether it would notice."""

from __future__ import annotations

import pytest

from tests.campaigns import decoders
from trio_smc.wire import clc

pytestmark = pytest.mark.calculates


def test_hostile_bytes(seed: int, full: bool) -> None:
    cases = 100_000 if full else 4_000
    result = decoders.run(cases, seed)
    assert result.failures == []
    # Every decoder has seen enough of both sorts for this to mean something.
    assert min(result.decoded.values()) > cases // 50
    assert min(result.refused.values()) > cases // 50
    assert len(result.decoded) == len(result.refused) == 8


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (lambda data: clc.decode_untrusted(data).encode()[::-1], "encodes to"),
        (lambda data: bytes((data[500],)), "IndexError"),
    ],
)
def test_a_broken_decoder_is_noticed_and_its_case_replays(
    broken: object, text: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoders, "DECODERS", {"broken": broken})
    result = decoders.run(400, seed)
    assert not result.passed
    line = result.failures[0]
    assert text in line
    case = int(line.rsplit("--case ", 1)[1])
    again = decoders.run(1, seed, first=case)
    assert again.failures == [line]


def test_a_case_depends_on_its_number_only(seed: int) -> None:
    assert [decoders.piece(seed, case) for case in range(50)] == [
        decoders.piece(seed, case) for case in range(50)
    ]
    assert len({decoders.piece(seed, case) for case in range(50)}) > 40
