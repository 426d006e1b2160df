"""RoCE ports that appear and disappear while a stack is open, on a simulated host."""

from __future__ import annotations

import errno
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

import trio_smc
from tests.rnic.port_world import HOST, FakePort, World
from tests.timing import PATIENCE
from trio_smc import Config, FallbackReason
from trio_smc.host import pnet
from trio_smc.rnic.pump import Pump
from trio_smc.rnic.roce.hotplug import PortWatch
from trio_smc.rnic.soft.device import SoftRnic
from trio_smc.rnic.verbs import Rnic, RnicError, RnicEvent
from trio_smc.stack.rnics import RnicChange, StackRnics

ADDRESSES = ("192.0.2.1", "192.0.2.9")  # on rxe0's network
AVAILABLE, LOST = RnicChange.AVAILABLE, RnicChange.LOST


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(Pump, "add", lambda self, rnic: None)
    monkeypatch.setattr(Pump, "remove", lambda self, rnic: None)
    return World.made(monkeypatch)


class FollowedRnics:
    """The RNICs of a stack that follows hotplug changes, and its reports to link groups."""

    def __init__(self, config: Config) -> None:
        self.reported: list[tuple[str, RnicChange]] = []
        discovery: Any = None

        def on_change(rnic: Rnic, change: RnicChange) -> None:
            self.reported.append((rnic.name, change))

        self.rnics = StackRnics(config, discovery, Pump(spin=0), on_change)

    def names(self) -> list[str]:
        return [each.name for each in self.rnics.opened if each.kind == "roce"]


@asynccontextmanager
async def followed(world: World, *named: Rnic) -> AsyncIterator[FollowedRnics]:
    made = FollowedRnics(Config(rnics=named) if named else Config())
    made.rnics.open()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.rnics.follow)
        await trio.testing.wait_all_tasks_blocked()
        yield made
        nursery.cancel_scope.cancel()
    made.rnics.close()
    assert world.opened == [], "a port was not closed"


async def announce(world: World) -> None:
    world.change.set()
    await trio.testing.wait_all_tasks_blocked()


async def test_a_port_appears_and_disappears(world: World, autojump_clock: trio.abc.Clock) -> None:
    async with followed(world) as stack:
        assert stack.rnics.serving(*ADDRESSES) is FallbackReason.NO_RNIC
        world.add_devices("rxe0", "rxe1")
        await announce(world)
        assert stack.names() == ["rxe0", "rxe1"]
        assert stack.reported == [("rxe0", AVAILABLE), ("rxe1", AVAILABLE)]
        served = stack.rnics.serving(*ADDRESSES)
        assert isinstance(served, Rnic)
        assert served.name == "rxe0#1"
        await announce(world)  # a change that does not concern these ports
        assert len(world.opened) == 3
        stack.reported.clear()
        world.remove_devices("rxe0")
        await announce(world)
        assert stack.names() == ["rxe1"]
        assert stack.reported == [("rxe0", LOST), ("rxe0#1", LOST)]
        assert [each.name for each in world.opened] == ["rxe1"], (
            "the kernel waits until a removed device is closed"
        )
        assert stack.rnics.serving(*ADDRESSES) is FallbackReason.NO_RNIC
        world.add_devices("rxe0")
        await announce(world)
        assert stack.rnics.serving(*ADDRESSES) is not FallbackReason.NO_RNIC


async def test_a_port_may_appear_while_a_stack_is_opened(
    world: World, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.abc.Clock
) -> None:
    """The port appears between the first listing and the subscription."""

    def subscribe() -> AbstractContextManager[World]:
        world.add_devices("rxe0")
        return world.watch()

    monkeypatch.setattr(PortWatch, "open", subscribe)
    async with followed(world) as stack:
        assert stack.names() == ["rxe0"]


async def test_a_port_that_is_down_stays_open(world: World, autojump_clock: trio.abc.Clock) -> None:
    world.add_devices("rxe0")
    async with followed(world) as stack:
        world.active.clear()
        await announce(world)
        assert stack.names() == ["rxe0"]
        assert stack.reported == []


async def test_a_device_that_cannot_be_opened_is_retried(
    world: World, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.abc.Clock
) -> None:
    """Opening fails until udev has set the permissions of the node. It is retried without further
    notifications, a limited number of times.
    """
    tried: list[float] = []
    ready = 1.0

    def open_later(self: FakePort, directory: Path) -> None:
        tried.append(trio.current_time() - start)
        if tried[-1] < ready:
            raise PermissionError(errno.EACCES, "not yet")
        really(self, directory)

    really = FakePort.open
    monkeypatch.setattr(FakePort, "open", open_later)
    async with followed(world) as stack:
        start = trio.current_time()
        world.add_devices("rxe0")
        await announce(world)
        assert stack.names() == []
        await trio.sleep(100)
        assert stack.names() == ["rxe0"]
        assert tried == pytest.approx([0, 0.3, 1.3])
        world.remove_devices("rxe0")
        await announce(world)
        world.add_devices("rxe0")
        ready, start = 1e9, trio.current_time()
        tried.clear()
        await announce(world)
        await trio.sleep(100)
        assert tried == pytest.approx([0, 0.3, 1.3, 6.3])


@pytest.mark.parametrize("delay", [0.1, 1, 5])
async def test_a_port_may_appear_after_its_notification(
    delay: float, world: World, autojump_clock: trio.abc.Clock
) -> None:
    """A notification may come some seconds before the port is active."""
    async with followed(world) as stack:
        await announce(world)
        await trio.sleep(delay)
        world.add_devices("rxe0")
        await trio.sleep(100)
        assert stack.names() == ["rxe0"]


async def test_a_failed_device_is_opened_again(
    world: World, autojump_clock: trio.abc.Clock
) -> None:
    """The device reports its own failure, and is opened again at the kernel's next notification."""
    world.add_devices("rxe0", "rxe1")
    async with followed(world) as stack:
        [port, _] = world.opened
        port.failed, port.port_active = True, False
        assert port.on_event is not None
        port.on_event(RnicEvent.FATAL)
        assert stack.reported == [("rxe0", LOST)]
        assert port in world.opened, "a callback of the device must not close it"
        await trio.testing.wait_all_tasks_blocked()
        assert stack.names() == ["rxe1"]
        assert port not in world.opened
        await trio.sleep(100)
        assert stack.names() == ["rxe1"]
        await announce(world)
        assert stack.names() == ["rxe1", "rxe0"]


async def test_a_replaced_device_is_opened_at_once(
    world: World, autojump_clock: trio.abc.Clock
) -> None:
    """The failure of a device and the notification of its successor are handled together."""
    world.add_devices("rxe0")
    async with followed(world) as stack:
        [port] = world.opened
        port.failed, port.port_active = True, False
        assert port.on_event is not None
        port.on_event(RnicEvent.FATAL)
        await announce(world)
        await trio.sleep(100)
        [again] = world.opened
        assert again is not port
        assert stack.names() == ["rxe0"]


async def test_a_failed_device_is_closed_without_notifications(
    world: World, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.abc.Clock
) -> None:
    """A failed device is closed although the kernel sends no notifications."""

    def refuse() -> AbstractContextManager[World]:
        raise PermissionError(errno.EPERM, "no netlink")

    monkeypatch.setattr(PortWatch, "open", refuse)
    world.add_devices("rxe0", "rxe1")
    async with followed(world) as stack:
        [port, _] = world.opened
        port.failed = True
        assert port.on_event is not None
        port.on_event(RnicEvent.FATAL)
        await trio.testing.wait_all_tasks_blocked()
        assert stack.names() == ["rxe1"]


async def test_a_device_that_cannot_be_closed_affects_no_other(
    world: World, autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error at closing a device does not affect other RNICs."""

    def refuse(port: FakePort) -> None:
        close(port)
        raise RnicError(errno.EBUSY, "in use")

    close = FakePort.close
    monkeypatch.setattr(FakePort, "close", refuse)
    world.add_devices("rxe0", "rxe1")
    async with followed(world) as stack:
        world.remove_devices("rxe0")
        await announce(world)
        assert stack.names() == ["rxe1"]
        monkeypatch.setattr(FakePort, "close", close)


async def test_companions_remain_after_the_first_rnic_has_disappeared(
    world: World, autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first RNIC of a group disappears with its interface. The others remain companions."""
    world.add_devices("rxe2", "rxe3")
    async with followed(world) as stack:
        first, second = stack.rnics.opened[-2:]
        assert stack.rnics.companions(first) == [first, second]
        world.remove_devices("rxe2")
        left = {index: each for index, each in HOST.items() if each.name != "eth2"}
        monkeypatch.setattr(pnet, "interfaces", lambda: left)
        await announce(world)
        assert stack.rnics.companions(first) == [second]
        assert stack.rnics.companions(second) == [second]


async def test_a_listed_rnic_is_opened_again(world: World, autojump_clock: trio.abc.Clock) -> None:
    """The same RNIC object is opened again, and no RNIC outside the list."""
    named = world.port("rxe0")
    world.add_devices("rxe0", "rxe1")
    async with followed(world, named) as stack:
        for _ in range(2):
            world.remove_devices("rxe0")
            await announce(world)
            assert stack.names() == []
            assert world.opened == []
            world.add_devices("rxe0")
            await announce(world)
            assert stack.rnics.opened == [named]


async def test_follow_returns_if_no_port_can_appear(world: World) -> None:
    """With software RNICs alone, `follow` needs no task and no socket."""
    with trio.fail_after(PATIENCE):
        made = FollowedRnics(Config(rnics=(SoftRnic(),)))
        await made.rnics.follow()


async def test_listeners_offer_the_option_once_there_is_a_port(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under "auto" listeners offer SMC-R by the TCP option once there is a RoCE port."""
    async with trio_smc.open_stack() as stack:
        offered: list[object] = []
        monkeypatch.setattr(stack.runtime.tcp_option, "offer", offered.append)
        [listener] = await stack.open_listeners(0, host="127.0.0.1")
        [closed] = await stack.open_listeners(0, host="127.0.0.1")
        await closed.aclose()
        assert offered == []
        world.add_devices("rxe0")
        await announce_and_wait(world, lambda: bool(offered))
        assert offered == [listener.socket]
        await listener.aclose()


async def announce_and_wait(world: World, condition: Callable[[], bool]) -> None:
    world.change.set()
    with trio.fail_after(PATIENCE):
        while not condition():
            await trio.lowlevel.checkpoint()


# --- peer IDs ------------------------------------------------------------------------------------

HOLDER = """
import secrets, sys
from types import SimpleNamespace
from trio_smc.stack.rnics import StackRnics

secrets.token_bytes = lambda count: b"\\x11" * count
rnics = StackRnics.__new__(StackRnics)
rnics.opened = [SimpleNamespace(kind="roce", mac=bytes.fromhex(sys.argv[1]))]
print(rnics.new_peer_id().hex(), flush=True)
sys.stdin.read()
"""


@pytest.mark.rfc("2.2.4/4", "A.2.1/1", "A.2.1/2")
def test_two_processes_on_one_port_have_different_peer_ids(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both processes draw the same random number, and the second one draws again."""
    mac = b"\x02" + secrets.token_bytes(5)  # not used by another run
    draws = iter((b"\x11\x11", b"\x11\x11", b"\x22\x22"))
    monkeypatch.setattr(secrets, "token_bytes", lambda count: next(draws))
    world.add_devices("rxe0")
    rnics = FollowedRnics(Config(rnics=(world.port("rxe0"),))).rnics
    rnics.open()
    rnics.opened[0].mac = mac
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, mac.hex()],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as holder:  # fmt: skip
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == (b"\x11\x11" + mac).hex()
        assert rnics.new_peer_id() == b"\x22\x22" + mac
        assert next(draws, None) is None
        holder.communicate()
    rnics.close()
