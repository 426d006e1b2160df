"""CLC messages: fields, lengths, fragments, order, Declines, time-outs and ends of TCP.

RFC 7609, A.2, C.1 and C.4 to C.6.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from smc_conform.messages import (
    ACCEPT,
    CONFIRM,
    DECLINE,
    EYE_CATCHER,
    V2,
    Message,
    pack,
    with_bytes,
)
from smc_conform.peer import Peer, Phase
from smc_conform.registry import check
from smc_conform.roles import Role
from smc_conform.verdicts import Differs, Failed, Silence
from trio_smc.host.addresses import interface_prefixes

SERVER, CLIENT = Role.SERVER, Role.CLIENT


async def credentials(peer: Peer) -> Message:
    """The implementation's SMC Accept, or its SMC Confirm.

    The first contact ends: an implementation may have one at a time.
    """
    handshake = await peer.reach(Phase.ACCEPTED if peer.role is SERVER else Phase.CONFIRMED)
    handshake.tcp.reset()
    return handshake.accept if peer.role is SERVER else handshake.confirm


async def two_credentials(peer: Peer) -> tuple[Message, Message]:
    """Those of two connections.  The first one is complete before the second one begins."""
    first = await peer.reach(Phase.READY)
    return first.accept if peer.role is SERVER else first.confirm, await credentials(peer)


def own_decline(peer: Peer, diagnosis: int = 0x03010000) -> bytes:
    """SMC Decline of the suite."""
    layout = V2[DECLINE] if peer.version > 1 else DECLINE
    return pack(layout, peer_id=peer.new_peer_id(), diagnosis=diagnosis)


# --- fields --------------------------------------------------------------------------------------


@check(
    "A.2-1",
    "A message begins and ends with the eye catcher, and its length counts both.",
    needs=("version-1",),
)
async def framing(peer: Peer) -> None:
    message = await credentials(peer)
    raw = message.raw
    if raw[:4] != EYE_CATCHER or raw[-4:] != EYE_CATCHER:
        raise Failed(f"{message.name} begins with {raw[:4].hex()} and ends with {raw[-4:].hex()}")
    if len(raw) != 68:
        raise Failed(f"{message.name} has {len(raw)} bytes instead of 68")


@check(
    "A.2-2",
    "The version nibble of the answer is 1 where version 1 was proposed.",
    needs=("version-1",),
)
async def version_nibble(peer: Peer) -> None:
    message = await credentials(peer)
    if message.version != 1:
        raise Failed(f"{message.name} has version {message.version}")


@check("A.2-3", "Reserved bits of SMC Accept and SMC Confirm are zero.")
async def reserved_bits(peer: Peer) -> None:
    message = await credentials(peer)
    found = message.reserved_bits()
    if peer.role is CLIENT and found[7] == 0x08 and not any(found[8:]):
        raise Differs("SMC Confirm repeats the first-contact flag, which is a reserved bit there")
    if wrong := message.reserved_words():
        raise Failed(wrong)


@check("A.2.3-1", "The QP number in the credentials is not zero, and the GID and MAC are given.")
async def names_a_queue_pair(peer: Peer) -> None:
    message = await credentials(peer)
    if message.qp_number == 0 or message.gid == bytes(16) or message.mac == bytes(6):
        raise Failed(f"QP {message.qp_number}, GID {message.gid.hex()}, MAC {message.mac.hex()}")


@check("A.2.3-2", "The RMBE index counts from 1.")
async def element_index(peer: Peer) -> None:
    message = await credentials(peer)
    if message.rmbe_index == 0:
        raise Failed("the RMBE index is 0")


@check("A.2.3-3", "The buffer size is one of the six sizes from 16 KiB to 512 KiB.")
async def buffer_size(peer: Peer) -> None:
    message = await credentials(peer)
    if message.size_code > 5:
        raise Differs(f"the size code is {message.size_code}, which the RFC reserves")


@check("A.2.3-4", "The QP MTU is one of the five defined values.")
async def mtu_value(peer: Peer) -> None:
    message = await credentials(peer)
    if not 1 <= message.qp_mtu <= 5:
        raise Failed(f"the QP MTU is {message.qp_mtu}")


@check("A.2.3-5", "The element lies within the 64-bit address space.")
async def element_address(peer: Peer) -> None:
    message = await credentials(peer)
    size = 16 * 1024 << message.size_code
    if message.rmb_address + message.rmbe_index * size > 1 << 64:
        raise Failed(f"the element ends beyond 2**64: address 0x{message.rmb_address:x}")


@check("A.2.1-1", "The peer ID is not zero, and the same in all connections.")
async def same_peer_id(peer: Peer) -> None:
    first, second = await credentials(peer), await credentials(peer)
    if first.peer_id == bytes(8):
        raise Failed("the peer ID is zero")
    if first.peer_id != second.peer_id:
        raise Failed(f"two peer IDs: {first.peer_id.hex()} and {second.peer_id.hex()}")


@check(
    "A.2.3-6", "Two connections of first contact have different queue pairs.", needs=("parallel",)
)
async def different_queue_pairs(peer: Peer) -> None:
    first, second = await two_credentials(peer)
    if (first.gid, first.qp_number) == (second.gid, second.qp_number):
        raise Failed(f"both name QP 0x{first.qp_number:06x}, although each begins a link group")


@check("A.2.3-7", "Two connections have different alert tokens.", needs=("parallel",))
async def different_tokens(peer: Peer) -> None:
    first, second = await two_credentials(peer)
    if first.alert_token == second.alert_token:
        raise Failed(f"both have the alert token 0x{first.alert_token:08x}")


@check(
    "A.2.2-1", "SMC Proposal has the length that its prefixes need.", CLIENT, needs=("version-1",)
)
async def proposal_length(peer: Peer) -> None:
    raw = (await peer.reach(Phase.PROPOSED)).proposal.raw
    start = 40 + int.from_bytes(raw[38:40], "big")
    wanted = start + 8 + 17 * raw[start + 7] + 4
    if raw[7] >> 4 == 1 and len(raw) != wanted:
        raise Failed(f"SMC Proposal has {len(raw)} bytes instead of {wanted}")
    if len(raw) < wanted or raw[-4:] != EYE_CATCHER:
        raise Failed(f"SMC Proposal of {len(raw)} bytes does not hold its prefixes")


@check(
    "A.2.2-2",
    "SMC Proposal gives the subnet of the interface that the client uses.",
    CLIENT,
    needs=("version-1",),
)
async def proposal_subnet(peer: Peer) -> None:
    handshake = await peer.reach(Phase.PROPOSED)
    raw = handshake.proposal.raw
    start = 40 + int.from_bytes(raw[38:40], "big")
    given = raw[start : start + 4], raw[start + 4]
    networks = [tuple(each) for each in interface_prefixes(handshake.tcp.local)]
    if given not in networks and given[0] != bytes(4):
        raise Failed(f"SMC Proposal gives {given[0].hex()}/{given[1]} instead of {networks}")


@check(
    "A.2.2-3",
    "SMC Proposal names the client's preferred RNIC: peer ID, GID and MAC.",
    CLIENT,
    needs=("version-1",),
)
async def proposal_rnic(peer: Peer) -> None:
    proposal = (await peer.reach(Phase.PROPOSED)).proposal
    if bytes(16) == proposal.gid or bytes(6) == proposal.mac or bytes(8) == proposal.peer_id:
        raise Failed("SMC Proposal has a peer ID, GID or MAC of zeros")


@check("A.2.4-1", "SMC Confirm has the peer ID of SMC Proposal.", CLIENT, needs=("version-1",))
async def confirm_peer_id(peer: Peer) -> None:
    handshake = await peer.reach(Phase.CONFIRMED)
    if handshake.confirm.peer_id != handshake.proposal.peer_id:
        raise Failed("SMC Proposal and SMC Confirm have different peer IDs")


@check(
    "A.2-4", "Reserved bits are ignored when they are received.", robust=True, needs=("version-1",)
)
async def ignores_reserved_bits(peer: Peer) -> None:
    def filled(raw: bytes) -> bytes:
        raw = with_bytes(raw, 51, b"\xff")
        return with_bytes(raw, 60, b"\xff")

    handshake = await peer.reach(
        Phase.READY,
        tamper={
            "proposal": lambda raw: with_bytes(raw, 45, b"\xff\xff"),
            "accept": filled,
            "confirm": filled,
        },
    )
    await handshake.connection.echo(b"reserved bits are reserved")


# --- lengths, eye catchers, types (C.6) ----------------------------------------------------------

Lie = Callable[[bytes], bytes]


def _at(place: int, value: bytes) -> Lie:
    return lambda raw: with_bytes(raw, place, value)


_MALFORMED: dict[str, tuple[str, Lie]] = {
    "1": ("a length of 51 bytes", _at(5, b"\0\x33")),
    "2": ("a length of 8 bytes, its header's", _at(5, b"\0\x08")),
    "3": ("a length of zero", _at(5, b"\0\0")),
    "4": ("a length of 65,535 bytes", _at(5, b"\xff\xff")),
    "5": ("no eye catcher at its end", lambda raw: raw[:-4] + b"SMCR"),
    "6": ("one wrong byte in the eye catcher at its end", lambda raw: raw[:-1] + b"\0"),
    "7": ("version 0", _at(7, b"\0")),
    "8": ("type 0", _at(4, b"\0")),
    "9": ("type 5", _at(4, b"\x05")),
    "10": ("type 255", _at(4, b"\xff")),
}


async def _malformed(lie: Lie, peer: Peer) -> None:
    name = "proposal" if peer.role is SERVER else "accept"
    phase = Phase.PROPOSED if peer.role is SERVER else Phase.ACCEPTED
    handshake = await peer.reach(phase, tamper={name: lie})
    await peer.refused(handshake.tcp)


for _number, (_words, _lie) in _MALFORMED.items():
    check(
        f"C.6-{_number}",
        f"A first CLC message with {_words} ends the TCP connection, without a fallback.",
        robust=True,
    )(partial(_malformed, _lie))


_MALFORMED_PROPOSALS: dict[str, tuple[str, Lie]] = {
    "11": ("whose prefix area begins beyond its end", _at(38, b"\xff\xf0")),
    "12": ("whose prefix area begins in its trailer", _at(38, b"\0\x08")),
    "13": ("that counts 9 prefixes", _at(47, b"\x09")),
    "14": ("that counts 255 prefixes", _at(47, b"\xff")),
    "15": ("with a mask of 33 bits", _at(44, b"\x21")),
    "16": ("that counts a prefix which it does not have", _at(47, b"\x01")),
}


async def _malformed_proposal(lie: Lie, peer: Peer) -> None:
    handshake = await peer.reach(Phase.PROPOSED, tamper={"proposal": lie})
    if await peer.refused(handshake.tcp, decline=True) == "Decline":
        raise Differs("the server declines, where C.6 lets it end the TCP connection")


for _number, (_words, _lie) in _MALFORMED_PROPOSALS.items():
    check(
        f"C.6-{_number}", f"An SMC Proposal {_words} is refused.", SERVER, needs=("version-1",),
        robust=True,
    )(partial(_malformed_proposal, _lie))  # fmt: skip


@check("C.6-29", "An SMC Proposal with 9 prefixes is refused.", SERVER, needs=("version-1",),
       robust=True)  # fmt: skip
async def nine_prefixes(peer: Peer) -> None:
    prefixes = tuple((bytes((0xFD, number)) + bytes(14), 64) for number in range(9))
    handshake = await peer.reach(Phase.PROPOSED, change={"proposal": {"prefixes": prefixes}})
    if await peer.refused(handshake.tcp, decline=True) == "Decline":
        raise Differs("the server declines, where C.6 lets it end the TCP connection")


_IMPOSSIBLE: dict[str, tuple[str, dict[str, int | bytes]]] = {
    "17": ("an RMBE index of 0", {"rmbe_index": 0}),
    "18": ("QP number 0", {"qp_number": 0}),
    "19": ("a GID of zeros", {"gid": bytes(16)}),
    "20": ("an element beyond the end of memory", {"rmb_address": (1 << 64) - 1}),
}


async def _impossible(values: dict[str, int | bytes], peer: Peer) -> None:
    name, phase = ("confirm", Phase.CONFIRMED)
    if peer.role is CLIENT:
        name, phase = ("accept", Phase.ACCEPTED)
    handshake = await peer.reach(phase, change={name: values})
    if await peer.refused(handshake.tcp, decline=True) == "Decline":
        raise Differs("the implementation declines, where C.6 lets it end the TCP connection")


for _number, (_words, _values) in _IMPOSSIBLE.items():
    check(
        f"C.6-{_number}", f"Credentials with {_words} are refused.", robust=True
    )(partial(_impossible, _values))  # fmt: skip


@check("C.6-21", "A reserved QP MTU at first contact is declined, and TCP continues.")
async def reserved_mtu(peer: Peer) -> None:
    for value in (0, 6, 15):
        name, phase = ("confirm", Phase.CONFIRMED)
        if peer.role is CLIENT:
            name, phase = ("accept", Phase.ACCEPTED)
        handshake = await peer.reach(phase, change={name: {"qp_mtu": value}})
        await peer.declined(handshake.tcp)
        await peer.plain_echo(handshake.tcp)


@check("C.6-22", "A message that is not CLC ends TCP once CLC has begun.", robust=True)
async def not_clc(peer: Peer) -> None:
    handshake = await peer.reach(Phase.ACCEPTED if peer.role is SERVER else Phase.PROPOSED)
    await handshake.tcp.send(b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n" * 4)
    await peer.refused(handshake.tcp)


# --- fragments (A.2) -----------------------------------------------------------------------------


@check("A.2-5", "Messages that arrive byte by byte are put together.")
async def byte_by_byte(peer: Peer) -> None:
    handshake = await peer.start()
    handshake.tcp.segments = tuple(range(1, 68))
    await handshake.advance()
    await handshake.connection.echo(b"in pieces")


@check("A.2-6", "A message in two segments is put together, wherever it is split.")
async def two_segments(peer: Peer) -> None:
    for at in (3, 4, 5, 7, 8, 9, 51):
        handshake = await peer.start()
        handshake.tcp.segments = (at,)
        await handshake.advance(Phase.CONFIRMED)
        handshake.tcp.reset()


# --- order (C.6) ---------------------------------------------------------------------------------


def _own_credentials(peer: Peer, kind: int) -> bytes:
    """SMC Accept or SMC Confirm without a queue pair behind it."""
    rnic = peer.session.devices[0].rnic
    layout = ACCEPT if kind == ACCEPT.kind else CONFIRM
    return pack(
        V2[layout] if peer.version > 1 else layout, peer_id=peer.new_peer_id(), gid=rnic.gid,
        mac=rnic.mac, qp_number=0x4711, rkey=0x12345678, rmbe_index=1, alert_token=7,
        qp_mtu=rnic.mtu, rmb_address=0x10000, psn=1,
    )  # fmt: skip


@check("C.6-23", "SMC Confirm in place of the first message ends the TCP connection.", robust=True)
async def confirm_first(peer: Peer) -> None:
    handshake = await peer.reach(Phase.TCP if peer.role is SERVER else Phase.PROPOSED)
    await handshake.tcp.send(_own_credentials(peer, CONFIRM.kind))
    await peer.refused(handshake.tcp)


@check("C.6-24", "SMC Accept to a server ends the TCP connection.", SERVER, robust=True)
async def accept_to_server(peer: Peer) -> None:
    for phase in (Phase.TCP, Phase.ACCEPTED):
        handshake = await peer.reach(phase)
        await handshake.tcp.send(_own_credentials(peer, ACCEPT.kind))
        await peer.refused(handshake.tcp)


@check("C.6-25", "A second SMC Proposal in place of SMC Confirm ends TCP.", SERVER, robust=True)
async def second_proposal(peer: Peer) -> None:
    handshake = await peer.reach(Phase.ACCEPTED)
    handshake.phase = Phase.TCP
    await handshake.advance(Phase.PROPOSED)
    await peer.refused(handshake.tcp)


@check("C.6-26", "SMC Proposal to a client ends the TCP connection.", CLIENT, robust=True)
async def proposal_to_client(peer: Peer) -> None:
    handshake = await peer.reach(Phase.PROPOSED)
    await handshake.tcp.send(handshake.proposal.raw)
    await peer.refused(handshake.tcp)


@check("C.6-27", "Two SMC Proposals in one segment end the TCP connection.", SERVER, robust=True)
async def two_proposals_at_once(peer: Peer) -> None:
    handshake = await peer.reach(Phase.PROPOSED, tamper={"proposal": lambda raw: raw + raw})
    answer = await peer.clc_or_end(handshake.tcp)
    if answer is not None and answer.layout is ACCEPT:
        await peer.ended(handshake.tcp)
        raise Differs("the server answers the first one, and takes the second one for SMC Confirm")
    if answer is not None:
        raise Failed(f"the answer is {answer}")


@check("C.6-28", "Bytes after SMC Accept end the TCP connection.", CLIENT, robust=True)
async def bytes_after_accept(peer: Peer) -> None:
    handshake = await peer.reach(Phase.ACCEPTED, tamper={"accept": lambda raw: raw + b"more"})
    await peer.until(
        lambda: handshake.tcp.end is not None or len(handshake.tcp.buffer) >= 68,
        "the end of the TCP connection",
    )
    if handshake.tcp.end is None:
        await peer.ended(handshake.tcp)


# --- Declines (C.1, C.4) -------------------------------------------------------------------------


@check("C.1-1", "SMC Decline in place of the peer's next message leads to TCP.")
async def decline_leads_to_tcp(peer: Peer) -> None:
    handshake = await peer.reach(Phase.ACCEPTED if peer.role is SERVER else Phase.PROPOSED)
    await handshake.tcp.send(own_decline(peer))
    await peer.plain_echo(handshake.tcp)


@check("C.1-2", "SMC Decline in place of SMC Proposal leads to TCP.", SERVER)
async def decline_first(peer: Peer) -> None:
    handshake = await peer.reach(Phase.TCP)
    await handshake.tcp.send(own_decline(peer))
    await peer.plain_echo(handshake.tcp)


@check("C.1-3", "Bytes in the segment of SMC Decline belong to the application.")
async def data_behind_decline(peer: Peer) -> None:
    handshake = await peer.reach(Phase.ACCEPTED if peer.role is SERVER else Phase.PROPOSED)
    tcp = handshake.tcp
    await tcp.send(own_decline(peer) + b"at once")
    await peer.until(lambda: len(tcp.buffer) >= 7, "the echo over TCP", tcp)
    if (back := tcp.take()) != b"at once":
        raise Failed(f"the echo over TCP is {back!r}")


@check("C.1-4", "SMC Decline is not answered by SMC Decline.")
async def decline_is_not_answered(peer: Peer) -> None:
    handshake = await peer.reach(Phase.ACCEPTED if peer.role is SERVER else Phase.PROPOSED)
    tcp = handshake.tcp
    await tcp.send(own_decline(peer))
    await tcp.send(b"x")
    await peer.until(lambda: len(tcp.buffer) >= 1, "the echo over TCP", tcp)
    if (back := tcp.take()) != b"x":
        raise Failed(f"after SMC Decline came {back.hex()}")


@check("C.1-5", "Any diagnosis in SMC Decline is accepted, and so are its reserved bytes.")
async def any_diagnosis(peer: Peer) -> None:
    for word in (0, 1, 0xFFFFFFFF):
        handshake = await peer.reach(Phase.ACCEPTED if peer.role is SERVER else Phase.PROPOSED)
        decline = with_bytes(own_decline(peer, diagnosis=word), 20, b"\xff\xff\xff\xff")
        await handshake.tcp.send(decline)
        await peer.plain_echo(handshake.tcp)


@check("C.1-6", "SMC Decline during the first contact's LLC exchange leads to TCP.")
async def decline_before_confirm_link(peer: Peer) -> None:
    phase = Phase.LINK_REQUESTED if peer.role is SERVER else Phase.CONFIRMED
    handshake = await peer.reach(phase)
    handshake.link.fail()
    await handshake.tcp.send(own_decline(peer))
    await peer.plain_echo(handshake.tcp)


@check("C.1-7", "SMC Decline after SMC Confirm on a subsequent contact is no fallback.", SERVER,
       robust=True)  # fmt: skip
async def decline_after_the_last_message(peer: Peer) -> None:
    first = await peer.connect()
    handshake = await peer.reach(Phase.CONFIRMED, group=first.group)
    await handshake.connection.echo(b"it is up")
    await handshake.tcp.send(own_decline(peer))
    try:
        await peer.ended(handshake.tcp)
    except Silence:
        await handshake.connection.echo(b"goes on")
        raise Differs("the implementation does not look at the TCP connection") from None


@check(
    "C.4-1",
    "A client that does not know the link of SMC Accept declines out of sync.",
    CLIENT,
    needs=("version-1",),
)
async def out_of_sync(peer: Peer) -> None:
    handshake = await peer.reach(Phase.ACCEPTED, change={"accept": {"first_contact": 0}})
    decline = await peer.declined(handshake.tcp)
    if not decline.out_of_sync:
        raise Failed("SMC Decline has no out-of-sync flag")
    await peer.plain_echo(handshake.tcp)


@check(
    "A.2.5-1",
    "SMC Decline has 28 bytes, the sender's peer ID and zeros in reserved fields.",
    needs=("version-1",),
)
async def decline_fields(peer: Peer) -> None:
    name, phase = ("confirm", Phase.CONFIRMED)
    if peer.role is CLIENT:
        name, phase = ("accept", Phase.ACCEPTED)
    handshake = await peer.reach(phase, change={name: {"qp_mtu": 15}})
    decline = await peer.declined(handshake.tcp)
    if len(decline.raw) != 28:
        raise Failed(f"SMC Decline has {len(decline.raw)} bytes")
    mine = handshake.accept if peer.role is SERVER else handshake.proposal
    if decline.peer_id != mine.peer_id:
        raise Failed("SMC Decline has another peer ID than the message before")
    if wrong := decline.reserved_words():
        raise Failed(wrong)


@check(
    "A.2.5-2",
    "SMC Decline has the out-of-sync flag only if a link group is out of sync.",
    needs=("version-1",),
)
async def decline_in_sync(peer: Peer) -> None:
    if peer.role is SERVER:  # no link group exists, and SMC Proposal names none
        subnet = {"subnet": b"\xc6\x33\x64\0", "mask_length": 24}
        handshake = await peer.reach(Phase.PROPOSED, change={"proposal": subnet})
        if (await peer.declined(handshake.tcp)).out_of_sync:
            raise Failed("SMC Decline has the out-of-sync flag, and there is no link group")
    # SMC Accept and SMC Confirm are about a new link group, which the peer gives up anyway.
    name, phase = ("confirm", Phase.CONFIRMED)
    if peer.role is CLIENT:
        name, phase = ("accept", Phase.ACCEPTED)
    handshake = await peer.reach(phase, change={name: {"qp_mtu": 15}})
    if (await peer.declined(handshake.tcp)).out_of_sync:
        raise Differs("SMC Decline of a first contact has the out-of-sync flag")


@check(
    "3.5.1.2-1",
    "A server in another subnet declines, and TCP continues.",
    SERVER,
    needs=("version-1",),
)
async def another_subnet(peer: Peer) -> None:
    handshake = await peer.reach(
        Phase.PROPOSED, change={"proposal": {"subnet": b"\xc6\x33\x64\0", "mask_length": 24}}
    )
    await peer.declined(handshake.tcp)
    await peer.plain_echo(handshake.tcp)


@check("3.5.1.2-2", "A server compares the length of the mask, too.", SERVER, needs=("version-1",))
async def another_mask(peer: Peer) -> None:
    handshake = await peer.reach(Phase.PROPOSED, change={"proposal": {"mask_length": 31}})
    await peer.declined(handshake.tcp)
    await peer.plain_echo(handshake.tcp)


# --- time-outs (C.5) -----------------------------------------------------------------------------


@check("C.5-1", "A missing answer ends the TCP connection, without a fallback.", slow=True,
       robust=True)  # fmt: skip
async def missing_answer(peer: Peer) -> None:
    handshake = await peer.reach(Phase.ACCEPTED if peer.role is SERVER else Phase.PROPOSED)
    await peer.timer_ends(handshake.tcp)


@check("C.5-2", "Half of an answer ends the TCP connection in the same time.", slow=True,
       robust=True)  # fmt: skip
async def half_an_answer(peer: Peer) -> None:
    phase = Phase.CONFIRMED if peer.role is SERVER else Phase.ACCEPTED
    name = "confirm" if peer.role is SERVER else "accept"
    handshake = await peer.reach(phase, tamper={name: lambda raw: raw[:40]})
    await peer.timer_ends(handshake.tcp)


@check("C.5-3", "Half of an SMC Proposal ends the TCP connection in time.", SERVER, slow=True,
       robust=True)  # fmt: skip
async def half_a_proposal(peer: Peer) -> None:
    handshake = await peer.reach(Phase.PROPOSED, tamper={"proposal": lambda raw: raw[:30]})
    await peer.timer_ends(handshake.tcp)


# --- FIN and RST in each phase -------------------------------------------------------------------

_PHASES = {
    "1": (Phase.TCP, "before any message"),
    "2": (Phase.PROPOSED, "after SMC Proposal"),
    "3": (Phase.ACCEPTED, "after SMC Accept"),
    "4": (Phase.CONFIRMED, "after SMC Confirm"),
    "5": (Phase.LINK_REQUESTED, "after CONFIRM LINK"),
    "6": (Phase.LINK_CONFIRMED, "after the reply to CONFIRM LINK"),
}


async def _leaves(phase: Phase, how: str, peer: Peer) -> None:
    handshake = await peer.reach(phase)
    if how == "RST":
        handshake.tcp.reset()
        return
    await handshake.tcp.send_eof()
    if phase in (Phase.TCP, Phase.PROPOSED) and peer.role is SERVER:
        return  # the server's answer to FIN before CLC is its application's
    await peer.until(
        lambda: handshake.tcp.end is not None, "the end of the TCP connection",
        patience=peer.session.options.timers,
    )  # fmt: skip


for _number, (_phase, _words) in _PHASES.items():
    check(f"3.5.1-{_number}", f"A peer that sends RST {_words} does no harm.", robust=True)(
        partial(_leaves, _phase, "RST")
    )
    check(
        f"3.5.1-{10 + int(_number)}",
        f"A peer that sends FIN {_words} does no harm, and its connection ends.",
        robust=True, slow=True,
    )(partial(_leaves, _phase, "FIN"))  # fmt: skip
