"""A link group, from first contact to its orderly end or the loss of its last link.

RFC 7609, 2.2.2, 3.5.1, 3.5.4, 3.5.5, 4.8.3.  The model is
`trio_smc.rendezvous.links.group.LinkGroup`.
"""

from __future__ import annotations

from statemachine import State

from trio_smc.states.chart import Chart, edge, ignore

__all__ = ["LinkGroupChart"]


class LinkGroupChart(Chart):
    """FORMING: first contact, no data may flow yet.  SINGLE: usable, with one link.  ASYMMETRIC:
    two links that share an RNIC at one end.  SYMMETRIC: links that share no RNIC.  TERMINATING:
    DELETE LINK for the whole group is being sent."""

    FORMING = State("FORMING", initial=True)
    SINGLE = State("SINGLE")
    ASYMMETRIC = State("ASYMMETRIC")
    SYMMETRIC = State("SYMMETRIC")
    TERMINATING = State("TERMINATING")
    GONE = State("GONE")

    _USABLE = (SINGLE, ASYMMETRIC, SYMMETRIC)

    # fmt: off
    edge(FORMING, "formed", SINGLE, when="is_single", do="start_idle_timer report_formed",
         source="3.5.1.6.2, C.8")
    edge(FORMING, "formed", ASYMMETRIC, when="is_asymmetric",
         do="start_idle_timer report_formed seek_links", source="2.2.2, 3.5.1.6.1")
    edge(FORMING, "formed", SYMMETRIC, do="start_idle_timer report_formed seek_links",
         source="2.2.2, 3.5.1.6.1")
    ignore(FORMING, "links_changed",
           source="3.5.1.6 (the kind is decided when the group is formed)")
    edge(FORMING, "links_lost", GONE, do="report_failed free_resources", source="C.2, C.7.1")
    edge(FORMING, "terminate delete_all", GONE,
         do="setup.assume_peer_turn report_failed free_resources",
         source="3.5.1.6.4, C.7 (the peer learns it from SMC Decline, or from the end of TCP)")

    edge(SINGLE, "links_changed", ASYMMETRIC, when="is_asymmetric", do="seek_links",
         source="2.2.2, 3.5.5.1.1")
    edge(SINGLE, "links_changed", SYMMETRIC, when="is_symmetric", do="seek_links",
         source="2.2.2, 3.5.5.1.1")
    ignore(SINGLE, "links_changed", source="2.2.2")
    edge(ASYMMETRIC, "links_changed", SYMMETRIC, when="is_symmetric",
         do="delete_asymmetric_link seek_links",
         source="2.2.2 (the asymmetric link is no longer needed)")
    edge(ASYMMETRIC, "links_changed", SINGLE, when="is_single", do="seek_links",
         source="2.2.2, C.8")
    ignore(ASYMMETRIC, "links_changed", source="2.2.2")
    edge(SYMMETRIC, "links_changed", when="is_symmetric",
         do="delete_asymmetric_link seek_links", source="2.2.2, 3.5.5.1.1 (up to the maximum)")
    edge(SYMMETRIC, "links_changed", ASYMMETRIC, when="is_asymmetric", do="seek_links",
         source="2.2.2, 3.5.5.1.2")
    edge(SYMMETRIC, "links_changed", SINGLE, do="seek_links", source="2.2.2, C.8")

    edge(_USABLE, "links_lost", GONE, do="end_connections free_resources", source="4.8.3")
    edge(_USABLE, "terminate", TERMINATING,
         do="end_connections send_delete_all start_termination_timer", source="3.5.4")
    edge(_USABLE, "delete_all", GONE, when="client", do="end_connections free_resources",
         source="3.5.4, 3.5.5.3")
    edge(_USABLE, "delete_all", TERMINATING, when="!client",
         do="end_connections send_delete_all start_termination_timer",
         source="3.5.4 (the server answers by a DELETE LINK of its own)")
    edge(TERMINATING, "links_changed", do="send_delete_all start_termination_timer",
         source="C.7.1 (DELETE LINK, entire link group: resend over another link)")
    edge(TERMINATING, "termination_timeout", when="has_spare_link", do="fail_termination_link",
         source="C.7.1 (DELETE LINK, entire link group: resend over another link)")
    edge(TERMINATING, "delete_all delete_sent links_lost termination_timeout", GONE,
         do="free_resources", source="3.5.4, C.7.1")
    ignore(TERMINATING, "terminate", source="3.5.4 (already terminating)")
    ignore(GONE, "terminate delete_all delete_sent links_lost links_changed",
           source="3.5.4 (the group has ended)")
    # fmt: on
