"""One ordinary contact before the checks: it finds out if there is an implementation to judge.

Without SMC-R at the other end, each check would wait for its patience and find nothing out.  The
first contact ends the run only if no judgement is possible: there is no CLC message, or no message
over the link.  Everything else is for the checks.

Then follows a contact with each further service that the options name.  The checks would blame the
implementation for a service of another kind: an echo service, for example, breaks each rule for a
side that only reads.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

import trio

from smc_conform.messages import ACCEPT, CONFIRM, DECLINE, PROPOSAL
from smc_conform.peer import Handshake, Peer, Phase
from smc_conform.roles import Role
from smc_conform.session import Session
from smc_conform.tcp import Tcp
from smc_conform.verdicts import Failed, Inconclusive, Silence
from trio_smc.rnic.verbs import RnicError

__all__ = ["FIRST_CLIENT", "NoContact", "first_contact"]

FIRST_CLIENT: Final = 60.0
"""Seconds that the first client may take to connect: a person starts it."""
_LOOK: Final = 0.02
_TYPE: Final = 4
_VERSION: Final = 7
_SHOWN: Final = 24
_PLAIN: Final = (
    "It seems to speak plain TCP: check that it runs with SMC-R (Linux: smc_run), and add "
    "--tcp-option if it requires the TCP option of RFC 7609, 3.1."
)


_LINE: Final = b"a line\r\n"
_ANSWER: Final = 0.3
"""Seconds in which an echo service would have answered."""
_Contact: TypeAlias = Callable[[Peer, Handshake], Awaitable[str]]


class NoContact(Exception):
    """No implementation of SMC-R can be reached; the text says what to check."""


async def first_contact(session: Session) -> None:
    """Make one contact, up to the first message over the link.

    Raises:
      NoContact: there is no answer in CLC, or no link.
    """
    if session.role is Role.CLIENT:
        with trio.move_on_after(max(FIRST_CLIENT, session.patience)):
            while not session.arrived:  # noqa: ASYNC110 - no event exists
                await trio.sleep(_LOOK)
        if not session.arrived:
            raise NoContact(
                f"no client has connected to port {session.port} within {FIRST_CLIENT:g} s; "
                "check the address and the port that it connects to"
            )
    daytime = session.options.daytime or 0
    for contact, port, name in (
        (_contact, 0, ""),
        (_discard, session.discard, f"--discard {session.discard}: "),
        (_daytime, daytime, f"--daytime {daytime}: "),
    ):
        if not port and name:
            continue
        begin = trio.current_time()
        problem = await _try(session, contact, port)
        if problem and trio.current_time() - begin < session.patience / 4:
            problem = await _try(session, contact, port)
        if problem:
            raise NoContact(f"{name}{problem} (--no-first-contact runs the checks nevertheless)")


async def _try(session: Session, contact: _Contact, port: int) -> str:
    """Make a contact; returns what is wrong, or an empty string."""
    async with trio.open_nursery() as nursery:
        peer = Peer(session, nursery)
        problem = ""
        try:
            with trio.move_on_after(2 * session.patience):
                problem = await contact(peer, await peer.start(port=port))
        except Inconclusive as error:
            problem = str(error)
        finally:
            peer.close()
            nursery.cancel_scope.cancel()
    return problem


async def _contact(peer: Peer, handshake: Handshake) -> str:
    tcp = handshake.tcp
    if peer.role is Role.SERVER:
        await handshake.advance(Phase.PROPOSED)
        problem = await _answer(peer, tcp, ACCEPT.kind, "SMC Proposal")
        if not problem and tcp.buffer[_VERSION] >> 4 != peer.version:
            problem = (
                f"{_name(peer)} answers in version {tcp.buffer[_VERSION] >> 4} of SMC-R, not "
                f"{peer.version}. Check --version, and that it has the UEID of --ueid."
            )
    else:
        problem = await _answer(peer, tcp, PROPOSAL.kind, "the TCP connection")
        if not problem:
            try:
                await handshake.advance(Phase.ACCEPTED)
            except Failed as failed:
                return f"{_name(peer)}: {failed}. Check --version, and the UEIDs of the client."
            problem = await _answer(peer, tcp, CONFIRM.kind, "SMC Accept")
    return problem or await _link(peer, handshake)


async def _answer(peer: Peer, tcp: Tcp, kind: int, to: str) -> str:
    """Wait for a CLC message of this type, and leave it in the buffer."""
    name = _name(peer)
    try:
        await peer.until(lambda: len(tcp.buffer) > _VERSION or tcp.is_foreign, "an answer", tcp)
    except Silence:
        return f"{name} sends nothing after {to} within {peer.session.patience:g} s. {_PLAIN}"
    except Failed:
        return f"{name} ends the TCP connection by {tcp.end} after {to}. {_PLAIN}"
    if tcp.is_foreign:
        return f"{name} sends {bytes(tcp.buffer[:_SHOWN])!r} after {to}, not CLC. {_PLAIN}"
    found = tcp.buffer[_TYPE]
    if found == DECLINE.kind != kind:
        message = await peer.any_clc(tcp)
        return (
            f"{name} declines SMC-R with the diagnosis 0x{message.diagnosis:08x}. Check its RNIC, "
            f"that both ends are in one subnet, --version, and --ueid. {_network(peer)}"
        )
    if found == PROPOSAL.kind != kind:
        return f"{name} sends SMC Proposal back, as an echo service without SMC-R does. {_PLAIN}"
    return ""


async def _link(peer: Peer, handshake: Handshake) -> str:
    """Continue up to a message over the link."""
    server = peer.role is Role.SERVER
    try:
        await handshake.advance(Phase.LINK_REQUESTED if server else Phase.LINK_CONFIRMED)
    except (Failed, Silence, RnicError) as error:
        group = handshake.group
        # Another message, or a wrong one, is for the checks.
        if group is None or group.first.inbox or group.first.answered:
            return ""
        if not isinstance(error, RnicError) and group.first.peer is None:
            return ""
        return f"{_name(peer)} speaks SMC-R, but no link comes up: {error}. {_network(peer)}"
    return ""


async def _discard(peer: Peer, handshake: Handshake) -> str:
    """Send a line to the discard service, which must not send any."""
    try:
        connection = await handshake.advance()
        connection.write(_LINE)
        await peer.ping(connection.link)
    except Silence as silence:
        return _unanswered(silence)
    except (Failed, RnicError):
        return ""  # for the checks
    await peer.quiet(_ANSWER)
    if connection.peer_produced:
        return "the service sends data, which a discard service (RFC 863) never does."
    if connection.has("closed") or connection.has("aborted"):
        return "the service ends the connection, which a discard service (RFC 863) never does."
    return ""


async def _daytime(peer: Peer, handshake: Handshake) -> str:
    """Wait for the line of the daytime service, and its end."""
    try:
        connection = await handshake.advance()
    except Silence as silence:
        return _unanswered(silence)
    except (Failed, RnicError):
        return ""  # for the checks
    try:
        await peer.until(lambda: connection.peer_produced > 0, "a line", connection)
        await connection.expect_flag("closed")
    except (Failed, Silence):
        done = "does not end the connection" if connection.peer_produced else "sends nothing"
        return f"the service {done}; a daytime service (RFC 867) sends a line and closes."
    return ""


def _unanswered(silence: Silence) -> str:
    return f"the service cannot be used over SMC-R as the echo service can: {silence}."


def _network(peer: Peer) -> str:
    if peer.session.roce:
        return (
            "Check that the RoCE ports of both ends are in one network, and that no firewall drops "
            "UDP port 4791."
        )
    return (
        "Check that both ends use the same private directory: --directory here, CONFORM_DIRECTORY "
        "of examples/conform_target.py."
    )


def _name(peer: Peer) -> str:
    options = peer.session.options
    if peer.role is Role.SERVER:
        return f"the server {options.host}:{options.port}"
    return f"the client on port {peer.session.port}"
