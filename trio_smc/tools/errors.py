"""What ends a command with one line on stderr."""

from __future__ import annotations

__all__ = ["ToolError"]


class ToolError(Exception):
    """Bad input: an unknown process, a damaged answer, a wrong argument.

    The command prints "trio-smc: " and the text, which is one line without a full stop, and exits
    with code 2.
    """
