"""Guests with larger pages: their kernels, and how they report (`scripts.page_sizes`)."""

from __future__ import annotations

import os
import shlex
import subprocess
import tarfile
from pathlib import Path

import pytest

from scripts import page_sizes
from scripts.pythons import ROOT

QEMU = "qemu-system-aarch64"
# Stands in for the guest: it runs what /guest-init runs, without the mounts.
GUEST = """#!/bin/sh
echo "$@" > {root}/words
sed -n '/^sh -c/,$p' {root}/guest-init | sed 's,cd /work,cd {root},; s,/dev/console,{root}/console,;
    s,> /guest-status,> {root}/guest-status,' | sh
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root directory without files."""
    made = tmp_path / "root"
    made.mkdir()
    return made


def pretend_qemu(root: Path, monkeypatch: pytest.MonkeyPatch, script: str = GUEST) -> None:
    """Put a program into the path that does what a guest with this root directory does."""
    programs = root.parent / "bin"
    programs.mkdir()
    (programs / QEMU).write_text(script.format(root=root))
    (programs / QEMU).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)


@pytest.mark.parametrize(("line", "code"), [("true", 0), ("exit 3", 3), ("false", 1)])
def test_the_exit_code_is_that_of_the_guest(
    root: Path, monkeypatch: pytest.MonkeyPatch, line: str, code: int
) -> None:
    pretend_qemu(root, monkeypatch)
    assert page_sizes.guest(Path("Image"), root, ["echo 'it began'", line, "echo later"]) == code
    printed = (root / "console").read_text()
    assert printed == ("it began\nlater\n" if code == 0 else "it began\n")
    words = (root / "words").read_text()
    assert f"path={root}" in words
    assert "init=/guest-init" in words


def test_a_guest_that_never_ends_fails(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if an earlier guest has passed."""
    (root / page_sizes.STATUS).write_text("0\n")
    pretend_qemu(root, monkeypatch, script="#!/bin/sh\nexec sleep 100\n")
    monkeypatch.setattr(page_sizes, "TIME", 0.3)
    assert page_sizes.guest(Path("Image"), root, ["true"]) == 1
    assert "the guest has not ended" in capsys.readouterr().out


def test_without_qemu_the_package_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(root))
    with pytest.raises(page_sizes.Failed, match="qemu-system-arm"):
        page_sizes.guest(Path("Image"), root, ["true"])


@pytest.mark.parametrize("size", page_sizes.SIZES)
def test_a_guest_checks_its_page_size_first(size: int) -> None:
    """A kernel with other pages fails, and each variant runs the demo and the tests."""
    lines = page_sizes.commands(size, ["tests/wire", "-k", "a b"])
    checks = [line for line in lines if "PAGESIZE" in line]
    [check] = checks
    for shown in (size << 10, 4096):
        script = check.replace("$(getconf PAGESIZE)", str(shown))
        done = subprocess.run(["sh", "-c", script], check=False)
        assert done.returncode == (0 if shown == size << 10 else 1)
    rest = lines[lines.index(check) + 1 :]
    assert [line for line in rest if line.startswith("export")] == [
        "export TRIO_SMC_WORDS=native",
        "export TRIO_SMC_WORDS=socket",
    ]
    assert sum(line.startswith("make demo") for line in rest) == 2
    tests = [line for line in rest if "pytest" in line]
    assert [shlex.split(line)[-3:] for line in tests] == [["tests/wire", "-k", "a b"]] * 2


def test_the_tests_of_larger_pages_are_files() -> None:
    assert all((ROOT / each).is_file() for each in page_sizes.TESTS)


@pytest.mark.parametrize("missing", ["", "EPOLL"])
def test_a_kernel_is_built_once_and_has_all_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """It is built again if the wanted options change."""
    sources, place = tmp_path / "src", tmp_path / "place"
    sources.mkdir()
    pretend_sources(sources, missing)
    monkeypatch.setattr(page_sizes, "SOURCES", sources)
    monkeypatch.setattr(page_sizes, "PLACE", place)
    if missing:
        with pytest.raises(page_sizes.Failed, match="CONFIG_EPOLL=y"):
            page_sizes.built_kernel(64)
        return
    image = page_sizes.built_kernel(64)
    assert image.read_text() == "1\n"
    page_sizes.built_kernel(64)
    assert image.read_text() == "1\n"
    monkeypatch.setattr(page_sizes, "OPTIONS", f"{page_sizes.OPTIONS} FANOTIFY")
    page_sizes.built_kernel(64)
    assert image.read_text() == "1\n1\n"
    assert "CONFIG_ARM64_64K_PAGES=y" in (place / "64k" / ".config").read_text()


def test_without_sources_the_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_sizes, "SOURCES", tmp_path)
    with pytest.raises(page_sizes.Failed, match="linux-source"):
        page_sizes.built_kernel(16)


def pretend_sources(directory: Path, missing: str) -> None:
    """An archive like Debian's, whose kernel has every option but one; "" for none."""
    tree = directory / "linux-source-6.1"
    scripts = tree / "scripts" / "kconfig"
    scripts.mkdir(parents=True)
    (tree / "Makefile").write_text(
        "tinyconfig:\n\techo '# CONFIG_SMP is not set' > $(O)/.config\n"
        "olddefconfig:\n\t@true\n"
        "Image:\n\tmkdir -p $(O)/arch/arm64/boot\n\techo 1 >> $(O)/arch/arm64/boot/Image\n"
    )
    merge = scripts / "merge_config.sh"
    pattern = f"CONFIG_{missing}=" if missing else "^$"
    merge.write_text(f'#!/bin/sh\ngrep -v "{pattern}" "$5" >> "$4"\n')
    merge.chmod(0o755)
    with tarfile.open(directory / "linux-source-6.1.tar.xz", "w:xz") as archive:
        archive.add(tree, arcname="linux-source-6.1")
