"""Runs a program, as if it had been started instead, and learns what its processes do with SMC-R.

Theory of operation
-------------------
`trio-smc run` starts PROGRAM as its child, passes signals on and ends as it ends: by the same exit
code, or the same signal.  What comes from the terminal is not passed on, the kernel gives it to the
whole process group; the child is killed when this process is.

The processes of PROGRAM tell what they do, by datagrams to a socket that the environment names: the
hook in `site/sitecustomize.py` that it is there, that Trio runs, that asyncio has connections or
that trio_smc is missing; each stack what it counted, for a report from time to time.  A thread
reads them while this process sleeps in `sigtimedwait`.  A Python without the hook (``-I``) says
nothing, so now and then the tree is looked at for one that has TCP sockets.  Whoever has no
connection is nobody's business: the master of a server, a helper, a shell.

All that PROGRAM's processes do wrong together is said in one line, the first that is found; under
``--require-smc`` PROGRAM is told to end then.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

from trio_smc import ProtocolError
from trio_smc.control.protocol import REPORT_EVERY, REPORT_TO
from trio_smc.tools.client import SHAPES, check_untrusted
from trio_smc.tools.output import size
from trio_smc.tools.processes import executable, family, has_tcp, is_python

__all__ = ["Tree", "supervise"]

_LIMIT: Final = 1 << 16
_PASSED_ON: Final = (
    signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2,
    signal.SIGWINCH,
)  # fmt: skip
_SI_KERNEL: Final = 128
_PR_SET_PDEATHSIG: Final = 1
_FIRST_LOOK: Final = 0.5
_LAST_LOOK: Final = 10.0
"""Seconds between two looks at the tree, which grow."""
_REPORTS: Final = 1.0
"""Seconds between what a stack tells for ``--report``."""
_FAILED: Final = 1


class Tree:
    """What is known of PROGRAM's processes.

    Args:
      require: whether whatever cannot be SMC-R is an error.

    Attributes:
      complaint: what was said; "" while there is nothing to say.
      stacks: by process and peer ID, what each stack last said that it counted, if it did.
      hooked: Pythons that have the hook.
      used_trio: whether any of them has run Trio.
      ended: whether PROGRAM was told to end, since something of it cannot be SMC-R.
    """

    def __init__(self, *, require: bool) -> None:
        self.complaint: str = ""
        self.ended = False
        self.stacks: dict[tuple[int, str], dict[str, Any] | None] = {}
        self._open: set[tuple[int, str]] = set()
        self.hooked: set[int] = set()
        self.used_trio: bool = False
        self._require = require
        self._suspects: set[int] = set()

    def take_untrusted(self, data: bytes) -> None:
        """A message of one of the processes.

        Raises:
          ProtocolError: it is none.
        """
        try:
            message = json.loads(data)
        except (ValueError, RecursionError):
            raise ProtocolError("a message that is not JSON") from None
        check_untrusted(message, {"kind": str, "pid": int}, "message")
        pid = message["pid"]
        match message["kind"]:
            case "python":
                self.hooked.add(pid)
            case "trio":
                self.used_trio = True
            case "asyncio":
                self.complain(
                    f"process {pid} opens TCP connections by asyncio, which cannot be SMC-R; "
                    "run it on Trio"
                )
            case "missing":
                check_untrusted(message, {"executable": str, "error": str}, "message")
                self.complain(
                    f"process {pid} uses Trio, but its Python, {message['executable']!a}, cannot "
                    f"use trio_smc: {message['error'][:200]!a}"
                )
            case "stack-open":
                check_untrusted(message, {"stack": str}, "message")
                key = pid, message["stack"]
                self.stacks[key] = None
                self._open.add(key)
            case "stack-counts" | "stack-end" as kind:
                shape = {"stack": str, "statistics": SHAPES["statistics"]}
                check_untrusted(message, shape, "message")
                key = pid, message["stack"]
                self.stacks[key] = message["statistics"]
                if kind == "stack-end":
                    self._open.discard(key)

    def complain(self, text: str) -> None:
        """Say the first thing that is wrong; once for the whole tree."""
        if not self.complaint:
            self.complaint = text
            level = "error" if self._require else "warning"
            print(f"trio-smc run: {level}: {text}", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGCHLD)  # `_wait` looks again

    def look(self, root: int) -> None:
        """Look for Pythons without the hook that have TCP sockets.

        One that has just started is given until the next look.
        """
        found = {
            pid for pid in family(root)
            if pid not in self.hooked and is_python(executable(pid)) and has_tcp(pid)
        }  # fmt: skip
        deaf = found & self._suspects
        self._suspects = found
        for pid in deaf - self.hooked:
            self.complain(_without_hook(pid, executable(pid)))

    def conclude(self, pid: int, path: str) -> None:
        """The program has ended: was there anything that could have been SMC-R?"""
        if self.used_trio or self.stacks:
            return
        if is_python(path) and pid not in self.hooked:
            self.complain(_without_hook(pid, path))
        else:
            self.complain("the program ended without using Trio: nothing of it could be SMC-R")

    def report(self) -> Iterator[str]:
        """The lines of ``--report``."""
        counted = [each for each in self.stacks.values() if each is not None]
        smc = sum(each["connections"] for each in counted)
        reasons: Counter[tuple[str, str]] = Counter()
        for each in counted:
            for fallback in each["fallbacks"]:
                reasons[fallback["origin"], fallback["reason"]] += fallback["count"]
        refused = sum(each["refused"] for each in counted)
        processes = len({pid for pid, _ in self.stacks})
        yield f"{smc + reasons.total()} connections of {processes} processes"
        for count, mode, prefix in ((smc, "SMC-R", ""), (reasons.total(), "TCP", "tcp_")):
            sent, received = (sum(each[f"{prefix}bytes_{way}"] for each in counted)
                              for way in ("sent", "received"))  # fmt: skip
            yield f"  {count:>7} {mode}, sent {size(sent)}, received {size(received)}"
        for (origin, reason), count in reasons.most_common():
            yield f"    {count:>7} {origin}: {reason}"
        if refused:
            yield f"  {refused:>7} refused, as --require-smc says"
        if self._open:
            yield (
                f"  {len(self._open)} of {len(self.stacks)} stacks were killed: "
                f"what they counted in their last {_REPORTS:g} seconds may be missing"
            )


def supervise(
    program: Sequence[str], environment: dict[str, str], *, require: bool, report: bool
) -> int:
    """Run ``program`` to its end; its exit code, or this process ends by the same signal.

    Args:
      require: end it, and return 1 at least, when anything of it cannot be SMC-R.
      report: print at the end what its connections were.

    Raises:
      OSError: it cannot be started.
    """
    tree = Tree(require=require)
    with _socket() as (reader, path):
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*_PASSED_ON, signal.SIGCHLD})
        try:
            told = {REPORT_TO: path, **({REPORT_EVERY: str(_REPORTS)} if report else {})}
            child = _started(program, {**environment, **told}, mask)
            started = executable(child.pid)
            thread = threading.Thread(target=_listen, args=(reader, tree), name="trio-smc run")
            thread.start()
            try:
                _wait(child, tree, require)
            finally:
                with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
                    own.sendto(b"", path)  # behind all that was told before
                thread.join()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    tree.conclude(child.pid, started)
    if report:
        for line in tree.report():
            print(f"trio-smc run: {line}", file=sys.stderr)
    if tree.ended:
        return child.returncode if child.returncode > 0 else _FAILED
    if child.returncode < 0:
        _die_by(signal.Signals(-child.returncode))
    return child.returncode or (_FAILED if require and tree.complaint else 0)


@contextlib.contextmanager
def _socket() -> Iterator[tuple[socket.socket, str]]:
    """Where processes tell; those that gave up privileges, too, as long as they know its name."""
    directory = tempfile.mkdtemp(prefix="trio-smc-run-")
    try:
        os.chmod(directory, 0o711)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as reader:
            path = os.path.join(directory, "socket")
            reader.bind(path)
            os.chmod(path, 0o666)
            yield reader, path
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _started(
    program: Sequence[str], environment: dict[str, str], mask: set[signal.Signals | int]
) -> subprocess.Popen[bytes]:
    libc = ctypes.CDLL(None)
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


def _wait(child: subprocess.Popen[bytes], tree: Tree, require: bool) -> None:
    """Until the child has ended; signals are passed on, and the tree is looked at."""
    pause, next_look = _FIRST_LOOK, time.monotonic() + _FIRST_LOOK
    while child.poll() is None:
        left = max(0.0, next_look - time.monotonic())
        info = signal.sigtimedwait({*_PASSED_ON, signal.SIGCHLD}, left)
        if info is not None and info.si_signo != signal.SIGCHLD and info.si_code != _SI_KERNEL:
            child.send_signal(info.si_signo)
        if tree.complaint and require and not tree.ended:
            tree.ended = True
            child.terminate()
        if time.monotonic() >= next_look:
            tree.look(child.pid)
            pause = min(2 * pause, _LAST_LOOK)
            next_look = time.monotonic() + pause


def _listen(reader: socket.socket, tree: Tree) -> None:
    """Until an empty datagram comes."""
    while data := reader.recv(_LIMIT):
        with contextlib.suppress(ProtocolError):
            tree.take_untrusted(data)


def _die_by(number: signal.Signals) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with contextlib.suppress(OSError):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _without_hook(pid: int, path: str) -> str:
    return (
        f"process {pid} runs {path} without the hook of trio-smc (its options -I, -E or -S, "
        "or an environment that was cleared): its connections cannot be SMC-R"
    )
