"""Files that captures and commands write: where they may be created, and what they never open."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

import trio_smc
from tests.streams.stream_pairs import smc_config
from trio_smc.capture.output_file import create, trust_directory

OTHER = 12345
"""A user that owns no other file."""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="makes files of another user")


def write(path: Path | str, data: bytes = b"new") -> None:
    """Create a file and write to it."""
    with os.fdopen(create(path), "wb") as file:
        file.write(data)


def number_of_refusal(path: Path | str) -> int | None:
    """The error number of a refusal to create a file."""
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the number is compared
        os.close(create(path))
    return caught.value.errno


def test_a_file_is_private_with_any_umask(tmp_path: Path) -> None:
    for mask in (0, 0o777):
        path, old = tmp_path / f"{mask:o}", os.umask(mask)
        try:
            write(path)
        finally:
            os.umask(old)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.read_bytes() == b"new"
    assert len(list(tmp_path.iterdir())) == 2, "a temporary file was left"


def test_a_file_of_this_user_is_replaced_and_not_opened(tmp_path: Path) -> None:
    """A process that has the old file open, or another name of it, never sees the new data."""
    path, other_name = tmp_path / "file", tmp_path / "other"
    path.write_bytes(b"old")
    path.chmod(0o644)
    os.link(path, other_name)
    with path.open("rb") as reader:
        write(path)
        assert reader.read() == b"old"
    assert other_name.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    fd = create(path)
    try:
        assert number_of_refusal(path) == errno.EBUSY
    finally:
        os.close(fd)
    write(path)


def test_names_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert number_of_refusal(tmp_path / "fifo") == errno.EINVAL
    os.unlink(tmp_path / "fifo")
    assert number_of_refusal("/dev/null") == errno.EINVAL
    for directory in (tmp_path, f"{tmp_path}/", f"{tmp_path}/..", "/"):
        assert number_of_refusal(directory) == errno.EISDIR
    assert number_of_refusal(tmp_path / "missing" / "file") == errno.ENOENT
    (tmp_path / "loop").symlink_to("loop")
    assert number_of_refusal(tmp_path / "loop") == errno.ELOOP


def test_links_of_this_user_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "near").symlink_to("far/away/../away")
    (tmp_path / "far" / "away" / "name").symlink_to(tmp_path / "target")
    monkeypatch.chdir(tmp_path / "far")
    write("../near/./name")
    assert (tmp_path / "target").read_bytes() == b"new"
    assert (tmp_path / "far" / "away" / "name").is_symlink()


def _link_of_another(path: Path) -> Path:
    path.parent.chmod(0o1777)
    path.symlink_to(path.parent / "target")
    os.chown(path, OTHER, OTHER, follow_symlinks=False)
    return path


def _link_of_another_on_the_way(path: Path) -> Path:
    (path.parent / "target").mkdir()
    return _link_of_another(path) / "file"


def _file_of_another(path: Path) -> Path:
    path.parent.chmod(0o1777)
    path.write_bytes(b"theirs")
    os.chown(path, OTHER, OTHER)
    return path


def _directory_for_all(path: Path) -> Path:
    path.parent.chmod(0o777)
    return path


def _directory_of_a_group(path: Path) -> Path:
    os.chown(path.parent, 0, OTHER)
    path.parent.chmod(0o770)
    return path


def _directory_of_another(path: Path) -> Path:
    os.chown(path.parent, OTHER, OTHER)
    path.parent.chmod(0o1700)
    return path


def _far_below_one_of_another(path: Path) -> Path:
    _directory_of_another(path)
    (path.parent / "inner").mkdir()
    return path.parent / "inner" / "file"


@needs_root
@pytest.mark.parametrize(
    "prepare",
    [
        _link_of_another, _link_of_another_on_the_way, _file_of_another, _directory_for_all,
        _directory_of_a_group, _directory_of_another, _far_below_one_of_another,
    ],
)  # fmt: skip
@pytest.mark.parametrize("writer", ["create", "Config", "capture", "ladder"])
def test_output_is_refused_where_another_user_could_replace_it(
    writer: str, prepare: Callable[[Path], Path], tmp_path: Path
) -> None:
    """Each option that names an output file: no file is written, and the message has the path."""
    (tmp_path / "theirs").mkdir()
    path = prepare(tmp_path / "theirs" / "file")
    before = sorted(tmp_path.rglob("*"))
    if writer == "create":
        assert number_of_refusal(path) == errno.EPERM
    else:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAMS[writer], path],
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
        assert done.returncode == 2, done
        assert str(path) in done.stderr
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "target").exists() is False
    if prepare is _file_of_another:
        assert path.read_bytes() == b"theirs"


PROGRAMS = {
    "Config": """
import sys, trio, trio_smc
async def main():
    try:
        async with trio_smc.open_stack(trio_smc.Config(capture=sys.argv[1])):
            pass
    except PermissionError as error:
        sys.exit([print(error, file=sys.stderr), 2][1])
trio.run(main)
""",
    "capture": """
import sys
from trio_smc.tools.commands import capture
from trio_smc.tools.output import ToolError
import argparse
capture.stream_capture = lambda *_: (each for each in [b"first"])
try:
    capture.run(argparse.Namespace(output=sys.argv[1], pid=1, stack=None, payload=0, seconds=None,
                                   directory=None))
except ToolError as error:
    sys.exit([print(error, file=sys.stderr), 2][1])
""",
    "ladder": """
import sys
from trio_smc.tools.commands import ladder
from trio_smc.tools.output import ToolError
try:
    ladder.write("<svg/>", sys.argv[1])
except ToolError as error:
    sys.exit([print(error, file=sys.stderr), 2][1])
""",
}


def test_a_capture_takes_the_place_of_a_public_file(tmp_path: Path) -> None:
    """`Config(capture=...)` uses the same rules."""
    path = tmp_path / "capture.pcapng"
    path.write_bytes(b"old")
    path.chmod(0o666)

    async def main() -> None:
        async with trio_smc.open_stack(smc_config(capture=path)):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600

    trio.run(main)
    assert path.read_bytes()[:4] == b"\x0a\x0d\x0d\x0a"


@needs_root
def test_a_file_that_root_prepared_for_a_user(tmp_path: Path) -> None:
    """The user cannot create files in that directory, so the file itself is written, mode 0600."""
    outer = Path("/run") / f"trio-smc-test-{os.getpid()}"
    outer.mkdir(mode=0o755)
    path = outer / "file"
    try:
        path.write_bytes(b"old")
        os.chown(path, OTHER, OTHER)
        subprocess.run(
            [sys.executable, "-c", AS_OTHER, path, str(OTHER)], check=True, timeout=30
        )  # fmt: skip
        assert path.read_bytes() == b"new"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        path.unlink(missing_ok=True)
        outer.rmdir()


AS_OTHER = """
import os, sys
from trio_smc.capture.output_file import create
os.setgroups([]); os.setresgid(*[int(sys.argv[2])] * 3); os.setresuid(*[int(sys.argv[2])] * 3)
os.write(create(sys.argv[1]), b"new")
"""


def test_directories(tmp_path: Path) -> None:
    trust_directory(tmp_path)
    trust_directory("/tmp")
    with pytest.raises(FileNotFoundError):
        trust_directory(tmp_path / "missing")
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError):
        trust_directory(tmp_path)
