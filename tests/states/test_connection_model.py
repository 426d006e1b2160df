"""Two machines that run the connection's table with each other; a campaign runs more cases."""

from __future__ import annotations

import pytest

from tests.campaigns import connection_model
from tests.campaigns._connection_side import Broken
from trio_smc.states.engine import Edge, Table
from trio_smc.states.tables import CONNECTION


def test_random_schedules(seed: int, full: bool) -> None:
    result = connection_model.run(200_000 if full else 8_000, seed)
    assert sum(result.kinds.values()) == result.cases
    assert set(result.kinds) == set(connection_model.KINDS)
    assert result.timers["wild"] == result.timers["polite"] == 0


def changed(state: str, event: str, **changes: object) -> Table:
    """The connection's table with the last edge of one pair changed."""
    *others, last = CONNECTION.edges[state, event]
    fields = {name: getattr(last, name) for name in Edge._fields} | changes
    return Table(
        name=CONNECTION.name,
        initial=CONNECTION.initial,
        states=CONNECTION.states,
        stopped=(),
        events=CONNECTION.events,
        edges={**CONNECTION.edges, (state, event): (*others, Edge(**fields))},
        values=CONNECTION.values,
    )


@pytest.mark.parametrize(
    "table",
    [
        pytest.param(changed("ACTIVE", "peer_abort", actions=("fail_reset",)), id="A unanswered"),
        pytest.param(changed("PEERCLOSEWAIT1", "close", actions=()), id="C not sent"),
        pytest.param(changed("ACTIVE", "close", target="CLOSED"), id="closed too early"),
        pytest.param(changed("PEERFINCLOSEWAIT", "peer_closed", internal=True), id="C ignored"),
        pytest.param(
            changed("PEERCLOSEWAIT1", "abort", guards=(), actions=("send_abort", "send_abort")),
            id="A twice",
        ),
        pytest.param(changed("APPCLOSEWAIT1", "established", actions=()), id="never opened"),
    ],
)
def test_the_model_notices_a_wrong_table(table: Table, seed: int) -> None:
    with pytest.raises(Broken, match=f"of seed {seed}"):
        connection_model.run(8_000, seed, table)
