"""A type checker finds a misspelled mode, and all public names have types."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
COMPARISONS = Path(__file__).with_name("comparisons.py").read_text()
COMPLETE = 0.95

pytestmark = pytest.mark.timeout(300)  # a type checker takes long on a busy machine


def site_packages() -> list[str]:
    """The directory of this interpreter's installed packages."""
    return [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]


def pyright(place: Path, *arguments: str) -> Any:
    """Run pyright in strict mode for this interpreter and this tree; returns its output."""
    settings = {"typeCheckingMode": "strict", "extraPaths": [str(ROOT)], "pythonVersion": "3.11"}
    (place / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--outputjson"]
    done = subprocess.run(
        [*command, "--pythonpath", sys.executable, *arguments],
        cwd=place,
        # Without this path, pyright does not find an editable installation and its dependencies.
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), *site_packages()))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def errors(place: Path, text: str) -> list[str]:
    """Check a program; returns the violated rules with line numbers."""
    (place / "program.py").write_text(text)
    found = pyright(place)["generalDiagnostics"]
    return [
        f"{each['range']['start']['line']} {each['rule']}"
        for each in found
        if each["severity"] == "error"
    ]


def test_a_misspelled_mode_is_an_error(tmp_path: Path) -> None:
    assert errors(tmp_path, COMPARISONS) == []
    wrong = COMPARISONS.replace('"smc-r"', '"smcr"')
    [line] = [at for at, text in enumerate(wrong.splitlines()) if '"smcr"' in text]
    assert errors(tmp_path, wrong) == [f"{line} reportUnnecessaryComparison"]


def test_every_public_name_has_a_type(tmp_path: Path) -> None:
    """pyright checks all names that `trio_smc` exports."""
    report = pyright(tmp_path, "--verifytypes", "trio_smc", "--ignoreexternal")["typeCompleteness"]
    unclear = [
        each["name"]
        for each in report["symbols"]
        if not each["isTypeKnown"] or each["isTypeAmbiguous"]
    ]
    assert report["exportedSymbolCounts"]["withKnownType"] > 1000
    assert report["completenessScore"] >= COMPLETE, unclear
