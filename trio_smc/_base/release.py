"""The release of this package, as `trio_smc.__version__` and in answers of the control socket."""

from __future__ import annotations

from typing import Final

__all__ = ["RELEASE"]

RELEASE: Final = "0.3.0.dev0"
