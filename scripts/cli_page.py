"""Write the examples of docs/cli.md: the output of `trio-smc` about two processes made for it.

    python -m scripts.cli_page            writes the page
    python -m scripts.cli_page --check    exits with 1 if the page is out of date

The output of a command is between the lines ``<!-- trio-smc ss -->`` and ``<!-- end -->``.
Numbers that differ each time (processes, ports, identities, times) are replaced by fixed ones
before anything is printed, and the variant of the software RNIC by that of a wheel, so that the
page changes only if the command does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from trio_smc import Settings, SoftRnic
from trio_smc.tools import client
from trio_smc.tools.cli import main as trio_smc
from trio_smc.tools.client import Snapshot
from trio_smc.tools.commands import check, ss
from trio_smc.tools.settings import described as real_settings

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "cli.md"
_EXAMPLE = re.compile(r"(<!-- (trio-smc [^\n]*) -->\n).*?(<!-- end -->)", re.DOTALL)
_QUERIES = ("ss", "lg", "rnic", "stats", "top", "check", "drain")
_PID = 4242
_FIXED: dict[str, Any] = {
    "peer_gid": "fd534d43520000005deb0dcec98f3f61", "uptime": 83.0,
    "program": "python server.py", "peer_id": "c80f02faed98512d",
    "stack": "c80f02faed98512d", "gid": "fd534d43520000005deb0dcec98f3f61", "mac": "02faed98512d",
}  # fmt: skip
_NUMBERED = {"alert_token": 0x260CB830, "user_id": 0xAC62CCC7, "peer_user_id": 0xAC62CCC7}
"""Different numbers stay different: the first becomes this one, the next this one plus 1."""
_DIRECTORY = "/run/user/1000/trio-smc"
_ADDRESSES = ("local", "peer", "listeners")
_OTHER_PORT = 40003


@dataclasses.dataclass
class Numbers:
    """The replacements of numbers.  Each kind is separate: a PID can be the same number as a port.

    Attributes:
      pid: of the process that the examples show.
      ports: fixed numbers by real ones.
      replaced: for `_NUMBERED`, fixed numbers by real ones.
    """

    pid: int
    ports: dict[int, int]
    replaced: dict[int, int] = dataclasses.field(default_factory=dict)


def page(text: str) -> str:
    """Return the page with all examples renewed."""
    with _peer() as peer:
        numbers = Numbers(
            peer["pid"],
            {peer["port"]: 7000, peer["client"]: 40001, peer["plain"]: 40002},
        )

        def renewed(match: re.Match[str]) -> str:
            output = _run(match[2], numbers)
            return f"{match[1]}```text\n$ {match[2]}\n{output}```\n{match[3]}"

        return _EXAMPLE.sub(renewed, text)


@contextlib.contextmanager
def _peer() -> Iterator[dict[str, int]]:
    """Run a process for the examples, in a private directory of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="smc-") as directory,
        mock.patch.dict(os.environ, XDG_RUNTIME_DIR=directory),
        subprocess.Popen(
            [sys.executable, "-m", "tests.tools.tools_peer", "pair"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield {"pid": process.pid, **json.loads(process.stdout.readline())}
        finally:
            process.stdin.close()
            process.wait(20)


def _run(command: str, numbers: Numbers) -> str:
    """Return the output of one command."""
    arguments = shlex.split(command)[1:]
    real = {str(fixed): str(number) for number, fixed in numbers.ports.items()}
    real[str(_PID)] = str(numbers.pid)
    arguments = [real.get(each, each) for each in arguments]

    def take_snapshots(*given: Any, **options: Any) -> list[Snapshot]:
        return [_fixed(each, numbers) for each in client.take_snapshots(*given, **options)]

    def described(settings: Settings) -> list[dict[str, Any]]:
        found = real_settings(settings)
        for each in found:
            if each["name"] == "directory":
                each["value"] = _DIRECTORY
        return found

    with contextlib.ExitStack() as stack, contextlib.redirect_stdout(io.StringIO()) as output:
        stack.enter_context(mock.patch.object(SoftRnic, "variant", "native"))
        stack.enter_context(mock.patch.object(check, "described", described))
        stack.enter_context(mock.patch.object(ss, "user_name", return_value="app"))
        for name in _QUERIES:
            module = import_module(f"trio_smc.tools.commands.{name}")
            if name != "check":  # the process of `check` must find its own connection
                stack.enter_context(mock.patch.object(module, "take_snapshots", take_snapshots))
        with contextlib.suppress(SystemExit):
            trio_smc(arguments)
    text = output.getvalue()
    if arguments[0] == "check":
        text = text.replace(f"process {numbers.pid},", f"process {_PID},")
        text = re.sub(
            r"(?<=127\.0\.0\.1:)\d+",
            lambda port: str(numbers.ports.get(int(port[0]), _OTHER_PORT)),
            text,
        )
    return re.sub(r"^\d\d:\d\d:\d\d ", "12:00:00 ", text, flags=re.MULTILINE)


def _fixed(snapshot: Snapshot, numbers: Numbers) -> Snapshot:
    """The snapshot with fixed numbers."""
    plain = with_fixed(dataclasses.asdict(snapshot), numbers)
    plain["connections"].sort(key=lambda each: (each["mode"], each["local"]))
    return Snapshot(**plain)


def with_fixed(value: Any, numbers: Numbers, name: str = "") -> Any:
    """A part of a snapshot with fixed numbers."""
    if name in _FIXED and value is not None:
        return _FIXED[name]
    if name in _NUMBERED:
        first = _NUMBERED[name]
        taken = [fixed for fixed in numbers.replaced.values() if first <= fixed < first + 100]
        return numbers.replaced.setdefault(value, first + len(taken))
    if name == "pid":
        return _PID
    if isinstance(value, dict):
        return {each: with_fixed(inner, numbers, each) for each, inner in value.items()}
    if isinstance(value, list | tuple):
        return [with_fixed(inner, numbers, name) for inner in value]
    return numbers.ports.get(value, value) if name in _ADDRESSES else value


def main(arguments: Sequence[str]) -> int:
    """The command line."""
    before = PAGE.read_text(encoding="utf-8")
    after = page(before)
    if list(arguments) == ["--check"]:
        return int(before != after)
    PAGE.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
