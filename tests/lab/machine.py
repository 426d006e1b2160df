"""Boots QEMU guests that run the project's programs on the host's own files.

A guest sees the whole host, read-only, with a layer of memory over it: the checkout, the venv and
Debian's pyverbs are all there, and only files in /lab are kept.  Two guests share three wires: eth0
and eth1 carry the tested traffic, and eth2 carries the tests' own messages, so that the others can
be cut.

==========  ==================  ==================
            guest a             guest b
==========  ==================  ==================
``ROLE``    server              client
eth0        10.9.0.1            10.9.0.2
eth1        10.9.1.1            10.9.1.2
eth2        10.9.2.1            10.9.2.2
==========  ==================  ==================

`tests/lab/init.sh` says what commands find: ``PEER4``, ``rxe 0 eth0``, ``modules NAME...``, and
``cable 0 off`` for pulling out eth0's.  An interface that is only set down by its own guest would
stop the other one's: QEMU's wires lose nothing, they keep packets until they are read.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tests.lab import captures, setup

__all__ = ["ARTEFACTS", "REPOSITORY", "Finished", "run_guest", "run_pair"]

REPOSITORY = Path(__file__).resolve().parents[2]
ARTEFACTS = REPOSITORY / "build" / "interop"
"""Captures and consoles of the latest runs."""
WIRES = 3
CAPTURED = 2
NO_STATUS = 125
BOOT_TIME = 90.0
"""Seconds; without KVM a boot takes about fifteen."""
GRACE = 20.0
"""Seconds for a guest after the other one's end."""
RDMA_WRITE_MIDDLE = 7
"""The opcode in InfiniBand's base transport header."""
_CABLE = re.compile(r"lab: cable (\d) (on|off)")
# Without KVM, QEMU 7.2's cmpxchg16b seems to spoil the flags when it fails, and the guest kernel's
# allocator retries on it: 3 double faults in some 20 transfers of 64 MiB, none in 17 without the
# instruction.
CPU = "max,cx16=off"
BOOT = "console=ttyS0 quiet panic=-1 mitigations=off nokaslr random.trust_cpu=on tsc=reliable"


@dataclass(frozen=True)
class Finished:
    """The result of a run of one or two guests."""

    returncode: int
    """0 when the commands ended with 0 in every guest."""
    output: str
    """The consoles, each line behind "[a] " or "[b] "."""
    results: str = ""
    """Output of the commands of a single guest in /lab/results."""


def run_guest(
    name: str, commands: str, *, seconds: float, memory: int = 1024, processors: int = 1,
    kernel: str = setup.DEFAULT,
) -> Finished:  # fmt: skip
    """Run shell commands in one guest without wires, for at most ``seconds``.

    ``kernel``: as `setup.make` takes it.
    """
    with _lab(name, kernel) as (directory, place, console):
        guest = _Guest("a", directory, place, memory, processors)
        guest.prepare(commands, role="server", mtu=0)
        with _gone_at_the_end([guest]):
            _boot([guest], console, wired=False)
            status = guest.finish(seconds, console)
            results = guest.share / "results"
            return Finished(status, console.text(), results.read_text() if results.exists() else "")


def run_pair(
    name: str, commands: str, *, seconds: float, memory: int = 1024, mtu: int = 1500,
    hostile: bool = False, kernel: str = setup.DEFAULT,
) -> Finished:  # fmt: skip
    """Run the same shell commands in two guests, both within ``seconds``.

    Keeps ``build/interop/NAME.pcapng``, and in ``build/interop/NAME`` what the commands wrote into
    /lab/keep.
    A frame there that tshark cannot read makes the status 1; what it reads is in the output.
    Not if ``hostile``: then a guest sends malformed messages on purpose.  ``kernel``: as
    `setup.make` takes it.
    """
    with _lab(name, kernel) as (directory, place, console):
        guests = [_Guest(each, directory, place, memory) for each in "ab"]
        for guest, role in zip(guests, ("server", "client"), strict=True):
            guest.prepare(commands, role=role, mtu=mtu)
        status = 0
        with _gone_at_the_end(guests):
            _boot(guests, console, wired=True)
            end = time.monotonic() + seconds
            for guest in guests:
                left = max(GRACE, end - time.monotonic())
                status = guest.finish(left, console) or status
                guest.keep(ARTEFACTS / name)
        wires = [place / f"wire{number}.pcap" for number in range(CAPTURED)]
        for wire in wires:
            thin_out(wire)
        merged = ARTEFACTS / f"{name}.pcapng"
        subprocess.run(["mergecap", "-F", "pcapng", "-w", merged, *wires], check=True)
        if hostile:
            return Finished(status, console.text())
        reading = captures.read(merged)
        for line in (f"tshark reads {reading}", *(f"malformed: {at}" for at in reading.malformed)):
            console.add("wire", line)
        status = status or int(bool(reading.malformed))
        return Finished(status, console.text())


@contextlib.contextmanager
def _gone_at_the_end(guests: Sequence[_Guest]) -> Iterator[None]:
    """No guest survives a test that has timed out."""
    try:
        yield
    finally:
        for guest in guests:
            if guest.started:
                guest.kill()


def _boot(guests: Sequence[_Guest], console: _Console, *, wired: bool) -> None:
    """Start guests; once more when one of them does not come up."""
    for again in (False, True):
        for guest in guests:
            guest.start(console, wired=wired)
        deadline = time.monotonic() + BOOT_TIME
        up = [guest.up.wait(max(0.0, deadline - time.monotonic())) for guest in guests]
        if all(up) or again:
            return
        console.add("lab", f"not all guests were up after {BOOT_TIME:.0f} s: they start again")
        for guest in guests:
            guest.kill()


@contextlib.contextmanager
def _lab(name: str, kernel_name: str = setup.DEFAULT) -> Iterator[tuple[Path, Path, _Console]]:
    """The kernel, a directory for this run, and its console; one run at a time on this host."""
    ARTEFACTS.mkdir(parents=True, exist_ok=True)
    with setup.locked():
        kernel = setup.make(kernel_name)
        # Not under pytest's directories: paths of Unix sockets end at 107 bytes.
        with (
            tempfile.TemporaryDirectory(prefix="lab-") as place,
            open(ARTEFACTS / f"{name}.log", "w") as log,
        ):
            yield kernel, Path(place), _Console(log)


class _Console:
    """Lines of several guests, in the order in which they came."""

    def __init__(self, log: IO[str]) -> None:
        self._log = log
        self._lines: list[str] = []
        self._lock = threading.Lock()

    def follow(self, guest: _Guest, source: IO[str]) -> None:
        name = guest.name
        for line in source:
            cable = _CABLE.search(line)
            if cable:
                guest.monitor(f"set_link n{cable[1]} {cable[2]}")
            if "lab: up" in line:
                guest.up.set()
            self.add(name, line.rstrip())

    def add(self, name: str, line: str) -> None:
        with self._lock:
            self._lines.append(f"[{name}] {line}\n")
            self._log.write(self._lines[-1])
            self._log.flush()

    def text(self) -> str:
        with self._lock:
            return "".join(self._lines)


class _Guest:
    def __init__(
        self, name: str, kernel: Path, place: Path, memory: int, processors: int = 1
    ) -> None:
        self.name = name
        self.kernel = kernel
        self.place = place
        self.memory = memory
        self.processors = processors
        self.up = threading.Event()
        """Set when its commands have begun."""
        self.started = False
        self.share = place / name
        self.share.mkdir()

    def prepare(self, commands: str, *, role: str, mtu: int) -> None:
        number = {"a": 1, "b": 2}[self.name]
        packages = sysconfig.get_path("purelib")
        settings = {
            "NAME": self.name,
            "NUMBER": str(number) if mtu else "",
            "PEER4": f"10.9.0.{3 - number}",
            "ROLE": role,
            "MTU": str(mtu),
            "KERNEL": str(self.kernel),
            "REPOSITORY": str(REPOSITORY),
            # The guests' python3 is Debian's, with its pyverbs; the rest comes from the packages
            # of the interpreter that runs this.
            "PYTHONPATH": f"{REPOSITORY}:{packages}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONFAULTHANDLER": "1",
            "TRIO_SMC_PATIENCE": "200",  # without KVM, on a host with other work
            "XDG_RUNTIME_DIR": "/run/user0",
        }
        lines = [f"export {key}={shlex.quote(value)}\n" for key, value in settings.items()]
        (self.share / "settings").write_text("".join(lines))
        (self.share / "commands").write_text(commands)
        shutil.copy(REPOSITORY / "tests" / "lab" / "init.sh", self.share)

    def start(self, console: _Console, *, wired: bool = False) -> None:
        words = self.kernel / setup.BOOT
        command = [
            "qemu-system-x86_64", "-M", "q35", "-accel",
            os.environ.get("TRIO_SMC_LAB_ACCEL", "tcg,thread=multi"), "-cpu", CPU,
            "-m", str(self.memory), "-smp", str(self.processors), "-nodefaults",
            "-no-reboot", "-display", "none", "-serial", "stdio", "-device", "virtio-rng-pci",
            "-monitor", f"unix:{self.place}/{self.name}.monitor,server=on,wait=off",
            "-kernel", str(self.kernel / "vmlinuz"), "-initrd", str(self.kernel / "initrd.gz"),
            "-append", f"{BOOT} {words.read_text() if words.exists() else ''}",
            *_share("host", Path("/"), "readonly=on"), *_share("run", self.share),
        ]  # fmt: skip
        if wired:
            for number in range(WIRES):
                command += self._wire(number)
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        # A guest that waits for a processor loses its links: time-outs of RoCE are short, and
        # soft-RoCE sends badly again.  The kernel weighs sessions; root may prefer this one.
        with contextlib.suppress(OSError):
            Path(f"/proc/{self.process.pid}/autogroup").write_text("-15")
        assert self.process.stdout is not None
        self._follower = threading.Thread(
            target=console.follow, args=(self, self.process.stdout), name="console"
        )
        self._follower.start()
        self.started = True

    def _wire(self, number: int) -> Sequence[str]:
        own, peer = (1, 2) if self.name == "a" else (2, 1)
        ends = [f"{self.place}/wire{number}.{end}" for end in (own, peer)]
        backend = f"dgram,id=n{number},local.type=unix,local.path={ends[0]}"
        backend += f",remote.type=unix,remote.path={ends[1]}"
        device = f"virtio-net-pci,netdev=n{number},mac=52:54:00:0{number}:00:0{own},romfile="
        words = ["-netdev", backend, "-device", device]
        if self.name == "a" and number < CAPTURED:
            file = self.place / f"wire{number}.pcap"
            dump = f"filter-dump,id=dump{number},netdev=n{number},file={file},maxlen=192"
            words += ["-object", dump]
        return words

    def monitor(self, command: str) -> None:
        """Run a command of QEMU's monitor."""
        got = b""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as monitor:
            monitor.settimeout(60)
            monitor.connect(f"{self.place}/{self.name}.monitor")
            monitor.sendall(command.encode() + b"\n")
            while got.count(b"(qemu) ") < 2:  # before the command, and after it
                got += monitor.recv(4096)

    def kill(self) -> None:
        """Pull its plug."""
        self.process.kill()
        self.process.wait()
        self._follower.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def finish(self, seconds: float, console: _Console) -> int:
        """Wait for the guest's end; returns its status."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            console.add("lab", f"guest {self.name} was not done after {seconds:.0f} s")
        self.kill()
        try:
            return int((self.share / "status").read_text())
        except (FileNotFoundError, ValueError):
            return NO_STATUS

    def keep(self, directory: Path) -> None:
        """Copy the files that the commands left in /lab/keep."""
        if (self.share / "keep").exists():
            shutil.copytree(self.share / "keep", directory, dirs_exist_ok=True)


def thin_out(capture: Path) -> None:
    """Leave the middle of long RDMA WRITEs out of a pcap file: most of it, and all alike."""
    whole = memoryview(capture.read_bytes())
    with open(capture, "wb") as kept:
        kept.write(whole[:24])
        place = 24
        while place + 16 <= len(whole):
            [length] = struct.unpack_from("<I", whole, place + 8)
            frame = bytes(whole[place + 16 : place + 16 + min(length, 64)])
            roce = frame[12:14] == b"\x08\x00" and frame[23] == 17 and frame[36:38] == b"\x12\xb7"
            if not (roce and length > 42 and frame[42] == RDMA_WRITE_MIDDLE):
                kept.write(whole[place : place + 16 + length])
            place += 16 + length


def _share(tag: str, path: Path, *options: str) -> list[str]:
    """A directory of the host for the guest, by 9P."""
    backend = f"local,id={tag},path={path},security_model=none,multidevs=remap"
    device = f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"
    return ["-fsdev", ",".join((backend, *options)), "-device", device]


def main() -> int:
    """``python -m tests.lab.machine pair|one FILE [SECONDS]``: run a file of commands by hand."""
    kind, path, *rest = sys.argv[1:]
    run = run_pair if kind == "pair" else run_guest
    done = run(Path(path).stem, Path(path).read_text(), seconds=float(rest[0]) if rest else 120)
    sys.stdout.write(done.output)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
