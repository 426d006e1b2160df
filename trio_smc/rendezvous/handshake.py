"""The CLC handshake over a real TCP connection: the Trio task around a negotiation.

If the peer ends the TCP connection, no error of the socket may be consumed: the application gets
the connection then, and learns from the socket what it would have learned over TCP. So a read comes
only after the kernel has counted unread bytes, and a write only if the peer has not ended.

No byte after the CLC messages may be consumed: after a Decline the application's bytes follow at
once. So a peek looks for a whole message, and only its bytes are read. `wire.clc.ClcReader` limits
the reads if a message arrives in parts. Nothing is read when only this side's last message is left
to send; see `rendezvous.negotiation`.

Theory of operation
-------------------
One task waits for bytes of the peer, for `Negotiation.changed`, or for the CLC timer. The last two
end the wait as if the socket were being closed, because a cancel scope for each wait costs more:
about 10 µs (docs/decisions.md). Another task may close the socket, and the kernel then gives its
descriptor number to the next file. So no number is kept; each use gets it from the socket. After
this side's answer nothing is read before the socket is readable again, because the peer needs some
time for its next message.
"""

from __future__ import annotations

import errno
import os
import socket as stdlib_socket
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from trio_smc._base.errors import ProtocolError
from trio_smc._base.waits import wait_readable, wait_writable
from trio_smc.host.tcp import end_waits, peer_end, unread_bytes
from trio_smc.rendezvous.negotiation import Established, Failed
from trio_smc.wire.clc import MAX_MESSAGE_SIZE, ClcReader

if TYPE_CHECKING:
    from trio_smc._base.timers import Timers
    from trio_smc.rendezvous.negotiation import FellBack, Negotiation
    from trio_smc.rnic.spinner import Spinner

__all__ = [
    "run_negotiation",
]

_Socket = trio.socket.SocketType | stdlib_socket.socket

_TIME_OUT_COST: Final = 0.0001
"""Seconds of processor time that the task of a handshake takes to end by time-out: 65 µs in
``python -m tests.e2e.mass_ends handshakes 450``, and a reserve."""


async def run_negotiation(
    negotiation: Negotiation,
    sock: _Socket,
    patience: float,
    timers: Timers,
    spinner: Spinner,
    arrived: bytes = b"",
) -> Established | FellBack:
    """Run a negotiation to its end.

    Args:
      negotiation: of a client: it has been started. Of a server: there are bytes to read.
      sock: the TCP connection, which stays open; the socket that Trio's wraps, if it is known,
        because its methods are faster.
      patience: seconds for each CLC message (RFC 7609, C.5).
      timers, spinner: those of the stack.
      arrived: the result of a peek, if the caller has peeked.

    Raises:
      OSError: the TCP connection must end (C.5, C.6, C.7).
    """
    reader = ClcReader()
    try:
        await _run(negotiation, sock, patience, timers, spinner, reader, arrived)
        if negotiation.outcome is None:
            await _answer(negotiation, sock, patience, reader)
        outcome = negotiation.outcome
        if isinstance(outcome, Established) and reader.halfway:
            # Bytes on the TCP connection after the switch are a violation.
            outcome.connection.abort()
            raise ConnectionResetError("the server sent bytes over TCP after the switch")
    except BaseException as error:
        negotiation.tcp_lost()
        outcome = negotiation.outcome
        if isinstance(outcome, Established):
            if isinstance(error, trio.Cancelled):
                # The peer's last message came before the cancellation, and the peer's application
                # may have the connection.  The caller gets it, too, and closes it when its next
                # checkpoint raises Cancelled.
                return outcome
            outcome.connection.abort()
        raise
    finally:
        negotiation.changed = _no_op
        negotiation.machine.release_model()
    if outcome is None:
        raise RuntimeError(f"a negotiation without an outcome, in {negotiation.state}")
    if isinstance(outcome, Failed):
        raise outcome.error
    return outcome


async def _run(
    negotiation: Negotiation,
    sock: _Socket,
    patience: float,
    timers: Timers,
    spinner: Spinner,
    reader: ClcReader,
    arrived: bytes,
) -> None:
    """Run until there is an outcome, or only this side's last message is left to send."""
    state, deadline, woken = "", 0.0, False
    while negotiation.outcome is None and not negotiation.has_final_message:
        if negotiation.outgoing:
            await _answer(negotiation, sock, patience, reader)
        elif _read(negotiation, sock, reader, arrived, woken=woken):
            arrived, woken = b"", False
            continue
        if negotiation.outgoing or negotiation.outcome is not None:
            continue
        if negotiation.awaits_clc and spinner.until(lambda: _read(negotiation, sock, reader)):
            continue
        if negotiation.state != state:
            state, deadline = negotiation.state, timers.now() + patience
        spinner.sleeping += 1
        try:
            expired = await _wait(negotiation, sock, timers, deadline)
        finally:
            spinner.sleeping -= 1
        reader.nothing_follows, woken = False, True  # more may have arrived meanwhile, or the end
        if sock.fileno() < 0:
            raise _given_up()
        if expired:
            negotiation.timed_out()


async def _wait(negotiation: Negotiation, sock: _Socket, timers: Timers, deadline: float) -> bool:
    """Wait for bytes, a change or the CLC timer; True if the timer has expired."""
    expired = False

    def expire() -> None:
        nonlocal expired
        expired = True
        timers.charge(_TIME_OUT_COST)
        end_waits(sock)

    state = negotiation.state
    timer = timers.call_at(deadline, expire) if negotiation.awaits_clc else None
    negotiation.changed = partial(end_waits, sock)
    try:
        await wait_readable(_descriptor(sock))
    except trio.ClosedResourceError:
        return expired and negotiation.outcome is None and negotiation.state == state
    finally:
        # The caller sees later changes itself, so there is no wait to end.
        negotiation.changed = _no_op
        if timer is not None:
            timer.cancel()
    return False


async def _answer(
    negotiation: Negotiation,
    sock: _Socket,
    patience: float,
    reader: ClcReader,
) -> None:
    """Send ``negotiation.outgoing``, unless the peer has sent bytes before this answer."""
    # An answer that is sent at once needs no look: nothing followed the message in the same peek.
    if reader.halfway or (not reader.nothing_follows and unread_bytes(_descriptor(sock))):
        negotiation.protocol_error(ProtocolError("the peer did not wait for an answer"))
        return
    if peer_end(sock) != "none":
        negotiation.tcp_lost()  # a write would consume the error, or cause one
        return
    data = b"".join(negotiation.outgoing)
    negotiation.outgoing.clear()
    try:
        data = _write(sock, data)
        if data:
            with trio.fail_after(patience):
                while data:
                    await wait_writable(_descriptor(sock))
                    data = _write(sock, data)
    except trio.TooSlowError:
        raise TimeoutError(errno.ETIMEDOUT, "the peer does not read the SMC-R handshake") from None
    except OSError as error:
        negotiation.tcp_lost(error)
    else:
        negotiation.sent()


def _no_op() -> None:
    """No-op: no task waits."""


def _descriptor(sock: _Socket) -> int:
    """The descriptor of the socket.

    Raises trio.ClosedResourceError: another task has closed it.
    """
    number = sock.fileno()
    if number < 0:
        raise _given_up()
    return number


def _given_up() -> trio.ClosedResourceError:
    return trio.ClosedResourceError("the handshake was given up")


def _write(sock: _Socket, data: bytes) -> bytes:
    """Send as much as TCP accepts at once; return the rest."""
    try:
        return data[os.write(_descriptor(sock), data) :]
    except BlockingIOError:
        return data


def _note_end(negotiation: Negotiation, sock: _Socket, reader: ClcReader) -> bool:
    """Fail if the peer has ended the TCP connection; False if it has not, or bytes came before."""
    if peer_end(sock) == "none" or unread_bytes(_descriptor(sock)):
        return False
    if reader.halfway:
        raise ProtocolError("the peer ended the connection within a CLC message")
    negotiation.tcp_lost()
    return True


def _read(
    negotiation: Negotiation,
    sock: _Socket,
    reader: ClcReader,
    arrived: bytes = b"",
    *,
    woken: bool = False,
) -> bool:
    """Read bytes that have arrived, at most to the end of a message; False if none have.

    Args:
      arrived: the result of a peek; empty: there was none.
      woken: the socket was readable: if there are no unread bytes, the peer has probably ended the
        connection.
    """
    number = sock.fileno()  # inlined `_descriptor`
    if number < 0:
        raise _given_up()
    try:
        if not arrived and not unread_bytes(number):
            return woken and _note_end(negotiation, sock, reader)
        message = None
        if isinstance(sock, stdlib_socket.socket):  # Trio's sockets have no `recv` that is a call
            arrived = arrived or sock.recv(MAX_MESSAGE_SIZE, stdlib_socket.MSG_PEEK)
            message = reader.whole_untrusted(arrived, negotiation.expected)
        if message is not None:
            os.read(number, len(message))
        else:
            piece = os.read(number, reader.wanted)
            if not piece:
                raise ConnectionResetError("the peer closed the connection during the handshake")
            message = reader.feed_untrusted(piece, negotiation.expected)
        if message is not None:
            negotiation.receive_untrusted(message)
    except BlockingIOError:
        return False
    except ProtocolError as error:
        negotiation.protocol_error(error)
    except OSError as error:
        negotiation.tcp_lost(error)
    return True
