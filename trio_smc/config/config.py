"""`Config`: the settings of a stack or a call, with their defaults and checks.

Lists of connections contain networks, (host, port) pairs, or ports of services.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, cast

from trio_smc._base.paths import check_tilde
from trio_smc.capture.frames import MAX_PAYLOAD
from trio_smc.config import environment
from trio_smc.host.pnet import problem_of_name
from trio_smc.host.private_directory import default_directory
from trio_smc.wire.fields import (
    MAX_EIDS,
    RMBE_SIZE_UNIT,
    encode_ueid,
    rmbe_size_code,
    rmbe_size_for,
    rmbe_size_of,
)

if TYPE_CHECKING:
    from trio_smc.rnic.verbs import Rnic

__all__ = [
    "CHECKS",
    "DEFAULT_PINS",
    "Config",
    "Listed",
    "check_list",
    "is_listed",
    "is_path",
    "short_repr",
]


Listed = str | int | tuple[str, int]
"""A network ("192.0.2.0/24"), a port, or a pair of host and port."""

_Parsed = ipaddress.IPv4Network | ipaddress.IPv6Network | tuple[str, int] | int


def check_list(name: str, entries: object, *, ports: bool = False) -> None:
    """Raise ValueError, with the name of the setting, if ``entries`` is no list of connections.

    Args:
      ports: True if a port alone is an entry.
    """
    kinds = "networks, (host, port) pairs and ports" if ports else "networks and (host, port) pairs"
    if not isinstance(entries, tuple) or len(entries) > _MOST_ENTRIES:
        _refuse(name, entries, f"a tuple of at most {_MOST_ENTRIES} {kinds}")
    for entry in entries:
        _check_entry(name, entry, kinds, ports)


def _check_entry(name: str, entry: object, kinds: str, ports: bool) -> None:
    match entry:
        # The types are compared here, because for the cache of `_parse` 1 equals True.
        case int() if ports and _is_integer(entry) and 0 < entry < 65536:
            return
        case str() if _is_text(entry, _LONGEST_NAME):
            try:
                ipaddress.ip_network(entry)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            return
        case (str() as host, int() as port) if (
            isinstance(entry, tuple)
            and _is_text(host, _LONGEST_NAME)
            and _is_integer(port)
            and 0 < port < 65536
        ):
            return
    _refuse(name, entry, f"one of {kinds}, with ports from 1 to 65535")


def is_listed(entry: Listed, addresses: tuple[tuple[str, int], ...]) -> bool:
    """True if the entry matches one of the (host, port) ``addresses``."""
    parsed = _parse(entry)
    return any(_matches(parsed, host, port) for host, port in addresses)


@lru_cache(maxsize=1024)
def _parse(entry: Listed) -> _Parsed:
    """The entry as a network, a port, or a pair whose host is in canonical form."""
    match entry:
        case str():
            return ipaddress.ip_network(entry)
        case bool():
            pass
        case int() as port if 0 < port < 65536:
            return port
        case (str() as host, int() as port) if 0 < port < 65536:
            return _canonical(host), port
    raise ValueError(f"{short_repr(entry)} is neither a network nor a (host, port) pair")


def _matches(entry: _Parsed, host: str, port: int) -> bool:
    if isinstance(entry, int):
        return entry == port
    if isinstance(entry, tuple):
        return entry == (_canonical(host), port)
    try:
        return ipaddress.ip_address(host.partition("%")[0]) in entry
    except ValueError:
        return False  # a name


def _canonical(host: str) -> str:
    try:
        return str(ipaddress.ip_address(host.partition("%")[0]))
    except ValueError:
        return host.lower()


DEFAULT_PINS = Path("/run/trio-smc/tcp-option")
"""The default directory in which ``trio-smc setup`` pins the BPF objects of the TCP option."""

_MAX_SIZE_CODE = 15
"""Largest code of four bits."""
_RFC_MAX_SIZE_CODE = 5
"""Largest code of RFC 7609, A.2.3: 512 KiB."""
# Measured with rings of 1 to 16 MiB (docs/decisions.md, "size of a software RNIC's RMB element").
_SOFTWARE_RECEIVE_BUFFER = 4 << 20
_ROCE_RECEIVE_BUFFER = RMBE_SIZE_UNIT << _RFC_MAX_SIZE_CODE


# Settings of the stack, which a call's own config cannot change.
_STACK_FIELDS = frozenset(
    {
        "rnics", "pnet", "directory", "tcp_option", "spin", "wake", "llc_timeout",
        "first_contact_timeout", "test_link_interval", "test_link_timeout", "link_group_idle",
        "shutdown_timeout", "capture", "capture_payload", "control", "log_events",
        # Connections of different calls share RMBs, and CONFIRM LINK announced their layout.
        "rmbe_eye_catcher",
        # Both peers of a link group have agreed on one.
        "ueids",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of a stack or of one call; immutable. Times are seconds, sizes bytes.

    Some fields belong to the stack (``rnics``, ``pnet``, ``directory``, ``tcp_option``, ``spin``,
    ``wake``, ``rmbe_eye_catcher``, ``ueids``, ``shutdown_timeout``, ``control``, ``log_events``,
    ``capture``, ``capture_payload`` and the timers of links). The config of a single call leaves
    these fields at their defaults or has the stack's values; otherwise the call raises ValueError.

    Each value is checked when the config is made. The upper bound of a time is a day, or a year for
    idle link groups and tests of links. A wait for a peer's message takes at least 1 ms.

    Raises:
      ValueError: a value is of another kind, or outside of its range. The message names the field
        and its range: "first_contact_timeout: 0 is not a number of seconds from 0.001 to 86400".

    Attributes:
      rnics: a tuple of RNICs, or "auto": one software RNIC and every active RoCE port, including
        ports that appear later.
      pnet: the RoCE ports of network interfaces, if they are not on the interface: pairs of the
        names of an interface and an RNIC, or a file with an interface and its RNICs on each line.
      directory: the private directory, for software RNICs, same-host discovery and control
        sockets: the user's own (mode 0700, owner checked), or that of a group (mode 3770) whose
        members trust each other with their connections (docs/security.md). An absolute path; the
        directory above it must exist. None: ``$TRIO_SMC_DIRECTORY``, else
        ``$XDG_RUNTIME_DIR/trio-smc``, else ``/dev/shm/trio-smc-UID``. Processes in other network
        namespaces, such as containers, can be peers only if the directory is named here or by
        ``TRIO_SMC_DIRECTORY``.
      discovery: how this side learns that a peer speaks SMC-R. "auto": by same-host discovery, by
        the TCP option of RFC 7609, 3.1 for other hosts that an RNIC can reach, and by `assume`.
        "assume": every peer is assumed to speak SMC-R; a listener checks the first 4 bytes.
        "tcp-option": by the TCP option only.
      tcp_option: the directory with the BPF objects of the TCP option, from ``trio-smc setup``.
      assume: networks ("192.0.2.0/24") or (host, port) pairs treated as "assume" under "auto".
        A client compares the host as it was named and as it was resolved. A listener compares
        its own address, as bound and as accepted, and the client's.
      ueids: names that hosts with SMC-R version 2 have in common. At most 8, each of 1 to 32
        characters from A-Z, 0-9, "." and "-", the first a letter or a digit. "kernel": the names
        that ``smcr ueid`` has given to the Linux kernel, read when the stack opens. Empty: version
        1 only. Version 2 is used on RoCE ports only. The names are not secret.
      require_smc: fail instead of falling back to TCP.
      receive_buffer: size of this side's RMB elements, rounded up to 16 KiB << n. None: 4 MiB on
        software RNICs, 512 KiB on RoCE ports. Only software RNICs allow more than 512 KiB. Their
        memory is allocated when it is first written, so a connection uses all of it only after it
        has carried as many bytes.
      rmbe_eye_catcher: give RMB elements the eye catcher of RFC 7609, 4.2, on both sides. Used in
        any case if the peer uses it.
      spin: how long to poll before the scheduler sleeps; 0: not at all. After waits of up to four
        times this length the scheduler polls four times as long. It polls that long for the next
        message of a handshake, too, and after a connection was served for the next one.
      wake: how the sleeping scheduler waits for completions. "trio": on the RNIC's descriptor.
        "thread": a thread of the RNIC wakes the scheduler. "auto": "thread" on RoCE ports, "trio"
        on software RNICs.
      checkpoints: "amortised": every call checks for cancellation, but a call that need not wait
        lets other tasks run only if the calls since the last turn were many or took long. "strict":
        every call is a full Trio checkpoint, which takes most of the time of a small call
        (docs/how-it-works.md, "Checkpoints").
      handshake_timeout: for each CLC message (RFC 7609, C.5), and each step before the first. On
        one host a client waits a second at most for the process that accepts; if it requires
        SMC-R, as long as TCP tries to connect.
      first_contact_timeout: for each LLC message of a first contact (C.7).
      llc_timeout: for each later LLC reply (C.7).
      test_link_interval: idle time after which a link is tested (4.5.3).
      test_link_timeout: how long a TEST LINK reply may take.
      close_timeout: how long the peer may take to close its side (4.8.1).
      link_group_idle: how long a link group without connections is kept (3.5.4).
      shutdown_timeout: how long a closing stack may take to finish closed streams, and as long
        again for calls under way and for link groups to end.
      handshake_limit: while this many handshakes of one listener are under way, further
        connections are TCP at once. None: they wait for their turn. In both cases at most 128
        streams of a listener wait for `accept`, or as many as this limit if it is larger, and at
        most four times as many handshakes are under way. When these places are nearly used up,
        further connections of this host are TCP, unless one side requires SMC-R. Beyond that,
        connections wait in the TCP backlog, and connections whose handshake has made no progress
        for a second are reset.
      allow: connections that may use SMC-R; empty: all. Networks ("192.0.2.0/24"), (host, port)
        pairs and ports of the service. A client compares the address that it connects to. A
        listener compares its own address, and the client's with its own port.
      deny: connections that may not use SMC-R, even if `allow` has them. For example those that
        IPsec protects, because RDMA writes would bypass it (RFC 7609, 5).
      learn_short: use TCP for peers whose connections have been short several times in a row,
        unless this side (`require_smc`) or the peer requires SMC-R.
      control: answer the same user's ``trio-smc`` commands, on a socket in `directory`.
      log_events: write decisions about modes, changes of links, and aborts to the log
        "trio_smc.events", with fields for log collectors (docs/monitoring.md).
      capture: a file for every CLC, LLC and CDC message and RDMA write of the stack, as pcapng for
        Wireshark and ``trio-smc ladder``. It is created with mode 0600 and replaces a file of this
        user, in a directory where no other user can replace it. None: no capture.
      capture_payload: bytes of each RDMA write that the capture keeps, at most 4096; 0: only the
        length.
    """

    rnics: tuple[Rnic, ...] | Literal["auto"] = "auto"
    directory: Path | str | None = None
    pnet: tuple[tuple[str, str], ...] | Path | str = ()
    discovery: Literal["auto", "tcp-option", "assume"] = "auto"
    tcp_option: Path | str = DEFAULT_PINS
    assume: tuple[str | tuple[str, int], ...] = ()
    ueids: tuple[str, ...] | Literal["kernel"] = ()
    require_smc: bool = False
    receive_buffer: int | None = None
    rmbe_eye_catcher: bool = False
    spin: float = 50e-6
    wake: Literal["auto", "trio", "thread"] = "auto"
    checkpoints: Literal["amortised", "strict"] = "amortised"
    # The next five times and `link_group_idle` are those of Linux: CLC_WAIT_TIME
    # (net/smc/smc_clc.h), SMC_LLC_WAIT_FIRST_TIME, SMC_LLC_WAIT_TIME and
    # SMC_LLC_TESTLINK_DEFAULT_TIME (smc_llc.h), SMC_LGR_FREE_DELAY_SERV (smc_core.c). The other
    # times were chosen.
    handshake_timeout: float = 6
    first_contact_timeout: float = 5
    llc_timeout: float = 2
    test_link_interval: float = 30
    test_link_timeout: float = 2
    close_timeout: float = 60
    link_group_idle: float = 600
    shutdown_timeout: float = 5
    handshake_limit: int | None = None
    allow: tuple[Listed, ...] = ()
    deny: tuple[Listed, ...] = ()
    learn_short: bool = True
    control: bool = True
    log_events: bool = False
    capture: Path | str | None = None
    capture_payload: int = 0

    def __post_init__(self) -> None:
        for name in _field_names():
            value = getattr(self, name)
            try:
                CHECKS[name](name, value)
            except ValueError:
                raise
            except Exception as error:
                # Raised by the value itself, an instance of a subclass of `int`, `str` or `tuple`.
                text = f"{name}: {short_repr(value)} cannot be checked: {type(error).__name__}"
                raise ValueError(text) from error

    @property
    def learns_short(self) -> bool:
        """True if short connections may become TCP; see ``learn_short``."""
        return self.learn_short and not self.require_smc

    def private_directory(self) -> Path:
        """The directory of software RNICs, same-host discovery and control sockets.

        Raises:
          ValueError: `directory` is None, and ``TRIO_SMC_DIRECTORY`` is no absolute path.
        """
        if self.directory is not None:
            return Path(self.directory)
        return environment.directory() or default_directory().path

    def receive_buffer_for(self, kind: Literal["software", "roce"]) -> int:
        """Bytes of an RMB element on RNICs of this kind: 16 KiB << n."""
        if kind == "software":
            return rmbe_size_for(self.receive_buffer or _SOFTWARE_RECEIVE_BUFFER)
        wanted = self.receive_buffer or _ROCE_RECEIVE_BUFFER
        return rmbe_size_of(min(rmbe_size_code(wanted), _RFC_MAX_SIZE_CODE))

    def assumes(self, *addresses: tuple[str, int]) -> bool:
        """True if the peer of a connection is known to speak SMC-R without discovery.

        Args:
          addresses: (host, port) pairs of the connection: the peer's, or this side's.
        """
        if self.discovery != "auto":
            return self.discovery == "assume"
        return bool(self.assume) and any(is_listed(entry, addresses) for entry in self.assume)

    def permits(self, *addresses: tuple[str, int]) -> bool:
        """True if `allow` and `deny` let a connection use SMC-R.

        Args:
          addresses: (host, port) pairs of the connection, each with the port of the service.
        """
        if not (self.deny or self.allow):
            return True  # the default, on the path of each connection
        if any(is_listed(entry, addresses) for entry in self.deny):
            return False
        return not self.allow or any(is_listed(entry, addresses) for entry in self.allow)

    def check_call(self, stack: Config) -> None:
        """Raise ValueError if this config of one call changes a setting of the stack."""
        default = Config()
        for field in fields(self):
            if field.name not in _STACK_FIELDS:
                continue
            value: Any = getattr(self, field.name)
            if value not in (getattr(default, field.name), getattr(stack, field.name)):
                raise ValueError(f"{field.name} belongs to the stack, not to one call")


# --- checks of each field ------------------------------------------------------------------------

_DAY = 86400
_YEAR = 365 * _DAY
_MOST_ENTRIES = 4096  # of a list; chosen
_LONGEST_NAME = 255  # characters of a host's name (RFC 1035, 2.3.4); an interface's has fewer
_LONGEST_PATH = 4095  # bytes (limits.h: PATH_MAX, less its NUL)
_MOST_RNICS = 64  # chosen
_REPR_SIZE = 60  # characters of a wrong value

_Check = Callable[[str, object], None]


def short_repr(value: object) -> str:
    """A wrong value for an error message, shortened; never raises."""
    try:
        if _is_integer(value) and abs(cast(int, value)) >= 1 << 64:
            return f"an integer of {cast(int, value).bit_length()} bits"
        if isinstance(value, str | bytes | bytearray):
            value = value[:_REPR_SIZE]
        elif isinstance(value, tuple | list | dict | set | frozenset) and len(value) > _REPR_SIZE:
            return f"a {type(value).__name__} of {len(value)} entries"
        text = ascii(value)
    except Exception:  # raised by the value itself, or nested too deeply
        return f"a {type(value).__name__}"
    return text if len(text) <= _REPR_SIZE else f"{text[: _REPR_SIZE - 3]}..."


def _refuse(name: str, value: object, wanted: str) -> NoReturn:
    raise ValueError(f"{name}: {short_repr(value)} is not {wanted}")


def _choice(*allowed: str) -> _Check:
    def check(name: str, value: object) -> None:
        if not isinstance(value, str) or value not in allowed:
            _refuse(name, value, "one of " + ", ".join(repr(each) for each in allowed))

    return check


def _seconds(least: float, most: float) -> _Check:
    def check(name: str, value: object) -> None:
        # NaN fails the comparison. Integers are not converted, since they may exceed a float.
        if not _is_number(value) or not least <= cast(float, value) <= most:
            _refuse(name, value, f"a number of seconds from {least:g} to {most}")

    return check


def _integer(least: int, most: int, unit: str, *, optional: bool = False) -> _Check:
    def check(name: str, value: object) -> None:
        if value is None and optional:
            return
        if not _is_integer(value) or not least <= cast(int, value) <= most:
            _refuse(name, value, f"a number of {unit} from {least} to {most}")

    return check


def _boolean(name: str, value: object) -> None:
    if not isinstance(value, bool):
        _refuse(name, value, "true or false")


def _path(*, optional: bool = True, absolute: bool = False) -> _Check:
    def check(name: str, value: object) -> None:
        if value is None and optional:
            return
        if not is_path(value):
            _refuse(name, value, f"a path of 1 to {_LONGEST_PATH} bytes without NUL")
        _check_tilde(name, cast(Path, value))
        if absolute and not os.path.isabs(cast(Path, value)):
            _refuse(name, str(value), "an absolute path")

    return check


def _check_tilde(name: str, path: Path) -> None:
    try:
        check_tilde(path)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _rnics(name: str, value: object) -> None:
    from trio_smc.rnic.verbs import Rnic

    if isinstance(value, str) and value == "auto":
        return
    if not isinstance(value, tuple) or len(value) > _MOST_RNICS:
        _refuse(name, value, f"'auto' or a tuple of at most {_MOST_RNICS} RNICs")
    for each in value:
        if not isinstance(each, Rnic):
            _refuse(name, each, "an RNIC, such as SoftRnic()")


def _pnet(name: str, value: object) -> None:
    if is_path(value):
        _check_tilde(name, cast(Path, value))
        return
    if isinstance(value, tuple) and len(value) <= _MOST_ENTRIES:
        for pair in value:
            if (
                not isinstance(pair, tuple)
                or len(pair) != 2
                or not all(_is_text(each, _LONGEST_NAME) for each in pair)
                or problem_of_name("interface", pair[0])
                or problem_of_name("RNIC", pair[1])
            ):
                _refuse(name, pair, "a pair of the names of an interface and an RNIC")
        return
    _refuse(name, value, f"a tuple of at most {_MOST_ENTRIES} (interface, RNIC) pairs, or a file")


def _ueids(name: str, value: object) -> None:
    if isinstance(value, str) and value == "kernel":
        return
    if not isinstance(value, tuple) or len(value) > MAX_EIDS:
        _refuse(name, value, f"'kernel' or a tuple of at most {MAX_EIDS} names")
    for each in value:
        if not isinstance(each, str):
            _refuse(name, each, "a name")
        try:
            encode_ueid(each)
        except ValueError:
            _refuse(
                name, each,
                "a name of 1 to 32 characters from A-Z, 0-9, '.' and '-', the first a letter or "
                "a digit",
            )  # fmt: skip


CHECKS: Final[Mapping[str, _Check]] = {
    "rnics": _rnics,
    # Processes that share a directory may have different working directories.
    "directory": _path(absolute=True),
    "pnet": _pnet,
    "discovery": _choice("auto", "tcp-option", "assume"),
    "tcp_option": _path(optional=False),
    "assume": check_list,
    "ueids": _ueids,
    "require_smc": _boolean,
    "receive_buffer": _integer(1, rmbe_size_of(_MAX_SIZE_CODE), "bytes", optional=True),
    "rmbe_eye_catcher": _boolean,
    "spin": _seconds(0, 1),
    "wake": _choice("auto", "trio", "thread"),
    "checkpoints": _choice("amortised", "strict"),
    "handshake_timeout": _seconds(0.001, _DAY),
    "first_contact_timeout": _seconds(0.001, _DAY),
    "llc_timeout": _seconds(0.001, _DAY),
    "test_link_interval": _seconds(0.001, _YEAR),
    "test_link_timeout": _seconds(0.001, _DAY),
    "close_timeout": _seconds(0, _DAY),
    "link_group_idle": _seconds(0, _YEAR),
    "shutdown_timeout": _seconds(0, _DAY),
    "handshake_limit": _integer(0, 1 << 20, "handshakes", optional=True),
    "allow": partial(check_list, ports=True),
    "deny": partial(check_list, ports=True),
    "learn_short": _boolean,
    "control": _boolean,
    "log_events": _boolean,
    "capture": _path(),
    "capture_payload": _integer(0, MAX_PAYLOAD, "bytes"),
}
"""The check of each field of `Config`. If a field has no check, no `Config` can be made."""


@cache
def _field_names() -> tuple[str, ...]:
    return tuple(field.name for field in fields(Config))


def is_path(value: object) -> bool:
    """True if the value can be the name of a file."""
    if not isinstance(value, Path | str):
        return False
    try:
        return 0 < len(os.fsencode(value)) <= _LONGEST_PATH and "\0" not in str(value)
    except UnicodeEncodeError:
        return False  # a lone surrogate


def _is_text(value: object, longest: int) -> bool:
    """True if the value is a string of printable characters."""
    return isinstance(value, str) and 0 < len(value) <= longest and value.isprintable()


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_integer(value) or isinstance(value, float)
