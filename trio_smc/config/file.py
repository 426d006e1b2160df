"""`load_config`: settings from a TOML file whose keys are the fields of `Config`."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from trio_smc._base.toml_file import read_toml_file
from trio_smc.config.config import Config, is_path, short_repr
from trio_smc.host.pnet import table_of
from trio_smc.rnic.roce.device import VerbsRnic
from trio_smc.rnic.soft.device import SoftRnic
from trio_smc.rnic.verbs import Rnic

__all__ = ["load_config"]

_DEEPEST: Final = 2  # depth to which lists become tuples; (host, port) pairs need 1
_LONGEST_RNIC: Final = 128  # characters of "KIND:NAME"; chosen

# Settings of earlier releases, with their replacements.
_REMOVED: Final = {
    "max_handshakes": "set handshake_limit",
    "urgent_inline": "set the socket option SO_OOBINLINE",
}


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
    if not is_path(path):
        raise ValueError(f"{short_repr(path)} is not the name of a file")
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
        raise ValueError(f"{path}: {error}") from error
    return config


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
