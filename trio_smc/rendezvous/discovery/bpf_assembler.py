"""A small eBPF assembler: just what the program of the TCP option needs.

Pure: instructions in, bytes out.  Registers are numbers; r10 is the frame pointer.  Encodings are
those of RFC 9669 (BPF instruction set architecture).
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass
from typing import Final, Literal

__all__ = [
    "FRAME",
    "Assembler",
]


FRAME: Final = 10
"""The frame pointer; the stack lies below it."""

# Opcode = class | size or source | mode or operation (RFC 9669, 3).
_ALU64_MOV_REG: Final = 0xBF
_ALU64: Final = {"mov": 0xB7, "add": 0x07, "or": 0x47, "and": 0x57}
_JUMP: Final = 0x05
_JUMP_IF: Final = {"==": 0x15, "!=": 0x55}
_CALL: Final = 0x85
_EXIT: Final = 0x95
_LOAD: Final = {4: 0x61, 8: 0x79}
_STORE: Final = {4: 0x63, 8: 0x7B}
_STORE_IMMEDIATE: Final = {1: 0x72, 4: 0x62}
_LOAD_IMMEDIATE_64: Final = 0x18
_PSEUDO_MAP_FD: Final = 1


@dataclass(slots=True)
class _Instruction:
    opcode: int
    dst: int = 0
    src: int = 0
    offset: int = 0
    immediate: int = 0


class Assembler:
    """Collects instructions; `assemble` gives the program."""

    def __init__(self) -> None:
        self._code: list[_Instruction] = []
        self._labels: dict[str, int] = {}
        self._jumps: list[tuple[int, str]] = []

    def label(self, name: str) -> None:
        """Jumps to ``name`` come here.  ValueError: it is somewhere else already."""
        if name in self._labels:
            raise ValueError(f"label {name!r} twice")
        self._labels[name] = len(self._code)

    def move(self, dst: int, src: int) -> None:
        """dst = src."""
        self._code.append(_Instruction(_ALU64_MOV_REG, dst, src))

    def calculate(
        self, operation: Literal["mov", "add", "or", "and"], dst: int, immediate: int
    ) -> None:
        """dst = dst <operation> immediate, on 64 bits; the immediate is sign-extended."""
        self._code.append(_Instruction(_ALU64[operation], dst, immediate=immediate))

    def set(self, dst: int, immediate: int) -> None:
        """dst = immediate."""
        self.calculate("mov", dst, immediate)

    def frame_address(self, dst: int, offset: int) -> None:
        """dst = address of the stack byte at ``offset`` from the frame pointer."""
        self.move(dst, FRAME)
        self.calculate("add", dst, offset)

    def load(self, dst: int, base: int, offset: int, *, size: Literal[4, 8] = 4) -> None:
        """dst = the ``size`` bytes at base + offset."""
        self._code.append(_Instruction(_LOAD[size], dst, base, offset))

    def store(self, base: int, offset: int, src: int, *, size: Literal[4, 8] = 4) -> None:
        """The ``size`` bytes at base + offset = src."""
        self._code.append(_Instruction(_STORE[size], base, src, offset))

    def store_immediate(
        self, base: int, offset: int, immediate: int, *, size: Literal[1, 4] = 4
    ) -> None:
        """The ``size`` bytes at base + offset = immediate."""
        self._code.append(
            _Instruction(_STORE_IMMEDIATE[size], base, offset=offset, immediate=immediate)
        )

    def load_map(self, dst: int, fd: int) -> None:
        """dst = the map that descriptor ``fd`` names in the process that loads the program."""
        self._code.append(_Instruction(_LOAD_IMMEDIATE_64, dst, _PSEUDO_MAP_FD, immediate=fd))
        self._code.append(_Instruction(0))

    def call(self, helper: int) -> None:
        """r0 = helper(r1, ..., r5); r1 to r5 are lost."""
        self._code.append(_Instruction(_CALL, immediate=helper))

    def jump(self, label: str) -> None:
        """Go on at ``label``."""
        self._jumps.append((len(self._code), label))
        self._code.append(_Instruction(_JUMP))

    def jump_if(
        self, register: int, relation: Literal["==", "!="], immediate: int, label: str
    ) -> None:
        """Go on at ``label`` when the relation holds, on 64 bits."""
        self._jumps.append((len(self._code), label))
        self._code.append(_Instruction(_JUMP_IF[relation], register, immediate=immediate))

    def exit(self) -> None:
        """Return r0."""
        self._code.append(_Instruction(_EXIT))

    def assemble(self, *, byteorder: str = sys.byteorder) -> bytes:
        """The program, 8 bytes for each instruction.

        Args:
          byteorder: "little" or "big": of the machine that runs it.

        Raises:
          ValueError: a jump to a label that is nowhere.
        """
        for at, label in self._jumps:
            if label not in self._labels:
                raise ValueError(f"no label {label!r}")
            self._code[at].offset = self._labels[label] - at - 1
        big = byteorder == "big"
        form = struct.Struct(">BBhi" if big else "<BBhi")
        return b"".join(
            form.pack(
                each.opcode,
                # The two register fields change places with the byte order (RFC 9669, 3.2).
                each.dst << 4 | each.src if big else each.src << 4 | each.dst,
                each.offset,
                each.immediate,
            )
            for each in self._code
        )
