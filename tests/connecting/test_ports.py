"""In a network namespace with few ports, SMC-R can use as many local ports as TCP."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.timing import PATIENCE


def in_namespace(*arguments: str) -> list[list[str]]:
    """Run `crowded_ports` in a network namespace; returns its output as lines of words."""
    made = subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("making a network namespace needs privileges")
    command = [sys.executable, "-m", "tests.connecting.crowded_ports", *arguments]
    done = subprocess.run(
        ["unshare", "-rn", *command],
        capture_output=True, text=True, timeout=2 * PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.usefixtures("runtime_directory")
def test_as_many_connections_as_tcp() -> None:
    """Connections to each server, with SMC-R or plain TCP, can use all 400 local ports."""
    tcp, ours, modes = in_namespace("count", "40000", "40399")
    assert tcp[1:] == ["400", "400", "400"]
    assert ours[1:] == tcp[1:]
    by_mode = dict(each.split("=") for each in modes[1:])
    # Random draws miss the last free ports of a destination; the kernel finds these for TCP.
    assert int(by_mode["smc-r"]) >= 700


@pytest.mark.usefixtures("runtime_directory")
def test_reserved_ports_are_left_alone() -> None:
    modes, ports = in_namespace("reserved", "40000", "40399", "40000-40099,40101,40150-40399")
    assert modes == ["smc-r"]
    assert len(set(ports)) == 20
    assert {int(port) for port in ports} <= {40100, *range(40102, 40150)}


@pytest.mark.usefixtures("runtime_directory")
def test_the_program_chooses_the_ports() -> None:
    modes, ports = in_namespace("wanted", "40000", "40399", "40200-40229")
    assert modes == ["smc-r"]
    assert {int(port) for port in ports} <= set(range(40200, 40230))
    assert len(set(ports)) == 20


@pytest.fixture
def before_6_3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imitate a kernel without IP_LOCAL_PORT_RANGE."""
    monkeypatch.setenv("BEFORE_6_3", "")


@pytest.mark.usefixtures("runtime_directory", "before_6_3")
def test_as_many_connections_as_tcp_before_linux_6_3() -> None:
    tcp, ours, modes = in_namespace("count", "40000", "40399")
    assert ours[1:] == tcp[1:] == ["400", "400", "400"]
    by_mode = dict(each.split("=") for each in modes[1:])
    assert int(by_mode["smc-r"]) >= 700


@pytest.mark.usefixtures("runtime_directory", "before_6_3")
def test_reserved_ports_are_left_alone_before_linux_6_3() -> None:
    modes, ports = in_namespace("reserved", "40000", "40399", "40000-40099,40101,40150-40399")
    assert modes == ["smc-r"]
    assert {int(port) for port in ports} <= {40100, *range(40102, 40150)}


@pytest.mark.usefixtures("runtime_directory", "before_6_3")
def test_processes_that_want_the_same_ports_before_linux_6_3() -> None:
    [[served, some_smc]] = in_namespace("share", "40000", "40002", "3")
    assert (served, some_smc) == ("60", "True")


@pytest.mark.usefixtures("runtime_directory")
def test_processes_that_want_the_same_ports() -> None:
    """No client gets the bytes of another one, and both ends of a connection have the same mode."""
    [[served, some_smc]] = in_namespace("share", "40000", "40002", "3")
    assert (served, some_smc) == ("60", "True")
