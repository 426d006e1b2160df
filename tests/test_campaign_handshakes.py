"""A short run of the campaign of damaged handshakes, and whether it would notice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.campaigns import handshakes
from tests.campaigns._replays import finds_and_replays
from trio_smc.rendezvous.links.own_rmbs import OwnRmbs
from trio_smc.rendezvous.links.rkeys import Rkeys
from trio_smc.rendezvous.negotiation import Negotiation

pytestmark = pytest.mark.calculates


def test_damaged_handshakes(seed: int, full: bool) -> None:
    cases = 50_000 if full else 2_000
    result = handshakes.run(cases, seed)
    assert result.failures == []
    # Every kind of damage was done, and all that can come of it has come. Of the rarest kind come
    # 17 in 2,000 cases on average: fewer than 2 in one run of a million.
    assert len(result.damages) >= 28
    assert min(result.damages.values()) >= cases // 1000
    kinds = {outcome for pair in result.outcomes for outcome in pair}
    assert kinds == {"Established", "FellBack", "Failed"}
    assert result.outcomes["Established", "Established"] > cases // 5
    assert result.outcomes["FellBack", "FellBack"] > cases // 20


def _leak(self: OwnRmbs) -> None:
    self._regions.clear()


def _no_end(self: Negotiation) -> None:
    """A time-out without a notification."""


def _crash(self: Rkeys, *_: object) -> None:
    raise KeyError("link")


@pytest.mark.parametrize(
    ("owner", "name", "broken", "text"),
    [
        (OwnRmbs, "free_one", _leak, "memory"),
        (Negotiation, "timed_out", _no_end, "PROPOSED"),
        (Rkeys, "answer", _crash, "sink raised"),
        (Negotiation, "may_decline", property(lambda self: self.may_fall_back), "2: "),
        (Negotiation, "sent", lambda self: self.tcp_lost(), "5: "),
    ],
    ids=["leak", "hang", "exception", "crossing Declines", "no reason"],
)
def test_a_broken_rendezvous_is_noticed_and_its_case_replays(
    owner: type,
    name: str,
    broken: Callable[..., object],
    text: str,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, name, broken)
    finds_and_replays(handshakes.run, text, seed=seed, step=100, most=10_000)


ONCE_FAILED = [
    (2513664875, 46761),  # CONFIRM LINK lied about the number of a link whose queue pair had failed
    (2025, 4017),  # a second ADD LINK at first contact: the client never said that all is formed
]


@pytest.mark.parametrize(("first_seed", "case"), ONCE_FAILED)
def test_handshakes_that_once_failed(first_seed: int, case: int) -> None:
    assert not handshakes.run(1, first_seed, first=case).failures
