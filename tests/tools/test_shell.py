"""Shell completion and the manual page, as docs/cli.md makes them from the command's own parser."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from trio_smc.tools.commands import load

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
BIN = Path(sys.executable).parent


def made(program: str, *with_words: str) -> str:
    """The output of the page's command line with this program and these words."""
    [line] = [
        line for line in re.findall(rf"^{program} .*$", PAGE.read_text(), re.MULTILINE)
        if all(word in line for word in with_words)
    ]  # fmt: skip
    command = shlex.split(line.split(" > ")[0])
    done = subprocess.run([BIN / command[0], *command[1:]], capture_output=True, check=True)
    return done.stdout.decode()


def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    (tmp_path / "completion").write_text(made("shtab", "bash"))
    for typed, expected in (
        ("ru", {"run"}),
        ("t", {"top", "teardown"}),
        ("run --re", {"--require-smc", "--report"}),
        ("check --discovery a", {"auto", "assume"}),
    ):
        words = ["trio-smc", *typed.split()]
        script = (
            "source completion; complete -p trio-smc | grep -o '_shtab[a-z_]*' > function; "
            f"COMP_WORDS=({shlex.join(words)}) COMP_CWORD={len(words) - 1}; "
            '$(cat function) trio-smc; printf "%s\\n" "${COMPREPLY[@]}"'
        )
        done = subprocess.run(
            ["bash", "--norc", "-c", script], cwd=tmp_path, capture_output=True, text=True,
            check=True,
        )  # fmt: skip
        assert set(done.stdout.split()) == expected, done.stderr


def test_zsh_has_every_command() -> None:
    text = made("shtab", "zsh")
    assert text.startswith("#compdef trio-smc")
    assert all(f"    {each.NAME}:'" in text for each in load())


def test_the_manual_page_has_every_command_and_option() -> None:
    text = made("argparse-manpage").replace("\\-", "-")
    assert text.startswith(".TH TRIO-SMC ")
    for each in load():
        assert f"\\fI\\,{each.NAME}\\/\\fR" in text
        assert each.SUMMARY.split(",")[0] in text
    for option in ("--require-smc", "--interval", "--discovery", "--version"):
        assert option in text
