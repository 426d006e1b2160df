"""`Peer`: the scripted peer that a check drives, step by step.

A handshake has phases (`Phase`).  `Peer.reach` runs one up to a phase, in the suite's role, and
returns a `Handshake`; `Handshake.advance` continues it.  `Peer.connect` runs all of it and returns
the connection.  On the way each message of the suite can be changed:

- ``change={"confirm": {"rkey": 0}}``: other values for fields;
- ``tamper={"confirm": function}``: other bytes.

Messages are named "proposal", "accept", "confirm", "confirm_link" (request or reply, whichever the
suite sends) and "add_link" (offer, rejection or acceptance, likewise).

All waits end after the suite's patience (`Options.patience`) with `Silence`.  They end early with
`Failed` if the TCP connection or the link that carries the answer has ended.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, Final, TypeAlias

import trio

from smc_conform.connection import Connection
from smc_conform.device import Device
from smc_conform.link import Ends, Group, Link
from smc_conform.messages import (
    ACCEPT,
    ADD_LINK,
    ADD_LINK_CONTINUATION,
    CONFIRM,
    CONFIRM_LINK,
    DECLINE,
    DELETE_LINK,
    PROPOSAL,
    TEST_LINK,
    V2,
    V2_FIRST,
    Layout,
    Message,
    pack,
    proposal_v2,
    with_bytes,
)
from smc_conform.roles import Role
from smc_conform.session import Session
from smc_conform.tcp import Tcp
from smc_conform.trace import Trace
from smc_conform.verdicts import Failed, Inconclusive
from smc_conform.waits import Waits, Watched
from trio_smc.host.addresses import interface_prefixes

__all__ = ["Handshake", "Peer", "Phase", "proposal"]

_SERVER: Final = Role.SERVER
_OUTSTANDING: Final = 128
"""Messages at a time; a queue pair of a RoCE port takes 256."""
_RELEASE: Final = 1
_MAX_CONNECTIONS: Final = 255
_MAX_LINKS: Final = 2
"""The suite's offer for version 2, which is that of Linux."""
_EID_SIZE: Final = 32
_LINUX: Final = 2
"""The operating system that the suite names."""
_HOST: Final = b"smc-conform".ljust(32)
_TERMS: Final = ("eid", "release", "max_connections", "max_links", "direct")
Change: TypeAlias = Mapping[str, Mapping[str, Any]]
Tamper: TypeAlias = Mapping[str, Callable[[bytes], bytes]]


class Phase(IntEnum):
    """The steps of a first contact, in order: what was sent or received last (RFC 7609, 3.5.1)."""

    TCP = 0
    PROPOSED = 1
    ACCEPTED = 2
    CONFIRMED = 3
    LINK_REQUESTED = 4
    """CONFIRM LINK was sent, or received."""
    LINK_CONFIRMED = 5
    """The reply to CONFIRM LINK was sent, or received."""
    LINK_OFFERED = 6
    """ADD LINK was sent, or received."""
    READY = 7


def proposal(prefixes: tuple[tuple[bytes, int], ...], **values: int | bytes) -> bytes:
    """SMC Proposal; IPv6 prefixes are pairs of 16 bytes and a length (figures 26 and 27)."""
    listed = b"".join(prefix + bytes((length,)) for prefix, length in prefixes)
    message = pack(PROPOSAL, **{"prefix_count": len(prefixes), **values})
    if listed:
        message = message[:-4] + listed + message[-4:]
        if "length" not in values:
            message = with_bytes(message, 5, len(message).to_bytes(2, "big"))
    return message


class Handshake:
    """One TCP connection and the rendezvous on it.

    Attributes:
      phase: the last phase that was reached.
      tcp: the TCP connection.
      peer_id: the suite's.
      version: of SMC-R.
      group: the link group; None before the suite has made it.
      proposal, accept, confirm: the messages of the implementation, once received.
      link_request, link_reply, link_offer: the same of LLC.
    """

    proposal: Message
    accept: Message
    confirm: Message
    link_request: Message
    link_reply: Message
    link_offer: Message
    connection: Connection

    def __init__(
        self, peer: Peer, tcp: Tcp, group: Group | None, change: Change, tamper: Tamper,
        peer_id: bytes,
    ) -> None:  # fmt: skip
        self.peer = peer
        self.tcp = tcp
        self.phase = Phase.TCP
        self.group = group
        self.peer_id = peer_id if group is None else group.peer_id
        self.subsequent = group is not None
        self.version = peer.version
        self._change = change
        self._tamper = tamper

    @property
    def link(self) -> Link:
        """The link of the connection."""
        assert self.group is not None
        return self.group.link

    async def advance(self, to: Phase = Phase.READY) -> Connection:
        """Continue up to a phase.  Returns the connection, if there is one already."""
        steps = _SERVER_STEPS if self.peer.role is _SERVER else _CLIENT_STEPS
        while self.phase < to:
            self.phase = Phase(self.phase + 1)
            if self.subsequent and self.phase > Phase.CONFIRMED:
                self.phase = to
                break
            await steps[self.phase](self)
        return getattr(self, "connection", None)  # type: ignore[return-value]

    def _sent(self, name: str, layout: Layout, **values: Any) -> bytes:
        """The message of the suite, changed as the check wants it."""
        fields = {**values, **self._change.get(name, {})}
        if layout is PROPOSAL and self.version > 1:
            raw = proposal_v2(fields.pop("eids"), **fields)
        elif layout is PROPOSAL:
            prefixes = fields.pop("prefixes")
            raw = proposal(prefixes, **fields)
        elif layout in (ACCEPT, CONFIRM):
            raw = pack(self._credentials_layout(layout), **fields)
        else:
            assert self.group is not None
            raw = self.group.pack_llc(layout, **fields)
        return self.tampered(name, raw)

    def tampered(self, name: str, raw: bytes) -> bytes:
        """The message as the check wants it, once its fields are changed."""
        return self._tamper.get(name, _same)(raw)

    def changes(self, name: str) -> Mapping[str, Any]:
        """The values that the check wants for fields of a message."""
        return self._change.get(name, {})

    def _credentials_layout(self, layout: Layout) -> Layout:
        if self.version == 1:
            return layout
        return V2[layout] if self.subsequent else V2_FIRST[layout]

    def credentials(self) -> dict[str, Any]:
        """The fields of the suite's SMC Accept or SMC Confirm."""
        group, connection = self.group, self.connection
        assert group is not None
        link = connection.link
        fields = {
            **link.own,
            "peer_id": group.peer_id,
            "rkey": link.region.rkey,
            "rmbe_index": connection.index,
            "alert_token": connection.token,
            "size_code": 0,
            "qp_mtu": link.rnic.mtu,
            "rmb_address": link.region.address,
            "psn": link.psn,
        }
        if self.version == 1:
            return fields
        if self.subsequent:
            return {**fields, "eid": group.terms["eid"]}
        fields |= {**group.terms, "first_contact": 1, "system": _LINUX, "host": _HOST}
        if self.peer.role is _SERVER:
            fields |= {"gid_count": 1, "gid_1": link.rnic.gid}
        return fields

    # --- the implementation is the server ----------------------------------------------------

    async def _propose(self) -> None:
        fields = {**self.peer.offer(self), **self.changes("proposal")}
        gid = fields["gid"] if self.version == 1 else fields["roce_gid"]
        self.peer.claim(fields["peer_id"], gid)
        await self.tcp.send(self._sent("proposal", PROPOSAL, **self.peer.offer(self)))

    async def _receive_accept(self) -> None:
        self.accept = await self.peer.clc(self.tcp, ACCEPT)
        if self.subsequent and self.accept.first_contact:
            raise Failed("SMC Accept has the first-contact flag, although a link group exists")
        if not self.subsequent and not self.accept.first_contact:
            raise Failed("SMC Accept has no first-contact flag, although no link group exists")
        if self.accept.version != self.version:
            raise Failed(f"SMC Accept has version {self.accept.version}")
        if self.group is None:
            self.group = self.peer.new_group(self.peer_id)
            if self.version > 1:
                self.group.terms = {name: getattr(self.accept, name) for name in _TERMS}
            link = self.group.new_link()
            await self.peer.connect_link(link, self.accept)
        self.connection = Connection(self.tcp, self.group)
        self.connection.first_contact = bool(self.accept.first_contact)
        self.connection.know_peer(self.accept)
        if self.subsequent:
            self.connection.link = self._named_link(self.accept)

    async def _send_confirm(self) -> None:
        await self.tcp.send(self._sent("confirm", CONFIRM, **self.credentials()))

    async def _receive_confirm_link(self) -> None:
        self.link_request = await self.peer.llc(self.link, CONFIRM_LINK, watched=(self.tcp,))
        if self.link_request.reply:
            raise Failed("CONFIRM LINK is a reply, although the server begins the exchange")
        assert self.group is not None
        self.group.renumber(self.link, self.link_request.link_number)
        if not self.link_request.no_eye_catcher:
            self.group.eye_catcher = True
        self.link.ready()

    async def _reply_to_confirm_link(self) -> None:
        assert self.group is not None
        fields = self.group.confirm_link_fields(self.link)
        self.link.send(self._sent("confirm_link", CONFIRM_LINK, reply=1, **fields))

    @property
    def _single(self) -> bool:
        """True if both sides agree on a single link: there is no ADD LINK then."""
        assert self.group is not None
        return self.group.terms.get("max_links") == 1

    async def _receive_add_link(self) -> None:
        if self._single:
            return
        self.link_offer = await self.peer.llc(self.link, ADD_LINK, watched=(self.tcp,))
        if self.link_offer.reply:
            raise Failed("ADD LINK is a reply, although the server begins the exchange")

    async def _reject_add_link(self) -> None:
        assert self.group is not None
        if not self._single:
            raw = self.group.rejection(self.link, self.link_offer, **self.changes("add_link"))
            self.link.send(self.tampered("add_link", raw))
        self.group.auto.add(ADD_LINK)

    # --- the implementation is the client ----------------------------------------------------

    async def _receive_proposal(self) -> None:
        self.proposal = await self.peer.clc(self.tcp, PROPOSAL)
        if self.version > 1 and "eids" not in self.proposal.fields:
            raise Failed("SMC Proposal does not offer version 2")

    async def _send_accept(self) -> None:
        if self.group is None:
            self.group = self.peer.new_group(self.peer_id)
            if self.version > 1:
                self.group.terms = self._terms()
            self.group.new_link()
        self.connection = Connection(self.tcp, self.group)
        self.connection.first_contact = not self.subsequent
        fields = {"first_contact": int(not self.subsequent), **self.credentials()}
        self.peer.claim(self.changes("accept").get("peer_id", self.peer_id), fields["gid"])
        await self.tcp.send(self._sent("accept", ACCEPT, **fields))

    def _terms(self) -> dict[str, Any]:
        """The answer to the client's offer of version 2."""
        offer = self.proposal
        own = self.peer.eid
        terms: dict[str, Any] = {
            "eid": own if own and own in offer.eids else offer.eids[:_EID_SIZE],
            "release": min(_RELEASE, offer.release),
            "max_connections": min(_MAX_CONNECTIONS, offer.max_connections),
            "max_links": min(_MAX_LINKS, offer.max_links),
            "direct": 1,
        }
        terms |= self.changes("terms")
        if not terms["release"]:
            terms |= {"max_connections": 0, "max_links": 0}
        return terms

    async def _receive_confirm(self) -> None:
        self.confirm = await self.peer.clc(self.tcp, CONFIRM)
        self.connection.know_peer(self.confirm)
        if self.subsequent:
            self.connection.link = self._named_link(self.confirm)
        else:
            await self.peer.connect_link(self.link, self.confirm)
            self.link.ready()

    async def _request_confirm_link(self) -> None:
        assert self.group is not None
        fields = self.group.confirm_link_fields(self.link)
        self.link.send(self._sent("confirm_link", CONFIRM_LINK, **fields))

    async def _receive_confirm_link_reply(self) -> None:
        self.link_reply = await self.peer.llc(self.link, CONFIRM_LINK, watched=(self.tcp,))
        if not self.link_reply.reply:
            raise Failed("the answer to CONFIRM LINK has no reply flag")
        assert self.group is not None
        if not self.link_reply.no_eye_catcher:
            self.group.eye_catcher = True

    async def _offer_link(self) -> None:
        link, group = self.link, self.group
        assert group is not None
        if self._single:
            return
        fields = {
            "gid": link.rnic.gid, "mac": link.rnic.mac, "link_number": link.number + 1,
            **self.changes("add_link"),
        }  # fmt: skip
        self.link.send(self.tampered("add_link", group.pack_short(ADD_LINK, **fields)))

    async def _receive_rejection(self) -> None:
        if self._single:
            return
        self.link_reply = await self.peer.llc(self.link, ADD_LINK, watched=(self.tcp,))
        if not self.link_reply.rejected:
            raise Failed("the client has accepted an ADD LINK without a queue pair")

    # --- a second link -------------------------------------------------------------------------

    async def add_link(self, device: Device) -> Link:
        """Set up a second link on another RNIC of the suite, in place of the last two phases.

        The handshake has confirmed the first link, and the suite has not answered or sent ADD LINK.
        """
        if self.peer.role is _SERVER:
            if self.phase < Phase.LINK_OFFERED:
                await self.advance(Phase.LINK_OFFERED)
            new = await self._accept_offer(device)
        else:
            await self.advance(Phase.LINK_CONFIRMED)
            new = await self._offer_second(device)
        self.phase = Phase.READY
        assert self.group is not None
        self.group.auto.add(ADD_LINK)
        return new

    async def _accept_offer(self, device: Device) -> Link:
        new = await self.accept_offer(device)
        await self.peer.llc(new, CONFIRM_LINK)
        assert self.group is not None
        new.send(self.group.confirm_link(new, reply=1))
        return new

    async def accept_offer(self, device: Device) -> Link:
        """Accept the server's ADD LINK, up to its CONFIRM LINK on the new link."""
        offer, group, old = self.link_offer, self.group, self.link
        assert group is not None
        new = group.new_link(device, offer.link_number)
        await self.peer.connect_link(new, offer)
        if self.version > 1:
            group.learn_pairs(old, new, offer)
            new.ready()
        raw = group.add_link(old, new, reply=1, **self.changes("second_link"))
        old.send(self.tampered("second_link", raw))
        if self.version == 1:
            request = await self.peer.llc(old, ADD_LINK_CONTINUATION)
            group.learn_pairs(old, new, request)
            old.send_llc(ADD_LINK_CONTINUATION, reply=1, link_number=new.number, **_pair(old, new))
            new.ready()
        return new

    async def _offer_second(self, device: Device) -> Link:
        new = await self.offer_second(device)
        assert self.group is not None
        new.send(self.group.confirm_link(new))
        await self.peer.llc(new, CONFIRM_LINK, reply=True)
        return new

    async def offer_second(self, device: Device) -> Link:
        """Offer a second link to the client, up to the suite's CONFIRM LINK on it."""
        group, old = self.group, self.link
        assert group is not None
        new = group.new_link(device, old.number + 1)
        raw = group.add_link(old, new, **self.changes("second_link"))
        old.send(self.tampered("second_link", raw))
        reply = self.link_reply = await self.peer.llc(old, ADD_LINK, watched=(self.tcp,))
        if reply.rejected:
            raise Failed("the client has rejected ADD LINK over another RNIC")
        await self.peer.connect_link(new, reply)
        new.ready()
        if self.version == 1:
            old.send_llc(ADD_LINK_CONTINUATION, link_number=new.number, **_pair(old, new))
            reply = await self.peer.llc(old, ADD_LINK_CONTINUATION, reply=True)
        group.learn_pairs(old, new, reply)
        return new

    # --- both ----------------------------------------------------------------------------------

    def _named_link(self, message: Message) -> Link:
        """The link of the group that SMC Accept or SMC Confirm names."""
        assert self.group is not None
        for link in self.group.links.values():
            ends = link.peer
            if ends is not None and (ends.gid, ends.qp_number) == (message.gid, message.qp_number):
                return link
        raise Failed(f"{message.name} names QP 0x{message.qp_number:06x}, which no link has")


def _pair(old: Link, new: Link) -> dict[str, int]:
    """The fields of ADD LINK CONTINUATION for the suite's only RMB."""
    return {
        "tokens_left": 1, "reference_rkey": old.region.rkey, "new_rkey": new.region.rkey,
        "new_address": new.region.address,
    }  # fmt: skip


def _same(raw: bytes) -> bytes:
    return raw


_SERVER_STEPS: Final = {
    Phase.PROPOSED: Handshake._propose,
    Phase.ACCEPTED: Handshake._receive_accept,
    Phase.CONFIRMED: Handshake._send_confirm,
    Phase.LINK_REQUESTED: Handshake._receive_confirm_link,
    Phase.LINK_CONFIRMED: Handshake._reply_to_confirm_link,
    Phase.LINK_OFFERED: Handshake._receive_add_link,
    Phase.READY: Handshake._reject_add_link,
}
_CLIENT_STEPS: Final = {
    Phase.PROPOSED: Handshake._receive_proposal,
    Phase.ACCEPTED: Handshake._send_accept,
    Phase.CONFIRMED: Handshake._receive_confirm,
    Phase.LINK_REQUESTED: Handshake._request_confirm_link,
    Phase.LINK_CONFIRMED: Handshake._receive_confirm_link_reply,
    Phase.LINK_OFFERED: Handshake._offer_link,
    Phase.READY: Handshake._receive_rejection,
}


class Peer:
    """The scripted peer of one check.

    Attributes:
      session: the options, RNICs and connections of the run.
      role: of the implementation under test.
      version: of SMC-R.
      eid: the UEID of the run as it is on the wire; empty: any.
      trace: what was sent and received.
    """

    def __init__(self, session: Session, nursery: trio.Nursery) -> None:
        self.session = session
        self.role = session.role
        self.version = session.options.version
        self.eid = session.options.ueid.encode().ljust(_EID_SIZE) if session.options.ueid else b""
        self.trace = Trace()
        self._nursery = nursery
        self.waits = Waits(session.options.patience)
        self.until = self.waits.until
        self._tcps: list[Tcp] = []
        self._groups: list[Group] = []
        self._claimant = object()  # outlives this peer, which holds much more

    # --- waits ---------------------------------------------------------------------------------

    async def quiet(self, seconds: float = 0.2) -> None:
        """Let some time pass, in which the implementation should not do anything."""
        await trio.sleep(seconds)

    async def clc(self, tcp: Tcp, layout: Layout) -> Message:
        """The next CLC message, which must be of this kind."""
        message = await self.any_clc(tcp, layout.name)
        if message.layout is not layout:
            raise Failed(f"{message} came instead of {layout.name}")
        return message

    async def any_clc(self, tcp: Tcp, what: str = "a CLC message") -> Message:
        """The next CLC message, of any kind."""
        found: list[Message] = []

        def one() -> bool:
            message = tcp.take_clc()
            if message is not None:
                found.append(message)
            return bool(found) or tcp.is_foreign

        await self.until(one, what, tcp)
        if not found:
            raise Failed(f"{bytes(tcp.buffer[:40])!r} came instead of {what}")
        return found[0]

    async def clc_or_end(self, tcp: Tcp, patience: float | None = None) -> Message | None:
        """The next CLC message, of any kind, or None if the TCP connection ends.

        Args:
          patience: seconds, in place of the usual ones.
        """
        found: list[Message] = []

        def over() -> bool:
            message = tcp.take_clc()
            if message is not None:
                found.append(message)
            return bool(found) or tcp.end is not None

        what = "a CLC message or the end of the TCP connection"
        await self.until(over, what, patience=patience)
        return found[0] if found else None

    async def llc(
        self, link: Link, layout: Layout, *, reply: bool | None = None,
        watched: tuple[Watched, ...] = (), patience: float | None = None,
    ) -> Message:  # fmt: skip
        """Take the oldest LLC message of this kind from a link; others stay.

        Args:
          reply: the reply flag that it must have; None: any.
        """

        def matching() -> list[Message]:
            return [
                each
                for each in link.inbox
                if each.layout is layout and reply in (None, bool(each.reply))
            ]

        what = layout.name + (" reply" if reply else "")
        await self.until(lambda: bool(matching()), what, link, *watched, patience=patience)
        message = matching()[0]
        link.inbox.remove(message)
        return message

    async def ended(self, tcp: Tcp, how: str = "") -> str:
        """Wait for the end of the TCP connection: "FIN" or "RST".

        Args:
          how: the end that the document requires; empty: either.
        """
        await self.until(lambda: tcp.end is not None, "the end of the TCP connection")
        end = tcp.end or ""
        if how and end != how:
            raise Failed(f"the TCP connection has ended by {end} instead of {how}")
        return end

    async def timer_ends(self, tcp: Tcp) -> str:
        """Wait until a time-out of the implementation ends the TCP connection.

        Raises:
          Failed: the implementation continues the rendezvous, or declines.
        """
        answer = await self.clc_or_end(tcp, self.session.options.timers)
        if answer is not None:
            raise Failed(f"{answer} came before the end of the TCP connection")
        return tcp.end or ""

    async def declined(self, tcp: Tcp) -> Message:
        """Wait for SMC Decline."""
        return await self.clc(tcp, DECLINE)

    async def refused(self, tcp: Tcp, *, decline: bool = False) -> str:
        """Wait until the implementation refuses the rendezvous.

        Args:
          decline: SMC Decline is a right answer, too.

        Returns:
          "FIN", "RST" or "Decline".

        Raises:
          Failed: the implementation continues the rendezvous, or declines without a right to.
        """
        answer = await self.clc_or_end(tcp)
        if answer is None:
            return tcp.end or ""
        if answer.layout is not DECLINE:
            raise Failed(f"the implementation goes on with {answer}")
        if not decline:
            raise Failed(
                f"the implementation falls back ({answer}) instead of ending the connection"
            )
        return "Decline"

    async def plain_echo(self, tcp: Tcp, data: bytes = b"over TCP") -> None:
        """Use the implementation's echo service over TCP, after a fallback."""
        tcp.take()
        await tcp.send(data)
        await self.until(lambda: len(tcp.buffer) >= len(data), "the echo over TCP", tcp)
        back = tcp.take()
        if back != data:
            raise Failed(f"the echo over TCP is {back[:40]!r} instead of {data[:40]!r}")

    async def room(self, link: Link) -> None:
        """Wait until the queue pair can take more messages, or has failed."""
        await self.until(
            lambda: bool(link.failed) or link.posted - link.completed < _OUTSTANDING,
            "the completion of earlier messages",
        )

    async def ping(self, link: Link) -> Message:
        """Send TEST LINK and wait for the reply.

        Messages of a link are processed in order, so the implementation has then processed all
        messages that were sent on the link before.
        """
        data = secrets.token_bytes(16)
        link.send_llc(TEST_LINK, user_data=data)
        reply = await self.llc(link, TEST_LINK, reply=True)
        if reply.user_data != data:
            raise Failed("the TEST LINK reply has other user data than the request")
        return reply

    async def link_ended(self, link: Link) -> None:
        """Wait until the implementation has ended its queue pair, or has deleted the link.

        On RoCE the suite finds that out by sending.
        """

        def over() -> bool:
            deleted = [*link.inbox, *link.answered]
            return bool(link.failed) or any(each.layout is DELETE_LINK for each in deleted)

        if self.session.roce and not over():
            with trio.move_on_after(0.5):
                await self.until(over, "the end of the link")
            if not over():
                link.send_llc(TEST_LINK)
        await self.until(over, "the end of the link")

    async def answer_or_end(self, link: Link) -> bool:
        """Wait for an LLC message or the end of the link; returns True if it has ended.

        On RoCE a queue pair that the implementation has ended shows in the end of the TCP
        connections, if all that the suite has sent was acknowledged before.
        """

        def over() -> bool:
            return bool(link.failed) or any(tcp.end is not None for tcp in self._tcps)

        await self.until(lambda: bool(link.inbox) or over(), "an answer or the end of the link")
        return over()

    # --- connections -----------------------------------------------------------------------------

    async def dial(self, port: int = 0) -> Tcp:
        """A TCP connection with the implementation: opened, or accepted; see `Session.tcp`."""
        stream = await self.session.tcp(port)
        tcp = Tcp(stream, self.trace, self.waits.changed)
        self._tcps.append(tcp)
        self._nursery.start_soon(tcp.run)
        return tcp

    def new_peer_id(self) -> bytes:
        """A peer ID that no implementation has seen: an instance number and a MAC (A.2.1)."""
        return self.session.new_instance().to_bytes(2, "big") + self.session.devices[0].rnic.mac

    def claim(self, peer_id: bytes, gid: bytes) -> None:
        """Note the identity that this check shows the implementation; see `Session.claim`."""
        self.session.claim(peer_id if any(peer_id) else gid, self._claimant)

    def new_group(self, peer_id: bytes) -> Group:
        """A link group of the suite, without links."""
        group = Group(
            self.session.devices[0], self.trace, self.waits,
            eye_catcher=self.session.eye_catcher, peer_id=peer_id, version=self.version,
        )  # fmt: skip
        self._groups.append(group)
        return group

    def offer(self, handshake: Handshake) -> dict[str, Any]:
        """The fields of SMC Proposal; in a group it names the RNIC of a link that works."""
        group = handshake.group
        rnic = self.session.devices[0].rnic if group is None else group.link.rnic
        fields: dict[str, Any] = {"peer_id": handshake.peer_id, "gid": rnic.gid, "mac": rnic.mac}
        networks = interface_prefixes(handshake.tcp.local)
        if ipaddress.ip_address(handshake.tcp.local.partition("%")[0]).version == 4:
            fields |= {"prefixes": (), "subnet": networks[0].network, "mask_length": networks[0][1]}
        else:
            fields |= {"prefixes": tuple((each.network, each.length) for each in networks)}
        if self.version > 1:
            fields |= {
                "eids": (self.eid,), "roce_gid": rnic.gid, "release": _RELEASE,
                "max_connections": _MAX_CONNECTIONS, "max_links": _MAX_LINKS,
            }  # fmt: skip
        return fields

    async def connect_link(self, link: Link, message: Message) -> None:
        """Connect a link to the end that SMC Accept or SMC Confirm names."""
        rnic = link.rnic
        with trio.move_on_after(self.session.patience):
            while not rnic.address_known(message.gid):  # noqa: ASYNC110 - no event exists
                await trio.sleep(0.01)
        ends = Ends(message.gid, message.mac, message.qp_number, message.psn, message.qp_mtu)
        link.connect(ends)

    async def start(
        self, *, group: Group | None = None, change: Change | None = None,
        tamper: Tamper | None = None, peer_id: bytes = b"", port: int = 0,
    ) -> Handshake:  # fmt: skip
        """A TCP connection on which no CLC message was sent or read yet.

        Args:
          group: the contact is a subsequent one in this group.
          change, tamper: see this module's docstring.
          peer_id: the suite's; empty: a new one, so that the implementation knows no group with it.
          port: see `Session.tcp`.
        """
        tcp = await self.dial(port)
        return Handshake(
            self, tcp, group, change or {}, tamper or {}, peer_id or self.new_peer_id()
        )

    async def reach(
        self, phase: Phase, *, group: Group | None = None, change: Change | None = None,
        tamper: Tamper | None = None, peer_id: bytes = b"", port: int = 0,
    ) -> Handshake:  # fmt: skip
        """Run a handshake up to a phase; see `start`."""
        handshake = await self.start(
            group=group, change=change, tamper=tamper, peer_id=peer_id, port=port
        )
        await handshake.advance(phase)
        return handshake

    async def connect(
        self, *, group: Group | None = None, change: Change | None = None, links: int = 1,
        peer_id: bytes = b"", port: int = 0,
    ) -> Connection:  # fmt: skip
        """A connection that is ready for data.  If this fails, the check is inconclusive.

        Args:
          links: of its group; 2 needs "two-rnics".
        """
        try:
            if links > 1:
                handshake = await self.reach(
                    Phase.LINK_CONFIRMED, change=change, peer_id=peer_id, port=port
                )
                await handshake.add_link(self.session.devices[1])
            else:
                handshake = await self.reach(
                    Phase.READY, group=group, change=change, peer_id=peer_id, port=port
                )
        except Failed as failed:
            raise Inconclusive(f"no connection to begin with: {failed}") from failed
        return handshake.connection

    async def still_serves(self) -> None:
        """Open another connection in a group of its own, and use it."""
        handshake = await self.reach(Phase.READY)
        await handshake.connection.echo(b"still here")

    # --- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """End everything that the check has opened."""
        for tcp in self._tcps:
            tcp.close()
        for group in self._groups:
            group.close()
