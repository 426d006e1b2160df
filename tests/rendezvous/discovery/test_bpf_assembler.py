"""The eBPF assembler, compared with encodings typed from RFC 9669, and the loaded program."""

from __future__ import annotations

import hashlib
import struct

import pytest

from trio_smc.rendezvous.discovery.option_program import FRAME, OPTION, Assembler, option_program


def one(**instruction: object) -> str:
    """The encoding of a single instruction, little-endian, as hex."""
    [(method, arguments)] = instruction.items()
    assembler = Assembler()
    assert isinstance(arguments, tuple)
    keywords = arguments[-1] if arguments and isinstance(arguments[-1], dict) else {}
    positional = arguments[:-1] if keywords else arguments
    getattr(assembler, method)(*positional, **keywords)
    return assembler.assemble(byteorder="little").hex()


@pytest.mark.parametrize(
    ("instruction", "encoding"),
    [
        ({"move": (6, 1)}, "bf16000000000000"),
        ({"set": (2, -2)}, "b7020000feffffff"),
        ({"calculate": ("add", 1, 0x12345678)}, "0701000078563412"),
        ({"calculate": ("or", 3, 64)}, "4703000040000000"),
        ({"calculate": ("and", 9, 1)}, "5709000001000000"),
        ({"frame_address": (4, -8)}, "bfa400000000000007040000f8ffffff"),
        ({"load": (2, 6, 84)}, "6162540000000000"),
        ({"load": (2, 6, 184, {"size": 8})}, "7962b80000000000"),
        ({"store": (7, 4, 1)}, "6317040000000000"),
        ({"store": (FRAME, -24, 0, {"size": 8})}, "7b0ae8ff00000000"),
        ({"store_immediate": (FRAME, -8, 1)}, "620af8ff01000000"),
        ({"store_immediate": (FRAME, -3, 0xC3, {"size": 1})}, "720afdffc3000000"),
        ({"load_map": (1, 5)}, "18110000050000000000000000000000"),
        ({"call": (107,)}, "850000006b000000"),
        ({"exit": ()}, "9500000000000000"),
    ],
)
def test_encodings(instruction: dict[str, object], encoding: str) -> None:
    assert one(**instruction) == encoding


def test_jumps_count_from_the_next_instruction() -> None:
    assembler = Assembler()
    assembler.label("back")
    assembler.jump("on")
    assembler.jump_if(1, "==", 3, "back")
    assembler.jump_if(2, "!=", 0, "on")
    assembler.label("on")
    assembler.exit()
    assert [row.hex() for row in rows(assembler.assemble(byteorder="little"))] == [
        "0500020000000000",
        "1501feff03000000",
        "5502000000000000",
        "9500000000000000",
    ]


def test_big_endian_machines_swap_the_registers() -> None:
    assembler = Assembler()
    assembler.load(2, 6, 0x54)
    assembler.set(1, 0x0102)
    assert assembler.assemble(byteorder="big").hex() == "6126005400000000" + "b710000000000102"


def test_labels() -> None:
    assembler = Assembler()
    assembler.label("here")
    with pytest.raises(ValueError, match="'here' twice"):
        assembler.label("here")
    assembler.jump("there")
    with pytest.raises(ValueError, match="no label 'there'"):
        assembler.assemble()


def rows(code: bytes) -> list[bytes]:
    return [code[at : at + 8] for at in range(0, len(code), 8)]


def test_the_option() -> None:
    """RFC 7609, 3.1: kind 254, length 6, "SMCR" in EBCDIC."""
    assert OPTION[:2] == bytes((254, 6))
    assert OPTION[2:].decode("cp037") == "SMCR"


def test_the_program_is_the_one_tested_on_a_kernel() -> None:
    """Change this hash only after a run of the tests in `test_tcp_option`, which need
    privileges."""
    code = option_program(3, 4, byteorder="little")
    assert hashlib.sha256(code).hexdigest() == (
        "f19cff4f776de894749285b752f87b6376a0fa0640d921a01748c5f0a8ba1661"
    )


@pytest.mark.parametrize("byteorder", ["little", "big"])
def test_jumps_of_the_program_stay_inside(byteorder: str) -> None:
    code = rows(option_program(3, 4, byteorder=byteorder))
    targets = set()
    form = struct.Struct("<BBhi" if byteorder == "little" else ">BBhi")
    at = 0
    while at < len(code):
        opcode, _, offset, _ = form.unpack(code[at])
        if opcode in (0x05, 0x15, 0x55):
            assert offset >= 0, "a backward jump: the program might not end"
            targets.add(at + 1 + offset)
        at += 2 if opcode == 0x18 else 1
    assert max(targets) < len(code)
    assert form.unpack(code[-1])[0] == 0x95
    # The program always returns 1, so that other programs of the cgroup run.
    assert form.unpack(code[-2]) == form.unpack(form.pack(0xB7, 0, 0, 1))
