"""Options, seeds, a private runtime directory, and the check that tests leave nothing behind."""

from __future__ import annotations

import gc
import hashlib
import os
import random
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import pytest

import trio_smc
from tests import hangs, leaks
from tests.api.api_peers import HOST, QUICK
from tests.timing import SLOWER
from trio_smc import SmcListener, Stack
from trio_smc.stack import policy

_SEED = pytest.StashKey[int]()
_REPORTED = pytest.StashKey[set[str]]()
_LONG = ("benchmark", "full", "lab", "others")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("trio_smc")
    group.addoption(
        "--seed", type=int, default=None, help="replay a run: the seed that its header printed"
    )
    group.addoption(
        "--full",
        action="store_true",
        help="also run what takes long (markers benchmark, full, lab, others)",
    )
    group.addoption(
        "--all-kernels",
        action="store_true",
        help="run the tests of the lab with every kernel that it has (marker other_kernel)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # A shell that starts the tests in the background ignores SIGINT, and so would processes that
    # tests interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Under xdist the controller chose the seed, so that all workers share it.
    given: int | None = getattr(config, "workerinput", {}).get("seed", config.getoption("--seed"))
    seed = random.SystemRandom().getrandbits(32) if given is None else given
    config.stash[_SEED] = seed
    config.stash[_REPORTED] = set()
    # One number replays Hypothesis too, unless it was given a seed of its own.
    if config.getoption("--hypothesis-seed", None) is None:
        config.option.hypothesis_seed = seed
    # Shared machines pause for longer than any per-example deadline, and than Hypothesis allows
    # for drawing examples.
    patient = hypothesis.settings(
        deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.register_profile("short", patient)
    hypothesis.settings.register_profile("full", patient, max_examples=5000)
    full = config.getoption("--full")
    hypothesis.settings.load_profile("full" if full else "short")
    if full:
        os.environ["TRIO_SMC_FULL"] = "1"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand the seed to an xdist worker."""
    node.workerinput["seed"] = node.config.stash[_SEED]


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.stash[_SEED]} (replay with --seed {config.stash[_SEED]})"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect (and so count in the summary) what only --full runs, or only a pure build.

    On a slow machine, tests with a time-out of their own get a longer one.
    """
    others = () if config.getoption("--full") else _LONG
    if trio_smc.__compiled__:
        others = (*others, "pure")
    if not config.getoption("--all-kernels"):
        others = (*others, "other_kernel")
    left = [item for item in items if any(item.get_closest_marker(name) for name in others)]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]
    for item in items if SLOWER > 1 else ():
        limit = item.get_closest_marker("timeout")
        if limit is not None:
            item.add_marker(pytest.mark.timeout(SLOWER * limit.args[0]), append=False)


def pytest_collection_finish() -> None:
    """Exclude all that exists before the first test from garbage collection.

    A collection while a test runs would otherwise visit 340,000 objects of modules and tests. That
    doubled the processor time of tests that make many objects (`tests/states/test_differential.py`
    in a run that has collected all tests: 22 and 10 s).
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """Give an async test an end that leaves the Trio run intact, and one that only calculates its
    time on the processor; others get the plug-in's."""
    if item.get_closest_marker("calculates") is not None and settings.method == "signal":
        hangs.arm_processor(item, settings)
        return True
    if item.get_closest_marker("trio") is None or settings.method != "signal":
        return None
    hangs.arm(item, settings)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test whose time ran out, also when its cancellation went well."""
    try:
        return (yield)
    finally:
        hangs.fail_if_hung(item)


@pytest.fixture
def monkeypatch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Pytest's; what replaces compiled code, which would have no effect, fails."""
    if trio_smc.__compiled__:
        patch: Any = monkeypatch.setattr

        def patch_or_fail(target: object, *arguments: Any, **options: Any) -> None:
            owner = getattr(target, "__objclass__", target)
            if not isinstance(owner, ModuleType):
                kind = owner if isinstance(owner, type) else type(owner)
                owner = sys.modules[kind.__module__]
            if (getattr(owner, "__file__", None) or "").endswith(".so"):
                pytest.fail("replaces compiled code: the test needs the mark `pure`")
            patch(target, *arguments, **options)

        patch(monkeypatch, "setattr", patch_or_fail)
    return monkeypatch


@pytest.fixture
def full(request: pytest.FixtureRequest) -> bool:
    """True with --full: a test may then run more cases."""
    return bool(request.config.getoption("--full"))


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A 64-bit seed for this test alone: depends on the run's seed and the test's name, not on
    which tests ran before."""
    text = f"{request.config.stash[_SEED]}:{request.node.nodeid}"
    value = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    request.node.add_report_section("setup", "seed", f"this test's seed: {value}")
    return value


@pytest.fixture
def rng(seed: int) -> random.Random:
    """A random generator started from this test's seed."""
    return random.Random(seed)


class _RuntimeDirectories:
    """Empty directories with mode 0700.

    A file system may take milliseconds to remove a directory, which thousands of tests would wait
    for.  Therefore the next test gets the same directory if the last one left it as it was.
    """

    def __init__(self, base: Path) -> None:
        self._base = base
        self._unused: Path | None = None

    def get(self) -> Path:
        directory, self._unused = self._unused, None
        return directory or Path(tempfile.mkdtemp(dir=self._base))

    def put_back(self, directory: Path) -> None:
        """Keep the directory for the next test, or remove it if a test has changed it."""
        found = directory.lstat()
        unchanged = found.st_mode == stat.S_IFDIR | 0o700 and found.st_uid == os.geteuid()
        if unchanged and not os.listdir(directory):
            self._unused = directory
        else:
            shutil.rmtree(directory)


@pytest.fixture(scope="session")
def _runtime_directories() -> Iterator[_RuntimeDirectories]:
    # Not under pytest's own directory: paths of Unix sockets end at 107 bytes.
    base = Path(tempfile.mkdtemp(prefix="smc-"))
    yield _RuntimeDirectories(base)
    shutil.rmtree(base)


@pytest.fixture(autouse=True, scope="session")
def _session_leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Resources of fixtures with a wider scope must be gone at the end of the run."""
    before = leaks.take()
    yield
    _fail_if_leaked(request, before, ())


@pytest.fixture(autouse=True)
def _short_connections_stay(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most connections of tests are short, and are to use SMC-R all the same.

    Not in other processes: there `Config(learn_short=False)` does it.
    """
    if request.node.get_closest_marker("learns_short") is None:
        monkeypatch.setattr(policy, "SHORT_AFTER", 1 << 30)


@pytest.fixture(autouse=True)
def runtime_directory(
    request: pytest.FixtureRequest,
    _runtime_directories: _RuntimeDirectories,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Path]:
    """Give the test its own XDG_RUNTIME_DIR; afterwards fail if it left anything.

    Checked: child processes (also zombies), threads, descriptors, mapped memfds, and files,
    sockets or pipes in the runtime directory. In tmp_path only sockets and pipes count: its
    plain files are for pytest to remove.
    """
    directory = _runtime_directories.get()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    for name in ("TRIO_SMC_CONFIG", "TRIO_SMC_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    trees = [directory]
    if "tmp_path" in request.fixturenames:
        trees.append(request.getfixturevalue("tmp_path"))
    before = leaks.take(*trees)
    yield directory
    try:
        _fail_if_leaked(request, before, tuple(trees))
    finally:
        _runtime_directories.put_back(directory)


def _fail_if_leaked(
    request: pytest.FixtureRequest, before: leaks.Snapshot, trees: tuple[Path, ...]
) -> None:
    left = _left(before, trees)
    if left:
        # Only then: a full collection after each of thousands of tests would take minutes. What
        # the collector frees here still warns (ResourceWarning is an error).
        gc.collect()
        left = _left(before, trees)
    reported = request.config.stash[_REPORTED]
    new = [line for line in left if line not in reported]
    if new:
        reported.update(new)
        pytest.fail("left behind:\n  " + "\n  ".join(new), pytrace=False)


def _left(before: leaks.Snapshot, trees: tuple[Path, ...]) -> list[str]:
    lines = leaks.leaked(before, leaks.take(*trees))
    tmp = str(trees[1]) if len(trees) > 1 else None
    return [line for line in lines if not (tmp and line.startswith(f"file {tmp}"))]


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    """A stack whose waits for a peer are short."""
    async with trio_smc.open_stack(QUICK) as stack:
        yield stack


@pytest.fixture
async def listener(stack: Stack) -> AsyncIterator[SmcListener]:
    """A listener of ``stack``."""
    [listener] = await stack.open_listeners(0, host=HOST)
    async with listener:
        yield listener
