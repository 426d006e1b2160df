"""The rules that choose the RNIC port of a connection, on hosts made up for the tests."""

from __future__ import annotations

import errno
import ipaddress
import os
import re
from pathlib import Path
from typing import Any

import pytest
import trio

import trio_smc
from tests.rnic.memory_rnic import Fabric, MemoryRnic
from tests.rnic.port_world import GIDS, HOST, NAMED, V1, V2, FakePort, World, entry, prefix
from trio_smc import Config, FallbackReason
from trio_smc.connecting.accept import admit_proposal
from trio_smc.host import netlink, pnet
from trio_smc.host.pnet import Interface, PortGid, choose_gids, parse_table, same_network
from trio_smc.rendezvous.terms import VERSION_1
from trio_smc.rnic.pump import Pump
from trio_smc.rnic.roce.hotplug import active_ports
from trio_smc.rnic.verbs import Rnic
from trio_smc.stack.policy import Route
from trio_smc.stack.rnics import StackRnics
from trio_smc.wire import clc


def chosen(
    route: str,
    address: str,
    network: str | None = None,
    *,
    table: pnet.PnetTable = (),
    gids: list[PortGid] = GIDS,
) -> list[tuple[str, int]]:
    found = choose_gids(
        NAMED[route], gids=gids, interfaces=HOST, table=table, address=address,
        network=prefix(network) if network else None,
    )  # fmt: skip
    return [(each.port, each.number) for each in found]


# --- the route's own port ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("route", "address", "network", "expected"),
    [
        ("eth0", "192.0.2.1", "192.0.2.0/24", ("rxe0", 1)),
        ("eth0", "192.0.2.77", "192.0.2.0/24", ("rxe0", 1)),  # a secondary address
        ("eth0", "2001:db8::1", "2001:db8::/64", ("rxe0", 2)),
        ("eth0", "2001:db8::9", "2001:db8::/64", ("rxe0", 2)),
        ("eth0", "203.0.113.9", "203.0.113.0/24", ("rxe0", 0)),  # no GID of that subnet
        ("eth0", "fe80::1", "fe80::/64", ("rxe0", 0)),
        ("eth1", "203.0.113.1", "203.0.113.0/24", ("rxe1", 1)),
        ("eth0.7", "198.51.100.1", "198.51.100.0/24", ("rxe0", 4)),
        ("eth1.7", "198.51.100.9", "198.51.100.0/24", ("rxe1", 2)),
    ],
)
def test_the_port_on_the_interface(
    route: str, address: str, network: str, expected: tuple[str, int]
) -> None:
    assert chosen(route, address, network) == [expected]


@pytest.mark.rfc("5/1")
def test_never_an_unrelated_port() -> None:
    assert chosen("lo", "127.0.0.1", "127.0.0.0/8") == []
    # The adapter below a VLAN would send untagged frames.
    untagged = [each for each in GIDS if each.interface != NAMED["eth0.7"].index]
    assert chosen("eth0.7", "198.51.100.1", "198.51.100.0/24", gids=untagged) == []
    # The interface below a VLAN is not served by a GID of the VLAN.
    tagged = [each for each in GIDS if each.interface == NAMED["eth0.7"].index]
    assert chosen("eth0", "192.0.2.1", "192.0.2.0/24", gids=tagged) == []


def test_a_bond_is_served_by_its_members() -> None:
    assert chosen("bond0", "192.0.2.1") == [("rxe2", 0), ("rxe3", 0)]
    assert chosen("bond0.7", "192.0.2.1") == [], "the ports send no tags"
    own = [*GIDS, entry("rxe3", 9, "bond0", "192.0.2.1")]
    assert chosen("bond0", "192.0.2.1", gids=own) == [("rxe3", 9)], (
        "what it owns itself comes first"
    )


def test_one_encapsulation() -> None:
    """RoCE v2 is preferred, because both sides must use the same version."""
    both = [
        entry("rxe0", 0, "eth0", "192.0.2.1", V1),
        entry("rxe0", 1, "eth0", "fe80::1", V2),
        entry("rxe1", 0, "eth0", "192.0.2.1", V1),
    ]
    assert chosen("eth0", "192.0.2.1", "192.0.2.0/24", gids=both) == [("rxe0", 1), ("rxe1", 0)]


# --- the table -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("route", "table", "expected"),
    [
        ("lo", (("lo", "rxe1"),), [("rxe1", 0)]),
        ("eth0", (("eth0", "rxe1"), ("eth0", "rxe0")), [("rxe1", 0), ("rxe0", 0)]),
        ("eth0", (("eth1", "rxe1"),), [("rxe0", 0)]),  # no entry for eth0
        ("eth0", (("eth0", "rxe9"),), []),  # the entry alone counts
        ("eth0.7", (("eth0", "rxe1"),), [("rxe1", 2)]),  # from the adapter's entry; the same tag
        ("eth0.7", (("eth0.7", "rxe2"),), []),  # rxe2 has no GID with that tag
        ("bond0.7", (("bond0", "rxe0"),), [("rxe0", 3)]),
    ],
)
def test_the_table(route: str, table: pnet.PnetTable, expected: list[tuple[str, int]]) -> None:
    assert chosen(route, "10.0.0.1", table=table) == expected


def test_a_table_as_text(tmp_path: Path) -> None:
    text = "# network of the cluster\neth0  mlx5_0 mlx5_1/2   # two\n\nbond0.7\trxe0\n"
    table = (("eth0", "mlx5_0"), ("eth0", "mlx5_1/2"), ("bond0.7", "rxe0"))
    assert parse_table(text) == table
    path = tmp_path / "pnet"
    path.write_text(text)
    assert pnet.read_table(path) == table
    assert parse_table("") == ()


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_names_that_a_table_may_have(end: str, tmp_path: Path) -> None:
    path = tmp_path / "pnet"
    names = ["eth0", "enp1s0np0.4094", "br-0123456789ab", "veth@1", "tun+", "a_b"]
    path.write_bytes(end.join(f"\t{name} mlx5_0 irdma-1.2/255" for name in names).encode())
    assert [name for name, _ in pnet.read_table(path)[::2]] == names


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("# smc_pnet\nNET1 eth0 n/a 255\nNET1 n/a mlx5_0 1\n", 2, "listing of smc_pnet"),
        ("NET1 n/a mlx5_0 1\n", 1, "listing of smc_pnet"),
        ("NET1 eth0 mlx5_0 1\n", 1, "listing of smc_pnet"),
        ("eth0 rxe0\neth1 n/a\n", 2, "'n/a' is not the name of an RNIC"),
        ("n/a rxe0", 1, "'n/a' is not the name of an interface"),
        ("eth0 1", 1, "the number 1 is not the name of an RNIC"),
        ("7 rxe0", 1, "the number 7 is not the name of an interface"),
        ("eth0 mlx5_0 1 2", 1, "smc_pnet"),
        ("eth0 mlx5_0/0", 1, "'mlx5_0/0' is not the name of an RNIC"),
        ("eth0 mlx5_0/a", 1, "'mlx5_0/a' is not"),
        ("\ufeffeth0 rxe0\n", 1, "byte order mark"),
        ("eth0,rxe0\n", 1, "comma"),
        ("eth0 rxe0, rxe1\n", 1, "comma"),
        ("\n\neth0 rxe0;rxe1", 3, "'rxe0;rxe1' is not"),
        ("eth0: rxe0", 1, "'eth0:' is not the name of an interface"),
        ("eth0 = rxe0", 1, "'=' is not"),
        ('[pnet]\neth0 = "rxe0"', 1, "'[pnet]' is not"),
        ('{"eth0": ["rxe0"]}', 1, "is not the name of an interface"),
        ('"eth0" "rxe0"', 1, "is not the name of an interface"),
        ("eth0 rxe0\neth1\x00 rxe0", 2, "is not the name of an interface"),
        ("eth0 rxe\xe9", 1, "is not the name of an RNIC"),
        ("eth0\u2028rxe0 rxe1\neth1", 2, "no RNIC"),
        ("an-interface-with-a-long-name rxe0", 1, "is not the name of an interface"),
        (".. rxe0", 1, "'..' is not the name of an interface"),
        ("e" * 10_000 + " rxe0", 1, "is not the name of an interface"),
    ],
)
def test_a_file_that_is_not_a_table(text: str, line: int, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "pnet"
    path.write_bytes(text.encode())
    with pytest.raises(ValueError, match=re.escape(f"{path}, line {line}: ")) as caught:
        pnet.read_table(path)
    assert reason in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < len(str(path)) + 200
    settings = tmp_path / "smc.toml"
    settings.write_text(f"pnet = {str(path)!r}\n")
    with pytest.raises(ValueError, match=f"line {line}: "):
        trio_smc.load_config(settings)


@pytest.mark.parametrize(
    ("data", "line"),
    [("eth0 rxe0\n".encode("utf-16"), 1), (b"eth0 rxe0\neth1 rxe1\neth2 rxe\xe9\n", 3)],
)
def test_a_file_that_is_not_utf_8(data: bytes, line: int, tmp_path: Path) -> None:
    path = tmp_path / "pnet"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"line {line} is not UTF-8"):
        pnet.read_table(path)


@pytest.mark.parametrize(
    "pair", [("eth0", "n/a"), ("eth0", "1"), ("n/a", "rxe0"), ("eth0,", "rxe0")]
)
def test_pairs_of_a_setting_are_names(pair: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=r"^pnet: .* names of an interface and an RNIC"):
        Config(pnet=(("eth0", "rxe0"), pair))


@pytest.mark.parametrize("bad", ["eth0", "eth0 rxe0\neth1 # rxe1"])
def test_a_line_without_an_rnic(bad: str, tmp_path: Path) -> None:
    path = tmp_path / "pnet"
    path.write_text(bad)
    number = bad.count("\n") + 1
    with pytest.raises(ValueError, match=f"{path}, line {number}: no RNIC for interface"):
        pnet.read_table(path)


async def test_a_table_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("missing", "binary"):
        with pytest.raises(ValueError, match=f"PNET table .*{name} cannot be read"):
            async with trio_smc.open_stack(Config(pnet=tmp_path / name)):
                pass


# --- one link group ------------------------------------------------------------------------------


@pytest.mark.rfc("5/1")
@pytest.mark.parametrize(
    ("one", "other", "networks", "table", "expected"),
    [
        ("eth0", "eth1", ("192.0.2.0/24", "192.0.2.0/24"), (), True),
        ("eth0", "eth1", ("192.0.2.0/24", "203.0.113.0/24"), (), False),
        ("eth0", "eth1", (None, None), (), False),
        ("eth0", "eth1", ("fe80::/64", "fe80::/64"), (), False),
        ("eth0.7", "eth1.7", ("192.0.2.0/24", "192.0.2.0/24"), (), True),
        ("eth0", "eth1.7", ("192.0.2.0/24", "192.0.2.0/24"), (), False),
        ("eth2", "eth3", (None, None), (), True),
        ("eth2", "eth1", (None, None), (), False),
        ("bond0", "bond0", (None, None), (), True),
        ("eth0", "eth1", (None, None), (("lo", "one"), ("lo", "other")), True),
        ("eth0", "eth1.7", (None, None), (("lo", "one"), ("lo", "other")), False),
        # RNICs in the table share a network only with those in the same line.
        ("eth0", "eth1", ("192.0.2.0/24", "192.0.2.0/24"), (("lo", "one"),), False),
    ],
)
def test_ports_that_may_share_a_link_group(
    one: str,
    other: str,
    networks: tuple[str | None, str | None],
    table: pnet.PnetTable,
    expected: bool,
) -> None:
    first, second = (prefix(each) if each else None for each in networks)
    shared = same_network(
        NAMED[one], NAMED[other], networks=(first, second), ports=("one", "other"), table=table
    )
    assert shared is expected


# --- a stack's RNICs ------------------------------------------------------------------------------


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World.made(monkeypatch)


async def rnics_of(*ports: Rnic, table: pnet.PnetTable = ()) -> StackRnics:
    class NoPump(Pump):
        def add(self, rnic: Rnic) -> None:
            pass

        def remove(self, rnic: Rnic) -> None:
            pass

    config = Config(rnics=ports, pnet=table)
    await trio.lowlevel.checkpoint()
    discovery = None
    rnics = StackRnics(config, discovery, NoPump(spin=0), lambda rnic, change: None)  # type: ignore[arg-type]
    rnics.open()
    return rnics


def served(rnics: StackRnics, local: str, remote: str) -> str:
    found = rnics.serving(local, remote)
    return found.value if isinstance(found, FallbackReason) else found.name


@pytest.mark.rfc("5/1")
async def test_a_stack_chooses(world: World) -> None:
    rnics = await rnics_of(world.port("rxe0"), world.port("rxe1"))
    first = served(rnics, "192.0.2.1", "192.0.2.9")
    assert first == "rxe0#1", "the GID of the connection's subnet is opened on demand"
    assert served(rnics, "192.0.2.1", "192.0.2.8") == first, "and opened once"
    world.route = "eth0.7"
    assert served(rnics, "198.51.100.1", "198.51.100.9") == "rxe0#4"
    world.route = "eth1"
    assert served(rnics, "203.0.113.1", "203.0.113.9") == "rxe1#1"
    world.route = "lo"
    assert served(rnics, "192.0.2.1", "192.0.2.2") == "no-rnic"
    rnics.close()
    assert world.opened == []


@pytest.mark.rfc("2.2/5")
async def test_a_link_group_keeps_to_its_vlan(world: World) -> None:
    """Also among the RNICs of one port only one is on the VLAN of a connection."""
    rnics = await rnics_of(world.port("rxe0"), world.port("rxe1"))
    plain = rnics.serving("192.0.2.1", "192.0.2.9")
    world.route = "eth0.7"
    tagged = rnics.serving("198.51.100.1", "198.51.100.9")
    assert isinstance(plain, Rnic)
    assert isinstance(tagged, Rnic)
    assert plain is not tagged
    assert not rnics.share_network(plain, tagged)
    assert plain not in rnics.companions(tagged)
    assert tagged not in rnics.companions(plain)
    assert rnics.share_network(tagged, tagged)
    rnics.close()


async def test_a_gid_that_the_user_chose(world: World) -> None:
    rnics = await rnics_of(world.port("rxe0", 2))
    assert served(rnics, "192.0.2.1", "192.0.2.9") == "rxe0", "and no other"
    world.route = "eth0.7"
    assert served(rnics, "198.51.100.1", "198.51.100.9") == "no-rnic"
    rnics.close()


async def test_a_port_that_is_down_or_drained(world: World) -> None:
    port = world.port("rxe0")
    rnics = await rnics_of(port, world.port("rxe1"))
    port.port_active = False
    assert served(rnics, "192.0.2.1", "192.0.2.9") == "rnic-down", "rxe1 is no replacement"
    port.port_active = True
    assert served(rnics, "192.0.2.1", "192.0.2.9") == "rxe0#1"
    rnics.drain(port)
    assert served(rnics, "192.0.2.1", "192.0.2.9") == "rnic-down"
    assert rnics.is_drained(rnics.named("rxe0#1")), "all RNICs of the port"
    rnics.undrain(port)
    assert served(rnics, "192.0.2.1", "192.0.2.9") == "rxe0#1"
    rnics.close()


async def test_companions(world: World) -> None:
    """Further links of a group: the same LAN, another port."""
    rnics = await rnics_of(world.port("rxe0"), world.port("rxe1"))
    first = rnics.serving("192.0.2.1", "192.0.2.9")
    world.route = "eth0.7"
    tagged = rnics.serving("198.51.100.1", "198.51.100.9")
    assert isinstance(first, Rnic)
    assert isinstance(tagged, Rnic)
    assert rnics.companions(first) == [first]
    assert rnics.companions(tagged) == [tagged]
    rnics.close()
    table = (("eth0", "rxe0"), ("eth0", "rxe1"))
    rnics = await rnics_of(world.port("rxe0"), world.port("rxe1"), table=table)
    world.route = "eth0"
    first = rnics.serving("192.0.2.1", "192.0.2.9")
    assert isinstance(first, Rnic)
    assert [each.name for each in rnics.companions(first)] == ["rxe0#1", "rxe1"]
    rnics.close()


async def test_same_host_over_roce_only_by_the_table(world: World) -> None:
    rnics = await rnics_of(world.port("rxe0"))
    world.route = "lo"
    assert served(rnics, "127.0.0.1", "127.0.0.1") == "no-rnic"
    rnics.close()
    rnics = await rnics_of(world.port("rxe0"), table=(("lo", "rxe0"),))
    assert served(rnics, "127.0.0.1", "127.0.0.1") == "rxe0"
    rnics.close()


# --- a server's look at a Proposal ----------------------------------------------------------------


@pytest.mark.rfc("5/2", "3.5.1.2/7")
@pytest.mark.parametrize(
    ("subnet", "length", "expected"),
    [
        ("192.0.2.0", 24, True),
        ("192.0.2.0", 25, False),
        ("203.0.113.0", 24, False),  # of this host, but not of this interface
        ("0.0.0.0", 0, False),
    ],
)
@pytest.mark.usefixtures("world")
def test_the_network_of_a_proposal(subnet: str, length: int, expected: bool) -> None:
    proposal = clc.Proposal(
        peer_id=bytes(8), gid=bytes(16), mac=bytes(6),
        ipv4_subnet=ipaddress.IPv4Address(subnet).packed, ipv4_mask_length=length,
    )  # fmt: skip
    rnic = MemoryRnic(Fabric(), kind="roce")
    admitted = admit_proposal(proposal, Route(rnic, "192.0.2.1"), None)
    assert admitted == ((rnic, VERSION_1) if expected else FallbackReason.PREFIX_MISMATCH)


# --- what the kernel says -------------------------------------------------------------------------


def test_loopback_as_the_kernel_has_it() -> None:
    found = pnet.interfaces()
    [loopback] = [each for each in found.values() if each.name == "lo"]
    assert loopback == Interface(index=loopback.index, name="lo")
    assert pnet.route_interface("127.0.0.1", "127.0.0.1") == loopback.index


def test_no_netlink(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netlink, "sys", type("Other", (), {"platform": "other"}))
    assert pnet.interfaces() == {}
    assert pnet.route_interface("127.0.0.1", "127.0.0.1") is None


# --- "auto" ---------------------------------------------------------------------------------------


def test_active_roce_ports(tmp_path: Path) -> None:
    """Ports as sysfs lists them: Ethernet, and up; a device that is being removed is left out."""
    for name, layer, state in (
        ("rxe0/ports/1", "Ethernet", "4: ACTIVE"),
        ("rxe1/ports/1", "Ethernet", "1: DOWN"),
        ("mlx5_0/ports/1", "InfiniBand", "4: ACTIVE"),
        ("mlx5_0/ports/2", "Ethernet", "4: ACTIVE"),
        ("deleted/ports/1", "Ethernet", "4: ACTIVE"),
    ):
        port = tmp_path / "infiniband" / name
        port.mkdir(parents=True)
        (port / "link_layer").write_text(f"{layer}\n")
        (port / "state").write_text(f"{state}\n")
    (tmp_path / "infiniband/gone/ports/1").mkdir(parents=True)
    for number, device in enumerate(("rxe0", "rxe1", "mlx5_0", "gone")):
        verbs = tmp_path / f"infiniband_verbs/uverbs{number}"
        verbs.mkdir(parents=True)
        (verbs / "ibdev").write_text(f"{device}\n")
    (tmp_path / "infiniband_verbs/uverbs9").mkdir()
    assert active_ports(tmp_path) == [("mlx5_0", 2), ("rxe0", 1)]
    assert active_ports(tmp_path / "nothing") == []


def test_a_device_that_goes_meanwhile_costs_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device disappears between the query for its name and the one for its ports."""
    for number, name in enumerate(("rxe0", "rxe5", "rxe9")):
        port = tmp_path / "infiniband" / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "link_layer").write_text("Ethernet\n")
        (port / "state").write_text("4: ACTIVE\n")
        verbs = tmp_path / f"infiniband_verbs/uverbs{number}"
        verbs.mkdir(parents=True)
        (verbs / "ibdev").write_text(f"{name}\n")
    going = str(tmp_path / "infiniband" / "rxe5" / "ports")

    def gone(look: Any) -> Any:
        def at(path: Any = ".") -> Any:
            if os.fspath(path) == going:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), going)
            return look(path)

        return at

    with monkeypatch.context() as meanwhile:
        for name in ("scandir", "listdir"):
            meanwhile.setattr(os, name, gone(getattr(os, name)))
        assert active_ports(tmp_path) == [("rxe0", 1), ("rxe9", 1)]


async def test_auto_opens_them(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """RoCE ports are opened beside the software RNIC; a port that fails is logged and left out."""

    class Broken(FakePort):
        def open(self, directory: Path) -> None:
            raise OSError(errno.ENOSYS, "pyverbs cannot be imported")

    def make_port(name: str, port: int) -> FakePort:
        return world.port(name) if name == "rxe0" else Broken(name, port)

    world.add_devices("mlx5_0", "rxe0")
    monkeypatch.setattr(StackRnics, "make_port", staticmethod(make_port))
    monkeypatch.setattr(Pump, "add", lambda self, rnic: None)
    monkeypatch.setattr(Pump, "remove", lambda self, rnic: None)
    async with trio_smc.open_stack() as stack:
        assert [(each.kind, each.name) for each in stack.rnics][1:] == [("roce", "rxe0")]
        assert stack.rnics[0].kind == "software"
        assert served(stack.runtime.rnic_set, "127.0.0.1", "127.0.0.1") == stack.rnics[0].name
        assert served(stack.runtime.rnic_set, "192.0.2.1", "192.0.2.9") == "rxe0#1"
    assert world.opened == []
