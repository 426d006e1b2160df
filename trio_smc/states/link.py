"""One SMC-R link: from its queue pair's birth to its loss (RFC 7609, 3.5.1.5, 4.5.3).

The model is `trio_smc.rendezvous.link.Link`.
"""

from __future__ import annotations

from statemachine import State

from trio_smc.states.chart import Chart, edge, flatten, ignore

__all__ = ["LINK", "LinkChart"]


class LinkChart(Chart):
    """INIT: a queue pair that receives nothing yet.  CONFIRMING: connected, the CONFIRM LINK
    exchange is under way.  TESTING: idle, a TEST LINK request waits for its reply."""

    INIT = State("INIT", initial=True)
    CONFIRMING = State("CONFIRMING")
    ACTIVE = State("ACTIVE")
    TESTING = State("TESTING")
    DOWN = State("DOWN")

    edge(INIT, "connect", CONFIRMING, do="connect_queue_pair", rfc="3.5.1.3, 3.5.1.4")
    edge(CONFIRMING, "confirmed", ACTIVE, do="start_idle_timer", rfc="3.5.1.5")
    edge(ACTIVE, "idle_timer", when="heard", do="start_idle_timer", rfc="4.5.3")
    edge(ACTIVE, "idle_timer", TESTING, when="!heard", do="send_test_link", rfc="4.5.3")
    edge(TESTING, "test_reply", ACTIVE, do="start_idle_timer", rfc="4.5.3, A.3.6")
    edge(TESTING, "test_timeout", DOWN, do="close_queue_pair report_failure", rfc="4.5.3, C.7.1")
    edge(
        (INIT, CONFIRMING, ACTIVE, TESTING),
        "failed",
        DOWN,
        do="close_queue_pair report_failure",
        rfc="4.8.3, C.7.1",
    )
    edge(
        (INIT, CONFIRMING, ACTIVE, TESTING),
        "delete",
        DOWN,
        do="close_queue_pair",
        rfc="3.5.4, 3.5.5.1.3",
    )
    ignore(ACTIVE, "test_reply", rfc="A.3.6 (a reply that came after other signs of life)")
    ignore(DOWN, "failed delete test_reply", rfc="4.8.3 (already down)")


LINK = flatten(LinkChart)
