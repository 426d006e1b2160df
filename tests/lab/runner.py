"""The programs of the lab's guests: one function for each pair of programs.

By hand: ``python -m tests.lab.runner verbs [SEED]``, ``contract [SEED [ROOT]]`` (its first part),
``streams``, ``ours``, ``hostile``, ``overcommit [STEP]``, ``speed [profile]``, ``ways``,
``loopback``, ``conform ours|kernel server|client 1|2 PART|CHECK,... [OPTION...]`` or
``kernel SUITE [STEP...]``; the last three also with another kernel of `tests.lab.setup`:
``--kernel 6.17 kernel v2``, ``--kernel DIRECTORY loopback``.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.machines import this_machine
from examples import demo
from tests.lab.machine import ARTEFACTS, Finished, run_guest, run_pair
from tests.lab.routing import second_interface
from tests.lab.setup import DEFAULT, KERNELS, STOCK

__all__ = [
    "CONFORM_TIME", "PARTS", "SHARE", "conform", "contract", "hostile", "loopback", "ours",
    "overcommit", "parts_of", "reports_of", "speed", "streams", "verbs", "ways", "with_kernel",
]  # fmt: skip

PYTHON = "/usr/bin/python3"
"""Debian's, for which python3-pyverbs is built."""


def verbs(seed: int) -> Finished:
    """All steps of `tests.lab.guest_verbs`, then those of a dying peer (status 128 + SIGKILL)."""
    program = f"{PYTHON} -m tests.lab.guest_verbs"
    commands = (
        "rxe 0 eth0\n"
        f"{program} $ROLE $PEER4 rxe0 {seed} || exit 1\n"
        f"{program} $ROLE $PEER4 rxe0 {seed} die; rc=$?\n"
        "[ $ROLE = server ] && [ $rc = 137 ] && rc=0\n"
        "exit $rc\n"
    )
    return run_pair("verbs", commands, seconds=400)


def contract(seed: int, root: Path | None = None) -> Finished:
    """By pytest in one guest: `tests.lab.guest_contract`, `guest_addresses` and `guest_ports`.

    ``root``: the root directory of another Debian, with python3-pyverbs and ibverbs-providers,
    whose Python, pyverbs and providers are used; `scripts.pythons` makes it, with this tree in it.
    """
    python = PYTHON
    elsewhere = ""
    if root is not None:
        elsewhere = (
            f"root={shlex.quote(str(root))}\n"
            "mount --bind $root $root; cd $root\n"  # ip wants / to be a mount
            "for each in dev sys proc run lab; do\n"
            "    mkdir -p $each; mount --rbind /$each $each\n"
            "done\n"
            "mount -t tmpfs none tmp\n"
            "export PYTHONPATH=/work:/usr/lib/python3/dist-packages\n"
        )
        python = "chroot . env -C /work .venv/bin/python"
    commands = (
        "modules dummy macvlan bonding garp mrp 8021q\n"
        "sysctl -q -w net.ipv4.conf.all.accept_local=1 net.ipv4.conf.all.arp_ignore=1"
        " net.ipv4.conf.all.arp_announce=2\n"
        "ip link add dummy0 type dummy; ip link set dummy0 up\n"
        "for n in 0 1; do\n"
        "    ip link add link dummy0 name mac$n type macvlan mode bridge\n"
        "    ip link set mac$n up; ip addr add 10.8.0.$((n + 1))/24 dev mac$n; rxe $n mac$n\n"
        "done\n"
        f"{elsewhere}exec {python} -m pytest -v -rfE --durations=9 --color=no --tb=short"
        f" --timeout=240 -p no:cacheprovider -p no:xdist --junitxml=/lab/results --seed {seed}"
        " tests/lab/guest_contract.py"
        " tests/lab/guest_addresses.py tests/lab/guest_ports.py\n"
    )
    return run_guest("contract", commands, seconds=500)


def streams() -> Finished:
    """All steps of `tests.lab.guest_streams`."""
    commands = (
        "modules garp mrp 8021q bonding\n"
        "rxe 0 eth0\n"
        f"exec {PYTHON} -m tests.lab.guest_streams $ROLE $PEER4\n"
    )
    return run_pair("streams", commands, seconds=400)


def ours() -> Finished:
    """All steps of `tests.lab.guest_ours`."""
    commands = (
        "modules dummy macvlan; rxe 0 eth0; rxe 1 eth1\n"
        "[ $ROLE = server ] && control=10.9.2.2 || control=10.9.2.1\n"
        f"exec {PYTHON} -m tests.lab.guest_ours $ROLE $PEER4 $control "
        f"{shlex.quote(str(demo_file()))}\n"
    )
    return run_pair("ours", commands, seconds=600)


def hostile() -> Finished:
    """All lies of `tests.lab.liar` to a server of trio_smc."""
    commands = f"rxe 0 eth0\nexec {PYTHON} -m tests.lab.guest_hostile $ROLE $PEER4\n"
    return run_pair("hostile", commands, seconds=500)


def overcommit(*steps: str) -> Finished:
    """All steps of `tests.lab.guest_overcommit`, or one."""
    commands = f"exec {PYTHON} -m tests.lab.guest_overcommit {' '.join(steps)}\n"
    return run_guest("overcommit", commands, seconds=300)


def speed(*words: str) -> Finished:
    """`tests.lab.guest_speed`: trio_smc beside the kernel's AF_SMC and TCP, or its profile."""
    commands = (
        "rxe 0 eth0\necho 1 > /sys/module/smc/parameters/lab_gids\n"
        "[ $ROLE = server ] && control=10.9.2.2 || control=10.9.2.1\n"
        f"exec {PYTHON} -m tests.lab.guest_speed $ROLE $PEER4 $control {' '.join(words)}\n"
    )
    return run_pair("speed", commands, seconds=900)


def ways() -> Finished:
    """`tests.lab.guest_ways` between two guests: rsocket, AF_SMC and trio_smc over soft-RoCE."""
    commands = (
        "modules rdma_ucm; rxe 0 eth0; echo 1 > /sys/module/smc/parameters/lab_gids\n"
        "[ $ROLE = server ] && control=10.9.2.2 || control=10.9.2.1\n"
        f"exec {PYTHON} -m tests.lab.guest_ways pair $ROLE $PEER4 $control\n"
    )
    return _with_table(run_pair("ways", commands, seconds=900))


def loopback(kernel: str = DEFAULT) -> Finished:
    """`tests.lab.guest_ways` in one guest: SMC-D and trio_smc between its processes.

    ``kernel``: of the guest; `setup.DEFAULT`'s module has SMC-D's device if it is asked for, and
    the kernel of a path must have it.
    """
    load = ""
    if os.sep not in kernel:
        load = (
            "rmmod smc_diag smc && modprobe -d $KERNEL smc lab_loopback=1"
            " && modprobe -d $KERNEL smc_diag || exit 1\n"
        )
    commands = f"{load}exec {PYTHON} -m tests.lab.guest_ways loopback\n"
    done = run_guest(
        "loopback", commands, seconds=900, memory=1536, processors=2, kernel=kernel
    )  # fmt: skip
    return _with_table(done)


def _with_table(done: Finished) -> Finished:
    """The run of `tests.lab.guest_ways`, with its table and this machine's name at the end."""
    machine = this_machine()
    version = subprocess.run(["qemu-system-x86_64", "--version"], capture_output=True, check=True)
    [qemu] = re.findall(r"version ([\d.]+)", version.stdout.decode().splitlines()[0])
    rows = re.findall(r"^\[\w\] table: (.*)$", done.output, re.MULTILINE)
    about = f"{machine['processor']}, {machine['processors']} processors, QEMU {qemu}"
    if not rows:
        return done
    return Finished(done.returncode, done.output + "\n".join([about, *rows, ""]))


def with_kernel(suite: str, *steps: str, kernel: str = DEFAULT) -> Finished:
    """A suite of `tests.lab.guest_interop` between two guests, or in one ("quick").

    ``kernel``: of both guests.
    """
    file = demo_file()
    agent = f"{PYTHON} -m tests.lab.kernel_agent 7655"
    ours = f"{PYTHON} -m tests.lab.guest_interop"
    rest = f"{shlex.quote(str(file))} {suite} {' '.join(steps)}"
    allow = "echo 1 > /sys/module/smc/parameters/lab_gids\n"
    if suite == "v2":
        allow = _kernel_of_version(2)
    if suite == "quick":
        commands = (
            "modules dummy; ip link add dummy0 type dummy\n"
            "ip link set dummy0 address 52:54:00:00:00:01 up; ip addr add 10.9.0.1/24 dev dummy0\n"
            f"rxe 0 dummy0\n{allow}"
            f"{agent} & {ours} 127.0.0.1 127.0.0.1 127.0.0.1 {rest}\n"
        )
        return run_guest("quick", commands, seconds=300)
    commands = (
        f"modules sch_netem macvlan dummy\nrxe 0 eth0\n{allow}"
        f"if [ $ROLE = client ]; then grep -q ^ended$ < <(exec {agent}); exit; fi\n"
        f"exec {ours} 10.9.0.1 10.9.0.2 10.9.2.2 {rest}\n"
    )
    name = f"kernel-{suite}" if kernel == DEFAULT else f"kernel-{Path(kernel).name}-{suite}"
    return run_pair(name, commands, seconds=800, kernel=kernel)


PARTS = {
    "handshakes": ("clc/*", "contact/*"),
    "version2": ("version2/*",),
    "links": ("llc/*", "isolation/*"),
    "data": ("data/*", "endings/*"),
    "robustness": ("robustness/*",),
    # With two RNICs on the suite's side, and on that of the kernel.
    "failover": (
        "failover/[235AC]*", "failover/4.6-*", "failover/4.6.1-[1-35-9]", "failover/4.6.2-*",
        "failover/4.8*", "version2/v2.7-2", "version2/v2.10-*",
    ),
    # Linux crashes, so this check has guests of its own.
    "validation": ("failover/4.6.1-4",),
}  # fmt: skip
"""Parts of the conformance suite, so that most runs of guests end within five minutes."""
CONFORM_TIME = 1080
"""Seconds for a part; with the kernel as client it takes the longest, with one check at a time."""
SHARE = "share"
"""The part of `SHARES`."""
SHARES = {
    1: (
        "clc/A.2-[135]", "clc/A.2.3-*", "clc/C.6-5", "clc/C.6-17", "clc/C.1-[13]",
        "contact/3.5.1-1", "contact/3.5.1.5-*", "contact/2.2.2-*", "contact/3.5.1.6-2",
        "contact/3.5.2-[13]", "llc/A.3.8-1", "llc/A.3-1", "llc/A.3.5-1", "llc/A.3.7-3",
        "data/A.4-[1-9]", "data/A.4-1[0-8]", "data/4.3-[49]", "data/4.3-15", "endings/4.8.1-[16]",
        "endings/4.8.2-2", "isolation/2.1-1",
    ),
    2: (
        "version2/v2.1-*", "version2/v2.2-3?", "version2/v2.4-1[0245]", "version2/v2.5-[12]",
        "version2/v2.9-[12]", "version2/v2.10-13", "version2/v2.12-1",
    ),
}  # fmt: skip
"""Checks of each subject, by version, that a plain ``make interop`` has time for."""


def parts_of(version: int) -> Iterator[str]:
    """The parts that have checks of this version."""
    return (part for part in PARTS if version > 1 or part != "version2")


def conform(
    target: str, role: str, version: int, part: str, *options: str, kernel: str = DEFAULT
) -> Finished:
    """`smc-conform` against trio_smc ("ours") over soft-RoCE, or against the kernel.

    Args:
      role: of the implementation under test: "server" or "client".
      part: of `PARTS`, or `SHARE`, or patterns of checks with commas between them.
      options: for the suite.
      kernel: of both guests.
    """
    patterns = SHARES[version] if part == SHARE else PARTS.get(part, part.split(","))
    only = [word for pattern in patterns for word in ("--only", pattern)]
    two = part.startswith(("failover", "validation"))
    given = ["--rnic", "rxe0", *(("--rnic", "rxe1") if two else ())]
    second = ""
    if two:
        # Linux does not move a connection to another link of the same RNIC, so it has two as well.
        where = "" if target == "kernel" else "[ $ROLE = server ] && "
        second = f"modules macvlan; {where}{{ {second_interface('1$NUMBER')}; }}\n"
    load = ""
    if target == "kernel":
        given.append("--tcp-option")
        load = _kernel_of_version(version) + IDLE_LINKS
        if two and version > 1 and kernel in KERNELS and KERNELS[kernel].module_is_built:
            load = RETRIES + IDLE_LINKS  # otherwise soft-RoCE never gives a message up
    if target == "ours" or not two:
        given += ["--provides", "one-rnic"]
    commands = (
        f"rxe 0 eth0\n{second}{load}"
        f"exec {PYTHON} -m tests.lab.guest_conform $ROLE {target} {role} {version}"
        f" {' '.join(map(shlex.quote, [*given, *only, *options]))}\n"
    )
    return run_pair(
        reports_of(target, role, version, part, kernel), commands, seconds=CONFORM_TIME,
        hostile=True,
        kernel=kernel,
    )  # fmt: skip


RETRIES = "echo 3 > /sys/module/smc/parameters/lab_retries\n"
IDLE_LINKS = "sysctl -q -w net.smc.smcr_testlink_time=4\n"
"""Linux tests idle links every 30 seconds otherwise, which is longer than a check waits."""


def reports_of(target: str, role: str, version: int, part: str, kernel: str = DEFAULT) -> str:
    """The name of the directory with the reports of `conform`."""
    name = re.sub(r"[^\w.]+", "-", part)[:60]
    return f"conform-{Path(kernel).name if target == 'kernel' else target}-v{version}-{role}-{name}"


def _kernel_of_version(version: int) -> str:
    """Shell commands that let the kernel's AF_SMC speak this version over soft-RoCE."""
    if version == 1:
        return f"echo 1 > /sys/module/smc/parameters/lab_gids\n{RETRIES}"
    return (
        f"rmmod smc_diag smc && insmod $KERNEL/{STOCK}/smc.ko"
        f" && insmod $KERNEL/{STOCK}/smc_diag.ko || exit 1\n"
    )


def both(one: Finished, other: Finished) -> Finished:
    """Two runs as one."""
    return Finished(one.returncode or other.returncode, one.output + other.output)


def demo_file() -> Path:
    """The file of ``make demo``."""
    path = ARTEFACTS / "file"
    if not path.exists():
        ARTEFACTS.mkdir(parents=True, exist_ok=True)
        demo.make_file(path.with_suffix(".new"), 256)
        path.with_suffix(".new").rename(path)
    return path


def _main() -> int:
    # A runner that `timeout` ends must not leave guests behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    words = sys.argv[1:]
    kernel = words[1] if words[0] == "--kernel" else DEFAULT
    what, *rest = words[2:] if words[0] == "--kernel" else words
    if what == "kernel":
        done = with_kernel(*rest, kernel=kernel)
    elif what == "conform":
        target, role, version, part, *options = rest
        done = conform(target, role, int(version), part, *options, kernel=kernel)
    elif what in ("ways", "loopback"):
        done = ways() if what == "ways" else loopback(kernel)
    elif what in ("ours", "hostile"):
        done = ours() if what == "ours" else hostile()
    elif what in ("speed", "overcommit"):
        done = speed(*rest) if what == "speed" else overcommit(*rest)
    else:
        seed = int(rest[0]) if rest else random.SystemRandom().getrandbits(32)
        if what == "verbs":
            done = both(contract(seed), verbs(seed))
        else:
            root = Path(rest[1]) if len(rest) > 1 else None
            done = contract(seed, root) if what == "contract" else streams()
    sys.stdout.write(done.output)
    return done.returncode


if __name__ == "__main__":
    sys.exit(_main())
