"""Links and link groups of the suite: queue pairs, an RMB, and raw LLC and CDC messages."""

from __future__ import annotations

import contextlib
import secrets
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from smc_conform.device import Device
from smc_conform.messages import (
    ADD_LINK,
    CONFIRM_LINK,
    CONFIRM_RKEY,
    CONFIRM_RKEY_CONTINUATION,
    DELETE_LINK,
    DELETE_RKEY,
    EYE_CATCHER,
    REQUEST_ADD_LINK,
    TEST_LINK,
    V2,
    Layout,
    Message,
    pack,
    pairs_of,
    read,
    rtoken_pair,
    with_bytes,
)
from smc_conform.trace import Trace
from smc_conform.waits import Waits, Watched
from trio_smc.rnic.memory import Memory
from trio_smc.rnic.verbs import Completion, QueueFull, RnicError, WcOpcode, WcStatus

__all__ = ["ELEMENTS", "ELEMENT_SIZE", "Ends", "Group", "Link", "LinkUser", "Region", "own_pair"]

ELEMENT_SIZE: Final = 16 * 1024
"""Bytes of an element of the suite's RMB: the smallest one, so that cursors wrap soon (A.2.3)."""
ELEMENTS: Final = 16
"""Elements of the suite's RMB."""
_RECEIVES: Final = 64
_LONG_RECEIVE: Final = 4352
"""Bytes of a receive buffer in version 2, whose longest message has 4,152."""
_SHORTEST: Final = 44
_REPLY: Final = 0x80
_CONFIRMED: Final = ("link", "rkey", "address")
_PAIR: Final = ("reference_rkey", "new_rkey", "new_address")


class Ends(NamedTuple):
    """The implementation's end of a link."""

    gid: bytes
    mac: bytes
    qp_number: int
    psn: int
    mtu: int


class Region(NamedTuple):
    """A registered RMB of the suite with one element."""

    rkey: int
    address: int
    memory: Memory


class LinkUser(Watched):
    """A connection, as its link group sees it."""

    @abstractmethod
    def receive(self, link: Link, message: Message) -> None:
        """Note a CDC message of the implementation."""


class Link(Watched):
    """One queue pair with everything that belongs to its link.

    Attributes:
      number: the link number; 1 before the server has assigned one.
      peer: the implementation's end; None before it is known.
      psn: the initial packet sequence number of the suite's end.
      inbox: received LLC messages that no step has taken.
      answered: received LLC requests that the suite has answered by itself.
      failed: the status that ended the queue pair; empty while it works.
      completed, posted: requests that have completed, and that were posted.
    """

    def __init__(self, group: Group, device: Device) -> None:
        self.group = group
        self.device = device
        self.number = 1
        self.peer: Ends | None = None
        self.psn = secrets.randbits(24)
        self.inbox: list[Message] = []
        self.answered: list[Message] = []
        self.failed = ""
        self.completed = self.posted = 0
        self.rnic = device.rnic
        self.pd = self.rnic.alloc_pd()
        more = {"receive_size": _LONG_RECEIVE} if group.version > 1 else {}
        self.qp = self.rnic.create_qp(self.pd, **more)
        self.region = self.pd.register(group.memory)
        device.attach(self.qp, self._on_completion)
        self.qp.to_init()
        self.qp.post_receive(_RECEIVES)
        self._closed = False

    @property
    def own(self) -> dict[str, Any]:
        """The fields that name the suite's end in messages."""
        return {"gid": self.rnic.gid, "mac": self.rnic.mac, "qp_number": self.qp.qp_num}

    @property
    def ended(self) -> str:
        return f"link {self.number} has failed ({self.failed})" if self.failed else ""

    def connect(self, peer: Ends) -> None:
        """Connect the queue pair; it can receive then.  Raises RnicError."""
        self.peer = peer
        self.qp.to_rtr(
            gid=peer.gid, qp_num=peer.qp_number, psn=peer.psn,
            mtu=max(1, min(self.rnic.mtu, peer.mtu)),
        )  # fmt: skip
        self.device.wake()

    def ready(self) -> None:
        """Let the queue pair send.  Raises RnicError."""
        self.qp.to_rts(psn=self.psn)
        self.device.wake()

    def send(self, raw: bytes) -> None:
        """Send a message.

        Raises QueueFull: a check that sends many messages waits for room before (`Peer.room`).
        """
        self.group.trace.message(self, True, raw)
        self.device.wake()
        try:
            self.qp.post_send(1, raw)
        except QueueFull:
            raise
        except RnicError:  # `failed` shows why
            return
        self.posted += 1

    def send_llc(self, layout: Layout, tail: bytes = b"", /, **values: int | bytes) -> bytes:
        """Send an LLC message with these values (`Group.pack_llc`); returns its bytes."""
        raw = self.group.pack_llc(layout, tail, **values)
        self.send(raw)
        return raw

    def write(self, data: bytes, address: int, rkey: int) -> None:
        """Write into the memory of the implementation.  Raises QueueFull, as `send` does."""
        self.group.trace.write(self, address, rkey, data)
        self.device.wake()
        try:
            self.qp.post_write(2, memoryview(data), None, address, rkey, signaled=True)
        except QueueFull:
            raise
        except RnicError:
            return
        self.posted += 1

    @contextlib.contextmanager
    def new_region(self) -> Iterator[Region]:
        """Another RMB, registered for this link only, which its peer does not know yet."""
        memory = self.rnic.alloc_memory(ELEMENT_SIZE)
        self.group.spare.append(memory)
        with self.register(memory) as region:
            yield region

    @contextlib.contextmanager
    def register(self, memory: Memory) -> Iterator[Region]:
        """Memory that is registered for another link, registered for this one as well."""
        region = self.pd.register(memory)
        self.device.wake()
        try:
            yield Region(region.rkey, region.address, memory)
        finally:
            region.close()
            self.device.wake()

    def fail(self) -> None:
        """Let the queue pair fail, as if the RNIC had been lost."""
        self.group.trace.note("the suite lets the queue pair fail", channel=f"link {self.number}")
        self.failed = self.failed or "failed by the suite"
        self.qp.to_err()
        self.device.wake()

    def close(self) -> None:
        """Free everything.  Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.device.detach(self.qp)
        self.qp.close()
        self.region.close()
        self.pd.close()

    def _on_completion(self, completion: Completion) -> None:
        if completion.status:
            if not self.failed:
                self.failed = WcStatus(completion.status).name
                self.group.trace.note(
                    f"the queue pair has failed: {self.failed}", channel=f"link {self.number}"
                )
        elif completion.opcode == WcOpcode.RECV:
            with contextlib.suppress(RnicError):
                self.qp.post_receive(1)
            raw = completion.data or b""
            self.group.trace.message(self, False, raw)
            self.group.receive(self, read(raw))
        else:
            self.completed += 1
        self.group.waits.changed()


class Group:
    """A link group of the suite with the implementation under test.

    Attributes:
      peer_id: the suite's peer ID in this group.
      links: by number.
      memory: the RMB.
      auto: layouts of requests that the suite answers by itself; a check may remove some.
      eye_catcher: elements have the RFC's eye catcher (4.2).
      connections: by the suite's alert token.
      strays: CDC messages with a token that no connection has.
      version: of SMC-R.
      terms: the values that both sides agree on in version 2, by the names of the fields: "eid",
        "release", "max_connections", "max_links", "direct".
      spare: memory to be freed with the group.
    """

    def __init__(
        self, device: Device, trace: Trace, waits: Waits, *, eye_catcher: bool,
        peer_id: bytes, version: int = 1,
    ) -> None:  # fmt: skip
        self.device = device
        self.trace = trace
        self.waits = waits
        self.version = version
        self.terms: dict[str, Any] = {}
        self.announces_eye_catcher = eye_catcher
        self.eye_catcher = eye_catcher
        self.peer_id = peer_id
        self.memory = device.rnic.alloc_memory(ELEMENT_SIZE * ELEMENTS)
        # The first contact handles ADD LINK, and adds it here at its end.
        self.auto: set[Layout] = {
            TEST_LINK, CONFIRM_RKEY, CONFIRM_RKEY_CONTINUATION, DELETE_RKEY, DELETE_LINK,
        }  # fmt: skip
        self.links: dict[int, Link] = {}
        self.connections: dict[int, LinkUser] = {}
        self.strays: list[Message] = []
        # RTokens of the implementation's RMBs: by the RKey on one link, those on all.
        self.peer_tokens: list[dict[int, tuple[int, int]]] = []
        self.spare: list[Memory] = []
        self._used = 0
        self._closed = False

    @property
    def link(self) -> Link:
        """The first link that works."""
        return next((each for each in self.links.values() if not each.failed), self.first)

    @property
    def first(self) -> Link:
        """The first link of the group."""
        return next(iter(self.links.values()))

    def new_link(self, device: Device | None = None, number: int = 1) -> Link:
        """Make the suite's end of a link."""
        link = Link(self, device or self.device)
        link.number = number
        self.links[number] = link
        return link

    def renumber(self, link: Link, number: int) -> None:
        """The server has assigned another number to the first link."""
        del self.links[link.number]
        for known in self.peer_tokens:
            known[number] = known.pop(link.number)
        link.number = number
        self.links[number] = link

    def tokens_of(self, rkey: int, address: int) -> dict[int, tuple[int, int]]:
        """The RTokens of one of the implementation's RMBs, by link number.

        The dictionary stays the same, so that a link that is added later is known to all
        connections.
        """
        for known in self.peer_tokens:
            if (rkey, address) in known.values():
                return known
        self.peer_tokens.append({self.link.number: (rkey, address)})
        return self.peer_tokens[-1]

    def learn_pairs(self, old: Link, new: Link, message: Message) -> None:
        """Note the implementation's RTokens on a new link, from ADD LINK CONTINUATION, or from ADD
        LINK in version 2."""
        if message.layout is ADD_LINK:
            pairs = pairs_of(message)
        else:
            pairs = [
                tuple(getattr(message, name + last) for name in _PAIR)
                for last in ("", "_2")[: message.tokens_left]
            ]
        for reference, rkey, address in pairs:
            for known in self.peer_tokens:
                if known.get(old.number, (0, 0))[0] == reference:
                    known[new.number] = rkey, address

    def _learn_rmb(self, link: Link, message: Message) -> None:
        """Note the implementation's RTokens of an RMB that CONFIRM RKEY announces."""
        tokens = {link.number: (message.rkey, message.address)}
        for place in range(1, 1 + min(message.other_tokens, 2)):
            number, *token = (getattr(message, f"{name}_{place}") for name in _CONFIRMED)
            tokens[number] = (token[0], token[1])
        self.peer_tokens.append(tokens)

    def take_element(self) -> int:
        """The index of an element that no connection has used."""
        self._used += 1
        if self._used > ELEMENTS:
            raise RuntimeError(f"a check may open {ELEMENTS} connections in a group")
        if self.announces_eye_catcher:
            start = (self._used - 1) * ELEMENT_SIZE
            self.memory.view[start : start + 4] = EYE_CATCHER
        return self._used

    def receive(self, link: Link, message: Message) -> None:
        """Sort a received message: to its connection, to an automatic answer, or to the inbox."""
        if message.raw[:1] == b"\xfe":
            connection = self.connections.get(message.alert_token)
            if connection is None:
                self.strays.append(message)
            else:
                connection.receive(link, message)
            return
        layout = message.layout
        if layout is CONFIRM_RKEY and not message.reply:
            self._learn_rmb(link, message)
        if layout is not None and layout in self.auto and not message.reply:
            link.answered.append(message)
            self._answer(link, message)
        else:
            link.inbox.append(message)

    def _answer(self, link: Link, message: Message) -> None:
        """Answer a request as a peer does that has nothing against it, and no second RNIC."""
        if message.layout is ADD_LINK:
            link.send(self.rejection(link, message))
        elif message.layout is REQUEST_ADD_LINK:
            link.send_llc(REQUEST_ADD_LINK, reply=1)
        else:
            link.send(with_bytes(message.raw, 3, bytes((message.raw[3] | _REPLY,))))

    def rejection(self, link: Link, offer: Message, **values: int | bytes) -> bytes:
        """The rejection of ADD LINK; it has no reason in version 2."""
        fields: dict[str, Any] = {
            "reply": 1, "rejected": 1, "mac": link.rnic.mac, "gid": link.rnic.gid,
            "link_number": offer.link_number,
        }  # fmt: skip
        if self.version == 1:
            fields["reason"] = 1
        return self.pack_short(ADD_LINK, **{**fields, **values})

    def pack_llc(self, layout: Layout, tail: bytes = b"", /, **values: int | bytes) -> bytes:
        """An LLC message in the version of the group.

        Args:
          tail: RTokens, GIDs or RKeys behind the last field, in version 2.
        """
        if self.version == 1:
            return pack(layout, **values)
        found = V2[layout]
        return pack(found, **{"length": found.size + len(tail), **values}) + tail

    def pack_short(self, layout: Layout, **values: int | bytes) -> bytes:
        """The same with 44 bytes, which ADD LINK has in version 2 if it lists no RToken."""
        return self.pack_llc(layout, **{"length": _SHORTEST, **values})[:_SHORTEST]

    def add_link(self, old: Link, new: Link, **values: int | bytes) -> bytes:
        """ADD LINK for a link of this group, or the reply that accepts it.

        In version 2 it lists the RToken of the suite's RMB.
        """
        fields: dict[str, Any] = {
            **new.own, "link_number": new.number, "qp_mtu": new.rnic.mtu, "psn": new.psn, **values,
        }  # fmt: skip
        if self.version == 1:
            return self.pack_llc(ADD_LINK, **fields)
        extension = {"direct": 1, "target_gid": new.rnic.gid, "token_count": 1}
        return self.pack_llc(ADD_LINK, own_pair(old, new), **{**extension, **fields})

    def confirm_link(self, link: Link, **values: int | bytes) -> bytes:
        """CONFIRM LINK for a link of this group."""
        return self.pack_llc(CONFIRM_LINK, **{**self.confirm_link_fields(link), **values})

    def confirm_link_fields(self, link: Link) -> dict[str, Any]:
        """The fields of CONFIRM LINK, from the suite."""
        limits = {"max_links": self.terms.get("max_links") or 2}
        if self.version > 1:
            limits["max_connections"] = self.terms["max_connections"]
        return {
            **link.own,
            "no_eye_catcher": 0 if self.announces_eye_catcher else 3,
            "link_number": link.number,
            "link_user_id": 0x434F4E46,
            **limits,
        }

    def close(self) -> None:
        """End the group, and free everything.  Idempotent."""
        if self._closed:
            return
        self._closed = True
        for link in self.links.values():
            if not link.failed and link.peer is not None:
                # A RoCE port does not notice at once that a queue pair has ended.  Over one link:
                # Linux may crash by a message on a link that another message has just ended.
                with contextlib.suppress(QueueFull):
                    link.send_llc(DELETE_LINK, all_links=1, orderly=1, reason=0x00030000)
                break
        for link in self.links.values():
            link.close()
        for memory in (self.memory, *self.spare):
            memory.close()


def own_pair(old: Link, new: Link) -> bytes:
    """The RToken of the suite's RMB on a new link, as ADD LINK of version 2 lists it."""
    return rtoken_pair(old.region.rkey, new.region.rkey, new.region.address)
