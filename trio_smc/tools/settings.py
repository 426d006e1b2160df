"""The settings of commands: options, the environment, and their presentation.

Options on the command line override the environment (`trio_smc.load_settings`).
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any, Final

import trio_smc
from trio_smc import Config, Settings
from trio_smc._base.paths import check_tilde
from trio_smc.tools.output import ToolError, address

__all__ = ["add_config", "changed", "described", "path_argument", "settings_of", "value_text"]

_ALWAYS_SHOWN: Final = "directory"
"""The setting that is shown even if it has its default, which depends on the environment."""
_MAX_VALUES: Final = 8
"""Values of a list that text shows.  Chosen."""


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add ``--config``."""
    parser.add_argument(
        "--config", type=path_argument, metavar="FILE",
        help="a TOML file with settings; default: $TRIO_SMC_CONFIG",
    )  # fmt: skip


def path_argument(text: str) -> str:
    """The argparse type of the path of a file or directory; "-" is stdin or stdout."""
    try:
        check_tilde(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def settings_of(options: argparse.Namespace, **overrides: Any) -> Settings:
    """The settings of ``--config``, ``--directory`` and the environment.

    Args:
      options: of the command line; each of the two options may be missing.
      overrides: fields of `Config` that options of the command set; the origin of each is the name
        of the option.  None: the option is not given.

    Raises:
      ToolError: a file or a value is wrong.
    """
    directory = getattr(options, "directory", None)
    given = {name: value for name, value in overrides.items() if value is not None}
    try:
        found = trio_smc.load_settings(getattr(options, "config", None), directory=directory)
        config = dataclasses.replace(found.config, **given)
    except ValueError as error:
        raise ToolError(str(error)) from None
    named: dict[str, str] = dict(found.origins)
    if directory is not None:
        named["directory"] = "--directory"
    named |= {name: f"--{name.removesuffix('s')}" for name in given}
    return Settings(config, named)


def described(settings: Settings) -> list[dict[str, Any]]:
    """Name, value and origin of each setting, for JSON; the directory is the one in use."""
    found = []
    for each in dataclasses.fields(Config):
        value = getattr(settings.config, each.name)
        if each.name == _ALWAYS_SHOWN:
            value = settings.config.private_directory()
        found.append(
            {"name": each.name, "value": _plain(value), "origin": settings.origins[each.name]}
        )
    return found


def changed(settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The settings that do not have their defaults, and the directory."""
    return [
        each for each in settings if each["origin"] != "default" or each["name"] == _ALWAYS_SHOWN
    ]


def _plain(value: Any) -> Any:
    """A setting as a value for JSON."""
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, str | int | float):
        return value
    return str(getattr(value, "name", type(value).__name__))  # an RNIC


def value_text(value: Any) -> str:
    """A setting of `described` as text."""
    match value:
        case bool():
            return "true" if value else "false"
        case list():
            shown = [_entry_text(each) for each in value[:_MAX_VALUES]]
            more = len(value) - len(shown)
            return ", ".join(shown + ([f"and {more} more"] if more else [])) or "none"
        case None:
            return "none"
    return str(value)


def _entry_text(entry: Any) -> str:
    """An entry of a list: a host and port, an interface and its RNIC, or a single value."""
    match entry:
        case [str(), int()]:
            return address(entry)
        case [str() as interface, str() as rnic]:
            return f"{interface} {rnic}"
    return value_text(entry)
