"""The current LLC exchange of a link group (RFC 7609, 3.5.5.3, C.7.1).

Exchanges that change the configuration of a link group run one at a time; RKey exchanges of
the two sides may overlap.  Client and server share this chart.  The carrier is the link that an
exchange uses; an exchange whose carrier fails is not repeated automatically (2.3).  The model
is `trio_smc.rendezvous.links.exchanges.Exchanges`.
"""

from __future__ import annotations

from statemachine import State

from trio_smc.states.chart import Chart, edge, ignore

__all__ = ["LlcExchangeChart"]

_LIVES = (
    "C.7.1; choice: on one host a process that stands still keeps its connections, as over TCP, "
    "and the kernel reports its end"
)


class LlcExchangeChart(Chart):
    """IDLE: a queued exchange may start.  CONFIRM_LINK: the first link is being confirmed.
    ADD_LINK: the server waits for the client's reply; at first contact the client waits for ADD
    LINK.
    ADD_LINK_CONTINUATION: RTokens are exchanged; version 2 leaves this state at once, because ADD
    LINK and its reply contain them.  ADD_LINK_CONFIRM: CONFIRM LINK on the new link.
    DELETE_LINK: connections leave a link, then it is deleted.  CHANGE_RKEYS: an RKey exchange of
    this side; an exchange of the peer is answered at once and has no state."""

    IDLE = State("IDLE", initial=True)
    CONFIRM_LINK = State("CONFIRM_LINK")
    ADD_LINK = State("ADD_LINK")
    ADD_LINK_CONTINUATION = State("ADD_LINK_CONTINUATION")
    ADD_LINK_CONFIRM = State("ADD_LINK_CONFIRM")
    DELETE_LINK = State("DELETE_LINK")
    CHANGE_RKEYS = State("CHANGE_RKEYS")
    ENDED = State("ENDED")

    _ADDING = (ADD_LINK, ADD_LINK_CONTINUATION, ADD_LINK_CONFIRM)
    _RKEYS_FIXED = (CONFIRM_LINK, *_ADDING, DELETE_LINK)
    _BUSY = (*_RKEYS_FIXED, CHANGE_RKEYS)

    # fmt: off
    # The first link.
    edge(IDLE, "confirm_link", CONFIRM_LINK, do="start_reply_timer", source="3.5.1.5")
    edge(CONFIRM_LINK, "done", IDLE, do="stop_reply_timer",
         source="3.5.1.5 (ADD LINK follows, except in version 2 with one link at most)")
    edge(CONFIRM_LINK, "timeout", IDLE, do="setup.give_up",
         source="C.7.1 (CONFIRM LINK, first link: break the TCP connection)")

    # ADD LINK: request and reply.
    edge(IDLE, "add_link", ADD_LINK, do="start_reply_timer", source="3.5.1.6, 3.5.5.1.1")
    edge(ADD_LINK, "accepted", ADD_LINK_CONTINUATION, do="start_reply_timer",
         source="3.5.1.6.1, 3.5.5.2.3")
    edge(IDLE, "accepted", ADD_LINK_CONTINUATION, when="client", do="start_reply_timer",
         source="3.5.5.1.1 (after the first contact the client does not wait for ADD LINK)")
    edge(CHANGE_RKEYS, "accepted", ADD_LINK_CONTINUATION, when="client",
         do="start_reply_timer",
         source="3.5.5.3.3 (ADD LINK crossed CONFIRM RKEY, which starts again afterwards)")
    edge(ADD_LINK, "refused", IDLE,
         do="stop_reply_timer adding.drop demand.retry_later adding.end_first_contact start_next",
         source="3.5.1.6.1, 3.5.1.6.2, C.8")
    edge(IDLE, "refused", when="client", do="adding.end_first_contact",
         source="3.5.1.6.1 (no exchange begins; at first contact the last one was superseded)")
    ignore(CHANGE_RKEYS, "refused", when="client", source="3.5.1.6.1 (no exchange begins)")
    edge(ADD_LINK, "timeout", IDLE, when="client", do="setup.give_up",
         source="C.7.1 (CONFIRM LINK reply, first contact: no ADD LINK from the server)")
    edge((*_ADDING, DELETE_LINK), "timeout", when="!forming peer_lives", do="start_reply_timer",
         source=_LIVES)
    edge(ADD_LINK, "timeout", when="!forming peer_adds_links", do="adding.give_up fail_carrier",
         source="C.7.1 (ADD LINK, not first contact: the link it was sent over has failed)")
    edge(ADD_LINK, "timeout", IDLE,
         do="adding.give_up adding.drop demand.retry_later adding.end_first_contact start_next",
         source="3.5.1.6.2, C.8 (no reply: continue with the existing links)")
    edge(ADD_LINK, "address_awaited", do="stop_reply_timer",
         source="C.7.1 (the message has arrived; the exchange continues within a second, as soon "
                "as its sender's address is known)")
    edge(ADD_LINK, "withdraw", DELETE_LINK, do="adding.drop adding.withdraw",
         source="C.7.1 (ADD LINK reply with a parallel link), 3.5.1.6.2")

    # ADD LINK CONTINUATION.
    edge(ADD_LINK_CONTINUATION, "continued", do="start_reply_timer",
         source="3.5.5.2.3, A.3.3 (version 1)")
    edge(ADD_LINK_CONTINUATION, "rkeys_exchanged", ADD_LINK_CONFIRM, do="start_reply_timer",
         source="3.5.1.6.2, A.3.3 (version 2: at once)")
    edge(ADD_LINK_CONTINUATION, "timeout", DELETE_LINK, when="forming !client",
         do="adding.drop adding.withdraw",
         source="C.7.1 (ADD LINK CONTINUATION: as ADD LINK), C.8, 3.5.1.6.2")
    edge(ADD_LINK_CONTINUATION, "timeout", IDLE, when="forming", do="setup.give_up",
         source="C.7.1 (ADD LINK CONTINUATION reply, first contact: break the TCP connection)")
    edge(ADD_LINK_CONTINUATION, "timeout", do="fail_carrier",
         source="C.7.1 (ADD LINK reply, ADD LINK CONTINUATION and its reply, not first contact: "
                "the link that the exchange is using has failed)")

    # The client rejects a link that it has agreed to, as Linux may.
    edge((ADD_LINK_CONTINUATION, ADD_LINK_CONFIRM), "refused", IDLE, when="!client",
         do="stop_reply_timer adding.drop demand.retry_failed adding.end_first_contact start_next",
         source="3.5.1.6.1, 3.5.1.6.2 (the link cannot be added: continue without), C.8")

    # CONFIRM LINK on the new link.
    edge(ADD_LINK_CONFIRM, "done", IDLE,
         do="stop_reply_timer adding.end_first_contact start_next", source="3.5.1.6.2")
    edge(ADD_LINK_CONFIRM, "timeout new_link_lost", DELETE_LINK, when="!client",
         do="adding.drop adding.withdraw", source="3.5.1.6.2, C.7.1 (CONFIRM LINK, new link)")
    edge(ADD_LINK_CONFIRM, "timeout new_link_lost", DELETE_LINK, when="forming",
         do="stop_reply_timer adding.drop adding.request_withdrawal",
         source="C.7.1 (ADD LINK reply, second link at first contact: wait for DELETE LINK)")
    edge(ADD_LINK_CONFIRM, "timeout new_link_lost", IDLE,
         do="stop_reply_timer adding.drop adding.request_withdrawal demand.retry_failed start_next",
         source="C.7.1 (ADD LINK reply, no more RKeys)")
    ignore((IDLE, ADD_LINK, ADD_LINK_CONTINUATION, DELETE_LINK), "new_link_lost",
           source="3.5.1.6.2 (noticed when CONFIRM LINK cannot be sent over it)")
    edge((ADD_LINK_CONTINUATION, ADD_LINK_CONFIRM), "superseded", IDLE, when="client",
         do="stop_reply_timer adding.drop",
         source="3.5.5.1 (a new ADD LINK: the server has given up the link being added)")
    edge((ADD_LINK, ADD_LINK_CONTINUATION), "carrier_lost", IDLE,
         do="stop_reply_timer adding.drop demand.want start_next",
         source="2.3, C.7.1 (ADD LINK: retry over another link)")
    ignore(ADD_LINK_CONFIRM, "carrier_lost", source="3.5.1.5 (CONFIRM LINK uses the new link only)")

    # DELETE LINK of one link.
    edge(IDLE, "delete_link", DELETE_LINK, do="deletion.leave", source="3.5.5.1.3")
    edge((ADD_LINK, CHANGE_RKEYS), "delete_link", DELETE_LINK, when="client",
         do="stop_reply_timer deletion.leave",
         source="3.5.5.3.3 (DELETE LINK crossed CONFIRM RKEY, which starts again afterwards)")
    edge((ADD_LINK_CONTINUATION, ADD_LINK_CONFIRM), "delete_link", DELETE_LINK, when="client",
         do="stop_reply_timer adding.drop deletion.leave",
         source="3.5.1.6.2, C.7.1 (the server gives the new link up)")
    edge(DELETE_LINK, "delete_link", when="client", do="deletion.leave", source="3.5.5.1.3")
    edge(DELETE_LINK, "link_left", do="deletion.send start_reply_timer", source="3.5.5.1.3")
    edge(DELETE_LINK, "done", IDLE, do="stop_reply_timer adding.end_first_contact start_next",
         source="3.5.5.1.3")
    edge(DELETE_LINK, "timeout", when="only_carrier", do="deletion.send start_reply_timer",
         source="4.5.3, 4.8.3 (the last link carried the message, so it works: repeat)")
    edge(DELETE_LINK, "timeout", when="!only_carrier", do="fail_carrier",
         source="C.7.1 (DELETE LINK: the link that carried it is not usable either)")
    edge(DELETE_LINK, "carrier_lost", IDLE, do="stop_reply_timer deletion.requeue start_next",
         source="C.7.1 (DELETE LINK: resend over a surviving link)")

    # CONFIRM RKEY and DELETE RKEY of this side.
    edge(IDLE, "change_rkeys", CHANGE_RKEYS, do="rkey_exchanges.send",
         source="3.5.5.2.1, 3.5.5.2.2")
    edge(CHANGE_RKEYS, "rkeys_replied", IDLE,
         do="rkey_exchanges.stop_timer rkey_exchanges.end start_next",
         source="3.5.5.3")
    edge(IDLE, "rkeys_replied",
         do="rkey_exchanges.stop_timer rkey_exchanges.redo start_next", when="client",
         source="3.5.5.3.3 (the exchange that crossed it is over)")
    edge((*_ADDING, DELETE_LINK), "rkeys_replied",
         do="rkey_exchanges.stop_timer rkey_exchanges.redo", when="client",
         source="3.5.5.3.3 (repeated later, with the links that exist then)")
    edge((IDLE, *_ADDING, DELETE_LINK, CHANGE_RKEYS), "rkeys_timeout", when="rkeys_peer_lives",
         do="rkey_exchanges.start_timer", source=_LIVES)
    edge((IDLE, *_ADDING, DELETE_LINK, CHANGE_RKEYS), "rkeys_timeout",
         do="rkey_exchanges.fail_link",
         source="C.7.1 (CONFIRM RKEY: the link it was sent over has failed)")
    edge(CHANGE_RKEYS, "carrier_lost", IDLE,
         do="rkey_exchanges.stop_timer rkey_exchanges.redo start_next",
         source="2.3 (starts again over another link)")
    ignore((IDLE, CONFIRM_LINK), "carrier_lost", source="2.3 (nothing is under way on it)")

    # Queued exchanges.
    edge(IDLE, "queued", do="start_next", source="3.5.5.3")
    ignore(_BUSY, "queued", source="3.5.5.3 (starts when the exchange under way is done)")

    # Collisions: messages of the peer that begin an exchange.
    edge(IDLE, "peer_notice", do="demand.on_client_notice start_next",
         source="3.5.5.1.2 (ADD LINK from the client; in version 2 REQUEST ADD LINK, here and "
                "below)")
    ignore((CONFIRM_LINK, ADD_LINK), "peer_notice",
           source="3.5.5.3.1 (ADD LINK from the client: the exchange under way answers it)")
    edge((ADD_LINK_CONTINUATION, ADD_LINK_CONFIRM), "peer_notice", do="demand.on_client_notice",
         source="3.5.5.1.2 (ADD LINK from the client after its reply: it has one more RNIC)")
    edge(DELETE_LINK, "peer_notice", do="demand.on_client_notice",
         source="3.5.5.3.2 (ADD LINK from the client: processed afterwards)")
    edge(CHANGE_RKEYS, "peer_notice", do="demand.on_client_notice",
         source="3.5.5.3.3 (ADD LINK from the client: processed afterwards)")
    edge(IDLE, "deletion_requested", do="deletion.queue_client_request start_next",
         source="3.5.5.1.4")
    edge((CONFIRM_LINK, *_ADDING), "deletion_requested", do="deletion.queue_client_request",
         source="3.5.5.3.1 (DELETE LINK from the client: processed afterwards)")
    edge(DELETE_LINK, "deletion_requested", do="deletion.queue_client_request",
         source="3.5.5.3.2 (DELETE LINK from the client: processed afterwards)")
    edge(CHANGE_RKEYS, "deletion_requested", do="deletion.queue_client_request",
         source="3.5.5.3.3 (DELETE LINK from the client: processed afterwards)")
    edge((IDLE, CHANGE_RKEYS), "peer_rkeys", do="rkey_exchanges.answer_peer",
         source="3.5.5.3 (RKey exchanges of the two sides do not collide)")
    edge((CONFIRM_LINK, *_ADDING), "peer_rkeys", do="rkey_exchanges.defer_peer",
         source="3.5.5.3.1 (CONFIRM RKEY: negative reply, to be tried again)")
    edge(DELETE_LINK, "peer_rkeys", do="rkey_exchanges.defer_peer",
         source="3.5.5.3.2 (CONFIRM RKEY: negative reply, to be tried again)")

    edge((IDLE, *_BUSY), "end", ENDED,
         do="stop_reply_timer rkey_exchanges.stop_timer rkey_exchanges.fail_queued",
         source="3.5.5.3.1, 3.5.5.3.2, 3.5.5.3.3 (DELETE LINK of the entire link group: clean up "
                "immediately), 2.3")
    ignore(ENDED, "end queued peer_rkeys peer_notice deletion_requested delete_link link_left "
                  "timeout rkeys_timeout rkeys_replied done carrier_lost new_link_lost",
           source="3.5.4")
    # fmt: on
