"""TCP connections by happy eyeballs, announced before they are made.

On one host the client must announce its source address before it connects (see
`rendezvous.discovery`), so the connection attempts are made here and not by
`trio.open_tcp_stream`; RFC 8305 describes the order and the stagger.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket as stdlib_socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Protocol

import trio
from trio.socket import from_stdlib_socket

from trio_smc._base.reasons import FallbackReason
from trio_smc.host.addresses import is_same_host, plain_address, source_address
from trio_smc.rendezvous.discovery.same_host import Announcement
from trio_smc.stack.policy import Chooser, permitted_rnic

if TYPE_CHECKING:
    from trio_smc.config.config import Config
    from trio_smc.rendezvous.discovery.same_host import Discovery
    from trio_smc.rendezvous.discovery.tcp_option import TcpOption

__all__ = ["Attempt", "DialHost", "connect_attempt", "connect_tcp"]

_REMEMBERED = 256  # numeric addresses looked up last
_Target = tuple[int, int, int, Any]  # family, type, protocol, address


class DialHost(Chooser, Protocol):
    """What an attempt to connect wants of the stack."""

    discovery: Discovery
    tcp_option: TcpOption


@dataclass(slots=True)
class Attempt:
    """A TCP connection, and what discovery said before it was opened.

    Attributes:
      named: the (host, port) that the user asked for.
      peer: the address it resolved to.
      announcement: made on this host; or why discovery is impossible.
      offers: whether the TCP option is to tell.
      here: the address that it was announced to come from.
      plain: the same socket when it was made here, so that nobody has set an option or bound it.
    """

    sock: trio.socket.SocketType
    named: tuple[str, int]
    peer: tuple[str, int]
    announcement: Announcement | FallbackReason | None = None
    offers: bool = False
    here: str | None = None
    plain: stdlib_socket.socket | None = None

    def assumed(self, config: Config) -> bool:
        """Whether the peer is known to speak SMC-R without being asked."""
        return config.assumes(self.named, self.peer)

    def close(self) -> None:
        self.withdraw()
        self.sock.close()

    def withdraw(self) -> None:
        """Discovery is over; idempotent."""
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
    targets = await _resolve(host, port)
    named = (host if isinstance(host, str) else host.decode("ascii", "replace"), port)
    connect = partial(_connect_one, stack, named=named, local=local, config=config)
    if len(targets) > 1:
        return await _first_of(targets, named, delay, connect)
    try:
        return await connect(targets[0])
    except OSError as error:
        raise _nothing_connected(named, [error]) from error


async def _resolve(host: str | bytes, port: int) -> Sequence[_Target]:
    """As `trio.socket.getaddrinfo`; an address needs no pass of the scheduler."""
    await trio.lowlevel.checkpoint_if_cancelled()
    try:
        return _numeric(host, port)
    except (stdlib_socket.gaierror, UnicodeError):
        return _alternate_families(
            await trio.socket.getaddrinfo(host, port, type=stdlib_socket.SOCK_STREAM)
        )


@lru_cache(_REMEMBERED)
def _numeric(host: str | bytes, port: int) -> Sequence[_Target]:
    """Where an address leads, which does not change; gaierror for a name."""
    numeric = stdlib_socket.AI_NUMERICHOST | stdlib_socket.AI_NUMERICSERV
    if b"%" in host if isinstance(host, bytes) else "%" in host:
        raise UnicodeError("the number of an interface may change")
    return _alternate_families(
        stdlib_socket.getaddrinfo(host, port, type=stdlib_socket.SOCK_STREAM, flags=numeric)
    )


async def _first_of(
    targets: Sequence[_Target],
    named: tuple[str, int],
    delay: float,
    connect: Callable[[_Target], Awaitable[Attempt]],
) -> Attempt:
    """The first of several (RFC 8305, 5)."""
    winners: list[Attempt] = []
    errors: list[OSError] = []
    defects: list[Exception] = []

    async def attempt(target: _Target, failed: trio.Event, race: trio.CancelScope) -> None:
        try:
            winners.append(await connect(target))
        except OSError as error:
            errors.append(error)
            failed.set()
        except Exception as defect:
            defects.append(defect)  # out of the nursery as it is, not in a group
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
    """One error for the failure of all attempts; its number is that of the last resort."""
    # Trio's words without its number, which the new error has.
    texts = "; ".join(dict.fromkeys(error.strerror or str(error) for error in errors))
    failure = OSError(errors[-1].errno, f"no connection to {named[0]} port {named[1]}: {texts}")
    failure.__cause__ = errors[0] if len(errors) == 1 else ExceptionGroup(str(failure), errors)
    return failure


def _alternate_families(found: Iterable[tuple[int, int, int, str, Any]]) -> list[_Target]:
    """The resolver's order, but the second target of the other family (RFC 8305, 4)."""
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
    stack: DialHost, target: _Target, *, named: tuple[str, int], local: str | None, config: Config
) -> Attempt:
    family, kind, protocol, address = target
    # Not by `trio.socket.socket`, which may be asked for sockets that come here again.
    plain = stdlib_socket.socket(family, kind, protocol)
    peer = (plain_address(address[0]), address[1])
    attempt = Attempt(from_stdlib_socket(plain), named, peer, plain=plain)
    await connect_attempt(stack, attempt, address, local, config)
    return attempt


async def _connect(attempt: Attempt, address: Any) -> None:
    """Connect without a pass of the scheduler over loopback.

    There the connection is made as soon as the kernel was asked for it, and the next call says so.
    """
    plain = attempt.plain
    if plain is None:
        await attempt.sock.connect(address)
        return
    error = plain.connect_ex(address)
    if error == errno.EINPROGRESS:
        error = plain.connect_ex(address)
    if error in (errno.EINPROGRESS, errno.EALREADY):
        await trio.lowlevel.wait_writable(plain)
        error = plain.getsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_ERROR)
    if error:
        raise OSError(error, f"cannot connect to {address!r}: {os.strerror(error)}")


async def connect_attempt(
    stack: DialHost, attempt: Attempt, address: Any, local: str | None, config: Config
) -> None:
    """Announce and connect; ``local``: the address to connect from, bound already or not."""
    sock = attempt.sock
    bound = attempt.plain is None and sock.getsockname()[1] != 0
    try:
        source = _announced_source(stack, attempt, address, local, config)
        # A reason is a string too.
        if isinstance(source, str) and not isinstance(source, FallbackReason):
            # A port of its own, known before the connection is.
            if not bound:
                await _bind(attempt, source, late_port=False)
            name = sock.getsockname()
            attempt.here = plain_address(name[0])
            attempt.announcement = await stack.discovery.announce(
                (name[0], name[1]),
                attempt.peer,
                trio.current_time() + config.handshake_timeout,
                sock,
            )
        else:
            attempt.announcement = source
            if local is not None and not bound:
                await _bind(attempt, local, late_port=True)
            if attempt.offers:
                attempt.announcement = stack.tcp_option.offer(sock)
                attempt.offers = attempt.announcement is None
        await _connect(attempt, address)
    except BaseException:
        attempt.close()
        raise


async def _bind(attempt: Attempt, source: str, *, late_port: bool) -> None:
    sock = attempt.sock
    try:
        if late_port:
            # The port is chosen at connect, so that many connections may share one.
            with contextlib.suppress(OSError, AttributeError):
                sock.setsockopt(stdlib_socket.IPPROTO_IP, stdlib_socket.IP_BIND_ADDRESS_NO_PORT, 1)
        elif attempt.plain is not None and "%" not in source:
            attempt.plain.bind((source, 0))  # Trio would take a pass to look an address up
            return
        await sock.bind((source, 0))
    except OSError as error:
        raise OSError(
            error.errno, f"local address {source!r} cannot be used for this connection: {error}"
        ) from error


def _announced_source(
    stack: DialHost, attempt: Attempt, address: Any, local: str | None, config: Config
) -> str | FallbackReason | None:
    """The address to announce on this host; why not; or None where it does not apply.

    Sets ``attempt.offers`` where the TCP option is to tell instead.
    """
    if attempt.assumed(config):
        return None
    host, port = address[0], address[1]
    source = local or source_address(host, port)
    try:
        plain = plain_address(source or "")
    except ValueError:
        return None  # no route, or a name as local address
    if source is None:
        return None
    rnic = permitted_rnic(stack, config, plain, attempt.peer, attempt.named)
    if isinstance(rnic, FallbackReason):
        return rnic
    if config.discovery == "tcp-option" or not is_same_host(plain, host):
        attempt.offers = True
        return None
    return source
