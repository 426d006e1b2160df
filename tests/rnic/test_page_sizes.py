"""No code assumes pages of 4 KiB: selected tests also pass with pages of 16 and 64 KiB."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.page_sizes import TESTS
from scripts.pythons import ROOT

# A multiple of these sizes is also a multiple of this kernel's page size.
LARGER = """
import mmap, os
mmap.PAGESIZE = {size}
_fstatvfs = os.fstatvfs
class _Shown:
    def __init__(self, real):
        self._real = real
        self.f_bsize = {size} if real.f_bsize == {real} else real.f_bsize
    def __getattr__(self, name):
        return getattr(self._real, name)
os.fstatvfs = lambda fd: _Shown(_fstatvfs(fd))
"""


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [16 << 10, 64 << 10])
def test_larger_pages(tmp_path: Path, size: int) -> None:
    hook = LARGER.format(size=size, real=os.sysconf("SC_PAGE_SIZE"))
    (tmp_path / "sitecustomize.py").write_text(hook)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
