"""Runs a program, as if it had been started instead, and learns what its processes do with SMC-R.

Theory of operation
-------------------
`trio-smc run` starts PROGRAM as its child, passes signals on and ends as it ends: by the same exit
code, or the same signal.  What comes from the terminal is not passed on, the kernel gives it to the
whole process group; the child is killed when this process is.

The processes of PROGRAM send messages to a socket that only they can reach (`report_socket`,
`report_messages`): the hook in `site/sitecustomize.py`, that it is there, that Trio runs, that
asyncio has connections or that trio_smc is missing; each stack, what it has counted.  A thread
takes them while this process sleeps in `sigwaitinfo`; it prints nothing, so neither a message nor
a full pipe can stop it.  A Python without the hook (``-I``) sends nothing, so now and then the tree
is searched for one that has TCP sockets.  A process without a connection does not count: the master
of a server, a helper, a shell.

Where messages may be missing, because more came than could be taken, nothing is concluded from a
message that did not come.  Tables are bounded; what ended stacks have counted is added up.

This process adopts orphans of PROGRAM's processes (prctl(2), PR_SET_CHILD_SUBREAPER), so each of
PROGRAM's processes can be told from other processes by its ancestors.  Init adopts them when this
process ends.

All that PROGRAM's processes do wrong together is said in one line, the first that is found; under
``--require-smc`` PROGRAM is told to end then.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from trio_smc import ProtocolError
from trio_smc._base.printable import printable
from trio_smc.control.protocol import REPORT_EVERY, REPORT_TO
from trio_smc.tools.output import ToolError, error_text, print_error, size
from trio_smc.tools.processes import executable, has_tcp, is_python, process_tree
from trio_smc.tools.report_messages import BYTES, Counts, Message, decode_untrusted
from trio_smc.tools.report_socket import ReportSocket, process

__all__ = ["Tree", "supervise"]

_FORWARDED: Final = (
    signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2,
    signal.SIGWINCH,
)  # fmt: skip
_OWN: Final = (signal.SIGCHLD, signal.SIGALRM)
_SI_KERNEL: Final = 128
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_FIRST_SEARCH: Final = 0.5
_MAX_SEARCH_PAUSE: Final = 10.0
"""Seconds between two looks at the tree, which grow."""
_REPORT_INTERVAL: Final = 1.0
"""Seconds between what a stack tells for ``--report``."""
_FAILED: Final = 1
_MAX_STACKS: Final = 2048
"""Stacks that are open at a time and counted each for itself."""
_SEARCH_INTERVAL: Final = 1.0
"""Seconds between searches for killed ones among them, if there are too many."""
_MAX_PROCESSES: Final = 1 << 16
_MAX_REASONS: Final = 256


class Tree:
    """The state of PROGRAM's processes, as far as it is known.

    Args:
      require: whether a process that cannot use SMC-R is an error.

    Attributes:
      problem: the first thing that was found wrong; "" if nothing was.
      hooked: Pythons that have the hook.
      used_trio: True if any of them has run Trio.
      ended: True if PROGRAM was told to end, because something of it cannot be SMC-R.
      incomplete: True if messages may be missing.
    """

    def __init__(self, *, require: bool) -> None:
        self.problem: str = ""
        self.ended = False
        self.hooked: set[int] = set()
        self.used_trio: bool = False
        self.incomplete = False
        self._require = require
        self._printed = False
        self._suspects: set[int] = set()
        self._open: dict[tuple[int, str], Counts | None] = {}
        self._processes: set[int] = set()  # that have or had a stack
        self._stacks = 0  # that were opened
        self._next_search = 0.0
        self._killed = 0  # without a word about their end
        self._totals: Counter[str] = Counter()  # of stacks that are not open any more
        self._fallbacks: Counter[tuple[str, str]] = Counter()

    def on_packet(self, data: bytes, pid: int, proven: bool = True) -> None:
        """Take a packet of one of the processes; anything that is no message is ignored.

        If the sender's descent is not proven, the packet counts only if it says that Python or
        Trio runs: a process outside PROGRAM cannot accuse PROGRAM or change the report.
        """
        try:
            message = decode_untrusted(data)
        except ProtocolError:
            return
        if message.dropped:
            self.incomplete = True
        if not proven and message.kind not in ("python", "trio"):
            self.incomplete = True
            return
        if message.stack:
            self._take_counts(message, pid)
            return
        if len(self.hooked) >= _MAX_PROCESSES:
            self.hooked.clear()  # they may be missing now
            self.incomplete = True
        self.hooked.add(pid)
        match message.kind:
            case "trio":
                self.used_trio = True
            case "asyncio":
                self.set_problem(
                    f"process {pid} opens TCP connections by asyncio, which cannot be SMC-R; "
                    "run it on Trio"
                )
            case "missing":
                self.set_problem(
                    f"process {pid} uses Trio, but its Python, {message.executable!r}, cannot "
                    f"use trio_smc: {message.error!r}"
                )

    def _take_counts(self, message: Message, pid: int) -> None:
        key = pid, message.stack
        if key not in self._open:
            if len(self._open) >= _MAX_STACKS and time.monotonic() >= self._next_search:
                self._remove_killed()
                self._next_search = time.monotonic() + _SEARCH_INTERVAL
            if len(self._open) >= _MAX_STACKS:
                self.incomplete = True
                return
            self._stacks += 1
            if len(self._processes) < _MAX_PROCESSES:
                self._processes.add(pid)
        self._open[key] = message.counts or self._open.get(key)
        if message.kind == "stack-end":
            self._add(self._open.pop(key))

    def _remove_killed(self) -> None:
        """Add up what stacks have counted whose processes have gone without a word."""
        for key in [key for key in self._open if _has_ended(key[0])]:
            self._add(self._open.pop(key))
            self._killed += 1

    def _add(self, counts: Counts | None) -> None:
        if counts is None:
            return
        self._totals["connections"] += counts.connections
        self._totals["refused"] += counts.refused
        self._totals.update(dict(zip(BYTES, counts.sizes, strict=True)))
        for key, count in counts.fallbacks.items():
            known = key in self._fallbacks or len(self._fallbacks) < _MAX_REASONS
            self._fallbacks[key if known else ("?", "others")] += count

    def set_problem(self, text: str) -> None:
        """Keep the first thing that is wrong; once for the whole tree."""
        if not self.problem:
            self.problem = text
            os.kill(os.getpid(), signal.SIGCHLD)  # `_wait` looks again

    def print_problem(self) -> None:
        """Print what is wrong, once."""
        if self.problem and not self._printed:
            self._printed = True
            level = "error" if self._require else "warning"
            print_error(f"trio-smc run: {level}: {self.problem}")

    def search(self, root: int) -> None:
        """Look for Pythons without the hook that have TCP sockets.

        One that has just started is given until the next look.
        """
        if self.incomplete:
            return
        found = {
            pid for pid in process_tree(root)
            if pid not in self.hooked and is_python(executable(pid)) and has_tcp(pid)
            and not _is_stopped(pid)
        }  # fmt: skip
        silent = found & self._suspects
        self._suspects = found
        for pid in silent - self.hooked:
            self.set_problem(_without_hook(pid, executable(pid)))

    def conclude(self, pid: int, path: str) -> None:
        """The program has ended: was there anything that could have been SMC-R?"""
        if self.used_trio or self._stacks or self.incomplete:
            return
        if is_python(path) and pid not in self.hooked:
            self.set_problem(_without_hook(pid, path))
        else:
            self.set_problem("the program ended without using Trio: nothing of it could be SMC-R")

    def report(self) -> Iterator[str]:
        """The lines of ``--report``, at the end."""
        self._remove_killed()
        running = len(self._open)
        for counts in self._open.values():
            self._add(counts)
        self._open.clear()
        smc, tcp = self._totals["connections"], self._fallbacks.total()
        refused = self._totals["refused"]
        yield f"{smc + tcp} connections of {len(self._processes)} processes"
        for count, mode, prefix in ((smc, "SMC-R", ""), (tcp, "TCP", "tcp_")):
            sent, received = (self._totals[f"{prefix}bytes_{way}"] for way in ("sent", "received"))
            yield f"  {count:>7} {mode}, sent {size(sent)}, received {size(received)}"
        for (origin, reason), count in self._fallbacks.most_common():
            yield f"    {count:>7} {origin}: {reason}"
        if refused:
            yield f"  {refused:>7} refused, as --require-smc says"
        if self._killed:
            yield (
                f"  {self._killed} of {self._stacks} stacks were killed: "
                f"what they counted in their last {_REPORT_INTERVAL:g} seconds may be missing"
            )
        if running:
            yield f"  {running} of {self._stacks} stacks still run: what they count now is missing"
        if self.incomplete:
            yield "  more messages were sent than could be taken: something is missing here"


def supervise(
    program: Sequence[str], environment: dict[str, str], *, require: bool, report: bool
) -> int:
    """Run ``program`` to its end; its exit code, or this process ends by the same signal.

    Args:
      require: end it, and return 1 at least, when anything of it cannot be SMC-R.
      report: print at the end what its connections were.

    Raises:
      OSError: it cannot be started.
      ToolError: there is no safe place for the socket of the reports.
    """
    tree = Tree(require=require)
    try:
        reports = ReportSocket(tree.on_packet)
    except OSError as error:
        raise ToolError(
            f"run: the socket for reports cannot be made: {error_text(error)}"
        ) from error
    with reports:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*_FORWARDED, *_OWN})
        try:
            environment = {**environment, REPORT_TO: reports.path}
            environment.pop(REPORT_EVERY, None)
            if report:
                environment[REPORT_EVERY] = str(_REPORT_INTERVAL)
            child = _start(program, environment, mask)
            started = executable(child.pid)
            reports.start(child.pid)
            _wait(child, tree, reports, require)
            reports.finish()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    tree.incomplete |= reports.overflowed
    tree.conclude(child.pid, started)
    tree.print_problem()
    if report:
        for line in tree.report():
            print_error(f"trio-smc run: {line}")
    if tree.ended:
        return child.returncode if child.returncode > 0 else _FAILED
    if child.returncode < 0:
        _end_by_signal(signal.Signals(-child.returncode))
    return child.returncode or (_FAILED if require and tree.problem else 0)


def _start(
    program: Sequence[str], environment: dict[str, str], mask: set[signal.Signals | int]
) -> subprocess.Popen[bytes]:
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    parent = os.getpid()
    os.environ.clear()
    os.environ.update(environment)

    def child() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(_FAILED)
        for name in ("LISTEN_PID", "WATCHDOG_PID"):
            # Of a service manager, which means the process that it has started.
            if os.environ.get(name) == str(parent):
                os.environ[name] = str(os.getpid())

    # This process does nothing else: its environment is the program's, which `child` may change.
    # Descriptors stay open, as they would by exec: a service manager may have given some.
    return subprocess.Popen(program, preexec_fn=child, close_fds=False)  # noqa: PLW1509


def _wait(child: subprocess.Popen[bytes], tree: Tree, reports: ReportSocket, require: bool) -> None:
    """Until the child has ended; signals are passed on, and the tree is searched."""
    # A timer, and no `sigtimedwait`: CPython returns whatever was in memory if that was interrupted
    # (SIGSTOP and SIGCONT) and its time has passed.
    pause = _FIRST_SEARCH
    signal.setitimer(signal.ITIMER_REAL, pause)
    try:
        while child.poll() is None:
            info = signal.sigwaitinfo({*_FORWARDED, *_OWN})
            _wait_for_orphans(child.pid)
            if info.si_signo != signal.SIGCHLD and info.si_code != _SI_KERNEL:
                child.send_signal(info.si_signo)
            tree.print_problem()
            if tree.problem and require and not tree.ended:
                tree.ended = True
                child.terminate()
            if info.si_signo == signal.SIGALRM:
                tree.incomplete |= reports.overflowed
                tree.search(child.pid)
                pause = min(2 * pause, _MAX_SEARCH_PAUSE)
                signal.setitimer(signal.ITIMER_REAL, pause)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if signal.SIGALRM in signal.sigpending():
            signal.sigwait({signal.SIGALRM})  # unblocked, it would end this process


def _wait_for_orphans(program: int) -> None:
    """Wait for adopted processes that have ended, but not for PROGRAM, which `Popen` waits for."""
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while (found := os.waitid(os.P_ALL, 0, options)) is not None and found.si_pid != program:
        os.waitpid(found.si_pid, 0)


def _end_by_signal(number: signal.Signals) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with contextlib.suppress(OSError):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _without_hook(pid: int, path: str) -> str:
    return (
        f"process {pid} runs {printable(path, 200)} without the hook of trio-smc (its options -I, "
        "-E or -S, or an environment that was cleared): its connections cannot be SMC-R"
    )


def _has_ended(pid: int) -> bool:
    found = process(pid)
    return found is None or found.state in "ZX"


def _is_stopped(pid: int) -> bool:
    """True for a process that was stopped, perhaps before its hook could send anything."""
    found = process(pid)
    return found is not None and found.state in "Tt"
