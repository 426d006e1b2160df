"""How make handles missing Debian packages."""

from __future__ import annotations

import pytest

from scripts import bootstrap

LINE = "apt-get install -y -q --no-install-recommends graphviz tshark"


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Nothing but apt-get and sudo is on the path; collect what would be run, as if it worked."""
    ran: list[list[str]] = []

    def run(command: list[str]) -> bool:
        ran.append(command)
        return True

    there = {"apt-get", "sudo"}
    monkeypatch.setattr("shutil.which", lambda name: name if name in there else None)
    monkeypatch.setattr(bootstrap, "run_quietly", run)
    return ran


def test_without_root_and_sudo_the_line_is_printed(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda _name: None)
    assert bootstrap.main(["dev", "dot", "tshark"]) == bootstrap.FAILED
    assert f"sudo {LINE}\n" in capsys.readouterr().err
    assert commands == []


@pytest.mark.parametrize(("uid", "prefix"), [(0, []), (1000, ["sudo", "-n"])])
def test_root_or_sudo_installs_them(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, uid: int, prefix: list[str]
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: uid)
    monkeypatch.setattr(bootstrap, "install_python", lambda _extra: 0)
    assert bootstrap.main(["dev", "dot", "tshark"]) == 0
    line = [*LINE.split(), *bootstrap.WAITING]
    assert commands[-1] == [*prefix, "env", "DEBIAN_FRONTEND=noninteractive", *line]


def test_a_failed_installation_is_tried_again_with_new_lists(
    monkeypatch: pytest.MonkeyPatch, commands: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: list[str]) -> bool:
        commands.append(command)
        return "update" in command

    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(bootstrap, "run_quietly", run)
    assert bootstrap.main(["dev", "dot", "tshark"]) == bootstrap.FAILED
    assert [command[-3:-1] for command in commands][1] == ["apt-get", "update"]
    assert len(commands) == 3
    assert LINE in capsys.readouterr().err
