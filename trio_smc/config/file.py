"""Settings from a file: `load_config` reads TOML whose keys are the fields of `Config`."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from trio_smc.config.config import Config
from trio_smc.host.pnet import table_of
from trio_smc.rnic.roce.device import VerbsRnic
from trio_smc.rnic.soft.device import SoftRnic
from trio_smc.rnic.verbs import Rnic

__all__ = ["load_config"]


def load_config(path: Path | str) -> Config:
    """The settings in a TOML file.

    Keys are the fields of `Config`, with lists for tuples.  ``rnics`` is "auto" or a list of
    "software:NAME" and "roce:DEVICE[:PORT[:GID_INDEX]]".  An entry of ``assume`` is a network or
    a list of host and port.

    The files that it names are looked at, too: a program that began with them missing would get
    the error much later, from its first connection.

    Raises:
      ValueError: the file cannot be read, is no TOML, or has a key or value that `Config` has not;
        the PNET table that it names is wrong, or there is no directory for the capture.
    """
    import tomllib  # dear, and few programs have such a file

    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 (at byte {error.start})") from error
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from error
    known = {field.name for field in fields(Config)}
    for key in values:
        if key not in known:
            raise ValueError(f"{path}: there is no setting {key!r}")
    try:
        rnics = values.get("rnics")
        if isinstance(rnics, list):
            values["rnics"] = tuple(_rnic(each) for each in rnics)
        config = Config(**{key: _frozen(value) for key, value in values.items()})
        _check_files(config)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    return config


def _check_files(config: Config) -> None:
    table_of(config.pnet)
    if config.capture is not None and not Path(config.capture).parent.is_dir():
        raise ValueError(f"capture: there is no directory for {str(config.capture)!r}")


def _frozen(value: Any) -> Any:
    return tuple(_frozen(each) for each in value) if isinstance(value, list) else value


def _rnic(text: object) -> Rnic:
    kind, _, rest = str(text).partition(":")
    match kind, rest.split(":"):
        case "software", [name] if name:
            return SoftRnic(name)
        case "roce", [device, *numbers] if device and len(numbers) <= 2:
            if all(each.isascii() and each.isdigit() for each in numbers):
                return VerbsRnic(device, *(int(each) for each in numbers))
    raise ValueError(f"rnics: {text!r} is neither software:NAME nor roce:DEVICE[:PORT[:GID_INDEX]]")
