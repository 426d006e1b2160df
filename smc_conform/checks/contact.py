"""First and subsequent contacts, and the first link (RFC 7609, 3.5.1 to 3.5.3, 4.4.2, C.7)."""

from __future__ import annotations

from smc_conform.messages import ADD_LINK, CONFIRM_LINK, TEST_LINK, Message, with_bytes
from smc_conform.peer import Peer, Phase
from smc_conform.registry import check
from smc_conform.roles import Role
from smc_conform.verdicts import Differs, Failed, Silence

SERVER, CLIENT = Role.SERVER, Role.CLIENT


# --- first contact -------------------------------------------------------------------------------


@check("3.5.1-1", "After a first contact, data flows in both directions.")
async def first_contact_carries_data(peer: Peer) -> None:
    connection = await peer.connect()
    await connection.echo(b"hello")


@check("3.5.1.2-1", "A server answers an unknown peer with the first-contact flag.", SERVER)
async def first_contact_flag(peer: Peer) -> None:
    handshake = await peer.reach(Phase.ACCEPTED)
    if not handshake.accept.first_contact:
        raise Failed("SMC Accept has no first-contact flag")


@check("3.5.1.2-2", "The server commits no queue pair of an earlier group to a new one.", SERVER)
async def new_queue_pair(peer: Peer) -> None:
    first = await peer.connect()
    other = await peer.reach(Phase.ACCEPTED)
    assert first.link.peer is not None
    if other.accept.qp_number == first.link.peer.qp_number:
        raise Failed("two peers get the same queue pair")


async def confirm_link_of(peer: Peer) -> tuple[Message, Message]:
    """The implementation's CONFIRM LINK, and its SMC Accept or SMC Confirm."""
    if peer.role is SERVER:
        handshake = await peer.reach(Phase.LINK_REQUESTED)
        return handshake.link_request, handshake.accept
    handshake = await peer.reach(Phase.LINK_CONFIRMED)
    return handshake.link_reply, handshake.confirm


@check("3.5.1.5-1", "CONFIRM LINK names the end of the link that the CLC message has named.")
async def confirm_link_names_the_link(peer: Peer) -> None:
    link, clc = await confirm_link_of(peer)
    for name in ("gid", "mac", "qp_number"):
        if getattr(link, name) != getattr(clc, name):
            raise Failed(f"CONFIRM LINK and {clc.name} have a different {name}")


@check("3.5.1.5-2", "The client echoes the server's link number.", CLIENT)
async def link_number_is_echoed(peer: Peer) -> None:
    handshake = await peer.reach(
        Phase.LINK_CONFIRMED, change={"confirm_link": {"link_number": 0x5A}}
    )
    if handshake.link_reply.link_number != 0x5A:
        raise Failed(f"the reply has link number {handshake.link_reply.link_number} instead of 90")


@check("2.2.2-1", "The limit of links in CONFIRM LINK is between 2 and 8, or 0 from a client.")
async def link_limit(peer: Peer) -> None:
    link, _ = await confirm_link_of(peer)
    least = 2 if peer.role is SERVER else 0
    if link.max_links == 1 or not least <= link.max_links <= 8:
        raise Failed(f"the limit is {link.max_links}")


@check("2.2.2-2", "A client's limit of links does not exceed the server's.", CLIENT)
async def client_link_limit(peer: Peer) -> None:
    handshake = await peer.reach(Phase.LINK_CONFIRMED, change={"confirm_link": {"max_links": 2}})
    if handshake.link_reply.max_links > 2:
        raise Failed(f"the client's limit is {handshake.link_reply.max_links}, and the server's 2")


@check("A.3.1-1", "Reserved bits of CONFIRM LINK are zero.")
async def confirm_link_reserved(peer: Peer) -> None:
    link, _ = await confirm_link_of(peer)
    if wrong := link.reserved_words():
        raise Failed(wrong)


@check(
    "A.3.1-2",
    "Reserved bytes of CONFIRM LINK are ignored when they are received.",
    needs=("version-1",),
)
async def confirm_link_reserved_ignored(peer: Peer) -> None:
    handshake = await peer.reach(
        Phase.READY, tamper={"confirm_link": lambda raw: with_bytes(raw, 35, b"\xff" * 9)}
    )
    await handshake.connection.echo(b"hello")


@check("A.3-1", "LLC messages have 44 bytes, and so says their length.")
async def llc_length(peer: Peer) -> None:
    link, _ = await confirm_link_of(peer)
    if len(link.raw) != 44 or link.length != 44:
        raise Failed(f"CONFIRM LINK has {len(link.raw)} bytes, and length {link.length}")


@check("3.5.1.6-1", "After CONFIRM LINK the server sends ADD LINK, as a request.", SERVER)
async def add_link_follows(peer: Peer) -> None:
    handshake = await peer.reach(Phase.LINK_OFFERED)
    if handshake.link_offer.reply or handshake.link_offer.rejected:
        raise Failed("ADD LINK has the flag of a reply")


@check("3.5.1.6-2", "ADD LINK has a new link number, and a queue pair with a defined MTU.", SERVER)
async def add_link_fields(peer: Peer) -> None:
    handshake = await peer.reach(Phase.LINK_OFFERED)
    offer = handshake.link_offer
    if offer.link_number == handshake.link_request.link_number:
        raise Failed(f"ADD LINK has the number of the first link, {offer.link_number}")
    if offer.qp_number == 0:
        raise Differs("ADD LINK names no queue pair")
    if offer.qp_number == handshake.accept.qp_number and offer.gid == handshake.accept.gid:
        raise Failed("ADD LINK names the queue pair of the first link")
    if not 1 <= offer.qp_mtu <= 5:
        raise Failed(f"ADD LINK has the MTU {offer.qp_mtu}")


@check("A.3.2-1", "Reserved bits of ADD LINK are zero.")
async def add_link_reserved(peer: Peer) -> None:
    if peer.role is SERVER:
        message = (await peer.reach(Phase.LINK_OFFERED)).link_offer
    else:
        message = (await peer.reach(Phase.READY)).link_reply
    if wrong := message.reserved_words():
        raise Failed(wrong)


@check("3.5.1.6.1-1", "A client with one RNIC rejects a parallel link with reason 1.", CLIENT,
       needs=("one-rnic", "version-1"))  # fmt: skip
async def parallel_link_is_rejected(peer: Peer) -> None:
    handshake = await peer.reach(Phase.LINK_CONFIRMED)
    link = handshake.link
    link.send_llc(
        ADD_LINK, **{**link.own, "qp_number": 0x4711}, link_number=2, qp_mtu=link.rnic.mtu, psn=7
    )
    reply = await peer.llc(link, ADD_LINK, reply=True)
    if not reply.rejected or reply.reason != 1:
        raise Failed(f"the reply is {reply} with reason {reply.reason}")
    if reply.link_number != 2:
        raise Failed(f"the reply has link number {reply.link_number} instead of 2")
    await handshake.connection.echo(b"with one link")


@check(
    "C.7.1-1",
    "A client rejects ADD LINK with an undefined MTU, with reason 2.",
    CLIENT,
    needs=("version-1",),
)
async def undefined_mtu_in_add_link(peer: Peer) -> None:
    handshake = await peer.reach(Phase.LINK_CONFIRMED)
    device = peer.session.devices[-1]
    for mtu in (0, 6, 15):
        handshake.link.send_llc(
            ADD_LINK, gid=device.rnic.gid, mac=device.rnic.mac, qp_number=0x4711, link_number=2,
            qp_mtu=mtu, psn=7,
        )  # fmt: skip
        reply = await peer.llc(handshake.link, ADD_LINK, reply=True)
        if not reply.rejected or reply.reason != 2:
            raise Failed(f"the answer to MTU {mtu} is {reply} with reason {reply.reason}")


@check(
    "3.5.1.6-3", "After a rejected ADD LINK data flows over one link.", SERVER, needs=("version-1",)
)
async def data_after_rejection(peer: Peer) -> None:
    for reason in (1, 2, 15):
        handshake = await peer.reach(Phase.READY, change={"add_link": {"reason": reason}})
        await handshake.connection.echo(b"with one link")


@check("3.5.1.6-4", "The server opens no connection before ADD LINK is answered.", SERVER)
async def no_data_before_the_second_link(peer: Peer) -> None:
    handshake = await peer.reach(Phase.LINK_OFFERED)
    handshake.connection.write(b"early")
    await peer.ping(handshake.link)
    if handshake.connection.peer_produced:
        raise Failed("the echo comes before the answer to ADD LINK")
    await handshake.advance()
    if await handshake.connection.read(5) != b"early":
        raise Failed("early data is lost")


@check("3.5.1.6-5", "A first contact without an answer to ADD LINK ends, or goes on with one link.",
       SERVER, slow=True, robust=True)  # fmt: skip
async def no_answer_to_add_link(peer: Peer) -> None:
    handshake = await peer.reach(Phase.LINK_OFFERED)
    connection = handshake.connection
    connection.write(b"early")
    await peer.until(
        lambda: handshake.tcp.end is not None or connection.peer_produced >= 5,
        "an end of the wait for the answer to ADD LINK", patience=peer.session.options.timers,
    )  # fmt: skip
    if handshake.tcp.end == "FIN":
        raise Failed("the TCP connection has ended by FIN instead of RST")


@check("C.7.1-2", "A server that gets no reply to CONFIRM LINK resets the TCP connection.", SERVER,
       slow=True, robust=True)  # fmt: skip
async def no_reply_to_confirm_link(peer: Peer) -> None:
    handshake = await peer.reach(Phase.LINK_REQUESTED)
    await peer.timer_ends(handshake.tcp)


@check("C.7.1-3", "A client that gets no CONFIRM LINK breaks the TCP connection.", CLIENT,
       slow=True, robust=True)  # fmt: skip
async def no_confirm_link(peer: Peer) -> None:
    handshake = await peer.reach(Phase.CONFIRMED)
    await peer.timer_ends(handshake.tcp)


@check("C.7.1-4", "A client that gets no ADD LINK after CONFIRM LINK breaks the TCP connection.",
       CLIENT, slow=True, robust=True)  # fmt: skip
async def no_add_link(peer: Peer) -> None:
    handshake = await peer.reach(Phase.LINK_CONFIRMED)
    await peer.timer_ends(handshake.tcp)


@check("C.7.1-5", "CONFIRM LINK that names another queue pair ends the first contact.", robust=True)
async def confirm_link_of_another_link(peer: Peer) -> None:
    for values in ({"qp_number": 0x123456}, {"gid": bytes(15) + b"\x01"}):
        phase = Phase.LINK_CONFIRMED if peer.role is SERVER else Phase.LINK_REQUESTED
        handshake = await peer.reach(phase, change={"confirm_link": values})
        await peer.refused(handshake.tcp, decline=True)


@check("C.7.1-6", "A CONFIRM LINK reply with another link number ends the first contact.", SERVER,
       robust=True)  # fmt: skip
async def confirm_link_reply_with_another_number(peer: Peer) -> None:
    handshake = await peer.reach(Phase.LINK_CONFIRMED, change={"confirm_link": {"link_number": 99}})
    await peer.refused(handshake.tcp, decline=True)


@check("C.7.1-7", "CONFIRM LINK in the wrong direction ends the first contact.", robust=True)
async def confirm_link_in_the_wrong_direction(peer: Peer) -> None:
    phase = Phase.LINK_CONFIRMED if peer.role is SERVER else Phase.LINK_REQUESTED
    wrong = 0 if peer.role is SERVER else 1
    handshake = await peer.reach(phase, change={"confirm_link": {"reply": wrong}})
    await peer.refused(handshake.tcp, decline=True)


@check("C.7.1-8", "An LLC message before CONFIRM LINK ends the first contact.", robust=True)
async def message_before_confirm_link(peer: Peer) -> None:
    phase = Phase.LINK_REQUESTED if peer.role is SERVER else Phase.CONFIRMED
    handshake = await peer.reach(phase)
    link, tcp = handshake.link, handshake.tcp
    link.send_llc(TEST_LINK, user_data=b"too early, is it")

    def answered() -> bool:
        return any(each.layout is TEST_LINK and each.reply for each in link.inbox)

    await peer.until(
        lambda: answered() or tcp.end is not None or bool(tcp.buffer), "an answer, or the end"
    )
    if answered():
        raise Differs("the implementation answers TEST LINK before CONFIRM LINK")
    await peer.refused(tcp, decline=True)


@check("C.2-1", "A link that fails before CONFIRM LINK leads to SMC Decline or ends TCP.",
       slow=True, robust=True)  # fmt: skip
async def link_fails_before_confirm_link(peer: Peer) -> None:
    handshake = await peer.reach(Phase.CONFIRMED)
    handshake.link.fail()
    tcp = handshake.tcp
    await peer.until(
        lambda: tcp.end is not None or len(tcp.buffer) >= 28, "SMC Decline or the end of TCP",
        patience=peer.session.options.timers,
    )  # fmt: skip
    if tcp.end is None:
        await peer.declined(tcp)
        await peer.plain_echo(tcp)


# --- subsequent contact -------------------------------------------------------------------------


@check("3.5.2-1", "A further connection of the same peers uses the existing link.",
       needs=("parallel",))  # fmt: skip
async def subsequent_contact(peer: Peer) -> None:
    first = await peer.connect()
    second = await peer.connect(group=first.group)
    await second.echo(b"second")
    await first.echo(b"first")


@check("3.5.2-2", "No LLC message belongs to a further connection that finds its RMB known.",
       needs=("parallel",))  # fmt: skip
async def no_llc_for_subsequent_contact(peer: Peer) -> None:
    first = await peer.connect()
    await peer.connect(group=first.group)
    second = await peer.reach(Phase.READY, group=first.group)
    await second.connection.echo(b"x")
    if [each for each in first.link.inbox if each.layout is CONFIRM_LINK]:
        raise Failed("CONFIRM LINK came again")


@check("3.5.2-3", "No two connections of a group have the same element or alert token.",
       needs=("parallel",))  # fmt: skip
async def elements_are_not_shared(peer: Peer) -> None:
    connections = [await peer.connect()]
    for _ in range(3):
        connections.append(await peer.connect(group=connections[0].group))
    elements = {(each.peer_rkey, each.peer_address) for each in connections}
    if len(elements) < len(connections):
        raise Failed("two connections share an element")
    if len({each.peer_token for each in connections}) < len(connections):
        raise Failed("two connections share an alert token")


@check("3.5.2-4", "Several connections over one link carry their own data.", needs=("parallel",))
async def many_connections(peer: Peer) -> None:
    connections = [await peer.connect()]
    for _ in range(3):
        connections.append(await peer.connect(group=connections[0].group))
    for number, each in enumerate(connections):
        each.write(f"connection {number}".encode())
    for number, each in enumerate(connections):
        back = await each.read(12)
        if back != f"connection {number}".encode():
            raise Failed(f"connection {number} gets {back!r}")


@check("3.5.2-5", "Data that comes before SMC Confirm is kept for the connection.", SERVER)
async def data_before_confirm(peer: Peer) -> None:
    first = await peer.connect()
    handshake = await peer.reach(Phase.ACCEPTED, group=first.group)
    handshake.connection.write(b"early")
    await peer.ping(first.link)
    await handshake.advance()
    if await handshake.connection.read(5) != b"early":
        raise Failed("early data is lost")


@check("3.5.2-6", "SMC Accept or SMC Confirm of a further connection has the known peer ID.",
       needs=("parallel",))  # fmt: skip
async def peer_id_of_subsequent_contact(peer: Peer) -> None:
    handshake = await peer.reach(Phase.READY)
    second = await peer.reach(Phase.CONFIRMED, group=handshake.group)
    if peer.role is SERVER:
        one, other = handshake.accept, second.accept
    else:
        one, other = handshake.confirm, second.confirm
    if one.peer_id != other.peer_id:
        raise Failed("the peer ID has changed")


@check("3.5.2.3-1", "SMC Confirm that names no link of the group ends the TCP connection.", SERVER,
       robust=True)  # fmt: skip
async def confirm_of_an_unknown_link(peer: Peer) -> None:
    first = await peer.connect()
    for values in ({"qp_number": 0x123456}, {"gid": bytes(15) + b"\x01"}):
        handshake = await peer.reach(Phase.CONFIRMED, group=first.group, change={"confirm": values})
        await peer.refused(handshake.tcp)
    await first.echo(b"first")


@check("3.5.2.3-2", "SMC Confirm with an RKey that was never confirmed ends TCP.", SERVER,
       robust=True)  # fmt: skip
async def confirm_of_an_unknown_rkey(peer: Peer) -> None:
    first = await peer.connect()
    rkey = first.link.region.rkey ^ 0xFFFF
    handshake = await peer.reach(
        Phase.CONFIRMED, group=first.group, change={"confirm": {"rkey": rkey}}
    )
    await peer.refused(handshake.tcp)
    await first.echo(b"first")


@check("3.5.2.2-1", "A client declines out of sync when SMC Accept names an unknown queue pair.",
       CLIENT, needs=("parallel",))  # fmt: skip
async def accept_of_an_unknown_link(peer: Peer) -> None:
    first = await peer.connect()
    handshake = await peer.reach(
        Phase.ACCEPTED, group=first.group, change={"accept": {"qp_number": 0x123456}}
    )
    decline = await peer.declined(handshake.tcp)
    if not decline.out_of_sync:
        raise Failed("SMC Decline has no out-of-sync flag")
    await first.echo(b"first")


@check("3.5.3-1", "SMC Accept with the first-contact flag makes another group with the same peer.",
       CLIENT, needs=("parallel",))  # fmt: skip
async def parallel_group(peer: Peer) -> None:
    first = await peer.connect()
    second = await peer.connect(peer_id=first.group.peer_id)
    assert first.link.peer is not None
    assert second.link.peer is not None
    if first.link.peer.qp_number == second.link.peer.qp_number:
        raise Failed("the client uses a queue pair of another group")
    await second.echo(b"second")
    await first.echo(b"first")


@check("4.4.2-1", "An element that is offered to a new connection ends the one that had it.",
       needs=("parallel",), robust=True)  # fmt: skip
async def element_conflict(peer: Peer) -> None:
    first = await peer.connect()
    name = "confirm" if peer.role is SERVER else "accept"
    second = await peer.reach(
        Phase.CONFIRMED, group=first.group, change={name: {"rmbe_index": first.index}}
    )
    await peer.ended(first.tcp, "RST")
    if any(message.aborted for message in first.messages):
        raise Failed("the connection that lost its element sends a CDC message")
    second.connection.index = first.index
    await second.connection.echo(b"second")


@check("3.5.1.6.4-1", "After a first contact that has failed, the next one begins anew.")
async def first_contact_after_a_failed_one(peer: Peer) -> None:
    handshake = await peer.reach(Phase.CONFIRMED)
    handshake.tcp.reset()
    handshake.link.fail()
    try:
        connection = await peer.connect(peer_id=handshake.peer_id)
    except Silence as silence:
        raise Failed(f"the next first contact does not complete: {silence}") from silence
    await connection.echo(b"hello")
