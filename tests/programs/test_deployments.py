"""The compose file and the systemd units of examples/ are consistent."""

from __future__ import annotations

import configparser
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from trio_smc import load_config
from trio_smc.tools.cli import parser

EXAMPLES = Path(__file__).parents[2] / "examples"
SYSTEMD = EXAMPLES / "systemd"
UNITS = [SYSTEMD / "app-server.service", SYSTEMD / "app-client.service"]


def shared_directory() -> str:
    return str(load_config(SYSTEMD / "app-smc.toml").private_directory())


@pytest.mark.parametrize("name", ["compose.yaml", "networks.yaml"])
def test_containers_share_the_resources_of_smc_r(name: str) -> None:
    content = yaml.safe_load((EXAMPLES / "containers" / name).read_text())
    server, client = content["services"]["server"], content["services"]["client"]
    if name == "compose.yaml":
        assert (client["network_mode"], content.get("networks")) == ("service:server", None)
    else:
        # The name of the server resolves to its own address: no port is published.
        [network] = content["networks"]
        assert server["networks"] == client["networks"] == [network]
        assert content["networks"][network] == {"driver": "bridge"}
        assert client["command"][-1] == "server"
        for each in (server, client):
            assert not {"network_mode", "ports"} & each.keys()
    assert client["user"] == server["user"] == "1000:1000"
    assert content["volumes"]["smc"]["driver_opts"]["o"] == "uid=1000,gid=1000,mode=0700"
    for each in (server, client):
        volume, settings = each["volumes"]
        assert volume == f"smc:{shared_directory()}"
        source, target, mode = settings.split(":")
        assert (EXAMPLES / "containers" / source).resolve() == SYSTEMD / "app-smc.toml"
        assert (each["command"][3], mode) == (target, "ro")
        parser().parse_args(each["command"][1:])


def test_the_directory_of_the_units_is_one_that_a_group_may_share() -> None:
    lines = (SYSTEMD / "app-smc.conf").read_text().splitlines()
    [line] = [each.split() for each in lines if not each.startswith("#")]
    assert line == ["d", shared_directory(), "3770", "root", "app-smc", "-"]
    for path in UNITS:
        unit = configparser.ConfigParser(interpolation=None)
        unit.optionxform = str  # type: ignore[assignment,method-assign]
        unit.read_string(path.read_text())
        service = unit["Service"]
        assert (service["SupplementaryGroups"], service["ReadWritePaths"]) == (line[4], line[1])
        parser().parse_args(shlex.split(service["ExecStart"])[2:])


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("there is no systemd-analyze")
    # Without other units, so that all messages are about these.
    for each in UNITS:
        shutil.copy(each, tmp_path)
    command = ["systemd-analyze", "verify", "--man=no"]
    paths = [str(tmp_path / each.name) for each in UNITS]
    done = subprocess.run([*command, *paths], capture_output=True, text=True, check=False)
    logged = [line for line in done.stderr.splitlines() if "app-" in line]
    assert (done.returncode, logged) == (0, [])
    broken = tmp_path / "broken.service"
    broken.write_text(UNITS[0].read_text().replace("ExecStart=/usr/bin/env", "ExecStart=env//"))
    again = subprocess.run([*command, str(broken)], capture_output=True, check=False)
    assert again.returncode, "systemd-analyze reads the units"
