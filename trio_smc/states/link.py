"""One SMC-R link, from the creation of its queue pair to its end (RFC 7609, 3.5.1.5, 4.5.3).

The model is `trio_smc.rendezvous.links.link.Link`.
"""

from __future__ import annotations

from statemachine import State

from trio_smc.states.chart import Chart, edge, ignore

__all__ = ["LinkChart"]


class LinkChart(Chart):
    """INIT: the queue pair does not receive yet.  CONFIRMING: connected, the CONFIRM LINK exchange
    is under way.  TESTING: idle, a TEST LINK request waits for its reply.  LEAVING: the link will
    be deleted; its connections move to other links, and LLC messages are still exchanged."""

    INIT = State("INIT", initial=True)
    CONFIRMING = State("CONFIRMING")
    ACTIVE = State("ACTIVE")
    TESTING = State("TESTING")
    LEAVING = State("LEAVING")
    DOWN = State("DOWN")

    # fmt: off
    edge(INIT, "connect", CONFIRMING, do="connect_queue_pair", source="3.5.1.3, 3.5.1.4")
    edge(CONFIRMING, "confirmed", ACTIVE, do="start_idle_timer", source="3.5.1.5")
    edge(ACTIVE, "idle_timer", when="!idle", do="check_again", source="4.5.3")
    edge(ACTIVE, "idle_timer", TESTING, when="idle", do="send_test_link", source="4.5.3")
    edge(TESTING, "test_reply", ACTIVE, do="start_idle_timer", source="4.5.3, A.3.8")
    edge((ACTIVE, TESTING, LEAVING), "test_request", do="answer_test",
         source="3.5.5.3.1, 3.5.5.3.2, 3.5.5.3.3 (TEST LINK is answered at once)")
    edge((ACTIVE, TESTING), "leave", LEAVING, do="stop_timer", source="3.5.5.1.3, 3.5.5.1.4")
    edge(LEAVING, "stay", ACTIVE, do="start_idle_timer",
         source="4.8.3 (the last link on which the peers reach each other)")
    edge(TESTING, "test_timeout", when="peer_lives", do="stop_timer",
         source="4.5.3; choice: on one host a process that stands still keeps its connections, as "
                "over TCP, and the kernel reports its end")
    edge(TESTING, "test_timeout", DOWN, do="move_connections close_queue_pair report_failure",
         source="4.5.3, C.7.1 (TEST LINK)")
    edge((INIT, CONFIRMING), "failed", DOWN, do="close_queue_pair report_failure",
         source="C.7.1 (CONFIRM LINK)")
    edge((ACTIVE, TESTING, LEAVING), "failed", DOWN,
         do="move_connections close_queue_pair report_failure",
         source="4.6, 4.8.3, C.7.1 (an incorrect or out-of-sync LLC message: as if it had gone "
                "down)")
    edge((INIT, CONFIRMING, ACTIVE, TESTING, LEAVING), "delete", DOWN, do="close_queue_pair",
         source="3.5.4, 3.5.5.1.3")
    ignore((ACTIVE, LEAVING), "test_reply",
           source="A.3.8, C.7.1; choice: a reply without a waiting request does no harm")
    ignore(LEAVING, "leave", source="3.5.5.1.3 (connections are already moving)")
    ignore(DOWN, "failed delete leave test_reply test_request", source="4.8.3 (already down)")
    # fmt: on
