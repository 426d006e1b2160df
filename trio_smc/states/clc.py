"""The two sides of a rendezvous, client and server (RFC 7609, 3.5.1, 3.5.2, C.1-C.7).

The models are `trio_smc.rendezvous.client.ClientNegotiation` and
`trio_smc.rendezvous.server.ServerNegotiation`.
"""

from __future__ import annotations

from statemachine import State

from trio_smc.states.chart import Chart, edge, ignore

__all__ = ["ClcClientChart", "ClcServerChart"]


class ClcClientChart(Chart):
    """PROPOSED: waits for SMC Accept.  PREPARING: an RMB element is being prepared.
    CONFIRMED: subsequent contact, SMC Confirm is being sent.
    CONFIRMING_LINK: first contact, SMC Confirm was sent and LLC messages are exchanged.
    LINK_LOST: the new link has failed, and the server must send SMC Decline.
    DECLINING: this side's SMC Decline is being sent."""

    START = State("START", initial=True)
    PROPOSED = State("PROPOSED")
    PREPARING = State("PREPARING")
    CONFIRMED = State("CONFIRMED")
    CONFIRMING_LINK = State("CONFIRMING_LINK")
    LINK_LOST = State("LINK_LOST")
    DECLINING = State("DECLINING")
    ESTABLISHED = State("ESTABLISHED")
    FALLEN_BACK = State("FALLEN_BACK")
    FAILED = State("FAILED")

    _RUNNING = (START, PROPOSED, PREPARING, CONFIRMED, CONFIRMING_LINK, LINK_LOST, DECLINING)
    _ENDED = (ESTABLISHED, FALLEN_BACK, FAILED)

    # fmt: off
    edge(START, "propose", PROPOSED, do="send_proposal", source="3.5.1.2")
    edge(START, "unable", DECLINING, do="decline_unable", source="C.1 (in place of SMC Proposal)")
    edge(PROPOSED, "accept", DECLINING, when="refused", do="decline_refused",
         source="C.1 (version 2: not what was proposed)")
    edge(PROPOSED, "accept", DECLINING, when="reserved_value", do="decline_reserved_value",
         source="C.6 (bad enumerated value)")
    edge(PROPOSED, "accept", PREPARING, when="first_contact", do="form_group", source="3.5.1.3")
    edge(PROPOSED, "accept", PREPARING, when="known_link", do="take_element", source="3.5.2.2")
    edge(PROPOSED, "accept", DECLINING, do="decline_out_of_sync", source="C.4")
    edge(PROPOSED, "decline", FALLEN_BACK, do="note_decline", source="C.1")
    edge(PROPOSED, "clc_timeout", FAILED, do="fail_timeout", source="C.5")
    edge(PREPARING, "element_ready", CONFIRMING_LINK, when="first_contact", do="send_confirm",
         source="3.5.1.3")
    edge(PREPARING, "element_ready", CONFIRMED, when="peer_element_known",
         do="attach_peer_element send_confirm", source="3.5.2.2, 4.4.2")
    edge(PREPARING, "element_ready", FAILED, do="fail_protocol abandon",
         source="3.5.5.2.2 (the RMB that SMC Accept names was deleted meanwhile)")
    edge(PREPARING, "unable", DECLINING, do="decline_unable", source="C.1 (lack of resources)")
    edge(PREPARING, "decline", FAILED, do="fail_protocol abandon", source="C.1 (no chasing)")
    ignore(PREPARING, "group_failed", source="C.1 (the event unable follows)")
    edge(CONFIRMED, "sent", ESTABLISHED, when="usable_connection", do="establish",
         source="3.5.2.4 (no further confirmation)")
    edge(CONFIRMED, "sent", FAILED, do="fail_reset abandon",
         source="C.1, C.3 (too late to decline)")
    edge(CONFIRMING_LINK, "group_formed", ESTABLISHED, do="attach_peer_element establish",
         source="3.5.1.6")
    edge(CONFIRMING_LINK, "group_failed", DECLINING, when="may_decline", do="decline_link_failed",
         source="C.2, C.7")
    edge(CONFIRMING_LINK, "group_failed", LINK_LOST, when="may_fall_back", do="abandon",
         source="C.7 (the Decline comes from the peer whose send failed)")
    edge(CONFIRMING_LINK, "group_failed", FAILED, do="fail_reset abandon", source="C.3, C.7.1")
    edge(CONFIRMING_LINK, "llc_timeout", FAILED, do="fail_timeout abandon", source="C.7")
    edge(CONFIRMING_LINK, "llc_error", FAILED, do="fail_protocol abandon", source="C.7.1")
    edge(CONFIRMING_LINK, "decline", FALLEN_BACK, when="may_fall_back", do="note_decline abandon",
         source="C.2, C.3")
    edge(CONFIRMING_LINK, "decline", FAILED, do="fail_protocol abandon",
         source="C.3 (past the point of no return)")
    edge(LINK_LOST, "decline", FALLEN_BACK, do="note_decline", source="C.2, C.7")
    edge(LINK_LOST, "clc_timeout", FAILED, do="fail_reset", source="C.7 (break the TCP connection)")
    edge(DECLINING, "sent", FALLEN_BACK, do="fall_back", source="C.1 (no confirmation is required)")
    edge((CONFIRMED, DECLINING), "decline", FAILED, do="fail_protocol abandon",
         source="C.1 (no chasing)")
    edge((PROPOSED, PREPARING, CONFIRMED, CONFIRMING_LINK, LINK_LOST, DECLINING), "protocol_error",
         FAILED, do="fail_protocol abandon", source="C.6")
    edge(_RUNNING, "tcp_lost", FAILED, do="fail_tcp abandon", source="C.5")
    ignore((CONFIRMED, LINK_LOST, DECLINING), "group_formed group_failed llc_timeout llc_error",
           source="C.3 (the link group has no effect any more)")
    ignore(_ENDED, "group_formed group_failed llc_timeout llc_error element_ready unable sent"
           " tcp_lost clc_timeout decline protocol_error", source="3.5.1 (the negotiation is over)")
    # fmt: on


class ClcServerChart(Chart):
    """LISTENING: waits for SMC Proposal.  WAITING: another connection is forming a link group with
    this peer.  PREPARING: an RMB element is being prepared.  ACCEPTED: waits for SMC Confirm.
    CONFIRMING_LINK: first contact, LLC messages are exchanged.
    LINK_LOST: the new link has failed, and the client must send SMC Decline.
    DECLINING: this side's SMC Decline is being sent."""

    LISTENING = State("LISTENING", initial=True)
    WAITING = State("WAITING")
    PREPARING = State("PREPARING")
    ACCEPTED = State("ACCEPTED")
    CONFIRMING_LINK = State("CONFIRMING_LINK")
    LINK_LOST = State("LINK_LOST")
    DECLINING = State("DECLINING")
    ESTABLISHED = State("ESTABLISHED")
    FALLEN_BACK = State("FALLEN_BACK")
    FAILED = State("FAILED")

    _RUNNING = (LISTENING, WAITING, PREPARING, ACCEPTED, CONFIRMING_LINK, LINK_LOST, DECLINING)
    _ENDED = (ESTABLISHED, FALLEN_BACK, FAILED)

    # fmt: off
    edge(LISTENING, "decline", FALLEN_BACK, do="note_decline",
         source="C.1 (in place of SMC Proposal)")
    edge(LISTENING, "proposal", DECLINING, when="refused", do="decline_refused",
         source="C.1 (neither version fits)")
    edge(LISTENING, "proposal", PREPARING, when="group_usable", do="take_element", source="3.5.2.1")
    edge(LISTENING, "proposal", WAITING, when="group_forming", do="wait_for_group",
         source="3.5.1.6 (one first contact at a time with a peer)")
    edge(LISTENING, "proposal", PREPARING, do="form_group", source="3.5.1.2")
    edge(WAITING, "group_settled", PREPARING, when="group_usable", do="take_element",
         source="3.5.2.1")
    edge(WAITING, "group_settled", when="group_forming", do="wait_for_group", source="3.5.1.6")
    edge(WAITING, "group_settled", PREPARING, do="form_group", source="3.5.1.2")
    edge(WAITING, "wait_expired", PREPARING, do="form_group",
         source="3.5.3 (a parallel link group)")
    edge(PREPARING, "element_ready", ACCEPTED, do="send_accept", source="3.5.1.2, 3.5.2.1")
    edge(PREPARING, "unable", WAITING, when="group_lost", do="start_over",
         source="2.3, 3.5.1 (without a usable link this is a first contact)")
    edge(PREPARING, "unable", DECLINING, do="decline_unable", source="C.1 (lack of resources)")
    ignore(PREPARING, "group_failed", source="C.1 (the event unable follows)")
    edge(ACCEPTED, "decline", FALLEN_BACK, do="note_decline abandon", source="C.1, C.4")
    edge(ACCEPTED, "confirm", DECLINING, when="refused", do="decline_refused",
         source="C.2 (version 2: not what was accepted)")
    edge(ACCEPTED, "confirm", DECLINING, when="first_contact reserved_value",
         do="decline_reserved_value", source="C.2, C.6 (bad enumerated value)")
    edge(ACCEPTED, "confirm", CONFIRMING_LINK, when="first_contact", do="connect_link",
         source="3.5.1.4, 3.5.1.5")
    edge(ACCEPTED, "confirm", ESTABLISHED, when="known_link", do="attach_peer_element establish",
         source="3.5.2.3, 4.4.2")
    edge(ACCEPTED, "confirm", ESTABLISHED, when="ended_early", do="establish",
         source="3.5.2.4, 3.5.4 (the client was established, and has ended the link group)")
    edge(ACCEPTED, "confirm", FAILED, when="group_lost", do="fail_reset abandon",
         source="C.1 (too late to decline)")
    edge(ACCEPTED, "confirm", FAILED, do="fail_protocol abandon",
         source="3.5.2.3 (no active link of the group is named)")
    edge(ACCEPTED, "group_failed", FAILED, do="fail_reset abandon", source="C.1 (no chasing)")
    edge(CONFIRMING_LINK, "group_formed", ESTABLISHED, do="attach_peer_element establish",
         source="3.5.1.6.2")
    edge(CONFIRMING_LINK, "group_failed", DECLINING, when="may_decline", do="decline_link_failed",
         source="C.2, C.3, C.7")
    edge(CONFIRMING_LINK, "group_failed", LINK_LOST, when="may_fall_back", do="abandon",
         source="C.7 (the Decline comes from the peer whose send failed)")
    edge(CONFIRMING_LINK, "group_failed", FAILED, do="fail_reset abandon", source="C.3, C.7.1")
    edge(CONFIRMING_LINK, "llc_timeout", FAILED, do="fail_timeout abandon", source="C.7.1")
    edge(CONFIRMING_LINK, "llc_error", FAILED, do="fail_protocol abandon", source="C.7.1")
    edge(CONFIRMING_LINK, "decline", FALLEN_BACK, when="may_fall_back", do="note_decline abandon",
         source="C.2, C.3")
    edge(CONFIRMING_LINK, "decline", FAILED, do="fail_protocol abandon",
         source="C.3 (past the point of no return)")
    edge((LISTENING, ACCEPTED), "clc_timeout", FAILED, do="fail_timeout abandon", source="C.5")
    edge(LINK_LOST, "decline", FALLEN_BACK, do="note_decline", source="C.2, C.7")
    edge(LINK_LOST, "clc_timeout", FAILED, do="fail_reset", source="C.7 (break the TCP connection)")
    edge(DECLINING, "sent", FALLEN_BACK, do="fall_back", source="C.1 (no confirmation is required)")
    edge((WAITING, PREPARING, DECLINING), "decline", FAILED, do="fail_protocol abandon",
         source="C.1 (no chasing)")
    edge(_RUNNING, "protocol_error", FAILED, do="fail_protocol abandon", source="C.6")
    edge(_RUNNING, "tcp_lost", FAILED, do="fail_tcp abandon", source="C.5")
    ignore((LINK_LOST, DECLINING), "group_formed group_failed llc_timeout llc_error",
           source="C.3 (the link group has no effect any more)")
    ignore(_ENDED, "group_formed group_failed llc_timeout llc_error group_settled wait_expired"
           " element_ready unable sent tcp_lost clc_timeout decline protocol_error",
           source="3.5.1 (the negotiation is over)")
    ignore((PREPARING, ACCEPTED, CONFIRMING_LINK, LINK_LOST, DECLINING),
           "group_settled wait_expired", source="3.5.3 (the negotiation waits no longer)")
    # fmt: on
