"""Runs a program for `trio-smc run`, and finds out how its processes use SMC-R.

Theory of operation
-------------------
`trio-smc run` starts PROGRAM as its child, forwards signals to PROGRAM, and ends with the same exit
code or by the same signal.  Signals of the terminal are not forwarded, because the kernel sends
them to the whole process group, which includes PROGRAM.  If this process is killed, the kernel
kills PROGRAM.  PROGRAM and its descendants are called the tree.

The processes of the tree send messages to a socket that only they can reach (`report_socket`,
`report_messages`).  The hook, which is `site/sitecustomize.py` in each Python, reports that it is
loaded, that Trio runs, that asyncio opens connections, or that trio_smc is missing.  Each stack
reports its counters.  A thread reads the messages while the main thread waits in `sigwaitinfo`.
Only the main thread prints, so a full pipe at stderr does not stop the reading of messages.

A Python without the hook (``-I``) sends nothing.  So this process searches the tree at intervals
for a Python that has TCP sockets and has sent no message.  A process without TCP sockets is no
problem, for example the master process of a server, or a shell.

If messages may have been lost, this module concludes nothing from the absence of a message.  The
same holds if no directory is writable for the socket, as in some containers, if a signal ended
PROGRAM, or if PROGRAM left a daemon behind.  All tables are bounded: when a stack ends, its
counters are added to the totals.

This process adopts orphans of the tree (prctl(2), PR_SET_CHILD_SUBREAPER), so that the ancestors of
a process show if it belongs to the tree.  When this process ends, init adopts the orphans.

Only the first problem of the tree is printed, as one line.  With ``--require-smc`` this process
also ends PROGRAM.
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
from trio_smc.tools.report_socket import NoReports, ReportSocket, process_state

__all__ = ["Tree", "supervise"]

_FORWARDED: Final = (
    signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2,
    signal.SIGWINCH,
)  # fmt: skip
_OWN_SIGNALS: Final = (signal.SIGCHLD, signal.SIGALRM)
"""The signals that wake this process itself: a child has ended, or a search of the tree is due."""
_SI_KERNEL: Final = 128  # the code of a signal that the kernel sends (sigaction(2))
_PR_SET_PDEATHSIG: Final = 1  # linux/include/uapi/linux/prctl.h
_PR_SET_CHILD_SUBREAPER: Final = 36
_FIRST_SEARCH: Final = 0.5
"""Seconds until the first search of the tree.  Each pause is twice the last one.  Chosen."""
_MAX_SEARCH_PAUSE: Final = 10.0
"""The longest pause in seconds between two searches of the tree.  Chosen."""
_REPORT_INTERVAL: Final = 1.0
"""Seconds between two reports of a stack's counters, for ``--report``.  Chosen."""
_FAILED: Final = 1
"""The exit code if PROGRAM has none that shows the problem."""
_MAX_STACKS: Final = 2048
"""The largest number of open stacks whose counters are kept separately.  Chosen: a bound on
memory."""
_REMOVAL_INTERVAL: Final = 1.0
"""If more stacks are open: seconds between two removals of those that were killed.  Chosen."""
_MAX_PROCESSES: Final = 1 << 16
"""Processes that are remembered.  Chosen: a bound on memory."""
_MAX_REASONS: Final = 256
"""Pairs of origin and reason that are counted separately.  Chosen: a bound on memory."""


class Tree:
    """PROGRAM and its descendants, as far as their messages and /proc show.

    Args:
      require: True if a process that cannot use SMC-R is an error, False if it is a warning.

    Attributes:
      problem: the text of the first problem; "" if there was none.
      hooked: the numbers of the processes that have sent a message, so that they have the hook.
      used_trio: True if any process has run Trio.
      ended: True if this command has ended PROGRAM because of the problem.
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
        self._processes: set[int] = set()  # processes that have opened a stack
        self._stacks = 0  # stacks that were opened
        self._next_removal = 0.0
        self._killed = 0  # stacks whose processes ended without a message about the end
        self._totals: Counter[str] = Counter()  # counters of stacks that have ended
        self._fallbacks: Counter[tuple[str, str]] = Counter()

    def on_packet(self, data: bytes, pid: int, proven: bool = True) -> None:
        """Handle a packet of a process.  An invalid message is ignored.

        Args:
          data: the packet.
          pid: the number of the sender.
          proven: True if the sender is known to descend from PROGRAM.  If the sender may be another
            process, only the messages "python" and "trio" are accepted, so that the sender can
            neither cause a problem nor change the report.
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
            self.hooked.clear()  # a bound on memory
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
            if len(self._open) >= _MAX_STACKS and time.monotonic() >= self._next_removal:
                self._remove_killed()
                self._next_removal = time.monotonic() + _REMOVAL_INTERVAL
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
        """Add the last counters of stacks whose processes have ended without a message."""
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
        """Note the first problem of the tree.  Later problems are ignored."""
        if not self.problem:
            self.problem = text
            os.kill(os.getpid(), signal.SIGCHLD)  # wake `_wait`, which prints the problem

    def print_problem(self) -> None:
        """Print the problem, once."""
        if self.problem and not self._printed:
            self._printed = True
            level = "error" if self._require else "warning"
            print_error(f"trio-smc run: {level}: {self.problem}")

    def search(self, root: int) -> None:
        """Search for Pythons that have TCP sockets, but have not sent a message.

        Such a process is a problem only if two searches in a row find it: a process that has just
        started may not have sent its message yet.
        """
        if self.incomplete:
            return
        found = {
            pid for pid in process_tree(root)
            if pid not in self.hooked and is_python(executable(pid)) and has_tcp(pid)
            and not _is_stopped(pid)
        }  # fmt: skip
        in_both = found & self._suspects
        self._suspects = found
        for pid in in_both - self.hooked:
            self.set_problem(_without_hook(pid, executable(pid)))

    def conclude(self, pid: int, path: str) -> None:
        """After PROGRAM's end, note a problem if no process of the tree could use SMC-R.

        Args:
          pid: the number of PROGRAM's process.
          path: the executable of this process.
        """
        if self.used_trio or self._stacks or self.incomplete:
            return
        if is_python(path) and pid not in self.hooked:
            self.set_problem(_without_hook(pid, path))
        else:
            self.set_problem("the program ended without using Trio, so it could not use SMC-R")

    def report(self) -> Iterator[str]:
        """The lines that ``--report`` prints after PROGRAM's end."""
        self._remove_killed()
        running = len(self._open)
        for counts in self._open.values():
            self._add(counts)
        self._open.clear()
        smc, tcp = self._totals["connections"], self._fallbacks.total()
        refused = self._totals["refused"]
        total, processes = smc + tcp, len(self._processes)
        yield (
            f"{total} connection{'' if total == 1 else 's'} of "
            f"{processes} process{'' if processes == 1 else 'es'}"
        )
        for count, mode, prefix in ((smc, "SMC-R", ""), (tcp, "TCP", "tcp_")):
            sent, received = (self._totals[f"{prefix}bytes_{way}"] for way in ("sent", "received"))
            yield f"  {count:>7} {mode}, sent {size(sent)}, received {size(received)}"
        for (origin, reason), count in self._fallbacks.most_common():
            yield f"    {count:>7} {origin}: {reason}"
        if refused:
            yield f"  {refused:>7} refused because of --require-smc"
        if self._killed:
            yield (
                f"  {self._killed} of {self._stacks} stacks ended with a killed process: "
                f"counts of the last {_REPORT_INTERVAL:g} seconds may be missing"
            )
        if running:
            yield f"  {running} of {self._stacks} stacks are still open: later counts are missing"
        if self.incomplete:
            yield "  some messages were lost: these counts may be incomplete"


def supervise(
    program: Sequence[str], environment: dict[str, str], *, require: bool, report: bool
) -> int:
    """Run ``program`` to its end and return its exit code, or end by the same signal.

    Args:
      program: the command line of PROGRAM.
      environment: the environment of PROGRAM.
      require: end PROGRAM if one of its processes cannot use SMC-R, and return at least 1.
      report: at the end print a report about PROGRAM's connections.

    Raises:
      OSError: PROGRAM cannot be started.
      ToolError: there is no safe place for the report socket.
    """
    tree = Tree(require=require)
    reports = _open_reports(tree, required=require or report)
    with reports:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*_FORWARDED, *_OWN_SIGNALS})
        try:
            environment = dict(environment)
            environment.pop(REPORT_EVERY, None)
            environment.pop(REPORT_TO, None)
            environment.update(reports.environment)
            if report:
                environment[REPORT_EVERY] = str(_REPORT_INTERVAL)
            _adopt_orphans(True)
            child = _start(program, environment, mask)
            path = executable(child.pid)
            try:
                reports.start(child.pid)
            except OSError as error:
                what = f"receive reports: {error_text(error)}"
                _cannot_report(what, error, require or report, child)
            _wait(child, tree, reports, require)
            orphans = _has_orphans(child.pid)
            reports.finish()
        finally:
            _adopt_orphans(False)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    tree.incomplete |= reports.overflowed
    # A signal may have ended PROGRAM before it could use Trio, and its orphans may still use Trio.
    if child.returncode >= 0 and not orphans:
        tree.conclude(child.pid, path)
    tree.print_problem()
    if report:
        for line in tree.report():
            print_error(f"trio-smc run: {line}")
    if tree.ended:
        return child.returncode if child.returncode > 0 else _FAILED
    if child.returncode < 0:
        _end_by_signal(signal.Signals(-child.returncode))
    return child.returncode or (_FAILED if require and tree.problem else 0)


def _open_reports(tree: Tree, *, required: bool) -> ReportSocket | NoReports:
    """The report socket; `NoReports` if there is no place for one and it is not ``required``."""
    try:
        return ReportSocket(tree.on_packet)
    except OSError as error:
        _cannot_report(f"create the report socket: {error_text(error)}", error, required)
        return NoReports()


def _cannot_report(
    what: str, error: OSError, required: bool, child: subprocess.Popen[bytes] | None = None
) -> None:
    """Warn that PROGRAM's processes cannot report.

    If they are ``required`` to, kill the ``child``, which is PROGRAM if it runs, and raise
    ToolError.
    """
    if required:
        if child is not None:
            child.kill()
            child.wait()
        raise ToolError(f"cannot {what}") from error
    print_error(f"trio-smc run: warning: cannot {what}; problems of the program are not reported")


def _adopt_orphans(adopt: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def _start(
    program: Sequence[str], environment: dict[str, str], mask: set[signal.Signals | int]
) -> subprocess.Popen[bytes]:
    libc = ctypes.CDLL(None)
    parent = os.getpid()
    os.environ.clear()
    os.environ.update(environment)
    # The caller may ignore SIGCHLD, and children inherit that.  Then the kernel keeps no exit code
    # of PROGRAM, and sends no SIGCHLD (wait(2)).
    sigchld_handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def prepare() -> None:
        signal.signal(signal.SIGCHLD, sigchld_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(_FAILED)
        for name in ("LISTEN_PID", "WATCHDOG_PID"):
            # A service manager such as systemd sets these to the process that it started.  PROGRAM
            # compares them with its own number (sd_listen_fds(3)).
            if os.environ.get(name) == str(parent):
                os.environ[name] = str(os.getpid())

    # `os.environ` of this process is PROGRAM's environment: without `env` Popen passes it on after
    # the call of `prepare`, which changes it.  Descriptors stay open, because a service manager may
    # have passed some to PROGRAM.
    return subprocess.Popen(program, preexec_fn=prepare, close_fds=False)  # noqa: PLW1509


def _wait(
    child: subprocess.Popen[bytes], tree: Tree, reports: ReportSocket | NoReports, require: bool
) -> None:
    """Wait for PROGRAM's end.  Meanwhile forward signals, and search the tree at intervals."""
    # A timer and not `sigtimedwait`: after an interruption by SIGSTOP and SIGCONT, and with no time
    # left, `sigtimedwait` of CPython 3.11 returns uninitialised memory (docs/decisions.md).
    pause = _FIRST_SEARCH
    signal.setitimer(signal.ITIMER_REAL, pause)
    try:
        while child.poll() is None:
            info = signal.sigwaitinfo({*_FORWARDED, *_OWN_SIGNALS})
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
            # Otherwise SIGALRM would end this process as soon as the caller unblocks it.
            signal.sigwait({signal.SIGALRM})


def _wait_for_orphans(program: int) -> None:
    """Collect the exit codes of adopted processes.  `Popen` collects that of PROGRAM."""
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while (found := os.waitid(os.P_ALL, 0, options)) is not None and found.si_pid != program:
        os.waitpid(found.si_pid, 0)


def _has_orphans(program: int) -> bool:
    """True if adopted processes run after the end of PROGRAM."""
    try:
        _wait_for_orphans(program)
    except ChildProcessError:
        return False
    return True


def _end_by_signal(number: signal.Signals) -> None:
    """End this process by the signal that ended PROGRAM, without a core dump of its own."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with contextlib.suppress(OSError):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _without_hook(pid: int, path: str) -> str:
    return (
        f"process {pid} runs {printable(path, 200)} without the hook of trio-smc run (because of "
        "-I, -E or -S, or a cleared environment): its connections cannot be SMC-R"
    )


def _has_ended(pid: int) -> bool:
    found = process_state(pid)
    return found is None or found.state in "ZX"


def _is_stopped(pid: int) -> bool:
    """True if a process is stopped.  Its hook may not have sent its message yet."""
    found = process_state(pid)
    return found is not None and found.state in "Tt"
