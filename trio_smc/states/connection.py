"""The life of one SMC-R connection (RFC 7609, 4.8, figures 22 and 23, and Linux's INIT).

Theory of operation
-------------------
A state shows which side has ended which direction. A CDC message has three flags for this: D
(PeerDoneWriting), C (PeerConnectionClosed) and A (PeerConnAbort). After C nothing may follow,
neither an RDMA write nor a CDC message (A.4). Therefore C waits until all data is sent, and an
abort after C only resets the TCP connection. An RMBE is free when both sides have sent C, when A
was answered, or when a timer has expired.

==================  ==============================================================  ======  ======
state               meaning                                                         sent    got
==================  ==============================================================  ======  ======
INIT                RMBE assigned, rendezvous not complete                          -       -
ACTIVE              both directions open                                            -       -
PEERCLOSEWAIT1      this side ended first, the peer has not answered                D or C  -
PEERCLOSEWAIT2      this side ended first, the peer is done writing                 D or C  D
APPFINCLOSEWAIT     the peer has closed, this side has only shut down writing       D       C
APPCLOSEWAIT1       the peer ended first, this side is still open                   -       D or C
APPCLOSEWAIT2       the peer ended first, this side has shut down writing           D       D or C
PEERFINCLOSEWAIT    this side has closed, the peer has only shut down writing       C       D
PEERABORTWAIT       this side aborted, the peer has not confirmed                   A, RST  -
PROCESSABORT        this side's A is in flight, the peer will send nothing more     A       A or C
CLOSED              the RMBE may be used again                                      any     any
==================  ==============================================================  ======  ======

Guards are attributes of the model:

- ``unread``: the application has not read all bytes in this side's RMBE
- ``unsent``: there are bytes of the application whose RDMA writes, or the CDC messages that
  announce them, are not complete. A window update does not count: if it crossed the peer's C, 4A
  would reset the connection and lose data
- ``writing``: ``unsent``, or a task waits to send more, or the peer had not read everything when
  it sent C
- ``sent_closed``, ``got_closed``: C was sent, received
- ``eof_pending``, ``close_pending``: the application ended its side while ``unsent``
- ``peer_rmbe_known``: an Accept or Confirm has named the peer's RMBE

Actions are methods of the model. ``send_done``, ``send_closed`` and ``send_abort`` post a CDC
message with D, C or A. ``send_abort`` sends the event ``abort_sent`` when its message is complete,
or if there is no way to send it. ``send_closed`` makes ``sent_closed`` true. ``reset_tcp`` does
nothing if TCP has ended; while the peer may not have read SMC Confirm, RST waits until the state is
CLOSED. The ``fail_*`` actions end pending and later calls of the application with an error; the
first error stays. They leave unread data to the application, which reads it first, as over TCP,
and after it the peer's end, if that has arrived, or the error. (RFC 7609, 4.8.2 (2A) drops unread
data. Linux delivers it, over TCP and over SMC-R.) ``purge`` drops unread and unsent data, because
the application has closed. ``set_close_pending`` replaces ``eof_pending``. In
``state_changed``, when the state becomes CLOSED, the model frees the RMBE, cancels the timers and
ends TCP by FIN unless it was reset.

Of the flags in one CDC message, A is processed first, and makes the others irrelevant; then C,
which implies D; then D. Each flag sends its event only once, after the message's cursors and data
were applied. After each event, also if the edge is internal, the model wakes every waiting task.
The event ``abort`` also stands for a TCP RST from the peer, a corrupt eye catcher, an invalid CDC
message, a failed failover validation and data on the TCP connection.
"""

from __future__ import annotations

from statemachine import State

from trio_smc.states.chart import Chart, edge, ignore

# The forms of an abort.
_RESET = "send_abort reset_tcp purge arm_abort_timer"  # without an error: the application closed
_STOP = "send_abort reset_tcp sender.drop_unsent arm_abort_timer"
_ABORT = f"{_STOP} fail_aborted"
_REFUSED = f"set_got_closed {_STOP} fail_refused"  # 4A: the peer reads no more
# To the peer's A; the peer resets TCP.
_ANSWER = "send_abort sender.drop_unsent fail_reset arm_abort_timer"
_CONFLICT = "reset_tcp sender.drop_unsent fail_reset"

# The reasons of edges, mostly of choices that the RFC leaves open.
_REPEAT = "repeated or late: ignored"
_NEVER = "does not occur in this state"
_LINUX_KEEPS = "as in Linux's first patches (version 3): keep this state"
_EARLY = "4.8.2 (1A); choice: the peer may be ACTIVE and writing, so its answer is waited for"
_CLOSING = "choice: a timer, because the peer may never open its window (4.8.1, 3A)"
_NO_READER = "choice: data after close has no reader; TCP answers it with RST too"
_DONE = "choice: the peer sends nothing more, so no answer is waited for"
_AFTER_C = "A.4 (C-bit); choice: keep the RMBE until the peer answers or the timer ends"
_CROSSED = "choice: C crossed A; if C were ignored (4.8.2, 1A), only the timer would end the wait"
_UNKNOWN = "3.5.2.4, C.7.1; choice: a CDC message came before SMC Confirm, so no RMBE is known yet"
_UNANSWERED = "4.8.2 (2); without SMC Confirm, A has no address: the event comes again after it"
_ALL_GOT = "4.8.3; after C nothing more was to come, so the loss is no error for the reader"
_ALL_SENT = "4.8.3; choice: FIN, because the peer has C, and TCP would not reset it either"
_NOTE = "4.8.1 (note on stranded states)"
_STALLED = "4.8.2 (second bullet)"


class ConnectionChart(Chart):
    """One SMC-R connection. Its states have the numbers that the kernel's tools print."""

    INIT = State(initial=True, value=2)
    ACTIVE = State(value=1)
    PEERCLOSEWAIT1 = State(value=20)
    PEERCLOSEWAIT2 = State(value=21)
    APPFINCLOSEWAIT = State(value=24)
    APPCLOSEWAIT1 = State(value=22)
    APPCLOSEWAIT2 = State(value=23)
    PEERFINCLOSEWAIT = State(value=25)
    PEERABORTWAIT = State(value=26)
    PROCESSABORT = State(value=27)
    CLOSED = State(value=7)

    # fmt: off
    edge(INIT, "established", ACTIVE, do="open_to_application", source="4.8.1 (2)")
    ignore(INIT, "shutdown_wr", source=_NEVER)
    edge(INIT, "close", PEERABORTWAIT, when="peer_rmbe_known", do=_RESET, source=_EARLY)
    edge(INIT, "close", CLOSED, do="close_tcp", source="as in Linux; C.3, C.7.1")
    edge(INIT, "abort", PEERABORTWAIT, when="peer_rmbe_known", do=f"{_RESET} fail_handshake",
         source=_EARLY)
    edge(INIT, "abort", CLOSED, do="reset_tcp fail_handshake", source="as in Linux; C.3, C.7.1")
    ignore(INIT, "all_sent", source=_NEVER)
    edge(INIT, "peer_done", APPCLOSEWAIT1, source="3.5.2.4; as in Linux")
    edge(INIT, "peer_closed", APPCLOSEWAIT1, do="set_got_closed",
         source="3.5.2.4; as in Linux")
    ignore(INIT, "peer_abort", when="!peer_rmbe_known", source=_UNANSWERED)
    edge(INIT, "peer_abort", PROCESSABORT, do=_ANSWER, source="4.8.2 (2, any state)")
    ignore(INIT, "abort_sent close_timeout abort_timeout", source=_NEVER)
    edge(INIT, "links_lost", CLOSED, do="reset_tcp fail_links_lost", source="C.7.1, 4.8.3")
    edge(INIT, "rmbe_conflict", CLOSED, do="reset_tcp sender.drop_unsent fail_handshake",
         source="4.4.2")

    ignore(ACTIVE, "established", source=_REPEAT)
    edge(ACTIVE, "shutdown_wr", PEERCLOSEWAIT1, when="!unsent", do="send_done", source="4.8.1 (3A)")
    edge(ACTIVE, "shutdown_wr", do="set_eof_pending", source="4.8.1 (3A, pending close)")
    edge(ACTIVE, "close", PEERABORTWAIT, when="unread", do=_RESET, source="4.8.1 (3A), 4.8.2 (1A)")
    edge(ACTIVE, "close", when="unsent", do="set_close_pending arm_close_timer", source=_CLOSING)
    edge(ACTIVE, "close", PEERCLOSEWAIT1, do="send_closed arm_close_timer", source="4.8.1 (3A)")
    edge(ACTIVE, "all_sent", PEERABORTWAIT, when="close_pending unread", do=_RESET,
         source=_NO_READER)
    edge(ACTIVE, "all_sent", PEERCLOSEWAIT1, when="close_pending", do="send_closed",
         source="4.8.1 (3A, last sentence)")
    edge(ACTIVE, "all_sent", PEERCLOSEWAIT1, when="eof_pending", do="send_done",
         source="4.8.1 (3A, last sentence)")
    ignore(ACTIVE, "all_sent", source="nothing is pending")
    edge(ACTIVE, "peer_done", APPCLOSEWAIT1, source="4.8.1 (4A)")
    edge(ACTIVE, "peer_closed", PROCESSABORT, when="writing", do=_REFUSED,
         source=f"4.8.1 (4A); {_DONE}")
    edge(ACTIVE, "peer_closed", APPCLOSEWAIT1, do="set_got_closed",
         source="4.8.1 (4A)")
    edge(ACTIVE, "peer_abort", PROCESSABORT, do=_ANSWER, source="4.8.2 (2, 2A, 2B)")
    edge(ACTIVE, "abort", PEERABORTWAIT, do=_ABORT, source="4.8.2 (1A)")
    ignore(ACTIVE, "abort_sent abort_timeout", source=_NEVER)
    edge(ACTIVE, "close_timeout", PEERABORTWAIT, when="close_pending", do=_RESET, source=_STALLED)
    ignore(ACTIVE, "close_timeout", source=_NEVER)
    edge(ACTIVE, "links_lost", CLOSED, do="reset_tcp sender.drop_unsent fail_links_lost",
         source="4.8.3; as in Linux's first patches (version 3): no A without a link")
    edge(ACTIVE, "rmbe_conflict", CLOSED, do=_CONFLICT, source="4.4.2")

    _ended_first = (PEERCLOSEWAIT1, PEERCLOSEWAIT2)
    ignore(_ended_first, "established shutdown_wr all_sent", source=_REPEAT)
    ignore(_ended_first, "close", when="sent_closed", source=_LINUX_KEEPS)
    edge(_ended_first, "close", PEERABORTWAIT, when="unread", do=_RESET,
         source="4.8.1 (3A, check at close)")
    edge(_ended_first, "close", do="send_closed arm_close_timer",
         source="not in the RFC (3D is only the case after C came); as in Linux")
    edge(PEERCLOSEWAIT1, "peer_done", PEERCLOSEWAIT2, source="4.8.1 (3B)")
    ignore(PEERCLOSEWAIT2, "peer_done", source=_REPEAT)
    edge(_ended_first, "peer_closed", CLOSED, when="sent_closed", source="4.8.1 (3C)")
    edge(_ended_first, "peer_closed", APPFINCLOSEWAIT, do="set_got_closed",
         source="4.8.1 (3C, 3D)")
    edge(_ended_first, "peer_abort", CLOSED, when="sent_closed", do="fail_reset",
         source="figure 23: A is answered before C only")
    edge(_ended_first, "peer_abort", PROCESSABORT, do=_ANSWER, source="4.8.2 (2A, 2B)")
    edge(_ended_first, "abort", PEERABORTWAIT, when="sent_closed",
         do="reset_tcp arm_abort_timer fail_aborted", source=_AFTER_C)
    edge(_ended_first, "abort", PEERABORTWAIT, do=_ABORT, source="4.8.2 (1A)")
    ignore(_ended_first, "abort_sent abort_timeout", source=_NEVER)
    edge(_ended_first, "close_timeout", CLOSED, do="reset_tcp", source=_NOTE)
    edge(_ended_first, "links_lost", CLOSED, when="closed_arrived", source=_ALL_SENT)
    edge(_ended_first, "links_lost", CLOSED, when="sent_closed", do="reset_tcp", source="4.8.3")
    edge(_ended_first, "links_lost", CLOSED, do="reset_tcp fail_links_lost", source="4.8.3")
    edge(_ended_first, "rmbe_conflict", CLOSED, do=_CONFLICT, source="4.4.2")

    ignore(APPFINCLOSEWAIT, "established shutdown_wr all_sent peer_done peer_closed",
           source=_REPEAT)
    edge(APPFINCLOSEWAIT, "close", PROCESSABORT, when="unread", do=_RESET,
         source=f"4.8.1 (3A, check at close); {_DONE}")
    edge(APPFINCLOSEWAIT, "close", CLOSED, do="send_closed", source="4.8.1 (3D)")
    edge(APPFINCLOSEWAIT, "peer_abort", PROCESSABORT, do=_ANSWER, source="4.8.2 (2A, 2B)")
    edge(APPFINCLOSEWAIT, "abort", PROCESSABORT, do=_ABORT, source=f"4.8.2 (1A); {_DONE}")
    ignore(APPFINCLOSEWAIT, "abort_sent close_timeout abort_timeout", source=_NEVER)
    edge(APPFINCLOSEWAIT, "links_lost", CLOSED, do="reset_tcp", source=_ALL_GOT)
    edge(APPFINCLOSEWAIT, "rmbe_conflict", CLOSED, do=_CONFLICT, source="4.4.2")

    # Entered from INIT if a CDC message came before the end of the rendezvous. The event
    # established then comes in this state.
    edge(APPCLOSEWAIT1, "established", do="open_to_application", source="4.8.1 (2), 3.5.2.4")
    edge(APPCLOSEWAIT1, "shutdown_wr", APPCLOSEWAIT2, when="!unsent", do="send_done",
         source="4.8.1 (4B)")
    edge(APPCLOSEWAIT1, "shutdown_wr", do="set_eof_pending", source="4.8.1 (3A, pending close)")
    edge(APPCLOSEWAIT1, "close", CLOSED, when="!peer_rmbe_known", do="reset_tcp purge",
         source=_UNKNOWN)
    edge(APPCLOSEWAIT1, "close", PROCESSABORT, when="unread got_closed", do=_RESET,
         source=f"4.8.1 (3A, check at close); {_DONE}")
    edge(APPCLOSEWAIT1, "close", PEERABORTWAIT, when="unread", do=_RESET,
         source="4.8.1 (3A, check at close), 4.8.2 (1A)")
    edge(APPCLOSEWAIT1, "close", when="unsent", do="set_close_pending arm_close_timer",
         source=_CLOSING)
    edge(APPCLOSEWAIT1, "close", CLOSED, when="got_closed", do="send_closed", source="4.8.1 (4C)")
    edge(APPCLOSEWAIT1, "close", PEERFINCLOSEWAIT, do="send_closed arm_close_timer",
         source="4.8.1 (4C)")
    edge(APPCLOSEWAIT1, "all_sent", CLOSED, when="close_pending got_closed", do="send_closed",
         source="4.8.1 (4C)")
    edge(APPCLOSEWAIT1, "all_sent", PEERFINCLOSEWAIT, when="close_pending", do="send_closed",
         source="4.8.1 (4C)")
    edge(APPCLOSEWAIT1, "all_sent", APPCLOSEWAIT2, when="eof_pending", do="send_done",
         source="4.8.1 (4B)")
    ignore(APPCLOSEWAIT1, "all_sent", source="nothing is pending")
    ignore(APPCLOSEWAIT1, "peer_done", source=_REPEAT)
    edge(APPCLOSEWAIT1, "peer_closed", PROCESSABORT, when="writing", do=_REFUSED,
         source=f"4.8.1 (4A); {_DONE}")
    edge(APPCLOSEWAIT1, "peer_closed", do="set_got_closed", source="not in the RFC; as in Linux")
    ignore(APPCLOSEWAIT1, "peer_abort", when="!peer_rmbe_known", source=_UNANSWERED)
    edge(APPCLOSEWAIT1, "peer_abort", PROCESSABORT, do=_ANSWER, source="4.8.2 (2A, 2B)")
    edge(APPCLOSEWAIT1, "abort", CLOSED, when="!peer_rmbe_known",
         do="reset_tcp sender.drop_unsent fail_handshake", source=_UNKNOWN)
    edge(APPCLOSEWAIT1, "abort", PROCESSABORT, when="got_closed", do=_ABORT,
         source=f"4.8.2 (1A); {_DONE}")
    edge(APPCLOSEWAIT1, "abort", PEERABORTWAIT, do=_ABORT, source="4.8.2 (1A)")
    ignore(APPCLOSEWAIT1, "abort_sent abort_timeout", source=_NEVER)
    edge(APPCLOSEWAIT1, "close_timeout", PEERABORTWAIT, when="close_pending", do=_ABORT,
         source=_STALLED)
    ignore(APPCLOSEWAIT1, "close_timeout", source=_NEVER)
    edge(APPCLOSEWAIT1, "links_lost", CLOSED, when="got_closed", do="reset_tcp sender.drop_unsent",
         source=_ALL_GOT)
    edge(APPCLOSEWAIT1, "links_lost", CLOSED, do="reset_tcp sender.drop_unsent fail_links_lost",
         source="4.8.3")
    edge(APPCLOSEWAIT1, "rmbe_conflict", CLOSED, do=_CONFLICT, source="4.4.2")

    ignore(APPCLOSEWAIT2, "established shutdown_wr all_sent peer_done", source=_REPEAT)
    edge(APPCLOSEWAIT2, "close", PROCESSABORT, when="unread got_closed", do=_RESET,
         source=f"4.8.1 (3A, check at close); {_DONE}")
    edge(APPCLOSEWAIT2, "close", PEERABORTWAIT, when="unread", do=_RESET,
         source="4.8.1 (3A, check at close)")
    edge(APPCLOSEWAIT2, "close", CLOSED, when="got_closed", do="send_closed", source="4.8.1 (4C)")
    edge(APPCLOSEWAIT2, "close", PEERFINCLOSEWAIT, do="send_closed arm_close_timer",
         source="4.8.1 (4C)")
    edge(APPCLOSEWAIT2, "peer_closed", do="set_got_closed", source="4.8.1 (required by 4C)")
    edge(APPCLOSEWAIT2, "peer_abort", PROCESSABORT, do=_ANSWER, source="4.8.2 (2A, 2B)")
    edge(APPCLOSEWAIT2, "abort", PROCESSABORT, when="got_closed", do=_ABORT,
         source=f"4.8.2 (1A); {_DONE}")
    edge(APPCLOSEWAIT2, "abort", PEERABORTWAIT, do=_ABORT, source="4.8.2 (1A)")
    ignore(APPCLOSEWAIT2, "abort_sent close_timeout abort_timeout", source=_NEVER)
    edge(APPCLOSEWAIT2, "links_lost", CLOSED, when="got_closed", do="reset_tcp", source=_ALL_GOT)
    edge(APPCLOSEWAIT2, "links_lost", CLOSED, do="reset_tcp fail_links_lost", source="4.8.3")
    edge(APPCLOSEWAIT2, "rmbe_conflict", CLOSED, do=_CONFLICT, source="4.4.2")

    ignore(PEERFINCLOSEWAIT, "established shutdown_wr all_sent peer_done", source=_REPEAT)
    ignore(PEERFINCLOSEWAIT, "close", source=_LINUX_KEEPS)
    edge(PEERFINCLOSEWAIT, "peer_closed", CLOSED, source="4.8.1 (4D)")
    edge(PEERFINCLOSEWAIT, "peer_abort", CLOSED, source="figure 23: A is answered before C only")
    edge(PEERFINCLOSEWAIT, "abort", PEERABORTWAIT, do="reset_tcp arm_abort_timer", source=_AFTER_C)
    ignore(PEERFINCLOSEWAIT, "abort_sent abort_timeout", source=_NEVER)
    edge(PEERFINCLOSEWAIT, "close_timeout", CLOSED, do="reset_tcp", source=_NOTE)
    edge(PEERFINCLOSEWAIT, "links_lost", CLOSED, do="reset_tcp", source="4.8.3")
    edge(PEERFINCLOSEWAIT, "rmbe_conflict", CLOSED, do=_CONFLICT, source="4.4.2")

    ignore(PEERABORTWAIT, "established shutdown_wr close all_sent peer_done abort close_timeout",
           source="4.8.2 (1A, any other activity is ignored)")
    edge(PEERABORTWAIT, "peer_closed", CLOSED, source=_CROSSED)
    edge(PEERABORTWAIT, "peer_abort", CLOSED, source="4.8.2 (1B)")
    ignore(PEERABORTWAIT, "abort_sent", source="4.8.2 (1B waits for the peer)")
    edge(PEERABORTWAIT, "abort_timeout", CLOSED, source="4.8.2 (1), then 4.4.2 protects the RMBE")
    edge(PEERABORTWAIT, "links_lost", CLOSED, source="4.8.3")
    edge(PEERABORTWAIT, "rmbe_conflict", CLOSED, do="reset_tcp", source="4.4.2")

    # As over TCP, the application gets a connection that the peer has aborted, and reads its data.
    edge(PROCESSABORT, "established", do="open_to_application", source="4.8.1 (2), 3.5.2.4")
    ignore(PROCESSABORT, "shutdown_wr close all_sent", source=_REPEAT)
    ignore(PROCESSABORT, "peer_done peer_closed peer_abort abort close_timeout", source=_REPEAT)
    edge(PROCESSABORT, "abort_sent", CLOSED, source="4.8.2 (2B)")
    edge(PROCESSABORT, "abort_timeout", CLOSED, do="reset_tcp",
         source="choice: a send that never completes")
    edge(PROCESSABORT, "links_lost", CLOSED, source="4.8.3")
    edge(PROCESSABORT, "rmbe_conflict", CLOSED, do="reset_tcp", source="4.4.2")

    ignore(CLOSED, "established shutdown_wr close all_sent peer_done peer_closed peer_abort abort",
           source="4.8.1 (1)")
    ignore(CLOSED, "abort_sent close_timeout abort_timeout links_lost rmbe_conflict",
           source="4.8.1 (1)")
    # fmt: on
