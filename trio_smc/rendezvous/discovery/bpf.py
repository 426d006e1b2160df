"""bpf(2) through ctypes: maps, programs, links and pins, as descriptors.

Libraries for bpf(2) need a compiler or a shared library.  This project needs few commands, and the
kernel keeps their interface stable.  Every function raises OSError with the kernel's number.
Descriptors are close-on-exec.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import struct
from pathlib import Path
from typing import Any, Final

__all__ = [
    "attach_to_cgroup",
    "create_hash",
    "create_socket_storage",
    "link_cgroup",
    "load_sock_ops",
    "lookup",
    "map_kind",
    "mount_bpffs",
    "open_pinned",
    "pin",
    "unmount",
    "update",
]


_SYSTEM_CALL: Final = {
    "x86_64": 321, "i686": 357, "aarch64": 280, "riscv64": 280, "loongarch64": 280,
    "armv7l": 386, "ppc64": 361, "ppc64le": 361, "s390x": 351,
}  # fmt: skip

# enum bpf_cmd
_MAP_CREATE, _MAP_LOOKUP, _MAP_UPDATE, _PROG_LOAD, _OBJ_PIN, _OBJ_GET = 0, 1, 2, 5, 6, 7
_GET_INFO, _BTF_LOAD, _LINK_CREATE = 15, 18, 28

_LRU_HASH, _SK_STORAGE = 9, 24  # enum bpf_map_type
_NO_PREALLOC, _CLONE = 1, 1 << 9
_PROG_SOCK_OPS, _ATTACH_SOCK_OPS = 13, 3
_LINK_CGROUP: Final = 3  # enum bpf_link_type
_NAME: Final = b"smc_option"
_LICENCE: Final = b"Apache-2.0"  # the helpers of this program do not require the GPL
_LOG_SIZE: Final = 1 << 16  # bytes for the messages of the verifier; chosen


@functools.cache
def _libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    return library


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _bpf(command: int, attributes: bytes, size: int = 0) -> int:
    """Call bpf(2) with ``attributes``, which zeros extend to ``size`` bytes."""
    number = _SYSTEM_CALL.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"the number of bpf(2) on {platform.machine()} is not known")
    attributes = attributes.ljust(size, b"\0")
    block = ctypes.create_string_buffer(attributes, len(attributes))
    return _checked(
        _libc().syscall(
            ctypes.c_long(number), ctypes.c_int(command), block, ctypes.c_uint(len(attributes))
        )
    )


def _address(block: Any) -> int:
    return ctypes.addressof(block)


def _integer_type() -> bytes:
    """BTF with one type, number 1: a signed 32-bit `int`."""
    types = struct.pack("=IIII", 1, 1 << 24, 4, 1 << 24 | 32)
    names = b"\0int\0"
    head = struct.pack("=HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(types), len(types), len(names))
    return head + types + names


def create_socket_storage() -> int:
    """A map from sockets to 4-byte words; an accepted socket inherits its listener's."""
    types = _integer_type()
    block = ctypes.create_string_buffer(types, len(types))
    # The kernel refuses a map of this kind without type information.
    btf = _bpf(_BTF_LOAD, struct.pack("=QQIII", _address(block), 0, len(types), 0, 0), 32)
    try:
        return _bpf(
            _MAP_CREATE,
            struct.pack(
                "=IIIIIII16sIIIII",
                _SK_STORAGE, 4, 4, 0, _NO_PREALLOC | _CLONE, 0, 0, _NAME, 0, btf, 1, 1, 0,
            ),
        )  # fmt: skip
    finally:
        os.close(btf)


def create_hash(key_size: int, entries: int) -> int:
    """A map from keys to 4-byte words; a full map drops the least recently used entry."""
    return _bpf(
        _MAP_CREATE, struct.pack("=IIIIIII16s", _LRU_HASH, key_size, 4, entries, 0, 0, 0, _NAME)
    )


def load_sock_ops(code: bytes) -> int:
    """Load a sock_ops program.  If the verifier writes a log, the error has it as a note."""
    try:
        return _load(code, None)
    except OSError as first:
        if first.errno not in (errno.EACCES, errno.EINVAL):
            raise
        log = ctypes.create_string_buffer(_LOG_SIZE)
        try:
            return _load(code, log)
        except OSError as error:
            if log.value:
                error.add_note(log.value.decode(errors="replace"))
            raise


def _load(code: bytes, log: Any) -> int:
    block = ctypes.create_string_buffer(code, len(code))
    licence = ctypes.create_string_buffer(_LICENCE)
    return _bpf(
        _PROG_LOAD,
        struct.pack(
            "=IIQQIIQII16sII",
            _PROG_SOCK_OPS, len(code) // 8, _address(block), _address(licence),
            1 if log else 0, _LOG_SIZE if log else 0, _address(log) if log else 0,
            0, 0, _NAME, 0, _ATTACH_SOCK_OPS,
        ),
    )  # fmt: skip


def attach_to_cgroup(program: int, cgroup: Path) -> int:
    """A link that runs the program for the cgroup's sockets until its last descriptor closes."""
    target = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return _bpf(_LINK_CREATE, struct.pack("=IIII", program, target, _ATTACH_SOCK_OPS, 0), 48)
    finally:
        os.close(target)


def update(table: int, key: int, value: int) -> None:
    """table[key] = value, for 4-byte keys and words; a socket's key is its descriptor."""
    _element(_MAP_UPDATE, table, key, value)


def lookup(table: int, key: int) -> int:
    """table[key].  Raises OSError: ENOENT if there is no such key."""
    return _element(_MAP_LOOKUP, table, key, 0)


def _element(command: int, table: int, key: int, value: int) -> int:
    key_block, value_block = ctypes.c_int(key), ctypes.c_uint32(value)
    _bpf(command, struct.pack("=IIQQQ", table, 0, _address(key_block), _address(value_block), 0))
    return value_block.value


def pin(fd: int, path: Path) -> None:
    """Pin the object: its name in a BPF file system keeps it alive."""
    name = ctypes.create_string_buffer(os.fsencode(path))
    _bpf(_OBJ_PIN, struct.pack("=QII", _address(name), fd, 0))


def open_pinned(path: Path) -> int:
    """A descriptor of the object that is pinned at ``path``."""
    name = ctypes.create_string_buffer(os.fsencode(path))
    return _bpf(_OBJ_GET, struct.pack("=QII", _address(name), 0, 0))


def map_kind(fd: int) -> tuple[bool, bool]:
    """Two booleans: ``fd`` is a map of sockets' words; the map is frozen."""
    lines = Path(f"/proc/self/fdinfo/{fd}").read_bytes().splitlines()
    fields = {line.partition(b":")[0]: line.partition(b":")[2].strip() for line in lines}
    storage = fields.get(b"map_type") == b"%d" % _SK_STORAGE and fields.get(b"value_size") == b"4"
    return storage, fields.get(b"frozen", b"0") != b"0"


def link_cgroup(fd: int) -> int:
    """The id of the cgroup for which a link runs its program; 0: no such link, or a dead one."""
    info = ctypes.create_string_buffer(64)
    _bpf(_GET_INFO, struct.pack("=IIQ", fd, len(info), _address(info)))
    kind, _, _, _, cgroup, attach_type = struct.unpack_from("=IIIIQI", info)
    return int(cgroup) if kind == _LINK_CGROUP and attach_type == _ATTACH_SOCK_OPS else 0


def mount_bpffs(directory: Path) -> None:
    """Mount a BPF file system, where objects can be pinned, on a directory.

    All users may enter it.  Each pinned object has a mode of its own.
    """
    _checked(_libc().mount(b"bpf", os.fsencode(directory), b"bpf", ctypes.c_ulong(0), b"mode=0755"))


def unmount(directory: Path) -> None:
    """Unmount the file system on ``directory``."""
    _checked(_libc().umount2(os.fsencode(directory), ctypes.c_int(0)))
