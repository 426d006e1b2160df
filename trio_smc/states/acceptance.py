"""When a listener accepts: several processes may accept connections of one listening socket.

No RFC defines these states; the note of each edge gives its reason.  The model is
`trio_smc.connecting.acceptance.Acceptance`.
"""

from __future__ import annotations

from statemachine import State

from trio_smc.states.chart import Chart, edge, ignore

__all__ = ["AcceptanceChart"]


class AcceptanceChart(Chart):
    """ON_DEMAND: the program has not accepted yet, and may share the socket with a process that
    does, so the listener accepts nothing.  LATER: no task waits for a connection, so other
    processes have a moment to accept it.  AT_ONCE: a task waits for a connection."""

    ON_DEMAND = State("ON_DEMAND", initial=True)
    LATER = State("LATER")
    AT_ONCE = State("AT_ONCE")

    # fmt: off
    edge(ON_DEMAND, "call_begins", AT_ONCE, source="the program accepts")
    edge(ON_DEMAND, "client_waits", LATER,
         source="the program may have only one task, which waits as a client")

    edge(LATER, "call_begins", AT_ONCE, source="a task waits for a connection")
    ignore(LATER, "client_waits", source="the listener will accept the connection")

    edge(AT_ONCE, "call_ends", LATER, source="no task waits any more")
    ignore(AT_ONCE, "client_waits", source="the listener accepts the connection")
    # fmt: on
