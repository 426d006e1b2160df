"""The versions of SMC-R that a client offers, and the version that two stacks agree on."""

from __future__ import annotations

import pytest

import trio_smc
from tests.api.api_peers import check_talk, close_all, connect
from tests.rnic.routable import RoutableRnic, single_link
from trio_smc import Config, SoftRnic
from trio_smc.wire import clc


class Proposals(trio_smc.BaseObserver):
    """Records the Proposals that a stack sends."""

    def __init__(self) -> None:
        self.sent: list[clc.Proposal] = []

    def clc(self, connection: object, outgoing: bool, message: bytes) -> None:
        found = clc.decode_untrusted(message)
        if isinstance(found, clc.Proposal):
            self.sent.append(found)


@pytest.mark.v2("v2.2/9", "v2.1/6", "v2.7/6")
@pytest.mark.parametrize(
    ("host", "routable", "ueids", "version"),
    [
        ("127.0.0.1", True, ("PLANT-7",), 2),
        ("127.0.0.1", True, (), 1),
        ("127.0.0.1", False, ("PLANT-7",), 1),
        ("::1", True, ("PLANT-7",), 1),
    ],
)
async def test_offered_and_agreed_versions(
    host: str, routable: bool, ueids: tuple[str, ...], version: int
) -> None:
    kind = RoutableRnic if routable else SoftRnic
    made = [Config(receive_buffer=16384, rnics=(kind("soft0"),), ueids=ueids) for _ in range(2)]
    async with trio_smc.open_stack(made[0]) as server, trio_smc.open_stack(made[1]) as client:
        if ueids:
            single_link(server)
        proposals = Proposals()
        client.add_observer(proposals)
        [listener] = await server.open_listeners(0, host=host)
        ends = await connect(client, listener)
        assert [each.link_group and each.link_group.version for each in ends] == [version] * 2
        [proposal] = proposals.sent
        assert (proposal.version, proposal.v2 is not None) == (version, version == 2)
        await check_talk(*ends)
        await close_all(*ends)
