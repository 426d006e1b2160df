"""The world of the endings campaign: two connection cores, two links, a TCP connection, no I/O.

RMBEs are in real memory, each with a neighbour that must not change. An element is cleared when its
connection gives it back. A later write into it is a violation, unless its owner gave up waiting for
the peer (a timer, lost links, an RMBE conflict, an end before the peer's Confirm): then only 4.4.2
protects it.
"""

from __future__ import annotations

from tests.datapath.datapath_pair import FakeChannel, FakeHost
from trio_smc.datapath.connection import Connection
from trio_smc.datapath.rmb import Rmb, Rmbe
from trio_smc.rnic.memory import Memory

CLOSE_TIMEOUT = 60.0
# Events that end a connection without a message of the peer.
ALONE = frozenset({"close_timeout", "abort_timeout", "links_lost", "rmbe_conflict"})


class Broken(AssertionError):
    """A promise did not hold."""


class Host(FakeHost):
    """Owner of one connection and of its element."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.released = False
        self.gave_up = False
        self.peer: Host = self
        self.reset_coming = False
        self.trace: list[str] | None = None

    @property
    def tcp_ended(self) -> bool:
        return "reset_tcp" in self.calls or "close_tcp" in self.calls

    def note(self, text: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.name}: {text}")

    def reset_tcp(self, connection: Connection) -> None:
        super().reset_tcp(connection)
        self.peer.reset_coming = True
        self.note("resets TCP")

    def state_changed(self, connection: Connection, old: str, new: str, event: str) -> None:
        super().state_changed(connection, old, new, event)
        if event in ALONE or (new == "CLOSED" and not connection.peer_rmbe_known):
            self.gave_up = True
        self.note(f"{old} -> {new} by {event}")

    def connection_closed(self, connection: Connection) -> None:
        super().connection_closed(connection)
        self.released = True
        rmbe = connection.rmbe
        # The element that another connection gets must be all zero (4.4.1).
        rmbe.clear(rmbe.usable if connection.used is None else connection.used)
        if not self.gave_up and rmbe.data.tobytes().strip(b"\0"):
            raise Broken(f"{self.name}: bytes are left in the element, used was {connection.used}")
        self.note("gives the element back")


class Link(FakeChannel):
    """A link that can fail, and that knows the elements that must not be written any more."""

    def __init__(self) -> None:
        super().__init__()
        self.failed = False
        self.host: Host

    def deliver(self, count: int | None = None) -> int:
        done = 0
        while self.queue and not self.failed and (count is None or done < count):
            kind, _, number = self.queue[0]
            if kind == "write" and self.host.released and not self.host.gave_up:
                raise Broken(f"{self.host.name}: a write into the element it has given back")
            if kind == "cdc":
                self.host.note(f"sees CDC {number}")
            super().deliver(1)
            done += 1
        return done

    def complete(self, count: int | None = None) -> int:
        return 0 if self.failed else super().complete(count)


class World:
    """Two connections ``a`` (client) and ``b`` in `connections`, with links and a TCP connection.

    ``usable``: bytes of their rings. ``eye_catcher``: the layouts. ``early``: b does not know a's
    element yet, the Confirm is under way (3.5.2.4).
    """

    def __init__(
        self,
        usable: tuple[int, int],
        eye_catcher: tuple[bool, bool],
        *,
        chunks: bool,
        copy_limit: int,
        merge: bool,
        early: bool,
    ) -> None:
        self.memories: list[Memory] = []
        self.neighbours: list[Rmbe] = []
        self.flushes: list[object] = []
        self.hosts = (Host("a"), Host("b"))
        self.links = (Link(), Link())  # of a, of b
        self.established = [False, False]
        connections = []
        for side in (0, 1):
            first = 4 if eye_catcher[side] else 0
            size = usable[side] + first
            memory = Memory(-(-2 * size // 4096) * 4096)
            self.memories.append(memory)
            rmb = Rmb(memory, size, 2, eye_catcher=eye_catcher[side])
            rmb.elements[1].data[:] = b"\xa5" * usable[side]
            self.neighbours.append(rmb.elements[1])
            connections.append(
                Connection(
                    alert_token=0xA0 + side,
                    rmbe=rmb.elements[0],
                    host=self.hosts[side],
                    close_timeout=CLOSE_TIMEOUT,
                    chunks=chunks,
                    copy_limit=copy_limit,
                    flush_later=self.flushes.append if merge else None,
                )
            )
            if merge:
                connections[side].messenger.update_later = self.flushes.append
        self.connections = (connections[0], connections[1])
        for side in (0, 1):
            self.hosts[side].peer = self.hosts[1 - side]
            self.links[side].peer = self.connections[1 - side]
            self.links[side].host = self.hosts[1 - side]
        self.establish(0)
        if not early:
            self.establish(1)

    def establish(self, side: int) -> None:
        """The rendezvous is complete on this side."""
        self.established[side] = True
        own, other = self.connections[side], self.connections[1 - side]
        own.peer_known(
            alert_token=other.alert_token,
            element_size=other.rmbe.size,
            eye_catcher=bool(other.rmbe.first),
            channel=self.links[side],
            address=0,
            rkey=0,
        )
        own.established()

    def flush(self) -> None:
        """Flush, like the scheduler before it sleeps."""
        flushes, self.flushes[:] = list(self.flushes), []
        for flush in flushes:
            assert callable(flush)
            flush()

    def fire(self, side: int) -> bool:
        """Fire this side's timer; True if it had one."""
        host = self.hosts[side]
        if host.timer is None:
            return False
        host.timer = None
        host.note("its timer fires")
        self.connections[side].on_timer()
        return True

    def deliver_reset(self, side: int) -> bool:
        """Deliver TCP's RST; True if there was one, and the connection still exists."""
        host = self.hosts[side]
        if not host.reset_coming:
            return False
        host.reset_coming = False
        if host.tcp_ended:
            return False
        host.note("sees TCP reset")
        self.connections[side].tcp_reset()
        return True

    def lose_link(self) -> None:
        """Lose all links; each side notices it later."""
        for link in self.links:
            link.failed = True

    def notice_loss(self, side: int) -> bool:
        """Let this side notice the lost links; True if it had not noticed them before."""
        if not self.links[0].failed or "links lost" in self.hosts[side].calls:
            return False
        self.hosts[side].calls.append("links lost")
        self.connections[side].links_lost()
        return True

    def settle(self) -> None:
        """Deliver all messages in flight, but fire no timer."""
        while True:
            self.flush()
            moved = sum(link.deliver() + link.complete() for link in self.links)
            moved += sum(self.deliver_reset(side) + self.notice_loss(side) for side in (0, 1))
            if not self.established[1]:
                self.establish(1)
                moved += 1
            if not moved and not self.flushes:
                return

    def check_neighbours(self) -> None:
        """No write went beyond an element."""
        for rmbe in self.neighbours:
            if rmbe.data.tobytes().strip(b"\xa5"):
                raise Broken("a write into the neighbouring element")

    def close(self) -> None:
        """Unmap the memory."""
        for memory in self.memories:
            memory.close()
