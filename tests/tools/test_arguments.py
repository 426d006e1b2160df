"""The arguments of all commands: what they reject, and that none is ignored."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import pytest

from tests.tools.tools_processes import command_here, one_line
from trio_smc.tools.commands import load

PATHS = ("FILE", "DIR", "PATH", "OUT")
"""The names that the help has for files and directories."""
POSITIONAL = {
    "check": ["::1", "1"],
    "capture": ["1"],
    "drain": ["soft0"],
    "undrain": ["soft0"],
    "ladder": ["-"],
    "run": ["--", "true"],
    "proxy": ["smc:[::1]:0", "tcp:[::1]:1"],
}
REQUIRED = {"capture": ["-o", "-"], "exporter": ["--listen", "[::1]:0"]}


class Recorder(argparse.ArgumentParser):
    """Records the arguments that a command adds."""

    def __init__(self) -> None:
        super().__init__(add_help=False)
        self.actions: list[argparse.Action] = []

    def add_argument(self, *names: Any, **more: Any) -> argparse.Action:
        self.actions.append(super().add_argument(*names, **more))
        return self.actions[-1]

    def add_mutually_exclusive_group(self, **more: Any) -> Any:
        group = super().add_mutually_exclusive_group(**more)
        add = group.add_argument

        def add_and_record(*names: Any, **more: Any) -> argparse.Action:
            self.actions.append(add(*names, **more))
            return self.actions[-1]

        group.add_argument = add_and_record  # type: ignore[method-assign, unused-ignore]
        return group


def arguments() -> dict[str, list[argparse.Action]]:
    """The arguments of each command."""
    found = {}
    for command in load():
        recorder = Recorder()
        command.configure(recorder)
        found[command.NAME] = recorder.actions
    return found


# --- paths ---------------------------------------------------------------------------------------


def paths() -> Iterator[tuple[str, list[str]]]:
    for name, found in arguments().items():
        for each in found:
            if each.metavar not in PATHS:
                continue
            for option in each.option_strings:
                words = [*REQUIRED.get(name, ()), option, "~/x", *POSITIONAL.get(name, ())]
                yield option, [name, *words]
            if not each.option_strings:
                yield str(each.metavar), [name, "~/x"]


@pytest.mark.parametrize(("option", "words"), list(paths()), ids=str)
def test_no_path_begins_with_a_tilde(
    option: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = one_line(command_here(capsys, *words))
    assert "'~/x' begins with ~, which only a shell replaces" in line
    assert option in line


def test_every_kind_of_path_is_in_the_table() -> None:
    found = {words[0] for _, words in paths()}
    assert found >= {"ss", "check", "report", "stats", "capture", "ladder", "run", "proxy", "setup"}
