"""`read_ports` reads RDMA devices from sysfs; the tests make a sysfs of their own."""

from __future__ import annotations

from pathlib import Path

from trio_smc.tools.commands.rnic import Gid, Port, read_ports

ZERO = "0000:0000:0000:0000:0000:0000:0000:0000"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def gid(port: Path, index: int, value: str, kind: str = "", netdev: str = "") -> None:
    write(port / f"gids/{index}", value)
    if kind:
        write(port / f"gid_attrs/types/{index}", kind)
        write(port / f"gid_attrs/ndevs/{index}", netdev)


def test_no_rdma_at_all(tmp_path: Path) -> None:
    assert read_ports(tmp_path) == []


def test_ports_gids_and_upper_interfaces(tmp_path: Path) -> None:
    port = tmp_path / "class/infiniband/rxe0/ports/1"
    write(port / "state", "4: ACTIVE")
    write(port / "link_layer", "Ethernet")
    gid(port, 0, "fe80:0000:0000:0000:5054:00ff:fe12:3456", "RoCE v2", "eth0")
    gid(port, 1, "0000:0000:0000:0000:0000:ffff:c000:0201", "RoCE v2", "eth0")
    gid(port, 2, ZERO)
    gid(port, 10, "2001:0db8:0000:0000:0000:0000:0000:0001", "IB/RoCE v1", "eth0")
    gid(port, 3, "not a GID", "RoCE v2", "eth0")
    (tmp_path / "class/net/eth0/upper_bond0").mkdir(parents=True)
    (tmp_path / "class/net/bond0/upper_bond0.7").mkdir(parents=True)
    down = tmp_path / "class/infiniband/mlx5_0/ports/2"
    write(down / "state", "1: DOWN")
    assert read_ports(tmp_path) == [
        Port("mlx5_0", 2, "DOWN", "unknown", (), ()),
        Port(
            "rxe0",
            1,
            "ACTIVE",
            "Ethernet",
            (
                Gid(0, "fe80::5054:ff:fe12:3456", "RoCE v2", "eth0"),
                Gid(1, "::ffff:192.0.2.1", "RoCE v2", "eth0"),
                Gid(10, "2001:db8::1", "IB/RoCE v1", "eth0"),
            ),
            ("eth0", "bond0", "bond0.7"),
        ),
    ]
