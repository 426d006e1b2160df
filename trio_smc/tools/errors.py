"""What ends a command with one line on stderr."""

from __future__ import annotations

from typing import Final

__all__ = ["BAD_INPUT", "ToolError", "words"]

BAD_INPUT: Final = 2
"""Exit code."""


def words(error: OSError) -> str:
    """What the system says, without its number."""
    return error.strerror or str(error)


class ToolError(Exception):
    """Bad input: an unknown process, a damaged answer, a wrong argument.

    The command prints "trio-smc: " and the text, which is one line without a full stop, and exits
    with ``code``.
    """

    def __init__(self, text: str, code: int = BAD_INPUT) -> None:
        super().__init__(text)
        self.code = code
