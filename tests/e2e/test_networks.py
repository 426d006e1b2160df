"""Containers with network namespaces of their own, which share a directory, over SMC-R and TCP.

TCP through the network between them is the rendezvous; where the network leads to another place,
or translates addresses, they stay TCP.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from tests.e2e.networks import Containers, Network, Networks, UserNamespace, unable

pytestmark = pytest.mark.timeout(180)

SMC_R = "smc-r", ""
UNPROVEN = "tcp", "path-not-proven"
OTHER_USER = "tcp", "other-user"
SERVICE, CLIENT, GROUP = 64201, 64202, 64210
AT_ONCE = 5.0
"""Seconds to connect without an announcement; a useless announcement takes twice as long."""


@pytest.fixture
def networks() -> Iterator[Networks]:
    """Network namespaces of the test's own."""
    why = unable()
    if why:
        pytest.skip(why)
    made = Networks()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def containers(tmp_path: Path) -> Containers:
    return Containers(tmp_path)


def routed(networks: Networks) -> tuple[Network, Network, Network]:
    """Two networks with a router between them."""
    here, router, there = networks.new(), networks.new(), networks.new()
    router.run("sh -c 'echo 1 > /proc/sys/net/ipv4/ip_forward'")
    networks.link((here, "10.77.0.2/24"), (router, "10.77.0.1/24"))
    networks.link((there, "10.78.0.1/24"), (router, "10.78.0.2/24"))
    here.run("ip route add default via 10.77.0.1")
    there.run("ip route add default via 10.78.0.2")
    return here, router, there


def nft(network: Network, chain: str, rule: str) -> None:
    """Have the kernel treat packets so."""
    if not shutil.which("nft"):
        pytest.skip("there is no nft")
    network.run(
        "nft add table ip t", f"nft 'add chain ip t c {{ {chain} }}'", f"nft add rule ip t c {rule}"
    )


async def test_a_bridge_between_two(networks: Networks, containers: Containers) -> None:
    here, there = networks.new(), networks.new()
    networks.bridge((here, "10.77.0.2/24"), (there, "10.77.0.1/24"))
    async with containers.server(there, "server") as port:
        results = await containers.connect(here, *[("10.77.0.1", port)] * 3)
    assert [each.what for each in results] == [(*SMC_R, "server")] * 3
    assert {each.pid for each in results} == {1}
    assert [each for each in containers.directory.rglob("*") if not each.is_dir()] == []


async def test_a_bridge_and_ipv6(networks: Networks, containers: Containers) -> None:
    here, there = networks.new(), networks.new()
    networks.bridge((here, "fd77::2/64"), (there, "fd77::1/64"))
    async with containers.server(there, "server", "::") as port:
        [result] = await containers.connect(here, ("fd77::1", port))
    assert result.what == (*SMC_R, "server")


@pytest.fixture
def of_a_group() -> Iterator[Containers]:
    """Containers that share a group's directory, below one that every user may pass through."""
    base = Path(tempfile.mkdtemp(prefix="smc-", dir="/tmp"))
    base.chmod(0o711)
    yield Containers(base, GROUP)
    shutil.rmtree(base)


@pytest.mark.parametrize("network", ["own", "shared"])
async def test_a_service_and_users_in_containers(
    networks: Networks, of_a_group: Containers, network: str
) -> None:
    """Members of the group use SMC-R, whatever its number is in their user namespaces."""
    here = there = networks.new()
    if network == "own":
        here = networks.new()
    networks.bridge((there, "10.77.0.1/24"), *[(here, "10.77.0.2/24")] * (here is not there))
    outcomes = {}
    with (
        UserNamespace(SERVICE, {2000: GROUP}) as service,
        UserNamespace(CLIENT, {3000: GROUP}) as member,
        UserNamespace(CLIENT, {2000: GROUP + 1}) as outsider,
        UserNamespace(CLIENT, {}, unknown=[GROUP]) as unknown,
    ):
        async with of_a_group.server(there, "server", users=service) as port:
            for name, users in (("member", member), ("outsider", outsider), ("unknown", unknown)):
                results = await of_a_group.connect(here, *[("10.77.0.1", port)] * 2, users=users)
                assert {(each.pid, each.user) for each in results} == {(1, UserNamespace.USER)}
                outcomes[name] = [each.what for each in results]
    assert outcomes == {
        "member": [(*SMC_R, "server")] * 2,
        "outsider": [(*OTHER_USER, "server")] * 2,
        "unknown": [(*OTHER_USER, "server")] * 2,
    }
    left = [each for each in of_a_group.directory.rglob("*") if not each.is_dir()]
    assert left == []


async def test_a_shared_network_as_in_a_pod(
    networks: Networks,
    containers: Containers,
) -> None:
    pod = networks.new()
    networks.bridge((pod, "10.77.0.1/24"))
    async with containers.server(pod, "server") as port:
        results = await containers.connect(pod, ("127.0.0.1", port), ("10.77.0.1", port))
    assert [each.what for each in results] == [(*SMC_R, "server")] * 2


async def test_a_router_between_two(networks: Networks, containers: Containers) -> None:
    """The path is proven, and version 1 is for one subnet (RFC 7609, 3.5.1.2)."""
    here, _, there = routed(networks)
    async with containers.server(there, "server") as port:
        [result] = await containers.connect(here, ("10.78.0.1", port))
    assert result.what == ("tcp", "prefix-mismatch", "server")


async def test_masquerading_between_two(networks: Networks, containers: Containers) -> None:
    here, router, there = routed(networks)
    nft(router, "type nat hook postrouting priority 100 ;", "masquerade")
    async with containers.server(there, "server") as port:
        results = await containers.connect(here, *[("10.78.0.1", port)] * 2)
    assert [each.what for each in results] == [(*UNPROVEN, "server")] * 2
    assert max(each.seconds for each in results) < AT_ONCE


@pytest.mark.parametrize("alias", [False, True])
async def test_a_published_port(networks: Networks, containers: Containers, alias: bool) -> None:
    """A client of the router's address gets the server, which may have that address, too."""
    here, router, there = routed(networks)
    if alias:
        there.run("ip addr add 10.77.0.1/32 dev lo")
    async with containers.server(there, "server") as port:
        rule = f"tcp dport {port} dnat to 10.78.0.1"
        nft(router, "type nat hook prerouting priority -100 ;", rule)
        [result] = await containers.connect(here, ("10.77.0.1", port))
    assert result.what == (*UNPROVEN, "server")
    assert result.seconds < AT_ONCE


async def test_a_port_that_leads_elsewhere(networks: Networks, containers: Containers) -> None:
    """The address is the server's, but this port leads to an unrelated server, which echoes the
    received bytes: no CLC message."""
    here, there, unrelated = networks.new(), networks.new(), networks.new()
    networks.bridge((here, "10.77.0.2/24"), (there, "10.77.0.1/24"), (unrelated, "10.77.0.3/24"))
    async with (
        containers.server(there, "server") as port,
        containers.server(unrelated, "unrelated", plain=True) as other,
    ):
        rule = f"ip daddr 10.77.0.1 tcp dport {port} dnat to 10.77.0.3:{other}"
        nft(here, "type nat hook output priority -100 ;", rule)
        results = await containers.connect(here, *[("10.77.0.1", port)] * 2, handshake_timeout=2.0)
    assert [each.what for each in results] == [(*UNPROVEN, "unrelated")] * 2
    assert results[1].seconds < 1.0, "it is not tried again at once"


@pytest.mark.parametrize("rule", ["redirect to :{other}", "dnat to 10.77.0.1:{other}"])
async def test_a_port_that_is_redirected_within_one_network(
    networks: Networks, containers: Containers, rule: str
) -> None:
    """The announced connection reaches an unrelated server, which echoes the received bytes: no
    CLC message."""
    pod = networks.new()
    networks.bridge((pod, "10.77.0.1/24"))
    async with (
        containers.server(pod, "server") as port,
        containers.server(pod, "unrelated", plain=True) as other,
    ):
        nft(
            pod,
            "type nat hook output priority -100 ;",
            f"tcp dport {port} {rule.format(other=other)}",
        )
        places = [("127.0.0.1", port), ("10.77.0.1", port)]
        results = await containers.connect(pod, *places, handshake_timeout=1.0)
    assert [each.what for each in results] == [(*UNPROVEN, "unrelated")] * 2
    assert max(each.seconds for each in results) < AT_ONCE


async def test_a_port_that_is_redirected_to_the_server(
    networks: Networks, containers: Containers
) -> None:
    """Both ends know the connection by other addresses."""
    pod = networks.new()
    networks.bridge((pod, "10.77.0.1/24"))
    async with containers.server(pod, "server") as port:
        rule = f"tcp dport {port ^ 1} redirect to :{port}"
        nft(pod, "type nat hook output priority -100 ;", rule)
        [result] = await containers.connect(pod, ("10.77.0.1", port ^ 1), handshake_timeout=1.0)
    assert result.what == (*UNPROVEN, "server")


async def test_another_address_that_is_translated_to_the_server(
    networks: Networks, containers: Containers
) -> None:
    """No interface has the address; the reason is not that there is no RNIC."""
    pod = networks.new()
    networks.bridge((pod, "10.77.0.1/24"))
    pod.run("ip route add 10.99.0.0/24 via 10.77.0.9")
    async with containers.server(pod, "server") as port:
        rule = f"ip daddr 10.99.0.9 tcp dport {port} dnat to 10.77.0.1"
        nft(pod, "type nat hook output priority -100 ;", rule)
        [result] = await containers.connect(pod, ("10.99.0.9", port), handshake_timeout=1.0)
    assert result.what == (*UNPROVEN, "server")


async def test_two_networks_with_the_same_addresses(
    networks: Networks,
    containers: Containers,
) -> None:
    """Each client speaks with the server of its own network, by SMC-R where that one can."""
    results = []
    async with contextlib.AsyncExitStack() as servers:
        clients = []
        port = 7777
        for name, plain in (("one", False), ("two", False), ("three", True)):
            here, there = networks.new(), networks.new()
            networks.bridge((here, "10.77.0.2/24"), (there, "10.77.0.1/24"))
            serving = containers.server(there, name, "10.77.0.1", port, plain=plain)
            await servers.enter_async_context(serving)
            # So few that clients of different networks have the same ones.
            here.run("sh -c 'echo 40000 40011 > /proc/sys/net/ipv4/ip_local_port_range'")
            clients.append(here)

        async def connect(client: Network) -> None:
            results.extend(await containers.connect(client, *[("10.77.0.1", port)] * 5))

        async with trio.open_nursery() as nursery:
            for each in clients:
                nursery.start_soon(connect, each)
    assert Counter(each.what for each in results) == {
        (*SMC_R, "one"): 5,
        (*SMC_R, "two"): 5,
        (*UNPROVEN, "three"): 5,
    }
    assert max(each.seconds for each in results) < AT_ONCE


async def test_a_proxy_between_two(networks: Networks, containers: Containers) -> None:
    here, router, there = routed(networks)
    async with containers.server(there, "server") as port:
        relay = containers.server(
            router, "", "10.77.0.1", port, plain=True, onward=["10.78.0.1", port]
        )
        async with relay:
            [result] = await containers.connect(here, ("10.77.0.1", port))
    assert result.what == (*UNPROVEN, "server")
    assert result.seconds < AT_ONCE


async def test_closed_ports_between_two(networks: Networks, containers: Containers) -> None:
    """All but the server's own port is dropped: that costs the first connection a second."""
    here, there = networks.new(), networks.new()
    networks.bridge((here, "10.77.0.2/24"), (there, "10.77.0.1/24"))
    async with containers.server(there, "server") as port:
        nft(there, "type filter hook input priority 0 ;", f"tcp dport != {port} drop")
        results = await containers.connect(here, *[("10.77.0.1", port)] * 2)
    assert [each.what for each in results] == [(*UNPROVEN, "server")] * 2
    assert results[1].seconds < 1.0


async def test_check_prints_the_remedy(
    networks: Networks, containers: Containers, tmp_path: Path
) -> None:
    """It sees the server's process, where that is this user's."""
    here, there = networks.new(), networks.new()
    networks.bridge((here, "10.77.0.2/24"), (there, "10.77.0.1/24"))
    other = tmp_path / "other"
    other.mkdir(0o700)
    outputs = {}
    async with containers.server(there, "server") as port:
        for directory in (containers.directory, other):
            command = [sys.executable, "-m", "trio_smc.tools", "check", "10.77.0.1", str(port)]
            done = await trio.run_process(
                [*here.enter(), *command, "--directory", str(directory)],
                capture_stdout=True,
                check=False,
            )
            outputs[directory] = done.stdout.decode()
    assert "SMC-R is used." in outputs[containers.directory]
    assert "in a network namespace of its own, with another private directory\n" in outputs[other]
    assert (
        "remedy     mount one directory at both ends, and name it in Config(dir" in outputs[other]
    )
