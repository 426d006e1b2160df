"""The suite's own RNIC: completions that arise while its task sleeps."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from smc_conform.device import Device
from smc_conform.link import Ends, Group, Link
from smc_conform.messages import CDC, pack
from smc_conform.roles import Role
from smc_conform.session import Options, open_session
from smc_conform.trace import Trace
from smc_conform.waits import Waits
from tests.timing import PATIENCE


@asynccontextmanager
async def two_ends(directory: Path, version: int) -> AsyncIterator[tuple[Link, Link]]:
    """Two links of the suite, connected with each other, whose devices sleep."""
    options = Options(
        role=Role.SERVER, host="192.0.2.1", port=7, directory=directory, version=version
    )

    def group_on(device: Device) -> Group:
        waits = Waits(PATIENCE)
        return Group(device, Trace(), waits, eye_catcher=False, peer_id=bytes(8), version=version)

    with trio.fail_after(2 * PATIENCE):
        async with open_session(options) as session:
            groups = [group_on(device) for device in session.devices]
            one, other = (group.new_link() for group in groups)
            for end, far in ((one, other), (other, one)):
                end.connect(Ends(far.rnic.gid, far.rnic.mac, far.qp.qp_num, far.psn, far.rnic.mtu))
            for end in (one, other):
                end.ready()
            await trio.sleep(0.05)
            try:
                yield one, other
            finally:
                for group in groups:
                    group.close()


def write_outside(one: Link, other: Link) -> None:
    one.write(b"x" * 64, other.region.address + (1 << 40), other.region.rkey)


def write_with_a_wrong_rkey(one: Link, other: Link) -> None:
    one.write(b"x", other.region.address, other.region.rkey ^ 0x55555555)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("lie", [write_outside, write_with_a_wrong_rkey])
async def test_a_refused_write_is_noticed_at_once(
    lie: Callable[[Link, Link], None], version: int, tmp_path: Path
) -> None:
    async with two_ends(tmp_path, version) as (one, other):
        lie(one, other)
        with trio.fail_after(PATIENCE / 2):
            await one.group.waits.until(lambda: bool(one.failed), "the refusal", patience=PATIENCE)


async def test_completions_of_sends_are_noticed_without_a_message_of_the_peer(
    tmp_path: Path,
) -> None:
    async with two_ends(tmp_path, 1) as (one, _):
        for _ in range(8):
            one.send(pack(CDC))
            await trio.sleep(0.02)
        assert one.completed == one.posted == 8
