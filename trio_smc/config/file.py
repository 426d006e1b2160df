"""`load_config`: settings from a TOML file whose keys are the fields of `Config`.

`load_settings` also reads the environment (`config.environment`), and knows the origin of each
setting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from trio_smc._base.paths import check_tilde
from trio_smc._base.toml_file import read_toml_file
from trio_smc.config import environment
from trio_smc.config.config import Config, is_path, short_repr
from trio_smc.host.pnet import table_of
from trio_smc.host.private_directory import default_directory
from trio_smc.rnic.roce.device import VerbsRnic
from trio_smc.rnic.soft.device import SoftRnic
from trio_smc.rnic.verbs import Rnic

__all__ = ["DEFAULT", "Settings", "environment_config", "load_config", "load_settings"]

DEFAULT: Final = "default"
"""The origin of a setting that neither the caller nor the environment has set."""

_DEEPEST: Final = 2  # depth to which lists become tuples; (host, port) pairs need 1
_LONGEST_RNIC: Final = 128  # characters of "KIND:NAME"; chosen

# Settings of earlier releases, with their replacements.
_REMOVED: Final = {
    "max_handshakes": "set handshake_limit",
    "urgent_inline": "set the socket option SO_OOBINLINE",
}
_LISTS: Final = {
    "allow": 'allow = ["192.0.2.0/24", ["192.0.2.7", 7000], 7000]',
    "assume": 'assume = ["192.0.2.0/24", ["192.0.2.7", 7000]]',
    "deny": 'deny = ["192.0.2.0/24", ["192.0.2.7", 7000], 7000]',
    "pnet": 'pnet = [["eth0", "rxe0"]]',
    "rnics": 'rnics = ["software:soft0", "roce:rxe0"]',
    "ueids": 'ueids = ["PLANT-7"]',
}
"""Examples of the settings that are tuples in Python, which TOML lacks."""


@dataclass(frozen=True, slots=True)
class Settings:
    """A configuration, and the origin of each setting.

    Attributes:
      config: the configuration.
      origins: for each field of `Config`: "default", the name of an environment variable, the path
        of a file, or "argument" for an argument of `load_settings`.
    """

    config: Config
    origins: Mapping[str, str]


def load_settings(
    path: Path | str | None = None, *, directory: Path | str | None = None
) -> Settings:
    """Read the settings of a program that makes no `Config` of its own.

    The file comes from ``path``, else from the environment variable ``TRIO_SMC_CONFIG``. The
    private directory comes from ``directory``, else from ``TRIO_SMC_DIRECTORY``, else from the
    file. All other settings have their defaults. In a set-user-ID program the variables have no
    effect.

    Args:
      path: a TOML file, as for `load_config`.
      directory: the private directory (`Config.directory`).

    Raises:
      ValueError: as for `load_config`; or a variable has a wrong value. The message names the
        variable.
    """
    origins = dict.fromkeys((field.name for field in fields(Config)), DEFAULT)
    variable = environment.config_file() if path is None else None
    file = variable if path is None else path
    config = Config()
    if file is not None:
        try:
            config, keys = _load(file)
        except ValueError as error:
            if variable is None:
                raise
            raise ValueError(f"{environment.CONFIG_VARIABLE}: {error}") from None
        origin = str(file) if variable is None else f"{environment.CONFIG_VARIABLE}={file}"
        origins |= dict.fromkeys(keys, origin)
    if directory is not None:
        origins["directory"] = "argument"
    else:
        directory = environment.directory()
        if directory is not None:
            origins["directory"] = environment.DIRECTORY_VARIABLE
    if directory is not None:
        config = replace(config, directory=directory)
    elif config.directory is None:
        origins["directory"] = default_directory().origin
    return Settings(config, MappingProxyType(origins))


def environment_config() -> Config:
    """The settings of the environment; the same object as long as the variables stay the same.

    Raises:
      ValueError: as for `load_settings`.
    """
    return _environment_config(environment.config_file(), environment.directory())


@lru_cache(maxsize=8)
def _environment_config(_file: Path | None, _directory: Path | None) -> Config:
    return load_settings().config


def load_config(path: Path | str) -> Config:
    """Read the settings from a TOML file.

    Keys are the fields of `Config`, with lists for tuples. ``rnics`` is "auto" or a list of
    "software:NAME" and "roce:DEVICE[:PORT[:GID_INDEX]]". An entry of ``assume`` is a network or
    a list of host and port.

    Files that the settings name are checked as well, so that the program gets an error now and not
    from its first connection.

    Raises:
      ValueError: the file cannot be read, is not a regular file, has more than 1 MiB, is no TOML,
        or has a key or value that `Config` does not accept; or the PNET table is wrong, or the
        directory of the capture does not exist.
    """
    return _load(path)[0]


def _load(path: Path | str) -> tuple[Config, tuple[str, ...]]:
    """The configuration in a file, and the keys that the file has."""
    if not is_path(path):
        raise ValueError(f"{short_repr(path)} is not the name of a file")
    check_tilde(path)
    values = read_toml_file(path)
    known = {field.name for field in fields(Config)}
    for key in values:
        if key not in known:
            hint = f": {_REMOVED[key]}" if key in _REMOVED else ""
            raise ValueError(f"{path}: there is no setting {short_repr(key)}{hint}")
    try:
        rnics = values.get("rnics")
        if isinstance(rnics, list):
            values["rnics"] = tuple(_rnic(each) for each in rnics)
        config = Config(**{key: _as_tuples(value) for key, value in values.items()})
        _check_files(config)
    except (TypeError, ValueError) as error:
        form = _LISTS.get(str(error).partition(":")[0])  # an error begins with the setting's name
        hint = "" if form is None else f"; in TOML: {form}"
        raise ValueError(f"{path}: {error}{hint}") from None
    return config, tuple(values)


def _check_files(config: Config) -> None:
    table_of(config.pnet)
    if config.capture is not None and not Path(config.capture).parent.is_dir():
        raise ValueError(f"capture: the directory of {str(config.capture)!r} does not exist")


def _as_tuples(value: Any, depth: int = 0) -> Any:
    """Convert lists to tuples, as deep as a setting can have them."""
    if not isinstance(value, list) or depth > _DEEPEST:
        return value
    return tuple(_as_tuples(each, depth + 1) for each in value)


def _is_byte(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 3 and int(text) < 256


def _rnic(text: object) -> Rnic:
    if not isinstance(text, str) or len(text) > _LONGEST_RNIC or not text.isprintable():
        raise ValueError(f"rnics: {short_repr(text)} is not a name of an RNIC")
    kind, _, rest = text.partition(":")
    match kind, rest.split(":"):
        case "software", [name] if name:
            return SoftRnic(name)
        case "roce", [device, *numbers] if device and len(numbers) <= 2:
            # A port and an index of a GID table have one byte each.
            if all(_is_byte(each) for each in numbers):
                return VerbsRnic(device, *(int(each) for each in numbers))
    wanted = "neither software:NAME nor roce:DEVICE[:PORT[:GID_INDEX]]"
    raise ValueError(f"rnics: {short_repr(text)} is {wanted}")
