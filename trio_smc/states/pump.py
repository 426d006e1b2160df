"""The modes of a stack's pump: which parts of Trio's loop poll the RNICs.

No RFC defines these modes; the note of each edge gives its reason.  The model is
`trio_smc.rnic.pump.Pump`.
"""

from __future__ import annotations

from statemachine import State

from trio_smc.states.chart import Chart, edge, ignore

__all__ = ["PumpChart"]


class PumpChart(Chart):
    """STOPPED: no Trio run polls the RNICs.  IDLE: no connection is open, the RNICs are armed, and
    no hook is in Trio's loop.  BUSY: the hook before the wait for I/O drains once in each pass.
    SLEEPY: the loop sleeps now and then, and a second hook drains after each sleep.  SOLO: one
    reader waits on the doorbell descriptor itself, and no hook is in Trio's loop."""

    STOPPED = State("STOPPED", initial=True)
    IDLE = State("IDLE")
    BUSY = State("BUSY")
    SLEEPY = State("SLEEPY")
    SOLO = State("SOLO")

    # fmt: off
    edge(STOPPED, "start", BUSY, do="restart_counts disarm_rnics add_before_hook",
         source="the pump runs")
    ignore(STOPPED, "needed sole_reader stop", source="no Trio run, so no hooks")

    edge(IDLE, "needed", BUSY, do="restart_counts disarm_rnics add_before_hook",
         source="a connection, a doorbell or a timer needs the pump")
    ignore(IDLE, "sole_reader", source="a reader that parks resumes the hooks first")
    edge(IDLE, "stop", STOPPED, source="no hook to remove")

    edge(BUSY, "about_to_sleep", SLEEPY, do="add_after_hook",
         source="completions that end a sleep are drained before any task runs")
    edge(BUSY, "sole_reader", SOLO, when="has_one_doorbell",
         do="remove_before_hook release_doorbell", source="one task alone polls")
    edge(BUSY, "unused", IDLE, do="remove_before_hook", source="a hook takes time in each pass")
    edge(BUSY, "stop", STOPPED, do="remove_before_hook", source="the pump was cancelled")

    edge(SLEEPY, "awake_for_long", BUSY, do="remove_after_hook",
         source="a hook takes time in each pass")
    edge(SLEEPY, "sole_reader", SOLO, when="has_one_doorbell",
         do="remove_before_hook remove_after_hook release_doorbell",
         source="one task alone polls")
    edge(SLEEPY, "unused", IDLE, do="remove_before_hook remove_after_hook",
         source="a hook takes time in each pass")
    edge(SLEEPY, "stop", STOPPED, do="remove_before_hook remove_after_hook",
         source="the pump was cancelled")

    ignore((BUSY, SLEEPY), "needed", source="the hooks are there")
    ignore((BUSY, SLEEPY), "sole_reader",
           source="several doorbells, or one for which a thread waits")
    ignore(SLEEPY, "about_to_sleep", source="the second hook is there")
    ignore(BUSY, "awake_for_long", source="the second hook is gone")

    edge(SOLO, "needed", BUSY, do="solo.end restart_counts disarm_rnics add_before_hook",
         source="another task uses the pump, also while solo mode begins")
    ignore(SOLO, "sole_reader", source="one reader at a time")
    ignore(SOLO, "about_to_sleep awake_for_long unused",
           source="sent by a hook that still ran when a completion made a reader solo")
    edge(SOLO, "stop", STOPPED, do="solo.end", source="the pump was cancelled")
    # fmt: on
