"""Values of snapshots in words; they come from another process and may be anything."""

from __future__ import annotations

from typing import Any

from trio_smc._base.reasons import Diagnosis

__all__ = ["address", "diagnosis", "fallback_codes", "gid"]


def address(value: Any) -> str:
    """ "127.0.0.1:7000", "[::1]:7000"; "-" for none."""
    match value:
        case [str() as host, int() as port]:
            return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return "-"


def diagnosis(word: Any) -> str:
    """A diagnosis word by number and name: "0x03030000 no-device"."""
    if not isinstance(word, int) or not 0 <= word < 1 << 32:
        return "none"
    try:
        name = Diagnosis(word).name.lower().replace("_", "-")
    except ValueError:
        name = "unknown"
    return f"0x{word:08x} {name}"


def fallback_codes(fallback: dict[str, Any]) -> str:
    """The words of both sides: "local 0x... , peer none"."""
    return f"local {diagnosis(fallback.get('code'))}, peer {diagnosis(fallback.get('peer_code'))}"


def gid(text: Any) -> str:
    """A GID as IPv6 addresses are written."""
    if not isinstance(text, str) or len(text) != 32:
        return "-"
    return ":".join(text[place : place + 4] for place in range(0, 32, 4))
