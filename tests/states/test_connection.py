"""The connection's table: it is complete, and follows the flows that the RFC describes."""

from __future__ import annotations

from itertools import product

import pytest

from tests.states.paths import Path, parts
from trio_smc.states.engine import Machine
from trio_smc.states.tables import CONNECTION

SENDS = {"send_done", "send_closed", "send_abort"}


class Connection:
    """A model whose guards are set by the test, and which records its actions."""

    def __init__(self, state: str, **facts: bool) -> None:
        self.facts = dict.fromkeys(CONNECTION.guards, False) | {"peer_rmbe_known": True} | facts
        self.log: list[str] = []
        self.machine = Machine(CONNECTION, self, state=state)

    def __getattr__(self, name: str) -> object:
        if name in CONNECTION.guards:
            return self.facts[name]
        if name in CONNECTION.actions or name in parts(CONNECTION.actions):
            return Path(name, self._act)
        raise AttributeError(name)

    def _act(self, name: str) -> None:
        self.log.append(name)
        if name == "send_closed":
            self.facts["sent_closed"] = True
        elif name.startswith("set_"):
            self.facts[name.removeprefix("set_")] = True

    def state_changed(self, old: str, new: str, event: str) -> None:
        assert old != new


def run(connection: Connection, *events: str) -> str:
    """Send the events and return "STATE: actions"."""
    for event in events:
        assert connection.machine.send(event)
    return f"{connection.machine.state}: {' '.join(connection.log)}"


def test_every_pair_is_listed_and_never_refused() -> None:
    assert len(CONNECTION.states) == 11
    assert len(CONNECTION.events) == 13
    assert CONNECTION.missing == ()
    for (state, event), row in CONNECTION.edges.items():
        read = sorted({guard.name for edge in row for guard in edge.guards})
        for values in product((False, True), repeat=len(read)):
            connection = Connection(state, **dict(zip(read, values, strict=True)))
            assert connection.machine.can(event), (state, event, connection.facts)


def test_only_closed_is_never_left() -> None:
    assert CONNECTION.final == {"CLOSED"}
    assert all(e.ignored for (s, _), row in CONNECTION.edges.items() if s == "CLOSED" for e in row)


def test_kernel_numbers() -> None:
    assert {CONNECTION.values[state] for state in CONNECTION.states} == {1, 2, 7, *range(20, 28)}


@pytest.mark.rfc("4.8.2/8", "A.4/17")
@pytest.mark.parametrize("state", ["PEERCLOSEWAIT1", "PEERCLOSEWAIT2", "PEERFINCLOSEWAIT"])
def test_nothing_is_sent_after_c(state: str) -> None:
    """A.4, C-bit: after C no edge sends a CDC message, whatever the other guards are."""
    for event in CONNECTION.events:
        for values in product((False, True), repeat=len(CONNECTION.guards)):
            facts = dict(zip(CONNECTION.guards, values, strict=True)) | {"sent_closed": True}
            connection = Connection(state, **facts)
            connection.machine.send(event)
            assert not SENDS & set(connection.log), (event, facts)


@pytest.mark.rfc("A.4/18")
@pytest.mark.parametrize("state", ["PEERABORTWAIT", "PROCESSABORT", "CLOSED"])
def test_nothing_is_sent_after_an_abort(state: str) -> None:
    edges = [e for (s, _), row in CONNECTION.edges.items() if s == state for e in row]
    assert not SENDS & {action for e in edges for action in e.actions}


RESET = "send_abort reset_tcp purge arm_abort_timer"
ABORT = "send_abort reset_tcp sender.drop_unsent arm_abort_timer"
ANSWER = "send_abort sender.drop_unsent fail_reset arm_abort_timer"


@pytest.mark.parametrize(
    ("state", "facts", "events", "outcome"),
    [
        # Path 3 of figure 22: this side closes first.
        ("INIT", "", "established", "ACTIVE: open_to_application"),
        ("ACTIVE", "", "close peer_closed", "CLOSED: send_closed arm_close_timer"),
        ("ACTIVE", "", "close peer_done peer_closed",
         "CLOSED: send_closed arm_close_timer"),
        ("ACTIVE", "", "shutdown_wr peer_done peer_closed close",
         "CLOSED: send_done set_got_closed send_closed"),
        ("ACTIVE", "unsent", "close", "ACTIVE: set_close_pending arm_close_timer"),
        ("ACTIVE", "close_pending", "all_sent", "PEERCLOSEWAIT1: send_closed"),
        ("ACTIVE", "eof_pending", "all_sent", "PEERCLOSEWAIT1: send_done"),
        ("ACTIVE", "unread", "close", f"PEERABORTWAIT: {RESET}"),
        # Path 4: the peer closes first.
        ("ACTIVE", "", "peer_done shutdown_wr close peer_closed",
         "CLOSED: send_done send_closed arm_close_timer"),
        ("ACTIVE", "", "peer_closed close",
         "CLOSED: set_got_closed send_closed"),
        ("ACTIVE", "writing", "peer_closed abort_sent",
         f"CLOSED: set_got_closed {ABORT} fail_refused"),
        # Figure 23.
        ("ACTIVE", "", "abort peer_abort", f"CLOSED: {ABORT} fail_aborted"),
        ("ACTIVE", "", "abort peer_done abort_timeout", f"CLOSED: {ABORT} fail_aborted"),
        ("ACTIVE", "", "peer_abort abort_sent", f"CLOSED: {ANSWER}"),
        ("PEERCLOSEWAIT1", "sent_closed", "peer_abort", "CLOSED: fail_reset"),
        ("PEERCLOSEWAIT2", "sent_closed", "abort",
         "PEERABORTWAIT: reset_tcp arm_abort_timer fail_aborted"),
        ("PEERFINCLOSEWAIT", "", "close close_timeout", "CLOSED: reset_tcp"),
        # A CDC message arrives before the rendezvous ends (3.5.2.4).
        ("INIT", "", "peer_done established", "APPCLOSEWAIT1: open_to_application"),
        ("INIT", "", "peer_closed established close",
         "CLOSED: set_got_closed open_to_application send_closed"),
        ("INIT", "", "peer_abort established", f"PROCESSABORT: {ANSWER} open_to_application"),
        # Linux V3: A cannot be sent without a link.
        ("ACTIVE", "", "links_lost", "CLOSED: reset_tcp sender.drop_unsent fail_links_lost"),
        ("APPCLOSEWAIT1", "", "links_lost", "CLOSED: reset_tcp sender.drop_unsent fail_links_lost"),
        # After C the reader misses nothing.
        ("APPCLOSEWAIT1", "got_closed", "links_lost", "CLOSED: reset_tcp sender.drop_unsent"),
        ("APPCLOSEWAIT2", "got_closed", "links_lost", "CLOSED: reset_tcp"),
        ("APPFINCLOSEWAIT", "", "links_lost", "CLOSED: reset_tcp"),
    ],
)  # fmt: skip
def test_flows(state: str, facts: str, events: str, outcome: str) -> None:
    connection = Connection(state, **dict.fromkeys(facts.split(), True))
    assert run(connection, *events.split()) == outcome


@pytest.mark.rfc("4.4.2/3")
def test_rmbe_conflict_ends_every_state_without_a_cdc() -> None:
    for state in CONNECTION.states:
        connection = Connection(state)
        connection.machine.send("rmbe_conflict")
        assert connection.machine.state == "CLOSED"
        assert not SENDS & set(connection.log)
