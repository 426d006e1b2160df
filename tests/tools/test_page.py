"""docs/cli.md shows the real output of `trio-smc`, for each of its commands."""

from __future__ import annotations

import re

from scripts import cli_page


def test_the_examples_of_the_page_match_the_commands() -> None:
    text = cli_page.PAGE.read_text(encoding="utf-8")
    assert cli_page.page(text) == text, "renew it: python -m scripts.cli_page"


def test_every_command_that_queries_a_process_has_an_example() -> None:
    shown = set(re.findall(r"^\$ trio-smc (\w+)", cli_page.PAGE.read_text(), re.MULTILINE))
    assert shown == {
        "ss", "lg", "rnic", "stats", "check", "top", "drain", "undrain", "reasons",
    }  # fmt: skip


def test_a_process_number_is_not_replaced_elsewhere() -> None:
    """A process number may also occur as digits of a port, or as a number of bytes."""
    numbers = cli_page.Numbers(200, {20012: 7000, 20034: 40001})
    expected = {
        "pid": 200,
        "listeners": [["127.0.0.1", 20012]],
        "connections": [{"local": ["127.0.0.1", 20012], "peer": ["127.0.0.1", 20034], "sent": 200}],
    }
    assert cli_page.with_fixed(expected, numbers) == {
        "pid": 4242,
        "listeners": [["127.0.0.1", 7000]],
        "connections": [{"local": ["127.0.0.1", 7000], "peer": ["127.0.0.1", 40001], "sent": 200}],
    }
