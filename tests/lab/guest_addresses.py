"""Runs in one guest, by pytest: a queue pair is connected without a wait for the peer's address.

To connect a queue pair the kernel resolves the peer's MAC address.  It waits up to a second for the
answer, and blocks the calling process for that time.  So `Rnic.address_known` comes first.  Devices
as for `tests.lab.guest_contract`; neighbours live in a network namespace of their own.
"""

from __future__ import annotations

import errno
import ipaddress
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Final, Self

import pytest

from tests.rnic.contract import End, make_end
from tests.timing import PATIENCE
from trio_smc.rnic.roce.device import VerbsRnic
from trio_smc.rnic.verbs import QpState, Rnic, RnicError

AT_ONCE: Final = 0.4
"""Seconds.  Two queries by netlink take far less; the kernel would wait for a second, each time."""
TRIES: Final = 5
"""A busy host stops a guest sometimes, but not each time."""


def sh(command: str) -> None:
    subprocess.run(["bash", "-ec", command], check=True)


def gid_of(address: str) -> bytes:
    ip = ipaddress.ip_address(address)
    return ip.packed if ip.version == 6 else bytes(10) + b"\xff\xff" + ip.packed


class Ticker:
    """A thread that ticks every millisecond, and measures its longest pause."""

    def __enter__(self) -> Self:
        self.longest = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def _run(self) -> None:
        last = time.monotonic()
        while not self._over.wait(0.001):
            now = time.monotonic()
            self.longest, last = max(self.longest, now - last), now
        self.longest = max(self.longest, time.monotonic() - last)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def at_once(attempt: Callable[[], float]) -> None:
    """Repeat until there was no pause; ``attempt`` returns the length of a pause."""
    took: list[float] = []
    while not took or took[-1] >= AT_ONCE:
        assert len(took) < TRIES, took
        sh("ip neigh flush dev mac0")
        took.append(attempt())


@pytest.fixture(scope="module")
def far() -> Iterator[None]:
    """A neighbour with 10.8.0.50, 10.8.0.51 and fd08::50, and a router to 10.66.0.0/24."""
    sh(
        "ip netns add far; ip link add link dummy0 name far0 type macvlan mode bridge\n"
        "ip link set far0 netns far; ip -n far link set far0 up; ip -n far link set lo up\n"
        "for n in 50 51; do ip -n far addr add 10.8.0.$n/24 dev far0; done\n"
        "ip -n far addr add fd08::50/64 dev far0 nodad; ip addr add fd08::1/64 dev mac0 nodad\n"
        "ip route add 10.66.0.0/24 via 10.8.0.51 dev mac0"
    )
    yield
    sh(
        "ip route delete 10.66.0.0/24 via 10.8.0.51; ip addr delete fd08::1/64 dev mac0\n"
        "ip netns delete far; ip neigh flush dev mac0"
    )


@pytest.fixture
def end(runtime_directory: Path, far: None) -> Iterator[End]:
    """One end in INIT, on the port that has 10.8.0.1/24."""
    yield from end_of(VerbsRnic("rxe0"), runtime_directory)


def end_of(rnic: VerbsRnic, directory: Path) -> Iterator[End]:
    sh("ip neigh flush dev mac0")
    with closing(rnic):
        rnic.open(directory)
        rnic.address_known(rnic.gid)
        with closing(make_end(rnic)) as end:
            yield end


def connect(end: End, address: str) -> None:
    end.qp.to_rtr(gid=gid_of(address), qp_num=17, psn=7, mtu=1)


@pytest.mark.parametrize("dead", ["10.8.0.99", "10.77.0.9"])
def test_no_host_answers_for_the_address(end: End, dead: str) -> None:
    """The address is on the port's network, or routed as if it were."""

    def attempt() -> float:
        with Ticker() as ticker:
            start = time.monotonic()
            with pytest.raises(RnicError) as refused:
                connect(end, dead)
            took = time.monotonic() - start
        assert refused.value.errno == errno.EHOSTUNREACH
        assert end.qp.state is QpState.INIT
        return max(took, ticker.longest)

    at_once(attempt)
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        assert not end.rnic.address_known(gid_of(dead))
        time.sleep(0.1)


def become_known(rnic: Rnic, address: str) -> float:
    """Connect as soon as the address is known; returns the longest pause of this process."""
    with closing(make_end(rnic)) as end:
        with Ticker() as ticker:
            start = time.monotonic()
            assert not rnic.address_known(gid_of(address))
            while not rnic.address_known(gid_of(address)):
                assert time.monotonic() - start < PATIENCE
                time.sleep(0.002)
            took = time.monotonic() - start
            connect(end, address)
        assert end.qp.state is QpState.RTR
    print(f"{address} was known after {took * 1000:.0f} ms")  # noqa: T201
    return ticker.longest


@pytest.mark.parametrize("address", ["10.8.0.50", "10.66.0.7"])
def test_a_neighbour_and_the_hosts_behind_it(end: End, address: str) -> None:
    at_once(lambda: become_known(end.rnic, address))


def test_an_ipv6_neighbour(runtime_directory: Path, far: None) -> None:
    with closing(VerbsRnic("rxe0")) as rnic:
        rnic.open(runtime_directory)
        table = {each.value: each.number for each in rnic.gid_table()}
    for end in end_of(VerbsRnic("rxe0", gid_index=table[gid_of("fd08::1")]), runtime_directory):
        at_once(partial(become_known, end.rnic, "fd08::50"))


@pytest.mark.parametrize("address", ["10.8.0.1", "fe80::1"])
def test_addresses_known_without_a_query(end: End, address: str) -> None:
    """This host, and addresses that the kernel refuses at once: IPv6 from an IPv4 address."""

    def attempt() -> float:
        assert end.rnic.address_known(gid_of(address))
        with closing(make_end(end.rnic)) as other, Ticker() as ticker:
            if address == "10.8.0.1":
                connect(other, address)
            else:
                with pytest.raises(RnicError, match="ibv_modify_qp"):
                    connect(other, address)
        return ticker.longest

    at_once(attempt)


def test_an_entry_that_an_operator_made(end: End) -> None:
    sh("ip neigh replace 10.8.0.98 lladdr 02:00:00:00:00:98 dev mac0 nud permanent")
    connect(end, "10.8.0.98")
    sh("ip neigh delete 10.8.0.98 dev mac0")
