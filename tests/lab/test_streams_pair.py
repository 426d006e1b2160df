"""Two guests of the lab open streams over soft-RoCE, found by the TCP option and PNET."""

from __future__ import annotations

import base64
import re
import subprocess
from pathlib import Path

import pytest

from tests.lab import runner
from tests.lab.failures import describe_failure
from tests.wire import tshark_reader

STEPS = (
    "option_on_the_wire", "strict", "ipv6", "vlan", "never_an_unrelated_port", "pnet_table",
    "port_down", "bond",
)  # fmt: skip
# What tshark reads in frames of both guests: condition, field, values.
READINGS = (
    ("option", "tcp.port == 7700 && tcp.flags.ack == 0", "tcp.options.experimental.exid",
     {"0xe2d4"}),
    ("option", "tcp.port == 7700 && tcp.flags.ack == 1", "tcp.options.experimental.exid",
     {"0xe2d4"}),
    ("vlan", "infiniband", "ip.src", {"10.7.0.1", "10.7.0.2"}),
)  # fmt: skip


@pytest.mark.lab
@pytest.mark.timeout(1000)
def test_streams_between_two_guests(tmp_path: Path) -> None:
    tshark_reader.require_tshark()
    done = runner.streams()
    assert done.returncode == 0, describe_failure(done)
    for name, condition, field, expected in READINGS:
        for role in ("server", "client"):
            [text] = re.findall(rf"{role}: pcap {name} (\S+)", done.output)
            (tmp_path / "wire.pcap").write_bytes(base64.b64decode(text))
            read = subprocess.run(
                ["tshark", "-r", tmp_path / "wire.pcap", "-Y", condition, "-T", "fields",
                 "-e", field],
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True,
            )  # fmt: skip
            assert expected <= set(read.stdout.split()), (name, role, read.stdout)
    for role in ("server", "client"):
        for step in STEPS:
            assert f"{role}: ok {step}" in done.output, describe_failure(done)
