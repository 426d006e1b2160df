"""Running a rendezvous over a TCP connection: the Trio shell around the negotiation cores.

Not a byte beyond the CLC messages may be consumed: after a Decline the application's bytes
follow at once.  `rendezvous.clc_reader` tells how many may be taken, and nothing is read any more
when only our last message is left to send; see `rendezvous.negotiation`.

Theory of operation: one task waits for whichever comes first: bytes of the peer, news of the link
group (`Negotiation.changed`, which cancels that wait and nothing else), or the CLC timer.  Reading
and writing are tried before anything is waited for, since each wait is a pass of the scheduler,
and passes are what a short-lived connection costs most.
"""

from __future__ import annotations

import math
import os
from functools import partial
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
        await _run(negotiation, sock, patience, reader)
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
        negotiation.changed = _nothing
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
        if negotiation.outgoing:
            await _answer(negotiation, sock, patience, reader)
            continue
        if _read(negotiation, sock, reader):
            continue
        if negotiation.state != state:
            state, deadline = negotiation.state, trio.current_time() + patience
        limit = deadline if negotiation.awaits_clc else math.inf
        changed = False

        def note_change(scope: trio.CancelScope) -> None:
            nonlocal changed
            changed = True
            scope.cancel()

        with trio.CancelScope(deadline=limit) as scope:
            negotiation.changed = partial(note_change, scope)
            await trio.lowlevel.wait_readable(sock)
        # This loop sees by itself what happens now: there is no wait to end.
        negotiation.changed = _nothing
        if scope.cancelled_caught and not changed:
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
        data = _write(sock, data)
        if data:
            with trio.fail_after(patience):
                while data:
                    await trio.lowlevel.wait_writable(sock)
                    data = _write(sock, data)
    except (OSError, trio.TooSlowError) as error:
        negotiation.tcp_lost(error if isinstance(error, OSError) else None)
    else:
        negotiation.sent()


def _nothing() -> None:
    """Nobody waits for news."""


def _write(sock: trio.socket.SocketType, data: bytes) -> bytes:
    """Send what TCP takes at once; returns the rest."""
    try:
        return data[os.write(sock.fileno(), data) :]
    except BlockingIOError:
        return data


def _read(
    negotiation: ClientNegotiation | ServerNegotiation,
    sock: trio.socket.SocketType,
    reader: ClcReader,
) -> bool:
    """Take bytes that have come, at most to the end of a message; False: there are none."""
    try:
        piece = os.read(sock.fileno(), reader.wanted)
        if not piece:
            raise ConnectionResetError("the peer closed the connection during the handshake")
        message = reader.feed_untrusted(piece)
        if message is not None:
            negotiation.receive_untrusted(message)
    except BlockingIOError:
        return False
    except ProtocolError as error:
        negotiation.protocol_error(error)
    except OSError as error:
        negotiation.tcp_lost(error)
    return True
