"""The progress of a run, and its summary, as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TextIO

from smc_conform.registry import Check
from smc_conform.reports.document import Document, place, with_verdict
from smc_conform.verdicts import Result, Verdict

__all__ = ["Progress", "summary"]


_STEPS: Final = 10


class Progress:
    """Writes each check that has not passed, and how many have run.

    A terminal has the count in its last line.  Other output has a line for each tenth of the run.

    Args:
      total: the number of checks.
      verbose: write the passed checks, too.
    """

    def __init__(self, out: TextIO, total: int, *, verbose: bool = False) -> None:
        self._out = out
        self._total = total
        self._done = 0
        self._postponed = 0
        self._verbose = verbose
        self._live = out.isatty()

    def note(self, check: Check, result: Result) -> None:
        """Note a result."""
        self._done += 1
        self._clear()
        quiet = result.verdict in (Verdict.PASS, Verdict.NOT_APPLICABLE)
        if self._verbose or not quiet:
            self._line(f"{result.verdict:14} {check.id:24} {result.seconds:6.2f} s")
            self._line(f"    {check.requirement}")
            if result.detail:
                self._line(f"    {result.detail}")
        if self._live:
            self._show()
        elif self._done * _STEPS // self._total > (self._done - 1) * _STEPS // self._total:
            self._line(self._count())

    def postponed(self, count: int) -> None:
        """Note the number of inconclusive checks that will run again."""
        self._postponed = count
        if self._live:
            self._clear()
            self._show()

    def end(self) -> None:
        """Remove the count."""
        self._clear()

    def _count(self) -> str:
        later = f", {self._postponed} inconclusive so far" if self._postponed else ""
        return f"{self._done} of {self._total}{later}"

    def _show(self) -> None:
        self._out.write(self._count())
        self._out.flush()

    def _clear(self) -> None:
        if self._live:
            self._out.write("\r\x1b[K")

    def _line(self, text: str) -> None:
        self._out.write(_printable(text) + "\n")
        self._out.flush()


def summary(run: Document, write: Callable[[str], object]) -> None:
    """Write a table with one line for each area, and then the failed checks."""
    areas: dict[str, dict[str, int]] = {}
    for each in run["checks"]:
        row = areas.setdefault(each["id"].partition("/")[0], {})
        row[each["verdict"]] = row.get(each["verdict"], 0) + 1
    names = [str(verdict) for verdict in Verdict]
    write(f"{'':14}" + "".join(f"{name:>16}" for name in names) + "\n")
    total = {name: sum(row.get(name, 0) for row in areas.values()) for name in names}
    for area, row in [*areas.items(), ("all", total)]:
        write(f"{area:14}" + "".join(f"{row.get(name, 0):16}" for name in names) + "\n")
    write(f"{run['seconds']} s\n")
    failed = with_verdict(run, Verdict.FAIL)
    if failed:
        write("\nfailed, in the order of the documents:\n")
    for each in failed:
        write(_printable(f"{place(each['id'])}: {each['id']}: {each['requirement']}") + "\n")
        write(_printable(f"    {each['detail']}") + "\n")


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text)
