"""A short run of the campaign of lost messages, and whether it would notice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.campaigns import losses
from tests.campaigns._replays import finds_and_replays
from trio_smc.datapath.connection import Connection
from trio_smc.failover.mover import GroupMover
from trio_smc.failover.validation import Backlog
from trio_smc.wire.cdc import CDC_TYPE

pytestmark = pytest.mark.calculates


def test_only_connections_that_lost_a_message_are_reset(seed: int, full: bool) -> None:
    # Of ten cases two have streams that end in order, so that fewer may have none.
    cases = 3_000 if full else 90
    result = losses.run(cases, seed)
    assert result.failures == []
    assert set(result.faults) == set(losses.KINDS)
    assert set(result.streams) == {"alive", "broken", "closed"}
    assert result.moves > 10 * cases


def _credulous(self: Connection, _: int) -> None:
    """Data that the peer has sent counts as arrived."""


def _hasty(self: GroupMover) -> None:
    """Messages of other links are ignored."""


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        pytest.param(Connection, "_validate_untrusted", _credulous, marks=pytest.mark.pure),
        (GroupMover, "catch_up", _hasty),
    ],
)
def test_a_broken_failover_is_noticed_and_its_schedule_replays(
    owner: type,
    name: str,
    broken: Callable[..., object],
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, name, broken)
    finds_and_replays(losses.run, "of its messages one was lost", seed=seed, step=20, most=400)


def _waits_for_any(self: Backlog, other: Backlog) -> bool:
    """As if any message of that connection could be the one that is missing."""
    token = self._messages[0][4:8]
    return any(each[4:8] == token and each[0] == CDC_TYPE for each in other._messages)


@pytest.mark.parametrize("case", [723, 1566])
def test_a_reset_in_vain_is_noticed_in_a_known_schedule(
    case: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two losses at once on links that failed in a row: about one schedule in 600 shows it."""
    assert losses.run(1, 2, first=case).failures == []
    monkeypatch.setattr(Backlog, "waits_for", _waits_for_any)
    [failure] = losses.run(1, 2, first=case).failures
    assert "of its messages one was lost: False" in failure


# An RKey request that came in the middle of an answer to another one was forgotten.
ONCE_FAILED = [(7592621546320652279, 47)]


@pytest.mark.parametrize(("first_seed", "case"), ONCE_FAILED)
def test_schedules_that_once_failed(first_seed: int, case: int) -> None:
    assert not losses.run(1, first_seed, first=case).failures
