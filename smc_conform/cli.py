"""The command ``smc-conform``.

    smc-conform connect HOST PORT     judge a server with an echo service (RFC 862) over SMC
    smc-conform listen PORT           judge a client that connects again and again, and echoes
    smc-conform compare A.json B.json show which verdicts have changed
    smc-conform --list                show the checks

Exit codes: 0, no check has failed; 1, at least one has; 2, the run was not possible, has judged
nothing, or has ended because the implementation was gone; 130, interrupted.  `compare`: 0, no check
is worse; 1, one fails now, or has passed and is inconclusive or absent now; 2, not comparable.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import secrets
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import trio

from smc_conform import __version__
from smc_conform.arguments import problems
from smc_conform.catalogue import all_checks
from smc_conform.first_contact import NoContact, first_contact
from smc_conform.registry import Check, Role
from smc_conform.reports.document import (
    Document,
    changes,
    counts,
    differences,
    document,
    read_document,
    with_captures,
)
from smc_conform.reports.junit import junit
from smc_conform.reports.page import page
from smc_conform.reports.terminal import Progress, summary
from smc_conform.runner import Runner
from smc_conform.session import Options, Session, open_session, reason
from smc_conform.tcp_option import tcp_option
from smc_conform.verdicts import Result, Verdict

__all__ = ["main", "parser"]

_JUDGED = (Verdict.PASS, Verdict.FAIL, Verdict.DIFFERS)


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    description = "Judge an implementation of SMC-R by RFC 7609."
    top = argparse.ArgumentParser("smc-conform", description=description)
    top.add_argument("--version", action="version", version=f"smc-conform {__version__}")
    top.add_argument("--list", action="store_true", help="show the checks, and judge nothing")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    connect = commands.add_parser("connect", help="judge a server with an echo service (RFC 862)")
    connect.add_argument("host", metavar="HOST")
    connect.add_argument("port", metavar="PORT", type=int)
    connect.add_argument(
        "--daytime", type=int, metavar="PORT",
        help="the port of the server's daytime service (RFC 867), which closes first",
    )  # fmt: skip
    connect.add_argument(
        "--discard", type=int, metavar="PORT",
        help="the port of the server's discard service (RFC 863), which only reads",
    )  # fmt: skip
    listen = commands.add_parser("listen", help="judge a client that connects again and again")
    listen.add_argument("port", metavar="PORT", type=int, help="0: a free one")
    listen.add_argument("--host", default="", help="the address to listen on; default: all")
    listen.add_argument(
        "--discard", type=int, metavar="PORT",
        help="a port for connections on which the client only reads; 0: a free one",
    )  # fmt: skip
    for each in (connect, listen):
        _add_options(each)
    compare = commands.add_parser("compare", help="show what has changed between two reports")
    compare.add_argument("old", type=Path, metavar="A.json")
    compare.add_argument("new", type=Path, metavar="B.json")
    compare.add_argument(
        "--across", action="store_true", help="compare different roles or versions nevertheless"
    )
    return top


def _add_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "--rnic", action="append", metavar="NAME", dest="rnics",
        help='"soft", or a RoCE port such as rxe0 or mlx5_0:1; twice for two links; '
        "default: two software RNICs",
    )  # fmt: skip
    add("--directory", type=Path, help="the private directory of software RNICs")
    add("--version", type=int, choices=(1, 2), default=1, help="of SMC-R; default: 1")
    add("--ueid", default="", help="that both sides have, for version 2; a client's first one")
    add(
        "--tcp-option", action="store_true",
        help="have the TCP option of RFC 7609 on all connections, as Linux requires (root)",
    )  # fmt: skip
    add("--eye-catchers", action="store_true", help="give elements the eye catchers of RFC 7609")
    add(
        "--patience", type=float, default=5.0, metavar="SECONDS",
        help="how long any step of the implementation may take; default: 5",
    )  # fmt: skip
    add(
        "--timers", type=float, default=10.0, metavar="SECONDS",
        help="the longest time-out of the implementation; default: 10",
    )  # fmt: skip
    add(
        "--no-first-contact", action="store_false", dest="first_contact",
        help="run the checks even if an ordinary contact does not succeed",
    )  # fmt: skip
    add("--jobs", type=int, default=1, metavar="N", help="checks at a time; default: 1")
    add("--only", action="append", metavar="PATTERN", help='IDs of checks: "clc/*", "*/C.6-*"')
    add(
        "--provides", action="append", choices=("one-rnic", "parallel"),
        help="what the set-up has besides; the other needs follow from the options",
    )  # fmt: skip
    add("--seed", type=int, help="of all random choices; default: a new one")
    add("--max-failures", type=int, metavar="N", help="end at the Nth failure")
    add("--verbose", action="store_true", help="show the passed checks, too")
    add("--json", type=Path, metavar="FILE", help="write a report for `smc-conform compare`")
    add("--junit", type=Path, metavar="FILE", help="write a report as JUnit XML")
    add("--html", type=Path, metavar="FILE", help="write a report as a page")
    add(
        "--keep", type=Path, metavar="DIRECTORY",
        help="write ladder and capture of each check that has not passed",
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    top = parser()
    options = top.parse_args(arguments)
    if options.list:
        _list(all_checks())
        return 0
    if options.command is None:
        top.error("a command is needed: connect, listen or compare")
    code = 0
    try:
        if options.command == "compare":
            code = _compare(options.old, options.new, across=options.across)
        else:
            code = _judge(options)
    except* (OSError, ValueError, NoContact) as group:
        print(f"smc-conform: {_first(group)}", file=sys.stderr)
        code = 2
    except* KeyboardInterrupt:
        code = 130
    return code


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _list(checks: Sequence[Check]) -> None:
    for check in checks:
        roles = "/".join(sorted(check.roles))
        needs = f" [{', '.join(sorted(check.needs))}]" if check.needs else ""
        print(f"{check.id:28} {roles:14} {check.requirement}{needs}")
    print(f"{len(checks)} checks")


def _compare(old: Path, new: Path, *, across: bool) -> int:
    before, after = read_document(old), read_document(new)
    if not across:
        for name, was, now in differences(before, after):
            raise ValueError(
                f"the reports have different {name}s: {was} and {now} (--across compares them)"
            )
    worse: dict[str, int] = {}
    for name, was, now, detail in changes(before, after):
        print(f"{name:28} {was} -> {now}{': ' + detail if detail else ''}")
        if now == "fail" or (was == "pass" and now in ("inconclusive", "absent")):
            worse[now] = worse.get(now, 0) + 1
    if worse:
        print("now worse: " + ", ".join(f"{count} {name}" for name, count in worse.items()))
    return 1 if worse else 0


@dataclass
class _Judged:
    """The results of a run, also if it did not end by itself.

    Attributes:
      ended: why it ended early; empty if it did not.
      suspects: the checks that ran when the implementation went.
    """

    results: list[tuple[Check, Result]] = field(default_factory=list)
    ended: str = ""
    suspects: tuple[str, ...] = ()


def _judge(given: argparse.Namespace) -> int:
    for problem in problems(given):
        raise ValueError(problem)
    checks = [check for check in all_checks() if _is_wanted(check.id, given.only)]
    if not checks:
        raise ValueError(f"no check has such an ID: {', '.join(given.only)}")
    options = Options(
        role=Role.SERVER if given.command == "connect" else Role.CLIENT,
        host=given.host, port=given.port, rnics=tuple(given.rnics or ("soft", "soft")),
        directory=given.directory, version=given.version, ueid=given.ueid,
        eye_catcher=given.eye_catchers, patience=given.patience, timers=given.timers,
        jobs=given.jobs, seed=secrets.randbits(32) if given.seed is None else given.seed,
        daytime=getattr(given, "daytime", None), discard=given.discard,
        max_failures=given.max_failures,
        provides=frozenset(given.provides or ()),
    )  # fmt: skip
    progress = Progress(sys.stdout, len(checks), verbose=given.verbose)
    begin = time.monotonic()
    judged = _Judged()
    code = 0
    try:
        with tcp_option() if given.tcp_option else nullcontext():
            trio.run(_run, options, checks, progress, given.first_contact, judged)
    except* KeyboardInterrupt:
        judged.ended = f"interrupted after {len(judged.results)} of {len(checks)} checks"
        code = 130
    progress.end()
    if judged.results:
        run = document(options, judged.results, time.monotonic() - begin)
        run |= {"ended": judged.ended, "suspects": list(judged.suspects)}
        if given.keep is not None:
            run = with_captures(run, given.keep)
        _write(given, run)
        summary(run, sys.stdout.write)
        numbers = counts(run)
        if not any(numbers[str(each)] for each in _JUDGED):
            judged.ended = judged.ended or "nothing was judged; --verbose shows the reasons"
            code = code or 2
        code = code or (2 if judged.suspects else 1 if numbers["fail"] else 0)
    if judged.ended:
        print(f"smc-conform: {judged.ended}", file=sys.stderr)
    return code


def _is_wanted(name: str, patterns: Sequence[str] | None) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(name, each) for each in patterns)


async def _run(
    options: Options, checks: Sequence[Check], progress: Progress, contact: bool, judged: _Judged
) -> None:
    def report(check: Check, result: Result) -> None:
        judged.results.append((check, result))
        progress.note(check, result)

    async with open_session(options) as session:
        if options.role is Role.CLIENT:
            print(f"waiting for a client on port {session.port}", flush=True)
            if session.discard:
                print(f"waiting for a client that only reads on port {session.discard}", flush=True)
        await _check_target(session)
        if contact:
            await first_contact(session)
        runner = Runner(session)
        await runner.run_all(checks, report, progress.postponed)
    if runner.gone:
        judged.suspects = runner.suspects
        judged.ended = (
            f"the {options.role} is gone since {' or '.join(runner.suspects)}: {runner.gone}; "
            f"{len(judged.results)} of {len(checks)} checks have run"
        )
    elif len(judged.results) < len(checks):
        judged.ended = (
            f"ended at --max-failures {options.max_failures}; "
            f"{len(judged.results)} of {len(checks)} checks have run"
        )


async def _check_target(session: Session) -> None:
    """Raise NoContact if there is no implementation to judge."""
    if session.role is Role.SERVER:
        host, port = session.options.host, session.options.port
        try:
            stream = await trio.open_tcp_stream(host, port)
        except OSError as error:
            raise NoContact(f"cannot connect to {host}:{port}: {reason(error)}") from error
        await stream.aclose()


def _write(given: argparse.Namespace, run: Document) -> None:
    if given.json is not None:
        given.json.write_text(json.dumps(run, indent=1) + "\n")
    if given.junit is not None:
        given.junit.write_text(junit(run))
    if given.html is not None:
        given.html.write_text(page(run, given.html.parent))
