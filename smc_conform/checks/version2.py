"""Version 2: UEIDs, GIDs, the parts of CLC messages, limits of release 1, LLC 0x21 to 0x29.

No public document defines version 2 on the wire.  The sections are those of docs/compliance-v2.md,
which says of each requirement how it is known: from Linux's messages, or from its source.
"""

from __future__ import annotations

import random
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from smc_conform import registry
from smc_conform.checks.contact import confirm_link_of
from smc_conform.checks.llc import established, goes_on
from smc_conform.connection import Connection
from smc_conform.link import Link, Region, own_pair
from smc_conform.messages import (
    ACCEPT,
    ADD_LINK,
    ADD_LINK_CONTINUATION,
    CONFIRM_LINK,
    CONFIRM_RKEY,
    CONFIRM_RKEY_CONTINUATION,
    DECLINE,
    DELETE_LINK,
    DELETE_RKEY,
    EYE_CATCHER,
    REQUEST_ADD_LINK,
    TEST_LINK,
    V2,
    Message,
    pack,
    pairs_of,
    rtoken_pair,
    with_bytes,
)
from smc_conform.peer import Handshake, Peer, Phase
from smc_conform.registry import Steps
from smc_conform.roles import Role
from smc_conform.verdicts import Differs, Failed, Silence

SERVER, CLIENT = Role.SERVER, Role.CLIENT
TWO = ("two-rnics",)
MAPPED = bytes(10) + b"\xff\xff"
ONLY = {"offer_1": 2}
"""SMC Proposal offers version 2 alone."""
OTHER_EID = b"SMC-CONFORM.UNKNOWN".ljust(32)
NO_COMMON_EID = (0x03030000,)
NO_EID = (0x03030008, 0x03030000)
NO_ROUTE = (0x03030002, 0x030E0000)
RELEASE = (0x03030009,)
CONNECTIONS = (0x0303000A,)
LINKS = (0x0303000B,)
VERSION = (0x030C0000, 0x03040000)
OUT_OF_SYNC = 0x04000000
SHORT = 108
"""Bytes of SMC Accept and SMC Confirm on subsequent contact."""


def check(
    number: str, requirement: str, *roles: Role, needs: tuple[str, ...] = (), robust: bool = False,
    slow: bool = False,
) -> Callable[[Steps], Steps]:  # fmt: skip
    """As `registry.check`, for version 2."""
    return registry.check(
        number, requirement, *roles, needs=("version-2", *needs), robust=robust, slow=slow
    )


async def declined(peer: Peer, handshake: Handshake, *codes: int) -> Message:
    """Wait for SMC Decline with one of these diagnoses; TCP must continue."""
    decline = await peer.declined(handshake.tcp)
    if codes and decline.diagnosis not in codes:
        expected = " or ".join(f"0x{code:08x}" for code in codes)
        raise Failed(f"the diagnosis is 0x{decline.diagnosis:08x} instead of {expected}")
    await peer.plain_echo(handshake.tcp)
    return decline


async def declined_or_differs(peer: Peer, handshake: Handshake, *codes: int) -> None:
    """As `declined`, for a rule that no other implementation shows: the verdict is "differs"."""
    try:
        await declined(peer, handshake, *codes)
    except Failed as failure:
        raise Differs(str(failure)) from None


def resized(raw: bytes, size: int) -> bytes:
    """A CLC message cut or filled up to a size, with its length and trailer."""
    body = raw[:-4].ljust(size - 4, b"\0")[: size - 4]
    return with_bytes(body, 5, size.to_bytes(2, "big")) + EYE_CATCHER


# --- SMC Proposal, as the server sees it ---------------------------------------------------------


@check("v2.2-1", "Of both versions the server chooses version 2.", SERVER)
async def version_2_is_chosen(peer: Peer) -> None:
    handshake = await peer.reach(Phase.ACCEPTED)
    if handshake.accept.version != 2:
        raise Failed(f"SMC Accept has version {handshake.accept.version}")


@check("v2.2-2", "A Proposal of version 2 alone has no prefixes, and is accepted.", SERVER)
async def version_2_alone(peer: Peer) -> None:
    handshake = await peer.reach(Phase.READY, change={"proposal": ONLY})
    await handshake.connection.echo(b"version 2 alone")


@check("v2.2-3", "A Proposal of version 2 alone may have a peer ID, GID and MAC of zeros.", SERVER)
async def no_names(peer: Peer) -> None:
    zeros = {"peer_id": bytes(8), "gid": bytes(16), "mac": bytes(6)}
    values = {**ONLY, **zeros, "roce_gid": peer.session.new_gid()}
    handshake = await peer.reach(Phase.READY, change={"proposal": values})
    await handshake.connection.echo(b"as Linux proposes")


@check("v2.2-4", "A newer version nibble is answered as version 2.", SERVER)
async def newer_version(peer: Peer) -> None:
    for version in (3, 15):
        handshake = await peer.reach(Phase.ACCEPTED, change={"proposal": {"version": version}})
        if handshake.accept.version != 2:
            raise Failed(f"version {version} is answered by version {handshake.accept.version}")
        # Linux has one first contact at a time.
        handshake.tcp.close()


@check("v2.2-5", "A Proposal with 8 EIDs is accepted, and ours may be the last one.", SERVER)
async def eight_eids(peer: Peer) -> None:
    others = tuple(f"SMC-CONFORM.{number}".encode().ljust(32) for number in range(7))
    handshake = await peer.reach(Phase.ACCEPTED, change={"proposal": {"eids": (*others, peer.eid)}})
    if handshake.accept.eid != peer.eid:
        raise Failed(f"SMC Accept has the EID {handshake.accept.eid!r}")


@check("v2.2-6", "More than 8 EIDs end the TCP connection.", SERVER, robust=True)
async def nine_eids(peer: Peer) -> None:
    others = tuple(f"SMC-CONFORM.{number}".encode().ljust(32) for number in range(8))
    handshake = await peer.reach(Phase.PROPOSED, change={"proposal": {"eids": (peer.eid, *others)}})
    if await peer.refused(handshake.tcp, decline=True) == "Decline":
        raise Differs("the server declines")


_MALFORMED: dict[str, tuple[str, dict[str, Any]]] = {
    "10": ("that counts one EID more than it has", {"eid_count": 2}),
    "11": ("that counts no EID and has one", {"eid_count": 0}),
    "12": ("that counts 255 EIDs", {"eid_count": 255}),
    "13": ("whose extension begins beyond its end", {"extension_offset": 0xFFF0}),
    "14": ("whose extension begins in its prefix area", {"extension_offset": 29}),
    "15": ("whose extension begins in its trailer", {"extension_offset": 104}),
    "16": ("whose prefix area begins beyond its end", {"area_offset": 0xFFF0}),
}


async def _malformed(values: dict[str, Any], peer: Peer) -> None:
    handshake = await peer.reach(Phase.PROPOSED, change={"proposal": values})
    if await peer.refused(handshake.tcp, decline=True) == "Decline":
        raise Differs("the server declines, where Linux ends the TCP connection")


for _number, (_words, _values) in _MALFORMED.items():
    check(f"v2.2-{_number}", f"An SMC Proposal {_words} is refused.", SERVER, robust=True)(
        partial(_malformed, _values)
    )


@check("v2.2-17", "Reserved bytes of SMC Proposal are ignored.", SERVER)
async def reserved_in_proposal(peer: Peer) -> None:
    def filled(raw: bytes) -> bytes:
        at = 52 + int.from_bytes(raw[50:52], "big")
        return with_bytes(with_bytes(raw, 60, b"\xff" * 20), at + 28, b"\xff" * 12)

    handshake = await peer.reach(Phase.READY, tamper={"proposal": filled})
    await handshake.connection.echo(b"reserved")


def smc_d(peer: Peer, gids: int) -> dict[str, Any]:
    """SMC Proposal also offers SMC-D: by a system EID, and the GIDs and CHIDs of ISM devices."""
    eids = (peer.eid,)
    devices = b"".join(bytes((0x77,)) * 8 + (0xFFFE - i).to_bytes(2, "big") for i in range(gids))
    return {
        "offer_2": 3, "eids": eids, "seid": 1, "ism_count": gids, "smc_d_offset": 32 + 32,
        "after_eids": b"IBM-SYSZ-ISMSEID00000000AAAABBBB" + bytes(16) + devices,
    }  # fmt: skip


FIRST_ISM = {"smc_d_gid": b"\x66" * 8, "smc_d_chid": 0xFFFF}
"""The first ISM device, where version 1 is offered, too."""


async def _also_smc_d(gids: int, only: bool, peer: Peer) -> None:
    proposal = smc_d(peer, gids) | (ONLY if only else {"offer_1": 3, **FIRST_ISM})
    handshake = await peer.reach(Phase.READY, change={"proposal": proposal})
    await handshake.connection.echo(b"over RoCE")


for _number, _gids, _only in (("20", 0, True), ("21", 1, True), ("22", 8, True), ("23", 1, False)):
    check(
        f"v2.2-{_number}",
        f"A Proposal that also offers SMC-D, with {_gids} further ISM devices"
        f"{'' if _only else ', in both versions'}, is accepted for SMC-R.",
        SERVER,
    )(partial(_also_smc_d, _gids, _only))


@check("v2.2-24", "A Proposal that offers SMC-D alone is declined, and TCP continues.", SERVER)
async def smc_d_alone(peer: Peer) -> None:
    proposal = {**smc_d(peer, 1), **ONLY, "offer_2": 1}
    handshake = await peer.reach(Phase.PROPOSED, change={"proposal": proposal})
    await declined(peer, handshake)


@check("v2.2-25", "A Proposal that offers nothing is declined, and TCP continues.", SERVER)
async def nothing_offered(peer: Peer) -> None:
    handshake = await peer.reach(
        Phase.PROPOSED, change={"proposal": {**ONLY, "offer_2": 2}},
        tamper={"proposal": lambda raw: with_bytes(resized(raw, 84), 50, b"\0\0")},
    )  # fmt: skip
    await declined(peer, handshake)


@check("v2.2-27", "The GID of an ISM device is no count of prefixes, where there are none.", SERVER)
async def gid_in_place_of_prefixes(peer: Peer) -> None:
    proposal = {**smc_d(peer, 0), **ONLY, **FIRST_ISM}
    handshake = await peer.reach(Phase.READY, change={"proposal": proposal})
    await handshake.connection.echo(b"over RoCE")


@check("v2.2-26", "A Proposal whose part of SMC-D lies outside is accepted or refused.", SERVER,
       robust=True)  # fmt: skip
async def wrong_smc_d_part(peer: Peer) -> None:
    for offset in (1, 0xFFF0):
        proposal = {**smc_d(peer, 0), **ONLY, "smc_d_offset": offset}
        handshake = await peer.reach(Phase.PROPOSED, change={"proposal": proposal})
        answer = await peer.clc_or_end(handshake.tcp)
        if answer is not None and answer.layout not in (ACCEPT, DECLINE):
            raise Failed(f"the answer is {answer}")
        handshake.tcp.close()


# --- SMC Proposal, as the client sends it --------------------------------------------------------


@check("v2.2-30", "Length, offsets and counts of SMC Proposal add up.", CLIENT)
async def proposal_adds_up(peer: Peer) -> None:
    proposal = (await peer.reach(Phase.PROPOSED)).proposal
    raw = proposal.raw
    at = 52 + proposal.extension_offset
    first = at + 40
    end = first + 32 * proposal.eid_count
    if proposal.smc_d_offset:
        end = max(end, at + 8 + proposal.smc_d_offset)
    if not 1 <= proposal.eid_count <= 8:
        raise Failed(f"SMC Proposal has {proposal.eid_count} EIDs")
    if len(raw) < end + 4 or (not proposal.smc_d_offset and len(raw) != end + 4):
        raise Failed(f"SMC Proposal has {len(raw)} bytes instead of {end + 4}")
    if "area_offset" in proposal.fields and raw[7] & 3 != 2:
        area = 40 + proposal.area_offset
        if area < 80 or area + 8 + 17 * raw[area + 7] > at:
            raise Failed(f"the prefix area at byte {area} reaches into the extension at byte {at}")


@check("v2.1-1", "Each EID is a UEID: letters, digits, '.' and '-', padded with blanks.", CLIENT)
async def valid_eids(peer: Peer) -> None:
    proposal = (await peer.reach(Phase.PROPOSED)).proposal
    for at in range(0, len(proposal.eids), 32):
        eid = proposal.eids[at : at + 32]
        if not re.fullmatch(rb"[A-Z0-9][A-Z0-9.-]* *", eid):
            raise Failed(f"the EID is {eid!r}")


@check("v2.2-31", "The GID of version 2 is IPv4-mapped.", CLIENT)
async def mapped_gid(peer: Peer) -> None:
    proposal = (await peer.reach(Phase.PROPOSED)).proposal
    if not proposal.roce_gid.startswith(MAPPED):
        raise Failed(f"the GID is {proposal.roce_gid.hex()}")


@check("v2.2-32", "From release 1 on SMC Proposal has limits of at least 16 and 1.", CLIENT)
async def proposed_limits(peer: Peer) -> None:
    proposal = (await peer.reach(Phase.PROPOSED)).proposal
    limits = proposal.max_connections, proposal.max_links
    if proposal.release and (limits[0] < 16 or limits[1] < 1):
        raise Failed(f"release {proposal.release} with the limits {limits}")
    if not proposal.release and any(limits):
        raise Failed(f"release 0 with the limits {limits}")


@check("v2.2-33", "Reserved bytes of SMC Proposal are zero.", CLIENT)
async def proposal_reserved(peer: Peer) -> None:
    proposal = (await peer.reach(Phase.PROPOSED)).proposal
    end = 52 + proposal.extension_offset if proposal.smc_d_offset else None
    if wrong := proposal.reserved_words(end):
        raise Failed(wrong)


# --- the server's answer -------------------------------------------------------------------------


@check(
    "v2.4-1", "SMC Accept of first contact has 160 bytes, with zeros in reserved fields.", SERVER
)
async def accept_format(peer: Peer) -> None:
    accept = (await peer.reach(Phase.ACCEPTED)).accept
    if len(accept.raw) != 160:
        raise Failed(f"SMC Accept has {len(accept.raw)} bytes")
    if wrong := accept.reserved_words():
        raise Failed(wrong)
    if accept.eid != peer.eid:
        raise Failed(f"SMC Accept has the EID {accept.eid!r}")
    if not accept.gid.startswith(MAPPED):
        raise Failed(f"SMC Accept has the GID {accept.gid.hex()}")


@check("v2.4-2", "SMC Accept of subsequent contact has 108 bytes, with the EID.", SERVER)
async def short_accept(peer: Peer) -> None:
    first = await peer.connect()
    accept = (await peer.reach(Phase.ACCEPTED, group=first.group)).accept
    if len(accept.raw) != SHORT:
        raise Failed(f"SMC Accept has {len(accept.raw)} bytes")
    if accept.eid != peer.eid:
        raise Failed(f"SMC Accept has the EID {accept.eid!r}")


@check("v2.3-1", "The release is the lower one of both sides.", SERVER)
async def lower_release(peer: Peer) -> None:
    for offered, agreed in ((0, 0), (1, 1), (2, 1), (15, 1)):
        handshake = await peer.reach(Phase.ACCEPTED, change={"proposal": {"release": offered}})
        if handshake.accept.release != agreed:
            raise Failed(f"release {offered} is answered by {handshake.accept.release}")
        handshake.tcp.close()


@check("v2.3-2", "The limits are the lower ones of both sides.", SERVER)
async def lower_limits(peer: Peer) -> None:
    for connections, links in ((16, 1), (100, 2), (255, 1), (17, 255)):
        limits = {"max_connections": connections, "max_links": links}
        handshake = await peer.reach(Phase.ACCEPTED, change={"proposal": limits})
        accept = handshake.accept
        if not 16 <= accept.max_connections <= connections:
            raise Failed(f"{connections} connections are answered by {accept.max_connections}")
        if not 1 <= accept.max_links <= links:
            raise Failed(f"{links} links are answered by {accept.max_links}")
        handshake.tcp.close()


@check("v2.3-3", "In release 0 SMC Accept has no limits.", SERVER)
async def no_limits_in_release_0(peer: Peer) -> None:
    zeros = {"release": 0, "max_connections": 0, "max_links": 0}
    handshake = await peer.reach(Phase.READY, change={"proposal": zeros})
    accept = handshake.accept
    if accept.max_connections or accept.max_links:
        raise Failed(f"the limits are {accept.max_connections} and {accept.max_links}")
    await handshake.connection.echo(b"release 0")


@check("v2.3-4", "A limit below 16 connections is declined.", SERVER)
async def few_connections(peer: Peer) -> None:
    for limit in (0, 15):
        proposal = {**ONLY, "max_connections": limit}
        handshake = await peer.reach(Phase.PROPOSED, change={"proposal": proposal})
        await declined(peer, handshake, *CONNECTIONS)


@check("v2.3-5", "A limit of no link is declined.", SERVER)
async def no_links(peer: Peer) -> None:
    handshake = await peer.reach(Phase.PROPOSED, change={"proposal": {**ONLY, "max_links": 0}})
    await declined(peer, handshake, *LINKS)


@check("v2.3-6", "Without a common EID version 2 is declined.", SERVER)
async def no_common_eid(peer: Peer) -> None:
    proposal = {**ONLY, "eids": (OTHER_EID,)}
    handshake = await peer.reach(Phase.PROPOSED, change={"proposal": proposal})
    await declined(peer, handshake, *NO_COMMON_EID)


@check("v2.3-7", "An EID is compared as a whole.", SERVER)
async def part_of_an_eid(peer: Peer) -> None:
    for other in (peer.eid.strip()[:-1].ljust(32), peer.eid.strip().ljust(32, b"\0")):
        proposal = {**ONLY, "eids": (other,)}
        handshake = await peer.reach(Phase.PROPOSED, change={"proposal": proposal})
        await declined(peer, handshake, *NO_COMMON_EID)


@check("v2.3-8", "A Proposal without any EID is declined.", SERVER)
async def no_eid(peer: Peer) -> None:
    handshake = await peer.reach(Phase.PROPOSED, change={"proposal": {**ONLY, "eids": ()}})
    await declined(peer, handshake, *NO_EID)


async def _unroutable(gid: bytes, peer: Peer) -> None:
    handshake = await peer.reach(Phase.PROPOSED, change={"proposal": {**ONLY, "roce_gid": gid}})
    await declined(peer, handshake, *NO_ROUTE)


for _number, _words, _gid in (
    ("9", "that is not IPv4-mapped", b"\xfe\x80" + bytes(13) + b"\x07"),
    ("12", "of zeros", bytes(16)),
    ("13", "to which there is no route", MAPPED + b"\xff\xff\xff\xff"),
):
    _needs = ("roce",) if _number == "13" else ()
    check(f"v2.3-{_number}", f"A Proposal with a GID {_words} is declined.", SERVER, needs=_needs)(
        partial(_unroutable, _gid)
    )


@check("v2.3-10", "The subnet of the two sides does not matter for version 2.", SERVER)
async def another_subnet(peer: Peer) -> None:
    proposal = {"subnet": b"\xc6\x33\x64\0", "mask_length": 24}
    handshake = await peer.reach(Phase.READY, change={"proposal": proposal})
    await handshake.connection.echo(b"in another subnet")


@check("v2.3-11", "If only version 1 fits, the server uses it, or declines.", SERVER)
async def version_1_if_that_fits(peer: Peer) -> None:
    handshake = await peer.reach(Phase.PROPOSED, change={"proposal": {"eids": (OTHER_EID,)}})
    answer = await peer.any_clc(handshake.tcp)
    if answer.layout is ACCEPT and answer.version != 1:
        raise Failed(f"the answer is {answer}, although no EID is common")
    if answer.layout is DECLINE:
        raise Differs(f"the server declines (0x{answer.diagnosis:08x})")


@check("v2.6-1", "SMC Decline of a Proposal of version 2 has 44 bytes, and zeros where reserved.",
       SERVER)  # fmt: skip
async def long_decline(peer: Peer) -> None:
    handshake = await peer.reach(
        Phase.PROPOSED, change={"proposal": {**ONLY, "eids": (OTHER_EID,)}}
    )
    decline = await declined(peer, handshake)
    if len(decline.raw) != 44 or decline.version != 2:
        raise Failed(f"SMC Decline has {len(decline.raw)} bytes, and version {decline.version}")
    if not decline.system:
        raise Failed("SMC Decline names no operating system")
    if wrong := decline.reserved_words():
        raise Failed(wrong)


@check("v2.6-2", "SMC Decline is accepted with 28 and with 44 bytes.")
async def both_declines(peer: Peer) -> None:
    for layout in (DECLINE, V2[DECLINE]):
        handshake = await peer.reach(Phase.ACCEPTED if peer.role is SERVER else Phase.PROPOSED)
        decline = pack(layout, peer_id=peer.new_peer_id(), diagnosis=0x03010000)
        await handshake.tcp.send(decline + b"at once")
        await peer.until(partial(_has, handshake, 7), "the echo over TCP", handshake.tcp)
        if (back := handshake.tcp.take()) != b"at once":
            raise Failed(f"the echo over TCP is {back!r}")


def _has(handshake: Handshake, count: int) -> bool:
    return len(handshake.tcp.buffer) >= count


# --- SMC Accept, as the client sees it -----------------------------------------------------------


async def answered(peer: Peer, **values: Any) -> Handshake:
    """A handshake in which SMC Accept has other values."""
    return await peer.reach(Phase.ACCEPTED, change={"accept": values})


@check("v2.4-10", "The client declines an EID that it has not offered.", CLIENT)
async def eid_not_offered(peer: Peer) -> None:
    await declined_or_differs(peer, await answered(peer, eid=OTHER_EID))


@check("v2.4-11", "The client declines a release that it has not offered.", CLIENT)
async def release_not_offered(peer: Peer) -> None:
    for release in (2, 15):
        await declined_or_differs(peer, await answered(peer, release=release), *RELEASE)


@check("v2.4-12", "The client declines a limit below 16 connections.", CLIENT)
async def accept_of_few_connections(peer: Peer) -> None:
    for limit in (0, 15):
        await declined(peer, await answered(peer, max_connections=limit), *CONNECTIONS)


@check(
    "v2.4-13", "The client declines a limit of no link, and of more than it has offered.", CLIENT
)
async def accept_of_other_links(peer: Peer) -> None:
    for limit in (0, 3, 255):
        await declined(peer, await answered(peer, max_links=limit), *LINKS)


@check("v2.4-14", "The client accepts lower limits, and its Confirm repeats them.", CLIENT)
async def lower_limits_in_accept(peer: Peer) -> None:
    for connections, links in ((16, 1), (200, 2)):
        terms = {"max_connections": connections, "max_links": links}
        confirm = (await peer.reach(Phase.CONFIRMED, change={"terms": terms})).confirm
        if (confirm.max_connections, confirm.max_links) != (connections, links):
            raise Failed(
                f"SMC Confirm has the limits {confirm.max_connections} and {confirm.max_links} "
                f"instead of {connections} and {links}"
            )


@check("v2.4-15", "Release 0 in SMC Accept needs no limits.", CLIENT)
async def accept_of_release_0(peer: Peer) -> None:
    handshake = await peer.reach(Phase.READY, change={"terms": {"release": 0}})
    confirm = handshake.confirm
    if (confirm.release, confirm.max_connections, confirm.max_links) != (0, 0, 0):
        raise Failed(
            f"SMC Confirm has release {confirm.release}, and the limits "
            f"{confirm.max_connections} and {confirm.max_links}"
        )
    await handshake.connection.echo(b"release 0")


@check("v2.4-16", "A gateway in SMC Accept is declined where the client's own route is direct.",
       CLIENT)  # fmt: skip
async def gateway(peer: Peer) -> None:
    await declined(peer, await answered(peer, direct=0), 0x030F0000)


@check("v2.4-17", "A server's GID that is not IPv4-mapped is declined.", CLIENT)
async def unmapped_gid_in_accept(peer: Peer) -> None:
    gid = b"\xfe\x80" + bytes(13) + b"\x07"
    handshake = await answered(peer, gid=gid)
    if await peer.refused(handshake.tcp, decline=True) != "Decline":
        raise Differs("the client ends the TCP connection")


@check("v2.4-18", "SMC Accept of version 1 is declined where version 2 alone was offered.", CLIENT)
async def accept_of_version_1(peer: Peer) -> None:
    handshake = await peer.reach(
        Phase.ACCEPTED, tamper={"accept": lambda raw: with_bytes(resized(raw, 68), 7, b"\x18")}
    )
    if handshake.proposal.raw[7] & 3 != 2:
        await peer.clc_or_end(handshake.tcp)
        return  # version 1 was offered, too
    await declined(peer, handshake, *VERSION)


@check("v2.4-19", "A first contact without its part ends the TCP connection.", CLIENT, robust=True)
async def first_contact_without_its_part(peer: Peer) -> None:
    handshake = await peer.reach(Phase.ACCEPTED, tamper={"accept": lambda raw: resized(raw, SHORT)})
    if await peer.refused(handshake.tcp, decline=True) == "Decline":
        raise Differs("the client declines")


@check("v2.4-20", "The part of first contact without the flag is refused.", CLIENT, robust=True)
async def part_without_the_flag(peer: Peer) -> None:
    handshake = await answered(peer, first_contact=0)
    if await peer.refused(handshake.tcp, decline=True) == "Decline":
        raise Differs("the client declines")


@check("v2.4-21", "SMC Accept of another length is refused.", CLIENT, robust=True)
async def odd_accepts(peer: Peer) -> None:
    for size in (104, 107, 109, 140, 156, 159):
        handshake = await peer.reach(Phase.ACCEPTED, tamper={"accept": partial(_resized_to, size)})
        if await peer.refused(handshake.tcp, decline=True) == "Decline":
            raise Differs(f"the client declines {size} bytes")


def _resized_to(size: int, raw: bytes) -> bytes:
    return resized(raw, size)


@check("v2.4-22", "An unknown link is declined out of sync, in 44 bytes.", CLIENT)
async def out_of_sync(peer: Peer) -> None:
    def subsequent(raw: bytes) -> bytes:
        return with_bytes(resized(raw, SHORT), 7, b"\x20")

    handshake = await peer.reach(Phase.ACCEPTED, tamper={"accept": subsequent})
    decline = await declined(peer, handshake, OUT_OF_SYNC)
    if not decline.out_of_sync or len(decline.raw) != 44:
        raise Failed(f"SMC Decline of {len(decline.raw)} bytes: {decline}")


@check(
    "v2.5-1", "SMC Confirm of first contact repeats EID and release, and lists the GIDs.", CLIENT
)
async def confirm_format(peer: Peer) -> None:
    handshake = await peer.reach(Phase.CONFIRMED)
    confirm, group = handshake.confirm, handshake.group
    assert group is not None
    if confirm.version != 2 or not confirm.first_contact:
        raise Failed(f"the answer to a first contact is {confirm}")
    if (confirm.eid, confirm.release) != (group.terms["eid"], group.terms["release"]):
        raise Failed(f"SMC Confirm has the EID {confirm.eid!r} and release {confirm.release}")
    if len(confirm.raw) != 164 + 16 * confirm.gid_count or not confirm.gid_count:
        raise Failed(f"{confirm.gid_count} GIDs in {len(confirm.raw)} bytes")
    if confirm.gid_1 != confirm.gid:
        raise Failed("the first GID is not that of the link")
    if wrong := confirm.reserved_words(160):
        raise Failed(wrong)


@check("v2.5-2", "SMC Confirm of subsequent contact has 108 bytes, with the EID.", CLIENT,
       needs=("parallel",))  # fmt: skip
async def short_confirm(peer: Peer) -> None:
    first = await peer.connect()
    confirm = (await peer.reach(Phase.CONFIRMED, group=first.group)).confirm
    if len(confirm.raw) != SHORT or confirm.eid != first.group.terms["eid"]:
        raise Failed(f"SMC Confirm has {len(confirm.raw)} bytes, and the EID {confirm.eid!r}")


# --- SMC Confirm, as the server sees it ----------------------------------------------------------


async def confirmed(peer: Peer, **values: Any) -> Handshake:
    """A handshake in which SMC Confirm has other values."""
    return await peer.reach(Phase.CONFIRMED, change={"confirm": values})


_OTHER_TERMS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "10": ("another release", {"release": 0}, RELEASE),
    "11": ("another limit of connections", {"max_connections": 100}, CONNECTIONS),
    "12": ("another limit of links", {"max_links": 1}, LINKS),
}


async def _other_terms(values: dict[str, Any], codes: tuple[int, ...], peer: Peer) -> None:
    await declined(peer, await confirmed(peer, **values), *codes)


for _number, (_words, _values, _codes) in _OTHER_TERMS.items():
    check(f"v2.5-{_number}", f"SMC Confirm with {_words} than SMC Accept is declined.", SERVER)(
        partial(_other_terms, _values, _codes)
    )


@check("v2.5-13", "SMC Confirm with another EID than SMC Accept is refused.", SERVER, robust=True)
async def confirm_of_another_eid(peer: Peer) -> None:
    handshake = await confirmed(peer, eid=OTHER_EID)
    await peer.refused(handshake.tcp, decline=True)


@check("v2.5-14", "SMC Confirm of version 1 after SMC Accept of version 2 is refused.", SERVER,
       robust=True)  # fmt: skip
async def confirm_of_version_1(peer: Peer) -> None:
    handshake = await peer.reach(
        Phase.CONFIRMED, tamper={"confirm": lambda raw: with_bytes(resized(raw, 68), 7, b"\x10")}
    )
    await peer.refused(handshake.tcp, decline=True)


@check("v2.5-15", "SMC Confirm of first contact without its part is refused.", SERVER, robust=True)
async def confirm_without_its_part(peer: Peer) -> None:
    for flags in (b"\x20", b"\x28"):
        handshake = await peer.reach(
            Phase.CONFIRMED, tamper={"confirm": partial(_short_confirm, flags)}
        )
        await peer.refused(handshake.tcp, decline=True)


def _short_confirm(flags: bytes, raw: bytes) -> bytes:
    return with_bytes(resized(raw, SHORT), 7, flags)


@check("v2.5-16", "SMC Confirm whose count of GIDs is not theirs is refused.", SERVER, robust=True)
async def wrong_count_of_gids(peer: Peer) -> None:
    for count in (0, 2, 255):
        handshake = await confirmed(peer, gid_count=count)
        await peer.refused(handshake.tcp, decline=True)


@check("v2.5-17", "SMC Confirm that lists a GID of zeros is refused.", SERVER, robust=True)
async def listed_gid_of_zeros(peer: Peer) -> None:
    handshake = await confirmed(peer, gid_1=bytes(16))
    await peer.refused(handshake.tcp, decline=True)


@check("v2.5-18", "SMC Confirm may list two GIDs.", SERVER)
async def two_gids(peer: Peer) -> None:
    def longer(raw: bytes) -> bytes:
        other = peer.session.devices[-1].rnic.gid
        return with_bytes(resized(raw[:-4] + other + raw[-4:], len(raw) + 16), 156, b"\x02")

    handshake = await peer.reach(Phase.READY, tamper={"confirm": longer})
    await handshake.connection.echo(b"two GIDs")


@check("v2.5-19", "SMC Confirm of another peer than SMC Proposal is refused.", SERVER, robust=True)
async def confirm_of_another_peer(peer: Peer) -> None:
    handshake = await confirmed(peer, peer_id=b"\x77" * 8)
    await peer.refused(handshake.tcp, decline=True)


# --- link groups ---------------------------------------------------------------------------------


@check("v2.7-1", "A group has no more connections than agreed; the next one makes another group.",
       SERVER)  # fmt: skip
async def full_group(peer: Peer) -> None:
    limit = {"max_connections": 16}
    first = await peer.connect(change={"proposal": limit})
    if first.group.terms["max_connections"] != 16:
        raise Failed(f"the limit is {first.group.terms['max_connections']} instead of 16")
    for _ in range(15):
        await peer.connect(group=first.group)
    handshake = await peer.start(peer_id=first.group.peer_id, change={"proposal": limit})
    await handshake.advance()
    await handshake.connection.echo(b"in another group")


@check("v2.7-2", "Clients without a peer ID differ by their GIDs.", SERVER)
async def clients_differ_by_gid(peer: Peer) -> None:
    def nameless() -> dict[str, Any]:
        return {**ONLY, "peer_id": bytes(8), "roce_gid": peer.session.new_gid()}

    first = await peer.reach(Phase.READY, change={"proposal": nameless()})
    other = await peer.reach(Phase.ACCEPTED, change={"proposal": nameless()})
    if not other.accept.first_contact:
        raise Failed("a client with another GID gets the group of the first one")
    await first.connection.echo(b"goes on")


@check("v2.7-3", "With a limit of one link there is no ADD LINK, and data flows at once.")
async def one_link(peer: Peer) -> None:
    name = "proposal" if peer.role is SERVER else "terms"
    handshake = await peer.reach(Phase.READY, change={name: {"max_links": 1}})
    await handshake.connection.echo(b"over one link")
    await peer.ping(handshake.link)
    if any(each.layout is ADD_LINK for each in handshake.link.inbox):
        raise Failed("ADD LINK has come, although the limit is one link")


# --- LLC messages --------------------------------------------------------------------------------


@check("v2.9-1", "LLC types of version 2 have 0x20 set, and a length of two bytes.")
async def llc_format(peer: Peer) -> None:
    link, _ = await confirm_link_of(peer)
    if link.raw[0] != 0x21:
        raise Failed(f"CONFIRM LINK has the type 0x{link.raw[0]:02x}")
    if 44 not in (int.from_bytes(link.raw[1:3], order) for order in ("little", "big")):
        raise Failed(f"CONFIRM LINK has the length {link.raw[1:3].hex()}")
    if len(link.raw) != 44:
        raise Failed(f"CONFIRM LINK has {len(link.raw)} bytes")


@check("v2.9-2", "CONFIRM LINK has the limits that were agreed.")
async def limits_in_confirm_link(peer: Peer) -> None:
    name = "proposal" if peer.role is SERVER else "terms"
    change = {name: {"max_connections": 100, "max_links": 2}}
    phase = Phase.LINK_REQUESTED if peer.role is SERVER else Phase.LINK_CONFIRMED
    handshake = await peer.reach(phase, change=change)
    link = handshake.link_request if peer.role is SERVER else handshake.link_reply
    group = handshake.group
    assert group is not None
    agreed = group.terms["max_connections"], group.terms["max_links"]
    if (link.max_connections, link.max_links) != agreed:
        raise Failed(
            f"CONFIRM LINK has the limits {link.max_connections} and {link.max_links} "
            f"instead of {agreed}"
        )


@check("v2.9-3", "In release 0 CONFIRM LINK has no limit of connections.")
async def no_connections_in_release_0(peer: Peer) -> None:
    name = "proposal" if peer.role is SERVER else "terms"
    phase = Phase.LINK_REQUESTED if peer.role is SERVER else Phase.LINK_CONFIRMED
    handshake = await peer.reach(phase, change={name: {"release": 0}})
    link = handshake.link_request if peer.role is SERVER else handshake.link_reply
    if link.max_connections:
        raise Failed(f"CONFIRM LINK has {link.max_connections} connections")


@check("v2.9-4", "The length of an LLC message may have either byte order.")
async def either_byte_order(peer: Peer) -> None:
    connection, link = await established(peer)
    for length in (b"\x2c\0", b"\0\x2c"):
        raw = with_bytes(link.group.pack_llc(TEST_LINK, user_data=b"x" * 16), 1, length)
        link.send(raw)
        reply = await peer.llc(link, TEST_LINK, reply=True)
        if reply.user_data != b"x" * 16:
            raise Failed("the TEST LINK reply has other user data")
    await goes_on(peer, connection)


async def ends_or_differs(peer: Peer, link: Link) -> None:
    """The link ends; otherwise the verdict is "differs", as only Linux's source says more."""
    link.inbox.clear()
    link.send_llc(TEST_LINK, user_data=b"still there ????")
    if not await peer.answer_or_end(link):
        raise Differs(f"the link goes on: {link.inbox[0]}")


_LENGTHS = {"10": 0, "11": 43, "12": 45, "13": 0xFFFF}


async def _wrong_length(length: int, peer: Peer) -> None:
    _, link = await established(peer)
    link.send_llc(TEST_LINK, length=length)
    await ends_or_differs(peer, link)


for _number, _length in _LENGTHS.items():
    check(
        f"v2.9-{_number}", f"An LLC message of 44 bytes with length {_length} ends the link.",
        robust=True,
    )(partial(_wrong_length, _length))  # fmt: skip


_UNKNOWN = {"19": 0x20, "20": 0x2A, "21": 0x3F}


async def _unknown_type(kind: int, peer: Peer) -> None:
    _, link = await established(peer)
    link.send_llc(TEST_LINK, type=kind)
    await ends_or_differs(peer, link)


for _number, _kind in _UNKNOWN.items():
    check(
        f"v2.9-{_number}", f"An LLC message of the undefined type 0x{_kind:02x} ends the link.",
        robust=True,
    )(partial(_unknown_type, _kind))  # fmt: skip


@check("v2.9-14", "A message longer than its type may be ends the link.", robust=True)
async def too_long(peer: Peer) -> None:
    for size in (48, 60):
        _, link = await established(peer)
        link.send_llc(TEST_LINK, bytes(size - 44))
        await ends_or_differs(peer, link)


@check("v2.9-15", "An LLC message of version 1 ends the link.", robust=True)
async def version_1_message(peer: Peer) -> None:
    _, link = await established(peer)
    link.send(pack(TEST_LINK, user_data=b"version 1"))
    await ends_or_differs(peer, link)


@check("v2.9-16", "The continuations of version 1 do not exist, and end the link.", robust=True)
async def continuations(peer: Peer) -> None:
    for layout in (ADD_LINK_CONTINUATION, CONFIRM_RKEY_CONTINUATION):
        _, link = await established(peer)
        link.send_llc(layout)
        await ends_or_differs(peer, link)


@check("v2.9-17", "Random bytes in each type of message end the link at most.", robust=True)
async def noise_in_messages(peer: Peer) -> None:
    choose = random.Random(peer.session.options.seed)
    for kind in range(0x20, 0x2C):
        connection = await peer.connect()
        await connection.echo(b"begin")
        link = connection.link
        for _ in range(5):
            link.send(bytes((kind, 44, 0)) + choose.randbytes(41))
        link.send_llc(TEST_LINK, user_data=b"are you there ?!")
        await peer.until(partial(_answers_or_ended, connection), "an answer, or the end")


def _answers_or_ended(connection: Connection) -> bool:
    link = connection.link
    reply = any(each.layout is TEST_LINK and each.reply for each in link.inbox)
    return bool(link.failed) or connection.tcp.end is not None or reply


@check("v2.9-18", "Reserved bytes of TEST LINK are ignored.")
async def reserved_in_test_link(peer: Peer) -> None:
    connection, link = await established(peer)
    raw = link.group.pack_llc(TEST_LINK, user_data=b"0123456789abcdef")
    link.send(with_bytes(raw, 20, b"\xff" * 24))
    reply = await peer.llc(link, TEST_LINK, reply=True)
    if reply.user_data != b"0123456789abcdef":
        raise Failed("the reply has other user data")
    await goes_on(peer, connection)


# --- ADD LINK ------------------------------------------------------------------------------------


def check_rtokens(message: Message, connection: Connection, old: Link, *, direct: int) -> None:
    """Raise Failed if ADD LINK, or its reply, does not list the RTokens of the implementation."""
    raw, pairs = message.raw, pairs_of(message)
    if len(raw) != 72 + 16 * len(pairs) or not pairs:
        raise Failed(f"ADD LINK has {len(raw)} bytes")
    if len(raw) not in (message.length, int.from_bytes(raw[1:3], "big")):
        raise Failed(f"ADD LINK of {len(raw)} bytes has the length {raw[1:3].hex()}")
    counts = {int.from_bytes(raw[70:72], "little"), int.from_bytes(raw[70:72], "big")}
    if len(pairs) not in counts:
        raise Failed(f"ADD LINK counts {raw[70:72].hex()} RTokens, and has {len(pairs)}")
    if connection.tokens[old.number][0] not in [pair[0] for pair in pairs]:
        raise Failed("ADD LINK lacks the RToken of the connection's RMB")
    if message.direct != direct:
        raise Failed("ADD LINK and SMC Accept contradict each other on the gateway")


@check(
    "v2.10-1", "ADD LINK lists the RTokens of all RMBs, and whether the route is direct.", SERVER
)
async def rtokens_in_offer(peer: Peer) -> None:
    handshake = await peer.reach(Phase.LINK_OFFERED)
    offer = handshake.link_offer
    if len(offer.raw) == 44 and not offer.qp_mtu:
        raise Differs("the server offers no link")
    check_rtokens(offer, handshake.connection, handshake.link, direct=handshake.accept.direct)


@check("v2.10-2", "The reply to ADD LINK lists the RTokens of all RMBs.", CLIENT, needs=TWO)
async def rtokens_in_reply(peer: Peer) -> None:
    handshake = await peer.reach(Phase.LINK_CONFIRMED)
    await handshake.add_link(peer.session.devices[1])
    first = next(iter(handshake.link.group.links.values()))
    check_rtokens(handshake.link_reply, handshake.connection, first, direct=1)


@check("v2.10-3", "CONFIRM LINK follows without a continuation, and both links carry data.",
       needs=TWO)  # fmt: skip
async def no_continuation(peer: Peer) -> None:
    connection = await peer.connect(links=2)
    await connection.echo(b"over two links")
    for link in connection.group.links.values():
        await peer.ping(link)
        if any(each.layout is ADD_LINK_CONTINUATION for each in link.inbox):
            raise Failed("ADD LINK CONTINUATION has come")


@check("v2.10-4", "The size determines the number of RTokens, whatever the count.", needs=TWO)
async def wrong_token_count(peer: Peer) -> None:
    for count in (0, 255, 0xFFFF):
        handshake = await peer.reach(
            Phase.LINK_CONFIRMED, change={"second_link": {"token_count": count}}
        )
        try:
            await handshake.add_link(peer.session.devices[1])
        except (Failed, Silence) as failure:
            raise Differs(f"with the count {count} the link does not come up: {failure}") from None
        await handshake.connection.echo(b"over two links")


async def _spoiled_reply(spoil: Callable[[bytes], bytes], peer: Peer) -> None:
    """The server must not use a second link whose RTokens are wrong; the first one goes on."""
    handshake = await peer.reach(Phase.LINK_OFFERED, tamper={"second_link": spoil})
    old = handshake.link
    new = await handshake.accept_offer(peer.session.devices[1])
    await peer.until(
        lambda: bool(new.failed or old.failed or new.inbox) or handshake.tcp.end is not None
        or any(each.layout is DELETE_LINK for each in old.answered),
        "the end of the new link", patience=peer.session.options.timers,
    )  # fmt: skip
    if any(each.layout is CONFIRM_LINK for each in new.inbox):
        raise Failed("the server confirms a link on which it has no RToken of the RMB in use")
    if old.failed or handshake.tcp.end is not None:
        raise Differs("the first link ends, too")
    await handshake.connection.echo(b"with one link")


def _with_pairs(raw: bytes, *pairs: bytes) -> bytes:
    tail = b"".join(pairs)
    head = with_bytes(raw[:72], 70, len(pairs).to_bytes(2, "little"))
    return with_bytes(head + tail, 1, (72 + len(tail)).to_bytes(2, "little"))


_SPOILED: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "10": ("without any RToken", _with_pairs),
    "11": ("with the RToken of an unknown RMB", partial(
        lambda raw: _with_pairs(raw, rtoken_pair(0x5A5A5A5A, 0x12345678, 1 << 20)))),
}  # fmt: skip
for _number, (_words, _spoil) in _SPOILED.items():
    check(
        f"v2.10-{_number}", f"An ADD LINK reply {_words} ends the new link alone.", SERVER,
        needs=TWO, robust=True, slow=True,
    )(partial(_spoiled_reply, _spoil))  # fmt: skip


@check("v2.10-12", "An ADD LINK reply that ends within an RToken ends a link.", SERVER, needs=TWO,
       robust=True, slow=True)  # fmt: skip
async def cut_reply(peer: Peer) -> None:
    def cut(raw: bytes) -> bytes:
        return with_bytes(raw[:80], 1, (80).to_bytes(2, "little"))

    handshake = await peer.reach(Phase.LINK_OFFERED, tamper={"second_link": cut})
    old = handshake.link
    new = await handshake.accept_offer(peer.session.devices[1])
    await peer.until(
        lambda: bool(new.failed or old.failed) or handshake.tcp.end is not None
        or any(each.layout is DELETE_LINK for each in old.answered),
        "the end of a link", patience=peer.session.options.timers,
    )  # fmt: skip


@check("v2.10-13", "A client rejects ADD LINK by 44 bytes, without a reason.", CLIENT)
async def rejection(peer: Peer) -> None:
    handshake = await peer.reach(Phase.READY)
    reply = handshake.link_reply
    if len(reply.raw) != 44 or not reply.rejected or not reply.reply:
        raise Failed(f"the reply has {len(reply.raw)} bytes: {reply}")
    if reply.link_number != handshake.link.number + 1:
        raise Failed(f"the reply has link number {reply.link_number}")
    await handshake.connection.echo(b"with one link")


@check("v2.10-14", "After a rejected ADD LINK data flows over one link.", SERVER)
async def data_after_rejection(peer: Peer) -> None:
    handshake = await peer.reach(Phase.READY)
    await handshake.connection.echo(b"with one link")
    await peer.ping(handshake.link)


@check("v2.10-15", "A client with one RNIC rejects a parallel link.", CLIENT, needs=("one-rnic",))
async def parallel_link(peer: Peer) -> None:
    handshake = await peer.reach(Phase.LINK_CONFIRMED)
    link = handshake.link
    link.send_llc(
        ADD_LINK, own_pair(link, link), gid=link.rnic.gid, mac=link.rnic.mac,
        qp_number=0x4711, link_number=2, qp_mtu=link.rnic.mtu, psn=7, direct=1, token_count=1,
    )  # fmt: skip
    reply = await peer.llc(link, ADD_LINK, reply=True)
    if not reply.rejected:
        raise Failed(f"the reply is {reply}")
    await handshake.connection.echo(b"with one link")


@check("v2.10-16", "A client rejects ADD LINK with an undefined MTU.", CLIENT)
async def undefined_mtu(peer: Peer) -> None:
    handshake = await peer.reach(Phase.LINK_CONFIRMED)
    link, rnic = handshake.link, peer.session.devices[-1].rnic
    for mtu in (0, 6, 15):
        link.send_llc(
            ADD_LINK, own_pair(link, link), gid=rnic.gid, mac=rnic.mac, qp_number=0x4711,
            link_number=2, qp_mtu=mtu, psn=7, direct=1, token_count=1,
        )  # fmt: skip
        reply = await peer.llc(link, ADD_LINK, reply=True)
        if not reply.rejected:
            raise Failed(f"the answer to MTU {mtu} is {reply}")


# --- REQUEST ADD LINK ----------------------------------------------------------------------------


async def answer_to_request(peer: Peer, link: Link) -> Message:
    """The answer to REQUEST ADD LINK with the GIDs of both RNICs: ADD LINK, or the reply."""
    link.group.auto.discard(ADD_LINK)
    second = peer.session.devices[-1].rnic.gid
    link.inbox.clear()
    link.send_llc(REQUEST_ADD_LINK, second, gid_count=2, gid_1=link.rnic.gid)

    def answer() -> list[Message]:
        kinds = (ADD_LINK, REQUEST_ADD_LINK)
        return [each for each in link.inbox if each.layout in kinds]

    await peer.until(lambda: bool(answer()), "ADD LINK or a reply", link)
    found = answer()[0]
    if found.layout is REQUEST_ADD_LINK:
        if not found.reply or found.gid_count or len(found.raw) != 44:
            raise Failed(f"the reply is {found.raw.hex()}")
    else:
        link.send(link.group.rejection(link, found))
    return found


@check("v2.11-1", "REQUEST ADD LINK is answered by ADD LINK, or by a reply without GIDs.", SERVER)
async def request_add_link(peer: Peer) -> None:
    connection, link = await established(peer)
    await answer_to_request(peer, link)
    await goes_on(peer, connection)


@check("v2.11-4", "REQUEST ADD LINK in a group that has two links gets a reply without GIDs.",
       SERVER, needs=TWO)  # fmt: skip
async def request_in_a_complete_group(peer: Peer) -> None:
    connection = await peer.connect(links=2)
    await connection.echo(b"over two links")
    answer = await answer_to_request(peer, next(iter(connection.group.links.values())))
    if answer.layout is not REQUEST_ADD_LINK:
        raise Differs(f"the answer is {answer}")
    await connection.echo(b"goes on")


@check("v2.11-2", "REQUEST ADD LINK that counts more GIDs than it has ends the link.", SERVER,
       robust=True)  # fmt: skip
async def request_with_a_wrong_count(peer: Peer) -> None:
    _, link = await established(peer)
    link.send_llc(REQUEST_ADD_LINK, gid_count=200, gid_1=link.rnic.gid)
    await ends_or_differs(peer, link)


@check("v2.11-3", "REQUEST ADD LINK from a server ends the link.", CLIENT, robust=True)
async def request_from_a_server(peer: Peer) -> None:
    _, link = await established(peer)
    link.send_llc(REQUEST_ADD_LINK, gid_count=1, gid_1=link.rnic.gid)
    await ends_or_differs(peer, link)


# --- RKeys ---------------------------------------------------------------------------------------


async def deleted(peer: Peer, link: Link, *rkeys: int) -> Message:
    """The reply to DELETE RKEY of these RKeys."""
    listed = b"".join(each.to_bytes(4, "big") for each in rkeys)
    head = link.group.pack_llc(DELETE_RKEY, count=len(rkeys))[:8]
    raw = (head + listed).ljust(44, b"\0")
    link.send(with_bytes(raw, 1, len(raw).to_bytes(2, "little")))
    return await peer.llc(link, DELETE_RKEY, reply=True)


@asynccontextmanager
async def confirmed_region(peer: Peer, link: Link) -> AsyncIterator[Region]:
    """A region whose RKey the implementation has confirmed."""
    with link.new_region() as region:
        link.send_llc(CONFIRM_RKEY, rkey=region.rkey, address=region.address)
        await peer.llc(link, CONFIRM_RKEY, reply=True)
        yield region


@check("v2.12-1", "The reply to DELETE RKEY has the number of unknown RKeys.")
async def unknown_rkeys(peer: Peer) -> None:
    connection, link = await established(peer)
    async with confirmed_region(peer, link) as region:
        odd = region.rkey ^ 0x00FFFF00
        reply = await deleted(peer, link, odd, region.rkey, odd ^ 1)
        if not reply.negative or reply.unknown != 2:
            raise Failed(f"the reply is {reply} with {reply.unknown} unknown RKeys")
    await goes_on(peer, connection)


@check("v2.12-2", "DELETE RKEY may list more RKeys than 44 bytes have room for.")
async def many_rkeys(peer: Peer) -> None:
    connection, link = await established(peer)
    async with confirmed_region(peer, link) as region:
        odd = [0x5A000000 + number for number in range(20)]
        reply = await deleted(peer, link, *odd, region.rkey)
        if reply.unknown != 20 or not reply.negative:
            raise Failed(f"{reply.unknown} RKeys are unknown instead of 20")
        again = await deleted(peer, link, region.rkey)
        if not again.negative:
            raise Failed("the last RKey of the list was not deleted")
    await goes_on(peer, connection)


@check("v2.12-3", "A deleted RKey is unknown afterwards.")
async def deleted_twice(peer: Peer) -> None:
    _, link = await established(peer)
    async with confirmed_region(peer, link) as region:
        first = await deleted(peer, link, region.rkey)
        second = await deleted(peer, link, region.rkey)
    if first.negative or not second.negative:
        raise Failed(f"the replies are {first} and {second}")


@check("v2.12-4", "DELETE RKEY that counts more RKeys than it has ends the link.", robust=True)
async def too_many_rkeys(peer: Peer) -> None:
    _, link = await established(peer)
    link.send_llc(DELETE_RKEY, count=10, rkey_1=1)
    await ends_or_differs(peer, link)


@check("v2.12-5", "CONFIRM RKEY has room for the RTokens of two other links, and no more.",
       robust=True)  # fmt: skip
async def three_other_links(peer: Peer) -> None:
    _, link = await established(peer)
    link.send_llc(CONFIRM_RKEY, other_tokens=3, rkey=5, address=5, link_1=9, link_2=10)
    link.inbox.clear()
    link.send_llc(TEST_LINK, user_data=b"still there ????")
    if not await peer.answer_or_end(link) and link.inbox[0].layout is not CONFIRM_RKEY:
        raise Differs(f"the link goes on, without a reply: {link.inbox[0]}")


@check("v2.12-6", "CONFIRM LINK of a confirmed link ends the link.", robust=True)
async def second_confirm_link(peer: Peer) -> None:
    connection, link = await established(peer)
    values = connection.group.confirm_link_fields(link)
    link.send_llc(CONFIRM_LINK, reply=int(peer.role is SERVER), **values)
    await ends_or_differs(peer, link)
