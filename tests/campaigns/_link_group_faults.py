"""Faults of the links and RNICs of two stacks."""

from __future__ import annotations

import random
from collections import Counter

from tests.rendezvous.links.link_group_rules import is_sound
from tests.rendezvous.links.link_group_world import GroupWorld, Stream
from tests.rendezvous.rendezvous_pair import Side
from tests.rnic.memory_rnic import Fate, MemoryRnic, PlainQueuePair
from trio_smc.rendezvous.links.group import LinkGroup

__all__ = ["FAULTS", "GENTLE", "Faults"]

FAULTS = (
    "lose", "unacknowledged", "unplaced", "fail", "fail_noticed", "cut", "port_down", "port_flap",
    "fatal", "new_rnic", "drain", "delete_link", "terminate", "no_memory", "no_queue_pairs",
    "stall", "abort", "unanswered",
)  # fmt: skip
GENTLE = (
    "lose", "unacknowledged", "fail", "fail_noticed", "cut", "port_down", "port_flap", "fatal",
    "new_rnic", "drain", "delete_link", "unanswered",
)  # fmt: skip
"""Faults that a group with symmetric links survives, one at a time."""


class Faults:
    """Injects faults, one by one.

    Attributes:
      rng: chooses to whom.
      world: the two stacks.
      gentle: inject a fault only if another link, known to both sides, shares no RNIC with it.
      faults: how often each kind happened.
    """

    rng: random.Random
    world: GroupWorld
    gentle: bool
    faults: Counter[str]

    def stream(self) -> Stream | None:
        """Any stream."""
        streams = self.world.streams
        return self.rng.choice(streams) if streams else None

    def fault(self, kind: str) -> None:
        """Inject a fault of this kind, if it is possible now."""
        if self.gentle and not is_sound(self.world):
            return
        if getattr(self, f"_fault_{kind}")():
            self.world.trace(kind)
            self.faults[kind] += 1

    def _queue_pair(self) -> PlainQueuePair | None:
        pairs = self.world.queue_pairs()
        return self.rng.choice(pairs) if pairs else None

    def _side(self) -> Side:
        return self.rng.choice(self.world.sides)

    def _rnic(self) -> MemoryRnic:
        return self.rng.choice(self._side().rnics)

    def _doom(self, fate: Fate) -> bool:
        ready = self.world.deliverable()
        self.world.fate = fate
        if self.gentle and ready:
            self.world.execute(self.rng.choice(ready))
        elif self.gentle:
            self.world.fate = Fate.DONE
        return bool(ready) or not self.gentle

    def _fault_lose(self) -> bool:
        return self._doom(Fate.LOST)

    def _fault_unacknowledged(self) -> bool:
        return self._doom(Fate.UNACKNOWLEDGED)

    def _fault_unplaced(self) -> bool:
        return self._doom(Fate.UNPLACED)

    def _fault_fail(self) -> bool:
        qp = self._queue_pair()
        if qp is not None:
            qp.fail(notices=False)
        return qp is not None

    def _fault_fail_noticed(self) -> bool:
        qp = self._queue_pair()
        if qp is not None:
            qp.fail(notices=True)
        return qp is not None

    def _fault_cut(self) -> bool:
        path = frozenset(self.rng.choice(side.rnics).gid for side in self.world.sides)
        self.world.fabric.cut ^= {path}
        return True

    def _fault_port_down(self) -> bool:
        self._rnic().port_down()
        return True

    def _fault_fatal(self) -> bool:
        self._rnic().port_down(fatal=True)
        return True

    def _fault_port_flap(self) -> bool:
        rnic = self._rnic()
        if rnic.port_active:
            rnic.port_down()
        else:
            rnic.port_up()
        return True

    def _fault_new_rnic(self) -> bool:
        side = self._side()
        if len(side.rnics) < 8:
            side.add_rnic()
            return True
        return False

    def _fault_drain(self) -> bool:
        side = self._side()
        rnic = self.rng.choice(side.rnics)
        if side.stack.rnic_set.is_drained(rnic):
            side.stack.rnic_set.undrain(rnic)
        else:
            side.stack.rnic_set.drain(rnic)
        return True

    def _group(self) -> LinkGroup | None:
        groups = self._side().groups
        return self.rng.choice(groups) if groups else None

    def _fault_delete_link(self) -> bool:
        group = self._group()
        if group is None or not group.links:
            return False
        group.delete_link(self.rng.choice(list(group.links)), orderly=self.rng.random() < 0.5)
        return True

    def _fault_terminate(self) -> bool:
        group = self._group()
        if group is not None:
            group.terminate()
        return group is not None

    def _fault_no_memory(self) -> bool:
        rnic = self._rnic()
        rnic.no_memory = not rnic.no_memory
        return True

    def _fault_no_queue_pairs(self) -> bool:
        rnic = self._rnic()
        rnic.most_qps = len(rnic.qps) + self.rng.choice((0, 1)) if rnic.most_qps is None else None
        return True

    def _fault_unanswered(self) -> bool:
        """There is no answer for the address of an RNIC, for a while or until the end."""
        self.world.fabric.looks[self._rnic().gid] = self.rng.choice((1, 5, 15, 100, 1 << 30))
        return True

    def _fault_stall(self) -> bool:
        self.world.stall()
        return True

    def _fault_abort(self) -> bool:
        stream = self.stream()
        if stream is not None:
            stream.abort(self.rng.randrange(2))
        return stream is not None
