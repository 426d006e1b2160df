"""Running a rendezvous over a TCP connection: the Trio shell around the negotiation cores.

Not a byte beyond the CLC messages may be consumed: after a Decline the application's bytes
follow at once.  `rendezvous.clc_reader` tells how many may be taken, and the reading task is
stopped before our last message is sent; see `rendezvous.negotiation`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import trio

from trio_smc._base.errors import ProtocolError
from trio_smc._endpoint import unread_bytes
from trio_smc.rendezvous.clc_reader import ClcReader
from trio_smc.rendezvous.outcomes import Established, Failed

if TYPE_CHECKING:
    from trio_smc.rendezvous.client import ClientNegotiation
    from trio_smc.rendezvous.outcomes import FellBack
    from trio_smc.rendezvous.server import ServerNegotiation

__all__ = ["run_negotiation"]


async def run_negotiation(
    negotiation: ClientNegotiation | ServerNegotiation,
    sock: trio.socket.SocketType,
    patience: float,
) -> Established | FellBack:
    """Run a negotiation to its end.

    Args:
      negotiation: a client's must have been started.
      sock: the TCP connection; stays open whatever happens.
      patience: seconds for each CLC message (RFC 7609, C.5).

    Raises:
      OSError: the TCP connection must end (C.5, C.6, C.7).
    """
    reader = ClcReader()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_read_messages, negotiation, sock, reader)
            await _run(negotiation, sock, patience, reader)
            nursery.cancel_scope.cancel()
        if negotiation.outcome is None:
            await _answer(negotiation, sock, patience, reader)
        outcome = negotiation.outcome
        if isinstance(outcome, Established) and reader.halfway:
            # Bytes on the TCP connection after the switch: the peer is out of step.
            outcome.connection.abort()
            raise ConnectionResetError("the server went on sending over TCP")
    except BaseException:
        negotiation.tcp_lost()
        if isinstance(negotiation.outcome, Established):
            negotiation.outcome.connection.abort()
        raise
    finally:
        negotiation.changed = lambda: None
    if outcome is None:
        raise RuntimeError(f"a negotiation without an outcome, in {negotiation.state}")
    if isinstance(outcome, Failed):
        raise outcome.error
    return outcome


async def _run(
    negotiation: ClientNegotiation | ServerNegotiation,
    sock: trio.socket.SocketType,
    patience: float,
    reader: ClcReader,
) -> None:
    """Until there is an outcome, or only our last message is left to send."""
    state, deadline = "", 0.0
    while negotiation.outcome is None and not negotiation.has_last_word:
        changed = trio.Event()
        negotiation.changed = changed.set
        if negotiation.outgoing:
            await _answer(negotiation, sock, patience, reader)
            continue
        if negotiation.state != state:
            state, deadline = negotiation.state, trio.current_time() + patience
        with trio.move_on_at(deadline if negotiation.awaits_clc else math.inf) as scope:
            await changed.wait()
        if scope.cancelled_caught and not changed.is_set():
            negotiation.timed_out()


async def _answer(
    negotiation: ClientNegotiation | ServerNegotiation,
    sock: trio.socket.SocketType,
    patience: float,
    reader: ClcReader,
) -> None:
    """Send what is outgoing, unless the peer went on without waiting for it."""
    if reader.halfway or unread_bytes(sock):
        negotiation.protocol_error(ProtocolError("the peer did not wait for an answer"))
        return
    data = b"".join(negotiation.outgoing)
    negotiation.outgoing.clear()
    try:
        with trio.fail_after(patience):
            while data:
                data = data[await sock.send(data) :]
    except (OSError, trio.TooSlowError) as error:
        negotiation.tcp_lost(error if isinstance(error, OSError) else None)
    else:
        negotiation.sent()


async def _read_messages(
    negotiation: ClientNegotiation | ServerNegotiation,
    sock: trio.socket.SocketType,
    reader: ClcReader,
) -> None:
    try:
        while negotiation.outcome is None and not negotiation.has_last_word:
            piece = await sock.recv(reader.wanted)
            if not piece:
                raise ConnectionResetError("the peer closed the connection during the handshake")
            message = reader.feed_untrusted(piece)
            if message is not None:
                negotiation.receive_untrusted(message)
    except ProtocolError as error:
        negotiation.protocol_error(error)
    except OSError as error:
        negotiation.tcp_lost(error)
