"""SMC-R version 2 in commands, events, metrics, captures and `check`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

import trio_smc
from tests.api.api_peers import HOST, check_talk, close_all, connect
from tests.rnic.routable import RoutableRnic, single_link
from tests.timing import PATIENCE
from tests.tools.test_events import scrape, wait_for_event
from tests.tools.tools_processes import Done, command_here, one_line, quick_command
from trio_smc import Agreed, Config, FallbackReason, Stack
from trio_smc.connecting import accept as accepting
from trio_smc.stack import groups
from trio_smc.tools.commands import check
from trio_smc.tools.metrics import SmcCollector

BY_GATEWAY = Agreed(version=2, release=1, ueid="PLANT-7", direct=False)
WORDS = "2.1 PLANT-7, gateway"
Patch = pytest.MonkeyPatch


def config(*ueids: str, direct: bool = True, **settings: Any) -> Config:
    """Settings of a stack with an RNIC that supports version 2."""
    rnics = (RoutableRnic(direct=direct),)
    return Config(receive_buffer=16384, rnics=rnics, ueids=ueids, **settings)


@asynccontextmanager
async def pair(**settings: Any) -> AsyncIterator[tuple[Stack, Stack, str]]:
    """Open a connection of version 2. Yields server stack, client stack and the server's port."""
    made = [config("PLANT-7", "OTHER", direct=False, **settings) for _ in range(2)]
    async with trio_smc.open_stack(made[0]) as server, trio_smc.open_stack(made[1]) as client:
        single_link(server)
        [listener] = await server.open_listeners(0, host=HOST)
        ends = await connect(client, listener)
        await check_talk(*ends)
        yield server, client, str(listener.socket.getsockname()[1])
        await close_all(*ends)


# --- open connections ----------------------------------------------------------------------------


@pytest.mark.v2("v2.13/1")
async def test_ss_lg_and_stats_show_the_agreement() -> None:
    agreed = BY_GATEWAY._asdict()
    async with pair() as (server, client, _):
        for stack in (await quick_command("ss", "--json")).json:
            [connection] = stack["connections"]
            assert connection.items() >= agreed.items()
        table = (await quick_command("ss", "-v", "--smc")).out
        assert table.count(" smc-r v2 ") == 2
        assert table.count(f"  version   {WORDS}\n") == 2
        for stack in (await quick_command("lg", "--json")).json:
            [group] = stack["link_groups"]
            assert group.items() >= agreed.items()
        assert (await quick_command("lg")).out.count(f"  {WORDS}  ") == 2
        for stack in (await quick_command("stats", "--json")).json:
            assert stack["agreed"] == [{**agreed, "count": 1}]
            assert stack["counters"]["connections"] == 1
        stats = (await quick_command("stats")).rows()
        at = stats.index(["connections", "1", "1"])
        assert stats[at + 1] == ["version", *WORDS.split(), "1", "1"]
        [*added] = (
            await quick_command("stats", "--json", "--interval", "0.05", "--count", "1")
        ).json
        assert [each["agreed"] for each in added] == [[{**agreed, "count": 0}]] * 2
        for each in (server, client):
            assert each.statistics().agreed == {BY_GATEWAY: 1}
            assert each.ueids == ("PLANT-7", "OTHER")
            [view] = each.link_groups
            assert (view.version, view.release, view.ueid, view.direct) == BY_GATEWAY


@pytest.mark.v2("v2.13/1")
async def test_events_and_log_records_have_the_agreement(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "trio_smc.events")
    made = [config("PLANT-7", direct=False, log_events=number == 1) for number in range(2)]
    async with trio_smc.open_stack(made[0]) as server, trio_smc.open_stack(made[1]) as client:
        single_link(server)
        [listener] = await server.open_listeners(0, host=HOST)
        with trio_smc.open_events(server) as events:
            ends = await connect(client, listener)
            for subject in ("link", "link_group", "mode"):
                assert (await wait_for_event(events, subject=subject)).agreed == BY_GATEWAY
        await close_all(*ends)
    [record] = [each for each in caplog.records if getattr(each, "smc_event", "") == "mode"]
    assert "is smc-r (version 2.1, UEID PLANT-7, through a gateway)" in record.getMessage()
    assert {name: getattr(record, f"smc_{name}") for name in Agreed._fields} == (
        BY_GATEWAY._asdict()
    )


@pytest.mark.v2("v2.13/1")
async def test_metrics_count_the_agreement() -> None:
    async with pair():
        both = scrape(SmcCollector())
    # The label values are sorted by label: release, route, ueid, version.
    assert both["trio_smc_connections_agreed_total 1 gateway PLANT-7 2"] == 2


@pytest.mark.v2("v2.13/2")
async def test_a_ladder_shows_the_agreement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "capture.pcapng"
    made = config("PLANT-7", direct=False), config("PLANT-7", direct=False, capture=path)
    async with trio_smc.open_stack(made[0]) as server, trio_smc.open_stack(made[1]) as client:
        single_link(server)
        [listener] = await server.open_listeners(0, host=HOST)
        ends = await connect(client, listener)
        await check_talk(*ends)
        await close_all(*ends)
    drawn = command_here(capsys, "ladder", str(path)).out
    for words in (
        "EIDs PLANT-7", "version 2, EID PLANT-7", "through a gateway",
        "release 1, at most 255 connections, 1 links", "CONFIRM LINK, reply", "DELETE LINK",
    ):  # fmt: skip
        assert words in drawn
    assert "unreadable" not in drawn


# --- check ---------------------------------------------------------------------------------------


def set_rnics_of_check(patch: Patch, *, routable: bool = True) -> None:
    """Give the command's stack an RNIC that supports version 2, or the default ones."""
    rnics: Any = (RoutableRnic(),) if routable else "auto"
    patch.setattr(check, "Config", partial(Config, rnics=rnics))


def separate_subnets(patch: Patch) -> None:
    """Put client and server into different subnets."""
    patch.setattr(accepting, "prefix_refusal", lambda *_: FallbackReason.PREFIX_MISMATCH)


async def run_check(*ueids: str, server: tuple[str, ...] = (), as_json: bool = False) -> Done:
    """Run `trio-smc check` with these UEIDs against a server with the UEIDs ``server``."""
    with trio.fail_after(PATIENCE):
        async with trio_smc.open_stack(config(*server)) as stack, trio.open_nursery() as nursery:
            if server:
                single_link(stack)

            async def read_until_eof(stream: trio.abc.ReceiveStream) -> None:
                async for _ in stream:
                    pass

            [listener] = await nursery.start(partial(stack.serve, read_until_eof, 0, host=HOST))
            port = listener.socket.getsockname()[1]
            named = [part for ueid in ueids for part in ("--ueid", ueid)]
            done = await quick_command("check", HOST, port, *named, *["--json"] * as_json)
            nursery.cancel_scope.cancel()
    return done


async def test_check_shows_the_agreement(monkeypatch: Patch) -> None:
    set_rnics_of_check(monkeypatch)
    done = await run_check("PLANT-7", "OTHER", server=("OTHER",))
    assert (done.code, done.err) == (0, "")
    steps = {" ".join(line.split()) for line in done.out.splitlines()}
    assert steps >= {
        "UEIDs ok PLANT-7, OTHER",
        "CLC ok sent Proposal, versions 1 and 2, release 1, UEIDs PLANT-7, OTHER",
        "CLC ok received Accept, version 2.1, UEID OTHER, direct",
        "CLC ok sent Confirm, version 2.1, UEID OTHER, direct",
        "mode ok smc-r, version 2.1 OTHER, direct, single link group, link 1 on soft0",
    }


@pytest.mark.v2("v2.13/4", "v2.6/5")
async def test_check_reports_that_no_ueid_is_in_common(monkeypatch: Patch) -> None:
    set_rnics_of_check(monkeypatch)
    separate_subnets(monkeypatch)
    done = await run_check("PLANT-7", server=("ELSE", "OTHER"))
    assert (done.code, done.err) == (1, "")
    assert "  reason     no-common-ueid, decided by the server\n" in done.out
    assert "  UEIDs      this side's: PLANT-7; the server's: ELSE, OTHER\n" in done.out
    assert "remedy     give both sides the same UEID" in done.out
    assert "diagnosis 0x03030000 no-device" in done.out


async def test_check_of_a_server_without_ueids(monkeypatch: Patch) -> None:
    """Within a subnet both sides use version 1; across subnets the server declines."""
    set_rnics_of_check(monkeypatch)
    done = await run_check("PLANT-7", as_json=True)
    assert done.code == 0
    assert "version 1 (the server accepts none of the UEIDs), single link group" in done.out
    separate_subnets(monkeypatch)
    set_rnics_of_check(monkeypatch)
    done = await run_check("PLANT-7")
    assert done.code == 1
    assert "  reason     prefix-mismatch, decided by the server\n" in done.out


@pytest.mark.v2("v2.13/4")
async def test_check_uses_the_ueids_of_the_kernel_by_default(monkeypatch: Patch) -> None:
    set_rnics_of_check(monkeypatch)
    separate_subnets(monkeypatch)
    monkeypatch.setattr(groups, "kernel_ueids", lambda: (b"PLANT-7".ljust(32),))
    done = await run_check(server=("ELSE",))
    assert (done.code, done.err) == (1, "")
    assert "  reason     no-common-ueid, decided by the server\n" in done.out
    assert "  UEIDs      this side's: PLANT-7; the server's: ELSE\n" in done.out


async def test_check_without_ueids(monkeypatch: Patch) -> None:
    set_rnics_of_check(monkeypatch)
    monkeypatch.setattr(groups, "kernel_ueids", lambda: None)
    done = await run_check(server=("PLANT-7",))
    assert done.code == 0
    assert "info  the kernel has no SMC (modprobe smc), so version 2 is not offered" in done.out
    assert "version 2." not in done.out
    set_rnics_of_check(monkeypatch, routable=False)
    assert "UEIDs" not in (await run_check()).out


async def test_check_with_rnics_that_do_not_serve_version_2(monkeypatch: Patch) -> None:
    set_rnics_of_check(monkeypatch, routable=False)
    done = await run_check("PLANT-7", server=("PLANT-7",))
    assert "PLANT-7, but none of these RNICs supports version 2" in done.out
    assert "smc-r, version 1 (version 2 was not offered), " in done.out
    assert done.code == 0


@pytest.mark.v2("v2.13/4", "v2.1/5")
@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (None, "no  the kernel has no SMC (modprobe smc), so version 2 is not offered"),
        ((), "no  the kernel has no UEID (smcr ueid add), so version 2 is not offered"),
        ((b"PLANT-7".ljust(32), b"OTHER".ljust(32)), "ok  PLANT-7, OTHER"),
    ],
)
async def test_check_with_the_ueids_of_the_kernel(
    monkeypatch: Patch, kernel: tuple[bytes, ...] | None, expected: str
) -> None:
    set_rnics_of_check(monkeypatch)
    monkeypatch.setattr(groups, "kernel_ueids", lambda: kernel)
    done = await run_check("kernel", server=("OTHER",))
    assert done.code == 0
    assert expected in done.out
    assert ("version 2.1 OTHER" in done.out) is bool(kernel)


@pytest.mark.v2("v2.1/2")
@pytest.mark.parametrize("bad", ["", "a", "PLANT_7", "X" * 33, "-A"])
def test_check_refuses_a_bad_ueid(bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    done = command_here(capsys, "check", HOST, "1", f"--ueid={bad}")
    assert f"ueids: {bad!r} is not a name of 1 to 32 characters" in one_line(done)


def test_check_accepts_at_most_eight_ueids(capsys: pytest.CaptureFixture[str]) -> None:
    named = [f"--ueid=N{number}" for number in range(9)]
    done = command_here(capsys, "check", HOST, "1", *named)
    assert "is not 'kernel' or a tuple of at most 8 names" in one_line(done)
