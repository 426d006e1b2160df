"""The server's side of a rendezvous (RFC 7609, 3.5.1, 3.5.2, C.1-C.6).

The model is `trio_smc.rendezvous.server.ServerNegotiation`.
"""

from __future__ import annotations

from statemachine import State

from trio_smc.states.chart import Chart, edge, flatten, ignore

__all__ = ["CLC_SERVER", "ClcServerChart"]


class ClcServerChart(Chart):
    """LISTENING: waits for SMC Proposal.  WAITING: another connection is just forming a link
    group with this peer.  PREPARING: an RMB element is being made ready.  ACCEPTED: waits for
    SMC Confirm.  CONFIRMING_LINK: first contact, LLC messages flow."""

    LISTENING = State("LISTENING", initial=True)
    WAITING = State("WAITING")
    PREPARING = State("PREPARING")
    ACCEPTED = State("ACCEPTED")
    CONFIRMING_LINK = State("CONFIRMING_LINK")
    ESTABLISHED = State("ESTABLISHED")
    FALLEN_BACK = State("FALLEN_BACK")
    FAILED = State("FAILED")

    edge(LISTENING, "proposal", FALLEN_BACK, when="refused", do="decline_refused", rfc="C.1")
    edge(LISTENING, "proposal", PREPARING, when="group_usable", do="take_element", rfc="3.5.2.1")
    edge(
        LISTENING,
        "proposal",
        WAITING,
        when="group_forming",
        do="wait_for_group",
        rfc="3.5.1.6 (one first contact at a time with a peer)",
    )
    edge(LISTENING, "proposal", PREPARING, do="form_group", rfc="3.5.1.2")
    edge(WAITING, "group_settled", PREPARING, when="group_usable", do="take_element", rfc="3.5.2.1")
    edge(WAITING, "group_settled", when="group_forming", do="wait_for_group", rfc="3.5.1.6")
    edge(WAITING, "group_settled", PREPARING, do="form_group", rfc="3.5.1.2")
    edge(PREPARING, "element_ready", ACCEPTED, do="send_accept", rfc="3.5.1.2, 3.5.2.1")
    edge(PREPARING, "unable", FALLEN_BACK, do="decline_unable", rfc="C.1 (lack of resources)")
    edge(ACCEPTED, "decline", FALLEN_BACK, do="note_decline abandon", rfc="C.1, C.4")
    edge(
        ACCEPTED,
        "confirm",
        FALLEN_BACK,
        when="first_contact reserved_value",
        do="decline_reserved_value abandon",
        rfc="C.2, C.6 (bad enumerated value)",
    )
    edge(
        ACCEPTED,
        "confirm",
        CONFIRMING_LINK,
        when="first_contact",
        do="connect_link",
        rfc="3.5.1.4, 3.5.1.5",
    )
    edge(ACCEPTED, "confirm", ESTABLISHED, when="known_link", do="establish", rfc="3.5.2.3")
    edge(
        ACCEPTED,
        "confirm",
        FAILED,
        do="fail_protocol abandon",
        rfc="3.5.2.3 (no active link of the group is named)",
    )
    edge(CONFIRMING_LINK, "group_formed", ESTABLISHED, do="establish", rfc="3.5.1.6.2")
    edge(
        CONFIRMING_LINK,
        "group_failed",
        FALLEN_BACK,
        when="may_fall_back",
        do="decline_link_failed",
        rfc="C.2, C.3",
    )
    edge(CONFIRMING_LINK, "group_failed", FAILED, do="fail_reset", rfc="C.3, C.7.1")
    edge(
        CONFIRMING_LINK,
        "decline",
        FALLEN_BACK,
        when="may_fall_back",
        do="note_decline abandon",
        rfc="C.2, C.3",
    )
    edge(
        CONFIRMING_LINK,
        "decline",
        FAILED,
        do="fail_protocol abandon",
        rfc="C.3 (past the point of no return)",
    )
    edge((LISTENING, ACCEPTED), "clc_timeout", FAILED, do="fail_timeout abandon", rfc="C.5")
    edge(CONFIRMING_LINK, "llc_timeout", FAILED, do="fail_timeout", rfc="C.7")
    edge(ACCEPTED, "group_failed", FAILED, do="fail_reset abandon", rfc="C.1 (no chasing)")
    edge(
        (LISTENING, WAITING, PREPARING, ACCEPTED, CONFIRMING_LINK),
        "protocol_error",
        FAILED,
        do="fail_protocol abandon",
        rfc="C.6",
    )
    edge(
        (LISTENING, WAITING, PREPARING, ACCEPTED, CONFIRMING_LINK),
        "tcp_lost",
        FAILED,
        do="fail_tcp abandon",
        rfc="C.5",
    )
    ignore(
        (ESTABLISHED, FALLEN_BACK, FAILED),
        "group_formed group_failed group_settled element_ready unable tcp_lost clc_timeout"
        " llc_timeout",
        rfc="3.5.1 (the negotiation is over)",
    )
    ignore(PREPARING, "group_failed", rfc="C.1 (unable follows)")


CLC_SERVER = flatten(ClcServerChart)
