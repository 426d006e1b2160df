"""`make where`: the tests of a module are found, for every module."""

from __future__ import annotations

import pytest

from scripts import where

ROOT = where.ROOT


def listed(output: str) -> list[str]:
    return [line.split()[0] for line in output.splitlines()]


@pytest.mark.parametrize(
    ("module", "first"),
    [
        ("rnic/pump.py", "tests/rnic/test_pump.py"),
        ("wire/clc.py", "tests/wire/test_clc.py"),
        ("config/config.py", "tests/config/test_config.py"),
        ("failover/replay.py", "tests/failover/test_replay.py"),
    ],
)
def test_the_file_that_is_about_the_module_comes_first(
    module: str, first: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert where.main([f"trio_smc/{module}"]) == 0
    assert listed(capsys.readouterr().out)[0] == first


@pytest.mark.parametrize(
    ("module", "among"),
    [
        # Only a model of the connection imports it; the tests say `pair.b.messenger`.
        ("datapath/messenger.py", "tests/datapath/test_connection_data.py"),
        # No test imports or names it; `wire/llc.py` does.
        ("wire/layout.py", "tests/wire/test_llc.py"),
    ],
)
def test_tests_that_do_not_import_the_module(
    module: str, among: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert where.main([f"trio_smc/{module}"]) == 0
    assert among in listed(capsys.readouterr().out)


def test_a_long_list_is_cut_with_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    assert where.main(["trio_smc/wire/cdc.py"]) == 0
    shown, note = capsys.readouterr()
    assert where.main(["trio_smc/wire/cdc.py", "--all"]) == 0
    everything = capsys.readouterr().out
    assert listed(everything)[: len(listed(shown))] == listed(shown)
    left = len(listed(everything)) - len(listed(shown))
    assert left > 0
    assert note == f"trio_smc/wire/cdc.py: {left} more with --all\n"


def test_each_module_has_tests() -> None:
    imports = where.imports_of_the_tree()
    modules = [
        name
        for name, path in imports.files.items()
        if name.startswith("trio_smc.") and path.name not in ("__init__.py", "__main__.py")
    ]
    assert len(modules) > 100
    assert [name for name in modules if not where.ranked(name, imports)] == []


def test_every_file_that_is_listed_exists(capsys: pytest.CaptureFixture[str]) -> None:
    assert where.main(["trio_smc/config/file.py"]) == 0
    names = listed(capsys.readouterr().out)
    assert names
    assert all((ROOT / name).is_file() for name in names)


@pytest.mark.parametrize("path", ["trio_smc/nothing.py", "/etc/passwd", "tests/test_where.py"])
def test_a_path_that_is_no_module_is_an_error(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert where.main([path]) == where.FAILED
    assert f"{path}: no module of trio_smc" in capsys.readouterr().err
