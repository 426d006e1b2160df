"""A link group: formed by a first contact, ended in order or by the loss of its last link.

RFC 7609, 3.5.1, 3.5.4, 4.8.3.  The model is `trio_smc.rendezvous.link_group.LinkGroup`.
"""

from __future__ import annotations

from statemachine import State

from trio_smc.states.chart import Chart, edge, flatten, ignore

__all__ = ["LINK_GROUP", "LinkGroupChart"]


class LinkGroupChart(Chart):
    """FORMING: first contact, no data may flow yet.  SINGLE: usable, with one link.
    TERMINATING: DELETE LINK for the whole group is on its way."""

    FORMING = State("FORMING", initial=True)
    SINGLE = State("SINGLE")
    TERMINATING = State("TERMINATING")
    GONE = State("GONE")

    edge(FORMING, "formed", SINGLE, do="start_idle_timer tell_formed", rfc="3.5.1.6, C.8")
    edge(FORMING, "links_lost", GONE, do="tell_failed free_resources", rfc="C.2, C.7.1")
    edge(
        FORMING,
        "terminate delete_all",
        GONE,
        do="leave_turn tell_failed free_resources",
        rfc="3.5.1.6.4, C.7 (the peer learns it from SMC Decline, or from the end of TCP)",
    )
    edge(SINGLE, "links_lost", GONE, do="end_connections free_resources", rfc="4.8.3")
    edge(
        SINGLE,
        "terminate",
        TERMINATING,
        do="end_connections send_delete_all start_termination_timer",
        rfc="3.5.4",
    )
    edge(
        SINGLE, "delete_all", GONE, when="client", do="end_connections free_resources", rfc="3.5.4"
    )
    edge(
        SINGLE,
        "delete_all",
        TERMINATING,
        when="!client",
        do="end_connections send_delete_all start_termination_timer",
        rfc="3.5.4 (the server complies with a DELETE LINK of its own)",
    )
    edge(
        TERMINATING,
        "delete_all delete_sent links_lost termination_timeout",
        GONE,
        do="free_resources",
        rfc="3.5.4, C.7.1",
    )
    ignore(TERMINATING, "terminate", rfc="3.5.4 (under way)")
    ignore(GONE, "terminate delete_all delete_sent links_lost", rfc="3.5.4 (over)")


LINK_GROUP = flatten(LinkGroupChart)
