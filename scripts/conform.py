"""Judge trio_smc by `smc-conform`, in both roles, over the software RNIC.

    python -m scripts.conform [--role server|client] [--eye-catchers] [--tree DIRECTORY] [-- ...]

`examples/conform_target.py` is the implementation under test.  What follows ``--`` goes to
`smc-conform`.  The reports (JSON, JUnit XML, HTML) are written into build/conform.  The exit code
is 1 if a check has failed, or was inconclusive: on one host there is no slow network.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Run", "judge"]

ROOT = Path(__file__).resolve().parents[1]
REPORTS = ROOT / "build" / "conform"
LANES = 16
"""Connections at a time of the client under test; more than the jobs of `OPTIONS` ever use."""
OPTIONS: Mapping[str, Sequence[str]] = {
    "server": ("--jobs", "8"),
    "client": ("--jobs", "3"),
}
COMMON = ("--timers", "8", "--provides", "one-rnic", "--provides", "parallel")


class Run:
    """The result of one role.

    Attributes:
      counts: by verdict.
      failed: IDs of the checks that have failed.
      code: the exit code of `smc-conform`.
    """

    def __init__(self, report: Path, code: int) -> None:
        self.code = code
        self.counts: dict[str, int] = {}
        self.failed: list[str] = []
        if report.exists():
            for each in json.loads(report.read_text())["checks"]:
                self.counts[each["verdict"]] = self.counts.get(each["verdict"], 0) + 1
                if each["verdict"] == "fail":
                    self.failed.append(each["id"])


def judge(
    role: str, reports: Path, *more: str, tree: Path = ROOT, eye_catchers: bool = False,
    quiet: bool = False,
) -> Run:  # fmt: skip
    """Run the suite against the implementation in ``tree``.

    Args:
      role: of the implementation under test.
      reports: the directory for the reports.
      more: options for `smc-conform`.
      eye_catchers: elements of the implementation have the RFC's eye catcher.
      quiet: show nothing.
    """
    reports.mkdir(parents=True, exist_ok=True)
    report = reports / f"{role}.json"
    report.unlink(missing_ok=True)
    options = [
        *COMMON, *OPTIONS[role], "--json", str(report), "--html", str(reports / f"{role}.html"),
        "--junit", str(reports / f"{role}.xml"), "--keep", str(reports / role), *more,
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="smc-conform-") as directory:
        os.chmod(directory, 0o700)
        options += ["--directory", directory]
        run = _server if role == "server" else _client
        code = run(tree, directory, options, eye_catchers, quiet)
    return Run(report, code)


def _server(
    tree: Path, directory: str, options: Sequence[str], eye_catchers: bool, quiet: bool
) -> int:
    with _target(tree, directory, eye_catchers, "server", "0") as target:
        assert target.stdout is not None
        port, daytime, discard = target.stdout.readline().split()
        services = ("--daytime", daytime, "--discard", discard)
        command = _suite("connect", "127.0.0.1", port, *services, *options)
        output = subprocess.DEVNULL if quiet else None
        return subprocess.run(command, cwd=ROOT, stdout=output, check=False).returncode


def _client(
    tree: Path, directory: str, options: Sequence[str], eye_catchers: bool, quiet: bool
) -> int:
    command = _suite("listen", "0", "--host", "127.0.0.1", *options)
    suite = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with suite:
        assert suite.stdout is not None
        port = suite.stdout.readline().split()[-1]
        with _target(tree, directory, eye_catchers, "client", "127.0.0.1", port, str(LANES)):
            for line in suite.stdout:
                if not quiet:
                    print(line, end="", flush=True)
    return suite.returncode


def _suite(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "smc_conform", *arguments]


@contextmanager
def _target(
    tree: Path, directory: str, eye_catchers: bool, *arguments: str
) -> Iterator[subprocess.Popen[str]]:
    variables = {"CONFORM_DIRECTORY": directory, "PYTHONPATH": str(tree)}
    if eye_catchers:
        variables["CONFORM_EYE_CATCHER"] = "1"
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / "conform_target.py"), *arguments],
        cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL if tree != ROOT else None,
        text=True, env={**os.environ, **variables},
    )  # fmt: skip
    with process:
        try:
            yield process
        finally:
            process.kill()


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--role", choices=tuple(OPTIONS), help="default: both")
    parser.add_argument("--eye-catchers", action="store_true", help="as RFC 7609, 4.2 has them")
    parser.add_argument("--tree", type=Path, default=ROOT, help="with the trio_smc to judge")
    parser.add_argument("more", nargs="*", help="options for smc-conform")
    given = parser.parse_args(arguments)
    bad = 0
    begin = time.monotonic()
    roles = [given.role] if given.role else list(OPTIONS)
    runs = [(role, given.eye_catchers, given.more) for role in roles]
    if not (given.eye_catchers or given.more):
        # The layout of RFC 7609, 4.2 has a meaning for cursors and data only.
        runs += [(role, True, ["--only", "data/*"]) for role in roles]
    for role, eye_catchers, more in runs:
        print(f"--- trio_smc as {role}{', with eye catchers' if eye_catchers else ''}", flush=True)
        reports = REPORTS / "eye-catchers" if eye_catchers else REPORTS
        options = [*more, *(["--eye-catchers"] if eye_catchers else [])]
        run = judge(role, reports, *options, tree=given.tree, eye_catchers=eye_catchers)
        bad |= run.code != 0 or run.counts.get("inconclusive", 0) > 0
    print(f"reports: {REPORTS.relative_to(ROOT)}; {time.monotonic() - begin:.0f} s")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
