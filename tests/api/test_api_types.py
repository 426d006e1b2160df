"""What a type checker tells users: a mode misspelled is found, and the public names have types."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import trio_smc

ROOT = Path(__file__).parents[2]
COMPARISONS = Path(__file__).with_name("comparisons.py").read_text()
COMPLETE = 0.95

pytestmark = pytest.mark.timeout(300)  # a type checker, on a busy machine


def pyright(place: Path, *arguments: str) -> Any:
    """What pyright says, on this interpreter and this tree; strict."""
    settings = {"typeCheckingMode": "strict", "extraPaths": [str(ROOT)], "pythonVersion": "3.11"}
    (place / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--outputjson"]
    done = subprocess.run(
        [*command, "--pythonpath", sys.executable, *arguments],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(ROOT)},  # an editable installation it takes for none
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def errors(place: Path, text: str) -> list[str]:
    """The rules that a program breaks, with the line."""
    (place / "program.py").write_text(text)
    found = pyright(place)["generalDiagnostics"]
    return [
        f"{each['range']['start']['line']} {each['rule']}"
        for each in found
        if each["severity"] == "error"
    ]


def test_a_mode_that_there_is_not_is_an_error(tmp_path: Path) -> None:
    assert errors(tmp_path, COMPARISONS) == []
    wrong = COMPARISONS.replace('"smc-r"', '"smcr"')
    [line] = [at for at, text in enumerate(wrong.splitlines()) if '"smcr"' in text]
    assert errors(tmp_path, wrong) == [f"{line} reportUnnecessaryComparison"]


def declared(name: str) -> str:
    """Where a name that `trio_smc` exports is declared, as pyright writes it."""
    value = getattr(trio_smc, name)
    module, inside = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    # A function of a private module is known by the name under which it is exported.
    private = not inside or ("._" in str(module) and not isinstance(value, type))
    return f"trio_smc.{name}" if private else f"{module}.{inside}"


def test_public_names_have_types(tmp_path: Path) -> None:
    """Public is what `trio_smc` exports, with what its classes have; the rooms are not."""
    said = pyright(tmp_path, "--verifytypes", "trio_smc", "--ignoreexternal")["typeCompleteness"]
    public = {declared(name) for name in trio_smc.__all__}
    symbols = {
        each["name"]: each["isTypeKnown"]
        for each in said["symbols"]
        if any(f"{each['name']}.".startswith(f"{name}.") for name in public)
    }
    assert public <= symbols.keys()
    untyped = [name for name, known in symbols.items() if not known]
    assert len(untyped) <= (1 - COMPLETE) * len(symbols), untyped
