"""The fabric of `tests.rnic.memory_rnic`, which tests of link groups use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rnic.memory_rnic import Fabric, Fate, MemoryRnic, PlainMemory, PlainQueuePair
from trio_smc.rnic.verbs import ProtectionDomain, QpState, RnicEvent, WcOpcode, WcStatus

RECV = int(WcOpcode.RECV)


class Pair:
    """Two RNICs with ``links`` pairs of connected queue pairs."""

    def __init__(self, *, links: int = 1, announces_end: bool = False) -> None:
        self.fabric = Fabric(announces_end=announces_end)
        self.rnics = [MemoryRnic(self.fabric), MemoryRnic(self.fabric)]
        for rnic in self.rnics:
            rnic.open(Path("/nonexistent"))
        self.qps: list[tuple[PlainQueuePair, PlainQueuePair]] = []
        self.pds: list[tuple[ProtectionDomain, ProtectionDomain]] = []
        for _ in range(links):
            ends = []
            pds = []
            for rnic in self.rnics:
                pd = rnic.alloc_pd()
                qp = rnic.create_qp(pd)
                assert isinstance(qp, PlainQueuePair)
                ends.append(qp)
                pds.append(pd)
            for end, other in (ends, reversed(ends)):
                end.to_init()
                end.to_rtr(gid=other.rnic.gid, qp_num=other.qp_num, psn=7, mtu=5)
                end.to_rts(psn=7)
                end.post_receive(8)
            self.qps.append((ends[0], ends[1]))
            self.pds.append((pds[0], pds[1]))

    def received(self) -> list[bytes]:
        return [each.data or b"" for each in self.rnics[1].poll() if each.opcode == RECV]

    def statuses(self) -> list[int]:
        return [each.status for each in self.rnics[0].poll()]


@pytest.mark.parametrize("start", [0, 1, 4096, 5000])
@pytest.mark.parametrize("length", [0, 1, 4000, 4096, 9000])
def test_zero_clears_exactly_its_range(start: int, length: int) -> None:
    memory = PlainMemory(16384, Fabric())
    memory.view[:] = b"x" * 16384
    memory.zero(start, length)
    assert bytes(memory.view) == b"x" * start + bytes(length) + b"x" * (16384 - start - length)
    memory.close()


def test_order_is_kept_within_a_queue_pair_only() -> None:
    pair = Pair(links=2)
    first, second = pair.qps[0][0], pair.qps[1][0]
    first.post_send(1, b"a1")
    second.post_send(2, b"b1")
    first.post_send(3, b"a2")
    second.execute()
    assert pair.fabric.deliver() == 2
    assert pair.received() == [b"b1", b"a1", b"a2"]
    for each in (b"1", b"2", b"3"):
        (second if each == b"2" else first).post_send(4, each)
    pair.fabric.deliver()
    assert pair.received() == [b"1", b"2", b"3"]  # by default in the order of posting


@pytest.mark.parametrize(
    ("fate", "arrives", "status"),
    [
        (Fate.DONE, True, WcStatus.SUCCESS),
        (Fate.LOST, False, WcStatus.RETRY_EXC_ERR),
        (Fate.UNACKNOWLEDGED, True, WcStatus.RETRY_EXC_ERR),
        (Fate.UNPLACED, False, WcStatus.SUCCESS),
    ],
)
def test_each_fate_of_a_request(fate: Fate, arrives: bool, status: WcStatus) -> None:
    pair = Pair()
    sender = pair.qps[0][0]
    sender.post_send(1, b"one")
    sender.post_send(2, b"two")
    sender.execute(fate)
    assert pair.received() == ([b"one"] if arrives else [])
    flushed = [WcStatus.WR_FLUSH_ERR] * 2  # the other request, and the receives
    assert pair.statuses() == ([status] if not status else [status, *flushed])
    assert (sender.state is QpState.ERR) is bool(status)
    sender.execute()
    assert pair.received() == ([b"two"] if fate is Fate.DONE else [])


@pytest.mark.parametrize("notices", [False, True])
def test_the_peer_notices_a_failed_queue_pair_if_announced(notices: bool) -> None:
    pair = Pair()
    here, there = pair.qps[0]
    here.fail(notices=notices)
    assert (there.state is QpState.ERR) is notices
    there.post_send(1, b"hello?")
    there.execute()
    assert there.state is QpState.ERR


def test_a_port_that_goes_down_and_comes_back() -> None:
    pair = Pair()
    here, there = pair.qps[0]
    events: list[RnicEvent] = []
    pair.rnics[0].on_event = events.append
    pair.rnics[0].port_down()
    pair.rnics[0].port_up()
    here.post_send(1, b"quick enough")
    here.execute()
    assert pair.received() == [b"quick enough"]
    pair.rnics[0].port_down()
    there.post_send(2, b"too late")
    there.execute()
    assert (here.state, there.state) == (QpState.RTS, QpState.ERR)
    pair.rnics[0].port_up()
    pair.rnics[0].port_down(fatal=True)
    assert here.state is QpState.ERR
    assert events == ["port-down", "port-up", "port-down", "port-up", "fatal"]


def test_a_request_over_a_cut_path_fails() -> None:
    pair = Pair()
    here, _ = pair.qps[0]
    pair.fabric.cut.add(frozenset(rnic.gid for rnic in pair.rnics))
    here.post_send(1, b"lost")
    here.execute()
    assert pair.received() == []
    assert here.state is QpState.ERR
