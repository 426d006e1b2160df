"""`open_stream`: TCP by happy eyeballs, discovery, the client's handshake.

On one host the client must announce its source address before it connects (see
`rendezvous.discovery`), so the connection attempts are made here and not by
`trio.open_tcp_stream`; RFC 8305 describes the order and the stagger.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket as stdlib_socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import trio
from trio.socket import from_stdlib_socket

from trio_smc._accept import established_stream
from trio_smc._base.errors import SmcUnavailable
from trio_smc._base.reasons import Fallback, FallbackReason, Origin
from trio_smc._endpoint import close_with_reset
from trio_smc._handshake import run_negotiation
from trio_smc._policy import permitted_rnic
from trio_smc._rdma_stream import RdmaStream
from trio_smc._stream import SmcStream
from trio_smc._tcp_stream import TcpStream
from trio_smc.rendezvous import clc
from trio_smc.rendezvous.client import ClientNegotiation
from trio_smc.rendezvous.discovery import Announcement
from trio_smc.rendezvous.outcomes import Established
from trio_smc.rendezvous.prefixes import (
    interface_prefixes,
    is_same_host,
    plain_address,
    source_address,
)

if TYPE_CHECKING:
    from trio_smc._base.config import Config
    from trio_smc._stack import Stack
    from trio_smc.rnic.verbs import Rnic

__all__ = ["connect_socket", "connect_stream"]

LOGGER = logging.getLogger("trio_smc")

_HAPPY_EYEBALLS_DELAY: Final = 0.25
_Target = tuple[int, int, int, Any]  # family, type, protocol, address


@dataclass(slots=True)
class _Attempt:
    """A TCP connection, and what discovery said before it was opened.

    Attributes:
      named: the (host, port) that the user asked for.
      peer: the address it resolved to.
      announcement: made on this host; or why discovery is impossible.
      offers: whether the TCP option is to tell.
    """

    sock: trio.socket.SocketType
    named: tuple[str, int]
    peer: tuple[str, int]
    announcement: Announcement | FallbackReason | None = None
    offers: bool = False

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


async def connect_stream(
    stack: Stack,
    host: str | bytes,
    port: int,
    *,
    happy_eyeballs_delay: float | None,
    local_address: str | None,
    config: Config,
) -> SmcStream:
    """Connect; see `trio_smc.open_stream`."""
    delay = _HAPPY_EYEBALLS_DELAY if happy_eyeballs_delay is None else happy_eyeballs_delay
    return await _negotiated(
        stack, await _connect_tcp(stack, host, port, delay, local_address, config), config
    )


async def connect_socket(
    stack: Stack, sock: trio.socket.SocketType, address: Any, config: Config
) -> SmcStream:
    """Connect a TCP socket of the caller's and negotiate on it; closed when that fails.

    Args:
      sock: not connected; bound or not, but not to an address without a port.
      address: resolved, as `socket.socket.connect` takes it.
    """
    peer = (plain_address(address[0]), address[1])
    attempt = _Attempt(sock, peer, peer)
    source = None if sock.getsockname()[1] == 0 else sock.getsockname()[0]
    await _connect_attempt(stack, attempt, address, source, config)
    return await _negotiated(stack, attempt, config)


async def _negotiated(stack: Stack, attempt: _Attempt, config: Config) -> SmcStream:
    """The stream of a TCP connection that is open."""
    try:
        outcome = await _negotiate(stack, attempt, config)
    except BaseException as error:
        close_with_reset(attempt.sock)
        if isinstance(error, Exception) and not isinstance(error, OSError):
            LOGGER.exception("the SMC-R handshake failed")
            text = "the SMC-R handshake failed by a defect of this side"
            raise OSError(errno.ECONNRESET, text) from error
        raise
    finally:
        attempt.withdraw()
    if isinstance(outcome, RdmaStream):
        return outcome
    if config.require_smc:
        attempt.sock.close()
        stack.count_mode(None, outcome)
        raise SmcUnavailable(outcome)
    stream = TcpStream(attempt.sock, outcome, urgent_inline=config.urgent_inline)
    stack.count_mode(stream, outcome)
    return stream


async def _negotiate(stack: Stack, attempt: _Attempt, config: Config) -> RdmaStream | Fallback:
    sock, announcement = attempt.sock, attempt.announcement
    if attempt.offers:
        reason = stack.tcp_option.answer(sock)
        if reason is not None:
            return Fallback.local(reason)
    elif not isinstance(announcement, Announcement) and not attempt.assumed(config):
        return _refused(announcement or FallbackReason.PEER_NOT_CAPABLE)
    here = plain_address(sock.getsockname()[0])
    rnic = permitted_rnic(stack, config, here, attempt.peer, attempt.named)
    if isinstance(rnic, FallbackReason):
        # Before "go" is said, after which the server counts on a Proposal.
        if not attempt.offers:
            return Fallback.local(rnic)
        return await _decline(stack, sock, rnic, config)
    if isinstance(announcement, Announcement):
        deadline = trio.current_time() + config.handshake_timeout
        refusal = await announcement.accepted(deadline)
        if refusal is not None:
            return _refused(refusal, said=True)
    negotiation = ClientNegotiation(
        host=stack,
        rnic=rnic,
        proposal=_proposal(stack, rnic, here),
        receive_buffer=config.receive_buffer_for(rnic.kind),
    )
    negotiation.sock = sock
    with stack.handshake():
        negotiation.start()
        outcome = await run_negotiation(negotiation, sock, config.handshake_timeout)
        if isinstance(outcome, Established):
            return established_stream(stack, outcome, sock, config, attempt.peer)
    return outcome.fallback


async def _decline(
    stack: Stack, sock: trio.socket.SocketType, reason: FallbackReason, config: Config
) -> Fallback:
    """The TCP option has promised a Proposal; a Decline takes its place (RFC 7609, C.1)."""
    negotiation = ClientNegotiation(host=stack, rnic=None, proposal=None, receive_buffer=1)
    with stack.handshake():
        negotiation.decline(reason)
        outcome = await run_negotiation(negotiation, sock, config.handshake_timeout)
        if isinstance(outcome, Established):
            raise RuntimeError("a negotiation was declined and succeeded")
    return outcome.fallback


def _refused(reason: FallbackReason, *, said: bool = False) -> Fallback:
    """What same-host discovery came to; ``said``: by the process that has the connection."""
    ours = reason is FallbackReason.PEER_NOT_CAPABLE
    if not ours and (said or reason is FallbackReason.HANDSHAKE_LIMIT):
        return Fallback(reason=reason, origin=Origin.PEER)
    return Fallback.local(reason)


def _proposal(stack: Stack, rnic: Rnic, address: str) -> clc.Proposal:
    """RFC 7609, 3.5.1.2, A.2.1."""
    subnet, length = bytes(4), 0
    prefixes: list[clc.Ipv6Prefix] = []
    for prefix in interface_prefixes(address):
        if prefix.is_ipv4:
            if not length:
                subnet, length = prefix.network, prefix.length
        elif len(prefixes) < clc.MAX_PREFIXES:
            prefixes.append(clc.Ipv6Prefix(prefix=prefix.network, length=prefix.length))
    return clc.Proposal(
        peer_id=stack.peer_id,
        gid=rnic.gid,
        mac=rnic.mac,
        ipv4_subnet=subnet,
        ipv4_mask_length=length,
        ipv6_prefixes=tuple(prefixes),
    )


# --- TCP -------------------------------------------------------------------------------------


async def _connect_tcp(
    stack: Stack, host: str | bytes, port: int, delay: float, local: str | None, config: Config
) -> _Attempt:
    """The first connection that succeeds, of attempts staggered by ``delay`` seconds."""
    if host is None:
        raise ValueError("host cannot be None")
    if not isinstance(port, int):
        raise TypeError("port must be an integer")
    found = await trio.socket.getaddrinfo(host, port, type=stdlib_socket.SOCK_STREAM)
    targets: list[_Target] = _alternate_families(
        [(family, kind, protocol, address) for family, kind, protocol, _, address in found]
    )
    named = (host if isinstance(host, str) else host.decode("ascii", "replace"), port)
    connect = partial(_connect_one, stack, named=named, local=local, config=config)
    if len(targets) > 1:
        return await _first_of(targets, named, delay, connect)
    try:
        return await connect(targets[0])
    except OSError as error:
        raise _nothing_connected(named, [error]) from error


async def _first_of(
    targets: Sequence[_Target],
    named: tuple[str, int],
    delay: float,
    connect: Callable[[_Target], Awaitable[_Attempt]],
) -> _Attempt:
    """The first of several (RFC 8305, 5)."""
    winners: list[_Attempt] = []
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
    texts = "; ".join(dict.fromkeys(str(error) for error in errors))
    failure = OSError(errors[-1].errno, f"no connection to {named[0]} port {named[1]}: {texts}")
    failure.__cause__ = errors[0] if len(errors) == 1 else ExceptionGroup(str(failure), errors)
    return failure


def _alternate_families(targets: Sequence[_Target]) -> list[_Target]:
    """The resolver's order, but the second target of the other family (RFC 8305, 4)."""
    ordered = list(dict.fromkeys(targets))
    for place, target in enumerate(ordered[1:], 1):
        if target[0] != ordered[0][0]:
            ordered.insert(1, ordered.pop(place))
            break
    return ordered


async def _connect_one(
    stack: Stack, target: _Target, *, named: tuple[str, int], local: str | None, config: Config
) -> _Attempt:
    family, kind, protocol, address = target
    # Not by `trio.socket.socket`, which may be asked for sockets that come here again.
    sock = from_stdlib_socket(stdlib_socket.socket(family, kind, protocol))
    attempt = _Attempt(sock, named, (plain_address(address[0]), address[1]))
    await _connect_attempt(stack, attempt, address, local, config)
    return attempt


async def _connect_attempt(
    stack: Stack, attempt: _Attempt, address: Any, local: str | None, config: Config
) -> None:
    """Announce and connect; ``local``: the address to connect from, bound already or not."""
    sock = attempt.sock
    bound = sock.getsockname()[1] != 0
    try:
        source = _announced_source(stack, attempt, address, local, config)
        # A reason is a string too.
        if isinstance(source, str) and not isinstance(source, FallbackReason):
            # A port of its own, known before the connection is.
            if not bound:
                await _bind(sock, source, late_port=False)
            name = sock.getsockname()
            attempt.announcement = await stack.discovery.announce(
                (name[0], name[1]),
                attempt.peer,
                trio.current_time() + config.handshake_timeout,
            )
        else:
            attempt.announcement = source
            if local is not None and not bound:
                await _bind(sock, local, late_port=True)
            if attempt.offers:
                attempt.announcement = stack.tcp_option.offer(sock)
                attempt.offers = attempt.announcement is None
        await sock.connect(address)
    except BaseException:
        attempt.close()
        raise


async def _bind(sock: trio.socket.SocketType, source: str, *, late_port: bool) -> None:
    try:
        if late_port:
            # The port is chosen at connect, so that many connections may share one.
            with contextlib.suppress(OSError, AttributeError):
                sock.setsockopt(stdlib_socket.IPPROTO_IP, stdlib_socket.IP_BIND_ADDRESS_NO_PORT, 1)
        await sock.bind((source, 0))
    except OSError as error:
        raise OSError(
            error.errno, f"local address {source!r} cannot be used for this connection: {error}"
        ) from error


def _announced_source(
    stack: Stack, attempt: _Attempt, address: Any, local: str | None, config: Config
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
