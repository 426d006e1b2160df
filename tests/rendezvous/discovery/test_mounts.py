"""Mount points that another user has named, and paths that another user can change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import trio_smc
from tests.timing import PATIENCE
from trio_smc.config.config import DEFAULT_PINS
from trio_smc.rendezvous.discovery import bpf, option_setup
from trio_smc.rendezvous.discovery.tcp_option import mounts, own_cgroup

OTHER_USER = 65534
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="makes files of another user")

REPORT_MOUNTS = """
import json, os, subprocess, sys
from pathlib import Path
from trio_smc.rendezvous.discovery.option_setup import mounted_type
from trio_smc.rendezvous.discovery.tcp_option import mounts, own_cgroup
place = os.fsdecode(bytes.fromhex(sys.argv[1]))
os.makedirs(place)
subprocess.run(["mount", "-t", "tmpfs", "none", place], check=True)
try:
    cgroup = str(own_cgroup(root=True))
except FileNotFoundError:
    cgroup = ""
seen = [each.kind for each in mounts() if each.point == Path(place)]
print(json.dumps([seen, mounted_type(Path("/"), exactly=True), cgroup]))
"""


@pytest.mark.parametrize(
    "name",
    [
        "a\rb",
        "a\r1 2 3 / / rw - cgroup2 x y",
        "a\r1\v2\v3\v/\v/\vrw",
        "a\u2028b\x85c\xa0d",
        "tab\t, line\n, blank and \\040",
    ],
)
def test_a_path_that_looks_like_another_line(tmp_path: Path, name: str) -> None:
    alone = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces here")
    place = tmp_path / name.replace("/", "|")
    done = subprocess.run(
        [*alone, sys.executable, "-c", REPORT_MOUNTS, os.fsencode(place).hex()],
        capture_output=True, text=True, check=False, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    try:
        cgroup = str(own_cgroup(root=True))
    except FileNotFoundError:
        cgroup = ""
    root = [each.kind for each in mounts() if each.point == Path("/")][-1]
    assert json.loads(done.stdout) == [["tmpfs"], root, cgroup]


# --- where root pins ---------------------------------------------------------------------------


@pytest.fixture
def theirs() -> Iterator[Path]:
    """A directory of another user."""
    with tempfile.TemporaryDirectory(prefix="smc-") as directory:
        os.chown(directory, OTHER_USER, OTHER_USER)
        yield Path(directory)


@pytest.fixture
def mounted(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The paths at which the tested code tried to mount a file system."""
    found: list[Path] = []
    monkeypatch.setattr(bpf, "mount_bpffs", found.append)
    return found


@root_only
@pytest.mark.parametrize("kind", ["below", "link", "directory", "link to theirs"])
def test_root_pins_nowhere_that_another_user_could_replace(
    theirs: Path, mounted: list[Path], tmp_path: Path, kind: str
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    pins = theirs / "pins"
    if kind == "link":
        pins.symlink_to(target)
        os.chown(pins, OTHER_USER, OTHER_USER, follow_symlinks=False)
    elif kind == "directory":
        pins.mkdir()
        os.chown(pins, OTHER_USER, OTHER_USER)
    elif kind == "link to theirs":
        pins = tmp_path / "pins"
        pins.symlink_to(theirs)
    name = theirs / "sockets_1"
    name.touch()
    (target / "sockets_1").touch()
    for call in (trio_smc.set_up_tcp_option, trio_smc.tear_down_tcp_option):
        with pytest.raises(PermissionError, match=r"is not safe: .* another user"):
            call(pins=pins)
    assert mounted == []
    assert name.exists()
    assert (target / "sockets_1").exists()


@root_only
def test_a_directory_that_another_user_makes_first(
    mounted: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other user acts between the check of the path and `mkdir`, in a directory like /tmp."""
    with tempfile.TemporaryDirectory(prefix="smc-") as directory:
        os.chmod(directory, 0o1777)
        pins = Path(directory, "pins")
        check = option_setup.check_path

        def overtaken(path: Path) -> None:
            check(path)
            if not pins.exists():
                pins.mkdir()
                os.chown(pins, OTHER_USER, OTHER_USER)

        monkeypatch.setattr(option_setup, "check_path", overtaken)
        with pytest.raises(PermissionError, match="is not safe"):
            option_setup.make_directory(pins)
    assert mounted == []


@root_only
def test_the_default_place_is_safe() -> None:
    option_setup.check_path(DEFAULT_PINS)
