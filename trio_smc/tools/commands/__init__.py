"""The subcommands of `trio-smc`, one module each, listed in `MODULES`.

The module of a subcommand has

- ``NAME``: its name on the command line,
- ``SUMMARY``: one line for the list of commands, without a full stop,
- ``DESCRIPTION``: paragraphs for ``--help``; ``EPILOG``: examples and exit codes,
- ``EMPTY``, if it queries processes and has ``--json``: the document without any process,
- ``configure(parser)``: adds its arguments,
- ``run(options) -> int``: runs the command, and returns the exit code.  For bad input it raises
  `trio_smc.tools.output.ToolError` (exit code 2).

This module also has the arguments that several commands share.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple, Protocol, cast

from trio_smc import Config, Settings, SoftRnic, open_stack
from trio_smc.control.protocol import DirectoryUnusable, PrivateDirectory
from trio_smc.tools.output import ToolError, error_text
from trio_smc.tools.places import Places
from trio_smc.tools.settings import path_argument, settings_of
from trio_smc.tools.users import add_users, places_of

__all__ = [
    "MODULES",
    "Command",
    "add_directory",
    "add_json",
    "add_process",
    "add_users",
    "check_rules",
    "complete_program",
    "complete_words",
    "directories",
    "exclude",
    "existing_directory",
    "load",
    "need",
    "positive_count",
    "positive_seconds",
    "private_directory",
    "process_number",
    "seconds_up_to",
    "tcp_port",
    "whole_number",
    "why_no_software_rnic",
]

_DAY: Final = 86400
"""Seconds of a day, the largest time that an argument may have.  Chosen."""
_MAX_DIGITS: Final = 20
"""Digits of a whole number.  Chosen: a number of 64 bits has at most 20."""
_DEFAULT_ORIGINS: Final = ("default", "XDG_RUNTIME_DIR")
"""Origins of a directory that need not exist yet."""
_SHOWN: Final = 60
"""Characters of a wrong argument in an error.  Chosen."""

_COMPLETE_PROGRAM: Final = """
_trio_smc_program() {
  # Only the word behind "--" is a program.  Without an answer bash completes a file.
  [[ "$previous_word" == -- ]] && compgen -c -- "$1"
}
"""
MODULES = (
    "ss",
    "lg",
    "rnic",
    "ueid",
    "stats",
    "check",
    "top",
    "drain",
    "undrain",
    "report",
    "reasons",
    "capture",
    "ladder",
    "run",
    "proxy",
    "exporter",
    "setup",
    "teardown",
)


class Command(Protocol):
    """The module of a subcommand."""

    NAME: str
    SUMMARY: str
    EMPTY: Any
    DESCRIPTION: str
    EPILOG: str

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""

    def run(self, options: argparse.Namespace) -> int:
        """Run the command, and return the exit code."""


def load() -> tuple[Command, ...]:
    """The modules of all subcommands, in the order of ``trio-smc --help``."""
    return tuple(cast("Command", import_module(f"{__name__}.{name}")) for name in MODULES)


# --- arguments that exclude or need each other -------------------------------------------------


class Rule(NamedTuple):
    """A rule about arguments that have no effect together, or no effect alone.

    Attributes:
      argument: the argument.
      others: the arguments that it excludes, or of which it needs one.
      why: the reason, without a full stop.
      needs: True if it needs one of the others, False if it excludes all of them.
    """

    argument: argparse.Action
    others: tuple[argparse.Action, ...]
    why: str
    needs: bool


def exclude(
    parser: argparse.ArgumentParser, argument: argparse.Action, *others: argparse.Action, why: str
) -> None:
    """Let an argument be an error together with any of the others, which would have no effect."""
    _add_rule(parser, Rule(argument, others, why, needs=False))


def need(
    parser: argparse.ArgumentParser, argument: argparse.Action, *others: argparse.Action, why: str
) -> None:
    """Let an argument be an error without one of the others, because it would have no effect."""
    _add_rule(parser, Rule(argument, others, why, needs=True))


def _add_rule(parser: argparse.ArgumentParser, rule: Rule) -> None:
    parser.set_defaults(rules=(*(parser.get_default("rules") or ()), rule))


def check_rules(options: argparse.Namespace) -> None:
    """End the command with one line if its arguments break a rule."""
    for rule in getattr(options, "rules", ()):
        if not _is_given(rule.argument, options):
            continue
        given = [each for each in rule.others if _is_given(each, options)]
        if rule.needs and not given:
            others = " or ".join(map(_name, rule.others))
            options.parser.error(f"{_name(rule.argument)} needs {others}: {rule.why}")
        if given and not rule.needs:
            options.parser.error(
                f"{_name(rule.argument)} cannot be used with {_name(given[0])}: {rule.why}"
            )


def _name(argument: argparse.Action) -> str:
    return argument.option_strings[0] if argument.option_strings else str(argument.metavar)


def _is_given(argument: argparse.Action, options: argparse.Namespace) -> bool:
    """True if the value of an argument is not its default."""
    value = getattr(options, argument.dest)
    if argument.const is not None:
        return bool(value == argument.const)
    return bool(value != argument.default)


# --- arguments that several commands share -----------------------------------------------------


def add_json(parser: argparse._ActionsContainer) -> argparse.Action:
    """Add ``--json``, and return it."""
    return parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def add_process(parser: argparse.ArgumentParser) -> argparse.Action:
    """Add ``--pid`` and ``--directory``, which select the stacks.  Returns ``--pid``."""
    pid = parser.add_argument(
        "--pid",
        type=process_number,
        metavar="PID",
        help="only this process; default: all processes of this user",
    )
    add_directory(parser)
    return pid


def complete_words(action: argparse.Action, words: Iterable[str]) -> None:
    """Let bash and zsh complete the value of an option, although it may be another word.

    The completions are made with shtab, which reads the attribute ``complete``.
    """
    list_ = " ".join(words)
    function = f"_trio_smc_{action.dest}"
    complete = {
        "bash": function,
        "zsh": f"({list_})",
        "preamble": {"bash": f'{function}() {{ compgen -W "{list_}" -- "${{1^^}}"; }}'},
    }
    action.complete = complete  # type: ignore[attr-defined]


def complete_program(action: argparse.Action) -> None:
    """Let bash and zsh complete a program, and then its arguments as files."""
    complete = {
        "bash": "_trio_smc_program",
        "zsh": "_normal",
        "preamble": {"bash": _COMPLETE_PROGRAM},
    }
    action.complete = complete  # type: ignore[attr-defined]


def add_directory(parser: argparse.ArgumentParser) -> None:
    """Add ``--directory``."""
    parser.add_argument(
        "--directory",
        type=directory,
        metavar="DIR",
        help="the private directory of Config(directory=...); default: $TRIO_SMC_DIRECTORY, that "
        "of $TRIO_SMC_CONFIG, $XDG_RUNTIME_DIR/trio-smc, /dev/shm/trio-smc-UID",
    )


def directories(options: argparse.Namespace) -> Path | Places:
    """The private directory, or those of ``--user`` and ``--all``.

    Raises:
      ToolError: as `private_directory` and `tools.users.places_of`.
    """
    return places_of(options) or private_directory(options)


def private_directory(options: argparse.Namespace) -> Path:
    """The directory of ``--directory``, of the environment, or the default.

    Raises:
      ToolError: the named directory does not exist, or the environment is wrong.  A process would
        create the directory; a command that looks for processes finds none in a missing one.
    """
    settings = settings_of(options)
    directory = settings.config.private_directory()
    origin = settings.origins["directory"]
    if origin in _DEFAULT_ORIGINS:
        return directory
    named = "" if origin == "--directory" else f" ({origin})"
    try:
        if stat.S_ISDIR(os.stat(directory).st_mode):
            return directory
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise ToolError(f"{directory}: {error_text(error)}{named}") from None
    kind = "not a directory" if os.path.lexists(directory) else "no such directory"
    raise ToolError(f"{directory}: {kind}{named}")


@contextlib.contextmanager
def existing_directory(directory: Path) -> Iterator[Path]:
    """A private directory for the stacks of a query, which must not make ``directory``.

    If ``directory`` is missing, this is a temporary directory beside it.  If that cannot be made,
    this is ``directory``: a stack cannot make it either, and the error has its path.
    """
    with contextlib.ExitStack() as exits:
        if not os.path.lexists(directory):
            with contextlib.suppress(OSError):
                beside = TemporaryDirectory(
                    prefix=".trio-smc-", dir=directory.parent, ignore_cleanup_errors=True
                )
                directory = Path(exits.enter_context(beside))
        yield directory


async def why_no_software_rnic(config: Config) -> str | None:
    """The error if a stack opens a software RNIC; None if it opens one."""
    by_name = dataclasses.replace(config, rnics=(SoftRnic(),), control=False)
    try:
        async with open_stack(by_name):
            return None
    except OSError as error:
        return error_text(error)


def check_directory(settings: Settings) -> str | None:
    """Make the private directory, if it is missing, as the program or the proxy would.

    Returns:
      the problem and its consequence, if the environment, a file or the default names a directory
      that cannot be used; else None.  Other connections work without the directory.

    Raises:
      ToolError: the directory of ``--directory`` cannot be used.
    """
    origin = settings.origins["directory"]
    try:
        PrivateDirectory.open(settings.config.private_directory(), create=True).close()
    except DirectoryUnusable as error:
        if origin == "--directory":
            raise ToolError(str(error)) from None
        named = "" if origin == "default" else f" ({origin})"
        result = "fail" if settings.config.require_smc else "stay on TCP"
        return f"{error}{named}; connections on this host {result}"
    return None


def directory(text: str) -> Path:
    """The argparse type of a private directory (`Config.directory`).

    As in other commands, a relative path begins in the working directory.
    """
    path = path_argument(text)
    try:
        path = path and str(Path(path).absolute())
        Config(directory=path)
    except (OSError, ValueError) as error:  # the working directory may have been removed
        raise argparse.ArgumentTypeError(str(error)) from None
    return Path(path)


def seconds_up_to(most: int) -> Callable[[str], float]:
    """Make the argparse type of a time in seconds, above 0 and at most ``most``."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0
        if not 0 < value <= most:
            raise argparse.ArgumentTypeError(
                f"{text[:_SHOWN]!r} is not a number of seconds above 0 and at most {most}"
            )
        return value

    return convert


def whole_number(what: str, least: int, most: int) -> Callable[[str], int]:
    """Make the argparse type of a whole number in decimal digits.

    Args:
      what: the noun for the error message.
      least, most: the smallest and the largest number that are allowed.
    """

    def convert(text: str) -> int:
        # `int` would also accept "+1", "1_000" and digits of other scripts.  For more than 4300
        # digits it would raise an error that does not mention the argument.
        digits = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
        if not digits or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"{text[:_SHOWN]!r} is not a {what} from {least} to {most}"
            )
        return int(text)

    return convert


positive_seconds = seconds_up_to(_DAY)
positive_count = whole_number("whole number", 1, 10**9)
process_number = whole_number("process number", 1, (1 << 31) - 1)
tcp_port = whole_number("TCP port", 1, 65535)
