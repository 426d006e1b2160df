"""The arguments of all commands: what they reject, and that none is ignored."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

import pytest

import trio_smc
from tests.tools.test_other_releases import answer, serving_messages
from tests.tools.tools_processes import Done, command_here, one_line
from trio_smc.tools import cli
from trio_smc.tools.commands import check_rules, load

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


# --- options that have no effect together --------------------------------------------------------


CAPTURE = str(Path(__file__).parents[1] / "golden" / "kernel-two-links.pcap")
VALUES = {
    "--pid": "PID", "--user": "root", "--port": "7000", "--state": "ACTIVE", "--device": "soft0",
    "--interface": "lo", "--config": "TMP/settings.toml", "--interval": "0.01", "--count": "1",
    "--save": "TMP/new.json", "--since": "TMP/saved.json", "--sizes": "0.01", "--lines": "3",
    "--listen": "0", "--discovery": "assume", "--ueid": "PLANT-7", "--timeout": "0.05",
    "--output": "TMP/file", "--svg": "TMP/file", "--connection": "1", "--limit": "9",
    "--width": "120", "--group": "1", "--stack": "00", "--payload": "1", "--seconds": "1",
    "--cgroup": "/", "--pin": "/nowhere", "--directory": "TMP/private",
}  # fmt: skip
"""A value of each option that has one, other than its default."""
QUERIES = ("ss", "lg", "rnic", "ueid", "stats", "check", "top", "report", "reasons", "ladder")
"""The commands that are run with each pair of their options.  The options of the others do not
depend on each other, except for the rules, which are checked for all commands."""
REFUSED = """
ss --listening: -v, --state
rnic --interface: --pid, --user, --all
stats --count: needs --interval
stats --since: --interval
stats --save: --interval
stats --rows: --json
stats --prometheus: --json, --interval, --save, --since
stats --sizes: --interval, --save, --since, --sum, --rows, --prometheus, --user, --all
check --count: needs --listen
check --listen: PORT
drain --group: needs --pid
undrain --group: needs --pid
ladder --width: --svg, --json
"""
"""Arguments that have no effect together, or alone."""
PLACES = ("--user", "--all", "--directory")
"""Options of the place, which the first query of each command reads."""
NOT_IN_INTERVALS = {"--since", "--save", "--prometheus", "--sizes"}
"""Options of stats that exclude --interval."""
IN_JSON_ALWAYS = {("lg", "-v", "--json")}
"""JSON has the fields that -v adds to the text."""


def rules() -> Iterator[str]:
    for command in load():
        recorder = Recorder()
        command.configure(recorder)
        for rule in recorder.get_default("rules") or ():
            names = [each.option_strings[0] if each.option_strings else str(each.metavar)
                     for each in (rule.argument, *rule.others)]  # fmt: skip
            others = ", ".join(names[1:])
            yield f"{command.NAME} {names[0]}: {'needs ' * rule.needs}{others}"


def test_the_rules_of_all_commands() -> None:
    found: dict[str, list[str]] = {}
    for each in rules():
        name, _, others = each.partition(": ")
        found.setdefault(name, []).append(others)
    lines = [f"{name}: {', '.join(others)}" for name, others in found.items()]
    assert sorted(lines) == sorted(REFUSED.strip().splitlines())


def pairs() -> Iterator[tuple[str, str, str]]:
    """The pairs of options of each command of `QUERIES`, without those of the place."""
    for name in QUERIES:
        options = [
            each.option_strings[-1 if each.dest == "output" else 0]
            for each in arguments()[name]
            if each.option_strings and each.option_strings[0] not in PLACES
        ]
        assert options
        yield from ((name, first, second) for first, second in combinations(options, 2))


class Reading(argparse.Namespace):
    """Notes the options that a command reads."""

    seen: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            Reading.seen.add(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize(("name", "first", "second"), list(pairs()), ids=str)
def test_no_option_is_ignored(
    name: str, first: str, second: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Each pair of options is an error, or the command reads both."""

    def checked(options: argparse.Namespace) -> None:
        check_rules(options)
        Reading.seen.clear()

    monkeypatch.setattr("argparse.Namespace", Reading)
    monkeypatch.setattr(cli, "check_rules", checked)
    (tmp_path / "settings.toml").write_text('ueids = ["PLANT-7"]')
    (tmp_path / "saved.json").write_text('{"version": 1, "stacks": []}')
    words = words_of(name, first, second, tmp_path)
    done = with_a_process(words, tmp_path, capsys)
    if is_refused(name, first, second):
        line = one_line(done)
        assert first in line
        return
    assert done.code in (0, 1), done.err
    unread = {
        each.dest
        for each in arguments()[name]
        if {first, second} & set(each.option_strings) and each.dest not in Reading.seen
    }
    assert unread == ({"verbose"} if (name, second, first) in IN_JSON_ALWAYS else set())


def is_refused(name: str, first: str, second: str) -> bool:
    """True if the table, or a group of the parser, says that the options exclude each other."""
    together = [each for each in arguments()[name] if {first, second} & set(each.option_strings)]
    if together[0].dest == together[-1].dest:
        return True  # such as --smc and --tcp
    if {first, second} == {"--svg", "--json"}:
        return True
    if name == "stats" and {first, second} & NOT_IN_INTERVALS and "--count" in (first, second):
        return True  # --count needs --interval
    for line in REFUSED.strip().splitlines():
        words, _, others = line.partition(": ")
        if words.split()[0] != name or "needs" in others:
            continue
        option = words.split()[1]
        for other in others.split(", "):
            if {option, other} == {first, second}:
                return True
    return False


def words_of(name: str, first: str, second: str, tmp_path: Path) -> list[str]:
    given = {first, second}
    words = [name, *{"check": ["::1", "1"], "ladder": [CAPTURE]}.get(name, [])]
    if "--listen" in given:
        words = [name, *([] if "--timeout" in given else ["--timeout", "0.05"])]
    if name == "check" and "--count" in given and "--listen" not in given:
        words = [name, "--listen", "0", "--timeout", "0.05"]
    if name == "stats" and given & {"--interval", "--count"} and not given & NOT_IN_INTERVALS:
        wanted = {"--interval": "0.01", "--count": "1"}
        words += [word for key in wanted.keys() - given for word in (key, wanted[key])]
    if name == "top":
        wanted = {"--interval": "0.01", "--count": "1"}
        words += [word for key in wanted.keys() - given for word in (key, wanted[key])]
    for option in (first, second):
        words.append(option)
        if option in VALUES:
            words.append(
                VALUES[option].replace("TMP", str(tmp_path)).replace("PID", str(os.getpid()))
            )
    return words


def with_a_process(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Done:
    """Run a command in a directory with one process, which sends an answer with all fields."""
    directory = tmp_path / "private"
    messages = answer(9, release=trio_smc.__version__)
    if "--sizes" in words:
        messages.insert(1, {"part": "sizes", "data": {"sent": [], "received": []}})
    with serving_messages(directory, messages):
        place = [] if words[0] in ("reasons", "ladder") else ["--directory", str(directory)]
        return command_here(capsys, *words, *place)


# --- JSON without any process --------------------------------------------------------------------


WITHOUT_QUERY = {"check", "reasons", "ladder"}
"""Commands with --json that print their own findings."""


def queries() -> dict[str, Any]:
    """The commands that have --json and query processes, with their empty documents."""
    with_json = {
        name for name, found in arguments().items() if any(each.dest == "json" for each in found)
    }
    return {each.NAME: each.EMPTY for each in load() if each.NAME in with_json - WITHOUT_QUERY}


@pytest.mark.parametrize("form", [(), ("--json",)], ids=["text", "json"])
@pytest.mark.parametrize("pid", [(), ("--pid", "2147483647")], ids=["all", "pid"])
@pytest.mark.parametrize("name", sorted(queries()))
def test_without_a_process_json_is_empty_and_the_exit_code_that_of_the_text(
    name: str, pid: tuple[str, ...], form: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    rnic = ("soft0",) if name in ("drain", "undrain") else ()
    done = command_here(capsys, name, *rnic, *pid, *form)
    if name in ("rnic", "ueid", "report") and not pid:
        # They also describe this machine.
        assert done.code == 0, done.err
        found = json.loads(done.out) if form else []
        assert isinstance(found, list) or (found["stacks"] == [] and {*queries()[name]} <= {*found})
        return
    assert done.code == 2
    [line] = done.err.splitlines()
    assert line.startswith(f"trio-smc {name}: ")
    if form:
        assert json.loads(done.out) == queries()[name]
    else:
        assert done.out == ""


def test_the_empty_document_of_top_has_its_fields(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["top", "--json", "--count", "1", "--interval", "0.01"]
    assert with_a_process(words, tmp_path, capsys).json.keys() == queries()["top"].keys()
