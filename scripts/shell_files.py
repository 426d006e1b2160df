"""Write the manual page and the completions of `trio-smc`, from the command's own parser.

    python -m scripts.shell_files            writes the files below share/
    python -m scripts.shell_files --check    exits with 1 if one is out of date

The wheel installs them below the prefix, where `man`, bash and zsh look: share/man/man1,
share/bash-completion/completions and share/zsh/site-functions.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import shtab

import trio_smc
from trio_smc.tools import cli
from trio_smc.tools.commands import load

ROOT: Final = Path(__file__).resolve().parents[1]
SHARE: Final = ROOT / "share"
_NAME: Final = "list SMC-R connections, check servers, and run programs over SMC-R"
_WIDTH: Final = 71
"""Characters of a line of a table: `man` indents it by up to nine columns of 80."""
_ENVIRONMENT: Final = """
TRIO_SMC_CONFIG names a TOML file with settings, and TRIO_SMC_DIRECTORY the private directory, for
all programs and commands.  Options win over both.

NO_COLOR turns colours off.  COLUMNS and LINES override the size of the terminal.
"""


def files() -> dict[Path, str]:
    """The content of each file."""
    parser = cli.parser()
    return {
        SHARE / "man/man1/trio-smc.1": manual(parser),
        SHARE / "bash-completion/completions/trio-smc": _completion(parser, "bash"),
        SHARE / "zsh/site-functions/_trio-smc": _completion(parser, "zsh"),
    }


def _completion(parser: argparse.ArgumentParser, shell: str) -> str:
    text = str(shtab.complete(parser, shell))
    # Where an argument is a file, bash completes its name.
    text = text.replace("complete -o bashdefault ", "complete -o bashdefault -o default ")
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def manual(parser: argparse.ArgumentParser) -> str:
    """The manual page (man(7)).  Indented text keeps its lines, so tables stay whole."""
    return "\n".join([
        f'.TH TRIO\\-SMC 1 "" "trio\\-smc {trio_smc.__version__}" "User Commands"',
        ".SH NAME", f"trio\\-smc \\- {_escape(_NAME)}",
        ".SH SYNOPSIS", *_example("trio-smc [--version] COMMAND [OPTIONS]"),
        ".SH DESCRIPTION", *_text(parser.description or ""),
        ".SH COMMANDS", *_commands(parser),
        ".SH ENVIRONMENT", *_text(_ENVIRONMENT),
        ".SH EXIT STATUS", *_text(parser.epilog or ""),
        "",
    ])  # fmt: skip


def parsers_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parser of each command."""
    [choices] = [
        each.choices for each in parser._actions if isinstance(each, argparse._SubParsersAction)
    ]
    return dict(choices)


def arguments_of(parser: argparse.ArgumentParser) -> dict[str, str]:
    """The options and arguments of a command, with the name of the value that each takes."""
    return {
        name: "" if each.nargs == 0 else str(each.metavar)
        for each in parser._actions
        for name in each.option_strings or [str(each.metavar)]
    }


def _commands(parser: argparse.ArgumentParser) -> Iterator[str]:
    for command in load():
        one = parsers_of(parser)[command.NAME]
        yield f'.SS "trio\\-smc {command.NAME}"'
        yield _escape(f"{command.SUMMARY[0].upper()}{command.SUMMARY[1:]}.")
        yield from _example(_usage(command.NAME, one))
        yield ".PP"
        yield from _text(one.description or "")
        yield ".PP"
        yield "Options:"
        formatter = one._get_formatter()
        for action in one._actions:
            if action.help == argparse.SUPPRESS:
                continue
            yield ".TP"
            yield f".B {_escape(_invocation(action))}"
            yield _escape(formatter._expand_help(action) if action.help else "")
        yield ".PP"
        yield from _text(one.epilog or "")


def _usage(name: str, parser: argparse.ArgumentParser) -> str:
    """The usage; that of argparse differs between releases of Python."""
    words = [_invocation(each) for each in parser._actions if not each.option_strings]
    return " ".join(["trio-smc", name, "[OPTIONS]", *words])


def _invocation(action: argparse.Action) -> str:
    """An argument, or an option with its names and value: "-o, --output FILE"."""
    value = ""
    if action.nargs != 0:
        choices = None if action.choices is None else f"{{{','.join(map(str, action.choices))}}}"
        value = str(action.metavar or choices or action.dest.upper())
    return " ".join(filter(None, [", ".join(action.option_strings), value]))


def _text(text: str) -> Iterator[str]:
    """Paragraphs are filled; lines that are indented keep their form."""
    kept: list[str] = []
    for line in [*text.strip("\n").splitlines(), ""]:
        if kept and (not line.startswith(" ") or not line.strip()):
            yield from _example("\n".join(kept))
            kept = []
        if line.startswith(" "):
            kept.append(line)
        elif line.strip():
            yield _escape(line)
        else:
            yield ".PP"


def _example(text: str) -> Iterator[str]:
    yield ".PP"
    yield ".EX"
    yield from (_escape(line) for line in _narrow(text.splitlines()))
    yield ".EE"


def _narrow(lines: Sequence[str]) -> Iterator[str]:
    """The same lines, and a second column that fits into 80 columns of a terminal.

    The first column ends at two blanks; lines that begin below the second column continue it.
    """
    entries: list[tuple[str, str]] = []
    for line in lines:
        blanks = _blanks_before(line)
        if entries and entries[-1][0].strip() and blanks == len(entries[-1][0]):
            entries[-1] = entries[-1][0], f"{entries[-1][1]} {line.strip()}"
            continue
        first = re.match(r" *\S+(?: \S+)* {2,}(?=\S)", line)
        head = first[0] if first else " " * blanks
        entries.append((head, line[len(head) :]))
    for head, text in entries:
        if not head.strip():
            yield head + text
            continue
        indent = head
        if len(head) > _WIDTH // 2:
            yield head.rstrip()
            indent = " " * (_blanks_before(head) + 4)
        yield from textwrap.wrap(
            text, _WIDTH, initial_indent=indent, subsequent_indent=" " * len(indent),
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip


def _blanks_before(line: str) -> int:
    return len(line) - len(line.lstrip())


def _escape(line: str) -> str:
    escaped = line.replace("\\", "\\e").replace("-", "\\-")
    escaped = re.sub("[^ -~]", lambda found: f"\\[u{ord(found[0]):04X}]", escaped)
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


def main(arguments: Sequence[str]) -> int:
    """The command line."""
    made = files()
    if list(arguments) == ["--check"]:
        old = [path for path, text in made.items() if not path.exists() or path.read_text() != text]
        for path in old:
            print(f"{path.relative_to(ROOT)} is out of date: make cli-page", file=sys.stderr)
        return int(bool(old))
    for path, text in made.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
