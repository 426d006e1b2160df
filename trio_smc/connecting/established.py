"""Makes the stream of a connection whose rendezvous is complete, for client and server."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any, Protocol

from trio_smc._base.reasons import FallbackReason
from trio_smc.datapath.connection import Connection
from trio_smc.host.tcp import close_with_reset
from trio_smc.rendezvous.negotiation import Established
from trio_smc.stack.policy import Peer, RouteHost
from trio_smc.streams.group_views import LinkGroupView
from trio_smc.streams.rdma_stream import RdmaStream, StreamOwner
from trio_smc.streams.socket_options import Inherited

if TYPE_CHECKING:
    import trio

    from trio_smc.config.config import Config
    from trio_smc.rendezvous.discovery.tcp_option import TcpOption
    from trio_smc.rnic.spinner import Spinner
    from trio_smc.rnic.verbs import Rnic
    from trio_smc.stack.groups import GroupTable

__all__ = ["HandshakeHost", "established_stream"]


class HandshakeHost(StreamOwner, RouteHost, Protocol):
    """The stack, as seen by a handshake of a client or a server."""

    groups: GroupTable
    tcp_option: TcpOption

    def check_not_forked(self) -> None:
        """Raise RuntimeError in a forked child."""

    def spinner_for(self, rnic: Rnic | FallbackReason) -> Spinner:
        """The spinner for the handshake of a connection that ``rnic`` serves."""


def established_stream(
    stack: HandshakeHost,
    outcome: Established,
    sock: trio.socket.SocketType,
    config: Config,
    peer: Peer | None,
    options: Inherited | None,
    peer_name: Any,
) -> RdmaStream:
    """Make the stream of a connection whose rendezvous is complete.

    The peer may have ended the connection already. The stream then shows what the peer sent, and
    how it ended.

    Args:
      sock: the TCP connection.
      peer: for `ShortConnections`; None if the peer accepts only SMC-R, so nothing is learned.
      options: the socket options that ``sock`` had before; None if the stack made the socket.
      peer_name: the peer's address; see `trio_smc.streams.stream.SmcSocket`.

    Raises:
      OSError: the connection was reset meanwhile.
    """
    endpoint = stack.groups.endpoint_of(outcome.connection)
    if endpoint is None:
        return _ended_stream(stack, outcome, sock, config, peer_name)
    if endpoint.reset:
        # The peer's first CDC message was invalid (4.8.2). The abort needs no stream.
        endpoint.closed_by_user = True
        raise ConnectionResetError(errno.ECONNRESET, "the new connection had to be reset")
    amortised = config.checkpoints == "amortised"
    endpoint.connection.set_policy(
        close_timeout=config.close_timeout,
        flush_later=stack.pump.flush_later if amortised else None,
    )
    endpoint.adopt(sock)
    view = LinkGroupView(endpoint.group, stack.check_not_forked)
    stream = RdmaStream(stack, endpoint, view, sock, config, peer_name)
    if options is not None:
        stream.inherit(options)
    stack.groups.count_smc(stream, outcome.group)
    if config.learns_short and peer is not None:
        stack.short_connections.opened(endpoint.connection, peer)
    return stream


def _ended_stream(
    stack: HandshakeHost,
    outcome: Established,
    sock: trio.socket.SocketType,
    config: Config,
    peer_name: Any,
) -> RdmaStream:
    """Make the stream of a connection that is already CLOSED."""
    connection = outcome.connection
    if not isinstance(connection, Connection) or connection.receiver.purged:
        raise ConnectionResetError(errno.ECONNRESET, "the new connection was reset")
    endpoint = stack.groups.ended_endpoint(connection, outcome.group)
    view = LinkGroupView(outcome.group, stack.check_not_forked)
    stream = RdmaStream(stack, endpoint, view, sock, config, peer_name)
    endpoint.announce_tcp_end()
    if connection.resets_tcp:
        close_with_reset(sock)
    else:
        sock.close()
    stack.groups.count_smc(stream, outcome.group)
    return stream
