"""The report of a failed run in the lab: a short summary, and the consoles.

The message of a failed assertion is the end of what pytest prints, and often all that is kept of
it; so it has a screen at most. The consoles go to standard output, which pytest shows before it.
"""

from __future__ import annotations

import re
import sys
from typing import Final

from tests.lab.machine import NO_STATUS, Finished

__all__ = ["brief", "describe_failure", "kernel_crash"]

_MOST: Final = 16
_LAST: Final = 12
_WIDTH: Final = 300
_EXPECTED: Final = "make_send_cqe: non-flush error"
"""Soft-RoCE on the kernel's console, when a test has a request fail."""
_CAUSES: Final = re.compile(
    r"^\[lab\] "
    r"|^\[\w+\] (E  |lab: (?!up$|cable)|[\s|]*(\w+\.)*\w*(Error|Exception|Group|Expired)\b)"
    r"|FAILED|\bERROR\b|malformed: |Timeout|kernel BUG|Kernel panic|Oops|detected stalls"
)


_CRASH: Final = re.compile(
    r"kernel BUG at|Kernel panic|Oops:|general protection fault"
    r"|INFO: task \S+ blocked for more than \d+ seconds"
    r"|kernel log: "
)


def kernel_crash(done: Finished) -> str | None:
    """The line in which a guest's kernel reports that it has crashed, has found a fault of its own,
    or that a task of its own waits for ever; None: none of these."""
    return next((line for line in done.output.splitlines() if _CRASH.search(line)), None)


def describe_failure(done: Finished) -> str:
    """For an assertion about a run: `brief`; writes the consoles to standard output."""
    sys.stdout.write(done.output)
    return brief(done)


def brief(done: Finished) -> str:
    """The status, the lines with failures, and the last ones."""
    lines = [line[:_WIDTH] for line in done.output.splitlines() if _EXPECTED not in line]
    failures = [line for line in lines if _CAUSES.search(line)]
    status = "no status: a guest died, or its time ran out" if done.returncode == NO_STATUS else ""
    head = [f"status {done.returncode} {status}".rstrip()]
    return "\n".join((*head, *failures[-_MOST:], "the last lines:", *lines[-_LAST:]))
