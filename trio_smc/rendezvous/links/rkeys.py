"""RKeys of a link group: each side announces its RMBs to the other (RFC 7609, 3.5.5.2).

Theory of operation
-------------------
An RMB has one RToken per link. Four events keep the tables of both sides equal: CONFIRM RKEY
announces a new RMB's RTokens on all links; DELETE RKEY deletes RMBs; the ADD LINK CONTINUATIONs of
a new link pair the known RTokens on an existing link with the new ones (`pairs_for`,
`learn_pairs_untrusted`); and the loss of a link removes its RTokens (`drop_link`).

CONFIRM RKEY has room for three links. For more links, CONTINUATIONs follow on the same link
(A.3.6), all sent at once. The receiver echoes each message, and the exchange ends with the last
echo. The parts of a message of the peer are collected for each link (`_Parts`). They must come in
order, and their counter has one byte, which limits their number. A part out of order is a protocol
error; RTokens that cannot be used get a negative reply. Messages and replies are made when they are
sent, so that they name the links of that moment.

`Rkeys` makes and reads all these messages. In `RkeyExchanges` the requests of both sides wait for
their turn, which `exchanges` decides. `own_rmbs` decides when RMBs are added and deleted.

A request of this side starts again, with the links of that moment, if its link failed, if the reply
requires this, and if it crossed an ADD LINK or DELETE LINK of the server (3.5.5.3.3). In the last
case the request stays `_current` until its reply has arrived.

Requests of the peer are answered at once if the state permits. While links change, a CONFIRM RKEY
is refused with "retry" (3.5.5.3.1), and a DELETE RKEY is answered after the change.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from trio_smc._base.errors import ProtocolError
from trio_smc.rendezvous.links.own_rmbs import PeerKnowledge
from trio_smc.rendezvous.links.peer_rmbs import RToken
from trio_smc.wire import llc

if TYPE_CHECKING:
    from trio_smc._base.timers import Timer
    from trio_smc.datapath.rmb import Rmb
    from trio_smc.rendezvous.links.context import Exchange, Group
    from trio_smc.rendezvous.links.link import Link
    from trio_smc.rendezvous.links.own_rmbs import OwnRmbs

__all__ = [
    "PeerRequest",
    "RkeyExchanges",
    "RkeyMessage",
    "RkeyRequest",
    "Rkeys",
    "confirm_rkey_messages",
]


LOGGER = logging.getLogger("trio_smc.link_group")
_LLC_LOGGER = logging.getLogger("trio_smc.llc")

_MAX_QUEUED: Final = 512
"""Requests of this side that wait: twice the largest number of RMBs. Chosen."""
_MAX_DEFERRED: Final = 16
"""Requests of the peer that wait for the end of a change of links. Chosen: peers wait for a reply
before the next request."""
_RETRIES: Final = 3
"""Further tries of a request that the peer wants to have repeated. Chosen."""
_RETRY_DELAY: Final = 0.05
"""Seconds before the first retry; four times as long before each further one. Chosen."""

_IN_FIRST: Final = 2
"""RTokens of other links in CONFIRM RKEY (RFC 7609, A.3.5)."""
_IN_CONTINUATION: Final = 3
"""RTokens in CONFIRM RKEY CONTINUATION (A.3.6)."""

RkeyMessage: TypeAlias = llc.ConfirmRkey | llc.ConfirmRkeyContinuation | llc.DeleteRkey


def confirm_rkey_messages(tokens: dict[int, RToken], number: int) -> list[llc.Message]:
    """CONFIRM RKEY and its CONTINUATIONs (RFC 7609, A.3.5, A.3.6).

    Parameters:
      tokens: an RMB's RTokens by link number.
      number: the link that will carry the messages; one of ``tokens``.
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
    """The parts of a CONFIRM RKEY of the peer that have arrived.

    Attributes:
      tokens: the RTokens, by link number.
      left: the number of RTokens that are still to come.
      refused: True if a part got a negative reply; the following parts get one, too.
    """

    __slots__ = ("left", "refused", "tokens")

    def __init__(self, number: int, message: llc.ConfirmRkey) -> None:
        self.tokens: dict[int, RToken] = {number: RToken(message.rkey, message.address)}
        self.left: int = message.other_tokens
        self.refused: bool = False

    def add_untrusted(self, others: Iterable[llc.LinkRToken]) -> None:
        """Add the RTokens of one message.  Raises ProtocolError if a link is named twice."""
        for other in others:
            if other.link_number in self.tokens:
                raise ProtocolError(f"two RKeys for link {other.link_number}")
            self.tokens[other.link_number] = RToken(other.rkey, other.address)
            self.left -= 1


class PeerRequest(NamedTuple):
    """An RKey message of the peer, to be answered when its turn comes.

    Fields:
      link: the link of the message and of its answer.
      message: CONFIRM RKEY, its CONTINUATION, or DELETE RKEY.
      parts: all parts so far; None for DELETE RKEY.
      last: True if no further part follows.
    """

    link: Link
    message: RkeyMessage
    parts: _Parts | None
    last: bool


class Rkeys:
    """Makes and reads the RKey messages of one link group."""

    def __init__(self, group: Group, own: OwnRmbs) -> None:
        self._group = group
        self._own = own
        # By link number: a CONFIRM RKEY of the peer that is not complete, at most one on each link.
        self._parts: dict[int, _Parts] = {}

    @property
    def awaits_continuation(self) -> bool:
        """True if RTokens of an RMB of the peer are still to come, in a continuation (A.3.6)."""
        return bool(self._parts)

    # --- links come and go --------------------------------------------------------------------

    def register_on(self, link: Link) -> None:
        """Register all RMBs of this side on a new link; future RMBs are registered there, too.

        Raises RnicError; then no RMB is registered on the link.
        """
        self._own.register_on(link)

    def drop_link(self, number: int) -> None:
        """Close the registrations and drop the RTokens of a link that is removed or not added.

        To be called before the link's protection domain is closed.  Idempotent.
        """
        self._parts.pop(number, None)
        self._own.drop_link(number)
        self._group.peer_rmbs.drop_link(number)

    def renumber(self, old: int, new: int) -> None:
        """The server has assigned a number to the first link (3.5.1.5)."""
        self._own.renumber(old, new)
        self._group.peer_rmbs.renumber(old, new)

    def pairs_for(self, old: Link, new: Link) -> list[llc.RTokenPair]:
        """The pairs for ADD LINK CONTINUATION: this side's RMBs that the peer knows on ``old``."""
        own = self._own
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
        """Note the peer's RTokens on ``new``; `drop_link` drops them if the link is not added.

        A pair for an unknown RMB is ignored: the reply to a DELETE RKEY for it may be in flight on
        another link.

        Raises:
          ProtocolError: a pair contradicts known RTokens.
        """
        peer, unknown = self._group.peer_rmbs, 0
        for pair in pairs:
            rmb = peer.find(old.number, pair.reference_rkey)
            if rmb is None:
                unknown += 1
                continue
            peer.add_token_untrusted(rmb, new.number, RToken(pair.new_rkey, pair.new_address))
        if unknown:  # one line of the log for all pairs of a message
            LOGGER.info("%r: %d RKeys for another link name no RMB", old, unknown)

    def covers(self, link: Link) -> bool:
        """True if every RMB of the peer that a connection writes into is known on ``link``.

        At first contact the RMB of the CLC message counts, too: its connection has yet to take its
        element (3.5.1.6.3).
        """
        return self._group.peer_rmbs.covers(link.number, unused=self._group.forming)

    # --- RMBs of this side ----------------------------------------------------------------------

    def confirmation(self, rmb: Rmb, numbers: Iterable[int], link: Link) -> list[llc.Message]:
        """The messages that announce an RMB on the links of these numbers, sent over ``link``."""
        tokens = self._own.tokens(rmb)
        return confirm_rkey_messages({each: tokens[each] for each in numbers}, link.number)

    def deletion(self, rmbs: Sequence[Rmb], link: Link) -> list[llc.Message]:
        """The messages that delete RMBs, sent over ``link``."""
        own = self._own
        return [llc.DeleteRkey(rkeys=tuple(own.tokens(rmb)[link.number].rkey for rmb in rmbs))]

    def carrying(self) -> list[int]:
        """Numbers of the links on which the peer must know an RMB: connections use them."""
        links = self._group.links.items()
        return [number for number, link in links if link.state in ("ACTIVE", "TESTING")]

    # --- RMBs of the peer -----------------------------------------------------------------------

    def request_untrusted(self, link: Link, message: RkeyMessage) -> PeerRequest:
        """Read a CONFIRM RKEY, its CONTINUATION, or a DELETE RKEY.

        Raises:
          ProtocolError: a part is missing, is out of order, or names a link twice.
        """
        if isinstance(message, llc.DeleteRkey):
            return PeerRequest(link, message, None, last=True)
        parts = self._parts.get(link.number)
        if isinstance(message, llc.ConfirmRkey):
            if parts is not None and not parts.refused:
                raise ProtocolError("CONFIRM RKEY before the last one was complete")
            parts = self._parts[link.number] = _Parts(link.number, message)
        elif parts is None or message.tokens_left != parts.left:
            raise ProtocolError("CONFIRM RKEY CONTINUATION out of order")
        parts.add_untrusted(message.others)
        if not parts.left:
            del self._parts[link.number]
        return PeerRequest(link, message, parts, last=not parts.left)

    def answer(self, request: PeerRequest) -> None:
        """Apply the peer's request and echo it."""
        link, message, parts, last = request
        if isinstance(message, llc.DeleteRkey):
            unknown = self._remove_rmbs(link, message.rkeys)
            mask = sum(0x80 >> place for place in unknown)
            link.send_llc(
                dataclasses.replace(
                    message, reply=True, negative=bool(unknown), error_mask=mask,
                    unknown=len(unknown),
                )
            )  # fmt: skip
        elif parts is not None:
            if last and not parts.refused:
                parts.refused = not self._learn(link, parts.tokens)
            link.send_llc(dataclasses.replace(message, reply=True, negative=parts.refused))
            if last and not parts.refused:
                self._fail_links_without_rkey(parts.tokens)

    def refuse(self, request: PeerRequest) -> None:
        """Refuse a request while links change; the peer tries again (3.5.5.3.1, 3.5.5.3.2)."""
        message = request.message
        if request.parts is not None:
            request.parts.refused = True
        if isinstance(message, llc.ConfirmRkey):
            reply: llc.Message = dataclasses.replace(message, reply=True, negative=True, retry=True)
        else:
            reply = dataclasses.replace(message, reply=True, negative=True)
        request.link.send_llc(reply)

    def _learn(self, link: Link, tokens: dict[int, RToken]) -> bool:
        links = self._group.links
        known = {number: token for number, token in tokens.items() if number in links}
        for number, token in known.items():
            if not links[number].qp.can_reach(token.rkey):
                LOGGER.warning("%r: CONFIRM RKEY: no resources to reach the RMB", link)
                return False
        try:
            self._group.peer_rmbs.learn_untrusted(known)
        except ProtocolError as error:
            LOGGER.warning("%r: CONFIRM RKEY: %s", link, error)
            return False
        return True

    def _fail_links_without_rkey(self, tokens: dict[int, RToken]) -> None:
        """Fail the links for which the peer sent no RKey: they have failed there (C.7.1)."""
        for number in self.carrying():
            if number not in tokens and number in self._group.links:
                link = self._group.links[number]
                LOGGER.info("%r: the peer's new RMB has no RKey there", link)
                link.machine.send("failed")

    def _remove_rmbs(self, link: Link, rkeys: tuple[int, ...]) -> list[int]:
        """Remove RMBs of the peer; return the places of the RKeys that are unknown."""
        unknown = []
        for position, rkey in enumerate(rkeys):
            rmb = self._group.peer_rmbs.find(link.number, rkey)
            if rmb is None:
                unknown.append(position)
                continue
            self._group.peer_rmbs.remove(rmb)
            for user in list(rmb.elements.values()):
                user.rmbe_conflict()  # nothing may be written there again
        return unknown


@dataclass(slots=True, eq=False)
class RkeyRequest:
    """A request of this side: CONFIRM RKEY with its CONTINUATIONs, or DELETE RKEY.

    Attributes:
      messages: makes the messages, when they are sent, for the link that will carry them.
      finished: called once, with True if the peer agreed.
      over: the link that is to carry the messages, if it is still usable.
      tries: the number of retries so far.
      in_doubt: True if the request was sent and had no reply: the peer may have accepted it, even
        if it refuses a repetition.
    """

    messages: Callable[[Link], list[llc.Message]]
    finished: Callable[[bool], None]
    over: Link | None = None
    tries: int = 0
    in_doubt: bool = False
    _awaited: deque[type[llc.Message]] = field(default_factory=deque)
    _negative: bool = False
    _retry: bool = False

    def send(self, link: Link) -> None:
        """Send all messages; the peer echoes each of them (A.3.5, A.3.6)."""
        messages = self.messages(link)
        self._awaited = deque(map(type, messages))
        self._negative = self._retry = False
        for message in messages:
            link.send_llc(message)

    def on_echo_untrusted(self, echo: RkeyMessage) -> bool:
        """Process an echo; True if it was the last.  Raises ProtocolError if none is expected."""
        if not self._awaited or type(echo) is not self._awaited.popleft():
            raise ProtocolError(f"{type(echo).__name__} reply without a request")
        if isinstance(echo, llc.DeleteRkey):
            if echo.negative:  # only logged (A.3.7)
                _LLC_LOGGER.info(
                    "the peer did not know all RKeys: mask %#04x, or %d in version 2",
                    echo.error_mask, echo.unknown,
                )  # fmt: skip
        elif echo.negative and not self._negative:
            self._negative = True
            # Only CONFIRM RKEY has the C bit; a CONTINUATION is refused during a change (3.5.5.3).
            self._retry = not isinstance(echo, llc.ConfirmRkey) or echo.retry
        return not self._awaited

    @property
    def agreed(self) -> bool:
        """True if no echo was negative."""
        return not self._negative

    def next_delay(self) -> float:
        """Count a retry; return the seconds until it, which are more each time."""
        self.tries += 1
        return _RETRY_DELAY * float(4 ** (self.tries - 1))

    @property
    def to_be_retried(self) -> bool:
        """True if the peer wants a repetition after its configuration change."""
        return self._negative and self._retry and self.tries < _RETRIES


class RkeyExchanges:
    """The requests of both sides, each at its turn: the RKey actions of `states.llc_exchange`."""

    def __init__(self, group: Group, exchange: Exchange, rkeys: Rkeys) -> None:
        self._group = group
        self._exchange = exchange
        self._rkeys = rkeys
        self._queue: deque[RkeyRequest] = deque()
        self._current: RkeyRequest | None = None
        self._rkeys_link: Link | None = None
        self._rkeys_timer: Timer | None = None
        # More than one if they arrive while the machine runs an action: their events wait, too.
        self._peer_requests: deque[PeerRequest] = deque()
        self._deferred: deque[PeerRequest] = deque()
        self._retries: dict[RkeyRequest, Timer] = {}

    @property
    def request(self) -> RkeyRequest | None:
        """This side's request that awaits its reply."""
        return self._current

    @property
    def carrier(self) -> Link | None:
        """The link of `request` and of its reply; None between requests."""
        return self._rkeys_link

    # --- requests of this side ------------------------------------------------------------

    def confirm(
        self, rmb: Rmb, finished: Callable[[PeerKnowledge], None], over: Link | None = None
    ) -> None:
        """Announce a new RMB to the peer on all links (3.5.5.2.1).

        Args:
          finished: called once with the outcome, now or later.
          over: the link of the first connection that uses the RMB; it carries the message (A.3.5).
        """
        self._confirm(rmb, finished, over, in_doubt=False)

    def _confirm(
        self,
        rmb: Rmb,
        finished: Callable[[PeerKnowledge], None],
        over: Link | None,
        *,
        in_doubt: bool,
    ) -> None:
        rkeys = self._rkeys
        confirmed_on: set[int] = set()

        def messages(link: Link) -> list[llc.Message]:
            confirmed_on.clear()
            confirmed_on.update([link.number, *rkeys.carrying()])
            return rkeys.confirmation(rmb, confirmed_on, link)

        def answered(agreed: bool) -> None:
            # Repeat if a link came up while the reply was in flight: the peer does not know the RMB
            # there.
            if agreed and not confirmed_on.issuperset(rkeys.carrying()):
                self._confirm(rmb, finished, over, in_doubt=True)
            elif agreed:
                finished(PeerKnowledge.KNOWN)
            else:
                finished(PeerKnowledge.IN_DOUBT if request.in_doubt else PeerKnowledge.REFUSED)

        request = RkeyRequest(messages, answered, over, in_doubt=in_doubt)
        self._change(request)

    def delete(self, rmbs: Sequence[Rmb], finished: Callable[[bool], None]) -> None:
        """Delete up to eight unused RMBs (3.5.5.2.2).

        ``finished`` is called once, with True if the peer replied. A negative reply (the peer did
        not know an RMB any more) counts as a reply and is only logged (A.3.7).
        """
        self._change(RkeyRequest(lambda link: self._rkeys.deletion(rmbs, link), finished))

    def _change(self, request: RkeyRequest) -> None:
        """Confirm or delete RKeys, now or after the exchange under way."""
        if self._exchange.state == "ENDED" or len(self._queue) >= _MAX_QUEUED:
            request.finished(False)
            return
        self._queue.append(request)
        self._exchange.start_queued()

    def start(self) -> bool:
        """Begin the oldest waiting request of this side, if one may begin."""
        link = self._group.links.oldest()
        if not self._queue or link is None or self._current is not None:
            return False
        request = self._current = self._queue.popleft()
        over = request.over
        self._rkeys_link = over if over is not None and over.usable else link
        self._exchange.send("change_rkeys")
        return True

    def on_reply_untrusted(self, link: Link, reply: RkeyMessage) -> None:
        """Process an echo; raises ProtocolError if this side sent no request on ``link``."""
        request = self._current
        if request is None or link is not self._rkeys_link:
            raise ProtocolError(f"{type(reply).__name__} reply without a request")
        if request.on_echo_untrusted(reply):
            self._exchange.send("rkeys_replied")

    def send(self) -> None:
        """Send the request of this side, and start the timer for its echoes."""
        if self._current is not None and self._rkeys_link is not None:
            self._current.send(self._rkeys_link)
        self.start_timer()

    def start_timer(self) -> None:
        """Limit the wait for the echoes by `Config.llc_timeout`."""
        self._rkeys_timer = self._group.timers.call_later(
            self._group.config.llc_timeout, lambda: self._exchange.send("rkeys_timeout")
        )

    @property
    def peer_lives(self) -> bool:
        """True if the peer's process exists, even if it does not run now."""
        return self._rkeys_link is not None and self._rkeys_link.peer_lives

    def stop_timer(self) -> None:
        """Stop the timer: the echoes have come, or are no longer needed."""
        if self._rkeys_timer is not None:
            self._rkeys_timer.cancel()
            self._rkeys_timer = None

    def end(self) -> None:
        """End the request: all echoes have arrived."""
        request, self._current, self._rkeys_link = self._current, None, None
        if request is None:
            return
        if request.to_be_retried:
            # 3.5.5.3.1: start again after the peer's exchange. Its end is not announced, so wait.
            self._retries[request] = self._group.timers.call_later(
                request.next_delay(), lambda: self._retry(request)
            )
            return
        request.finished(request.agreed)

    def redo(self) -> None:
        """Start the request again, whatever the replies: links have changed (3.5.5.3.3)."""
        request, self._current, self._rkeys_link = self._current, None, None
        if request is not None:
            request.in_doubt = True
            self._queue.appendleft(request)

    def fail_link(self) -> None:
        """Fail the link that carried the request, because there was no answer (C.7.1)."""
        fail_unanswered(self._rkeys_link, self._exchange.state)

    def link_lost(self, link: Link, *, begun: bool) -> bool:
        """``link`` has failed; True if it carried the request of this side.

        ``begun``: the machine handles the failure (event ``carrier_lost``), so do nothing here.
        """
        if link is not self._rkeys_link:
            return False
        if not begun:
            self.stop_timer()
            self.redo()
        return True

    def _retry(self, request: RkeyRequest) -> None:
        del self._retries[request]
        self._change(request)

    def fail_queued(self) -> None:
        """Fail all requests of this side (2.3)."""
        waiting = [self._current] if self._current is not None else []
        waiting += self._queue
        waiting += self._retries
        for timer in self._retries.values():
            timer.cancel()
        self._current = None
        self._queue.clear()
        self._retries.clear()
        self._deferred.clear()
        for request in waiting:
            request.finished(False)

    # --- requests of the peer -------------------------------------------------------------

    def on_request_untrusted(self, link: Link, message: RkeyMessage) -> None:
        """Process an RKey request of the peer.  Raises: see `Rkeys.request_untrusted`."""
        self._peer_requests.append(self._rkeys.request_untrusted(link, message))
        self._exchange.send("peer_rkeys")

    def answer_peer(self) -> None:
        """Answer the peer's RKey request."""
        self._answer(self._peer_requests.popleft())

    def answer_deferred(self) -> None:
        """Answer the deferred requests, because links have changed."""
        while self._deferred:
            self._answer(self._deferred.popleft())

    def _answer(self, request: PeerRequest) -> None:
        if request.link.state != "DOWN":
            self._rkeys.answer(request)

    def defer_peer(self) -> None:
        """Refuse or defer a request, because links are changing (3.5.5.3.1, 3.5.5.3.2)."""
        request = self._peer_requests.popleft()
        if not isinstance(request.message, llc.DeleteRkey):
            self._rkeys.refuse(request)
        elif len(self._deferred) < _MAX_DEFERRED:
            self._deferred.append(request)
        else:
            _LLC_LOGGER.warning(
                "%r: the peer does not wait for replies to DELETE RKEY", request.link
            )
            request.link.machine.send("failed")


def fail_unanswered(link: Link | None, state: str) -> None:
    """Fail ``link``, because an exchange on it was not answered."""
    if link is not None:
        _LLC_LOGGER.info("%r: an LLC request was not answered: %s", link, state)
        link.machine.send("failed")
