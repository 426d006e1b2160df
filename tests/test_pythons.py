"""Which interpreters `make pythons` takes, and its roots of other systems."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import pythons

Make = Callable[[str, str, str], Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Make a program that says of itself what an interpreter of that version would."""

    def made(place: str, name: str, script: str) -> Path:
        path = tmp_path / place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    return made


def test_the_newest_of_each_supported_version_is_taken(tmp_path: Path, make: Make) -> None:
    make("bin", "python3", "echo 3 11 2")
    old = make("bin", "python3.12", "echo 3 12 1")
    threads = make("bin", "python3.13t", "echo 3 13 5 t")
    make("bin", "python3.10", "echo 3 10 9")
    make("bin", "python3.99", "echo 3 99 0")
    make("bin", "python3.14", "exit 127")
    make("bin", "python3-config", "echo 3 12 99")
    newest = make("pyenv/versions/3.11.7/bin", "python3", "echo 3 11 7")
    make("pyenv/versions/3.12.0/bin", "python3", "echo 3 12 0")
    path = f"{tmp_path / 'bin'}:{tmp_path / 'nowhere'}"
    found = pythons.newest_of_each(pythons.interpreters(path, tmp_path / "pyenv"))
    assert found == {"3.11": newest, "3.12": old, "3.13t": threads}


@pytest.mark.parametrize("passes", [True, False])
def test_a_failed_python_is_reported_and_the_others_run(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], passes: bool
) -> None:
    first = make("bin", "python3.11", "echo 3 11 2")
    make("bin", "python3.12", "echo 3 12 1")
    monkeypatch.setenv("PATH", str(first.parent))
    monkeypatch.setattr(Path, "home", lambda: first.parent / "absent")
    ran: list[str] = []

    def tested(_python: Path, environment: Path, tests: list[str]) -> bool:
        ran.append(environment.name)
        assert tests == ["tests/wire"]
        return passes or environment.name != "3.11"

    monkeypatch.setattr(pythons, "tested", tested)
    assert pythons.main(["tests/wire"]) == (0 if passes else 1)
    assert ran == ["3.11", "3.12"]
    summary = capsys.readouterr().out.partition("=== summary\n")[2]
    assert summary.split() == [
        *("Python", "3.11", "passed" if passes else "FAILED"),
        *("Python", "3.12", "passed"),
    ]


def test_each_suite_of_debian_is_a_root_of_its_own(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(make("bin", "python3.11", "echo 3 11 2").parent))
    monkeypatch.setattr(Path, "home", lambda: Path("nowhere"))
    monkeypatch.setattr(pythons, "tested", lambda *_: True)
    ran: list[tuple[str, list[Path], list[str]]] = []

    def tested(suite: str, shared: list[Path], tests: list[str], arch: None) -> bool:
        assert arch is None
        ran.append((suite, shared, tests))
        return suite != "trixie"

    monkeypatch.setattr(pythons, "tested_in_debian", tested)
    given = ["--debian", "forky", "--share", "/opt", "--debian13", "--share", "/srv", "tests/wire"]
    assert pythons.main(given) == 1
    rest = [Path("/opt"), Path("/srv")], ["tests/wire"]
    assert ran == [("forky", *rest), ("trixie", *rest)]
    summary = capsys.readouterr().out.partition("=== summary\n")[2]
    assert summary.split()[3:] == ["Debian", "forky", "passed", "Debian", "trixie", "FAILED"]


def test_another_processor_is_emulated_and_nothing_else_runs(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(make("bin", "python3.11", "echo 3 11 2").parent))
    monkeypatch.setattr(pythons, "tested", None)
    ran: list[tuple[object, ...]] = []

    def tested(*arguments: object) -> bool:
        ran.append(arguments)
        return len(ran) == 1

    monkeypatch.setattr(pythons, "tested_in_debian", tested)
    for code in (0, 1):
        assert pythons.main(["--arch", "arm64", "tests/wire"]) == code
    assert ran == [("trixie", [], ["tests/wire"], "arm64")] * 2
    assert capsys.readouterr().out.count("Debian trixie, arm64 ") == 2


@pytest.mark.parametrize("fails", [[], ["native demo", "socket test"]])
def test_an_emulated_processor_runs_demo_and_tests_with_each_variant(
    make: Make, monkeypatch: pytest.MonkeyPatch, fails: list[str]
) -> None:
    """A failure is named at the end, and does not stop what follows."""
    cases = "|".join(f'"{each}"' for each in fails) or "none"
    script = f'case "$TRIO_SMC_WORDS $1" in {cases}) code=1;; esac\necho "$@"; exit ${{code:-0}}'
    monkeypatch.setenv("PATH", str(make("bin", "make", script).parent), prepend=os.pathsep)
    commands = pythons.emulated_commands(["tests/wire", "-k", "a b"])
    done = subprocess.run(
        ["sh", "-c", " && ".join(commands)], capture_output=True, text=True, check=False
    )
    expected = ["ready-dev"]
    for variant in ("native", "socket"):
        expected += [f"--- {variant}: make demo", "demo ARGS=--mib 4 --rounds 1"]
        expected += [f"--- {variant}: tests", "test ARGS=tests/wire -k 'a b' JOBS=2"]
    if fails:
        expected.append("failed native: make demo, socket: tests")
    assert done.stdout.splitlines() == expected
    assert done.returncode == (1 if fails else 0)


def test_an_emulated_processor_runs_make_quick_and_the_tests_beside_it() -> None:
    """Every suite with tests in processes of its own is named besides `make quick`."""
    text = " && ".join(pythons.emulated_commands([]))
    assert text.count("{ make quick ") == 2
    quick = re.search(
        r"^QUICK := .*tests/,([^)]*)\)", (pythons.ROOT / "Makefile").read_text(), re.MULTILINE
    )
    assert quick
    tests = pythons.ROOT / "tests"
    for suite in [*quick[1].split(), "e2e"]:
        modules = (tests / suite).rglob("test_*.py")
        if any("pytest.mark.processes" in each.read_text() for each in modules):
            assert text.count(f" tests/{suite}") == 2, suite


def test_a_copy_of_the_tree_keeps_its_environment(tmp_path: Path) -> None:
    tree = tmp_path / "work"
    for name in (".venv/kept", "trio_smc/old.py", "old"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).touch()
    native = tree / "trio_smc" / "rnic" / "_words.abi3.so"
    native.parent.mkdir(parents=True)
    native.write_bytes(b"compiled when .venv was made")
    pythons.copy_tree(tree)
    assert (tree / ".venv" / "kept").exists()
    assert native.read_bytes() == b"compiled when .venv was made"
    assert (tree / "trio_smc" / "__init__.py").exists()
    assert not (tree / "trio_smc" / "old.py").exists()
    assert not (tree / "old").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another root directory")
@pytest.mark.parametrize("code", [0, 3])
def test_a_root_directory_is_one_in_which_user_namespaces_can_be_made(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], code: int
) -> None:
    able = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    if able.returncode:
        pytest.skip(f"no namespaces here: {able.stderr.decode().strip()}")
    work = tmp_path / "work"
    work.mkdir()
    (work / "Makefile").write_text(
        "demo:\n\t@echo demo; unshare --user echo of its own; ls /work\n"
        f"test:\n\t@printf '%s\\n' $(ARGS); exit {code}\n"
    )
    programs = [Path("/", each) for each in ("bin", "dev", "lib", "lib64", "proc", "sbin", "usr")]
    shared = [each for each in programs if each.exists()]
    commands = ["make demo", "make test ARGS=\"tests/wire -k 'this or that'\""]
    made = pythons.made_in(tmp_path, shared, commands)
    output = capfd.readouterr().out.splitlines()
    assert [line for line in output if not line.startswith("make[")] == [
        *("demo", "of its own", "Makefile", "tests/wire", "-k", "this or that")
    ]
    assert made == (code == 0)
    assert not list((tmp_path / "usr").iterdir())  # the mounts are gone


def test_classifiers_workflow_and_command_name_the_same_versions() -> None:
    versions = [f"3.{minor}" for minor in range(pythons.OLDEST[1], pythons.NEWEST[1] + 1)]
    listed = (pythons.ROOT / "pyproject.toml").read_text().split('"')
    assert [each.rpartition(" ")[2] for each in listed if "Python :: 3." in each] == versions
    assert any("Free Threading" in each for each in listed)
    workflow = (pythons.ROOT / ".github" / "workflows" / "tests.yml").read_text()
    quoted = ", ".join(f'"{each}"' for each in versions)
    assert f'python: [{quoted}, "{versions[-1]}t"]' in workflow
