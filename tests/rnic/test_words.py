"""The variants of shared words, and the machine code of the native variant."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.compiled_build import FLAGS, NATIVE, SOURCE, native
from scripts.pythons import ROOT
from trio_smc.rnic import words
from trio_smc.rnic.words import VARIABLE, VARIANT, Words, shared_words

CROSS = "aarch64-linux-gnu-"
SHOW = "import trio_smc; print(trio_smc.SoftRnic.variant)"
OPEN = """
import sys, pathlib, trio_smc
from trio_smc.rnic.verbs import RnicError
try:
    rnic = trio_smc.SoftRnic()
    rnic.open(pathlib.Path(sys.argv[1]))
    rnic.close()
except RnicError as error:
    print(error)
"""


def make_words(memory: bytearray) -> Words:
    return shared_words(memoryview(memory))


def test_words_are_8_bytes_each() -> None:
    memory = bytearray(32)
    some = make_words(memory)
    some[1] = 2**64 - 1
    some[3] = 5
    assert (some[0], some[1], some[3]) == (0, 2**64 - 1, 5)
    words.exchange(some, 3, 7)
    words.fence()
    assert memory == bytes(8) + b"\xff" * 8 + bytes(8) + (7).to_bytes(8, sys.byteorder)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda some: some[4],
        lambda some: some.__setitem__(4, 1),
        lambda some: some.__setitem__(0, -1),
        lambda some: some.__setitem__(0, 1 << 64),
        lambda some: some.__setitem__(0, None),
        lambda some: some["x"],
        lambda some: some.__delitem__(0),
        lambda some: words.exchange(some, 4, 1),
    ],
)
def test_misuse_changes_nothing(misuse: Callable[[Words], object]) -> None:
    memory = bytearray(32)
    with pytest.raises((IndexError, ValueError, OverflowError, TypeError)):
        misuse(make_words(memory))
    assert memory == bytes(32)


def test_released_words_refuse_each_access() -> None:
    memory = bytearray(16)
    some = make_words(memory)
    with pytest.raises(BufferError):
        memory.append(0)  # the words export the buffer
    some.release()
    some.release()
    for access in (lambda: some[0], lambda: some.__setitem__(0, 1)):
        with pytest.raises(ValueError, match="released"):
            access()
    memory.append(0)


def test_read_only_memory_cannot_be_words() -> None:
    with pytest.raises((TypeError, BufferError)):
        shared_words(memoryview(bytes(8)))[0] = 1


THREADS = """
import sys, threading
from trio_smc.rnic.memory import PeerMemory
from trio_smc.rnic.soft.ring import ReceiveRing, SendRing
sys.setswitchinterval(1e-6)
failed = []

def send():
    receiver = ReceiveRing(7)
    sender = SendRing(PeerMemory(receiver.memory.fd, receiver.memory.size), lambda: None)
    taken = []
    try:
        for number in range(30_000):
            receiver.posted = number + 1
            receiver.set_posted(number + 1)
            if sender.put(b"m") or not receiver.take_untrusted(taken.append):
                failed.append(number)
    except BaseException as error:
        failed.append(error)

threads = [threading.Thread(target=send) for _ in range(3)]
for each in threads: each.start()
for each in threads: each.join()
print(failed)
"""


def run(code: str, *arguments: str, **variables: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **variables}, capture_output=True, text=True, check=True, cwd=ROOT,
    ).stdout.strip()  # fmt: skip


@pytest.mark.processes
def test_a_variant_is_chosen_by_name() -> None:
    assert run(SHOW, **{VARIABLE: "socket"}) == "socket"
    assert run(SHOW, **{VARIABLE: VARIANT}) == VARIANT


@pytest.mark.processes
def test_a_variant_that_does_not_work_is_refused(tmp_path: Path) -> None:
    refused = run(OPEN, str(tmp_path / "smc"), **{VARIABLE: "nothing"})
    assert "TRIO_SMC_WORDS=nothing does not work here: usable are " in refused
    assert run(OPEN, str(tmp_path / "smc"), **{VARIABLE: "socket"}) == ""


@pytest.mark.processes
@pytest.mark.parametrize("variant", ["x86-64", VARIANT])
def test_threads_do_not_share_fences(variant: str) -> None:
    """Threads with a stack each do not disturb one another."""
    assert run(THREADS, **{VARIABLE: variant}) == "[]"


@pytest.mark.processes
@pytest.mark.parametrize(("machine", "variant"), [("x86_64", "x86-64"), ("aarch64", "socket")])
def test_without_the_native_module(machine: str, variant: str) -> None:
    code = (
        "import sys, platform; sys.modules['trio_smc.rnic._words'] = None; "
        f"platform.machine = lambda: {machine!r}; {SHOW}"
    )
    environment = {VARIABLE: ""}
    assert run(code, **environment) == variant


def test_the_native_module_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "_words.abi3.so"
    monkeypatch.setenv(NATIVE, "0")
    assert not native(ROOT / SOURCE, library)
    monkeypatch.delenv(NATIVE)
    monkeypatch.setenv("CC", "no-compiler-here")
    assert not native(ROOT / SOURCE, library)
    with pytest.raises(RuntimeError, match=r"^TRIO_SMC_COMPILED=1 needs a C compiler .*-here"):
        native(ROOT / SOURCE, library, required=True)
    monkeypatch.setenv(NATIVE, "1")
    with pytest.raises(RuntimeError, match=r"^TRIO_SMC_NATIVE=1 needs a C compiler .*-here"):
        native(ROOT / SOURCE, library)
    assert not library.exists()


def test_the_module_names_its_c_library(tmp_path: Path) -> None:
    """auditwheel refuses a module that does not."""
    library = tmp_path / "_words.so"
    if not native(ROOT / SOURCE, library) or not shutil.which("readelf"):
        pytest.skip("needs a C compiler, the headers of Python and readelf")
    command = ["readelf", "--dynamic", str(library)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(r"NEEDED.*\[libc\.", shown)


def test_the_source_is_short() -> None:
    assert len((ROOT / SOURCE).read_text().splitlines()) <= 150


def machine_code(tmp_path: Path, *flags: str) -> dict[str, set[str]]:
    """Compile the native module for ARM64. Returns the instructions of each function."""
    if not shutil.which(f"{CROSS}gcc"):
        pytest.skip("needs Debian's gcc-aarch64-linux-gnu")
    object_file = tmp_path / "words.o"
    headers = f"-I{sysconfig.get_path('include')}"
    source = [headers, "-c", str(ROOT / SOURCE), "-o", str(object_file)]
    subprocess.run([f"{CROSS}gcc", *FLAGS, "-Werror", *flags, *source], check=True)
    command = [f"{CROSS}objdump", "-d", "--no-show-raw-insn", str(object_file)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    functions: dict[str, set[str]] = {}
    for part in re.split(r"^[0-9a-f]+ <", listing, flags=re.MULTILINE)[1:]:
        lines = re.findall(r"^ +[0-9a-f]+:\t(.+)$", part, re.MULTILINE)
        functions[part.partition(">")[0]] = {re.sub(r"\s.*", "", line) for line in lines} | {
            re.sub(r"\s+", " ", line) for line in lines if line.startswith("dmb")
        }
    return functions


@pytest.mark.full
def test_instructions_of_arm64(tmp_path: Path) -> None:
    """ARMv8.0 has exclusive loads and stores."""
    code = machine_code(tmp_path, "-march=armv8-a", "-mno-outline-atomics")
    assert "ldar" in code["load_acquire"]
    assert "stlr" in code["store_release"]
    assert {"ldaxr", "stlxr"} <= code["exchange"]
    assert "dmb ish" in code["fence"]


@pytest.mark.full
def test_instructions_of_arm64_with_atomics(tmp_path: Path) -> None:
    """ARMv8.1 exchanges by a single instruction."""
    code = machine_code(tmp_path, "-march=armv8.1-a")
    assert "swpal" in code["exchange"]
