"""Correct ways to compare a mode.  mypy checks this file, and pyright checks it in
test_api_types."""

from __future__ import annotations

import trio_smc


def by_text(stream: trio_smc.SmcStream) -> bool:
    return stream.mode == "smc-r"


def by_value(stream: trio_smc.SmcStream) -> bool:
    return stream.mode == trio_smc.Mode.SMC_R


def by_identity(stream: trio_smc.SmcStream) -> bool:
    return stream.mode is trio_smc.Mode.SMC_R
