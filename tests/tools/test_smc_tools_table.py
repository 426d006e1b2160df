"""The table against smc-tools in docs/cli.md is complete, and names what exists here."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from scripts.shell_files import arguments_of, parsers_of
from trio_smc import Config, StackStatistics
from trio_smc.tools import cli
from trio_smc.tools.commands import lg, rnic, ss, stats, ueid

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
HEAD = "| smc-tools | shows | here |\n|---|---|---|\n"

# The options, objects, commands and columns of each program of smc-tools 1.8.5, as its manual pages
# and its help name them.  An option is listed by its short name.
SMC_TOOLS = {
    "smcss": (
        "-a -l -d -D -R -W -h -v",
        "State, UID, Inode, Local Address, Peer Address, Intf, Mode",
        (
            "Shutd, Token, Sndbuf, Rcvbuf, Peerbuf, rxprod-Cursor, rxcons-Cursor, rxFlags, "
            "txprod-Cursor, txcons-Cursor, txFlags, txprep-Cursor, txsent-Cursor, txfin-Cursor"
        ),
        "Role, IB-device, Port, Linkid, GID, Peer-GID, VLAN, Peer-Token",
    ),
    "smcr": (
        "-v -a -d -dd",
        "info, linkgroup, device, stats, ueid",
        "show, link-show, reset, json, add, del, flush, help",
        "all, LG-ID, type, netdev, ibdev",
        "LG-Role, LG-Type, VLAN, #Conns, PNET-ID",
        "Net-Dev, Link-State, Link-UID, Peer-UID, IB-Dev, IB-P, Local-GID, Peer-GID",
        "Version, Peer-Rel, Peer-Host, Peer-OS, Direct, EID, Sndbuf, RMB",
        "IB-State, Type, Crit, FID, PCI-ID, PCHID, #Links",
        (
            "Total connections handled, SMC connections, v1, v2, client, server, Handshake errors, "
            "Avg requests per SMC conn, TCP fallback"
        ),
        (
            "RX, TX, Data transmitted, Total requests, Buffer usage, Buffer full, "
            "Buffer full (remote), Buffer too small, Buffer too small (remote), Buffer downgrades, "
            "Buffer reuses, Bufs, Reqs"
        ),
        "Special socket calls, cork, nodelay, sendpage, splice, urgent data",
        "Kernel Capabilities, SMC Version, SMC Hostname, SMC-D Features, SMC-R Features",
        "Hardware Capabilities, SEID, ISM, RoCE",
    ),
    "smc_pnet": ("-a -s -d -f -I -D -P -v -h", "PNET ID, interface, device, port"),
    "smc_chk": ("-C -S -p -i -d -6 -h -v",),
    "smc_rnics": (
        "-a -d -e -I -r -h -v",
        "FID, Power, PCI_ID, PCHID, Type, PFT, VF, VFN, PPrt, IPrt, PNET_ID, Net-Dev, IB-Dev",
    ),
    "smc_run": ("-d -r -t -h -v",),
    "smc_dbg": ("-t -h -v",),
}
ABSENT = ("not shown", "not applicable", "not counted", "does not exist", "always")
"""How a row begins that names nothing of trio_smc."""
ELSEWHERE = {"TRIO_SMC_CONFIG", "lspci -s PCI_ID", "lspci -n"}
"""Names in the third column that neither the commands nor the settings have."""


class Row(NamedTuple):
    """A row: its cells, and the programs of smc-tools that it is about."""

    programs: frozenset[str]
    theirs: str
    ours: str


def rows(text: str) -> list[Row]:
    [table] = re.findall(re.escape(HEAD) + r"((?:\|.*\|\n)+)", text)
    found = []
    for line in table.splitlines():
        first, second, third = line.strip("|").split(" | ")
        words = re.findall(r"`([^`]+)`", first)
        programs = frozenset(word for word in words if word.startswith("smc"))
        assert programs, line
        found.append(Row(programs, f"{first} | {second}", third.strip()))
    return found


def missing(found: list[Row]) -> list[str]:
    """The names of smc-tools that no row about their program has."""
    lacking = []
    for program, groups in SMC_TOOLS.items():
        text = "\n".join(row.theirs for row in found if program in row.programs)
        for group in groups:
            names = group.split() if group.startswith("-") else group.split(", ")
            lacking += [
                f"{program} {name}"
                for name in names
                if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text)
            ]
    return lacking


def names_of(command: str) -> set[str]:
    """The columns, the labels or the counters that a command prints."""
    counters = {stats.counter_name((each.name,)) for each in dataclasses.fields(StackStatistics)}
    lists = {
        "ss": ss.COLUMNS, "ss -v": ss.DETAILS, "lg": lg.COLUMNS, "lg -v": lg.MORE_COLUMNS,
        "rnic": (*rnic.COLUMNS, *rnic.DEVICE_COLUMNS), "ueid": ueid.COLUMNS, "stats": counters,
        "stats --sizes SECONDS": stats.SIZE_COLUMNS,
    }  # fmt: skip
    return {name.lstrip(">~") for name in lists.get(command, ())}


def unknown(found: list[Row]) -> list[str]:
    """The names in code font of the third column that trio_smc does not have."""
    whole = cli.parser()
    known = {
        name: arguments_of(parser)
        for name, parser in {"trio-smc": whole, **parsers_of(whole)}.items()
    }
    settings = {each.name for each in dataclasses.fields(Config)}
    wrong = []
    for row in found:
        command = ""
        for name in re.findall(r"`([^`]+)`", row.ours):
            words = name.split()
            setting = re.fullmatch(r"(?:Config\((\w+)=\)|(\w+))", name)
            if words[0] in known and name not in names_of(command):
                command = name
                wrong += [f"{name}: {why}" for why in _wrong_options(known[words[0]], words[1:])]
            elif name == "--help":
                assert all(name in arguments for arguments in known.values())
            elif not (
                name in names_of(command) | ELSEWHERE
                or (setting and (setting[1] or setting[2]) in settings)
            ):
                wrong.append(f"{command}: {name}")
    return wrong


def _wrong_options(arguments: dict[str, str], words: list[str]) -> list[str]:
    """The words that the command does not have, as an option, its value or an argument."""
    wrong = []
    for word, before in zip(words, ["", *words], strict=False):
        value = arguments.get(before) if before.startswith("-") else None
        if word not in arguments and word != value:
            wrong.append(word)
    return wrong


def test_the_table_is_complete_and_correct() -> None:
    found = rows(PAGE.read_text(encoding="utf-8"))
    assert not missing(found)
    assert not unknown(found)
    for row in found:
        assert "`" in row.ours or row.ours.startswith(ABSENT), row


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("txfin-Cursor", "txfin", "smcss txfin-Cursor"),
        ("`smc_chk`, `-d`, `-6`", "`smc_chk`, `-d`", "smc_chk -6"),
        ("`PEER GID`", "`PEER-GID`", "lg -v: PEER-GID"),
        ("`lg --device NAME`", "`lg --devices NAME`", "lg --devices NAME: --devices"),
        ("`check HOST PORT`", "`check HOST`, `chekc`", ": chekc"),
        ("`tx cursor`", "`tx cursors`", "ss -v: tx cursors"),
        ("`handshakes failed`", "`handshakes broken`", "stats: handshakes broken"),
        ("`Config(pnet=)`", "`Config(pnets=)`", ": Config(pnets=)"),
    ],
)
def test_the_comparison_notices(old: str, new: str, complaint: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert old in text
    changed = rows(text.replace(old, new))
    assert any(each.endswith(complaint) for each in missing(changed) + unknown(changed))
