"""The models have the guards and actions that their charts name."""

from __future__ import annotations

from operator import attrgetter

from tests.datapath.datapath_pair import Pair
from tests.rendezvous.rendezvous_pair import World
from trio_smc.states import tables
from trio_smc.states.engine import Table


def check(table: Table, model: object) -> None:
    for guard in table.guards:
        assert hasattr(model, guard), guard
    for action in table.actions:
        assert callable(attrgetter(action)(model)), action


def test_a_connection_matches_its_chart() -> None:
    pair = Pair()
    check(tables.CONNECTION, pair.a)
    pair.close()


def test_a_link_group_and_its_negotiations_match_their_charts() -> None:
    with World() as world:
        call = world.connect(world.side(), world.side())
        check(tables.CLC_CLIENT, call.client.negotiation)
        check(tables.CLC_SERVER, call.server.negotiation)
        for end in call.ends:
            group = end.side.group
            check(tables.LINK_GROUP, group)
            check(tables.LLC_EXCHANGE, group.exchanges)
            for link in group.links.values():
                check(tables.LINK, link)
