"""`open_stream`: connect TCP, run discovery and the client's handshake, make the stream."""

from __future__ import annotations

import errno
import functools
import logging
import socket as stdlib_socket
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, Protocol

import trio

from trio_smc._base.errors import HandshakeCut, SmcUnavailable
from trio_smc._base.reasons import Fallback, FallbackReason, Origin
from trio_smc.connecting.dial import (
    Attempt,
    DialHost,
    connect_again,
    connect_attempt,
    connect_tcp,
)
from trio_smc.connecting.established import HandshakeHost, established_stream
from trio_smc.host.addresses import (
    Prefix,
    interface_prefixes,
    plain_address,
    reached_address,
)
from trio_smc.host.tcp import close_unread, close_with_reset
from trio_smc.rendezvous.client import ClientNegotiation
from trio_smc.rendezvous.discovery.same_host import Announcement
from trio_smc.rendezvous.handshake import run_negotiation
from trio_smc.rendezvous.negotiation import Established
from trio_smc.rendezvous.terms import with_v2_offer
from trio_smc.rnic.spinner import NEVER
from trio_smc.stack.policy import choose_route
from trio_smc.streams.rdma_stream import RdmaStream
from trio_smc.streams.socket_options import inherited
from trio_smc.streams.stream import SmcStream
from trio_smc.streams.tcp_stream import TcpStream
from trio_smc.wire import clc

if TYPE_CHECKING:
    from trio_smc.config.config import Config
    from trio_smc.rnic.verbs import Rnic

__all__ = ["ConnectHost", "connect_socket", "connect_stream", "connect_without_smc"]

LOGGER = logging.getLogger("trio_smc")

_HAPPY_EYEBALLS_DELAY: Final = 0.25
"""Seconds between two attempts to connect: the value of RFC 8305, 5, and of Trio."""
_CACHED_PROPOSALS: Final = 64
"""Proposals that are kept: one for each RNIC and set of local networks in use.  Chosen."""
# Reasons that this side has found itself: no peer accepted, or its answer is invalid or untrusted.
_NOT_ACCEPTED: Final = frozenset(
    {
        FallbackReason.PEER_NOT_CAPABLE,
        FallbackReason.LOCAL_VERSION_MISMATCH,
        FallbackReason.OTHER_USER,
        FallbackReason.PATH_NOT_PROVEN,
        FallbackReason.NOT_ACCEPTED,
    }
)


# Reasons of a client that has found no listener on this host at the address.
_NO_SUCH_PEER: Final = frozenset(
    {
        FallbackReason.PEER_NOT_CAPABLE,
        FallbackReason.NO_RNIC,
        FallbackReason.TCP_OPTION_UNAVAILABLE,
        FallbackReason.TCP_OPTION_NOT_PERMITTED,
    }
)


class ConnectHost(DialHost, HandshakeHost, Protocol):
    """The stack, as seen by a client."""

    def track(self, work: Attempt) -> AbstractContextManager[None]:
        """A context manager: leaving the stack cancels ``work`` and waits for its end."""


async def connect_stream(
    stack: ConnectHost,
    host: str | bytes,
    port: int,
    *,
    happy_eyeballs_delay: float | None,
    local_address: str | None,
    config: Config,
) -> SmcStream:
    """Connect; see `trio_smc.open_stream`."""
    delay = _HAPPY_EYEBALLS_DELAY if happy_eyeballs_delay is None else happy_eyeballs_delay
    return await _finish(
        stack, await connect_tcp(stack, host, port, delay, local_address, config), config
    )


async def connect_socket(
    stack: ConnectHost,
    sock: trio.socket.SocketType,
    address: Any,
    config: Config,
    bare: stdlib_socket.socket | None = None,
    *,
    bound: bool,
) -> SmcStream:
    """Connect a TCP socket of the caller and negotiate on it.

    If no TCP connection is established, the caller may use the socket again, as over TCP. After any
    other error, and if the call is cancelled, the socket is closed.

    Args:
      sock: not connected.
      address: resolved, as for `socket.socket.connect`.
      bare: the socket that ``sock`` wraps.
      bound: ``sock`` is bound to an address and a port.
    """
    source = sock.getsockname()[0] if bound else None
    peer = (reached_address(address[0], source), address[1])
    named = (plain_address(address[0]), address[1])
    attempt = Attempt(sock, named, peer, bare=bare)
    await connect_attempt(stack, attempt, address, source, config)
    return await _finish(stack, attempt, config)


async def connect_without_smc(
    stack: ConnectHost,
    sock: trio.socket.SocketType,
    address: Any,
    config: Config,
    reason: FallbackReason,
) -> TcpStream:
    """Connect a TCP socket of the caller that cannot use SMC-R.

    Args:
      sock: not connected.
      address: resolved, as for `socket.socket.connect`.

    Raises:
      SmcUnavailable: `Config.require_smc` is set. The socket is not connected.
      OSError: no TCP connection is established.
    """
    fallback = Fallback.local(reason)
    if config.require_smc:
        stack.groups.count_tcp(None, fallback)
        raise SmcUnavailable(fallback)
    with stack.call():
        await sock.connect(address)
    return _tcp_stream(stack, sock, fallback)


def _tcp_stream(
    stack: ConnectHost, sock: trio.socket.SocketType, fallback: Fallback, *, clc_begun: bool = False
) -> TcpStream:
    """The stream of a connection that stays on TCP, which the stack counts."""
    stream = TcpStream(sock, fallback, stack.groups.tcp_ended, clc_begun=clc_begun)
    stack.groups.count_tcp(stream, fallback)
    return stream


async def _finish(stack: ConnectHost, attempt: Attempt, config: Config) -> SmcStream:
    """Negotiate on an open TCP connection, and make the stream."""
    outcome: RdmaStream | Fallback | None
    try:
        outcome = _peer_unable(stack, attempt, config)
        amortised = config.checkpoints == "amortised"
        if outcome is not None and amortised and not stack.budget.is_exceeded():
            await trio.lowlevel.checkpoint_if_cancelled()
        else:
            with stack.track(attempt):
                if outcome is None:
                    outcome = await _negotiate(stack, attempt, config)
                if isinstance(outcome, Fallback):
                    await trio.lowlevel.checkpoint()  # perhaps the call had no other checkpoint
        if attempt.cancelled:
            raise trio.ClosedResourceError("the stack was closed")
    except HandshakeCut as error:
        return _after_cut(stack, attempt, config, error)
    except BaseException as error:
        if attempt.cancelled and isinstance(error, Exception):
            raise trio.ClosedResourceError("the stack was closed") from None
        if not isinstance(error, Exception):
            # Cancelled, or Ctrl-C.  Over TCP the server has a connection that ends at once.
            close_unread(attempt.sock)
            raise
        close_with_reset(attempt.sock)
        if not isinstance(error, OSError):
            LOGGER.exception("the SMC-R handshake failed")
            text = "the SMC-R handshake failed because of a defect on this side"
            raise OSError(errno.ECONNRESET, text) from error
        raise
    finally:
        attempt.withdraw()
    if not isinstance(outcome, Fallback):
        return outcome
    if config.require_smc:
        attempt.sock.close()
        stack.groups.count_tcp(None, outcome)
        raise SmcUnavailable(outcome)
    return _tcp_stream(stack, attempt.sock, outcome, clc_begun=attempt.clc_begun)


def _after_cut(
    stack: ConnectHost, attempt: Attempt, config: Config, error: HandshakeCut
) -> TcpStream:
    """The stream of a connection that the server has ended during the handshake.

    Raises:
      ConnectionResetError: `Config.require_smc` is set, or SMC-R was only assumed.
      trio.ClosedResourceError: the stack was left meanwhile.
    """
    if attempt.cancelled:
        raise trio.ClosedResourceError("the stack was closed") from None
    known = not attempt.assumed(config)  # otherwise the end may be the answer to the Proposal
    if known and not config.require_smc:
        # Over TCP this call succeeds, and the next one shows that the server has gone.
        fallback = Fallback.local(FallbackReason.ENDED_IN_HANDSHAKE)
        return _tcp_stream(stack, attempt.sock, fallback, clc_begun=attempt.clc_begun)
    close_with_reset(attempt.sock)
    raise ConnectionResetError(*error.args) from error.__cause__


async def _negotiate(stack: ConnectHost, attempt: Attempt, config: Config) -> RdmaStream | Fallback:
    """Negotiate with a server that is expected to speak SMC-R."""
    sock, announcement = attempt.sock, attempt.announcement
    here = attempt.here or plain_address(sock.getsockname()[0])
    route = attempt.route
    if route is None or route.local != here or not route.is_usable(stack):
        # No earlier step needed a route (under "assume"), or the kernel chose another local address
        # than the one for which the route was chosen, or the RNIC has failed since.
        route = choose_route(stack, config, here, attempt.peer, attempt.named)
    rnic = route.rnic
    if isinstance(rnic, FallbackReason):
        # The server may expect a CLC message by now.
        expected = isinstance(announcement, Announcement) and announcement.withdraw()
        if not attempt.offers and not expected:
            return Fallback.local(rnic)
        return await _decline(stack, attempt, rnic, config)
    # Everything that needs no answer is done before the wait for ACCEPTED, while the server works.
    options = None if attempt.plain is not None else inherited(attempt.bare or sock)
    negotiation = ClientNegotiation(
        host=stack.groups, receive_buffer=config.receive_buffer_for(rnic.kind)
    )
    negotiation.sock = sock
    proposal = _proposal(stack.groups.peer_id, rnic, here)
    offer = stack.groups.offer
    if offer is not None and rnic.routable and ":" not in here:
        proposal = with_v2_offer(proposal, offer)
    if isinstance(announcement, Announcement):
        deadline = stack.timers.now() + config.handshake_timeout
        refusal = await announcement.accepted(deadline)
        if refusal is not None:
            if announcement.is_lost and await connect_again(stack, attempt, config):
                return _peer_unable(stack, attempt, config) or await _negotiate(
                    stack, attempt, config
                )
            return _discovery_failed(refusal, by_peer=True)
        mismatch = announcement.mismatch(rnic.kind)
        if mismatch is not None:
            return await _decline(stack, attempt, mismatch, config)
    attempt.clc_begun = True
    with stack.groups.handshake():
        negotiation.propose(rnic, proposal)
        outcome = await run_negotiation(
            negotiation, attempt.bare or sock, config.handshake_timeout, stack.timers,
            stack.spinner_for(rnic),
        )  # fmt: skip
        if isinstance(outcome, Established):
            wanted = isinstance(announcement, Announcement) and announcement.wanted
            peer = None if wanted else attempt.peer
            # The kernel may complete an IPv6 address, by the scope of its interface.
            name = attempt.peer if len(attempt.address) == 2 else None
            return established_stream(stack, outcome, sock, config, peer, options, name)
    return outcome.fallback


def _translated(stack: ConnectHost, attempt: Attempt, reason: FallbackReason) -> FallbackReason:
    """The reason for TCP; PATH_NOT_PROVEN if a rule of this host has led the connection to a
    process of this host, under another address than the one that the client connected to."""
    if reason in _NO_SUCH_PEER and stack.discovery.leads_to_listener(attempt.sock, attempt.peer):
        return FallbackReason.PATH_NOT_PROVEN
    return reason


def _peer_unable(stack: ConnectHost, attempt: Attempt, config: Config) -> Fallback | None:
    """The fallback if no server is known that speaks SMC-R; otherwise None."""
    reason = attempt.announcement
    if attempt.offers:
        reason = stack.tcp_option.answer(attempt.sock)
        return None if reason is None else Fallback.local(_translated(stack, attempt, reason))
    if isinstance(reason, Announcement) or (reason is None and attempt.assumed(config)):
        return None
    reason = _translated(stack, attempt, reason or FallbackReason.PEER_NOT_CAPABLE)
    return _discovery_failed(reason)


async def _decline(
    stack: ConnectHost, attempt: Attempt, reason: FallbackReason, config: Config
) -> Fallback:
    """Send a Decline in place of the Proposal that the server expects (RFC 7609, C.1)."""
    negotiation = ClientNegotiation(host=stack.groups, receive_buffer=1)
    attempt.clc_begun = True
    with stack.groups.handshake():
        negotiation.decline(reason)
        outcome = await run_negotiation(
            negotiation, attempt.sock, config.handshake_timeout, stack.timers, NEVER
        )
        if isinstance(outcome, Established):
            raise RuntimeError("a declined negotiation succeeded")
    return outcome.fallback


def _discovery_failed(reason: FallbackReason, *, by_peer: bool = False) -> Fallback:
    """The fallback after a failure of same-host discovery.

    Args:
      by_peer: True if the process that accepted the connection gave the reason.
    """
    if reason not in _NOT_ACCEPTED and (by_peer or reason is FallbackReason.HANDSHAKE_LIMIT):
        return Fallback(reason=reason, origin=Origin.PEER)
    return Fallback.local(reason)


def _proposal(peer_id: bytes, rnic: Rnic, address: str) -> clc.Proposal:
    """The SMC Proposal from this address (RFC 7609, 3.5.1.2, A.2.1)."""
    return _proposal_from(peer_id, rnic.gid, rnic.mac, interface_prefixes(address))


@functools.lru_cache(_CACHED_PROPOSALS)
def _proposal_from(
    peer_id: bytes, gid: bytes, mac: bytes, networks: tuple[Prefix, ...]
) -> clc.Proposal:
    """`_proposal`, cached: consecutive connections send the same one."""
    subnet, length = bytes(4), 0
    prefixes: list[clc.Ipv6Prefix] = []
    for prefix in networks:
        if prefix.is_ipv4:
            if not length:
                subnet, length = prefix.network, prefix.length
        elif len(prefixes) < clc.MAX_PREFIXES:
            prefixes.append(clc.Ipv6Prefix(prefix=prefix.network, length=prefix.length))
    return clc.Proposal(
        peer_id=peer_id,
        gid=gid,
        mac=mac,
        ipv4_subnet=subnet,
        ipv4_mask_length=length,
        ipv6_prefixes=tuple(prefixes),
    )
