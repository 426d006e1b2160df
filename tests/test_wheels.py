"""The published files of sdist and wheel, and the report that a build is compiled."""

from __future__ import annotations

import ast
import builtins
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from email import policy
from email.message import Message
from email.parser import BytesParser
from pathlib import Path

import pytest

import trio_smc
import trio_smc.datapath.sender
from scripts import wheels
from scripts.compiled_build import NATIVE, VARIABLE
from scripts.pythons import ROOT

BINARY = {".pcap", ".pcapng", ".xz"}


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: str) -> dict[str, list[str]]:
    """The names in the sdist (".gz") and in the wheel (".whl"), built without a network.

    ``native``: the value of TRIO_SMC_NATIVE.
    """
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv(NATIVE, native)
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    return {each.suffix: wheels.contents(each) for each in tmp_path.iterdir()}


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Message:
    """That of a wheel, as a package index reads it."""
    directory = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    environment = {**os.environ, NATIVE: "0", VARIABLE: "0"}
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, env=environment)
    [made] = directory.iterdir()
    with zipfile.ZipFile(made) as wheel:
        [name] = [each for each in wheel.namelist() if each.endswith(".dist-info/METADATA")]
        return BytesParser(policy=policy.compat32).parsebytes(wheel.read(name))


def test_links_of_the_description_work_on_a_package_index(metadata: Message) -> None:
    """Each link to a file is absolute, and leads to a file of the repository."""
    text = str(metadata.get_payload())
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert [link for link in links if not link.startswith("https://")] == []
    base = f"{wheels.repository()}/blob/v{wheels.version()}/"
    ours = [link.removeprefix(base).partition("#")[0] for link in links if link.startswith(base)]
    assert len(ours) > 20
    assert [path for path in ours if not (ROOT / path).is_file()] == []
    relative = re.findall(r"\]\((?!https:)([^)#\s]+)", (ROOT / "README.md").read_text())
    assert sorted(ours) == sorted(relative)
    assert metadata["Description-Content-Type"] == "text/markdown"


def test_the_links_of_the_project_are_below_the_repository(metadata: Message) -> None:
    addresses = [each.partition(", ")[2] for each in metadata.get_all("Project-URL", [])]
    assert wheels.repository() in addresses
    assert len(addresses) == 5
    report = f"{wheels.repository()}/security/advisories/new"  # SECURITY.md names this link
    assert f"Report a vulnerability, {report}" in metadata.get_all("Project-URL", [])
    files = [address for address in addresses if address not in (wheels.repository(), report)]
    base = f"{wheels.repository()}/blob/v{wheels.version()}/"
    assert all((ROOT / address.removeprefix(base)).is_file() for address in files)


def test_a_release_needs_an_address(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for address, code in (
        ("https://repository.invalid/trio_smc", 1),
        ("https://git.example/invalid/trio_smc", 0),
    ):
        monkeypatch.setattr(wheels, "repository", lambda: address)  # noqa: B023 - called below
        assert wheels.main(["--address"]) == code
        assert capsys.readouterr().out == f"{address}\n"


def test_only_one_place_has_the_address_of_the_repository() -> None:
    """The publisher sets it there; no other file has it, or a placeholder for it."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    address = wheels.repository().removeprefix("https://")
    # This expression is the second place.
    placeholder = re.compile(
        r"repository\.invalid|\b(?:github|gitlab)\.com/(?:OWNER|USER|ORG|example|trio-smc|trio_smc)\b"
        r"|<(?:owner|organisation|organization|repository)>|\byour-(?:org|name|user)\b|/OWNER/"
    )
    paths = [ROOT / name for name in names.split("\n") if name]
    texts = [path for path in paths if path.is_file() and path.suffix not in BINARY]
    places = [
        str(path.relative_to(ROOT))
        for path in texts
        for line in path.read_text(encoding="utf-8").splitlines()
        if address in line or placeholder.search(line)
    ]
    assert set(places) == {"pyproject.toml", "tests/test_wheels.py"}
    assert places.count("pyproject.toml") == 1


@pytest.mark.parametrize("native", ["0", "1"])
def test_sdist_and_wheel_hold_the_right_files(made: dict[str, list[str]], native: str) -> None:
    assert wheels.strays(made[".gz"] + made[".whl"]) == []
    assert ("trio_smc/rnic/_words.abi3.so" in made[".whl"]) == (native == "1")
    assert "trio_smc/rnic/_words.c" in made[".gz"]
    sources = {str(each.relative_to(ROOT)) for each in ROOT.glob("trio_smc/**/*.py")}
    assert sources | {"trio_smc/py.typed"} <= set(made[".whl"])
    assert sources | {"README.md", "CHANGELOG.md", "scripts/compiled_build.py"} <= set(made[".gz"])


def test_mypyc_finds_the_types_of_named_tuples() -> None:
    """It looks for others in the module; then the compiled module cannot be imported."""
    pytest.importorskip("mypyc.irbuild.main")  # has the types registered
    from mypyc.primitives.registry import builtin_names

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    hook = project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]
    unknown = [
        f"{module}: {each.name}.{field.target.id}: {field.annotation.id}"
        for module in hook["modules"]
        for each in ast.walk(ast.parse((ROOT / module).read_text()))
        if isinstance(each, ast.ClassDef) and "NamedTuple" in map(ast.unparse, each.bases)
        for field in each.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(field.annotation, ast.Name) and hasattr(builtins, field.annotation.id)
        if f"builtins.{field.annotation.id}" not in builtin_names
    ]
    assert unknown == []


def test_a_stray_file_is_noticed() -> None:
    names = [
        "trio_smc/rnic/_words.abi3.so",
        "trio_smc/wire/cdc.py",
        "trio_smc/wire/cdc.cpython-311-x86_64-linux-gnu.so",
        "trio_smc__mypyc.cpython-311-x86_64-linux-gnu.so",
        f"trio_smc-{wheels.version()}.dist-info/METADATA",
    ]
    stray = [
        "trio_smc/wire/cdc.c",
        "trio_smc/rnic/words.c",
        "build/trio_smc__mypyc.so",
        "trio_smc/nothing.cpython-311.so",
    ]
    assert wheels.strays(names + stray) == sorted(stray)


def test_directories_in_a_wheel_are_no_files(tmp_path: Path) -> None:
    made = tmp_path / "trio_smc-0-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        archive.mkdir("trio_smc/wire")
        archive.writestr("trio_smc/wire/cdc.py", "")
    assert wheels.contents(made) == ["trio_smc/wire/cdc.py"]


def test_the_version_is_the_same_everywhere() -> None:
    assert trio_smc.__version__ == wheels.version()
    [newest, *_] = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    release, is_development, _ = wheels.version().partition(".dev")
    # The tree of a release has a date, and no other tree has the version of a release.
    assert re.fullmatch(
        rf"{re.escape(release)} \({'unreleased' if is_development else '20..-..-..'}\)", newest
    )


def test_the_command_prints_which_build_it_is() -> None:
    command = [sys.executable, "-m", "trio_smc.tools", "--version"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kind = "compiled" if Path(trio_smc.datapath.sender.__file__).suffix == ".so" else "pure"
    assert output == f"trio-smc {trio_smc.__version__} ({kind}, {trio_smc.SoftRnic.variant})\n"
