"""Run tests on ARM64 kernels whose pages have 16 and 64 KiB, in emulated guests.

    python3 -m scripts.page_sizes [--size KIB ...] [--share PATH ...] [TESTS ...]

A guest sees the root directory of `scripts.pythons --arch arm64`, which is made on first use, and
boots a small kernel from Debian's package of its source.  There the demo runs, and TESTS (default:
those of `tests/rnic/test_page_sizes.py`), with the native module and over sockets (docs/rnic.md).
The exit code is 1 if anything failed.

It needs root and Debian's packages bc, bison, debootstrap, binfmt-support, flex,
gcc-aarch64-linux-gnu, linux-source, qemu-system-arm and qemu-user-static.  The first kernel takes
ten minutes of processor time, the guest with the default tests another ten.  Emulation does not
show what another order of memory accesses would break.  Standard library only.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from scripts.pythons import (
    DEBIAN_13,
    EMULATED_DEMO,
    EMULATED_SETTINGS,
    PROCESSORS,
    ROOT,
    SHARED,
    VARIANTS,
    debian_root,
    made_in,
)

TESTS: Final = (
    "tests/rnic/test_soft.py",
    "tests/rnic/test_memory_rnic.py",
    "tests/datapath/test_connection_data.py",
)
"""Tests of code that maps, aligns or clears memory."""
SIZES: Final = (16, 64)
ARCH: Final = "arm64"
PLACE: Final = ROOT / "build" / "page-sizes"
SOURCES: Final = Path("/usr/src")
TIME: Final = 3600.0
"""Seconds for a guest."""
STATUS: Final = "guest-status"
"""A file in the root directory: the exit code of the guest's commands."""
INIT: Final = "guest-init"
# On top of `make tinyconfig`: what Python, the software RNIC and the tests need, with the files of
# this machine over 9p and no module.
OPTIONS: Final = """
64BIT SMP PREEMPT HIGH_RES_TIMERS NO_HZ_IDLE POSIX_TIMERS MULTIUSER SYSVIPC POSIX_MQUEUE FUTEX EPOLL
SIGNALFD TIMERFD EVENTFD SHMEM AIO ADVISE_SYSCALLS MEMBARRIER RSEQ BUG PRINTK SYSCTL BINFMT_ELF
BINFMT_SCRIPT NAMESPACES UTS_NS IPC_NS USER_NS PID_NS NET_NS CGROUPS CGROUP_BPF BPF_SYSCALL SECCOMP
PCI PCI_HOST_GENERIC DEVTMPFS TTY UNIX98_PTYS SERIAL_AMBA_PL011 SERIAL_AMBA_PL011_CONSOLE RTC_CLASS
RTC_DRV_PL031 VIRTIO_MENU VIRTIO_PCI HW_RANDOM HW_RANDOM_VIRTIO PROC_FS SYSFS TMPFS TMPFS_POSIX_ACL
TMPFS_XATTR INOTIFY_USER FILE_LOCKING NETWORK_FILESYSTEMS NET NET_9P NET_9P_VIRTIO 9P_FS
9P_FS_POSIX_ACL PACKET UNIX UNIX_DIAG INET INET_DIAG IPV6
"""
_MOUNTS: Final = """
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
for place in /dev/shm /run /tmp; do mount -t tmpfs -o mode=1777 tmpfs $place; done
ip link set lo up
"""


class Failed(Exception):
    """A command failed; the text says which one."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 if everything passed with every size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--size",
        dest="sizes",
        metavar="KIB",
        action="append",
        type=int,
        choices=SIZES,
        help=f"KiB of a page; default: {' and '.join(map(str, SIZES))}",
    )
    parser.add_argument(
        "--share", metavar="PATH", action="append", type=Path, default=[],
        help="a path of this machine that is visible while the root directory is prepared",
    )  # fmt: skip
    parser.add_argument("tests", nargs="*", help="for pytest")
    options = parser.parse_args(arguments)
    try:
        root = debian_root(DEBIAN_13, ARCH)
        if root is None or not made_in(root, [*SHARED, *options.share], prepared()):
            raise Failed(f"no root directory for {ARCH}")
        codes = {
            size: guest(built_kernel(size), root, commands(size, options.tests or TESTS))
            for size in options.sizes or SIZES
        }
    except Failed as problem:
        print(problem)
        return 1
    print("\n=== summary")
    for size, code in codes.items():
        print(f"pages of {size} KiB: {'FAILED' if code else 'passed'}")
    return 1 if any(codes.values()) else 0


def prepared() -> list[str]:
    """Shell commands that need a network, which a guest does not have."""
    return [*_settings(), "make ready-docs"]


def commands(size: int, tests: Sequence[str]) -> list[str]:
    """Shell commands for a guest whose pages have ``size`` KiB."""
    pytest = f".venv/bin/python -m pytest -q -p no:cacheprovider {shlex.join(tests)}"
    lines = [*_settings(), f'test "$(getconf PAGESIZE)" = {size << 10}']
    for variant in VARIANTS:
        title = f"pages of {size} KiB, {variant}"
        lines += [f"export TRIO_SMC_WORDS={variant}", f"echo '--- {title}'", EMULATED_DEMO, pytest]
    return lines


def _settings() -> list[str]:
    return [f"export {name}={value}" for name, value in EMULATED_SETTINGS.items()]


def built_kernel(size: int) -> Path:
    """The image of a kernel whose pages have ``size`` KiB, built unless it is there.

    Raises Failed.
    """
    archives = sorted(SOURCES.glob("linux-source-*.tar.xz"))
    if not archives:
        raise Failed("needed: Debian's package linux-source")
    tree, made = PLACE / "source", PLACE / f"{size}k"
    image = made / "arch" / ARCH / "boot" / "Image"
    options = [f"ARM64_{size}K_PAGES", *OPTIONS.split()]
    wanted = "".join(f"CONFIG_{option}=y\n" for option in options)
    kept = made / "wanted"
    if image.exists() and kept.exists() and kept.read_text() == wanted:
        return image
    if not (tree / "Makefile").exists():
        shutil.rmtree(tree, ignore_errors=True)
        tree.mkdir(parents=True)
        _run("tar", "xf", archives[-1], "-C", tree, "--strip-components=1")
    made.mkdir(exist_ok=True)
    fragment = made / "fragment"
    fragment.write_text(wanted)
    print(f"building {archives[-1].name} with pages of {size} KiB", flush=True)
    make: list[str | Path] = ["make", "-s", "-C", tree, f"O={made}", f"ARCH={ARCH}"]
    make.append("CROSS_COMPILE=aarch64-linux-gnu-")
    _run(*make, "tinyconfig")
    config = made / ".config"
    merge = tree / "scripts" / "kconfig" / "merge_config.sh"
    _run(merge, "-m", "-O", made, config, fragment, cwd=made)
    _run(*make, "olddefconfig")
    taken = config.read_text().splitlines()
    missing = [line for line in wanted.splitlines() if line not in taken]
    if missing:
        raise Failed(f"this kernel does not have {' '.join(missing)}")
    _run(*make, f"-j{os.cpu_count()}", "Image")
    kept.write_text(wanted)
    return image


def guest(kernel: Path, root: Path, lines: Sequence[str]) -> int:
    """Run shell commands in /work of a guest, up to the first that fails; return its exit code."""
    status, init = root / STATUS, root / INIT
    status.unlink(missing_ok=True)
    script = " && ".join(["cd /work", *lines])
    init.write_text(
        "#!/bin/sh\nexport PATH=/usr/sbin:/usr/bin HOME=/root TERM=dumb"
        f"{_MOUNTS}sh -c {shlex.quote(script)} < /dev/null > /dev/console 2>&1\n"
        f"echo $? > /{STATUS}\nsync\n"
    )
    init.chmod(0o755)
    boot = (
        "console=ttyAMA0 loglevel=0 panic=-1 root=root rootfstype=9p rw init=/" + INIT,
        "rootflags=trans=virtio,version=9p2000.L,msize=512000,cache=loose",
    )
    # The kernel panics without a word when its first process ends, and QEMU ends at the reboot.
    machine = ["-machine", "virt", "-cpu", PROCESSORS[ARCH], "-smp", "2", "-m", "2048"]
    files = ["-fsdev", f"local,id=root,path={root},security_model=none,multidevs=remap"]
    files += ["-device", "virtio-9p-pci,fsdev=root,mount_tag=root", "-device", "virtio-rng-pci"]
    command = ["qemu-system-aarch64", *machine, "-nographic", "-no-reboot", "-nic", "none", *files]
    try:
        subprocess.run(
            [*command, "-kernel", kernel, "-append", " ".join(boot)],
            stdin=subprocess.DEVNULL, timeout=TIME, check=False,
        )  # fmt: skip
    except FileNotFoundError as missing:
        raise Failed("needed: Debian's package qemu-system-arm") from missing
    except subprocess.TimeoutExpired:
        print(f"the guest has not ended in {TIME:.0f} s")
    return int(status.read_text()) if status.exists() else 1


def _run(*command: str | Path, cwd: Path | None = None) -> None:
    """Raise Failed if the command fails."""
    try:
        done = subprocess.run(
            command, cwd=cwd, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except OSError as problem:
        raise Failed(str(problem)) from problem
    if done.returncode:
        output = done.stdout.decode(errors="replace")
        raise Failed(f"this failed: {shlex.join(map(str, command))}\n{output[-3000:]}")


if __name__ == "__main__":
    sys.exit(main())
