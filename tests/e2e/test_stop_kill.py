"""One of two processes is stopped or killed at random moments of a transfer, again and again."""

from __future__ import annotations

import pytest

from tests.e2e.stop_kill import stop_and_kill


@pytest.mark.full
async def test_twenty_rounds(seed: int) -> None:
    outcome = await stop_and_kill(20, seed)
    assert len(outcome.killed) + outcome.early == 20
    # A busy machine may delay the handshake of a new victim beyond the timers of its links.
    assert outcome.early <= 5
    assert outcome.stopped >= 5
    assert outcome.received > 0
