"""Handshakes that wait for their clients: which of them a full listener cancels, and the cost."""

from __future__ import annotations

import contextlib
import math
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

import trio_smc
from tests.peers import check_echo, echo
from tests.timing import PATIENCE
from trio_smc import Config
from trio_smc.connecting.pending import GRACE, PendingHandshakes
from trio_smc.host.addresses import address_block


class Handshake:
    """A handshake that the test controls."""

    def __init__(self, block: str, progressed: float) -> None:
        self.block = block
        self.progressed = progressed
        self.silent = True
        self.cancelled = False
        self.checks = 0

    def is_silent(self) -> bool:
        self.checks += 1
        return self.silent

    def cancel(self) -> None:
        self.cancelled = True


def filled(limit: int, addresses: int) -> tuple[PendingHandshakes, list[Handshake]]:
    pending = PendingHandshakes(limit)
    made = [Handshake(f"192.0.2.{n % addresses}", 0.0) for n in range(limit)]
    for each in made:
        pending.add(each)
    return pending, made


@pytest.mark.parametrize(
    ("address", "block"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("::ffff:c000:201", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::", "2001:db8:1:2::/64"),
        ("2001:db8:1:3::1", "2001:db8:1:3::/64"),
        ("fe80::1%eth0", "fe80::%eth0/64"),
        ("fe80::2%eth0", "fe80::%eth0/64"),
        ("fe80::1%eth1", "fe80::%eth1/64"),
        ("::1", "::/64"),
        ("::192.0.2.1", "::/64"),
    ],
)
def test_address_blocks(address: str, block: str) -> None:
    assert address_block(address) == block


def test_no_handshake_gives_way_below_the_limit_or_in_its_grace() -> None:
    pending, made = filled(64, 4)
    assert pending.give_way(GRACE / 2) == GRACE
    pending.discard(made.pop())
    assert pending.give_way(GRACE * 9) == math.inf
    assert not any(each.cancelled for each in made)
    assert not any(each.checks for each in made)


def test_a_batch_gives_way_across_addresses() -> None:
    """Each address has one handshake."""
    pending, made = filled(512, 512)
    assert pending.give_way(GRACE) == GRACE
    assert [each.cancelled for each in made] == [True] * 16 + [False] * 496


def flood(pending: PendingHandshakes, now: float, block: str = "198.51.100.1") -> None:
    """Add handshakes until the limit is reached again."""
    while not pending.is_full:
        pending.add(Handshake(block, now))


def test_the_largest_address_loses_its_oldest_handshakes_first() -> None:
    pending = PendingHandshakes(64)
    few = [Handshake("192.0.2.2", 0.1) for _ in range(16)]
    many = [Handshake("2001:db8::/64", 0.2) for _ in range(48)]
    for each in (*few, *many):
        pending.add(each)
    while not few[0].cancelled:
        pending.give_way(0.2 + GRACE)
        flood(pending, 0.2 + GRACE)
    gone = [each.cancelled for each in many]
    assert gone == sorted(gone, reverse=True), "a younger handshake was cancelled first"
    assert gone.count(False) == 15, "the two addresses do not have the same share"


def test_a_slow_client_with_an_address_of_its_own_is_spared() -> None:
    """The handshakes of the flood, from one address, are younger than the client's handshake."""
    pending, alone = PendingHandshakes(64), Handshake("192.0.2.1", 0.0)
    pending.add(alone)
    flood(pending, 0.5)
    now = 0.0
    while now < 2 * GRACE - 0.001:
        assert not alone.cancelled
        flood(pending, now)
        now = max(pending.give_way(now), now + 0.001)
    for _ in range(200):
        pending.give_way(2 * GRACE)
        flood(pending, 2 * GRACE)
    assert alone.cancelled


def test_many_addresses_are_not_spared_beside_a_large_one() -> None:
    """At most an eighth of the limit is spared; all other handshakes give way after a second."""
    pending = PendingHandshakes(512)
    single = [Handshake(f"10.0.{n // 250}.{n % 250}", 0.0) for n in range(500)]
    for each in single:
        pending.add(each)
    flood(pending, 0.9)
    for _ in range(500 // 16):
        pending.give_way(GRACE)
        flood(pending, GRACE)
    assert sum(each.cancelled for each in single) >= 500 - 64


def test_complete_messages_and_unread_bytes_are_progress() -> None:
    pending, made = filled(32, 1)
    pending.renew(made[0], GRACE / 2)
    made[1].silent = False
    assert pending.give_way(GRACE) == GRACE
    assert not any(each.cancelled for each in made)
    assert pending.give_way(GRACE) == GRACE
    assert [each.cancelled for each in made[:4]] == [False, False, True, False]
    pending.renew(made[2], GRACE)
    assert made[2].progressed == 0.0, "a cancelled handshake was renewed"
    assert len(pending) == 31


@pytest.mark.parametrize("limit", [4, 8, 64])
def test_counts_agree_with_a_count_of_all_handshakes(rng: random.Random, limit: int) -> None:
    """Only overdue and silent handshakes give way, and all of these give way in the end."""
    pending, alive, now, lost_in_all = PendingHandshakes(limit), dict[Handshake, None](), 0.0, 0
    for _ in range(3000):
        now += rng.random() * GRACE / limit * 2
        choice = rng.random()
        if choice < 0.6 and not pending.is_full:
            each = Handshake(f"192.0.2.{rng.randrange(6)}", now)
            each.silent = rng.random() < 0.9
            pending.add(each)
            alive[each] = None
        elif choice < 0.7 and alive:
            gone = rng.choice(list(alive))
            assert pending.discard(gone)
            assert not pending.discard(gone)
            del alive[gone]
        elif choice < 0.8 and alive:
            pending.renew(rng.choice(list(alive)), now)
        else:
            before = {each: each.progressed for each in alive}
            again = pending.give_way(now)
            overdue = [each for each in alive if before[each] + GRACE <= now]
            certain = [each for each in overdue if before[each] + 2 * GRACE <= now]
            lost = [each for each in alive if each.cancelled]
            assert len(lost) <= max(limit // 32, 1)
            assert all(each in overdue and each.silent for each in lost)
            assert (again == math.inf) == (len(alive) < limit)
            if len(alive) >= limit and not overdue:
                assert again == min(before.values()) + GRACE
            if len(alive) >= limit and certain:
                assert again == now
            counts = Counter(each.block for each in alive)
            if len(lost) == 1 and limit < 64:
                # A block that loses a handshake is not small, or the handshake was spared before.
                small = counts[lost[0].block] * 4 <= max(counts.values())
                assert not small or lost[0] in certain or len(overdue) > max(limit // 8, 1)
            for each in lost:
                del alive[each]
            lost_in_all += len(lost)
        assert len(pending) == len(alive)
    assert lost_in_all > 100


class Unaddressed(Handshake):
    """A handshake whose address must not matter."""

    @property
    def block(self) -> str:
        raise AssertionError("the address of a handshake was used")

    @block.setter
    def block(self, _: str) -> None: ...


def test_addresses_are_not_counted_while_the_listener_is_not_busy() -> None:
    pending = PendingHandshakes(64)
    for _ in range(100):
        made = [Unaddressed("", 0.0) for _ in range(15)]
        for each in made:
            pending.add(each)
            pending.renew(each, 1.0)
        assert all(pending.discard(each) for each in made)


def test_addresses_are_counted_again_whenever_the_listener_is_busy() -> None:
    pending = PendingHandshakes(64)
    for now in (0.0, 10.0, 20.0):
        large = [Handshake("192.0.2.1", now) for _ in range(40)]
        small = [Handshake("192.0.2.2", now) for _ in range(24)]
        for each in (*small, *large):
            pending.add(each)
        pending.give_way(now + GRACE)
        assert [each.cancelled for each in large] == [True] * 2 + [False] * 38
        assert not any(each.cancelled for each in small)
        for each in (*small, *large):
            assert pending.discard(each) is not each.cancelled
        assert not pending


@pytest.mark.parametrize("addresses", [1, 500])
def test_the_cost_of_giving_way_does_not_depend_on_addresses(addresses: int) -> None:
    """10,000 handshakes are added, become overdue and give way, in 3 microseconds each without
    sockets.  A loop over all 512 handshakes for each of them would take a hundred times as long."""
    pending, made = filled(512, addresses)
    now, gone = 0.0, 0
    begun = time.thread_time()
    while gone < 10_000:
        now = max(pending.give_way(now), now)
        if now == math.inf:
            raise AssertionError("the listener is full, but no handshake gives way")
        for _ in range(512 - len(pending)):
            gone += 1
            made.append(Handshake(f"192.0.2.{gone % addresses}", now))
            pending.add(made[-1])
    spent = time.thread_time() - begun
    assert spent < gone * 50e-6
    assert max(each.checks for each in made) <= 1


@contextlib.asynccontextmanager
async def clients(port: int, count: int, addresses: int, kind: str) -> AsyncIterator[None]:
    """Start a process with clients that stall.  When the block begins, all have connected."""
    arguments = ["127.0.0.1", port, count, addresses, kind]
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", "tests.connecting.silent_clients", *map(str, arguments)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        with trio.fail_after(2 * PATIENCE):
            assert (await process.stdout.receive_some()).startswith(b"connected")
        yield
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
        if process.stdout is not None:
            await process.stdout.aclose()


@pytest.mark.usefixtures("runtime_directory")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("addresses", "kind"),
    [
        (1, "silent"),
        (500, "drip"),
        (1, "proposal"),
        pytest.param(500, "silent", marks=pytest.mark.full),
        pytest.param(1, "drip", marks=pytest.mark.full),
        pytest.param(500, "proposal", marks=pytest.mark.full),
    ],
)
async def test_stalled_clients_do_not_keep_good_clients_out(
    monkeypatch: pytest.MonkeyPatch, addresses: int, kind: str
) -> None:
    """1,500 clients stall, and each is replaced as soon as the server resets it; 512 give way per
    second.  The server serves a client from another address after the clients that connected
    before it, long before the handshakes time out."""
    config = Config(
        receive_buffer=16384, discovery="assume", learn_short=False, handshake_timeout=20
    )
    if kind == "proposal":
        # A Proposal costs the resources of a first contact: queue pair, RMB and receive ring.
        monkeypatch.setattr("trio_smc.connecting.listener.MOST_WAITING", 32)
    count = 200 if kind == "proposal" else 1500
    async with trio_smc.open_stack(config) as stack, trio.open_nursery() as nursery:
        listeners = await nursery.start(stack.serve, echo, 0)
        listener = next(each for each in listeners if each.socket.family == 2)
        port = listener.socket.getsockname()[1]
        took = spent = 0.0
        async with clients(port, count, addresses, kind):
            for _ in range(2):
                begun, spent = trio.current_time(), time.thread_time()
                with trio.fail_after(config.handshake_timeout / 2):
                    stream = await stack.open_stream("127.0.0.1", port, local_address="127.9.9.9")
                    async with stream:
                        assert stream.mode == "smc-r", stream.fallback
                        await check_echo(stream, b"x")
                took, spent = trio.current_time() - begun, time.thread_time() - spent
            assert kind == "proposal" or spent < 0.3 * took
        nursery.cancel_scope.cancel()
