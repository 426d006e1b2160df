"""Events as a channel, events as log records, and metrics."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

import pytest
import trio
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import trio_smc
from tests.api.api_peers import HOST, QUICK, connect, plain_client
from tests.timing import PATIENCE
from trio_smc import Config, EventStream, Stack, StackEvent
from trio_smc.tools.metrics import SmcCollector


async def wait_for_event(events: EventStream, **wanted: object) -> StackEvent:
    """Return the next event with these values."""
    with trio.fail_after(PATIENCE):
        async for event in events:
            if all(getattr(event, name) == value for name, value in wanted.items()):
                return event
    raise AssertionError(f"no event with {wanted}")


def is_observed(stack: Stack) -> bool:
    return stack.runtime.groups.observer is not None


# --- the channel ---------------------------------------------------------------------------------


async def test_modes_and_link_groups_are_reported() -> None:
    async with trio_smc.open_stack(QUICK) as server, trio_smc.open_stack(QUICK) as client:
        [listener] = await server.open_listeners(0, host=HOST)
        with trio_smc.open_events(server) as events:
            stream, accepted = await connect(client, listener)
            active = await wait_for_event(events, subject="link", new="ACTIVE")
            assert (active.role, active.peer_id) == ("server", client.peer_id)
            assert (active.link, active.rnic) == (1, server.rnics[0].name)
            mode = await wait_for_event(events, subject="mode")
            assert (mode.new, mode.fallback) == ("smc-r", None)
            assert mode.local_address == listener.socket.getsockname()
            assert mode.peer_address == stream.socket.getsockname()
            async with await plain_client(listener) as plain, await listener.accept() as tcp:
                last = await wait_for_event(events, subject="mode")
                assert (last.new, last.fallback) == ("tcp", tcp.fallback)
                assert last.peer_address == plain.socket.getsockname()
            for each in (stream, accepted):
                each.abort()
    assert events.dropped == 0


async def test_an_abort_is_reported_with_its_addresses() -> None:
    async with trio_smc.open_stack(QUICK) as stack:
        [listener] = await stack.open_listeners(0, host=HOST)
        with trio_smc.open_events(stack) as events:
            stream, accepted = await connect(stack, listener)
            ends = stream.socket.getsockname(), stream.socket.getpeername()
            stream.abort()
            async for event in events:
                if event.aborted:
                    break
            assert (event.subject, event.old, event.cause) == ("connection", "ACTIVE", "abort")
            assert (event.local_address, event.peer_address) == ends
            answer = await wait_for_event(
                events, subject="connection", cause="peer_abort", old="ACTIVE"
            )
            assert answer.aborted
            assert (answer.peer_address, answer.local_address) == ends
            await accepted.aclose()


async def test_orderly_closes_are_no_aborts() -> None:
    async with trio_smc.open_stack(QUICK) as stack:
        [listener] = await stack.open_listeners(0, host=HOST)
        with trio_smc.open_events(stack) as events:
            stream, accepted = await connect(stack, listener)
            await stream.aclose()
            await accepted.aclose()
            for _ in range(2):
                await wait_for_event(events, subject="connection", new="CLOSED")
        assert not any([event.aborted async for event in events])


async def test_events_beyond_the_limit_are_dropped_and_counted() -> None:
    async with trio_smc.open_stack(QUICK) as stack:
        [listener] = await stack.open_listeners(0, host=HOST)
        with (
            trio_smc.open_events(stack, limit=2) as events,
            trio_smc.open_events(stack) as all_events,
        ):
            stream, accepted = await connect(stack, listener)
            stream.abort()
            await accepted.aclose()
        kept = [replace(event, time=0) async for event in events]
        everything = [replace(event, time=0) async for event in all_events]
        assert kept == everything[:2]
        assert events.dropped == len(everything) - 2 > 0
        with pytest.raises(trio.EndOfChannel):
            await events.receive()


async def test_leaving_the_block_removes_the_observer() -> None:
    async with trio_smc.open_stack(QUICK) as stack:
        with trio_smc.open_events(stack):
            assert is_observed(stack)
        assert not is_observed(stack)
        with pytest.raises(ValueError, match="at least one"), trio_smc.open_events(stack, limit=0):
            pass


# --- the log -------------------------------------------------------------------------------------


async def test_log_records_have_fields(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trio_smc.events")
    config = Config(receive_buffer=16384, close_timeout=20, shutdown_timeout=20, log_events=True)
    async with trio_smc.open_stack(config) as stack:
        [listener] = await stack.open_listeners(0, host=HOST)
        stream, accepted = await connect(stack, listener)
        name = stream.socket.getsockname()
        stream.abort()
        with pytest.raises(trio.BrokenResourceError):
            await accepted.receive_some()
        await accepted.aclose()
        async with await plain_client(listener), await listener.accept():
            pass
    records = [vars(record) for record in caplog.records if record.name == "trio_smc.events"]
    modes = [record for record in records if record["smc_event"] == "mode"]
    assert [(each["smc_new"], each["smc_reason"]) for each in modes] == [
        ("smc-r", None), ("smc-r", None), ("tcp", "peer-not-capable"),
    ]  # fmt: skip
    assert (modes[2]["smc_origin"], modes[2]["smc_code"]) == ("local", 0x03010000)
    aborts = [record for record in records if record["smc_event"] == "abort"]
    assert [(each["smc_cause"], each["levelname"]) for each in aborts] == [
        ("abort", "WARNING"), ("peer_abort", "WARNING"),
    ]  # fmt: skip
    assert aborts[0]["smc_local"] == aborts[1]["smc_peer"] == name
    links = [record for record in records if record["smc_event"] == "link"]
    assert ("ACTIVE", 1, "soft0") in {
        (each["smc_new"], each["smc_link"], each["smc_rnic"]) for each in links
    }
    groups = [record["smc_new"] for record in records if record["smc_event"] == "link_group"]
    assert groups.count("SINGLE") == groups.count("GONE") == 2
    assert all(record["smc_peer_id"] == stack.peer_id.hex() for record in links)


async def test_a_refused_connection_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trio_smc.events")
    async with trio_smc.open_stack(Config(log_events=True, require_smc=True)) as stack:
        [listener] = await stack.open_listeners(0, host=HOST)
        async with await plain_client(listener) as plain:
            with trio.fail_after(PATIENCE):
                assert await plain.receive_some() == b""
        [record] = [each for each in caplog.records if each.name == "trio_smc.events"]
        assert (record.levelname, vars(record)["smc_new"]) == ("WARNING", "refused")
        assert "refused: the peer did not announce SMC-R" in record.getMessage()


async def test_a_stack_without_log_events_has_no_observer() -> None:
    async with trio_smc.open_stack(QUICK) as stack:
        assert not is_observed(stack)


# --- metrics -------------------------------------------------------------------------------------


def scrape(collector: SmcCollector) -> dict[str, float]:
    """Return the samples for Prometheus by name and label values, sorted by label."""
    registry = CollectorRegistry()
    registry.register(collector)
    text = generate_latest(registry).decode()
    samples = (
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    )
    return {
        " ".join((each.name, *(value for _, value in sorted(each.labels.items())))): each.value
        for each in samples
    }


async def test_metrics_are_the_statistics_of_the_stacks() -> None:
    async with trio_smc.open_stack(QUICK) as server, trio_smc.open_stack(QUICK) as client:
        [listener] = await server.open_listeners(0, host=HOST)
        stream, accepted = await connect(client, listener)
        await stream.send_all(bytes(1000))
        async with await plain_client(listener), await listener.accept():
            one = await trio.to_thread.run_sync(scrape, SmcCollector(client))
            both = scrape(SmcCollector())
        assert one["trio_smc_stacks"] == 1
        assert one["trio_smc_bytes_sent_total"] == 1000
        assert one["trio_smc_connections_now smc-r"] == 1
        assert one["trio_smc_link_groups_now single client"] == 1
        assert one["trio_smc_links_now soft0 ACTIVE"] == 1
        assert "trio_smc_connections_now tcp" not in one
        assert both["trio_smc_stacks"] == 2
        assert both["trio_smc_connections_total"] == both["trio_smc_open_connections"] == 2
        assert both["trio_smc_connections_now tcp"] == 1
        assert both["trio_smc_fallbacks_total local peer-not-capable"] == 1
        assert both["trio_smc_rmb_elements 16384 in use"] == 2
        assert both["trio_smc_rnic_port_active software soft0"] == 2
        assert both["trio_smc_scrape_failures_total"] == 0
        stream.abort()
        await accepted.aclose()


async def test_every_counter_is_a_metric() -> None:
    async with trio_smc.open_stack(QUICK) as stack:
        names = set(scrape(SmcCollector(stack)))
        for name in trio_smc.StackStatistics.__slots__:
            if name not in ("open_connections", "agreed", "fallbacks"):
                assert f"trio_smc_{name}_total" in names


async def test_a_scrape_omits_stacks_of_blocked_and_ended_runs() -> None:
    stacks: list[Stack] = []
    ready, done = threading.Event(), threading.Event()

    async def run_blocked_stack() -> None:
        async with trio_smc.open_stack(QUICK) as stack:
            stacks.append(stack)
            ready.set()
            done.wait(PATIENCE)  # block the event loop on purpose

    thread = threading.Thread(target=trio.run, args=(run_blocked_stack,))
    thread.start()
    try:
        assert await trio.to_thread.run_sync(ready.wait, PATIENCE)
        collector = SmcCollector(stacks[0], patience=0.05)
        still = await trio.to_thread.run_sync(scrape, collector)
        assert (still["trio_smc_stacks"], still["trio_smc_scrape_failures_total"]) == (0, 1)
    finally:
        done.set()
        await trio.to_thread.run_sync(thread.join, PATIENCE)
    over = await trio.to_thread.run_sync(scrape, collector)
    assert (over["trio_smc_stacks"], over["trio_smc_scrape_failures_total"]) == (0, 2)
    assert stacks[0] not in trio_smc.stacks()


class _StoppedRun:
    """A stack whose Trio run is blocked (`Stack.trio_token`)."""

    def __init__(self) -> None:
        self.trio_token = self
        self.scheduled: list[object] = []

    def run_sync_soon(self, function: object) -> None:
        self.scheduled.append(function)


async def test_blocked_runs_delay_a_scrape_by_one_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stopped = [_StoppedRun() for _ in range(10)]
    monkeypatch.setattr(trio_smc, "stacks", lambda: stopped)
    before = trio.current_time()
    found = await trio.to_thread.run_sync(scrape, SmcCollector(patience=0.5))
    assert trio.current_time() - before < 5 * 0.5  # in sequence: ten times the patience
    assert found["trio_smc_scrape_failures_total"] == 10
    assert all(len(each.scheduled) == 1 for each in stopped)


async def test_stacks_are_listed_while_they_are_open() -> None:
    assert trio_smc.stacks() == ()
    async with trio_smc.open_stack(QUICK) as one, trio_smc.open_stack(QUICK) as two:
        assert trio_smc.stacks() == (one, two)
    assert trio_smc.stacks() == ()
