"""The client's side of a rendezvous (RFC 7609, 3.5.1, 3.5.2, C.1-C.6).

The model is `trio_smc.rendezvous.client.ClientNegotiation`.
"""

from __future__ import annotations

from statemachine import State

from trio_smc.states.chart import Chart, edge, flatten, ignore

__all__ = ["CLC_CLIENT", "ClcClientChart"]


class ClcClientChart(Chart):
    """PROPOSED: waits for SMC Accept.  PREPARING: an RMB element is being made ready.
    CONFIRMING_LINK: first contact, SMC Confirm was sent and LLC messages flow."""

    START = State("START", initial=True)
    PROPOSED = State("PROPOSED")
    PREPARING = State("PREPARING")
    CONFIRMING_LINK = State("CONFIRMING_LINK")
    ESTABLISHED = State("ESTABLISHED")
    FALLEN_BACK = State("FALLEN_BACK")
    FAILED = State("FAILED")

    edge(START, "propose", PROPOSED, do="send_proposal", rfc="3.5.1.2")
    edge(
        PROPOSED,
        "accept",
        FALLEN_BACK,
        when="reserved_value",
        do="decline_reserved_value",
        rfc="C.6 (bad enumerated value)",
    )
    edge(PROPOSED, "accept", PREPARING, when="first_contact", do="form_group", rfc="3.5.1.3")
    edge(PROPOSED, "accept", PREPARING, when="known_link", do="take_element", rfc="3.5.2.2")
    edge(PROPOSED, "accept", FALLEN_BACK, do="decline_out_of_sync", rfc="C.4")
    edge(PROPOSED, "decline", FALLEN_BACK, do="note_decline", rfc="C.1")
    edge(
        PREPARING,
        "element_ready",
        CONFIRMING_LINK,
        when="first_contact",
        do="send_confirm",
        rfc="3.5.1.3",
    )
    edge(
        PREPARING,
        "element_ready",
        ESTABLISHED,
        do="send_confirm establish",
        rfc="3.5.2.2, 3.5.2.4 (no further confirmation)",
    )
    edge(PREPARING, "unable", FALLEN_BACK, do="decline_unable", rfc="C.1 (lack of resources)")
    edge(CONFIRMING_LINK, "group_formed", ESTABLISHED, do="establish", rfc="3.5.1.6")
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
    edge(PREPARING, "decline", FAILED, do="fail_protocol abandon", rfc="C.1 (no chasing)")
    edge(PROPOSED, "clc_timeout", FAILED, do="fail_timeout", rfc="C.5")
    edge(CONFIRMING_LINK, "llc_timeout", FAILED, do="fail_timeout", rfc="C.7")
    edge(
        (PROPOSED, PREPARING, CONFIRMING_LINK),
        "protocol_error",
        FAILED,
        do="fail_protocol abandon",
        rfc="C.6",
    )
    edge(
        (START, PROPOSED, PREPARING, CONFIRMING_LINK),
        "tcp_lost",
        FAILED,
        do="fail_tcp abandon",
        rfc="C.5",
    )
    ignore(
        (ESTABLISHED, FALLEN_BACK, FAILED),
        "group_formed group_failed element_ready unable tcp_lost clc_timeout llc_timeout",
        rfc="3.5.1 (the negotiation is over)",
    )
    ignore(PREPARING, "group_failed", rfc="C.1 (unable follows)")


CLC_CLIENT = flatten(ClcClientChart)
