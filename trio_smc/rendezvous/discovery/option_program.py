"""The BPF sock_ops program that puts RFC 7609's TCP option on SYN and SYN-ACK (3.1).

Theory of operation
-------------------
The kernel runs a sock_ops program for every TCP socket of a cgroup at certain events.  Each socket
has a word in a map (socket local storage).  The program handles only sockets whose word has the bit
OFFER.

* connect() and listen(): the program enables the header callbacks.  For a listening socket it also
  has the kernel save the SYN, so that a repeated SYN-ACK can be compared with it.
* Header callbacks: the program adds six bytes to the SYN.  It adds them to the SYN-ACK only if the
  SYN had them, and never to a SYN cookie, because the kernel keeps no state of that connection.  It
  changes no other segment.
* Established: the program records the peer's option in the word (DECIDED, PEER), and disables the
  header callbacks, so that segments with data do not run the program.

A SYN-ACK belongs to no socket yet, so the callback does not know the listener.  If another program
has enabled the callbacks for a plain listener, this program would add the option for that listener.
So the guard map lists the listeners that offer SMC-R, by network namespace and port.  If the map is
wrong, the connection is TCP, unless offering and plain listeners share a port.

With TCP Fast Open the connection is established before its SYN-ACK.  Then the SYN-ACK has no
option, and the connection is TCP.  The program always returns 1 and never writes the reply field,
so it does not change the results of other programs.

`Assembler` supports only the instructions of this program.  Registers are numbers; r10 is the frame
pointer.  Encodings are those of RFC 9669 (BPF instruction set architecture).
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass
from typing import Final, Literal

__all__ = [
    "DECIDED",
    "FRAME",
    "GUARD_KEY_SIZE",
    "OFFER",
    "OPTION",
    "PEER",
    "Assembler",
    "option_program",
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
    """Collects instructions; `assemble` returns the program."""

    def __init__(self) -> None:
        self._code: list[_Instruction] = []
        self._labels: dict[str, int] = {}
        self._jumps: list[tuple[int, str]] = []

    def label(self, name: str) -> None:
        """Set the target of jumps to ``name``.  Raises ValueError: ``name`` has a target."""
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
        """dst = the map of the descriptor ``fd`` in the process that loads the program."""
        self._code.append(_Instruction(_LOAD_IMMEDIATE_64, dst, _PSEUDO_MAP_FD, immediate=fd))
        self._code.append(_Instruction(0))

    def call(self, helper: int) -> None:
        """r0 = helper(r1, ..., r5); the call overwrites r1 to r5."""
        self._code.append(_Instruction(_CALL, immediate=helper))

    def jump(self, label: str) -> None:
        """Continue at ``label``."""
        self._jumps.append((len(self._code), label))
        self._code.append(_Instruction(_JUMP))

    def jump_if(
        self, register: int, relation: Literal["==", "!="], immediate: int, label: str
    ) -> None:
        """Continue at ``label`` if the relation holds, on 64 bits."""
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
          ValueError: a jump to a label without a target.
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
                # The order of the two register fields depends on the byte order (RFC 9669, 3.2).
                each.dst << 4 | each.src if big else each.src << 4 | each.dst,
                each.offset,
                each.immediate,
            )
            for each in self._code
        )


OPTION: Final = bytes.fromhex("fe06e2d4c3d9")
"""Kind 254 (RFC 4727), length 6, and "SMCR" in EBCDIC as experiment identifier (RFC 6994)."""

OFFER: Final = 1
"""Bit of a socket's word, set by the process: this socket offers SMC-R."""
PEER: Final = 2
"""Set by the program: the peer offers SMC-R."""
DECIDED: Final = 4
"""Set by the program: the TCP handshake is over, and PEER has the result."""
_ARMED: Final = 8  # this program has enabled the header callbacks

GUARD_KEY_SIZE: Final = 16
"""Bytes of a key of the guard map: network namespace's cookie (8), port (4), zeros."""

# struct bpf_sock_ops, byte offsets.
_OP, _ARG0, _LOCAL_PORT, _CB_FLAGS, _SK, _TCP_FLAGS = 0, 4, 68, 84, 184, 212
# Values of `op`.
_TCP_CONNECT, _ACTIVE_ESTABLISHED, _PASSIVE_ESTABLISHED, _TCP_LISTEN = 3, 4, 5, 11
_HDR_OPT_LEN, _WRITE_HDR_OPT = 14, 15
_CB_WRITE_HDR_OPT: Final = 1 << 6
_SYNACK_COOKIE: Final = 2

# Helpers.
_MAP_LOOKUP, _MAP_UPDATE, _MAP_DELETE = 1, 2, 3
_SETSOCKOPT, _CB_FLAGS_SET, _SK_STORAGE_GET, _GET_NETNS_COOKIE = 49, 59, 107, 122
_LOAD_HDR_OPT, _STORE_HDR_OPT, _RESERVE_HDR_OPT = 142, 143, 144
_LOAD_TCP_SYN: Final = 1  # BPF_LOAD_HDR_OPT_TCP_SYN

_IPPROTO_TCP, _TCP_SAVE_SYN = 6, 27
_SYN, _ACK = 0x02, 0x10

# Registers that calls preserve, and offsets of values on the stack.
_CTX, _WORD, _CALLBACK = 6, 7, 8
_SCRATCH: Final = -8  # the option, an option value, or the guard's value
_KEY: Final = _SCRATCH - GUARD_KEY_SIZE


def option_program(words: int, guard: int, *, byteorder: str = sys.byteorder) -> bytes:
    """The program.

    Args:
      words: descriptor of the map of sockets' words.
      guard: descriptor of the guard map.
      byteorder: of the machine that runs it.
    """
    program = _Program(words, guard)
    program.dispatch()
    program.arm()
    program.header()
    program.established()
    program.plain_listener()
    program.leave()
    return program.assemble(byteorder=byteorder)


class _Program(Assembler):
    def __init__(self, words: int, guard: int) -> None:
        super().__init__()
        self._words = words
        self._guard_map = guard

    def dispatch(self) -> None:
        self.move(_CTX, 1)
        self.load(_CALLBACK, _CTX, _OP)
        for callback, label in (
            (_HDR_OPT_LEN, "header"),
            (_WRITE_HDR_OPT, "header"),
            (_TCP_CONNECT, "arm"),
            (_TCP_LISTEN, "arm"),
            (_ACTIVE_ESTABLISHED, "established"),
            (_PASSIVE_ESTABLISHED, "established"),
        ):
            self.jump_if(_CALLBACK, "==", callback, label)
        self.jump("leave")

    def arm(self) -> None:
        """connect() or listen()."""
        self.label("arm")
        self._find_word("plain")
        self.jump_if(_CALLBACK, "==", _TCP_CONNECT, "switch on")
        self._guard(_MAP_UPDATE)
        self.store_immediate(FRAME, _SCRATCH, 1)
        self.move(1, _CTX)
        self.set(2, _IPPROTO_TCP)
        self.set(3, _TCP_SAVE_SYN)
        self.frame_address(4, _SCRATCH)
        self.set(5, 4)
        self.call(_SETSOCKOPT)
        self.jump_if(0, "!=", 0, "leave")
        self.label("switch on")
        # A socket may connect again, so the result of an earlier connection is cleared.
        self.load(1, _WORD, 0)
        self.calculate("and", 1, OFFER | _ARMED)
        self.store(_WORD, 0, 1)
        self.load(2, _CTX, _CB_FLAGS)
        self.move(3, 2)
        self.calculate("and", 3, _CB_WRITE_HDR_OPT)
        self.jump_if(3, "!=", 0, "leave")  # enabled, by this program (ARMED) or another one
        self.calculate("or", 1, _ARMED)
        self.store(_WORD, 0, 1)
        self.calculate("or", 2, _CB_WRITE_HDR_OPT)
        self.move(1, _CTX)
        self.call(_CB_FLAGS_SET)
        self.jump("leave")

    def header(self) -> None:
        """An outgoing header: one callback reserves room, the next one writes the option."""
        self.label("header")
        self.load(1, _CTX, _TCP_FLAGS)
        self.move(2, 1)
        self.calculate("and", 2, _SYN)
        self.jump_if(2, "==", 0, "leave")
        self.calculate("and", 1, _ACK)
        self.jump_if(1, "!=", 0, "syn-ack")
        self._find_word("leave")
        self._option_to_stack()
        self.jump("put")
        self.label("syn-ack")
        self.load(1, _CTX, _ARG0)
        self.jump_if(1, "==", _SYNACK_COOKIE, "leave")
        self._guard(_MAP_LOOKUP)
        self.jump_if(0, "==", 0, "leave")
        self._option_to_stack()
        self._search(_LOAD_TCP_SYN)
        self.jump_if(0, "!=", len(OPTION), "leave")
        self.label("put")
        self.move(1, _CTX)
        self.jump_if(_CALLBACK, "==", _WRITE_HDR_OPT, "write")
        self.set(2, len(OPTION))
        self.set(3, 0)
        self.call(_RESERVE_HDR_OPT)
        self.jump("leave")
        self.label("write")
        self.frame_address(2, _SCRATCH)
        self.set(3, len(OPTION))
        self.set(4, 0)
        self.call(_STORE_HDR_OPT)
        self.jump("leave")

    def established(self) -> None:
        """Record if the peer's SYN-ACK, or its SYN, had the option."""
        self.label("established")
        self._find_word("leave")
        self._option_to_stack()
        self.set(4, 0)
        self.jump_if(_CALLBACK, "==", _ACTIVE_ESTABLISHED, "search")
        self.load(1, _CTX, _TCP_FLAGS)
        self.calculate("and", 1, _SYN)
        self.set(0, 0)
        self.jump_if(1, "!=", 0, "searched")  # TCP Fast Open
        self.set(4, _LOAD_TCP_SYN)
        self.label("search")
        self._search(None)
        self.label("searched")
        self.load(1, _WORD, 0)
        self.move(2, 1)
        self.calculate("or", 1, DECIDED)
        self.jump_if(0, "!=", len(OPTION), "store")
        self.calculate("or", 1, PEER)
        self.label("store")
        self.store(_WORD, 0, 1)
        self.calculate("and", 2, _ARMED)
        self.jump_if(2, "==", 0, "leave")
        self.load(2, _CTX, _CB_FLAGS)
        self.calculate("and", 2, ~_CB_WRITE_HDR_OPT)
        self.move(1, _CTX)
        self.call(_CB_FLAGS_SET)
        self.jump("leave")

    def plain_listener(self) -> None:
        """Remove the guard of an earlier listener of the same port."""
        self.label("plain")
        self.jump_if(_CALLBACK, "!=", _TCP_LISTEN, "leave")
        self._guard(_MAP_DELETE)

    def leave(self) -> None:
        self.label("leave")
        self.set(0, 1)
        self.exit()

    # --- pieces ------------------------------------------------------------------------------

    def _find_word(self, otherwise: str) -> None:
        """r7 = address of the socket's word; without OFFER jump to ``otherwise``."""
        self.load(2, _CTX, _SK, size=8)
        self.jump_if(2, "==", 0, otherwise)
        self.load_map(1, self._words)
        self.set(3, 0)
        self.set(4, 0)
        self.call(_SK_STORAGE_GET)
        self.jump_if(0, "==", 0, otherwise)
        self.move(_WORD, 0)
        self.load(1, _WORD, 0)
        self.calculate("and", 1, OFFER)
        self.jump_if(1, "==", 0, otherwise)

    def _option_to_stack(self) -> None:
        for place, value in enumerate(OPTION):
            self.store_immediate(FRAME, _SCRATCH + place, value, size=1)

    def _search(self, flags: int | None) -> None:
        """r0 = length of the option that equals the one on the stack.

        flags: of bpf_load_hdr_opt; None: r4 has them already.
        """
        self.move(1, _CTX)
        self.frame_address(2, _SCRATCH)
        self.set(3, len(OPTION))
        if flags is not None:
            self.set(4, flags)
        self.call(_LOAD_HDR_OPT)

    def _guard(self, helper: int) -> None:
        """r0 = helper(guard map, (namespace, port), 1, 0)."""
        self.move(1, _CTX)
        self.call(_GET_NETNS_COOKIE)
        self.store(FRAME, _KEY, 0, size=8)
        self.load(1, _CTX, _LOCAL_PORT)
        self.store(FRAME, _KEY + 8, 1)
        self.store_immediate(FRAME, _KEY + 12, 0)
        self.store_immediate(FRAME, _SCRATCH, 1)
        self.load_map(1, self._guard_map)
        self.frame_address(2, _KEY)
        self.frame_address(3, _SCRATCH)
        self.set(4, 0)
        self.call(helper)
