"""RKeys of a link group: what each side tells the other of its RMBs (RFC 7609, 3.5.5.2).

Theory of operation
-------------------
An RMB has one RToken per link.  Four exchanges keep both sides' tables alike: CONFIRM RKEY tells
a new RMB's RTokens on all links, DELETE RKEY takes RMBs back, the ADD LINK CONTINUATIONs of a new
link pair what is known on an existing link with what is new (`pairs_for`,
`learn_pairs_untrusted`), and the loss of a link takes its RTokens with it (`forget_link`).

CONFIRM RKEY has room for three links.  For more, CONTINUATIONs follow on the same link (A.3.6),
all sent at once; each message is echoed by itself, and the exchange is over with the last echo.
The peer's are put together link by link (`_Parts`): in order, counted, and no longer than the
byte that counts them allows.  What is out of order is a protocol error; what cannot be used gets
a negative reply.  Both messages and replies are made when their turn comes, so that they
name the links there are by then.

When an exchange may run is decided in `exchanges`; which RMBs there are in `own_rmbs`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from trio_smc._base.errors import ProtocolError
from trio_smc.rendezvous import llc
from trio_smc.rendezvous.rkey_request import RkeyRequest
from trio_smc.rendezvous.rtokens import RToken

if TYPE_CHECKING:
    from trio_smc.datapath.rmb import Rmb
    from trio_smc.rendezvous.link import Link
    from trio_smc.rendezvous.link_group import LinkGroup

__all__ = ["MAX_DELETED", "PeerRequest", "Rkeys", "confirm_rkey_messages"]

LOGGER = logging.getLogger("trio_smc.link_group")

MAX_DELETED: Final = 8
"""RMBs that one DELETE RKEY names (RFC 7609, A.3.7)."""

_IN_FIRST: Final = 2
_IN_CONTINUATION: Final = 3

RkeyMessage: TypeAlias = llc.ConfirmRkey | llc.ConfirmRkeyContinuation | llc.DeleteRkey


def confirm_rkey_messages(tokens: dict[int, RToken], number: int) -> list[llc.Message]:
    """CONFIRM RKEY and its CONTINUATIONs (RFC 7609, A.3.5, A.3.6).

    Parameters:
      tokens: an RMB's RTokens by link number.
      number: the link that the messages will travel on; one of ``tokens``.
    """
    here = tokens[number]
    others = tuple(
        llc.LinkRToken(link_number=each, rkey=token.rkey, address=token.address)
        for each, token in tokens.items()
        if each != number
    )
    first = llc.ConfirmRkey(
        other_tokens=len(others), rkey=here.rkey, address=here.address, others=others[:_IN_FIRST]
    )
    messages: list[llc.Message] = [first]
    rest = others[_IN_FIRST:]
    while rest:
        messages.append(
            llc.ConfirmRkeyContinuation(tokens_left=len(rest), others=rest[:_IN_CONTINUATION])
        )
        rest = rest[_IN_CONTINUATION:]
    return messages


class _Parts:
    """A CONFIRM RKEY of the peer, as far as it has come.

    Attributes:
      tokens: by link number.
      left: how many RTokens are still to come.
      refused: whether a part of it got a negative reply; what follows gets one, too.
    """

    __slots__ = ("left", "refused", "tokens")

    def __init__(self, number: int, message: llc.ConfirmRkey) -> None:
        self.tokens = {number: RToken(message.rkey, message.address)}
        self.left = message.other_tokens
        self.refused = False

    def add_untrusted(self, others: Iterable[llc.LinkRToken]) -> None:
        """Take what one message brings.  Raises ProtocolError when it names a link again."""
        for other in others:
            if other.link_number in self.tokens:
                raise ProtocolError(f"two RKeys for link {other.link_number}")
            self.tokens[other.link_number] = RToken(other.rkey, other.address)
            self.left -= 1


class PeerRequest(NamedTuple):
    """An RKey message of the peer, to be answered when its turn comes.

    Fields:
      link: where it came, and where the answer goes.
      message: CONFIRM RKEY, its CONTINUATION, or DELETE RKEY.
      parts: what it belongs to; None for DELETE RKEY.
      last: whether no further part follows.
    """

    link: Link
    message: RkeyMessage
    parts: _Parts | None
    last: bool


class Rkeys:
    """What one link group tells and is told of RKeys."""

    def __init__(self, group: LinkGroup) -> None:
        self._group = group
        # By link number; at most one on each link.
        self._parts: dict[int, _Parts] = {}

    # --- links come and go --------------------------------------------------------------------

    def register_on(self, link: Link) -> None:
        """Register all RMBs of this side, and those still to come, on a new link.

        Raises RnicError; then none is registered there.
        """
        self._group.own_rmbs.register_on(link)

    def forget_link(self, number: int) -> None:
        """A link is gone, or was not added: close its registrations, forget its RTokens.

        To be called before the link's protection domain is closed.  Idempotent.
        """
        self._parts.pop(number, None)
        self._group.own_rmbs.forget_link(number)
        self._group.peer_rmbs.forget_link(number)

    def renumber(self, old: int, new: int) -> None:
        """The first link got its number from the server (3.5.1.5)."""
        self._group.own_rmbs.renumber(old, new)
        self._group.peer_rmbs.renumber(old, new)

    def pairs_for(self, old: Link, new: Link) -> list[llc.RTokenPair]:
        """What ADD LINK CONTINUATION tells: every RMB of ours that the peer knows on ``old``."""
        own = self._group.own_rmbs
        pairs = []
        for rmb in own.known_to_peer():
            tokens = own.tokens(rmb)
            token = tokens[new.number]
            pairs.append(
                llc.RTokenPair(
                    reference_rkey=tokens[old.number].rkey,
                    new_rkey=token.rkey,
                    new_address=token.address,
                )
            )
        return pairs

    def learn_pairs_untrusted(self, old: Link, new: Link, pairs: Sequence[llc.RTokenPair]) -> None:
        """Note the peer's RTokens on ``new``; `forget_link` drops them when it is not added.

        A pair for an unknown RMB is ignored: our reply to its DELETE RKEY may be on its way over
        another link.

        Raises:
          ProtocolError: a pair contradicts what is known.
        """
        peer = self._group.peer_rmbs
        for pair in pairs:
            rmb = peer.find(old.number, pair.reference_rkey)
            if rmb is None:
                LOGGER.info("%r: RKey %#x names no RMB", old, pair.reference_rkey)
                continue
            peer.add_token_untrusted(rmb, new.number, RToken(pair.new_rkey, pair.new_address))

    def covers(self, link: Link) -> bool:
        """Whether every RMB of the peer that a connection writes into is known on ``link``."""
        return self._group.peer_rmbs.covers(link.number)

    # --- our RMBs -----------------------------------------------------------------------------

    def confirm(self, rmb: Rmb, finished: Callable[[bool], None]) -> None:
        """Tell the peer of a new RMB on all links (3.5.5.2.1).

        ``finished`` is called once with whether the peer knows it, now or later.
        """
        told: set[int] = set()

        def messages(link: Link) -> list[llc.Message]:
            tokens = self._group.own_rmbs.tokens(rmb)
            told.clear()
            told.update([link.number, *self._carrying()])
            return confirm_rkey_messages({each: tokens[each] for each in told}, link.number)

        def answered(agreed: bool) -> None:
            # A link that came up while the reply was on its way over another one.
            if agreed and not told.issuperset(self._carrying()):
                self.confirm(rmb, finished)
            else:
                finished(agreed)

        self._group.exchanges.change_rkeys(RkeyRequest(messages, answered))

    def delete(self, rmbs: Sequence[Rmb], finished: Callable[[bool], None]) -> None:
        """Take back up to eight RMBs that nobody uses (3.5.5.2.2).

        ``finished`` is called once with whether the peer replied: a negative reply, from a peer
        that knew an RMB no more, is as good as another and only logged (A.3.7).
        """

        def messages(link: Link) -> list[llc.Message]:
            own = self._group.own_rmbs
            return [llc.DeleteRkey(rkeys=tuple(own.tokens(rmb)[link.number].rkey for rmb in rmbs))]

        self._group.exchanges.change_rkeys(RkeyRequest(messages, finished))

    def _carrying(self) -> list[int]:
        """Numbers of the links that an RMB must be known on."""
        links = self._group.links.items()
        return [number for number, link in links if link.state in ("ACTIVE", "TESTING")]

    # --- RMBs of the peer -----------------------------------------------------------------------

    def on_request_untrusted(self, link: Link, message: RkeyMessage) -> None:
        """CONFIRM RKEY, its CONTINUATION, or DELETE RKEY from the peer.

        Raises:
          ProtocolError: a CONTINUATION is missing, out of order, or names a link twice.
        """
        if isinstance(message, llc.DeleteRkey):
            self._group.exchanges.on_request(PeerRequest(link, message, None, last=True))
            return
        parts = self._parts.get(link.number)
        if isinstance(message, llc.ConfirmRkey):
            if parts is not None and not parts.refused:
                raise ProtocolError("CONFIRM RKEY before the last one was complete")
            parts = self._parts[link.number] = _Parts(link.number, message)
        elif parts is None or message.tokens_left != parts.left:
            raise ProtocolError("CONFIRM RKEY CONTINUATION out of order")
        parts.add_untrusted(message.others)
        last = not parts.left
        self._group.exchanges.on_request(PeerRequest(link, message, parts, last))
        if last:
            self._parts.pop(link.number, None)

    def answer(self, request: PeerRequest) -> None:
        """Take over what the peer says, and echo it."""
        link, message, parts, last = request
        if isinstance(message, llc.DeleteRkey):
            mask = self._forget_rkeys(link, message.rkeys)
            link.send_llc(
                dataclasses.replace(message, reply=True, negative=mask != 0, error_mask=mask)
            )
        elif parts is not None:
            if last and not parts.refused:
                parts.refused = not self._learn(link, parts.tokens)
            link.send_llc(dataclasses.replace(message, reply=True, negative=parts.refused))
            if last and not parts.refused:
                self._fail_links_without_rkey(parts.tokens)

    def refuse(self, request: PeerRequest) -> None:
        """Links are changing: the peer is to try again when they have (3.5.5.3.1, 3.5.5.3.2)."""
        message = request.message
        if request.parts is not None:
            request.parts.refused = True
        if isinstance(message, llc.ConfirmRkey):
            reply: llc.Message = dataclasses.replace(message, reply=True, negative=True, retry=True)
        else:
            reply = dataclasses.replace(message, reply=True, negative=True)
        request.link.send_llc(reply)

    def _learn(self, link: Link, tokens: dict[int, RToken]) -> bool:
        known = {number: token for number, token in tokens.items() if number in self._group.links}
        try:
            self._group.peer_rmbs.learn_untrusted(known)
        except ProtocolError as error:
            LOGGER.warning("%r: CONFIRM RKEY: %s", link, error)
            return False
        return True

    def _fail_links_without_rkey(self, tokens: dict[int, RToken]) -> None:
        """C.7.1: a link for which the peer gives no RKey has failed there."""
        for number in self._carrying():
            if number not in tokens and number in self._group.links:
                link = self._group.links[number]
                LOGGER.info("%r: the peer's new RMB has no RKey there", link)
                link.machine.send("failed")

    def _forget_rkeys(self, link: Link, rkeys: tuple[int, ...]) -> int:
        mask = 0
        for position, rkey in enumerate(rkeys):
            rmb = self._group.peer_rmbs.find(link.number, rkey)
            if rmb is None:
                mask |= 0x80 >> position
                continue
            self._group.peer_rmbs.forget(rmb)
            for user in list(rmb.elements.values()):
                user.rmbe_conflict()  # nothing may be written there again
        return mask
