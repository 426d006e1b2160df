"""Shell completion and the manual page, made by the command lines of docs/cli.md."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import shell_files
from trio_smc.states.tables import CONNECTION
from trio_smc.tools.commands import load

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
BIN = Path(sys.executable).parent


def made(program: str, *with_words: str) -> str:
    """Run the command line of docs/cli.md with this program and these words.

    Returns:
      Its output.
    """
    [line] = [
        line for line in re.findall(rf"^{program} .*$", PAGE.read_text(), re.MULTILINE)
        if all(word in line for word in with_words)
    ]  # fmt: skip
    command = shlex.split(line.split(" > ")[0])
    done = subprocess.run([BIN / command[0], *command[1:]], capture_output=True, check=True)
    return done.stdout.decode()


def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    """The states of `ss`, and the programs on PATH behind `run --`, as well."""
    (tmp_path / "completion").write_text(made("shtab", "bash"))
    program = tmp_path / "bin" / "trio-smc-only-here"
    program.parent.mkdir()
    program.touch(0o700)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    for typed, expected in (
        ("ru", {"run"}),
        ("t", {"top", "teardown"}),
        ("run --re", {"--require-smc", "--report"}),
        ("check --discovery a", {"auto", "assume"}),
        ("ss --state ap", {"APPFINCLOSEWAIT", "APPCLOSEWAIT1", "APPCLOSEWAIT2"}),
        ("ss --port 1 --state LIST", {"LISTEN"}),
        ("run --report -- trio-smc-only-he", {"trio-smc-only-here"}),
        ("run -- env trio-smc-only-he", set()),  # an argument: bash completes a file
    ):
        words = ["trio-smc", *typed.split()]
        script = (
            "source completion; complete -p trio-smc | grep -o '_shtab[a-z_]*' > function; "
            f"COMP_WORDS=({shlex.join(words)}) COMP_CWORD={len(words) - 1}; "
            '$(cat function) trio-smc; printf "%s\\n" "${COMPREPLY[@]}"'
        )
        done = subprocess.run(
            ["bash", "--norc", "-c", script], cwd=tmp_path, capture_output=True, text=True,
            check=True, env={**os.environ, "PATH": path},
        )  # fmt: skip
        assert set(done.stdout.split()) == expected, done.stderr


def test_zsh_has_every_command() -> None:
    text = made("shtab", "zsh")
    assert text.startswith("#compdef trio-smc")
    assert all(f"    {each.NAME}:'" in text for each in load())
    assert re.search(r":STATE:\(INIT ACTIVE .* LISTEN .*\)\"", text)
    assert re.search(r"PROGRAM .*:_normal\"", text)


def test_the_manual_page_has_every_command_and_option() -> None:
    text = made("argparse-manpage").replace("\\-", "-")
    assert text.startswith(".TH TRIO-SMC ")
    for each in load():
        assert f"\\fI\\,{each.NAME}\\/\\fR" in text
        assert each.SUMMARY.split(",")[0] in text
    for option in ("--require-smc", "--interval", "--discovery", "--version"):
        assert option in text


def test_the_files_of_the_wheel_match_the_parser() -> None:
    """The manual page must be equal; completions also depend on the release of shtab."""
    made = shell_files.files()
    [page] = [path for path in made if path.suffix == ".1"]
    assert page.read_text(encoding="utf-8") == made[page], "make cli-page"
    for path in made.keys() - {page}:
        text = path.read_text(encoding="utf-8")
        assert all(each.NAME in text for each in load()), "make cli-page"
        assert all(each in text for each in ("--directory", "--listen", "--require-smc"))
        assert all(each in text for each in CONNECTION.states), "make cli-page"


@pytest.mark.skipif(shutil.which("man") is None, reason="needs man")
def test_the_manual_page_as_man_shows_it() -> None:
    """man prints no warning, breaks no table, and shows examples and exit codes."""
    done = subprocess.run(
        ["man", "--warnings", "-l", shell_files.SHARE / "man/man1/trio-smc.1"],
        env={**os.environ, "MANWIDTH": "80", "LC_ALL": "C.UTF-8", "MANPAGER": "cat"},
        capture_output=True, check=True,
    )  # fmt: skip
    assert done.stderr == b""
    text = done.stdout.decode().replace("\u2010", "-")
    too_long = [line for line in text.splitlines() if len(line) > 80]
    assert all(" && " in line for line in too_long), "a command stays in one line"
    text = " ".join(text.split())
    for command in load():
        for line in (*command.DESCRIPTION.splitlines(), *command.EPILOG.splitlines()):
            if line.startswith("  ") and line.strip():
                assert " ".join(line.split()) in text, line
    assert "127 run: there is no such program" in text
