"""How long a message takes into a ring and out of it: `python -m benchmarks.words`.

`TRIO_SMC_WORDS` chooses the variant of `trio_smc.rnic.words`.
"""

from __future__ import annotations

import time

from trio_smc.rnic.memory import PeerMemory
from trio_smc.rnic.soft.ring import ReceiveRing, SendRing
from trio_smc.rnic.verbs import RECEIVE_SIZE, PlainCompletion
from trio_smc.rnic.words import VARIANT

MESSAGES = 1000
ROUNDS = 2000


def measure() -> tuple[float, float]:
    """Nanoseconds to put a message into a ring, and to take it out; the least of all rounds."""
    receiver = ReceiveRing(7)
    memory = PeerMemory(receiver.memory.fd, receiver.memory.size)
    sender = SendRing(memory, lambda: None)
    taken: list[PlainCompletion] = []
    data, put = bytes(RECEIVE_SIZE), sender.put
    puts, takes = [], []
    for _ in range(ROUNDS):
        receiver.posted = receiver.tail + MESSAGES
        receiver.set_posted(receiver.posted)
        begun = time.perf_counter_ns()
        for _ in range(MESSAGES):
            put(data)
        between = time.perf_counter_ns()
        receiver.take_untrusted(taken.append)
        takes.append(time.perf_counter_ns() - between)
        puts.append(between - begun)
        assert len(taken) == MESSAGES
        taken.clear()
    sender.close()
    receiver.close()
    return min(puts) / MESSAGES, min(takes) / MESSAGES


if __name__ == "__main__":
    print("{}: put {:.0f} ns, take {:.0f} ns".format(VARIANT, *measure()))
