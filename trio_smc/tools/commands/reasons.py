"""`trio-smc reasons`: explain the reasons why connections stay on TCP, and diagnosis words."""

from __future__ import annotations

import argparse
from typing import Any

from trio_smc import Fallback, FallbackReason
from trio_smc._base.reasons import Diagnosis
from trio_smc.tools.commands import add_json
from trio_smc.tools.output import ToolError, fields, print_json, show, table

NAME = "reasons"
SUMMARY = "explain the reasons why connections stay on TCP, and the diagnosis words"
DESCRIPTION = """
Explain the reasons why connections stay on TCP (SmcStream.fallback.reason, and FALLBACK in
`trio-smc ss`), and the diagnosis words in SMC Decline messages (RFC 7609, A.2.4).  Without an
argument the command lists all reasons and words.

RFC 7609 lets each implementation choose its diagnosis words.  trio_smc uses those of Linux, so that
the tools of both can explain the words of the other.
"""
EPILOG = """
Examples:
  trio-smc reasons                    all reasons and words
  trio-smc reasons no-rnic            one reason
  trio-smc reasons 0x03030000         one diagnosis word

Exit codes: 0, or 2 for an unknown reason or word.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "reason",
        nargs="?",
        metavar="REASON|WORD",
        help="such as no-rnic, or 0x03030000",
    )
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Print one explanation or all."""
    if options.reason is None:
        _print_all(options.json)
    elif options.reason[:1].isdigit():
        _print_one(_explain_word(options.reason), options.json)
    else:
        _print_one(_explain_reason(_reason(options.reason)), options.json)
    return 0


def _reason(text: str) -> FallbackReason:
    try:
        return FallbackReason(text.lower().replace("_", "-"))
    except ValueError:
        raise ToolError(f"unknown reason: {text}; `trio-smc reasons` lists all") from None


def _explain_reason(reason: FallbackReason) -> dict[str, Any]:
    fallback = Fallback.local(reason)
    return {
        "reason": reason.value,
        "word": None if fallback.code is None else f"0x{fallback.code:08x}",
        "message": fallback.message,
        "remedy": fallback.remedy,
    }


def _explain_word(text: str) -> dict[str, Any]:
    try:
        word = int(text, 0)
    except ValueError:
        word = -1
    if not 0 <= word < 1 << 32:
        raise ToolError(f"{text!r} is not a diagnosis word of 32 bits")
    try:
        name = Diagnosis(word).name.lower().replace("_", "-")
    except ValueError:
        raise ToolError(
            f"unknown diagnosis word: 0x{word:08x}; see the documentation of the peer"
        ) from None
    fallback = Fallback.from_peer(word)
    return {
        "word": f"0x{word:08x}",
        "name": name,
        "reasons_with_it": [each.value for each in Fallback.reasons_with(word)],
        "reason": fallback.reason.value,
        "message": fallback.message,
        "remedy": fallback.remedy,
    }


def _print_one(explanation: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(explanation)
    else:
        lines = {
            name.replace("_", " "): ", ".join(value) if isinstance(value, list) else value
            for name, value in explanation.items()
        }
        show(fields(lines.items()))


def _print_all(as_json: bool) -> None:
    reasons = [_explain_reason(reason) for reason in FallbackReason]
    words = [_explain_word(hex(word)) for word in Diagnosis]
    if as_json:
        print_json({"reasons": reasons, "words": words})
        return
    show(
        table(
            ("REASON", "WORD SENT", "~MEANING", "~REMEDY"),
            [list(each.values()) for each in reasons],
        ),
        "",
        table(
            ("WORD RECEIVED", "NAME", "REASON"),
            [(each["word"], each["name"], each["reason"]) for each in words],
        ),
    )
