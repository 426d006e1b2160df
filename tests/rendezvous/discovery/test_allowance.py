"""Same-host discovery: the work of a client in the directories of other members of its group."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rendezvous.discovery.world import serving
from trio_smc.host import private_directory
from trio_smc.host.private_directory import PrivateDirectory
from trio_smc.rendezvous.discovery import allowance, directory, lookup
from trio_smc.rendezvous.discovery.allowance import Allowances
from trio_smc.rendezvous.discovery.lookup import Lookups
from trio_smc.rendezvous.discovery.names import Names
from trio_smc.rendezvous.discovery.older_releases import connects

HOSTILE, HONEST = 64201, 64202
HOST = "127.0.0.1"


@pytest.fixture
def shared(private: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A private directory that this process's group shares."""
    if os.geteuid():
        pytest.skip("makes files of other users")
    private.mkdir()
    os.chown(private, 0, os.getegid())
    private.chmod(0o3770)
    monkeypatch.setattr(private_directory, "is_named", lambda path: True)
    yield private
    for each in private.iterdir():
        shutil.rmtree(each)


def make(path: Path, user: int) -> Path:
    """Make the directories of a path that are missing, for another member."""
    if not path.parent.exists():
        make(path.parent, user)
    path.mkdir()
    os.chown(path, user, os.getegid())
    path.chmod(0o2750)
    return path


def fill(path: Path, kind: int) -> None:
    """Make 1,600 names for one file of a kind."""
    first = path / "0"
    os.mknod(first, kind | 0o660)
    os.chown(first, HOSTILE, os.getegid())
    for number in range(1, 1600):
        os.link(first, path / f"{number}")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        yield sock


def own_lookups(shared: Path) -> Lookups:
    return Lookups(shared, Names(shared), lambda: None, None)


@pytest.mark.parametrize("kind", [stat.S_IFREG, stat.S_IFIFO, stat.S_IFSOCK])
async def test_thousands_of_names_of_one_member(
    shared: Path, listener: socket.socket, kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookup reads a part of them, and finds the listeners of the others."""
    clock = [1.0]
    costs: list[int] = []
    tried: list[str] = []
    take = allowance.Allowance.take

    def counting_connects(probe: socket.socket, path: str) -> bool:
        tried.append(path)
        clock[0] += 0.001
        return connects(probe, path)

    def counting_take(self: allowance.Allowance, owner: int | None, cost: int) -> bool:
        is_taken = take(self, owner, cost)
        if owner == HOSTILE and is_taken:
            costs.append(cost)
        return is_taken

    for module in (allowance, lookup):
        monkeypatch.setattr(module, "now", lambda timers: clock[0])
    monkeypatch.setattr(lookup, "connects", counting_connects)
    monkeypatch.setattr(allowance.Allowance, "take", counting_take)
    # The kernel refuses connections to a socket without a process; then the name stays, as if this
    # process were not permitted to remove it.
    monkeypatch.setattr(PrivateDirectory, "remove", lambda self, name: None)
    async with serving(shared) as server:
        port = server.address[1]
        namespace = directory.namespace_name()
        place = f"{namespace}/{directory.listener_name(HOST, port, dual_stack=False)}"
        for each in range(3):
            fill(make(shared / f"tcp-{each}" / place, HOSTILE), kind)
        honest = make(shared / "tcp-zz" / place, HONEST) / "1-x"
        listener.bind(str(honest))
        os.chown(honest, HONEST, os.getegid())
        lookups = own_lookups(shared)
        first = []
        for _ in range(3):
            costs.clear()
            tried.clear()
            found = lookups.search(namespace, HOST, (HOST, port))
            assert {os.geteuid(), HONEST} <= found.users
            assert sum(costs) <= allowance.SHARE + allowance.POOL
            first.append(sum(costs))
        # The first lookup had a pool, and the next ones came too soon for another.
        assert first[0] > allowance.SHARE >= max(first[1:])
        assert len(tried) <= 2 + allowance.SHARE / allowance.LISTENER_COSTS
        clock[0] += 10.0
        costs.clear()
        lookups.search(namespace, HOST, (HOST, port))
        assert sum(costs) > allowance.SHARE


async def test_a_lookup_without_hostile_members_has_a_pool_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [1.0]
    monkeypatch.setattr(allowance, "now", lambda timers: clock[0])
    grants = Allowances(None)
    for _ in range(3):
        one = grants.grant(clock[0])
        assert one.take(HONEST, allowance.SHARE)
        clock[0] += 1.0
        grants.settle(one, clock[0] - 1.0)
        assert grants.grant(clock[0]).take(HONEST, allowance.SHARE + 1)
    one = grants.grant(clock[0])
    assert one.take(HONEST, allowance.SHARE + 1)
    clock[0] += 1.0
    grants.settle(one, clock[0] - 1.0)
    assert not grants.grant(clock[0] + 9.9).take(HONEST, allowance.SHARE + 1)
    assert grants.grant(clock[0] + 10.1).take(HONEST, allowance.SHARE + 1)
    # This user has no limit.
    assert grants.grant(clock[0]).take(os.geteuid(), 1 << 20)


def test_network_namespaces_of_one_member_do_not_hide_those_of_others(shared: Path) -> None:
    for number in range(100):
        make(shared / "tcp-0" / f"{number + 1}", HOSTILE)
    make(shared / "tcp-1" / "7", HONEST)
    root = PrivateDirectory.open(shared, create=False)
    try:
        found = directory.other_namespaces(root, "5")
    finally:
        root.close()
    assert len(found) == 64
    assert "tcp-1/7" in found
    assert "tcp-0/5" not in found
