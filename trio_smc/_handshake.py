"""Running a rendezvous over a TCP connection: the Trio shell around the negotiation cores.

Not a byte beyond the CLC messages may be consumed: after a Decline the application's bytes
follow at once.  So a message is read in two exact pieces, header and rest, and the reading task
is stopped before our last message is sent.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import trio

from trio_smc._base.errors import ProtocolError
from trio_smc.rendezvous import clc
from trio_smc.rendezvous.negotiation import Established, Failed

if TYPE_CHECKING:
    from trio_smc.rendezvous.client import ClientNegotiation
    from trio_smc.rendezvous.negotiation import FellBack
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
    changed = trio.Event()

    negotiation.changed = lambda: changed.set()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_read_messages, negotiation, sock)
            state, deadline = "", 0.0
            while negotiation.outcome is None:
                changed = trio.Event()
                if negotiation.outgoing:
                    await _flush(negotiation, sock, patience)
                if negotiation.state != state:
                    state, deadline = negotiation.state, trio.current_time() + patience
                if await _wait(negotiation, changed, deadline):
                    continue
                negotiation.timed_out()
            nursery.cancel_scope.cancel()
        if negotiation.outgoing:
            await _flush(negotiation, sock, patience)
    except BaseException:
        negotiation.tcp_lost()
        if isinstance(negotiation.outcome, Established):
            negotiation.outcome.connection.abort()
        raise
    finally:
        negotiation.changed = lambda: None
    outcome = negotiation.outcome
    if isinstance(outcome, Failed):
        raise outcome.error
    return outcome


async def _wait(
    negotiation: ClientNegotiation | ServerNegotiation, changed: trio.Event, deadline: float
) -> bool:
    """False when the CLC timer runs and is over before anything changes."""
    if negotiation.outcome is not None or negotiation.outgoing:
        return True
    with trio.move_on_at(deadline if negotiation.awaits_clc else math.inf):
        await changed.wait()
        return True
    return False


async def _flush(
    negotiation: ClientNegotiation | ServerNegotiation,
    sock: trio.socket.SocketType,
    patience: float,
) -> None:
    data = b"".join(negotiation.outgoing)
    negotiation.outgoing.clear()
    try:
        with trio.fail_after(patience):
            while data:
                data = data[await sock.send(data) :]
    except (OSError, trio.TooSlowError) as error:
        cause = error if isinstance(error, OSError) else None
        negotiation.tcp_lost(cause)


async def _read_messages(
    negotiation: ClientNegotiation | ServerNegotiation, sock: trio.socket.SocketType
) -> None:
    try:
        while negotiation.outcome is None:
            header = await _receive_exactly(sock, clc.HEADER_SIZE)
            length = clc.message_length_untrusted(header)
            message = header + await _receive_exactly(sock, length - len(header))
            negotiation.receive_untrusted(message)
            negotiation.changed()
    except ProtocolError as error:
        negotiation.protocol_error(error)
    except OSError as error:
        negotiation.tcp_lost(error)


async def _receive_exactly(sock: trio.socket.SocketType, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = await sock.recv(count - len(data))
        if not piece:
            raise ConnectionResetError("the peer closed the connection during the handshake")
        data += piece
    return data
