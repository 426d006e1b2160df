"""The TCP option of RFC 7609, 3.1, on the TCP connections of the suite.

An implementation such as Linux sends CLC messages only if both SYN and SYN-ACK have the option
(kind 254, "SMCR" in EBCDIC).  A BPF program of type sock_ops adds it.  The program runs for a
cgroup of the suite's own, which this process joins, so every TCP socket that it opens or listens on
afterwards has the option.  trio_smc's own program is part of what is judged, and serves single
sockets; this one is as small as possible.  On a listener it adds the option to each SYN-ACK,
whether or not the SYN had it.

It needs root, and a cgroup2 file system.  Nothing is left when the process has ended, except an
empty cgroup, which `TcpOption.close` removes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

__all__ = ["tcp_option"]

_OPTION: Final = bytes.fromhex("fe06e2d4c3d9")
_SYSTEM_CALL: Final = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "s390x": 351, "ppc64le": 361}
_PROG_LOAD, _LINK_CREATE = 5, 28
_PROG_SOCK_OPS, _ATTACH_SOCK_OPS = 13, 3

# enum of `bpf_sock_ops.op`, and the flag that requests the two calls for TCP options.
_CONNECT, _ACTIVE, _PASSIVE, _LISTEN, _OPTION_LENGTH, _WRITE_OPTION = 3, 4, 5, 11, 14, 15
_WANTS_OPTIONS: Final = 1 << 6
_OP, _TCP_FLAGS = 0, 212  # offsets in `struct bpf_sock_ops`
_SYN: Final = 2
_STORE_OPTION, _RESERVE, _SET_CALLBACKS = 143, 144, 59  # helper functions
# Instructions, and registers: r0 is the result, r1 to r5 are arguments, r10 is the stack.
_MOVE, _MOVE_NUMBER, _ADD, _AND = 0xBF, 0xB7, 0x07, 0x57
_LOAD, _STORE_WORD, _STORE_HALF = 0x61, 0x62, 0x6A
_JUMP, _JUMP_EQUAL, _CALL, _EXIT = 0x05, 0x15, 0x85, 0x95


class _Assembler:
    """Instructions with jumps to labels."""

    def __init__(self) -> None:
        self._code: list[tuple[int, int, int, int | str, int]] = []
        self._labels: dict[str, int] = {}

    def label(self, name: str) -> None:
        self._labels[name] = len(self._code)

    def add(
        self, opcode: int, target: int = 0, source: int = 0, offset: int | str = 0, number: int = 0
    ) -> None:
        """``offset``: a label for jumps."""
        self._code.append((opcode, target, source, offset, number))

    def call(self, helper: int, *arguments: tuple[int, int, int]) -> None:
        """Set registers by instruction, register and value or source; then call."""
        for opcode, register, value in arguments:
            if opcode == _MOVE:
                self.add(_MOVE, register, value)
            else:
                self.add(opcode, register, 0, 0, value)
        self.add(_CALL, number=helper)
        self.add(_JUMP, offset="end")

    def code(self) -> bytes:
        parts = []
        for at, (opcode, target, source, offset, number) in enumerate(self._code):
            distance = self._labels[offset] - at - 1 if isinstance(offset, str) else offset
            parts.append(struct.pack("=BBhi", opcode, target | source << 4, distance, number))
        return b"".join(parts)


def _program() -> bytes:
    """Request the calls for options when a socket connects or listens; write the option on SYN and
    SYN-ACK; request no more calls when the connection is established."""
    make = _Assembler()
    make.add(_MOVE, 6, 1)
    make.add(_LOAD, 2, 6, _OP)
    for op, label in (
        (_CONNECT, "request"), (_LISTEN, "request"), (_OPTION_LENGTH, "reserve"),
        (_WRITE_OPTION, "write"), (_ACTIVE, "stop"), (_PASSIVE, "stop"),
    ):  # fmt: skip
        make.add(_JUMP_EQUAL, 2, 0, label, op)
    make.add(_JUMP, offset="end")
    for label, flag in (("request", _WANTS_OPTIONS), ("stop", 0)):
        make.label(label)
        make.call(_SET_CALLBACKS, (_MOVE, 1, 6), (_MOVE_NUMBER, 2, flag))
    for label in ("reserve", "write"):
        make.label(label)
        make.add(_LOAD, 3, 6, _TCP_FLAGS)
        make.add(_AND, 3, 0, 0, _SYN)
        make.add(_JUMP_EQUAL, 3, 0, "end", 0)
        if label == "reserve":
            make.call(
                _RESERVE, (_MOVE, 1, 6), (_MOVE_NUMBER, 2, len(_OPTION)), (_MOVE_NUMBER, 3, 0)
            )
            continue
        head, rest = struct.unpack("=iH", _OPTION)
        make.add(_STORE_WORD, 10, 0, -8, head)
        make.add(_STORE_HALF, 10, 0, -4, rest)
        make.call(
            _STORE_OPTION, (_MOVE, 1, 6), (_MOVE, 2, 10), (_ADD, 2, -8),
            (_MOVE_NUMBER, 3, len(_OPTION)), (_MOVE_NUMBER, 4, 0),
        )  # fmt: skip
    make.label("end")
    make.add(_MOVE_NUMBER, 0, 0, 0, 1)
    make.add(_EXIT)
    return make.code()


def _bpf(command: int, attributes: bytes) -> int:
    number = _SYSTEM_CALL.get(platform.machine())
    if number is None:
        raise OSError(0, f"the number of bpf(2) on {platform.machine()} is not known")
    library: Any = ctypes.CDLL(None, use_errno=True)
    block = ctypes.create_string_buffer(attributes.ljust(128, b"\0"), 128)
    library.syscall.restype = ctypes.c_long
    result = int(library.syscall(ctypes.c_long(number), command, block, 128))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"the TCP option: {os.strerror(code)}")
    return result


def _load() -> int:
    code = _program()
    block = ctypes.create_string_buffer(code, len(code))
    licence = ctypes.create_string_buffer(b"Apache-2.0")
    return _bpf(
        _PROG_LOAD,
        struct.pack(
            "=IIQQIIQII16sII", _PROG_SOCK_OPS, len(code) // 8, ctypes.addressof(block),
            ctypes.addressof(licence), 0, 0, 0, 0, 0, b"smc_conform", 0, _ATTACH_SOCK_OPS,
        ),
    )  # fmt: skip


def _cgroup_root() -> Path:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if right.startswith("cgroup2 "):
            return Path(left.split(" ")[4])
    raise OSError(0, "the TCP option: no cgroup2 file system is mounted")


@contextmanager
def tcp_option() -> Iterator[None]:
    """Add the TCP option to the connections that this process opens and accepts meanwhile.

    Raises:
      OSError: this process may not load BPF programs, or the system has none.
    """
    root = _cgroup_root()
    before = next(
        line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines()
        if line.startswith("0::")
    )  # fmt: skip
    own = root / f"smc-conform-{os.getpid()}"
    with contextlib.ExitStack() as undo:
        own.mkdir()
        undo.callback(own.rmdir)
        directory = os.open(own, os.O_RDONLY | os.O_DIRECTORY)
        undo.callback(os.close, directory)
        program = _load()
        undo.callback(os.close, program)
        link = _bpf(_LINK_CREATE, struct.pack("=IIII", program, directory, _ATTACH_SOCK_OPS, 0))
        undo.callback(os.close, link)
        (own / "cgroup.procs").write_text(str(os.getpid()))
        undo.callback((root / before.lstrip("/") / "cgroup.procs").write_text, str(os.getpid()))
        yield
