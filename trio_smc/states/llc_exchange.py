"""Which LLC exchange of a link group is under way (RFC 7609, 3.5.5.3).

Exchanges that change the configuration of a link group run one at a time; RKey exchanges of
the two sides may overlap.  The model is `trio_smc.rendezvous.exchanges.Exchanges`.
"""

from __future__ import annotations

from statemachine import State

from trio_smc.states.chart import Chart, edge, flatten, ignore

__all__ = ["LLC_EXCHANGE", "LlcExchangeChart"]


class LlcExchangeChart(Chart):
    """IDLE: a queued exchange may start.  The other states name the exchange under way; an
    RKey exchange of the peer is answered at once and is no state of its own."""

    IDLE = State("IDLE", initial=True)
    CONFIRM_LINK = State("CONFIRM_LINK")
    ADD_LINK = State("ADD_LINK")
    DELETE_LINK = State("DELETE_LINK")
    CHANGE_RKEYS = State("CHANGE_RKEYS")
    ENDED = State("ENDED")

    _BUSY = (CONFIRM_LINK, ADD_LINK, DELETE_LINK, CHANGE_RKEYS)

    # fmt: off
    edge(IDLE, "confirm_link", CONFIRM_LINK, do="start_reply_timer", rfc="3.5.1.5")
    edge(CONFIRM_LINK, "done", IDLE, do="stop_reply_timer", rfc="3.5.1.5 (ADD LINK follows)")
    edge(CONFIRM_LINK, "timeout", IDLE, do="confirm_link_timed_out", rfc="C.7.1")
    edge(IDLE, "add_link", ADD_LINK, do="start_reply_timer", rfc="3.5.1.6")
    edge(ADD_LINK, "done", IDLE, do="stop_reply_timer start_next", rfc="3.5.1.6.2")
    edge(ADD_LINK, "timeout", IDLE, do="add_link_timed_out start_next", rfc="C.7.1, C.8")
    edge(IDLE, "delete_link", DELETE_LINK, do="start_reply_timer", rfc="3.5.5.1.3")
    edge(DELETE_LINK, "done", IDLE, do="stop_reply_timer start_next", rfc="3.5.5.1.3")
    edge(DELETE_LINK, "timeout", IDLE, do="delete_link_timed_out", rfc="C.7.1")
    edge(IDLE, "change_rkeys", CHANGE_RKEYS, do="start_reply_timer", rfc="3.5.5.2.1, 3.5.5.2.2")
    edge(CHANGE_RKEYS, "done", IDLE, do="stop_reply_timer start_next", rfc="3.5.5.3")
    edge(CHANGE_RKEYS, "timeout", IDLE, do="rkeys_timed_out", rfc="C.7.1")
    edge(IDLE, "queued", do="start_next", rfc="3.5.5.3")
    ignore(_BUSY, "queued", rfc="3.5.5.3 (waits until the exchange under way is done)")
    edge((IDLE, CHANGE_RKEYS), "peer_rkeys", do="answer_rkeys",
         rfc="3.5.5.3 (RKey exchanges of the two sides do not collide)")
    edge((CONFIRM_LINK, ADD_LINK, DELETE_LINK), "peer_rkeys", do="put_off_rkeys",
         rfc="3.5.5.3.1, 3.5.5.3.2 (RKeys cannot change while links do)")
    edge((IDLE, *_BUSY), "end", ENDED, do="stop_reply_timer fail_queued",
         rfc="2.3 (failed exchanges are not replayed)")
    ignore(ENDED, "end queued peer_rkeys timeout done", rfc="3.5.4")
    # fmt: on


LLC_EXCHANGE = flatten(LlcExchangeChart)
