"""Make text of other processes and peers safe for terminals, logs and error messages.

Names, messages and command lines of another process may contain escape sequences that control a
terminal, line ends that forge a line of a log, directional overrides and invisible characters that
make text look like other text, and surrogates that cannot be encoded.  `printable` replaces each
such character by a Python escape, so that the reader can see it.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Any, Final

__all__ = ["MAX_FOREIGN", "clean", "printable"]

MAX_FOREIGN: Final = 1000
"""Characters of one string from another process that are kept.  Chosen."""
_ELLIPSIS: Final = "..."
_PLAIN: Final = re.compile(r"[ -~]*")
_MARKS: Final = frozenset({"Mn", "Me"})
# Letters and symbols that show nothing, although Python calls them printable (UAX 44,
# Default_Ignorable_Code_Point, and the empty Braille cell).
_INVISIBLE: Final = frozenset("\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")


def printable(text: object, limit: int | None = MAX_FOREIGN) -> str:
    """Return ``str(text)`` as one line that is safe to print.

    Control characters (C0, DEL, C1), line separators, format characters (directional controls,
    zero-width characters), combining marks, surrogates, private and unassigned characters become
    escapes such as ``\\x1b``.  Blanks other than the space become escapes, too.

    Args:
      text: the text.
      limit: characters of ``text`` that are kept; "..." replaces the rest.  None: all.
    """
    whole = str(text)
    kept = whole if limit is None or len(whole) <= limit else whole[:limit] + _ELLIPSIS
    if _PLAIN.fullmatch(kept):
        return kept
    return "".join(each if _is_harmless(each) else _escape(each) for each in kept)


def clean(value: Any) -> Any:
    """Return decoded JSON in which every string, including names of fields, is `printable`."""
    match value:
        case str():
            return printable(value)
        case list():
            return [clean(each) for each in value]
        case dict():
            return {printable(name): clean(each) for name, each in value.items()}
    return value


def _is_harmless(character: str) -> bool:
    return (
        character.isprintable()
        and character not in _INVISIBLE
        and unicodedata.category(character) not in _MARKS
    )


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
