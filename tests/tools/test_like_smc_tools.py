"""`ss`, `lg`, `rnic`, `ueid`, `stats` have the columns, filters and counters of smc-tools."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import trio

import trio_smc
from tests.tools.tools_processes import command, one_line, quick_command, running
from trio_smc import Config, SoftRnic
from trio_smc.control import protocol as control
from trio_smc.host import pnet
from trio_smc.tools import output
from trio_smc.tools.commands import stats
from trio_smc.tools.commands.rnic import read_ports

USER = output.user_name(os.getuid())


async def test_columns_and_filters_of_ss() -> None:
    async with running("pair") as peer:
        port, client = peer.details["port"], peer.details["client"]
        text = (await quick_command("ss")).out
        assert text.splitlines()[0].split()[-4:] == ["GROUP", "USER", "PROGRAM", "FALLBACK"]
        assert text.count(f" {USER} ") == 4
        assert text.count(" tests.tools.tools_peer ") == 4

        async def shown(*words: object) -> list[str]:
            """Return the states of the listeners and connections that match these options."""
            [stack] = (await quick_command("ss", "--json", *words)).json
            assert (stack["uid"], stack["user"]) == (os.getuid(), USER)
            return sorted(
                ["LISTEN"] * len(stack["listeners"])
                + [each["state"] for each in stack["connections"]]
            )

        everything = ["ACTIVE", "ACTIVE", "ESTABLISHED", "LISTEN"]
        assert await shown() == await shown("--port", port) == everything
        assert await shown("--port", client) == ["ACTIVE", "ACTIVE"]
        assert await shown("--port", 1) == []
        assert await shown("--listening") == await shown("--state", "listen") == ["LISTEN"]
        assert await shown("--state", "ACTIVE", "--state", "LISTEN") == [*everything[:2], "LISTEN"]
        assert await shown("--tcp", "--state", "ACTIVE") == []
        wrong = await quick_command("ss", "--state", "active", "--state", "FOO")
        assert wrong.code == 0
        assert wrong.err == (
            "trio-smc ss: --state FOO selects no connection; the choices are: "
            "ACTIVE, ESTABLISHED, LISTEN\n"
        )
        text = (await quick_command("ss", "-v", "--smc", "--port", client)).out
        for ends in (f"{port} → {client}", f"{client} → {port}"):  # a software RNIC has no port
            assert f"  port      TCP {ends}; RNIC -\n" in text
        tcp = (await quick_command("ss", "-v", "--tcp")).out
        assert re.search(rf"^  port      TCP {port} → \d+$", tcp, re.MULTILINE)
        assert text.count("  interface lo\n") == 2
        # 1500 bytes are fewer than a ring of 16384, so the wrap counts are 0.
        assert "  tx cursor producer 0:1500, consumer 0:500\n" in text
        assert "  rx cursor producer 0:1500, consumer 0:500\n" in text
        assert "  flags     sent -, received -; shut down -\n" in text
        assert re.search(
            r"^  link      soft0, fd53:[0-9a-f:]+ → fd53:[0-9a-f:]+$", text, re.MULTILINE
        )
        assert "  network   netdev -, VLAN -, PNET -\n" in text


async def test_rows_of_ss_are_sorted_within_a_process() -> None:
    """By the address and port of this side as numbers, and then by those of the peer."""
    config = Config(receive_buffer=16384)
    async with (
        trio_smc.open_stack(config) as one,
        trio_smc.open_stack(config) as two,
        contextlib.AsyncExitStack() as streams,
    ):
        listeners = []
        for host in ("127.0.0.10", "127.0.0.9", "::1"):
            for stack in (two, one):
                listeners += await stack.open_listeners(0, host=host)
        for listener in (*listeners, *listeners):
            client = one if listener in listeners[::2] else two
            address = listener.socket.getsockname()[:2]
            await streams.enter_async_context(await client.open_stream(*address))
            await streams.enter_async_context(await listener.accept())
        lines = (await quick_command("ss")).rows()[1:]
        assert len(lines) == 6 + 4 * 6
        assert [line[1] for line in lines] == sorted([line[1] for line in lines], reverse=True)
        assert [line[1] for line in lines[:6]] == ["LISTEN"] * 6

        def order(line: list[str]) -> tuple[tuple[int, ipaddress.IPv6Address, int], ...]:
            ends = []
            for text in line[5:7] if line[1] != "LISTEN" else line[5:6]:
                host, _, port = text.rpartition(":")
                bare = host.strip("[]")
                number = ipaddress.IPv6Address(bare if ":" in bare else f"::{bare}")
                ends.append((host.count(":"), number, int(port)))
            return tuple(ends)

        for part in (lines[:6], lines[6:]):
            assert part == sorted(part, key=order)
        verbose = (await quick_command("ss", "-v")).out
        shown = [line.split()[3::2] for line in verbose.splitlines() if line.startswith("pid ")]
        assert shown == [line[5:7] for line in lines[6:]]
        for stack in (await quick_command("ss", "--json")).json:
            locals_ = [output.address_order(each["local"]) for each in stack["connections"]]
            assert locals_ == sorted(locals_)
            assert stack["listeners"] == sorted(stack["listeners"], key=output.address_order)


def test_the_order_of_addresses() -> None:
    """Any process may send anything; text that is no address comes last."""
    expected = [
        ["9.0.0.1", 80], ["::ffff:10.0.0.1", 9], ["10.0.0.1", 80], ["10.0.0.1", 443],
        ["10.0.0.1", 7000], ["192.0.2.1", 1], ["::1", 1], ["fe80::1%eth0", 1], ["fe80::1%eth1", 1],
        ["a name", 1], ["b", 0], None,
    ]  # fmt: skip
    for given in (expected[::-1], expected[5:] + expected[:5]):
        found = sorted(given, key=output.address_order)
        assert [each for each in found if each != expected[1]] == [
            each for each in expected if each != expected[1]
        ]
    assert output.port_of(None) == "-"


async def test_flags_and_shutdown_states() -> None:
    """The server has half-closed and does not read, so the client's writer is blocked."""
    config = Config(receive_buffer=16384)
    async with trio_smc.open_stack(config) as stack, trio.open_nursery() as nursery:
        [listener] = await stack.open_listeners(0, host="127.0.0.1")
        client = await stack.open_stream(*listener.socket.getsockname())
        server = await listener.accept()
        await server.send_eof()
        assert await client.receive_some() == b""
        nursery.start_soon(client.send_all, b"x" * 40000)
        await trio.testing.wait_all_tasks_blocked()
        [found] = (await quick_command("ss", "--json")).json
        flags = {(each["flags_sent"], each["flags_received"]) for each in found["connections"]}
        assert flags == {("B", "D"), ("D", "B")}
        text = (await quick_command("ss", "-v")).out
        assert "  flags     sent B, received D; shut down R\n" in text
        assert "  flags     sent D, received B; shut down W\n" in text
        while await server.receive_some(40000) and nursery.child_tasks:
            pass
        await client.aclose()
        await server.aclose()


@pytest.mark.parametrize("several", ["server", "client"])
async def test_sides_of_asymmetric_groups_and_critical_links(several: str) -> None:
    two = Config(rnics=(SoftRnic("one"), SoftRnic("two")), receive_buffer=16384)
    one = Config(rnics=(SoftRnic("only"),), receive_buffer=16384)
    made = (two, one) if several == "server" else (one, two)
    async with trio_smc.open_stack(made[0]) as server, trio_smc.open_stack(made[1]) as client:
        [listener] = await server.open_listeners(0, host="127.0.0.1")
        stream = await client.open_stream(*listener.socket.getsockname())
        other = await listener.accept()
        found = {each["stack"]: each for each in (await quick_command("lg", "--json")).json}
        sides = {
            role: found[stack.peer_id.hex()]["link_groups"][0]
            for role, stack in (("server", server), ("client", client))
        }
        single = "client" if several == "server" else "server"
        assert sides[several]["kind"] == sides[single]["kind"] == "asymmetric"
        assert sides[several]["asymmetric_side"] == "peer"
        assert sides[single]["asymmetric_side"] == "local"
        text = (await quick_command("lg")).out
        # Both stacks are in this process, and each numbers its own groups.
        assert {group["number"] for group in sides.values()} == {1}
        rows = re.findall(rf"^{os.getpid()} +(\w+) +(\d+)", text, re.MULTILINE)
        assert sorted(rows) == sorted((each.peer_id.hex(), "1") for each in (server, client))
        verbose = (await quick_command("ss", "-v")).out
        for each in (server, client):
            assert f"  stack     {each.peer_id.hex()}\n" in verbose
        assert text.count("asymmetric (ASYML)") == text.count("asymmetric (ASYMP)") == 1
        wide = (await quick_command("lg", "-v")).out
        assert wide.count("PEER GID") == 1
        for group in sides.values():
            for link in group["links"]:
                assert output.gid(link["peer_gid"]) in wide
        for device, count in (("two", 1), ("only", 1), ("nope", 0)):
            shown = (await quick_command("lg", "--json", "--device", device)).json
            assert sum(len(each["link_groups"]) for each in shown) == count
        error = (await quick_command("lg", "--device", "nope")).err
        start = "trio-smc lg: --device nope selects no link group; the choices are: "
        assert error.startswith(start)
        assert {"one", "only", "two"} & set(error.removeprefix(start).strip().split(", "))
        rnics = {
            each["name"]: (each["links"], each["critical"])
            for stack in (await quick_command("rnic", "--json")).json["stacks"]
            for each in stack["rnics"]
        }
        assert rnics == {"only": (2, 2), "one": (1, 0), "two": (1, 0)}
        await stream.aclose()
        await other.aclose()


def test_the_pci_address_of_a_device(tmp_path: Path) -> None:
    for device, place in (("mlx5_0", "pci0000:00/0000:3b:00.1"), ("rxe0", "virtual/net/eth0")):
        (tmp_path / "devices" / place).mkdir(parents=True)
        (tmp_path / "class/infiniband" / device / "ports/1/gids").mkdir(parents=True)
        link = tmp_path / "class/infiniband" / device / "device"
        link.symlink_to(tmp_path / "devices" / place)
    assert {each.device: each.pci for each in read_ports(tmp_path)} == {
        "mlx5_0": "0000:3b:00.1", "rxe0": None,
    }  # fmt: skip


def test_explain_interface_names_rnics_with_reasons() -> None:
    """The PNET table decides; without an entry, GIDs of the interface or of its bond members."""
    known = {
        each.index: each
        for each in (
            pnet.Interface(index=1, name="eth0"), pnet.Interface(index=2, name="eth1", master=3),
            pnet.Interface(index=3, name="bond0", bond=True),
            pnet.Interface(index=4, name="eth0.7", vlan=7, lower=1),
            pnet.Interface(index=5, name="eth9"),
        )
    }  # fmt: skip
    gids = [pnet.PortGid("a", 3, 2, 1, bytes(16)), pnet.PortGid("b", 0, 2, 2, bytes(16))]

    def explained(name: str, *table: tuple[str, str]) -> list[tuple[str, bool, str]]:
        return pnet.explain_interface(name, gids=gids, interfaces=known, table=table)

    assert explained("eth0") == [
        ("a", True, "its GID 3 belongs to eth0; no line of the PNET table")
    ]
    [(port, serves, why)] = explained("bond0")
    assert (port, serves) == ("b", True)
    assert "belongs to eth1, a member of the bond bond0" in why
    assert explained("eth9") == []
    assert explained("eth0", ("eth0", "b"), ("eth0", "c")) == [
        ("b", True, "the PNET table names it"),
        ("c", False, "the PNET table names it, but there is no such port with a GID"),
    ]
    assert explained("eth0.7", ("eth0", "a")) == [
        ("a", False, "the PNET table names it, but it has no GID in VLAN 7")
    ]
    with pytest.raises(ValueError, match="no network interface 'eth7'"):
        explained("eth7")


async def test_interfaces_and_ueids_of_this_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = await quick_command("rnic", "--interface", "lo")
    assert (done.code, done.err) == (0, "")
    soft0 = r"^soft0 +yes +it serves connections between processes"
    assert re.search(soft0, done.out, re.MULTILINE)
    assert "No RNIC serves connections to other hosts through lo" in done.out
    assert "no network interface 'nope'" in one_line(
        await quick_command("rnic", "--interface", "nope")
    )
    (tmp_path / "smc.toml").write_text('ueids = ["PLANT-7", "OTHER"]')
    monkeypatch.setenv("TRIO_SMC_CONFIG", str(tmp_path / "smc.toml"))
    async with trio_smc.open_stack() as stack:
        found = (await quick_command("ueid", "--json")).json
        assert found["settings"] == {
            "ueids": ["PLANT-7", "OTHER"], "origin": f"TRIO_SMC_CONFIG={tmp_path / 'smc.toml'}",
        }  # fmt: skip
        assert [each["ueids"] for each in found["stacks"]] == [["PLANT-7", "OTHER"]]
        assert found["kernel"] is None or isinstance(found["kernel"], list)
        text = (await quick_command("ueid")).out
        assert re.search(rf"^process {os.getpid()} +PLANT-7, OTHER$", text, re.MULTILINE)
        assert re.search(r"^kernel  ", text, re.MULTILINE)
        assert stack.ueids == ("PLANT-7", "OTHER")


async def test_sums_rows_and_differences_of_stats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "before.json"
    async with running("pair"), running("server") as server:
        [both] = (await quick_command("stats", "--sum", "--json", "--save", file)).json
        counters = both["counters"]
        assert (counters["connections"], counters["bytes_sent"]) == (2, 1700)
        assert (counters["client_connections"], counters["server_connections"]) == (1, 1)
        assert both["fallbacks"] == [{"origin": "local", "reason": "peer-not-capable", "count": 1}]
        rows = (await quick_command("stats", "--sum")).rows()
        assert rows[0] == ["COUNTER", "all"]
        assert ["bytes", "sent", "1.7", "KiB"] in rows
        head, *lines = (await quick_command("stats", "--rows")).rows()
        assert head[:3] == ["PID", "UP", "CONNECTIONS"]
        assert [line[0] for line in lines][-1] == "all"
        assert [line[2] for line in lines] in (["2", "0", "2"], ["0", "2", "2"])
        monkeypatch.setattr(stats, "MOST_COLUMNS", 1)
        assert (await quick_command("stats")).rows()[0] == head
        # Since the file was written, the server had one more connection, the others none.
        assert (await quick_command("check", "127.0.0.1", server.details["port"])).code == 0
        added = (await quick_command("stats", "--since", file, "--json")).json
        counts = {each["pid"]: each["counters"]["connections"] for each in added}
        assert counts.pop(server.pid) == 1
        assert list(counts.values()) == [0]
    large = {"pid": 1, "stack": "a", "counters": {"a": 1 << 70}}
    for text in (
        "[]", "{", '{"version": 1, "stacks": [{"pid": "x"}]}', '{"version": 2}', "[" * 9999,
        json.dumps({"version": 1, "stacks": [large]}),
        '{"version": 1, "stacks": [{"stack": "a"}]}', '{"version": 1}',
    ):  # fmt: skip
        file.write_text(text)
        error = one_line(await quick_command("stats", "--since", file))
        assert "is not a file of stats --save" in error
    assert "cannot read" in one_line(await quick_command("stats", "--since", "/nowhere"))
    error = one_line(await quick_command("stats", "--since", file, "--interval", "1"))
    assert "--since cannot be used with --interval: --since compares two moments" in error


async def test_histograms_of_sizes() -> None:
    """A stack counts sizes only while the command runs."""
    config = Config(receive_buffer=1 << 17)
    async with trio_smc.open_stack(config) as one, trio_smc.open_stack(config) as two:
        [listener] = await one.open_listeners(0, host="127.0.0.1")
        stream = await two.open_stream(*listener.socket.getsockname())
        other = await listener.accept()
        await stream.send_all(b"x" * 3000)
        await other.receive_some(3000)
        found: list[Any] = []

        async def count() -> None:
            found.extend((await quick_command("stats", "--sizes", "0.5", "--json")).json)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(count)
            # There is no event for a new observer.
            while one.runtime.groups.observer is None or two.runtime.groups.observer is None:  # noqa: ASYNC110
                await trio.sleep(0.01)
            for size in (100, 100, 5000):
                await stream.send_all(b"x" * size)
                await other.receive_some(size)
        by_stack = {each["stack"]: each for each in found}
        sizes = [{"limit": 128, "count": 2}, {"limit": 8192, "count": 1}]
        client, server = by_stack[two.peer_id.hex()], by_stack[one.peer_id.hex()]
        assert (client["sent"], server["sent"]) == (sizes, [])
        assert server["received"] == sizes
        assert not vars(one.runtime.groups)["observer"]
        text = (await quick_command("stats", "--sizes", "0.05")).rows()
        assert text[-1] == ["SIZE", "SENT", "RECEIVED"]
        assert "is not a number of seconds above 0 and at most 60" in one_line(
            await command("stats", "--sizes", "61")
        )
        root = one.config.private_directory() / control.DIRECTORY
        for seconds in (None, 0, -1, 61, "5", True, float("1e300")):
            async with await trio.open_unix_socket(str(root / min(os.listdir(root)))) as sock:
                await sock.send_all(control.encode({"want": ["sizes"], "seconds": seconds}))
                answer = b"".join([piece async for piece in sock])
            assert b"seconds are not a number above 0" in answer
        await stream.aclose()
        await other.aclose()
