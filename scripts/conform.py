"""Judge trio_smc by `smc-conform`, in both roles and both versions, over the software RNIC.

    python -m scripts.conform [--role server|client] [--version 1|2] [--eye-catchers]
                              [--tree DIRECTORY] [--runs N] [-- ...]

`examples/conform_target.py` is the implementation under test.  What follows ``--`` goes to
`smc-conform`.  The reports (JSON, JUnit XML, HTML) are written into build/conform.  The exit code
is 1 if a check has failed, or was inconclusive (on one host there is no slow network), or if a
verdict is "differs" and `DIFFERS` does not have it.  ``--runs N`` repeats all of it N times, and
the exit code is 1 if a verdict changes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from scripts.conform_findings import findings

__all__ = ["DIFFERS", "Run", "Setup", "judge", "setups", "target"]

ROOT = Path(__file__).resolve().parents[1]
REPORTS = ROOT / "build" / "conform"
LANES = 16
"""Connections at a time of the client under test; more than the jobs of `OPTIONS` ever use."""
OPTIONS: Mapping[str, Sequence[str]] = {
    "server": ("--jobs", "8"),
    "client": ("--jobs", "3"),
}
AT_A_TIME = 2
"""Runs of the suite side by side: most of the time they wait for time-outs."""
COMMON = ("--timers", "8", "--provides", "one-rnic", "--provides", "parallel")
UEID = "SMC-CONFORM.TEST"
_TIME_TO_END = 10.0
"""Seconds for an implementation that is interrupted; one with a fault may hang."""
DIFFERS = frozenset(name for name, each in findings().items() if each.ours)
"""Checks in which trio_smc differs, for a reason in conform_findings.toml."""
OF_VERSION_2 = ("version2/*", "clc/*", "contact/*", "llc/*", "failover/*", "isolation/*")
"""Areas of checks for version 2: those of CLC and LLC messages.  The data path has no version."""


class Setup(NamedTuple):
    """One run of the suite.

    Attributes:
      role: of the implementation under test.
      version: of SMC-R.
      eye_catchers: elements have the RFC's eye catcher.
      areas: patterns of checks; none: all.
    """

    role: str
    version: int = 1
    eye_catchers: bool = False
    areas: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """For a headline."""
        layout = ", with eye catchers" if self.eye_catchers else ""
        return f"trio_smc as {self.role} in version {self.version}{layout}"

    @property
    def reports(self) -> Path:
        """The directory of the reports."""
        if self.eye_catchers:
            return REPORTS / "eye-catchers"
        return REPORTS / "version-2" if self.version > 1 else REPORTS

    @property
    def only(self) -> list[str]:
        """The option of `smc-conform` for the areas."""
        return [word for area in self.areas for word in ("--only", area)]


def setups() -> list[Setup]:
    """All runs.  The layout of RFC 7609, 4.2 has a meaning for cursors and data only."""
    return [
        *(Setup(role) for role in OPTIONS),
        *(Setup(role, version=2, areas=OF_VERSION_2) for role in OPTIONS),
        *(Setup(role, eye_catchers=True, areas=("data/*",)) for role in OPTIONS),
    ]


class Run:
    """The result of one role.

    Attributes:
      verdicts: by check.
      suspects: the checks that ran when the implementation went; none if it did not.
      code, output: the exit code of `smc-conform`, and what it has shown.
    """

    def __init__(self, report: Path, code: int, output: str) -> None:
        self.code = code
        self.output = output
        self.verdicts: dict[str, str] = {}
        self.suspects: list[str] = []
        if report.exists():
            run = json.loads(report.read_text())
            self.verdicts = {each["id"]: each["verdict"] for each in run["checks"]}
            self.suspects = run["suspects"]

    def of(self, verdict: str) -> list[str]:
        """The checks with this verdict."""
        return [name for name, each in self.verdicts.items() if each == verdict]

    @property
    def wrong(self) -> list[str]:
        """The checks that have failed, differ without a reason, or may have ended the target."""
        differs = (each for each in self.of("differs") if each not in DIFFERS)
        return list(dict.fromkeys((*self.of("fail"), *differs, *self.suspects)))

    @property
    def is_good(self) -> bool:
        """True if every check has come to a verdict that is right for trio_smc."""
        return self.code == 0 and not self.wrong and not self.of("inconclusive")


def judge(setup: Setup, *more: str, tree: Path = ROOT, reports: Path | None = None) -> Run:
    """Run the suite against the implementation in ``tree``.

    Args:
      more: options for `smc-conform`.
      reports: the directory for the reports; None: that of the set-up.
    """
    reports = reports or setup.reports
    reports.mkdir(parents=True, exist_ok=True)
    role = setup.role
    report = reports / f"{role}.json"
    report.unlink(missing_ok=True)
    options = [
        *COMMON, *OPTIONS[role], "--json", str(report), "--html", str(reports / f"{role}.html"),
        "--junit", str(reports / f"{role}.xml"), "--keep", str(reports / role), *more,
    ]  # fmt: skip
    if tree != ROOT:
        options.append("--no-first-contact")  # a check must notice the fault
    variables = {}
    if setup.version > 1:
        options += ["--version", "2", "--ueid", UEID]
        variables["CONFORM_UEID"] = UEID
    if setup.eye_catchers:
        options.append("--eye-catchers")
        variables["CONFORM_EYE_CATCHER"] = "1"
    with tempfile.TemporaryDirectory(prefix="smc-conform-") as directory:
        os.chmod(directory, 0o700)
        options += ["--directory", directory]
        variables["CONFORM_DIRECTORY"] = directory
        run = _server if role == "server" else _client
        code, output = run(tree, variables, options)
        return Run(report, code, output)


def _server(tree: Path, variables: Mapping[str, str], options: Sequence[str]) -> tuple[int, str]:
    with target("server", "0", variables=variables, tree=tree) as server:
        assert server.stdout is not None
        port, daytime, discard = server.stdout.readline().split()
        services = ("--daytime", daytime, "--discard", discard)
        command = _suite("connect", "127.0.0.1", port, *services, *options)
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
        return done.returncode, done.stdout


def _client(tree: Path, variables: Mapping[str, str], options: Sequence[str]) -> tuple[int, str]:
    command = _suite("listen", "0", "--host", "127.0.0.1", "--discard", "0", *options)
    suite = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with suite:
        assert suite.stdout is not None
        port, discard = (suite.stdout.readline().split()[-1] for _ in range(2))
        arguments = ("client", "127.0.0.1", port, str(LANES), discard)
        with target(*arguments, variables=variables, tree=tree):
            output = suite.stdout.read()
    return suite.returncode, output


def _suite(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "smc_conform", *arguments]


@contextmanager
def target(
    *arguments: str, variables: Mapping[str, str], tree: Path = ROOT
) -> Iterator[subprocess.Popen[str]]:
    """Run the implementation under test, with its output in a pipe.

    Args:
      arguments, variables: those of `examples/conform_target.py`.
      tree: with the trio_smc to judge.
    """
    # The suite's own RNIC for version 2 is not part of a tree with a fault.
    path = {"PYTHONPATH": f"{tree}{os.pathsep}{ROOT}"}
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / "conform_target.py"), *arguments],
        cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL if tree != ROOT else None,
        text=True, env={**os.environ, **variables, **path},
    )  # fmt: skip
    with process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)  # so that it removes its RNIC from the directory
            with suppress(subprocess.TimeoutExpired):
                process.wait(_TIME_TO_END)
            process.kill()


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--role", choices=tuple(OPTIONS), help="default: both")
    parser.add_argument("--version", type=int, choices=(1, 2), help="default: both")
    parser.add_argument("--eye-catchers", action="store_true", help="only the layout of 4.2")
    parser.add_argument("--tree", type=Path, default=ROOT, help="with the trio_smc to judge")
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="compare N runs")
    parser.add_argument("more", nargs="*", help="options for smc-conform")
    given = parser.parse_args(arguments)
    chosen = [
        each
        for each in setups()
        if given.role in (None, each.role)
        and given.version in (None, each.version)
        and (each.eye_catchers or not given.eye_catchers)
    ]

    def one(setup: Setup) -> Run:
        only = [] if "--only" in given.more else setup.only
        return judge(setup, *only, *given.more, tree=given.tree)

    bad = False
    verdicts: list[dict[str, str]] = []
    for number in range(given.runs):
        begin = time.monotonic()
        found: dict[str, str] = {}
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            for setup, run in zip(chosen, pool.map(one, chosen), strict=True):
                print(f"--- {setup.words}\n{run.output}", end="", flush=True)
                if not run.is_good:
                    bad = True
                    print(f"not right for trio_smc: {', '.join(run.wrong) or 'see above'}")
                found |= {f"{setup.words}: {name}": each for name, each in run.verdicts.items()}
        print(f"reports: {REPORTS.relative_to(ROOT)}; {time.monotonic() - begin:.0f} s", flush=True)
        verdicts.append(found)
        for name in sorted(found.keys() | verdicts[0].keys()):
            was, now = verdicts[0].get(name), found.get(name)
            if was != now:
                bad = True
                print(f"run {number + 1}: {name}: {was} -> {now}")
    if given.runs > 1:
        print(
            f"{given.runs} runs {'differ, or are not right' if bad else 'with the same verdicts'}"
        )
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
