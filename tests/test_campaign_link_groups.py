"""A short run of the campaign of two link groups, and whether it would notice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.campaigns import link_groups
from tests.campaigns._replays import finds_and_replays
from trio_smc.failover.mover import GroupMover
from trio_smc.rendezvous.links.group import LinkGroup
from trio_smc.rendezvous.links.link import Link
from trio_smc.rendezvous.links.own_rmbs import OwnRmbs
from trio_smc.rendezvous.links.rkeys import Rkeys
from trio_smc.stack.groups import GroupTable

pytestmark = pytest.mark.calculates


def test_two_link_groups_agree_after_any_schedule(seed: int, full: bool) -> None:
    # In 12.5 of 300 schedules an operator terminates a group, on average: with so many, all faults
    # come in all but one of ten million runs.
    cases = 20_000 if full else 400
    result = link_groups.run(cases, seed)
    assert result.failures == []
    # Everything that can happen did, and all that can come of it has come.
    assert set(result.faults) == set(link_groups.FAULTS)
    assert set(result.endings) == {"gone", "single", "asymmetric", "symmetric"}
    assert min(result.endings.values()) > cases // 20
    assert result.streams["alive"] > cases // 2
    assert result.streams["broken"] > cases // 10


def _leak(self: OwnRmbs) -> None:
    self._regions.clear()


def _keep(self: Rkeys, *_: object) -> list[int]:
    """A DELETE RKEY that is answered and not obeyed."""
    return []


def _crash(self: Rkeys, *_: object) -> None:
    raise KeyError("link")


def _deaf(self: LinkGroup) -> None:
    """Connections that are not notified of a lost link."""


def _no_pairs(self: Rkeys, *_: object) -> list[object]:
    """A new link whose RTokens the peer is not told."""
    return []


def _unmoved(self: GroupMover, _: Link) -> None:
    """Connections stay on a link that has failed."""


def _no_tests(self: Link) -> None:
    self._restart_timer(1000.0, "idle_timer")


@pytest.mark.parametrize(
    ("owner", "name", "broken", "text"),
    [
        (OwnRmbs, "free_one", _leak, "in use"),
        (Rkeys, "_remove_rmbs", _keep, "the peer knows"),
        (Rkeys, "answer", _crash, "sink raised"),
        (LinkGroup, "end_connections", _deaf, ""),
        (Rkeys, "pairs_for", _no_pairs, ""),
        (GroupMover, "link_lost", _unmoved, ""),
    ],
    ids=[
        "leak",
        "stale RToken",
        "exception",
        "deaf connections",
        "no RToken pairs",
        "no failover",
    ],
)
def test_a_broken_link_group_is_noticed_and_its_schedule_replays(
    owner: type,
    name: str,
    broken: Callable[..., object],
    text: str,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, name, broken)
    finds_and_replays(link_groups.run, text, seed=seed, step=10, most=2000)


# Among 20,000 schedules some show these, but too few for a search that always ends well.
@pytest.mark.parametrize(
    ("owner", "name", "broken", "text", "case"),
    [
        (Link, "start_idle_timer", _no_tests, "the server []", 745),
        (GroupTable, "rnic_changed", lambda *_: None, "RNICs", 249),
    ],
    ids=["no TEST LINK", "RNICs that are not reported"],
)
def test_a_rarely_noticed_defect_is_noticed_in_a_known_schedule(
    owner: type,
    name: str,
    broken: Callable[..., object],
    text: str,
    case: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not link_groups.run(1, 12345, first=case).failures
    monkeypatch.setattr(owner, name, broken)
    [failure] = link_groups.run(1, 12345, first=case).failures
    assert text in failure


ONCE_FAILED = [
    (3605910523, 9591),  # a link that left in the moment in which it came was never replaced
    (77001, 14154),  # called asymmetric in vain: an operator had deleted the link
    (4013949112, 13672),  # SMC Confirm named a link that was lost as the peer's element was noted
    (3666521483, 18766),  # an RNIC was put back before its link had gone, and got no link again
]


@pytest.mark.parametrize(("first_seed", "case"), ONCE_FAILED)
def test_schedules_that_once_failed(first_seed: int, case: int) -> None:
    assert not link_groups.run(1, first_seed, first=case).failures
