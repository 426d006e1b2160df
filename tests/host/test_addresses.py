"""The networks of this host, as reported by the kernel."""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from pathlib import Path

import pytest

from trio_smc.host import addresses as prefixes
from trio_smc.host import netlink
from trio_smc.host.addresses import Prefix
from trio_smc.host.netlink import Message

LOOPBACK = Prefix(network=bytes((127, 0, 0, 0)), length=8)
LOOPBACK6 = Prefix(network=bytes(15) + b"\x01", length=128)


def owned(interface: int, address: str, network: str) -> prefixes.OwnAddress:
    whole = ipaddress.ip_network(network)
    return prefixes.OwnAddress(
        interface=interface,
        address=address,
        prefix=Prefix(network=whole.network_address.packed, length=whole.prefixlen),
    )


@pytest.fixture
def example_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace this host by one with two interfaces."""
    addresses = [
        owned(1, "127.0.0.1", "127.0.0.0/8"),
        owned(1, "::1", "::1/128"),
        owned(2, "192.0.2.7", "192.0.2.0/24"),
        owned(2, "198.51.100.1", "198.51.100.0/25"),
        owned(2, "fe80::7", "fe80::/64"),
        owned(2, "2001:db8::7", "2001:db8::/64"),
        owned(2, "2001:db8:1::7", "2001:db8:1::/56"),
        owned(3, "2001:db8:2::7", "2001:db8:2::/64"),
    ]
    monkeypatch.setattr(prefixes, "own_addresses", lambda: addresses)
    monkeypatch.setattr(prefixes, "probe_own", lambda address: None)


def own_ipv6() -> list[tuple[str, int]]:
    """Addresses and prefix lengths from another source: /proc."""
    found = []
    for line in Path("/proc/net/if_inet6").read_text().splitlines():
        digits, _, length, *_ = line.split()
        found.append((str(ipaddress.IPv6Address(bytes.fromhex(digits))), int(length, 16)))
    return found


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.8.7", "::ffff:127.0.0.1"])
def test_ipv4_loopback_is_one_network(address: str) -> None:
    assert prefixes.local_prefix(address) == LOOPBACK
    assert prefixes.interface_prefixes(address) == (LOOPBACK,)


def test_ipv6_loopback() -> None:
    assert prefixes.local_prefix("::1") == LOOPBACK6
    assert prefixes.interface_prefixes("::1") == (LOOPBACK6,)


def test_every_ipv6_address_of_this_host_has_the_prefix_the_kernel_gives_it() -> None:
    for address, length in own_ipv6():
        expected = ipaddress.ip_network(f"{address}/{length}", strict=False)
        found = prefixes.local_prefix(f"{address}%lo")
        assert found == Prefix(network=expected.network_address.packed, length=length)
        assert found in prefixes.all_prefixes()


def test_all_prefixes_holds_the_loopback_network() -> None:
    assert LOOPBACK in prefixes.all_prefixes()


def test_an_address_of_another_host_has_no_prefix() -> None:
    assert prefixes.local_prefix("203.0.113.77") is None
    assert prefixes.interface_prefixes("2001:db8:ffff::1") == ()


@pytest.mark.usefixtures("example_host")
def test_the_prefixes_of_an_interface_start_with_the_address_s_own() -> None:
    first = Prefix(network=ipaddress.ip_address("2001:db8:1::").packed, length=56)
    second = Prefix(network=ipaddress.ip_address("2001:db8::").packed, length=64)
    assert prefixes.interface_prefixes("2001:db8:1::7") == (first, second)
    assert prefixes.interface_prefixes("192.0.2.7")[0] == Prefix(
        network=bytes((192, 0, 2, 0)), length=24
    )


@pytest.mark.usefixtures("example_host")
def test_link_local_prefixes_are_never_proposed() -> None:
    own = prefixes.local_prefix("fe80::7%eth0")
    assert own is not None
    assert own.is_link_local
    assert own not in prefixes.interface_prefixes("fe80::7%eth0")


@pytest.mark.rfc("3.5.1.2/5")
@pytest.mark.usefixtures("example_host")
@pytest.mark.parametrize(
    ("subnet", "length", "attached"),
    [
        ("192.0.2.0", 24, True),
        ("198.51.100.0", 25, True),
        ("127.0.0.0", 8, True),
        ("192.0.2.0", 25, False),  # the same number with another mask is another subnet
        ("198.51.100.128", 25, False),
        ("0.0.0.0", 0, False),
    ],
)
def test_server_check_of_a_subnet(subnet: str, length: int, attached: bool) -> None:
    assert prefixes.is_attached([Prefix(socket.inet_aton(subnet), length)]) is attached


@pytest.mark.rfc("3.5.1.2/5")
@pytest.mark.usefixtures("example_host")
@pytest.mark.parametrize(
    ("listed", "attached"),
    [
        (["2001:db8:2::/64"], True),
        (["2001:db8:ffff::/64", "2001:db8::/64"], True),
        (["::1/128"], True),
        (["2001:db8:ffff::/64"], False),
        (["fe80::/64"], False),
        ([], False),
    ],
)
def test_server_check_of_a_prefix_list(listed: list[str], attached: bool) -> None:
    networks = [ipaddress.IPv6Network(text) for text in listed]
    proposed = [Prefix(n.network_address.packed, n.prefixlen) for n in networks]
    assert prefixes.is_attached(proposed) is attached


@pytest.mark.parametrize(
    ("local", "remote", "same"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("192.0.2.7", "127.3.2.1", True),
        ("192.0.2.7", "198.51.100.1", True),
        ("203.0.113.5", "::ffff:203.0.113.5", True),
        ("::1", "::1", True),
        ("fe80::7%2", "fe80::7%3", True),
        ("192.0.2.7", "192.0.2.8", False),
        ("2001:db8::7", "2001:db8::8", False),
    ],
)
@pytest.mark.usefixtures("example_host")
def test_same_host(local: str, remote: str, same: bool) -> None:
    assert prefixes.is_same_host(local, remote) is same


def test_every_own_address_is_on_the_same_host() -> None:
    for address, _ in own_ipv6():
        assert prefixes.is_same_host("127.0.0.1", address)


def test_two_sockets_find_out_if_an_address_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    def dump() -> None:
        raise AssertionError("no dump is needed")

    monkeypatch.setattr(prefixes, "own_addresses", dump)
    for address, _ in own_ipv6():
        if not ipaddress.ip_address(address).is_link_local:
            assert prefixes.is_same_host("127.0.0.1", address)
    assert not prefixes.is_same_host("127.0.0.1", "203.0.113.77")
    assert not prefixes.is_same_host("::1", "2001:db8:ffff::1")


def test_source_address_is_the_one_the_kernel_uses() -> None:
    assert prefixes.source_address("127.0.0.1", 7000) == "127.0.0.1"
    assert prefixes.source_address("::1", 7000) == "::1"
    for address, _ in own_ipv6():
        if ipaddress.ip_address(address).is_link_local:
            continue
        found = prefixes.source_address(address, 7000)
        assert found is not None
        with socket.socket(socket.AF_INET6) as bound:
            bound.bind((found, 0))


def test_no_route_is_no_source() -> None:
    # The kernel refuses a connect to a broadcast address without SO_BROADCAST.
    assert prefixes.source_address("255.255.255.255", 9) is None


def test_text_that_is_no_address_is_the_caller_s_error() -> None:
    for call in (prefixes.local_prefix, prefixes.plain_address):
        with pytest.raises(ValueError, match="example"):
            call("example.org")
    with pytest.raises(ValueError, match="example"):
        prefixes.source_address("example.org", 1)


def test_plain_addresses() -> None:
    assert prefixes.plain_address("FE80:0::7%eth0") == "fe80::7"
    assert prefixes.plain_address("::ffff:192.0.2.7") == "192.0.2.7"


def test_a_point_to_point_interface_is_in_its_peer_s_network() -> None:
    head = struct.pack("=BBBBI", socket.AF_INET, 30, 0, 0, 4)
    own, peer = socket.inet_aton("192.0.2.7"), socket.inet_aton("198.51.100.9")
    found = prefixes.own_address(Message(head, {1: peer, 2: own}))
    assert (found.interface, found.address) == (4, "192.0.2.7")
    assert found.prefix == Prefix(network=bytes((198, 51, 100, 8)), length=30)


@pytest.mark.parametrize("length", [0, 1, 8, 63, 64, 65, 127, 128])
def test_bits_beyond_the_prefix_are_zero(length: int) -> None:
    head = struct.pack("=BBBBI", socket.AF_INET6, length, 0, 0, 4)
    packed = ipaddress.ip_address("2001:db8:ffff:ffff:ffff::7").packed
    found = prefixes.own_address(Message(head, {1: packed}))
    expected = ipaddress.ip_network((packed, length), strict=False)
    assert found.prefix == Prefix(network=expected.network_address.packed, length=length)


def without_networks() -> None:
    assert prefixes.all_prefixes() == ()
    assert prefixes.local_prefix("192.0.2.7") is None
    assert not prefixes.is_attached([Prefix(bytes((192, 0, 2, 0)), 24)])
    assert prefixes.is_attached([LOOPBACK])
    assert not prefixes.is_same_host("192.0.2.7", "203.0.113.5")


def test_another_platform_has_no_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    without_networks()


def test_without_netlink_there_are_no_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(protocol: int) -> socket.socket:
        raise PermissionError("no netlink here")

    monkeypatch.setattr(netlink, "open_socket", refuse)
    without_networks()
