"""From an accepted TCP connection to a stream: discovery and handshake, the server's side."""

from __future__ import annotations

import logging
import socket as stdlib_socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal

import trio
from trio.socket import SocketType, from_stdlib_socket

from trio_smc._base.errors import HandshakeCut
from trio_smc._base.reasons import Fallback, FallbackReason
from trio_smc._base.waits import wait_readable
from trio_smc.connecting.established import HandshakeHost, established_stream
from trio_smc.host.addresses import (
    Prefix,
    address_block,
    is_attached,
    is_on_network,
    is_same_host,
    plain_address,
)
from trio_smc.host.tcp import (
    CLOSE,
    CLOSE_WAIT,
    close_with_reset,
    consume_error,
    has_urgent_byte,
    peer_end,
    tcp_state,
    unread_bytes,
)
from trio_smc.host.tcp_diag import original_destination
from trio_smc.rendezvous.handshake import run_negotiation
from trio_smc.rendezvous.negotiation import Established
from trio_smc.rendezvous.server import ServerNegotiation
from trio_smc.rendezvous.terms import Offer, Terms, answer
from trio_smc.stack.policy import choose_route
from trio_smc.streams.rdma_stream import RdmaStream
from trio_smc.streams.socket_options import Inherited, inherited, receive_buffer_for
from trio_smc.streams.stream import SmcStream
from trio_smc.streams.tcp_stream import TcpStream
from trio_smc.wire import clc

if TYPE_CHECKING:
    from trio_smc.config.config import Config
    from trio_smc.rendezvous.discovery.same_host import Claim, Publication
    from trio_smc.rnic.verbs import Rnic
    from trio_smc.stack.policy import Route

__all__ = ["Arrival", "admit_proposal", "prefix_refusal"]

LOGGER = logging.getLogger("trio_smc")

_EYE_CATCHER_SIZE: Final = len(clc.EYE_CATCHER)
_PRESSURE_PAUSE: Final = 0.01
"""Seconds between two reads of the first bytes while the kernel is short of memory.  Chosen."""


class Arrival:
    """An accepted TCP connection, until it is a stream.

    It answers the client's announcement when it is made, before the connection has a task. So the
    client waits one pass of the scheduler less.

    Args:
      stack, config, publication: of the listener.
      accepted, remote: the connection and the client's address, as ``accept`` returned them.
      at_limit: True if `Config.handshake_limit` handshakes are under way.
      is_crowded: True if the listener has hardly room for another handshake. Then an announced
        connection is TCP, unless one side requires SMC-R.

    Attributes:
      sock: the connection.
      progressed: when TCP accepted it, or a complete Proposal arrived, by the clock of the stack's
        timers.
      on_progress: called with this object and the current time when a Proposal has arrived.
    """

    __slots__ = ("_accepted_from", "_at_limit", "_bare", "_claim", "_clc_begun", "_client",
                 "_config", "_failure", "_fallback", "_is_crowded", "_local",
                 "_publication", "_remote", "_required", "_route", "_stack", "_was_announced",
                 "on_progress", "progressed", "sock")  # fmt: skip

    _route: Route  # once discovery is over

    def __init__(
        self,
        stack: HandshakeHost,
        config: Config,
        publication: Publication,
        accepted: stdlib_socket.socket,
        remote: tuple[str, int],
        *,
        at_limit: bool,
        is_crowded: bool = False,
    ) -> None:
        self.sock: SocketType = from_stdlib_socket(accepted)
        self._bare = accepted
        self._accepted_from = remote
        self._stack = stack
        self._config = config
        self._publication = publication
        self._at_limit = at_limit
        self._is_crowded = is_crowded
        self.progressed: float = stack.timers.now()
        self.on_progress: Callable[[Arrival, float], object] | None = None
        self._claim: Claim | None = None
        self._was_announced = False  # but the client has given up the announcement
        self._required = False  # the client takes SMC-R or nothing; only `learn_short` needs it
        self._fallback: Fallback | None = None
        self._failure: Exception | None = None
        self._clc_begun = False  # CLC messages were exchanged
        try:
            self._start_discovery(remote)
        except Exception as error:
            self._failure = error  # raised by the connection's task

    def _start_discovery(self, remote: tuple[str, int]) -> None:
        self._local, self._remote = _plain_name(self._bare.getsockname()), _plain_name(remote)
        self._client = (self._remote[0], self._local[1])
        self._on_claim(self._publication.claim(self._local, self._remote, self._bare))

    def _on_claim(self, claim: Claim | None) -> None:
        """Discovery on this host is over.

        Args:
          claim: the client's announcement; None if there is none.
        """
        self._claim = claim
        self._required = claim is not None and self._config.learns_short and claim.is_required()
        at_limit = self._at_limit
        if claim is not None and self._is_crowded and not self._config.require_smc:
            at_limit = at_limit or not claim.is_required()
        # A client that has announced itself is on this host, whatever its address is.
        self._route = choose_route(
            self._stack, self._config, self._local[0], self._client, self._local,
            self._publication.address, at_limit=at_limit, near=claim is not None,
            required=self._required,
        )  # fmt: skip
        if claim is not None:
            reason = self._route.reason
            if reason is not None:
                claim.refuse(reason)
                self._fallback = Fallback.local(reason)
            elif not claim.accept(required=self._config.require_smc):
                # The client has given up, or a killed client left the name: it says nothing.
                self._was_announced = True
                self._on_claim(None)
        elif not self._config.assumes(self._local, self._remote, self._publication.address):
            reason = self._stack.tcp_option.answer(self.sock)
            if reason is not None:
                self._fallback = Fallback.local(self._unannounced(reason))

    def _unannounced(self, reason: FallbackReason) -> FallbackReason:
        """Why a client has not announced its connection.

        Args:
          reason: what the TCP option has shown.
        """
        if self._was_announced:
            return FallbackReason.NOT_ACCEPTED  # as the client reports it
        if self._route.reason is FallbackReason.SHORT_CONNECTIONS:
            return self._route.reason  # this side has learned the same of this client
        if self._config.discovery != "auto" or not self._is_same_host():
            return reason
        publication = self._publication
        if publication.unavailable is not None:
            return publication.unavailable
        if publication.is_short(self._local, self._remote):
            return FallbackReason.SHORT_CONNECTIONS
        original = original_destination(self._bare)
        if original is not None and _plain_name(original) != self._local:
            return FallbackReason.PATH_NOT_PROVEN  # translated within this host
        return FallbackReason.PEER_NOT_CAPABLE

    def _is_same_host(self) -> bool:
        return is_same_host(self._local[0], self._remote[0])

    @property
    def block(self) -> str:
        """The client's address, as `trio_smc.host.addresses.address_block` groups addresses."""
        return address_block(self._accepted_from[0])

    @property
    def needs_handshake(self) -> bool:
        """True if the stream needs a message from the client first."""
        return self._fallback is None and self._failure is None

    def is_silent(self) -> bool:
        """True if the client has sent nothing that this side can process.

        The first bytes of an eye catcher stay unread until it is complete.
        """
        try:
            return unread_bytes(self.sock) < (1 if self._clc_begun else _EYE_CATCHER_SIZE)
        except OSError:
            return False  # closed

    def cancel(self) -> None:
        """End the handshake from outside its task."""
        close_with_reset(self.sock)

    async def stream(self) -> SmcStream | None:
        """Run the handshake and return the stream; None if the connection had to be closed.

        Never raises because of the client. Closes `sock` unless a stream owns it.
        """
        stack, sock, config = self._stack, self.sock, self._config
        try:
            fallback = await self._negotiate()
        except _SilentClient as error:
            LOGGER.info("connection closed: %s", error)
            sock.close()
            return None
        except HandshakeCut as error:
            # Over TCP the server accepts this connection, and reading shows that the client has
            # gone.
            LOGGER.info("handshake failed: %s", error)
            fallback = Fallback.local(FallbackReason.ENDED_IN_HANDSHAKE)
            if self._claim is not None:
                # The kernel of a client that ends without having read a CLC message resets the
                # connection.  No application has sent data yet, so the server reads the end.  A
                # client on another host may have sent data that is still on its way.
                consume_error(sock)
        except OSError as error:
            LOGGER.info("handshake failed: %s", error)
            close_with_reset(sock)
            return None
        except BaseException as error:
            cancelled = sock.fileno() < 0
            close_with_reset(sock)
            if isinstance(error, trio.ClosedResourceError) and cancelled:
                return None
            if isinstance(error, Exception):
                # A defect of this side ends this connection, not the server.
                LOGGER.exception("handshake failed")
                return None
            raise
        if not isinstance(fallback, Fallback):
            return fallback
        if config.require_smc:
            stack.groups.count_tcp(None, fallback)
            stack.groups.handshakes["refused"] += 1
            LOGGER.warning("connection refused, SMC-R is required: %s", fallback.message)
            sock.close()
            return None
        return self._tcp_stream(fallback)

    def plain_stream(self) -> TcpStream | None:
        """The stream, if discovery has already decided for TCP; otherwise None."""
        if self._fallback is None or self._failure is not None or self._config.require_smc:
            return None
        return self._tcp_stream(self._fallback)

    def _tcp_stream(self, fallback: Fallback) -> TcpStream:
        groups = self._stack.groups
        stream = TcpStream(
            self.sock,
            fallback,
            groups.tcp_ended,
            accepted=self._accepted_from,
            clc_begun=self._clc_begun,
        )
        groups.count_tcp(stream, fallback)
        return stream

    async def _negotiate(self) -> RdmaStream | Fallback:
        stack, sock, config = self._stack, self.sock, self._config
        if sock.fileno() < 0:
            raise trio.ClosedResourceError("closed before its task began")
        try:
            if self._failure is not None:
                raise self._failure
            if self._fallback is not None:
                return self._fallback
            # Prepared while the client sends its Proposal.
            options = inherited(self._bare)
            negotiation = self._negotiation(options)
            first = await self._confirm_client()
        except (OSError, _SilentClient):
            with stack.groups.handshake():  # counts as a failed handshake
                raise
        if first is None:
            ended = self._claim is not None and peer_end(sock) != "none"
            unable = FallbackReason.PEER_NOT_CAPABLE
            return Fallback.local(FallbackReason.ENDED_IN_HANDSHAKE if ended else unable)
        self._clc_begun = True
        with stack.groups.handshake():
            outcome = await run_negotiation(
                negotiation, self._bare, config.handshake_timeout, stack.timers,
                stack.spinner_for(self._route.rnic), first,
            )  # fmt: skip
            if isinstance(outcome, Established):
                client = None if self._required else self._client
                return established_stream(
                    stack, outcome, sock, config, client, options, self._accepted_from
                )
        return outcome.fallback

    def _negotiation(self, options: Inherited) -> ServerNegotiation:
        groups, route = self._stack.groups, self._route

        def admit(proposal: clc.Proposal) -> tuple[Rnic, Terms] | FallbackReason:
            if self.on_progress is not None:
                self.on_progress(self, self._stack.timers.now())
            return admit_proposal(proposal, route, groups.offer)

        negotiation = ServerNegotiation(
            host=groups,
            admit=admit,
            receive_buffer=receive_buffer_for(self.sock, options, self._config, _kind(route)),
        )
        negotiation.sock = self.sock
        return negotiation

    async def _confirm_client(self) -> bytes | None:
        """Wait until it is certain that the client sends CLC messages.

        Returns the first bytes then, as far as they were peeked at; otherwise None.
        """
        sock, patience = self.sock, self._config.handshake_timeout
        if self._claim is not None:
            agreed = await self._claim.confirm(self._bare, self._stack.timers.now() + patience)
            # Another program may have taken the port that the client announced, and this may be the
            # connection of that program. The client then withdraws the announcement, or connects
            # when this connection is closed.
            return (self._claim.first_bytes() or None) if agreed else None
        # The option of the SYN-ACK may have been lost. Then the client speaks plain TCP, which only
        # the first bytes show.
        return b"" if await _proposal_follows(sock, patience) else None


def _plain_name(sockname: tuple[str, int]) -> tuple[str, int]:
    return plain_address(sockname[0]), sockname[1]


def _kind(route: Route) -> Literal["software", "roce"]:
    return "software" if isinstance(route.rnic, FallbackReason) else route.rnic.kind


def admit_proposal(
    proposal: clc.Proposal, route: Route, offer: Offer | None
) -> tuple[Rnic, Terms] | FallbackReason:
    """Answer a Proposal (RFC 7609, 3.5.1.2): the RNIC and the terms, or a reason for TCP."""
    rnic = route.rnic
    if isinstance(rnic, FallbackReason):
        return rnic
    direct = None
    if not rnic.routable:
        offer = None
    elif offer is not None and proposal.v2 is not None:
        direct = rnic.is_direct(proposal.v2.gid)
    terms = answer(proposal, offer, prefix_refusal(proposal, rnic, route.local), direct)
    return terms if isinstance(terms, FallbackReason) else (rnic, terms)


def prefix_refusal(proposal: clc.Proposal, rnic: Rnic, address: str) -> FallbackReason | None:
    """The reason against version 1; None if there is none.

    A RoCE port must itself be on the common network, that of this side's ``address``, because SMC
    Accept carries the credentials of this port.
    """
    networks = [Prefix(each.prefix, each.length) for each in proposal.ipv6_prefixes]
    if proposal.ipv4_mask_length:
        networks = [Prefix(proposal.ipv4_subnet, proposal.ipv4_mask_length)]
    common = is_on_network(address, networks) if rnic.kind == "roce" else is_attached(networks)
    return None if common else FallbackReason.PREFIX_MISMATCH


class _SilentClient(Exception):
    """A client that is known to speak SMC-R has not sent a complete eye catcher."""


async def _proposal_follows(sock: trio.socket.SocketType, patience: float) -> bool:
    """True if the first bytes are a CLC eye catcher; they stay unread.

    A client that ends the connection, or its side of it, before that is a TCP client: the
    application gets the connection with the bytes that have arrived, FIN or reset included. The
    same holds for a client that sends an urgent byte within an eye catcher.

    Raises _SilentClient if the client has not sent enough in time. It is not handed over as TCP:
    under "assume" it is bound to send a Proposal, which must never reach an application.
    """
    first = b""
    with trio.move_on_after(patience):
        try:
            while len(first) < _EYE_CATCHER_SIZE:
                # A stream shorter than an eye catcher stays readable but does not grow.
                sock.setsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_RCVLOWAT, len(first) + 1)
                await wait_readable(sock)
                state = tcp_state(sock)
                if state == CLOSE and not unread_bytes(sock):
                    return False  # `recv` would consume the error, which is the application's
                before = len(first)
                first = await sock.recv(_EYE_CATCHER_SIZE, stdlib_socket.MSG_PEEK)
                if not clc.EYE_CATCHER.startswith(first):
                    return False
                if len(first) < _EYE_CATCHER_SIZE and state in (CLOSE, CLOSE_WAIT):
                    return False
                if len(first) == before:
                    # `recv` stops at an urgent byte, so the socket stays readable for ever.
                    if has_urgent_byte(sock):
                        return False
                    # Under memory pressure the kernel reports each byte as readable (tcp_poll).
                    await trio.sleep(_PRESSURE_PAUSE)
            return True
        finally:
            sock.setsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_RCVLOWAT, 1)
    raise _SilentClient(f"{len(first)} bytes in {patience} s from a client that should speak SMC-R")
