"""Many queue pairs on one software RNIC: idle ones do not slow down busy ones."""

from __future__ import annotations

import errno
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rnic.contract import (
    HAS_RINGS,
    End,
    clear_readiness,
    connect,
    got,
    make_end,
    needs_rings,
    sleep_on,
    until,
    use_completion_fd,
)
from tests.rnic.packets import receive
from tests.rnic.test_soft_hostile import ARMED, HEAD, Attacker, state
from trio_smc.rnic.soft import peer_sockets
from trio_smc.rnic.soft.device import SoftRnic
from trio_smc.rnic.soft.messages import (
    DOORBELL,
    DOORBELL_READ_SIZE,
    Doorbell,
    Revoke,
    open_doorbell_untrusted,
    take_doorbell,
)
from trio_smc.rnic.soft.queue_pair import SoftQueuePair
from trio_smc.rnic.verbs import QpState

MANY = 40
FEW = 8
DOORBELLS = 4 if HAS_RINGS else 0
POLLS = 600  # more than twice the idle polls after which a ring enters interrupt mode


@pytest.fixture(params=["thread", "trio"])
def rnics(runtime_directory: Path, request: pytest.FixtureRequest) -> Iterator[list[SoftRnic]]:
    """The RNICs of a server and a client; "trio": completions have a descriptor of their own."""
    made = [SoftRnic("server"), SoftRnic("client")]
    for rnic in made:
        rnic.open(runtime_directory / "smc")
        if request.param == "trio":
            use_completion_fd(rnic)
    yield made
    for rnic in made:
        rnic.close()


@pytest.fixture
def pairs(rnics: list[SoftRnic]) -> Iterator[list[tuple[End, End]]]:
    made = [(make_end(rnics[0]), make_end(rnics[1])) for _ in range(MANY)]
    for pair in made:
        connect(*pair)
    yield made
    for pair in made:
        for end in pair:
            end.close()


def poll_idle(rnic: SoftRnic) -> None:
    for _ in range(POLLS):
        assert rnic.poll() == []


def count_polled(rnic: SoftRnic) -> int:
    return sum(not qp.ring.interrupt_mode for qp in rnic.queue_pairs())


def test_idle_queue_pairs_are_not_polled(
    rnics: list[SoftRnic], pairs: list[tuple[End, End]]
) -> None:
    assert count_polled(rnics[0]) == MANY
    poll_idle(rnics[0])
    assert count_polled(rnics[0]) == 0
    # A queue pair whose peer sends a message is polled again.
    for server, client in pairs:
        client.qp.post_send(1, b"x")
        until(got(server, 1), server, client)
        assert isinstance(server.qp, SoftQueuePair)
        assert not server.qp.ring.interrupt_mode
    poll_idle(rnics[0])
    assert count_polled(rnics[0]) <= FEW


def test_no_message_is_lost_while_queue_pairs_become_idle(
    rnics: list[SoftRnic], pairs: list[tuple[End, End]], rng: random.Random
) -> None:
    """All messages arrive, in any order of polls, sleeps and messages."""
    sent = dict.fromkeys(range(MANY), 0)
    for _ in range(3000):
        which = rng.randrange(MANY) if rng.random() < 0.2 else 0
        client = pairs[which][1]
        if client.qp.state is QpState.RTS and sent[which] < 60:
            client.qp.post_send(1 + sent[which], b"x")
            sent[which] += 1
        for completion in rnics[0].poll():
            for end, _ in pairs:
                if end.qp.qp_num == completion.qp_num:
                    end.take(completion)
        if rng.random() < 0.1 and rnics[0].arm():
            rnics[0].disarm()
    everyone = [end for pair in pairs for end in pair]
    until(lambda: all(len(pairs[i][0].received) == sent[i] for i in sent), *everyone)
    assert sum(sent.values()) > 200


def test_the_end_of_an_idle_queue_pair_is_noticed(
    rnics: list[SoftRnic], pairs: list[tuple[End, End]]
) -> None:
    poll_idle(rnics[0])
    server, client = pairs[3]
    client.qp.post_send(1, b"the last")
    client.qp.to_err()
    until(lambda: bool(server.flushed), server)
    assert server.received == [b"the last"]
    assert state(server.qp) is QpState.ERR


@needs_rings
@pytest.mark.parametrize("doorbell", [False, True])
def test_a_hostile_peer_delays_only_itself(
    rnics: list[SoftRnic], pairs: list[tuple[End, End]], runtime_directory: Path, *, doorbell: bool
) -> None:
    """The peer rings continuously, overwrites the word ARMED, and finally stops ringing."""
    if doorbell:  # close one pair, so that a doorbell is free for this peer
        for end in pairs.pop(0):
            end.close()
    victim, bystanders = make_end(rnics[0]), pairs[: FEW + 2]
    with Attacker(runtime_directory / "smc") as attacker:
        sock = attacker.connect(victim)
        assert len(attacker.doorbells) == doorbell
        over = threading.Event()

        def flood() -> None:
            while not over.is_set():
                for value in (0, 1, (1 << 64) - 1):
                    attacker.word(ARMED, value)
                try:
                    sock.send(DOORBELL)
                    for write_end in attacker.doorbells:
                        os.write(write_end, DOORBELL)
                except BlockingIOError:
                    time.sleep(0)

        flooder = threading.Thread(target=flood)
        flooder.start()
        try:
            for number in range(1, 31):
                for server, client in bystanders:
                    client.qp.post_send(number, b"x")
                    until(got(server, number), server, client, seconds=10)
        finally:
            over.set()
            flooder.join()
        # After all rings were read, the other queue pairs become idle, too.
        sleeper = sleep_on(rnics[0])
        while sleeper.poll(0):
            clear_readiness(rnics[0])
        poll_idle(rnics[0])
        assert isinstance(victim.qp, SoftQueuePair)
        assert victim.qp.ring.interrupt_mode
        # Messages of this peer wait until it rings; those of others do not.
        attacker.word(ARMED, 0)
        attacker.word(HEAD, 1)
        poll_idle(rnics[0])
        server, client = pairs[-1]
        client.qp.post_send(1, b"x")
        until(got(server, 1), server, client, seconds=10)
        assert victim.received == []
        sock.send(DOORBELL)
        until(got(victim, 1), victim)
    victim.close()


def test_a_queue_pair_keeps_few_descriptors(rnics: list[SoftRnic]) -> None:
    """Each end has a socket, and a memfd for its region, which later peers may get.

    The ends of the first few pairs also have a doorbell and the write end of the peer's doorbell.
    """

    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    made = [(make_end(rnics[0]), make_end(rnics[1])) for _ in range(8)]
    for pair in made:
        connect(*pair)
        pair[0].qp.post_send(1, b"there")
        until(got(pair[1], 1), *pair)
    assert count() - before == len(made) * 2 * 2 + DOORBELLS * 2 * 2
    for pair in made:
        for end in pair:
            end.close()
    assert count() == before


@pytest.mark.parametrize("rnics", ["thread"], indirect=True)
def test_both_ends_may_dial_at_once(rnics: list[SoftRnic], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = make_end(rnics[0]), make_end(rnics[1])
    with monkeypatch.context() as patch:
        for rnic in rnics:
            patch.setattr(rnic, "poll_sockets", lambda: None)  # no end accepts yet
        a.qp.post_receive(5)
        b.qp.post_receive(5)
        a.qp.to_rtr(gid=b.rnic.gid, qp_num=b.qp.qp_num, psn=9, mtu=5)
        b.qp.to_rtr(gid=a.rnic.gid, qp_num=a.qp.qp_num, psn=7, mtu=5)
    a.qp.to_rts(psn=7)
    b.qp.to_rts(psn=9)
    for _ in range(3):
        a.qp.post_send(1, b"there")
        b.qp.post_send(1, b"back")
        until(lambda: len(a.sent) == len(b.received) and len(b.sent) == len(a.received), a, b)
    assert len(a.received) == len(b.received) == 3
    a.close()
    until(lambda: bool(b.flushed), b)
    b.close()


@pytest.mark.pure
@pytest.mark.parametrize("why", ["another user", "no /proc", "no descriptors"])
def test_sockets_replace_missing_doorbells(
    rnics: list[SoftRnic], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Without a doorbell, a packet on the socket wakes the peer."""

    def fail(*_: object) -> int:
        raise OSError(errno.EMFILE, "there is none")

    if why == "another user":
        monkeypatch.setattr(peer_sockets, "is_same_user", lambda _: False)
    elif why == "no /proc":
        monkeypatch.setattr(peer_sockets, "open_doorbell_untrusted", fail)
    else:
        monkeypatch.setattr(os, "pipe2", fail)
    server, client = make_end(rnics[0]), make_end(rnics[1])
    connect(server, client)
    for number in range(1, 4):
        poll_idle(rnics[0])
        clear_readiness(rnics[0])
        assert rnics[0].arm()
        sleeper = sleep_on(rnics[0])
        assert not sleeper.poll(0)
        client.qp.post_send(number, b"x")
        assert sleeper.poll(1000)
        until(got(server, number), server, client)
    for end in server, client:
        end.close()


def test_a_write_end_outlives_its_doorbell() -> None:
    """A write must not raise SIGPIPE, because a process may not handle it."""
    doorbell = Doorbell()
    write_end = open_doorbell_untrusted(doorbell.write_fd)
    doorbell.close_write_end()
    with pytest.raises(BlockingIOError):
        os.read(doorbell.fd, DOORBELL_READ_SIZE)
    os.write(write_end, DOORBELL)
    os.write(write_end, DOORBELL)
    assert os.read(doorbell.fd, DOORBELL_READ_SIZE) == 2 * DOORBELL
    doorbell.close()
    assert os.write(write_end, DOORBELL) == 1
    os.close(write_end)


def test_take_doorbell_takes_only_a_lone_doorbell() -> None:
    """Other packets stay in the socket, because they may carry descriptors."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setblocking(False)
        assert not take_doorbell(ours)
        theirs.send(DOORBELL)
        assert take_doorbell(ours)
        assert receive(ours) is None
        theirs.send(DOORBELL)
        theirs.send(Revoke(rkey=7).encode())
        assert not take_doorbell(ours)
        assert receive(ours) == (DOORBELL, [])
        assert not take_doorbell(ours)
        assert receive(ours) == (Revoke(rkey=7).encode(), [])
        theirs.close()
        assert not take_doorbell(ours)
