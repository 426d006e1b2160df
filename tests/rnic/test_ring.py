"""The end of a receive ring while its sender sends, with their steps in random orders."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.timing import PATIENCE
from trio_smc.rnic.memory import PeerMemory
from trio_smc.rnic.soft import ring
from trio_smc.rnic.soft.ring import CLOSED, PORT_DOWN, ReceiveRing, SendRing, Sent
from trio_smc.rnic.verbs import PlainCompletion
from trio_smc.rnic.words import exchange

SCHEDULES = 1000


class Turns:
    """Lets two threads run step by step, in a random order."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._may = [threading.Semaphore(0), threading.Semaphore(0)]
        self._left = {0, 1}

    def _next(self) -> None:
        if self._left:
            self._may[self._rng.choice(sorted(self._left))].release()

    def step(self, side: int) -> None:
        """End a step of a side, and let a random side continue; no-op after both sides' ends."""
        if not self._left:
            return
        self._next()
        assert self._may[side].acquire(timeout=PATIENCE)

    def run(self, *sides: Callable[[], None]) -> None:
        def whole(side: int) -> None:
            assert self._may[side].acquire(timeout=PATIENCE)
            sides[side]()
            self._left.discard(side)
            self._next()

        threads = [threading.Thread(target=whole, args=(side,)) for side in (0, 1)]
        for thread in threads:
            thread.start()
        self._next()
        for thread in threads:
            thread.join()


class Words:
    """The words of a ring for one side; each access ends a step of that side."""

    def __init__(self, words: Any, turns: Turns, side: int) -> None:
        self._words, self._turns, self._side = words, turns, side

    def __getitem__(self, index: int) -> Any:
        self._turns.step(self._side)
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._turns.step(self._side)
        self._words[index] = value

    def exchange(self, index: int, value: int) -> None:
        self._turns.step(self._side)
        exchange(self._words, index, value)


class SteppedMemory:
    """The memory of a ring for its sender; each access to the words ends a step of side 1."""

    def __init__(self, memory: PeerMemory, turns: Turns) -> None:
        self._memory, self._turns = memory, turns

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def words(self, start: int, length: int) -> Any:
        words = self._memory.words(start, length)
        return Words(words, self._turns, 1) if start == 0 else words


MakeEnds = Callable[..., tuple[ReceiveRing, SendRing]]


@pytest.fixture
def ends() -> Iterator[MakeEnds]:
    """A function that makes both ends of a ring; with `Turns`, the sender runs step by step."""
    made: list[Any] = []

    def make(turns: Turns | None = None) -> tuple[ReceiveRing, SendRing]:
        for each in made:
            each.close()
        receiver = ReceiveRing(7)
        memory: Any = PeerMemory(receiver.memory.fd, receiver.memory.size)
        if turns is not None:
            memory = SteppedMemory(memory, turns)
        sender = SendRing(memory, lambda: None)  # no receiver sleeps
        made[:] = receiver, sender
        return receiver, sender

    yield make
    for each in made:
        each.close()


@pytest.mark.pure  # a name of a compiled module is replaced
@pytest.mark.parametrize("word", [CLOSED, PORT_DOWN])
@pytest.mark.parametrize("armed", [False, True])
def test_completed_messages_are_received(
    ends: MakeEnds,
    rng: random.Random,
    monkeypatch: pytest.MonkeyPatch,
    word: int,
    armed: bool,
) -> None:
    """A receiver that ends must receive each message that was reported as sent.

    RFC 7609, 4.6.1 describes failing RNICs that do not.  If the queue pair ends, TAKEN also tells
    whether the last message was received.
    """
    monkeypatch.setattr(ring, "exchange", Words.exchange)
    partly = 0
    in_doubt = Sent.ENDING if word == CLOSED else Sent.UNKNOWN
    doubts = [0, 0]  # number of results in doubt: message not received, received
    for number in range(SCHEDULES):
        turns = Turns(rng)
        receiver, sender = ends(turns)
        receiver.posted = 10
        receiver.set_posted(10)
        if armed:
            receiver.armed[0] = 1
        done: list[int] = []
        taken: list[PlainCompletion] = []
        receiver_words: Any = receiver.words
        receiver.words = Words(receiver_words, turns, 0)  # type: ignore[assignment]

        def end(receiver: ReceiveRing = receiver, taken: list[PlainCompletion] = taken) -> None:
            receiver.set_posted_finally(word)
            assert receiver.take_untrusted(taken.append)
            receiver.publish_taken()

        def send(sender: SendRing = sender, done: list[int] = done) -> None:
            done.extend(sender.put(b"message %d" % each) for each in range(3))

        turns.run(end, send)
        receiver.words = receiver_words
        sent, unknown = done.count(Sent.DONE), done.count(in_doubt)
        assert done == [
            *[Sent.DONE] * sent, *[in_doubt] * unknown, *[Sent.GONE] * (3 - sent - unknown)
        ]  # fmt: skip
        assert sent <= len(taken) <= sent + unknown <= sent + 1, f"schedule {number}"
        if unknown:
            assert sender.was_taken() == (len(taken) > sent), f"schedule {number}"
        doubts[len(taken) - sent] += unknown
        partly += 0 < sent < 3
    assert partly
    assert min(doubts) > 0


def test_each_receive_that_was_posted_can_be_used(ends: MakeEnds) -> None:
    receiver, sender = ends()
    taken: list[PlainCompletion] = []
    for rounds in (1, 2):
        receiver.posted = 3 * rounds
        receiver.set_posted(receiver.posted)
        assert [sender.put(b"message") for _ in range(4)] == [Sent.DONE] * 3 + [Sent.NOT_READY]
        assert receiver.take_untrusted(taken.append)
        assert len(taken) == receiver.tail == 3 * rounds
    receiver.head[0] += 1
    assert not receiver.take_untrusted(taken.append), "no receive is left for this message"
