"""Runs in one guest, by pytest: ports that appear and disappear, VLANs and bonds of the kernel."""

from __future__ import annotations

import ipaddress
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest
import trio

import trio_smc
from tests.timing import PATIENCE
from trio_smc import Config, FallbackReason, VerbsRnic
from trio_smc._stack import Stack
from trio_smc.host import pnet
from trio_smc.host.addresses import local_prefix
from trio_smc.host.netlink import AnswerCache


def sh(command: str) -> None:
    subprocess.run(["bash", "-ec", command], check=True)


@pytest.fixture
def host() -> Iterator[Callable[[str, str], None]]:
    """Run a command now, and at the end another that undoes it."""
    with ExitStack() as undo:

        def do(command: str, back: str) -> None:
            sh(command)
            undo.callback(sh, back)

        yield do


def make_bond(host: Callable[[str, str], None]) -> None:
    """bond0 over two interfaces, and a VLAN on it; nothing else has addresses in its subnets."""
    for name in ("low0", "low1"):
        host(f"ip link add {name} type dummy", f"ip link delete {name}")
    host("ip link add bond0 type bond mode active-backup miimon 100", "ip link delete bond0")
    sh("for each in low0 low1; do ip link set $each master bond0; done; ip link set bond0 up")
    sh("ip addr add 10.20.0.1/24 dev bond0")
    host("ip link add link bond0 name bond0.7 type vlan id 7", "ip link delete bond0.7")
    sh("ip link set bond0.7 up; ip addr add 10.27.0.1/24 dev bond0.7")


def serving(stack: Stack, local: str) -> tuple[str, str, int | None] | FallbackReason:
    """Device, GID's address and VLAN of the port for a connection to a neighbour of ``local``."""
    remote = str(ipaddress.ip_address(local) + 8)
    rnic = stack.runtime.rnic_for(local, remote)
    if isinstance(rnic, FallbackReason):
        return rnic
    assert isinstance(rnic, VerbsRnic)
    gid = ipaddress.IPv6Address(rnic.gid)
    vlan = pnet.interfaces()[rnic.gid_entry.ifindex].vlan
    return rnic.device, str(gid.ipv4_mapped or "link-local"), vlan


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(PATIENCE):
        while not condition():  # noqa: ASYNC110 - the kernel's doings have no event here
            await trio.sleep(0.02)


async def served(stack: Stack, local: str, *expected: object) -> None:
    """Wait for the port for a neighbour of ``local``: the kernel makes GIDs after addresses."""
    found: object = None
    with trio.move_on_after(PATIENCE):
        while (found := serving(stack, local)) != expected:  # noqa: ASYNC110 - as above
            await trio.sleep(0.02)
    assert found == expected


def names(stack: Stack) -> set[str]:
    return {each.name for each in stack.rnics if each.kind == "roce"}


async def test_a_bond_of_which_a_member_has_an_rnic(host: Callable[[str, str], None]) -> None:
    make_bond(host)
    host("rxe 5 low0", "rdma link delete rxe5")
    async with trio_smc.open_stack(Config()) as stack:
        await served(stack, "10.20.0.1", "rxe5", "10.20.0.1", None)
        await served(stack, "10.27.0.1", "rxe5", "10.27.0.1", 7)
        await served(stack, "10.8.0.1", "rxe0", "10.8.0.1", None)


async def test_a_bond_that_has_an_rnic_itself(host: Callable[[str, str], None]) -> None:
    make_bond(host)
    host("rxe 5 bond0", "rdma link delete rxe5")
    async with trio_smc.open_stack(Config()) as stack:
        await served(stack, "10.20.0.1", "rxe5", "10.20.0.1", None)
        await served(stack, "10.27.0.1", "rxe5", "10.27.0.1", 7)


async def test_a_bond_without_an_rnic(host: Callable[[str, str], None]) -> None:
    """There are other ports, but not on this network."""
    make_bond(host)
    async with trio_smc.open_stack(Config()) as stack:
        assert names(stack) >= {"rxe0", "rxe1"}
        assert serving(stack, "10.20.0.1") is FallbackReason.NO_RNIC
        assert serving(stack, "10.27.0.1") is FallbackReason.NO_RNIC


async def test_devices_come_and_go(host: Callable[[str, str], None]) -> None:
    """`rdma link delete` waits until all processes have closed the device: here at once."""
    host("ip link add low0 type dummy", "ip link delete low0")
    sh("ip link set low0 up; ip addr add 10.20.0.1/24 dev low0")
    async with trio_smc.open_stack(Config()) as stack:
        before = names(stack)
        assert serving(stack, "10.20.0.1") is FallbackReason.NO_RNIC
        for _ in range(2):
            sh("rxe 5 low0")
            await until(lambda: names(stack) == {*before, "rxe5"})
            await served(stack, "10.20.0.1", "rxe5", "10.20.0.1", None)
            with trio.fail_after(PATIENCE):
                await trio.run_process(["rdma", "link", "delete", "rxe5"])
            await until(lambda: names(stack) == before)
            assert serving(stack, "10.20.0.1") is FallbackReason.NO_RNIC


async def test_a_port_that_is_down_at_first(host: Callable[[str, str], None]) -> None:
    host("ip link add low0 type dummy", "ip link delete low0")
    sh("ip addr add 10.20.0.1/24 dev low0")
    host("rxe 5 low0", "rdma link delete rxe5")
    async with trio_smc.open_stack(Config()) as stack:
        before = names(stack)
        assert "rxe5" not in before
        sh("ip link set low0 up")
        await until(lambda: "rxe5" in names(stack))
        await served(stack, "10.20.0.1", "rxe5", "10.20.0.1", None)
        sh("ip link set low0 down")
        [rnic] = [each for each in stack.rnics if each.name == "rxe5"]
        await until(lambda: not rnic.port_active)
        assert "rxe5" in names(stack), "it is down, not gone"
        sh("ip link set low0 up")
        await until(lambda: rnic.port_active)


async def test_an_interface_that_is_deleted(host: Callable[[str, str], None]) -> None:
    """The RDMA device goes with the interface; kernel and command wait for this process."""
    sh("ip link add low0 type dummy; ip link set low0 up; rxe 5 low0")
    rnic = VerbsRnic("rxe5")
    async with trio_smc.open_stack(Config(rnics=(rnic,))) as stack:
        assert names(stack) == {"rxe5"}
        with trio.fail_after(PATIENCE):
            await trio.run_process(["ip", "link", "delete", "low0"])
        await until(lambda: names(stack) == set())
        # One that was named comes back as the same object.
        sh("ip link add low0 type dummy; ip link set low0 up; rxe 5 low0")
        await until(lambda: stack.rnics == (rnic,) and rnic.port_active)
    sh("rdma link delete rxe5; ip link delete low0")


def test_kept_answers_of_the_kernel_are_never_old(host: Callable[[str, str], None]) -> None:
    """After each change the next query has the same answer as the kernel's."""

    def named() -> set[str]:
        return {each.name for each in pnet.interfaces().values()}

    def out() -> str | None:
        index = pnet.route_interface("10.8.0.1", "10.99.0.7")
        return pnet.interfaces()[index].name if index else None

    def prefix_length() -> int | None:
        found = local_prefix("10.98.0.1")
        return found.length if found else None

    for name in ("low0", "low1"):
        host(f"ip link add {name} type dummy", f"ip link delete {name}")
        sh(f"ip link set {name} up")
    with closing(AnswerCache()) as memory:
        memory.open()
        for change, question, answer in (
            ("ip route add 10.99.0.0/24 dev low0", out, "low0"),
            ("ip route replace 10.99.0.0/24 dev low1", out, "low1"),
            ("ip route add 10.99.0.0/24 dev low0 table 99", out, "low1"),
            ("ip rule add to 10.99.0.0/24 lookup 99", out, "low0"),
            ("ip rule delete to 10.99.0.0/24 lookup 99", out, "low1"),
            ("ip route add 10.99.0.7/32 dev low0", out, "low0"),
            ("ip link set low0 down", out, "low1"),
            ("ip addr add 10.98.0.1/24 dev low1", prefix_length, 24),
            ("ip addr delete 10.98.0.1/24 dev low1", prefix_length, None),
            ("ip link set low0 name low9", lambda: "low9" in named(), True),
            ("ip link set low9 name low0", lambda: "low9" in named(), False),
        ):
            question()
            sh(change)
            assert question() == answer, change
