"""trio_smc and the Linux kernel's own SMC-R, in the guests of the lab."""

from __future__ import annotations

import subprocess

import pytest

from tests.lab import guest_interop, machine, runner

PROPOSAL = bytes.fromhex("e2d4c3d901")


@pytest.mark.lab
@pytest.mark.timeout(700)
@pytest.mark.parametrize("suite", list(guest_interop.SUITES))
def test_with_the_kernel(suite: str) -> None:
    """Each step of `tests.lab.guest_interop`; smc_diag in the guest says which mode it was."""
    done = runner.with_kernel(suite)
    for step in guest_interop.SUITES[suite]:
        assert f"interop: ok {step.__name__} " in done.output, done.output
    assert done.returncode == 0, done.output
    if suite != "quick":  # one guest has no wire
        check_capture(suite)


def check_capture(name: str) -> None:
    """tshark reads every message, but for Proposals without a growth area (docs/decisions.md)."""
    capture = str(machine.ARTEFACTS / f"{name}.pcapng")
    fields = ["frame.number", "tcp.payload", "smc.clc_msg", "smc.llc_msg", "_ws.malformed"]
    command = [
        "tshark",
        "--disable-protocol",
        "rpcordma",
        "-r",
        capture,
        "-Y",
        "smc || _ws.malformed",
    ]
    command += ["-T", "fields", *(word for field in fields for word in ("-e", field))]
    read = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True
    )
    clc, llc = set[str](), set[str]()
    for line in read.stdout.splitlines():
        number, payload, clc_type, llc_type, malformed = line.split("\t")
        clc.update(clc_type.split(","))
        llc.update(llc_type.split(","))
        if malformed:
            assert bytes.fromhex(payload).startswith(PROPOSAL), (number, line)
    assert {"1", "2", "3"} <= clc, clc
    assert {"1", "2"} <= {str(int(each, 0)) for each in llc if each}, llc
