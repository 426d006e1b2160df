"""`open_stream`: TCP by happy eyeballs, discovery, the client's handshake.

On one host the client must announce its source address before it connects (see
`rendezvous.discovery`), so the connection attempts are made here and not by
`trio.open_tcp_stream`; RFC 8305 describes the order and the stagger.
"""

from __future__ import annotations

import errno
import socket as stdlib_socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import trio

from trio_smc._accept import established_stream
from trio_smc._base.errors import SmcUnavailable
from trio_smc._base.reasons import Fallback, FallbackReason, Origin
from trio_smc._endpoint import close_with_reset
from trio_smc._handshake import run_negotiation
from trio_smc._stream import RdmaStream, SmcStream, TcpStream
from trio_smc.rendezvous import clc
from trio_smc.rendezvous.client import ClientNegotiation
from trio_smc.rendezvous.discovery import Announcement
from trio_smc.rendezvous.negotiation import Established
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

__all__ = ["connect_stream"]

_Target = tuple[int, int, int, Any]  # family, type, protocol, address


@dataclass(slots=True)
class _Attempt:
    """A TCP connection, and what discovery said before it was opened."""

    sock: trio.socket.SocketType
    announcement: Announcement | FallbackReason | None

    def close(self) -> None:
        if isinstance(self.announcement, Announcement):
            self.announcement.close()
        self.sock.close()


async def connect_stream(
    stack: Stack,
    host: str | bytes,
    port: int,
    *,
    happy_eyeballs_delay: float,
    local_address: str | None,
    config: Config,
) -> SmcStream:
    """Connect; see `trio_smc.open_stream`."""
    attempt = await _connect_tcp(stack, host, port, happy_eyeballs_delay, local_address, config)
    sock = attempt.sock
    try:
        outcome = await _negotiate(stack, attempt, config)
        if isinstance(outcome, RdmaStream):
            return outcome
        if config.require_smc:
            stack.count_mode(None, outcome)
            raise SmcUnavailable(outcome)
        stream = TcpStream(sock, outcome)
    except SmcUnavailable:
        sock.close()
        raise
    except BaseException:
        stack.handshakes["failed"] += 1
        close_with_reset(sock)
        raise
    finally:
        if isinstance(attempt.announcement, Announcement):
            attempt.announcement.close()
    stack.count_mode(stream, outcome)
    return stream


async def _negotiate(stack: Stack, attempt: _Attempt, config: Config) -> RdmaStream | Fallback:
    sock = attempt.sock
    here = plain_address(sock.getsockname()[0])
    peer = sock.getpeername()
    there = plain_address(peer[0])
    announcement = attempt.announcement
    if not isinstance(announcement, Announcement) and not config.assumes(there, peer[1]):
        return _not_announced(announcement)
    rnic = stack.rnic_for(here, there)
    if isinstance(rnic, FallbackReason):
        # Before "go" is said, after which the server counts on a Proposal.
        return Fallback.local(rnic)
    if isinstance(announcement, Announcement):
        deadline = trio.current_time() + config.handshake_timeout
        refusal = await announcement.accepted(deadline)
        if refusal is not None:
            return Fallback(reason=refusal, origin=Origin.PEER)
    negotiation = ClientNegotiation(
        host=stack,
        rnic=rnic,
        proposal=_proposal(stack, rnic, here),
        receive_buffer=config.receive_buffer_for(rnic.kind),
    )
    stack.handshakes["begun"] += 1
    negotiation.start()
    outcome = await run_negotiation(negotiation, sock, config.handshake_timeout)
    if isinstance(outcome, Established):
        return established_stream(stack, outcome, sock)
    return outcome.fallback


def _not_announced(reason: FallbackReason | None) -> Fallback:
    if reason in (FallbackReason.HANDSHAKE_LIMIT, FallbackReason.NO_RNIC):
        return Fallback(reason=reason, origin=Origin.PEER)
    return Fallback.local(reason or FallbackReason.PEER_NOT_CAPABLE)


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
    if not isinstance(port, int):
        raise TypeError("port must be an integer")
    found = await trio.socket.getaddrinfo(host, port, type=stdlib_socket.SOCK_STREAM)
    targets: list[_Target] = _alternate_families(
        [(family, kind, protocol, address) for family, kind, protocol, _, address in found]
    )
    winners: list[_Attempt] = []
    errors: list[OSError] = []

    async with trio.open_nursery() as nursery:

        async def attempt(target: _Target, failed: trio.Event) -> None:
            try:
                winner = await _connect_one(stack, target, local, config)
            except OSError as error:
                errors.append(error)
                failed.set()
                return
            winners.append(winner)
            nursery.cancel_scope.cancel()

        for target in targets:
            failed = trio.Event()
            nursery.start_soon(attempt, target, failed)
            with trio.move_on_after(delay):
                await failed.wait()
    for loser in winners[1:]:
        loser.close()
    if winners:
        return winners[0]
    if len(errors) == 1:
        raise errors[0]
    text = f"all attempts to connect to {host!r} port {port} failed: "
    reason = OSError(errors[0].errno if errors else errno.ECONNREFUSED, text + "; ".join(
        str(error) for error in errors
    ))  # fmt: skip
    raise reason


def _alternate_families(targets: Sequence[_Target]) -> list[_Target]:
    """The resolver's order, but the second target of the other family (RFC 8305, 4)."""
    ordered = list(dict.fromkeys(targets))
    for place, target in enumerate(ordered[1:], 1):
        if target[0] != ordered[0][0]:
            ordered.insert(1, ordered.pop(place))
            break
    return ordered


async def _connect_one(
    stack: Stack, target: _Target, local: str | None, config: Config
) -> _Attempt:
    family, kind, protocol, address = target
    sock = trio.socket.socket(family, kind, protocol)
    attempt = _Attempt(sock, None)
    try:
        sock.setsockopt(stdlib_socket.IPPROTO_TCP, stdlib_socket.TCP_NODELAY, 1)
        source = _announced_source(stack, address, local, config)
        # A reason is a string too.
        if isinstance(source, str) and not isinstance(source, FallbackReason):
            # A port of its own, known before the connection is.
            await _bind(sock, source, late_port=False)
            name = sock.getsockname()
            attempt.announcement = await stack.discovery.announce(
                (name[0], name[1]),
                (address[0], address[1]),
                trio.current_time() + config.handshake_timeout,
            )
        else:
            attempt.announcement = source
            if local is not None:
                await _bind(sock, local, late_port=True)
        await sock.connect(address)
    except BaseException:
        attempt.close()
        raise
    return attempt


async def _bind(sock: trio.socket.SocketType, source: str, *, late_port: bool) -> None:
    try:
        if late_port:
            # The port is chosen at connect, so that many connections may share one.
            sock.setsockopt(stdlib_socket.IPPROTO_IP, stdlib_socket.IP_BIND_ADDRESS_NO_PORT, 1)
        await sock.bind((source, 0))
    except OSError as error:
        raise OSError(
            error.errno, f"local_address={source!r} cannot be used for this connection: {error}"
        ) from error


def _announced_source(
    stack: Stack, address: Any, local: str | None, config: Config
) -> str | FallbackReason | None:
    """The address to announce on this host; why not; or None where it does not apply."""
    host, port = address[0], address[1]
    if config.discovery != "auto" or config.assumes(plain_address(host), port):
        return None
    source = local or source_address(host, port)
    if source is None or not is_same_host(source, host):
        return None
    rnic = stack.rnic_for(plain_address(source), plain_address(host))
    return rnic if isinstance(rnic, FallbackReason) else source
