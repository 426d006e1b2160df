"""TCP connections by happy eyeballs, announced before they are made.

On one host the client must announce its source address before it connects (see
`rendezvous.discovery`), so the connection attempts are made here and not by
`trio.open_tcp_stream`; RFC 8305 describes the order and the stagger.

The client chooses a port at random and announces it.  The option IP_LOCAL_PORT_RANGE (Linux 6.3)
then leaves the kernel only this port when the socket connects.  So sockets with different
destinations share ports, as with plain TCP, and other programs lose no ports.  If the port is
taken, the client withdraws the announcement and chooses another port.  Before Linux 6.3 the client
must bind the socket to the port, and then only sockets with SO_REUSEADDR can share it.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import random
import socket as stdlib_socket
import struct
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import trio
from trio.socket import from_stdlib_socket

from trio_smc._base.reasons import FallbackReason
from trio_smc._base.waits import wait_writable
from trio_smc.host.addresses import (
    is_same_host,
    is_wildcard,
    plain_address,
    reached_address,
    source_address,
)
from trio_smc.host.private_directory import is_named
from trio_smc.host.tcp import close_with_reset, disconnect, is_established
from trio_smc.rendezvous.discovery.same_host import Announcement, AnySocket, Found
from trio_smc.stack.policy import Route, RouteHost, choose_route

if TYPE_CHECKING:
    from trio_smc._base.timers import Timers
    from trio_smc.config.config import Config
    from trio_smc.rendezvous.discovery.same_host import Discovery
    from trio_smc.rendezvous.discovery.tcp_option import TcpOption

__all__ = [
    "IP_LOCAL_PORT_RANGE",
    "Attempt",
    "DialHost",
    "Target",
    "connect_again",
    "connect_attempt",
    "connect_tcp",
    "numeric_targets",
]

_REMEMBERED = 256
"""Numeric addresses whose targets are remembered.  Chosen."""
_PORTS_TRIED = 32
"""Ports that are announced for one connection before it is TCP.  Chosen: if half of the ports are
taken, all of 32 random ports are taken once in 2**32 connections."""
_PORTS_BOUND = 256
"""Ports that are tried with bind(2) for one connection before it is TCP.  Chosen: such a try is
cheaper, because nothing is announced."""
_PORTS_SHARED = 1024
"""Ports that are tried for one TCP connection if the kernel finds no free port.  Chosen: with such
tries 400 of 400 connections to a plain server were made while other sockets were bound to all
ports, and without them 9 (`tests/connecting/test_ports.py`)."""
_PORTS_KNOWN = 10.0
"""Seconds until the system's range of ports is read again.  Chosen."""
_CONNECT_TIME = 127.0
"""Seconds that TCP tries to connect: 2**7 - 1 for the 6 repetitions of net.ipv4.tcp_syn_retries."""
_LOST_PATIENCE = 1.0
"""Seconds for which a lost connection is made again before it is TCP.  Chosen; no measurement is
recorded."""
_FASTOPEN_CONNECT = getattr(stdlib_socket, "TCP_FASTOPEN_CONNECT", 30)
IP_LOCAL_PORT_RANGE = 51  # linux/include/uapi/linux/in.h
_USUAL_PORTS = 32768, 60999
_TRIOS_PREFIX = "Error connecting to "
_CANNOT_CONNECT = "cannot connect to "
_RANGE = struct.Struct("=I")  # the last port in the upper half, the first in the lower one
_DIRECTORY = (
    FallbackReason.OTHER_USER,
    FallbackReason.DIRECTORY_UNUSABLE,
    FallbackReason.DIRECTORY_FULL,
)
Target = tuple[int, int, int, Any]
"""Family, type, protocol and address of a socket to be connected."""


class DialHost(RouteHost, Protocol):
    """The stack, as seen by an attempt to connect."""

    discovery: Discovery
    tcp_option: TcpOption
    timers: Timers

    def call(self) -> AbstractContextManager[None]:
        """A context manager for a wait in a user's call: leaving the stack ends the wait with
        ClosedResourceError."""


@dataclass(slots=True, eq=False)
class Attempt:
    """A TCP connection, and the result of discovery before it was opened.

    Attributes:
      named: the (host, port) that the user gave.
      peer: the address and port that ``named`` resolved to.
      announcement: of this connection; or why it was not announced.
      offers: True if the TCP option is to show if the peer speaks SMC-R.
      here: the source address that was announced.
      route: the RNIC that serves the connection, or why none does; None: not decided yet.
      elsewhere: the listeners of another network namespace, if the address is proven to lead to
        them.
      bare: the socket that ``sock`` wraps, if it is known.
      plain: the same socket, if this module made it: no program has set options or bound it.
      clc_begun: CLC messages were exchanged.
      cancelled: the stack was closed.
      address, local: the arguments of `connect_attempt`.
      began: when that was called for the first time, by the clock of the stack's timers.
    """

    sock: trio.socket.SocketType
    named: tuple[str, int]
    peer: tuple[str, int]
    announcement: Announcement | FallbackReason | None = None
    offers: bool = False
    here: str | None = None
    route: Route | None = None
    elsewhere: Found | None = None
    bare: stdlib_socket.socket | None = None
    plain: stdlib_socket.socket | None = None
    clc_begun: bool = False
    cancelled: bool = False
    address: Any = None
    local: str | None = None
    began: float = 0.0

    def assumed(self, config: Config) -> bool:
        """True if the peer is known to speak SMC-R without discovery."""
        return config.assumes(self.named, self.peer)

    def close(self) -> None:
        self.withdraw()
        self.sock.close()

    def cancel(self) -> None:
        """End the attempt from outside its task."""
        self.cancelled = True
        if isinstance(self.announcement, Announcement):
            self.announcement.cancel()
        close_with_reset(self.sock)

    def refrain(self) -> None:
        """Withdraw: the connection is going to be TCP, or to have another port."""
        self.withdraw()
        self.announcement = FallbackReason.OUT_OF_RESOURCES

    def renew(self) -> None:
        """Replace the socket, because a bound socket cannot change its port."""
        plain = self.plain
        if plain is None:
            raise RuntimeError("the socket is the caller's")
        self.withdraw()
        self.plain = self.bare = stdlib_socket.socket(plain.family, plain.type, plain.proto)
        self.sock.close()
        self.sock = from_stdlib_socket(self.plain)

    def withdraw(self) -> None:
        """Withdraw the announcement, if there is one.  Idempotent."""
        if isinstance(self.announcement, Announcement):
            self.announcement.close()


async def connect_tcp(
    stack: DialHost, host: str | bytes, port: int, delay: float, local: str | None, config: Config
) -> Attempt:
    """The first connection that succeeds, of attempts staggered by ``delay`` seconds."""
    if host is None:
        raise ValueError("host cannot be None")
    if not isinstance(port, int):
        raise TypeError("port must be an integer")
    targets = await _resolve(stack, host, port)
    named = (host if isinstance(host, str) else host.decode("ascii", "replace"), port)
    connect = partial(_connect_one, stack, named=named, local=local, config=config)
    if len(targets) > 1:
        with stack.call():
            return await _first_of(targets, named, delay, connect)
    try:
        return await connect(targets[0])
    except OSError as error:
        raise _nothing_connected(named, [error]) from error


async def _resolve(stack: DialHost, host: str | bytes, port: int) -> Sequence[Target]:
    """As `trio.socket.getaddrinfo`, but without a pass of the scheduler for a numeric address."""
    await trio.lowlevel.checkpoint_if_cancelled()
    try:
        return numeric_targets(host, port)
    except (stdlib_socket.gaierror, UnicodeError):
        with stack.call():
            return _alternate_families(
                await trio.socket.getaddrinfo(host, port, type=stdlib_socket.SOCK_STREAM)
            )


@lru_cache(_REMEMBERED)
def numeric_targets(host: str | bytes, port: int) -> Sequence[Target]:
    """The targets of a numeric address, which do not change.

    Raises gaierror, UnicodeError: ``host`` is a name.
    """
    numeric = stdlib_socket.AI_NUMERICHOST | stdlib_socket.AI_NUMERICSERV
    if b"%" in host if isinstance(host, bytes) else "%" in host:
        raise UnicodeError("the index of an interface may change")
    return _alternate_families(
        stdlib_socket.getaddrinfo(host, port, type=stdlib_socket.SOCK_STREAM, flags=numeric)
    )


async def _first_of(
    targets: Sequence[Target],
    named: tuple[str, int],
    delay: float,
    connect: Callable[[Target], Awaitable[Attempt]],
) -> Attempt:
    """Connect to several targets, staggered; returns the first connection (RFC 8305, 5)."""
    winners: list[Attempt] = []
    errors: list[OSError] = []
    defects: list[Exception] = []

    async def attempt(target: Target, failed: trio.Event, race: trio.CancelScope) -> None:
        try:
            winners.append(await connect(target))
        except OSError as error:
            errors.append(error)
            failed.set()
        except Exception as defect:
            defects.append(defect)  # raised below as it is; a nursery would raise a group
            race.cancel()
        else:
            race.cancel()

    try:
        async with trio.open_nursery() as nursery:
            for target in targets:
                failed = trio.Event()
                nursery.start_soon(attempt, target, failed, nursery.cancel_scope)
                with trio.move_on_after(delay):
                    await failed.wait()
        if defects:
            raise defects[0]
        if not winners:
            raise _nothing_connected(named, errors)
        return winners.pop(0)
    finally:
        for loser in winners:
            loser.close()


def _nothing_connected(named: tuple[str, int], errors: list[OSError]) -> OSError:
    """One error for the failure of all attempts, with the number of the last one."""
    host = f"[{named[0]}]" if ":" in named[0] else named[0]
    texts = "; ".join(dict.fromkeys(_cause_text(error) for error in errors))
    failure = OSError(errors[-1].errno, f"cannot connect to {host}:{named[1]}: {texts}")
    failure.__cause__ = errors[0] if len(errors) == 1 else ExceptionGroup(str(failure), errors)
    return failure


def _cause_text(error: OSError) -> str:
    """The text of an error without the error's number and without the address."""
    text = error.strerror or str(error)
    if error.errno and text.startswith((_TRIOS_PREFIX, _CANNOT_CONNECT, os.strerror(error.errno))):
        text = os.strerror(error.errno)
        text = text[:1].lower() + text[1:]
    return text


def _alternate_families(found: Iterable[tuple[int, int, int, str, Any]]) -> list[Target]:
    """The resolver's order, except that the second target is of the other family (RFC 8305, 4)."""
    ordered = list(
        dict.fromkeys(
            (family, kind, protocol, address) for family, kind, protocol, _, address in found
        )
    )
    for place, target in enumerate(ordered[1:], 1):
        if target[0] != ordered[0][0]:
            ordered.insert(1, ordered.pop(place))
            break
    return ordered


async def _connect_one(
    stack: DialHost, target: Target, *, named: tuple[str, int], local: str | None, config: Config
) -> Attempt:
    family, kind, protocol, address = target
    # Not `trio.socket.socket`: a program may have replaced it by sockets that call this function.
    plain = stdlib_socket.socket(family, kind, protocol)
    peer = (reached_address(address[0], local), address[1])
    attempt = Attempt(from_stdlib_socket(plain), named, peer, bare=plain, plain=plain)
    await connect_attempt(stack, attempt, address, local, config)
    return attempt


async def _connect(stack: DialHost, attempt: Attempt, address: Any) -> None:
    """Connect without a pass of the scheduler over loopback.

    Over loopback the first connect(2) makes the connection.  An error is read by SO_ERROR, as Trio
    does, because a second connect(2) would leave the socket in another state.
    """
    bare = attempt.bare
    if bare is None:
        with stack.call():
            await attempt.sock.connect(address)
        return
    error = bare.connect_ex(address)
    if error == errno.EINPROGRESS:
        if is_established(bare):
            return
        error = bare.getsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_ERROR)
        error = error or errno.EINPROGRESS
    elif error:
        raise OSError(error, os.strerror(error))
    if error == errno.EINPROGRESS:
        with stack.call():
            await wait_writable(bare)
        error = bare.getsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_ERROR)
    if error:
        # The text is Trio's, because programs may look for it.
        raise OSError(error, f"{_TRIOS_PREFIX}{address!r}: {os.strerror(error)}")


async def connect_attempt(
    stack: DialHost, attempt: Attempt, address: Any, local: str | None, config: Config
) -> None:
    """Announce a connection and connect; on an error the socket is closed.

    local: the source address, to which a socket of the caller is bound already; None, or a wildcard
      address: any.
    """
    bound = attempt.plain is None and local is not None
    if attempt.address is None:
        attempt.address, attempt.local, attempt.began = address, local, stack.timers.now()
    try:
        source = await _announced_source(stack, attempt, address, local, config)
        # A FallbackReason is a string, too.
        if isinstance(source, str) and not isinstance(source, FallbackReason):
            _send_syn_at_once(attempt)
            if bound:
                await _announce(stack, attempt, config, (source, attempt.sock.getsockname()[1]))
            elif await _connect_announced(stack, attempt, address, source, config, local):
                return
        else:
            attempt.announcement = source
        if attempt.offers or (source is None and attempt.assumed(config)):
            _send_syn_at_once(attempt)
        if local is not None and not bound:
            with stack.call():
                await _bind(attempt, local, numeric=False)
        if attempt.offers:
            attempt.announcement = stack.tcp_option.offer(attempt.sock)
            attempt.offers = attempt.announcement is None
        if await _connected(stack, attempt, address):
            _withdraw_if_elsewhere(attempt)
            return
        if (
            bound
            or attempt.plain is None
            or not await _connect_shared(stack, attempt, address, source)
        ):
            number = errno.EADDRNOTAVAIL
            raise OSError(number, f"{_CANNOT_CONNECT}{address!r}: {os.strerror(number)}")
    except BaseException as error:
        if attempt.plain is None and isinstance(error, Exception):
            attempt.withdraw()  # as over TCP, the caller may use its socket for another attempt
        else:
            attempt.close()
        raise


async def connect_again(stack: DialHost, attempt: Attempt, config: Config) -> bool:
    """Connect once more, because the server's kernel has lost the connection; False: too late.

    On an error the socket is closed.
    """
    patience = _CONNECT_TIME if config.require_smc else _LOST_PATIENCE
    if stack.timers.now() >= attempt.began + patience or not disconnect(attempt.sock):
        return False
    attempt.announcement, attempt.here = None, None
    attempt.offers, attempt.route, attempt.elsewhere = False, None, None
    await connect_attempt(stack, attempt, attempt.address, attempt.local, config)
    return True


def _send_syn_at_once(attempt: Attempt) -> None:
    """Switch TCP_FASTOPEN_CONNECT off: connect(2) would send the SYN with the first data only, and
    over SMC-R no data follows."""
    if attempt.plain is None:  # otherwise the socket is new
        sock = attempt.bare or attempt.sock
        try:
            if sock.getsockopt(stdlib_socket.IPPROTO_TCP, _FASTOPEN_CONNECT):
                sock.setsockopt(stdlib_socket.IPPROTO_TCP, _FASTOPEN_CONNECT, 0)
        except OSError:
            pass  # a system without the option


async def _connect_announced(
    stack: DialHost, attempt: Attempt, address: Any, source: str, config: Config, local: str | None
) -> bool:
    """Announce a port, and connect from it.

    local: the address that the program has chosen, to bind to; it may be a wildcard address.

    False: not connected, because no listener is announced to, or because all ports are taken.
    """
    attempt.here = plain_address(source)
    sock = attempt.bare or attempt.sock
    wanted = _option(sock) if attempt.plain is None else _default_option(sock)
    if wanted is None:
        return await _connect_bound(stack, attempt, address, source, config)
    opened = False
    try:
        for port in islice(_ports(wanted), _PORTS_TRIED):
            await _announce(stack, attempt, config, (attempt.here, port))
            announced = attempt.announcement
            if announced is None:
                continue  # another connection from that port is announced
            if not isinstance(announced, Announcement):
                return False
            if local is not None:
                await _bind(attempt, local, numeric=True)
            try:
                _set_option(sock, _RANGE.pack(port << 16 | port))
            except OSError:  # a system that has the option, but refuses to set it
                attempt.refrain()
                return await _connect_bound(stack, attempt, address, source, config)
            if not announced.is_too_late() and await _connected(stack, attempt, address):
                opened = True
                _withdraw_if_elsewhere(attempt, port)
                return True
            attempt.refrain()
        if attempt.announcement is None:
            attempt.announcement = FallbackReason.OUT_OF_RESOURCES
        return False
    finally:
        # The option has no effect after connect(2), but the caller may read it from its own socket.
        if attempt.plain is None or not opened:
            try:  # noqa: SIM105 - each connection comes here, and this takes half the time
                _set_option(sock, wanted)
            except OSError:
                pass  # the socket is closed


def _withdraw_if_elsewhere(attempt: Attempt, port: int | None = None) -> None:
    """Withdraw the announcement if the kernel has chosen another address or port than this one.

    The system's range of ports or its routes have just changed, or options of the program's socket
    (SO_BINDTODEVICE, SO_MARK, IP_UNICAST_IF) lead to another route.
    """
    if isinstance(attempt.announcement, Announcement):
        name = (attempt.bare or attempt.sock).getsockname()
        if plain_address(name[0]) != attempt.here or port not in (None, name[1]):
            attempt.refrain()


async def _connect_bound(
    stack: DialHost, attempt: Attempt, address: Any, source: str, config: Config
) -> bool:
    """`_connect_announced` before Linux 6.3."""
    if attempt.plain is None:
        # A socket of the caller cannot be replaced for a second try, so it gets a port of its own.
        try:
            with stack.call():
                await attempt.sock.bind((source, 0))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise _unusable(source, error) from error
            attempt.refrain()
            return False
        await _announce(stack, attempt, config)
        await _connect(stack, attempt, address)
        return True
    tries = 0
    for port in islice(_ports(), _PORTS_BOUND):
        attempt.sock.setsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_REUSEADDR, 1)
        try:
            attempt.plain.bind((source, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            raise _unusable(source, error) from error
        await _announce(stack, attempt, config)
        announced = attempt.announcement
        if (
            isinstance(announced, Announcement)
            and not announced.is_too_late()
            and await _connected(stack, attempt, address)
        ):
            return True
        attempt.renew()
        tries += 1
        if isinstance(announced, FallbackReason) or tries == _PORTS_TRIED:
            break
    return False


async def _connect_shared(
    stack: DialHost, attempt: Attempt, address: Any, source: str | None
) -> bool:
    """Connect from a port to which other sockets are bound, because there is no free port.

    Before Linux 6.3 the kernel does not choose such a port.  False: no such port can be used.
    """
    if source is None or isinstance(source, FallbackReason) or _option(attempt.sock) is not None:
        return False
    for port in islice(_ports(), _PORTS_SHARED):
        attempt.renew()
        attempt.sock.setsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            with stack.call():
                await attempt.sock.bind((source, port))
            if await _connected(stack, attempt, address):
                return True
    return False


async def _announce(
    stack: DialHost, attempt: Attempt, config: Config, source: tuple[str, int] | None = None
) -> None:
    """Announce a connection: set ``attempt.announcement``, to None if another connection with these
    addresses is announced.

    source: address and port of this side; None: the socket is bound to them.
    """
    if source is None:
        name = attempt.sock.getsockname()
        source = name[0], name[1]
    attempt.here = plain_address(source[0])
    discovery = stack.discovery
    sock = attempt.bare or attempt.sock
    for waited in (False, True):
        attempt.announcement = discovery.announce(
            source,
            attempt.peer,
            sock,
            required=config.require_smc,
            elsewhere=attempt.elsewhere,
        )
        if attempt.announcement is not FallbackReason.OUT_OF_RESOURCES or not discovery.is_full:
            return
        if not waited:
            with stack.call():
                await discovery.wait_for_place(required=config.require_smc)


async def _connected(stack: DialHost, attempt: Attempt, address: Any) -> bool:
    """Connect.  False: another connection has these addresses and ports."""
    try:
        await _connect(stack, attempt, address)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return False
    return True


async def _bind(attempt: Attempt, source: str, *, numeric: bool) -> None:
    """Bind to an address without a port, which connect(2) chooses, so that sockets may share it.

    numeric: ``source`` is no name.
    """
    sock = attempt.sock
    try:
        with contextlib.suppress(OSError, AttributeError):
            sock.setsockopt(stdlib_socket.IPPROTO_IP, stdlib_socket.IP_BIND_ADDRESS_NO_PORT, 1)
        if numeric and attempt.plain is not None and "%" not in source:
            attempt.plain.bind((source, 0))  # Trio would look the address up in a thread
        else:
            await sock.bind((source, 0))
    except OSError as error:
        raise _unusable(source, error) from error


def _unusable(source: str, error: OSError) -> OSError:
    return OSError(
        error.errno, f"local address {source!r} cannot be used for this connection: {error}"
    )


def _option(sock: AnySocket) -> bytes | None:
    """The value of IP_LOCAL_PORT_RANGE, zeros by default; None: before Linux 6.3."""
    try:
        return sock.getsockopt(stdlib_socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, _RANGE.size)
    except OSError:
        return None


_defaults: dict[int, bytes | None] = {}


def _default_option(sock: AnySocket) -> bytes | None:
    """`_option` of a new socket: the same for all of them."""
    number = IP_LOCAL_PORT_RANGE
    if number not in _defaults:
        _defaults[number] = _option(sock)
    return _defaults[number]


def _set_option(sock: AnySocket, ports: bytes) -> None:
    sock.setsockopt(stdlib_socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, ports)


def _ports(wanted: bytes = bytes(_RANGE.size)) -> Iterator[int]:
    """Ports for a connection, in random order and each once.

    wanted: the program's IP_LOCAL_PORT_RANGE; zeros: the system's range.
    """
    first, last, reserved = _system_ports(int(time.monotonic() / _PORTS_KNOWN))
    [both] = _RANGE.unpack(wanted)
    low, high = both & 0xFFFF, both >> 16
    # The kernel ignores a limit outside the system's range (ip(7)).
    begins, ends = first <= low <= last, first <= high <= last
    first, last = low if begins else first, high if ends else last
    count = last - first + 1
    place, step = int(random.random() * count), 0
    for _ in range(count):
        if first + place not in reserved:
            yield first + place
        if not step:  # chosen late, because the first port nearly always suffices
            step = random.randrange(1, count + 1)
            while math.gcd(step, count) != 1:
                step += 1
        place = (place + step) % count


@lru_cache(1)
def _system_ports(_moment: int) -> tuple[int, int, frozenset[int]]:
    """The range of ports for connections, and those in it that are reserved (ip-sysctl)."""
    try:
        first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_bytes().split())
        listed = Path("/proc/sys/net/ipv4/ip_local_reserved_ports").read_bytes().strip()
        ranges = [each.split(b"-") for each in listed.split(b",") if each]
    except OSError:
        return *_USUAL_PORTS, frozenset()
    reserved = (range(int(each[0]), int(each[-1]) + 1) for each in ranges)
    return first, last, frozenset(chain.from_iterable(reserved))


async def _announced_source(
    stack: DialHost, attempt: Attempt, address: Any, local: str | None, config: Config
) -> str | FallbackReason | None:
    """The source address to announce; or why the connection is not announced; or None if discovery
    on this host does not apply.

    Sets ``attempt.route``; ``attempt.offers`` if the TCP option is used instead; and
    ``attempt.elsewhere`` if the listener is in another network namespace of this host.
    """
    if attempt.assumed(config):
        return None
    host, port = address[0], address[1]
    if plain_address(host) != attempt.peer[0]:
        host = attempt.peer[0]  # a wildcard address, which stands for this host
    # The kernel chooses the address of a socket that is bound to a wildcard address, too.
    source = source_address(host, port) if local is None or is_wildcard(local) else local
    try:
        plain = plain_address(source or "")
    except ValueError:
        return None  # there is no route, or the local address is a name
    if source is None:
        return None
    here = is_same_host(plain, host)
    unproven = FallbackReason.PEER_NOT_CAPABLE
    if config.discovery == "auto" and not here:
        near = choose_route(stack, config, plain, attempt.peer, attempt.named, near=True)
        with stack.call():
            found = await _prove(stack, attempt, near, config)
        if isinstance(found, Found):
            attempt.elsewhere, attempt.route = found, near
            return source
        unproven = found
    attempt.route = choose_route(stack, config, plain, attempt.peer, attempt.named)
    reason = attempt.route.reason
    if reason is FallbackReason.SHORT_CONNECTIONS:
        sock = attempt.bare or attempt.sock
        if stack.discovery.has_ended(plain, attempt.peer, sock):
            # The listeners have ended, so the records of short connections were cleared.
            attempt.route = choose_route(stack, config, plain, attempt.peer, attempt.named)
            reason = attempt.route.reason
        elif here:
            stack.discovery.mark_short(plain, attempt.peer)
    if reason is not None:
        return reason if unproven is FallbackReason.PEER_NOT_CAPABLE else unproven
    if config.discovery == "tcp-option" or not here:
        attempt.offers = True
        return None
    return source


async def _prove(
    stack: DialHost, attempt: Attempt, near: Route, config: Config
) -> Found | FallbackReason:
    """The listeners in other network namespaces of this host, or why none was found.

    ``near``: the route to a peer on this host.
    """
    reason = near.reason
    if reason is not None:
        # If containers are to share a directory that cannot be used, the user is to know it.
        is_cause = reason in _DIRECTORY and is_named(config.private_directory())
        return reason if is_cause else FallbackReason.PEER_NOT_CAPABLE
    return await stack.discovery.prove(near.local, attempt.peer, attempt.sock)
