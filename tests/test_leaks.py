"""The leak check itself: each kind of thing left behind fails the test that left it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

LEAKS = {
    "descriptor": "import os; keep = os.open('/dev/null', os.O_RDONLY)",
    "thread": "import threading, time; keep = threading.Thread(target=time.sleep, args=(5,), "
    "name='lost', daemon=True); keep.start()",
    "child process": "import subprocess; keep = subprocess.Popen(['sleep', '5'])",
    "memfd mapping": "import os, mmap; fd = os.memfd_create('lost'); os.truncate(fd, 4096); "
    "keep = mmap.mmap(fd, 4096); os.close(fd)",
    "socket file": "import os, socket; s = socket.socket(socket.AF_UNIX); "
    "s.bind(os.environ['XDG_RUNTIME_DIR'] + '/lost'); s.close()",
}


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))


@pytest.mark.parametrize("kind", LEAKS)
def test_each_kind_of_leak_fails_its_test(pytester: pytest.Pytester, kind: str) -> None:
    code = f"KEEP = []\ndef test_leaves():\n    {LEAKS[kind]}\n"
    code += "    KEEP.append(locals().get('keep'))\n"
    if kind == "child process":
        # The interpreter would warn about the child at exit; reap it after the check.
        code += "def teardown_module():\n    KEEP[0].kill(); KEEP[0].wait()\n"
    pytester.makepyfile(code)
    result = pytester.runpytest_subprocess("-p", "tests.conftest", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines([f"*{kind} *"])


def test_a_clean_test_passes_and_the_seed_replays(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import trio
        def test_seed(seed, rng):
            print("drawn", seed, rng.random())
        async def test_thread():
            await trio.to_thread.run_sync(int)
        """
    )
    runs = [
        pytester.runpytest_subprocess(
            "-p", "tests.conftest", "-p", "no:cacheprovider", "-s", "-o", "trio_mode=true",
            "--seed", "7",
        )
        for _ in range(2)
    ]  # fmt: skip
    drawn = [[line for line in run.outlines if "drawn" in line] for run in runs]
    assert drawn[0] == drawn[1] != []
    for run in runs:
        run.assert_outcomes(passed=2)
        run.stdout.fnmatch_lines(["seed: 7 *"])
